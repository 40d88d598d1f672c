"""Weights of a truncated Dirichlet process: formulas by scipy, ascents by numpy, and what every fit offers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import mixture_oracles as oracle
import numpy as np
import numpyro
import pytest
from conftest import enable_x64, tiered
from mixture_families import FAMILIES, component_of, some_data
from numpyro.infer import MCMC, NUTS, Trace_ELBO
from scipy import stats
from scipy.special import betaln, digamma, logsumexp
from sklearn.datasets import load_iris
from sklearn.mixture import BayesianGaussianMixture

import numpyro_tempered as nt
from numpyro_tempered.mixtures import sweep, weights
from numpyro_tempered.report.arviz import group

NAME = "known_variance"
FAMILY = FAMILIES[NAME].oracle
# Another number of components, start or alpha is the same program.
OPTIONS = {"num_restarts": 1, "num_draws": 0, "tolerance": 1e-15, "max_iter": 5000}


def evidence(n, gamma):
    """The log evidence of labels with these counts in their order, the last stick 1."""
    tails = np.append(np.cumsum(n[::-1])[::-1], 0.0)
    return sum(
        betaln(1 + n[k], gamma + tails[k + 1]) - betaln(1, gamma)
        for k in range(len(n) - 1)
    )


def sticks_of(n, gamma):
    """The Betas of the sticks but the last."""
    return 1 + n[:-1], gamma + np.cumsum(n[::-1])[::-1][1:]


def expected_log_weights(n, gamma):
    """E log p, stick by stick."""
    a, b = sticks_of(n, gamma)
    values = []
    for k in range(len(n)):
        before = sum(digamma(b[j]) - digamma(a[j] + b[j]) for j in range(k))
        values.append(
            before + (digamma(a[k]) - digamma(a[k] + b[k]) if k < len(a) else 0.0)
        )
    return np.array(values)


def sticks_kl(n, gamma):
    """KL of the factor to the prior, from the densities' normalisers and the expected logs."""
    a, b = sticks_of(n, gamma)
    log_v, log_rest = digamma(a) - digamma(a + b), digamma(b) - digamma(a + b)
    return np.sum(
        (a - 1) * log_v + (b - gamma) * log_rest - betaln(a, b) + betaln(1, gamma)
    )


def cavi(x, omega, alpha, gamma, num_iter=400):
    """F, counts and E log p of an ascent whose components are in the best of all orders at each step."""
    for _ in range(num_iter):
        n = alpha * omega.sum(axis=0)
        order = list(
            max(
                itertools.permutations(range(len(n))),
                key=lambda p: evidence(n[list(p)], gamma),
            )
        )
        omega, n = omega[:, order], n[order]
        qs = oracle.posteriors(FAMILY, x, alpha * omega)
        log_p = expected_log_weights(n, gamma)
        joint = np.array(
            [
                [w + FAMILY.expected(q, row) for w, q in zip(log_p, qs, strict=True)]
                for row in x
            ]
        )
        omega = np.exp(joint - logsumexp(joint, axis=1, keepdims=True))
    value = (
        alpha * logsumexp(joint, axis=1).sum()
        - sticks_kl(n, gamma)
        - sum(FAMILY.kl(q) for q in qs)
    )
    return value, omega.sum(axis=0), log_p


def start_of(num_components, n=12):
    return np.random.default_rng(3).dirichlet(np.ones(num_components), size=n)


def fit_of(num_components, concentration, alpha=1.0, **options):
    options = {
        "init": nt.mixtures.starts.given_responsibilities(start_of(num_components)),
        **OPTIONS,
        **options,
    }
    with enable_x64():
        return nt.mixtures.fit(
            jax.random.key(0),
            some_data(NAME),
            component_of(NAME),
            num_components=num_components,
            concentration=concentration,
            alpha=alpha,
            **options,
        )


