"""Local continuous latents: alpha-variational Bayes, whose local sites are scaled in model and guide."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.infer import (
    MCMC,
    NUTS,
    SVI,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    autoguide,
)
from numpyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import log_density, potential_energy
from oracles import gaussian_kl
from scipy import integrate, stats
from scipy.special import logsumexp

import numpyro_tempered as nt
from numpyro_tempered.infer.elbo import has_point_mass
from numpyro_tempered.infer.svi import finish
from numpyro_tempered.report.arviz import group

KEY = jax.random.key(8)
ALPHA, N = 0.25, 20
PRIOR_SD, LOCAL_SD, NOISE = 2.0, 1.0, 0.5
X = 1.0 + 1.2 * np.random.default_rng(3).normal(size=N)


def model(x, size=None):
    theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
    with numpyro.plate("n", len(x), subsample_size=size) as i:
        z = numpyro.sample("z", dist.Normal(theta, LOCAL_SD))
        numpyro.sample("x", dist.Normal(z, NOISE), obs=jnp.asarray(x)[i])


def tempered_model(alpha=ALPHA):
    return nt.temper(model, alpha, local_plates=["n"])


# The optimum over mean-field Gaussians, by coordinates: each q is the exponential of an expected log-joint.


def optimum(alpha=ALPHA, local=True):
    """Means and sds of theta and z; ``local``: z is scaled by alpha as x is, else x alone."""
    prior = 1 / LOCAL_SD**2
    z_precision = (1.0 if local else alpha) / NOISE**2 + prior
    weight = alpha if local else 1.0
    theta_precision = PRIOR_SD**-2 + weight * N * prior
    m = 0.0
    for _ in range(500):
        z = ((1.0 if local else alpha) * X / NOISE**2 + m * prior) / z_precision
        m = weight * prior * z.sum() / theta_precision
    return m, theta_precision**-0.5, z, np.full(N, z_precision**-0.5)


def objective(m, s, z, v, alpha=ALPHA):
    """The bound in closed form: its two parts, alpha E log p(x|z) and the KLs."""
    log_lik = stats.norm.logpdf(X, z, NOISE).sum() - 0.5 * (v**2).sum() / NOISE**2
    local = (gaussian_kl(z, v, m, LOCAL_SD) + 0.5 * s**2 / LOCAL_SD**2).sum()
    return alpha * log_lik, alpha * local + gaussian_kl(m, s, 0.0, PRIOR_SD)


def params_of(m, s, z, v):
    return {
        "theta_auto_loc": np.asarray(m),
        "theta_auto_scale": np.asarray(s),
        "z_auto_loc": np.asarray(z),
        "z_auto_scale": np.asarray(v),
    }


def test_known_answers_of_the_oracle():
    _, s, _, v = optimum()
    assert (round(s, 4), round(v[0], 4)) == (0.4364, 0.4472)
    _, s, _, v = optimum(local=False)
    assert (round(s, 4), round(v[0], 4)) == (0.2222, 0.7071)
    exact = (PRIOR_SD**-2 + ALPHA * N / (LOCAL_SD**2 + NOISE**2)) ** -0.5
    # The 0.4851 of the tempered marginal likelihood: the mean-field optimum is below, as it is for alpha = 1.
    assert (
        round((PRIOR_SD**-2 + ALPHA * N / (LOCAL_SD**2 + NOISE**2)) ** -0.5, 4)
        == 0.4851
    )
    assert exact > optimum()[1]


def auto_guide(tempered, x=X):
    guide = AutoNormal(tempered)
    handlers.seed(guide, 0)(jnp.asarray(x))
    return guide


FEW = (Trace_ELBO,)
LOSSES = [Trace_ELBO(), TraceEnum_ELBO(), TraceGraph_ELBO(), TraceMeanField_ELBO()]


def loss_by_hand(loss, q, draw, alpha=ALPHA, x=X):
    m, s, z, v = q
    theta, local = draw
    log_lik = stats.norm.logpdf(x, local, NOISE).sum()
    if isinstance(loss, TraceMeanField_ELBO):
        kls = alpha * gaussian_kl(z, v, theta, LOCAL_SD).sum() + gaussian_kl(
            m, s, 0.0, PRIOR_SD
        )
        return kls - alpha * log_lik
    ratio = (
        stats.norm.logpdf(local, z, v).sum()
        - stats.norm.logpdf(local, theta, LOCAL_SD).sum()
    )
    glob = stats.norm.logpdf(theta, m, s) - stats.norm.logpdf(theta, 0.0, PRIOR_SD)
    return alpha * (ratio - log_lik) + glob


@pytest.mark.full
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_every_loss_is_the_scaled_bound(loss, x64):
    """At the guide's own draw, so exactly; with the power traced."""
    tempered = tempered_model()
    raw = auto_guide(tempered)
    q = (0.4, 0.7, np.linspace(-1.0, 1.0, N), np.linspace(0.3, 0.9, N))
    params = params_of(*q)
    _, guide_key = jax.random.split(KEY)
    drawn = handlers.trace(
        handlers.substitute(handlers.seed(raw, guide_key), params)
    ).get_trace(jnp.asarray(X))
    draw = float(drawn["theta"]["value"]), np.asarray(drawn["z"]["value"])

    @jax.jit
    @jax.vmap
    def run(alpha):
        model = tempered_model(alpha)
        return loss.loss(KEY, params, model, model.guide(raw), jnp.asarray(X))

    powers = [ALPHA, 0.6, 1.0]
    want = [loss_by_hand(loss, q, draw, alpha) for alpha in powers]
    np.testing.assert_allclose(run(jnp.array(powers)), want, rtol=1e-10)
    got = loss.loss(KEY, params, tempered, tempered.guide(raw), jnp.asarray(X))
    assert float(got) == pytest.approx(want[0], rel=1e-10)


