"""What mixtures, probabilistic PCA and sparse regressions read as rows, and what they refuse."""

from decimal import Decimal

import jax
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from conftest import tiered

import numpyro_tempered as nt
from numpyro_tempered import mixtures, ppca, sparse

KEY = jax.random.key(3)
# Seconds since 1970 in a year beyond 2038: whole numbers that 32 bits do not hold.
FAR = 3_095_000_000
WHOLE = np.random.default_rng(0).integers(-2000, 2000, (20, 2)) + np.repeat(
    [[0, 0], [9000, 9000]], 10, axis=0
)
FLOATS = WHOLE.astype(float)
TARGET = FLOATS @ [2e-3, 1e-3]
COMPONENT = nt.mixtures.components.diagonal_gaussian(
    2, **nt.mixtures.components.scaled_to(FLOATS)
)
MIXTURE = {"num_components": 2, "num_restarts": 2}
SLABS = {"inclusion_prob": 0.5, "slab_scale": 0.003, "intercept_scale": 10.0}


def fit_mixture(x, component=COMPONENT, **options):
    return mixtures.fit(KEY, x, component, num_draws=2, **MIXTURE, **options)


def fit_linear(x):
    return sparse.fit_linear(KEY, x, TARGET, noise_scale=0.5, **SLABS)


def fit_logistic(x):
    return sparse.fit_logistic(KEY, x, TARGET > 10, **SLABS)


@pytest.fixture(scope="module")
def fits():
    return {
        "mixture": fit_mixture(FLOATS),
        "weighted": fit_mixture(FLOATS, sample_weight=COUNTS),
        "ppca": ppca.fit(KEY, FLOATS, num_factors=1),
        "linear": fit_linear(FLOATS),
        "logistic": fit_logistic(FLOATS),
    }


def log_likelihood(fit, *data):
    draws = nt.to_inference_data(fit, *data, rng_key=KEY, num_samples=4)
    (values,) = draws["log_likelihood"].data_vars.values()
    return values


def mesh():
    return jax.make_mesh((1,), ("rows",))


VERBS = {
    "mixtures.fit": lambda x, fits: fit_mixture(x).posterior.loc,
    "mixtures.em": lambda x, fits: mixtures.em(KEY, x, COMPONENT, **MIXTURE).parameters[
        "loc"
    ],
    "mixtures.select_num_components": lambda x, fits: (
        mixtures.select_num_components(
            KEY,
            x,
            COMPONENT,
            num_restarts=2,
            num_components=[2],
            num_draws=2,
            baselines=False,
        ).fit.posterior.loc
    ),
    "mixtures.fit, chunks": lambda x, fits: (
        mixtures.fit(KEY, lambda: [x], COMPONENT, num_draws=2, **MIXTURE).posterior.loc
    ),
    "mixtures.log_predictive": lambda x, fits: mixtures.log_predictive(
        fits["mixture"], x
    ),
    "mixtures.predict": lambda x, fits: mixtures.predict(fits["mixture"], x),
    "mixtures.on": lambda x, fits: fits["mixture"].on(x).observed["x"],
    "mixtures.shard_rows": lambda x, fits: mixtures.shard_rows(x, mesh())[0],
    "components.scaled_to": lambda x, fits: nt.mixtures.components.scaled_to(x)["loc"],
    "mixtures.to_inference_data": lambda x, fits: log_likelihood(fits["mixture"], x),
    "ppca.fit": lambda x, fits: ppca.fit(KEY, x, num_factors=1).loadings,
    "ppca.select_num_factors": lambda x, fits: (
        ppca.select_num_factors(KEY, x, num_factors=[0, 1]).elbo
    ),
    "ppca.transform": lambda x, fits: ppca.transform(fits["ppca"], x).loc,
    "ppca.impute": lambda x, fits: ppca.impute(fits["ppca"], x).x,
    "ppca.log_predictive": lambda x, fits: (
        ppca.log_predictive(KEY, fits["ppca"], x, 4).value
    ),
    "ppca.to_inference_data": lambda x, fits: log_likelihood(fits["ppca"], x),
    "sparse.fit_linear": lambda x, fits: fit_linear(x).posterior.mean,
    "sparse.fit_logistic": lambda x, fits: fit_logistic(x).posterior.mean,
    "sparse.predict": lambda x, fits: sparse.predict(fits["linear"], x).mean,
    "sparse.predict_proba": lambda x, fits: (
        sparse.predict_proba(KEY, fits["logistic"], x, 4).mean
    ),
    "sparse.to_inference_data": lambda x, fits: log_likelihood(
        fits["linear"], x, TARGET
    ),
}
# Draws compile the models of NumPyro.
QUICK = [
    name
    for name in VERBS
    if not name.endswith(("to_inference_data", "select_num_components"))
]
# Verbs that read rows as others do, by programs of their own.
READ_ALIKE = {
    "mixtures.fit, chunks",
    "mixtures.fit",
    "mixtures.em",
    "mixtures.on",
    "ppca.select_num_factors",
    "ppca.log_predictive",
}