@functools.lru_cache
def small_fit():
    """Three components with E1."""
    return fit_of(3, nt.mixtures.stick_breaking(0.8), alpha=0.7, num_draws=400)


def filled(values, size):
    return np.pad(values, [(0, size - len(values)), (0, 0)])


@pytest.mark.parametrize("size", [4, 7])
@pytest.mark.parametrize("gamma", [0.3, 4.0])
def test_formulas_are_those_of_scipy(size, gamma, x64):
    n = np.array([11.0, 3.5, 0.0, 2.0])
    prior = filled(weights.prior_of(nt.mixtures.stick_breaking(gamma), 4), size)
    factor = weights.update(prior, np.pad(n, (0, size - 4)))
    np.testing.assert_array_equal(weights.counts_of(factor, prior)[:4], n)
    assert np.asarray(weights.active(factor)).tolist() == [True] * 4 + [False] * (
        size - 4
    )
    log_p = np.asarray(jax.jit(weights.expected_log)(jnp.asarray(factor)))
    np.testing.assert_allclose(log_p[:4], expected_log_weights(n, gamma), rtol=1e-12)
    assert np.all(log_p[4:] == -np.inf)
    kl = float(jax.jit(weights.kl)(jnp.asarray(factor), jnp.asarray(prior)))
    assert kl == pytest.approx(sticks_kl(n, gamma), rel=1e-12)
    a, b = sticks_of(n, gamma)
    pairs = zip(a, b, strict=True)
    assert kl == pytest.approx(
        sum(
            oracle.density_kl(stats.beta(*pair), stats.beta(1, gamma)) for pair in pairs
        ),
        rel=1e-6,
    )
    rest = np.append(1.0, np.cumprod(b / (a + b)))
    means = np.append(a / (a + b), 1.0) * rest
    np.testing.assert_allclose(weights.mean(factor[:4]), means, rtol=1e-13)
    np.testing.assert_allclose(
        np.exp(weights.log_mean(jnp.asarray(factor[:4]))), means, rtol=1e-12
    )


def test_draws_have_the_moments_of_sticks():
    n, gamma, size = np.array([4.0, 2.5, 0.0]), 0.6, 20000
    factor = filled(
        weights.update(weights.prior_of(nt.mixtures.stick_breaking(gamma), 3), n), 5
    )
    rng = np.random.default_rng(0)
    log_gamma = np.log(rng.gamma(np.where(factor > 0, factor, 1.0), size=(size, 5, 2)))
    log_p = weights.log_weights(log_gamma, factor)
    assert np.all(log_p[:, 3:] == -np.inf)
    np.testing.assert_allclose(np.exp(log_p).sum(axis=1), 1.0, rtol=1e-12)
    se = log_p[:, :3].std(axis=0) / np.sqrt(size)
    assert np.all(
        np.abs(log_p[:, :3].mean(axis=0) - expected_log_weights(n, gamma)) < 5 * se
    )
    on_device = weights.log_weights(
        jnp.asarray(log_gamma[:7], jnp.float32), jnp.asarray(factor, jnp.float32)
    )
    np.testing.assert_allclose(on_device, log_p[:7], rtol=1e-4, atol=1e-5)


order_of = jax.jit(weights.best_order)


@pytest.mark.parametrize("gamma", [0.2, 1.0, 3.0, 20.0])
def test_order_is_the_best_of_all(gamma, x64):
    rng = np.random.default_rng(0)
    # Sizes, ties and empty components.
    cases = [rng.gamma(0.5, scale, 5) for scale in (1.0, 30.0, 30.0, 1000.0)]
    cases += [np.array([0.0, 0.0, 7.0, 0.0, 2.0]), np.ones(5), np.zeros(5)]
    prior = filled(weights.prior_of(nt.mixtures.stick_breaking(gamma), 5), 8)
    for n in cases:
        order = np.asarray(order_of(jnp.asarray(prior), jnp.asarray(np.pad(n, (0, 3)))))
        assert order[5:].tolist() == [5, 6, 7]
        assert sorted(order[:5].tolist()) == [0, 1, 2, 3, 4]
        best = max(
            evidence(n[list(p)], gamma) for p in itertools.permutations(range(5))
        )
        assert evidence(n[order[:5]], gamma) == pytest.approx(best, abs=1e-9)
        if gamma <= 1:
            assert np.all(np.diff(n[order[:5]]) <= 0)


