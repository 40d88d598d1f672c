"""Sums over local discrete latents: closed forms, a forward algorithm, brute force, in every algorithm."""

import itertools
import pickle
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.contrib.funsor import config_enumerate
from numpyro.diagnostics import effective_sample_size
from numpyro.distributions import constraints
from numpyro.infer import (
    MCMC,
    NUTS,
    SVI,
    DiscreteHMCGibbs,
    Predictive,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    log_likelihood,
)
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_value
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import initialize_model, log_density, potential_energy
from numpyro.primitives import Messenger
from oracles import gaussian_kl
from scipy import integrate, stats
from scipy.special import logsumexp

import numpyro_tempered as nt
from numpyro_tempered.handlers.likelihood import replicate
from numpyro_tempered.report.arviz import group

KEY = jax.random.key(5)
ALPHA = 0.3
X = np.array([0.1, 2.5, 2.2, -1.0])
B = np.stack([X + 0.3, 0.5 - X], axis=1)
PROBS = np.array([0.4, 0.6])
LOC = np.array([0.3, 2.0])


def tempered(model, alpha=ALPHA, **kwargs):
    return nt.temper(nt.marginalize(model), alpha, **kwargs)


def trace_of(model, *args, **kwargs):
    return handlers.trace(handlers.seed(model, 0)).get_trace(*args, **kwargs)


def sites_of(model, *args, **kwargs):
    return [
        name
        for name, site in trace_of(model, *args, **kwargs).items()
        if site["type"] == "sample"
    ]


def own(array):
    """A copy: jax mixes up the precisions of an array that it has seen."""
    return jnp.asarray(np.array(array) if isinstance(array, np.ndarray) else array)


def density(model, params, *args, **kwargs):
    # As one program: the sum is many small operations.
    return float(
        jax.jit(lambda params: log_density(model, args, kwargs, params)[0])(params)
    )


def refused(model, *args, match):
    """A trace is enough: what is refused is not computed."""
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda: trace_of(model, *map(own, args)) and None)


def normal(x, loc, scale=1.0):
    return stats.norm.logpdf(x, loc, scale)


# One row for each model: its prior and its log-likelihood by hand, as functions of the parameters.


class Row(NamedTuple):
    model: object
    params: dict  # constrained values
    args: tuple
    log_prior: object
    log_lik: object
    log_jacobian: object = lambda **params: 0.0  # of the unconstrained parameters
    sites: tuple = ("x",)


def row_of(*args, **kwargs):
    def decorate(model):
        ROWS[model.__name__] = Row(model, *args, **kwargs)
        return model

    return decorate


ROWS = {}


def prior_of_loc(loc):
    return normal(loc, 0.0, 3.0).sum()


def sample_loc(num=2):
    return numpyro.sample("loc", dist.Normal(0.0, 3.0).expand([num]).to_event(1))


def sample_z(name="z", probs=PROBS):
    return numpyro.sample(name, dist.Categorical(probs=own(probs)))


def mixture_of(x, loc, probs=PROBS):
    """Log-density of each datum."""
    return logsumexp(
        np.log(probs) + normal(np.asarray(x)[:, None], np.asarray(loc)), axis=1
    )


GIVEN = {"loc": LOC}


@row_of(GIVEN, (X,), prior_of_loc, lambda loc: mixture_of(X, loc).sum())
def mixture(x=None, size=4):
    loc = sample_loc()
    with numpyro.plate("n", size if x is None else len(x)):
        z = sample_z()
        numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


ROWS["one_datum"] = ROWS["mixture"]._replace(
    args=(X[:1],), log_lik=lambda loc: mixture_of(X[:1], loc).sum()
)


@row_of(
    {"loc": LOC, "scale": np.array([0.7, 1.6]), "probs": np.array([0.35, 0.65])},
    (X,),
    lambda loc, scale, probs: (
        prior_of_loc(loc)
        + stats.halfnorm.logpdf(scale).sum()
        + stats.dirichlet.logpdf(probs, [2.0, 3.0])
    ),
    lambda loc, scale, probs: logsumexp(
        np.log(probs) + normal(X[:, None], loc, scale), axis=1
    ).sum(),
    # Stick breaking of two weights is a logistic.
    lambda loc, scale, probs: np.log(scale).sum() + np.log(probs).sum(),
)
def parameters_in_plates(x):
    with numpyro.plate("k", 2):
        loc = numpyro.sample("loc", dist.Normal(0.0, 3.0))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    probs = numpyro.sample("probs", dist.Dirichlet(jnp.array([2.0, 3.0])))
    with numpyro.plate("n", len(x)):
        z = sample_z(probs=probs)
        numpyro.sample("x", dist.Normal(loc[z], scale[z]), obs=x)


def by_hand(x, loc, probs):
    """The sum over pairs of values, with the probabilities of the pairs."""
    each = [
        np.log(probs[i, j]) + normal(x, loc[i] + j) for i in range(2) for j in range(2)
    ]
    return logsumexp(each, axis=0).sum()


OTHER = np.array([[0.2, 0.8], [0.5, 0.5]])


@row_of(
    GIVEN, (X,), prior_of_loc, lambda loc: by_hand(X, loc, np.outer(PROBS, OTHER[0]))
)
def two_independent_latents(x):
    loc = sample_loc()
    with numpyro.plate("n", len(x)):
        z, w = sample_z(), sample_z("w", OTHER[0])
        numpyro.sample("x", dist.Normal(loc[z] + w, 1.0), obs=x)


@row_of(GIVEN, (X,), prior_of_loc, lambda loc: by_hand(X, loc, PROBS[:, None] * OTHER))
def two_dependent_latents(x):
    loc = sample_loc()
    with numpyro.plate("n", len(x)):
        z = sample_z()
        w = sample_z("w", own(OTHER)[z])
        numpyro.sample("x", dist.Normal(loc[z] + w, 1.0), obs=x)


@row_of(
    GIVEN,
    (X,),
    prior_of_loc,
    lambda loc: mixture_of(X, loc).sum() + mixture_of(2 * X, loc, OTHER[0]).sum(),
    sites=("x", "y"),
)
def two_latents_apart(x):
    loc = sample_loc()
    with numpyro.plate("n", len(x)):
        z, w = sample_z(), sample_z("w", OTHER[0])
        numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)
        numpyro.sample("y", dist.Normal(loc[w], 1.0), obs=2 * x)


def both_sites(x, b, loc):
    pair = normal(b[:, :1], loc) + normal(b[:, 1:], -np.asarray(loc))
    return logsumexp(np.log(PROBS) + normal(x[:, None], loc) + pair, axis=1)


@row_of(
    GIVEN,
    (X, B),
    prior_of_loc,
    lambda loc: both_sites(X, B, loc).sum() + normal(X, loc[0]).sum(),
    sites=("a+b", "c"),
)
def several_sites(a, b):
    """Two sites of one latent, one of them with an event dimension, and one that does not depend on it."""
    loc = sample_loc()
    with numpyro.plate("n", len(a)):
        z = sample_z()
        numpyro.sample("a", dist.Normal(loc[z], 1.0), obs=a)
        numpyro.sample(
            "b", dist.Normal(jnp.stack([loc[z], -loc[z]], -1), 1.0).to_event(1), obs=b
        )
        numpyro.sample("c", dist.Normal(loc[0], 1.0), obs=a)


COVARIANCE = np.array([[1.0, 0.4], [0.4, 0.8]])


@row_of(
    GIVEN,
    (B,),
    prior_of_loc,
    lambda loc: logsumexp(
        [
            np.log(p) + stats.multivariate_normal.logpdf(B, [m, -m], COVARIANCE)
            for p, m in zip(PROBS, loc, strict=True)
        ],
        axis=0,
    ).sum(),
)
def multivariate(b):
    loc = sample_loc()
    with numpyro.plate("n", len(b)):
        z = sample_z()
        mean = jnp.stack([loc[z], -loc[z]], axis=-1)
        numpyro.sample("x", dist.MultivariateNormal(mean, own(COVARIANCE)), obs=b)


@row_of(
    {"scale": np.array(0.8)},
    (X,),
    lambda scale: stats.halfnorm.logpdf(scale),
    lambda scale: (
        logsumexp(
            stats.binom.logpmf(np.arange(3), 2, 0.3)
            + normal(X[:, None], scale * np.arange(3)),
            axis=1,
        ).sum()
        + logsumexp(
            np.log(PROBS) + normal(X[:, None], -scale * np.arange(2)), axis=1
        ).sum()
    ),
    lambda scale: np.log(scale),
    sites=("x", "y"),
)
def binomial_and_bernoulli(x):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("n", len(x)):
        z = numpyro.sample("z", dist.Binomial(2, 0.3))
        w = numpyro.sample("w", dist.Bernoulli(0.6))
        numpyro.sample("x", dist.Normal(scale * z, 1.0), obs=x)
        numpyro.sample("y", dist.Normal(-scale * w, 1.0), obs=x)


