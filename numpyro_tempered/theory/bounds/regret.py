r"""Regret bounds of the online rules (CA19, Theorems 1 to 3) and of weights over experts."""

import math

import numpy as np

from numpyro_tempered.core import ArrayLike, check_positive
from numpyro_tempered.theory.bounds import base as bounds


def ewa(
    num_rounds: ArrayLike,
    *,
    step_size: float,
    loss_range: float,
    kl: float,
    comparator: ArrayLike | None = None,
) -> bounds.Bound:
    r"""Exponentially weighted aggregation: :math:`\eta B^2 T/8 + \mathrm{KL}(q, \pi)/\eta`.

    Args:
        num_rounds: T, a number or an array of them.
        step_size: η, constant.
        loss_range: B, the length of an interval that holds every loss of every parameter.
        kl: KL(q, prior) of the comparator, in nats: log K for one of K experts with equal weights.
        comparator: Cumulative expected loss of the comparator after each of ``num_rounds``, if the bound is to be
            one on the cumulative loss.

    Returns:
        A :class:`Bound`.

    Raises:
        ValueError: If a constant is not positive and finite, or ``kl`` is infinite: no bound holds against a
            comparator that the prior excludes, such as a point under a Gaussian prior.

    References:
        CA19, Theorem 1.

    Example:
        >>> import numpyro_tempered as nt
        >>> rate = nt.online.ewa_rate(200, kl=1.0, loss_range=2.0)
        >>> float(nt.bounds.ewa(200, step_size=rate, loss_range=2.0, kl=1.0).value)
        20.0
    """
    rounds = bounds.as_rounds(num_rounds, step_size=step_size, loss_range=loss_range)
    return bounds.make(
        comparator,
        stability=step_size * loss_range**2 * rounds / 8.0,
        divergence=bounds.finite_kl(kl) / step_size,
        assumptions=(
            "the losses of all parameters lie in one interval of length B, also under the tails of the prior: "
            "the squared loss under a Gaussian prior has none",
            "every loss is convex in θ, for the loss at the mean; the expected loss needs no convexity",
            bounds.ROUNDS_TAKEN,
        ),
        source="CA19, Theorem 1",
    )


def sva(
    num_rounds: ArrayLike,
    *,
    step_size: float,
    lipschitz: float,
    strong_convexity: float,
    kl: float,
    comparator: ArrayLike,
) -> bounds.Bound:
    r"""SVA: :math:`\sum_t E_{q_\mu}\ell_t + \eta L^2T/\gamma + \mathrm{KL}(q_\mu, \pi)/\eta` for any μ.

    The theorem takes the infimum over μ; any μ gives a valid bound, and
    :func:`.hindsight.gaussian` finds a good one. A point has infinite KL: the comparator is a
    Gaussian.

    Args:
        num_rounds: T, a number or an array of them.
        step_size: η, constant.
        lipschitz: L.
        strong_convexity: γ.
        kl: KL(q_μ, prior) of the comparator, in nats.
        comparator: Its cumulative expected loss after each of ``num_rounds``.

    Returns:
        A :class:`Bound`.

    Raises:
        ValueError: If a constant is not positive and finite, or ``kl`` is infinite.

    References:
        CA19, Theorem 2.

    Example:
        >>> import numpyro_tempered as nt
        >>> rate = nt.online.sva_rate(100, kl=4.0, lipschitz=2.0, strong_convexity=1.0)
        >>> bound = nt.bounds.sva(
        ...     100, step_size=rate, lipschitz=2.0, strong_convexity=1.0, kl=4.0, comparator=50.0
        ... )
        >>> float(bound.regret), float(bound.value)
        (80.0, 130.0)
    """
    rounds = bounds.as_rounds(
        num_rounds,
        step_size=step_size,
        lipschitz=lipschitz,
        strong_convexity=strong_convexity,
    )
    return bounds.make(
        comparator,
        stability=step_size * lipschitz**2 * rounds / strong_convexity,
        divergence=bounds.finite_kl(kl) / step_size,
        assumptions=(
            bounds.CONVEX,
            bounds.LIPSCHITZ,
            "KL from the prior is strongly convex with the constant given: compute it by strong_convexity",
            "the comparator is a Gaussian of the rule's family, in its box",
            "the gradients are exact (closed forms, or quadrature up to its error), with Hessian curvature",
            bounds.ROUNDS_TAKEN,
        ),
        source="CA19, Theorem 2",
    )


