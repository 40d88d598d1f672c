"""Whether a fit is near its posterior, and how near."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    axis_labels,
    check_count,
    doubles,
    key_first,
    runs_models,
)
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.likelihood import plain_arrays
from numpyro_tempered.handlers.target import Target, check_density
from numpyro_tempered.infer.tempered_fit import TemperedFit
from numpyro_tempered.report.arviz import Coords, Dims, versions
from numpyro_tempered.report.draws import bind
from numpyro_tempered.select.check.bars import (
    covariances,
    error_bars,
    wasserstein_bounds,
)
from numpyro_tempered.select.check.divergence import divergences
from numpyro_tempered.select.check.missed import missed_modes
from numpyro_tempered.select.check.moments import bound_mean
from numpyro_tempered.select.check.numbers import number_labels
from numpyro_tempered.select.check.reference import (
    MAX_DIM,
    MAX_PARETO_K,
    Reference,
    cover,
    curvature,
    has_chi_square,
    is_near,
    of_draws,
)
from numpyro_tempered.select.check.result import (
    FitCheck,
    advise,
    advise_of_modes,
    to_arviz,
)
from numpyro_tempered.select.check.target import (
    Draws,
    draws_of_fit,
    draws_of_values,
    require_latents,
)

# Above it no moment of the weights can be told from draws; with few draws earlier.
UNRELIABLE = 0.7
# The root of chi-square is the bound on a mean in standard deviations: above it that is no answer.
MAX_CHI = 10.0
# The most latent numbers whose covariances are bounded one by one.
MAX_COVARIANCES = 100


@key_first
@runs_models
def check_fit(
    rng_key: Array,
    fit: object,
    *data: object,
    num_draws: int = 4000,
    reference: TemperedFit | str | None = "auto",
    log_density: ArrayLike | None = None,
    coords: Coords | None = None,
    dims: Dims | None = None,
    **kwargs: object,
) -> FitCheck:
    r"""How far the means, standard deviations and covariances of a fit may be from its tempered posterior.

    Draws of the fit q have importance weights :math:`w = L^\alpha \pi / q`. Their ELBO and CUBO_2 enclose the
    log evidence, so that :math:`D_2(p \| q) \le 2 (\mathrm{CUBO}_2 - \mathrm{ELBO})` and, with
    :math:`\chi^2 = e^{D_2} - 1`,

    .. math:: |E_p f - E_q f| \le \mathrm{sd}_q(f)\, \chi, \qquad
              |\mathrm{Var}_p f - \mathrm{Var}_q f| \le \mathrm{sd}_q\big((f - E_q f)^2\big)\, \chi
              + \mathrm{sd}_q(f)^2 \chi^2

    for the number f of each latent, in its units. Where :math:`E_q w^2` is infinite, as of a mean-field fit of a
    posterior with a correlation of 1/2 and above, no such bound exists. Then the draws are of a Gaussian or a
    Student's t that covers the posterior, the bounds are from that one, and the difference of it and the fit is
    added.

    What is called a bound holds given the expectations that it consists of, which are averages over draws; what
    is called corrected is an estimate, by Pareto-smoothed weights, with its Monte Carlo standard error. Where the
    Pareto k of the weights exceeds .7 there is neither.

    Args:
        rng_key: For the draws.
        fit: A posterior with a density: a fit of any kind, a selection, ``online.posterior(state)``; or a
            dictionary of draws ``(S, ...)`` by site, with ``log_density``.
        *data: The data that it was fitted to, where it does not hold them, as for :func:`to_inference_data`; of
            draws the tempered model, then its arguments.
        num_draws: Draws of each distribution, at least 100.
        reference: What to draw from where the fit does not cover the posterior: ``"auto"`` for distributions
            that are looked for where they are needed, in at most 200 dimensions; None for nothing; or another fit
            of the model, such as one with full covariance, which is then always drawn from.
        log_density: Of plain draws the log of the density that they are of, at each, shape ``(S,)``, in nats.
        coords: Labels by dimension, for the names of the numbers.
        dims: Names of the dimensions by site.
        **kwargs: Of an online run or draws, keyword arguments of the model; of a mixture ``sample_weight``.

    Returns:
        A :class:`.FitCheck`. Its table has a row for each number of each latent site, with columns

        - ``mean``, ``sd``: of the fit; exact where the guide is Gaussian in unconstrained coordinates and the
          number a function of one of these, and of the coordinates of a Student's t, else by draws; NaN of an
          exponential that nothing can integrate, as of any under a Student's t;
        - ``mean_bound``, ``sd_bound``: bounds on their errors; ``sd_bound`` is NaN, as ``w2_bound``, where draws
          are of a Student's t of at most 4 degrees of freedom, which has no fourth moment;
        - ``corrected_mean``, ``corrected_sd``, and ``corrected_mean_se``, ``corrected_sd_se``; NaN where weighted
          squares have too heavy a tail (Pareto k above .5 for an error, above .7 for a value).

        The group ``check_covariance`` has the covariances of up to 100 numbers with bounds on their errors.

    Raises:
        TypeError: If ``fit`` has no density to draw from.
        ValueError: If data are missing or do not belong to it, a latent is discrete or local or a point, a plate
            holds a part of its data, an option is out of range, or the joint density is NaN.

    References:
        Huggins, Kasprzak, Campbell, Broderick, *Validated variational inference via practical posterior error
        bounds*, AISTATS 2020; Yao, Vehtari, Simpson, Gelman, *Yes, but did it work?*, ICML 2018; Vehtari,
        Simpson, Gelman, Yao, Gabry, *Pareto smoothed importance sampling*, JMLR 2024.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> fit = nt.fit_svi(jax.random.key(0), model, AutoNormal, jnp.ones(6), alpha=0.5)
        >>> check = nt.check_fit(jax.random.key(1), fit)
        >>> check.status, bool(nt.table(check)["mean_bound"].item() < 0.1)
        ('bounded', True)
    """
    check_count(num_draws, "num_draws", 100)
    own_key, other_key = jax.random.split(rng_key)
    modes_key = jax.random.fold_in(other_key, 1)
    labels = axis_labels((data, kwargs))
    is_symmetric = False
    if isinstance(fit, Mapping):
        target, draws = _of_values(own_key, fit, data, kwargs, log_density)
        alpha: float | dict[str, float] = likelihood.common_alpha(target.trace)
    else:
        if log_density is not None:
            raise ValueError(
                "log_density is of plain draws, and this result knows the density of its own."
            )
        bound = bind(fit, data, kwargs, rng_key=own_key)
        if not isinstance(bound, TemperedFit):
            raise TypeError(
                f"check_fit weighs draws by their density, which a {type(fit).__name__} does not have: pass a "
                "fit, or draws with log_density=."
            )
        labels |= bound.coords or {}
        target, is_symmetric = (
            bound.target,
            getattr(bound.source, "is_symmetric", False),
        )
        check_density(target, smooth=True)
        draws = draws_of_fit(own_key, bound, target, num_draws)
        alpha = likelihood.common_alpha(target.trace)
    labels |= {dim: np.asarray(values) for dim, values in (coords or {}).items()}
    names = number_labels(target.trace, labels, dims or {})
    of_fit = Reference("fit", draws, *divergences(draws.log_ratios))
    base, covers = _base(other_key, of_fit, target, reference)
    status = _status(base, covers)
    missed = None
    # Other modes of a mixture are its components in another order, of PCA its factors with other signs.
    if draws.flat.shape[1] <= MAX_DIM and not is_symmetric:
        missed = missed_modes(
            modes_key, base.draws, base.divergences.log_evidence, target
        )
        status = status if missed is None else "unreliable"
    bars = error_bars(draws, base, status)
    pairs = covariances(draws, base, status) if len(names) <= MAX_COVARIANCES else {}
    w1_bound, w2_bound = (
        wasserstein_bounds(draws, base) if status == "bounded" else (math.nan, math.nan)
    )
    is_alone = base.name == "fit" and (
        reference is None or draws.flat.shape[1] > MAX_DIM
    )
    advice = advise(status, of_fit, base, bars, names, is_alone=is_alone)
    if missed is not None:
        advice = advise_of_modes(missed, names)
    attrs = {
        "alpha": alpha,
        "status": status,
        "advice": advice,
        "reference": base.name,
        "num_draws": len(draws.log_ratios),
        "w1_bound": w1_bound,
        "w2_bound": w2_bound,
        **of_fit.divergences._asdict(),
        **{
            f"reference_{name}": value
            for name, value in base.divergences._asdict().items()
        },
        **versions(),
    }
    return FitCheck(
        status=status,
        advice=advice,
        divergences=of_fit.divergences,
        w1_bound=w1_bound,
        w2_bound=w2_bound,
        reference=base.name,
        reference_divergences=base.divergences,
        alpha=alpha,
        num_draws=len(draws.log_ratios),
        data=to_arviz(bars, pairs, names, attrs),
    )


def _of_values(
    rng_key: Array,
    values: Mapping[str, ArrayLike],
    data: tuple,
    kwargs: dict,
    log_density: ArrayLike | None,
) -> tuple[Target, Draws]:
    """Plain draws with their posterior.

    Raises:
        TypeError: If the model is missing.
        ValueError: If the densities are missing or not as many as the draws, or the draws lack a site.
    """
    if not data or not callable(data[0]):
        raise TypeError(
            "draws are check_fit(key, draws, model, *args, log_density=...): the tempered model is missing."
        )
    arrays = {name: jnp.asarray(value) for name, value in values.items()}
    shapes = {name: np.shape(value) for name, value in values.items()}
    densities = doubles(math.nan if log_density is None else log_density)
    if (
        densities.ndim != 1
        or len(densities) < 100
        or {shape[:1] for shape in shapes.values()} != {densities.shape}
    ):
        raise ValueError(
            "draws need log_density, the log of the density that they are of at each, shape (S,), and S values "
            f"of each site, at least 100; got log_density of shape {densities.shape} and draws of {shapes}."
        )
    model, args = data[0], data[1:]
    args, kwargs = plain_arrays((args, kwargs))
    first = {name: value[0] for name, value in arrays.items()}
    target = Target(model, args, kwargs, rng_key, first)
    check_density(target, first)
    return target, draws_of_values(arrays, densities, target)


def _base(
    rng_key: Array,
    of_fit: Reference,
    target: Target,
    reference: TemperedFit | str | None,
) -> tuple[Reference, bool]:
    """What the bounds are from, and whether it covers the posterior as far as its curvature says.

    Raises:
        ValueError: If the reference is none, or of other latents.
    """
    draws = of_fit.draws
    hessian = None
    if draws.flat.shape[1] <= MAX_DIM:
        at = draws.flat.mean(axis=0) if draws.law is None else draws.law.loc
        hessian = curvature(target, at)
    if isinstance(reference, TemperedFit):
        require_latents(reference, target)
        others = draws_of_fit(rng_key, reference, target, len(draws.log_ratios))
        return of_draws("reference", others), _covers(others, hessian)
    if reference not in ("auto", None):
        raise ValueError(
            f'reference is "auto", None or a TemperedFit, got {reference!r}.'
        )
    covers = _covers(draws, hessian)
    if reference is None or hessian is None or (covers and is_near(of_fit)):
        return of_fit, covers
    other = cover(rng_key, draws, target, hessian)
    if other is None:
        return of_fit, covers
    pairs = (of_fit, covers), (other, _covers(other.draws, hessian))
    return min(pairs, key=lambda pair: _looseness(draws, *pair))


def _covers(draws: Draws, hessian: np.ndarray | None) -> bool:
    """Whether the weights have a second moment, where the curvature of the posterior can tell."""
    law = draws.law
    return (
        law is None or law.is_heavy or hessian is None or has_chi_square(hessian, law)
    )


def _looseness(draws: Draws, base: Reference, covers: bool) -> tuple[int, float]:
    """What orders bases: those with bounds first, then by the largest bound on a mean in units of its sd."""
    rank = ("bounded", "estimated", "unreliable").index(_status(base, covers))
    if rank:
        return rank, base.divergences.pareto_k
    q, bound = (
        draws.moments,
        bound_mean(base.draws.moments, base.divergences.chi, draws.moments),
    )
    # What has no moments under either has no bound by either.
    return rank, float(
        np.max(np.nan_to_num(bound[q.sd > 0] / q.sd[q.sd > 0], nan=0.0), initial=0.0)
    )


def _status(base: Reference, covers: bool) -> str:
    """What the weights allow."""
    k = base.divergences.pareto_k
    if k > min(1.0 - 1.0 / math.log10(len(base.weights)), UNRELIABLE):
        return "unreliable"
    says_something = base.divergences.chi <= MAX_CHI and not (
        base.is_heavy and not base.draws.moments.tame.any()
    )
    return "bounded" if covers and k <= MAX_PARETO_K and says_something else "estimated"
