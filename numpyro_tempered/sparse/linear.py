r"""Sparse linear regression.

The functions of the noise take the expected squared error :math:`S = E_q|y - X\theta|^2` and give E[1/v] with the
terms of the tempered ELBO that contain v, :math:`\alpha E\log N(y; X\theta, v) - \mathrm{KL}(q(v), \pi)`, at the
best q(v).
"""

import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Numbers,
    check_number,
    is_traced,
    key_first,
    names_of,
    to_host,
    warn_caller,
)
from numpyro_tempered.gaussian.families import SpikeSlab
from numpyro_tempered.gaussian.families.spike_slab import kl
from numpyro_tempered.sparse.arguments import Prior, Regression, as_data, as_regression
from numpyro_tempered.sparse.ascent import Search, Start, Update, find_best, outcome
from numpyro_tempered.sparse.base import NoisePosterior, RegressionFit, target_moments
from numpyro_tempered.sparse.sweep import (
    block_design,
    block_prior,
    blocks,
    combine,
    sweep,
)

LOG_2PI = 1.8378770664093453


@key_first
def fit_linear(
    rng_key: Array,
    x: ArrayLike,
    y: ArrayLike,
    *,
    inclusion_prob: ArrayLike,
    slab_scale: ArrayLike,
    noise_scale: ArrayLike | None = None,
    noise_prior: tuple[ArrayLike, ArrayLike] | None = None,
    intercept_scale: ArrayLike | None = None,
    alpha: ArrayLike = 1.0,
    num_restarts: int = 1,
    init: ArrayLike | None = None,
    max_iter: int = 1000,
    tolerance: float = 1e-6,
) -> RegressionFit:
    r"""Tempered linear regression with a spike-and-slab prior, by coordinate ascent.

    .. math::
        y_i = b + x_i'\theta + \varepsilon_i,\quad \varepsilon_i\sim N(0, v),\quad
        \theta_j\sim\lambda N(0, s^2) + (1 - \lambda)\delta_0

    maximises :math:`\alpha E_q\log L - \mathrm{KL}(q, \pi)` over independent
    :math:`q_j = \varphi_jN(m_j, \sigma_j^2) + (1 - \varphi_j)\delta_0`, each step in closed form. The ELBO
    includes every constant. What it bounds depends on the noise:

    - ``noise_scale``: a bound on the log of the tempered evidence :math:`\int L^\alpha d\pi` at that noise;
    - ``noise_prior``: the precision 1/v is Gamma (shape, rate), q has a Gamma factor for it, and the ELBO bounds
      the log evidence with v integrated out;
    - neither: v maximises the ELBO (alpha cancels in its update), which bounds the log evidence at this v, and so
      the largest one over v, but no evidence with v integrated out.

    Correlated columns and unknown noise make for many optima. The first start is a point of an approximate lasso
    path, with the coefficients by decreasing size there, in units of their columns; further starts are other
    points, then the same points in random orders. Ten starts are a good choice.

    Args:
        rng_key: Key of the random orders; the first nine starts need none of it.
        x: Design, shape ``(n, d)``; d may exceed n.
        y: Target, shape ``(n,)``.
        inclusion_prob: λ in (0, 1], a number or shape ``(d,)``; 1 keeps a variable in.
        slab_scale: s, in units of y per unit of x, a number or shape ``(d,)``.
        noise_scale: Standard deviation of the noise in units of y.
        noise_prior: Shape and rate (in squared units of y) of the Gamma prior of 1/v, instead of ``noise_scale``.
        intercept_scale: Prior standard deviation of b, which is the value at the means of the columns, in
            units of y. None, the default, has no intercept: centre y and the columns of x, unless you want none.
        alpha: Power on the likelihood, positive.
        num_restarts: Number of starts; the largest ELBO wins, and more starts never give a smaller one.
        init: Coefficients of a start before the others, ``(d,)``.
        max_iter: Limit of the sweeps of a start.
        tolerance: A start has converged once a sweep gains no more than this for each row, in nats.

    Returns:
        A :class:`RegressionFit`. A constant column, where there is an intercept, keeps its prior. Works under
        ``jit`` and ``vmap`` of any argument but the structural ones; values are not checked there.

    Raises:
        ValueError: If an argument is out of range, not finite or of a wrong shape; or y is constant
            and its noise is to be estimated.
        TypeError: If an argument is not of real numbers.

    References:
        CA-DNN and Bai20 for the family.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.cos(np.outer(np.arange(40), [0.7, 1.1, 1.9]))
        >>> fit = nt.sparse.fit_linear(
        ...     jax.random.key(0), x, 2 * x[:, 1], inclusion_prob=0.3, slab_scale=1.0, noise_scale=0.5, alpha=0.5
        ... )
        >>> print(fit.posterior.mean.round(1), fit.inclusion_probs.round(1))
        [0. 2. 0.] [0.1 1.  0.1]
    """
    names = names_of(x)
    x, y = as_data(x, y)
    prior = Prior(inclusion_prob, slab_scale, intercept_scale, noise_prior)
    regression = as_regression(x, y, prior, init)
    check_number(alpha, "alpha", "(0, inf)", hint="Use jax.vmap for several.")
    noise = _noise_model(y, noise_scale, noise_prior, intercept_scale is not None)
    power, noise = jax.tree.map(
        lambda leaf: jnp.asarray(leaf, regression.x.dtype), (alpha, noise)
    )
    search = Search(num_restarts, max_iter, tolerance)
    best = find_best(
        rng_key, regression, regression[:2], linear_ascent, (power, noise), search
    )
    state, of_noise = best.ascent.point, None
    ascent = outcome(state.q, best, regression, max_iter, names)
    if intercept_scale is None and not is_traced(x, y, ascent["posterior"]):
        _warn_of_mean(
            to_host(y) - to_host(x) @ to_host(ascent["posterior"].mean), noise_scale
        )
    if isinstance(noise, Gamma):
        of_noise = NoisePosterior(
            *gamma_posterior(noise, state.error, x.shape[0], power)
        )
    return RegressionFit(
        **ascent,
        noise_scale=1.0 / jnp.sqrt(state.precision),
        noise_posterior=of_noise,
        prior=prior,
        alpha=alpha,
        target_moments=target_moments(y),
    )