def svb(
    num_rounds: ArrayLike,
    *,
    lipschitz: float,
    diameter: float,
    comparator: ArrayLike | None = None,
) -> bounds.Bound:
    r"""SVB in a box, with :math:`\eta_{t,j} = D/(L\sqrt{2t}\,\sigma_{t,j}^2)`: :math:`DL\sqrt{2T}`.

    It holds at every T, against every (m, σ) of the box; σ = 0 included, so against the best fixed θ. The step
    printed in the theorem is twice as large, and with it the bound fails.

    Args:
        num_rounds: T, a number or an array of them.
        lipschitz: L.
        diameter: D, from :func:`diameter` of the box that the rule runs in.
        comparator: Cumulative loss of the comparator after each of ``num_rounds``, if the bound is to be one on
            the cumulative loss.

    Returns:
        A :class:`Bound`. With D of a point (``diameter(..., point=True)``) it is OGA's with ``oga_rate``.

    Raises:
        ValueError: If a constant is not positive and finite: without a box D is infinite and the theorem does not
            apply.

    References:
        CA19, Theorem 3, with the step corrected.

    Example:
        >>> import numpyro_tempered as nt
        >>> float(nt.bounds.svb(200, lipschitz=2.0, diameter=3.0).value)
        120.0
    """
    rounds = bounds.as_rounds(num_rounds, lipschitz=lipschitz, diameter=diameter)
    half = lipschitz * diameter * np.sqrt(rounds / 2.0)
    return bounds.make(
        comparator,
        stability=half,
        divergence=half,
        assumptions=(
            bounds.CONVEX,
            bounds.LIPSCHITZ,
            "the rule ran in the box that D belongs to, with the step size svb_rate(svb_constant(...)), or "
            "oga_rate(...), of these L and D",
            "the family is mean field, and the gradients are exact with Hessian curvature",
            bounds.ROUNDS_TAKEN,
        ),
        source="CA19, Theorem 3 (step corrected)",
    )


def svb_strongly_convex(
    num_rounds: ArrayLike,
    *,
    lipschitz: float,
    curvature: float,
    comparator: ArrayLike | None = None,
) -> bounds.Bound:
    r"""SVB in a box, with :math:`\eta_{t,j} = 2/(Ht\,\sigma_{t,j}^2)`: :math:`L^2(1 + \log T)/H`.

    Args:
        num_rounds: T, a number or an array of them.
        lipschitz: L, on the box that the rule runs in.
        curvature: H, with every expected loss H-strongly convex in (m, σ).
        comparator: Cumulative loss of the comparator after each of ``num_rounds``, if the bound is to be one on
            the cumulative loss.

    Returns:
        A :class:`Bound`.

    Raises:
        ValueError: If a constant is not positive and finite: a loss of a linear predictor has H = 0 in more than
            one dimension.

    References:
        CA19, Theorem 3, second part.

    Example:
        >>> import numpyro_tempered as nt
        >>> float(nt.bounds.svb_strongly_convex(1, lipschitz=2.0, curvature=0.5).value)
        8.0
    """
    rounds = bounds.as_rounds(num_rounds, lipschitz=lipschitz, curvature=curvature)
    return bounds.make(
        comparator,
        stability=lipschitz**2 * (1.0 + np.log(rounds)) / curvature,
        assumptions=(
            "every expected loss is H-strongly convex in means and scales on the box",
            bounds.LIPSCHITZ + ", on the box",
            "the rule ran in that box, with the step size svb_strongly_convex_rate(H)",
            "the family is mean field, and the gradients are exact with Hessian curvature",
            bounds.ROUNDS_TAKEN,
        ),
        source="CA19, Theorem 3",
    )


