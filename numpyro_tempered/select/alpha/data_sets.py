"""Fits of a guide to many data sets side by side, and again to those that have not converged."""

import jax
import numpy as np

from numpyro_tempered.core import Array, Params
from numpyro_tempered.infer.gaussian_many import GaussianBatchFitter
from numpyro_tempered.infer.settle import BatchFitter
from numpyro_tempered.select.alpha.guides import unconverged

# How often data sets are fitted whose fits do not converge, and the quorum of the later rounds.
MOST_ROUNDS, LATER_QUORUM = 4, 0.5
# Numbers of data that are fitted side by side: 64 MiB in float32.
MOST_NUMBERS = 2**24


def width_of(inputs: tuple[np.ndarray, ...]) -> int:
    """How many data sets fit into memory side by side."""
    size = len(inputs[0])
    return min(size, max(1, MOST_NUMBERS * size // sum(part.size for part in inputs)))


def pick(inputs: tuple[np.ndarray, ...], numbers: np.ndarray) -> tuple[Array, ...]:
    """The inputs of some data sets, on the device."""
    return jax.device_put(tuple(part[numbers] for part in inputs))


def fit_data_sets(
    rng_key: Array,
    fitter: BatchFitter | GaussianBatchFitter,
    inputs: tuple[np.ndarray, ...],
) -> tuple[Params, np.ndarray]:
    """Fit all data sets.

    Args:
        rng_key: Of the draws.
        fitter: Compiled for the first :func:`width_of` of them.
        inputs: In what the data sets differ, ``(K, ...)`` each, the first their numbers.

    Returns:
        Parameters of the guide, ``(K, ...)`` each, and which fits have converged, ``(K,)``.
    """
    size, width = len(inputs[0]), width_of(inputs)
    pending = np.arange(size)
    params: Params | None = None
    for _ in range(MOST_ROUNDS if isinstance(fitter, BatchFitter) else 1):
        failed = []
        for some in np.split(pending, range(width, len(pending), width)):
            rng_key, key = jax.random.split(rng_key)
            # Programs have one size: a short part is filled up with copies.
            fitted = fitter.fit(key, pick(inputs, np.resize(some, width)))
            if params is None:
                params = jax.tree.map(
                    lambda leaf: np.zeros((size, *leaf.shape[1:]), leaf.dtype),
                    fitted.params,
                )
            for all_rows, part in zip(
                jax.tree.leaves(params), jax.tree.leaves(fitted.params), strict=True
            ):
                all_rows[some] = np.asarray(part)[: len(some)]
            failed.append(some[unconverged(fitted.evidence)[: len(some)]])
        is_stuck = sum(map(len, failed)) == len(pending)
        pending = np.concatenate(failed)
        if is_stuck or not len(pending):
            break
        fitter = (
            fitter._replace(quorum=LATER_QUORUM)
            if isinstance(fitter, BatchFitter)
            else fitter
        )
    return jax.device_put(params), ~np.isin(np.arange(size), pending)
