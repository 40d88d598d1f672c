"""AutoGuides that start at the prior."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.autoguide import (
    AutoContinuous,
    AutoDiagonalNormal,
    AutoMultivariateNormal,
)
from numpyro.infer.initialization import init_to_uniform

from numpyro_tempered.core import Array, Model, Params, is_traced, warn_caller
from numpyro_tempered.gaussian.families import FullRank, MeanField
from numpyro_tempered.gaussian.families.base import Gaussian, square_root
from numpyro_tempered.handlers.likelihood import Layout
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.guides.prior import (
    NUM_PRIOR_DRAWS,
    PriorMoments,
    prior_moments,
)


class StartsAtPrior(AutoContinuous):
    """What the online guides share: the start, and the order of sites in the flat vector."""

    def __init__(
        self,
        model: Model,
        *,
        prefix: str = "auto",
        init_loc_fn: Callable[..., Any] | None = None,
    ) -> None:
        self.moment_matched: tuple[str, ...] = ()
        self._prior: Gaussian | None = None
        self.starts_at_prior = init_loc_fn is None
        super().__init__(
            model,
            prefix=prefix,
            init_loc_fn=init_to_uniform if init_loc_fn is None else init_loc_fn,
        )

    def fresh(self) -> "StartsAtPrior":
        """A guide like this one that has not been set up."""
        return type(self)(self.model, prefix=self.prefix, init_loc_fn=self._own_start())

    def set_up(self, rng_key: Array, args: tuple, kwargs: dict) -> None:
        """What the guide's first call does before it draws."""
        with handlers.seed(rng_seed=rng_key):
            self._setup_prototype(*args, **kwargs)

    def _own_start(self) -> Callable[..., Any] | None:
        """The ``init_loc_fn`` that was given."""
        return None if self.starts_at_prior else self.init_loc_fn

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
        if self.starts_at_prior:
            self._init_latent = loc
        self._prior = self.start_at(loc, scale, moments)
        self.moment_matched = tuple(
            name for name in moments.sites if name in moments.draws
        )
        if moments.draws:
            warn_caller(
                f"the priors of {list(self.moment_matched)} are not Normal on the unconstrained scale: the guide "
                f"starts at their mean and {self._matched}, from {NUM_PRIOR_DRAWS} draws."
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
        raise TypeError(
            f"{name} needs a method start_at(loc, scale, moments): it decides the family."
        )

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
        parts = [values[name] for name, _ in self.layout.sites]
        if not is_traced(parts):
            return jax.device_put(np.concatenate([np.ravel(part) for part in parts]))
        flat = jnp.concatenate([jnp.ravel(part) for part in parts])
        return jax.lax.convert_element_type(flat, flat.dtype)  # never weakly typed

    @property
    def layout(self) -> Layout:
        """Names and shapes of the sites in the flat vector, in order."""
        return Layout.of_parts(self._unpack_latent, self.latent_dim)

    @property
    def prior(self) -> Gaussian:
        """The prior's Gaussian on the flat unconstrained scale, at which the guide starts by default."""
        if self.prototype_trace is None or self._prior is None:
            raise ValueError(
                "the guide has not been set up: call it, or OnlineVI.init, first."
            )
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
    check_start(guide, taker)
    return guide


def check_start(guide: StartsAtPrior, taker: str) -> None:
    """Raise ValueError if the guide starts elsewhere, where the start is what the data are weighed against."""
    if not guide.starts_at_prior:
        raise ValueError(
            f"{taker} weighs the data against the Gaussian that it starts at, which must be the prior: leave "
            "init_loc_fn out of the guide. It is for fit_svi, fit_gaussian and NumPyro's own optimisers."
        )


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
        init_loc_fn: Where the means start instead, as in NumPyro's guides; the standard deviations stay those
            of the prior. For :func:`fit_svi`, :func:`fit_gaussian` and NumPyro's ``SVI``; online rules refuse it.

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
    parameters matched too, from draws: with each other, and with what they depend on. Parameters are
    ``{prefix}_loc`` and ``{prefix}_scale_tril``, as in NumPyro's ``AutoMultivariateNormal``, and every method of
    that guide works.

    Args:
        model: NumPyro model, tempered or not.
        prefix: Prefix of the guide's parameters.
        init_loc_fn: Where the means start instead, as in NumPyro's guides; the standard deviations stay those
            of the prior. For :func:`fit_svi`, :func:`fit_gaussian` and NumPyro's ``SVI``; online rules refuse it.

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
            draws = {**moments.draws, **moments.parent_draws}
            places = {
                name: np.ravel(at)
                for name, at in self.layout.split(jnp.arange(self.latent_dim)).items()
            }

            def join(names: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
                flat = [
                    np.reshape(draws[name], (NUM_PRIOR_DRAWS, -1)) for name in names
                ]
                where = np.concatenate([places[name] for name in names])
                return where, np.concatenate(flat, axis=1)

            at, values = join(
                [name for name, _ in self.layout.sites if name in moments.draws]
            )
            # What is Normal with fixed parameters keeps them, and what depends on it is regressed on it.
            regression = np.eye(self.latent_dim)
            for name, parents in moments.parents.items():
                if parents:
                    others, x = join(parents)
                    rows, y = places[name], values[:, np.isin(at, places[name])]
                    slopes = np.linalg.lstsq(x - x.mean(0), y - y.mean(0), rcond=None)[
                        0
                    ]
                    regression[np.ix_(rows, others)] = slopes.T
                    values[:, np.isin(at, rows)] = y - x @ slopes
            covariance = np.atleast_2d(np.cov(values, rowvar=False, bias=True))
            # Priors that determine each other, or more coordinates than draws: their variances remain.
            with contextlib.suppress(np.linalg.LinAlgError):
                factor[np.ix_(at, at)] = np.linalg.cholesky(covariance)
                if any(moments.parents.values()):
                    root = regression @ factor
                    factor = np.linalg.cholesky(root @ root.T)
        return FullRank(loc, jnp.asarray(factor, loc.dtype))

    def _get_posterior(self) -> dist.Distribution:
        loc = numpyro.param(f"{self.prefix}_loc", self._init_latent)
        scale_tril = numpyro.param(
            f"{self.prefix}_scale_tril",
            square_root(self.prior),
            constraint=self.scale_tril_constraint,
        )
        return dist.MultivariateNormal(loc, scale_tril=scale_tril)

    def to_params(self, q: FullRank) -> Params:
        """The guide's parameters at ``q``."""
        return {f"{self.prefix}_loc": q.loc, f"{self.prefix}_scale_tril": q.scale_tril}

    def from_params(self, params: Params) -> FullRank:
        """The Gaussian of the guide's parameters."""
        return FullRank(
            params[f"{self.prefix}_loc"], params[f"{self.prefix}_scale_tril"]
        )
