"""Results as ArviZ data: the only module that knows ArviZ's two generations."""

import json
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC

from numpyro_tempered._typing import Array
from numpyro_tempered.families import mean_field
from numpyro_tempered.fit import TemperedFit, sample_posterior
from numpyro_tempered.infer import OnlineVI, OnlineVIState
from numpyro_tempered.likelihood import (
    common_alpha,
    get_trace,
    likelihood_sites,
    log_likelihood,
    observed_values,
    subsamples,
)
from numpyro_tempered.online.base import Losses

if TYPE_CHECKING:
    import xarray as xr

Coords = Mapping[str, Sequence[Any]]
Dims = Mapping[str, Sequence[str]]


def to_inference_data(
    result: Any,
    *data: Any,
    num_samples: int = 1000,
    rng_key: Array | None = None,
    coords: Coords | None = None,
    dims: Dims | None = None,
    log_lik: bool = True,
    losses: Losses | None = None,
    **kwargs: Any,
) -> Any:
    """ArviZ data of a tempered result.

    Groups: ``posterior`` and ``log_likelihood`` with dims ``(chain, draw)``, the latter untempered and
    unscaled; ``observed_data``; for variational results ``variational`` (the trace of the loss and the
    parameters); for MCMC ``sample_stats``. Attributes: ``alpha``, the rule or algorithm, versions.

    Args:
        result: A ``TemperedFit``; an ``OnlineVI``, followed by its state and the data it has seen; or
            an ``MCMC`` that has run a model.
        *data: For an online run ``state, *args``.
        num_samples: Draws from a variational posterior.
        rng_key: For those draws; the key kept in the fit or state by default.
        coords: Coordinate values by dimension.
        dims: Names of the event dimensions by variable, without chain and draw.
        log_lik: Whether to evaluate the log-likelihood group, which takes S × n numbers.
        losses: For an online run, the losses that ``run`` returned, to be kept as its trace.
        **kwargs: For an online run, keyword arguments of the model.

    Returns:
        ``arviz.InferenceData`` under ArviZ 0.x, ``xarray.DataTree`` under 1.x.

    Raises:
        TypeError: If ``result`` is none of these.
        ValueError: If the data are missing, an MCMC has not run, or ``dims`` names no variable.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> fit = nt.fit_svi(jax.random.key(0), model, AutoNormal, jnp.ones(6), alpha=0.5)
        >>> data = nt.to_inference_data(fit)
        >>> data["posterior"]["theta"].shape, data["log_likelihood"]["y"].shape
        ((1, 1000), (1, 1000, 6))
    """
    groups: dict[str, Any]
    if isinstance(result, TemperedFit):
        if data or kwargs:
            raise ValueError("a TemperedFit holds its data: pass the fit alone.")
        groups = _from_fit(result, num_samples, rng_key, log_lik)
    elif isinstance(result, OnlineVI):
        if not data or not isinstance(data[0], OnlineVIState) or not (data[1:] or kwargs):
            raise ValueError(
                "an online run is to_inference_data(online, state, *data): the state, then the data."
            )
        groups = _from_online(result, data[0], data[1:], kwargs, num_samples, rng_key, log_lik)
        if losses is not None:
            groups["variational"] |= {f"loss_{k}": v for k, v in losses._asdict().items()}
    elif isinstance(result, MCMC):
        if data or kwargs:
            raise ValueError("an MCMC holds its data: pass it alone.")
        groups = _from_mcmc(result, log_lik)
    else:
        raise TypeError(
            "to_inference_data takes a TemperedFit, an OnlineVI with its state and data, or an MCMC, "
            f"got {type(result).__name__}."
        )
    attrs = groups.pop("attrs") | versions()
    variables = {name for values in groups.values() for name in values}
    unknown = sorted(set(dims or {}) - variables)
    if unknown:
        raise ValueError(f"dims names {unknown}, which are not among the variables {sorted(variables)}.")
    datasets = {}
    for name, values in groups.items():
        named = dict(dims or {})
        if name == "log_likelihood":
            # A log-probability has no event dimensions.
            named = {k: named[k][: np.ndim(v) - 2] for k, v in values.items() if k in named}
        elif name == "variational":
            named.setdefault("loss", ["step"])
            named |= {k: ["round"] for k, v in values.items() if k.startswith("loss_") and np.ndim(v) == 1}
        datasets[name] = dataset(values, _SAMPLE_DIMS.get(name, ()), coords, named, attrs)
    return assemble(datasets, attrs)


