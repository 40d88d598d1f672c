"""Compiled programs that serve again: found by what was traced, never by the function that was traced."""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any, ParamSpec, TypeVar

import jax
import jax.extend.core
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding

from numpyro_tempered.core.checks import is_traced
from numpyro_tempered.core.jax_private import dce_jaxpr
from numpyro_tempered.core.operations import compiler_options, count_operations
from numpyro_tempered.core.processes import (
    check_same_program,
    replicated_over,
    spans_processes,
)
from numpyro_tempered.core.typing import Array, PyTree

Values = TypeVar("Values")
P = ParamSpec("P")

_SIZE = 64
_AHEAD: set[Hashable] = set()
_STARTED: weakref.WeakSet = weakref.WeakSet()
_PENDING: list[tuple[object, threading.Thread]] = []
_PROGRAMS: OrderedDict[Hashable, jax.stages.Wrapped] = OrderedDict()
_TRACES: OrderedDict[Hashable, Callable] = OrderedDict()
# Settings of JAX by which traces of one function differ.
_SETTINGS: tuple[str, ...] = (
    "jax_disable_jit",
    "jax_enable_x64",
    "jax_default_matmul_precision",
)
_SETTINGS += ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")
# Rules of differentiation, by which a program that is only run does not differ.
_RULES = {"jvp_jaxpr_fun", "jvp_jaxpr_thunk", "fwd_jaxpr_thunk", "bwd", "out_trees"}
_PLAIN = (int, str, bool, bytes, type(None), type, np.dtype, enum.Enum)


class _NoKey(Exception):
    """Something that cannot be compared with its like of another trace."""


def compile_once(
    function: Callable[..., Values],
    *examples: PyTree,
    ahead: bool = False,
    num_runs: int = 1,
) -> Callable[..., Values]:
    """``jax.jit(function)``, traced once, which compiles nothing if an equal program was run before.

    The function is traced anew at each call of this one, as a model may read what has changed since: arrays in
    its closure are operands of the program, and numbers are part of what is compared.

    Args:
        function: A function of pytrees of arrays.
        *examples: Arguments of the shapes and dtypes that it will be called with.
        ahead: Whether to start to compile it now, in another thread.
        num_runs: About how often it will run, see :func:`compiler_options`.

    Returns:
        The function of such arguments.
    """
    # JAX remembers the trace of a function that it has met, and this one it has not.
    closed, shapes = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)(
        *examples
    )
    tree, consts, traced = jax.tree.structure(shapes), closed.consts, closed.jaxpr
    # With its constants as arguments, for one that is kept must not hold the data that it was traced with.
    jaxpr = traced.replace(constvars=(), invars=[*traced.constvars, *traced.invars])
    # What is transformed belongs to the transformation.
    inside = any(map(is_traced, jax.tree.leaves((consts, examples))))
    copies = replicated_over(consts, examples)
    jaxpr = jaxpr if copies is None else in_order(jaxpr)
    program = (
        _program(jaxpr, None, None)
        if inside
        else _equal_program(jaxpr, num_runs, copies)
    )
    if ahead and not inside and program not in _STARTED:
        _STARTED.add(program)
        _start(program, program.lower(consts, jax.tree.leaves(examples)))

    def run(*args: PyTree) -> Values:
        wait_for(program)
        return jax.tree.unflatten(tree, program(consts, jax.tree.leaves(args)))

    return run


def trace_once(
    function: Callable[..., Values], *examples: PyTree
) -> Callable[..., Values]:
    """A function of arguments of these shapes, traced once wherever it is used, in derivatives too.

    A function under ``jax.jit`` is traced once too, but holds its arrays as constants, by which programs that use
    it differ: here they are operands of these programs.
    """
    closed, shapes = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)(
        *examples
    )
    tree = jax.tree.structure(shapes)
    # What the values do not need is not differentiated.
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)

    def traced(*args: PyTree) -> Values:
        return jax.tree.unflatten(
            tree, jax.core.eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(args))
        )

    return traced


