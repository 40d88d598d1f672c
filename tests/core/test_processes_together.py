"""What processes that share rows refuse: two threads play the processes, each with its own arguments."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from numpyro_tempered.core import processes

# Of a run that hangs an error in place of a wait without end.
PATIENCE = 60


@pytest.fixture
def together(monkeypatch):
    """Run a function of the number of the process on both; arrays of two axes span them."""
    barrier, values, here = (
        threading.Barrier(2, timeout=PATIENCE),
        [None, None],
        threading.local(),
    )

    def gather(value, copies):
        assert copies.mesh.size == 1
        values[here.number] = value
        barrier.wait()
        everywhere = np.stack(values)
        barrier.wait()
        return everywhere

    def run(function):
        def one(number):
            here.number = number
            try:
                return function(number)
            except ValueError as error:
                return str(error)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2)))

    monkeypatch.setattr(processes, "gather", gather)
    monkeypatch.setattr(
        processes, "_spans", lambda leaf: isinstance(leaf, jax.Array) and leaf.ndim == 2
    )
    return run


ROWS = jnp.ones((3, 2))


def arguments(**changes):
    values = {
        "x": ROWS,
        "key": jax.random.key(1),
        "weights": np.array([1.0, 2.0]),
        "names": np.array(["a", None], object),
        "frame": pd.Series([1.0, 2.0]),
        "step": 0.5,
        "model": np.sum,
    }
    return values | changes


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("x", jnp.ones((4, 2))),
        ("key", jax.random.key(2)),
        ("weights", np.array([1.0, 2.5])),
        ("weights", np.array([1.0, 2.0], np.float32)),
        ("names", np.array(["a", "b"], object)),
        ("frame", pd.Series([1.0, 3.0])),
        ("step", 0.25),
        ("model", {"model": np.sum}),
    ],
)
def test_arguments_that_differ_are_named_on_both(together, name, other):
    def check(number):
        processes.check_same(arguments(**{name: other}) if number else arguments())

    for message in together(check):
        assert message.startswith(f"argument {name!r} differs between the processes")


def test_what_may_differ_is_not_refused(together):
    """Rows that are shared, functions in memory, and all where nothing is shared."""
    assert together(
        lambda number: processes.check_same(arguments(x=ROWS + number))
    ) == [None, None]
    assert together(
        lambda number: processes.check_same(arguments(model=lambda: number))
    ) == [None, None]
    assert together(lambda number: processes.check_same(arguments(x=number))) == [
        None,
        None,
    ]


def test_names_and_numbers_of_arguments_are_arguments_too(together):
    def check(number):
        processes.check_same({"x": ROWS, **({"more": 1} if number else {})})

    for message in together(check):
        assert message.startswith(
            "the number of arguments differs between the processes"
        )


def test_programs_are_told_apart_but_not_by_addresses(together):
    copies = processes.replicated_over({"x": ROWS})
    assert copies.mesh.axis_names == ("devices",)

    def check(key):
        return together(
            lambda number: processes.check_same_program(key(number), copies)
        )

    assert check(lambda number: ("model", object())) == [None, None]
    for message in check(lambda number: ("model", number)):
        assert "the processes have made different programs of one model" in message


def test_shared_values_are_read_and_looked_at_where_they_are(together):
    assert processes.all_finite(ROWS)
    assert not processes.all_finite(ROWS.at[1, 0].set(jnp.nan))
    assert processes.all_finite(np.ones(2))
    assert not processes.all_finite(np.array([1.0, np.inf]))
    np.testing.assert_array_equal(processes.to_host(ROWS), np.ones((3, 2)))
    assert processes.replicated_over({"x": np.ones((3, 2))}) is None
    assert processes.spans_processes({"x": 1.0, "y": ROWS})
    assert not processes.spans_processes({"x": 1.0})
