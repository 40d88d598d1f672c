"""Monte Carlo gradients by the identities of Bonnet and Price."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered._typing import Array
from numpyro_tempered.expectations.base import Evaluation, Expectation, ModelLoss, depends_on
from numpyro_tempered.families.mean_field import MeanField, sample

MAX_DIMENSION = 1000


def monte_carlo(
    loss: Callable[..., Array] | None = None,
    *,
    num_particles: int = 1,
    predictor: str | None = None,
    memory_budget: int = 2**28,
) -> Expectation:
    r"""Expected loss and gradients from draws of q.

    With θ ~ q, the gradient in the means is E[∇l(θ)] (Bonnet) and in the variances E[diag ∇²l(θ)]/2
    (Price): right with one particle, and never the reparameterised gradient in σ, whose variance
    does not vanish. Twice the gradient in the variances is, in order of preference:

    1. generalised Gauss-Newton, where ``predictor`` names the model's predictor: Σ_i J_ij² l''(u_i),
       positive for a loss convex in u;
    2. Fisher curvature, where the rule asks for it (``ngvi(curvature="fisher")``): Σ_i (∂_j l_i)²;
    3. the exact diagonal of the Hessian, by Jacobian-vector products in chunks that fit the memory
       budget, up to d = 1000.

    Where a closed form or :func:`gauss_hermite` applies, prefer it.

    Args:
        loss: ``(theta, *datum) -> loss`` of one datum, a scalar; ``theta`` has shape ``(d,)``. Data with
            one more leading axis than ``theta`` and its datum are a batch: see Returns. None for the
            likelihood of a model.
        num_particles: Draws per round.
        predictor: Name of the model's deterministic predictor site, for Gauss-Newton curvature.
        memory_budget: Bytes that the Hessian's chunks may take.

    Returns:
        An :class:`Expectation` that needs an ``rng_key``. For a bare loss the first array of the data
        tells a datum ``(d,)`` or () from a batch ``(n, d)``; the losses of a batch are summed.

    Raises:
        ValueError: If ``num_particles`` < 1, or a predictor is named for a bare loss. When traced: if the
            exact Hessian is asked for with d > 1000 or beyond the budget, or is zero whatever the data
            because the loss is piecewise linear.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> cubic = nt.expectations.monte_carlo(lambda theta, x: jnp.sum(theta**3) * x)
        >>> q = nt.families.MeanField(jnp.ones(2), jnp.zeros(2))
        >>> value = cubic.evaluate(q, 1.0, rng_key=jax.random.key(0))
        >>> value.grad_var
        Array([3., 3.], dtype=float32)
    """
    if num_particles < 1:
        raise ValueError(f"num_particles must be at least 1, got {num_particles}.")
    if loss is None:

        def unbound(*args: Any, **kwargs: Any) -> Evaluation:
            raise TypeError(
                "monte_carlo() without a loss needs a model: use it in OnlineVI or ExpectedNLL, or "
                "give a loss function for a bare stream."
            )

        return Expectation(
            unbound,
            bind=lambda model: _bound(model, num_particles, memory_budget),
            predictor=predictor,
            needs_key=True,
        )
    if predictor is not None:
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
    return _bound(model, num_particles, memory_budget)


def _bound(model: ModelLoss, num_particles: int, memory_budget: int) -> Expectation:
    def evaluate(
        q: MeanField, *data: Any, rng_key: Array | None = None, curvature: str = "hessian"
    ) -> Evaluation:
        if rng_key is None:
            raise ValueError("monte_carlo needs an rng_key: pass rng_key= to run or update.")

        def value(theta: Array) -> tuple[Array, Array]:
            losses, weights = model.losses(theta, *data)
            return jnp.sum(weights * losses), jnp.sum(losses)

        def one(theta: Array) -> tuple[Array, Array, Array]:
            slope = jax.grad(value, has_aux=True)
            if curvature == "none":
                # A point may sit on a kink of the loss as written, where automatic differentiation picks a side.
                off = 8.0 * jnp.finfo(theta.dtype).eps * jnp.maximum(jnp.abs(theta), 1.0)
                (left, _), (right, unweighted) = slope(theta - off), slope(theta + off)
                grad = 0.5 * (left + right)
            else:
                grad, unweighted = slope(theta)
            if curvature == "none":
                second = jnp.zeros_like(grad)
            elif curvature == "fisher":
                second = _fisher(model, theta, data)
            elif model.predictor is not None:
                second = _gauss_newton(model, theta, data)
            else:
                second = _hessian_diagonal(value, theta, data, memory_budget)
            return unweighted, grad, second

        draws = sample(rng_key, q, (num_particles,))
        expected, grad_loc, second = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), jax.vmap(one)(draws))
        return Evaluation(value(q.loc)[1], expected, grad_loc, 0.5 * second)

    return Expectation(evaluate, needs_key=True)


def _fisher(model: ModelLoss, theta: Array, data: Any) -> Array:
    """Σ w (∂_j l)² over data and sites."""
    jacobian = jax.jacrev(lambda t: model.losses(t, *data)[0])(theta)
    _, weights = model.losses(theta, *data)
    return jnp.sum(weights[..., None] * jnp.square(jacobian), axis=(0, 1))


def _gauss_newton(model: ModelLoss, theta: Array, data: Any) -> Array:
    """Σ_i J_ij² Σ_s w l''(u_i), with J the Jacobian of the predictor."""
    predict, given = model.predictor, model.losses_given_predictor
    if predict is None or given is None:
        raise TypeError("the model was bound without a predictor.")
    u, pull = jax.vjp(lambda t: predict(t, *data), theta)
    (jacobian,) = jax.vmap(pull)(jnp.eye(u.shape[0], dtype=u.dtype))

    def total(u: Array) -> Array:
        losses, weights = given(u, theta, *data)
        return jnp.sum(weights * losses)

    _, second = jax.jvp(jax.grad(total), (u,), (jnp.ones_like(u),))
    return jnp.sum(jnp.square(jacobian) * second[:, None], axis=0)


def _hessian_diagonal(
    value: Callable[[Array], tuple[Array, Array]], theta: Array, data: Any, memory_budget: int
) -> Array:
    (d,) = theta.shape

    def grad(t: Array) -> Array:
        return jax.grad(lambda s: value(s)[0])(t)

    def product(tangent: Array) -> Array:
        return jax.jvp(grad, (theta,), (tangent,))[1]

    alternatives = (
        'use ngvi(curvature="fisher"), name the model\'s predictor, or take gauss_hermite or a closed form'
    )
    if d > MAX_DIMENSION:
        raise ValueError(f"the exact Hessian diagonal is for d <= {MAX_DIMENSION}, got d = {d}: {alternatives}.")
    if not depends_on(product, jnp.ones_like(theta)):
        raise ValueError(
            "the loss is piecewise linear in the parameters, so automatic differentiation gives it "
            f"no curvature: {alternatives}."
        )
    elements = sum(int(np.prod(jnp.shape(leaf))) for leaf in jax.tree.leaves(data))
    column = theta.dtype.itemsize * (2 * d + elements)
    if column > memory_budget:
        raise ValueError(
            f"one column of the Hessian takes about {column} bytes, more than memory_budget = "
            f"{memory_budget}: {alternatives}, or smaller batches."
        )
    chunk = max(1, min(d, memory_budget // column))

    def entry(j: Array) -> Array:
        return product(jax.nn.one_hot(j, d, dtype=theta.dtype))[j]

    return jax.lax.map(entry, jnp.arange(d), batch_size=chunk)
