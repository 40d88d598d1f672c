"""Prior, posterior and data of probabilistic PCA, and their checks."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Numbers,
    Scalar,
    as_array,
    checks,
    doubles,
    to_host,
    warn_caller,
)

T = TypeVar("T")


class Prior(NamedTuple):
    r"""Priors of mean, loadings and noise; :func:`prior` makes one for data of a given scale.

    :math:`m_j\sim N(\mathrm{mean}_j, \mathrm{mean\_scale}^2)`, :math:`\tau\sim\mathrm{Ga}` (shape, rate) for the
    precision of the noise, :math:`W_{jk}\sim N(0, 1/\lambda_k)` with
    :math:`\lambda_k\sim\mathrm{Ga}` (shape, rate).

    The rate of τ is a floor of the noise: with N observed entries :math:`1/E\tau` is at least
    noise_rate / (noise_shape + alpha N / 2).

    Attributes:
        mean: Prior mean of m, a number or shape ``(d,)``, in units of the data.
        mean_scale: Its standard deviation, in units of the data.
        noise_shape: Shape of the prior of τ.
        noise_rate: Its rate, in squared units of the data.
        ard_shape: Shape of the prior of every λ_k.
        ard_rate: Its rate, in squared units of the data.
        loading_precision: λ of every column where there is no ARD, in inverse squared units of the data.
    """

    mean: ArrayLike
    mean_scale: float
    noise_shape: float
    noise_rate: float
    ard_shape: float
    ard_rate: float
    loading_precision: float


def prior(scale: float = 1.0, mean: ArrayLike = 0.0) -> Prior:
    r"""A weak proper prior for data whose columns deviate by about ``scale`` from their means.

    The mean is :math:`N(\mathrm{mean}, (10\,\mathrm{scale})^2)`, τ Ga(1, scale²) and λ_k Ga(1/2, scale²/1000): a
    column of W is Cauchy about 0, narrow enough to vanish among thousands of rows and with tails that let in
    loadings of any size. Data times c under the prior of ``c * scale`` and ``c * mean`` give the same fit, and an
    ELBO less by alpha log c for each observed entry. Among N entries the noise variance is at least about
    2 scale² / (alpha N): take a smaller ``noise_rate`` for less.

    Args:
        scale: Usual deviation of a column, in units of the data.
        mean: Prior mean, a number or shape ``(d,)``.

    Returns:
        A :class:`Prior`; change parts by ``_replace``.

    Raises:
        ValueError: If ``scale`` is not positive.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.ppca.prior(scale=10.0)._replace(noise_shape=2.0).mean_scale
        100.0
    """
    scale = float(checks.check_number(scale, "scale", "(0, inf)"))
    square = scale**2
    return Prior(mean, 10.0 * scale, 1.0, square, 0.5, 1e-3 * square, 1.0 / square)


def prior_of(values: np.ndarray) -> Prior:
    r"""The prior where none is given: :func:`prior` at the means and the usual deviation s of the columns.

    It is empirical Bayes, and worth little: the prior of τ, :math:`\mathrm{Ga}(1/2, 10^{-9}s^2N)` for N observed
    entries, counts as one entry, and says that the noise variance is at least :math:`2\cdot10^{-9}s^2/\alpha`,
    whatever the size of the data: less is lost in the rounding of float32. It does not depend on K, so that K
    can be compared.

    Raises:
        ValueError: If no column has two different values.
    """
    variance = np.where(is_constant(values), 0.0, np.nanvar(values, axis=0)).mean()
    if variance == 0.0:
        raise ValueError(
            "no column has two different values, so that the data have no scale: pass "
            "prior=nt.ppca.prior(scale, mean)."
        )
    weak = prior(math.sqrt(variance), np.nanmean(values, axis=0))
    return weak._replace(
        noise_shape=0.5,
        noise_rate=1e-9 * float(variance) * int(np.sum(~np.isnan(values))),
    )


def is_constant(values: np.ndarray) -> np.ndarray:
    """Which columns have no two different values."""
    return np.nanmax(values, axis=0) == np.nanmin(values, axis=0)


class Posterior(NamedTuple):
    r"""The variational posterior :math:`\prod_j N(\tilde w_j)\,\mathrm{Ga}(\tau)\prod_k\mathrm{Ga}(\lambda_k)`.

    :math:`\tilde w_j = (W_j, m_j)`: the loadings of column j and its mean, together. The shapes of the Gammas
    follow from the size of the data, so that their means determine them.

    Attributes:
        loc: Mean of :math:`\tilde w`, shape ``(d, K + 1)``; its last column is relative to an origin.
        cov: Covariances, ``(d, K + 1, K + 1)``; ``(1, K + 1, K + 1)``, for all columns, if no entry is missing.
        noise_precision: E[τ].
        loading_precision: E[λ], shape ``(K,)``; λ itself without ARD.
    """

    loc: Array
    cov: Array
    noise_precision: Array
    loading_precision: Array


class Scores(NamedTuple):
    """Gaussians over the latent z of rows.

    Attributes:
        loc: Means, shape ``(n, K)``.
        cov: Covariances, ``(n, K, K)``, or ``(1, K, K)`` for all rows where no entry is missing.
    """

    loc: Array
    cov: Array


class Rows(NamedTuple):
    """Data of the updates.

    Attributes:
        x: Entries minus the origin, 0 where missing, shape ``(n, d)``.
        mask: 1 where observed and 0 where missing, ``(n, d)``; None where all are observed.
    """

    x: Numbers
    mask: Numbers | None

    @property
    def num_observed(self) -> Array | int:
        """The number of observed entries."""
        return self.x.size if self.mask is None else self.mask.sum()


class Target(NamedTuple):
    """The tempered model of data, whose ELBO the updates raise.

    Attributes:
        rows: The data.
        prior: Its mean is relative to the origin of the data.
        alpha: Power on the likelihood.
        ard: Whether columns of W have precisions of their own.
        active: 1 for the columns of W of the model, 0 for padding, which stays 0; None without padding.
    """

    rows: Rows
    prior: Prior
    alpha: Scalar
    ard: bool
    active: Numbers | None = None


def as_matrix(x: ArrayLike, num_columns: int | None = None) -> np.ndarray:
    """Data as float64, NaN where missing.

    Raises:
        ValueError: If they are no matrix, have another number of columns, or an entry is infinite.
        TypeError: If they are not real numbers, or are traced.
    """
    checks.check_known("x is traced, and nt.ppca reads it on the host", x)
    table = to_host(as_array(x, "x", "Pass a float array, NaN where missing."))
    checks.check_real(table.dtype, "x", hint="Pass a float array, NaN where missing.")
    if table.ndim != 2 or table.shape[1] == 0:
        raise ValueError(f"x must have shape (n, d) with d > 0, got {table.shape}.")
    if num_columns is not None and table.shape[1] != num_columns:
        raise ValueError(f"x has {table.shape[1]} columns, the fit {num_columns}.")
    values = table.astype(np.float64)
    if np.any(np.isinf(values)):
        infinite = np.argwhere(np.isinf(values))
        i, j = infinite[0]
        raise ValueError(
            f"x is infinite in row {i}, column {j} and in {len(infinite)} of {values.size} entries: pass NaN "
            "where an entry is missing."
        )
    return values


def in_double(record: T) -> T:
    """A NamedTuple of arrays in float64 on the host."""
    return jax.tree.map(lambda part: doubles(part), record)


def as_rows(values: np.ndarray, origin: np.ndarray, dtype: np.dtype | None) -> Rows:
    """Rows relative to an origin, with a mask if an entry is NaN; float64 on the host if ``dtype`` is None."""
    observed = ~np.isnan(values)
    mask = None if observed.all() else observed.astype(np.float64)
    rows = Rows(np.where(observed, values - origin, 0.0), mask)
    return (
        rows
        if dtype is None
        else jax.device_put(jax.tree.map(lambda part: np.asarray(part, dtype), rows))
    )


def check_prior(prior: Prior, d: int) -> Prior:
    """The prior, if it is one for d columns.

    Raises:
        ValueError: If a part is not positive and finite, or the mean has another shape.
    """
    for name in Prior._fields[1:]:
        checks.check_number(getattr(prior, name), f"prior.{name}", "(0, inf)")
    checks.check_numbers(prior.mean, "prior.mean")
    shape = np.shape(prior.mean)
    if shape not in ((), (d,)):
        raise ValueError(
            f"prior.mean must be a number or have shape ({d},), got an array of shape {shape}."
        )
    return prior


def check_table(values: np.ndarray, orders: Sequence[int]) -> None:
    """Refuse data without entries, and numbers of factors out of range.

    Raises:
        ValueError: If there are any.
    """
    n, d = values.shape
    if n == 0:
        raise ValueError("x has no row with an observed entry.")
    empty = np.flatnonzero(np.all(np.isnan(values), axis=0))
    if empty.size:
        raise ValueError(
            f"x has no observed entry in columns {empty.tolist()}: leave these columns out."
        )
    for k in orders:
        checks.check_count(k, "num_factors", 0, d, hint=f"x has {d} columns.")


def warn_of_scale(values: np.ndarray, centred: Prior) -> None:
    """Warn of data far from where the prior, relative to their origin, expects them."""
    hint = "standardise the columns, or pass prior=nt.ppca.prior(scale, mean)."
    far = np.flatnonzero(np.abs(centred.mean) > 5.0 * centred.mean_scale)
    if far.size:
        distance = "more than 5 prior standard deviations from prior.mean"
        warn_caller(f"the means of columns {far.tolist()} lie {distance}: {hint}")
    deviation = math.sqrt(np.mean(np.nanvar(values, axis=0)))
    unit = math.sqrt(centred.noise_rate / centred.noise_shape)
    # A prior may expect little noise in data of its scale.
    if values.shape[0] > 1 and not unit / 100.0 <= deviation <= 100.0 * max(
        unit, 0.1 * centred.mean_scale
    ):
        off = f"the columns deviate by {deviation:.3g} from their means"
        warn_caller(f"{off}, the prior is made for {unit:.3g}: {hint}")


def warn_of_columns(values: np.ndarray) -> None:
    """Warn of columns that are constant or the same as an earlier one: no noise of their own is left in them."""
    several = np.sum(~np.isnan(values), axis=0) > 1
    constant = np.flatnonzero(is_constant(values) & several)
    first: dict[int, int] = {}
    earlier = [
        first.setdefault(hash(column.tobytes()), j) for j, column in enumerate(values.T)
    ]
    copies = np.setdiff1d(
        np.flatnonzero(np.array(earlier) < np.arange(len(earlier))), constant
    ).tolist()
    for kind, columns in (
        ("constant", constant.tolist()),
        ("copies of earlier ones", copies),
    ):
        if columns and len(values) > 1:
            warn_caller(
                f"columns {columns} of x are {kind}: the noise is common to all columns, and these say that "
                "there is none, so that everything else takes factors. Leave them out."
            )


def spacing_of(x: ArrayLike, values: np.ndarray) -> float:
    """The largest distance of neighbouring numbers in the type that the data came in; 0 for whole numbers."""
    dtype = as_array(x, "x").dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        return 0.0
    return float(jnp.finfo(dtype).eps) * float(np.nanmax(np.abs(values)))
