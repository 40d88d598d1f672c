r"""Regret of EWA and SVA against a fixed parameter (CA19, (4) and section 4.1).

Theorems 1 and 2 compare with a distribution, and a point has infinite divergence from a prior with a density. A
narrow distribution around the point takes its place; how narrow is the choice that the paper's corollaries make.
"""

import numpy as np

from numpyro_tempered.core import ArrayLike, check_numbers, doubles
from numpyro_tempered.gaussian.families.base import Gaussian, family_of, is_gaussian
from numpyro_tempered.online.rates import point_kl
from numpyro_tempered.theory.bounds import base as bounds


def ewa_point(
    num_rounds: ArrayLike,
    *,
    step_size: float,
    loss_range: float,
    d: int,
    horizon: int | None = None,
    width: float = 1.0,
) -> bounds.Bound:
    r"""EWA against a fixed parameter: :math:`\eta B^2T/8 + K/\eta + \epsilon T`, K = d log(c/ε), ε = d/horizon.

    The comparator of Theorem 1 is the prior restricted to parameters whose loss is at most ε above that of θ in
    every round, of prior mass :math:`(\epsilon/c)^d` at least. At T = horizon, with the rate
    ``ewa_rate(T, kl=point_kl(T, d), loss_range=B)``, it is :math:`B\sqrt{T d\log(T/d)/2} + d`; divided by T
    (:func:`online_to_batch`) that is CA19, (4), with the term d/T that the paper leaves out.

    Args:
        num_rounds: T, a number or an array of them.
        step_size: η, constant.
        loss_range: B, the length of an interval that holds every loss of every parameter.
        d: Number of coordinates, or whatever else the exponent of the prior mass is.
        horizon: The rounds that ε is for; by default the last of ``num_rounds``.
        width: c; see :func:`numpyro_tempered.online.point_kl`.

    Returns:
        A :class:`Bound` on the regret.

    Raises:
        ValueError: If a constant is not positive and finite, or the horizon is at most d/c.

    References:
        CA19, (4), by Theorem 1.

    Example:
        >>> import numpyro_tempered as nt
        >>> T, d = 10_000, 2
        >>> rate = nt.online.ewa_rate(T, kl=nt.online.point_kl(T, d), loss_range=1.0)
        >>> bound = nt.bounds.ewa_point(T, step_size=rate, loss_range=1.0, d=d)
        >>> print(f"{float(nt.bounds.online_to_batch(T, bound.regret).value):.4f}")
        0.0294
    """
    rounds = bounds.as_rounds(num_rounds, step_size=step_size, loss_range=loss_range)
    last = float(rounds.max()) if horizon is None else horizon
    kl = point_kl(last, d, width)
    return bounds.make(
        None,
        stability=step_size * loss_range**2 * rounds / 8.0,
        divergence=kl / step_size + d / last * rounds,
        assumptions=(
            "the losses of all parameters lie in one interval of length B",
            "parameters whose loss is in no round more than d/horizon above the comparator's have prior mass "
            "(d / (horizon * width))^d or more",
            "every loss is convex in θ, for the loss at the mean; the expected loss needs no convexity",
            bounds.ROUNDS_TAKEN,
        ),
        source="CA19, (4), by Theorem 1",
    )


