"""What programs of several processes need, in one process."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from jax.sharding import Mesh

import numpyro_tempered as nt
from numpyro_tempered.core.processes import (
    all_finite,
    check_same,
    digest_of,
    replicated_over,
    spans_processes,
)
from numpyro_tempered.core.programs import in_order


def test_rows_that_fill_up_are_masked():
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]})
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    (x, tree), mask = nt.online.share_rows(frame, {"y": np.arange(3)}, mesh=mesh)
    size = -(-3 // mesh.size) * mesh.size
    assert x.shape == (size, 2)
    assert mask.shape == tree["y"].shape == (size,)
    keep = nt.online.to_host(mask)
    np.testing.assert_array_equal(nt.online.to_host(x)[keep], frame)
    np.testing.assert_array_equal(nt.online.to_host(tree["y"])[keep], np.arange(3))


@pytest.mark.parametrize(
    ("data", "error", "sentence"),
    [
        (
            (np.ones(3), np.ones(4)),
            ValueError,
            r"one common leading axis of at least 1, got shapes \[\(3,\), \(4,\)",
        ),
        ((np.ones((0, 2)),), ValueError, r"of at least 1, got shapes \[\(0, 2\)\]"),
        (
            (np.array(["a"]),),
            TypeError,
            r"the data of share_rows must be real numbers, got dtype <U1",
        ),
    ],
)
def test_share_rows_refuses_what_has_no_rows(data, error, sentence):
    with pytest.raises(error, match=sentence):
        nt.online.share_rows(*data)


def test_one_process_has_nothing_to_compare():
    x = jnp.ones(3)
    assert not spans_processes({"x": x, "name": "rows"})
    assert replicated_over(x, 1.0) is None
    check_same({"rng_key": jax.random.key(0), "x": x})
    assert all_finite(x)
    assert not all_finite(np.array([1.0, np.nan]))
    assert nt.online.to_host([1.0, 2.0]).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1.0, 2.0),
        ("a", "b"),
        (np.ones(2), np.ones(2, np.float32)),
        (np.ones(2), np.ones((2, 1))),
        ([1, 2], (1, 2)),
        (jax.random.key(0), jax.random.key(1)),
        (pd.Series(["a", None]), pd.Series(["b", None])),
    ],
)
def test_digests_tell_values_apart(one, other):
    assert not np.array_equal(digest_of(one), digest_of(other))
    np.testing.assert_array_equal(digest_of(one), digest_of(one))


def parts(order):
    """A program whose operations come in this order, with some in a loop and one that nothing needs."""

    def body(carry, x):
        made = {name: {"a": jnp.sin, "b": jnp.cos}[name](carry + x) for name in order}
        return made["a"] * made["b"], made["b"]

    def function(x):
        made = {
            name: {"a": jnp.exp, "b": jnp.tanh, "c": jnp.log}[name](x)
            for name in (*order, "c")
        }
        return jax.lax.scan(body, jnp.sum(made["a"] - made["b"]), x)

    return jax.make_jaxpr(function)(jnp.arange(3.0))


def test_the_order_of_a_program_follows_from_what_it_computes():
    one, other = parts("ab"), parts("ba")
    assert str(one.jaxpr) != str(other.jaxpr)
    ordered = in_order(one.jaxpr)
    assert str(ordered) == str(in_order(other.jaxpr))
    assert "log" not in str(ordered)
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(
        jax.core.eval_jaxpr(ordered, one.consts, x)[1],
        jax.core.eval_jaxpr(one.jaxpr, one.consts, x)[1],
    )
