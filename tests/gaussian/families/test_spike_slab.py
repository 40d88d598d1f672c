"""The spike and slab family: its KL against quadrature, its moments, its edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from numpyro_tempered.gaussian.families import SpikeSlab
from numpyro_tempered.gaussian.families.spike_slab import kl

NODES, WEIGHTS = special.roots_legendre(400)


def log_normal(x, loc, scale):
    return -0.5 * ((x - loc) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2.0 * np.pi)


def integrate(f, q):
    """Integral over nine standard deviations around the slab of q = (probs, loc, scale)."""
    return np.sum(WEIGHTS * f(q[1] + 9.0 * q[2] * NODES)) * 9.0 * q[2]


def kl_oracle(q, p):
    """The atom's part, and the density's by quadrature."""

    def integrand(x):
        log_q, log_p = (np.log(r[0]) + log_normal(x, *r[1:]) for r in (q, p))
        return np.exp(log_q) * (log_q - log_p)

    return (1.0 - q[0]) * np.log((1.0 - q[0]) / (1.0 - p[0])) + integrate(integrand, q)


CASES = [
    ((0.3, 0.5, 0.7), (0.1, 0.0, 1.0)),
    ((0.99, -2.0, 0.05), (0.5, 1.0, 3.0)),
    ((1e-6, 0.0, 1.0), (0.9, 0.2, 0.8)),
]


kl = jax.jit(kl)


def family(values):
    return SpikeSlab(
        *(jnp.asarray(np.array([value], jnp.result_type(float))) for value in values)
    )


@pytest.mark.parametrize(("q", "p"), CASES)
def test_kl_is_that_of_quadrature(x64, q, p):
    assert kl(family(q), family(p))[0] == pytest.approx(kl_oracle(q, p), rel=1e-10)
    assert kl(family(q), family(q))[0] == pytest.approx(0.0, abs=1e-14)


def test_moments_are_those_of_quadrature(x64):
    q = (0.3, 0.5, 0.7)
    first, second = (
        integrate(lambda x, k=k: x**k * np.exp(np.log(q[0]) + log_normal(x, *q[1:])), q)
        for k in (1, 2)
    )
    assert family(q).mean[0] == pytest.approx(first, rel=1e-10)
    assert family(q).variance[0] == pytest.approx(second - first**2, rel=1e-10)


def test_kl_at_gates_of_0_and_1(x64):
    p = family((0.2, 0.0, 2.0))
    slab = 0.5 * (0.25 + 0.25 - 1.0) - np.log(0.5)
    assert kl(family((1.0, 1.0, 1.0)), p)[0] == pytest.approx(
        -np.log(0.2) + slab, rel=1e-12
    )
    assert kl(family((0.0, 1.0, 1.0)), p)[0] == pytest.approx(-np.log(0.8), rel=1e-12)


def test_kl_is_infinite_where_the_prior_excludes():
    off, between, on = (family((probs, 0.0, 1.0)) for probs in (0.0, 0.5, 1.0))
    assert (
        kl(between, off)[0]
        == kl(between, on)[0]
        == kl(on, off)[0]
        == kl(off, on)[0]
        == jnp.inf
    )
    assert kl(off, off)[0] == kl(on, on)[0] == 0.0


@jax.jit
def gradients(probs, loc, scale, prior):
    def value(probs, loc, scale, prior):
        return kl(SpikeSlab(probs, loc, scale), SpikeSlab(prior, 0.0, 1.0))

    return jax.grad(value, argnums=(0, 1, 2, 3))(probs, loc, scale, prior)


@pytest.mark.parametrize("probs", [0.0, 1e-38, 0.5, 1.0 - 2.0**-24, 1.0])
@pytest.mark.parametrize("prior", [0.0, 0.2, 1.0])
def test_gradients_are_never_nan(probs, prior):
    assert not np.any(np.isnan(gradients(probs, 1.0, 0.5, prior)))


def test_kl_broadcasts_and_keeps_single_precision():
    single = jnp.float32
    q = SpikeSlab(
        jnp.full((3, 1), 0.5, single), jnp.zeros(2, single), jnp.ones((), single)
    )
    found = kl(q, SpikeSlab(0.5, 1.0, 1.0))
    assert found.shape == (3, 2)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 0.25, rtol=1e-6)
