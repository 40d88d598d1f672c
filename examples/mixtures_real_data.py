# %% [markdown]
"""# The number of components of six data sets.

Mixtures of Gaussians for Old Faithful, galaxies, acidity, enzyme and iris, and latent classes for handwritten
digits. The number of components K is selected by the penalised ELBO at several powers alpha on the likelihood,
beside BIC and ICL of maximum likelihood and what the literature has.

As a script: `python examples/mixtures_real_data.py [--small] [--data-dir FOLDER] [--output FOLDER]`. Without a
folder of data iris and the digits come from scikit-learn, Old Faithful and the galaxies are downloaded, and
acidity and enzyme are left out. `--small` takes iris and the digits, few K, and writes to a temporary
folder. A notebook takes the same options from the environment variable `MIXTURES_REAL_DATA`.
"""

# %%
import argparse
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax
import matplotlib

if "__file__" in globals():
    matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from mixtures_data import LOADERS
from scipy.special import gammaln, softmax
from sklearn.metrics import adjusted_rand_score

import numpyro_tempered as nt
from numpyro_tempered.report.arviz import group

jax.config.update("jax_enable_x64", True)

parser = argparse.ArgumentParser(
    description="The number of components of six data sets."
)
parser.add_argument(
    "--small", action="store_true", help="iris and digits, few K, to a temporary folder"
)
parser.add_argument(
    "--data-dir", type=Path, help="folder of data files; by default they are downloaded"
)
parser.add_argument("--output", type=Path, help="folder for tables and figures")
is_script = "__file__" in globals()
options = parser.parse_args(
    None if is_script else os.environ.get("MIXTURES_REAL_DATA", "").split()
)
HERE = Path(__file__).resolve().parent if is_script else Path.cwd()
if options.output is None:
    options.output = (
        Path(tempfile.mkdtemp()) if options.small else HERE.parent / "docs" / "results"
    )
options.output.mkdir(parents=True, exist_ok=True)
begin = time.perf_counter()

# %% [markdown]
# ## Data, families, priors
#
# Gaussian components with full covariances where there is more than one column, and independent categorical
# columns for the digits, whose pixels are cut to three grey levels. One prior serves all K of a set, and a
# second one shows how much depends on it: `scaled_to(x, fraction=...)` expects components with a tenth, or a
# fiftieth, of the data's variance; a level of a pixel is worth one datum, or half of one.


# %%
class Setting(NamedTuple):
    """How a set is analysed, and what the literature says of it."""

    orders: list[int]
    literature: str
    restarts: int = 32
    moves: int = 0


SETTINGS = {
    "Old Faithful": Setting(list(range(1, 6)), "mclust: 3 (BIC, EEE)"),
    "galaxies": Setting(list(range(1, 8)), "Richardson and Green: about 5 to 7"),
    "acidity": Setting(list(range(1, 6)), "Richardson and Green: about 3 (2 to 5)"),
    "enzyme": Setting(list(range(1, 6)), "Richardson and Green: about 3 to 4 (2 to 5)"),
    "iris": Setting(list(range(1, 6)), "mclust: 2 (BIC, VEV); 3 species"),
    "digits": Setting([5, 10, 20, 30, 40], "10 digits", restarts=8),
}
ALPHAS = [0.1, 0.25, 0.5, 1.0]
DRAWN = [1.0, 0.25]
PRIORS = {"fraction": [0.1, 0.02], "level": [1.0, 0.5]}
if options.small:
    ALPHAS, PRIORS = DRAWN, {"fraction": [0.1], "level": [1.0]}
    SETTINGS = {
        "iris": Setting([2, 3], "3 species", 4),
        "digits": Setting([5], "10 digits", 2),
    }
elif options.data_dir is None:
    SETTINGS = {
        name: setting
        for name, setting in SETTINGS.items()
        if name not in ("acidity", "enzyme")
    }
DATA = {name: LOADERS[name](options.data_dir) for name in SETTINGS}