@pytest.mark.parametrize("size", [1, 2])
def test_order_of_few(size, x64):
    prior = filled(weights.prior_of(nt.mixtures.stick_breaking(5.0), size), 3)
    n = np.array([4.0, 1.0, 0.0]) * (np.arange(3) < size)
    order = np.asarray(order_of(jnp.asarray(prior), jnp.asarray(n)))
    # For gamma above 1 the second of two has more of the prior.
    assert order.tolist() == ([0, 1, 2] if size == 1 else [1, 0, 2])
    assert weights.best_order(jnp.ones(3), jnp.asarray(n)) is None


@pytest.mark.parametrize(
    ("size", "gamma", "alpha"),
    tiered(itertools.product([3, 5], [0.7, 4.0], [0.5, 1.0]), unit=[(3, 4.0, 1.0)]),
)
def test_objective_is_that_of_numpy(size, gamma, alpha):
    fit = fit_of(size, nt.mixtures.stick_breaking(gamma), alpha=alpha)
    value, counts, log_p = cavi(some_data(NAME), start_of(size), alpha, gamma)
    assert fit.objective == pytest.approx(value, rel=1e-10)
    np.testing.assert_allclose(fit.counts, counts, rtol=1e-4, atol=1e-6)
    with enable_x64():
        np.testing.assert_allclose(
            weights.expected_log(fit.factors.concentration), log_p, rtol=1e-4
        )
    assert np.all(np.diff(fit.trace) > -1e-9)
    assert fit.factors.concentration.shape == (size, 2)
    assert fit.factors.concentration[-1, 1] == 0


@pytest.mark.full
@pytest.mark.parametrize("size", [3, 5])
def test_what_fills_up_changes_nothing(size, monkeypatch):
    some = {
        "alpha": 0.7,
        "num_draws": 20,
        "num_restarts": 3,
        "init": None,
        "tolerance": 1e-12,
    }
    fill = fit_of(size, nt.mixtures.stick_breaking(0.7), **some)
    monkeypatch.setattr(sweep, "FEW_ROWS", 0)
    exact = fit_of(size, nt.mixtures.stick_breaking(0.7), **some)
    assert fill.objective == pytest.approx(exact.objective, rel=1e-12)
    assert fill.bound.value == pytest.approx(exact.bound.value, rel=1e-11)
    np.testing.assert_allclose(
        fill.factors.concentration, exact.factors.concentration, rtol=1e-6
    )


@pytest.mark.full
def test_two_sticks_of_one_are_a_flat_dirichlet():
    sticks, flat = (
        fit_of(2, prior, alpha=0.5) for prior in (nt.mixtures.stick_breaking(1.0), 1.0)
    )
    assert sticks.objective == pytest.approx(flat.objective, rel=1e-12)
    np.testing.assert_allclose(sticks.counts, np.sort(flat.counts)[::-1], rtol=1e-9)


@pytest.mark.full
def test_one_component_has_no_stick():
    sticks, flat = (
        fit_of(1, prior, num_draws=20)
        for prior in (nt.mixtures.stick_breaking(3.0), 1.0)
    )
    assert sticks.objective == pytest.approx(flat.objective, rel=1e-13)
    assert sticks.bound.value == pytest.approx(flat.bound.value, rel=1e-13)


