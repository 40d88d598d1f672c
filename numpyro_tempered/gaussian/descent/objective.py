"""What is minimised: f = -α log L - log π as a function of q, from a likelihood's expectation and a prior."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core import Array, PyTree, Scalar, check_number, matmul
from numpyro_tempered.gaussian.descent.base import (
    Derivatives,
    diagonal,
    log_volume,
    require_gaussian,
)
from numpyro_tempered.gaussian.expectations.base import Evaluation, Expectation
from numpyro_tempered.gaussian.families.base import Gaussian, family_of

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
