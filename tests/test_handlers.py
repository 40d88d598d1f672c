"""The power on the likelihood: what temper scales, and what it must leave alone."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, log_likelihood
from numpyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from numpyro.infer.reparam import CircularReparam, LocScaleReparam, NeuTraReparam
from numpyro.infer.util import initialize_model, log_density, potential_energy
from numpyro.primitives import Messenger
from scipy import integrate, stats
from scipy.special import logsumexp

import numpyro_tempered as nt

Y = np.array([0.3, -1.2, 2.5, 0.8])


class naive_temper(Messenger):
    """Scales whatever is observed, as a user would write it; wrong for every Jacobian."""

    def __init__(self, fn=None, alpha=1.0):
        self.alpha = alpha
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["scale"] = self.alpha if msg.get("scale") is None else self.alpha * msg["scale"]


def normal(y=Y):
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.5), obs=y)


def normal_density(theta, alpha, y=Y):
    return stats.norm.logpdf(theta, 0.5, 2.0) + alpha * stats.norm.logpdf(y, theta, 1.5).sum()


def positive(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(0.0, s), obs=y)


def positive_density(s, y, alpha):
    """Tempered joint density of ``positive`` in s, without the Jacobian."""
    return stats.halfnorm.logpdf(s) + alpha * stats.norm.logpdf(y, 0.0, s)


def trace_of(model, *args, **kwargs):
    return handlers.trace(handlers.seed(model, 0)).get_trace(*args, **kwargs)


def density(model, params, *args):
    return log_density(model, args, {}, params)[0]


def potential(model, params, *args):
    return potential_energy(model, args, {}, params)


def test_temper_as_function_decorator_and_context_scales_observed_sites_only():
    half = nt.temper(alpha=0.5)
    decorated, again = half(normal), half(lambda: normal(Y[:2]))

    def with_context():
        with nt.temper(alpha=0.5):
            normal()

    for model in (nt.temper(normal, alpha=0.5), nt.temper(normal, 0.5), decorated, again, with_context):
        trace = trace_of(model)
        assert trace["y"]["scale"] == 0.5
        assert trace["theta"]["scale"] is None
    assert trace_of(normal)["y"]["scale"] is None
    assert trace_of(again)["y"]["value"].shape == (2,)


def test_context_ends_where_it_ends():
    def model():
        with nt.temper(alpha=0.5):
            numpyro.sample("inside", dist.Normal(), obs=0.0)
        numpyro.sample("outside", dist.Normal(), obs=0.0)

    trace = trace_of(model)
    assert (trace["inside"]["scale"], trace["outside"]["scale"]) == (0.5, None)


@pytest.mark.parametrize(
    "alpha",
    [-1.0, -1e-9, np.nan, np.inf, "a", None, np.ones(1), np.ones(2), jnp.ones((1, 1)), 1j, [0.5], {}],
    ids=repr,
)
def test_alpha_must_be_a_finite_real_scalar_at_least_zero(alpha):
    with pytest.raises(ValueError, match="alpha"):
        nt.temper(normal, alpha=alpha)
    with pytest.raises(ValueError, match="alpha"):
        nt.temper(alpha=alpha)


@pytest.mark.parametrize("alpha", [0, 1, 3.0, np.float32(0.25), np.array(0.25)], ids=repr)
def test_alpha_may_be_any_real_scalar_and_exceed_one(alpha, x64):
    got = density(nt.temper(normal, alpha=alpha), {"theta": 0.7})
    assert got == pytest.approx(normal_density(0.7, float(alpha)), rel=1e-13)


def test_traced_alpha_must_be_a_scalar():
    with pytest.raises(ValueError, match="scalar"):
        jax.jit(lambda alpha: density(nt.temper(normal, alpha=alpha), {"theta": 0.7}))(jnp.ones(2))


def test_a_factory_decorates_one_callable():
    with pytest.raises(TypeError, match="decorates"):
        nt.temper(alpha=0.5)(1.0)
    with pytest.raises(TypeError, match="factors"):
        nt.temper(normal, alpha=0.5, factors="bonus")


def test_nested_powers_multiply(x64):
    nested = nt.temper(nt.temper(normal, alpha=0.5), alpha=0.3)
    assert trace_of(nested)["y"]["scale"] == pytest.approx(0.15, rel=1e-15)
    assert density(nested, {"theta": 0.7}) == pytest.approx(normal_density(0.7, 0.15), rel=1e-13)
    # An inner 0 is not undone, nor an outer one.
    for pair in ((0.0, 0.5), (0.5, 0.0)):
        model = nt.temper(nt.temper(normal, alpha=pair[0]), alpha=pair[1])
        assert density(model, {"theta": 0.7}) == pytest.approx(normal_density(0.7, 0.0), rel=1e-13)


def subsampled_inside_plate(alpha):
    theta = numpyro.sample("theta", dist.Normal())
    with numpyro.plate("n", 12, subsample_size=3), nt.temper(alpha=alpha):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=Y[:3])


def subsampled_around_plate(alpha):
    theta = numpyro.sample("theta", dist.Normal())
    with nt.temper(alpha=alpha), numpyro.plate("n", 12, subsample_size=3):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=Y[:3])


@pytest.mark.parametrize("model", [subsampled_inside_plate, subsampled_around_plate])
def test_composes_with_subsampling_plates_in_either_order(model, x64):
    alpha = 0.3
    scale = trace_of(model, alpha)["y"]["scale"]
    assert float(scale) == pytest.approx(12 / 3 * alpha, rel=1e-15)
    got = density(handlers.seed(model, 0), {"theta": 0.2}, alpha)
    want = stats.norm.logpdf(0.2) + 4 * alpha * stats.norm.logpdf(Y[:3], 0.2).sum()
    assert got == pytest.approx(want, rel=1e-13)


@pytest.mark.parametrize(
    "model",
    [
        handlers.scale(nt.temper(normal, alpha=0.3), scale=0.5),
        nt.temper(handlers.scale(normal, scale=0.5), alpha=0.3),
    ],
    ids=["scale outside", "scale inside"],
)
def test_composes_with_scale(model):
    trace = trace_of(model)
    assert float(trace["y"]["scale"]) == pytest.approx(0.15, rel=1e-6)
    assert float(trace["theta"]["scale"]) == 0.5


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model, alpha: handlers.do(nt.temper(model, alpha=alpha), data={"y": 9.0 * Y}),
        lambda model, alpha: nt.temper(handlers.do(model, data={"y": 9.0 * Y}), alpha=alpha),
    ],
    ids=["do outside", "do inside"],
)
def test_do_does_not_temper_twice(wrap, x64):
    trace = trace_of(wrap(normal, 0.3))
    assert trace["y"]["scale"] == 0.3
    got = density(wrap(normal, 0.3), {"theta": 0.7})
    assert got == pytest.approx(normal_density(0.7, 0.3), rel=1e-13)


def test_numpyro_scale_is_applied_twice_under_do():
    # The reason for the test above: without a guard this is what happens.
    model = handlers.do(handlers.scale(normal, scale=0.3), data={"y": Y})
    assert float(trace_of(model)["y"]["scale"]) == pytest.approx(0.09, rel=1e-6)


def test_svi_optimises_the_tempered_joint(x64):
    model = nt.temper(normal, alpha=0.3)
    svi = SVI(model, AutoDelta(model), numpyro.optim.Adam(0.1), Trace_ELBO())
    state = svi.init(jax.random.key(0))
    theta = float(svi.get_params(state)["theta_auto_loc"])
    assert float(svi.evaluate(state)) == pytest.approx(-normal_density(theta, 0.3), rel=1e-12)


def test_nuts_potential_is_the_tempered_joint(x64):
    info = initialize_model(jax.random.key(0), nt.temper(normal, alpha=0.3))
    assert float(info.potential_fn({"theta": 0.7})) == pytest.approx(-normal_density(0.7, 0.3), rel=1e-12)


def infinite_value():
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    numpyro.sample("y", dist.Normal(theta, 1.5), obs=jnp.array(1e200))  # its square overflows


def infinite_factor():
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    numpyro.factor("impossible", jnp.where(theta > 1.0, 0.0, -jnp.inf))


def infinite_parameter():
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    numpyro.sample("y", dist.Poisson(jnp.maximum(theta - 1.0, 0.0)), obs=3)


@pytest.mark.parametrize("model", [infinite_value, infinite_factor, infinite_parameter])
def test_alpha_zero_is_the_prior_where_the_likelihood_is_zero(model, x64):
    theta = 0.7
    assert density(model, {"theta": theta}) == -np.inf
    value, slope = jax.value_and_grad(lambda t: density(nt.temper(model, alpha=0), {"theta": t}))(theta)
    assert value == pytest.approx(stats.norm.logpdf(theta, 0.5, 2.0), rel=1e-13)
    assert slope == pytest.approx(-(theta - 0.5) / 4.0, rel=1e-12)


@pytest.mark.parametrize("model", [infinite_value, infinite_factor, infinite_parameter])
def test_traced_alpha_zero_is_the_prior_where_the_likelihood_is_zero(model, x64):
    theta = 0.7

    @jax.jit
    def value_and_slope(alpha, t):
        return jax.value_and_grad(lambda t: density(nt.temper(model, alpha=alpha), {"theta": t}))(t)

    value, slope = value_and_slope(0.0, theta)
    assert value == pytest.approx(stats.norm.logpdf(theta, 0.5, 2.0), rel=1e-13)
    # A mask guards the value observed; where the parameters are to blame, as in this one, NumPyro's own
    # gradient is NaN at every power, and a power known only at run time cannot take the site out.
    if model is not infinite_parameter:
        assert slope == pytest.approx(-(theta - 0.5) / 4.0, rel=1e-12)
    assert value_and_slope(0.5, theta)[0] == -np.inf


def test_traced_alpha_compiles_once_and_equals_concrete(x64):
    calls = []

    def counted():
        calls.append(1)
        normal()

    grid = np.array([0.0, 0.3, 1.0, 2.0])
    batched = jax.jit(jax.vmap(lambda alpha: density(nt.temper(counted, alpha=alpha), {"theta": jnp.array(0.7)})))
    want = [density(nt.temper(normal, alpha=alpha), {"theta": 0.7}) for alpha in grid]
    np.testing.assert_allclose(batched(grid), want, rtol=1e-13)
    batched(grid[::-1] + 0.1)
    assert len(calls) == 1

    one = jax.jit(lambda alpha: density(nt.temper(counted, alpha=alpha), {"theta": jnp.array(0.7)}))
    np.testing.assert_allclose([one(alpha) for alpha in grid], want, rtol=1e-13)
    assert len(calls) == 2


def test_slope_in_alpha_is_the_log_likelihood(x64):
    slope = jax.vmap(jax.grad(lambda alpha: density(nt.temper(normal, alpha=alpha), {"theta": 0.7})))
    got = slope(np.array([0.0, 0.3, 2.0]))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[1:], stats.norm.logpdf(Y, 0.7, 1.5).sum(), rtol=1e-12)
    impossible = jax.grad(lambda alpha: density(nt.temper(infinite_value, alpha=alpha), {"theta": 0.7}))
    assert np.isfinite(impossible(0.0))


# Jacobians and reparameterisations. NumPyro emits their terms as observed sites.


def scoped(y):
    with handlers.scope(prefix="a"):
        positive(y)


def test_jacobians_are_not_tempered(x64):
    y, alpha = 1.3, 0.1
    for u in (-1.5, 0.0, 0.4, 2.0):
        want = -(positive_density(np.exp(u), y, alpha) + u)
        assert potential(nt.temper(positive, alpha=alpha), {"s": u}, y) == pytest.approx(want, rel=1e-12)
        outside = handlers.scope(nt.temper(positive, alpha=alpha), prefix="a")
        for model in (nt.temper(scoped, alpha=alpha), outside):
            assert potential(model, {"a/s": u}, y) == pytest.approx(want, rel=1e-12)
        # The test would see the naive handler.
        if u != 0.0:
            assert abs(potential(naive_temper(positive, alpha), {"s": u}, y) - want) > 0.3


def mean_by_quadrature(y, alpha):
    """E[s] of the tempered posterior of ``positive``, in s itself: no Jacobian anywhere."""
    mass, first = (
        integrate.quad(lambda s, k=k: s**k * np.exp(positive_density(s, y, alpha)), 0.0, 12.0)[0] for k in (0, 1)
    )
    return first / mass


def mean_under_potential(model, y):
    """E[s] under exp(-potential) on the log scale, which is what NUTS samples."""
    grid = jnp.linspace(-14.0, 4.0, 4001)
    energy = jax.vmap(lambda u: potential(model, {"s": u}, y))(grid)
    weights = jax.nn.softmax(-energy)
    return float(jnp.sum(weights * jnp.exp(grid)))


# One datum, with E[s] under the tempered posterior and under the naive handler, which weighs it by
# s^(alpha - 1) on top; both by quadrature in s, outside of NumPyro.
KNOWN_Y, KNOWN_MEAN, KNOWN_NAIVE = 2.0, 1.12518, 0.90381


def test_known_answer_of_the_half_normal(x64):
    exact = mean_by_quadrature(KNOWN_Y, 0.1)
    assert exact == pytest.approx(KNOWN_MEAN, abs=1e-5)
    assert mean_under_potential(nt.temper(positive, alpha=0.1), KNOWN_Y) == pytest.approx(exact, rel=1e-7)
    naive = mean_under_potential(naive_temper(positive, 0.1), KNOWN_Y)
    assert naive == pytest.approx(KNOWN_NAIVE, abs=1e-5)


def test_nuts_samples_the_tempered_posterior():
    mcmc = MCMC(
        NUTS(nt.temper(positive, alpha=0.1)),
        num_warmup=400,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(3), KNOWN_Y)
    s = np.asarray(mcmc.get_samples(group_by_chain=True)["s"], float)
    se = s.std() / np.sqrt(effective_sample_size(s))
    assert abs(s.mean() - mean_by_quadrature(KNOWN_Y, 0.1)) < 5 * se
    # Tempering the Jacobian would be seen at this length of run.
    assert abs(s.mean() - KNOWN_NAIVE) > 5 * se


def angle(y):
    phi = numpyro.sample("phi", dist.VonMises(0.5, 2.0))
    numpyro.sample("y", dist.Normal(jnp.sin(phi), 0.7), obs=y)


@pytest.mark.parametrize("inside", [True, False], ids=["temper inside", "temper outside"])
def test_circular_reparam_is_prior(inside, x64):
    alpha, phi, config = 0.1, 0.9, {"phi": CircularReparam()}
    if inside:
        model = handlers.reparam(nt.temper(angle, alpha=alpha), config=config)
    else:
        model = nt.temper(handlers.reparam(angle, config=config), alpha=alpha)
    got = density(model, {"phi_unwrapped": phi}, 0.4)
    want = stats.vonmises.logpdf(phi, 2.0, loc=0.5) + alpha * stats.norm.logpdf(0.4, np.sin(phi), 0.7)
    assert got == pytest.approx(want, rel=1e-6)  # NumPyro's Bessel function is single precision's polynomial


def neutra():
    guide = AutoDiagonalNormal(positive)
    svi = SVI(positive, guide, numpyro.optim.Adam(0.1), Trace_ELBO())
    svi.init(jax.random.key(0), 1.3)
    params = {"auto_loc": jnp.array([0.2]), "auto_scale": jnp.array([0.5])}
    return NeuTraReparam(guide, params)


@pytest.mark.parametrize("inside", [True, False], ids=["temper inside", "temper outside"])
def test_neutra_reparam_is_prior(inside, x64):
    alpha, z, y = 0.1, 0.6, 1.3
    reparam = neutra()
    if inside:
        model = reparam.reparam(nt.temper(positive, alpha=alpha))
    else:
        model = nt.temper(reparam.reparam(positive), alpha=alpha)
    u = 0.2 + 0.5 * z
    want = -(positive_density(np.exp(u), y, alpha) + u + np.log(0.5))
    got = potential(model, {"auto_shared_latent": jnp.array([z])}, y)
    assert got == pytest.approx(want, rel=1e-12)
    assert (
        abs(
            potential(naive_temper(reparam.reparam(positive), alpha), {"auto_shared_latent": jnp.array([z])}, y)
            - want
        )
        > 0.3
    )


@pytest.mark.parametrize("inside", [True, False], ids=["temper inside", "temper outside"])
def test_loc_scale_reparam_is_prior(inside, x64):
    alpha, config = 0.1, {"theta": LocScaleReparam(centered=0.0)}
    if inside:
        model = handlers.reparam(nt.temper(normal, alpha=alpha), config=config)
    else:
        model = nt.temper(handlers.reparam(normal, config=config), alpha=alpha)
    theta = 0.5 + 2.0 * 0.3
    got = density(model, {"theta_decentered": 0.3})
    assert got == pytest.approx(normal_density(theta, alpha) + np.log(2.0), rel=1e-12)


def with_factors(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.factor("s_log_det", -3.0 * s)
    numpyro.factor("bonus", 2.0 * s)
    numpyro.sample("y", dist.Normal(0.0, s), obs=y)


@pytest.mark.parametrize(
    ("factors", "log_det", "bonus"),
    [(True, 0.1, 0.1), (False, 1, 1), (["s_log_det"], 0.1, 1), ({"bonus"}, 1, 0.1), ((), 1, 1)],
)
def test_factors_of_the_user_follow_the_policy(factors, log_det, bonus, x64):
    u, y = 0.4, 1.3
    s = np.exp(u)
    want = positive_density(s, y, 0.1) + u - 3.0 * s * log_det + 2.0 * s * bonus
    decorated = nt.temper(alpha=0.1, factors=factors)(with_factors)
    for model in (nt.temper(with_factors, alpha=0.1, factors=factors), decorated):
        assert potential(model, {"s": u}, y) == pytest.approx(-want, rel=1e-12)


# Control flow.


def in_plate(y):
    with numpyro.plate("n", len(y)):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        numpyro.factor("bonus", 2.0 * s)
        numpyro.sample("y", dist.Normal(0.0, s), obs=y)


def step_of_scan(carry, y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.factor("bonus", 2.0 * s)
    numpyro.sample("y", dist.Normal(0.0, s), obs=y)
    return carry, None


def in_scan(y):
    scan(step_of_scan, 0.0, y)


def tempered_in_body(y):
    def body(carry, y):
        with nt.temper(alpha=0.1):
            return step_of_scan(carry, y)

    scan(body, 0.0, y)


@pytest.mark.parametrize("model", [nt.temper(in_scan, alpha=0.1), tempered_in_body], ids=["around", "body"])
def test_scan_equals_the_plate(model, x64):
    u = np.array([-0.5, 0.3, 1.0, 0.1])
    s = np.exp(u)
    want = -(positive_density(s, Y, 0.1) + 0.1 * 2.0 * s + u).sum()
    assert potential(nt.temper(in_plate, alpha=0.1), {"s": jnp.array(u)}, Y) == pytest.approx(want, rel=1e-12)
    assert potential(model, {"s": jnp.array(u)}, Y) == pytest.approx(want, rel=1e-12)


def test_scan_takes_a_traced_alpha(x64):
    u = jnp.array([-0.5, 0.3, 1.0, 0.1])
    grid = jnp.array([0.0, 0.1, 1.0])
    got = jax.jit(jax.vmap(lambda alpha: potential(nt.temper(in_scan, alpha=alpha), {"s": u}, Y)))(grid)
    want = [potential(nt.temper(in_plate, alpha=float(alpha)), {"s": u}, Y) for alpha in grid]
    np.testing.assert_allclose(got, want, rtol=1e-12)


def in_cond(first, y):
    def narrow(_):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(0.0, s), obs=y)

    def wide(_):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(0.0, 3.0 * s), obs=y)

    cond(first, narrow, wide, None)


@pytest.mark.parametrize("first", [True, False])
def test_cond_tempers_the_branch_taken(first, x64):
    u, y = 0.4, 1.3
    s = np.exp(u)
    log_lik = stats.norm.logpdf(y, 0.0, s if first else 3.0 * s)
    want = -(stats.halfnorm.logpdf(s) + 0.1 * log_lik + u)
    got = potential(nt.temper(in_cond, alpha=0.1), {"s": jnp.array(u)}, jnp.array(first), y)
    assert got == pytest.approx(want, rel=1e-12)


# What is data.


def test_only_what_is_conditioned_inside_is_tempered(x64):
    def unobserved():
        theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
        numpyro.sample("y", dist.Normal(theta, 1.5).expand([len(Y)]).to_event(1))

    inside = nt.temper(handlers.condition(unobserved, data={"y": Y}), alpha=0.3)
    outside = handlers.condition(nt.temper(unobserved, alpha=0.3), data={"y": Y})
    assert density(inside, {"theta": 0.7}) == pytest.approx(normal_density(0.7, 0.3), rel=1e-12)
    assert density(outside, {"theta": 0.7}) == pytest.approx(normal_density(0.7, 1.0), rel=1e-12)


def test_obs_mask_tempers_the_observed_part(x64):
    observed = np.array([True, False, True, True])

    def model():
        theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
        with numpyro.plate("n", len(Y)):
            numpyro.sample("y", dist.Normal(theta, 1.5), obs=Y, obs_mask=observed)

    imputed = np.array([9.0, 1.1, 9.0, 9.0])
    got = density(nt.temper(model, alpha=0.3), {"theta": 0.7, "y_unobserved": imputed})
    want = normal_density(0.7, 0.3, Y[observed]) + stats.norm.logpdf(1.1, 0.7, 1.5)
    assert got == pytest.approx(want, rel=1e-12)


def test_composes_with_mask(x64):
    keep = np.array([True, False, True, True])

    def masked():
        theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
        with numpyro.plate("n", len(Y)), handlers.mask(mask=keep):
            numpyro.sample("y", dist.Normal(theta, 1.5), obs=Y)

    got = density(nt.temper(masked, alpha=0.3), {"theta": 0.7})
    assert got == pytest.approx(normal_density(0.7, 0.3, Y[keep]), rel=1e-12)


def test_log_likelihood_is_untempered():
    draws = {"theta": jnp.array([0.1, 0.7])}
    plain, tempered = (log_likelihood(model, draws)["y"] for model in (normal, nt.temper(normal, alpha=0.3)))
    np.testing.assert_array_equal(tempered, plain)


# Enumeration.


def mixture(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        z = numpyro.sample("z", dist.Categorical(jnp.array([0.4, 0.6])), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(mu * z, 1.0), obs=y)


def marginal_mixture(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    parts = dist.Normal(jnp.stack([0.0 * mu, mu]), 1.0)
    with numpyro.plate("n", len(y)):
        weights = dist.Categorical(jnp.array([0.4, 0.6]))
        numpyro.sample("y", dist.MixtureSameFamily(weights, parts), obs=y)


def test_enumerated_local_latent_is_refused_under_nuts():
    mcmc = MCMC(NUTS(nt.temper(mixture, alpha=0.3)), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match=r"enumerated local latent 'z'.*MixtureSameFamily"):
        mcmc.run(jax.random.key(0), Y)
    # Bayes itself is no power, so nothing is wrong with it.
    initialize_model(jax.random.key(0), nt.temper(mixture, alpha=1.0), model_args=(Y,))


def test_summed_out_local_latent_is_tempered_outside_of_the_sum(x64):
    info = initialize_model(jax.random.key(0), nt.temper(marginal_mixture, alpha=0.3), model_args=(Y,))
    mu = 0.8
    parts = np.log([0.4, 0.6]) + np.stack([stats.norm.logpdf(Y), stats.norm.logpdf(Y, mu)], axis=-1)
    want = stats.norm.logpdf(mu) + 0.3 * logsumexp(parts, axis=-1).sum()
    assert float(info.potential_fn({"mu": mu})) == pytest.approx(-want, rel=1e-12)


def test_global_discrete_latent_is_summed_after_the_power(x64):
    def model(y):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        k = numpyro.sample("k", dist.Categorical(jnp.array([0.4, 0.6])), infer={"enumerate": "parallel"})
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(2.0 * k, s), obs=y)

    info = initialize_model(jax.random.key(0), nt.temper(model, alpha=0.3), model_args=(Y,))
    u = 0.4
    s = np.exp(u)
    log_lik = np.array([stats.norm.logpdf(Y, 2.0 * k, s).sum() for k in (0, 1)])
    want = stats.halfnorm.logpdf(s) + u + logsumexp(np.log([0.4, 0.6]) + 0.3 * log_lik)
    assert float(info.potential_fn({"s": jnp.array(u)})) == pytest.approx(-want, rel=1e-12)


def test_an_enumerated_chain_in_a_scan_is_refused():
    def chain(y):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))

        def transition(state, y_t):
            probs = jnp.array([[0.9, 0.1], [0.2, 0.8]])
            state = numpyro.sample("state", dist.Categorical(probs[state]), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(2.0 * state, scale), obs=y_t)
            return state, None

        scan(transition, 0, y)

    mcmc = MCMC(NUTS(nt.temper(chain, alpha=0.5)), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(ValueError, match="enumerated local latent"):
        mcmc.run(jax.random.key(0), jnp.array([0.1, 1.9, 2.2]))


def test_a_collapsed_factor_is_refused():
    def collapsed(y):
        with handlers.collapse():
            p = numpyro.sample("p", dist.Beta(2.0, 2.0))
            numpyro.sample("y", dist.Binomial(10, p), obs=y)

    trace = handlers.trace(handlers.seed(nt.temper(collapsed, alpha=1.0), 0)).get_trace(7)
    assert any(isinstance(site.get("fn"), dist.Unit) for site in trace.values())
    with pytest.raises(ValueError, match=r"handlers\.collapse"):
        handlers.seed(nt.temper(collapsed, alpha=0.5), 0)(7)
