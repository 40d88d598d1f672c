"""Model comparison by the penalised ELBO."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.autoguide import AutoDelta, AutoNormal
from oracles import gaussian_kl

import numpyro_tempered as nt
from numpyro_tempered.handlers.likelihood import get_trace
from numpyro_tempered.infer.elbo import TemperedELBO, improper_sites
from numpyro_tempered.infer.svi import finish
from numpyro_tempered.select.compare import _check_certifiable

ALPHA, PRIOR_SD, NOISE_SD, NUM_DATA = 0.5, 2.0, 1.5, 24
COLUMNS = [
    "elbo",
    "se",
    "log_prior",
    "criterion",
    "rank",
    "weight",
    "expected_log_lik",
    "kl",
]


def model(x, y=None):
    num_features = x.shape[1]
    theta = numpyro.sample(
        "theta", dist.Normal(0.0, PRIOR_SD).expand([num_features]).to_event(1)
    )
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(x @ theta, NOISE_SD), obs=y)


def log_evidence(x, y, alpha):
    """The log of the integral of L^alpha against the prior, for linear regression."""
    n, d = x.shape
    precision = alpha * x.T @ x / NOISE_SD**2 + np.eye(d) / PRIOR_SD**2
    linear = alpha * x.T @ y / NOISE_SD**2
    return (
        -0.5 * alpha * (n * math.log(2.0 * math.pi * NOISE_SD**2) + y @ y / NOISE_SD**2)
        - d * math.log(PRIOR_SD)
        - 0.5 * np.linalg.slogdet(precision)[1]
        + 0.5 * linear @ np.linalg.solve(precision, linear)
    )


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(7)
    # Orthogonal features: the mean-field guide then contains the exact posterior.
    x = np.linalg.qr(rng.normal(size=(NUM_DATA, 3)))[0] * math.sqrt(NUM_DATA)
    return x, x[:, :2] @ np.array([1.5, -1.5]) + NOISE_SD * rng.normal(size=NUM_DATA)


def normal_guide(x, y=None):
    loc, scale = numpyro.param("loc"), numpyro.param("scale")
    numpyro.sample("theta", dist.Normal(loc, scale).to_event(1))


def point_guide(x, y=None):
    numpyro.sample("theta", dist.Delta(numpyro.param("loc"), event_dim=1))


def padded(x, k):
    """The first k features, the others 0: the evidence is the same, and all models share their programs."""
    return np.where(np.arange(x.shape[1]) < k, x, 0.0)


def params_at(x, y, k):
    """Of a run that ended near the optimum."""
    precision = (
        np.where(np.arange(x.shape[1]) < k, ALPHA * NUM_DATA / NOISE_SD**2, 0.0)
        + 1.0 / PRIOR_SD**2
    )
    loc = ALPHA * padded(x, k).T @ y / NOISE_SD**2 / precision + 0.05 / np.sqrt(
        precision
    )
    return {"loc": np.float32(loc), "scale": np.float32(1.05 / np.sqrt(precision))}


def fit_at(guide, x, y, k):
    """What fit_svi returns of such a run; its loop is most of the compilation."""
    keys, args = (
        jax.random.split(jax.random.key(k)),
        (jnp.asarray(padded(x, k)), jnp.asarray(y)),
    )
    params = {name: jnp.asarray(value) for name, value in params_at(x, y, k).items()}
    return finish(
        keys,
        nt.temper(model, alpha=ALPHA),
        guide,
        params,
        jnp.zeros(3),
        args,
        kwargs={},
        num_particles=1000,
    )


def beside(fit, x, y, k):
    """The fit of another model, its ELBO in closed form."""
    params = params_at(x, y, k)
    loc, scale = (np.asarray(params[name], np.float64) for name in ("loc", "scale"))
    squares = np.sum((y - padded(x, k) @ loc) ** 2) + np.sum(
        padded(x, k) ** 2 @ scale**2
    )
    log_lik = (
        -0.5 * NUM_DATA * math.log(2.0 * math.pi * NOISE_SD**2)
        - 0.5 * squares / NOISE_SD**2
    )
    kl = gaussian_kl(loc, scale, 0.0, PRIOR_SD).sum()
    elbo = TemperedELBO(ALPHA * log_lik - kl, 0.01 * k, log_lik, kl)
    return fit._replace(
        params=params, args=(jnp.asarray(padded(x, k)), fit.args[1]), elbo=elbo
    )


@pytest.fixture(
    scope="module", params=["parameters", pytest.param("svi", marks=pytest.mark.full)]
)
def fits(data, request):
    x, y = data
    if request.param == "parameters":
        fit = fit_at(normal_guide, x, y, 2)
        return {1: beside(fit, x, y, 1), 2: fit, 3: beside(fit, x, y, 3)}
    return {
        k: nt.fit_svi(
            jax.random.key(k),
            model,
            AutoNormal,
            jnp.asarray(x[:, :k]),
            jnp.asarray(y),
            alpha=ALPHA,
        )
        for k in (1, 2, 3)
    }


@pytest.fixture(scope="module")
def comparison(fits):
    return nt.compare(fits, num_samples=50)


def columns(data):
    return {name: np.asarray(data["model_comparison"][name]) for name in COLUMNS}


def test_group_has_these_columns_and_dims(comparison):
    group = comparison["model_comparison"]
    assert list(group.data_vars) == COLUMNS
    assert {name: group[name].dims for name in COLUMNS} == dict.fromkeys(
        COLUMNS, ("model",)
    )
    np.testing.assert_array_equal(group["model"], [1, 2, 3])
    assert group.attrs == {"alpha": ALPHA, "selected": 2}


def test_columns_are_those_of_the_fits(comparison, fits):
    found = columns(comparison)
    for name, field in {
        "elbo": "value",
        "se": "se",
        "expected_log_lik": "expected_log_lik",
        "kl": "kl",
    }.items():
        np.testing.assert_array_equal(
            found[name], [getattr(fit.elbo, field) for fit in fits.values()]
        )


def test_certificates_are_those_of_the_elbos_and_their_prior(fits):
    log_p0 = nt.bounds.known_density(-70.0)
    data = nt.compare(fits, nt.dyadic, log_p0=log_p0, delta=0.1, num_samples=2)
    group, elbos = data["model_comparison"], [fit.elbo for fit in fits.values()]
    expected = nt.bounds.tempered_certificate(
        np.array([elbo.value for elbo in elbos]),
        log_p0,
        NUM_DATA,
        alpha=ALPHA,
        delta=0.1,
        elbo_se=np.array([elbo.se for elbo in elbos]),
        log_prior=np.log([0.5, 0.25, 0.125]),
    )
    np.testing.assert_allclose(group["certificate"], expected.value, rtol=1e-12)
    best = int(np.argmin(np.asarray(group["rank"])))
    assert group.attrs["certificate"] == float(expected.value[best])
    assert group.attrs["certificate_delta"] == 0.1
    assert group.attrs["certificate_log_p0"] == log_p0.source


def test_elbo_is_the_closed_form_log_evidence(comparison, data):
    x, y = data
    found = columns(comparison)
    exact = np.array([log_evidence(x[:, :k], y, ALPHA) for k in (1, 2, 3)])
    # Adam leaves at most a few hundredths of a nat; the constants checked here are worth tens.
    assert np.all(found["elbo"] <= exact + 4.0 * found["se"])
    assert np.all(found["elbo"] >= exact - 4.0 * found["se"] - 0.05)
    assert np.all(found["se"] < 0.1)


def test_elbo_is_alpha_log_lik_minus_kl(comparison):
    found = columns(comparison)
    np.testing.assert_allclose(
        found["elbo"], ALPHA * found["expected_log_lik"] - found["kl"], atol=1e-3
    )


def test_criterion_rank_and_weight_follow_from_elbo_and_prior(fits):
    log_prior = {3: math.log(0.6), 1: math.log(0.1), 2: math.log(0.2)}
    found = columns(nt.compare(fits, log_prior, num_samples=2))
    np.testing.assert_allclose(found["log_prior"], np.log([0.1, 0.2, 0.6]), rtol=1e-12)
    np.testing.assert_allclose(
        found["criterion"], found["elbo"] + found["log_prior"], rtol=1e-12
    )
    odds = np.exp(found["criterion"] - found["criterion"][1])
    np.testing.assert_allclose(found["weight"], odds / odds.sum(), rtol=1e-10)
    np.testing.assert_array_equal(
        np.argsort(found["rank"]), np.argsort(-found["criterion"])
    )


def test_weights_of_distant_models_do_not_overflow(fits):
    elbo = fits[1].elbo
    distant = {
        "near": fits[1]._replace(elbo=elbo._replace(value=-1e5)),
        "far": fits[1]._replace(elbo=elbo._replace(value=-2e5)),
    }
    np.testing.assert_array_equal(
        columns(nt.compare(distant, num_samples=2))["weight"], [1.0, 0.0]
    )


def test_log_prior_is_uniform_by_default(comparison):
    np.testing.assert_allclose(
        columns(comparison)["log_prior"], -math.log(3.0), rtol=1e-12
    )


def test_log_prior_can_change_the_selected_model(fits):
    # Weights may sum to less than 1.
    against = nt.compare(fits, {1: -1.0, 2: -500.0, 3: -500.0}, num_samples=2)
    assert against.attrs["selected"] == 1


@pytest.mark.parametrize(
    ("names", "orders"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([np.int64(2), np.int64(5)], [2, 5]),
        (["line", "parabola"], [1, 2]),
        ([0, 1], [1, 2]),
        ([True, "b"], [1, 2]),
    ],
)
def test_dyadic_takes_positive_integers_for_k_and_else_counts(names, orders):
    weights = nt.dyadic(names)
    assert list(weights) == names
    np.testing.assert_allclose(
        list(weights.values()), [-k * math.log(2.0) for k in orders], rtol=1e-14
    )


def test_dyadic_is_a_log_prior(fits):
    chosen = {k: fits[k] for k in (3, 1)}
    np.testing.assert_allclose(
        columns(nt.compare(chosen, nt.dyadic, num_samples=2))["log_prior"],
        np.log([1 / 8, 1 / 2]),
        rtol=1e-12,
    )


@pytest.mark.parametrize(
    ("log_prior", "message"),
    [
        (
            {1: math.log(0.5), 2: -math.inf, 3: math.log(0.5)},
            r"must be finite.*of positive weights, got",
        ),
        ({1: math.nan, 2: -1.0, 3: -2.0}, r"must be finite.*of positive weights, got"),
        # b_K where log b_K belongs.
        ({1: 0.5, 2: 0.25, 3: 0.125}, r"^the prior weights.*sum to 4.0.*logarithms"),
        ({1: -1.0, 2: -2.0}, r"log_prior has models \['1', '2'\].*the fits are"),
        ({1: -2.0, 2: -2.0, 3: -2.0, 4: -2.0}, r"the fits are \['1', '2', '3'\]"),
        (lambda names: {names[0]: 0.0}, r"log_prior has models \['1'\].*the fits are"),
    ],
)
def test_a_wrong_log_prior_is_refused(fits, log_prior, message):
    with pytest.raises(ValueError, match=message):
        nt.compare(fits, log_prior)


def other_observed(fit):
    return {"y": fit.observed["y"].at[3].add(1e-3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda fit: fit._replace(observed=other_observed(fit)),
            r"values of site 'y' differ.*the same data",
        ),
        (
            lambda fit: fit._replace(observed={"y": fit.observed["y"][:-1]}),
            "values of site 'y' differ",
        ),
        (
            lambda fit: fit._replace(observed={"z": fit.observed["y"]}),
            r"observes \['y'\].*\['z'\]",
        ),
        (
            lambda fit: fit._replace(alpha=1.0),
            r"alpha 0.5 and fits.'second'. 1.0.*fit at one alpha",
        ),
        (
            lambda fit: fit._replace(alpha={"y": 0.5}),
            r"alpha 0.5 and fits.'second'. {'y': 0.5}.*one alpha",
        ),
    ],
)
def test_fits_of_other_data_or_alpha_are_refused(fits, change, message):
    with pytest.raises(ValueError, match=message):
        nt.compare({"first": fits[1], "second": change(fits[2])})


class Known(NamedTuple):
    """A fit of a user's own, which knows its data by numbers alone."""

    numbers: dict
    alpha = ALPHA
    converged = True

    elbo = nt.results.TemperedELBO(-3.0, 0.0, -4.0, 1.0)

    def summarise_data(self):
        return nt.results.DataSummary(numbers=self.numbers)


