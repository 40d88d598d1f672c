"""Rows of the online estimators that others' reports tell of: wide, far, refused, weighted, missing."""

import warnings

import numpy as np
import pandas as pd
import pytest
from conftest import tiered
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import cross_val_predict
from sklearn.preprocessing import StandardScaler

import numpyro_tempered as nt
from numpyro_tempered.estimators import OnlineClassifier, OnlineRegressor

BOTH = pytest.mark.parametrize("kind", [OnlineClassifier, OnlineRegressor])
X = np.random.default_rng(0).normal(size=(24, 2))
LABEL, PRICE = X @ [2.0, -1.0] > 0, 3.0 + X @ [1.0, 2.0]


def outcome_of(kind):
    return LABEL if kind is OnlineClassifier else PRICE


def answers_of(model, x):
    return (
        model.predict_proba(x)
        if isinstance(model, OnlineClassifier)
        else np.stack(model.predict(x, True))
    )


def start_of(kind):
    return {"classes": [False, True]} if kind is OnlineClassifier else {}


def wide_rows(d):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2500, d))
    b = 2.0 * rng.normal(size=d) / np.sqrt(d)
    return x, rng.random(2500) < 1.0 / (1.0 + np.exp(-x @ b))


@pytest.mark.full
@pytest.mark.parametrize("d", [201, 400])
def test_more_than_200_columns_predict_and_are_told(d):
    x, y = wide_rows(d)
    with pytest.warns(UserWarning, match=f"{d} columns: .*'diag'.*prior_scale="):
        stream = OnlineClassifier().partial_fit(
            x[:1500], y[:1500], classes=[False, True]
        )
    with pytest.warns(UserWarning, match="columns"):
        table = OnlineClassifier().fit(x[:1500], y[:1500])
    batch = LogisticRegression(max_iter=500).fit(x[:1500], y[:1500])
    for model in (stream, table):
        loss = log_loss(y[1500:], model.predict_proba(x[1500:]))
        # A constant has .69; the best penalty .51 and .54.
        assert loss < {201: 0.54, 400: 0.6}[d]
        assert loss < log_loss(y[1500:], batch.predict_proba(x[1500:])) + 0.02
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OnlineClassifier(covariance="diag", prior_scale=0.3).partial_fit(
            x[:9], y[:9], classes=[False, True]
        )


@pytest.mark.full
def test_a_name_beyond_the_200th_makes_the_covariance_diagonal():
    x, y = wide_rows(201)
    names = [f"word {number}" for number in range(201)]
    model = OnlineClassifier()
    for row, label in zip(x[:40, :60], y, strict=False):
        model.learn_one(dict(zip(names[:60], row, strict=True)), bool(label))
    assert model.states_[0].posterior.loc.shape == (61,)
    with pytest.warns(UserWarning, match="201 columns"):
        model.learn_many(pd.DataFrame(x[40:300], columns=names), pd.Series(y[40:300]))
    assert isinstance(model.states_[0].posterior, nt.gaussian.families.MeanField)
    known = dict(zip(names, x[301], strict=True))
    assert 0.0 < model.predict_proba_one(known)[True] < 1.0


def test_a_diagonal_covariance_is_shrunk_by_the_prior_of_other_scales():
    coefficients = []
    for covariance in ("diag", "full"):
        model = OnlineClassifier(covariance=covariance)
        for value, label in zip([0.0, 0.001, 1.0, -1.0], [0, 1, 0, 1], strict=True):
            model.learn_one([value], label)
        coefficients.append(model.coef_.item())
    np.testing.assert_allclose(coefficients, [-0.49, -0.49], atol=0.05)