def gradients(tempered, loss, num=1000):
    """The function from parameters to the largest mean of a gradient, in standard errors."""
    guide = tempered.guide(auto_guide(tempered))
    x = jnp.asarray(X)

    @jax.jit
    def each(params):
        def one(key):
            return jax.grad(lambda p: loss.loss(key, p, tempered, guide, x))(params)

        return jax.vmap(one)(jax.random.split(KEY, num))

    def largest(q):
        found = each(params_of(*q)).values()
        return max(
            float(np.max(np.abs(np.mean(g, 0)) / np.std(g, 0) * np.sqrt(num)))
            for g in found
        )

    return largest


@pytest.mark.full
@pytest.mark.parametrize(
    "loss", [Trace_ELBO(), TraceMeanField_ELBO()], ids=lambda loss: type(loss).__name__
)
def test_known_answer_the_optimum_is_stationary(loss, x64):
    # The largest of 42 coordinates.
    local = gradients(tempered_model(), loss)
    assert local(optimum()) < 5.0
    assert local(optimum(local=False)) > 10.0
    # Tempering the observed sites only has the other optimum.
    observed = gradients(nt.temper(model, ALPHA), loss)
    assert observed(optimum(local=False)) < 5.0
    assert observed(optimum()) > 10.0


@pytest.fixture(scope="module")
def fit():
    return nt.fit_svi(
        KEY,
        model,
        AutoNormal,
        jnp.asarray(X),
        alpha=ALPHA,
        local_plates=["n"],
        num_steps=1500,
        loss=TraceMeanField_ELBO(num_particles=10),
    )


def like_auto_normal(x):
    """With the parameters of AutoNormal, whose own set-up is many small programs."""
    numpyro.sample(
        "theta",
        dist.Normal(numpyro.param("theta_auto_loc"), numpyro.param("theta_auto_scale")),
    )
    with numpyro.plate("n", len(x)):
        numpyro.sample(
            "z", dist.Normal(numpyro.param("z_auto_loc"), numpyro.param("z_auto_scale"))
        )


