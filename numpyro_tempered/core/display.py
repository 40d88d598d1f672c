"""How a result looks at a prompt and in a notebook: one line for each field, on one screen."""

import html
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import ArrayLike

C = TypeVar("C", bound=type)
# Columns of a terminal, and numbers of an array that are shown.
WIDTH, FEW = 100, 8


def add_repr(cls: C) -> C:
    """A NamedTuple class whose values look like a table: decorator."""
    cls.__repr__ = text  # type: ignore[assignment]
    cls._repr_html_ = table  # type: ignore[attr-defined]
    return cls


def text(result: tuple) -> str:
    """The name of the class, and a line for each field."""
    rows = fields(result)
    margin = max((len(name) for name, _ in rows), default=0) + 4
    blank = " " * margin
    lines = [
        "\n".join(
            textwrap.wrap(
                value,
                WIDTH,
                initial_indent=f"  {name:<{margin - 2}}",
                subsequent_indent=blank,
            )
        )
        for name, value in rows
    ]
    return "\n".join([type(result).__name__, *lines])


def table(result: tuple) -> str:
    """The same for a notebook, as HTML."""
    rows = "".join(
        f'<tr><th style="text-align:left">{html.escape(name)}</th>'
        f'<td style="text-align:left">{html.escape(value)}</td></tr>'
        for name, value in fields(result)
    )
    return f"<table><caption>{html.escape(type(result).__name__)}</caption><tbody>{rows}</tbody></table>"


def fields(result: tuple) -> list[tuple[str, str]]:
    """Names and values of the fields, as words."""
    return [
        (name, words(getattr(result, name)) or "(empty)") for name in names_of(result)
    ]


def names_of(result: tuple) -> tuple[str, ...]:
    """The names of the fields of a NamedTuple."""
    return getattr(result, "_fields", ())


def words(value: object) -> str:
    """A value in few words: numbers in full, large arrays by their type, collections by what they hold."""
    if value is None or isinstance(value, bool | str):
        return str(value)
    if isinstance(value, jax.Array | np.ndarray | np.number | np.bool_ | int | float):
        return _array(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _tuple(value)
    if isinstance(value, Mapping) and not hasattr(value, "groups"):
        return _few(
            (f"{key}: {words(each)}" for key, each in value.items()),
            len(value),
            "entries",
        )
    if isinstance(value, tuple | list):
        return _few(map(words, value), len(value), "entries")
    if hasattr(value, "groups") and not isinstance(value, type):
        groups = value.groups() if callable(value.groups) else value.groups
        return "ArviZ data: " + ", ".join(
            name.strip("/") for name in groups if name.strip("/")
        )
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return getattr(value, "__qualname__", type(value).__name__)
    return type(value).__name__


def _array(value: ArrayLike) -> str:
    kind = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    is_plain = jnp.issubdtype(kind, np.number) or jnp.issubdtype(kind, np.bool_)
    # Memory that was donated to a program is gone.
    is_gone = (
        isinstance(value, jax.Array)
        and not isinstance(value, jax.core.Tracer)
        and value.is_deleted()
    )
    if (
        isinstance(value, jax.core.Tracer)
        or is_gone
        or np.size(value) > FEW
        or not is_plain
    ):
        return f"{kind}{list(np.shape(value))}"
    numbers = np.asarray(value)
    if numbers.ndim == 0:
        return str(numbers.item()) if numbers.dtype == bool else f"{numbers.item():.6g}"
    return " ".join(np.array2string(numbers, precision=4, suppress_small=True).split())


def _tuple(value: tuple) -> str:
    if hasattr(value, "name") and isinstance(value.name, str):
        return value.name
    inner = ", ".join(
        f"{name} {words(getattr(value, name))}" for name in names_of(value)
    )
    return textwrap.shorten(
        f"{type(value).__name__}: {inner}", 2 * WIDTH, placeholder=" ..."
    )


def _few(parts: Iterable[str], number: int, noun: str) -> str:
    inner = ", ".join(parts) if number <= FEW else f"{number} {noun}"
    return textwrap.shorten(inner, 2 * WIDTH, placeholder=" ...")
