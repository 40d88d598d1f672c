"""MCMC on a tempered posterior with two modes, by samplers of NumPyro and blackjax.

Thirty data of a mixture .4 N(mu_1, 1) + .6 N(mu_2, 1) with known weights and both locations unknown: the
posterior has a mode for each order of the locations, of unequal mass. Random-walk Metropolis, Metropolis
with proposals from the prior, MALA and NUTS sample it at three powers of the likelihood, with the steps that
suit alpha = 1 and with those that suit each alpha. Chains start uniformly in (-2, 2)², as NumPyro's do. The
truth is a sum over a fine grid of the two locations.

Writes ``tempered_mcmc.csv``, ``tempered_mcmc_reweighted.csv``, ``tempered_mcmc.txt`` and ``tempered_mcmc.png``.

    python tests/benchmarks/tempered_mcmc.py
"""

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import potential_energy
from provenance import describe
from scipy.special import logsumexp
from scipy.stats import norm

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
PRIOR_SD = 5.0
WEIGHTS = np.array([0.4, 0.6])
# Drawn from the model at mu = (-1.5, 1.5), rounded and sorted.
Y = np.fromstring(
    "-2.7 -1.8 -1.7 -1.7 -1.1 -1.1 -1 -0.7 0 0.2 0.2 0.3 0.3 0.5 0.8 "
    "0.8 1.4 1.5 1.7 1.8 1.9 1.9 2.2 2.2 2.3 2.8 2.8 3 3 3.5",
    sep=" ",
)


def model(y):
    """A mixture of two unit normals with known weights."""
    mu = numpyro.sample("mu", dist.Normal(0.0, PRIOR_SD).expand([2]).to_event(1))
    components = dist.MixtureSameFamily(
        dist.Categorical(probs=jnp.asarray(WEIGHTS)), dist.Normal(mu, 1.0)
    )
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", components, obs=y)


def tempered(y, alpha):
    """The tempered model with the power as an argument, so that all powers share what is compiled."""
    nt.temper(model, alpha)(y)


def log_density(alpha):
    """Log-density of the tempered posterior up to a constant, over unconstrained parameters."""
    return lambda position: (
        -potential_energy(tempered, (jnp.asarray(Y), alpha), {}, position)
    )


# The truth, in numpy.


class Grid(NamedTuple):
    """Tempered posterior on a grid of the half sum and the difference of the two locations."""

    difference: np.ndarray
    density: np.ndarray
    probability: float
    barrier: float


def exact(alpha, points, width=15.0):
    """The tempered posterior, the probability of mu_2 > mu_1, and the height of the lower mode (nats)."""
    # An even number of points, so that none lies on the border of the two modes.
    half, difference = (
        np.linspace(-width, width, points),
        np.linspace(-2 * width, 2 * width, 4 * points),
    )
    low, high = half[:, None] - difference / 2, half[:, None] + difference / 2
    joint = norm.logpdf(low, 0, PRIOR_SD) + norm.logpdf(high, 0, PRIOR_SD)
    for y in Y:
        first, second = (
            np.log(w) + norm.logpdf(y, mu)
            for w, mu in zip(WEIGHTS, (low, high), strict=True)
        )
        joint += alpha * np.logaddexp(first, second)
    positive = difference > 0
    # Every path from one mode to the other crosses the line of equal locations.
    border = joint[:, np.abs(difference).argmin()].max()
    barrier = min(joint[:, positive].max(), joint[:, ~positive].max()) - border
    joint = np.exp(joint - logsumexp(joint))
    marginal = joint.sum(0)
    return Grid(
        difference,
        marginal / (difference[1] - difference[0]),
        marginal[positive].sum(),
        barrier,
    )


# The samplers, of blackjax and NumPyro. Steps are standard deviations of the noise of a proposal.


def random_walk(alpha, step):
    """Random-walk Metropolis with normal steps."""
    return blackjax.additive_step_random_walk.normal_random_walk(
        log_density(alpha), step * jnp.ones(2)
    )


def metropolis(alpha, step):
    """Metropolis with proposals from the prior: accepted by the ratio of the likelihoods to the power alpha."""
    prior = dist.Normal(0.0, PRIOR_SD).expand([2]).to_event(1)
    return blackjax.irmh(
        log_density(alpha),
        lambda key: {"mu": prior.sample(key)},
        lambda _, proposed: prior.log_prob(proposed.position["mu"]),
    )


def mala(alpha, step):
    """Metropolis-adjusted Langevin; blackjax's step size is half the variance of the noise."""
    return blackjax.mala(log_density(alpha), step**2 / 2)


def run_blackjax(algorithm, start, sizes, key):
    """Chains of a blackjax algorithm side by side, each from its own start.

    Returns:
        Positions (iteration, chain, 2), acceptance and evaluations per iteration.
    """

    def chain(key, position):
        def step(state, key):
            state, info = algorithm.step(key, state)
            return state, (state.position["mu"], info.acceptance_rate)

        keys = jax.random.split(key, sizes["warmup"] + sizes["iterations"])
        return jax.lax.scan(step, algorithm.init({"mu": position}), keys)[1]

    mu, acceptance = jax.vmap(chain, out_axes=1)(
        jax.random.split(key, len(start)), start
    )
    return mu[sizes["warmup"] :], acceptance[sizes["warmup"] :].mean(), 1.0


