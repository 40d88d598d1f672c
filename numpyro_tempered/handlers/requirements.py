"""One table of what verbs cannot take of a model: predicates on its trace, with their sentences."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpyro.distributions as dist
from jax.tree_util import keystr, tree_leaves_with_path
from numpyro.primitives import Messenger

from numpyro_tempered.core.processes import to_host
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import (
    LOCAL,
    PRIOR_FACTOR,
    Trace,
    base_distribution,
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

    find: Callable[[Trace], list[str]]
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
        if names := row.find(trace):
            problem = row.problem.format(model=model, names=names, first=names[0])
            raise ValueError(problem + (advice or row.advice))


def check_data(trace: Trace) -> None:
    """Refuse a model that observes nothing, or a value that broadcasts against its distribution."""
    require(trace, {"data": ""})
    for site in likelihood.likelihood_sites(trace).values():
        likelihood.check_values(site)


class whole_plates(Messenger):
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
) -> Callable[[Trace], list[str]]:
    """The names of those sites that break a requirement."""
    return lambda trace: [name for name, site in sites(trace).items() if breaks(site)]


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
        lambda trace: sorted(divergences(trace)),
        "{model} has divergences at {names}",
        ": leave out robust.",
    ),
    "smooth": Requirement(
        lambda trace: list(_kinks(trace)), "site {first}, whose log-density has a kink"
    ),
    "no masks": Requirement(
        _where(_data, lambda site: likelihood.is_masked(site["fn"])),
        "observed site {first!r} is masked",
        ": leave the masked data out.",
    ),
    "no weights": Requirement(
        lambda trace: list(_weighted(trace)),
        "observed site {first} already",
        ": pass the model without temper and handlers.scale.",
    ),
    "no scales": Requirement(
        lambda trace: sorted(likelihood.scales_beside_alpha(trace)),
        "{model} has a scale beside alpha at {names}",
        ": leave out handlers.scale.",
    ),
    "no scan": Requirement(
        _where(_data, lambda site: site.get("_control_flow_done")),
        "observed site {first!r} is in a scan or cond",
    ),
    "samplers": Requirement(
        lambda trace: list(_without_sampler(trace)),
        "site {first}, which has no sampler",
        ": take a distribution that has one.",
    ),
}