def components_of(name, x):
    """The components to be compared: one family under the prior that counts, and under a second."""
    if name == "digits":
        levels = (x.max(axis=0) + 1).astype(int).tolist()
        return {
            f"{c:g} a level": nt.mixtures.components.categorical(
                levels, concentration=c
            )
            for c in PRIORS["level"]
        }
    family = (
        nt.mixtures.components.diagonal_gaussian
        if x.shape[1] == 1
        else nt.mixtures.components.gaussian
    )
    return {
        f"fraction {f:g}": family(
            x.shape[1], **nt.mixtures.components.scaled_to(x, fraction=f)
        )
        for f in PRIORS["fraction"]
    }


# %% [markdown]
# ## Fits
#
# `num_components_path` fits all K at all alphas, each from random starts, from the fit at the next larger alpha,
# and from that of the next smaller K, with empty components and with parts of its components split off. A
# selection is uncertain where the error of E1 of the selected K, or of the runner-up, exceeds the margin between
# the two: two Monte Carlo errors, and where fewer than two starts reach within 0.1 nat of the best, the
# difference between the best and the median start. Richardson and Green's posterior of K has a uniform prior on
# K and counts all labellings of the components: the path has what is needed to do the same at alpha = 1.


# %%
class Analysis(NamedTuple):
    """What is found in one set: rows of the tables, the path under the first prior, and fits at some alphas."""

    rows: list
    criteria: pd.DataFrame
    path: object
    fits: dict


def baselines(key, x, component, setting):
    """Maximum likelihood by K: BIC and ICL, NaN where EM has no maximum."""
    found = {}
    for k in setting.orders:
        try:
            result = nt.mixtures.em(
                jax.random.fold_in(key, k),
                x,
                component,
                num_components=k,
                num_restarts=setting.restarts,
            )
            found[k] = {"bic": result.bic, "icl": result.icl}
        except FloatingPointError:  # every restart closed in on equal rows
            found[k] = {"bic": np.nan, "icl": np.nan}
    return pd.DataFrame(found).T.rename_axis("num_components")


def summary(part):
    """The selected K of one alpha, "?" where it is uncertain."""
    first_two = part.sort_values("rank").iloc[:2]
    return f"{first_two.index[0]}{'?' if first_two['uncertain'].any() else ''}"


def like_posterior(part):
    """The best K and those of a tenth of the weight or more, labellings counted, under a uniform prior on K."""
    k, occupied = part.index.to_numpy(), part["num_occupied"].to_numpy()
    weight = softmax(
        part["elbo"].to_numpy() + gammaln(k + 1) - gammaln(k - occupied + 1)
    )
    among = k[weight >= 0.1]
    return f"{k[np.argmax(weight)]}" + (
        f" ({among.min()} to {among.max()})" if len(among) > 1 else ""
    )


def analyse(name):
    """All alphas, K and priors of one set."""
    setting, table = SETTINGS[name], DATA[name]
    path_key, em_key, fit_key = jax.random.split(
        jax.random.key(list(LOADERS).index(name)), 3
    )
    fit_options = {
        "num_restarts": setting.restarts,
        "num_moves": setting.moves,
        "max_iter": 5000,
    }
    rows, criteria, paths, fits = [], [], [], {}
    components = components_of(name, table.x)
    # Maximum likelihood takes nothing from the prior.
    likelihood = baselines(em_key, table.x, next(iter(components.values())), setting)
    for prior, component in components.items():
        path = nt.mixtures.num_components_path(
            path_key,
            table.x,
            component,
            alphas=ALPHAS,
            num_components=setting.orders,
            **fit_options,
        )
        paths.append(path)
        columns = group(path, "num_components_path").to_dataframe().reset_index()
        by_alpha = {
            alpha: part.set_index("num_components")
            for alpha, part in columns.groupby("alpha")
        }
        criteria.append(
            columns.join(likelihood, on="num_components").assign(data=name, prior=prior)
        )
        rows.append(
            {
                "data": name,
                "n": len(table.x),
                "d": table.x.shape[1],
                "family": component.name,
                "prior": prior,
            }
            | {f"K, alpha {alpha:g}": summary(by_alpha[alpha]) for alpha in ALPHAS}
            | {"K, uniform prior": like_posterior(by_alpha[1.0])}
            | {column.upper(): likelihood[column].idxmin() for column in likelihood}
            | {"literature": setting.literature}
        )
    first = next(iter(components.values()))
    chosen = group(paths[0], "num_components_path")["selected"]
    for alpha in ALPHAS if name == "digits" else DRAWN:
        k, warm = int(chosen.sel(alpha=alpha)), None
        for above in sorted(
            (a for a in ALPHAS if a >= alpha), reverse=True
        ):  # from the next larger alpha
            warm = nt.mixtures.fit(
                fit_key,
                table.x,
                first,
                num_components=k,
                alpha=above,
                init=warm,
                **fit_options,
            )
        fits[alpha] = warm
    print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    return Analysis(rows, pd.concat(criteria), paths[0], fits)


