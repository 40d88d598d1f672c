"""Labels that come late."""

import datetime

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from conftest import enable_x64
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank

pytestmark = pytest.mark.usefixtures("strict")
CAPACITY = 4
remember, recall = jax.jit(nt.online.remember), jax.jit(nt.online.recall)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 6), min_size=2, max_size=2)),
        max_size=12,
    )
)
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


@pytest.mark.full
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
        both = nt.online.restore(
            tmp_path / "both", like={"state": state, "store": store}
        )
        state, store = both["state"], both["store"]
    left = np.asarray(store.ids)[np.asarray(store.waiting)]
    assert len(left) == 3
    (rows,), found, store = recall(
        store, np.concatenate([left, nt.online.id_words([99])])
    )
    assert not np.any(store.waiting)
    state, _ = nt.online.update(
        rule, loss, state, rows, np.array([*y[left[:, 0]], np.nan]), mask=found
    )
    in_time, _ = nt.online.run(rule, loss, start, x, y)
    np.testing.assert_allclose(state.posterior.loc, in_time.posterior.loc, rtol=1e-10)
    np.testing.assert_allclose(
        state.posterior.scale_tril, in_time.posterior.scale_tril, rtol=1e-10, atol=1e-14
    )


def test_stores_are_checked():
    with pytest.raises(ValueError, match="capacity must be an integer of at least 1"):
        nt.online.pending(0, jnp.zeros(2))
    store = nt.online.pending(2, jnp.zeros(2, jnp.float32))
    row = np.ones((1, 2), np.float32)
    for ids, data in (([1], row[0]), ([1, 2], row), ([1, 2, 3], row.repeat(3, 0))):
        with pytest.raises(
            ValueError, match=r"expected ids of shape \(n,\), n <= 2.*got ids of shape"
        ):
            nt.online.remember(store, jnp.asarray(ids), data)
    for ids in (1, [[1, 2]]):
        with pytest.raises(ValueError, match=r"ids must have shape \(n,\), got"):
            nt.online.recall(store, np.asarray(ids))


def ids_near(number):
    """A number and others that agree with it in their lower or upper bits."""
    return list(
        dict.fromkeys([number, number % 2**32, number - 2**41, -number, number % 2**31])
    )


CLOCK = 1_790_000_000_000 << 22
WIDE = {
    "clock": (ids_near(CLOCK), np.asarray),
    "python": (ids_near(2**63 - 1), list),
    "unsigned": (
        [2**64 - 1, 2**32 - 1, 2**63, 0],
        lambda ids: np.asarray(ids, np.uint64),
    ),
    "series": (ids_near(2**40 + 7), lambda ids: pd.Series(ids, dtype="Int64")),
    "arrow": (ids_near(2**40 + 7), lambda ids: pa.chunked_array([ids])),
    "polars": (
        ids_near(2**40 + 7),
        lambda ids: pytest.importorskip("polars").Series(ids),
    ),
    "whole floats": (ids_near(2**40 + 7), lambda ids: np.asarray(ids, float)),
    "negative": ([-(2**63), -1, 0], np.asarray),
    "the last floats that tell integers apart": ([2**24 - 1, 2**24], np.float32),
}


@pytest.mark.parametrize("name", WIDE)
def test_identifiers_are_kept_whole(name):
    ids, convert = WIDE[name]
    store = nt.online.pending(8, jnp.float32(0))
    for number, each in enumerate(ids):
        # One at a time: the others are not found by it.
        store = remember(
            store, nt.online.id_words(convert([each])), np.float32([number])
        )
    for number, each in reversed(list(enumerate(ids))):
        (value,), found, store = nt.online.recall(store, convert([each]))
        assert (found.tolist(), value.tolist()) == ([True], [number])
    assert not np.any(store.waiting)


