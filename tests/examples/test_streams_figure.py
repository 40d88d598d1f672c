"""Figures of the online experiments: one style a rule, and curves that end where the tables say."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pd = pytest.importorskip("pandas")
plt = pytest.importorskip("matplotlib.pyplot")

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
in_checkout = pytest.mark.skipif(
    not RESULTS.exists(), reason="docs/results is not in the source distribution"
)


def load_module():
    spec = importlib.util.spec_from_file_location(
        "streams_figure", ROOT / "examples" / "streams_figure.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


figures = load_module()


@pytest.fixture
def agg():
    plt.switch_backend("agg")
    with plt.rc_context({"figure.constrained_layout.use": True}):
        yield
    plt.close("all")


def test_each_rule_has_a_style_of_its_own():
    styles = [(colour, str(dashes)) for _, colour, dashes in figures.STYLES.values()]
    assert len(set(styles)) == len(styles)
    labels = [label for label, _, _ in figures.STYLES.values()]
    assert len(set(labels)) == len(labels)
    drawn = {*figures.LEFT, *figures.RIGHT, "best in hindsight"}
    assert drawn == set(figures.STYLES)


@in_checkout
@pytest.mark.parametrize("name", ["figure1", "figure_1"])
def test_curves_end_at_the_losses_of_the_table(name):
    losses = pd.read_csv(RESULTS / f"{name}_losses.csv")
    curves = pd.read_csv(RESULTS / f"{name}_curves.csv")
    keys = [key for key in ("stream", "rate") if key in losses]
    assert set(losses["rule"]) <= set(figures.STYLES)
    ends = curves.groupby(keys).last()
    rounds = losses.groupby(keys)["rounds" if "rounds" in losses else "T"].first()
    assert (ends["round"] == rounds.loc[ends.index]).all()
    ends = ends.drop(columns="round").stack().dropna()
    table = losses.set_index([*keys, "rule"])["loss"]
    assert len(ends) == len(table)
    # The curves are those of a second run; losses in the thousands magnify its rounding.
    np.testing.assert_allclose(
        ends.to_numpy(), table.loc[ends.index].to_numpy(), rtol=5e-3
    )


@in_checkout
def test_every_stream_is_in_one_figure():
    streams = [stream for group in figures.GROUPS.values() for stream in group]
    assert sorted(streams) == sorted(
        pd.read_csv(RESULTS / "figure1_curves.csv")["stream"].unique()
    )


def test_a_rule_far_off_is_named_and_does_not_stretch_the_axis(agg):
    rounds = np.array([1, 10, 100, 1000])
    table = pd.DataFrame(
        {"OGA": 2.0, "SVB": 1e6, "NGVI": 0.5, "aggregate": 1e7}, index=rounds
    )
    figure = figures.draw({"toy": table}, {"toy": 0.25})
    left, right = figure.axes
    assert left.get_ylim() == right.get_ylim()
    low, high = left.get_ylim()
    assert 0.1 < low < 0.25
    assert 2.0 < high < 10.0
    assert left.get_title("left") + left.get_title() in ("Toy",)
    assert left.get_title("right") == "above: SVB"
    assert right.get_title("right") == "above: aggregate"
    low, high = (
        figures.draw({"toy": table}, {"toy": np.nan}, reach=np.inf).axes[0].get_ylim()
    )
    assert low < 0.5
    assert 1e6 < high < 1e7


@pytest.mark.parametrize(
    "bounds", [(0.33, 1.1), (0.02, 0.7), (20.0, 5e8), (10.0, 581_012.0), (0.4, 0.45)]
)
def test_ticks_are_few_and_inside(bounds):
    at = figures.ticks(*bounds, 5)
    assert len(at) <= 5
    assert np.all((at >= bounds[0]) & (at <= bounds[1]))
    assert len(at) >= 2 or bounds[1] / bounds[0] < 1.2
    assert all(
        len(figures.plain(value)) <= 7 or "^" in figures.plain(value) for value in at
    )
