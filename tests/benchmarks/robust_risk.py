"""Regressions where some outcomes are of another process: powers, divergences and another model.

Outcomes y = x'b + N(0, 1) with an intercept, n = 200, d = 5, of which a tenth is shifted by 8 or 4 standard
deviations of the noise, or has twenty times its scale. Each way fits coefficients and noise by ``fit_gaussian``;
its risk is that of predictions of data that are not shifted: the expected square of their error, and minus their
expected log-density at the fitted noise. Ratios are to those of the Normal model on the data before the shift.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer.autoguide import AutoMultivariateNormal
from provenance import describe
from scipy import stats

import numpyro_tempered as nt

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
N, D, SEED = 200, 5, 0
COEF = np.array([1.0, -2.0, 0.5, 0.0, 3.0])
ETA = nt.expectations.gauss_hermite(predictor="eta")


def predictor(x):
    coef = numpyro.sample("coef", dist.Normal(0.0, 10.0).expand([D]).to_event(1))
    return numpyro.deterministic("eta", x @ coef), numpyro.sample(
        "sigma", dist.HalfNormal(5.0)
    )


def normal(x, y):
    eta, sigma = predictor(x)
    numpyro.sample("y", dist.Normal(eta, sigma), obs=y)


def student(x, y):
    eta, sigma = predictor(x)
    numpyro.sample("y", dist.StudentT(4.0, eta, sigma), obs=y)


WAYS = {
    "Normal": normal,
    "Normal, alpha .1": nt.temper(normal, alpha=0.1),
    "Student-t, 4 degrees": student,
    "robust, beta .1": nt.robust(normal, 0.1, unit=1.0),
    "robust, beta .3": nt.robust(normal, 0.3, unit=1.0),
    "robust, beta .5": nt.robust(normal, 0.5, unit=1.0),
    "robust, beta .3, unit 10": nt.robust(normal, 0.3, unit=10.0),
    "robust, beta .3, unit .1": nt.robust(normal, 0.3, unit=0.1),
}


def outcomes(rng, case, clean):
    """The outcomes, with a tenth of them wrong."""
    y, wrong = clean.copy(), rng.choice(N, N // 10, replace=False)
    if case == "noise times 20":
        y[wrong] += 20.0 * rng.normal(size=len(wrong))
    elif case != "none":
        y[wrong] += float(case.removeprefix("shifted by "))
    return y


def risks(fit):
    """Squared error and minus log-density of predictions of new data, and the coverage of 95 % intervals."""
    q = fit.convergence.posterior
    loc, covariance = (
        np.asarray(q.loc, np.float64),
        np.asarray(q.scale_tril @ q.scale_tril.T, np.float64),
    )
    places = slice(0, D)  # sites are in the order of their names
    error = loc[places] - COEF
    sigma = float(fit.guide.median(fit.params)["sigma"])
    excess = float(error @ error)
    log_loss = (
        np.log(sigma) + 0.5 * np.log(2.0 * np.pi) + 0.5 * (1.0 + excess) / sigma**2
    )
    sds = np.sqrt(np.diag(covariance)[places])
    return (
        1.0 + excess,
        excess,
        log_loss,
        np.mean(np.abs(error) < stats.norm.ppf(0.975) * sds),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    repeats = 1 if options.small else 40
    cases = ["none", "shifted by 8", "shifted by 4", "noise times 20"]
    cases, ways = (
        (cases[1:2], list(WAYS)[:5:4]) if options.small else (cases, list(WAYS))
    )
    rows = []
    for repeat in range(repeats):
        rng = np.random.default_rng([SEED, repeat])
        x = np.column_stack([np.ones(N), rng.normal(size=(N, D - 1))])
        clean = x @ COEF + rng.normal(size=N)
        data = {
            case: outcomes(np.random.default_rng([SEED, repeat, 1]), case, clean)
            for case in cases
        }
        for case, y in {"before": clean, **data}.items():
            for way in ways if case != "before" else ["Normal"]:
                args = (
                    jax.random.key(repeat),
                    WAYS[way],
                    AutoMultivariateNormal,
                    jnp.asarray(x),
                    jnp.asarray(y),
                )
                fit = nt.fit_gaussian(*args, expectation=ETA)
                names = ("squared error", "excess", "log loss", "coverage")
                rows.append(
                    {
                        "wrong": case,
                        "way": way,
                        **dict(zip(names, risks(fit), strict=True)),
                        "converged": fit.converged,
                    }
                )
    means = pd.DataFrame(rows).groupby(["wrong", "way"], sort=False).mean()
    reference = means.loc[("before", "Normal")]
    table = means.drop(index="before")
    for name in ("squared error", "excess"):
        table[name] = table[name] / reference[name]
    table["log loss"] = table["log loss"] - reference["log loss"]
    table = table.rename(
        columns={
            "squared error": "risk, of clean's",
            "excess": "of which beyond noise",
            "log loss": "nats more",
        }
    ).reset_index()
    options.output.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.output / "robust_risk.csv", index=False, float_format="%.3g")
    sizes = f"n = {N}, d = {D}, {repeats} repetitions, seed {SEED}"
    text = table.to_string(index=False, float_format="%.3f")
    (options.output / "robust_risk.txt").write_text(f"{describe(sizes)}\n{text}\n")
    print(text)


if __name__ == "__main__":
    main()
