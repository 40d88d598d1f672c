"""Which sites of a model depend on its local discrete latents, read from the traced program."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_tempered.core.typing import Array, Model
from numpyro_tempered.handlers.effects import (
    ALPHA,
    PRIOR_FACTOR,
    Message,
    is_prior_factor,
    is_unit,
    plates_of,
    wrap_bodies,
)

_TOKEN = "_marginalize_token"
_SCAN = "_marginalize_scan"


class Structure(NamedTuple):
    """What a model's local discrete latents are connected to.

    Attributes:
        samples: Names of the sample sites.
        data: Observed sites, prior terms left out.
        latents: Messages of the local discrete latents, by name.
        depends: Names of the local discrete latents that the log-probability of a sample site, or the
            value of a deterministic one, depends on.
        plates: Names of the plates of each sample site.
        scanned_factors: Those sites that are factors in the body of a ``scan`` or ``cond``.
        tempered: Whether a power is on some site.
    """

    samples: set[str]
    data: set[str]
    latents: dict[str, Message]
    depends: dict[str, frozenset[str]]
    plates: dict[str, set[str]]
    scanned_factors: set[str]
    tempered: bool


def get_structure(model: Model, args: tuple, kwargs: dict) -> Structure:
    """The structure of a model, from abstract values alone.

    Args:
        model: NumPyro model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    found: dict[str, Message] = {}

    def run(tokens: dict[Any, Array]) -> dict[str, Any]:
        # Only shapes come out of this key.
        seeded = handlers.seed(model, jax.random.key(0))
        with handlers.block(), handlers.trace() as trace, _abstract(tokens):
            seeded(*args, **kwargs)
        found.update(trace)
        outputs = {}
        for name, site in trace.items():
            if site["type"] == "deterministic":
                outputs[name] = site["value"]
            elif site["type"] == "sample":
                outputs[name] = site["fn"].log_prob(site["value"])
        return outputs

    jax.eval_shape(run, {})
    latents = {name: site for name, site in found.items() if _TOKEN in site}
    depends: dict[str, frozenset[str]] = {}
    if latents:
        by_token = {site[_TOKEN]: name for name, site in latents.items()}
        zeros = {token: jnp.zeros((), jnp.result_type(int)) for token in by_token}
        keys = list(zeros)
        program, shapes = jax.make_jaxpr(
            lambda values: run(dict(zip(keys, values, strict=True))), return_shape=True
        )([zeros[key] for key in keys])
        start = 0
        for name, output in shapes.items():
            stop = start + len(jax.tree.leaves(output))
            wanted = [start <= i < stop for i in range(len(program.jaxpr.outvars))]
            used = dce_jaxpr(program.jaxpr, wanted)[1]
            depends[name] = frozenset(by_token[key] for key, is_used in zip(keys, used, strict=True) if is_used)
            start = stop
    return Structure(
        samples={name for name, site in found.items() if site["type"] == "sample"},
        data={
            name
            for name, site in found.items()
            if site["type"] == "sample" and site["is_observed"] and not site.get(PRIOR_FACTOR)
        },
        latents=latents,
        depends=depends,
        plates={name: plates_of(site) for name, site in found.items() if site["type"] == "sample"},
        scanned_factors={
            name for name, site in found.items() if _SCAN in site and site["is_observed"] and is_unit(site)
        },
        tempered=any(ALPHA in site for site in found.values()),
    )


def token(latent: Message) -> tuple[str, int]:
    """A latent's name where it stands, and the number of the control flow that it is in, 0 for none."""
    return latent[_TOKEN]


def is_reversed(latent: Message) -> bool:
    """Whether a latent is in a ``scan`` that runs backwards."""
    return latent.get(_SCAN, (False, 1))[0]


def history(latent: Message) -> int:
    """The ``history`` of the ``scan`` that a latent is in."""
    return latent.get(_SCAN, (False, 1))[1]


class _abstract(Messenger):
    """Give each latent zeros for its value, plus a token for a local discrete one, to be found again."""

    def __init__(self, tokens: dict[Any, Array]) -> None:
        self.tokens = tokens
        self.count = 0
        super().__init__()

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "control_flow":
            self.count += 1
            backwards = len(msg["args"]) == 5 and bool(msg["args"][4])
            scan = (backwards, msg["kwargs"].get("history", 1))
            wrap_bodies(msg, functools.partial(_abstract_body, tokens=self.tokens, number=self.count, scan=scan))
        elif msg["type"] == "sample" and not msg.get("_control_flow_done"):
            _fill(msg, self.tokens, (msg["name"], 0) if msg["cond_indep_stack"] else None)


class _abstract_body(Messenger):
    """The same in the body of a ``scan`` or ``cond``."""

    def __init__(self, fn: Any, tokens: dict[Any, Array], number: int, scan: tuple[bool, int]) -> None:
        self.tokens, self.number, self.scan = tokens, number, scan
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample":
            msg[_SCAN] = self.scan
            _fill(msg, self.tokens, (msg["name"], self.number))


def _fill(msg: Message, tokens: dict[Any, Array], token: Any) -> None:
    if msg["is_observed"]:
        if is_unit(msg):
            msg[PRIOR_FACTOR] = is_prior_factor(msg)
        return
    if msg["value"] is not None:
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
