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
# # Spruce or pine? Half a million rows as a stream
#
# [![Open in Colab][badge]][colab]
#
# [badge]: https://colab.research.google.com/assets/colab-badge.svg
# [colab]: https://colab.research.google.com/github/numpyro-tempered/numpyro_tempered/blob/main/examples/gallery/long_stream.ipynb
#
# The Forest Cover Type data have 495,141 cells of 30 × 30 metres in Colorado where either spruce and fir or
# lodgepole pine grow. **Which of the two grows in the next cell, and does one forest have one answer?** A
# logistic regression in NumPyro reads the cells one after another, predicts each before it learns from it, and
# never sees a row again. Then a thousand regressions, one for each place, learn side by side in one program.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("numpyro_tempered") is None:
    package = "numpyro_tempered[examples] @ git+https://github.com/numpyro-tempered/numpyro_tempered"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", package], check=True)

# %%
import time
import warnings
from importlib.metadata import version

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from sklearn.datasets import fetch_covtype, load_sample_images

import numpyro_tempered as nt

plt.style.use("numpyro_tempered.plots.house")
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"

# %% [markdown]
# ## The data frame
#
# Without a network the rows are others, half a million pixels of the two pictures that come with scikit-learn:
# is a pixel from the picture of the flower or from that of the temple? The work is the same.


