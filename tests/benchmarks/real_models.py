"""Models of NumPyro's examples and Stan's case studies, with and without ``temper``.

Each model is sampled by NUTS and fitted by SVI undecorated, at alpha = 1 and at alpha = 0.5 with the same
key.
The time ratio is that of one evaluation of the potential energy and its gradient at a posterior draw, alpha =
0.5 to undecorated, in CPU seconds by turns as in ``overhead.py``. Writes ``real_models.csv``.

    python tests/benchmarks/real_models.py
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real_models"))

import jax
import numpy as np
import pandas as pd
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.util import potential_energy
from numpyro.optim import Adam
from overhead import ratios, take_turns
from provenance import describe
from zoo import EXAMPLES

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
ALPHA = 0.5
SMALL = ("mixture, marginalize",)


def nuts(model, args, num_warmup, num_samples):
    """The MCMC after its run."""
    mcmc = MCMC(
        NUTS(model), num_warmup=num_warmup, num_samples=num_samples, progress_bar=False
    )
    mcmc.warmup(jax.random.key(0), *args)
    mcmc.run(jax.random.key(1), *args, extra_fields=("num_steps", "diverging"))
    return mcmc


def leapfrog(model, point, args):
    """What a leapfrog step evaluates, with its arguments."""
    return jax.value_and_grad(
        lambda point, *args: potential_energy(model, args, {}, point)
    ), (point, *args)


def fit(model, args, num_steps):
    """Parameters and losses of SVI with AutoNormal."""
    svi = SVI(model, AutoNormal(model), Adam(0.02), Trace_ELBO())
    result = svi.run(jax.random.key(2), num_steps, *args, progress_bar=False)
    return {**result.params, "losses": result.losses}


def same(*trees):
    """Whether all are equal, bit for bit."""
    leaves = [jax.tree.leaves(tree) for tree in trees]
    return all(
        np.array_equal(value, first)
        for other in leaves[1:]
        for value, first in zip(other, leaves[0], strict=True)
    )


def measure(name, num_warmup, num_samples, num_steps, num_rounds):
    """One row of the table."""
    example = EXAMPLES[name]
    args = example.data()
    models = {
        "plain": example.model,
        1.0: nt.temper(example.model),
        ALPHA: nt.temper(example.model, ALPHA),
    }
    runs = {
        alpha: nuts(model, args, num_warmup, num_samples)
        for alpha, model in models.items()
    }
    draws = {alpha: mcmc.get_samples() for alpha, mcmc in runs.items()}
    fields = {alpha: mcmc.get_extra_fields() for alpha, mcmc in runs.items()}
    point = runs["plain"].last_state.z
    times = take_turns(
        {alpha: leapfrog(models[alpha], point, args) for alpha in ("plain", ALPHA)},
        num_rounds,
    )
    time_ratio, *_ = ratios(times, ALPHA, "plain", 10)
    fits = {alpha: fit(model, args, num_steps) for alpha, model in models.items()}
    finite = all(
        np.all(np.isfinite(leaf))
        for leaf in jax.tree.leaves([*draws.values(), *fits.values()])
    )
    summary = {
        alpha: np.asarray(example.summary(draws[alpha]), float)
        for alpha in (1.0, ALPHA)
    }
    mean = {alpha: float(value.mean()) for alpha, value in summary.items()}
    sd = {alpha: float(value.std(ddof=1)) for alpha, value in summary.items()}
    return {
        "model": name,
        "data": example.source,
        "n": example.num_data,
        "quantity": example.headline,
        "mean, alpha 1": mean[1.0],
        "sd, alpha 1": sd[1.0],
        "mean, alpha 1/2": mean[ALPHA],
        "sd, alpha 1/2": sd[ALPHA],
        "sd ratio": sd[ALPHA] / sd[1.0],
        "divergences, 1": int(fields[1.0]["diverging"].sum()),
        "divergences, 1/2": int(fields[ALPHA]["diverging"].sum()),
        "time ratio": time_ratio,
        "NUTS identical at 1": "yes" if same(draws["plain"], draws[1.0]) else "no",
        "SVI identical at 1": "yes" if same(fits["plain"], fits[1.0]) else "no",
        "finite": "yes" if finite else "no",
    }


def main():
    """Measure every model whose data are here, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small",
        action="store_true",
        help="one model, short chains, nothing written by default",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        help="folder for the table; docs/results, or none if small",
    )
    options = parser.parse_args()
    num_warmup, num_samples, num_steps, num_rounds = (
        (50, 50, 100, 20) if options.small else (500, 500, 2000, 300)
    )
    rows = []
    for name in SMALL if options.small else EXAMPLES:
        if not EXAMPLES[name].is_available:
            print(f"left out, for want of {EXAMPLES[name].file}: {name}")
            continue
        rows.append(measure(name, num_warmup, num_samples, num_steps, num_rounds))
        print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    for column in table.select_dtypes("float"):
        table[column] = table[column].map(lambda value: float(f"{value:.3g}"))
    print(table.to_string(index=False))
    output = options.output or (None if options.small else DOCS)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        table.to_csv(output / "real_models.csv", index=False)
        (output / "real_models.txt").write_text(
            describe(
                f"one chain, {num_warmup} warm-up, {num_samples} draws, {num_steps} SVI steps, float32"
            )
        )


if __name__ == "__main__":
    main()
