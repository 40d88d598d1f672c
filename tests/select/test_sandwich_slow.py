"""Intervals with sandwich standard deviations cover at the nominal level where plain and tempered ones do not."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal
from scipy.stats import norm

import numpyro_tempered as nt

pytestmark = pytest.mark.slow

NUM_SETS, NUM_DATA, Z = 300, 500, norm.ppf(0.975)
TRUTH = np.array([1.0, 2.0, -1.0])
# Noise of variance 1/4 + 3/4 x²: 1 on average, and E[x² (1/4 + 3/4 x²)] = 2.5 for the slope of x.
RATIOS = np.sqrt([1.0, 2.5, 1.0])
ALPHA = 3.0 / np.sum(RATIOS**2)


def regression(x, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
    eta = numpyro.deterministic("eta", x @ beta)
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


@pytest.fixture(scope="module")
def covers():
    """Which intervals hold the truth, by kind, ``(sets, 3)``."""
    rng = np.random.default_rng(0)
    expectation = nt.expectations.gauss_hermite(predictor="eta")
    hits = {"plain": [], "tempered": [], "sandwich": []}
    for number in range(NUM_SETS):
        x = np.column_stack([np.ones(NUM_DATA), rng.normal(size=(NUM_DATA, 2))])
        y = x @ TRUTH + rng.normal(size=NUM_DATA) * np.sqrt(0.25 + 0.75 * x[:, 1] ** 2)
        key = jax.random.key(number)
        for alpha, kind in ((1.0, "plain"), (ALPHA, "tempered")):
            fit = nt.fit_gaussian(
                key,
                regression,
                AutoMultivariateNormal,
                x,
                y,
                alpha=alpha,
                expectation=expectation,
            )
            q = fit.guide.get_posterior(fit.params)
            off = np.abs(np.asarray(q.mean) - TRUTH)
            hits[kind].append(off <= Z * np.sqrt(np.asarray(q.variance)))
        sd = np.sqrt(np.diag(nt.sandwich(key, fit, num_draws=100).covariance))
        hits["sandwich"].append(off <= Z * sd)
    return {kind: np.mean(rows, axis=0) for kind, rows in hits.items()}


@pytest.mark.parametrize(
    ("kind", "ratios"),
    [
        ("plain", RATIOS),
        ("tempered", RATIOS * np.sqrt(ALPHA)),
        ("sandwich", np.ones(3)),
    ],
)
def test_intervals_cover_what_their_standard_deviations_say(covers, kind, ratios):
    expected = 2.0 * norm.cdf(Z / ratios) - 1.0
    assert np.all(
        np.abs(covers[kind] - expected)
        < 4.0 * np.sqrt(expected * (1.0 - expected) / NUM_SETS)
    )


def test_no_one_power_is_right_for_all_coefficients(covers):
    assert covers["plain"][1] < covers["sandwich"][1] - 0.1
    assert covers["tempered"][1] < covers["sandwich"][1] - 0.03
    assert covers["tempered"][0] > covers["sandwich"][0]
