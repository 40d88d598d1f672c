"""Checks of arguments; rows and weights in the form that the drivers use."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Shape,
    as_array,
    automatic_mesh,
    check_count,
    check_known,
    check_number,
    check_order,
    doubles,
    has_mesh,
    held_array,
    is_traced,
    names_of,
)
from numpyro_tempered.mixtures import weights
from numpyro_tempered.mixtures.components import base as components
from numpyro_tempered.mixtures.components.derived import check_derivatives


class MixtureData(NamedTuple):
    """Data of a component, checked and centred.

    Attributes:
        component: Without its prior, for data with missing entries where there are some.
        prior: Of data moved by ``-centre``.
        rows: ``(n, d)`` less ``centre``, on the host unless they are sharded; of chunks, those that starts see.
        weight: ``(n,)``; 0 for rows without an observed entry.
        centre: ``(d,)``; None where the data may not be moved.
        total: The sum of the weights of all data.
        spacings: Of the numbers near 1 that the data came as, and that the rows are held as.
        column_names: Of a table.
    """

    component: components.Component
    prior: components.Hyperparameters
    rows: components.Rows
    weight: components.Rows
    centre: np.ndarray | None
    total: float
    spacings: tuple[float, float]
    column_names: tuple[str, ...] | None = None


def prepare(
    x: ArrayLike, component: components.Component, sample_weight: ArrayLike | None
) -> MixtureData:
    """Check data and weights, choose the form for missing entries, and move the data to their mean.

    Raises:
        TypeError: If the data are traced, or not numbers.
        ValueError: If they are not data of this family, or the weights do not fit.
    """
    check_order({"x": x, "sample_weight": sample_weight})
    rows = check_rows(x, component)
    weight, total = weights_and_total(rows, sample_weight)
    centre = None if component.location is None else column_means(rows, weight)
    data = centre_data(
        component, rows, weight, centre, total=total, spacing=spacing_of(rows)
    )
    return data._replace(column_names=names_of(x))


def weights_and_total(
    rows: components.Rows, sample_weight: ArrayLike | None
) -> tuple[components.Rows, float]:
    """The weights of rows, 0 of those without an entry, and their sum."""
    weight, library = weight_of(sample_weight, rows), components.namespace(rows)
    weight = library.where(
        library.isnan(rows).all(axis=1), np.zeros((), weight.dtype), weight
    )
    total = weight.sum(dtype=np.float64) if library is np else weight.sum()
    return weight, float(total)


def check_rows(x: ArrayLike, component: components.Component) -> components.Rows:
    """Data as rows of a family.

    Raises:
        TypeError: If the data are traced, or not numbers, or ``component`` is no component.
        ValueError: If they are not data of this family.
    """
    check_known(
        "a mixture is fitted from the host, which decides on restarts and warnings", x
    )
    components.check_is_component(component)
    return component.check(on_host(x))


def centre_data(
    component: components.Component,
    rows: components.Rows,
    weight: components.Rows,
    centre: np.ndarray | None,
    *,
    total: float,
    spacing: float,
    form: components.Component | None = None,
) -> MixtureData:
    """The data moved to their mean in columns that may move.

    Args:
        component: The family and its prior.
        rows: ``(n, d)``.
        weight: ``(n,)``.
        centre: The mean, or None.
        total: The sum of the weights of all data.
        spacing: Of the numbers near 1 that the data came as.
        form: The component's form for missing entries; by default the one that the rows need.

    Raises:
        ValueError: If no row counts, or entries are missing and the family cannot marginalise them.
    """
    if not total > 0:
        raise ValueError("no row has both a positive weight and an observed entry.")
    if (
        centre is not None
        and component.location is not None
        and component.location.columns is not None
    ):
        centre = np.where(
            np.isin(np.arange(len(centre)), component.location.columns), centre, 0.0
        )
    dtype, original = weight.dtype, rows
    if isinstance(rows, np.ndarray):
        rows = np.asarray(
            rows if centre is None else rows - centre,
            jax.dtypes.canonicalize_dtype(rows.dtype),
        )
    else:
        rows = move(rows, centre)
    spacings = spacing, spacing_of(rows)
    form = (
        components.missing_form(component, original) if form is None else form
    )._replace(prior=None)
    prior = components.translate_on_host(
        component, component.prior, None if centre is None else -centre
    )
    prior = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), prior)
    check_derivatives(form, prior, rows)
    return MixtureData(form, prior, rows, weight, centre, total, spacings)


def on_host(x: ArrayLike) -> ArrayLike:
    """An array on one device as one of the host, where checks and the centre compile nothing."""
    return (
        np.asarray(x)
        if isinstance(x, jax.Array) and len(x.sharding.device_set) == 1
        else automatic_row_mesh(x)
    )


def spacing_of(rows: components.Rows) -> float:
    """The spacing near 1 of the numbers that rows are held as."""
    return float(jnp.finfo(rows.dtype).eps)


def column_means(rows: components.Rows, weight: components.Rows) -> np.ndarray:
    """Weighted mean of the observed entries of each column ``(d,)``; 0 for an empty one.

    In double precision where the rows are on the host.
    """
    library = components.namespace(rows)
    if library is np:
        rows, weight = doubles(rows), doubles(weight)
    observed = ~library.isnan(rows)
    each = library.where(observed, weight[:, None], 0.0)
    total = library.sum(each, axis=0)
    return np.asarray(
        library.sum(library.where(observed, rows, 0.0) * each, axis=0)
        / library.where(total > 0, total, 1.0)
    )


def move(rows: components.Rows, centre: np.ndarray | None) -> Array:
    """Rows less the centre, on the device; on the host the difference is taken in double precision."""
    if centre is None:
        return jnp.asarray(rows)
    if isinstance(rows, np.ndarray):
        return jnp.asarray((rows - centre).astype(jnp.asarray(rows[:1]).dtype))
    # The centre is a sum of two such numbers: far from 0 one has not its digits.
    first = np.asarray(centre, rows.dtype)
    difference = rows - first
    if is_traced(rows):
        # The compiler may add the two parts up.
        difference = jax.lax.optimization_barrier(difference)
    return difference - np.asarray(centre - first.astype(np.float64), rows.dtype)


def weight_of(
    sample_weight: ArrayLike | None, rows: components.Rows
) -> components.Rows:
    """Weights of the rows, 1 by default.

    Raises:
        TypeError: If they are not real numbers.
        ValueError: If they have another shape, or one is negative or not finite.
    """
    dtype = jax.dtypes.canonicalize_dtype(rows.dtype)
    if isinstance(rows, np.ndarray):
        return weight_on_host(sample_weight, rows, dtype)
    if sample_weight is None:
        return place_beside(np.ones(rows.shape[0], dtype), rows)
    values = as_array(sample_weight, "sample_weight")
    values = values if isinstance(values, jax.Array) else values.astype(dtype)
    weight = place_beside(values, rows).astype(dtype)
    check_weight(weight, rows)
    return weight


def weight_on_host(
    sample_weight: ArrayLike | None,
    rows: np.ndarray,
    dtype: np.dtype | type = np.float64,
) -> np.ndarray:
    """Return weights of rows of the host, 1 by default; errors as of :func:`weight_of`."""
    if sample_weight is None:
        return np.ones(len(rows), dtype)
    weight = np.asarray(as_array(sample_weight, "sample_weight"), dtype)
    check_weight(weight, rows)
    return weight


def check_weight(weight: components.Rows, rows: components.Rows) -> None:
    """Check the weights of rows.

    Raises:
        ValueError: If they have another shape, or one is negative or not finite.
    """
    if weight.shape != rows.shape[:1]:
        raise ValueError(
            f"sample_weight has shape {weight.shape}; expected ({rows.shape[0]},), a weight for each row."
        )
    # Not by check_numbers, which takes an array from the devices to the host.
    if not is_traced(weight) and not bool(
        (components.namespace(weight).isfinite(weight) & (weight >= 0)).all()
    ):
        raise ValueError("sample_weight must be finite and not negative.")


class Settings(NamedTuple):
    """The settings of a fit that its objective depends on.

    Attributes:
        alpha: Power on the likelihood.
        concentration: Prior of the weights, ``(K,)`` of a Dirichlet or ``(K, 2)`` of sticks.
    """

    alpha: float
    concentration: np.ndarray

    @property
    def num_components(self) -> int:
        """K."""
        return len(self.concentration)


def check_settings(
    num_components: int, alpha: float, concentration: weights.Concentration
) -> Settings:
    """The settings of a fit.

    Raises:
        TypeError: If one is not a number.
        ValueError: If one is out of its range, or the concentration has another shape than () or (K,).
    """
    num_components = check_count(num_components, "num_components")
    alpha = float(check_number(alpha, "alpha", "(0, inf)"))
    return Settings(alpha, weights.prior_of(concentration, num_components))


def check_counts(least: int = 1, **values: int) -> Shape:
    """Whole numbers of at least ``least``, by the names of the arguments."""
    return tuple(check_count(value, name, least) for name, value in values.items())


def shard_rows(
    x: ArrayLike, mesh: Mesh, sample_weight: ArrayLike | None = None
) -> tuple[Array, Array]:
    """Rows over the devices of a mesh, and their weights; what to give :func:`fit`, :func:`em` and their kin.

    JAX shards rows evenly. Where their number is not a multiple of the number of devices, copies of the last row
    with weight 0 fill up: weights of 0 change no sum. A start that is random draws other rows than without them.

    Args:
        x: All rows ``(n, d)``, on this host. With several processes ``nt.online.share_rows`` takes those of
            each.
        mesh: A mesh, such as ``jax.make_mesh((jax.device_count(),), ("rows",))``; rows go over all its axes.
        sample_weight: How often each row counts, ``(n,)``.

    Returns:
        Rows ``(m, d)`` and weights ``(m,)``, m >= n, for ``fit(key, rows, ..., sample_weight=weights)``.

    Raises:
        TypeError: If rows or weights are not real numbers.
        ValueError: If there is no row, the weights do not fit, or single precision does not hold the integers of
            a column.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> mesh = jax.make_mesh((jax.device_count(),), ("rows",))
        >>> rows, weight = nt.mixtures.shard_rows(np.ones((5, 2)), mesh)
        >>> float(weight.sum())
        5.0
    """
    rows = np.asarray(held_array(x, "x"))
    if rows.ndim == 0 or rows.shape[0] == 0:
        raise ValueError(f"x has shape {rows.shape}; at least one row is needed.")
    floating = rows.dtype if np.issubdtype(rows.dtype, np.floating) else float
    weight = weight_on_host(sample_weight, rows, floating)
    missing = -len(rows) % mesh.size
    rows = np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])
    weight = np.concatenate([weight, np.zeros(missing, floating)])
    sharding = NamedSharding(
        Mesh(mesh.devices, mesh.axis_names), PartitionSpec(mesh.axis_names)
    )
    return jax.device_put(rows, sharding), jax.device_put(weight, sharding)


def automatic_row_mesh(x: ArrayLike) -> ArrayLike:
    """:func:`automatic_mesh` of rows.

    Raises:
        ValueError: If the columns are sharded.
    """
    if not has_mesh(x):
        return x
    if x.sharding.shard_shape(x.shape)[1:] != x.shape[1:]:
        raise ValueError(
            f"the columns of x are sharded by {x.sharding.spec}; shard rows alone."
        )
    return automatic_mesh(x)


def place_beside(values: ArrayLike, rows: components.Rows) -> Array:
    """A value for each row, on the devices of the rows."""
    if not has_mesh(rows):
        return jnp.asarray(values)
    spec = PartitionSpec(*rows.sharding.spec[:1])
    return jax.device_put(
        automatic_row_mesh(values), NamedSharding(rows.sharding.mesh, spec)
    )