def share_trace(
    function: Callable[..., Values], *examples: PyTree
) -> Callable[..., Values]:
    """The function as it was traced, which is one object for all functions with equal traces.

    For static arguments of ``jax.jit``, which finds what it has compiled by them: functions that are made anew
    for each call, but compute the same, then share one program. Arrays in the closures are constants, and are
    compared with the rest. One function is traced once for each form of its arguments.

    Args:
        function: A function of pytrees of arrays, hashable.
        *examples: Arguments of the shapes and dtypes that it will be called with, or ``jax.ShapeDtypeStruct``.

    Returns:
        A function of such arguments; ``function`` itself under a transformation or ``jax.disable_jit``, or where
        it cannot be compared.
    """
    # A stream does all of this in each round, in ten microseconds.
    is_jit_off, *settings = [getattr(jax.config, name) for name in _SETTINGS]
    if is_jit_off:
        return function
    leaves, tree = jax.tree.flatten(examples)
    try:
        forms = tuple(
            [
                (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
                for leaf in leaves
            ]
        )
    except AttributeError:
        return function
    if any(isinstance(leaf, jax.core.Tracer | np.ndarray) for leaf in leaves):
        return function
    return _shared_trace(function, tree, forms, tuple(settings))


def one_for_equal(maker: Callable[P, Values]) -> Callable[P, Values]:
    """A maker of values that returns the same one for equal arguments.

    Compiled functions are looked up by the functions in a value; one that is made anew is traced anew, in a tenth
    of a second, before an equal trace is looked up. Numbers, strings and records of them are remembered;
    functions are not, as they may hold tracers or data.
    """
    remembered = functools.lru_cache(maxsize=256, typed=True)(maker)

    @functools.wraps(maker)
    def make(*args: P.args, **kwargs: P.kwargs) -> Values:
        if not all(map(_is_plain, (*args, *kwargs.values()))):
            return maker(*args, **kwargs)
        return remembered(*args, **kwargs)  # type: ignore[arg-type]

    return make


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def first_row(rows: PyTree) -> PyTree:
    """Shapes and dtypes of a row of arrays with a leading axis, for :func:`share_trace`; tracers as they are."""

    def convert(leaf: Array) -> Array | jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.core.Tracer):
            return leaf
        return jax.ShapeDtypeStruct(
            leaf.shape[1:], leaf.dtype, weak_type=getattr(leaf, "weak_type", False)
        )

    return jax.tree.map(convert, rows)


@functools.lru_cache(maxsize=256)
def _shared_trace(
    function: Callable[..., Values], tree: Any, forms: tuple, settings: tuple
) -> Callable[..., Values]:
    """:func:`share_trace`, remembered by what the trace depends on."""
    leaves = [
        jax.ShapeDtypeStruct(shape, dtype, weak_type=weak)
        for shape, dtype, weak in forms
    ]
    examples = jax.tree.unflatten(tree, leaves)
    closed, shapes = jax.make_jaxpr(lambda *args: function(*args), return_shape=True)(
        *examples
    )
    returned = jax.tree.structure(shapes)
    try:
        key = _key(closed), tree, returned, settings
        hash(key)
    except (_NoKey, TypeError):
        return function

    def traced(*args: PyTree) -> Values:
        return jax.tree.unflatten(
            returned,
            jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(args)),
        )

    traced = _TRACES.pop(key, traced)
    _TRACES[key] = traced
    if len(_TRACES) > 4 * _SIZE:
        _TRACES.popitem(last=False)
    return traced


def run_program(function: Callable[..., Values], *args: PyTree) -> Values:
    """``compile_once(function, *args)(*args)``."""
    return compile_once(function, *args)(*args)


