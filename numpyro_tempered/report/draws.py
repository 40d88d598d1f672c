"""Draws of every algorithm, with their model and data, as a :class:`~numpyro_tempered.Run`.

A result has the method ``as_run`` of the protocol :class:`~numpyro_tempered.core.result.Result`. This module adds
the runs of an ``MCMC`` and of plain draws.
"""

from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import MCMC
from numpyro.primitives import CondIndepStackFrame, Messenger

from numpyro_tempered.core.batching import compiled_map
from numpyro_tempered.core.processes import automatic_mesh
from numpyro_tempered.core.result import Run, refuse_data
from numpyro_tempered.core.typing import Array, ArrayLike, Model
from numpyro_tempered.handlers.arguments import model_arguments
from numpyro_tempered.handlers.likelihood import (
    Site,
    Trace,
    get_trace,
    observed_sites,
    untempered_log_prob,
)
from numpyro_tempered.handlers.numpyro_private import arguments
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.handlers.robust import as_densities
from numpyro_tempered.report.arviz import Dims, variable_name


def as_run(
    result: object,
    data: tuple,
    kwargs: dict,
    *,
    num_samples: int = 1000,
    rng_key: Array | None = None,
    by_chain: bool = False,
) -> Run:
    """The draws of any result, as :func:`~numpyro_tempered.to_inference_data` takes it.

    Raises:
        TypeError: If it has none.
        ValueError: If the data are missing, or do not belong to it.
    """
    if isinstance(result, MCMC):
        refuse_data(result, data, kwargs)
        return from_mcmc(result, rng_key)
    if isinstance(result, Mapping):
        if not data or not callable(data[0]):
            raise TypeError(
                "draws are to_inference_data(samples, model, *args): the tempered model is missing."
            )
        return from_draws(result, data[0], data[1:], kwargs, by_chain, rng_key)
    if not hasattr(result, "as_run"):
        raise TypeError(
            "to_inference_data takes a result with draws (a method as_run), such as a TemperedFit, an OnlineVI "
            "with its state and data, or a MixtureFit with its data and a key; an MCMC; or a dictionary of draws "
            f"with its model and data, got {type(result).__name__}."
        )
    return result.as_run(*data, num_samples=num_samples, rng_key=rng_key, **kwargs)


def from_mcmc(mcmc: MCMC, rng_key: Array | None) -> Run:
    """The draws of an MCMC.

    Raises:
        ValueError: If it has not run, or its kernel has no model.
    """
    if mcmc.last_state is None:
        raise ValueError("the MCMC has not run a model yet: call mcmc.run first.")
    if getattr(mcmc.sampler, "model", None) is None:
        raise ValueError(
            f"the kernel {name_of(mcmc.sampler)} has no model, only a potential: pass its draws and the model, "
            "to_inference_data(mcmc.get_samples(group_by_chain=True), model, *args, group_by_chain=True)."
        )
    stats = {
        # ArviZ's plots look for "diverging", without the name of a state that holds it.
        name.rpartition(".")[2]: value
        for name, value in mcmc.get_extra_fields(group_by_chain=True).items()
        if getattr(value, "ndim", 0) == 2
    }
    return Run(
        mcmc.sampler.model,
        mcmc.get_samples(group_by_chain=True),
        *arguments(mcmc),
        _first_key(mcmc.last_state) if rng_key is None else rng_key,
        groups={"sample_stats": stats},
        attrs={"algorithm": name_of(mcmc.sampler).lower()},
    )


def from_draws(
    draws: Mapping[str, ArrayLike],
    model: Model,
    args: tuple,
    kwargs: dict,
    by_chain: bool,
    rng_key: Array | None,
) -> Run:
    """The run of plain draws, with their model and data.

    Raises:
        ValueError: If their numbers differ, the model lacks one of their sites, or they lack a site of the model.
    """
    samples = (
        {name: jnp.asarray(value) for name, value in draws.items()}
        if by_chain
        else one_chain(draws)
    )
    leading = {name: value.shape[:2] for name, value in samples.items()}
    if (
        not samples
        or len(set(leading.values())) > 1
        or any(len(v) < 2 for v in leading.values())
    ):
        shapes = {name: np.shape(value) for name, value in draws.items()}
        expected = "(chains, draws, ...)" if by_chain else "(draws, ...)"
        raise ValueError(
            f"the draws must be arrays {expected} with one number of draws, got shapes {shapes}."
        )
    args, kwargs = jax.tree.map(
        automatic_mesh, model_arguments(as_run, model, args, kwargs, finite=False)
    )
    run = Run(model, samples, args, kwargs, rng_key, attrs={"algorithm": "draws"})
    with _find_free_sites():
        trace = trace_at_first_draw(run)
    fixed = {k for k, s in trace.items() if s["type"] == "param" and "is_free" not in s}
    require({k: s for k, s in trace.items() if k not in fixed}, _FITTED)
    strange = sorted(set(samples) - {k for k, site in trace.items() if is_shown(site)})
    if strange:
        raise ValueError(
            f"the draws hold {strange}, which are not latent or deterministic sites of the model: leave them out."
        )
    return run


_FITTED = {
    "params": ", without fitted values: fix them by numpyro.handlers.substitute(model, data=params)."
}


class _find_free_sites(Messenger):
    """Mark params, and refuse latents, that neither the draws nor a handler of the model give a value."""

    def process_message(self, msg: Site) -> None:
        if msg["value"] is not None:
            return
        msg["is_free"] = True
        if msg["type"] == "sample":
            raise ValueError(
                f"the draws hold no values of the latent site {msg['name']!r} of the model."
            )


