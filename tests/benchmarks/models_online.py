"""NumPyro models learned one datum at a time, against NUTS and batch variational inference on the same data.

Every model has latents whose priors are not Normal on the unconstrained scale: the common scale of the
coefficients, and where the likelihood has one a dispersion, a noise scale or degrees of freedom. They start at
a full-covariance fit to the first tenth of the rows (of the network three tenths), whose ELBO holds the model's
own prior; every other row is seen once. One recipe for all of them: ``rvga()`` and
``monte_carlo(num_particles=4)``.

- *gap*: predictive log score on held-out rows, nats per datum, of NUTS minus that of the streamed posterior;
  mean and largest over replications, whose parameters are drawn from the prior and whose data from the model;
- *coverage*: share of the data-generating parameters (of the network: values of the regression function) within
  central intervals;
- *mean field, batch*: the gap of ``nt.fit_svi`` with ``AutoDiagonalNormal``, for the first replication, beside
  that of the mean-field stream.

Writes ``models_online.csv`` and ``models_online.txt``.

    python tests/benchmarks/models_online.py
"""

import argparse
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from jax.scipy.special import log_ndtr
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, log_likelihood
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from provenance import describe

import numpyro_tempered as nt
from numpyro_tempered.infer.online_prior import as_prior

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
NUM_FEATURES = 4
NUM_CLASSES = 3
NUM_HIDDEN = 5
LEVELS = (0.5, 0.9)
NUM_PARTICLES = 4
MODELS = {}


def example(function):
    """Enter a model in the table."""
    MODELS[function.__name__.replace("_", " ")] = function
    return function


def linear_predictor(x, *, intercept=1.0, scale=1.0):
    """Coefficients with a common scale that is learned."""
    tau = numpyro.sample("tau", dist.HalfNormal(scale))
    constant = numpyro.sample("constant", dist.Normal(0.0, intercept))
    slopes = numpyro.sample(
        "slopes", dist.Normal(0.0, tau).expand([x.shape[-1]]).to_event(1)
    )
    return numpyro.deterministic("eta", constant + x @ slopes)


@example
def logistic(x, y=None):
    numpyro.sample("y", dist.Bernoulli(logits=linear_predictor(x)), obs=y)


@example
def probit(x, y=None):
    eta = linear_predictor(x)
    numpyro.sample("y", dist.Bernoulli(logits=log_ndtr(eta) - log_ndtr(-eta)), obs=y)


@example
def poisson(x, y=None):
    numpyro.sample("y", dist.Poisson(jnp.exp(linear_predictor(x, scale=0.5))), obs=y)


@example
def negative_binomial(x, y=None):
    eta = linear_predictor(x, scale=0.5)
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 1.0))
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(eta), concentration), obs=y)


@example
def student_t(x, y=None):
    eta = linear_predictor(x)
    df = numpyro.sample("df", dist.Gamma(2.0, 0.3))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.StudentT(df, eta, sigma), obs=y)


@example
def multinomial(x, y=None):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    constants = numpyro.sample(
        "constants", dist.Normal(0.0, 1.0).expand([NUM_CLASSES]).to_event(1)
    )
    slopes = numpyro.sample(
        "slopes", dist.Normal(0.0, tau).expand([x.shape[-1], NUM_CLASSES]).to_event(2)
    )
    eta = numpyro.deterministic("eta", constants + x @ slopes)
    numpyro.sample(
        "y",
        dist.Categorical(logits=eta),
        obs=None if y is None else y.astype(jnp.int32),
    )


@example
def network(x, y=None):
    def weights(name, *shape):
        return numpyro.sample(
            name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape))
        )

    hidden = jnp.tanh(
        x @ weights("inner", x.shape[-1], NUM_HIDDEN) + weights("shift", NUM_HIDDEN)
    )
    f = numpyro.deterministic("eta", hidden @ weights("outer", NUM_HIDDEN))
    sigma = numpyro.sample("sigma", dist.Gamma(4.0, 10.0))
    numpyro.sample("y", dist.Normal(f, sigma), obs=y)


class Posterior(NamedTuple):
    """Draws of the latents, held-out log score per datum, and which intervals hold the truth, by level."""

    draws: dict
    score: float
    held: dict


class Data(NamedTuple):
    """Rows to learn from and held-out rows; what generated them, where that is known."""

    x: Any
    y: Any
    x_test: Any
    y_test: Any
    truth: dict | None


def simulate(rng_key, model, num_rows, num_test):
    """Parameters from the prior, and data from the model."""
    x_key, model_key = jax.random.split(rng_key)
    x = jax.random.normal(x_key, (num_rows + num_test, NUM_FEATURES))
    trace = handlers.trace(handlers.seed(model, model_key)).get_trace(x)
    y = jnp.asarray(trace["y"]["value"], jnp.float32)
    truth = {
        name: site["value"]
        for name, site in trace.items()
        if site["type"] == "sample" and name != "y"
    }
    if model is network:
        # Its weights have symmetries; the function has none.
        truth = {"eta": trace["eta"]["value"][num_rows:][:50]}
    return Data(x[:num_rows], y[:num_rows], x[num_rows:], y[num_rows:], truth)


