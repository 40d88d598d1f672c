"""What rules and expectations ask of a variational family."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numpyro_tempered.core.precision import matmul
from numpyro_tempered.core.typing import Array


class Rows(NamedTuple):
    r"""The symmetric matrix :math:`\sum_i w_i x_i x_i^\top`, never formed.

    Attributes:
        x: Shape ``(n, d)``.
        weights: Shape ``(n,)``, of either sign.
    """

    x: Array
    weights: Array

    def dense(self) -> Array:
        """The matrix itself, shape ``(d, d)``."""
        return matmul(self.x.T * self.weights[None, :], self.x)


class Gain(NamedTuple):
    r"""One natural-gradient step, in weights: P' = keep P + pull P_0 + step · 2 grad_var.

    The mean moves by :math:`-P'^{-1}[\mathrm{step}\, g_m + \mathrm{pull}\, P_0 (m - m_0)]`.

    Attributes:
        step: Weight of the datum, β.
        keep: Weight of the present precision; exactly the float 1.0 where all of it is kept, which
            saves a factorisation.
        pull: Weight of the prior's precision; exactly the float 0.0 for none.
    """

    step: Any
    keep: Any = 1.0
    pull: Any = 0.0


def carry(grad_loc: Array, grad_var: Any, shift: Array) -> Array:
    """The gradient of a quadratic with curvature ``2 grad_var`` at a distance ``shift`` from where it is known.

    Args:
        grad_loc: The gradient there, shape ``(d,)``.
        grad_var: Half the curvature: a diagonal ``(d,)``, a matrix ``(d, d)``, or :class:`Rows`.
        shift: Shape ``(d,)``.
    """
    if isinstance(grad_var, Rows):
        product = matmul(grad_var.weights * matmul(grad_var.x, shift), grad_var.x)
    else:
        product = grad_var * shift if grad_var.ndim == 1 else matmul(grad_var, shift)
    return grad_loc + 2.0 * product


class Family(NamedTuple):
    """A variational family as a set of pure functions; q, p, prior and anchor are its parameters.

    Attributes:
        name: Short name, for reports and errors.
        check: ``prior -> prior`` as floating arrays of one dtype; raises ValueError.
        sample: ``(rng_key, q, sample_shape) -> theta``.
        kl: ``(q, p) -> KL(q, p)`` in nats.
        predictor_variance: ``(q, x) -> (n,)``: variances of the rows of ``x @ theta``.
        covariance_gradient: ``(q, x, weights) -> grad_var``: the matrix Σ w_i x_i x_iᵀ as far as the family
            needs it.
        diagonal_only: Whether ``grad_var`` is the diagonal alone.
        witness: ``q -> (d,)``, not finite where anything in ``q`` is not, as the family's own steps leave it.
        marginal_scale: ``q -> (d,)``: standard deviations of the coordinates.
        start: ``q -> memory`` of the natural-gradient step.
        natural_step: ``(memory, q, prior, grad_loc, grad_var, gain) -> (q', memory')``; not finite where the
            new precision is not positive definite.
        floor: ``(q, grad_var) -> (grad_var, touched)`` without its negative part.
        merge: ``(q_a, q_b, prior) -> q`` with natural parameters λ_a + λ_b - λ_0.
        point: ``q -> q`` with the same mean and no spread, or None.
        gradient: ``(q, evaluation) -> grads`` in the source parameters, or None.
        kl_prox: ``(anchor, grads, step_size) -> q``, the primitive of SVA and SVB, or None.
        descend: ``(q, grads, rate) -> q``, a projected gradient step in the source parameters, or None.
        inflate: ``(q, variance) -> q`` with ``variance`` added to every coordinate's, or None.
    """

    name: str
    check: Callable[..., Any]
    sample: Callable[..., Array]
    kl: Callable[..., Array]
    predictor_variance: Callable[..., Array]
    covariance_gradient: Callable[..., Any]
    diagonal_only: bool
    witness: Callable[..., Array]
    marginal_scale: Callable[..., Array]
    start: Callable[..., Any]
    natural_step: Callable[..., tuple[Any, Any]]
    floor: Callable[..., tuple[Any, Array]]
    merge: Callable[..., Any]
    point: Callable[..., Any] | None = None
    gradient: Callable[..., Any] | None = None
    kl_prox: Callable[..., Any] | None = None
    descend: Callable[..., Any] | None = None
    inflate: Callable[..., Any] | None = None


_FAMILIES: dict[type, Family] = {}


def register(kind: type, family: Family) -> None:
    """Let ``family_of`` find ``family`` for parameters of type ``kind``."""
    _FAMILIES[kind] = family


def family_of(q: Any) -> Family:
    """The family that parameters ``q`` belong to.

    Raises:
        TypeError: If there is none.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.families import MeanField, family_of
        >>> q = MeanField(jnp.zeros(2), jnp.ones(2))
        >>> family_of(q).predictor_variance(q, jnp.array([[3.0, 4.0]]))
        Array([25.], dtype=float32)
    """
    try:
        return _FAMILIES[type(q)]
    except KeyError:
        names = sorted(kind.__name__ for kind in _FAMILIES)
        raise TypeError(f"a posterior must be one of {names}, got {type(q).__name__}.") from None


def require(q: Any, operation: str, rule: str) -> Callable[..., Any]:
    """The family's function of that name.

    Raises:
        TypeError: If this family has none, naming those that have.
    """
    family = family_of(q)
    function: Callable[..., Any] | None = getattr(family, operation)
    if function is None:
        able = sorted(kind.__name__ for kind, other in _FAMILIES.items() if getattr(other, operation) is not None)
        raise TypeError(
            f"{rule} has no closed form on {family.name}; it works on {' and '.join(able)}. "
            f"ngvi works on {family.name}."
        )
    return function
