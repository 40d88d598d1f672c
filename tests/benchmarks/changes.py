"""Changes flagged from the weights of windows, and by ADWIN on classification errors.

Streams: two Gaussian clouds in the plane, x | y ~ N(y a, 2 I) with ‖a‖² = 2, y in {-1, 1}, hinge loss, 10,000
rounds. *flips*: a changes its sign at a quarter, half and three quarters of the rounds. *slow drift*: a turns by
180° from the half to three quarters. *no change*.

Detectors: ``nt.online.detect_changes`` on the weights of ``aggregate_windows()`` after each round, and after
every tenth; ADWIN (Bifet, Gavaldà 2007, as in river, its default confidence 0.002) on the 0/1 errors of the
expert that never forgets, and on those of the aggregate's decisions. The defaults of ``detect_changes`` were set
on other seeds.

Columns: changes *missed*, of all; median and 95 % quantile of the *delay* in rounds, of those that are flagged;
*false* flags in 10,000 rounds, before the first change; *repeats*, flags beyond the first after each change.
Writes ``changes.csv`` and ``changes.txt``.

    python tests/benchmarks/changes.py
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from provenance import describe
from river.drift import ADWIN

import numpyro_tempered as nt
from numpyro_tempered.online.stream import step

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
FIRST_SEED = 100
RULE, HINGE = nt.online.aggregate_windows(), nt.expectations.hinge()


def make_stream(kind, seed, num_rounds):
    """Features, labels and the rounds in which changes begin."""
    rng = np.random.default_rng(seed)
    y = rng.choice([-1.0, 1.0], num_rounds)
    quarter, rounds = num_rounds // 4, np.arange(num_rounds)
    turn, changes = np.zeros(num_rounds), []
    if kind == "flips":
        turn, changes = rounds // quarter % 2, [quarter, 2 * quarter, 3 * quarter]
    elif kind == "slow drift":
        turn, changes = np.clip(rounds / quarter - 2.0, 0.0, 1.0), [2 * quarter]
    angle = np.pi * (turn + 0.25)
    centre = np.sqrt(2.0) * np.column_stack([np.cos(angle), np.sin(angle)])
    return (
        np.sqrt(2.0) * rng.normal(size=(num_rounds, 2)) + y[:, None] * centre,
        y,
        changes,
    )


@jax.jit
def run(x, y):
    """Weights after each round, and margins before it: of the expert that never forgets, and of the decision."""

    def body(state, row):
        never = nt.online.weighted_posteriors(state).posteriors.loc[-1]
        after, _ = step(RULE, HINGE, state, row, None)
        margins = (row[1] * (row[0] @ loc) for loc in (never, state.posterior.loc))
        return after, (nt.online.weights(after), *margins)

    prior = nt.gaussian.families.MeanField(
        jnp.zeros(2, jnp.float32), jnp.ones(2, jnp.float32)
    )
    return jax.vmap(lambda *rows: jax.lax.scan(body, RULE.init(prior), rows)[1])(x, y)


def adwin(errors):
    """Rounds in which ADWIN reports a drift."""
    detector, flags = ADWIN(), []
    for t, error in enumerate(errors):
        detector.update(float(error))
        if detector.drift_detected:
            flags.append(t)
    return np.array(flags, int)


def detectors(weights, never, decision):
    """Flags by detector, in rounds."""
    return {
        "windows": nt.online.detect_changes(weights),
        "windows, every 10 rounds": 10
        * nt.online.detect_changes(weights[9::10], stride=10)
        + 9,
        "ADWIN, expert that never forgets": adwin(never <= 0),
        "ADWIN, decisions": adwin(decision <= 0),
    }


def score(flags, changes, num_rounds):
    """Delays of the changes, NaN for one that is missed; flags before all changes; flags beyond the first."""
    ends = [*changes[1:], num_rounds]
    after = [
        flags[(flags >= change) & (flags < end)]
        for change, end in zip(changes, ends, strict=False)
    ]
    delays = [
        some[0] - change if len(some) else np.nan
        for some, change in zip(after, changes, strict=True)
    ]
    quiet = changes[0] if changes else num_rounds
    false = np.sum(flags < quiet) * 10_000 / quiet
    return delays, false, sum(max(len(some) - 1, 0) for some in after)


def measure(kind, num_seeds, num_rounds):
    """One row for each seed, detector and change; for a stream without change, one."""
    data = [
        make_stream(kind, FIRST_SEED + seed, num_rounds) for seed in range(num_seeds)
    ]
    x, y = (
        jnp.asarray(np.stack([row[i] for row in data]), jnp.float32) for i in range(2)
    )
    weights, never, decision = (np.asarray(leaf) for leaf in run(x, y))
    rows = []
    for seed in range(num_seeds):
        for name, flags in detectors(
            weights[seed], never[seed], decision[seed]
        ).items():
            delays, false, repeats = score(flags, data[seed][2], num_rounds)
            row = {
                "stream": kind,
                "detector": name,
                "seed": FIRST_SEED + seed,
                "false": false,
                "repeats": repeats,
            }
            rows += [
                row | {"change": i, "delay": delay}
                for i, delay in enumerate(delays or [np.nan])
            ]
    return pd.DataFrame(rows)


def summarise(table):
    """One line for each stream and detector."""
    lines = []
    for (kind, name), part in table.groupby(["stream", "detector"], sort=False):
        changes = 0 if kind == "no change" else len(part)
        once = part[part.change == 0]
        lines.append(
            {
                "stream": kind,
                "detector": name,
                "missed": f"{int(part.delay.isna().sum())}/{changes}"
                if changes
                else "",
                "median delay": part.delay.median(),
                "95 %": part.delay.quantile(0.95),
                "false": once.false.mean(),
                "repeats": once.repeats.mean(),
            }
        )
    return pd.DataFrame(lines).set_index(["stream", "detector"])


def main():
    """Run all, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="2 seeds of 4000 rounds")
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the tables"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    num_seeds, num_rounds = (2, 4000) if options.small else (30, 10_000)
    table = pd.concat(
        [
            measure(kind, num_seeds, num_rounds)
            for kind in ("flips", "slow drift", "no change")
        ]
    )
    table.to_csv(options.output / "changes.csv", index=False, float_format="%.6g")
    text = summarise(table).to_string(
        float_format=lambda value: f"{value:.2f}", na_rep=""
    )
    print(text)
    about = describe(
        f"{num_seeds} seeds from {FIRST_SEED}, T = {num_rounds}, 11 windows, float32, river's ADWIN"
    )
    (options.output / "changes.txt").write_text(f"{about}\n{text}\n")


if __name__ == "__main__":
    main()
