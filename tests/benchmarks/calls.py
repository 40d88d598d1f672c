"""Calls in a process of their own: seconds, and the programs that XLA compiles."""

import json
import os
import subprocess
import sys
import time


def measure(call, numbers, prepare=lambda number: ()):
    """Rows ``call``, ``seconds``, ``programs`` and ``compile_seconds`` of a call for each number.

    Args:
        call: A function of a key and of what ``prepare`` makes of the number.
        numbers: Of the calls; each has a key of its own.
        prepare: What is not measured, such as the data.
    """
    import jax

    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            compiled.append(seconds) if "backend_compile" in event else None
        )
    )
    rows = []
    for number in numbers:
        args = jax.block_until_ready(prepare(number))
        key = jax.block_until_ready(jax.random.key(number))
        compiled.clear()
        begin = time.perf_counter()
        jax.block_until_ready(call(key, *args))
        seconds = time.perf_counter() - begin
        rows.append(
            {
                "call": number,
                "seconds": seconds,
                "programs": len(compiled),
                "compile_seconds": sum(compiled),
            }
        )
    return rows


def in_new_process(script, *which, **environment):
    """What ``script --one which...`` prints as JSON."""
    command = [sys.executable, script, "--one", *which]
    printed = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    return json.loads(printed.stdout.strip().splitlines()[-1])
