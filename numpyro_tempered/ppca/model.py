"""A fitted probabilistic PCA: draws of its posterior, and its model in NumPyro with the z integrated out."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Columns,
    Guide,
    Model,
    Params,
    Shape,
    add_repr,
    check_count,
    check_names,
    double_precision,
    doubles,
    key_first,
    result,
    run_program,
    warn_if_unresolved,
)
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.tempered_fit import TemperedFit, without_data
from numpyro_tempered.ppca.base import Posterior, Prior, Rows, as_matrix, in_double
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
    off_mean = np.sum((fit.location - prior.mean) ** 2) + shared * np.sum(
        q.cov[:, -1, -1]
    )
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

    def sample(self, key: Array, sample_shape: Shape = ()) -> Array:
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
        objective: The bound on the log of the tempered evidence, with every constant, in float64.
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
    objective: float
    trace: np.ndarray
    num_iter: int
    converged: bool
    restart_elbos: np.ndarray
    num_observed: int
    column_names: tuple[str, ...] | None = None

    @property
    def is_symmetric(self) -> bool:
        """Whether other modes of the posterior are this one with its factors in other signs and orders."""
        return True

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
    def location(self) -> np.ndarray:
        """Posterior mean of m in units of the data, float64, shape ``(d,)``."""
        return self.origin + doubles(self.posterior.loc)[:, -1]

    @property
    def noise_variance(self) -> float:
        """1 / E[τ], in squared units of the data."""
        return 1.0 / float(self.posterior.noise_precision)

    @property
    def elbo(self) -> result.TemperedELBO:
        """The objective with KL(q(W, m, τ, λ), prior) and, as far as q(z) reaches, the likelihood without z."""
        value, kl = self.objective, divergence(self)
        return result.TemperedELBO(value, 0.0, (value + kl) / self.alpha, kl)

    @property
    def evidence(self) -> result.Evidence:
        """Sweeps, and the ELBO of every start."""
        ends = tuple(map(float, self.restart_elbos))
        return result.Evidence(num_iter=self.num_iter, restart_elbos=ends)

    @property
    def mean(self) -> Columns:
        """Posterior means of ``mean``, ``loadings`` and the precisions, exact for the fitted q."""
        return {name: mean for name, (mean, _) in self._moments().items()}

    @property
    def sd(self) -> Columns:
        """Posterior standard deviations of the same."""
        return {name: sd for name, (_, sd) in self._moments().items()}

    def _moments(self) -> dict[str, tuple]:
        q = in_double(self.posterior)
        variance = np.broadcast_to(
            np.diagonal(q.cov, axis1=1, axis2=2), np.shape(q.loc)
        )
        moments = {
            "noise_precision": _of_gamma(q.noise_precision, self.noise_shape),
            "loadings": (q.loc[:, :-1], np.sqrt(variance[:, :-1])),
            "mean": (self.location, np.sqrt(variance[:, -1])),
        }
        if self.ard_shape is not None:
            gammas = _of_gamma(q.loading_precision, self.ard_shape)
            moments["loading_precision"] = gammas
        return moments

    @property
    def _fit(self) -> TemperedFit:
        """The fit with its guide and its tempered model of NumPyro, without data."""
        model = temper(_model_of(self, missing=True), alpha=self.alpha)
        return without_data(self, model, numpyro_guide(self))

    def draw(self, rng_key: Array, num_samples: int) -> Params:
        """Draws by site, ``(num_samples, ...)`` each."""
        draws = sample_posterior(rng_key, self, num_samples)._asdict()
        if self.ard_shape is not None:
            q, gamma_key = posterior_of(self), jax.random.fold_in(rng_key, 1)
            shape = num_samples, self.num_factors
            gammas = jax.random.gamma(gamma_key, self.ard_shape, shape, q.loc.dtype)
            draws["loading_precision"] = gammas * q.loading_precision / self.ard_shape
        return draws

    def sample_posterior(self, rng_key: Array, sample_shape: Shape = ()) -> Params:
        """Draws by site, ``(*sample_shape, ...)`` each."""
        return self._fit.sample_posterior(rng_key, sample_shape)

    def log_prob(self, values: Params) -> Array:
        """Log-density of q at values of its sites."""
        return self._fit.log_prob(values)

    def predict(
        self, rng_key: Array, num_rows: int = 1, *, num_samples: int = 1000
    ) -> Params:
        """Draws of new rows, ``x`` of shape ``(num_samples, num_rows, d)``, each draw with its own parameters."""
        check_count(num_rows, "num_rows")
        draw_key, key = jax.random.split(rng_key)
        draws = sample_posterior(
            draw_key, self, check_count(num_samples, "num_samples")
        )

        def of_draws(keys: Array, draws: Draws) -> Array:
            return jax.vmap(lambda k, one: Row(one, num_rows, False).sample(k))(
                keys, draws
            )

        return {"x": run_program(of_draws, jax.random.split(key, num_samples), draws)}

    def on(self, *data: ArrayLike, rng_key: Array | None = None) -> TemperedFit:
        """The posterior at the data that it was fitted to, for every verb that takes a posterior.

        The z are integrated out of the likelihood of a row, and missing entries too.

        Args:
            *data: The data ``x``.
            rng_key: Of what is drawn from it afterwards.

        Raises:
            ValueError: If the data are missing, or not those of the fit by their number and means.
        """
        (x,) = result.take_data(self, data, "x")
        x, dtype = rows_of(self, x), posterior_of(self).loc.dtype
        means, num_observed = np.nanmean(x, axis=0), int(np.sum(~np.isnan(x)))
        spread = 1e-3 * np.nanstd(x, axis=0) + 1e-4 * np.abs(means)
        if num_observed != self.num_observed or np.any(
            np.abs(means - self.origin) > spread
        ):
            raise ValueError(
                f"x has {num_observed} entries and column means {means}, that of the fit {self.num_observed} and "
                f"{self.origin}: pass the x that it was fitted to."
            )
        warn_if_unresolved(x, self.origin, dtype)
        model = _model_of(self, missing=bool(np.isnan(x).any()))
        rows = jnp.asarray(x, dtype)
        return self._fit._replace(
            model=temper(model, alpha=self.alpha),
            args=(rows,),
            rng_key=rng_key,
            observed={"x": rows},
        )

    def summarise_data(self) -> result.DataSummary:
        """The number of observed entries and the means of the columns, for :func:`compare`."""
        return result.DataSummary(
            numbers={result.VALUES: self.num_observed, result.COLUMNS: self.origin}
        )

    def describe(self) -> result.Description:
        """The progress of the sweeps, and the names of dimensions."""
        progress = {"elbo_trace": self.trace, "elbo_by_restart": self.restart_elbos}
        attrs = {
            "algorithm": "cavi",
            "num_factors": self.num_factors,
            "num_iter": self.num_iter,
        }
        dims = {
            "loadings": ["feature", "factor"],
            "mean": ["feature"],
            "x": ["row", "feature"],
            "elbo_trace": ["iteration"],
            "elbo_by_restart": ["restart"],
        }
        if self.ard_shape is not None:
            dims["loading_precision"] = ["factor"]
        return result.Description(
            {"variational": progress}, attrs | result.fit_attrs(self), dims
        )


def _of_gamma(mean: ArrayLike, shape: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of a Gamma variable."""
    return doubles(mean), doubles(mean) / np.sqrt(shape)


