"""One posterior from the rows of K machines: rounds of partitioned variational inference, and merging once.

Logistic regression with a standard normal prior and full covariance, on the first 60,000 rows of Cover Type
permuted by seed 0 (class 2 against the rest, 54 features, standardised, and a constant), cut into K parts of
equal size. Without ``--data-dir``, or with ``--small``, on the breast cancer data.

Ways: *merged once*, the sum of the natural parameters of K streams (NGVI with Fisher curvature; R-VGA);
*synchronous* rounds with damping .5 and undamped; *sequential* rounds, undamped; *asynchronous* changes with
damping .5, where each machine takes a log-normal time (of scale 1/2) for a refit and reads the posterior of
that moment when it is done: K changes count as a round.

Columns: *distance*, (m - m*)ᵀ P* (m - m*) / d to the batch posterior N(m*, P*^-1); *of mode*, the same to the
mode of the posterior and Laplace's precision; *loss*, mean log loss of other rows (20,000) at the posterior
mean; *elbo*, that of the posterior before the round; *up* and *down*, megabytes that all machines have sent and
received so far; *late*, of asynchronous rounds, the mean number of changes that entered between the posterior
that a change was refitted from and its arrival.

Writes ``partitioned.csv``, ``partitioned.txt`` and ``partitioned.png``.

    python tests/benchmarks/partitioned.py --data-dir ../shared/data
"""

import argparse
import heapq
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from implicit_step import mode
from provenance import describe
from sklearn.datasets import load_breast_cancer

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
LOGISTIC = nt.expectations.logistic()
DAMPED, UNDAMPED = (nt.online.partitioned(LOGISTIC, damping=rho) for rho in (0.5, 1.0))
STREAMS = {
    "merged once, ngvi(fisher)": nt.online.ngvi(curvature="fisher"),
    "merged once, rvga": nt.online.rvga(),
}


