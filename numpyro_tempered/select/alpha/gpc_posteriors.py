"""How far the minimiser lies from the posteriors of bootstrap data sets, in units of their credible sets."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_tempered.core import Array, Columns, Params, compile_once
from numpyro_tempered.select.alpha.base import Draws
from numpyro_tempered.select.alpha.data_weights import over_resamples
from numpyro_tempered.select.alpha.minimise import minimise
from numpyro_tempered.select.alpha.sandwich import Flat

Quantity = Callable[[Array], Array]
# From alpha to the ratio of squared distance and squared radius of each resample, (B,).
Ratios: TypeAlias = Callable[[float], np.ndarray]


def laplace_ratios(
    flat: Flat,
    quantity: Quantity | None,
    point: Array,
    counts: Array,
    threshold: float,
    alpha: Array,
) -> tuple[Array, Array]:
    """Squared Mahalanobis distance of the minimiser over ``threshold``, by Laplace's method at the power alpha.

    Returns:
        The ratios and whether a mode exists, ``(B,)`` each. At a ratio of at most 1 the set covers.
    """

    def of_resample(counts: Array) -> tuple[Array, Array]:
        def terms(theta: Array) -> Array:
            return jnp.append(
                alpha * counts * flat.losses(theta), -flat.log_prior(theta)
            )

        mode = minimise(terms, point)
        factor = jnp.linalg.cholesky(mode.hessian)
        if quantity is None:
            scaled = factor.T @ (point - mode.point)
        else:
            off = quantity(point) - quantity(mode.point)
            half = solve_triangular(
                factor, jax.jacfwd(quantity)(mode.point).T, lower=True
            )
            scaled = solve_triangular(
                jnp.linalg.cholesky(half.T @ half), off, lower=True
            )
        return jnp.sum(jnp.square(scaled)) / threshold, mode.converged

    return over_resamples(of_resample, counts.astype(point.dtype), len(point))


def laplace_ratios_at(
    flat: Flat, quantity: Quantity | None, point: Array, counts: Array, level: float
) -> Ratios:
    """:func:`laplace_ratios` as a function of alpha, by one compiled program.

    Raises:
        ValueError: In that function, if a resample has no mode.
    """
    from scipy.stats import chi2

    dim = len(point) if quantity is None else jax.eval_shape(quantity, point).size
    threshold = float(chi2.ppf(level, dim))

    def at_power(alpha: Array, point: Array, counts: Array) -> tuple[Array, Array]:
        return laplace_ratios(flat, quantity, point, counts, threshold, alpha)

    program = compile_once(at_power, jnp.ones((), point.dtype), point, counts)

    def ratios(alpha: float) -> np.ndarray:
        values, modes = jax.device_get(
            program(jnp.asarray(alpha, point.dtype), point, counts)
        )
        good = modes & np.isfinite(values)
        if not np.all(good):
            raise ValueError(
                f"at alpha = {alpha:.3g} the posteriors of {np.sum(~good)} of {len(good)} resamples have no mode "
                "that Newton's method finds, or a constant quantity: look at the prior, or take "
                'posterior="method".'
            )
        return values.astype(np.float64)

    return ratios


def credible_set(
    quantity: Callable[[Draws], Array], level: float
) -> Callable[[Draws], Params]:
    """From draws to the ellipsoid around their mean that holds the share ``level`` of them."""

    def reduce(draws: Draws) -> Params:
        values = quantity(draws)
        mean = jnp.mean(values, axis=0)
        centred = values - mean
        factor = jnp.linalg.cholesky(centred.T @ centred / (len(values) - 1))
        scaled = solve_triangular(factor, centred.T, lower=True)
        radius = jnp.quantile(jnp.sum(jnp.square(scaled), axis=0), level)
        return {"mean": mean, "factor": factor, "radius": radius}

    return reduce


def ellipsoid_ratios(sets: Columns, at: np.ndarray) -> np.ndarray:
    """Ratios of the point ``at``, with the leading axes of the sets."""
    off = (at - sets["mean"]).astype(np.float64)
    scaled = np.linalg.solve(sets["factor"].astype(np.float64), off[..., None])[..., 0]
    return np.sum(np.square(scaled), axis=-1) / sets["radius"]
