"""Streams over two processes: the numbers of one process, and the same ones on both."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import process_worker
import pytest
from conftest import enable_x64

pytestmark = pytest.mark.full

WORKER = Path(__file__).with_name("process_worker.py")


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start_two(*arguments):
    """Two processes that meet at a port; arguments come before and after it."""
    environment = os.environ | {"PYTHONPATH": str(WORKER.parents[2])}
    # Not the devices that this run may force.
    flags = [
        flag
        for flag in environment.get("XLA_FLAGS", "").split()
        if not flag.startswith("--xla_force_host_platform")
    ]
    environment["XLA_FLAGS"] = " ".join(flags)
    port, (first, *rest) = free_port(), arguments
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(first), str(port), str(process), *map(str, rest)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for process in range(2)
    ]


def result_of(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    # The backend of two processes prints lines of its own.
    return json.loads(out.strip().splitlines()[-1])


def stop(processes):
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def on_one():
    with enable_x64():
        return {each.__name__: each(process_worker.Here()) for each in process_worker.NUMBERS}


@pytest.fixture(scope="module")
def on_two():
    names = [each.__name__ for each in process_worker.NUMBERS] + ["refusals", "different_data"]
    processes = start_two(",".join(names))
    try:
        yield [result_of(process) for process in processes]
    finally:
        stop(processes)


@pytest.mark.parametrize("name", [each.__name__ for each in process_worker.NUMBERS])
def test_two_processes_give_the_numbers_of_one(name, on_one, on_two):
    # Implicit steps of a model stop at a tolerance; all else differs by rounding.
    rtol = 1e-6 if name.startswith("model") else 1e-11
    for ours, theirs in zip(on_two[0][name], on_one[name], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol)


def test_both_processes_hold_the_same_bits(on_two):
    assert on_two[0] == on_two[1]


def test_what_one_process_cannot_take_both_refuse_with_a_sentence(on_two):
    label, nothing, chunk, support, missing = on_two[0]["refusals"]
    assert label == chunk
    assert label.startswith("ValueError: hinge needs labels y in {-1, 1}, got 7.0")
    assert label.endswith("(on process 1 of 2)")
    assert "array 1 of shape (60, 8) holds no finite value" in nothing
    assert "turn labels in {-1, 1} into (y + 1) / 2" in support
    assert "2 of 60 rounds were rejected (2 with data that are not finite, the first in row 3)" in missing


def test_a_state_of_all_processes_takes_no_data_that_differ(on_two):
    assert on_two[0]["different_data"].startswith("ValueError: the data differ between processes")
