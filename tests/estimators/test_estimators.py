"""Estimators of scikit-learn: right answers in raw units, attributes, and what they refuse."""

import pickle
import sys

import jax
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
from conftest import enable_x64, tiered
from scipy import stats
from sklearn.base import clone
from sklearn.datasets import load_iris, load_wine
from sklearn.decomposition import PCA
from sklearn.exceptions import NotFittedError
from sklearn.mixture import GaussianMixture
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import numpyro_tempered as nt
from numpyro_tempered.estimators import TemperedMixture, TemperedPCA, base

LABEL = np.repeat([0, 1], [30, 10])
NAMES = ["height", "income"]
BOTH = pytest.mark.parametrize("kind", [TemperedMixture, TemperedPCA])


def make_data():
    """Heights in centimetres and incomes, of two groups."""
    normal = np.random.default_rng(0).normal(size=(40, 2))
    return np.array([[165.0, 30_000.0], [185.0, 90_000.0]])[LABEL] + normal * [
        5.0,
        4_000.0,
    ]


X = make_data()
FRAME = pd.DataFrame(X, columns=NAMES)


@pytest.fixture(scope="module")
def mixture():
    return TemperedMixture(2, random_state=0).fit(FRAME)


@pytest.fixture(scope="module")
def pca():
    return TemperedPCA(1, random_state=0).fit(FRAME)


@pytest.fixture
def fitted(request, kind):
    return request.getfixturevalue("mixture" if kind is TemperedMixture else "pca")


@pytest.mark.full
def test_the_groups_come_out_in_raw_units(mixture):
    large = int(np.argmax(mixture.weights_))
    np.testing.assert_array_equal(mixture.predict(FRAME) == large, LABEL == 0)
    means = np.stack([X[LABEL == 0].mean(axis=0), X[LABEL == 1].mean(axis=0)])
    np.testing.assert_allclose(mixture.means_[[large, 1 - large]], means, rtol=0.01)
    np.testing.assert_allclose(mixture.weights_.sum(), 1.0)
    assert mixture.converged_
    assert mixture.n_iter_ >= 1


@BOTH
def test_units_of_the_columns_change_nothing(kind, fitted):
    unit = 1e-3
    moved = X * unit + np.array([1e3, -1e2])
    other = clone(fitted).fit(moved)
    densities = other.score_samples(moved) + 2 * np.log(unit)
    np.testing.assert_allclose(densities, fitted.score_samples(FRAME), rtol=1e-6)


def test_each_column_has_a_unit_of_its_own(mixture):
    units = np.array([1e5, 1e-3])
    other = clone(mixture).fit(X * units)
    np.testing.assert_allclose(
        other.predict_proba(X * units), mixture.predict_proba(FRAME), atol=1e-8
    )


def test_densities_are_those_of_students_t(mixture):
    q, dim = mixture.fit_.posterior, 2
    freedom = q.df - dim + 1
    shapes = (
        q.scale * ((q.mean_precision + 1) / (q.mean_precision * freedom))[:, None, None]
    )
    parts = [
        weight * stats.multivariate_t(loc, shape, df).pdf(X)
        for weight, loc, shape, df in zip(
            mixture.weights_, q.loc, shapes, freedom, strict=True
        )
    ]
    np.testing.assert_allclose(
        mixture.score_samples(FRAME), np.log(np.sum(parts, axis=0)), rtol=1e-9
    )
    np.testing.assert_allclose(
        mixture.score(FRAME), mixture.score_samples(FRAME).mean()
    )


def test_information_criteria_count_the_free_parameters(mixture):
    # Two means of 2, two covariances of 3, and one weight.
    twice, number = -2.0 * mixture.score_samples(FRAME).sum(), 11
    np.testing.assert_allclose(mixture.aic(FRAME), twice + 2 * number)
    np.testing.assert_allclose(mixture.bic(FRAME), twice + number * np.log(40))


def test_precisions_are_posterior_means_and_inverses_of_the_covariances(mixture):
    q = mixture.fit_.posterior
    for covariance, precision, df, scale in zip(
        mixture.covariances_, mixture.precisions_, q.df, q.scale, strict=True
    ):
        np.testing.assert_allclose(precision, df * np.linalg.inv(scale), rtol=1e-9)
        np.testing.assert_allclose(covariance @ precision, np.eye(2), atol=1e-9)


