"""What forgetting is made of, without a stream: windows as text, factors and variances by count, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_tempered as nt
from numpyro_tempered.online import power, random_walk, to_prior

Q = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.array([1.0, 3.0]))
INFORMATION = "rounds, h the information in a datum"


@pytest.mark.parametrize(
    ("forget", "text"),
    [
        (power(0.75), "power: window 4 rounds"),
        (power(1.0), "power: window unbounded"),
        (power(lambda t: 0.5), "power: window 1 / (1 - factor(t)) rounds"),
        (random_walk(0.125), f"random_walk: window 8 / √h {INFORMATION}"),
        (
            random_walk(np.array([0.125, 0.25])),
            f"random_walk: window 4 / √h {INFORMATION}",
        ),
        (random_walk(0.0), "random_walk: window unbounded"),
        (
            random_walk(lambda t: 0.5),
            f"random_walk: window 1 / (scale(t) √h) {INFORMATION}",
        ),
        (to_prior(9.0), "to_prior: window 1 + 9 / step_size rounds"),
        (to_prior(np.inf), "to_prior: window unbounded"),
        (to_prior(lambda t: t), "to_prior: window 1 + evidence(t) / step_size rounds"),
    ],
)
def test_a_window_is_printed(forget, text):
    assert repr(forget) == text


def test_a_random_walk_adds_the_square_of_its_scale():
    scale = np.array([0.5, 2.0], np.float32)
    np.testing.assert_allclose(random_walk(scale).inflate(1, Q), [0.25, 4.0])
    np.testing.assert_allclose(random_walk(lambda t: 3.0 / t).inflate(2, Q), 2.25)
    assert random_walk(scale).keep is None


def test_a_power_keeps_its_factor_but_where_a_coordinate_is_wide():
    np.testing.assert_allclose(
        power(lambda t: 1.0 - 0.5 / t, max_scale=2.0).keep(2, Q), [0.75, 1.0]
    )
    np.testing.assert_allclose(power(0.5).keep(1, Q), [0.5, 0.5])
    assert power(1.0).keep(1, Q) == 1.0
    # NaN rejects the round.
    assert np.isnan(power(lambda t: 1.5).keep(1, Q)).all()
    assert power(0.5).inflate is None


def test_traced_amounts_are_taken_as_they_are():
    texts = []

    def compute(value):
        rules = power(value), random_walk(value), to_prior(value)
        texts.extend(rule.window for rule in rules)
        return rules[0].keep(1, Q), rules[1].inflate(1, Q), rules[2].evidence(1)

    keep, inflate, evidence = jax.jit(compute)(0.5)
    assert texts == ["traced"] * 3
    np.testing.assert_allclose(keep, [0.5, 0.5])
    assert (float(inflate), float(evidence)) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: power(0.0),
            r"factor must be in \(0, 1\], got 0.0. 1 forgets nothing.",
        ),
        (lambda: power(1.5), r"factor must be in \(0, 1\], got 1.5.*forgets nothing"),
        (lambda: random_walk(-0.1), r"scale must be at least 0.*and finite, got"),
        (lambda: to_prior(0.0), "evidence must be positive"),
    ],
)
def test_amounts_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_windows_are_the_scales_of_random_walks():
    """A window of w rounds moves by the scale over w; an infinite one stays."""
    made = []

    def factory(step_size, forget):
        made.append((step_size, repr(forget)))
        return nt.online.ngvi(step_size, forget=forget)

    nt.online.aggregate_windows(
        [4.0, np.inf], factory=factory, step_size=0.7, scale=0.5
    )
    walk = f"random_walk: window 8 / √h {INFORMATION}"
    assert set(made) == {(0.7, walk), (0.7, "random_walk: window unbounded")}
    for options, message in (
        ({"windows": [0.0]}, "windows must be positive"),
        ({"scale": 0.0}, "scale"),
    ):
        with pytest.raises(ValueError, match=message):
            nt.online.aggregate_windows(**options)
