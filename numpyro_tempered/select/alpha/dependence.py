"""Data that are not independent: in groups, or in the order of time."""

import math
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, ArrayLike, check_count, doubles
from numpyro_tempered.handlers.rows import DataRows
from numpyro_tempered.select.alpha.data_weights import resamples

# Successive data that may depend on each other.
Block: TypeAlias = int | Literal["auto"] | None
# Bandwidth over that of Andrews, whose mean squared error is least: for intervals its bias weighs more than its
# variance (Sun, Phillips and Jin 2008).
_FOR_INTERVALS = 1.5
# Autoregressive coefficients beyond this have no bandwidth in data of any length.
_LARGEST_COEFFICIENT = 0.97


class Dependence(NamedTuple):
    """Which data depend on each other.

    Attributes:
        num_data: n.
        labels: The number of the group of each datum, ``(n,)``; None without groups.
        block: How many successive data may depend on each other; ``"auto"`` to estimate it, None for independent
            data.
    """

    num_data: int
    labels: np.ndarray | None = None
    block: Block = None

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return self.num_data if self.labels is None else int(self.labels.max()) + 1


def read_dependence(
    groups: ArrayLike | None, block: Block, rows: DataRows
) -> Dependence:
    """The dependence that a user declares, checked.

    Raises:
        ValueError: If both are given; ``groups`` are not one label for each datum, or one group, or have missing
            labels; ``block`` is no number from 1 to half of the data.
    """
    if groups is not None and block is not None:
        raise ValueError(
            "groups and block are both given: take groups for units that are independent of each other, each "
            "with its own order of time, and block for one series."
        )
    if groups is not None:
        return Dependence(rows.num_data, _numbers_of(groups, rows))
    if isinstance(block, str) and block != "auto":
        raise ValueError(
            f'block must be a number of successive data or "auto", got {block!r}.'
        )
    if block is not None and block != "auto":
        check_count(
            block,
            "block",
            1,
            rows.num_data // 2,
            hint="There are two blocks of data at least.",
        )
        block = int(block)
    return Dependence(rows.num_data, None, block)


def _numbers_of(groups: ArrayLike, rows: DataRows) -> np.ndarray:
    labels = np.asarray(groups)
    if labels.shape != (rows.size,):
        raise ValueError(
            f"groups must be a label for each of the {rows.size} data, got shape {labels.shape}."
        )
    labels = rows.take(labels)
    # Missing labels are unequal to themselves, and None has no order.
    missing = sum(label is None or label != label for label in labels.tolist())
    if missing:
        raise ValueError(
            f"groups has {missing} missing labels: give each datum without one a group of its own."
        )
    numbers = np.unique(labels, return_inverse=True)[1].reshape(-1)
    if rows.num_data > 1 and numbers.max() == 0:
        raise ValueError(
            "groups has one label for all data, of which nothing is independent."
        )
    return numbers


def bandwidth(dependence: Dependence, series: Array) -> Array:
    """The largest lag at which data depend on each other, a number; 0 without a block.

    For ``"auto"`` it is that of Andrews (1991) for Bartlett's kernel, by autoregressions of order one, times 1.5.

    Args:
        dependence: Of the data.
        series: Their scores in coordinates of one size, ``(n, k)``.
    """
    if dependence.block is None:
        return jnp.zeros((), int)
    if dependence.block != "auto":
        return jnp.asarray(dependence.block - 1)
    power = jnp.sum(jnp.square(series), axis=0)
    coefficient = jnp.sum(series[1:] * series[:-1], axis=0) / jnp.where(
        power > 0, power, 1.0
    )
    r = jnp.clip(coefficient, -_LARGEST_COEFFICIENT, _LARGEST_COEFFICIENT)
    # Weights by the squared variances of the innovations.
    weight = jnp.square(power * (1.0 - jnp.square(r)))
    above = jnp.sum(
        weight * 4.0 * jnp.square(r) / ((1.0 - r) ** 6 * jnp.square(1.0 + r))
    )
    ratio = above / jnp.sum(weight / (1.0 - r) ** 4)
    length = _FOR_INTERVALS * 1.1447 * jnp.cbrt(ratio * dependence.num_data)
    return jnp.minimum(jnp.floor(length).astype(int), _max_lag(dependence))


