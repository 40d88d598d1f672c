"""Independent references, from the printed formulas: numpy and scipy only, nothing of the package."""

import numpy as np
from scipy.optimize import brentq
from scipy.special import erfcx, log_ndtr

# Conjugate normal location model: y_i ~ N(theta, noise_sd²), theta ~ N(prior_mean, prior_sd²).


def tempered_normal_posterior(y, alpha, prior_mean, prior_sd, noise_sd):
    """Mean and standard deviation of the posterior proportional to likelihood^alpha times prior."""
    y = np.atleast_1d(np.asarray(y, float))
    precision = prior_sd**-2 + alpha * y.size * noise_sd**-2
    mean = (prior_mean * prior_sd**-2 + alpha * y.sum() * noise_sd**-2) / precision
    return mean, precision**-0.5


def tempered_normal_log_evidence(y, alpha, prior_mean, prior_sd, noise_sd):
    """The log of the integral of likelihood^alpha times prior, with every constant."""
    y = np.atleast_1d(np.asarray(y, float))
    n = y.size
    center = y.mean() if n else 0.0
    constant = (
        -0.5
        * alpha
        * (
            n * np.log(2 * np.pi * noise_sd**2)
            + ((y - center) ** 2).sum() / noise_sd**2
        )
    )
    # What is left is a Gaussian integral over theta of exp(-k (center - theta)² / 2) times the prior.
    k = alpha * n / noise_sd**2
    inflation = 1 + k * prior_sd**2
    return (
        constant
        - 0.5 * np.log(inflation)
        - 0.5 * k * (center - prior_mean) ** 2 / inflation
    )


# Gaussians, one coordinate at a time.


def gaussian_kl(m, sigma, m0, s):
    """KL(N(m, sigma²), N(m0, s²)) of each coordinate."""
    return np.log(s / sigma) + (sigma**2 + (m - m0) ** 2) / (2 * s**2) - 0.5


def log_normal_density(x, m, s):
    return -0.5 * ((x - m) / s) ** 2 - np.log(s) - 0.5 * np.log(2 * np.pi)


def standard_nodes(breaks=(), width=12.0, panels=48, order=20):
    """Nodes and weights of a dense quadrature against N(0, 1), with panels that end at ``breaks``.

    Outside of ``width`` standard deviations lies 4e-33 of the mass.
    """
    inside = [b for b in np.atleast_1d(breaks) if -width < b < width]
    edges = np.unique(np.concatenate([np.linspace(-width, width, panels + 1), inside]))
    x, w = np.polynomial.legendre.leggauss(order)
    left, right = edges[:-1, None], edges[1:, None]
    nodes = (0.5 * (left + right) + 0.5 * (right - left) * x).ravel()
    weights = (0.5 * (right - left) * w).ravel()
    return nodes, weights * np.exp(log_normal_density(nodes, 0.0, 1.0))


def gaussian_kl_by_quadrature(m, sigma, m0, s):
    """KL of two Gaussians as the integral it is, summed over coordinates."""
    z, w = standard_nodes()
    total = 0.0
    for mj, sj, m0j, s0j in np.broadcast(m, sigma, m0, s):
        x = mj + sj * z
        total += w @ (log_normal_density(x, mj, sj) - log_normal_density(x, m0j, s0j))
    return total


def expected_scalar_loss(loss, slope, mean, sd, kinks=()):
    """Moments of a loss l(u), u ~ N(mean, sd²), sd > 0, by dense quadrature.

    Derivatives are of the density, not of the loss: they need no smoothness and share nothing with
    Stein's identity.

    Returns:
        E l, dE l/dmean, dE l/dsd² and E l'².
    """
    z, w = standard_nodes([(k - mean) / sd for k in kinks])
    u = mean + sd * z
    values, slopes = loss(u), slope(u)
    return (
        w @ values,
        w @ (values * z) / sd,
        w @ (values * (z**2 - 1)) / (2 * sd**2),
        w @ slopes**2,
    )


