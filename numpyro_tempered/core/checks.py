"""Checks of arguments: each returns what it checked, or raises with the name, what was expected and what came.

A value that jax traces is known only when the compiled program runs: it passes.
"""

import difflib
import functools
import inspect
import operator
from collections.abc import Callable, Collection, Iterable
from typing import ParamSpec, TypeVar

import jax
import numpy as np

from numpyro_tempered.core.precision import doubles
from numpyro_tempered.core.processes import to_host
from numpyro_tempered.core.typing import Array

T = TypeVar("T")
P = ParamSpec("P")

_PHRASES = {
    "(-inf, inf)": "finite",
    "(0, inf)": "positive and finite",
    "(0, inf]": "positive",
    "[0, inf)": "at least 0 and finite",
    "[0, inf]": "at least 0",
}


def is_traced(*values: object) -> bool:
    """Whether any leaf is known only when the compiled program runs."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values))


def check_known(reason: str, *values: object, hint: str = "") -> None:
    """Refuse values that jax traces, where their numbers are needed.

    Raises:
        TypeError: With the reason.
    """
    if is_traced(*values):
        raise TypeError(f"{reason}: call it outside of jit, vmap and grad{hint}.")


def check_number(
    value: T, name: str, interval: str = "(-inf, inf)", *, hint: str = ""
) -> T:
    """One real number in an interval.

    Args:
        value: The number; a tracer of shape () passes.
        name: Name of the argument.
        interval: As in mathematics, ``"(0, 1]"``: a parenthesis leaves the end out, a bracket includes it.
        hint: What to do instead, after the message.

    Raises:
        TypeError: If it is not a real number.
        ValueError: If it is an array, NaN, or outside of the interval.

    Example:
        >>> from numpyro_tempered.core.checks import check_number
        >>> check_number(0.5, "damping", "(0, 1]")
        0.5
        >>> check_number(-1.0, "step_size", "(0, inf)")
        Traceback (most recent call last):
        ValueError: step_size must be positive and finite, got -1.0.
    """
    if is_traced(value):
        shape = getattr(value, "shape", ())
        if shape != ():
            raise ValueError(
                f"{name} must be one number, got shape {shape}.{_after(hint)}"
            )
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be a number, got {value!r}.{_after(hint)}")
    if array.shape != ():
        raise ValueError(
            f"{name} must be one number, got shape {array.shape}.{_after(hint)}"
        )
    if not contains(interval, array):
        raise ValueError(
            f"{name} must be {_PHRASES.get(interval, f'in {interval}')}, got {value}.{_after(hint)}"
        )
    return value


def check_numbers(
    value: T, name: str, interval: str = "(-inf, inf)", *, hint: str = ""
) -> T:
    """An array of real numbers, all in an interval; as :func:`check_number`, with the first entry that is not.

    Raises:
        TypeError: If they are not real numbers.
        ValueError: If an entry is outside of the interval.
    """
    if is_traced(value):
        return value
    array = to_host(value)
    check_real(array.dtype, name, hint=hint)
    outside = ~contains(interval, array)
    if outside.any():
        index = tuple(int(i) for i in np.argwhere(outside)[0])
        place = f" at index {index if len(index) > 1 else index[0]}" if index else ""
        expected = _PHRASES.get(interval, f"in {interval}")
        raise ValueError(
            f"{name} must be {expected}, got {array[index]}{place}.{_after(hint)}"
        )
    return value


def check_real(dtype: np.dtype, name: str, *, hint: str = "") -> None:
    """The dtype of real numbers, of arrays that jax traces too.

    Raises:
        TypeError: If it is of another kind.
    """
    if dtype.kind not in "fiub" and dtype.name != "bfloat16":
        raise TypeError(
            f"{name} must be real numbers, got dtype {dtype}.{_after(hint)}"
        )


def check_count(
    value: int, name: str, least: int = 1, most: int | None = None, *, hint: str = ""
) -> int:
    """A whole number from ``least`` to ``most``.

    Raises:
        ValueError: If it is not.
    """
    try:
        count = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        count = None
    if count is None or count < least or (most is not None and count > most):
        above = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(
            f"{name} must be an integer {above}, got {value!r}.{_after(hint)}"
        )
    return count


def check_positive(**numbers: object) -> None:
    """Each of several numbers, by its name: positive and finite, as :func:`check_number`.

    Raises:
        TypeError: If one is not a real number.
        ValueError: If one is an array, or not positive and finite.
    """
    for name, value in numbers.items():
        check_number(value, name, "(0, inf)")


def check_choice(value: T, name: str, choices: Collection[T]) -> T:
    """One of several values.

    Raises:
        ValueError: If it is none of them.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}.")
    return value


