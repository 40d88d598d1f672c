"""Labels that come late."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank

pytestmark = pytest.mark.usefixtures("strict")
CAPACITY = 4
remember, recall = jax.jit(nt.online.remember), jax.jit(nt.online.recall)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 6), min_size=2, max_size=2)), max_size=12))
def test_the_store_is_a_dictionary_that_drops_the_oldest(events):
    store = nt.online.pending(CAPACITY, jnp.zeros(2, jnp.float32), jnp.int32(0))
    held, dropped = {}, 0
    for number, (is_writing, ids) in enumerate(events):
        if is_writing:
            stamps = np.array([100 * number, 100 * number + 1], np.int32)
            for name in ids:
                held.pop(name, None)
            while len(held) > CAPACITY - len(ids):
                held.pop(next(iter(held)))
                dropped += 1
            held |= dict(zip(ids, stamps, strict=True))
            rows = stamps[:, None].astype(np.float32) * np.ones((1, 2), np.float32)
            store = remember(store, np.array(ids, np.int32), rows, stamps)
        else:
            ids = ids if ids[0] != ids[1] else [ids[0], -1]
            (x, stamps), found, store = recall(store, np.array(ids, np.int32))
            for i, name in enumerate(ids):
                assert bool(found[i]) == (name in held)
                if name in held:
                    stamp = held.pop(name)
                    assert int(stamps[i]) == stamp
                    np.testing.assert_array_equal(x[i], [stamp, stamp])
        assert int(store.dropped) == dropped
        assert np.sum(store.waiting) == len(held)


def test_late_labels_lead_where_labels_in_time_lead(x64, tmp_path):
    """On a conjugate stream the order of the data does not matter."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)), rng.normal(size=12)
    rule, loss = nt.online.ewa(0.5), nt.expectations.squared()
    start = state = rule.init(FullRank(np.zeros(3), np.eye(3)))
    store = nt.online.pending(8, jnp.zeros(3))
    late = rng.permutation(12)
    for t in range(0, 12, 4):
        store = remember(store, np.arange(t, t + 4, dtype=np.int32), x[t : t + 4])
        ids = late[late // 4 * 4 == t][:3]
        (rows,), found, store = recall(store, np.array([*ids, 99], np.int32))
        outcomes = np.array([*y[ids], np.nan])
        state, _ = nt.online.update(rule, loss, state, rows, outcomes, mask=found)
        # It is part of what is saved.
        nt.online.save(tmp_path / "both", {"state": state, "store": store})
        both = nt.online.restore(tmp_path / "both", like={"state": state, "store": store})
        state, store = both["state"], both["store"]
    left = np.asarray(store.ids)[np.asarray(store.waiting)]
    assert len(left) == 3
    (rows,), found, store = recall(store, np.array([*left, 99], np.int32))
    assert not np.any(store.waiting)
    state, _ = nt.online.update(rule, loss, state, rows, np.array([*y[left], np.nan]), mask=found)
    in_time, _ = nt.online.run(rule, loss, start, x, y)
    np.testing.assert_allclose(state.posterior.loc, in_time.posterior.loc, rtol=1e-10)
    np.testing.assert_allclose(state.posterior.scale_tril, in_time.posterior.scale_tril, rtol=1e-10, atol=1e-14)


def test_stores_are_checked():
    with pytest.raises(ValueError, match="capacity must be an integer of at least 1"):
        nt.online.pending(0, jnp.zeros(2))
    store = nt.online.pending(2, jnp.zeros(2, jnp.float32))
    row = np.ones((1, 2), np.float32)
    for ids, data in (([1], row[0]), (1, row), ([1, 2], row), ([1, 2, 3], row.repeat(3, 0))):
        with pytest.raises(ValueError, match=r"expected ids of shape \(n,\), n <= 2"):
            nt.online.remember(store, jnp.asarray(ids), data)
