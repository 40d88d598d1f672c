"""Every verb on every kind of tempered posterior: against numbers from elsewhere, or its refusal."""

import functools
import warnings
from typing import NamedTuple

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.report.arviz import group

KEY, N, ALPHA, NOISE = jax.random.key(0), 60, 0.5, 0.5
RNG = np.random.default_rng(0)
X = np.linalg.qr(RNG.normal(size=(N, 2)))[0] * np.sqrt(N)
Y = X @ np.array([1.0, -0.5]) + NOISE * RNG.normal(size=N)
CLASSES = (X[:, 0] + 0.5 * RNG.normal(size=N) > 0).astype(float)
ROWS = np.outer(RNG.normal(size=N), [2.0, -1.0]) + 0.7 * RNG.normal(size=(N, 2)) - 1.0
# The exact tempered posterior, of independent coordinates as the columns are orthogonal.
COV = np.linalg.inv(np.eye(2) / 4.0 + ALPHA * X.T @ X / NOISE**2)
MEAN = COV @ (ALPHA * X.T @ Y / NOISE**2)


def model(x, y=None):
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    eta = numpyro.deterministic("eta", x @ theta)
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)


def gaussian(guide):
    at_eta = nt.expectations.gauss_hermite(predictor="eta")
    return nt.fit_gaussian(KEY, model, guide, X, Y, alpha=ALPHA, expectation=at_eta)


def mixture():
    component = nt.mixtures.components.known_variance(2, prior_scale=3.0)
    return nt.mixtures.fit(KEY, ROWS, component, num_components=1, alpha=ALPHA)


def stream():
    online = nt.OnlineVI(
        nt.temper(model, alpha=ALPHA),
        nt.guides.AutoOnlineMultivariateNormal,
        expectation=nt.expectations.gauss_hermite(predictor="eta"),
    )
    return online.posterior(online.run(KEY, X, Y)[0])


def mcmc():
    kernel = NUTS(nt.temper(model, alpha=ALPHA))
    sampler = MCMC(kernel, num_warmup=300, num_samples=1000, progress_bar=False)
    sampler.run(KEY, X, Y)
    return sampler


class Case(NamedTuple):
    """A posterior, and the data that follow it where it does not hold them."""

    make: object
    data: tuple = ()

    def bound(self):
        posterior = self.make()
        return posterior.on(*self.data) if self.data else posterior


POSTERIORS = {
    "fit_svi": Case(lambda: nt.fit_svi(KEY, model, AutoNormal, X, Y, alpha=ALPHA)),
    "fit_gaussian": Case(lambda: gaussian(AutoMultivariateNormal)),
    "linear_response": Case(lambda: nt.linear_response(KEY, gaussian(AutoNormal))),
    "mixtures.fit": Case(mixture, (ROWS,)),
    "ppca.fit": Case(
        lambda: nt.ppca.fit(KEY, ROWS, num_factors=1, ard=False, alpha=ALPHA), (ROWS,)
    ),
    "sparse.fit_linear": Case(
        lambda: nt.sparse.fit_linear(
            KEY,
            X,
            Y,
            inclusion_prob=0.5,
            slab_scale=2.0,
            noise_scale=NOISE,
            alpha=ALPHA,
        ),
        (X, Y),
    ),
    "sparse.fit_logistic": Case(
        lambda: nt.sparse.fit_logistic(
            KEY, X, CLASSES, inclusion_prob=0.5, slab_scale=2.0, alpha=ALPHA
        ),
        (X, CLASSES),
    ),
    "OnlineVI": Case(stream, (X, Y)),
    "MCMC": Case(mcmc),
}
EXACT = ("fit_svi", "fit_gaussian", "linear_response", "OnlineVI", "MCMC")


