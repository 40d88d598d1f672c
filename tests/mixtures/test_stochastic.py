"""Stochastic and streaming steps: exact where theory says so, and close where it says that."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import digamma, logsumexp, softmax

from numpyro_tempered.mixtures.components.diagonal_gaussian import diagonal_gaussian
from numpyro_tempered.mixtures.components.gaussian import gaussian
from numpyro_tempered.mixtures.components.known_variance import known_variance
from numpyro_tempered.mixtures.components.multinomial import multinomial
from numpyro_tempered.mixtures.coordinate_ascent import fit
from numpyro_tempered.mixtures.fit_stochastic import check_end, fit_stochastic
from numpyro_tempered.mixtures.starts import given_responsibilities
from numpyro_tempered.mixtures.stochastic import robbins_monro, stochastic

COMPONENT = known_variance(2, prior_loc=1.0, prior_scale=10.0)
ALPHA = 0.5


def data():
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [rng.normal(size=(192, 2)), rng.normal(size=(128, 2)) + np.array([4.0, 2.0])]
    )
    return rng.permutation(x)


X = data()
BATCHES = X.reshape(10, 32, 2)


def cavi(responsibilities, num_iter):
    """CA18's Algorithm 1 for unit variances, written out: means, their scales and the Dirichlet."""
    omega = responsibilities
    for _ in range(num_iter):
        counts = omega.sum(axis=0)
        concentration = 1.0 + ALPHA * counts
        precision = 1 / 10.0**2 + ALPHA * counts
        loc = (1.0 / 10.0**2 + ALPHA * omega.T @ X) / precision[:, None]
        distance = np.square(X[:, None, :] - loc).sum(axis=-1) + 2 / precision
        omega = softmax(digamma(concentration) - 0.5 * distance, axis=1)
    return concentration, loc, 1 / np.sqrt(precision)


def assert_factors(factors, concentration, loc, scale):
    np.testing.assert_allclose(factors.concentration, concentration, rtol=1e-10)
    np.testing.assert_allclose(factors.posterior.loc, loc, rtol=1e-9)
    np.testing.assert_allclose(
        factors.posterior.scale, np.broadcast_to(scale[:, None], (2, 2)), rtol=1e-10
    )


@pytest.mark.full
@pytest.mark.parametrize("centre", [None, [2.0, -7.0]])
def test_step_one_with_all_data_is_an_iteration_of_coordinate_ascent(centre, key, x64):
    labels = (X[:, 0] > 1.0) * 1
    rule = stochastic(
        COMPONENT,
        num_components=2,
        alpha=ALPHA,
        step_size=1.0,
        total=len(X),
        centre=centre,
        init=given_responsibilities(labels),
    )
    state = rule.init(key, X)
    for num_iter in range(1, 4):
        assert_factors(rule.factors(state), *cavi(np.eye(2)[labels], num_iter))
        state, _ = rule.update(state, X)
    assert int(state.num_steps) == 3


@pytest.mark.full
@pytest.mark.parametrize("family", [diagonal_gaussian, gaussian])
def test_the_posterior_as_prior_is_exact_for_one_component(family, key, x64):
    component = family(2)
    rule = stochastic(component, num_components=1, alpha=ALPHA)
    state = rule.init(key, X[:3])
    # Batches of different sizes, weights, and one without a row that counts.
    for start, stop in ((0, 1), (1, 100), (100, 320)):
        state, _ = rule.update(state, X[start:stop], jnp.full(stop - start, 2.0))
    state, _ = rule.update(state, X[:1], jnp.zeros(1))
    statistics = component.statistics(jnp.asarray(X).T)
    n = 2.0 * ALPHA
    expected = component.update(
        component.prior, jnp.array([n * len(X)]), n * statistics.sum(axis=1)[None]
    )
    factors = rule.factors(state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10),
        factors.posterior,
        expected,
    )
    np.testing.assert_allclose(factors.concentration, [1.0 + n * len(X)], rtol=1e-12)
    assert (
        float(state.total_weight.value),
        int(state.num_steps),
        int(state.rejected),
    ) == (2.0 * len(X), 3, 0)


@pytest.mark.full
def test_streaming_adds_the_sums_of_batches_to_the_posterior_so_far(key, x64):
    # The posterior after a batch is the prior of the next: a second code of two steps.
    rule = stochastic(COMPONENT, num_components=2, alpha=ALPHA)
    state, _ = rule.update(rule.init(key, BATCHES[0]), BATCHES[0])
    before = rule.factors(state)
    after = rule.factors(rule.update(state, BATCHES[1])[0])
    distance = np.square(BATCHES[1][:, None, :] - before.posterior.loc).sum(axis=-1)
    distance = distance + np.square(before.posterior.scale).sum(axis=-1)
    omega = softmax(digamma(before.concentration) - 0.5 * distance, axis=1)
    counts = ALPHA * omega.sum(axis=0)
    np.testing.assert_allclose(
        after.concentration, before.concentration + counts, rtol=1e-10
    )
    old = 1 / np.square(before.posterior.scale)
    precision = old + counts[:, None]
    np.testing.assert_allclose(
        1 / np.square(after.posterior.scale), precision, rtol=1e-10
    )
    loc = (old * before.posterior.loc + ALPHA * omega.T @ BATCHES[1]) / precision
    np.testing.assert_allclose(after.posterior.loc, loc, rtol=1e-10)


