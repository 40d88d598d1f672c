"""Regret against the horizon on adversarial streams, and held-out risk of the average decision.

Adversary: features are one unit vector (of each seed), every label goes against the posterior mean, hinge loss.
The best parameter in hindsight is found by linear programming, over the box |theta_j| <= 1. Every rule runs at
the rate of its theorem, with the constants computed from data and box. The slope is that of a least-squares line
through (log T, log regret).
Held out: two Gaussian clouds with equal weights, x | y ~ N(y (1, 1), 2 I), features shortened to norm 3; the risk
of the average of the decisions and that of the last one on 20000 new data, less the least risk in the box on
them. Differences are paired by seed.
Writes ``regret_rates.csv`` and ``regret_rates.png``.

    python tests/benchmarks/regret_rates.py
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from provenance import describe

import numpyro_tempered as nt
from numpyro_tempered.online import Box
from numpyro_tempered.online.stream import step

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
HINGE = nt.expectations.hinge()
BOX = Box(loc=1.0, scale=0.5)
DIMENSION = 2
# The divergence from the prior of a Gaussian of its width at the corner of the box.
KL = 0.5 * DIMENSION * (1.0 / 0.5) ** 2
PRIOR = nt.gaussian.families.MeanField(jnp.zeros(DIMENSION), jnp.full(DIMENSION, 0.5))


def rules(num_rounds, lipschitz):
    """The rules at the rates of their theorems."""
    online, d = nt.online, DIMENSION
    diameter, point = nt.bounds.diameter(BOX, d), nt.bounds.diameter(BOX, d, point=True)
    constants = {
        "kl": KL,
        "lipschitz": lipschitz,
        "strong_convexity": nt.bounds.strong_convexity(PRIOR),
    }
    return {
        "OGA": online.oga(
            online.oga_rate(lipschitz=lipschitz, diameter=point), box=BOX
        ),
        "SVB": online.svb(
            online.svb_rate(
                online.svb_constant(lipschitz=lipschitz, diameter=diameter)
            ),
            box=BOX,
        ),
        "SVA": online.sva(online.sva_rate(num_rounds, **constants), box=BOX),
        "SVA, doubling": online.doubling(
            partial(online.sva, box=BOX), online.sva_rate(1, **constants)
        ),
    }


def bound(name, num_rounds, lipschitz, comparator):
    """The bound on the regret; for SVA by a Gaussian, ``comparator`` = (its loss less the best's, its KL)."""
    if name in ("OGA", "SVB"):
        diameter = nt.bounds.diameter(BOX, DIMENSION, point=name == "OGA")
        return float(
            nt.bounds.svb(num_rounds, lipschitz=lipschitz, diameter=diameter).value
        )
    excess, kl = comparator
    constants = {
        "lipschitz": lipschitz,
        "strong_convexity": nt.bounds.strong_convexity(PRIOR),
    }
    if name == "SVA":
        rate = nt.online.sva_rate(num_rounds, kl=KL, **constants)
        return float(
            nt.bounds.sva(
                num_rounds, step_size=rate, kl=kl, comparator=excess, **constants
            ).value
        )
    rate = nt.online.sva_rate(1, kl=KL, **constants)
    first = nt.bounds.sva(1, step_size=rate, kl=kl, comparator=0.0, **constants)
    return float(nt.bounds.doubling(num_rounds, first, comparator=excess).value)


def play(rule, x, num_rounds):
    """Losses at the mean and labels, (seed, T), where each label goes against the mean; ``x`` is (seed, d)."""

    def one(x):
        def body(state, _):
            label = jnp.where(x @ state.posterior.loc >= 0, -1.0, 1.0)
            state, losses = step(rule, HINGE, state, (x, label), None)
            return state, (losses.at_mean, label)

        return jax.lax.scan(body, rule.init(PRIOR), length=num_rounds)[1]

    return tuple(np.asarray(part, np.float64) for part in jax.jit(jax.vmap(one))(x))


def adversarial(horizons, num_seeds):
    """Rows (rule, T, regret, its standard error, bound)."""
    angles = np.random.default_rng(0).uniform(0, 2 * np.pi, num_seeds)
    x = np.stack([np.cos(angles), np.sin(angles)], -1)
    rows = []
    for num_rounds in horizons:
        for name, rule in rules(num_rounds, 1.0).items():
            losses, labels = play(rule, jnp.asarray(x), num_rounds)
            regrets, limits = [], []
            for seed in range(num_seeds):
                stream = np.broadcast_to(x[seed], (num_rounds, DIMENSION)), labels[seed]
                best = nt.bounds.hindsight.hinge(*stream, BOX)
                comparator = None
                if name.startswith("SVA"):
                    rate = nt.online.sva_rate(
                        num_rounds,
                        kl=KL,
                        lipschitz=1.0,
                        strong_convexity=nt.bounds.strong_convexity(PRIOR),
                    )
                    q = nt.bounds.hindsight.gaussian(
                        HINGE, PRIOR, rate, *stream, box=BOX
                    )
                    comparator = q.expected.sum() - best.value, q.kl
                regrets.append(losses[seed].sum() - best.value)
                limits.append(bound(name, num_rounds, 1.0, comparator))
            rows.append(
                (
                    name,
                    num_rounds,
                    np.mean(regrets),
                    standard_error(regrets),
                    np.mean(limits),
                )
            )
    return pd.DataFrame(rows, columns=["rule", "T", "regret", "s.e.", "bound"])


def clouds(seed, num_rounds):
    """Features of norm at most 3, and labels."""
    rng = np.random.default_rng(seed)
    y = rng.choice([-1.0, 1.0], num_rounds)
    x = np.sqrt(2.0) * rng.normal(size=(num_rounds, DIMENSION)) + y[:, None]
    return x * np.minimum(1.0, 3.0 / np.linalg.norm(x, axis=-1, keepdims=True)), y


def held_out(num_rounds, num_seeds, num_new):
    """Rows (rule, excess risk of the average and of the last decision, their difference, guarantee)."""
    new_x, new_y = clouds(10**6, num_new)
    best = nt.bounds.hindsight.hinge(new_x, new_y, BOX)
    streams = [clouds(seed, num_rounds) for seed in range(num_seeds)]
    x, y = (jnp.asarray(np.stack(part)) for part in zip(*streams, strict=True))
    rows = []
    for name, rule in {**rules(num_rounds, 3.0), "NGVI": nt.online.ngvi()}.items():
        rule = nt.online.with_average(rule)

        def run(x, y, rule=rule):
            state, _ = nt.online.run(rule, HINGE, rule.init(PRIOR), x, y)
            return nt.online.average(state), state.posterior.loc

        average, last = (
            np.maximum(1 - new_y * (np.asarray(theta, np.float64) @ new_x.T), 0).mean(
                -1
            )
            - best.value / num_new
            for theta in jax.jit(jax.vmap(run))(x, y)
        )
        guarantee = np.nan
        if name in ("OGA", "SVB"):
            regret = bound(name, num_rounds, 3.0, None)
            guarantee = float(nt.bounds.online_to_batch(num_rounds, regret).value)
        difference = average - last
        rows.append(
            (
                name,
                num_rounds,
                average.mean(),
                standard_error(average),
                last.mean(),
                standard_error(last),
                difference.mean(),
                standard_error(difference),
                guarantee,
            )
        )
    return pd.DataFrame(
        rows,
        columns=[
            "rule",
            "T",
            "excess risk, average",
            "s.e. of average",
            "excess risk, last",
            "s.e. of last",
            "average - last",
            "s.e. of difference",
            "guarantee",
        ],
    )


def standard_error(values):
    """That of the mean."""
    return np.std(values, ddof=1) / np.sqrt(len(values))


def draw(regret, risk, path):
    """The two panels."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.5, 4.2), layout="constrained"
    )
    for i, (name, rows) in enumerate(regret.groupby("rule", sort=False)):
        label = f"{name}, slope {rows['slope'].iloc[0]:.2f}"
        left.errorbar(
            rows["T"],
            rows["regret"],
            yerr=2 * rows["s.e."],
            fmt="o-",
            color=f"C{i}",
            markersize=4,
            label=label,
        )
        left.plot(rows["T"], rows["bound"], "--", color=f"C{i}", linewidth=1.0)
    left.set(
        xscale="log", yscale="log", xlabel="horizon T", ylabel="regret (dashed: bound)"
    )
    left.set_title("Labels against the mean, hinge loss")
    position = np.arange(len(risk))
    for shift, column, se, color in (
        (-0.1, "excess risk, average", "s.e. of average", "C0"),
        (0.1, "excess risk, last", "s.e. of last", "C1"),
    ):
        label = column.split(", ")[1] + " decision"
        right.errorbar(
            position + shift,
            risk[column],
            yerr=2 * risk[se],
            fmt="o",
            capsize=3,
            color=color,
            label=label,
        )
    right.plot(
        position,
        risk["guarantee"],
        "_",
        color="0.3",
        markersize=22,
        label="guarantee for the average",
    )
    right.set_xticks(position, risk["rule"])
    right.set(yscale="log", ylabel="excess risk on new data")
    right.set_title(f"Two clouds, T = {risk['T'].iloc[0]}")
    for ax in (left, right):
        ax.grid(alpha=0.3)
        ax.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    """Run both experiments, write the table and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="horizons up to 256, 3 and 10 seeds"
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for table and figure"
    )
    options = parser.parse_args()
    horizons = 2 ** np.arange(6, 9) if options.small else 2 ** np.arange(6, 16)
    num_seeds, num_streams, num_rounds = (
        (3, 10, 200) if options.small else (5, 200, 2000)
    )
    regret = adversarial(horizons.tolist(), num_seeds)
    slopes = {
        name: np.polyfit(np.log(rows["T"]), np.log(rows["regret"]), 1)[0]
        for name, rows in regret.groupby("rule")
    }
    regret["slope"] = regret["rule"].map(slopes)
    risk = held_out(num_rounds, num_streams, 20_000)
    table = pd.concat(
        [regret.assign(experiment="adversarial"), risk.assign(experiment="held out")]
    )
    table = table[
        ["experiment", *(name for name in table.columns if name != "experiment")]
    ].round(5)
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "regret_rates.csv", index=False)
    (options.output / "regret_rates.txt").write_text(
        describe(
            f"adversarial: T = {horizons[0]} to {horizons[-1]}, {num_seeds} seeds; held out: T = {num_rounds}, "
            f"{num_streams} seeds, 20000 new data; float32"
        )
    )
    print(
        regret.round(3).to_string(index=False),
        risk.round(4).to_string(index=False),
        sep="\n\n",
    )
    draw(regret, risk, options.output / "regret_rates.png")


if __name__ == "__main__":
    main()
