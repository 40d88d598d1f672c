"""Student's t in forms whose draws, densities and quantiles hold for large degrees of freedom and float32."""

import math

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import betainc, gammaln, ndtri
from numpyro.distributions.util import validate_sample
from numpyro.util import is_prng_key

from numpyro_tempered.core import Array, ArrayLike, Shape

# From here on Stirling's series has all digits of double precision.
_LARGE = 12.0
# Degrees of freedom above which quantiles are those of a Gaussian, corrected: in single precision, and in double.
_GAUSSIAN = (100.0, 1000.0)


class StudentT(dist.StudentT):
    r"""NumPyro's ``StudentT`` with draws in closed form and a density without cancellation.

    With U, V uniform on (0, 1), :math:`T = \sqrt{\nu (U^{-2 / \nu} - 1)} \cos(2 \pi V)` has ν degrees of freedom:
    smooth in ν, and without the rejections of a gamma variable.

    References:
        Bailey94.

    Example:
        >>> from numpyro_tempered.infer.guides.heavy_tails import StudentT
        >>> print(f"{StudentT(7.0, 0.0, 1.0).log_prob(0.0):.3f}")
        -0.955
    """

    def sample(self, key: Array | None, sample_shape: Shape = ()) -> Array:
        """Draws, shape ``sample_shape + batch_shape``."""
        if key is None or not is_prng_key(key):
            raise TypeError(f"a draw needs a key of jax.random, got {key!r}.")
        radius_key, angle_key = jax.random.split(key)
        shape = (*sample_shape, *self.batch_shape)
        dtype = jnp.result_type(self.df, self.loc, self.scale, float)
        # Exponential, as the logarithm of a uniform number near 0 would be of few.
        squares = self.df * jnp.expm1(
            2.0 * jax.random.exponential(radius_key, shape, dtype) / self.df
        )
        turns = jax.random.uniform(angle_key, shape, dtype)
        return self.loc + self.scale * jnp.sqrt(squares) * jnp.cos(
            2.0 * math.pi * turns
        )

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Log-density, shape ``sample_shape + batch_shape``."""
        square = jnp.square((value - self.loc) / self.scale)
        return _log_density(self.df, square, 1, jnp.log(self.scale))


class MultivariateStudentT(dist.MultivariateStudentT):
    """NumPyro's ``MultivariateStudentT`` with a density without cancellation."""

    @validate_sample
    def log_prob(self, value: ArrayLike) -> Array:
        """Log-density over the last axis of ``value``."""
        off = value - self.loc
        tril = jnp.broadcast_to(self.scale_tril, (*jnp.shape(off), jnp.shape(off)[-1]))
        white = jax.scipy.linalg.solve_triangular(tril, off[..., None], lower=True)[
            ..., 0
        ]
        log_det = jnp.sum(
            jnp.log(jnp.diagonal(self.scale_tril, axis1=-2, axis2=-1)), axis=-1
        )
        return _log_density(
            self.df, jnp.sum(jnp.square(white), axis=-1), jnp.shape(off)[-1], log_det
        )


@jax.jit
def icdf(df: ArrayLike, levels: ArrayLike) -> Array:
    """Quantiles of the standard Student's t, by bisection: NumPyro's need TensorFlow Probability.

    Args:
        df: Degrees of freedom, positive.
        levels: Probabilities in [0, 1], of a shape that broadcasts with ``df``.

    Example:
        >>> from numpyro_tempered.infer.guides.heavy_tails import icdf
        >>> print(f"{icdf(2.0, 0.75):.3f}")  # the root of 2/3
        0.816
    """
    dtype = jnp.result_type(df, levels, float)
    df, levels = jnp.broadcast_arrays(
        jnp.asarray(df, dtype), jnp.asarray(levels, dtype)
    )
    tail = jnp.minimum(levels, 1.0 - levels)

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        # In the inverse hyperbolic sine of t, whose tails are long.
        square = jnp.square(jnp.sinh(middle))
        is_inside = 0.5 * betainc(0.5 * df, 0.5, df / (df + square)) > tail
        return jnp.where(is_inside, middle, low), jnp.where(is_inside, high, middle)

    # Further out the square of t would overflow.
    most = 0.45 * math.log(float(jnp.finfo(dtype).max))
    low, high = jax.lax.fori_loop(
        0, 64, halve, (jnp.zeros_like(tail), jnp.full_like(tail, most))
    )
    size = jnp.where(
        tail == 0.5, 0.0, jnp.where(tail == 0.0, jnp.inf, jnp.sinh(0.5 * (low + high)))
    )
    by_halves = jnp.where(
        (levels < 0.0) | (levels > 1.0), jnp.nan, jnp.where(levels < 0.5, -size, size)
    )
    return jnp.where(
        df > _GAUSSIAN[jnp.finfo(dtype).bits > 32],
        _near_gaussian(df, levels),
        by_halves,
    )


def _near_gaussian(df: Array, levels: Array) -> Array:
    """Quantiles by the expansion of Cornish and Fisher, where the incomplete beta function rounds."""
    z, inverse = ndtri(levels), 0.25 / df
    square = jnp.square(z)
    third = ((3.0 * square + 19.0) * square + 17.0) * square - 15.0
    second = (5.0 * square + 16.0) * square + 3.0
    terms = inverse * (square + 1.0 + inverse * (second / 6.0 + inverse * third / 6.0))
    # A tail of probability 0 ends at infinity.
    return jnp.where(jnp.isinf(z), z, z * (1.0 + terms))


def _log_density(df: ArrayLike, square: Array, dim: int, log_det: Array) -> Array:
    half = 0.5 * dim
    constant = _log_gamma_ratio(0.5 * df, half) - half * math.log(2.0 * math.pi)
    return constant - log_det - 0.5 * (df + dim) * jnp.log1p(square / df)


def _log_gamma_ratio(a: ArrayLike, h: float) -> Array:
    r""":math:`\log \Gamma(a + h) - \log \Gamma(a) - h \log a`, of few digits where large terms cancel."""
    is_large = jnp.greater(a, _LARGE)
    small, large = jnp.where(is_large, _LARGE, a), jnp.where(is_large, a, _LARGE)
    exact = gammaln(small + h) - gammaln(small) - h * jnp.log(small)
    series = (
        (large + h - 0.5) * jnp.log1p(h / large)
        - h
        + _stirling(large + h)
        - _stirling(large)
    )
    return jnp.where(is_large, series, exact)


def _stirling(a: Array) -> Array:
    inverse = 1.0 / a
    square = jnp.square(inverse)
    return inverse * (
        1 / 12
        - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square / 1188)))
    )
