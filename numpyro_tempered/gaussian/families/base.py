"""What rules, expectations and batch methods ask of a variational family."""

import math
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core import Array, ArrayLike, Params, Scalar, Shape, matmul


class Gaussian(Protocol):
    """The parameters of a Gaussian: a NamedTuple whose first field is ``loc``, the means ``(d,)``."""

    @property
    def loc(self) -> Array:
        """Means, shape ``(d,)``."""

    def _replace(self, *, loc: Array) -> Self: ...
    def _asdict(self) -> Params: ...


Q = TypeVar("Q", bound=Gaussian)
Q_contra = TypeVar("Q_contra", contravariant=True)
Memory = TypeVar("Memory")
C = TypeVar("C")


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

    def floor(self) -> "tuple[Rows, Array]":
        """The matrix without its rows of negative weight, and whether there were any."""
        return self._replace(weights=jnp.maximum(self.weights, 0.0)), jnp.any(
            self.weights < 0.0
        )

    def scaled(self, factor: Array) -> "Rows":
        """The matrix times a number."""
        return self._replace(weights=factor * self.weights)


class Whitened(NamedTuple):
    """A symmetric matrix H as ``S.T @ H @ S``, with S the triangular factor of a Gaussian."""

    factor: Array
    matrix: Array

    def dense(self) -> Array:
        """The matrix itself, shape ``(d, d)``."""
        half = solve_triangular(self.factor, self.matrix, lower=True, trans=1)
        matrix = solve_triangular(self.factor, half.T, lower=True, trans=1)
        return 0.5 * (matrix + matrix.T)

    def scaled(self, factor: Array) -> "Whitened":
        """The matrix times a number."""
        return self._replace(matrix=factor * self.matrix)


Curvature: TypeAlias = Array | Rows | Whitened


class Gain(NamedTuple):
    r"""One natural-gradient step, in weights: P' = keep P + pull P_0 + step · 2 grad_var.

    The mean moves by :math:`-P'^{-1}[\mathrm{step}\, g_m + \mathrm{pull}\, P_0 (m - m_0)]`. A diagonal family may
    get weights ``(d,)``.

    Attributes:
        step: Weight of the datum, β.
        keep: Weight of the present precision; exactly the float 1.0 where nothing is forgotten, which
            saves a factorisation.
        pull: Weight of the prior's precision; exactly the float 0.0 for none.
    """

    step: Scalar
    keep: Scalar = 1.0
    pull: Scalar = 0.0

    @property
    def keeps_all(self) -> bool:
        """Whether the present precision is not discounted, as far as the trace shows."""
        return isinstance(self.keep, float) and self.keep == 1.0

    @property
    def pulls(self) -> bool:
        """Whether the prior's precision may be added, as far as the trace shows."""
        return not (isinstance(self.pull, float) and self.pull == 0.0)


def carry(grad_loc: Array, grad_var: Curvature, shift: Array) -> Array:
    """The gradient of a quadratic with curvature ``2 grad_var``, at a distance ``shift``.

    Args:
        grad_loc: The gradient at distance 0, shape ``(d,)``.
        grad_var: Half the curvature: a diagonal ``(d,)``, a matrix ``(d, d)``, or :class:`Rows`.
        shift: Shape ``(d,)``.
    """
    if isinstance(grad_var, Rows):
        product = matmul(grad_var.weights * matmul(grad_var.x, shift), grad_var.x)
    else:
        matrix = grad_var.dense() if isinstance(grad_var, Whitened) else grad_var
        product = matrix * shift if matrix.ndim == 1 else matmul(matrix, shift)
    return grad_loc + 2.0 * product


class Sample(Protocol[Q_contra]):
    """How a family draws."""

    def __call__(self, rng_key: Array, q: Q_contra, sample_shape: Shape = ...) -> Array:
        """Draws of shape ``sample_shape + (d,)``."""


def sampler(color: Callable[[Q, Array], Array]) -> Sample[Q]:
    """Draws of a family from ``color``: noise ``(..., d)`` of unit covariance times a root of the covariance."""

    def sample(rng_key: Array, q: Q, sample_shape: Shape = ()) -> Array:
        noise = jax.random.normal(rng_key, sample_shape + q.loc.shape, q.loc.dtype)
        return q.loc[(None,) * len(sample_shape)] + color(q, noise)

    return sample


