"""Models whose likelihoods cost little to much a datum, for the measurements of overhead."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import potential_energy
from numpyro.optim import Adam

NUM_GROUPS = 50


def location(data):
    loc = numpyro.sample("loc", dist.Normal(0.0, 2.0))
    with numpyro.plate("n", len(data["y"])):
        numpyro.sample("y", dist.Normal(loc, 1.5), obs=data["y"])


def logistic(data):
    slopes = numpyro.sample(
        "slopes", dist.Normal(0.0, 1.0).expand([data["x"].shape[1]]).to_event(1)
    )
    with numpyro.plate("n", len(data["y"])):
        numpyro.sample(
            "y", dist.Bernoulli(logits=data["x"] @ slopes), obs=data["label"]
        )


def poisson(data):
    slopes = numpyro.sample(
        "slopes", dist.Normal(0.0, 1.0).expand([data["x"].shape[1]]).to_event(1)
    )
    with numpyro.plate("n", len(data["y"])):
        numpyro.sample(
            "y", dist.Poisson(jnp.exp(0.1 * (data["x"] @ slopes))), obs=data["count"]
        )


def hierarchical(data):
    loc = numpyro.sample("loc", dist.Normal(0.0, 2.0))
    between = numpyro.sample("between", dist.HalfNormal(1.0))
    within = numpyro.sample("within", dist.HalfNormal(1.0))
    with numpyro.plate("groups", NUM_GROUPS):
        intercept = numpyro.sample("intercept", dist.Normal(loc, between))
    with numpyro.plate("n", len(data["y"])):
        numpyro.sample(
            "y", dist.Normal(intercept[data["group"]], within), obs=data["y"]
        )


def components():
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    return weights, numpyro.sample(
        "locs", dist.Normal(0.0, 3.0).expand([3]).to_event(1)
    )


def mixture(data):
    weights, locs = components()
    with numpyro.plate("n", len(data["y"])):
        mixed = dist.MixtureSameFamily(
            dist.Categorical(weights), dist.Normal(locs, 1.0)
        )
        numpyro.sample("y", mixed, obs=data["y"])


def labels(data):
    """The mixture with its labels as latents, for marginalize."""
    weights, locs = components()
    with numpyro.plate("n", len(data["y"])):
        label = numpyro.sample("label", dist.Categorical(weights))
        numpyro.sample("y", dist.Normal(locs[label], 1.0), obs=data["y"])


WORKLOADS = {
    f.__name__: f for f in (location, logistic, poisson, hierarchical, mixture)
}


def simulate(n, d=10):
    """One set of arrays for every workload."""
    rng = np.random.default_rng(n)
    y = rng.normal(size=n)
    return {
        "y": jnp.asarray(y),
        "x": jnp.asarray(rng.normal(size=(n, d))),
        "label": jnp.asarray((y > 0).astype(np.int32)),
        "count": jnp.asarray(rng.poisson(1.0, n)),
        "group": jnp.asarray(rng.integers(NUM_GROUPS, size=n)),
    }


class numpyro_scale(handlers.scale):
    """NumPyro's own scale, on the observed site by name."""

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["name"] == "y":
            super().process_message(msg)


def unconstrained_point(model, data):
    """A point of the unconstrained space."""
    shapes = jax.eval_shape(lambda: draw_unconstrained(model, data))
    return {name: 0.1 * jnp.ones(shape.shape) for name, shape in shapes.items()}


def draw_unconstrained(model, data):
    trace = handlers.trace(handlers.seed(model, 0)).get_trace(data)
    return {
        name: dist.biject_to(site["fn"].support).inv(site["value"])
        for name, site in trace.items()
        if site["type"] == "sample"
        and not site["is_observed"]
        and not site["fn"].support.is_discrete
    }


def gradient(model):
    """The gradient of the potential energy, a function of the point and the data."""
    return jax.grad(lambda point, data: potential_energy(model, (data,), {}, point))


def energy_and_gradient(model):
    """What a leapfrog step of NUTS evaluates."""
    return jax.value_and_grad(
        lambda point, data: potential_energy(model, (data,), {}, point)
    )


def svi_update(model, data):
    """``SVI.update`` as a function of the state and the data, and a state."""
    svi = SVI(model, AutoNormal(model), Adam(0.01), Trace_ELBO())
    state = svi.init(jax.random.key(0), data)
    # A function of its own: jit caches by function.
    return lambda state, data: svi.update(state, data), state


def flops(fn, *args):
    """Floating-point operations of the compiled program, by XLA's count."""
    cost = jax.jit(fn).lower(*args).compile().cost_analysis()
    return (cost[0] if isinstance(cost, list) else cost)["flops"]
