"""What the sparse regressions take and refuse."""

import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.families import SpikeSlab
from numpyro_tempered.sparse.base import Prior


class Problem(NamedTuple):
    """A regression as the ascents take it.

    Attributes:
        x: Columns less their means, and a last one of ones, where there is an intercept; else as given.
        y: Target, shape ``(n,)``.
        prior: Of the coefficients, one a column of ``x``: an intercept is always in.
        centre: What was taken off the columns, ``(d,)``.
        init: Coefficients to start from, one a column of ``x``; or None.
    """

    x: Array
    y: Array
    prior: SpikeSlab
    centre: Array
    init: Array | None


def is_traced(*values: Any) -> bool:
    """Whether a value is known only when the compiled program runs."""
    return any(isinstance(value, jax.core.Tracer) for value in jax.tree.leaves(values))


def real_array(value: Any, name: str) -> Any:
    """Real numbers: float64 on the host, or a tracer of the default float.

    Raises:
        TypeError: If they are not real numbers.
        ValueError: If one is not finite.
    """
    given = value if is_traced(value) else np.asarray(value)
    if given.dtype.kind not in "fiub" and given.dtype.name != "bfloat16":
        raise TypeError(f"{name} must hold real numbers, got dtype {given.dtype}: pass a float array.")
    if is_traced(given):
        return given.astype(jnp.result_type(float))
    values = given.astype(np.float64)
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(values.astype(jnp.result_type(float)))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        place = f" at index {at}" if at else ""
        raise ValueError(f"{name} is {values[at]}{place}: leave such rows out, or fill them in.")
    return values


def as_data(x: Any, y: Any) -> tuple[Any, Any]:
    """Design and target.

    Raises:
        ValueError: If their shapes are not ``(n, d)`` and ``(n,)`` with n and d at least 1.
    """
    x, y = real_array(x, "x"), real_array(y, "y")
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must have shape (n, d) with n, d > 0, got {x.shape}: one row a datum.")
    if y.shape != x.shape[:1]:
        raise ValueError(f"y must have shape ({x.shape[0]},), one number a row of x, got {y.shape}.")
    return x, y


def positive(value: Any, name: str) -> Any:
    """A positive finite number, float or tracer.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not positive and finite.
    """
    if is_traced(value):
        if value.shape != ():
            raise ValueError(f"{name} must be a number, got an array of shape {value.shape}: use jax.vmap.")
        return value
    if isinstance(value, str | bool) or value is None:
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if np.ndim(value) != 0:
        raise ValueError(f"{name} must be a number, got an array of shape {np.shape(value)}: use jax.vmap.")
    number = float(value)
    if not (math.isfinite(number) and number > 0.0):
        raise ValueError(f"{name} must be positive and finite, got {value}.")
    return number


def check_count(value: Any, name: str) -> int:
    """A whole number of at least 1.

    Raises:
        ValueError: If it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}.")
    return int(value)


def check_tolerance(value: Any) -> float:
    """The gain of a sweep, in nats a row, at which an ascent has converged.

    Raises:
        ValueError: If it is negative or not finite.
    """
    if not (math.isfinite(value) and value >= 0.0):
        raise ValueError(f"tolerance must be at least 0 and finite, got {value}.")
    return float(value)


def per_column(value: Any, name: str, d: int) -> Any:
    """A number or one a column, as ``(d,)``.

    Raises:
        ValueError: If it has another shape.
    """
    values = real_array(value, name)
    if values.shape not in ((), (d,)):
        raise ValueError(f"{name} must be a number or have shape ({d},), one a column of x, got {values.shape}.")
    return (jnp if is_traced(values) else np).broadcast_to(values, (d,))


def as_problem(x: Any, y: Any, prior: Prior, init: Any) -> Problem:
    """Check the prior, and move the columns to their means where there is an intercept.

    A column that is constant is 0 then, and its coefficient keeps its prior.

    Raises:
        ValueError: If an inclusion probability is outside of (0, 1], or a scale is not positive; or a shape is
            wrong.
    """
    n, d = x.shape
    probs = per_column(prior.inclusion_prob, "inclusion_prob", d)
    scale = per_column(prior.slab_scale, "slab_scale", d)
    if not is_traced(probs) and not np.all((probs > 0.0) & (probs <= 1.0)):
        wrong = probs[~((probs > 0.0) & (probs <= 1.0))][0]
        raise ValueError(
            f"inclusion_prob must be above 0 and at most 1 (always in), got {wrong}: leave a column that "
            "is never in out of x."
        )
    if not is_traced(scale) and not np.all(scale > 0.0):
        raise ValueError(f"slab_scale must be positive, got {scale[scale <= 0.0][0]}.")
    start = None if init is None else per_column(init, "init", d)
    xp: Any = jnp if is_traced(x) else np
    centre = xp.zeros_like(x, shape=(d,))
    if prior.intercept_scale is not None:
        intercept = positive(prior.intercept_scale, "intercept_scale")
        centre = xp.mean(x, axis=0)
        x = xp.concatenate([x - centre[None, :], xp.ones_like(x, shape=(n, 1))], axis=1)
        probs, scale = jnp.append(probs, 1.0), jnp.append(scale, intercept)
        start = None if start is None else jnp.append(start, 0.0)
    dtype = jnp.result_type(float)
    x, y, probs, scale, centre = (jnp.asarray(part, dtype) for part in (x, y, probs, scale, centre))
    return Problem(
        x,
        y,
        SpikeSlab(probs, jnp.zeros_like(scale), scale),
        centre,
        None if start is None else jnp.asarray(start, dtype),
    )


def check_end(objective: Any, converged: Any, num_sweeps: int, dtype: Any) -> None:
    """Complain of an ascent that ended badly, where its end is known.

    Raises:
        ValueError: If the objective is not finite.
    """
    if is_traced(objective, converged):
        return
    if not np.isfinite(objective):
        raise ValueError(
            f"the ELBO is {float(objective)}: x, y or the prior exceed the range of {np.dtype(dtype).name}. "
            "Rescale the columns to about unit deviation."
        )
    if not converged:
        warnings.warn(
            f"the best start did not converge within {num_sweeps} sweeps: take a larger num_sweeps; or, if its "
            f"trace falls at the end, the precision of {np.dtype(dtype).name} is too low for these data.",
            stacklevel=3,
        )
