"""Missing data as latents: what is refused, and the forms that temper the likelihood of the data alone."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from scipy import integrate, stats
from tempered_models import Y, density, potential, trace_of

import numpyro_tempered as nt

ALPHA = 0.3
OBS = np.array([0.3, 1.2, -0.5, 0.9, 0.1, -1.0])
X = np.append(OBS, [np.nan, np.nan])
THERE = ~np.isnan(X)


def scale():
    return numpyro.sample("s", dist.HalfNormal(1.5))


def concatenated():
    s = scale()
    x_imp = numpyro.sample("x_imp", dist.Normal(0.0, s).expand([2]).mask(False))
    numpyro.sample("x", dist.Normal(0.0, s), obs=jnp.concatenate([OBS, x_imp]))


def filled(x=X):
    """As in NumPyro's tutorial."""
    s = scale()
    x_imp = numpyro.sample("x_imp", dist.Normal(0.0, s).expand([2]).mask(False))
    with numpyro.plate("n", len(x)):
        numpyro.sample(
            "x", dist.Normal(0.0, s), obs=jnp.asarray(x).at[~THERE].set(x_imp)
        )


def in_a_scan():
    s = scale()

    def step(carry, x):
        x_imp = numpyro.sample("x_imp", dist.Normal(0.0, s).mask(False))
        numpyro.sample("x", dist.Normal(0.0, s), obs=jnp.where(jnp.isnan(x), x_imp, x))
        return carry, None

    scan(step, 0.0, jnp.asarray(X))


def discrete():
    p = numpyro.sample("p", dist.Beta(1.0, 1.0))
    k = numpyro.sample("k", dist.Bernoulli(p))
    numpyro.sample("x", dist.Bernoulli(p), obs=jnp.stack([jnp.ones((), k.dtype), k]))


def residual():
    s = scale()
    numpyro.sample("x", dist.Normal(0.0, 1.0), obs=jnp.asarray(OBS) - s)


@pytest.mark.parametrize(
    "model",
    [concatenated, filled, in_a_scan, discrete, residual],
    ids=lambda f: f.__name__,
)
def test_values_that_depend_on_latents_are_refused(model):
    tempered = nt.temper(model, alpha=ALPHA)
    refusal = r"observed sites \['x'\] depend on latents.*obs=x\[there\].*obs_mask=there.*numpyro\.factor"
    for _ in range(2):
        with pytest.raises(ValueError, match=refusal):
            trace_of(tempered)
    with pytest.raises(ValueError, match=refusal):
        jax.jit(lambda: trace_of(tempered)["x"]["value"])()


def test_values_in_a_marginalised_model_are_refused():
    def model():
        x_imp = numpyro.sample("x_imp", dist.Normal().mask(False))
        with numpyro.plate("n", 7):
            z = numpyro.sample("z", dist.Bernoulli(0.4))
            numpyro.sample(
                "x", dist.Normal(z, 1.0), obs=jnp.append(jnp.asarray(OBS), x_imp)
            )

    pytest.importorskip("funsor")
    with pytest.raises(
        ValueError,
        match=r"^the values.*\['x'\] depend on latents.*or write a numpyro\.factor",
    ):
        trace_of(nt.temper(nt.marginalize(model), alpha=ALPHA))


def test_at_the_power_one_they_are_numpyros_own():
    """The power of one site may be 1 while that of others is not."""
    u = {"s": 0.4, "x_imp": jnp.array([0.2, -0.7])}
    assert potential(nt.temper(concatenated, alpha=1.0), u) == potential(
        concatenated, u
    )

    def two():
        concatenated()
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.3)

    tempered = nt.temper(two, alpha={"x": 1.0, "y": ALPHA})
    want = float(potential(concatenated, u)) - ALPHA * stats.norm.logpdf(0.3)
    assert float(potential(tempered, u)) == pytest.approx(want, rel=1e-5)


def computed(y):
    """Data of all kinds that depend on no latent."""
    theta = numpyro.sample("theta", dist.Normal())
    w = numpyro.param("w", 0.0)
    with numpyro.plate("n", len(y)):
        numpyro.sample("log", dist.Normal(theta, 1.0), obs=jnp.log1p(jnp.abs(y)))
        numpyro.sample("moved", dist.Normal(theta, 1.0), obs=y + w)
    with numpyro.plate("part", len(y), subsample_size=2) as i:
        numpyro.sample("rows", dist.Normal(theta, 1.0), obs=y[i])

    def step(carry, row):
        numpyro.sample("step", dist.Normal(theta + carry, 1.0), obs=row)
        return row, None

    scan(step, 0.0, y)
    numpyro.factor("loss", theta)


def test_data_that_the_model_computes_are_data():
    trace = trace_of(nt.temper(computed, alpha=ALPHA), jnp.asarray(Y))
    assert [trace[name]["scale"] for name in ("log", "moved", "step", "loss")] == [
        ALPHA
    ] * 4


