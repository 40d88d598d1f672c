"""The pictures."""

import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
import xarray as xr

import numpyro_tempered as nt

matplotlib.use("agg")
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def lines(ax):
    return {line.get_label(): line for line in ax.get_lines()}


def test_regret_is_the_running_average():
    ax = nt.plots.plot_regret({"sva": jnp.array([4.0, 2.0, 0.0]), "svb": [1.0, 1.0]})
    drawn = lines(ax)
    assert list(drawn) == ["sva", "svb"]
    np.testing.assert_array_equal(drawn["sva"].get_xdata(), [1, 2, 3])
    np.testing.assert_allclose(drawn["sva"].get_ydata(), [4.0, 3.0, 2.0])
    np.testing.assert_allclose(drawn["svb"].get_ydata(), [1.0, 1.0])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["sva", "svb"]


def test_rejected_rounds_do_not_enter_the_average():
    ax = nt.plots.plot_regret({"ngvi": [np.nan, 4.0, np.nan, 2.0, np.inf]})
    np.testing.assert_allclose(lines(ax)["ngvi"].get_ydata(), [0.0, 4.0, 4.0, 3.0, 3.0])


def test_hindsight_is_a_level_line():
    drawn = lines(nt.plots.plot_regret({"sva": [1.0]}, hindsight=0.25))
    np.testing.assert_array_equal(drawn["best in hindsight"].get_ydata(), [0.25, 0.25])


def test_regret_is_drawn_on_the_given_axes():
    _, (left, right) = plt.subplots(1, 2)
    assert nt.plots.plot_regret({"sva": [1.0]}, ax=right) is right
    assert not left.get_lines()


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="at least one rule"):
        nt.plots.plot_regret({})


@pytest.fixture
def comparison():
    columns = {"criterion": [-12.0, -10.0, -15.0], "se": [0.1, 0.2, 0.3], "rank": [1, 0, 2]}
    group = xr.Dataset(
        {name: ("model", values) for name, values in columns.items()}, coords={"model": ["a", "b", "c"]}
    )
    return {"model_comparison": group}


def test_comparison_shows_the_distance_to_the_best_with_two_standard_errors(comparison):
    ax = nt.plots.plot_comparison(comparison)
    (container,) = ax.containers
    points, _, (bars,) = container.lines
    # Matplotlib keeps what errorbar is given as objects.
    np.testing.assert_allclose(np.asarray(points.get_xdata(), float), [0.0, -2.0, -5.0])
    np.testing.assert_allclose(
        [float(segment[1, 0] - segment[0, 0]) for segment in bars.get_segments()], [0.8, 0.4, 1.2], rtol=1e-6
    )
    assert [label.get_text() for label in ax.get_yticklabels()] == ["b", "a", "c"]
    assert ax.yaxis_inverted()


def test_comparison_is_drawn_on_the_given_axes(comparison):
    _, ax = plt.subplots()
    assert nt.plots.plot_comparison(comparison, ax=ax) is ax
