"""The table of golden cases, and the data and models that they share."""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_tempered as nt


class Case(NamedTuple):
    """A fit or a stream.

    Attributes:
        make: Returns what is recorded, a pytree for each name.
        ignore: Warnings that are expected, such as of a fit with few steps.
    """

    make: Callable[[], dict]
    ignore: tuple = ()

    def __call__(self):
        with warnings.catch_warnings():
            for category in self.ignore:
                warnings.simplefilter("ignore", category)
            return self.make()


CASES: dict[str, Case] = {}


def case(name, *args, ignore=(), **kwargs):
    """A decorator that puts a function with these arguments into the table."""

    def add(make):
        if name in CASES:
            raise ValueError(f"two cases have the name {name}")
        CASES[name] = Case(functools.partial(make, *args, **kwargs), tuple(ignore))
        return make

    return add


KEY = jax.random.key(20260)

# Of few digits, so that every machine has the same numbers.
RNG = np.random.default_rng(20260)
N, D = 40, 3
X = np.round(RNG.normal(size=(N, D)), 2)
WEIGHTS = np.array([1.0, -0.5, 0.0])
Y = np.round(X @ WEIGHTS + 0.5 * RNG.normal(size=N), 2)
LABEL = (X @ WEIGHTS + RNG.logistic(size=N) > 0.0).astype(int)
SIGN = 2.0 * LABEL - 1.0
COUNT = RNG.poisson(np.exp(0.5 * X @ WEIGHTS)).astype(float)
CLASS = np.argmax(X + 0.5 * RNG.normal(size=(N, D)), axis=1)
# Two groups in the plane.
GROUP = RNG.integers(2, size=N)
POINTS = np.round(
    RNG.normal(size=(N, 2)) + np.array([[-2.0, 0.0], [2.0, 1.0]])[GROUP], 2
)


def holes(x):
    """The same with a tenth of the entries missing."""
    row, column = np.indices(x.shape)
    return np.where((3 * row + column) % 10 == 0, np.nan, x)


def linear(x, y=None, size=None):
    """Linear regression, whose noise is known."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([D]).to_event(1))
    with numpyro.plate("n", len(x), subsample_size=size):
        x = numpyro.subsample(jnp.asarray(x), event_dim=1)
        y = None if y is None else numpyro.subsample(jnp.asarray(y), event_dim=0)
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def logistic(x, y=None):
    """Logistic regression, its predictor a site."""
    w = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([D]).to_event(1))
    eta = numpyro.deterministic("eta", jnp.asarray(x) @ w)
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def location(y):
    """Location and scale of a sample."""
    loc = numpyro.sample("loc", dist.Normal(0.0, 3.0))
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(loc, scale), obs=y)


def mean(y):
    """Location of a sample."""
    theta = numpyro.sample("theta", dist.Normal(0.0, 3.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def counts(x, y=None):
    """Poisson regression."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(jnp.asarray(x) @ w)), obs=y)


def labels(y):
    """A mixture of two, its labels latent."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    locs = numpyro.sample("locs", dist.Normal(jnp.array([-1.0, 1.0]), 1.0).to_event(1))
    with numpyro.plate("n", len(y)):
        label = numpyro.sample("label", dist.Categorical(weights))
        numpyro.sample("y", dist.Normal(locs[label], 1.0), obs=y)


def sparse_weights(x, y):
    """Linear regression, most of whose weights are 0."""
    prior = nt.sparse.SpikeAndSlab(0.3, 0.0, 2.0)
    w = numpyro.sample("w", prior.expand([D]).to_event(1))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(jnp.asarray(x) @ w, 0.5), obs=y)


def network(x, y=None):
    """A hidden layer of four units."""
    hidden = numpyro.sample("hidden", dist.Normal(0.0, 0.6).expand([D, 4]).to_event(2))
    output = numpyro.sample("output", dist.Normal(0.0, 0.5).expand([4]).to_event(1))
    with numpyro.plate("n", len(x)):
        numpyro.sample(
            "y", dist.Normal(jnp.tanh(jnp.asarray(x) @ hidden) @ output, 0.5), obs=y
        )


def mean_field(d=D):
    return nt.gaussian.families.MeanField(jnp.zeros(d), jnp.linspace(0.5, 1.5, d))


def full_rank(d=D, scale=1.0):
    factor = np.diag(np.linspace(0.5, 1.5, d)) + 0.1 * np.tril(np.ones((d, d)), -1)
    return nt.gaussian.families.FullRank(jnp.zeros(d), jnp.asarray(scale * factor))


def low_rank(d=D):
    return nt.gaussian.families.LowRank(
        jnp.zeros(d), jnp.linspace(2.0, 0.5, d), jnp.full((d, 1), 0.3)
    )


PRIORS = {"mean field": mean_field, "full rank": full_rank, "low rank": low_rank}