@pytest.mark.full
@pytest.mark.parametrize("far", [1e4, 1e6])
@pytest.mark.parametrize("place", [0, 20, 1000])
def test_a_far_row_moves_no_scale(far, place):
    rng = np.random.default_rng(0)
    x = rng.normal(size=1000)
    y = rng.random(1000) < 1.0 / (1.0 + np.exp(-4.0 * x))
    # Prior standard deviations 1 and 5, as without the far row, which tells nothing of the slope.
    signs = np.where(y, 1.0, -1.0)
    found = minimize(
        lambda t: (
            np.sum(np.logaddexp(0.0, -signs * (t[0] + t[1] * x)))
            + t[0] ** 2 / 50.0
            + t[1] ** 2 / 2.0
        ),
        np.zeros(2),
    )
    exact = 1.0 / (1.0 + np.exp(-found.x.sum()))
    rows, labels = np.insert(x, place, far)[:, None], np.insert(y, place, True)
    stream = OnlineClassifier()
    with warnings.catch_warnings():
        # Only a row that came first has to be forgotten.
        warnings.simplefilter("ignore" if place < 32 else "error")
        stream.partial_fit(rows, labels, classes=[False, True])
    table = OnlineClassifier().fit(rows, labels)
    for model in (stream, table):
        assert abs(model.predict_proba([[1.0]])[0, 1] - exact) < 0.02
    # On the line of a regression it is a datum as others are.
    z = 2.0 * x + 0.1 * rng.normal(size=1000)
    for stream in {False, place > 0}:
        model = OnlineRegressor(stream=stream).fit(rows, np.insert(z, place, 2.0 * far))
        np.testing.assert_allclose(model.noise_scale_, np.std(z - 2.0 * x), rtol=0.02)


@pytest.mark.full
@pytest.mark.parametrize("place", [0, 30, 31])
def test_a_far_row_is_not_all_that_is_known(place):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 2))
    y = rng.random(1000) < 1.0 / (1.0 + np.exp(-2.0 * x[:, 0] + x[:, 1]))
    clean = OnlineClassifier().fit(x, y).coef_
    x[place], y[place] = [1e8, 0.0], True
    with pytest.warns(
        nt.online.StreamWarning, match="more than 3000 standard deviations"
    ):
        stream = OnlineClassifier(stream=True).fit(x, y)
    np.testing.assert_allclose(stream.coef_, clean, atol=0.15)
    # The first of the random order of fit.
    order = np.random.RandomState(0).permutation(1000)
    x[[place, order[0]]], y[[place, order[0]]] = (
        x[[order[0], place]],
        y[[order[0], place]],
    )
    np.testing.assert_allclose(OnlineClassifier().fit(x, y).coef_, clean, atol=0.05)


@pytest.mark.parametrize("far", [1e3, pytest.param(1e6, marks=pytest.mark.full)])
def test_the_noise_of_a_stream_is_that_of_its_rows_by_every_verb(far):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 2))
    y = 2.0 + x @ [3.0, -1.0] + 0.1 * rng.normal(size=100)
    expected = (
        OnlineRegressor(stream=True)
        .fit(np.delete(x, 5, 0), np.delete(y, 5))
        .noise_scale_
    )
    x[5], y[5] = [far, 0.0], 2.0 + 3.0 * far
    single, many = OnlineRegressor(), OnlineRegressor()
    for row, outcome in zip(x, y, strict=True):
        single.learn_one(dict(zip("ab", row, strict=True)), outcome)
    many.learn_many(pd.DataFrame(x, columns=["a", "b"]), y)
    for model in (
        single,
        many,
        OnlineRegressor().partial_fit(x, y),
        OnlineRegressor().fit(x, y),
    ):
        # The far row is a datum too, and the prior is on other scales by a little.
        np.testing.assert_allclose(model.noise_scale_, expected, rtol=0.06)
    np.testing.assert_allclose(single.noise_scale_, many.noise_scale_, rtol=5e-3)


def test_a_rejected_row_sets_no_unit():
    plain, model = OnlineRegressor(), OnlineRegressor()
    model.learn_one({"a": 1e200}, 1e9)
    for row, outcome in zip(X, PRICE, strict=True):
        for each in (plain, model):
            each.learn_one({"a": row[0]}, outcome)
    assert model.noise_scale_ == pytest.approx(plain.noise_scale_, rel=1e-9)
    late = OnlineClassifier()
    late.learn_one({"a": 1.0}, "yes")
    late.learn_one({"a": 1e200}, "no")
    assert set(late.predict_proba_one({"a": 1.0})) == {"yes"}


