"""Checks of arguments: each returns what it checked, or raises with the name, what was expected and what came.

A value that jax traces is known only when the compiled program runs: it passes.
"""

import operator
from collections.abc import Collection
from typing import TypeVar

import jax
import numpy as np

T = TypeVar("T")

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


def check_number(value: T, name: str, interval: str = "(-inf, inf)", *, hint: str = "") -> T:
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
            raise ValueError(f"{name} must be one number, got shape {shape}.{_after(hint)}")
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be a number, got {value!r}.{_after(hint)}")
    if array.shape != ():
        raise ValueError(f"{name} must be one number, got shape {array.shape}.{_after(hint)}")
    if not contains(interval, array):
        raise ValueError(f"{name} must be {_PHRASES.get(interval, f'in {interval}')}, got {value}.{_after(hint)}")
    return value


def check_numbers(value: T, name: str, interval: str = "(-inf, inf)", *, hint: str = "") -> T:
    """An array of real numbers, all in an interval; as :func:`check_number`, with the first entry that is not.

    Raises:
        TypeError: If they are not real numbers.
        ValueError: If an entry is outside of the interval.
    """
    if is_traced(value):
        return value
    array = np.asarray(value)
    check_real(array.dtype, name, hint=hint)
    outside = ~contains(interval, array)
    if outside.any():
        index = tuple(int(i) for i in np.argwhere(outside)[0])
        place = f" at index {index if len(index) > 1 else index[0]}" if index else ""
        expected = _PHRASES.get(interval, f"in {interval}")
        raise ValueError(f"{name} must be {expected}, got {array[index]}{place}.{_after(hint)}")
    return value


def check_real(dtype: np.dtype, name: str, *, hint: str = "") -> None:
    """The dtype of real numbers, of arrays that jax traces too.

    Raises:
        TypeError: If it is of another kind.
    """
    if dtype.kind not in "fiub" and dtype.name != "bfloat16":
        raise TypeError(f"{name} must be real numbers, got dtype {dtype}.{_after(hint)}")


def check_count(value: int, name: str, least: int = 1, most: int | None = None, *, hint: str = "") -> int:
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
        raise ValueError(f"{name} must be an integer {above}, got {value!r}.{_after(hint)}")
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


def contains(interval: str, values: np.ndarray) -> np.ndarray:
    """Which values lie in an interval such as ``"[0, inf)"``; NaN does not."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = operator.ge if interval[0] == "[" else operator.gt
    below = operator.le if interval[-1] == "]" else operator.lt
    wide = np.asarray(values, np.float64)
    return above(wide, low) & below(wide, high)


def _after(hint: str) -> str:
    return f" {hint}" if hint else ""
