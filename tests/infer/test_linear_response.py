"""Linear response: closed forms, finite differences of tilted optima, NUTS, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import enable_x64
from numpyro.infer.autoguide import (
    AutoBNAFNormal,
    AutoDelta,
    AutoDiagonalNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from scipy.optimize import root
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale

import numpyro_tempered as nt

KEY = jax.random.key(0)
ETA = nt.expectations.gauss_hermite(predictor="eta")
# Columns with correlations of about .9, and two sites whose order in a flat vector is not that of the model.
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 1)) + 0.3 * RNG.normal(size=(40, 3))
Y = X @ np.array([1.0, -0.5, 2.0]) + RNG.normal(size=40)
GUIDES = {
    "AutoNormal": AutoNormal,
    "AutoDiagonalNormal": AutoDiagonalNormal,
    "AutoOnlineDiagonalNormal": nt.guides.AutoOnlineDiagonalNormal,
}


def linear(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0.0, 2.0))
    numpyro.sample(
        "y",
        dist.Normal(numpyro.deterministic("eta", x[:, :2] @ w + x[:, 2] * b), 1.5),
        obs=y,
    )


def exact_covariance(alpha):
    """Of (w, b): the inverse of the tempered posterior's precision."""
    return np.linalg.inv(
        alpha * X.T @ X / 1.5**2 + np.diag([3.0**-2, 3.0**-2, 2.0**-2])
    )


def covariance(fit, *names):
    """The covariance of a fit on the unconstrained scale, in the order of these sites."""
    posterior = fit.guide.get_posterior(fit.params)
    places = fit.guide._unpack_latent(np.arange(fit.guide.latent_dim))
    order = np.concatenate([np.ravel(places[name]) for name in names])
    return np.asarray(posterior.covariance_matrix, float)[np.ix_(order, order)]


def sds(fit, *names):
    return np.sqrt(np.diag(covariance(fit, *names)))


@pytest.fixture(scope="module")
def mean_field():
    return nt.fit_gaussian(KEY, linear, AutoNormal, X, Y, alpha=0.5, expectation=ETA)


@pytest.fixture(scope="module")
def response(mean_field):
    return nt.linear_response(KEY, mean_field, expectation=ETA)


def test_of_a_gaussian_posterior_it_is_the_covariance_in_single_precision(
    mean_field, response
):
    # Rounding of 1e-7 in the Hessian, times its condition number of about 60.
    np.testing.assert_allclose(
        covariance(response, "w", "b"), exact_covariance(0.5), rtol=1e-5
    )
    assert np.all(mean_field.params["w_auto_scale"] < 0.6 * sds(response, "w"))


def test_the_result_is_a_fit_of_the_same_means(mean_field, response):
    medians = response.guide.median(response.params)
    for name, value in mean_field.guide.median(mean_field.params).items():
        np.testing.assert_allclose(medians[name], value, rtol=1e-6)
    assert response.model is mean_field.model
    assert response.alpha == 0.5
    assert response.converged is True
    # The ELBO of the exact posterior is the log evidence: that of the mean field is below it.
    evidence = -0.5 * (
        0.5 * len(Y) * np.log(2 * np.pi * 1.5**2)
        + 0.5 * Y @ Y / 1.5**2
        + np.log(np.prod([9.0, 9.0, 4.0]))
        - np.linalg.slogdet(exact_covariance(0.5))[1]
        - (v := 0.5 * X.T @ Y / 1.5**2) @ exact_covariance(0.5) @ v
    )
    assert response.elbo.se == 0.0
    np.testing.assert_allclose(response.elbo.value, evidence, atol=1e-4)
    assert mean_field.elbo.value < evidence - 1.0


def test_it_has_the_names_of_the_fit(mean_field):
    named = mean_field._replace(
        columns={"x": ("a", "b", "c")}, coords={"row": np.arange(40)}
    )
    response = nt.linear_response(KEY, named)
    assert response.columns == named.columns
    assert response.coords == named.coords