@pytest.mark.full
@BOTH
def test_a_far_row_moves_no_prediction_of_a_rule_with_the_scales_of_fit(kind):
    model = kind(rule=nt.online.ngvi()).fit(X, outcome_of(kind))
    before = answers_of(model, X)
    model.learn_one([np.nan, 1e6], outcome_of(kind)[0])
    np.testing.assert_array_equal(answers_of(model, X), before)


def test_outcomes_that_differ_by_rounding_set_no_unit():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(40, 1)), np.r_[0.1 + 0.2, 0.3, rng.normal(size=38)]
    exact = (
        OnlineRegressor(stream=True).fit(x, np.r_[0.3, 0.3 + 1e-3, y[2:]]).noise_scale_
    )
    single = OnlineRegressor()
    for row, outcome in zip(x, y, strict=True):
        single.learn_one(row, outcome)
    for model in (single, OnlineRegressor(stream=True).fit(x, y)):
        np.testing.assert_allclose(model.noise_scale_, exact, rtol=1e-2)
    # Whatever the first difference, the unit changes nothing.
    fine = OnlineRegressor(stream=True).fit(x, np.r_[0.3, 0.3 + 1e-11, y[2:]])
    np.testing.assert_allclose(fine.noise_scale_, single.noise_scale_, rtol=1e-6)


@BOTH
def test_a_row_that_is_refused_changes_nothing(kind):
    y, model = outcome_of(kind), kind()
    for row, outcome in zip(X[:4], y, strict=False):
        model.learn_one({"a": row[0], "b": row[1]}, outcome)
    frame = pd.DataFrame(X, columns=["a", "b"])
    before = answers_of(model, frame)
    for row in (
        {"a": 1.0, "new": "text"},
        {"a": 1.0, "new": np.datetime64("2020-01-01")},
        {"new": [1.0, 2.0]},
    ):
        with pytest.raises((TypeError, ValueError), match="feature 'new'"):
            model.learn_one(row, y[0])
    with pytest.raises(ValueError, match=r"w must be at least 0.*and finite, got"):
        model.learn_one({"new": 1.0}, y[0], w=-1.0)
    assert model.feature_names_in_.tolist() == ["a", "b"]
    np.testing.assert_array_equal(answers_of(model, frame), before)
    fresh = kind()
    with pytest.raises(TypeError, match=r"feature 'a'.*.cat.codes, or"):
        fresh.learn_one({"a": "text"}, y[0])
    assert not hasattr(fresh, "n_features_in_")


@BOTH
def test_predictions_need_whole_rows(kind):
    model = kind()
    model.learn_one({"a": 1.0, "b": 2.0}, outcome_of(kind)[0])
    for value in (np.nan, None, np.inf, 1e300):
        with pytest.raises(ValueError, match=r"feature 'b' is.*in before a prediction"):
            model.predict_one({"a": 1.0, "b": value})
    by_place = kind().partial_fit(X, outcome_of(kind), **start_of(kind))
    with pytest.raises(ValueError, match=r"feature 1 is nan.*in before a prediction"):
        by_place.predict_one([1.0, np.nan])
    with pytest.raises(ValueError, match=r"X\[0, 1\] is 1e\+300.*must be at most"):
        by_place.predict([[1.0, 1e300]])
    with pytest.raises(ValueError, match=r"X\[3, 0\] is -1e\+200.*must be at most"):
        kind().fit(
            np.where(np.arange(24)[:, None] == 3, [-1e200, 1.0], X), outcome_of(kind)
        )


@BOTH
def test_dates_are_refused_and_missing_ones_are_missing(kind):
    frame = pd.DataFrame(
        {"a": X[:, 0], "when": pd.date_range("2020-01-01", periods=24)}
    )
    with pytest.raises(
        TypeError,
        match=r"^X must.*columns \['when'\]. Pass numbers, such as days.*the first date",
    ):
        kind().fit(frame, outcome_of(kind))
    with pytest.raises(TypeError, match=r"feature 'when'.*days.*since the first date"):
        kind().learn_one({"a": 1.0, "when": frame["when"][0]}, outcome_of(kind)[0])
    objects = kind().fit(X.astype(object), outcome_of(kind))
    np.testing.assert_array_equal(
        answers_of(objects, X), answers_of(kind().fit(X, outcome_of(kind)), X)
    )


