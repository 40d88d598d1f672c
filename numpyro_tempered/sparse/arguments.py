"""What the sparse regressions take and refuse."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Numbers,
    as_array,
    check_number,
    check_numbers,
    check_order,
    check_real,
    is_traced,
    to_host,
)
from numpyro_tempered.gaussian.families import SpikeSlab


class Prior(NamedTuple):
    r"""Independent coefficients, :math:`\lambda_j N(0, s_j^2) + (1 - \lambda_j)\delta_0`, and an intercept.

    Attributes:
        inclusion_prob: λ, a number or shape ``(d,)``; 1 keeps a variable in.
        slab_scale: s, in units of y (of the log-odds) per unit of x, a number or shape ``(d,)``.
        intercept_scale: Standard deviation of the intercept about 0 at the means of the columns; None for no
            intercept.
        noise: Shape and rate of the Gamma prior of the precision of the noise; None without one.
    """

    inclusion_prob: ArrayLike
    slab_scale: ArrayLike
    intercept_scale: ArrayLike | None
    noise: tuple[ArrayLike, ArrayLike] | None = None


class Regression(NamedTuple):
    """Data and prior as the ascents take them.

    Attributes:
        x: The columns minus their means and a last one of ones, if there is an intercept; else the columns.
        y: Target, shape ``(n,)``.
        prior: Of the coefficients of all columns of ``x``: an intercept is always in.
        centre: What was subtracted from the columns, ``(d,)``.
        init: Coefficients to start from, for all columns of ``x``; or None.
    """

    x: Array
    y: Array
    prior: SpikeSlab
    centre: Numbers
    init: Array | None


def real_array(value: ArrayLike, name: str) -> Numbers:
    """Real numbers: float64 on the host, or a tracer of the default float.

    Raises:
        TypeError: If they are not real numbers.
        ValueError: If one is not finite, or beyond the default float.
    """
    values = (
        value
        if isinstance(value, Array) and is_traced(value)
        else to_host(as_array(value, name))
    )
    check_real(values.dtype, name, hint="Pass a float array.")
    if not isinstance(values, np.ndarray):
        return values.astype(jnp.result_type(float))
    largest = jnp.finfo(jnp.result_type(float)).max
    bad = np.sum(~np.isfinite(values))
    check_numbers(
        values,
        name,
        hint=f"{bad} of {values.size} values are not: leave such rows out, or fill them in.",
    )
    check_numbers(values, name, f"[{-largest}, {largest}]")
    return values.astype(np.float64)


def as_data(x: ArrayLike, y: ArrayLike) -> tuple[Numbers, Numbers]:
    """Design and target.

    Raises:
        ValueError: If their shapes are not ``(n, d)`` and ``(n,)`` with n and d at least 1.
    """
    check_order({"x": x, "y": y})
    x, y = real_array(x, "x"), real_array(y, "y")
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must have shape (n, d) with n, d > 0, got {x.shape}.")
    if y.shape != x.shape[:1]:
        raise ValueError(
            f"y must have shape ({x.shape[0]},), a number for each row of x, got {y.shape}."
        )
    return x, y


def per_column(
    value: ArrayLike,
    name: str,
    d: int,
    interval: str = "(-inf, inf)",
    *,
    hint: str = "",
) -> Numbers:
    """A number, or an array of one for each column, as ``(d,)``.

    Raises:
        ValueError: If it has another shape, or a number is outside of the interval.
    """
    values = check_numbers(real_array(value, name), name, interval, hint=hint)
    if values.shape not in ((), (d,)):
        raise ValueError(
            f"{name} must be a number or have shape ({d},), for each column of x, got {values.shape}."
        )
    return (
        np.broadcast_to(values, (d,))
        if isinstance(values, np.ndarray)
        else jnp.broadcast_to(values, (d,))
    )


def as_regression(
    x: Numbers, y: Numbers, prior: Prior, init: ArrayLike | None
) -> Regression:
    """Check the prior, and subtract the means of the columns if there is an intercept.

    A constant column is 0 then, and its coefficient keeps its prior.

    Raises:
        ValueError: If an inclusion probability is outside of (0, 1], or a scale is not positive; or a shape is
            wrong.
    """
    n, d = x.shape
    hint = "At 1 a column is always in; leave one that is never in out of x."
    probs = per_column(prior.inclusion_prob, "inclusion_prob", d, "(0, 1]", hint=hint)
    scale = per_column(prior.slab_scale, "slab_scale", d, "(0, inf)")
    start = None if init is None else per_column(init, "init", d)
    centre: Numbers = np.zeros(d)
    if prior.intercept_scale is not None:
        intercept = check_number(prior.intercept_scale, "intercept_scale", "(0, inf)")
        xp = np if isinstance(x, np.ndarray) else jnp
        centre = x.mean(axis=0)
        x = xp.concatenate([x - centre[None, :], xp.ones((n, 1), x.dtype)], axis=1)
        probs, scale = jnp.append(probs, 1.0), jnp.append(scale, intercept)
        start = None if start is None else jnp.append(start, 0.0)
    dtype = jnp.result_type(float)

    def rounded(values: Numbers) -> Array:
        # On the host where they are there, as each conversion would be a program; a copy, as theirs may change.
        is_there = isinstance(values, np.ndarray)
        return (
            jax.device_put(np.array(values, dtype))
            if is_there
            else jnp.asarray(values, dtype)
        )

    scale = rounded(scale)
    return Regression(
        rounded(x),
        rounded(y),
        SpikeSlab(rounded(probs), jnp.zeros_like(scale), scale),
        # Rows of columns far from 0 keep their digits where the centre has all of its own.
        centre if isinstance(centre, np.ndarray) else rounded(centre),
        None if start is None else rounded(start),
    )