def real(name):
    """A data set of scikit-learn, in a fixed random order, standardised."""
    from sklearn.datasets import load_breast_cancer, load_diabetes

    loaded, columns = {
        "breast cancer": (
            load_breast_cancer,
            ["mean texture", "mean area", "mean smoothness", "mean symmetry"],
        ),
        "diabetes": (load_diabetes, ["sex", "bmi", "bp", "s5"]),
    }[name]
    table = loaded()
    x = table.data[:, [list(table.feature_names).index(c) for c in columns]]
    x, y = (x - x.mean(0)) / x.std(0), table.target.astype(float)
    y = (y - y.mean()) / y.std() if name == "diabetes" else y
    order = np.random.default_rng(0).permutation(len(y))
    x, y = jnp.asarray(x[order], jnp.float32), jnp.asarray(y[order], jnp.float32)
    num_rows = len(y) // 4 * 3 // 10 * 10
    return Data(x[:num_rows], y[:num_rows], x[num_rows:], y[num_rows:], None)


def judge(model, draws, data):
    """Log score and coverage of draws of the latents."""
    draws = {name: value for name, value in draws.items() if name != "eta"}
    values = log_likelihood(model, draws, data.x_test, data.y_test)["y"]
    score = jnp.mean(jax.nn.logsumexp(values, axis=0) - np.log(values.shape[0]))
    held = {level: [] for level in LEVELS}
    if data.truth is not None:
        of = draws
        if "eta" in data.truth:
            rows = data.x_test[: data.truth["eta"].shape[0]]
            trace = jax.vmap(
                lambda d: handlers.trace(
                    handlers.substitute(handlers.seed(model, 0), d)
                ).get_trace(rows)["eta"]["value"]
            )
            of = {"eta": trace(draws)}
        for level in LEVELS:
            for name, truth in data.truth.items():
                low, high = np.quantile(
                    np.asarray(of[name]), [(1 - level) / 2, (1 + level) / 2], axis=0
                )
                held[level].extend(np.ravel((low <= truth) & (truth <= high)))
    return Posterior(draws, float(score), held)


def by_nuts(model, replications, num_warmup, num_samples):
    """NUTS on each replication, side by side."""

    def one(key, x, y):
        mcmc = MCMC(
            NUTS(model),
            num_warmup=num_warmup,
            num_samples=num_samples,
            progress_bar=False,
        )
        mcmc.run(key, x, y)
        return mcmc.get_samples()

    x, y = (jnp.stack([getattr(d, field) for d in replications]) for field in "xy")
    draws = jax.jit(jax.vmap(one))(
        jax.random.split(jax.random.key(1), len(replications)), x, y
    )
    return [
        judge(model, jax.tree.map(lambda a, r=r: a[r], draws), d)
        for r, d in enumerate(replications)
    ]


def by_stream(model, guide, replications, fits, num_first, batch, num_samples):
    """The recipe on each replication, side by side: posteriors, and rejected rounds in all.

    The first rows are learned by ``fits``; each of the other rows is seen once.
    """
    rule = nt.online.rvga()
    online = nt.OnlineVI(
        model, guide, rule, nt.expectations.monte_carlo(num_particles=NUM_PARTICLES)
    )
    state = online.init(
        jax.random.key(2), replications[0].x[:batch], replications[0].y[:batch]
    )
    starts = [
        state._replace(rule_state=rule.init(as_prior(fit, online.guide)))
        for fit in fits
    ]
    starts = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    x, y = (
        jnp.stack([getattr(d, field)[num_first:] for d in replications])
        for field in "xy"
    )
    x, y = (a.reshape(a.shape[0], -1, batch, *a.shape[2:]) for a in (x, y))

    @jax.jit
    @jax.vmap
    def run(state, x, y):
        return jax.lax.scan(
            lambda state, data: online.update(state, *data), state, (x, y)
        )[0]

    states = run(starts, x, y)
    posteriors = []
    for r, data in enumerate(replications):
        params = online.get_params(jax.tree.map(lambda a, r=r: a[r], states))
        draws = online.guide.sample_posterior(
            jax.random.key(3), params, sample_shape=(num_samples,)
        )
        posteriors.append(judge(model, draws, data))
    return posteriors, int(jnp.sum(states.rejected))


def gaps(reference, posteriors):
    """Nats per datum by which the reference is better, one for each replication."""
    return np.array(
        [a.score - b.score for a, b in zip(reference, posteriors, strict=True)]
    )


