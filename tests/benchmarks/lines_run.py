"""A plugin of pytest: which lines of the package each file of tests runs, and its seconds, to a JSON file.

`python -m pytest -p lines_run` with this folder in PYTHONPATH and the name of a folder in LINES_RUN; Python 3.12
or newer, whose monitoring sees a line once and costs nothing after that. Lines outside of functions run at the
import and are left out, and so are programs in memory: a file of tests is measured as if it ran alone.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import jax
import pytest

PACKAGE = str(Path(__file__).resolve().parents[2] / "numpyro_tempered")
runs = defaultdict(lambda: defaultdict(set))
seconds = defaultdict(float)
now = {"test": None}


def see_line(code, line):
    if (
        now["test"]
        and code.co_name != "<module>"
        and code.co_filename.startswith(PACKAGE)
    ):
        runs[now["test"]][
            code.co_filename.removeprefix(str(Path(PACKAGE).parent) + "/")
        ].add(line)
    return sys.monitoring.DISABLE


def pytest_configure(config):
    tool, line = sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE
    sys.monitoring.use_tool_id(tool, "lines of the package")
    sys.monitoring.register_callback(tool, line, see_line)
    sys.monitoring.set_events(tool, line)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    file = item.nodeid.split("::")[0]
    if file != now["test"]:
        now["test"] = file
        jax.clear_caches()
        sys.monitoring.restart_events()
    start = time.process_time()
    try:
        return (yield)
    finally:
        seconds[file] += time.process_time() - start


def pytest_unconfigure(config):
    sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)
    if runs:
        rows = {
            file: {
                "seconds": seconds[file],
                "lines": {module: len(lines) for module, lines in modules.items()},
            }
            for file, modules in runs.items()
        }
        (Path(os.environ["LINES_RUN"]) / f"{os.getpid()}.json").write_text(
            json.dumps(rows)
        )
