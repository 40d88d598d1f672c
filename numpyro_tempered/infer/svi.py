"""Batch tempered variational inference by NumPyro's SVI."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from numpyro import handlers
from numpyro.infer import SVI, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.elbo import ELBO

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.checks import check_count, check_number
from numpyro_tempered.core.display import add_repr
from numpyro_tempered.core.labels import Labels, axis_labels
from numpyro_tempered.core.programs import run_program
from numpyro_tempered.core.progress import ProgressBar
from numpyro_tempered.core.result import (
    DataSummary,
    Run,
    TemperedELBO,
    fit_attrs,
    refuse_data,
    summarise_observed,
)
from numpyro_tempered.core.typing import Array, Guide, Model, Numbers, Params, PyTree
from numpyro_tempered.core.verbs import runs_models
from numpyro_tempered.gaussian.descent import Result
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.arguments import check_call, feasible_trace
from numpyro_tempered.handlers.effects import Trace
from numpyro_tempered.handlers.numpyro_private import NumPyroOptim
from numpyro_tempered.handlers.powers import as_operands
from numpyro_tempered.handlers.robust import Divergence, divergences
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.antithetic import OrderedELBO, with_order
from numpyro_tempered.infer.build_guide import build_guide, check_restarts
from numpyro_tempered.infer.elbo import (
    evaluate_elbo,
    gaussian_of_laplace,
    trace_guide,
    trace_model,
)
from numpyro_tempered.infer.evidence import LinearResponse, attrs_of
from numpyro_tempered.infer.fixed_steps import default_optim, judge_losses, run_steps
from numpyro_tempered.infer.guides.gaussian_mixture import (
    NO_DERIVATIVE,
    AutoGaussianMixture,
)
from numpyro_tempered.infer.guides.spike_slab import AutoSpikeAndSlab, exact_gates
from numpyro_tempered.infer.priors import refuse_moving_supports
from numpyro_tempered.infer.settle import Convergence, settle, warn_unless_settled
from numpyro_tempered.report.draws import name_of, one_chain, plain_params

# None, an optimiser of NumPyro's, optax's pair of functions, or a callable from guide to optimiser.
Optim: TypeAlias = (
    NumPyroOptim
    | tuple[Callable[..., PyTree], Callable[..., PyTree]]
    | Callable[[Guide], NumPyroOptim]
    | None
)

_NO_ENUMERATION = """fit_svi evaluates no ELBO with enumerated latents: sum them out by nt.marginalize, and \
leave loss out, or run NumPyro's SVI with TraceEnum_ELBO on nt.temper(model, alpha)."""
# The most steps of the default optimiser, and the steps of another.
NUM_STEPS, NUM_STEPS_GIVEN = 20_000, 3000


