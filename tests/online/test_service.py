"""Services: rounds and predictions one at a time, beside the drivers, NumPy's formulas and quadrature."""

import threading
from decimal import Decimal
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from conftest import enable_x64
from scipy import integrate, special, stats

import numpyro_tempered as nt
from numpyro_tempered.core.packing import pack, packing_of, unpack

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
SIGNS = np.where(RNG.random(40) < special.expit(X @ [1.0, -2.0, 0.5]), 1.0, -1.0)
ROOT = np.array([[1.0, 0.0, 0.0], [0.4, 0.7, 0.0], [-0.3, 0.2, 0.5]])
MEAN = np.array([0.5, -1.0, 0.2])


def mean_field():
    return nt.gaussian.families.MeanField(jnp.zeros(3), jnp.ones(3))


def full_rank():
    return nt.gaussian.families.FullRank(jnp.zeros(3), jnp.eye(3))


def correlated():
    return nt.gaussian.families.FullRank(
        jnp.asarray(MEAN, float), jnp.asarray(ROOT, float)
    )


def equal(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(one, other) for one, other in leaves)


def assert_near(state, expected):
    """Equal to some units in the last place: another version of XLA may round otherwise in another program."""
    for one, other in zip(
        jax.tree.leaves(state), jax.tree.leaves(expected), strict=True
    ):
        one, other = np.asarray(one), np.asarray(other)
        if one.dtype.kind != "f":
            np.testing.assert_array_equal(one, other)
            continue
        atol = 64 * np.finfo(one.dtype).eps * max(1.0, np.max(np.abs(other)))
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def service():
    rule = nt.online.rvga()
    return nt.online.Service(
        rule, nt.expectations.logistic(), rule.init(full_rank()), X[0], 1.0, rng_key=KEY
    )


COMBINATIONS = {
    "rvga, logistic": (nt.online.rvga, nt.expectations.logistic, full_rank),
    "ngvi, hinge": (lambda: nt.online.ngvi(0.1), nt.expectations.hinge, mean_field),
    "aggregate": (
        lambda: nt.online.aggregate(
            nt.online.grid(nt.online.ngvi, step_size=[0.5, 1.0])
        ),
        nt.expectations.logistic,
        mean_field,
    ),
    "clipped, standardised": (
        lambda: nt.online.standardise(nt.online.clip(nt.online.ngvi(), 3.0)),
        nt.expectations.squared,
        mean_field,
    ),
    "drawn": (
        nt.online.ngvi,
        lambda: nt.expectations.monte_carlo(loss_of_theta),
        mean_field,
    ),
    "large": (
        nt.online.ngvi,
        nt.expectations.squared,
        lambda: nt.gaussian.families.FullRank(jnp.zeros(70), jnp.eye(70)),
    ),
}


def loss_of_theta(theta, x, y):
    return jnp.log1p(jnp.exp(-y * jnp.dot(x, theta)))


@pytest.mark.full
@pytest.mark.parametrize("name", COMBINATIONS)
def test_rounds_are_those_of_a_run(name):
    make_rule, make_loss, make_prior = COMBINATIONS[name]
    rule, loss, prior = make_rule(), make_loss(), make_prior()
    x = X if prior.loc.shape == (3,) else np.tile(X, (1, 24))[:, :70]
    y = SIGNS.copy()
    x = x.copy()
    x[7, 1] = np.nan
    service = nt.online.Service(rule, loss, rule.init(prior), x[0], y[0], rng_key=KEY)
    losses = [service.learn(*datum) for datum in zip(x, y, strict=True)]
    with pytest.warns(nt.online.StreamWarning) if name else None:
        state, expected = nt.online.run(
            rule, loss, rule.init(prior), jnp.asarray(x), jnp.asarray(y), rng_key=KEY
        )
    assert_near(service.state, state)
    np.testing.assert_allclose(
        [each.at_mean for each in losses], np.asarray(expected.at_mean), rtol=1e-5
    )
    assert int(service.state.rejected) == 1


