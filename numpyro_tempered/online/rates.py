r"""Step sizes of the regret theorems (Chérief-Abdellatif et al. 2019, "CA19").

Their constants are in :mod:`numpyro_tempered.bounds`: L by :func:`~numpyro_tempered.bounds.lipschitz` or
:func:`~numpyro_tempered.bounds.lipschitz_squared`, D by :func:`~numpyro_tempered.bounds.diameter` and γ by
:func:`~numpyro_tempered.bounds.strong_convexity`.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, check_number, check_positive
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.online.base import OnlineState, Rule, StepSize, SVBRate, choose


def sva_rate(
    num_rounds: int, *, kl: float, lipschitz: float, strong_convexity: float
) -> float:
    r"""SVA's constant step :math:`\eta = \sqrt{\gamma K / T} / L` (CA19, Theorem 2).

    It makes the two penalties of :func:`numpyro_tempered.bounds.sva` equal for comparators with KL(q_μ, prior)
    = K: together :math:`2 L \sqrt{K T/\gamma}`.

    Args:
        num_rounds: The horizon T; where it is unknown, 1, in :func:`doubling`.
        kl: K, the divergence from the prior of the comparators aimed at, in nats; :func:`point_kl` for a fixed
            parameter.
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
    check_positive(
        num_rounds=num_rounds,
        kl=kl,
        lipschitz=lipschitz,
        strong_convexity=strong_convexity,
    )
    return math.sqrt(strong_convexity * kl / num_rounds) / lipschitz


def point_kl(num_rounds: float, d: int, width: float = 1.0) -> float:
    r"""The divergence :math:`K = d\log(c\,T/d)` of a comparator that is as narrow as T data can tell.

    It is the ``kl`` of :func:`ewa_rate` and :func:`sva_rate` where the comparator aimed at is a fixed parameter,
    which has no finite divergence itself:

    - EWA: the prior restricted to a ball around the parameter, of mass :math:`(\epsilon/c)^d` at ε = d/T. The
      rate :math:`\eta = \sqrt{8 d \log(T/d)/T}/B` is that of CA19, (4), and the regret
      :func:`numpyro_tempered.bounds.ewa_point`.
    - SVA: a Gaussian around the parameter. The rate :math:`\eta = \sqrt{\gamma d\log(T/d)/T}/L` is that of CA19,
      section 4.1, and the regret :func:`numpyro_tempered.bounds.sva_point`.

    Args:
        num_rounds: The horizon T, above d/c.
        d: Number of coordinates.
        width: c, 1 in CA19. For the uniform prior on [-M, M]^d and losses that change by at most L times the
            largest change of a coordinate, c = 2 M L.

    Returns:
        K, in nats.

    Raises:
        ValueError: If an argument is not positive and finite, or T is at most d/c.

    Example:
        >>> import numpyro_tempered as nt
        >>> K = nt.online.point_kl(10_000, d=2)
        >>> print(f"{K:.2f} {nt.online.ewa_rate(10_000, kl=K, loss_range=1.0):.4f}")
        17.03 0.1167
    """
    check_positive(num_rounds=num_rounds, d=d, width=width)
    if width * num_rounds <= d:
        raise ValueError(
            f"num_rounds must exceed d / width = {d / width:g}, got {num_rounds:g}: with fewer rounds the "
            "comparator would be wider than the prior, and no rate of this form has a bound."
        )
    return d * math.log(width * num_rounds / d)


def ewa_rate(num_rounds: int, *, kl: float, loss_range: float) -> float:
    r"""The step :math:`\eta = \sqrt{8 K / T} / B` of exponentially weighted aggregation (CA19, Theorem 1).

    Args:
        num_rounds: The horizon T; where it is unknown, 1, in :func:`doubling`.
        kl: K, the divergence from the prior of the comparators aimed at, in nats: log K for K experts with
            equal prior weights, :func:`point_kl` for a fixed parameter under a density.
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
    check_positive(num_rounds=num_rounds, kl=kl, loss_range=loss_range)
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
        >>> c = nt.online.svb_constant(lipschitz=5.0, diameter=nt.bounds.diameter(box, d=2))
        >>> rule = nt.online.svb(nt.online.svb_rate(c), box=box)
    """
    check_positive(lipschitz=lipschitz, diameter=diameter)
    return diameter / (math.sqrt(2.0) * lipschitz)


class StronglyConvexRate(SVBRate):
    """The step size c / (t σ²); made by :func:`svb_strongly_convex_rate`."""

    def times_variance(self, count: Array, q: Gaussian) -> Array:
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
    return StronglyConvexRate(2.0 / check_number(curvature, "curvature", "(0, inf)"))


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
        >>> rate = nt.online.oga_rate(lipschitz=5.0, diameter=nt.bounds.diameter(box, d=2, point=True))
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
    check_positive(rate=rate)
    if make_rule(rate).step is not None:
        raise TypeError(
            "doubling restarts a rule that is an evaluation and an update, not an aggregate."
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
        posterior = choose(last, fresh.posterior, state.posterior)
        return state._replace(
            posterior=posterior, memory=choose(last, fresh.memory, state.memory)
        )

    return rule._replace(update=update, name=f"{rule.name}, doubling")