@add_repr
class TemperedFit(NamedTuple):
    """A guide fitted to a tempered model by :func:`fit_svi`.

    Attributes:
        model: The tempered model.
        guide: The fitted guide, built on ``model``.
        params: Its parameters.
        alpha: Power on the likelihood; by site where sites differ.
        losses: Negative ELBO at every step, NaN where its gradient was not finite; for ``AutoSpikeAndSlab``
            the negative relaxed objective, which is no bound.
        elbo: The ELBO at the end, with its standard error and its two parts.
        observed: Observed values by site.
        args: The model's positional arguments.
        kwargs: The model's keyword arguments.
        rng_key: Key for what is drawn from the fit afterwards.
        convergence: How near the fit came to the optimum: a :class:`Convergence` of :func:`fit_svi`, a
            :class:`~numpyro_tempered.descent.Result` of :func:`fit_gaussian`, a :class:`LinearResponse` of
            :func:`linear_response`; None of other fits.
        divergences: By site what :class:`robust` has put in the place of the log-likelihood; None if nothing.
        coords: Labels of the data's named axes, such as the columns of a frame; None if there are none.
    """

    model: Model
    guide: Guide
    params: dict[str, Array]
    alpha: float | dict[str, float]
    losses: Numbers
    elbo: TemperedELBO
    observed: dict[str, Array]
    args: tuple
    kwargs: dict[str, object]
    rng_key: Array
    convergence: Convergence | Result | LinearResponse | None = None
    divergences: Mapping[str, Divergence] | None = None
    coords: Labels | None = None

    @property
    def converged(self) -> bool | None:
        """Whether the fit reached its tolerance; None where nothing shows it, see :class:`Convergence`."""
        if self.convergence is None or self.convergence.converged is None:
            return None
        return bool(self.convergence.converged)

    def as_elbo(self) -> TemperedELBO:
        """The ELBO at the end, ``elbo``."""
        return self.elbo

    def summarise_data(self) -> DataSummary:
        """The observed values, for :func:`compare`."""
        return summarise_observed(self.observed)._replace(
            divergences=self.divergences or {}
        )

    def as_run(
        self,
        *data: object,
        num_samples: int = 1000,
        rng_key: Array | None = None,
        **kwargs: object,
    ) -> Run:
        """Draws of the guide, for :func:`to_inference_data`.

        Raises:
            ValueError: If data are passed: a fit holds its own.
        """
        refuse_data(self, data, kwargs)
        key = self.rng_key if rng_key is None else rng_key
        attrs = attrs_of(self.convergence)
        attrs = {
            "algorithm": attrs.pop("algorithm"),
            "guide": name_of(self.guide),
            **fit_attrs(self),
            **attrs,
        }
        return Run(
            # The fitted params of the model, such as the weights of a network, belong to its likelihood.
            model=handlers.substitute(self.model, data=self.params),
            samples=one_chain(sample_posterior(self, key, num_samples)),
            args=self.args,
            kwargs=self.kwargs,
            rng_key=key,
            groups={"variational": {"loss": self.losses, **plain_params(self.params)}},
            attrs=attrs,
            coords=self.coords or {},
        )


