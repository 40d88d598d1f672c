"""Ways to train and to predict with a network, and runs of them, for ``network_calibration.py``."""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import numpyro_tempered as nt

BATCH, TUNING_SEED, NOISE = 100, 1000, 0.2


class Sizes(NamedTuple):
    """How much is done."""

    units: tuple = (784, 1000, 210, 10)
    checkpoints: tuple = (2, 5, 10, 20, 30, 40)
    num_draws: int = 32
    num_seeds: int = 3
    noise: tuple = (0.0, NOISE)
    alphas: tuple = (0.3, 3.0, 10.0, 30.0)
    temperatures: tuple = (0.001, 0.01, 0.03, 0.1, 0.3)
    num_values: int | None = None


SMALL = Sizes((784, 20, 10), (1, 2), 4, 1, (NOISE,), (3.0,), (0.1,), 2)


class Contestant(NamedTuple):
    """A way to train and to predict.

    Attributes:
        start: From weights and options to what the training carries.
        step: From that, a key, a batch, the rate and options to the next.
        predict: From keys, carry, options and images to log-probabilities, by name; the first one is judged.
        grids: Values of the options to try, the first ones to begin with.
        stops_early: Whether a run ends at its best checkpoint.
    """

    start: Callable
    step: Callable
    predict: dict
    grids: dict
    stops_early: bool = True


def start_weights(rng_key, units):
    """Normal draws with variance 2 / fan-in, and biases at 0."""
    keys = jax.random.split(rng_key, len(units) - 1)
    return [
        {
            "kernel": jax.random.normal(key, (before, after)) * (2.0 / before) ** 0.5,
            "bias": jnp.zeros(after),
        }
        for key, before, after in zip(keys, units, units[1:], strict=False)
    ]


def network(params, x, drop=lambda layer, h: h):
    """Logits."""
    for number, layer in enumerate(params):
        x = drop(number, x) @ layer["kernel"] + layer["bias"]
        x = x if number == len(params) - 1 else jax.nn.relu(x)
    return x


def log_probabilities(params, x, **options):
    return jax.nn.log_softmax(network(params, x, **options))


def mean_loss(params, x, y, **options):
    return -jnp.mean(
        jnp.take_along_axis(log_probabilities(params, x, **options), y[:, None], 1)
    )


def average(predict, keys):
    """The logarithm of the mean of the probabilities."""
    return jax.nn.logsumexp(jax.lax.map(predict, keys), axis=0) - jnp.log(len(keys))


def adam():
    def start(params, options):
        return params, optax.scale_by_adam().init(params)

    def step(carry, rng_key, x, y, rate, options, loss=mean_loss):
        params, state = carry
        updates, state = optax.scale_by_adam().update(
            jax.grad(loss)(params, x, y), state, params
        )
        # The decay of AdamW, apart from the gradient.
        params = jax.tree.map(
            lambda p, u: p - rate * (u + options["decay"] * p), params, updates
        )
        return params, state

    return Contestant(
        start,
        step,
        {"": lambda keys, carry, options, x: log_probabilities(carry[0], x)},
        {"rate": (0.001, 0.0003, 0.003, 0.01), "decay": (0.1, 0.0, 0.3, 1.0, 3.0)},
    )


def dropout():
    """Hidden units are left out, and inputs at half that rate."""
    base = adam()

    def mask(rng_key, options, layer, h):
        share = options["dropout"] * (0.5 if layer == 0 else 1.0)
        kept = jax.random.bernoulli(
            jax.random.fold_in(rng_key, layer), 1.0 - share, h.shape
        )
        return jnp.where(kept, h / (1.0 - share), 0.0)

    def step(carry, rng_key, x, y, rate, options):
        loss = partial(mean_loss, drop=partial(mask, rng_key, options))
        return base.step(carry, rng_key, x, y, rate, options, loss)

    def masks(keys, carry, options, x):
        return average(
            lambda key: log_probabilities(
                carry[0], x, drop=partial(mask, key, options)
            ),
            keys,
        )

    predict = {"masks": masks, "all units": base.predict[""]}
    return Contestant(
        base.start, step, predict, {"dropout": (0.3, 0.1, 0.5, 0.7), **base.grids}
    )


def ivon(num_data, grids, *, published):
    def transform(options):
        """The power alpha of the likelihood, and 1/T of that and the prior."""
        cold = 1.0 / options["T"]
        longest, share = (1e5, 0.0) if published else (5.0 * num_data / BATCH, 0.1)
        return nt.optim.scale_by_ivon(
            num_data * cold,
            alpha=options["alpha"],
            prior_precision=options["prior"] * cold,
            b2=lambda count: 1.0 - 1.0 / jnp.maximum(longest, share * count),
            clip_deviations=1.0,
        )

    def start(params, options):
        state = transform(options).init(params)
        fan_in = [float(len(layer["kernel"])) for layer in params]
        precision = [
            jax.tree.map(
                lambda leaf, n=n: jnp.full(leaf.shape, n / options["start"] ** 2), layer
            )
            for n, layer in zip(fan_in, params, strict=True)
        ]
        return params, state._replace(precision=precision)

    def step(carry, rng_key, x, y, rate, options):
        params, state = carry
        draw = nt.optim.sample_ivon(rng_key, params, state, noise=nt.optim.quick_noise)
        grads = jax.grad(mean_loss)(draw, x, y)
        updates, state = transform(options).update(grads, state, params, weights=draw)
        return jax.tree.map(lambda p, u: p - rate * u, params, updates), state

    def draws(keys, carry, options, x):
        return average(
            lambda key: log_probabilities(nt.optim.sample_ivon(key, *carry), x), keys
        )

    def means(keys, carry, options, x):
        return log_probabilities(carry[0], x)

    fixed = {"alpha": (1.0,), "T": (1.0,), "start": (0.2,)}
    # A posterior is where a run ends, not where its predictions are best.
    return Contestant(
        start, step, {"draws": draws, "means": means}, {**fixed, **grids}, published
    )


