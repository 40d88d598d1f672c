"""Checks of what a user gives a mixture, and data as the loops want them."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.mixtures.blocks import host_mean
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.sharding import automatic, beside


class Prepared(NamedTuple):
    """Data ready for blocks.

    Attributes:
        component: Without its prior, for data with missing entries where there are some.
        prior: Of data moved by ``-centre``.
        rows: ``(n, d)``, with ``centre`` taken off.
        weight: ``(n,)``; 0 for rows without an observed entry.
        centre: ``(d,)``; None where the data may not be moved.
        total: The sum of the weights.
    """

    component: Component
    prior: Any
    rows: Array
    weight: Array
    centre: np.ndarray | None
    total: float


def prepare(x: Any, component: Component, sample_weight: ArrayLike | None) -> Prepared:
    """Check data and weights, choose the form for missing entries, and move the data to their mean.

    Raises:
        TypeError: If the data are traced, or not numbers.
        ValueError: If they are not data of this family, or the weights do not fit.
    """
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            "a mixture is fitted from the host, which decides on restarts and warnings: call it outside of jit "
            "and vmap."
        )
    if not isinstance(component, Component):
        raise TypeError(
            f"component is a {type(component).__name__}; expected a component such as nt.mixtures.gaussian(dim)."
        )
    rows = component.check(automatic(x))
    weight = check_weight(sample_weight, rows)
    component, structure = missing_form(component, rows), component.prior
    empty = jnp.all(jnp.isnan(rows), axis=1)
    weight = jnp.where(empty, 0.0, weight)
    total = float(jnp.sum(weight))
    if not total > 0:
        raise ValueError("no row has both a positive weight and an observed entry.")
    centre = None
    if component.translate is not None:
        if isinstance(rows, np.ndarray):
            centre = host_mean(rows, weight)
        else:
            observed = ~jnp.isnan(rows)
            held = jnp.where(observed, weight[:, None], 0.0)
            mass = jnp.sum(held, axis=0)
            mean = jnp.sum(jnp.where(observed, rows, 0.0) * held, axis=0) / jnp.where(mass > 0, mass, 1.0)
            centre = np.asarray(mean)
    prior = as_dtype(structure, weight.dtype)
    moved = prior if centre is None else component.translate(prior, jnp.asarray(-centre, weight.dtype))  # type: ignore[misc]
    return Prepared(component._replace(prior=None), moved, move(rows, centre), weight, centre, total)


def move(rows: Any, centre: np.ndarray | None) -> Array:
    """Rows with the centre taken off, in double precision where they are on the host, and then on the device."""
    if centre is None:
        return jnp.asarray(rows)
    if isinstance(rows, np.ndarray):
        return jnp.asarray((rows - centre).astype(jnp.asarray(rows[:1]).dtype))
    return rows - jnp.asarray(centre, rows.dtype)


def as_dtype(tree: Any, dtype: Any) -> Any:
    """Arrays in one floating dtype."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def missing_form(component: Component, rows: Any) -> Component:
    """The component for these rows.

    Raises:
        ValueError: If entries are missing and the family cannot marginalise them.
    """
    missing = bool(jnp.any(jnp.isnan(rows)))
    if not missing:
        return component
    if component.with_missing is None:
        column = int(jnp.argmax(jnp.any(jnp.isnan(rows), axis=0)))
        raise ValueError(
            f"{component.name}: column {column} has missing entries (NaN), which this family does not "
            "marginalise. Take one with independent columns, such as diagonal_gaussian, or leave the rows out."
        )
    return component.with_missing()


def check_weight(sample_weight: ArrayLike | None, rows: Any) -> Array:
    """Weights of the rows, 1 by default.

    Raises:
        ValueError: If they have another shape, or one is negative or not finite.
    """
    dtype = jax.dtypes.canonicalize_dtype(rows.dtype)
    if sample_weight is None:
        return beside(np.ones(rows.shape[0], dtype), rows)
    if not isinstance(sample_weight, jax.Array):
        sample_weight = np.asarray(sample_weight, dtype)
    weight = beside(sample_weight, rows).astype(dtype)
    if weight.shape != (rows.shape[0],):
        raise ValueError(f"sample_weight has shape {weight.shape}; expected ({rows.shape[0]},), one a row.")
    if not bool(jnp.all(jnp.isfinite(weight) & (weight >= 0))):
        raise ValueError("sample_weight must be finite and not negative.")
    return weight


def check_alpha(alpha: Any) -> float:
    """The power on the likelihood.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not positive and finite.
    """
    if isinstance(alpha, str | bool):
        raise TypeError(f"alpha must be a number, got {alpha!r}.")
    try:
        value = float(alpha)
    except TypeError as error:
        raise TypeError(f"alpha must be a number, got {alpha!r}.") from error
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"alpha must be positive and finite, got {alpha}.")
    return value


def check_count(value: Any, name: str, least: int = 1) -> int:
    """A whole number that is at least ``least``.

    Raises:
        ValueError: If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return int(value)


def check_concentration(concentration: ArrayLike, num_components: int) -> np.ndarray:
    """The Dirichlet prior of the weights, ``(K,)``.

    Raises:
        ValueError: If it is not positive, or has another shape than () or (K,).
    """
    values = np.asarray(concentration, np.float64)
    if values.shape not in ((), (num_components,)):
        raise ValueError(f"concentration has shape {values.shape}; expected () or ({num_components},).")
    if not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError(f"concentration must be positive and finite, got {concentration}.")
    return np.broadcast_to(values, (num_components,))
