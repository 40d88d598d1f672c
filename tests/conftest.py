"""Settings and fixtures shared by the tests."""

import contextlib

import jax
import pytest


def enable_x64():
    """Double precision for a block, under old and new jax."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64 as context

    return context(True)


@pytest.fixture(scope="module", autouse=True)
def without_programs_of_other_modules():
    """Thousands of compiled programs take gigabytes, and time with them."""
    yield
    jax.clear_caches()


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
    jax.config.jax_check_tracer_leaks, reason="the cache of compiled loops keeps what the rule closes over"
)
