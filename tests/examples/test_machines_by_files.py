"""The example of machines that share a folder: processes that are killed, and started again."""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import numpyro_tempered as nt

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "machines_by_files.py"


def load_module():
    spec = importlib.util.spec_from_file_location("machines_by_files", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments], stdout=subprocess.DEVNULL
    )


def wait_for(path, seconds=120):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)


@pytest.mark.slow
def test_machines_and_server_survive_kill_9(tmp_path):
    options = ["--folder", str(tmp_path), "--machines", "2", "--rounds", "12"]
    server, first, second = (
        start("serve", *options),
        start("work", "0", *options),
        start("work", "1", *options),
    )
    wait_for(tmp_path / "change_0.npz")
    for process in (server, first):
        process.kill()
        process.wait()
    processes = [start("serve", *options), start("work", "0", *options), second]
    try:
        assert [process.wait(timeout=200) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
    example = load_module()
    x, y = (
        np.concatenate(rows)
        for rows in zip(*map(example.read_rows, range(2)), strict=True)
    )
    f = nt.gaussian.descent.objective(example.LOGISTIC, example.PRIOR, x, y)
    batch = nt.gaussian.descent.minimise(f, example.PRIOR).posterior
    state = nt.online.restore(
        tmp_path / "server.npz", like=example.PVI.init(example.PRIOR, 2)
    )
    off = np.linalg.solve(
        np.asarray(batch.factor), np.asarray(state.posterior.loc - batch.loc)
    )
    assert np.max(np.abs(off)) < 0.02
    assert [int(number) for number in state.rounds] == [12, 12]