@pytest.fixture(scope="module")
def at_optimum():
    """What a fit that found the optimum holds."""
    params = {k: jnp.asarray(np.float32(v)) for k, v in params_of(*optimum()).items()}
    args = (jnp.asarray(X),)
    return finish(
        (KEY, KEY),
        tempered_model(),
        like_auto_normal,
        params,
        np.zeros(1),
        args,
        kwargs={},
        num_particles=1000,
    )


FITS = ["at_optimum", pytest.param("fit", marks=pytest.mark.full)]


def q_of(fit):
    return tuple(
        np.asarray(fit.params[f"{site}_auto_{k}"], float)
        for site in ("theta", "z")
        for k in ("loc", "scale")
    )


@pytest.mark.full
def test_a_fit_finds_the_optimum(fit):
    m, s, _, v = q_of(fit)
    want = optimum()
    # A tenth of what separates the optimum from the one with observed sites tempered only.
    assert abs(np.log(s / want[1])) < 0.06
    assert np.max(np.abs(np.log(v / want[3]))) < 0.1
    assert abs(m - want[0]) < 0.1 * want[1]
    assert isinstance(fit.guide, AutoNormal)


@pytest.mark.parametrize("which", FITS)
def test_the_elbo_of_a_fit_is_the_bound(which, request):
    fit = request.getfixturevalue(which)
    q = q_of(fit)
    scaled_log_lik, kl = objective(*q)
    assert abs(fit.elbo.value - (scaled_log_lik - kl)) < 4 * fit.elbo.se
    assert fit.elbo.se < 0.2
    # The KL of z is analytic at each draw of theta, whose variance is left.
    m, s, z, _ = q
    slope, curve = ALPHA * (m - z).sum() / LOCAL_SD**2, ALPHA * N / LOCAL_SD**2
    se = np.sqrt((slope * s) ** 2 + 0.5 * (curve * s**2) ** 2) / np.sqrt(1000)
    assert abs(fit.elbo.kl - kl) < 4 * se
    assert fit.elbo.value == pytest.approx(
        ALPHA * fit.elbo.expected_log_lik - fit.elbo.kl, rel=1e-4
    )
    assert (
        fit.elbo.value
        <= objective(*optimum())[0] - objective(*optimum())[1] + 4 * fit.elbo.se
    )


@pytest.mark.parametrize("which", FITS)
def test_results_of_a_fit(which, request):
    fit = request.getfixturevalue(which)
    draws = fit.sample_posterior(KEY, (6,))
    assert {k: v.shape for k, v in draws.items()} == {"theta": (6,), "z": (6, N)}
    data = nt.to_inference_data(fit, num_samples=6)
    z = np.asarray(group(data, "posterior")["z"])[0]
    np.testing.assert_allclose(
        np.asarray(group(data, "untempered_log_likelihood")["x"])[0],
        stats.norm.logpdf(X, z, NOISE),
        rtol=1e-3,
        atol=1e-4,
    )
    assert data.attrs["alpha"] == ALPHA


@pytest.mark.full
@pytest.mark.skipif(
    not hasattr(numpyro.infer, "psis_diagnostic"), reason="NumPyro has it from 0.22 on"
)
def test_psis_takes_the_wrapped_guide(fit):
    from numpyro.infer import psis_diagnostic

    x = jnp.asarray(X)
    k = psis_diagnostic(
        KEY, fit.params, fit.model, fit.model.guide(fit.guide), x, num_particles=200
    )
    assert np.isfinite(k)
    with pytest.raises(ValueError, match="does not scale the local latent 'z'"):
        psis_diagnostic(KEY, fit.params, fit.model, fit.guide, x, num_particles=200)


def test_a_fit_holds_the_raw_guide(at_optimum):
    assert at_optimum.guide is like_auto_normal
    assert nt.temper(model, ALPHA).guide(like_auto_normal) is like_auto_normal


@pytest.mark.full
def test_the_raw_guide_of_a_fit_keeps_its_methods(fit):
    guide, params = fit.guide, fit.params
    assert isinstance(guide, AutoNormal)
    assert guide.median(params)["z"].shape == (N,)
    assert nt.temper(model, ALPHA).guide(guide) is guide


