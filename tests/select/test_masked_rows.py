"""Masked rows are no data: 30 rows of which 10 are masked give what the 20 others give alone."""

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy import stats

import numpyro_tempered as nt
from numpyro_tempered.handlers.likelihood import get_trace
from numpyro_tempered.handlers.rows import find_data, log_lik_of_each
from numpyro_tempered.select.alpha.base import Task
from numpyro_tempered.select.compare import _check_certifiable

KEY = jax.random.key(0)
RNG = np.random.default_rng(5)
THERE = RNG.permutation(30) < 20
X = RNG.normal(size=30)
Y = 1.5 * X + 2.0 * RNG.normal(size=30)
# In the place of what is missing, far from what could be observed.
Y[~THERE] = 1e3


# Of few data some have weights with long tails.
UNRELIABLE = pytest.mark.filterwarnings("ignore:Estimated shape parameter")


def latents():
    return (
        numpyro.sample("slope", dist.Normal(0.0, 3.0)),
        numpyro.sample("scale", dist.HalfNormal(2.0)),
    )


def by_handler(x, y, there):
    slope, scale = latents()
    with numpyro.plate("n", len(y)), handlers.mask(mask=there):
        numpyro.sample("y", dist.Normal(slope * x, scale), obs=y)


def by_distribution(x, y, there):
    slope, scale = latents()
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(slope * x, scale).mask(there), obs=y)


def without_a_plate(x, y, there):
    slope, scale = latents()
    numpyro.sample("y", dist.Normal(slope * x, scale).mask(there), obs=y)


MODELS = {
    "handler": by_handler,
    "distribution": by_distribution,
    "no plate": without_a_plate,
}
WHOLE, ALONE = (X, Y, THERE), (X[THERE], Y[THERE], np.ones(20, bool))


def both(function):
    """A function of the arguments, of all rows with their masks and of those that are there alone."""
    return function(*WHOLE), function(*ALONE)


def trace_of(model, *args):
    return get_trace(handlers.seed(model, 0), args, {})


def trace_at(model, *args):
    values = {"slope": np.array(1.2), "scale": np.array(0.8)}
    return trace_of(handlers.substitute(model, data=values), *args)


@pytest.mark.parametrize("name", MODELS)
def test_the_log_likelihood_of_each_datum(name, x64):
    trace = trace_at(MODELS[name], *WHOLE)
    rows = find_data(trace, None)
    assert (rows.num_data, rows.size, rows.dim) == (20, 30, -1)
    np.testing.assert_array_equal(rows.places, np.flatnonzero(THERE))
    want = stats.norm.logpdf(Y[THERE], 1.2 * X[THERE], 0.8)
    np.testing.assert_allclose(log_lik_of_each(trace, rows), want, rtol=1e-12)


def test_a_row_is_there_where_any_entry_of_any_site_is(x64):
    values = RNG.normal(size=(4, 3))
    entries = np.array([[1, 1, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]], bool)
    second = np.array([True, False, True, False])

    def model():
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", 4, dim=-2):
            with numpyro.plate("k", 3, dim=-1):
                numpyro.sample("y", dist.Normal(theta, 1.0).mask(entries), obs=values)
            of_rows = dist.Normal(theta, 2.0).expand([4, 1]).mask(second[:, None])
            numpyro.sample("z", of_rows, obs=values[:, :1])

    trace = trace_of(handlers.substitute(model, data={"theta": np.array(0.3)}))
    rows = find_data(trace, None)
    np.testing.assert_array_equal(rows.places, [0, 1, 2])
    want = np.sum(entries * stats.norm.logpdf(values, 0.3, 1.0), axis=1)
    want += second * stats.norm.logpdf(values[:, 0], 0.3, 2.0)
    np.testing.assert_allclose(log_lik_of_each(trace, rows), want[:3], rtol=1e-12)


def test_masks_within_an_event_leave_out_events_without_entries(x64):
    values = RNG.normal(size=(3, 2))
    entries = np.array([[1, 0], [0, 0], [1, 1]], bool)

    def model():
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", 3):
            fn = dist.Normal(theta, 1.0).expand([3, 2]).mask(entries).to_event(1)
            numpyro.sample("y", fn, obs=values)

    trace = trace_of(handlers.substitute(model, data={"theta": np.array(0.3)}))
    rows = find_data(trace, None)
    np.testing.assert_array_equal(rows.places, [0, 2])
    want = np.sum(entries * stats.norm.logpdf(values, 0.3, 1.0), axis=1)
    np.testing.assert_allclose(log_lik_of_each(trace, rows), want[[0, 2]], rtol=1e-12)


def test_a_factor_in_the_plate_counts_by_row_and_powers_do_not(x64):
    def model():
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", 3):
            numpyro.factor("penalty", theta * jnp.arange(3.0))
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=np.arange(3.0))

    powers = {"y": np.array([0.5, 1.0, 0.2]), "penalty": 0.3}
    at = handlers.substitute(model, data={"theta": np.array(0.3)})
    trace = trace_of(nt.temper(at, powers))
    rows = find_data(trace, None)
    assert rows.places is None
    want = stats.norm.logpdf(np.arange(3.0), 0.3, 1.0) + 0.3 * np.arange(3.0)
    np.testing.assert_allclose(log_lik_of_each(trace, rows), want, rtol=1e-12)


def test_obs_mask_is_refused_with_what_to_write():
    def model(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y, obs_mask=THERE)

    with pytest.raises(ValueError, match=r"'y_unobserved'.*by handlers\.mask"):
        Task(model, KEY, (Y,), {})


