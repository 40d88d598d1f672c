r"""Integrals over Gaussian predictors as expectations, of a bare loss or of a model that names its predictor.

Where the losses of a model depend on m coordinates s of θ besides its predictors u, as on a latent scale, (s, u)
is Gaussian under q. With u given s ~ N(μ(s), τ²) and G(s, μ, τ²) the integral of a loss over it,

.. math:: E[ℓ] = E_s[G], \quad E[∂_u ℓ] = E_s[G_μ], \quad E[∂_s ℓ] = E_s[G_s],
          \quad E[∂_s ∂_u ℓ] = E_s[∂_s G_μ], \quad E[∂_s² ℓ] = E_s[G_{ss}],

with the derivatives in s at μ and τ fixed: u is integrated whichever way it is without s, kinks included.
"""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, map_batches
from numpyro_tempered.gaussian.expectations import base
from numpyro_tempered.gaussian.expectations.base import linear, of_predictors, root
from numpyro_tempered.gaussian.expectations.differentiate import (
    LossesOfPredictors,
    slopes,
    with_jacobian,
)
from numpyro_tempered.gaussian.expectations.pinball import absolute_moments

# Moments of any losses of predictors, by mean, variance (n,) or covariance (n, K, K), and options.
Integral: TypeAlias = Callable[
    [LossesOfPredictors, Array, Array, base.Options], base.Moments
]

# Nodes of shared coordinates that are evaluated side by side, and for how many second derivatives of data in all.
_SIDE_BY_SIDE, _DERIVATIVES = 20, 100_000


def of_integral(
    name: str,
    integral: Integral,
    loss: base.Loss | None,
    *,
    predictor: str | None,
    num_outputs: int | None,
    needs_key: bool = False,
) -> base.Expectation:
    """The expectation whose moments are an integral: of a bare loss, or of a model that names its predictor.

    Args:
        name: What the user called, for messages.
        integral: Of any losses of predictors.
        loss: ``(u, y) -> loss`` of one datum, for a linear predictor; or None.
        predictor: Name of the model's predictor site, or None.
        num_outputs: K, or None for a scalar predictor.
        needs_key: Whether the integral draws.

    Raises:
        ValueError: If not exactly one of ``loss`` and ``predictor`` is given.
    """
    if (loss is None) == (predictor is None):
        raise ValueError(
            f"give {name} either a loss (u, y) -> value or a predictor's name."
        )
    if loss is None:
        refuse = base.unbound(f"{name}(predictor={predictor!r})")
        bind = functools.partial(bound, integral=integral, needs_key=needs_key)
        return base.Expectation(
            refuse, bind, predictor, needs_key, num_outputs=num_outputs, integrates=True
        )
    batch = jax.vmap(loss)

    def moments(
        mean: Array, spread: Array, y: Array, options: base.Options
    ) -> base.Moments:
        one = jnp.ones((), mean.dtype)
        return integral(lambda u: (batch(u, y)[None, :], one), mean, spread, options)

    return linear(moments, batch, num_outputs=num_outputs, needs_key=needs_key)


def bound(
    model: base.ModelLoss, integral: Integral, *, needs_key: bool
) -> base.Expectation:
    """The expectation of a model's likelihood given its predictors, linearised at the mean."""
    predict, losses_at = model.by_predictor()

    def integrate(
        theta: Array, data: base.Data, options: base.Options, mean: Array, spread: Array
    ) -> base.Moments:
        def losses(u: Array) -> tuple[Array, Array]:
            return losses_at(u, theta, *data)

        if model.kinks is None or options.curvature != "hessian":
            return integral(losses, mean, spread, options)
        _, outcomes = model.kinks(mean, theta, *data)
        return _without_kinks(integral, losses, outcomes, mean, spread, options)

    def at(theta: Array, data: base.Data, options: base.Options) -> base.Predictors:
        mean, jacobian = with_jacobian(lambda theta: predict(theta, *data), theta)
        options = options._replace(mask=base.rows_of(options.mask, mean.shape[0]))
        if model.shared is None:
            moments = functools.partial(integrate, theta, data, options)
            return base.Predictors(
                mean,
                jacobian,
                moments,
                lambda u: jnp.sum(losses_at(u, theta, *data)[0], axis=0),
            )
        integral_at = functools.partial(integrate, data=data, options=options)
        at_mean = jnp.sum(losses_at(mean, theta, *data)[0], axis=0)
        return _beside_shared(
            model.shared, integral_at, theta, (mean, jacobian), at_mean, options
        )

    needs_key = needs_key or (model.shared is not None and model.shared.needs_key)
    return of_predictors(at, loss=model.total, needs_key=needs_key)


