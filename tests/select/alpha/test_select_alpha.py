"""select_alpha: its report in both generations of ArviZ, its diagnostics, and what it refuses."""

from unittest import mock

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from conftest import enable_x64
from numpyro.infer import NUTS
from numpyro.infer.autoguide import AutoDelta, AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.report.arviz import group, group_names
from numpyro_tempered.select.alpha.base import Criterion, Decision, Task
from numpyro_tempered.select.alpha.powers import find_coverage

matplotlib.use("agg")
ALPHAS = [0.25, 0.5, 1.0]
QUICK = {"num_samples": 400}


def model(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 3.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


Y = 1.0 + 2.0 * np.random.default_rng(5).standard_normal(60)


def posterior(y, alpha):
    precision = 1 / 9 + alpha * len(y)
    return alpha * np.sum(y) / precision, 1.0 / precision


@pytest.fixture(scope="module")
def choice():
    return nt.select_alpha(
        jax.random.key(0),
        model,
        AutoNormal,
        jnp.asarray(Y),
        alphas=ALPHAS,
        criterion=nt.alpha.safe_bayes(blocks=3),
        diagnostics=[nt.alpha.held_out(3), nt.alpha.loo()],
        **QUICK,
    )


def test_the_report(choice):
    table = nt.table(choice.data)
    assert table.index.tolist() == ALPHAS
    assert table["selected"].sum() == 1
    assert (
        table.index[table["selected"]][0] == choice.selected == float(choice.fit.alpha)
    )
    assert {
        "criterion",
        "criterion_se",
        "expected_log_lik",
        "effective_parameters",
    } <= set(table)
    assert choice.data.attrs["aim"] == "risk"
    assert choice.data.attrs["criterion"] == "safe_bayes"
    assert choice.advice == choice.data.attrs["advice"]
    pd.testing.assert_frame_equal(nt.table(choice), table)


def test_refits_to_parts_of_the_data_have_the_losses_of_exact_posteriors(choice):
    criterion_key = jax.random.split(jax.random.key(0), 5)[2]
    task, criterion = (
        Task(model, criterion_key, (Y,), {}),
        nt.alpha.safe_bayes(blocks=3),
    )
    rows = criterion.plan(criterion_key, task).weights
    parts = [[posterior(Y[row > 0], alpha) for alpha in ALPHAS] for row in rows]
    plugin = np.array(
        [
            [0.5 * np.log(2 * np.pi) + 0.5 * (Y - m) ** 2 for m, _ in of_row]
            for of_row in parts
        ]
    )
    exact = {"plugin": plugin, "gibbs": plugin + 0.5 * np.array(parts)[..., 1:]}
    columns = criterion.decide(criterion_key, task, np.array(ALPHAS), exact).columns
    table = nt.table(choice.data)
    # Posteriors of all data, or of another alpha, would be off by .0056 and more in the Gibbs loss.
    for name in ("gibbs", "plugin"):
        np.testing.assert_allclose(table[name], columns[name], rtol=0.004)


def test_the_data_are_those_of_the_chosen_posterior(choice):
    assert {"posterior", "log_likelihood", "observed_data", "alpha_selection"} <= set(
        group_names(choice.data)
    )
    draws = group(choice.data, "posterior")["theta"].values
    mean, var = posterior(Y, choice.alpha)
    assert abs(draws.mean() - mean) < 5 * np.sqrt(var / draws.size) + 0.02
    assert len(az.summary(choice.data, var_names=["theta"])) == 1
    assert group(choice.data, "log_likelihood").attrs["alpha"] == choice.alpha


def test_it_is_of_the_installed_generation(choice):
    import xarray as xr

    assert isinstance(
        choice.data, az.InferenceData if hasattr(az, "from_datatree") else xr.DataTree
    )


def test_the_diagnostics_are_the_closed_forms(choice):
    """Exact leave-one-out and cross-validated predictive densities, up to Monte Carlo error."""
    table = nt.table(choice.data)
    fold_key = jax.random.split(jax.random.key(0), 5)[3]
    rows = nt.alpha.held_out(3).plan(fold_key, Task(model, fold_key, (Y,), {})).weights
    kept = rows[np.argmin(rows, axis=0)]
    for alpha in ALPHAS:
        others = [posterior(np.delete(Y, i), alpha) for i in range(len(Y))]
        scores = [
            dist.Normal(m, np.sqrt(1 + v)).log_prob(y)
            for y, (m, v) in zip(Y, others, strict=True)
        ]
        assert abs(table["elpd_loo"][alpha] - sum(map(float, scores))) < 1.0
        by_fold = [posterior(Y[row > 0], alpha) for row in kept]
        each = [
            float(dist.Normal(m, np.sqrt(1 + v)).log_prob(y))
            for y, (m, v) in zip(Y, by_fold, strict=True)
        ]
        # The means of 200 draws and of a short fit are off by some hundredths; a fold's score has slopes of tens.
        assert abs(table["elpd_held_out"][alpha] - sum(each)) < 1.5
        spread = np.std(each, ddof=1) * np.sqrt(len(Y))
        np.testing.assert_allclose(table["elpd_held_out_se"][alpha], spread, rtol=0.2)
    assert (table["pareto_k"] < 0.7).all()


@pytest.mark.parametrize("diagnostic", [nt.alpha.held_out(), nt.alpha.loo()])
def test_predictive_scores_must_not_choose(key, diagnostic):
    with pytest.raises(ValueError, match=r"far too small.*among the diagnostics"):
        nt.select_alpha(key, model, AutoNormal, Y, criterion=diagnostic)


@pytest.mark.full
def test_an_alpha_that_is_named_is_added_to_the_grid(key):
    choice = nt.select_alpha(
        key,
        model,
        AutoNormal,
        jnp.asarray(Y),
        alphas=[0.1, 1.0],
        criterion=nt.alpha.lyddon(),
        **QUICK,
    )
    table = nt.table(choice.data)
    assert len(table) == 3
    assert table.index[table["selected"]][0] == choice.alpha
    assert "criterion" not in table


@pytest.mark.full
def test_what_no_criterion_looks_at_is_not_fitted(key):
    options = {"criterion": nt.alpha.magnitude(), **QUICK}
    choice = nt.select_alpha(key, model, AutoNormal, jnp.asarray(Y), **options)
    assert nt.table(choice.data).index.tolist() == [choice.alpha]
    assert choice.alpha == pytest.approx(60.0 / np.sum((Y - Y.mean()) ** 2), rel=1e-4)
    mean, variance = posterior(Y, choice.alpha)
    draws = np.asarray(choice.data.posterior["theta"])
    assert np.mean(draws) == pytest.approx(mean, abs=0.2 * np.sqrt(variance))
    # A diagnostic along the grid needs it.
    choice = nt.select_alpha(
        key, model, AutoNormal, jnp.asarray(Y), diagnostics=[nt.alpha.loo()], **options
    )
    assert len(nt.table(choice.data)) == 11


def test_nuts_with_an_alpha_that_is_named(key):
    choice = nt.select_alpha(
        key,
        model,
        NUTS,
        jnp.asarray(Y),
        alphas=[1.0],
        criterion=nt.alpha.magnitude(),
        num_warmup=200,
        num_samples=300,
        num_chains=2,
        chain_method="vectorized",
    )
    draws = group(choice.data, "posterior")["theta"]
    assert draws.shape == (2, 300)
    mean, var = posterior(Y, choice.alpha)
    assert choice.alpha < 0.5
    assert abs(float(draws.mean()) - mean) < 6 * np.sqrt(var / 150)


@pytest.mark.full
def test_fits_and_refits_under_one_seed_repeat(key, choice):
    again = nt.select_alpha(
        jax.random.key(0),
        model,
        AutoNormal,
        jnp.asarray(Y),
        alphas=ALPHAS,
        criterion=nt.alpha.safe_bayes(blocks=3),
        diagnostics=[nt.alpha.held_out(3), nt.alpha.loo()],
        **QUICK,
    )
    pd.testing.assert_frame_equal(nt.table(again), nt.table(choice))


@pytest.mark.full
def test_double_precision_and_pandas(key, choice):
    with enable_x64():
        again = nt.select_alpha(
            jax.random.key(0),
            model,
            AutoNormal,
            pd.Series(Y),
            alphas=ALPHAS,
            criterion=nt.alpha.safe_bayes(blocks=3),
            **QUICK,
        )
        assert again.fit.params["theta_auto_loc"].dtype == jnp.float64
    here, there = nt.table(again)["gibbs"], nt.table(choice)["gibbs"]
    np.testing.assert_allclose(here, there, rtol=0.02)


def test_the_plot(choice):
    left, right = nt.plots.plot_alpha(choice)
    assert left.get_legend_handles_labels()[1] == [f"chosen: {choice.alpha:.3g}"]
    assert len(right.lines[0].get_xdata()) == len(ALPHAS)
    assert (left.get_xlabel(), left.get_xscale()) == ("alpha", "log")
    assert all([left.get_ylabel(), right.get_xlabel(), right.get_ylabel()])
    with pytest.raises(ValueError, match="two axes"):
        nt.plots.plot_alpha(choice, axes=[left])


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"alphas": []}, ValueError, r"alphas must be.*or more, got"),
        ({"alphas": [0.0, 1.0]}, ValueError, "positive"),
        ({"alphas": [1.0, 0.5]}, ValueError, "increase"),
        (
            {"alphas": [0.5, np.nan]},
            ValueError,
            r"^alphas must be.*positive and finite",
        ),
        (
            {"criterion": nt.alpha.safe_bayes},
            TypeError,
            r"^a criterion is what.*call the function",
        ),
        (
            {"criterion": "safe_bayes"},
            TypeError,
            r"a criterion is what nt.alpha.*call the function",
        ),
        (
            {"criterion": nt.alpha.theory_default()},
            TypeError,
            "criterion = 0.5 is a power already",
        ),
        (
            {"groups": np.arange(59)},
            ValueError,
            r"groups must be a label for each of the 60 data, got shape \(59,\)",
        ),
        (
            {"groups": np.zeros(60)},
            ValueError,
            r"one label for all data.*which nothing is independent",
        ),
        (
            {"groups": [None, *range(59)]},
            ValueError,
            r"groups has 1 missing labels.*group of its own",
        ),
        (
            {"groups": np.arange(60), "block": 2},
            ValueError,
            r"groups and block are both given.*one series",
        ),
        (
            {"block": 31},
            ValueError,
            r"block must be an integer from 1 to 30, got 31.*of data at least",
        ),
        ({"block": "long"}, ValueError, "block must be a number of successive data"),
        (
            {"block": 2, "criterion": nt.alpha.safe_bayes(permutations=1)},
            ValueError,
            "permutations must be 0",
        ),
        ({"tolerance": 0.0}, ValueError, "tolerance"),
        ({"num_steps": 0}, ValueError, "num_steps"),
        pytest.param(
            {"num_steps": 5},
            ValueError,
            "to all data at alpha = .* have not converged within 0.05 nats",
            marks=pytest.mark.full,
        ),
        (
            {"diagnostics": [nt.alpha.safe_bayes()]},
            ValueError,
            r"is no diagnostic.*pass it as criterion",
        ),
        ({"num_samples": 2}, ValueError, "num_samples"),
        ({"plate": "m"}, ValueError, r"plate 'm'.*plates that do"),
    ],
)
def test_bad_options(key, options, error, match):
    with pytest.raises(error, match=match):
        nt.select_alpha(key, model, AutoNormal, jnp.asarray(Y), **options)


