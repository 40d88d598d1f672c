"""The recursive variational Gaussian approximation (LBB22): the implicit step of one datum."""

import math
from typing import cast

import jax.numpy as jnp

from numpyro_tempered.core import Array, matmul, one_for_equal
from numpyro_tempered.gaussian.expectations.base import (
    Evaluation,
    Predictors,
    evaluate_predictors,
    predictor_covariance,
    rows_of,
)
from numpyro_tempered.gaussian.families.base import (
    Curvature,
    Gain,
    Gaussian,
    Rows,
    carry,
    family_of,
)
from numpyro_tempered.gaussian.families.full_rank import FullRank
from numpyro_tempered.online import base as rules
from numpyro_tempered.online.rules import descent, newton
from numpyro_tempered.online.rules.forgetting import Forgetting
from numpyro_tempered.online.rules.ngvi import as_forgetting, gain_of, ngvi


@one_for_equal
def rvga(
    step_size: rules.StepSize = 1.0,
    *,
    evidence: float = math.inf,
    forget: Forgetting | None = None,
    box: rules.Box | None = None,
) -> rules.Rule:
    r"""The recursive variational Gaussian approximation, a step of NGVI made implicit.

    .. math:: q_{t+1} = \arg\min_q \big\{\beta\, E_q[\ell_t] + \mathrm{KL}(q, q_t)\big\}

    with β the ``step_size``. :func:`ngvi` expands the loss at :math:`q_t`; this rule finds the minimiser, with
    gradients at :math:`q_{t+1}` itself: P' = P + β E_{q'}[∇²l] and m' = m - β P⁻¹ E_{q'}[∇l]. Both rules agree
    where the loss is quadratic and the family holds its minimiser. Elsewhere an explicit step overshoots where
    the loss curves more at its end, and freezes where it curves less, as with a wide prior, counts, a scale or an
    outlier; with a mean-field family it overshoots on a quadratic loss too. The implicit step does not.

    A loss of one predictor u = x·θ is a problem in two numbers whatever d, the mean and the standard deviation
    of u, which Newton's method solves with a safeguard; the update is then that of :func:`ngvi`, at its cost. A
    batch, K predictors, or a loss of the parameters takes natural-gradient steps on q, halved where the
    objective would rise; a round that has not converged is rejected and counted. Where the expectation is drawn
    there are seven half-steps.

    Args:
        step_size: β, a float, a callable of the count t = 1, 2, ... or of ``(t, q)``.
        evidence: As for :func:`ngvi`: the largest number of data that the posterior holds.
        forget: :func:`power`, :func:`random_walk` or :func:`to_prior`, to follow a target that drifts. The datum
            is then weighed against the forgotten posterior.
        box: Optional bounds on means and scales, for a mean-field family; the solution is clipped.

    Returns:
        An online :class:`Rule` for every family. A round without a finite solution is rejected and counted. One
        whose expected loss is beyond the dtype is not; the sums of the state count it as 1e-7 (1e-16) times the
        largest number.

    Raises:
        ValueError: If an argument is out of range, or (when traced) ``step_size`` has an entry for each
            coordinate.

    References:
        LBB22.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule, loss = nt.online.rvga(), nt.expectations.poisson()
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(1), jnp.full(1, 3.0)))
        >>> state, losses = nt.online.run(rule, loss, state, jnp.ones((50, 1)), jnp.full(50, 4.0))
        >>> print(f"{state.posterior.loc[0]:.2f} {state.posterior.scale[0]:.2f}")  # log(4) and 1 / sqrt(200)
        1.37 0.07
    """
    rate, forget = rules.as_schedule(step_size), as_forgetting(evidence, forget)

    def refine(
        datum: rules.Datum, first: Evaluation, state: rules.OnlineState
    ) -> Evaluation:
        q, gain = state.posterior, gain_of(rate, forget, state)
        if datum.quadratic and not family_of(q).diagonal_only:
            # One expansion is exact. With independent coordinates it is not that of their own minimum.
            return first
        beta = jnp.asarray(gain.step, q.loc.dtype)
        if beta.ndim:
            raise ValueError(
                f"rvga takes one step_size for all coordinates, got shape {beta.shape}: ngvi takes one for each."
            )
        anchor = _anchor(state, gain)
        # The objective of no step, where it is at hand: not after forgetting, and draws depend on the form of q.
        at_hand = anchor is q and not datum.is_drawn
        before = beta * first.objective if at_hand else jnp.full_like(beta, jnp.inf)
        predictors = None if datum.predictors is None else datum.predictors(q.loc)
        if predictors is not None and predictors.mean.shape == (1,):
            grad_loc, grad_var = _one_predictor(
                q, anchor, predictors, beta, datum.quadratic
            )
        elif predictors is not None and _are_few(predictors, q):
            grad_loc, grad_var = _in_predictors(
                q, anchor, datum, predictors, beta, before
            )
        else:
            grad_loc, grad_var = _natural_steps(q, anchor, datum, beta, before)
        # Under a wide prior the expected loss of a count may be beyond any number, and the step is right.
        most = jnp.finfo(q.loc.dtype).eps * jnp.finfo(q.loc.dtype).max
        return Evaluation(
            first.at_mean, jnp.minimum(first.expected, most), grad_loc, grad_var
        )

    rule = ngvi(step_size, forget=forget, box=box)
    return rule._replace(refine=refine, name="rvga")