def expected_linear_loss(loss, slope, m, sigma, x, y, kinks=lambda y: ()):
    """Expectation of sum_i loss(x_i theta, y_i), theta ~ N(m, diag sigma²).

    Args:
        loss: ``(u, y) -> loss``, vectorised over u.
        slope: Its derivative in u.
        m: Means, ``(d,)``.
        sigma: Standard deviations, ``(d,)``, not all 0.
        x: ``(n, d)``.
        y: ``(n,)``.
        kinks: ``y -> u`` where the loss is not smooth.

    Returns:
        A dict of ``at_mean``, ``expected``, ``grad_loc``, ``grad_var`` and ``fisher`` (half the expected
        squared gradient).
    """
    m, sigma, x, y = (np.asarray(a, float) for a in (m, sigma, x, y))
    at_mean = expected = 0.0
    grad_loc, grad_var, fisher = np.zeros_like(m), np.zeros_like(m), np.zeros_like(m)
    for xi, yi in zip(np.atleast_2d(x), np.atleast_1d(y), strict=True):
        mean, sd = xi @ m, np.sqrt(((xi * sigma) ** 2).sum())
        value, d_mean, d_var, square = expected_scalar_loss(
            lambda u, yi=yi: loss(u, yi),
            lambda u, yi=yi: slope(u, yi),
            mean,
            sd,
            kinks(yi),
        )
        at_mean += loss(np.asarray(mean), yi)
        expected += value
        grad_loc += xi * d_mean
        grad_var += xi**2 * d_var
        fisher += 0.5 * xi**2 * square
    return {
        "at_mean": float(at_mean),
        "expected": float(expected),
        "grad_loc": grad_loc,
        "grad_var": grad_var,
        "fisher": fisher,
    }


# The printed objectives of CA19, Algorithm 2, minimised numerically. With a mean-field Gaussian and a box
# on means and standard deviations the coordinates separate, and so do m and sigma.


def _derivative(f, x):
    """Complex-step derivative: exact to rounding, for the analytic objectives below."""
    return f(x + 1e-40j).imag / 1e-40


def _argmin(f, lower, upper, start):
    """Minimiser of a convex analytic ``f`` on [lower, upper], from the root of its derivative."""
    width = 1.0
    while True:
        low = max(lower, start - width)
        high = min(upper, start + width)
        if lower == 0 and low == 0:
            low = start / (1 + width) ** 2
        if (low == lower or _derivative(f, low) < 0) and (
            high == upper or _derivative(f, high) > 0
        ):
            break
        width *= 4
        if width > 1e30:
            raise ArithmeticError("no minimiser in reach")
    if low == lower and _derivative(f, low) >= 0:
        return low
    if high == upper and _derivative(f, high) <= 0:
        return high
    return brentq(
        lambda v: _derivative(f, v), low, high, xtol=1e-15, rtol=1e-14, maxiter=500
    )


def _kl_in_loc(m, m0, s):
    """The terms of the Gaussian KL that hold the mean."""
    return (m - m0) ** 2 / (2 * s**2)


def _kl_in_scale(sigma, s):
    """The terms of the Gaussian KL that hold the standard deviation."""
    return np.log(s / sigma) + sigma**2 / (2 * s**2)


def argmin_source(
    g_m, g_sigma, anchor_loc, anchor_scale, step_size, box_loc=np.inf, box_scale=np.inf
):
    """Argmin over mu = (m, sigma) in the box of <g, mu> + KL(q_mu, anchor) / step_size.

    Objective (6) with summed gradients and the prior, (7) with one gradient and the current q.
    """
    arrays = (g_m, g_sigma, anchor_loc, anchor_scale, step_size, box_loc, box_scale)
    locs, scales = [], []
    for gm, gs, ma, sa, eta, bl, bs in np.broadcast(
        *(np.asarray(a, float) for a in arrays)
    ):
        locs.append(
            _argmin(
                lambda m, gm=gm, ma=ma, sa=sa, eta=eta: (
                    gm * m + _kl_in_loc(m, ma, sa) / eta
                ),
                -bl,
                bl,
                ma,
            )
        )
        scales.append(
            _argmin(
                lambda v, gs=gs, sa=sa, eta=eta: gs * v + _kl_in_scale(v, sa) / eta,
                0.0,
                bs,
                min(sa, bs),
            )
        )
    return np.array(locs), np.array(scales)


def argmin_source_to_prior(
    g_m, g_sigma, current, prior, step_size, evidence, box_loc=np.inf, box_scale=np.inf
):
    """Objective (8) in mu = (m, sigma): <g, mu> + KL(q_mu, prior) / evidence + KL(q_mu, current) / step_size."""
    rows = np.broadcast(
        *(
            np.asarray(a, float)
            for a in (g_m, g_sigma, *current, *prior, box_loc, box_scale)
        )
    )
    locs, scales = [], []
    for gm, gs, mt, st, m0, s0, bl, bs in rows:

        def in_loc(m, gm=gm, mt=mt, st=st, m0=m0, s0=s0):
            return (
                gm * m
                + _kl_in_loc(m, mt, st) / step_size
                + _kl_in_loc(m, m0, s0) / evidence
            )

        def in_scale(v, gs=gs, st=st, s0=s0):
            return (
                gs * v
                + _kl_in_scale(v, st) / step_size
                + _kl_in_scale(v, s0) / evidence
            )

        locs.append(_argmin(in_loc, -bl, bl, mt))
        scales.append(_argmin(in_scale, 0.0, bs, min(st, bs)))
    return np.array(locs), np.array(scales)


