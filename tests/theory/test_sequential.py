"""Sequential variational inference without linearisation: closed forms, another solver, its regret."""

import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_tempered as nt
from numpyro_tempered import bounds
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField
from numpyro_tempered.theory import hindsight

HINGE = nt.expectations.hinge()
LOGISTIC = nt.expectations.logistic()
SQUARED = nt.expectations.squared()


def ridge(x, y, rate, loc, scale):
    """Means and variances of the best mean-field q, and covariance of the best full one, for Σ(y - xθ)²."""
    precision = np.diag(scale**-2) + 2.0 * rate * x.T @ x
    mean = np.linalg.solve(precision, loc / scale**2 + 2.0 * rate * x.T @ y)
    return mean, 1.0 / np.diag(precision), np.linalg.inv(precision)


@pytest.mark.parametrize(
    "family", ["mean field", pytest.param("full rank", marks=pytest.mark.full)]
)
def test_on_squared_losses_it_is_the_projection_of_exact_bayes(x64, family):
    rng = np.random.default_rng(0)
    num_rounds, d, rate = 12, 3, 0.3
    x = rng.normal(size=(num_rounds, d)) @ np.array(
        [[1.0, 0.7, 0.0], [0.0, 1.0, 0.5], [0.0, 0.0, 1.0]]
    )
    y, loc, scale = (
        rng.normal(size=num_rounds),
        np.array([0.3, -0.2, 0.1]),
        np.array([0.5, 1.0, 2.0]),
    )
    prior = (
        MeanField(loc, scale)
        if family == "mean field"
        else FullRank(loc, np.diag(scale))
    )
    fit = hindsight.sequential(SQUARED, prior, rate, x, y, tolerance=1e-20)
    assert fit.converged.shape == (num_rounds,)
    assert np.all(fit.converged)
    # A stationarity of 1e-20 leaves 1e-10 posterior standard deviations.
    for t in range(num_rounds + 1):
        mean, variances, covariance = ridge(x[:t], y[:t], rate, loc, scale)
        np.testing.assert_allclose(fit.posteriors.loc[t], mean, rtol=1e-8, atol=1e-9)
        if family == "mean field":
            np.testing.assert_allclose(
                fit.posteriors.scale[t] ** 2, variances, rtol=1e-8
            )
        else:
            factor = fit.posteriors.factor[t]
            np.testing.assert_allclose(
                factor @ factor.T, covariance, rtol=1e-8, atol=1e-9
            )
            variances = x[t] @ covariance @ x[t] if t < num_rounds else 0.0
        if t < num_rounds:
            spread = variances if np.ndim(variances) == 0 else variances @ x[t] ** 2
            np.testing.assert_allclose(
                fit.losses.at_mean[t], (y[t] - x[t] @ mean) ** 2, rtol=1e-8
            )
            np.testing.assert_allclose(
                fit.losses.expected[t], (y[t] - x[t] @ mean) ** 2 + spread, rtol=1e-8
            )


@pytest.mark.full
def test_a_full_covariance_is_exponentially_weighted_aggregation(x64):
    rng = np.random.default_rng(3)
    x, y, rate = rng.normal(size=(12, 3)), rng.normal(size=12), 0.3
    prior = FullRank(jnp.zeros(3), jnp.eye(3))
    fit = hindsight.sequential(SQUARED, prior, rate, x, y, tolerance=1e-20)
    rule = nt.online.ewa(rate)
    _, losses = nt.online.run(rule, SQUARED, rule.init(prior), x, y)
    np.testing.assert_allclose(fit.losses.at_mean, losses.at_mean, rtol=1e-8)
    np.testing.assert_allclose(fit.losses.expected, losses.expected, rtol=1e-8)


@pytest.mark.full
def test_every_fit_is_that_of_another_solver(x64):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(40, 2))
    y = np.where(x @ [1.0, -2.0] + rng.normal(size=40) > 0, 1.0, -1.0)
    prior = MeanField(jnp.zeros(2), jnp.array([1.0, 3.0]))
    fit = hindsight.sequential(LOGISTIC, prior, 0.8, x, y, tolerance=1e-14)
    assert np.all(fit.converged)
    for t in (1, 7, 40):
        best = hindsight.gaussian(LOGISTIC, prior, 0.8, x[:t], y[:t])
        np.testing.assert_allclose(
            fit.posteriors.loc[t], best.q.loc, rtol=2e-4, atol=1e-6
        )
        np.testing.assert_allclose(fit.posteriors.scale[t], best.q.scale, rtol=2e-4)


@pytest.mark.parametrize(
    "expectation", [HINGE, pytest.param(LOGISTIC, marks=pytest.mark.full)]
)
def test_it_keeps_theorem_2_at_every_round(x64, expectation):
    num_rounds, d = 60, 2
    rng = np.random.default_rng(2)
    x = rng.normal(size=(num_rounds, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    x[:] = x[0]
    y = np.where(np.arange(num_rounds) % 2, 1.0, -1.0)
    prior = MeanField(jnp.full(d, 0.5), jnp.array([0.5, 0.8]))
    constants = {
        "lipschitz": nt.bounds.lipschitz(x),
        "strong_convexity": nt.bounds.strong_convexity(prior),
    }
    rate = nt.online.sva_rate(num_rounds, kl=3.0, **constants)
    fit = hindsight.sequential(expectation, prior, rate, x, y)
    assert np.all(fit.converged)
    best = hindsight.gaussian(expectation, prior, rate, x, y)
    bound = bounds.sva(
        np.arange(1, num_rounds + 1),
        step_size=rate,
        kl=best.kl,
        comparator=np.cumsum(best.expected),
        **constants,
    )
    expected = np.cumsum(fit.losses.expected)
    assert np.all(np.cumsum(fit.losses.at_mean) <= expected + 1e-9)
    assert np.all(expected <= bound.value + 1e-9)
    assert expected[-1] - np.sum(best.expected) > 0.02 * bound.regret[-1]


def test_sequential_refuses_what_it_cannot_fit():
    x, y, prior = np.ones((3, 1)), np.ones(3), MeanField(jnp.zeros(1), jnp.ones(1))
    low_rank = LowRank(jnp.zeros(2), jnp.ones(2), jnp.zeros((2, 1)))
    draws = nt.expectations.monte_carlo(lambda theta, x, y: (y - x @ theta) ** 2)
    cases = [
        (
            (HINGE, prior, 1.0, x * np.nan, y),
            ValueError,
            r"data must be finite.*rounds that were rejected",
        ),
        (
            (HINGE, prior, 1.0, x, y[:2]),
            ValueError,
            r"^the data need.*one leading axis.*T rounds, got axes",
        ),
        (
            (HINGE, prior, 1.0),
            ValueError,
            r"^the data need.*one leading axis.*T rounds, got axes",
        ),
        (
            (HINGE, prior, 0.0, x, y),
            ValueError,
            r"step_size must be positive.*and finite, got",
        ),
        ((HINGE, prior, 1.0, x, 2 * y), ValueError, "labels"),
        ((draws, prior, 1.0, x, y), ValueError, "draws"),
        (
            (HINGE, low_rank, 1.0, x, y),
            TypeError,
            "MeanField or FullRank prior, got LowRank",
        ),
        (
            (nt.expectations.gauss_hermite(predictor="u"), prior, 1.0, x, y),
            TypeError,
            "bare loss",
        ),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message):
            hindsight.sequential(*arguments)
