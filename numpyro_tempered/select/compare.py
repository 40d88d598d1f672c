"""Model selection by the penalised ELBO."""

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from numpyro_tempered.handlers.likelihood import is_factor, is_masked, likelihood_sites, other_scale
from numpyro_tempered.infer.svi import TemperedFit, posterior_trace
from numpyro_tempered.report.inference_data import assemble, dataset, group, to_inference_data
from numpyro_tempered.theory.bounds import Certificate, LogTrueDensity, tempered_certificate

LogPrior: TypeAlias = Mapping[Any, float] | Callable[[Sequence[Hashable]], Mapping[Any, float]] | None


def dyadic(names: Sequence[Hashable]) -> dict[Hashable, float]:
    """The prior weights b_K = 2^-K of nested models, as logarithms.

    Args:
        names: Model names. Positive integers are taken for K; otherwise K is the position, from 1.

    Returns:
        Log weights by name.

    Example:
        >>> import numpyro_tempered as nt
        >>> [round(value, 3) for value in nt.dyadic(["line", "parabola"]).values()]
        [-0.693, -1.386]
    """
    orders = list(names)
    integers = all(isinstance(k, int | np.integer) and not isinstance(k, bool) for k in orders)
    if not (integers and all(k > 0 for k in orders)):  # type: ignore[operator]
        orders = list(range(1, len(orders) + 1))
    return {name: -k * math.log(2.0) for name, k in zip(names, orders, strict=True)}  # type: ignore[operator]


