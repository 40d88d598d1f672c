"""A function over many rows, some at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tempered.core.batching import map_batches

ROWS = {"a": np.arange(22.0).reshape(11, 2), "b": np.arange(11)}


@pytest.mark.parametrize("batch_size", [1, 4, 10, 11, 64])
def test_every_row_has_its_value(batch_size):
    found = map_batches(
        lambda row: {"sum": row["a"].sum() + row["b"], "b": row["b"]}, ROWS, batch_size
    )
    np.testing.assert_array_equal(found["sum"], ROWS["a"].sum(-1) + ROWS["b"])
    np.testing.assert_array_equal(found["b"], ROWS["b"])


def test_keys_are_rows():
    keys = jax.random.split(jax.random.key(0), 5)
    found = map_batches(jax.random.normal, keys, 2)
    np.testing.assert_array_equal(found, jax.vmap(jax.random.normal)(keys))


def test_no_rows():
    assert map_batches(lambda row: 2.0 * row, jnp.zeros((0, 3)), 4).shape == (0, 3)


def test_the_function_is_traced_for_one_size_of_batch():
    sizes = []

    @jax.custom_batching.custom_vmap
    def watched(row):
        return row

    @watched.def_vmap
    def _(axis_size, in_batched, row):
        sizes.append(axis_size)
        return row, True

    # lax.map would take 4, 4 and 3 rows.
    np.testing.assert_array_equal(
        map_batches(watched, jnp.arange(11), 4), np.arange(11)
    )
    assert set(sizes) == {4}


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(
        ValueError,
        match=r"^rows must have.*one common leading axis, got axes of \[3, 4\]",
    ):
        map_batches(lambda row: row, {"a": np.ones(3), "b": np.ones(4)}, 2)