def _model_of(fit: PPCAFit, *, missing: bool) -> Model:
    return numpyro_model(fit.prior, fit.num_factors, fit.ard_shape is not None, missing)


def numpyro_guide(fit: PPCAFit) -> Guide:
    """The factors of a fit as a guide of :func:`numpyro_model`: loadings given the means of their columns."""
    q, num_factors = posterior_of(fit), fit.num_factors
    cov = jnp.broadcast_to(q.cov, (q.loc.shape[0], *q.cov.shape[1:]))
    variance, cross = cov[:, -1, -1], cov[:, :-1, -1]

    def guide(x: Array | None = None) -> None:
        shape = jnp.asarray(fit.noise_shape, q.loc.dtype)
        numpyro.sample("noise_precision", dist.Gamma(shape, shape / q.noise_precision))
        if fit.ard_shape is not None:
            gammas = dist.Gamma(fit.ard_shape, fit.ard_shape / q.loading_precision)
            numpyro.sample("loading_precision", gammas.to_event(1))
        loc = jnp.asarray(fit.location, q.loc.dtype)
        location = dist.Normal(loc, jnp.sqrt(variance)).to_event(1)
        off = numpyro.sample("mean", location) - loc
        slopes = cross / variance[:, None]
        loc = q.loc[:, :-1] + slopes * off[:, None]
        if num_factors == 0:
            loadings: dist.Distribution = dist.Normal(loc, 1.0).to_event(2)
        else:
            rest = cov[:, :-1, :-1] - slopes[:, :, None] * cross[:, None, :]
            loadings = dist.MultivariateNormal(loc, rest).to_event(1)
        numpyro.sample("loadings", loadings)

    return guide


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
    check_names(fit, x)
    return as_matrix(x, len(fit.origin))
