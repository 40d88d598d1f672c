"""Mixtures in NumPyro: the model against the oracles' densities, the bound at the factors against E1, polish."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from conftest import enable_x64
from mixture_families import FAMILIES, K, N, component_of, some_data
from numpyro import handlers
from numpyro.infer import Trace_ELBO
from numpyro.infer.util import log_density
from scipy import stats
from scipy.special import logsumexp

import numpyro_tempered as nt
from numpyro_tempered.mixtures.array import ArraySource
from numpyro_tempered.mixtures.ascent import History
from numpyro_tempered.mixtures.bridges.polish import adjustable_guide
from numpyro_tempered.mixtures.components.base import as_dtype
from numpyro_tempered.mixtures.components.gaussian import gaussian
from numpyro_tempered.mixtures.components.known_variance import known_variance
from numpyro_tempered.mixtures.evidence import evaluate
from numpyro_tempered.mixtures.factors import MixtureProblem, Outcome, update
from numpyro_tempered.mixtures.prepare import Settings, prepare
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.sweep import (
    Coefficients,
    accumulate,
    base_sum,
    in_blocks,
    log_joint,
    make_blocks,
)

pytestmark = pytest.mark.full

ALPHA = 0.4
WEIGHT = np.array([1.0, 2.0, 0.0, 1.0, 0.5, 3.0, 1.0, 1.0, 0.25, 2.0, 1.0, 1.0])
# The sampler of each family takes seconds to compile: by default one with holes, one with matrices, one discrete.
BY_DEFAULT = {"diagonal_gaussian", "gaussian", "categorical"}


def data_of(name):
    """Data far from 0, so that a centre is taken off where it may be; with holes where the family allows them."""
    x = some_data(name)
    if name == "product":
        return x
    if component_of(name).location is not None:
        x = x + 3.0
    if FAMILIES[name].missing:
        x[1, 0] = x[4] = np.nan
    return x


@functools.lru_cache
def fit_and_source(name):
    """Factors given responsibilities, in double precision: E1 is a bound at any factors."""
    with enable_x64():
        component, x = component_of(name), data_of(name)
        data = prepare(x, component, WEIGHT)
        blocks = make_blocks(data.rows, data.weight, N)
        problem = MixtureProblem(
            as_dtype(data.prior, jnp.float64),
            jnp.array([0.75, 1.5]),
            jnp.asarray(ALPHA),
            base_sum(data.component, blocks),
        )
        omega = np.random.default_rng(3).dirichlet(np.ones(K), N)
        sums = accumulate(data.component, in_blocks(jnp.asarray(omega), N), blocks)
        factors = update(data.component, problem, sums)
        counts, one = np.asarray(sums.counts), np.zeros(1)
        fit = MixtureFit(
            data.component,
            ALPHA,
            factors,
            problem,
            data.centre,
            0.0,
            0.0,
            None,
            counts,
            one,
            one,
            1,
            0.0,
            True,
            1,
            0,
            data.total,
        )
        return fit, ArraySource(data, blocks, False)


def fit_of(name):
    return fit_and_source(name)[0]


def trace_of(model, *args, key=1):
    return handlers.trace(handlers.seed(model, key)).get_trace(*args)


def latents(trace):
    return {
        k: v["value"]
        for k, v in trace.items()
        if v["type"] == "sample" and not v["is_observed"]
    }


@pytest.mark.parametrize(
    "name",
    [
        n if n in BY_DEFAULT else pytest.param(n, marks=pytest.mark.slow)
        for n in FAMILIES
    ],
)
def test_bound_of_model_and_guide_is_e1(name, x64):
    (fit, source), x = fit_and_source(name), data_of(name)
    outcome = Outcome(
        fit.factors,
        History(fit.trace, fit.restart_objectives, 1, 0.0, True, fit.num_iter),
    )
    settings = Settings(fit.alpha, fit.problem.concentration)
    bound = evaluate(
        jax.random.key(0), source, fit.problem, settings, outcome, 400
    ).bound
    model, guide = (
        nt.temper(nt.mixtures.numpyro_model(fit), alpha=fit.alpha),
        nt.mixtures.numpyro_guide(fit),
    )
    draws = 2000

    def elbo(key):
        return -Trace_ELBO().loss(key, {}, model, guide, x, WEIGHT)

    values = np.asarray(
        jax.jit(jax.vmap(elbo))(jax.random.split(jax.random.key(1), draws))
    )
    se = np.hypot(values.std(ddof=1) / np.sqrt(draws), bound.se)
    assert abs(values.mean() - bound.value) < 5 * se


@pytest.mark.parametrize("name", FAMILIES)
def test_likelihood_at_a_draw_is_that_of_the_engine(name, x64):
    fit, x = fit_of(name), data_of(name)
    guide = handlers.seed(nt.mixtures.numpyro_guide(fit), 1)
    trace = trace_of(
        nt.temper(
            handlers.replay(
                nt.mixtures.numpyro_model(fit), handlers.trace(guide).get_trace()
            ),
            ALPHA,
        ),
        x,
        WEIGHT,
    )
    site = trace["x"]
    # The parameters from the same values of the sites, through the family's linear form.
    replayed = handlers.seed(
        handlers.replay(
            lambda: fit.component.draw(numpyro.sample, fit.posterior), trace
        ),
        0,
    )
    parameters = replayed()
    mixture = Coefficients(
        jnp.log(trace["weights"]["value"]), *fit.component.coefficients_at(parameters)
    )
    rows = jnp.asarray(fit.component.check(x))
    expected = fit.component.log_base(rows.T) + jax.nn.logsumexp(
        log_joint(fit.component, mixture, rows.T), axis=0
    )
    np.testing.assert_allclose(
        site["fn"].log_prob(site["value"]),
        np.where(WEIGHT > 0, expected, 0.0),
        rtol=1e-9,
        atol=1e-9,
    )
    np.testing.assert_allclose(
        site["scale"], ALPHA * np.where(WEIGHT > 0, WEIGHT, 1.0), rtol=1e-12
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_adjustable_guide_starts_at_the_fit(name, x64):
    fit = fit_of(name)
    spreads = dict.fromkeys(trace_of(nt.mixtures.numpyro_guide(fit)), 1.0)
    plain, adjustable = (
        trace_of(nt.mixtures.numpyro_guide(fit)),
        trace_of(adjustable_guide(fit, spreads)),
    )
    sites = latents(plain)
    assert set(latents(adjustable)) == set(sites)
    for site, value in sites.items():
        np.testing.assert_allclose(adjustable[site]["value"], value, rtol=1e-9)
        np.testing.assert_allclose(
            adjustable[site]["fn"].log_prob(value),
            plain[site]["fn"].log_prob(value),
            rtol=1e-9,
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_model_and_guide_have_the_same_sites_in_the_same_order_and_plates(name, x64):
    fit, x = fit_of(name), data_of(name)
    model, guide = (
        trace_of(nt.mixtures.numpyro_model(fit), x),
        trace_of(nt.mixtures.numpyro_guide(fit)),
    )
    assert list(latents(model)) == list(latents(guide))
    for site in latents(guide):
        assert model[site]["value"].shape == guide[site]["value"].shape
        here, there = (
            [f.name for f in t[site]["cond_indep_stack"]] for t in (model, guide)
        )
        shared = site == "weights" or (name == "tied_gaussian" and site == "precision")
        assert here == there == ([] if shared else ["components"])
    assert model["x"]["fn"].batch_shape == (N,)


def log_dirichlet(p, a):
    return stats.dirichlet.logpdf(p, a)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize(
    "name",
    ["known_variance", "diagonal_gaussian", "gaussian", "poisson", "multinomial"],
)
def test_log_density_of_the_model_is_that_of_the_formulas(name, alpha, x64):
    component, oracle, x = component_of(name), FAMILIES[name].oracle, data_of(name)
    model = nt.temper(
        nt.mixtures.numpyro_model(component, 2, concentration=[0.75, 1.5]), alpha
    )
    first, second = oracle.some_parameters()
    p = np.array([0.3, 0.7])
    values = {"weights": p} | _as_sites(name, [first, second])
    likelihood = [
        logsumexp(
            [
                np.log(p[j]) + oracle.log_density(theta, row)
                for j, theta in enumerate((first, second))
            ]
        )
        for row in x
    ]
    q = oracle.prior(2)
    prior = sum(oracle.log_prior(theta, q) for theta in (first, second))
    expected = alpha * WEIGHT @ likelihood + prior + log_dirichlet(p, [0.75, 1.5])
    got, _ = log_density(model, (x, WEIGHT), {}, values)
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def _as_sites(name, thetas):
    """Parameters of the oracle, of two components, as values of the model's sites."""
    if name == "multinomial":
        return {"probs": np.array(thetas)}
    if name == "gaussian":
        return {
            "loc": np.array([t[0] for t in thetas]),
            "precision": np.array([t[1] for t in thetas]),
        }
    both = np.repeat(np.array(thetas)[:, None], 2, axis=1)
    if name == "diagonal_gaussian":
        return {"loc": both[..., 0], "precision": both[..., 1]}
    return {{"known_variance": "loc", "poisson": "rate"}[name]: both}


