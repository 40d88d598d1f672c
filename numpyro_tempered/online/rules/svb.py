"""Streaming variational Bayes (CA19, Algorithm 2, objective (7))."""

from typing import Any

from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import require
from numpyro_tempered.gaussian.families.mean_field import MeanField, kl_prox_scaled
from numpyro_tempered.online.base import (
    Box,
    OnlineState,
    Rule,
    StepSize,
    SVBRate,
    advance,
    as_schedule,
    check_box,
    check_prior,
    project,
    start,
)


def svb(step_size: StepSize, box: Box | None = None) -> Rule:
    r"""Streaming variational Bayes: one gradient, held to the current posterior.

    .. math:: \mu_{t+1} = \arg\min_{\mu\in B} \Big\{\langle\nabla\bar L_t(\mu_t), \mu\rangle +
              \mathrm{KL}(q_\mu, q_{\mu_t})/\eta\Big\}, \qquad \mu = (m, \sigma)

    that is, on a mean-field family, m = m_t - η σ_t² g_m and σ = σ_t h(η σ_t g_σ / 2) with
    h(x) = √(1+x²) - x, projected on the box; on a full covariance the ``kl_prox`` of that family.
    :func:`svb_rate` gives the step of the regret bound, c / (√t σ²), evaluated without overflow however small
    σ becomes.

    SVB does not hold evidence, and multiplying the loss by α is the same as multiplying η by α.

    Args:
        step_size: η, a float, a callable of the count t = 1, 2, ... or of ``(t, q)``.
        box: Optional bounds on means and scales.

    Returns:
        An online :class:`Rule`.

    Raises:
        ValueError: If a step size or bound is not positive.

    References:
        CA19, Algorithm 2 and Theorem 3 (with the step corrected, see :func:`svb_rate`).

    Example:
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.svb(nt.online.svb_rate(1.0), box=nt.online.Box(loc=20.0, scale=1.0))
    """
    rate, box = as_schedule(step_size), check_box(box)

    def init(prior: Any) -> OnlineState:
        prior = check_prior(prior)
        require(prior, "kl_prox", "svb")
        if isinstance(step_size, SVBRate) and not isinstance(prior, MeanField):
            raise TypeError(
                f"svb_rate is one rate a coordinate, for MeanField; on {type(prior).__name__} take a float or a "
                "schedule of the count."
            )
        return start(prior, project(prior, box), memory=())

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        q = state.posterior
        grads = require(q, "gradient", "svb")(q, evaluation)
        if isinstance(step_size, SVBRate):
            argmin = kl_prox_scaled(q, grads, step_size.times_variance(state.count + 1, q))
        else:
            argmin = require(q, "kl_prox", "svb")(q, grads, rate(state.count + 1, q))
        return advance(state, project(argmin, box))

    return Rule(init, update, curvature="hessian", name="svb", box=box)
