# %% [markdown]
"""# Online variational inference on six streams.

The experiment of CA19, section 5 (Chérief-Abdellatif, Alquier, Khan, *A Generalization Bound for Online
Variational Inference*, ACML 2019, Figure 1), and what lies beside it: each rule at unit constants and at the
constant that is best in hindsight, features standardised and as they come, the best fixed parameter in hindsight,
and an aggregate that needs no rate.

As a script: `python examples/online_streams.py [--small] [--data-dir FOLDER] [--output FOLDER]`. Without a folder
the data come from scikit-learn and OpenML. `--small` shortens the streams and writes to a temporary folder. A
notebook takes the same options from the environment variable `ONLINE_STREAMS`.
"""

# %%
import argparse
import os
import platform
import tempfile
import time
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

if "__file__" in globals():
    matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPRegressor
from streams_data import LOADERS, Stream, prepare
from streams_figure import draw_groups

import numpyro_tempered as nt
from numpyro_tempered.online.base import SVBRate
from numpyro_tempered.online.experts.aggregate import exponential_weights, mix_loss
from numpyro_tempered.theory import hindsight

# Losses reach 10^9 on features as they come: what is compared is the rules, not their rounding.
jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser(
    description="Online variational inference on the six streams of CA19."
)
parser.add_argument(
    "--small",
    action="store_true",
    help="short streams, two orders, to a temporary folder",
)
parser.add_argument(
    "--data-dir", type=Path, help="folder of data files; by default they are downloaded"
)
parser.add_argument("--output", type=Path, help="folder for tables and figures")
is_script = "__file__" in globals()
options = parser.parse_args(
    None if is_script else os.environ.get("ONLINE_STREAMS", "").split()
)
HERE = Path(__file__).resolve().parent if is_script else Path.cwd()
if options.output is None:
    options.output = (
        Path(tempfile.mkdtemp()) if options.small else HERE.parent / "docs" / "results"
    )
options.output.mkdir(parents=True, exist_ok=True)
begin = time.perf_counter()

# %% [markdown]
# ## Streams
#
# A column of ones is added to all features but those of the toy stream. "Standardised" means by mean and
# deviation of the whole data set, the outcomes of regressions too; "raw" means as they come. Each stream is run
# in several random orders of its rows, the same for all rules.

# %%
STREAMS = {
    "toy": ("toy", "raw"),
    "breast cancer": ("breast cancer", "standardised"),
    "breast cancer, raw": ("breast cancer", "raw"),
    "Pima": ("Pima", "standardised"),
    "Pima, raw": ("Pima", "raw"),
    "Cover Type": ("Cover Type", "standardised"),
    "Cover Type, raw": ("Cover Type", "raw"),
    "Boston": ("Boston", "standardised"),
    "Boston, raw": ("Boston", "raw"),
    "California, linear": ("California", "standardised"),
    "California, linear, raw": ("California", "raw"),
    "California, network": ("California", "standardised"),
}
NUM_ROUNDS = 300 if options.small else None
if options.small:  # some of each kind; without a folder, those that need no download
    some = (
        ["breast cancer, raw", "toy"]
        if options.data_dir is None
        else ["toy", "Boston", "California, network"]
    )
    STREAMS = {title: STREAMS[title] for title in some}


def load(title):
    """The stream of a title, cut to its first rows in an order of its own in the small mode."""
    name, preprocessing = STREAMS[title]
    stream = LOADERS[name](options.data_dir)
    rows = np.random.default_rng(2019).permutation(len(stream.y))[:NUM_ROUNDS]
    stream = Stream(stream.x[rows], stream.y[rows], stream.loss)
    return stream if name == "toy" else prepare(stream, preprocessing == "standardised")


def orders_of(num_rounds):
    """Random orders, shape (P, T): 10, or 5 of California and 3 of Cover Type."""
    count = (
        2
        if options.small
        else 10
        if num_rounds <= 10_000
        else 5
        if num_rounds < 100_000
        else 3
    )
    return np.stack(
        [np.random.default_rng(seed).permutation(num_rounds) for seed in range(count)]
    )


# %% [markdown]
# ## Rules
#
# All start at N(0, I), with |m_j| <= 20 and sigma_j <= 1 where the posterior is mean field. `c` multiplies the
# step size; at `c = 1` the steps are $1/\sqrt T$ for OGA, OGA-EL and SVA, $1/(\sqrt t\,\sigma^2)$ for SVB, and 1
# for NGVI and EWA. NGVI comes with evidence 1, the literal reading of CA19, and accumulating, with the curvature
# of the expected Hessian or of squared gradients (Fisher).