@pytest.mark.full
def test_double_precision():
    with enable_x64():
        rule, loss = nt.online.rvga(), nt.expectations.logistic()
        service = nt.online.Service(rule, loss, rule.init(full_rank()), X[0], 1.0)
        state = rule.init(full_rank())
        for x, y in zip(X, SIGNS, strict=True):
            service.learn(x, y)
            state, _ = nt.online.update(
                rule, loss, state, jnp.asarray(x), jnp.asarray(y)
            )
        assert service.state.posterior.loc.dtype == jnp.float64
        assert_near(service.state, state)


def test_lists_numbers_and_integers_are_data(service):
    before = service.state
    service.learn(X[0].tolist(), 1)
    by_list = service.state
    service.load(before)
    service.learn(X[0], np.float64(1.0))
    assert equal(service.state, by_list)
    service.load(before)


def test_memory_of_the_caller_may_change_at_once(service):
    before, buffer = service.state, np.empty(3)
    for x, y in zip(X, SIGNS, strict=True):
        buffer[:] = x
        service.learn(buffer, y)
        buffer[:] = np.nan
    after = service.state
    service.load(before)
    for x, y in zip(X, SIGNS, strict=True):
        service.learn(x, y)
    assert equal(service.state, after)
    assert int(after.rejected) == int(before.rejected)


def test_a_state_is_a_copy(service):
    before = service.state
    kept = jax.tree.map(np.array, before)
    buffers = service._buffers
    service.learn(X[1], 1.0)
    assert equal(before, kept)
    # In place: the old arrays are no more.
    assert all(buffer.is_deleted() for buffer in buffers)
    service.load(before)
    assert equal(service.state, kept)


def test_it_goes_on_from_a_file(service, tmp_path):
    nt.online.save(tmp_path / "state.npz", service.state)
    before = service.state
    service.learn(X[2], -1.0)
    once = service.state
    service.load(nt.online.restore(tmp_path / "state.npz", before))
    service.learn(X[2], -1.0)
    assert equal(service.state, once)


def test_equal_parts_compile_nothing(service):
    programs = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: (
            programs.append(name) if name.endswith("backend_compile_duration") else None
        )
    )
    try:
        rule = nt.online.rvga()
        other = nt.online.Service(
            rule,
            nt.expectations.logistic(),
            rule.init(full_rank()),
            X[0],
            1.0,
            rng_key=jax.random.key(5),
        )
        service.predict(X[0])
        programs.clear()
        for y in (1.0, -1, [1.0], np.float32(1.0)):
            other.learn(X[0], y if np.ndim(y) == 0 else y[0])
        other.predict(X[0].tolist())
        assert programs == []
    finally:
        jax.monitoring.clear_event_listeners()


def test_what_is_wrong_leaves_the_state(service):
    before = service.state
    wrong = [
        (
            (X[0][:2], 1.0),
            ValueError,
            r"array 0 must have shape \(3,\), as at the start, got \(2,\)",
        ),
        ((X[:1], 1.0), ValueError, r"got \(1, 3\)"),
        ((np.ones(1), 1.0), ValueError, r"got \(1,\)"),
        ((X[0],), TypeError, r"^the call.*takes 2 arrays, as at the start, got 1"),
        (
            (X[0], "one"),
            TypeError,
            "array 1 must be real numbers, got dtype <U3, such as 'one'. Pass codes",
        ),
        (
            (["1", "2", "3"], 1.0),
            TypeError,
            r"array 0 must be real numbers, got dtype <U1.*.cat.codes, or",
        ),
        (
            (X[0] + 1j, 1.0),
            TypeError,
            r"array 0 must be real numbers, got dtype complex128.*of their own",
        ),
        (
            (pd.date_range("2026-01-01", periods=3), 1.0),
            TypeError,
            r"array 0 must be .* Pass numbers, such as days.*since the first date",
        ),
        (
            ([1.0, [2.0], 3.0], 1.0),
            TypeError,
            "array 0 must be real numbers, got lists of different lengths",
        ),
        (
            ([1.0, object(), 3.0], 1.0),
            TypeError,
            "array 0 must be real numbers, got dtype object",
        ),
        (
            (X[0], 0.0),
            ValueError,
            r"logistic needs labels y in \{-1, 1\}, got 0\.0; turn labels in \{0, 1\}",
        ),
    ]
    for data, kind, message in wrong:
        with pytest.raises(kind, match=message):
            service.learn(*data)
        if "array 0 must be real" in message:
            with pytest.raises(kind, match=message):
                service.predict(data[0])
    with pytest.raises(TypeError, match=r"^the service.*predicts from 1 arrays, got 2"):
        service.predict(X[0], 1.0)
    assert equal(service.state, before)
    with pytest.raises(
        ValueError,
        match=r"not of the service's rule, family and sizes.*OnlineState of length",
    ):
        service.load(nt.online.rvga().init(mean_field()))