def coverage(posteriors, level):
    """Share of true values that the central intervals hold, over all replications."""
    return np.mean(
        np.concatenate([np.asarray(p.held[level], float) for p in posteriors])
    )


def measure(name, source, model, replications, sizes):
    """The rows of one model: one for each posterior."""
    # The mode of a network is found by the first rows, or not at all.
    num_first = (
        int(len(replications[0].y) * (0.3 if model is network else 0.1)) // 10 * 10
    )
    exact = by_nuts(model, replications, sizes.num_warmup, sizes.num_samples)
    fits = [
        nt.fit_svi(
            jax.random.key(4),
            model,
            AutoMultivariateNormal,
            d.x[:num_first],
            d.y[:num_first],
            num_steps=sizes.num_steps,
            num_particles=2,
        )
        for d in replications
    ]
    first = replications[0]
    batch = nt.fit_svi(
        jax.random.key(5),
        model,
        AutoDiagonalNormal,
        first.x,
        first.y,
        num_steps=sizes.num_steps,
        num_particles=2,
    )
    draws = batch.guide.sample_posterior(
        jax.random.key(3), batch.params, sample_shape=(sizes.num_samples,)
    )
    full, diagonal = (
        nt.guides.AutoOnlineMultivariateNormal,
        nt.guides.AutoOnlineDiagonalNormal,
    )
    stream = partial(by_stream, num_first=num_first, num_samples=sizes.num_samples)
    start = [
        judge(
            model,
            fit.guide.sample_posterior(
                jax.random.key(3), fit.params, sample_shape=(500,)
            ),
            d,
        )
        for fit, d in zip(fits, replications, strict=True)
    ]
    found = {
        "NUTS": (exact, 0),
        "start: batch full covariance on the first rows": (start, 0),
        "full covariance, 1 row a round": stream(
            model, full, replications, fits, batch=1
        ),
        "full covariance, 10 rows a round": stream(
            model, full, replications, fits, batch=10
        ),
        "mean field, 1 row a round": stream(
            model, diagonal, replications, fits, batch=1
        ),
        "mean field, batch optimum (first replication)": (
            [judge(model, draws, first)],
            0,
        ),
    }
    for kind, (posteriors, rejected) in found.items():
        gap = gaps(exact[: len(posteriors)], posteriors)
        known = replications[0].truth is not None
        yield {
            "model": name,
            "data": source,
            "posterior": kind,
            "T": len(first.y),
            "replications": len(posteriors),
            "log score": np.mean([p.score for p in posteriors]),
            "gap to NUTS, mean": gap.mean(),
            "gap, largest": gap.max(),
            "gap, first replication": gap[0],
            "values": len(np.concatenate([p.held[LEVELS[0]] for p in posteriors]))
            if known
            else 0,
            **{
                f"coverage of {100 * level:.0f}%": coverage(posteriors, level)
                if known
                else np.nan
                for level in LEVELS
            },
            "rejected rounds": rejected,
        }


class Sizes(NamedTuple):
    """How much of everything."""

    num_rows: int = 1000
    num_test: int = 500
    num_replications: int = 4
    num_warmup: int = 250
    num_samples: int = 400
    num_steps: int = 1500


REAL = {"breast cancer": logistic, "diabetes": student_t}


def main():
    """Measure every model and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small",
        action="store_true",
        help="one model, short runs, nothing written by default",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        help="folder for the table; docs/results, or none if small",
    )
    parser.add_argument(
        "--models",
        nargs="*",
        default=None,
        help="some of the models, or of the real data sets",
    )
    options = parser.parse_args()
    # Fits of few steps say that they could go on, guides that they match moments.
    warnings.simplefilter("ignore", UserWarning)
    sizes = Sizes(100, 50, 2, 50, 50, 200) if options.small else Sizes()
    names = options.models or (["logistic"] if options.small else [*MODELS, *REAL])
    output = options.output or (None if options.small else DOCS)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names:
        if name in REAL:
            model, source, replications = REAL[name], name, [real(name)]
        else:
            model, source = MODELS[name], "simulated"
            keys = jax.random.split(jax.random.key(0), sizes.num_replications)
            replications = [
                simulate(key, model, sizes.num_rows, sizes.num_test) for key in keys
            ]
        title = model.__name__.replace("_", " ")
        rows.extend(measure(title, source, model, replications, sizes))
        table = pd.DataFrame(rows)
        for column in table.select_dtypes("float"):
            table[column] = table[column].map(lambda value: float(f"{value:.4f}"))
        print(table.tail(6).to_string(index=False), flush=True)
        if output is not None:
            table.to_csv(output / "models_online.csv", index=False)
            text = describe(f"{sizes}, {NUM_PARTICLES} particles, float32")
            (output / "models_online.txt").write_text(
                table.to_string(index=False, na_rep="") + "\n\n" + text
            )


if __name__ == "__main__":
    main()
