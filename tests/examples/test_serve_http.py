"""The example that serves a stream by HTTP: what it answers, refuses, saves and takes up again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# In a process of its own, as the example sets how JAX runs its programs before anything else does.
SCRIPT = """
import http.client, json, math, sys, threading
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, "examples")
import serve_http

folder = Path(sys.argv[1])


def equal(one, other):
    return all(
        np.array_equal(a, b)
        for name in one.services
        for a, b in zip(*(jax.tree.leaves(each.services[name].state) for each in (one, other)), strict=True)
    )


stream = serve_http.Stream(folder, 2, save_every=10)
server = serve_http.serve(stream, 0)
threading.Thread(target=server.serve_forever, daemon=True).start()
connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1])


def call(path, body=None):
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
    response = connection.getresponse()
    return response.status, json.loads(response.read())


rng = np.random.default_rng(0)
for n in range(25):
    x = (rng.normal(size=2) * [1.0, 1e4]).tolist()
    status, answer = call("/learn", {"x": x, "y": int(x[0] > 0)})
    assert status == 200 and answer["position"] == n + 1, answer
answers = {}
answers["predict"] = call("/predict", {"x": [3.0, 0.0]})
answers["short"] = call("/learn", {"x": [1.0], "y": 1})
answers["label"] = call("/learn", {"x": [1.0, 2.0], "y": 2})
answers["text"] = call("/learn", {"x": ["a", "b"], "y": 1})
answers["unknown"] = call("/learn", {"z": 1})
answers["path"] = call("/nothing", {})
answers["missing"] = call("/learn", {"x": [math.nan, 1.0], "y": 1})
answers["health"] = call("/health")
# Another process would find this.
answers["again"] = equal(stream, serve_http.Stream(folder, 2))
answers["no state"] = call("/rollback", {"position": 3})
answers["rollback"] = call("/rollback", {"position": 10})
answers["health after"] = call("/health")
with (folder / "journal.jsonl").open("ab") as journal:
    journal.write(b'{"x": [1.0, ')
later = serve_http.Stream(folder, 2)
answers["after a cut line"] = equal(stream, later), later.position
print(json.dumps(answers))
"""


@pytest.mark.full
def test_a_stream_behind_http(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    status, answer = answers["predict"]
    assert status == 200
    assert answer["probability"] > 0.8
    assert answer["sd"] > 0
    for name, message in {
        "short": "x must have 2 numbers, got shape [1]",
        "label": "y must be 0 or 1, got 2",
        "text": "could not convert string to float",
        "unknown": "unexpected keyword argument 'z'",
        "no state": "there are states at [10, 20], got 3",
    }.items():
        status, answer = answers[name]
        assert status == 400
        assert message.replace("[1]", "(1,)") in answer["error"]
    assert answers["path"][0] == 404
    # A row without a number is a rejected round.
    assert answers["missing"][0] == 200
    health = answers["health"][1]
    assert (health["position"], health["rounds"], health["rejected"]) == (26, 25, 1)
    assert health["mean_loss"]["decides"] < health["prior_loss"]
    assert health["alarms"] == []
    assert answers["again"]
    assert answers["rollback"] == [200, {"position": 27}]
    assert answers["health after"][1]["rounds"] == 10
    assert answers["after a cut line"] == [True, 27]
