"""Sums over the local discrete latents of a model, by variable elimination in funsor."""

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.primitives import CondIndepStackFrame, Messenger

from numpyro_tempered.core import Array, ArrayLike, Shape
from numpyro_tempered.handlers import effects
from numpyro_tempered.handlers.dependence import Structure
from numpyro_tempered.handlers.numpyro_private import (
    STACK,
    dim_stack,
    guess_max_plate_nesting,
    mask_of,
)

if TYPE_CHECKING:
    from funsor import Funsor

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
    plates: list[CondIndepStackFrame]
    log_prob: Array
    scale: float | None


class _Factor(NamedTuple):
    site: effects.Message
    root: str  # its name without the prefix of a first step
    variables: frozenset[str]  # latents that it depends on, by their roots

    @property
    def is_data(self) -> bool:
        return self.site["is_observed"]

    @property
    def names(self) -> dict[int, str]:
        """Names of its dimensions."""
        return self.site["infer"]["dim_to_name"]

    @property
    def times(self) -> list[tuple[int, str]]:
        """Those that are steps of a scan."""
        return [
            (dim, name) for dim, name in self.names.items() if name.startswith("_time")
        ]

    @property
    def scales(self) -> dict[str | None, float]:
        return self.site.get("plate_to_scale") or {}


class _Term(NamedTuple):
    factor: _Factor
    shape: tuple[
        int, ...
    ]  # of its log-probability, whose dimensions of size 1 funsor drops
    log_prob: "Funsor"


def sum_out(
    model: Callable[[], object],
    outer_trace: effects.Trace,
    structure: Structure,
    latents: set[str],
) -> list[Sum]:
    """Enumerate the latents of a model and sum them out.

    Args:
        model: The model with its key and its arguments.
        outer_trace: A trace of it by ``marginalize``, whose latents have their values.
        structure: What depends on the latents.
        latents: Names of the discrete sites to sum over.

    Raises:
        ImportError: If funsor is absent.
        ValueError: As in ``marginalize``.
    """
    factors = []
    trace = _enumerate(model, outer_trace, latents)
    # Funsor drops dimensions of size 1, those of a latent with one value too.
    constant = {
        _root(name)
        for name, site in trace.items()
        if name in latents and _num_values(site) == 1
    }
    for name, site in trace.items():
        root = _root(name)
        parents = structure.depends.get(root, frozenset()) & latents
        if site["type"] != "sample" or not parents:
            continue
        in_shape = (
            frozenset(map(_root, site["infer"]["dim_to_name"].values())) & latents
            | parents & constant
        )
        # The first step of a scan has no state before it.
        if in_shape != parents and not (name != root and in_shape < parents):
            raise ValueError(
                f"site {root!r} depends on several values of the local discrete {sorted(parents - in_shape)} "
                "together (a sum over a plate, a factor in a scan): that cannot be summed out."
            )
        if not outer_trace[root].get("_control_flow_done"):
            _check_shape(site, outer_trace[root])
        factors.append(_Factor(site, root, parents))
    return [
        _eliminate(group)
        for group in _connected(factors)
        if any(f.is_data for f in group)
    ]


def _is_enumerated(site: effects.Message) -> bool:
    ndim = len(effects.draw_shape(site))
    return (
        site["infer"].get("enumerate") == "parallel" and jnp.ndim(site["value"]) > ndim
    )


def _check_shape(site: effects.Message, outer_site: effects.Message) -> None:
    """Refuse a site that has more elements in its plates where its latents are enumerated."""
    shape, outer_shape = _batch_shape(site), _batch_shape(outer_site)
    if any(
        n not in (1, m)
        for n, m in zip(reversed(shape), reversed(outer_shape), strict=False)
    ):
        raise ValueError(
            f"site {site['name']!r} has batch shape {shape} where its latents are summed out, and {outer_shape} "
            "elsewhere: its values must broadcast over dimensions to the left of the plates."
        )


def _batch_shape(site: effects.Message) -> Shape:
    fn, shape = site["fn"], jnp.shape(site["value"])
    return jnp.broadcast_shapes(
        tuple(fn.batch_shape), shape[: len(shape) - fn.event_dim]
    )


