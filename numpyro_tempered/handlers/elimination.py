"""Sums over the local discrete latents of a model, by variable elimination in funsor."""

from collections import defaultdict
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.util import _guess_max_plate_nesting

from numpyro_tempered.core.typing import Array, Model
from numpyro_tempered.handlers.dependence import Structure
from numpyro_tempered.handlers.effects import HIDDEN, Message, plates_of

Trace = dict[str, Message]
# A scan names the sites of its first step so.
_PREVIOUS = "_PREV_"


class Sum(NamedTuple):
    """The log-probability of some observed sites, with the latents that they share summed out.

    Attributes:
        observed: Names of the observed sites.
        plates: The plates that all their factors are in: there is one sum for each of their elements.
        log_prob: Unscaled, one for each element.
        scale: Subsampling scale of those plates, None for 1.
    """

    observed: list[str]
    plates: list[Any]
    log_prob: Array
    scale: float | None


class _Factor(NamedTuple):
    site: Message
    root: str  # its name without the prefix of a first step
    variables: frozenset[str]  # latents that it depends on, by their roots


def sum_out(
    model: Model,
    key: Array | None,
    visible: Trace,
    structure: Structure,
    latents: set[str],
    args: tuple,
    kwargs: dict,
) -> list[Sum]:
    """Enumerate the latents of a model and sum them out.

    Args:
        model: The model.
        key: Key that it was run with, if any.
        visible: A trace of it by ``marginalize``, whose latents have their values.
        structure: What depends on the latents.
        latents: Names of the discrete sites to sum over.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        ImportError: If funsor is absent.
        ValueError: As in ``marginalize``.
    """
    factors = []
    enumerated = _enumerate(model, key, visible, latents, args, kwargs)
    # Funsor drops dimensions of size 1, those of a latent with one value too.
    constant = {_root(name) for name, site in enumerated.items() if name in latents and _num_values(site) == 1}
    for name, site in enumerated.items():
        root = _root(name)
        expected = structure.depends.get(root, frozenset()) & latents
        if site["type"] != "sample" or not expected:
            continue
        found = frozenset(map(_root, site["infer"]["dim_to_name"].values())) & latents | expected & constant
        # The first step of a scan has no state before it.
        if found != expected and not (name != root and found < expected):
            raise ValueError(
                f"site {root!r} depends on the local discrete {sorted(expected - found)} not one by one in its "
                "plate or scan, but on several of its values together (a sum over a plate, a factor in a scan): "
                "that cannot be summed out."
            )
        if not visible[root].get("_control_flow_done"):
            _check_shape(site, visible[root])
        factors.append(_Factor(site, root, expected))
    return [_eliminate(group) for group in _connected(factors) if any(_is_data(f) for f in group)]


def _is_enumerated(site: Message) -> bool:
    shape = site["fn"].shape(site["kwargs"].get("sample_shape", ()))
    return site["infer"].get("enumerate") == "parallel" and jnp.ndim(site["value"]) > len(shape)


def _check_shape(site: Message, seen: Message) -> None:
    """Refuse a site that has more elements in its plates where its latents are enumerated."""
    here, there = _batch_shape(site), _batch_shape(seen)
    if any(n not in (1, m) for n, m in zip(reversed(here), reversed(there), strict=False)):
        raise ValueError(
            f"site {site['name']!r} has batch shape {here} where its latents are summed out, and {there} "
            "elsewhere: its values must broadcast over dimensions to the left of the plates."
        )


def _batch_shape(site: Message) -> tuple[int, ...]:
    fn, shape = site["fn"], jnp.shape(site["value"])
    return jnp.broadcast_shapes(tuple(fn.batch_shape), shape[: len(shape) - fn.event_dim])


