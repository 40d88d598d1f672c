"""Batch Gaussian variational inference without NumPyro: steps, flow, stopping rule."""

import functools

import gaussian_vi_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_tempered as nt
from numpyro_tempered.families import FullRank, MeanField
from numpyro_tempered.gaussian_vi.bures_wasserstein import plain_step
from numpyro_tempered.gaussian_vi.minimise import REASONS, _shared_loop

vi = nt.gaussian_vi
METHODS = {
    "natural": vi.natural_gradient(),
    "natural, whole steps": vi.natural_gradient(1.0),
    "whitened": vi.forward_backward(),
    "plain": vi.forward_backward(whiten=False),
}
FAMILIES = {"full": FullRank, "mean-field": MeanField}
PRIOR_SCALE = 2.0
LOGISTIC = nt.expectations.gauss_hermite(lambda u, y: jax.nn.softplus(-y * u), num_nodes=40)


def standard(kind, d, scale=1.0):
    return (
        MeanField(jnp.zeros(d), jnp.full(d, scale))
        if kind == "mean-field"
        else FullRank(jnp.zeros(d), scale * jnp.eye(d))
    )


def covariance_of(q):
    return np.diag(np.square(q.scale)) if isinstance(q, MeanField) else np.asarray(q.factor @ q.factor.T)


@functools.cache
def logistic_data(d):
    rng = np.random.default_rng([7, d])
    x = rng.normal(size=(20 * d, d)) * np.geomspace(1.0, 4.0, d) / np.sqrt(d)
    y = np.where(rng.uniform(size=len(x)) < 1.0 / (1.0 + np.exp(-x @ rng.normal(size=d))), 1.0, -1.0)
    return x, y


@functools.cache
def logistic_best(d, alpha, diagonal=False):
    return oracle.logistic_optimum(*logistic_data(d), alpha, PRIOR_SCALE, diagonal)


def logistic(d, alpha):
    x, y = logistic_data(d)
    return vi.objective(LOGISTIC, standard("mean-field", d, PRIOR_SCALE), x, y, alpha=alpha)


def quadratic(matrix, centre, kind):
    """f(θ) = ½ (θ - c)' A (θ - c), whose target is N(c, A^-1)."""
    matrix, centre = jnp.asarray(matrix), jnp.asarray(centre)

    def derivatives(q, *_):
        shift = q.loc - centre
        own = jnp.diagonal(matrix) if kind == "mean-field" else matrix
        spread = (
            jnp.sum(own * jnp.square(q.scale))
            if kind == "mean-field"
            else jnp.sum(q.factor * (matrix @ q.factor))
        )
        return vi.Derivatives(0.5 * (shift @ matrix @ shift + spread), matrix @ shift, own)

    return derivatives


def random_precision(d, seed, low=0.3, high=4.0):
    rng = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(rng.normal(size=(d, d)))
    return (vectors * np.geomspace(low, high, d)) @ vectors.T


