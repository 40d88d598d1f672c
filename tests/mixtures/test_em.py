"""EM: against scikit-learn and formulas, and where the likelihood has no maximum."""

import contextlib
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import enable_x64, tiered
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.mixture import GaussianMixture

from numpyro_tempered.mixtures.components.bernoulli import bernoulli
from numpyro_tempered.mixtures.components.categorical import categorical
from numpyro_tempered.mixtures.components.diagonal_gaussian import diagonal_gaussian
from numpyro_tempered.mixtures.components.gaussian import gaussian
from numpyro_tempered.mixtures.components.known_variance import known_variance
from numpyro_tempered.mixtures.components.poisson import poisson
from numpyro_tempered.mixtures.components.spherical_gaussian import spherical_gaussian
from numpyro_tempered.mixtures.components.tied_gaussian import tied_gaussian
from numpyro_tempered.mixtures.criteria import aic, bic, icl
from numpyro_tempered.mixtures.em import em
from numpyro_tempered.mixtures.likelihood import check_em
from numpyro_tempered.mixtures.starts import given_responsibilities

FAMILIES = {
    "full": gaussian,
    "diag": diagonal_gaussian,
    "spherical": spherical_gaussian,
    "tied": tied_gaussian,
}


def three_clusters():
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.normal(size=(60, 2)) @ [[1.0, 0.5], [0.0, 1.0]],
            0.5 * rng.normal(size=(40, 2)) + [3.0, 2.0],
            rng.normal(size=(30, 2)) + np.array([-3.0, 3.0]),
        ]
    )
    labels = np.where(x[:, 0] > 1, 1, np.where(x[:, 0] < -1.5, 2, 0))
    return x, labels


X, LABELS = three_clusters()


class FromLabels(GaussianMixture):
    """scikit-learn's EM from given labels."""

    def _initialize_parameters(self, X, random_state, xp=None):
        self._initialize(X, np.eye(3)[LABELS])


def fit(component, x=X, **options):
    # One length of the trace for all, which is compiled for it.
    usual = {
        "num_components": 3,
        "num_restarts": 1,
        "init": given_responsibilities(LABELS),
        "max_iter": 2000,
    }
    options = usual | {"tolerance": 1e-14} | options
    return em(jax.random.key(0), x, component, **options)


@pytest.mark.parametrize("covariance_type", tiered(FAMILIES, unit=["diag"]))
def test_agrees_with_scikit_learn(covariance_type, x64):
    theirs = FromLabels(
        3, covariance_type=covariance_type, reg_covar=0, tol=1e-14, max_iter=2000
    ).fit(X)
    # Data far from the origin must not cost digits.
    shift = np.array([1e4, -1e3])
    ours = fit(FAMILIES[covariance_type](2), X + shift)
    assert ours.converged
    np.testing.assert_allclose(ours.log_likelihood, theirs.score(X) * len(X), rtol=1e-9)
    np.testing.assert_allclose(ours.weights, theirs.weights_, atol=1e-6)
    np.testing.assert_allclose(ours.parameters["loc"] - shift, theirs.means_, atol=1e-6)
    np.testing.assert_allclose(
        (ours.bic, ours.aic), (theirs.bic(X), theirs.aic(X)), rtol=1e-9
    )
    omega = theirs.predict_proba(X)
    entropy = scipy.stats.entropy(omega, axis=1).sum()
    np.testing.assert_allclose(ours.entropy, entropy, rtol=1e-5)
    np.testing.assert_allclose(ours.icl, theirs.bic(X) + 2 * entropy, rtol=1e-7)
    np.testing.assert_allclose(ours.counts, omega.sum(axis=0), rtol=1e-6)


def test_the_trace_is_the_log_likelihood_and_rises(x64):
    result = fit(diagonal_gaussian(2))
    assert len(result.trace) == result.num_iter
    assert np.all(np.diff(result.trace) > -1e-9)
    np.testing.assert_allclose(result.trace[-1], result.log_likelihood, rtol=1e-10)


@pytest.mark.parametrize("pseudo_data", [0.5, 3.0])
def test_no_step_lowers_the_objective_of_tied_rows(pseudo_data, x64):
    result = fit(diagonal_gaussian(2), np.round(X), pseudo_data=pseudo_data)
    assert np.all(np.diff(result.trace) > -1e-8)
    assert np.isfinite(result.log_likelihood)
    assert all(np.all(np.isfinite(value)) for value in result.parameters.values())
    np.testing.assert_allclose(result.weights.sum(), 1.0)


