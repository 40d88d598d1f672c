"""One fit over several devices and over two processes: the numbers are those of one device."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import device_worker
import jax
import numpy as np
import pytest
from conftest import enable_x64

from numpyro_tempered.mixtures.components.known_variance import known_variance
from numpyro_tempered.mixtures.em import em
from numpyro_tempered.mixtures.prepare import automatic_row_mesh, shard_rows

pytestmark = pytest.mark.full

WORKER = Path(__file__).with_name("device_worker.py")


def start(*arguments):
    # Not the flags of this run, which may force devices of its own.
    environment = {
        name: value for name, value in os.environ.items() if name != "XLA_FLAGS"
    }
    environment["PYTHONPATH"] = str(WORKER.parents[2])
    return subprocess.Popen(
        [sys.executable, str(WORKER), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def result_of(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    # The backend of two processes prints lines of its own.
    return json.loads(out.strip().splitlines()[-1])


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def workers():
    port = free_port()
    started = {
        "devices": start(),
        "first": start("--join", port, 0),
        "second": start("--join", port, 1),
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def on_one_device(workers):
    # After the workers have started, so that all run side by side.
    with enable_x64():
        fit = device_worker.summary(device_worker.fitted(device_worker.data()))
        grown = device_worker.summary(device_worker.grown(device_worker.data()))
        x = device_worker.data()[:953]
        baseline = em(
            jax.random.key(0), x, known_variance(2), num_components=2, num_restarts=1
        )
    return fit, baseline, grown


@pytest.fixture(scope="module")
def on_devices(workers, on_one_device):
    return result_of(workers["devices"])


def assert_same(result, expected):
    assert result["num_iter"] == expected["num_iter"]
    for name in ("objective", "bound", "objectives", "loc"):
        np.testing.assert_allclose(result[name], expected[name], rtol=1e-11)


def test_sharded_rows_give_the_fit_of_one_device(on_devices, on_one_device):
    assert_same(on_devices[str(device_worker.MOST)], on_one_device[0])
    assert_same(on_devices["grown"], on_one_device[2])


@pytest.mark.slow
def test_fewer_devices_give_the_same_fit(on_one_device):
    results = result_of(start(2, 4))
    for num_devices in ("2", "4"):
        assert_same(results[num_devices], on_one_device[0])


def test_a_pass_sums_over_devices_and_moves_no_data(on_devices):
    # Newer compilers make one instruction of the three sums: log density, counts and statistics.
    assert set(on_devices["collectives"]) == {"all-reduce"}
    assert len(on_devices["collectives"]) <= 3


def test_rows_that_devices_do_not_divide_are_filled_with_weight_zero(
    on_devices, on_one_device
):
    assert (on_devices["rows"], on_devices["weight"]) == (960, 953.0)
    # Two other starts, but one optimum.
    np.testing.assert_allclose(
        on_devices["em"], on_one_device[1].log_likelihood, atol=1e-4
    )


@pytest.mark.parametrize("process", ["first", "second"])
def test_two_processes_give_the_fit_of_one(process, workers, on_one_device):
    result = result_of(workers[process])
    assert_same(result, on_one_device[0])
    assert_same(result["grown"], on_one_device[2])


def test_shard_rows_checks_its_arguments():
    mesh = jax.make_mesh((1,), ("rows",), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"x has shape \(0, 2\); at least one row"):
        shard_rows(np.ones((0, 2)), mesh)
    with pytest.raises(
        ValueError, match=r"sample_weight has shape \(2,\); expected \(3,\)"
    ):
        shard_rows(np.ones((3, 2)), mesh, np.ones(2))
    rows, weight = shard_rows(np.arange(3), mesh, [1, 0, 2])
    assert rows.tolist() == [0, 1, 2]
    assert weight.tolist() == [1.0, 0.0, 2.0]
    assert automatic_row_mesh("text") == "text"


@pytest.mark.skipif(
    jax.device_count() < 2,
    reason="one device: set --xla_force_host_platform_device_count=2",
)
def test_sharded_columns_are_refused():
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2,), ("columns",), devices=jax.devices()[:2])
    x = jax.device_put(
        np.ones((4, 2)), NamedSharding(mesh, PartitionSpec(None, "columns"))
    )
    with pytest.raises(
        ValueError, match=r"columns of x are sharded .* shard rows alone"
    ):
        automatic_row_mesh(x)
