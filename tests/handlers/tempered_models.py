"""Small models with densities written out by hand, and the handler that a user would write first."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.util import log_density, potential_energy
from numpyro.primitives import Messenger
from scipy import stats

Y = np.array([0.3, -1.2, 2.5, 0.8])


class naive_temper(Messenger):
    """Scales whatever is observed; wrong for every Jacobian."""

    def __init__(self, fn=None, alpha=1.0):
        self.alpha = alpha
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["scale"] = (
                self.alpha if msg.get("scale") is None else self.alpha * msg["scale"]
            )


def normal(y=Y):
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.5), obs=y)


def normal_density(theta, alpha, y=Y):
    return (
        stats.norm.logpdf(theta, 0.5, 2.0)
        + alpha * stats.norm.logpdf(y, theta, 1.5).sum()
    )


def unobserved():
    """``normal`` without its data."""
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    with numpyro.plate("n", len(Y)):
        return numpyro.sample("y", dist.Normal(theta, 1.5))


def positive(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(0.0, s), obs=y)


def positive_density(s, y, alpha):
    """Tempered joint density of ``positive`` in s, without the Jacobian."""
    return stats.halfnorm.logpdf(s) + alpha * np.sum(
        stats.norm.logpdf(y, 0.0, s), axis=-1
    )


def trace_of(model, *args, **kwargs):
    return handlers.trace(handlers.seed(model, 0)).get_trace(*args, **kwargs)


def density(model, params, *args):
    return jax.jit(lambda params: log_density(model, args, {}, params)[0])(params)


def potential(model, params, *args):
    return jax.jit(lambda params: potential_energy(model, args, {}, params))(params)
