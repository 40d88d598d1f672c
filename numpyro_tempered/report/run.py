"""Draws of every algorithm, with what made them, in one form."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_tempered.core.typing import Array, Model
from numpyro_tempered.handlers.likelihood import Trace, get_trace, plain_arrays


class Run(NamedTuple):
    """What every result comes down to: draws of a model on its data.

    Attributes:
        model: The tempered model.
        samples: Draws ``(chain, draw, ...)`` of all latent sites, and of others to be shown.
        args: The model's positional arguments.
        kwargs: The model's keyword arguments.
        rng_key: Key of what is drawn for the result.
        groups: Groups of the algorithm's own.
        attrs: Attributes of the algorithm's own.
        dims: Names of dimensions by variable, beside chain and draw.
    """

    model: Model
    samples: dict[str, Array]
    args: tuple
    kwargs: dict[str, Any]
    rng_key: Array | None
    groups: dict[str, dict[str, Any]]
    attrs: dict[str, Any]
    dims: dict[str, list[str]] = {}  # noqa: RUF012


class Result(Protocol):
    """What :func:`to_inference_data` and the plots take of any algorithm: a result that knows itself."""

    def as_run(self, *data: Any, num_samples: int = 1000, rng_key: Array | None = None, **kwargs: Any) -> Run:
        """Draws with what made them.

        Args:
            *data: What the result was fitted to, where it does not hold it.
            num_samples: Number of draws.
            rng_key: Key of the draws, where the result brings none or another is wanted.
            **kwargs: Arguments of the result's own kind.
        """
        ...


def from_mcmc(mcmc: Any, rng_key: Array | None) -> Run:
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
        # As in ArviZ, where plots look for "diverging", whatever state of the kernel it stands in.
        name.rpartition(".")[2]: value
        for name, value in mcmc.get_extra_fields(group_by_chain=True).items()
        if getattr(value, "ndim", 0) == 2
    }
    return Run(
        mcmc.sampler.model,
        mcmc.get_samples(group_by_chain=True),
        mcmc._args,
        mcmc._kwargs,
        _first_key(mcmc.last_state) if rng_key is None else rng_key,
        {"sample_stats": stats},
        {"algorithm": name_of(mcmc.sampler).lower()},
    )


def from_draws(
    draws: Mapping[str, Any], model: Model, args: tuple, kwargs: dict, by_chain: bool, rng_key: Array | None
) -> Run:
    """Draws of the user's own.

    Raises:
        ValueError: If they do not agree in their number, hold other sites than the model has, or lack one.
    """
    samples = {
        name: jnp.asarray(value) if by_chain else jnp.asarray(value)[None] for name, value in draws.items()
    }
    leading = {name: value.shape[:2] for name, value in samples.items()}
    if not samples or len(set(leading.values())) > 1 or any(len(v) < 2 for v in leading.values()):
        shapes = {name: np.shape(value) for name, value in draws.items()}
        expected = "(chains, draws, ...)" if by_chain else "(draws, ...)"
        raise ValueError(f"the draws must be arrays {expected} with one number of draws, got shapes {shapes}.")
    args, kwargs = plain_arrays((args, kwargs))
    run = Run(model, samples, args, kwargs, rng_key, {}, {"algorithm": "draws"})
    with _refuse_free_sites():
        trace = trace_at_first_draw(run)
    strange = sorted(set(samples) - {k for k, site in trace.items() if is_shown(site)})
    if strange:
        raise ValueError(
            f"the draws hold {strange}, which are not latent or deterministic sites of the model: leave them out."
        )
    return run


class _refuse_free_sites(Messenger):
    """Refuse sites that neither the draws nor a handler of the model give a value."""

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["value"] is not None:
            return
        if msg["type"] == "param":
            raise ValueError(
                f"the model has a param {msg['name']!r}, whose fitted value is not known: fix it by "
                "numpyro.handlers.substitute(model, data=params)."
            )
        if msg["type"] == "sample":
            raise ValueError(f"the draws hold no values of the latent site {msg['name']!r} of the model.")


def trace_at_first_draw(run: Run) -> Trace:
    """The trace of the model at the first draw."""
    first = {name: value[0, 0] for name, value in run.samples.items()}
    model = run.model if run.rng_key is None else handlers.seed(run.model, run.rng_key)
    return get_trace(handlers.substitute(model, data=first), run.args, run.kwargs)


def is_shown(site: dict[str, Any]) -> bool:
    """Whether a site belongs to the posterior group."""
    return site["type"] == "deterministic" or (site["type"] == "sample" and not site["is_observed"])


def _first_key(state: Any) -> Array | None:
    """The key of an MCMC's state, of its first chain where there are several."""
    key = getattr(state, "rng_key", None)
    if key is None or jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return None if key is None else jnp.ravel(key)[0]
    return jnp.reshape(key, (-1, key.shape[-1]))[0]


def one_chain(samples: Mapping[str, Array]) -> dict[str, Array]:
    """Draws ``(draw, ...)`` as ``(chain, draw, ...)``."""
    return {name: jnp.asarray(value)[None] for name, value in samples.items()}


def plain_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Array-valued parameters; a neural module's tree is flattened by its path."""
    flat = {}
    for name, value in params.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            flat[name + jax.tree_util.keystr(path)] = leaf
    return flat


def name_of(value: Any) -> str:
    """Name of a function or class, or of an object's class."""
    return getattr(value, "__name__", type(value).__name__)