@pytest.mark.full
def test_the_raw_guide_keeps_its_methods():
    tempered = tempered_model()
    guide = auto_guide(tempered)
    svi = SVI(tempered, tempered.guide(guide), numpyro.optim.Adam(0.01), Trace_ELBO())
    result = svi.run(KEY, 2, jnp.asarray(X), progress_bar=False)
    draws = guide.sample_posterior(KEY, result.params, sample_shape=(3,))
    assert draws["z"].shape == (3, N)
    assert guide.median(result.params)["z"].shape == (N,)
    assert nt.temper(model, ALPHA).guide(guide) is guide


# Guides.


def by_hand(x, size=None):
    m, s = (
        numpyro.param("m", 0.3),
        numpyro.param("s", 0.6, constraint=dist.constraints.positive),
    )
    numpyro.sample("theta", dist.Normal(m, s))
    a, b = numpyro.param("a", 0.8), numpyro.param("b", 0.1)
    with numpyro.plate("n", len(x), subsample_size=size) as i:
        numpyro.sample("z", dist.Normal(a * jnp.asarray(x)[i] + b, 0.5))


def draw_by_hand(key):
    """The draw that a loss with this key takes."""

    @jax.jit
    def draw(key):
        drawn = handlers.trace(
            handlers.seed(by_hand, jax.random.split(key)[1])
        ).get_trace(X)
        return drawn["theta"]["value"], drawn["z"]["value"]

    theta, z = draw(key)
    return float(theta), np.asarray(z)


SOME_LOSSES = [
    pytest.param(loss, marks=[] if type(loss) in FEW else pytest.mark.full)
    for loss in LOSSES
]


@pytest.mark.full
@pytest.mark.parametrize("loss", SOME_LOSSES, ids=lambda loss: type(loss).__name__)
def test_an_amortised_guide(loss, x64):
    """With the power traced."""
    draw = draw_by_hand(KEY)

    def run(alpha):
        tempered = tempered_model(alpha)
        return loss.loss(KEY, {}, tempered, tempered.guide(by_hand), X)

    powers = np.array([ALPHA, 0.6, 1.0])
    want = [
        loss_by_hand(loss, (0.3, 0.6, 0.8 * X + 0.1, np.full(N, 0.5)), draw, alpha)
        for alpha in powers
    ]
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(powers), want, rtol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_an_amortised_guide_of_a_known_power(loss, x64):
    tempered = tempered_model()
    _, guide_key = jax.random.split(KEY)
    drawn = handlers.trace(handlers.seed(by_hand, guide_key)).get_trace(X)
    draw = float(drawn["theta"]["value"]), np.asarray(drawn["z"]["value"])
    got = jax.jit(lambda key: loss.loss(key, {}, tempered, tempered.guide(by_hand), X))(
        KEY
    )
    want = loss_by_hand(loss, (0.3, 0.6, 0.8 * X + 0.1, np.full(N, 0.5)), draw)
    assert float(got) == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize(
    "loss",
    [pytest.param(Trace_ELBO(), marks=pytest.mark.full), TraceMeanField_ELBO()],
    ids=lambda loss: type(loss).__name__,
)
@pytest.mark.parametrize("size", tiered([1, 2, 3], unit=[2]))
def test_subsamples_have_the_full_bound_on_average(size, loss, x64):
    """Over all subsets, with each z at a value that belongs to its datum."""
    x = X[:4]
    tempered = tempered_model()

    @functools.partial(jax.jit, static_argnums=1)
    def value(subset, size):
        def middle(site):
            return (
                site["fn"].mean
                if site["type"] == "sample" and not site["is_observed"]
                else None
            )

        fixed = handlers.substitute(tempered.guide(by_hand), substitute_fn=middle)
        if subset is not None:
            fixed = handlers.substitute(fixed, data={"n": subset})
        return loss.loss(KEY, {}, tempered, fixed, x, size)

    whole = float(value(None, None))
    parts = [
        float(value(np.array(subset), size))
        for subset in itertools.combinations(range(4), size)
    ]
    assert np.mean(parts) == pytest.approx(whole, rel=1e-12)
    q = (0.3, 0.6, 0.8 * x + 0.1, np.full(4, 0.5))
    assert whole == pytest.approx(loss_by_hand(loss, q, (0.3, q[2]), x=x), rel=1e-12)