EXAMPLES = {
    "float64": [1.0, 0.0, 0.0],
    "int64": [1, 0, 0],
    "bool": np.array([True, False, False]),
    "uint8": np.array([1, 0, 0], np.uint8),
    "float16": np.array([1, 0, 0], np.float16),
    "objects": pd.Series([1, 0, 0], dtype="Int8"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_datum_at_the_start_does_not_decide_how_rows_are_read(name):
    rule, loss = nt.online.rvga(), nt.expectations.squared()
    service = nt.online.Service(rule, loss, rule.init(full_rank()), EXAMPLES[name], 1)
    row = [1.0, 0.5, 0.501]
    service.learn(row, 0.7)
    # Noise of variance 1/2: m = 2 y x / (1 + 2 |x|²).
    mean = 1.4 * np.array(row) / (1 + 2 * np.dot(row, row))
    np.testing.assert_allclose(service.state.posterior.loc, mean, rtol=1e-6)
    assert service.predict(row).mean == pytest.approx(np.dot(row, mean), rel=1e-6)


def test_rows_of_all_kinds_are_read_alike(service):
    before = service.state
    row = [1.0, -2.0, 3.0]
    service.learn(row, 1.0)
    expected, predicted = service.state, service.predict(row)
    kinds = [
        np.array(row, np.int8),
        np.array(row, object),
        pd.Series(row, dtype="Int64"),
        pd.DataFrame({"a": [1], "b": [-2.0], "c": [3]}).iloc[0],
        np.ma.masked_invalid(row),
        jnp.array(row, int),
        tuple(row),
        [Decimal(1), Fraction(-2), np.float16(3)],
    ]
    for kind in kinds:
        service.load(before)
        service.learn(kind, np.int64(1))
        assert equal(service.state, expected)
        assert service.predict(kind) == predicted
    for missing in (
        [1.0, None, 3.0],
        pd.Series([1, None, 3], dtype="Int64"),
        np.ma.masked_equal(row, -2.0),
    ):
        service.load(before)
        service.learn(missing, 1.0)
        assert int(service.state.rejected) == int(before.rejected) + 1
        assert np.isnan(service.predict(missing).mean)
    service.load(before)


def squared_of_group(theta, group, y):
    return jnp.square(y - theta[group])


def test_arrays_that_the_loss_needs_as_integers_refuse_fractions():
    rule, loss = nt.online.ngvi(), nt.expectations.monte_carlo(squared_of_group)
    service = nt.online.Service(rule, loss, rule.init(mean_field()), 1, 1, rng_key=KEY)
    # The outcome was an integer too, which the loss does not need.
    service.learn(2.0, 1.5)
    before = service.state
    assert np.count_nonzero(before.posterior.loc) == 1
    for group in (1.5, None, 2**70, -0.5):
        with pytest.raises(
            ValueError,
            match=r"array 0 must hold numbers of dtype int\d\d, as at the start and as the loss needs them",
        ):
            service.learn(group, 1.5)
    assert equal(service.state, before)


def test_one_row_and_a_batch_of_one_have_answers_of_their_own():
    rule = nt.online.rvga()
    prior = nt.gaussian.families.FullRank(jnp.zeros(2), jnp.eye(2))
    service = nt.online.Service(
        rule, nt.expectations.squared(), rule.init(prior), [0.0, 0.0], 1.0
    )
    for _ in range(2):
        assert service.predict([3.0, 4.0]).variance == 25.0
        np.testing.assert_array_equal(service.predict([[3.0, 4.0]]).variance, [25.0])


def test_outcomes_beside_the_labels_are_refused_where_labels_are_given():
    rule, loss = nt.online.ngvi(0.1), nt.expectations.squared()
    options = ({}, {"labels": (-1, 0.1, 1)})
    of_any, of_labels = (
        nt.online.Service(rule, loss, rule.init(mean_field()), X[0], 0, **o)
        for o in options
    )
    of_any.learn(X[0], 0.3)
    for y in (0.1, np.float32(0.1), np.nan, -1):
        of_labels.learn(X[0], y)
    before = of_labels.state
    with pytest.raises(
        ValueError,
        match=r"outcomes must be one of labels = \(-1.0, 0.1, 1.0\), got 0.0",
    ):
        of_labels.learn(X[0], 0)
    assert equal(of_labels.state, before)
    assert (int(before.count), int(before.rejected)) == (3, 1)


def test_labels_that_the_loss_does_not_admit_are_refused_each_time():
    rule, hinge = nt.online.ngvi(0.1), nt.expectations.hinge()
    service = nt.online.Service(rule, hinge, rule.init(mean_field()), X[0], 1.0)
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=r"hinge needs labels y in \{-1, 1\}, got 0\.0.*turn labels in",
        ):
            service.learn(X[0], 0)
    service.learn(X[0], -1)
    # A missing outcome is a rejected round.
    service.learn(X[0], np.nan)
    service.learn(X[0], None)
    state = service.state
    assert (int(state.count), int(state.rejected)) == (1, 2)


def test_a_start_that_is_wrong_is_refused():
    rule = nt.online.rvga()
    with pytest.raises(ValueError, match=r"expected x of shape.*parameters, got"):
        nt.online.Service(
            rule, nt.expectations.logistic(), rule.init(full_rank()), X[0][:2], 1.0
        )
    with pytest.raises(
        TypeError, match=r"state must be that of a run.*expectation, state"
    ):
        nt.online.Service(rule, nt.expectations.logistic(), full_rank(), X[0], 1.0)
    with pytest.raises(
        ValueError, match="labels must be two or more different numbers"
    ):
        nt.online.Service(
            rule,
            nt.expectations.logistic(),
            rule.init(full_rank()),
            X[0],
            1.0,
            labels=(1.0, 1.0),
        )
    with pytest.raises(TypeError, match=r"^a service holds a.*outside of jit, vmap"):
        jax.jit(
            lambda state: (
                nt.online.Service(
                    rule, nt.expectations.logistic(), state, X[0], 1.0
                ).state
            )
        )(rule.init(full_rank()))


@pytest.mark.full
def test_threads_take_turns():
    rule = nt.online.ngvi()
    service = nt.online.Service(
        rule, nt.expectations.squared(), rule.init(mean_field()), X[0], 1.0, rng_key=KEY
    )

    def work():
        for x in X:
            service.learn(x, 0.5)
            service.predict(x)
            service.draw(x)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(service.state.count) == 8 * len(X)
    # The order does not matter to a quadratic loss of independent coordinates' precisions.
    precision = 1.0 + 8 * 2.0 * np.sum(X**2, axis=0)
    np.testing.assert_allclose(
        service.state.posterior.scale, precision**-0.5, rtol=1e-4
    )


@pytest.mark.parametrize(
    "make_q",
    [
        correlated,
        lambda: nt.gaussian.families.MeanField(jnp.ones(3), jnp.arange(1.0, 4.0)),
    ],
)
def test_predictors_have_their_mean_and_variance(make_q):
    q = make_q()
    covariance = (
        ROOT @ ROOT.T
        if hasattr(q, "root") or len(jnp.shape(q[1])) == 2
        else np.diag([1.0, 4.0, 9.0])
    )
    mean = np.asarray(q.loc, float)
    prediction = nt.online.predict(nt.expectations.squared(), q, X[:5])
    np.testing.assert_allclose(prediction.mean, X[:5] @ mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        prediction.variance,
        np.einsum("ni,ij,nj->n", X[:5], covariance, X[:5]),
        rtol=1e-5,
    )
    one = nt.online.predict(nt.expectations.squared(), q, X[0])
    assert one.mean.shape == one.variance.shape == ()
    assert float(one.variance) == pytest.approx(float(prediction.variance[0]), rel=1e-6)


def test_a_service_predicts_as_the_function_does(service):
    state = service.state
    for inputs in (X[0], X[:4]):
        prediction, expected = (
            service.predict(inputs),
            nt.online.predict(nt.expectations.logistic(), state, inputs),
        )
        np.testing.assert_allclose(prediction.mean, expected.mean, rtol=1e-6)
        np.testing.assert_allclose(prediction.variance, expected.variance, rtol=1e-6)
        probabilities = service.class_probabilities(inputs)
        np.testing.assert_allclose(
            probabilities,
            nt.online.class_probabilities(nt.expectations.logistic(), state, inputs),
            rtol=1e-5,
        )
    assert isinstance(service.predict(X[0]).mean, float)


@pytest.mark.parametrize("intercept", [pytest.param(None, marks=pytest.mark.full), 0])
def test_standardised_features_are_in_their_own_units(intercept):
    rule, loss = (
        nt.online.standardise(nt.online.rvga(), intercept=intercept),
        nt.expectations.squared(),
    )
    x = X * [1.0, 1e4, 1e-4] + [0.0, 1e5, 0.0]
    x[:, 0] = 1.0
    service = nt.online.Service(
        rule, loss, rule.init(full_rank()), x[0], 1.0, rng_key=KEY
    )
    for row, y in zip(x, SIGNS, strict=True):
        prediction, state = service.predict(row), service.state
        losses = service.learn(row, y)
        # The predictor of the round itself.
        assert losses.at_mean == pytest.approx(
            (y - prediction.mean) ** 2, rel=1e-4, abs=1e-6
        )
        assert losses.expected - losses.at_mean == pytest.approx(
            prediction.variance, rel=1e-3, abs=1e-5
        )
    many = nt.online.predict(loss, state, x)
    assert many.mean.shape == (40,)
    assert float(many.mean[-1]) == pytest.approx(prediction.mean, rel=1e-4)
    original = nt.online.predict(loss, nt.online.original_scale(state), x[:-1])
    # Statistics with and without the row.
    np.testing.assert_allclose(many.mean[:-1], original.mean, atol=0.2)


def test_experts_that_standardise_do_not_predict():
    experts = nt.online.grid(
        lambda step_size: nt.online.standardise(nt.online.ngvi(step_size)),
        step_size=[0.5, 1.0],
    )
    rule = nt.online.aggregate(experts)
    with pytest.raises(
        TypeError, match=r"^experts that standardise have.*standardise\(aggregate"
    ):
        nt.online.predict(nt.expectations.squared(), rule.init(mean_field()), X[0])


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 40.0])
def test_probabilities_are_averages_of_the_likelihood(scale):
    q = nt.gaussian.families.MeanField(jnp.array([0.7]), jnp.array([scale]))

    def expected(likelihood):
        if scale == 0.0:
            return likelihood(0.7)
        nodes = [u for u in (-1.0, 0.0, 1.0) if abs(u - 0.7) < 10 * scale]
        inner = integrate.quad(
            lambda u: likelihood(u) * stats.norm.pdf(u, 0.7, scale),
            0.7 - 10 * scale,
            0.7 + 10 * scale,
            points=nodes,
            limit=200,
        )
        return inner[0]

    found = nt.online.class_probabilities(nt.expectations.logistic(), q, jnp.ones(1))
    np.testing.assert_allclose(
        found, [1 - expected(special.expit), expected(special.expit)], atol=2e-5
    )
    hinge = nt.online.class_probabilities(nt.expectations.hinge(), q, jnp.ones(1))
    ratio = expected(lambda u: 1 / (1 + np.exp(max(0, 1 - u) - max(0, 1 + u))))
    np.testing.assert_allclose(hinge[1], ratio, atol=2e-4)


