"""Programs that are kept by their text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tempered.core import programs
from numpyro_tempered.core.batching import compiled_map
from numpyro_tempered.core.programs import compile_once

SCALE = np.float32(0.1)
TABLE = jnp.arange(3.0)


@pytest.fixture
def kept(monkeypatch):
    """The programs that are kept, none at first."""
    monkeypatch.setattr(programs, "_COMPILED", type(programs._COMPILED)())
    return programs._COMPILED


def times(factor):
    """A function written anew at every call."""
    return compile_once(lambda x: {"y": factor * x}, jnp.zeros(3))


def test_what_a_function_closes_over_is_an_operand(kept):
    for seed in (0, 1):
        data = jnp.asarray(np.random.default_rng(seed).normal(size=50).astype(np.float32))
        rows = np.arange(5, dtype=np.float32)
        found = compiled_map(lambda row, data=data: {"sum": jnp.sum(row * data)}, rows, 2)
        np.testing.assert_allclose(found["sum"], rows * np.sum(data), rtol=1e-5, atol=1e-5)
    assert len(kept) == 1


def test_programs_that_differ_in_one_constant_or_shape_are_two(kept):
    x = jnp.ones(3)
    numbers = [0.1, np.nextafter(np.float32(0.1), np.float32(1.0)).item(), 0.2]
    for number in [*numbers, *numbers]:
        np.testing.assert_array_equal(times(number)(x)["y"], np.full(3, np.float32(number)))
    assert len(kept) == 3
    np.testing.assert_array_equal(times(jnp.arange(3.0))(x)["y"], np.arange(3.0))
    np.testing.assert_array_equal(times(jnp.arange(3.0) + 1.0)(x)["y"], np.arange(3.0) + 1.0)
    assert len(kept) == 4
    compile_once(lambda x: {"y": 0.1 * x}, jnp.zeros(4))
    assert len(kept) == 5


def test_what_changes_outside_is_read_again(monkeypatch, kept):
    def read(x):
        return SCALE * x + jnp.sum(TABLE)

    assert float(compile_once(read, jnp.zeros(()))(jnp.ones(()))) == pytest.approx(3.1)
    monkeypatch.setitem(globals(), "SCALE", np.float32(0.5))
    assert float(compile_once(read, jnp.zeros(()))(jnp.ones(()))) == pytest.approx(3.5)
    monkeypatch.setitem(globals(), "TABLE", jnp.ones(3) * 2.0)
    assert float(compile_once(read, jnp.zeros(()))(jnp.ones(()))) == pytest.approx(6.5)


def test_branches_loops_and_large_constants_tell_programs_apart(kept):
    def branch(which):
        def f(x):
            loop = jax.lax.fori_loop(0, 3, lambda _, v: v * which, x)
            return jax.lax.cond(x > 0, lambda: loop, lambda: -x)

        return float(compile_once(f, jnp.ones(()))(jnp.full((), 2.0)))

    assert [branch(2.0), branch(3.0), branch(2.0)] == [16.0, 54.0, 16.0]
    tables = [np.zeros(5000, np.float32), np.zeros(5000, np.float32)]
    tables[1][2500] = 1.0
    sums = [float(compile_once(lambda x, t=t: jnp.dot(x, t), jnp.ones(5000))(jnp.ones(5000))) for t in tables]
    assert sums == [0.0, 1.0]


def test_a_callback_is_never_shared(kept):
    def tell(number):
        shape = jax.ShapeDtypeStruct((), jnp.float32)

        def f(x):
            return jax.pure_callback(lambda v: np.float32(number) * v, shape, x)

        return float(compile_once(f, jnp.ones((), jnp.float32))(jnp.full((), 2.0, jnp.float32)))

    assert [tell(1.0), tell(3.0)] == [2.0, 6.0]
    assert not kept


def test_the_oldest_program_is_forgotten(monkeypatch, kept):
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 2)
    for number in (1.5, 2.5, 3.5):
        times(number)
    assert len(kept) == 2
