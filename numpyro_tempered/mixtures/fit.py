"""Tempered variational Bayes for mixtures of conjugate components, with all rows in each pass."""

from functools import partial

from numpyro_tempered.core.checks import check_count, key_first
from numpyro_tempered.core.progress import ProgressBar
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.mixtures.array import array_source
from numpyro_tempered.mixtures.ascent import check_limits
from numpyro_tempered.mixtures.chunks import Chunks, chunk_source
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.coordinate_ascent import coordinate_ascent
from numpyro_tempered.mixtures.prepare import check_counts, check_settings, prepare
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.search import run
from numpyro_tempered.mixtures.starts import Start
from numpyro_tempered.mixtures.warm import WarmStart
from numpyro_tempered.mixtures.weights import Concentration


@key_first
def fit(
    rng_key: Array,
    x: ArrayLike,
    component: Component,
    *,
    num_components: int,
    alpha: float = 1.0,
    concentration: Concentration = 1.0,
    sample_weight: ArrayLike | None = None,
    start: Start | None = None,
    warm_start: WarmStart | None = None,
    num_restarts: int = 8,
    num_moves: int = 0,
    tolerance: float | None = None,
    max_iter: int = 1000,
    num_samples: int = 100,
    progress_bar: ProgressBar = None,
) -> MixtureFit:
    r"""Fit a mixture by tempered coordinate ascent.

    The model is :math:`\sum_j p_j q_{\theta_j}`, with p ~ Dirichlet, or :func:`stick_breaking`, and independent
    :math:`\theta_j`. With responsibilities :math:`\omega_{ij} \propto \exp(l_{ij})`, :math:`l_{ij} = E \log p_j +
    E \log q_{\theta_j}(x_i)`, which carry no alpha, and factors that are the priors updated by alpha times the
    weighted statistics, every half-step raises

    .. math:: F = \alpha \sum_{ij} \omega_{ij} (l_{ij} - \log \omega_{ij}) - \mathrm{KL}(\rho, \pi)
              \le \alpha E_\rho[\log L] - \mathrm{KL}(\rho, \pi) = E_1 .

    Args:
        rng_key: Key of the starts, and of the draws for E1.
        x: Data, rows ``(n, d)``. NaN are missing entries and are marginalised where the family allows this; a
            row without an observed entry counts nothing.
        component: The family and its prior, such as ``nt.components.gaussian(dim)``.
        num_components: K >= 1. Components may end empty, at their prior.
        alpha: Power on the likelihood, positive.
        concentration: Dirichlet prior of the weights, one number or ``(K,)``; or :func:`stick_breaking`.
        sample_weight: How often each row counts, ``(n,)``, not negative.
        start: First responsibilities, :func:`kmeans_plus_plus` by default.
        warm_start: A fit of the same family, or several. The first restart starts from the factors of one of K
            components. Of those of fewer the largest is a start beside the restarts: with empty components, at
            their prior, and with parts of its components split off.
        num_restarts: Starts, ascended side by side; the one with the largest F is returned.
        num_moves: Rounds of moves from the best restart: each proposes as many merges, deaths and splits as there
            are restarts, ascends from all, and keeps the best if its F is larger.
        tolerance: A restart has converged when a pass raises F by no more than this times the sum of the
            weights; 1e-8 in double precision by default, and 1e-6 in single.
        max_iter: Upper limit of passes over the data.
        num_samples: Draws for E1, each a pass over the data; with 0 E1 is left out.
        progress_bar: Whether to show passes and objective, by tqdm; None: where the fit takes some seconds.

    Returns:
        A :class:`MixtureFit`. A warning says when its restart has not converged.

    Raises:
        TypeError: If an argument is of another kind than above, or the data are traced.
        ValueError: If the data are not of the family, or an argument is out of its range.
        FloatingPointError: If no restart keeps a finite objective, or the precision does not hold the prior of
            the weights.
        RuntimeError: If F falls by more than rounding, which is an error of the component's functions.

    References:
        CA18, Algorithm 1.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2, alpha=0.5)
        >>> print(np.sort(fit.posterior.loc[:, 0]).round(1))
        [0. 9.]
    """
    settings = check_settings(num_components, alpha, concentration)
    num_samples, num_moves = check_counts(
        0, num_samples=num_samples, num_moves=num_moves
    )
    limits = check_limits(num_restarts, max_iter, tolerance, progress_bar)
    source = array_source(
        prepare(x, component, sample_weight),
        settings.num_components,
        limits.num_restarts,
    )
    moving = partial(
        coordinate_ascent, num_moves=num_moves if settings.num_components > 1 else 0
    )
    return run(
        rng_key,
        source,
        settings,
        limits,
        start,
        warm_start,
        optimise=moving,
        num_samples=num_samples,
    )


