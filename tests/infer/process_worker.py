"""Fits of rows that two processes share, or of all rows in one, as numbers that ``test_processes`` compares.

``python process_worker.py PORT PROCESS FOLDER TASK...`` is one of two, of all tasks if none is named; it writes
JSON to the folder, a file for each task.
"""

import functools
import json
import os
import sys
import warnings
from pathlib import Path

NUM_ROWS, GROUPS = 120, (50, 30, 17, 23)
# The row groups of the file that each process reads: 97 rows and 23.
GROUPS_OF = ((0, 1, 2), (3,))


def data():
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 3))
    y = x @ [0.5, -1.0, 0.25] + 0.4 * rng.normal(size=NUM_ROWS)
    blobs = np.concatenate(
        [rng.normal(size=(70, 2)), 0.5 * rng.normal(size=(50, 2)) + [3.0, 2.0]]
    )
    return {
        "x": x,
        "y": y,
        "labels": (y > 0).astype(int),
        "blobs": rng.permutation(blobs),
    }


def write_groups(path):
    """The regression as a Parquet file of unequal row groups."""
    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as parquet

    table = pa.Table.from_pandas(
        pd.DataFrame(data()["x"], columns=list("abc")).assign(y=data()["y"])
    )
    with parquet.ParquetWriter(path, table.schema) as writer:
        start = 0
        for size in GROUPS:
            writer.write_table(table.slice(start, size), row_group_size=size)
            start += size


def regression(x, y, mask=True):
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("rows", x.shape[0]), numpyro.handlers.mask(mask=mask):
        numpyro.sample("y", dist.Normal(x @ weights, sigma), obs=y)


def two_sites(x, y, labels):
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    eta = numpyro.deterministic("eta", x @ weights)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)
        numpyro.sample("labels", dist.Bernoulli(logits=eta), obs=labels)


def classification(x, labels):
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    eta = numpyro.deterministic("eta", x @ weights)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("labels", dist.Bernoulli(logits=eta), obs=labels)


