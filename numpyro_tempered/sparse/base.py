"""The results of the sparse regressions."""

from typing import NamedTuple

import numpy as np

from numpyro_tempered.core.checks import check_number
from numpyro_tempered.core.result import DataSummary, Run, TemperedELBO, check_run_arguments, fit_attrs
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.gaussian.families import MeanField, SpikeSlab
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.sparse.model import (
    Factors,
    NoisePosterior,
    Prior,
    elbo_of,
    regression_model,
    regression_run,
    summarise_target,
)


class LinearFit(NamedTuple):
    """A sparse linear regression, by :func:`fit_linear`.

    Attributes:
        posterior: Spike and slab of each coefficient: ``probs`` are the inclusion probabilities, ``mean`` the
            posterior means.
        intercept: Gaussian of the intercept at ``centre``; None without one.
        centre: Means of the columns, shape ``(d,)``; 0 without an intercept.
        noise_scale: Standard deviation of the noise in units of y: as given, as estimated, or 1 / sqrt(E[1/v]).
        noise_posterior: Gamma of 1/v under a ``noise_prior``; else None.
        elbo: The tempered ELBO, every constant in it.
        trace: ELBO after each sweep of the best start, shape ``(num_sweeps,)``; under ``jit`` or ``vmap`` as long
            as the sweeps allowed, NaN after the last.
        converged: Whether the best start met the tolerance.
        num_sweeps: Its sweeps.
        restart_elbos: ELBO of every start, shape ``(num_restarts,)``.
        order: The best start's order of the coefficients, shape ``(d,)``.
        prior: The prior of the coefficients.
        alpha: Power on the likelihood.
        target_moments: Number, mean and root mean square of y, shape ``(3,)``.
    """

    posterior: SpikeSlab
    intercept: MeanField | None
    centre: Array
    noise_scale: Array
    noise_posterior: NoisePosterior | None
    elbo: Array
    trace: Array
    converged: Array
    num_sweeps: Array
    restart_elbos: Array
    order: Array
    prior: Prior
    alpha: ArrayLike
    target_moments: Array

    @property
    def inclusion_probs(self) -> Array:
        """Approximate posterior probabilities that a coefficient is not 0, shape ``(d,)``."""
        return self.posterior.probs

    def as_elbo(self) -> TemperedELBO:
        """The ELBO, for :func:`compare`."""
        return elbo_of(self.elbo, self.alpha, self.factors(), self.prior)

    def summarise_data(self) -> DataSummary:
        """Number, mean and root mean square of the target, for :func:`compare`."""
        return summarise_target(self.target_moments)

    def as_run(self, *data: ArrayLike, num_samples: int = 1000, rng_key: Array | None = None) -> Run:
        """Draws with the regression as a NumPyro model, for :func:`to_inference_data`.

        Raises:
            ValueError: If x, y or the key are missing.
        """
        key = check_run_arguments(self, data, rng_key, "x", "y")
        model = temper(
            regression_model(self.prior, self.centre, self.noise_scale), alpha=float(np.asarray(self.alpha))
        )
        attrs = {"algorithm": "cavi", "regression": "linear", **fit_attrs(self), "num_iter": len(self.trace)}
        progress = {"elbo_trace": self.trace, "elbo_by_restart": self.restart_elbos}
        run = regression_run(key, model, self.factors(), data, num_samples, progress)
        return run._replace(attrs=attrs)

    def factors(self) -> Factors:
        """The factors of q."""
        return Factors(self.posterior, self.intercept, self.noise_posterior)


class LogisticFit(NamedTuple):
    """A sparse logistic regression, by :func:`fit_logistic`.

    Attributes:
        posterior: Spike and slab of each coefficient: ``probs`` are the inclusion probabilities, ``mean`` the
            posterior means.
        intercept: Gaussian of the intercept at ``centre``; None without one.
        centre: Means of the columns, shape ``(d,)``; 0 without an intercept.
        objective: The quadratic bound, below the tempered ELBO; every constant is in it.
        trace: Objective after each sweep of the best start, as for :class:`LinearFit`.
        converged: Whether the best start met the tolerance.
        num_sweeps: Its sweeps.
        restart_objectives: Objective of every start, shape ``(num_restarts,)``.
        order: The best start's order of the coefficients, shape ``(d,)``.
        prior: The prior of the coefficients.
        alpha: Power on the likelihood.
        target_moments: Number, mean and root mean square of y, shape ``(3,)``.
    """

    posterior: SpikeSlab
    intercept: MeanField | None
    centre: Array
    objective: Array
    trace: Array
    converged: Array
    num_sweeps: Array
    restart_objectives: Array
    order: Array
    prior: Prior
    alpha: ArrayLike

    target_moments: Array

    @property
    def inclusion_probs(self) -> Array:
        """Approximate posterior probabilities that a coefficient is not 0, shape ``(d,)``."""
        return self.posterior.probs

    def as_elbo(self) -> TemperedELBO:
        """The objective, which is below the ELBO, for :func:`compare`."""
        return elbo_of(self.objective, self.alpha, self.factors(), self.prior)

    def summarise_data(self) -> DataSummary:
        """Number, mean and root mean square of the target, for :func:`compare`."""
        return summarise_target(self.target_moments)

    def as_run(self, *data: ArrayLike, num_samples: int = 1000, rng_key: Array | None = None) -> Run:
        """Draws with the regression as a NumPyro model, for :func:`to_inference_data`.

        Raises:
            ValueError: If x, y or the key are missing.
        """
        key = check_run_arguments(self, data, rng_key, "x", "y")
        model = temper(regression_model(self.prior, self.centre, None), self.alpha)
        attrs = {"algorithm": "cavi", "regression": "logistic", **fit_attrs(self), "num_iter": len(self.trace)}
        progress = {"objective_trace": self.trace, "objective_by_restart": self.restart_objectives}
        run = regression_run(key, model, self.factors(), data, num_samples, progress)
        return run._replace(attrs=attrs)

    def factors(self) -> Factors:
        """The factors of q."""
        return Factors(self.posterior, self.intercept, None)


def selected(fit: LinearFit | LogisticFit, threshold: float = 0.5) -> np.ndarray:
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
