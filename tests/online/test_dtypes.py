"""Rows of every dtype: the numbers of the same rows in double precision, or a sentence that refuses them."""

import warnings
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from conftest import tiered
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import MeanField

KEY = jax.random.key(0)
UNIT, NOISE = 1e9, 1e8
# Far beyond 32 bits, with a mean of 3.095e9.
LARGE = 3_000_000_000 + 1_000_000 * np.arange(0, 191, 10)
X = np.full((len(LARGE), 1), UNIT)
SQUARED = nt.expectations.squared(NOISE)
RULE = nt.online.ngvi()


def prior(d=1, scale=10.0):
    return MeanField(jnp.zeros(d), jnp.full(d, scale))


def model(x, y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    eta = numpyro.deterministic("eta", x[:, 0] * theta)
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)


@pytest.fixture(scope="module")
def online():
    eta = nt.expectations.gauss_hermite(predictor="eta")
    online = nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, RULE, eta)
    online.init(KEY, X[:1], np.ones(1))
    return online


def learn(service, y):
    for row, outcome in zip(X, y, strict=True):
        service.learn(row, outcome)
    return service.state


def of_grid(y):
    states, _ = nt.online.run_grid(
        nt.online.grid(nt.online.ngvi, step_size=[1.0, 0.5]), SQUARED, prior(), X, y
    )
    return jax.tree.map(lambda leaf: leaf[0], states)


def of_shards(y):
    return nt.online.run_partitioned(
        nt.online.partitioned(SQUARED, damping=1.0), prior(), [(X, y)]
    )


def of_padded(y):
    (x, y), mask = nt.online.pad_batch(X, y)
    return nt.online.update(RULE, SQUARED, RULE.init(prior()), x, y, mask=mask)[0]


def of_store(y):
    store = nt.online.pending(len(X), X[0], 0.0)
    store = nt.online.remember(store, np.arange(len(X)), X, y)
    (x, y), found, _ = nt.online.recall(store, np.arange(len(X)))
    return nt.online.update(RULE, SQUARED, RULE.init(prior()), x, y, mask=found)[0]


VERBS = {
    "run": lambda online, y: nt.online.run(RULE, SQUARED, RULE.init(prior()), X, y)[0],
    "update": lambda online, y: nt.online.update(
        RULE, SQUARED, RULE.init(prior()), X, y
    )[0],
    "run_chunks": lambda online, y: nt.online.run_chunks(
        RULE, SQUARED, RULE.init(prior()), [(X[:7], y[:7]), (X[7:], y[7:])], size=8
    )[0],
    "run_grid": lambda online, y: of_grid(y),
    "run_partitioned": lambda online, y: of_shards(y),
    "pad_batch": lambda online, y: of_padded(y),
    "remember": lambda online, y: of_store(y),
    "Service": lambda online, y: learn(
        nt.online.Service(RULE, SQUARED, RULE.init(prior()), X[0], 1), y
    ),
    "OnlineVI.run": lambda online, y: online.run(KEY, X, y)[0],
    "OnlineVI.update": lambda online, y: online.update(
        online.init(KEY, X[:1], np.ones(1)), X, y
    )[0],
    "OnlineVI.run_chunks": lambda online, y: online.run_chunks(
        KEY, [(X[:7], y[:7]), (X[7:], y[7:])], size=8
    )[0],
    "OnlineVI.service": lambda online, y: learn(
        online.service(online.init(KEY, X[:1], y[:1]), X[:1], np.ones(1, int)), y
    ),
}


# Each reads outcomes in a place of its own.
READERS = ["run", "run_chunks", "run_partitioned", "Service", "OnlineVI.run_chunks"]


@pytest.mark.parametrize("name", tiered(VERBS, unit=READERS))
def test_integers_beyond_32_bits_and_complex_numbers(online, name):
    # Noise and prior of the model are known, so that Bayes is exact.
    weight = len(X) * UNIT**2 / NOISE**2
    expected = weight / (weight + 0.01) * LARGE.mean() / UNIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nt.online.StreamWarning)
        for y in (LARGE, LARGE.astype(np.uint64), LARGE.tolist()):
            np.testing.assert_allclose(
                VERBS[name](online, y).posterior.loc, expected, rtol=1e-5
            )
    with pytest.raises(TypeError, match=r"complex.*columns of their own"):
        VERBS[name](online, LARGE + 0.0j)


@pytest.mark.skipif(
    jax.config.jax_enable_x64, reason="double precision tells them apart"
)
@pytest.mark.parametrize(
    "name", sorted(set(VERBS) - {"run_chunks", "OnlineVI.run_chunks"})
)
def test_integers_that_single_precision_does_not_tell_apart_are_refused(online, name):
    close = 2**40 + np.arange(len(X))
    if "ervice" in name:
        # One at a time each has its floating number.
        assert VERBS[name](online, close).posterior.loc[0] > 1000.0
        return
    with pytest.raises(
        ValueError,
        match=r"holds integers from 1099511627776 to \d+, and single precision counts",
    ):
        VERBS[name](online, close)


