"""Checks of arguments: what passes, and what is said of what does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_tempered.core.checks import (
    check_choice,
    check_count,
    check_number,
    check_numbers,
    check_positive,
    check_real,
    is_traced,
)


@pytest.mark.parametrize(
    ("value", "interval"),
    [
        (0.5, "(0, 1]"),
        (1, "(0, 1]"),
        (np.float32(2.0), "(0, inf)"),
        (jnp.array(0.0), "[0, inf)"),
        (np.inf, "(0, inf]"),
        (-3.0, "(-inf, inf)"),
        (jnp.bfloat16(2.0), "(0, inf)"),
    ],
)
def test_a_number_in_its_interval_is_returned(value, interval):
    assert check_number(value, "a", interval) is value


@pytest.mark.parametrize(
    ("value", "interval", "error", "message"),
    [
        (0.0, "(0, 1]", ValueError, r"^a must be in \(0, 1\], got 0.0\.$"),
        (1.1, "(0, 1]", ValueError, r"^a must be in.*got 1.1"),
        (np.nan, "[0, inf]", ValueError, "^a must be at least 0, got nan"),
        (np.inf, "(0, inf)", ValueError, "^a must be positive and finite, got inf"),
        (-np.inf, "(-inf, inf)", ValueError, "^a must be finite, got -inf"),
        (
            [1.0, 2.0],
            "(0, inf)",
            ValueError,
            r"^a must be.*one number, got shape \(2,\)",
        ),
        ("1", "(0, inf)", TypeError, "^a must be a number, got '1'"),
        (None, "(0, inf)", TypeError, r"^a must be a.*got None"),
        (True, "(0, inf)", TypeError, r"^a must be a.*got True"),
        (1j, "(0, inf)", TypeError, r"^a must be.*a number, got 1j"),
    ],
)
def test_another_number_raises(value, interval, error, message):
    with pytest.raises(error, match=message):
        check_number(value, "a", interval)


def test_the_hint_stands_after_the_message():
    with pytest.raises(ValueError, match=r"^a must be in.*got 2\. Pass a half\.$"):
        check_number(2, "a", "(0, 1]", hint="Pass a half.")


def test_traced_values_pass():
    @jax.jit
    def double(value):
        assert is_traced({"a": value}, 1.0)
        return 2 * check_number(value, "a", "(0, 1]") + check_numbers(value, "a")

    assert double(-3.0) == -9.0
    assert not is_traced(1.0, jnp.ones(2))
    with pytest.raises(ValueError, match=r"^a must be.*one number, got shape \(2,\)"):
        jax.jit(lambda value: check_number(value, "a"))(jnp.ones(2))


def test_the_first_entry_outside_is_named():
    assert check_numbers((1.0, 2.0), "w", "(0, inf)") == (1.0, 2.0)
    with pytest.raises(
        ValueError,
        match=r"^w must be at least 0 and finite, got -1.0 at index \(1, 0\)\.$",
    ):
        check_numbers(np.array([[0.0, 1.0], [-1.0, np.nan]]), "w", "[0, inf)")
    with pytest.raises(ValueError, match=r"^w must be finite,.*got nan at index 1\.$"):
        check_numbers([0.0, np.nan], "w")
    with pytest.raises(TypeError, match=r"^w must be real numbers, got dtype"):
        check_numbers(["a"], "w")


@pytest.mark.parametrize("value", [1, np.int32(2), jnp.array(2)])
def test_a_count_is_an_int(value):
    assert type(check_count(value, "n")) is int


@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, True, "3", None, 7])
def test_another_count_raises(value):
    with pytest.raises(
        ValueError, match=rf"^n must be an integer from 1 to 6, got {value!r}\.$"
    ):
        check_count(value, "n", 1, 6)
    if value != 7:
        with pytest.raises(
            ValueError, match=r"^n must be an integer of at least 1, got"
        ):
            check_count(value, "n")


def test_a_choice_is_one_of_several():
    assert check_choice("a", "kind", ("a", "b")) == "a"
    with pytest.raises(
        ValueError, match=r"^kind must be one of \['a', 'b'\], got 'c'\.$"
    ):
        check_choice("c", "kind", ("a", "b"))


def test_other_dtypes_than_real_numbers_are_refused():
    for dtype in (np.float32, np.int8, np.uint8, np.bool_, jnp.bfloat16):
        check_real(np.dtype(dtype), "x")
    with pytest.raises(
        TypeError,
        match=r"^x must be real numbers, got dtype complex64\. Pass a float array\.$",
    ):
        check_real(np.dtype(np.complex64), "x", hint="Pass a float array.")


def test_positive_numbers_go_by_their_names():
    check_positive(rate=0.1, num_rounds=3)
    jax.jit(lambda rate: check_positive(rate=rate))(-1.0)
    with pytest.raises(ValueError, match=r"^kl must be positive and finite, got inf"):
        check_positive(rate=0.1, kl=np.inf)
    with pytest.raises(TypeError, match=r"^rate must be a number, got 'x'"):
        check_positive(rate="x")
