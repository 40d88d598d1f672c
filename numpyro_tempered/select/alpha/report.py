"""The report on a choice of alpha, as ArviZ data and as a pandas table."""

from typing import Any

import numpy as np

from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.report.arviz import Coords, Dims, assemble, dataset, group, group_names
from numpyro_tempered.report.inference_data import to_inference_data
from numpyro_tempered.select.alpha.base import AlphaChoice, Criterion, Verdict
from numpyro_tempered.select.alpha.task import Task
from numpyro_tempered.select.path.evidence import mean_se


def alpha_table(data: Any) -> Any:
    """The ``alpha_selection`` group as a pandas DataFrame.

    Args:
        data: The ArviZ data of an :class:`AlphaChoice`.

    Returns:
        A ``pandas.DataFrame`` indexed by alpha.

    Raises:
        ValueError: If ``data`` has no such group.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = 2.0 * jnp.array([-1.0, 1.0] * 10)
        >>> choice = nt.select_alpha(
        ...     jax.random.key(0), model, AutoNormal, y, criterion=nt.alpha.lyddon(), num_steps=500
        ... )
        >>> table = nt.alpha_table(choice.data)
        >>> table.index[table["selected"]].tolist()
        [0.25]
    """
    data = data.data if isinstance(data, AlphaChoice) else data
    if data is None or "alpha_selection" not in group_names(data):
        raise ValueError("the data have no group alpha_selection: pass the data of a result of select_alpha.")
    return group(data, "alpha_selection").to_dataframe()


def summary(grid: np.ndarray, log_lik: np.ndarray) -> dict[str, np.ndarray]:
    """What the draws of the log-likelihood, ``(A, C, S)``, say of each posterior."""
    log_lik = np.asarray(log_lik, np.float64)
    return {
        "expected_log_lik": log_lik.mean(axis=(1, 2)),
        "expected_log_lik_se": np.array([mean_se(draws, False)[1] for draws in log_lik]),
        "effective_parameters": 2.0 * grid**2 * log_lik.var(axis=(1, 2), ddof=1),
    }


def report(
    task: Task,
    criterion: Criterion,
    verdict: Verdict,
    grid: np.ndarray,
    columns: dict[str, np.ndarray],
    chosen: Any,
    coords: Coords | None,
    dims: Dims | None,
    num_samples: int,
) -> AlphaChoice:
    """The choice, with the chosen posterior and the grid as ArviZ data."""
    if isinstance(chosen, tuple) and isinstance(chosen[0], OnlineVI):
        online, chosen = chosen
        best = to_inference_data(
            online, chosen, *task.args, num_samples=num_samples, coords=coords, dims=dims, **task.kwargs
        )
    else:
        best = to_inference_data(chosen, num_samples=num_samples, coords=coords, dims=dims)
    attrs = {
        **best.attrs,
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
        attrs=attrs,
    )
    groups = {name: group(best, name) for name in group_names(best)}
    data = assemble({"alpha_selection": selection, **groups}, attrs)
    return AlphaChoice(verdict.alpha, chosen, data, verdict.advice)
