"""The pictures."""

import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
import xarray as xr

import numpyro_tempered as nt
from numpyro_tempered.report.arviz import assemble

matplotlib.use("agg")
plt = pytest.importorskip("matplotlib.pyplot")


pytestmark = pytest.mark.usefixtures("named_axes")


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
    columns = {
        "criterion": [-12.0, -10.0, -15.0],
        "se": [0.1, 0.2, 0.3],
        "rank": [1, 0, 2],
    }
    group = xr.Dataset(
        {name: ("model", values) for name, values in columns.items()},
        coords={"model": ["a", "b", "c"]},
    )
    return {"model_comparison": group}


def test_comparison_shows_the_distance_to_the_best_with_two_standard_errors(comparison):
    ax = nt.plots.plot_comparison(comparison)
    (container,) = ax.containers
    points, _, (bars,) = container.lines
    # Matplotlib keeps what errorbar is given as objects.
    np.testing.assert_allclose(np.asarray(points.get_xdata(), float), [0.0, -2.0, -5.0])
    np.testing.assert_allclose(
        [float(segment[1, 0] - segment[0, 0]) for segment in bars.get_segments()],
        [0.8, 0.4, 1.2],
        rtol=1e-6,
    )
    assert [label.get_text() for label in ax.get_yticklabels()] == ["b", "a", "c"]
    assert ax.yaxis_inverted()


def test_comparison_is_drawn_on_the_given_axes(comparison):
    _, ax = plt.subplots()
    assert nt.plots.plot_comparison(comparison, ax=ax) is ax


@pytest.fixture
def path():
    alpha = np.array([0.0, 0.1, 1.0])
    columns = {
        "expected_log_lik": [-np.inf, -8.0, -5.0],
        "expected_log_lik_se": [np.inf, 0.2, 0.1],
        "log_z_integral": [0.0, -1.0, -6.0],
        "log_z_integral_se": [0.0, 0.1, 0.2],
        "log_z_left": [0.0, -np.inf, -np.inf],
        "log_z_right": [0.0, -0.8, -5.3],
        "log_z": [0.0, -1.1, -6.1],
        "log_z_se": [0.0, 0.1, 0.1],
    }
    group = xr.Dataset(
        {name: ("alpha", values) for name, values in columns.items()},
        coords={"alpha": alpha},
    )
    return assemble({"tempered_path": group}, {})


def bars(container):
    points, _, (segments,) = container.lines
    return np.asarray(points.get_ydata(), float), [
        np.ptp(s[:, 1]) for s in segments.get_segments() if s.ndim == 2
    ]


def test_a_path_shows_the_log_likelihood_and_the_evidence_with_two_standard_errors(
    path,
):
    left, right = nt.plots.plot_path(path)
    values, lengths = bars(left.containers[0])
    np.testing.assert_allclose(values, [np.nan, -8.0, -5.0])
    np.testing.assert_allclose(lengths[-2:], [0.8, 0.4])
    assert left.get_ylim()[0] < -8.4
    assert left.get_ylim()[1] > -4.8
    drawn = {container.get_label(): bars(container) for container in right.containers}
    np.testing.assert_allclose(drawn["by integration"][0], [0.0, -1.0, -6.0])
    np.testing.assert_allclose(drawn["by integration"][1], [0.0, 0.4, 0.8])
    np.testing.assert_allclose(drawn["by stepping stones"][0], [0.0, -1.1, -6.1])
    assert right.get_ylabel() == "log evidence (nats)"
    assert "not to be maximised" in right.get_title()
    assert [tick.get_text() for tick in left.get_xticklabels()] == [
        "0",
        "0.0001",
        "0.01",
        "0.1",
        "0.3",
        "1",
    ]
    # A margin of .03 at each end on the scale of fifth roots.
    np.testing.assert_allclose(left.get_xlim(), [-(0.03**5), 1.03**5], rtol=1e-6)
    left.figure.canvas.draw()