def test_a_choice_of_alpha_and_a_stream_have_it_too(mean_field, response):
    choice = nt.alpha.AlphaChoice(0.5, mean_field, data=None, advice="")
    found = nt.linear_response(KEY, choice, expectation=ETA)
    np.testing.assert_array_equal(sds(found, "w", "b"), sds(response, "w", "b"))
    online = nt.OnlineVI(mean, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())
    state = online.init(KEY, Y)
    state, _ = online.update(state, Y)
    stream = nt.linear_response(KEY, online.posterior(state), Y)
    assert stream.sd["mu"] == pytest.approx((len(Y) + 1.0) ** -0.5, rel=1e-4)


def mean(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def test_the_evidence_of_the_response(mean_field, response):
    evidence = response.convergence
    assert isinstance(evidence, nt.results.LinearResponse)
    assert 0.0 <= evidence.gap < 1e-3
    scales = np.append(
        mean_field.params["w_auto_scale"], mean_field.params["b_auto_scale"]
    )
    ratios = sds(response, "w", "b") / scales
    np.testing.assert_allclose(evidence.ratios, (ratios.min(), ratios.max()), rtol=1e-5)


@pytest.mark.full
def test_it_enters_the_reports(mean_field, response):
    data = nt.to_inference_data(response)
    assert data.attrs["algorithm"] == "linear_response"
    assert data.attrs["guide"] == "AutoMultivariateNormal"
    table = nt.table(nt.compare({"mean field": mean_field, "response": response}))
    assert table.index[0] == "response"


@pytest.mark.full
@pytest.mark.parametrize("expectation", [None, ETA], ids=["draws", "quadrature"])
@pytest.mark.parametrize(
    ("alpha", "fitted_by"),
    [(0.25, "fit_gaussian"), (0.5, "fit_svi"), (1.0, "fit_gaussian"), (1.0, "fit_svi")],
)
def test_of_a_gaussian_posterior_it_is_the_covariance(
    alpha, fitted_by, expectation, x64
):
    guide = AutoNormal if alpha == 0.5 else AutoDiagonalNormal
    fit = getattr(nt, fitted_by)(KEY, linear, guide, X, Y, alpha=alpha)
    # Draws cancel, however few.
    response = nt.linear_response(KEY, fit, expectation=expectation, num_draws=4)
    np.testing.assert_allclose(
        covariance(response, "w", "b"), exact_covariance(alpha), rtol=1e-10
    )


@pytest.mark.full
@pytest.mark.parametrize("name", GUIDES)
def test_every_mean_field_guide_has_the_same_response(name):
    fit = nt.fit_gaussian(KEY, linear, GUIDES[name], X, Y)
    response = nt.linear_response(KEY, fit)
    np.testing.assert_allclose(
        covariance(response, "w", "b"), exact_covariance(1.0), rtol=1e-4
    )


# Regression with a latent scale: the mean-field objective has a closed form, and no Gaussian is the posterior.

TAU, ALPHA = 2.0, 0.5


def with_scale(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(TAU))
    numpyro.sample("y", dist.Normal(numpyro.deterministic("eta", x @ w), s), obs=y)


def tilted_means(tilt, start):
    """Means of the mean-field optimum of the target times exp(tilt · (w, log s)), from the printed formula."""
    small_x, small_y = X[:8], Y[:8]

    def objective(z):
        m, u, sd, v = z[:3], z[3], np.exp(z[4:7]), np.exp(z[7])
        squares = np.sum((small_y - small_x @ m) ** 2) + np.sum(
            np.square(small_x) @ sd**2
        )
        loss = len(small_y) * u + 0.5 * np.exp(-2 * u + 2 * v**2) * squares
        prior = (
            np.sum(m**2 + sd**2) / (2 * 3.0**2)
            + np.exp(2 * u + 2 * v**2) / (2 * TAU**2)
            - u
        )
        return ALPHA * loss + prior - np.sum(z[4:]) - tilt @ z[:4]

    def gradient(z):
        steps = 1e-40j * np.eye(8)
        return np.array([objective(z + step).imag / 1e-40 for step in steps])

    solution = root(gradient, start, tol=1e-13)
    assert np.abs(gradient(solution.x)).max() < 1e-9
    return solution.x


@pytest.fixture(scope="module")
def tilted():
    start = np.append(np.zeros(4), np.full(4, -1.0))
    optimum = tilted_means(np.zeros(4), start)
    columns = []
    for j in range(4):
        tilt = 1e-3 * np.exp(-optimum[4 + j]) * np.eye(4)[j]
        ends = [tilted_means(sign * tilt, optimum)[:4] for sign in (1, -1)]
        columns.append((ends[0] - ends[1]) / (2 * tilt[j]))
    return optimum, np.array(columns).T


@pytest.fixture(scope="module")
def scale_fit():
    with enable_x64():
        return nt.fit_gaussian(
            KEY,
            with_scale,
            AutoNormal,
            X[:8],
            Y[:8],
            alpha=ALPHA,
            expectation=ETA,
            tolerance=1e-14,
        )


@pytest.mark.full
def test_it_is_the_derivative_of_the_means_under_a_tilt(tilted, scale_fit, x64):
    optimum, derivative = tilted
    np.testing.assert_allclose(derivative, derivative.T, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(scale_fit.params["w_auto_loc"], optimum[:3], atol=1e-5)
    response = nt.linear_response(KEY, scale_fit, expectation=ETA)
    # The scale responds beyond its standard deviation, as the posterior is no Gaussian.
    assert sds(response, "s") > 1.05 * scale_fit.params["s_auto_scale"]
    np.testing.assert_allclose(
        covariance(response, "w", "s"), derivative, rtol=1e-4, atol=1e-5
    )


@pytest.mark.full
def test_by_draws_it_is_the_same_within_their_noise(tilted, scale_fit, x64):
    keys = jax.random.split(jax.random.key(1), 8)
    responses = [nt.linear_response(key, scale_fit, num_draws=1024) for key in keys]
    each = np.stack([sds(response, "w", "s") for response in responses])
    error = each.mean(0) - np.sqrt(np.diag(tilted[1]))
    assert np.all(np.abs(error) < 5.0 * each.std(0, ddof=1) / np.sqrt(8))
    assert np.all(each.std(0, ddof=1) < 0.03 * each.mean(0))


@jax.custom_vjp
def reverse_exp(x):
    """The exponential without a rule for forward mode, as solutions of differential equations are."""
    return jnp.exp(x)


reverse_exp.defvjp(
    lambda x: (reverse_exp(x), x), lambda x, slope: (slope * reverse_exp(x),)
)


@pytest.mark.full
def test_functions_without_forward_mode_have_the_same_response():
    def model(y, exp):
        a, b = (
            numpyro.sample("a", dist.Normal(0.0, 1.0)),
            numpyro.sample("b", dist.Normal(0.0, 1.0)),
        )
        numpyro.sample("y", dist.Poisson(exp(a + b)), obs=y)

    counts = jnp.array([3, 1, 4])
    fit = nt.fit_gaussian(KEY, model, AutoNormal, counts, exp=jnp.exp)
    forward = nt.linear_response(KEY, fit)
    reverse = nt.linear_response(KEY, fit._replace(kwargs={"exp": reverse_exp}))
    np.testing.assert_allclose(
        covariance(reverse, "a", "b"), covariance(forward, "a", "b"), rtol=1e-4
    )


# Logistic regression on real data: breast tumours by thirty measurements, standardised.

# Of w and b, by two chains of 15,000 draws of NUTS on the model below in double precision. They differ by at most
# 2.6 %.
NUTS_SDS = [
    *(
        0.897,
        0.551,
        0.903,
        0.906,
        0.619,
        0.796,
        0.83,
        0.829,
        0.515,
        0.676,
        0.784,
        0.502,
        0.795,
        0.929,
        0.465,
    ),
    *(
        0.663,
        0.622,
        0.67,
        0.536,
        0.702,
        0.913,
        0.643,
        0.926,
        0.948,
        0.619,
        0.778,
        0.756,
        0.782,
        0.56,
        0.711,
    ),
    0.445,
]


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0.0, 3.0))
    numpyro.sample(
        "y", dist.Bernoulli(logits=numpyro.deterministic("eta", x @ w + b)), obs=y
    )