@pytest.mark.parametrize(
    ("method", "error", "match"),
    [
        (AutoNormal(model), TypeError, r"built already.*such as `lambda model"),
        (NUTS(model), TypeError, r"built already.*such as `lambda model"),
        ("nuts", TypeError, r"must be a callable.*such as `lambda model"),
        (
            lambda model: 3,
            TypeError,
            r"not a guide, kernel or OnlineVI.*such as `lambda model",
        ),
        (
            lambda model: AutoNormal(lambda y: None),
            ValueError,
            r"another model.*one that it gets",
        ),
        (AutoDelta, ValueError, r"has a point mass at.*take AutoNormal"),
    ],
)
def test_bad_methods(key, method, error, match):
    with pytest.raises(error, match=match):
        nt.select_alpha(key, model, method, jnp.asarray(Y), alphas=[1.0], num_steps=5)


def test_a_stream_has_no_posteriors_on_other_data(key):
    def online(model):
        return nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())

    with pytest.raises(ValueError, match=r"^the criteria.*take a guide.*or a kernel"):
        nt.select_alpha(
            key, model, online, jnp.asarray(Y), diagnostics=[nt.alpha.loo()]
        )


def test_tables_of_other_data():
    with pytest.raises(
        TypeError,
        match=r"^expected ArviZ.*got NoneType: pass a result through to_inference_data",
    ):
        nt.table(None)
    with pytest.raises(
        ValueError,
        match=r"^the data.*no group model_comparison or alpha_selection.*sandwich, sandwich",
    ):
        nt.table(nt.to_inference_data({"theta": np.zeros(30)}, model, Y))


