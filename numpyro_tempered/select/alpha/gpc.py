"""Alpha by general posterior calibration, SM19."""

import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve

from numpyro_tempered.core import (
    Array,
    Columns,
    Params,
    check_choice,
    check_count,
    check_number,
    doubles,
)
from numpyro_tempered.select.alpha import gpc_posteriors, sandwich
from numpyro_tempered.select.alpha.base import (
    Criterion,
    Decision,
    Draws,
    Plan,
    Summary,
    Task,
)
from numpyro_tempered.select.alpha.dependence import resample_counts
from numpyro_tempered.select.alpha.gpc_posteriors import Quantity, Ratios

Posterior = Literal["laplace", "method"]
OWNERS = {"laplace": "the Laplace approximation's", "method": "the method's own"}
# Tolerance of log alpha.
TOLERANCE = 1e-6
# How far to search for a bracket, in log alpha, from the power that the curvature asks for.
REACH = 9.0


def gpc(
    level: float = 0.95,
    *,
    posterior: Posterior = "laplace",
    of: Callable[[Params], Array] | None = None,
    num_bootstrap: int = 500,
) -> Criterion:
    r"""Alpha at which credible sets of a level have that coverage in the bootstrap (Syring and Martin).

    **Aim: coverage**, at one ``level``, of the sets of one posterior, for one quantity. It does not aim at
    prediction, as :func:`safe_bayes` does; the two differ by design.

    With :math:`\hat\theta` the minimiser of the total loss of the data and :math:`C_\alpha(b)` the credible set
    of resample b of the data, of whole ``groups`` or of blocks of a series, α solves

    .. math:: \hat c(\alpha) = \frac{1}{B} \sum_{b=1}^B 1\{\hat\theta \in C_\alpha(b)\} = \text{level}.

    The sets are ellipsoids: points within a Mahalanobis distance of the posterior mean. ``posterior`` says whose:

    - ``"laplace"``: the normal approximation at the mode of likelihood^α times prior, on the flat unconstrained
      scale; its sets are those of the exact posterior where that is near normal. It needs no fit.
    - ``"method"``: the posterior that the ``method`` of ``select_alpha`` makes, of each resample at each alpha of
      the grid. So the α calibrates the intervals of a guide, mean-field ones too, which are too narrow by
      themselves. This costs most: B times the fits.

    The published recursion :math:`\alpha \leftarrow \alpha + (s + 1)^{-0.51}(\hat c(\alpha) - \text{level})`
    takes more than a thousand steps from 1 to 4. Here the resamples are fixed, so the coverage falls along α,
    nearly, and a bracket with Brent's method solves the same equation in a dozen evaluations. Coverage moves in
    jumps of 1/B, so the root is that of a smooth equivalent: the ``level`` quantile over resamples of the ratio
    of distance and radius, which is 1 there. Between the alphas of a grid the ratios are interpolated in log α.

    The standard error adds that over samples of the data, of the limit :math:`d / \mathrm{tr}(J^{-1} I)` by the
    infinitesimal jackknife, to that of the resampling, ``alpha_se_resampling``: the binomial standard error of
    the coverage, through the slope.

    Args:
        level: In (0, 1).
        posterior: See above.
        of: The quantity of the sets: from the values of the latents by site to a number or an array. By
            default all latents together, on the unconstrained scale.
        num_bootstrap: B, such that B times both ``level`` and one minus it are at least 5. With ``"method"`` 100
            are enough at first.

    Returns:
        A :class:`Criterion` for :func:`numpyro_tempered.select_alpha`. Its report has the coverage along α, in
        the attributes ``coverage_alphas`` and ``coverage``, or along the grid as a column. It refuses what
        :func:`lyddon` does, and a level that no power has.

    Raises:
        ValueError: If ``level`` is not in (0, 1), ``posterior`` is another word, or ``num_bootstrap`` too small.
        TypeError: If ``level`` is not a number, or ``of`` not a function.

    References:
        SM19.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_tempered.select.alpha.base import Task
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = 2.0 * jnp.array([-1.0, 1.0] * 10)
        >>> key = jax.random.key(0)
        >>> decision = gpc(0.9).decide(key, Task(model, key, (y,), {}), jnp.ones(1), None)
        >>> 0.15 < decision.alpha < 0.4
        True
    """
    check_number(level, "level", "(0, 1)", hint="Take 0.95, say.")
    check_choice(posterior, "posterior", get_args(Posterior))
    if of is not None and not callable(of):
        raise TypeError(
            f"of must be a function of the latent values by site, got {type(of).__name__}."
        )
    check_count(
        num_bootstrap, "num_bootstrap", math.ceil(5.0 / min(level, 1.0 - level) - 1e-9)
    )

    def quantity_of_draws(draws: Draws) -> Array:
        if of is None:
            return draws.flat
        return jax.vmap(lambda values: jnp.ravel(of(values)))(draws.values)

    def plan(rng_key: Array, task: Task) -> Plan:
        # Raises before the fits where the criterion cannot be used.
        lags = sandwich.estimate_of(task).lags
        counts = np.asarray(
            resample_counts(rng_key, num_bootstrap, task.dependence, lags)
        )
        return Plan(counts, gpc_posteriors.credible_set(quantity_of_draws, level))

    def decide(
        rng_key: Array, task: Task, grid: np.ndarray, summary: Summary
    ) -> Decision:
        estimate = sandwich.estimate_of(task)
        quantity = quantity_of_flat(task, of)
        # The guess is the limit of many data, whose relative sampling error is that of alpha.
        guess, sampling = map(float, estimate.evaluate(joint_power(quantity)))
        point = jnp.asarray(estimate.sandwich.minimum.point)
        columns: Columns = {}
        attrs: dict[str, object] = {}
        if posterior == "laplace":
            counts = resample_counts(
                rng_key, num_bootstrap, task.dependence, estimate.lags
            )
            ratios = gpc_posteriors.laplace_ratios_at(
                estimate.flat, quantity, point, counts, level
            )
            alpha, resampling, curve = solve(ratios, level, guess, (0.0, math.inf))
            attrs = {
                "coverage_alphas": [a for a, _ in curve],
                "coverage": [c for _, c in curve],
            }
        else:
            sets = jax.tree.map(np.asarray, jax.device_get(summary))
            at = doubles(point if quantity is None else quantity(point))
            of_grid = gpc_posteriors.ellipsoid_ratios(sets, at)
            if not np.all(np.isfinite(of_grid)):
                raise ValueError(
                    "the draws of a fit to a resample do not vary: take more, or another method."
                )
            coverage = np.mean(of_grid <= 1.0, axis=0)
            columns = {"criterion": np.abs(coverage - level), "coverage": coverage}
            bounds = float(np.min(grid)), float(np.max(grid))
            alpha, resampling, _ = solve(
                interpolated(grid, of_grid), level, guess, bounds
            )
        se = math.hypot(alpha * (sampling / guess), resampling)
        what = f"{OWNERS[posterior]} {level:.0%} sets"
        attrs = {
            "alpha_se_resampling": resampling,
            "level": level,
            "posterior": posterior,
            **attrs,
        }
        decision = sandwich.coverage_decision(
            f"gpc({level:g})", alpha, se, what, estimate, **attrs
        )
        return decision._replace(columns=columns)

    return Criterion(
        "gpc", "coverage", None if posterior == "laplace" else plan, decide
    )


