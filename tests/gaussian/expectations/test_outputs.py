"""Predictors with several outputs, draws of them, and linearised predictors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from conftest import tiered

import numpyro_tempered as nt
from numpyro_tempered.gaussian.expectations.base import (
    ModelLoss,
    predictor_covariance,
    root,
)

pytestmark = pytest.mark.usefixtures("strict")
ex = nt.expectations
X = np.array([[1.0, -0.6], [0.2, 0.3], [-0.7, 1.1]])
CLASSES = np.array([2.0, 0.0, 1.0])
FAMILIES = ("MeanField", "FullRank", "LowRank")


@pytest.fixture(params=["abstract", pytest.param("computed", marks=pytest.mark.full)])
def call(request):
    """By default what is refused is not computed."""
    if request.param == "abstract":
        return jax.eval_shape
    return lambda function, *args, **options: function(*args, **options)


def make(name, d):
    rng = np.random.default_rng(5)
    m, scale = jnp.asarray(rng.normal(0.0, 0.5, d)), rng.uniform(0.2, 0.6, d)
    if name == "MeanField":
        return nt.gaussian.families.MeanField(m, jnp.asarray(scale)), np.diag(scale**2)
    if name == "FullRank":
        factor = np.tril(rng.normal(0.0, 0.1, (d, d)), -1) + np.diag(scale)
        return nt.gaussian.families.FullRank(m, jnp.asarray(factor)), factor @ factor.T
    columns = rng.normal(0.0, 1.5, (d, 2))
    precision = np.diag(scale**-2) + columns @ columns.T
    return nt.gaussian.families.LowRank(
        m, jnp.asarray(scale**-2), jnp.asarray(columns)
    ), np.linalg.inv(precision)


def cross_entropy(u, y):
    return jax.nn.logsumexp(u) - jnp.sum(
        jnp.where(jnp.arange(u.shape[0], dtype=u.dtype) == y, u, 0.0)
    )


def dense(evaluation):
    grad_var = evaluation.grad_var
    return (
        grad_var.dense()
        if isinstance(grad_var, nt.gaussian.families.Rows)
        else grad_var
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_predictor_covariance(x64, family):
    q, covariance = make(family, 6)
    jacobian = np.random.default_rng(0).normal(size=(4, 3, 6))
    exact = np.einsum("nkd,de,nle->nkl", jacobian, covariance, jacobian)
    np.testing.assert_allclose(
        jax.jit(predictor_covariance)(q, jacobian), exact, rtol=1e-12, atol=1e-13
    )


def test_root_of_singular_covariances(x64):
    a = np.random.default_rng(0).normal(size=(4, 2))
    singular = a @ a.T
    cases = np.stack(
        [singular, np.zeros((4, 4)), np.eye(4), np.diag([0.0, 2.0, 0.0, 1e-30])]
    )
    with jax.debug_nans(True):
        factor = np.asarray(jax.jit(root)(cases))
        gradient = jax.jit(jax.grad(lambda c: jnp.sum(root(c))))(cases)
    np.testing.assert_allclose(
        factor @ factor.transpose(0, 2, 1), cases, rtol=1e-12, atol=1e-14
    )
    assert np.all(factor == np.tril(factor))
    assert np.all(np.isfinite(gradient))
    # What is not finite stays so, and its round is rejected.
    for bad in (np.inf, np.nan):
        assert not np.all(np.isfinite(jax.jit(root)(np.full((4, 4, 4), bad))))


@pytest.mark.full
def test_two_classes_are_the_logistic_loss(x64):
    q, _ = make("MeanField", 4)
    ours = jax.jit(ex.softmax(2, num_nodes=30).evaluate)(
        q, jnp.asarray(X), jnp.asarray([0.0, 1.0, 1.0])
    )
    logistic = ex.gauss_hermite(lambda u, y: jax.nn.softplus(-y * u), num_nodes=30)
    # The difference of the two predictors is one with the coefficients θ_0 - θ_1.
    m, scale = np.asarray(q.loc), np.asarray(q.scale)
    half = nt.gaussian.families.MeanField(
        jnp.asarray(m[:2] - m[2:]),
        jnp.asarray(np.sqrt(np.square(scale[:2]) + np.square(scale[2:]))),
    )
    theirs = jax.jit(logistic.evaluate)(
        half, jnp.asarray(X), jnp.asarray([1.0, -1.0, -1.0])
    )
    np.testing.assert_allclose(ours.expected, theirs.expected, rtol=1e-12)
    grad_loc, grad_var = np.asarray(theirs.grad_loc), np.asarray(theirs.grad_var)
    np.testing.assert_allclose(
        ours.grad_loc, np.concatenate([grad_loc, -grad_loc]), rtol=1e-11
    )
    np.testing.assert_allclose(
        ours.grad_var, np.concatenate([grad_var, grad_var]), rtol=1e-7
    )


DRAWN = {
    "softmax": ex.softmax(3, num_draws=4),
    "predictor_monte_carlo": ex.predictor_monte_carlo(
        cross_entropy, num_outputs=3, num_draws=4
    ),
}


@pytest.mark.parametrize(
    ("name", "curvature"),
    tiered(
        itertools.product(DRAWN, ["hessian", "fisher"]),
        unit=[("predictor_monte_carlo", "fisher")],
    ),
)
def test_draws_are_unbiased(x64, key, name, curvature):
    q, covariance = make("FullRank", 6)
    exact = oracles.expected_linear_outputs_loss(
        oracles.softmax_loss,
        oracles.softmax_slope,
        np.asarray(q.loc),
        covariance,
        X,
        CLASSES,
        3,
    )
    second = exact["fisher" if curvature == "fisher" else "grad_var"]
    num_keys = 400
    expectation = DRAWN[name]
    assert expectation.needs_key

    @jax.jit
    @jax.vmap
    def evaluate(k):
        e = expectation.evaluate(
            q, jnp.asarray(X), jnp.asarray(CLASSES), rng_key=k, curvature=curvature
        )
        return e.expected, e.grad_loc, e.grad_var.dense()

    draws = evaluate(jax.random.split(key, num_keys))
    for drawn, target in zip(
        map(np.asarray, draws),
        (exact["expected"], exact["grad_loc"], second),
        strict=True,
    ):
        error = np.std(drawn, 0, ddof=1) / np.sqrt(num_keys)
        assert np.all(np.abs(np.mean(drawn, 0) - target) < 5 * error + 1e-12)
        assert np.max(error) > 0


def test_what_draws_needs_a_key_beside_a_model_too():
    for draws, needs_key in (
        (ex.predictor_monte_carlo, True),
        (ex.gauss_hermite, False),
    ):
        assert (
            draws(predictor="eta", num_outputs=3).bind(two_sites()).needs_key
            == needs_key
        )


def test_the_loss_of_a_model_is_that_of_all_sites_by_row():
    theta = jnp.asarray(make("MeanField", 6)[0].loc)
    bound = ex.gauss_hermite(predictor="eta", num_outputs=3).bind(two_sites())
    losses = bound.loss(theta, jnp.asarray(X), jnp.asarray(CLASSES))
    predictors = X @ np.reshape(theta, (3, 2)).T
    # Untempered: the weights are left out.
    expected = [
        2 * float(cross_entropy(u, y)) for u, y in zip(predictors, CLASSES, strict=True)
    ]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def two_sites():
    """A model of two sites with one loss, of half the weight each."""

    def predict(theta, x, y):
        return jnp.sum(x[:, None, :] * jnp.reshape(theta, (1, 3, 2)), axis=-1)

    def given(u, theta, x, y):
        values = jax.vmap(cross_entropy)(u, y)
        return jnp.stack([values, values]), jnp.full((2, y.shape[0]), 0.5)

    def losses(theta, x, y):
        return given(predict(theta, x, y), theta, x, y)

    return ModelLoss(losses, predict, given)


@pytest.mark.parametrize("family", tiered(FAMILIES, unit=["MeanField"]))
@pytest.mark.parametrize("curvature", tiered(["hessian", "fisher"], unit=["hessian"]))
def test_a_model_with_several_outputs_and_two_sites(x64, family, curvature):
    q, _ = make(family, 6)
    x, y, model = jnp.asarray(X), jnp.asarray(CLASSES), two_sites()
    named = ex.gauss_hermite(predictor="eta", num_outputs=3, num_nodes=12)
    assert named.num_outputs == 3
    mask = jnp.asarray([True, False, True])
    bare = ex.gauss_hermite(cross_entropy, num_outputs=3, num_nodes=12)
    ours, theirs = jax.jit(
        lambda q: [
            e.evaluate(q, x, y, curvature=curvature, mask=mask)
            for e in (named.bind(model), bare)
        ]
    )(q)
    np.testing.assert_allclose(
        ours.expected, 2 * np.asarray(theirs.expected), rtol=1e-12
    )
    np.testing.assert_allclose(ours.grad_loc, theirs.grad_loc, rtol=1e-12)
    np.testing.assert_allclose(dense(ours), dense(theirs), rtol=1e-10, atol=1e-12)


@pytest.mark.full
def test_gauss_newton_of_several_outputs_by_draws_of_the_parameters(x64, key):
    # At a point every draw is the mean.
    q = nt.gaussian.families.MeanField(make("MeanField", 6)[0].loc, jnp.zeros(6))
    data, mask = (
        (jnp.asarray(X), jnp.asarray(CLASSES)),
        jnp.asarray([True, False, True]),
    )
    draws = ex.monte_carlo(predictor="eta", num_outputs=3, num_particles=2).bind(
        two_sites()
    )
    named = ex.gauss_hermite(predictor="eta", num_outputs=3, num_nodes=2).bind(
        two_sites()
    )
    ours = jax.jit(lambda q: draws.evaluate(q, *data, rng_key=key, mask=mask))(q)
    theirs = jax.jit(lambda q: named.evaluate(q, *data, mask=mask))(q)
    np.testing.assert_allclose(ours.grad_var, theirs.grad_var, rtol=1e-10)


@pytest.mark.full
def test_softmax_learns_in_a_stream(key):
    truth = jnp.asarray([[2.0, -1.0], [-1.0, 2.0], [-1.0, -1.0]])
    x = jax.random.normal(key, (300, 2))
    y = jnp.argmax(x @ truth.T, axis=-1)
    rule = nt.online.ngvi()
    prior = nt.gaussian.families.FullRank(jnp.zeros(6), jnp.eye(6))
    state, losses = nt.online.run(
        rule, ex.softmax(3, num_nodes=6), rule.init(prior), x, y
    )
    assert int(state.rejected) == 0
    assert np.mean(losses.at_mean[:50]) > 2 * np.mean(losses.at_mean[-100:])


def test_arguments(call, key):
    with pytest.raises(
        ValueError,
        match=r"20 nodes in each of 4 dimensions are 160000.*predictor_monte_carlo",
    ):
        ex.gauss_hermite(cross_entropy, num_outputs=4)
    with pytest.raises(
        ValueError, match=r"20 nodes in each of 9 dimensions.*num_draws"
    ):
        ex.softmax(10)
    for make_one in (ex.gauss_hermite, ex.predictor_monte_carlo):
        with pytest.raises(
            ValueError, match="num_outputs must be an integer of at least 1, got 0"
        ):
            make_one(cross_entropy, num_outputs=0)
    with pytest.raises(
        ValueError, match="num_classes must be an integer of at least 2"
    ):
        ex.softmax(1)
    with pytest.raises(ValueError, match="num_draws must be an integer of at least 1"):
        ex.softmax(3, num_draws=0)
    with pytest.raises(ValueError, match=r"either a loss.*value or a"):
        ex.predictor_monte_carlo(num_outputs=3)
    q = nt.gaussian.families.MeanField(jnp.zeros(6), jnp.ones(6))
    with pytest.raises(TypeError, match=r"needs a model.*for a bare stream"):
        call(
            ex.predictor_monte_carlo(num_outputs=3, predictor="eta").evaluate,
            q,
            X,
            CLASSES,
        )
    with pytest.raises(
        ValueError, match=r"softmax\(num_draws=...\) needs an rng_key.*to run or update"
    ):
        call(ex.softmax(3, num_draws=2).evaluate, q, jnp.ones(2), 0.0)
    with pytest.raises(
        ValueError,
        match=r"^expected x of shape.*3 d parameters, got \(4,\), \(\) and 6",
    ):
        call(ex.softmax(3).evaluate, q, jnp.ones(4), 0.0)
    with pytest.raises(ValueError, match=r"expected x of shape.*d parameters, got"):
        call(ex.softmax(3).evaluate, q, jnp.ones((4, 2)), jnp.zeros(3))


def test_a_piecewise_linear_loss_of_several_outputs_has_fisher_curvature_alone(call):
    def margin(u, y):
        return jnp.maximum(1.0 + u[0] - u[1], 0.0)

    q = nt.gaussian.families.MeanField(jnp.zeros(4), jnp.ones(4))
    expectation = ex.gauss_hermite(margin, num_outputs=2, num_nodes=6)
    with pytest.raises(ValueError, match=r"^the loss is.*piecewise linear.*fisher"):
        call(expectation.evaluate, q, jnp.ones(2), 0.0)
    fisher = jax.jit(
        lambda q: expectation.evaluate(q, jnp.ones(2), 0.0, curvature="fisher")
    )(q)
    assert np.all(np.asarray(fisher.grad_var) > 0)


def network(theta, x):
    hidden = jnp.tanh(
        jnp.sum(jnp.reshape(theta[:6], (3, 2)) * x[None, :], axis=-1) + theta[6:9]
    )
    return jnp.sum(theta[9:12] * hidden)


@pytest.mark.parametrize("family", tiered(FAMILIES, unit=["FullRank"]))
def test_a_linearised_network_is_the_extended_kalman_filter(x64, family):
    q, covariance = make(family, 12)
    noise = 0.7
    expectation = ex.linearised(network, ex.squared(noise_scale=noise))
    x, y = jnp.asarray(X[0]), 0.8
    f, jacobian = (
        np.asarray(a) for a in jax.jit(jax.value_and_grad(network))(q.loc, x)
    )
    ours = jax.jit(expectation.evaluate)(q, x, y)
    variance = jacobian @ covariance @ jacobian
    np.testing.assert_allclose(
        ours.expected,
        ((y - f) ** 2 + variance) / (2 * noise**2) + np.log(noise * np.sqrt(2 * np.pi)),
        rtol=1e-12,
    )
    if family == "FullRank":
        rule = nt.online.ngvi()
        after, _ = nt.online.update(rule, expectation, rule.init(q), x, y)
        # Kalman's gain, from the textbook.
        gain = covariance @ jacobian / (variance + noise**2)
        np.testing.assert_allclose(
            after.posterior.loc, np.asarray(q.loc) + gain * (y - f), rtol=1e-10
        )
        left = np.asarray(after.posterior.factor)
        np.testing.assert_allclose(
            left @ left.T,
            covariance - np.outer(gain, jacobian @ covariance),
            atol=1e-12,
        )


@pytest.mark.slow
def test_a_linearised_network_with_classes(x64):
    def classes(theta, x):
        return jnp.stack(
            [network(theta, x), network(theta[::-1], x), jnp.zeros((), theta.dtype)]
        )

    q, covariance = make("FullRank", 12)
    expectation = ex.linearised(classes, ex.softmax(3, num_nodes=30))
    ours = jax.jit(expectation.evaluate)(q, jnp.asarray(X), jnp.asarray(CLASSES))
    expected, grad_loc, grad_var = 0.0, 0.0, 0.0
    for x, y in zip(X, CLASSES, strict=True):
        mean = np.asarray(classes(q.loc, jnp.asarray(x)))
        jacobian = np.asarray(jax.jacrev(classes)(q.loc, jnp.asarray(x)))
        # The third predictor is no random variable: the quadrature is over the other two.
        value, first, second, _ = oracles.expected_outputs_loss(
            lambda v, y=y: oracles.softmax_loss(
                np.concatenate([v, 0 * v[..., :1]], -1), y
            ),
            lambda v, y=y: oracles.softmax_slope(
                np.concatenate([v, 0 * v[..., :1]], -1), y
            )[..., :2],
            mean[:2],
            jacobian[:2] @ covariance @ jacobian[:2].T,
        )
        expected = expected + value
        grad_loc = grad_loc + jacobian[:2].T @ first
        grad_var = grad_var + jacobian[:2].T @ second @ jacobian[:2]
    np.testing.assert_allclose(ours.expected, expected, rtol=1e-8)
    np.testing.assert_allclose(ours.grad_loc, grad_loc, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(dense(ours), grad_var, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_linearised_takes_a_loss_of_a_predictor(key):
    for wrong in (
        ex.monte_carlo(lambda theta, x: jnp.sum(theta)),
        ex.gauss_hermite(predictor="eta"),
        cross_entropy,
    ):
        with pytest.raises(
            TypeError, match="linearised needs the expectation of a predictor's loss"
        ):
            ex.linearised(network, wrong)
    q = nt.gaussian.families.MeanField(jnp.zeros(12), jnp.ones(12))
    with pytest.raises(
        ValueError, match=r"predict must return shape \(3,\) for one datum, got \(\)"
    ):
        ex.linearised(network, ex.softmax(3)).evaluate(q, jnp.ones(2), 0.0)
    with pytest.raises(
        ValueError,
        match=r"^expected x of shape \(n, f\) with y of shape \(n, ...\), got",
    ):
        ex.linearised(network, ex.squared()).evaluate(q, jnp.ones((3, 2)), jnp.ones(2))
    draws = ex.linearised(
        lambda t, x: jnp.stack([t[0], t[1]]), ex.softmax(2, num_draws=3)
    )
    assert draws.needs_key
    assert np.isfinite(draws.evaluate(q, jnp.ones(2), 0.0, rng_key=key).expected)
