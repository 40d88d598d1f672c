"""Model selection by the penalised ELBO."""

import math
from collections.abc import Collection, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    DataSummary,
    Posterior,
    Shape,
    TemperedELBO,
    doubles,
    fit_attrs,
    runs_models,
    to_host,
    warn_caller,
)
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.infer.tempered_fit import TemperedFit
from numpyro_tempered.report.arviz import (
    ArviZData,
    Dims,
    as_attr,
    assemble,
    dataset,
    versions,
    with_group,
)
from numpyro_tempered.report.draws import bind, variables_of
from numpyro_tempered.report.inference_data import to_inference_data
from numpyro_tempered.select.ranking import LogPrior, check_log_prior, rank_models
from numpyro_tempered.theory.bounds import LogTrueDensity, tempered_certificate

Name = TypeVar("Name", bound=Hashable)
ADVICE = "compare ELBOs of the same data."
_DENSITIES = ", and certificates are for densities of the data to the power alpha: leave out log_p0."
_CERTIFIABLE = {
    "params": ", chosen by the data, and a certificate needs a prior that was fixed before: give them one, or "
    "leave out log_p0.",
    "densities": _DENSITIES,
    "no factors": _DENSITIES,
    "no scales": _DENSITIES,
}


@runs_models
def compare(
    fits: Mapping[Name, Posterior],
    log_prior: LogPrior = None,
    *,
    num_samples: int = 1000,
    log_p0: LogTrueDensity | None = None,
    num_data: int | None = None,
    delta: float = 0.05,
    data: tuple[object, ...] = (),
    rng_key: Array | None = None,
    unconverged: Collection[Name] = (),
    **options: Any,
) -> ArviZData:
    r"""Compare models of the same data by the penalised ELBO.

    .. math:: \hat K = \arg\max_K \big\{\mathrm{ELBO}_\alpha(K) - \log(1/b_K)\big\}

    Every normalising constant is in the ELBO. Group ``model_comparison`` of the result, with dim
    ``model``:

    - ``elbo`` and its Monte Carlo standard error ``se``,
    - ``log_prior`` (log b_K) and ``criterion``, their sum,
    - ``rank`` (0 is selected) and ``weight``, the softmax of ``criterion``,
    - ``expected_log_lik``, the untempered E_q[log L], and ``kl`` = KL(q, prior),
    - with ``log_p0``, ``certificate``: an upper bound on the divergence from the truth,
      :math:`\int D_\alpha(P_\theta, P_0)\,q(d\theta)`, in nats per datum. With probability at least 1 - ``delta``
      it holds for all models at once.

    The other groups are those of the selected fit, as :func:`to_inference_data` makes them; a fit that does not
    hold its data has them only with ``data``. :func:`table` turns the comparison into pandas.

    Any fit with an ELBO takes part: of :func:`fit_svi`, :func:`fit_gaussian`, :func:`.round_and_refit`,
    ``mixtures``, ``ppca`` and ``sparse``, or one of your own. The ELBO of a mixture is its bound E1, that of a
    logistic regression its objective, which is below the ELBO. The ELBO of a linear regression with estimated
    noise bounds the evidence at this noise alone: compare it with others of its kind.

    Args:
        fits: Fits by model name, of the same observed values and with the same alpha, such as the ``fits`` of a
            selection of components or factors. Features may differ. Fits that do not hold their data are
            checked by what they know of them, such as numbers and means.
        log_prior: log b_K by name, or a callable from names to that, such as :func:`dyadic`; uniform
            over the given models by default. The weights must be positive and sum to at most 1.
        num_samples: Draws of the selected model's posterior.
        log_p0: For certificates, which need alpha below 1: an upper bound on log p0(X), by
            :func:`numpyro_tempered.bounds.empirical_entropy`, for instance. See
            :func:`numpyro_tempered.bounds.tempered_certificate`.
        num_data: For certificates, the number of independent data; by default the length of the only observed
            site, if that is a vector without missing values, masked ones aside.
        delta: For certificates, their probability of failure.
        data: What the fits were fitted to, for those that do not hold it, as :func:`to_inference_data` takes it:
            ``(x,)`` or ``(x, y)``.
        rng_key: Key of the draws; needed where the selected fit has none.
        unconverged: Names of fits that take part though they have not converged.
        **options: Further arguments of :func:`to_inference_data`, such as ``coords`` and ``dims``, which may
            name variables of any of the models.

    Returns:
        ``arviz.InferenceData`` under ArviZ 0.x, ``xarray.DataTree`` under 1.x. With certificates the attributes
        say the selected model's, where its ``log_p0`` comes from, and under which condition it is valid.

    Raises:
        TypeError: If ``fits`` is not a mapping, a value has no ELBO, or ``log_p0`` is a bare number.
        ValueError: If there is no fit, an ELBO is not finite, a fit has not converged or has an improper prior,
            whose ELBO means nothing, data or alpha differ, or the weights are not as above; if certificates are
            asked for and alpha is not one number in (0, 1), or the number of data is not clear.

    References:
        C19, Theorem 1 (the guarantee for alpha < 1).

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y, prior_scale):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, prior_scale))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> fits = {
        ...     name: nt.fit_svi(jax.random.key(0), model, AutoNormal, jnp.ones(6), scale, alpha=0.5)
        ...     for name, scale in {"wide": 100.0, "narrow": 1.0}.items()
        ... }
        >>> nt.compare(fits).attrs["selected"]
        'narrow'
    """
    if not isinstance(fits, Mapping):
        raise TypeError(
            f"compare takes a mapping of names to fits, got {type(fits).__name__}."
        )
    if not fits:
        raise ValueError("compare needs at least one fit.")
    names, fits = list(fits), {name: _unwrap(fit) for name, fit in fits.items()}
    value, se, expected_log_lik, kl = np.array(
        [_elbo(fits, name, unconverged) for name in names]
    ).T
    summaries = {name: fit.summarise_data() for name, fit in fits.items()}
    alpha = _check_same_data(fits, summaries)
    # The data that each fit needs for its draws.
    data_of = {
        name: data if summary.observed is None else ()
        for name, summary in summaries.items()
    }
    log_weights = check_log_prior(names, log_prior)
    ranking = rank_models(value, log_weights)
    columns: dict[str, ArrayLike] = {
        "elbo": value,
        "se": se,
        "log_prior": log_weights,
        "criterion": ranking.criterion,
        "rank": ranking.rank,
        "weight": ranking.weight,
        "expected_log_lik": expected_log_lik,
        "kl": kl,
    }
    winner = names[ranking.best]
    selected = winner if isinstance(winner, str | int) else str(winner)
    attrs = {"alpha": as_attr(alpha), "selected": selected}
    if log_p0 is not None:
        if not isinstance(alpha, float):
            raise ValueError(
                f"certificates need one alpha in (0, 1) for all data, got {alpha}: fit with one, or omit log_p0."
            )
        counts: set[int | None] = set()
        shapes: dict[str, Shape] = {}
        for name, fit in fits.items():
            trace = bind(fit, data_of[name]).target.trace
            observed = summaries[name].observed
            observed = (
                likelihood.observed_values(trace) if observed is None else observed
            )
            counts.add(_check_certifiable(name, trace, observed))
            shapes |= {site: np.shape(value) for site, value in observed.items()}
        if num_data is None:
            num_data, *others = counts
            if num_data is None or others:
                raise ValueError(
                    f"the number of independent data is not clear from observed sites of shapes {shapes}, with "
                    "missing values, event dimensions or in a scan: pass num_data."
                )
        certificates = tempered_certificate(
            value,
            log_p0,
            num_data,
            alpha=alpha,
            delta=delta,
            elbo_se=se,
            log_prior=log_weights,
        )
        columns["certificate"] = certificates.value
        attrs |= {
            "certificate": float(certificates.value[ranking.best]),
            "certificate_delta": certificates.delta,
            "certificate_log_p0": certificates.source,
            "certificate_valid_only_if": certificates.valid_only_if,
        }
    comparison = dataset(
        columns,
        coords={
            "model": [str(name) if isinstance(name, tuple) else name for name in names]
        },
        dims={column: ["model"] for column in columns},
        attrs=attrs,
    )
    attrs["prior_weights"], best = np.exp(log_weights).tolist(), fits[winner]
    if summaries[winner].observed is None and not data:
        return assemble(
            {"model_comparison": comparison}, {**fit_attrs(best), **versions(), **attrs}
        )
    options["dims"] = _dims_of_selected(
        fits, winner, data_of, options.get("dims"), rng_key
    )
    draws = to_inference_data(
        best, *data_of[winner], num_samples=num_samples, rng_key=rng_key, **options
    )
    return with_group(draws, "model_comparison", comparison, attrs)