# %%
BOX = nt.online.Box(loc=20.0, scale=1.0)
CONSTANTS = 2.0 ** np.arange(-8 if options.small else -30, 5)


def mean_field_rules(num_rounds, box=BOX):
    """Factories from the constant c to a rule."""
    root = np.sqrt(num_rounds)
    return {
        "OGA": lambda c: nt.online.oga(c / root, box),
        "OGA-EL": lambda c: nt.online.oga_el(c / root, box),
        "SVA": lambda c: nt.online.sva(c / root, box),
        "SVB": lambda c: nt.online.svb(SVBRate(c), box),
        "NGVI, evidence 1": lambda c: nt.online.ngvi(c, evidence=1.0, box=box),
        "NGVI, evidence 1, Fisher": lambda c: nt.online.ngvi(
            c, evidence=1.0, curvature="fisher", box=box
        ),
        "NGVI": lambda c: nt.online.ngvi(c, box=box),
        "NGVI, Fisher": lambda c: nt.online.ngvi(c, curvature="fisher", box=box),
    }


# The members of the aggregate: these rules at each of these constants.
MEMBER_RULES = ["OGA", "OGA-EL", "SVA", "SVB", "NGVI", "NGVI, Fisher"]
MEMBER_CONSTANTS = 4.0 ** np.arange(-4, 1)


def aggregate(num_rounds):
    """Thirty members side by side, combined by exponential weights: no constant to choose."""
    rules = mean_field_rules(num_rounds)
    return nt.online.aggregate(
        *(nt.online.grid(rules[name], c=MEMBER_CONSTANTS) for name in MEMBER_RULES)
    )


# %% [markdown]
# The network of California housing has one hidden layer of 20 ReLU units. A network whose weights all start at 0
# stays there, so the means start at draws, the same for all rules; the standard deviations at 1. Expectations are
# those of the network's linearisation at the means, where the Hessian is that of Gauss-Newton. What the aggregate
# averages is here the predictions: the means of two networks have no average of use.

# %%
HIDDEN = 20


def network(theta, x):
    """Outputs (...) for x of shape (..., d)."""
    inner, outer = jnp.split(theta, [HIDDEN * x.shape[-1]])
    return jax.nn.relu(x @ inner.reshape(HIDDEN, -1).T) @ outer[:HIDDEN] + outer[HIDDEN]


def predicting(expectation):
    """The expectation, with the network's prediction at the mean where the loss at the mean would be."""

    def evaluate(q, x, y, **options):
        return expectation.evaluate(q, x, y, **options)._replace(
            at_mean=network(q.loc, x)
        )

    return expectation._replace(evaluate=evaluate)


@jax.jit
def aggregate_predictions(predictions, y):
    """Predictions of K members (K, T) by AdaHedge; returns the losses of their weighted average, (T,)."""

    def round_(carry, datum):
        losses, gap = carry
        predictions, y = datum
        rate = jnp.where(gap > 0, jnp.log(len(losses)) / gap, jnp.inf)
        weights = exponential_weights(losses, rate)
        loss, each = (y - weights @ predictions) ** 2, (y - predictions) ** 2
        gap += jnp.maximum(loss - mix_loss(weights, each, rate), 0.0)
        return (losses + each, gap), loss

    return jax.lax.scan(
        round_, (jnp.zeros(len(predictions)), jnp.zeros(())), (predictions.T, y)
    )[1]


def network_start(seed, d):
    """Weights N(0, 1 / number of inputs), no output bias."""
    rng = np.random.default_rng(seed)
    inner = rng.normal(size=HIDDEN * d) / np.sqrt(d)
    return np.r_[inner, rng.normal(size=HIDDEN) / np.sqrt(HIDDEN), 0.0]


# %% [markdown]
# ## Runs
#
# All constants and orders of a rule are one compiled loop. The loss of a round is that of the posterior mean
# before its update. A round that a rule rejects, because something was not finite, is counted.


# %%
@partial(jax.jit, static_argnums=(0, 1))
def run_all(make, expectation, prior, x, y, constants, orders):
    """Losses at the mean (C, P, T), and the numbers of rejected rounds (C, P)."""

    def one(c, order):
        rule = make(c)
        state, losses = nt.online.run(
            rule, expectation, rule.init(prior), x[order], y[order]
        )
        return losses.at_mean, state.rejected

    return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(constants, orders)


def averages(losses, at):
    """Average cumulative losses (C, P, len(at)) over the rounds taken, after the rounds ``at``."""
    losses = np.asarray(losses)
    taken = np.isfinite(losses)
    sums = np.cumsum(np.where(taken, losses, 0.0), -1)[..., at - 1]
    return sums / np.maximum(np.cumsum(taken, -1)[..., at - 1], 1)


