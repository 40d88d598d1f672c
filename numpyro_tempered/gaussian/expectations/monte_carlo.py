"""Monte Carlo gradients by the identities of Bonnet and Price."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    PyTree,
    check_count,
    hessian_product,
    map_batches,
)
from numpyro_tempered.gaussian.expectations import base, differentiate
from numpyro_tempered.gaussian.expectations.base import curvature_rows
from numpyro_tempered.gaussian.families.base import Gaussian, Rows, family_of

MAX_DIMENSION = 1000
_ALTERNATIVES = (
    'use ngvi(curvature="fisher"), a named predictor, gauss_hermite or a closed form'
)

# The weighted loss at the parameters, and the plain one.
_Value: TypeAlias = Callable[[Array], tuple[Array, Array]]


def monte_carlo(
    loss: Callable[..., ArrayLike] | None = None,
    *,
    num_particles: int = 1,
    predictor: str | None = None,
    num_outputs: int | None = None,
    antithetic: bool = False,
    memory_budget: int = 2**28,
) -> base.Expectation:
    r"""Expected loss and gradients from draws of q.

    With θ ~ q, the gradient in the means is E[∇l(θ)] (Bonnet) and in the covariance E[∇²l(θ)]/2, of a
    mean-field q its diagonal (Price): right with one particle, and never the reparameterised gradient in σ,
    whose variance does not vanish. Twice the gradient in the covariance is, in order of preference:

    1. generalised Gauss-Newton, where ``predictor`` names the model's predictor: Σ_i J_iᵀ l''(u_i) J_i,
       positive semidefinite for a loss convex in u;
    2. Fisher curvature, where the rule asks for it (``ngvi(curvature="fisher")``): Σ_i ∇l_i ∇l_iᵀ;
    3. the exact Hessian (for a mean-field q its diagonal), by Jacobian-vector products in chunks that fit the
       memory budget, up to d = 1000; not for a :class:`.LowRank` q, whose curvature
       comes by rows.

    Where a closed form or :func:`gauss_hermite` applies, prefer it.

    Args:
        loss: ``(theta, *datum) -> loss`` of one datum, a scalar; ``theta`` has shape ``(d,)``. Data with
            one more leading axis than ``theta`` and its datum are a batch: see Returns. None for the
            likelihood of a model.
        num_particles: Draws per round.
        predictor: Name of the model's deterministic predictor site, for Gauss-Newton curvature.
        num_outputs: K where that site has shape ``(n, K)``; None where it has one predictor for each datum.
        antithetic: Whether to draw in pairs m ± z, which makes the gradients of a quadratic loss exact;
            ``num_particles`` must be even.
        memory_budget: Bytes that the Hessian's chunks may take, those of all particles together.

    Returns:
        An :class:`Expectation` that needs an ``rng_key``. For a bare loss the first array of the data
        distinguishes a datum ``(d,)`` or () from a batch ``(n, d)``; the losses of a batch are summed.

    Raises:
        ValueError: If ``num_particles`` < 1, or odd though antithetic, or a predictor is named for a bare loss.
            When traced: if the rule needs the exact Hessian with d > 1000, beyond the budget or on a LowRank q,
            or is zero whatever the data because the loss is piecewise linear.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> cubic = nt.expectations.monte_carlo(lambda theta, x: jnp.sum(theta**3) * x)
        >>> q = nt.gaussian.families.MeanField(jnp.ones(2), jnp.zeros(2))
        >>> value = jax.jit(cubic.evaluate)(q, 1.0, rng_key=jax.random.key(0))
        >>> value.grad_var
        Array([3., 3.], dtype=float32)
    """
    check_count(num_particles, "num_particles")
    if antithetic and num_particles % 2:
        raise ValueError(
            f"antithetic draws come in pairs: num_particles must be even, got {num_particles}."
        )
    bind = partial(
        _bound,
        num_particles=num_particles,
        memory_budget=memory_budget,
        antithetic=antithetic,
    )
    if loss is None:
        refuse = base.unbound("monte_carlo() without a loss")
        return base.Expectation(
            refuse, bind, predictor, needs_key=True, num_outputs=num_outputs
        )
    if predictor is not None or num_outputs is not None:
        raise ValueError(
            "a predictor is a site of a model: leave it out with a bare loss."
        )

    def losses(theta: Array, *data: PyTree) -> tuple[Array, Array]:
        arrays = [jnp.asarray(leaf) for leaf in jax.tree.leaves(data)]
        if arrays and arrays[0].ndim > 1:
            values = jax.vmap(lambda *row: loss(theta, *row))(
                *jax.tree.map(jnp.asarray, data)
            )
        else:
            values = loss(theta, *data)
        if jnp.ndim(values) > 1:
            raise ValueError(
                f"loss must return a scalar for each datum, got shape {jnp.shape(values)}."
            )
        return jnp.reshape(values, (1, -1)).astype(theta.dtype), jnp.ones(
            (1, 1), theta.dtype
        )

    return bind(base.ModelLoss(losses, None, None))


def _bound(
    model: base.ModelLoss, *, num_particles: int, memory_budget: int, antithetic: bool
) -> base.Expectation:
    @base.evaluator
    def evaluate(
        q: Gaussian, data: base.Data, options: base.Options
    ) -> base.Evaluation:
        rng_key, curvature, mask = options
        rng_key, family = base.require_key("monte_carlo", rng_key), family_of(q)
        if (
            curvature == "hessian"
            and model.predictor is None
            and family.curvature_form == "rows"
        ):
            raise ValueError(
                f"{family.name} takes curvature by rows, not a dense Hessian: {_ALTERNATIVES}."
            )

        def losses(theta: Array) -> tuple[Array, Array]:
            values, weights = model.losses(theta, *data)
            on = base.rows_of(mask, values.shape[-1])
            return values if on is None else jnp.where(
                on[None, :], values, jnp.zeros((), values.dtype)
            ), weights

        def value(theta: Array) -> tuple[Array, Array]:
            values, weights = losses(theta)
            return jnp.sum(weights * values), jnp.sum(values)

        def one(theta: Array) -> tuple[tuple[Array, Array], Array, Array | Rows]:
            slope = jax.value_and_grad(value, has_aux=True)
            if curvature == "none":
                # A point may sit on a kink of the loss as written, where automatic differentiation picks a side.
                off = (
                    8.0 * jnp.finfo(theta.dtype).eps * jnp.maximum(jnp.abs(theta), 1.0)
                )
                (_, left), (both, right) = slope(theta - off), slope(theta + off)
                no_rows = Rows(
                    jnp.zeros((1, *theta.shape), theta.dtype),
                    jnp.zeros((1,), theta.dtype),
                )
                return both, 0.5 * (left + right), no_rows
            both, grad = slope(theta)
            if curvature == "fisher":
                return both, grad, _fisher(losses, theta)
            if model.predictor is not None:
                return both, grad, _gauss_newton(model, theta, data, mask)
            budget = memory_budget // num_particles
            return (
                both,
                grad,
                _hessian(value, theta, data, budget, family.diagonal_only),
            )

        draws = family.sample(
            rng_key, q, (num_particles // 2 if antithetic else num_particles,)
        )
        if antithetic:
            draws = jnp.concatenate([draws, 2.0 * q.loc[None] - draws])
        (tempered, unweighted), grads, second = jax.vmap(one)(draws)
        if isinstance(second, Rows):
            # The rows of all particles, each with its share of the weight.
            x = jnp.reshape(second.x, (-1, second.x.shape[-1]))
            grad_var = family.covariance_gradient(
                q, x, jnp.ravel(second.weights) * (0.5 / num_particles)
            )
        else:
            grad_var = 0.5 * jnp.mean(second, axis=0)
        expected, grad_loc = jnp.mean(unweighted), jnp.mean(grads, axis=0)
        return base.Evaluation(
            value(q.loc)[1], expected, grad_loc, grad_var, jnp.mean(tempered)
        )

    return base.Expectation(evaluate, needs_key=True, loss=model.total)


def _fisher(losses: base.WeighedLosses, theta: Array) -> Rows:
    """Σ w ∇l ∇lᵀ over data and sites."""
    jacobian = jax.jacrev(lambda t: losses(t)[0])(theta)
    weights = jnp.broadcast_to(losses(theta)[1], jacobian.shape[:-1])
    return Rows(jnp.reshape(jacobian, (-1, theta.shape[0])), jnp.ravel(weights))


def _gauss_newton(
    model: base.ModelLoss, theta: Array, data: PyTree, mask: Array | None
) -> Rows:
    """Σ_i J_iᵀ Σ_s w l''(u_i) J_i, with J the Jacobian of the predictor."""
    predict, losses_at = model.by_predictor()
    u, jacobian = differentiate.with_jacobian(lambda t: predict(t, *data), theta)

    blocks = differentiate.hessians(lambda v: losses_at(v, theta, *data), u)
    on = base.rows_of(mask, u.shape[0])
    return Rows(*curvature_rows(jacobian, base.zero_where_off(blocks, on)))


def _hessian(
    value: _Value, theta: Array, data: PyTree, memory_budget: int, diagonal: bool
) -> Array:
    """The whole Hessian ``(d, d)``, column by column, or its diagonal ``(d,)``; in chunks that fit the memory."""
    (d,) = theta.shape

    def product(tangent: Array) -> Array:
        return hessian_product(jax.grad(lambda t: value(t)[0]), theta, tangent)

    if d > MAX_DIMENSION:
        raise ValueError(
            f"the exact Hessian is for d <= {MAX_DIMENSION}, got d = {d}: {_ALTERNATIVES}."
        )
    if not differentiate.depends_on(product, jnp.ones_like(theta)):
        raise ValueError(
            f"the loss is piecewise linear in the parameters, without curvature: {_ALTERNATIVES}."
        )
    elements = sum(jnp.size(leaf) for leaf in jax.tree.leaves(data))
    column = theta.dtype.itemsize * (2 * d + elements)
    if column > memory_budget:
        raise ValueError(
            f"one column of the Hessian takes about {column} bytes, more than memory_budget = "
            f"{memory_budget}: {_ALTERNATIVES}, or smaller batches."
        )
    chunk = max(1, min(d, memory_budget // column))
    if diagonal:
        return map_batches(
            lambda j: product(jax.nn.one_hot(j, d, dtype=theta.dtype))[j],
            jnp.arange(d),
            chunk,
        )
    columns = map_batches(product, jnp.eye(d, dtype=theta.dtype), chunk)
    return 0.5 * (columns + columns.T)