class Family(NamedTuple, Generic[Q, Memory, C]):
    """A variational family as a set of pure functions; q, p, prior and anchor are its parameters.

    The parameters are a NamedTuple of arrays whose first field is ``loc``; a field is a scalar or has the
    coordinates as its leading axis. The root of a covariance V is a matrix S with V = S Sᵀ, or the standard
    deviations ``(d,)`` of a family with independent coordinates. A slot that may be None is what some rules need:
    they refuse a family without it.

    Attributes:
        name: Short name, for reports and errors.
        check: ``prior -> prior`` as floating arrays of one dtype; raises ValueError.
        sample: ``(rng_key, q, sample_shape) -> theta``.
        kl: ``(q, p) -> KL(q, p)`` in nats.
        root: ``q -> S``, shape ``(d,)`` or ``(d, d)``.
        predictor_variance: ``(q, x) -> (n,)``: variances of the rows of ``x @ theta``.
        curvature_form: The form of ``grad_var`` that the family takes: ``"diagonal"``, ``(d,)`` as the root is,
            ``"rows"`` for :class:`Rows` alone, or ``"matrix"`` for a matrix ``(d, d)`` too.
        witness: ``q -> (d,)``, not finite where anything in ``q`` is not, as the family's own steps leave it.
        marginal_scale: ``q -> (d,)``: standard deviations of the coordinates.
        init: ``q -> memory`` of the natural-gradient step.
        natural_step: ``(memory, q, prior, grad_loc, grad_var, gain) -> (q', memory')``; not finite where the
            new precision is not positive definite.
        floor: ``(q, grad_var) -> (grad_var, touched)`` without its negative part.
        merge: ``(q_a, q_b, prior) -> q`` with natural parameters λ_a + λ_b - λ_0.
        canonical: ``q -> q``, the same Gaussian in the form that ``check`` admits; the very same object where
            every form is.
        from_root: ``(loc, S) -> q``, or None where a Gaussian of any root is no member. Points, batch methods,
            aggregates, boxes (of a diagonal family) and standardised streams need it.
        convert: ``(q, like) -> q``: a Gaussian of another family as one like ``like``; by ``from_root`` if None.
        gradient: ``(q, grad_loc, grad_var) -> grads`` in the source parameters, or None.
        kl_prox: ``(anchor, grads, rate) -> q``, the primitive of SVA and SVB, or None.
        kl_prox_scaled: The same in terms of rate × variance, one for each coordinate, or None.
        descend: ``(q, grads, rate) -> q``, a projected gradient step in the source parameters, or None.
        clip_memory: ``(memory, q, scale) -> memory`` after q was clipped to a box with that bound on its scales;
            by ``init`` if None.
    """

    name: str
    check: Callable[[Q], Q]
    sample: Sample[Q]
    kl: Callable[[Q, Q], Array]
    root: Callable[[Q], Array]
    predictor_variance: Callable[[Q, Array], Array]
    curvature_form: Literal["diagonal", "rows", "matrix"]
    witness: Callable[[Q], Array]
    marginal_scale: Callable[[Q], Array]
    init: Callable[[Q], Memory]
    natural_step: Callable[[Memory, Q, Q, Array, C, Gain], tuple[Q, Memory]]
    floor: Callable[[Q, C], tuple[C, Array]]
    merge: Callable[[Q, Q, Q], Q]
    canonical: Callable[[Q], Q] = lambda q: q
    from_root: Callable[[Array, Array], Q] | None = None
    convert: Callable[[Gaussian, Q], Q] | None = None
    gradient: Callable[[Q, Array, C], Q] | None = None
    kl_prox: Callable[[Q, Q, Scalar], Q] | None = None
    kl_prox_scaled: Callable[[Q, Q, Scalar], Q] | None = None
    descend: Callable[[Q, Q, Scalar], Q] | None = None
    clip_memory: Callable[[Memory, Q, ArrayLike], Memory] | None = None

    @property
    def diagonal_only(self) -> bool:
        """Whether ``grad_var`` and the root are diagonals."""
        return self.curvature_form == "diagonal"

    def covariance_gradient(self, q: Q, x: Array, weights: Array) -> Array | Rows:
        """The matrix Σ w_i x_i x_iᵀ as far as the family needs it."""
        return (
            jnp.sum(jnp.square(x) * weights[:, None], axis=0)
            if self.diagonal_only
            else Rows(x, weights)
        )

    def with_root(self, loc: Array, root: Array) -> Q:
        """The member with these means and this root of the covariance.

        Raises:
            TypeError: If a Gaussian of any root is no member.
        """
        if self.from_root is None:
            raise TypeError(
                f"{self.name} does not hold every covariance: take {able('from_root', 'or')}."
            )
        return self.from_root(loc, root)

    def point(self, q: Q) -> Q:
        """The member with the means of ``q`` and no spread."""
        return self.with_root(q.loc, jnp.zeros_like(self.root(q)))

    def inflate(self, q: Q, variance: Array) -> Q:
        """``q`` with ``variance`` added to that of every coordinate."""
        root = self.root(q)
        if root.ndim == 1:
            return self.with_root(q.loc, jnp.sqrt(jnp.square(root) + variance))
        noise = jnp.diag(jnp.sqrt(jnp.broadcast_to(variance, q.loc.shape)))
        # The factor of S Sᵀ + V from [S, √V], without forming the sum.
        upper = jnp.linalg.qr(jnp.concatenate([root, noise], axis=1).T, mode="r")
        return self.with_root(q.loc, upper.T)


_FAMILIES: dict[type, Family] = {}