def _unwrap(fit: Any) -> Any:
    """The fit that a selection holds; of a stream at its data the fit with its ELBO."""
    fit = fit.fit if hasattr(fit, "fits") or hasattr(fit, "advice") else fit
    is_open = isinstance(fit, TemperedFit) and fit.elbo is None
    return fit.evaluate() if is_open else fit


def _dims_of_selected(
    fits: Mapping[Name, Posterior],
    winner: Name,
    data_of: Mapping[Name, tuple],
    dims: Dims | None,
    rng_key: Array | None,
) -> Dims:
    """The names of dimensions for the variables of the selected fit; others may belong to those that lost.

    Raises:
        ValueError: If no fit has a variable.
    """

    def variables(name: Name) -> set[str]:
        return variables_of(bind(fits[name], data_of[name]))

    selected = variables(winner) if dims else set()
    absent = set(dims or {}) - selected
    for name in fits if absent else ():
        absent -= variables(name)
    if absent:
        raise ValueError(
            f"dims names {sorted(absent)}, which are not among the variables of any fit."
        )
    return {name: labels for name, labels in (dims or {}).items() if name in selected}


def _elbo(
    fits: Mapping[Name, Posterior], name: Name, unconverged: Collection[Name]
) -> tuple[float, ...]:
    """The ELBO of a fit with its standard error and its two parts.

    Raises:
        TypeError: If it has none.
        ValueError: If it is not finite, or does not say what the model is worth.
    """
    fit = fits[name]
    elbo = getattr(fit, "elbo", None)
    if not isinstance(elbo, TemperedELBO):
        raise TypeError(
            f"fits[{name!r}] is a {type(fit).__name__}, which has no ELBO: compare takes fits of fit_svi, "
            "fit_gaussian, mixtures, PCA and sparse regressions; of a stream online.posterior(state).on(x, y); "
            "of a mixture without draws for its bound fit with num_draws >= 2."
        )
    if not math.isfinite(elbo.value):
        raise ValueError(
            f"fits[{name!r}] has an ELBO of {elbo.value}, as of AutoDelta: take AutoNormal, say."
        )
    if elbo.improper:
        raise ValueError(
            f"fits[{name!r}] has improper priors, of {list(elbo.improper)}: its ELBO has an arbitrary constant, "
            "and would win or lose by it. Give them proper priors, and of data that are partly missing observe "
            "the entries that are there, obs=x[there], in the place of obs_mask."
        )
    if fit.converged is not None and not fit.converged and name not in unconverged:
        raise ValueError(
            f"fits[{name!r}] has not converged: its ELBO is below that of its model by an amount that nobody "
            f"knows. Fit on, in more steps or from another start, or let it take part by unconverged=[{name!r}]."
        )
    return elbo[:4]


