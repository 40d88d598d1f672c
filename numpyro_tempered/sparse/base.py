"""The sparse regressions: their priors, factors and results, and their model in NumPyro."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Guide,
    Numbers,
    Params,
    Shape,
    add_repr,
    as_array,
    automatic_mesh,
    check_names,
    check_number,
    result,
    to_host,
)
from numpyro_tempered.gaussian.families import MeanField, SpikeSlab, spike_slab
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.distributions import SpikeAndSlab
from numpyro_tempered.infer.guides.spike_slab import AutoSpikeAndSlab
from numpyro_tempered.infer.set_up import first_call
from numpyro_tempered.infer.tempered_fit import TemperedFit, without_data
from numpyro_tempered.sparse.arguments import Prior, real_array


class NoisePosterior(NamedTuple):
    """The Gamma posterior of the precision 1/v of the noise.

    Attributes:
        shape: Its shape.
        rate: Its rate, in squared units of y.
    """

    shape: Array
    rate: Array


class Factors(NamedTuple):
    """The variational posterior of a regression: of coefficients, intercept and the noise, where it has them."""

    coefficients: SpikeSlab
    intercept: MeanField | None
    noise: NoisePosterior | None


class Draws(NamedTuple):
    """Draws of a posterior.

    Attributes:
        coefficients: Shape ``(S, d)``; exactly 0 where a draw leaves a variable out.
        intercept: Intercepts at x = 0, ``(S,)``; 0 where the model has none.
    """

    coefficients: Array
    intercept: Array


@add_repr
class RegressionFit(NamedTuple):
    """A sparse regression, by :func:`fit_linear` or :func:`fit_logistic`.

    Attributes:
        posterior: Spike and slab of each coefficient: ``probs`` are the inclusion probabilities, ``mean`` the
            posterior means.
        intercept: Gaussian of the intercept at ``centre``; None without one.
        centre: Means of the columns, shape ``(d,)``; 0 without an intercept.
        noise_scale: Standard deviation of the noise in units of y: as given, as estimated, or 1 / sqrt(E[1/v]);
            None of a logistic regression.
        noise_posterior: Gamma of 1/v under a ``noise_prior``; else None.
        objective: What the ascent maximises, every constant in it: the tempered ELBO of a linear regression, the
            quadratic bound below it of a logistic one.
        trace: Objective after each sweep of the best start, shape ``(num_iter,)``; under ``jit`` or ``vmap`` as
            long as the sweeps allowed, NaN after the last.
        converged: Whether the best start met the tolerance.
        num_iter: Its sweeps.
        restart_objectives: Objective of every start, shape ``(num_restarts,)``.
        order: The best start's order of the coefficients, shape ``(d,)``.
        prior: The prior of the coefficients.
        alpha: Power on the likelihood.
        target_moments: Number, mean and root mean square of y, shape ``(3,)``.
        column_names: Names of the columns, where x was a table whose names are all strings; else None.
    """

    posterior: SpikeSlab
    intercept: MeanField | None
    centre: Numbers
    noise_scale: Array | None
    noise_posterior: NoisePosterior | None
    objective: Array
    trace: Array
    converged: Array
    num_iter: Array
    restart_objectives: Array
    order: Array
    prior: Prior
    alpha: ArrayLike
    target_moments: Array
    column_names: tuple[str, ...] | None = None

    @property
    def inclusion_probs(self) -> Array:
        """Approximate posterior probabilities that a coefficient is not 0, shape ``(d,)``."""
        return self.posterior.probs

    @property
    def elbo(self) -> result.TemperedELBO:
        """The objective with its two parts.

        Raises:
            ValueError: If the fit is a batch, by ``vmap``.
        """
        return elbo_of(self.objective, self.alpha, self.factors(), self.prior)

    @property
    def evidence(self) -> result.Evidence:
        """Sweeps, and the objective of every start."""
        ends = tuple(np.asarray(self.restart_objectives, float).tolist())
        return result.Evidence(num_iter=int(self.num_iter), restart_elbos=ends)

    @property
    def mean(self) -> Params:
        """Posterior means of ``coef``, and of ``intercept`` and ``noise_precision`` where there are these."""
        return {name: mean for name, (mean, _) in self.moments().items()}

    @property
    def sd(self) -> Params:
        """Posterior standard deviations of the same."""
        return {name: sd for name, (_, sd) in self.moments().items()}

    def moments(self) -> dict[str, tuple[Array, Array]]:
        """Means and standard deviations of the sites."""
        q = self.posterior
        moments = {"coef": (q.mean, jnp.sqrt(q.variance))}
        if self.intercept is not None:
            moments["intercept"] = (self.intercept.loc, self.intercept.scale)
        if self.noise_posterior is not None:
            shape, rate = self.noise_posterior
            moments["noise_precision"] = (shape / rate, jnp.sqrt(shape) / rate)
        return moments

    def factors(self) -> Factors:
        """The factors of q."""
        return Factors(self.posterior, self.intercept, self.noise_posterior)

    @property
    def _fit(self) -> TemperedFit:
        """The regression with its guide and its tempered model, of rows less ``centre``, without data."""
        # Columns far from 0 keep their digits.
        return without_data(self, tempered_model(self), guide_of(self))

    def draw(self, rng_key: Array, num_samples: int) -> Params:
        """Draws by site, ``(num_samples, ...)`` each."""
        return draw_factors(rng_key, self.factors(), num_samples)

    def sample_posterior(self, rng_key: Array, sample_shape: Shape = ()) -> Params:
        """Draws by site, ``(*sample_shape, ...)`` each; the intercept is that at ``centre``."""
        return self._fit.sample_posterior(rng_key, sample_shape)

    def log_prob(self, values: Params) -> Array:
        """Log-density of q at values of its sites; of a coefficient of 0 the log of its probability."""
        return self._fit.log_prob(values)

    def predict(
        self, rng_key: Array, x: ArrayLike, *, num_samples: int = 1000
    ) -> Params:
        """Draws at new rows: ``y``, ``(num_samples, n)``, and its predictor ``eta``.

        Args:
            rng_key: Key of the draws.
            x: Rows, shape ``(n, d)``, in the units of the rows of the fit.
            num_samples: Draws.
        """
        return self._fit.predict(rng_key, x, num_samples=num_samples)

    def model_arguments(self, x: ArrayLike, y: ArrayLike | None = None) -> tuple:
        """Arguments of the model, which takes rows less ``centre``, of rows as the fit took them."""
        return centred_rows(self, x), y

    def on(self, *data: ArrayLike, rng_key: Array | None = None) -> TemperedFit:
        """The posterior at the data that it was fitted to, for every verb that takes a posterior.

        The model has the sites ``coef``, with its :class:`~numpyro_tempered.sparse.SpikeAndSlab` prior,
        ``intercept`` where there is one, ``noise_precision`` where the noise has a prior, ``eta`` and ``y``, and
        takes rows less ``centre``.

        Args:
            *data: The rows ``x`` and the target ``y``.
            rng_key: Of what is drawn from it afterwards.

        Raises:
            ValueError: If one is missing, or the target is not that of the fit.
        """
        x, target = result.take_data(self, data, "x", "y")
        y = automatic_mesh(as_array(target, "y"))
        expected = np.asarray(self.target_moments)
        moments = np.asarray(target_moments(y))
        if not np.allclose(moments, expected, rtol=1e-4, atol=1e-4 * expected[2]):
            raise ValueError(
                f"y has number, mean and root mean square {moments}, that of the fit {expected}: give the x "
                "and y that it was fitted to."
            )
        rows = centred_rows(self, automatic_mesh(as_array(x, "x")))
        off = np.abs(to_host(jnp.mean(rows, axis=0)))
        if len(rows) != y.size or (
            self.intercept is not None
            and np.any(off > 1e-3 * to_host(jnp.std(rows, axis=0)))
        ):
            raise ValueError(
                f"x has {len(rows)} rows, and means {off} off those of the fit, y has {y.size}: give the "
                "x and y that it was fitted to."
            )
        y = jnp.asarray(y, rows.dtype)
        fit, args = self._fit, (rows, y)
        if self.noise_posterior is None:
            # The guide of SVI's fits, which round_and_refit takes.
            guide, key = AutoSpikeAndSlab(fit.model), jax.random.key(0)
            first_call(lambda: handlers.seed(guide, key)(*args), guide)
            fit = fit._replace(guide=guide.hard(), params=params_of(self))
        return fit._replace(args=args, rng_key=rng_key, observed={"y": y})

    def summarise_data(self) -> result.DataSummary:
        """Number, mean and root mean square of the target, for :func:`compare`."""
        moments = self.target_moments
        return result.DataSummary(
            numbers={result.VALUES: moments[0], result.MOMENTS: moments[1:]}
        )

    def describe(self) -> result.Description:
        """The progress of the ascent, and the names of dimensions."""
        word = "elbo" if self.noise_scale is not None else "objective"
        progress = {
            f"{word}_trace": (self.trace, "iteration"),
            f"{word}_by_restart": (self.restart_objectives, "restart"),
            "inclusion_probs": (self.posterior.probs, "feature"),
        }
        regression = "logistic" if self.noise_scale is None else "linear"
        attrs = {
            "algorithm": "cavi",
            "regression": regression,
            "num_iter": len(self.trace),
        }
        dims = {"coef": ["feature"], "y": ["row"]}
        return result.Description(
            {"variational": {name: value for name, (value, _) in progress.items()}},
            attrs | result.fit_attrs(self),
            dims | {name: [dim] for name, (_, dim) in progress.items()},
        )


def selected(fit: RegressionFit, threshold: float = 0.5) -> np.ndarray:
    """Columns whose inclusion probability is above a threshold, the most probable first.

    Args:
        fit: The fit.
        threshold: From 0 to 1; 1/2 gives the median probability model.

    Returns:
        Their columns, integers.

    Raises:
        ValueError: If the threshold is outside of [0, 1].

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.cos(np.outer(np.arange(40), [0.7, 1.1, 1.9]))
        >>> fit = nt.sparse.fit_linear(
        ...     jax.random.key(0), x, 2.0 * x[:, 1], inclusion_prob=0.3, slab_scale=1.0, noise_scale=0.5
        ... )
        >>> nt.sparse.selected(fit)
        array([1])
    """
    check_number(threshold, "threshold", "[0, 1]")
    probs = np.asarray(fit.posterior.probs)
    order = np.argsort(-probs, kind="stable")
    return order[probs[order] > threshold]


def draw_factors(rng_key: Array, factors: Factors, num_samples: int) -> Params:
    """Draws by site: ``coef``, and ``intercept`` and ``noise_precision`` where the model has them."""
    q = factors.coefficients
    gate_key, slab_key, intercept_key = jax.random.split(rng_key, 3)
    shape = (num_samples, *q.loc.shape)
    draws = {"coef": spike_slab.draw(q, gate_key, slab_key, shape)}
    if factors.intercept is not None:
        loc, scale = factors.intercept
        draws["intercept"] = loc + scale * jax.random.normal(
            intercept_key, (num_samples,), q.loc.dtype
        )
    if factors.noise is not None:
        noise_key = jax.random.fold_in(rng_key, 1)
        draws["noise_precision"] = dist.Gamma(*factors.noise).sample(
            noise_key, (num_samples,)
        )
    return draws


def elbo_of(
    objective: ArrayLike, alpha: ArrayLike, factors: Factors, prior: Prior
) -> result.TemperedELBO:
    """The ELBO or the bound on it, with its two parts.

    Raises:
        ValueError: If the fit is a batch, by ``vmap``.
    """
    if np.ndim(objective):
        one = "jax.tree.map(lambda leaf: leaf[0], fits)"
        raise ValueError(
            f"this is a batch of fits, by vmap: take one of them, such as {one}."
        )
    divergence = jnp.sum(spike_slab.kl(factors.coefficients, SpikeSlab(*_slab(prior))))
    if factors.intercept is not None:
        intercept_prior = dist.Normal(0.0, prior.intercept_scale)
        divergence += dist.kl_divergence(
            dist.Normal(*factors.intercept), intercept_prior
        )
    if factors.noise is not None and prior.noise is not None:
        divergence += dist.kl_divergence(
            dist.Gamma(*factors.noise), dist.Gamma(*prior.noise)
        )
    value, power = float(np.asarray(objective)), float(np.asarray(alpha))
    return result.TemperedELBO(
        value, 0.0, (value + float(divergence)) / power, float(divergence)
    )


def target_moments(y: ArrayLike) -> Array:
    """Number, mean and root mean square of a target, ``(3,)``."""
    values = jnp.asarray(y, jnp.result_type(float))
    return jnp.array(
        [values.size, jnp.mean(values), jnp.sqrt(jnp.mean(jnp.square(values)))]
    )


def centred_rows(fit: RegressionFit, x: ArrayLike) -> Array:
    """Rows less the centre, in the precision of the fit.

    Raises:
        ValueError: If their shape or the names of their columns are not those of rows of the fit.
    """
    check_names(fit, x)
    values = real_array(x, "x")
    d = fit.centre.shape[0]
    if values.ndim != 2 or values.shape[1] != d:
        raise ValueError(
            f"x must have shape (n, {d}), as the rows of the fit, got {values.shape}."
        )
    return jnp.asarray(values - fit.centre, fit.posterior.loc.dtype)


def tempered_model(fit: RegressionFit) -> temper:
    """A fitted regression as a tempered NumPyro model ``model(x, y=None)`` of rows less the fit's ``centre``.

    The noise of a linear regression is that of the fit, unless it has a prior.
    """
    prior, scale = fit.prior, fit.noise_scale
    slab = SpikeAndSlab(*_slab(prior))

    def model(x: Array, y: Array | None = None) -> None:
        eta = x @ numpyro.sample("coef", slab.expand([x.shape[1]]).to_event(1))
        if prior.intercept_scale is not None:
            eta = eta + numpyro.sample(
                "intercept", dist.Normal(0.0, prior.intercept_scale)
            )
        eta = numpyro.deterministic("eta", eta)
        noise_scale = scale
        if prior.noise is not None:
            noise_scale = (
                numpyro.sample("noise_precision", dist.Gamma(*prior.noise)) ** -0.5
            )
        with numpyro.plate("n", x.shape[0]):
            outcome = (
                dist.Bernoulli(logits=eta)
                if noise_scale is None
                else dist.Normal(eta, noise_scale)
            )
            numpyro.sample("y", outcome, obs=y)

    return temper(model, alpha=float(np.asarray(fit.alpha)))


def params_of(fit: RegressionFit) -> Params:
    """The factors of a fit without noise as parameters of an ``AutoSpikeAndSlab``."""
    parts = fit.posterior._asdict().items()
    params = {f"coef_auto_{field}": value for field, value in parts}
    if fit.intercept is not None:
        parts = fit.intercept._asdict().items()
        params |= {f"intercept_auto_{field}": value for field, value in parts}
    return params


def guide_of(fit: RegressionFit) -> Guide:
    """The factors of a fit as a guide of :func:`tempered_model`."""
    coefficients, intercept, noise = fit.factors()

    def guide(*_: object) -> None:
        numpyro.sample("coef", SpikeAndSlab(*coefficients).to_event(1))
        if intercept is not None:
            numpyro.sample("intercept", dist.Normal(*intercept))
        if noise is not None:
            numpyro.sample("noise_precision", dist.Gamma(*noise))

    return guide


def _slab(prior: Prior) -> tuple[Array, ...]:
    return tuple(map(jnp.asarray, (prior.inclusion_prob, 0.0, prior.slab_scale)))
