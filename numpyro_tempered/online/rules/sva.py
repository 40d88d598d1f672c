"""Sequential variational approximation (CA19, Algorithm 2, objective (6))."""

import jax
import jax.numpy as jnp

from numpyro_tempered.core import CompensatedSum, one_for_equal
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import require
from numpyro_tempered.online import ball as balls
from numpyro_tempered.online import base as rules


@one_for_equal
def sva(
    step_size: rules.StepSize, box: rules.Box | rules.Ball | None = None
) -> rules.Rule:
    r"""Sequential variational approximation: summed gradients, with a penalty for leaving the prior.

    .. math:: \mu_{t+1} = \arg\min_{\mu\in B} \Big\{\sum_{i\le t} \langle\nabla\bar L_i(\mu_i),
              \mu\rangle + \mathrm{KL}(q_\mu, \pi)/\eta\Big\}, \qquad \mu = (m, \sigma)

    that is, on a mean-field family, m = m0 - η s² Σ g_m and σ = s h(η s Σ g_σ / 2) with h(x) = √(1+x²) - x;
    on a full covariance the ``kl_prox`` of that family. In a box the minimiser is the lazy projection: the
    unprojected sums are kept, the minimiser is clipped. In a ball bisection finds its two multipliers.

    SVA does not hold evidence: on a conjugate stream its precision is not that of exact Bayes, and
    multiplying the loss by α is the same as multiplying η by α.

    Args:
        step_size: η, a float, a callable of the count t = 1, 2, ... or of ``(t, q)``. A schedule multiplies
            the whole sum in each round: one that ends at 0 ends at the prior.
        box: Optional bounds on means and scales, for a mean-field family: a :class:`Box` or a :class:`Ball`.

    Returns:
        An online :class:`Rule`; its memory is the two sums of gradients, compensated.

    Raises:
        ValueError: If a step size or bound is not positive.

    References:
        CA19, Algorithm 2 and Theorem 2.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.sva(step_size=0.1)
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> int(state.count)
        0
    """
    rate, box = rules.as_schedule(step_size), rules.check_box(box, in_ball=True)
    ball = box if isinstance(box, balls.Ball) else None

    def init(prior: rules.Gaussian) -> rules.OnlineState:
        require(prior, "kl_prox", "sva")
        balls.check_prior(prior, box, "sva")
        sums = jax.tree.map(
            lambda leaf: CompensatedSum.start(jnp.zeros_like(leaf)), prior
        )
        nearest = prior
        if ball is not None:
            nearest = balls.kl_prox(
                prior, jnp.zeros_like(prior.loc), jnp.zeros_like(prior.loc), 1.0, ball
            )
        return rules.start(prior, nearest, memory=sums)

    def update(evaluation: Evaluation, state: rules.OnlineState) -> rules.OnlineState:
        q = state.posterior
        grads = require(q, "gradient", "sva")(
            q, evaluation.grad_loc, evaluation.grad_var
        )
        sums = type(grads)(
            *(total.add(term) for total, term in zip(state.memory, grads, strict=True))
        )
        totals = type(grads)(*(total.value for total in sums))
        eta = rate(state.count + 1, q)
        if ball is None:
            posterior = require(q, "kl_prox", "sva")(state.prior, totals, eta)
        else:
            posterior = balls.kl_prox(state.prior, totals.loc, totals.scale, eta, ball)
        return rules.advance(state, posterior, memory=sums)

    rule = rules.Rule(init, update, curvature="hessian", name="sva", calibrated=False)
    # In a ball the minimiser is not the projection of the free one.
    return rules.in_box(rule, None if isinstance(box, balls.Ball) else box)