def joint_power(quantity: Quantity | None) -> sandwich.Functional:
    """The power at which the mean squared distance of the minimiser to the posteriors is the dimension."""

    def power(theta: Array, curvature: Array, variance: Array) -> Array:
        factor = jnp.linalg.cholesky(curvature)
        if quantity is None:
            return len(curvature) / jnp.trace(cho_solve((factor, True), variance))
        slopes = jax.jacfwd(quantity)(theta).T
        shifts = cho_solve((factor, True), slopes)
        inner = jnp.linalg.cholesky(slopes.T @ shifts)
        return slopes.shape[1] / jnp.trace(
            cho_solve((inner, True), shifts.T @ variance @ shifts)
        )

    return power


def quantity_of_flat(
    task: Task, of: Callable[[Params], Array] | None
) -> Quantity | None:
    """The quantity as a function of the flat unconstrained latents, ``(k,)``; None for these themselves."""
    if of is None:
        return None
    unravel = task.flat()[1]

    def quantity(theta: Array) -> Array:
        return jnp.ravel(of(task.constrain_sites(unravel(theta))))

    return quantity


def interpolated(alphas: np.ndarray, ratios: np.ndarray) -> Ratios:
    """The ratios ``(B,)`` at any alpha between those of the grid, from ``(B, A)``, in logarithms."""
    logs, tiny = np.log(alphas), np.finfo(float).tiny

    def at(alpha: float) -> np.ndarray:
        k = int(
            np.clip(np.searchsorted(logs, math.log(alpha)), 1, max(len(logs) - 1, 1))
        )
        if len(logs) == 1:
            return ratios[:, 0]
        share = (math.log(alpha) - logs[k - 1]) / (logs[k] - logs[k - 1])
        low, high = np.log(np.maximum(ratios[:, k - 1 : k + 1], tiny)).T
        return np.exp((1.0 - share) * low + share * high)

    return at