def _without_kinks(
    integral: Integral,
    losses: LossesOfPredictors,
    outcomes: Array,
    mean: Array,
    variance: Array,
    options: base.Options,
) -> base.Moments:
    """The integral of what is left of losses without their kinks, and those in closed form.

    A loss ℓ whose slope jumps by 2c at y is smooth after c |u - y|, of which the expectation is known.
    """
    has_kink = jnp.isfinite(outcomes)
    places = jnp.where(has_kink, outcomes, 0.0)
    offset = jnp.sqrt(jnp.finfo(mean.dtype).eps) * jnp.maximum(jnp.abs(places), 1.0)

    def half_jump(site: int) -> Array:
        above, below = (
            slopes(losses, places[site] + sign * offset[site])[1][site]
            for sign in (1.0, -1.0)
        )
        return 0.5 * (above - below)

    sizes = jnp.where(
        has_kink, jnp.stack([half_jump(site) for site in range(outcomes.shape[0])]), 0.0
    )

    def smooth(u: Array) -> tuple[Array, Array]:
        values, weights = losses(u)
        return values - sizes * jnp.abs(u - places), weights

    rest = integral(smooth, mean, variance, options)
    weights = jnp.broadcast_to(losses(mean)[1], sizes.shape)
    kinks = jax.vmap(lambda y: absolute_moments(mean, variance, y, options))(places)
    return base.Moments(
        rest.at_mean + jnp.sum(sizes * kinks.at_mean, axis=0),
        rest.expected + jnp.sum(sizes * kinks.expected, axis=0),
        rest.first + jnp.sum(weights * sizes * kinks.first, axis=0),
        rest.second + jnp.sum(weights * sizes * kinks.second, axis=0),
        rest.objective + jnp.sum(weights * sizes * kinks.expected, axis=0),
    )


def _beside_shared(
    shared: base.Shared,
    integrate: Callable[..., base.Moments],
    theta: Array,
    affine: tuple[Array, Array],
    at_mean: Array,
    options: base.Options,
) -> base.Predictors:
    """The predictors (s, u) of each datum, m + 1 of them, of which s is the same for all data.

    ``affine`` has u and its derivatives at ``theta``.
    """
    u, jacobian = affine
    (n, d), places = jacobian.shape, shared.coordinates
    m = len(places)
    rows = jnp.broadcast_to(jnp.eye(d, dtype=jacobian.dtype)[places], (n, m, d))
    jacobian = jnp.concatenate([rows, jacobian[:, None, :]], axis=1)
    mean = jnp.concatenate(
        [jnp.broadcast_to(theta[places], (n, m)), u[:, None]], axis=1
    )

    def moments(mean: Array, covariance: Array) -> base.Moments:
        if options.curvature != "hessian":
            raise ValueError(
                f"beside shared latents curvature is 'hessian', got {options.curvature!r}."
            )
        # Triangular, with s first: nodes of s are the same for all data.
        factor, s0 = root(covariance), mean[0, :m]
        variance = jnp.square(factor[:, m, m])

        def at(z: Array) -> tuple[Array, ...]:
            shifted = mean[:, m] + jnp.sum(factor[:, m, :m] * z, axis=1)

            def integral_at(s: Array) -> tuple[tuple[Array, Array], base.Moments]:
                moments_at = integrate(
                    theta.at[places].set(s), mean=shifted, spread=variance
                )
                return (moments_at.objective, moments_at.first), moments_at

            def slope(s: Array) -> tuple[Array, tuple[Array, Array, base.Moments]]:
                (in_s, cross), moments_at = jax.jacfwd(integral_at, has_aux=True)(s)
                return in_s, (in_s, cross, moments_at)

            s = s0 + jnp.sum(factor[0, :m, :m] * z, axis=1)
            twice, (in_s, cross, moments_at) = jax.jacfwd(slope, has_aux=True)(s)
            first = jnp.concatenate([in_s, moments_at.first[:, None]], axis=1)
            top = jnp.concatenate([twice, cross[:, :, None]], axis=2)
            bottom = jnp.concatenate([cross, moments_at.second[:, None]], axis=1)
            second = jnp.concatenate([top, bottom[:, None, :]], axis=1)
            return moments_at.expected, first, second, moments_at.objective

        z, weights = (leaf.astype(mean.dtype) for leaf in shared.nodes(options.rng_key))
        side_by_side = max(1, min(_SIDE_BY_SIDE, _DERIVATIVES // (n * m**2)))
        expected = (
            jnp.tensordot(weights, leaf, 1) for leaf in map_batches(at, z, side_by_side)
        )
        return base.Moments(at_mean, *expected)

    return base.Predictors(mean, jacobian, moments)