@pytest.mark.parametrize(
    "verb", tiered(VERBS, unit=[name for name in QUICK if name not in READ_ALIKE])
)
def test_numbers_of_any_kind_are_the_same_numbers(verb, fits):
    expected = VERBS[verb](FLOATS, fits)
    decimals = [[Decimal(int(value)) for value in row] for row in WHOLE]
    for rows in (
        FLOATS.astype(object),
        np.array(decimals),
        pd.DataFrame(FLOATS).astype(object),
    ):
        np.testing.assert_array_equal(VERBS[verb](rows, fits), expected)


@pytest.mark.parametrize("verb", tiered(VERBS, unit=QUICK))
def test_what_holds_no_numbers_is_refused_with_advice(verb, fits):
    dates = pd.date_range("2020-01-01", periods=20)
    refused = {
        r"dense, got a sparse csr_matrix. Pass x\.toarray\(\)": scipy.sparse.csr_matrix(
            FLOATS
        ),
        r"columns \['when'\]\. Pass numbers, such as days": pd.DataFrame(
            {"a": FLOATS[:, 0], "when": dates}
        ),
        r"columns \['for'\]\. Pass numbers, such as days": pd.DataFrame(
            {"a": FLOATS[:, 0], "for": dates - dates[0]}
        ),
        "complex128.* Pass real and imaginary parts": FLOATS + 0j,
    }
    for message, rows in refused.items():
        with pytest.raises(TypeError, match=message):
            VERBS[verb](rows, fits)


def test_whole_numbers_beyond_32_bits_keep_their_digits():
    far = WHOLE + FAR
    near_fit, far_fit = (
        fit_mixture(
            x,
            nt.mixtures.components.diagonal_gaussian(
                2, **nt.mixtures.components.scaled_to(x)
            ),
        )
        for x in (FLOATS, far)
    )
    np.testing.assert_allclose(
        far_fit.posterior.loc - FAR, near_fit.posterior.loc, atol=0.01
    )
    near, predicted = (
        mixtures.log_predictive(*pair) for pair in ((near_fit, FLOATS), (far_fit, far))
    )
    np.testing.assert_allclose(predicted, near, atol=1e-4)
    near_fit, far_fit = (ppca.fit(KEY, x, num_factors=1) for x in (FLOATS, far))
    np.testing.assert_allclose(far_fit.location - FAR, near_fit.location, atol=0.01)
    np.testing.assert_allclose(
        ppca.transform(far_fit, far).loc,
        ppca.transform(near_fit, FLOATS).loc,
        atol=1e-4,
    )
    with pytest.warns(
        UserWarning,
        match=r"column 0 of the data is so far from 0 that float32.*let jax have",
    ):
        far_fit.on(far)
    with pytest.raises(
        ValueError,
        match=r"^x holds.*single precision counts in steps of 256.*enable double precision",
    ):
        mixtures.shard_rows(far, mesh())
    rows, _ = mixtures.shard_rows(WHOLE * 10**6, mesh())
    np.testing.assert_allclose(rows, FLOATS * 1e6, rtol=1e-6)


