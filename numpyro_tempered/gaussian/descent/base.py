r"""Gaussian variational inference as the minimisation of a free energy.

For a target density proportional to exp(-f) and a Gaussian q = N(m, V),

.. math:: F(q) = E_q[f] - \mathrm{entropy}(q) = \mathrm{KL}(q, \mathrm{target}) - \log\int e^{-f},

the negative ELBO. A tempered posterior has f = -α log L - log π. What methods need of f at q is in
:class:`Derivatives`.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, solve_triangular

from numpyro_tempered.core import Array, ArrayLike, PyTree, Scalar, check_number, matmul
from numpyro_tempered.gaussian.expectations.base import Evaluation, Expectation
from numpyro_tempered.gaussian.families.base import (
    Gaussian,
    Q,
    able,
    family_of,
    supports,
)


class Derivatives(NamedTuple):
    """E_q[f] and its derivatives at one q.

    Attributes:
        value: E_q[f], a scalar in nats.
        grad: g = E_q[∇f], shape ``(d,)``.
        hessian: H = E_q[∇²f], twice the gradient in the covariance: shape ``(d, d)``, or for a mean-field q its
            diagonal ``(d,)``.
    """

    value: Array
    grad: Array
    hessian: Array


class Method(NamedTuple):
    """A way to lower the free energy, as pure functions.

    Attributes:
        step: ``(q, derivatives, size) -> q``, a step of that size; not finite where it leads to no Gaussian.
        max_size: ``(q, derivatives) -> size``, the longest step from here.
        is_too_long: ``(q, derivatives) -> bool``, whether the requested size is beyond what the method admits.
        backtrack: Whether a step that does not improve is halved.
        dense: ``d -> bool``, whether a mean-field q of d coordinates takes the whole Hessian all the same.
        name: Short name, for reports and errors.
    """

    step: Callable[[Gaussian, Derivatives, Array], Gaussian]
    max_size: Callable[[Gaussian, Derivatives], Array]
    is_too_long: Callable[[Gaussian, Derivatives], Array]
    backtrack: bool
    dense: Callable[[int], bool]
    name: str


def log_volume(q: Gaussian) -> Array:
    """The logarithm of the root's determinant; of a canonical q."""
    return jnp.sum(jnp.log(diagonal(family_of(q).root(q))))


def entropy(q: Gaussian) -> Array:
    """The entropy of a canonical ``q`` in nats."""
    return log_volume(q) + 0.5 * q.loc.shape[0] * math.log(2.0 * math.pi * math.e)


def whitened(q: Gaussian, derivatives: Derivatives) -> tuple[Array, Array]:
    """Gradient and Hessian in the coordinates in which q is standard: Sᵀg and SᵀHS, V = S Sᵀ."""
    root = family_of(q).root(q)
    if root.ndim == 1:
        return root * derivatives.grad, jnp.square(root) * diagonal(derivatives.hessian)
    hessian = matmul(root.T, matmul(derivatives.hessian, root))
    return matmul(root.T, derivatives.grad), 0.5 * (hessian + hessian.T)


def diagonal(matrix: Array) -> Array:
    """The diagonal ``(d,)`` of a matrix, which may be a diagonal already."""
    return matrix if matrix.ndim == 1 else jnp.diagonal(matrix)


def newton_direction(derivatives: Derivatives, fallback: Array) -> Array:
    """H^-1 g by Cholesky, or ``fallback`` where H is a diagonal only or not positive definite."""
    if derivatives.hessian.ndim == 1:
        return fallback
    lower = jnp.linalg.cholesky(derivatives.hessian)
    direction = cho_solve((lower, True), derivatives.grad)
    return jnp.where(jnp.all(jnp.isfinite(direction)), direction, fallback)


def stationarity(q: Gaussian, derivatives: Derivatives) -> Array:
    r"""How far q is from a stationary point of the free energy, in nats.

    .. math:: \tfrac12 g^\top V g + \tfrac14 \|R^\top H R - I\|_F^2, \qquad V = R R^\top

    It is 0 exactly where g = 0 and H = V^-1, and near such a point it is the KL gap to it to second order, where
    f is nearly quadratic over the width of q. For a mean-field q only the diagonals of H and V are compared, and
    the first term is ½ gᵀ H^-1 g where the whole H is at hand; a diagonal is not enough where coordinates
    correlate.

    Args:
        q: A :class:`.MeanField` or :class:`.FullRank`.
        derivatives: Those of f at q.

    Returns:
        A scalar, at least 0.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1))
        >>> f = nt.gaussian.descent.Derivatives(jnp.array(0.0), jnp.array([0.1]), jnp.array([1.0]))
        >>> print(f"{nt.gaussian.descent.stationarity(q, f):.3f}")
        0.005
    """
    grad, hessian = whitened(q, derivatives)
    if hessian.ndim == 1:
        # By Newton's direction where there is one: V is far from H^-1 where coordinates correlate.
        direction = newton_direction(derivatives, family_of(q).root(q) * grad)
        return 0.5 * jnp.sum(derivatives.grad * direction) + 0.25 * jnp.sum(
            jnp.square(hessian - 1.0)
        )
    identity = jnp.eye(grad.shape[0], dtype=grad.dtype)
    return 0.5 * jnp.sum(jnp.square(grad)) + 0.25 * jnp.sum(
        jnp.square(hessian - identity)
    )