@pytest.mark.full
def test_probabilities_of_several_classes():
    q = nt.gaussian.families.FullRank(jnp.arange(6.0) / 6, 0.8 * jnp.eye(6))
    found = nt.online.class_probabilities(
        nt.expectations.softmax(3), q, X[:2, :2], labels=(0, 1, 2)
    )
    draws = np.random.default_rng(1).normal(size=(200_000, 6)) * 0.8 + np.arange(6) / 6
    u = np.einsum("skd,nd->nsk", draws.reshape(-1, 3, 2), X[:2, :2])
    np.testing.assert_allclose(found, special.softmax(u, axis=-1).mean(1), atol=0.01)
    np.testing.assert_allclose(found.sum(-1), 1.0, rtol=1e-5)


def test_labels_of_another_loss_are_refused():
    rule = nt.online.ngvi(0.1)
    state = rule.init(mean_field())
    service = nt.online.Service(
        rule, nt.expectations.hinge(), state, X[0], 1.0, labels=(0, 1)
    )
    with pytest.raises(
        ValueError, match=r"hinge needs labels y in \{-1, 1\}, got 0.*turn labels in"
    ):
        service.class_probabilities(X[0])
    with pytest.raises(
        ValueError, match=r"hinge needs labels y in \{-1, 1\}, got 0.*turn labels in"
    ):
        nt.online.class_probabilities(
            nt.expectations.hinge(), state, X[0], labels=(0, 1)
        )
    with pytest.raises(ValueError, match="needs labels y in"):
        nt.online.class_probabilities(
            nt.expectations.softmax(3), rule.init(mean_field()), X[0, :1]
        )


