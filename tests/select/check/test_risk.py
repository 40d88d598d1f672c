"""Certificates of the risk of fits: what they are made of, and what has none."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoIAFNormal,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.initialization import init_to_feasible
from scipy.special import expit

import numpyro_tempered as nt

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 2))
Y = (X @ np.array([2.0, -1.0]) + RNG.logistic(size=120) > 0).astype(int)
GAUSSIANS = [
    AutoMultivariateNormal,
    AutoLowRankMultivariateNormal,
    AutoLaplaceApproximation,
]
MEAN, COV = np.array([0.5, -0.5]), np.array([[4.0, 1.0], [1.0, 2.0]])


def logistic(x, y, scale=2.0):
    intercept = numpyro.sample("intercept", dist.Normal(0.3, scale))
    weights = numpyro.sample("weights", dist.MultivariateNormal(MEAN, COV))
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights + intercept), obs=y)


def brier(latents, x, y):
    return (y - jax.nn.sigmoid(x @ latents["weights"] + latents["intercept"])) ** 2


def fit_of(model, guide=AutoNormal, args=(X, Y), kl=2.5, improper=()):
    """A fit where its guide starts: what is certified is any q."""
    tempered = nt.temper(model, alpha=0.5)
    guide = guide(tempered, init_loc_fn=init_to_feasible)
    with handlers.block():
        trace = handlers.trace(handlers.seed(guide, KEY)).get_trace(*args)
    params = {
        name: site["value"] for name, site in trace.items() if site["type"] == "param"
    }
    elbo = nt.results.TemperedELBO(-100.0, 0.1, -50.0, kl, improper)
    return nt.results.TemperedFit(
        tempered, guide, params, 0.5, np.zeros(1), elbo, {"y": args[1]}, args, {}, KEY
    )


@pytest.fixture(scope="module")
def fit():
    return fit_of(logistic)


def expected_kl(loc, cov, prior_loc, prior_cov):
    gap = loc - prior_loc
    trace = np.trace(np.linalg.solve(prior_cov, cov)) + gap @ np.linalg.solve(
        prior_cov, gap
    )
    return 0.5 * (
        trace - len(loc) + np.linalg.slogdet(prior_cov)[1] - np.linalg.slogdet(cov)[1]
    )


def test_the_certificate_is_that_of_its_parts(fit):
    options = {"num_draws": 400, "delta": 0.1, "grid_size": 3, "delta_draws": 0.03}
    certificate = nt.certify_risk(KEY, fit, "y", **options)
    params = {
        name.removesuffix("_auto_loc"): value for name, value in fit.params.items()
    }
    loc = np.concatenate([np.ravel(params["intercept"]), params["weights"]]).astype(
        float
    )
    scales = [fit.params["intercept_auto_scale"], fit.params["weights_auto_scale"]]
    cov = np.diag(np.concatenate([np.ravel(s) for s in scales]).astype(float) ** 2)
    prior = np.zeros((3, 3))
    prior[0, 0], prior[1:, 1:] = 4.0, COV
    np.testing.assert_allclose(
        certificate.kl, expected_kl(loc, cov, np.array([0.3, *MEAN]), prior), rtol=1e-5
    )
    # The draws themselves: an independent sample of q has the same risk to Monte Carlo error.
    draws = np.random.default_rng(1).multivariate_normal(loc, cov, size=4000)
    wrong = (draws[:, :1] + draws[:, 1:] @ X.T > 0) != Y
    se = wrong.mean(axis=1).std() / np.sqrt(400)
    np.testing.assert_allclose(certificate.empirical_risk, wrong.mean(), atol=5 * se)
    again = nt.bounds.pac_bayes(
        certificate.empirical_risk, certificate.kl, 120, **options
    )
    assert certificate.value == again.value > wrong.mean()
    assert not certificate.estimate


@pytest.mark.full
def test_a_loss_is_a_function_of_latents_and_arguments(fit):
    certificate = nt.certify_risk(KEY, fit, brier, num_draws=400)
    draws = fit.guide.sample_posterior(KEY, fit.params, sample_shape=(400,))
    eta = np.asarray(draws["weights"]) @ X.T + np.asarray(draws["intercept"])[:, None]
    np.testing.assert_allclose(
        certificate.empirical_risk, np.mean((Y - expit(eta)) ** 2), rtol=0.05
    )
    wide = nt.certify_risk(
        KEY,
        fit,
        lambda *args: 3.0 * brier(*args) - 1.0,
        lower=-1.0,
        upper=2.0,
        num_draws=400,
    )
    np.testing.assert_allclose(wide.value, 3.0 * certificate.value - 1.0, rtol=1e-5)


@pytest.mark.full
def test_categories_are_classified_by_the_most_probable():
    y = np.digitize(X[:, 0], [-0.5, 0.5])

    def softmax(x, y):
        weights = numpyro.sample(
            "weights", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2)
        )
        with numpyro.plate("n", len(x)):
            numpyro.sample("y", dist.Categorical(logits=x @ weights), obs=y)

    fit = fit_of(softmax, args=(X, y))
    certificate = nt.certify_risk(KEY, fit, "y", num_draws=100)
    draws = fit.guide.sample_posterior(KEY, fit.params, sample_shape=(100,))["weights"]
    wrong = np.argmax(X @ np.asarray(draws, float), axis=-1) != y
    np.testing.assert_allclose(certificate.empirical_risk, wrong.mean(), atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            lambda latents, x, y: 3.0 * brier(latents, x, y),
            r"must lie in \[0, 1\].*too, or clip it",
        ),
        (lambda latents, x, y: brier(latents, x, y) * jnp.nan, "nan"),
        (
            lambda latents, x, y: brier(latents, x, y).mean(),
            r"shape \(n,\).*the data have shapes",
        ),
        (
            lambda latents, x, y: jnp.zeros(7),
            r"^loss must return one.*shape \(n,\).*the data have shapes",
        ),
        (lambda latents, x, y: y * 1j, r"must be real.*numbers, got"),
        ("z", "observed sites"),
    ],
)
def test_losses_that_are_none_are_refused(fit, loss, words):
    with pytest.raises(ValueError, match=words):
        nt.certify_risk(KEY, fit, loss, num_draws=10)


def test_other_results_are_refused(fit):
    with pytest.raises(
        TypeError, match=r"^got TemperedELBO, which is no tempered posterior"
    ):
        nt.certify_risk(KEY, fit.elbo, "y")


def scaled_by_data(x, y):
    weights = numpyro.sample(
        "weights", dist.Normal(0.0, 1.0 / x.std(axis=0)).to_event(1)
    )
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def scaled_by_numpy(x, y):
    weights = numpyro.sample(
        "weights",
        dist.Normal(0.0, float(np.std(np.asarray(x)))).expand([2]).to_event(1),
    )
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def with_param(x, y):
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    weights = numpyro.sample("weights", dist.Normal(0.0, scale).expand([2]).to_event(1))
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def with_effects(x, y):
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("n", len(x)):
        effect = numpyro.sample("effect", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights + effect), obs=y)


def with_flat_prior(x, y):
    weights = numpyro.sample(
        "weights", dist.ImproperUniform(dist.constraints.real_vector, (), (2,))
    )
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def with_scaled_prior(x, y):
    with handlers.scale(scale=0.5):
        weights = numpyro.sample(
            "weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1)
        )
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)


def continuous(x, y):
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(x @ weights, 1.0), obs=y * 1.0)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (scaled_by_data, r"^the prior of.*computed from the data.*set aside for it"),
        (scaled_by_numpy, r"^the prior of.*computed from the data.*set aside for it"),
        (with_param, r"^the model has params .*fitted.*Give them priors"),
        (with_effects, r"a new row has a value of its own.*out of the model"),
        (
            with_scaled_prior,
            r"^the priors of.*have a scale.*sites out of handlers.scale",
        ),
        (with_flat_prior, r"^latent sites.*does not integrate to 1"),
        (continuous, r"finitely many values.*function to the losses"),
    ],
)
def test_models_without_a_certificate_are_refused(model, words):
    improper = ("weights",) if model is with_flat_prior else ()
    with pytest.raises(ValueError, match=words):
        nt.certify_risk(KEY, fit_of(model, improper=improper), "y")


@pytest.mark.full
@pytest.mark.parametrize(
    "guide",
    [AutoMultivariateNormal, AutoLowRankMultivariateNormal, AutoLaplaceApproximation],
)
def test_gaussian_guides_have_their_kl_in_closed_form(guide):
    fit = nt.fit_svi(KEY, logistic, guide, X, Y, alpha=0.5)
    certificate = nt.certify_risk(KEY, fit, "y", num_draws=100)
    assert not certificate.estimate
    # The average of the ELBO is over a thousand draws and more.
    np.testing.assert_allclose(certificate.kl, fit.elbo.kl, atol=0.3)


@pytest.mark.full
def test_other_guides_and_priors_have_an_estimate():
    def hierarchical(x, y):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        weights = numpyro.sample(
            "weights", dist.Normal(0.0, scale).expand([2]).to_event(1)
        )
        with numpyro.plate("n", len(x)):
            numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)

    for fit in (fit_of(hierarchical), fit_of(logistic, AutoIAFNormal)):
        certificate = nt.certify_risk(KEY, fit, "y", num_draws=100)
        assert certificate.estimate
        assert certificate.kl == 2.5
    with pytest.raises(ValueError, match="fit a guide with a scale"):
        nt.certify_risk(KEY, fit_of(logistic, AutoDelta, kl=np.inf), "y", num_draws=100)


@pytest.mark.full
def test_a_prior_of_an_argument_is_fixed():
    assert not nt.certify_risk(
        KEY, fit_of(logistic, args=(X, Y, 0.7)), "y", num_draws=100
    ).estimate


@pytest.mark.full
def test_a_prior_of_columns_of_rows_is_of_the_data():
    def model(x, y):
        weights = numpyro.sample("weights", dist.Normal(0.0, x.std(axis=1)).to_event(1))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Bernoulli(logits=weights @ x), obs=y)

    with pytest.raises(
        ValueError, match=r"^the prior of.*computed from the data.*set aside for it"
    ):
        nt.certify_risk(KEY, fit_of(model, args=(X.T, Y)), "y", num_draws=10)


@pytest.mark.full
def test_a_model_that_reads_its_data_for_something_else_has_a_certificate():
    def model(x, y, group):
        weights = numpyro.sample(
            "weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1)
        )
        scale, num_groups = float(np.std(np.asarray(x))), int(np.max(group)) + 1
        effects = numpyro.sample(
            "effects", dist.Normal(jnp.zeros(num_groups), 1.0).to_event(1)
        )
        with numpyro.plate("n", len(x)):
            numpyro.sample(
                "y", dist.Bernoulli(logits=x @ weights / scale + effects[group]), obs=y
            )

    for group in (np.arange(len(X)) % 3, np.arange(len(X)) // 60):
        assert not nt.certify_risk(
            KEY, fit_of(model, args=(X, Y, group)), "y", num_draws=10
        ).estimate


@pytest.mark.full
def test_masked_rows_are_no_data():
    def model(x, y):
        weights = numpyro.sample(
            "weights", dist.Normal(0.0, 1.0).expand([2]).to_event(1)
        )
        with numpyro.plate("n", len(x)), handlers.mask(mask=jnp.arange(len(x)) < 20):
            numpyro.sample("y", dist.Bernoulli(logits=x @ weights), obs=y)

    def loss(latents, x, y):
        return (x @ latents["weights"] > 0) != (y == 1)

    fits = [fit_of(model, args=args) for args in ((X, Y), (X[:20], Y[:20]))]
    for of in (loss, "y"):
        masked, alone = (nt.certify_risk(KEY, fit, of, num_draws=10) for fit in fits)
        assert masked.value == pytest.approx(alone.value, rel=1e-5)


@pytest.mark.full
def test_an_average_of_kl_below_0_is_0():
    fit = fit_of(logistic, AutoIAFNormal, kl=-1e-9)
    assert nt.certify_risk(KEY, fit, "y", num_draws=10).kl == 0.0
