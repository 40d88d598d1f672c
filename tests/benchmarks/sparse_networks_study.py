"""Sparse ReLU networks by spike and slab variational inference: risk against n, and the spread of restarts.

Two targets on [-1, 1], smooth (a sine) and rough (a Weierstrass sum of Hölder exponent 1/2 down to its last
scale), with noise of standard deviation .1. For each n, several data sets and restarts of five architectures
(S, L, D) at alpha = 1/2, and of one at alpha = 1; restarts and data sets run side by side under one vmap.

    python tests/benchmarks/sparse_networks_study.py [--small] [--output FOLDER]

Writes sparse_networks_fits.csv (one row a fit), sparse_networks_curves.csv (fitted functions) and
sparse_networks.txt (what it was measured with). ``examples/sparse_networks.py`` draws them.
"""

import argparse
import itertools
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import provenance
from numpyro import handlers
from numpyro.infer import SVI, TraceMeanField_ELBO
from numpyro.optim import Adam

import numpyro_tempered as nt

NOISE = 0.1
GRID = jnp.linspace(-1.0, 1.0, 401)[:, None]
# S: expected number of weights that are not 0; L: hidden layers; D: their width.
ARCHITECTURES = [(12, 1, 8), (24, 1, 16), (48, 1, 32), (24, 2, 8), (24, 3, 8)]
AT_ALPHA_ONE = (24, 1, 16)
TARGETS = {
    "smooth": lambda x: np.sin(np.pi * x),
    "rough": lambda x: (
        0.5 * sum(2.0 ** (-k / 2) * np.cos(2.0**k * np.pi * x) for k in range(7))
    ),
}


def layer_sizes(depth, width):
    """Inputs and outputs of each layer."""
    widths = [1] + [width] * depth + [1]
    return list(itertools.pairwise(widths))


def num_weights(depth, width):
    """T, biases included."""
    return sum((a + 1) * b for a, b in layer_sizes(depth, width))


def network(theta, x, depth, width):
    """The ReLU network of flat weights ``theta`` at ``x``, ``(n, 1)``."""
    hidden, start = x, 0
    sizes = layer_sizes(depth, width)
    for k, (a, b) in enumerate(sizes):
        weights, biases = (
            theta[start : start + a * b].reshape(a, b),
            theta[start + a * b : start + (a + 1) * b],
        )
        hidden = hidden @ weights + biases
        hidden = jax.nn.relu(hidden) if k + 1 < len(sizes) else hidden
        start += (a + 1) * b
    return hidden[:, 0]


def model(x, num_on, depth, width, y=None):
    """Regression on a network whose T weights are independently 0 with probability 1 - S/T."""
    size = num_weights(depth, width)
    prior = nt.sparse.SpikeAndSlab(num_on / size, 0.0, 1.0)
    theta = numpyro.sample("theta", prior.expand([size]).to_event(1))
    mean = numpyro.deterministic("f", network(theta, x, depth, width))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(mean, NOISE), obs=y)


def start_at(rng_key, depth, width):
    """Weights of variance 2 / inputs and biases uniform over the range of x, so that kinks are spread."""
    parts = []
    for k, (a, b) in enumerate(layer_sizes(depth, width)):
        one, two = jax.random.split(jax.random.fold_in(rng_key, k))
        parts += [
            jax.random.normal(one, (a * b,)) * np.sqrt(2.0 / a),
            jax.random.uniform(two, (b,), minval=-1.0),
        ]
    return jnp.concatenate(parts)


def guide_of(tempered, temperature):
    """Gates open at the start, and slabs narrow."""
    return nt.guides.AutoSpikeAndSlab(
        tempered, temperature=temperature, init_probs=0.9, init_scale=0.02
    )


def annealing(num_steps):
    """From 1 to .1 over the first half of the steps."""
    return lambda step: jnp.maximum(10.0 ** (-2.0 * step / num_steps), 0.1)


