"""Starts of probabilistic PCA: principal axes, an earlier fit, or random loadings."""

from typing import NamedTuple

import jax
import numpy as np

from numpyro_tempered.core.typing import Array, Numbers
from numpyro_tempered.ppca.base import Prior, Rows
from numpyro_tempered.ppca.result import PPCAFit


class Start(NamedTuple):
    """Values to start from, with a leading axis of starts.

    Attributes:
        loadings: W, shape ``(d, K)`` each.
        mean: m relative to the origin, ``(d,)``.
        noise_precision: τ.
        active: 1 for columns of W, 0 for padding, ``(K,)``.
    """

    loadings: Numbers
    mean: Numbers
    noise_precision: Numbers | float
    active: Numbers


def starts_of(
    rng_key: Array,
    rows: Rows,
    k: int,
    prior: Prior,
    *,
    width: int,
    num_restarts: int,
    init: PPCAFit | None,
    origin: np.ndarray,
) -> Start:
    """Starts on the host: the first one, the same with ever fewer columns, and in between random loadings.

    Columns of zeros fill the loadings up to ``width``.
    """
    first = from_axes(rows, k, prior)
    if init is not None:
        first = from_fit(init, first, origin)
    d, variance = rows.x.shape[1], 1.0 / first.noise_precision
    starts = [first]
    total = max(float(np.mean(rows.x**2)), variance)
    for i in range(1, num_restarts):
        live = k - (i + 1) // 2
        if i % 2 and live >= 0:
            # Optima with small and with large columns differ.
            factor = np.where(np.arange(k) < live, 1.0, 1e-3)
            starts.append(first._replace(loadings=first.loadings * factor))
        else:
            # Half of the variance to the factors, half to the noise.
            normal = np.asarray(jax.random.normal(jax.random.fold_in(rng_key, i), (d, k)), np.float64)
            starts.append(Start(np.sqrt(0.5 * total / max(k, 1)) * normal, np.zeros(d), 2.0 / total, np.ones(k)))
    loadings, mean, noise_precision, active = (np.stack(part) for part in zip(*starts, strict=True))
    padding = (0, width - k)
    loadings, active = np.pad(loadings, ((0, 0), (0, 0), padding)), np.pad(active, ((0, 0), padding))
    return Start(loadings, mean, noise_precision, active)


def from_axes(rows: Rows, k: int, prior: Prior) -> Start:
    """The maximum-likelihood solution of the data with missing entries at the means of their columns."""
    n, d = rows.x.shape
    values, vectors = np.linalg.eigh(rows.x.T @ rows.x / n)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    rest = values[k:].mean() if k < d else 0.5 * values[-1]
    noise = max(rest, 1e-3 * values.mean())
    if noise == 0.0:
        noise = prior.noise_rate / prior.noise_shape
    # A column that starts at 0 stays there, whatever the data say.
    sizes = np.sqrt(np.maximum(values[:k] - noise, 0.1 * noise))
    return Start(vectors[:, :k] * sizes, np.zeros(d), 1.0 / noise, np.ones(k))


def from_fit(init: PPCAFit, axes: Start, origin: np.ndarray) -> Start:
    """An earlier fit, without its last columns or with more by principal axes.

    Raises:
        ValueError: If it has another number of columns.
    """
    if init.origin.shape != origin.shape:
        raise ValueError(f"init has {init.origin.size} columns, x has {origin.size}: warm starts need the same.")
    loadings, k = np.asarray(init.loadings, np.float64), axes.loadings.shape[1]
    if loadings.shape[1] < k:
        # The axes least aligned with what the fit has.
        basis = np.linalg.qr(loadings)[0]
        rest = axes.loadings - basis @ (basis.T @ axes.loadings)
        order = np.argsort(-np.sum(rest**2, axis=0))[: k - loadings.shape[1]]
        loadings = np.concatenate([loadings, rest[:, order]], axis=1)
    return Start(loadings[:, :k], init.mean - origin, float(init.posterior.noise_precision), np.ones(k))
