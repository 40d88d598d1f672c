"""Batch Gaussian variational inference without NumPyro: steps, flow, stopping rule."""

import functools
import itertools

import gaussian_vi_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiered
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_tempered as nt
from numpyro_tempered.gaussian.descent.base import Derivatives
from numpyro_tempered.gaussian.descent.bures_wasserstein import plain_step
from numpyro_tempered.gaussian.descent.minimise import REASONS, _shared_loop
from numpyro_tempered.gaussian.families import FullRank, MeanField

vi = nt.gaussian.descent
METHODS = {
    "natural": vi.natural_gradient(),
    "natural, whole steps": vi.natural_gradient(1.0),
    "whitened": vi.forward_backward(),
    "plain": vi.forward_backward(whiten=False),
}
# Plain steps are many.
LONG = {name: {"max_evaluations": 3000} if name == "plain" else {} for name in METHODS}
ROOT = np.array([[0.5, 0.0], [0.4, 1.5]])
FAMILIES = {"full": FullRank, "mean-field": MeanField}
PRIOR_SCALE = 2.0
LOGISTIC = nt.expectations.logistic(num_nodes=40)


def standard(kind, d, scale=1.0):
    return (
        MeanField(np.zeros(d), np.full(d, scale))
        if kind == "mean-field"
        else FullRank(np.zeros(d), scale * np.eye(d))
    )


def covariance_of(q):
    if isinstance(q, MeanField):
        return np.diag(np.square(q.scale))
    factor = np.asarray(q.factor)
    return factor @ factor.T


@functools.cache
def logistic_data(d):
    rng = np.random.default_rng([7, d])
    x = rng.normal(size=(20 * d, d)) * np.geomspace(1.0, 4.0, d) / np.sqrt(d)
    y = np.where(
        rng.uniform(size=len(x)) < 1.0 / (1.0 + np.exp(-x @ rng.normal(size=d))),
        1.0,
        -1.0,
    )
    return x, y


@functools.cache
def logistic_best(d, alpha, diagonal=False):
    return oracle.logistic_optimum(*logistic_data(d), alpha, PRIOR_SCALE, diagonal)


def logistic(d, alpha):
    x, y = logistic_data(d)
    return vi.objective(
        LOGISTIC, standard("mean-field", d, PRIOR_SCALE), x, y, alpha=alpha
    )


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
        return vi.Derivatives(
            0.5 * (shift @ matrix @ shift + spread), matrix @ shift, own
        )

    return derivatives


@pytest.fixture(params=["double", pytest.param("single", marks=pytest.mark.full)])
def precision(request):
    if request.param == "double":
        request.getfixturevalue("x64")


def after_raw_steps(kind):
    """The variance after many plain steps of several sizes on N(0, 1)."""
    return _after_raw_steps(kind, jnp.result_type(float))


@functools.cache
def _after_raw_steps(kind, _):
    derivatives = quadratic(np.eye(1), np.zeros(1), kind)

    def run(start, size, count):
        q = jax.lax.fori_loop(
            0, count, lambda _, q: plain_step(q, derivatives(q), size), start
        )
        return jnp.square(q.scale[0] if kind == "mean-field" else q.factor[0, 0])

    return jax.jit(jax.vmap(run, (None, 0, None)))


@functools.cache
def gap_bounds(kind):
    """The bound with a diagonal and, for a full-rank q, with the same as a matrix."""
    f = logistic(2, 0.5)

    def bounds(q):
        at = f(q)
        matrix = f.precision if kind == "mean-field" else jnp.diag(f.precision)
        return vi.gap_bound(q, at, f.precision), vi.gap_bound(q, at, matrix)

    return jax.jit(bounds)


def conjugate(kind, alpha, noise=0.7):
    """A tempered linear regression, and its posterior."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(30, 4)), rng.normal(size=30)
    if kind == "mean-field":  # exact where the columns are orthogonal
        x = np.linalg.qr(x)[0]
    # squared() is (xθ - y)²
    f = vi.objective(
        nt.expectations.squared(),
        standard(kind, 4, 1.5),
        x,
        y,
        alpha=alpha / (2.0 * noise**2),
    )
    return f, *oracle.posterior(x, y, alpha, 1.5, noise)


def correlated(d, n):
    """A logistic regression on covariates that are much alike, and its best mean-field Gaussian."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(n, 1)) + 0.2 * rng.normal(size=(n, d))
    y = np.where(x @ np.linspace(-1.0, 1.0, d) + rng.logistic(size=n) > 0, 1.0, -1.0)
    covariance, best = oracle.logistic_optimum(x, y, 0.5, PRIOR_SCALE, diagonal=True)[
        1:
    ]
    return (
        vi.objective(LOGISTIC, standard("mean-field", d, PRIOR_SCALE), x, y, alpha=0.5),
        covariance,
        best,
    )


