"""The figures of the README and of the front page of the documentation, from the code that stands beside them.

Run ``python examples/front_page.py``; a few minutes on two CPU cores. Writes figures and the numbers of their
captions to a folder (``--output``). ``--small`` does the same with fewer samples, patients and powers.
"""

import argparse
import json
import platform
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer.autoguide import AutoMultivariateNormal
from sklearn.datasets import load_breast_cancer, load_iris
from statsmodels.datasets import randhie

import numpyro_tempered as nt

DOCS = Path(__file__).resolve().parents[1] / "docs"
# What a caption says of a 95% interval.
QUANTILE = 1.96


# fmt: off
# [temper]
def visits(x, y=None):
    prior = dist.Normal(0, 2).expand([x.shape[1]]).to_event(1)
    rate = jnp.exp(x @ numpyro.sample("weights", prior))
    with numpyro.plate("people", len(x)):
        numpyro.sample("visits", dist.Poisson(rate), obs=y)

choose_alpha = partial(nt.select_alpha, criterion=nt.alpha.magnitude())
# choice = choose_alpha(key, visits, AutoMultivariateNormal, x, y)
# [end]


# [stream]
def tumour(x, y=None):
    prior = dist.Normal(0, 2).expand([x.shape[1]]).to_event(1)
    eta = numpyro.deterministic("eta", x @ numpyro.sample("weights", prior))
    with numpyro.plate("patients", len(x)):
        numpyro.sample("benign", dist.Bernoulli(logits=eta), obs=y)

expectation = nt.expectations.gauss_hermite(predictor="eta")
online = nt.OnlineVI(tumour, nt.guides.AutoOnlineMultivariateNormal,
                     expectation=expectation)
# for each patient: state, loss = online.update(state, x_row, y_row)
# [end]


# [choose]
def choose(key, x):
    component = nt.mixtures.components.gaussian(2, **nt.mixtures.components.scaled_to(x))
    return nt.mixtures.select_num_components(
        key, x, component, num_components=range(1, 7)
    )
# [end]
# fmt: on


def doctor_visits():
    """The RAND health insurance experiment: people with standardised columns, and their visits."""
    columns = ["lncoins", "lpi", "fmde", "physlm", "disea", "hlthg", "hlthf", "hlthp"]
    # The years of one person share these columns and are not independent: the first year of each.
    data = randhie.load_pandas().data.drop_duplicates(columns)
    x = data[columns].to_numpy()
    x = (x - x.mean(0)) / x.std(0)
    return (
        np.column_stack([np.ones(len(x)), x]),
        data["mdvis"].to_numpy(),
        ["intercept", *columns],
    )


def draw_temper(num_samples):
    """Intervals of one weight from samples of 250 people, by Bayes and at the alpha that each sample chooses."""
    x, y, names = doctor_visits()
    column = names.index("disea")
    key = jax.random.key(2019)
    everybody = nt.fit_gaussian(key, visits, AutoMultivariateNormal, x, y)
    truth = float(everybody.params["auto_loc"][column])
    rng = np.random.default_rng(2019)
    intervals = {"Bayes": [], "Tempered": []}
    alphas = []
    for number in range(num_samples):
        rows = rng.choice(len(y), 250, replace=False)
        each = jax.random.fold_in(key, number)
        bayes = nt.fit_gaussian(each, visits, AutoMultivariateNormal, x[rows], y[rows])
        choice = choose_alpha(each, visits, AutoMultivariateNormal, x[rows], y[rows])
        alphas.append(choice.alpha)
        for name, fit in (("Bayes", bayes), ("Tempered", choice.fit)):
            centre = float(fit.params["auto_loc"][column])
            width = QUANTILE * float(
                np.linalg.norm(fit.params["auto_scale_tril"][column])
            )
            intervals[name].append((centre - width, centre, centre + width))

    _, axes = plt.subplots(1, 2, figsize=(9.0, 4.4), sharex=True, sharey=True)
    numbers = {
        "people": len(y),
        "samples": num_samples,
        "mean_alpha": float(np.mean(alphas)),
    }
    for ax, (name, values) in zip(axes, intervals.items(), strict=True):
        low, centre, high = np.array(values).T
        covers = (low <= truth) & (truth <= high)
        for mask, colour, label in (
            (covers, "C0", "covers"),
            (~covers, "C1", "misses"),
        ):
            where = np.flatnonzero(mask)
            errors = [(centre - low)[mask], (high - centre)[mask]]
            ax.errorbar(
                centre[mask],
                where,
                xerr=errors,
                fmt="o",
                ms=3,
                lw=1.4,
                color=colour,
                label=f"{label} the estimate from all people",
            )
        ax.axvline(truth, color="black", lw=1)
        power = "alpha = 1" if name == "Bayes" else f"mean alpha {np.mean(alphas):.2f}"
        ax.set_title(f"{name}, {power}: {covers.sum()} of {num_samples} cover")
        ax.set_xlabel("effect of chronic diseases (log rate)")
        ax.grid(False)
        numbers[f"{name.lower()}_covers"] = int(covers.sum())
    axes[0].set(ylabel="sample of 250 people", yticks=[])
    axes[0].figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2
    )
    return numbers


