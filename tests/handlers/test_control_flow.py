"""Bodies of scan and cond run out of sight of outer handlers, and their sites come back afterwards."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from scipy import stats
from tempered_models import Y, naive_temper, trace_of
from tempered_models import potential as eager_potential

import numpyro_tempered as nt

ALPHA = 0.1
U = np.array([-0.5, 0.3, 1.0, 0.1])


def potential(model, params, *args):
    """As one program, since the operations around a scan would be one each."""
    return jax.jit(lambda params: eager_potential(model, params, *args))(params)


def in_plate(y):
    with numpyro.plate("n", len(y)):
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        numpyro.factor("bonus", 2.0 * s)
        numpyro.sample("y", dist.Normal(0.0, s), obs=y)


def step(carry, y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.factor("bonus", 2.0 * s)
    numpyro.sample("y", dist.Normal(0.0, s), obs=y)
    return carry, None


def in_scan(y):
    scan(step, 0.0, y)


def steps_density(alpha, bonus=None):
    s = np.exp(U)
    bonus = alpha if bonus is None else bonus
    return (
        stats.halfnorm.logpdf(s)
        + alpha * stats.norm.logpdf(Y, 0.0, s)
        + bonus * 2.0 * s
        + U
    ).sum()


def tempered_in_body(alpha):
    def model(y):
        def body(carry, y):
            with nt.temper(alpha=alpha):
                return step(carry, y)

        scan(body, 0.0, y)

    return model


def decorated_body(alpha):
    return lambda y: scan(nt.temper(step, alpha=alpha), 0.0, y)


def around(alpha):
    return nt.temper(in_scan, alpha=alpha)


WRAPS = [around, tempered_in_body, decorated_body]


@pytest.mark.parametrize("wrap", tiered(WRAPS, unit=[around]))
def test_scan_equals_the_plate(wrap, x64):
    want = -steps_density(ALPHA)
    models = nt.temper(in_plate, alpha=ALPHA), wrap(ALPHA), wrap(0.0)
    plate, got, prior = jax.jit(
        lambda u: [potential(model, {"s": u}, Y) for model in models]
    )(U)
    assert plate == pytest.approx(want, rel=1e-12)
    assert got == pytest.approx(want, rel=1e-12)
    assert prior == pytest.approx(-steps_density(0.0), rel=1e-12)


def test_the_naive_handler_tempers_the_jacobians_of_a_scan(x64):
    naive = potential(naive_temper(in_scan, ALPHA), {"s": jnp.array(U)}, Y)
    assert abs(naive + steps_density(ALPHA)) > 0.3


def test_the_policy_for_factors_holds_in_a_scan(x64):
    model = nt.temper(in_scan, alpha=ALPHA, factors=False)
    want = -steps_density(ALPHA, bonus=1.0)
    assert potential(model, {"s": jnp.array(U)}, Y) == pytest.approx(want, rel=1e-12)


def test_powers_around_and_in_the_body_multiply(x64):
    want = -steps_density(0.15)
    for inner in (tempered_in_body(0.3), decorated_body(0.3)):
        got = potential(nt.temper(inner, alpha=0.5), {"s": jnp.array(U)}, Y)
        assert got == pytest.approx(want, rel=1e-12)


def test_one_handler_around_and_in_the_body_multiplies(x64):
    half = nt.temper(alpha=0.5)

    def model(y):
        def body(carry, y):
            with half:
                return step(carry, y)

        with half:
            scan(body, 0.0, y)

    assert potential(model, {"s": jnp.array(U)}, Y) == pytest.approx(
        -steps_density(0.25), rel=1e-12
    )


@pytest.mark.parametrize("wrap", tiered(WRAPS, unit=[tempered_in_body]))
def test_scan_takes_a_traced_alpha(wrap, x64):
    grid = jnp.array([0.0, 0.1, 1.0])
    got = jax.jit(
        jax.vmap(lambda alpha: potential(wrap(alpha), {"s": jnp.array(U)}, Y))
    )(grid)
    np.testing.assert_allclose(
        got, [-steps_density(float(alpha)) for alpha in grid], rtol=1e-12
    )


@pytest.mark.parametrize(
    "wrap", tiered([tempered_in_body, decorated_body], unit=[decorated_body])
)
def test_a_traced_alpha_in_a_body_leaves_no_tracer_for_an_outer_power(wrap, x64):
    outer = jax.jit(
        lambda alpha: potential(
            nt.temper(wrap(alpha), alpha=0.5), {"s": jnp.array(U)}, Y
        )
    )
    assert outer(0.3) == pytest.approx(-steps_density(0.15), rel=1e-12)


def test_a_scan_of_latents_alone_is_prior(x64):
    def walk(y):
        scan(
            lambda x, _: (numpyro.sample("x", dist.Normal(x, 1.0)),) * 2,
            0.0,
            None,
            length=3,
        )
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)

    x = np.array([0.1, 0.5, -0.2])
    want = stats.norm.logpdf(x, [0.0, 0.1, 0.5]).sum() + ALPHA * stats.norm.logpdf(1.3)
    assert potential(
        nt.temper(walk, alpha=ALPHA), {"x": jnp.array(x)}, 1.3
    ) == pytest.approx(-want, rel=1e-12)


def state_space(y, length=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))

    def transition(x, y):
        x = numpyro.sample("x", dist.Normal(x, scale))
        numpyro.sample("y", dist.Normal(x, 0.5), obs=y)
        return x, x

    scan(transition, 0.0, y, length=length)


def state_space_density(u, x, alpha):
    scale, before = np.exp(u), np.concatenate([[0.0], x[:-1]])
    prior = stats.halfnorm.logpdf(scale) + u + stats.norm.logpdf(x, before, scale).sum()
    return prior + alpha * stats.norm.logpdf(Y, x, 0.5).sum()


def test_state_space_model(x64):
    u, x = 0.4, np.array([0.1, -0.5, 1.5, 1.0])
    models = nt.temper(state_space, alpha=ALPHA), naive_temper(state_space, ALPHA)
    want = -state_space_density(u, x, ALPHA)
    tempered, naive = jax.jit(lambda params: [potential(m, params, Y) for m in models])(
        {"scale": u, "x": x}
    )
    assert tempered == pytest.approx(want, rel=1e-12)
    assert abs(naive - want) > 0.3


def test_data_conditioned_inside_and_outside_of_a_scan(x64):
    u, x = 0.4, np.array([0.1, -0.5, 1.5, 1.0])
    params = {"scale": u, "x": jnp.array(x)}

    def unobserved():
        state_space(None, length=4)

    inside = nt.temper(
        handlers.condition(unobserved, data={"y": jnp.array(Y)}), alpha=ALPHA
    )
    assert potential(inside, params) == pytest.approx(
        -state_space_density(u, x, ALPHA), rel=1e-12
    )


@pytest.mark.slow
def test_svi_through_a_scan(x64):
    model = nt.temper(state_space, alpha=ALPHA)
    svi = SVI(model, AutoDelta(model), numpyro.optim.Adam(0.1), Trace_ELBO())
    state = svi.init(jax.random.key(0), jnp.array(Y))
    params = svi.get_params(state)
    scale, x = float(params["scale_auto_loc"]), np.asarray(params["x_auto_loc"])
    want = state_space_density(np.log(scale), x, ALPHA) - np.log(scale)
    assert float(svi.evaluate(state, jnp.array(Y))) == pytest.approx(-want, rel=1e-12)


def test_the_carry_may_be_a_callable_pytree(x64):
    shift = jax.tree_util.Partial(jnp.add, jnp.array(0.5))

    def scanned():
        def body(carry, y):
            numpyro.sample("y", dist.Normal(carry(0.0), 1.0), obs=y)
            return carry, None

        scan(body, shift, jnp.array(Y))

    def branched():
        def branch(shift):
            numpyro.sample("y", dist.Normal(shift(0.0), 1.0), obs=jnp.array(Y))

        cond(True, branch, branch, shift)

    for model in (scanned, branched):
        assert potential(nt.temper(model, alpha=ALPHA), {}) == pytest.approx(
            -ALPHA * stats.norm.logpdf(Y, 0.5).sum(), rel=1e-12
        )


# cond


def narrow(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.factor("bonus", 2.0 * s)
    numpyro.sample("y", dist.Normal(0.0, s), obs=y)


def wide(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.factor("bonus", -s)
    numpyro.sample("y", dist.Normal(0.0, 3.0 * s), obs=y)


def in_cond(first, y):
    cond(first, narrow, wide, y)


def in_cond_density(first, u, y, alpha):
    s = np.exp(u)
    log_lik = stats.norm.logpdf(y, 0.0, s if first else 3.0 * s) + (
        2.0 * s if first else -s
    )
    return stats.halfnorm.logpdf(s) + alpha * log_lik + u


def branches_with_contexts(alpha):
    def within(branch):
        def run(y):
            with nt.temper(alpha=alpha):
                branch(y)

        return run

    return lambda first, y: cond(first, within(narrow), within(wide), y)


def decorated_branches(alpha):
    first, second = nt.temper(narrow, alpha=alpha), nt.temper(wide, alpha=alpha)
    return lambda which, y: cond(which, first, second, y)


def around_cond(alpha):
    return nt.temper(in_cond, alpha=alpha)


COND_WRAPS = [around_cond, branches_with_contexts, decorated_branches]


@pytest.mark.parametrize(
    ("first", "wrap"),
    tiered(
        itertools.product([True, False], COND_WRAPS),
        unit=[(True, around_cond), (False, branches_with_contexts)],
    ),
)
def test_cond_tempers_the_branch_taken(first, wrap, x64):
    u, y = 0.4, 1.3
    got = potential(wrap(ALPHA), {"s": jnp.array(u)}, jnp.array(first), y)
    assert got == pytest.approx(-in_cond_density(first, u, y, ALPHA), rel=1e-12)


@pytest.mark.parametrize("wrap", tiered(COND_WRAPS, unit=[decorated_branches]))
def test_cond_takes_a_traced_alpha(wrap, x64):
    u, y = 0.4, 1.3
    got = jax.jit(lambda alpha: potential(wrap(alpha), {"s": jnp.array(u)}, True, y))(
        ALPHA
    )
    assert got == pytest.approx(-in_cond_density(True, u, y, ALPHA), rel=1e-12)


def test_the_naive_handler_tempers_the_jacobian_of_a_cond(x64):
    naive = potential(naive_temper(in_cond, ALPHA), {"s": jnp.array(0.4)}, True, 1.3)
    assert abs(naive + in_cond_density(True, 0.4, 1.3, ALPHA)) > 0.3


# Control flow in control flow, where NumPyro has it.


def scan_in_scan(y):
    def rows(carry, row):
        return scan(step, carry, row)[0], None

    scan(rows, 0.0, y)


def scan_in_cond(y):
    cond(True, in_scan, in_scan, y)


@pytest.mark.parametrize(
    "model", tiered([scan_in_scan, scan_in_cond], unit=[scan_in_cond])
)
def test_nested_control_flow_equals_the_plate(model, x64):
    nested = model is scan_in_scan
    y = jnp.array(Y).reshape(2, 2) if nested else jnp.array(Y)
    u = np.zeros((2, 2)) if nested else np.zeros(4)
    want = -(stats.halfnorm.logpdf(1.0) + ALPHA * (stats.norm.logpdf(Y) + 2.0)).sum()
    assert potential(nt.temper(model, alpha=ALPHA), {"s": u}, y) == pytest.approx(
        want, rel=1e-12
    )
    # The scales are those of a trace without values.
    trace = {}
    jax.eval_shape(
        lambda: trace.update(trace_of(nt.temper(model, alpha=ALPHA, factors=False), y))
    )
    assert (trace["y"]["scale"], trace["bonus"]["scale"], trace["s"]["scale"]) == (
        ALPHA,
        None,
        None,
    )


def test_a_cond_in_a_scan_is_tempered_as_numpyro_has_it(x64):
    """NumPyro counts the Jacobian of such a latent more than once; that is prior, whatever it is."""

    def model(y):
        def body(carry, y):
            cond(y > 0, narrow, wide, y)
            return carry, None

        scan(body, 0.0, y)

    s = np.exp(U)
    log_lik = stats.norm.logpdf(Y, 0.0, np.where(Y > 0, s, 3.0 * s)) + np.where(
        Y > 0, 2.0 * s, -s
    )
    params = {"s": jnp.array(U)}
    bayes, tempered = jax.jit(
        lambda params: [
            potential(m, params, jnp.array(Y))
            for m in (model, nt.temper(model, alpha=ALPHA))
        ]
    )(params)
    assert tempered - bayes == pytest.approx((1.0 - ALPHA) * log_lik.sum(), rel=1e-12)
