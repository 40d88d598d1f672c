"""Seven ways to temper a NumPyro model that run without complaint and sample something else.

Each trap has what a user would write with ``numpyro.handlers``, the same by ``nt.temper``, and the exact
answer: a closed form, a quadrature in one dimension or the forward algorithm, in numpy and scipy, of this
file. Standard errors are Monte Carlo: over independent chains or keys.
Writes ``traps.csv`` and ``traps.txt``.

    python tests/benchmarks/traps.py
"""

import argparse
import contextlib
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.contrib.control_flow import scan
from numpyro.handlers import scale
from numpyro.infer import HMCECS, MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation, AutoNormal
from numpyro.primitives import Messenger
from provenance import describe
from scipy.special import logsumexp

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
RAISES = "raises"


def log_normal(x, loc, scale):
    return -0.5 * ((x - loc) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)


def moments_on_grid(log_density, grid):
    """Mean and standard deviation of a density on an even grid that holds all of its mass."""
    weights = np.exp(log_density - logsumexp(log_density))
    mean = weights @ grid
    return mean, np.sqrt(weights @ (grid - mean) ** 2)


def summary(values):
    """Mean of the values by chain or key, and its standard error."""
    values = np.asarray(values, float)
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values))


def fit(model, guide, sizes, *args):
    """Parameters of a guide by SVI, for all keys at once."""

    def step_size(step):
        return 0.05 * 0.01 ** (step / sizes["steps"])

    svi = SVI(model, guide, numpyro.optim.Adam(step_size), Trace_ELBO(num_particles=10))
    keys = jnp.stack([jax.random.key(seed) for seed in range(sizes["chains"])])
    svi.init(keys[0], *args)
    return jax.vmap(
        lambda key: svi.run(key, sizes["steps"], *args, progress_bar=False).params
    )(keys)


def by_chain(model, sizes, statistic, *args, kernel=NUTS, chain_method="vectorized"):
    """A statistic of each chain of an MCMC; its mean and standard error."""
    mcmc = MCMC(
        kernel(model),
        num_warmup=sizes["warmup"],
        num_samples=sizes["draws"],
        num_chains=sizes["chains"],
        chain_method=chain_method,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), *args)
    chains = {
        name: np.asarray(v, float)
        for name, v in mcmc.get_samples(group_by_chain=True).items()
    }
    return summary(
        [
            statistic({name: v[c] for name, v in chains.items()})
            for c in range(sizes["chains"])
        ]
    )


def powered(power):
    """The site as it is, or scaled as a user would."""
    return contextlib.nullcontext() if power is None else scale(scale=power)


def row(trap, quantity, alpha, exact, naive, tempered):
    """A row of the table; an answer is a pair of value and standard error, or ``RAISES``."""
    columns = {}
    for name, answer in (("naive", naive), ("nt.temper", tempered)):
        columns |= (
            {name: RAISES, f"{name} s.e.": ""}
            if answer == RAISES
            else {name: f"{answer[0]:.3f}", f"{name} s.e.": f"{answer[1]:.3f}"}
        )
    return {
        "trap": trap,
        "quantity": quantity,
        "alpha": alpha,
        "exact": f"{exact:.3f}",
        **columns,
    }


def raised(compute, message):
    """``RAISES`` if it does, with this in its message."""
    try:
        compute()
    except ValueError as error:
        if message in str(error):
            return RAISES
        raise
    raise AssertionError("this was expected to be refused")


# 1. The Jacobian of a positive parameter, and its prior.


class scale_observed(Messenger):
    """What one writes first: multiply the log-probability of whatever is observed."""

    def __init__(self, fn, alpha):
        self.alpha = alpha
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["scale"] = (
                self.alpha if msg["scale"] is None else self.alpha * msg["scale"]
            )


def positive_scale(sizes):
    alpha, y = 0.1, np.array([1.3, -0.4, 0.9, -2.1, 0.6])

    def model(y):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(0.0, s), obs=y)

    s = np.linspace(0.0, 12.0, 200_001)[1:]
    exact, _ = moments_on_grid(
        -0.5 * s**2 + alpha * log_normal(y[:, None], 0.0, s).sum(0), s
    )

    def mean(draws):
        return draws["s"].mean()

    tempered = by_chain(nt.temper(model, alpha), sizes, mean, y)
    whole = by_chain(scale(model, scale=alpha), sizes, mean, y)
    observed = by_chain(scale_observed(model, alpha), sizes, mean, y)
    return [
        row("1a scale around the model, NUTS", "E[s]", alpha, exact, whole, tempered),
        row(
            "1b handler on observed sites, NUTS",
            "E[s]",
            alpha,
            exact,
            observed,
            tempered,
        ),
    ]