def draw_stream(num_patients):
    """Weights of a logistic regression as patients come, and the posterior of all patients at once."""
    cancer = load_breast_cancer()
    names = ["mean texture", "mean compactness", "radius error"]
    x = cancer.data[:, [list(cancer.feature_names).index(name) for name in names]]
    order = np.random.default_rng(2019).permutation(len(x))[:num_patients]
    x, y = ((x - x.mean(0)) / x.std(0))[order], cancer.target[order]
    state = online.init(jax.random.key(0), x[:1], y[:1])
    locs, scales, losses = [], [], []
    for i in range(len(y)):
        state, loss = online.update(state, x[i : i + 1], y[i : i + 1])
        posterior = online.get_posterior(state)
        locs.append(np.asarray(posterior.loc))
        scales.append(np.sqrt(np.asarray(posterior.variance)))
        losses.append(float(loss.expected))
    batch = nt.fit_gaussian(jax.random.key(0), tumour, AutoMultivariateNormal, x, y)
    loc = np.asarray(batch.params["auto_loc"])
    scale = np.linalg.norm(np.asarray(batch.params["auto_scale_tril"]), axis=1)

    _, ax = plt.subplots(figsize=(7.0, 4.2))
    rounds = np.arange(1, len(y) + 1)
    locs, scales = np.array(locs), np.array(scales)
    for j, name in enumerate(names):
        ax.plot(rounds, locs[:, j], color=f"C{j}", label=name)
        band = QUANTILE * scales[:, j]
        ax.fill_between(
            rounds,
            locs[:, j] - band,
            locs[:, j] + band,
            color=f"C{j}",
            alpha=0.15,
            lw=0,
        )
        place = (1.02 + 0.015 * j) * len(y)
        ax.errorbar(
            place,
            loc[j],
            yerr=QUANTILE * scale[j],
            fmt="o",
            ms=5,
            capsize=3,
            color=f"C{j}",
        )
    ax.set(
        xlabel="patients seen, each once (points: all at once)",
        ylabel="weight and 95% interval",
        ylim=(-4.0, 2.0),
        xlim=(0, 1.07 * len(y)),
    )
    ax.legend(ncols=3, loc="upper center")
    gap = np.abs(locs[-1] - loc) / scale
    return {
        "patients": len(y),
        "loss": float(np.mean(losses)),
        "largest_gap_in_sds": float(gap.max()),
    }


def draw_choose():
    """The penalised ELBO of one to six components, and the mixture that it selects, on petals of irises."""
    x = load_iris().data[:, 2:]
    selection = choose(jax.random.key(0), x)
    table = nt.table(selection)
    _, (left, right) = plt.subplots(1, 2, figsize=(9.0, 4.2), width_ratios=(2, 3))
    values = table["criterion"].sort_index()
    best = int(values.idxmax())
    left.plot(values.index, values, "o-")
    left.plot(best, values[best], "o", ms=12, mfc="none", mec="C1", mew=2)
    left.set(
        xlabel="number of components K",
        ylabel="ELBO - log(1/b_K), nats",
        title=f"selected: K = {best}",
    )
    nt.plots.plot_mixture(selection.fit, x, ax=right)
    right.set(
        xlabel="petal length (cm)",
        ylabel="petal width (cm)",
        title="the mixture of that K",
    )
    return {
        "flowers": len(x),
        "selected": best,
        "margin": float(values[best] - values.drop(best).max()),
    }


