"""Figure 1 of CA19 with the paper's own streams, dimensions and step sizes.

Section 5 of the paper: toy, breast cancer, Pima and Cover Type with hinge loss, Boston with the squared loss of a
linear predictor, California with that of a network with one hidden layer of ReLU units. No constant column.
q_1 = N(0, I), |m_j| <= 20, σ_j <= 1; steps 1/√T for OGA, OGA-EL and SVA, 1/(√t σ²) for SVB, 1 for NGVI. Rows in
random order. The toy stream: y = 1 with probability 2/3, x | y = 1 ~ N((1, 1), [[1, 1], [1, 3]]), x | y = -1 ~
N((-1, -1), I).

The paper does not say, and is here: features and outcomes of regressions are standardised on the whole set;
20 hidden units, weights from N(0, 1 / inputs), and the expectation of the network by its linearisation at the
mean and, as a stream of its own, exactly: under a mean field the units are independent, and the moments of
max(u, 0) of a Gaussian u are known. Its 9 features of California are the 8 of scikit-learn. NGVI at rate 1 comes
in two readings, evidence 1 and accumulating.

Added: the implicit step (rvga), and on the short streams the exact minimiser (5) that SVA linearises, at SVA's
step and at step 1, without the box.

Writes ``figure_1.csv``, ``figure_1_losses.csv``, ``figure_1_curves.csv``, ``figure_1_hinge.png``,
``figure_1_squared.png`` and ``figure_1.txt``.

    python tests/benchmarks/figure_1.py --data-dir ../shared/data
"""

import argparse
import sys
import time
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "examples"))

from streams_data import LOADERS, Stream  # noqa: E402
from streams_figure import by_stream, draw  # noqa: E402

jax.config.update("jax_enable_x64", True)

DOCS = ROOT / "docs" / "results"
BOX = nt.online.Box(loc=20.0, scale=1.0)
HIDDEN = 20
EXACT = "California, exact"
STREAMS = ["toy", "breast cancer", "Pima", "Cover Type", "Boston", "California", EXACT]
# Above this length a pass over all past rows in each round takes too long.
MAX_EXACT = 1000


def toy(num_rounds=10_000):
    """The two clouds of section 5.1."""
    rng = np.random.default_rng(0)
    y = np.where(rng.uniform(size=num_rounds) < 2 / 3, 1.0, -1.0)
    noise = rng.normal(size=(num_rounds, 2))
    factor = np.linalg.cholesky([[1.0, 1.0], [1.0, 3.0]])
    return Stream(
        y[:, None] + np.where(y[:, None] > 0, noise @ factor.T, noise), y, "hinge"
    )


def standardise(values):
    deviation = values.std(axis=0)
    return (values - values.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)


def load(name, data_dir, num_rounds):
    """The stream, standardised but for the toy, cut to its first rows in a random order."""
    if name == "toy":
        stream = toy()
    else:
        x, y, loss = LOADERS[name.split(",")[0]](data_dir)
        stream = Stream(
            standardise(x), standardise(y) if loss == "squared" else y, loss
        )
    rows = np.random.default_rng(2019).permutation(len(stream.y))[:num_rounds]
    return Stream(stream.x[rows], stream.y[rows], stream.loss)


def network(theta, x):
    """Outputs (...) for x of shape (..., d)."""
    inner, outer = jnp.split(theta, [HIDDEN * x.shape[-1]])
    return jax.nn.relu(x @ inner.reshape(HIDDEN, -1).T) @ outer[:HIDDEN] + outer[HIDDEN]


def relu_moments(mean, variance):
    """E[r] and E[r²] of r = max(u, 0), u Gaussian."""
    # A point, which OGA holds, is a Gaussian of no width to speak of.
    scale = jnp.sqrt(jnp.maximum(variance, 1e-24))
    at = mean / scale
    below, density = jax.scipy.stats.norm.cdf(at), scale * jax.scipy.stats.norm.pdf(at)
    return mean * below + density, (mean**2 + variance) * below + mean * density


def expected_error(loc, variance, x, y):
    """E[(y - f(x))²] of the network under independent Gaussian weights: (y - E f)² + Var f."""
    (inner, outer), (inner_var, outer_var) = (
        jnp.split(part, [HIDDEN * x.shape[-1]]) for part in (loc, variance)
    )
    rows = (HIDDEN, x.shape[-1])
    first, second = relu_moments(
        inner.reshape(rows) @ x, inner_var.reshape(rows) @ x**2
    )
    mean = first @ outer[:HIDDEN] + outer[HIDDEN]
    spread = (
        second @ (outer[:HIDDEN] ** 2 + outer_var[:HIDDEN])
        - first**2 @ outer[:HIDDEN] ** 2
    )
    return (y - mean) ** 2 + spread + outer_var[HIDDEN]


