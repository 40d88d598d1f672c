"""A hierarchy whose group scale no datum depends on, learned one datum at a time, against NUTS.

Eight groups with means N(mu, tau), unit noise, 200 rows; N(0, 5) for mu, HalfNormal(5) for tau and sigma;
centred, and non-centred (theta = mu + tau z). The stream starts at the prior of the model, or at a Gaussian fit
to the first tenth of the rows.

- *gap*: held-out log score of NUTS minus that of the posterior, nats per datum, 4000 rows;
- *tau* and *sd*: mean and standard deviation of the group scale, and those of NUTS.

Writes ``hierarchy.csv`` and ``hierarchy.txt``.

    python tests/benchmarks/hierarchy.py
"""

import argparse
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC, NUTS, log_likelihood
from provenance import describe
from scipy.special import logsumexp

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
NUM_GROUPS = 8
RULES = {"ngvi()": nt.online.ngvi(), "rvga()": nt.online.rvga()}


def hyperparameters():
    """Centre, group scale and noise."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfNormal(5.0))
    return mu, tau, numpyro.sample("sigma", dist.HalfNormal(5.0))


def centred(group, y=None):
    """Group means as they are."""
    mu, tau, sigma = hyperparameters()
    with numpyro.plate("groups", NUM_GROUPS):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    with numpyro.plate("rows", group.shape[0]):
        numpyro.sample("y", dist.Normal(theta[group], sigma), obs=y)


def non_centred(group, y=None):
    """Group means by standard normals."""
    mu, tau, sigma = hyperparameters()
    with numpyro.plate("groups", NUM_GROUPS):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", group.shape[0]):
        numpyro.sample("y", dist.Normal((mu + tau * z)[group], sigma), obs=y)


def simulate(seed, num_rows, num_test):
    """Rows to learn from, and to predict."""
    rng = np.random.default_rng(seed)
    theta = 1.0 + 1.5 * rng.normal(size=NUM_GROUPS)
    group = rng.integers(0, NUM_GROUPS, num_rows + num_test)
    y = (theta[group] + rng.normal(size=group.size)).astype(np.float32)
    rows = jnp.asarray(group), jnp.asarray(y)
    return tuple(a[:num_rows] for a in rows), tuple(a[num_rows:] for a in rows)


def score(draws, model, data):
    """Mean log posterior predictive density of the rows."""
    values = np.asarray(log_likelihood(model, draws, *data)["y"], float)
    return float(np.mean(logsumexp(values, axis=0) - np.log(len(values))))


def by_stream(model, rule, start, train, num_first, num_samples):
    """Draws from the posterior of one pass, and its rejected rounds."""
    guide = nt.guides.AutoOnlineMultivariateNormal
    online = nt.OnlineVI(
        model, guide, rule, nt.expectations.monte_carlo(num_particles=4)
    )
    first, rest = (
        tuple(a[part] for a in train)
        for part in (slice(num_first), slice(num_first, None))
    )
    if start == "prior":
        state, _ = online.run(jax.random.key(2), *train)
    else:
        fit = nt.fit_gaussian(jax.random.key(3), model, guide(model), *first)
        state = online.init(jax.random.key(2), *(a[:1] for a in train), prior=fit)
        state, _ = online.run(state, *rest)
    params = online.get_params(state)
    draws = online.guide.sample_posterior(
        jax.random.key(4), params, sample_shape=(num_samples,)
    )
    return draws, int(state.rejected)


def measure(seed, num_rows, num_test, num_samples):
    """The rows of one data set."""
    train, test = simulate(seed, num_rows, num_test)
    mcmc = MCMC(
        NUTS(non_centred),
        num_warmup=num_samples // 2,
        num_samples=num_samples,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(1), *train)
    reference = mcmc.get_samples()
    best = score(reference, non_centred, test)
    rows = []
    for model in (centred, non_centred):
        for start in ("prior", "fit"):
            for name, rule in RULES.items():
                draws, rejected = by_stream(
                    model, rule, start, train, num_rows // 10, num_samples
                )
                row = {
                    "seed": seed,
                    "model": model.__name__,
                    "start": start,
                    "rule": name,
                }
                row |= {"gap": best - score(draws, model, test), "rejected": rejected}
                row |= {
                    "tau": float(np.mean(draws["tau"])),
                    "sd": float(np.std(draws["tau"])),
                }
                row |= {
                    "tau, NUTS": float(np.mean(reference["tau"])),
                    "sd, NUTS": float(np.std(reference["tau"])),
                }
                rows.append(row)
    return rows


def main():
    """Run the streams and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="one seed, few rows and draws"
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the table"
    )
    options = parser.parse_args()
    if options.small and options.output.resolve() == DOCS:
        parser.error("--small needs an --output other than the committed results")
    # Guides say that they match moments, and runs what became of their rows: the table has both.
    warnings.simplefilter("ignore", UserWarning)
    seeds, sizes = (
        ([0], (60, 200, 100)) if options.small else ([0, 1, 2], (200, 4000, 1000))
    )
    table = pd.DataFrame([row for seed in seeds for row in measure(seed, *sizes)])
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "hierarchy.csv", index=False, float_format="%.3g")
    text = describe(
        f"{sizes[0]} rows, {sizes[1]} held out, {sizes[2]} draws, seeds {seeds}, float32"
    )
    shown = table.to_string(index=False, float_format=lambda v: f"{v:.3g}")
    (options.output / "hierarchy.txt").write_text(f"{text}{shown}\n")
    print(shown)


if __name__ == "__main__":
    main()
