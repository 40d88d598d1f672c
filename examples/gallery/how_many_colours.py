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
# # How many colours are in half a million pixels?
#
# [![Open in Colab][badge]][colab]
#
# [badge]: https://colab.research.google.com/assets/colab-badge.svg
# [colab]: https://colab.research.google.com/github/numpyro-tempered/numpyro_tempered/blob/main/examples/gallery/how_many_colours.ipynb
#
# Two photographs, a temple and a flower, have 546,560 pixels. **How many colours would a painter need?** A
# colour is a component of a Gaussian mixture, and the number of components is chosen by the tempered ELBO less
# the price of the number, log(1/b) with b = 2^-K. With so many rows the likelihood outweighs any prior, and
# asks for a component for every shade. But pixels are not independent: a neighbour is nearly a copy. The power
# alpha says how many independent rows the half million are worth, and the notebook looks at what that does to
# the number.

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
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.datasets import load_sample_images

import numpyro_tempered as nt

plt.style.use("numpyro_tempered.plots.house")
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
warnings.simplefilter("ignore", nt.warnings.CompilationWarning)

# %% [markdown]
# ## The data frame
#
# The pictures come with scikit-learn, so no network is needed.

# %%
images = load_sample_images().images
pixels = pd.DataFrame(
    np.concatenate([image.reshape(-1, 3) for image in images]),
    columns=["red", "green", "blue"],
)
print(f"two pictures of scikit-learn: {len(pixels):,} pixels")
pixels.describe().round(0)

# %% [markdown]
# **Rows that repeat are weights.** The pixels have 153,323 distinct colours, and a mixture of those with their
# counts is the mixture of all pixels. A GPU takes them as they are. A processor takes colours that agree in the
# first four bits of each channel as one, with their average.