def test_words_are_those_of_the_number():
    ids = [CLOCK, -1, 2**64 - 1, 5]
    words = nt.online.id_words(ids)
    assert words.dtype == np.uint32
    assert [int(low) + (int(high) << 32) for low, high in words] == [
        each % 2**64 for each in ids
    ]
    assert nt.online.id_words(words) is words
    traced = jax.jit(nt.online.id_words)
    for dtype in (np.int8, np.int32, np.uint8, np.uint32):
        narrow = np.array([3, np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
        np.testing.assert_array_equal(traced(narrow), nt.online.id_words(narrow))
    with enable_x64():
        for wide in (
            np.array([CLOCK, -CLOCK, -1]),
            np.array([2**64 - 1, CLOCK], np.uint64),
        ):
            np.testing.assert_array_equal(traced(wide), nt.online.id_words(wide))


@pytest.mark.parametrize(
    ("ids", "kind", "message"),
    [
        (
            [1.5],
            ValueError,
            r"^ids must be.*whole numbers of up to 64 bits, got 1\.5\.",
        ),
        ([np.nan], ValueError, r"^ids must be whole.*got nan"),
        (
            [2.0**60],
            ValueError,
            r"got 1\.15\S+, a float that does not tell integers apart.*pass integers",
        ),
        (
            np.float32([2**25]),
            ValueError,
            r"^ids must be whole.*does not tell integers apart: pass integers",
        ),
        (
            [2**64],
            ValueError,
            r"^ids must be.*got 18446744073709551616. Pass 64 bits of it.*such as number",
        ),
        (
            [-(2**63) - 1],
            ValueError,
            r"^ids must be whole.*Pass 64 bits of it.*such as number",
        ),
        (
            ["a7"],
            TypeError,
            r"^ids must be whole.*got the str 'a7'. Pass 64 bits of a hash",
        ),
        (pd.Series(["a7"]), TypeError, r"^ids must be whole.*Pass 64 bits of a hash"),
        (
            pd.date_range("2026-01-01", periods=2),
            TypeError,
            r"^ids must.*got the datetime64 .* Pass numbers",
        ),
        (
            [datetime.date(2026, 1, 1)],
            TypeError,
            r"^ids must be.*got the date '2026-01-01'. Pass numbers",
        ),
        ([True], TypeError, r"^ids must be whole.*got the bool 'True'"),
        (jnp.array([1.5]), ValueError, r"^ids must be whole.*got 1\.5"),
    ],
)
def test_other_identifiers_are_refused(ids, kind, message):
    store = nt.online.pending(2, jnp.float32(0))
    for call in (
        lambda: nt.online.recall(store, ids),
        lambda: nt.online.remember(store, ids, [0.0] * len(ids)),
    ):
        with pytest.raises(kind, match=message) as error:
            call()
        assert len(str(error.value)) < 200
    with pytest.raises(
        TypeError, match=r"^ids must be.*whole numbers of up to 64 bits, got float32"
    ):
        recall(store, np.float32([1.0]))


def test_data_are_stored_without_loss():
    stamps = nt.online.pending(2, jnp.int32(0))
    stamps = nt.online.remember(stamps, [1], np.array([2**24 + 1], np.int64))
    assert nt.online.recall(stamps, [1])[0][0].tolist() == [2**24 + 1]
    for example, row in (
        ([1, 0], [0.5, 1.0]),
        (np.array([True, False]), [0.5, 1.0]),
        ([1, 0], [np.nan, 1.0]),
    ):
        store = nt.online.pending(2, example)
        for call in (nt.online.remember, remember):
            with pytest.raises(
                TypeError,
                match=r"the store holds (int\d\d|bool).*give pending a datum of floats",
            ):
                call(store, np.array([1]), np.array([row], np.float32))
    # What is whole is kept, and floats take what comes.
    store = nt.online.remember(nt.online.pending(2, [1, 0]), [1], [[2.0, 3.0]])
    assert nt.online.recall(store, [1])[0][0].tolist() == [[2, 3]]
    store = nt.online.remember(nt.online.pending(2, [0.0, 0.0]), [1], [[2, True]])
    assert nt.online.recall(store, [1])[0][0].tolist() == [[2.0, 1.0]]