@row_of({"loc": LOC[:1]}, (X,), prior_of_loc, lambda loc: normal(X, loc[0]).sum())
def one_component(x):
    loc = sample_loc(1)
    with numpyro.plate("n", len(x)):
        z = sample_z(probs=np.ones(1))
        numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


COUNTS = np.array([0, 3, 1, 7])


@row_of(
    {"rate": np.array([0.8, 4.0])},
    (4, COUNTS),
    lambda rate: stats.gamma.logpdf(rate, 2.0).sum(),
    lambda rate: logsumexp(
        np.log(PROBS) + stats.poisson.logpmf(COUNTS[:, None], rate), axis=1
    ).sum(),
    lambda rate: np.log(rate).sum(),
)
def counts(size, x=None):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("n", size):
        z = sample_z()
        numpyro.sample("x", dist.Poisson(rate[z]), obs=x)


# Plates in plates.

TABLE = (
    np.random.default_rng(1).normal(size=(4, 3))
    + np.array([0.0, 2.0, 0.0, 2.0])[:, None]
)


def groups_of(table, loc, inner=1.0):
    """Log-probability of each row, which shares one latent; ``inner`` scales what is inside of the sum."""
    return np.array(
        [
            logsumexp(np.log(PROBS) + inner * normal(row[:, None], loc).sum(0))
            for row in table
        ]
    )


@row_of(GIVEN, (TABLE,), prior_of_loc, lambda loc: groups_of(TABLE, loc).sum())
def latent_in_the_outer_plate(x, outer=None, inner=None):
    loc = sample_loc()
    with numpyro.plate("outer", x.shape[0], subsample_size=outer, dim=-2) as i:
        z = sample_z()
        with numpyro.plate("inner", x.shape[1], subsample_size=inner, dim=-1) as j:
            numpyro.sample(
                "x", dist.Normal(loc[z], 1.0), obs=jnp.asarray(x)[i[:, None], j]
            )


ROWS["one_group"] = ROWS["latent_in_the_outer_plate"]._replace(
    model=lambda x: _without_indices(x),
    args=(TABLE[:1],),
    log_lik=lambda loc: groups_of(TABLE[:1], loc).sum(),
)
ROWS["groups_of_one"] = ROWS["one_group"]._replace(
    args=(TABLE[:, :1],), log_lik=lambda loc: groups_of(TABLE[:, :1], loc).sum()
)


def _without_indices(x):
    loc = sample_loc()
    with numpyro.plate("outer", x.shape[0], dim=-2):
        z = sample_z()
        with numpyro.plate("inner", x.shape[1], dim=-1):
            numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


def nested_sum(table, loc):
    def group_given(row, z):
        each = [np.log(OTHER[z, w]) + normal(row, loc[z] + w) for w in range(2)]
        return logsumexp(each, axis=0).sum()

    return sum(
        logsumexp([np.log(PROBS[z]) + group_given(row, z) for z in range(2)])
        for row in table
    )


@row_of(GIVEN, (TABLE,), prior_of_loc, lambda loc: nested_sum(TABLE, loc))
def latents_in_both_plates(x):
    loc = sample_loc()
    with numpyro.plate("outer", x.shape[0], dim=-2):
        z = sample_z()
        with numpyro.plate("inner", x.shape[1], dim=-1):
            w = sample_z("w", own(OTHER)[z])
            numpyro.sample("x", dist.Normal(loc[z] + w, 1.0), obs=x)


@row_of(GIVEN, (TABLE,), prior_of_loc, lambda loc: mixture_of(TABLE.ravel(), loc).sum())
def latent_in_both_plates(x):
    loc = sample_loc()
    with (
        numpyro.plate("outer", x.shape[0], dim=-2),
        numpyro.plate("inner", x.shape[1], dim=-1),
    ):
        z = sample_z()
        numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


# Masks: what is hidden counts for nothing.

HALF = np.array([True, True, False, False])


@row_of(GIVEN, (X,), prior_of_loc, lambda loc: mixture_of(X[HALF], loc).sum())
def masked_latent_and_data(x):
    loc = sample_loc()
    with numpyro.plate("n", len(x)), handlers.mask(mask=jnp.asarray(HALF)):
        z = sample_z()
        numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


@row_of(GIVEN, (X,), prior_of_loc, lambda loc: mixture_of(X[HALF], loc).sum())
def masked_data(x):
    loc = sample_loc()
    with numpyro.plate("n", len(x)):
        z = sample_z()
        with handlers.mask(mask=jnp.asarray(HALF)):
            numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


LABELS = np.array([1, 0, 0, 0])


@row_of(
    GIVEN,
    (X,),
    prior_of_loc,
    lambda loc: (
        mixture_of(X[~HALF], loc).sum()
        + (np.log(PROBS[LABELS[HALF]]) + normal(X[HALF], loc[LABELS[HALF]])).sum()
    ),
    sites=("x", "z_observed"),
)
def some_labels_known(x):
    loc = sample_loc()
    with numpyro.plate("n", len(x)):
        prior = dist.Categorical(probs=own(PROBS))
        z = numpyro.sample(
            "z", prior, obs=jnp.asarray(LABELS), obs_mask=jnp.asarray(HALF)
        )
        numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)


# Factors of the user.


@row_of(
    GIVEN,
    (X,),
    prior_of_loc,
    lambda loc: (
        logsumexp(
            np.log(PROBS) - 0.5 * np.arange(2) + normal(X[:, None], loc), axis=1
        ).sum()
        - 2.0 * loc[0]
        - loc[1]
    ),
    sites=("x+inside", "beside", "outside"),
)
def factors(x):
    loc = sample_loc()
    with numpyro.plate("n", len(x)):
        z = sample_z()
        numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)
        numpyro.factor("inside", -0.5 * z)
        numpyro.factor("beside", -0.5 * loc[0])
    numpyro.factor("outside", -loc[1])


# Chains.

Y = np.array([0.1, 2.5, 2.2, -1.0, 0.4])
CHAIN = np.array([[0.8, 0.2], [0.3, 0.7]])
S = {"s": np.array(0.7)}


def forward(y, loc, first=PROBS, chain=CHAIN):
    """The forward algorithm for y_t ~ N(loc[z_t], 1), ``loc`` of shape (states,) or (time, states)."""
    loc = np.broadcast_to(loc, (len(y), np.shape(loc)[-1]))
    log_alpha = np.log(first) + normal(y[0], loc[0])
    for t in range(1, len(y)):
        log_alpha = logsumexp(log_alpha[:, None] + np.log(chain), axis=0) + normal(
            y[t], loc[t]
        )
    return logsumexp(log_alpha)


def prior_of_s(s):
    return stats.halfnorm.logpdf(s)


def states(s):
    return s * np.arange(2)


def chain_row(log_lik, *args, **kwargs):
    return row_of(
        S,
        args or (Y,),
        prior_of_s,
        log_lik,
        lambda s: np.log(s),
        **{"sites": ("y",), **kwargs},
    )


def _first_or_next(z, t):
    return jnp.where(t == 0, own(PROBS), own(CHAIN)[z])


@chain_row(lambda s: forward(Y, states(s)))
def hmm(y, **kwargs):
    s = numpyro.sample("s", dist.HalfNormal(1.0))

    def body(carry, y):
        z, t = carry
        z = sample_z(probs=_first_or_next(z, t))
        numpyro.sample("y", dist.Normal(s * z, 1.0), obs=y)
        return (z, t + 1), None

    scan(body, (0, 0), y, **kwargs)


for _length in (1, 2, 3):
    ROWS[f"hmm_of_{_length}"] = ROWS["hmm"]._replace(
        args=(Y[:_length],), log_lik=lambda s, y=Y[:_length]: forward(y, states(s))
    )
COVARIATES = np.array([0.3, -1.0, 0.5, 0.0, 2.0])


@chain_row(lambda s: forward(Y, states(s) + COVARIATES[:, None], first=CHAIN[1]))
def hmm_with_covariates(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))

    def body(z, data):
        y, covariate = data
        z = sample_z(probs=own(CHAIN)[z])
        numpyro.sample("y", dist.Normal(s * z + covariate, 1.0), obs=y)
        return z, None

    scan(body, 1, (y, own(COVARIATES)))


