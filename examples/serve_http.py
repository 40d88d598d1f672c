"""A stream behind HTTP, with the standard library alone: learn, predict, watch, roll back, survive kill -9.

A logistic regression of full covariance learns from one request at a time::

    python examples/serve_http.py --folder stream --num-features 30 --port 8000
    curl -d '{"x": [...], "y": 1}' localhost:8000/learn
    curl -d '{"x": [...]}' localhost:8000/predict
    curl localhost:8000/health
    curl -d '{"position": 1000}' localhost:8000/rollback

Features are in raw units; labels are 0 and 1. A request is appended to a journal before it is learnt, and the
state is saved every so many requests with its position in the journal. A process that starts restores the last
state and learns what the journal has beyond it, so that after a kill the state is, bit for bit, that of a
process that was never killed. The operating system has what was written: to survive a loss of power as well,
start with ``--sync``.

``/health`` says how the stream is doing: the mean loss before each update, of all rounds and of the last
hundred or so, beside that of the prior, which is log 2; the rejected rounds; and the same for a shadow, another
rule that learns from the same stream and decides nothing. ``alarms`` names what is wrong.
"""

import argparse
import json
import math
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import jax

# Rounds are shorter than the way to another thread.
jax.config.update("jax_cpu_enable_async_dispatch", False)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import numpyro_tempered as nt  # noqa: E402

LOGISTIC = nt.expectations.logistic()
# Of the mean of recent losses: a window of a hundred rounds.
RECENT = 0.01
NUM_STATES = 5


def rules(num_features):
    """The rule that decides, and its shadow, which forgets, with their starts; feature 0 is the intercept."""
    d = num_features + 1
    decides = nt.online.standardise(nt.online.rvga(), intercept=0)
    shadow = nt.online.standardise(
        nt.online.rvga(forget=nt.online.power(0.99)), intercept=0
    )
    return {
        "decides": (
            decides,
            decides.init(nt.gaussian.families.FullRank(jnp.zeros(d), jnp.eye(d))),
        ),
        "shadow": (
            shadow,
            shadow.init(nt.gaussian.families.MeanField(jnp.zeros(d), jnp.ones(d))),
        ),
    }


