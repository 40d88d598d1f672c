"""Independent streams sharded over devices; needs two, which CI forces on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_tempered as nt

NUM_STREAMS, NUM_ROUNDS, DIMENSION = 4, 20, 3


@pytest.mark.skipif(
    jax.device_count() < 2,
    reason="one device: set --xla_force_host_platform_device_count=2",
)
@pytest.mark.parametrize(
    "rule",
    [nt.online.ngvi(), nt.online.sva(0.1), nt.online.svb(0.1)],
    ids=lambda rule: rule.name,
)
def test_sharded_streams_equal_streams_on_one_device(rule):
    x_key, y_key = jax.random.split(jax.random.key(7))
    x = jax.random.normal(x_key, (NUM_STREAMS, NUM_ROUNDS, DIMENSION))
    y = jnp.sign(jax.random.normal(y_key, (NUM_STREAMS, NUM_ROUNDS)))
    start = rule.init(
        nt.gaussian.families.MeanField(jnp.zeros(DIMENSION), jnp.ones(DIMENSION))
    )
    states = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (NUM_STREAMS, *leaf.shape)), start
    )

    def run(state, x, y):
        return nt.online.run(rule, nt.expectations.hinge(), state, x, y)

    mesh = jax.make_mesh((2,), ("streams",), devices=jax.devices()[:2])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("streams"))
    sharded = jax.jit(jax.vmap(run))(*jax.device_put((states, x, y), rows))
    assert len(sharded[1].at_mean.sharding.device_set) == 2
    single = jax.jit(jax.vmap(run))(states, x, y)

    def compared(result):
        # Not the sums' rounding errors, which no two programs share.
        state, losses = result
        return jax.tree.leaves((state.posterior, state.count, losses))

    for ours, theirs in zip(compared(sharded), compared(single), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.skipif(
    jax.device_count() < 2,
    reason="one device: set --xla_force_host_platform_device_count=2",
)
def test_machines_of_a_mesh_combine_their_changes():
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(40, DIMENSION)).astype(np.float32),
        rng.normal(size=40).astype(np.float32),
    )
    logistic = nt.expectations.gauss_hermite(
        lambda u, y: jax.nn.softplus(-jnp.sign(y) * u)
    )
    pvi = nt.online.partitioned(logistic)
    prior = nt.gaussian.families.FullRank(jnp.zeros(DIMENSION), jnp.eye(DIMENSION))
    server = pvi.init(prior, 2)
    factors = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), *(pvi.factor(server, k) for k in range(2))
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("machines",))
    each, everywhere = (
        jax.sharding.PartitionSpec("machines"),
        jax.sharding.PartitionSpec(),
    )

    def one_round(state, factor, x, y):
        factor = pvi.refit(jax.tree.map(lambda leaf: leaf[0], factor), state, x, y)
        return pvi.combine_over(state, factor.change, "machines"), jax.tree.map(
            lambda leaf: leaf[None], factor
        )

    specs = {
        "in_specs": (everywhere, each, each, each),
        "out_specs": (everywhere, each),
    }
    if hasattr(jax, "shard_map"):
        mapped = jax.shard_map(one_round, mesh=mesh, **specs, check_vma=False)
    else:
        from jax.experimental.shard_map import shard_map

        mapped = shard_map(one_round, mesh=mesh, **specs, check_rep=False)
    state, after = jax.jit(mapped)(server, factors, x, y)
    assert len(after.linear.sharding.device_set) == 2
    here = nt.online.run_partitioned(
        pvi, prior, [(x[:20], y[:20]), (x[20:], y[20:])], num_rounds=1, tolerance=np.inf
    )
    np.testing.assert_allclose(
        state.posterior.loc, here.posterior.loc, rtol=2e-5, atol=1e-6
    )
    np.testing.assert_array_equal(state.rounds, [1, 1])
