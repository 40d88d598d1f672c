"""Alpha by general posterior calibration, SM19."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve
from numpyro import handlers
from numpyro.infer.util import constrain_fn

from numpyro_tempered.core.typing import Array
from numpyro_tempered.select.alpha.base import Criterion, Draws, Plan, Verdict
from numpyro_tempered.select.alpha.gpc_posteriors import (
    LEAST_ESS,
    Quantity,
    credible_set,
    ellipsoid_ratios,
    laplace_ratios,
    reweighted_ratios,
)
from numpyro_tempered.select.alpha.gpc_root import interpolated, solve
from numpyro_tempered.select.alpha.resampling import check_num_bootstrap, resamples
from numpyro_tempered.select.alpha.sandwich import (
    Flat,
    Functional,
    Sandwich,
    advise,
    checked_sandwich,
    flat_task,
    sandwich_attrs,
)
from numpyro_tempered.select.alpha.task import Task


def gpc(
    level: float = 0.95,
    *,
    posterior: Literal["laplace", "method", "draws"] = "laplace",
    of: Callable[[dict[str, Array]], Array] | None = None,
    num_bootstrap: int = 500,
) -> Criterion:
    r"""Alpha at which credible sets of a level have that coverage in the bootstrap (Syring and Martin).

    **Aim: coverage**, at one ``level``, of the sets of one posterior, for one quantity. It is no aim of this
    criterion to predict well; :func:`safe_bayes` has that, and the two differ by design.

    With :math:`\hat\theta` the minimiser of the total loss of the data and :math:`C_\alpha(b)` the credible set
    of resample b of the data, α solves

    .. math:: \hat c(\alpha) = \frac{1}{B} \sum_{b=1}^B 1\{\hat\theta \in C_\alpha(b)\} = \text{level}.

    The sets are ellipsoids: points within a Mahalanobis distance of the posterior mean. Whose posterior is meant
    is said by ``posterior``:

    - ``"laplace"``: the normal approximation at the mode of likelihood^α times prior, on the flat unconstrained
      scale; its sets are those of the exact posterior where that is near normal. It needs no fit.
    - ``"method"``: the posterior that ``select_alpha`` is told to make, of each resample at each alpha of the
      grid. So the α calibrates the intervals of a guide, mean-field ones too, which are too narrow by themselves.
      Of the three the dearest: B times the fits.
    - ``"draws"``: the same posteriors from fits to all data, whose draws at the power a of the grid are weighted
      by :math:`L_b^\alpha / L^a`; of the grid's a that one serves whose weights leave most draws. For one or two
      latents, as the resamples' posteriors lie apart by as much as they are wide in each dimension: refused where
      more than a hundredth of the resamples is left with fewer than 40 draws. Take more draws
      (``num_refit_samples`` under SVI), and alphas down to a tenth of the answer.

    The published recursion :math:`\alpha \leftarrow \alpha + (s + 1)^{-0.51}(\hat c(\alpha) - \text{level})`
    takes more than a thousand steps from 1 to 4. Here the resamples are fixed, so that the coverage falls along
    α, nearly, and a bracket with Brent's method solves the same equation in a dozen evaluations. As coverage
    moves in jumps of 1/B, the root is that of a smooth equivalent: the ``level`` quantile over resamples of the
    ratio of distance and radius, which is 1 there. Between the alphas of a grid the ratios are interpolated in
    log α.

    The standard error adds that over samples of the data, of the limit :math:`d / \mathrm{tr}(J^{-1} I)` by the
    infinitesimal jackknife, to that of the resampling, ``alpha_se_resampling``: the binomial standard error of
    the coverage, through the slope.

    Args:
        level: In (0, 1).
        posterior: See above.
        of: The quantity whose sets are meant: from the values of the latents by site to a number or an array. By
            default all latents together, on the unconstrained scale.
        num_bootstrap: B, such that B times both ``level`` and one minus it are at least 5. With ``"method"`` 100
            will do for a first look.

    Returns:
        A :class:`Criterion` for :func:`numpyro_tempered.select_alpha`. Its report has the coverage along α, in
        the attributes ``coverage_alphas`` and ``coverage``, or along the grid as a column. It refuses what
        :func:`lyddon` does, and a level that no power brackets.

    Raises:
        ValueError: If ``level`` is not in (0, 1), ``posterior`` is another word, or ``num_bootstrap`` too small.

    References:
        SM19.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_tempered.select.alpha.task import Task
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = 2.0 * jnp.array([-1.0, 1.0] * 10)
        >>> key = jax.random.key(0)
        >>> verdict = gpc(0.9).decide(key, Task(model, key, (y,), {}), jnp.ones(1), None)
        >>> 0.15 < verdict.alpha < 0.4
        True
    """
    if isinstance(level, bool) or not 0.0 < level < 1.0:
        raise ValueError(f"level is a probability in (0, 1), got {level!r}: take 0.95, say.")
    if posterior not in ("laplace", "method", "draws"):
        raise ValueError(f'posterior must be "laplace", "method" or "draws", got {posterior!r}.')
    if of is not None and not callable(of):
        raise TypeError(f"of is a function of the latent values by site, got {type(of).__name__}.")
    check_num_bootstrap(num_bootstrap, math.ceil(5.0 / min(level, 1.0 - level) - 1e-9))

    def quantity_of_draws(draws: Draws) -> Array:
        if of is None:
            return draws.flat
        return jax.vmap(lambda values: jnp.ravel(of(values)))(draws.values)

    def plan(rng_key: Array, task: Task) -> Plan:
        # What forbids the criterion is found before the fits.
        checked_sandwich(flat_task(task), joint_power(quantity_of_flat(task, of)))
        if posterior == "method":
            counts = np.asarray(resamples(rng_key, num_bootstrap, task.num_data))
            return Plan(counts, credible_set(quantity_of_draws, level))
        return Plan(
            np.ones((1, task.num_data)),
            lambda draws: {"values": quantity_of_draws(draws), "log_lik": draws.log_lik},
        )

    def decide(rng_key: Array, task: Task, grid: np.ndarray, reduced: Any) -> Verdict:
        flat = flat_task(task)
        quantity = quantity_of_flat(task, of)
        # The guess is the limit of many data, whose relative sampling error is that of alpha.
        found, guess, sampling = checked_sandwich(flat, joint_power(quantity))
        sampling /= guess
        point = jnp.asarray(found.minimum.point)
        counts = resamples(rng_key, num_bootstrap, task.num_data)
        if posterior == "laplace":
            return _by_laplace(flat, found, sampling, quantity, counts, guess)
        kept = jax.tree.map(np.asarray, jax.device_get(reduced))
        at = np.asarray(point if quantity is None else quantity(point), np.float64)
        columns: dict[str, np.ndarray] = {}
        usable = np.asarray(grid) > 0
        if posterior == "method":
            ratios = ellipsoid_ratios(kept, at)
        else:
            ratios, ess, sources = reweighted_ratios(
                kept["values"][0], kept["log_lik"][0], grid, np.asarray(counts), at, level
            )
            columns = {"ess": ess, "draws_from": sources}
            usable &= ess >= LEAST_ESS
            if not np.any(usable):
                raise ValueError(
                    f"the weights of the draws leave at most {ess.max():.1f} of them in all but a hundredth of "
                    f"the resamples, and {LEAST_ESS:g} are needed: take more draws, a finer grid of alphas, "
                    'posterior= "laplace", or "method".'
                )
        if not np.all(np.isfinite(ratios[:, usable])):
            raise ValueError(
                "a fit to a resample has draws that do not vary: take more draws, or another method."
            )
        coverage = np.mean(ratios <= 1.0, axis=0)
        columns = {"criterion": np.abs(coverage - level), "coverage": coverage, **columns}
        at_alpha = interpolated(np.asarray(grid, np.float64)[usable], ratios[:, usable])
        bounds = float(np.min(grid[usable])), float(np.max(grid[usable]))
        alpha, resampling, _ = solve(at_alpha, level, guess, bounds)
        return _verdict(alpha, sampling, resampling, found, columns, {})

    def _by_laplace(
        flat: Flat, found: Sandwich, sampling: float, quantity: Quantity | None, counts: Array, guess: float
    ) -> Verdict:
        from scipy.stats import chi2

        point = jnp.asarray(found.minimum.point)
        dim = len(point) if quantity is None else jax.eval_shape(quantity, point).size
        threshold = float(chi2.ppf(level, dim))
        compiled = jax.jit(lambda alpha, counts: laplace_ratios(flat, quantity, point, counts, threshold, alpha))

        def ratios(alpha: float) -> np.ndarray:
            values, modes = jax.device_get(compiled(jnp.asarray(alpha, point.dtype), counts))
            if not (np.all(modes) and np.all(np.isfinite(values))):
                raise ValueError(
                    f"at alpha = {alpha:.3g} the posteriors of {int(np.sum(~(modes & np.isfinite(values))))} of "
                    f"{len(modes)} resamples have no mode that Newton's method finds, or the quantity does not "
                    'vary there: look at the prior, or take posterior="method".'
                )
            return values.astype(np.float64)

        alpha, resampling, curve = solve(ratios, level, guess, (0.0, math.inf))
        attrs = {"coverage_alphas": [a for a, _ in curve], "coverage": [c for _, c in curve]}
        return _verdict(alpha, sampling, resampling, found, {}, attrs)

    def _verdict(
        alpha: float,
        sampling: float,
        resampling: float,
        found: Sandwich,
        columns: dict[str, np.ndarray],
        attrs: dict[str, Any],
    ) -> Verdict:
        se = math.hypot(alpha * sampling, resampling)
        whose = {
            "laplace": "the Laplace approximation's",
            "method": "the method's own",
            "draws": "the posterior's",
        }
        return Verdict(
            alpha,
            columns,
            {
                "alpha_se": se,
                "alpha_se_resampling": resampling,
                "level": level,
                "posterior": posterior,
                **sandwich_attrs(found),
                **attrs,
            },
            advise(f"gpc({level:g})", alpha, se, f"{whose[posterior]} {level:.0%} sets", found),
        )

    return Criterion("gpc", "coverage", None if posterior == "laplace" else plan, decide)


def joint_power(quantity: Quantity | None) -> Functional:
    """The power at which the mean squared distance of the minimiser to the posteriors is the dimension."""

    def power(theta: Array, curvature: Array, variance: Array) -> Array:
        factor = jnp.linalg.cholesky(curvature)
        if quantity is None:
            return len(curvature) / jnp.trace(cho_solve((factor, True), variance))
        slopes = jax.jacfwd(quantity)(theta).T
        moved = cho_solve((factor, True), slopes)
        inner = jnp.linalg.cholesky(slopes.T @ moved)
        return slopes.shape[1] / jnp.trace(cho_solve((inner, True), moved.T @ variance @ moved))

    return power


def quantity_of_flat(task: Task, of: Callable[[dict[str, Array]], Array] | None) -> Quantity | None:
    """The quantity as a function of the flat unconstrained latents, ``(k,)``; None for these themselves."""
    if of is None:
        return None
    _, unravel = task.flat()
    seeded = handlers.seed(task.model, task.rng_key)

    def quantity(theta: Array) -> Array:
        return jnp.ravel(of(constrain_fn(seeded, task.args, task.kwargs, unravel(theta))))

    return quantity
