"""The implicit step, against fixed points and minimisers found by SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import enable_x64, tiered
from scipy.optimize import minimize, root
from scipy.special import expit, gammaln

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField
from numpyro_tempered.online.rules import rvga

pytestmark = pytest.mark.usefixtures("strict")

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(20)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
LOGISTIC = nt.expectations.logistic()
RVGA = nt.online.rvga()


def standard(kind, d, dtype=None):
    zeros = np.zeros(d, dtype)
    return {
        "MeanField": lambda: MeanField(zeros, np.ones(d, dtype)),
        "FullRank": lambda: FullRank(zeros, np.eye(d, dtype=dtype)),
        "LowRank": lambda: LowRank(zeros, np.ones(d, dtype), np.zeros((d, d), dtype)),
    }[kind]()


def covariance_of(q):
    if isinstance(q, MeanField):
        return np.diag(np.asarray(q.scale) ** 2)
    if isinstance(q, FullRank):
        return np.asarray(q.factor) @ np.asarray(q.factor).T
    factor = np.asarray(q.precision_factor)
    return np.linalg.inv(np.diag(np.asarray(q.precision_diag)) + factor @ factor.T)


def logistic_fixed_points(x, y, *, rate=1.0, keep=1.0, pull=0.0, diagonal=False):
    """The posterior after each row by its fixed-point equations, and the losses at the mean before it.

    Before a row the natural parameters are ``keep`` times those there are plus ``pull`` times those of the prior.
    """
    mean, precision = np.zeros(x.shape[1]), np.eye(x.shape[1])
    losses = []
    for row, label in zip(x, y, strict=True):
        losses.append(np.logaddexp(0.0, -label * mean @ row))
        force = keep * precision @ mean
        precision = keep * precision + pull * np.eye(x.shape[1])
        covariance = np.linalg.inv(precision)
        mean = covariance @ force

        def spread(curvature, precision=precision, row=row):
            added = (
                rate * curvature * (np.diag(row**2) if diagonal else np.outer(row, row))
            )
            return precision + added

        def residuals(
            v, row=row, label=label, mean=mean, covariance=covariance, spread=spread
        ):
            s = np.sqrt(row @ np.linalg.inv(spread(np.exp(v[1]))) @ row)
            p = expit(-label * (v[0] + s * NODES))
            slope, curvature = -label * WEIGHTS @ p, WEIGHTS @ (-label * p * NODES) / s
            error = v[0] - row @ mean + rate * row @ covariance @ row * slope
            return error, np.log(curvature) - v[1], slope, curvature

        solution = root(lambda v: residuals(v)[:2], [row @ mean, -2.0], tol=1e-13).x
        *errors, slope, curvature = residuals(solution)
        assert np.abs(errors).max() < 1e-9
        mean, precision = mean - rate * covariance @ row * slope, spread(curvature)
    return mean, np.linalg.inv(precision), np.array(losses)


@pytest.fixture(scope="module")
def stream():
    rng = np.random.default_rng(0)
    x = 2.0 * rng.normal(size=(40, 3))
    return x, np.where(x[:, 0] + rng.normal(size=40) > 0, 1.0, -1.0)


@pytest.mark.parametrize(
    "kind", tiered(["MeanField", "FullRank", "LowRank"], unit=["FullRank"])
)
def test_each_round_ends_at_its_fixed_point(x64, stream, kind):
    state, losses = nt.online.run(RVGA, LOGISTIC, RVGA.init(standard(kind, 3)), *stream)
    mean, covariance, expected = logistic_fixed_points(
        *stream, diagonal=kind == "MeanField"
    )
    np.testing.assert_allclose(state.posterior.loc, mean, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(
        covariance_of(state.posterior), covariance, rtol=1e-8, atol=1e-8
    )
    np.testing.assert_allclose(losses.at_mean, expected, rtol=1e-8, atol=1e-8)
    assert int(state.rejected) == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["MeanField", "FullRank"])
def test_a_step_size_and_forgetting_weigh_the_datum_against_the_forgotten_posterior(
    x64, stream, kind
):
    rule = nt.online.rvga(0.3, forget=nt.online.power(0.9))
    state, _ = nt.online.run(rule, LOGISTIC, rule.init(standard(kind, 3)), *stream)
    mean, covariance, _ = logistic_fixed_points(
        *stream, rate=0.3, keep=0.9, diagonal=kind == "MeanField"
    )
    np.testing.assert_allclose(state.posterior.loc, mean, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(
        covariance_of(state.posterior), covariance, rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("kind", ["MeanField", "FullRank"])
def test_a_finite_evidence_weighs_the_datum_against_posterior_and_prior(
    x64, stream, kind
):
    # Against the posterior to the power 1 - rho and the prior to the power rho, with rho = 1 / (1 + 4).
    rule, rows = nt.online.rvga(evidence=4.0), [a[:5] for a in stream]
    state, _ = nt.online.run(rule, LOGISTIC, rule.init(standard(kind, 3)), *rows)
    expected = logistic_fixed_points(
        *rows, rate=0.8, keep=0.8, pull=0.2, diagonal=kind == "MeanField"
    )
    assert int(state.rejected) == 0
    np.testing.assert_allclose(state.posterior.loc, expected[0], rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(
        covariance_of(state.posterior), expected[1], rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize(
    "kind", ["FullRank", pytest.param("LowRank", marks=pytest.mark.full)]
)
def test_quadratic_losses_take_the_steps_of_ngvi_bit_for_bit(stream, kind):
    x, y = (a.astype(np.float32) for a in stream)
    posteriors = []
    for rule in (nt.online.rvga(0.5), nt.online.ngvi(0.5)):
        prior = standard(kind, 3, np.float32)
        posteriors.append(
            nt.online.run(rule, nt.expectations.squared(), rule.init(prior), x, y)[
                0
            ].posterior
        )
    for a, b in zip(*posteriors, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_conjugate_stream_of_a_mean_field_ends_at_the_exact_posterior(x64, stream):
    # One feature in each row: the Hessians are diagonal.
    x = np.eye(3)[np.arange(40) % 3] * stream[0][:, :1]
    rule = nt.online.rvga(0.5)
    state, _ = nt.online.run(
        rule,
        nt.expectations.squared(),
        rule.init(standard("MeanField", 3)),
        x,
        stream[1],
    )
    precision = np.eye(3) + x.T @ x
    np.testing.assert_allclose(
        state.posterior.loc, np.linalg.solve(precision, x.T @ stream[1]), rtol=1e-12
    )
    np.testing.assert_allclose(
        state.posterior.scale, np.diag(precision) ** -0.5, rtol=1e-12
    )


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_a_mean_field_does_not_overshoot_on_a_squared_loss(size):
    # Each round ends at the mean of Bayes' rule from independent coordinates, whatever the units.
    rng = np.random.default_rng(0)
    x = (size * rng.normal(size=(400, 20))).astype(np.float32)
    y = (x @ rng.normal(size=20) / size + rng.normal(size=400)).astype(np.float32)
    rule = nt.online.rvga(0.5)
    state, losses = nt.online.run(
        rule,
        nt.expectations.squared(),
        rule.init(standard("MeanField", 20, np.float32)),
        x,
        y,
    )
    assert int(state.rejected) == 0
    mean, variance = np.zeros(20), np.ones(20)
    for row, target in zip(x.astype(float), y, strict=True):
        mean = mean + variance * row * (target - row @ mean) / (1.0 + row**2 @ variance)
        variance = 1.0 / (1.0 / variance + row**2)
    np.testing.assert_allclose(state.posterior.loc * size, mean * size, atol=5e-3)
    assert float(jnp.mean(losses.at_mean[100:])) < 5.0


def by_minimisation(expectation, prior, data):
    """Mean and covariance of the Gaussian of least loss plus KL, by BFGS over a Cholesky factor."""
    d = prior.loc.shape[0]
    diagonal = isinstance(prior, MeanField)
    index = np.diag_indices(d) if diagonal else np.tril_indices(d)

    def member(v):
        lower = jnp.zeros((d, d)).at[index].set(v[d:])
        return (
            MeanField(v[:d], jnp.diagonal(lower))
            if diagonal
            else FullRank(v[:d], lower)
        )

    @jax.jit
    @jax.value_and_grad
    def objective(v):
        q = member(v)
        lower = jnp.zeros((d, d)).at[index].set(v[d:])
        kl = 0.5 * (jnp.sum(lower**2) + jnp.sum(v[:d] ** 2) - d) - jnp.sum(
            jnp.log(jnp.abs(jnp.diagonal(lower)))
        )
        return kl + expectation.evaluate(q, *data).expected

    start = np.concatenate([np.zeros(d), np.eye(d)[index]])
    best = minimize(
        lambda v: tuple(map(np.asarray, objective(v))),
        start,
        jac=True,
        options={"gtol": 1e-9},
    ).x
    lower = np.zeros((d, d))
    lower[index] = best[d:]
    return best[:d], lower @ lower.T


@pytest.mark.full
@pytest.mark.parametrize("kind", ["MeanField", "FullRank"])
@pytest.mark.parametrize(
    "case",
    [
        "hinge",
        "probit",
        "poisson",
        "robust",
        "batch",
        "two rows",
        "a row twice",
        "classes",
        "two outputs",
    ],
)
def test_the_step_is_the_minimiser_over_the_family(x64, kind, case):
    x = np.array([1.2, -0.7, 2.0])
    rows = np.random.default_rng(1).normal(size=(5, 3))
    expectation, data = {
        "hinge": (nt.expectations.hinge(), (x, 1.0)),
        "probit": (nt.expectations.probit(), (x, -1.0)),
        "poisson": (nt.expectations.poisson(), (x, 3.0)),
        # Not convex.
        "robust": (
            nt.expectations.gauss_hermite(lambda u, y: jnp.log1p(jnp.square(y - u))),
            (x, 8.0),
        ),
        "batch": (LOGISTIC, (rows, np.array([1.0, -1.0, 1.0, 1.0, -1.0]))),
        "two rows": (LOGISTIC, (rows[:2], np.array([1.0, -1.0]))),
        "a row twice": (LOGISTIC, (rows[[0, 0]], np.array([1.0, 1.0]))),
        "classes": (
            nt.expectations.gauss_hermite(
                lambda u, y: jnp.square(u[0] - y) + jnp.square(u[1] * u[0]),
                num_outputs=3,
                num_nodes=6,
            ),
            (x[:1], 1.0),
        ),
        "two outputs": (
            nt.expectations.gauss_hermite(
                lambda u, y: jnp.logaddexp(u[0], u[1]) - y * u[0] - (1 - y) * u[1],
                num_outputs=2,
                num_nodes=12,
            ),
            (x[:2], 1.0),
        ),
    }[case]
    prior = standard(kind, 4 if case == "two outputs" else 3)
    state, _ = nt.online.update(RVGA, expectation, RVGA.init(prior), *data)
    mean, covariance = by_minimisation(expectation, prior, data)
    np.testing.assert_allclose(state.posterior.loc, mean, atol=2e-6)
    np.testing.assert_allclose(covariance_of(state.posterior), covariance, atol=2e-6)


@pytest.mark.parametrize("size", [1e-3, 1.0, 8.0])
def test_a_row_twice_is_one_of_twice_the_weight_in_any_units(x64, stream, size):
    # The covariance of the two predictors is singular; after a round the posterior forgets.
    rule, x, y = nt.online.rvga(evidence=4.0), size * stream[0][:3] / 2.0, stream[1][:3]
    start = rule.init(standard("FullRank", 3))
    state, _ = nt.online.run(
        rule, LOGISTIC, start, np.stack([x, x], axis=1), np.stack([y, y], axis=1)
    )
    mean, covariance, _ = logistic_fixed_points(x, y, rate=1.6, keep=0.8, pull=0.2)
    assert int(state.rejected) == 0
    # The search ends where a step gains no more than the resolution, at about the root of that.
    np.testing.assert_allclose(state.posterior.loc, mean, atol=1e-7 * min(1.0, size))
    np.testing.assert_allclose(covariance_of(state.posterior), covariance, atol=1e-7)


def poisson_stream(n):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 10))
    y = rng.poisson(np.exp(x @ (0.02 * np.arange(1, 11)))).astype(float)
    return x, y


@pytest.mark.full
def test_poisson_regression_ends_at_the_mode(x64):
    x, y = poisson_stream(10_000)
    mode = np.zeros(10)
    for _ in range(20):
        rate = np.exp(x @ mode)
        hessian = (x * rate[:, None]).T @ x + np.eye(10)
        mode = mode - np.linalg.solve(hessian, x.T @ (rate - y) + mode)
    full, diagonal = (
        nt.online.run(
            RVGA, nt.expectations.poisson(), RVGA.init(standard(kind, 10)), x, y
        )[0].posterior
        for kind in ("FullRank", "MeanField")
    )
    shift = np.asarray(full.loc) - mode
    assert shift @ hessian @ shift < 0.1
    sd = np.sqrt(np.diag(np.linalg.inv(hessian)))
    assert np.abs((np.asarray(diagonal.loc) - mode) / sd).max() < 0.5
    np.testing.assert_allclose(
        np.sqrt(np.diag(covariance_of(full))) / sd, 1.0, atol=0.02
    )
    np.testing.assert_allclose(np.asarray(diagonal.scale) / sd, 1.0, atol=0.05)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "most"), [("FullRank", 0.095), ("MeanField", 0.106)])
def test_breast_cancer_in_file_order(kind, most):
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    state, losses = nt.online.run(
        RVGA,
        LOGISTIC,
        RVGA.init(standard(kind, 30, np.float32)),
        x,
        np.where(y, 1.0, -1.0).astype(np.float32),
    )
    assert float(jnp.mean(losses.at_mean)) < most
    assert int(state.rejected) == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["MeanField", "FullRank"])
def test_one_row_in_other_units_costs_next_to_nothing(kind):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(1500, 5)).astype(np.float32)
    y = np.where(x @ np.arange(-2, 3) + rng.logistic(size=1500) > 0, 1.0, -1.0).astype(
        np.float32
    )
    late = {}
    for size in (1.0, 1e6):
        x[500] *= size
        state, losses = nt.online.run(
            RVGA, LOGISTIC, RVGA.init(standard(kind, 5, np.float32)), x, y
        )
        late[size] = float(jnp.mean(losses.at_mean[1000:]))
    assert int(state.rejected) == 0
    assert late[1e6] < late[1.0] + 0.002


def test_counts_under_a_prior_far_too_wide(x64):
    # The expected rate under the prior is beyond 1e70; an explicit step would freeze the posterior there.
    prior = FullRank(np.zeros(2), 12.0 * np.eye(2))
    x, y = np.array([[1.0, 1.0], [1.0, -1.0]] * 20), np.array([7.0, 3.0] * 20)
    state, _ = nt.online.run(RVGA, nt.expectations.poisson(), RVGA.init(prior), x, y)
    rates = np.exp(
        [state.posterior.loc.sum(), state.posterior.loc @ np.array([1.0, -1.0])]
    )
    np.testing.assert_allclose(rates, [7.0, 3.0], rtol=0.05)


@pytest.mark.full
@pytest.mark.parametrize("size", [1e7, 1e12, 1e17])
def test_rows_of_any_size_in_float32_move_the_posterior_as_in_float64(size):
    row = size * np.array([1.0, 0.5, -1.0])
    start = RVGA.init(standard("FullRank", 3, np.float32))
    single, _ = nt.online.update(
        RVGA, LOGISTIC, start, row.astype(np.float32), np.float32(1.0)
    )
    with enable_x64():
        start = RVGA.init(standard("FullRank", 3))
        double, _ = nt.online.update(RVGA, LOGISTIC, start, row, 1.0)
    assert float(np.linalg.norm(double.posterior.loc)) > 0.1
    np.testing.assert_allclose(single.posterior.loc, double.posterior.loc, rtol=1e-3)


def test_a_huge_count_in_float32_is_found():
    start = RVGA.init(standard("MeanField", 2, np.float32))
    x = np.array([1.0, 0.5], np.float32)
    state, _ = nt.online.update(
        RVGA, nt.expectations.poisson(), start, x, np.float32(1e6)
    )
    # log(1e6) less what the prior pulls: 13.8155 - 13.8 / (1.25 e6).
    assert float(state.posterior.loc @ x) == pytest.approx(13.8155, abs=2e-3)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["MeanField", "FullRank"])
def test_a_stream_of_batches_rejects_none(x64, kind):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 8, 6))
    y = np.where(rng.random((60, 8)) < expit(x.sum(-1)), 1.0, -1.0)
    state, _ = nt.online.run(RVGA, LOGISTIC, RVGA.init(standard(kind, 6)), x, y)
    assert int(state.rejected) == 0
    np.testing.assert_allclose(state.posterior.loc, 1.0, atol=0.6)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
@pytest.mark.parametrize("kind", ["MeanField", "FullRank", "LowRank"])
def test_batches_of_counts_under_a_prior_far_too_wide(x64, kind):
    # The expected loss of the first batch is beyond 1e60; a search from there would freeze, and diverge.
    rng = np.random.default_rng(0)
    x, slopes = rng.normal(size=(60, 8, 4)), np.array([0.5, -0.5, 0.3, 1.0])
    y = rng.poisson(np.exp(x @ slopes)).astype(float)
    prior = {
        "MeanField": lambda: MeanField(np.zeros(4), np.full(4, 6.0)),
        "FullRank": lambda: FullRank(np.zeros(4), 6.0 * np.eye(4)),
        "LowRank": lambda: LowRank(np.zeros(4), np.full(4, 1 / 36), np.zeros((4, 2))),
    }[kind]()
    state, _ = nt.online.run(RVGA, nt.expectations.poisson(), RVGA.init(prior), x, y)
    # A small rank may cut off what a step has gained.
    assert int(state.rejected) <= (3 if kind == "LowRank" else 0)
    sd = np.sqrt(
        np.diag(np.linalg.inv(np.einsum("tbi,tb,tbj", x, np.exp(x @ slopes), x)))
    )
    assert np.abs((np.asarray(state.posterior.loc) - slopes) / sd).max() < 4.0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["MeanField", "FullRank"])
def test_counts_by_features_in_large_units(kind):
    # The expected loss under the prior is beyond float32, and beyond float64.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 3)).astype(np.float32)
    y = rng.poisson(np.exp(1.0 + x @ [0.5, 0.3, -0.2])).astype(np.float32)
    x = np.column_stack([np.ones(1000, np.float32), 100.0 * x])
    state, losses = nt.online.run(
        RVGA, nt.expectations.poisson(), RVGA.init(standard(kind, 4, np.float32)), x, y
    )
    assert int(state.rejected) == 0
    assert np.isinf(losses.expected[0])
    assert np.isfinite(state.cumulative.expected.value)
    truth = np.array([1.0, 0.005, 0.003, -0.002])
    excess = np.asarray(losses.at_mean) - (
        np.exp(x @ truth) - y * (x @ truth) + gammaln(y + 1.0)
    )
    assert float(np.mean(excess[500:])) < 0.05
    if kind == "FullRank":
        sd = np.sqrt(np.diag(np.linalg.inv((x * np.exp(x @ truth)[:, None]).T @ x)))
        assert np.abs((np.asarray(state.posterior.loc) - truth) / sd).max() < 4.0


def repeated_rows(dtype):
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(40, 2, 12)), 5, axis=1).astype(dtype)
    return x, np.where(rng.random((40, 10)) < expit(0.3 * x.sum(-1)), 1.0, -1.0).astype(
        dtype
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype", [np.float32, pytest.param(np.float64, marks=pytest.mark.full)]
)
def test_batches_of_few_rows_on_a_small_rank_are_taken(x64, dtype):
    # By steps in the posterior itself, each cut to the rank, some of these rounds were rejected.
    x, y = repeated_rows(dtype)
    low = standard("LowRank", 12, dtype)._replace(
        precision_factor=np.zeros((12, 8), dtype)
    )
    state, losses = nt.online.run(RVGA, LOGISTIC, RVGA.init(low), x, y)
    assert int(state.rejected) == 0
    assert float(jnp.mean(losses.at_mean[20:])) < 10 * np.log(2.0)


@pytest.mark.full
def test_rows_that_are_off_count_nothing_in_a_search_over_few(x64):
    x, y = repeated_rows(np.float64)
    mask = np.ones((40, 10), bool)
    mask[:, [1, 7]] = False
    prior = standard("FullRank", 12)
    padded, _ = nt.online.run(
        RVGA,
        LOGISTIC,
        RVGA.init(prior),
        np.where(mask[..., None], x, np.nan),
        y,
        mask=mask,
    )
    short, _ = nt.online.run(
        RVGA,
        LOGISTIC,
        RVGA.init(prior),
        np.delete(x, [1, 7], 1),
        np.delete(y, [1, 7], 1),
    )
    np.testing.assert_allclose(padded.posterior.loc, short.posterior.loc, atol=1e-7)
    np.testing.assert_allclose(
        covariance_of(padded.posterior), covariance_of(short.posterior), atol=1e-8
    )


@pytest.mark.full
@pytest.mark.parametrize("prior_scale", [1.0, 6.0])
def test_a_search_over_few_predictors_takes_the_steps_of_one_over_the_parameters(
    x64, monkeypatch, prior_scale
):
    # Counts under a wide prior, where the search stops at its number of trials.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 10, 12))
    y = rng.poisson(np.exp(0.3 * x.sum(-1))).astype(float)
    prior, loss = (
        FullRank(np.zeros(12), prior_scale * np.eye(12)),
        nt.expectations.poisson(),
    )

    def end():
        rule = nt.online.rvga()
        state, _ = nt.online.run(rule, loss, rule.init(prior), x, y)
        return state.posterior

    few = end()
    monkeypatch.setattr(rvga, "_are_few", lambda predictors, q: False)
    all_parameters = end()
    np.testing.assert_allclose(few.loc, all_parameters.loc, atol=1e-6)
    np.testing.assert_allclose(
        covariance_of(few), covariance_of(all_parameters), atol=1e-6
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_batches_on_a_small_rank_are_taken(x64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 8, 6))
    y = np.where(rng.random((60, 8)) < expit(x.sum(-1)), 1.0, -1.0)
    prior = LowRank(np.zeros(6), np.ones(6), np.zeros((6, 2)))
    state, _ = nt.online.run(RVGA, LOGISTIC, RVGA.init(prior), x, y)
    # The rank may cut off what a step has gained: one round in twenty at most.
    assert int(state.rejected) <= 3
    np.testing.assert_allclose(state.posterior.loc, 1.0, atol=0.6)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_a_step_by_draws_that_would_make_it_worse_is_rejected(x64):
    # Half-steps alone diverge here without a sign of it: loss at the mean inf after a few rounds.
    rng = np.random.default_rng(0)
    x, slopes = rng.normal(size=(400, 4)), np.array([0.5, -0.5, 0.3, 1.0])
    y = rng.poisson(np.exp(x @ slopes)).astype(float)
    loss = nt.expectations.monte_carlo(
        lambda t, x, y: jnp.exp(x @ t) - y * (x @ t), num_particles=4
    )
    prior = MeanField(np.zeros(4), np.full(4, 3.0))
    state, losses = nt.online.run(
        RVGA, loss, RVGA.init(prior), x, y, rng_key=jax.random.key(0)
    )
    assert int(state.rejected) < 40
    assert (
        float(jnp.mean(losses.at_mean[200:]))
        < np.mean(np.exp(x @ slopes) - y * (x @ slopes)) + 0.05
    )
    np.testing.assert_allclose(state.posterior.loc, slopes, atol=0.25)


def test_a_row_of_classes_without_features_changes_nothing():
    start = RVGA.init(standard("FullRank", 4, np.float32))
    loss = nt.expectations.gauss_hermite(
        lambda u, y: jnp.logaddexp(u[0], u[1]) - u[0], num_outputs=2, num_nodes=4
    )
    state, _ = nt.online.update(
        RVGA, loss, start, np.zeros(2, np.float32), np.float32(1.0)
    )
    assert int(state.count) == 1
    np.testing.assert_allclose(state.posterior.loc, start.posterior.loc, atol=1e-6)
    np.testing.assert_allclose(
        state.posterior.factor, start.posterior.factor, atol=1e-6
    )


def test_a_loss_without_derivatives_is_rejected():
    @jax.custom_jvp
    def opaque(u, y):
        return jnp.square(u - y)

    opaque.defjvp(lambda primals, tangents: (opaque(*primals), jnp.nan * tangents[0]))
    start = RVGA.init(standard("FullRank", 3, np.float32))
    loss = nt.expectations.gauss_hermite(opaque)
    state, _ = nt.online.update(
        RVGA, loss, start, np.ones(3, np.float32), np.float32(1.0)
    )
    assert int(state.rejected) == 1
    np.testing.assert_array_equal(state.posterior.loc, start.posterior.loc)


def test_a_row_without_features_changes_nothing():
    start = RVGA.init(standard("FullRank", 3, np.float32))
    state, _ = nt.online.update(
        RVGA, LOGISTIC, start, np.zeros(3, np.float32), np.float32(1.0)
    )
    assert int(state.count) == 1
    for a, b in zip(state.posterior, start.posterior, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_rate_for_each_coordinate_is_refused():
    rule = nt.online.rvga(lambda count, q: jnp.ones_like(q.loc))
    start = rule.init(standard("MeanField", 3, np.float32))
    with pytest.raises(
        ValueError,
        match=r"one step_size for all coordinates, got shape \(3,\).*one for each",
    ):
        nt.online.update(rule, LOGISTIC, start, np.ones(3, np.float32), np.float32(1.0))


@pytest.mark.full
def test_experts_of_several_powers_take_the_steps_of_their_own(x64, stream):
    """The gradients, the objective and the moments that an aggregate scales are those of a smaller step."""
    rule = nt.online.aggregate(nt.online.grid(nt.online.rvga, alpha=[0.25, 1.0]))
    state, _ = nt.online.run(
        rule, LOGISTIC, rule.init(standard("MeanField", 3)), *stream
    )
    (experts,) = nt.online.expert_states(state)
    for i, alpha in enumerate((0.25, 1.0)):
        single = nt.online.rvga(alpha)
        alone, _ = nt.online.run(
            single, LOGISTIC, single.init(standard("MeanField", 3)), *stream
        )
        np.testing.assert_allclose(
            experts.posterior.loc[i], alone.posterior.loc, rtol=1e-9, atol=1e-12
        )
        np.testing.assert_allclose(
            experts.posterior.scale[i], alone.posterior.scale, rtol=1e-9
        )