def solve(
    ratios: Ratios, level: float, guess: float, bounds: tuple[float, float]
) -> tuple[float, float, list[tuple[float, float]]]:
    """The alpha at which the level quantile of the ratios is 1, its standard error, and a curve of coverage.

    Raises:
        ValueError: If there is none within the bounds, or none near ``guess`` without bounds.
    """
    from scipy.optimize import brentq

    curve: dict[float, float] = {}

    def excess(log_alpha: float) -> float:
        values = ratios(math.exp(log_alpha))
        curve[math.exp(log_alpha)] = float(np.mean(values <= 1.0))
        return math.log(max(float(np.quantile(values, level)), np.finfo(float).tiny))

    least, largest = (math.log(b) if b > 0 else -math.inf for b in bounds)
    start = min(max(math.log(guess), least), largest)
    least, largest = max(least, start - REACH), min(largest, start + REACH)
    low = high = start
    at_low = at_high = excess(start)
    while at_low > 0 and low > least:
        low = max(low - 1.0, least)
        at_low = excess(low)
    while at_high <= 0 and high < largest:
        high = min(high + 1.0, largest)
        at_high = excess(high)
    if at_low > 0 or at_high <= 0:
        for end in bounds:
            if 0.0 < end < math.inf:
                excess(math.log(end))
        alphas = sorted(curve)
        raise ValueError(
            f"no power has coverage {level:g}: it is {curve[alphas[0]]:.3f} at alpha = {alphas[0]:.3g} and "
            f"{curve[alphas[-1]]:.3f} at {alphas[-1]:.3g}. Where it is above the level at the largest, extend "
            "the alphas upwards; below it at the smallest, downwards, or the prior forbids the minimiser."
        )
    root = brentq(excess, low, high, xtol=TOLERANCE)
    values = ratios(math.exp(root))
    deviation = math.sqrt(level * (1.0 - level) / len(values))
    low, high = np.quantile(
        values, [max(level - deviation, 0.0), min(level + deviation, 1.0)]
    )
    side = 0.1 if root + 0.1 <= largest else -0.1
    slope = (excess(root + side) - excess(root)) / side
    spread = math.log(high / max(low, np.finfo(float).tiny)) / (2.0 * max(slope, 1e-3))
    return math.exp(root), math.exp(root) * spread, sorted(curve.items())