@pytest.fixture(scope="module")
def tumours():
    x, y = load_breast_cancer(return_X_y=True)
    return scale(x).astype(np.float32), y


@pytest.fixture(scope="module")
def full(tumours):
    return nt.fit_gaussian(
        KEY, logistic, AutoMultivariateNormal, *tumours, expectation=ETA
    )


@pytest.mark.full
@pytest.mark.parametrize("expectation", [None, ETA], ids=["draws", "quadrature"])
def test_on_real_data_its_sds_are_those_of_nuts_and_of_a_full_covariance(
    expectation, tumours, full
):
    fit = nt.fit_gaussian(KEY, logistic, AutoNormal, *tumours, expectation=ETA)
    response = nt.linear_response(KEY, fit, expectation=expectation)
    scales = np.append(fit.params["w_auto_scale"], fit.params["b_auto_scale"])
    assert np.all(scales < 0.8 * np.array(NUTS_SDS))
    np.testing.assert_allclose(sds(response, "w", "b"), NUTS_SDS, rtol=0.05)
    np.testing.assert_allclose(sds(response, "w", "b"), sds(full, "w", "b"), rtol=0.05)
    # No Gaussian has a greater ELBO than the best.
    assert (
        fit.elbo.value + 10.0
        < response.elbo.value
        < full.elbo.value + 5.0 * response.elbo.se
    )


