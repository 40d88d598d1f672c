"""Every program that the package compiles lowers for a GPU and a TPU, on a machine that has neither.

A program with an operation that only the CPU has, such as a Schur decomposition, would fail there. What a program
computes on these devices is not tested here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

HERE = Path(__file__).parent
PLATFORMS = ("cuda", "tpu")
# Group of functions, and modules that must be among those whose programs were lowered.
GROUPS = {
    "online": {"numpyro_tempered.online.stream"},
    "rules": {"numpyro_tempered.online.stream"},
    "streams": {"numpyro_tempered.online.stream"},
    "svi": {"numpyro_tempered.core.programs"},
    "nuts": {"functools.potential_energy", "numpyro.util"},
    "alpha": {"numpyro_tempered.core.programs"},
    "mixtures": {
        f"numpyro_tempered.mixtures.{name}"
        for name in ("array", "chunks", "predict", "fit_stochastic")
    },
    "families": {"numpyro_tempered.mixtures.array"},
    "missing": {"numpyro_tempered.mixtures.array"},
    "matrices": {"numpyro_tempered.ppca.driver", "numpyro_tempered.sparse.ascent"},
}


def lowered(group):
    """What the worker prints: names of programs, and errors by name."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    # The options of pytest's own cache of programs.
    cache = jax.config.jax_compilation_cache_dir
    if cache:
        environment |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        environment |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    command = [sys.executable, str(HERE / "lowering_worker.py"), group, *PLATFORMS]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize("group", GROUPS)
def test_programs_lower_for_gpu_and_tpu(group):
    outcome = lowered(group)
    assert outcome["errors"] == {}
    found = set(outcome["lowered"])
    assert all(
        any(name.startswith(module) for name in found) for module in GROUPS[group]
    ), sorted(found)


@pytest.mark.full
def test_an_operation_of_the_cpu_alone_would_be_found():
    """The test's own test: programs with operations of one platform are reported."""
    outcome = lowered("cpu_alone")
    assert list(outcome["errors"]) == ["__main__.run_cpu_alone.<locals>.only_on_cpu"]
