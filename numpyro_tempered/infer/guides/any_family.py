"""AutoGuides of any Gaussian family, that start at the prior."""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from numpyro_tempered.core import Array, ArrayLike, Model, Params, Shape, check_count
from numpyro_tempered.gaussian.families import LowRank, family_of, low_rank
from numpyro_tempered.gaussian.families.base import square_root
from numpyro_tempered.infer.guides.online import StartsAtPrior
from numpyro_tempered.infer.guides.prior import PriorMoments


class AutoOnlineGuide(StartsAtPrior):
    r"""Base of a guide for a Gaussian family of your own, that starts at q = prior.

    A subclass says by ``start_at`` which Gaussian of the family has the prior's means and standard deviations;
    :func:`.register` makes the family known. Parameters are ``{prefix}_{field}`` for
    each field of the family.

    Args:
        model: NumPyro model, tempered or not.
        prefix: Prefix of the guide's parameters.
        init_loc_fn: Where the means start instead, as in NumPyro's guides; the standard deviations stay those
            of the prior. For :func:`fit_svi`, :func:`fit_gaussian` and NumPyro's ``SVI``; online rules refuse it.

    Attributes:
        moment_matched: After set-up, names of the sites whose start is not exact.
        field_constraints: Constraints by field; others are real.

    Raises:
        ValueError: At set-up, if a prior is improper, masked, or has no variance on the unconstrained scale.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> class AutoOnlineNormal(nt.guides.AutoOnlineGuide):
        ...     def start_at(self, loc, scale, moments):
        ...         return nt.gaussian.families.MeanField(loc, scale)
        >>> def model(y=None):
        ...     theta = numpyro.sample("theta", dist.Normal(1.0, 2.0))
        ...     numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> guide = AutoOnlineNormal(model)
        >>> sample = numpyro.handlers.seed(guide, jax.random.key(0))(0.5)
        >>> guide.get_posterior(guide.to_params(guide.prior)).variance
        Array([4.], dtype=float32)
    """

    field_constraints: ClassVar[Mapping[str, constraints.Constraint]] = {}

    def distribution(self, q: Any) -> dist.Distribution:
        """The Gaussian as a distribution of NumPyro."""
        return dist.MultivariateNormal(
            q.loc, scale_tril=square_root(family_of(q).canonical(q))
        )

    def _get_posterior(self) -> dist.Distribution:
        params = {}
        for field, value in (
            self.prior._replace(loc=self._init_latent)._asdict().items()
        ):
            name, constraint = (
                f"{self.prefix}_{field}",
                self.field_constraints.get(field, constraints.real),
            )
            params[name] = numpyro.param(name, value, constraint=constraint)
        return self.get_posterior(params)

    def get_posterior(self, params: Params) -> dist.Distribution:
        """The posterior on the flat unconstrained scale."""
        return self.distribution(self.from_params(params))

    def median(self, params: Params) -> Params:
        """The median of each site."""
        return self._unpack_and_constrain(self.from_params(params).loc, params)

    def quantiles(self, params: Params, quantiles: ArrayLike) -> Params:
        """Marginal quantiles of each site."""
        q = self.from_params(params)
        levels = jnp.asarray(quantiles)[..., None]
        latent = dist.Normal(q.loc, family_of(q).marginal_scale(q)).icdf(levels)
        return self._unpack_and_constrain(latent, params)


class AutoOnlineLowRankNormal(AutoOnlineGuide):
    r"""Gaussian guide with a precision of diagonal plus low rank, that starts at q = prior.

    As :class:`AutoOnlineDiagonalNormal`; the ``rank`` strongest directions of the data's information are kept
    beside the diagonal. Parameters are ``{prefix}_loc``, ``{prefix}_precision_diag`` and
    ``{prefix}_precision_factor``.

    Args:
        model: NumPyro model, tempered or not.
        rank: Number of directions k; by default the root of the dimension, rounded up.
        prefix: Prefix of the guide's parameters.
        init_loc_fn: Where the means start instead, as in NumPyro's guides; the standard deviations stay those
            of the prior. For :func:`fit_svi`, :func:`fit_gaussian` and NumPyro's ``SVI``; online rules refuse it.

    Attributes:
        moment_matched: After set-up, names of the sites whose start is not exact.

    Raises:
        ValueError: If ``rank`` < 1; at set-up, if it is above the number of coordinates, or if a prior is
            improper, masked, or has no variance on the unconstrained scale.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(y=None):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 2.0).expand([9]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(theta.sum(), 1.0), obs=y)
        >>> guide = nt.guides.AutoOnlineLowRankNormal(model)
        >>> sample = numpyro.handlers.seed(guide, jax.random.key(0))(0.5)
        >>> guide.prior.precision_factor.shape
        (9, 3)
    """

    field_constraints: ClassVar = {"precision_diag": constraints.positive}

    def __init__(
        self,
        model: Model,
        *,
        rank: int | None = None,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] | None = None,
    ) -> None:
        self.rank = None if rank is None else check_count(rank, "rank")
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)

    def fresh(self) -> "AutoOnlineLowRankNormal":
        """A guide like this one that has not been set up."""
        return type(self)(
            self.model,
            rank=self.rank,
            prefix=self.prefix,
            init_loc_fn=self._own_start(),
        )

    def start_at(self, loc: Array, scale: Array, moments: PriorMoments) -> LowRank:
        """The start, without directions."""
        (d,) = loc.shape
        rank = int(np.ceil(np.sqrt(d))) if self.rank is None else self.rank
        if rank > d:
            raise ValueError(
                f"rank must be at most the number of coordinates, {d}, got {rank}."
            )
        return LowRank(loc, 1.0 / jnp.square(scale), jnp.zeros((d, rank), loc.dtype))

    def distribution(self, q: LowRank) -> dist.Distribution:
        """The Gaussian as a distribution of NumPyro."""
        return LowRankPrecisionNormal(*q)


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

    def sample(self, key: Array, sample_shape: Shape = ()) -> Array:
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