@pytest.mark.parametrize(
    ("fit", "predict", "target"),
    [
        (fit_linear, sparse.predict, TARGET),
        (fit_logistic, lambda *args: sparse.predict_proba(KEY, *args, 50), TARGET > 10),
    ],
)
def test_columns_far_from_0_predict_as_those_near_0(fit, predict, target):
    far, far_fit = WHOLE + FAR, fit(WHOLE + FAR)
    np.testing.assert_allclose(
        predict(far_fit, far), predict(fit(FLOATS), FLOATS), rtol=1e-4, atol=1e-5
    )
    run = far_fit.on(far, target)
    np.testing.assert_allclose(run.args[0], FLOATS - FLOATS.mean(axis=0), atol=0.01)


COUNTS = 1 + np.arange(20) % 3
WEIGHTED = {
    "fit": lambda weight, fits: fit_mixture(FLOATS, sample_weight=weight).counts,
    "em": lambda weight, fits: (
        mixtures.em(KEY, FLOATS, COMPONENT, sample_weight=weight, **MIXTURE).counts
    ),
    "fit, chunks": lambda weight, fits: (
        mixtures.fit(KEY, [(FLOATS, weight)], COMPONENT, num_draws=2, **MIXTURE).counts
    ),
    "scaled_to": lambda weight, fits: nt.mixtures.components.scaled_to(
        FLOATS, sample_weight=weight
    )["loc"],
    "shard_rows": lambda weight, fits: mixtures.shard_rows(FLOATS, mesh(), weight)[1],
    "stochastic": lambda weight, fits: (
        mixtures.stochastic(COMPONENT, num_components=2)
        .init(KEY, FLOATS, weight)
        .counts
    ),
    "on": lambda weight, fits: (
        fits["weighted"].on(FLOATS, sample_weight=weight).observed["x"]
    ),
}


@pytest.mark.parametrize(
    "verb", tiered(WEIGHTED, unit=["fit", "fit, chunks", "scaled_to", "shard_rows"])
)
def test_weights_are_numbers_of_any_kind(verb, fits):
    weigh = WEIGHTED[verb]
    expected = weigh(COUNTS.astype(float), fits)
    unmasked = np.ma.masked_array(COUNTS, np.zeros(20, bool))
    nullable = pd.Series(COUNTS, dtype="Int64")
    for weight in (
        COUNTS,
        COUNTS.astype(object),
        pd.Series(COUNTS),
        nullable,
        unmasked,
        COUNTS.tolist(),
    ):
        np.testing.assert_array_equal(weigh(weight, fits), expected)


@pytest.mark.parametrize("verb", WEIGHTED)
def test_weights_that_are_no_numbers_are_refused(verb, fits):
    weigh = WEIGHTED[verb]
    dates = pd.Series(pd.date_range("2020-01-01", periods=20))
    for weight in (
        dates,
        COUNTS + 0j,
        COUNTS.astype(str),
        scipy.sparse.csr_matrix(COUNTS[:, None]),
    ):
        with pytest.raises(TypeError, match="sample_weight must be"):
            weigh(weight, fits)
    with pytest.raises(
        ValueError, match=r"sample_weight must be finite.*and not negative"
    ):
        weigh(np.ma.masked_equal(COUNTS, 2), fits)


def test_copies_among_many_columns_are_named():
    rows = np.random.default_rng(1).normal(size=(3, 20_000))
    rows[:, [7, 19_999]] = rows[:, [3, 11]]
    with pytest.warns(
        UserWarning,
        match=r"columns \[7, 19999\] of x are copies of earlier ones.*Leave them out",
    ):
        ppca.base.warn_of_columns(rows)