@pytest.mark.full
def test_a_network_as_encoder(x64):
    pytest.importorskip("flax")
    import flax.linen
    from numpyro.contrib.module import flax_module

    data = np.random.default_rng(0).normal(size=(6, 3))

    def decoder(y, size=None):
        w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
        with numpyro.plate("n", len(y), subsample_size=size) as i:
            z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
            numpyro.sample(
                "y", dist.Normal(z @ w, 0.5).to_event(1), obs=jnp.asarray(y)[i]
            )

    def encoder(y, size=None):
        net = flax_module("encoder", flax.linen.Dense(2), input_shape=(3,))
        loc = numpyro.param("loc", jnp.ones((2, 3)))
        numpyro.sample("w", dist.Normal(loc, 0.1).to_event(2))
        with numpyro.plate("n", len(y), subsample_size=size) as i:
            numpyro.sample("z", dist.Normal(net(jnp.asarray(y)[i]), 0.3).to_event(1))

    kernel, bias = np.array([[0.2, -0.1], [0.4, 0.3], [0.0, 0.5]]), np.array([0.1, 0.2])
    params = {
        "encoder$params": {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}
    }
    tempered = nt.temper(decoder, ALPHA, local_plates=["n"])
    _, guide_key = jax.random.split(KEY)
    drawn = handlers.trace(
        handlers.substitute(handlers.seed(encoder, guide_key), params)
    ).get_trace(data)
    w, z = np.asarray(drawn["w"]["value"]), np.asarray(drawn["z"]["value"])
    local = gaussian_kl(data @ kernel + bias, 0.3, 0.0, 1.0).sum()
    want = (
        ALPHA * (local - stats.norm.logpdf(data, z @ w, 0.5).sum())
        + gaussian_kl(np.ones((2, 3)), 0.1, 0.0, 1.0).sum()
    )
    got = TraceMeanField_ELBO().loss(
        KEY, params, tempered, tempered.guide(encoder), data
    )
    assert float(got) == pytest.approx(want, rel=1e-9)
    result = SVI(
        tempered, tempered.guide(encoder), numpyro.optim.Adam(0.01), Trace_ELBO()
    ).run(KEY, 3, data, 2, progress_bar=False)
    assert np.all(np.isfinite(result.losses))


def listed(tempered, of_local=AutoNormal, of_global=autoguide.AutoMultivariateNormal):
    guide = AutoGuideList(tempered)
    guide.append(of_global(handlers.block(tempered, hide=["z"])))
    guide.append(of_local(handlers.block(tempered, hide=["theta"])))
    return guide


@pytest.mark.full
def test_a_list_of_guides(x64):
    """A flat guide of the globals, one with plates of the locals."""
    tempered = tempered_model()
    guide = listed(tempered)
    svi = SVI(tempered, tempered.guide(guide), numpyro.optim.Adam(0.01), Trace_ELBO())
    state = svi.init(KEY, jnp.asarray(X))
    params = svi.get_params(state)
    _, guide_key = jax.random.split(KEY)
    drawn = handlers.trace(
        handlers.substitute(handlers.seed(guide, guide_key), params)
    ).get_trace(jnp.asarray(X))
    theta, z = float(drawn["theta"]["value"]), np.asarray(drawn["z"]["value"])
    (m,) = (
        v for k, v in params.items() if k.endswith("auto_loc") and jnp.shape(v) == (1,)
    )
    (tril,) = (v for k, v in params.items() if k.endswith("scale_tril"))
    loc, scale = (
        next(v for k, v in params.items() if k.endswith(f"z_auto_{kind}"))
        for kind in ("loc", "scale")
    )
    q = float(m[0]), float(tril[0, 0]), np.asarray(loc), np.asarray(scale)
    got = Trace_ELBO().loss(
        KEY, params, tempered, tempered.guide(guide), jnp.asarray(X)
    )
    assert float(got) == pytest.approx(
        loss_by_hand(Trace_ELBO(), q, (theta, z)), rel=1e-9
    )


