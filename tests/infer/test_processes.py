"""Fits of rows that two processes share: each has the numbers of one process, and both the same."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import process_worker
import pytest
from conftest import enable_x64

WORKER = Path(__file__).with_name("process_worker.py")
FULL = ("refusals", "gaussian", "inference_data", "svi", "own_rows")
SLOW = tuple(name for name in process_worker.TASKS if name not in FULL)
# Seconds in which two processes compile a fit beside other tests.
PATIENCE = 300


def start(port, process, *arguments):
    # JAX would ask a proxy for the other process.
    environment = dict(
        os.environ, PYTHONPATH=str(WORKER.parents[2]), no_proxy="localhost"
    )
    flags = os.environ.get("XLA_FLAGS", "").split()
    # Not the devices that this run may force: one device is one process here.
    flags = [flag for flag in flags if "device_count" not in flag]
    environment["XLA_FLAGS"] = " ".join([*flags, "--xla_cpu_multi_thread_eigen=false"])
    if jax.config.jax_compilation_cache_dir:
        environment["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    return subprocess.Popen(
        [
            sys.executable,
            "-u",
            str(WORKER),
            str(port),
            str(process),
            *map(str, arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def start_two(*arguments):
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    return [start(port, process, *arguments) for process in (0, 1)]


def end(processes):
    for process in processes:
        process.kill()
        process.communicate()


def result_of(folder, processes, name):
    """What both processes wrote, as soon as it is there."""
    files = [folder / f"{name}.{process}.json" for process in (0, 1)]
    until = time.monotonic() + PATIENCE
    while not all(file.exists() for file in files):
        if any(process.poll() for process in processes):
            time.sleep(1.0)
            errors = [
                process.communicate()[1] for process in processes if process.poll()
            ]
            raise AssertionError("\n\n".join(error[-3000:] for error in errors))
        assert time.monotonic() < until, (
            f"no result of {name}: do the processes wait for each other?"
        )
        time.sleep(0.05)
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    process_worker.write_groups(folder / "rows.parquet")
    return folder


@pytest.fixture(scope="module")
def full_pair(folder):
    processes = start_two(folder, *FULL)
    yield processes
    end(processes)


@pytest.fixture(scope="module")
def slow_pair(folder):
    processes = start_two(folder, *SLOW)
    yield processes
    end(processes)


@pytest.fixture(scope="module")
def rows(folder):
    rows = process_worker.Rows(process_worker.data())
    rows["file"] = folder / "rows.parquet"
    return rows


def assert_one_process_and_two_agree(name, rows, folder, processes):
    with enable_x64():
        expected = process_worker.numbers_of_task(name, rows)
    first, second = result_of(folder, processes, name)
    assert first == second
    assert first.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(first[key], value, rtol=1e-5, atol=1e-9, err_msg=key)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in FULL if name != "refusals"])
def test_two_processes_have_the_numbers_of_one(name, rows, folder, full_pair):
    assert_one_process_and_two_agree(name, rows, folder, full_pair)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_processes_have_all_numbers_of_one(name, rows, folder, slow_pair):
    assert_one_process_and_two_agree(name, rows, folder, slow_pair)


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "sentences"),
    {
        "key": ("argument 'rng_key' differs between the processes",) * 2,
        "alpha": ("argument 'alpha' differs between the processes",) * 2,
        "own_rows": ("argument 'number 2' differs between the processes",) * 2,
        "program": ("the processes have made different programs of one model",) * 2,
        "nan": (
            "observed site 'y' has 1 of 120 values that are NaN or infinite, the first at index 119",
        )
        * 2,
        "no_rows": (
            "share_rows needs arrays with one common leading axis of at least 1",
            "devices [0] pass no",
        ),
        "columns": ("rows differ in shape or dtype between the processes",) * 2,
        "no_array": (
            "the processes of devices [1] pass no rows",
            "share_rows needs arrays with one common",
        ),
    }.items(),
)
def test_both_processes_refuse_what_is_wrong_in_one(case, sentences, folder, full_pair):
    for result, sentence in zip(
        result_of(folder, full_pair, "refusals"), sentences, strict=True
    ):
        assert sentence in result[case]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_ends_with_an_error_when_another_is_lost(lost):
    processes = start_two("--lose")
    try:
        for process in processes:
            # Gloo prints lines of its own.
            assert "fitted\n" in iter(process.stdout.readline, "")
        processes[lost].send_signal(signal.SIGKILL)
        _, error = processes[1 - lost].communicate(timeout=60)
        assert processes[1 - lost].returncode != 0
        assert "Gloo" in error or "heartbeat" in error
    finally:
        end(processes)