def trace_at_first_draw(run: Run) -> Trace:
    """The trace of the model at the first draw."""
    first = {name: value[0, 0] for name, value in run.samples.items()}
    return get_trace(
        handlers.substitute(seeded_model(run), data=first), run.args, dict(run.kwargs)
    )


def seeded_model(run: Run) -> Model:
    """The model with a key for what it draws besides its latent sites.

    Raises:
        ValueError: If the result has no model.
    """
    if run.model is None:
        raise ValueError("this result has no model of data.")
    return run.model if run.rng_key is None else handlers.seed(run.model, run.rng_key)


def evaluate_draws(
    run: Run, latents: Mapping[str, Array], log_lik: bool, derived: Collection[str]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Log-likelihoods and deterministic sites at draws of the latents, both by site, with one row for each draw.

    Args:
        run: The model and its data.
        latents: Values with one leading axis of S draws.
        log_lik: Whether to evaluate the untempered pointwise log-likelihood of each observed site, ``(S,
            *batch_shape)``; ``numpyro.factor`` sites are left out.
        derived: Names of the deterministic sites to evaluate.
    """
    model = seeded_model(run)

    def one(values: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        with as_densities():
            trace = get_trace(
                handlers.substitute(model, data=values), run.args, dict(run.kwargs)
            )
        sites = observed_sites(trace) if log_lik else {}
        log_probs = {name: untempered_log_prob(site) for name, site in sites.items()}
        return log_probs, {name: jnp.asarray(trace[name]["value"]) for name in derived}

    return compiled_map(one, dict(latents), 64)


def plate_dims(
    trace: Trace, shapes: Mapping[str, tuple[int, ...]], dims: Dims
) -> dict[str, list[str]]:
    """Names of the dimensions of sites: those of their plates, and those in ``infer={"event_dims": ...}``.

    A plate names a dimension of its size alone: a site may be broadcast along it, and ``dims``, which others have
    named, may use its name for another one.
    """
    # The first three are dimensions of results, and no plate's size is 0.
    sizes = {"chain": 0, "draw": 0, "alpha": 0}
    for name, shape in shapes.items():
        sizes |= zip(dims.get(name, ()), shape, strict=False)
    named = {}
    for name, shape in shapes.items():
        site, labels = trace[name], {}
        plates = _plates_in(site, len(shape))
        # What belongs to the event of a deterministic site is not said: the plates come first, as in ArviZ.
        depth = max(
            (-plate.dim for plate in site.get("cond_indep_stack", ())), default=0
        )
        batch = len(shape) - site["fn"].event_dim if site["type"] == "sample" else depth
        places = [(plate.name, plate.size, batch + plate.dim) for plate in plates]
        events = (site.get("infer") or {}).get("event_dims", ())
        starts = range(len(shape) - len(events), len(shape))
        places += [
            (dim, shape[axis], axis)
            for dim, axis in zip(events, starts, strict=True)
            if axis >= 0
        ]
        for dim, size, axis in places:
            if (
                0 <= axis < len(shape)
                and shape[axis] == size
                and sizes.setdefault(dim, size) == size
            ):
                labels[axis] = variable_name(dim)
        if labels:
            named[name] = [
                labels.get(i, f"{variable_name(name)}_dim_{i}")
                for i in range(len(shape))
            ]
    return named


def _plates_in(site: Site, num_dims: int) -> list[CondIndepStackFrame]:
    """The plates of a site that may name one of its dimensions.

    Of a deterministic site none where control flow may have stacked it; and where it has fewer dimensions than
    plates, as a sum over one, those that no other plate has the size of.
    """
    plates = list(site.get("cond_indep_stack", ()))
    if site["type"] == "sample":
        return plates
    if site.get("_control_flow_done"):
        return []
    if num_dims >= max((-plate.dim for plate in plates), default=0):
        return plates
    sizes = [plate.size for plate in plates]
    return [plate for plate in plates if sizes.count(plate.size) == 1]


def variables_of(run: Run) -> set[str]:
    """Names of the variables of a run, whose dimensions may be named."""
    sites = () if run.model is None else trace_at_first_draw(run)
    return {
        *run.samples,
        *sites,
        *(name for values in run.groups.values() for name in values),
    }


def is_shown(site: Site) -> bool:
    """Whether a site belongs to the posterior group."""
    return site["type"] == "deterministic" or (
        site["type"] == "sample" and not site["is_observed"]
    )


def _first_key(state: object) -> Array | None:
    """The key of an MCMC's state, of its first chain where there are several."""
    key = getattr(state, "rng_key", None)
    if key is None or jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return None if key is None else jnp.ravel(key)[0]
    return jnp.reshape(key, (-1, key.shape[-1]))[0]


def one_chain(samples: Mapping[str, ArrayLike]) -> dict[str, Array]:
    """Draws ``(draw, ...)`` as ``(chain, draw, ...)``."""
    return {name: jnp.asarray(value)[None] for name, value in samples.items()}


def plain_params(params: Mapping[str, object]) -> dict[str, Array]:
    """Array-valued parameters; a neural module's tree is flattened by its path."""
    flat = {}
    for name, value in params.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            flat[name + jax.tree_util.keystr(path)] = leaf
    return flat


def name_of(value: object) -> str:
    """Name of a function or class, or of an object's class."""
    return getattr(value, "__name__", type(value).__name__)