@BOTH
def test_a_weight_is_a_row_repeated(kind):
    weight = np.arange(24) % 4
    weighted = kind().fit(X, outcome_of(kind), sample_weight=weight)
    repeated = kind().fit(
        np.repeat(X, weight, axis=0), np.repeat(outcome_of(kind), weight)
    )
    np.testing.assert_allclose(
        answers_of(weighted, X), answers_of(repeated, X), rtol=1e-12
    )
    plain = kind().fit(X, outcome_of(kind))
    ones = kind().fit(X, outcome_of(kind), sample_weight=np.ones(24))
    np.testing.assert_array_equal(answers_of(ones, X), answers_of(plain, X))
    for wrong, match in (
        ([1.0], "shape"),
        (-np.ones(24), "at least 0"),
        (np.zeros(24), "zero for all"),
    ):
        with pytest.raises(ValueError, match=match):
            kind().fit(X, outcome_of(kind), sample_weight=wrong)


@pytest.mark.parametrize(
    "kind", tiered([OnlineClassifier, OnlineRegressor], unit=[OnlineRegressor])
)
def test_weights_of_a_stream_are_powers(kind):
    y, weight = outcome_of(kind), 0.5 + np.arange(24) % 3
    stream = kind().partial_fit(X, y, sample_weight=weight, **start_of(kind))
    single = kind().partial_fit(
        X[:1], y[:1], sample_weight=weight[:1], **start_of(kind)
    )
    for row, outcome, w in zip(X[1:], y[1:], weight[1:], strict=True):
        single.learn_one(row, outcome, w)
    np.testing.assert_allclose(answers_of(single, X), answers_of(stream, X), rtol=1e-9)
    # The same power on all rows is alpha.
    half = kind().partial_fit(X, y, sample_weight=np.full(24, 0.5), **start_of(kind))
    np.testing.assert_allclose(
        answers_of(half, X),
        answers_of(kind(alpha=0.5).partial_fit(X, y, **start_of(kind)), X),
        rtol=1e-9,
    )
    before = answers_of(single, X)
    single.learn_one(X[0], y[0], 0.0)
    np.testing.assert_array_equal(answers_of(single, X), before)


def test_weighted_regression_is_conjugate():
    weight = 0.25 + np.arange(24) % 3
    model = OnlineRegressor(prior_scale=2.0, stream=True).fit(
        X, PRICE, sample_weight=weight
    )
    loc, sd = X.mean(axis=0), X.std(axis=0)
    # Scales were fixed at the 16th row.
    loc, sd = X[:16].mean(axis=0), X[:16].std(axis=0)
    z = np.column_stack([np.ones(24), (X - loc) / sd])
    precision = z.T @ (weight[:, None] * z) + np.diag(
        np.array([10.0, 2.0, 2.0]) ** -2.0
    )
    mean = np.linalg.solve(precision, z.T @ (weight * (PRICE - PRICE[0])))
    np.testing.assert_allclose(model.coef_, mean[1:] / sd, rtol=1e-6)
    b = np.sum(weight * (PRICE - PRICE[0]) ** 2) - mean @ precision @ mean
    np.testing.assert_allclose(
        model.noise_scale_, np.sqrt(b / np.sum(weight[1:])), rtol=1e-4
    )


def test_classes_have_weights():
    y = np.where(np.arange(24) < 4, "rare", "often")
    weight = np.where(y == "rare", 3.0, 0.6)
    balanced = OnlineClassifier(class_weight="balanced").fit(X, y)
    np.testing.assert_allclose(
        balanced.predict_proba(X),
        OnlineClassifier().fit(X, y, sample_weight=weight).predict_proba(X),
    )
    mapped = OnlineClassifier(class_weight={"rare": 3.0, "often": 0.6})
    for row, label in zip(X, y, strict=True):
        mapped.learn_one(row, str(label))
    stream = OnlineClassifier().partial_fit(
        X, y, classes=["often", "rare"], sample_weight=weight
    )
    np.testing.assert_allclose(
        mapped.predict_proba(X)[:, ::-1], stream.predict_proba(X), rtol=1e-9
    )
    with pytest.raises(ValueError, match=r"balanced.*or give a mapping"):
        OnlineClassifier(class_weight="balanced").learn_one([1.0], "rare")
    with pytest.raises(ValueError, match="class_weight"):
        OnlineClassifier(class_weight="even").fit(X, y)


