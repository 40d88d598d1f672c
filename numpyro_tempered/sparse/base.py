"""What the sparse regressions share: prior and results."""

from typing import NamedTuple

import numpy as np

from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.gaussian.families import MeanField, SpikeSlab


class Prior(NamedTuple):
    r"""Independent coefficients, :math:`\lambda_j N(0, s_j^2) + (1 - \lambda_j)\delta_0`, and an intercept.

    Attributes:
        inclusion_prob: λ, a number or shape ``(d,)``; 1 keeps a variable in.
        slab_scale: s, in units of y (of the log-odds) per unit of x, a number or shape ``(d,)``.
        intercept_scale: Standard deviation of the intercept about 0 at the means of the columns; None for no
            intercept.
    """

    inclusion_prob: ArrayLike
    slab_scale: ArrayLike
    intercept_scale: ArrayLike | None


class NoisePosterior(NamedTuple):
    """The Gamma posterior of the precision 1/v of the noise.

    Attributes:
        shape: Its shape.
        rate: Its rate, in squared units of y.
    """

    shape: Array
    rate: Array


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

    @property
    def inclusion_probs(self) -> Array:
        """Approximate posterior probabilities that a coefficient is not 0, shape ``(d,)``."""
        return self.posterior.probs


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

    @property
    def inclusion_probs(self) -> Array:
        """Approximate posterior probabilities that a coefficient is not 0, shape ``(d,)``."""
        return self.posterior.probs


def selected(fit: LinearFit | LogisticFit, threshold: float = 0.5) -> np.ndarray:
    """The variables with an inclusion probability above a threshold, the most probable first.

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
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold must be from 0 to 1, got {threshold}.")
    probs = np.asarray(fit.posterior.probs)
    order = np.argsort(-probs, kind="stable")
    return order[probs[order] > threshold]


def split(q: SpikeSlab, with_intercept: bool) -> tuple[SpikeSlab, MeanField | None]:
    """Coefficients and intercept of the factors of a design whose last column is the intercept's."""
    if not with_intercept:
        return q, None
    return SpikeSlab(*(part[:-1] for part in q)), MeanField(q.loc[-1], q.scale[-1])
