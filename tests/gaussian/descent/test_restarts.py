"""Restarts of fit_gaussian."""

import functools

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import init_to_uniform
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt


def two_modes(y):
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    numpyro.sample("y", dist.Normal(theta**2, 1.0), obs=y)


@pytest.mark.full
def test_restarts_find_the_optima_and_return_the_best():
    fit = nt.fit_gaussian(
        jax.random.key(0), two_modes, AutoNormal, jnp.asarray(9.0), num_restarts=5
    )
    assert float(fit.params["theta_auto_loc"]) == pytest.approx(3.0, abs=0.1)
    better, worse = fit.convergence.optima
    # Their priors differ by the ratio at 3 and -3, nearly.
    assert better - worse == pytest.approx((3.5**2 - 2.5**2) / 8.0, abs=0.1)
    assert better == float(fit.convergence.elbo)


def test_a_guide_that_is_built_has_one_start():
    with pytest.raises(
        ValueError,
        match=r"num_restarts needs a new guide for each start.*model to guide",
    ):
        nt.fit_gaussian(
            jax.random.key(0),
            two_modes,
            AutoNormal(two_modes),
            jnp.asarray(9.0),
            num_restarts=2,
        )


def with_wall(y):
    """A likelihood without a value above 0, which a Gaussian near 0 meets."""
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    scale = jnp.where(theta > 0.0, jnp.nan, 1.0)
    numpyro.sample("y", dist.Normal(theta, scale, validate_args=False), obs=y)


# Where a run ends, fresh draws may meet the wall.
@pytest.mark.filterwarnings("ignore:the ELBO that was maximised")
@pytest.mark.full
def test_a_start_without_an_elbo_is_left_out_unless_all_are():
    guide = functools.partial(
        AutoNormal, init_scale=0.2, init_loc_fn=init_to_uniform(radius=1.0)
    )

    def num_optima(key, num_restarts):
        data = jnp.asarray(-2.0)
        fit = nt.fit_gaussian(
            key, with_wall, guide, data, num_restarts=num_restarts, tolerance=1e9
        )
        return len(fit.convergence.optima)

    lost = []
    for key in jax.random.split(jax.random.key(0), 6):
        try:
            assert num_optima(key, 1) == 1
        except ValueError as error:
            assert "not finite at the start" in str(error)  # noqa: PT017
            lost.append(key)
    assert 0 < len(lost) < 6
    assert num_optima(lost[0], 8) >= 1
