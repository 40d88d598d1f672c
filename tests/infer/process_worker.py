"""Fits of one process, or of one of two whose rows are sharded over both, for ``test_processes``.

``python process_worker.py PORT PROCESS TASK...`` is one of two; it prints a line of JSON.
"""

import json
import os
import sys
import warnings

NUM_ROWS = 120


def data():
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 3))
    y = x @ [0.5, -1.0, 0.25] + 0.4 * rng.normal(size=NUM_ROWS)
    blobs = np.concatenate([rng.normal(size=(70, 2)), 0.5 * rng.normal(size=(50, 2)) + [3.0, 2.0]])
    return {"x": x, "y": y, "labels": (y > 0).astype(int), "blobs": rng.permutation(blobs)}


def regression(x, y):
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ weights, sigma), obs=y)


def classification(x, labels):
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
    eta = numpyro.deterministic("eta", x @ weights)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("labels", dist.Bernoulli(logits=eta), obs=labels)


def svi(rows, options):
    import jax
    from numpyro.infer.autoguide import AutoNormal

    import numpyro_tempered as nt

    return nt.fit_svi(
        jax.random.key(0), regression, AutoNormal, rows["x"], rows["y"], alpha=0.5, num_particles=100, **options
    )


def numbers_of(fit):
    return {
        **fit.params,
        "elbo": fit.elbo.value,
        "se": fit.elbo.se,
        "log_lik": fit.elbo.expected_log_lik,
        "kl": fit.elbo.kl,
        "losses": fit.losses,
    }


def task_svi(rows):
    return numbers_of(svi(rows, {}))

def task_gaussian(rows):
    import jax
    from numpyro.infer.autoguide import AutoMultivariateNormal

    import numpyro_tempered as nt

    by_quadrature = nt.fit_gaussian(
        jax.random.key(0), classification, AutoMultivariateNormal, rows["x"], rows["labels"], alpha=0.5,
        expectation=nt.expectations.gauss_hermite(predictor="eta"),
    )
    by_draws = nt.fit_gaussian(
        jax.random.key(0), regression, AutoMultivariateNormal, rows["x"], rows["y"], alpha=0.5
    )
    return {f"{k}_{n}": v for n, f in enumerate((by_quadrature, by_draws)) for k, v in numbers_of(f).items()}


def task_inference_data(rows):
    import numpyro_tempered as nt

    data = nt.to_inference_data(svi(rows, {}), num_samples=50, posterior_predictive=True)
    elpd = nt.loo(data)
    return {
        "sigma": data["posterior"]["sigma"].values,
        "log_lik": data["log_likelihood"]["y"].values,
        "observed": data["observed_data"]["y"].values,
        "replicates": data["posterior_predictive"]["y"].values,
        "elpd": elpd.elpd if hasattr(elpd, "elpd") else elpd.elpd_loo,
        "pointwise": (elpd.elpd_i if hasattr(elpd, "elpd_i") else elpd.loo_i).values,
    }


def task_compare(rows):
    import jax
    from numpyro.infer.autoguide import AutoNormal

    import numpyro_tempered as nt

    def wide(x, y):
        import numpyro
        import numpyro.distributions as dist

        weights = numpyro.sample("weights", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ weights, 1.0), obs=y)

    fits = {"one": svi(rows, {}), "two": nt.fit_svi(jax.random.key(0), wide, AutoNormal, rows["x"], rows["y"], alpha=0.5)}
    table = nt.compare(fits)["model_comparison"]
    return {"criterion": table["criterion"].values, "weight": table["weight"].values}


def task_alpha(rows):
    import jax
    from numpyro.infer.autoguide import AutoNormal

    import numpyro_tempered as nt

    choice = nt.select_alpha(
        jax.random.key(0), regression, AutoNormal, rows["x"], rows["y"], alphas=[0.5, 1.0],
        criterion=nt.alpha.safe_bayes(blocks=3), num_samples=100, num_refit_samples=50,
    )
    other = nt.select_alpha(jax.random.key(0), regression, AutoNormal, rows["x"], rows["y"], criterion=nt.alpha.lyddon(), num_samples=50)
    return {"alpha": choice.alpha, "criterion": choice.data["alpha_selection"]["criterion"].values, "lyddon": other.alpha}