def test_traced_data_have_the_density_of_concrete_ones(x64):
    x = data_of("diagonal_gaussian")
    model = nt.mixtures.numpyro_model(component_of("diagonal_gaussian"), 2)
    values = latents(trace_of(model, x))

    def density(rows, weight):
        return log_density(model, (rows, weight), {}, values)[0]

    np.testing.assert_allclose(
        jax.jit(density)(x, WEIGHT), density(x, WEIGHT), rtol=1e-12
    )


def test_a_model_draws_complete_data_of_its_components(x64):
    fit, x = fit_of("categorical"), data_of("categorical")
    trace = trace_of(nt.mixtures.numpyro_model(fit), x)
    drawn = np.asarray(trace["x"]["fn"].sample(jax.random.key(2)))
    assert drawn.shape == x.shape
    assert set(np.unique(drawn[:, 0])) <= {0, 1}
    assert set(np.unique(drawn[:, 1])) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: nt.mixtures.numpyro_model(fit_of("poisson"), 2),
            ValueError,
            "a fit has its own number",
        ),
        (
            lambda: trace_of(
                nt.mixtures.numpyro_model(nt.mixtures.components.multinomial(2), 2),
                [[0.0, np.nan]],
            ),
            ValueError,
            "does not marginalise",
        ),
        (
            lambda: trace_of(
                nt.mixtures.numpyro_model(gaussian(2), 2),
                np.zeros((3, 2)),
                [1.0, -1.0, 1.0],
            ),
            ValueError,
            "not negative",
        ),
        (
            lambda: trace_of(
                nt.mixtures.numpyro_model(gaussian(2), 2), np.zeros((3, 2)), [1.0, 1.0]
            ),
            ValueError,
            r"shape \(2,\); expected \(3,\)",
        ),
        (
            lambda: nt.compare({"no draws": fit_of("poisson")}),
            TypeError,
            "no ELBO.*num_draws >= 2",
        ),
    ],
)
def test_errors_name_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