def register(kind: type[tuple], family: Family) -> None:
    """Add a family: every rule and method then takes parameters of that type.

    Args:
        kind: The type of the parameters, a NamedTuple of arrays whose first field is ``loc``.
        family: Its functions.

    Raises:
        TypeError: If ``kind`` is not such a type, or ``family`` no :class:`Family`.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> families = nt.gaussian.families
        >>> family = families.family_of(families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> families.register(families.MeanField, family)  # as the module of each family does
    """
    if not isinstance(kind, type) or getattr(kind, "_fields", ("",))[0] != "loc":
        raise TypeError(
            f"a family is registered for a NamedTuple whose first field is loc, got {kind!r}."
        )
    if not isinstance(family, Family):
        raise TypeError(f"register takes a Family, got {type(family).__name__}.")
    _FAMILIES[kind] = family


def family_of(q: Q) -> Family[Q, Any, Any]:
    """The family that parameters ``q`` belong to.

    Raises:
        TypeError: If there is none.

    Example:
        >>> import jax.numpy as jnp
        >>> from numpyro_tempered.gaussian.families import MeanField, family_of
        >>> q = MeanField(jnp.zeros(2), jnp.ones(2))
        >>> family_of(q).predictor_variance(q, jnp.array([[3.0, 4.0]]))
        Array([25.], dtype=float32)
    """
    if not is_gaussian(q):
        raise TypeError(
            f"a posterior must be a {able('name', 'or')}, got {type(q).__name__}."
        )
    return _FAMILIES[type(q)]


def is_gaussian(value: object) -> bool:
    """Whether a value is of a registered family."""
    return type(value) in _FAMILIES


def supports(q: object, slot: str) -> bool:
    """Whether ``q`` is of a family that fills a slot."""
    return is_gaussian(q) and getattr(_FAMILIES[type(q)], slot) is not None


def able(slot: str, joiner: str = "and") -> str:
    """The names of the families that fill a slot, for messages."""
    return f" {joiner} ".join(
        kind.__name__
        for kind in _FAMILIES
        if getattr(_FAMILIES[kind], slot) is not None
    )


def require(q: Gaussian, slot: str, rule: str) -> Callable[..., Any]:
    """The family's function of that slot.

    Raises:
        TypeError: If this family has none, naming those that have.
    """
    family = family_of(q)
    function: Callable[..., Any] | None = getattr(family, slot)
    if function is None:
        raise TypeError(
            f"{rule} does not work on {family.name}: take {able(slot, 'or')}. Of the rules ngvi works on all."
        )
    return function


def as_floating(*leaves: ArrayLike) -> list[Array]:
    """Parameters as floating arrays of one dtype."""
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    dtype = jnp.result_type(*arrays, float)
    return [array.astype(dtype) for array in arrays]


def dense(root: Array) -> Array:
    """A root as a matrix ``(d, d)``."""
    return jnp.diag(root) if root.ndim == 1 else root


def square_root(q: Gaussian) -> Array:
    """A square root of the covariance, ``(d, d)``."""
    return dense(family_of(q).root(q))


def covariance(root: Array) -> Array:
    """The covariance of a Gaussian with this root, ``(d, d)``."""
    root = dense(root)
    return matmul(root, root.T)


def log_density(loc: Array, root: Array, theta: Array) -> Array:
    """The log-density of N(loc, S Sᵀ) at ``theta``, ``(..., d)``, by a root S; gives ``(...)``."""
    shift = theta - loc
    if root.ndim == 1:
        z, log_volume = shift / root, jnp.sum(jnp.log(root))
    else:
        # The triangular root of the same covariance: |z| is that of any.
        lower = jnp.linalg.qr(root.T, mode="r").T
        columns = jnp.reshape(shift, (-1, len(loc))).T
        z = jnp.reshape(solve_triangular(lower, columns, lower=True).T, shift.shape)
        log_volume = jnp.sum(jnp.log(jnp.abs(jnp.diagonal(lower))))
    return (
        -0.5 * jnp.sum(jnp.square(z), axis=-1)
        - log_volume
        - 0.5 * len(loc) * math.log(2.0 * math.pi)
    )


def convert(q: Gaussian, like: Q) -> Q:
    """``q`` as a Gaussian like ``like``: of the same means and covariance, or variances in a diagonal family."""
    family = family_of(like)
    if family.convert is not None:
        return family.convert(q, like)
    if family.diagonal_only:
        return family.with_root(q.loc, family_of(q).marginal_scale(q))
    return family.canonical(family.with_root(q.loc, square_root(q)))


def curvature_from_root(root: Array, in_root: Array) -> Array | Whitened:
    """The ``grad_var`` whose gradient in a diagonal or triangular root this is."""
    if root.ndim == 1:
        return in_root / (2.0 * root)
    # Lᵀ tril(M) and Lᵀ M have the same lower triangle.
    lower = 0.5 * jnp.tril(matmul(root.T, in_root))
    return Whitened(root, lower + jnp.tril(lower, -1).T)