@pytest.mark.parametrize("size", [1, 2])
def test_the_sites_of_weights_are_one_stick_less(size):
    with numpyro.handlers.seed(rng_seed=0), numpyro.handlers.trace() as trace:
        drawn = weights.draw(numpyro.sample, jnp.ones((size, 2)))
    sticks = [
        site["value"].shape for site in trace.values() if site["type"] == "sample"
    ]
    assert sticks == [(size - 1,)] * (size > 1)
    assert (drawn.shape, float(drawn.sum())) == ((size,), pytest.approx(1.0))


def test_bound_is_that_of_many_draws():
    fit, x, size = small_fit(), some_data(NAME), 20000
    rng = np.random.default_rng(1)
    a, b = np.asarray(fit.factors.concentration)[:-1].T
    v = np.concatenate([rng.beta(a, b, size=(size, 2)), np.ones((size, 1))], axis=1)
    p = v * np.concatenate(
        [np.ones((size, 1)), np.cumprod(1 - v[:, :-1], axis=1)], axis=1
    )
    loc, scale = fit.posterior.loc, np.asarray(fit.posterior.scale)
    means = rng.normal(loc, scale, size=(size, *loc.shape))
    log_q = stats.norm.logpdf(x[:, None], means[:, None], FAMILY.noise).sum(axis=-1)
    log_lik = logsumexp(log_q + np.log(p)[:, None], axis=2).sum(axis=1)
    kl = sticks_kl(0.7 * fit.counts, 0.8) + sum(
        FAMILY.kl(list(zip(m, s, strict=True))) for m, s in zip(loc, scale, strict=True)
    )
    value, se = 0.7 * log_lik.mean() - kl, 0.7 * log_lik.std() / np.sqrt(size)
    assert fit.kl == pytest.approx(kl, rel=1e-6)
    assert fit.bound.value > fit.objective
    assert abs(fit.bound.value - value) < 5 * np.hypot(se, fit.bound.se)


def test_refusals_say_what_to_do():
    for gamma, error in (
        (0.0, ValueError),
        (-1.0, ValueError),
        (np.nan, ValueError),
        (np.inf, ValueError),
    ):
        with pytest.raises(error, match="gamma must be positive and finite"):
            nt.mixtures.stick_breaking(gamma)
    with pytest.raises(ValueError, match=r"gamma must be one number, got shape \(2,\)"):
        nt.mixtures.stick_breaking(np.ones(2))
    with pytest.raises(TypeError, match="gamma must be a number"):
        nt.mixtures.stick_breaking("many")
    with pytest.raises(
        TypeError,
        match=r"^concentration is.*a prior such as nt.mixtures.stick_breaking\(1.0\)",
    ):
        fit_of(2, nt.mixtures.stick_breaking)
    with pytest.raises(ValueError, match=r"gamma must be positive.*and finite, got"):
        fit_of(2, weights.StickBreaking(-1.0))
    fit = small_fit()
    assert nt.mixtures.relabel(fit) is not None
    assert nt.mixtures.relabel(fit, [0, 1, 2]).objective == fit.objective
    with pytest.raises(
        ValueError,
        match=r"^order is.*sticks in another order are another prior.*order is needed",
    ):
        nt.mixtures.relabel(fit, [2, 1, 0])
    sticks = nt.mixtures.stick_breaking(1.0)
    for search in (nt.mixtures.select_num_components, nt.mixtures.num_components_path):
        with pytest.raises(ValueError, match="leave label_multiplicity out"):
            search(
                jax.random.key(0),
                some_data(NAME),
                component_of(NAME),
                concentration=sticks,
                label_multiplicity=True,
            )


def test_labels_of_a_start_are_put_in_order():
    x = np.concatenate(
        [np.full((2, 2), -4.0), np.full((10, 2), 4.0)]
    ) + 0.1 * some_data(NAME)
    labels = np.repeat([0, 1], [2, 10])
    with enable_x64():
        fit = nt.mixtures.fit(
            jax.random.key(0),
            x,
            component_of(NAME),
            num_components=2,
            concentration=nt.mixtures.stick_breaking(0.5),
            init=nt.mixtures.starts.given_responsibilities(labels),
            **OPTIONS,
        )
        np.testing.assert_allclose(fit.counts, [10, 2], atol=1e-3)
        assert nt.mixtures.predict(fit, x).tolist() == (1 - labels).tolist()