# 2. A mixture with enumerated assignments.


def mixture(sizes):
    alpha, probs = 0.3, np.array([0.4, 0.6])
    rng = np.random.default_rng(0)
    x = np.where(rng.random(40) < probs[0], 0.0, 2.0) + rng.normal(size=40)

    def model(x, power=None):
        loc = numpyro.sample("loc", dist.Normal(0.0, 3.0))
        with numpyro.plate("n", len(x)):
            z = numpyro.sample(
                "z", dist.Categorical(probs=probs), infer={"enumerate": "parallel"}
            )
            with powered(power):
                numpyro.sample(
                    "x", dist.Normal(jnp.where(z == 1, loc, 0.0), 1.0), obs=x
                )

    grid = np.linspace(-15.0, 15.0, 20_001)
    inside = np.stack(
        [
            np.broadcast_to(log_normal(x[:, None], 0.0, 1.0), (40, grid.size)),
            log_normal(x[:, None], grid, 1.0),
        ]
    )
    likelihood = logsumexp(inside + np.log(probs)[:, None, None], axis=0).sum(0)
    exact, _ = moments_on_grid(log_normal(grid, 0.0, 3.0) + alpha * likelihood, grid)

    def mean(draws):
        return draws["loc"].mean()

    naive = by_chain(model, sizes, mean, x, alpha)
    tempered = by_chain(nt.temper(nt.marginalize(model), alpha), sizes, mean, x)
    return [row("2 enumerated mixture, NUTS", "E[loc]", alpha, exact, naive, tempered)]


# 3. A hidden Markov model.


def hidden_markov(sizes):
    alpha, loc = 0.2, np.array([0.0, 2.0])
    stay = np.array([[0.9, 0.1], [0.1, 0.9]])
    rng = np.random.default_rng(1)
    z, y = 0, []
    for _ in range(60):
        z = rng.choice(2, p=stay[z])
        y.append(loc[z] + 0.5 * rng.normal())
    y = np.array(y)

    def model(y, power=None):
        s = numpyro.sample("s", dist.HalfNormal(1.0))

        def step(z, y_t):
            z = numpyro.sample(
                "z",
                dist.Categorical(probs=jnp.asarray(stay)[z]),
                infer={"enumerate": "parallel"},
            )
            with powered(power):
                numpyro.sample("y", dist.Normal(jnp.asarray(loc)[z], s), obs=y_t)
            return z, None

        scan(step, 0, y)

    s = np.linspace(0.0, 6.0, 20_001)[1:]
    forward = np.log(np.array([1.0, 1e-300]))[:, None] + np.zeros_like(s)
    for y_t in y:
        moved = logsumexp(forward[:, None] + np.log(stay)[:, :, None], axis=0)
        forward = moved + log_normal(y_t, loc[:, None], s)
    exact, _ = moments_on_grid(-0.5 * s**2 + alpha * logsumexp(forward, axis=0), s)

    def mean(draws):
        return draws["s"].mean()

    naive = by_chain(model, sizes, mean, y, alpha)
    tempered = by_chain(nt.temper(nt.marginalize(model), alpha), sizes, mean, y)
    return [row("3 hidden Markov model, NUTS", "E[s]", alpha, exact, naive, tempered)]


# 4. Continuous latents, one for each datum.


def local_latents(sizes):
    alpha, n, prior, spread, noise = 0.25, 20, 2.0, 1.0, 0.5
    x = np.random.default_rng(2).normal(1.0, np.hypot(spread, noise), n)

    def model(x, power=None):
        theta = numpyro.sample("theta", dist.Normal(0.0, prior))
        with numpyro.plate("n", len(x)):
            z = numpyro.sample("z", dist.Normal(theta, spread))
            with powered(power):
                numpyro.sample("x", dist.Normal(z, noise), obs=x)

    # Mean-field optimum of the alpha-VB bound: its precision is the diagonal of the joint one, in which
    # each z_i enters with power alpha.
    exact = (prior**-2 + alpha * n * spread**-2) ** -0.5

    def optimum(tempered, *args):
        guide = AutoNormal(tempered)
        params = fit(tempered, tempered.guide(guide), sizes, x, *args)
        return summary(params["theta_auto_scale"])

    naive = optimum(nt.temper(model), alpha)
    tempered = optimum(nt.temper(model, alpha, local_plates=["n"]))
    return [
        row("4 local latents, AutoNormal", "sd of theta", alpha, exact, naive, tempered)
    ]


# 5. Energy-conserving subsampling.


