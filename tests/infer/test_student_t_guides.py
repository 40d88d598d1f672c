"""The guides with the tails of Student's t."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.infer import NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.reparam import NeuTraReparam
from scipy import integrate, stats

import numpyro_tempered as nt
from numpyro_tempered.infer.antithetic import mirror
from numpyro_tempered.infer.guides.heavy_tails import (
    MultivariateStudentT,
    StudentT,
    icdf,
)

KEY = jax.random.key(0)
# On both sides of where the forms change: 24 in densities, and in quantiles 100 or, in double precision, 1000.
DFS = np.array([2.1, 3.0, 7.0, 23.9, 24.1, 110.0, 300.0, 1010.0, 1e4, 1e7])
Diagonal, Full = nt.guides.AutoDiagonalStudentT, nt.guides.AutoMultivariateStudentT


def learned(guide):
    return lambda model: guide(model, df=None)


def pair(y=None):
    """A real vector and a positive number."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.LogNormal(0.0, 0.3))
    numpyro.sample("y", dist.Normal(w.sum(), s), obs=y)


def set_up(guide):
    params = handlers.trace(handlers.seed(guide, KEY)).get_trace(0.5)
    return {
        name: site["value"] for name, site in params.items() if site["type"] == "param"
    }


# Regression whose noise has a gamma prior on its precision, which is integrated: the posterior of the
# coefficients is a Student's t.
A0, B0, V0 = 1.0, 1.5, np.array([9.0, 1.0])


def regression_data(num_rows):
    rng = np.random.default_rng(0)
    x = np.column_stack(
        [
            np.ones(num_rows),
            10.0 * np.arange(num_rows) + 3.0 * rng.normal(size=num_rows),
        ]
    )
    return x, 2.0 + 0.3 * x[:, 1] + rng.normal(size=num_rows)


def regression(x, y):
    root = jnp.diag(jnp.sqrt(jnp.asarray(B0 / A0 * V0)))
    beta = numpyro.sample("beta", dist.MultivariateStudentT(2 * A0, jnp.zeros(2), root))
    # Given the coefficients, the precision of the noise has a gamma distribution with these parameters.
    a, b = A0 + 1.0, B0 + 0.5 * jnp.sum(beta**2 / jnp.asarray(V0))
    y_loc, y_root = jnp.asarray(x) @ beta, jnp.sqrt(b / a) * jnp.eye(len(y))
    numpyro.sample(
        "y", dist.MultivariateStudentT(2 * a, y_loc, y_root), obs=jnp.asarray(y)
    )


def regression_posterior(x, y):
    """Degrees of freedom, location and scale matrix of the coefficients, and the log evidence."""
    precision = np.diag(1.0 / V0) + x.T @ x
    loc = np.linalg.solve(precision, x.T @ y)
    a, b = A0 + len(y) / 2, B0 + 0.5 * (y @ y - loc @ precision @ loc)
    of_y = B0 / A0 * (np.eye(len(y)) + x @ np.diag(V0) @ x.T)
    evidence = stats.multivariate_t(np.zeros(len(y)), of_y, df=2 * A0).logpdf(y)
    return 2 * a, loc, b / a * np.linalg.inv(precision), evidence


def multivariate_kl(q, p, num_draws=200_000):
    """KL(q, p) of two multivariate t of SciPy, by draws, and its standard error."""
    x = q.rvs(num_draws, random_state=0)
    ratios = q.logpdf(x) - p.logpdf(x)
    return ratios.mean(), ratios.std() / np.sqrt(num_draws)


def univariate_kl(q, p):
    """KL(q, p) of two distributions of SciPy near 0, by quadrature."""

    def integrand(x):
        return q.pdf(x) * (q.logpdf(x) - p.logpdf(x))

    return sum(
        integrate.quad(integrand, *ends, limit=200)[0]
        for ends in ((-np.inf, 0.0), (0.0, np.inf))
    )


