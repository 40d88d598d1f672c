"""Natural-gradient variational inference (CA19, Algorithm 2, objective (8); KL17)."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.expectations.base import Evaluation
from numpyro_tempered.families.mean_field import MeanField
from numpyro_tempered.online.base import (
    Box,
    CompensatedSum,
    OnlineState,
    Rule,
    StepSize,
    advance,
    as_schedule,
    check_box,
    check_prior,
    project,
    start,
)

CURVATURES = ("hessian", "fisher")


class Memory(NamedTuple):
    """Mean and precision; both move by less than their rounding error on long streams."""

    loc: CompensatedSum
    precision: CompensatedSum


def ngvi(
    step_size: StepSize = 1.0,
    evidence: float = math.inf,
    curvature: str = "hessian",
    box: Box | None = None,
) -> Rule:
    r"""Natural-gradient variational inference.

    .. math:: \mu_{t+1} = \arg\min_{\mu\in B} \Big\{\langle\nabla\bar L_t(\mu_t), \mu\rangle +
              \mathrm{KL}(q_\mu, \pi)/\eta + \mathrm{KL}(q_\mu, q_{\mu_t})/\alpha\Big\}

    in the expectation parameters μ = (m, m² + σ²), with α the ``step_size`` and η the
    ``evidence``. In natural parameters λ, with ρ = α/(α+η) and 1/β = 1/η + 1/α:

    .. math:: \lambda' = (1-\rho)\lambda + \rho\lambda_0 - \beta\nabla\bar L_t

    Gaussian, with precision τ = 1/σ²: τ' = (1-ρ)τ + ρ/s² + 2β g_v, and
    m' = m - [β g_m + ρ (m - m0)/s²] / τ' with the new precision.

    ``evidence`` is the total evidence that the posterior may hold, in data. Infinite, the default,
    accumulates: after t data the posterior holds t data (times step size and tempering), and a
    conjugate stream ends at the exact posterior. A finite value forgets exponentially towards the
    prior over a window of 1 + evidence/step_size data; with 1 the posterior never holds more
    than one datum.

    Args:
        step_size: α, a float, a callable of the count t = 1, 2, ... or of ``(t, q)``.
        evidence: η, positive, possibly infinite.
        curvature: ``"hessian"`` takes E[∂²l] for the added precision, ``"fisher"`` takes E[(∂l)²],
            which is positive for every loss and cannot overshoot.
        box: Optional bounds on means and scales; the minimiser is the clipped one, and the next
            round starts from it.

    Returns:
        An online :class:`Rule`; its memory is mean and precision, compensated sums. A round that would
        leave a precision negative or not finite is rejected and counted.

    Raises:
        ValueError: If an argument is out of range.

    References:
        CA19, Algorithm 2; KL17.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.ngvi(step_size=0.5)  # half the squared loss: unit Gaussian noise
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> x, y = jnp.ones((3, 1)), jnp.array([1.0, 2.0, 3.0])
        >>> state, losses = nt.online.run(rule, nt.expectations.squared(), state, x, y)
        >>> print(f"{state.posterior.loc[0]:.3f} {state.posterior.scale[0]:.3f}")
        1.500 0.500
    """
    rate, box = as_schedule(step_size), check_box(box)
    if not isinstance(evidence, int | float) or math.isnan(evidence) or evidence <= 0:
        raise ValueError(f"evidence must be positive, inf to accumulate, got {evidence!r}.")
    if curvature not in CURVATURES:
        raise ValueError(f"curvature must be one of {CURVATURES}, got {curvature!r}.")

    def init(prior: MeanField) -> OnlineState:
        prior = check_prior(prior)
        q = project(prior, box)
        precision = CompensatedSum.start(1.0 / jnp.square(q.scale))
        return start(prior, q, memory=Memory(CompensatedSum.start(q.loc), precision))

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        q, (loc, precision) = state.posterior, state.memory
        alpha = rate(state.count + 1, q)
        if math.isinf(evidence):
            beta = alpha
            force = beta * evaluation.grad_loc
            gain = 2.0 * beta * evaluation.grad_var
        else:
            rho = alpha / (alpha + evidence)
            beta = evidence * rho
            prior_precision = 1.0 / jnp.square(state.prior.scale)
            force = beta * evaluation.grad_loc + rho * prior_precision * (q.loc - state.prior.loc)
            gain = 2.0 * beta * evaluation.grad_var + rho * (prior_precision - precision.value)
        precision = precision.add(gain)
        tau = precision.value
        loc = loc.add(-force / tau)
        # NaN tells the driver to reject the round.
        argmin = MeanField(loc.value, jnp.where(tau > 0, jax.lax.rsqrt(tau), jnp.nan))
        if box is None:
            return advance(state, argmin, Memory(loc, precision))
        # The next round starts from the projected q.
        projected = project(argmin, box)
        least = 1.0 / jnp.square(jnp.asarray(box.scale, tau.dtype))
        loc = loc.restart_where(projected.loc != loc.value, projected.loc)
        precision = precision.restart_where(tau < least, least)
        return advance(state, projected, Memory(loc, precision))

    return Rule(init, update, curvature=curvature, name="ngvi")
