"""IVON beside Adam: the time of a step of a network of a million weights, and one pass over digits.

Steps take turns, 40 times; ratios are medians of pairs, in seven processes. The pass is over the first 900
digits of scikit-learn, in turn, by a network of 64-84-10 tanh units with 6,310 weights and N(0, 1) priors;
accuracy is that of the means on the other 897. IVON has its defaults; with optax a step size of 0.1, and
clip_deviations of 0.3. Adam is on the weights alone, without a prior, and through SVI. Writes ``ivon.txt``.

    python tests/benchmarks/ivon.py
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from calls import in_new_process
from numpyro.infer import SVI, Trace_ELBO
from provenance import describe
from sklearn.datasets import load_digits

import numpyro_tempered as nt

RESULT = Path(__file__).resolve().parents[2] / "docs" / "results" / "ivon.txt"
NUM_REPEATS, NUM_PROCESSES, SEEDS, NUM_TRAIN = 40, 7, range(5), 900
LARGE = {"first": (784, 1000), "second": (1000, 210), "third": (210, 10)}
SMALL = {"hidden": (64, 84), "hidden_bias": (84,), "out": (84, 10), "out_bias": (10,)}


def large_network(params, x):
    return (
        jax.nn.relu(jax.nn.relu(x @ params["first"]) @ params["second"])
        @ params["third"]
    )


def small_network(params, x):
    return (
        jnp.tanh(x @ params["hidden"] + params["hidden_bias"]) @ params["out"]
        + params["out_bias"]
    )


def mean_loss(network):
    return lambda params, x, y: jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(network(params, x), y)
    )


def model_of(network, shapes, num_data):
    def model(x, y=None):
        params = {
            k: numpyro.sample(k, dist.Normal(0.0, 1.0).expand(s).to_event())
            for k, s in shapes.items()
        }
        with numpyro.plate("n", num_data, subsample_size=len(x)):
            numpyro.sample("y", dist.Categorical(logits=network(params, x)), obs=y)

    return model


def fan_in_start(rng_key, shapes):
    """Normal draws over the root of the fan-in; biases at 0."""
    keys = jax.random.split(rng_key, len(shapes))
    return {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        if len(shape) > 1
        else jnp.zeros(shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def adam_step(loss, step_size):
    """The start and the step of Adam on the weights alone."""
    optimiser = optax.adam(step_size)

    def step(carry, x, y, _key):
        params, state = carry
        updates, state = optimiser.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    return lambda params: (params, optimiser.init(params)), step


def ivon_step(loss, num_data, noise):
    """The same of IVON as a gradient transformation."""
    optimiser = optax.chain(
        nt.optim.scale_by_ivon(num_data, clip_deviations=0.3),
        optax.scale_by_learning_rate(0.1),
    )

    def step(carry, x, y, key):
        params, state = carry
        draw = nt.optim.sample_ivon(key, params, state, noise=noise)
        updates, state = optimiser.update(
            jax.grad(loss)(draw, x, y), state, params, weights=draw
        )
        return optax.apply_updates(params, updates), state

    return lambda params: (params, optimiser.init(params)), step


def svi_of(model, make_optim):
    guide = nt.guides.AutoNetworkNormal(model)
    return SVI(model, guide, make_optim(guide), Trace_ELBO())


def take_turns(calls, num_repeats):
    """Seconds of each call, by name, shape (num_repeats,)."""
    for call in calls.values():
        jax.block_until_ready(call())
    seconds = {name: [] for name in calls}
    for _ in range(num_repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def time_steps():
    """The time of a step over that of Adam on the same route."""
    rng = np.random.default_rng(0)
    x, y = (
        jnp.asarray(rng.normal(size=(128, 784)), jnp.float32),
        jnp.asarray(rng.integers(0, 10, 128)),
    )
    params, loss = fan_in_start(jax.random.key(0), LARGE), mean_loss(large_network)
    model = model_of(large_network, LARGE, 60_000)
    calls = {}
    for name, (begin, step) in {
        "Adam, optax": adam_step(loss, 1e-3),
        "IVON, optax, quick_noise": ivon_step(loss, 60_000, nt.optim.quick_noise),
        "IVON, optax, jax.random.normal": ivon_step(loss, 60_000, jax.random.normal),
    }.items():
        calls[name] = partial(jax.jit(step), begin(params), x, y, jax.random.key(0))
    for name, make_optim in {
        "Adam, SVI": lambda guide: numpyro.optim.Adam(1e-3),
        "IVON, SVI": nt.optim.IVON,
    }.items():
        svi = svi_of(model, make_optim)
        calls[name] = partial(
            jax.jit(svi.update), svi.init(jax.random.key(0), x, y), x, y
        )
    seconds = take_turns(calls, NUM_REPEATS)
    return {
        name: float(
            np.median(values / seconds["Adam, SVI" if "SVI" in name else "Adam, optax"])
        )
        for name, values in seconds.items()
    }


def table_of_steps():
    """Median, least and most over processes, as the place of a million numbers in memory decides as much."""
    ratios = [in_new_process(__file__, "steps") for _ in range(NUM_PROCESSES)]
    for name in ratios[0]:
        values = [each[name] for each in ratios]
        yield f"{name:32s} {np.median(values):6.2f} {min(values):6.2f} {max(values):6.2f}"


def passes():
    """For each contestant a function of a seed, to the means after one pass."""
    digits = load_digits()
    x, y = jnp.asarray(digits.data / 16.0, jnp.float32), jnp.asarray(digits.target)
    rows = x[:NUM_TRAIN, None], y[:NUM_TRAIN, None]
    model = model_of(small_network, SMALL, NUM_TRAIN)

    def accuracy(params):
        return jnp.mean(
            jnp.argmax(small_network(params, x[NUM_TRAIN:]), 1) == y[NUM_TRAIN:]
        )

    def by_svi(make_optim):
        svi = svi_of(model, make_optim)
        svi.init(jax.random.key(0), *jax.tree.map(lambda leaf: leaf[0], rows))

        @jax.jit
        def learn(state):
            return jax.lax.scan(
                lambda state, row: (svi.update(state, *row)[0], None), state, rows
            )[0]

        def start(seed):
            # A guide holds the start of its first set-up.
            fresh = svi_of(model, make_optim)
            return fresh.init(
                jax.random.key(seed), *jax.tree.map(lambda leaf: leaf[0], rows)
            )

        def means(state):
            params = svi.get_params(state)
            return {name: params[f"{name}_auto_loc"] for name in SMALL}

        return start, learn, means

    def on_the_weights(begin, step):
        @jax.jit
        def learn(start):
            carry, key = start
            inputs = *rows, jax.random.split(key, NUM_TRAIN)
            return jax.lax.scan(
                lambda carry, row: (step(carry, *row), None), carry, inputs
            )[0]

        def start(seed):
            key, key_start = jax.random.split(jax.random.key(seed))
            return begin(fan_in_start(key_start, SMALL)), key

        return start, learn, lambda carry: carry[0]

    contestants = {"IVON, SVI": by_svi(nt.optim.IVON)}
    loss = mean_loss(small_network)
    contestants["IVON, optax, quick_noise"] = on_the_weights(
        *ivon_step(loss, NUM_TRAIN, nt.optim.quick_noise)
    )
    for size in (0.001, 0.003, 0.01, 0.03):
        contestants[f"Adam {size} on the weights"] = on_the_weights(
            *adam_step(loss, size)
        )
    contestants |= {
        f"Adam {size}, SVI": by_svi(lambda guide, size=size: numpyro.optim.Adam(size))
        for size in (0.003, 0.01)
    }
    starts = {name: start(0) for name, (start, *_) in contestants.items()}
    calls = {
        name: partial(learn, starts[name])
        for name, (_, learn, _) in contestants.items()
    }
    seconds = take_turns(calls, 15)
    for name, (start, learn, means) in contestants.items():
        right = [float(accuracy(means(learn(start(seed))))) for seed in SEEDS]
        ratio = np.median(seconds[name] / seconds["Adam 0.003 on the weights"])
        yield f"{name:32s} {np.mean(right):8.3f} {min(right):8.3f} {max(right):8.3f} {ratio:8.2f}"


def main():
    """Measure, and write the result."""
    num_weights = sum(int(np.prod(shape)) for shape in LARGE.values())
    lines = [
        describe(
            f"{num_weights} weights, batch 128, {NUM_REPEATS} repeats; 900 digits, {len(SEEDS)} seeds"
        ),
        f"One step: time over that of Adam on the same route (median, least, most of {NUM_PROCESSES} processes)",
        *table_of_steps(),
        "",
        "One pass over 900 digits: accuracy on 897 (mean, least, most), time over that of Adam on the weights",
        *passes(),
    ]
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    if "--one" in sys.argv:
        print(json.dumps(time_steps()))
    else:
        main()