def draw_alpha(path, num_powers):
    """A slider: the rate of visits by a sample of 250 people and its 95% band, at powers from 1 down to 0.05."""
    x, y, names = doctor_visits()
    rows = np.random.default_rng(2019).choice(len(y), 250, replace=False)
    column = names.index("disea")
    at = np.linspace(-1.5, 3.0, 46)
    design = np.zeros((len(at), x.shape[1]))
    design[:, 0], design[:, column] = 1.0, at
    frames = []
    for alpha in np.round(np.geomspace(1.0, 0.05, num_powers), 3):
        fit = nt.fit_gaussian(
            jax.random.key(0),
            visits,
            AutoMultivariateNormal,
            x[rows],
            y[rows],
            alpha=float(alpha),
        )
        loc, root = (
            np.asarray(fit.params[f"auto_{name}"]) for name in ("loc", "scale_tril")
        )
        centre, width = design @ loc, QUANTILE * np.linalg.norm(design @ root, axis=1)
        effect, spread = loc[column], QUANTILE * np.linalg.norm(root[column])
        times = [f"{np.exp(effect + step):.2f}" for step in (0.0, -spread, spread)]
        frames.append(
            {
                "alpha": float(alpha),
                "rate": np.exp(centre).round(2).tolist(),
                "low": np.exp(centre - width).round(2).tolist(),
                "high": np.exp(centre + width).round(2).tolist(),
                "says": f"alpha = {alpha:.2f}: 250 people count as {250 * alpha:.0f}. One standard deviation of "
                f"diseases multiplies visits by {times[0]} ({times[1]} to {times[2]}).",
            }
        )
    points = [
        [float(a), int(b)]
        for a, b in zip(x[rows, column].round(2), y[rows], strict=True)
    ]
    page = (DOCS / "_templates" / "alpha_slider.html").read_text()
    data = {"x": at.round(2).tolist(), "points": points, "frames": frames}
    path.write_text(page.replace("DATA", json.dumps(data, separators=(",", ":"))))


def main():
    """Draw the three figures and write the numbers of their captions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--small", action="store_true", help="a part of it, to a temporary folder"
    )
    parser.add_argument(
        "--output", type=Path, help="folder; docs/results, or a temporary one if small"
    )
    options = parser.parse_args()
    output = options.output or (
        Path(tempfile.mkdtemp()) if options.small else DOCS / "results"
    )
    output.mkdir(parents=True, exist_ok=True)
    plt.style.use("numpyro_tempered.plots.house")
    parts = {
        "temper": lambda: draw_temper(2 if options.small else 60),
        "stream": lambda: draw_stream(60 if options.small else 569),
        "choose": draw_choose,
    }
    numbers = {}
    for name, draw in parts.items():
        numbers[name] = draw()
        plt.gcf().savefig(output / f"front_{name}.png")
        plt.close("all")
        print(name, numbers[name])
    draw_alpha(output / "front_alpha.html", 3 if options.small else 21)
    rows = [
        (part, name, value)
        for part, values in numbers.items()
        for name, value in values.items()
    ]
    pd.DataFrame(rows, columns=["figure", "number", "value"]).to_csv(
        output / "front.csv", index=False
    )
    versions = ", ".join(
        f"{name} {version(name)}" for name in ("jax", "numpyro", "numpyro_tempered")
    )
    (output / "front.txt").write_text(
        f"device: {jax.devices()[0].device_kind}\nversions: Python {platform.python_version()}, {versions}\n"
        "seed: 2019\ncommand: python examples/front_page.py\n"
    )


if __name__ == "__main__":
    main()
