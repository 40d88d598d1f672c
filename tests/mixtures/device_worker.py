"""Fits data that are sharded, and prints what ``test_devices`` compares.

``python device_worker.py`` fits over forced host devices, and with numbers of devices as arguments over fewer of
them; ``python device_worker.py --join PORT PROCESS`` is one of two processes with one device each.
"""

import json
import os
import re
import sys

MOST = 8


def data():
    import numpy as np

    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.normal(size=(600, 2)), 0.5 * rng.normal(size=(360, 2)) + [3.0, 2.0]]
    )
    return rng.permutation(x) + 5.0


def summary(fit):
    return {
        "objective": fit.objective,
        "bound": fit.bound.value,
        "objectives": fit.restart_objectives.tolist(),
        "loc": fit.posterior.loc.tolist(),
        "num_iter": fit.num_iter,
    }


def fitted(rows, **options):
    import jax

    import numpyro_tempered as nt

    component = nt.mixtures.components.known_variance(2, prior_scale=10.0)
    return nt.mixtures.fit(
        jax.random.key(0),
        rows,
        component,
        num_components=2,
        alpha=0.5,
        num_restarts=2,
        num_draws=4,
        tolerance=1e-5,
        **options,
    )


def grown(rows):
    """From a fit of one component, with an empty one and with splits."""
    import jax

    import numpyro_tempered as nt

    component = nt.mixtures.components.known_variance(2, prior_scale=10.0)
    options = {"num_restarts": 1, "num_draws": 4, "tolerance": 1e-5}
    parent = nt.mixtures.fit(
        jax.random.key(0), rows, component, num_components=1, **options
    )
    return nt.mixtures.fit(
        jax.random.key(0), rows, component, num_components=2, init=parent, **options
    )


def collectives(rows):
    """The instructions of the compiled ascent that move data between devices."""
    import jax
    import jax.numpy as jnp

    import numpyro_tempered as nt
    from numpyro_tempered.mixtures.array import array_source, compiled_ascent
    from numpyro_tempered.mixtures.ascent import begin
    from numpyro_tempered.mixtures.factors import TEMPERED_CAVI, MixtureProblem
    from numpyro_tempered.mixtures.prepare import prepare
    from numpyro_tempered.mixtures.source import Starts

    prepared = prepare(
        rows, nt.mixtures.components.known_variance(2, prior_scale=10.0), None
    )
    source = array_source(prepared, 2, 2)
    one = jnp.asarray(1.0)
    problem = MixtureProblem(prepared.prior, jnp.ones(2), one, one)
    starts = Starts(2, nt.mixtures.starts.kmeans_plus_plus(), 2)
    problem, factors = source.begin(jax.random.key(0), TEMPERED_CAVI, problem, starts)
    state = begin(factors, 10)
    lowered = compiled_ascent.lower(
        state,
        problem,
        source.blocks,
        jnp.int32(10),
        one,
        one,
        component=prepared.component,
        algorithm=TEMPERED_CAVI,
    )
    found = re.findall(
        r" = [^\n]*? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(",
        lowered.compile().as_text(),
    )
    return found


def over_devices(num_devices):
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((num_devices,), ("rows",), devices=jax.devices()[:num_devices])
    rows = jax.device_put(data(), NamedSharding(mesh, PartitionSpec("rows")))
    assert len(rows.sharding.device_set) == num_devices
    return mesh, rows


def on_forced_devices(fewer):
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={MOST}"
    import jax

    jax.config.update("jax_enable_x64", True)
    from numpyro_tempered.mixtures.components.known_variance import known_variance
    from numpyro_tempered.mixtures.em import em
    from numpyro_tempered.mixtures.prepare import shard_rows

    if fewer:
        print(json.dumps({n: summary(fitted(over_devices(n)[1])) for n in fewer}))
        return
    mesh, rows = over_devices(MOST)
    results = {
        MOST: summary(fitted(rows)),
        "grown": summary(grown(rows)),
        "collectives": collectives(rows),
    }
    # A row more than the devices divide.
    rows, weight = shard_rows(data()[:953], mesh)
    results["rows"], results["weight"] = rows.shape[0], float(weight.sum())
    result = em(
        jax.random.key(0),
        rows,
        known_variance(2),
        num_components=2,
        sample_weight=weight,
        num_restarts=1,
    )
    results["em"] = result.log_likelihood
    print(json.dumps(results))


def as_one_of_two(port, process):
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    x = data()
    half = len(x) // 2
    mesh = jax.make_mesh((2,), ("rows",))
    rows = jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec("rows")),
        x[half * process : half * (process + 1)],
    )
    assert not rows.is_fully_addressable
    print(json.dumps(summary(fitted(rows)) | {"grown": summary(grown(rows))}))


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    if sys.argv[1:2] == ["--join"]:
        as_one_of_two(int(sys.argv[2]), int(sys.argv[3]))
    else:
        on_forced_devices([int(each) for each in sys.argv[1:]])