def _warn_of_mean(residuals: np.ndarray, noise_scale: ArrayLike | None) -> None:
    """Warn of residuals most of whose squares are that of their mean, beside which no column counts."""
    mean, deviation = residuals.mean(), residuals.std()
    if noise_scale is not None and not is_traced(noise_scale):
        deviation = max(deviation, float(np.asarray(noise_scale)))
    if (
        abs(mean) > deviation * max(2.0, 10.0 / math.sqrt(len(residuals)))
        and len(residuals) > 2
    ):
        warn_caller(
            f"y is {mean:.3g} away from 0 on average and the columns do not explain it, beside deviations of "
            f"{deviation:.3g}: pass intercept_scale=, or centre y and the columns of x."
        )


class Known(NamedTuple):
    """Noise of a given standard deviation.

    Attributes:
        scale: In units of y.
    """

    scale: Array


class Estimated(NamedTuple):
    """The v that maximises the ELBO, S/n: alpha cancels.

    Attributes:
        floor: Smallest v: an exact fit would send it to 0.
    """

    floor: Array


class Gamma(NamedTuple):
    """Prior Ga(shape, rate) of 1/v.

    Attributes:
        shape: Its shape.
        rate: Its rate, in squared units of y.
    """

    shape: Array
    rate: Array


NoiseModel: TypeAlias = Known | Estimated | Gamma


def gamma_posterior(prior: Gamma, error: Array, num_rows: int, alpha: Array) -> Gamma:
    """The best q(1/v): Ga(a + αn/2, b + αS/2)."""
    return Gamma(prior.shape + 0.5 * alpha * num_rows, prior.rate + 0.5 * alpha * error)


