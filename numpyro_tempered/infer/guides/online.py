"""AutoGuides that start at the prior."""

import contextlib
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoContinuous, AutoDiagonalNormal, AutoMultivariateNormal

from numpyro_tempered.core.checks import check_count
from numpyro_tempered.core.typing import Array, ArrayLike, Model, Params
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField, family_of
from numpyro_tempered.gaussian.families.base import Gaussian, square_root
from numpyro_tempered.handlers.likelihood import Layout
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.guides.low_rank_normal import LowRankPrecisionNormal
from numpyro_tempered.infer.guides.prior import NUM_PRIOR_DRAWS, PriorMoments, prior_moments


class StartsAtPrior(AutoContinuous):
    """What the online guides share: the start, and the order of sites in the flat vector."""

    def __init__(self, model: Model, *, prefix: str = "auto") -> None:
        self.moment_matched: tuple[str, ...] = ()
        self._prior: Gaussian | None = None
        super().__init__(model, prefix=prefix)

    def fresh(self) -> "StartsAtPrior":
        """A guide like this one that has not been set up."""
        return type(self)(self.model, prefix=self.prefix)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        model: Model = self.model
        # The start depends only on the prior, and must survive data that are missing or absurd.
        self.model: Any = temper(model, alpha=0.0)
        try:
            super()._setup_prototype(*args, **kwargs)
            rng_key = numpyro.prng_key()
            with handlers.block():
                moments = prior_moments(rng_key, self.model, args, kwargs)
        finally:
            self.model = model
        loc = self.pack({k: v.loc for k, v in moments.sites.items()})
        scale = self.pack({k: v.scale for k, v in moments.sites.items()})
        self._init_latent = loc
        self._prior = self.start_at(loc, scale, moments)
        self.moment_matched = tuple(name for name in moments.sites if name in moments.draws)
        if moments.draws:
            warnings.warn(
                f"the priors of {list(self.moment_matched)} are not Normal on the unconstrained scale: the guide "
                f"starts at their mean and {self._matched}, from {NUM_PRIOR_DRAWS} draws.",
                stacklevel=2,
            )

    _matched = "standard deviation"
    # The parameter that is the root of the covariance, which SVI's optimisers step; None where there is none.
    root_param: ClassVar[str | None] = None

    def start_at(self, loc: Array, scale: Array, moments: PriorMoments) -> Gaussian:
        """The Gaussian with these means and standard deviations that the guide starts at.

        Raises:
            TypeError: If the guide does not define its own.
        """
        name = type(self).__name__
        raise TypeError(f"{name} needs a method start_at(loc, scale, moments): it decides the family.")

    def to_params(self, q: Any) -> Params:
        """The guide's parameters at ``q``."""
        return {f"{self.prefix}_{name}": value for name, value in q._asdict().items()}

    def from_params(self, params: Params) -> Gaussian:
        """The Gaussian of the guide's parameters."""
        leaves = [params[f"{self.prefix}_{name}"] for name in self.prior._asdict()]
        q: Gaussian = jax.tree.unflatten(jax.tree.structure(self.prior), leaves)
        return q

    def pack(self, values: Params) -> Array:
        """Unconstrained values by site as one flat array, in the guide's own order."""
        flat = jnp.concatenate([jnp.ravel(values[name]) for name, _ in self.layout.sites])
        return jax.lax.convert_element_type(flat, flat.dtype)  # never weakly typed

    @property
    def layout(self) -> Layout:
        """Names and shapes of the sites in the flat vector, in order."""
        return Layout.of(self._unpack_latent(jnp.zeros(self.latent_dim)))

    @property
    def prior(self) -> Gaussian:
        """The Gaussian that the guide starts at, on the flat unconstrained scale."""
        if self.prototype_trace is None or self._prior is None:
            raise ValueError("the guide has not been set up: call it, or OnlineVI.init, first.")
        return self._prior


def check_guide(guide: object, taker: str) -> StartsAtPrior:
    """A guide whose covariance has a root among its parameters.

    Raises:
        TypeError: If it is another.
    """
    if not isinstance(guide, StartsAtPrior) or guide.root_param is None:
        raise TypeError(
            f"{taker} takes an AutoOnlineDiagonalNormal or AutoOnlineMultivariateNormal, got "
            f"{type(guide).__name__}: use OnlineVI for other online guides."
        )
    return guide


class AutoOnlineDiagonalNormal(StartsAtPrior, AutoDiagonalNormal):
    r"""Mean-field Gaussian guide in the unconstrained space that starts at q = prior.

    For Normal priors with fixed parameters the start is exact. Any other prior (on a constrained
    space, or with parents that are themselves latent) is matched in mean and standard deviation on
    the unconstrained scale, from draws; a warning names those sites, and so does ``moment_matched``.

    Parameters are ``{prefix}_loc`` and ``{prefix}_scale``, as in NumPyro's ``AutoDiagonalNormal``, and
    every method of that guide works.

    Args:
        model: NumPyro model, tempered or not: tempering does not change the prior.
        prefix: Prefix of the guide's parameters.

    Attributes:
        moment_matched: After set-up, names of the sites whose start is not exact.

    Raises:
        ValueError: At set-up, if a prior is improper, masked, or has no variance on the unconstrained scale.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(y=None):
        ...     theta = numpyro.sample("theta", dist.Normal(1.0, 2.0))
        ...     numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> guide = nt.guides.AutoOnlineDiagonalNormal(model)
        >>> sample = numpyro.handlers.seed(guide, jax.random.key(0))(0.5)
        >>> guide.prior.loc, guide.prior.scale
        (Array([1.], dtype=float32), Array([2.], dtype=float32))
    """

    root_param = "scale"

    def start_at(self, loc: Array, scale: Array, moments: PriorMoments) -> MeanField:
        """The start itself."""
        # AutoDiagonalNormal fills its scale parameter with this value, here one for each coordinate.
        self._init_scale = scale
        return MeanField(loc, scale)

    def to_params(self, q: MeanField) -> Params:
        """The guide's parameters at ``q``.

        A scale of 0 becomes the smallest positive number, which NumPyro's Normal admits and whose draws are
        the point itself.
        """
        scale = jnp.maximum(q.scale, jnp.finfo(q.scale.dtype).tiny)
        return {f"{self.prefix}_loc": q.loc, f"{self.prefix}_scale": scale}


