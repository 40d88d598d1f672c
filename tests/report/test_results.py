"""Every public result as ArviZ data, and the fits among them in a comparison."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro.infer import NUTS
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy import stats
from scipy.special import logsumexp
from test_package import PUBLIC

import numpyro_tempered as nt
from numpyro_tempered.core.result import Description
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.report.arviz import group, group_names

KEY, S, N, ALPHA = jax.random.key(0), 20, 24, 0.5
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2))
Y = 2.0 * X[:, 1] + 0.5 * RNG.normal(size=N)
CLASSES = (Y > 0).astype(float)
ROWS = X + np.where(np.arange(N) < 10, -4.0, 4.0)[:, None]
HOLES = np.where(np.arange(N)[:, None] % 5 == [0, 7], np.nan, ROWS)
SLAB = {"inclusion_prob": 0.3, "slab_scale": 1.0}
COMPONENT = nt.mixtures.components.known_variance(2, prior_scale=10.0)


def model(x, y=None):
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    eta = numpyro.deterministic("eta", x @ theta)
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(eta, 0.5), obs=y)


def sparse_model(x, y=None):
    prior = nt.sparse.SpikeAndSlab(0.3, 0.0, 1.0)
    theta = numpyro.sample("theta", prior.expand([2]).to_event(1))
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(x @ theta, 0.5), obs=y)


def svi(of=model, guide=AutoNormal):
    return nt.fit_svi(KEY, of, guide, X, Y, alpha=ALPHA, num_particles=20)


def online():
    tempered = nt.temper(model, alpha=ALPHA)
    return nt.OnlineVI(tempered, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())


def stream():
    runner = online()
    return runner.posterior(runner.run(KEY, X, Y)[0])


def choice(method, num_samples=20):
    fixed = nt.alpha.Criterion(
        "fixed", "none", None, lambda *_: nt.alpha.Decision(ALPHA, {}, {}, "As told.")
    )
    options = {"criterion": fixed, "alphas": [ALPHA, 1.0], "num_samples": num_samples}
    return nt.select_alpha(KEY, model, method, X, Y, num_warmup=200, **options)


def mixture(fitted=nt.mixtures.fit, x=ROWS, **options):
    return fitted(
        KEY, x, COMPONENT, num_components=2, alpha=ALPHA, num_restarts=2, **options
    )


def factors(x, alpha=ALPHA):
    return nt.ppca.fit(KEY, x, num_factors=1, alpha=alpha)


def linear(y):
    return nt.sparse.fit_linear(
        KEY, X, y, **SLAB, noise_prior=(2.0, 1.0), intercept_scale=1.0, alpha=ALPHA
    )


def descent():
    prior = nt.gaussian.families.FullRank(jnp.zeros(2), jnp.eye(2))
    return nt.gaussian.descent.minimise(
        nt.gaussian.descent.objective(
            nt.expectations.squared(), prior, X, Y, alpha=ALPHA
        ),
        prior,
    )


def rounds():
    pvi = nt.online.partitioned(nt.expectations.squared(), damping=1.0)
    prior = nt.gaussian.families.FullRank(jnp.zeros(2), jnp.eye(2))
    return nt.online.run_partitioned(pvi, prior, [(X, Y)])


# Log-likelihoods of draws (S, ...) by the formulas of the models, (S, n).


def of_normal(draws, x, y):
    return stats.norm.logpdf(y, draws["theta"] @ x.T, 0.5)


def of_linear(draws, x, y):
    eta = draws["coef"] @ (x - x.mean(axis=0) if "intercept" in draws else x).T
    eta = eta + draws["intercept"][:, None] if "intercept" in draws else eta
    scale = (
        draws["noise_precision"][:, None] ** -0.5 if "noise_precision" in draws else 0.5
    )
    return stats.norm.logpdf(y, eta, scale)


def of_logistic(draws, x, y):
    eta = draws["intercept"][:, None] + draws["coef"] @ (x - x.mean(axis=0)).T
    return -np.logaddexp(0.0, np.where(y == 1.0, -eta, eta))


def of_ppca(draws, x):
    def row(loc, cov, value):
        seen = ~np.isnan(value)
        return (
            stats.multivariate_normal.logpdf(
                value[seen], loc[seen], cov[np.ix_(seen, seen)]
            )
            if any(seen)
            else 0
        )

    noise = np.eye(2) / draws["noise_precision"][:, None, None]
    covs = draws["loadings"] @ np.swapaxes(draws["loadings"], 1, 2) + noise
    return np.array(
        [
            [row(m, cov, value) for value in x]
            for m, cov in zip(draws["mean"], covs, strict=True)
        ]
    )


def of_mixture(draws, x):
    each = stats.norm.logpdf(x[None, :, None], draws["loc"][:, None]).sum(axis=-1)
    return logsumexp(each + np.log(draws["weights"])[:, None], axis=-1)


class Case(NamedTuple):
    """A result: how to make it, what it has to be given, and what it has to say."""

    make: object
    data: tuple = ()
    log_lik: object = None
    elbo: object = None
    converged: object = None
    alpha: object = ALPHA
    site: str = "y"
    num_draws: int = S


def elbo_of_fit(result):
    return result.elbo.value


CASES = {
    "TemperedFit": Case(
        svi, log_lik=of_normal, elbo=elbo_of_fit, converged=lambda fit: fit.converged
    ),
    "TemperedFit, fit_gaussian": Case(
        lambda: nt.fit_gaussian(
            KEY, model, AutoMultivariateNormal, X, Y, alpha=ALPHA, num_particles=20
        ),
        log_lik=of_normal,
        elbo=elbo_of_fit,
        converged=lambda fit: fit.convergence.converged,
    ),
    "TemperedFit, round_and_refit": Case(
        lambda: nt.sparse.round_and_refit(
            KEY, svi(sparse_model, nt.guides.AutoSpikeAndSlab), num_steps=50
        ),
        log_lik=of_normal,
        elbo=elbo_of_fit,
    ),
    "StreamPosterior": Case(stream, (X, Y), of_normal),
    "ppca.PPCAFit": Case(
        lambda: factors(HOLES),
        (HOLES,),
        of_ppca,
        lambda fit: fit.objective,
        lambda fit: fit.converged,
        site="x",
    ),
    "ppca.FactorSelection": Case(
        lambda: nt.ppca.select_num_factors(KEY, ROWS, num_factors=[0, 1], alpha=ALPHA),
        (ROWS,),
        of_ppca,
        lambda selection: selection.elbo.max(),
        lambda selection: True,
        site="x",
    ),
    "sparse.RegressionFit": Case(
        lambda: nt.sparse.fit_linear(KEY, X, Y, **SLAB, noise_scale=0.5, alpha=ALPHA),
        (X, Y),
        of_linear,
        lambda fit: fit.objective,
        lambda fit: fit.converged,
    ),
    "sparse.RegressionFit, noise and intercept": Case(
        lambda: linear(Y),
        (X, Y),
        of_linear,
        lambda fit: fit.objective,
        lambda fit: fit.converged,
    ),
    "sparse.RegressionFit, logistic": Case(
        lambda: nt.sparse.fit_logistic(KEY, X, CLASSES, **SLAB, alpha=ALPHA),
        (X, CLASSES),
        of_logistic,
        lambda fit: fit.objective,
        lambda fit: fit.converged,
    ),
    "mixtures.MixtureFit": Case(
        mixture,
        (ROWS,),
        of_mixture,
        lambda fit: fit.bound.value,
        lambda fit: fit.converged,
        site="x",
    ),
    "mixtures.MixtureFit, chunks": Case(
        lambda: mixture(nt.mixtures.fit, lambda: iter([ROWS[:12], ROWS[12:]])),
        (ROWS,),
        of_mixture,
        lambda fit: fit.bound.value,
        lambda fit: fit.converged,
        site="x",
    ),
    "mixtures.MixtureFit, fit_stochastic": Case(
        lambda: mixture(
            nt.mixtures.fit_stochastic, lambda: iter([ROWS]), batch_size=12
        ),
        (ROWS,),
        of_mixture,
        lambda fit: fit.bound.value,
        lambda fit: fit.converged,
        site="x",
    ),
    "mixtures.ComponentSelection": Case(
        lambda: nt.mixtures.select_num_components(
            KEY,
            ROWS,
            COMPONENT,
            num_components=[1, 2],
            alpha=ALPHA,
            baselines=False,
            num_restarts=2,
        ),
        (ROWS,),
        of_mixture,
        lambda selection: selection.fit.bound.value,
        lambda selection: selection.fit.converged,
        site="x",
    ),
    "alpha.AlphaChoice": Case(
        lambda: choice(AutoNormal),
        log_lik=of_normal,
        elbo=lambda choice: choice.fit.elbo.value,
        converged=lambda choice: choice.fit.converged,
    ),
    "alpha.AlphaChoice, MCMC": Case(
        lambda: choice(NUTS, 300), log_lik=of_normal, num_draws=300
    ),
    "alpha.AlphaChoice, online": Case(
        lambda: choice(
            lambda of: nt.OnlineVI(
                of, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi()
            )
        ),
        (X, Y),
        of_normal,
    ),
    "descent.Result": Case(
        descent,
        elbo=lambda result: result.elbo,
        converged=lambda result: result.converged,
        alpha=None,
    ),
}
CASES["online.PartitionedRun"] = Case(
    rounds,
    elbo=lambda result: result.elbo[-1],
    converged=lambda result: result.converged,
    alpha=None,
)
UNIT = [
    "StreamPosterior",
    "ppca.PPCAFit",
    "sparse.RegressionFit, noise and intercept",
    "mixtures.MixtureFit",
    "descent.Result",
    "online.PartitionedRun",
]
# A trace is a part of a result, a certificate a statement about one, and an MCMC has cases of its own.
PARTS = {"Trace", "Certificate", "SampledPosterior"}


@functools.cache
def made(name):
    return CASES[name].make()


@functools.cache
def as_data(name):
    """The result as ArviZ data."""
    result, data = made(name), CASES[name].data
    # That of an MCMC has the draws it has.
    return nt.to_inference_data(result, *data, rng_key=KEY, num_samples=S)


def test_every_public_result_is_here():
    telling = {"elbo", "objective", "bound", "fits", "fit"}
    results = {
        name.rpartition(".")[2]
        for name, each in PUBLIC.items()
        if hasattr(each, "_fields")
        and (hasattr(each, "describe") or telling & set(each._fields))
    }
    here = {name.split(",")[0].rpartition(".")[2] for name in CASES}
    # Made by a method, and by no function.
    assert results - PARTS | {"StreamPosterior"} == here


@pytest.mark.full
@pytest.mark.parametrize("name", tiered(CASES, unit=UNIT))
def test_draws_come_by_chain_and_draw(name):
    posterior = group(as_data(name), "posterior")
    assert posterior.sizes["chain"] == 1
    assert posterior.sizes["draw"] == CASES[name].num_draws
    for variable in posterior.data_vars.values():
        assert variable.dims[:2] == ("chain", "draw")
        assert np.all(np.isfinite(variable))


def test_draws_of_pca_have_the_moments_of_its_precisions():
    fit, num = made("ppca.PPCAFit"), 4000
    posterior = group(
        nt.to_inference_data(fit, HOLES, rng_key=KEY, num_samples=num), "posterior"
    )
    for name, shape in (
        ("loading_precision", fit.ard_shape),
        ("noise_precision", fit.noise_shape),
    ):
        draws = np.asarray(posterior[name], np.float64)[0]
        mean = np.asarray(getattr(fit.posterior, name), np.float64)
        # Of a Gamma factor the standard deviation is the mean over the root of the shape, and the excess kurtosis
        # six over the shape.
        np.testing.assert_allclose(
            draws.mean(axis=0), mean, rtol=5 / np.sqrt(shape * num)
        )
        error = 0.5 * np.sqrt((2 + 6 / shape) / num)
        np.testing.assert_allclose(
            draws.std(axis=0), mean / np.sqrt(shape), rtol=5 * error
        )


@pytest.mark.parametrize(
    "name",
    tiered(
        [name for name, case in CASES.items() if case.log_lik is not None],
        unit=["ppca.PPCAFit", "sparse.RegressionFit, noise and intercept"],
    ),
)
def test_the_log_likelihood_is_that_of_the_model_at_the_draws(name):
    data, case = as_data(name), CASES[name]
    draws = {
        k: np.asarray(v, np.float64)[0]
        for k, v in group(data, "posterior").data_vars.items()
    }
    arguments = case.data or (X, Y)
    expected = case.log_lik(draws, *arguments)
    log_lik = group(data, "untempered_log_likelihood")[case.site]
    assert log_lik.dims[:2] == ("chain", "draw")
    np.testing.assert_allclose(log_lik[0], expected, rtol=2e-4, atol=2e-3)
    observed = group(data, "observed_data")[case.site]
    np.testing.assert_allclose(observed, arguments[-1], rtol=1e-6)


@pytest.mark.parametrize("name", tiered(CASES, unit=UNIT))
def test_attributes_say_what_the_result_knows(name):
    attrs, case, result = as_data(name).attrs, CASES[name], made(name)
    assert attrs.get("alpha") == case.alpha
    assert attrs["algorithm"]
    if case.elbo is None:
        assert "elbo" not in attrs
    else:
        assert attrs["elbo"] == pytest.approx(float(case.elbo(result)), rel=1e-6)
    if case.converged is None:
        assert "converged" not in attrs
    else:
        assert attrs["converged"] == int(case.converged(result))


def test_the_same_key_makes_the_same_draws():
    again = nt.to_inference_data(
        made("ppca.PPCAFit"), HOLES, rng_key=KEY, num_samples=S
    )
    for name, values in group(as_data("ppca.PPCAFit"), "posterior").data_vars.items():
        np.testing.assert_array_equal(group(again, "posterior")[name], values)


def test_dimensions_have_names():
    dims = {
        name: variable.dims[2:]
        for name, variable in group(as_data("ppca.PPCAFit"), "posterior").items()
    }
    assert dims == {
        "mean": ("feature",),
        "loadings": ("feature", "factor"),
        "loading_precision": ("factor",),
        "noise_precision": (),
    }
    sparse = as_data("sparse.RegressionFit, noise and intercept")
    assert group(sparse, "posterior")["coef"].dims == ("chain", "draw", "feature")
    assert group(sparse, "variational")["inclusion_probs"].dims == ("feature",)
    assert group(as_data("descent.Result"), "posterior")["theta"].dims == (
        "chain",
        "draw",
        "coordinate",
    )


@pytest.mark.full
def test_a_path_is_arviz_data_already():
    path = nt.temper_path(
        KEY, model, AutoNormal, X, Y, alphas=[0.0, ALPHA], num_samples=S
    )
    assert "posterior" in group_names(path)


@pytest.mark.parametrize(
    "name",
    [
        "ppca.PPCAFit",
        "sparse.RegressionFit, noise and intercept",
        "mixtures.MixtureFit",
    ],
)
def test_data_and_key_are_asked_for(name):
    result = made(name)
    with pytest.raises(ValueError, match=r"is followed by the data.*got 0 values"):
        nt.to_inference_data(result, rng_key=KEY)
    with pytest.raises(ValueError, match=r"has no key for its draws: pass rng_key"):
        nt.to_inference_data(result, *CASES[name].data)


def test_what_a_result_cannot_give_is_refused():
    em = nt.mixtures.MixtureEM(*[None] * len(nt.mixtures.MixtureEM._fields))
    with pytest.raises(TypeError, match=r"^got MixtureEM.*no tempered posterior"):
        nt.to_inference_data(em, ROWS, rng_key=KEY)
    with pytest.raises(TypeError, match=r"fits\['em'\] is a MixtureEM.*has no ELBO"):
        nt.compare({"em": em})
    with pytest.raises(
        ValueError, match=r"^this result has.*no model of data.*there can be no"
    ):
        nt.to_inference_data(
            made("descent.Result"), rng_key=KEY, posterior_predictive=True
        )
    with pytest.raises(ValueError, match=r"a Result has no key.*pass rng_key"):
        nt.to_inference_data(made("descent.Result"))
    with pytest.raises(TypeError, match=r"of a stream online.posterior\(state\)"):
        nt.to_inference_data(made("StreamPosterior").state, X, Y)
    with pytest.raises(TypeError, match=r"no ELBO.*fit with num_draws >= 2"):
        nt.compare({"fit": mixture(num_draws=0)})


class Mine(NamedTuple):
    """A result as a user writes one."""

    loc: np.ndarray
    data: tuple = ()

    def on(self, *data, rng_key=None):
        return self._replace(data=data)

    @property
    def target(self):
        tempered = nt.temper(model, alpha=ALPHA)
        return Target(tempered, self.data, {}, values={"theta": self.loc})

    def sample_posterior(self, rng_key, sample_shape=()):
        noise = jax.random.normal(rng_key, (*sample_shape, 2))
        return {"theta": self.loc + 0.1 * noise}

    def describe(self):
        return Description(attrs={"algorithm": "mine"})


def test_a_result_of_a_users_own_is_taken():
    data = nt.to_inference_data(
        Mine(np.array([0.0, 2.0])), X, Y, rng_key=KEY, num_samples=S
    )
    draws = {"theta": np.asarray(group(data, "posterior")["theta"])[0]}
    np.testing.assert_allclose(
        group(data, "untempered_log_likelihood")["y"][0],
        of_normal(draws, X, Y),
        rtol=1e-4,
    )
    assert (data.attrs["algorithm"], data.attrs["alpha"]) == ("mine", ALPHA)


# Comparison


@pytest.mark.full
def test_the_fits_of_a_selection_are_compared():
    selection = made("mixtures.ComponentSelection")
    data = nt.compare(selection.fits, nt.dyadic)
    assert group_names(data) == ["model_comparison"]
    assert data.attrs["selected"] == selection.selected
    own = nt.table(selection)
    np.testing.assert_allclose(
        nt.table(data).sort_index()[["elbo", "kl"]], own[["elbo", "kl"]]
    )
    factors = made("ppca.FactorSelection")
    table = nt.table(nt.compare(factors.fits)).sort_index()
    np.testing.assert_array_equal(table["elbo"], factors.elbo)
    np.testing.assert_allclose(table["weight"], factors.weight)


@pytest.mark.full
def test_with_data_and_key_the_selected_fit_is_drawn():
    factors = made("ppca.FactorSelection")
    data = nt.compare(factors.fits, data=(ROWS,), rng_key=KEY, num_samples=S)
    assert {
        "model_comparison",
        "posterior",
        "untempered_log_likelihood",
        "observed_data",
    } <= set(group_names(data))
    assert group(data, "posterior").sizes["draw"] == S
    with pytest.raises(ValueError, match="pass rng_key"):
        nt.compare(factors.fits, data=(ROWS,))


@pytest.mark.full
def test_fits_of_different_algorithms_are_compared():
    fits = {
        "sparse": made("sparse.RegressionFit"),
        "svi": made("TemperedFit"),
        "gaussian": made("TemperedFit, fit_gaussian"),
    }
    table = nt.table(nt.compare(fits, num_samples=S))
    assert set(table.index) == set(fits)
    for name, fit in fits.items():
        assert table.loc[name, "elbo"] == pytest.approx(fit.elbo.value)
    rows = {
        "ppca": nt.ppca.fit(KEY, ROWS, num_factors=1, alpha=ALPHA),
        "mixture": made("mixtures.MixtureFit"),
    }
    assert nt.compare(rows).attrs["selected"] in rows


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: factors(HOLES, 1.0),
            r"alpha 0.5 and fits.'two'. 1.0.*fit at one alpha",
        ),
        (lambda: factors(HOLES + 1.0), r"column means differ.*of the same data"),
        (
            lambda: factors(np.where(np.arange(N)[:, None] == 1, np.nan, HOLES)),
            "differ",
        ),
        (lambda: mixture(x=ROWS - 1.0), "differ"),
        (
            lambda: made("sparse.RegressionFit, noise and intercept"),
            "number of observed values differ",
        ),
    ],
)
def test_fits_of_other_data_are_refused(other, message):
    with pytest.raises(ValueError, match=message):
        nt.compare({"one": made("ppca.PPCAFit"), "two": other()})


def test_sparse_fits_of_other_targets_are_refused():
    with pytest.raises(
        ValueError,
        match=r"mean and root mean square of the observed values differ.*the same data",
    ):
        nt.compare(
            {
                "one": made("sparse.RegressionFit, noise and intercept"),
                "two": linear(Y + 0.5),
            }
        )


@pytest.mark.full
def test_data_that_cannot_be_compared_give_a_warning():
    counts = nt.mixtures.fit(
        KEY,
        np.arange(20) % 4,
        nt.mixtures.components.poisson(1),
        num_components=1,
        alpha=ALPHA,
        num_restarts=1,
    )
    with pytest.warns(UserWarning, match="is not checked"):
        nt.compare({"one": counts, "two": made("sparse.RegressionFit")})


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["sparse.RegressionFit, noise and intercept", "ppca.PPCAFit"]
)
def test_the_kl_is_that_of_draws(name):
    """KL(q, prior) by Monte Carlo: the ELBO's other part is the expected log-likelihood."""
    result, case = made(name), CASES[name]
    data = nt.to_inference_data(result, *case.data, rng_key=KEY, num_samples=2000)
    log_lik = group(data, "untempered_log_likelihood")[case.site].sum(
        group(data, "untempered_log_likelihood")[case.site].dims[2:]
    )
    elbo, se = result.elbo, float(log_lik.std()) / np.sqrt(2000)
    assert elbo.value == pytest.approx(
        ALPHA * elbo.expected_log_lik - elbo.kl, rel=1e-5
    )
    if name == "ppca.PPCAFit":
        # The bound on the log-likelihood that q(z) gives is below it.
        assert float(log_lik.mean()) - elbo.expected_log_lik > -5.0 * se
    else:
        assert abs(float(log_lik.mean()) - elbo.expected_log_lik) < 5.0 * se


@pytest.mark.full
def test_a_batch_of_fits_is_refused():
    fits = jax.vmap(
        lambda alpha: nt.sparse.fit_linear(
            KEY, X, Y, **SLAB, noise_scale=0.5, alpha=alpha
        )
    )(jnp.array([0.5, 1.0]))
    with pytest.raises(ValueError, match="a batch of fits"):
        nt.compare({"batch": fits})
    one = jax.tree.map(lambda leaf: leaf[0], fits)
    assert nt.compare({"one": one}).attrs["alpha"] == 0.5