@pytest.mark.parametrize(
    ("name", "size"),
    # A mean near 0 has the rounding of the others.
    [
        ("count", 1000.0),
        ("means", np.array([7.0, 0.0])),
        ("means", np.array([0.0, 7.0])),
    ],
)
@pytest.mark.parametrize("unit", [1.0, -1e-9])
def test_numbers_of_data_differ_where_rounding_does_not_explain_it(name, size, unit):
    numbers = {"count": unit * np.array(1000.0), "means": unit * np.array([0.01, -7.0])}

    def off_by(share):
        return Known(numbers | {name: numbers[name] + share * unit * size})

    assert (
        nt.compare({"one": off_by(0.0), "two": off_by(1e-5)}).attrs["selected"] == "one"
    )
    with pytest.raises(
        ValueError, match=f"the {name} differ between fits.'one'. .* and fits.'two'."
    ):
        nt.compare({"one": off_by(0.0), "two": off_by(1e-3)})


def test_missing_values_in_the_same_places_are_the_same_data(fits):
    gap = {"y": fits[1].observed["y"].at[0].set(jnp.nan)}
    same = nt.compare(
        {k: fits[k]._replace(observed=gap) for k in (1, 2)}, num_samples=2
    )
    assert same.attrs["selected"] == 2


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match=r"^compare needs.*at least one fit"):
        nt.compare({})