@key_first
def fit_chunks(
    rng_key: Array,
    chunks: Chunks,
    component: Component,
    *,
    num_components: int,
    alpha: float = 1.0,
    concentration: Concentration = 1.0,
    start: Start | None = None,
    warm_start: WarmStart | None = None,
    num_restarts: int = 8,
    tolerance: float | None = None,
    max_iter: int = 1000,
    num_samples: int = 100,
    num_start_rows: int = 65536,
    size: int = 65536,
    progress_bar: ProgressBar = None,
) -> MixtureFit:
    r"""Fit a mixture by tempered coordinate ascent, data in chunks.

    :func:`fit` to the last few bits, whatever the cut: the sums of an iteration are those of the chunks, added
    with their rounding errors. The data are read twice to check them and sum what is constant, once an iteration,
    and once for the objectives. Memory is that of a chunk, of ``size`` rows and of ``num_start_rows`` rows.

    Args:
        rng_key: Key of the starts, and of the draws for E1.
        chunks: Arrays of rows ``(n, d)`` with any number of rows each, or tuples ``(x, sample_weight)``: a list,
            or a function without arguments that makes a new iterable of them for each pass, such as one that
            reads the row groups of a Parquet file.
        component: The family and its prior.
        num_components: K >= 1.
        alpha: Power on the likelihood, positive.
        concentration: Dirichlet prior of the weights, one number or ``(K,)``; or :func:`stick_breaking`.
        start: First responsibilities of the rows that starts see, :func:`kmeans_plus_plus` by default.
        warm_start: As for :func:`fit`.
        num_restarts: Starts, ascended in the same passes; the one with the largest F is returned.
        tolerance: As for :func:`fit`.
        max_iter: Upper limit of iterations.
        num_samples: Draws for E1.
        num_start_rows: Rows, drawn at random, that starts see; where all data are no more, starts are those of
            :func:`fit`. Their sums are scaled to all data.
        size: Rows in a block, the unit that is compiled and moved to the device.
        progress_bar: Whether to show iterations, by tqdm; None: where the fit takes some seconds.

    Returns:
        A :class:`MixtureFit`. A warning says when its restart has not converged.

    Raises:
        TypeError: If ``chunks`` is an array, or an iterator, which is used up by one pass; or as :func:`fit`.
        ValueError: If the chunks hold no row, differ in their columns, or give other rows in a later pass; or as
            :func:`fit`, with the number of the chunk.
        FloatingPointError: If no restart keeps a finite objective.
        RuntimeError: If F falls by more than rounding.

    References:
        CA18, Algorithm 1.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> def chunks():
        ...     for centre in (0.0, 9.0):
        ...         yield np.array([[centre], [centre + 0.1]])
        >>> component = nt.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit_chunks(jax.random.key(0), chunks, component, num_components=2, alpha=0.5)
        >>> print(np.sort(fit.posterior.loc[:, 0]).round(1))
        [0. 9.]
    """
    settings = check_settings(num_components, alpha, concentration)
    num_samples = check_count(num_samples, "num_samples", 2)
    limits = check_limits(num_restarts, max_iter, tolerance, progress_bar)
    together = settings.num_components * limits.num_restarts
    source = chunk_source(
        rng_key,
        chunks,
        component,
        num_start_rows=num_start_rows,
        size=size,
        num_together=together,
    )
    return run(
        rng_key,
        source,
        settings,
        limits,
        start,
        warm_start,
        optimise=coordinate_ascent,
        num_samples=num_samples,
    )
