"""The online rules as optimisers of NumPyro's SVI."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from oracles import tempered_normal_posterior

import numpyro_tempered as nt
from numpyro_tempered.gaussian.expectations import gauss_hermite, monte_carlo, squared
from numpyro_tempered.infer.guides import AutoOnlineDiagonalNormal

KEY = jax.random.key(5)
LOC, SCALE, NOISE = [0.5, -1.0], [1.0, 2.0], 0.7
COLUMNS = np.array([0, 1, 1, 0, 1])
VALUES = [0.9, -0.4, 1.7, 0.2, -2.0]


def linear(x, y=None):
    theta = numpyro.sample(
        "theta", dist.Normal(np.array(LOC), np.array(SCALE)).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ theta)
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)


HALF = nt.temper(linear, alpha=0.5)
ETA = gauss_hermite(predictor="eta")


def stream():
    return np.eye(2)[COLUMNS], np.array(VALUES)


def exact_posterior(alpha):
    y = np.array(VALUES)
    columns = [y[np.equal(COLUMNS, j)] for j in (0, 1)]
    moments = [
        tempered_normal_posterior(columns[j], alpha, LOC[j], SCALE[j], NOISE)
        for j in (0, 1)
    ]
    return map(np.array, zip(*moments, strict=True))


def route(model, optim, loss=None):
    guide = AutoOnlineDiagonalNormal(model)
    if loss is None:
        loss = nt.optim.ExpectedNLL(ETA)
    return SVI(model, guide, optim(guide), loss)


@functools.cache
def natural():
    """One route in double precision, whose compiled steps several tests share."""
    svi = route(HALF, nt.optim.NGVI)
    return svi, jax.jit(svi.update)


def steps(svi, x, y, update=None):
    """One update a row; the parameters at the end, the state of the rule, and the losses."""
    state, losses = svi.init(KEY, x[:1], y[:1]), []
    update = jax.jit(svi.update) if update is None else update
    for t in range(len(y)):
        state, loss = update(state, x[t : t + 1], y[t : t + 1])
        losses.append(float(loss))
    return svi.get_params(state), state.optim_state[1], np.array(losses)


PAIRS = {
    "sva": (lambda guide: nt.optim.SVA(guide, step_size=0.2), nt.online.sva(0.2)),
    "svb": (lambda guide: nt.optim.SVB(guide, step_size=0.2), nt.online.svb(0.2)),
    "svb_rate": (
        lambda guide: nt.optim.SVB(
            guide, nt.online.svb_rate(0.3), nt.online.Box(1.0, 1.5)
        ),
        nt.online.svb(nt.online.svb_rate(0.3), nt.online.Box(1.0, 1.5)),
    ),
    "ngvi": (lambda guide: nt.optim.NGVI(guide), nt.online.ngvi()),
    "ngvi forgetting": (
        lambda guide: nt.optim.NGVI(guide, step_size=0.5, evidence=3.0),
        nt.online.ngvi(0.5, 3.0),
    ),
}


def compare_routes(name, rtol):
    x, y = stream()
    optim, rule = PAIRS[name]
    svi, update = (
        natural()
        if name == "ngvi" and jax.config.jax_enable_x64
        else (route(HALF, optim), None)
    )
    params, _, losses = steps(svi, x, y, update)
    state, want = nt.OnlineVI(HALF, AutoOnlineDiagonalNormal, rule, ETA).run(KEY, x, y)
    np.testing.assert_allclose(params["auto_loc"], state.posterior.loc, rtol=rtol)
    np.testing.assert_allclose(params["auto_scale"], state.posterior.scale, rtol=rtol)
    np.testing.assert_allclose(losses, want.expected, rtol=rtol)


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS)
def test_svi_takes_the_steps_of_the_rule(name, x64):
    compare_routes(name, 1e-10)


@pytest.mark.full
@pytest.mark.parametrize("name", ["sva", "ngvi"])
def test_svi_takes_the_steps_of_the_rule_in_single_precision(name):
    compare_routes(name, 1e-5)


@pytest.mark.full
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_ngvi_ends_at_the_tempered_posterior(alpha, x64):
    x, y = stream()
    if alpha == 0.5:
        svi, update = natural()
    else:
        svi, update = route(nt.temper(linear, alpha=alpha), nt.optim.NGVI), None
    params, _, _ = steps(svi, x, y, update)
    loc, scale = exact_posterior(alpha)
    np.testing.assert_allclose(params["auto_loc"], loc, rtol=1e-10)
    np.testing.assert_allclose(params["auto_scale"], scale, rtol=1e-10)


def value_and_slopes(loss, model, q, keys, *data):
    """The loss and its gradients at the parameters of ``q``, for each key."""
    guide = natural()[0].guide
    params = {"auto_loc": q[0], "auto_scale": q[1]}

    def of(params, key):
        return loss.loss(key, params, model, guide, *data)

    return jax.jit(jax.vmap(jax.value_and_grad(of), (None, 0)))(params, keys)


def set_up():
    x, y = stream()
    natural()[0].init(KEY, x[:1], y[:1])
    return x, y, (np.array(LOC), np.array(SCALE))


def test_expected_nll_draws_by_default(x64):
    x, y, q = set_up()
    n = 2000
    values, slopes = value_and_slopes(
        nt.optim.ExpectedNLL(), HALF, q, jax.random.split(KEY, n), x, y
    )
    assert len(np.unique(values)) == n
    loc, scale = q[0][COLUMNS], q[1][COLUMNS]
    want = (
        0.5
        * (np.log(2 * np.pi * NOISE**2) + ((y - loc) ** 2 + scale**2) / NOISE**2).sum()
    )
    assert abs(np.mean(values) - want) < 5 * np.std(values) / np.sqrt(n)
    # The curvature of a conjugate model is the same at every draw, the force is not; half of each is the power.
    counts = np.bincount(COLUMNS)
    np.testing.assert_allclose(
        slopes["auto_scale"],
        np.tile(0.5 * counts * q[1] / NOISE**2, (n, 1)),
        rtol=1e-10,
    )
    force = 0.5 * (x.T @ (loc - y)) / NOISE**2
    found = np.asarray(slopes["auto_loc"])
    assert (found.std(0) > 1e-6).all()
    assert (np.abs(found.mean(0) - force) < 5 * found.std(0) / np.sqrt(n)).all()


@pytest.mark.full
def test_steps_on_expected_nll_draw_by_default(x64):
    x, y = stream()
    params, _, losses = steps(route(HALF, nt.optim.NGVI, nt.optim.ExpectedNLL()), x, y)
    # The curvature of a conjugate model is the same at every draw; the mean is not.
    loc, scale = exact_posterior(0.5)
    np.testing.assert_allclose(params["auto_scale"], scale, rtol=1e-10)
    assert (np.abs(np.asarray(params["auto_loc"]) - loc) > 1e-6).all()
    assert np.isfinite(losses).all()


@pytest.mark.full
def test_expected_nll_by_default_is_one_draw(x64):
    x, y = stream()
    losses = nt.optim.ExpectedNLL(), nt.optim.ExpectedNLL(monte_carlo())
    one, other = (steps(route(HALF, nt.optim.NGVI, loss), x, y)[0] for loss in losses)
    np.testing.assert_array_equal(one["auto_loc"], other["auto_loc"])


def test_fisher_curvature_is_an_argument_of_the_loss(x64):
    x, y, q = set_up()
    loss = nt.optim.ExpectedNLL(ETA, curvature="fisher")
    _, slopes = value_and_slopes(loss, linear, q, KEY[None], x[:1], y[:1])
    # E[l'²] = ((y - m)² + v) / noise⁴, of which the slope in the scale is the scale's share.
    gain = ((VALUES[0] - LOC[0]) ** 2 + SCALE[0] ** 2) / NOISE**4
    np.testing.assert_allclose(
        slopes["auto_scale"], [[SCALE[0] * gain, 0.0]], rtol=1e-10, atol=1e-12
    )
    with pytest.raises(ValueError, match=r"curvature.*must be one of"):
        nt.optim.ExpectedNLL(curvature="gauss")


@pytest.mark.full
def test_a_step_takes_the_fisher_curvature_of_the_loss(x64):
    x, y = stream()
    loss = nt.optim.ExpectedNLL(ETA, curvature="fisher")
    params, _, _ = steps(route(linear, nt.optim.NGVI, loss), x[:1], y[:1])
    # E[l'²] = ((y - m)² + v) / noise⁴.
    gain = ((VALUES[0] - LOC[0]) ** 2 + SCALE[0] ** 2) / NOISE**4
    np.testing.assert_allclose(
        params["auto_scale"][0], (SCALE[0] ** -2 + gain) ** -0.5, rtol=1e-10
    )


@pytest.mark.parametrize("alpha", tiered([1.0, 0.5], unit=[0.5]))
def test_the_loss_is_untempered(alpha, x64):
    x, y = stream()
    svi = (
        natural()[0]
        if alpha == 0.5
        else route(nt.temper(linear, alpha=alpha), nt.optim.NGVI)
    )
    found = float(jax.jit(svi.evaluate)(svi.init(KEY, x[:1], y[:1]), x, y))
    loc, scale = np.array(LOC)[COLUMNS], np.array(SCALE)[COLUMNS]
    squares = (y - loc) ** 2 + scale**2
    want = 0.5 * (np.log(2 * np.pi * NOISE**2) + squares / NOISE**2).sum()
    assert found == pytest.approx(want, rel=1e-9)


def test_a_batch_that_is_not_finite_is_rejected_and_counted(x64):
    x, y = stream()
    keep = np.arange(len(y)) != 1
    svi, update = natural()
    dirty, state, _ = steps(svi, x, np.where(keep, y, np.nan), update)
    clean, _, _ = steps(svi, x[keep], y[keep], update)
    assert (int(state.count), int(state.rejected)) == (4, 1)
    for name, value in clean.items():
        np.testing.assert_allclose(dirty[name], value, rtol=1e-12)


def test_a_step_keeps_the_structure_of_the_state(x64):
    x, y = stream()
    svi, update = natural()
    state = svi.init(KEY, x[:1], y[:1])
    after, _ = jax.eval_shape(update, state, x[:1], y[:1])
    assert jax.tree.structure(after) == jax.tree.structure(state)
    for ours, theirs in zip(
        jax.tree.leaves(after), jax.tree.leaves(state), strict=True
    ):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


@pytest.mark.full
def test_svi_run(x64):
    x, y = stream()
    svi = route(HALF, lambda guide: nt.optim.SVB(guide, 0.01))
    result = svi.run(KEY, 200, x, y, progress_bar=False)
    assert result.losses.shape == (200,)
    assert set(result.params) == {"auto_loc", "auto_scale"}
    for name, value in svi.get_params(result.state).items():
        np.testing.assert_array_equal(value, result.params[name])


def with_param(x, y=None):
    bias = numpyro.param("bias", 0.0)
    theta = numpyro.sample(
        "theta", dist.Normal(np.array(LOC), np.array(SCALE)).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ theta + bias)
    numpyro.sample("y", dist.Normal(eta, NOISE), obs=y)


def test_extra_params_are_refused(x64):
    x, y = stream()
    with pytest.raises(
        ValueError,
        match=r"^an online optimiser.*also the params \['bias'\].*or fit them by",
    ):
        route(with_param, nt.optim.NGVI).init(KEY, x[:1], y[:1])


@pytest.mark.parametrize(
    "guide", [AutoDiagonalNormal(linear), AutoNormal(linear), linear, None], ids=type
)
def test_optimisers_take_their_own_guide(guide):
    for optim in (
        nt.optim.NGVI,
        lambda g: nt.optim.SVA(g, 0.1),
        lambda g: nt.optim.SVB(g, 0.1),
    ):
        with pytest.raises(
            TypeError,
            match=r"^an online.*AutoOnlineDiagonalNormal.*for other online guides",
        ):
            optim(guide)


def test_the_loss_takes_its_own_guide():
    with pytest.raises(
        TypeError,
        match=r"AutoOnlineMultivariateNormal, got AutoDiagonalNormal.*online guides",
    ):
        nt.optim.ExpectedNLL().loss(
            KEY, {}, linear, AutoDiagonalNormal(linear), *stream()
        )


def test_a_bare_loss_is_refused():
    with pytest.raises(
        TypeError,
        match=r"^this expectation is of.*bare loss.*by nt.online.run, or take",
    ):
        nt.optim.ExpectedNLL(squared()).loss(
            KEY, {}, linear, AutoOnlineDiagonalNormal(linear), *stream()
        )


@pytest.mark.full
def test_svi_on_the_loss_takes_its_own_guide(x64):
    x, y = stream()
    svi = SVI(
        linear,
        AutoDiagonalNormal(linear),
        numpyro.optim.Adam(0.1),
        nt.optim.ExpectedNLL(),
    )
    state = svi.init(KEY, x[:1], y[:1])
    with pytest.raises(
        TypeError,
        match=r"AutoOnlineMultivariateNormal, got AutoDiagonalNormal.*online guides",
    ):
        svi.update(state, x[:1], y[:1])


@pytest.mark.full
def test_svi_on_a_bare_loss_is_refused(x64):
    x, y = stream()
    svi = route(linear, nt.optim.NGVI, nt.optim.ExpectedNLL(squared()))
    state = svi.init(KEY, x[:1], y[:1])
    with pytest.raises(
        TypeError,
        match=r"^this expectation is of.*bare loss.*by nt.online.run, or take",
    ):
        svi.update(state, x[:1], y[:1])


class Half(nt.optim.ExpectedNLL):
    """A subclass with a value of its own."""

    def loss(self, *args, **kwargs):
        return 0.5 * self.loss_with_mutable_state(*args, **kwargs)["loss"]


class Other(nt.optim.ExpectedNLL):
    """A subclass that does not call its parent."""

    def loss(self, rng_key, param_map, *args, **kwargs):
        return jnp.sum(param_map["auto_loc"])


OPTIMISERS = {
    "SVA": lambda guide: nt.optim.SVA(guide, 0.1),
    "SVB": lambda guide: nt.optim.SVB(guide, 0.1),
    "NGVI": nt.optim.NGVI,
    "NaturalGradient": nt.optim.NaturalGradient,
    "ForwardBackward": nt.optim.ForwardBackward,
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_another_loss_is_refused_when_traced(name, x64):
    x, y = stream()
    for loss in (Trace_ELBO(), TraceMeanField_ELBO(num_particles=2)):
        got = type(loss).__name__
        svi = route(HALF, OPTIMISERS[name], loss)
        state = svi.init(KEY, x[:1], y[:1])
        for update in (svi.update, svi.stable_update):
            with pytest.raises(
                TypeError,
                match=rf"optim\.{name} holds.*nt\.optim\.ExpectedNLL, got {got}",
            ):
                jax.eval_shape(update, state, x[:1], y[:1])


def test_subclasses_of_the_loss_pass(x64):
    x, y = stream()
    for loss in (Half(ETA), Other(ETA)):
        svi = route(HALF, nt.optim.NGVI, loss)
        state = svi.init(KEY, x[:1], y[:1])
        for update in (svi.update, svi.stable_update):
            after, _ = jax.eval_shape(update, state, x[:1], y[:1])
            assert jax.tree.structure(after) == jax.tree.structure(state)
    # One evaluation does not admit the next objective.
    other = route(HALF, nt.optim.NGVI, Trace_ELBO())
    state = other.init(KEY, x[:1], y[:1])
    with pytest.raises(
        TypeError, match=r"holds the prior.*optimiser of numpyro.optim with"
    ):
        jax.eval_shape(other.update, state, x[:1], y[:1])


def subsampled(x, y=None):
    theta = numpyro.sample(
        "theta", dist.Normal(np.array(LOC), np.array(SCALE)).to_event(1)
    )
    with numpyro.plate("n", 100, subsample_size=x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ theta, NOISE), obs=y)


def by_index(x, y):
    theta = numpyro.sample(
        "theta", dist.Normal(np.array(LOC), np.array(SCALE)).to_event(1)
    )
    with numpyro.plate("n", x.shape[0], subsample_size=1) as index:
        numpyro.sample(
            "y",
            dist.Normal(jnp.asarray(x)[index] @ theta, NOISE),
            obs=jnp.asarray(y)[index],
        )


@pytest.mark.full
@pytest.mark.parametrize("model", [subsampled, by_index])
def test_a_subsample_is_no_datum(model, x64):
    x, y = stream()
    svi = route(model, nt.optim.NGVI, nt.optim.ExpectedNLL())
    state = svi.init(KEY, x[:2], y[:2])
    with pytest.raises(
        ValueError, match=r"plate 'n' subsamples.*size of the batch.*fit_svi"
    ):
        jax.eval_shape(svi.update, state, x[:2], y[:2])


def test_the_gradient_pulls_back_through_the_bijection(x64):
    """SVI differentiates in the inverse softplus of the scale; the rule must see the slope in the scale."""
    set_up()
    guide = natural()[0].guide
    # The box binds the second mean and scale of the second optimiser.
    pairs = [
        (nt.optim.SVA(guide, step_size=0.2), nt.online.sva(0.2)),
        (
            nt.optim.SVB(guide, nt.online.svb_rate(0.3), nt.online.Box(1.0, 2.0)),
            nt.online.svb(nt.online.svb_rate(0.3), nt.online.Box(1.0, 2.0)),
        ),
    ]
    loc, scale = np.array(LOC), np.array(SCALE)
    free = np.log(np.expm1(scale))  # the inverse of softplus

    def loss(params):
        return -jnp.sum(params["auto_loc"] ** 2) - jnp.sum(
            3.0 * jax.nn.softplus(params["auto_scale"])
        )

    params = {"auto_loc": loc, "auto_scale": free}

    @jax.jit
    def step(params):
        value, grads = jax.value_and_grad(loss)(params)
        evaluation = nt.expectations.Evaluation(
            value, value, -2.0 * loc, -3.0 / (2.0 * scale)
        )
        return [
            (
                optim.get_params(optim.update(grads, optim.init(params), value)),
                rule.update(evaluation, rule.init(guide.prior)).posterior,
            )
            for optim, rule in pairs
        ]

    for got, want in step(params):
        np.testing.assert_allclose(got["auto_loc"], want.loc, rtol=1e-12)
        np.testing.assert_allclose(
            np.logaddexp(0.0, got["auto_scale"]), want.scale, rtol=1e-12
        )
