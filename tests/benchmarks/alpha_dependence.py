"""Coverage of intervals at the power of each criterion, where rows depend on each other.

Linear regressions, five covariates, noise of known variance 1, a flat prior: nominal 95% intervals of single
coefficients. Rows are

* independent;
* a series: covariates and errors autoregressive with coefficient .6, or errors alone;
* groups of five rows, covariates and errors of which share half of their variance.

The criteria take rows for independent, or are told of the dependence, by ``block="auto"`` or ``groups=``: the
powers of the sandwich by the library's functions mapped over data sets, those of resamples in closed form.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from provenance import describe
from scipy.stats import chi2, norm

from numpyro_tempered.select.alpha.dependence import Dependence, resample_counts
from numpyro_tempered.select.alpha.lyddon import matched_power
from numpyro_tempered.select.alpha.magnitude import magnitude_adjustment
from numpyro_tempered.select.alpha.sandwich import sandwich

jax.config.update("jax_enable_x64", True)

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
DIM, LEVEL, GROUP_SIZE = 5, 0.95, 5
# Coefficients of covariates and errors along the series, and shares of their variance that groups have in common.
DESIGNS = {
    "independent rows": (0.0, 0.0, 0.0),
    "series": (0.6, 0.6, 0.0),
    "series, errors alone": (0.0, 0.6, 0.0),
    "groups of five": (0.0, 0.0, 0.5),
}


def normal(rng, num_data, dim, coefficient, share):
    """Normal values of unit variance, autoregressive along the rows or with a share in common in each group."""
    values = rng.normal(size=(num_data, dim))
    for t in range(1, num_data) if coefficient else ():
        values[t] = (
            coefficient * values[t - 1] + np.sqrt(1.0 - coefficient**2) * values[t]
        )
    common = np.repeat(
        rng.normal(size=(num_data // GROUP_SIZE, dim)), GROUP_SIZE, axis=0
    )
    return np.sqrt(share) * common + np.sqrt(1.0 - share) * values


def draw(design, num_data, seed):
    """Covariates and errors; the coefficients are 0."""
    rng = np.random.default_rng([seed, num_data, list(DESIGNS).index(design)])
    of_x, of_errors, share = DESIGNS[design]
    x = normal(rng, num_data, DIM, of_x, share)
    return x, normal(rng, num_data, 1, of_errors, share)[:, 0]


def powers_of_sandwich(x, y, dependence):
    """Powers of ``lyddon`` and ``magnitude``, and the lags of a series, of many data sets."""

    def one(data):
        x, y = data
        of_losses = sandwich(
            lambda beta: 0.5 * jnp.square(y - x @ beta), jnp.zeros(DIM), dependence
        )
        curvature, variance = of_losses.curvature, of_losses.variance
        return (
            matched_power(curvature, variance),
            magnitude_adjustment(curvature, variance),
            of_losses.lags,
        )

    return [
        np.asarray(part)
        for part in jax.jit(lambda *data: jax.lax.map(one, data, batch_size=50))(x, y)
    ]


def powers_of_resamples(key, x, y, dependence, lags, num_bootstrap):
    """Powers of ``bootstrap_fisher`` and ``gpc``, under a flat prior, of one data set."""
    counts = np.asarray(resample_counts(key, num_bootstrap, dependence, int(lags)))
    hessian = x.T @ x
    best = np.linalg.solve(hessian, x.T @ y)
    of_resamples = np.einsum("bn,ni,nj->bij", counts, x, x, optimize=True)
    slopes = (counts * (y - x @ best)) @ x
    shifts = np.linalg.solve(of_resamples, slopes[..., None])[..., 0]
    fisher = num_bootstrap * np.trace(hessian) / np.sum(np.square(shifts @ hessian))
    distances = np.einsum("bi,bij,bj->b", shifts, of_resamples, shifts)
    return fisher, chi2.ppf(LEVEL, DIM) / np.quantile(distances, LEVEL)


def study(design, num_data, num_sets, num_bootstrap, num_resampled):
    """Mean power and coverage of each criterion, with and without being told of the dependence."""
    sets = [draw(design, num_data, seed) for seed in range(num_sets)]
    x, y = (np.stack(part) for part in zip(*sets, strict=True))
    inverse = np.linalg.inv(np.swapaxes(x, 1, 2) @ x)
    z = np.einsum("sij,snj,sn->si", inverse, x, y) / np.sqrt(
        np.diagonal(inverse, axis1=1, axis2=2)
    )
    if design.startswith("groups"):
        told = Dependence(num_data, np.arange(num_data) // GROUP_SIZE)
    else:
        told = Dependence(num_data, None, "auto")
    alphas = {("alpha = 1", "-"): np.ones(num_sets)}
    for word, dependence in (("no", Dependence(num_data)), ("yes", told)):
        lyddon, magnitude, lags = powers_of_sandwich(x, y, dependence)
        alphas |= {("lyddon", word): lyddon, ("magnitude", word): magnitude}
        keys = jax.random.split(jax.random.key(0), num_resampled)
        pairs = [
            powers_of_resamples(key, x[k], y[k], dependence, lags[k], num_bootstrap)
            for k, key in enumerate(keys)
        ]
        fisher, gpc = np.transpose(pairs)
        alphas |= {("bootstrap_fisher", word): fisher, ("gpc", word): gpc}
    rows = []
    for (criterion, word), alpha in alphas.items():
        covers = np.mean(
            np.abs(z[: len(alpha)]) * np.sqrt(alpha)[:, None]
            < norm.ppf(0.5 + LEVEL / 2),
            axis=1,
        )
        rows.append(
            {
                "rows": design,
                "n": num_data,
                "criterion": criterion,
                "told": word,
                "sets": len(alpha),
                "alpha, geometric mean": np.exp(np.mean(np.log(alpha))),
                "coverage": np.mean(covers),
                "coverage se": np.std(covers, ddof=1) / np.sqrt(len(covers)),
            }
        )
    return rows


def by_criterion(table):
    """Coverage alone, with a column for each criterion."""
    index = ["rows", "n", "told"]
    wide = table[table["told"] != "-"].pivot_table(
        "coverage", index, "criterion", sort=False
    )
    untempered = table[table["told"] == "-"].set_index(["rows", "n"])["coverage"]
    wide.insert(
        0, "alpha = 1", untempered.reindex(wide.index.droplevel("told")).to_numpy()
    )
    return wide.reset_index().sort_values(["n", "told"], kind="stable")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    sizes = (100,) if options.small else (100, 400, 1000)
    num_sets, num_bootstrap, num_resampled = (
        (40, 50, 10) if options.small else (1000, 200, 400)
    )
    rows = []
    for design in DESIGNS:
        for num_data in sizes:
            rows += study(design, num_data, num_sets, num_bootstrap, num_resampled)
    table = pd.DataFrame(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    coverage = by_criterion(table)
    coverage = pd.concat([coverage[coverage["rows"] == design] for design in DESIGNS])
    coverage.to_csv(
        options.output / "alpha_dependence.csv", index=False, float_format="%.3f"
    )
    text = table.to_string(index=False, float_format="%.3f")
    described = describe(
        f"d = {DIM}, {num_sets} data sets, {num_bootstrap} resamples of {num_resampled}, float64"
    )
    (options.output / "alpha_dependence.txt").write_text(f"{described}\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
