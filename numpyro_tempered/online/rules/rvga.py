"""The recursive variational Gaussian approximation (LBB22): the implicit step of one datum."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.expectations.base import Evaluation, Moments, Predictors
from numpyro_tempered.gaussian.families.base import Curvature, Gain, Gaussian, carry, family_of
from numpyro_tempered.online import base as rules
from numpyro_tempered.online.rules.forgetting import Forgetting
from numpyro_tempered.online.rules.ngvi import as_forgetting, gain_of, ngvi

# Newton converges in five iterations on average; a row of size 1e6 takes about twelve.
MAX_NEWTON = 40
MAX_STEPS = 64
NUM_HALF_STEPS = 7


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
    where the loss is quadratic. Elsewhere an explicit step overshoots where the loss curves more at its end, and
    freezes where it curves less, as with a wide prior, counts, a scale or an outlier. The implicit step does not.

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
        An online :class:`Rule` for every family. A round without a finite solution is rejected and counted.

    Raises:
        ValueError: If an argument is out of range, or (when traced) ``step_size`` has an entry for each
            coordinate.

    References:
        LBB22.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule, loss = nt.online.rvga(), nt.expectations.poisson()
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(1), jnp.full(1, 3.0)))
        >>> state, losses = nt.online.run(rule, loss, state, jnp.ones((50, 1)), jnp.full(50, 4.0))
        >>> print(f"{state.posterior.loc[0]:.2f} {state.posterior.scale[0]:.2f}")  # log(4) and 1 / sqrt(200)
        1.37 0.07
    """
    rate, forget = rules.as_schedule(step_size), as_forgetting(evidence, forget)

    def refine(datum: rules.Datum, first: Evaluation, state: rules.OnlineState) -> Evaluation:
        q, gain = state.posterior, gain_of(rate, forget, state)
        beta = jnp.asarray(gain.step, q.loc.dtype)
        if beta.ndim:
            raise ValueError(
                f"rvga takes one step_size for all coordinates, got shape {beta.shape}: ngvi takes one for each."
            )
        anchor = _anchor(state, gain)
        predictors = None if datum.predictors is None else datum.predictors(q.loc)
        if predictors is not None and predictors.mean.shape == (1,):
            grad_loc, grad_var = _one_predictor(q, anchor, predictors, beta)
        else:
            grad_loc, grad_var = _natural_steps(q, anchor, datum, beta)
        return first._replace(grad_loc=grad_loc, grad_var=grad_var)

    rule = ngvi(step_size, forget=forget, box=box)
    return rule._replace(refine=refine, name="rvga")


def _anchor(state: rules.OnlineState, gain: Gain) -> Gaussian:
    """What the datum is weighed against: the posterior after forgetting."""
    q, family = state.posterior, family_of(state.posterior)
    if gain.keeps_all and not gain.pulls:
        return q
    no_loc = jnp.zeros_like(q.loc)
    no_curvature = family.covariance_gradient(q, no_loc[None], jnp.zeros((1,), q.loc.dtype))
    anchor, _ = family.natural_step(state.memory, q, state.prior, no_loc, no_curvature, gain)
    return family.canonical(anchor)


class _Point(NamedTuple):
    """A Gaussian predictor: mean u, and t with variance Σ w / (1 + b w), b = (exp(t) - 1) / Σ w."""

    u: Array
    t: Array


class _Look(NamedTuple):
    """The objective at a point: its value, the Newton step from there and its squared length."""

    value: Array
    step: _Point
    decrement: Array
    slope: Array
    curvature: Array


class _Search(NamedTuple):
    num_trials: Array
    point: _Point
    look: _Look
    step: _Point


def _one_predictor(q: Gaussian, anchor: Gaussian, predictors: Predictors, rate: Array) -> tuple[Array, Curvature]:
    """Gradients at the solution as seen from the mean of q, for a loss of one predictor."""
    family, x = family_of(q), predictors.jacobian[0]
    offset = jnp.zeros_like(q.loc) if anchor is q else q.loc - anchor.loc
    mean = predictors.mean[0] - jnp.dot(x, offset)
    if family.diagonal_only:
        # A datum of curvature b adds b x² to the precision of each coordinate.
        shares = jnp.square(family.root(anchor) * x)
    else:
        shares = family.predictor_variance(anchor, x[None])
    slope, curvature = _solve(predictors.moments, mean, shares, rate)
    grad_var = family.covariance_gradient(q, x[None], 0.5 * curvature[None])
    if family.diagonal_only:
        shift = offset + jnp.square(family.root(anchor)) * x * (rate * slope)
        grad_loc = x * slope + jnp.square(x) * (curvature * shift)
    else:
        grad_loc = x * (slope + curvature * (jnp.dot(x, offset) + jnp.sum(shares) * rate * slope))
    return grad_loc, grad_var