def _enumerate(
    model: Callable[[], object], outer_trace: effects.Trace, latents: set[str]
) -> effects.Trace:
    """Funsor's trace of the model with the latents enumerated."""
    try:
        from numpyro.contrib.funsor import enum, infer_config
        from numpyro.contrib.funsor import trace as packed_trace
    except ImportError as error:
        raise ImportError(
            "marginalize sums by funsor, which is not installed: run `pip install funsor`, or install "
            "numpyro_tempered with its extra enum."
        ) from error
    for name, site in outer_trace.items():
        if site["type"] == "sample" and name not in latents and _is_enumerated(site):
            raise ValueError(
                f"the discrete latent {name!r} is outside of the plates and enumerated by the inference "
                f"algorithm, while marginalize sums over {sorted(latents)}: sample {name!r} by DiscreteHMCGibbs, "
                "or, if it is the first state of a chain, draw it in the body of the scan."
            )
    values = {
        name: site["value"]
        for name, site in outer_trace.items()
        if not site.get(effects.IS_HIDDEN)
        and site["type"] != "prng_key"
        and site["value"] is not None
    }
    at_values = handlers.substitute(model, data=values)
    # The model names a latent of a scan without the prefix of its first step.
    config = infer_config(
        at_values,
        lambda site: {"enumerate": "parallel" if site["name"] in latents else None},
    )
    depth = guess_max_plate_nesting(outer_trace)
    with handlers.block():
        return packed_trace(enum(_name_plates(config), -depth - 1)).get_trace()


class _name_plates(Messenger):
    """Give funsor the names of the plates that a site is in, which only its own plates do."""

    def process_message(self, msg: effects.Message) -> None:
        if msg["type"] == "control_flow":
            effects.wrap_bodies(msg, _name_plates)
        if msg["type"] != "sample":
            return
        frame = dim_stack().global_frame
        # Where NumPyro enumerates around this, the model's plates are funsor's already.
        self.dims = {
            f.name: f.dim
            for f in msg["cond_indep_stack"]
            if f.name not in frame.name_to_dim
        }
        for name, dim in self.dims.items():
            frame.write(name, dim)
        for plate in STACK:
            if (
                isinstance(plate, numpyro.plate)
                and plate.name in self.dims
                and plate.size > plate.subsample_size
            ):
                msg.setdefault("plate_to_scale", {})[plate.name] = (
                    plate.size / plate.subsample_size
                )

    def postprocess_message(self, msg: effects.Message) -> None:
        # The trace outside has read the names by now, and the next site may have other dimensions there.
        if msg["type"] == "sample":
            for name, dim in self.dims.items():
                dim_stack().global_frame.free(name, dim)


def _connected(factors: list[_Factor]) -> list[list[_Factor]]:
    """The factors in groups that share no latent."""
    groups: list[tuple[frozenset[str], list[_Factor]]] = []
    for factor in factors:
        neighbours = [group for group in groups if group[0] & factor.variables]
        variables = factor.variables.union(*(group[0] for group in neighbours))
        # The group that came last stands first.
        members = [member for group in reversed(neighbours) for member in group[1]]
        groups = [group for group in groups if group not in neighbours] + [
            (variables, [*members, factor])
        ]
    return [members for _, members in groups]


def _eliminate(factors: list[_Factor]) -> Sum:
    """The sum over the latents of one group of factors.

    The steps of NumPyro's ``log_density`` for enumerated models, except that the plates which all factors
    are in stay, so that their scales multiply the logarithm of the sum and not the factors in it.
    """
    import funsor

    outer = set.intersection(*(effects.plates_of(factor.site) for factor in factors))
    frames = {
        frame.name: frame
        for factor in factors
        for frame in factor.site["cond_indep_stack"]
    }
    sum_vars = frozenset(f.site["name"] for f in factors if not f.is_data)
    prod_vars = frozenset(frames) - outer
    is_nan, terms = jnp.zeros((), bool), []
    for factor in factors:
        log_prob = _log_prob(factor, outer)
        is_nan = jnp.logical_or(is_nan, jnp.any(jnp.isnan(log_prob)))
        term = funsor.to_funsor(log_prob, output=funsor.Real, dim_to_name=factor.names)
        terms.append(_Term(factor, log_prob.shape, term))
    log_factors = [term.log_prob for term in terms if not term.factor.times]
    log_factors += _markov_factors(terms, sum_vars, prod_vars)
    # Eagerly: all factors of a latent are added before the logarithm of the sum is taken. An optimised
    # contraction shifts each factor by its own maximum, and the product of two that peak apart is 0.
    result = funsor.sum_product.sum_product(
        funsor.ops.logaddexp,
        funsor.ops.add,
        log_factors,
        eliminate=sum_vars | prod_vars,
        plates=prod_vars,
    )
    observed = list(dict.fromkeys(factor.root for factor in factors if factor.is_data))
    if rest := set(result.inputs) - outer:
        raise ValueError(
            f"the sum for {observed} keeps the dimensions {sorted(rest)}: give each batch dimension of these "
            "sites a plate, or make it an event dimension by to_event."
        )
    plates = sorted((frames[name] for name in outer), key=lambda frame: frame.dim)
    scale = None
    for name in sorted(outer & set(factors[0].scales)):
        scale = (
            factors[0].scales[name]
            if scale is None
            else scale * factors[0].scales[name]
        )
    log_prob = funsor.to_data(result, name_to_dim={f.name: f.dim for f in plates})
    # Funsor's logarithm of a sum takes NaN for minus infinity.
    log_prob = jnp.where(is_nan, jnp.nan, log_prob)
    # Funsor drops dimensions of size 1.
    shape = [1] * max((-frame.dim for frame in plates), default=0)
    for frame in plates:
        shape[frame.dim] = frame.size
    return Sum(observed, plates, jnp.reshape(log_prob, shape), scale)