def update_noise(
    model: NoiseModel, error: Array, num_rows: int, alpha: Array
) -> tuple[Array, Array]:
    """E[1/v] at the best q(v) given the expected squared error, and its terms of the ELBO."""
    if isinstance(model, Gamma):
        q = gamma_posterior(model, error, num_rows, alpha)
        # The digammas in E log v and in the KL cancel.
        gain = (
            gammaln(q.shape)
            - gammaln(model.shape)
            + model.shape * jnp.log(model.rate / q.rate)
        )
        half = 0.5 * alpha * num_rows
        return q.shape / q.rate, gain - half * (LOG_2PI + jnp.log(q.rate))
    best = error / num_rows
    variance = (
        jnp.square(model.scale)
        if isinstance(model, Known)
        else jnp.maximum(best, model.floor)
    )
    bound = -0.5 * alpha * (num_rows * (LOG_2PI + jnp.log(variance)) + error / variance)
    return 1.0 / variance, bound


class State(NamedTuple):
    """The state of a linear ascent.

    Attributes:
        q: Factors, ``(K, B)``.
        residual: y - X E[θ], shape ``(n,)``.
        error: E|y - Xθ|².
        precision: E[1/v].
    """

    q: SpikeSlab
    residual: Array
    error: Array
    precision: Array


def linear_ascent(
    regression: Regression, start: Start, alpha: Array, noise: NoiseModel
) -> tuple[Update[State], State]:
    """The update of an ascent, and its first state."""
    x, y, order = regression.x, regression.y, start.order
    n = y.shape[0]
    design = block_design(blocks(x.T[order]))
    blocked = block_prior(SpikeSlab(*(part[order] for part in regression.prior)))

    def update(state: State) -> tuple[State, Array]:
        q = sweep(
            design, blocked, alpha * state.precision, state.residual, state.q.mean
        )
        # Computed anew: the residual that a sweep updates step by step drifts.
        residual = y - combine(design.columns, q.mean)
        error = jnp.sum(jnp.square(residual)) + jnp.sum(design.norms * q.variance)
        precision, bound = update_noise(noise, error, n, alpha)
        return State(q, residual, error, precision), bound - jnp.sum(kl(q, blocked))

    mean = blocks(start.mean[order])
    residual = y - combine(design.columns, mean)
    error = jnp.sum(jnp.square(residual))
    q = SpikeSlab(jnp.ones_like(mean), mean, blocked.scale)
    return update, State(q, residual, error, update_noise(noise, error, n, alpha)[0])


def _noise_model(
    y: Numbers,
    noise_scale: ArrayLike | None,
    noise_prior: tuple[ArrayLike, ArrayLike] | None,
    with_intercept: bool,
) -> NoiseModel:
    """The noise that the arguments ask for.

    Raises:
        ValueError: If both are given, one is out of range, or y leaves no noise to estimate.
    """
    if noise_scale is not None and noise_prior is not None:
        raise ValueError(
            "noise_scale and noise_prior are both given: a known noise has no prior."
        )
    if noise_scale is not None:
        return Known(jnp.asarray(check_number(noise_scale, "noise_scale", "(0, inf)")))
    if noise_prior is not None:
        if not isinstance(noise_prior, tuple | list) or len(noise_prior) != 2:
            raise ValueError(
                f"noise_prior must be a pair (shape, rate), got {noise_prior!r}."
            )
        for name, value in zip(Gamma._fields, noise_prior, strict=True):
            check_number(value, f"noise_prior {name}", "(0, inf)")
        return Gamma(*map(jnp.asarray, noise_prior))
    square = ((y - y.mean() if with_intercept else y) ** 2).mean()
    if not is_traced(square) and not square > 0.0:
        raise ValueError(
            f"y is {y[0]} in all rows, so its noise cannot be estimated: pass noise_scale."
        )
    return Estimated(jnp.finfo(jnp.result_type(float)).eps * square)
