"""A normal distribution by a precision of diagonal plus low rank."""

import math

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_tempered.core import Array
from numpyro_tempered.gaussian.families import LowRank, low_rank


class LowRankPrecisionNormal(dist.Distribution):
    r"""N(loc, P^-1) with P = diag(precision_diag) + precision_factor precision_factorᵀ.

    NumPyro's ``LowRankMultivariateNormal`` gives the covariance this form; posteriors give it to the precision,
    to which data add. Sampling and density take O(d k²).

    Args:
        loc: Mean, shape ``(d,)``.
        precision_diag: Positive, shape ``(d,)``.
        precision_factor: Shape ``(d, k)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.infer.guides import LowRankPrecisionNormal
        >>> q = LowRankPrecisionNormal(jnp.zeros(2), jnp.ones(2), jnp.ones((2, 1)))
        >>> q.variance
        Array([0.6666667, 0.6666667], dtype=float32)
    """

    arg_constraints = {  # noqa: RUF012 (NumPyro reads a plain dictionary)
        "loc": constraints.real_vector,
        "precision_diag": constraints.independent(constraints.positive, 1),
        "precision_factor": constraints.independent(constraints.real, 2),
    }
    support = constraints.real_vector
    reparametrized_params = ("loc", "precision_diag", "precision_factor")
    pytree_data_fields = ("loc", "precision_diag", "precision_factor")

    def __init__(
        self,
        loc: Array,
        precision_diag: Array,
        precision_factor: Array,
        *,
        validate_args: bool | None = None,
    ) -> None:
        self.loc, self.precision_diag, self.precision_factor = (
            loc,
            precision_diag,
            precision_factor,
        )
        super().__init__(
            batch_shape=(), event_shape=jnp.shape(loc), validate_args=validate_args
        )

    @property
    def _q(self) -> LowRank:
        return LowRank(self.loc, self.precision_diag, self.precision_factor)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Draws, shape ``sample_shape + (d,)``."""
        return self._q.sample(key, sample_shape)

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        """Log-density over the last axis of ``value``."""
        return self._q.log_prob(value)

    @property
    def mean(self) -> Array:
        """The mean."""
        return self.loc

    @property
    def variance(self) -> Array:
        """Marginal variances."""
        return jnp.square(self._q.sd)

    @property
    def precision_matrix(self) -> Array:
        """The precision itself, ``(d, d)``."""
        return jnp.diag(self.precision_diag) + jnp.matmul(
            self.precision_factor, self.precision_factor.T
        )

    @property
    def covariance_matrix(self) -> Array:
        """The covariance itself, ``(d, d)``."""
        return self._q.covariance

    def entropy(self) -> Array:
        """Entropy in nats."""
        d = self.event_shape[0]
        return 0.5 * (
            d * (1.0 + math.log(2.0 * math.pi)) - low_rank.log_det_precision(self._q)
        )


@dist.kl_divergence.register(LowRankPrecisionNormal, LowRankPrecisionNormal)
def _kl(p: LowRankPrecisionNormal, q: LowRankPrecisionNormal) -> jax.Array:
    return low_rank.kl(p._q, q._q)
