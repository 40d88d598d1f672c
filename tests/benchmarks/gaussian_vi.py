"""Batch Gaussian variational inference of logistic regressions: natural gradients, forward-backward, Adam, SVI.

Targets: tempered posteriors of logistic regressions with d = 2, 10, 50 coefficients and 20 d rows, prior
N(0, 5²), in double precision. Every method starts at N(0, I) and fits a full covariance. The KL gap of an iterate
is the best ELBO less its own, by quadrature on the predictor with 40 nodes (exact to rounding here); the best is
that of a run to stationarity 1e-16, checked by scipy's L-BFGS on an independent implementation for d = 2, 10.

- natural gradient (damping .5, and 1), forward-backward whitened and plain: ``nt.gaussian.descent.minimise``; an
  evaluation is one of E[f], E[∇f] and E[∇²f], rejected trials included.
- Adam on the exact ELBO: its gradient in (loc, scale_tril) by the same quadrature, softplus diagonal, step size
  .05 falling to .0005 over the last two fifths, as ``fit_svi`` does; an evaluation is a gradient.
- SVI: NumPyro's AutoMultivariateNormal under Trace_ELBO with one and with 16 draws, the same Adam; an
  evaluation is a draw. Its gap is that of the iterate, not of its noisy loss.

Times are of compiled loops, compilation apart, divided evenly over the evaluations of a run; median of three
calls, or one where a call takes more than 5 s. NUTS on the same tempered models reports the moments that the
Gaussians approximate.
Writes ``gaussian_vi.csv``, ``gaussian_vi_nuts.csv`` and ``gaussian_vi.png``.

    python tests/benchmarks/gaussian_vi.py
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.distributions import biject_to, constraints
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from numpyro.infer.initialization import init_to_value
from numpyro.optim import Adam
from provenance import describe

import numpyro_tempered as nt

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gaussian" / "descent"))
import gaussian_vi_oracles as oracle

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
PRIOR_SCALE = 5.0
TARGET = 1e-6
vi = nt.gaussian.descent
LOSS = nt.expectations.logistic(num_nodes=40)
METHODS = {
    "natural gradient, damping .5": (vi.natural_gradient(), 200),
    "natural gradient, damping 1": (vi.natural_gradient(1.0), 200),
    "forward-backward, whitened": (vi.forward_backward(), 200),
    "forward-backward, plain": (vi.forward_backward(whiten=False), 4000),
}


def draw(d, seed=0):
    """Rows, signs, and names of a target: columns of unequal scale, correlated."""
    rng = np.random.default_rng([seed, d])
    mix = np.eye(d) + 0.5 * np.tril(rng.normal(size=(d, d)), -1) / np.sqrt(d)
    x = (
        rng.normal(size=(20 * d, d))
        @ mix
        * np.geomspace(0.5, 3.0, d)
        * np.sqrt(5.0 / d)
    )
    u = x @ rng.normal(size=d)
    return x, np.where(rng.uniform(size=len(x)) < 1.0 / (1.0 + np.exp(-u)), 1.0, -1.0)


def model(x, y=None):
    """The same target in NumPyro; y in {0, 1}."""
    theta = numpyro.sample(
        "theta", dist.Normal(0.0, PRIOR_SCALE).expand([x.shape[1]]).to_event(1)
    )
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ theta), obs=y)


def objective(x, y, alpha):
    """The free energy of a target."""
    d = x.shape[1]
    prior = nt.gaussian.families.MeanField(jnp.zeros(d), jnp.full(d, PRIOR_SCALE))
    return vi.objective(LOSS, prior, x, y, alpha=alpha)


def timed(run):
    """The result of a compiled function, and the median time of three calls, or of one that is long."""
    result = jax.block_until_ready(run())
    times = []
    while len(times) < 3:
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
        if times[0] > 5.0:
            break
    return result, float(np.median(times))


def elbo_of(f):
    """The ELBO of (loc, scale_tril) as a differentiable function: value of the objective's own quadrature."""

    def elbo(loc, root):
        q = nt.gaussian.families.FullRank(loc, root)
        entropy = jnp.sum(jnp.log(jnp.diagonal(root))) + 0.5 * loc.size * jnp.log(
            2.0 * jnp.pi * jnp.e
        )
        return entropy - f(q).value

    return elbo