def _enumerate(
    model: Model, key: Array | None, visible: Trace, latents: set[str], args: tuple, kwargs: dict
) -> Trace:
    """Funsor's trace of the model with the latents enumerated."""
    try:
        from numpyro.contrib.funsor import enum, infer_config
        from numpyro.contrib.funsor import trace as packed_trace
    except ImportError as error:
        raise ImportError(
            "marginalize sums by funsor, which is not installed: run `pip install funsor`, or install "
            "numpyro_tempered with its extra enum."
        ) from error
    for name, site in visible.items():
        if site["type"] == "sample" and name not in latents and _is_enumerated(site):
            raise ValueError(
                f"the discrete latent {name!r} is outside of the plates and enumerated by the inference "
                f"algorithm, while marginalize sums over {sorted(latents)}: sample {name!r} by DiscreteHMCGibbs, "
                "or, if it is the first state of a chain, draw it in the body of the scan."
            )
    values = {
        name: site["value"]
        for name, site in visible.items()
        if not site.get(HIDDEN) and site["type"] != "prng_key" and site["value"] is not None
    }
    fixed = handlers.substitute(model if key is None else handlers.seed(model, key), data=values)
    # The model names a latent of a scan without the prefix of its first step.
    config = infer_config(fixed, lambda site: {"enumerate": "parallel" if site["name"] in latents else None})
    depth = _guess_max_plate_nesting(visible)
    with handlers.block(), _enumerable_plates():
        return packed_trace(enum(config, -depth - 1)).get_trace(*args, **kwargs)


@contextmanager
def _enumerable_plates() -> Any:
    """NumPyro's plates as funsor's, and back to what they were: another enumeration may be around."""
    from numpyro.contrib.funsor import plate as enum_plate
    from numpyro.contrib.funsor.infer_util import plate_to_enum_plate

    class plate(enum_plate):
        def __enter__(self) -> Array:
            # Funsor's gives a scalar where the plate has one element.
            self.indices = jnp.reshape(super().__enter__(), (-1,))
            return self.indices

    before = vars(numpyro.plate).get("__new__")
    try:
        with plate_to_enum_plate():
            numpyro.plate.__new__ = lambda _, *args, **kwargs: plate(*args, **kwargs)
            yield
    finally:
        if before is not None:
            numpyro.plate.__new__ = before


def _connected(factors: list[_Factor]) -> list[list[_Factor]]:
    """The factors in groups that share no latent."""
    groups: list[tuple[set[str], list[_Factor]]] = []
    for factor in factors:
        variables, members = set(factor.variables), [factor]
        apart = []
        for group in groups:
            if group[0] & variables:
                variables |= group[0]
                members = group[1] + members
            else:
                apart.append(group)
        groups = [*apart, (variables, members)]
    return [members for _, members in groups]