_SAMPLE_DIMS = {
    "posterior": ("chain", "draw"),
    "log_likelihood": ("chain", "draw"),
    "sample_stats": ("chain", "draw"),
}


def _from_fit(fit: TemperedFit, num_samples: int, rng_key: Array | None, log_lik: bool) -> dict[str, Any]:
    key = fit.rng_key if rng_key is None else rng_key
    samples = sample_posterior(fit, key, num_samples)
    # The fitted params of the model, such as the weights of a network, belong to its likelihood.
    model = handlers.substitute(fit.model, data=fit.params)
    first = {name: value[0] for name, value in samples.items()}
    if log_lik and subsamples(_trace_at(handlers.seed(model, key), first, fit.args, fit.kwargs)):
        warnings.warn(
            "a plate of the model subsamples: the log_likelihood group, which needs all data, is left out.",
            stacklevel=3,
        )
        log_lik = False
    return {
        "posterior": _one_chain(samples),
        **_likelihood_group(log_lik, model, samples, fit.args, fit.kwargs),
        "observed_data": dict(fit.observed),
        "variational": {"loss": fit.losses, **_plain(fit.params)},
        "attrs": {
            "alpha": _attr(fit.alpha),
            "algorithm": "svi",
            "guide": _name(fit.guide),
            "elbo": fit.elbo.value,
            "elbo_se": fit.elbo.se,
        },
    }