@pytest.mark.full
def test_more_components_cost_the_stick_that_is_let_go():
    gamma = 0.6
    fits = {2: fit_of(2, nt.mixtures.stick_breaking(gamma))}
    for k in (3, 4):
        fits[k] = fit_of(k, nt.mixtures.stick_breaking(gamma), init=fits[k - 1])
        cost = np.log(gamma) + betaln(1 + fits[k - 1].counts[-1], gamma)
        assert fits[k].objective >= fits[k - 1].objective + cost - 1e-9


@pytest.mark.full
def test_fits_of_the_other_weights_are_starts():
    sticks = nt.mixtures.stick_breaking(0.8)
    flat = fit_of(3, 1.0)
    for given, prior in ((flat, sticks), (fit_of(3, sticks), 1.0)):
        for size in (3, 4):
            fit = fit_of(size, prior, init=given)
            assert fit.trace[0] > given.objective - 10
            assert np.isfinite(fit.objective)
            assert fit.factors.concentration.ndim == (2 if prior is sticks else 1)
    # The first pass is at the factors that its counts give.
    with pytest.warns(UserWarning, match="has not converged in max_iter=1"):
        warm = fit_of(3, sticks, init=flat, max_iter=1)
    np.testing.assert_allclose(
        warm.factors.concentration[:, 0], 1.0 + flat.counts, rtol=1e-6
    )


@pytest.mark.full
def test_predictions_and_draws(x64):
    fit, x = small_fit(), some_data(NAME)
    means = weights.mean(fit.factors.concentration)
    mixture = [
        np.log(w)
        + np.array([FAMILY.predictive(list(zip(m, s, strict=True)), row) for row in x])
        for w, m, s in zip(
            means, fit.posterior.loc, np.asarray(fit.posterior.scale), strict=True
        )
    ]
    np.testing.assert_allclose(
        nt.mixtures.log_predictive(fit, x), logsumexp(mixture, axis=0), rtol=1e-10
    )
    np.testing.assert_allclose(
        np.sum(nt.mixtures.responsibilities(fit, x), axis=0), fit.counts, rtol=1e-6
    )
    draws = nt.mixtures.sample_posterior(jax.random.key(1), fit, 4000)["weights"]
    np.testing.assert_allclose(draws.sum(axis=1), 1.0, rtol=1e-10)
    assert np.all(
        np.abs(draws.mean(axis=0) - means)
        < 5 * np.asarray(draws.std(axis=0)) / np.sqrt(4000)
    )
    rows, labels = nt.mixtures.sample(jax.random.key(2), fit, 4000)
    assert rows.shape == (4000, 2)
    frequencies = np.bincount(labels, minlength=3) / 4000
    assert np.all(np.abs(frequencies - means) < 5 * np.sqrt(means * (1 - means) / 4000))


@pytest.mark.full
def test_numpyro_model_and_guide_give_the_bound(x64):
    fit, x = small_fit(), some_data(NAME)
    model, guide = (
        nt.temper(nt.mixtures.numpyro_model(fit), fit.alpha),
        nt.mixtures.numpyro_guide(fit),
    )
    losses = jax.jit(
        lambda keys: jax.lax.map(
            lambda key: Trace_ELBO(num_particles=200).loss(key, {}, model, guide, x),
            keys,
        )
    )(jax.random.split(jax.random.key(0), 20))
    se = np.hypot(np.std(losses) / np.sqrt(20), fit.bound.se)
    assert abs(-np.mean(losses) - fit.bound.value) < 5 * se
    own = nt.mixtures.numpyro_model(
        component_of(NAME), 3, concentration=nt.mixtures.stick_breaking(0.8)
    )
    point = {"sticks": np.array([0.3, 0.6]), "loc": np.array(fit.posterior.loc)}
    values = [
        numpyro.infer.util.log_density(each, (x,), {}, point)[0]
        for each in (own, nt.mixtures.numpyro_model(fit))
    ]
    log_p = np.log([0.3, 0.7 * 0.6, 0.7 * 0.4])
    log_q = stats.norm.logpdf(x[:, None], fit.posterior.loc, FAMILY.noise).sum(axis=-1)
    want = (
        stats.beta.logpdf([0.3, 0.6], 1, 0.8).sum()
        + logsumexp(log_q + log_p, axis=1).sum()
    )
    want += stats.norm.logpdf(fit.posterior.loc, FAMILY.m0, FAMILY.v0).sum()
    np.testing.assert_allclose(values, want, rtol=1e-10)


