"""A machine's fit of its rows to a cavity: the local problem of partitioned variational inference."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, ArrayLike, PyTree, common_rows, is_traced
from numpyro_tempered.gaussian.descent import (
    Derivatives,
    Method,
    Objective,
    Result,
    minimise,
)
from numpyro_tempered.gaussian.descent.base import (
    Evaluate,
    GaussianTerm,
    derivatives_of,
    diagonal,
)
from numpyro_tempered.gaussian.expectations.base import Data, Expectation
from numpyro_tempered.gaussian.families.base import Gaussian, family_of
from numpyro_tempered.gaussian.natural import Natural, apply, to_natural
from numpyro_tempered.online.drivers import check_data, check_mask
from numpyro_tempered.online.stream import fill_rows

# A start whose expected loss is beyond the dtype is narrowed to a tenth this often.
MAX_NARROWINGS = 6


class Spec(NamedTuple):
    """What a local fit is compiled for."""

    expectation: Expectation
    method: Method
    max_evaluations: int


class Settings(NamedTuple):
    """Numbers of a local fit, which compile nothing anew."""

    alpha: Array
    damping: Array
    tolerance: Array


class Cavity(NamedTuple):
    """The posterior without a factor, exp(pullᵀ s - ½ sᵀ P s) with s = θ - center; P may be indefinite.

    Attributes:
        center: A point, shape ``(d,)``.
        precision: P, ``(d, d)`` or ``(d,)``.
        pull: Shape ``(d,)``.
    """

    center: Array
    precision: Array
    pull: Array

    def slope(self, theta: Array) -> Array:
        """The gradient of the negative logarithm at θ."""
        return apply(self.precision, theta - self.center) - self.pull

    def derivatives(self, q: Gaussian) -> Derivatives:
        """E_q of the negative logarithm, up to a constant, and its derivatives."""
        quadratic = GaussianTerm(
            self.center, self.precision, jnp.zeros((), self.pull.dtype)
        )
        at = derivatives_of(quadratic, q)
        shift = q.loc - self.center
        return Derivatives(
            at.value - jnp.sum(self.pull * shift), at.grad - self.pull, at.hessian
        )


class Fit(NamedTuple):
    """The end of a local fit.

    Attributes:
        natural: The factor, around the cavity's center.
        expected_loss: α E[L] at the start.
        skipped: Rows left out because they are not finite.
        converged: Whether it is stationary.
    """

    natural: Natural
    expected_loss: Array
    skipped: Array
    converged: Array


def check_rows(
    expectation: Expectation, data: Data, mask: ArrayLike | None
) -> tuple[Data, Array]:
    """The rows of a machine and which of them are on; of no rows one that is off.

    Raises:
        TypeError: If the mask is not boolean.
        ValueError: If leading axes differ, or the loss does not admit the data.
    """
    leaves = jax.tree.leaves(data)
    num_rows = common_rows(
        leaves, "refit", hint=" Constants belong inside the model or the loss."
    )
    on = check_mask(mask, data, num_axes=1)
    on = jnp.ones(num_rows, bool) if on is None else on
    if num_rows == 0:
        return jax.tree.map(
            lambda leaf: jnp.ones((1, *leaf.shape[1:]), leaf.dtype), data
        ), jnp.zeros(1, bool)
    check_data(expectation, data, None if is_traced(on) or bool(jnp.all(on)) else on)
    return data, on


def fill(data: Data, on: Array) -> tuple[Data, Array, Array]:
    """The data without rows that are off or not finite, which rows are left, and the number not finite."""
    finite = jnp.ones(on.shape, bool)
    for leaf in jax.tree.leaves(data):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            finite &= jnp.all(jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim)))
    left = on & finite
    # Where no row is left there is none to copy, and 1 is what most losses admit.
    some = jnp.any(left)
    filled = jax.tree.map(
        lambda leaf: jnp.where(some, leaf, jnp.ones((), leaf.dtype)),
        fill_rows(data, left),
    )
    return filled, left, jnp.sum(on & ~finite, dtype=jnp.int32)


@functools.lru_cache(maxsize=256)
def _likelihood(expectation: Expectation) -> Evaluate:
    """α E_q[L] and its derivatives, as a function of q, rows with their mask and α, and a key."""

    def evaluate(q: Gaussian, data: PyTree, rng_key: Array | None) -> Derivatives:
        arrays, on, alpha = data
        at = expectation.evaluate(q, *arrays, mask=on, rng_key=rng_key)
        grad_var = (
            at.grad_var if isinstance(at.grad_var, Array) else at.grad_var.dense()
        )
        return Derivatives(
            alpha * at.objective, alpha * at.grad_loc, 2.0 * alpha * grad_var
        )

    return evaluate


@functools.lru_cache(maxsize=256)
def _total(expectation: Expectation) -> Evaluate:
    """The same with the cavity's term."""
    likelihood = _likelihood(expectation)

    def evaluate(q: Gaussian, data: PyTree, rng_key: Array | None) -> Derivatives:
        rows, cavity = data
        parts = likelihood(q, rows, rng_key), cavity.derivatives(q)
        return jax.tree.map(jnp.add, *parts)

    return evaluate


