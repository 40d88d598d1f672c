"""Estimators of scikit-learn: its own checks, selection and components, which compile many programs."""

import pickle

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from test_estimators import FRAME, LABEL, X

import numpyro_tempered as nt
from numpyro_tempered.estimators import TemperedMixture, TemperedPCA

pytestmark = pytest.mark.full


# With several components the check of weights fails, as for KMeans: starts are drawn row by row. Of one component
# there is one start. What is skipped needs an environment variable that is read before scipy is imported.
@parametrize_with_checks([TemperedMixture(), TemperedPCA()])
def test_scikit_learn_finds_no_fault(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def selected():
    return TemperedMixture(range(1, 4), component="diag", random_state=0).fit(X)


def test_one_of_several_numbers_of_components_is_selected(selected):
    assert selected.n_components_ == selected.selection_.selected == 2
    assert set(selected.selection_.fits) == {1, 2, 3}
    np.testing.assert_array_equal(
        selected.predict(X) == selected.predict(X)[0], LABEL == 0
    )
    loaded = pickle.loads(pickle.dumps(selected))
    np.testing.assert_array_equal(loaded.predict_proba(X), selected.predict_proba(X))
    assert loaded.selection_.fits[3].objective == selected.selection_.fits[3].objective


def test_missing_entries_are_marginalised(selected):
    rows = X.copy()
    rows[0, 0] = rows[1, 1] = np.nan
    fit = TemperedMixture(2, component="diag", random_state=0).fit(rows)
    masked = np.ma.masked_array(np.where(np.isnan(rows), 1.0, rows), np.isnan(rows))
    np.testing.assert_array_equal(fit.score_samples(masked), fit.score_samples(rows))
    np.testing.assert_array_equal(fit.predict(rows) == fit.predict(rows)[0], LABEL == 0)
    loaded = pickle.loads(pickle.dumps(fit))
    np.testing.assert_array_equal(loaded.score_samples(rows), fit.score_samples(rows))
    # A row's density is that of its observed entries.
    alone = fit.score_samples([[np.nan, np.nan]])
    np.testing.assert_allclose(alone, [0.0], atol=1e-12)


@pytest.mark.parametrize("component", ["full", "tied"])
def test_missing_entries_of_full_covariances_are_marginalised(component):
    rows = X.copy()
    rows[0, 0] = rows[1, 1] = np.nan
    fit = TemperedMixture(2, component=component, random_state=0).fit(rows)
    np.testing.assert_array_equal(fit.predict(rows) == fit.predict(rows)[0], LABEL == 0)
    loaded = pickle.loads(pickle.dumps(fit))
    np.testing.assert_array_equal(loaded.score_samples(rows), fit.score_samples(rows))
    np.testing.assert_allclose(fit.score_samples([[np.nan, np.nan]]), [0.0], atol=1e-12)


@pytest.mark.parametrize(
    ("component", "shape"), [("tied", (2, 2)), ("diag", (2, 2)), ("spherical", (2,))]
)
def test_covariances_have_the_shapes_of_scikit_learn(component, shape):
    scaled = StandardScaler().fit_transform(X)
    fit = TemperedMixture(2, component=component, random_state=0).fit(scaled)
    assert fit.covariances_.shape == shape
    within = np.mean([scaled[label == LABEL].var(axis=0) for label in (0, 1)], axis=0)
    values = np.diag(fit.covariances_) if component == "tied" else fit.covariances_
    np.testing.assert_allclose(np.mean(values), np.mean(within), rtol=0.5)
    assert fit.precisions_.shape == shape
    inverse = (
        np.linalg.inv(fit.covariances_)
        if component == "tied"
        else 1.0 / fit.covariances_
    )
    np.testing.assert_allclose(fit.precisions_, inverse)


@pytest.mark.parametrize(
    "component",
    [
        nt.mixtures.components.poisson,
        nt.mixtures.components.poisson(2),
        lambda dim: nt.mixtures.components.poisson(dim),
    ],
)
def test_components_of_other_families(component):
    counts = np.random.default_rng(1).poisson(
        np.array([2.0, 30.0])[LABEL][:, None], size=(40, 2)
    )
    fit = clone(TemperedMixture(2, component=component, random_state=0)).fit(counts)
    np.testing.assert_array_equal(
        fit.predict(counts) == fit.predict(counts)[0], LABEL == 0
    )
    assert not hasattr(fit, "means_")
    assert not hasattr(fit, "covariances_")
    assert not hasattr(fit, "precisions_")
    if component is nt.mixtures.components.poisson:
        np.testing.assert_array_equal(
            pickle.loads(pickle.dumps(fit)).predict(counts), fit.predict(counts)
        )


def test_fewer_rows_than_components():
    fit = TemperedMixture(3, random_state=0).fit(X[[0, -1]])
    assert np.isfinite(fit.score_samples(X)).all()


def test_weights_repeat_rows_for_one_component():
    weight = np.arange(40) % 3
    weighted = TemperedMixture().fit(X, sample_weight=weight)
    repeated = TemperedMixture().fit(np.repeat(X, weight, axis=0))
    np.testing.assert_allclose(
        weighted.score_samples(X), repeated.score_samples(X), rtol=1e-10
    )
    np.testing.assert_allclose(weighted.lower_bound_, repeated.lower_bound_, rtol=1e-10)


@pytest.mark.parametrize("estimator", [TemperedMixture(random_state=0), TemperedPCA(1)])
def test_pipelines_and_searches(estimator):
    steps = make_pipeline(StandardScaler(), estimator)
    assert np.isfinite(cross_val_score(steps, FRAME, cv=2)).all()
    name = type(estimator).__name__.lower()
    search = GridSearchCV(steps, {f"{name}__alpha": [0.5, 1.0]}, cv=2).fit(FRAME)
    assert search.best_params_[f"{name}__alpha"] in (0.5, 1.0)


def test_factors_with_missing_entries():
    rows = np.where(np.random.default_rng(2).random(X.shape) < 0.1, np.nan, X)
    fit = TemperedPCA(1).fit(rows)
    assert np.isfinite(fit.transform(rows)).all()
    assert np.isfinite(fit.score_samples(rows)).all()