results = {name: analyse(name) for name in SETTINGS}

# %% [markdown]
# ## Tables
#
# The number of components of the smallest BIC and ICL stands under their names; "?" marks an uncertain selection.
# "Uniform prior" is the number with the largest ELBO at alpha = 1 when labellings are counted and no K is
# penalised, with those of at least a tenth of the weight in brackets.

# %%
table = pd.DataFrame(
    [row for result in results.values() for row in result.rows]
).convert_dtypes()
table.to_csv(options.output / "mixtures_real_data.csv", index=False)
print(table.drop(columns=["family", "literature"]).to_string(index=False))

# %% [markdown]
# All criteria behind it, by K and alpha.

# %%
criteria = pd.concat([result.criteria for result in results.values()])
columns = [
    "data",
    "prior",
    "alpha",
    "num_components",
    "elbo",
    "se",
    "objective",
    "criterion",
    "rank",
]
columns += [
    "num_occupied",
    "num_best",
    "spread",
    "uncertain",
    "converged",
    "bic",
    "icl",
]
criteria[columns].to_csv(
    options.output / "mixtures_real_criteria.csv", index=False, float_format="%.7g"
)
at_one = criteria[
    (criteria.alpha == 1.0)
    & (criteria.prior == criteria.groupby("data").prior.transform("first"))
]
shown = at_one[
    [
        "data",
        "num_components",
        "criterion",
        "se",
        "num_occupied",
        "num_best",
        "spread",
        "bic",
        "icl",
    ]
]
print(shown.round(1).to_string(index=False))

# %% [markdown]
# ## Densities
#
# The predictive density and its components at the K that alpha selects. A smaller alpha widens both, the fewer
# the data, the more.


# %%
def finish(figure, name):
    """Save a figure."""
    figure.savefig(options.output / f"mixtures_real_{name}.png", dpi=100)


def draw_densities(names, columns=(0, 1)):
    """Sets by rows, alphas by columns."""
    figure, axes = plt.subplots(
        len(names),
        len(DRAWN),
        figsize=(9.6, 3.1 * len(names)),
        squeeze=False,
        layout="constrained",
    )
    for name, row in zip(names, axes, strict=True):
        data = DATA[name]
        shown = columns if data.x.shape[1] > 2 else (0, 1)
        for alpha, ax in zip(DRAWN, row, strict=True):
            fit = results[name].fits[alpha]
            nt.plots.plot_mixture(fit, data.x, columns=shown, ax=ax)
            ax.set_title(
                f"{name}, alpha {alpha:g}: {fit.num_components} components",
                fontsize="medium",
            )
            ax.set_xlabel(data.columns[shown[0] if data.x.shape[1] > 1 else 0])
            if data.x.shape[1] > 1:
                ax.set_ylabel(data.columns[shown[1]])
        if data.x.shape[1] == 1:
            top = max(ax.get_ylim()[1] for ax in row)
            for ax in row:
                ax.set_ylim(0.0, top)
    return figure


one_column = [name for name in results if DATA[name].x.shape[1] == 1]
if one_column:
    finish(draw_densities(one_column), "densities")

# %%
more_columns = [name for name in ("Old Faithful", "iris") if name in results]
finish(draw_densities(more_columns, columns=(2, 3)), "scatter")