def hedge(
    num_rounds: ArrayLike,
    num_experts: int,
    *,
    rate: float,
    loss_range: float | None = None,
    comparator: ArrayLike | None = None,
) -> bounds.Bound:
    r"""Hedge over K experts with equal weights: :math:`\log K/\lambda + \lambda B^2T/8`.

    For a loss that is λ-exp-concave in the decision the second term is 0: the squared loss of predictions and
    outcomes in an interval of length b, with λ ≤ 1/(2b²); the log loss of a mixture, with λ = 1.

    Args:
        num_rounds: T, a number or an array of them.
        num_experts: K, such as the members of a grid of step sizes.
        rate: λ, constant.
        loss_range: B, the length of an interval that holds every expert's loss; None for an exp-concave loss.
        comparator: Cumulative loss of the best expert after each of ``num_rounds``, if the bound is to be one on
            the cumulative loss.

    Returns:
        A :class:`Bound` on the regret against the best expert.

    Raises:
        ValueError: If a constant is not positive and finite.

    References:
        N. Cesa-Bianchi, G. Lugosi, *Prediction, learning, and games*, 2006, Theorem 2.2 and Proposition 3.1;
        CA19, Theorem 1 with a uniform prior.

    Example:
        >>> import numpyro_tempered as nt
        >>> print(f"{float(nt.bounds.hedge(100, 8, rate=0.5).value):.3f}")
        4.159
    """
    rounds = bounds.as_rounds(num_rounds, num_experts=num_experts, rate=rate)
    if loss_range is None:
        stability = np.zeros(rounds.shape)
        assumption = (
            f"exp(-rate * loss) is concave in the decision with rate = {rate:g}"
        )
    else:
        check_positive(loss_range=loss_range)
        stability = rate * loss_range**2 * rounds / 8.0
        assumption = "the experts' losses of a round lie in an interval of length B, all convex in the decision"
    return bounds.make(
        comparator,
        stability=stability,
        divergence=math.log(num_experts) / rate,
        assumptions=(
            assumption,
            "the decision is the weighted mean of the experts', with weights exp(-rate * cumulative loss)",
        ),
        source="Cesa-Bianchi and Lugosi 2006, Theorem 2.2",
    )


def doubling(
    num_rounds: ArrayLike, first: bounds.Bound, *, comparator: ArrayLike | None = None
) -> bounds.Bound:
    r"""The bound of a rule that starts again at rounds 2, 4, 8, ...: :func:`numpyro_tempered.online.doubling`.

    If the bound at the rate for a horizon T is A √T, the phases add up to A (√2^(k+1) - 1)/(√2 - 1), with 2^k the
    last start: at most √2/(√2 - 1) = 3.41 times A √T.

    Args:
        num_rounds: T, a number or an array of them.
        first: The bound of one round at the rate for one round, whose two penalties both grow as the square
            root of the horizon: :func:`sva` or :func:`ewa`.
        comparator: Cumulative (expected) loss of the comparator after each of ``num_rounds``.

    Returns:
        A :class:`Bound`.

    Raises:
        ValueError: If ``num_rounds`` is not positive, or ``first`` is the bound of another rule.

    Example:
        >>> import numpyro_tempered as nt
        >>> rate = nt.online.ewa_rate(1, kl=2.0, loss_range=1.0)
        >>> first = nt.bounds.ewa(1, step_size=rate, loss_range=1.0, kl=2.0)
        >>> print(f"{float(first.value):.3f} {float(nt.bounds.doubling(3, first).value):.3f}")
        1.000 2.414
    """
    rounds = bounds.as_rounds(num_rounds)
    if (
        first.source not in ("CA19, Theorem 1", "CA19, Theorem 2")
        or np.size(first.stability) != 1
    ):
        raise ValueError(
            f"doubling takes the bound of one round by ewa or sva, got one of {first.source}."
        )
    k = np.floor(np.log2(rounds) + 1e-9)
    factor = (np.sqrt(2.0) ** (k + 1) - 1.0) / (math.sqrt(2.0) - 1.0)
    return bounds.make(
        comparator,
        stability=factor * float(np.reshape(first.stability, ())),
        divergence=factor * float(np.reshape(first.divergence, ())),
        assumptions=(
            *first.assumptions,
            "the rule started again at every power of two, with the rate for that horizon",
        ),
        source=f"{first.source}, with doubling",
    )
