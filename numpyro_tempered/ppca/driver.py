"""Fitting tempered probabilistic PCA: starts, the compiled loop, and its result."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Ascent,
    Iterate,
    Numbers,
    advance,
    begin,
    check_count,
    check_number,
    doubles,
    key_first,
    names_of,
    warn_caller,
)
from numpyro_tempered.ppca import base
from numpyro_tempered.ppca.base import Posterior, Prior, Rows, Target
from numpyro_tempered.ppca.bound import constant, elbo, gamma_shapes, varying_terms
from numpyro_tempered.ppca.model import PPCAFit, check_fit
from numpyro_tempered.ppca.updates import sweep, update_loading_precision, update_scores

# A sum of millions of float32 terms is off by some multiple of their rounding; a real fall is far larger.
ROUNDING = 100.0


@key_first
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
    column has a covariance of its own. Rows without any entry are ignored. The noise is common to all columns, so
    bring them to comparable units, and leave out columns that are constant or copies of others: a warning names
    them.

    Args:
        rng_key: Key of the random starts; the first start does not use it.
        x: Data, shape ``(n, d)``, NaN where missing.
        num_factors: K, from 0 to d.
        alpha: Power on the likelihood, positive.
        prior: Priors, such as :func:`prior` makes. By default they are taken from the data, by the means and the
            mean variance s² of the columns, worth one entry and the same for all K. So data times c have
            loadings times c, the same K, and an ELBO less by alpha log c for each observed entry. The least noise
            variance is 2e-9 s² / alpha. A warning says where a prior holds the noise up.
        ard: Learn a precision λ_k for each column of W; else all are ``prior.loading_precision``.
        num_restarts: Number of starts, run side by side. The first is at the principal axes; the others alternate
            between the first with its last 1, 2, ... columns near 0 and random loadings. ARD has optima with more
            and with fewer columns: before you count columns by ``num_occupied``, take ``2 * num_factors``. To
            compare K, one start is enough.
        init: An earlier fit to start from, instead of the principal axes; of data in the same units.
        tolerance: A start has converged once a sweep gains no more than this for each row, in nats.
        max_iter: Limit of the sweeps of a start.

    Returns:
        A :class:`PPCAFit` of the start with the largest ELBO. A warning says if that start has not converged.

    Raises:
        ValueError: If ``x`` is not a matrix, is infinite somewhere, or a column has no entry; if all columns are
            constant and no prior is given; or an argument is out of range.
        TypeError: If ``x`` is not of real numbers, or is traced.
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
    rng_keys: Iterable[Array], x: ArrayLike, orders: Sequence[int], options: Options
) -> list[PPCAFit]:
    """Fits with several numbers of factors, by a single compiled program."""
    values = base.as_matrix(x)
    values = values[~np.all(np.isnan(values), axis=1)]
    base.check_table(values, orders)
    alpha, ard, tolerance, max_iter = (
        options.alpha,
        bool(options.ard),
        options.tolerance,
        options.max_iter,
    )
    check_number(alpha, "alpha", "(0, inf)")
    check_number(tolerance, "tolerance", "[0, inf)")
    check_count(options.num_restarts, "num_restarts")
    check_count(max_iter, "max_iter")
    prior = (
        base.prior_of(values)
        if options.prior is None
        else base.check_prior(options.prior, values.shape[1])
    )
    origin = np.nanmean(values, axis=0)
    centred = prior._replace(
        mean=np.broadcast_to(doubles(prior.mean), origin.shape) - origin
    )
    base.warn_of_scale(values, centred)
    base.warn_of_columns(values)
    dtype = jnp.result_type(float)
    target = Target(base.as_rows(values, origin, None), centred, float(alpha), ard)
    orders, width = [int(k) for k in orders], int(max(orders))
    each = [
        make_starts(key, target, k, width, origin, options)
        for key, k in zip(rng_keys, orders, strict=True)
    ]
    # Rounded on the host, as each conversion would be a program.
    starts = jax.device_put(
        jax.tree.map(lambda *parts: np.stack(parts).astype(dtype), *each)
    )
    rows = base.as_rows(values, origin, dtype)
    numbers = jax.device_put(
        jax.tree.map(lambda leaf: np.asarray(leaf, dtype), (centred, alpha, tolerance))
    )
    ascents = jax.device_get(
        _ascend(starts, rows, *numbers, ard=ard, max_iter=max_iter)
    )
    fits = []
    for i, k in enumerate(orders):
        ascent = jax.tree.map(lambda leaf, i=i: leaf[i], ascents)
        fits.append(_finish(ascent, k, target, prior, origin, float(tolerance)))
    _warn_of_noise(fits, base.spacing_of(x, values))
    names = names_of(x)
    return [each._replace(column_names=names) for each in fits]


def _warn_of_noise(fits: list[PPCAFit], spacing: float) -> None:
    """Warn of a noise that is the prior's, or that of the numbers that the data came in."""
    least = min(fits, key=lambda each: each.noise_variance)
    prior, noise = (
        least.prior,
        f"the noise variance {least.noise_variance:.2g} with {least.num_factors} factors",
    )
    from_data = least.noise_variance * least.noise_shape - prior.noise_rate
    if prior.noise_rate > from_data and prior.noise_shape < 0.5 * least.noise_shape:
        warn_caller(
            f"{noise} is mostly prior.noise_rate {prior.noise_rate:.2g}, as the data show less, and the number "
            "of factors depends on it: leave out columns that others determine, or pass a prior with a smaller "
            "noise_rate."
        )
    if least.noise_variance < 0.25 * spacing**2:
        warn_caller(
            f"{noise} is below the resolution of x, whose type holds its largest number to {spacing:.2g}: give "
            "the data in float64 as a NumPy array, or subtract their means before they are rounded."
        )


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