def exact_network():
    """The expectation of the squared loss of the network for a mean field, with its exact gradients."""

    def evaluate(q, x, y, *, rng_key=None, curvature="hessian", mask=None):
        expected, (grad_loc, grad_var) = jax.value_and_grad(expected_error, (0, 1))(
            q.loc, q.scale**2, x, y
        )
        return nt.expectations.Evaluation(
            (y - network(q.loc, x)) ** 2, expected, grad_loc, grad_var
        )

    return nt.expectations.Expectation(
        evaluate, loss=lambda theta, x, y: (y - network(theta, x))[None] ** 2
    )


def check_exact_network():
    """Raise RuntimeError unless the expected error is that of draws."""
    rng = np.random.default_rng(0)
    x, y, loc = rng.normal(size=8), 0.7, start(EXACT, 8)
    draws = loc + 0.4 * rng.normal(size=(20_000, len(loc)))
    errors = np.asarray(jax.vmap(lambda theta: (y - network(theta, x)) ** 2)(draws))
    exact = float(expected_error(loc, jnp.full(len(loc), 0.16), x, y))
    if abs(exact - errors.mean()) > 5.0 * errors.std() / np.sqrt(len(errors)):
        raise RuntimeError(
            f"expected error {exact:.4f}, but {errors.mean():.4f} by draws."
        )


def start(name, d):
    """Means of q_1: 0, or weights of the network."""
    if not name.startswith("California"):
        return np.zeros(d)
    rng = np.random.default_rng(2019)
    return np.r_[
        rng.normal(size=HIDDEN * d) / np.sqrt(d),
        rng.normal(size=HIDDEN) / np.sqrt(HIDDEN),
        0.0,
    ]


def rules(num_rounds):
    """The rules of the paper at its step sizes, and the implicit step."""
    step = 1.0 / np.sqrt(num_rounds)
    return {
        "OGA": nt.online.oga(step, BOX),
        "OGA-EL": nt.online.oga_el(step, BOX),
        "SVA": nt.online.sva(step, BOX),
        "SVB": nt.online.svb(nt.online.svb_rate(1.0), BOX),
        "NGVI, evidence 1": nt.online.ngvi(evidence=1.0, box=BOX),
        "NGVI": nt.online.ngvi(box=BOX),
        "R-VGA": nt.online.rvga(box=BOX),
    }


@partial(jax.jit, static_argnums=(0, 1))
def run_orders(rule, expectation, prior, x, y, orders):
    """Losses at the mean (P, T) and rejected rounds (P,)."""

    def one(order):
        state, losses = nt.online.run(
            rule, expectation, rule.init(prior), x[order], y[order]
        )
        return losses.at_mean, state.rejected

    return jax.lax.map(one, orders)


def experiment(name, options):
    """Rows of the table, and curves by rule."""
    stream = load(name, options.data_dir, 200 if options.small else None)
    num_rounds, d = stream.x.shape
    count = 2 if options.small or num_rounds > 10_000 else 5
    count = 1 if num_rounds > 100_000 else count
    orders = np.stack(
        [np.random.default_rng(seed).permutation(num_rounds) for seed in range(count)]
    )
    loc = start(name, d)
    prior = nt.gaussian.families.MeanField(jnp.asarray(loc), jnp.ones(len(loc)))
    expectation = getattr(nt.expectations, stream.loss)()
    if name == EXACT:
        expectation, best = exact_network(), np.nan
    elif name == "California":
        expectation, best = nt.expectations.linearised(network, expectation), np.nan
    else:
        best = (
            getattr(nt.bounds.hindsight, stream.loss)(stream.x, stream.y, BOX).value
            / num_rounds
        )
    losses = {}
    for rule, value in rules(num_rounds).items():
        begin = time.perf_counter()
        at_mean, rejected = run_orders(
            value, expectation, prior, stream.x, stream.y, orders
        )
        losses[rule] = np.asarray(at_mean), int(np.sum(rejected))
        print(f"{name}, {rule}: {time.perf_counter() - begin:.1f} s", flush=True)
    if num_rounds <= MAX_EXACT:
        for label, step in (("(5), step 1/√T", num_rounds**-0.5), ("(5), step 1", 1.0)):
            begin = time.perf_counter()
            fits = [
                nt.bounds.hindsight.sequential(
                    expectation, prior, step, stream.x[order], stream.y[order]
                )
                for order in orders
            ]
            missed = int(sum(np.sum(~fit.converged) for fit in fits))
            print(
                f"{name}, {label}: {time.perf_counter() - begin:.1f} s, {missed} not converged",
                flush=True,
            )
            losses[label] = np.stack([fit.losses.at_mean for fit in fits]), missed
    return rows_of(name, losses, best, d), curves_of(losses), best


