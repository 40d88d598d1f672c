"""Forgetting, for targets that drift: exponential, to the prior, or by a random walk."""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Scalar,
    check_number,
    check_numbers,
    is_traced,
)
from numpyro_tempered.gaussian.families.base import family_of
from numpyro_tempered.online.base import Gaussian, Schedule

ByCount: TypeAlias = Callable[[Array], Scalar]


class Forgetting(NamedTuple):
    """How a posterior loses evidence between two rounds; for ``ngvi(forget=...)``.

    Attributes:
        keep: ``(count, q) -> factor`` of the precision that is kept, or None for all.
        inflate: ``(count, q) -> variance`` added to that of every coordinate, or None.
        window: Number of rounds that the posterior holds in the long run, as text.
        evidence: ``count -> η``, the most evidence that the posterior may hold beyond its prior, or None.
    """

    keep: Schedule | None
    inflate: Callable[[Array, Gaussian], Array] | None
    window: str
    evidence: ByCount | None = None

    def __repr__(self) -> str:
        kind = (
            "power"
            if self.keep is not None
            else "random_walk"
            if self.inflate is not None
            else "to_prior"
        )
        return f"{kind}: window {self.window}"


def to_prior(evidence: float | ByCount) -> Forgetting:
    r"""Exponential forgetting to the prior: q^(1-ρ) π^ρ with ρ = α/(α+η), the ``evidence`` of :func:`ngvi`.

    The posterior never holds more than η data. Unlike :func:`power` it does not widen beyond the prior where
    there are no data.

    Args:
        evidence: η, positive, or a callable of the count t = 1, 2, ...

    Returns:
        A :class:`Forgetting`, which prints its window of 1 + η/α rounds, α the step size.

    Raises:
        ValueError: If ``evidence`` is not positive.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.online.to_prior(99.0)
        to_prior: window 1 + 99 / step_size rounds
    """
    if callable(evidence):
        return Forgetting(None, None, "1 + evidence(t) / step_size rounds", evidence)
    check_number(evidence, "evidence", "(0, inf]")
    if is_traced(evidence):
        return Forgetting(None, None, "traced", lambda count: evidence)
    window = (
        f"1 + {evidence:.4g} / step_size rounds"
        if math.isfinite(evidence)
        else "unbounded"
    )
    return Forgetting(None, None, window, lambda count: float(evidence))


def power(factor: float | ByCount, *, max_scale: float = math.inf) -> Forgetting:
    r"""Exponential forgetting: the posterior is raised to a power before each datum, q^γ.

    The precision is multiplied by γ, the mean stays; after t rounds a datum counts γ to the power of its age
    and the posterior holds 1/(1-γ) data in the long run, the prior being forgotten with the rest. On a conjugate
    stream it is discounted least squares.

    A coordinate that gets no data forgets all the same, and its variance grows exponentially (wind-up). Where
    features are rare give ``max_scale``, or take :func:`random_walk`, whose variance grows in proportion to time.

    Args:
        factor: γ in (0, 1], or a callable of the count t = 1, 2, ...
        max_scale: A coordinate whose standard deviation exceeds it stops forgetting; with a full covariance all
            stop while one exceeds it. Forgetting always stops before the variance overflows.

    Returns:
        A :class:`Forgetting`, which prints its window.

    Raises:
        ValueError: If ``factor`` is not in (0, 1], or ``max_scale`` is not positive.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.online.power(0.99)
        power: window 100 rounds
    """
    check_number(max_scale, "max_scale", "(0, inf]")

    def keep(count: Array, q: Gaussian) -> Array:
        value = jnp.asarray(factor(count) if callable(factor) else factor, q.loc.dtype)
        # NaN rejects the round.
        value = jnp.where((value > 0) & (value <= 1), value, jnp.nan)
        family = family_of(q)
        # The square of this limit is still far from overflow.
        limit = jnp.minimum(
            jnp.asarray(max_scale, q.loc.dtype), jnp.finfo(q.loc.dtype).max ** 0.25
        )
        wide = family.marginal_scale(q) > limit
        # Coordinates that are wide already forget nothing.
        return jnp.where(
            wide if family.diagonal_only else jnp.any(wide), jnp.ones_like(value), value
        )

    if callable(factor):
        return Forgetting(keep, None, "1 / (1 - factor(t)) rounds")
    check_number(factor, "factor", "(0, 1]", hint="1 forgets nothing.")
    if is_traced(factor):
        return Forgetting(keep, None, "traced")
    if factor == 1.0:
        # The float itself, by which the families know that there is nothing to do.
        return Forgetting(lambda count, q: 1.0, None, "unbounded")
    return Forgetting(keep, None, f"{1.0 / (1.0 - factor):.4g} rounds")


def random_walk(scale: ArrayLike | Callable[[Array], ArrayLike]) -> Forgetting:
    r"""Random-walk inflation: the parameters move by N(0, scale²) between two rounds.

    The posterior after a round is the prediction for the next one, as in a Kalman filter: exact on a
    conjugate stream whose parameters drift so. With information h in each datum the variance settles at about
    scale / √h, which is that of 1 / (scale √h) data.

    Args:
        scale: Standard deviation of a step, on the unconstrained scale: a float, an array ``(d,)``, or a
            callable of the count that returns one.

    Returns:
        A :class:`Forgetting`, which prints its window for unit information in a datum.

    Raises:
        ValueError: If ``scale`` is negative or not finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.online.random_walk(0.01)
        random_walk: window 100 / √h rounds, h the information in a datum
    """

    def inflate(count: Array, q: Gaussian) -> Array:
        return jnp.square(
            jnp.asarray(scale(count) if callable(scale) else scale, q.loc.dtype)
        )

    unit = "rounds, h the information in a datum"
    if callable(scale):
        return Forgetting(None, inflate, f"1 / (scale(t) √h) {unit}")
    if is_traced(scale):
        return Forgetting(None, inflate, "traced")
    largest = float(np.max(check_numbers(scale, "scale", "[0, inf)")))
    if largest == 0.0 or math.isinf(1.0 / largest):
        return Forgetting(None, inflate, "unbounded")
    return Forgetting(None, inflate, f"{1.0 / largest:.4g} / √h {unit}")