# What is refused.


def tempered(model, *args, **options):
    """A fit of another model, for what is refused before anything is computed."""
    return {"model": nt.temper(model, alpha=0.5, **options), "args": args}


def with_plate(y, local=False, subsample_size=None, param=False):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    s = numpyro.param("s", 1.0) if param else 1.0
    with numpyro.plate("n", len(y), subsample_size=subsample_size) as rows:
        z = numpyro.sample("z", dist.Normal(mu, 1.0)) if local else mu
        numpyro.sample("y", dist.Normal(z, s), obs=y[rows])


@pytest.mark.parametrize(
    "guide",
    [AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoLaplaceApproximation],
)
def test_a_full_covariance_has_nothing_to_gain(guide, mean_field):
    with pytest.raises(
        TypeError, match=f"a fit by {guide.__name__} has a covariance already"
    ):
        nt.linear_response(KEY, mean_field._replace(guide=guide(mean_field.model)))


@pytest.mark.parametrize(
    "guide", [AutoDelta, AutoBNAFNormal, nt.guides.AutoSpikeAndSlab]
)
def test_guides_that_are_no_gaussian_are_refused(guide, mean_field):
    with pytest.raises(
        TypeError,
        match=rf"takes a fit by AutoNormal .* got {guide.__name__}: fit the model",
    ):
        nt.linear_response(KEY, mean_field._replace(guide=guide(mean_field.model)))


def test_other_arguments_are_refused(mean_field):
    with pytest.raises(TypeError, match=r"^got int, which is no tempered posterior"):
        nt.linear_response(KEY, 1)
    with pytest.raises(TypeError, match=r"rng_key must be a key.*the call is"):
        nt.linear_response(mean_field, KEY)
    with pytest.raises(TypeError, match="expectation must be a Expectation"):
        nt.linear_response(KEY, mean_field, expectation="eta")
    with pytest.raises(ValueError, match="num_draws must be even, got 3"):
        nt.linear_response(KEY, mean_field, num_draws=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            tempered(
                lambda y: with_plate(y, local=True), jnp.ones(4), local_plates=["n"]
            ),
            "'z' is in a local plate.* for fits without local_plates",
        ),
        (
            tempered(lambda y: with_plate(y, subsample_size=2), jnp.ones(4)),
            "subsamples 2 of 4 at each call",
        ),
        (
            tempered(lambda y: with_plate(y, param=True), jnp.ones(4)),
            r"the model has params \['s'\]",
        ),
        (
            {"params": {"w_auto_loc": jnp.zeros(501), "w_auto_scale": jnp.ones(501)}},
            r"^the fit has.*501 latent coordinates, and linear response is for at most 500",
        ),
    ],
    ids=["local plate", "subsample", "params", "many latents"],
)
def test_models_without_a_density_of_few_latents_are_refused(
    changes, message, mean_field
):
    with pytest.raises(ValueError, match=message):
        nt.linear_response(KEY, mean_field._replace(**changes))


