"""Streaming variational Bayes (CA19, Algorithm 2, objective (7)), and (8) in the same parameters."""

import math

import jax.numpy as jnp

from numpyro_tempered.core import Scalar, check_number, is_traced, one_for_equal
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import (
    Gain,
    Gaussian,
    Q,
    able,
    family_of,
    require,
    supports,
)
from numpyro_tempered.online import ball as balls
from numpyro_tempered.online import base as rules


@one_for_equal
def svb(
    step_size: rules.StepSize,
    box: rules.Box | rules.Ball | None = None,
    *,
    evidence: float = math.inf,
) -> rules.Rule:
    r"""Streaming variational Bayes: one gradient, with a penalty for leaving the current posterior.

    .. math:: \mu_{t+1} = \arg\min_{\mu\in B} \Big\{\langle\nabla\bar L_t(\mu_t), \mu\rangle +
              \mathrm{KL}(q_\mu, q_{\mu_t})/\eta\Big\}, \qquad \mu = (m, \sigma)

    that is, on a mean-field family, m = m_t - η σ_t² g_m and σ = σ_t h(η σ_t g_σ / 2) with
    h(x) = √(1+x²) - x, projected on the box; on a full covariance the ``kl_prox`` of that family.
    :func:`svb_rate` gives the step of the regret bound, c / (√t σ²), evaluated without overflow however small
    σ becomes.

    With a finite ``evidence`` the rule is that of objective (8), NGVI's, in these parameters instead of
    expectation parameters (CA19, section 4.3): the second term is :math:`\mathrm{KL}(q_\mu, \pi)/\text{evidence}
    + \mathrm{KL}(q_\mu, q_{\mu_t})/\eta`. With ρ = η/(η + evidence) the two are one divergence from
    :math:`\pi^\rho q_{\mu_t}^{1-\rho}`, so that a round forgets towards the prior and then steps with (1 - ρ) η.
    No regret theorem is known for it.

    SVB does not hold evidence, and multiplying the loss by α is the same as multiplying η by α.

    Args:
        step_size: η, a float, a callable of the count t = 1, 2, ... or of ``(t, q)``.
        box: Optional bounds on means and scales, for a mean-field family: a :class:`Box`, or a :class:`Ball`, on
            which the minimiser is projected orthogonally (CA19, section 4.2).
        evidence: Weight of the prior in (8), positive; infinite for (7).

    Returns:
        An online :class:`Rule`.

    Raises:
        ValueError: If a step size, bound or the evidence is not positive, or a finite evidence meets a ball or
            :func:`svb_rate`, whose theorem is on (7).

    References:
        CA19, Algorithm 2 and Theorem 3 (with the step corrected, see :func:`svb_rate`).

    Example:
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.svb(nt.online.svb_rate(1.0), box=nt.online.Box(loc=20.0, scale=1.0))
    """
    rate = rules.as_schedule(step_size)
    if is_traced(evidence):
        raise ValueError("evidence must be a known number, not a traced one.")
    forgets = math.isfinite(check_number(evidence, "evidence", "(0, inf]"))
    if forgets and (
        isinstance(box, rules.Ball) or isinstance(step_size, rules.SVBRate)
    ):
        raise ValueError(
            "a finite evidence is for a step_size that is a float or a schedule of the count, and no Ball: "
            "svb_rate and the projection on a ball are those of objective (7)."
        )

    def init(prior: Gaussian) -> rules.OnlineState:
        require(prior, "kl_prox", "svb")
        balls.check_prior(prior, box, "svb")
        if isinstance(step_size, rules.SVBRate) and not supports(
            prior, "kl_prox_scaled"
        ):
            raise TypeError(
                f"svb_rate sets one rate per coordinate, on {able('kl_prox_scaled')}; on {type(prior).__name__} "
                "take a float or a schedule of the count."
            )
        return rules.start(prior, prior)

    def update(evaluation: Evaluation, state: rules.OnlineState) -> rules.OnlineState:
        q = state.posterior
        grads = require(q, "gradient", "svb")(
            q, evaluation.grad_loc, evaluation.grad_var
        )
        if isinstance(step_size, rules.SVBRate):
            argmin = require(q, "kl_prox_scaled", "svb")(
                q, grads, step_size.times_variance(state.count + 1, q)
            )
        else:
            eta, anchor = rate(state.count + 1, q), q
            if forgets:
                share = eta / (eta + evidence)
                eta, anchor = (1.0 - share) * eta, _towards(q, state.prior, share)
            argmin = require(q, "kl_prox", "svb")(anchor, grads, eta)
        return rules.advance(state, argmin)

    return rules.in_box(
        rules.Rule(init, update, curvature="hessian", name="svb", calibrated=False), box
    )


def _towards(q: Q, prior: Q, share: Scalar) -> Q:
    """The Gaussian proportional to prior^share q^(1 - share)."""
    family = family_of(q)
    nothing = family.covariance_gradient(
        q, jnp.zeros_like(q.loc)[None], jnp.zeros((1,), q.loc.dtype)
    )
    gain = Gain(0.0, 1.0 - share, share)
    mixed, _ = family.natural_step(
        family.init(q), q, prior, jnp.zeros_like(q.loc), nothing, gain
    )
    return family.canonical(mixed)