def test_draws_are_those_of_the_posterior():
    draws = nt.online.sample_predictor(
        KEY, nt.expectations.squared(), correlated(), X[:2], num_samples=20_000
    )
    covariance = X[:2] @ ROOT @ ROOT.T @ X[:2].T
    np.testing.assert_allclose(
        draws.mean(0), X[:2] @ MEAN, atol=5 * np.sqrt(covariance.max() / 20_000)
    )
    # One draw of the parameters for both rows.
    np.testing.assert_allclose(
        np.cov(np.asarray(draws).T), covariance, atol=0.1 * covariance.max()
    )


def test_draws_of_a_service_differ_and_need_a_key(service):
    assert service.draw(X[:3]).shape == (3,)
    assert service.draw(X[0]) != service.draw(X[0])
    rule = nt.online.ngvi()
    without = nt.online.Service(
        rule, nt.expectations.squared(), rule.init(mean_field()), X[0], 1.0
    )
    with pytest.raises(
        ValueError, match=r"^a service that draws.*start it with rng_key="
    ):
        without.draw(X[0])


def test_a_loss_without_a_predictor_does_not_predict():
    with pytest.raises(
        TypeError, match=r"only a loss of a predictor predicts.*draws them"
    ):
        nt.online.predict(
            nt.expectations.monte_carlo(loss_of_theta), mean_field(), X[0]
        )
    with pytest.raises(
        TypeError,
        match=r"state must be that of a run, or a Gaussian.*an array of shape",
    ):
        nt.online.predict(nt.expectations.squared(), X[0], X[0])


