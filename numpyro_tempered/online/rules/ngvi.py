"""Natural-gradient variational inference (CA19, Algorithm 2, objective (8); KL17)."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import Gain, carry, family_of, require
from numpyro_tempered.gaussian.families.full_rank import FullRank
from numpyro_tempered.online.base import (
    Box,
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
from numpyro_tempered.online.rules.forgetting import Forgetting, to_prior

CURVATURES = ("hessian", "fisher")
NEGATIVE = ("reject", "floor")


def ngvi(
    step_size: StepSize = 1.0,
    evidence: float = math.inf,
    curvature: str = "hessian",
    box: Box | None = None,
    *,
    forget: Forgetting | None = None,
    negative: str = "reject",
    num_local_steps: int = 1,
) -> Rule:
    r"""Natural-gradient variational inference.

    .. math:: \mu_{t+1} = \arg\min_{\mu\in B} \Big\{\langle\nabla\bar L_t(\mu_t), \mu\rangle +
              \mathrm{KL}(q_\mu, \pi)/\eta + \mathrm{KL}(q_\mu, q_{\mu_t})/\alpha\Big\}

    in the expectation parameters μ = (m, m² + σ²), with α the ``step_size`` and η the
    ``evidence``. In natural parameters λ, with ρ = α/(α+η) and 1/β = 1/η + 1/α:

    .. math:: \lambda' = (1-\rho)\lambda + \rho\lambda_0 - \beta\nabla\bar L_t

    Gaussian, with precision P (mean-field: diagonal): P' = (1-ρ)P + ρP_0 + β E[∇²l], and
    m' = m - P'^-1 [β g_m + ρ P_0 (m - m0)] with the new precision. On a full covariance and with a predictor
    linear in the parameters a datum is an update of rank one, in O(d²).

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
        box: Optional bounds on means and scales, for a mean-field family; the minimiser is the clipped one,
            and the next round starts from it.
        forget: :func:`power` or :func:`random_walk`, to follow a target that drifts, or :func:`to_prior`, which
            is ``evidence`` with a schedule.
        negative: What becomes of negative curvature, from a loss that is not convex: ``"reject"`` takes it,
            and rejects the round if a precision would not stay positive; ``"floor"`` leaves it out and counts
            the round in ``state.floored``. Where many data have some, the floor leaves the posterior too
            narrow: the sum of the curvatures is what it needs.
        num_local_steps: Evaluations in a round. With 1 the datum is taken as it looks from q_t, as in CA19; with
            more, as it looks from the posterior it leads to: each but the last moves a copy of q half way to the
            update at itself, towards the fixed point of streaming variational Bayes. It matters where the
            curvature changes over the width of q, such as a scale parameter with a wide prior: one evaluation
            then leaves the posterior too narrow from the first data on. Losses are those of q_t all the same.

    Returns:
        An online :class:`Rule` for every family; its memory is mean and precision (or its factor) as
        compensated sums. A round that would leave a precision not positive definite or not finite is rejected
        and counted.

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
    for name, value, known in (("curvature", curvature, CURVATURES), ("negative", negative, NEGATIVE)):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}.")
    if math.isfinite(evidence):
        if forget is not None:
            raise ValueError("a finite evidence forgets already, to the prior: give it or forget, not both.")
        forget = to_prior(evidence)
    if num_local_steps < 1:
        raise ValueError(f"num_local_steps must be at least 1, got {num_local_steps}.")

    def init(prior: Any) -> OnlineState:
        prior = check_prior(prior)
        if forget is not None and forget.inflate is not None:
            require(prior, "inflate", "random_walk")
        q = project(prior, box)
        return start(prior, q, memory=family_of(q).start(q))

    def gain_at(state: OnlineState) -> Gain:
        count, q = state.count + 1, state.posterior
        alpha = rate(count, q)
        if forget is not None and forget.evidence is not None:
            # Written so that an infinite evidence accumulates.
            share = alpha / forget.evidence(count)
            rho = share / (1.0 + share)
            return Gain(alpha / (1.0 + share), 1.0 - rho, rho)
        if forget is not None and forget.keep is not None:
            return Gain(alpha, forget.keep(count, q))
        return Gain(alpha)

    def curvature_of(q: Any, evaluation: Evaluation) -> tuple[Any, Array | None]:
        if negative == "floor":
            return family_of(q).floor(q, evaluation.grad_var)
        return evaluation.grad_var, None

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        q, family = state.posterior, family_of(state.posterior)
        grad_var, floored = curvature_of(q, evaluation)
        argmin, memory = family.natural_step(
            state.memory, q, state.prior, evaluation.grad_loc, grad_var, gain_at(state)
        )
        if forget is not None and forget.inflate is not None:
            argmin = require(q, "inflate", "random_walk")(argmin, forget.inflate(state.count + 1, q))
            memory = family.start(argmin)
        if box is None:
            return advance(state, argmin, memory, floored)
        # The next round starts from the projected q.
        projected = project(argmin, box)
        least = 1.0 / jnp.square(jnp.asarray(box.scale, argmin.scale.dtype))
        loc, precision = memory
        loc = loc.restart_where(projected.loc != loc.value, projected.loc)
        precision = precision.restart_where(precision.value < least, least)
        return advance(state, projected, type(memory)(loc, precision), floored)

    def relook(evaluate: Callable[[Any], Evaluation], first: Evaluation, state: OnlineState) -> Evaluation:
        """The evaluation to update with: that at the posterior it leads to, as seen from q_t."""
        family, gain = family_of(state.posterior), gain_at(state)
        nothing = jax.tree.map(jnp.zeros_like, (first.grad_loc, first.grad_var))
        anchor, _ = family.natural_step(state.memory, state.posterior, state.prior, *nothing, gain)
        if isinstance(anchor, FullRank):
            anchor = anchor._replace(factor=anchor.scale_tril)
        # Half of the way each time: undamped the search overshoots as the first look does.
        half = Gain(0.5 * gain.step, 0.5, 0.5)

        def closer(_: Any, q: Any) -> Any:
            at_q = evaluate(q)
            grad_var, _ = curvature_of(q, at_q)
            moved, _ = family.natural_step(family.start(q), q, anchor, at_q.grad_loc, grad_var, half)
            finite = jnp.isfinite(jnp.sum(family.witness(moved)))
            return jax.tree.map(partial(jnp.where, finite), moved, q)

        q = jax.lax.fori_loop(0, num_local_steps - 1, closer, anchor)
        last = evaluate(q)
        shift = state.posterior.loc - q.loc
        return first._replace(grad_loc=carry(last.grad_loc, last.grad_var, shift), grad_var=last.grad_var)

    return Rule(
        init,
        update,
        relook=relook if num_local_steps > 1 else None,
        curvature=curvature,
        name="ngvi",
        box=box,
        holds_evidence=forget is None and box is None,
    )