def gap_bound(q: Gaussian, derivatives: Derivatives, precision: ArrayLike) -> Array:
    r"""An upper bound on the KL gap to the best Gaussian, for a target that is strongly log-concave.

    Where f minus ½ θᵀAθ is convex, F is 1-convex along Bures-Wasserstein geodesics in the metric of A, and so

    .. math:: F(q) - \min F \le \tfrac12 \big[g^\top A^{-1} g
              + \mathrm{tr}\, A^{-1}(H - V^{-1})\, V\, (H - V^{-1})\big],

    over full-rank or over mean-field Gaussians, whichever q is. With a Gaussian prior of precision A it holds for
    every likelihood that is log-concave in θ, tempered or not: generalised linear models with their canonical
    link, for instance. It is as exact as ``derivatives``.

    Args:
        q: A :class:`.MeanField` or :class:`.FullRank`.
        derivatives: Those of f at q.
        precision: A, positive: a scalar, or a diagonal ``(d,)``, or for a full-rank q a matrix ``(d, d)``.

    Returns:
        A scalar in nats.

    Raises:
        ValueError: If ``precision`` has another shape.

    References:
        Lam22, Theorem 1 and its strong convexity; the inequality is Polyak and Łojasiewicz's.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1))
        >>> f = nt.gaussian.descent.Derivatives(jnp.array(0.0), jnp.array([0.1]), jnp.array([2.0]))
        >>> print(f"{nt.gaussian.descent.gap_bound(q, f, 2.0):.4f}")  # the gap is 0.1591
        0.2525
    """
    a = jnp.asarray(precision, q.loc.dtype)
    (d,), family = q.loc.shape, family_of(q)
    shapes = [(), (d,)] + ([] if family.diagonal_only else [(d, d)])
    if a.shape not in shapes:
        raise ValueError(
            f"precision must have one of the shapes {shapes}, got {a.shape}."
        )
    lower = family.root(family.canonical(q))
    if lower.ndim == 1:
        in_scale = lower * (diagonal(derivatives.hessian) - 1.0 / jnp.square(lower))
        return 0.5 * jnp.sum((jnp.square(derivatives.grad) + jnp.square(in_scale)) / a)
    # (H - V^-1) S, of which the trace is a sum of squares.
    inverse = solve_triangular(
        lower, jnp.eye(d, dtype=lower.dtype), lower=True, trans=1
    )
    columns = jnp.concatenate(
        [derivatives.grad[:, None], matmul(derivatives.hessian, lower) - inverse],
        axis=1,
    )
    if a.ndim < 2:
        return 0.5 * jnp.sum(jnp.square(columns) / jnp.broadcast_to(a, (d,))[:, None])
    return 0.5 * jnp.sum(
        jnp.square(solve_triangular(jnp.linalg.cholesky(a), columns, lower=True))
    )


def require_gaussian(q: Q, name: str = "init") -> Q:
    """The argument of that name as floating arrays of one dtype.

    Raises:
        TypeError: If its family does not hold a Gaussian of any root.
        ValueError: If its shapes disagree, or (outside of transformations) values are not those of a Gaussian.
    """
    if not supports(q, "from_root"):
        raise TypeError(
            f"{name} must be a {able('from_root', 'or')}, got {type(q).__name__}."
        )
    return family_of(q).check(q)


# E_q[f] and its derivatives at q, from data and a key of random numbers.
Evaluate: TypeAlias = Callable[[Gaussian, PyTree, Array | None], Derivatives]


class Objective(NamedTuple):
    """A function of q whose free energy is minimised; call it for :class:`Derivatives`.

    Attributes:
        evaluate: ``(q, data, rng_key) -> Derivatives`` of f = -α log L - log π.
        data: What it is evaluated on, a pytree of arrays.
        needs_key: Whether ``evaluate`` draws random numbers: the same ones at every q for the same key.
        precision: That of a Gaussian prior on all of θ, ``(d,)`` or ``(d, d)``, for :func:`gap_bound`; else None.
        exact: Whether gradient and Hessian are exactly the derivatives of the value, as of a closed form or a
            quadrature, and not of draws or of a predictor linearised at the mean.
        shared: Whether ``evaluate`` serves other data too, so that its compiled loop is worth keeping.
    """

    evaluate: Evaluate
    data: PyTree = ()
    needs_key: bool = False
    precision: Array | None = None
    exact: bool = False
    shared: bool = False

    def __call__(self, q: Gaussian, rng_key: Array | None = None) -> Derivatives:
        """The derivatives of E_q[f] at ``q``."""
        return self.evaluate(q, self.data, rng_key)


