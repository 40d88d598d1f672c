"""Scores, imputation, densities and draws of a fitted probabilistic PCA."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, ArrayLike, check_count, doubles, key_first
from numpyro_tempered.ppca.base import Posterior, Rows, Scores, as_rows
from numpyro_tempered.ppca.bound import with_one
from numpyro_tempered.ppca.model import (
    Draws,
    PPCAFit,
    draw,
    exact_log_density,
    posterior_of,
    rows_of,
)
from numpyro_tempered.ppca.updates import update_scores

_scores = jax.jit(jax.default_matmul_precision("highest")(update_scores))


class Imputed(NamedTuple):
    """Data with their missing entries filled.

    Attributes:
        x: The data with predictive means instead of NaN, float64, shape ``(n, d)``.
        scale: Standard deviations of the missing entries, 0 where observed, shape ``(n, d)``.
    """

    x: np.ndarray
    scale: np.ndarray


class LogDensity(NamedTuple):
    """Monte Carlo estimates of log predictive densities of rows.

    Attributes:
        value: Log of the average density over draws of the posterior, shape ``(n,)``.
        se: Its Monte Carlo standard error (delta method), shape ``(n,)``.
    """

    value: Array
    se: Array


def _prepare(fit: PPCAFit, x: ArrayLike) -> tuple[Posterior, Rows]:
    values = rows_of(fit, x)
    q = posterior_of(fit)
    rows = as_rows(values, fit.origin, q.loc.dtype)
    # With a mask each feature has its own covariance, and each row.
    if rows.mask is None and q.cov.shape[0] > 1:
        rows = rows._replace(mask=jnp.ones_like(rows.x))
    if rows.mask is not None:
        q = q._replace(cov=jnp.broadcast_to(q.cov, (q.loc.shape[0], *q.cov.shape[1:])))
    return q, rows


def transform(fit: PPCAFit, x: ArrayLike) -> Scores:
    """The variational posterior of z given rows, new or old; missing entries (NaN) are marginalised.

    Args:
        fit: A fitted model.
        x: Data, shape ``(n, d)``.

    Returns:
        :class:`Scores`; a row without any entry has the prior N(0, I).

    Raises:
        ValueError: If the shape or the names of the columns do not fit, or an entry is infinite.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-2.0, 2.0, 20)[:, None] * np.ones(3) + 0.1 * np.sin(np.arange(60.0)).reshape(20, 3)
        >>> fit = nt.ppca.fit(jax.random.key(0), x, num_factors=1)
        >>> nt.ppca.transform(fit, [[0.3, np.nan, 0.3]]).loc.shape
        (1, 1)
    """
    return _scores(*_prepare(fit, x))


def impute(fit: PPCAFit, x: ArrayLike) -> Imputed:
    r"""Fill in missing entries by their predictive means :math:`E_q[m_j + W_jz_i]`.

    Args:
        fit: A fitted model.
        x: Data, shape ``(n, d)``, NaN where missing.

    Returns:
        :class:`Imputed`, with the predictive standard deviations under the variational posterior, noise included.

    Raises:
        ValueError: If the shape or the names of the columns do not fit, or an entry is infinite.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-2.0, 2.0, 20)[:, None] * np.ones(3) + 0.1 * np.sin(np.arange(60.0)).reshape(20, 3)
        >>> fit = nt.ppca.fit(jax.random.key(0), x, num_factors=1)
        >>> print(nt.ppca.impute(fit, [[1.0, np.nan, 1.0]]).x.round(1))
        [[1. 1. 1.]]
    """
    values = rows_of(fit, x)
    mean, spread = _predict(*_prepare(fit, values))
    # E[1/τ] of a Gamma; infinite for shapes up to 1, as it should be.
    excess = max(fit.noise_shape - 1.0, 0.0)
    noise = fit.noise_variance * fit.noise_shape / excess if excess else np.inf
    missing = np.isnan(values)
    filled = fit.origin + doubles(mean)
    scale = np.sqrt(doubles(spread) + noise)
    return Imputed(np.where(missing, filled, values), np.where(missing, scale, 0.0))


def reconstruct(fit: PPCAFit, x: ArrayLike) -> np.ndarray:
    """Rows as the factors explain them, E[m + W z], at every entry, observed or missing.

    Args:
        fit: A fitted model.
        x: Data, shape ``(n, d)``, NaN where missing.

    Returns:
        Shape ``(n, d)``, in units of the data.

    Raises:
        ValueError: If the shape or the names of the columns do not fit, or an entry is infinite.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-2.0, 2.0, 20)[:, None] * np.ones(3) + 0.1 * np.sin(np.arange(60.0)).reshape(20, 3)
        >>> fit = nt.ppca.fit(jax.random.key(0), x, num_factors=1)
        >>> print(nt.ppca.reconstruct(fit, [[1.1, 1.0, 0.9]]).round(1))
        [[1. 1. 1.]]
    """
    mean, _ = _predict(*_prepare(fit, x))
    return fit.origin + doubles(mean)


@jax.jit
@jax.default_matmul_precision("highest")
def _predict(q: Posterior, rows: Rows) -> tuple[Array, Array]:
    """Mean and variance of W z + m at every entry."""
    z = update_scores(q, rows)
    augmented, loadings = with_one(z), q.loc[:, :-1]
    mean = augmented.loc @ q.loc.T
    cov_w = jnp.broadcast_to(q.cov, (q.loc.shape[0], *q.cov.shape[1:]))
    cov_z = jnp.broadcast_to(augmented.cov, (mean.shape[0], *augmented.cov.shape[1:]))
    spread = (
        jnp.einsum("ik,jkl,il->ij", augmented.loc, cov_w, augmented.loc)
        + jnp.einsum("jk,ikl,jl->ij", loadings, cov_z[:, :-1, :-1], loadings)
        + jnp.einsum("ikl,jkl->ij", cov_z, cov_w)
    )
    return mean, spread


@key_first
def sample(rng_key: Array, fit: PPCAFit, num_samples: int = 1) -> np.ndarray:
    """New rows from the posterior predictive, each with its own draw of the parameters.

    Args:
        rng_key: Key of the draws.
        fit: A fitted model.
        num_samples: Number of rows.

    Returns:
        Shape ``(num_samples, d)``, in units of the data.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-2.0, 2.0, 20)[:, None] * np.ones(3) + 0.1 * np.sin(np.arange(60.0)).reshape(20, 3)
        >>> fit = nt.ppca.fit(jax.random.key(0), x, num_factors=1)
        >>> nt.ppca.sample(jax.random.key(1), fit, 4).shape
        (4, 3)
    """
    check_count(num_samples, "num_samples", 0)
    draw_key, z_key, noise_key = jax.random.split(rng_key, 3)
    draws = draw(draw_key, posterior_of(fit), fit.noise_shape, num_samples)
    z = jax.random.normal(z_key, (num_samples, fit.num_factors), draws.mean.dtype)
    noise = jax.random.normal(noise_key, draws.mean.shape, draws.mean.dtype)
    signal = draws.mean + jnp.einsum("sjk,sk->sj", draws.loadings, z)
    x = signal + noise / jnp.sqrt(draws.noise_precision)[:, None]
    return fit.origin + doubles(x)


@key_first
def log_predictive(
    rng_key: Array, fit: PPCAFit, x: ArrayLike, num_draws: int = 1000
) -> LogDensity:
    r"""Log predictive density of rows, :math:`\log E_q[p(x_i|W, m, \tau)]`, by Monte Carlo over q.

    For each draw of (W, m, τ) the z and the missing entries are integrated exactly. The density is that of the
    model, without alpha.

    Args:
        rng_key: Key of the draws.
        fit: A fitted model.
        x: Data, shape ``(n, d)``, NaN where missing.
        num_draws: Draws of (W, m, τ), at least 2, common to all rows.

    Returns:
        :class:`LogDensity`; a row without any entry has 0.

    Raises:
        ValueError: If the shape or the names of the columns do not fit, an entry is infinite, or the draws are
            too few.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-2.0, 2.0, 20)[:, None] * np.ones(3) + 0.1 * np.sin(np.arange(60.0)).reshape(20, 3)
        >>> fit = nt.ppca.fit(jax.random.key(0), x, num_factors=1)
        >>> density = nt.ppca.log_predictive(jax.random.key(1), fit, [[1.0, 1.0, 1.0], [1.0, 9.0, 1.0]])
        >>> bool(density.value[0] > density.value[1])
        True
    """
    check_count(num_draws, "num_draws", 2)
    _, rows = _prepare(fit, x)
    return _average(draw(rng_key, posterior_of(fit), fit.noise_shape, num_draws), rows)


@jax.jit
@jax.default_matmul_precision("highest")
def _average(draws: Draws, rows: Rows) -> LogDensity:
    count = draws.noise_precision.shape[0]

    def add(sums: tuple[Array, Array], one: Draws) -> tuple[tuple[Array, Array], None]:
        value = exact_log_density(one, rows)
        return (
            jnp.logaddexp(sums[0], value),
            jnp.logaddexp(sums[1], 2.0 * value),
        ), None

    start = jnp.full(rows.x.shape[0], -jnp.inf, rows.x.dtype)
    (first, second), _ = jax.lax.scan(add, (start, start), draws)
    relative = jnp.maximum(count * jnp.exp(second - 2.0 * first) - 1.0, 0.0)
    return LogDensity(first - jnp.log(count), jnp.sqrt(relative / (count - 1)))