class AutoOnlineMultivariateNormal(StartsAtPrior, AutoMultivariateNormal):
    r"""Full-covariance Gaussian guide in the unconstrained space that starts at q = prior.

    As :class:`AutoOnlineDiagonalNormal`, with the covariance of the priors that are not Normal with fixed
    parameters matched too, from draws. Parameters are ``{prefix}_loc`` and ``{prefix}_scale_tril``, as in
    NumPyro's ``AutoMultivariateNormal``, and every method of that guide works.

    Args:
        model: NumPyro model, tempered or not.
        prefix: Prefix of the guide's parameters.

    Attributes:
        moment_matched: After set-up, names of the sites whose start is not exact.

    Raises:
        ValueError: At set-up, if a prior is improper, masked, or has no variance on the unconstrained scale.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(y=None):
        ...     theta = numpyro.sample("theta", dist.Normal(1.0, 2.0))
        ...     numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> guide = nt.guides.AutoOnlineMultivariateNormal(model)
        >>> sample = numpyro.handlers.seed(guide, jax.random.key(0))(0.5)
        >>> guide.prior.loc, guide.prior.factor
        (Array([1.], dtype=float32), Array([[2.]], dtype=float32))
    """

    # Elementwise, so that gradients pull back entry by entry.
    scale_tril_constraint = constraints.softplus_lower_cholesky
    root_param = "scale_tril"
    _matched = "covariance"

    def start_at(self, loc: Array, scale: Array, moments: PriorMoments) -> FullRank:
        """The start, with the covariance of what was drawn."""
        factor = np.diag(np.asarray(scale))
        if moments.draws:
            names = [name for name, _ in self.layout.sites if name in moments.draws]
            places = self.layout.split(jnp.arange(self.latent_dim))
            at = np.concatenate([np.ravel(places[name]) for name in names])
            draws = [np.reshape(moments.draws[name], (NUM_PRIOR_DRAWS, -1)) for name in names]
            covariance = np.atleast_2d(np.cov(np.concatenate(draws, axis=1), rowvar=False, bias=True))
            # Priors that determine each other, or more coordinates than draws: their variances remain.
            with contextlib.suppress(np.linalg.LinAlgError):
                factor[np.ix_(at, at)] = np.linalg.cholesky(covariance)
        return FullRank(loc, jnp.asarray(factor, loc.dtype))

    def _get_posterior(self) -> dist.Distribution:
        loc = numpyro.param(f"{self.prefix}_loc", self._init_latent)
        scale_tril = numpyro.param(
            f"{self.prefix}_scale_tril", square_root(self.prior), constraint=self.scale_tril_constraint
        )
        return dist.MultivariateNormal(loc, scale_tril=scale_tril)

    def to_params(self, q: FullRank) -> Params:
        """The guide's parameters at ``q``."""
        return {f"{self.prefix}_loc": q.loc, f"{self.prefix}_scale_tril": q.scale_tril}

    def from_params(self, params: Params) -> FullRank:
        """The Gaussian of the guide's parameters."""
        return FullRank(params[f"{self.prefix}_loc"], params[f"{self.prefix}_scale_tril"])


class AutoOnlineGuide(StartsAtPrior):
    r"""Base of a guide for a Gaussian family of your own, that starts at q = prior.

    A subclass says by ``start_at`` which Gaussian of the family has the prior's means and standard deviations;
    :func:`~numpyro_tempered.families.register` makes the family known. Parameters are ``{prefix}_{field}`` for
    each field of the family.

    Args:
        model: NumPyro model, tempered or not.
        prefix: Prefix of the guide's parameters.

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
        ...         return nt.families.MeanField(loc, scale)
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
        return dist.MultivariateNormal(q.loc, scale_tril=square_root(family_of(q).canonical(q)))

    def _get_posterior(self) -> dist.Distribution:
        params = {}
        for field, value in self.prior._asdict().items():
            name, constraint = f"{self.prefix}_{field}", self.field_constraints.get(field, constraints.real)
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

    def __init__(self, model: Model, *, rank: int | None = None, prefix: str = "auto") -> None:
        self.rank = None if rank is None else check_count(rank, "rank")
        super().__init__(model, prefix=prefix)

    def fresh(self) -> "AutoOnlineLowRankNormal":
        """A guide like this one that has not been set up."""
        return type(self)(self.model, rank=self.rank, prefix=self.prefix)

    def start_at(self, loc: Array, scale: Array, moments: PriorMoments) -> LowRank:
        """The start, without directions."""
        (d,) = loc.shape
        rank = int(np.ceil(np.sqrt(d))) if self.rank is None else self.rank
        if rank > d:
            raise ValueError(f"rank must be at most the number of coordinates, {d}, got {rank}.")
        return LowRank(loc, 1.0 / jnp.square(scale), jnp.zeros((d, rank), loc.dtype))

    def distribution(self, q: LowRank) -> dist.Distribution:
        """The Gaussian as a distribution of NumPyro."""
        return LowRankPrecisionNormal(*q)
