"""Streaming variational Bayes (CA19, Algorithm 2, objective (7))."""

from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import Gaussian, able, require, supports
from numpyro_tempered.online import base as rules


def svb(step_size: rules.StepSize, box: rules.Box | None = None) -> rules.Rule:
    r"""Streaming variational Bayes: one gradient, with a penalty for leaving the current posterior.

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
    rate = rules.as_schedule(step_size)

    def init(prior: Gaussian) -> rules.OnlineState:
        require(prior, "kl_prox", "svb")
        if isinstance(step_size, rules.SVBRate) and not supports(prior, "kl_prox_scaled"):
            raise TypeError(
                f"svb_rate sets one rate per coordinate, on {able('kl_prox_scaled')}; on {type(prior).__name__} "
                "take a float or a schedule of the count."
            )
        return rules.start(prior, prior)

    def update(evaluation: Evaluation, state: rules.OnlineState) -> rules.OnlineState:
        q = state.posterior
        grads = require(q, "gradient", "svb")(q, evaluation.grad_loc, evaluation.grad_var)
        if isinstance(step_size, rules.SVBRate):
            argmin = require(q, "kl_prox_scaled", "svb")(q, grads, step_size.times_variance(state.count + 1, q))
        else:
            argmin = require(q, "kl_prox", "svb")(q, grads, rate(state.count + 1, q))
        return rules.advance(state, argmin)

    return rules.in_box(rules.Rule(init, update, curvature="hessian", name="svb", calibrated=False), box)
