"""Which sites of a model depend on its local discrete latents, read from the traced program."""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_tempered.core.jax_private import dce_jaxpr
from numpyro_tempered.core.typing import Array, Model
from numpyro_tempered.handlers.effects import ALPHA, Message, Trace, is_unit, mark, plates_of, wrap_bodies
from numpyro_tempered.handlers.likelihood import likelihood_sites

# A latent's name where it stands, and the number of the control flow that it is in, 0 for none.
Token: TypeAlias = tuple[str, int]

_TOKEN = "_marginalize_token"
_SCAN = "_marginalize_scan"


class Structure(NamedTuple):
    """What a model's local discrete latents are connected to.

    Attributes:
        data: Observed sites, prior terms left out.
        latents: Messages of the local discrete latents, by name.
        depends: Names of the local discrete latents that the log-probability of a sample site, or the
            value of a deterministic one, depends on.
        plates: Names of the plates of each sample site.
        scan_factors: Those sites that are factors in the body of a ``scan`` or ``cond``.
        has_power: Whether a power is on some site.
    """

    data: set[str]
    latents: Trace
    depends: dict[str, frozenset[str]]
    plates: dict[str, set[str]]
    scan_factors: set[str]
    has_power: bool


def get_structure(model: Callable[[], object]) -> Structure:
    """The structure of a model, from abstract values alone.

    Args:
        model: NumPyro model with its arguments.
    """
    sites: Trace = {}

    def run(tokens: dict[Token, Array]) -> dict[str, object]:
        # Only shapes come out of this key.
        seeded = handlers.seed(model, jax.random.key(0))
        with handlers.block(), handlers.trace() as trace, _abstract(tokens):
            seeded()
        sites.update(trace)
        return {
            name: site["value"] if site["type"] == "deterministic" else site["fn"].log_prob(site["value"])
            for name, site in trace.items()
            if site["type"] in ("deterministic", "sample")
        }

    jax.eval_shape(run, {})
    samples = {name: site for name, site in sites.items() if site["type"] == "sample"}
    latents = {name: site for name, site in sites.items() if _TOKEN in site}
    depends: dict[str, frozenset[str]] = {}
    if latents:
        names = {site[_TOKEN]: name for name, site in latents.items()}
        zeros = [jnp.zeros((), jnp.result_type(int)) for _ in names]
        program, shapes = jax.make_jaxpr(
            lambda values: run(dict(zip(names, values, strict=True))), return_shape=True
        )(zeros)
        start = 0
        for name, output in shapes.items():
            stop = start + len(jax.tree.leaves(output))
            flags = dce_jaxpr(program.jaxpr, [start <= i < stop for i in range(len(program.jaxpr.outvars))])[1]
            depends[name] = frozenset(
                latent for latent, is_used in zip(names.values(), flags, strict=True) if is_used
            )
            start = stop
    return Structure(
        data=set(likelihood_sites(sites)),
        latents=latents,
        depends=depends,
        plates={name: plates_of(site) for name, site in samples.items()},
        scan_factors={
            name for name, site in samples.items() if _SCAN in site and site["is_observed"] and is_unit(site)
        },
        has_power=any(ALPHA in site for site in sites.values()),
    )


def token(latent: Message) -> Token:
    """What a latent is known by while the model runs."""
    return latent[_TOKEN]


def is_forward(latent: Message) -> bool:
    """Whether a latent is in no ``scan``, or in one that runs forwards with a history."""
    return _SCAN not in latent or latent[_SCAN]


class _abstract(Messenger):
    """Give each latent zeros for its value, plus a token for a local discrete one, which shows where it goes."""

    def __init__(self, tokens: dict[Token, Array]) -> None:
        self.tokens = tokens
        self.count = 0
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "control_flow":
            self.count += 1
            is_backward = len(msg["args"]) == 5 and bool(msg["args"][4])
            forward = not is_backward and msg["kwargs"].get("history", 1) != 0
            body = functools.partial(_abstract_body, tokens=self.tokens, number=self.count, is_forward=forward)
            wrap_bodies(msg, body)
        elif msg["type"] == "sample" and not msg.get("_control_flow_done"):
            _fill(msg, self.tokens, (msg["name"], 0) if msg["cond_indep_stack"] else None)


class _abstract_body(Messenger):
    """The same in the body of a ``scan`` or ``cond``."""

    def __init__(self, fn: Model, tokens: dict[Token, Array], number: int, is_forward: bool) -> None:
        self.tokens, self.number, self.is_forward = tokens, number, is_forward
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample":
            msg[_SCAN] = self.is_forward
            _fill(msg, self.tokens, (msg["name"], self.number))


def _fill(msg: Message, tokens: dict[Token, Array], token: Token | None) -> None:
    mark(msg)
    if msg["is_observed"] or msg["value"] is not None:
        return
    fn = msg["fn"]
    shape = fn.shape(msg["kwargs"].get("sample_shape", ()))
    if not fn.support.is_discrete:
        msg["value"] = jnp.zeros(shape)
        return
    zeros = jnp.zeros(shape, jnp.result_type(int))
    msg["value"] = zeros if token is None else zeros + tokens.get(token, 0)
    if token is not None:
        msg[_TOKEN] = token
