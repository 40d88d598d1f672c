"""Results look like a table of one screen, at a prompt and in a notebook."""

import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import numpyro_tempered as nt
from numpyro_tempered.core.display import WIDTH, add_repr, words

# Not results: what a user passes in, or a tuple of arrays that is short or is itself a field of a result.
OTHERS = {
    "Axes", "Ball", "Box", "Clipping", "Column", "Component", "Criterion", "DataSummary", "Derivatives",
    "Draws", "Evaluation", "Expectation", "Family", "Finding", "Forgetting", "FullRank", "Gain", "Grid",
    "Imputed", "LoadedUpdate", "Location", "LogDensity", "LogTrueDensity", "LowRank", "MeanField",
    "Method", "Moments", "NoisePosterior", "Objective", "Partitioned", "Pending", "Plan", "Posterior", "Prior",
    "Rows", "Rule", "Scores", "Skipping", "SpikeSlab", "Standardisation", "Start", "TemperedELBO", "Decision",
    "Weighing", "WeightedPosteriors",
}  # fmt: skip


class Inner(NamedTuple):
    loc: np.ndarray
    scale: np.ndarray


@add_repr
class Outer(NamedTuple):
    name: str
    elbo: float
    many: np.ndarray
    few: np.ndarray
    inner: Inner
    key: jax.Array | None
    advice: str
    fits: dict


def outer(**other):
    inner = Inner(np.zeros(2), np.ones((9, 9)))
    fields = {
        "name": "ngvi",
        "elbo": np.float32(-123.456789),
        "many": jnp.zeros((500, 3)),
        "few": jnp.arange(3.0),
        "inner": inner,
        "key": jax.random.key(0),
        "advice": "temper " * 40,
        "fits": dict.fromkeys(range(20), inner),
    }
    return Outer(**(fields | other))


def test_each_field_has_a_line_and_large_arrays_are_named_by_type_and_shape():
    lines = repr(outer()).splitlines()
    assert lines[0] == "Outer"
    assert lines[1].split() == ["name", "ngvi"]
    assert lines[2].split() == ["elbo", "-123.457"]
    assert lines[3].split(maxsplit=1)[1] == "float32[500, 3]"
    assert lines[4].split(maxsplit=1)[1] == "[0. 1. 2.]"
    assert "loc [0. 0.], scale float64[9, 9]" in lines[5]
    assert "20 entries" in lines[-1]
    assert max(map(len, lines)) <= WIDTH


def test_a_notebook_shows_the_same_and_escapes_it():
    page = outer(name="<b>")._repr_html_()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert page.count("<tr>") == len(Outer._fields)


def test_a_traced_result_is_shown_by_its_types():
    seen = []

    @jax.jit
    def f(x):
        seen.append(repr(outer(few=x)))
        return x

    f(jnp.zeros(2))
    assert "float32[2]" in seen[0]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        (True, "True"),
        (np.bool_(True), "True"),
        (jnp.array(False), "False"),
        (3, "3"),
        (1.0, "1"),
        (np.nan, "nan"),
        ((), ""),
        ([1, 2], "1, 2"),
        ({"a": 1.5}, "a: 1.5"),
        (np.array(["a", "b"]), "<U1[2]"),
        (outer, "outer"),
        (nt.online.ngvi(), "ngvi"),
    ],
)
def test_values_in_few_words(value, expected):
    assert words(value) == expected


def test_arviz_data_are_named_by_their_groups():
    data = xr.DataTree.from_dict(
        {"posterior": xr.Dataset({"x": ("draw", [1.0])}), "sample_stats": xr.Dataset()}
    )
    assert words(data) == "ArviZ data: posterior, sample_stats"


def public_tuples():
    """The public NamedTuple classes, by name."""
    classes, modules = {}, [nt]
    while modules:
        module = modules.pop()
        for name in getattr(
            module,
            "__all__",
            [name for name in vars(module) if not name.startswith("_")],
        ):
            value = getattr(module, name)
            if inspect.ismodule(value) and value.__name__.startswith(
                "numpyro_tempered"
            ):
                modules.append(value)
            elif (
                inspect.isclass(value)
                and issubclass(value, tuple)
                and hasattr(value, "_fields")
            ):
                classes[name] = value
    return classes


def test_every_result_is_shown_so():
    assert {
        name for name, cls in public_tuples().items() if not hasattr(cls, "_repr_html_")
    } == OTHERS


@pytest.mark.full
def test_results_fit_on_a_screen():
    x = np.random.default_rng(0).normal(size=(50, 2))
    fit = nt.mixtures.fit(
        jax.random.key(0),
        x,
        nt.mixtures.components.known_variance(2),
        num_components=2,
        num_restarts=2,
    )
    lines = repr(fit).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= WIDTH
    assert f"{fit.objective:.6g}" in repr(fit)


def test_arrays_that_are_deleted_are_named_by_type_and_shape():
    array = jnp.ones(3)
    array.delete()
    assert words(array) == "float32[3]"
