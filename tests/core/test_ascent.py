"""The ascent loop on a parabola, whose steps are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tempered.core.ascent import Iterate, advance, begin, record

TOLERANCE = jnp.float32(0.01)


def halve(at):
    """The maximum of -x² is at 0: each pass goes half of the way."""
    after = 0.5 * at
    return Iterate(after, -jnp.square(after), jnp.float32(1e-6))


def test_a_single_start_ends_by_the_tolerance():
    ascent = advance(halve, begin(jnp.float32(1.0), 9, batched=False), 9, TOLERANCE)
    # -1/4, -1/16, -1/64 and -1/256 gain more, -1/1024 gains 3/1024.
    assert (int(ascent.num_iter), bool(ascent.converged), bool(ascent.active)) == (
        5,
        True,
        False,
    )
    np.testing.assert_array_equal(ascent.trace[:5], -(0.25 ** np.arange(1, 6)))
    assert np.isnan(ascent.trace[5:]).all()
    assert (float(ascent.point), float(ascent.objective), float(ascent.fall)) == (
        0.5**5,
        -(0.25**5),
        0.0,
    )


def test_starts_end_one_by_one_as_alone():
    starts = jnp.array([8.0, 1.0, 0.01], jnp.float32)
    together = jax.jit(lambda at: advance(halve, begin(at, 20), 20, TOLERANCE))(starts)
    for i, start in enumerate(starts):
        alone = advance(halve, begin(start, 20, batched=False), 20, TOLERANCE)
        for field in ("point", "objective", "num_iter", "converged"):
            assert getattr(together, field)[i] == getattr(alone, field), field
        np.testing.assert_array_equal(together.trace[:, i], alone.trace)
    assert int(together.num_steps) == int(together.num_iter.max())


def test_an_ascent_goes_on_where_it_stopped():
    starts = jnp.array([8.0, 1.0], jnp.float32)
    once = advance(halve, begin(starts, 20), 20, TOLERANCE)
    twice = advance(
        halve, advance(halve, begin(starts, 20), 3, TOLERANCE), 20, TOLERANCE
    )
    jax.tree.map(np.testing.assert_array_equal, once, twice)
    short = advance(halve, begin(starts, 2), 2, TOLERANCE)
    assert short.active.all()
    assert not short.converged.any()


@pytest.mark.parametrize(
    ("objectives", "num_iter", "converged", "fall"),
    [
        ([1.0, 2.0, 2.005], 3, True, 0.0),
        ([1.0, np.nan], 2, False, 0.0),
        ([np.nan], 1, False, 0.0),
        ([1.0, np.inf], 2, False, 0.0),
        ([1.0, 0.5], 2, True, 0.5),
        ([1.0, 1.0 - 1e-7], 2, True, 0.0),
    ],
)
def test_what_ends_a_start(objectives, num_iter, converged, fall):
    ascent = begin(jnp.zeros((1, 2)), 5)
    for i, objective in enumerate([*objectives, 9.0]):
        ascent = record(
            ascent,
            Iterate(jnp.full((1, 2), i + 1.0), jnp.float32([objective]), 1e-6),
            TOLERANCE,
        )
    assert (
        int(ascent.num_iter[0]),
        bool(ascent.converged[0]),
        float(ascent.fall[0]),
    ) == (num_iter, converged, fall)
    assert not ascent.active[0]
    # The pass of 9 has changed nothing.
    np.testing.assert_array_equal(ascent.point, [[num_iter, num_iter]])
    np.testing.assert_array_equal(ascent.objective, np.float32(objectives[-1:]))