def make_starts(
    rng_key: Array,
    target: Target,
    k: int,
    width: int,
    origin: Numbers,
    options: Options,
) -> Start:
    """Starts on the host: the first one, the same with ever fewer columns, and in between random loadings.

    Columns of zeros fill the loadings up to ``width``.
    """
    x = target.rows.x
    first = from_axes(x, k, target.prior)
    if options.init is not None:
        first = from_fit(options.init, first, target.rows, origin)
    starts = [first]
    total = max(float(np.mean(x**2)), 1.0 / first.noise_precision)
    for i in range(1, options.num_restarts):
        live = k - (i + 1) // 2
        if i % 2 and live >= 0:
            # Optima with small and with large columns differ.
            factor = np.where(np.arange(k) < live, 1.0, 1e-3)
            starts.append(first._replace(loadings=first.loadings * factor))
        else:
            # Half of the variance to the factors, half to the noise.
            shape = (x.shape[1], k)
            normal = doubles(jax.random.normal(jax.random.fold_in(rng_key, i), shape))
            loadings = np.sqrt(0.5 * total / max(k, 1)) * normal
            starts.append(
                Start(loadings, np.zeros(x.shape[1]), 2.0 / total, np.ones(k))
            )
    stacked = Start(*(np.stack(part) for part in zip(*starts, strict=True)))
    padding = [(0, 0), (0, width - k)]
    wide = np.pad(stacked.loadings, [(0, 0), *padding])
    return stacked._replace(loadings=wide, active=np.pad(stacked.active, padding))


def from_axes(x: Numbers, k: int, prior: Prior) -> Start:
    """The maximum-likelihood solution of the data with missing entries at the means of their columns."""
    n, d = x.shape
    if k <= n < d:
        # The covariance of many columns has too many entries.
        _, sizes, axes = np.linalg.svd(x, full_matrices=False)
        values, vectors = np.append(np.square(sizes) / n, np.zeros(d - n)), axes.T
    else:
        values, vectors = np.linalg.eigh(x.T @ x / n)
        values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    rest = values[k:].mean() if k < d else 0.5 * values[-1]
    noise = max(rest, 1e-3 * values.mean())
    if noise == 0.0:
        noise = prior.noise_rate / prior.noise_shape
    # A column that starts at 0 stays there, whatever the data say.
    sizes = np.sqrt(np.maximum(values[:k] - noise, 0.1 * noise))
    return Start(vectors[:, :k] * sizes, np.zeros(d), 1.0 / noise, np.ones(k))