def compare(
    fits: Mapping[Any, TemperedFit],
    log_prior: LogPrior = None,
    *,
    num_samples: int = 1000,
    log_p0: LogTrueDensity | None = None,
    num_data: int | None = None,
    delta: float = 0.05,
) -> Any:
    r"""Compare models of the same data by the penalised ELBO.

    .. math:: \hat K = \arg\max_K \big\{\mathrm{ELBO}_\alpha(K) - \log(1/b_K)\big\}

    Every normalising constant is in the ELBO. Group ``model_comparison`` of the result, with dim
    ``model``:

    - ``elbo`` and its Monte Carlo standard error ``se``,
    - ``log_prior`` (log b_K) and ``criterion``, their sum,
    - ``rank`` (0 is selected) and ``weight``, the softmax of ``criterion``,
    - ``expected_log_lik``, the untempered E_q[log L], and ``kl`` = KL(q, prior),
    - with ``log_p0``, ``certificate``: an upper bound on the divergence from the truth,
      :math:`\int D_\alpha(P_\theta, P_0)\,q(d\theta)`, in nats a datum. With probability at least 1 - ``delta``
      it holds for all models at once.

    The other groups are those of the selected fit. ``comparison_table`` turns the group into pandas.

    Args:
        fits: Results of :func:`fit_svi` by model name, on the same observed values and with the same
            alpha. Features may differ. Mixtures take part by
            :func:`numpyro_tempered.mixtures.as_tempered_fit`.
        log_prior: log b_K by name, or a callable from names to that, such as :func:`dyadic`; uniform
            over the given models by default. The weights must be positive and sum to at most 1.
        num_samples: Draws of the selected model's posterior.
        log_p0: For certificates, which need alpha below 1: an upper bound on log p0(X), by
            :func:`numpyro_tempered.bounds.empirical_entropy`, for instance. See
            :func:`numpyro_tempered.bounds.tempered_certificate`.
        num_data: For certificates, the number of independent data; by default the length of the only observed
            site, if that is a vector without missing values.
        delta: For certificates, their probability of failure.

    Returns:
        ``arviz.InferenceData`` under ArviZ 0.x, ``xarray.DataTree`` under 1.x. With certificates the attributes
        say the selected model's, where its ``log_p0`` comes from, and under which condition it is valid.

    Raises:
        TypeError: If ``fits`` is not a mapping, a value not a :class:`TemperedFit`, or ``log_p0`` a bare number.
        ValueError: If there is no fit, an ELBO is not finite, observed values or alpha differ, or the
            weights are not as above; if certificates are asked for and alpha is not one number in (0, 1), or the
            number of data cannot be told.

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
        raise TypeError(f"compare takes a mapping of names to fits, got {type(fits).__name__}.")
    if not fits:
        raise ValueError("compare needs at least one fit.")
    for name, fit in fits.items():
        if not isinstance(fit, TemperedFit):
            raise TypeError(
                f"fits[{name!r}] is a {type(fit).__name__}, not a result of fit_svi. A mixture becomes one by "
                "nt.mixtures.as_tempered_fit(rng_key, fit, x)."
            )
        if not math.isfinite(fit.elbo.value):
            raise ValueError(
                f"fits[{name!r}] has an ELBO of {fit.elbo.value}: a guide that is a point (AutoDelta) bounds "
                "nothing. Fit with AutoNormal, for instance."
            )
    _check_same_data(fits)
    names = list(fits)
    log_weights = check_log_prior(names, log_prior)
    elbos = np.array([fit.elbo.value for fit in fits.values()])
    criterion = elbos + log_weights
    order = np.argsort(-criterion, kind="stable")
    rank = np.empty(len(names), dtype=int)
    rank[order] = np.arange(len(names))
    unnormalised = np.exp(criterion - criterion.max())
    columns = {
        "elbo": elbos,
        "se": [fit.elbo.se for fit in fits.values()],
        "log_prior": log_weights,
        "criterion": criterion,
        "rank": rank,
        "weight": unnormalised / unnormalised.sum(),
        "expected_log_lik": [fit.elbo.expected_log_lik for fit in fits.values()],
        "kl": [fit.elbo.kl for fit in fits.values()],
    }
    certified = {}
    if log_p0 is not None:
        certificates = _certificates(fits, log_weights, log_p0, num_data, delta)
        columns["certificate"] = certificates.value
        certified = {
            "certificate": float(certificates.value[order[0]]),
            "certificate_delta": certificates.delta,
            "certificate_log_p0": certificates.source,
            "certificate_valid_only_if": certificates.valid_only_if,
        }
    selected = names[order[0]] if isinstance(names[order[0]], str | int) else str(names[order[0]])
    best = to_inference_data(fits[names[order[0]]], num_samples=num_samples)
    attrs = {**best.attrs, "selected": selected, "prior_weights": np.exp(log_weights).tolist(), **certified}
    comparison = dataset(
        columns,
        coords={"model": [str(name) if isinstance(name, tuple) else name for name in names]},
        dims={column: ["model"] for column in columns},
        attrs={"alpha": attrs["alpha"], "selected": selected, **certified},
    )
    groups = list(best.children) if hasattr(best, "children") else list(best.groups())
    return assemble({"model_comparison": comparison, **{name: group(best, name) for name in groups}}, attrs)


def comparison_table(data: Any) -> Any:
    """The ``model_comparison`` group as a pandas DataFrame, best model first.

    Args:
        data: The result of :func:`compare`.

    Returns:
        A ``pandas.DataFrame`` indexed by model.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> fit = nt.fit_svi(jax.random.key(0), model, AutoNormal, jnp.ones(6), alpha=0.5)
        >>> nt.comparison_table(nt.compare({"one": fit}))[["rank", "weight"]]
               rank  weight
        model
        one       0     1.0
    """
    return group(data, "model_comparison").to_dataframe().sort_values("rank")


def check_log_prior(names: list[Any], log_prior: LogPrior) -> np.ndarray:
    """The logarithms of the prior weights b_K of models, uniform by default.

    Raises:
        ValueError: If a model has none, one is not positive, or they sum to more than 1.
    """
    if log_prior is None:
        return np.full(len(names), -math.log(len(names)))
    given = log_prior(names) if callable(log_prior) else log_prior
    if set(given) != set(names):
        raise ValueError(
            f"log_prior has models {sorted(map(str, given))}, the fits are {sorted(map(str, names))}."
        )
    values = np.array([float(given[name]) for name in names])
    if not np.all(np.isfinite(values)):
        raise ValueError(f"log_prior must be finite (weights positive), got {values}.")
    total = float(np.exp(values).sum())
    if total > 1.0 + 1e-6:
        raise ValueError(
            f"the prior weights b_K = exp(log_prior) sum to {total:.6g}, more than 1: pass logarithms of "
            "weights that sum to at most 1."
        )
    return values


def _certificates(
    fits: Mapping[Any, TemperedFit],
    log_weights: np.ndarray,
    log_p0: LogTrueDensity,
    num_data: int | None,
    delta: float,
) -> Certificate:
    """Each model's certificate, valid for all at once."""
    first = next(iter(fits.values()))
    if not isinstance(first.alpha, float):
        raise ValueError(
            f"certificates need one alpha in (0, 1) for all data, got {first.alpha}: fit with one alpha, or "
            "leave out log_p0."
        )
    counts = [_check_certifiable(name, fit) for name, fit in fits.items()]
    if num_data is None:
        if counts[0] is None or len(set(counts)) > 1:
            shapes = {site: np.shape(value) for site, value in first.observed.items()}
            raise ValueError(
                f"the number of independent data cannot be told from observed sites of shapes {shapes}, with "
                "masks, missing values, event dimensions or in a scan: pass num_data."
            )
        num_data = counts[0]
    return tempered_certificate(
        np.array([fit.elbo.value for fit in fits.values()]),
        log_p0,
        num_data,
        alpha=first.alpha,
        delta=delta,
        elbo_se=np.array([fit.elbo.se for fit in fits.values()]),
        log_prior=log_weights,
    )


