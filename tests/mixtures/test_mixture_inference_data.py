"""Fitted mixtures as ArviZ data: groups, dimensions, pointwise likelihoods by scipy, summaries, plots, loo."""

import functools
import warnings

import arviz as az
import jax
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

import numpyro_tempered as nt
from numpyro_tempered.mixtures.components.categorical import categorical
from numpyro_tempered.mixtures.components.diagonal_gaussian import diagonal_gaussian
from numpyro_tempered.mixtures.components.tied_gaussian import tied_gaussian
from numpyro_tempered.report.arviz import group, group_names

pytestmark = pytest.mark.full

S = 200


@functools.lru_cache
def gaussian_case():
    """Three groups of different sizes, with holes."""
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.normal(size=(n, 2)) * 0.6 + c
            for n, c in [(8, (0, 5)), (24, (6, 0)), (16, (12, 9))]
        ]
    )
    x[::7, 1] = np.nan
    x[3] = np.nan
    component = diagonal_gaussian(2, loc=5.0, mean_precision=0.05)
    fit = nt.mixtures.fit(
        jax.random.key(0), x, component, num_components=3, alpha=0.5, num_restarts=3
    )
    data = nt.to_inference_data(
        fit,
        x,
        rng_key=jax.random.key(1),
        num_samples=S,
        posterior_predictive=True,
        coords={"feature": ["a", "b"]},
    )
    return x, fit, data


def test_groups_dimensions_and_attributes():
    x, fit, data = gaussian_case()
    assert set(group_names(data)) == {
        "posterior",
        "untempered_log_likelihood",
        "observed_data",
        "posterior_predictive",
        "variational",
    }
    posterior = group(data, "posterior")
    assert posterior["weights"].dims == ("chain", "draw", "component")
    assert (
        posterior["loc"].dims
        == posterior["precision"].dims
        == ("chain", "draw", "component", "feature")
    )
    assert posterior["loc"].shape == (1, S, 3, 2)
    assert list(posterior["feature"].values) == ["a", "b"]
    assert group(data, "untempered_log_likelihood")["x"].dims == (
        "chain",
        "draw",
        "row",
    )
    np.testing.assert_array_equal(
        group(data, "observed_data")["x"], x.astype(np.float32)
    )
    replicates = group(data, "posterior_predictive")["x"]
    assert replicates.dims == ("chain", "draw", "row", "feature")
    assert not np.any(np.isnan(replicates))
    variational = group(data, "variational")
    assert variational["objective_trace"].shape == (fit.num_iter,)
    assert variational["objective_by_restart"].shape == (3,)
    expected = {
        "alpha": 0.5,
        "objective": fit.objective,
        "elbo": fit.bound.value,
        "elbo_se": fit.bound.se,
        "num_components": 3,
        "num_occupied": fit.num_occupied,
        "converged": 1,
        "algorithm": "cavi",
        "component": "diagonal_gaussian",
    }
    assert {name: data.attrs[name] for name in expected} == expected


def test_log_likelihood_is_untempered_and_of_the_observed_entries():
    x, _, data = gaussian_case()
    posterior = group(data, "posterior")
    p, loc, precision = (
        posterior[name].values[0] for name in ("weights", "loc", "precision")
    )
    each = stats.norm.logpdf(x[None, :, None], loc[:, None], precision[:, None] ** -0.5)
    expected = logsumexp(np.log(p)[:, None] + np.nansum(each, axis=-1), axis=-1)
    # A row without an entry is no datum.
    expected[:, 3] = np.nan
    np.testing.assert_allclose(
        group(data, "untempered_log_likelihood")["x"][0], expected, rtol=2e-4, atol=2e-4
    )