def _anchor(state: rules.OnlineState, gain: Gain) -> Gaussian:
    """What the datum is weighed against: the posterior after forgetting."""
    q, family = state.posterior, family_of(state.posterior)
    if gain.keeps_all and not gain.pulls:
        return q
    no_loc = jnp.zeros_like(q.loc)
    no_curvature = family.covariance_gradient(
        q, no_loc[None], jnp.zeros((1,), q.loc.dtype)
    )
    anchor, _ = family.natural_step(
        state.memory, q, state.prior, no_loc, no_curvature, gain
    )
    return family.canonical(anchor)


def _one_predictor(
    q: Gaussian, anchor: Gaussian, predictors: Predictors, rate: Array, quadratic: bool
) -> tuple[Array, Curvature]:
    """Gradients at the solution as seen from the mean of q, for a loss of one predictor."""
    family, x = family_of(q), predictors.jacobian[0]
    offset = jnp.zeros_like(q.loc) if anchor is q else q.loc - anchor.loc
    mean = predictors.mean[0] - jnp.dot(x, offset)
    if family.diagonal_only:
        # A datum of curvature b adds b x² to the precision of each coordinate.
        shares = jnp.square(family.root(anchor) * x)
    else:
        shares = family.predictor_variance(anchor, x[None])
    solve = newton.solve_quadratic if quadratic else newton.solve
    slope, curvature = solve(predictors.moments, mean, shares, rate)
    grad_var = family.covariance_gradient(q, x[None], 0.5 * curvature[None])
    if family.diagonal_only:
        shift = offset + jnp.square(family.root(anchor)) * x * (rate * slope)
        grad_loc = x * slope + jnp.square(x) * (curvature * shift)
    else:
        grad_loc = x * (
            slope + curvature * (jnp.dot(x, offset) + jnp.sum(shares) * rate * slope)
        )
    return grad_loc, grad_var


def _natural_steps(
    q: Gaussian, anchor: Gaussian, datum: rules.Datum, rate: Array, before: Array
) -> tuple[Array, Curvature]:
    """Gradients at the solution as seen from the mean of q, by natural-gradient steps in q."""
    family = family_of(q)
    anchor = family.canonical(anchor)
    start = anchor
    if datum.predictors is not None:
        jacobian = datum.predictors(q.loc).jacobian
        start = _narrow(anchor, jnp.reshape(jacobian, (-1, q.loc.shape[0])))
    p, at_p, converged = descent.search(anchor, start, datum, rate, before)
    # Gradients at a point which is no solution would lead elsewhere: NaN has the round rejected.
    grad_loc = carry(at_p.grad_loc, at_p.grad_var, q.loc - p.loc)
    return jnp.where(converged, grad_loc, jnp.nan), at_p.grad_var


def _are_few(predictors: Predictors, q: Gaussian) -> bool:
    """Whether the search is cheaper over the predictors than over the parameters: those of one datum, or few.

    Independent coordinates are not those of their predictors.
    """
    few = predictors.mean.shape[0] == 1 or predictors.mean.size <= q.loc.shape[0]
    return few and not family_of(q).diagonal_only


def _in_predictors(
    q: Gaussian,
    anchor: Gaussian,
    datum: rules.Datum,
    predictors: Predictors,
    rate: Array,
    before: Array,
) -> tuple[Array, Curvature]:
    """Gradients at the solution as seen from the mean of q, by a search over the predictors of a round."""
    family, shape = family_of(q), predictors.mean.shape
    jacobian = jnp.reshape(predictors.jacobian, (-1, q.loc.shape[0]))
    mean = jnp.ravel(predictors.mean) - matmul(jacobian, q.loc - anchor.loc)
    covariance = predictor_covariance(anchor, jacobian[None])[0]
    # A predictor without spread has no step.
    least = jnp.finfo(mean.dtype).eps * jnp.trace(covariance)
    none = jnp.sqrt(jnp.finfo(mean.dtype).tiny)
    eye = jnp.eye(mean.shape[0], dtype=mean.dtype)
    covariance = covariance + jnp.where(least > 0, least, none) * eye
    in_u = FullRank(mean, jnp.linalg.cholesky(covariance))

    rows = jnp.reshape(eye, (*shape, -1))
    mask = rows_of(datum.mask, shape[0])

    def evaluate(p: Gaussian) -> Evaluation:
        return evaluate_predictors(
            p, Predictors(jnp.reshape(p.loc, shape), rows, predictors.moments), mask
        )

    of_u = datum._replace(evaluate=evaluate, predictors=None)
    p, at_p, converged = descent.search(in_u, _narrow(in_u, eye), of_u, rate, before)
    shift = matmul(jacobian, q.loc - anchor.loc) + mean - p.loc
    grad_loc = matmul(carry(at_p.grad_loc, at_p.grad_var, shift), jacobian)
    in_rows = cast(Rows, at_p.grad_var)
    grad_var = family.covariance_gradient(
        q, matmul(in_rows.x, jacobian), in_rows.weights
    )
    return jnp.where(converged, grad_loc, jnp.nan), grad_var


def _narrow(anchor: Gaussian, x: Array) -> Gaussian:
    """The anchor given rows of curvature 1: no predictor of them has a variance above 1.

    Under a wide prior an expected loss may be beyond any number, and its curvature with it.
    """
    family, one = family_of(anchor), jnp.ones((), anchor.loc.dtype)
    curvature = family.covariance_gradient(
        anchor, x, jnp.full(x.shape[:1], 0.5, anchor.loc.dtype)
    )
    memory, no_loc = family.init(anchor), jnp.zeros_like(anchor.loc)
    return family.canonical(
        family.natural_step(memory, anchor, anchor, no_loc, curvature, Gain(one, one))[
            0
        ]
    )