class GaussianTerm(NamedTuple):
    """The negative logarithm of a Gaussian density of some or all coordinates.

    Attributes:
        loc: Means, shape ``(d,)``; 0 for the coordinates left out.
        precision: Their precision, a diagonal ``(d,)`` or a matrix ``(d, d)``; 0 for those left out.
        constant: The value at ``loc``, a scalar.
    """

    loc: Array
    precision: Array
    constant: Array


def of_gaussian(prior: Gaussian) -> GaussianTerm:
    """The term of a Gaussian prior of all coordinates."""
    (d,), family = prior.loc.shape, family_of(prior)
    prior = family.canonical(prior)
    root, constant = (
        family.root(prior),
        0.5 * d * math.log(2.0 * math.pi) + log_volume(prior),
    )
    if root.ndim == 1:
        return GaussianTerm(prior.loc, 1.0 / jnp.square(root), constant)
    inverse = solve_triangular(root, jnp.eye(d, dtype=root.dtype), lower=True)
    return GaussianTerm(prior.loc, matmul(inverse.T, inverse), constant)


def derivatives_of(term: GaussianTerm, q: Gaussian) -> Derivatives:
    """E_q of the term and its derivatives."""
    shift, precision, root = q.loc - term.loc, term.precision, family_of(q).root(q)
    pull = precision * shift if precision.ndim == 1 else matmul(precision, shift)
    if root.ndim == 1:
        hessian = diagonal(precision)
        spread = jnp.sum(hessian * jnp.square(root))
    else:
        hessian = jnp.diag(precision) if precision.ndim == 1 else precision
        spread = jnp.sum(root * matmul(hessian, root))
    return Derivatives(
        term.constant + 0.5 * (jnp.sum(shift * pull) + spread), pull, hessian
    )


def of_evaluation(
    q: Gaussian, evaluation: Evaluation, alpha: Scalar = 1.0
) -> Derivatives:
    """The derivatives of ``alpha`` times an expected loss."""
    grad_var = evaluation.grad_var
    if not isinstance(grad_var, Array):
        grad_var = grad_var.dense()
    return Derivatives(
        alpha * evaluation.expected, alpha * evaluation.grad_loc, 2.0 * alpha * grad_var
    )


def add(parts: list[Derivatives]) -> Derivatives:
    """The sum of derivatives."""
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *parts)


def objective(
    expectation: Expectation, prior: Gaussian, *data: PyTree, alpha: Scalar = 1.0
) -> Objective:
    r"""The free energy of a loss and a Gaussian prior, without a NumPyro model.

    .. math:: f(\theta) = \alpha \sum_i \ell_i(\theta) - \log \pi(\theta)

    With ℓ a negative log-likelihood, every constant included, -F is the ELBO of the tempered posterior.

    Args:
        expectation: Of a bare loss: a closed form such as ``squared()``, ``gauss_hermite(loss)``,
            ``linearised(...)``, ``monte_carlo(loss)``.
        prior: A Gaussian.
        *data: What the expectation takes, such as ``x`` of shape ``(n, d)`` and ``y`` of shape ``(n,)``.
        alpha: Power on the likelihood, at least 0; may be traced.

    Returns:
        An :class:`Objective`.

    Raises:
        TypeError: If the expectation is one of a model, or the prior not a MeanField or FullRank.
        ValueError: If ``alpha`` is negative or not finite, or the data hold values that the loss does not admit.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> prior = nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1))
        >>> x, y = jnp.ones((3, 1)), jnp.array([1.0, 2.0, 3.0])
        >>> f = nt.gaussian.descent.objective(nt.expectations.squared(), prior, x, y, alpha=0.5)
        >>> float(f(prior).hessian[0])  # 1 + 0.5 * 2 * 3: squared() is (x θ - y)²
        4.0
    """
    if not isinstance(expectation, Expectation) or expectation.bind is not None:
        raise TypeError(
            "objective takes the expectation of a bare loss, such as squared(); fit_gaussian takes a model."
        )
    prior = require_gaussian(prior, "prior")
    check_number(alpha, "alpha", "[0, inf)")
    if expectation.check is not None:
        expectation.check(*data)
    term, arrays = of_gaussian(prior), tuple(jnp.asarray(leaf) for leaf in data)
    tempered = (arrays, jnp.asarray(alpha, prior.loc.dtype), term)
    exact = not expectation.needs_key and expectation.of_predictor is not None
    precision = term.precision if exact else None
    return Objective(
        _evaluator(expectation),
        tempered,
        expectation.needs_key,
        precision,
        exact,
        shared=True,
    )


@functools.lru_cache(maxsize=256)
def _evaluator(expectation: Expectation) -> Evaluate:
    """The same function for the same expectation, so that compiled loops are shared."""

    def evaluate(q: Gaussian, data: PyTree, rng_key: Array | None) -> Derivatives:
        arrays, alpha, term = data
        likelihood = of_evaluation(
            q, expectation.evaluate(q, *arrays, rng_key=rng_key), alpha
        )
        return add([likelihood, derivatives_of(term, q)])

    return evaluate