class Stream:
    """Two rules on one stream, with a journal and saved states.

    Args:
        folder: Of the journal and the states.
        num_features: Number of features, without the intercept.
        save_every: Number of requests between saved states.
        sync: Whether to wait for the disk before each answer.
    """

    def __init__(self, folder, num_features, save_every=1000, sync=False):
        self.folder, self.num_features, self.save_every, self.sync = (
            Path(folder),
            num_features,
            save_every,
            sync,
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = threading.Lock()
        one = np.ones(num_features + 1)
        self.services = {
            name: nt.online.Service(rule, LOGISTIC, start, one, 1.0)
            for name, (rule, start) in rules(num_features).items()
        }
        # Compile before the first request.
        for service in self.services.values():
            before = service.state
            service.learn(one, 1.0)
            service.predict(one)
            service.class_probabilities(one)
            service.load(before)
        self.recent = dict.fromkeys(self.services, math.log(2.0))
        self.total = dict.fromkeys(self.services, 0.0)
        self.position, self.num_rounds, self.num_rejected = 0, 0, 0
        journal = self.folder / "journal.jsonl"
        lines = (
            journal.read_bytes().splitlines(keepends=True) if journal.exists() else []
        )
        if lines and not lines[-1].endswith(b"\n"):
            # Of a request that was never answered.
            lines.pop()
            os.truncate(journal, sum(map(len, lines)))
        if saved := self.saved():
            self.load(saved[-1])
        for line in lines[self.position :]:
            self.apply(json.loads(line))
        self.journal = os.open(journal, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def saved(self):
        """The positions of saved states."""
        return sorted(
            int(path.stem.split("-")[1]) for path in self.folder.glob("state-*.npz")
        )

    def save(self):
        """Write the state at this position, and remove the oldest."""
        tree = {name: service.state for name, service in self.services.items()}
        numbers = np.array(
            [
                self.num_rounds,
                self.num_rejected,
                *self.recent.values(),
                *self.total.values(),
            ]
        )
        nt.online.save(self.folder / f"state-{self.position}.npz", (tree, numbers))
        for position in self.saved()[:-NUM_STATES]:
            (self.folder / f"state-{position}.npz").unlink()

    def load(self, position):
        """Go on from a saved state."""
        tree = {name: service.state for name, service in self.services.items()}
        like = tree, np.zeros(2 + 2 * len(tree))
        tree, numbers = nt.online.restore(self.folder / f"state-{position}.npz", like)
        for name, service in self.services.items():
            service.load(tree[name])
        values = np.asarray(numbers).tolist()
        self.num_rounds, self.num_rejected = map(int, values[:2])
        names = list(self.services)
        self.recent = dict(zip(names, values[2 : 2 + len(names)], strict=True))
        self.total = dict(zip(names, values[2 + len(names) :], strict=True))
        self.position = position

    def row(self, x):
        """The features with the intercept.

        Raises:
            ValueError: If they are not as many as there are.
        """
        row = np.empty(self.num_features + 1)
        if np.shape(x) != (self.num_features,):
            raise ValueError(
                f"x must have {self.num_features} numbers, got shape {np.shape(x)}."
            )
        row[0], row[1:] = 1.0, x
        return row

    def apply(self, record):
        """What a line of the journal says; the losses of a round."""
        self.position += 1
        if "load" in record:
            position = self.position
            self.load(record["load"])
            self.position = position
            return {}
        x, y = self.row(record["x"]), 2.0 * record["y"] - 1.0
        losses = {}
        for name, service in self.services.items():
            losses[name] = service.learn(x, y).at_mean
            # A round that is not finite is rejected: the states are as they were.
            if math.isfinite(losses[name]):
                self.recent[name] += RECENT * (losses[name] - self.recent[name])
                self.total[name] += losses[name]
        rejected = not all(map(math.isfinite, losses.values()))
        self.num_rejected += rejected
        self.num_rounds += not rejected
        return losses

    def write(self, record):
        """Append to the journal, and do what it says."""
        os.write(self.journal, json.dumps(record).encode() + b"\n")
        if self.sync:
            os.fsync(self.journal)
        answer = self.apply(record)
        if self.position % self.save_every == 0:
            self.save()
        return answer

    def learn(self, x, y):
        """One round, and what was predicted before it."""
        if y not in (0, 1):
            raise ValueError(f"y must be 0 or 1, got {y!r}.")
        with self.lock:
            probability = self.services["decides"].class_probabilities(self.row(x))[1]
            losses = self.write({"x": x, "y": y})
            return {
                "position": self.position,
                "probability": float(probability),
                "losses": losses,
            }

    def predict(self, x):
        """The probability of 1, and mean and standard deviation of the predictor."""
        row, service = self.row(x), self.services["decides"]
        mean, variance = service.predict(row)
        return {
            "probability": float(service.class_probabilities(row)[1]),
            "mean": mean,
            "sd": variance**0.5,
        }

    def rollback(self, position):
        """Go on from an older state; the journal says so, and has all requests still."""
        with self.lock:
            if position not in self.saved():
                raise ValueError(
                    f"there are states at {self.saved()}, got {position!r}."
                )
            self.write({"load": position})
            # The older ones may go before the journal is read again.
            self.save()
            return {"position": self.position}

    def health(self):
        """How the stream is doing."""
        with self.lock:
            count = max(self.num_rounds, 1)
            mean = {name: total / count for name, total in self.total.items()}
            recent, prior = dict(self.recent), math.log(2.0)
            alarms = {
                "recent losses are above the prior's": recent["decides"] > prior,
                "the source may have changed: the shadow, which forgets, is better": (
                    recent["shadow"] < 0.8 * recent["decides"]
                ),
                "more than one round in a hundred is rejected": self.num_rejected
                > 0.01 * count + 1,
            }
            return {
                "position": self.position,
                "rounds": self.num_rounds,
                "rejected": self.num_rejected,
                "mean_loss": mean,
                "recent_loss": recent,
                "prior_loss": prior,
                "alarms": [name for name, on in alarms.items() if on],
                "saved": self.saved(),
            }


class Handler(BaseHTTPRequestHandler):
    """Requests to a stream, as JSON."""

    protocol_version = "HTTP/1.1"
    # Without it an answer in two packets waits for the client's acknowledgement, 40 ms.
    disable_nagle_algorithm = True
    wbufsize = -1

    def answer(self, status, value):
        """Send a value."""
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        """``/health``."""
        if self.path != "/health":
            self.answer(404, {"error": "GET /health"})
            return
        self.answer(200, self.server.stream.health())

    def do_POST(self):
        """``/learn``, ``/predict`` and ``/rollback``."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        stream = self.server.stream
        calls = {
            "/learn": stream.learn,
            "/predict": stream.predict,
            "/rollback": stream.rollback,
        }
        if self.path not in calls:
            self.answer(404, {"error": f"POST one of {list(calls)}"})
            return
        try:
            self.answer(200, calls[self.path](**json.loads(body)))
        except (TypeError, ValueError) as error:
            self.answer(400, {"error": str(error)})

    def log_message(self, *args):
        """Nothing for each request."""


def serve(stream, port):
    """A server on loopback; port 0 takes a free one."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.stream = stream
    return server


def main():
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, help="of the journal and the states")
    parser.add_argument(
        "--num-features", type=int, required=True, help="without the intercept"
    )
    parser.add_argument(
        "--save-every", type=int, default=1000, help="requests between saved states"
    )
    parser.add_argument(
        "--sync", action="store_true", help="wait for the disk before each answer"
    )
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    server = serve(
        Stream(args.folder, args.num_features, args.save_every, args.sync), args.port
    )
    print(f"port {server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
