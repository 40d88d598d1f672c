"""What is minimised: f = -α log L - log π as a function of q, from a likelihood's expectation and a prior."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core.precision import matmul
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.gaussian.descent.base import Derivatives
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.gaussian.families.base import Rows, family_of
from numpyro_tempered.gaussian.families.full_rank import FullRank
from numpyro_tempered.gaussian.families.mean_field import MeanField


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

    evaluate: Callable[[Any, Any, Array | None], Derivatives]
    data: Any = ()
    needs_key: bool = False
    precision: Array | None = None
    exact: bool = False
    shared: bool = False

    def __call__(self, q: Any, rng_key: Array | None = None) -> Derivatives:
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


def of_gaussian(prior: MeanField | FullRank) -> GaussianTerm:
    """The term of a Gaussian prior of all coordinates."""
    (d,) = prior.loc.shape
    logs = 0.5 * d * math.log(2.0 * math.pi)
    if isinstance(prior, MeanField):
        return GaussianTerm(prior.loc, 1.0 / jnp.square(prior.scale), logs + jnp.sum(jnp.log(prior.scale)))
    lower = prior.scale_tril
    root = solve_triangular(lower, jnp.eye(d, dtype=lower.dtype), lower=True)
    return GaussianTerm(prior.loc, matmul(root.T, root), logs + jnp.sum(jnp.log(jnp.diagonal(lower))))


def derivatives_of(term: GaussianTerm, q: Any) -> Derivatives:
    """E_q of the term and its derivatives."""
    shift, precision = q.loc - term.loc, term.precision
    diagonal = precision.ndim == 1
    pull = precision * shift if diagonal else matmul(precision, shift)
    if isinstance(q, MeanField):
        own = precision if diagonal else jnp.diagonal(precision)
        return Derivatives(
            term.constant + 0.5 * (jnp.sum(shift * pull) + jnp.sum(own * jnp.square(q.scale))), pull, own
        )
    dense = jnp.diag(precision) if diagonal else precision
    spread = jnp.sum(q.factor * matmul(dense, q.factor))
    return Derivatives(term.constant + 0.5 * (jnp.sum(shift * pull) + spread), pull, dense)


def of_evaluation(q: Any, evaluation: Any, alpha: ArrayLike = 1.0) -> Derivatives:
    """The derivatives of ``alpha`` times an expected loss."""
    grad_var = evaluation.grad_var
    if isinstance(grad_var, Rows):
        grad_var = grad_var.dense()
    return Derivatives(alpha * evaluation.expected, alpha * evaluation.grad_loc, 2.0 * alpha * grad_var)


def add(parts: list[Derivatives]) -> Derivatives:
    """The sum of derivatives."""
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *parts)


def objective(
    expectation: Expectation, prior: MeanField | FullRank, *data: Any, alpha: ArrayLike = 1.0
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
        >>> prior = nt.families.MeanField(jnp.zeros(1), jnp.ones(1))
        >>> x, y = jnp.ones((3, 1)), jnp.array([1.0, 2.0, 3.0])
        >>> f = nt.descent.objective(nt.expectations.squared(), prior, x, y, alpha=0.5)
        >>> float(f(prior).hessian[0])  # 1 + 0.5 * 2 * 3: squared() is (x θ - y)²
        4.0
    """
    if not isinstance(expectation, Expectation) or expectation.bind is not None:
        raise TypeError(
            "objective takes the expectation of a bare loss, such as squared() or gauss_hermite(loss); for a "
            "NumPyro model use fit_gaussian."
        )
    if not isinstance(prior, MeanField | FullRank):
        raise TypeError(f"the prior must be a MeanField or a FullRank, got {type(prior).__name__}.")
    if not isinstance(alpha, jax.core.Tracer) and not (0.0 <= float(jnp.asarray(alpha)) < math.inf):
        raise ValueError(f"alpha must be at least 0 and finite, got {alpha}.")
    prior = family_of(prior).check(prior)
    if expectation.check is not None:
        expectation.check(*data)
    term = of_gaussian(prior)
    dtype = prior.loc.dtype
    arrays = tuple(jnp.asarray(leaf) for leaf in data)
    given = (arrays, jnp.asarray(alpha, dtype), term)
    exact = not expectation.needs_key and expectation.of_predictor is not None
    precision = term.precision if exact else None
    return Objective(_evaluator(expectation), given, expectation.needs_key, precision, exact, shared=True)


@functools.lru_cache(maxsize=256)
def _evaluator(expectation: Expectation) -> Callable[[Any, Any, Array | None], Derivatives]:
    """The same function for the same expectation, so that compiled loops are shared."""

    def evaluate(q: Any, given: Any, rng_key: Array | None) -> Derivatives:
        data, alpha, term = given
        found = expectation.evaluate(q, *data, rng_key=rng_key)
        return add([of_evaluation(q, found, alpha), derivatives_of(term, q)])

    return evaluate
