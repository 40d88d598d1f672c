"""The model of probabilistic PCA with the z integrated out: draws of its posterior, and in NumPyro."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_tempered.core.precision import double_precision
from numpyro_tempered.core.typing import Array, Model
from numpyro_tempered.ppca.base import Posterior, Prior, Rows, in_double, in_full_precision
from numpyro_tempered.ppca.bound import log_det, squared_loadings, with_one
from numpyro_tempered.ppca.updates import update_scores


class Draws(NamedTuple):
    """Draws of the parameters.

    Attributes:
        mean: m in units of the data, shape ``(num_samples, d)``.
        loadings: W, shape ``(num_samples, d, K)``.
        noise_precision: τ, shape ``(num_samples,)``.
    """

    mean: Array
    loadings: Array
    noise_precision: Array


@partial(jax.jit, static_argnames="num_samples")
@in_full_precision
def draw(rng_key: Array, q: Posterior, noise_shape: float, num_samples: int) -> Draws:
    """Draws with means relative to the origin."""
    loc_key, noise_key = jax.random.split(rng_key)
    normal = jax.random.normal(loc_key, (num_samples, *q.loc.shape), q.loc.dtype)
    factor = jnp.broadcast_to(jnp.linalg.cholesky(q.cov), (q.loc.shape[0], *q.cov.shape[1:]))
    weights = q.loc + jnp.einsum("jkl,sjl->sjk", factor, normal)
    shape = jnp.asarray(noise_shape, q.loc.dtype)
    tau = jax.random.gamma(noise_key, shape, (num_samples,), q.loc.dtype) * q.noise_precision / shape
    return Draws(weights[..., -1], weights[..., :-1], tau)


def exact_log_density(draw: Draws, rows: Rows) -> Array:
    r"""The log of p(x_i) at one draw, by Bayes' rule at the posterior mean of z."""
    d, k = draw.loadings.shape
    loc = jnp.concatenate([draw.loadings, draw.mean[:, None]], axis=1)
    cov = jnp.zeros((1 if rows.mask is None else d, k + 1, k + 1), loc.dtype)
    tau = draw.noise_precision
    z = update_scores(Posterior(loc, cov, tau, jnp.ones(k, loc.dtype)), rows)
    residual = rows.x - with_one(z).loc @ loc.T
    counts = jnp.full(rows.x.shape[0], float(d), loc.dtype)
    if rows.mask is not None:
        residual, counts = residual * rows.mask, jnp.sum(rows.mask, axis=1)
    value = 0.5 * counts * jnp.log(tau / (2.0 * jnp.pi)) - 0.5 * tau * jnp.sum(residual**2, axis=1)
    if k == 0:
        return value
    return value - 0.5 * jnp.sum(z.loc**2, axis=1) + 0.5 * jnp.linalg.slogdet(z.cov)[1]


def divergence(
    q: Posterior, origin: np.ndarray, prior: Prior, noise_shape: float, ard_shape: float | None
) -> float:
    """KL(q(W, m, τ, λ), prior) in double precision; the z, which are local, have none of it."""
    q = in_double(q)
    d, k = q.loc.shape[0], q.loc.shape[1] - 1
    shared = d // q.cov.shape[0]
    off_mean = np.sum((origin + q.loc[:, -1] - prior.mean) ** 2) + shared * np.sum(q.cov[:, -1, -1])
    gaussian = d * np.log(prior.mean_scale) + 0.5 * off_mean / prior.mean_scale**2 - 0.5 * d * (k + 1)
    gaussian += 0.5 * np.sum(q.loading_precision * squared_loadings(q, np)) - 0.5 * shared * log_det(q.cov, np)
    with double_precision():
        noise = dist.Gamma(noise_shape, noise_shape / q.noise_precision)
        gammas = dist.kl_divergence(noise, dist.Gamma(prior.noise_shape, prior.noise_rate))
        log_precision = jnp.log(q.loading_precision)
        if ard_shape is not None:
            loading = dist.Gamma(ard_shape, ard_shape / q.loading_precision)
            gammas += jnp.sum(dist.kl_divergence(loading, dist.Gamma(prior.ard_shape, prior.ard_rate)))
            log_precision += jax.scipy.special.digamma(ard_shape) - jnp.log(ard_shape)
        return float(gaussian + gammas - 0.5 * d * jnp.sum(log_precision))


class Row(dist.Distribution):
    """A row m + W z + noise, with z integrated out.

    Args:
        draw: The parameters.
        num_rows: Batch shape ``(num_rows,)``.
        missing: Whether values may be NaN: these are integrated out too. Draws are complete.
    """

    support = constraints.real_vector

    def __init__(self, draw: Draws, num_rows: int, missing: bool) -> None:
        self.draw, self.missing = draw, missing
        # NaN is outside of every support.
        super().__init__((num_rows,), jnp.shape(draw.mean), validate_args=False)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Complete rows."""
        z_key, noise_key = jax.random.split(key)
        shape, loadings = (*sample_shape, *self.batch_shape), self.draw.loadings
        z = jax.random.normal(z_key, (*shape, loadings.shape[1]), loadings.dtype)
        noise = jax.random.normal(noise_key, (*shape, *self.event_shape), loadings.dtype)
        return self.draw.mean + z @ loadings.T + noise / jnp.sqrt(self.draw.noise_precision)

    @in_full_precision
    def log_prob(self, value: Array) -> Array:
        """The log density of the observed entries of each row."""
        if not self.missing:
            return exact_log_density(self.draw, Rows(value, None))
        observed = ~jnp.isnan(value)
        rows = Rows(jnp.where(observed, value, 0.0), observed.astype(value.dtype))
        return exact_log_density(self.draw, rows)


def numpyro_model(prior: Prior, num_factors: int, ard: bool, missing: bool) -> Model:
    """Probabilistic PCA as a NumPyro model ``model(x)``, untempered, with the z integrated out.

    Args:
        prior: Its prior.
        num_factors: K.
        ard: Whether the columns of W have precisions λ to be learnt.
        missing: Whether x may have NaN.
    """

    def model(x: Array) -> None:
        n, d = x.shape
        tau = numpyro.sample("noise_precision", dist.Gamma(prior.noise_shape, prior.noise_rate))
        precision = jnp.full(num_factors, prior.loading_precision)
        if ard:
            gamma = dist.Gamma(prior.ard_shape, prior.ard_rate)
            precision = numpyro.sample("loading_precision", gamma.expand([num_factors]).to_event(1))
        loading = dist.Normal(0.0, precision**-0.5).expand([d, num_factors])
        loadings = numpyro.sample("loadings", loading.to_event(2))
        mean = numpyro.sample("mean", dist.Normal(prior.mean, prior.mean_scale).expand([d]).to_event(1))
        with numpyro.plate("rows", n):
            numpyro.sample("x", Row(Draws(mean, loadings, tau), n, missing), obs=x)

    return model
