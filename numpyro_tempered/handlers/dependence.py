"""Which sites of a model depend on its local discrete latents, read from the traced program."""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_tempered.core import Array, Model
from numpyro_tempered.core.jax_private import dce_jaxpr
from numpyro_tempered.handlers import effects
from numpyro_tempered.handlers.likelihood import likelihood_sites

# A latent's name where it stands, and the number of the control flow that it is in, 0 for none.
Token: TypeAlias = tuple[str, int]

# Keys on the messages of latents: what names one while the model runs, and whether the ``scan`` that it is in, if
# any, runs forwards with a history.
TOKEN = "_marginalize_token"
IN_FORWARD_SCAN = "_marginalize_scan"


class Structure(NamedTuple):
    """What a model's local discrete latents are connected to.

    Attributes:
        sites: Messages of all sites, by name, from abstract values.
        depends: Names of the local discrete latents that the log-probability of a sample site, or the
            value of a deterministic one, depends on.
    """

    sites: effects.Trace
    depends: dict[str, frozenset[str]]

    @property
    def latents(self) -> effects.Trace:
        """The local discrete latents."""
        return {name: site for name, site in self.sites.items() if TOKEN in site}

    @property
    def data(self) -> effects.Trace:
        """The observed sites, without prior terms."""
        return likelihood_sites(self.sites)


def get_structure(model: Callable[[], object]) -> Structure:
    """The structure of a model, from abstract values alone.

    Args:
        model: NumPyro model with its arguments.
    """
    sites: effects.Trace = {}

    def run(tokens: dict[Token, Array]) -> dict[str, object]:
        trace = get_abstract_trace(model, functools.partial(_fill, tokens=tokens))
        sites.update(trace)
        return {
            name: site["value"]
            if site["type"] == "deterministic"
            else site["fn"].log_prob(site["value"])
            for name, site in trace.items()
            if site["type"] in ("deterministic", "sample")
        }

    jax.eval_shape(run, {})
    depends: dict[str, frozenset[str]] = {}
    names = dict(
        sorted((site[TOKEN], name) for name, site in sites.items() if TOKEN in site)
    )
    if names:
        program, shapes = jax.make_jaxpr(run, return_shape=True)(
            dict.fromkeys(names, jnp.zeros((), int))
        )
        owners = [
            name for name, output in shapes.items() for _ in jax.tree.leaves(output)
        ]
        for name in shapes:
            is_used = dce_jaxpr(program.jaxpr, [owner == name for owner in owners])[1]
            depends[name] = frozenset(itertools.compress(names.values(), is_used))
    return Structure(sites, depends)


def get_abstract_trace(
    model: Callable[[], object],
    fill: Callable[[effects.Message, int], None],
    *,
    any_branch: bool = False,
) -> effects.Trace:
    """A trace of a model, hidden from the handlers around it, in which ``fill`` gives the latents their values.

    Args:
        model: NumPyro model with its arguments.
        fill: From the message of a sample site, and the number of the control flow that it is in, 0 for none.
        any_branch: Whether the values of a ``cond`` do not depend on its predicate.
    """
    # Only shapes come out of this key.
    seeded = handlers.seed(model, jax.random.key(0))
    with handlers.block(), handlers.trace() as trace, _fill_latents(fill, any_branch):
        seeded()
    return trace


class _fill_latents(Messenger):
    """Give each latent a value."""

    def __init__(
        self, fill: Callable[[effects.Message, int], None], any_branch: bool
    ) -> None:
        self.fill, self.any_branch = fill, any_branch
        self.count = 0
        super().__init__()

    def process_message(self, msg: effects.Message) -> None:
        if msg["type"] == "control_flow":
            self.count += 1
            is_backward = len(msg["args"]) == 5 and bool(msg["args"][4])
            forward = not is_backward and msg["kwargs"].get("history", 1) != 0
            body = functools.partial(
                _fill_body, fill=self.fill, number=self.count, is_forward=forward
            )
            effects.wrap_bodies(msg, body)
            if self.any_branch and effects.is_cond(msg):
                msg["args"] = (np.bool_(True), *msg["args"][1:])
        elif msg["type"] == "sample" and not msg.get("_control_flow_done"):
            effects.mark(msg)
            self.fill(msg, 0)


class _fill_body(Messenger):
    """The same in the body of a ``scan`` or ``cond``."""

    def __init__(
        self,
        fn: Model,
        fill: Callable[[effects.Message, int], None],
        number: int,
        is_forward: bool,
    ) -> None:
        self.fill, self.number, self.is_forward = fill, number, is_forward
        super().__init__(fn)

    def process_message(self, msg: effects.Message) -> None:
        if msg["type"] == "sample":
            msg[IN_FORWARD_SCAN] = self.is_forward
            effects.mark(msg)
            self.fill(msg, self.number)


def _fill(msg: effects.Message, number: int, tokens: dict[Token, Array]) -> None:
    """Zeros, plus a token for a local discrete latent, which shows where it goes."""
    if msg["is_observed"] or msg["value"] is not None:
        return
    is_discrete = msg["fn"].support.is_discrete
    value = jnp.zeros(effects.draw_shape(msg), int if is_discrete else float)
    if is_discrete and (number or msg["cond_indep_stack"]):
        token = (msg["name"], number)
        value += tokens.get(token, 0)
        msg[TOKEN] = token
    msg["value"] = value