def test_what_is_not_a_fit_is_refused(fits):
    with pytest.raises(
        TypeError, match=r"fits\['params'\] is a dict, which has no ELBO"
    ):
        nt.compare({"fit": fits[1], "params": fits[1].params})


@pytest.mark.parametrize("fitted", tiered([False, True], unit=[False]))
def test_a_point_guide_is_refused(data, fitted):
    x, y = data
    if fitted:
        point = nt.fit_svi(
            jax.random.key(0),
            model,
            AutoDelta,
            jnp.asarray(x),
            jnp.asarray(y),
            num_steps=5,
            optim=numpyro.optim.Adam(0.05),
        )
    else:
        point = fit_at(point_guide, x, y, 3)
    with pytest.raises(
        ValueError,
        match=r"fits\['map'\] has an ELBO of -inf.*AutoDelta.*take AutoNormal, say",
    ):
        nt.compare({"map": point})


def test_the_groups_are_those_of_the_selected_fit(comparison, fits):
    best = nt.to_inference_data(fits[2], num_samples=50)
    for name in (
        "posterior",
        "untempered_log_likelihood",
        "observed_data",
        "variational",
    ):
        found, expected = comparison[name], best[name]
        assert set(found.data_vars) == set(expected.data_vars)
        for variable in expected.data_vars:
            np.testing.assert_array_equal(found[variable], expected[variable])
    assert comparison["posterior"]["theta"].shape == (1, 50, fits[2].args[0].shape[1])


