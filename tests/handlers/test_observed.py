"""What is data, under the handlers that NumPyro ships: inside of temper it is tempered, outside it is not."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.contrib.control_flow import cond, scan
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import log_density
from numpyro.primitives import mutable
from scipy import stats
from tempered_models import Y, density, normal, normal_density, trace_of, unobserved

import numpyro_tempered as nt

DATA = {"y": Y}


def test_only_what_is_conditioned_inside_is_tempered(x64):
    inside = nt.temper(handlers.condition(unobserved, data=DATA), alpha=0.3)
    outside = handlers.condition(
        nt.temper(unobserved, alpha=0.3, strict=False), data=DATA
    )
    by_function = nt.temper(
        handlers.condition(unobserved, condition_fn=lambda m: DATA.get(m["name"])),
        alpha=0.3,
    )
    for model, alpha in ((inside, 0.3), (by_function, 0.3), (outside, 1.0)):
        assert density(model, {"theta": 0.7}) == pytest.approx(
            normal_density(0.7, alpha), rel=1e-12
        )


def test_what_is_observed_outside_is_refused(x64):
    strict = nt.temper(unobserved, alpha=0.3)
    decorated = nt.temper(alpha=0.3)(unobserved)
    for model in (strict, decorated):
        with pytest.raises(
            ValueError,
            match=r"site 'y' is observed by a handler outside.*temper\(condition",
        ):
            density(handlers.condition(model, data=DATA), {"theta": 0.7})
        with pytest.raises(
            ValueError,
            match=r"'theta' is observed by a handler outside.*all of this pass",
        ):
            trace_of(handlers.condition(model, data={"theta": 0.7}))
    with pytest.raises(
        ValueError,
        match=r"handler outside.*handlers.substitute.*strict=False.*of this pass",
    ):
        MCMC(
            NUTS(handlers.condition(strict, data=DATA)), num_warmup=1, num_samples=1
        ).run(jax.random.key(0))
    # Nothing is lost at the power 1.
    outside = handlers.condition(nt.temper(unobserved, alpha=1.0), data=DATA)
    assert density(outside, {"theta": 0.7}) == pytest.approx(
        normal_density(0.7, 1.0), rel=1e-12
    )
    # Neither data inside, nor values that are no data, nor Jacobians, nor an intervention.
    inside = nt.temper(handlers.condition(unobserved, data=DATA), alpha=0.3)
    assert density(inside, {"theta": 0.7}) == pytest.approx(
        normal_density(0.7, 0.3), rel=1e-12
    )
    trace = trace_of(handlers.do(strict, data={"theta": 0.7}))
    assert trace["theta"]["scale"] is None
    assert trace_of(handlers.substitute(strict, data={"y": Y}))["y"]["scale"] is None

    def scaled():
        s = numpyro.sample("s", dist.HalfNormal())
        numpyro.sample("y", dist.Normal(0.0, s), obs=1.3)

    potential = numpyro.infer.util.potential_energy(
        nt.temper(scaled, alpha=0.3), (), {}, {"s": 0.4}
    )
    s = np.exp(0.4)
    want = stats.halfnorm.logpdf(s) + 0.3 * stats.norm.logpdf(1.3, 0.0, s) + 0.4
    assert potential == pytest.approx(-want, rel=1e-12)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model, alpha: handlers.do(
            nt.temper(model, alpha=alpha), data={"y": 9.0 * Y}
        ),
        lambda model, alpha: nt.temper(
            handlers.do(model, data={"y": 9.0 * Y}), alpha=alpha
        ),
        lambda model, alpha: handlers.do(
            nt.temper(model, alpha=alpha, strict=False), data={"y": 9.0 * Y}
        ),
        lambda model, alpha: nt.temper(
            handlers.do(nt.temper(model, alpha=alpha), data={"y": 9.0 * Y}), alpha=1
        ),
    ],
    ids=["outside", "inside", "outside, not strict", "between"],
)
def test_do_does_not_temper_twice(wrap, x64):
    assert trace_of(wrap(normal, 0.3))["y"]["scale"] == 0.3
    assert density(wrap(normal, 0.3), {"theta": 0.7}) == pytest.approx(
        normal_density(0.7, 0.3), rel=1e-13
    )


def test_do_between_two_powers_tempers_once_by_each(x64):
    model = nt.temper(
        handlers.do(nt.temper(normal, alpha=0.5), data={"y": 9.0 * Y}), alpha=0.3
    )
    assert density(model, {"theta": 0.7}) == pytest.approx(
        normal_density(0.7, 0.15), rel=1e-13
    )
    outside = handlers.do(
        nt.temper(nt.temper(normal, alpha=0.5), alpha=0.3), data={"y": 9.0 * Y}
    )
    assert density(outside, {"theta": 0.7}) == pytest.approx(
        normal_density(0.7, 0.15), rel=1e-13
    )


def test_do_on_a_parent(x64):
    """The likelihood is that of the value set, to the power; the parent keeps its prior."""
    for model in (
        handlers.do(nt.temper(normal, alpha=0.3), data={"theta": -1.0}),
        nt.temper(handlers.do(normal, data={"theta": -1.0}), alpha=0.3),
    ):
        want = (
            stats.norm.logpdf(0.7, 0.5, 2.0)
            + 0.3 * stats.norm.logpdf(Y, -1.0, 1.5).sum()
        )
        assert density(model, {"theta": 0.7}) == pytest.approx(want, rel=1e-13)


def test_numpyro_scale_is_applied_twice_under_do():
    # The reason for the tests above: without a guard this is what happens.
    model = handlers.do(handlers.scale(normal, scale=0.3), data={"y": Y})
    assert float(trace_of(model)["y"]["scale"]) == pytest.approx(0.09, rel=1e-6)


@pytest.mark.parametrize("alpha", [0.3, 0.0])
def test_obs_mask_tempers_the_observed_part(alpha, x64):
    observed = np.array([True, False, True, True])

    def model():
        theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
        with numpyro.plate("n", len(Y)):
            numpyro.sample("y", dist.Normal(theta, 1.5), obs=Y, obs_mask=observed)

    imputed = np.array([9.0, 1.1, 9.0, 9.0])
    got = density(
        nt.temper(model, alpha=alpha), {"theta": 0.7, "y_unobserved": imputed}
    )
    want = normal_density(0.7, alpha, Y[observed]) + stats.norm.logpdf(1.1, 0.7, 1.5)
    assert got == pytest.approx(want, rel=1e-12)


KEEP = np.array([True, False, True, True])


def masked():
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    with numpyro.plate("n", len(Y)), handlers.mask(mask=KEEP):
        numpyro.sample("y", dist.Normal(theta, 1.5), obs=Y)


def masked_by_distribution():
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    with numpyro.plate("n", len(Y)):
        numpyro.sample("y", dist.Normal(theta, 1.5).mask(KEEP), obs=Y)


def masked_around_temper():
    theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
    with numpyro.plate("n", len(Y)), handlers.mask(mask=KEEP), nt.temper(alpha=0.3):
        numpyro.sample("y", dist.Normal(theta, 1.5), obs=Y)


@pytest.mark.parametrize("model", [masked, masked_by_distribution])
@pytest.mark.parametrize("alpha", [0.3, 0.0])
def test_mask_inside(model, alpha, x64):
    got = density(nt.temper(model, alpha=alpha), {"theta": 0.7})
    assert got == pytest.approx(normal_density(0.7, alpha, Y[KEEP]), rel=1e-12)


def test_mask_outside(x64):
    assert density(masked_around_temper, {"theta": 0.7}) == pytest.approx(
        normal_density(0.7, 0.3, Y[KEEP])
    )
    everything = handlers.mask(nt.temper(normal, alpha=0.3), mask=False)
    assert density(everything, {"theta": 0.7}) == 0.0


def test_scope_inside_and_outside(x64):
    inside = nt.temper(handlers.scope(normal, prefix="a"), alpha=0.3)
    outside = handlers.scope(nt.temper(normal, alpha=0.3), prefix="a")
    for model in (inside, outside):
        assert density(model, {"a/theta": 0.7}) == pytest.approx(
            normal_density(0.7, 0.3), rel=1e-12
        )


def test_block_inside_and_outside(x64):
    def hide_theta(model):
        return handlers.block(model, hide=["theta"])

    def hide_y(model):
        return handlers.block(model, hide=["y"])

    for hide, shown, scale in ((hide_theta, "y", 0.3), (hide_y, "theta", None)):
        for model in (
            nt.temper(hide(normal), alpha=0.3),
            hide(nt.temper(normal, alpha=0.3)),
        ):
            trace = trace_of(model)
            assert [
                name for name, site in trace.items() if site["type"] == "sample"
            ] == [shown]
            assert trace[shown]["scale"] == scale


def test_substitute_inside_and_outside(x64):
    for model in (
        handlers.substitute(nt.temper(normal, alpha=0.3), data={"theta": 0.7}),
        nt.temper(handlers.substitute(normal, data={"theta": 0.7}), alpha=0.3),
        handlers.substitute(
            nt.temper(normal, alpha=0.3),
            substitute_fn=lambda m: {"theta": 0.7}.get(m["name"]),
        ),
    ):
        assert density(model, {}) == pytest.approx(normal_density(0.7, 0.3), rel=1e-12)
    # An observed site is data with whatever value.
    other = handlers.substitute(nt.temper(normal, alpha=0.3), data={"y": 2.0 * Y})
    assert density(other, {"theta": 0.7}) == pytest.approx(
        normal_density(0.7, 0.3, 2.0 * Y), rel=1e-12
    )


def test_lift_makes_a_prior(x64):
    def model():
        w = numpyro.param("w", 1.0)
        numpyro.sample("y", dist.Normal(w, 1.5), obs=Y)

    prior = {"w": dist.Normal(0.5, 2.0)}
    for lifted in (
        handlers.lift(nt.temper(model, alpha=0.3), prior=prior),
        nt.temper(handlers.lift(model, prior=prior), alpha=0.3),
    ):
        assert density(lifted, {"w": 0.7}) == pytest.approx(
            normal_density(0.7, 0.3), rel=1e-12
        )


def test_replay_keeps_the_powers(x64):
    drawn = trace_of(nt.temper(unobserved, alpha=0.5))
    replayed = trace_of(handlers.replay(nt.temper(normal, alpha=0.3), trace=drawn))
    assert replayed["theta"]["value"] == drawn["theta"]["value"]
    assert (replayed["theta"]["scale"], replayed["y"]["scale"]) == (None, 0.3)


def test_infer_config_changes_nothing():
    configured = handlers.infer_config(
        nt.temper(normal, alpha=0.3), config_fn=lambda site: {"note": 1}
    )
    trace = trace_of(configured)
    assert (trace["theta"]["scale"], trace["y"]["scale"]) == (None, 0.3)
    assert trace["y"]["infer"]["note"] == 1


def step_model(x):
    s = numpyro.sample("s", dist.HalfNormal())

    def step(z, row):
        z = numpyro.sample("z", dist.Normal(z, s))
        numpyro.sample("x", dist.Normal(z, 1.0), obs=row)
        return z, None

    scan(step, 0.0, x)


@pytest.mark.parametrize("kernel", [True, False])
def test_what_a_gibbs_kernel_fixes_stays_a_latent(kernel, x64):
    """In the body of a scan too, where it is observed before temper sees it."""
    x, z = np.array([0.1, -0.4, 0.8]), np.array([0.2, 0.1, 0.5])
    fixed = {"z": jnp.asarray(z)} if kernel else {"s": 0.7}
    z = jnp.asarray(z)
    model = nt.temper(step_model, alpha=0.3)

    def run(x):
        # As NumPyro's Gibbs kernels do.
        with handlers.condition(data=fixed), handlers.substitute(data=fixed):
            model(x)

    got = density(run, {"s": 0.7, "z": z}, jnp.asarray(x))
    log_prior = (
        stats.halfnorm.logpdf(0.7)
        + stats.norm.logpdf(z, np.append(0.0, z[:-1]), 0.7).sum()
    )
    assert got == pytest.approx(
        log_prior + 0.3 * stats.norm.logpdf(x, z).sum(), rel=1e-12
    )


@pytest.mark.parametrize("alpha", [0.3, 0.0])
def test_uncondition_outside_is_refused(alpha):
    """The site would be a latent with the power."""
    with pytest.raises(
        ValueError,
        match=r"^a handler.*observed site 'y' a latent.*temper\(uncondition\(model\)",
    ):
        trace_of(handlers.uncondition(nt.temper(normal, alpha=alpha)))
    assert not trace_of(handlers.uncondition(nt.temper(normal, alpha=1.0)))["y"][
        "is_observed"
    ]


@pytest.mark.parametrize(
    ("shape", "loc_shape"), [((4, 1), (4,)), ((4,), (4, 1)), ((1,), (4,))], ids=str
)
@pytest.mark.parametrize("in_plate", [True, False])
def test_values_that_broadcast_to_more_data_are_refused(shape, loc_shape, in_plate):
    def model(y):
        theta = numpyro.sample("theta", dist.Normal())
        with numpyro.plate("n", 4) if in_plate else contextlib.nullcontext():
            numpyro.sample("y", dist.Normal(theta * jnp.ones(loc_shape), 1.0), obs=y)

    refusal = r"'y' has values of shape .* but log-probabilities of shape .*Give them one shape"
    y = jnp.asarray(np.resize(Y, shape))
    with pytest.raises(ValueError, match=refusal):
        MCMC(NUTS(nt.temper(model, alpha=0.3)), num_warmup=1, num_samples=1).run(
            jax.random.key(0), y
        )
    # One number for all elements is a value that NumPyro takes.
    assert trace_of(nt.temper(model, alpha=0.3), 0.4)["y"]["scale"] == 0.3


def test_uncondition_inside_leaves_no_data():
    trace = trace_of(nt.temper(handlers.uncondition(normal), alpha=0.3))
    assert not trace["y"]["is_observed"]
    assert trace["y"]["scale"] is None


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


def test_composes_with_an_array_of_scales(x64):
    weights = np.array([1.0, 2.0, 0.5, 4.0])

    def weighted():
        theta = numpyro.sample("theta", dist.Normal(0.5, 2.0))
        with numpyro.plate("n", len(Y)), handlers.scale(scale=weights):
            numpyro.sample("y", dist.Normal(theta, 1.5), obs=Y)

    want = (
        stats.norm.logpdf(0.7, 0.5, 2.0)
        + 0.3 * (weights * stats.norm.logpdf(Y, 0.7, 1.5)).sum()
    )
    assert density(nt.temper(weighted, alpha=0.3), {"theta": 0.7}) == pytest.approx(
        want, rel=1e-12
    )


def test_params_deterministic_and_mutable_sites_are_left_alone(x64):
    def model():
        w = numpyro.param("w", 0.7)
        state = mutable("state", {"calls": 0})
        state["calls"] += 1
        eta = numpyro.deterministic("eta", 2.0 * w)
        numpyro.sample("y", dist.Normal(eta, 1.5), obs=Y)

    trace = trace_of(nt.temper(model, alpha=0.3))
    assert trace["w"]["scale"] is None
    assert trace["state"]["value"] == {"calls": 1}
    assert "scale" not in trace["eta"]
    assert float(trace["eta"]["value"]) == 1.4
    assert density(nt.temper(model, alpha=0.3), {}) == pytest.approx(
        0.3 * stats.norm.logpdf(Y, 1.4, 1.5).sum(), rel=1e-12
    )


def test_a_sample_that_nobody_observes_or_names_is_untouched():
    """Random numbers are the same with and without the handler."""
    plain, tempered = trace_of(unobserved), trace_of(nt.temper(unobserved, alpha=0.3))
    for name in ("theta", "y"):
        np.testing.assert_array_equal(plain[name]["value"], tempered[name]["value"])
        assert tempered[name]["scale"] is None


# Plates.


def inside_plate(alpha):
    theta = numpyro.sample("theta", dist.Normal())
    with numpyro.plate("n", 12, subsample_size=3), nt.temper(alpha=alpha):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=Y[:3])


def around_plate(alpha):
    theta = numpyro.sample("theta", dist.Normal())
    with nt.temper(alpha=alpha), numpyro.plate("n", 12, subsample_size=3):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=Y[:3])


def part_in_plate(alpha):
    theta = numpyro.sample("theta", dist.Normal())

    def part():
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=Y[:3])

    with numpyro.plate("n", 12, subsample_size=3):
        nt.temper(part, alpha=alpha)()


@pytest.mark.parametrize(
    ("model", "alpha"),
    tiered(
        itertools.product([inside_plate, around_plate, part_in_plate], [0.3, 0.0]),
        unit=[(inside_plate, 0.3), (around_plate, 0.3)],
    ),
)
def test_composes_with_subsampling_plates_in_either_order(model, alpha, x64):
    if alpha:
        assert float(trace_of(model, alpha)["y"]["scale"]) == pytest.approx(
            12 / 3 * alpha, rel=1e-15
        )
    got = density(handlers.seed(model, 0), {"theta": 0.2}, alpha)
    want = stats.norm.logpdf(0.2) + 4 * alpha * stats.norm.logpdf(Y[:3], 0.2).sum()
    assert got == pytest.approx(want, rel=1e-13)


def test_subsampled_data_in_nested_plates(x64):
    data = np.arange(24.0).reshape(4, 6) / 10.0

    def model(data):
        theta = numpyro.sample("theta", dist.Normal())
        with (
            numpyro.plate("rows", 4, subsample_size=2, dim=-2),
            numpyro.plate("columns", 6, subsample_size=3),
        ):
            batch = numpyro.subsample(data, event_dim=0)
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=batch)

    @jax.jit
    def run(data):
        tempered = handlers.seed(nt.temper(model, alpha=0.3), 0)
        trace = handlers.trace(tempered).get_trace(data)
        rows, columns = (trace[name]["value"] for name in ("rows", "columns"))
        return rows, columns, density(tempered, {"theta": 0.2}, data)

    rows, columns, got = map(np.asarray, run(data))
    batch = data[np.ix_(rows, columns)]
    want = stats.norm.logpdf(0.2) + 0.3 * 4.0 * stats.norm.logpdf(batch, 0.2).sum()
    assert got == pytest.approx(want, rel=1e-12)


def test_a_traced_alpha_in_a_subsampling_plate(x64):
    got = jax.jit(
        lambda alpha: density(
            handlers.seed(inside_plate, 0), {"theta": jnp.array(0.2)}, alpha
        )
    )(0.3)
    want = stats.norm.logpdf(0.2) + 1.2 * stats.norm.logpdf(Y[:3], 0.2).sum()
    assert got == pytest.approx(want, rel=1e-12)


def test_a_latent_that_chooses_a_branch_may_be_conditioned_outside():
    # As DCC and SDVI do it.
    def model(y):
        branch = numpyro.sample(
            "branch", dist.Bernoulli(0.5), infer={"branching": True}
        )
        numpyro.sample("y", dist.Normal(branch, 1.0).expand([3]).to_event(1), obs=y)

    tempered = handlers.condition(nt.temper(model, alpha=0.5), {"branch": 1})
    value = log_density(tempered, (jnp.zeros(3),), {}, {})[0]
    np.testing.assert_allclose(
        value, np.log(0.5) + 0.5 * 3 * (-0.5 - 0.5 * np.log(2 * np.pi)), rtol=1e-6
    )


def test_branches_chosen_by_a_latent_have_data_of_their_own():
    def model(y):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))

        def branch(loc):
            def body(_):
                numpyro.sample(
                    "y", dist.Normal(loc, 1.0).expand([3]).to_event(1), obs=y / 2
                )

            return body

        cond(z > 0, branch(1.0), branch(-1.0), None)

    value = log_density(
        nt.temper(model, alpha=0.5), (jnp.full(3, 2.0),), {}, {"z": jnp.array(0.3)}
    )[0]
    log_normal = -0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(
        value, log_normal - 0.5 * 0.09 + 0.5 * 3 * log_normal, rtol=1e-6
    )


@pytest.mark.parametrize("kind", [list, tuple, pd.Series])
def test_powers_of_data_may_be_a_list(kind):
    alpha = np.array([1.0, 0.0, 0.5])
    values = [
        log_density(
            nt.temper(location, alpha=each), (jnp.arange(3.0),), {}, {"mu": 0.2}
        )[0]
        for each in (kind(alpha), jnp.asarray(alpha))
    ]
    assert values[0] == values[1]


def location(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", 3):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)
