"""The implicit step of a loss of one predictor, by Newton's method in two numbers."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array
from numpyro_tempered.gaussian.expectations.base import Moments
from numpyro_tempered.online.base import choose

# Newton converges in four iterations on average; a row of size 1e6 takes about twelve.
MAX_NEWTON = 40


class _Point(NamedTuple):
    """A Gaussian predictor: mean u, and t with variance Σ w / (1 + b w), b = (exp(t) - 1) / Σ w."""

    u: Array
    t: Array


class _Look(NamedTuple):
    """The objective at a point: its value, the Newton step from there and its squared length.

    Slope and curvature are those at the end of that step, to its second order.
    """

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


def solve(
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

    def moments_at(u: Array, v: Array) -> tuple[Array, tuple[Array, Array]]:
        of_u = moments(u[None], v[None])
        return of_u.second[0], (of_u.objective[0], of_u.first[0])

    def look(point: _Point) -> _Look:
        growth = jnp.exp(point.t) / nu
        widened = 1.0 + (jnp.expm1(point.t) / nu) * shares
        ratio = shares / widened
        v = jnp.sum(ratio)
        # In an order in which nothing overflows.
        dv = -jnp.sum(ratio * (growth * ratio))
        ddv = dv + 2.0 * jnp.sum(ratio * jnp.square(growth * ratio))

        (second, (loss, first)), (in_u, in_v) = _with_partials(moments_at, point.u, v)
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
        tt = jnp.where(
            tt > least, tt, jnp.where(secant > 0.0, jnp.minimum(secant, least), least)
        )
        root_u, root_t = jnp.sqrt(uu), jnp.sqrt(jnp.where(tt > 0.0, tt, 1.0))
        cosine = jnp.clip(0.5 * rate * (in_u / root_u) * (dv / root_t), -0.9, 0.9)
        scaled_u, scaled_t = grad_u / root_u, grad_t / root_t
        determinant = 1.0 - jnp.square(cosine)
        step = _Point(
            (cosine * scaled_t - scaled_u) / determinant / root_u,
            (cosine * scaled_u - scaled_t) / determinant / root_t,
        )
        decrement = -(step.u * grad_u + step.t * grad_t)
        to_v = dv * step.t
        slope, curvature = (
            first + second * step.u + 0.5 * in_u * to_v,
            second + in_u * step.u + in_v * to_v,
        )
        return _Look(value, step, decrement, slope, curvature)

    def go_on(search: _Search) -> Array:
        return (search.num_trials < MAX_NEWTON) & (search.look.decrement > eps**0.75)

    def body(search: _Search) -> _Search:
        trial = jax.tree.map(jnp.add, search.point, search.step)
        at_trial = look(trial)
        noise = 8.0 * eps * (1.0 + jnp.abs(search.look.value))
        better = (at_trial.value <= search.look.value + noise) & jnp.isfinite(
            at_trial.value
        )
        point, at_point = choose(better, (trial, at_trial), (search.point, search.look))
        quarter = jax.tree.map(lambda s: 0.25 * s, search.step)
        # The first trial is the explicit step, after which a shorter one of its direction makes no sense: a
        # variance below 1 is tried, and then Newton's step from the start.
        retry = choose(search.num_trials == 0, _Point(zero, jnp.log1p(nu)), quarter)
        retry = choose(search.num_trials == 1, _Point(zero, zero), retry)
        return _Search(
            search.num_trials + 1, point, at_point, choose(better, at_trial.step, retry)
        )

    zero = jnp.zeros_like(mean)
    # The first look needs no derivatives, and is that of the evaluation at hand.
    second, (loss, first) = moments_at(mean, variance)
    start = 0.5 * shares.size + rate * loss
    widening = jnp.log1p(rate * jnp.maximum(second, 0.0) * nu)
    explicit = _Point(-nu * rate * first * jnp.exp(-widening), widening)
    value = jnp.where(jnp.isfinite(start), start, jnp.inf)
    unknown = _Look(value, explicit, jnp.full_like(mean, jnp.inf), first, second)
    search = _Search(jnp.zeros((), jnp.int32), _Point(mean, zero), unknown, explicit)
    search = jax.lax.while_loop(go_on, body, search)
    last, point = search.look, jax.tree.map(jnp.add, search.point, search.look.step)
    # Where Newton's method stops short of the solution, the point it has reached is a posterior all the same.
    near = last.decrement <= jnp.sqrt(eps)
    point = choose(near, point, search.point)
    # Where the datum outweighs the prior, a rounded slope would move the mean by more than a rounded point.
    done = near & (jnp.abs(rate * last.curvature * nu) < 1.0)
    weight = jnp.where(rate > 0, rate, 1.0)
    slope = jnp.where(done, last.slope, (mean - point.u) / (nu * weight))
    # Without a derivative there is no step: the round is rejected.
    slope = jnp.where(jnp.isfinite(last.decrement), slope, jnp.nan)
    return slope, jnp.where(done, last.curvature, jnp.expm1(point.t) / (nu * weight))


def solve_quadratic(
    moments: Callable[[Array, Array], Moments], mean: Array, shares: Array, rate: Array
) -> tuple[Array, Array]:
    """The same for a loss that is quadratic in the predictor: no search."""
    variance = jnp.sum(shares)
    of_u = moments(mean[None], variance[None])
    curvature = of_u.second[0]
    return of_u.first[0] / (1.0 + rate * variance * curvature), curvature


def _with_partials(
    f: Callable[[Array, Array], tuple[Array, tuple[Array, Array]]], u: Array, v: Array
) -> tuple[tuple[Array, tuple[Array, Array]], tuple[Array, Array]]:
    """The value of ``f`` with its other outputs, and the derivatives of the value in u and v."""
    one, zero = jnp.ones_like(u), jnp.zeros_like(u)
    value, in_u, rest = jax.jvp(f, (u, v), (one, zero), has_aux=True)
    _, in_v, _ = jax.jvp(f, (u, v), (zero, one), has_aux=True)
    return (value, rest), (in_u, in_v)