@runs_models
def fit_svi(
    rng_key: Array,
    model: Model,
    guide: Callable[[Model], Guide] | Guide,
    *args: object,
    alpha: float | Mapping[str, float] = 1.0,
    local_plates: Collection[str] = (),
    num_steps: int | None = None,
    optim: Optim = None,
    loss: ELBO | None = None,
    tolerance: float = 0.05,
    num_restarts: int = 1,
    num_particles: int = 1000,
    progress_bar: ProgressBar = None,
    **kwargs: object,
) -> TemperedFit:
    r"""Fit a guide to a tempered model until its ELBO has settled, and evaluate that with every constant.

    Maximises :math:`\alpha E_q[\log L] - \mathrm{KL}(q, \pi)` by stochastic gradients. An ``AutoNormal``,
    ``AutoDiagonalNormal``, ``AutoMultivariateNormal`` or Student's t of at most 500 latents starts at the mode of
    the tempered posterior that Newton's method finds from the guide's ``init_loc_fn``, in coordinates scaled by
    the curvature there: raw units are no harder than standardised ones. Where the density has no mode, as in
    centred hierarchies, and for other guides, the start is the guide's own. From there Adam takes steps of one
    size until the loss falls no more, then halves the size, and the averages of its iterates are compared until
    the ELBO is within ``tolerance`` of its optimum, by estimate. A call with other data of the same shapes or
    another ``alpha``, but for 0 and 1, compiles nothing.

    Args:
        rng_key: Key of the fit.
        model: NumPyro model; one that is tempered already is tempered again, and powers multiply.
        guide: From tempered model to guide: an AutoGuide class such as ``AutoNormal``, or any callable; for a
            hand-written guide ``lambda model: my_guide``.
        *args: Arguments of the model.
        alpha: Power on the likelihood, at least 0, or powers by site; see :class:`temper`.
        local_plates: Names of the plates whose continuous latents are local, scaled in model and guide. The
            ``kl`` of the ELBO then counts theirs times ``alpha``.
        num_steps: The most steps, 20,000 by default: a fit ends where it has converged. An ``optim`` takes all of
            its own, 3,000 by default.
        optim: NumPyro or optax optimiser, or a callable from the guide to one, such as ``nt.optim.IVON``, for a
            start and steps of your own: those of SVI, with no more evidence than whether the loss still fell.
            ``AutoSpikeAndSlab``, and guides and models that keep a state, take
            Adam with step size 0.05 for three fifths of the steps and falling to 0.0005 over the rest.
        loss: ELBO of NumPyro to optimise; by default that of ``Trace_ELBO`` by antithetic pairs of draws,
            ``TraceMeanField_ELBO()`` for ``AutoSpikeAndSlab``.
        tolerance: In nats, on the estimated distance of the ELBO from its optimum.
        num_restarts: Fits from different starts, of which the best is returned: for models with several optima,
            which ``convergence.optima`` lists.
        num_particles: Draws for the ELBO reported at the end.
        progress_bar: Whether to show the steps, by tqdm; None: where the fit takes some seconds, but not where
            ``SVI.run`` makes it, which is slower with a bar.
        **kwargs: Keyword arguments of the model.

    Returns:
        A :class:`TemperedFit`, with its :class:`Convergence`. A fit that has not converged warns, by a
        :class:`ConvergenceWarning`: its ELBO says little about its model, and :func:`compare` refuses it.

    Raises:
        ValueError: If ``alpha`` is out of range, the model observes nothing, the guide is built on another
            model than the tempered one while ``alpha`` is not 1, an option is out of range, or no gradient is
            finite.
        TypeError: If the factory does not return a guide.

    References:
        AR; YPB. Dhaka20 and Welandawe22 for the stopping rule.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> fit = nt.fit_svi(jax.random.key(0), model, AutoNormal, jnp.ones(6), alpha=0.5)
        >>> print(f"{fit.params['theta_auto_scale']:.1f}")  # 1 / sqrt(1 + 6 / 2)
        0.5
    """
    alpha, coords = as_operands(alpha), axis_labels((args, kwargs))
    options = {
        "alpha": alpha,
        "num_steps": num_steps,
        "tolerance": tolerance,
        "num_restarts": num_restarts,
    }
    args, kwargs = check_call(fit_svi, rng_key, model, guide, args, kwargs, **options)
    fit_key, elbo_key, later_key = jax.random.split(rng_key, 3)
    tempered = temper(model, alpha=alpha, local_plates=local_plates)
    instance = build_guide(guide, model, tempered, alpha)
    if isinstance(instance, AutoGaussianMixture):
        raise ValueError(NO_DERIVATIVE)
    check_count(num_particles, "num_particles", 2)
    check_number(tolerance, "tolerance", "(0, inf)")
    _check_steps(guide, optim, num_steps, num_restarts)
    if isinstance(loss, TraceEnum_ELBO):
        raise ValueError(_NO_ENUMERATION)
    fitted, loss = None, with_order(loss)
    is_auto = isinstance(instance, AutoGuide)
    is_smooth = not isinstance(instance, AutoSpikeAndSlab)
    if is_smooth and (optim is None or is_auto):
        trace = feasible_trace(tempered, args, kwargs)
        if is_auto:
            refuse_moving_supports(tempered, trace, args, kwargs)
        _check_data(likelihood.likelihood_sites(trace))
    if is_smooth and optim is None:
        guides = iter([instance])
        fitted = settle(
            fit_key,
            tempered,
            lambda: next(guides, None) or build_guide(guide, model, tempered, alpha),
            args,
            kwargs,
            loss=loss,
            num_steps=NUM_STEPS if num_steps is None else num_steps,
            num_restarts=num_restarts,
            tolerance=tolerance,
            progress_bar=progress_bar,
        )
    if fitted is None:
        steps = NUM_STEPS_GIVEN if num_steps is None else num_steps
        optimiser = (
            optim(instance) if callable(optim) else optim or default_optim(steps)
        )
        svi = SVI(
            tempered, tempered.guide(instance), optimiser, _loss_for(instance, loss)
        )
        end = run_steps(svi, fit_key, steps, args, kwargs, bool(progress_bar))
        fitted = instance, *end, judge_losses(end[1], optim)
    instance, params, losses, evidence = fitted
    keys = (elbo_key, later_key)
    fit = finish(
        keys,
        tempered,
        instance,
        params,
        losses,
        args,
        kwargs=kwargs,
        num_particles=num_particles,
    )
    warn_unless_settled(evidence, tolerance)
    return fit._replace(convergence=evidence, coords=coords or None)


def _check_steps(
    guide: object, optim: Optim, num_steps: int | None, num_restarts: int
) -> None:
    """Refuse numbers of steps and restarts that are none, and restarts that could not start elsewhere."""
    if num_steps is not None:
        check_count(num_steps, "num_steps", 1)
    check_restarts(guide, num_restarts)
    if num_restarts > 1 and optim is not None:
        raise ValueError(
            "num_restarts needs the default optimiser: leave optim out, or call fit_svi once a key."
        )