def test_components_stand_by_their_size_or_as_asked():
    x, fit, data = gaussian_case()
    counts = group(data, "variational")["count"].values
    np.testing.assert_allclose(counts, np.sort(fit.counts)[::-1])
    # The groups of 24, 16 and 8 rows.
    order = [6, 12, 0]
    posterior = group(data, "posterior")
    np.testing.assert_allclose(
        posterior["loc"].mean(("chain", "draw"))[:, 0], order, atol=0.5
    )
    a = group(data, "variational")["concentration"].values
    np.testing.assert_allclose(
        posterior["weights"].mean(("chain", "draw")), a / a.sum(), atol=0.05
    )
    by_location = nt.to_inference_data(
        fit,
        x,
        rng_key=jax.random.key(1),
        num_samples=S,
        order=np.argsort(fit.posterior.loc[:, 0]),
        log_lik=False,
    )
    assert "log_likelihood" not in group_names(by_location)
    means = group(by_location, "posterior")["loc"].mean(("chain", "draw"))[:, 0]
    np.testing.assert_allclose(means, sorted(order), atol=0.5)
    with pytest.raises(ValueError, match="permutation"):
        nt.to_inference_data(fit, x, rng_key=jax.random.key(1), order=[0, 0, 1])


def test_draws_have_the_moments_of_the_factors():
    _, fit, data = gaussian_case()
    ordered = nt.mixtures.relabel(fit).posterior
    draws = group(data, "posterior")["precision"].values[0]
    mean, sd = (
        ordered.concentration / ordered.rate,
        np.sqrt(ordered.concentration) / ordered.rate,
    )
    assert np.all(np.abs(draws.mean(axis=0) - mean) < 5 * sd / np.sqrt(S))


def test_arviz_summarises_plots_and_cross_validates():
    _, _, data = gaussian_case()
    summary = az.summary(data)
    assert "weights[0]" in summary.index
    assert "loc[0, a]" in summary.index
    mpl.use("Agg")
    plots = [az.plot_trace] if hasattr(az, "plot_trace") else []
    plots += [
        getattr(az, name)
        for name in ("plot_posterior", "plot_dist")
        if hasattr(az, name)
    ][:1]
    assert len(plots) == 2
    with warnings.catch_warnings():
        # ArviZ 0.23 calls what newer releases of matplotlib have deprecated.
        warnings.filterwarnings("ignore", category=mpl.MatplotlibDeprecationWarning)
        for plot in plots:
            plot(data, var_names=["weights"])
    plt.close("all")
    with warnings.catch_warnings():
        # With few draws the weights of some rows are unreliable, as ArviZ says.
        warnings.filterwarnings("ignore", message="Estimated shape parameter")
        result = nt.loo(data)
    elpd = result.elpd if hasattr(result, "elpd") else result.elpd_loo
    assert np.isfinite(elpd)
    assert int(result.n_data_points) == 47
    assert np.all(np.isfinite(result.pareto_k))


@pytest.mark.slow
def test_levels_matrices_and_weights_have_their_dimensions():
    rng = np.random.default_rng(0)
    codes = np.stack([rng.integers(0, 2, 20), rng.integers(0, 3, 20)], axis=1)
    options = {"num_components": 2, "num_restarts": 1, "max_iter": 100}
    fit = nt.mixtures.fit(
        jax.random.key(0), codes, categorical([2, 3]), tolerance=1e-3, **options
    )
    posterior = group(
        nt.to_inference_data(fit, codes, rng_key=jax.random.key(1), num_samples=S),
        "posterior",
    )
    assert {v.dims[2] for v in posterior.data_vars.values()} == {"component"}
    assert {
        posterior[name].shape[-1]
        for name in posterior.data_vars
        if name.startswith("probs")
    } == {2, 3}
    x = rng.normal(size=(20, 2))
    weight = np.full(20, 2.0)
    fit = nt.mixtures.fit(
        jax.random.key(0),
        x,
        tied_gaussian(2, df=6.0),
        sample_weight=weight,
        tolerance=1e-3,
        **options,
    )
    data = nt.to_inference_data(
        fit,
        x,
        rng_key=jax.random.key(1),
        sample_weight=weight,
        num_samples=S,
        dims={"loc": ["part", "axis"]},
    )
    posterior = group(data, "posterior")
    assert posterior["precision"].dims == ("chain", "draw", "feature", "other_feature")
    assert posterior["loc"].dims == ("chain", "draw", "part", "axis")
    # The power of each row, which loo takes into account.
    assert data.attrs["likelihood_scale"] == '{"x": 2.0}'
    with pytest.raises(TypeError, match="got NoneType, which is no tempered posterior"):
        nt.to_inference_data(None, x, rng_key=jax.random.key(1))
