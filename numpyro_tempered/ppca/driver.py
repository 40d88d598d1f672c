"""Fitting tempered probabilistic PCA: starts, the compiled loop, and its result."""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.ascent import Ascent, Iterate, advance, begin
from numpyro_tempered.core.checks import check_count, check_number
from numpyro_tempered.core.typing import Array, ArrayLike, Numbers
from numpyro_tempered.ppca.arguments import check_prior, check_table, warn_of_scale
from numpyro_tempered.ppca.base import Posterior, Prior, Rows, as_matrix, as_rows, in_double, in_full_precision
from numpyro_tempered.ppca.base import prior as weak_prior
from numpyro_tempered.ppca.bound import constant, elbo, shapes, varying_terms
from numpyro_tempered.ppca.result import PPCAFit
from numpyro_tempered.ppca.starts import Start, starts_of
from numpyro_tempered.ppca.updates import sweep, update_scores

# A sum of millions of float32 terms is off by some multiple of their rounding; a real fall is far larger.
ROUNDING = 100.0


def fit(
    rng_key: Array,
    x: ArrayLike,
    *,
    num_factors: int,
    alpha: float = 1.0,
    prior: Prior | None = None,
    ard: bool = True,
    num_restarts: int = 1,
    init: PPCAFit | None = None,
    tolerance: float = 1e-6,
    max_iter: int = 2000,
) -> PPCAFit:
    r"""Tempered mean-field variational Bayes for probabilistic PCA.

    .. math::
        x_i = m + Wz_i + \varepsilon_i,\quad z_i\sim N(0, I_K),\quad \varepsilon_{ij}\sim N(0, 1/\tau),\quad
        W_{jk}\sim N(0, 1/\lambda_k)

    maximises :math:`\alpha\,(E\log p(x, z|W, m, \tau) - E\log q(z)) - \mathrm{KL}(q(W, m, \tau, \lambda), \pi)`,
    a bound on the log of :math:`\int p(x|W, m, \tau)^\alpha\,d\pi`, over
    :math:`\prod_iq(z_i)\prod_jq(W_j, m_j)\,q(\tau)\prod_kq(\lambda_k)`. The z are local: they carry alpha in
    model and guide. The ELBO includes every constant, so it compares numbers of factors; K = 0 is the model of
    independent columns with one noise. Each sweep also moves along the invariances of the likelihood, so that
    tens of sweeps are enough.

    A missing entry (NaN) is marginalised: the likelihood is that of the observed entries, and every row and every
    column has a covariance of its own. Rows without any entry are ignored. Constant columns are fitted like the
    others. The noise is common to all columns, so bring them to comparable units.

    Args:
        rng_key: Key of the random starts; the first start does not use it.
        x: Data, shape ``(n, d)``, NaN where missing.
        num_factors: K, from 0 to d.
        alpha: Power on the likelihood, positive.
        prior: Priors; :func:`prior` at scale 1 by default, which is meant for columns of about unit deviation.
        ard: Learn a precision λ_k for each column of W; else all are ``prior.loading_precision``.
        num_restarts: Number of starts, run side by side. The first is at the principal axes; the others alternate
            between the first with its last 1, 2, ... columns near 0 and random loadings. ARD has optima with more
            and with fewer columns: before you count columns by :func:`num_occupied`, take ``2 * num_factors``. To
            compare K, one start is enough.
        init: An earlier fit to start from, instead of the principal axes.
        tolerance: A start has converged once a sweep gains no more than this for each row, in nats.
        max_iter: Limit of the sweeps of a start.

    Returns:
        A :class:`PPCAFit` of the start with the largest ELBO. A warning says if that start has not converged.

    Raises:
        ValueError: If ``x`` is not a matrix, is infinite somewhere, or a column has no entry; or an argument is
            out of range.
        TypeError: If ``x`` is not of real numbers.
        RuntimeError: If the ELBO fell in a sweep, by more than rounding.

    References:
        YPB for the local z.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-2.0, 2.0, 20)[:, None] * np.ones(3) + 0.1 * np.sin(np.arange(60.0)).reshape(20, 3)
        >>> fit = nt.ppca.fit(jax.random.key(0), x, num_factors=1, alpha=0.5)
        >>> print(np.abs(nt.ppca.principal_axes(fit).directions[:, 0]).round(1))
        [0.6 0.6 0.6]
    """
    options = Options(alpha, prior, ard, num_restarts, init, tolerance, max_iter)
    return fit_each([rng_key], x, [num_factors], options)[0]


class Options(NamedTuple):
    """The arguments of :func:`fit` that all numbers of factors share."""

    alpha: float = 1.0
    prior: Prior | None = None
    ard: bool = True
    num_restarts: int = 1
    init: PPCAFit | None = None
    tolerance: float = 1e-6
    max_iter: int = 2000


