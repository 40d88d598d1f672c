r"""Step sizes of the regret theorems, and the constants of data and box that they need (CA19).

The theorems ask for

- L, a Lipschitz constant of the expected losses in μ = (m, C), in the Euclidean norm. A loss that is L-Lipschitz
  in θ has an expectation that is L-Lipschitz in μ, because E‖Δm + ΔC z‖ ≤ (‖Δm‖² + ‖ΔC‖²)^½ for z ~ N(0, I):
  the 2L of the paper is not needed. :func:`lipschitz` and :func:`lipschitz_squared`;
- D, the size of the box. :func:`diameter`;
- γ, the strong convexity of KL(q_μ, prior) in μ. :func:`strong_convexity`.

They hold for losses that are convex in θ. :mod:`numpyro_tempered.bounds` has the bounds themselves.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.mean_field import MeanField
from numpyro_tempered.online.base import Box, OnlineState, Rule, StepSize, SVBRate


def lipschitz(x: ArrayLike, slope: float = 1.0) -> float:
    r"""The constant L of losses :math:`\ell(x^\top\theta, y)` whose slope in the predictor is bounded.

    :math:`L = \texttt{slope} \cdot \max_t \lVert x_t\rVert`. The slope is 1 for the hinge with labels ±1, the
    logistic, the absolute and the pinball loss (max(τ, 1 - τ) serves there). The squared loss has none: see
    :func:`lipschitz_squared`.

    Args:
        x: Features, shape ``(d,)`` or ``(T, d)``, one row a round; for rounds that are batches of n rows whose
            losses are summed, multiply by n.
        slope: Largest absolute slope of the loss in the predictor.

    Returns:
        L, positive.

    Raises:
        ValueError: If the features are not finite or all 0, or the slope is not positive.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.online.lipschitz([[3.0, 4.0], [1.0, 0.0]])
        5.0
    """
    _positive(slope=slope)
    rows = np.atleast_2d(np.asarray(x, np.float64))
    return _positive(L=slope * math.sqrt(np.max(np.sum(np.square(rows), axis=-1))))


def lipschitz_squared(x: ArrayLike, y: ArrayLike, box: Box) -> float:
    r"""The constant L of expected squared losses :math:`E_q(y - x^\top\theta)^2` over a box.

    The gradients are -2(y - m·x) x in the means and 2σ_j x_j² in the scales, so that with bounds M on the means
    and S on the scales L² is the largest of :math:`4(|y| + \sum_j M_j|x_j|)^2\lVert x\rVert^2 +
    4\sum_j S_j^2x_j^4`.

    Args:
        x: Features, shape ``(T, d)``.
        y: Outcomes, shape ``(T,)``.
        box: Finite bounds.

    Returns:
        L, positive.

    Raises:
        ValueError: If a bound is not finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.online.lipschitz_squared([[1.0]], [2.0], nt.online.Box(loc=1.5, scale=2.0))
        8.06225774829855
    """
    rows, y = np.atleast_2d(np.asarray(x, np.float64)), np.asarray(y, np.float64)
    loc, scale = _finite_box(box, rows.shape[-1])
    residual = np.abs(y) + np.abs(rows) @ loc
    in_loc = np.square(residual) * np.sum(np.square(rows), axis=-1)
    in_scale = np.sum(np.square(scale * np.square(rows)), axis=-1)
    return _positive(L=2.0 * math.sqrt(np.max(in_loc + in_scale)))


def diameter(box: Box, d: int, *, point: bool = False) -> float:
    r"""The size D of a box: :math:`D^2 = \sup\lVert m - m'\rVert^2 + 2\sup\lVert\sigma\rVert^2`.

    The factor 2 is what SVB's recursion in σ proves, whose step is half of that in m (CA19, Theorem 3; the D
    printed in section 4 is D²).

    Args:
        box: Finite bounds, each a scalar or ``(d,)``.
        d: Number of coordinates.
        point: Whether the rule moves a point (OGA), for which the scales do not count.

    Returns:
        D, positive.

    Raises:
        ValueError: If a bound that counts is not finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.online.diameter(nt.online.Box(loc=1.0, scale=2.0), d=4)
        6.928203230275509
    """
    loc, scale = _finite_box(box._replace(scale=1.0) if point else box, d)
    return math.sqrt(4.0 * np.sum(np.square(loc)) + (0.0 if point else 2.0 * np.sum(np.square(scale))))


def strong_convexity(prior: Any) -> float:
    r"""The constant γ of KL(q_μ, prior) in μ = (m, σ), or (m, C) for a full covariance C'C.

    One over the largest variance of the prior: the Hessian of KL is that of ‖μ‖²/2 in the prior's metric plus
    one of -log det, which is positive (CA19, section 4).

    Args:
        prior: A ``MeanField`` or ``FullRank``.

    Returns:
        γ, positive.

    Raises:
        TypeError: If the family is another.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> nt.online.strong_convexity(nt.families.MeanField(jnp.zeros(2), jnp.array([0.5, 2.0])))
        0.25
    """
    if hasattr(prior, "scale_tril"):
        return 1.0 / float(np.linalg.norm(np.asarray(prior.scale_tril, np.float64), 2)) ** 2
    if isinstance(prior, MeanField):
        return 1.0 / float(np.max(np.square(np.asarray(prior.scale, np.float64))))
    raise TypeError(f"strong_convexity is known for MeanField and FullRank priors, got {type(prior).__name__}.")


def sva_rate(num_rounds: int, *, kl: float, lipschitz: float, strong_convexity: float) -> float:
    r"""SVA's constant step :math:`\eta = \sqrt{\gamma K / T} / L` (CA19, Theorem 2).

    It makes the two penalties of :func:`numpyro_tempered.bounds.sva` equal for comparators with KL(q_μ, prior)
    = K: together :math:`2 L \sqrt{K T/\gamma}`.

    Args:
        num_rounds: The horizon T; where it is unknown, 1, in :func:`doubling`.
        kl: K, the divergence from the prior of the comparators aimed at, in nats.
        lipschitz: L.
        strong_convexity: γ.

    Returns:
        η.

    Raises:
        ValueError: If an argument is not positive and finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.online.sva_rate(100, kl=4.0, lipschitz=2.0, strong_convexity=1.0)
        0.1
    """
    _positive(num_rounds=num_rounds, kl=kl, lipschitz=lipschitz, strong_convexity=strong_convexity)
    return math.sqrt(strong_convexity * kl / num_rounds) / lipschitz


def ewa_rate(num_rounds: int, *, kl: float, loss_range: float) -> float:
    r"""The step :math:`\eta = \sqrt{8 K / T} / B` of exponentially weighted aggregation (CA19, Theorem 1).

    Args:
        num_rounds: The horizon T; where it is unknown, 1, in :func:`doubling`.
        kl: K, the divergence from the prior of the comparators aimed at, in nats: log K for K experts with
            equal prior weights.
        loss_range: B, with every loss in an interval of that length.

    Returns:
        η.

    Raises:
        ValueError: If an argument is not positive and finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.online.ewa_rate(200, kl=1.0, loss_range=2.0)
        0.1
    """
    _positive(num_rounds=num_rounds, kl=kl, loss_range=loss_range)
    return math.sqrt(8.0 * kl / num_rounds) / loss_range


def svb_constant(*, lipschitz: float, diameter: float) -> float:
    r"""The constant :math:`c = D / (\sqrt 2 L)` of :func:`svb_rate` (CA19, Theorem 3, corrected).

    The published :math:`\sqrt 2 D / L` is twice that, and with it the regret can exceed the bound.

    Args:
        lipschitz: L.
        diameter: D, from :func:`diameter`.

    Returns:
        c.

    Raises:
        ValueError: If an argument is not positive and finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> box = nt.online.Box(loc=20.0, scale=1.0)
        >>> c = nt.online.svb_constant(lipschitz=5.0, diameter=nt.online.diameter(box, d=2))
        >>> rule = nt.online.svb(nt.online.svb_rate(c), box=box)
    """
    _positive(lipschitz=lipschitz, diameter=diameter)
    return diameter / (math.sqrt(2.0) * lipschitz)


class StronglyConvexRate(SVBRate):
    """The step size c / (t σ²); made by :func:`svb_strongly_convex_rate`."""

    def times_variance(self, count: Array, q: MeanField) -> Array:
        """The rate times σ², which neither overflows nor divides by zero."""
        return self.constant / count.astype(q.loc.dtype)


def svb_strongly_convex_rate(curvature: float) -> StronglyConvexRate:
    r"""SVB's step for strongly convex losses, :math:`\eta_{t,j} = 2 / (H t\, \sigma_{t,j}^2)` (CA19, Theorem 3).

    Args:
        curvature: H, with every expected loss H-strongly convex in (m, σ). One datum of a linear predictor with
            d > 1 has none: H comes from a ridge penalty in the loss, or d = 1 (2 min x² for the squared loss).

    Returns:
        A callable of ``(count, q)`` for ``step_size``.

    Raises:
        ValueError: If ``curvature`` is not positive and finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.svb(nt.online.svb_strongly_convex_rate(2.0), box=nt.online.Box(5.0, 1.0))
    """
    return StronglyConvexRate(2.0 / _positive(curvature=curvature))


def oga_rate(*, lipschitz: float, diameter: float) -> Callable[[Array], Array]:
    r"""The step :math:`\eta_t = D / (L\sqrt{2t})` of the online gradient algorithm.

    In a box of diameter D its regret is at most :math:`D L\sqrt{2T}` at every T (M. Zinkevich, *Online convex
    programming*, ICML 2003, with the step that makes the two terms of its Theorem 1 equal).

    Args:
        lipschitz: L.
        diameter: D, from :func:`diameter` with ``point=True``.

    Returns:
        A callable of the count for ``step_size``.

    Raises:
        ValueError: If an argument is not positive and finite.

    Example:
        >>> import numpyro_tempered as nt
        >>> box = nt.online.Box(loc=20.0)
        >>> rate = nt.online.oga_rate(lipschitz=5.0, diameter=nt.online.diameter(box, d=2, point=True))
        >>> rule = nt.online.oga(rate, box=box)
    """
    c = svb_constant(lipschitz=lipschitz, diameter=diameter)
    return lambda count: c / jnp.sqrt(count)


def doubling(make_rule: Callable[[StepSize], Rule], rate: float) -> Rule:
    r"""A rule for an unknown horizon: start again at rounds 2, 4, 8, ..., each time with half the squared rate.

    The rounds from 2^k to 2^(k+1) - 1 start at the prior and run with the rate for a horizon of 2^k, which for
    :func:`sva_rate` and :func:`ewa_rate` is 2^(-k/2) times that of one round. A regret of A√T at the horizon
    then costs at most a factor √2/(√2 - 1) = 3.41 at every T, without knowing T
    (:func:`numpyro_tempered.bounds.doubling`; N. Cesa-Bianchi, G. Lugosi, *Prediction, learning, and games*,
    2006, section 2.3). The posterior forgets at every start: it holds the last half of the data at most.

    Args:
        make_rule: From a step size to the rule, such as ``nt.online.sva``.
        rate: The rate for a horizon of one round.

    Returns:
        An online :class:`Rule`; posterior and memory are those of the rule inside, the count is of all rounds.

    Raises:
        TypeError: If the rule is an aggregate.
        ValueError: If the rate is not positive and finite.

    Example:
        >>> from functools import partial
        >>> import numpyro_tempered as nt
        >>> rate = nt.online.sva_rate(1, kl=4.0, lipschitz=2.0, strong_convexity=1.0)
        >>> nt.online.doubling(partial(nt.online.sva, box=nt.online.Box(loc=20.0)), rate).name
        'sva, doubling'
    """
    if not isinstance(rate, jax.core.Tracer):
        # A traced rate lets a grid of them run under one vmap.
        _positive(rate=rate)
    if make_rule(rate).step is not None:
        raise TypeError(
            "doubling starts rules again that are an evaluation and an update, not aggregates of them."
        )

    def schedule(count: Array) -> Array:
        # The position of the highest bit is k: a logarithm in floating point could miss a power of two.
        k = 31 - jax.lax.clz(count.astype(jnp.int32))
        return rate * jnp.exp2(-0.5 * k)

    rule = make_rule(schedule)

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        state = rule.update(evaluation, state)
        following = state.count + 1
        last = (following & state.count) == 0
        fresh = rule.init(state.prior)
        posterior, memory = jax.tree.map(
            lambda new, old: jnp.where(last, new, old),
            (fresh.posterior, fresh.memory),
            (state.posterior, state.memory),
        )
        return state._replace(posterior=posterior, memory=memory)

    return rule._replace(update=update, name=f"{rule.name}, doubling")


def _positive(**value: float) -> float:
    """The last of the values, each of them positive and finite."""
    number = math.nan
    for name, number in value.items():
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"{name} must be positive and finite, got {number!r}.")
    return float(number)


def _finite_box(box: Box, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Both bounds as ``(d,)`` arrays."""
    bounds = []
    for name, bound in zip(box._fields, box, strict=True):
        array = np.asarray(bound, np.float64)
        if not np.all(np.isfinite(array) & (array > 0)):
            raise ValueError(
                f"the theorem needs a bounded set, got box.{name} = {bound}: give it a finite positive bound, "
                "and run the rule in that box."
            )
        bounds.append(np.broadcast_to(array, (d,)))
    return bounds[0], bounds[1]