@functools.cache
def made(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return POSTERIORS[name].make()


def close(found, expected, **tolerance):
    np.testing.assert_allclose(
        np.asarray(found, float), np.asarray(expected, float), **tolerance
    )


def check_fit(name):
    """The ELBO by weights is that of the algorithm; means are bounded near the exact ones."""
    posterior, data = made(name), POSTERIORS[name].data
    check = nt.check_fit(KEY, posterior, *data, num_draws=2000)
    found = check.divergences
    if posterior.elbo is not None:
        slack = 5.0 * np.hypot(found.elbo_se, posterior.elbo.se) + 1e-3
        # Bounds with other terms are below the ELBO.
        assert found.elbo > posterior.elbo.value - slack
        if name not in ("ppca.fit", "sparse.fit_logistic"):
            assert found.elbo < posterior.elbo.value + slack
    assert found.elbo <= found.log_evidence + 5.0 * found.elbo_se
    if name in EXACT:
        close(nt.table(check)["corrected_mean"], MEAN, atol=0.02)
        close(nt.table(check)["corrected_sd"], np.sqrt(np.diag(COV)), rtol=0.1)


def sandwich(name):
    """White's standard deviations, with the prior."""
    errors = nt.sandwich(KEY, made(name), *POSTERIORS[name].data, num_draws=2000)
    table = nt.table(errors)
    if name in EXACT:
        scores = ALPHA * X * (Y - X @ MEAN)[:, None] / NOISE**2
        centred = scores - scores.mean(axis=0)
        expected = COV @ centred.T @ centred @ COV
        close(table["sandwich_sd"], np.sqrt(np.diag(expected)), rtol=2e-2)
    else:
        of_means = table.loc[[k for k in table.index if k.startswith(("loc", "mean"))]]
        close(of_means["sandwich_sd"], ROWS.std(axis=0) / np.sqrt(N), rtol=0.1)


def linear_response(name):
    """The exact covariance, where the fit is a mean field."""
    response = nt.linear_response(KEY, made(name), *POSTERIORS[name].data)
    close(response.mean["theta"], MEAN, atol=0.02)
    close(response.sd["theta"], np.sqrt(np.diag(COV)), rtol=2e-2)


def certify_risk(name):
    """A bound above the risk on the data, with the KL of the fit."""
    case, options = POSTERIORS[name], {}
    bound = case.bound() if case.data else made(name)
    if name in ("mixtures.fit", "ppca.fit"):
        options = {"prior_is_fixed": True}

    def loss(latents, x, *rest):
        return jnp.clip(jnp.abs(x[:, 0]) / 10.0, 0.0, 1.0)

    certificate = nt.certify_risk(KEY, bound, loss, num_draws=500, **options)
    risk = float(np.mean(np.clip(np.abs(bound.args[0][:, 0]) / 10.0, 0.0, 1.0)))
    assert risk < certificate.value < 1.0


def compare(name):
    """The ELBO of the fit, with the draws of its posterior."""
    bound = POSTERIORS[name].bound() if name == "OnlineVI" else made(name)
    data = () if name == "OnlineVI" else POSTERIORS[name].data
    options = {"data": data, "rng_key": KEY, "num_samples": 20}
    data = nt.compare({"one": bound}, **options)
    elbo = nt.table(data)["elbo"].item()
    if name == "OnlineVI":
        exact = made("fit_gaussian").elbo.value
        close(elbo, exact, atol=0.5)
    else:
        close(elbo, made(name).elbo.value, rtol=1e-6)
    assert group(data, "posterior").sizes["draw"] == 20


def loo(name):
    """A number for each datum, below the in-sample density."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = nt.loo(made(name), *POSTERIORS[name].data, rng_key=KEY)
    assert int(result.n_data_points) == N
    elpd = result.elpd if hasattr(result, "elpd") else result.elpd_loo
    if name in EXACT:
        # The leave-one-out predictive of each row is normal.
        values = []
        for x, y in zip(X, Y, strict=True):
            rest = np.linalg.inv(COV) - ALPHA * np.outer(x, x) / NOISE**2
            mean = np.linalg.solve(
                rest, np.linalg.solve(COV, MEAN) - ALPHA * x * y / NOISE**2
            )
            sd = np.sqrt(NOISE**2 + x @ np.linalg.solve(rest, x))
            values.append(float(dist.Normal(x @ mean, sd).log_prob(y)))
        close(elpd, np.sum(values), atol=1.0)
    else:
        assert np.isfinite(elpd)


def to_inference_data(name):
    """Draws whose moments are those of the posterior, and predictions where the model takes rows."""
    case = POSTERIORS[name]
    options = {"predictions": (X[:5],)} if name in EXACT else {}
    data = nt.to_inference_data(made(name), *case.data, rng_key=KEY, **options)
    posterior = made(name) if name != "MCMC" else None
    if posterior is not None:
        for site, mean in posterior.mean.items():
            draws = np.asarray(group(data, "posterior")[site])[0]
            slack = 6.0 * np.asarray(posterior.sd[site]) / np.sqrt(len(draws)) + 1e-4
            assert np.all(np.abs(draws.mean(axis=0) - mean) < 2.0 * slack), site
    if options:
        found = group(data, "predictions")["y"]
        close(found.mean(("chain", "draw")), X[:5] @ MEAN, atol=0.1)
    az.summary(data, var_names=[next(iter(group(data, "posterior").data_vars))])


def table(name):
    """A row for each number."""
    frame = nt.table(made(name))
    assert list(frame.columns) == ["mean", "sd"]
    assert np.all(np.isfinite(frame))
    assert np.all(frame["sd"] >= 0.0)
    if name in EXACT:
        close(frame["mean"], MEAN, atol=0.02)
        close(frame["sd"], np.sqrt(np.diag(COV)), rtol=0.1)


def prior_of_a_stream(name):
    """The start of a stream has the moments of the posterior."""
    case = POSTERIORS[name]
    other, data = model, (X[:1], Y[:1])
    if name == "mixtures.fit":
        other, data = nt.mixtures.numpyro_model(made(name)), (ROWS[:2],)
    elif name == "ppca.fit":
        other, data = case.bound().model, (ROWS[:2],)
    elif name.startswith("sparse"):
        other, data = case.bound().model, (X[:1], Y[:1])
    online = nt.OnlineVI(other, nt.guides.AutoOnlineMultivariateNormal)
    prior = case.bound() if case.data and name != "OnlineVI" else made(name)
    start = online.posterior(online.init(KEY, *data, prior=prior))
    if name in EXACT:
        close(start.mean["theta"], MEAN, atol=0.02)
        close(start.sd["theta"], np.sqrt(np.diag(COV)), rtol=0.15)
    else:
        site = "loc" if name == "mixtures.fit" else "mean"
        close(start.mean[site], made(name).mean[site], atol=0.05)


VERBS = {
    "check_fit": check_fit,
    "sandwich": sandwich,
    "linear_response": linear_response,
    "certify_risk": certify_risk,
    "compare": compare,
    "loo": loo,
    "to_inference_data": to_inference_data,
    "table": table,
    "OnlineVI.init(prior=)": prior_of_a_stream,
}
ATOM = "(?i)atom"
FULL = "covariance already|full|mean-field"
# What is refused, with the words that say why.
REFUSED = {
    ("check_fit", "MCMC"): "density",
    ("check_fit", "sparse.fit_linear"): ATOM,
    ("check_fit", "sparse.fit_logistic"): ATOM,
    ("sandwich", "sparse.fit_linear"): ATOM,
    ("sandwich", "sparse.fit_logistic"): ATOM,
    ("linear_response", "fit_gaussian"): FULL,
    ("linear_response", "linear_response"): FULL,
    ("linear_response", "mixtures.fit"): "takes a",
    ("linear_response", "ppca.fit"): "takes a",
    ("linear_response", "sparse.fit_linear"): "takes a",
    ("linear_response", "sparse.fit_logistic"): "takes a",
    ("linear_response", "OnlineVI"): FULL,
    ("linear_response", "MCMC"): "takes a",
    ("certify_risk", "MCMC"): "density",
    ("compare", "MCMC"): "no ELBO",
    ("OnlineVI.init(prior=)", "sparse.fit_linear"): ATOM,
    ("OnlineVI.init(prior=)", "sparse.fit_logistic"): ATOM,
}
