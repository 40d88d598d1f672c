"""The report of a choice of alpha: its columns along the grid, its groups and its advice."""

import numpy as np

from numpyro_tempered.report.arviz import ArviZData, dataset, group, with_group
from numpyro_tempered.select.alpha.base import Criterion, Verdict
from numpyro_tempered.select.alpha.coverage_report import CoverageCheck
from numpyro_tempered.select.alpha.powers import (
    Powers,
    advise_on_coverage,
    powers_dataset,
)
from numpyro_tempered.select.evidence import mean_se


def report(
    posterior: ArviZData,
    grid: np.ndarray,
    columns: dict[str, np.ndarray],
    powers: Powers | str,
    check: CoverageCheck | None,
    attrs: dict[str, object],
) -> ArviZData:
    """The posterior at the chosen alpha with the groups along the grid and by parameter in front."""
    attrs["selected"] = alpha = float(grid[columns["selected"]][0])
    if check is not None:
        posterior = with_group(posterior, "coverage", group(check.data, "coverage"), {})
    if not isinstance(powers, str):
        by_parameter = powers_dataset(powers, alpha, attrs)
        posterior = with_group(posterior, "calibrated_powers", by_parameter, {})
    selection = dataset(
        columns,
        coords={"alpha": grid.tolist()},
        dims={name: ["alpha"] for name in columns},
        attrs={**posterior.attrs, **attrs},
    )
    return with_group(posterior, "alpha_selection", selection, attrs)


def join_advice(
    criterion: Criterion,
    verdict: Verdict,
    powers: Powers | str,
    check: CoverageCheck | None,
) -> str:
    """The advice of a criterion, with what the curvature and resamples say about coverage."""
    sentences = [verdict.advice]
    if isinstance(powers, str):
        sentences.append(
            f"Whether its intervals cover what they say is not known: {powers}"
        )
    elif criterion.aim != "coverage":
        sentences.append(advise_on_coverage(verdict.alpha, powers))
    if check is not None:
        sentences.append(check.advice)
    return " ".join(sentences)


def posterior_columns(grid: np.ndarray, log_lik: np.ndarray) -> dict[str, np.ndarray]:
    """Columns from the draws of the log-likelihood of each posterior, ``(A, C, S)``."""
    log_lik = np.asarray(log_lik, np.float64)
    return {
        "expected_log_lik": log_lik.mean(axis=(1, 2)),
        "expected_log_lik_se": np.array(
            [mean_se(draws, False)[1] for draws in log_lik]
        ),
        "effective_parameters": 2.0 * grid**2 * log_lik.var(axis=(1, 2), ddof=1),
    }


def insert_row(
    grid: np.ndarray,
    columns: dict[str, np.ndarray],
    alpha: float,
    row: dict[str, np.ndarray],
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The grid and its columns with a row for another alpha, NaN where the row has no value."""
    grid = np.append(grid, alpha)
    order = np.argsort(grid)
    return grid[order], {
        name: np.append(v, row.get(name, np.nan))[order] for name, v in columns.items()
    }