FLAT = [
    "AutoDiagonalNormal",
    *(
        pytest.param(name, marks=pytest.mark.full)
        for name in ("AutoMultivariateNormal", "AutoLaplaceApproximation")
    ),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "AutoLowRankMultivariateNormal",
            "AutoBNAFNormal",
            "AutoIAFNormal",
            "AutoDAIS",
        )
    ),
]


@pytest.mark.parametrize("name", FLAT)
@pytest.mark.parametrize("computed", tiered([False, True], unit=[False]))
def test_flat_guides_are_refused(name, computed):
    tempered = tempered_model()
    guide = getattr(autoguide, name)(tempered)
    svi, x = (
        SVI(tempered, tempered.guide(guide), numpyro.optim.Adam(0.01), Trace_ELBO()),
        jnp.asarray(X),
    )

    def run():
        return (
            svi.run(KEY, 1, x, progress_bar=False)
            if computed
            else jax.eval_shape(lambda: svi.init(KEY, x)[0])
        )

    with pytest.raises(
        ValueError, match=r"^the guide does not.*one flat vector cannot"
    ):
        run()


@pytest.mark.full
def test_fit_svi_refuses_flat_guides():
    options = {
        "alpha": ALPHA,
        "local_plates": ["n"],
        "num_steps": 1,
        "num_particles": 2,
        "optim": numpyro.optim.Adam(0.05),
    }
    with pytest.raises(
        ValueError, match=r"^the guide does not.*one flat vector cannot"
    ):
        nt.fit_svi(
            KEY, model, autoguide.AutoMultivariateNormal, jnp.asarray(X), **options
        )


@pytest.mark.full
def test_a_flat_guide_of_the_locals_in_a_list_is_refused():
    tempered = tempered_model()
    guide = listed(
        tempered, of_local=autoguide.AutoDiagonalNormal, of_global=AutoNormal
    )
    with pytest.raises(
        ValueError, match=r"^the guide does not.*one flat vector cannot"
    ):
        SVI(
            tempered, tempered.guide(guide), numpyro.optim.Adam(0.01), Trace_ELBO()
        ).init(KEY, jnp.asarray(X))


def without_plate(x):
    numpyro.sample("theta", dist.Normal(0.0, 1.0))
    numpyro.sample("z", dist.Normal(jnp.zeros(len(x)), 1.0))


