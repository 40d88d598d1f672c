"""Whether the error bars of ``check_fit`` hold: fits of conjugate models, pushed off posteriors that are known.

Each fit is that of the default ``fit_svi``. Then its means are shifted by N(0, .3²) standard deviations and its
scales multiplied by exp(N(0, .2²)), so that the errors are of all sizes, and it is checked. A bound that is below
the error of the fit is a violation; an error of a corrected value of more than two standard errors is a miss, of
which one in twenty is right.
"""

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pandas as pd
from matrix.models import MODELS
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from provenance import describe

import numpyro_tempered as nt

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
COUNTS = ["bounds", "mean violations", "sd violations", "estimates", "misses"]
ALPHAS = (0.25, 0.5, 1.0)
GUIDES = {"mean field": AutoNormal, "full": AutoMultivariateNormal}


def model_of(conjugate):
    """The NumPyro model of a row of the matrix."""
    rest = () if conjugate.x is None else (jnp.asarray(conjugate.x, jnp.float32),)

    def model(y):
        values = conjugate.prior()
        values = values if isinstance(values, tuple) else (values,)
        fn = conjugate.likelihood(*values, *rest)
        with numpyro.plate("row", len(y)):
            numpyro.sample("y", fn, obs=y)

    return model


def pushed(params, rng):
    """The parameters of a Gaussian guide, off by random amounts."""
    moved = {}
    for name, value in params.items():
        if name.endswith("_loc"):
            scale = params.get(name.replace("_loc", "_scale"))
            root = params.get(name.replace("_loc", "_scale_tril"))
            noise = jnp.asarray(0.3 * rng.normal(size=value.shape), value.dtype)
            moved[name] = value + (noise * scale if root is None else root @ noise)
        else:
            factor = np.exp(
                0.2
                * rng.normal(
                    size=value.shape if value.ndim < 2 else (value.shape[0], 1)
                )
            )
            moved[name] = value * jnp.asarray(factor, value.dtype)
    return moved


def outcomes(check, moments):
    """Violations and misses of a check, and how loose its bounds are."""
    table = nt.table(check)
    sites = table.index.str.split("[").str[0]
    # A function of the latents, as of a matrix its product, has no row.
    table, names = table[sites.isin(list(moments))], sorted(set(sites) & set(moments))
    mean = np.concatenate([np.ravel(moments[name][0]) for name in names])
    square = np.concatenate([np.ravel(moments[name][1]) for name in names])
    sd = np.sqrt(square - mean**2)
    mean_error, sd_error = np.abs(table["mean"] - mean), np.abs(table["sd"] - sd)
    bounded = table["mean_bound"].notna()
    estimated = table["corrected_mean"].notna()
    z = np.abs(table["corrected_mean"] - mean) / table["corrected_mean_se"]
    return {
        "numbers": len(table),
        "bounds": int(bounded.sum()),
        "estimates": int(estimated.sum()),
        # Of four digits of single precision.
        "mean violations": int((mean_error > table["mean_bound"] + 1e-4 * sd).sum()),
        "sd violations": int((sd_error > table["sd_bound"] + 1e-4 * sd).sum()),
        "misses": int((z > 2.0).sum()),
        "looseness": (table["mean_bound"] / np.maximum(mean_error, 0.02 * sd))[bounded],
    }


def rows(names, alphas, repetitions, seed):
    """A row for each model, power and guide."""
    for name in names:
        conjugate, model = MODELS[name], model_of(MODELS[name])
        y = jnp.asarray(conjugate.y)
        y = y.astype(jnp.float32) if jnp.issubdtype(y.dtype, jnp.floating) else y
        for alpha in alphas:
            for label, guide in GUIDES.items():
                fit = nt.fit_svi(
                    jax.random.key(seed),
                    model,
                    guide,
                    y,
                    alpha=alpha,
                    progress_bar=False,
                )
                rng = np.random.default_rng(seed)
                results = []
                for key in jax.random.split(jax.random.key(seed), repetitions):
                    off = fit._replace(params=pushed(fit.params, rng))
                    check = nt.check_fit(key, off)
                    results.append(
                        {"status": check.status}
                        | outcomes(check, conjugate.moments(alpha))
                    )
                frame = pd.DataFrame(results)
                loose = np.concatenate([np.asarray(v) for v in frame["looseness"]])
                yield {
                    "model": name,
                    "alpha": alpha,
                    "guide": label,
                    "checks": repetitions,
                    "bounded": int((frame["status"] == "bounded").sum()),
                    "estimated": int((frame["status"] == "estimated").sum()),
                    "unreliable": int((frame["status"] == "unreliable").sum()),
                    **frame[COUNTS].sum().to_dict(),
                    "median looseness": float(np.median(loose))
                    if len(loose)
                    else np.nan,
                }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore", nt.warnings.ConvergenceWarning)
    names = [name for name, conjugate in MODELS.items() if conjugate.discrete is None]
    if options.small:
        arguments = (["normal", "linear"], (0.5,), 3)
    else:
        arguments = (
            names,
            ALPHAS,
            -(-1000 // (len(names) * len(ALPHAS) * len(GUIDES))),
        )
    table = []
    for row in rows(*arguments, options.seed):
        table.append(row)
        print(row, flush=True)
    table = pd.DataFrame(table)
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "fit_checks.csv", index=False, float_format="%.3g")
    total = table[["checks", *COUNTS]].sum()
    sizes = f"{total['checks']} checks of 4,000 draws, seed {options.seed}"
    lines = [f"{name}: {value}" for name, value in total.items()]
    (options.output / "fit_checks.txt").write_text(
        "\n".join([describe(sizes), *lines, ""])
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
