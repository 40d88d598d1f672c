"""Predictive scores of the posteriors along a grid of alphas: diagnostics, not criteria."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, check_count, doubles
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.select.alpha.base import (
    Criterion,
    Decision,
    Draws,
    Plan,
    Summary,
    Task,
)

REFUSAL = (
    "{name} scores the predictive mixture E_q[p(y)], which predicts well where the model is wrong by being wider "
    "than any of its densities: it prefers powers that are far too small (.003 where .25 is right, for data of "
    "variance 4 under a normal location model of variance 1). Choose by safe_bayes() for the risk, or by "
    "lyddon(), bootstrap_fisher() or gpc() for coverage, and pass {name} among the diagnostics."
)
_NEEDS = {
    "densities": ", of which no predictive density is known: leave this diagnostic out, or compare the losses of "
    "safe_bayes()."
}


def held_out(num_folds: int = 5) -> Criterion:
    r"""The log predictive density of data left out, by cross-validation: a diagnostic, not a criterion.

    Column ``elpd_held_out`` is :math:`\sum_i \log E_{q_{-f(i)}}[p(y_i \mid \theta)]` over the folds f, with q the
    tempered posterior without the fold, and ``elpd_held_out_se`` its standard error.

    Args:
        num_folds: Folds, drawn at random, of sizes that differ by at most one.

    Returns:
        A :class:`Criterion` for the ``diagnostics`` of :func:`numpyro_tempered.select_alpha`, which refuses it
        as a criterion and gives the reason.

    Raises:
        ValueError: If there are fewer than 2 folds, or, when it runs, fewer data than folds.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.alpha.held_out().refusal.split(",")[0]
        'held_out() scores the predictive mixture E_q[p(y)]'
    """
    check_count(num_folds, "num_folds", 2)

    def folds(rng_key: Array, num_data: int) -> np.ndarray:
        if num_data < num_folds:
            raise ValueError(
                f"held_out({num_folds}) needs at least a datum in each fold, got {num_data} data."
            )
        return np.asarray(jax.random.permutation(rng_key, num_data)) % num_folds

    def plan(rng_key: Array, task: Task) -> Plan:
        require(task.trace, _NEEDS)
        fold = folds(rng_key, task.num_data)

        def reduce(draws: Draws) -> Array:
            return jax.scipy.special.logsumexp(draws.log_lik, axis=0) - jnp.log(
                draws.log_lik.shape[0]
            )

        return Plan(
            (fold[None, :] != np.arange(num_folds)[:, None]).astype(float), reduce
        )

    def decide(
        rng_key: Array, task: Task, grid: np.ndarray, summary: Summary
    ) -> Decision:
        fold = folds(rng_key, task.num_data)
        scores = doubles(summary)[fold, :, np.arange(task.num_data)]
        se = np.std(scores, axis=0, ddof=1) * np.sqrt(task.num_data)
        return _decision("elpd_held_out", scores.sum(axis=0), se, grid)

    return Criterion(
        "held_out", "none", plan, decide, REFUSAL.format(name="held_out()")
    )


def loo() -> Criterion:
    """The leave-one-out log predictive density, :func:`numpyro_tempered.loo`: a diagnostic, not a criterion.

    Columns ``elpd_loo``, its standard error ``elpd_loo_se``, and ``pareto_k``, the largest of the data.

    Returns:
        A :class:`Criterion` for the ``diagnostics`` of :func:`numpyro_tempered.select_alpha`, which refuses it
        as a criterion and gives the reason.

    References:
        Vehtari, Gelman, Gabry, *Practical Bayesian model evaluation using leave-one-out
        cross-validation and WAIC*, 2017.

    Example:
        >>> import numpyro_tempered as nt
        >>> nt.alpha.loo().name
        'loo'
    """

    def decide(
        rng_key: Array, task: Task, grid: np.ndarray, log_lik: np.ndarray
    ) -> Decision:
        require(task.trace, _NEEDS)
        from numpyro_tempered.report.arviz import assemble, dataset
        from numpyro_tempered.select.loo import loo as loo_of

        results = []
        for alpha, draws in zip(grid, doubles(log_lik), strict=True):
            data = assemble(
                {"log_likelihood": dataset({"y": draws}, ("chain", "draw"))}, {}
            )
            results.append(loo_of(data, alpha=float(alpha), reff=1.0, pointwise=True))
        # ArviZ 0.x and 1.x name the estimate differently.
        elpd = np.array(
            [float(getattr(r, "elpd_loo", None) or r.elpd) for r in results]
        )
        se = np.array([float(r.se) for r in results])
        decision = _decision("elpd_loo", elpd, se, grid)
        decision.columns["pareto_k"] = np.asarray(
            [float(np.max(r.pareto_k)) for r in results]
        )
        return decision

    return Criterion(
        "loo", "none", None, decide, REFUSAL.format(name="loo()"), pointwise=True
    )


def _decision(
    name: str, scores: np.ndarray, se: np.ndarray, grid: np.ndarray
) -> Decision:
    return Decision(
        float(grid[np.argmax(scores)]), {name: scores, f"{name}_se": se}, {}, ""
    )