def argmin_expectation(
    g_m,
    g_v,
    current_loc,
    current_scale,
    prior_loc,
    prior_scale,
    step_size,
    evidence,
    box_loc=np.inf,
    box_scale=np.inf,
):
    """Argmin of objective (8): <g, mu> + KL(q_mu, prior)/evidence + KL(q_mu, current)/step_size.

    mu = (E theta, E theta²) = (m, m² + sigma²). By the chain rule through m and sigma² = mu_2 - mu_1², the
    gradient in mu is (g_m - 2 m_t g_v, g_v).
    """
    arrays = (
        g_m,
        g_v,
        current_loc,
        current_scale,
        prior_loc,
        prior_scale,
        box_loc,
        box_scale,
    )
    locs, scales = [], []
    for gm, gv, mt, st, m0, s, bl, bs in np.broadcast(
        *(np.asarray(a, float) for a in arrays)
    ):

        def in_loc(m, gm=gm, gv=gv, mt=mt, st=st, m0=m0, s=s):
            held = _kl_in_loc(m, m0, s) / evidence + _kl_in_loc(m, mt, st) / step_size
            return (gm - 2 * mt * gv) * m + gv * m**2 + held

        def in_scale(v, gv=gv, st=st, s=s):
            return (
                gv * v**2
                + _kl_in_scale(v, s) / evidence
                + _kl_in_scale(v, st) / step_size
            )

        locs.append(_argmin(in_loc, -bl, bl, np.clip(mt, -bl, bl)))
        scales.append(_argmin(in_scale, 0.0, bs, min(st, bs)))
    return np.array(locs), np.array(scales)


