"""A second fit_gaussian on the same shapes: no compilation, and nothing stale."""

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_tempered as nt

GLOBALS = {"scale": 1.0}
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **__: (
        COMPILED.append(event) if event.endswith("backend_compile_duration") else None
    )
)
X = np.random.default_rng(0).normal(size=(20, 2))


def model(x, y):
    theta = numpyro.sample(
        "theta", dist.Normal(0.0, GLOBALS["scale"]).expand([2]).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ theta)
    numpyro.sample("y", dist.Normal(eta, 0.5), obs=y)


def fit(y, alpha=0.5, **options):
    return nt.fit_gaussian(
        jax.random.key(0),
        model,
        AutoMultivariateNormal,
        jnp.asarray(X),
        jnp.asarray(y),
        alpha=alpha,
        expectation=nt.expectations.gauss_hermite(predictor="eta"),
        **options,
    )


def conjugate(y, alpha, scale):
    """Mean, standard deviations, ELBO and expected log-likelihood of the tempered posterior, in float64."""
    precision = np.eye(2) / scale**2 + alpha * X.T @ X / 0.25
    mean, cov = (
        np.linalg.solve(precision, alpha * X.T @ y / 0.25),
        np.linalg.inv(precision),
    )
    squares = np.sum((y - X @ mean) ** 2) + np.trace(X @ cov @ X.T)
    log_lik = -len(y) * (0.5 * np.log(2 * np.pi) + np.log(0.5)) - 0.5 * squares / 0.25
    kl = (
        np.trace(cov) / scale**2
        + mean @ mean / scale**2
        - 2
        + 4 * np.log(scale)
        - np.linalg.slogdet(cov)[1]
    )
    return mean, np.sqrt(np.diag(cov)), alpha * log_lik - 0.5 * kl, log_lik


def check(result, y, alpha, scale):
    mean, sd, elbo, log_lik = conjugate(y, alpha, scale)
    # A KL gap of the tolerance, 1e-6 nats, is a mean off by sqrt(2e-6) standard deviations.
    assert np.all(np.abs(result.params["auto_loc"] - mean) <= 2e-3 * sd)
    assert result.elbo.value == pytest.approx(elbo, rel=1e-5)
    assert result.elbo.expected_log_lik == pytest.approx(log_lik, rel=1e-4)
    assert result.elbo.se == 0.0


def test_other_data_powers_and_globals_are_never_stale(monkeypatch):
    y = X @ [1.0, -1.0] + 0.1
    for shift, alpha, scale in [
        (0.0, 0.5, 1.0),
        (1.0, 0.5, 1.0),
        (1.0, 0.25, 1.0),
        (1.0, 0.25, 3.0),
    ]:
        monkeypatch.setitem(GLOBALS, "scale", scale)
        check(fit(y + shift, alpha), y + shift, alpha, scale)


def test_another_call_on_the_same_shapes_compiles_nothing():
    y = X @ [1.0, -1.0] + 0.1
    for shift in (0.0, 0.5):
        fit(y + shift)
    COMPILED.clear()
    fit(y + 1.0)
    assert COMPILED == []


@pytest.mark.full
def test_the_elbo_of_a_power_of_0_is_by_draws():
    elbo = fit(X @ [1.0, -1.0], alpha=0.0, num_particles=500).elbo
    assert np.isfinite(elbo.expected_log_lik)
    assert elbo.value == pytest.approx(0.0, abs=1e-4)


def test_the_advice_is_what_helps():
    with pytest.warns(
        UserWarning,
        match=r"^the fit ended.*Take more max_evaluations, a larger tolerance.*another start",
    ) as warned:
        fit(X @ [1.0, -1.0], max_evaluations=1)
    assert "num_draws" not in str(warned[0].message)