SECOND = np.random.default_rng(0).dirichlet(np.ones(2), (2, 2))


def second_order(y, loc):
    each = []
    for path in itertools.product(range(2), repeat=len(y)):
        z = (0, 1, *path)
        each.append(
            sum(
                np.log(SECOND[z[t], z[t + 1], z[t + 2]]) + normal(y[t], loc[z[t + 2]])
                for t in range(len(y))
            )
        )
    return logsumexp(each)


@chain_row(lambda s: second_order(Y, states(s)))
def hmm_of_second_order(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))

    def body(carry, y):
        before, last = carry
        z = sample_z(probs=own(SECOND)[before, last])
        numpyro.sample("y", dist.Normal(s * z, 1.0), obs=y)
        return (last, z), None

    scan(body, (0, 1), y, history=2)


for _length in (1, 2, 3, 4):
    ROWS[f"hmm_of_second_order_of_{_length}"] = ROWS["hmm_of_second_order"]._replace(
        args=(Y[:_length],), log_lik=lambda s, y=Y[:_length]: second_order(y, states(s))
    )

SEQUENCES = np.stack([Y, 0.5 * Y[::-1], Y + 0.3], axis=1)
LENGTHS = np.array([5, 2, 3])


def of_each_sequence(s, lengths=(5, 5, 5), sequences=SEQUENCES):
    return np.array(
        [forward(y[:n], states(s)) for y, n in zip(sequences.T, lengths, strict=True)]
    )


@chain_row(lambda s: of_each_sequence(s).sum(), SEQUENCES)
def sequences(y, lengths=None):
    s = numpyro.sample("s", dist.HalfNormal(1.0))

    def body(carry, y):
        z, t = carry
        there = True if lengths is None else t < lengths
        with numpyro.plate("sequence", y.shape[0], dim=-1), handlers.mask(mask=there):
            z = sample_z(probs=_first_or_next(z, t))
            numpyro.sample("y", dist.Normal(s * z, 1.0), obs=y)
        return (z, t + 1), None

    scan(body, (jnp.zeros(y.shape[1], int), 0), y)


ROWS["padded_sequences"] = ROWS["sequences"]._replace(
    args=(SEQUENCES, jnp.asarray(LENGTHS)),
    log_lik=lambda s: of_each_sequence(s, LENGTHS).sum(),
)
ROWS["one_sequence"] = ROWS["sequences"]._replace(
    args=(SEQUENCES[:, :1],),
    log_lik=lambda s: of_each_sequence(s, (5,), SEQUENCES[:, :1]).sum(),
)


def of_panel(s):
    each = []
    for path in itertools.product(range(2), repeat=len(Y)):
        log_prior = np.log(PROBS[path[0]]) + np.log(CHAIN[path[:-1], path[1:]]).sum()
        mean = s * np.array(path)
        each.append(
            log_prior
            + normal(SEQUENCES, mean[:, None]).sum()
            + normal(Y, mean + 1.0).sum()
        )
    return logsumexp(each) + normal(Y, s).sum()


def panel(order):
    """A state with data in a plate and data in none, which have the same dimension, in either order."""

    def model(y, single):
        s = numpyro.sample("s", dist.HalfNormal(1.0))

        def rows(z, y, single):
            with numpyro.plate("rows", y.shape[0]):
                numpyro.sample("y", dist.Normal(s * z, 1.0), obs=y)

        def alone(z, y, single):
            numpyro.sample("single", dist.Normal(s * z + 1.0, 1.0), obs=single)
            numpyro.sample("apart", dist.Normal(s, 1.0), obs=single)

        def body(carry, data):
            z, t = carry
            z = sample_z(probs=_first_or_next(z, t))
            for part in (rows, alone)[::order]:
                part(z, *data)
            return (z, t + 1), None

        scan(body, (0, 0), (y, single))

    return model


@pytest.mark.full
@pytest.mark.parametrize("order", [1, -1])
def test_plates_in_a_scan_leave_the_dimensions_of_other_sites_alone(order, x64):
    got = density(tempered(panel(order)), S, jnp.asarray(SEQUENCES), jnp.asarray(Y))
    assert got == pytest.approx(prior_of_s(0.7) + ALPHA * of_panel(0.7), rel=1e-10)


NOISE = np.array([0.3, 0.1, 0.9, 0.5, 1.2])


@row_of(
    {"s": S["s"], "e": NOISE},
    (Y,),
    lambda s, e: prior_of_s(s) + stats.halfnorm.logpdf(e, scale=2.0).sum(),
    lambda s, e: forward(Y - e, states(s)),
    lambda s, e: np.log(s) + np.log(e).sum(),
    sites=("y",),
)
def hmm_with_continuous_latents(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))

    def body(carry, y):
        z, t = carry
        z = sample_z(probs=_first_or_next(z, t))
        e = numpyro.sample("e", dist.HalfNormal(2.0))
        numpyro.sample("y", dist.Normal(s * z + e, 1.0), obs=y)
        return (z, t + 1), None

    scan(body, (0, 0), y)


@chain_row(
    lambda s: forward(
        Y,
        np.array([a + 2 * b for a in range(2) for b in range(2)]) * s,
        np.kron(CHAIN[0], CHAIN[1]),
        np.kron(CHAIN, CHAIN),
    )
)
def factorial_hmm(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))

    def body(carry, y):
        a, b = (
            sample_z(name, own(CHAIN)[last])
            for name, last in zip(("a", "b"), carry, strict=True)
        )
        numpyro.sample("y", dist.Normal((a + 2 * b) * s, 1.0), obs=y)
        return (a, b), None

    scan(body, (0, 1), y)


@chain_row(
    lambda s: forward(Y, states(s), CHAIN[0]) + forward(Y[:3], states(s), CHAIN[0]),
    sites=("y0", "y1"),
)
def two_hmms(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    for i, data in enumerate((y, y[:3])):

        def body(z, y, i=i):
            z = sample_z(f"z{i}", own(CHAIN)[z])
            numpyro.sample(f"y{i}", dist.Normal(s * z, 1.0), obs=y)
            return z, None

        scan(body, 0, data)


@chain_row(lambda s: normal(Y, s).sum())
def data_beside_the_chain(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))

    def body(z, y):
        z = sample_z(probs=own(CHAIN)[z])
        numpyro.sample("y", dist.Normal(s, 1.0), obs=y)
        return z, None

    scan(body, 0, y)


@chain_row(
    lambda s: logsumexp(np.log(PROBS) + normal(Y[:, None], states(s)), axis=1).sum()
)
def scan_without_a_chain(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))

    def body(carry, y):
        z = sample_z()
        numpyro.sample("y", dist.Normal(s * z, 1.0), obs=y)
        return carry, None

    scan(body, 0, y)


# The default run keeps one row of each kind.
LONGER = {
    "binomial_and_bernoulli",
    "factorial_hmm",
    "hmm_of_3",
    "hmm_of_second_order_of_1",
    "hmm_of_second_order_of_2",
    "hmm_of_second_order_of_3",
    "hmm_with_covariates",
    "latent_in_both_plates",
    "masked_data",
    "scan_without_a_chain",
    "two_hmms",
    "two_independent_latents",
}


# And the unit tier those of which no other test has the density.
UNIT = {"some_labels_known", "hmm_of_1", "hmm_with_continuous_latents"}


def tier(name):
    if name in UNIT:
        return name
    return pytest.param(
        name, marks=pytest.mark.slow if name in LONGER else pytest.mark.full
    )


@pytest.mark.parametrize("name", [tier(name) for name in ROWS])
def test_the_density_is_that_of_the_sum(name, x64):
    row, traces = ROWS[name], []

    @jax.jit
    def run(params):
        value, trace = log_density(tempered(row.model), row.args, {}, params)
        traces.append(trace)
        return value

    want = row.log_prior(**row.params) + ALPHA * row.log_lik(**row.params)
    assert float(run(row.params)) == pytest.approx(want, rel=1e-10)
    sites = {name for name, site in traces[0].items() if site["type"] == "sample"}
    assert sites == {*row.params, *row.sites}


