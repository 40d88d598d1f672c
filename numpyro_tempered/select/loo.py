"""Leave-one-out cross-validation of tempered posteriors."""

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_tempered.core import Array, warn_caller
from numpyro_tempered.handlers.temper import check_alpha
from numpyro_tempered.report.arviz import (
    LOG_LIK,
    UNTEMPERED,
    ArviZData,
    group,
    group_names,
    variable_name,
)
from numpyro_tempered.report.inference_data import to_inference_data

if TYPE_CHECKING:
    import xarray as xr
    from arviz import ELPDData

_SAMPLE_DIMS = ["chain", "draw"]
# With fewer draws the fifth of them that is the tail is too short to fit.
_MIN_DRAWS = 25


def loo(
    posterior: object,
    *data: object,
    var_name: str | None = None,
    pointwise: bool | None = None,
    alpha: float | None = None,
    reff: float | None = None,
    rng_key: Array | None = None,
    **kwargs: object,
) -> "ELPDData":
    r"""PSIS-LOO of a tempered posterior, where ``az.loo`` gives another number.

    Leaving datum i out of a posterior with power :math:`\alpha` divides its density by :math:`L_i^\alpha`, so
    the draws have weights :math:`w_{is} \propto p(y_i \mid \theta_s)^{-\alpha}`, which are smoothed by a
    generalised Pareto distribution, and

    .. math:: \mathrm{elpd}_i = \log \frac{\sum_s w_{is}\, p(y_i \mid \theta_s)}{\sum_s w_{is}}.

    At ``alpha = 1`` this is ``az.loo``, whose weights are 1/p whatever the power. The predictive density
    is untempered throughout.

    The result says how well the tempered posterior predicts, and serves to compare models. It is no criterion for
    alpha: where the model is misspecified it prefers powers that are far too small. The draws
    count as draws of the tempered posterior; those of a guide are as good as the guide. What the model masks is
    no datum.

    Args:
        posterior: Any posterior; or the result of :func:`to_inference_data`, with its log-likelihood group.
        *data: The data that it was fitted to, where it does not hold them, as for :func:`to_inference_data`.
        var_name: The observed site, where there are several.
        pointwise: Whether to keep the values by datum, which ``az.compare`` needs; ArviZ's setting
            ``stats.ic_pointwise`` by default, which is to keep them.
        alpha: Power on the likelihood of the site; by default that of the data's attributes.
        reff: Relative efficiency of the draws; by default estimated as ArviZ does.
        rng_key: Key of the draws, for a posterior that has none.
        **kwargs: Keyword arguments that belong to the data.

    Returns:
        ArviZ's own result, ``ELPDData``, for ``az.compare`` and the plots; on the log scale.

    Raises:
        ValueError: If the data have no log-likelihood or no alpha, latents are in local plates, there are several
            sites, or factors beside one, and none is named, the site is :class:`robust`, or the log-likelihood is
            NaN, infinite or the same in all draws, or there are fewer than 25 draws.

    Warns:
        UserWarning: As ArviZ does, where the estimated Pareto k says that a weight is unreliable.

    References:
        Vehtari, Gelman, Gabry, *Practical Bayesian model evaluation using leave-one-out
        cross-validation and WAIC*, 2017.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> fit = nt.fit_svi(jax.random.key(0), model, AutoNormal, jnp.ones(6), alpha=0.5)
        >>> result = nt.loo(fit)
        >>> int(result.n_samples), int(result.n_data_points)
        (1000, 6)
    """
    import arviz as az

    groups: Any = posterior
    if not (hasattr(groups, "children") or hasattr(groups, "groups")):
        groups = to_inference_data(posterior, *data, rng_key=rng_key, **kwargs)  # type: ignore[arg-type]
    name, log_lik = _log_likelihood(groups, var_name)
    if name in json.loads(str(_attribute(groups, "divergence") or "{}")):
        raise ValueError(
            f"site {name!r} has a divergence for its loss, by which a datum is left out, and not by its density: "
            "fit without a part of the data, and evaluate the log_likelihood there."
        )
    if local := _attribute(groups, "local_latents"):
        raise ValueError(
            f"latent sites {local} are in local plates, whose part of the posterior has its own power: a datum "
            "is not left out by weights. Integrate them out of the model, or fit without a part of the data."
        )
    power = _power(groups, name) if alpha is None else check_alpha(alpha)
    if np.ndim(power):
        raise ValueError(
            f"loo takes one power for all data, got alpha of shape {np.shape(power)}."
        )
    num_draws = log_lik.sizes["chain"] * log_lik.sizes["draw"]
    _check(name, log_lik, power, num_draws)
    if reff is None:
        reff = _relative_efficiency(groups, num_draws)
    # A power of 0 times a log-likelihood of minus infinity would be NaN.
    log_ratios = (
        -power * log_lik if power else log_lik.copy(data=np.zeros(log_lik.shape))
    )
    if hasattr(az, "psislw"):
        return _loo_of_arviz_0(log_lik, log_ratios, reff, pointwise)
    log_weights, pareto_k = _smooth(log_ratios, reff)
    # Where ArviZ reads it, without what is masked.
    groups = groups.copy()
    groups[LOG_LIK] = type(groups)(log_lik.to_dataset())
    return az.loo(
        groups,
        pointwise=pointwise,
        var_name=name,
        reff=reff,
        log_weights=log_weights,
        pareto_k=pareto_k,
    )