# By dtype: rows and outcomes of these whole numbers, and whether they are refused.
D, NUM_ROWS = 2, 6
NUMPY = [
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "bool",
    "float16",
    "float32",
    "float64",
]


def table(values, convert):
    if values.ndim == 1:
        return convert(pd.Series(values))
    return pd.DataFrame(
        {f"x{k}": convert(pd.Series(column)) for k, column in enumerate(values.T)}
    )


def of_polars(values):
    polars = pytest.importorskip("polars")
    return (
        polars.Series(values)
        if values.ndim == 1
        else polars.DataFrame(values, schema=["a", "b"])
    )


def of_arrow(values):
    arrow = pytest.importorskip("pyarrow")
    if values.ndim == 1:
        return arrow.array(values)
    return arrow.table({f"x{k}": column for k, column in enumerate(values.T)})


READ = {name: lambda values, name=name: values.astype(name) for name in NUMPY} | {
    "lists": np.ndarray.tolist,
    "objects": lambda values: values.astype(object),
    "decimals": lambda values: np.vectorize(Decimal, otypes=[object])(
        values.astype(object)
    ),
    "nullable": lambda values: table(values, lambda column: column.astype("Int64")),
    "categories of numbers": lambda values: table(
        values, lambda column: column.astype("category")
    ),
    "nullable floats": lambda values: table(
        values, lambda column: column.astype("Float32")
    ),
    "polars": of_polars,
    "arrow": of_arrow,
    "jax": jnp.asarray,
    "masked": np.ma.asarray,
}
REFUSED = {
    "words": lambda values: table(values, lambda column: column.map("w{}".format)),
    "categories": lambda values: table(
        values, lambda column: column.map("w{}".format).astype("category")
    ),
    "text": lambda values: values.astype(str),
    "dates": lambda values: values.astype("datetime64[s]"),
    "dates in tables": lambda values: table(values, pd.to_datetime),
    "spans": lambda values: values.astype("timedelta64[s]"),
    "complex": lambda values: values + 0j,
    "sets": lambda values: np.frompyfunc(lambda v: {v}, 1, 1)(values),
}
PLAIN = nt.expectations.squared()


def by_run(x, y):
    state, losses = nt.online.run(RULE, PLAIN, RULE.init(prior(D, 1.0)), x, y)
    return state, losses.at_mean


def by_service(convert, x, y):
    service = nt.online.Service(RULE, PLAIN, RULE.init(prior(D, 1.0)), convert(x[0]), 1)
    return service.state, [
        service.learn(convert(x[n]), convert(y[n : n + 1])[0]).at_mean
        for n in range(len(x))
    ]


def range_of(name):
    if name == "bool":
        return 0, 1
    if not name.startswith(("int", "uint")):
        return -2048, 2048
    info = np.iinfo(name)
    # Beyond, single precision does not tell integers apart.
    return max(info.min, -(2**23)), min(info.max, 2**23)


def assert_alike(found, expected):
    (state, losses), (other, theirs) = found, expected
    np.testing.assert_allclose(losses, theirs, rtol=1e-4, atol=1e-3)
    assert int(state.rejected) == int(other.rejected)
    for ours, same in zip(state.posterior, other.posterior, strict=True):
        np.testing.assert_allclose(ours, same, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
@pytest.mark.parametrize("name", READ)
@settings(deadline=None, max_examples=6, derandomize=True)
@given(data=st.data())
def test_rows_of_every_dtype_are_those_of_double_precision(name, data):
    low, high = range_of(name)
    numbers = st.one_of(
        st.integers(max(low, -3), min(high, 3)), st.sampled_from([low, high])
    )
    rows = data.draw(
        st.lists(st.tuples(*[numbers] * (D + 1)), min_size=NUM_ROWS, max_size=NUM_ROWS)
    )
    x, y = np.array(rows)[:, :D], np.array(rows)[:, D]
    convert, expected = READ[name], by_run(x.astype(float), y.astype(float))
    assert_alike(by_run(convert(x), convert(y)), expected)
    one_by_one = by_service(convert, x, y)
    assert_alike((expected[0], one_by_one[1]), expected)


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_are_no_numbers_are_refused_in_a_sentence(name):
    x, y = np.arange(12).reshape(NUM_ROWS, D), np.arange(NUM_ROWS)
    convert = REFUSED[name]
    service = nt.online.Service(RULE, PLAIN, RULE.init(prior(D, 1.0)), [1, 1], 1)
    for call in (
        lambda: by_run(convert(x), y),
        lambda: by_run(x, convert(y)),
        lambda: service.learn(convert(x[0]), 1),
    ):
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        assert "must be real numbers" in str(error.value)
        assert len(str(error.value)) < 300
    assert int(service.state.count + service.state.rejected) == 0