def task_sparse(rows):
    import jax

    import numpyro_tempered as nt

    linear = nt.sparse.fit_linear(
        jax.random.key(0), rows["x"], rows["y"], inclusion_prob=0.5, slab_scale=1.0, alpha=0.5, num_restarts=3
    )
    logistic = nt.sparse.fit_logistic(
        jax.random.key(0), rows["x"], rows["labels"], inclusion_prob=0.5, slab_scale=1.0, intercept_scale=1.0
    )
    data = nt.to_inference_data(linear, rows["x"], rows["y"], rng_key=jax.random.key(1), num_samples=20)
    return {"mean": linear.posterior.mean, "elbo": linear.elbo, "probs": logistic.inclusion_probs, "objective": logistic.objective, "log_lik": data["log_likelihood"]["y"].values}


def task_ppca(rows):
    import jax

    import numpyro_tempered as nt

    fit = nt.ppca.fit(jax.random.key(0), rows["x"], num_factors=1, alpha=0.5, num_restarts=2)
    chosen = nt.ppca.select_num_factors(jax.random.key(0), rows["x"], [0, 1, 2])
    data = nt.to_inference_data(fit, rows["x"], rng_key=jax.random.key(1), num_samples=20)
    scores = nt.ppca.transform(fit, rows["x"])
    return {"loadings": fit.loadings, "elbo": fit.elbo, "chosen": chosen.num_factors, "log_lik": data["log_likelihood"]["x"].values, "scores": scores.loc}


def task_mixtures(rows):
    import jax

    import numpyro_tempered as nt

    key, component = jax.random.key(0), nt.components.gaussian(2, prior_scale=5.0) if False else nt.components.known_variance(2, prior_scale=10.0)
    fit = nt.mixtures.fit(key, rows["blobs"], component, num_components=2, alpha=0.5, num_restarts=2, num_samples=4)
    data = nt.to_inference_data(fit, rows["blobs"], rng_key=jax.random.key(1), num_samples=20)
    return {
        "objective": fit.objective,
        "loc": fit.posterior.loc,
        "log_lik": data["log_likelihood"]["x"].values,
        "responsibilities": nt.mixtures.responsibilities(fit, rows["blobs"]),
    }


def task_em(rows):
    import jax

    import numpyro_tempered as nt

    em = nt.mixtures.em(jax.random.key(0), rows["blobs"], nt.components.known_variance(2, prior_scale=10.0), num_components=2)
    return {"em": em.log_likelihood}


def task_stochastic(rows):
    import jax

    import numpyro_tempered as nt

    fit = nt.mixtures.fit_stochastic(jax.random.key(0), [rows["blobs"]], nt.components.known_variance(2, prior_scale=10.0), num_components=2, batch_size=20)
    return {"stochastic": fit.objective}


def task_mixture_choice(rows):
    import jax

    import numpyro_tempered as nt

    chosen = nt.mixtures.select_num_components(jax.random.key(0), rows["blobs"], nt.components.known_variance(2, prior_scale=10.0), num_components=[1, 2], num_samples=4)
    return {"chosen": chosen.num_components}


TASKS = {name.removeprefix("task_"): value for name, value in list(globals().items()) if name.startswith("task_")}


def plain(values):
    import numpy as np

    from numpyro_tempered.core.processes import to_host

    return {name: np.asarray(to_host(value), float).tolist() for name, value in values.items()}


def run(names, rows):
    import traceback
    out={}
    import time
    for name in names:
        t=time.time()
        try:
            out[name] = plain(TASKS[name](rows))
        except Exception as e:
            out[name] = {"error": traceback.format_exc()}
        print(name, time.time()-t, file=sys.stderr, flush=True)
    return out


def as_one_of_two(port, process, names):
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    half = NUM_ROWS // 2
    mesh = jax.make_mesh((2,), ("rows",))
    sharding = NamedSharding(mesh, PartitionSpec("rows"))
    rows = {
        name: jax.make_array_from_process_local_data(sharding, value[half * process : half * (process + 1)])
        for name, value in data().items()
    }
    print(json.dumps(run(names, rows)))


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    port, process, *names = sys.argv[1:]
    if process == "-":
        import jax
        jax.config.update("jax_enable_x64", True)
        print(json.dumps(run(names or TASKS, data())))
    else:
        as_one_of_two(int(port), int(process), names or TASKS)