def refit(
    spec: Spec,
    cavity: Cavity,
    q: Gaussian,
    data: tuple[Data, Array],
    settings: Settings,
    rng_key: Array | None,
) -> Fit:
    """The Gaussian that fits rows and cavity, from ``q`` on; a pure function to be compiled."""
    expectation = spec.expectation
    arrays, on, skipped = fill(*data)
    rows = (arrays, on, settings.alpha)
    likelihood = _likelihood(expectation)
    start, expected_loss = _narrow(likelihood, q, rows, rng_key)
    exact = not expectation.needs_key and expectation.of_predictor is not None
    objective = Objective(
        _total(expectation),
        (rows, cavity),
        expectation.needs_key,
        exact=exact,
        shared=True,
    )
    result = minimise(
        objective,
        start,
        method=spec.method,
        tolerance=settings.tolerance,  # type: ignore[arg-type]
        max_evaluations=spec.max_evaluations,
        rng_key=rng_key,
    )
    return Fit(
        _factor(cavity, result, family_of(q).diagonal_only),
        expected_loss.astype(q.loc.dtype),
        skipped,
        result.converged,
    )


def _factor(cavity: Cavity, result: Result, is_diagonal: bool) -> Natural:
    """The factor, around the cavity's center, that a local fit ends at.

    At the minimiser p it is -α ∇E_p[L] in expectation parameters, which rounds least; that is a step beyond a p
    that is none, where the factor that makes p of the cavity is safe.
    """
    p, at = result.posterior, result.derivatives
    of_loss = (diagonal(at.hessian) if is_diagonal else at.hessian) - cavity.precision
    of_p = to_natural(p, cavity.center)
    precision = jnp.where(result.converged, of_loss, of_p.precision - cavity.precision)
    force = apply(precision, p.loc - cavity.center)
    by_gradient = force + cavity.slope(p.loc) - at.grad
    linear = jnp.where(result.converged, by_gradient, force + cavity.slope(p.loc))
    finite = jnp.isfinite(result.elbo)
    return Natural(
        jnp.where(finite, linear, jnp.nan), jnp.where(finite, precision, jnp.nan)
    )


def _narrow(
    likelihood: Evaluate, q: Gaussian, rows: PyTree, rng_key: Array | None
) -> tuple[Gaussian, Array]:
    """A start at the mean of ``q`` where the expected loss is finite, and that loss at ``q`` itself.

    Under a wide prior the expected loss of a count is beyond any number.
    """
    family, root = family_of(q), family_of(q).root(q)

    def narrowed(number: Array) -> Gaussian:
        scaled = family.with_root(
            q.loc, root * jnp.power(jnp.asarray(0.1, root.dtype), number)
        )
        return jax.tree.map(functools.partial(jnp.where, number > 0), scaled, q)

    def loss(number: Array) -> Array:
        return likelihood(narrowed(number), rows, rng_key).value

    def go_on(carry: tuple[Array, Array, Array]) -> Array:
        number, value, _ = carry
        return (number < 0) | (~jnp.isfinite(value) & (number < MAX_NARROWINGS))

    def narrow(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number = carry[0] + 1
        value = loss(number)
        return number, value, jnp.where(number == 0, value, carry[2])

    none = jnp.full((), jnp.nan, q.loc.dtype)
    number, _, first = jax.lax.while_loop(
        go_on, narrow, (jnp.full((), -1, jnp.int32), none, none)
    )
    return narrowed(number), first