def standardise(x, num_train):
    train = x[:num_train]
    scale = train.std(axis=0)
    x = (x - train.mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def cover_type(folder, num_train, num_test):
    """Lodgepole pine against other trees."""
    with np.load(folder / "covtype.npz") as file:
        at = np.random.default_rng(0).permutation(file["y"].size)[
            : num_train + num_test
        ]
        areas, soils = (
            np.eye(4)[file["wilderness"][at] - 1],
            np.eye(40)[file["soil"][at] - 1],
        )
        x = np.concatenate([file["numeric"][at].astype(float), areas, soils], axis=1)
        y = np.where(file["y"][at] == 2, 1.0, -1.0)
    return standardise(x, num_train), y, num_train


def breast_cancer(num_train):
    """Benign against malign, permuted by seed 0."""
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    return (
        standardise(x[order], num_train),
        np.where(y[order] == 1, 1.0, -1.0),
        num_train,
    )


class Problem:
    """Rows, their batch posterior, and what a posterior is measured by."""

    def __init__(self, x, y, num_train):
        self.x, self.y = x[:num_train], y[:num_train]
        self.test = x[num_train:], y[num_train:]
        self.d = x.shape[1]
        self.prior = nt.gaussian.families.FullRank(jnp.zeros(self.d), jnp.eye(self.d))
        rule = nt.online.rvga()
        start, _ = nt.online.run(rule, LOGISTIC, rule.init(self.prior), self.x, self.y)
        init = nt.gaussian.families.family_of(self.prior).canonical(start.posterior)
        f = nt.gaussian.descent.objective(LOGISTIC, self.prior, self.x, self.y)
        self.batch = nt.gaussian.descent.minimise(
            f, init, tolerance=1e-3, max_evaluations=300
        )
        self.mode, precision = mode("logistic", self.x, self.y)
        self.half = np.linalg.cholesky(precision)
        self.loc, self.root = (
            np.asarray(self.batch.posterior.loc),
            np.asarray(self.batch.posterior.factor),
        )

    def shards(self, num_parts):
        """Rows of each machine."""
        parts = np.array_split(self.x, num_parts), np.array_split(self.y, num_parts)
        return list(zip(*parts, strict=True))

    def score(self, q):
        """Distance to the batch posterior, and log loss of other rows."""
        loc = np.asarray(q.loc)
        if not np.all(np.isfinite(loc)):
            return {"distance": np.nan, "of mode": np.nan, "loss": np.nan}
        x, y = self.test
        distance = np.sum(np.linalg.solve(self.root, loc - self.loc) ** 2) / self.d
        of_mode = np.sum((self.half.T @ (loc - self.mode)) ** 2) / self.d
        return {
            "distance": distance,
            "of mode": of_mode,
            "loss": np.mean(np.logaddexp(0.0, -y * (x @ loc))),
        }


def merged_once(problem, num_parts):
    """Streams of all machines, added up."""
    rows = []
    for way, rule in STREAMS.items():
        start, total = rule.init(problem.prior), None
        for shard in problem.shards(num_parts):
            state, _ = nt.online.run(rule, LOGISTIC, start, *shard)
            total = state if total is None else nt.online.merge(rule, total, state)
        size = num_parts * len(nt.online.to_bytes(total)) / 1e6
        rows.append(
            {
                "way": way,
                "round": 1,
                "up": size,
                "down": 0.0,
                **problem.score(total.posterior),
            }
        )
    return rows


def rounds(problem, num_parts, way, pvi, num_rounds, *, sequential=False):
    """Synchronous or sequential rounds."""
    rows, shards = [], problem.shards(num_parts)
    state = pvi.init(problem.prior, num_parts)
    factors = [pvi.factor(state, k) for k in range(num_parts)]
    up = num_parts * len(nt.online.to_bytes(factors[0].change)) / 1e6
    down = num_parts * len(nt.online.to_bytes(state)) / 1e6
    for number in range(1, num_rounds + 1):
        before, expected = state.posterior, 0.0
        for k, shard in enumerate(shards):
            try:
                factors[k] = pvi.refit(factors[k], state, *shard)
            except ValueError:
                # Undamped rounds may lead to where the expected loss is beyond the dtype.
                return rows
            expected += float(factors[k].change.expected_loss)
            if sequential:
                state = pvi.combine(state, factors[k].change)
        if not sequential:
            state = pvi.combine(state, [factor.change for factor in factors])
        kl = float(nt.gaussian.families.family_of(before).kl(before, problem.prior))
        row = {
            "way": way,
            "round": number,
            "elbo": -expected - kl,
            "up": number * up,
            "down": number * down,
        }
        rows.append(
            {**row, "rejected": int(state.rejected), **problem.score(state.posterior)}
        )
    return rows


def asynchronous(problem, num_parts, pvi, num_rounds):
    """Changes as they come, of machines that take different times."""
    rng, rows, shards = np.random.default_rng(1), [], problem.shards(num_parts)
    state = pvi.init(problem.prior, num_parts)
    factors = [pvi.factor(state, k) for k in range(num_parts)]
    up = len(nt.online.to_bytes(factors[0].change)) / 1e6
    down = len(nt.online.to_bytes(state)) / 1e6
    waiting, arrived, late = [], 0, []

    def start(k, now):
        factors[k] = pvi.refit(factors[k], state, *shards[k])
        heapq.heappush(waiting, (now + rng.lognormal(0.0, 0.5), k, arrived))

    for k in range(num_parts):
        start(k, 0.0)
    while arrived < num_rounds * num_parts:
        now, k, read = heapq.heappop(waiting)
        state = pvi.combine(state, factors[k].change)
        late.append(arrived - read)
        arrived += 1
        if arrived % num_parts == 0:
            row = {
                "way": "asynchronous, .5",
                "round": arrived // num_parts,
                "up": arrived * up,
            }
            row |= {
                "down": (arrived + num_parts) * down,
                "late": np.mean(late),
                "rejected": int(state.rejected),
            }
            rows.append({**row, **problem.score(state.posterior)})
            late = []
        start(k, now)
    return rows


def draw(table, path):
    """Distance against rounds."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    numbers = sorted(table["K"].unique())
    figure, axes = plt.subplots(
        1, len(numbers), figsize=(3.2 * len(numbers), 3.4), sharey=True, squeeze=False
    )
    for axis, number in zip(axes[0], numbers, strict=True):
        part = table[table["K"] == number]
        for place, way in enumerate(part["way"].unique()):
            rows = part[part["way"] == way]
            if way in STREAMS:
                style = "--" if "ngvi" in way else ":"
                axis.axhline(
                    rows["distance"].iloc[0], color="k", linestyle=style, label=way
                )
            else:
                axis.plot(
                    rows["round"],
                    rows["distance"],
                    "o-",
                    markersize=3,
                    color=f"C{place}",
                    label=way,
                )
        axis.axhline(1.0, color="0.8", zorder=0)
        axis.set(
            yscale="log", ylim=(1e-4, 1e4), xlabel="round", title=f"{number} machines"
        )
    axes[0, 0].set_ylabel("squared distance to the batch posterior / d")
    axes[0, -1].legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main():
    """Run all ways and write table and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few rows and machines")
    parser.add_argument("--data-dir", type=Path, help="folder with covtype.npz")
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the results"
    )
    options = parser.parse_args()
    if options.small and options.output.resolve() == DOCS:
        parser.error("--small needs an --output other than the committed results")
    jax.config.update("jax_enable_x64", True)
    # The last rows of a stream that jumps are no news here.
    warnings.simplefilter("ignore", nt.online.StreamWarning)
    large = options.data_dir is not None and not options.small
    data = cover_type(options.data_dir, 60_000, 20_000) if large else breast_cancer(400)
    num_rounds, numbers = (
        (10, (2, 8, 32, 128)) if large else (3, (2,) if options.small else (2, 8))
    )
    problem = Problem(*data)
    rows = []
    for number in numbers:
        found = merged_once(problem, number)
        found += rounds(problem, number, "synchronous, .5", DAMPED, num_rounds)
        found += rounds(problem, number, "synchronous, undamped", UNDAMPED, num_rounds)
        found += rounds(
            problem,
            number,
            "sequential, undamped",
            UNDAMPED,
            num_rounds,
            sequential=True,
        )
        found += asynchronous(problem, number, DAMPED, num_rounds)
        rows += [{"K": number, **row} for row in found]
        print(
            pd.DataFrame(found).to_string(
                index=False, float_format=lambda v: f"{v:.4g}"
            ),
            flush=True,
        )
    table = pd.DataFrame(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "partitioned.csv", index=False, float_format="%.5g")
    draw(table, options.output / "partitioned.png")
    x, y = problem.test
    text = describe(
        f"{len(problem.y)} rows, {len(y)} held out, d = {problem.d}; float64; {num_rounds} rounds"
    )
    batch = np.mean(np.logaddexp(0.0, -y * (x @ problem.loc)))
    text += (
        f"log loss of the held-out rows at the batch posterior's mean: {batch:.5f}\n"
    )
    evaluations, rest = (
        int(problem.batch.num_evaluations),
        float(problem.batch.stationarity),
    )
    text += (
        f"{evaluations} evaluations of the batch fit, stationarity {rest:.2g} nats\n"
    )
    last = table[table["round"].isin([1, 2, 3, 5, 10])]
    (options.output / "partitioned.txt").write_text(
        text + last.to_string(index=False, float_format=lambda v: f"{v:.4g}") + "\n"
    )


if __name__ == "__main__":
    main()
