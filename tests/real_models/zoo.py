"""Models that NumPyro's examples and Stan's case studies made familiar, with their data.

The models are re-expressed from NumPyro's examples (eight schools, baseball, horseshoe regression, Gaussian
process, hidden Markov model, stochastic volatility) and from Gelman et al., *Bayesian Data Analysis*, and
Gelman and Hill, *Data Analysis Using Regression and Multilevel/Hierarchical Models* (radon, item response).
Larger public files are read from a folder ``shared/data`` beside the checkout, where there is one.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import logsumexp
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer.reparam import TransformReparam

import numpyro_tempered as nt

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


class Example(NamedTuple):
    """A model with its data.

    Attributes:
        model: Untempered.
        data: Loader of its arguments, to be called without arguments.
        source: What the data are.
        num_data: Number of observations.
        headline: Name of the quantity to report, as text.
        summary: Posterior draws by site to draws of the headline, ``(num_samples,)``.
        file: File of ``SHARED`` that the data are read from, None for none.
        by_hand: The same joint density of parameters and data without ``marginalize``; None for ``model``.
    """

    model: Callable
    data: Callable[[], tuple]
    source: str
    num_data: int
    headline: str
    summary: Callable[[dict], jax.Array]
    file: str | None = None
    by_hand: Callable | None = None

    @property
    def is_available(self):
        return self.file is None or (SHARED / self.file).exists()


def standardise(x):
    return (x - x.mean(0)) / x.std(0)


# Eight schools. Rubin 1981, Journal of Educational Statistics 6, 377-401.


def eight_schools_data():
    effects = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    errors = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    return errors, effects


def eight_schools_centred(errors, effects):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(errors)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("effect", dist.Normal(theta, errors), obs=effects)


@handlers.reparam(config={"theta": TransformReparam()})
def eight_schools_non_centred(errors, effects):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", len(errors)):
        base = dist.Normal(0.0, 1.0)
        theta = numpyro.sample(
            "theta",
            dist.TransformedDistribution(
                base, dist.transforms.AffineTransform(mu, tau)
            ),
        )
        numpyro.sample("effect", dist.Normal(theta, errors), obs=effects)


# Radon in the houses of Minnesota: intercepts vary by county.


def radon_data():
    table = np.genfromtxt(
        SHARED / "radon_mn_arm.csv",
        delimiter=",",
        names=True,
        dtype=None,
        encoding="utf-8",
    )
    return table["county"] - 1, table["floor"].astype(float), table["log_radon"]


def radon(county, floor, log_radon):
    mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
    between = numpyro.sample("between", dist.HalfNormal(1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
    within = numpyro.sample("within", dist.HalfNormal(2.0))
    with numpyro.plate("counties", 85):
        intercept = numpyro.sample("intercept", dist.Normal(mean, between))
    with numpyro.plate("houses", len(floor)):
        numpyro.sample(
            "log_radon",
            dist.Normal(intercept[county] + slope * floor, within),
            obs=log_radon,
        )


# Baseball: 45 times at bat in 1970. Efron and Morris 1975, JASA 70, 311-319.


def baseball_data():
    hits = np.array(
        [18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7]
    )
    return np.full(18, 45), hits


def baseball(at_bats, hits):
    chance = numpyro.sample("chance", dist.Uniform(0.0, 1.0))
    kappa = numpyro.sample("kappa", dist.Pareto(1.0, 1.5))
    with numpyro.plate("players", len(hits)):
        phi = numpyro.sample("phi", dist.Beta(chance * kappa, (1.0 - chance) * kappa))
        numpyro.sample("hits", dist.Binomial(at_bats, probs=phi), obs=hits)


# Logistic regression: benign tumours by the ten mean features.


def breast_cancer_data():
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    return standardise(x[:, :10]), y


def logistic(x, y):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.5))
    slopes = numpyro.sample(
        "slopes", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1)
    )
    with numpyro.plate("patients", len(y)):
        numpyro.sample("benign", dist.Bernoulli(logits=intercept + x @ slopes), obs=y)


# A mixture of two Gaussians with ordered means.


def petal_data():
    from sklearn.datasets import load_iris

    return (load_iris(return_X_y=True)[0][:, 2],)


def components():
    weight = numpyro.sample("weight", dist.Beta(2.0, 2.0))
    # The lower mean, and the logarithm of the step to the upper one.
    base = dist.Normal(jnp.array([2.0, 1.0]), 1.0).to_event(1)
    locs = numpyro.sample(
        "locs", dist.TransformedDistribution(base, dist.transforms.OrderedTransform())
    )
    # One scale for both: with two, a wide component over all flowers is a mode of its own.
    scale = numpyro.sample("scale", dist.LogNormal(-1.0, 1.0))
    return jnp.stack([1.0 - weight, weight]), locs, scale


def mixture(y):
    probs, locs, scale = components()
    with numpyro.plate("flowers", len(y)):
        numpyro.sample(
            "petal",
            dist.MixtureSameFamily(dist.Categorical(probs), dist.Normal(locs, scale)),
            obs=y,
        )


def mixture_of_labels(y):
    probs, locs, scale = components()
    with numpyro.plate("flowers", len(y)):
        label = numpyro.sample("label", dist.Categorical(probs))
        numpyro.sample("petal", dist.Normal(locs[label], scale), obs=y)


# A hidden Markov model with two states and Gaussian emissions; simulated.


@cache
def hmm_data(length=80):
    rng = np.random.default_rng(1)
    transition, locs = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([-1.0, 1.5])
    state, y = 0, np.empty(length)
    for t in range(length):
        state = rng.choice(2, p=transition[state])
        y[t] = rng.normal(locs[state], 0.7)
    return (y,)


def chain():
    stay = numpyro.sample("stay", dist.Beta(4.0, 1.0).expand([2]).to_event(1))
    low = numpyro.sample("low", dist.Normal(-1.0, 1.0))
    gap = numpyro.sample("gap", dist.LogNormal(0.5, 0.5))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    transition = jnp.stack(
        [jnp.stack([stay[0], 1.0 - stay[0]]), jnp.stack([1.0 - stay[1], stay[1]])]
    )
    return transition, jnp.stack([low, low + gap]), scale


def hmm_forward(y):
    """The forward algorithm as a factor."""
    transition, locs, scale = chain()
    log_transition = jnp.log(transition)

    def step(log_alpha, datum):
        ahead = logsumexp(log_alpha[:, None] + log_transition, axis=0)
        return ahead + dist.Normal(locs, scale).log_prob(datum), None

    # The state before the first datum is 0.
    log_alpha, _ = jax.lax.scan(step, jnp.array([0.0, -jnp.inf]), jnp.asarray(y))
    numpyro.factor("forward", logsumexp(log_alpha))


def hmm_of_states(y):
    """The states as latents of a scan."""
    transition, locs, scale = chain()

    def step(state, datum):
        state = numpyro.sample("state", dist.Categorical(transition[state]))
        numpyro.sample("y", dist.Normal(locs[state], scale), obs=datum)
        return state, None

    scan(step, 0, jnp.asarray(y))


# Sparse regression: the progress of diabetes, with the horseshoe prior.


def diabetes_data():
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    return standardise(x), standardise(y)


def horseshoe(x, y):
    d = x.shape[1]
    tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
    lambdas = numpyro.sample("lambdas", dist.HalfCauchy(1.0).expand([d]).to_event(1))
    raw = numpyro.sample("raw", dist.Normal(0.0, 1.0).expand([d]).to_event(1))
    slopes = numpyro.deterministic("slopes", tau * lambdas * raw)
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    with numpyro.plate("patients", len(y)):
        numpyro.sample("progress", dist.Normal(x @ slopes, precision**-0.5), obs=y)


# Counts with overdispersion and an exposure; simulated.


def counts_data():
    rng = np.random.default_rng(2)
    x, exposure = rng.normal(size=(200, 2)), rng.uniform(0.5, 2.0, 200)
    mean = exposure * np.exp(0.8 + x @ np.array([0.5, -0.3]))
    return x, np.log(exposure), rng.poisson(rng.gamma(2.0, mean / 2.0))


def negative_binomial(x, log_exposure, counts):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    slopes = numpyro.sample(
        "slopes", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1)
    )
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 1.0))
    mean = jnp.exp(log_exposure + intercept + x @ slopes)
    with numpyro.plate("traps", len(counts)):
        numpyro.sample(
            "counts", dist.NegativeBinomial2(mean, concentration), obs=counts
        )


# A Gaussian process with the squared-exponential kernel; simulated.


def curve_data():
    rng = np.random.default_rng(3)
    x = np.sort(rng.uniform(-2.0, 2.0, 40))
    return x, np.sin(2.0 * x) + 0.2 * rng.normal(size=40)


def gaussian_process(x, y):
    amplitude = numpyro.sample("amplitude", dist.LogNormal(0.0, 1.0))
    length = numpyro.sample("length", dist.LogNormal(0.0, 1.0))
    noise = numpyro.sample("noise", dist.LogNormal(-1.0, 1.0))
    gap = (x[:, None] - x[None, :]) / length
    covariance = amplitude**2 * jnp.exp(-0.5 * gap**2) + (noise**2 + 1e-5) * jnp.eye(
        len(x)
    )
    numpyro.sample("y", dist.MultivariateNormal(0.0, covariance), obs=y)


# Stochastic volatility of returns; simulated.


def returns_data():
    rng = np.random.default_rng(4)
    log_volatility = np.cumsum(0.2 * rng.normal(size=100))
    return (np.exp(log_volatility) * rng.standard_t(10, size=100),)


def stochastic_volatility(returns):
    step = numpyro.sample("step", dist.Exponential(5.0))
    raw = numpyro.sample("raw", dist.GaussianRandomWalk(1.0, len(returns)))
    log_volatility = numpyro.deterministic("log_volatility", step * raw)
    freedom = numpyro.sample("freedom", dist.Gamma(2.0, 0.1))
    with numpyro.plate("days", len(returns)):
        numpyro.sample(
            "returns", dist.StudentT(freedom, 0.0, jnp.exp(log_volatility)), obs=returns
        )


# Item response with two parameters an item; simulated.


def answers_data():
    rng = np.random.default_rng(5)
    ability, difficulty, slope = (
        rng.normal(size=60),
        rng.normal(size=12),
        rng.lognormal(0.0, 0.3, 12),
    )
    chance = 1.0 / (1.0 + np.exp(-slope * (ability[:, None] - difficulty)))
    return (rng.binomial(1, chance),)


def item_response(answers):
    persons, items = answers.shape
    with numpyro.plate("items", items, dim=-1):
        difficulty = numpyro.sample("difficulty", dist.Normal(0.0, 2.0))
        slope = numpyro.sample("slope", dist.LogNormal(0.0, 0.5))
    with numpyro.plate("persons", persons, dim=-2):
        ability = numpyro.sample("ability", dist.Normal(0.0, 1.0))
        with numpyro.plate("items", items, dim=-1):
            numpyro.sample(
                "answers",
                dist.Bernoulli(logits=slope * (ability - difficulty)),
                obs=answers,
            )


EXAMPLES = {
    "eight schools, centred": Example(
        eight_schools_centred,
        eight_schools_data,
        "Rubin 1981",
        8,
        "mu",
        lambda p: p["mu"],
    ),
    "eight schools, non-centred": Example(
        eight_schools_non_centred,
        eight_schools_data,
        "Rubin 1981",
        8,
        "mu",
        lambda p: p["mu"],
    ),
    "radon, varying intercepts": Example(
        radon,
        radon_data,
        "Gelman and Hill 2007",
        919,
        "slope of floor",
        lambda p: p["slope"],
        "radon_mn_arm.csv",
    ),
    "baseball, partial pooling": Example(
        baseball,
        baseball_data,
        "Efron and Morris 1975",
        18,
        "chance",
        lambda p: p["chance"],
    ),
    "logistic regression": Example(
        logistic,
        breast_cancer_data,
        "breast cancer, Wisconsin",
        569,
        "intercept",
        lambda p: p["intercept"],
    ),
    "mixture, MixtureSameFamily": Example(
        mixture,
        petal_data,
        "iris, petal length",
        150,
        "larger mean",
        lambda p: p["locs"][:, 1],
    ),
    "mixture, marginalize": Example(
        nt.marginalize(mixture_of_labels),
        petal_data,
        "iris, petal length",
        150,
        "larger mean",
        lambda p: p["locs"][:, 1],
        by_hand=mixture,
    ),
    "HMM, forward algorithm": Example(
        hmm_forward, hmm_data, "simulated", 80, "lower mean", lambda p: p["low"]
    ),
    "HMM, marginalize": Example(
        nt.marginalize(hmm_of_states),
        hmm_data,
        "simulated",
        80,
        "lower mean",
        lambda p: p["low"],
        by_hand=hmm_forward,
    ),
    "horseshoe regression": Example(
        horseshoe,
        diabetes_data,
        "diabetes, Efron 2004",
        442,
        "slope of bmi",
        lambda p: p["slopes"][:, 2],
    ),
    "negative-binomial regression": Example(
        negative_binomial,
        counts_data,
        "simulated",
        200,
        "first slope",
        lambda p: p["slopes"][:, 0],
    ),
    "Gaussian process": Example(
        gaussian_process,
        curve_data,
        "simulated",
        40,
        "log noise",
        lambda p: jnp.log(p["noise"]),
    ),
    "stochastic volatility": Example(
        stochastic_volatility,
        returns_data,
        "simulated",
        100,
        "mean log-volatility",
        lambda p: p["log_volatility"].mean(1),
    ),
    "item response, 2PL": Example(
        item_response,
        answers_data,
        "simulated",
        60 * 12,
        "first difficulty",
        lambda p: p["difficulty"][:, 0],
    ),
}
