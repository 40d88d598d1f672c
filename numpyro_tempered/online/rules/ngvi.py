"""Natural-gradient variational inference (CA19, Algorithm 2, objective (8); KL17)."""

import math

from numpyro_tempered.core import (
    Array,
    check_choice,
    check_number,
    is_traced,
    one_for_equal,
)
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import (
    Curvature,
    Gain,
    Gaussian,
    family_of,
    require,
)
from numpyro_tempered.online import base as rules
from numpyro_tempered.online.rules.forgetting import Forgetting, to_prior


@one_for_equal
def ngvi(
    step_size: rules.StepSize = 1.0,
    evidence: float = math.inf,
    curvature: str = "hessian",
    box: rules.Box | None = None,
    *,
    forget: Forgetting | None = None,
    negative: str = "reject",
) -> rules.Rule:
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

    The loss is expanded at q_t. Where its curvature changes over the width of q_t, as with counts, a scale
    parameter or a wide prior, :func:`rvga` evaluates it where the datum leads to.

    Args:
        step_size: α, a float, a callable of the count t = 1, 2, ... or of ``(t, q)``.
        evidence: η, positive, possibly infinite.
        curvature: ``"hessian"`` takes E[∂²l] for the added precision, ``"fisher"`` takes E[(∂l)²],
            which is positive for every loss and cannot overshoot.
        box: Optional bounds on means and scales, for a mean-field family; the minimiser is the clipped one,
            and the next round starts from it.
        forget: :func:`power` or :func:`random_walk`, to follow a target that drifts, or :func:`to_prior`, which
            is ``evidence`` with a schedule.
        negative: What to do with negative curvature, from a loss that is not convex: ``"reject"`` uses it, and
            rejects the round if a precision would not stay positive; ``"floor"`` sets it to 0 and counts the
            round in ``state.floored``. Where many data have some, the floor makes the posterior too narrow,
            which needs the sum of all curvatures.

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
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> x, y = jnp.ones((3, 1)), jnp.array([1.0, 2.0, 3.0])
        >>> state, losses = nt.online.run(rule, nt.expectations.squared(), state, x, y)
        >>> print(f"{state.posterior.loc[0]:.3f} {state.posterior.scale[0]:.3f}")
        1.500 0.500
    """
    rate, box = rules.as_schedule(step_size), rules.check_box(box)
    check_choice(curvature, "curvature", ("hessian", "fisher"))
    check_choice(negative, "negative", ("reject", "floor"))
    forget = as_forgetting(evidence, forget)
    inflate = None if forget is None else forget.inflate

    def init(prior: Gaussian) -> rules.OnlineState:
        prior = rules.check_prior(prior)
        if inflate is not None:
            require(prior, "from_root", "random_walk")
        q = rules.project(prior, box)
        return rules.start(prior, q, memory=family_of(q).init(q))

    def curvature_of(
        q: Gaussian, evaluation: Evaluation
    ) -> tuple[Curvature, Array | None]:
        return (
            family_of(q).floor(q, evaluation.grad_var)
            if negative == "floor"
            else (evaluation.grad_var, None)
        )

    def update(evaluation: Evaluation, state: rules.OnlineState) -> rules.OnlineState:
        q, family = state.posterior, family_of(state.posterior)
        grad_var, floored = curvature_of(q, evaluation)
        gain = gain_of(rate, forget, state)
        argmin, memory = family.natural_step(
            state.memory, q, state.prior, evaluation.grad_loc, grad_var, gain
        )
        if inflate is not None:
            argmin = family.inflate(argmin, inflate(state.count + 1, q))
            memory = family.init(argmin)
        if box is None:
            return rules.advance(state, argmin, memory, floored)
        # The next round starts from the projected q.
        q = rules.project(argmin, box)
        memory = (
            family.init(q)
            if family.clip_memory is None
            else family.clip_memory(memory, q, box.scale)
        )
        return rules.advance(state, q, memory, floored)

    accumulates = forget is None and box is None
    return rules.Rule(
        init, update, curvature, name="ngvi", box=box, holds_evidence=accumulates
    )


def as_forgetting(evidence: float, forget: Forgetting | None) -> Forgetting | None:
    """What a rule forgets, of its two arguments.

    Raises:
        ValueError: If ``evidence`` is not positive or traced, or both are given.
    """
    check_number(evidence, "evidence", "(0, inf]")
    if is_traced(evidence):
        raise ValueError(
            "evidence must be a known number: pass a traced one by forget=to_prior(evidence)."
        )
    if not math.isfinite(evidence):
        return forget
    if forget is not None:
        raise ValueError(
            "a finite evidence forgets already, to the prior: give it or forget, not both."
        )
    return to_prior(evidence)


def gain_of(
    rate: rules.Schedule, forget: Forgetting | None, state: rules.OnlineState
) -> Gain:
    """The weights of the next datum, of the present precision, and of the prior's."""
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