def linear_posterior(x, y, noise_variance, prior_loc, prior_scale):
    """Mean and covariance of the exact posterior of y_t ~ N(x_t theta, noise_variance)."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    prior_precision = np.diag(np.asarray(prior_scale, float) ** -2)
    precision = prior_precision + x.T @ x / noise_variance
    covariance = np.linalg.inv(precision)
    return covariance @ (
        prior_precision @ np.asarray(prior_loc, float) + x.T @ y / noise_variance
    ), covariance


# Losses of a linear predictor as (loss, slope, kinks).


def softplus(u):
    return np.logaddexp(0.0, u)


def sigmoid(u):
    return np.exp(-np.logaddexp(0.0, -u))


LINEAR_LOSSES = {
    "hinge": (
        lambda u, y: np.maximum(1 - y * u, 0.0),
        lambda u, y: np.where(1 - y * u > 0, -y, 0.0),
        lambda y: (1 / y,),
    ),
    "squared": (lambda u, y: (y - u) ** 2, lambda u, y: -2 * (y - u), lambda y: ()),
    "half_squared": (lambda u, y: 0.5 * (y - u) ** 2, lambda u, y: u - y, lambda y: ()),
    "logistic": (
        lambda u, y: softplus(-y * u),
        lambda u, y: -y * sigmoid(-y * u),
        lambda y: (),
    ),
    "polynomial": (
        lambda u, y: 0.1 * u**6 - u**3 + y * u,
        lambda u, y: 0.6 * u**5 - 3 * u**2 + y,
        lambda y: (),
    ),
    "pinball": (
        lambda u, y: np.where(y > u, 0.3 * (y - u), 0.7 * (u - y)),
        lambda u, y: np.where(y > u, -0.3, 0.7),
        lambda y: (y,),
    ),
}


LINEAR_LOSSES |= {
    "absolute": (
        lambda u, y: np.abs(y - u),
        lambda u, y: -np.sign(y - u),
        lambda y: (y,),
    ),
    "quantile_90": (
        lambda u, y: np.where(y > u, 0.9 * (y - u), 0.1 * (u - y)),
        lambda u, y: np.where(y > u, -0.9, 0.1),
        lambda y: (y,),
    ),
    "gaussian": (
        lambda u, y: -log_normal_density(y, u, 1.7),
        lambda u, y: (u - y) / 1.7**2,
        lambda y: (),
    ),
    "poisson": (
        lambda u, y: np.exp(u) - y * u + sum(np.log(np.arange(1, y + 1))),
        lambda u, y: np.exp(u) - y,
        lambda y: (),
    ),
    "probit": (
        lambda u, y: -log_ndtr(y * u),
        lambda u, y: -y * hazard(-y * u),
        lambda y: (),
    ),
    # Student's t with 4 degrees of freedom and unit scale, up to its constant: not convex.
    "student": (
        lambda u, y: 2.5 * np.log1p((y - u) ** 2 / 4),
        lambda u, y: 5 * (u - y) / (4 + (y - u) ** 2),
        lambda y: (),
    ),
}


def hazard(r):
    """Density over upper tail of a standard Gaussian."""
    return np.sqrt(2 / np.pi) / erfcx(r / np.sqrt(2))


def expected_full_loss(loss, slope, m, covariance, x, y, kinks=lambda y: ()):
    """Expectation of sum_i loss(x_i theta, y_i), theta ~ N(m, covariance); as ``expected_linear_loss``.

    ``grad_var`` and ``fisher`` are matrices ``(d, d)``.
    """
    out = {
        "at_mean": 0.0,
        "expected": 0.0,
        "grad_loc": 0.0,
        "grad_var": 0.0,
        "fisher": 0.0,
    }
    for xi, yi in zip(np.asarray(x, float), np.asarray(y, float), strict=True):
        mean, sd = xi @ m, np.sqrt(xi @ covariance @ xi)
        value, d_mean, d_var, square = expected_scalar_loss(
            lambda u, yi=yi: loss(u, yi),
            lambda u, yi=yi: slope(u, yi),
            mean,
            sd,
            kinks(yi),
        )
        out["at_mean"] += float(loss(np.asarray(mean), yi))
        out["expected"] += value
        out["grad_loc"] = out["grad_loc"] + xi * d_mean
        out["grad_var"] = out["grad_var"] + np.outer(xi, xi) * d_var
        out["fisher"] = out["fisher"] + 0.5 * np.outer(xi, xi) * square
    return out


def expected_outputs_loss(loss, slope, mean, covariance, step=0.4, width=8.0):
    """Moments of a loss l(u), u ~ N(mean, covariance) in R^K, by a trapezoidal sum on a grid of R^K.

    The sum converges geometrically for smooth losses. Derivatives are of the density, as in
    ``expected_scalar_loss``.

    Args:
        loss: Predictors ``(..., K)`` to losses ``(...)``.
        slope: Its gradient, ``(..., K)``.
        mean: ``(K,)``.
        covariance: ``(K, K)``, positive definite.
        step: Of the grid, in standard deviations.
        width: Where it ends.

    Returns:
        E l, dE l/dmean, dE l/dcovariance and E[∇l ∇lᵀ].
    """
    size = len(mean)
    line = np.arange(-width, width + step / 2, step)
    z = np.stack(np.meshgrid(*[line] * size, indexing="ij"), axis=-1).reshape(-1, size)
    w = np.exp(-0.5 * (z**2).sum(-1))
    w /= w.sum()
    factor = np.linalg.cholesky(covariance)
    u = mean + z @ factor.T
    # Score of the density in the mean, and of its logarithm's second derivatives.
    score = np.linalg.solve(factor.T, z.T).T
    values, slopes = loss(u), slope(u)
    precision = np.linalg.inv(covariance)
    second = (
        np.einsum("m,mi,mj->ij", w * values, score, score) - (w @ values) * precision
    )
    return (
        w @ values,
        score.T @ (w * values),
        0.5 * second,
        np.einsum("m,mi,mj->ij", w, slopes, slopes),
    )


def expected_linear_outputs_loss(loss, slope, m, covariance, x, y, num_outputs):
    """Expectation of sum_i loss(u_i, y_i), u_ik = x_i theta_k, theta ~ N(m, covariance), ``(K d,)``.

    As ``expected_full_loss``, with ``loss(u, y)`` and ``slope(u, y)`` of predictors ``(..., K)``.
    """
    out = {
        "at_mean": 0.0,
        "expected": 0.0,
        "grad_loc": 0.0,
        "grad_var": 0.0,
        "fisher": 0.0,
    }
    for xi, yi in zip(np.asarray(x, float), y, strict=True):
        jacobian = np.kron(np.eye(num_outputs), xi)
        value, d_mean, d_cov, square = expected_outputs_loss(
            lambda u, yi=yi: loss(u, yi),
            lambda u, yi=yi: slope(u, yi),
            jacobian @ m,
            jacobian @ covariance @ jacobian.T,
        )
        out["at_mean"] += float(loss(jacobian @ m, yi))
        out["expected"] += value
        out["grad_loc"] = out["grad_loc"] + jacobian.T @ d_mean
        out["grad_var"] = out["grad_var"] + jacobian.T @ d_cov @ jacobian
        out["fisher"] = out["fisher"] + 0.5 * jacobian.T @ square @ jacobian
    return out


def softmax_loss(u, y):
    """Cross-entropy of class y from predictors ``(..., K)``."""
    return np.logaddexp.reduce(u, axis=-1) - u[..., int(y)]


def softmax_slope(u, y):
    p = np.exp(u - np.logaddexp.reduce(u, axis=-1)[..., None])
    return p - np.eye(u.shape[-1])[int(y)]