def _check_certifiable(name: Any, fit: TemperedFit) -> int | None:
    """The number of data of a fit, None where it cannot be told.

    Raises:
        ValueError: If the ELBO is not that of a tempered likelihood under a prior that was fixed beforehand.
    """
    trace = posterior_trace(fit.rng_key, fit.model, fit.guide, fit.params, fit.args, fit.kwargs)
    params = [site for site, message in trace.items() if message["type"] == "param"]
    if params:
        raise ValueError(
            f"the model of fits[{name!r}] has params {params}, chosen by the data: a certificate needs a prior "
            "that was fixed before. Give them one, or leave out log_p0."
        )
    sites = likelihood_sites(trace)
    for site, message in sites.items():
        if is_factor(message) or not np.all(np.asarray(other_scale(message)) == 1.0):
            raise ValueError(
                f"site {site!r} of fits[{name!r}] is a factor or has a scale beside alpha: certificates are for "
                "densities of the data to the power alpha. Leave out log_p0."
            )
    site, message = next(iter(sites.items()))
    value, fn = np.asarray(fit.observed.get(site)), message["fn"]
    plain = fn.event_dim == 0 and value.ndim == 1 and not is_masked(fn) and not message.get("_control_flow_done")
    return value.size if len(fit.observed) == 1 and plain and np.all(value == value) else None


def _check_same_data(fits: Mapping[Any, TemperedFit]) -> None:
    (first_name, first), *others = fits.items()
    if others and not first.observed:
        warnings.warn(
            "the models condition by numpyro.factor alone: that their data are the same is not checked.",
            stacklevel=3,
        )
    for name, fit in others:
        if fit.alpha != first.alpha:
            raise ValueError(
                f"fits[{first_name!r}] has alpha {first.alpha} and fits[{name!r}] {fit.alpha}: their "
                "ELBOs bound different quantities. Fit all models with one alpha."
            )
        if set(fit.observed) != set(first.observed):
            raise ValueError(
                f"fits[{first_name!r}] observes {sorted(first.observed)} and fits[{name!r}] "
                f"{sorted(fit.observed)}: models of the same data observe the same sites."
            )
        for site, value in first.observed.items():
            here, there = jax.device_get((value, fit.observed[site]))
            if here.shape != there.shape or not np.array_equal(here, there, equal_nan=True):
                raise ValueError(
                    f"the observed values of site {site!r} differ between fits[{first_name!r}] and "
                    f"fits[{name!r}]: ELBOs of different data cannot be compared."
                )
