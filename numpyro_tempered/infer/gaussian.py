"""Batch Gaussian variational inference on a NumPyro model."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    Guide,
    Model,
    Params,
    TemperedELBO,
    check_count,
    runs_models,
    warn_caller,
)
from numpyro_tempered.gaussian.descent import Method, Result, minimise
from numpyro_tempered.gaussian.descent.minimise import RUNNING
from numpyro_tempered.gaussian.expectations import Expectation
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.handlers.arguments import check_call
from numpyro_tempered.handlers.powers import as_operands
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.flat_gaussian import read_guide
from numpyro_tempered.infer.free_energy import FreeEnergy, model_objective
from numpyro_tempered.infer.gaussian_mixture import NUM_NODES, fit_mixture
from numpyro_tempered.infer.set_up import build_guide, check_restarts
from numpyro_tempered.infer.settle import ConvergenceWarning, distinct
from numpyro_tempered.infer.svi import TemperedFit, finish
from numpyro_tempered.infer.tempered_fit import with_names

T = TypeVar("T")
# A run with its guide and the parameters at its end.
_Run: TypeAlias = tuple[Result, Guide, Params]
# Optima whose ELBOs differ by more nats than this are two.
APART = 0.1
# Draws for the ELBO that is reported.
NUM_PARTICLES = 1000


@runs_models
def fit_gaussian(
    rng_key: Array,
    model: Model,
    guide: Callable[[Model], Guide] | Guide,
    *args: object,
    alpha: float | Mapping[str, float] = 1.0,
    method: Method | None = None,
    expectation: Expectation | None = None,
    num_components: int = 1,
    tolerance: float | None = None,
    max_evaluations: int | None = None,
    num_draws: int | None = None,
    num_restarts: int = 1,
    num_particles: int = NUM_PARTICLES,
    **kwargs: object,
) -> TemperedFit:
    r"""Fit a Gaussian guide to a tempered model by natural gradients, to a stated stationarity.

    Maximises :math:`\alpha E_q[\log L] - \mathrm{KL}(q, \pi)`, as :func:`fit_svi` does, in tens of evaluations of
    the whole data and with a stopping rule instead of thousands of stochastic steps and a guess. The derivatives
    E_q[∇f] and E_q[∇²f] are exact for Normal and Laplace priors with fixed parameters, exact to quadrature for
    other priors of scalars, such as those of scales, and for a likelihood with
    ``expectation=gauss_hermite(predictor=...)`` whose predictor is affine in the unconstrained parameters. What
    the likelihood depends on besides, as on a latent scale, is integrated by a product rule for two coordinates,
    by draws for more. Everything else is averaged over the same ``num_draws`` draws at each q: the optimum found
    is then that of the draws, off the true one by about a standard deviation over the root of ``num_draws`` where
    f is far from quadratic, by nothing where it is quadratic. The reported ELBO is the one maximised where
    quadrature knows it, with a standard error of 0, and is evaluated with other draws elsewhere.

    A call on the shapes of an earlier one compiles nothing anew, whatever the data and the power,
    but for powers of exactly 0 and 1, which have programs of their own.

    With ``num_components`` the family is a mixture of Gaussians. It starts at the modes that Newton's method
    reaches from draws of the prior and around 0, heaviest first, and takes Bures-Wasserstein steps of all
    components with mirror descent of their weights (:func:`.descent.minimise_mixture`). Every
    expectation is by draws. A posterior with more modes than components warns.

    The exact Hessian of the draws takes d Hessian-vector products each, for d up to 1000. A model of many latents
    is better off with :func:`fit_svi`.

    Args:
        rng_key: Key of the fit.
        model: NumPyro model; one that is tempered already is tempered again, and powers multiply.
        guide: ``AutoMultivariateNormal`` (full covariance), ``AutoDiagonalNormal`` or ``AutoNormal``, or a
            callable from model to one of these: the family, and by its ``init_loc_fn`` and ``init_scale`` the
            start.
        *args: Arguments of the model.
        alpha: Power on the likelihood, at least 0, or powers by site; see :class:`temper`.
        method: :func:`.descent.natural_gradient` with damping 0.5 by default, or
            :func:`.descent.forward_backward`.
        expectation: Of the likelihood: ``gauss_hermite(predictor="eta")`` where the model names its predictor;
            ``monte_carlo(predictor="eta")`` for Gauss-Newton curvature. By draws where it is left out.
        num_components: Gaussians in the posterior: more than one for several modes, or a form that one Gaussian
            does not have. The guide then gives the form of the components, and the fit has an
            :class:`~numpyro_tempered.guides.AutoGaussianMixture` of them.
        tolerance: On the stationarity, an estimate of the KL gap to the best Gaussian, in nats: 1e-6 by default,
            1e-4 for mixtures, which also end where each evaluation raises the ELBO by less.
        max_evaluations: Of E_q[f] and its derivatives: 200 by default, 1000 for mixtures.
        num_draws: Antithetic draws for what has no closed form; even. 64 by default; with ``num_components``
            quasi-random ones, 256 or 8 for each latent.
        num_restarts: Fits from different starts, those of the guide by other keys, of which the best is returned:
            for models with several optima, which ``convergence.optima`` lists. A start without a finite ELBO is
            left out, unless all are.
        num_particles: Draws for the ELBO reported at the end, where the one maximised is of draws or of a
            linearised predictor, or where data differ in their powers or have none.
        **kwargs: Keyword arguments of the model.

    Returns:
        A :class:`.TemperedFit`, as of :func:`fit_svi`: for ``compare``, ``to_inference_data`` and the guide's own
        methods. Its ``convergence`` is the :class:`.descent.Result` of the run, with the
        ELBO and the stationarity at each evaluation. A run that does not converge warns and says why; its q is a
        Gaussian all the same. A run whose maximised ELBO is not that of fresh draws warns too, as that of a
        linearised predictor may.

    Raises:
        TypeError: If the guide is another, or the expectation one of a bare loss.
        ValueError: If an argument is out of range; if the model has params, discrete or local latents,
            subsamples, or observes nothing; if the ELBO is not finite at the start, as with a NaN in the data.

    References:
        KL17; Lam22, Diao23, PetitTalamon25; AR and YPB for the tempered objective.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoMultivariateNormal
        >>> import numpyro_tempered as nt
        >>> def model(x, y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        ...     eta = numpyro.deterministic("eta", x @ theta)
        ...     numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)
        >>> x, y = jnp.array([[1.0, 0.5], [0.2, -1.0], [1.0, 1.0]]), jnp.array([1, 0, 1])
        >>> fit = nt.fit_gaussian(
        ...     jax.random.key(0), model, AutoMultivariateNormal, x, y,
        ...     alpha=0.5, expectation=nt.expectations.gauss_hermite(predictor="eta"),
        ... )
        >>> bool(fit.convergence.converged), int(fit.convergence.num_evaluations) < 30
        (True, True)
    """
    alpha = as_operands(alpha)
    call = args, kwargs
    options = {
        "alpha": alpha,
        "tolerance": tolerance,
        "max_evaluations": max_evaluations,
        "num_draws": num_draws,
    }
    options |= {
        "num_components": num_components,
        "num_restarts": num_restarts,
        "num_particles": num_particles,
    }
    args, kwargs = check_call(
        fit_gaussian, rng_key, model, guide, args, kwargs, **options
    )
    guide_key, run_key, elbo_key, later_key = jax.random.split(rng_key, 4)
    check_count(num_particles, "num_particles", 2)
    tempered = temper(model, alpha=alpha)
    check_restarts(guide, num_restarts)
    guide_keys = [
        guide_key,
        *(jax.random.split(guide_key, num_restarts - 1) if num_restarts > 1 else ()),
    ]
    guides = [(key, build_guide(guide, model, tempered, alpha)) for key in guide_keys]
    is_single = check_count(num_components, "num_components", 1) == 1
    usual = _ONE_GAUSSIAN if is_single else _MIXTURE
    limits = _Limits(
        usual.tolerance if tolerance is None else tolerance,
        usual.max_evaluations if max_evaluations is None else max_evaluations,
        usual.num_draws if num_draws is None else num_draws,
    )
    energy = None
    if is_single:
        runs, energy = _gaussians(
            run_key, tempered, guides, (args, kwargs), (method, expectation), limits
        )
    else:
        _refuse(num_components, method=method, expectation=expectation)
        runs = _each(
            lambda keyed: fit_mixture(
                run_key,
                tempered,
                keyed,
                (args, kwargs),
                num_components,
                **limits._asdict(),
            ),
            guides,
        )
    result, instance, params = max(runs, key=lambda run: float(run[0].elbo))
    result = result._replace(
        optima=distinct([float(run[0].elbo) for run in runs], APART)
    )
    used = int(result.num_evaluations)
    # On the host, as a slice on the device compiles for each number of evaluations.
    result = result._replace(
        trace=jax.tree.map(lambda c: np.asarray(c)[:used], result.trace)
    )
    by_draws = energy is None or energy.objective.needs_key
    warn_unless_converged(result, limits.tolerance, by_draws=by_draws)
    losses = -np.asarray(result.trace.elbo)[np.asarray(result.trace.accepted)]
    fit = finish(
        (elbo_key, later_key),
        tempered,
        instance,
        params,
        losses,
        args,
        kwargs=kwargs,
        num_particles=num_particles,
        known_elbo=energy
        and partial(quadrature_elbo, result.elbo, result.posterior, energy),
    )
    draws = (limits.num_draws or NUM_NODES) if by_draws else None
    if warn_of_mismatch(
        float(result.elbo),
        fit,
        draws,
        linearised=energy is not None and energy.linearised,
    ):
        # What was maximised is not the ELBO, wherever it is stationary.
        result = result._replace(converged=jnp.zeros_like(result.converged))
    return with_names(fit._replace(convergence=result), fit_gaussian, model, call)


class _Limits(NamedTuple):
    """Where runs stop, and by how many draws."""

    tolerance: float
    max_evaluations: int
    num_draws: int | None


_ONE_GAUSSIAN, _MIXTURE = _Limits(1e-6, 200, 64), _Limits(1e-4, 1000, None)


def _gaussians(
    rng_key: Array,
    tempered: temper,
    guides: list[tuple[Array, Guide]],
    data: tuple[tuple, dict],
    way: tuple[Method | None, Expectation | None],
    limits: _Limits,
) -> tuple[list[_Run], FreeEnergy]:
    """The runs of one Gaussian from each start that has an ELBO, and what they minimised."""
    method, expectation = way
    if (num_draws := check_count(limits.num_draws or 0, "num_draws", 2)) % 2:
        raise ValueError(f"num_draws must be even, got {num_draws}.")
    starts = [read_guide(key, each, *data) for key, each in guides]
    first, latents, _ = starts[0]
    energy = model_objective(
        tempered, latents, first, *data, expectation=expectation, num_draws=num_draws
    )

    # The same draws for all: they compare.
    def run(start: tuple) -> _Run:
        (_, instance), (q, _, to_params) = start
        result = minimise(
            energy.objective,
            q,
            method=method,
            tolerance=limits.tolerance,
            max_evaluations=limits.max_evaluations,
            rng_key=rng_key,
        )
        return result, instance, to_params(result.posterior)

    return _each(run, list(zip(guides, starts, strict=True))), energy


def _each(run: Callable[[T], _Run], starts: list[T]) -> list[_Run]:
    """The runs from all starts, less those of many that have no ELBO, as where the likelihood is 0.

    Raises:
        ValueError: If none has one.
    """
    runs, failures = [], []
    for start in starts:
        try:
            runs.append(run(start))
        except ValueError as error:
            failures.append(error)
    if not runs:
        raise failures[0]
    return runs


def _refuse(num_components: int, **options: object) -> None:
    """Refuse what a mixture has no use for.

    Raises:
        ValueError: With the option.
    """
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name} is of a single Gaussian, got num_components = {num_components}: mixtures take "
                "Bures-Wasserstein steps by draws. Leave it out."
            )


def quadrature_elbo(
    elbo: Array, q: Gaussian, energy: FreeEnergy, alpha: object
) -> TemperedELBO | None:
    """The ELBO of q by the objective, with its parts where it is known without draws; None elsewhere.

    The untempered expected log-likelihood follows from the tempered one where all data have one power above 0.
    """
    if energy.kl is None or not (
        energy.objective.exact and isinstance(alpha, float) and alpha > 0.0
    ):
        return None
    value, kl = float(elbo), energy.kl(q)
    return TemperedELBO(value, 0.0, (value + kl) / alpha, kl)


def warn_unless_converged(result: Result, tolerance: float, *, by_draws: bool) -> None:
    """Warn of a run that ended before it was stationary, with the reason and what helps against it."""
    if not bool(result.converged):
        advice = "a larger tolerance (float32 resolves about 1e-7 of the ELBO), or another start"
        advice = (
            f"more max_evaluations, {advice}"
            if int(result.status) == RUNNING
            else advice
        )
        advice = f"more num_draws, {advice}" if by_draws else advice
        warn_caller(
            f"the fit ended after {int(result.num_evaluations)} evaluations with a stationarity of "
            f"{float(result.stationarity):.2g} nats, above the tolerance {tolerance:.2g}: {result.reason}. "
            f"Take {advice}.",
            ConvergenceWarning,
        )


def warn_of_mismatch(
    elbo: float, fit: TemperedFit, num_draws: int | None, linearised: bool
) -> bool:
    """Warn where the maximised ELBO is not that of fresh draws; whether it did."""
    value, se = fit.elbo.value, fit.elbo.se
    if linearised:
        # A Gaussian that is wrong has heavy tails of log-ratios: a large standard error excuses nothing.
        mismatch = abs(elbo - value) > 0.5 + 2.0 * min(se, 0.25) or se > 0.5
        advice = (
            "The predictor is not affine in the latents, and its linearisation at the mean misleads: take "
            "monte_carlo(predictor=..., num_particles=64, antithetic=True)."
        )
    else:
        # The maximised value has the noise of its draws, and is the best of them.
        noise = (
            0.0
            if num_draws is None
            else 1.0 + 5.0 * se * np.sqrt(NUM_PARTICLES / num_draws)
        )
        mismatch = abs(elbo - value) > 0.5 + 5.0 * se + noise
        nodes = (
            "more num_nodes of gauss_hermite" if num_draws is None else "more num_draws"
        )
        advice = f"Take {nodes}, or another start."
    mismatch = mismatch or not (math.isfinite(value) and math.isfinite(se))
    if mismatch:
        warn_caller(
            f"the ELBO that was maximised is {elbo:.4g}, and {value:.4g} ± {se:.2g} by fresh draws. {advice}",
            ConvergenceWarning,
        )
    return mismatch