def test_a_component_of_equal_rows_is_an_error(x64):
    ties = np.where((LABELS == 2)[:, None], 3.0, X)
    with pytest.raises(
        FloatingPointError,
        match=r"every restart of EM collapsed .* in float64.*components, or",
    ):
        fit(diagonal_gaussian(2), ties)
    bounded = fit(diagonal_gaussian(2), ties, pseudo_data=1.0)
    assert bounded.converged
    assert np.all(np.isfinite(bounded.parameters["precision"]))


def small_fit(seed, x, **options):
    component = diagonal_gaussian(2)
    options = {
        "num_components": 3,
        "num_restarts": 2,
        "max_iter": 3000,
        "tolerance": 1e-6,
    } | options
    return em(jax.random.key(seed), x, component, **options)


@pytest.mark.full
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.5]))
@settings(max_examples=20, deadline=None)
def test_no_step_lowers_the_objective(seed, pseudo_data):
    with enable_x64():
        # Ties, and groups without spread.
        x = np.round(
            np.random.default_rng(seed).normal(size=(24, 2)) * 2.0, 0 if seed % 2 else 3
        )
        try:
            result = small_fit(seed, x, pseudo_data=pseudo_data)
        except FloatingPointError:
            assert pseudo_data == 0.0
            return
    assert np.all(np.diff(result.trace) > -1e-8)
    assert np.isfinite(result.log_likelihood)
    assert all(np.all(np.isfinite(value)) for value in result.parameters.values())
    np.testing.assert_allclose(result.weights.sum(), 1.0)


def em_of_products(x, omega, densities, estimate, passes):
    """EM written out; the oracle for families that scikit-learn has not."""
    for _ in range(passes):
        weights, parameters = omega.mean(axis=0), estimate(omega)
        joint = np.log(weights) + densities(parameters)
        log_likelihood = np.logaddexp.reduce(joint, axis=1)
        omega = np.exp(joint - log_likelihood[:, None])
    return weights, parameters, log_likelihood.sum()


@pytest.mark.full
@pytest.mark.parametrize("family", ["poisson", "bernoulli"])
def test_discrete_families_agree_with_em_written_out(family, x64):
    rng = np.random.default_rng(1)
    labels = np.repeat([0, 1], [30, 50])
    omega = np.where(np.eye(2)[labels] > 0, 0.8, 0.2)
    if family == "poisson":
        component = poisson(2)
        x = rng.poisson(np.array([[2.0, 9.0], [6.0, 3.0]])[labels]).astype(float)
        law, name = scipy.stats.poisson, "rate"
    else:
        component = bernoulli(3)
        x = (
            rng.random((80, 3)) < np.array([[0.2, 0.8, 0.1], [0.7, 0.3, 0.9]])[labels]
        ).astype(float)
        law, name = scipy.stats.bernoulli, "probs"
    weights, parameters, log_likelihood = em_of_products(
        x,
        omega,
        lambda theta: law.logpmf(x[:, None, :], theta).sum(axis=-1),
        lambda omega: (omega.T @ x) / omega.sum(axis=0)[:, None],
        passes=3000,
    )
    result = em(
        jax.random.key(0),
        x,
        component,
        num_components=2,
        num_restarts=1,
        init=given_responsibilities(omega),
        tolerance=1e-15,
        max_iter=3000,
    )
    np.testing.assert_allclose(result.log_likelihood, log_likelihood, rtol=1e-9)
    np.testing.assert_allclose(result.weights, weights, atol=1e-4)
    np.testing.assert_allclose(result.parameters[name], parameters, atol=1e-3)
    assert result.num_parameters == 1 + 2 * x.shape[1]


