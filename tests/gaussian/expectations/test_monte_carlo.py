from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conftest import tiered

import numpyro_tempered as nt

pytestmark = pytest.mark.usefixtures("strict")

D = 3
X = np.array([[1.0, -2.0, 0.5], [0.0, 0.3, -1.0], [-0.7, 1.5, 2.0]])
Y = np.array([1.0, -1.0, -1.0])
LOC, SCALE = np.array([0.2, -0.4, 0.9]), np.array([0.3, 0.1, 0.5])


def logistic(theta, x, y):
    return jax.nn.softplus(-y * jnp.sum(x * theta))


def half_squared(theta, x, y):
    return 0.5 * jnp.square(y - jnp.sum(x * theta))


def hinge(theta, x, y):
    return jnp.maximum(1.0 - y * jnp.sum(x * theta), 0.0)


@pytest.fixture(params=["abstract", pytest.param("computed", marks=pytest.mark.full)])
def call(request):
    """By default what is refused is not computed."""
    if request.param == "abstract":
        return jax.eval_shape
    return lambda function, *args, **options: function(*args, **options)


def family(loc=LOC, scale=SCALE, dtype=None):
    return nt.gaussian.families.MeanField(
        *(jnp.asarray(leaf, dtype) for leaf in (loc, scale))
    )


@pytest.mark.full
@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
@pytest.mark.parametrize("num_particles", [1, 4])
def test_unbiased(x64, key, curvature, num_particles):
    expectation = nt.expectations.monte_carlo(logistic, num_particles=num_particles)
    num_keys = 2000
    evaluations = jax.vmap(
        lambda k: expectation.evaluate(
            family(), jnp.asarray(X), jnp.asarray(Y), rng_key=k, curvature=curvature
        )
    )(jax.random.split(key, num_keys))
    exact = oracles.expected_linear_loss(
        *oracles.LINEAR_LOSSES["logistic"][:2], LOC, SCALE, X, Y
    )
    if curvature == "fisher":
        exact["grad_var"] = exact["fisher"]
    np.testing.assert_allclose(evaluations.at_mean, exact["at_mean"], rtol=1e-13)
    for field in ("expected", "grad_loc", "grad_var"):
        draws = np.asarray(getattr(evaluations, field))
        error = draws.std(0, ddof=1) / np.sqrt(num_keys)
        assert np.all(np.abs(draws.mean(0) - exact[field]) < 5 * error), field
        assert np.all(error > 0)


@pytest.mark.parametrize("antithetic", [False, True])
def test_an_evaluation_is_the_mean_over_its_draws(antithetic, x64, key):
    """With the draws in hand, and one row of three that is off."""
    expectation = nt.expectations.monte_carlo(
        logistic, num_particles=4, antithetic=antithetic
    )
    q, mask = family(), np.array([True, False, True])
    found = jax.jit(lambda key: expectation.evaluate(q, X, Y, rng_key=key, mask=mask))(
        key
    )
    draws = np.asarray(
        nt.gaussian.families.family_of(q).sample(key, q, (2 if antithetic else 4,))
    )
    draws = np.concatenate([draws, 2 * LOC - draws]) if antithetic else draws
    margin = (Y * (X @ draws.T).T)[:, mask]
    p = 1 / (1 + np.exp(margin))
    np.testing.assert_allclose(
        found.expected, np.log1p(np.exp(-margin)).sum(axis=1).mean(), rtol=1e-12
    )
    np.testing.assert_allclose(
        found.grad_loc, -((p * Y[mask]) @ X[mask]).mean(axis=0), rtol=1e-12
    )
    np.testing.assert_allclose(
        found.grad_var, 0.5 * ((p * (1 - p)) @ X[mask] ** 2).mean(axis=0), rtol=1e-12
    )
    at_mean = np.log1p(np.exp(-(Y * (X @ LOC))[mask])).sum()
    np.testing.assert_allclose(found.at_mean, at_mean, rtol=1e-12)


def test_at_a_kink_a_point_has_the_mean_of_both_slopes(key):
    expectation = nt.expectations.monte_carlo(
        lambda theta, y: jnp.abs(theta[0] - y) + jnp.maximum(theta[0] - y, 0.0)
    )
    point = nt.gaussian.families.MeanField(jnp.array([2.0]), jnp.zeros(1))
    found = jax.jit(
        lambda y: expectation.evaluate(point, y, rng_key=key, curvature="none")
    )(2.0)
    np.testing.assert_allclose(found.grad_loc, [0.5], rtol=1e-5)
    np.testing.assert_allclose(found.expected, 0.0, atol=1e-4)
    assert not np.any(found.grad_var)


def test_fisher_of_a_piecewise_linear_loss(x64, key):
    num_keys = 2000
    expectation = nt.expectations.monte_carlo(hinge)
    evaluate = jax.vmap(
        lambda k: expectation.evaluate(
            family(), jnp.asarray(X), jnp.asarray(Y), rng_key=k, curvature="fisher"
        )
    )
    draws = np.asarray(jax.jit(evaluate)(jax.random.split(key, num_keys)).grad_var)
    loss, slope, kinks = oracles.LINEAR_LOSSES["hinge"]
    exact = oracles.expected_linear_loss(loss, slope, LOC, SCALE, X, Y, kinks)
    error = np.std(draws, 0, ddof=1) / np.sqrt(num_keys)
    assert np.all(np.abs(np.mean(draws, 0) - exact["fisher"]) < 5 * error)


