"""Where a call compiles for long, a warning names the cache on disk."""

import warnings

import jax
import numpy as np
import pytest

import numpyro_tempered as nt
from numpyro_tempered.core import compilation


@pytest.fixture
def clock(monkeypatch):
    """A clock that has told nobody of the cache, where every call compiles for long."""
    fresh = compilation.Clock()
    monkeypatch.setattr(compilation, "CLOCK", fresh)
    monkeypatch.setattr(compilation, "LONG", 1e-9)
    return fresh


def compile_something(scale):
    return jax.jit(lambda x: scale * x)(np.ones(3))


def warned(folder, clock):
    since = clock.read()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", folder)
    try:
        compile_something(np.random.default_rng().normal())
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            compilation.advise_cache("fit", since)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    return [
        str(each.message)
        for each in record
        if each.category is nt.warnings.CompilationWarning
    ]


def test_a_long_call_without_a_cache_names_it_once(clock):
    (message,) = warned(None, clock)
    assert message.startswith("fit spent 0 s on compiling")
    assert "jax_compilation_cache_dir" in message
    assert not warned(None, clock)


def test_with_a_cache_there_is_nothing_to_say(clock, tmp_path):
    assert not warned(str(tmp_path), clock)


def test_a_call_that_compiles_nothing_says_nothing(clock, recwarn):
    compilation.advise_cache("fit", clock.read())
    assert not recwarn.list