@pytest.mark.slow
def test_polish_raises_the_bound_and_draws_become_arviz(x64):
    fit, x = small_fit(), some_data(NAME)
    polished = nt.mixtures.polish(
        jax.random.key(1), fit, x, num_steps=300, num_draws=2000
    )
    assert polished.elbo.value > fit.objective
    assert polished.elbo.value > fit.bound.value - 3 * np.hypot(
        polished.elbo.se, fit.bound.se
    )
    data = nt.to_inference_data(fit, x, rng_key=jax.random.key(2), num_samples=30)
    posterior = group(data, "posterior")
    assert posterior["weights"].dims == ("chain", "draw", "component")
    assert posterior["sticks"].dims == ("chain", "draw", "stick")
    np.testing.assert_allclose(posterior["weights"].sum("component"), 1.0, rtol=1e-10)
    assert group(data, "variational")["concentration"].dims == ("component", "side")
    one = fit_of(1, nt.mixtures.stick_breaking(1.0))
    alone = group(
        nt.to_inference_data(one, x, rng_key=jax.random.key(2), num_samples=5),
        "posterior",
    )
    assert "sticks" not in alone
    assert np.all(alone["weights"] == 1.0)


@pytest.mark.slow
def test_nuts_agrees_with_the_guide_where_labels_do_not_switch():
    x = np.concatenate([np.linspace(-0.5, 0.5, 30), np.linspace(9.5, 10.5, 10)])
    with enable_x64():
        component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        fit = nt.mixtures.fit(
            jax.random.key(0),
            x,
            component,
            num_components=2,
            concentration=nt.mixtures.stick_breaking(0.5),
        )
        start = {"sticks": np.array([0.75]), "loc": np.array([[0.0], [10.0]])}
        kernel = NUTS(
            nt.mixtures.numpyro_model(fit),
            init_strategy=numpyro.infer.init_to_value(values=start),
        )
        mcmc = MCMC(kernel, num_warmup=300, num_samples=1000, progress_bar=False)
        mcmc.run(jax.random.key(1), x)
        sticks = np.asarray(mcmc.get_samples()["sticks"])[:, 0]
    # Groups this far apart have known labels: the Beta of the counts is exact.
    exact = stats.beta(31, 10.5)
    np.testing.assert_allclose(
        np.asarray(fit.factors.concentration)[0], [31, 10.5], rtol=1e-6
    )
    assert abs(sticks.mean() - exact.mean()) < 6 * exact.std() / np.sqrt(300)
    assert 0.8 < sticks.std() / exact.std() < 1.2


