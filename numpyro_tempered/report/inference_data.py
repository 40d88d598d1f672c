"""Results of every algorithm as ArviZ data."""

import json
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC

from numpyro_tempered.core.typing import Array
from numpyro_tempered.handlers.likelihood import (
    Trace,
    common_alpha,
    latent_sites,
    likelihood_sites,
    log_likelihood,
    observed_values,
    other_scale,
    subsamples,
)
from numpyro_tempered.handlers.replicate import replicate
from numpyro_tempered.online.base import Losses
from numpyro_tempered.report.arviz import Coords, Dims, assemble, dataset, group, variable_name, versions
from numpyro_tempered.report.run import (
    Run,
    from_draws,
    from_mcmc,
    is_shown,
    trace_at_first_draw,
)

__all__ = ["assemble", "dataset", "group", "to_inference_data"]


def to_inference_data(
    result: Any,
    *data: Any,
    num_samples: int = 1000,
    rng_key: Array | None = None,
    coords: Coords | None = None,
    dims: Dims | None = None,
    log_lik: bool = True,
    posterior_predictive: bool = False,
    group_by_chain: bool = False,
    losses: Losses | None = None,
    **kwargs: Any,
) -> Any:
    """ArviZ data of a tempered result.

    Groups: ``posterior`` and ``log_likelihood`` with dims ``(chain, draw)``, the latter untempered and
    unscaled; ``observed_data``; ``posterior_predictive`` on request; for variational results ``variational``
    (the trace of the loss and the parameters); for MCMC ``sample_stats``. Attributes: ``alpha`` (in JSON where
    it differs by site), the rule or algorithm, versions. A slash in a site's name becomes a dot.

    Of a mixture: draws of ``weights`` and of the components' parameters with dims ``component``, ``feature``, and
    ``level`` (of a category) or ``other_feature`` (of a matrix); the log-likelihood of each row, summed over the
    components, of its observed entries; in ``variational`` F at each pass and of each restart, concentrations and
    counts; attributes ``objective`` (F), ``elbo`` and ``elbo_se`` (E1), ``num_components``, ``num_occupied``,
    ``converged``. The factors tell components apart, so that no draw has labels switched: components stand from
    the largest to the smallest count, or as ``order`` says.

    Args:
        result: A ``TemperedFit``; an ``MCMC`` that has run a model, with any kernel; an ``OnlineVI``, followed
            by its state and the data it has seen; a ``MixtureFit``, followed by its data; or the
            draws of any other algorithm, a dictionary of arrays ``(S, ...)`` by site, followed by the tempered
            model and its arguments.
        *data: For an online run ``state, *args``, for a mixture ``x``, for draws ``model, *args``.
        num_samples: Draws from a variational posterior.
        rng_key: For what is drawn here; by default the key kept in the fit or state, or that of the MCMC's
            last state. Draws given as such bring none; nor does a mixture, which needs one.
        coords: Coordinate values by dimension.
        dims: Names of the event dimensions by variable, without chain and draw.
        log_lik: Whether to evaluate the log-likelihood group, which takes S × n numbers.
        posterior_predictive: Whether to draw the observed sites anew, once for each posterior draw, from their
            untempered distributions. Where an observed site depends on another it sees the data: in a time
            series each replicate is one step ahead.
        group_by_chain: Whether the draws given are ``(C, S, ...)``, by chain.
        losses: For an online run, the losses that ``run`` returned, to be kept as its trace.
        **kwargs: For an online run or draws, keyword arguments of the model; for a mixture ``sample_weight``,
            as in its fit, and ``order``, the old number of each component.

    Returns:
        ``arviz.InferenceData`` under ArviZ 0.x, ``xarray.DataTree`` under 1.x.

    Raises:
        TypeError: If ``result`` is none of these.
        ValueError: If the data are missing, an MCMC has not run a model, the draws do not fit their model,
            ``dims`` names no variable, or replicates are asked for and there is no key or no sampler.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> fit = nt.fit_svi(jax.random.key(0), model, AutoNormal, jnp.ones(6), alpha=0.5)
        >>> data = nt.to_inference_data(fit, posterior_predictive=True)
        >>> data["posterior"]["theta"].shape, data["posterior_predictive"]["y"].shape
        ((1, 1000), (1, 1000, 6))

        The draws of any sampler:

        >>> draws = {"theta": jax.random.normal(jax.random.key(1), (50,))}
        >>> nt.to_inference_data(draws, nt.temper(model, alpha=0.5), jnp.ones(6)).attrs["alpha"]
        0.5
    """
    if isinstance(result, MCMC):
        if data or kwargs:
            raise ValueError("an MCMC holds its data: pass it alone.")
        run = from_mcmc(result, rng_key)
    elif isinstance(result, Mapping):
        if not data or not callable(data[0]):
            raise TypeError("draws are to_inference_data(samples, model, *args): the tempered model is missing.")
        run = from_draws(result, data[0], data[1:], kwargs, group_by_chain, rng_key)
    elif hasattr(result, "as_run"):
        if losses is not None:
            kwargs["losses"] = losses
        run = result.as_run(*data, num_samples=num_samples, rng_key=rng_key, **kwargs)
    else:
        raise TypeError(
            "to_inference_data takes a TemperedFit, an MCMC, an OnlineVI with its state and data, a "
            "MixtureFit with its data and a key, or a dictionary of draws with its model and data, got "
            f"{type(result).__name__}."
        )
    groups, attrs = _evaluate(run, log_lik, posterior_predictive)
    return _to_arviz(groups, attrs | versions(), coords, {**run.dims, **(dims or {})})


