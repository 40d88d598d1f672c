"""The report on a choice of alpha, as ArviZ data and as a pandas table."""

import numpy as np

from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.report.arviz import Coords, Dims, dataset, with_group
from numpyro_tempered.report.inference_data import to_inference_data
from numpyro_tempered.select.alpha.base import AlphaChoice, Criterion, Fit, Task, Verdict
from numpyro_tempered.select.evidence import mean_se


def posterior_columns(grid: np.ndarray, log_lik: np.ndarray) -> dict[str, np.ndarray]:
    """Columns from the draws of the log-likelihood of each posterior, ``(A, C, S)``."""
    log_lik = np.asarray(log_lik, np.float64)
    return {
        "expected_log_lik": log_lik.mean(axis=(1, 2)),
        "expected_log_lik_se": np.array([mean_se(draws, False)[1] for draws in log_lik]),
        "effective_parameters": 2.0 * grid**2 * log_lik.var(axis=(1, 2), ddof=1),
    }


def insert_row(
    grid: np.ndarray, columns: dict[str, np.ndarray], alpha: float, row: dict[str, np.ndarray]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The grid and its columns with a row of one alpha more, NaN where the row has no value."""
    grid = np.append(grid, alpha)
    order = np.argsort(grid)
    return grid[order], {name: np.append(v, row.get(name, np.nan))[order] for name, v in columns.items()}


def report(
    task: Task,
    criterion: Criterion,
    verdict: Verdict,
    fit: Fit,
    columns: dict[str, np.ndarray],
    grid: np.ndarray,
    *,
    coords: Coords | None,
    dims: Dims | None,
    num_samples: int,
) -> AlphaChoice:
    """The choice, with the chosen posterior and the grid as ArviZ data."""
    if isinstance(fit, tuple) and isinstance(fit[0], OnlineVI):
        online, fit = fit
        best = to_inference_data(
            online, fit, *task.args, num_samples=num_samples, coords=coords, dims=dims, **task.kwargs
        )
    else:
        best = to_inference_data(fit, num_samples=num_samples, coords=coords, dims=dims)
    attrs = {
        "criterion": criterion.name,
        "aim": criterion.aim,
        "advice": verdict.advice,
        **verdict.attrs,
        "selected": verdict.alpha,
    }
    selection = dataset(
        columns,
        coords={"alpha": grid.tolist()},
        dims={name: ["alpha"] for name in columns},
        attrs={**best.attrs, **attrs},
    )
    data = with_group(best, "alpha_selection", selection, attrs)
    return AlphaChoice(verdict.alpha, fit, data, verdict.advice)
