"""Running standardisation of features."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiered

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField, family_of
from numpyro_tempered.online.streams import standardise

pytestmark = pytest.mark.usefixtures("strict")
SQUARED = nt.expectations.squared()
NGVI = nt.online.ngvi(0.5)


def make_rows(n=30, seed=0):
    """Columns: ones, years, a constant, a small one, a large one."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 3))
    x = np.stack(
        [
            np.ones(n),
            2000 + 5 * z[:, 0],
            np.full(n, 0.1),
            1e-4 * z[:, 1],
            1e4 * z[:, 2] - 3e4,
        ],
        axis=1,
    )
    return x, z @ [1.0, -2.0, 0.5] + 3 + 0.1 * rng.normal(size=n)


def make_prior(d=5, dtype=None):
    return MeanField(np.zeros(d, dtype), np.ones(d, dtype))


def scaled_by_hand(x, intercept):
    """Row t by the statistics of rows 1 to t."""
    rows = []
    for t in range(1, len(x) + 1):
        if intercept is None:
            loc, scale = 0.0, np.sqrt(np.mean(x[:t] ** 2, axis=0))
        else:
            loc, scale = x[:t].mean(axis=0), x[:t].std(axis=0)
            scale = np.where(scale > 1e-12 * np.abs(loc), scale, 1.0)
            loc[intercept], scale[intercept] = 0.0, 1.0
        rows.append((x[t - 1] - loc) / scale)
    return np.array(rows)


@pytest.mark.parametrize("intercept", tiered([None, -5], unit=[-5]))
def test_a_round_sees_the_features_by_statistics_up_to_itself(x64, intercept):
    x, y = make_rows()
    rule = nt.online.standardise(NGVI, intercept=intercept)
    state, losses = nt.online.run(rule, SQUARED, rule.init(make_prior()), x, y)
    expected, others = nt.online.run(
        NGVI, SQUARED, NGVI.init(make_prior()), scaled_by_hand(x, intercept), y
    )
    np.testing.assert_allclose(losses.expected, others.expected, rtol=1e-9)
    np.testing.assert_allclose(
        state.posterior.loc, expected.posterior.loc, rtol=1e-8, atol=1e-10
    )
    np.testing.assert_allclose(
        state.posterior.scale, expected.posterior.scale, rtol=1e-9
    )
    # Constant columns are no division by zero.
    assert int(state.rejected) == 0


@pytest.mark.parametrize("intercept", tiered([None, 0], unit=[None]))
def test_units_do_not_matter(intercept):
    x, y = (leaf.astype(np.float32) for leaf in make_rows())
    # Powers of two, so that no digit is lost.
    units = np.array([1, 2**-10, 2**5, 2**12, 2**-14], np.float32)
    rule = nt.online.standardise(nt.online.sva(0.1), intercept=intercept)
    state = rule.init(make_prior(dtype=np.float32))
    ours, losses = nt.online.run(rule, SQUARED, state, x, y)
    theirs, others = nt.online.run(rule, SQUARED, state, x * units, y)
    np.testing.assert_array_equal(losses.expected, others.expected)
    np.testing.assert_array_equal(ours.posterior.loc, theirs.posterior.loc)


