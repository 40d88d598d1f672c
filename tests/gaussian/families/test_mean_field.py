import decimal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import oracles
import pytest

from numpyro_tempered.gaussian.families import MeanField
from numpyro_tempered.gaussian.families.mean_field import (
    from_natural,
    kl,
    kl_prox,
    kl_prox_scaled,
    sample,
    shrink,
    to_natural,
)

pytestmark = pytest.mark.usefixtures("strict")

Q = (np.array([0.3, -2.0, 0.0, 40.0]), np.array([0.5, 3.0, 1e-3, 7.0]))
P = (np.array([0.0, 1.5, 0.01, 38.0]), np.array([1.0, 2.0, 4e-3, 0.9]))


def family(loc, scale, dtype=None):
    return MeanField(*(jnp.asarray(np.asarray(leaf, dtype)) for leaf in (loc, scale)))


def test_kl_is_the_integral(x64):
    # The integrand reaches 30 nats, so 1e-12 relative is a few hundred roundings.
    np.testing.assert_allclose(
        float(kl(family(*Q), family(*P))),
        oracles.gaussian_kl_by_quadrature(*Q, *P),
        rtol=1e-12,
    )


def test_kl_agrees_with_numpyro(x64):
    theirs = dist.kl_divergence(
        dist.Normal(*Q).to_event(1), dist.Normal(*P).to_event(1)
    )
    np.testing.assert_allclose(
        float(kl(family(*Q), family(*P))), float(theirs), rtol=1e-13
    )


def test_kl_sums_the_last_axis_only_and_is_infinite_for_a_point(x64):
    stacked = np.asarray(
        jax.jit(kl)(
            family(np.stack([Q[0], P[0]]), np.stack([Q[1], P[1]])),
            family(P[0][None], P[1][None]),
        )
    )
    assert stacked.shape == (2,)
    np.testing.assert_allclose(
        stacked[0], oracles.gaussian_kl(*Q, *P).sum(), rtol=1e-13
    )
    assert stacked[1] == 0.0
    assert kl(family(Q[0], np.zeros(4)), family(*P)) == np.inf


def test_coordinate_maps_round_trip(x64):
    q = family(*Q)
    for ours, original in zip(from_natural(to_natural(q)), q, strict=True):
        np.testing.assert_allclose(ours, original, rtol=1e-14, atol=1e-14)


def test_natural_parameters_are_the_coefficients_of_the_log_density(x64):
    natural = to_natural(family(*Q))
    for theta in (-1.0, 0.7):
        difference = oracles.log_normal_density(theta, *Q) - oracles.log_normal_density(
            0.0, *Q
        )
        np.testing.assert_allclose(
            natural.linear * theta + natural.quadratic * theta**2, difference, rtol=1e-9
        )


@pytest.mark.parametrize(
    "step_size", [0.3, np.array([0.1, 2.0, 50.0, 0.7])], ids=["scalar", "array"]
)
def test_kl_prox_is_the_argmin_of_its_objective(x64, step_size):
    anchor = family(*P)
    for grads in (
        (np.array([1.0, -3.0, 20.0, 0.0]), np.array([0.5, -2.0, 0.0, 400.0])),
        (np.array([-1e3, 0.2, -0.1, 5.0]), np.array([-30.0, 1e-6, 1e5, -0.1])),
    ):
        ours = kl_prox(anchor, family(*grads), jnp.asarray(step_size))
        loc, scale = oracles.argmin_source(*grads, *P, step_size)
        np.testing.assert_allclose(ours.loc, loc, rtol=1e-8, atol=1e-12)
        np.testing.assert_allclose(ours.scale, scale, rtol=1e-8)


def test_kl_prox_scaled_is_the_same_step_and_admits_a_point():
    anchor, grads = family(*P, jnp.float32), family(*Q, jnp.float32)
    expected = kl_prox(anchor, grads, 0.25)
    ours = kl_prox_scaled(
        anchor, grads, jnp.asarray(np.float32(0.25) * np.square(anchor.scale))
    )
    np.testing.assert_array_equal(ours, expected)
    # Four coordinates, as above: the same programs.
    point = family(np.ones(4), np.zeros(4), jnp.float32)
    slopes = family(np.full(4, 2.0), [3.0, -3.0, 3.0, -3.0], jnp.float32)
    step = kl_prox_scaled(point, slopes, jnp.asarray(np.full(4, 0.5, np.float32)))
    np.testing.assert_array_equal(step.loc, np.zeros(4))
    np.testing.assert_array_equal(step.scale, [0.0, 1.5, 0.0, 1.5])


def exact_shrink(scale, slope):
    with decimal.localcontext() as context:
        context.prec = 150
        scale, slope = decimal.Decimal(float(scale)), decimal.Decimal(float(slope))
        return float((scale**2 + slope**2).sqrt() - slope)


def test_shrink_keeps_its_digits_in_float32():
    sizes = np.array([1e-30, 1e-18, 1e-7, 0.3, 1.0, 5e3, 1e12, 1e30], np.float32)
    scale, slope = (
        a.ravel()
        for a in np.meshgrid(sizes[:6], np.concatenate([-sizes, [0.0], sizes]))
    )
    slope = slope.astype(np.float32)
    ours = np.asarray(jax.jit(shrink)(scale, slope))
    exact = np.array([exact_shrink(*pair) for pair in zip(scale, slope, strict=True)])
    # A handful of roundings; below the smallest normal number float32 flushes to 0.
    np.testing.assert_allclose(
        ours, exact, rtol=8 * 2**-23, atol=np.finfo(np.float32).tiny
    )
    with np.errstate(over="ignore"):
        naive = np.sqrt(scale**2 + slope**2) - slope
    assert not np.allclose(naive, exact, rtol=1e-3, atol=np.finfo(np.float32).tiny)


def test_shrink_at_scale_zero_and_at_infinite_slope():
    slope = jnp.asarray(np.array([-2.0, 0.0, 2.0, 3e38], np.float32))
    with jax.debug_nans(True):
        found = jax.jit(shrink)(
            jnp.asarray(np.array([0.0, 0.0, 0.0, 1.0], np.float32)), slope
        )
    np.testing.assert_array_equal(found, [4.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.float64, marks=pytest.mark.full)]
)
def test_sample_moments(x64, key, dtype):
    q = family(*Q, dtype)
    draws = jax.jit(sample, static_argnums=2)(key, q, (200, 100))
    assert draws.shape == (200, 100, 4)
    assert draws.dtype == dtype
    assert jax.eval_shape(sample, key, q).shape == (4,)
    standard = (np.asarray(draws, float).reshape(-1, 4) - Q[0]) / Q[1]
    n = len(standard)
    assert np.all(np.abs(standard.mean(0)) < 5 / np.sqrt(n))
    assert np.all(np.abs((standard**2).mean(0) - 1) < 5 * np.sqrt(2 / n))
    correlation = standard.T @ standard / n - np.eye(4)
    assert np.all(np.abs(correlation[~np.eye(4, dtype=bool)]) < 5 / np.sqrt(n))


def test_functions_keep_float32():
    q, p = family(*Q, jnp.float32), family(*P, jnp.float32)

    def functions(q, p):
        return (
            kl(q, p),
            kl_prox(p, q, 0.1),
            to_natural(q),
            from_natural(to_natural(q)),
        )

    results = jax.eval_shape(functions, q, p)
    assert {leaf.dtype for leaf in jax.tree.leaves(results)} == {jnp.dtype("float32")}