def test_a_path_by_svi_shows_its_elbo_on_the_given_axes(path):
    group = path["tempered_path"]
    group = group.to_dataset() if hasattr(group, "to_dataset") else group
    names = {name: name.replace("log_z", "elbo") for name in group}
    _, axes = plt.subplots(2, 1)
    found = nt.plots.plot_path(
        assemble({"tempered_path": group.rename(names)}, {}), axes=axes
    )
    assert list(found) == list(axes)
    labels = [text.get_text() for text in axes[1].get_legend().get_texts()]
    assert labels == ["Riemann sums", "by draws", "by integration"]
    assert axes[1].get_ylabel() == "ELBO (nats)"


def test_a_path_takes_two_axes(path):
    _, ax = plt.subplots()
    with pytest.raises(ValueError, match="two axes, got 1"):
        nt.plots.plot_path(path, axes=ax)


def test_a_band_of_regret_ends_at_a_tenth_of_it_where_it_would_reach_0():
    rounds, regret = np.array([1, 10, 100]), np.array([[50.0, 20.0, -1.0]])
    columns = {
        "regret": regret,
        "regret_se": np.array([[5.0, 15.0, 1.0]]),
        "bound": np.array([[90.0, np.nan, np.nan]]),
    }
    of_rule = {name: (("rule", "round"), values) for name, values in columns.items()}
    ledger = xr.Dataset(of_rule, {"rule": ["ngvi"], "round": rounds})
    ax = nt.plots.plot_regret(assemble({"regret": ledger}, {}))
    np.testing.assert_array_equal(lines(ax)["ngvi"].get_ydata(), [50.0, 20.0, np.nan])
    assert lines(ax)["ngvi, bound"].get_marker() == "_"
    (band,) = ax.collections
    corners = {(x, y) for x, y in band.get_paths()[0].vertices.tolist()}
    assert {(1.0, 40.0), (1.0, 60.0), (10.0, 2.0), (10.0, 50.0)} <= corners
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_ylabel()) == (
        "log",
        "log",
        "regret",
    )


@pytest.mark.parametrize("has_criterion", [True, False])
def test_a_choice_of_alpha_is_drawn_by_its_criterion_or_by_the_fit(has_criterion):
    columns = {
        "selected": [False, True, False],
        "expected_log_lik": [-9.0, -7.0, -6.5],
        "expected_log_lik_se": [0.3, 0.2, 0.1],
        "effective_parameters": [1.0, 2.0, 2.5],
    }
    if has_criterion:
        columns |= {"criterion": [5.0, 3.0, np.nan], "criterion_se": [0.5, 0.25, 0.1]}
    group = xr.Dataset(
        {name: ("alpha", values) for name, values in columns.items()},
        {"alpha": [0.1, 0.3, 1.0]},
    )
    left, right = nt.plots.plot_alpha(assemble({"alpha_selection": group}, {}))
    heights, lengths = bars(left.containers[0])
    if has_criterion:
        np.testing.assert_allclose(heights, [2.0, 0.0])
        np.testing.assert_allclose(lengths, [1.0, 0.5])
        assert left.get_ylabel() == "criterion above its least"
    else:
        np.testing.assert_allclose(heights, [-2.5, -0.5, 0.0])
        np.testing.assert_allclose(lengths, [0.6, 0.4, 0.2])
        assert left.get_ylabel() == "expected log-likelihood below its largest (nats)"
    assert left.get_xscale() == "log"
    assert [text.get_text() for text in left.get_legend().get_texts()] == [
        "chosen: 0.3"
    ]
    path, chosen = right.get_lines()
    np.testing.assert_allclose(
        path.get_xydata(), [[1.0, -9.0], [2.0, -7.0], [2.5, -6.5]]
    )
    np.testing.assert_allclose(chosen.get_xydata(), [[2.0, -7.0]])
    assert sorted(text.get_text() for text in right.texts) == ["0.1", "0.3", "1"]
