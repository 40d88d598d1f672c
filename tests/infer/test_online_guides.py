"""Guides of every family, and the runs of models with them."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from scipy import stats

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField, family_of
from numpyro_tempered.handlers.likelihood import Layout
from numpyro_tempered.infer.elbo import bind
from numpyro_tempered.infer.guides import (
    NUM_PRIOR_DRAWS,
    AutoOnlineDiagonalNormal,
    AutoOnlineLowRankNormal,
    AutoOnlineMultivariateNormal,
)
from numpyro_tempered.infer.guides.prior import PriorMoments
from numpyro_tempered.infer.online_prior import reorder

KEY = jax.random.key(3)
ETA = nt.expectations.gauss_hermite(predictor="eta", num_nodes=8)
NGVI = nt.online.ngvi()
GUIDES = {
    "diagonal": AutoOnlineDiagonalNormal,
    "full": AutoOnlineMultivariateNormal,
    "low rank": functools.partial(AutoOnlineLowRankNormal, rank=3),
}
D = 3


@nt.temper(alpha=0.5)
def linear(x, y=None):
    b = numpyro.sample("b", dist.Normal(np.array([0.5, -1.0]), 2.0).to_event(1))
    a = numpyro.sample("a", dist.Normal(1.0, 0.5))
    eta = numpyro.deterministic("eta", a + x @ b)
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(eta, 1.5), obs=y)


def data(n=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2)) @ np.array([[1.0, 0.8], [0.0, 0.6]])
    return x, x @ [1.0, 2.0] + 0.3 + rng.normal(size=n)


def exact(x, y, alpha=0.5):
    """Mean and covariance of (a, b1, b2) by ridge regression."""
    design = np.column_stack([np.ones(len(x)), x])
    m0, p0 = np.array([1.0, 0.5, -1.0]), np.diag([4.0, 0.25, 0.25])
    precision = p0 + alpha * design.T @ design / 2.25
    return np.linalg.solve(
        precision, p0 @ m0 + alpha * design.T @ y / 2.25
    ), np.linalg.inv(precision)


def log_evidence(x, y, alpha=0.5):
    """log of the integral of likelihood^alpha times prior: a Gaussian density in y, of variance 2.25 / alpha."""
    design = np.column_stack([np.ones(len(x)), x])
    m0, v0 = np.array([1.0, 0.5, -1.0]), np.diag([0.25, 4.0, 4.0])
    marginal = stats.multivariate_normal(
        design @ m0, design @ v0 @ design.T + 2.25 / alpha * np.eye(len(x))
    )
    constant = 0.5 * len(x) * ((1 - alpha) * np.log(2 * np.pi * 2.25) - np.log(alpha))
    return marginal.logpdf(y) + constant


def named_order(guide):
    """Where (a, b1, b2) stand in the flat vector."""
    shapes = dict(guide.layout.sites)
    starts = dict(
        zip(
            shapes,
            np.cumsum([0, *(int(np.prod(shape)) for shape in shapes.values())]),
            strict=False,
        )
    )
    return np.concatenate(
        [starts[k] + np.arange(int(np.prod(shapes[k]))) for k in ("a", "b")]
    )


def flat_order(guide):
    """Which of (a, b1, b2) the coordinates of the flat vector are."""
    return np.argsort(named_order(guide))


def by_name(guide, q):
    """Mean and covariance of q in the order (a, b1, b2)."""
    order = named_order(guide)
    q = jax.tree.map(np.asarray, q)
    if isinstance(q, LowRank):
        covariance = np.linalg.inv(
            np.diag(q.precision_diag) + q.precision_factor @ q.precision_factor.T
        )
    else:
        covariance = q.factor @ q.factor.T
    return np.asarray(q.loc)[order], covariance[np.ix_(order, order)]


@functools.cache
def run_of(name):
    """One run in double precision for all tests of a family."""
    online = nt.OnlineVI(linear, GUIDES[name](linear), NGVI, ETA)
    return online, *online.run(KEY, *data())


@functools.cache
def settled(name):
    """An OnlineVI of a family and its state at the tempered posterior, or at that of its variances, by hand."""
    x, y = data()
    online = nt.OnlineVI(linear, GUIDES[name](linear), NGVI, ETA)
    state = online.init(KEY, x[:1], y[:1])
    order = flat_order(online.guide)
    mean, covariance = exact(x, y)
    loc, covariance = mean[order], covariance[np.ix_(order, order)]
    if name == "low rank":
        prior = np.array([4.0, 0.25, 0.25])[order]
        q = LowRank(
            loc, prior, np.linalg.cholesky(np.linalg.inv(covariance) - np.diag(prior))
        )
    elif name == "full":
        q = FullRank(loc, np.linalg.cholesky(covariance))
    else:
        q = MeanField(loc, np.sqrt(np.diag(covariance)))
    q = jax.tree.map(jax.device_put, q)
    return online, state._replace(rule_state=state.rule_state._replace(posterior=q))


@pytest.mark.full
@pytest.mark.parametrize("name", ["full", "low rank"])
def test_a_conjugate_stream_ends_at_the_tempered_posterior(x64, name):
    online, state, _ = run_of(name)
    mean, covariance = exact(*data())
    found = by_name(online.guide, state.posterior)
    np.testing.assert_allclose(found[0], mean, rtol=1e-8)
    np.testing.assert_allclose(found[1], covariance, rtol=1e-7, atol=1e-10)

    check_posterior(online, state, covariance)


def check_posterior(online, state, covariance):
    @jax.jit
    def moments(state):
        posterior = online.get_posterior(state)
        return posterior.mean, posterior.variance

    loc, variance = moments(state)
    np.testing.assert_allclose(loc, state.posterior.loc)
    np.testing.assert_allclose(
        np.sort(variance), np.sort(np.diag(covariance)), rtol=1e-7
    )


@pytest.mark.parametrize("name", ["full", "low rank"])
def test_the_posterior_of_a_state_is_its_gaussian(x64, name):
    online, state = settled(name)
    check_posterior(online, state, exact(*data())[1])


DRAWN = {"full": None, "low rank": nt.expectations.monte_carlo(predictor="eta")}


@pytest.mark.parametrize(
    "expectation", [DRAWN["low rank"], ETA], ids=["draws", "quadrature"]
)
def test_a_low_rank_gaussian_has_the_curvature_by_rows(x64, expectation):
    x, y = data()
    online, state = settled("low rank")
    bound = bind(expectation, linear, online.guide)
    rows, weights = jax.jit(
        lambda q: (
            bound.evaluate(q, (x, y), {}, rng_key=KEY, curvature="hessian").grad_var
        )
    )(state.posterior)
    rows, weights = np.asarray(rows), np.asarray(weights)
    order = named_order(online.guide)
    design = np.column_stack([np.ones(len(x)), x])
    # Twice the gradient in the covariance is the tempered precision of the data.
    found = 2 * (rows.T * weights) @ rows
    np.testing.assert_allclose(
        found[np.ix_(order, order)], 0.5 * design.T @ design / 2.25, rtol=1e-9
    )


@pytest.mark.full
@pytest.mark.parametrize("name", DRAWN)
def test_one_draw_gives_the_exact_covariance(x64, name):
    """The curvature of a quadratic loss is constant; low rank takes it as rows of the predictor."""
    online = nt.OnlineVI(linear, GUIDES[name](linear), NGVI, DRAWN[name])
    state, _ = online.run(KEY, *data())
    _, covariance = exact(*data())
    np.testing.assert_allclose(
        by_name(online.guide, state.posterior)[1], covariance, rtol=1e-7, atol=1e-10
    )


@pytest.mark.full
@pytest.mark.parametrize("name", DRAWN)
def test_batches_of_draws_reach_the_same_posterior(x64, name):
    x, y = data()
    online = nt.OnlineVI(linear, GUIDES[name](linear), NGVI, DRAWN[name])
    state = online.init(KEY, x[:10], y[:10])
    for i in range(0, 40, 10):
        state, _ = online.update(state, x[i : i + 10], y[i : i + 10])
    _, covariance = exact(x, y)
    np.testing.assert_allclose(
        by_name(online.guide, state.posterior)[1], covariance, rtol=1e-7, atol=1e-10
    )


@pytest.mark.parametrize("name", tiered(GUIDES, unit=["low rank"]))
def test_the_methods_of_the_guide(x64, name):
    online, state = settled(name)
    guide, params, q = online.guide, online.get_params(state), state.posterior

    @jax.jit
    def methods(params, q):
        draws = guide.sample_posterior(KEY, params, sample_shape=(4000,))
        quantiles = guide.quantiles(params, np.array([0.025, 0.975]))
        scale, loc = (
            guide._unpack_latent(v) for v in (family_of(q).marginal_scale(q), q.loc)
        )
        return draws, guide.median(params), quantiles, loc, scale

    draws, median, quantiles, loc, scale = methods(params, q)
    np.testing.assert_allclose(median["a"], loc["a"])
    np.testing.assert_allclose(
        np.diff(quantiles["b"], axis=0)[0],
        2 * 1.959963984540054 * scale["b"],
        rtol=1e-8,
    )
    assert draws["b"].shape == (4000, 2)
    np.testing.assert_allclose(
        np.std(draws["a"]), scale["a"], rtol=5 / np.sqrt(2 * 4000)
    )
    back = guide.from_params(params)
    assert isinstance(back, type(q))
    np.testing.assert_array_equal(back.loc, q.loc)
    widths = [
        p.scale if name == "diagonal" else by_name(guide, p)[1] for p in (back, q)
    ]
    np.testing.assert_allclose(*widths, rtol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("name", GUIDES)
def test_predictions_by_the_guide(x64, name):
    x, y = data()
    online, state, _ = run_of(name)
    params, q = online.get_params(state), state.posterior
    predictive = Predictive(linear, guide=online.guide, params=params, num_samples=5)(
        KEY, x
    )
    assert predictive["y"].shape == (5, 40)
    shown = nt.to_inference_data(online.posterior(state), x, y, num_samples=50)
    assert shown["posterior"]["b"].shape == (1, 50, 2)
    np.testing.assert_allclose(
        family_of(q).kl(online.guide.from_params(params), q), 0.0, atol=1e-10
    )


@pytest.mark.parametrize("name", tiered(["full", "low rank"], unit=["low rank"]))
def test_the_elbo_of_stock_numpyro_at_the_posterior_is_the_log_evidence(x64, name):
    """Of the exact posterior every draw gives it."""
    x, y = data()
    online, state = settled(name)
    params = online.get_params(state)
    loss = jax.jit(
        lambda key: Trace_ELBO().loss(key, params, linear, online.guide, x, y)
    )
    found = [float(loss(jax.random.key(seed))) for seed in (0, 1)]
    assert found == pytest.approx([-log_evidence(x, y)] * 2, rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "low rank",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("diagonal", "full")),
    ],
)
def test_guides_work_under_plain_svi(x64, name):
    """Stock NumPyro optimises the ELBO of the guide to the exact posterior."""
    x, y = data(10)
    guide = GUIDES[name](linear)
    svi = SVI(linear, guide, numpyro.optim.Adam(0.02), Trace_ELBO(num_particles=20))
    result = svi.run(KEY, 1500, x, y, progress_bar=False)
    mean, covariance = exact(x, y)
    found = guide.median(result.params)
    error = np.concatenate([np.ravel(found["a"]), found["b"]]) - mean
    # The last steps of Adam wander by a fraction of a standard deviation.
    np.testing.assert_array_less(np.abs(error), 0.35 * np.sqrt(np.diag(covariance)))


OPTIMS = {
    "SVA": (lambda g: nt.optim.SVA(g, 0.05), nt.online.sva(0.05)),
    "SVB": (lambda g: nt.optim.SVB(g, 0.05), nt.online.svb(0.05)),
    "NGVI": (nt.optim.NGVI, NGVI),
}


def test_one_step_of_the_svi_route_is_exact_on_a_full_covariance(x64):
    x, y = data()
    guide, loss = settled("full")[0].guide, nt.optim.ExpectedNLL(ETA)
    optim = nt.optim.NGVI(guide)
    constrain = biject_to(guide.scale_tril_constraint)
    scale = np.diag(np.asarray(guide.prior.factor))
    # The entries below the diagonal, then the inverse softplus of those on it.
    entries = np.concatenate([np.zeros(3), np.log(np.expm1(scale))])
    params = {"auto_loc": guide.prior.loc, "auto_scale_tril": entries}

    @jax.jit
    def step(params):
        def of(params):
            params = params | {"auto_scale_tril": constrain(params["auto_scale_tril"])}
            return loss.loss(KEY, params, linear, guide, x, y)

        value, grads = jax.value_and_grad(of)(params)
        params = optim.get_params(optim.update(grads, optim.init(params), value))
        return params["auto_loc"], constrain(params["auto_scale_tril"]), value

    loc, factor, value = (np.asarray(leaf) for leaf in step(params))
    order, (mean, covariance) = named_order(guide), exact(x, y)
    np.testing.assert_allclose(loc[order], mean, rtol=1e-8)
    np.testing.assert_allclose(
        (factor @ factor.T)[np.ix_(order, order)], covariance, rtol=1e-7, atol=1e-10
    )
    design = np.column_stack([np.ones(len(x)), x])
    spread = np.sum(design**2 * [0.25, 4.0, 4.0], axis=1)
    residual = y - design @ [1.0, 0.5, -1.0]
    expected = 0.5 * np.sum(np.log(2 * np.pi * 2.25) + (residual**2 + spread) / 2.25)
    np.testing.assert_allclose(value, expected, rtol=1e-8)


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMS)
def test_the_svi_route_is_online_vi_on_a_full_covariance(x64, name):
    x, y = data()
    optim, rule = OPTIMS[name]
    guide = AutoOnlineMultivariateNormal(linear)
    svi = SVI(linear, guide, optim(guide), nt.optim.ExpectedNLL(ETA))
    update = jax.jit(svi.update)
    state, values = svi.init(KEY, x[:1], y[:1]), []
    for t in range(len(y)):
        state, value = update(state, x[t : t + 1], y[t : t + 1])
        values.append(float(value))
    if name == "NGVI":
        online, ours, losses = run_of("full")
    else:
        online = nt.OnlineVI(linear, AutoOnlineMultivariateNormal(linear), rule, ETA)
        ours, losses = online.run(KEY, x, y)
    np.testing.assert_allclose(values, losses.expected, rtol=1e-8)
    found = guide.from_params(svi.get_params(state))
    for a, b in zip(
        by_name(guide, found), by_name(online.guide, ours.posterior), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-10)


def test_low_rank_has_no_svi_route():
    with pytest.raises(
        TypeError,
        match=r"^an online optimiser takes.*use OnlineVI.*for other online guides",
    ):
        nt.optim.NGVI(AutoOnlineLowRankNormal(linear))


# The start


def scales(y=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("k", 2):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    numpyro.sample("y", dist.Normal(theta.sum(), 1.0), obs=y)


@pytest.mark.full
def test_a_full_guide_matches_the_covariance_of_a_hierarchical_prior():
    guide = AutoOnlineMultivariateNormal(scales)
    with pytest.warns(UserWarning, match=r"tau.*theta.*mean and covariance"):
        handlers.seed(guide, KEY)(0.3)
    assert set(guide.moment_matched) == {"tau", "theta"}
    places = guide.layout.split(jnp.arange(4))
    covariance = np.asarray(guide.prior.factor @ guide.prior.factor.T)
    one, two = np.asarray(places["theta"])
    # Var theta = 4 + E tau² = 5 and Cov(theta_1, theta_2) = Var mu = 4, by moments of tau ~ HalfNormal(1).
    error = 5 * np.sqrt(2 / NUM_PRIOR_DRAWS) * 5
    np.testing.assert_allclose(covariance[one, two], 4.0, atol=error)
    np.testing.assert_allclose(covariance[one, one], 5.0, atol=2 * error)
    mu, tau = int(places["mu"]), int(places["tau"])
    assert covariance[mu, mu] == pytest.approx(4.0, rel=1e-6)
    np.testing.assert_allclose(covariance[mu, [one, two]], 4.0, atol=error)
    assert covariance[mu, tau] == 0.0


def chain(y):
    root = numpyro.sample("root", dist.Normal(0.0, 1.0))
    other = numpyro.sample("other", dist.Normal(0.0, 2.0))
    middle = numpyro.sample("middle", dist.Normal(root, 1.0))
    leaf = numpyro.sample("leaf", dist.Normal(middle - other, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(leaf, 1.0), obs=y)


def test_what_depends_on_a_normal_site_is_not_independent_of_it():
    y = jnp.full(50, 2.0)
    online = nt.OnlineVI(chain, AutoOnlineMultivariateNormal)
    with pytest.warns(UserWarning, match=r"\['leaf', 'middle'\]"):
        state = online.init(KEY, y)
    state, _ = online.update(state, y)
    found = online.posterior(state)
    # root, other, middle, leaf: linear, so that everything is known.
    mix = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, -1, 1, 1.0]])
    prior = mix @ np.diag([1.0, 4.0, 1.0, 1.0]) @ mix.T
    gain = prior[:, 3] / (prior[3, 3] + 1.0 / 50.0)
    sd = np.sqrt(np.diag(prior - np.outer(gain, prior[3])))
    for place, name in enumerate(("root", "other", "middle", "leaf")):
        assert found.mean[name] == pytest.approx(2.0 * gain[place], abs=0.03)
        assert found.sd[name] == pytest.approx(sd[place], rel=0.02)


@pytest.mark.parametrize("guide", GUIDES.values(), ids=GUIDES)
def test_a_fresh_guide_has_the_options_of_the_old_one(guide):
    start = numpyro.infer.init_to_value(values={})
    for given in (start, None):
        fresh = guide(linear, prefix="mine", init_loc_fn=given).fresh()
        assert (fresh.prefix, fresh.starts_at_prior) == ("mine", given is None)
        assert given is None or fresh.init_loc_fn is start
        assert getattr(fresh, "rank", 3) == 3


def test_rank_is_checked(x64):
    with pytest.raises(ValueError, match=r"^rank must be an.*at least 1"):
        AutoOnlineLowRankNormal(linear, rank=0)
    guide = AutoOnlineLowRankNormal(linear, rank=7)
    with pytest.raises(
        ValueError, match=r"^rank must be.*at most the number of coordinates, 3"
    ):
        nt.OnlineVI(linear, guide, NGVI, ETA).init(KEY, *data(1))


# A posterior as the next prior, from any family to any other


PAIRS = [(first, second) for first in GUIDES for second in GUIDES]
EACH_ONCE = [("diagonal", "full"), ("full", "low rank"), ("low rank", "diagonal")]


@pytest.mark.parametrize(("first", "second"), tiered(PAIRS, unit=EACH_ONCE))
def test_a_state_is_a_prior_in_every_family(x64, first, second):
    x, y = data()
    before, state = settled(first)

    def other_order(x, y=None):
        a = numpyro.sample("a", dist.Normal(1.0, 0.5))
        b = numpyro.sample("b", dist.Normal(np.array([0.5, -1.0]), 2.0).to_event(1))
        eta = numpyro.deterministic("eta", a + x @ b)
        with numpyro.plate("n", len(x)):
            numpyro.sample("y", dist.Normal(eta, 1.5), obs=y)

    online = nt.OnlineVI(other_order, GUIDES[second](other_order), NGVI, ETA)
    after = online.init(KEY, x[:1], y[:1], prior=state)
    median, expected = (
        o.guide.median(o.get_params(s)) for o, s in ((online, after), (before, state))
    )
    for name in ("a", "b"):
        np.testing.assert_allclose(median[name], expected[name], rtol=1e-10)
    scale, wanted = (
        o.guide._unpack_latent(family_of(s.posterior).marginal_scale(s.posterior))
        for o, s in ((online, after), (before, state))
    )
    for name in ("a", "b"):
        np.testing.assert_allclose(scale[name], wanted[name], rtol=1e-7)
    if "diagonal" not in (first, second):
        for ours, theirs in zip(
            by_name(online.guide, after.posterior),
            by_name(before.guide, state.posterior),
            strict=True,
        ):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize(
    "second", ["full", pytest.param("diagonal", marks=pytest.mark.slow)]
)
def test_a_fit_is_a_prior_with_its_covariance(x64, second):
    x, y = data(20)
    fit = nt.fit_svi(
        KEY,
        linear,
        AutoMultivariateNormal,
        x,
        y,
        num_steps=100,
        optim=numpyro.optim.Adam(0.05),
    )
    online = nt.OnlineVI(linear, GUIDES[second](linear), nt.online.ngvi(), ETA)
    state = online.init(KEY, x[:1], y[:1], prior=fit)
    q = fit.guide.get_posterior(fit.params)
    covariance = np.asarray(q.covariance_matrix)
    # The order of sites is that of the model in both guides.
    np.testing.assert_allclose(state.posterior.loc, q.loc)
    found = (
        np.square(state.posterior.scale)
        if second == "diagonal"
        else state.posterior.factor @ state.posterior.factor.T
    )
    np.testing.assert_allclose(
        found, np.diag(covariance) if second == "diagonal" else covariance, rtol=1e-7
    )
    normal = nt.fit_svi(
        KEY, linear, AutoNormal, x, y, num_steps=50, optim=numpyro.optim.Adam(0.05)
    )
    state = online.init(KEY, x[:1], y[:1], prior=normal)
    np.testing.assert_allclose(
        online.guide._unpack_latent(state.posterior.loc)["a"],
        normal.params["a_auto_loc"],
    )


def test_a_bare_gaussian_as_prior_is_converted(x64):
    x, y = data(1)
    factor = np.array([[1.0, 0.0, 0.0], [0.5, 1.0, 0.0], [0.2, -0.3, 2.0]])
    q = FullRank(np.arange(3.0), factor)
    covariance = factor @ factor.T
    for name, expected in (
        ("diagonal", MeanField),
        ("full", FullRank),
        ("low rank", LowRank),
    ):
        online, _ = settled(name)
        start = online.init(KEY, x, y, prior=q).posterior
        assert isinstance(start, expected)
        np.testing.assert_allclose(
            family_of(start).marginal_scale(start),
            np.sqrt(np.diag(covariance)),
            rtol=1e-8,
        )
    with pytest.raises(ValueError, match=r"prior has \(2,\) coordinates"):
        online.init(KEY, x, y, prior=MeanField(np.zeros(2), np.ones(2)))


# What the start leaves out of the prior


def gamma_rate(y):
    rate = numpyro.sample("rate", dist.Gamma(3.0, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Exponential(rate), obs=y)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["full", pytest.param("diagonal", marks=pytest.mark.slow)]
)
@pytest.mark.filterwarnings("ignore:the priors of")
def test_the_residual_of_the_prior_is_added_once(x64, name):
    """Without data the corrected Gaussian is the best one for the prior itself, by an independent search."""
    from scipy import optimize

    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()

    def negative_elbo(v):
        # log Gamma(3, 1) of exp(u) with its Jacobian: 3 u - exp(u), for u = m + s z.
        u = v[0] + np.exp(v[1]) * nodes
        return -(weights @ (3 * u - np.exp(u))) - v[1]

    m, log_s = optimize.minimize(negative_elbo, [0.0, 0.0], tol=1e-12).x
    online = nt.OnlineVI(gamma_rate, GUIDES[name](gamma_rate), nt.online.ngvi())
    state = online.init(KEY, np.ones(1))
    start = family_of(state.posterior).marginal_scale(state.posterior)[0]
    corrected = online.with_prior(state, np.ones(1), num_particles=2000)
    q = corrected.posterior
    scale = float(family_of(q).marginal_scale(q)[0])
    assert abs(float(start) / np.exp(log_s) - 1) > 0.01
    # Monte Carlo error of the mean and of the curvature, E exp(u), from 2000 draws.
    np.testing.assert_allclose(q.loc[0], m, atol=5 * np.exp(log_s) / np.sqrt(2000))
    np.testing.assert_allclose(
        scale, np.exp(log_s), rtol=5 * 0.5 * np.exp(log_s) / np.sqrt(2000)
    )
    assert int(corrected.count) == int(state.count)


def exponential_rate(y):
    rate = numpyro.sample("rate", dist.Exponential(1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Exponential(rate), obs=y)


@pytest.mark.full
def test_the_prior_is_put_in_the_place_of_its_gaussian_once(x64):
    online = nt.OnlineVI(exponential_rate, AutoOnlineDiagonalNormal, NGVI)
    with pytest.warns(UserWarning, match="rate"):
        first = online.init(KEY, np.ones(1))
    corrected = online.with_prior(first, np.ones(1), num_particles=10_000)
    assert corrected.count == 0
    # Of u = log rate the density is exp(u - exp(u)): under the best Gaussian exp(u), a lognormal, has mean 1,
    # which is its precision too. The error in the scale is half of that in the mean.
    q = corrected.posterior
    error = np.sqrt(np.expm1(1.0)) / np.sqrt(10_000)
    np.testing.assert_allclose(q.scale[0], 1.0, rtol=5 * 0.5 * error)
    np.testing.assert_allclose(q.loc[0], -0.5, atol=5 * error)
    assert abs(float(first.posterior.scale[0]) - 1.0) > 5 * 0.5 * error
    check_refusals(online, first)


def check_refusals(online, first):
    other = NGVI.init(MeanField(np.ones(1), np.ones(1)))
    with pytest.raises(ValueError, match="counted twice"):
        online.with_prior(first._replace(rule_state=other), np.ones(1))
    rule = nt.online.sva(0.1)
    without_evidence = nt.OnlineVI(online.model, online.guide, rule)
    with pytest.raises(TypeError, match="got sva on MeanField"):
        without_evidence.with_prior(
            first._replace(rule_state=rule.init(first.posterior)), np.ones(1)
        )


def test_a_gamma_prior_is_put_in_the_place_of_its_gaussian_once(x64):
    online = nt.OnlineVI(gamma_rate, AutoOnlineDiagonalNormal, NGVI)
    with pytest.warns(UserWarning, match="rate"):
        first = online.init(KEY, np.ones(1))
    corrected = online.with_prior(first, np.ones(1))
    assert corrected.count == 0
    # Of u = log rate the density is exp(3 u - exp(u)): under the best Gaussian exp(u) has mean 3, which is its
    # precision too. From 1000 draws the error in the scale is half of that in the mean.
    q = corrected.posterior
    tolerance = 5 * 0.5 * 3**-0.5 / np.sqrt(1000)
    np.testing.assert_allclose(q.scale[0], 3**-0.5, rtol=tolerance)
    np.testing.assert_allclose(
        q.loc[0], np.log(3.0) - 1 / 6, atol=5 * 3**-0.5 / np.sqrt(1000)
    )
    assert abs(float(first.posterior.scale[0]) * 3**0.5 - 1) > tolerance
    check_refusals(online, first)


def test_an_exact_prior_leaves_no_residual(x64):
    x, y = data(1)
    online, _ = settled("diagonal")
    state = online.init(KEY, x, y)
    assert online.with_prior(state, x, y) is state


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:the priors of")
def test_a_run_from_a_posterior_has_its_prior_already(x64):
    online = nt.OnlineVI(gamma_rate, AutoOnlineDiagonalNormal, NGVI)
    online.init(KEY, np.ones(1))
    second = online.init(KEY, np.ones(1), prior=MeanField(np.ones(1), np.ones(1)))
    with pytest.raises(ValueError, match="counted twice"):
        online.with_prior(second, np.ones(1))


@pytest.mark.parametrize("singular", [False, True])
def test_a_full_guide_starts_at_the_covariance_of_what_was_drawn(singular):
    """Of sites that are drawn together; where they determine each other, at their variances alone."""
    guide = SimpleNamespace(
        layout=Layout((("a", ()), ("b", (2,)), ("c", ()))), latent_dim=4
    )
    rng = np.random.default_rng(0)
    b = rng.normal(size=(NUM_PRIOR_DRAWS, 2)) * [2.0, 1.0]
    c = b[:, 0] if singular else b.sum(axis=1) + rng.normal(size=NUM_PRIOR_DRAWS)
    draws = {"c": c, "b": b}
    loc, scale = jnp.arange(4.0), jnp.array([0.5, 2.0, 1.0, 3.0])
    q = AutoOnlineMultivariateNormal.start_at(
        guide, loc, scale, PriorMoments({}, draws, {}, {})
    )
    expected = np.diag(np.square([0.5, 2.0, 1.0, 3.0]))
    if not singular:
        expected[1:, 1:] = np.cov(np.column_stack([b, c]).T, bias=True)
    np.testing.assert_allclose(q.factor @ q.factor.T, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(q.loc, loc)


def test_coordinates_of_a_posterior_take_the_order_of_a_guide():
    old, new = (
        Layout((("a", ()), ("b", (2,)), ("c", ()))),
        Layout((("c", ()), ("b", (2,)), ("a", ()))),
    )
    order = [3, 1, 2, 0]
    root = np.tril(np.arange(16.0).reshape(4, 4) + 1.0)
    loc = jnp.arange(4.0)
    moved = reorder(FullRank(loc, jnp.asarray(root, jnp.float32)), old, new)
    np.testing.assert_array_equal(moved.loc, order)
    np.testing.assert_allclose(
        moved.factor @ moved.factor.T, (root @ root.T)[np.ix_(order, order)], rtol=1e-5
    )
    assert np.all(np.triu(moved.factor, 1) == 0)
    narrow = MeanField(loc, loc + 1.0)
    np.testing.assert_array_equal(reorder(narrow, old, new).scale, [4.0, 2.0, 3.0, 1.0])
    assert reorder(narrow, old, old) is narrow


@pytest.mark.full
def test_the_rule_is_the_implicit_step_where_none_is_given():
    online = nt.OnlineVI(linear, AutoOnlineMultivariateNormal, expectation=ETA)
    # One rule for all, which shares what is compiled.
    assert online.rule is nt.OnlineVI(linear, AutoOnlineDiagonalNormal).rule
    assert online.rule.name == "rvga"
    x, y = data()
    state, _ = online.run(KEY, x, y)
    mean, _ = exact(x, y)
    posterior = online.get_posterior(state)
    order = [name for name, _ in state.layout.sites]
    np.testing.assert_allclose(
        posterior.mean, mean if order[0] == "a" else np.roll(mean, -1), rtol=1e-4
    )
