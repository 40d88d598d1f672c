"""What the estimators share: their data, their keys, and how they are pickled."""

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state, validation

from numpyro_tempered.core import (
    Array,
    PyTree,
    as_array,
    check_count,
    columns_of,
    describe,
    doubles,
    holds_dates,
)
from numpyro_tempered.estimators.scales import LARGEST
from numpyro_tempered.mixtures import components
from numpyro_tempered.mixtures.components.base import Component

# Families that are functions of the number of columns.
FAMILIES = (
    components.gaussian,
    components.tied_gaussian,
    components.diagonal_gaussian,
    components.spherical_gaussian,
    components.known_variance,
    components.bernoulli,
    components.poisson,
    components.exponential,
)


class Family(NamedTuple):
    """What a component is pickled as, since pickle takes no functions without a name."""

    make: Callable[[int], Component]
    dim: int
    missing: bool
    prior: Any


class Estimator(BaseEstimator):
    """An estimator of data ``(n, d)`` in double precision."""

    def _validate(self, x: Any, *, least: int = 1, reset: bool = False) -> np.ndarray:
        """Rows in double precision, NaN where an entry is missing or masked.

        The names of the columns are kept or compared.

        Raises:
            TypeError: If the data are sparse, or a column holds dates or text.
            ValueError: If there are fewer rows than ``least``, an entry is infinite, or the columns are not those
                of the fit.
        """
        x = read_rows(x)
        options: dict[str, Any] = {
            "dtype": np.float64,
            "ensure_min_samples": least,
            "reset": reset,
        }
        if hasattr(validation, "validate_data"):
            return validation.validate_data(
                self, x, ensure_all_finite="allow-nan", **options
            )
        # scikit-learn 1.5.
        return self._validate_data(x, force_all_finite="allow-nan", **options)

    def _allows_missing(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self._allows_missing()
        return tags

    def _more_tags(self) -> dict[str, bool]:
        """The tags under scikit-learn 1.5."""
        return {"allow_nan": self._allows_missing()}

    def __getstate__(self) -> dict[str, Any]:
        state, component = super().__getstate__(), vars(self).get("component")
        values = component.values() if isinstance(component, Mapping) else [component]
        makers = [value for value in values if callable(value)]
        families = _families(makers, vars(self).get("n_features_in_"))
        # Arrays of jax lose half of their bits where they are loaded in single precision.
        return {name: _pack(on_host(value), families) for name, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: _unpack(value) for name, value in state.items()})


def read_rows(x: Any, name: str = "X") -> Any:
    """Return rows that scikit-learn converts to the numbers that they mean, by the policy of ``core.rows``.

    scikit-learn would make nanoseconds of dates. It refuses what is sparse, complex or an array of text itself.

    Args:
        x: What the user gave: an array, a list, or a table of pandas, polars or Arrow.
        name: What it is called in an error.

    Returns:
        Numbers, NaN where an entry is missing or masked; of a table a data frame with its names and its index.

    Raises:
        TypeError: If there are dates, or a column of a table holds other things than numbers.
    """
    is_table = hasattr(x, "columns")
    try:
        numbers = as_array(x, name)
    except TypeError:
        if is_table or holds_dates(x):
            raise
        return x
    if not is_table:
        return numbers
    import pandas as pd  # takes a while to import

    names = x.columns if hasattr(x, "iloc") else columns_of(x)
    check_once(list(names))
    return pd.DataFrame(numbers, getattr(x, "index", None), names, copy=False)


def check_once(names: list) -> None:
    """Refuse names of columns that stand twice.

    Raises:
        ValueError: If one does.
    """
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1}, key=str)
        raise ValueError(
            f"each column must have a name of its own, and {twice} stand twice."
        )


def make_key(random_state: Any) -> Array:
    """A key of jax from an integer, a ``RandomState`` of NumPy, or None for NumPy's global one."""
    return jax.random.key(
        check_random_state(random_state).randint(np.iinfo(np.int32).max)
    )