@pytest.mark.parametrize(
    "name",
    tiered(
        ["parameters_in_plates", "counts", "hmm_with_continuous_latents"],
        unit=["parameters_in_plates"],
    ),
)
def test_jacobians_are_not_tempered(name, x64):
    row = ROWS[name]
    assert row.log_jacobian(**row.params) != 0.0
    model = tempered(row.model)
    supports = {"loc": constraints.real, "probs": constraints.simplex}

    @jax.jit
    def run(params):
        unconstrained = {
            k: dist.biject_to(supports.get(k, constraints.positive)).inv(v)
            for k, v in params.items()
        }
        return potential_energy(model, row.args, {}, unconstrained)

    parts = (
        row.log_prior(**row.params),
        ALPHA * row.log_lik(**row.params),
        row.log_jacobian(**row.params),
    )
    got = run(row.params)
    assert float(got) == pytest.approx(-sum(parts), rel=1e-10)


# What other handlers do with the same model.


class scale_sites(Messenger):
    """Scales the named sites, as a user would write it."""

    def __init__(self, fn, names):
        self.names = names
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["name"] in self.names:
            msg["scale"] = ALPHA if msg["scale"] is None else ALPHA * msg["scale"]


def nuts_target(model, params, *args):
    """Log-density, up to Jacobians, that NUTS has for its target."""

    @jax.jit
    def run(params):
        kernel = initialize_model(
            KEY, model, model_args=args, init_strategy=init_to_value(values=params)
        )
        return kernel.potential_fn(params)

    return -float(run(params))


def test_known_answer_two_gaussians(x64):
    x = jnp.asarray(X)
    right = prior_of_loc(LOC) + ALPHA * mixture_of(X, LOC).sum()
    assert nuts_target(tempered(mixture), GIVEN, x) == pytest.approx(right, rel=1e-12)
    marked = nt.temper(config_enumerate(mixture), ALPHA)
    with pytest.raises(
        ValueError,
        match=r"enumerated local latent 'z'.*temper\(marginalize\(model\).*declare it",
    ):
        nuts_target(marked, GIVEN, x)


@pytest.mark.full
def test_known_answer_two_gaussians_and_the_naive_powers(x64):
    x = jnp.asarray(X)
    right = prior_of_loc(LOC) + ALPHA * mixture_of(X, LOC).sum()
    inside = (
        prior_of_loc(LOC)
        + logsumexp(np.log(PROBS) + ALPHA * normal(X[:, None], LOC), axis=1).sum()
    )
    both = (
        prior_of_loc(LOC)
        + logsumexp(ALPHA * (np.log(PROBS) + normal(X[:, None], LOC)), axis=1).sum()
    )
    assert nuts_target(tempered(mixture), GIVEN, x) == pytest.approx(right, rel=1e-12)
    # Under NUTS a power of the observed site, or of both sites, is inside of the sum.
    marked = config_enumerate(mixture)
    assert nuts_target(scale_sites(marked, ["x"]), GIVEN, x) == pytest.approx(
        inside, rel=1e-12
    )
    assert nuts_target(scale_sites(marked, ["x", "z"]), GIVEN, x) == pytest.approx(
        both, rel=1e-12
    )
    assert min(abs(right - inside), abs(right - both), abs(inside - both)) > 0.1
    with pytest.raises(
        ValueError,
        match=r"enumerated local latent 'z'.*temper\(marginalize\(model\).*declare it",
    ):
        nuts_target(nt.temper(marked, ALPHA), GIVEN, x)


def mean_of_s(log_lik):
    """E[s] of the density prior times exp(log_lik), by quadrature."""
    log_joint = np.vectorize(lambda s: prior_of_s(s) + log_lik(s))
    top = log_joint(np.linspace(0.01, 8.0, 400)).max()
    mass, first = (
        integrate.quad(
            lambda s, k=k: s**k * np.exp(log_joint(s) - top), 0.0, 12.0, epsabs=1e-12
        )[0]
        for k in range(2)
    )
    return first / mass


# Well-separated states, so that a power inside of the sum is far off.
LONG = np.array([0.2, 3.1, 2.8, 3.4, 0.1, -0.5, 0.3, 2.9, 3.3, -0.2, 0.4, 2.7])


@pytest.mark.slow
def test_nuts_finds_the_tempered_hmm():
    exact = mean_of_s(lambda s: 0.1 * forward(LONG, states(s)))

    def naive(s):
        weights = np.exp(0.1 * normal(LONG[:, None], states(s)))
        message = PROBS * weights[0]
        for w in weights[1:]:
            message = (message @ CHAIN) * w
        return np.log(message.sum())

    mcmc = MCMC(
        NUTS(tempered(hmm, 0.1)),
        num_warmup=500,
        num_samples=2000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(KEY, jnp.asarray(LONG))
    s = np.asarray(mcmc.get_samples(group_by_chain=True)["s"], float)
    se = s.std() / np.sqrt(effective_sample_size(s))
    assert abs(s.mean() - exact) < 5 * se
    assert abs(s.mean() - mean_of_s(naive)) > 5 * se


# SVI: every loss is at the same target.


def guide_of(row):
    def guide(*args, **kwargs):
        for name, value in row.params.items():
            shape = np.shape(value)
            numpyro.sample(
                name, dist.Normal(jnp.asarray(value), 0.1).to_event(len(shape))
            )

    return guide


# Instances would keep the nesting of plates of the first model.
LOSSES = [Trace_ELBO, TraceEnum_ELBO, TraceGraph_ELBO]


OF_LOSSES = ["mixture", "several_sites", "latent_in_the_outer_plate"]


@pytest.mark.parametrize(
    ("loss", "name"),
    tiered(itertools.product(LOSSES, OF_LOSSES), unit=[(Trace_ELBO, "mixture")]),
)
def test_losses_of_svi(loss, name, x64):
    row = ROWS[name]
    guide, args = guide_of(row), row.args
    _, guide_key = jax.random.split(KEY)
    loc = np.asarray(
        handlers.trace(handlers.seed(guide, guide_key)).get_trace()["loc"]["value"]
    )
    want = normal(loc, LOC, 0.1).sum() - prior_of_loc(loc) - ALPHA * row.log_lik(loc)
    got = jax.jit(lambda key: loss().loss(key, {}, tempered(row.model), guide, *args))(
        KEY
    )
    assert float(got) == pytest.approx(want, rel=1e-9)


def test_mean_field_loss(x64):
    guide = guide_of(ROWS["mixture"])
    _, guide_key = jax.random.split(KEY)
    loc = np.asarray(
        handlers.trace(handlers.seed(guide, guide_key)).get_trace()["loc"]["value"]
    )
    want = gaussian_kl(LOC, 0.1, 0.0, 3.0).sum() - ALPHA * mixture_of(X, loc).sum()
    got = jax.jit(
        lambda: TraceMeanField_ELBO().loss(
            KEY, {}, tempered(mixture), guide, jnp.asarray(X)
        )
    )()
    assert float(got) == pytest.approx(want, rel=1e-10)


# Subsampling: the scale multiplies the logarithm of the sum.


def same_by_numpyro(x, size):
    loc = sample_loc()
    with numpyro.plate("n", len(x), subsample_size=size) as i:
        parts = dist.Normal(loc, 1.0)
        numpyro.sample(
            "x",
            dist.MixtureSameFamily(dist.Categorical(probs=own(PROBS)), parts),
            obs=x[i],
        )


def subsampled(x, size):
    loc = sample_loc()
    with numpyro.plate("n", len(x), subsample_size=size) as i:
        z = sample_z()
        numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x[i])
        numpyro.sample("y", dist.Normal(loc[0], 1.0), obs=x[i])


@pytest.mark.parametrize("size", tiered([2, 1], unit=[2]))
def test_a_subsample_scales_the_log_of_the_sum(size, x64):
    x = jnp.asarray(X)

    @jax.jit
    def run():
        trace = trace_of(tempered(subsampled), x, size)
        fixed = {"n": trace["n"]["value"]}
        ours, theirs = (
            log_density(
                handlers.substitute(model, data=fixed), (x, size), {}, {"loc": own(LOC)}
            )[0]
            for model in (tempered(subsampled), nt.temper(same_by_numpyro, ALPHA))
        )
        each = trace["x"]["fn"].log_prob(trace["x"]["value"])
        return fixed["n"], trace["x"]["scale"], each, ours, theirs

    chosen, scale, each, got, theirs = map(np.asarray, run())
    assert scale == pytest.approx(ALPHA * 4 / size, rel=1e-14)
    lik = mixture_of(X[chosen], LOC) + normal(X[chosen], LOC[0])
    assert each.shape == (size,)
    assert got == pytest.approx(
        prior_of_loc(LOC) + ALPHA * 4 / size * lik.sum(), rel=1e-12
    )
    beside = ALPHA * 4 / size * normal(X[chosen], LOC[0]).sum()
    assert got == pytest.approx(theirs + beside, rel=1e-12)