def other_plate(x):
    numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("others", len(x)):
        numpyro.sample("z", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize("computed", tiered([False, True], unit=[False]))
@pytest.mark.parametrize("loss", SOME_LOSSES, ids=lambda loss: type(loss).__name__)
def test_guides_that_do_not_scale_are_refused(loss, computed):
    tempered, x = tempered_model(), jnp.asarray(X)

    def refused(guide):
        # A trace is enough: what is refused is not computed.
        run = (lambda f: f()) if computed else jax.eval_shape
        run(lambda: loss.loss(KEY, {}, tempered, guide, x))

    guides = [by_hand, tempered.guide(without_plate), tempered.guide(other_plate)]
    if computed:
        guides.append(auto_guide(tempered))
    for guide in guides:
        with pytest.raises(
            ValueError,
            match=r"does not scale the local latent 'z'.*tempered\.guide\(guide\)",
        ):
            refused(guide)
    with pytest.raises(
        ValueError,
        match=r"^the guide.*scales the local latent 'z' by 0\.5 and the model by 0\.25.*names the",
    ):
        refused(tempered_model(0.5).guide(by_hand))


def test_a_wrapped_guide_with_an_untempered_model_is_refused():
    """The guide's sites would be scaled, and the model's not."""
    guide = tempered_model().guide(by_hand)
    for other in (nt.temper(model, ALPHA), nt.temper(model, 1.0, local_plates=["n"])):
        with pytest.raises(
            ValueError,
            match=r"^the guide scales.*local latent 'z'.*given, which names the",
        ):
            Trace_ELBO().loss(KEY, {}, other, guide, jnp.asarray(X))


@pytest.mark.parametrize("name", ["nowhere", "m"])
def test_a_plate_that_is_not_met_is_refused(name):
    """A misspelt plate would silently leave the local latents untempered."""
    tempered = nt.temper(model, ALPHA, local_plates=[name])
    with pytest.raises(ValueError, match=name):
        Trace_ELBO().loss(KEY, {}, tempered, tempered.guide(by_hand), jnp.asarray(X))


def test_a_plate_around_temper_is_seen_or_refused(x64):
    def around(x):
        theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
        with numpyro.plate("n", len(x)), nt.temper(alpha=ALPHA, local_plates=["n"]):
            z = numpyro.sample("z", dist.Normal(theta, LOCAL_SD))
            numpyro.sample("x", dist.Normal(z, NOISE), obs=jnp.asarray(x))

    values = {"theta": 0.4, "z": jnp.zeros(N)}
    try:
        got = log_density(around, (X,), {}, values)[0]
    except ValueError:
        return
    want = log_density(tempered_model(), (X,), {}, values)[0]
    assert float(got) == pytest.approx(float(want), rel=1e-12)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        (
            {"alpha": 0.0},
            ValueError,
            r"alpha = 0 leaves local latents without a target.*take alpha",
        ),
        (
            {"alpha": {"x": 0.5}},
            ValueError,
            r"one alpha for all sites.*mapping or an array",
        ),
        (
            {"alpha": 0.5, "local_plates": "n"},
            TypeError,
            "local_plates must be a collection of names",
        ),
    ],
)
def test_arguments_that_are_refused(kwargs, error, match):
    with pytest.raises(error, match=match):
        nt.temper(model, **{"local_plates": ["n"], **kwargs})
    with pytest.raises(error, match=match):
        nt.fit_svi(
            KEY, model, AutoNormal, X, num_steps=1, **{"local_plates": ["n"], **kwargs}
        )


def test_alpha_one_is_bayes_in_any_guide(x64):
    tempered = nt.temper(model, 1.0, local_plates=["n"])
    pairs = (model, by_hand), (tempered, by_hand), (tempered, tempered.guide(by_hand))
    want, *found = jax.jit(
        lambda key: [Trace_ELBO().loss(key, {}, *pair, X) for pair in pairs]
    )(KEY)
    for value in found:
        assert float(value) == pytest.approx(float(want), rel=1e-14)


# MCMC.


def unknown_scale(x):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    with numpyro.plate("n", len(x)):
        z = numpyro.sample("z", dist.Normal(0.0, s))
        numpyro.sample("x", dist.Normal(z, NOISE), obs=x)


def test_mcmc_has_the_joint_density_for_its_target(x64):
    tempered = nt.temper(unknown_scale, ALPHA, local_plates=["n"])
    x = X[:1]

    @jax.jit
    def joint(s, z):
        return log_density(tempered, (jnp.asarray(x),), {}, {"s": s, "z": z[None]})[0]

    def by_hand(s, z):
        local = stats.norm.logpdf(z, 0.0, s) + stats.norm.logpdf(x[0], z, NOISE)
        return stats.halfnorm.logpdf(s) + ALPHA * local

    grid = [(0.4, 0.1), (1.0, -0.5), (2.5, 1.2)]
    np.testing.assert_allclose(
        [joint(*np.array(p)) for p in grid], [by_hand(*p) for p in grid], rtol=1e-12
    )

    # Its marginal in s is not the tempered marginal likelihood times the prior.
    def gap(s):
        mass, _ = integrate.quad(
            lambda z: np.exp(by_hand(s, z)), -40.0, 40.0, limit=400, points=[0.0, x[0]]
        )
        right = stats.halfnorm.logpdf(s) + ALPHA * stats.norm.logpdf(
            x[0], 0.0, np.hypot(s, NOISE)
        )
        return np.log(mass) - right

    assert abs(gap(0.4) - gap(2.5)) > 0.3