def _markov_factors(
    terms: list[_Term], sum_vars: frozenset[str], prod_vars: frozenset[str]
) -> "list[Funsor]":
    """The factors of a scan with its steps multiplied."""
    import funsor
    from numpyro.contrib.funsor.infer_util import compute_markov_factors

    factors = [term.factor for term in terms]
    by_name = {factor.site["name"]: factor for factor in factors}
    in_scan = {factor.root for factor in factors if factor.times}
    by_time: dict[Funsor, list[Funsor]] = defaultdict(list)
    first: dict[Funsor, frozenset[str]] = defaultdict(frozenset)
    history = 0
    for factor, shape, log_prob in terms:
        if factor.times:
            ((dim, name),) = factor.times
            # Funsor's own inputs leave a single step out.
            time = funsor.Variable(name, funsor.Bint[shape[dim]])
            by_time[time].append(log_prob)
            first[time] |= frozenset(
                n for n in factor.names.values() if n.startswith(_PREVIOUS)
            )
            history = max(history, *(n.count(_PREVIOUS) for n in factor.names.values()))
    outside = [
        f.root for f in factors if f.root not in in_scan and f.variables & in_scan
    ]
    if len(by_time) > 1 or outside:
        raise ValueError(
            f"the state of a scan over {sorted(in_scan)} is used outside of it"
            + (f", by {outside}" if outside else ", by another scan")
            + ": that cannot be summed out. Put all steps in one scan."
        )
    if not by_time:
        return []
    markov: dict[Funsor, frozenset[str]] = defaultdict(frozenset)
    for time, variables in first.items():
        for variable in variables:
            names = by_name[_root(variable)].names.values()
            if variable in names:
                markov[time] |= frozenset(names)
    return compute_markov_factors(
        by_time,
        first,
        markov,
        sum_vars,
        prod_vars,
        history,
        funsor.ops.logaddexp,
        funsor.ops.add,
    )


def _log_prob(factor: _Factor, outer: set[str]) -> Array:
    """Log-probability of a site, times the scales of the plates that are summed over inside of the logarithm."""
    if None in factor.scales:
        raise ValueError(
            f"site {factor.root!r} is in a sum over discrete latents and in a handlers.scale: a scale "
            "inside of the sum is another model. Put the scale around marginalize."
        )
    site = factor.site
    fn, intermediates = site["fn"], site["intermediates"]
    log_prob = (
        fn.log_prob(site["value"], intermediates)
        if intermediates
        else fn.log_prob(site["value"])
    )
    if not factor.is_data:
        # A masked latent has log-probability 0 at each of its values, which would count their number as data.
        log_prob = jnp.where(_mask(fn), log_prob, -jnp.log(_num_values(site)))
    for name, scale in factor.scales.items():
        if name not in outer:
            log_prob = scale * log_prob
    return log_prob


def _num_values(latent: effects.Message) -> int:
    return latent["fn"].enumerate_support(expand=False).shape[0]


def _mask(fn: dist.Distribution) -> ArrayLike:
    """What the masks around a distribution leave."""
    mask: ArrayLike = True
    for layer in effects.layers(fn, "base_dist"):
        if isinstance(layer, dist.MaskedDistribution):
            mask = jnp.logical_and(mask, mask_of(layer))
    return mask


def _root(name: str) -> str:
    """The name of a site without the prefixes of a scan's first steps."""
    while name.startswith(_PREVIOUS):
        name = name.removeprefix(_PREVIOUS)
    return name