@pytest.mark.parametrize(
    ("outer", "inner"), tiered([(2, 2), (None, 1), (1, 2)], unit=[(1, 2)])
)
def test_subsamples_of_nested_plates(outer, inner, x64):
    """The outer scale is around the sum, the inner one around each factor in it."""
    model, table = tempered(latent_in_the_outer_plate), jnp.asarray(TABLE)

    @jax.jit
    def run():
        trace = trace_of(model, table, outer, inner)
        chosen = {plate: trace[plate]["value"] for plate in ("outer", "inner")}
        fixed = handlers.substitute(model, data=chosen)
        return *chosen.values(), log_density(
            fixed, (table, outer, inner), {}, {"loc": own(LOC)}
        )[0]

    i, j, got = map(np.asarray, run())
    sums = groups_of(TABLE[i][:, j], LOC, inner=3 / len(j))
    assert got == pytest.approx(
        prior_of_loc(LOC) + ALPHA * 4 / len(i) * sums.sum(), rel=1e-12
    )


def test_plates_of_one_keep_their_indices(x64):
    table = jnp.asarray(TABLE[:, :1])

    def model(x):
        loc = sample_loc()
        with numpyro.plate("outer", 4, dim=-2) as i:
            z = sample_z()
            with numpyro.plate("inner", 1, dim=-1) as j:
                numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x[i][:, j])

    try:
        got = density(tempered(model), GIVEN, table)
    except ValueError:
        return  # refused: as good
    want = prior_of_loc(LOC) + ALPHA * groups_of(TABLE[:, :1], LOC).sum()
    assert got == pytest.approx(want, rel=1e-12)


# At alpha = 1 the sums are those of NumPyro.


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["two_dependent_latents", "several_sites", "hmm_of_second_order"]
)
def test_agrees_with_numpyro_at_one(name, x64):
    from numpyro.contrib.funsor import enum
    from numpyro.contrib.funsor.infer_util import log_density as enumerated

    row = ROWS[name]
    args = jax.tree.map(jnp.asarray, row.args)
    theirs = enumerated(enum(config_enumerate(row.model), -2), args, {}, row.params)[0]
    assert density(nt.marginalize(row.model), row.params, *args) == pytest.approx(
        float(theirs), rel=1e-12
    )


# What a marginalised model observes.


def test_the_observed_site_is_pointwise(x64):
    @jax.jit
    def value():
        site = trace_of(tempered(mixture), jnp.asarray(X))["x"]
        assert site["fn"].batch_shape == (4,)
        assert [frame.name for frame in site["cond_indep_stack"]] == ["n"]
        return site["value"]

    np.testing.assert_array_equal(value(), X)
    draws = {"loc": np.random.default_rng(0).normal(size=(6, 2))}
    got = log_likelihood(tempered(mixture), draws, jnp.asarray(X))["x"]
    want = [mixture_of(X, loc) for loc in draws["loc"]]
    np.testing.assert_allclose(got, want, rtol=1e-12)
    theirs = log_likelihood(same_by_numpyro, draws, jnp.asarray(X), None)["x"]
    np.testing.assert_allclose(got, theirs, rtol=1e-12)


def test_values_of_several_sites_are_side_by_side(x64):
    @jax.jit
    def run():
        trace = trace_of(tempered(several_sites), jnp.asarray(X), jnp.asarray(B))
        assert isinstance(trace["c"]["fn"], dist.Normal | dist.ExpandedDistribution)
        return trace["a+b"]["value"], trace["a+b"]["fn"].log_prob(trace["a+b"]["value"])

    value, log_prob = run()
    np.testing.assert_array_equal(value, np.column_stack([X, B]))
    assert log_prob.shape == (4,)


@pytest.mark.parametrize(
    "lengths",
    [LENGTHS, pytest.param(None, marks=pytest.mark.full)],
    ids=["padded", "equal"],
)
def test_a_sequence_is_one_datum(x64, lengths):
    @jax.jit
    def run():
        trace = trace_of(tempered(sequences), jnp.asarray(SEQUENCES), lengths)
        return trace["y"]["value"], trace["s"]["value"], trace["y"]["fn"].log_prob(None)

    value, s, log_prob = run()
    np.testing.assert_array_equal(value, SEQUENCES.T)
    want = of_each_sequence(float(s), (5, 5, 5) if lengths is None else lengths)
    np.testing.assert_allclose(log_prob, want, rtol=1e-10)


def test_powers_by_site(x64):
    args = jnp.asarray(X), jnp.asarray(B)
    model = tempered(several_sites, {"a+b": 0.2, "c": 0.7})
    want = (
        prior_of_loc(LOC)
        + 0.2 * both_sites(X, B, LOC).sum()
        + 0.7 * normal(X, LOC[0]).sum()
    )
    assert density(model, GIVEN, *args) == pytest.approx(want, rel=1e-12)
    with pytest.raises(
        ValueError, match=r"^observed site.*'a\+b'.*that are not tempered"
    ):
        density(tempered(several_sites, {"a": 0.2, "b": 0.2, "c": 0.7}), GIVEN, *args)


def test_factors_follow_the_policy(x64):
    x = jnp.asarray(X)
    inside = logsumexp(
        np.log(PROBS) - 0.5 * np.arange(2) + normal(X[:, None], LOC), axis=1
    ).sum()
    outside_is_prior = prior_of_loc(LOC) + ALPHA * inside - 2 * LOC[0] - LOC[1]
    assert density(tempered(factors, factors=["inside"]), GIVEN, x) == pytest.approx(
        outside_is_prior, rel=1e-12
    )
    both = prior_of_loc(LOC) + ALPHA * (inside - LOC[1] - 2 * LOC[0])
    assert density(tempered(factors), GIVEN, x) == pytest.approx(both, rel=1e-12)
    for policy in (False, ["outside"]):
        with pytest.raises(
            ValueError,
            match=r"'x\+inside' is a sum over local discrete latents.*'inside'",
        ):
            density(tempered(factors, factors=policy), GIVEN, x)


def test_a_sum_of_factors_alone_may_be_prior(x64):
    def alone(x):
        loc = sample_loc()
        with numpyro.plate("n", len(x)):
            numpyro.factor("f", dist.Normal(loc[sample_z()], 1.0).log_prob(x))

    x = jnp.asarray(X)
    for policy, power in ((True, ALPHA), (["f"], ALPHA), (False, 1.0)):
        want = prior_of_loc(LOC) + power * mixture_of(X, LOC).sum()
        assert density(tempered(alone, factors=policy), GIVEN, x) == pytest.approx(
            want, rel=1e-12
        )


def test_two_data_of_one_latent_that_disagree_do_not_underflow():
    def model(x, y):
        loc = sample_loc()
        with numpyro.plate("n", len(x)):
            z = sample_z()
            numpyro.sample("x", dist.Normal(loc[z], 0.01), obs=x)
            numpyro.sample("y", dist.Normal(-loc[z], 0.01), obs=y)

    loc = np.array([-1.0, 1.0])
    x = np.ones(3)
    parts = (
        np.log(PROBS) + normal(x[:, None], loc, 0.01) + normal(x[:, None], -loc, 0.01)
    )
    want = prior_of_loc(loc) + ALPHA * logsumexp(parts, axis=1).sum()
    value, gradient = jax.jit(
        jax.value_and_grad(
            lambda loc: log_density(
                tempered(model), (jnp.ones(3), jnp.ones(3)), {}, {"loc": loc}
            )[0]
        )
    )(loc)
    assert float(value) == pytest.approx(want, rel=1e-5)
    assert np.all(np.isfinite(gradient))


def test_data_outside_of_the_plate_of_their_latents_are_refused():
    group = jnp.array([0, 0, 1, 1, 2])

    def long_format(x):
        loc = sample_loc()
        with numpyro.plate("groups", 3):
            z = sample_z()
        with numpyro.plate("n", len(x)):
            numpyro.sample("x", dist.Normal(loc[z[..., group]], 1.0), obs=x)

    refused(
        tempered(long_format),
        np.ones(5),
        match=r"'x' depends on the local discrete 'z' and is outside of its plates.*own by an index",
    )


def test_inside_of_a_plate_is_refused():
    def outer(x):
        with numpyro.plate("outer", 3, dim=-2):
            nt.marginalize(mixture)(x)

    refused(
        outer,
        X,
        match=r"^marginalize stands.*inside of the plates \['outer'\].*around the whole model",
    )