@pytest.mark.full
def test_a_step_is_an_average_of_natural_parameters(key, x64):
    # Hoffman et al., equation 15: (1 - rho) lambda + rho lambda-hat.
    options = {"num_components": 2, "alpha": ALPHA, "total": 1000.0}
    partial, full = (
        stochastic(COMPONENT, step_size=rho, **options) for rho in (0.3, 1.0)
    )
    state = partial.init(key, BATCHES[0])

    def natural(factors):
        precision = 1 / np.square(factors.posterior.scale)
        return (
            np.asarray(factors.concentration),
            precision,
            precision * factors.posterior.loc,
        )

    start, end = (
        natural(partial.factors(state)),
        natural(full.factors(full.update(state, BATCHES[1])[0])),
    )
    between = natural(partial.factors(partial.update(state, BATCHES[1])[0]))
    for a, b, c in zip(start, between, end, strict=True):
        np.testing.assert_allclose(b, 0.7 * a + 0.3 * c, rtol=1e-10)


@pytest.mark.full
def test_inner_repetitions_converge_on_the_batch(key, x64):
    # All data in one batch: ten repetitions are ten iterations.
    labels = (X[:, 0] > 1.0) * 1
    options = {"num_components": 2, "alpha": ALPHA, "step_size": 1.0, "total": len(X)}
    rule = stochastic(
        COMPONENT, num_inner=10, init=given_responsibilities(labels), **options
    )
    state, _ = rule.update(rule.init(key, X), X)
    assert_factors(rule.factors(state), *cavi(np.eye(2)[labels], 11))


@pytest.mark.full
def test_the_log_density_is_the_bound_of_the_responsibilities(key, x64):
    rule = stochastic(COMPONENT, num_components=2, alpha=ALPHA, centre=[3.0, 3.0])
    state, _ = rule.update(rule.init(key, BATCHES[0]), BATCHES[0])
    weight = np.arange(32.0)
    factors = rule.factors(state)
    distance = np.square(BATCHES[1][:, None, :] - factors.posterior.loc).sum(axis=-1)
    distance = distance + np.square(factors.posterior.scale).sum(axis=-1)
    expected = digamma(factors.concentration) - digamma(factors.concentration.sum())
    joint = expected - 0.5 * distance - np.log(2 * np.pi)
    value = np.average(logsumexp(joint, axis=1), weights=weight)
    np.testing.assert_allclose(
        rule.log_density(state, BATCHES[1], weight), value, rtol=1e-10
    )
    np.testing.assert_allclose(
        rule.update(state, BATCHES[1], weight)[1], value, rtol=1e-10
    )


@pytest.mark.full
def test_scan_vmap_jit_and_pickle(key):
    rule = stochastic(COMPONENT, num_components=2, alpha=ALPHA)
    state = rule.init(key, BATCHES[0])
    update = jax.jit(rule.update)
    one_by_one = state
    for batch in BATCHES:
        one_by_one, _ = update(one_by_one, batch)
    scanned, log_densities = jax.lax.scan(rule.update, state, jnp.asarray(BATCHES))
    assert log_densities.shape == (10,)
    assert float(log_densities[-1]) > float(log_densities[0])
    mapped = jax.vmap(lambda key: rule.init(key, BATCHES[0]))(jax.random.split(key, 3))
    mapped, _ = jax.vmap(rule.update, in_axes=(0, None))(mapped, BATCHES[1])
    assert mapped.counts.shape == (3, 2)
    restored = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, one_by_one)))
    for other in (scanned, restored):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
            one_by_one._replace(total_weight=one_by_one.total_weight.value),
            other._replace(total_weight=other.total_weight.value),
        )


@pytest.mark.full
def test_what_is_no_batch_is_rejected(key):
    rule = stochastic(COMPONENT, num_components=2)
    state = rule.init(key, BATCHES[0])
    state, _ = rule.update(state, BATCHES[0])
    bad = jnp.asarray(BATCHES[1]).at[3, 0].set(jnp.nan)
    with pytest.raises(
        ValueError, match=r"missing entries \(NaN\): stochastic\(missing=True\)"
    ):
        rule.update(state, bad)
    after, _ = jax.jit(rule.update)(state, bad)
    assert int(after.rejected) == 1
    for old, new in zip(state[:4], after[:4], strict=True):
        jax.tree.map(np.testing.assert_array_equal, old, new)
    # A row that does not count may hold anything in its place.
    empty, _ = rule.update(state, BATCHES[1], jnp.zeros(32))
    jax.tree.map(np.testing.assert_array_equal, empty, state)
    steep = stochastic(COMPONENT, num_components=2, step_size=lambda count: 0.5 * count)
    state = steep.init(key, BATCHES[0])
    for _ in range(4):
        state, _ = steep.update(state, BATCHES[1])
    assert (int(state.num_steps), int(state.rejected)) == (2, 2)