def peers(num_data):
    """Contestants by name."""
    by_ivon = partial(ivon, num_data)
    rates, priors = (0.1, 0.03, 0.3), (10.0, 1.0, 100.0)
    return {
        "Adam": adam(),
        "dropout": dropout(),
        "IVON, T = 1, published": by_ivon(
            {
                "start": (0.5, 0.2, 0.7, 1.0),
                "rate": (0.3, 0.1, 1.0, 3.0),
                "prior": priors,
            },
            published=True,
        ),
        "IVON, T = 1, settled": by_ivon(
            {"prior": (*priors, 30.0), "rate": rates}, published=False
        ),
        "IVON, T tuned, settled": by_ivon(
            {
                "T": (0.01, 0.0003, 0.001, 0.003, 0.03, 0.1),
                "prior": (1.0, 0.1, 10.0),
                "rate": rates,
            },
            published=False,
        ),
    }


class Run(NamedTuple):
    """A trained network.

    Attributes:
        score: Best log score on the validation part.
        num_epochs: Where that was.
        seconds: Of all epochs, without checkpoints.
        log_p: Log-probabilities of the test part there, by predictor.
    """

    score: float
    num_epochs: int
    seconds: float
    log_p: dict


class Trainer:
    """Runs of one contestant on one data set; programs are compiled once."""

    def __init__(self, contestant, data, sizes):
        self.contestant, self.sizes = contestant, sizes
        (x, y), (x_check, y_check), (x_test, _) = data
        num_batches = len(x) // BATCH
        num_steps = sizes.checkpoints[-1] * num_batches

        @jax.jit
        def epoch(carry, rng_key, number, options):
            def step(carry, inputs):
                count, key, rows = inputs
                rate = (
                    0.5 * options["rate"] * (1.0 + jnp.cos(jnp.pi * count / num_steps))
                )
                return contestant.step(
                    carry, key, x[rows], y[rows], rate, options
                ), None

            shuffle, key = jax.random.split(jax.random.fold_in(rng_key, number))
            rows = jax.random.permutation(shuffle, len(x)).reshape(num_batches, BATCH)
            counts = number * num_batches + jnp.arange(num_batches)
            return jax.lax.scan(
                step, carry, (counts, jax.random.split(key, num_batches), rows)
            )[0]

        @jax.jit
        def check(rng_key, carry, options):
            judged = next(iter(contestant.predict.values()))
            keys = jax.random.split(rng_key, max(sizes.num_draws // 2, 1))
            log_p = judged(keys, carry, options, x_check)
            return jnp.mean(jnp.take_along_axis(log_p, y_check[:, None], 1))

        @jax.jit
        def test(rng_key, carry, options):
            keys = jax.random.split(rng_key, sizes.num_draws)
            return {
                name: predict(keys, carry, options, x_test)
                for name, predict in contestant.predict.items()
            }

        self.epoch, self.check, self.test = epoch, check, test

    def run(self, seed, options):
        """One run."""
        key = jax.random.key(seed)
        carry = self.contestant.start(start_weights(key, self.sizes.units), options)
        pick = jax.random.fold_in(key, 2**31)
        checkpoints = self.sizes.checkpoints[0 if self.contestant.stops_early else -1 :]
        best, seconds = (-np.inf, 0, carry), 0.0
        for number in range(self.sizes.checkpoints[-1]):
            began = time.perf_counter()
            carry = jax.block_until_ready(self.epoch(carry, key, number, options))
            seconds += time.perf_counter() - began
            if number + 1 in checkpoints:
                score = float(self.check(pick, carry, options))
                best = max(best, (score, number + 1, carry), key=lambda each: each[0])
        score, num_epochs, carry = best
        return Run(
            score, num_epochs, seconds, jax.device_get(self.test(pick, carry, options))
        )

    def tune(self):
        """The best options, one after the other, and all that were tried."""
        best, tried = (
            (
                -np.inf,
                {name: values[0] for name, values in self.contestant.grids.items()},
            ),
            [],
        )
        for number, (name, values) in enumerate(self.contestant.grids.items()):
            # The first values of all options are one run, not one for each.
            for value in values[: self.sizes.num_values][number > 0 :]:
                options = best[1] | {name: value}
                run = self.run(TUNING_SEED, options)
                tried.append(
                    {**options, "validation": run.score, "epochs": run.num_epochs}
                )
                best = max(best, (run.score, options), key=lambda each: each[0])
        return best[1], tried