def overlapping(separation):
    rng = np.random.default_rng(1)
    return np.concatenate([rng.normal(size=20), rng.normal(size=20) + separation])[
        :, None
    ].astype(np.float32)


def fit_and_polish(separation, num_components):
    x = overlapping(separation)
    fit = nt.mixtures.fit(
        jax.random.key(0),
        x,
        known_variance(1, prior_scale=5.0),
        num_components=num_components,
        alpha=0.5,
        num_restarts=2,
        num_draws=1000,
    )
    return (
        x,
        fit,
        nt.mixtures.polish(jax.random.key(1), fit, x, num_steps=300, num_draws=10_000),
    )


@functools.lru_cache
def polished_overlap():
    return fit_and_polish(1.5, 3)


def test_polish_raises_e1_where_components_overlap():
    _, fit, polished = polished_overlap()
    se = np.hypot(fit.bound.se, polished.elbo.se)
    assert polished.elbo.value > fit.bound.value + 5 * se
    # The part in two: what the polish reports is what its guide has.
    assert polished.elbo.value == pytest.approx(
        0.5 * polished.elbo.expected_log_lik - polished.elbo.kl, abs=1e-3
    )
    assert polished.alpha == 0.5


@pytest.mark.slow
def test_polish_changes_nothing_where_components_are_apart():
    _, fit, polished = fit_and_polish(12.0, 2)
    se = np.hypot(fit.bound.se, polished.elbo.se)
    assert abs(polished.elbo.value - fit.bound.value) < 5 * se
    for name, value in polished.params.items():
        at_fit = 0.0 if name.endswith("_shift") else 1.0
        np.testing.assert_allclose(value, at_fit, atol=0.1, err_msg=name)


def test_a_mixture_is_compared_with_other_fits():
    x, fit, polished = polished_overlap()
    plain = fit.on(x, rng_key=jax.random.key(2))
    assert plain.elbo.value == fit.bound.value
    assert 0.5 * plain.elbo.expected_log_lik - plain.elbo.kl == pytest.approx(
        plain.elbo.value, abs=1e-4
    )
    data = nt.compare({"cavi": plain, "polished": polished}, num_samples=50)
    table = nt.table(data)
    assert table.index[0] == "polished"
    assert data["posterior"]["weights"].shape == (1, 50, 3)


def test_polish_refuses_a_factor_that_it_cannot_move(x64):
    fit = fit_of("known_variance")

    def draw(sample, q):
        loc = sample("loc", numpyro.distributions.StudentT(3.0, q.loc, q.scale))
        return {"loc": loc, "scale": q.noise}

    def draw_uniform(sample, q):
        return {
            "loc": sample("loc", numpyro.distributions.Uniform(q.loc - 1, q.loc + 1)),
            "scale": q.noise,
        }

    spreads = {"weights": 1.0, "loc": 1.0}
    able = fit._replace(component=fit.component._replace(draw=draw))
    assert "loc_df_factor" in trace_of(adjustable_guide(able, spreads))
    unable = fit._replace(component=fit.component._replace(draw=draw_uniform))
    with pytest.raises(TypeError, match="neither real nor positive"):
        trace_of(adjustable_guide(unable, spreads))