@partial(jax.jit, static_argnames=("depth", "width", "num_steps", "num_refit_steps"))
def study(
    rng_key, x, y, truth, alpha, num_on, depth, width, num_steps, num_refit_steps
):
    """One restart on one data set: fit, round, refit, evaluate. To be vmapped over key, x and y."""
    keys = jax.random.split(rng_key, 6)
    args = (x, num_on, depth, width, y)
    tempered = nt.temper(model, alpha)
    guide = guide_of(tempered, annealing(num_steps))
    handlers.seed(guide, keys[0])(*args)

    def run(rng_key, guide, init_params, step_size, num_steps):
        def schedule(i):
            return step_size * 0.01 ** (jnp.maximum(i / num_steps - 0.6, 0.0) / 0.4)

        svi = SVI(tempered, guide, Adam(schedule), TraceMeanField_ELBO())
        state = svi.init(rng_key, *args, init_params=init_params)
        state, losses = jax.lax.scan(
            lambda s, _: svi.update(s, *args), state, length=num_steps
        )
        return svi.get_params(state), -jnp.mean(losses[-num_steps // 20 :])

    start = start_at(keys[0], depth, width)
    init = {
        "loc": start,
        "probs": jnp.full_like(start, 0.9),
        "scale": jnp.full_like(start, 0.02),
    }
    init = {f"theta_auto_{k}": v for k, v in init.items()}
    params, relaxed = run(keys[1], guide, init, 0.04, num_steps)
    gates = (params["theta_auto_probs"] >= 0.5).astype(start.dtype)
    slabs = {k: v for k, v in params.items() if not k.endswith("probs")}
    refitted, _ = run(
        keys[2], guide.with_gates({"theta": gates}), slabs, 0.01, num_refit_steps
    )
    rounded = refitted | {"theta_auto_probs": gates}

    def evaluate(rng_key, params):
        hard = guide.hard()

        def particle(key):
            return -TraceMeanField_ELBO().loss(key, params, tempered, hard, *args)

        elbos = jax.lax.map(particle, jax.random.split(rng_key, 200), batch_size=50)
        q = nt.sparse.SpikeAndSlab(
            *(params[f"theta_auto_{k}"] for k in ("probs", "loc", "scale"))
        )
        drawn = jax.lax.map(
            lambda theta: network(theta, GRID, depth, width),
            q.sample(keys[5], (200,)),
            batch_size=50,
        )
        mean = jnp.mean(drawn, axis=0)
        return {
            "elbo": jnp.mean(elbos),
            "elbo_se": jnp.std(elbos, ddof=1) / np.sqrt(200),
            "risk": jnp.mean((mean - truth) ** 2),
            "risk_of_draws": jnp.mean((drawn - truth) ** 2),
            "mean": mean,
            "band": jnp.quantile(drawn, jnp.array([0.05, 0.95]), axis=0),
        }

    soft, hard = evaluate(keys[3], params), evaluate(keys[4], rounded)
    return {"relaxed": relaxed, "num_on": jnp.sum(gates)} | {
        f"{k}{suffix}": v
        for suffix, part in (("", hard), ("_before", soft))
        for k, v in part.items()
    }


def draw(target, n, seed):
    """Data by numpy: the same on every device."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1.0, 1.0, (n, 1))
    y = TARGETS[target](x[:, 0]) + NOISE * rng.normal(size=n)
    return x.astype(np.float32), y.astype(np.float32)


def main():
    """Run the study and write its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parents[2] / "docs" / "results"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    sizes, architectures, num_steps, num_refit_steps, num_sets, num_restarts = (
        ([50], [AT_ALPHA_ONE], 60, 20, 2, 2)
        if options.small
        else ([50, 100, 200, 400, 800, 1600], ARCHITECTURES, 6000, 1500, 3, 4)
    )
    began, rows, curves = time.perf_counter(), [], []
    for n in sizes:
        for size, depth, width in architectures:
            for target in TARGETS:
                truth = jnp.asarray(
                    TARGETS[target](np.asarray(GRID[:, 0])), jnp.float32
                )
                sets = [draw(target, n, seed) for seed in range(num_sets)]
                x, y = (
                    np.repeat(np.stack(part), num_restarts, axis=0)
                    for part in zip(*sets, strict=True)
                )
                keys = jax.random.split(jax.random.key(n), num_sets * num_restarts)
                for alpha in (
                    (0.5, 1.0) if (size, depth, width) == AT_ALPHA_ONE else (0.5,)
                ):
                    one = partial(
                        study,
                        depth=depth,
                        width=width,
                        num_steps=num_steps,
                        num_refit_steps=num_refit_steps,
                    )
                    program = jax.vmap(one, (0, 0, 0, None, None, None))
                    found = jax.device_get(
                        program(keys, x, y, truth, alpha, float(size))
                    )
                    for i in range(num_sets * num_restarts):
                        row = {
                            "target": target,
                            "n": n,
                            "alpha": alpha,
                            "S": size,
                            "L": depth,
                            "D": width,
                        }
                        row |= {"data": i // num_restarts, "restart": i % num_restarts}
                        rows.append(
                            row | {k: v[i] for k, v in found.items() if np.ndim(v) == 1}
                        )
                    if alpha == 0.5 and n in (
                        sizes[0],
                        sizes[len(sizes) // 2],
                        sizes[-1],
                    ):
                        best = int(np.argmax(found["elbo"][:num_restarts]))
                        shown = {"x": GRID[::4, 0], "mean": found["mean"][best, ::4]}
                        shown |= {
                            k: found["band"][best, j, ::4]
                            for j, k in enumerate(("low", "high"))
                        }
                        curve = pd.DataFrame(
                            {k: np.asarray(v) for k, v in shown.items()}
                        )
                        named = {
                            "target": target,
                            "n": n,
                            "alpha": alpha,
                            "S": size,
                            "L": depth,
                            "D": width,
                        }
                        curves.append(curve.assign(**named))
                print(
                    f"{time.perf_counter() - began:6.0f} s: n = {n}, {(size, depth, width)}, {target}",
                    flush=True,
                )
        fits = pd.DataFrame(rows)
        fits.to_csv(
            options.output / "sparse_networks_fits.csv",
            index=False,
            float_format="%.6g",
        )
        pd.concat(curves).to_csv(
            options.output / "sparse_networks_curves.csv",
            index=False,
            float_format="%.4g",
        )
    sizes_text = (
        f"n = {sizes}, architectures (S, L, D) {architectures}, "
        f"{num_sets} data sets, {num_restarts} restarts"
    )
    text = provenance.describe(f"{sizes_text}, {num_steps} + {num_refit_steps} steps")
    (options.output / "sparse_networks.txt").write_text(
        f"{text}seconds: {time.perf_counter() - began:.0f}\n"
    )


if __name__ == "__main__":
    main()