def model(x, y=None):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    eta = numpyro.deterministic("eta", x @ theta)
    numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


@pytest.mark.full
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_rounds_of_a_model_are_those_of_its_updates(alpha):
    tempered = nt.temper(model, alpha=alpha)
    expectation = nt.expectations.gauss_hermite(predictor="eta")
    online = nt.OnlineVI(
        tempered, nt.guides.AutoOnlineMultivariateNormal, expectation=expectation
    )
    y = (SIGNS > 0).astype(int)
    state = online.init(KEY, X[:1], y[:1])
    service = online.service(state, X[:1], y[:1])
    for n in range(20):
        state, losses = online.update(state, X[n : n + 1], y[n : n + 1])
        # With or without an axis of one row.
        found = (
            service.learn(X[n], y[n])
            if n % 2
            else service.learn(X[n : n + 1], y[n : n + 1])
        )
        assert found.expected == pytest.approx(float(losses.expected), rel=1e-5)
    assert isinstance(service.state, type(state))
    assert_near(service.state.rule_state, state.rule_state)
    q = state.posterior
    bare = nt.expectations.logistic()
    for inputs in (X[0], X[:4]):
        np.testing.assert_allclose(
            service.predict(inputs).mean,
            nt.online.predict(bare, q, inputs).mean,
            rtol=1e-5,
        )
        np.testing.assert_allclose(
            service.class_probabilities(inputs),
            nt.online.class_probabilities(bare, q, inputs),
            rtol=1e-4,
        )
    assert service.draw(X[:4]).shape == (4,)
    with pytest.raises(ValueError, match="observed site 'y' takes values in Boolean"):
        service.learn(X[0], 2)


