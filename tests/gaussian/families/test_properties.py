"""Properties of the mean-field family and the compensated sum, on generated parameters."""

import math

import jax.numpy as jnp
import numpy as np
from conftest import enable_x64
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_tempered.gaussian.families import mean_field
from numpyro_tempered.gaussian.families.mean_field import MeanField
from numpyro_tempered.online.base import CompensatedSum

SETTINGS = settings(deadline=None, max_examples=50)
locs = st.floats(-5.0, 5.0)
scales = st.floats(0.05, 20.0)
slopes = st.floats(-50.0, 50.0)


def gaussian(loc, scale):
    return MeanField(jnp.array([loc]), jnp.array([scale]))


@SETTINGS
@given(locs, scales)
def test_coordinate_maps_are_inverse(loc, scale):
    with enable_x64():
        q = gaussian(loc, scale)
        back = mean_field.from_natural(mean_field.to_natural(q))
        np.testing.assert_allclose(np.stack(back), np.stack(q), rtol=1e-9, atol=1e-12)


@SETTINGS
@given(locs, scales, locs, scales)
def test_kl_is_a_divergence(loc, scale, other_loc, other_scale):
    with enable_x64():
        q, p = gaussian(loc, scale), gaussian(other_loc, other_scale)
        assert float(mean_field.kl(q, p)) >= -1e-12
        assert abs(float(mean_field.kl(q, q))) <= 1e-12


@SETTINGS
@given(locs, scales, slopes, slopes, st.floats(0.01, 10.0))
def test_kl_prox_is_stationary(loc, scale, grad_loc, grad_scale, step_size):
    with enable_x64():
        anchor = gaussian(loc, scale)
        q = mean_field.kl_prox(
            anchor, MeanField(jnp.array([grad_loc]), jnp.array([grad_scale])), step_size
        )
        # Derivatives of <g, mu> + KL(q, anchor) / step_size.
        in_loc = grad_loc + (q.loc - loc) / scale**2 / step_size
        in_scale = grad_scale + (q.scale / scale**2 - 1 / q.scale) / step_size
        size = 1 + abs(grad_loc) + abs(grad_scale) + 1 / (step_size * scale)
        np.testing.assert_allclose(in_loc, 0.0, atol=1e-10 * size)
        np.testing.assert_allclose(
            in_scale, 0.0, atol=1e-8 * size * (1 + abs(grad_scale))
        )


@SETTINGS
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200))
def test_a_compensated_sum_is_as_good_as_the_last_rounding(terms):
    total = CompensatedSum.start(jnp.zeros((), jnp.float32))
    for term in terms:
        total = total.add(jnp.float32(term))
    exact = math.fsum(terms)
    eps = float(np.finfo(np.float32).eps)
    # Second order in eps beyond the rounding of the result.
    bound = eps * abs(exact) + 4 * len(terms) * eps**2 * math.fsum(map(abs, terms))
    assert abs(float(total.value) - exact) <= bound + 1e-30
