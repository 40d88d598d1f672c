"""Restarts of fit_gaussian."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt


def two_modes(y):
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    numpyro.sample("y", dist.Normal(theta**2, 1.0), obs=y)


@pytest.mark.full
def test_restarts_find_the_optima_and_return_the_best():
    fit = nt.fit_gaussian(jax.random.key(0), two_modes, AutoNormal, jnp.asarray(9.0), num_restarts=5)
    assert float(fit.params["theta_auto_loc"]) == pytest.approx(3.0, abs=0.1)
    better, worse = fit.convergence.optima
    # Their priors differ by the ratio at 3 and -3, nearly.
    assert better - worse == pytest.approx((3.5**2 - 2.5**2) / 8.0, abs=0.1)
    assert better == float(fit.convergence.elbo)


def test_a_guide_that_is_built_has_one_start():
    with pytest.raises(ValueError, match="num_restarts needs a new guide for each start"):
        nt.fit_gaussian(jax.random.key(0), two_modes, AutoNormal(two_modes), jnp.asarray(9.0), num_restarts=2)
