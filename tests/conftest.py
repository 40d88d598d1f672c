"""Settings and fixtures shared by the tests."""

import contextlib
import datetime
import gc
import importlib.util
import resource
import sys
from importlib.metadata import version
from pathlib import Path

import jax
import pytest
import quick_compilation

quick_compilation.set_flags()
quick_compilation.share_contexts()


def pytest_configure(config):
    """Keep compiled programs between runs and between workers."""
    caches = config.pluginmanager.hasplugin("cacheprovider")
    quick_compilation.keep_programs(config.cache.mkdir("jax") if caches else None)
    if not hasattr(config, "workerinput") and getattr(
        config.option, "numprocesses", None
    ):
        stamp_notice_of_arviz()


def stamp_notice_of_arviz():
    """ArviZ 0.23 stamps its notice of the day in a cache folder: workers that do so at once fail to import it.

    Those of its releases that do so install platformdirs.
    """
    found = all(importlib.util.find_spec(name) for name in ("arviz", "platformdirs"))
    if not (found and version("arviz").startswith("0.")):
        return
    from platformdirs import user_cache_dir

    folder = Path(user_cache_dir("arviz", "arviz"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "daily_warning").write_text(datetime.date.today().isoformat())


def pytest_collection_finish():
    """What modules hold stays: looking for garbage there, each 700 objects, is a twentieth of the work."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Examples of docstrings and README are of the full tier: what they show has tests of its own."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.full)


def tiered(cases, *, unit):
    """Cases for ``parametrize``: those in ``unit`` run by default, the others in the full tier."""
    cases, unit = list(cases), list(unit)
    if absent := [case for case in unit if case not in cases]:
        raise ValueError(f"not among the cases: {absent}")
    return [
        case
        if case in unit
        else pytest.param(*_arguments(case), marks=pytest.mark.full)
        for case in cases
    ]


def _arguments(case):
    return case if isinstance(case, tuple) else (case,)


def enable_x64():
    """Double precision for a block, under old and new jax."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64 as context

    return context(True)


@pytest.fixture(scope="session")
def memory_limit():
    """Bytes of memory above which compiled programs are dropped."""
    return [2e9]


@pytest.fixture(scope="module", autouse=True)
def bounded_memory(memory_limit):
    """Programs of earlier modules are found again, until they take gigabytes."""
    yield
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    if peak > memory_limit[0]:
        jax.clear_caches()
        # The process keeps what is freed and fills it again before it grows.
        memory_limit[0] = peak + 5e7


@pytest.fixture(autouse=True)
def new_data(request, monkeypatch):
    """A copy of the shared data for each test: jax mixes up the precisions of an array that it has seen."""
    models = sys.modules.get("tempered_models")
    module = getattr(request.node, "module", None)
    if getattr(module, "Y", None) is getattr(models, "Y", ()):
        monkeypatch.setattr(module, "Y", models.Y.copy())
        monkeypatch.setattr(models, "Y", module.Y)


@pytest.fixture
def named_axes():
    """Axes with data say what is on them, by a label or by words at their ticks; all are closed."""
    plt = pytest.importorskip("matplotlib.pyplot")
    yield
    axes = [
        ax
        for number in plt.get_fignums()
        for ax in plt.figure(number).axes
        if ax.has_data()
    ]
    texts = [
        [axis.get_label(), *axis.get_ticklabels()]
        for ax in axes
        for axis in (ax.xaxis, ax.yaxis)
    ]
    plt.close("all")
    assert all(
        any(map(str.isalpha, "".join(text.get_text() for text in each)))
        for each in texts
    )


@pytest.fixture
def x64():
    with enable_x64():
        yield


@pytest.fixture
def strict():
    """No silent promotion of dtypes or ranks: for the modules that are ours alone."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        stack.enter_context(jax.numpy_rank_promotion("raise"))
        yield


@pytest.fixture
def key():
    return jax.random.key(20260)


# A rule or model made inside vmap closes over a tracer, and the compiled loop is cached by it.
closes_over_a_tracer = pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks,
    reason="the cache of compiled loops keeps what the rule closes over",
)