@pytest.mark.usefixtures("x64")
class TestExact:
    @pytest.mark.parametrize("alpha", [0.3, 1.0])
    @pytest.mark.parametrize("kind", FAMILIES)
    def test_one_natural_step_solves_a_conjugate_model(self, kind, alpha):
        rng = np.random.default_rng(3)
        x, y = rng.normal(size=(30, 4)), rng.normal(size=30)
        if kind == "mean-field":  # exact where the columns are orthogonal
            x = np.linalg.qr(x)[0]
        noise = 0.7
        # squared() is (xθ - y)²
        f = vi.objective(nt.expectations.squared(), standard(kind, 4, 1.5), x, y, alpha=alpha / (2.0 * noise**2))
        result = vi.minimise(
            f, standard(kind, 4, 0.2), method=vi.natural_gradient(1.0), tolerance=1e-20, max_evaluations=2
        )
        loc, covariance = oracle.posterior(x, y, alpha, 1.5, noise)
        np.testing.assert_allclose(result.posterior.loc, loc, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(covariance_of(result.posterior), covariance, rtol=1e-12, atol=1e-12)
        assert int(result.num_evaluations) == 2
        assert float(result.stationarity) < 1e-20

    @pytest.mark.parametrize("kind", FAMILIES)
    @pytest.mark.parametrize("seed", range(3))
    def test_the_flow_contracts(self, kind, seed):
        matrix = random_precision(3, seed)
        if kind == "mean-field":
            matrix = np.diag(np.diag(matrix))
        a = np.linalg.eigvalsh(matrix)[0]
        centre = np.array([1.0, -2.0, 0.5])
        target = np.linalg.inv(matrix)
        start = FullRank(jnp.zeros(3), jnp.linalg.cholesky(jnp.asarray(random_precision(3, seed + 50))))
        if kind == "mean-field":
            start = MeanField(jnp.zeros(3), jnp.array([0.2, 1.0, 3.0]))
        times = jnp.linspace(0.0, 3.0, 7)
        path = vi.flow(quadratic(matrix, centre, kind), start, times)
        squared = [
            oracle.wasserstein(q.loc, covariance_of(q), centre, target) ** 2
            for q in (jax.tree.map(lambda leaf, i=i: leaf[i], path) for i in range(len(times)))
        ]
        bound = np.exp(-2.0 * a * np.asarray(times)) * squared[0]
        assert np.all(squared <= bound * (1.0 + 1e-3))
        # It moves at all, and the bound is not idle.
        assert squared[-1] < 0.2 * squared[0]

    @pytest.mark.parametrize("kind", FAMILIES)
    def test_the_flow_of_an_isotropic_target_contracts_at_the_rate(self, kind):
        a, start = 0.8, standard(kind, 2, 3.0)
        times = jnp.linspace(0.0, 2.0, 5)
        path = vi.flow(quadratic(a * np.eye(2), np.array([1.0, 2.0]), kind), start, times)
        target = standard(kind, 2, a**-0.5)._replace(loc=jnp.array([1.0, 2.0]))
        distances = jax.vmap(lambda q: vi.wasserstein(q, target))(path)
        # The variance of a Gaussian flow relaxes as e^{-2at} towards 1/a, its mean as e^{-at}.
        scale = np.sqrt(1.0 / a + (9.0 - 1.0 / a) * np.exp(-2.0 * a * np.asarray(times)))
        found = path.scale[:, 0] if kind == "mean-field" else path.factor[:, 0, 0]
        np.testing.assert_allclose(found, scale, rtol=1e-9)
        exact = 5.0 * np.exp(-2.0 * a * times) + 2.0 * (scale - a**-0.5) ** 2
        np.testing.assert_allclose(np.square(distances), exact, rtol=1e-8)
        # Means alone contract at exactly the rate of the theorem.
        means = vi.flow(quadratic(a * np.eye(2), np.ones(2), kind), standard(kind, 2, a**-0.5), times)
        target = target._replace(loc=jnp.ones(2))
        gone = jax.vmap(lambda q: vi.wasserstein(q, target))(means)
        np.testing.assert_allclose(np.square(gone), 2.0 * np.exp(-2.0 * a * times), rtol=1e-9)

    @pytest.mark.full
    def test_small_forward_backward_steps_follow_the_flow(self):
        derivatives = quadratic(random_precision(2, 1), np.ones(2), "full")
        q = end = standard("full", 2, 2.0)
        path = vi.flow(derivatives, q, jnp.array([0.0, 0.5]))
        for _ in range(2000):
            end = plain_step(end, derivatives(end), 0.5 / 2000)
        np.testing.assert_allclose(end.loc, path.loc[1], atol=1e-3)
        np.testing.assert_allclose(covariance_of(end), path.factor[1] @ path.factor[1].T, atol=2e-3)

    @pytest.mark.parametrize("kind", FAMILIES)
    @pytest.mark.parametrize("step", [1.2, 1.5, 1.8])
    def test_a_raw_step_above_the_limit_finds_a_wrong_variance(self, kind, step):
        derivatives = quadratic(np.eye(1), np.zeros(1), kind)
        q = standard(kind, 1, 1.0)
        for _ in range(3000):
            q = plain_step(q, derivatives(q), step)
        np.testing.assert_allclose(covariance_of(q), [[step / (2.0 - step)]], rtol=1e-8)

    @pytest.mark.parametrize("kind", FAMILIES)
    @pytest.mark.parametrize("step", [0.3, 0.9, 1.0])
    def test_a_raw_step_below_the_limit_finds_the_right_variance(self, kind, step):
        derivatives = quadratic(np.eye(1), np.zeros(1), kind)
        q = standard(kind, 1, 4.0)
        for _ in range(300):
            q = plain_step(q, derivatives(q), step)
        np.testing.assert_allclose(covariance_of(q), [[1.0]], rtol=1e-10)

    @pytest.mark.parametrize("whiten", [pytest.param(True, marks=pytest.mark.full), False])
    def test_a_step_above_the_limit_is_refused(self, whiten):
        f = logistic(2, 1.0)
        with pytest.raises(ValueError, match="above 1/L"):
            vi.minimise(f, standard("full", 2), method=vi.forward_backward(50.0, whiten=whiten))
        largest = np.linalg.eigvalsh(f(standard("full", 2)).hessian)[-1]
        fine = vi.minimise(
            f, standard("full", 2), method=vi.forward_backward(0.2 / largest, whiten=False), max_evaluations=2000
        )
        assert bool(fine.converged)

    @pytest.mark.parametrize("alpha", [0.5, pytest.param(1.0, marks=pytest.mark.full)])
    @pytest.mark.parametrize("d", [2, 10, pytest.param(50, marks=pytest.mark.full)])
    def test_all_methods_find_the_optimum_of_the_oracle(self, d, alpha):
        x, y = logistic_data(d)
        loc, covariance, best = logistic_best(d, alpha)
        for name in ("natural", "natural, whole steps", "whitened", "plain"):
            result = vi.minimise(
                logistic(d, alpha), standard("full", d), method=METHODS[name], max_evaluations=3000
            )
            assert bool(result.converged), name
            q = result.posterior
            own = oracle.logistic_elbo(x, y, alpha, PRIOR_SCALE, np.asarray(q.loc), covariance_of(q))
            assert abs(own - best) < 1e-5, name
            # The objective's own value is that of the oracle at the same Gaussian, every constant included.
            assert abs(float(result.elbo) - own) < 1e-6, name
            np.testing.assert_allclose(q.loc, loc, atol=5e-3 * np.sqrt(np.diag(covariance)).max())

    @pytest.mark.parametrize(
        "name", [n if n == "natural" else pytest.param(n, marks=pytest.mark.full) for n in METHODS]
    )
    def test_the_mean_field_optimum_is_that_of_the_oracle(self, name):
        _, covariance, best = logistic_best(10, 0.5, diagonal=True)
        result = vi.minimise(
            logistic(10, 0.5),
            standard("mean-field", 10),
            method=METHODS[name],
            max_evaluations=3000,
            tolerance=1e-8,
        )
        assert bool(result.converged)
        assert abs(float(result.elbo) - best) < 1e-5
        np.testing.assert_allclose(covariance_of(result.posterior), covariance, atol=1e-4)

    def test_a_mean_field_q_does_not_crawl_where_coordinates_correlate(self):
        rng = np.random.default_rng(4)
        x = rng.normal(size=(200, 1)) + 0.2 * rng.normal(size=(200, 8))
        y = np.where(x @ np.linspace(-1.0, 1.0, 8) + rng.logistic(size=200) > 0, 1.0, -1.0)
        covariance, best = oracle.logistic_optimum(x, y, 0.5, PRIOR_SCALE, diagonal=True)[1:]
        f = vi.objective(LOGISTIC, standard("mean-field", 8, PRIOR_SCALE), x, y, alpha=0.5)
        found = {
            dense: vi.minimise(f, standard("mean-field", 8), method=vi.natural_gradient(dense=dense))
            for dense in (None, False)
        }
        assert abs(float(found[None].elbo) - best) < 1e-5
        np.testing.assert_allclose(covariance_of(found[None].posterior), covariance, atol=2e-3)
        assert bool(found[None].converged)
        assert int(found[None].num_evaluations) < 40
        assert int(found[False].num_evaluations) > 3 * int(found[None].num_evaluations)

    def test_wasserstein_is_that_of_matrix_roots(self):
        rng = np.random.default_rng(5)
        for d in (1, 3, 6):
            roots = [np.tril(rng.normal(size=(d, d))) + 2.0 * np.eye(d) for _ in range(2)]
            m, k = rng.normal(size=(2, d))
            expected = oracle.wasserstein(m, roots[0] @ roots[0].T, k, roots[1] @ roots[1].T)
            q, p = (
                FullRank(jnp.asarray(m), jnp.asarray(roots[0])),
                FullRank(jnp.asarray(k), jnp.asarray(roots[1])),
            )
            np.testing.assert_allclose(vi.wasserstein(q, p), expected, rtol=1e-8)
            np.testing.assert_allclose(vi.wasserstein(p, q), expected, rtol=1e-8)
            assert float(vi.wasserstein(q, q)) < 1e-7

    @settings(max_examples=25, deadline=None)
    @given(seed=st.integers(0, 10_000), kind=st.sampled_from(sorted(FAMILIES)), spread=st.floats(0.1, 3.0))
    def test_the_gap_bound_holds_everywhere(self, seed, kind, spread):
        rng = np.random.default_rng(seed)
        alpha = 0.5
        best = logistic_best(2, alpha, diagonal=kind == "mean-field")[2]
        f = logistic(2, alpha)
        loc = jnp.asarray(rng.normal(size=2) * 2.0)
        if kind == "full":
            q = FullRank(loc, jnp.asarray(np.tril(rng.normal(size=(2, 2)), -1) + spread * np.eye(2)))
        else:
            q = MeanField(loc, spread * jnp.exp(jnp.asarray(rng.normal(size=2))))
        x, y = logistic_data(2)
        gap = best - oracle.logistic_elbo(x, y, alpha, PRIOR_SCALE, np.asarray(loc), covariance_of(q))
        assert float(vi.gap_bound(q, f(q), f.precision)) >= gap - 1e-9
        # A matrix that is the same metric gives the same bound.
        if kind == "full":
            dense = vi.gap_bound(q, f(q), jnp.diag(f.precision))
            np.testing.assert_allclose(dense, vi.gap_bound(q, f(q), f.precision), rtol=1e-10)

    def test_the_gap_bound_is_tight_on_a_spherical_target(self):
        # Of N(0, I/a) the mean's part is exact.
        q = FullRank(jnp.array([3.0, 1.0]), jnp.eye(2) / np.sqrt(2.0))
        found = vi.gap_bound(q, quadratic(2.0 * np.eye(2), np.zeros(2), "full")(q), 2.0)
        np.testing.assert_allclose(
            found, oracle.kl(np.array([3.0, 1.0]), np.eye(2) / 2, np.zeros(2), np.eye(2) / 2)
        )

    @pytest.mark.parametrize("d", [2, 10])
    def test_the_stationarity_follows_the_gap(self, d):
        best = vi.minimise(logistic(d, 0.5), standard("full", d), tolerance=1e-18).elbo
        trace = vi.minimise(logistic(d, 0.5), standard("full", d), tolerance=1e-9).trace
        gap, found = best - trace.elbo, trace.stationarity
        near = np.flatnonzero(np.isfinite(trace.elbo) & (gap < 1e-2) & (gap > 1e-8))
        assert len(near) > 4
        ratio = found[near] / gap[near]
        assert np.all((ratio > 0.4) & (ratio < 1.1))

    @pytest.mark.parametrize("kind", FAMILIES)
    @pytest.mark.parametrize("name", METHODS)
    def test_the_elbo_never_falls_at_an_accepted_step(self, kind, name):
        trace = vi.minimise(logistic(10, 1.0), standard(kind, 10, 5.0), method=METHODS[name]).trace
        accepted = np.asarray(trace.elbo)[np.asarray(trace.accepted)]
        assert np.all(np.diff(accepted) >= -1e-10 * np.abs(accepted[1:]))

    @pytest.mark.full
    def test_a_linearised_predictor_and_draws_reach_a_stationary_point(self, key):
        def network(theta, x):
            return theta[0] * jnp.tanh(theta[1] * x[0] + theta[2])

        x = np.linspace(-2.0, 2.0, 30)[:, None]
        y = np.tanh(1.5 * x[:, 0])
        prior = standard("full", 3, 1.0)
        for expectation, draws in (
            (nt.expectations.linearised(network, nt.expectations.squared()), False),
            (nt.expectations.monte_carlo(lambda t, x, y: jnp.square(network(t, x) - y), num_particles=32), True),
        ):
            f = vi.objective(expectation, prior, x, y, alpha=2.0)
            start = FullRank(jnp.ones(3), 0.3 * jnp.eye(3))
            result = vi.minimise(f, start, rng_key=key if draws else None, tolerance=1e-8)
            assert bool(result.converged)
            at = f(result.posterior, key if draws else None)
            np.testing.assert_allclose(at.hessian @ covariance_of(result.posterior), np.eye(3), atol=1e-3)
            np.testing.assert_allclose(at.grad, 0.0, atol=1e-2)


class TestTargetsThatAreNotLogConcave:
    """Whatever the target, the result is a Gaussian, and the reason is told."""

    @pytest.mark.usefixtures("x64")
    @settings(max_examples=20, deadline=None)
    @given(
        separation=st.floats(0.5, 8.0),
        at=st.floats(-6.0, 6.0),
        scale=st.floats(0.05, 5.0),
        kind=st.sampled_from(sorted(FAMILIES)),
        name=st.sampled_from(["natural", "natural, whole steps", "whitened"]),
    )
    def test_two_modes(self, separation, at, scale, kind, name):
        f = vi.objective(_two_modes_by_quadrature(), standard(kind, 1, 10.0), jnp.ones(1), separation)
        start = standard(kind, 1, scale)._replace(loc=jnp.full((1,), at))
        result = vi.minimise(f, start, method=METHODS[name], max_evaluations=120)
        q = result.posterior
        spread = q.scale[0] if kind == "mean-field" else q.factor[0, 0]
        assert np.isfinite(q.loc[0])
        assert np.isfinite(spread)
        assert spread > 0
        accepted = np.asarray(result.trace.elbo)[np.asarray(result.trace.accepted)]
        assert np.all(np.diff(accepted) >= -1e-10)
        if bool(result.converged):
            assert float(result.stationarity) <= 1e-6
        else:
            assert result.reason in REASONS.values()

    def test_without_backtracking_an_indefinite_precision_ends_the_run(self):
        f = vi.objective(_two_modes(), standard("full", 1, 10.0), jnp.full((1,), 6.0))
        method = vi.natural_gradient(1.0, backtrack=False)
        result = vi.minimise(f, standard("full", 1, 0.5), method=method, rng_key=jax.random.key(1))
        assert not bool(result.converged)
        assert result.reason == REASONS[3]
        assert float(result.posterior.factor[0, 0]) == 0.5
        # Between the modes the curvature is negative: backtracking gets away from there.
        mended = vi.minimise(
            f, standard("full", 1, 0.5), method=vi.natural_gradient(1.0), rng_key=jax.random.key(1)
        )
        assert float(mended.elbo) > float(result.elbo)
        assert np.isfinite(float(mended.elbo))

    @pytest.mark.full
    def test_separable_data_do_not_break_whole_steps(self):
        x = jnp.array([[1.0, 2.0], [2.0, 1.0], [-1.0, -2.0], [-2.0, -1.0]])
        y = jnp.array([1.0, 1.0, -1.0, -1.0])
        f = vi.objective(LOGISTIC, standard("full", 2, 30.0), x, y)
        for start in (0.05, 1.0, 30.0):
            for name in ("natural", "natural, whole steps", "whitened"):
                result = vi.minimise(f, standard("full", 2, start), method=METHODS[name], tolerance=1e-4)
                assert bool(result.converged), (start, name)


@functools.cache
def _two_modes_by_quadrature():
    def loss(u, centre):
        return -jnp.logaddexp(-0.5 * jnp.square(u - centre), -0.5 * jnp.square(u + centre))

    return nt.expectations.gauss_hermite(loss, num_nodes=40)


@functools.cache
def _two_modes():
    def loss(theta, centre):
        modes = jnp.stack([centre, -centre])
        return -jax.scipy.special.logsumexp(-0.5 * jnp.sum(jnp.square(theta[None, :] - modes), axis=-1))

    return nt.expectations.monte_carlo(loss, num_particles=64, antithetic=True)


def test_vmap_over_alphas_is_the_loop(x64):
    x, y = logistic_data(2)
    alphas = jnp.array([0.1, 0.5, 1.0])

    def fit(alpha):
        return vi.minimise(
            vi.objective(LOGISTIC, standard("full", 2, PRIOR_SCALE), x, y, alpha=alpha), standard("full", 2)
        )

    together = jax.vmap(fit)(alphas)
    for i, alpha in enumerate(alphas):
        alone = fit(float(alpha))
        np.testing.assert_allclose(together.elbo[i], alone.elbo, rtol=1e-12)
        np.testing.assert_allclose(together.posterior.factor[i], alone.posterior.factor, rtol=1e-8, atol=1e-10)
        assert int(together.num_evaluations[i]) == int(alone.num_evaluations)
    jitted = jax.jit(fit)(0.5)
    np.testing.assert_allclose(jitted.elbo, together.elbo[1], rtol=1e-12)


@pytest.mark.parametrize("name", ["natural", pytest.param("whitened", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", FAMILIES)
def test_float32_converges_to_the_same_optimum(kind, name):
    result = vi.minimise(logistic(10, 0.5), standard(kind, 10), method=METHODS[name])
    assert result.posterior.loc.dtype == jnp.float32
    assert bool(result.converged)
    best = logistic_best(10, 0.5, diagonal=kind == "mean-field")[2]
    assert abs(float(result.elbo) - best) < 1e-6 * 400


def test_the_same_program_serves_other_data():
    before = vi.minimise(logistic(2, 0.5), standard("full", 2))
    size = _shared_loop._cache_size()
    vi.minimise(logistic(2, 0.7), standard("full", 2))
    assert _shared_loop._cache_size() == size
    assert int(before.num_evaluations) > 1


@pytest.mark.full
def test_no_silent_promotion(strict):
    for kind in FAMILIES:
        for method in METHODS.values():
            vi.minimise(logistic(2, 0.5), standard(kind, 2), method=method, max_evaluations=3)


def test_infinite_trials_are_counted_and_recorded():
    f = vi.objective(_two_modes(), standard("full", 1, 10.0), jnp.full((1,), 6.0))
    result = vi.minimise(f, standard("full", 1, 0.5), method=vi.natural_gradient(1.0), rng_key=jax.random.key(1))
    used = int(result.num_evaluations)
    assert np.any(np.isneginf(result.trace.elbo[:used]))
    assert not np.any(np.isnan(result.trace.elbo[:used]))
    assert np.all(np.isnan(result.trace.elbo[used:]))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: vi.natural_gradient(0.0), ValueError, "damping"),
        (lambda: vi.natural_gradient(1.5), ValueError, "damping"),
        (lambda: vi.forward_backward(-1.0), ValueError, "step_size"),
        (lambda: vi.minimise(logistic(2, 1.0), jnp.zeros(2)), TypeError, "MeanField or FullRank"),
        (
            lambda: vi.minimise(logistic(2, 1.0), standard("full", 2), method="natural"),
            TypeError,
            "natural_gradient",
        ),
        (lambda: vi.minimise(logistic(2, 1.0), standard("full", 2), max_evaluations=0), ValueError, "max_eval"),
        (lambda: vi.minimise(logistic(2, 1.0), standard("full", 2), tolerance=0.0), ValueError, "tolerance"),
        (lambda: vi.minimise(logistic(2, 1.0), MeanField(jnp.zeros(2), -jnp.ones(2))), ValueError, "positive"),
        (lambda: vi.minimise(logistic(2, 1.0), standard("full", 3)), ValueError, r"\(3,\)"),
        (lambda: logistic(2, -1.0), ValueError, "alpha"),
        (lambda: logistic(2, float("nan")), ValueError, "alpha"),
        (
            lambda: vi.objective(nt.expectations.gauss_hermite(predictor="eta"), standard("full", 2)),
            TypeError,
            "bare loss",
        ),
        (lambda: vi.objective(LOGISTIC, jnp.zeros(2)), TypeError, "MeanField or a FullRank"),
        (
            lambda: vi.minimise(
                vi.objective(_two_modes(), standard("full", 1), jnp.ones(1)), standard("full", 1)
            ),
            ValueError,
            "rng_key",
        ),
        (lambda: vi.wasserstein(standard("full", 2), standard("mean-field", 2)), TypeError, "one family"),
        (lambda: vi.flow(logistic(2, 1.0), standard("full", 2), 1.0), ValueError, "times"),
        (
            lambda: vi.gap_bound(standard("full", 2), logistic(2, 1.0)(standard("full", 2)), jnp.ones(3)),
            ValueError,
            "precision",
        ),
        (
            lambda: vi.minimise(
                vi.objective(LOGISTIC, standard("full", 2), np.array([[1.0, np.nan]]), np.ones(1)),
                standard("full", 2),
            ),
            ValueError,
            "not finite",
        ),
    ],
)
def test_errors(make, error, match):
    with pytest.raises(error, match=match):
        make()
