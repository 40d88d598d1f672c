"""A fitted probabilistic PCA: draws of its posterior, and its model in NumPyro with the z integrated out."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_tempered.core import result
from numpyro_tempered.core.checks import check_count, key_first
from numpyro_tempered.core.display import add_repr
from numpyro_tempered.core.precision import double_precision
from numpyro_tempered.core.rows import warn_if_unresolved
from numpyro_tempered.core.typing import Array, ArrayLike, Model
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.ppca.base import (
    Posterior,
    Prior,
    Rows,
    as_matrix,
    in_double,
    names_of,
)
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
@jax.default_matmul_precision("highest")
def draw(rng_key: Array, q: Posterior, noise_shape: float, num_samples: int) -> Draws:
    """Draws with means relative to the origin."""
    loc_key, noise_key = jax.random.split(rng_key)
    normal = jax.random.normal(loc_key, (num_samples, *q.loc.shape), q.loc.dtype)
    factor = jnp.broadcast_to(
        jnp.linalg.cholesky(q.cov), (q.loc.shape[0], *q.cov.shape[1:])
    )
    weights = q.loc + jnp.einsum("jkl,sjl->sjk", factor, normal)
    shape = jnp.asarray(noise_shape, q.loc.dtype)
    tau = (
        jax.random.gamma(noise_key, shape, (num_samples,), q.loc.dtype)
        * q.noise_precision
        / shape
    )
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
    value = 0.5 * counts * jnp.log(tau / (2.0 * jnp.pi)) - 0.5 * tau * jnp.sum(
        residual**2, axis=1
    )
    if k == 0:
        return value
    return value - 0.5 * jnp.sum(z.loc**2, axis=1) + 0.5 * jnp.linalg.slogdet(z.cov)[1]


def divergence(fit: "PPCAFit") -> float:
    """KL(q(W, m, τ, λ), prior) in double precision; the z, which are local, have none of it."""
    q, prior, noise_shape, ard_shape = (
        in_double(fit.posterior),
        fit.prior,
        fit.noise_shape,
        fit.ard_shape,
    )
    d, k = q.loc.shape[0], q.loc.shape[1] - 1
    shared = d // q.cov.shape[0]
    off_mean = np.sum((fit.mean - prior.mean) ** 2) + shared * np.sum(q.cov[:, -1, -1])
    gaussian = (
        d * np.log(prior.mean_scale)
        + 0.5 * off_mean / prior.mean_scale**2
        - 0.5 * d * (k + 1)
    )
    gaussian += 0.5 * np.sum(
        q.loading_precision * squared_loadings(q, np)
    ) - 0.5 * shared * log_det(q.cov, np)
    with double_precision():
        noise = dist.Gamma(noise_shape, noise_shape / q.noise_precision)
        gammas = dist.kl_divergence(
            noise, dist.Gamma(prior.noise_shape, prior.noise_rate)
        )
        log_precision = jnp.log(q.loading_precision)
        if ard_shape is not None:
            loading = dist.Gamma(ard_shape, ard_shape / q.loading_precision)
            gammas += jnp.sum(
                dist.kl_divergence(loading, dist.Gamma(prior.ard_shape, prior.ard_rate))
            )
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
        noise = jax.random.normal(
            noise_key, (*shape, *self.event_shape), loadings.dtype
        )
        return (
            self.draw.mean
            + z @ loadings.T
            + noise / jnp.sqrt(self.draw.noise_precision)
        )

    def log_prob(self, value: Array) -> Array:
        """The log density of the observed entries of each row."""
        rows = Rows(value, None)
        if self.missing:
            observed = ~jnp.isnan(value)
            rows = Rows(jnp.where(observed, value, 0.0), observed.astype(value.dtype))
        with jax.default_matmul_precision("highest"):
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
        tau = numpyro.sample(
            "noise_precision", dist.Gamma(prior.noise_shape, prior.noise_rate)
        )
        precision = jnp.full(num_factors, prior.loading_precision)
        if ard:
            gamma = dist.Gamma(prior.ard_shape, prior.ard_rate)
            precision = numpyro.sample(
                "loading_precision", gamma.expand([num_factors]).to_event(1)
            )
        loading = dist.Normal(0.0, precision**-0.5).expand([d, num_factors])
        loadings = numpyro.sample("loadings", loading.to_event(2))
        mean = numpyro.sample(
            "mean", dist.Normal(prior.mean, prior.mean_scale).expand([d]).to_event(1)
        )
        with numpyro.plate("rows", n):
            numpyro.sample("x", Row(Draws(mean, loadings, tau), n, missing), obs=x)

    return model


@add_repr
class PPCAFit(NamedTuple):
    """A fitted model, by :func:`fit`.

    Attributes:
        posterior: The variational posterior; its loadings are in the order of E|W_k|², and their second moments
            E[W'W] are diagonal.
        origin: What ``posterior.loc[:, -1]`` is relative to: the means of the columns, float64, shape ``(d,)``.
        noise_shape: Shape of the Gamma posterior of τ.
        ard_shape: Shape of those of λ_k; None without ARD.
        prior: The prior.
        alpha: Power on the likelihood.
        elbo: The bound on the log of the tempered evidence, with every constant, in float64.
        trace: ELBO after each sweep, float64, shape ``(num_iter,)``.
        num_iter: Sweeps of the best start.
        converged: Whether the best start met the tolerance.
        restart_elbos: ELBO of every start in the precision of the fit, shape ``(num_restarts,)``.
        num_observed: Number of observed entries.
        column_names: Names of the columns, where x was a table whose names are all strings; else None.
    """

    posterior: Posterior
    origin: np.ndarray
    noise_shape: float
    ard_shape: float | None
    prior: Prior
    alpha: float
    elbo: float
    trace: np.ndarray
    num_iter: int
    converged: bool
    restart_elbos: np.ndarray
    num_observed: int
    column_names: tuple[str, ...] | None = None

    @property
    def num_factors(self) -> int:
        """K."""
        return self.posterior.loc.shape[1] - 1

    @property
    def num_occupied(self) -> int:
        """Columns of W that ARD has left: those with :math:`|E W_k|^2` above half of :math:`E|W_k|^2`."""
        q = in_double(self.posterior)
        return int(
            np.sum(np.sum(q.loc[:, :-1] ** 2, axis=0) > 0.5 * squared_loadings(q, np))
        )

    @property
    def loadings(self) -> np.ndarray:
        """Posterior mean of W, shape ``(d, K)``."""
        return np.asarray(self.posterior.loc)[:, :-1]

    @property
    def mean(self) -> np.ndarray:
        """Posterior mean of m in units of the data, float64, shape ``(d,)``."""
        return self.origin + np.asarray(self.posterior.loc, np.float64)[:, -1]

    @property
    def noise_variance(self) -> float:
        """1 / E[τ], in squared units of the data."""
        return 1.0 / float(self.posterior.noise_precision)

    def as_elbo(self) -> result.TemperedELBO:
        """The ELBO with KL(q(W, m, τ, λ), prior) and, as far as q(z) reaches, the likelihood without z."""
        kl = divergence(self)
        return result.TemperedELBO(self.elbo, 0.0, (self.elbo + kl) / self.alpha, kl)

    def summarise_data(self) -> result.DataSummary:
        """The number of observed entries and the means of the columns, for :func:`compare`."""
        return result.DataSummary(
            numbers={result.VALUES: self.num_observed, result.COLUMNS: self.origin}
        )

    def as_run(
        self, *data: ArrayLike, num_samples: int = 1000, rng_key: Array | None = None
    ) -> result.Run:
        """Draws with probabilistic PCA as a NumPyro model, for :func:`to_inference_data`.

        The z are integrated out of the likelihood of a row, and missing entries too.

        Raises:
            ValueError: If x or the key are missing.
        """
        key = result.check_run_arguments(self, data, rng_key, "x")
        x, q = rows_of(self, data[0]), posterior_of(self)
        warn_if_unresolved(x, self.origin, q.loc.dtype)
        model = numpyro_model(
            self.prior,
            self.num_factors,
            self.ard_shape is not None,
            bool(np.isnan(x).any()),
        )
        samples = sample_posterior(key, self, num_samples)._asdict()
        dims = {
            "loadings": ["feature", "factor"],
            "mean": ["feature"],
            "x": ["row", "feature"],
        }
        if self.ard_shape is not None:
            shape, gamma_key = (
                (num_samples, self.num_factors),
                jax.random.fold_in(key, 1),
            )
            gammas = jax.random.gamma(gamma_key, self.ard_shape, shape, q.loc.dtype)
            samples["loading_precision"] = gammas * q.loading_precision / self.ard_shape
            dims["loading_precision"] = ["factor"]
        attrs = {
            "algorithm": "cavi",
            "num_factors": self.num_factors,
            "num_iter": self.num_iter,
        }
        return result.Run(
            model=temper(model, alpha=self.alpha),
            samples={name: value[None] for name, value in samples.items()},
            args=(jnp.asarray(x, q.loc.dtype),),
            rng_key=key,
            groups={
                "variational": {
                    "elbo_trace": self.trace,
                    "elbo_by_restart": self.restart_elbos,
                }
            },
            attrs=attrs | result.fit_attrs(self),
            dims=dims | {"elbo_trace": ["iteration"], "elbo_by_restart": ["restart"]},
        )


@key_first
def sample_posterior(rng_key: Array, fit: PPCAFit, num_samples: int = 1000) -> Draws:
    """Draws of mean, loadings and noise from the variational posterior.

    Args:
        rng_key: Key of the draws.
        fit: A fitted model.
        num_samples: Number of draws.

    Returns:
        :class:`Draws`.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-2.0, 2.0, 20)[:, None] * np.ones(3) + 0.1 * np.sin(np.arange(60.0)).reshape(20, 3)
        >>> fit = nt.ppca.fit(jax.random.key(0), x, num_factors=1)
        >>> nt.ppca.sample_posterior(jax.random.key(1), fit, 4).loadings.shape
        (4, 3, 1)
    """
    check_count(num_samples, "num_samples", 0)
    draws = draw(rng_key, posterior_of(fit), fit.noise_shape, num_samples)
    return draws._replace(mean=draws.mean + jnp.asarray(fit.origin, draws.mean.dtype))


def posterior_of(fit: PPCAFit) -> Posterior:
    """The posterior in a precision that JAX has now: a fit may be of a session with 64 bits."""
    check_fit(fit)
    dtype = jax.dtypes.canonicalize_dtype(fit.posterior.loc.dtype)
    return jax.tree.map(lambda part: jnp.asarray(part, dtype), fit.posterior)


def check_fit(fit: object, name: str = "fit") -> None:
    """Refuse what is no fit.

    Raises:
        TypeError: If it is none, such as a selection, which has several.
    """
    if not isinstance(fit, PPCAFit):
        hint = ": take its .fit, or one of its .fits." if hasattr(fit, "fits") else "."
        raise TypeError(
            f"{name} must be a PPCAFit, by nt.ppca.fit, got {type(fit).__name__}{hint}"
        )


def rows_of(fit: PPCAFit, x: ArrayLike) -> np.ndarray:
    """Data for a fit, float64, NaN where missing.

    Raises:
        ValueError: If they have another number of columns, or names in another order than those of the fit.
    """
    check_fit(fit)
    values, names = as_matrix(x, len(fit.origin)), names_of(x)
    if names and fit.column_names and names != fit.column_names:
        raise ValueError(
            f"x has columns {list(names)}, the fit {list(fit.column_names)}, in this order."
        )
    return values
