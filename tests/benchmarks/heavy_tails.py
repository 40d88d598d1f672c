"""Whether guides with the tails of Student's t help, where ``check_fit`` finds the Gaussian ones wanting.

Default fits of familiar models beside NUTS, whose standard deviations are those of ``fit_checks_real.py``, and
of a regression whose posterior is a Student's t. Standard deviations are compared for the latents on the whole
real line, as exponentials have none under Student's t.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real_models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "infer"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np
import pandas as pd
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal
from provenance import describe
from test_student_t_guides import regression, regression_data, regression_posterior
from zoo import EXAMPLES

import numpyro_tempered as nt

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
GUIDES = {
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoMultivariateStudentT, df=5": lambda model: nt.guides.AutoMultivariateStudentT(
        model, df=5.0
    ),
    "AutoMultivariateStudentT, df=7": nt.guides.AutoMultivariateStudentT,
    "AutoMultivariateStudentT, learned": lambda model: (
        nt.guides.AutoMultivariateStudentT(model, df=None)
    ),
    "AutoDiagonalNormal": AutoDiagonalNormal,
    "AutoDiagonalStudentT, df=7": nt.guides.AutoDiagonalStudentT,
    "AutoDiagonalStudentT, learned": lambda model: nt.guides.AutoDiagonalStudentT(
        model, df=None
    ),
}
MODELS = (
    "eight schools, centred",
    "eight schools, non-centred",
    "baseball, partial pooling",
)


def problems(is_small):
    """Name, model, arguments, and the posterior's standard deviations by number."""
    x, y = regression_data(4)
    df, _, scale, _ = regression_posterior(x, y)
    sd = np.sqrt(np.diag(scale) * df / (df - 2.0))
    yield (
        "regression, exact t of 6",
        regression,
        (x, y),
        pd.Series(sd, ["beta[0]", "beta[1]"]),
    )
    nuts = pd.read_csv(RESULTS / "fit_checks_real_nuts.csv").set_index(
        ["model", "number"]
    )["sd"]
    for name in () if is_small else MODELS:
        yield name, EXAMPLES[name].model, EXAMPLES[name].data(), nuts.loc[name]


def timed_fit(guide, model, args, seed):
    began = time.perf_counter()
    fit = nt.fit_svi(jax.random.key(seed), model, guide, *args, progress_bar=False)
    return fit, time.perf_counter() - began


def row_of(guide, model, args, sd, seed):
    """One guide on one model, and the ratio of its standard deviations to those of the posterior."""
    fit, first = timed_fit(guide, model, args, seed)
    _, second = timed_fit(guide, model, args, seed)
    check = nt.check_fit(jax.random.key(seed + 1), fit, reference=None)
    table = nt.table(check)
    df = np.atleast_1d(fit.params.get("auto_df", np.nan))
    row = {
        "converged": fit.converged,
        "steps": fit.convergence.num_steps,
        "ELBO": fit.elbo.value,
        "se": fit.elbo.se,
        "median df": float(np.median(df)),
        "Pareto k": check.divergences.pareto_k,
        "status": check.status,
        "D2 bound": check.divergences.d2_bound,
        "first fit, s": first,
        "second fit, s": second,
    }
    return row, table["sd"] / sd.loc[table.index]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name, model, args, sd in problems(options.small):
        results = {
            label: row_of(guide, model, args, sd, options.seed)
            for label, guide in GUIDES.items()
        }
        ratios = pd.DataFrame(
            {label: ratio for label, (_, ratio) in results.items()}
        ).dropna()
        for label, (row, _) in results.items():
            worst = ratios[label].iloc[
                int(np.abs(np.log(ratios[label])).to_numpy().argmax())
            ]
            rows.append(
                {
                    "model": name,
                    "guide": label,
                    **row,
                    "worst sd over the posterior's": worst,
                }
            )
            print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "heavy_tails.csv", index=False, float_format="%.3g")
    sizes = f"checks of 4,000 draws of the fit alone, seed {options.seed}"
    (options.output / "heavy_tails.txt").write_text(
        f"{describe(sizes)}\n{table.to_string(index=False)}\n"
    )


if __name__ == "__main__":
    main()