def _check_same_data(
    fits: Mapping[Name, Posterior], summaries: Mapping[Name, DataSummary]
) -> float | dict[str, float]:
    """The alpha of all fits, where it is one and their data are the same.

    Raises:
        ValueError: If it is not, or data differ.
    """
    # One that holds its data has most to compare with.
    first = max(fits, key=lambda name: summaries[name].observed is not None)
    alpha = _alpha(fits[first])
    unchecked = []
    for name, fit in fits.items():
        other = _alpha(fit)
        same = alpha == other
        if isinstance(alpha, float) and isinstance(other, float):
            same = math.isclose(alpha, other, rel_tol=1e-6)
        if not same:
            raise ValueError(
                f"fits[{first!r}] has alpha {alpha} and fits[{name!r}] {other}: fit at one alpha."
            )
        losses = [dict(summaries[key].divergences) for key in (first, name)]
        if losses[0] != losses[1]:
            raise ValueError(
                f"fits[{first!r}] has divergences {losses[0]} and fits[{name!r}] {losses[1]}: ELBOs "
                "compare for one loss. Fit with the same robust(beta, unit), or compare predictions."
            )
        if name != first and not _agree(
            (first, name), summaries[first], summaries[name]
        ):
            unchecked.append(name)
    if unchecked:
        warn_caller(
            f"fits[{first!r}] and fits[{unchecked[0]!r}] know nothing of their data in common (as models that "
            "condition by numpyro.factor alone): whether their data are the same is not checked."
        )
    return alpha