def test_a_prediction_may_be_observed():
    """Predictive masks all densities: nothing is tempered there."""
    draws = {"s": jnp.ones(3), "x_imp": jnp.zeros((3, 2))}
    assert Predictive(nt.temper(filled, alpha=ALPHA), draws, return_sites=["x"])(
        jax.random.key(0)
    )["x"].shape == (3, 8)


def test_each_call_that_traces_alike_is_looked_at_once():
    runs = []

    def model(y):
        runs.append(1)
        theta = numpyro.sample("theta", dist.Normal())
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=2.0 * y)

    tempered = nt.temper(model, alpha=ALPHA)
    for y in (jnp.asarray(Y), 3.0 * jnp.asarray(Y)):
        trace_of(tempered, y)
    assert len(runs) == 3
    trace_of(tempered, jnp.ones(7))
    assert len(runs) == 5


# The forms that work. Their target is the prior times the likelihood of the data that are there, to the power.


def separate():
    s = scale()
    numpyro.sample("x_missing", dist.Normal(0.0, s).expand([2]).to_event(1))
    numpyro.sample("x", dist.Normal(0.0, s), obs=X[THERE])


def masked():
    s = scale()
    with numpyro.plate("n", len(X)):
        numpyro.sample(
            "x", dist.Normal(0.0, s), obs=np.where(THERE, X, 0.0), obs_mask=THERE
        )


def log_target(s, x_missing):
    log_lik = ALPHA * stats.norm.logpdf(OBS, 0.0, s).sum()
    return (
        stats.halfnorm.logpdf(s, scale=1.5)
        + log_lik
        + stats.norm.logpdf(x_missing, 0.0, s).sum()
    )


def test_missing_data_keep_their_prior(x64):
    s, x_missing = 0.8, np.array([0.2, -0.7])
    want = pytest.approx(log_target(s, x_missing), rel=1e-13)
    assert density(nt.temper(separate, ALPHA), {"s": s, "x_missing": x_missing}) == want
    entries = np.append(np.full(6, 9.0), x_missing)
    assert density(nt.temper(masked, ALPHA), {"s": s, "x_unobserved": entries}) == want


def test_at_the_power_one_both_forms_are_numpyros_own():
    u = {"s": 0.4, "x_missing": jnp.array([0.2, -0.7]), "x_unobserved": jnp.zeros(8)}
    for model in (separate, masked):
        assert potential(nt.temper(model, alpha=1.0), u) == potential(model, u)
        assert potential(nt.temper(model, alpha=ALPHA), u) != potential(model, u)


def regression(y):
    """Covariates with missing entries."""
    slope = numpyro.sample("slope", dist.Normal())
    s = scale()
    x_missing = numpyro.sample("x_missing", dist.Normal(0.0, s).expand([2]).to_event(1))
    numpyro.sample("x", dist.Normal(0.0, s), obs=X[THERE])
    numpyro.sample(
        "y",
        dist.Normal(slope * jnp.append(jnp.asarray(OBS.tolist()), x_missing), 1.0),
        obs=y,
    )


def test_missing_covariates_keep_their_prior_and_outcomes_have_the_power(x64):
    y, s, slope, x_missing = np.linspace(-1.0, 1.0, 8), 0.8, 0.6, np.array([0.2, -0.7])
    got = density(
        nt.temper(regression, ALPHA),
        {"s": s, "slope": slope, "x_missing": x_missing},
        jnp.asarray(y),
    )
    outcomes = stats.norm.logpdf(y, slope * np.append(OBS, x_missing), 1.0).sum()
    assert got == pytest.approx(
        log_target(s, x_missing) + stats.norm.logpdf(slope) + ALPHA * outcomes,
        rel=1e-13,
    )


def test_the_latents_of_obs_mask_have_no_bound_under_svi(key):
    for alpha in (ALPHA, 1.0):
        model = nt.temper(masked, alpha)
        message = (
            r"'x_unobserved', made by obs_mask, has entries without a density where the data are there: the ELBO "
            r".*no maximum.*obs=x\[there\]"
        )
        with pytest.warns(UserWarning, match=message):
            SVI(model, AutoNormal(model), numpyro.optim.Adam(0.1), Trace_ELBO()).init(
                key
            )
    model = nt.temper(separate, ALPHA)
    SVI(model, AutoNormal(model), numpyro.optim.Adam(0.1), Trace_ELBO()).init(key)


@pytest.mark.full
def test_nuts_has_the_mean_of_the_quadrature(key):
    mcmc = MCMC(
        NUTS(nt.temper(separate, ALPHA)),
        num_warmup=500,
        num_samples=6000,
        progress_bar=False,
    )
    mcmc.run(key)
    s = np.asarray(mcmc.get_samples(group_by_chain=True)["s"], float)
    none = np.array([])
    mass, first = (
        integrate.quad(lambda s: s**k * np.exp(log_target(s, none)), 1e-6, 20.0)[0]  # noqa: B023
        for k in (0, 1)
    )
    error = s.std() / np.sqrt(effective_sample_size(s))
    assert first / mass == pytest.approx(1.1617, abs=1e-4)
    assert abs(s.mean() - first / mass) < 5.0 * error < 0.1
