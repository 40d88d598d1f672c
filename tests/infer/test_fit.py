"""Batch tempered variational inference against closed forms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
import pytest
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import (
    AutoDAIS,
    AutoDelta,
    AutoDiagonalNormal,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.svi import SVIRunResult
from numpyro.infer.util import log_density
from oracles import gaussian_kl, tempered_normal_log_evidence, tempered_normal_posterior
from scipy import stats

import numpyro_tempered as nt
from numpyro_tempered.infer.elbo import (
    TemperedELBO,
    evaluate_elbo,
    gaussian_of_laplace,
    has_point_mass,
)
from numpyro_tempered.infer.svi import finish

KEY = jax.random.key(11)
Y = np.array([1.2, -0.3, 2.4, 0.9, 1.7, 0.1])
PRIOR_MEAN, PRIOR_SD, NOISE, ALPHA = 0.5, 2.0, 1.5, 0.4
POSTERIOR = tempered_normal_posterior(Y, ALPHA, PRIOR_MEAN, PRIOR_SD, NOISE)
LOG_EVIDENCE = tempered_normal_log_evidence(Y, ALPHA, PRIOR_MEAN, PRIOR_SD, NOISE)

# Adam divides gradients by their root mean square. Near the optimum of KL(q, posterior), with P draws and
# step size eta, x <- x - eta (c x + noise of variance 1) with c = sqrt(P) for the mean in units of the
# posterior's sd and c = sqrt(2 P) for the log of the sd. With eta falling to eta_T at rate 1/tau the
# variance ends at (1 + 2 c tau eta_T) / (4 c² tau), whatever the parameterisation.
STEPS, PARTICLES, FIRST_STEP, LAST_STEP = 1500, 20, 0.05, 1e-4
TAU = STEPS / math.log(FIRST_STEP / LAST_STEP)


def step_noise(c):
    return math.sqrt((1.0 + 2.0 * c * TAU * LAST_STEP) / TAU) / (2.0 * c)


def decaying():
    return optax.adam(
        optax.exponential_decay(FIRST_STEP, STEPS, LAST_STEP / FIRST_STEP)
    )


TO_THE_END = {"num_steps": STEPS, "loss": Trace_ELBO(num_particles=PARTICLES)}


def model(y=None):
    theta = numpyro.sample("theta", dist.Normal(PRIOR_MEAN, PRIOR_SD))
    with numpyro.plate("n", len(Y)):
        numpyro.sample("y", dist.Normal(theta, NOISE), obs=y)


def hand_written(y=None):
    loc = numpyro.param("m", 0.0)
    scale = numpyro.param("s", 1.0, constraint=dist.constraints.positive)
    numpyro.sample("theta", dist.Normal(loc, scale))


DATA = jnp.array(Y)
# An optimiser of the caller's takes the steps it is given, and is no more judged than by its losses.
STEP = numpyro.optim.Adam(0.05)


def quick(guide, *args, model=model, **kwargs):
    """A fit whose optimum is of no interest."""
    kwargs = {"num_steps": 1, "num_particles": 2, "optim": STEP, **kwargs}
    return nt.fit_svi(KEY, model, guide, *(args or (DATA,)), **kwargs)


class Still(SVI):
    """SVI that takes no step and finds losses that fall by one nat in each step."""

    def run(self, rng_key, num_steps, *args, progress_bar, **kwargs):
        params = self.get_params(self.init(rng_key, *args, **kwargs))
        return SVIRunResult(params, None, -np.arange(num_steps, dtype=float))


@pytest.fixture
def still(monkeypatch):
    """For what a fit does before and after its steps: neither they nor the ELBO are taken."""
    monkeypatch.setattr("numpyro_tempered.infer.svi.SVI", Still)
    monkeypatch.setattr(
        "numpyro_tempered.infer.svi.evaluate_elbo",
        lambda *_, **__: TemperedELBO(0.0, 0.0, 0.0, 0.0),
    )


@pytest.fixture(params=["still", pytest.param("moving", marks=pytest.mark.full)])
def quickly(request):
    """Still, and in the full tier with the steps and the ELBO, too."""
    if request.param == "still":
        request.getfixturevalue("still")


def scales_of(fit):
    """The scale of each site of the fitted model."""
    trace = numpyro.handlers.trace(numpyro.handlers.seed(fit.model, 0)).get_trace(
        *fit.args
    )
    return {k: site["scale"] for k, site in trace.items() if site["type"] == "sample"}


def given_guide(*_):
    numpyro.sample("theta", dist.Normal(*GIVEN))


GIVEN = (0.3, 0.7)


def given_elbo(model, *args, num_particles=500):
    """The ELBO of N(GIVEN)."""
    return evaluate_elbo(
        KEY, model, given_guide, {}, args, {}, num_particles=num_particles
    )


@pytest.mark.full
def test_draws_without_a_density_leave_an_infinite_elbo_and_no_warning():
    def bounded():
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.factor("bound", jnp.where(theta > 0.0, 0.0, -jnp.inf))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=0.5)

    elbo = given_elbo(bounded)
    assert elbo.value == -math.inf
    assert math.isnan(elbo.se)


def expected_log_lik(q):
    return stats.norm.logpdf(Y, q[0], NOISE).sum() - 0.5 * len(Y) * q[1] ** 2 / NOISE**2


def assert_posterior(q):
    mean, sd = POSTERIOR
    assert abs(q[0] - mean) / sd < 5 * step_noise(math.sqrt(PARTICLES))
    assert abs(math.log(q[1] / sd)) < 5 * step_noise(math.sqrt(2 * PARTICLES))


def assert_elbo(fit, q):
    """ELBO = log evidence - KL(q, posterior), in all its constants; and its two parts."""
    elbo = fit.elbo
    want = LOG_EVIDENCE - gaussian_kl(*q, *POSTERIOR)
    assert abs(elbo.value - want) < 4 * elbo.se + 1e-5 * abs(want)
    assert elbo.kl == pytest.approx(gaussian_kl(*q, PRIOR_MEAN, PRIOR_SD), rel=1e-4)
    # The same draws: the standard error of the first is alpha times that of the second.
    assert abs(elbo.expected_log_lik - expected_log_lik(q)) < 4 * elbo.se / ALPHA + 1e-4
    assert elbo.value == pytest.approx(
        ALPHA * elbo.expected_log_lik - elbo.kl, rel=1e-5
    )
    # Var of alpha log L under q by hand, a quadratic of a Gaussian.
    n = len(Y)
    slope = (Y.sum() - n * q[0]) / NOISE**2
    sd = ALPHA * math.sqrt(slope**2 * q[1] ** 2 + 0.5 * (n / NOISE**2) ** 2 * q[1] ** 4)
    # A sample standard deviation of 1000 draws; the fourth moment of a chi-square allows 5% of error.
    assert elbo.se == pytest.approx(sd / math.sqrt(1000), rel=0.25)


DATES = [f"2024-01-0{day}" for day in range(1, 7)]


@pytest.fixture(scope="module")
def auto_normal():
    data = pd.Series(np.asarray(DATA), pd.Index(DATES, name="day"))
    return nt.fit_svi(
        KEY, model, AutoNormal, data, alpha=ALPHA, optim=decaying(), **TO_THE_END
    )


@pytest.fixture(scope="module")
def by_hand():
    return nt.fit_svi(
        KEY,
        model,
        lambda m: hand_written,
        DATA,
        alpha=ALPHA,
        optim=decaying(),
        **TO_THE_END,
    )


def auto_normal_q(fit):
    return float(fit.params["theta_auto_loc"]), float(fit.params["theta_auto_scale"])


def by_hand_q(fit):
    return float(fit.params["m"]), float(fit.params["s"])


def test_auto_normal_finds_the_tempered_posterior(auto_normal):
    q = auto_normal_q(auto_normal)
    assert_posterior(q)
    assert_elbo(auto_normal, q)
    assert abs(auto_normal.elbo.value - LOG_EVIDENCE) < 4 * auto_normal.elbo.se + 0.01
    assert {axis: list(labels) for axis, labels in auto_normal.coords.items()} == {
        "day": DATES
    }
    # The test tells the powers apart.
    bayes = tempered_normal_posterior(Y, 1.0, PRIOR_MEAN, PRIOR_SD, NOISE)
    assert math.log(POSTERIOR[1] / bayes[1]) > 0.3


@pytest.mark.full
def test_a_hand_written_guide_finds_the_tempered_posterior(by_hand):
    assert by_hand.guide is hand_written
    assert_posterior(by_hand_q(by_hand))
    assert_elbo(by_hand, by_hand_q(by_hand))


@pytest.mark.full
def test_a_numpyro_optimiser_and_another_loss():
    fit = nt.fit_svi(
        KEY,
        model,
        AutoNormal,
        y=DATA,
        alpha=ALPHA,
        num_steps=STEPS,
        optim=numpyro.optim.ClippedAdam(
            lambda i: FIRST_STEP * (LAST_STEP / FIRST_STEP) ** (i / STEPS)
        ),
        loss=TraceMeanField_ELBO(num_particles=PARTICLES),
    )
    assert_posterior(auto_normal_q(fit))
    assert_elbo(fit, auto_normal_q(fit))


def test_what_a_fit_holds(auto_normal):
    fit = auto_normal
    assert fit.alpha == ALPHA
    assert fit.losses.shape == (STEPS,)
    assert isinstance(fit.guide, AutoNormal)
    assert fit.guide.model is fit.model
    assert set(fit.observed) == {"y"}
    np.testing.assert_array_equal(fit.observed["y"], DATA)
    assert len(fit.args) == 1
    assert fit.kwargs == {}
    trace = numpyro.handlers.trace(numpyro.handlers.seed(fit.model, 0)).get_trace(DATA)
    assert trace["y"]["scale"] == ALPHA
    # The losses are negative tempered ELBOs too: their mean over the last steps is near log evidence.
    last = np.asarray(fit.losses[-400:], float)
    assert abs(-last.mean() - LOG_EVIDENCE) < 5 * last.std() / math.sqrt(400) + 0.01


def test_arguments_by_name_are_handed_on(auto_normal):
    fit = auto_normal._replace(args=(), kwargs={"y": DATA})
    np.testing.assert_array_equal(fit.target.observed["y"], DATA)
    assert fit.sample_posterior(KEY, (2,))["theta"].shape == (2,)


@pytest.fixture(scope="module")
def with_hand_written(auto_normal):
    return auto_normal._replace(
        guide=hand_written, params={"m": np.float32(0.3), "s": np.float32(0.7)}
    )


@pytest.mark.parametrize(
    "which",
    [
        "auto_normal",
        "with_hand_written",
        pytest.param("by_hand", marks=pytest.mark.full),
    ],
)
def test_draws_of_the_posterior(which, request):
    fit = request.getfixturevalue(which)
    mean, sd = auto_normal_q(fit) if which == "auto_normal" else by_hand_q(fit)
    n = 4000
    draws = fit.sample_posterior(jax.random.key(1), (n,))
    assert set(draws) == {"theta"}
    theta = np.asarray(draws["theta"], float)
    assert theta.shape == (n,)
    assert abs(theta.mean() - mean) < 5 * sd / math.sqrt(n)
    assert abs(theta.std() / sd - 1) < 5 / math.sqrt(2 * n)
    np.testing.assert_array_equal(
        fit.sample_posterior(jax.random.key(1), (n,))["theta"], draws["theta"]
    )


@pytest.mark.full
@pytest.mark.parametrize("optim", [None, STEP])
@pytest.mark.filterwarnings("ignore::numpyro_tempered.warnings.ConvergenceWarning")
def test_the_key_decides_the_fit(optim):
    one, two, other = (
        nt.fit_svi(
            key, model, AutoNormal, DATA, num_steps=3, num_particles=2, optim=optim
        )
        for key in (KEY, KEY, jax.random.key(12))
    )
    np.testing.assert_array_equal(one.losses, two.losses)
    assert one.elbo == two.elbo
    assert (
        one.losses != other.losses
    ).any()  # at the mode of a Gaussian the first is exact


def test_alpha_zero_leaves_the_prior_alone(still):
    fit = quick(lambda m: hand_written, alpha=0)
    assert fit.alpha == 0.0
    joint = jax.jit(
        lambda theta: log_density(fit.model, (DATA,), {}, {"theta": theta})[0]
    )(0.3)
    assert float(joint) == pytest.approx(
        stats.norm.logpdf(0.3, PRIOR_MEAN, PRIOR_SD), rel=1e-6
    )


@pytest.mark.full
def test_alpha_zero_is_the_prior():
    fit = quick(lambda m: hand_written, alpha=0, num_particles=100)
    want = gaussian_kl(*by_hand_q(fit), PRIOR_MEAN, PRIOR_SD)
    assert fit.alpha == 0.0
    assert fit.elbo.value == pytest.approx(-want, rel=1e-5)
    assert fit.elbo.se < 1e-6


# Which guide belongs to which model.


def test_a_guide_that_is_built_already_has_its_own_model(quickly):
    built = AutoNormal(model)
    with pytest.raises(
        ValueError,
        match=r"this AutoNormal is built already.*alpha = 0.4.*model to guide",
    ):
        quick(built, alpha=ALPHA)
    fit = quick(built, alpha=1.0)
    assert fit.guide is built
    assert fit.alpha == 1.0


def test_a_factory_must_use_the_model_it_is_given(quickly):
    with pytest.raises(
        ValueError,
        match=r"^the guide factory.*built on another model.*it on its argument",
    ):
        quick(lambda tempered: AutoNormal(model), alpha=ALPHA)
    around = quick(
        lambda tempered: AutoNormal(numpyro.handlers.substitute(tempered, data={})),
        alpha=ALPHA,
    )
    assert around.alpha == ALPHA
    quick(lambda tempered: AutoNormal(model), alpha=1.0)


@pytest.mark.parametrize("guide", [lambda m: None, lambda m: 3.0, None, 2.0], ids=type)
def test_a_factory_must_return_a_guide(guide):
    with pytest.raises(TypeError, match=r"guide"):
        quick(guide)


@pytest.mark.parametrize("alpha", [-0.1, np.nan, np.inf, "half"])
def test_alpha_out_of_range(alpha):
    with pytest.raises(ValueError, match="alpha"):
        quick(AutoNormal, alpha=alpha)


def test_too_few_particles():
    with pytest.raises(
        ValueError, match="num_particles must be an integer of at least 2"
    ):
        quick(AutoNormal, num_particles=1)


def test_parameters_that_are_not_finite_are_no_fit():
    with pytest.raises(
        ValueError, match=r"^the fit ended in.*not finite.*a smaller step size"
    ):
        finish(
            (KEY, KEY),
            nt.temper(model),
            hand_written,
            {"m": np.nan},
            None,
            (DATA,),
            kwargs={},
            num_particles=2,
        )


@pytest.mark.parametrize("guide", [AutoNormal, lambda m: hand_written])
def test_data_with_nan(guide):
    with pytest.raises(
        ValueError,
        match=r"observed site .* has 1 of \d+ values that are NaN or infinite, the first",
    ):
        quick(guide, DATA.at[0].set(jnp.nan))


def test_a_model_without_data(still):
    with pytest.raises(
        ValueError, match=r"^the model has.*no observed site.*that it conditions on"
    ):
        nt.fit_svi(
            KEY, model, lambda m: hand_written, num_steps=1, num_particles=2, optim=STEP
        )


@pytest.mark.full
def test_a_guide_of_a_model_without_data(quickly):
    with pytest.raises(
        ValueError, match=r"^the model has.*no observed site.*that it conditions on"
    ):
        nt.fit_svi(KEY, model, AutoNormal, num_steps=1, num_particles=2, optim=STEP)


# Powers.


def test_powers_multiply_in_every_site(still):
    twice = quick(lambda m: hand_written, model=nt.temper(model, alpha=0.5), alpha=0.4)
    assert twice.alpha == pytest.approx(0.2, rel=1e-15)
    assert scales_of(twice) == {"theta": None, "y": pytest.approx(0.2, rel=1e-6)}


@pytest.mark.full
def test_powers_multiply():
    once = quick(lambda m: hand_written, alpha=0.2, num_particles=50)
    twice = quick(
        lambda m: hand_written,
        model=nt.temper(model, alpha=0.5),
        alpha=0.4,
        num_particles=50,
    )
    assert twice.alpha == pytest.approx(0.2, rel=1e-15)
    assert by_hand_q(twice) == pytest.approx(by_hand_q(once), rel=1e-5)
    assert twice.elbo.value == pytest.approx(once.elbo.value, rel=1e-5)


@pytest.mark.parametrize(
    "factory",
    [lambda m: hand_written, pytest.param(AutoNormal, marks=pytest.mark.full)],
    ids=["by hand", "auto"],
)
def test_powers_by_site_are_reported_by_site(quickly, factory):
    def two_sites(y):
        theta = numpyro.sample("theta", dist.Normal(PRIOR_MEAN, PRIOR_SD))
        with nt.temper(alpha=0.5):
            numpyro.sample("a", dist.Normal(theta, NOISE), obs=y[0])
        numpyro.sample("b", dist.Normal(theta, NOISE), obs=y[1])

    fit = quick(factory, model=two_sites, alpha=0.4)
    assert fit.alpha == pytest.approx({"a": 0.2, "b": 0.4})


# The ELBO of other guides.


def plane(y):
    """Two coordinates with a correlated Gaussian posterior."""
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(theta.sum(), NOISE), obs=y)


def plane_log_evidence(y):
    # The sum is N(0, 2) under the prior.
    return tempered_normal_log_evidence([y], ALPHA, 0.0, math.sqrt(2.0), NOISE)


@pytest.mark.full
def test_laplace_is_exact_where_the_posterior_is_gaussian():
    y = 1.3
    laplace, full = (
        nt.fit_svi(KEY, plane, guide, y, alpha=ALPHA, optim=decaying(), **TO_THE_END)
        for guide in (AutoLaplaceApproximation, AutoMultivariateNormal)
    )
    want = plane_log_evidence(y)
    # The mode is found without noise, and exact draws have no variance.
    assert laplace.elbo.value == pytest.approx(want, abs=1e-3)
    assert laplace.elbo.se < 1e-3
    assert full.elbo.value < want + 4 * full.elbo.se
    assert abs(laplace.elbo.value - full.elbo.value) < 4 * full.elbo.se + 0.01


def test_thegaussian_of_laplace_is_that_of_its_mode(auto_normal):
    class Known(AutoLaplaceApproximation):
        def get_posterior(self, params):
            return dist.MultivariateNormal(
                params["auto_loc"], scale_tril=np.array([[POSTERIOR[1]]], np.float32)
            )

    guide, params = (
        Known(auto_normal.model),
        {"auto_loc": np.array([POSTERIOR[0]], np.float32)},
    )
    gaussian, found = gaussian_of_laplace(
        guide, auto_normal.model, params, KEY, (DATA,), {}
    )
    assert isinstance(gaussian, AutoMultivariateNormal)
    np.testing.assert_allclose(found["auto_loc"], [POSTERIOR[0]], rtol=1e-6)
    np.testing.assert_allclose(found["auto_scale_tril"], [[POSTERIOR[1]]], rtol=1e-5)


@pytest.mark.full
def test_laplace_reports_its_gaussian_and_not_its_mode():
    fit = quick(
        AutoLaplaceApproximation,
        alpha=ALPHA,
        num_steps=200,
        optim=numpyro.optim.Adam(0.1),
    )
    draws = fit.sample_posterior(KEY, (4000,))["theta"]
    assert abs(float(draws.std()) / POSTERIOR[1] - 1) < 5 / math.sqrt(8000)


def test_a_point_is_known():
    def point(y):
        numpyro.sample("theta", dist.Delta(0.3))

    assert has_point_mass(KEY, point, {}, (DATA,), {})
    assert not has_point_mass(KEY, given_guide, {}, (DATA,), {})


@pytest.mark.full
def test_a_point_has_no_elbo():
    fit = quick(AutoDelta, alpha=ALPHA)
    assert fit.elbo.value == -math.inf
    assert fit.elbo.kl == math.inf
    point = float(fit.params["theta_auto_loc"])
    assert fit.elbo.expected_log_lik == pytest.approx(
        expected_log_lik((point, 0.0)), rel=1e-5
    )


def subsampled(y):
    theta = numpyro.sample("theta", dist.Normal(PRIOR_MEAN, PRIOR_SD))
    with numpyro.plate("n", 60, subsample_size=len(Y)):
        numpyro.sample("y", dist.Normal(theta, NOISE), obs=y)


def test_a_subsample_stands_for_all_data_in_the_elbo():
    elbo = given_elbo(nt.temper(subsampled, ALPHA), DATA)
    assert elbo.value == pytest.approx(
        ALPHA * elbo.expected_log_lik - elbo.kl, rel=1e-5
    )
    assert elbo.kl == pytest.approx(gaussian_kl(*GIVEN, PRIOR_MEAN, PRIOR_SD), rel=1e-5)
    assert (
        abs(elbo.expected_log_lik - 10 * expected_log_lik(GIVEN)) < 4 * elbo.se / ALPHA
    )


def test_a_prior_that_is_scaled_counts_as_often_in_the_kl():
    mean, sd = GIVEN

    def scaled(y):
        # Three priors that are wider by √3 are the guide's density, but for its height: all draws have one ratio.
        with numpyro.handlers.scale(scale=3.0):
            theta = numpyro.sample("theta", dist.Normal(mean, math.sqrt(3.0) * sd))
        numpyro.sample("y", dist.Normal(theta, NOISE), obs=y)

    kl = stats.norm.logpdf(0.0, scale=sd) - 3.0 * stats.norm.logpdf(
        0.0, scale=math.sqrt(3.0) * sd
    )
    assert given_elbo(scaled, DATA).kl == pytest.approx(kl, rel=1e-5)


@pytest.mark.full
def test_a_subsample_stands_for_all_data():
    fit = quick(
        lambda m: hand_written, model=subsampled, alpha=ALPHA, num_particles=500
    )
    elbo, q = fit.elbo, by_hand_q(fit)
    assert fit.alpha == pytest.approx(ALPHA, rel=1e-6)
    assert elbo.value == pytest.approx(
        ALPHA * elbo.expected_log_lik - elbo.kl, rel=1e-5
    )
    assert abs(elbo.expected_log_lik - 10 * expected_log_lik(q)) < 4 * elbo.se / ALPHA


def test_a_loss_that_fell_at_full_step_size_is_said(still):
    with pytest.warns(
        nt.warnings.ConvergenceWarning,
        match="not converged: it took 200 steps, .* still fell by .* full step",
    ):
        fit = quick(lambda m: hand_written, num_steps=200)
    assert fit.converged is False
    assert fit.convergence.fall == 20.0


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_steps", "optim"), [(200, None), (200, numpyro.optim.Adam(0.01))]
)
def test_a_loss_that_still_falls_is_said(num_steps, optim):
    def far(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 100.0))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    with pytest.warns(nt.warnings.ConvergenceWarning, match="still fell"):
        nt.fit_svi(
            jax.random.key(0),
            far,
            AutoNormal,
            60.0,
            num_steps=num_steps,
            optim=optim,
            num_particles=2,
        )


def test_a_prebuilt_guide_must_be_of_the_model_that_is_fitted():
    with pytest.raises(
        ValueError,
        match=r"built on another model than the one to fit.*model, or pass the",
    ):
        quick(AutoNormal(hand_written), alpha=1.0)


def masked(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with (
        numpyro.plate("n", 2),
        numpyro.handlers.mask(mask=jnp.array([True, False])),
        nt.temper(alpha=0.0),
    ):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def test_a_mask_survives_a_power_of_zero_in_the_elbo():
    elbo = given_elbo(nt.temper(masked, 1.0), jnp.array([0.0, 1000.0]))
    m, s = GIVEN
    # Only the first datum counts: E[log N(0; theta, 1)] under q.
    expected = -0.5 * np.log(2 * np.pi) - 0.5 * (m**2 + s**2)
    sd = math.sqrt((m * s) ** 2 + 0.5 * s**4)
    assert abs(elbo.expected_log_lik - expected) < 5 * sd / math.sqrt(500)
    assert elbo.value == pytest.approx(-elbo.kl, rel=1e-6)


@pytest.mark.full
def test_masks_and_powers_survive_a_power_of_zero():
    y = jnp.array([0.0, 1000.0])
    fit = nt.fit_svi(
        KEY, masked, AutoNormal, y, num_steps=1, num_particles=500, optim=STEP
    )
    # Only the first datum counts: E[log N(0; theta, 1)] under q.
    q = by_hand_like(fit)
    expected = -0.5 * np.log(2 * np.pi) - 0.5 * (q[0] ** 2 + q[1] ** 2)
    assert abs(fit.elbo.expected_log_lik - expected) < 5 * q[1] ** 2 + 0.5 * abs(
        q[0] * q[1]
    )
    nested = quick(
        AutoNormal, model=nt.temper(model, alpha=0.5), alpha=0.0, num_particles=500
    )
    plain = quick(AutoNormal, alpha=0.0, num_particles=500)
    assert nested.elbo.expected_log_lik == pytest.approx(
        plain.elbo.expected_log_lik, rel=1e-5
    )


def by_hand_like(fit):
    return float(fit.params["theta_auto_loc"]), float(fit.params["theta_auto_scale"])


# Powers by name, and local latents.


def historical(y):
    theta = numpyro.sample("theta", dist.Normal(PRIOR_MEAN, PRIOR_SD))
    with numpyro.plate("past", 4):
        numpyro.sample("then", dist.Normal(theta, NOISE), obs=y[:4])
    with numpyro.plate("present", 2):
        numpyro.sample("now", dist.Normal(theta, NOISE), obs=y[4:])


def test_powers_by_name_are_those_of_the_sites(still):
    alphas = {"then": 0.25, "now": 1.0}
    fit = quick(lambda m: hand_written, model=historical, alpha=alphas)
    assert fit.alpha == alphas
    assert scales_of(fit) == {"theta": None, "then": 0.25, "now": None}


@pytest.mark.full
def test_powers_by_name():
    alphas = {"then": 0.25, "now": 1.0}
    fit = quick(AutoNormal, model=historical, alpha=alphas, num_particles=500)
    assert fit.alpha == alphas
    # E_q[alpha log L] - KL, with the power of each site inside.
    m, s = by_hand_like(fit)
    each = stats.norm.logpdf(Y, m, NOISE) - 0.5 * s**2 / NOISE**2
    want = (
        0.25 * each[:4].sum() + each[4:].sum() - gaussian_kl(m, s, PRIOR_MEAN, PRIOR_SD)
    )
    assert abs(fit.elbo.value - want) < 5 * fit.elbo.se
    assert abs(fit.elbo.expected_log_lik - each.sum()) < 5 * fit.elbo.se / 0.25


@pytest.mark.parametrize(
    ("alpha", "match"),
    [
        ({"then": 0.5}, r"^observed site.*'now' has no alpha.*that are not tempered"),
        ({"then": 0.5, "now": 1.0, "never": 1.0}, "never"),
        ({"then": -0.5, "now": 1.0}, "alpha"),
        ({}, "alpha"),
    ],
)
def test_powers_by_name_must_name_the_sites(alpha, match):
    with pytest.raises(ValueError, match=match):
        quick(lambda tempered: hand_written, model=historical, alpha=alpha)


def test_a_prebuilt_guide_and_powers_by_name():
    with pytest.raises(
        ValueError, match=r"^this AutoNormal is.*built already.*from model to guide"
    ):
        quick(AutoNormal(historical), model=historical, alpha={"then": 0.5, "now": 1.0})


def test_local_plates_leave_the_scales_of_a_global_model_alone(still):
    fits = [
        quick(lambda m: hand_written, alpha=ALPHA, local_plates=plates)
        for plates in ((), ["n"])
    ]
    assert scales_of(fits[0]) == scales_of(fits[1]) == {"theta": None, "y": ALPHA}


@pytest.mark.full
def test_local_plates_leave_a_global_model_alone():
    """The plate of the data has no latents: as without."""
    plain = quick(AutoNormal, alpha=ALPHA, num_particles=10)
    named = quick(AutoNormal, alpha=ALPHA, local_plates=["n"], num_particles=10)
    assert named.elbo == plain.elbo


def with_supports(y):
    scale = numpyro.sample("scale", dist.HalfNormal(3.0))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(weights[0], scale), obs=y)


@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
def test_moments_are_those_of_draws_on_every_support(guide):
    """A guide over one flat vector shows its sites as points, which have no support."""
    fit = short_fit(guide)
    draws = fit.sample_posterior(jax.random.key(1), (20000,))
    for name, values in draws.items():
        sd = values.std(axis=0)
        np.testing.assert_allclose(fit.sd[name], sd, rtol=0.05)
        assert np.all(np.abs(fit.mean[name] - values.mean(axis=0)) < 0.05 * sd)


def short_fit(guide):
    return nt.fit_svi(
        KEY, with_supports, guide, jnp.asarray(Y), optim=optax.adam(0.05), num_steps=20
    )


@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
def test_log_prob_takes_one_draw_of_all_latents(guide):
    fit = short_fit(guide)
    draws = fit.sample_posterior(KEY, (2,))
    one = {name: values[0] for name, values in draws.items()}
    each = jax.vmap(fit.log_prob)(draws)
    np.testing.assert_allclose(fit.log_prob(one), each[0], rtol=1e-5)
    for values in (draws, {"scale": 1.0}, {**one, "other": 1.0}, {}):
        with pytest.raises(
            ValueError, match=r"^log_prob takes one value of each.*vmap"
        ):
            fit.log_prob(values)
    # The edge of a support is no place for NaN.
    assert fit.log_prob({**one, "scale": 0.0}) == -jnp.inf


def test_a_guide_with_draws_besides_the_latents_has_no_density():
    fit = short_fit(lambda model: AutoDAIS(model, K=2))
    one = {"scale": 1.0, "weights": jnp.ones(3) / 3.0}
    with pytest.raises(
        ValueError, match=r"^the guide draws \['auto_momentum', 'auto_z_0"
    ):
        fit.log_prob(one)


def test_a_target_does_not_draw_what_is_missing():
    target = short_fit(AutoNormal).target
    for density in (target.log_joint, target.log_lik):
        with pytest.raises(ValueError, match=r"and \['weights'\] are missing"):
            density({"scale": 1.0})