def fit_each(
    rng_keys: Sequence[Array] | Array, x: ArrayLike, orders: Sequence[int], options: Options
) -> list[PPCAFit]:
    """Fits with several numbers of factors, by a single compiled program."""
    alpha, prior, ard, num_restarts, init, tolerance, max_iter = options
    values = as_matrix(x)
    values = values[~np.all(np.isnan(values), axis=1)]
    check_table(values, orders)
    check_number(alpha, "alpha", "(0, inf)")
    check_number(tolerance, "tolerance", "[0, inf)")
    check_count(num_restarts, "num_restarts")
    check_count(max_iter, "max_iter")
    prior = check_prior(weak_prior() if prior is None else prior, values.shape[1])
    origin = np.nanmean(values, axis=0)
    centred = prior._replace(mean=np.broadcast_to(np.asarray(prior.mean, np.float64), origin.shape) - origin)
    warn_of_scale(values, centred)
    dtype = jnp.result_type(float)
    exact, rows = as_rows(values, origin, None), as_rows(values, origin, dtype)
    shared = {"width": max(orders), "num_restarts": num_restarts, "init": init, "origin": origin}
    each = [starts_of(key, exact, int(k), centred, **shared) for key, k in zip(rng_keys, orders, strict=True)]
    starts = jax.tree.map(lambda *parts: jnp.asarray(np.stack(parts), dtype), *each)
    numbers = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (centred, alpha, tolerance))
    ascents = jax.device_get(_ascend(starts, rows, *numbers, ard=bool(ard), max_iter=max_iter))
    task = Task(exact, origin, prior, centred, float(alpha), bool(ard), float(tolerance))
    fits = []
    for i, k in enumerate(orders):
        fits.append(_finish(jax.tree.map(lambda leaf, i=i: leaf[i], ascents), int(k), task))
    return fits


class Task(NamedTuple):
    """What fits with several numbers of factors have in common."""

    rows: Rows
    origin: np.ndarray
    prior: Prior
    centred: Prior
    alpha: float
    ard: bool
    tolerance: float


def _finish(ascent: Ascent[Posterior], k: int, task: Task) -> PPCAFit:
    """The best start as a fit with k factors."""
    rows, centred, alpha, ard = task.rows, task.centred, task.alpha, task.ard
    d, dtype = len(task.origin), ascent.objective.dtype
    num_observed = rows.x.size if rows.mask is None else int(rows.mask.sum())
    offset = constant(centred, alpha, num_observed, d, k, ard)
    ends = np.asarray(ascent.objective, np.float64) + offset
    if not np.all(np.isfinite(ends)):
        raise ValueError(
            f"the ELBO of a start is {ends[~np.isfinite(ends)][0]}: the data or the prior exceed the range of "
            f"{dtype}. Rescale the columns to about unit deviation."
        )
    if np.any(ascent.fall > 0.0):
        start = int(np.argmax(ascent.fall))
        raise RuntimeError(
            f"the ELBO fell from {ends[start] + ascent.fall[start]:.6f} to {ends[start]:.6f} in sweep "
            f"{ascent.num_iter[start]}, more than rounding in "
            f"{dtype} explains: rescale the columns to about unit deviation, or use float64."
        )
    best = int(np.argmax(ends))
    if not ascent.converged[best]:
        warnings.warn(
            f"the fit with {k} factors still gained more than {task.tolerance:.1g} nats a row after "
            f"{len(ascent.trace)} sweeps: take a larger max_iter before comparing its ELBO.",
            stacklevel=4,
        )
    # Columns beyond k are padding, with loadings of 0.
    q = Posterior(*(part[best] for part in ascent.point))
    columns = np.append(np.arange(k), q.loc.shape[-1] - 1)
    q = q._replace(
        loc=q.loc[:, columns], cov=q.cov[:, columns][:, :, columns], loading_precision=q.loading_precision[:k]
    )
    num_iter = int(ascent.num_iter[best])
    wide = in_double(q)
    noise_shape, loading_shape = shapes(task.prior, alpha, num_observed, d, ard)
    return PPCAFit(
        posterior=jax.tree.map(jnp.asarray, q),
        origin=task.origin,
        noise_shape=float(noise_shape),
        ard_shape=loading_shape if ard else None,
        prior=task.prior,
        alpha=alpha,
        elbo=elbo(wide, update_scores(wide, rows, np), rows, centred, alpha, ard),
        trace=np.asarray(ascent.trace[:num_iter, best], np.float64) + offset,
        num_iter=num_iter,
        converged=bool(ascent.converged[best]),
        restart_elbos=ends,
        num_observed=num_observed,
    )


@partial(jax.jit, static_argnames=("ard", "max_iter"))
@in_full_precision
def _ascend(
    starts: Start, rows: Rows, prior: Prior, alpha: Array, tolerance: Array, *, ard: bool, max_iter: int
) -> Ascent[Posterior]:
    n, d = rows.x.shape
    unit = ROUNDING * jnp.finfo(rows.x.dtype).eps

    def first(start: Start) -> Posterior:
        k = start.loadings.shape[1]
        loc = jnp.concatenate([start.loadings, start.mean[:, None]], axis=1)
        cov = jnp.zeros((1 if rows.mask is None else d, k + 1, k + 1), loc.dtype)
        precision = prior.loading_precision * jnp.ones_like(loc, shape=(k,))
        if ard:
            squares = jnp.sum(start.loadings**2, axis=0)
            precision = (prior.ard_shape + 0.5 * d) / (prior.ard_rate + 0.5 * squares)
        return Posterior(loc, cov, jnp.asarray(start.noise_precision), precision)

    def one_pass(q: Posterior, active: Numbers) -> Iterate[Posterior]:
        q, z = sweep(q, rows, prior, alpha, ard, active)
        terms = varying_terms(q, z, rows, prior, alpha, ard, active=active)
        return Iterate(q, jnp.sum(terms), unit * jnp.sum(jnp.abs(terms)))

    def ascend(starts: Start) -> Ascent[Posterior]:
        ascent = begin(jax.vmap(first)(starts), max_iter)
        return advance(lambda q: jax.vmap(one_pass)(q, starts.active), ascent, max_iter, tolerance * n)

    # Starts side by side; numbers of factors one after another, as they take different numbers of sweeps.
    return jax.lax.map(ascend, starts)