def sva_point(
    num_rounds: ArrayLike,
    *,
    step_size: float,
    lipschitz: float,
    prior: Gaussian,
    theta: ArrayLike,
    scale: ArrayLike | None = None,
) -> bounds.Bound:
    r"""SVA against a fixed parameter: :math:`\eta L^2T/\gamma + TL\lVert\sigma\rVert + \mathrm{KL}/\eta`.

    The comparator of Theorem 2 is N(θ, diag σ²), whose expected loss is at most that of θ plus L‖σ‖. Every σ
    gives a bound; the default is the least, at each T separately. The paper's choice is
    :math:`\sigma_j = L\eta/(\gamma\sqrt d)`, with :math:`\eta = \sqrt{\gamma d\log(T/d)/T}/L`, which is
    ``sva_rate(T, kl=point_kl(T, d), ...)``. As T grows the bound tends to
    :math:`\frac52 L\sqrt{T d\log(T)/\gamma}` with that σ, and to 3/2 in place of 5/2 with the least one, slowly.
    The paper prints :math:`2L/\alpha`, with γ called α and L twice the constant here: it must read
    :math:`2L/\sqrt\alpha`.

    Args:
        num_rounds: T, a number or an array of them.
        step_size: η, constant.
        lipschitz: L, of the losses in θ.
        prior: A ``MeanField``.
        theta: θ, shape ``(d,)``. The corner farthest from the prior's mean serves for all θ of a box.
        scale: σ, a scalar or ``(d,)``, in the box of the rule; the least bound if None, which is at most the
            prior's.

    Returns:
        A :class:`Bound` on the regret.

    Raises:
        TypeError: If the prior has another family.
        ValueError: If a constant is not positive and finite, or shapes disagree.

    References:
        CA19, section 4.1, by Theorem 2.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> prior, T = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2)), 10_000
        >>> rate = nt.online.sva_rate(T, kl=nt.online.point_kl(T, 2), lipschitz=1.0, strong_convexity=1.0)
        >>> bound = nt.bounds.sva_point(T, step_size=rate, lipschitz=1.0, prior=prior, theta=[0.5, -0.5])
        >>> print(f"{float(bound.value):.0f}")
        718
    """
    rounds = bounds.as_rounds(num_rounds, step_size=step_size, lipschitz=lipschitz)
    if not is_gaussian(prior) or not family_of(prior).diagonal_only:
        raise TypeError(
            f"sva_point compares under a MeanField prior, got {type(prior).__name__}: for another family give "
            "kl and comparator to sva."
        )
    loc, unit = (doubles(prior.loc), doubles(family_of(prior).root(prior)))
    point = doubles(check_numbers(theta, "theta"))
    if point.shape != loc.shape:
        raise ValueError(
            f"theta must have shape {loc.shape}, as the prior's means, got {point.shape}."
        )
    weight = (step_size * lipschitz * rounds)[..., None]
    if scale is None:
        sigma = _least_scale(weight, unit)
    else:
        sigma = np.broadcast_to(
            doubles(check_numbers(scale, "scale", "(0, inf)")), loc.shape
        )
    ratio = sigma / unit
    spread = np.sum(0.5 * np.square(ratio) - 0.5 - np.log(ratio), axis=-1)
    kl = 0.5 * np.sum(np.square((point - loc) / unit)) + spread
    width = lipschitz * rounds * np.linalg.norm(sigma, axis=-1)
    return bounds.make(
        None,
        stability=step_size * lipschitz**2 * rounds * np.max(np.square(unit)),
        divergence=kl / step_size + width,
        assumptions=(
            bounds.CONVEX,
            "L bounds the gradient of every loss in θ: compute it by lipschitz",
            "the comparator N(theta, diag scale²) lies in the box of the rule",
            "the gradients are exact (closed forms, or quadrature up to its error), with Hessian curvature",
            bounds.ROUNDS_TAKEN,
        ),
        source="CA19, section 4.1, by Theorem 2",
    )


def _least_scale(weight: np.ndarray, unit: np.ndarray) -> np.ndarray:
    r"""The σ, (..., d), with the least :math:`w\lVert\sigma\rVert + \mathrm{KL}`, for weights w (..., 1).

    It is :math:`\sigma_j = (1/s_j^2 + c)^{-1/2}` with :math:`c\lVert\sigma\rVert = w`; the left side rises in c.
    """

    def at(c: np.ndarray) -> np.ndarray:
        return 1.0 / np.sqrt(1.0 / np.square(unit) + c)

    # ‖σ(c)‖ is at most √(d/c), and at least the largest coordinate.
    low, high = np.square(weight) / unit.size, np.square(weight) + weight / np.max(unit)
    for _ in range(100):
        c = np.sqrt(low) * np.sqrt(high)
        above = c * np.linalg.norm(at(c), axis=-1, keepdims=True) > weight
        low, high = np.where(above, low, c), np.where(above, c, high)
    return at(low)
