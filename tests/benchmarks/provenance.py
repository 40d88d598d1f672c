"""What a committed result was measured with."""

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import jax


def processor():
    """The processor's name, as the system gives it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe(sizes):
    """Device, versions, sizes and command, as a block of text."""
    device = jax.devices()[0]
    name = device.device_kind if device.platform != "cpu" else processor()
    packages = ", ".join(
        f"{p} {version(p)}" for p in ("jax", "numpyro", "numpy", "numpyro_tempered")
    )
    script = Path(sys.argv[0])
    # Where one run put its files is no part of what was measured.
    options = [
        option
        for before, option in zip(sys.argv, sys.argv[1:], strict=False)
        if "--output" not in (before, option) and not option.startswith("--output=")
    ]
    command = " ".join(
        ["python", str(Path("tests/benchmarks") / script.name), *options]
    )
    return (
        f"device: {device.platform}, {name}, {os.cpu_count()} cores\n"
        f"versions: Python {platform.python_version()}, {packages}\n"
        f"sizes: {sizes}\ncommand: {command}\n"
    )