@pytest.mark.full
def test_chunks_batches_and_single_precision():
    x, component, sticks = (
        some_data(NAME),
        component_of(NAME),
        nt.mixtures.stick_breaking(0.7),
    )
    whole = fit_of(3, sticks, alpha=0.5)
    options = {
        "num_components": 3,
        "concentration": sticks,
        "alpha": 0.5,
        "init": None,
        **OPTIONS,
    }
    options["init"] = nt.mixtures.starts.given_responsibilities(start_of(3))
    with enable_x64():
        chunks = nt.mixtures.fit(
            jax.random.key(0), [x[:5], x[5:]], component, **{**options, "num_draws": 2}
        )
        assert chunks.objective == pytest.approx(whole.objective, rel=1e-11)
        rule = nt.mixtures.stochastic(
            component,
            **{
                key: options[key]
                for key in ("num_components", "concentration", "alpha", "init")
            },
            step_size=1.0,
            total=len(x),
        )
        state, step = rule.init(jax.random.key(0), x), jax.jit(rule.update)
        for _ in range(400):
            state, _ = step(state, x)
        factors = rule.factors(state)
        np.testing.assert_allclose(
            factors.concentration, whole.factors.concentration, rtol=1e-5
        )
        options = {
            key: options[key]
            for key in ("num_components", "concentration", "alpha", "init")
        }
        steps = nt.mixtures.fit_stochastic(
            jax.random.key(0),
            [x],
            component,
            **options,
            batch_size=6,
            num_passes=300,
            num_restarts=1,
            num_draws=2,
        )
        assert whole.objective - 1.0 < steps.objective <= whole.objective + 1e-6
    single = nt.mixtures.fit(
        jax.random.key(0), x, component, **options, num_restarts=1, num_draws=0
    )
    assert single.factors.concentration.dtype == np.float32
    assert single.objective == pytest.approx(whole.objective, abs=1e-3)


@pytest.mark.slow
def test_iris_empties_components_and_is_no_worse_than_scikit_learn(x64):
    x = load_iris().data
    start = np.eye(10)[np.random.default_rng(0).integers(10, size=len(x))]

    class Started(BayesianGaussianMixture):
        def _initialize_parameters(self, X, random_state, xp=None):
            self._initialize(X, start)

    model = Started(
        n_components=10,
        weight_concentration_prior=0.5,
        reg_covar=0.0,
        tol=1e-9,
        max_iter=5000,
    ).fit(x)
    theirs = nt.mixtures.from_sklearn(jax.random.key(0), model, x, num_draws=0)
    component = nt.mixtures.components.gaussian(
        4,
        loc=model.mean_prior_,
        mean_precision=1.0,
        df=4.0,
        scale=model.covariance_prior_,
    )
    options = {
        "num_components": 10,
        "concentration": nt.mixtures.stick_breaking(0.5),
        "num_restarts": 1,
    }
    ours = nt.mixtures.fit(
        jax.random.key(0),
        x,
        component,
        init=nt.mixtures.starts.given_responsibilities(start),
        max_iter=5000,
        num_draws=0,
        **options,
    )
    assert ours.objective > theirs.objective - 1e-6
    assert ours.num_occupied < 6
    assert np.all(np.diff(ours.counts[: ours.num_occupied]) <= 0)
    # From their factors the ascent goes on, at the same bound.
    after = nt.mixtures.fit(
        jax.random.key(0),
        x,
        component,
        init=theirs,
        max_iter=5000,
        num_draws=0,
        **options,
    )
    assert after.trace[0] == pytest.approx(theirs.objective, rel=1e-9)
    assert after.objective >= theirs.objective


@pytest.mark.full
def test_selections_and_estimators_take_sticks():
    x, sticks = some_data(NAME), nt.mixtures.stick_breaking(0.5)
    choice = nt.mixtures.select_num_components(
        jax.random.key(0),
        x,
        component_of(NAME),
        num_components=[1, 2, 3],
        concentration=sticks,
        num_restarts=4,
        baselines=False,
    )
    assert choice.selected == 2
    mixture = nt.estimators.TemperedMixture(
        4, component="diag", concentration=sticks, random_state=0, n_init=4
    )
    mixture.fit(np.concatenate([x, x + 0.01]))
    assert mixture.weights_.shape == (4,)
    assert mixture.weights_.sum() == pytest.approx(1.0)
    assert np.isfinite(mixture.score(x))