# %%
def forest():
    """Cells where spruce and fir (1) or lodgepole pine (0) grow, in the order of the file, that of the land."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the second try
        frame = fetch_covtype(as_frame=True, n_retries=1).frame
    frame = frame[frame["Cover_Type"] <= 2]
    return (
        frame.drop(columns="Cover_Type"),
        (frame["Cover_Type"] == 1).to_numpy(),
        "spruce and fir",
    )


def pictures():
    """Pixels of the flower (1) or the temple (0), in strips of 16 rows of a picture."""
    columns, flower = [], []
    for number, image in enumerate(load_sample_images().images):
        image = image / 255.0
        right, below = np.roll(image, -1, axis=1), np.roll(image, -1, axis=0)
        colours = [image, image**2, np.abs(right - image), np.abs(below - image)]
        columns.append(np.concatenate(colours, axis=2).reshape(-1, 12))
        flower.append(np.full(len(columns[-1]), number == 1))
    names = [
        f"{what} {c}"
        for what in ("level", "square", "change right", "change down")
        for c in ("red", "green", "blue")
    ]
    # Alternate strips of the two pictures, so that a place has pixels of both.
    order = np.argsort(np.arange(2 * len(flower[0])) % len(flower[0]), kind="stable")
    return (
        pd.DataFrame(np.concatenate(columns)[order], columns=names),
        np.concatenate(flower)[order],
        "flower",
    )


try:
    frame, outcome, event = forest()
    print("Forest Cover Type from scikit-learn")
except OSError as reason:
    frame, outcome, event = pictures()
    print(f"no network ({reason}): pixels of scikit-learn's sample pictures instead")
print(f"{len(frame):,} rows, {frame.shape[1]} features; {event}: {outcome.mean():.1%}")

# %% [markdown]
# Measurements are centred and scaled, indicators stay; soils with fewer than a hundred cells are left out.

# %%
frame = frame.loc[:, (frame != 0).sum() >= 100]
measured = frame.columns[frame.nunique() > 2]
scaled = frame.astype(np.float32)
scaled[measured] = (scaled[measured] - scaled[measured].mean()) / scaled[measured].std()
names = ["intercept", *frame.columns]
x = np.column_stack([np.ones(len(frame)), scaled]).astype(np.float32)
y = outcome.astype(np.float32)

# %% [markdown]
# ## One pass
#
# The model is an ordinary one. It names its linear predictor, so that expectations are integrals over one
# number. The rule is `rvga`, which has no step size to choose, with a full covariance matrix.


# %%
def cover(x, y=None):
    weights = numpyro.sample(
        "weights", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ weights)
    with numpyro.plate("cells", len(x)):
        numpyro.sample("cover", dist.Bernoulli(logits=eta), obs=y)


online = nt.OnlineVI(
    cover,
    nt.guides.AutoOnlineMultivariateNormal,
    nt.online.rvga(),
    expectation=nt.expectations.gauss_hermite(predictor="eta"),
)

# %% [markdown]
# One stream is sequential: each row waits for the one before. A processor takes rows one at a time; for a GPU,
# whose steps are slow and wide, 50 rows make one round. A loop over blocks around the rounds keeps the
# posterior at the end of each block.

# %%
on_cpu = jax.default_backend() == "cpu"
rows_in_round = 1 if on_cpu else 50
rounds_in_block = 500 // rows_in_round
num_blocks = len(x) // 500

order = np.random.default_rng(0).permutation(len(x))[: num_blocks * 500]
shape = (num_blocks, rounds_in_block, rows_in_round)
stream = jnp.asarray(x[order].reshape(*shape, -1)), jnp.asarray(y[order].reshape(shape))


@jax.jit
def learn(state, stream):
    def one_round(state, rows):
        state, losses = online.update(state, *rows)
        return state, losses.at_mean

    def one_block(state, rows):
        state, losses = jax.lax.scan(one_round, state, rows)
        posterior = online.get_posterior(state)
        return state, (losses.sum(), posterior.mean, jnp.sqrt(posterior.variance))

    return jax.lax.scan(one_block, state, stream)


start = online.init(jax.random.key(0), *(part[0, 0] for part in stream))
began = time.perf_counter()
program = learn.lower(start, stream).compile()
seconds_to_compile = time.perf_counter() - began
began = time.perf_counter()
state, (losses, means, scales) = jax.block_until_ready(program(start, stream))
seconds_of_stream = time.perf_counter() - began

# %% [markdown]
# The baseline knows the features of no row: it predicts the share of all outcomes so far. The losses are those
# of predictions that were made before the outcome was known, so no rows need to be held out.

# %%
outcomes = y[order]
rate = (np.cumsum(outcomes) - outcomes + 1) / (np.arange(len(outcomes)) + 2)
surprise = -np.log(np.where(outcomes == 1, rate, 1 - rate))
seen = 500 * np.arange(1, num_blocks + 1)
progressive = np.cumsum(losses) / seen

fig, ax = plt.subplots()
ax.semilogx(
    seen,
    np.cumsum(surprise)[seen - 1] / seen,
    color=GREY,
    label="share of all outcomes so far",
)
ax.semilogx(seen, progressive, color=BLUE, label="logistic regression")
ax.set(
    xlabel="rows seen",
    ylabel="average log loss, in nats",
    title="Every row is predicted before it is learned",
)
_ = ax.legend()

# %% [markdown]
# *The blue line lies below the grey one from the first block on, and hardly falls any more after fifty thousand
# rows: what the others add is certainty about the weights.*

# %%
effects = np.abs(means[-1] / scales[-1])
largest = sorted([names.index(name) for name in measured], key=lambda j: -effects[j])[
    :4
]

fig, ax = plt.subplots()
for j, colour in zip(largest, (BLUE, ORANGE, GREEN, PINK), strict=True):
    ax.fill_between(
        seen,
        means[:, j] - 2 * scales[:, j],
        means[:, j] + 2 * scales[:, j],
        color=colour,
        alpha=0.3,
    )
    ax.semilogx(seen, means[:, j], color=colour, label=names[j].replace("_", " "))
ax.set(
    xlabel="rows seen",
    ylabel="weight, mean ± 2 deviations",
    title="The posterior narrows",
)
_ = ax.legend(fontsize=9)

# %% [markdown]
# *Bands narrow with the root of the number of rows, until most are thinner than their lines. The hillshade at
# noon takes longest, as the hillshades of morning and afternoon nearly determine it.* The posterior is certain,
# if the model is right. The next part asks.
#
# ## A thousand places
#
# The rows of the file follow the land. Cut into a thousand runs, each is a place. **Does a place have weights
# of its own?** A thousand regressions start at the weights of the whole forest, a Gaussian of some width around
# it, and learn the rows of their place alone. (Its own rows are a thousandth of what the whole has learned.)
# Width 0 is one forest, a large width a thousand strangers. Each width is one call of one program, in which
# `jax.vmap` runs a thousand learners.

# %%
num_places = 1000
rows_in_place = len(x) // num_places
cut = num_places * rows_in_place
places = (
    jnp.asarray(x[:cut].reshape(num_places, rows_in_place, -1)),
    jnp.asarray(y[:cut].reshape(num_places, rows_in_place)),
)
rule = nt.online.rvga()
loss = nt.expectations.gauss_hermite(lambda eta, y: jax.nn.softplus(eta) - y * eta)


def one_place(centre, width, x, y):
    prior = nt.gaussian.families.MeanField(centre, jnp.full_like(centre, width))
    _, losses = nt.online.run(rule, loss, rule.init(prior), x, y)
    return losses.at_mean


thousand = jax.jit(jax.vmap(one_place, in_axes=(None, None, 0, 0)))
widths = (0.01, 0.1, 0.3, 1.0, 3.0)
began = time.perf_counter()
thousand_program = thousand.lower(means[-1], 0.01, *places).compile()
seconds_to_compile_thousand = time.perf_counter() - began
began = time.perf_counter()
local = np.stack(
    [np.asarray(thousand_program(means[-1], width, *places)) for width in widths]
)
seconds_of_thousand = time.perf_counter() - began

table = pd.DataFrame(
    {
        "all rows": local.mean((1, 2)),
        "first 10 rows": local[:, :, :10].mean((1, 2)),
        "last 100 rows": local[:, :, -100:].mean((1, 2)),
    },
    index=pd.Index(widths, name="width"),
)
table.round(3)

# %% tags=["thumbnail"]
fig, ax = plt.subplots(figsize=(8, 4), layout="constrained")
row = np.arange(1, rows_in_place + 1)
for k, colour in zip(
    (0, 1, 2, 3, 4), ("#1B1B1B", BLUE, GREEN, ORANGE, PINK), strict=True
):
    ax.semilogx(
        row,
        np.cumsum(local[k].mean(0)) / row,
        color=colour,
        label=f"width {widths[k]:g}",
    )
ax.set(
    xlabel="rows of its place that a learner has seen",
    ylabel="average log loss, in nats",
    title="A thousand learners: one forest, or a thousand?",
)
_ = ax.legend(
    fontsize=9,
    title="around the\nwhole's weights",
    loc="center left",
    bbox_to_anchor=(1.0, 0.5),
)

# %% [markdown]
# *The narrowest start, the black line, cannot adapt. Wider ones learn their place within ten rows and have far
# smaller losses, up to a width of 1; the widest is too wild at first. All lose a little again after fifty rows,
# as the place goes on to the next hill.* (`nt.online.rvga(forget=...)` would go with it.)
#
# The thin bands of the second figure are then certain of a wrong thing, one set of weights for all places. Rows
# of one place are alike, and half a million of them are not half a million independent ones. What to do about
# intervals in such a case is the subject of *[When the model is wrong](when_the_model_is_wrong.ipynb)*.
#
# ## Device, time and throughput

# %%
rows = num_blocks * 500
print(f"device      {jax.devices()[0].device_kind} ({jax.default_backend()})")
packages = ["jax", "numpyro", "arviz", "numpyro_tempered"]
print("versions   ", ", ".join(f"{name} {version(name)}" for name in packages))
print(
    f"one stream  compiled in {seconds_to_compile:.1f} s, {rows:,} rows in {seconds_of_stream:.1f} s:",
    f"{rows / seconds_of_stream:,.0f} rows/s, {rows_in_round} a round",
)
print(
    f"a thousand  compiled in {seconds_to_compile_thousand:.1f} s,",
    f"{len(widths) * cut:,} rows in {seconds_of_thousand:.1f} s:",
    f"{len(widths) * cut / seconds_of_thousand:,.0f} rows/s",
)