def clusters(x):
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    loc = numpyro.sample("loc", dist.Normal(jnp.array([0.0, 3.0]), 1.0).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        label = numpyro.sample(
            "label", dist.Bernoulli(0.4), infer={"enumerate": "parallel"}
        )
        numpyro.sample("x", dist.Normal(loc[label], 1.0), obs=x[:, 0])


def log_lik_of(data):
    """The log-likelihood group, by whatever name."""
    from numpyro_tempered.report.arviz import LOG_LIK, UNTEMPERED, group_names

    return data[UNTEMPERED if UNTEMPERED in group_names(data) else LOG_LIK]


class Rows(dict):
    """The data, hashable: fits are made once."""

    __hash__ = object.__hash__


@functools.cache
def stochastic_fit(rows, **options):
    """By stochastic gradients; few steps, which cost messages."""
    import jax
    from numpyro.infer.autoguide import AutoNormal

    import numpyro_tempered as nt

    options = {"alpha": 0.5, "num_steps": 300, "num_particles": 100, **options}
    return nt.fit_svi(
        jax.random.key(0), regression, AutoNormal, rows["x"], rows["y"], **options
    )


@functools.cache
def gaussian_fit(rows):
    import jax
    from numpyro.infer.autoguide import AutoMultivariateNormal

    import numpyro_tempered as nt

    guide, expectation = (
        AutoMultivariateNormal,
        nt.expectations.gauss_hermite(predictor="eta"),
    )
    return nt.fit_gaussian(
        jax.random.key(0),
        classification,
        guide,
        rows["x"],
        rows["labels"],
        alpha=0.5,
        expectation=expectation,
    )


def numbers_of(fit):
    return {
        **fit.params,
        "losses": fit.losses,
        **fit.elbo._asdict(),
        "improper": len(fit.elbo.improper),
    }


def task_svi(rows):
    return numbers_of(stochastic_fit(rows))


def task_svi_with_optimiser(rows):
    from numpyro.optim import Adam

    return numbers_of(stochastic_fit(rows, optim=Adam(0.05), num_steps=100))


def task_gaussian(rows):
    return numbers_of(gaussian_fit(rows))


def task_gaussian_by_draws(rows):
    import jax
    from numpyro.infer.autoguide import AutoMultivariateNormal

    import numpyro_tempered as nt

    args = two_sites, AutoMultivariateNormal, rows["x"], rows["y"], rows["labels"]
    return numbers_of(
        nt.fit_gaussian(jax.random.key(0), *args, alpha={"y": 0.5, "labels": 1.0})
    )


def task_marginalized(rows):
    import jax
    from numpyro.infer.autoguide import AutoMultivariateNormal

    import numpyro_tempered as nt

    model = nt.marginalize(clusters)
    fit = nt.fit_gaussian(
        jax.random.key(0), model, AutoMultivariateNormal, rows["blobs"], alpha=0.5
    )
    return numbers_of(fit)


def task_inference_data(rows):
    import numpyro_tempered as nt

    data = nt.to_inference_data(
        gaussian_fit(rows), num_samples=50, posterior_predictive=True
    )
    elpd = nt.loo(data)
    return {
        "weights": data["posterior"]["weights"].values,
        "eta": data["posterior"]["eta"].values,
        "log_lik": log_lik_of(data)["labels"].values,
        "observed": data["observed_data"]["labels"].values,
        "replicates": data["posterior_predictive"]["labels"].values,
        "elpd": elpd.elpd if hasattr(elpd, "elpd") else elpd.elpd_loo,
        "elpd_of_rows": (elpd.elpd_i if hasattr(elpd, "elpd_i") else elpd.loo_i).values,
    }


def task_compare(rows):
    import jax
    from numpyro.infer.autoguide import AutoMultivariateNormal

    import numpyro_tempered as nt

    def wide(x, labels):
        import numpyro
        import numpyro.distributions as dist

        weights = numpyro.sample(
            "weights", dist.Normal(0.0, 10.0).expand([3]).to_event(1)
        )
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("labels", dist.Bernoulli(logits=x @ weights), obs=labels)

    data = rows["x"], rows["labels"]
    other = nt.fit_gaussian(
        jax.random.key(0), wide, AutoMultivariateNormal, *data, alpha=0.5
    )
    table = nt.compare({"narrow": gaussian_fit(rows), "wide": other})[
        "model_comparison"
    ]
    return {name: table[name].values for name in ("criterion", "weight", "se")}


def task_alpha(rows):
    import jax
    from numpyro.infer.autoguide import AutoMultivariateNormal

    import numpyro_tempered as nt

    args = (
        jax.random.key(0),
        classification,
        AutoMultivariateNormal,
        rows["x"],
        rows["labels"],
    )
    few = {"num_samples": 50, "num_refit_samples": 50}
    expectation = nt.expectations.gauss_hermite(predictor="eta")
    risk = nt.select_alpha(
        *args,
        alphas=[0.5, 1.0],
        criterion=nt.alpha.safe_bayes(blocks=3),
        expectation=expectation,
        **few,
    )
    coverage = nt.select_alpha(
        *args, criterion=nt.alpha.lyddon(), expectation=expectation, **few
    )
    criterion = risk.data["alpha_selection"]["criterion"].values
    return {"risk": risk.alpha, "criterion": criterion, "coverage": coverage.alpha}


def task_checks(rows):
    import jax
    from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

    import numpyro_tempered as nt

    key, data = jax.random.key(0), (rows["x"], rows["labels"])
    check = nt.check_fit(key, gaussian_fit(rows))
    errors = nt.table(nt.sandwich(key, gaussian_fit(rows)))
    path = nt.temper_path(
        key, classification, AutoMultivariateNormal, *data, alphas=[0.0, 0.5, 1.0]
    )
    mean_field = nt.fit_gaussian(key, classification, AutoNormal, *data, alpha=0.5)
    modes = nt.fit_gaussian(
        key, classification, AutoMultivariateNormal, *data, alpha=0.5, num_components=2
    )
    return {
        "bound": check.w2_bound,
        "divergence": check.divergences.pareto_k,
        "errors": errors.select_dtypes("number").to_numpy(),
        "path": path["tempered_path"]["elbo"].values,
        "responses": next(iter(nt.linear_response(key, mean_field).params.values())),
        "modes": modes.elbo.value,
    }


def task_sparse(rows):
    import jax

    import numpyro_tempered as nt

    key, prior = jax.random.key(0), {"inclusion_prob": 0.5, "slab_scale": 1.0}
    linear = nt.sparse.fit_linear(
        key, rows["x"], rows["y"], **prior, alpha=0.5, num_restarts=3
    )
    logistic = nt.sparse.fit_logistic(
        key, rows["x"], rows["labels"], **prior, intercept_scale=1.0
    )
    data = nt.to_inference_data(
        linear, rows["x"], rows["y"], rng_key=key, num_samples=20
    )
    return {
        "linear": linear.posterior.mean,
        "elbo": linear.elbo.value,
        "log_lik": log_lik_of(data)["y"].values,
        "logistic": logistic.posterior.mean,
        "objective": logistic.objective,
    }


def task_ppca(rows):
    import jax

    import numpyro_tempered as nt

    key, x = jax.random.key(0), rows["x"]
    fit = nt.ppca.fit(key, x, num_factors=1, alpha=0.5, num_restarts=2)
    selection = nt.ppca.select_num_factors(key, x, num_factors=[0, 1, 2])
    data = nt.to_inference_data(fit, x, rng_key=key, num_samples=20)
    return {
        "loadings": fit.loadings,
        "elbo": fit.elbo.value,
        "num_factors": selection.num_factors,
        "log_lik": log_lik_of(data)["x"].values,
        "scores": nt.ppca.transform(fit, x).loc,
    }


def task_mixtures(rows):
    import jax

    import numpyro_tempered as nt

    key, x, component = (
        jax.random.key(0),
        rows["blobs"],
        nt.mixtures.components.known_variance(2, prior_scale=10.0),
    )
    selection = nt.mixtures.select_num_components(
        key, x, component, num_components=[1, 2], num_draws=4
    )
    fit = selection.fit
    data = nt.to_inference_data(fit, x, rng_key=key, num_samples=20)
    by_steps = nt.mixtures.fit_stochastic(
        key, [x], component, num_components=2, batch_size=20, num_draws=4
    )
    return {
        "num_components": selection.selected,
        "objective": fit.objective,
        "loc": fit.posterior.loc,
        "log_lik": log_lik_of(data)["x"].values,
        "responsibilities": nt.mixtures.responsibilities(fit, x),
        "log_predictive": nt.mixtures.log_predictive(fit, x),
        "em": nt.mixtures.em(key, x, component, num_components=2).log_likelihood,
        "stochastic": by_steps.objective,
    }


def task_nuts(rows):
    import jax
    import numpy as np
    from numpyro.infer import MCMC, NUTS

    import numpyro_tempered as nt

    kernel = NUTS(nt.temper(classification, alpha=0.5))
    mcmc = MCMC(
        kernel, num_warmup=20, num_samples=20, progress_bar=False, jit_model_args=True
    )
    each = np.array_split(np.arange(NUM_ROWS), jax.process_count())[jax.process_index()]
    whole = data()
    shared, _ = nt.online.share_rows(whole["x"][each], whole["labels"][each])
    mcmc.run(jax.random.key(0), *shared)
    result = nt.to_inference_data(mcmc)
    return {
        "weights": result["posterior"]["weights"].values,
        "log_lik": log_lik_of(result)["labels"].values,
    }


def task_own_rows(rows):
    """Each process reads its own row groups, of unequal numbers of rows."""
    import jax
    import pyarrow.parquet as parquet
    from numpyro.infer.autoguide import AutoMultivariateNormal

    import numpyro_tempered as nt

    groups = (
        sum(GROUPS_OF, ())
        if jax.process_count() == 1
        else GROUPS_OF[jax.process_index()]
    )
    with parquet.ParquetFile(rows["file"]) as file:
        frame = file.read_row_groups(groups).to_pandas()
    (x, y), mask = nt.online.share_rows(frame[["a", "b", "c"]], frame["y"])
    fit = nt.fit_gaussian(
        jax.random.key(0), regression, AutoMultivariateNormal, x, y, mask, alpha=0.5
    )
    data = nt.to_inference_data(fit, num_samples=50)
    keep = nt.online.to_host(mask)
    component = nt.mixtures.components.known_variance(3, prior_scale=10.0)
    mixture = nt.mixtures.fit(
        jax.random.key(0),
        x,
        component,
        num_components=1,
        sample_weight=mask,
        num_draws=4,
    )
    return {
        **{name: value for name, value in numbers_of(fit).items() if name != "losses"},
        "rows": keep.sum(),
        "log_lik": log_lik_of(data)["y"].values[..., keep],
        "of_mixture": mixture.objective,
    }


def task_refusals(rows):
    """What all processes refuse with the same sentence, though one of them alone is wrong."""
    import jax
    import numpy as np
    from numpyro.infer.autoguide import AutoNormal

    import numpyro_tempered as nt

    number = jax.process_index()
    is_shared = jax.process_count() > 1

    def message(call):
        try:
            call()
        except ValueError as error:
            return str(error)
        return "nothing" if is_shared else ""

    def differing(x, y):
        regression(x, float(number) + y)

    fit = functools.partial(nt.fit_svi, num_steps=10)
    x, y, key = rows["x"], rows["y"], jax.random.key(0)
    bad = np.array_split(data()["y"], jax.process_count())[number]
    bad[-1] = np.nan if number else 0.0
    (bad,), _ = nt.online.share_rows(bad)
    return {
        "key": message(
            lambda: fit(jax.random.key(number), regression, AutoNormal, x, y)
        ),
        "alpha": message(
            lambda: fit(key, regression, AutoNormal, x, y, alpha=1.0 - 0.5 * number)
        ),
        "own_rows": message(
            lambda: fit(
                key, regression, AutoNormal, x, np.full(NUM_ROWS, float(number))
            )
        ),
        "program": message(lambda: fit(key, differing, AutoNormal, x, y)),
        "nan": message(lambda: fit(key, regression, AutoNormal, x, bad)),
        "no_rows": message(lambda: nt.online.share_rows(np.ones((number, 2)))),
        "columns": message(lambda: nt.online.share_rows(np.ones((3, 2 + number)))),
        "no_array": message(
            lambda: nt.online.share_rows(np.ones(3), np.ones(3 + number))
        ),
    }


TASKS = {
    name.removeprefix("task_"): task
    for name, task in list(globals().items())
    if name.startswith("task_")
}


def plain(value):
    import numpy as np

    import numpyro_tempered as nt

    return (
        value
        if isinstance(value, str)
        else np.asarray(nt.online.to_host(value), float).tolist()
    )


def numbers_of_task(name, rows):
    import numpyro_tempered as nt

    with warnings.catch_warnings():
        # Few steps and few draws.
        warnings.simplefilter("ignore", nt.warnings.ConvergenceWarning)
        warnings.filterwarnings("ignore", "Estimated shape parameter")
        return {key: plain(value) for key, value in TASKS[name](rows).items()}


def join(port, process, **options):
    """Become one of two processes, and shard the rows."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(
        f"localhost:{port}", num_processes=2, process_id=process, **options
    )
    half = NUM_ROWS // 2
    sharding = NamedSharding(jax.make_mesh((2,), ("rows",)), PartitionSpec("rows"))
    return Rows(
        {
            name: jax.make_array_from_process_local_data(
                sharding, value[half * process : half * (process + 1)]
            )
            for name, value in data().items()
        }
    )


def main(port, process, folder, names):
    rows = join(port, process)
    rows["file"] = folder / "rows.parquet"
    for name in names or TASKS:
        result = numbers_of_task(name, rows)
        # Complete where it is seen.
        part = folder / f"{name}.{process}.part"
        part.write_text(json.dumps(result))
        part.rename(folder / f"{name}.{process}.json")


def lose(port, process):
    """Fit on and on, until the second process is killed."""
    rows = join(port, process, heartbeat_timeout_seconds=10)
    task_gaussian(rows)
    print("fitted", flush=True)
    while True:
        gaussian_fit.cache_clear()
        task_gaussian(rows)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    if sys.argv[3] == "--lose":
        lose(int(sys.argv[1]), int(sys.argv[2]))
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
