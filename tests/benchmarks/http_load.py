"""A stream behind HTTP under load on loopback: throughput, tail latency, and what a kill -9 loses.

``examples/serve_http.py`` learns the breast cancer data of scikit-learn in raw units, row after row in random
order. Clients, each on a connection of its own, send turns of one prediction and one datum to learn. In the
middle the process is killed by signal 9 and started anew, and the clients go on from the position that it
names. At the end its state is compared, bit for bit, with that of a process of the same requests that was never
killed. Latencies are those that a client sees. ``restart`` is from the start of the process to its first
answer. Writes ``http_load.csv`` and ``http_load.txt``.

    python tests/benchmarks/http_load.py
"""

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pandas as pd
from provenance import describe
from sklearn.datasets import load_breast_cancer

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "results"
sys.path.insert(0, str(ROOT / "examples"))

import serve_http  # noqa: E402

PERCENTILES = (50, 95, 99, 99.9)


def start(folder, save_every):
    """A server in a process of its own, its port, and the seconds to its first answer."""
    begin = time.perf_counter()
    script = ROOT / "examples" / "serve_http.py"
    options = [
        "--folder",
        folder,
        "--num-features",
        "30",
        "--port",
        "0",
        "--save-every",
        str(save_every),
    ]
    process = subprocess.Popen(
        [sys.executable, script, *options], stdout=subprocess.PIPE, text=True
    )
    port = int(process.stdout.readline().split()[1])
    call(http.client.HTTPConnection("127.0.0.1", port), "predict", {"x": [1.0] * 30})
    return process, port, time.perf_counter() - begin


def call(connection, path, body=None):
    """The answer to one request.

    Raises:
        RuntimeError: If the server refuses it.
    """
    method = "GET" if body is None else "POST"
    connection.request(method, f"/{path}", None if body is None else json.dumps(body))
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        raise RuntimeError(answer["error"])
    return answer


def send(port, rows, latencies):
    """Predict and learn each row on one connection; seconds of each request are added to ``latencies``."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    for x, y in rows:
        for path, body in (("predict", {"x": x}), ("learn", {"x": x, "y": y})):
            begin = time.perf_counter()
            call(connection, path, body)
            latencies[path].append(time.perf_counter() - begin)


def load(port, rows, num_clients):
    """Rows to a server by several clients; latencies by path, and seconds in all."""
    latencies = [{"predict": [], "learn": []} for _ in range(num_clients)]
    threads = [
        threading.Thread(target=send, args=(port, rows[k::num_clients], latencies[k]))
        for k in range(num_clients)
    ]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    return {
        path: np.concatenate([each[path] for each in latencies])
        for path in ("predict", "learn")
    }, seconds


def kill_in_the_middle(port, process, rows, num_before):
    """Send rows by one client until the process is killed, at some time after ``num_before`` answers.

    Returns:
        The number of rows that the server answered.
    """
    connection, answered = http.client.HTTPConnection("127.0.0.1", port), 0
    killer = threading.Event()

    def kill():
        killer.wait()
        os.kill(process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    for x, y in rows:
        if answered == num_before:
            killer.set()
        try:
            call(connection, "learn", {"x": x, "y": y})
        except (OSError, http.client.HTTPException):
            break
        answered += 1
    killer.set()
    thread.join()
    process.wait()
    return answered


def percentiles(name, num_clients, latencies, seconds):
    """A row of the table; microseconds."""
    values = dict(
        zip(
            (f"p{p:g}" for p in PERCENTILES),
            np.percentile(1e6 * latencies, PERCENTILES),
            strict=True,
        )
    )
    return {
        "request": name,
        "clients": num_clients,
        "per_second": len(latencies) / seconds,
    } | {key: round(value) for key, value in values.items()}


def main():
    """Measure, check, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="300 rows")
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for the tables"
    )
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    num_rows, save_every = (300, 70) if args.small else (6000, 1000)
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).integers(len(y), size=num_rows)
    rows = [(x[n].tolist(), int(y[n])) for n in order]
    table, begin = [], 0
    with tempfile.TemporaryDirectory() as folder:
        process, port, first_start = start(folder, save_every)
        for num_clients in (1, 8):
            part = rows[begin : begin + num_rows // 3]
            begin += len(part)
            latencies, seconds = load(port, part, num_clients)
            table += [
                percentiles(path, num_clients, values, seconds)
                for path, values in latencies.items()
            ]
        answered = kill_in_the_middle(port, process, rows[begin:], num_rows // 6)
        process, port, restart = start(folder, save_every)
        connection = http.client.HTTPConnection("127.0.0.1", port)
        position = call(connection, "health")["position"]
        # What was answered is there; of the request that was cut off the server may have read the whole.
        lost = begin + answered - position
        assert lost in (0, -1), lost
        send(port, rows[position:], {"predict": [], "learn": []})
        health = call(connection, "health")
        assert health["position"] == num_rows, health
        process.kill()
        process.wait()
        killed = serve_http.Stream(folder, 30)
        journal = [
            json.loads(line)
            for line in (Path(folder) / "journal.jsonl").read_text().splitlines()
        ]
        with tempfile.TemporaryDirectory() as other:
            never = serve_http.Stream(other, 30, save_every=10 * num_rows)
            for record in journal:
                never.apply(record)
            for name, service in killed.services.items():
                leaves = zip(
                    *map(jax.tree.leaves, (service.state, never.services[name].state)),
                    strict=True,
                )
                assert all(np.array_equal(a, b) for a, b in leaves), name
    frame = pd.DataFrame(table).round({"per_second": 0})
    lines = [
        describe(
            f"{num_rows} rows of 30 features, full covariance, with a shadow; microseconds"
        ),
        frame.to_string(index=False),
        "",
        f"start {first_start:.1f} s, restart after kill -9 {restart:.1f} s",
        f"rows answered before the kill and not learnt after it: {max(lost, 0)}",
        "state after the kill equal, bit for bit, to that of a process that was never killed: yes",
        f"mean loss {health['mean_loss']['decides']:.3f}, of the prior {health['prior_loss']:.3f}, "
        f"alarms {health['alarms']}",
    ]
    frame.to_csv(args.output / "http_load.csv", index=False)
    (args.output / "http_load.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
