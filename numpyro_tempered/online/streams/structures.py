"""Structures of pytrees as plain lists, and back, without running code that a file names."""

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import jax

from numpyro_tempered.core import PyTree

PACKAGE = __name__.partition(".")[0]
BUILTIN = {"tuple": tuple, "list": list}

# "*" for a leaf; else the type, its fields, keys or values, and the children.
Encoded: TypeAlias = str | list[Any]


def encode(structure: jax.tree_util.PyTreeDef) -> Encoded:
    """A structure of tuples, lists, dictionaries, and the records of this package, for JSON.

    Raises:
        TypeError: If it holds another type.
    """
    data = structure.node_data()
    if data is None:
        return "*"
    kind, static = data
    children = [encode(child) for child in structure.children()]
    if kind in (tuple, list, type(None)):
        return [kind.__name__, None, children]
    if kind is dict and all(isinstance(key, str) for key in static):
        return ["dict", static, children]
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _is_record(kind) and hasattr(kind, "_fields"):
        return [name, list(kind._fields), children]
    if _is_record(kind):
        return [
            name,
            [getattr(static, field.name) for field in dataclasses.fields(kind)],
            children,
        ]
    raise TypeError(
        f"only tuples, lists, dictionaries with strings as keys, and the types of {PACKAGE} can be written to a "
        f"file, got {name.replace(':', '.')}."
    )


def decode(encoded: Encoded, leaves: Iterator[object]) -> PyTree:
    """The tree of an encoded structure with these leaves.

    Raises:
        ValueError: If it names a type that is none of this package, or has other fields here.
    """
    if isinstance(encoded, str):
        return next(leaves)
    name, static, parts = encoded
    if name == "NoneType":
        return None
    children = [decode(part, leaves) for part in parts]
    if name in BUILTIN:
        return BUILTIN[name](children)
    if name == "dict":
        return dict(zip(static, children, strict=True))
    kind = _record(name)
    if not hasattr(kind, "_fields"):
        return kind(*map(_tuples, static))
    if list(kind._fields) != static:
        raise ValueError(
            f"the file has a {kind.__name__} of fields {static}, in this version it has {list(kind._fields)}: "
            "write the file anew."
        )
    return kind(*children)


def _record(name: str) -> Any:
    """A record of this package by its module and name; nothing else is looked up."""
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] == PACKAGE:
        try:
            kind = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            kind = None
        if isinstance(kind, type) and _is_record(kind):
            return kind
    raise ValueError(f"the file names {name!r}, which is no record of {PACKAGE}.")


def _is_record(kind: type) -> bool:
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return kind.__module__.partition(".")[0] == PACKAGE and (
        is_named_tuple or dataclasses.is_dataclass(kind)
    )


def _tuples(value: object) -> object:
    """Lists of JSON as tuples, which are hashable."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