def _solve(
    moments: Callable[[Array, Array], Moments], mean: Array, shares: Array, rate: Array
) -> tuple[Array, Array]:
    r"""The slope E[φ'(u)] and the curvature E[φ''(u)] at the solution.

    Minimises :math:`(u-u_0)^2/2\nu + \psi(b) + \beta E\phi(u + s z)` with :math:`\nu = \sum w_j`,
    :math:`s^2 = \sum w_j/(1+b w_j)` and :math:`\psi = \tfrac12\sum [1/(1+b w_j) + \log(1+b w_j)]`: up to a
    constant the KL divergence that it takes to give the predictor that mean and variance. With one w it is
    convex in u and log s where φ is convex.

    Args:
        moments: Of the loss at Gaussian predictors, arrays ``(1,)``.
        mean: u0.
        shares: w, what each coordinate adds to the variance of the predictor; one number for a family with a
            covariance.
        rate: β.
    """
    variance = jnp.sum(shares)
    # A predictor without spread has no step; a loss without weight no slope.
    nu = jnp.where(variance > 0, variance, 1.0)
    eps = jnp.finfo(mean.dtype).eps

    def look(point: _Point) -> _Look:
        growth = jnp.exp(point.t) / nu
        widened = 1.0 + (jnp.expm1(point.t) / nu) * shares
        ratio = shares / widened
        v = jnp.sum(ratio)
        # In an order in which nothing overflows.
        dv = -jnp.sum(ratio * (growth * ratio))
        ddv = dv + 2.0 * jnp.sum(ratio * jnp.square(growth * ratio))

        def derivatives(u: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
            of_u = moments(u[None], v[None])
            return of_u.second[0], (of_u.objective[0], of_u.first[0])

        (second, (loss, first)), (in_u, in_v) = _with_partials(derivatives, point.u, v)
        excess = rate * second - jnp.expm1(point.t) / nu
        value = 0.5 * jnp.square(point.u - mean) / nu + rate * loss
        value = value + 0.5 * jnp.sum(1.0 / widened + jnp.log(widened))
        grad_u, grad_t = (point.u - mean) / nu + rate * first, 0.5 * excess * dv
        # The Hessian itself where it is positive definite. Elsewhere that of the fixed-point map of b, which
        # finds its way back from a variance that is far too small.
        uu = 1.0 / nu + rate * jnp.maximum(second, 0.0)
        tt = 0.5 * ((rate * in_v * dv - growth) * dv + excess * ddv)
        to_fixed_point = jnp.log1p(rate * jnp.maximum(second, 0.0) * nu) - point.t
        least = -0.25 * growth * dv
        secant = -grad_t / jnp.where(to_fixed_point == 0.0, 1.0, to_fixed_point)
        tt = jnp.where(tt > least, tt, jnp.where(secant > 0.0, jnp.minimum(secant, least), least))
        root_u, root_t = jnp.sqrt(uu), jnp.sqrt(jnp.where(tt > 0.0, tt, 1.0))
        cosine = jnp.clip(0.5 * rate * (in_u / root_u) * (dv / root_t), -0.9, 0.9)
        scaled_u, scaled_t = grad_u / root_u, grad_t / root_t
        determinant = 1.0 - jnp.square(cosine)
        step = _Point(
            (cosine * scaled_t - scaled_u) / determinant / root_u,
            (cosine * scaled_u - scaled_t) / determinant / root_t,
        )
        decrement = -(step.u * grad_u + step.t * grad_t)
        return _Look(value, step, decrement, first, second)

    def go_on(search: _Search) -> Array:
        return (search.num_trials < MAX_NEWTON) & (search.look.decrement > eps**1.25)

    def body(search: _Search) -> _Search:
        trial = jax.tree.map(jnp.add, search.point, search.step)
        at_trial = look(trial)
        noise = 8.0 * eps * (1.0 + jnp.abs(search.look.value))
        better = at_trial.value <= search.look.value + noise
        point, at_point = rules.choose(better, (trial, at_trial), (search.point, search.look))
        # The first trial is the explicit step, after which a shorter one of its direction makes no sense.
        quarter = jax.tree.map(lambda s: 0.25 * s, search.step)
        retry = rules.choose(search.num_trials == 0, search.look.step, quarter)
        return _Search(search.num_trials + 1, point, at_point, rules.choose(better, at_trial.step, retry))

    zero = jnp.zeros_like(mean)
    start = _Point(mean, zero)
    first = look(start)
    widening = jnp.log1p(rate * jnp.maximum(first.curvature, 0.0) * nu)
    explicit = _Point(-nu * rate * first.slope * jnp.exp(-widening), widening)
    search = _Search(jnp.zeros((), jnp.int32), start, first, explicit)
    search = jax.lax.while_loop(go_on, body, search)
    # Where Newton's method stops short of the solution, the point it has reached is a posterior all the same.
    # Where the datum outweighs the prior, a rounded slope would move the mean by more than a rounded point.
    done = (search.look.decrement <= jnp.sqrt(eps)) & (rate * search.look.curvature * nu < 1.0)
    weight = jnp.where(rate > 0, rate, 1.0)
    slope = jnp.where(done, search.look.slope, (mean - search.point.u) / (nu * weight))
    # Without a derivative there is no step: the round is rejected.
    slope = jnp.where(jnp.isfinite(search.look.decrement), slope, jnp.nan)
    return slope, jnp.where(done, search.look.curvature, jnp.expm1(search.point.t) / (nu * weight))


def _with_partials(
    f: Callable[[Array, Array], tuple[Array, tuple[Array, Array]]], u: Array, v: Array
) -> tuple[tuple[Array, tuple[Array, Array]], tuple[Array, Array]]:
    """The value of ``f`` with its other outputs, and the derivatives of the value in u and v."""
    one, zero = jnp.ones_like(u), jnp.zeros_like(u)
    value, in_u, rest = jax.jvp(f, (u, v), (one, zero), has_aux=True)
    _, in_v, _ = jax.jvp(f, (u, v), (zero, one), has_aux=True)
    return (value, rest), (in_u, in_v)


class _Descent(NamedTuple):
    num_trials: Array
    q: Gaussian
    evaluation: Evaluation
    value: Array
    size: Array
    fall: Array


def _natural_steps(q: Gaussian, anchor: Gaussian, datum: rules.Datum, rate: Array) -> tuple[Array, Curvature]:
    """Gradients at the solution as seen from the mean of q, by natural-gradient steps in q."""
    family, eps = family_of(q), jnp.finfo(q.loc.dtype).eps
    anchor = family.canonical(anchor)

    def objective(p: Gaussian, evaluation: Evaluation) -> Array:
        return family.kl(p, anchor) + rate * evaluation.objective

    def step(p: Gaussian, at_p: Evaluation, size: Array) -> Gaussian:
        gain = Gain(size * rate, 1.0 - size, size)
        trial, _ = family.natural_step(family.start(p), p, anchor, at_p.grad_loc, at_p.grad_var, gain)
        return family.canonical(trial)

    def half_step(_: Array, p: Gaussian) -> Gaussian:
        trial = step(p, datum.evaluate(p), jnp.asarray(0.5, q.loc.dtype))
        return rules.choose(jnp.isfinite(jnp.sum(family.witness(trial))), trial, p)

    def go_on(search: _Descent) -> Array:
        return (search.num_trials < MAX_STEPS) & (search.size > 1e-4) & (search.fall > eps)

    def body(search: _Descent) -> _Descent:
        trial = step(search.q, search.evaluation, search.size)
        at_trial = datum.evaluate(trial)
        value = objective(trial, at_trial)
        better = value <= search.value + 8.0 * eps * (1.0 + jnp.abs(search.value))
        after = _Descent(
            search.num_trials, trial, at_trial, value, jnp.minimum(2.0 * search.size, 1.0), search.value - value
        )
        after = rules.choose(better, after, search._replace(size=0.5 * search.size))
        return after._replace(num_trials=search.num_trials + 1)

    if datum.is_drawn:
        # The gradients are no derivatives of an average over the draws: their fixed point is the solution.
        p = jax.lax.fori_loop(0, NUM_HALF_STEPS, half_step, anchor)
        evaluation, done = datum.evaluate(p), jnp.asarray(True)
    else:
        evaluation, one = datum.evaluate(anchor), jnp.ones((), q.loc.dtype)
        start = _Descent(
            jnp.zeros((), jnp.int32), anchor, evaluation, objective(anchor, evaluation), one, jnp.inf * one
        )
        _, p, evaluation, value, _, fall = jax.lax.while_loop(go_on, body, start)
        # Gradients at a point which is no solution would lead elsewhere: NaN has the round rejected.
        done = fall <= jnp.sqrt(eps) * (1.0 + jnp.abs(value))
    grad_loc = carry(evaluation.grad_loc, evaluation.grad_var, q.loc - p.loc)
    return jnp.where(done, grad_loc, jnp.nan), evaluation.grad_var