def _from_online(
    online: OnlineVI,
    state: OnlineVIState,
    args: tuple,
    kwargs: dict,
    num_samples: int,
    rng_key: Array | None,
    log_lik: bool,
) -> dict[str, Any]:
    online.require_set_up()
    key = state.rng_key if rng_key is None else rng_key
    flat = mean_field.sample(key, state.posterior, (num_samples,))
    params = online.get_params(state)
    samples = online.guide._unpack_and_constrain(flat, params)
    latents = {
        name
        for name, site in online.guide.prototype_trace.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    samples = {name: value for name, value in samples.items() if name in latents}
    first = {name: value[0] for name, value in samples.items()}
    trace = _trace_at(handlers.seed(online.model, key), first, args, kwargs)
    if not likelihood_sites(trace):
        raise ValueError("the model has no observed site on these data: pass what the run has seen.")
    return {
        "posterior": _one_chain(samples),
        **_likelihood_group(log_lik, online.model, samples, args, kwargs),
        "observed_data": observed_values(trace),
        "variational": {
            **_plain(params),
            "count": state.count,
            "rejected": state.rejected,
            "cumulative_loss_at_mean": state.cumulative.at_mean,
            "cumulative_loss_expected": state.cumulative.expected,
        },
        "attrs": {
            "alpha": _attr(common_alpha(trace)),
            "algorithm": "online",
            "rule": online.rule.name,
            "guide": _name(online.guide),
        },
    }


def _from_mcmc(mcmc: Any, log_lik: bool) -> dict[str, Any]:
    model = getattr(mcmc.sampler, "model", None)
    if mcmc.last_state is None or model is None:
        raise ValueError("the MCMC has not run a model yet: call mcmc.run first.")
    args, kwargs = mcmc._args, mcmc._kwargs
    by_chain = mcmc.get_samples(group_by_chain=True)
    flat = mcmc.get_samples()
    first = {name: value[0] for name, value in flat.items()}
    trace = _trace_at(model, first, args, kwargs)
    samples = {
        name: value
        for name, value in by_chain.items()
        if trace.get(name, {"type": None})["type"] in ("sample", "deterministic")
    }
    # The draws of deterministic sites follow from the latents.
    latents = {k: v for k, v in flat.items() if trace.get(k, {}).get("type") == "sample"}
    chains, draws = next(iter(by_chain.values())).shape[:2]
    likelihood = _likelihood_group(log_lik, model, latents, args, kwargs)
    for values in likelihood.values():
        for name, value in values.items():
            values[name] = np.reshape(value, (chains, draws, *value.shape[2:]))
    stats = {
        name.replace("adapt_state.", ""): value
        for name, value in mcmc.get_extra_fields(group_by_chain=True).items()
        if getattr(value, "ndim", 0) == 2
    }
    return {
        "posterior": samples,
        "sample_stats": stats,
        **likelihood,
        "observed_data": observed_values(trace),
        "attrs": {"alpha": _attr(common_alpha(trace)), "algorithm": _name(mcmc.sampler).lower()},
    }


def _trace_at(model: Any, values: dict[str, Array], args: tuple, kwargs: dict) -> dict[str, Any]:
    return get_trace(handlers.substitute(model, data=values), args, kwargs)


def _likelihood_group(
    log_lik: bool, model: Any, samples: dict[str, Array], args: tuple, kwargs: dict
) -> dict[str, Any]:
    if not log_lik:
        return {}
    return {"log_likelihood": _one_chain(log_likelihood(model, samples, args, kwargs))}


def _one_chain(samples: Mapping[str, Array]) -> dict[str, Any]:
    return {name: np.asarray(value)[None] for name, value in samples.items()}


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """Array-valued parameters; a neural module's tree is flattened by its path."""
    flat = {}
    for name, value in params.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            flat[name + jax.tree_util.keystr(path)] = leaf
    return flat


def _attr(alpha: float | dict[str, float]) -> float | str:
    return alpha if isinstance(alpha, float) else json.dumps(alpha)


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def versions() -> dict[str, str]:
    """Versions of this library and of what it ran on, as attributes."""
    return {
        "inference_library": "numpyro_tempered",
        "inference_library_version": version("numpyro_tempered"),
        "numpyro_version": version("numpyro"),
        "jax_version": version("jax"),
        "arviz_version": version("arviz"),
    }


def dataset(
    values: Mapping[str, Any],
    sample_dims: Sequence[str] = (),
    coords: Coords | None = None,
    dims: Dims | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> "xr.Dataset":
    """A Dataset of arrays, with ArviZ's default names for unnamed dimensions.

    Raises:
        ValueError: If ``dims`` names another number of dimensions than a variable has.
    """
    import xarray as xr

    coords, dims = dict(coords or {}), dict(dims or {})
    variables: dict[str, Any] = {}
    used: dict[str, int] = {}
    for name, value in values.items():
        array = np.asarray(value)
        rest = array.ndim - len(sample_dims)
        named = list(dims.get(name, [f"{name}_dim_{i}" for i in range(rest)]))
        if len(named) != rest:
            raise ValueError(
                f"dims names {named} for {name!r}, which has {rest} dimension(s) beside {sample_dims}."
            )
        all_dims = [*sample_dims, *named]
        variables[name] = (all_dims, array)
        used.update(zip(all_dims, array.shape, strict=True))
    indexes = {dim: coords.get(dim, np.arange(size)) for dim, size in used.items()}
    return xr.Dataset(variables, coords=indexes, attrs=dict(attrs or {}))


def assemble(groups: Mapping[str, "xr.Dataset"], attrs: Mapping[str, Any]) -> Any:
    """The groups as ArviZ data of the installed generation.

    Empty groups are left out.
    """
    import xarray as xr

    tree = xr.DataTree.from_dict(
        {"/": xr.Dataset(attrs=dict(attrs)), **{k: v for k, v in groups.items() if v.data_vars}}
    )
    import arviz as az

    return az.from_datatree(tree) if hasattr(az, "from_datatree") else tree


def group(data: Any, name: str) -> "xr.Dataset":
    """A group of ArviZ data as a Dataset, in either generation."""
    found = data[name]
    return found.to_dataset() if hasattr(found, "to_dataset") else found
