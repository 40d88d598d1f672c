"""Ragged batches and streams side by side: masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField, family_of

pytestmark = pytest.mark.usefixtures("strict")

TRACES = []


def counted(expectation):
    def evaluate(*args, **kwargs):
        TRACES.append(1)
        return expectation.evaluate(*args, **kwargs)

    return expectation._replace(evaluate=evaluate)


SQUARED = counted(nt.expectations.squared())
HINGE = nt.expectations.hinge()
DRAWN = nt.expectations.monte_carlo(
    lambda theta, x, y: jax.nn.softplus(-y * jnp.sum(x * theta))
)
NGVI, SVA, SVB = nt.online.ngvi(), nt.online.sva(0.5), nt.online.svb(0.3)
PRIORS = {
    "mean field": MeanField(jnp.zeros(3, jnp.float32), jnp.ones(3, jnp.float32)),
    "full rank": FullRank(jnp.zeros(3, jnp.float32), jnp.eye(3, dtype=jnp.float32)),
    "low rank": LowRank(
        *(
            jnp.full(shape, value, jnp.float32)
            for shape, value in ((3, 0), (3, 1), ((3, 2), 0))
        )
    ),
}


def make_rows(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)).astype(np.float32), np.where(
        rng.random(n) < 0.5, 1.0, -1.0
    ).astype(np.float32)


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_close(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_batches_of_all_sizes_share_one_compilation():
    rule = NGVI
    state = rule.init(PRIORS["mean field"])
    traces, mean, precision = None, np.zeros(3), np.ones(3)
    for n in (3, 8, 1, 0, 5, 7):
        (x, y), mask = nt.online.pad_batch(*make_rows(n, seed=n), size=8)
        rows, outcomes = make_rows(n, seed=n)
        precision += 2 * np.sum(rows**2, axis=0)
        mean += 2 * (outcomes - rows @ mean) @ rows / precision
        state, _ = nt.online.update(rule, SQUARED, state, x, y, mask=mask)
        assert_close(state.posterior, (mean, precision**-0.5))
        traces = len(TRACES) if traces is None else traces
        assert len(TRACES) == traces
    assert int(state.count) == 5


@pytest.mark.parametrize("n", range(10))
def test_batches_are_padded_to_the_next_power_of_two(n):
    x, y = make_rows(n)
    (padded, labels), mask = nt.online.pad_batch(x, y)
    assert len(padded) == len(labels) == len(mask) == [1, 1, 2, 4, 4, 8, 8, 8, 8, 16][n]
    np.testing.assert_array_equal(padded[mask], x)
    np.testing.assert_array_equal(labels[mask], y)


def test_pad_batch_checks_its_arguments():
    with pytest.raises(ValueError, match=r"one common leading axis.*got shapes"):
        nt.online.pad_batch(np.ones(3), np.ones(2))
    with pytest.raises(ValueError, match="a batch of 3 rows does not fit size = 2"):
        nt.online.pad_batch(np.ones(3), size=2)


@pytest.mark.parametrize(
    ("family", "expectation"),
    [
        ("mean field", HINGE),
        pytest.param("full rank", DRAWN, marks=pytest.mark.full),
        pytest.param("low rank", HINGE, marks=pytest.mark.slow),
    ],
    ids=["mean field", "monte carlo", "low rank"],
)
def test_rows_that_are_off_count_nothing_whatever_they_hold(family, expectation, key):
    rule = nt.online.ngvi(0.7, curvature="fisher")
    x, y = make_rows(4)
    spoiled, labels = x.copy(), y.copy()
    spoiled[[0, 2]], labels[[0, 2]] = np.nan, np.inf
    mask = np.array([False, True, False, True])
    # The low-rank family broadcasts over ranks.
    with jax.numpy_rank_promotion("allow"):
        state = rule.init(PRIORS[family])
        ours = nt.online.update(
            rule, expectation, state, spoiled, labels, mask=mask, rng_key=key
        )
        theirs = nt.online.update(
            rule, expectation, state, x[mask], y[mask], rng_key=key
        )
    assert_close(ours[1], theirs[1])
    q, p = ours[0].posterior, theirs[0].posterior
    assert_close(q.loc, p.loc)
    assert_close(*(family_of(r).predictor_variance(r, jnp.asarray(x)) for r in (q, p)))
    assert int(ours[0].count) == 1


def test_a_row_that_is_on_and_not_finite_rejects_the_round():
    rule = NGVI
    # Eight rows, as above: the same program.
    x, y = make_rows(8)
    state = rule.init(PRIORS["mean field"])
    x[1] = np.nan
    after, _ = nt.online.update(rule, SQUARED, state, x, y, mask=np.ones(8, bool))
    assert_same(after, state._replace(rejected=jnp.int32(1)))


@pytest.mark.parametrize(
    "mask", [np.zeros(2, bool), np.zeros((), bool)], ids=["rows", "round"]
)
@pytest.mark.parametrize("held", [0.5, np.nan])
def test_a_round_without_a_row_leaves_everything_as_it_is(mask, held):
    rule = SVA
    state, _ = nt.online.update(
        rule,
        HINGE,
        rule.init(PRIORS["mean field"]),
        *make_rows(2),
        mask=np.ones(2, bool),
    )
    x, y = np.full((2, 3), held, np.float32), np.ones(2, np.float32)
    after, losses = nt.online.update(rule, HINGE, state, x, y, mask=mask)
    assert_same(after, state)
    assert [float(loss) for loss in losses] == [0.0, 0.0]


def test_labels_of_rows_that_are_off_are_not_checked():
    rule = SVA
    state, (x, y) = rule.init(PRIORS["mean field"]), make_rows(2)
    y[1] = 7.0
    nt.online.update(rule, HINGE, state, x, y, mask=np.array([True, False]))
    nt.online.run(rule, HINGE, state, x, y, mask=np.array([True, False]))
    with pytest.raises(ValueError, match=r"hinge needs labels.*turn labels in"):
        nt.online.update(rule, HINGE, state, x, y, mask=np.array([True, True]))


def test_masks_are_checked():
    rule = SVA
    state, (x, y) = rule.init(PRIORS["mean field"]), make_rows(3)
    with pytest.raises(TypeError, match=r"mask must be boolean.*a datum, got dtype"):
        nt.online.update(rule, HINGE, state, x, y, mask=np.ones(3))
    for mask in (np.ones(2, bool), np.ones((3, 3), bool)):
        with pytest.raises(
            ValueError,
            match=r"mask must have the shape of the data's leading axis.*data of shapes",
        ):
            nt.online.update(rule, HINGE, state, x, y, mask=mask)
    with pytest.raises(
        ValueError, match=r"mask must have shape \(3,\).*for batches, got"
    ):
        nt.online.run(rule, HINGE, state, x, y, mask=True)


def test_a_run_of_masked_batches_is_a_loop_of_masked_updates():
    rule = SVB
    x, y = make_rows(12)
    x, y = x.reshape(3, 4, 3), y.reshape(3, 4)
    mask = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]], bool)
    start = state = rule.init(PRIORS["mean field"])
    all_losses = []
    for t in range(3):
        state, losses = nt.online.update(rule, HINGE, state, x[t], y[t], mask=mask[t])
        all_losses.append(losses)
    ran = nt.online.run(rule, HINGE, start, x, y, mask=mask)
    assert_same(
        ran, (state, jax.tree.map(lambda *leaves: np.stack(leaves), *all_losses))
    )
    assert int(state.count) == 2


def test_a_thousand_streams_of_different_lengths_in_one_compilation():
    num_streams, longest = 1000, 6
    rule = nt.online.ngvi(0.5)
    rng = np.random.default_rng(3)
    x = rng.normal(size=(num_streams, longest, 3)).astype(np.float32)
    y = rng.normal(size=(num_streams, longest)).astype(np.float32)
    lengths = rng.integers(0, longest + 1, size=num_streams)
    mask = np.arange(longest)[None, :] < lengths[:, None]
    # What lies beyond a stream's end is not read.
    x[~mask] = np.nan
    start = rule.init(PRIORS["mean field"])
    states = jax.tree.map(
        lambda leaf: np.broadcast_to(leaf, (num_streams, *leaf.shape)), start
    )
    together = jax.jit(
        jax.vmap(lambda s, x, y, m: nt.online.run(rule, SQUARED, s, x, y, mask=m))
    )
    before = len(TRACES)
    states, losses = together(states, x, y, mask)
    traces = len(TRACES) - before
    np.testing.assert_array_equal(states.count, lengths)
    np.testing.assert_array_equal(states.rejected, np.zeros(num_streams))
    np.testing.assert_array_equal(np.asarray(losses.expected)[~mask], 0.0)
    for i in (0, 1, 500, 999):
        n = lengths[i]
        # Half the squared loss: unit noise. Mean field adds up the diagonal of the precision.
        np.testing.assert_allclose(
            np.asarray(states.posterior.scale)[i],
            (1 + np.sum(x[i, :n] ** 2, axis=0)) ** -0.5,
            rtol=1e-5,
        )
    together(states, x, y, ~mask)
    assert len(TRACES) == before + traces