def _check_data(sites: Trace) -> None:
    """Refuse a model that observes nothing, or a value that broadcasts against its distribution."""
    if not sites:
        raise ValueError(
            "the model has no observed site: pass the data that it conditions on."
        )
    for site in sites.values():
        likelihood.check_values(site)


def finish(
    rng_keys: tuple[Array, Array],
    tempered: temper,
    guide: Guide,
    params: Params,
    losses: Numbers,
    args: tuple,
    *,
    kwargs: dict,
    num_particles: int,
    known_elbo: Callable[[object], TemperedELBO | None] | None = None,
) -> TemperedFit:
    """The fit of a guide with these parameters: checked, and its ELBO evaluated.

    ``known_elbo`` is the ELBO for the power of the likelihood, where it is known without draws.

    Raises:
        ValueError: If a parameter is not finite, the model observes nothing, or values and distribution of a site
            broadcast against each other.
    """
    elbo_key, later_key = rng_keys
    guide = exact_gates(guide)
    if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            "the fit ended in parameters that are not finite: check the data for NaN, or take a smaller "
            "step size."
        )
    draw = trace_guide(elbo_key, guide, params, args, kwargs)
    trace = trace_model(elbo_key, tempered, draw, params, args, kwargs)
    _check_data(likelihood.likelihood_sites(trace))
    alpha, observed = likelihood.common_alpha(trace), likelihood.observed_values(trace)
    elbo = None if known_elbo is None else known_elbo(alpha)
    if elbo is None:
        gaussian, evaluated = gaussian_of_laplace(
            guide, tempered, params, elbo_key, args, kwargs
        )
        gaussian = tempered.guide(gaussian)
        elbo = evaluate_elbo(
            elbo_key,
            tempered,
            gaussian,
            evaluated,
            args,
            kwargs,
            num_particles=num_particles,
            trace=trace,
        )
    fit = TemperedFit(
        tempered, guide, params, alpha, losses, elbo, observed, args, kwargs, later_key
    )
    return fit._replace(divergences=divergences(trace) or None)


def _loss_for(guide: Guide, loss: ELBO | None) -> ELBO:
    """The loss given, or the default for this guide.

    Raises:
        ValueError: If it would leave the gates of an AutoSpikeAndSlab, or their temperature, where they are.
    """
    if not isinstance(guide, AutoSpikeAndSlab):
        return OrderedELBO() if loss is None else loss
    if guide.temperature is None and not isinstance(loss, TraceGraph_ELBO):
        raise ValueError(
            "this AutoSpikeAndSlab has exact gates, which have no derivative: give it a temperature to fit it, "
            "or loss=TraceGraph_ELBO()."
        )
    if callable(guide.temperature) and loss is not None and loss.num_particles != 1:
        raise ValueError(
            f"loss has num_particles = {loss.num_particles}, for which NumPyro does not count the steps of a "
            "temperature schedule: give AutoSpikeAndSlab a number for its temperature, or take one particle."
        )
    return TraceMeanField_ELBO() if loss is None else loss


def sample_posterior(
    fit: TemperedFit, rng_key: Array, num_samples: int
) -> dict[str, Array]:
    """Draws of the latent sites from a fit, ``(num_samples, ...)`` each."""
    guide, params, args, kwargs = fit.guide, fit.params, fit.args, fit.kwargs
    draw = trace_guide(rng_key, guide, params, args, kwargs)
    names = likelihood.latent_sites(
        trace_model(rng_key, fit.model, draw, params, args, kwargs)
    )
    if isinstance(guide, AutoGuide):

        def of_guide(key: Array, params: Params) -> Params:
            return guide.sample_posterior(
                key, params, *args, sample_shape=(num_samples,), **kwargs
            )

        draws = run_program(of_guide, rng_key, params)
    else:

        def one(key: Array) -> Params:
            sites = trace_guide(key, guide, params, args, kwargs)
            return {name: sites[name]["value"] for name in names}

        draws = map_batches(one, jax.random.split(rng_key, num_samples), 64)
    return {name: draws[name] for name in names}
