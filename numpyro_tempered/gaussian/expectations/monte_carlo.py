"""Monte Carlo gradients by the identities of Bonnet and Price."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.expectations.base import (
    Evaluation,
    Expectation,
    ModelLoss,
    depends_on,
    require_key,
    rows_of,
    with_jacobian,
)
from numpyro_tempered.gaussian.expectations.outputs import curvature_rows, hessians
from numpyro_tempered.gaussian.families.base import Rows, family_of
from numpyro_tempered.gaussian.families.low_rank import LowRank

MAX_DIMENSION = 1000
_ALTERNATIVES = (
    'use ngvi(curvature="fisher"), name the model\'s predictor, or take gauss_hermite or a closed form'
)


def monte_carlo(
    loss: Callable[..., Array] | None = None,
    *,
    num_particles: int = 1,
    predictor: str | None = None,
    num_outputs: int | None = None,
    antithetic: bool = False,
    memory_budget: int = 2**28,
) -> Expectation:
    r"""Expected loss and gradients from draws of q.

    With θ ~ q, the gradient in the means is E[∇l(θ)] (Bonnet) and in the covariance E[∇²l(θ)]/2, of a
    mean-field q its diagonal (Price): right with one particle, and never the reparameterised gradient in σ,
    whose variance does not vanish. Twice the gradient in the covariance is, in order of preference:

    1. generalised Gauss-Newton, where ``predictor`` names the model's predictor: Σ_i J_iᵀ l''(u_i) J_i,
       positive semidefinite for a loss convex in u;
    2. Fisher curvature, where the rule asks for it (``ngvi(curvature="fisher")``): Σ_i ∇l_i ∇l_iᵀ;
    3. the exact Hessian (for a mean-field q its diagonal), by Jacobian-vector products in chunks that fit the
       memory budget, up to d = 1000; not for a :class:`~numpyro_tempered.families.LowRank` q, whose curvature
       comes by rows.

    Where a closed form or :func:`gauss_hermite` applies, prefer it.

    Args:
        loss: ``(theta, *datum) -> loss`` of one datum, a scalar; ``theta`` has shape ``(d,)``. Data with
            one more leading axis than ``theta`` and its datum are a batch: see Returns. None for the
            likelihood of a model.
        num_particles: Draws per round.
        predictor: Name of the model's deterministic predictor site, for Gauss-Newton curvature.
        num_outputs: K where that site has shape ``(n, K)``; None where it has one predictor a datum.
        antithetic: Whether to draw in pairs m ± z, which makes the gradients of a quadratic loss exact;
            ``num_particles`` must be even.
        memory_budget: Bytes that the Hessian's chunks may take, those of all particles together.

    Returns:
        An :class:`Expectation` that needs an ``rng_key``. For a bare loss the first array of the data
        tells a datum ``(d,)`` or () from a batch ``(n, d)``; the losses of a batch are summed.

    Raises:
        ValueError: If ``num_particles`` < 1, or odd though antithetic, or a predictor is named for a bare loss.
            When traced: if the exact Hessian is asked for with d > 1000, beyond the budget or on a LowRank q,
            or is zero whatever the data because the loss is piecewise linear.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> cubic = nt.expectations.monte_carlo(lambda theta, x: jnp.sum(theta**3) * x)
        >>> q = nt.families.MeanField(jnp.ones(2), jnp.zeros(2))
        >>> value = jax.jit(cubic.evaluate)(q, 1.0, rng_key=jax.random.key(0))
        >>> value.grad_var
        Array([3., 3.], dtype=float32)
    """
    if num_particles < 1:
        raise ValueError(f"num_particles must be at least 1, got {num_particles}.")
    if antithetic and num_particles % 2:
        raise ValueError(f"antithetic draws come in pairs: num_particles must be even, got {num_particles}.")
    if loss is None:

        def unbound(*args: Any, **kwargs: Any) -> Evaluation:
            raise TypeError(
                "monte_carlo() without a loss needs a model: use it in OnlineVI or ExpectedNLL, or "
                "give a loss function for a bare stream."
            )

        return Expectation(
            unbound,
            bind=lambda model: _bound(model, num_particles, memory_budget, antithetic),
            predictor=predictor,
            needs_key=True,
            num_outputs=num_outputs,
        )
    if predictor is not None or num_outputs is not None:
        raise ValueError("a predictor is a site of a model: leave it out with a bare loss.")

    def losses(theta: Array, *data: Any) -> tuple[Array, Array]:
        arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(data)]
        one = jnp.ones((1, 1), theta.dtype)
        if arrays and arrays[0].ndim > 1:
            values = jax.vmap(lambda *row: loss(theta, *row))(*jax.tree.map(jnp.asarray, data))
        else:
            values = loss(theta, *data)
        if jnp.ndim(values) > 1:
            raise ValueError(f"loss must return a scalar a datum, got shape {jnp.shape(values)}.")
        return jnp.reshape(values, (1, -1)).astype(theta.dtype), one

    model = ModelLoss(losses, None, None)
    return _bound(model, num_particles, memory_budget, antithetic)


def _bound(model: ModelLoss, num_particles: int, memory_budget: int, antithetic: bool) -> Expectation:
    def evaluate(
        q: Any, *data: Any, rng_key: Array | None = None, curvature: str = "hessian", mask: Array | None = None
    ) -> Evaluation:
        rng_key = require_key("monte_carlo", rng_key)
        if curvature == "hessian" and model.predictor is None and isinstance(q, LowRank):
            raise ValueError(f"LowRank takes curvature by rows, not a dense Hessian: {_ALTERNATIVES}.")
        family = family_of(q)
        losses = model.losses if mask is None else _leave_out(model.losses, mask)

        def value(theta: Array) -> tuple[Array, Array]:
            values, weights = losses(theta, *data)
            return jnp.sum(weights * values), jnp.sum(values)

        def one(theta: Array) -> tuple[Array, Array, Any]:
            slope = jax.grad(value, has_aux=True)
            if curvature == "none":
                # A point may sit on a kink of the loss as written, where automatic differentiation picks a side.
                off = 8.0 * jnp.finfo(theta.dtype).eps * jnp.maximum(jnp.abs(theta), 1.0)
                (left, _), (right, unweighted) = slope(theta - off), slope(theta + off)
                return unweighted, 0.5 * (left + right), _no_rows(theta)
            grad, unweighted = slope(theta)
            if curvature == "fisher":
                return unweighted, grad, _fisher(losses, theta, data)
            if model.predictor is not None:
                return unweighted, grad, _gauss_newton(model, theta, data, mask)
            hessian = _hessian_diagonal if family.diagonal_only else _hessian
            return unweighted, grad, hessian(value, theta, data, memory_budget // num_particles)

        draws = family.sample(rng_key, q, (num_particles // 2 if antithetic else num_particles,))
        if antithetic:
            draws = jnp.concatenate([draws, 2.0 * q.loc - draws])
        unweighted, grads, second = jax.vmap(one)(draws)
        if isinstance(second, Rows):
            # The rows of all particles, each with its share of the weight.
            x = jnp.reshape(second.x, (-1, second.x.shape[-1]))
            grad_var = family.covariance_gradient(q, x, jnp.ravel(second.weights) * (0.5 / num_particles))
        else:
            grad_var = 0.5 * jnp.mean(second, axis=0)
        at_mean = value(q.loc)[1]
        return Evaluation(at_mean, jnp.mean(unweighted), jnp.mean(grads, axis=0), grad_var)

    def loss(theta: Array, *data: Any) -> Array:
        return jnp.sum(model.losses(theta, *data)[0], axis=0)

    return Expectation(evaluate, needs_key=True, loss=loss)


def _leave_out(losses: Callable[..., tuple[Array, Array]], mask: Array) -> Callable[..., tuple[Array, Array]]:
    def of_the_others(theta: Array, *data: Any) -> tuple[Array, Array]:
        values, weights = losses(theta, *data)
        kept = rows_of(mask, values.shape[-1])[None, :]
        return jnp.where(kept, values, jnp.zeros((), values.dtype)), weights

    return of_the_others


def _no_rows(theta: Array) -> Rows:
    return Rows(jnp.zeros((1, *theta.shape), theta.dtype), jnp.zeros((1,), theta.dtype))


def _fisher(losses: Callable[..., tuple[Array, Array]], theta: Array, data: Any) -> Rows:
    """Σ w ∇l ∇lᵀ over data and sites."""
    jacobian = jax.jacrev(lambda t: losses(t, *data)[0])(theta)
    _, weights = losses(theta, *data)
    weights = jnp.broadcast_to(weights, jacobian.shape[:-1])
    return Rows(jnp.reshape(jacobian, (-1, theta.shape[0])), jnp.ravel(weights))


def _gauss_newton(model: ModelLoss, theta: Array, data: Any, mask: Array | None) -> Rows:
    """Σ_i J_iᵀ Σ_s w l''(u_i) J_i, with J the Jacobian of the predictor."""
    predict, given = model.predictor, model.losses_given_predictor
    if predict is None or given is None:
        raise TypeError("the model was bound without a predictor.")
    u, jacobian = with_jacobian(lambda t: predict(t, *data), theta)
    if u.ndim == 2:
        blocks = hessians(lambda v: given(v, theta, *data), u)
        if mask is not None:
            kept = rows_of(mask, u.shape[0])[:, None, None]
            blocks = jnp.where(kept, blocks, jnp.zeros((), blocks.dtype))
        return Rows(*curvature_rows(jacobian, blocks))

    def total(u: Array) -> Array:
        losses, weights = given(u, theta, *data)
        return jnp.sum(weights * losses)

    _, second = jax.jvp(jax.grad(total), (u,), (jnp.ones_like(u),))
    if mask is not None:
        second = jnp.where(rows_of(mask, u.shape[0]), second, jnp.zeros((), second.dtype))
    return Rows(jacobian, second)


def _hessian(value: Callable[[Array], tuple[Array, Array]], theta: Array, data: Any, memory_budget: int) -> Array:
    """The whole Hessian ``(d, d)``, column by column."""
    product, chunk = _products(value, theta, data, memory_budget)
    columns = map_batches(product, jnp.eye(theta.shape[0], dtype=theta.dtype), chunk)
    return 0.5 * (columns + columns.T)


def _hessian_diagonal(
    value: Callable[[Array], tuple[Array, Array]], theta: Array, data: Any, memory_budget: int
) -> Array:
    product, chunk = _products(value, theta, data, memory_budget)
    (d,) = theta.shape

    def entry(j: Array) -> Array:
        return product(jax.nn.one_hot(j, d, dtype=theta.dtype))[j]

    return map_batches(entry, jnp.arange(d), chunk)


def _products(
    value: Callable[[Array], tuple[Array, Array]], theta: Array, data: Any, memory_budget: int
) -> tuple[Callable[[Array], Array], int]:
    """The product of the Hessian with a vector, and how many fit the memory at once."""
    (d,) = theta.shape

    def grad(t: Array) -> Array:
        return jax.grad(lambda s: value(s)[0])(t)

    def product(tangent: Array) -> Array:
        return jax.jvp(grad, (theta,), (tangent,))[1]

    if d > MAX_DIMENSION:
        raise ValueError(f"the exact Hessian is for d <= {MAX_DIMENSION}, got d = {d}: {_ALTERNATIVES}.")
    if not depends_on(product, jnp.ones_like(theta)):
        raise ValueError(
            "the loss is piecewise linear in the parameters, so automatic differentiation gives it "
            f"no curvature: {_ALTERNATIVES}."
        )
    elements = sum(int(np.prod(jnp.shape(leaf))) for leaf in jax.tree.leaves(data))
    column = theta.dtype.itemsize * (2 * d + elements)
    if column > memory_budget:
        raise ValueError(
            f"one column of the Hessian takes about {column} bytes, more than memory_budget = "
            f"{memory_budget}: {_ALTERNATIVES}, or smaller batches."
        )
    return product, max(1, min(d, memory_budget // column))