@pytest.mark.full
def test_one_particle_has_the_exact_curvature_of_a_quadratic_loss(x64, key):
    expectation = nt.expectations.monte_carlo(half_squared)
    x, y = jnp.asarray(X), jnp.asarray(Y)
    exact = 0.5 * (X**2).sum(0)
    reparameterised = []
    for k in jax.random.split(key, 3):
        ours = expectation.evaluate(family(), x, y, rng_key=k)
        np.testing.assert_allclose(ours.grad_var, exact, rtol=1e-13)

        def value(scale, k=k):
            return expectation.evaluate(family(scale=scale), x, y, rng_key=k).expected

        reparameterised.append(jax.grad(value)(jnp.asarray(SCALE)) / (2 * SCALE))
    assert np.abs(np.array(reparameterised) - exact).max() > 0.1


def test_a_point_is_the_loss_and_its_derivatives(x64, key):
    ours = jax.jit(nt.expectations.monte_carlo(logistic).evaluate)(
        family(scale=np.zeros(D)), X, Y, rng_key=key
    )
    p = oracles.sigmoid(-Y * (X @ LOC))
    np.testing.assert_allclose(
        ours.expected, oracles.softplus(-Y * (X @ LOC)).sum(), rtol=1e-13
    )
    assert ours.expected == ours.at_mean
    np.testing.assert_allclose(ours.grad_loc, -(Y * p) @ X, rtol=1e-12)
    np.testing.assert_allclose(ours.grad_var, 0.5 * (p * (1 - p)) @ X**2, rtol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
def test_losses_of_a_batch_are_summed(x64, key, curvature):
    expectation = nt.expectations.monte_carlo(logistic, num_particles=2)

    def evaluate(x, y):
        return expectation.evaluate(
            family(), jnp.asarray(x), jnp.asarray(y), rng_key=key, curvature=curvature
        )

    batch = evaluate(X, Y)
    rows = [evaluate(x, y) for x, y in zip(X, Y, strict=True)]
    for field in batch._fields:
        # One key, so the rows share the draw of the batch.
        total = sum(getattr(row, field) for row in rows)
        np.testing.assert_allclose(getattr(batch, field), total, rtol=1e-12)


@pytest.mark.full
def test_float32(key):
    ours = nt.expectations.monte_carlo(logistic).evaluate(
        family(dtype=jnp.float32),
        jnp.asarray(X, jnp.float32),
        jnp.asarray(Y, jnp.float32),
        rng_key=key,
    )
    assert {leaf.dtype for leaf in ours} == {jnp.dtype("float32")}
    assert all(np.all(np.isfinite(leaf)) for leaf in ours)


def test_memory_budget_changes_the_chunks_only(call, x64, key):
    data = (family(), jnp.asarray(X), jnp.asarray(Y))
    full = jax.jit(nt.expectations.monte_carlo(logistic).evaluate)(*data, rng_key=key)
    # One column: two vectors of d and twelve numbers of data, in float64.
    column = 8 * (2 * D + X.size + Y.size)
    one_column = nt.expectations.monte_carlo(logistic, memory_budget=column)
    chunked = jax.jit(one_column.evaluate)(*data, rng_key=key)
    np.testing.assert_allclose(chunked.grad_var, full.grad_var, rtol=1e-13)
    less = nt.expectations.monte_carlo(logistic, memory_budget=column - 1)
    with pytest.raises(
        ValueError,
        match=r"^one column.*memory_budget = 143.*fisher.*gauss_hermite.*smaller batches",
    ):
        call(less.evaluate, *data, rng_key=key)


@pytest.mark.full
def test_the_exact_hessian_stops_at_dimension_1000(key):
    q = family(np.zeros(1001), np.ones(1001), jnp.float32)
    x, y = jnp.ones(1001, jnp.float32), jnp.float32(1.0)
    expectation = nt.expectations.monte_carlo(logistic)
    with pytest.raises(
        ValueError, match=r"d <= 1000, got d = 1001.*fisher.*predictor.*gauss_hermite"
    ):
        expectation.evaluate(q, x, y, rng_key=key)
    assert expectation.evaluate(
        q, x, y, rng_key=key, curvature="fisher"
    ).grad_var.shape == (1001,)


def test_a_piecewise_linear_loss_has_no_hessian(call, key):
    data = (family(), jnp.asarray(X), jnp.asarray(Y))
    with pytest.raises(
        ValueError,
        match=r"piecewise linear.*fisher.*predictor.*gauss_hermite.*a closed form",
    ):
        call(nt.expectations.monte_carlo(hinge).evaluate, *data, rng_key=key)
    call(nt.expectations.monte_carlo(half_squared).evaluate, *data, rng_key=key)


def test_arguments(key):
    for num_particles in (0, -1):
        with pytest.raises(
            ValueError,
            match=f"num_particles must be an integer of at least 1, got {num_particles}",
        ):
            nt.expectations.monte_carlo(logistic, num_particles=num_particles)
    with pytest.raises(
        ValueError, match=r"predictor is a site of a model.*with a bare loss"
    ):
        nt.expectations.monte_carlo(logistic, predictor="eta")
    with pytest.raises(TypeError, match=r"needs a model.*for a bare stream"):
        nt.expectations.monte_carlo().evaluate(family(), X, Y, rng_key=key)
    expectation = nt.expectations.monte_carlo(logistic)
    with pytest.raises(ValueError, match="rng_key"):
        expectation.evaluate(family(), jnp.asarray(X), jnp.asarray(Y))
    rule = nt.online.sva(0.1)
    with pytest.raises(ValueError, match="rng_key"):
        nt.online.update(
            rule, expectation, rule.init(family()), jnp.asarray(X[0]), jnp.asarray(Y[0])
        )
    with pytest.raises(ValueError, match="loss must return a scalar for each datum"):
        nt.expectations.monte_carlo(lambda theta, x, y: x * theta).evaluate(
            family(), jnp.asarray(X), jnp.asarray(Y), rng_key=key
        )


def gaussian(name):
    """A q with correlations, its mean and covariance."""
    if name == "FullRank":
        factor = np.array([[0.3, 0.0, 0.0], [0.2, 0.4, 0.0], [-0.1, 0.1, 0.5]])
        return nt.gaussian.families.FullRank(
            jnp.asarray(LOC), jnp.asarray(factor)
        ), factor @ factor.T
    columns = np.array([[1.0], [-2.0], [0.5]])
    q = nt.gaussian.families.LowRank(
        jnp.asarray(LOC), jnp.asarray(SCALE**-2), jnp.asarray(columns)
    )
    return q, np.linalg.inv(np.diag(SCALE**-2) + columns @ columns.T)


@pytest.mark.parametrize(
    ("name", "curvature"),
    tiered(
        [("FullRank", "hessian"), ("FullRank", "fisher"), ("LowRank", "fisher")],
        unit=[("FullRank", "hessian")],
    ),
)
def test_unbiased_on_the_other_families(x64, key, name, curvature):
    q, covariance = gaussian(name)
    expectation = nt.expectations.monte_carlo(logistic, num_particles=2)
    mask, kept = jnp.asarray([True, False, True]), [0, 2]

    @jax.jit
    @jax.vmap
    def evaluate(k):
        e = expectation.evaluate(
            q, jnp.asarray(X), jnp.asarray(Y), rng_key=k, curvature=curvature, mask=mask
        )
        return e._replace(
            grad_var=e.grad_var.dense() if curvature == "fisher" else e.grad_var
        )

    num_keys = 2000
    evaluations = evaluate(jax.random.split(key, num_keys))
    loss, slope, _ = oracles.LINEAR_LOSSES["logistic"]
    exact = oracles.expected_full_loss(loss, slope, LOC, covariance, X[kept], Y[kept])
    if curvature == "fisher":
        exact["grad_var"] = exact["fisher"]
    np.testing.assert_allclose(evaluations.at_mean, exact["at_mean"], rtol=1e-13)
    for field in ("expected", "grad_loc", "grad_var"):
        draws = np.asarray(getattr(evaluations, field))
        error = draws.std(0, ddof=1) / np.sqrt(num_keys)
        assert np.all(np.abs(draws.mean(0) - exact[field]) < 5 * error), field
        assert np.all(error > 0)


def test_one_particle_has_the_exact_hessian_of_a_quadratic_loss(x64, key):
    q, _ = gaussian("FullRank")
    ours = jax.jit(nt.expectations.monte_carlo(half_squared).evaluate)(
        q, X, Y, rng_key=key
    )
    np.testing.assert_allclose(ours.grad_var, 0.5 * X.T @ X, rtol=1e-13, atol=1e-13)


def test_low_rank_takes_no_dense_hessian(call, x64, key):
    q, _ = gaussian("LowRank")
    expectation = nt.expectations.monte_carlo(logistic)
    data = (jnp.asarray(X), jnp.asarray(Y))
    with pytest.raises(
        ValueError,
        match=r"LowRank takes curvature by rows.*fisher.*predictor.*gauss_hermite",
    ):
        call(expectation.evaluate, q, *data, rng_key=key)
    fisher = call(
        partial(expectation.evaluate, curvature="fisher"), q, *data, rng_key=key
    )
    assert fisher.grad_var.x.shape == (3, D)


@pytest.mark.full
def test_particles_share_the_memory_budget(x64, key):
    data = (family(), jnp.asarray(X), jnp.asarray(Y))
    column = 8 * (2 * D + X.size + Y.size)
    four = nt.expectations.monte_carlo(
        logistic, num_particles=4, memory_budget=4 * column
    )
    assert np.all(np.isfinite(four.evaluate(*data, rng_key=key).grad_var))
    with pytest.raises(ValueError, match="memory_budget"):
        nt.expectations.monte_carlo(
            logistic, num_particles=5, memory_budget=4 * column
        ).evaluate(*data, rng_key=key)