def test_deterministic_sites_that_depend_on_the_latents_are_left_out():
    def model(x):
        loc = sample_loc()
        numpyro.deterministic("gap", loc[1] - loc[0])
        with numpyro.plate("n", len(x)):
            z = sample_z()
            numpyro.deterministic("mean", loc[z])
            numpyro.deterministic("first", loc[0] * jnp.ones(len(x)))
            numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x)
        numpyro.deterministic("share", jnp.mean(z))
        return loc

    trace = {}
    # The names are those of a trace without values.
    jax.eval_shape(lambda: trace.update(trace_of(tempered(model), jnp.asarray(X))))
    kept = {name for name, site in trace.items() if site["type"] == "deterministic"}
    assert kept >= {"gap", "first"}
    assert "mean" not in kept
    # A function of all the latents at once has no value either.
    assert "share" not in kept


def test_deterministic_sites_of_a_scan():
    def model(y):
        s = numpyro.sample("s", dist.HalfNormal(1.0))

        def body(z, y):
            z = sample_z(probs=own(CHAIN)[z])
            numpyro.deterministic("mean", s * z)
            numpyro.deterministic("twice", 2.0 * s)
            numpyro.sample("y", dist.Normal(s * z, 1.0), obs=y)
            return z, None

        scan(body, 0, y)

    @jax.jit
    def run():
        trace = trace_of(tempered(model), jnp.asarray(Y))
        assert "mean" not in trace
        return trace["twice"]["value"], trace["s"]["value"]

    twice, s = map(np.asarray, run())
    np.testing.assert_allclose(twice, np.full(5, 2.0 * s), rtol=1e-6)


def test_returns_what_the_model_returns_and_keeps_its_name():
    def model(x):
        """Doc."""
        mixture(x)
        return "what it returns"

    marginal = nt.marginalize(model)
    returned = []
    jax.eval_shape(lambda: returned.append(handlers.seed(marginal, 0)(own(X))))
    assert returned == ["what it returns"]
    assert (marginal.__name__, marginal.__doc__) == ("model", "Doc.")


# Refusals.


def test_the_power_belongs_outside(x64):
    inside_out = r"write temper\(marginalize\(model\), alpha\)"
    with pytest.raises(ValueError, match=inside_out):
        nt.marginalize(nt.temper(mixture, 0.5))
    with pytest.raises(ValueError, match=inside_out):
        nt.marginalize(handlers.reparam(nt.temper(mixture, 0.5), config={}))

    @nt.marginalize
    def around(x):
        with nt.temper(alpha=0.5):
            mixture(x)

    @nt.marginalize
    def decorated(x):
        nt.temper(alpha=0.5)(mixture)(x)

    for model in (around, decorated):
        refused(model, X, match=inside_out)


def test_marginalize_takes_a_model():
    with pytest.raises(TypeError, match="takes a model"):
        nt.marginalize(None)


def continuous_between(x=None):
    with numpyro.plate("n", 4):
        z = sample_z()
        u = numpyro.sample("u", dist.Normal(z, 1.0))
        numpyro.sample("x", dist.Normal(u, 1.0), obs=x)


def infinite(x=None):
    with numpyro.plate("n", 4):
        z = numpyro.sample("z", dist.Poisson(1.0))
        numpyro.sample("x", dist.Normal(z, 1.0), obs=x)


def scaled_inside(x):
    with handlers.scale(scale=2.0):
        mixture(x)


def partly_observed(x):
    loc = sample_loc()
    with numpyro.plate("n", len(x)):
        z = sample_z()
        numpyro.sample("x", dist.Normal(loc[z], 1.0), obs=x, obs_mask=jnp.asarray(HALF))


def total_of_the_latents(x):
    with numpyro.plate("n", len(x)):
        z = sample_z()
        numpyro.sample("x", dist.Normal(z, 1.0), obs=x)
    numpyro.sample("total", dist.Normal(z.sum(), 1.0), obs=2.0)


def chained_scans(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    last = 0
    for i, data in enumerate((y[:3], y[3:])):

        def body(z, y, i=i):
            z = sample_z(f"z{i}", own(CHAIN)[z])
            numpyro.sample(f"y{i}", dist.Normal(s * z, 1.0), obs=y)
            return z, None

        last, _ = scan(body, last, data)


def values_that_do_not_start_at_zero(x):
    with numpyro.plate("n", len(x)):
        z = numpyro.sample("z", dist.DiscreteUniform(2, 4))
        numpyro.sample("x", dist.Normal(z, 1.0), obs=x)


def reversed_hmm(y):
    """NumPyro multiplies the transitions in the order of the data, not of the chain."""
    hmm(y, reverse=True)


def without_history(y):
    def body(carry, y):
        z = sample_z()
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)
        return carry, None

    scan(body, 0, y, history=0)


def two_scans_of_one_state(y):
    def body(z, y):
        z = sample_z(probs=own(CHAIN)[z])
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)
        return z, None

    def after(z, y):
        z = sample_z("w", probs=own(CHAIN)[z])
        numpyro.sample("v", dist.Normal(z, 1.0), obs=y)
        return z, None

    z, _ = scan(body, 0, y)
    scan(after, z, y)


def state_after_the_scan(y):
    def body(z, y):
        z = sample_z(probs=own(CHAIN)[z])
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)
        return z, None

    z, _ = scan(body, 0, y)
    numpyro.sample("end", dist.Normal(z, 1.0), obs=2.0)