def _smooth(
    log_ratios: "xr.DataArray", reff: float
) -> tuple["xr.DataArray", "xr.DataArray"]:
    """Pareto-smoothed log weights and k, by ArviZ 1.x."""
    import xarray as xr

    def smooth(ratios: "xr.DataArray") -> tuple["xr.DataArray", "xr.DataArray"]:
        # The accessor takes the logarithms of the inverse weights.
        return (-ratios).azstats.psislw(r_eff=reff, dim=_SAMPLE_DIMS)

    def of_datum(ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray | float]:
        try:
            log_weights, pareto_k = smooth(xr.DataArray(ratios, dims=_SAMPLE_DIMS))
        except ValueError:
            return ratios - np.logaddexp.reduce(ratios, axis=None), np.inf
        return log_weights.values, pareto_k.values

    try:
        log_weights, pareto_k = smooth(log_ratios)
    except (
        ValueError
    ):  # the largest weights of some datum are equal: it has no tail to fit
        log_weights, pareto_k = xr.apply_ufunc(
            of_datum,
            log_ratios,
            input_core_dims=[_SAMPLE_DIMS],
            output_core_dims=[_SAMPLE_DIMS, []],
            vectorize=True,
        )
    return log_weights, _zero_without_weights(pareto_k, log_ratios)


def _loo_of_arviz_0(
    log_lik: "xr.DataArray",
    log_ratios: "xr.DataArray",
    reff: float,
    pointwise: bool | None,
) -> "ELPDData":
    """The same by ArviZ 0.x, whose own ``loo`` takes no weights."""
    import arviz as az
    from arviz.stats.stats_utils import ELPDData, logsumexp

    log_weights, pareto_k = az.psislw(log_ratios.stack(__sample__=_SAMPLE_DIMS), reff)
    pareto_k = _zero_without_weights(pareto_k, log_ratios)
    stacked = log_lik.stack(__sample__=_SAMPLE_DIMS)
    num_draws = stacked.sizes["__sample__"]
    elpd_i = stacked.isel(__sample__=0, drop=True).copy(
        data=logsumexp((log_weights + stacked).values, axis=-1)
    )
    elpd_i = elpd_i.astype(float).rename("loo_i")
    lppd = np.sum(logsumexp(stacked.values, b_inv=num_draws, axis=-1), dtype=float)
    elpd = elpd_i.values.sum()
    good_k = min(1 - 1 / np.log10(num_draws), 0.7)
    bad = bool(np.any(pareto_k > good_k))
    if bad:
        warn_caller(
            f"Estimated shape parameter of Pareto distribution is greater than {good_k:.2f} for one or more "
            "samples: importance sampling is unreliable for their leave-one-out posteriors."
        )
    values = {
        "elpd_loo": elpd,
        "se": (elpd_i.size * np.var(elpd_i.values)) ** 0.5,
        "p_loo": lppd - elpd,
        "n_samples": num_draws,
        "n_data_points": elpd_i.size,
        "warning": bad,
    }
    if az.rcParams["stats.ic_pointwise"] if pointwise is None else pointwise:
        values |= {"loo_i": elpd_i, "pareto_k": pareto_k}
        if elpd_i.size == 1:
            warn_caller(
                "The point-wise LOO is the same with the sum LOO: the site has one log-probability for all data."
            )
    values |= {"scale": "log", "good_k": good_k}
    return ELPDData(data=list(values.values()), index=list(values))


def _zero_without_weights(
    pareto_k: "xr.DataArray", log_ratios: "xr.DataArray"
) -> "xr.DataArray":
    """The estimates of k, with 0 where all weights are equal and nothing can go wrong."""
    varies = log_ratios.max(_SAMPLE_DIMS) > log_ratios.min(_SAMPLE_DIMS)
    return pareto_k.where(varies, 0.0).rename("pareto_shape")


