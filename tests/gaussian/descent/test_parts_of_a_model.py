"""Priors, Jacobians, factors and likelihoods of a model are each in the free energy once."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro.infer.util import potential_energy

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, MeanField
from numpyro_tempered.infer.free_energy import model_objective
from numpyro_tempered.infer.priors import Latents

N, ALPHA = 12, 0.5
RNG = np.random.default_rng(2)
X = RNG.normal(size=(N, 2))
Y = X @ np.array([1.0, -0.5]) + 0.7 * RNG.normal(size=N)
# Normal, Laplace, scalars with and without a transform; then what is left to draws.
SHAPES = {
    "beta": (2,),
    "lasso": (2,),
    "sigma": (),
    "rate": (3,),
    "t": (),
    "simplex": (2,),
    "below": (),
}
SIZES = [int(np.prod(shape)) for shape in SHAPES.values()]
EXPECTATIONS = {
    "none": None,
    "quadrature": nt.expectations.gauss_hermite(predictor="eta"),
    "draws": nt.expectations.monte_carlo(num_particles=200, antithetic=True),
}


def model(x, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    lasso = numpyro.sample("lasso", dist.Laplace(0.0, 0.5).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    with numpyro.plate("three", 3):
        numpyro.sample("rate", dist.Gamma(2.0, 3.0))
    numpyro.sample("t", dist.StudentT(4.0, 1.0, 2.0))
    numpyro.sample("simplex", dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])))
    numpyro.sample("below", dist.HalfNormal(sigma))
    eta = numpyro.deterministic("eta", x @ (beta + lasso))
    numpyro.sample("y", dist.Normal(eta, sigma), obs=y)


def unpack(flat):
    parts = jnp.split(flat, np.cumsum(SIZES)[:-1])
    return {
        name: part.reshape(shape)
        for (name, shape), part in zip(SHAPES.items(), parts, strict=True)
    }


@pytest.mark.parametrize("name", tiered(EXPECTATIONS, unit=["quadrature"]))
@pytest.mark.parametrize("family", tiered(["full", "diagonal"], unit=["diagonal"]))
def test_around_a_point_the_free_energy_is_numpyros_potential(family, name, x64):
    """The expectations under a Gaussian of standard deviation 1e-5 are the values at its mean."""
    loc, d = jnp.asarray(RNG.normal(size=sum(SIZES))), sum(SIZES)
    q = (
        FullRank(loc, 1e-5 * jnp.eye(d))
        if family == "full"
        else MeanField(loc, jnp.full(d, 1e-5))
    )
    tempered, args = nt.temper(model, alpha=ALPHA), (jnp.asarray(X), jnp.asarray(Y))
    energy = model_objective(
        tempered,
        Latents(tuple(SHAPES), unpack),
        q,
        args,
        {},
        expectation=EXPECTATIONS[name],
        num_draws=200,
    )
    objective = energy.objective
    found = jax.jit(objective.evaluate)(q, objective.data, jax.random.key(0))
    value, grad = jax.value_and_grad(
        lambda theta: potential_energy(tempered, args, {}, unpack(theta))
    )(loc)
    assert float(found.value) == pytest.approx(float(value), abs=1e-6)
    np.testing.assert_allclose(found.grad, grad, atol=1e-3)
