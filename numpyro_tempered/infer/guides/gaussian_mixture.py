"""A guide that is a mixture of Gaussians on the unconstrained scale."""

import math

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import ndtr
from numpyro.distributions import constraints
from numpyro.infer import init_to_uniform
from numpyro.infer.autoguide import AutoContinuous

from numpyro_tempered.core import Array, ArrayLike, Model, Params, check_count
from numpyro_tempered.gaussian.families.gaussian_mixture import GaussianMixture

NO_DERIVATIVE = (
    "draws of AutoGaussianMixture have no derivative in its weights, which SVI needs: take fit_gaussian(..., "
    "AutoMultivariateNormal, num_components=...)."
)
# Halvings of the interval that holds a quantile.
_HALVINGS = 60


@jax.custom_jvp
def _without_derivative(value: Array, of: Array) -> Array:
    """``value``, whose derivative in what ``of`` depends on is NaN."""
    return value


@_without_derivative.defjvp
def _without_derivative_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    return primals[0], jnp.nan * jnp.broadcast_to(tangents[1], primals[0].shape)


class AutoGaussianMixture(AutoContinuous):
    r"""A mixture of Gaussians over all latents, unconstrained: the guide of ``fit_gaussian(num_components=K)``.

    Posteriors of several modes keep them all, skewed ones their form, where one Gaussian has neither. Its
    parameters are ``auto_logits`` ``(K,)``, ``auto_loc`` ``(K, d)`` and ``auto_scale_tril`` ``(K, d, d)``, or
    ``auto_scale`` ``(K, d)``. Its draws have no derivative in them, as which component a draw is of is no smooth
    function: :func:`~numpyro_tempered.fit_gaussian` fits it, ``SVI`` does not.

    Args:
        model: NumPyro model with continuous latents.
        num_components: K.
        diagonal: Whether components have independent coordinates.
        prefix: Of the names of its parameters.
        init_loc_fn: Where all components start.
        init_scale: Standard deviations at the start.

    Raises:
        ValueError: If ``num_components`` or ``init_scale`` is out of range.

    References:
        Lam22; PetitTalamon25.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
        ...     numpyro.sample("y", dist.Normal(theta**2, 1.0), obs=y)
        >>> fit = nt.fit_gaussian(jax.random.key(0), model, AutoNormal, jnp.array(9.0), num_components=2)
        >>> print(" ".join(f"{weight:.2f}" for weight in jnp.exp(fit.params["auto_logits"])))
        0.50 0.50
    """

    def __init__(
        self,
        model: Model,
        *,
        num_components: int = 2,
        diagonal: bool = False,
        prefix: str = "auto",
        init_loc_fn: object = init_to_uniform,
        init_scale: float = 0.1,
    ) -> None:
        self.num_components, self.diagonal = (
            check_count(num_components, "num_components", 1),
            diagonal,
        )
        if not init_scale > 0:
            raise ValueError(f"init_scale must be positive, got {init_scale}.")
        self._init_scale = init_scale
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)

    def _names(self) -> tuple[str, str, str]:
        scale = "scale" if self.diagonal else "scale_tril"
        return f"{self.prefix}_logits", f"{self.prefix}_loc", f"{self.prefix}_{scale}"

    def _get_posterior(self) -> dist.Distribution:
        k, d = self.num_components, self.latent_dim
        logits, loc, scale = self._names()
        ones = jnp.full((k, d), self._init_scale)
        start, constraint = ones, constraints.independent(constraints.positive, 2)
        if not self.diagonal:
            start = jax.vmap(jnp.diag)(ones)
            constraint = constraints.independent(constraints.lower_cholesky, 1)
        return self._mixture(
            numpyro.param(logits, jnp.full((k,), -math.log(k))),
            numpyro.param(loc, jnp.broadcast_to(self._init_latent, (k, d))),
            numpyro.param(scale, start, constraint=constraint),
        )

    def _mixture(self, logits: Array, loc: Array, scale: Array) -> dist.Distribution:
        parts = (
            dist.Normal(loc, scale).to_event(1)
            if self.diagonal
            else dist.MultivariateNormal(loc, scale_tril=scale)
        )
        return dist.MixtureSameFamily(dist.Categorical(logits=logits), parts)

    def _sample_latent(self, *args: object, **kwargs: object) -> Array:
        # Of the component alone, the derivative would leave the weights where they are, without a word.
        return _without_derivative(
            super()._sample_latent(*args, **kwargs), self._get_posterior().mean
        )

    def to_params(self, q: GaussianMixture) -> Params:
        """The parameters of a mixture whose roots are triangular, or deviations."""
        return dict(zip(self._names(), q, strict=True))

    def from_params(self, params: Params) -> GaussianMixture:
        """The mixture of parameters."""
        logits, loc, scale = (params[name] for name in self._names())
        return GaussianMixture(jax.nn.log_softmax(logits), loc, scale)

    def get_posterior(self, params: Params) -> dist.Distribution:
        """The distribution of the flat unconstrained latents."""
        return self._mixture(*(params[name] for name in self._names()))

    def median(self, params: Params) -> Params:
        """The median of each latent."""
        return {name: value[0] for name, value in self.quantiles(params, 0.5).items()}

    def quantiles(self, params: Params, quantiles: ArrayLike) -> Params:
        """Quantiles of each latent, with a leading axis of those asked for."""
        q, levels = (
            self.from_params(params),
            jnp.atleast_1d(jnp.asarray(quantiles, float))[:, None],
        )
        scale = q.root if self.diagonal else jnp.linalg.norm(q.root, axis=-1)
        weights = jnp.exp(q.logits)[:, None]
        reach = 40.0 * scale

        def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = ends
            middle = 0.5 * (low + high)
            below = (
                jnp.sum(weights * ndtr((middle[:, None, :] - q.loc) / scale), axis=1)
                < levels
            )
            return jnp.where(below, middle, low), jnp.where(below, high, middle)

        shape = (len(levels), self.latent_dim)
        ends = (
            jnp.broadcast_to(jnp.min(q.loc - reach, axis=0), shape),
            jnp.broadcast_to(jnp.max(q.loc + reach, axis=0), shape),
        )
        low, high = jax.lax.fori_loop(0, _HALVINGS, halve, ends)
        return self._unpack_and_constrain(0.5 * (low + high), params)