def _log_likelihood(
    data: ArviZData, var_name: str | None
) -> tuple[str, "xr.DataArray"]:
    """The pointwise log-likelihood of the site, and its name."""
    names_of_groups = group_names(data)
    names_in_data = [name for name in (UNTEMPERED, LOG_LIK) if name in names_of_groups]
    if not names_in_data:
        reason = _attribute(data, "log_likelihood_left_out")
        raise ValueError(
            f"no log_likelihood group, only {names_of_groups}: take to_inference_data with log_lik."
            if reason is None
            else f"no log-likelihood of each datum: {reason}. Sum discrete latents out by nt.marginalize; of a "
            "fit to parts of the data pass draws, fit.sample_posterior(key, (1000,)), with a model of all data."
        )
    sites = group(data, names_in_data[0])
    names = [str(name) for name in sites.data_vars]
    factors = _attribute(data, "factors")
    if var_name is None and factors is not None:
        raise ValueError(
            f"factors {factors} are terms of the likelihood too, and perhaps data, which "
            "loo would not see: observe them, those that are censored by RightCensoredDistribution; or ask for "
            f"{names[0]!r} alone by var_name."
        )
    if var_name is None and len(names) > 1:
        raise ValueError(
            f"there are several observed sites, {names}: name one by var_name."
        )
    name = names[0] if var_name is None else variable_name(var_name)
    if name not in names:
        raise ValueError(f"the log_likelihood group has no {var_name!r}, only {names}.")
    return name, _without_masked(data, name, sites[name])


def _without_masked(
    data: ArviZData, name: str, log_lik: "xr.DataArray"
) -> "xr.DataArray":
    """The log-likelihood without the entries that the model masks, which are no data."""
    present = log_lik.notnull().any(_SAMPLE_DIMS)
    masked = _of_site(_attribute(data, "masked"), name, default=0.0)
    if not masked or int((~present).sum()) != masked:
        return log_lik
    if present.ndim > 1:
        log_lik, present = (x.stack(datum=present.dims) for x in (log_lik, present))
    return log_lik.isel({present.dims[0]: present.values})


def _power(data: ArviZData, name: str) -> float:
    """The power of the site in the posterior: alpha times other scales of the likelihood."""
    alpha = _of_site(_attribute(data, "alpha"), name, default=None)
    if alpha is None:
        raise ValueError(
            f"no attribute alpha for site {name!r}: make the data by to_inference_data, or pass alpha."
        )
    scale = _of_site(_attribute(data, "likelihood_scale"), name, default=1.0)
    if scale is None or np.ndim(alpha):
        raise ValueError(
            f"the powers or scales of site {name!r} differ from datum to datum, and loo takes one power."
        )
    return float(alpha) * float(scale)


def _attribute(data: ArviZData, key: str) -> object:
    """An attribute of the data or of their groups: not all operations of ArviZ keep those of the root."""
    holders = [data, *(group(data, name) for name in group_names(data))]
    return next((holder.attrs[key] for holder in holders if key in holder.attrs), None)


def _of_site(value: Any, name: str, default: float | None) -> float | None:
    """A number of a site, from one of all sites or from a JSON of them by name."""
    by_site = json.loads(value) if isinstance(value, str) else value
    if isinstance(by_site, dict):
        return by_site.get(name, default)
    return default if by_site is None else by_site


def _check(name: str, log_lik: "xr.DataArray", power: float, num_draws: int) -> None:
    if num_draws < _MIN_DRAWS:
        raise ValueError(
            f"loo needs at least {_MIN_DRAWS} draws to smooth their weights, got {num_draws}."
        )
    values = log_lik.values
    if np.any(np.isnan(values)) or np.any(values == np.inf):
        raise ValueError(
            f"the log-likelihood of site {name!r} has NaN or +inf: look at its data and model."
        )
    if power and np.any(values == -np.inf):
        raise ValueError(
            f"the log-likelihood of site {name!r} is -inf in some draws, which cannot be draws of the posterior."
        )
    if np.all(log_lik.max(_SAMPLE_DIMS) == log_lik.min(_SAMPLE_DIMS)):
        raise ValueError(
            f"the log-likelihood of site {name!r} is the same in all draws: a posterior of one point (AutoDelta) "
            "has no leave-one-out posteriors."
        )


def _relative_efficiency(data: ArviZData, num_draws: int) -> float:
    """Effective sample size of a draw, the mean over the posterior as in ``az.loo``."""
    import arviz as az

    if "posterior" not in group_names(data):
        raise ValueError(
            "the data have no posterior group to estimate the efficiency of the draws: pass reff."
        )
    posterior = group(data, "posterior")
    if posterior.sizes["chain"] == 1:
        return 1.0
    sizes = (
        az.ess(posterior, method="mean")
        if hasattr(az, "psislw")
        else posterior.azstats.ess(method="mean")
    )
    values = np.hstack([np.ravel(size) for size in sizes.data_vars.values()])
    values = values[np.isfinite(values)]
    return float(values.mean() / num_draws) if values.size else 1.0
