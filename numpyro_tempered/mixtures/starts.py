"""Where coordinate ascent starts: first responsibilities, as values.

Example:
    >>> import numpyro_tempered as nt
    >>> start = nt.mixtures.starts.given_responsibilities([0, 0, 1])
    >>> start.random
    False
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, ArrayLike, as_array, matmul

__all__ = [
    "Start",
    "given_responsibilities",
    "kmeans_plus_plus",
    "random_responsibilities",
]
__dir__ = __all__.copy


# Into which the rows are divided where one of them is drawn.
MOST_PARTS = 64


class Assign(Protocol):
    """First responsibilities of rows; see :class:`Start`."""

    def __call__(
        self, rng_key: Array, data: Any, points: Array, weight: Array, active: Array, /
    ) -> Array:
        """Labels ``(n,)`` or responsibilities ``(n, K)``."""


class Start(NamedTuple):
    """First responsibilities.

    Attributes:
        assign: ``(rng_key, data, points (n, p), weight (n,), active (K,))`` to labels ``(n,)`` or
            responsibilities ``(n, K)``. ``points`` are the data in coordinates whose distances separate
            the components, columns standardised; 0 in rows that fill up, which have weight 0. The components
            that there are come first in ``active``; others fill up, and get no responsibility.
        data: Arrays of the start itself, passed on to ``assign``.
        random: Whether two keys give two starts.
    """

    assign: Assign
    data: Any = ()
    random: bool = True


@lru_cache
def kmeans_plus_plus(num_lloyd: int = 0) -> Start:
    """Seeds drawn with probability proportional to the squared distance to the nearest seed so far.

    Each row belongs to its nearest seed. Duplicate rows are never two seeds while others are left.

    Args:
        num_lloyd: Iterations of Lloyd's algorithm from these seeds.

    References:
        Arthur, Vassilvitskii, *k-means++: the advantages of careful seeding*, SODA 2007.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.starts.kmeans_plus_plus().random
        True
    """

    def assign(
        rng_key: Array, data: object, points: Array, weight: Array, active: Array
    ) -> Array:
        # A seed that is none is nearest to no row.
        seeds = jnp.full((active.shape[0], points.shape[1]), jnp.inf, points.dtype)
        first = row_of(points, draw_row(jax.random.fold_in(rng_key, 0), weight))
        nearest = squared_distance(points, first)

        def add(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            seeds, nearest = carry
            mass = weight * nearest
            # All rows are seeds already: further components are empty.
            mass = jnp.where(jnp.sum(mass) > 0, mass, weight)
            seed = row_of(points, draw_row(jax.random.fold_in(rng_key, j), mass))
            return seeds.at[j].set(seed), jnp.minimum(
                nearest, squared_distance(points, seed)
            )

        seeds, _ = jax.lax.fori_loop(
            1, jnp.sum(active, dtype=jnp.int32), add, (seeds.at[0].set(first), nearest)
        )

        def lloyd(_: Array, centres: Array) -> Array:
            members = jax.nn.one_hot(
                nearest_centre(points, centres), active.shape[0], dtype=points.dtype
            )
            members = members * weight[:, None]
            counts = jnp.sum(members, axis=0)[:, None]
            means = members.T @ points / jnp.where(counts > 0, counts, 1.0)
            return jnp.where(counts > 0, means, centres)

        return nearest_centre(points, jax.lax.fori_loop(0, num_lloyd, lloyd, seeds))

    return Start(assign)


def draw_row(rng_key: Array, mass: Array) -> Array:
    """An index drawn with probability proportional to ``mass``."""
    # First a part of the rows, whose sums devices that share the rows have by themselves, then a row of it: a
    # cumulative sum over devices takes a time quadratic in the rows.
    mass = jnp.reshape(mass, (math.gcd(mass.shape[0], MOST_PARTS), -1))
    before = jnp.cumsum(jnp.sum(mass, axis=1))
    level = jax.random.uniform(rng_key, (), mass.dtype) * before[-1]
    part = _place(before, level, jnp.max(mass, axis=1))
    rest = level - jnp.where(part > 0, before[part - 1], 0.0)
    within = row_of(mass, part)
    return part * mass.shape[1] + _place(jnp.cumsum(within), rest, within)


def row_of(rows: Array, index: Array) -> Array:
    """A row by its index."""
    # rows[index] would send all rows to all devices that share them, this sends one.
    return jnp.take(rows, index[None], axis=0, mode="clip")[0]


def _place(cumulative: Array, level: Array, mass: Array) -> Array:
    """The first place whose cumulative sum is above a level."""
    # Rounding may put the level at the end, beyond the last place that has mass.
    last = mass.shape[0] - 1 - jnp.argmax(mass[::-1] > 0)
    return jnp.minimum(jnp.searchsorted(cumulative, level, side="right"), last)


def squared_distance(points: Array, centre: Array) -> Array:
    """Squared Euclidean distances ``(n,)``."""
    return jnp.sum(jnp.square(points - centre), axis=1)


def nearest_centre(points: Array, centres: Array) -> Array:
    """The first of the nearest centres, ``(n,)``."""

    def closer(
        best: tuple[Array, Array], each: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array], None]:
        label, distance = best
        j, centre = each
        new = squared_distance(points, centre)
        return (jnp.where(new < distance, j, label), jnp.minimum(new, distance)), None

    start = (
        jnp.zeros(points.shape[0], jnp.int32),
        jnp.full(points.shape[0], jnp.inf, points.dtype),
    )
    numbers = jnp.arange(centres.shape[0], dtype=jnp.int32)
    return jax.lax.scan(closer, start, (numbers, centres))[0][0]


def split_components(
    rng_key: Array,
    omega: Array,
    points: Array,
    weight: Array,
    first: Array,
    num_components: Array,
) -> Array:
    """Responsibilities ``(K, n)`` after components from ``first`` on, which are empty, take parts of the others.

    A seed is drawn as k-means++ would draw the next one, with probability proportional to the squared distance to
    the means of the components; its component loses the rows that are nearer to the seed than to its own mean.
    """

    def split(j: Array, omega: Array) -> Array:
        mass = omega * weight
        counts = jnp.sum(mass, axis=1, keepdims=True)
        means = matmul(mass, points) / jnp.where(counts > 0, counts, 1.0)
        distances = jax.lax.map(lambda mean: squared_distance(points, mean), means)
        seed = draw_row(
            jax.random.fold_in(rng_key, j), jnp.sum(mass * distances, axis=0)
        )
        parent = jnp.argmax(row_of(omega.T, seed))
        is_nearer = squared_distance(points, row_of(points, seed)) < distances[parent]
        part = jnp.where(is_nearer, omega[parent], 0.0)
        return omega.at[j].set(part).at[parent].add(-part)

    return jax.lax.fori_loop(jnp.int32(first), jnp.int32(num_components), split, omega)


@lru_cache
def random_responsibilities(concentration: float = 1.0) -> Start:
    """Responsibilities drawn from a symmetric Dirichlet, row by row.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.starts.random_responsibilities(0.1).random
        True
    """

    def assign(
        rng_key: Array, data: object, points: Array, weight: Array, active: Array
    ) -> Array:
        def of_component(j: Array) -> Array:
            key = jax.random.fold_in(rng_key, j)
            return jax.random.loggamma(
                key, concentration, points.shape[:1], points.dtype
            )

        log_gamma = jax.lax.map(of_component, jnp.arange(active.shape[0])).T
        return jax.nn.softmax(jnp.where(active, log_gamma, -jnp.inf), axis=1)

    return Start(assign)


def given_responsibilities(responsibilities: ArrayLike) -> Start:
    """Given labels ``(n,)`` in 0 ... K-1, or responsibilities ``(n, K)`` whose rows sum to 1.

    Raises:
        ValueError: If they are neither.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.mixtures.starts.given_responsibilities([0, 0, 1]).random
        False
    """
    values = np.asarray(as_array(responsibilities, "responsibilities"))
    if values.ndim == 1:
        if not np.issubdtype(values.dtype, np.integer) or (
            values.size and values.min() < 0
        ):
            raise ValueError(
                f"labels must be integers from 0, got dtype {values.dtype}."
            )
        return Start(_stored, values.astype(np.int32), random=False)
    if values.ndim != 2:
        raise ValueError(
            f"expected labels (n,) or responsibilities (n, K), got shape {values.shape}."
        )
    if not np.all(values >= 0) or not np.allclose(values.sum(axis=1), 1.0, atol=1e-4):
        raise ValueError(
            "responsibilities must not be negative, and each row must sum to 1."
        )
    return Start(_stored, values.astype(jnp.result_type(float)), random=False)


def _stored(
    rng_key: Array, data: Array, points: Array, weight: Array, active: Array
) -> Array:
    return data


def start_data(
    start: Start,
    num_rows: int,
    num_components: int,
    *,
    capacity: int,
    shards: int,
    size: int,
) -> Any:
    """The arrays of a start, those of given responsibilities with zeros for what fills up.

    Args:
        start: The start.
        num_rows: n.
        num_components: K.
        capacity: Components, with those that fill up.
        shards: Pieces of the rows.
        size: Rows of a piece, with those that fill up.

    Raises:
        ValueError: If they are of another number of rows or components than the data.
    """
    if start.assign is not _stored:
        return start.data
    data = np.asarray(start.data)
    if data.shape[0] != num_rows:
        raise ValueError(
            f"the start has {data.shape[0]} rows, the data have {num_rows}."
        )
    if data.ndim == 1 and int(data.max()) >= num_components:
        raise ValueError(
            f"the start has label {int(data.max())}, num_components is {num_components}."
        )
    if data.ndim == 2 and data.shape[1] != num_components:
        raise ValueError(
            f"the start has {data.shape[1]} components, num_components is {num_components}."
        )
    data = data.reshape(shards, -1, *data.shape[1:])
    filling = [
        (0, 0),
        (0, size - data.shape[1]),
        *[(0, capacity - num_components)] * (data.ndim - 2),
    ]
    data = np.pad(data, filling)
    return data.reshape(shards * size, *data.shape[2:])


def start_or_default(start: Start | None) -> Start:
    """The start, :func:`kmeans_plus_plus` where there is none.

    Raises:
        TypeError: If it is not a start.
    """
    if start is None:
        return kmeans_plus_plus()
    if not isinstance(start, Start):
        raise TypeError(
            f"init is a {type(start).__name__}; expected a value such as nt.mixtures.starts.kmeans_plus_plus() "
            "or nt.mixtures.starts.given_responsibilities(labels), or for nt.mixtures.fit a MixtureFit."
        )
    return start
