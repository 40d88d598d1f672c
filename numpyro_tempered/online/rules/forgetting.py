"""Forgetting, for targets that drift: exponential, to the prior, or by a random walk."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.families.base import family_of


class Forgetting(NamedTuple):
    """How a posterior loses evidence between two rounds; for ``ngvi(forget=...)``.

    Attributes:
        keep: ``(count, q) -> factor`` of the precision that is kept, or None for all.
        inflate: ``(count, q) -> variance`` added to that of every coordinate, or None.
        window: Number of rounds that the posterior holds in the long run, as text.
        evidence: ``count -> η``, the evidence to hold at most, the rest being the prior's, or None.
    """

    keep: Callable[[Array, Any], Any] | None
    inflate: Callable[[Array, Any], Any] | None
    window: str
    evidence: Callable[[Array], Any] | None = None

    def __repr__(self) -> str:
        kind = "power" if self.keep is not None else "random_walk" if self.inflate is not None else "to_prior"
        return f"{kind}: window {self.window}"


def to_prior(evidence: float | Callable[[Array], Any]) -> Forgetting:
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
    if isinstance(evidence, jax.core.Tracer):
        return Forgetting(None, None, "traced", lambda count: evidence)
    if callable(evidence):
        return Forgetting(None, None, "1 + evidence(t) / step_size rounds", evidence)
    if not evidence > 0:
        raise ValueError(f"evidence must be positive, got {evidence!r}.")
    window = f"1 + {evidence:.4g} / step_size rounds" if math.isfinite(evidence) else "unbounded"
    return Forgetting(None, None, window, lambda count: float(evidence))


def power(factor: float | Callable[[Array], Any], *, widest: float = math.inf) -> Forgetting:
    r"""Exponential forgetting: the posterior is raised to a power before each datum, q^γ.

    The precision is multiplied by γ, the mean stays; after t rounds a datum counts γ to the power of its age
    and the posterior holds 1/(1-γ) data in the long run, the prior being forgotten with the rest. On a conjugate
    stream it is discounted least squares.

    A coordinate that gets no data forgets all the same, and its variance grows exponentially (wind-up): where
    features are rare, give ``widest``, or take :func:`random_walk`, whose variance grows in proportion to time.

    Args:
        factor: γ in (0, 1], or a callable of the count t = 1, 2, ...
        widest: A coordinate whose standard deviation is beyond it forgets no more; with a full covariance
            none does while one is beyond. In any case that holds short of overflow.

    Returns:
        A :class:`Forgetting`, which prints its window.

    Raises:
        ValueError: If ``factor`` is not in (0, 1], or ``widest`` is not positive.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.online.power(0.99)
        power: window 100 rounds
    """
    if not widest > 0:
        raise ValueError(f"widest must be positive, got {widest!r}.")

    def keep(count: Array, q: Any) -> Array:
        kept = factor if isinstance(factor, jax.core.Tracer) or not callable(factor) else factor(count)
        return _bounded(_within(kept, q), q, widest)

    if isinstance(factor, jax.core.Tracer):
        return Forgetting(keep, None, "traced")
    if callable(factor):
        return Forgetting(keep, None, "1 / (1 - factor(t)) rounds")
    if not 0.0 < factor <= 1.0:
        raise ValueError(f"factor must be in (0, 1], got {factor!r}: 1 forgets nothing.")
    if factor == 1.0:
        # The float itself, by which the families know that there is nothing to do.
        return Forgetting(lambda count, q: 1.0, None, "unbounded")
    return Forgetting(keep, None, f"{1.0 / (1.0 - factor):.4g} rounds")


def _bounded(factor: Array, q: Any, widest: float) -> Array:
    """The factor, with 1 in its place where q is wide already."""
    family = family_of(q)
    # Squares of this are still far from overflow.
    limit = jnp.minimum(jnp.asarray(widest, q.loc.dtype), jnp.finfo(q.loc.dtype).max ** 0.25)
    wide = family.marginal_scale(q) > limit
    return jnp.where(wide if family.diagonal_only else jnp.any(wide), jnp.ones_like(factor), factor)


def _within(factor: Any, q: Any) -> Array:
    factor = jnp.asarray(factor, q.loc.dtype)
    # NaN makes the round one that is rejected.
    return jnp.where((factor > 0) & (factor <= 1), factor, jnp.nan)


def random_walk(scale: Any) -> Forgetting:
    r"""Random-walk inflation: the parameters move by N(0, scale²) between two rounds.

    The posterior after a round is the prediction for the next one, as in a Kalman filter: exact on a
    conjugate stream whose parameters drift so. With information h a datum the variance settles at about
    scale / √h, which is that of 1 / (scale √h) data.

    Args:
        scale: Standard deviation of a step, on the unconstrained scale: a float, an array ``(d,)``, or a
            callable of the count that returns one.

    Returns:
        A :class:`Forgetting`, which prints its window for unit information a datum.

    Raises:
        ValueError: If ``scale`` is negative or not finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.online.random_walk(0.01)
        random_walk: window 100 / √h rounds, h the information in a datum
    """
    if isinstance(scale, jax.core.Tracer):
        return Forgetting(None, lambda count, q: jnp.square(jnp.asarray(scale, q.loc.dtype)), "traced")
    if callable(scale):
        return Forgetting(
            None,
            lambda count, q: jnp.square(jnp.asarray(scale(count), q.loc.dtype)),
            "1 / (scale(t) √h) rounds, h the information in a datum",
        )
    value = np.asarray(scale, dtype=float)
    if not np.all(np.isfinite(value)) or np.any(value < 0):
        raise ValueError(f"scale must be finite and not negative, got {scale!r}.")
    largest = float(np.max(value))
    window = f"{1.0 / largest:.4g} / √h" if largest > 0 and math.isfinite(1.0 / largest) else "unbounded"
    return Forgetting(
        None,
        lambda count, q: jnp.square(jnp.asarray(value, q.loc.dtype)),
        f"{window} rounds, h the information in a datum" if largest > 0 else window,
    )