def test_memberships_are_the_features(mixture):
    np.testing.assert_array_equal(
        mixture.transform(FRAME), mixture.predict_proba(FRAME)
    )
    np.testing.assert_allclose(mixture.predict_proba(FRAME).sum(axis=1), 1.0)
    np.testing.assert_array_equal(
        clone(mixture).fit_predict(FRAME), mixture.predict(FRAME)
    )


def test_scores_lie_along_orthonormal_axes(pca):
    np.testing.assert_allclose(pca.components_ @ pca.components_.T, np.eye(1))
    np.testing.assert_allclose(pca.mean_, X.mean(axis=0), rtol=1e-3)
    # To the standard error of a variance of 40 rows.
    np.testing.assert_allclose(
        pca.explained_variance_[0], np.cov(X.T)[1, 1], rtol=np.sqrt(2 / 40)
    )
    assert pca.noise_variance_ < pca.explained_variance_[0]
    projected = (X - pca.mean_) @ pca.components_.T
    # Shrunk by the share of the noise in the variance along the axis.
    share = pca.noise_variance_ / pca.explained_variance_[0]
    np.testing.assert_allclose(pca.transform(FRAME), projected * (1 - share), rtol=0.02)


def test_variances_and_covariances_are_those_of_scikit_learn_shrunk_a_little():
    scaled = StandardScaler().fit_transform(load_wine().data)
    ours, theirs = (kind(3).fit(scaled) for kind in (TemperedPCA, PCA))
    # Of 178 rows the prior takes 2 to 6 per cent of a variance.
    ratio = ours.explained_variance_ratio_ / theirs.explained_variance_ratio_
    assert np.all((ratio > 0.94) & (ratio < 1.0))
    np.testing.assert_allclose(
        ours.singular_values_, np.sqrt(177 * ours.explained_variance_)
    )
    np.testing.assert_allclose(
        ours.singular_values_, theirs.singular_values_, rtol=0.04
    )
    covariance, loadings = ours.get_covariance(), ours.fit_.loadings
    np.testing.assert_allclose(
        covariance,
        loadings @ loadings.T + ours.noise_variance_ * np.eye(13),
        atol=1e-12,
    )
    np.testing.assert_allclose(covariance, theirs.get_covariance(), atol=0.1)
    np.testing.assert_allclose(
        ours.explained_variance_ratio_, ours.explained_variance_ / np.trace(covariance)
    )
    np.testing.assert_allclose(
        covariance @ ours.get_precision(), np.eye(13), atol=1e-12
    )


def test_no_factor_among_several_is_an_answer_but_no_step_of_a_pipeline():
    noise = np.random.default_rng(0).normal(size=(40, 2))
    pca = TemperedPCA(range(2), random_state=0).fit(noise)
    assert pca.n_components_ == pca.selection_.selected == 0
    assert np.isfinite(pca.score(noise))
    np.testing.assert_allclose(pca.get_covariance(), pca.noise_variance_ * np.eye(2))
    assert pca.explained_variance_ratio_.shape == pca.singular_values_.shape == (0,)
    steps = make_pipeline(TemperedPCA(range(2)), GaussianMixture(2))
    with pytest.raises(
        ValueError, match=r"0 factors are selected.*from 1 up, such as range\(1, 10\)"
    ):
        steps.fit(noise)
    assert steps.set_params(temperedpca__n_components=range(1, 2)).fit(noise).predict(
        noise
    ).shape == (40,)


def test_the_library_and_the_estimator_agree(pca):
    with enable_x64():
        rows = nt.ppca.reconstruct(pca.fit_, X)
    np.testing.assert_allclose(pca.inverse_transform(pca.transform(FRAME)), rows)


def test_one_of_several_numbers_of_factors_is_selected(pca):
    several = TemperedPCA(range(2), random_state=0).fit(X)
    assert several.n_components_ == several.selection_.selected == 1
    np.testing.assert_allclose(
        several.explained_variance_, pca.explained_variance_, rtol=1e-3
    )
    assert "selection_" not in vars(several.set_params(n_components=0).fit(X))
    assert several.transform(X).shape == (40, 0)
    np.testing.assert_allclose(
        several.inverse_transform(several.transform(X)), several.mean_ + 0.0 * X
    )


@pytest.mark.full
def test_masked_entries_are_missing(pca):
    rows = np.ma.masked_array(X, np.arange(80).reshape(40, 2) == 3)
    filled = np.where(rows.mask, np.nan, X)
    again = TemperedPCA(1, random_state=0).fit(rows)
    assert again.fit_.num_observed == 79
    np.testing.assert_array_equal(again.transform(rows), again.transform(filled))


