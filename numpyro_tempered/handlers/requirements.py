"""One table of what verbs cannot take of a model: predicates on its trace, with their sentences."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import numpyro.distributions as dist
from jax.tree_util import keystr, tree_leaves_with_path
from numpyro.distributions import constraints
from numpyro.distributions.constraints import Constraint
from numpyro.primitives import Messenger

from numpyro_tempered.core import is_traced, spans_processes, to_host
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import (
    LOCAL,
    PRIOR_FACTOR,
    Trace,
    base_distribution,
    layers,
)
from numpyro_tempered.handlers.likelihood import Site
from numpyro_tempered.handlers.robust import divergences

# Rows of the table that a verb names, with its own end of their sentences; "" for the end of the row.
Needs: TypeAlias = Mapping[str, str]


class Requirement(NamedTuple):
    """A requirement of a model.

    Attributes:
        find: From a trace to what breaks the requirement, mostly names of sites; empty where it holds.
        problem: The beginning of the sentence, which tells what came, of ``{names}`` or the ``{first}`` of these.
        advice: Its end: what was expected, and what to do.
    """

    find: Callable[[Trace], Iterable[str]]
    problem: str
    advice: str = ""


def require(trace: Trace, needs: Needs, model: str = "the model") -> None:
    """Raise ValueError at the first of these requirements that a model does not meet.

    Args:
        trace: Of the model, by :func:`~numpyro_tempered.handlers.likelihood.get_trace`.
        needs: The names of the requirements, in order, with what to say in the place of their advice.
        model: What to call the model.
    """
    for name, advice in needs.items():
        row = REQUIREMENTS[name]
        if names := list(row.find(trace)):
            problem = row.problem.format(model=model, names=names, first=names[0])
            raise ValueError(problem + (advice or row.advice))


def check_data(trace: Trace) -> None:
    """Refuse a model that observes nothing, or a value that its distribution does not take."""
    require(trace, {"data": "", "support": ""})
    for site in likelihood.likelihood_sites(trace).values():
        likelihood.check_values(site)


class full_plates(Messenger):
    """Refuse a plate that holds a part of its data, before the model draws which."""

    def process_message(self, msg: Site) -> None:
        """Check a plate."""
        require({str(msg.get("name")): msg}, _WHOLE)


_WHOLE = {
    "plates": ": an online rule takes the data it is given as they are. Give the plate the size of the batch; "
    "for subsamples of data that stay take fit_svi."
}


def free_params(trace: Trace) -> list[str]:
    """The params of a trace without a prior, those of a module by their paths."""
    return [
        name + keystr(path)
        for name, site in trace.items()
        if site["type"] == "param"
        # Where random_flax_module puts a prior it leaves a shape, which has no leaves.
        for path, _ in tree_leaves_with_path(site["value"])
        if not _is_drawn(trace, name.removesuffix("$params"), keystr(path)[1:])
    ]


def _is_drawn(trace: Trace, module: str, path: str) -> bool:
    """Whether a latent has taken the place of a parameter, as in ``random_eqx_module``."""
    return bool(path) and any(
        name.startswith(module) and name.endswith(path)
        for name in likelihood.latent_sites(trace)
    )


def _where(
    sites: Callable[[Trace], Trace], breaks: Callable[[Site], Any]
) -> Callable[[Trace], Iterable[str]]:
    """The names of those sites that break a requirement."""
    return lambda trace: (name for name, site in sites(trace).items() if breaks(site))


def _all(trace: Trace) -> Trace:
    return trace


def _kinks(trace: Trace) -> Iterator[str]:
    for name, site in trace.items():
        if site["type"] == "sample" and likelihood.has_kink(site["fn"]):
            yield f"{name!r} is {type(base_distribution(site['fn'])).__name__}"


def _weighted(trace: Trace) -> Iterator[str]:
    for name, site in likelihood.likelihood_sites(trace).items():
        power = to_host(likelihood.weight(site))
        if not (power == 1.0).all():
            yield f"{name!r} has the power or scale {power}"


def _without_sampler(trace: Trace) -> Iterator[str]:
    for name, site in trace.items():
        if site["type"] == "sample" and not likelihood.is_factor(site):
            try:
                jax.eval_shape(site["fn"].sample, jax.random.key(0))
            except NotImplementedError:
                yield f"{name!r} is {type(base_distribution(site['fn'])).__name__}"


def fixed_support(site: Site) -> Constraint | None:
    """Where the numbers of a site must lie, whatever the parameters; None if not known, or anywhere."""
    support = site["fn"].support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    leaves = jax.tree.leaves(support)
    is_fixed = not any(isinstance(leaf, jax.Array) or np.ndim(leaf) for leaf in leaves)
    return support if is_fixed and support is not constraints.real else None


def describe_outside(
    name: str, support: Constraint, values: np.ndarray, present: Any = True
) -> str:
    """What a site observes outside of its support, NaN and what is not present aside; "" if nothing."""
    if values.dtype.kind not in "bifu":
        return ""
    present = present & np.isfinite(values)
    inside = np.asarray(support(np.where(present, values, 0.0).astype(float)))
    events = tuple(range(inside.ndim, values.ndim))
    bad = ~inside & present.all(axis=events)
    if not bad.any():
        return ""
    numbers, hint = values[present], "."
    if support is constraints.boolean and np.isin(numbers, (-1.0, 1.0)).all():
        hint = ": turn labels in {-1, 1} into (y + 1) / 2."
    elif isinstance(support, type(constraints.integer_interval(0, 1))) and np.all(
        numbers >= 1.0
    ):
        hint = ": labels that begin at 1 become y - 1."
    return (
        f"observed site {name!r} takes values in {support}, got {values[bad].flat[0]} in {bad.sum()} of "
        f"{bad.size} data{hint}"
    )


def _read(site: Site) -> tuple[np.ndarray, np.ndarray]:
    """What a site observes, and which of it is present; nothing of what this host does not hold.

    What has no weight is no datum, as what is masked.
    """
    value, power = site["value"], likelihood.weight(site)
    if is_traced(value, power) or spans_processes(value):
        return np.zeros(0), np.zeros(0, bool)
    present = likelihood.mask_of_data(site["fn"]) & (to_host(power) != 0.0)
    present = np.reshape(present, present.shape + (1,) * site["fn"].event_dim)
    values, present = np.broadcast_arrays(to_host(value), present)
    return values, present


def _outside(trace: Trace) -> Iterator[str]:
    for name, site in likelihood.observed_sites(trace).items():
        if (support := fixed_support(site)) is not None and (
            problem := describe_outside(name, support, *_read(site))
        ):
            yield problem


def _missing(trace: Trace) -> Iterator[str]:
    for name, site in likelihood.observed_sites(trace).items():
        values, present = _read(site)
        if bad := np.sum(present & ~np.isfinite(values)):
            yield f"{name!r} has {bad} values that are NaN or infinite"


def _has_name(*names: str) -> Requirement:
    return Requirement(
        lambda trace: [
            name for name in names if name in likelihood.latent_sites(trace)
        ],
        "latent site {first!r} has the name of a dimension of the result",
        ": rename it.",
    )


_latents, _data = likelihood.latent_sites, likelihood.likelihood_sites
REQUIREMENTS = {
    "data": Requirement(
        lambda trace: [] if _data(trace) else ["data"],
        "{model} has no observed site",
        ": pass the data that it conditions on.",
    ),
    "support": Requirement(_outside, "{first}"),
    "finite": Requirement(_missing, "observed site {first}", ": leave them out."),
    "latents": Requirement(
        lambda trace: [] if _latents(trace) else ["latents"],
        "{model} has no latent site",
        ", so there is no posterior.",
    ),
    "params": Requirement(
        free_params, "{model} has params {names}", ": give them priors."
    ),
    "states": Requirement(
        _where(_all, lambda site: site["type"] == "mutable"),
        "{model} keeps the states {names}",
        ": take one without.",
    ),
    "plates": Requirement(
        lambda trace: [
            f"{name!r} subsamples {site['args'][1]} of {site['args'][0]}"
            for name, site in trace.items()
            if likelihood.is_subsampled(site)
        ],
        "plate {first}",
        ": leave subsample_size out.",
    ),
    "global": Requirement(
        _where(_latents, lambda site: site.get(LOCAL) is not None),
        "latent site {first!r} is in a local plate, whose part of model and guide is tempered",
        ": leave out local_plates.",
    ),
    "no imputation": Requirement(
        lambda trace: [
            name
            for name in _latents(trace)
            if name.endswith("_unobserved")
            and f"{name.removesuffix('unobserved')}observed" in trace
        ],
        "latent {first!r} stands for data that obs_mask leaves out, and is improper where it does not",
        ": leave those data out of the likelihood by handlers.mask.",
    ),
    "continuous": Requirement(
        _where(_latents, lambda site: site["fn"].support.is_discrete),
        "latent sites {names} are discrete",
        ": sum them out by nt.marginalize.",
    ),
    "no atoms": Requirement(
        _where(
            _latents,
            lambda site: getattr(
                layers(site["fn"], "base_dist")[-1], "has_atom", False
            ),
        ),
        "latent site {first!r} has an atom at 0 (SpikeAndSlab), where its posterior is no Gaussian and no "
        "derivative sees it",
        ": fit the model of the columns that are in, without spikes.",
    ),
    "proper": Requirement(
        _where(
            _latents,
            lambda site: isinstance(
                base_distribution(site["fn"]), dist.ImproperUniform
            ),
        ),
        "the prior of {first!r} is improper",
        ": give it a proper one.",
    ),
    "plain priors": Requirement(
        _where(
            _latents,
            lambda site: (
                LOCAL in site
                or site["scale"] is not None
                or likelihood.is_masked(site["fn"])
            ),
        ),
        "the prior of {first!r} is scaled or masked",
        ": leave that out.",
    ),
    "unscaled priors": Requirement(
        _where(
            _latents, lambda site: (to_host(likelihood.other_scale(site)) != 1.0).any()
        ),
        "the priors of {names} have a scale",
        ": leave the latent sites out of handlers.scale.",
    ),
    "chain and draw": _has_name("chain", "draw"),
    "alpha": _has_name("alpha"),
    "no prior terms": Requirement(
        _where(_all, lambda site: site.get(PRIOR_FACTOR)),
        "sites {names} are prior terms",
        ": leave them out.",
    ),
    "no factors": Requirement(
        _where(_data, likelihood.is_factor),
        "{first!r} of {model} is a factor",
        ": observe a distribution.",
    ),
    "densities": Requirement(
        divergences, "{model} has divergences at {names}", ": leave out robust."
    ),
    "smooth": Requirement(_kinks, "site {first}, whose log-density has a kink"),
    "no masks": Requirement(
        _where(_data, lambda site: likelihood.is_masked(site["fn"])),
        "observed site {first!r} is masked",
        ": leave the masked data out.",
    ),
    "no weights": Requirement(
        _weighted,
        "observed site {first} already",
        ": pass the model without temper and handlers.scale.",
    ),
    "no scales": Requirement(
        likelihood.scales_beside_alpha,
        "{model} has a scale beside alpha at {names}",
        ": leave out handlers.scale.",
    ),
    "no scan": Requirement(
        _where(_data, lambda site: site.get("_control_flow_done")),
        "observed site {first!r} is in a scan or cond",
    ),
    "samplers": Requirement(
        _without_sampler,
        "site {first}, which has no sampler",
        ": take a distribution that has one.",
    ),
}