def _alpha(fit: Posterior) -> float | dict[str, float]:
    return (
        dict(fit.alpha)
        if isinstance(fit.alpha, Mapping)
        else float(np.asarray(fit.alpha))
    )


def _agree(
    names: tuple[Hashable, Hashable], one: DataSummary, two: DataSummary
) -> bool:
    """Whether two fits know anything of their data in common.

    Raises:
        ValueError: If they differ in it.
    """
    first, second = (f"fits[{name!r}]" for name in names)
    if one.observed is None or two.observed is None:
        common = sorted(set(one.numbers) & set(two.numbers))
        for key in common:
            left, right = (doubles(one.numbers[key]), doubles(two.numbers[key]))
            # In the precision of either, and whatever the order of its sums.
            scale = 1e-4 * np.max(np.abs(left), initial=1e-30)
            if left.shape != right.shape or not np.allclose(
                left, right, rtol=1e-4, atol=scale
            ):
                raise ValueError(
                    f"the {key} differ between {first} ({left}) and {second} ({right}): {ADVICE}"
                )
        return bool(common)
    if set(one.observed) != set(two.observed):
        raise ValueError(
            f"{first} observes {sorted(one.observed)} and {second} {sorted(two.observed)}: {ADVICE}"
        )
    factors = [sorted(set(each.counts) - set(one.observed)) for each in (one, two)]
    if one.counts and two.counts and factors[0] != factors[1]:
        raise ValueError(
            f"{first} has likelihood factors {factors[0]} and {second} {factors[1]}, which may be terms of other "
            f"data: {ADVICE} Observe those data in all of them, or under one name; factors that are terms of the "
            "prior are named by nt.temper(model, alpha, factors=)."
        )
    for site, value in one.observed.items():
        left, right = to_host(value), to_host(two.observed[site])
        counts = [each.counts[site] for each in (one, two) if site in each.counts]
        if left.shape == right.shape and len(counts) == 2:
            shapes = {each.shape for each in counts}
            if len(shapes) > 1 or not np.allclose(counts[0], counts[1], rtol=1e-6):
                raise ValueError(
                    f"the masks or scales of site {site!r} differ between {first} and {second}, and so their "
                    f"data: {ADVICE}"
                )
            # What lies under a mask is no datum.
            if left.shape[: counts[0].ndim] == counts[0].shape:
                events = tuple(range(counts[0].ndim, left.ndim))
                on = np.expand_dims(counts[0] != 0.0, events)
                left, right = (np.where(on, part, 0) for part in (left, right))
        if left.shape != right.shape or not np.array_equal(left, right, equal_nan=True):
            raise ValueError(
                f"the values of site {site!r} differ between {first} and {second}: {ADVICE}"
            )
    return bool(one.observed)


def _check_certifiable(
    name: Hashable, trace: likelihood.Trace, observed: Mapping[str, Array]
) -> int | None:
    """The number of data of a fit, None where it is not clear.

    Raises:
        ValueError: If the ELBO is not that of a tempered likelihood under a prior that was fixed beforehand.
    """
    require(trace, _CERTIFIABLE, f"the model of fits[{name!r}]")
    site, message = next(iter(likelihood.likelihood_sites(trace).items()))
    value, fn = to_host(observed.get(site)), message["fn"]
    if (
        len(observed) != 1
        or value.ndim != 1
        or fn.event_dim
        or message.get("_control_flow_done")
    ):
        return None
    present = value[np.broadcast_to(likelihood.mask_of_data(fn), value.shape)]
    return present.size if np.all(present == present) else None
