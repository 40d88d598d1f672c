"""Changes read from weights of windows, against the test of Page and Hinkley written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tempered.online import detect_changes

WINDOWS = [16, 64, 1024, np.inf]


def random_weights(seed, num_rows, best):
    """Weights near those of the best window, (n,) indices."""
    raw = np.random.default_rng(seed).dirichlet(np.ones(4), num_rows)
    return 0.2 * raw + 0.8 * np.eye(4)[best]


def page_hinkley(series, slack, limit, stride):
    """Flags by cumulative sums from each start, not by recursion: S_t is the largest sum of what ends at t."""
    flags, start = [], 0
    while True:
        part = series[start:]
        means = np.cumsum(part) / np.arange(1, len(part) + 1)
        sums = np.concatenate([[0.0], np.cumsum(stride * (means - part - slack))])
        excess = sums - np.minimum.accumulate(sums)
        over = np.flatnonzero(excess[1:] > limit)
        if not len(over):
            return np.array(flags, int)
        flags.append(start + over[0])
        start = flags[-1] + 1


@pytest.mark.parametrize(
    ("stride", "max_window"), [(1, 256.0), (5, 256.0), (1, 4096.0)]
)
def test_the_flags_are_those_of_page_and_hinkley(stride, max_window):
    best = np.concatenate(
        [np.repeat([3, 0, 2, 0], 300), np.random.default_rng(0).integers(0, 4, 600)]
    )
    history = random_weights(1, len(best), best)
    octaves = history @ np.log2(np.minimum(WINDOWS, max_window))
    skip = 100
    expected = skip + page_hinkley(octaves[skip:], 0.5, 40.0, stride)
    flags = detect_changes(
        history,
        WINDOWS,
        max_window=max_window,
        slack=0.5,
        limit=40.0,
        warm_up=skip * stride,
        stride=stride,
    )
    np.testing.assert_array_equal(flags, expected)
    assert len(flags) >= 2
    # Each row alters no flag before it, and the rows up to a flag are not needed any more.
    options = {"max_window": max_window, "slack": 0.5, "limit": 40.0, "stride": stride}
    shorter = detect_changes(history[:700], WINDOWS, warm_up=skip * stride, **options)
    np.testing.assert_array_equal(shorter, expected[expected < 700])
    rest = detect_changes(history[flags[0] + 1 :], WINDOWS, warm_up=0, **options)
    np.testing.assert_array_equal(rest + flags[0] + 1, expected[1:])


def test_a_jump_is_flagged_after_the_rounds_of_the_formula_and_quiet_weights_never():
    history = np.zeros((3000, 4), np.float32)
    history[:2000, 3] = 1.0
    history[2000:, 0] = 1.0
    # From 256 to 16 rounds are 4 octaves, of which the slack is one: 50 are exceeded by 17 rounds of three, less
    # the 0.6 octaves that the mean has come down.
    np.testing.assert_array_equal(detect_changes(history, WINDOWS), [2016])
    assert len(detect_changes(history[:2000], WINDOWS)) == 0
    # Before the warm-up, and among windows that are all long, nothing is flagged.
    assert len(detect_changes(history[1500:2400], WINDOWS)) == 0
    history[2000:] = [0.0, 0.0, 1.0, 0.0]
    assert len(detect_changes(history, WINDOWS)) == 0
    assert len(detect_changes(jnp.asarray(history[:10]), WINDOWS)) == 0


def test_arguments_are_checked():
    history = np.full((3, 4), 0.25)
    with pytest.raises(
        ValueError,
        match=r"history must have shape \(n, 4\), one weight a window, got \(3, 3\)",
    ):
        detect_changes(history[:, :3], WINDOWS)
    with pytest.raises(
        ValueError, match=r"^history must have.*shape \(n, 11\).*weight a window, got"
    ):
        detect_changes(history)
    for bad in (np.nan, -0.25, 0.5):
        wrong = history.copy()
        wrong[1, 2] = bad
        with pytest.raises(
            ValueError,
            match=r"^history must hold.*weights that sum to 1, got .* in row 1",
        ):
            detect_changes(wrong, WINDOWS)
    for name, bad in {
        "max_window": 0.0,
        "slack": -1.0,
        "limit": 0.0,
        "stride": 0,
        "warm_up": -1,
    }.items():
        with pytest.raises(ValueError, match=name):
            detect_changes(history, WINDOWS, **{name: bad})
    with pytest.raises(ValueError, match="windows must be positive"):
        detect_changes(history, [0.0, 1.0, 2.0, 3.0])
    with pytest.raises(TypeError, match="outside of jit, vmap"):
        jax.jit(lambda rows: detect_changes(rows, WINDOWS))(history)