def test_a_fit_off_its_optimum_is_refused_with_the_distance(mean_field):
    shift = 3.0 * float(mean_field.params["b_auto_scale"])
    params = {
        **mean_field.params,
        "b_auto_loc": mean_field.params["b_auto_loc"] + shift,
    }
    # The tempered posterior is Gaussian: the distance is ½ shift² times its precision.
    nats = 0.5 * shift**2 * (0.5 * X[:, 2] @ X[:, 2] / 1.5**2 + 2.0**-2)
    with pytest.raises(
        ValueError,
        match=r"^the fit.*nats from the optimum .* Fit again, by fit_gaussian",
    ) as error:
        nt.linear_response(KEY, mean_field._replace(params=params), expectation=ETA)
    np.testing.assert_allclose(float(str(error.value).split()[4]), nats, rtol=0.01)


def square(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 3.0))
    numpyro.sample(
        "y", dist.Normal(numpyro.deterministic("eta", theta) ** 2, 1.0), obs=y
    )


@pytest.mark.full
def test_between_two_modes_it_is_refused_with_the_eigenvalue(mean_field):
    fit = nt.fit_gaussian(KEY, square, AutoNormal, jnp.array(1.0), expectation=ETA)
    params = {"theta_auto_loc": jnp.array(0.0), "theta_auto_scale": jnp.array(0.2)}
    # f = (1 - θ²)² / 2 + θ² / 18 has E[f''] = 6 σ² - 2 + 1/9 at N(0, σ²).
    eigenvalue = 0.2**2 * (6 * 0.2**2 - 2 + 1 / 9)
    with pytest.raises(
        ValueError,
        match=f"smallest eigenvalue is {eigenvalue:.3g} .* a mean of 'theta'.*modes",
    ):
        nt.linear_response(KEY, fit._replace(params=params), expectation=ETA)


@pytest.mark.full
def test_a_hessian_that_is_singular_to_rounding_is_refused():
    dtype = jnp.finfo(jnp.result_type(float))

    def model(x, y):
        w = numpyro.sample(
            "w", dist.Normal(0.0, 0.01 / dtype.eps).expand([2]).to_event(1)
        )
        numpyro.sample(
            "y", dist.Normal(numpyro.deterministic("eta", x @ w), 1.0), obs=y
        )

    x = np.repeat(X[:, :1], 2, axis=1)
    fit = nt.fit_gaussian(KEY, model, AutoNormal, x, Y, expectation=ETA)
    with pytest.raises(
        ValueError,
        match=f"within the rounding of {dtype.dtype.name}: enable jax_enable_x64",
    ):
        nt.linear_response(KEY, fit, expectation=ETA)


@pytest.mark.full
def test_a_linearised_predictor_is_refused():
    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        numpyro.sample(
            "y", dist.Normal(numpyro.deterministic("eta", jnp.tanh(x @ w)), 1.0), obs=y
        )

    fit = nt.fit_svi(KEY, model, AutoNormal, X, Y)
    with pytest.raises(
        ValueError, match="predictor 'eta' is not affine in the latents"
    ):
        nt.linear_response(KEY, fit, expectation=ETA)
    assert nt.linear_response(KEY, fit).convergence.gap < 0.5


@pytest.mark.full
def test_a_response_that_describes_the_posterior_worse_warns():
    def banana(y):
        a = numpyro.sample("a", dist.Normal(2.0, 1.0))
        b = numpyro.sample("b", dist.Normal(0.0, 3.0))
        numpyro.sample("y", dist.Normal(b - a**2, 0.3), obs=y)

    fit = nt.fit_gaussian(KEY, banana, AutoNormal, jnp.array(3.0))
    with pytest.warns(
        UserWarning,
        match="nats below that of the fit: the posterior is far from Gaussian",
    ):
        response = nt.linear_response(KEY, fit)
    assert response.elbo.value < fit.elbo.value - 1.0
