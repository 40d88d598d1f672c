"""What a first and a second call cost in a fresh process, and a first one with programs of an earlier process.

For each way a process of its own, whose imports do not count. The second call has another key and other data of
the same shapes. "From the cache" is the first call of a process that has the persistent compilation cache of
JAX filled by one before it. Peers are stock NumPyro and scikit-learn; they are named in brackets.
"""

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path

import calls as fresh

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
NUM_ROWS = 500


def regression(number):
    import numpy as np

    rng = np.random.default_rng(number)
    x = rng.normal(size=(NUM_ROWS, 5))
    return x, x @ rng.normal(size=5) + rng.normal(size=NUM_ROWS)


def clusters(number):
    import numpy as np

    rng = np.random.default_rng(number)
    means = np.array([[-4.0, 0.0], [0.0, 3.0], [4.0, 0.0]])
    return means[rng.integers(3, size=NUM_ROWS)] + rng.normal(size=(NUM_ROWS, 2))


def calls():
    """From names to calls of a key and the number of the data."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    import numpyro_tempered as nt

    eta = nt.expectations.gauss_hermite(predictor="eta")

    def model(x, y, scale=3.0):
        beta = numpyro.sample(
            "beta", dist.Normal(0.0, scale).expand([x.shape[1]]).to_event(1)
        )
        with numpyro.plate("n", x.shape[0]):
            numpyro.sample(
                "y", dist.Normal(numpyro.deterministic("eta", x @ beta), 1.0), obs=y
            )

    def svi(key, k):
        stock = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.01), Trace_ELBO())
        return stock.run(key, 3000, *regression(k), progress_bar=False).losses

    def nuts(key, k):
        mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=500, progress_bar=False)
        mcmc.run(key, *regression(k))
        return mcmc.get_samples()["beta"]

    def compare(key, k):
        return nt.compare(
            {
                s: nt.fit_svi(key, model, AutoNormal, *regression(k), s)
                for s in (1.0, 3.0)
            }
        )

    def stream(key, k):
        online = nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, expectation=eta)
        return online.run(key, *map(jnp.asarray, regression(k)))[0].posterior.loc

    def mixture(key, k):
        return nt.mixtures.fit(
            key, clusters(k), nt.mixtures.components.gaussian(2), num_components=3
        ).objective

    def table(key, k):
        return nt.mixtures.select_num_components(
            key,
            clusters(k),
            nt.mixtures.components.gaussian(2),
            num_components=range(1, 9),
        ).num_components

    def sklearn_mixture(key, k):
        from sklearn.mixture import GaussianMixture

        return GaussianMixture(3, n_init=10, random_state=k).fit(clusters(k))

    def sklearn_table(key, k):
        from sklearn.mixture import GaussianMixture

        x = clusters(k)
        return min(
            GaussianMixture(size, n_init=10, random_state=k).fit(x).bic(x)
            for size in range(1, 9)
        )

    def sklearn_pca(key, k):
        from sklearn.decomposition import PCA

        return PCA(2).fit(regression(k)[0])

    def sklearn_lasso(key, k):
        from sklearn.linear_model import LassoCV

        return LassoCV().fit(*regression(k))

    return {
        "[NumPyro's SVI.run]": svi,
        "[NumPyro's NUTS]": nuts,
        "fit_svi": lambda key, k: (
            nt.fit_svi(key, model, AutoNormal, *regression(k)).losses
        ),
        "fit_gaussian": lambda key, k: (
            nt.fit_gaussian(
                key, model, AutoNormal, *regression(k), expectation=eta
            ).losses
        ),
        "compare, two fits": compare,
        "select_alpha": lambda key, k: (
            nt.select_alpha(key, model, AutoNormal, *regression(k)).alpha
        ),
        "temper_path": lambda key, k: nt.temper_path(
            key, model, AutoNormal, *regression(k)
        ),
        "OnlineVI.run": stream,
        "[scikit-learn's LassoCV]": sklearn_lasso,
        "sparse.fit_linear": lambda key, k: nt.sparse.fit_linear(
            key, *regression(k), inclusion_prob=0.5, slab_scale=1.0
        ),
        "[scikit-learn's PCA]": sklearn_pca,
        "ppca.fit": lambda key, k: nt.ppca.fit(key, regression(k)[0], num_factors=2),
        "[scikit-learn's GaussianMixture]": sklearn_mixture,
        "mixtures.fit": mixture,
        "[scikit-learn's, K = 1 to 8]": sklearn_table,
        "select_num_components, K = 1 to 8": table,
    }


SMALL = ("fit_svi", "[scikit-learn's PCA]")


def measure(way):
    """The calls of one process, as rows."""
    call = calls()[way]
    with warnings.catch_warnings():
        # Of convergence; what a call costs does not depend on it.
        warnings.simplefilter("ignore")
        return fresh.measure(call, (1, 2), lambda number: (number,))


def run(way, cache=""):
    """:func:`measure` in a process of its own, without a cache on disk unless there is a folder for it."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return fresh.in_new_process(__file__, way, **environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--one", metavar="WAY")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return

    import pandas as pd
    from provenance import describe

    rows = []
    for way in SMALL if options.small else calls():
        first, second = run(way)
        row = {
            "way": way,
            "first call": first["seconds"],
            "second call": second["seconds"],
        }
        row |= {
            "programs": first["programs"],
            "programs of the second": second["programs"],
        }
        if not way.startswith("[scikit"):
            with tempfile.TemporaryDirectory() as cache:
                run(way, cache)
                row["first, from the cache"] = run(way, cache)[0]["seconds"]
        rows.append(row)
        print(row, flush=True)
    table = pd.DataFrame(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    stem = f"first_calls_py{sys.version_info.major}{sys.version_info.minor}"
    table.to_csv(options.output / f"{stem}.csv", index=False, float_format="%.3g")
    text = table.to_string(index=False, float_format="%.2f", na_rep="")
    sizes = f"n = {NUM_ROWS}, d = 5 (mixtures: d = 2, 10 starts), defaults, one process for each number"
    (options.output / f"{stem}.txt").write_text(f"{describe(sizes)}\n{text}\n")


if __name__ == "__main__":
    main()