DAYS = pd.date_range("2020-01-01", periods=40)


@BOTH
@pytest.mark.parametrize(
    "table",
    [
        FRAME.assign(when=DAYS),
        FRAME.assign(when=DAYS - DAYS[0]),
        FRAME.assign(when=DAYS.date),
        pa.table({"height": X[:, 0], "when": DAYS}),
    ],
    ids=["dates", "spans", "objects", "arrow"],
)
def test_dates_are_refused_by_name_instead_of_nanoseconds(kind, fitted, table):
    with pytest.raises(
        TypeError,
        match=r"^X must.*columns \['when'\]\. Pass numbers, such as days since the first",
    ):
        kind().fit(table)
    with pytest.raises(
        TypeError,
        match=r"^X must be real.*Pass numbers, such as days.*since the first date",
    ):
        fitted.transform(DAYS.to_numpy()[:, None])


@BOTH
def test_text_in_a_table_is_refused_by_name(kind):
    with pytest.raises(
        TypeError,
        match=r"^X must be.*columns \['town'\]\. Pass codes.*\.cat\.codes, or",
    ):
        kind().fit(FRAME.assign(town="Oslo"))


@BOTH
def test_tables_of_other_kinds_are_the_same_numbers(kind, fitted):
    holes = np.where(np.arange(80).reshape(40, 2) == 3, np.nan, X)
    expected = fitted.score_samples(pd.DataFrame(holes, columns=NAMES))
    objects = pd.DataFrame(holes, columns=NAMES).astype(object)
    objects.iloc[1, 1] = pd.NaT
    nullable = pd.DataFrame(holes, columns=NAMES).convert_dtypes()
    for table in (objects, nullable, pa.Table.from_pandas(nullable)):
        np.testing.assert_array_equal(fitted.score_samples(table), expected)
        with pytest.raises(ValueError, match="feature names should match"):
            fitted.transform(
                table.rename(columns={"height": "h"})
                if hasattr(table, "iloc")
                else table.select([1, 0])
            )


def test_by_default_factors_make_every_covariance():
    assert TemperedPCA().fit(X).n_components_ == 1


@BOTH
def test_results_are_numpy_in_double_precision(kind, fitted):
    for name in ("transform", "score_samples"):
        values = getattr(fitted, name)(FRAME)
        assert isinstance(values, np.ndarray)
        assert values.dtype == np.float64
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(fitted.fit_))


@BOTH
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_numbers_of_other_types_are_the_same_numbers(kind, fitted, dtype):
    rows = X.astype(dtype)
    wide = clone(fitted).fit(rows.astype(np.float64))
    np.testing.assert_array_equal(
        clone(fitted).fit(rows).transform(rows), wide.transform(rows)
    )


@BOTH
def test_columns_keep_their_names(kind, fitted):
    prefix = kind.__name__.lower()
    np.testing.assert_array_equal(fitted.feature_names_in_, NAMES)
    names = [f"{prefix}{i}" for i in range(fitted.n_components_)]
    assert fitted.get_feature_names_out().tolist() == names
    table = clone(fitted).set_output(transform="pandas").fit(FRAME).transform(FRAME)
    assert table.columns.tolist() == names
    with pytest.raises(ValueError, match="feature names should match"):
        fitted.transform(FRAME[NAMES[::-1]])


@BOTH
def test_pickles_are_the_same_to_the_last_bit(kind, fitted):
    loaded = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(
        loaded.score_samples(FRAME), fitted.score_samples(FRAME)
    )
    assert loaded.lower_bound_ == fitted.lower_bound_
    assert loaded.get_params() == fitted.get_params()


@BOTH
def test_one_seed_gives_one_result(kind, fitted):
    np.testing.assert_array_equal(
        clone(fitted).fit(FRAME).transform(FRAME), fitted.transform(FRAME)
    )
    one, other = fitted.sample(3), fitted.sample(3)
    rows = one[0] if kind is TemperedMixture else one
    assert rows.shape == (3, 2)
    np.testing.assert_array_equal(rows, other[0] if kind is TemperedMixture else other)


@BOTH
def test_what_is_not_fitted_says_so(kind):
    for call in (
        kind().sample,
        lambda: kind().transform(X),
        lambda: kind().score_samples(X),
    ):
        with pytest.raises(NotFittedError):
            call()


