"""Fitting tempered probabilistic PCA: starts, the compiled loop, and what it returned."""

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.ppca.arguments import check_arguments, check_prior, warn_of_scale
from numpyro_tempered.ppca.ascent import update_loadings, update_noise, update_scores
from numpyro_tempered.ppca.base import (
    Posterior,
    PPCAFit,
    Prior,
    Rows,
    Scores,
    as_matrix,
    as_rows,
    in_double,
    in_full_precision,
)
from numpyro_tempered.ppca.base import prior as weak_prior
from numpyro_tempered.ppca.bound import constant, elbo, shapes, varying_terms
from numpyro_tempered.ppca.rotation import rotate, translate
from numpyro_tempered.ppca.starts import Start, padded, starts_of

# A sum of millions of float32 terms is off by some multiple of their rounding; a real fall is far larger.
ROUNDING = 100.0


def fit(
    rng_key: Array,
    x: Any,
    *,
    num_factors: int,
    alpha: float = 1.0,
    prior: Prior | None = None,
    ard: bool = True,
    num_restarts: int = 1,
    init: PPCAFit | None = None,
    tol: float = 1e-6,
    max_iter: int = 2000,
) -> PPCAFit:
    r"""Tempered mean-field variational Bayes for probabilistic PCA.

    .. math::
        x_i = m + Wz_i + \varepsilon_i,\quad z_i\sim N(0, I_K),\quad \varepsilon_{ij}\sim N(0, 1/\tau),\quad
        W_{jk}\sim N(0, 1/\lambda_k)

    maximises :math:`\alpha\,(E\log p(x, z|W, m, \tau) - E\log q(z)) - \mathrm{KL}(q(W, m, \tau, \lambda), \pi)`,
    a bound on the log of :math:`\int p(x|W, m, \tau)^\alpha\,d\pi`, over
    :math:`\prod_iq(z_i)\prod_jq(W_j, m_j)\,q(\tau)\prod_kq(\lambda_k)`. The z are local: they carry alpha in
    model and guide. Every constant is in the ELBO, so it compares numbers of factors; K = 0 is independent
    columns with one noise. Each sweep also moves along the invariances of the likelihood, so that tens of sweeps
    are enough.

    A missing entry (NaN) is marginalised: the likelihood is that of the observed entries, and every row and every
    column has a covariance of its own. Rows without any entry count for nothing. Constant columns are fitted like
    others; the noise is common to all columns, so give them comparable units.

    Args:
        rng_key: Key of the random starts; one start needs none of it.
        x: Data, shape ``(n, d)``, NaN where missing.
        num_factors: K, from 0 to d.
        alpha: Power on the likelihood, positive.
        prior: Priors; :func:`prior` at scale 1 by default, which is meant for columns of about unit deviation.
        ard: Learn a precision λ_k for each column of W; else all are ``prior.loading_precision``.
        num_restarts: Starts, run side by side. The first is at principal axes; the others are in turn the first
            with its last 1, 2, ... columns near 0, and random. ARD has optima with more and with fewer columns:
            before counting columns by :func:`num_occupied`, take ``2 * num_factors``. To compare K one is enough.
        init: An earlier fit to start from, in the place of the principal axes.
        tol: A start has converged once a sweep gains less than this for each row, in nats.
        max_iter: Most sweeps of a start.

    Returns:
        A :class:`PPCAFit`, of the start with the largest ELBO. If that one has not converged, a warning says so.

    Raises:
        ValueError: If ``x`` is not a matrix, is infinite somewhere, or a column has no entry; or an argument is
            out of range.
        TypeError: If ``x`` is not of real numbers, or ``num_factors`` not an integer.
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
    return fit_each(
        [rng_key],
        x,
        [num_factors],
        alpha=alpha,
        prior=prior,
        ard=ard,
        num_restarts=num_restarts,
        init=init,
        tol=tol,
        max_iter=max_iter,
    )[0]


def fit_each(
    rng_keys: Any,
    x: Any,
    orders: Sequence[int],
    *,
    alpha: float = 1.0,
    prior: Prior | None = None,
    ard: bool = True,
    num_restarts: int = 1,
    init: PPCAFit | None = None,
    tol: float = 1e-6,
    max_iter: int = 2000,
) -> list[PPCAFit]:
    """Fits with several numbers of factors, as :func:`fit` makes one, by a single compiled program."""
    values = as_matrix(x)
    values = values[~np.all(np.isnan(values), axis=1)]
    for k in orders:
        check_arguments(values, k, alpha, tol, max_iter, num_restarts)
    prior = check_prior(weak_prior() if prior is None else prior, values.shape[1])
    origin = np.nanmean(values, axis=0)
    about = prior._replace(mean=np.broadcast_to(np.asarray(prior.mean, np.float64), origin.shape) - origin)
    warn_of_scale(values, about)
    dtype = jnp.result_type(float)
    exact, rows = as_rows(values, origin, None), as_rows(values, origin, dtype)
    each = [
        padded(starts_of(key, exact, int(k), about, num_restarts, init, origin), max(orders))
        for key, k in zip(rng_keys, orders, strict=True)
    ]
    starts = Start(*(np.stack(part) for part in zip(*each, strict=True)))
    traced = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), (starts, about, float(alpha), float(tol)))
    found = jax.device_get(_ascend(traced[0], rows, *traced[1:], ard=bool(ard), max_iter=int(max_iter)))
    problem = Problem(exact, origin, prior, about, float(alpha), bool(ard), float(tol), dtype)
    fits = []
    for i, k in enumerate(orders):
        fits.append(_finish(Ascent(*(part[i] for part in found)), int(k), problem))
    return fits


class Problem(NamedTuple):
    """What the fits of one table share."""

    exact: Rows
    origin: np.ndarray
    prior: Prior
    about: Prior
    alpha: float
    ard: bool
    tol: float
    dtype: Any


class Ascent(NamedTuple):
    """What the compiled loop leaves, with leading axes of starts: the fields of a posterior, and how it went."""

    loc: Any
    cov: Any
    noise_precision: Any
    loading_precision: Any
    trace: Any
    num_iter: Any
    converged: Any
    fell: Any


def _finish(found: Ascent, k: int, problem: Problem) -> PPCAFit:
    """The best start as a fit with k factors."""
    exact, about, alpha, ard = problem.exact, problem.about, problem.alpha, problem.ard
    d = len(problem.origin)
    num_observed = exact.x.size if exact.mask is None else int(exact.mask.sum())
    offset = constant(about, alpha, num_observed, d, k, ard)
    last = found.num_iter - 1
    ends = np.take_along_axis(found.trace, last[:, None], axis=1)[:, 0].astype(np.float64) + offset
    if not np.all(np.isfinite(ends)):
        raise ValueError(
            f"the ELBO of a start is {ends[~np.isfinite(ends)][0]}: the data or the prior exceed the range of "
            f"{np.dtype(problem.dtype)}. Rescale the columns to about unit deviation."
        )
    if np.any(found.fell):
        at = int(np.argmax(found.fell))
        before, after = found.trace[at, last[at] - 1] + offset, ends[at]
        raise RuntimeError(
            f"the ELBO fell from {before:.6f} to {after:.6f} in sweep {last[at] + 1}, more than rounding in "
            f"{np.dtype(problem.dtype)} explains: rescale the columns to about unit deviation, or use float64."
        )
    best = int(np.argmax(ends))
    if not found.converged[best]:
        warnings.warn(
            f"the fit with {k} factors still gained more than {problem.tol:.1g} nats a row after "
            f"{found.trace.shape[1]} sweeps: take a larger max_iter before comparing its ELBO.",
            stacklevel=4,
        )
    # Columns beyond k are padding: loadings that are 0.
    kept = np.append(np.arange(k), found.loc.shape[-1] - 1)
    q = Posterior(
        found.loc[best][:, kept],
        found.cov[best][:, kept][:, :, kept],
        found.noise_precision[best],
        found.loading_precision[best][:k],
    )
    at_end = in_double(q)
    noise_shape, loading_shape = shapes(problem.prior, alpha, num_observed, d, ard)
    return PPCAFit(
        posterior=jax.tree.map(jnp.asarray, q),
        origin=problem.origin,
        noise_shape=noise_shape,
        ard_shape=loading_shape if ard else None,
        prior=problem.prior,
        alpha=alpha,
        elbo=elbo(at_end, update_scores(at_end, exact, np), exact, about, alpha, ard),
        trace=found.trace[best, : last[best] + 1].astype(np.float64) + offset,
        num_iter=int(last[best]) + 1,
        converged=bool(found.converged[best]),
        restart_elbos=ends,
        num_observed=num_observed,
    )


def sweep(
    q: Posterior, rows: Rows, prior: Prior, alpha: Any, ard: bool, active: Any = None
) -> tuple[Posterior, Scores]:
    """Every half-step once."""
    z = update_scores(q, rows)
    q = update_loadings(q, z, rows, prior, alpha, active)
    q, z = translate(q, z, prior, alpha)
    q, z = rotate(q, z, prior, alpha, ard, active)
    return update_noise(q, z, rows, prior, alpha), z


@partial(jax.jit, static_argnames=("ard", "max_iter"))
@in_full_precision
def _ascend(
    starts: Start, rows: Rows, prior: Prior, alpha: Array, tol: Array, *, ard: bool, max_iter: int
) -> Ascent:
    n, d = rows.x.shape
    slack = ROUNDING * jnp.finfo(rows.x.dtype).eps

    def from_start(start: Start) -> Ascent:
        k = start.loadings.shape[1]
        loc = jnp.concatenate([start.loadings, start.mean[:, None]], axis=1)
        cov = jnp.zeros((1 if rows.mask is None else d, k + 1, k + 1), loc.dtype)
        precision = prior.loading_precision * jnp.ones_like(loc, shape=(k,))
        if ard:
            squares = jnp.sum(start.loadings**2, axis=0)
            precision = (prior.ard_shape + 0.5 * d) / (prior.ard_rate + 0.5 * squares)
        q = Posterior(loc, cov, start.noise_precision, precision)

        def going(carry: tuple) -> Array:
            return ~carry[-2] & ~carry[-1] & (carry[2] < max_iter)

        def step(carry: tuple) -> tuple:
            q, trace, i, value, _, _ = carry
            q, z = sweep(q, rows, prior, alpha, ard, start.active)
            terms = varying_terms(q, z, rows, prior, alpha, ard, start.active)
            gain = jnp.sum(terms) - value
            # Not-a-number compares as False: `fell` would miss it, and the loop run on.
            bad = ~(gain >= -slack * jnp.sum(jnp.abs(terms)))
            trace = trace.at[i].set(jnp.sum(terms))
            return q, trace, i + 1, jnp.sum(terms), gain <= tol * n, bad

        first = (q, jnp.zeros(max_iter, loc.dtype), jnp.asarray(0))
        carry = (*first, jnp.asarray(-jnp.inf, loc.dtype), jnp.asarray(False), jnp.asarray(False))
        q, trace, i, _, converged, fell = jax.lax.while_loop(going, step, carry)
        return Ascent(*q, trace, i, converged, fell)

    # Starts side by side; numbers of factors one after another, as they take different numbers of sweeps.
    return jax.lax.map(jax.vmap(from_start), starts)
