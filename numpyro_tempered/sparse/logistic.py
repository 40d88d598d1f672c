r"""Sparse logistic regression by the quadratic bound of Jaakkola and Jordan.

.. math:: \log\frac{e^{yu}}{1 + e^u} \ge (y - \tfrac12)u - w(\xi)\,\frac{u^2 - \xi^2}2 - \log 2\cosh\frac\xi2,
          \quad w(\xi) = \frac{\tanh(\xi/2)}{2\xi}

for every ξ, with equality at :math:`\xi = \pm u`; the best ξ of a row is :math:`\sqrt{E_q u^2}`. With it the
coefficients see a squared loss: rows times :math:`\sqrt w`, and the target :math:`(y - 1/2)/\sqrt w`.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    check_number,
    is_traced,
    key_first,
    names_of,
)
from numpyro_tempered.gaussian.families import SpikeSlab
from numpyro_tempered.gaussian.families.spike_slab import kl
from numpyro_tempered.sparse.arguments import Prior, Regression, as_data, as_regression
from numpyro_tempered.sparse.ascent import Search, Start, Update, find_best, outcome
from numpyro_tempered.sparse.base import RegressionFit, target_moments
from numpyro_tempered.sparse.sweep import (
    Design,
    block_prior,
    blocks,
    combine,
    products,
    sweep,
)


@key_first
def fit_logistic(
    rng_key: Array,
    x: ArrayLike,
    y: ArrayLike,
    *,
    inclusion_prob: ArrayLike,
    slab_scale: ArrayLike,
    intercept_scale: ArrayLike | None = 10.0,
    alpha: ArrayLike = 1.0,
    num_restarts: int = 1,
    init: ArrayLike | None = None,
    max_iter: int = 1000,
    tolerance: float = 1e-6,
) -> RegressionFit:
    r"""Tempered logistic regression with a spike-and-slab prior, by coordinate ascent on a quadratic bound.

    .. math::
        P(y_i = 1) = \frac1{1 + e^{-u_i}},\quad u_i = b + x_i'\theta,\quad
        \theta_j\sim\lambda N(0, s^2) + (1 - \lambda)\delta_0

    maximises, over independent :math:`q_j = \varphi_jN(m_j, \sigma_j^2) + (1 - \varphi_j)\delta_0` and a number
    :math:`\xi_i` for each row,

    .. math::
        \alpha\sum_i\Big((y_i - \tfrac12)E_qu_i - \log 2\cosh\frac{\xi_i}2
        - \frac{\tanh(\xi_i/2)}{4\xi_i}(E_qu_i^2 - \xi_i^2)\Big) - \mathrm{KL}(q, \pi),

    which is at most the tempered ELBO :math:`\alpha E_q\log L - \mathrm{KL}(q, \pi)`, itself at most the log of
    the tempered evidence :math:`\int L^\alpha d\pi`. Every constant is included. The Gaussian slab keeps
    coefficients finite where the classes are separable.

    Args:
        rng_key: Key of the random orders; the first nine starts need none of it.
        x: Design, shape ``(n, d)``; d may exceed n.
        y: Classes, 0 or 1 (or booleans), ``(n,)``.
        inclusion_prob: λ in (0, 1], a number or shape ``(d,)``; 1 keeps a variable in.
        slab_scale: s, in log-odds per unit of x, a number or shape ``(d,)``.
        intercept_scale: Prior standard deviation of b, the log-odds at the means of the columns; None for no
            intercept.
        alpha: Power on the likelihood, positive.
        num_restarts: Number of starts; the largest objective wins, and more starts never give a smaller one. They
            are those of :func:`fit_linear`, for the squared loss that the bound is at ξ = 0.
        init: Coefficients of a start before the others, ``(d,)``.
        max_iter: Limit of the sweeps of a start.
        tolerance: A start has converged once a sweep gains no more than this for each row, in nats.

    Returns:
        A :class:`RegressionFit`. A constant column, where there is an intercept, keeps its prior. Works under
        ``jit`` and ``vmap`` of any argument but the structural ones; values are not checked there.

    Raises:
        ValueError: If an argument is out of range, not finite or of a wrong shape, or y has other values than 0
            and 1.
        TypeError: If an argument is not of real numbers.

    References:
        Jaakkola and Jordan, *Bayesian parameter estimation via variational methods*, Statistics and Computing 10,
        2000, for the bound; CA-DNN and Bai20 for the family.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.cos(np.outer(np.arange(80), [0.7, 1.1, 1.9]))
        >>> y = x[:, 1] + 0.3 * x[:, 0] > 0.1
        >>> fit = nt.sparse.fit_logistic(jax.random.key(0), x, y, inclusion_prob=0.3, slab_scale=3.0, alpha=0.5)
        >>> nt.sparse.selected(fit)
        array([1])
    """
    names = names_of(x)
    x, y = as_data(x, y)
    if not is_traced(y) and not np.all((y == 0.0) | (y == 1.0)):
        wrong = float(y[(y != 0.0) & (y != 1.0)][0])
        raise ValueError(
            f"y must be 0 or 1, got {wrong:g}: pass booleans, such as y == {wrong:g}."
        )
    prior = Prior(inclusion_prob, slab_scale, intercept_scale)
    regression = as_regression(x, y, prior, init)
    check_number(alpha, "alpha", "(0, inf)", hint="Use jax.vmap for several.")
    # The quadratic bound at ξ = 0, where w = 1/4.
    squared_loss = 0.5 * regression.x, 2.0 * regression.y - 1.0
    numbers = (jnp.asarray(alpha, regression.x.dtype),)
    search = Search(num_restarts, max_iter, tolerance)
    best = find_best(
        rng_key, regression, squared_loss, logistic_ascent, numbers, search
    )
    return RegressionFit(
        **outcome(best.ascent.point.q, best, regression, max_iter, names),
        noise_scale=None,
        noise_posterior=None,
        prior=prior,
        alpha=alpha,
        target_moments=target_moments(y),
    )


class State(NamedTuple):
    """The state of a logistic ascent.

    Attributes:
        q: Factors, ``(K, B)``.
        predictor: E[u], shape ``(n,)``.
        xi: ξ, ``(n,)``.
    """

    q: SpikeSlab
    predictor: Array
    xi: Array


def quadratic_weight(xi: Array) -> Array:
    """w(ξ) = tanh(ξ/2) / (2ξ), 1/4 at 0."""
    near = jnp.abs(xi) < 1e-2
    safe = jnp.where(near, 1.0, xi)
    # The next term of the series is below ξ⁴ / 500, 2e-11.
    return jnp.where(
        near, 0.25 - jnp.square(xi) / 48.0, jnp.tanh(0.5 * safe) / (2.0 * safe)
    )


def log_two_cosh_half(xi: Array) -> Array:
    """log(2 cosh(ξ/2)), for ξ of any size."""
    return 0.5 * jnp.abs(xi) + jnp.log1p(jnp.exp(-jnp.abs(xi)))


def logistic_ascent(
    regression: Regression, start: Start, alpha: Array
) -> tuple[Update[State], State]:
    """The update of an ascent, and its first state."""
    x, y, order = regression.x, regression.y, start.order
    columns = blocks(x.T[order])
    squares = jnp.square(columns)
    blocked = block_prior(SpikeSlab(*(part[order] for part in regression.prior)))

    def update(state: State) -> tuple[State, Array]:
        weight = quadratic_weight(state.xi)
        root = jnp.sqrt(weight)
        design = Design(columns, products(squares, weight), root=root)
        residual = (y - 0.5) / root - root * state.predictor
        q = sweep(design, blocked, alpha, residual, state.q.mean)
        predictor = combine(columns, q.mean)
        variance = combine(squares, q.variance)
        xi = jnp.sqrt(jnp.square(predictor) + variance)
        # At its best ξ the quadratic term is 0.
        log_lik = jnp.sum((y - 0.5) * predictor - log_two_cosh_half(xi))
        return State(q, predictor, xi), alpha * log_lik - jnp.sum(kl(q, blocked))

    mean = blocks(start.mean[order])
    predictor = combine(columns, mean)
    q = SpikeSlab(jnp.ones_like(mean), mean, blocked.scale)
    return update, State(q, predictor, jnp.abs(predictor))