@BOTH
@pytest.mark.parametrize(
    ("parameters", "data", "message"),
    [
        ({}, X[:1], r"^Found array with.*1 sample"),
        ({}, X[:0], r"^Found array with.*0 sample"),
        (
            {},
            np.full((5, 2), 3.3),
            "no two different values|no column has two different",
        ),
        ({}, np.where(X > 1e5, X, np.inf), "infinity"),
        (
            {"n_components": -1},
            X,
            "n_components must be an integer of at least [01], got -1",
        ),
        ({"n_components": "3"}, X, r"n_components must be an integer.*of at least"),
        (
            {"n_components": []},
            X,
            r"n_components must be different numbers.*at least one, got",
        ),
        (
            {"n_components": [1, 1]},
            X,
            r"n_components must be different numbers, at least one, got \[1, 1\]\.$",
        ),
        ({"n_init": 0}, X, "n_init must be an integer of at least 1"),
        ({"max_iter": 0}, X, "max_iter must be an integer of at least 1"),
        ({"tol": -1.0}, X, r"tol must be at least 0.*and finite, got"),
        ({"alpha": 0.0}, X, r"alpha must be positive.*and finite, got"),
    ],
)
def test_bad_data_and_arguments_are_named(kind, parameters, data, message):
    with pytest.raises(ValueError, match=message):
        kind(**parameters).fit(data)


@BOTH
def test_sparse_data_are_refused(kind):
    with pytest.raises(TypeError, match=r"[Ss]parse.*a dense numpy array"):
        kind().fit(scipy.sparse.csr_matrix(X))


@pytest.mark.parametrize(
    ("parameters", "data", "weight", "message"),
    [
        (
            {},
            np.c_[X, np.full(40, 3.3)],
            None,
            "column 2 of the data has no two different values",
        ),
        ({"component": "round"}, X, None, "component must be one of"),
        ({}, X, np.zeros(40), "sample_weight is zero for all rows"),
        ({}, X, -np.ones(40), "sample_weight must be finite and not negative"),
        ({}, X, np.ones(3), r"sample_weight has shape.*weight for each row"),
    ],
)
def test_mixtures_refuse_what_has_no_answer(parameters, data, weight, message):
    with pytest.raises(ValueError, match=message):
        TemperedMixture(**parameters).fit(data, sample_weight=weight)


def test_a_component_is_a_name_a_component_or_a_function():
    with pytest.raises(
        TypeError, match=r"^component is a int;.*expected a component such as"
    ):
        TemperedMixture(component=3).fit(X)
    with pytest.raises(
        TypeError, match=r"a list of components has names alone.*give a mapping"
    ):
        TemperedMixture(component=["full", 3]).fit(X)
    for components in ([], ["full", "full"], {}):
        with pytest.raises(
            ValueError, match="component must be different components, at least one"
        ):
            TemperedMixture(component=components).fit(X)


@pytest.mark.full
def test_a_warm_start_goes_on_where_the_last_fit_ended():
    rows = load_iris().data[::4, 1:3]
    options = {"n_components": 3, "n_init": 1, "tol": 0.0, "random_state": 0}
    with pytest.warns(
        UserWarning, match=r"^the best restart.*has not converged.*or the tolerance"
    ):
        whole = TemperedMixture(max_iter=7, **options).fit(rows)
    # The first pass of the second fit evaluates where the first one ended.
    parts = TemperedMixture(max_iter=4, warm_start=True, **options)
    for _ in range(2):
        with pytest.warns(
            UserWarning, match=r"^the best restart.*has not converged.*or the tolerance"
        ):
            parts.fit(rows)
        parts = pickle.loads(pickle.dumps(parts))
    np.testing.assert_allclose(parts.means_, whole.means_, rtol=1e-10)
    np.testing.assert_allclose(parts.lower_bound_, whole.lower_bound_, rtol=1e-12)
    again = parts.set_params(max_iter=1000, tol=None).fit(rows)
    assert again.lower_bound_ > whole.lower_bound_
    bound = again.lower_bound_
    assert again.fit(rows).n_iter_ <= 2
    # A converged fit gains no more than the tolerance, 1e-8 for each of 38 rows, in its last pass.
    assert 0.0 <= again.lower_bound_ - bound <= 3.8e-7


