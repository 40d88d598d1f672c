"""Batch tempered variational inference by NumPyro's SVI."""

from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import jax
import numpy as np
from numpyro.infer import SVI, TraceEnum_ELBO, TraceGraph_ELBO, TraceMeanField_ELBO
from numpyro.infer.elbo import ELBO

from numpyro_tempered.core import (
    Array,
    Guide,
    Model,
    Numbers,
    Params,
    ProgressBar,
    PyTree,
    TemperedELBO,
    check_count,
    check_number,
    runs_models,
)
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.arguments import check_call, feasible_trace
from numpyro_tempered.handlers.numpyro_private import NumPyroOptim
from numpyro_tempered.handlers.powers import as_operands
from numpyro_tempered.handlers.requirements import check_data
from numpyro_tempered.handlers.robust import divergences
from numpyro_tempered.handlers.target import refuse_moving_supports
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.antithetic import OrderedELBO, with_order
from numpyro_tempered.infer.elbo import (
    evaluate_elbo,
    gaussian_of_laplace,
    trace_guide,
    trace_model,
)
from numpyro_tempered.infer.fixed_steps import default_optim, judge_losses, run_steps
from numpyro_tempered.infer.guide_laws import has_gates, is_auto, law_of
from numpyro_tempered.infer.guides.gaussian_mixture import NO_DERIVATIVE
from numpyro_tempered.infer.set_up import build_guide, check_restarts
from numpyro_tempered.infer.settle import settle, warn_unless_settled
from numpyro_tempered.infer.tempered_fit import TemperedFit, with_names

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
        A :class:`.TemperedFit`, with its :class:`.Convergence`. A fit that has not converged warns, by a
        :class:`.ConvergenceWarning`: its ELBO says little about its model, and :func:`compare` refuses it.

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
    alpha = as_operands(alpha)
    call = args, kwargs
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
    if law_of(instance).is_mixture:
        raise ValueError(NO_DERIVATIVE)
    check_count(num_particles, "num_particles", 2)
    check_number(tolerance, "tolerance", "(0, inf)")
    _check_steps(guide, optim, num_steps, num_restarts)
    if isinstance(loss, TraceEnum_ELBO):
        raise ValueError(_NO_ENUMERATION)
    fitted, loss = None, with_order(loss)
    is_smooth = not has_gates(instance)
    if is_smooth and (optim is None or is_auto(instance)):
        trace = feasible_trace(tempered, args, kwargs)
        check_data(trace)
        if is_auto(instance):
            refuse_moving_supports(tempered, trace, args, kwargs)
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
    return with_names(fit._replace(convergence=evidence), fit_svi, model, call)


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
    guide = guide.hard() if has_gates(guide) else guide
    if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            "the fit ended in parameters that are not finite: check the data for NaN, or take a smaller "
            "step size."
        )
    draw = trace_guide(elbo_key, guide, params, args, kwargs)
    trace = trace_model(elbo_key, tempered, draw, params, args, kwargs)
    check_data(trace)
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
    if not has_gates(guide):
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