def subsampled(sizes):
    alpha, n = 0.1, 200
    y = np.random.default_rng(3).normal(0.5, 1.0, n)

    def model(y, power=None):
        theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        with numpyro.plate("n", len(y), subsample_size=50):
            batch = numpyro.subsample(y, 0)
            with powered(power):
                numpyro.sample("y", dist.Normal(theta, 1.0), obs=batch)

    exact = (0.01 + alpha * n) ** -0.5

    def kernel(model):
        proxy = HMCECS.taylor_proxy({"theta": jnp.asarray(y.mean())})
        return HMCECS(NUTS(model), num_blocks=10, proxy=proxy)

    def sd(draws):
        return draws["theta"].std()

    def sample(model, *args):
        # Its init takes one key.
        return by_chain(
            model, sizes, sd, y, *args, kernel=kernel, chain_method="sequential"
        )

    naive = sample(model, alpha)
    refused = raised(lambda: sample(nt.temper(model, alpha)), "HMCECS ignores")
    return [row("5 subsampling by HMCECS", "sd of theta", alpha, exact, naive, refused)]


# 6. A guide that keeps its model.


def kept_guide(sizes):
    alpha, n = 0.1, 50
    y = np.random.default_rng(4).normal(0.5, 1.0, n)

    def model(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    exact = (0.01 + alpha * n) ** -0.5

    def sd(target, guide):
        params = fit(target, guide, sizes, y)
        return summary(
            jax.vmap(lambda p: jnp.sqrt(guide.get_posterior(p).variance[0]))(params)
        )

    class likelihood_scaled(Messenger):
        """Scales the site y alone, which is right here: the prior is on the real line."""

        def process_message(self, msg):
            if msg["name"] == "y":
                msg["scale"] = alpha

    tempered = nt.temper(model, alpha)
    raised(lambda: sd(tempered, AutoLaplaceApproximation(model)), "keeps a model")
    naive = sd(likelihood_scaled(model), AutoLaplaceApproximation(model))
    right = sd(tempered, AutoLaplaceApproximation(tempered))
    return [
        row(
            "6 guide on the untempered model", "sd of theta", alpha, exact, naive, right
        )
    ]


# 7. Leave-one-out on tempered draws.


def leave_one_out(sizes):
    import arviz as az

    alpha, n = 0.3, 20
    y = np.random.default_rng(5).normal(0.5, 2.0, n)

    @nt.temper(alpha=alpha)
    def model(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 3.0))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    exact = 0.0
    for i in range(n):
        others = np.delete(y, i)
        precision = 3.0**-2 + alpha * others.size
        exact += log_normal(
            y[i], alpha * others.sum() / precision, np.sqrt(1.0 + 1.0 / precision)
        )

    mcmc = MCMC(
        NUTS(model),
        num_warmup=sizes["warmup"],
        num_samples=sizes["draws"],
        progress_bar=False,
    )

    def elpd(loo, data):
        found = loo(data)
        return float(found.elpd_loo if hasattr(found, "elpd_loo") else found.elpd)

    pairs = []
    for seed in range(sizes["chains"]):
        mcmc.run(jax.random.key(seed), y)
        data = nt.to_inference_data(mcmc, log_lik="log_likelihood")
        pairs.append([elpd(az.loo, data), elpd(nt.loo, data)])
    naive, tempered = (summary(values) for values in np.transpose(pairs))
    return [row("7 az.loo on tempered draws", "elpd", alpha, exact, naive, tempered)]


def main():
    """Run every trap, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="few draws, nothing written"
    )
    parser.add_argument(
        "--output", type=Path, default=None, help="folder for the table"
    )
    options = parser.parse_args()
    sizes = (
        {"chains": 2, "warmup": 100, "draws": 200, "steps": 500}
        if options.small
        else {"chains": 10, "warmup": 500, "draws": 4000, "steps": 5000}
    )
    rows = []
    for trap in (
        positive_scale,
        mixture,
        hidden_markov,
        local_latents,
        subsampled,
        kept_guide,
        leave_one_out,
    ):
        rows += trap(sizes)
    table = pd.DataFrame(rows)
    print(table.to_string(index=False))
    output = options.output or (None if options.small else DOCS)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        table.to_csv(output / "traps.csv", index=False)
        text = ", ".join(f"{value} {name}" for name, value in sizes.items())
        (output / "traps.txt").write_text(
            describe(
                f"{text}; chains by key 0, repeats by keys 0 to {sizes['chains'] - 1}, float32"
            )
        )


if __name__ == "__main__":
    warnings.filterwarnings(
        "ignore", message=r"\s*ArviZ is undergoing", category=FutureWarning
    )
    main()
