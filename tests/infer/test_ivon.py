"""IVON: parity with the published package, the optimum in closed form, resumption, and what it refuses."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from conftest import enable_x64
from numpyro.contrib.module import random_flax_module, random_nnx_module
from numpyro.infer import (
    SVI,
    Predictive,
    RenyiELBO,
    Trace_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

import numpyro_tempered as nt

# Written by ivon-opt, whose version is in the file: every draw, and means, momentum and h after every step.
TRAJECTORY = json.loads((Path(__file__).parent / "ivon_trajectory.json").read_text())


def logistic_gradient(weights, x, y):
    """Of the mean loss in slopes and intercept, for weights (K, 4)."""
    at = weights @ np.column_stack([x, np.ones(len(x))]).T
    return (1 / (1 + np.exp(-at)) - y) @ np.column_stack([x, np.ones(len(x))]) / len(x)


@pytest.mark.parametrize(
    "run", TRAJECTORY["runs"], ids=["one draw", "three draws, clipped"]
)
def test_parity_with_the_published_package(run):
    options, x, y = run["options"], np.array(TRAJECTORY["x"]), np.array(TRAJECTORY["y"])
    size = options["lr"] * (options["hess_init"] + options["weight_decay"])
    weight = options["ess"]
    draws = np.array(run["weights"])
    gradients = np.stack([logistic_gradient(step, x, y) for step in draws])
    with enable_x64():
        ivon = nt.optim.scale_by_ivon(
            num_data=2 * weight,
            alpha=0.5,
            prior_precision=[weight * options["weight_decay"]] * 2,
            init_precision=weight * (options["hess_init"] + options["weight_decay"]),
            b1=options["beta1"],
            b2=options["beta2"],
            clip_radius=options["clip_radius"] or np.inf,
        )
        optimiser = optax.chain(ivon, optax.scale_by_learning_rate(size))

        def split(values):
            return [values[..., :3], values[..., 3:]]

        def step(carry, inputs):
            mean, state = carry
            weights, grads = map(split, inputs)
            updates, state = optimiser.update(grads, state, mean, weights=weights)
            mean = optax.apply_updates(mean, updates)
            record = [
                jnp.concatenate(leaves)
                for leaves in (mean, state[0].momentum, state[0].precision)
            ]
            return (mean, state), record

        mean = split(jnp.array(TRAJECTORY["start"]))
        (_, state), (means, momentum, precision) = jax.lax.scan(
            step, (mean, optimiser.init(mean)), (jnp.array(draws), jnp.array(gradients))
        )
    # Numbers of the file have twelve digits.
    np.testing.assert_allclose(means, run["mean"], rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(
        np.asarray(momentum) / weight, run["momentum"], rtol=1e-8, atol=1e-9
    )
    np.testing.assert_allclose(
        np.asarray(precision) / weight - options["weight_decay"],
        run["hess"],
        rtol=1e-8,
        atol=1e-9,
    )
    assert state[0].num_steps == len(draws)


# A quadratic loss: its mean-field posterior has the mode for its mean, and the diagonal for its precisions.
HESSIAN = np.array([[3.0, 1.0, 0.5], [1.0, 2.0, -0.4], [0.5, -0.4, 1.0]])
LINEAR, PRIOR, PRIOR_MEAN, NUM_DATA = np.array([1.0, -2.0, 0.5]), 4.0, 0.7, 10.0
# Rows are orthogonal: draws with these signs have exactly the moments of noise.
SIGNS = np.array(
    [
        [1, 1, 1],
        [1, -1, 1],
        [1, 1, -1],
        [1, -1, -1],
        [-1, 1, 1],
        [-1, -1, 1],
        [-1, 1, -1],
        [-1, -1, -1.0],
    ]
)


def descend(alpha, num_steps, dtype):
    """Mean and precision after steps of which the draws are exact."""
    ivon = nt.optim.scale_by_ivon(
        NUM_DATA,
        alpha=alpha,
        prior_precision=PRIOR,
        prior_mean=PRIOR_MEAN,
        b1=0.5,
        b2=0.5,
    )
    optimiser = optax.chain(ivon, optax.scale_by_learning_rate(lambda count: 0.3))

    def step(carry, _):
        mean, state = carry
        weights = mean + jnp.asarray(SIGNS, dtype) / jnp.sqrt(state[0].precision)
        grads = weights @ jnp.asarray(HESSIAN, dtype) - jnp.asarray(LINEAR, dtype)
        updates, state = optimiser.update(grads, state, mean, weights=weights)
        return (optax.apply_updates(mean, updates), state), None

    mean = jnp.zeros(3, dtype)
    (mean, state), _ = jax.lax.scan(step, (mean, optimiser.init(mean)), None, num_steps)
    return mean, state[0].precision


@pytest.mark.parametrize(("x64", "tolerance"), [(True, 1e-10), (False, 3e-5)])
def test_fixed_point_is_the_mean_field_posterior(x64, tolerance):
    alphas = np.array([1.0, 0.5, 0.0])
    with enable_x64() if x64 else jax.disable_jit(False):
        dtype = jnp.result_type(float)
        mean, precision = jax.jit(jax.vmap(lambda alpha: descend(alpha, 300, dtype)))(
            jnp.asarray(alphas, dtype)
        )
        assert mean.dtype == precision.dtype == dtype
    for alpha, m, p in zip(alphas, mean, precision, strict=True):
        joint = alpha * NUM_DATA * HESSIAN + PRIOR * np.eye(3)
        expected = np.linalg.solve(
            joint, alpha * NUM_DATA * LINEAR + PRIOR * PRIOR_MEAN
        )
        np.testing.assert_allclose(m, expected, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(p, np.diag(joint), rtol=tolerance)


def test_precision_is_positive_whatever_the_gradient():
    optimiser = nt.optim.scale_by_ivon(5.0, b2=0.1)
    mean = jnp.zeros(2)
    state = optimiser.init(mean)
    weights = jnp.array([1.0, -1.0])
    _, after = optimiser.update(jnp.array([-1e4, 1e4]), state, mean, weights=weights)
    assert np.all(after.precision >= 0.5 * state.precision)


def test_a_clipped_change_is_a_share_of_the_precision():
    optimiser = nt.optim.scale_by_ivon(5.0, b2=0.1, clip_change=0.2)
    mean = jnp.zeros(2)
    state = optimiser.init(mean)
    _, after = optimiser.update(
        jnp.array([-1e4, 1e4]), state, mean, weights=jnp.array([1.0, 1.0])
    )
    # 1 + c + c²/2 at c = -.2 and .2.
    np.testing.assert_allclose(
        after.precision / state.precision, [0.82, 1.22], rtol=1e-6
    )


def test_priors_by_layer():
    params = {
        "dense": {"kernel": jnp.zeros((2, 3)), "bias": jnp.zeros(3)},
        "out": jnp.zeros(4),
    }
    by_layer = nt.optim.scale_by_ivon(
        1.0, prior_precision={"dense": 2.0, "out": 5.0}
    ).init(params)
    by_path = nt.optim.scale_by_ivon(
        1.0, prior_precision=lambda p: 5.0 if "out" in p else 2.0
    ).init(params)
    for state in (by_layer, by_path):
        assert state.precision["dense"]["kernel"].shape == (2, 3)
        np.testing.assert_array_equal(state.precision["dense"]["bias"], 3.0)
        np.testing.assert_array_equal(state.precision["out"], 6.0)


def test_quick_noise_has_the_moments_of_noise():
    count = 2_000_000
    noise = np.asarray(nt.optim.quick_noise(jax.random.key(1), (count // 4, 4)), float)
    assert noise.shape == (count // 4, 4)
    assert abs(noise.mean()) < 5 / np.sqrt(count)
    assert abs((noise**2).mean() - 1) < 5 * np.sqrt(1.94 / count)
    assert abs((noise**3).mean()) < 5 * np.sqrt(14 / count)
    assert abs((noise[1:] * noise[:-1]).mean()) < 5 / np.sqrt(count)
    other = np.asarray(nt.optim.quick_noise(jax.random.key(2), (count // 4, 4)), float)
    assert abs((noise * other).mean()) < 5 / np.sqrt(count)


def test_draws_are_those_of_the_posterior():
    params = {"w": jnp.array([1.0, -2.0])}
    state = optax.chain(nt.optim.scale_by_ivon(15.0)).init(params)
    draws = np.asarray(
        nt.optim.sample_ivon(jax.random.key(0), params, state, 20_000)["w"]
    )
    np.testing.assert_allclose(
        draws.mean(0), [1.0, -2.0], atol=5 * 0.25 / np.sqrt(20_000)
    )
    np.testing.assert_allclose(draws.std(0), 0.25, rtol=5 / np.sqrt(40_000))


def regression(x, y, batch=None):
    theta = numpyro.sample(
        "theta", dist.Normal(0.5, 2.0).expand([x.shape[1]]).to_event(1)
    )
    with numpyro.plate("n", len(x), subsample_size=batch) as rows:
        numpyro.sample("y", dist.Normal(x[rows] @ theta, 0.8), obs=y[rows])


def data_of(num_rows=60):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(num_rows, 2)) @ np.array(
        [[1.0, 0.6], [0.0, 20.0]]
    )  # in raw units, correlated
    return jnp.asarray(x, float), jnp.asarray(
        x @ [1.0, -0.2] + 0.8 * rng.normal(size=num_rows)
    )


def mean_field_of(x, y, alpha):
    x, y = np.asarray(x, float), np.asarray(y, float)
    precision = alpha * x.T @ x / 0.64 + np.eye(2) / 4
    return np.linalg.solve(precision, alpha * x.T @ y / 0.64 + 0.5 / 4), np.diag(
        precision
    ) ** -0.5


def by_svi(guide_class, loss, alpha, batch=None, num_steps=3000, **options):
    model = nt.temper(regression, alpha=alpha)
    guide = guide_class(model)
    svi = SVI(model, guide, nt.optim.IVON(guide, **options), loss)
    return guide, svi.run(
        jax.random.key(0), num_steps, *data_of(), batch, progress_bar=False
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("guide_class", "loss", "alpha", "batch", "tolerance"),
    [
        (
            nt.guides.AutoNetworkNormal,
            TraceMeanField_ELBO(num_particles=4),
            1.0,
            None,
            0.25,
        ),
        (nt.guides.AutoNetworkNormal, Trace_ELBO(), 0.5, None, 0.4),
        (AutoNormal, Trace_ELBO(num_particles=2), 0.5, 15, 1.0),
        (AutoDiagonalNormal, TraceGraph_ELBO(), 1.0, None, 0.4),
    ],
)
def test_svi_finds_the_mean_field_posterior(guide_class, loss, alpha, batch, tolerance):
    guide, result = by_svi(guide_class, loss, alpha, batch)
    draws = guide.sample_posterior(
        jax.random.key(1), result.params, sample_shape=(4000,)
    )["theta"]
    mean, scale = mean_field_of(*data_of(), alpha)
    # A step of 0.1 lets the mean wander by a fifth of a standard deviation, with subsamples by a half.
    np.testing.assert_allclose((draws.mean(0) - mean) / scale, 0.0, atol=tolerance)
    np.testing.assert_allclose(draws.std(0) / scale, 1.0, atol=0.1)


def test_a_resumed_run_has_the_bits_of_the_whole(tmp_path):
    x, y = data_of(8)
    guide = nt.guides.AutoNetworkNormal(regression)
    svi = SVI(regression, guide, nt.optim.IVON(guide), Trace_ELBO())
    state = svi.init(jax.random.key(0), x, y)
    run = jax.jit(
        lambda state: jax.lax.scan(
            lambda state, _: svi.update(state, x, y), state, None, 5
        )[0]
    )
    half = run(state)
    nt.online.save(tmp_path / "state.npz", half)
    whole, resumed = run(half), run(nt.online.restore(tmp_path / "state.npz", state))
    assert int(whole.optim_state[1][1].num_steps) == 10
    jax.tree.map(np.testing.assert_array_equal, whole.optim_state, resumed.optim_state)
    assert jnp.array_equal(whole.rng_key, resumed.rng_key)


@pytest.mark.full
def test_alpha_zero_is_the_prior():
    _, result = by_svi(AutoNormal, TraceMeanField_ELBO(), 0.0, num_steps=2000)
    np.testing.assert_allclose(result.params["theta_auto_loc"], 0.5, atol=0.02)
    np.testing.assert_allclose(result.params["theta_auto_scale"], 2.0, rtol=0.01)


@pytest.mark.full
def test_a_fit_draws_predicts_and_becomes_inference_data():
    x, y = data_of()
    optim = partial(nt.optim.IVON, step_size=lambda count: 0.1 / (1 + count / 500))
    fit = nt.fit_svi(
        jax.random.key(0),
        regression,
        nt.guides.AutoNetworkNormal,
        x,
        y,
        alpha=0.5,
        optim=optim,
        num_steps=3000,
    )
    mean, scale = mean_field_of(x, y, 0.5)
    np.testing.assert_allclose(
        (fit.params["theta_auto_loc"] - mean) / scale, 0.0, atol=0.25
    )
    posterior = nt.to_inference_data(fit, num_samples=2000)["posterior"][
        "theta"
    ].values[0]
    np.testing.assert_allclose(posterior.std(0) / scale, 1.0, atol=0.1)
    predict = Predictive(fit.guide, params=fit.params, num_samples=10)
    assert predict(jax.random.key(2), x, y)["theta"].shape == (10, 2)


@pytest.mark.full
def test_a_check_of_a_fit_covers_its_error():
    x, y = data_of()
    x = x.at[:, 1].divide(20.0)
    fit = nt.fit_svi(
        jax.random.key(0),
        regression,
        nt.guides.AutoNetworkNormal,
        x,
        y,
        alpha=0.5,
        optim=nt.optim.IVON,
    )
    check = nt.check_fit(jax.random.key(1), fit)
    assert check.status == "bounded"
    # The exact posterior, which is not mean field.
    precision = 0.5 * np.asarray(x.T @ x, float) / 0.64 + np.eye(2) / 4
    mean = np.linalg.solve(precision, 0.5 * np.asarray(x.T @ y, float) / 0.64 + 0.5 / 4)
    errors = np.abs(fit.params["theta_auto_loc"] - mean)
    assert np.all(errors <= np.asarray(nt.table(check, "check")["mean_bound"]))


@pytest.mark.full
def test_a_renyi_bound_is_highest_at_its_fit():
    x, y = data_of()
    # Correlated, so that the bound's optimum is not that of the ELBO.
    x = jnp.column_stack([x[:, 0], 0.5 * x[:, 0] + x[:, 1] / 20.0])
    guide = nt.guides.AutoNetworkNormal(regression)
    svi = SVI(
        regression, guide, nt.optim.IVON(guide), RenyiELBO(alpha=0.5, num_particles=8)
    )
    params = svi.run(jax.random.key(0), 4000, x, y, progress_bar=False).params
    loc, scale = (
        np.asarray(params[f"theta_auto_{name}"], float) for name in ("loc", "scale")
    )
    precision = np.asarray(x.T @ x, float) / 0.64 + np.eye(2) / 4
    mean = np.linalg.solve(precision, np.asarray(x.T @ y, float) / 0.64 + 0.5 / 4)
    noise = np.random.default_rng(0).normal(size=(100_000, 8, 2))

    def bound(scale):
        # Around the mean, where the wandering of IVON's means does not count.
        log_weights = 0.5 * np.sum(noise**2, -1) + np.sum(np.log(scale))
        log_weights -= 0.5 * np.einsum(
            "nki,ij,nkj->nk", scale * noise, precision, scale * noise
        )
        return 2.0 * np.mean(np.log(np.mean(np.exp(0.5 * log_weights), 1)))

    assert bound(scale) > bound(mean_field_of(x, y, 1.0)[1])
    assert bound(scale) > max(bound(0.8 * scale), bound(1.25 * scale)) + 0.01
    np.testing.assert_allclose((loc - mean) / scale, 0.0, atol=0.5)


@pytest.mark.full
def test_a_renyi_bound_of_a_high_order_is_refused():
    guide = nt.guides.AutoNetworkNormal(regression)
    svi = SVI(regression, guide, nt.optim.IVON(guide), RenyiELBO(alpha=2.0))
    x, y = data_of(4)
    with pytest.raises(ValueError, match=r"an order alpha below 1, got 2\.0"):
        svi.update(svi.init(jax.random.key(0), x, y), x, y)


@pytest.mark.full
def test_a_linen_network_with_priors_learns():
    linen = pytest.importorskip("flax.linen")
    x = jnp.linspace(-2, 2, 64)[:, None]
    y = jnp.sin(2 * x[:, 0])
    layers = [linen.Dense(32), jnp.tanh, linen.Dense(1)]

    def model(x, y=None):
        predict = random_flax_module(
            "net", linen.Sequential(layers), dist.Normal(0.0, 2.0), input_shape=x.shape
        )
        with numpyro.plate("n", len(x)):
            numpyro.sample("y", dist.Normal(predict(x)[:, 0], 0.1), obs=y)

    guide = nt.guides.AutoNetworkNormal(model)
    svi = SVI(model, guide, nt.optim.IVON(guide), Trace_ELBO())
    result = svi.run(jax.random.key(0), 3000, x, y, progress_bar=False)
    predictions = Predictive(model, guide=guide, params=result.params, num_samples=50)(
        jax.random.key(1), x
    )["y"]
    assert np.sqrt(np.mean((predictions.mean(0) - y) ** 2)) < 0.15


@pytest.mark.full
def test_a_flax_network_with_priors_learns():
    nnx = pytest.importorskip("flax.nnx")
    x = jnp.linspace(-2, 2, 64)[:, None]
    y = jnp.sin(2 * x[:, 0])

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.hidden, self.out = (
                nnx.Linear(1, 32, rngs=rngs),
                nnx.Linear(32, 1, rngs=rngs),
            )

        def __call__(self, x):
            return self.out(jnp.tanh(self.hidden(x)))[:, 0]

    network = Network(nnx.Rngs(0))

    def model(x, y=None):
        predict = random_nnx_module("net", network, prior=dist.Normal(0.0, 2.0))
        with numpyro.plate("n", len(x)):
            numpyro.sample("y", dist.Normal(predict(x), 0.1), obs=y)

    guide = nt.guides.AutoNetworkNormal(model)
    svi = SVI(model, guide, nt.optim.IVON(guide), Trace_ELBO())
    result = svi.run(jax.random.key(0), 3000, x, y, progress_bar=False)
    predictions = Predictive(model, guide=guide, params=result.params, num_samples=50)(
        jax.random.key(1), x
    )["y"]
    assert np.sqrt(np.mean((predictions.mean(0) - y) ** 2)) < 0.15


DIGITS = {"hidden": (64, 84), "hidden_bias": (84,), "out": (84, 10), "out_bias": (10,)}


def classify(params, x):
    return (
        jnp.tanh(x @ params["hidden"] + params["hidden_bias"]) @ params["out"]
        + params["out_bias"]
    )


def digits_model(x, y=None, num_data=900):
    params = {
        k: numpyro.sample(k, dist.Normal(0.0, 1.0).expand(s).to_event())
        for k, s in DIGITS.items()
    }
    with numpyro.plate("n", num_data, subsample_size=len(x)):
        numpyro.sample("y", dist.Categorical(logits=classify(params, x)), obs=y)


@pytest.mark.full
def test_one_pass_over_digits_learns_them():
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = jnp.asarray(digits.data / 16.0), jnp.asarray(digits.target)
    guide = nt.guides.AutoNetworkNormal(digits_model)
    svi = SVI(digits_model, guide, nt.optim.IVON(guide), Trace_ELBO())

    @jax.jit
    def learn(state):
        return jax.lax.scan(
            lambda state, row: svi.update(state, *row),
            state,
            (x[:900, None], y[:900, None]),
        )[0]

    params = svi.get_params(learn(svi.init(jax.random.key(0), x[:1], y[:1])))
    means = {name: params[f"{name}_auto_loc"] for name in DIGITS}
    assert sum(np.size(leaf) for leaf in means.values()) == 6310
    assert np.mean(np.argmax(classify(means, x[900:]), 1) == y[900:]) > 0.87


def test_guides_that_it_cannot_step():
    with pytest.raises(
        TypeError,
        match=r"^IVON steps.*AutoDiagonalNormal or nt\.guides\.AutoNetworkNormal, got",
    ):
        nt.optim.IVON(AutoMultivariateNormal(regression))


@pytest.mark.full
def test_a_loss_without_a_prior_is_refused():
    guide = nt.guides.AutoOnlineDiagonalNormal(regression)
    svi = SVI(regression, guide, nt.optim.IVON(guide), nt.optim.ExpectedNLL())
    x, y = data_of(4)
    with pytest.raises(
        TypeError, match="takes the gradients of an ELBO, got ExpectedNLL"
    ):
        svi.update(svi.init(jax.random.key(0), x, y), x, y)


def test_params_without_a_scale_are_refused():
    def model(y):
        loc = numpyro.param("centre", 0.0)
        numpyro.sample(
            "y", dist.Normal(numpyro.sample("theta", dist.Normal()) + loc, 1.0), obs=y
        )

    guide = AutoNormal(model)
    svi = SVI(model, guide, nt.optim.IVON(guide), Trace_ELBO())
    with pytest.raises(
        ValueError,
        match=r"also params \['centre'\]: give those a prior.*of numpyro\.optim",
    ):
        svi.init(jax.random.key(0), 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_data": 0.0}, r"num_data must be positive.*and finite, got"),
        (
            {"num_data": 1.0, "alpha": -1.0},
            r"alpha must be at least 0.*and finite, got",
        ),
        ({"num_data": 1.0, "b1": 1.0}, r"b1 must be in \[0, 1\)"),
        ({"num_data": 1.0, "b2": 1.5}, r"b2 must be in \[0, 1\)"),
        (
            {"num_data": 1.0, "prior_precision": {"w": -1.0}},
            "prior_precision must be at least 0",
        ),
        ({"num_data": 1.0, "clip_radius": 0.0}, "clip_radius must be positive"),
        ({"num_data": 1.0, "clip_change": 0.0}, "clip_change must be positive"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        nt.optim.scale_by_ivon(**options)


def test_an_update_needs_its_draw():
    optimiser = nt.optim.scale_by_ivon(1.0)
    state = optimiser.init(jnp.zeros(2))
    with pytest.raises(
        ValueError,
        match=r"^the update.*weights=nt.optim.sample_ivon\(rng_key, params, state\)",
    ):
        optimiser.update(jnp.ones(2), state, jnp.zeros(2))
    with pytest.raises(
        ValueError,
        match=r"^state must.*state of one scale_by_ivon, got 0.*a tuple of length",
    ):
        nt.optim.sample_ivon(
            jax.random.key(0), jnp.zeros(2), optax.adam(0.1).init(jnp.zeros(2))
        )


@pytest.mark.full
def test_the_start_fits_the_layers():
    def model(x):
        wide = numpyro.sample(
            "wide", dist.Normal(3.0, 10.0).expand([100, 50]).to_event()
        )
        narrow = numpyro.sample(
            "narrow", dist.Normal(0.0, 0.02).expand([100, 50]).to_event()
        )
        heavy = numpyro.sample("heavy", dist.Cauchy(0.0, 1.0).expand([4]).to_event())
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        numpyro.sample(
            "x",
            dist.Normal(jnp.sum(wide) + jnp.sum(narrow) + jnp.sum(heavy), scale),
            obs=x,
        )

    guide = nt.guides.AutoNetworkNormal(model)
    trace = numpyro.handlers.trace(numpyro.handlers.seed(guide, 0)).get_trace(1.0)
    values = {name: np.asarray(site["value"]) for name, site in trace.items()}
    np.testing.assert_allclose(values["wide_auto_loc"].mean(), 3.0, atol=0.01)
    np.testing.assert_allclose(values["wide_auto_loc"].std(), 0.1, rtol=0.05)
    np.testing.assert_allclose(values["narrow_auto_loc"].std(), 0.02, rtol=0.05)
    for name, scale in {"wide": 0.02, "narrow": 0.004, "scale": 0.2}.items():
        np.testing.assert_allclose(values[f"{name}_auto_scale"], scale, rtol=1e-5)
    assert np.all(np.isfinite(values["heavy_auto_loc"]))
