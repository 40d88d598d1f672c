"""Whether data of one element of a plate depend on the local discrete latents of other elements.

Enumeration, NumPyro's own too, gives all elements of a plate the same value, one after the other. What mixes the
elements (a mean over the plate, a cumulative sum along it) is then another model, without an error.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from numpyro.distributions import biject_to
from numpyro.primitives import CondIndepStackFrame

from numpyro_tempered.core import Array, Params, to_host
from numpyro_tempered.handlers import effects
from numpyro_tempered.handlers.dependence import Structure, get_abstract_trace

# Of these operations on latents each element of the result has one element of the latents, whatever the shapes.
_BY_ELEMENT = frozenset(
    """abs add and broadcast_in_dim clamp convert_element_type copy div eq exp expm1 ge gt integer_pow is_finite
    le lgamma log log1p logistic lt max min mul ne neg not or pow rem select_n sign sqrt square stop_gradient sub
    tanh xor""".split()  # noqa: SIM905
)


def check_elements(
    model: Callable[[], object], structure: Structure, latents: set[str]
) -> None:
    """Refuse data that depend on the latents of other elements of their plate.

    Some of the latents of a plate are given other values, and the log-probabilities of the other elements must
    stay as they are. The elements are chosen by the bits of their index, so that for each pair of elements one is
    changed without the other: twice the logarithm of the plate's size is the number of evaluations.

    Args:
        model: The model with its key and its arguments.
        structure: What depends on the latents.
        latents: Names of the local discrete latents.

    Raises:
        ValueError: With the names of the plate, of a site and of the latents.
    """
    frames = {
        f.name: f
        for name in latents
        for f in structure.sites[name]["cond_indep_stack"]
        if f.size > 1
    }
    for frame in frames.values():
        inside = {
            name
            for name in latents
            if frame.name in effects.plates_of(structure.sites[name])
        }
        names = [
            name
            for name, parents in structure.depends.items()
            if parents & inside
            and structure.sites[name]["type"] == "sample"
            and frame.name in effects.plates_of(structure.sites[name])
        ]
        if site := _mixed(model, frame, inside, names):
            raise ValueError(
                f"the log-probability of site {site!r} at one element of plate {frame.name!r} depends on "
                f"{sorted(inside)} at other elements (a mean or a cumulative sum over the plate): enumeration, "
                "NumPyro's too, takes the elements one by one and would sum another model. Sample the latents by "
                "DiscreteHMCGibbs."
            )


def _mixed(
    model: Callable[[], object],
    frame: CondIndepStackFrame,
    latents: set[str],
    names: list[str],
) -> str | None:
    """The first of the sites that has an element which depends on latents of others."""

    def run(changed: Array) -> Params:
        trace = get_abstract_trace(
            model, lambda msg, number: _draw(msg, latents, changed)
        )
        log_probs = {
            name: trace[name]["fn"].log_prob(trace[name]["value"]) for name in names
        }
        # Whether a site has this dimension is known from its own plates; one of size 1 has no other elements.
        return {
            k: v
            for k, v in log_probs.items()
            if v.ndim >= -frame.dim and v.shape[frame.dim] == frame.size
        }

    shape = (frame.size,) + (1,) * (-frame.dim - 1)
    program, outputs = jax.make_jaxpr(run, return_shape=True)(jnp.zeros(shape, bool))
    if not outputs or not _may_mix(program.jaxpr, program.jaxpr.invars):
        return None
    bits = (
        np.arange(frame.size)
        >> np.arange(max(1, (frame.size - 1).bit_length()))[:, None]
        & 1
    )
    changed = np.concatenate([np.zeros((1, frame.size)), bits, 1 - bits]).astype(bool)
    with jax.ensure_compile_time_eval():
        consts = [_concrete(const) for const in program.consts]

        @jax.jit
        def evaluate(consts: list[Array], row: Array) -> list[Array]:
            return jax.core.eval_jaxpr(program.jaxpr, consts, row)

        # Data are arguments: those that processes share can be no constants of a program. Row by row, as older
        # versions of jax cannot compile a loop here.
        rows = [evaluate(consts, row) for row in changed.reshape(-1, *shape)]
    values = [
        np.stack([to_host(part) for part in parts]) for parts in zip(*rows, strict=True)
    ]
    for name, log_prob in zip(outputs, values, strict=True):
        differs = ~np.isclose(
            log_prob, log_prob[:1], rtol=1e-3, atol=1e-5, equal_nan=True
        )
        others = ~changed.reshape(
            len(changed), *(1,) * (log_prob.ndim - 1 + frame.dim), *shape
        )
        if (differs & others).any():
            return name
    return None


def _draw(msg: effects.Message, latents: set[str], changed: Array) -> None:
    """Some value in the support; other values for the elements to change."""
    if msg["is_observed"] or msg["value"] is not None:
        return
    shape = effects.draw_shape(msg)
    # The values want to be different from site to site, and the same from run to run.
    seeds = np.random.default_rng(list(msg["name"].encode()))
    if not msg["fn"].support.is_discrete:
        to_support = biject_to(msg["fn"].support)
        msg["value"] = to_support(
            jnp.asarray(seeds.uniform(-1.0, 1.0, to_support.inverse_shape(shape)))
        )
        return
    size = (
        msg["fn"].enumerate_support(expand=False).shape[0]
        if msg["fn"].has_enumerate_support
        else 1
    )
    value = jnp.asarray(seeds.integers(0, size, shape))
    if msg["name"] in latents and size > 1:
        value = jnp.where(
            changed, (value + seeds.integers(1, size, shape)) % size, value
        )
    msg["value"] = value


def _concrete(const: Array) -> Array:
    """A constant of the program, or some value in place of one that is an argument of an outer program."""
    return (
        jnp.ones(const.shape, const.dtype)
        if isinstance(const, jax.core.Tracer)
        else const
    )


def _may_mix(jaxpr: Jaxpr, inputs: list) -> bool:
    """Whether an operation on what depends on the inputs may take more than one element of it to one."""
    tainted = set(inputs)
    for eqn in jaxpr.eqns:
        used = [not hasattr(var, "val") and var in tainted for var in eqn.invars]
        if not any(used):
            continue
        name = eqn.primitive.name
        inner = eqn.params.get("jaxpr") if name in ("pjit", "jit") else None
        if inner is not None:
            if _may_mix(
                inner.jaxpr,
                [
                    v
                    for v, is_used in zip(inner.jaxpr.invars, used, strict=True)
                    if is_used
                ],
            ):
                return True
        elif name == "gather":
            if used[0]:
                return True
        elif name in ("reshape", "squeeze"):
            if _sizes(eqn.invars[0]) != _sizes(eqn.outvars[0]):
                return True
        elif name not in _BY_ELEMENT:
            return True
        tainted.update(eqn.outvars)
    return False


def _sizes(var: Any) -> list[int]:
    """The sizes of a variable's dimensions, but for 1."""
    return [size for size in var.aval.shape if size != 1]