# %%
bits = 4 if jax.default_backend() == "cpu" else 8
grouped = pixels.groupby(
    [pixels[channel] // 2 ** (8 - bits) for channel in pixels], sort=True
)
colours = grouped.mean().to_numpy(np.float32) / 255.0
counts = grouped.size().to_numpy(np.float32)
print(f"{len(colours):,} weighted rows stand for {counts.sum():,.0f} pixels")

# %% [markdown]
# ## How many independent rows?
#
# The correlation of two pixels of a row of the picture, by their distance:

# %%
distances = [1, 3, 10, 30, 100]
alike = {
    name: [
        np.corrcoef(image[:, :-step].ravel(), image[:, step:].ravel())[0, 1]
        for step in distances
    ]
    for name, image in zip(("temple", "flower"), images, strict=True)
}
pd.DataFrame(alike, index=pd.Index(distances, name="pixels apart")).round(2)

# %% [markdown]
# A neighbour is a copy, and at a distance of ten pixels much is still the same. If a patch of 23 × 23 pixels
# says as much as one independent pixel, the pictures are worth a thousand rows, and alpha is 1/547. Nobody
# knows the right size of a patch, so look at a range of them.
#
# ## The number of components along alpha
#
# `num_components_path` selects the number at each alpha. The prior of a component has the scale of all data,
# the same for every number. Starts, splits and restarts are the library's.

# %%
component = nt.mixtures.components.gaussian(
    3, **nt.mixtures.components.scaled_to(pixels.to_numpy(np.float32) / 255.0)
)
effective_rows = np.array([100.0, 300.0, 1000.0, 3000.0, 10000.0])
numbers = range(1, 9) if jax.default_backend() == "cpu" else range(1, 17)
began = time.perf_counter()
path = nt.mixtures.num_components_path(
    jax.random.key(0),
    colours,
    component,
    alphas=effective_rows / len(pixels),
    num_components=numbers,
    num_restarts=4,
    sample_weight=counts,
)
seconds_of_path = time.perf_counter() - began
selected = path["num_components_path"]["selected"].to_series()
side = np.sqrt(len(pixels) / effective_rows)
pd.DataFrame(
    {
        "independent rows": effective_rows.astype(int),
        "side of a patch": side.round(),
        "colours": selected.to_numpy(),
    }
)

# %%
fig, ax = plt.subplots()
ax.semilogx(effective_rows, selected, "o-", color=BLUE)
ax.axvline(1000.0, color=GREY, linestyle="--")
ax.text(1050.0, selected.iloc[0], "a patch of 23 by 23 pixels is a row", color=GREY)
ax.axhline(numbers[-1], color=ORANGE, linestyle=":")
ax.text(
    effective_rows[0],
    numbers[-1] - 0.4,
    "the largest number that was tried",
    color=ORANGE,
    va="top",
)
_ = ax.set(
    xlabel="independent rows that the pixels are taken for",
    ylabel="number of colours",
    title="The number of colours grows with what you believe",
)

# %% [markdown]
# *The line climbs: more rows, more colours.* No number of Gaussians is true of a photograph. A number means
# something together with the number of rows that are believed in; at alpha = 1, far off to the right, the
# answer is the largest number that one cares to try.
#
# ## The answer
#
# A thousand independent rows, and the criterion for each number. Then the best mixture learns from every pixel
# at full precision, in chunks, from where the weighted rows left it.

# %%
alpha = 1000 / len(pixels)
began = time.perf_counter()
choice = nt.mixtures.select_num_components(
    jax.random.key(1),
    colours,
    component,
    num_components=numbers,
    alpha=alpha,
    num_restarts=4,
    sample_weight=counts,
    baselines=False,
)
seconds_of_selection = time.perf_counter() - began
table = nt.table(choice)[["elbo", "se", "log_prior", "criterion", "num_best"]]
print(f"{choice.selected} colours")
table.sort_index().round(1)

# %%
rows = pixels.to_numpy(np.float32) / 255.0
passes = 5 if jax.default_backend() == "cpu" else 200
began = time.perf_counter()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that a few passes end before the last digit
    fit = nt.mixtures.fit(
        jax.random.key(2),
        [rows],
        component,
        num_components=choice.selected,
        alpha=alpha,
        num_restarts=1,
        init=choice.fit,
        max_iter=passes,
    )
seconds_of_passes = time.perf_counter() - began
labels = np.asarray(nt.mixtures.predict(fit, rows))
means = np.asarray(fit.posterior.loc).clip(0, 1)

# %% tags=["thumbnail"]
share = np.bincount(labels, minlength=len(means)) / len(labels)
fig, axes = plt.subplots(2, 2, figsize=(7, 5.2), dpi=85, layout="constrained")
painted = means[labels].reshape(2, *images[0].shape)
for column in (0, 1):
    # 32 levels of each channel: half of the bytes in the notebook, and no eye sees it.
    axes[0, column].imshow(images[column][::2, ::2] // 8 * 8, interpolation="nearest")
    axes[1, column].imshow(painted[column][::2, ::2], interpolation="nearest")
axes[0, 0].set_title("the photographs", loc="left")
axes[1, 0].set_title(
    f"{len(means)} colours: " + ", ".join(f"{s:.0%}" for s in np.sort(share)[::-1]),
    loc="left",
    fontsize=11,
)
for ax in axes.ravel():
    ax.set_axis_off()

# %% [markdown]
# *Below, each pixel has the average colour of its component.* Sky, roofs and trees, petals and the dark behind
# them: a painter with this box would be understood.
#
# ## Device, time and throughput

# %%
seen = fit.num_iter * len(rows)
print(f"device      {jax.devices()[0].device_kind} ({jax.default_backend()})")
packages = ["jax", "numpyro", "arviz", "numpyro_tempered"]
print("versions   ", ", ".join(f"{name} {version(name)}" for name in packages))
print(
    f"path        {len(effective_rows)} powers in {seconds_of_path:.1f} s, compilation included"
)
print(
    f"selection   {len(numbers)} numbers in {seconds_of_selection:.1f} s with programs that were compiled before"
)
print(
    f"all pixels  {fit.num_iter} passes over {len(rows):,} rows in {seconds_of_passes:.1f} s:",
    f"{seen / seconds_of_passes:,.0f} rows/s",
)
