"""Pictures of mixtures, whose factors are given: curves against SciPy's predictive densities."""

import matplotlib
import numpy as np
import pytest
import xarray as xr
from scipy import stats

import numpyro_tempered as nt
from numpyro_tempered.mixtures.components.known_variance import NormalMean
from numpyro_tempered.mixtures.components.poisson import GammaRate
from numpyro_tempered.mixtures.factors import Factors, MixtureProblem
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.report.arviz import assemble, group

matplotlib.use("agg")
plt = pytest.importorskip("matplotlib.pyplot")

# Of three components the second holds the most and the third nothing; the first is the wider.
CONCENTRATION, COUNTS = np.array([3.0, 6.0, 1.0], np.float32), np.array([2.0, 5.0, 0.0])
SHARES = CONCENTRATION / CONCENTRATION.sum()


pytestmark = pytest.mark.usefixtures("named_axes")


def mixture(component, posterior):
    """A fit of these factors."""
    posterior = type(posterior)(*(np.asarray(part, np.float32) for part in posterior))
    one = np.zeros(1)
    return MixtureFit(
        component._replace(prior=None),
        1.0,
        Factors(CONCENTRATION, posterior),
        MixtureProblem(
            component.prior, np.ones(3, np.float32), np.float32(1.0), np.float32(0.0)
        ),
        None,
        objective=0.0,
        kl=0.0,
        bound=None,
        counts=COUNTS,
        trace=one,
        restart_objectives=one,
        num_best=1,
        spread=0.0,
        converged=True,
        num_iter=1,
        num_moves=0,
        total=7.0,
    )


def check_curves(ax, densities):
    """The predictive curve, and those of the two components with data, the larger first."""
    curves = {line.get_label(): line for line in ax.get_lines()}
    grid = np.asarray(curves["predictive"].get_xdata(), float)
    parts = SHARES * np.stack([density(grid) for density in densities], axis=1)
    np.testing.assert_allclose(
        curves["predictive"].get_ydata(), parts.sum(axis=1), rtol=1e-4, atol=1e-7
    )
    dashed = [
        line
        for line in ax.get_lines()
        if line.get_linestyle() == "--" and len(line.get_xdata())
    ]
    assert len(dashed) == 2
    for line, j in zip(dashed, (1, 0), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), grid)
        np.testing.assert_allclose(line.get_ydata(), parts[:, j], rtol=1e-4, atol=1e-7)
    assert {"data", "predictive", "components"} <= {
        text.get_text() for text in ax.get_legend().get_texts()
    }
    return grid


def test_one_column_of_real_numbers_is_a_histogram_under_predictive_densities():
    x = np.array([-4.0, -3.5, 0.0, 4.0, np.nan, 4.2, 4.4, 5.0])
    loc, scale = np.array([[-3.0], [4.0], [9.0]]), np.array([[1.5], [0.5], [2.0]])
    fit = mixture(
        nt.mixtures.components.known_variance(1),
        NormalMean(loc, scale, np.ones((3, 1))),
    )
    _, axes = plt.subplots()
    ax = nt.plots.plot_mixture(fit, x, ax=axes)
    assert ax is axes
    grid = check_curves(
        ax,
        [
            stats.norm(m, np.hypot(1.0, s)).pdf
            for m, s in zip(loc[:, 0], scale[:, 0], strict=True)
        ],
    )
    # A margin of 8 per cent of the range.
    np.testing.assert_allclose([grid[0], grid[-1], len(grid)], [-4.72, 5.72, 500])
    known = x[~np.isnan(x)]
    assert len(ax.patches) == 2 * (len(np.histogram_bin_edges(known, "fd")) - 1)
    heights, _ = np.histogram(known, len(ax.patches), density=True)
    np.testing.assert_allclose([patch.get_height() for patch in ax.patches], heights)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x", "predictive density")


def test_numbers_with_a_bound_have_no_density_below_the_data():
    shape, rate = np.array([[3.0], [5.0], [2.0]]), np.array([[1.0], [9.0], [7.0]])
    fit = mixture(nt.mixtures.components.exponential(1), GammaRate(shape, rate))
    ax = nt.plots.plot_mixture(fit, np.array([0.5, 2.5, 3.25]))
    # A rate that is gamma distributed makes the Lomax distribution.
    grid = check_curves(
        ax,
        [
            stats.lomax(a, scale=b).pdf
            for a, b in zip(shape[:, 0], rate[:, 0], strict=True)
        ],
    )
    np.testing.assert_allclose([grid[0], grid[-1]], [0.5, 3.25 + 0.08 * 2.75])


def test_counts_have_masses_at_whole_numbers():
    shape, rate = np.array([[3.0], [5.0], [2.0]]), np.array([[1.0], [0.5], [7.0]])
    fit = mixture(nt.mixtures.components.poisson(1), GammaRate(shape, rate))
    ax = nt.plots.plot_mixture(fit, np.array([2.0, 2.0, 5.0, 3.0]))
    grid = check_curves(
        ax,
        [
            stats.nbinom(a, b / (1 + b)).pmf
            for a, b in zip(shape[:, 0], rate[:, 0], strict=True)
        ],
    )
    np.testing.assert_array_equal(grid, [2, 3, 4, 5])
    assert [patch.get_height() for patch in ax.patches] == [0.5, 0.25, 0.0, 0.25]
    assert [patch.get_x() + patch.get_width() / 2 for patch in ax.patches] == [
        2.0,
        3.0,
        4.0,
        5.0,
    ]
    assert ax.get_ylabel() == "predictive mass"


