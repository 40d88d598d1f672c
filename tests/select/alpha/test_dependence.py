"""Data in groups and series: known answers, brute force, and the signs that warn of dependence."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import enable_x64, tiered
from numpyro.infer.autoguide import AutoNormal
from scipy.stats import norm
from test_known_answers import KEY, heteroskedastic, location, normal_data, regression

import numpyro_tempered as nt
from numpyro_tempered.handlers.rows import DataRows
from numpyro_tempered.select.alpha.base import Task
from numpyro_tempered.select.alpha.bootstrap_fisher import bootstrap_fisher
from numpyro_tempered.select.alpha.dependence import (
    Dependence,
    bandwidth,
    read_dependence,
    resample_counts,
    se_of_sum,
    sum_of_dependent,
)
from numpyro_tempered.select.alpha.gpc import gpc
from numpyro_tempered.select.alpha.independence import (
    num_repeats,
    serial_ratio,
    warn_of_dependence,
)
from numpyro_tempered.select.alpha.lyddon import lyddon
from numpyro_tempered.select.alpha.magnitude import magnitude, magnitude_adjustment
from numpyro_tempered.select.alpha.safe_bayes import places
from numpyro_tempered.select.alpha.sandwich import estimate_of, sandwich

GROUPS = np.repeat(np.arange(50), 5)
COPIES = np.repeat(np.random.default_rng(0).normal(size=50), 5)

# Admissions and rejections of men and of women at Berkeley, 1973 (Bickel, Hammel and O'Connell 1975).
ADMISSIONS = {
    "A": ((512, 313), (89, 19)),
    "B": ((353, 207), (17, 8)),
    "C": ((120, 205), (202, 391)),
    "D": ((138, 279), (131, 244)),
    "E": ((53, 138), (94, 299)),
    "F": ((22, 351), (24, 317)),
}


def applicants():
    """Whether each is a woman, is admitted, and the department."""
    rows = [
        (woman, admitted, department)
        for department, counts in ADMISSIONS.items()
        for woman, (yes, no) in enumerate(counts)
        for admitted in [1] * yes + [0] * no
    ]
    women, admitted, departments = zip(*rows, strict=True)
    return np.array(women, float), np.array(admitted), np.array(departments)


def admission(woman, admitted):
    beta = numpyro.sample("beta", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    with numpyro.plate("n", len(admitted)):
        numpyro.sample(
            "admitted", dist.Bernoulli(logits=beta[0] + beta[1] * woman), obs=admitted
        )


def decide(criterion, model, *data, **options):
    return criterion.decide(
        KEY, Task(model, KEY, data, {}, **options), np.ones(1), None
    )


# Known answers.


@pytest.fixture(scope="module", autouse=True)
def in_double_precision():
    with enable_x64():
        yield


CRITERIA = {
    criterion.name: criterion
    for criterion in (magnitude(), lyddon(), bootstrap_fisher(), gpc())
}


@pytest.mark.full
@pytest.mark.parametrize("name", CRITERIA)
def test_copies_have_a_fifth_of_the_power(name):
    """Each draw five times over, in one group, counts once."""
    criterion = CRITERIA[name]
    one = decide(criterion, location, COPIES[::5])
    grouped = decide(criterion, location, COPIES, groups=GROUPS)
    ignored = decide(criterion, location, COPIES)
    exact = name in ("magnitude", "lyddon")
    # Resamples are others for other numbers of data; the prior counts less beside five copies.
    se = (
        0.0
        if exact
        else 4.0 * np.hypot(*(v.attrs["alpha_se_resampling"] for v in (one, grouped)))
    )
    assert abs(5.0 * grouped.alpha - one.alpha) <= 1e-9 + 5.0 * se
    assert 0.2 < grouped.alpha < 0.28
    assert ignored.alpha > 1.1
    if exact:
        np.testing.assert_allclose(
            grouped.attrs["alpha_se"], one.attrs["alpha_se"] / 5.0, rtol=1e-9
        )
    assert grouped.attrs["num_independent"] == 50
    assert "of data in 50 groups" in grouped.advice
    assert grouped.advice.endswith("so temper.")


@pytest.mark.full
def test_admissions_by_department():
    """Rows look independent one by one; departments differ."""
    woman, admitted, department = applicants()
    by_row = decide(magnitude(), admission, woman, admitted)
    assert len(admitted) == 4526
    assert by_row.alpha == pytest.approx(1.0, abs=1e-3)
    grouped = decide(magnitude(), admission, woman, admitted, groups=department)
    assert grouped.attrs["power_least"] == pytest.approx(0.0095, abs=5e-5)
    assert grouped.attrs["power_largest"] == pytest.approx(0.124, abs=5e-4)
    assert grouped.advice.endswith(
        "only 6 units are independent, so the power is a rough one."
    )


def brute_force_variance(scores, related):
    """Sum over all pairs of data, with the weight of each."""
    n = len(scores)
    return (
        sum(
            related(i, j) * np.outer(scores[i], scores[j])
            for i in range(n)
            for j in range(n)
        )
        / n
    )


LABELS = np.random.default_rng(1).integers(0, 9, 40)
RELATED = {
    "groups": (Dependence(40, LABELS), 0, lambda i, j: float(LABELS[i] == LABELS[j])),
    "block": (
        Dependence(40, None, 6),
        5,
        lambda i, j: max(0.0, 1.0 - abs(i - j) / 6.0),
    ),
    "auto": (
        Dependence(40, None, "auto"),
        3,
        lambda i, j: max(0.0, 1.0 - abs(i - j) / 4.0),
    ),
    "none": (Dependence(40), 0, lambda i, j: float(i == j)),
}


@pytest.mark.parametrize("kind", RELATED)
def test_sums_over_dependent_data(kind):
    dependence, lags, related = RELATED[kind]
    scores = np.random.default_rng(2).normal(size=(40, 2))
    sums = np.asarray(
        sum_of_dependent(dependence, jnp.asarray(scores), jnp.asarray(lags))
    )
    np.testing.assert_allclose(
        scores.T @ sums / 40, brute_force_variance(scores, related), atol=1e-12
    )


def test_the_bandwidth_is_that_of_andrews():
    rng = np.random.default_rng(3)
    series = rng.normal(size=(500, 2))
    for t in range(1, 500):
        series[t] += np.array([0.7, 0.3]) * series[t - 1]
    above = below = 0.0
    for column in series.T:
        r = column[1:] @ column[:-1] / (column @ column)
        variance = (column @ column) ** 2 * (1 - r**2) ** 2
        above += variance * 4 * r**2 / ((1 - r) ** 6 * (1 + r) ** 2)
        below += variance / (1 - r) ** 4
    want = int(1.5 * 1.1447 * (above / below * 500) ** (1 / 3))
    for unit in (1.0, 1e-3):
        assert (
            int(bandwidth(Dependence(500, None, "auto"), jnp.asarray(unit * series)))
            == want
            > 5
        )
    # Of a random walk no longer than a quarter of the data.
    walk = np.cumsum(rng.normal(size=(40, 1)), axis=0)
    assert int(bandwidth(Dependence(40, None, "auto"), jnp.asarray(walk))) == 10


@pytest.mark.parametrize("kind", tiered(["groups", "block"], unit=["groups"]))
def test_the_standard_error_is_that_of_the_jackknife(kind):
    """Brute force: derivatives by the counts of single data, summed over those that depend on each other."""
    x, y = heteroskedastic(40)
    related = RELATED[kind][2]
    options = {"groups": LABELS} if kind == "groups" else {"block": 6}
    verdict = decide(magnitude(), regression, x, y, **options)

    def power(counts):
        beta = np.linalg.solve((counts[:, None] * x).T @ x, x.T @ (counts * y))
        scores = x * (y - x @ beta)[:, None] / 0.25
        weights = np.array([[related(i, j) for j in range(40)] for i in range(40)])
        product = (counts[:, None] * scores).T @ weights @ scores
        curvature = (counts[:, None] * x).T @ x / 0.25
        return 2.0 / np.trace(np.linalg.solve(curvature, 0.5 * (product + product.T)))

    assert verdict.alpha == pytest.approx(power(np.ones(40)), rel=1e-9)
    step = 1e-5
    slopes = np.array(
        [(power(1 + step * e) - power(1 - step * e)) / (2 * step) for e in np.eye(40)]
    )
    variance = sum(
        related(i, j) * slopes[i] * slopes[j] for i in range(40) for j in range(40)
    )
    assert verdict.attrs["alpha_se"] == pytest.approx(np.sqrt(variance), rel=1e-5)


# Coverage of a series: a regression whose covariates and errors are autoregressive.


def series(rng, num_data, dim, coefficient):
    values = rng.normal(size=(num_data, dim))
    for t in range(1, num_data):
        values[t] = (
            coefficient * values[t - 1] + np.sqrt(1.0 - coefficient**2) * values[t]
        )
    return values


@pytest.mark.parametrize(
    ("num_data", "coefficient", "least"),
    tiered([(100, 0.6, 0.88), (400, 0.6, 0.92), (100, 0.0, 0.93)], unit=[]),
)
def test_intervals_of_a_series_cover(num_data, coefficient, least):
    """Nominal .95, 600 repetitions, at the power of the magnitude with the estimated bandwidth."""
    rng = np.random.default_rng(4)
    data = [
        (
            series(rng, num_data, 5, coefficient),
            series(rng, num_data, 1, coefficient)[:, 0],
        )
        for _ in range(600)
    ]
    x, y = (jnp.asarray(np.stack(part)) for part in zip(*data, strict=True))

    @jax.jit
    @jax.vmap
    def power(x, y):
        of_losses = sandwich(
            lambda beta: 0.5 * jnp.square(y - x @ beta),
            jnp.zeros(5),
            Dependence(num_data, None, "auto"),
        )
        sd = jnp.sqrt(jnp.diagonal(jnp.linalg.inv(of_losses.minimum.hessian)))
        return magnitude_adjustment(
            of_losses.curvature, of_losses.variance
        ), of_losses.minimum.point / sd

    alpha, z = jax.device_get(power(x, y))
    covers = np.mean(np.abs(z) * np.sqrt(alpha)[:, None] < 1.96)
    # The standard error is .005 at most.
    assert covers > least - 0.005
    # Untempered intervals of a series do not.
    assert coefficient == 0.0 or np.mean(np.abs(z) < 1.96) < 0.86


# Resamples and orders.


def test_resamples_are_of_whole_groups():
    counts = np.asarray(resample_counts(KEY, 400, Dependence(40, LABELS)))
    first = counts[:, np.unique(LABELS, return_index=True)[1]]
    np.testing.assert_array_equal(counts, first[:, LABELS])
    assert np.all(first.sum(axis=1) == 9)
    np.testing.assert_allclose(first.mean(axis=0), 1.0, atol=0.25)


def test_resamples_of_a_series_are_of_blocks():
    counts = np.asarray(resample_counts(KEY, 2000, Dependence(12, None, 4), 3))
    assert np.all(counts.sum(axis=1) == 12)
    # Three blocks of four, around the end: neighbours share three of four.
    covariance = np.cov(counts.T)
    np.testing.assert_allclose(counts.mean(axis=0), 1.0, atol=0.08)
    want = 3 * (np.array([4, 3, 2, 1, 0]) / 12 - (4 / 12) ** 2)
    shifts = [
        np.mean([covariance[i, (i + k) % 12] for i in range(12)]) for k in range(5)
    ]
    np.testing.assert_allclose(shifts, want, atol=0.05)


def test_safe_bayes_predicts_whole_groups():
    task = Task(location, KEY, (normal_data(1.0)[:40],), {}, groups=LABELS)
    weights = nt.alpha.safe_bayes(blocks=3).plan(KEY, task).weights
    for row in weights:
        # All of a group or nothing of it.
        assert all(len(set(row[label == LABELS])) == 1 for label in range(9))
    assert sorted({len(set(LABELS[row > 0])) for row in weights}) == [3, 6]
    (order,) = places(KEY, Dependence(3, np.array([1, 0, 1])), 0)
    np.testing.assert_array_equal(order, [0, 1, 0])
    (order,) = places(KEY, Dependence(40, None, 3), None)
    np.testing.assert_array_equal(order, np.arange(40))


def test_a_stream_counts_the_first_datum_of_each_group():
    """The loss of a later one is that of a posterior that has seen a part of its group."""
    labels = np.array([0, 0, 1, 1, 1, 2])
    grid = np.array([0.5, 1.0])
    orders = []

    def run(order):
        orders.append(order)
        losses = np.tile(np.arange(6.0), (2, 1)) * grid[:, None]
        return nt.online.Losses(losses, losses)

    verdict = nt.alpha.safe_bayes(permutations=0).stream(
        KEY, grid, Dependence(6, labels), run
    )
    np.testing.assert_array_equal(orders[0], np.arange(6))
    np.testing.assert_allclose(verdict.columns["criterion"], grid * (0.0 + 2.0 + 5.0))


def test_the_standard_error_of_a_sum():
    values = np.random.default_rng(5).normal(size=(3, 40))
    independent = se_of_sum(values, Dependence(40))
    np.testing.assert_allclose(
        independent, np.std(values, axis=1, ddof=1) * np.sqrt(40), rtol=1e-12
    )
    centred = values - values.mean(axis=1, keepdims=True)
    sums = np.stack([centred[:, label == LABELS].sum(axis=1) for label in range(9)])
    want = np.sqrt((sums**2).sum(axis=0) * 9 / 8)
    np.testing.assert_allclose(
        se_of_sum(values, Dependence(40, LABELS)), want, rtol=1e-12
    )


# Powers by parameter.


def test_the_power_of_each_parameter_is_that_of_its_interval():
    x, y = heteroskedastic()
    table = nt.alpha.calibrated_powers(KEY, regression, x, y)
    inverse = np.linalg.inv(x.T @ x)
    beta = inverse @ x.T @ y
    scores = x * (y - x @ beta)[:, None]
    samples = np.diagonal(inverse @ scores.T @ scores @ inverse)
    model = 0.25 * np.diagonal(inverse)
    assert table.index.tolist() == ["beta[0]", "beta[1]"]
    np.testing.assert_allclose(table["estimate"], beta, rtol=1e-8)
    np.testing.assert_allclose(table["sd"], np.sqrt(model), rtol=1e-8)
    np.testing.assert_allclose(table["sd_sandwich"], np.sqrt(samples), rtol=1e-8)
    np.testing.assert_allclose(table["power"], model / samples, rtol=1e-8)
    # The slope has the greater noise.
    assert table["coverage"]["beta[1]"] < table["coverage"]["beta[0]"] < 0.9


@pytest.mark.full
def test_powers_do_not_depend_on_how_a_parameter_is_written():
    """A scale has one power, whether it is constrained by its support or written as a logarithm."""

    def by_scale(y):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 3.0))
        numpyro.sample("y", dist.Normal(0.0, scale), obs=y)

    def by_log(y):
        log_scale = numpyro.sample("log_scale", dist.Normal(0.0, 3.0))
        numpyro.sample("y", dist.Normal(0.0, jnp.exp(log_scale)), obs=y)

    y = np.random.default_rng(6).standard_t(5, 300)
    tables = [nt.alpha.calibrated_powers(KEY, model, y) for model in (by_scale, by_log)]
    np.testing.assert_allclose(
        tables[0]["power"], tables[1]["power"].to_numpy(), rtol=1e-6
    )
    # The score of log scale is y²/s² - 1, of variance mean(y⁴)/s⁴ - 1, where the model has 2.
    assert tables[0]["power"].item() == pytest.approx(
        2.0 / (np.mean(y**4) / np.mean(y**2) ** 2 - 1.0), rel=1e-6
    )
    assert tables[0]["estimate"].item() == pytest.approx(
        np.sqrt(np.mean(y**2)), rel=1e-6
    )


@pytest.mark.full
def test_constant_entries_have_no_power():
    def correlated(y):
        factor = numpyro.sample("factor", dist.LKJCholesky(2, 1.0))
        numpyro.sample("y", dist.MultivariateNormal(scale_tril=factor), obs=y)

    y = np.random.default_rng(7).multivariate_normal(
        [0.0, 0.0], [[1.0, 0.5], [0.5, 1.0]], 80
    )
    table = nt.alpha.calibrated_powers(KEY, correlated, y)
    assert table.index.tolist() == ["factor[1, 0]", "factor[1, 1]"]
    assert table["power"].to_numpy() == pytest.approx(table["power"].iloc[0])


# Signs.


def silent(task):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_dependence(task.rows, estimate_of(task).influence)


def test_copies_are_noticed():
    with pytest.warns(
        nt.alpha.DependenceWarning,
        match=r"200 of 250 rows repeat others exactly.*they are not",
    ):
        warn_of_dependence(Task(location, KEY, (COPIES,), {}).rows, None)
    silent(Task(location, KEY, (COPIES,), {}, groups=GROUPS))


def test_copies_of_vectors_that_the_model_holds_are_noticed():
    rows = np.repeat(np.random.default_rng(8).normal(size=(20, 3)), 2, axis=0)

    def model():
        mean = numpyro.sample("mean", dist.Normal(0.0, 5.0).expand([3]).to_event(1))
        with numpyro.plate("n", len(rows)):
            numpyro.sample("y", dist.MultivariateNormal(mean, jnp.eye(3)), obs=rows)

    with pytest.warns(
        nt.alpha.DependenceWarning,
        match=r"20 of 40 rows repeat others exactly.*they are not",
    ):
        warn_of_dependence(Task(model, KEY, (), {}).rows, None)


@pytest.mark.parametrize(
    ("rows", "repeats"),
    [
        (np.random.default_rng(8).normal(size=(2000, 1)), 0),
        # Rounded, counted and coded values repeat by chance.
        (np.round(np.random.default_rng(8).normal(size=(250, 1)), 1), 0),
        (np.round(np.random.default_rng(8).normal(70.0, 10.0, size=(300, 2)), 1), 0),
        (np.random.default_rng(8).poisson(3.0, size=(200, 2)).astype(float), 0),
        (np.column_stack([applicants()[0], applicants()[1]]), 0),
        # A join that doubled a tenth of the rows.
        (np.random.default_rng(8).normal(size=(200, 3))[np.r_[:200, :20]], 20),
        (np.random.default_rng(8).normal(size=(200, 3))[np.r_[:200, :4]], 0),
        (
            np.column_stack(
                [
                    np.repeat(np.random.default_rng(8).normal(size=60), 2),
                    np.tile([0.0, 1.0], 60),
                ]
            ),
            0,
        ),
        (
            np.random.default_rng(8)
            .normal(size=(300, 1))
            .astype(np.float32)[np.arange(900) % 300],
            600,
        ),
        # Five pairs are as many as it takes, if they are a twentieth.
        (np.random.default_rng(8).normal(size=(95, 3))[np.r_[:95, :5]], 5),
        (np.random.default_rng(8).normal(size=(96, 3))[np.r_[:96, :5]], 0),
        (np.random.default_rng(8).normal(size=(40, 3))[np.r_[:40, :4]], 0),
        # Zeros where nothing was measured.
        (
            np.random.default_rng(8).normal(size=(200, 2))
            * (np.arange(200) < 120)[:, None],
            0,
        ),
    ],
)
def test_repeats_that_are_no_chance(rows, repeats):
    assert num_repeats([rows]) == repeats


def test_a_series_is_noticed_and_independent_rows_are_not():
    rng = np.random.default_rng(9)
    ratios = [
        serial_ratio(rng.standard_t(3, size=(n, 4)))
        for n in (30, 100, 1000)
        for _ in range(300)
    ]
    assert sum(np.any((z > 4.5) & (ratio > 1.2)) for ratio, z in ratios) == 0
    x = np.sort(rng.normal(size=400))
    # Rows sorted by a covariate whose noise grows with it.
    ratio, z = serial_ratio(
        np.column_stack([np.ones(400), x]) * (np.abs(x) * rng.normal(size=400))[:, None]
    )
    assert np.all(z < 4.0)
    ratio, z = serial_ratio(series(rng, 400, 1, 0.6))
    assert ratio[0] > 2.0
    assert z[0] > 4.5
    with pytest.warns(
        nt.alpha.DependenceWarning,
        match=r'^the scores.*For a series take block="auto".*they are not',
    ):
        nt.alpha.calibrated_powers(KEY, location, series(rng, 200, 1, 0.8)[:, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"groups": ["a"] * 3, "block": None},
            r"one label for all data.*which nothing is independent",
        ),
        (
            {"groups": [1.0, np.nan, 2.0], "block": None},
            r"^groups has.*1 missing labels.*group of its own",
        ),
        (
            {"groups": None, "block": 0},
            r"block must be an integer from 1 to 1.*of data at least",
        ),
        (
            {"groups": None, "block": "weekly"},
            r'^block must be.*a number of successive data or "auto"',
        ),
    ],
)
def test_what_is_no_dependence(options, message):
    with pytest.raises(ValueError, match=message):
        read_dependence(**options, rows=DataRows(3, -1, 3))


def test_labels_of_any_kind():
    for labels in (
        ["b", "a", "b"],
        [7, 3, 7],
        np.array([2.5, 1.5, 2.5]),
        np.array(["y", "x", "y"], object),
    ):
        np.testing.assert_array_equal(
            read_dependence(labels, None, DataRows(3, -1, 3)).labels, [1, 0, 1]
        )


def test_few_groups_are_refused():
    x, y = heteroskedastic(40)
    with pytest.raises(
        ValueError,
        match="3 groups do not tell how 2 latent dimensions vary: at least 4",
    ):
        decide(magnitude(), regression, x, y, groups=np.arange(40) % 3)
    # Four are enough.
    assert (
        decide(magnitude(), regression, x, y, groups=np.arange(40) % 4).alpha < np.inf
    )


@pytest.mark.full
def test_risk_does_not_stand_alone():
    """The default criterion keeps alpha = 1 on data of a greater variance, and says what intervals cover."""
    y = 2.0 * np.random.default_rng(10).normal(size=80)
    covers = 2.0 * norm.cdf(1.96 / np.std(y)) - 1.0
    choice = nt.select_alpha(KEY, location, AutoNormal, y, alphas=[0.25, 1.0])
    assert choice.alpha == 1.0
    assert "no need to temper for the sake of the risk" in choice.advice
    assert covers < 0.8
    assert (
        f"95% intervals of the exact posterior there cover about {covers:.2f}"
        in choice.advice
    )
    assert f"for coverage take alpha = {1.0 / np.var(y):.3g}" in choice.advice
    assert choice.data.attrs["advice"] == choice.advice
    table = nt.table(choice, "calibrated_powers")
    assert table.index.tolist() == ["theta"]
    assert table["power"].item() == pytest.approx(1.0 / np.var(y), rel=1e-6)
    assert table["coverage"].item() == table["coverage_untempered"].item()