@pytest.mark.parametrize("weight", [{0: -1.0}, {0: np.nan}, "foo", [1, 2], {0: "a"}])
def test_wrong_weights_of_classes_are_refused_by_every_verb(weight):
    model = OnlineClassifier(class_weight=weight)
    calls = [
        lambda: model.learn_one({"a": 1.0}, 0),
        lambda: model.fit(X, LABEL),
        lambda: model.partial_fit(X, LABEL, classes=[False, True]),
        lambda: model.learn_many(pd.DataFrame(X), pd.Series(LABEL)),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError), match="class_weight"):
            call()


def test_labels_of_a_stream():
    day, model = np.datetime64("2020-01-01"), OnlineClassifier()
    for value, label in ((1.0, 0), (0.0, day), (1.0, 0), (0.0, day)):
        model.learn_one({"a": value}, label)
    assert model.predict_one({"a": 0.0}) == day
    for label, error in (
        (None, ValueError),
        (pd.NA, ValueError),
        (pd.NaT, ValueError),
        ([1], TypeError),
    ):
        with pytest.raises(error, match="label"):
            model.learn_one({"a": 1.0}, label)


def test_log_odds_and_log_probabilities():
    for y in (LABEL, np.arange(24) % 3):
        model = OnlineClassifier().fit(X, y)
        np.testing.assert_allclose(
            model.predict_log_proba(X), np.log(model.predict_proba(X))
        )
        odds = model.decision_function(X)
        chosen = odds > 0 if odds.ndim == 1 else np.argmax(odds, axis=1)
        np.testing.assert_array_equal(
            model.classes_[chosen.astype(int)], model.predict(X)
        )
    far = OnlineClassifier().fit(1e3 * X, LABEL)
    assert np.isfinite(far.decision_function(1e9 * X)).all()
    assert far.predict_proba(1e9 * X).max() <= 1.0
    log_proba = cross_val_predict(
        OnlineClassifier(), X, LABEL, cv=2, method="predict_log_proba"
    )
    assert np.isfinite(log_proba).all()


@BOTH
def test_frames_are_learned_as_their_rows(kind):
    y = outcome_of(kind)
    many, single = kind(), kind()
    frame = pd.DataFrame(X.copy(), columns=["a", "b"], index=np.arange(24) + 100)
    frame.loc[105, "b"] = np.nan
    many.learn_many(frame[:10], pd.Series(y[:10]))
    many.learn_many(frame[10:].assign(c=1.0), pd.Series(y[10:]), w=np.full(14, 2.0))
    for number, row in enumerate(
        frame.assign(c=np.r_[np.zeros(10), np.ones(14)]).to_dict("records")
    ):
        row = {name: row[name] for name in row if name != "c" or number >= 10}
        single.learn_one(row, y[number].item(), 1.0 if number < 10 else 2.0)
    rest = frame.dropna().assign(c=0.5)
    if kind is OnlineClassifier:
        probabilities = many.predict_proba_many(rest)
        assert probabilities.index.equals(rest.index)
        expected = [single.predict_proba_one(row) for row in rest.to_dict("records")]
        np.testing.assert_allclose(
            probabilities[True], [each[True] for each in expected], rtol=1e-9
        )
        assert many.predict_many(rest).tolist() == [
            single.predict_one(row) for row in rest.to_dict("records")
        ]
    else:
        expected = [single.predict_one(row) for row in rest.to_dict("records")]
        np.testing.assert_allclose(many.predict_many(rest), expected, rtol=1e-9)
    assert many.predict_many(rest).tolist() == pytest.approx(
        [single.predict_one(r) for r in rest.to_dict("records")]
    )
    assert int(many.states_[0].rejected) == int(single.states_[0].rejected) == 1
    with pytest.raises(TypeError, match=r"^X must be a.*data frame.*takes arrays"):
        many.learn_many(X, y)
    with pytest.raises(
        ValueError, match=r"missing or infinite.*in before a prediction"
    ):
        many.predict_many(frame)