def _max_lag(dependence: Dependence) -> int:
    """The largest lag: blocks are at most a quarter of the data, if their length is estimated."""
    if dependence.block is None:
        return 0
    return (
        max(1, dependence.num_data // 4)
        if dependence.block == "auto"
        else dependence.block - 1
    )


def sum_of_dependent(dependence: Dependence, values: Array, lags: Array) -> Array:
    r"""Of each datum the sum over those that it depends on, itself among them, ``(n, ...)``.

    So :math:`\sum_i v_i s_i'`, with s the sums, is :math:`n` times the covariance of the sum of the data: over
    groups g it is :math:`\sum_g (\sum_{i \in g} v_i)(\sum_{i \in g} v_i)'`, and in a series the estimate of Newey
    and West (1987), with Bartlett's weights :math:`1 - l / (L + 1)` for lags l up to L.

    Args:
        dependence: Of the data.
        values: Of each datum, ``(n, ...)``.
        lags: L, of :func:`bandwidth`.
    """
    n = dependence.num_data
    if dependence.labels is not None:
        sums = jax.ops.segment_sum(values, dependence.labels, dependence.num_groups)
        return sums[dependence.labels]
    if dependence.block is None:
        return values
    # Bartlett's kernel is a box of L + 1 data with itself. Its sums are differences of cumulative sums.
    width = lags + 1
    ends = jnp.arange(n + _max_lag(dependence)) + 1
    boxes = (
        _since(values)[jnp.minimum(ends, n)]
        - _since(values)[jnp.clip(ends - width, 0, n)]
    )
    starts = jnp.arange(n)
    both = _since(boxes)
    return (both[starts + width] - both[starts]) / width


def _since(values: Array) -> Array:
    """Sums of all values before each place, ``(n + 1, ...)``."""
    return jnp.concatenate([jnp.zeros_like(values[:1]), jnp.cumsum(values, axis=0)])


def se_of_sum(values: np.ndarray, dependence: Dependence) -> np.ndarray:
    """The standard error of the sums of values of the data, ``(A, n)``, as ``(A,)``."""
    centred = jnp.asarray(values - values.mean(axis=1, keepdims=True)).T
    lags = bandwidth(dependence, centred)
    sums = sum_of_dependent(dependence, centred, lags)
    variance = doubles(jnp.sum(centred * sums, axis=0))
    units = max(num_units(dependence, int(lags)), 2)
    return np.sqrt(np.maximum(variance, 0.0) * units / (units - 1))


def num_units(dependence: Dependence, lags: int) -> int:
    """The number of groups, or of blocks that do not overlap: of what is independent."""
    return dependence.num_groups // (int(lags) + 1)


def resample_counts(
    rng_key: Array, num_bootstrap: int, dependence: Dependence, lags: int = 0
) -> Array:
    """How often each datum is in each of B resamples, ``(B, n)``.

    Of independent data they are multinomial; of groups whole groups are drawn; of a series blocks of ``lags + 1``
    successive data, around its end (the circular block bootstrap of Politis and Romano 1992).
    """
    if dependence.labels is not None:
        return resamples(rng_key, num_bootstrap, dependence.num_groups)[
            :, dependence.labels
        ]
    if lags == 0:
        return resamples(rng_key, num_bootstrap, dependence.num_data)
    return _of_blocks(rng_key, num_bootstrap, dependence.num_data, int(lags) + 1)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _of_blocks(rng_key: Array, num_bootstrap: int, num_data: int, length: int) -> Array:
    starts = jax.random.randint(
        rng_key, (num_bootstrap, math.ceil(num_data / length), 1), 0, num_data
    )
    # The last block is cut where the others leave less than its length.
    rows = jnp.reshape((starts + jnp.arange(length)) % num_data, (num_bootstrap, -1))[
        :, :num_data
    ]
    return jax.vmap(lambda row: jnp.zeros(num_data).at[row].add(1.0))(rows)


def describe(dependence: Dependence, lags: int) -> str:
    """A clause on the dependence, for a sentence of advice; empty for independent data."""
    if dependence.labels is not None:
        return f" of data in {dependence.num_groups} groups"
    if dependence.block is not None:
        return f" of a series in which {int(lags) + 1} successive data depend on each other"
    return ""
