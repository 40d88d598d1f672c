"""The error bars of ``check_fit`` on familiar models, beside NUTS.

Default fits of two guides, checked by default. The reference is NUTS (its means and standard deviations are kept
with their effective sample sizes): a bound is violated where it is below the error of the fit less three standard
errors of NUTS.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "real_models"))

import jax
import numpy as np
import pandas as pd
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from provenance import describe
from zoo import EXAMPLES

import numpyro_tempered as nt

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
GUIDES = {"mean field": AutoNormal, "full": AutoMultivariateNormal}


def reference_of(example, args, seed, num_samples):
    """Means, standard deviations and effective sample sizes of all numbers of the latents, by NUTS."""
    kernel = NUTS(example.model, target_accept_prob=0.95)
    options = {"num_chains": 4, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=num_samples, num_samples=num_samples, **options)
    mcmc.run(jax.random.key(seed), *args)
    draws = mcmc.get_samples(group_by_chain=True)
    return {
        name: np.asarray(values).reshape(4, num_samples, -1)
        for name, values in draws.items()
    }


def moments_of(check, draws):
    """The moments in the order of a check's rows."""
    names = nt.table(check).index
    sites = dict.fromkeys(name.split("[")[0] for name in names)
    values = np.concatenate([draws[site] for site in sites], axis=2)
    flat = values.reshape(-1, values.shape[2])
    ess = np.array(
        [effective_sample_size(values[:, :, k]) for k in range(values.shape[2])]
    )
    return pd.DataFrame(
        {"mean": flat.mean(0), "sd": flat.std(0), "ess": ess}, index=names
    )


def row_of(check, reference):
    """How a check stands to NUTS."""
    table, nuts = nt.table(check), reference
    mean_se, sd_se = (
        nuts["sd"] / np.sqrt(nuts["ess"]),
        nuts["sd"] / np.sqrt(2.0 * nuts["ess"]),
    )
    mean_error, sd_error = (
        (table["mean"] - nuts["mean"]).abs(),
        (table["sd"] - nuts["sd"]).abs(),
    )
    ratio = table["sd"] / nuts["sd"]
    corrected = np.hypot(table["corrected_mean_se"], mean_se)
    z = (table["corrected_mean"] - nuts["mean"]).abs() / corrected
    at = int(np.abs(np.log(ratio)).to_numpy().argmax())
    return {
        "latents": len(table),
        "status": check.status,
        "drawn from": check.reference,
        "Pareto k": check.divergences.pareto_k,
        "k there": check.reference_divergences.pareto_k,
        "D2 bound there": check.reference_divergences.d2_bound,
        "mean violations": int(
            (mean_error - 3.0 * mean_se > table["mean_bound"]).sum()
        ),
        "sd violations": int((sd_error - 3.0 * sd_se > table["sd_bound"]).sum()),
        "largest error of a mean in sds": float((mean_error / nuts["sd"]).max()),
        "its bound": float((table["mean_bound"] / nuts["sd"]).max()),
        "worst sd over NUTS'": float(ratio.iloc[at]),
        "corrected": float((table["corrected_sd"] / nuts["sd"]).iloc[at]),
        "corrected means within 3 se": float((z < 3.0).mean())
        if z.notna().any()
        else np.nan,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="take the moments of NUTS that are in the results",
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    names = (
        ["logistic regression"]
        if options.small
        else [k for k, e in EXAMPLES.items() if e.is_available]
    )
    known = (
        pd.read_csv(RESULTS / "fit_checks_real_nuts.csv", index_col="number")
        if options.reuse
        else None
    )
    rows, references = [], []
    for name in names:
        example = EXAMPLES[name]
        args = example.data()
        draws = (
            None
            if known is not None
            else reference_of(
                example, args, options.seed, 300 if options.small else 2000
            )
        )
        for label, guide in GUIDES.items():
            began = time.perf_counter()
            try:
                fit = nt.fit_svi(
                    jax.random.key(options.seed),
                    example.model,
                    guide,
                    *args,
                    progress_bar=False,
                )
                seconds = time.perf_counter() - began
                began = time.perf_counter()
                check = nt.check_fit(jax.random.key(options.seed + 1), fit)
            except (ValueError, TypeError) as error:
                rows.append(
                    {
                        "model": name,
                        "guide": label,
                        "status": f"refused: {str(error)[:60]}",
                    }
                )
                print(rows[-1], flush=True)
                continue
            reference = (
                moments_of(check, draws)
                if known is None
                else known[known["model"] == name].drop(columns="model")
            )
            costs = {
                "fit, seconds": seconds,
                "check, seconds": time.perf_counter() - began,
            }
            rows.append(
                {"model": name, "guide": label, **row_of(check, reference), **costs}
            )
            print(rows[-1], flush=True)
        references.append(reference.assign(model=name))
    table = pd.DataFrame(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(
        options.output / "fit_checks_real.csv", index=False, float_format="%.3g"
    )
    kept = pd.concat(references).rename_axis("number").reset_index().set_index("model")
    kept.to_csv(options.output / "fit_checks_real_nuts.csv", float_format="%.5g")
    sizes = f"NUTS of 4 x 2,000 draws, checks of 4,000 draws, seed {options.seed}"
    (options.output / "fit_checks_real.txt").write_text(
        f"{describe(sizes)}\n{table.to_string(index=False)}\n"
    )


if __name__ == "__main__":
    main()