def random_precision(d, seed, low=0.3, high=4.0):
    rng = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(rng.normal(size=(d, d)))
    return (vectors * np.geomspace(low, high, d)) @ vectors.T


@pytest.mark.usefixtures("x64")
class TestExact:
    @pytest.mark.parametrize("alpha", [0.3, 1.0])
    @pytest.mark.parametrize("kind", FAMILIES)
    @pytest.mark.full
    def test_one_natural_step_solves_a_conjugate_model(self, kind, alpha):
        f, loc, covariance = conjugate(kind, alpha)
        result = vi.minimise(
            f,
            standard(kind, 4, 0.2),
            method=vi.natural_gradient(1.0),
            tolerance=1e-20,
            max_evaluations=2,
        )
        np.testing.assert_allclose(result.posterior.loc, loc, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(
            covariance_of(result.posterior), covariance, rtol=1e-12, atol=1e-12
        )
        assert int(result.num_evaluations) == 2
        assert float(result.stationarity) < 1e-20

    @pytest.mark.parametrize(("kind", "alpha"), [("full", 0.3), ("mean-field", 1.0)])
    def test_the_step_of_a_conjugate_model_leads_to_a_stationary_point(
        self, kind, alpha
    ):
        f, loc, covariance = conjugate(kind, alpha)

        @jax.jit
        def run(q):
            found = vi.natural_gradient(1.0).step(q, f(q), jnp.ones(()))
            return found, vi.stationarity(found, f(found))

        found, residual = run(standard(kind, 4, 0.2))
        np.testing.assert_allclose(found.loc, loc, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(
            covariance_of(found), covariance, rtol=1e-12, atol=1e-12
        )
        assert float(residual) < 1e-20

    @pytest.mark.parametrize("kind", FAMILIES)
    def test_curvature_that_would_leave_no_gaussian_counts_without_its_negative_part(
        self, kind
    ):
        q, bent = standard(kind, 2, 0.5), np.array([-1000.0, 12.0])
        hessian = jnp.asarray(bent if kind == "mean-field" else np.diag(bent))
        derivatives = Derivatives(jnp.zeros(()), jnp.zeros(2), hessian)
        found = jax.jit(vi.natural_gradient(1.0).step)(
            q, derivatives, jnp.asarray(0.25)
        )
        precision = 0.75 * 4.0 + 0.25 * np.array([0.0, 12.0])
        np.testing.assert_allclose(
            covariance_of(found), np.diag(1.0 / precision), rtol=1e-10, atol=1e-12
        )

    @pytest.mark.parametrize(
        ("kind", "seed"),
        tiered(itertools.product(FAMILIES, range(3)), unit=[("full", 0)]),
    )
    def test_the_flow_contracts(self, kind, seed):
        matrix = random_precision(3, seed)
        if kind == "mean-field":
            matrix = np.diag(np.diag(matrix))
        a = np.linalg.eigvalsh(matrix)[0]
        centre = np.array([1.0, -2.0, 0.5])
        target = np.linalg.inv(matrix)
        start = FullRank(
            np.zeros(3), np.linalg.cholesky(random_precision(3, seed + 50))
        )
        if kind == "mean-field":
            start = MeanField(np.zeros(3), np.array([0.2, 1.0, 3.0]))
        times = np.linspace(0.0, 3.0, 7)
        derivatives = quadratic(matrix, centre, kind)
        path = jax.tree.map(
            np.asarray, jax.jit(lambda q: vi.flow(derivatives, q, times))(start)
        )
        squared = [
            oracle.wasserstein(q.loc, covariance_of(q), centre, target) ** 2
            for q in (
                jax.tree.map(lambda leaf, i=i: leaf[i], path) for i in range(len(times))
            )
        ]
        bound = np.exp(-2.0 * a * times) * squared[0]
        assert np.all(squared <= bound * (1.0 + 1e-3))
        # It moves at all, and the bound is not idle.
        assert squared[-1] < 0.2 * squared[0]

    @pytest.mark.parametrize("kind", tiered(FAMILIES, unit=["mean-field"]))
    def test_the_flow_of_an_isotropic_target_contracts_at_the_rate(self, kind):
        a = 0.8
        times = np.linspace(0.0, 2.0, 5)

        @jax.jit
        @jax.vmap
        def run(start, centre):
            path = vi.flow(quadratic(a * np.eye(2), centre, kind), start, times)
            target = standard(kind, 2, a**-0.5)._replace(loc=centre)
            return path, jax.vmap(lambda q: vi.wasserstein(q, target))(path)

        # From a wrong spread, and from a wrong mean alone.
        starts = [standard(kind, 2, 3.0), standard(kind, 2, a**-0.5)]
        path, distances = run(
            jax.tree.map(lambda *leaves: np.stack(leaves), *starts),
            np.array([[1.0, 2.0], [1, 1]]),
        )
        # The variance of a Gaussian flow relaxes as e^{-2at} towards 1/a, its mean as e^{-at}.
        scale = np.sqrt(1.0 / a + (9.0 - 1.0 / a) * np.exp(-2.0 * a * times))
        found = path.scale[0, :, 0] if kind == "mean-field" else path.factor[0, :, 0, 0]
        np.testing.assert_allclose(found, scale, rtol=1e-9)
        exact = 5.0 * np.exp(-2.0 * a * times) + 2.0 * (scale - a**-0.5) ** 2
        np.testing.assert_allclose(np.square(distances[0]), exact, rtol=1e-8)
        # Means alone contract at exactly the rate of the theorem.
        np.testing.assert_allclose(
            np.square(distances[1]), 2.0 * np.exp(-2.0 * a * times), rtol=1e-9
        )

    @pytest.mark.full
    @pytest.mark.parametrize("kind", FAMILIES)
    def test_the_flow_and_its_distances_need_no_compilation_of_their_own(self, kind):
        a, times = 0.8, np.linspace(0.0, 2.0, 5)
        path = vi.flow(
            quadratic(a * np.eye(2), np.array([1.0, 2.0]), kind),
            standard(kind, 2, 3.0),
            times,
        )
        scale = np.sqrt(1.0 / a + (9.0 - 1.0 / a) * np.exp(-2.0 * a * times))
        found = path.scale[:, 0] if kind == "mean-field" else path.factor[:, 0, 0]
        np.testing.assert_allclose(found, scale, rtol=1e-9)
        target = standard(kind, 2, a**-0.5)._replace(loc=np.array([1.0, 2.0]))
        exact = 5.0 * np.exp(-2.0 * a * times) + 2.0 * (scale - a**-0.5) ** 2
        for i, expected in enumerate(exact):
            q = jax.tree.map(lambda leaf, i=i: leaf[i], path)
            np.testing.assert_allclose(
                np.square(vi.wasserstein(q, target)), expected, rtol=1e-8
            )

    @pytest.mark.full
    def test_small_forward_backward_steps_follow_the_flow(self):
        derivatives = quadratic(random_precision(2, 1), np.ones(2), "full")
        q = end = standard("full", 2, 2.0)
        path = vi.flow(derivatives, q, jnp.array([0.0, 0.5]))
        for _ in range(2000):
            end = plain_step(end, derivatives(end), 0.5 / 2000)
        np.testing.assert_allclose(end.loc, path.loc[1], atol=1e-3)
        np.testing.assert_allclose(
            covariance_of(end), path.factor[1] @ path.factor[1].T, atol=2e-3
        )

    @pytest.mark.parametrize("kind", FAMILIES)
    def test_a_raw_step_above_the_limit_finds_a_wrong_variance(self, kind):
        steps = np.array([1.2, 1.5, 1.8])
        found = after_raw_steps(kind)(standard(kind, 1, 1.0), steps, 3000)
        np.testing.assert_allclose(found, steps / (2.0 - steps), rtol=1e-8)

    @pytest.mark.parametrize("kind", FAMILIES)
    def test_a_raw_step_below_the_limit_finds_the_right_variance(self, kind):
        found = after_raw_steps(kind)(
            standard(kind, 1, 4.0), np.array([0.3, 0.9, 1.0]), 300
        )
        np.testing.assert_allclose(found, 1.0, rtol=1e-10)

    @pytest.mark.parametrize("kind", FAMILIES)
    def test_the_limit_of_a_step_is_that_of_the_largest_curvature(self, kind):
        q = (
            MeanField(np.zeros(2), np.array([0.5, 2.0]))
            if kind == "mean-field"
            else FullRank(np.zeros(2), ROOT)
        )
        matrix = (
            np.diag([3.0, 0.6])
            if kind == "mean-field"
            else np.array([[3.0, 0.5], [0.5, 0.6]])
        )
        derivatives = quadratic(matrix, np.zeros(2), kind)
        root = np.sqrt(covariance_of(q)) if kind == "mean-field" else ROOT
        cases, expected = [], []
        for whiten, curvature in ((False, matrix), (True, root.T @ matrix @ root)):
            limit = 1.0 / np.linalg.eigvalsh(curvature)[-1]
            # Left out, it is the longest that is admissible, and no more than 1 whitened.
            sizes = {
                0.99 * limit: (0.99 * limit, False),
                1.01 * limit: (1.01 * limit, True),
            }
            sizes[None] = (min(limit, 1.0) if whiten else limit, False)
            cases += [vi.forward_backward(size, whiten=whiten) for size in sizes]
            expected += sizes.values()

        @jax.jit
        def run(q):
            at = derivatives(q)
            return [
                (method.max_size(q, at), method.is_too_long(q, at)) for method in cases
            ]

        np.testing.assert_allclose(
            np.array(run(q), float), np.array(expected, float), rtol=1e-12
        )

    @pytest.mark.full
    @pytest.mark.parametrize("whiten", [True, False])
    def test_a_step_above_the_limit_is_refused(self, whiten):
        f = logistic(2, 1.0)
        with pytest.raises(ValueError, match=r"above 1/L.*out for the longest"):
            vi.minimise(
                f, standard("full", 2), method=vi.forward_backward(50.0, whiten=whiten)
            )
        largest = np.linalg.eigvalsh(f(standard("full", 2)).hessian)[-1]
        fine = vi.minimise(
            f,
            standard("full", 2),
            method=vi.forward_backward(0.2 / largest, whiten=False),
            max_evaluations=2000,
        )
        assert bool(fine.converged)

    @pytest.mark.parametrize(
        ("d", "alpha", "name"),
        list(itertools.product([2, 10, 50], [0.5, 1.0], METHODS)),
    )
    @pytest.mark.full
    def test_all_methods_find_the_optimum_of_the_oracle(self, d, alpha, name):
        x, y = logistic_data(d)
        loc, covariance, best = logistic_best(d, alpha)
        result = vi.minimise(
            logistic(d, alpha), standard("full", d), method=METHODS[name], **LONG[name]
        )
        assert bool(result.converged)
        q = result.posterior
        own = oracle.logistic_elbo(
            x, y, alpha, PRIOR_SCALE, np.asarray(q.loc), covariance_of(q)
        )
        assert abs(own - best) < 1e-5
        # The objective's own value is that of the oracle at the same Gaussian, every constant included.
        assert abs(float(result.elbo) - own) < 1e-6
        np.testing.assert_allclose(
            q.loc, loc, atol=5e-3 * np.sqrt(np.diag(covariance)).max()
        )

    @pytest.mark.parametrize("kind", FAMILIES)
    def test_every_method_stays_at_the_optimum_and_improves_elsewhere(self, kind):
        x, y = logistic_data(2)
        loc, covariance, best = logistic_best(2, 0.5, diagonal=kind == "mean-field")
        f = logistic(2, 0.5)

        @jax.jit
        def steps(q):
            at = f(q)
            return {
                name: method.step(q, at, method.max_size(q, at))
                for name, method in METHODS.items()
            }

        def elbo(q):
            return oracle.logistic_elbo(
                x, y, 0.5, PRIOR_SCALE, np.asarray(q.loc), covariance_of(q)
            )

        root = np.linalg.cholesky(covariance)
        optimum = (
            MeanField(loc, np.diag(root))
            if kind == "mean-field"
            else FullRank(loc, root)
        )
        for name, q in steps(optimum).items():
            np.testing.assert_allclose(q.loc, loc, atol=1e-4, err_msg=name)
            np.testing.assert_allclose(
                covariance_of(q), covariance, atol=1e-4, err_msg=name
            )
        start = standard(kind, 2)
        for name, q in steps(start).items():
            assert elbo(start) < elbo(q) < best, name

    @pytest.mark.parametrize(
        ("d", "name"),
        tiered(itertools.product([2, 10], METHODS), unit=[(2, "natural")]),
    )
    def test_the_mean_field_optimum_is_that_of_the_oracle(self, d, name):
        _, covariance, best = logistic_best(d, 0.5, diagonal=True)
        result = vi.minimise(
            logistic(d, 0.5),
            standard("mean-field", d),
            method=METHODS[name],
            tolerance=1e-8,
            **LONG[name],
        )
        assert bool(result.converged)
        assert abs(float(result.elbo) - best) < 1e-5
        # The objective's own value is that of the oracle at the same Gaussian, every constant included.
        q = result.posterior
        own = oracle.logistic_elbo(
            *logistic_data(d), 0.5, PRIOR_SCALE, np.asarray(q.loc), covariance_of(q)
        )
        assert abs(float(result.elbo) - own) < 1e-6
        np.testing.assert_allclose(
            covariance_of(result.posterior), covariance, atol=1e-4
        )

    @pytest.mark.parametrize(("d", "n"), tiered([(2, 40), (8, 200)], unit=[(2, 40)]))
    def test_a_mean_field_q_finds_the_optimum_where_coordinates_correlate(self, d, n):
        f, covariance, best = correlated(d, n)
        found = vi.minimise(f, standard("mean-field", d))
        assert abs(float(found.elbo) - best) < 1e-5
        np.testing.assert_allclose(
            covariance_of(found.posterior), covariance, atol=2e-3
        )
        assert bool(found.converged)
        assert int(found.num_evaluations) < 40

    @pytest.mark.full
    def test_a_mean_field_q_does_not_crawl_where_coordinates_correlate(self):
        f, *_ = correlated(8, 200)
        used = {
            dense: int(
                vi.minimise(
                    f,
                    standard("mean-field", 8),
                    method=vi.natural_gradient(dense=dense),
                ).num_evaluations
            )
            for dense in (None, False)
        }
        assert used[False] > 3 * used[None]

    @pytest.mark.parametrize("d", tiered([1, 3, 6], unit=[3]))
    def test_wasserstein_is_that_of_matrix_roots(self, d):
        rng = np.random.default_rng(5)
        roots = [np.tril(rng.normal(size=(d, d))) + 2.0 * np.eye(d) for _ in range(2)]
        m, k = rng.normal(size=(2, d))
        expected = oracle.wasserstein(
            m, roots[0] @ roots[0].T, k, roots[1] @ roots[1].T
        )
        q, p = FullRank(m, roots[0]), FullRank(k, roots[1])
        distance = jax.jit(vi.wasserstein)
        np.testing.assert_allclose(distance(q, p), expected, rtol=1e-8)
        np.testing.assert_allclose(distance(p, q), expected, rtol=1e-8)
        assert float(distance(q, q)) < 1e-7

    @settings(max_examples=25, deadline=None)
    @given(
        seed=st.integers(0, 10_000),
        kind=st.sampled_from(sorted(FAMILIES)),
        spread=st.floats(0.1, 3.0),
    )
    def test_the_gap_bound_holds_everywhere(self, seed, kind, spread):
        rng = np.random.default_rng(seed)
        best = logistic_best(2, 0.5, diagonal=kind == "mean-field")[2]
        loc = rng.normal(size=2) * 2.0
        if kind == "full":
            q = FullRank(loc, np.tril(rng.normal(size=(2, 2)), -1) + spread * np.eye(2))
        else:
            q = MeanField(loc, spread * np.exp(rng.normal(size=2)))
        x, y = logistic_data(2)
        gap = best - oracle.logistic_elbo(x, y, 0.5, PRIOR_SCALE, loc, covariance_of(q))
        bound, by_matrix = gap_bounds(kind)(q)
        assert float(bound) >= gap - 1e-9
        # A matrix that is the same metric gives the same bound.
        np.testing.assert_allclose(by_matrix, bound, rtol=1e-10)

    def test_the_gap_bound_is_tight_on_a_spherical_target(self):
        # Of N(0, I/a) the mean's part is exact.
        q = FullRank(np.array([3.0, 1.0]), np.eye(2) / np.sqrt(2.0))
        derivatives = quadratic(2.0 * np.eye(2), np.zeros(2), "full")
        found = jax.jit(lambda q: vi.gap_bound(q, derivatives(q), 2.0))(q)
        np.testing.assert_allclose(
            found,
            oracle.kl(np.array([3.0, 1.0]), np.eye(2) / 2, np.zeros(2), np.eye(2) / 2),
        )

    @pytest.mark.parametrize(
        ("kind", "d"),
        tiered(
            [("mean-field", 2), ("full", 2), ("full", 10)], unit=[("mean-field", 2)]
        ),
    )
    def test_the_stationarity_follows_the_gap(self, kind, d):
        best = float(
            vi.minimise(logistic(d, 0.5), standard(kind, d), tolerance=1e-18).elbo
        )
        trace = vi.minimise(logistic(d, 0.5), standard(kind, d), tolerance=1e-9).trace
        trace = jax.tree.map(np.asarray, trace)
        gap, found = best - trace.elbo, trace.stationarity
        near = np.flatnonzero(np.isfinite(trace.elbo) & (gap < 1e-2) & (gap > 1e-8))
        assert len(near) > 4
        ratio = found[near] / gap[near]
        assert np.all((ratio > 0.4) & (ratio < 1.1))

    # With a full rank on two modes, below.
    @pytest.mark.parametrize(
        ("kind", "d", "name"),
        tiered(
            itertools.product(FAMILIES, [2, 10], METHODS),
            unit=[("mean-field", 2, "natural")],
        ),
    )
    def test_the_elbo_never_falls_at_an_accepted_step(self, kind, d, name):
        trace = vi.minimise(
            logistic(d, 1.0), standard(kind, d, 5.0), method=METHODS[name]
        ).trace
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
            (
                nt.expectations.monte_carlo(
                    lambda t, x, y: jnp.square(network(t, x) - y), num_particles=32
                ),
                True,
            ),
        ):
            f = vi.objective(expectation, prior, x, y, alpha=2.0)
            start = FullRank(jnp.ones(3), 0.3 * jnp.eye(3))
            result = vi.minimise(
                f, start, rng_key=key if draws else None, tolerance=1e-8
            )
            assert bool(result.converged)
            at = f(result.posterior, key if draws else None)
            np.testing.assert_allclose(
                at.hessian @ covariance_of(result.posterior), np.eye(3), atol=1e-3
            )
            np.testing.assert_allclose(at.grad, 0.0, atol=1e-2)


def double_well(kind, separation):
    """f(θ) = (θ² - separation)² / 4 of one coordinate."""
    return vi.Objective(_double_well, np.asarray(separation), exact=True, shared=True)


def _double_well(q, separation, _):
    m, v = q.loc, jnp.square(q.factor[0])
    fourth = m**4 + 6.0 * m**2 * v + 3.0 * v**2
    value = 0.25 * (fourth - 2.0 * separation * (m**2 + v) + separation**2)
    return vi.Derivatives(
        value[0],
        m**3 + 3.0 * m * v - separation * m,
        (3.0 * (m**2 + v) - separation)[:, None],
    )


def two_modes_by_quadrature(kind, separation):
    return vi.objective(
        _two_modes_by_quadrature(), standard(kind, 1, 10.0), np.ones(1), separation
    )


@functools.cache
def _two_modes_by_quadrature():
    def loss(u, centre):
        return -jnp.logaddexp(
            -0.5 * jnp.square(u - centre), -0.5 * jnp.square(u + centre)
        )

    return nt.expectations.gauss_hermite(loss, num_nodes=40)


class TestTargetsThatAreNotLogConcave:
    """Whatever the target, the result is a Gaussian, and the reason is told."""

    @pytest.mark.usefixtures("x64")
    @pytest.mark.parametrize(
        "cases",
        [
            [("full", "natural", double_well)],
            pytest.param(
                list(
                    itertools.product(
                        FAMILIES,
                        ["natural", "natural, whole steps", "whitened"],
                        [two_modes_by_quadrature],
                    )
                ),
                marks=pytest.mark.full,
            ),
        ],
        ids=["one", "all"],
    )
    @settings(max_examples=20, deadline=None)
    @given(
        separation=st.floats(0.5, 8.0),
        at=st.floats(-6.0, 6.0),
        scale=st.floats(0.05, 5.0),
        data=st.data(),
    )
    def test_two_modes(self, cases, separation, at, scale, data):
        kind, name, target = data.draw(st.sampled_from(cases))
        start = standard(kind, 1, scale)._replace(loc=np.full(1, at))
        result = vi.minimise(
            target(kind, separation), start, method=METHODS[name], max_evaluations=120
        )
        q = result.posterior
        spread = float(np.ravel(q.scale if kind == "mean-field" else q.factor)[0])
        assert np.isfinite(float(q.loc[0]))
        assert np.isfinite(spread)
        assert spread > 0
        accepted = np.asarray(result.trace.elbo)[np.asarray(result.trace.accepted)]
        assert np.all(np.diff(accepted) >= -1e-10)
        if bool(result.converged):
            assert float(result.stationarity) <= 1e-6
        else:
            assert result.reason in REASONS.values()

    def test_an_indefinite_precision_ends_a_run_that_does_not_backtrack(self, x64):
        # Between the modes the curvature is negative: backtracking gets away from there.
        f, start = double_well("full", 6.0), standard("full", 1, 0.5)
        method = vi.natural_gradient(1.0, backtrack=False)
        result = vi.minimise(f, start, method=method, max_evaluations=120)
        assert not bool(result.converged)
        assert result.reason == REASONS[3]
        assert float(result.posterior.factor[0, 0]) == 0.5
        mended = vi.minimise(
            f, start, method=vi.natural_gradient(1.0), max_evaluations=120
        )
        assert float(mended.elbo) > float(result.elbo)
        assert np.isfinite(float(mended.elbo))
        # The trials that led to no Gaussian are counted and recorded.
        used, trace = int(mended.num_evaluations), np.asarray(mended.trace.elbo)
        assert np.any(np.isneginf(trace[:used]))
        assert not np.any(np.isnan(trace[:used]))
        assert np.all(np.isnan(trace[used:]))

    @pytest.mark.full
    def test_without_backtracking_an_indefinite_precision_ends_the_run(self):
        f = vi.objective(_two_modes(), standard("full", 1, 10.0), np.full(1, 6.0))
        method = vi.natural_gradient(1.0, backtrack=False)
        result = vi.minimise(
            f, standard("full", 1, 0.5), method=method, rng_key=jax.random.key(1)
        )
        assert not bool(result.converged)
        assert result.reason == REASONS[3]
        assert float(result.posterior.factor[0, 0]) == 0.5
        mended = vi.minimise(
            f,
            standard("full", 1, 0.5),
            method=vi.natural_gradient(1.0),
            rng_key=jax.random.key(1),
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
                result = vi.minimise(
                    f, standard("full", 2, start), method=METHODS[name], tolerance=1e-4
                )
                assert bool(result.converged), (start, name)


def test_a_loss_by_draws_is_drawn_by_the_key_of_the_objective(key, x64):
    prior, q, at = (
        standard("full", 2, 3.0),
        standard("full", 2, 0.5),
        np.array([1.0, -1.0]),
    )
    f = vi.objective(_two_modes(), prior, at, alpha=0.5)
    assert f.needs_key
    ours, loss = f(q, key), _two_modes().evaluate(q, at, rng_key=key)
    # The rest is minus the log density of the prior, averaged over q.
    expected = (
        0.5 * np.array(loss.expected) + np.log(2 * np.pi * 9.0) + 0.5 * 2 * 0.5**2 / 9.0
    )
    np.testing.assert_allclose(ours.value, expected, rtol=1e-10)
    np.testing.assert_allclose(ours.grad, 0.5 * loss.grad_loc, rtol=1e-10, atol=1e-12)


@functools.cache
def _two_modes():
    def loss(theta, centre):
        modes = jnp.stack([centre, -centre])
        return -jax.scipy.special.logsumexp(
            -0.5 * jnp.sum(jnp.square(theta[None, :] - modes), axis=-1)
        )

    return nt.expectations.monte_carlo(loss, num_particles=64, antithetic=True)


def fit_alpha(alpha):
    x, y = logistic_data(2)
    f = vi.objective(LOGISTIC, standard("full", 2, PRIOR_SCALE), x, y, alpha=alpha)
    return vi.minimise(f, standard("full", 2))


def fit_precision(precision):
    f = vi.Objective(_scaled_quadratic, precision, exact=True, shared=True)
    return vi.minimise(f, standard("mean-field", 1, 2.0), method=vi.forward_backward())


def _scaled_quadratic(q, precision, _):
    value = 0.5 * precision * jnp.sum(jnp.square(q.loc - 1.0) + jnp.square(q.scale))
    return vi.Derivatives(
        value, precision * (q.loc - 1.0), jnp.full_like(q.loc, precision)
    )


@pytest.mark.parametrize(
    ("fit", "outer"),
    [
        (fit_precision, jax.jit),
        *(
            pytest.param(fit_alpha, outer, marks=pytest.mark.full)
            for outer in (jax.jit, lambda run: run)
        ),
    ],
    ids=["cheap", "jit", "eager"],
)
def test_vmap_over_alphas_is_the_loop(x64, fit, outer):
    alphas = np.array([0.1, 0.5, 1.0])
    together = outer(jax.vmap(fit))(alphas)
    for i, alpha in enumerate(alphas):
        alone = fit(alpha)
        np.testing.assert_allclose(together.elbo[i], alone.elbo, rtol=1e-12)
        np.testing.assert_allclose(
            together.posterior[1][i], alone.posterior[1], rtol=1e-8, atol=1e-10
        )
        assert int(together.num_evaluations[i]) == int(alone.num_evaluations)


def test_a_run_that_is_cut_short_says_so():
    f = vi.Objective(_scaled_quadratic, np.float32(0.8), exact=True, shared=True)
    result = vi.minimise(
        f,
        standard("mean-field", 1, 2.0),
        method=vi.forward_backward(0.1),
        max_evaluations=2,
    )
    assert int(result.num_evaluations) == 2
    assert not bool(result.converged)
    assert result.reason == "the evaluations were used up"


def test_float32_stays_float32():
    result = fit_precision(np.float32(0.8))
    # Without a precision that certifies one there is no bound.
    assert np.isposinf(float(result.gap_bound))
    assert result.posterior.loc.dtype == result.elbo.dtype == jnp.float32
    assert bool(result.converged)
    assert abs(float(result.elbo) - 0.5 * np.log(2.0 * np.pi / 0.8)) < 1e-5


@pytest.mark.full
def test_jit_of_an_alpha_is_the_loop(x64):
    np.testing.assert_allclose(
        jax.jit(fit_alpha)(0.5).elbo, fit_alpha(0.5).elbo, rtol=1e-12
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["natural", "whitened"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_float32_converges_to_the_same_optimum(kind, name):
    result = vi.minimise(logistic(10, 0.5), standard(kind, 10), method=METHODS[name])
    assert result.posterior.loc.dtype == jnp.float32
    assert bool(result.converged)
    best = logistic_best(10, 0.5, diagonal=kind == "mean-field")[2]
    assert abs(float(result.elbo) - best) < 1e-6 * 400


def test_the_same_program_serves_other_data(x64):
    before = vi.minimise(logistic(2, 0.5), standard("mean-field", 2))
    size = _shared_loop._cache_size()
    vi.minimise(logistic(2, 0.7), standard("mean-field", 2))
    assert _shared_loop._cache_size() == size
    assert int(before.num_evaluations) > 1


@pytest.mark.full
def test_no_silent_promotion(strict):
    for kind in FAMILIES:
        for method in METHODS.values():
            vi.minimise(
                logistic(2, 0.5), standard(kind, 2), method=method, max_evaluations=3
            )


@pytest.mark.full
def test_infinite_trials_are_counted_and_recorded():
    f = vi.objective(_two_modes(), standard("full", 1, 10.0), np.full(1, 6.0))
    result = vi.minimise(
        f,
        standard("full", 1, 0.5),
        method=vi.natural_gradient(1.0),
        rng_key=jax.random.key(1),
    )
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
        (
            lambda: vi.minimise(logistic(2, 1.0), jnp.zeros(2)),
            TypeError,
            "MeanField or FullRank",
        ),
        (
            lambda: vi.minimise(
                logistic(2, 1.0), standard("full", 2), method="natural"
            ),
            TypeError,
            r"^method must be.*natural_gradient",
        ),
        (
            lambda: vi.minimise(
                logistic(2, 1.0), standard("full", 2), max_evaluations=0
            ),
            ValueError,
            "max_eval",
        ),
        (
            lambda: vi.minimise(logistic(2, 1.0), standard("full", 2), tolerance=0.0),
            ValueError,
            "tolerance",
        ),
        (
            lambda: vi.minimise(logistic(2, 1.0), MeanField(np.zeros(2), -np.ones(2))),
            ValueError,
            "positive",
        ),
        (
            lambda: vi.minimise(logistic(2, 1.0), standard("full", 3)),
            ValueError,
            r"\(3,\)",
        ),
        (lambda: logistic(2, -1.0), ValueError, "alpha"),
        (lambda: logistic(2, float("nan")), ValueError, "alpha"),
        (
            lambda: vi.objective(
                nt.expectations.gauss_hermite(predictor="eta"), standard("full", 2)
            ),
            TypeError,
            r"bare loss.*takes a model",
        ),
        (
            lambda: vi.objective(LOGISTIC, jnp.zeros(2)),
            TypeError,
            "prior must be a MeanField or FullRank",
        ),
        (
            lambda: vi.minimise(
                vi.objective(_two_modes(), standard("mean-field", 1), np.ones(1)),
                standard("mean-field", 1),
            ),
            ValueError,
            "rng_key",
        ),
        (
            lambda: vi.wasserstein(standard("full", 2), standard("mean-field", 2)),
            TypeError,
            "one family",
        ),
        (
            lambda: vi.flow(logistic(2, 1.0), standard("full", 2), 1.0),
            ValueError,
            "times",
        ),
        (
            lambda: vi.gap_bound(
                jax.tree.map(jnp.asarray, standard("full", 2)),
                quadratic(np.eye(2), np.zeros(2), "full")(standard("full", 2)),
                np.ones(3),
            ),
            ValueError,
            "precision",
        ),
        (
            lambda: vi.minimise(
                vi.objective(
                    LOGISTIC,
                    standard("mean-field", 2),
                    logistic_data(2)[0] * [1.0, np.nan],
                    logistic_data(2)[1],
                ),
                standard("mean-field", 2),
            ),
            ValueError,
            r"^the ELBO is.*not finite.*at a narrower Gaussian",
        ),
        (
            lambda: vi.minimise(
                vi.Objective(quadratic(np.eye(1), np.zeros(1), "mean-field")),
                standard("mean-field", 1, 2.0),
                method=vi.forward_backward(1.1, whiten=False),
            ),
            ValueError,
            r"above 1/L.*out for the longest",
        ),
    ],
)
def test_errors(precision, make, error, match):
    with pytest.raises(error, match=match):
        make()
