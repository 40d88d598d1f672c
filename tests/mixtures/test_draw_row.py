"""A row is drawn in proportion to its mass, in a time linear in the rows on several devices too."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_tempered.mixtures.starts import draw_row, row_of

NUM_DRAWS = 20_000


@pytest.mark.parametrize("num_rows", [96, 97, 128])
def test_rows_are_drawn_in_proportion_to_their_mass(num_rows):
    mass = np.random.default_rng(num_rows).gamma(0.5, size=num_rows).astype(np.float32)
    # Whole parts, the first row and the last without mass.
    mass[[0, *range(20, 41), -2, -1]] = 0.0
    keys = jax.random.split(jax.random.key(0), NUM_DRAWS)
    rows = np.asarray(jax.jit(jax.vmap(draw_row, (0, None)))(keys, mass))
    counts, shares = np.bincount(rows, minlength=num_rows), mass / mass.sum()
    assert not counts[mass == 0.0].any()
    deviation = np.sqrt(NUM_DRAWS * shares * (1.0 - shares))
    assert np.all(np.abs(counts - NUM_DRAWS * shares) <= 5.0 * deviation + 1e-3)


TWO_DEVICES = pytest.mark.skipif(
    jax.device_count() < 2,
    reason="one device: set --xla_force_host_platform_device_count=2",
)


def over_devices(value):
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec("rows")))


@TWO_DEVICES
def test_work_on_two_devices_is_linear_in_the_rows():
    def operations(num_rows):
        mass = over_devices(jnp.ones(num_rows))
        return (
            jax.jit(draw_row)
            .lower(jax.random.key(0), mass)
            .compile()
            .cost_analysis()["flops"]
        )

    assert operations(2**16) < 5.0 * operations(2**14)


@TWO_DEVICES
def test_devices_send_the_row_that_is_drawn_and_no_other():
    def draw(key, points, mass):
        return row_of(points, draw_row(key, mass))

    arguments = (
        jax.random.key(0),
        over_devices(jnp.ones((4096, 3))),
        over_devices(jnp.ones(4096)),
    )
    program = jax.jit(draw).lower(*arguments).compile().as_text()
    moved = re.findall(
        r"= \(?\w+\[([\d,]*)\][^=]* (?:all-gather|all-reduce|all-to-all|collective-permute)\(",
        program,
    )
    sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in moved]
    # Sums of the 64 parts, the masses of one, and a row: not the 4096 rows.
    assert sizes
    assert max(sizes) <= 64