def test_densities_and_quantiles_at_all_degrees_of_freedom():
    x = np.array([0.0, 0.5, 3.0, 30.0], np.float32)
    levels = np.array([0.0, 1e-4, 0.1, 0.5, 0.75, 1.0, -0.1, 1.1], np.float32)
    both = jax.jit(lambda df: (StudentT(df, 0.5, 2.0).log_prob(x), icdf(df, levels)))
    log_density, found = both(DFS[:, None].astype(np.float32))
    np.testing.assert_allclose(
        log_density, stats.t(DFS[:, None], 0.5, 2.0).logpdf(x), rtol=2e-6, atol=2e-5
    )
    np.testing.assert_allclose(
        found, stats.t(DFS[:, None]).ppf(levels), rtol=3e-5, atol=1e-6
    )
    assert np.isnan(found[:, 6:]).all()


@pytest.mark.parametrize("df", tiered([2.1, 1000.0], unit=[2.1]))
def test_the_multivariate_density_at_many_dimensions(df):
    cov, x = 2.0 * np.eye(60) + 0.5, np.linspace(-3.0, 3.0, 60)
    root = jnp.asarray(np.linalg.cholesky(cov), jnp.float32)
    value = jax.jit(
        lambda x: MultivariateStudentT(df, jnp.zeros(60), root).log_prob(x)
    )(x.astype(np.float32))
    np.testing.assert_allclose(
        value,
        stats.multivariate_t(np.zeros(60), cov, df).logpdf(x),
        rtol=1e-6,
        atol=5e-5,
    )


def test_densities_to_double_precision(x64):
    x, levels = np.array([0.0, 0.5, 3.0, 30.0]), np.array([1e-12, 1e-4, 0.1, 0.75])
    np.testing.assert_allclose(
        StudentT(DFS[:, None]).log_prob(x), stats.t(DFS[:, None]).logpdf(x), rtol=1e-9
    )
    np.testing.assert_allclose(
        icdf(DFS[:, None], levels), stats.t(DFS[:, None]).ppf(levels), rtol=1e-8
    )


def test_draws_are_those_of_scipys_distribution():
    draws = jax.jit(lambda df: StudentT(df, 1.0, 2.0).sample(KEY, (5000,)))
    for df in (1.5, 30.0):
        assert (
            stats.kstest(np.asarray(draws(df)), stats.t(df, 1.0, 2.0).cdf).pvalue > 1e-3
        )


@pytest.mark.full
@pytest.mark.parametrize("df", [2.1, 7.0, 1000.0])
@pytest.mark.parametrize("joint", [False, True])
def test_draws_and_their_derivatives_in_the_degrees_of_freedom(df, joint, x64):
    def draw(df):
        if joint:
            return MultivariateStudentT(df, jnp.zeros(1), jnp.eye(1)).sample(
                KEY, (400_000,)
            )[:, 0]
        return StudentT(df, 0.0, 1.0).sample(KEY, (400_000,))

    def mean_log(df):
        def integrand(x):
            return 2.0 * np.log1p(x * x) * stats.t.pdf(x, df)

        return integrate.quad(integrand, 0.0, np.inf, limit=500, epsabs=1e-13)[0]

    assert stats.kstest(np.asarray(draw(df))[:20_000], stats.t(df).cdf).pvalue > 1e-3
    slopes = jax.jit(jax.jacfwd(lambda df: jnp.log1p(draw(df) ** 2)))(df)
    expected = (mean_log(df * 1.0001) - mean_log(df / 1.0001)) / (
        df * 1.0001 - df / 1.0001
    )
    assert abs(slopes.mean() - expected) < 5.0 * slopes.std() / np.sqrt(
        slopes.size
    ) + 1e-4 * abs(expected)


@pytest.mark.parametrize(
    "fn",
    [
        StudentT(1.0, jnp.arange(3.0), 2.0),
        # Of NumPyro, whose mean is infinite at one degree of freedom.
        dist.StudentT(1.0, jnp.arange(3.0), 2.0).to_event(1).mask(True),
        MultivariateStudentT(1.0, jnp.arange(3.0), jnp.eye(3)),
        dist.Normal(0.0, 1.0).expand([3]),
        dist.TransformedDistribution(
            dist.StudentT(1.0).expand([3]), dist.transforms.AffineTransform(5.0, -2.0)
        ),
    ],
)
def test_antithetic_draws_mirror_each_other_about_the_centre(fn):
    def guide():
        numpyro.sample("z", fn)

    one, two = (
        handlers.trace(mirror(handlers.seed(guide, KEY), sign)).get_trace()["z"][
            "value"
        ]
        for sign in (1, -1)
    )
    base = getattr(fn, "base_dist", fn)
    centre = (
        5.0
        if isinstance(fn, dist.TransformedDistribution)
        else getattr(base, "loc", jnp.arange(3.0))
    )
    np.testing.assert_allclose(0.5 * (one + two), np.broadcast_to(centre, 3), atol=2e-5)
    assert np.all(np.abs(np.asarray(one - two)) > 0)


