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
# # A thousand regressions at once: what is income worth, and where?
#
# [![Open in Colab][badge]][colab]
#
# [badge]: https://colab.research.google.com/assets/colab-badge.svg
# [colab]: https://colab.research.google.com/github/numpyro-tempered/numpyro_tempered/blob/main/examples/gallery/a_thousand_regressions.ipynb
#
# Houses are dearer where people earn more. **By how much does the value of a house rise with the income of its
# neighbourhood, and is that the same all over California?** The state is cut into 1024 places of 19
# neighbourhoods each, and every place gets its own regression with its own noise: six numbers from nineteen
# rows. The prior is the regression of the whole state, a power of the likelihood says how far a place may leave
# it, and variational inference fits all of them, at every power, in one program.

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
import numpyro.distributions as dist
import pandas as pd
from sklearn.datasets import fetch_california_housing, load_sample_image

import numpyro_tempered as nt

plt.style.use("numpyro_tempered.plots.house")
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"

# %% [markdown]
# ## The data frame
#
# The census of 1990. Values above 500,000 dollars were cut off there, and such rows are left out. Without a
# network the rows are others, pixels of a picture that comes with scikit-learn: how far does red follow from
# the other colours, and where? The work is the same.


# %%
def california():
    """Neighbourhoods: place, covariates and the value of a house, all but the place in logarithms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the second try
        frame = fetch_california_housing(as_frame=True, n_retries=1).frame
    frame = frame[frame["MedHouseVal"] < 5]
    logs = np.log(frame[["MedHouseVal", "MedInc", "HouseAge", "AveRooms", "AveOccup"]])
    logs.columns = [
        "value of a house",
        "income",
        "age of houses",
        "rooms",
        "people in a household",
    ]
    return logs.assign(east=frame["Longitude"], north=frame["Latitude"])


def temple():
    """Pixels of a picture: place, green, blue and changes to the right, and red."""
    image = load_sample_image("china.jpg")[::3, ::4] / 255.0
    change = np.abs(np.roll(image, 1, axis=1) - image)
    north, east = np.indices(image.shape[:2])
    columns = {
        "red": image[..., 0],
        "green": image[..., 1],
        "blue": image[..., 2],
        "change of green": change[..., 1],
    }
    columns |= {"change of blue": change[..., 2], "east": east, "north": -north}
    return pd.DataFrame({name: column.ravel() for name, column in columns.items()})


try:
    frame = california()
    print("California housing from scikit-learn")
except OSError as reason:
    frame = temple()
    print(
        f"no network ({reason}): pixels of scikit-learn's picture of a temple instead"
    )
outcome, first, *others = frame.columns.drop(["east", "north"])
print(f"{len(frame):,} rows; {outcome} by {first}, {', '.join(others)}")
frame.describe().round(2)

# %% [markdown]
# Places: halve the rows by their longer side, ten times. All places then have the same number of rows.


# %%
def halve(rows, depth):
    """Groups of rows that lie together, 2^depth of them."""
    if depth == 0:
        return [rows]
    place = frame[["east", "north"]].to_numpy()[rows]
    side = np.argmax(np.ptp(place, axis=0))
    rows = rows[np.argsort(place[:, side], kind="stable")]
    return halve(rows[: len(rows) // 2], depth - 1) + halve(
        rows[len(rows) // 2 :], depth - 1
    )


rng = np.random.default_rng(0)
size = min(len(frame) // 1024, 20)
rows = rng.choice(len(frame), size=1024 * size, replace=False)
groups = np.stack([rng.permutation(group) for group in halve(rows, 10)])

numbers = frame[[outcome, first, *others]]
numbers = (numbers - numbers.mean()) / numbers.std()
x = np.column_stack([np.ones(len(numbers)), numbers[[first, *others]]]).astype(
    np.float32
)
y = numbers[outcome].to_numpy(np.float32)
whole, residual, *_ = np.linalg.lstsq(x[rows], y[rows])
print(
    f"{len(groups)} places of {size} rows; the whole's slope for {first}: {whole[1]:.2f}"
)

# %% [markdown]
# ## One regression, and all of them
#
# The latent numbers of a place are its five coefficients and the logarithm of its noise.
# `nt.gaussian.descent.minimise` finds the Gaussian with the best tempered ELBO, to a stated accuracy, and is a
# pure function of its data and of alpha.

# %%
noise = np.log(np.sqrt(residual[0] / len(rows)))
prior = nt.gaussian.families.FullRank(
    jnp.array([*whole, noise], jnp.float32),
    jnp.diag(jnp.array([1.0, *[0.5] * 5], jnp.float32)),
)


def negative_log_likelihood(theta, x, y):
    return -jnp.sum(dist.Normal(x @ theta[:-1], jnp.exp(theta[-1])).log_prob(y))


loss = nt.expectations.monte_carlo(
    negative_log_likelihood, num_particles=32, antithetic=True
)


def fit(x, y, alpha):
    """The best Gaussian of one place."""
    objective = nt.gaussian.descent.objective(loss, prior, x, y, alpha=alpha)
    return nt.gaussian.descent.minimise(
        objective, prior, tolerance=1e-3, rng_key=jax.random.key(1)
    )


# %% [markdown]
# How far may a place leave the whole? Learn the first half of the rows of each place, and predict its others: a
# thousand small tests of each power. The result holds for draws of the posterior, as SafeBayes asks, and for
# its mean.

# %%
half = size // 2
alphas = jnp.array([0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0])
learn, test = (
    jnp.asarray(groups[:, part]) for part in (slice(0, half), slice(half, None))
)


def score(x, y, x_test, y_test, alpha):
    q = fit(x, y, alpha).posterior  # mean q.loc, covariance q.factor @ q.factor.T
    theta = q.loc + jax.random.normal(jax.random.key(2), (200, len(q.loc))) @ q.factor.T
    of_draws = jax.vmap(negative_log_likelihood, in_axes=(0, None, None))(
        theta, x_test, y_test
    )
    return negative_log_likelihood(q.loc, x_test, y_test) / len(
        y_test
    ), of_draws.mean() / len(y_test)


over_places = jax.vmap(score, in_axes=(0, 0, 0, 0, None))
every_power = jax.jit(jax.vmap(over_places, in_axes=(None, None, None, None, 0)))
data = (
    jnp.asarray(x)[learn],
    jnp.asarray(y)[learn],
    jnp.asarray(x)[test],
    jnp.asarray(y)[test],
)
began = time.perf_counter()
program = every_power.lower(*data, alphas).compile()
seconds_to_compile = time.perf_counter() - began
began = time.perf_counter()
of_mean, of_draws = jax.block_until_ready(program(*data, alphas))
seconds_of_grid = time.perf_counter() - began

# %%
fig, ax = plt.subplots()
for losses, colour, label in (
    (of_mean, BLUE, "posterior mean"),
    (of_draws, ORANGE, "draws of the posterior"),
):
    se = losses.std(1) / np.sqrt(len(groups))
    ax.errorbar(
        alphas, losses.mean(1), 2 * se, fmt="o-", color=colour, capsize=3, label=label
    )
ax.set_xscale("log")
ax.set_xticks(alphas, [f"{alpha:g}" for alpha in np.asarray(alphas).round(2)])
ax.minorticks_off()
ax.set(
    xlabel="alpha, the power of the likelihood",
    ylabel="log loss of a row left out, in nats",
    title="How far may a place leave the whole?",
)
_ = ax.legend()

# %%
best = int(np.argmin(of_draws.mean(1)))
alpha = float(alphas[best])
difference = of_draws[-1] - of_draws[best]
print(
    f"least loss of draws at alpha = {alpha:.2g}; less than at 1 by",
    f"{difference.mean():.3f} ± {difference.std() / np.sqrt(len(groups)):.3f} nats a row",
)

# %% [markdown]
# *On the left every place believes in the whole, on the right in its own nine rows. Each of the two curves has
# its lowest point where that is worth most.* The price of a wrong alpha is large at the left end: places do
# differ.
#
# ## The answer
#
# All rows of each place, at that power; and the same fits in a Python loop, for comparison.

# %%
thousand = jax.jit(jax.vmap(lambda x, y: fit(x, y, alpha)))
data = jnp.asarray(x)[groups], jnp.asarray(y)[groups]
program = thousand.lower(*data).compile()
began = time.perf_counter()
fits = jax.block_until_ready(program(*data))
seconds_of_thousand = time.perf_counter() - began

jax.block_until_ready(fit(data[0][0], data[1][0], alpha))
began = time.perf_counter()
for k in range(100):
    jax.block_until_ready(fit(data[0][k], data[1][k], alpha))
seconds_of_loop = (time.perf_counter() - began) * len(groups) / 100

slope, sd = (
    fits.posterior.loc[:, 1],
    jnp.linalg.norm(fits.posterior.factor[:, 1], axis=-1),
)
print(
    f"{np.mean(fits.converged):.1%} converged; the whole has slope {whole[1]:.2f} for {first}:",
    f"places from {slope.min():.2f} to {slope.max():.2f}",
)
apart = np.mean(np.abs(slope - whole[1]) > 2 * sd)
print(f"{apart:.0%} of the places differ from the whole by more than two deviations")

# %% tags=["thumbnail"]
centre = frame[["east", "north"]].to_numpy()[groups].mean(1)
fig, ax = plt.subplots(figsize=(7, 6), layout="constrained")
size_of = 60 * np.clip(np.asarray(sd.min() / sd), 0.05, 1)
limit = np.quantile(np.abs(slope - whole[1]), 0.98)
points = ax.scatter(
    *centre.T,
    c=slope,
    s=size_of,
    cmap="PuOr_r",
    vmin=whole[1] - limit,
    vmax=whole[1] + limit,
    edgecolor=GREY,
    linewidth=0.3,
)
bar = fig.colorbar(points, shrink=0.8)
bar.set_label(f"slope of {first}, in standard deviations; white: the whole's")
ax.set(
    xlabel="east (degrees of longitude)",
    ylabel="north (degrees of latitude)",
    title=f"What {first} is worth, in 1024 places",
)
if outcome == "red":
    ax.set(xlabel="column of the picture", ylabel="row of the picture, from below")
_ = ax.set_facecolor("#F7F7F7")

# %% [markdown]
# *Each dot is a regression; larger ones are surer. In violet places income is worth less than in the state as a
# whole, in orange ones more.* Most are violet: within a place income explains less than it does between places,
# because dear places are also rich ones. The slope of the whole state mixes the two.
#
# ## Device, time and throughput

# %%
count = len(alphas) * len(groups)
print(f"device      {jax.devices()[0].device_kind} ({jax.default_backend()})")
packages = ["jax", "numpyro", "arviz", "numpyro_tempered"]
print("versions   ", ", ".join(f"{name} {version(name)}" for name in packages))
print(
    f"every power compiled in {seconds_to_compile:.1f} s, {count:,} regressions in {seconds_of_grid:.1f} s:",
    end=" ",
)
print(f"{count / seconds_of_grid:,.0f} regressions/s")
print(
    f"at one      {len(groups):,} regressions in {seconds_of_thousand:.2f} s in one program,",
    f"{seconds_of_loop:.1f} s in a Python loop of compiled fits",
)