def averages(losses):
    """Average losses (P, T) over the rounds taken so far."""
    taken = np.isfinite(losses)
    return np.cumsum(np.where(taken, losses, 0.0), -1) / np.maximum(
        np.cumsum(taken, -1), 1
    )


def rows_of(name, losses, best, d):
    rows = []
    for rule, (at_mean, rejected) in losses.items():
        average = averages(at_mean)
        final, (count, num_rounds) = average[:, -1], average.shape
        error = final.std(ddof=1) / np.sqrt(count) if count > 1 else np.nan
        tenth = average[:, num_rounds // 10 - 1].mean()
        rows.append(
            (
                name,
                num_rounds,
                d,
                count,
                rule,
                final.mean(),
                error,
                tenth,
                best,
                rejected,
            )
        )
    return rows


def curves_of(losses):
    curves = {}
    for rule, (at_mean, _) in losses.items():
        at = np.unique(np.geomspace(1, at_mean.shape[1], 150).astype(int))
        curves[rule] = at, averages(at_mean).mean(0)[at - 1]
    return curves


def table_of_curves(results):
    """Average losses: stream, round, and a column for each rule."""
    parts = []
    for name, (_, curves, _) in results.items():
        part = pd.DataFrame({rule: average for rule, (_, average) in curves.items()})
        part.insert(0, "round", next(iter(curves.values()))[0])
        part.insert(0, "stream", name)
        parts.append(part)
    return pd.concat(parts)


def main():
    """Run the streams, write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small",
        action="store_true",
        help="200 rounds of two streams that need no download",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="folder of data files; by default they are downloaded",
    )
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for tables and figure"
    )
    parser.add_argument("--streams", nargs="*", help="some of the streams")
    options = parser.parse_args()
    names = options.streams or (["toy", "breast cancer"] if options.small else STREAMS)
    check_exact_network()
    results = {name: experiment(name, options) for name in names}
    columns = [
        "stream",
        "T",
        "d",
        "orders",
        "rule",
        "loss",
        "s.e.",
        "loss at T/10",
        "best in hindsight",
        "rejected",
    ]
    table = pd.DataFrame(
        [row for rows, _, _ in results.values() for row in rows], columns=columns
    )
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(
        options.output / "figure_1_losses.csv", index=False, float_format="%.5g"
    )
    table["cell"] = [f"{value:.4g}" for value in table["loss"]]
    wide = table.pivot(index="rule", columns="stream", values="cell")
    wide = wide.reindex(index=table["rule"].unique(), columns=names)
    wide.loc["best in hindsight"] = [f"{results[name][2]:.4g}" for name in names]
    wide.replace("nan", "").fillna("").to_csv(options.output / "figure_1.csv")
    print(wide.fillna("").to_string())
    curves = table_of_curves(results)
    curves.to_csv(
        options.output / "figure_1_curves.csv", index=False, float_format="%.4g"
    )
    plt.style.use("numpyro_tempered.plots.house")
    best = {name: best for name, (_, _, best) in results.items()}
    for loss, streams in {"hinge": STREAMS[:4], "squared": STREAMS[4:]}.items():
        tables = {
            name: table for name, table in by_stream(curves).items() if name in streams
        }
        if tables:
            draw(tables, best).savefig(options.output / f"figure_1_{loss}.png")
    sizes = ", ".join(
        f"{name} {rows[0][1]} rounds, {rows[0][3]} orders"
        for name, (rows, _, _) in results.items()
    )
    text = describe(f"{sizes}; float64").replace(str(options.data_dir), "DATA_DIR")
    (options.output / "figure_1.txt").write_text(text)


if __name__ == "__main__":
    main()