def test_groups_are_labels_of_all_rows():
    groups = np.arange(30) // 3
    of_all = Task(by_handler, KEY, WHOLE, {}, groups=groups)
    alone = Task(by_handler, KEY, ALONE, {}, groups=groups[THERE])
    np.testing.assert_array_equal(of_all.dependence.labels, alone.dependence.labels)
    assert of_all.dependence.num_data == 20
    with pytest.raises(ValueError, match="label for each of the 30 data"):
        Task(by_handler, KEY, WHOLE, {}, groups=groups[THERE])


@pytest.mark.full
@pytest.mark.parametrize(
    "criterion",
    [nt.alpha.magnitude, nt.alpha.lyddon, nt.alpha.gpc],
    ids=lambda c: c.__name__,
)
def test_alpha_is_that_of_the_rows_alone(criterion):
    def choose(*args):
        return nt.select_alpha(
            KEY, by_handler, AutoNormal, *args, criterion=criterion()
        ).alpha

    masked, alone = both(choose)
    assert masked == pytest.approx(alone, rel=1e-3)


@pytest.mark.full
@UNRELIABLE
def test_criteria_by_weights_resample_the_data_alone():
    def choose(*args):
        choice = nt.select_alpha(
            KEY,
            by_handler,
            AutoMultivariateNormal,
            *args,
            alphas=[0.3, 1.0],
            criterion=nt.alpha.safe_bayes(blocks=2),
            diagnostics=[nt.alpha.loo(), nt.alpha.held_out(2)],
        )
        return choice.data["alpha_selection"]

    masked, alone = both(choose)
    assert set(masked.data_vars) == set(alone.data_vars)
    for name in ("criterion", "elpd_loo"):
        np.testing.assert_allclose(masked[name], alone[name], rtol=0.02)


def numbers(result):
    """The expected log density, its standard error and the effective number of parameters."""
    before = hasattr(result, "elpd_loo")
    names = ("elpd_loo", "se", "p_loo") if before else ("elpd", "se", "p")
    return [getattr(result, name) for name in names]


@pytest.mark.full
@UNRELIABLE
@pytest.mark.parametrize("name", MODELS)
def test_sandwich_loo_and_certificates_are_those_of_the_rows_alone(name):
    fits = both(lambda *args: nt.fit_gaussian(KEY, MODELS[name], AutoNormal, *args))
    masked, alone = (nt.table(nt.sandwich(KEY, fit)) for fit in fits)
    np.testing.assert_allclose(masked["sandwich_sd"], alone["sandwich_sd"], rtol=1e-3)
    np.testing.assert_allclose(masked["ratio"], alone["ratio"], rtol=1e-3)

    data, data_alone = map(nt.to_inference_data, fits)
    log_lik = data["log_likelihood"]["y"].values
    assert log_lik.shape == (1, 1000, 30)
    np.testing.assert_array_equal(
        np.isnan(log_lik), np.broadcast_to(~THERE, log_lik.shape)
    )
    of_all, of_alone = nt.loo(data), nt.loo(data_alone)
    assert of_all.n_data_points == of_alone.n_data_points == 20
    np.testing.assert_allclose(numbers(of_all), numbers(of_alone), rtol=1e-3)
    # Of ArviZ's own there is no number rather than that of zeros.
    with np.errstate(all="ignore"):
        assert np.isnan(numbers(az.loo(data))[0])

    def loss(latents, x, y, there):
        return jnp.abs(y - latents["slope"] * x) > 1.0

    certificates = [nt.certify_risk(KEY, fit, loss, num_draws=50) for fit in fits]
    assert certificates[0].value == pytest.approx(certificates[1].value, rel=1e-3)
    traces = [trace_at(MODELS[name], *args) for args in (WHOLE, ALONE)]
    counts = [
        _check_certifiable("a", trace, {"y": args[1]})
        for trace, args in zip(traces, (WHOLE, ALONE), strict=True)
    ]
    assert counts == [20, 20]


@pytest.mark.full
def test_loo_of_a_table_counts_the_entries_that_are_there():
    values = RNG.normal(size=(6, 3))
    entries = RNG.random((6, 3)) < 0.7

    def model(values):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", 6, dim=-2), numpyro.plate("k", 3):
            numpyro.sample("y", dist.Normal(theta, 1.0).mask(entries), obs=values)

    def alone(values):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=values)

    draws = {"theta": RNG.normal(size=200) / 4.0}
    of_table = nt.loo(nt.to_inference_data(draws, nt.temper(model, 0.5), values))
    of_entries = nt.loo(
        nt.to_inference_data(draws, nt.temper(alone, 0.5), values[entries])
    )
    assert of_table.n_data_points == of_entries.n_data_points == entries.sum()
    np.testing.assert_allclose(numbers(of_table)[0], numbers(of_entries)[0], rtol=1e-5)


@pytest.mark.full
def test_a_log_likelihood_of_nan_is_not_masked():
    draws = {"slope": RNG.normal(size=50), "scale": np.ones(50)}
    data = nt.to_inference_data(draws, by_handler, *WHOLE)
    data["log_likelihood"]["y"][:, :, np.flatnonzero(THERE)[0]] = np.nan
    with pytest.raises(ValueError, match="has NaN"):
        nt.loo(data, alpha=0.5)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the priors of")
def test_a_stream_has_a_round_for_each_datum():
    def choose(*args):
        return nt.select_alpha(
            KEY,
            by_handler,
            lambda model: nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal),
            *args,
            alphas=[0.3, 1.0],
            criterion=nt.alpha.safe_bayes(),
        ).data["alpha_selection"]["criterion"]

    masked, alone = both(choose)
    np.testing.assert_allclose(masked, alone, rtol=1e-5)
