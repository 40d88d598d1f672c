"""The plot of the error bars of a fit."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from matplotlib import pyplot as plt
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt

KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("named_axes")


def regression(x, y):
    weights = numpyro.sample(
        "weights", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1)
    )
    with numpyro.plate("row", len(y)):
        numpyro.sample("y", dist.Normal(x @ weights, 1.0), obs=y)


def checked(num_columns, **options):
    x = jax.random.normal(KEY, (60, num_columns))
    fit = nt.fit_gaussian(KEY, regression, AutoNormal, x, x[:, 0])
    return fit, nt.check_fit(KEY, fit, num_draws=200, **options)


def test_intervals_bounds_and_draws():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    # A little wider than the posterior.
    precision = (np.eye(2) + x.T @ x) / 1.2
    noise = rng.normal(size=(200, 2))
    of_fit = (
        np.linalg.solve(precision, x.T @ x[:, 0] / 1.2)
        + np.linalg.solve(np.linalg.cholesky(precision).T, noise.T).T
    )
    log_density = (
        0.5 * np.linalg.slogdet(precision)[1]
        - 0.5 * np.sum(noise**2, axis=1)
        - np.log(2.0 * np.pi)
    )
    args = (regression, x, x[:, 0])
    check = nt.check_fit(
        KEY, {"weights": of_fit}, *args, log_density=log_density, reference=None
    )
    assert check.status == "bounded"
    data = nt.to_inference_data(
        {"weights": jnp.asarray(rng.normal(3.0, 0.5, (100, 2)))}, *args
    )
    _, ax = plt.subplots()
    assert nt.plots.plot_check(check, data, ax) is ax
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["bound on the error of its mean", "fit", "corrected", "draws"]
    table = nt.table(check)
    np.testing.assert_allclose(
        [bar.get_width() / 2 for bar in ax.patches],
        table["mean_bound"] / table["sd"],
        rtol=1e-6,
    )
    fit_line, corrected, others = [
        container.lines[0].get_xdata() for container in ax.containers[1:]
    ]
    np.testing.assert_allclose(fit_line, 0.0)
    np.testing.assert_allclose(
        corrected, (table["corrected_mean"] - table["mean"]) / table["sd"]
    )
    means = data["posterior"]["weights"].values.reshape(-1, 2).mean(0)
    np.testing.assert_allclose(others, (means - table["mean"]) / table["sd"])
    plt.close("all")


@pytest.mark.full
def test_many_numbers_are_the_thirty_that_are_off_the_most():
    _, check = checked(35)
    ax = nt.plots.plot_check(check)
    table = nt.table(check)
    off = (np.abs(table["corrected_mean"] - table["mean"]) / table["sd"]).sort_values(
        ascending=False
    )
    assert {label.get_text() for label in ax.get_yticklabels()} == set(off.index[:30])
    plt.close("all")


@pytest.mark.full
def test_draws_of_another_model_are_refused():
    fit, check = checked(2)
    _, other = checked(3)
    data = nt.to_inference_data({"weights": jnp.zeros((5, 2))}, fit.model, *fit.args)
    with pytest.raises(ValueError, match="the draws have 2 numbers, the check 3"):
        nt.plots.plot_check(other, data)
    with pytest.raises(ValueError, match="the draws have no"):
        nt.plots.plot_check(check, nt.to_inference_data(fit.convergence, rng_key=KEY))