def compile_ahead(function: Any, *args: PyTree, **static: Hashable) -> bool:
    """Compile a function under ``jax.jit`` in another thread, unless this was done before.

    Call :func:`wait_for` before the function is called: its call then finds the program.

    Args:
        function: The function.
        *args: Arguments of the shapes and dtypes that it will be called with.
        **static: Its static arguments.

    Returns:
        Whether it was not done before.
    """
    leaves, tree = jax.tree.flatten(args)
    shapes = tuple((np.shape(leaf), str(leaf.dtype)) for leaf in leaves)
    options = tuple(sorted(static.items(), key=itemgetter(0)))
    # The precision that numbers without one have.
    key = function, tree, shapes, options, jax.dtypes.canonicalize_dtype(float)
    if key in _AHEAD:
        return False
    _AHEAD.add(key)
    _start(function, function.lower(*args, **static))
    return True


class fast_jit:
    """``jax.jit`` with :func:`compiler_options` where it is called by itself: part of a program it has none."""

    def __init__(
        self, function: Callable[..., Any], *, static_argnames: tuple[str, ...] = ()
    ) -> None:
        functools.update_wrapper(self, function)
        self._inside = jax.jit(function, static_argnames=static_argnames)
        # Asks for the platform, at the first call.
        self._outside = functools.cache(
            lambda: jax.jit(
                function,
                static_argnames=static_argnames,
                compiler_options=compiler_options(math.inf),
            )
        )

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Run the program."""
        return (self._inside if is_traced(args, kwargs) else self._outside())(
            *args, **kwargs
        )

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """As of ``jax.jit``."""
        return self._outside().lower(*args, **kwargs)

    def eval_shape(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """As of ``jax.jit``."""
        return self._inside.eval_shape(*args, **kwargs)


def _start(function: object, lowered: jax.stages.Lowered) -> None:
    # It was traced in this thread, as what is traced may set what threads share; the compiler runs by itself.
    thread = threading.Thread(target=lowered.compile)
    thread.start()
    _PENDING.append((function, thread))


def wait_for(function: object) -> None:
    """Wait for the programs of a function that are being compiled."""
    for pending in [each for each in _PENDING if each[0] is function]:
        pending[1].join()
        # Another thread that waits may have been first.
        with contextlib.suppress(ValueError):
            _PENDING.remove(pending)


def _program(
    jaxpr: Any, options: dict[str, int] | None, copies: NamedSharding | None = None
) -> jax.stages.Wrapped:
    def program(consts: list[Array], leaves: list[Array]) -> list[Array]:
        return jax.core.eval_jaxpr(jaxpr, (), *consts, *leaves)

    return jax.jit(program, compiler_options=options, out_shardings=copies)


def _equal_program(
    jaxpr: Any, num_runs: int, copies: NamedSharding | None = None
) -> jax.stages.Wrapped:
    """The program of an equal trace, or a new one; of shared rows each process gets ``copies`` of the result."""
    options = compiler_options(num_runs * count_operations(jaxpr))
    try:
        key = _key_of_jaxpr(jaxpr), str(options), copies
        hash(key)
    except (_NoKey, TypeError):
        return _program(jaxpr, options, copies)
    if copies is not None:
        check_same_program(key[0], copies)
    program = _PROGRAMS.pop(key, None)
    _PROGRAMS[key] = program = (
        _program(jaxpr, options, copies) if program is None else program
    )
    if len(_PROGRAMS) > _SIZE:
        _PROGRAMS.popitem(last=False)
    return program


def _key_of_jaxpr(jaxpr: Any) -> Hashable:
    """The whole of a program but the names of its variables."""
    if jaxpr.effects:
        raise _NoKey
    numbers: dict[Any, int] = {}

    def bind(variable: Any) -> Hashable:
        numbers[variable] = len(numbers)
        return str(variable.aval), bool(getattr(variable.aval, "weak_type", False))

    def read(atom: Any) -> Hashable:
        if isinstance(atom, jax.extend.core.Literal):
            return (
                "literal",
                str(atom.aval),
                bool(getattr(atom.aval, "weak_type", False)),
                _key(atom.val),
            )
        return numbers[atom]

    begin = tuple(bind(variable) for variable in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (
            equation.primitive,
            tuple(read(atom) for atom in equation.invars),
            tuple(
                (name, _key(value))
                for name, value in sorted(equation.params.items())
                if name not in _RULES
            ),
            tuple(bind(variable) for variable in equation.outvars),
        )
        for equation in jaxpr.eqns
    )
    return (
        len(jaxpr.constvars),
        begin,
        equations,
        tuple(read(atom) for atom in jaxpr.outvars),
    )


def _key(value: Any) -> Hashable:
    """A parameter of an operation, with its type: 1, 1.0 and True are equal, and are other programs."""
    if isinstance(value, jax.extend.core.ClosedJaxpr):
        return _key_of_jaxpr(value.jaxpr), tuple(map(_key, value.consts))
    if isinstance(value, jax.extend.core.Jaxpr):
        return _key_of_jaxpr(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_key, value))
    if isinstance(value, dict):
        return dict, tuple((_key(k), _key(v)) for k, v in value.items())
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, float | complex):
        return type(value), np.asarray(value).tobytes()
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        return str(value.aval), _key(jax.random.key_data(value))
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        if is_traced(value) or spans_processes(value):
            raise _NoKey
        array = np.asarray(value)
        if array.dtype == object:
            raise _NoKey
        return (
            type(value),
            array.shape,
            str(array.dtype),
            hashlib.sha256(array.tobytes()).digest(),
        )
    # Records of jax such as the dimensions of a product; its functions, and those of others, have no key.
    is_record = type(value).__module__.split(".")[0] in {"jax", "jaxlib", "ml_dtypes"}
    if not is_record or (callable(value) and not isinstance(value, Mesh)):
        raise _NoKey
    if dataclasses.is_dataclass(value):
        return type(value), tuple(
            _key(getattr(value, f.name)) for f in dataclasses.fields(value)
        )
    return type(value), value


def in_order(jaxpr: Jaxpr) -> Jaxpr:
    """The same program, with each operation where its result is first needed, and none that nothing needs.

    NumPyro computes parts of the ELBO in the order of a set of names, which differs from process to process; sums
    over rows that processes share must come in one order in all of them.
    """
    if jaxpr.effects:
        return jaxpr
    makers: dict[object, JaxprEqn] = {
        variable: equation for equation in jaxpr.eqns for variable in equation.outvars
    }
    order: list[JaxprEqn] = []
    begun: set[int] = set()
    # Each operation is met twice: before and after those that it depends on.
    stack = [
        (makers[atom], False)
        for atom in reversed(jaxpr.outvars)
        if _is_made(atom, makers)
    ]
    while stack:
        equation, is_ready = stack.pop()
        if is_ready:
            order.append(equation)
        elif id(equation) not in begun:
            begun.add(id(equation))
            stack.append((equation, True))
            stack += [
                (makers[atom], False)
                for atom in reversed(equation.invars)
                if _is_made(atom, makers)
            ]
    eqns = [
        each.replace(params={k: _inside(v) for k, v in each.params.items()})
        for each in order
    ]
    return jaxpr.replace(eqns=eqns)


def _is_made(atom: object, makers: dict) -> bool:
    # Literals have no hash.
    return not hasattr(atom, "val") and atom in makers


def _inside(value: object) -> object:
    """A parameter of an operation, with the programs in it in order."""
    if isinstance(value, ClosedJaxpr):
        return value.replace(jaxpr=in_order(value.jaxpr))
    if isinstance(value, Jaxpr):
        return in_order(value)
    # Not records.
    if type(value) is tuple:
        return tuple(map(_inside, value))
    return list(map(_inside, value)) if type(value) is list else value