def best_in_hindsight(stream, is_network):
    """Average loss of the best fixed parameter in the box, and a bound on how far from it that can be.

    For the network this is the best of three fits to all data: no more than an upper bound.
    """
    if is_network:
        x, y = stream.x[:, :-1], stream.y  # the fits have an intercept of their own
        fits = [
            MLPRegressor(
                hidden_layer_sizes=HIDDEN,
                solver="lbfgs",
                alpha=0.0,
                max_iter=2000,
                random_state=seed,
            )
            for seed in range(3)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ConvergenceWarning
            )  # wherever they stop, they bound it from above
            return min(
                np.mean((fit.fit(x, y).predict(x) - y) ** 2) for fit in fits
            ), np.inf
    best = getattr(hindsight, stream.loss)(stream.x, stream.y, BOX)
    return best.value / len(stream.y), best.gap / len(stream.y)


def experiment(title):
    """Rows of the table, and curves by rate and rule."""
    stream, is_network = load(title), title.endswith("network")
    num_rounds, d = stream.x.shape
    orders = orders_of(num_rounds)
    best, gap = best_in_hindsight(stream, is_network)
    expectation, loc = getattr(nt.expectations, stream.loss)(), np.zeros(d)
    if is_network:
        expectation = nt.expectations.linearised(network, expectation)
        expectation = predicting(expectation)
        loc = network_start(2019, d)
    prior = nt.gaussian.families.MeanField(jnp.asarray(loc), jnp.ones(len(loc)))
    constants = CONSTANTS if num_rounds < 100_000 else CONSTANTS[::2]
    jobs = {
        rule: (make, prior, constants)
        for rule, make in mean_field_rules(num_rounds).items()
    }
    if not is_network:
        full = nt.gaussian.families.FullRank(jnp.zeros(d), jnp.eye(d))
        # A round with a covariance costs d times as much: fewer constants.
        few = (
            4.0 ** np.arange(-8, 3) if num_rounds < 100_000 else 4.0 ** np.arange(-2, 1)
        )
        if stream.loss == "squared":
            jobs["EWA"] = nt.online.ewa, full, few
        jobs["NGVI, full, Fisher"] = (
            lambda c: nt.online.ngvi(c, curvature="fisher"),
            full,
            few,
        )
        jobs["aggregate"] = lambda c: aggregate(num_rounds), prior, np.ones(1)

    at = np.unique(np.r_[np.geomspace(1, num_rounds, 120), num_rounds / 10].astype(int))
    table, members, predictions = [], {}, []
    curves = {"unit": {"round": at}, "hindsight": {"round": at}}

    def report(rule, constants, losses, rejected):
        average, rejected = averages(losses, at), np.asarray(rejected).sum(1)
        mean, error = average.mean(1), average.std(1, ddof=1) / np.sqrt(len(orders))
        final = mean[:, -1]
        # A constant at which the rule rejects rounds is not chosen where another does not.
        chosen = {
            "unit": np.argmin(np.abs(constants - 1.0)),
            "hindsight": np.lexsort((final, rejected))[0],
        }
        for rate, k in chosen.items():
            tenth = mean[k, np.searchsorted(at, num_rounds // 10)]
            row = (
                constants[k],
                final[k],
                error[k, -1],
                tenth,
                final[k] - best,
                rejected[k],
            )
            table.append((title, num_rounds, len(orders), rule, rate, *row, best, gap))
            curves[rate][rule] = mean[k]
        if rule in MEMBER_RULES:
            members.update(
                {(rule, c): final[constants == c][0] for c in MEMBER_CONSTANTS}
            )

    for rule, (make, start, constants) in jobs.items():
        losses, rejected = run_all(
            make, expectation, start, stream.x, stream.y, constants, orders
        )
        if is_network:
            if rule in MEMBER_RULES:
                predictions.append(losses[np.isin(constants, MEMBER_CONSTANTS)])
            losses = (stream.y[orders] - np.asarray(losses)) ** 2
        report(rule, constants, losses, rejected)
    if is_network:
        losses = jax.vmap(aggregate_predictions, (1, 0))(
            jnp.concatenate(predictions), stream.y[orders]
        )
        report("aggregate", np.ones(1), losses[None], np.zeros((1, len(orders)), int))
    against = min(members, key=members.get)
    print(f"{title}: {time.perf_counter() - begin:.0f} s", flush=True)
    return table, curves, (title, *against, members[against])


# %%
COLUMNS = [
    "stream",
    "rounds",
    "orders",
    "rule",
    "rate",
    "c",
    "loss",
    "s.e.",
    "loss at T/10",
    "excess",
    "rejected",
]
COLUMNS += ["best", "gap"]
results = {title: experiment(title) for title in STREAMS}
table = pd.DataFrame(
    [row for rows, _, _ in results.values() for row in rows], columns=COLUMNS
)
table.to_csv(options.output / "figure1_losses.csv", index=False, float_format="%.6g")
RULES = [*mean_field_rules(1), "EWA", "NGVI, full, Fisher", "aggregate"]

# %% [markdown]
# ## Tables
#
# Average loss of the whole stream, with its standard error over the orders. "r" marks rejected rounds, those of
# all orders together.


# %%
def cell(row, with_constant):
    """One entry of the tables for reading."""
    loss, digits = row["loss"], int(np.clip(3 - np.floor(np.log10(row["loss"])), 0, 4))
    show = (
        f"{loss:.{digits}f} ± {row['s.e.']:.{digits}f}"
        if loss < 1e5
        else f"{loss:.2g} ± {row['s.e.']:.1g}"
    )
    constant = f" (2^{np.log2(row['c']):.0f})" if with_constant else ""
    return show + constant + (f", {row['rejected']} r" if row["rejected"] else "")


def wide(rate, titles):
    """Rules by streams, with the best in hindsight below."""
    part = table[(table.rate == rate) & table.stream.isin(titles)].copy()
    with_constant = rate == "hindsight"
    part["cell"] = [
        cell(row, with_constant and row["rule"] != "aggregate")
        for _, row in part.iterrows()
    ]
    shown = part.pivot(index="rule", columns="stream", values="cell").reindex(
        index=RULES, columns=titles
    )
    best = part.groupby("stream")[["best", "gap"]].first()
    shown.loc["best in hindsight"] = [
        ("≤ " if np.isinf(gap) else "") + f"{value:.4g}"
        for value, gap in best.loc[titles].to_numpy()
    ]
    return shown.fillna("")


standardised = [title for title in STREAMS if not title.endswith("raw")]
raw = [title for title in STREAMS if title.endswith("raw")]
for rate in ("unit", "hindsight"):
    for name, titles in {"standardised": standardised, "raw": raw}.items():
        if not titles:
            continue
        shown = wide(rate, titles)
        shown.to_csv(options.output / f"figure1_{rate}_{name}.csv")
        print(
            f"\nAverage loss, {name}, {'c = 1' if rate == 'unit' else 'c chosen in hindsight'}"
        )
        print(shown.to_string())

# %% [markdown]
# The aggregate beside the best of its own members, known in hindsight.

# %%
combined = table[(table.rule == "aggregate") & (table.rate == "unit")].set_index(
    "stream"
)
oga = table[(table.rule == "OGA") & (table.rate == "unit")].set_index("stream").loss
beside = pd.DataFrame(
    [result[2] for result in results.values()],
    columns=["stream", "best member", "c", "its loss"],
)
beside = beside.set_index("stream").loc[combined.index]
beside.insert(0, "aggregate", combined.loss)
beside["ratio"] = beside["aggregate"] / beside["its loss"]
beside["OGA, c = 1"] = oga.loc[combined.index]
beside.to_csv(options.output / "figure1_aggregate.csv", float_format="%.4g")
print(beside.to_string(float_format="%.4g"))

# %% [markdown]
# ## Figure 1
#
# Average cumulative loss against the round, mean over the orders: on the left the gradient rules, SVA and SVB, on
# the right NGVI and exact Bayes. `python examples/streams_figure.py` draws the figures from the tables, without
# the runs.

# %%
plt.style.use("numpyro_tempered.plots.house")
parts = [
    pd.DataFrame(lines).assign(stream=title, rate=rate)
    for title, (_, curves, _) in results.items()
    for rate, lines in curves.items()
]
curves = pd.concat(parts)
curves = curves[
    ["stream", "rate", "round", *(rule for rule in RULES if rule in curves)]
]
curves.to_csv(options.output / "figure1_curves.csv", index=False, float_format="%.4g")
draw_groups(table, curves, options.output)
if not is_script:
    plt.show()

# %%
device = jax.devices()[0]
packages = ", ".join(
    f"{name} {version(name)}"
    for name in ("jax", "numpyro", "numpy", "scipy", "scikit-learn", "numpyro_tempered")
)
(options.output / "figure1.txt").write_text(
    f"device: {device.platform}, {platform.machine()}, {os.cpu_count()} cores\n"
    f"versions: Python {platform.python_version()}, {packages}; float64\n"
    f"seeds: orders 0, 1, ... by numpy's default_rng; toy stream 0; start of the network 2019\n"
    f"command: python examples/online_streams.py{' --small' if options.small else ''} --data-dir FOLDER\n"
)
print(
    f"\nTables and figures are in {options.output} ({time.perf_counter() - begin:.0f} s)"
)