def _eliminate(factors: list[_Factor]) -> Sum:
    """The sum over the latents of one group of factors.

    The steps of NumPyro's ``log_density`` for enumerated models, except that the plates which all factors
    are in stay, so that their scales multiply the logarithm of the sum and not the factors in it.
    """
    import funsor
    from numpyro.contrib.funsor.infer_util import compute_markov_factors

    kept = set.intersection(*(plates_of(factor.site) for factor in factors))
    frames = {frame.name: frame for factor in factors for frame in factor.site["cond_indep_stack"]}
    sum_vars = frozenset(f.site["name"] for f in factors if not f.site["is_observed"])
    prod_vars = frozenset(frames) - kept
    log_factors = []
    time_factors: dict[Any, list[Any]] = defaultdict(list)
    initial: dict[Any, frozenset[str]] = defaultdict(frozenset)
    markov: dict[Any, frozenset[str]] = defaultdict(frozenset)
    history = 0
    is_nan = jnp.zeros((), bool)
    for factor in factors:
        site = factor.site
        log_prob = _log_prob(site, kept)
        is_nan |= jnp.any(jnp.isnan(log_prob))
        named = site["infer"]["dim_to_name"]
        term = funsor.to_funsor(log_prob, output=funsor.Real, dim_to_name=named)
        times = _times(site)
        if not times:
            log_factors.append(term)
            continue
        ((dim, name),) = times
        time = funsor.Variable(name, funsor.Bint[log_prob.shape[dim]])
        time_factors[time].append(term)
        initial[time] |= frozenset(n for n in named.values() if n.startswith(_PREVIOUS))
        history = max(history, *(n.count(_PREVIOUS) for n in named.values()))
    scanned = {
        f.root for f in factors if any(n.startswith("_time") for n in f.site["infer"]["dim_to_name"].values())
    }
    apart = [f.root for f in factors if f.root not in scanned and f.variables & scanned]
    if len(time_factors) > 1 or apart:
        raise ValueError(
            f"the state of a scan over {sorted(scanned)} is used outside of it"
            + (f", by {apart}" if apart else ", by another scan")
            + ": that cannot be summed out. Put all steps in one scan."
        )
    by_name = {factor.site["name"]: factor.site for factor in factors}
    for time, first in initial.items():
        for variable in first:
            names = by_name[_root(variable)]["infer"]["dim_to_name"].values()
            if variable in names:
                markov[time] |= frozenset(names)
    logaddexp, add = funsor.ops.logaddexp, funsor.ops.add
    if time_factors:
        log_factors += compute_markov_factors(
            time_factors, initial, markov, sum_vars, prod_vars, history, logaddexp, add
        )
    # Eagerly: all factors of a latent are added before the logarithm of the sum is taken. An optimised
    # contraction shifts each factor by its own maximum, and the product of two that peak apart is 0.
    result = funsor.sum_product.sum_product(
        logaddexp, add, log_factors, eliminate=sum_vars | prod_vars, plates=prod_vars
    )
    left = set(result.inputs) - kept
    observed = list(dict.fromkeys(factor.root for factor in factors if _is_data(factor)))
    if left:
        raise ValueError(
            f"the sum for {observed} keeps the dimensions {sorted(left)}: give each batch dimension of these "
            "sites a plate, or make it an event dimension by to_event."
        )
    plates = [frames[name] for name in sorted(kept, key=lambda name: frames[name].dim)]
    scales = _scales(factors[0].site)
    scale = None
    for name in kept & set(scales):
        scale = scales[name] if scale is None else scale * scales[name]
    log_prob = funsor.to_data(result, name_to_dim={f.name: f.dim for f in plates})
    # Funsor's logarithm of a sum takes NaN for minus infinity.
    log_prob = jnp.where(is_nan, jnp.nan, log_prob)
    # Funsor drops dimensions of size 1.
    shape = [1] * max((-frame.dim for frame in plates), default=0)
    for frame in plates:
        shape[frame.dim] = frame.size
    return Sum(observed, plates, jnp.reshape(log_prob, shape), scale)


def _log_prob(site: Message, kept: set[str]) -> Array:
    """Log-probability of a site, times the scales of the plates that are summed over inside of the logarithm."""
    scales = _scales(site)
    if None in scales:
        raise ValueError(
            f"site {_root(site['name'])!r} is in a sum over discrete latents and in a handlers.scale: a scale "
            "inside of the sum is another model. Put the scale around marginalize."
        )
    fn, intermediates = site["fn"], site["intermediates"]
    log_prob = fn.log_prob(site["value"], intermediates) if intermediates else fn.log_prob(site["value"])
    if not site["is_observed"]:
        # A masked latent has log-probability 0 at each of its values, which would count their number as data.
        log_prob = jnp.where(_mask(fn), log_prob, -jnp.log(_num_values(site)))
    for name, scale in scales.items():
        if name not in kept:
            log_prob = scale * log_prob
    return log_prob


def _num_values(latent: Message) -> int:
    return latent["fn"].enumerate_support(expand=False).shape[0]


def _mask(fn: Any) -> Any:
    """What the masks around a distribution leave."""
    mask: Any = True
    while hasattr(fn, "base_dist"):
        if isinstance(fn, dist.MaskedDistribution):
            mask = jnp.logical_and(mask, fn._mask)
        fn = fn.base_dist
    return mask


def _scales(site: Message) -> dict[str | None, Any]:
    return dict(site.get("plate_to_scale") or {})


def _times(site: Message) -> list[tuple[int, str]]:
    """The dimensions of a site that are steps of a scan."""
    return [(dim, name) for dim, name in site["infer"]["dim_to_name"].items() if name.startswith("_time")]


def _is_data(factor: _Factor) -> bool:
    return factor.site["is_observed"]


def _root(name: str) -> str:
    """The name of a site without the prefixes of a scan's first steps."""
    while name.startswith(_PREVIOUS):
        name = name.removeprefix(_PREVIOUS)
    return name