# %% [markdown]
# ## Paths over alpha


# %%
def draw_paths():
    """Selected numbers, and criteria, of all sets."""
    figure, axes = plt.subplots(
        len(results),
        2,
        figsize=(9.6, 2.6 * len(results)),
        squeeze=False,
        layout="constrained",
    )
    for row, (name, result) in zip(axes, results.items(), strict=True):
        left, right = nt.plots.plot_num_components_path(result.path, axes=row)
        left.set_title(name, fontsize="medium")
        right.set(ylabel="criterion / alpha, nats")
        right.set_title(f"{name}, less the maximum", fontsize="medium")
        if row[0] is not axes[0, 0]:
            left.get_legend().remove()
            right.get_legend().remove()
    return figure


finish(draw_paths(), "paths")

# %% [markdown]
# ## The classes found
#
# Adjusted Rand index of the most probable component and the known classes: 1 for the same partition, 0 for
# chance.

# %%
known = pd.DataFrame(
    [
        {
            "data": name,
            "alpha": alpha,
            "K": fit.num_components,
            "occupied": fit.num_occupied,
            "adjusted Rand index": adjusted_rand_score(
                DATA[name].classes, np.asarray(nt.mixtures.predict(fit, DATA[name].x))
            ),
        }
        for name in ("iris", "digits")
        for alpha, fit in sorted(results[name].fits.items())
    ]
)
known.to_csv(
    options.output / "mixtures_real_classes.csv", index=False, float_format="%.3f"
)
print(known.round(3).to_string(index=False))

# %% [markdown]
# The latent classes of the digits, as the mean grey of each pixel, from the largest to the smallest.


# %%
def draw_classes(fit, ax, across):
    """The expected images of the occupied classes in one picture."""
    pixels = [
        tuple(int(i) for i in name.split("_")[1:]) for name in DATA["digits"].columns
    ]
    fit = nt.mixtures.relabel(fit)
    probs = np.asarray(fit.posterior.concentration)[: fit.num_occupied]
    grey = (probs / probs.sum(-1, keepdims=True)) @ np.arange(3.0)
    images = np.zeros((-(-len(grey) // across) * across, 10, 10))
    for j, (row, column) in enumerate(pixels):
        images[: len(grey), row + 1, column + 1] = grey[:, j]
    picture = images.reshape(-1, across, 10, 10).swapaxes(1, 2).reshape(-1, 10 * across)
    ax.imshow(picture, cmap="gray_r", vmin=0.0, vmax=2.0)
    ax.set_axis_off()


def draw_digits():
    """The classes at the smallest and the largest alpha."""
    fits, across = results["digits"].fits, 10
    shown = [min(ALPHAS), 1.0]
    heights = [-(-fits[alpha].num_occupied // across) for alpha in shown]
    figure, axes = plt.subplots(
        2,
        1,
        figsize=(8.0, 0.85 * sum(heights) + 0.8),
        height_ratios=heights,
        layout="constrained",
    )
    for alpha, ax in zip(shown, axes, strict=True):
        fit = fits[alpha]
        draw_classes(fit, ax, across)
        ax.set_title(f"alpha {alpha:g}: {fit.num_occupied} classes", fontsize="medium")
    return figure


finish(draw_digits(), "digits")
if not is_script:
    plt.show()

# %%
device = jax.devices()[0]
packages = ", ".join(
    f"{name} {version(name)}"
    for name in ("jax", "numpyro", "numpy", "scipy", "scikit-learn", "numpyro_tempered")
)
(options.output / "mixtures_real_data.txt").write_text(
    f"device: {device.platform}, {platform.machine()}, {os.cpu_count()} cores\n"
    f"versions: Python {platform.python_version()}, {packages}; float64\n"
    f"seeds: one key a set, jax.random.key(0), key(1), ... in the order of the loaders\n"
    f"command: python examples/mixtures_real_data.py{' --small' if options.small else ''} --data-dir FOLDER\n"
)
print(
    f"Tables and figures are in {options.output} ({time.perf_counter() - begin:.0f} s)"
)