@pytest.mark.full
def test_a_model_without_a_predictor_learns_and_says_why_it_does_not_predict():
    online = nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal)
    y = jnp.ones(1)
    service = online.service(online.init(KEY, X[:1], y), X[:1], y)
    service.learn(X[0], 1.0)
    with pytest.raises(TypeError, match="sample_posterior draws them"):
        service.predict(X[0])


def of_groups(group, x, y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(theta[group] * x, 1.0), obs=y)


@pytest.fixture(scope="module")
def grouped():
    """A model with integers, a state, and a service that starts at it."""
    online, one = (
        nt.OnlineVI(of_groups, nt.guides.AutoOnlineDiagonalNormal),
        np.ones(1, int),
    )
    state = online.init(KEY, one, one, one)
    return online, state, online.service(state, one, one, one)


@pytest.mark.full
def test_a_model_decides_which_arrays_are_integers(grouped):
    online, state, service = grouped
    one = np.ones(1, int)
    twin, _ = online.update(state, one, one * 0.5, one * 1.5)
    with pytest.raises(
        ValueError,
        match=r"array 0 must hold numbers of dtype int\d\d.*loss needs them, got",
    ):
        service.learn(0.5, 0.5, 1.5)
    service.learn(1, 0.5, 1.5)
    np.testing.assert_allclose(
        service.state.posterior.loc, twin.posterior.loc, rtol=1e-5
    )
    assert service.state.posterior.loc[1] > 0.1
    service.load(state)


def test_a_state_that_is_loaded_brings_its_key(grouped):
    _, state, service = grouped
    other = state._replace(rng_key=jax.random.key(1))
    service.load(other)
    np.testing.assert_array_equal(
        *(jax.random.key_data(each.rng_key) for each in (service.state, other))
    )
    service.load(state)


@pytest.mark.full
def test_packed_trees_come_back():
    tree = {
        "a": jnp.arange(6.0).reshape(2, 3),
        "b": (jnp.int32(3), jnp.zeros(())),
        "key": KEY,
        "no": None,
    }
    for max_size in (np.inf, 4, 0):
        packing = packing_of(tree, max_size)
        arrays = jax.jit(lambda tree, packing=packing: pack(packing, tree))(tree)
        again = unpack(packing, arrays)
        assert jax.tree.structure(again) == jax.tree.structure(tree)
        assert equal(
            {**again, "key": jax.random.key_data(again["key"])},
            {**tree, "key": jax.random.key_data(KEY)},
        )
        assert packing_of(tree, max_size) == packing
        hash(packing)
    assert len(packing_of(tree).kinds) == 3
