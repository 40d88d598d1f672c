"""Functions that decide on numbers, under the transformations of JAX: each is refused in one sentence."""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt

KEY = jax.random.key(0)
Y = jnp.ones(4)


def model(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


FIT = nt.results.TemperedFit(model, None, {}, 1.0, None, None, {}, (), {}, KEY)
FIRST = (model, AutoNormal, Y)
# Functions of a key, and what follows it.
CALLS = {
    nt.fit_svi: FIRST,
    nt.fit_gaussian: FIRST,
    nt.sparse.fit_support: FIRST,
    nt.select_alpha: FIRST,
    nt.temper_path: FIRST,
    nt.check_calibration: FIRST,
    nt.alpha.check_coverage: FIRST,
    nt.alpha.calibrated_powers: (model, Y),
    nt.linear_response: (FIT,),
    nt.check_fit: (FIT,),
    nt.certify_risk: (FIT, "y"),
    nt.sandwich: (FIT,),
}
TRANSFORMED = {
    "jit": lambda call: jax.jit(call)(KEY),
    "vmap": lambda call: jax.vmap(call)(jax.random.split(KEY)),
    "scan": lambda call: jax.lax.scan(
        lambda _, key: (None, call(key)), None, KEY[None]
    ),
    "jit of nothing": lambda call: jax.jit(lambda: call(KEY))(),
}


def refused(function):
    return pytest.raises(
        TypeError,
        match=f"^{function.__name__} looks at numbers: call it outside of jit, vmap and grad. Many fits",
    )


@pytest.mark.parametrize("transformation", TRANSFORMED)
@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_a_transformed_call_is_refused(function, transformation):
    with refused(function):
        TRANSFORMED[transformation](lambda key: function(key, *CALLS[function]))


def test_any_argument_tells():
    def fit(alpha):
        return nt.fit_svi(KEY, *FIRST, alpha=alpha).elbo.value

    with refused(nt.fit_svi):
        jax.grad(fit)(0.5)
    with refused(nt.fit_svi):
        jax.vmap(lambda power: fit({"y": power}))(jnp.ones(2))
    with refused(nt.fit_gaussian):
        jax.jit(lambda y: nt.fit_gaussian(KEY, model, AutoNormal, y))(Y)
    with refused(nt.compare):
        jax.jit(lambda key: nt.compare({"one": FIT, 2: FIT}, rng_key=key))(KEY)
    with refused(nt.to_inference_data):
        jax.jit(lambda value: nt.to_inference_data(FIT._replace(params=value)))(Y)