def test_weights_count_rows(x64):
    weight = np.tile([2, 0], len(X) // 2)
    ours = fit(diagonal_gaussian(2), sample_weight=weight)
    start = given_responsibilities(np.repeat(LABELS, weight))
    theirs = fit(diagonal_gaussian(2), np.repeat(X, weight, axis=0), init=start)
    np.testing.assert_allclose(ours.log_likelihood, theirs.log_likelihood, rtol=1e-10)
    np.testing.assert_allclose(ours.bic, theirs.bic, rtol=1e-10)
    np.testing.assert_allclose(
        ours.parameters["loc"], theirs.parameters["loc"], rtol=1e-6
    )


def test_missing_entries_are_marginalised(x64):
    # Groups that no datum is between, so that each has the moments of its own rows.
    x = X.copy()
    x[1:60:4, 1], x[5] = np.nan, np.nan
    x[60:, 0] += 1000.0
    x[100:, 0] += 1000.0
    x[60:, 1] = np.nan
    group = np.repeat([0, 1, 2], [60, 40, 30])
    result = fit(diagonal_gaussian(2), x, init=given_responsibilities(group))
    groups = [x[group == j] for j in range(3)]
    means = [
        np.nanmean(groups[0], axis=0),
        *([each[:, 0].mean(), np.nan] for each in groups[1:]),
    ]
    variances = [
        np.nanvar(groups[0], axis=0),
        *([each[:, 0].var(), np.nan] for each in groups[1:]),
    ]
    # A column without an entry in a component is as in all data.
    for j in (1, 2):
        means[j][1], variances[j][1] = means[0][1], variances[0][1]
    np.testing.assert_allclose(result.parameters["loc"], means, rtol=1e-9)
    np.testing.assert_allclose(1 / result.parameters["precision"], variances, rtol=1e-9)
    counts = np.array([np.sum(~np.all(np.isnan(group), axis=1)) for group in groups])
    assert result.total == counts.sum() < len(x)
    expected = sum(
        np.nansum(scipy.stats.norm.logpdf(group, mean, np.sqrt(variance)))
        for group, mean, variance in zip(groups, means, variances, strict=True)
    ) + np.sum(counts * np.log(counts / counts.sum()))
    np.testing.assert_allclose(result.log_likelihood, expected, rtol=1e-9)


def test_a_column_with_missing_entries_is_regressed_on_the_other(x64):
    x = X.copy()
    x[::3, 1] = np.nan
    result = fit(gaussian(2), x, num_components=1, init=None, tolerance=1e-12)
    complete = x[~np.isnan(x[:, 1])]
    slope, start = np.polyfit(complete[:, 0], complete[:, 1], 1)
    rest = np.mean(np.square(complete[:, 1] - start - slope * complete[:, 0]))
    mean, variance = x[:, 0].mean(), x[:, 0].var()
    covariance = [
        [variance, slope * variance],
        [slope * variance, rest + slope**2 * variance],
    ]
    # What the last sweep gains, below 1e-12, is quadratic in the error.
    np.testing.assert_allclose(
        result.parameters["loc"][0], [mean, start + slope * mean], atol=1e-5
    )
    np.testing.assert_allclose(
        np.linalg.inv(result.parameters["precision"][0]), covariance, atol=1e-5
    )


@pytest.mark.full
def test_what_is_known_stays(x64):
    result = fit(known_variance(2, scale=[0.5, 2.0], prior_scale=3.0))
    np.testing.assert_array_equal(
        result.parameters["scale"], np.tile([0.5, 2.0], (3, 1))
    )
    assert result.num_parameters == 2 + 3 * 2
    with pytest.warns(
        UserWarning, match="EM has not converged in 1 passes: raise max_iter"
    ):
        assert not fit(known_variance(2), max_iter=1).converged


@pytest.mark.full
@pytest.mark.parametrize("family", ["gaussian", "poisson"])
def test_chunks_give_the_result_of_the_rows_in_memory(family, x64):
    x = X if family == "gaussian" else np.round(np.abs(X))
    component = {"gaussian": gaussian(2), "poisson": poisson(2)}[family]
    weight = np.linspace(0.5, 1.5, len(x))
    options = {"num_components": 3, "num_restarts": 3, "pseudo_data": 0.5}
    key = jax.random.key(0)
    expected = em(key, x, component, sample_weight=weight, **options)
    cuts = [0, 7, 7, 90, len(x)]
    chunks = [(x[a:b], weight[a:b]) for a, b in itertools.pairwise(cuts)]
    for source in (chunks, lambda: iter(chunks)):
        result = em(key, source, component, size=64, **options)
        assert result.log_likelihood == pytest.approx(
            expected.log_likelihood, rel=1e-12
        )
        assert result.bic == pytest.approx(expected.bic, rel=1e-12)
        assert result.num_iter == expected.num_iter
        np.testing.assert_allclose(
            result.restart_objectives, expected.restart_objectives, rtol=1e-11
        )
        for name, value in expected.parameters.items():
            np.testing.assert_allclose(result.parameters[name], value, rtol=1e-8)


def test_chunks_bring_their_weights():
    with pytest.raises(ValueError, match=r"chunks bring their weights.*give tuples"):
        em(
            jax.random.key(0),
            [X],
            gaussian(2),
            num_components=2,
            sample_weight=np.ones(len(X)),
        )


def test_an_empty_component_stays_empty(x64):
    start = given_responsibilities(np.zeros(len(X), int))
    result = fit(diagonal_gaussian(2), init=start)
    np.testing.assert_array_equal(result.weights, [1.0, 0.0, 0.0])
    expected = scipy.stats.norm.logpdf(X, X.mean(axis=0), X.std(axis=0)).sum()
    np.testing.assert_allclose(result.log_likelihood, expected, rtol=1e-12)
    np.testing.assert_allclose(
        result.parameters["loc"], np.tile(X.mean(axis=0), (3, 1)), rtol=1e-12
    )
    assert result.entropy == pytest.approx(0.0, abs=1e-9)


def test_pseudo_data_are_data_spread_like_all(x64):
    # The first step from labels, by hand: s data at the moments of all beside each component's own.
    s = 2.0
    result = fit(diagonal_gaussian(2), pseudo_data=s)
    means = np.stack(
        [
            (X[j == LABELS].sum(axis=0) + s * X.mean(axis=0))
            / ((j == LABELS).sum() + s)
            for j in range(3)
        ]
    )
    squares = (
        np.stack(
            [
                (np.square(X[j == LABELS]).sum(axis=0) + s * np.square(X).mean(axis=0))
                for j in range(3)
            ]
        )
        / (np.bincount(LABELS) + s)[:, None]
    )
    variances = squares - np.square(means)
    joint = scipy.stats.norm.logpdf(X[:, None, :], means, np.sqrt(variances)).sum(
        axis=-1
    )
    log_likelihood = np.logaddexp.reduce(
        joint + np.log(np.bincount(LABELS) / len(X)), axis=1
    ).sum()
    penalty = s * joint.mean(axis=0).sum() - s * 3 * -np.log(2 * np.pi)
    np.testing.assert_allclose(result.trace[0], log_likelihood + penalty, rtol=1e-9)


NUMBERS = np.arange(len(X), dtype=float)
TIES = np.repeat([[0.0, 0.0], [1.0, 3.0], [2.0, -1.0]], 3, axis=0)
SINGULAR = {
    "a constant column": (
        np.column_stack([NUMBERS, np.ones(len(X))]),
        r"a column is constant.*Leave it out",
    ),
    "one row": (np.zeros((1, 2)), r"a column is constant.*comes. Leave it out"),
    "columns that agree": (
        NUMBERS[:, None] * [1.0, 2.0],
        r"determined by the others.*comes. Leave it out",
    ),
    "only ties": (TIES, "every restart of EM collapsed"),
    "ties along a line": (
        TIES * [0.0, 1.0] + np.outer(np.arange(9.0), [1.0, 0.0]),
        "every restart of EM",
    ),
}


@pytest.mark.parametrize(
    "name", tiered(SINGULAR, unit=["a constant column", "columns that agree"])
)
def test_a_likelihood_without_maximum_is_an_error(name, x64):
    x, message = SINGULAR[name]
    labels = {1: None, 9: np.arange(9) // 3, len(X): LABELS}[len(x)]
    with pytest.raises(FloatingPointError, match=message):
        fit(
            gaussian(2),
            x,
            init=None if labels is None else given_responsibilities(labels),
        )


@pytest.mark.full
def test_pseudo_data_bound_the_likelihood(x64):
    result = fit(gaussian(2), TIES, init=None, pseudo_data=1.0)
    assert result.converged
    assert np.all(np.isfinite(result.parameters["precision"]))


@pytest.mark.full
def test_without_end_of_pseudo_data_each_component_is_all_data():
    # In single precision, where a variance that the pseudo-data do not enter would be lost among their number.
    result = fit(gaussian(2), pseudo_data=1e14, tolerance=1e-6)
    covariance = np.linalg.inv(result.parameters["precision"])
    np.testing.assert_allclose(
        result.parameters["loc"], np.tile(X.mean(axis=0), (3, 1)), atol=1e-4
    )
    np.testing.assert_allclose(
        covariance, np.tile(np.cov(X.T, bias=True), (3, 1, 1)), rtol=1e-4, atol=1e-4
    )


def test_shares_of_levels_are_those_of_the_observed_codes(x64):
    x = np.column_stack([LABELS, X[:, 0] > 0]).astype(float)
    x[::4, 0], x[::3, 1] = np.nan, -1
    result = fit(categorical([3, 2]), x, num_components=1, init=None)
    shares = [
        np.bincount(column[column >= 0].astype(int), minlength=3) for column in x.T
    ]
    np.testing.assert_allclose(
        result.parameters["probs"][0], [row / row.sum() for row in shares], rtol=1e-12
    )


def test_a_category_that_never_comes_is_an_error(x64):
    with pytest.raises(
        FloatingPointError,
        match=r"^the data as a.*a category never comes.*Leave it out",
    ):
        fit(bernoulli(2), np.zeros_like(X))


@pytest.mark.full
def test_a_collapsed_restart_is_out(x64):
    # Two equal rows: some starts give them a component of their own, in some that keeps others.
    x = np.random.default_rng(3).normal(size=(24, 2))
    x[0] = x[1]
    out = []
    for seed in range(12):
        with contextlib.suppress(FloatingPointError):
            result = small_fit(seed, x)
            out.append(np.isneginf(result.restart_objectives).sum())
            np.testing.assert_allclose(
                result.log_likelihood, result.restart_objectives.max(), rtol=1e-9
            )
    # Of two restarts: none, one; and both, which is the error.
    assert set(out) == {0, 1}
    assert len(out) < 12


@pytest.mark.full
def test_single_precision_agrees_with_double():
    single = fit(diagonal_gaussian(2), tolerance=1e-6)
    ties = np.where((LABELS == 2)[:, None], 3.0, X)
    with pytest.raises(
        FloatingPointError, match=r"every restart of EM collapsed .* in float32"
    ):
        fit(diagonal_gaussian(2), ties, tolerance=1e-6)
    with enable_x64():
        double = fit(diagonal_gaussian(2))
    assert single.trace.dtype == np.float32
    np.testing.assert_allclose(single.log_likelihood, double.log_likelihood, atol=1e-2)
    np.testing.assert_allclose(
        single.parameters["loc"], double.parameters["loc"], atol=1e-2
    )


def test_wrong_arguments_are_named():
    with pytest.raises(
        ValueError, match="pseudo_data must be at least 0 and finite, got -1"
    ):
        fit(diagonal_gaussian(2), pseudo_data=-1.0)
    with pytest.raises(
        ValueError, match="num_components must be an integer of at least 1, got 0"
    ):
        fit(diagonal_gaussian(2), num_components=0)
    with pytest.raises(
        ValueError, match=r"has no maximum_likelihood: take nt\.mixtures\.fit"
    ):
        fit(gaussian(2)._replace(maximum_likelihood=None))


def test_what_went_wrong_is_said():
    def end(objective, fall, converged=True):
        size = len(objective)
        return types.SimpleNamespace(
            trace=np.array([objective]),
            fall=np.array(fall),
            objective=np.array(objective),
            converged=[converged] * size,
            num_iter=[7] * size,
        )

    # What has collapsed may have fallen, and what is not returned.
    for objective in (-np.inf, -4.0):
        fine = end([objective, -3.0], [5.0, 0.0])
        check_em(fine, 1, fine.objective, np.full(2, 1e-6))
    lost = end([-np.inf, -np.inf], [0.0, 0.0])
    with pytest.raises(
        FloatingPointError,
        match=r"every restart of EM collapsed \(2 of them, in float64\)",
    ):
        check_em(lost, 0, lost.objective, np.zeros(2))
    fallen = end([-4.0, -3.0], [0.0, 0.5])
    with pytest.raises(
        RuntimeError,
        match=r"the likelihood fell by 0.5 nats.* maximum_likelihood and coeff",
    ):
        check_em(fallen, 1, fallen.objective, np.full(2, 1e-6))
    unfinished = end([-4.0, -3.0], [0.0, 0.0], converged=False)
    with pytest.warns(
        UserWarning,
        match=r"EM has not converged in 7 passes: raise max_iter.*or the tolerance",
    ):
        check_em(unfinished, 1, unfinished.objective, np.zeros(2))


@pytest.mark.full
def test_a_component_whose_functions_disagree_is_an_error(x64):
    component = diagonal_gaussian(2)

    def wrong(prior, counts, sums):
        # A mean that is not that of the data: alternates between two, so that the likelihood falls.
        best = component.maximum_likelihood(prior, counts, sums)
        return best | {"precision": 1.0 / jnp.square(1.0 / best["precision"])}

    with pytest.raises(
        RuntimeError,
        match=r"the likelihood fell by .* maximum_likelihood and coefficients_at",
    ):
        fit(component._replace(maximum_likelihood=wrong), 3.0 * X)


def test_criteria_by_hand():
    assert aic(-100.0, 5) == 210.0
    assert bic(-100.0, 5, np.e**2) == pytest.approx(210.0)
    assert icl(-100.0, 5, np.e**2, 3.0) == pytest.approx(216.0)