@pytest.mark.full
def test_batches_masks_and_updates_gather_the_same_statistics(x64):
    x, y = make_rows(12)
    rule = nt.online.standardise(NGVI, intercept=0)
    state = start = rule.init(make_prior())
    for rows in ([0, 1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11]):
        (xs, ys), mask = nt.online.pad_batch(x[rows], y[rows], size=8)
        xs[~mask] = np.nan
        state, _ = nt.online.update(rule, SQUARED, state, xs, ys, mask=mask)
    moments = state.memory.moments
    assert int(moments.count) == 12
    np.testing.assert_allclose(moments.mean.value, x.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(
        moments.squares.value / 12, x.var(axis=0), rtol=1e-9, atol=1e-20
    )
    single = start
    for t in range(12):
        single, _ = nt.online.update(rule, SQUARED, single, x[t], y[t])
    ran, _ = nt.online.run(rule, SQUARED, start, x, y)
    for a, b in zip(jax.tree.leaves(single), jax.tree.leaves(ran), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("where", tiered(["feature", "outcome"], unit=["feature"]))
def test_a_rejected_round_leaves_the_statistics(where):
    x, y = make_rows(6)
    rule = nt.online.standardise(NGVI, intercept=0)
    state, _ = nt.online.run(
        rule, SQUARED, rule.init(make_prior(dtype=np.float32)), x, y
    )
    bad_x, bad_y = (x[0] * np.nan, 1.0) if where == "feature" else (x[0], np.nan)
    after, _ = nt.online.update(rule, SQUARED, state, bad_x, bad_y)
    assert int(after.rejected) == 1
    for a, b in zip(
        jax.tree.leaves(after.memory), jax.tree.leaves(state.memory), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_statistics_of_a_long_stream_in_float32():
    rng = np.random.default_rng(0)
    x = (2000 + 5 * rng.normal(size=(200_000, 1))).astype(np.float32)
    moments = standardise.Moments(
        jnp.int32(0),
        *(
            standardise.CompensatedSum.start(jnp.zeros(1, jnp.float32))
            for _ in range(2)
        ),
    )
    moments, _ = jax.jit(
        lambda m, x: jax.lax.scan(
            lambda m, row: (standardise.observe(m, row), None), m, x
        )
    )(moments, x)
    exact = x.astype(float)
    np.testing.assert_allclose(moments.mean.value, exact.mean(axis=0), rtol=1e-6)
    # A uncompensated sum of 2e5 squares is off by some parts in ten thousand.
    np.testing.assert_allclose(
        moments.squares.value / len(x), exact.var(axis=0), rtol=2e-5
    )


def variance(q, x):
    """Of the predictor, at each row."""
    root = np.diag(q.scale) if isinstance(q, MeanField) else np.asarray(q.factor)
    return np.sum((x @ root) ** 2, axis=1)


def check_original_scale(state, family, intercept):
    new, _ = make_rows(8, seed=1)
    new[:, [0, 3]] = new[:, [3, 0]] if intercept == 3 else new[:, [0, 3]]
    z, q = (
        np.asarray(standardise.transform(state.memory, jnp.asarray(new))),
        state.posterior,
    )
    original = nt.online.original_scale(state)
    assert type(original) is (
        MeanField if family == "mean field" and intercept is None else FullRank
    )
    np.testing.assert_allclose(new @ original.loc, z @ q.loc, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(variance(original, new), variance(q, z), rtol=1e-7)
    # Good enough to be a prior.
    family_of(original).check(original)


@pytest.mark.parametrize(
    ("family", "intercept"), [("mean field", None), ("full rank", 3)]
)
def test_the_original_scale_predicts_the_same(x64, family, intercept):
    x, _ = make_rows()
    x[:, [0, 3]] = x[:, [3, 0]] if intercept == 3 else x[:, [0, 3]]
    rng = np.random.default_rng(2)
    if family == "mean field":
        q = MeanField(rng.normal(size=5), rng.uniform(0.1, 1.0, 5))
    else:
        q = FullRank(
            rng.normal(size=5),
            np.tril(rng.normal(size=(5, 5)), -1) + np.diag(rng.uniform(0.1, 1.0, 5)),
        )
    state = nt.online.standardise(NGVI, intercept=intercept).init(q)
    moments = standardise.Moments(
        jnp.int32(len(x)),
        *(
            standardise.CompensatedSum(jnp.asarray(value), np.zeros(5))
            for value in (x.mean(axis=0), len(x) * x.var(axis=0))
        ),
    )
    check_original_scale(
        state._replace(memory=state.memory._replace(moments=moments)), family, intercept
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "intercept"),
    [("mean field", None), ("mean field", 0), ("full rank", None), ("full rank", 3)],
)
def test_the_original_scale_of_a_run_predicts_the_same(x64, family, intercept):
    x, y = make_rows()
    x[:, [0, 3]] = x[:, [3, 0]] if intercept == 3 else x[:, [0, 3]]
    prior = make_prior() if family == "mean field" else FullRank(np.zeros(5), np.eye(5))
    rule = nt.online.standardise(NGVI, intercept=intercept)
    state, _ = nt.online.run(rule, SQUARED, rule.init(prior), x, y)
    check_original_scale(state, family, intercept)


@pytest.mark.slow
def test_coefficients_come_back_in_their_units(x64):
    x, y = make_rows(20_000)
    x = np.delete(x, 2, axis=1)
    rule = nt.online.standardise(nt.online.ngvi(50.0), intercept=0)
    state, _ = nt.online.run(
        rule, SQUARED, rule.init(FullRank(jnp.zeros(4), 10 * jnp.eye(4))), x, y
    )
    least_squares = np.linalg.lstsq(x, y, rcond=None)[0]
    original = nt.online.original_scale(state)
    # The scale moved in the first rounds, by some percent in the hundreds of them that count most.
    np.testing.assert_allclose(original.loc[1:], least_squares[1:], rtol=0.01)


def test_standardised_is_checked():
    with pytest.raises(ValueError, match="intercept = 5 is not a column of 5 features"):
        nt.online.standardise(NGVI, intercept=5).init(make_prior())
    with pytest.raises(
        TypeError,
        match=r"^the state.*made by standardise\(rule\).*is Standardisation; got Memory",
    ):
        nt.online.original_scale(NGVI.init(make_prior()))
    low = LowRank(
        jnp.zeros(5, jnp.float32),
        jnp.ones(5, jnp.float32),
        jnp.zeros((5, 2), jnp.float32),
    )
    with pytest.raises(
        TypeError, match="original_scale maps MeanField and FullRank, got LowRank"
    ):
        nt.online.original_scale(nt.online.standardise(NGVI).init(low))
    rule = nt.online.standardise(NGVI)
    with pytest.raises(
        TypeError,
        match=r"^a standardised rule changes.*use run or update.*not its parts",
    ):
        rule.update(None, rule.init(make_prior()))


@pytest.mark.parametrize("intercept", [None, 0])
def test_before_any_row_the_original_scale_is_that_of_the_prior(intercept):
    state = nt.online.standardise(NGVI, intercept=intercept).init(make_prior())
    q = nt.online.original_scale(state)
    np.testing.assert_array_equal(q.loc, 0.0)
    spread = q.scale if isinstance(q, MeanField) else q.factor
    np.testing.assert_allclose(
        spread, np.ones(5) if isinstance(q, MeanField) else np.eye(5), rtol=1e-6
    )