def test_truncated_draws_have_no_mirror_image():
    def guide():
        numpyro.sample(
            "z", dist.LeftTruncatedDistribution(dist.Normal(0.0, 1.0), low=0.5)
        )

    for sign in (1, -1):
        assert (
            handlers.trace(mirror(handlers.seed(guide, KEY), sign)).get_trace()["z"][
                "value"
            ]
            >= 0.5
        )


@pytest.mark.parametrize("guide", [Diagonal, Full])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"df": 0.0},
            ValueError,
            r"df must be in \(2, inf\), got 0.0. At 2 and below.*t has no variance",
        ),
        (
            {"df": 2.0},
            ValueError,
            r"df must be in \(2, inf\), got 2.0.*t has no variance",
        ),
        ({"df": float("nan")}, ValueError, r"df must be.*t has no variance"),
        ({"df": float("inf")}, ValueError, r"df must be.*t has no variance"),
        ({"df": [3.0, 4.0]}, ValueError, r"df must be one number.*t has no variance"),
        ({"df": "7"}, TypeError, r"df must be.*t has no variance"),
        (
            {"init_scale": -1.0},
            ValueError,
            "init_scale must be positive and finite, got -1.0",
        ),
    ],
)
def test_bad_options_raise(guide, options, error, message):
    with pytest.raises(error, match=message):
        guide(pair, **options)


def test_models_that_have_no_such_guide():
    def none(y):
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    def discrete(y):
        k = numpyro.sample("k", dist.Poisson(2.0))
        numpyro.sample("y", dist.Normal(1.0 * k, 1.0), obs=y)

    with pytest.raises(
        RuntimeError, match=r"AutoDiagonalStudentT found no latent variables"
    ):
        set_up(Diagonal(none))
    with pytest.raises(
        RuntimeError, match=r"^This algorithm might only.*site k does not"
    ):
        set_up(Full(discrete))


@pytest.mark.full
@pytest.mark.parametrize(
    ("guide", "options"), [(Diagonal, {"df": 3.0}), (Full, {}), (Full, {"df": None})]
)
def test_a_guide_has_all_that_continuous_guides_have(guide, options):
    guide = guide(pair, **options)
    params = set_up(guide)
    df = params.get("auto_df", guide.df)
    loc, scale = params["auto_loc"], 0.1
    # In order of the flat vector, whichever it is.
    posterior, base = guide.get_posterior(params), guide.get_base_dist(params)
    through = dist.TransformedDistribution(base, guide.get_transform(params))
    z = loc + jnp.array([0.1, -0.3, 0.2])
    log_density = np.sum(np.asarray(posterior.log_prob(z)))
    np.testing.assert_allclose(log_density, np.asarray(through.log_prob(z)), rtol=1e-5)
    oracle = (
        stats.t(df, loc, scale).logpdf(z).sum()
        if isinstance(guide, Diagonal)
        else stats.multivariate_t(loc, scale**2 * np.eye(3), df).logpdf(z)
    )
    np.testing.assert_allclose(log_density, oracle, rtol=1e-5)
    medians, quantiles = guide.median(params), guide.quantiles(params, [0.1, 0.5, 0.9])
    assert {name: value.shape for name, value in quantiles.items()} == {
        "w": (3, 2),
        "s": (3,),
    }
    for name, value in medians.items():
        np.testing.assert_allclose(quantiles[name][1], value, rtol=1e-6)
    np.testing.assert_allclose(
        quantiles["w"][2] - medians["w"], scale * stats.t(df).ppf(0.9), rtol=1e-4
    )
    np.testing.assert_allclose(
        quantiles["s"][0],
        medians["s"] * np.exp(scale * stats.t(df).ppf(0.1)),
        rtol=1e-4,
    )
    draws = guide.sample_posterior(KEY, params, sample_shape=(5, 4))
    assert {name: value.shape for name, value in draws.items()} == {
        "w": (5, 4, 2),
        "s": (5, 4),
    }