REFUSED = pytest.mark.parametrize(
    ("model", "match"),
    [
        (
            continuous_between,
            r"latent 'u' depends on the local discrete.*no data at all",
        ),
        (
            infinite,
            r"^the local.*'z' is a Poisson, whose values cannot be enumerated.*can be summed out",
        ),
        (scaled_inside, r"handlers\.scale.*around marginalize"),
        (partly_observed, r"^the latent.*'x_unobserved' depends on.*no data at all"),
        (total_of_the_latents, "total"),
        (
            values_that_do_not_start_at_zero,
            "'z' is a DiscreteUniform: only latents with values 0, 1",
        ),
        (reversed_hmm, "reverse"),
        (without_history, "history"),
        (
            two_scans_of_one_state,
            r"^site 'w' depends on several values of the local discrete \['z'\] together",
        ),
        (
            state_after_the_scan,
            r"^site 'end' depends on several values of the local discrete \['z'\] together",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)


@REFUSED
def test_models_that_are_refused(model, match):
    refused(nt.marginalize(model), X, match=match)


@pytest.mark.full
@REFUSED
def test_models_are_refused_with_values(model, match):
    with pytest.raises(ValueError, match=match):
        trace_of(nt.marginalize(model), jnp.asarray(X))


def test_crossed_plates_are_refused():
    def crossed(x):
        rows, columns = (
            numpyro.plate("rows", 4, dim=-2),
            numpyro.plate("columns", 3, dim=-1),
        )
        with rows:
            z = sample_z()
        with columns:
            w = sample_z("w")
        with rows, columns:
            numpyro.sample("x", dist.Normal(z + w, 1.0), obs=x)

    refused(nt.marginalize(crossed), TABLE, match="intractable")


def test_scans_in_a_row_are_right_or_refused(x64):
    """The state that leaves a scan is not linked to its chain."""
    try:
        got = density(tempered(chained_scans), S, jnp.asarray(Y))
    except ValueError:
        return
    assert got == pytest.approx(
        prior_of_s(0.7) + ALPHA * forward(Y, states(0.7), CHAIN[0]), rel=1e-10
    )


@pytest.mark.parametrize("beside", [False, True])
def test_factors_of_a_scan_are_right_or_refused(beside, x64):
    def model(y):
        s = numpyro.sample("s", dist.HalfNormal(1.0))

        def body(z, y):
            z = sample_z(probs=own(CHAIN)[z])
            numpyro.factor("y", dist.Normal(s * z, 1.0).log_prob(y))
            if beside:
                numpyro.factor("beside", -s)
            return z, None

        scan(body, 0, y)

    try:
        got = density(tempered(model), S, jnp.asarray(Y))
    except ValueError:
        return
    want = prior_of_s(0.7) + ALPHA * (
        forward(Y, states(0.7), CHAIN[0]) - beside * 5 * 0.7
    )
    assert got == pytest.approx(want, rel=1e-10)


# Global discrete latents.


def with_a_global_one(x, local=True):
    k = numpyro.sample("k", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
    loc = sample_loc()
    with numpyro.plate("n", len(x)):
        z = sample_z() if local else 0
        numpyro.sample("x", dist.Normal(loc[z] + 2.0 * k, 1.0), obs=x)


@pytest.mark.parametrize("k", tiered([0, 1], unit=[1]))
def test_a_global_discrete_latent_stays(k, x64):
    want = (
        stats.bernoulli.logpmf(k, 0.3)
        + prior_of_loc(LOC)
        + ALPHA * mixture_of(X - 2 * k, LOC).sum()
    )
    assert density(
        tempered(with_a_global_one), {"loc": LOC, "k": k}, jnp.asarray(X)
    ) == pytest.approx(want)


def test_nuts_would_enumerate_the_global_one():
    kernel = NUTS(tempered(with_a_global_one))
    with pytest.raises(
        ValueError,
        match=r"'k' is outside of the plates.*DiscreteHMCGibbs.*body of the scan",
    ):
        jax.eval_shape(lambda: kernel.init(KEY, 1, None, (own(X),), {}) and None)


@pytest.mark.full
def test_a_run_of_nuts_would_enumerate_the_global_one():
    with pytest.raises(
        ValueError,
        match=r"'k' is outside of the plates.*DiscreteHMCGibbs.*body of the scan",
    ):
        MCMC(
            NUTS(tempered(with_a_global_one)),
            num_warmup=1,
            num_samples=1,
            progress_bar=False,
        ).run(KEY, jnp.asarray(X))


@pytest.mark.parametrize(
    "wrap",
    [pytest.param(lambda model: model, marks=pytest.mark.full), nt.marginalize],
    ids=["temper alone", "marginalize"],
)
def test_a_global_one_alone_is_summed_by_nuts(wrap, x64):
    model = nt.temper(wrap(lambda x: with_a_global_one(x, local=False)), ALPHA)
    want = prior_of_loc(LOC) + logsumexp(
        [
            stats.bernoulli.logpmf(k, 0.3) + ALPHA * normal(X, LOC[0] + 2 * k).sum()
            for k in (0, 1)
        ]
    )
    assert nuts_target(model, GIVEN, jnp.asarray(X)) == pytest.approx(want, rel=1e-12)


@pytest.mark.slow
def test_gibbs_samples_the_global_one():
    def fixed(x):
        k = numpyro.sample("k", dist.Bernoulli(0.3))
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", len(x)):
            z = sample_z()
            numpyro.sample(
                "x", dist.Normal(a + jnp.asarray(LOC)[z] + 2.0 * k, 1.0), obs=x
            )

    mcmc = MCMC(
        DiscreteHMCGibbs(NUTS(tempered(fixed))),
        num_warmup=500,
        num_samples=8000,
        progress_bar=False,
    )
    mcmc.run(KEY, jnp.asarray(X))

    def mass(k):
        return integrate.quad(
            lambda a: (
                stats.norm.pdf(a) * np.exp(ALPHA * mixture_of(X - a - 2 * k, LOC).sum())
            ),
            -8.0,
            8.0,
        )[0]

    want = 0.3 * mass(1) / (0.3 * mass(1) + 0.7 * mass(0))
    k = np.asarray(mcmc.get_samples()["k"], float)
    se = k.std() / np.sqrt(effective_sample_size(k[None]))
    assert abs(k.mean() - want) < 5 * se


# Handlers around and inside.


def small(x):
    loc = numpyro.sample("loc", dist.Normal(0.0, 3.0))
    with numpyro.plate("n", len(x)):
        z = sample_z()
        numpyro.sample("x", dist.Normal(loc * z, 1.0), obs=x)


def test_reparameterisations_inside_and_outside(x64):
    config = {"loc": LocScaleReparam(0.0)}
    want = stats.norm.logpdf(0.5) + ALPHA * mixture_of(X, [0.0, 1.5]).sum()
    for model in (
        nt.temper(nt.marginalize(handlers.reparam(small, config)), ALPHA),
        nt.temper(handlers.reparam(nt.marginalize(small), config), ALPHA),
        handlers.reparam(tempered(small), config),
    ):
        assert density(model, {"loc_decentered": 0.5}, jnp.asarray(X)) == pytest.approx(
            want, rel=1e-12
        )


def test_scales_and_masks_around_it(x64):
    x = jnp.asarray(X)
    lik = ALPHA * mixture_of(X, LOC).sum()
    scaled = nt.temper(handlers.scale(nt.marginalize(mixture), scale=2.0), ALPHA)
    assert density(scaled, GIVEN, x) == pytest.approx(
        2.0 * (prior_of_loc(LOC) + lik), rel=1e-12
    )
    blocked = nt.temper(handlers.block(nt.marginalize(mixture), hide=["x"]), ALPHA)
    assert density(blocked, GIVEN, x) == pytest.approx(prior_of_loc(LOC), rel=1e-12)


def test_data_conditioned_inside(x64):
    inside = tempered(handlers.condition(mixture, data={"x": jnp.asarray(X)}))
    want = prior_of_loc(LOC) + ALPHA * mixture_of(X, LOC).sum()
    assert density(inside, GIVEN) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("alpha", [ALPHA, 1.0])
def test_data_conditioned_outside_are_refused(alpha):
    """The latents are out of reach by then: the data would be observed at a draw of them."""
    outside = handlers.condition(tempered(mixture, alpha), data={"x": jnp.asarray(X)})
    with pytest.raises(ValueError, match=r"condition.*data to the model"):
        density(outside, GIVEN)


def test_parameters_may_be_fixed_outside(x64):
    outside = handlers.condition(
        nt.temper(nt.marginalize(mixture), ALPHA, strict=False),
        data={"loc": jnp.asarray(LOC)},
    )
    want = prior_of_loc(LOC) + ALPHA * mixture_of(X, LOC).sum()
    assert density(outside, {}, jnp.asarray(X)) == pytest.approx(want, rel=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("computed", [False, True])
def test_params_and_modules(x64, computed):
    pytest.importorskip("flax")
    import flax.linen
    from numpyro.contrib.module import flax_module

    def model(x):
        net = flax_module("net", flax.linen.Dense(1), input_shape=(1,))
        loc = sample_loc()
        with numpyro.plate("n", len(x)):
            shift = numpyro.param("shift", jnp.arange(4.0), event_dim=0)
            z = sample_z()
            numpyro.sample(
                "x", dist.Normal(loc[z] + shift + net(x[:, None])[:, 0], 1.0), obs=x
            )

    params = {
        "net$params": {"bias": jnp.array([0.2]), "kernel": jnp.array([[0.5]])},
        "shift": jnp.ones(4),
    }
    got = density(tempered(model), {**params, **GIVEN}, jnp.asarray(X))
    want = prior_of_loc(LOC) + ALPHA * mixture_of(X - 1.0 - 0.2 - 0.5 * X, LOC).sum()
    assert got == pytest.approx(want, rel=1e-9)
    svi = SVI(
        tempered(model),
        AutoNormal(tempered(model)),
        numpyro.optim.Adam(0.01),
        Trace_ELBO(),
    )

    def run():
        state = svi.init(KEY, jnp.asarray(X))
        for _ in range(2):
            state, _ = svi.update(state, jnp.asarray(X))
        return svi.get_params(state)

    found = (
        svi.run(KEY, 2, jnp.asarray(X), progress_bar=False).params
        if computed
        else jax.eval_shape(run)
    )
    assert {"net$params", "shift"} <= set(found)


# JAX.


def test_traced_powers_compile_once(x64):
    powers, traces = jnp.array([0.0, 0.1, 0.5, 1.0]), []

    @jax.jit
    @jax.vmap
    def run(alpha):
        traces.append(None)
        return jax.value_and_grad(
            lambda loc: log_density(
                tempered(mixture, alpha), (jnp.asarray(X),), {}, {"loc": loc}
            )[0]
        )(jnp.asarray(LOC))

    got, slopes = run(powers)
    np.testing.assert_allclose(
        got, prior_of_loc(LOC) + powers * mixture_of(X, LOC).sum(), rtol=1e-12
    )
    assert len(traces) == 1
    step = 1e-6
    for k in range(2):
        up, down = (
            mixture_of(X, LOC + sign * step * np.eye(2)[k]).sum() for sign in (1, -1)
        )
        want = -LOC[k] / 9.0 + np.array(powers) * (up - down) / (2 * step)
        np.testing.assert_allclose(slopes[:, k], want, rtol=1e-6, atol=1e-8)


def test_single_precision():
    x = jnp.asarray(X, jnp.float32)
    got = jax.jit(
        lambda loc: log_density(tempered(mixture), (x,), {}, {"loc": loc})[0]
    )(LOC.astype(np.float32))
    assert got.dtype == jnp.float32
    assert float(got) == pytest.approx(
        prior_of_loc(LOC) + ALPHA * mixture_of(X, LOC).sum(), rel=1e-5
    )


def test_far_data_do_not_overflow(x64):
    x = np.array([-300.0, 400.0])
    got, slope = jax.jit(
        jax.value_and_grad(
            lambda loc: log_density(
                tempered(mixture), (jnp.asarray(x),), {}, {"loc": loc}
            )[0]
        )
    )(LOC)
    assert float(got) == pytest.approx(
        prior_of_loc(LOC) + ALPHA * mixture_of(x, LOC).sum(), rel=1e-12
    )
    assert np.all(np.isfinite(slope))


@nt.temper(alpha=0.5)
@nt.marginalize
def decorated_at_module_level(x):
    mixture(x)


def test_pickles():
    for model in (
        nt.temper(nt.marginalize(mixture), alpha=0.5),
        decorated_at_module_level,
    ):
        again = pickle.loads(pickle.dumps(model))
        assert again.alpha == 0.5
        names = []
        jax.eval_shape(
            lambda again=again, names=names: names.extend(sites_of(again, own(X)))
        )
        assert names == ["loc", "x"]


# Draws.


@pytest.mark.parametrize(
    "wrap",
    [pytest.param(nt.marginalize, marks=pytest.mark.full), tempered],
    ids=["marginalize", "temper"],
)
def test_without_data_the_model_runs_as_it_is(wrap, x64):
    prior = jax.eval_shape(Predictive(wrap(mixture), num_samples=3), KEY)
    assert {k: v.shape for k, v in prior.items()} == {
        "loc": (3, 2),
        "z": (3, 4),
        "x": (3, 4),
    }
    # The states are told apart by the data that they draw.
    apart = {"loc": jnp.tile(jnp.array([0.0, 1000.0]), (200, 1))}
    drawn = Predictive(wrap(mixture), apart)(KEY)
    np.testing.assert_array_equal(drawn["x"] > 500.0, drawn["z"] == 1)
    assert abs(float(drawn["z"].mean()) - PROBS[1]) < 5 * np.sqrt(PROBS.prod() / 800)


def test_latents_that_are_given_draw_their_data():
    z = jnp.array([[0, 1, 0, 1]] * 5)
    given = {"loc": jnp.tile(jnp.array([0.0, 1000.0]), (5, 1)), "z": z}
    drawn = Predictive(tempered(mixture), given)(KEY)
    np.testing.assert_array_equal(drawn["x"] > 500.0, z == 1)


@pytest.mark.full
def test_counts_are_drawn_without_data():
    drawn = jax.eval_shape(lambda: Predictive(tempered(counts), num_samples=3)(KEY, 4))
    assert drawn["x"].shape == (3, 4)
    assert jax.eval_shape(Predictive(tempered(hmm_of), num_samples=3), KEY)[
        "y"
    ].shape == (3, 5)


@pytest.mark.full
def test_draws_without_data(x64):
    for wrap in (nt.marginalize, tempered):
        prior = Predictive(wrap(mixture), num_samples=3)(KEY)
        assert {k: v.shape for k, v in prior.items()} == {
            "loc": (3, 2),
            "z": (3, 4),
            "x": (3, 4),
        }
    assert Predictive(tempered(counts), num_samples=3)(KEY, 4)["x"].shape == (3, 4)
    assert Predictive(tempered(hmm_of), num_samples=3)(KEY)["y"].shape == (3, 5)


def hmm_of(y=None):
    def body(z, y):
        z = sample_z(probs=own(CHAIN)[z])
        numpyro.sample("y", dist.Poisson(1.0 + z), obs=y)
        return z, None

    scan(body, 0, y, length=5)


@pytest.fixture(scope="module")
def fit():
    return nt.fit_svi(
        KEY,
        nt.marginalize(mixture),
        AutoNormal,
        jnp.asarray(X),
        alpha=ALPHA,
        num_steps=50,
        num_particles=50,
        optim=numpyro.optim.Adam(0.05),
    )


@pytest.mark.full
def test_latents_given_the_parameters_are_not_tempered():
    loc = jnp.tile(jnp.asarray(LOC), (4000, 1))
    z = Predictive(mixture, {"loc": loc}, infer_discrete=True)(KEY, jnp.asarray(X))["z"]
    want = np.exp(
        np.log(PROBS) + normal(X[:, None], LOC) - mixture_of(X, LOC)[:, None]
    )[:, 1]
    powered = 1.0 / (1.0 + ((1 - want) / want) ** ALPHA)
    se = np.sqrt(want * (1 - want) / 4000)
    assert np.all(np.abs(z.mean(0) - want) < 5 * se)
    assert np.all(np.abs(z.mean(0) - powered) > 5 * se)


def test_drawing_the_latents_takes_the_undecorated_model():
    draw = Predictive(
        tempered(mixture), {"loc": jnp.asarray(LOC)[None]}, infer_discrete=True
    )
    with pytest.raises(ValueError, match=r"^the local discrete latents.*marginalize"):
        draw(KEY, jnp.asarray(X))


@pytest.mark.full
def test_results_of_a_fit(fit):
    data = nt.to_inference_data(fit, num_samples=8)
    loc = np.asarray(group(data, "posterior")["loc"])[0]
    np.testing.assert_allclose(
        np.asarray(group(data, "untempered_log_likelihood")["x"])[0],
        [mixture_of(X, m) for m in loc],
        rtol=1e-4,
    )
    np.testing.assert_allclose(group(data, "observed_data")["x"], X, rtol=1e-6)
    assert data.attrs["alpha"] == ALPHA
    assert set(fit.sample_posterior(KEY, (3,))) == {"loc"}
    with pytest.raises(ValueError, match="without its data"):
        nt.to_inference_data(fit, posterior_predictive=True)


def test_replicates_need_the_latents():
    draws = {"loc": np.zeros((3, 2), np.float32)}
    with pytest.raises(ValueError, match="without its data"):
        jax.eval_shape(lambda: replicate(KEY, tempered(mixture), draws, (own(X),), {}))


@pytest.mark.full
def test_the_elbo_of_a_fit(fit):
    mean, scale = (
        np.asarray(fit.params[f"loc_auto_{k}"], float) for k in ("loc", "scale")
    )
    kl = gaussian_kl(mean, scale, 0.0, 3.0).sum()
    assert fit.elbo.kl == pytest.approx(kl, rel=1e-4)
    draws = mean + scale * np.random.default_rng(0).normal(size=(20000, 2))
    parts = np.log(PROBS) + normal(X[:, None], draws[:, None])
    values = ALPHA * logsumexp(parts, axis=2).sum(1) - kl
    se = np.hypot(fit.elbo.se, values.std() / np.sqrt(len(values)))
    assert abs(fit.elbo.value - values.mean()) < 5 * se


@pytest.mark.full
def test_marginalised_fits_are_compared(fit):
    same = nt.fit_svi(
        KEY,
        lambda x: same_by_numpyro(x, None),
        AutoNormal,
        jnp.asarray(X),
        alpha=ALPHA,
        num_steps=50,
        optim=numpyro.optim.Adam(0.05),
        num_particles=50,
    )
    table = group(nt.compare({"ours": fit, "theirs": same}), "model_comparison")
    elbos = np.asarray(table["elbo"])
    # One target, one key: the same draws.
    assert elbos[0] == pytest.approx(elbos[1], rel=1e-3)


# funsor is loaded where it is needed.


def test_the_package_holds_nothing_of_funsor():
    held = [
        f"{name}.{key}"
        for name, module in sys.modules.items()
        if name.partition(".")[0] == "numpyro_tempered"
        for key, value in vars(module).items()
        for home in (
            getattr(value, "__module__", None),
            getattr(value, "__name__", None),
        )
        if isinstance(home, str)
        and home.startswith(("funsor", "numpyro.contrib.funsor"))
    ]
    assert not held


@pytest.mark.full
def test_the_package_does_not_load_funsor():
    code = "import sys, numpyro_tempered; assert 'funsor' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_funsor_is_asked_for_by_name(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "funsor"]:
        monkeypatch.delitem(sys.modules, name)
    for name in [
        name for name in sys.modules if name.startswith("numpyro.contrib.funsor")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "funsor", None)
    names = []
    with pytest.raises(
        ImportError,
        match=r"^marginalize sums by.*pip install funsor.*with its extra enum",
    ):
        jax.eval_shape(lambda: trace_of(nt.marginalize(mixture), own(X)) and None)
    # Models without local discrete latents need none.
    without = nt.marginalize(lambda x: same_by_numpyro(x, None))
    jax.eval_shape(lambda: names.extend(sites_of(without, own(X))))
    assert names == ["loc", "x"]
