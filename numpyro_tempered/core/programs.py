"""Programs that are compiled once, however often the function that they come from is written anew."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import jax

from numpyro_tempered.core.typing import Array, PyTree

Values = TypeVar("Values")

# Programs that are kept, the latest used last.
MAX_PROGRAMS = 64
_COMPILED: OrderedDict[str, jax.stages.Compiled] = OrderedDict()


def compile_once(function: Callable[..., Values], *examples: PyTree) -> Callable[..., Values]:
    """A function of pytrees of arrays as a program, outside of transformations.

    The function is traced anew, as a model may read what has changed since. The arrays in its closure, such as
    the data of the model, are operands, so that programs of the same text serve other data of the same shapes:
    they are compiled once in a process, and found in a compilation cache.

    Args:
        function: The function.
        *examples: Arguments of the shapes and dtypes that it will be called with.

    Returns:
        The function of such arguments.
    """
    # JAX remembers the trace of a function that it has met, and this one it has not.
    closed, shapes = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)(*examples)
    tree = jax.tree.structure(shapes)

    def program(consts: list[Array], leaves: list[Array]) -> list[Array]:
        return jax.core.eval_jaxpr(closed.jaxpr, consts, *leaves)

    run = _compile(program, closed.consts, jax.tree.leaves(examples))
    return lambda *args: jax.tree.unflatten(tree, run(closed.consts, jax.tree.leaves(args)))


def _compile(program: Callable[..., list[Array]], *examples: list[Array]) -> Callable[..., list[Array]]:
    """The compiled program, from those that are kept if its text is among them."""
    lowered = jax.jit(program).lower(*examples)
    text = lowered.as_text()
    # A callback is an address, and constants that are left out of the text tell programs apart.
    if "callback" in text or "elided" in text:
        return lowered.compile()
    places = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(examples)]
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    where = f"{jax.default_backend()} {device} {places}"
    key = hashlib.sha256(f"{where} {text}".encode()).hexdigest()
    if key not in _COMPILED:
        _COMPILED[key] = lowered.compile()
        if len(_COMPILED) > MAX_PROGRAMS:
            _COMPILED.popitem(last=False)
    _COMPILED.move_to_end(key)
    return _COMPILED[key]