X = np.array([[-4.0, 0.0], [-3.0, 0.5], [4.0, 1.0], [4.5, 2.0], [5.0, 0.0]])
LOC = np.array([[-3.0, 0.0], [4.0, 1.0], [0.0, 0.0]])
SCALE = np.array([[1.0, 0.2], [0.5, 0.5], [1.0, 1.0]])


@pytest.fixture(scope="module")
def plane():
    return mixture(
        nt.mixtures.components.known_variance(2),
        NormalMean(LOC, SCALE, np.ones((3, 2))),
    )


@pytest.mark.parametrize("columns", [(0, 1), (1, 0)])
def test_two_columns_are_rows_by_component_within_contours(plane, columns):
    ax = nt.plots.plot_mixture(plane, X, columns=columns)
    *points, contours = ax.collections
    # The component with the most data has the first colour.
    for members, rows, color in zip(points, (X[2:], X[:2]), ("C0", "C1"), strict=True):
        np.testing.assert_array_equal(members.get_offsets(), rows[:, columns])
        assert matplotlib.colors.to_hex(
            members.get_facecolor()[0]
        ) == matplotlib.colors.to_hex(color)

    def density(points):
        return sum(
            share * stats.norm(m, np.hypot(1.0, s)).pdf(points[:, columns]).prod(axis=1)
            for share, m, s in zip(SHARES, LOC, SCALE, strict=True)
        )

    peak = density(np.array([[4.0, 1.0]])[:, columns])
    np.testing.assert_allclose(contours.levels, peak * [0.01, 0.1, 0.5], rtol=1e-2)
    for level, path in zip(contours.levels, contours.get_paths(), strict=True):
        # Lines are straight between points of the grid.
        np.testing.assert_allclose(density(path.vertices), level, rtol=0.05)
    # The widest contour is cut where the grid ends, a tenth of the range beyond the data.
    ends = np.concatenate([path.vertices for path in contours.get_paths()])[:, columns]
    np.testing.assert_allclose([*ends.min(axis=0), ends[:, 1].max()], [-4.9, -0.2, 2.2])
    assert (ax.get_xlabel(), ax.get_ylabel()) == tuple(f"column {c}" for c in columns)


@pytest.mark.parametrize("columns", [(1, 1), (0, 2), (-1, 0)])
def test_columns_are_two_that_there_are(plane, columns):
    with pytest.raises(
        ValueError, match=r"^columns must be.*two different ones of 0 \.\.\. 1, got"
    ):
        nt.plots.plot_mixture(plane, X, columns=columns)


@pytest.fixture
def path():
    columns = {
        "criterion": [[-9.0, -6.0, -7.5], [-70.0, -50.0, -44.0]],
        "num_occupied": [[1, 2, 2], [1, 2, 3]],
    }
    values = {
        name: (("alpha", "num_components"), each) for name, each in columns.items()
    }
    coords = {"alpha": [0.1, 1.0], "num_components": [1, 2, 4]}
    dataset = xr.Dataset({**values, "selected": ("alpha", [2, 4])}, coords=coords)
    return assemble({"num_components_path": dataset}, {})


def test_a_path_shows_the_numbers_selected_and_the_criterion_over_alpha(path):
    left, right = nt.plots.plot_num_components_path(path)
    drawn = {line.get_label(): line for line in left.get_lines()}
    np.testing.assert_array_equal(drawn["selected"].get_ydata(), [2, 4])
    np.testing.assert_array_equal(drawn["selected"].get_xdata(), [0.1, 1.0])
    np.testing.assert_array_equal(drawn["of these occupied"].get_ydata(), [2, 3])
    assert left.get_ylim() == (0.5, 4.5)
    curves = {line.get_label(): line for line in right.get_lines()}
    assert list(curves) == ["0.1", "1"]
    np.testing.assert_allclose(curves["0.1"].get_ydata(), [-30.0, 0.0, -15.0])
    np.testing.assert_allclose(curves["1"].get_ydata(), [-26.0, -6.0, 0.0])
    np.testing.assert_array_equal(curves["1"].get_xdata(), [1, 2, 4])
    assert curves["0.1"].get_color() != curves["1"].get_color()
    assert right.get_ylim() == (-60.0, 3.0)
    assert right.get_legend().get_title().get_text() == "alpha"
    alone = group(path, "num_components_path").isel(alpha=[1])
    alone = alone.to_dataset() if hasattr(alone, "to_dataset") else alone
    _, right = nt.plots.plot_num_components_path(
        assemble({"num_components_path": alone}, {})
    )
    assert [line.get_label() for line in right.get_lines()] == ["1"]


def test_a_path_takes_its_own_result_and_two_axes(path):
    with pytest.raises(
        ValueError,
        match=r"needs the result of num_components_path, got groups \['other'\]",
    ):
        nt.plots.plot_num_components_path(
            assemble({"other": xr.Dataset({"a": 1.0})}, {})
        )
    _, ax = plt.subplots()
    with pytest.raises(ValueError, match=r"plot_num_components_path .*two axes, got 1"):
        nt.plots.plot_num_components_path(path, axes=ax)