def check_record(value: object, name: str, kind: type[T], example: str) -> T:
    """A record that a function of this package makes, and not the function itself or its name.

    Raises:
        TypeError: If it is another object.
    """
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} must be a {kind.__name__}, such as {example}, got {describe(value)}."
        )
    return value


def check_key(value: T, call: str) -> T:
    """A key of jax, for the function that ``call`` shows how to call.

    Raises:
        TypeError: If it is none, or several.

    Example:
        >>> from numpyro_tempered.core.checks import check_key
        >>> check_key(0, "fit(rng_key, x)")
        Traceback (most recent call last):
        TypeError: rng_key must be a key, such as jax.random.key(0), got 0: the call is fit(rng_key, x).
    """
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    typed = isinstance(value, Array) and jax.dtypes.issubdtype(
        dtype, jax.dtypes.prng_key
    )
    # Keys of jax.random.PRNGKey are vectors of two numbers, or of four.
    if not (typed and shape == ()) and not (
        dtype == np.uint32 and shape in ((2,), (4,))
    ):
        hint = " Take one of them, by rng_key[0]." if typed else ""
        got = f"{describe(value)}: the call is {call}.{hint}"
        raise TypeError(f"rng_key must be a key, such as jax.random.key(0), got {got}")
    return value


def key_first(function: Callable[P, T]) -> Callable[P, T]:
    """The function with a check of its first argument, the key, which must come before data are missed.

    Without it Python says of a call that forgets the key that the last of the data is missing.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if args or "rng_key" in kwargs:
            check_key(args[0] if args else kwargs["rng_key"], call_of(function))
        return function(*args, **kwargs)

    return checked


def call_of(function: Callable[..., object]) -> str:
    """How a function is called: its name and its positional arguments.

    Example:
        >>> from numpyro_tempered.core.checks import call_of
        >>> call_of(lambda rng_key, x, *data, alpha=1.0: None).replace("<lambda>", "fit")
        'fit(rng_key, x, *data, ...)'
    """
    names, others = [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names.append(f"*{name}")
        elif (
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and parameter.default is parameter.empty
        ):
            names += [] if name == "self" else [name]
        else:
            others = True
    return f"{function.__qualname__}({', '.join([*names, *['...'] * others])})"


def describe(value: object) -> str:
    """What an argument is, in a few words.

    Example:
        >>> import numpy as np
        >>> from numpyro_tempered.core.checks import describe
        >>> describe(np.ones((3, 2))), describe(np.ones), describe(int), describe([1, 2])
        ('an array of shape (3, 2)', 'the function ones', 'the class int', 'a list of length 2')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape, name = getattr(value, "shape", None), getattr(value, "__name__", None)
    if isinstance(shape, tuple):
        kind = (
            "an array"
            if isinstance(value, np.ndarray | Array)
            else f"a {type(value).__name__}"
        )
        return f"{kind} of shape {shape}"
    if callable(value) and name is not None:
        return f"the function {name}"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of length {len(value)}"
    text = repr(value)
    return text if len(text) < 50 else f"a {type(value).__name__}"


def check_options(names: Iterable[str], options: Iterable[str], taker: str) -> None:
    """Names of keyword arguments, against those that there are.

    Raises:
        TypeError: If one is not among them.
    """
    options = sorted(options)
    for name in names:
        if name not in options:
            near = difflib.get_close_matches(name, options, 1)
            advice = f"did you mean {near[0]!r}?" if near else f"only {options}."
            raise TypeError(f"{taker} has no argument {name!r}: {advice}")


def contains(interval: str, values: np.ndarray) -> np.ndarray:
    """Which values lie in an interval such as ``"[0, inf)"``; NaN does not."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = operator.ge if interval[0] == "[" else operator.gt
    below = operator.le if interval[-1] == "]" else operator.lt
    wide = doubles(values)
    return above(wide, low) & below(wide, high)


def _after(hint: str) -> str:
    return f" {hint}" if hint else ""
