"""AutoGuides that start at the prior."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.autoguide import AutoDiagonalNormal

from numpyro_tempered._typing import Array, Model
from numpyro_tempered.families.mean_field import MeanField
from numpyro_tempered.handlers import temper
from numpyro_tempered.likelihood import Layout, latent_sites
from numpyro_tempered.messages import base_distribution

NUM_PRIOR_DRAWS = 10_000


class AutoOnlineDiagonalNormal(AutoDiagonalNormal):
    r"""Mean-field Gaussian guide in the unconstrained space that starts at q = prior.

    For Normal priors with fixed parameters the start is exact. Any other prior (on a constrained
    space, or with parents that are themselves latent) is matched in mean and standard deviation on
    the unconstrained scale, from draws; a warning names those sites, and so does ``moment_matched``.

    Parameters are ``{prefix}_loc`` and ``{prefix}_scale``, as in NumPyro's ``AutoDiagonalNormal``, and
    every method of that guide works.

    Args:
        model: NumPyro model, tempered or not: tempering leaves the prior alone.
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

    def __init__(self, model: Model, *, prefix: str = "auto") -> None:
        self.moment_matched: tuple[str, ...] = ()
        super().__init__(model, prefix=prefix)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        model: Model = self.model  # type: ignore[has-type]
        # The start depends on the prior alone, and must survive data that are missing or absurd.
        prior_only: Model = temper(model, alpha=0.0)
        self.model = prior_only
        try:
            super()._setup_prototype(*args, **kwargs)
            rng_key = numpyro.prng_key()
            with handlers.block():
                moments, matched = prior_moments(rng_key, self.model, args, kwargs)
        finally:
            self.model = model
        self._init_latent = self.pack({k: v.loc for k, v in moments.items()})
        # AutoDiagonalNormal fills its scale parameter with this value, here one a coordinate.
        self._init_scale = self.pack({k: v.scale for k, v in moments.items()})
        self.moment_matched = matched
        if matched:
            warnings.warn(
                f"the priors of {list(matched)} are not Normal on the unconstrained scale: the guide "
                f"starts at their mean and standard deviation, from {NUM_PRIOR_DRAWS} draws.",
                stacklevel=2,
            )

    def pack(self, values: dict[str, Array]) -> Array:
        """Unconstrained values by site as one flat array, in the guide's own order."""
        order = self._unpack_latent(jnp.zeros(self.latent_dim))
        flat = jnp.concatenate([jnp.ravel(values[name]) for name in order])
        return jax.lax.convert_element_type(flat, flat.dtype)  # never weakly typed

    @property
    def layout(self) -> Layout:
        """Names and shapes of the sites in the flat vector, in order."""
        sites = self._unpack_latent(jnp.zeros(self.latent_dim))
        return Layout(tuple((name, jnp.shape(value)) for name, value in sites.items()))

    @property
    def prior(self) -> MeanField:
        """The Gaussian that the guide starts at, on the flat unconstrained scale."""
        if self.prototype_trace is None:
            raise ValueError("the guide has not been set up: call it, or OnlineVI.init, first.")
        return MeanField(self._init_latent, self._init_scale)


def prior_moments(
    rng_key: Array, model: Model, args: tuple, kwargs: dict
) -> tuple[dict[str, MeanField], tuple[str, ...]]:
    """Mean and standard deviation of each latent's prior on the unconstrained scale.

    Args:
        rng_key: For priors that have to be drawn from.
        model: NumPyro model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Returns:
        Moments by site, and the names of those found from draws.
    """

    def draw(key: Array) -> dict[str, tuple[Array, MeanField]]:
        trace = handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs)
        return {name: _describe(site) for name, site in latent_sites(trace).items()}

    try:
        two = jax.vmap(draw)(jax.random.split(rng_key, 2))
    except NotImplementedError as error:
        raise ValueError(
            "a prior cannot be sampled (is it improper?): the online rules start at the prior."
        ) from error
    exact = {name for name, (_, own) in two.items() if _constant(own.loc) and _constant(own.scale)}
    moments = {name: jax.tree.map(lambda leaf: leaf[0], two[name][1]) for name in exact}
    matched = tuple(name for name in two if name not in exact)
    if matched:
        keys = jax.random.split(rng_key, NUM_PRIOR_DRAWS)
        draws = jax.jit(
            lambda keys: jax.lax.map(
                lambda key: {k: v[0] for k, v in draw(key).items() if k in matched},
                keys,
                batch_size=1000,
            )
        )(keys)
        for name in matched:
            moments[name] = MeanField(jnp.mean(draws[name], 0), jnp.std(draws[name], 0))
            scale = np.asarray(moments[name].scale)
            if not np.all(np.isfinite(scale)) or not np.all(scale > 0):
                raise ValueError(
                    f"the prior of {name!r} has no finite positive standard deviation on the "
                    f"unconstrained scale (got {scale}): the online rules start at the prior."
                )
    return moments, matched


def _describe(site: dict[str, Any]) -> tuple[Array, MeanField]:
    """A draw on the unconstrained scale, and the site's own Normal parameters (else NaN)."""
    fn, value = site["fn"], site["value"]
    base = base_distribution(fn)
    if base.support is constraints.real and not _has_variance(base):
        raise ValueError(
            f"the prior of {site['name']!r}, {type(base).__name__}, has no finite variance: the "
            "online rules start at a Gaussian. Give it a prior with two moments."
        )
    if isinstance(_unindexed(fn), dist.MaskedDistribution):
        raise ValueError(
            f"the prior of {site['name']!r} is masked, so it is no distribution to start a guide at."
        )
    unconstrained = biject_to(fn.support).inv(value)
    if isinstance(base, dist.Normal):
        # Normal(0, 1) has integer parameters and floating draws.
        own = MeanField(*(jnp.broadcast_to(p, value.shape).astype(value.dtype) for p in (base.loc, base.scale)))
    else:
        own = MeanField(jnp.full_like(unconstrained, jnp.nan), jnp.full_like(unconstrained, jnp.nan))
    return unconstrained, own


def _unindexed(fn: Any) -> Any:
    """The distribution under expansions and reinterpreted batches."""
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return fn


def _has_variance(fn: Any) -> bool:
    """False where the distribution says that its variance is not finite."""
    try:
        variance = fn.variance
    except NotImplementedError:
        return True
    return isinstance(variance, jax.core.Tracer) or bool(np.all(np.isfinite(variance)))


def _constant(pair: Array) -> bool:
    """Whether two draws agree, so that the parameter does not depend on other latents."""
    return bool(np.all(np.asarray(pair[0]) == np.asarray(pair[1])))
