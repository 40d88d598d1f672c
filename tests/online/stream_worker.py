"""Streams whose arrays lie on two processes; prints what ``test_shared_streams`` compares.

``python stream_worker.py CASES PORT PROCESS FOLDER`` is one of two processes with one device each. With a number
after the folder the second process is killed by the system before that batch.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import numpy as np

NUM_ROUNDS, NUM_ROWS, DIMENSION = 60, 8, 3


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROUNDS, NUM_ROWS, DIMENSION))
    eta = x @ np.array([1.0, -2.0, 0.5])
    return (
        x,
        eta + rng.normal(size=eta.shape),
        np.sign(eta + rng.normal(size=eta.shape)),
    )


class Here:
    """Arrays of this process, as a stream that knows nothing of others has them."""

    def place(self, array, axis=0):
        import jax.numpy as jnp

        return jnp.asarray(array)


class OneOfTwo:
    """Arrays of which each process makes one half."""

    def __init__(self, mesh, process):
        self.mesh, self.process = mesh, process

    def place(self, array, axis=0):
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        part = np.array_split(array, 2, axis=axis)[self.process]
        sharding = NamedSharding(self.mesh, PartitionSpec(*[None] * axis, "rows"))
        return jax.make_array_from_process_local_data(sharding, part)


def plain(tree):
    import jax

    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(tree)]


def mean_field():
    import jax.numpy as jnp

    import numpyro_tempered as nt

    return nt.gaussian.families.MeanField(jnp.zeros(DIMENSION), jnp.ones(DIMENSION))


def full_rank():
    import jax.numpy as jnp

    import numpyro_tempered as nt

    return nt.gaussian.families.FullRank(
        jnp.zeros(DIMENSION), 10.0 * jnp.eye(DIMENSION)
    )


def batches(where):
    """A grid of rules on batches whose rows lie on both processes."""
    import numpyro_tempered as nt

    x, _, labels = data()
    rule = nt.online.aggregate(nt.online.grid(nt.online.ngvi, step_size=[0.25, 1.0]))
    start = rule.init(mean_field())
    state, losses = nt.online.run(
        rule, nt.expectations.hinge(), start, where.place(x, 1), where.place(labels, 1)
    )
    return plain((state.posterior, losses, nt.online.weights(state), state.count))


def masked_updates(where):
    """Round after round, with rows that are off; the state of a round goes into the next."""
    import numpyro_tempered as nt

    x, y, _ = data()
    rule, loss = nt.online.rvga(0.5), nt.expectations.squared()
    state, on = rule.init(full_rank()), where.place(np.arange(NUM_ROWS) != 5)
    for t in range(4):
        state, losses = nt.online.update(
            rule, loss, state, where.place(x[t]), where.place(y[t]), mask=on
        )
    return plain((state.posterior, losses, state.cumulative))


def model(x, y):
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    beta = numpyro.sample(
        "beta", dist.Normal(0.0, 10.0).expand([DIMENSION]).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ beta)
    with numpyro.plate("n", jnp.shape(y)[0]):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def online_of_model():
    import numpyro_tempered as nt

    quadrature = nt.expectations.gauss_hermite(predictor="eta")
    return nt.OnlineVI(
        model, nt.guides.AutoOnlineMultivariateNormal, expectation=quadrature
    )


def model_updates(where):
    import jax

    x, _, labels = data()
    outcomes = (labels > 0).astype(float)
    online = online_of_model()
    state = online.init(jax.random.key(0), where.place(x[0]), where.place(outcomes[0]))
    for t in range(3):
        state, losses = online.update(
            state, where.place(x[t]), where.place(outcomes[t])
        )
    return plain((state.posterior, losses))


def model_run(where):
    """Rows whose order goes from one process to the other, whole and in chunks."""
    import jax

    x, _, labels = data()
    x, outcomes = x[:, 0], (labels[:, 0] > 0).astype(float)
    online = online_of_model()
    state, losses = online.run(jax.random.key(0), where.place(x), where.place(outcomes))
    chunks = [
        (where.place(x[a:b]), where.place(outcomes[a:b]))
        for a, b in [(0, 20), (20, 60)]
    ]
    again, _ = online.run_chunks(jax.random.key(0), chunks, size=32, keep="nothing")
    return plain((state.posterior, losses, again.posterior))


def chunks(where):
    """Chunks of batches whose rows lie on both processes."""
    import numpyro_tempered as nt

    x, y, _ = data()
    rule, loss = nt.online.rvga(0.5), nt.expectations.squared()
    parts = [
        (where.place(x[a:b], 1), where.place(y[a:b], 1)) for a, b in [(0, 20), (20, 60)]
    ]
    state, losses = nt.online.run_chunks(
        rule, loss, rule.init(full_rank()), parts, size=16
    )
    return plain((state.posterior, losses))


def many_streams(where):
    """A stack of streams, half of them on each process: means over the streams of what they learn."""
    import jax
    import jax.numpy as jnp

    import numpyro_tempered as nt

    x, _, labels = data()
    rule, loss = nt.online.ngvi(), nt.expectations.hinge()
    start = rule.init(mean_field())
    states = jax.tree.map(
        lambda leaf: where.place(
            np.broadcast_to(leaf, (NUM_ROWS, *np.shape(leaf))).copy()
        ),
        start,
    )

    @jax.jit
    def learn(states, x, y):
        states, losses = jax.vmap(lambda s, x, y: nt.online.run(rule, loss, s, x, y))(
            states, x, y
        )
        return states, jax.tree.map(
            lambda leaf: jnp.mean(leaf, axis=0), (states.posterior, losses)
        )

    rows = (where.place(np.swapaxes(x, 0, 1).copy()), where.place(labels.T.copy()))
    return plain(learn(states, *rows)[1])


def message_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def refusals(where):
    """What is wrong with the rows of one process, told by both."""
    import jax

    import numpyro_tempered as nt

    x, y, labels = data()
    rule, hinge, squared = (
        nt.online.ngvi(),
        nt.expectations.hinge(),
        nt.expectations.squared(),
    )
    start = rule.init(mean_field())
    # Rows 4 to 7 lie on the second process.
    wrong, missing, empty = labels.copy(), y.copy(), np.full_like(y, np.nan)
    wrong[3, 6], missing[[3, 9], 6] = 7.0, np.nan
    xs = where.place(x, 1)
    label = message_of(
        lambda: nt.online.run(rule, hinge, start, xs, where.place(wrong, 1))
    )
    nothing = message_of(
        lambda: nt.online.run(rule, squared, start, xs, where.place(empty, 1))
    )
    chunk = message_of(
        lambda: nt.online.run_chunks(rule, hinge, start, [(xs, where.place(wrong, 1))])
    )
    online = online_of_model()
    state = online.init(jax.random.key(0), where.place(x[0]), where.place(labels[0]))
    support = message_of(
        lambda: online.update(state, where.place(x[0]), where.place(labels[0]))
    )
    with warnings.catch_warnings(record=True) as issued:
        warnings.simplefilter("always", nt.online.StreamWarning)
        nt.online.run(rule, squared, start, xs, where.place(missing, 1))
    warned = [
        str(each.message)
        for each in issued
        if issubclass(each.category, nt.online.StreamWarning)
    ]
    return [label, nothing, chunk, support, *warned]


def different_data(where):
    """Data of this process alone, for a state that both hold; keys and states of its own, for data of both."""
    import jax

    import numpyro_tempered as nt

    x, y, _ = data()
    rule, loss = nt.online.ngvi(), nt.expectations.squared()
    start = rule.init(mean_field())
    state, _ = nt.online.update(rule, loss, start, where.place(x[0]), where.place(y[0]))
    t = 1 + where.process
    xs, ys = where.place(x, 1), where.place(y, 1)
    drawn, key = (
        nt.expectations.monte_carlo(lambda theta, x, y: (y - x @ theta) ** 2),
        jax.random.key(t),
    )
    return [
        message_of(lambda: nt.online.update(rule, loss, state, x[t], y[t])),
        message_of(lambda: nt.online.run_chunks(rule, loss, state, [(x[t:], y[t:])])),
        message_of(
            lambda: nt.online.run(
                rule, drawn, rule.init(mean_field()), xs, ys, rng_key=key
            )
        ),
        message_of(
            lambda: nt.online.run_chunks(
                rule, loss, start._replace(count=start.count + t), [(xs, ys)]
            )
        ),
    ]


def write_table(folder):
    """Rows in groups of ten, of which the first process reads two and the second, with five rows, one."""
    import pandas as pd

    x, y, _ = data()
    columns = {"a": x[:25, 0, 0], "b": x[:25, 0, 1], "c": x[:25, 0, 2], "y": y[:25, 0]}
    pd.DataFrame(columns).to_parquet(folder / "rows.parquet", row_group_size=10)
    pd.DataFrame(columns).iloc[:7].to_parquet(folder / "one_group.parquet")


def learn(where, path, killed_before=None, size=8, save_to=None):
    """A stream of which each process reads its own row groups, saved every third batch and gone on with."""
    import jax

    import numpyro_tempered as nt

    rule, loss = nt.online.rvga(0.5), nt.expectations.squared()
    state = rule.init(full_rank())
    if save_to is not None and save_to.exists():
        state = nt.online.restore(save_to, like=state)
    seen = int(state.count + state.rejected)
    rows = nt.online.parquet_chunks(
        path, "y", part=(jax.process_index(), jax.process_count())
    )
    batches = nt.online.global_batches(rows, size=size, skip=seen)
    sizes = []
    for number, ((x, y), mask) in enumerate(batches, start=seen):
        if number == killed_before and where.process == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state, _ = nt.online.update(rule, loss, state, x, y, mask=mask)
        sizes.append(int(mask.sum()))
        if save_to is not None and number % 3 == 2:
            nt.online.save(save_to, state)
    return {"resumed_at": seen, "sizes": sizes, "state": plain(state)}


def row_groups(where, folder):
    """Unequal shares, a share without rows, and a reader that fails on one process."""
    import numpyro_tempered as nt

    def broken():
        x, y, _ = data()
        yield x[0], y[0]
        if where.process == 1:
            raise OSError("the disk is gone")
        yield x[1], y[1]

    def all_of(chunks):
        return list(nt.online.global_batches(chunks, size=16))

    x, y, _ = data()
    forms = [(x[0], y[0])] if where.process == 0 else [(x[0][:, :2], y[0])]
    return {
        "unequal": learn(where, folder / "rows.parquet"),
        "one group": learn(where, folder / "one_group.parquet"),
        "broken": message_of(lambda: all_of(broken())),
        "forms": message_of(lambda: all_of(forms)),
        "nothing": message_of(lambda: all_of([])),
    }


def saved(where, folder):
    """States that all hold, and that are shared out, with keys of their own; damaged parts and other numbers."""
    import jax

    import numpyro_tempered as nt

    x, y, _ = data()
    rule, loss = nt.online.rvga(0.5), nt.expectations.squared()
    start = rule.init(full_rank())
    state, _ = nt.online.update(rule, loss, start, where.place(x[0]), where.place(y[0]))
    nt.online.save(folder / "whole.npz", state)
    again = nt.online.restore(folder / "whole.npz", like=start)
    results = {"whole": plain(again) == plain(state)}

    def learned(rounds):
        states = jax.tree.map(
            lambda leaf: where.place(
                np.broadcast_to(leaf, (NUM_ROWS, *np.shape(leaf))).copy()
            ),
            start,
        )
        rows = (
            where.place(np.swapaxes(x, 0, 1)[:, :rounds].copy()),
            where.place(y.T[:, :rounds].copy()),
        )
        states, _ = jax.jit(
            jax.vmap(lambda s, x, y: nt.online.run(rule, loss, s, x, y))
        )(states, *rows)
        keys = jax.jit(
            jax.vmap(jax.random.key),
            out_shardings=rows[1].sharding.update(spec=("rows",)),
        )(np.arange(NUM_ROWS))
        return {"states": states, "keys": keys}

    def bits(tree):
        parts = [jax.random.key_data(tree["keys"]), *jax.tree.leaves(tree["states"])]
        return [
            np.asarray(leaf.addressable_shards[0].data).tobytes().hex()
            for leaf in parts
        ]

    path, older, newer = folder / "stack.npz", learned(5), learned(9)
    for each in (learned(2), older, newer):
        nt.online.save(path, each)
    results["parts"] = bits(nt.online.restore(path, like=newer)) == bits(newer)
    results["files"] = sorted(file.name for file in folder.glob("stack*"))
    # The third save goes to the second file; the second process loses it.
    if where.process == 1:
        part = folder / "stack.1of2.b.npz"
        part.write_bytes(part.read_bytes()[:-100])
    results["damaged"] = bits(nt.online.restore(path, like=newer)) == bits(older)
    nt.online.save(path, newer)
    results["saved again"] = bits(nt.online.restore(path, like=older)) == bits(newer)
    results["absent"] = message_of(
        lambda: nt.online.restore(folder / "absent.npz", like=newer)
    )
    (folder / "other.0of3.a.npz").touch()
    results["number"] = message_of(
        lambda: nt.online.restore(folder / "other.npz", like=newer)
    )
    coarse = jax.tree.map(lambda leaf: leaf.astype("float32"), newer["states"])
    results["form"] = message_of(
        lambda: nt.online.restore(path, like=newer | {"states": coarse})
    )
    return results


def survivor(where, folder, killed_before=None):
    """The stream that is killed, or goes on."""
    return learn(
        where, folder / "rows.parquet", killed_before, save_to=folder / "state.npz"
    )


NUMBERS = (batches, masked_updates, model_updates, model_run, chunks, many_streams)


def as_one_of_two(cases, port, process, folder, killed_before=None):
    import inspect

    import jax

    jax.config.update("jax_enable_x64", True)
    # Older versions take a hundred seconds to miss a process.
    names = inspect.signature(jax.distributed.initialize).parameters
    options = (
        {"heartbeat_timeout_seconds": 10}
        if "heartbeat_timeout_seconds" in names
        else {}
    )
    jax.distributed.initialize(
        f"localhost:{port}", num_processes=2, process_id=process, **options
    )
    # As documents of JAX make a mesh: its axes may be explicit.
    where, results = OneOfTwo(jax.make_mesh((2,), ("rows",)), process), {}
    for name in cases:
        more = {
            "row_groups": (folder,),
            "saved": (folder,),
            "survivor": (folder, killed_before),
        }.get(name, ())
        results[name] = globals()[name](where, *more)
    return results


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    cases, port, process, folder, *killed_before = sys.argv[1:]
    print(
        json.dumps(
            as_one_of_two(
                cases.split(","),
                int(port),
                int(process),
                Path(folder),
                *map(int, killed_before),
            )
        )
    )
