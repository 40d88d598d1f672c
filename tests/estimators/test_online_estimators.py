"""Online estimators: the same rounds by each route, right answers in raw units, the checks of two libraries."""

import copy
import pickle
from types import SimpleNamespace

import jax
import numpy as np
import pandas as pd
import pytest
from conftest import enable_x64
from scipy import stats
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import (
    GridSearchCV,
    cross_val_predict,
    cross_val_score,
    train_test_split,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import numpyro_tempered as nt
from numpyro_tempered.estimators import OnlineClassifier, OnlineRegressor
from numpyro_tempered.estimators.learners import Learners
from numpyro_tempered.estimators.scales import Scales, move

BOTH = pytest.mark.parametrize("kind", [OnlineClassifier, OnlineRegressor])
NAMES = ["height", "income"]


def make_data(num_rows=24):
    """Heights and incomes, an answer and a price in raw units."""
    rng = np.random.default_rng(0)
    x = np.array([170.0, 50_000.0]) + rng.normal(size=(num_rows, 2)) * [10.0, 9_000.0]
    z = (x - [170.0, 50_000.0]) / [10.0, 9_000.0]
    answer = np.where(z @ [2.0, -1.0] + rng.logistic(size=num_rows) > 0, "yes", "no")
    price = 3e6 + 2e4 * z @ [1.0, 2.0] + 1e4 * rng.normal(size=num_rows)
    return x, answer, price


X, ANSWER, PRICE = make_data()


def outcome_of(kind):
    return ANSWER if kind is OnlineClassifier else PRICE


def answers_of(model, x):
    return (
        model.predict_proba(x)
        if isinstance(model, OnlineClassifier)
        else np.stack(model.predict(x, True))
    )


def start_of(kind):
    return {"classes": ["no", "yes"]} if kind is OnlineClassifier else {}


def ridge(x, y, scale, alpha=1.0):
    """Mean in the units of the data, noise and predictive deviation of a conjugate regression, in closed form."""
    loc, sd = x.mean(axis=0), x.std(axis=0)
    z = np.column_stack([np.ones(len(x)), (x - loc) / sd])
    center = y[0]
    precision = alpha * z.T @ z + np.diag(
        1.0 / np.r_[5.0 * scale, np.full(x.shape[1], scale)] ** 2
    )
    mean = np.linalg.solve(precision, alpha * z.T @ (y - center))
    # The first outcome, from which all are counted, tells nothing of the noise.
    a = alpha * (len(y) - 1) / 2
    b = (alpha * np.sum((y - center) ** 2) - mean @ precision @ mean) / 2
    coef = mean[1:] / sd
    spread = 1.0 + np.sum(z * np.linalg.solve(precision, z.T).T, axis=1)
    deviation = np.sqrt(b / a * spread) * stats.t(2 * a).std()
    return coef, center + mean[0] - coef @ loc, np.sqrt(b / a), deviation


@pytest.mark.full
@BOTH
def test_batches_pieces_and_single_rows_agree(kind):
    y = outcome_of(kind)
    whole = kind(stream=True).fit(X, y)
    pieces, single = kind(), kind()
    for first, last in [(0, 1), (1, 8), (8, 11), (11, 24)]:
        pieces.partial_fit(X[first:last], y[first:last], **start_of(kind))
    single.partial_fit(X[:1], y[:1], **start_of(kind))
    for row, outcome in zip(X[1:], y[1:], strict=True):
        single.learn_one(row, outcome)
    for model in (pieces, single):
        # To the last bit with the compiler of today's jax.
        np.testing.assert_allclose(
            answers_of(model, X), answers_of(whole, X), rtol=1e-10
        )
        for leaf, same in zip(
            jax.tree.leaves(model.states_), jax.tree.leaves(whole.states_), strict=True
        ):
            np.testing.assert_allclose(leaf, same, rtol=1e-9, atol=1e-12)
    if kind is OnlineClassifier:
        assert single.predict_one(X[3]) == whole.predict(X)[3]
        by_label = single.predict_proba_one(X[3])
        np.testing.assert_allclose(
            [by_label["no"], by_label["yes"]], whole.predict_proba(X)[3], rtol=1e-12
        )
    else:
        np.testing.assert_allclose(
            single.predict_one(X[3]), whole.predict(X)[3], rtol=1e-12
        )
        np.testing.assert_allclose(pieces.noise_scale_, whole.noise_scale_, rtol=1e-14)


@pytest.mark.parametrize("most", [3, 64])
def test_the_scales_of_a_row_do_not_depend_on_how_rows_are_cut(most):
    rng = np.random.default_rng(0)
    rows = np.column_stack([np.ones(64), rng.normal(size=(64, 3))])
    # Columns that are constant at first, and one that always is; a row far off.
    rows[:11, 1], rows[:23, 2], rows[:, 3], rows[40, 2] = 3.0, -1.0, 7.0, 1e6

    def of_each(most):
        scales, seen, used = Scales.start(4), 0, []
        while seen < len(rows):
            scales, number = scales.advance(rows[seen : seen + most])
            used += [np.stack([scales.loc, scales.scale])] * number
            seen += number
        assert scales.is_constant.tolist() == [False, False, False, True]
        return np.stack(used)

    one_by_one = of_each(1)
    np.testing.assert_array_equal(of_each(most), one_by_one)
    assert len(np.unique(one_by_one[:, 1], axis=0)) == 4


def test_rows_that_go_past_the_first_ones_are_all_counted():
    rows = np.random.default_rng(0).normal(size=(40, 3))
    whole = Scales.start(3).add(rows)
    for stops in ([5], [5, 16], [15, 17, 30]):
        scales = Scales.start(3)
        for piece in np.split(rows, stops):
            scales = scales.add(piece)
        for ours, expected in zip(scales, whole, strict=True):
            np.testing.assert_array_equal(ours, expected)
    assert whole.count == 40


def test_the_far_row_by_which_others_were_forgotten_has_no_weight():
    rows = np.random.default_rng(0).normal(size=(40, 3))
    scales = Scales.start(3).add(rows)
    learners = Learners(None, None, [], scales)
    near, weight = learners._forget(rows[3], 2.0)
    np.testing.assert_array_equal(near, rows[3])
    assert weight == 2.0
    far, weight = learners._forget(np.array([0.1, 1e7, -0.2]), 2.0)
    assert far[1] < 1e3
    assert weight == 0.0


def test_a_diagonal_posterior_moves_to_other_scales_coefficient_by_coefficient():
    """Evidence and precision times mean change as the coefficient does; the intercept is at the new location."""
    old, new = (
        SimpleNamespace(loc=np.array(loc), scale=np.array(scale))
        for loc, scale in (
            ([0.0, 1.0, -2.0], [1.0, 2.0, 0.5]),
            ([0.0, 4.0, 1.0], [1.0, 5.0, 0.2]),
        )
    )
    loc, root = np.array([0.7, -1.5, 0.3]), np.array([0.3, 0.2, 0.9])
    before, after = np.array([10.0, 1.0, 2.0]), np.array([9.0, 3.0, 1.0])
    ours = move(loc, root, before, after, old, new)
    evidence = 1 / root**2 - 1 / before**2
    slopes = []
    for j, factor, offset in ((1, 2.0 / 5.0, 3.0 / 5.0), (2, 0.5 / 0.2, 3.0 / 0.2)):
        precision = (
            1 / after[j] ** 2 + factor**2 * evidence[j] + offset**2 * evidence[0]
        )
        slopes.append(factor * loc[j] / root[j] ** 2 / precision)
        np.testing.assert_allclose(ours.root[j], precision**-0.5, rtol=1e-12)
    np.testing.assert_allclose(
        ours.root[0], (1 / after[0] ** 2 + evidence[0]) ** -0.5, rtol=1e-12
    )
    np.testing.assert_allclose(
        ours.loc, [0.7 + slopes[0] * 3 / 5 + slopes[1] * 3 / 0.2, *slopes], rtol=1e-12
    )
    assert ours.energy == 0.0


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_fit_is_the_conjugate_regression(alpha):
    model = OnlineRegressor(alpha=alpha, prior_scale=2.0).fit(X, PRICE)
    order = np.random.RandomState(0).permutation(len(X))
    coef, intercept, noise, deviation = ridge(X[order], PRICE[order], 2.0, alpha)
    np.testing.assert_allclose(model.coef_, coef, rtol=1e-5)
    np.testing.assert_allclose(model.intercept_, intercept, rtol=1e-5)
    np.testing.assert_allclose(model.noise_scale_, noise, rtol=1e-5)
    mean, sd = model.predict(X[order], return_std=True)
    np.testing.assert_allclose(mean, X[order] @ coef + intercept, rtol=1e-7)
    np.testing.assert_allclose(sd, deviation, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_a_stream_is_the_conjugate_regression_too(alpha):
    # A trend, whose scale grows with each row, and a column that is constant for 11 rows: scales are fixed at
    # rows 1, 2, 4, 8, 12, 24 and 48.
    rng = np.random.default_rng(1)
    x = np.column_stack(
        [1.7e9 + 60.0 * np.arange(48), rng.normal(size=48), np.arange(48) // 11 == 1]
    )
    y = 1e6 + 0.3 * (x[:, 0] - 1.7e9) + x[:, 1:] @ [50.0, -20.0] + rng.normal(size=48)
    model = OnlineRegressor(alpha=alpha, stream=True).fit(x, y)
    coef, intercept, noise, deviation = ridge(x, y, 10.0, alpha)
    np.testing.assert_allclose(model.coef_, coef, rtol=1e-6)
    np.testing.assert_allclose(model.noise_scale_, noise, rtol=1e-4)
    mean, sd = model.predict(x, return_std=True)
    np.testing.assert_allclose(mean, x @ coef + intercept, rtol=1e-6)
    np.testing.assert_allclose(sd, deviation, rtol=1e-4)


def test_dictionaries_are_rows_with_zeros_for_what_is_absent():
    by_name, table = OnlineClassifier(), OnlineClassifier(stream=True)
    # More names than the first row has, and than columns to spare.
    rows = [{"height": h, "income": i} for h, i in X[:12]]
    rows[0].pop("income")
    rows[5].pop("height")
    rows[7] = rows[7] | {"children": 2.0, "rooms": 3}
    for row, answer in zip(rows, ANSWER, strict=False):
        by_name.learn_one(row, answer)
    frame = pd.DataFrame(rows).fillna(0.0)
    assert by_name.feature_names_in_.tolist() == list(frame.columns)
    assert by_name.n_features_in_ == 4
    table.fit(frame, ANSWER[:12])
    expected = table.predict_proba(frame)
    columns = [by_name.classes_.tolist().index(label) for label in table.classes_]
    np.testing.assert_allclose(
        by_name.predict_proba(frame)[:, columns], expected, rtol=1e-9
    )
    one = by_name.predict_proba_one(dict(reversed(rows[7].items())) | {"unknown": 5.0})
    np.testing.assert_allclose(
        [one[label] for label in table.classes_], expected[7], rtol=1e-9
    )
    np.testing.assert_allclose(
        by_name.coef_ * [-1, 1][columns[1]], table.coef_, rtol=1e-7
    )
    assert by_name.states_[0].posterior.loc.shape == (5,)


def test_classes_that_come_late_are_as_if_known_from_the_start():
    labels = np.repeat(["a", "b", "c"], 4)
    x = np.arange(12.0)[:, None] % 5 + np.repeat([0.0, 3.0, 6.0], 4)[:, None]
    late, known = (
        OnlineClassifier(),
        OnlineClassifier().partial_fit(x, labels, classes=["c", "a", "b"]),
    )
    for row, label in zip(x, labels, strict=True):
        late.learn_one(row, label)
    assert late.classes_.tolist() == ["a", "b", "c"]
    np.testing.assert_allclose(
        late.predict_proba(x), known.predict_proba(x), rtol=1e-12
    )
    assert late.coef_.shape == (3, 1)
    assert late.intercept_.shape == (3,)
    assert late.predict(x)[0] == late.predict_one(x[0])
    late.partial_fit(x, np.full(12, "d"))
    assert set(late.predict_proba_one(x[0])) == {"a", "b", "c", "d"}


@pytest.mark.full
def test_labels_may_be_anything():
    model = OnlineClassifier()
    assert model.predict_one({"x": 1.0}) is None
    assert model.predict_proba_one({"x": 1.0}) == {}
    for value, label in [(1.0, ("left", 1)), (-1.0, None)] * 2:
        if label is None:
            with pytest.raises(ValueError, match="label of a row is missing"):
                model.learn_one({"x": value}, label)
        else:
            model.learn_one({"x": value}, label)
    assert model.predict_proba_one({"x": 0.0}) == {("left", 1): 1.0}
    model.learn_one({"x": -1.0}, np.bool_(True))
    assert set(model.predict_proba_one({"x": 0.0})) == {("left", 1), True}


@pytest.mark.full
@BOTH
def test_rows_that_are_not_finite_are_rejected_and_counted(kind):
    y, model = outcome_of(kind), kind(stream=True)
    model.fit(X, y)
    before = answers_of(model, X)
    for row in ([np.nan, 1.0], [np.inf, 1.0]):
        model.learn_one(row, y[0])
    np.testing.assert_array_equal(answers_of(model, X), before)
    assert int(model.states_[0].rejected) == 2
    with pytest.raises(ValueError, match="NaN"):
        model.partial_fit(np.array([[np.nan, 1.0]]), y[:1])


@pytest.mark.full
def test_missing_outcomes_are_rejected():
    model = OnlineRegressor()
    model.learn_one({"x": 1.0}, None)
    model.learn_one({"x": 1.0}, np.nan)
    model.learn_one({"x": None}, 2.0)
    assert int(model.states_[0].rejected) == 3
    assert np.isnan(model.noise_scale_)
    model.learn_one({"x": 1.0}, 5.0)
    assert model.predict_one({"x": 1.0}) == pytest.approx(5.0)


@pytest.mark.full
@BOTH
def test_pickles_copies_and_clones(kind):
    y = outcome_of(kind)
    model = kind(covariance="diag").fit(X[:16], y[:16])
    model.learn_one(X[16], y[16])
    # Loaded where single precision is the default, as elsewhere here.
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        np.testing.assert_array_equal(answers_of(twin, X), answers_of(model, X))
        twin.learn_one(X[17], y[17])
        assert not np.array_equal(answers_of(twin, X), answers_of(model, X))
    fresh = clone(model)
    assert fresh.covariance == "diag"
    with pytest.raises(NotFittedError):
        fresh.predict(X)


@BOTH
def test_precision_and_types_of_data_change_nothing(kind):
    y = outcome_of(kind)
    expected = answers_of(kind().fit(X, y), X)
    with enable_x64():
        np.testing.assert_array_equal(answers_of(kind().fit(X, y), X), expected)
    frame = pd.DataFrame(X, columns=NAMES)
    np.testing.assert_array_equal(
        answers_of(kind().fit(frame, pd.Series(y)), frame), expected
    )
    single = X.astype(np.float32)
    np.testing.assert_allclose(
        answers_of(kind().fit(single, y), single), expected, rtol=1e-3
    )
    scaled = answers_of(kind().fit(1e-6 * X + 3.0, y), 1e-6 * X + 3.0)
    np.testing.assert_allclose(scaled, expected, rtol=1e-6)


def test_units_of_the_outcome_are_those_of_the_answer():
    mean, sd = OnlineRegressor().fit(X, PRICE).predict(X, return_std=True)
    other = OnlineRegressor().fit(X, 1e-8 * PRICE + 7.0).predict(X, return_std=True)
    np.testing.assert_allclose(other[0], 1e-8 * mean + 7.0, rtol=1e-9)
    np.testing.assert_allclose(other[1], 1e-8 * sd, rtol=1e-6)


@pytest.mark.full
def test_deviations_are_infinite_until_they_exist():
    model = OnlineRegressor().partial_fit(X[:3], PRICE[:3])
    assert np.isinf(model.predict(X, return_std=True)[1]).all()
    model.partial_fit(X[3:4], PRICE[3:4])
    assert np.isfinite(model.predict(X, return_std=True)[1]).all()


WRONG = [
    ({"alpha": 0.0}, "alpha"),
    ({"prior_scale": -1.0}, "prior_scale"),
    ({"covariance": "round"}, "covariance"),
    (
        {"rule": nt.online.standardise(nt.online.ngvi())},
        r"standardised in any case.*the rule inside of",
    ),
    ({"rule": nt.online.ngvi(), "alpha": 0.5}, "step_size"),
]


@BOTH
@pytest.mark.parametrize(("options", "match"), WRONG)
def test_parameters_that_are_wrong_raise(kind, options, match):
    with pytest.raises(ValueError, match=match):
        kind(**options).fit(X, outcome_of(kind))


def test_wrong_calls_raise():
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        OnlineClassifier().partial_fit(X, ANSWER)
    with pytest.raises(TypeError, match=r"rule.*a Rule, such as"):
        OnlineRegressor(rule="ngvi").fit(X, PRICE)
    model = OnlineClassifier().fit(X, ANSWER)
    with pytest.raises(
        ValueError, match=r"'perhaps' is not one of the classes.*of the start"
    ):
        model.learn_one(X[0], "perhaps")
    with pytest.raises(
        ValueError, match=r"'perhaps' is not one of the classes.*of the start"
    ):
        model.partial_fit(X[:1], ["perhaps"])
    with pytest.raises(ValueError, match="not the same as on the last call"):
        model.partial_fit(X, ANSWER, classes=["no", "perhaps"])
    with pytest.raises(
        ValueError, match=r"^a row has.*shape \(2,\).*at the start, got"
    ):
        model.predict_one([1.0, 2.0, 3.0])
    with pytest.raises(
        ValueError, match=r"^the columns of the.*have no names.*a row of numbers"
    ):
        model.learn_one({"height": 1.0}, "yes")
    by_name = OnlineClassifier().fit(pd.DataFrame(X, columns=NAMES), ANSWER)
    assert by_name.n_features_in_ == 2
    with pytest.raises(
        ValueError, match=r"^a row must be.*dict of features.*or have shape"
    ):
        OnlineRegressor().learn_one(X, 1.0)


def test_another_rule_takes_the_place_of_the_default():
    rule = nt.online.ngvi()
    model = OnlineRegressor(rule=rule).fit(X, PRICE)
    # Both are exact for a quadratic loss.
    np.testing.assert_allclose(
        model.predict(X), OnlineRegressor().fit(X, PRICE).predict(X), rtol=1e-9
    )
    # With the scales of the table, as a copy too.
    copied = copy.deepcopy(model)
    for each in (model, copied):
        each.partial_fit(X[:1], PRICE[:1])
    np.testing.assert_array_equal(copied.coef_, model.coef_)


@pytest.mark.full
@pytest.mark.parametrize(
    ("load", "least"),
    [(load_breast_cancer, 0.94), (load_wine, 0.94), (load_digits, 0.90)],
    ids=["breast cancer", "wine", "digits"],
)
def test_accuracy_in_raw_units(load, least):
    x, y = load(return_X_y=True)
    train, test, seen, unseen = train_test_split(x, y, random_state=0, stratify=y)
    model = OnlineClassifier().fit(train, seen)
    assert model.score(test, unseen) >= least
    batch = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(
        train, seen
    )
    assert model.score(test, unseen) >= batch.score(test, unseen) - 0.04
    # As a stream, scales are learned on the way.
    stream = OnlineClassifier(stream=True).fit(train, seen)
    assert stream.score(test, unseen) >= least - 0.03


@pytest.mark.full
def test_regression_is_as_good_as_ridge_and_its_intervals_cover():
    x, y = load_diabetes(return_X_y=True)
    train, test, seen, unseen = train_test_split(x, y, random_state=0)
    batch = make_pipeline(StandardScaler(), Ridge()).fit(train, seen)
    model = OnlineRegressor().fit(train, seen)
    assert abs(model.score(test, unseen) - batch.score(test, unseen)) < 0.01
    stream = OnlineRegressor(stream=True).fit(train, seen)
    assert abs(stream.score(test, unseen) - batch.score(test, unseen)) < 0.03
    mean = cross_val_predict(OnlineRegressor(), x, y)
    assert r2_score(y, mean) > 0.45
    for kind in (model, stream):
        mean, sd = kind.predict(x, return_std=True)
        assert 0.85 < np.mean(np.abs(y - mean) < stats.norm.ppf(0.95) * sd) < 0.95


@pytest.mark.full
@BOTH
def test_pipelines_and_searches(kind):
    y = outcome_of(kind)
    assert np.isfinite(
        cross_val_score(make_pipeline(StandardScaler(), kind()), X, y, cv=2)
    ).all()
    search = GridSearchCV(
        kind(), {"alpha": [0.5, 1.0], "covariance": ["full", "diag"]}, cv=2
    ).fit(X, y)
    assert search.best_params_["alpha"] in (0.5, 1.0)


# What is skipped needs an environment variable that is read before scipy is imported.
@pytest.mark.full
@parametrize_with_checks([OnlineClassifier(), OnlineRegressor()])
def test_scikit_learn_finds_no_fault(estimator, check):
    check(estimator)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [pytest.param(OnlineClassifier, marks=pytest.mark.slow), OnlineRegressor]
)
def test_river_finds_no_fault(kind):
    checks = pytest.importorskip("river.checks", reason="river is not installed")
    checks.check_estimator(kind())


@pytest.mark.full
def test_a_pipeline_of_river():
    compose = pytest.importorskip("river.compose", reason="river is not installed")
    from river import preprocessing

    model = compose.Pipeline(preprocessing.StandardScaler(), OnlineClassifier())
    for row, answer in zip(X, ANSWER, strict=True):
        model.learn_one(dict(zip(NAMES, row, strict=True)), answer)
    assert model.predict_one({"height": 200.0, "income": 50_000.0}) == "yes"