def test_attributes_name_the_selection_and_alpha(comparison, fits):
    assert comparison.attrs["selected"] == 2
    assert comparison.attrs["alpha"] == ALPHA
    assert comparison.attrs["elbo"] == fits[2].elbo.value


def test_table_is_sorted_by_rank(comparison):
    table = nt.table(comparison)
    assert isinstance(table, pd.DataFrame)
    assert list(table.columns) == COLUMNS
    assert list(table["rank"]) == [0, 1, 2]
    assert table.index.name == "model"
    # The order in which the models were given is another.
    assert list(table.index) != [1, 2, 3]
    assert np.all(np.diff(table["criterion"]) < 0)


def location(y, prior):
    theta = numpyro.sample("theta", prior)
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(jnp.sum(theta), 1.0), obs=y)


PRIORS = {
    "flat": dist.ImproperUniform(constraints.real, (), ()),
    "masked": dist.Normal(0.0, 1.0).mask(False),
    "of the logarithm": dist.TransformedDistribution(
        dist.ImproperUniform(constraints.real, (), ()), dist.transforms.ExpTransform()
    ),
    "one entry": dist.Normal(0.0, 1.0)
    .expand([2])
    .mask(np.array([True, False]))
    .to_event(1),
    "proper": dist.Normal(0.0, 1.0).mask(np.array(True)),
}