def from_fit(init: PPCAFit, axes: Start, rows: Rows, origin: Numbers) -> Start:
    """An earlier fit, without its last columns or with more by principal axes.

    Raises:
        TypeError: If it is no fit.
        ValueError: If it has another number of columns, or is of data in other units, where no factor would last.
    """
    check_fit(init, "init")
    if init.origin.shape != origin.shape:
        raise ValueError(
            f"init has {init.origin.size} columns, x has {origin.size}: warm starts need the same."
        )
    loadings, k = doubles(init.loadings), axes.loadings.shape[1]
    deviation = np.sqrt(np.sum(rows.x**2) / rows.num_observed)
    expected = np.sqrt(np.sum(loadings**2) / len(loadings) + init.noise_variance)
    if deviation > 0.0 and not 0.1 <= expected / deviation <= 10.0:
        raise ValueError(
            f"init is a fit of columns that deviate by about {expected:.3g} from their means, those of x by "
            f"{deviation:.3g}: a warm start needs data in the same units."
        )
    if loadings.shape[1] < k:
        # The axes least aligned with what the fit has.
        basis = np.linalg.qr(loadings)[0]
        rest = axes.loadings - basis @ (basis.T @ axes.loadings)
        order = np.argsort(-np.sum(rest**2, axis=0))[: k - loadings.shape[1]]
        loadings = np.concatenate([loadings, rest[:, order]], axis=1)
    return Start(
        loadings[:, :k],
        init.location - origin,
        float(init.posterior.noise_precision),
        np.ones(k),
    )


def _finish(
    ascent: Ascent[Posterior],
    k: int,
    target: Target,
    prior: Prior,
    origin: np.ndarray,
    tolerance: float,
) -> PPCAFit:
    """The best start as a fit with k factors."""
    dtype, offset = ascent.objective.dtype, constant(target, k)
    ends = doubles(ascent.objective) + offset
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
        warn_caller(
            f"the fit with {k} factors still gained more than {tolerance:.1g} nats a row after "
            f"{len(ascent.trace)} sweeps: take a larger max_iter before comparing its ELBO."
        )
    # Columns beyond k are padding, with loadings of 0.
    q = Posterior(*(part[best] for part in ascent.point))
    columns = np.append(np.arange(k), q.loc.shape[-1] - 1)
    loc, cov = q.loc[:, columns], q.cov[:, columns][:, :, columns]
    q = Posterior(loc, cov, q.noise_precision, q.loading_precision[:k])
    num_iter, wide = int(ascent.num_iter[best]), base.in_double(q)
    noise_shape, loading_shape = gamma_shapes(target)
    return PPCAFit(
        posterior=jax.device_put(q),
        origin=origin,
        noise_shape=float(noise_shape),
        ard_shape=loading_shape if target.ard else None,
        prior=prior,
        alpha=float(target.alpha),
        objective=elbo(wide, update_scores(wide, target.rows, np), target),
        trace=doubles(ascent.trace[:num_iter, best]) + offset,
        num_iter=num_iter,
        converged=bool(ascent.converged[best]),
        restart_elbos=ends,
        num_observed=int(target.rows.num_observed),
    )


@partial(jax.jit, static_argnames=("ard", "max_iter"))
@jax.default_matmul_precision("highest")
def _ascend(
    starts: Start,
    rows: Rows,
    prior: Prior,
    alpha: Array,
    tolerance: Array,
    *,
    ard: bool,
    max_iter: int,
) -> Ascent[Posterior]:
    n, d = rows.x.shape
    unit = ROUNDING * jnp.finfo(rows.x.dtype).eps

    def first(start: Start) -> Posterior:
        k = start.loadings.shape[1]
        loc = jnp.concatenate([start.loadings, start.mean[:, None]], axis=1)
        cov = jnp.zeros((1 if rows.mask is None else d, k + 1, k + 1), loc.dtype)
        precision = prior.loading_precision * jnp.ones_like(loc, shape=(k,))
        q = Posterior(loc, cov, jnp.asarray(start.noise_precision), precision)
        return update_loading_precision(q, prior) if ard else q

    def one_pass(q: Posterior, active: Numbers) -> Iterate[Posterior]:
        target = Target(rows, prior, alpha, ard, active)
        q, z = sweep(q, target)
        terms = varying_terms(q, z, target)
        return Iterate(q, jnp.sum(terms), unit * jnp.sum(jnp.abs(terms)))

    def ascend(starts: Start) -> Ascent[Posterior]:
        ascent = begin(jax.vmap(first)(starts), max_iter)
        return advance(
            lambda q: jax.vmap(one_pass)(q, starts.active),
            ascent,
            max_iter,
            tolerance * n,
        )

    # Starts side by side; numbers of factors one after another, as they take different numbers of sweeps.
    return jax.lax.map(ascend, starts)