def _evaluate(run: Run, log_lik: bool, predictive: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The groups of a run, and its attributes."""
    trace = trace_at_first_draw(run)
    flat = {name: jnp.reshape(value, (-1, *value.shape[2:])) for name, value in run.samples.items()}
    # The draws of deterministic sites follow from those of the latents.
    latents = {name: flat[name] for name in latent_sites(trace) if name in flat}
    missing = sorted(set(latent_sites(trace)) - set(latents))
    if subsamples(trace):
        _leave_out("a plate of the model subsamples", "which needs all data", predictive, log_lik)
        log_lik = False
    elif missing:
        _leave_out(
            f"the draws hold no values of the latent sites {missing} (a sampler that enumerates them keeps none)",
            "which depends on them",
            predictive,
            log_lik,
        )
        log_lik = False
    chains_draws = next(iter(run.samples.values())).shape[:2]
    model = run.model if run.rng_key is None else handlers.seed(run.model, run.rng_key)

    def by_chain(values: dict[str, Array]) -> dict[str, Any]:
        return {k: np.reshape(v, (*chains_draws, *v.shape[1:])) for k, v in values.items()}

    groups: dict[str, Any] = {
        "posterior": {k: v for k, v in run.samples.items() if k in trace and is_shown(trace[k])}
    }
    if log_lik:
        groups["log_likelihood"] = by_chain(log_likelihood(model, latents, run.args, run.kwargs))
    if predictive:
        if run.rng_key is None:
            raise ValueError("posterior_predictive draws data: pass an rng_key.")
        # No split of this key that made the posterior draws reaches as far.
        key = jax.random.fold_in(run.rng_key, 2**31 - 1)
        groups["posterior_predictive"] = by_chain(replicate(key, model, latents, run.args, run.kwargs))
    alpha = common_alpha(trace)
    attrs = {"alpha": alpha if isinstance(alpha, float) else _json(alpha), **run.attrs}
    scales = _scales(trace)
    if scales and not subsamples(trace):
        attrs["likelihood_scale"] = _json(scales)
    return {**groups, "observed_data": observed_values(trace), **run.groups}, attrs


def _leave_out(reason: str, why: str, predictive: bool, log_lik: bool) -> None:
    if predictive:
        raise ValueError(f"{reason}: there can be no posterior_predictive group, {why}.")
    if log_lik:
        warnings.warn(f"{reason}: the log_likelihood group, {why}, is left out.", stacklevel=4)


def _scales(trace: Trace) -> dict[str, float | None]:
    """Scales of the likelihood beside alpha, where there are; None where they differ within a site."""
    scales = {name: np.unique(np.asarray(other_scale(site))) for name, site in likelihood_sites(trace).items()}
    return {
        name: float(scale[0]) if len(scale) == 1 else None
        for name, scale in scales.items()
        if not np.array_equal(scale, [1.0])
    }


_SAMPLE_GROUPS = ("posterior", "log_likelihood", "posterior_predictive", "sample_stats")


def _to_arviz(
    groups: Mapping[str, Mapping[str, Any]], attrs: dict[str, Any], coords: Coords | None, dims: Dims | None
) -> Any:
    for values in groups.values():
        dotted = [variable_name(name) for name in values]
        if len(set(dotted)) < len(dotted):
            raise ValueError(
                f"of the sites {sorted(values)} two have one name where slashes are written as dots."
            )
    groups = {name: {variable_name(k): v for k, v in values.items()} for name, values in groups.items()}
    dims = {variable_name(k): list(v) for k, v in (dims or {}).items()}
    variables = {name for values in groups.values() for name in values}
    unknown = sorted(set(dims) - variables)
    if unknown:
        raise ValueError(f"dims names {unknown}, which are not among the variables {sorted(variables)}.")
    datasets = {}
    for name, values in groups.items():
        named = dict(dims)
        if name == "log_likelihood":
            # A log-probability has no event dimensions.
            named = {k: named[k][: np.ndim(v) - 2] for k, v in values.items() if k in named}
        elif name == "variational":
            named.setdefault("loss", ["step"])
            named |= {k: ["round"] for k, v in values.items() if k.startswith("loss_") and np.ndim(v) == 1}
        sample_dims = ("chain", "draw") if name in _SAMPLE_GROUPS else ()
        datasets[name] = dataset(values, sample_dims, coords, named, attrs)
    return assemble(datasets, attrs)


def _json(by_site: Mapping[str, Any]) -> str:
    return json.dumps({variable_name(name): value for name, value in by_site.items()})