class Looks(MCMCKernel):
    """A kernel that looks at its density once."""

    sample_field = "theta"

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        values = {"theta": np.float32(0.3), "z": np.zeros(3, np.float32)}
        jax.eval_shape(
            lambda: potential_energy(tempered_model(), model_args, model_kwargs, values)
        )
        raise StopAsyncIteration("looked")

    def sample(self, state, model_args, model_kwargs):
        return state


def test_any_kernel_of_mcmc_warns():
    mcmc = MCMC(Looks(), num_warmup=1, num_samples=1, progress_bar=False)
    with (
        pytest.warns(
            UserWarning, match=r"MCMC samples the local latent 'z'.*fit it by SVI"
        ),
        pytest.raises(StopAsyncIteration, match="looked"),
    ):
        mcmc.run(KEY, X[:3])


@pytest.mark.full
def test_mcmc_warns():
    mcmc = MCMC(NUTS(tempered_model()), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.warns(
        UserWarning, match=r"MCMC samples the local latent 'z'.*fit it by SVI"
    ):
        mcmc.run(KEY, jnp.asarray(X[:3]))


# Together with discrete latents.


@pytest.mark.full
def test_beside_marginalised_latents(x64):
    """A mixture around a local continuous covariate."""
    probs, shift = np.array([0.3, 0.7]), np.array([-1.0, 1.5])

    def both(x):
        theta = numpyro.sample("theta", dist.Normal(0.0, PRIOR_SD))
        with numpyro.plate("n", len(x)):
            z = numpyro.sample("z", dist.Normal(theta, LOCAL_SD))
            k = numpyro.sample("k", dist.Categorical(probs=jnp.asarray(probs)))
            numpyro.sample(
                "x", dist.Normal(z + jnp.asarray(shift)[k], NOISE), obs=jnp.asarray(x)
            )

    tempered = nt.temper(nt.marginalize(both), ALPHA, local_plates=["n"])
    theta, z = draw_by_hand(KEY)
    log_lik = logsumexp(
        np.log(probs) + stats.norm.logpdf(X[:, None], z[:, None] + shift, NOISE), axis=1
    ).sum()
    local = (
        stats.norm.logpdf(z, 0.8 * X + 0.1, 0.5).sum()
        - stats.norm.logpdf(z, theta, LOCAL_SD).sum()
    )
    glob = stats.norm.logpdf(theta, 0.3, 0.6) - stats.norm.logpdf(theta, 0.0, PRIOR_SD)
    got = jax.jit(
        lambda key: Trace_ELBO().loss(key, {}, tempered, tempered.guide(by_hand), X)
    )(KEY)
    assert float(got) == pytest.approx(ALPHA * (local - log_lik) + glob, rel=1e-10)
    with pytest.raises(ValueError, match="does not scale the local latent 'z'"):
        jax.eval_shape(lambda: Trace_ELBO().loss(KEY, {}, tempered, by_hand, X))


def test_a_point_for_each_datum_is_known():
    def points(x):
        numpyro.sample("theta", dist.Normal(0.0, 1.0))
        with numpyro.plate("n", len(x)):
            numpyro.sample(
                "z", dist.Delta(numpyro.param("z_loc", np.zeros(len(x), np.float32)))
            )

    assert has_point_mass(KEY, tempered_model().guide(points), {}, (X,), {})


@pytest.mark.full
def test_a_point_for_each_datum_is_an_infinite_kl():
    fit = nt.fit_svi(
        KEY,
        model,
        AutoDelta,
        jnp.asarray(X.copy()),
        alpha=ALPHA,
        local_plates=["n"],
        num_steps=2,
        optim=numpyro.optim.Adam(0.05),
        num_particles=2,
    )
    assert fit.elbo.value == -np.inf