def test_a_warm_start_refuses_another_mixture():
    warm = TemperedMixture(2, random_state=0, warm_start=True).fit(X)
    for parameters, rows, message in [
        (
            {"n_components": 3},
            X,
            r"the last fit has 2 components, n_components is 3.*it was, or set",
        ),
        (
            {"n_components": [1, 2]},
            X,
            r"one n_components and one component.*not for several",
        ),
        (
            {"component": ["full", "diag"]},
            X,
            r"one n_components and one component.*not for several",
        ),
        (
            {"component": "diag"},
            X,
            r"expected at most 2 of diagonal_gaussian.*entries or both without",
        ),
        ({}, np.c_[X, X[:, 0]], r"X has 3 features"),
    ]:
        with pytest.raises(ValueError, match=message):
            pickle.loads(pickle.dumps(warm)).set_params(**parameters).fit(rows)


def test_progress_is_shown_on_request_alone(capsys):
    several = TemperedMixture([1, 2], n_init=2, random_state=0).fit(X)
    assert capsys.readouterr().err == ""
    for estimator in (
        TemperedMixture(2, verbose=1, random_state=0),
        several.set_params(verbose=True),
    ):
        estimator.fit(X)
        assert "passes" in capsys.readouterr().err


@pytest.mark.parametrize("component", tiered(["full", "tied", "diag"], unit=["full"]))
def test_a_weight_of_two_counts_as_a_row_twice(component):
    counts = 1 + np.arange(40) % 2
    options = {"component": component, "random_state": 0}
    twice = TemperedMixture(2, **options).fit(np.repeat(X, counts, axis=0))
    for weight in (counts, counts.astype(object), pd.Series(counts, dtype="Int64")):
        weighted = TemperedMixture(2, **options).fit(X, sample_weight=weight)
        np.testing.assert_allclose(
            weighted.lower_bound_, twice.lower_bound_, rtol=1e-12
        )
        for name in ("means_", "covariances_", "weights_"):
            ours, theirs = (
                np.sort(np.ravel(getattr(fit, name))) for fit in (weighted, twice)
            )
            np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    with pytest.raises(
        TypeError,
        match=r"sample_weight must be real numbers, got dtype datetime64.*the first date",
    ):
        TemperedMixture(2, **options).fit(X, sample_weight=DAYS)


@pytest.mark.parametrize("make", base.FAMILIES)
def test_components_are_pickled_with_their_form_for_missing_entries(make):
    model, component = TemperedMixture(2), make(3)
    model.n_features_in_ = 3
    forms = (
        [component]
        if component.with_missing is None
        else [component, component.with_missing()]
    )
    model.forms_ = tuple(form._replace(prior=component.prior) for form in forms)
    loaded = pickle.loads(pickle.dumps(model)).forms_
    for ours, theirs in zip(loaded, model.forms_, strict=True):
        assert ours._replace(prior=None) == theirs._replace(prior=None)
        jax.tree.map(np.testing.assert_array_equal, ours.prior, theirs.prior)


@pytest.mark.full
def test_one_of_several_components_is_selected():
    options = {"n_components": [1, 2], "n_init": 4, "random_state": 0}
    several = TemperedMixture(component=["diag", "full"], **options).fit(X)
    assert set(several.selection_.fits) == {
        (name, k) for name in ("diag", "full") for k in (1, 2)
    }
    alone = TemperedMixture(component=several.selection_.selected[0], **options).fit(X)
    assert several.n_components_ == alone.n_components_ == 2
    np.testing.assert_array_equal(several.means_, alone.means_)
    np.testing.assert_array_equal(several.predict_proba(X), alone.predict_proba(X))
    loaded = pickle.loads(pickle.dumps(several))
    np.testing.assert_array_equal(loaded.predict_proba(X), several.predict_proba(X))
    # Functions of the number of columns, by names of one's own, and one K.
    components = {"mine": nt.mixtures.components.diagonal_gaussian, "other": "full"}
    named = TemperedMixture(2, component=components, n_init=4, random_state=0).fit(X)
    assert named.selection_.selected[0] in components
    growing = TemperedMixture(None, n_init=4, random_state=0).fit(X)
    assert growing.selection_.stopped.startswith("none of the last")


def test_more_factors_than_columns_are_refused():
    with pytest.raises(
        ValueError, match=r"n_components=3 is more than n_features=2.*the columns of X"
    ):
        TemperedPCA(3).fit(X)


def test_without_scikit_learn_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(
        ImportError,
        match=r"needs scikit-learn: pip install 'numpyro_tempered\[sklearn\]'",
    ):
        _ = nt.estimators.TemperedMixture
    with pytest.raises(AttributeError, match="no attribute 'Tempered'"):
        _ = nt.estimators.Tempered