@pytest.mark.full
def test_missing_entries_are_marginalised(key, x64):
    component = diagonal_gaussian(2)
    x = X.copy()
    x[::3, 0], x[5] = np.nan, np.nan
    rule = stochastic(component, num_components=1, alpha=ALPHA, missing=True)
    state = rule.init(key, x)
    for batch in np.split(x, 2):
        state, _ = rule.update(state, batch)
    form = component.with_missing()
    statistics = ALPHA * form.statistics(jnp.asarray(x).T).sum(axis=1)
    expected = form.update(
        component.prior, jnp.array([ALPHA * (len(x) - 1)]), statistics[None]
    )
    factors = rule.factors(state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9),
        factors.posterior,
        expected,
    )
    np.testing.assert_allclose(
        factors.concentration, [1.0 + ALPHA * (len(x) - 1)], rtol=1e-12
    )


def test_step_sizes():
    steps = robbins_monro(0.6, 2.0)
    np.testing.assert_allclose(
        [steps(t) for t in (1, 2, 10)], [3**-0.6, 4**-0.6, 12**-0.6]
    )
    assert pickle.loads(pickle.dumps(steps)) == steps
    of_kappa, of_tau = (
        r"kappa must be in \(0.5, 1\], got",
        "tau must be at least 0 and finite, got -1.0",
    )
    for kappa, tau, message in (
        (0.5, 1.0, of_kappa),
        (1.1, 1.0, of_kappa),
        (0.7, -1.0, of_tau),
        (np.nan, 1.0, of_kappa),
    ):
        with pytest.raises(ValueError, match=message):
            robbins_monro(kappa, tau)


def test_wrong_arguments_are_named(key):
    wrong = [
        (
            {"step_size": 0.0},
            ValueError,
            r"step_size must be in \(0, 1\], got 0.*the step, or None",
        ),
        (
            {"step_size": "fast"},
            TypeError,
            r"step_size must be a number, got 'fast'\. Give a number in \(0, 1\]",
        ),
        ({"total": -1.0}, ValueError, "total must be positive and finite"),
        ({"alpha": 0.0}, ValueError, r"alpha must be positive.*and finite, got"),
        ({"num_inner": 0}, ValueError, "num_inner must be an integer of at least 1"),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            stochastic(COMPONENT, num_components=2, **options)
    with pytest.raises(
        ValueError, match="multinomial does not marginalise missing entries"
    ):
        stochastic(multinomial(2), num_components=2, missing=True)
    with pytest.raises(
        ValueError,
        match=r"sample_weight has shape \(3,\); expected \(32,\).*for each row",
    ):
        stochastic(COMPONENT, num_components=2).init(key, BATCHES[0], np.ones(3))
    with pytest.raises(
        TypeError, match=r"step_size is None, which is for streams.*or a function"
    ):
        fit_stochastic(key, [X], COMPONENT, num_components=2, step_size=None)


OPTIONS = {"num_components": 2, "alpha": ALPHA, "num_restarts": 2, "num_draws": 4}


@pytest.mark.full
def test_the_driver_reports_the_objective_of_its_factors(key, x64):
    result = fit_stochastic(
        key, [X[:100], X[100:]], COMPONENT, batch_size=32, num_passes=5, **OPTIONS
    )
    optimum = fit(key, X, COMPONENT, tolerance=1e-10, **OPTIONS)
    assert (result.converged, result.num_iter, result.total) == (False, 5, len(X))
    assert len(result.restart_objectives) == 2
    np.testing.assert_allclose(
        result.objective, result.restart_objectives.max(), rtol=1e-10
    )
    # Near the optimum, and never above it.
    assert optimum.objective - 2.0 < result.objective <= optimum.objective + 1e-9
    # One step of size one on all data, from the start that fit has: its second iteration.
    single = fit_stochastic(
        key, [X], COMPONENT, batch_size=320, step_size=1.0, **OPTIONS
    )
    with pytest.warns(UserWarning, match="has not converged"):
        first = fit(key, X, COMPONENT, max_iter=2, tolerance=0.0, **OPTIONS)
    np.testing.assert_allclose(
        np.sort(single.restart_objectives),
        np.sort(first.restart_objectives),
        rtol=1e-10,
    )


def test_the_driver_raises_where_steps_are_rejected():
    check_end(np.zeros(2), np.array([-np.inf, 1.0]))
    with pytest.raises(
        FloatingPointError, match=r"3 batches were rejected.*a number outside of"
    ):
        check_end(np.array([0, 3]), np.ones(2))
    with pytest.raises(
        FloatingPointError,
        match=r"no restart has a finite objective.*or widen the prior",
    ):
        check_end(np.zeros(2), np.full(2, -np.inf))