BLACKJAX = {
    "random walk": random_walk,
    "Metropolis from the prior": metropolis,
    "MALA": mala,
}
# Usual targets for the acceptance; the random walk's is that for two dimensions.
TARGETS = {"random walk": 0.35, "MALA": 0.57}


def step_tuner(name, start, sizes):
    """From alpha to the step of a geometric grid whose acceptance is nearest the target, in short runs."""
    steps = 0.1 * 1.25 ** jnp.arange(18)
    short = sizes | {"iterations": max(sizes["iterations"] // 10, 100)}

    def acceptance(alpha, step):
        return run_blackjax(
            BLACKJAX[name](alpha, step), start[:16], short, jax.random.key(1)
        )[1]

    program = jax.jit(jax.vmap(acceptance, (None, 0)))
    return lambda alpha: float(
        steps[jnp.argmin(jnp.abs(program(alpha, steps) - TARGETS[name]))]
    )


def runs_of_blackjax(name, alphas, start, sizes):
    """All runs of a sampler: from alpha and label of the step to the step and the result."""
    program = jax.jit(
        lambda alpha, step: run_blackjax(
            BLACKJAX[name](alpha, step), start, sizes, jax.random.key(2)
        )
    )
    if name not in TARGETS:
        return {
            (alpha, "none"): (PRIOR_SD, program(alpha, PRIOR_SD)) for alpha in alphas
        }
    tune = step_tuner(name, start, sizes)
    steps = {alpha: tune(alpha) for alpha in alphas}
    own = {
        (alpha, "tuned"): (steps[alpha], program(alpha, steps[alpha]))
        for alpha in alphas
    }
    return own | {
        (a, "that of alpha = 1"): (steps[1.0], program(a, steps[1.0]))
        for a in alphas
        if a < 1
    }


def runs_of_nuts(alphas, start, sizes):
    """The same for NumPyro's NUTS, whose steps each chain adapts, or all take from alpha = 1."""

    def sampler(**settings):
        return MCMC(
            # The two locations have one scale: a mass matrix would only hide what the step is.
            NUTS(tempered, adapt_mass_matrix=False, **settings),
            num_warmup=sizes["warmup"],
            num_samples=sizes["iterations"],
            num_chains=len(start),
            chain_method="vectorized",
            progress_bar=False,
            jit_model_args=True,
        )

    def run(mcmc, alpha):
        fields = ("accept_prob", "num_steps")
        mcmc.run(
            jax.random.key(2),
            jnp.asarray(Y),
            alpha,
            init_params={"mu": start},
            extra_fields=fields,
        )
        acceptance, evaluations = (
            mcmc.get_extra_fields()[name].mean() for name in fields
        )
        mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"]).swapaxes(0, 1)
        return float(mcmc.last_state.adapt_state.step_size.mean()), (
            mu,
            acceptance,
            evaluations,
        )

    adapted = sampler()
    found = {(alpha, "tuned"): run(adapted, alpha) for alpha in alphas}
    fixed = sampler(step_size=found[1.0, "tuned"][0], adapt_step_size=False)
    return found | {
        (alpha, "that of alpha = 1"): run(fixed, alpha) for alpha in alphas if alpha < 1
    }


def summarise(mu, evaluations, truth):
    """Switches of the order of the locations, error of the probability of one order, and effective draws.

    Returns:
        Switches per 1000 iterations; the root mean square over chains of the error of the probability;
        effective draws per 1000 evaluations, of the order by that error (NaN where a chain of this length is
        worth no more than one draw, or none switches) and of the mean of the mixture by autocorrelation.
    """
    order = mu[..., 1] > mu[..., 0]
    switches = 1000 * (order[1:] != order[:-1]).mean()
    squared = ((order.mean(0) - truth) ** 2).mean()
    worth = truth * (1 - truth) / squared
    mean = effective_sample_size((mu @ WEIGHTS).T) / mu.shape[1]
    per = 1000 / (len(mu) * evaluations)
    return (
        switches,
        np.sqrt(squared),
        worth * per if worth > 1 and switches > 0 else np.nan,
        mean * per,
    )


def reweighted(mu, alpha, truth):
    """Probability of an order at alpha = 1 from draws at another alpha, weighted by L^(1 - alpha).

    Returns:
        The effective share of the draws, (sum w)² / (n sum w²), and the error of the probability by chain.
    """
    draws = {"mu": jnp.asarray(mu.reshape(-1, 2), jnp.float32)}
    ratio = jax.jit(jax.vmap(lambda mu: log_density(1.0)(mu) - log_density(alpha)(mu)))
    log_weights = np.asarray(ratio(draws), float).reshape(mu.shape[:2])
    weights = np.exp(log_weights - logsumexp(log_weights, axis=0))
    probability = (weights * (mu[..., 1] > mu[..., 0])).sum(0)
    share = 1 / (weights**2).sum(0) / len(mu)
    return share.mean(), np.sqrt(((probability - truth) ** 2).mean())


COLUMNS = [
    "sampler",
    "alpha",
    "tuning",
    "step",
    "acceptance",
    "evaluations per iteration",
    "switches per 1000",
]
COLUMNS += ["P(order)", "error", "ESS of the order", "ESS of the mean"]
WEIGHTED = ["sampler", "alpha", "ESS of the weights", "error of P(order) at alpha = 1"]


def study(sizes, truths):
    """Table of all runs, table of reweighted estimates, and the draws at tuned steps."""
    start = jax.random.uniform(
        jax.random.key(0), (sizes["chains"], 2), minval=-2.0, maxval=2.0
    )
    rows, weights, draws = [], [], {}
    for name in (*BLACKJAX, "NUTS"):
        runs = (
            runs_of_nuts(truths, start, sizes)
            if name == "NUTS"
            else runs_of_blackjax(name, truths, start, sizes)
        )
        for (alpha, label), (step, (mu, acceptance, evaluations)) in sorted(
            runs.items()
        ):
            mu = np.asarray(mu, float)
            truth = truths[alpha].probability
            switches, error, order, mean = summarise(mu, float(evaluations), truth)
            worth = "none" if np.isnan(order) else f"{order:.2f}"
            row = (
                name,
                alpha,
                label,
                f"{step:.2f}",
                f"{acceptance:.2f}",
                f"{evaluations:.1f}",
                f"{switches:.2f}",
            )
            rows.append((*row, f"{truth:.3f}", f"{error:.3f}", worth, f"{mean:.1f}"))
            if label == "that of alpha = 1":
                continue
            draws[name, alpha] = mu
            share, error = reweighted(mu, alpha, truths[1.0].probability)
            weights.append((name, alpha, f"{share:.2f}", f"{error:.3f}"))
    return (
        pd.DataFrame(rows, columns=COLUMNS),
        pd.DataFrame(weights, columns=WEIGHTED),
        draws,
    )


def draw(draws, truths, file, shown=1000):
    """Traces of the first chain at tuned steps, the exact density behind."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for name, _ in draws))
    figure, axes = plt.subplots(
        len(names),
        len(truths),
        figsize=(10, 8.5),
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for row, name in zip(axes, names, strict=True):
        for axis, alpha in zip(row, truths, strict=True):
            difference = draws[name, alpha][:shown, 0] @ np.array([-1.0, 1.0])
            truth = truths[alpha]
            width = len(difference) * 0.9 * truth.density / truth.density.max()
            axis.fill_betweenx(truth.difference, 0, width, color="0.85", linewidth=0)
            axis.plot(difference, color="C0", linewidth=0.6)
            axis.axhline(0, color="0.4", linewidth=0.6, linestyle=":")
            axis.set(xlim=(0, len(difference)), ylim=(-9, 9))
        row[0].set_ylabel(name + "\n$\\mu_2 - \\mu_1$")
    for axis, alpha in zip(axes[0], truths, strict=True):
        axis.set_title(f"alpha = {alpha:g}")
    for axis in axes[-1]:
        axis.set_xlabel("iteration")
    figure.savefig(file, dpi=130)
    plt.close(figure)


def main():
    """Run the study, and write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small",
        action="store_true",
        help="few chains and iterations, two powers, nothing written",
    )
    parser.add_argument(
        "--output", type=Path, default=None, help="folder for tables and figure"
    )
    options = parser.parse_args()
    sizes = (
        {"chains": 4, "warmup": 100, "iterations": 200}
        if options.small
        else {"chains": 64, "warmup": 1000, "iterations": 20000}
    )
    # Nearly all of a small run is compilation.
    jax.config.update("jax_disable_most_optimizations", options.small)
    alphas, points = ((0.1, 1.0), 151) if options.small else ((0.1, 0.5, 1.0), 601)
    truths = {alpha: exact(alpha, points) for alpha in alphas}
    for alpha, truth in truths.items():
        print(
            f"alpha {alpha}: P(order) {truth.probability:.4f}, barrier {truth.barrier:.1f} nats"
        )
    table, weights, draws = study(sizes, truths)
    print(table.to_string(index=False), weights.to_string(index=False), sep="\n")
    output = options.output or (None if options.small else DOCS)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        table.to_csv(output / "tempered_mcmc.csv", index=False)
        weights.to_csv(output / "tempered_mcmc_reweighted.csv", index=False)
        draw(draws, truths, output / "tempered_mcmc.png")
        text = ", ".join(f"{value} {name}" for name, value in sizes.items())
        text += f"; starts by key 0, tuning by key 1, runs by key 2, float32; blackjax {version('blackjax')}"
        (output / "tempered_mcmc.txt").write_text(describe(text))


if __name__ == "__main__":
    main()