def check_orders(value: int | Iterable[int] | None, least: int) -> list[int]:
    """The numbers of components to compare, or the only one.

    Raises:
        ValueError: If one is no whole number of at least ``least``, or one comes twice, or there is none.
    """
    orders = (
        list(value)
        if isinstance(value, Iterable) and not isinstance(value, str)
        else [value]
    )
    orders = [check_count(order, "n_components", least) for order in orders]  # type: ignore[arg-type]
    if not orders or len(set(orders)) < len(orders):
        raise ValueError(
            f"n_components must be different numbers, at least one, got {orders}."
        )
    return orders


def is_one(value: object) -> bool:
    """Whether the number of components is one number, not several to choose from."""
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def on_host(tree: Any) -> Any:
    """The same with NumPy arrays in the place of those of jax, which keep double precision outside of it."""
    return jax.tree.map(
        lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree
    )


def _families(
    makers: list[Callable[[int], Component]], dim: int | None
) -> dict[Component, Family]:
    """Components without prior, and what they are pickled as: those of FAMILIES and those of functions."""
    if dim is None:
        return {}
    functions: list[Callable[[int], Component]] = [*FAMILIES, *makers]
    families = (
        Family(maker, dim, missing, None)
        for maker in functions
        for missing in (False, True)
    )
    return {_component(family): family for family in families}


def _component(family: Family) -> Component:
    """The component of a family with its prior, in the form for missing entries where there is one."""
    component = family.make(family.dim)
    if family.missing and component.with_missing is not None:
        component = component.with_missing()
    return component._replace(prior=family.prior)


def _pack(tree: Any, families: dict[Component, Family]) -> Any:
    def pack(leaf: Any) -> Any:
        if not isinstance(leaf, Component):
            return leaf
        family = families.get(leaf._replace(prior=None))
        return leaf if family is None else family._replace(prior=leaf.prior)

    return jax.tree.map(pack, tree, is_leaf=lambda leaf: isinstance(leaf, Component))


def _unpack(tree: Any) -> Any:
    def unpack(leaf: Any) -> Any:
        return _component(leaf) if isinstance(leaf, Family) else leaf

    return jax.tree.map(unpack, tree, is_leaf=lambda leaf: isinstance(leaf, Family))


def rows_of(X: PyTree) -> np.ndarray:
    """Return the rows of a frame, NaN where missing.

    Raises:
        TypeError: If it is no frame, or holds other things than numbers.
        ValueError: If a name stands twice.
    """
    if not hasattr(X, "columns"):
        raise TypeError(
            f"X must be a data frame, got {describe(X)}: partial_fit takes arrays."
        )
    check_once(list(X.columns))
    return doubles(as_array(X, "X"))


def place(
    rows: np.ndarray,
    names: Sequence[Hashable],
    columns: Mapping[Hashable, int],
    size: int,
) -> np.ndarray:
    """Return rows ``(n, size)`` with an intercept first, each column in its place; others are left out."""
    numbers = [number for number, name in enumerate(names) if name in columns]
    full = np.zeros((len(rows), size))
    full[:, 0] = 1.0
    full[:, [columns[names[number]] for number in numbers]] = rows[:, numbers]
    return full


def check_some(sample_weight: PyTree) -> None:
    """Refuse weights that are all 0.

    Raises:
        ValueError: If they are.
    """
    if sample_weight is not None and not np.any(np.asarray(sample_weight)):
        raise ValueError("sample_weight is zero for all rows.")


def are_rows(full: np.ndarray) -> np.ndarray:
    """Return which rows can be learned: those without missing, infinite and too large entries."""
    return np.all(np.abs(full) <= LARGEST, axis=-1)


def as_number(value: object, name: str) -> float:
    """Return one number, NaN where it is missing.

    Raises:
        TypeError: If it is none.
        ValueError: If there are several.
    """
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000):
        return float(value)
    array = doubles(as_array([value], name))
    if array.size != 1:
        raise ValueError(f"{name} must be one number, got shape {array.shape[1:]}.")
    return array.item()
