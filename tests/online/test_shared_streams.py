"""Streams over two processes: the numbers of one process, and the same ones on both."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import stream_worker
from conftest import enable_x64

pytestmark = pytest.mark.full

WORKER = Path(__file__).with_name("stream_worker.py")


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start_two(*arguments):
    """Two processes that meet at a port; arguments come before and after it."""
    # JAX would ask a proxy for the other process.
    environment = os.environ | {
        "PYTHONPATH": str(WORKER.parents[2]),
        "no_proxy": "localhost",
    }
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
            [
                sys.executable,
                str(WORKER),
                str(first),
                str(port),
                str(process),
                *map(str, rest),
            ],
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
        return {
            each.__name__: each(stream_worker.Here()) for each in stream_worker.NUMBERS
        }


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    stream_worker.write_table(folder)
    names = [each.__name__ for each in stream_worker.NUMBERS]
    processes = start_two(
        ",".join([*names, "refusals", "different_data", "row_groups", "saved"]), folder
    )
    try:
        yield [result_of(process) for process in processes]
    finally:
        stop(processes)


@pytest.mark.parametrize("name", [each.__name__ for each in stream_worker.NUMBERS])
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
    assert (
        "2 of 60 rounds were rejected (2 with data that are not finite, the first in row 3)"
        in missing
    )


def test_processes_that_compute_together_pass_the_same(on_two):
    data, chunks, keys, states = on_two[0]["different_data"]
    for message in (data, chunks):
        assert message.startswith("ValueError: the data differ between processes")
    for message in (keys, states):
        assert message.startswith("ValueError: states or keys differ between processes")


def posterior_of(num_rows):
    """Of the linear regression with unit noise that half the squared loss is, in closed form."""
    x, y, _ = stream_worker.data()
    x, y = x[:num_rows, 0], y[:num_rows, 0]
    covariance = np.linalg.inv(x.T @ x + np.eye(3) / 100.0)
    return covariance @ (x.T @ y), covariance


@pytest.mark.parametrize(
    ("name", "sizes"), [("unequal", [8, 5, 4, 4, 4]), ("one group", [4, 3])]
)
def test_unequal_row_groups_are_all_learned_once(name, sizes, on_two):
    pytest.importorskip("pyarrow")
    result = on_two[0]["row_groups"][name]
    assert result["sizes"] == sizes
    loc, covariance = posterior_of(sum(sizes))
    np.testing.assert_allclose(result["state"][0], loc, rtol=1e-9)
    root = np.asarray(result["state"][1])
    np.testing.assert_allclose(root @ root.T, covariance, rtol=1e-9)


def test_readers_fail_on_both_processes(on_two):
    result = on_two[0]["row_groups"]
    assert result["broken"] == "OSError: the disk is gone (on process 1 of 2)"
    assert result["forms"].startswith("ValueError: rows are ")
    assert result["nothing"].startswith("ValueError: no process has a row")


def test_saved_states_come_back_bit_for_bit(on_two):
    result = on_two[0]["saved"]
    assert result["whole"]
    assert result["parts"]
    assert result["files"] == [
        f"stack.{k}of2.{turn}.npz" for k in range(2) for turn in "ab"
    ]
    # A save that one process lost counts for none.
    assert result["damaged"]
    assert result["saved again"]


def test_parts_that_do_not_fit_are_refused_on_both_processes(on_two):
    result = on_two[0]["saved"]
    assert result["absent"].startswith("FileNotFoundError: no save of ")
    assert "saved in parts by 3 processes, and there are 2" in result["number"]
    assert (
        "stack.npz holds float64[8,3] at ['states'].posterior.loc, expected float32[8,3]"
        in result["form"]
    )


@pytest.mark.slow
def test_a_killed_process_stops_the_other_and_both_resume_bit_for_bit(tmp_path, on_two):
    pytest.importorskip("pyarrow")
    stream_worker.write_table(tmp_path)
    processes = start_two("survivor", tmp_path, 4)
    try:
        begin = time.monotonic()
        _, err = processes[0].communicate(timeout=120)
        seconds = time.monotonic() - begin
        processes[1].communicate(timeout=10)
    finally:
        stop(processes)
    assert processes[1].returncode == -signal.SIGKILL
    assert processes[0].returncode not in (0, None)
    assert re.search("Connection (reset|closed)|heartbeat timeout", err), err
    # Ten seconds without a heartbeat, and those of the start.
    assert seconds < 60.0
    assert (tmp_path / "state.npz").exists()

    processes = start_two("survivor", tmp_path)
    try:
        results = [result_of(process)["survivor"] for process in processes]
    finally:
        stop(processes)
    assert results[0] == results[1]
    assert results[0]["resumed_at"] == 3
    assert results[0]["state"] == on_two[0]["row_groups"]["unequal"]["state"]