@pytest.mark.parametrize("name", PRIORS)
def test_improper_priors_are_found(name):
    values = {"theta": jnp.zeros(PRIORS[name].event_shape)}
    trace = get_trace(
        handlers.substitute(location, values), (np.ones(6), PRIORS[name]), {}
    )
    assert improper_sites(trace) == (() if name == "proper" else ("theta",))


EARLY = nt.results.Convergence(False, 2.0, 2.0, 0.0, 2.0, 0.05, 100)


def test_improper_priors_and_early_ends_are_refused(fits):
    # By its arbitrary constant a flat prior would win.
    flat = fits[2]._replace(elbo=fits[2].elbo._replace(improper=("theta",)))
    with pytest.raises(
        ValueError,
        match=r"fits\['flat'\] has improper priors, of \['theta'\].*the place of",
    ):
        nt.compare({"flat": flat, "proper": fits[2]})
    early = {"early": fits[2]._replace(convergence=EARLY)}
    assert early["early"].converged is False
    with pytest.raises(
        ValueError,
        match=r"fits\['early'\] has not converged: .* unconverged=\['early'\]",
    ):
        nt.compare(early)
    comparison = nt.compare(early, unconverged=["early"], num_samples=50)
    assert comparison.attrs["selected"] == "early"
    assert int(comparison.attrs["converged"]) == 0


@pytest.mark.full
def test_fits_say_that_a_prior_is_flat_and_that_the_loss_still_fell():
    y = np.full(6, 100.0, np.float32)
    with pytest.warns(UserWarning, match="still fell"):
        fit = nt.fit_svi(
            jax.random.key(0),
            location,
            AutoNormal,
            y,
            PRIORS["flat"],
            num_steps=300,
            num_particles=2,
            optim=numpyro.optim.Adam(0.05),
        )
    assert fit.elbo.improper == ("theta",)
    assert fit.convergence.fall > 1.0


def certified(y, *, also=lambda: None, masked=False):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    also()
    with numpyro.plate("n", 4):
        fn = dist.Normal(theta, 1.0)
        numpyro.sample("y", fn.mask(np.arange(4) < 2) if masked else fn, obs=y)


def with_scale(y):
    with handlers.scale(scale=2.0):
        certified(y)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            with_scale,
            "^the model of fits\\['a'\\] has a scale beside alpha at \\['y'\\], and certificates are for",
        ),
        (
            lambda y: certified(y, also=lambda: numpyro.factor("f", 1.0)),
            "^'f' of the model of fits\\['a'\\] is a factor",
        ),
        (
            lambda y: certified(y, also=lambda: numpyro.param("w", 1.0)),
            "^the model of fits\\['a'\\] has params \\['w'\\], chosen by the data, and a certificate needs a",
        ),
        (
            nt.robust(certified, 0.3, unit=1.0),
            "^the model of fits\\['a'\\] has divergences at \\['y'\\], and certificates are for",
        ),
    ],
)
def test_what_is_no_tempered_density_has_no_certificate(model, words):
    y = np.arange(4.0)
    with pytest.raises(ValueError, match=words + ".*leave out log_p0\\.$"):
        _check_certifiable("a", get_trace(handlers.seed(model, 0), (y,), {}), {"y": y})


def test_the_number_of_data_is_read_where_it_is_clear():
    def of(model, observed):
        return _check_certifiable(
            "a", get_trace(handlers.seed(model, 0), (observed,), {}), {"y": observed}
        )

    y = np.arange(4.0)
    assert of(certified, y) == 4
    assert of(lambda y: certified(y, masked=True), y) == 2
    assert of(certified, np.array([1.0, np.nan, 2.0, 3.0])) is None
    assert (
        of(
            lambda y: numpyro.sample(
                "y", dist.Normal(0.0, 1.0).expand([4]).to_event(1), obs=y
            ),
            y,
        )
        is None
    )
    assert (
        of(lambda y: numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y), np.ones((2, 2)))
        is None
    )