def test_quantiles_of_correlated_coordinates_are_those_of_their_marginals():
    def plane(y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y)

    guide, levels = Full(plane, df=4.0), np.array([0.05, 0.5, 0.9])
    set_up(guide)
    loc, root = np.array([1.0, -3.0]), np.array([[0.5, 0.0], [2.0, 0.3]])
    found = guide.quantiles(
        {"auto_loc": jnp.asarray(loc), "auto_scale_tril": jnp.asarray(root)}, levels
    )
    marginals = stats.t(4.0, loc, np.sqrt(np.diag(root @ root.T)))
    np.testing.assert_allclose(found["w"], marginals.ppf(levels[:, None]), rtol=1e-5)


def test_learned_degrees_of_freedom_have_no_base_without_params():
    guide = Diagonal(pair, df=None)
    set_up(guide)
    with pytest.raises(
        ValueError,
        match=r"^the degrees.*get_base_dist\(params\).*as NeuTraReparam asks for",
    ):
        guide.get_base_dist()


@pytest.mark.full
@pytest.mark.parametrize("df", [6.0, None])
def test_the_optimum_on_a_student_t_posterior_is_that_posterior(df):
    x, y = regression_data(4)
    true_df, loc, scale, evidence = regression_posterior(x, y)
    assert true_df == 6.0
    fit = nt.fit_svi(
        KEY, regression, lambda model: Full(model, df=df), x, y, num_particles=4000
    )
    assert fit.converged
    assert fit.convergence.starts_at_mode
    params = {name: np.asarray(value, np.float64) for name, value in fit.params.items()}
    tril = params["auto_scale_tril"]
    q = stats.multivariate_t(
        params["auto_loc"], tril @ tril.T, params.get("auto_df", df)
    )
    kl, error = multivariate_kl(q, stats.multivariate_t(loc, scale, true_df))
    # The gap that the fit says it has, in nats.
    assert kl < fit.convergence.gap + 4.0 * error < 0.02
    assert abs(fit.elbo.value - (evidence - kl)) < 5.0 * np.hypot(fit.elbo.se, error)
    np.testing.assert_allclose(
        params["auto_loc"], loc, atol=0.02 * np.sqrt(np.diag(scale)).max()
    )
    np.testing.assert_allclose(tril @ tril.T / scale, 1.0, atol=0.15)
    if df is None:
        assert 4.5 < params["auto_df"] < 8.0


@pytest.mark.full
def test_the_diagonal_guide_learns_the_tails_of_each_coordinate():
    dfs, loc, scale = (
        np.array([3.0, 200.0]),
        np.array([-100.0, 1e-3]),
        np.array([20.0, 1e-4]),
    )

    def model():
        numpyro.sample(
            "z",
            dist.StudentT(*(jnp.asarray(part) for part in (dfs, loc, scale))).to_event(
                1
            ),
        )
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.0)

    fit = nt.fit_svi(KEY, model, learned(Diagonal))
    assert fit.converged
    # In units of the posterior, by quadrature.
    fitted_df, fitted_loc, fitted_scale = (
        np.asarray(fit.params[f"auto_{name}"], np.float64)
        for name in ("df", "loc", "scale")
    )
    kl = [
        univariate_kl(stats.t(*q), stats.t(p))
        for *q, p in zip(
            fitted_df,
            (fitted_loc - loc) / scale,
            fitted_scale / scale,
            dfs,
            strict=True,
        )
    ]
    assert 0.0 <= sum(kl) < 0.05  # the tolerance of the fit, in nats
    assert abs(fit.elbo.value + sum(kl) - stats.norm.logpdf(0.0)) < 5.0 * fit.elbo.se
    assert fitted_df[0] < 5.0 < 15.0 < fitted_df[1]


