"""A likelihood that depends on latents beside its named predictor, such as a scale, and on kinks in it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy import integrate, optimize, special, stats

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, MeanField
from numpyro_tempered.infer.free_energy import model_objective, shared_nodes
from numpyro_tempered.infer.priors import Latents, closed_priors

KEY, ALPHA, N = jax.random.key(0), 0.5, 30
RNG = np.random.default_rng(4)
X = RNG.normal(size=(N, 2))
Y = X @ np.array([1.0, -0.5]) + 0.7 * RNG.normal(size=N)
GROUPS = np.arange(N) % 3
ETA = nt.expectations.gauss_hermite(predictor="eta")


def predictor(x):
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    return numpyro.deterministic("eta", x @ beta)


def linear(x, y):
    eta = predictor(x)
    # A Gaussian prior on all latents, and a loss that is not convex in them.
    sigma = numpyro.sample("sigma", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(eta, jnp.exp(sigma)), obs=y)


def grouped(groups):
    def model(x, y):
        eta = predictor(x)
        sigma = numpyro.sample(
            "sigma", dist.LogNormal(0.0, 1.0).expand([groups.max() + 1]).to_event(1)
        )
        numpyro.sample("y", dist.Normal(eta, sigma[groups]), obs=y)

    return model


def absolute(x, y):
    eta = predictor(x)
    b = numpyro.sample("b", dist.LogNormal(0.0, 1.0))
    numpyro.sample("y", dist.Laplace(eta, b), obs=y)


def median(x, y):
    numpyro.sample("y", dist.Laplace(predictor(x), 0.6), obs=y)


def latents_of(**sizes):
    stops = np.cumsum(list(sizes.values()))

    def unpack(flat):
        parts = jnp.split(flat, stops[:-1])
        return {
            n: p if n == "beta" or s > 1 else p[0]
            for (n, s), p in zip(sizes.items(), parts, strict=True)
        }

    return Latents(tuple(sizes), unpack)


def gaussian(m, covariance, *, diagonal):
    m = jnp.asarray(m)
    if diagonal:
        return MeanField(m, jnp.sqrt(jnp.diag(jnp.asarray(covariance))))
    return FullRank(m, jnp.linalg.cholesky(jnp.asarray(covariance)))


def objective(model, q, *args, **sizes):
    args = tuple(map(jnp.asarray, args))
    tempered = nt.temper(model, alpha=ALPHA)
    with_sizes = latents_of(**sizes)
    return model_objective(
        tempered, with_sizes, q, args, {}, expectation=ETA, num_draws=1000
    ).objective


def joint(m, covariance, i, s):
    """Moments of (residual, log-scale) of datum i, whose log-scale is coordinate s."""
    row = np.concatenate([X[i], np.zeros(len(m) - 2)])
    spread = covariance @ row
    return Y[i] - row @ m, row @ spread, -spread[s], m[s], covariance[s, s]


def normal_loss(m, covariance, groups):
    """E_q of the negative log-likelihood with its derivatives in closed form: E[e^-2s r²] by tilting."""
    total = 0.0
    for i in range(N):
        s = 2 + groups[i]
        row = jnp.concatenate([X[i], jnp.zeros(m.shape[0] - 2)])
        spread = covariance @ row
        # Under e^-2s the mean of r moves by -2 cov(r, s), with cov(r, s) = -spread[s].
        r = Y[i] - row @ m + 2.0 * spread[s]
        tilt = jnp.exp(-2.0 * m[s] + 2.0 * covariance[s, s])
        total += 0.5 * tilt * (r**2 + row @ spread) + m[s] + 0.5 * np.log(2.0 * np.pi)
    return total


def normal_energy(m, covariance, groups):
    """E_q[f] of ``linear`` and ``grouped``: a lognormal scale is a normal log-scale."""
    precision = np.concatenate([np.full(2, 0.25), np.ones(len(m) - 2)])
    prior = 0.5 * jnp.sum(
        precision * (m**2 + jnp.diag(covariance)) - jnp.log(precision / (2.0 * np.pi))
    )
    return ALPHA * normal_loss(m, covariance, groups) + prior


def random_q(d, width=0.3):
    root = np.random.default_rng(d).normal(size=(d, d))
    covariance = width**2 * (root @ root.T / d + 0.3 * np.eye(d))
    return np.concatenate([[0.8, -0.3], np.linspace(-0.5, 0.2, d - 2)]), covariance


def assert_derivatives(found, energy, m, covariance, *, diagonal, rtol):
    """``found`` against a function of mean and covariance, by automatic differentiation."""
    covariance = (
        jnp.diag(jnp.diag(jnp.asarray(covariance)))
        if diagonal
        else jnp.asarray(covariance)
    )
    value, (grad, in_covariance) = jax.value_and_grad(energy, argnums=(0, 1))(
        jnp.asarray(m), covariance
    )
    hessian = in_covariance + in_covariance.T
    np.testing.assert_allclose(found.value, value, rtol=rtol)
    np.testing.assert_allclose(found.grad, grad, rtol=rtol, atol=10 * rtol)
    np.testing.assert_allclose(
        found.hessian,
        jnp.diag(hessian) if diagonal else hessian,
        rtol=rtol,
        atol=10 * rtol,
    )


@pytest.mark.parametrize(
    "diagonal", [False, pytest.param(True, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("num_groups", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_latent_scale_is_the_closed_form_by_tilting(num_groups, diagonal, x64):
    groups = GROUPS % num_groups
    m, covariance = random_q(2 + num_groups)
    q = gaussian(m, covariance, diagonal=diagonal)
    model = linear if num_groups == 1 else grouped(groups)
    f = objective(model, q, X, Y, beta=2, sigma=num_groups)
    assert f.exact
    assert not f.needs_key
    found = jax.jit(lambda q: f(q))(q)
    energy = functools.partial(normal_energy, groups=groups)
    assert_derivatives(found, energy, m, covariance, diagonal=diagonal, rtol=1e-9)


def test_a_latent_scale_leaves_no_bound_on_the_gap(x64):
    """All priors are Gaussian, and the loss is not convex in the scale."""
    m, covariance = random_q(3)
    f = objective(
        linear, gaussian(m, covariance, diagonal=False), X, Y, beta=2, sigma=1
    )
    assert f.exact
    assert f.precision is None


@pytest.mark.full
def test_more_scales_than_a_product_rule_takes_are_drawn(x64):
    m, covariance = random_q(5)
    q = gaussian(m, covariance, diagonal=False)
    f = objective(grouped(GROUPS), q, X, Y, beta=2, sigma=3)
    assert f.needs_key
    assert not f.exact
    at = jax.jit(lambda key: f(q, key).grad)
    draws = np.stack([at(key) for key in jax.random.split(KEY, 20)])
    exact = jax.grad(normal_energy)(jnp.asarray(m), jnp.asarray(covariance), GROUPS)
    spread = draws.std(axis=0, ddof=1) / np.sqrt(20)
    assert np.all(np.abs(draws.mean(axis=0) - exact) < 4.0 * spread + 1e-9)
    # The residuals are integrated: draws of all five coordinates would be noisier by far.
    assert np.all(spread < 0.02 * np.abs(exact).max())


def test_draws_of_many_scales_are_antithetic_and_weigh_the_same():
    z, weights = shared_nodes(np.arange(3), 10).nodes(KEY)
    assert z.shape == (10, 3)
    np.testing.assert_allclose(weights, np.full(10, 0.1), rtol=1e-6)
    np.testing.assert_array_equal(z[5:], -z[:5])


def optimum(energy, d):
    """The best Gaussian by scipy, from its mean and the logarithm of its root."""
    lower = np.tril_indices(d, -1)

    def split(z):
        root = jnp.diag(jnp.exp(z[d : 2 * d])).at[lower].set(z[2 * d :])
        return z[:d], root

    def free(z):
        m, root = split(z)
        return (
            energy(m, root @ root.T)
            - jnp.sum(z[d : 2 * d])
            - 0.5 * d * np.log(2.0 * np.pi * np.e)
        )

    start = np.concatenate([np.zeros(d), np.full(d, -1.0), np.zeros(len(lower[0]))])
    best = optimize.minimize(
        jax.jit(jax.value_and_grad(free)), start, jac=True, options={"gtol": 1e-9}
    )
    m, root = split(jnp.asarray(best.x))
    return -best.fun, m, root @ root.T


@pytest.mark.full
def test_the_fit_of_a_regression_with_a_latent_scale_is_the_optimum(x64):
    fit = nt.fit_gaussian(
        KEY, linear, AutoMultivariateNormal, X, Y, alpha=ALPHA, expectation=ETA
    )
    elbo, m, covariance = optimum(lambda *q: normal_energy(*q, np.zeros(N, int)), 3)
    assert bool(fit.convergence.converged)
    assert fit.elbo.se == 0.0
    assert np.isinf(fit.convergence.gap_bound)
    assert fit.elbo.value == pytest.approx(elbo, abs=2e-6)
    q = fit.convergence.posterior
    np.testing.assert_allclose(q.loc, m, atol=1e-3)
    np.testing.assert_allclose(
        q.scale_tril @ q.scale_tril.T, covariance, rtol=0.02, atol=1e-4
    )
    # The parts of the ELBO: the untempered likelihood, and the divergence to a Gaussian prior.
    log_lik = -normal_loss(q.loc, q.scale_tril @ q.scale_tril.T, np.zeros(N, int))
    assert fit.elbo.expected_log_lik == pytest.approx(float(log_lik), rel=1e-8)


def absolute_loss(m, covariance):
    """E_q of the loss of ``absolute``, the kink by hand and the log-scale by a fine sum."""
    z = np.linspace(-9.0, 9.0, 4001)
    weights = stats.norm.pdf(z) * (z[1] - z[0])
    total = 0.0
    for i in range(N):
        mean, variance, cross, s0, s_variance = joint(m, covariance, i, 2)
        s = s0 + np.sqrt(s_variance) * z
        mu, sd = (
            mean + cross / np.sqrt(s_variance) * z,
            np.sqrt(variance - cross**2 / s_variance),
        )
        size = mu * (2.0 * stats.norm.cdf(mu / sd) - 1.0) + 2.0 * sd * stats.norm.pdf(
            mu / sd
        )
        total += np.sum(weights * (np.exp(-s) * size + s)) + np.log(2.0)
    return total


@pytest.mark.full
def test_a_laplace_likelihood_with_a_latent_scale_by_kink_and_quadrature(x64):
    m, covariance = random_q(3)
    q = gaussian(m, covariance, diagonal=False)
    f = objective(absolute, q, X, Y, beta=2, b=1)
    assert f.exact
    found = jax.jit(lambda q: f(q))(q)
    precision = np.array([0.25, 0.25, 1.0])

    def energy(m, covariance):
        prior = 0.5 * np.sum(
            precision * (m**2 + np.diag(covariance)) - np.log(precision / (2.0 * np.pi))
        )
        return ALPHA * absolute_loss(m, covariance) + prior

    assert float(found.value) == pytest.approx(energy(m, covariance), rel=1e-9)
    step, eye = 1e-5, np.eye(3)
    for j in range(3):
        slope = (
            energy(m + step * eye[j], covariance)
            - energy(m - step * eye[j], covariance)
        ) / (2 * step)
        assert float(found.grad[j]) == pytest.approx(slope, rel=1e-6, abs=1e-6)
    for j, k in itertools.combinations_with_replacement(range(3), 2):
        move = step * (np.outer(eye[j], eye[k]) + np.outer(eye[k], eye[j])) / 2.0
        slope = (energy(m, covariance + move) - energy(m, covariance - move)) / (
            2 * step
        )
        assert 0.5 * float(found.hessian[j, k]) == pytest.approx(
            slope, rel=1e-5, abs=1e-5
        )


@pytest.mark.full
def test_a_laplace_likelihood_is_exact_and_certified(x64):
    fit = nt.fit_gaussian(
        KEY, median, AutoMultivariateNormal, X, Y, alpha=ALPHA, expectation=ETA
    )
    q, found = fit.convergence.posterior, fit.convergence
    covariance = np.asarray(q.scale_tril @ q.scale_tril.T)
    mean, sd = (
        Y - X @ np.asarray(q.loc),
        np.sqrt(np.einsum("ij,jk,ik->i", X, covariance, X)),
    )
    by_scipy = [
        integrate.quad(
            lambda u, m=m, s=s: abs(u) * stats.norm.pdf(u, m, s),
            m - 9 * s,
            m + 9 * s,
            points=[0.0],
        )[0]
        for m, s in zip(mean, sd, strict=True)
    ]
    expected = -np.sum(by_scipy) / 0.6 - N * np.log(1.2)
    assert fit.elbo.se == 0.0
    assert bool(found.converged)
    assert fit.elbo.expected_log_lik == pytest.approx(expected, rel=1e-7)
    # Stationary by the oracle's curvature at the residuals.
    curvature = ALPHA * X.T @ (
        X * (2.0 * stats.norm.pdf(mean / sd) / sd / 0.6)[:, None]
    ) + 0.25 * np.eye(2)
    np.testing.assert_allclose(np.linalg.inv(covariance), curvature, rtol=1e-2)
    assert 0.0 <= float(found.gap_bound) < 1e-4


def test_derivatives_of_a_likelihood_with_a_kink_are_those_of_its_power(x64):
    online = nt.OnlineVI(
        nt.temper(median, alpha=ALPHA),
        nt.guides.AutoOnlineMultivariateNormal,
        expectation=ETA,
    )
    loss, _ = online.bare_loss(KEY, X, Y)
    m, covariance = random_q(2)
    found = jax.jit(loss.evaluate)(gaussian(m, covariance, diagonal=False), X, Y)
    mean, sd = X @ m - Y, np.sqrt(np.einsum("ij,jk,ik->i", X, covariance, X))
    size = mean * (2.0 * stats.norm.cdf(mean / sd) - 1.0) + 2.0 * sd * stats.norm.pdf(
        mean / sd
    )
    slope, curvature = (
        2.0 * stats.norm.cdf(mean / sd) - 1.0,
        2.0 * stats.norm.pdf(mean / sd) / sd,
    )
    value = np.sum(size) / 0.6 + N * np.log(1.2)
    np.testing.assert_allclose(
        (found.expected, found.objective), (value, ALPHA * value), rtol=1e-10
    )
    np.testing.assert_allclose(found.grad_loc, ALPHA * X.T @ slope / 0.6, rtol=1e-7)
    rows = found.grad_var
    expected = 0.5 * ALPHA * (X.T * curvature) @ X / 0.6
    np.testing.assert_allclose((rows.x.T * rows.weights) @ rows.x, expected, rtol=1e-7)


def shifted(x, y):
    numpyro.sample("y", dist.Laplace(2.0 * predictor(x), 0.6), obs=y)


def quantile(x, y):
    numpyro.sample("y", dist.AsymmetricLaplaceQuantile(predictor(x), 0.6, 0.3), obs=y)


def mixed(x, y):
    wide_and_narrow = dist.Laplace(predictor(x)[:, None], jnp.array([0.3, 2.0]))
    numpyro.sample(
        "y",
        dist.MixtureSameFamily(
            dist.Categorical(jnp.array([0.8, 0.2])), wide_and_narrow
        ),
        obs=y,
    )


def logarithmic(x, y):
    laplace = dist.Laplace(predictor(x), 0.6)
    numpyro.sample(
        "y",
        dist.TransformedDistribution(laplace, dist.transforms.ExpTransform()),
        obs=jnp.exp(y),
    )


@pytest.mark.full
def test_quantile_regression_is_exact(x64):
    q = gaussian([1.0, -0.5], 0.01 * np.eye(2), diagonal=False)
    f = objective(quantile, q, X, Y, beta=2)
    assert f.exact
    mean, sd = X @ np.array([1.0, -0.5]) - Y, 0.1 * np.sqrt(np.sum(X**2, axis=1))
    # The pinball loss of level .3, divided by the scale: E[loss] by scipy.
    below = mean * stats.norm.cdf(mean / sd) + sd * stats.norm.pdf(mean / sd)
    loss = (below - 0.3 * mean) / 0.6 - np.log(0.3 * 0.7 / 0.6)
    prior = 0.5 * (1.25 + 0.02) / 4.0 + np.log(8.0 * np.pi)
    assert float(f(q).value) == pytest.approx(ALPHA * np.sum(loss) + prior, rel=1e-9)


@pytest.mark.parametrize("model", tiered([mixed, logarithmic], unit=[mixed]))
def test_what_is_made_of_a_density_with_a_kink_is_not_exact(model, x64):
    q = gaussian([1.0, -0.5], 0.01 * np.eye(2), diagonal=False)
    assert not objective(model, q, X, Y, beta=2).exact
    with pytest.raises(ValueError, match=r"kink.*it as it is"):
        nt.fit_gaussian(KEY, model, AutoNormal, X, Y)


def offset(x, y):
    eta = predictor(x)
    numpyro.sample(
        "y",
        dist.Laplace(eta + numpyro.sample("delta", dist.Normal(0.0, 1.0)), 0.6),
        obs=y,
    )


def test_a_kink_that_is_not_at_the_predictor_is_not_called_exact(x64):
    q = gaussian([1.0, -0.5], 0.01 * np.eye(2), diagonal=False)
    f = objective(shifted, q, X, Y, beta=2)
    assert not f.exact
    assert f.precision is None
    q = gaussian([1.0, -0.5, 0.0], 0.01 * np.eye(3), diagonal=False)
    assert not objective(offset, q, X, Y, beta=2, delta=1).exact
    # Where it is at the predictor, Hessians at the nodes would lack the kink altogether.
    q = gaussian([1.0, -0.5], 0.01 * np.eye(2), diagonal=False)
    f = objective(median, q, X, Y, beta=2)
    assert f.exact
    # Convex, so that the gap of a fit has a bound.
    assert f.precision is not None


def scalars(every):
    """Priors of scalars in shapes that models give them."""
    numpyro.sample(
        "half", dist.HalfNormal(jnp.array([[1.0], [3.0]])).expand([2, 3]).to_event(1)
    )
    numpyro.sample("bounded", dist.Uniform(-1.0, 4.0))
    if every:
        numpyro.sample("cauchy", dist.HalfCauchy(2.0))
        with numpyro.plate("two", 2):
            numpyro.sample("gamma", dist.Gamma(2.0, jnp.array([1.0, 4.0])))
        numpyro.sample("beta", dist.Beta(2.0, 3.0))
        numpyro.sample("t", dist.StudentT(3.0, 1.0, 2.0))
        numpyro.sample("cut", dist.TruncatedNormal(0.5, 1.0, low=0.0))
    numpyro.sample("rate", dist.Exponential(2.0).mask(jnp.array(True)))
    numpyro.sample("simplex", dist.Dirichlet(jnp.ones(3)))
    scale = numpyro.sample("scale", dist.InverseGamma(3.0, 1.0))
    numpyro.sample("below", dist.HalfNormal(scale))
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.3)


def on_exp(density):
    return lambda u: density(np.exp(u)) + u


def on_interval(density, low=0.0, high=1.0):
    return lambda u: (
        density(low + (high - low) * special.expit(u))
        + np.log(high - low)
        + logistic_jacobian(u)
    )


def logistic_jacobian(u):
    return special.log_expit(u) + special.log_expit(-u)


# The log-density of each coordinate on the unconstrained scale, by scipy.
SCALARS = {
    "half": [
        on_exp(stats.halfnorm(scale=s).logpdf) for s in (1.0, 1.0, 1.0, 3.0, 3.0, 3.0)
    ],
    "cauchy": [on_exp(stats.halfcauchy(scale=2.0).logpdf)],
    "gamma": [on_exp(stats.gamma(2.0, scale=1.0 / rate).logpdf) for rate in (1.0, 4.0)],
    "beta": [on_interval(stats.beta(2.0, 3.0).logpdf)],
    "bounded": [on_interval(stats.uniform(-1.0, 5.0).logpdf, -1.0, 4.0)],
    "t": [stats.t(3.0, loc=1.0, scale=2.0).logpdf],
    "cut": [on_exp(stats.truncnorm(-0.5, np.inf, loc=0.5, scale=1.0).logpdf)],
    "scale": [on_exp(stats.invgamma(3.0, scale=1.0).logpdf)],
}
SHAPES = {
    "half": (2, 3),
    "cauchy": (),
    "gamma": (2,),
    "beta": (),
    "bounded": (),
    "t": (),
    "cut": (),
    "scale": (),
}
OTHERS = {"rate": (), "simplex": (2,), "below": ()}


@pytest.mark.full
@pytest.mark.parametrize("every", [False, True])
def test_priors_of_scalars_are_integrated_one_by_one(every, x64):
    names = [name for name in SHAPES if every or name in ("half", "bounded", "scale")]
    shapes = {name: SHAPES[name] for name in names} | OTHERS
    sizes = [int(np.prod(shape)) for shape in shapes.values()]

    def unpack(flat):
        parts = zip(shapes.items(), jnp.split(flat, np.cumsum(sizes)[:-1]), strict=True)
        return {name: part.reshape(shape) for (name, shape), part in parts}

    d = sum(sizes)
    loc, scale = RNG.normal(size=d), RNG.uniform(0.2, 0.8, size=d)
    q = MeanField(jnp.asarray(loc), jnp.asarray(scale))
    priors = closed_priors(
        scalars, Latents(tuple(shapes), unpack), q, (every,), {}, by_draws=True
    )
    # A mask, a constraint of several coordinates and a latent scale are left to draws.
    assert priors.names == frozenset(names)
    _, found = jax.jit(priors.derivatives)(q)
    log_densities = [density for name in names for density in SCALARS[name]]
    nodes, weights = special.roots_legendre(400)
    z, weights = 9.0 * nodes, 9.0 * weights * stats.norm.pdf(9.0 * nodes)
    total = 0.0
    for j, density in enumerate(log_densities):
        f = weights * -density(loc[j] + scale[j] * z)
        total += np.sum(f)
        assert float(found.grad[j]) == pytest.approx(np.sum(f * z) / scale[j], abs=1e-6)
        assert float(found.hessian[j]) == pytest.approx(
            np.sum(f * (z**2 - 1.0)) / scale[j] ** 2, abs=1e-5
        )
    assert float(found.value) == pytest.approx(total, rel=1e-8)
    np.testing.assert_array_equal(found.grad[len(log_densities) :], 0.0)


def rows_that_share(x, y):
    sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 1.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    eta = numpyro.deterministic("eta", x @ w)
    numpyro.sample("y", dist.Normal(eta[:, 0], jnp.exp(eta[:, 1]) + sigma), obs=y)


def test_what_cannot_share_latents_is_refused_before_a_fit(x64):
    for model, expectation in (
        (
            rows_that_share,
            nt.expectations.gauss_hermite(predictor="eta", num_outputs=2),
        ),
        (linear, nt.expectations.monte_carlo(predictor="eta")),
    ):
        with pytest.raises(
            ValueError, match=r"other than through predictor 'eta'.*Use monte_carlo\(\)"
        ):
            nt.fit_gaussian(KEY, model, AutoNormal, X, Y, expectation=expectation)


def half_named(x, y):
    """Its predictor leaves most of what the data depend on out."""
    eta = predictor(x)
    effects = numpyro.sample("effects", dist.Normal(0.0, 1.0).expand([30]).to_event(1))
    numpyro.sample("y", dist.Normal(eta + effects, 1.0), obs=y)


def test_a_predictor_that_leaves_many_latents_out_is_refused():
    with pytest.raises(
        ValueError,
        match=r"30 coordinates of the sites \['effects'\] besides predictor 'eta'",
    ):
        nt.fit_gaussian(KEY, half_named, AutoNormal, X, Y, expectation=ETA)


def test_draws_of_a_likelihood_with_a_kink_are_refused_whoever_draws():
    for expectation in (None, nt.expectations.monte_carlo()):
        with pytest.raises(ValueError, match=r"kink.*it as it is"):
            nt.fit_gaussian(KEY, median, AutoNormal, X, Y, expectation=expectation)