def schedule(num_steps):
    """The step size that ``fit_svi`` takes."""
    return lambda step: 0.05 * 0.01 ** (jnp.maximum(step / num_steps - 0.6, 0.0) / 0.4)


def adam_exact(f, d, num_steps):
    """Gaps' ELBOs of Adam on the exact ELBO."""
    elbo, optim = elbo_of(f), Adam(schedule(num_steps))
    bijection = biject_to(constraints.softplus_lower_cholesky)
    start = {"loc": jnp.zeros(d), "root": bijection.inv(jnp.eye(d))}

    def negative(params):
        return -elbo(params["loc"], bijection(params["root"]))

    @jax.jit
    def run():
        def step(state, _):
            value, grads = jax.value_and_grad(negative)(optim.get_params(state))
            return optim.update(grads, state), -value

        return jax.lax.scan(step, optim.init(start), length=num_steps)[1]

    return timed(run)


def svi(f, x, y, alpha, num_steps, num_particles, every):
    """ELBOs of the iterates of stock SVI, one of ``every`` steps; the evaluation is not in the time."""
    d = x.shape[1]
    tempered = nt.temper(model, alpha=alpha)
    guide = AutoMultivariateNormal(
        tempered,
        init_loc_fn=init_to_value(values={"theta": jnp.zeros(d)}),
        init_scale=1.0,
    )
    stock = SVI(
        tempered,
        guide,
        Adam(schedule(num_steps)),
        Trace_ELBO(num_particles=num_particles),
    )
    labels = (y > 0).astype(int)
    state = stock.init(jax.random.key(1), x, labels)

    @jax.jit
    def run():
        def some(state, _):
            state = jax.lax.fori_loop(
                0, every, lambda _, s: stock.update(s, x, labels)[0], state
            )
            return state, stock.get_params(state)

        return jax.lax.scan(some, state, length=num_steps // every)[1]

    params, seconds = timed(run)
    elbo = jax.jit(elbo_of(f))
    values = [
        elbo(m, root)
        for m, root in zip(params["auto_loc"], params["auto_scale_tril"], strict=True)
    ]
    return np.asarray(values), seconds


def study(d, alpha, adam_steps, svi_steps):
    """One target: the gaps along each method's run, and the Gaussian found."""
    x, y = draw(d)
    f = objective(x, y, alpha)
    start = nt.gaussian.families.FullRank(jnp.zeros(d), jnp.eye(d))
    best = vi.minimise(
        f, start, method=vi.natural_gradient(1.0), tolerance=1e-16, max_evaluations=2000
    )
    found = float(best.elbo)
    if d <= 10:
        independent = oracle.logistic_optimum(x, y, alpha, PRIOR_SCALE)[2]
        if abs(independent - found) > 1e-5:
            raise RuntimeError(f"two optima: {found} and {independent}.")
    eigenvalues = np.linalg.eigvalsh(f(best.posterior).hessian)
    curves = []
    for name, (method, most) in METHODS.items():
        result, seconds = timed(
            lambda method=method, most=most: vi.minimise(
                f, start, method=method, tolerance=1e-12, max_evaluations=most
            )
        )
        used = int(result.num_evaluations)
        reached = np.where(result.trace.accepted, result.trace.elbo, -np.inf)[:used]
        curves.append(
            (name, np.arange(1, used + 1), found - reached, seconds / used, 1)
        )
    values, seconds = adam_exact(f, d, adam_steps)
    curves.append(
        (
            "Adam, exact ELBO",
            np.arange(1, adam_steps + 1),
            found - np.asarray(values),
            seconds / adam_steps,
            1,
        )
    )
    for particles in (1, 16):
        every = max(1, svi_steps // 200)
        values, seconds = svi(f, x, y, alpha, svi_steps, particles, every)
        count = np.arange(1, len(values) + 1) * every * particles
        curves.append(
            (
                f"SVI, {particles} draw{'s' * (particles > 1)}",
                count,
                found - values,
                seconds / svi_steps / particles,
                particles,
            )
        )
    rows = []
    for name, count, gap, each, _ in curves:
        at = np.flatnonzero(gap <= TARGET)
        first = int(count[at[0]]) if len(at) else None
        rows.append(
            {
                "d": d,
                "alpha": alpha,
                "condition": eigenvalues[-1] / eigenvalues[0],
                "method": name,
                "evaluations": first,
                "milliseconds": None if first is None else 1e3 * first * each,
                "run": int(count[-1]),
                "run_milliseconds": 1e3 * count[-1] * each,
                "least_gap": max(float(gap.min()), 0.0),
                "last_gap": max(float(gap[-1]), 0.0),
            }
        )
    return rows, curves, best, (x, y)


def nuts(x, y, alpha, best, num_samples):
    """Moments of NUTS beside those of the best Gaussian."""
    mcmc = MCMC(
        NUTS(nt.temper(model, alpha=alpha)),
        num_warmup=500,
        num_samples=num_samples,
        progress_bar=False,
    )
    mcmc.run(jax.random.key(2), x, (y > 0).astype(int))
    theta = np.asarray(mcmc.get_samples()["theta"])
    q = best.posterior
    sds = np.sqrt(np.sum(np.square(q.factor), axis=1))
    ratio = sds / theta.std(0)
    shift = (np.asarray(q.loc) - theta.mean(0)) / theta.std(0)
    return {
        "d": x.shape[1],
        "alpha": alpha,
        "largest_shift_of_mean": np.abs(shift).max(),
        "least_sd_ratio": ratio.min(),
        "median_sd_ratio": np.median(ratio),
        "largest_sd_ratio": ratio.max(),
        "largest_gap_of_correlation": np.abs(
            np.corrcoef(theta.T)
            - np.asarray(q.factor @ q.factor.T) / np.outer(sds, sds)
        ).max(),
        "draws": num_samples,
    }


def draw_figure(curves, d, alpha, file):
    """KL gap against evaluations and against time."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, 2, figsize=(10, 4.2), sharey=True, constrained_layout=True
    )
    colours = [
        "#0b5394",
        "#5b9bd5",
        "#38761d",
        "#93c47d",
        "#cc4125",
        "#b4a7d6",
        "#674ea7",
    ]
    for (name, count, gap, each, _), colour in zip(curves, colours, strict=True):
        shown = np.minimum.accumulate(np.maximum(gap, 1e-9))
        for axis, scale in zip(axes, (1.0, 1e3 * each), strict=True):
            axis.loglog(count * scale, shown, color=colour, lw=1.8, label=name)
    for axis, label in zip(
        axes, ("evaluations (SVI: draws)", "milliseconds, compiled"), strict=True
    ):
        axis.axhline(TARGET, color="0.6", lw=0.8, ls=":")
        axis.set_xlabel(label)
        axis.set_ylim(1e-9, None)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("least KL gap so far (nats)")
    axes[1].legend(
        frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(1.0, 0.2)
    )
    figure.suptitle(
        f"Logistic regression, d = {d}, alpha = {alpha}: KL gap to the best Gaussian",
        fontsize=11,
    )
    figure.savefig(file, dpi=120)


def main():
    """Run the study, write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="d = 2 alone, short runs")
    parser.add_argument(
        "--output", type=Path, default=DOCS, help="folder for tables and figure"
    )
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    options.output.mkdir(parents=True, exist_ok=True)
    sizes, alphas = ((2,), (0.5,)) if options.small else ((2, 10, 50), (0.5, 1.0))
    adam_steps, svi_steps, num_samples = (
        (200, 200, 200) if options.small else (6000, 20_000, 4000)
    )
    rows, moments, shown = [], [], None
    for d in sizes:
        for alpha in alphas:
            found, curves, best, (x, y) = study(d, alpha, adam_steps, svi_steps)
            rows += found
            moments.append(nuts(x, y, alpha, best, num_samples))
            if alpha == alphas[0]:
                shown = curves
    table = pd.DataFrame(rows)
    table.to_csv(options.output / "gaussian_vi.csv", index=False, float_format="%.4g")
    pd.DataFrame(moments).to_csv(
        options.output / "gaussian_vi_nuts.csv", index=False, float_format="%.4g"
    )
    (options.output / "gaussian_vi.txt").write_text(
        describe(
            f"d = {list(sizes)}, n = 20 d, alpha = {list(alphas)}, {adam_steps} steps of Adam, {svi_steps} "
            "of SVI; float64"
        )
    )
    draw_figure(shown, sizes[-1], alphas[0], options.output / "gaussian_vi.png")
    print(table.to_string(index=False))
    print(pd.DataFrame(moments).to_string(index=False))


if __name__ == "__main__":
    main()