@pytest.mark.full
@pytest.mark.parametrize("guide", [Diagonal, Full, learned(Full)])
def test_a_gaussian_posterior_in_raw_units(guide):
    x = np.array([1.0, 2.0, 3.0])

    def model(y):
        w = numpyro.sample("w", dist.Normal(1e4, 1e4))
        with numpyro.plate("n", 3):
            numpyro.sample("y", dist.Normal(w * x, 100.0), obs=y)

    y, alpha = np.array([2.5e4, 4.1e4, 6.2e4]), 0.5
    variance = 1.0 / (1e-8 + alpha * (x @ x) / 1e4)
    mean = variance * (1e-4 + alpha * (x @ y) / 1e4)
    fit = nt.fit_svi(KEY, model, guide, y, alpha=alpha)
    assert fit.converged
    evidence = nt.fit_gaussian(
        KEY, model, AutoMultivariateNormal, y, alpha=alpha
    ).elbo.value
    np.testing.assert_allclose(
        fit.params["auto_loc"][0], mean, atol=0.05 * np.sqrt(variance)
    )
    # The nearest Student's t of 7 degrees of freedom is .023 nats off; learned tails are those of the Gaussian.
    assert -0.06 < fit.elbo.value - evidence < 5.0 * fit.elbo.se
    if "auto_df" in fit.params:
        assert fit.params["auto_df"] > 15.0


@pytest.mark.full
def test_fits_go_through_all_that_takes_one():
    def model(y):
        w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(w.sum(), 1.0), obs=y)

    y = np.linspace(-1.0, 2.0, 12)
    fits = {
        "t": nt.fit_svi(KEY, model, learned(Full), y),
        "product": nt.fit_svi(KEY, model, Diagonal, y, num_restarts=2),
        "Gaussian": nt.fit_svi(KEY, model, AutoMultivariateNormal, y),
    }
    assert list(nt.table(nt.compare(fits)).index)[-1] == "product"
    data = {name: nt.to_inference_data(fit) for name, fit in fits.items()}
    assert data["t"]["posterior"]["w"].shape == (1, 1000, 2)
    elpds = [nt.loo(data[name]) for name in ("t", "Gaussian")]
    one, two = (
        float(each.elpd if hasattr(each, "elpd") else each.elpd_loo) for each in elpds
    )
    assert one == pytest.approx(two, abs=0.3)
    draws = jax.vmap(
        lambda key: fits["t"].guide.sample_posterior(key, fits["t"].params)
    )(jax.random.split(KEY, 3))
    assert draws["w"].shape == (3, 2)
    choice = nt.select_alpha(KEY, model, Diagonal, y, alphas=(0.5, 1.0))
    assert choice.alpha in (0.5, 1.0)


@pytest.mark.full
def test_neutra_takes_a_guide_of_fixed_degrees_of_freedom():
    fit = nt.fit_svi(KEY, pair, Full, 0.5)
    model = NeuTraReparam(fit.guide, fit.params).reparam(pair)
    mcmc = numpyro.infer.MCMC(
        NUTS(model), num_warmup=20, num_samples=20, progress_bar=False
    )
    mcmc.run(KEY, 0.5)
    assert mcmc.get_samples()["w"].shape == (20, 2)


@pytest.mark.full
def test_an_online_run_starts_at_the_moments_of_a_fit():
    fit = nt.fit_svi(KEY, pair, lambda model: Full(model, df=4.0), 0.5)
    online = nt.OnlineVI(pair, nt.guides.AutoOnlineMultivariateNormal(pair))
    with pytest.warns(UserWarning, match="not Normal on the unconstrained scale"):
        prior = online.init(KEY, 0.5, prior=fit).posterior
    np.testing.assert_allclose(prior.loc, fit.params["auto_loc"], rtol=1e-5)
    # At 4 degrees of freedom the covariance is twice the square of the scale.
    covariance, tril = (
        prior.scale_tril @ prior.scale_tril.T,
        fit.params["auto_scale_tril"],
    )
    np.testing.assert_allclose(covariance, 2.0 * tril @ tril.T, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_what_is_for_gaussians_refuses():
    fit = nt.fit_svi(KEY, pair, Diagonal, 0.5)
    with pytest.raises(
        TypeError,
        match=r"fit_gaussian fits Gaussians, and AutoMultivariateStudentT is a Student's t",
    ):
        nt.fit_gaussian(KEY, pair, Full, 0.5)
    with pytest.raises(
        TypeError,
        match="linear_response takes a fit by AutoNormal or AutoDiagonalNormal",
    ):
        nt.linear_response(KEY, fit)
    with pytest.raises(TypeError, match="AutoDiagonalStudentT"):
        nt.OnlineVI(pair, Diagonal(pair)).init(KEY, 0.5)