def test_a_round_is_a_datum(key):
    """A stream of rows that are no data of the model, and an argument that is no data."""

    def online(model):
        return nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())

    def of_columns(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", y.shape[1]):
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y.sum(0))

    for columns in (5, 60):
        with pytest.raises(
            ValueError, match=r"a round is a row.*other arguments by functools.partial"
        ):
            nt.select_alpha(
                key, of_columns, online, np.tile(Y[:, None], (1, columns)), alphas=[1.0]
            )

    def with_a_prior(y, loc):
        theta = numpyro.sample("theta", dist.Normal(loc[0], 1.0))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    with pytest.raises(
        ValueError, match=r"^run needs arrays with.*leading ax.*model or the loss"
    ):
        nt.select_alpha(key, with_a_prior, online, Y, np.zeros(3), alphas=[1.0])


def test_a_loss_that_sums_before_it_weighs_is_refused(key):
    from numpyro.infer import TraceEnum_ELBO

    with pytest.raises(
        ValueError, match=r"TraceEnum_ELBO.*by nt.marginalize, and take"
    ):
        nt.select_alpha(key, model, AutoNormal, jnp.asarray(Y), loss=TraceEnum_ELBO())


@pytest.mark.full
def test_centred_hierarchies_are_fitted(key):
    """Their densities have no mode."""
    rng = np.random.default_rng(1)
    school = np.repeat(np.arange(8), 10)
    y = rng.normal(size=8)[school] + rng.normal(size=80)

    def hierarchy(school, y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = numpyro.sample("tau", dist.HalfNormal(2.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(5.0))
        with numpyro.plate("schools", 8):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
        with numpyro.plate("pupils", len(y)):
            numpyro.sample("y", dist.Normal(theta[school], sigma), obs=y)

    choice = nt.select_alpha(
        key,
        hierarchy,
        AutoNormal,
        school,
        y,
        alphas=[0.5, 1.0],
        criterion=nt.alpha.safe_bayes(blocks=2),
        plate="pupils",
    )
    alone = nt.fit_svi(key, hierarchy, AutoNormal, school, y, alpha=choice.alpha)
    assert choice.fit.convergence.converged
    assert choice.fit.elbo.value == pytest.approx(alone.elbo.value, abs=0.2)


def test_likelihoods_with_one_derivative_have_no_coverage(key):
    """A criterion that needs two says so; the report of the others says that coverage is not known."""

    def no_derivative(res, slope):
        raise TypeError("no second derivative")

    slope_of = jax.custom_vjp(lambda theta: 2.0 * theta)
    slope_of.defvjp(lambda theta: (2.0 * theta, None), no_derivative)
    square = jax.custom_vjp(jnp.square)
    square.defvjp(
        lambda theta: (jnp.square(theta), theta),
        lambda theta, slope: (slope * slope_of(theta),),
    )

    def squares(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 3.0))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(square(theta), 1.0), obs=y)

    task = Task(squares, key, (jnp.asarray(Y),), {})
    with pytest.raises(
        ValueError,
        match=r"JAX cannot differentiate the log-likelihood as often.*in forward mode",
    ):
        nt.alpha.magnitude().decide(key, task, np.ones(1), None)
    assert find_coverage(task) == (None, mock.ANY)
    assert "no second derivative" in find_coverage(task)[1]


@pytest.mark.parametrize("alpha", [0.0, -1.0, np.nan, np.inf])
def test_a_criterion_of_ones_own_names_a_power(alpha):
    criterion = Criterion(
        "mine", "risk", None, lambda *of_data: Decision(alpha, {}, {}, "")
    )
    message = rf"^mine names alpha = {alpha}, not a positive number: take another\.$"
    with pytest.raises(ValueError, match=message):
        nt.select_alpha(jax.random.key(0), model, AutoNormal, Y, criterion=criterion)