@BOTH
def test_frames_whose_columns_have_no_names_are_read_in_their_order(kind):
    frame = pd.DataFrame(X)
    model = kind().fit(frame, outcome_of(kind))
    if kind is OnlineClassifier:
        np.testing.assert_array_equal(
            model.predict_proba_many(frame), model.predict_proba(frame)
        )
    else:
        np.testing.assert_array_equal(model.predict_many(frame), model.predict(frame))
    with pytest.raises(
        ValueError, match=r"^the columns of the.*no names.*takes arrays"
    ):
        model.learn_many(frame, outcome_of(kind))
    twice = pd.DataFrame(X, columns=["a", "a"])
    for call in (
        lambda: kind().learn_many(twice, outcome_of(kind)),
        lambda: kind().fit(twice, outcome_of(kind)),
    ):
        with pytest.raises(
            ValueError, match=r"^each column must have.*\['a'\] stand twice"
        ):
            call()
    named = pd.DataFrame(X, columns=["a", "b"])
    with pytest.raises(
        ValueError, match=r"y has shape \(23,\); expected \(24,\).*one for each row"
    ):
        kind().learn_many(named, outcome_of(kind)[:23])


def test_dates_are_no_outcomes():
    days = pd.date_range("2020-01-01", periods=24)
    with pytest.raises(
        TypeError, match=r"y must be real numbers.*days.*since the first date"
    ):
        OnlineRegressor().fit(X, days)
    with pytest.raises(
        TypeError, match=r"the outcome must be real numbers.*days.*since the first date"
    ):
        OnlineRegressor().learn_one(X[0], days[0])


def test_a_piece_without_weight_is_no_piece():
    model = OnlineClassifier().partial_fit(
        X[:3], LABEL[:3], classes=[False, True], sample_weight=np.zeros(3)
    )
    model.partial_fit(X[3:], LABEL[3:])
    expected = OnlineClassifier().partial_fit(X[3:], LABEL[3:], classes=[False, True])
    np.testing.assert_array_equal(model.predict_proba(X), expected.predict_proba(X))


def test_a_standard_deviation_of_one_prediction():
    model = OnlineRegressor().fit(X, PRICE + np.sin(7.0 * X[:, 0]))
    mean, sd = model.predict(X[:1], return_std=True)
    np.testing.assert_allclose(
        model.predict_one(X[0], return_std=True), (mean[0], sd[0]), rtol=1e-9
    )
    assert OnlineRegressor().predict_one(X[0], return_std=True) == (0.0, np.inf)


def test_rejected_rows_are_told():
    y = PRICE.copy()
    y[3] = 1e300
    with pytest.warns(
        nt.online.StreamWarning,
        match=r"1 of 24 rows were rejected.*far from the others",
    ):
        OnlineRegressor(rule=nt.online.ngvi()).fit(X, y)


@pytest.mark.full
def test_wide_real_rows_predict():
    x, y = load_breast_cancer(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    pairs = np.column_stack([x, *(x[:, [i]] * x[:, i:] for i in range(30))])
    order = np.random.default_rng(1).permutation(len(x))
    train, test = order[:400], order[400:]
    batch = LogisticRegression(max_iter=2000).fit(
        StandardScaler().fit(pairs[train]).transform(pairs[train]), y[train]
    )
    expected = log_loss(
        y[test],
        batch.predict_proba(StandardScaler().fit(pairs[train]).transform(pairs[test])),
    )
    for stream in (False, True):
        with pytest.warns(UserWarning, match="495 columns"):
            model = OnlineClassifier(stream=stream).fit(pairs[train], y[train])
        assert log_loss(y[test], model.predict_proba(pairs[test])) < max(expected, 0.12)
