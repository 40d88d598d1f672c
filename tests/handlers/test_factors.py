"""A factor of the model is likelihood or prior by the user's word, and one of a handler is prior."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoDelta
from numpyro.primitives import Messenger, get_mask
from scipy import stats
from tempered_models import (
    density,
    naive_temper,
    positive,
    positive_density,
    potential,
    trace_of,
)

import numpyro_tempered as nt


def with_factors(y):
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    # A name of the user that looks like one of NumPyro's.
    numpyro.factor("_s_log_det_", -3.0 * s)
    numpyro.factor("bonus", 2.0 * s)
    numpyro.sample("y", dist.Normal(0.0, s), obs=y)


@pytest.mark.parametrize(
    ("factors", "log_det", "bonus"),
    [
        (True, 0.1, 0.1),
        (False, 1, 1),
        (["_s_log_det_"], 0.1, 1),
        ({"bonus"}, 1, 0.1),
        ((), 1, 1),
    ],
    ids=str,
)
def test_factors_of_the_user_follow_the_policy(factors, log_det, bonus, x64):
    u, y = 0.4, np.array([1.3])
    s = np.exp(u)
    want = positive_density(s, y, 0.1) + u - 3.0 * s * log_det + 2.0 * s * bonus
    decorated = nt.temper(alpha=0.1, factors=factors)(with_factors)
    for model in (nt.temper(with_factors, alpha=0.1, factors=factors), decorated):
        assert potential(model, {"s": u}, y) == pytest.approx(-want, rel=1e-12)
    assert abs(potential(naive_temper(with_factors, 0.1), {"s": u}, y) + want) > 0.3


@pytest.mark.parametrize("factors", [True, False])
def test_the_policy_holds_at_alpha_zero(factors, x64):
    s = 1.3
    got = density(nt.temper(with_factors, alpha=0.0, factors=factors), {"s": s}, 0.3)
    want = stats.halfnorm.logpdf(s) + (0.0 if factors else -s)
    assert got == pytest.approx(want, rel=1e-12)


def test_the_policy_is_that_of_each_handler(x64):
    inner = nt.temper(with_factors, alpha=0.1, factors=["bonus"])
    both = nt.temper(inner, alpha=0.5, factors=["bonus"])
    trace = trace_of(both, 1.3)
    assert (trace["_s_log_det_"]["scale"], trace["bonus"]["scale"]) == (
        None,
        pytest.approx(0.05),
    )
    assert trace["y"]["scale"] == pytest.approx(0.05)


def test_a_batched_factor_in_a_plate_is_scaled_by_both(x64):
    def model():
        theta = numpyro.sample("theta", dist.Normal())
        with numpyro.plate("n", 12, subsample_size=3) as i:
            numpyro.factor("loss", -((theta - jnp.arange(12.0)[i]) ** 2))

    @jax.jit
    def run():
        # The rows drawn are the same with and without the handler.
        rows = trace_of(model)["n"]["value"]
        return rows, density(
            handlers.seed(nt.temper(model, alpha=0.3), 0), {"theta": 0.7, "n": rows}
        )

    rows, got = run()
    want = stats.norm.logpdf(0.7) - 0.3 * 4.0 * ((0.7 - np.asarray(rows)) ** 2).sum()
    assert got == pytest.approx(want, rel=1e-12)


def test_masked_factors(x64):
    def model():
        theta = numpyro.sample("theta", dist.Normal())
        with handlers.mask(mask=jnp.array([True, False, True])):
            numpyro.factor("loss", -theta * jnp.array([1.0, 5.0, 2.0]))

    for policy, power in ((True, 0.3), (False, 1.0)):
        got = density(nt.temper(model, alpha=0.3, factors=policy), {"theta": 0.7})
        assert got == pytest.approx(
            stats.norm.logpdf(0.7) - power * 0.7 * 3.0, rel=1e-12
        )


def test_a_factor_of_a_part_under_scope_is_the_users(x64):
    def whole(y):
        with handlers.scope(prefix="part"):
            with_factors(y)

    u, y = 0.4, np.array([1.3])
    s = np.exp(u)
    want = -(positive_density(s, y, 0.1) + u - 0.1 * s)
    for model in (
        nt.temper(whole, alpha=0.1),
        handlers.scope(nt.temper(with_factors, alpha=0.1), prefix="part"),
    ):
        assert potential(model, {"part/s": u}, y) == pytest.approx(want, rel=1e-12)
    # Names are those that the handler sees.
    trace = trace_of(nt.temper(whole, alpha=0.1, factors=["part/bonus"]), y)
    assert (trace["part/bonus"]["scale"], trace["part/_s_log_det_"]["scale"]) == (
        0.1,
        None,
    )


def test_a_factor_from_the_initialiser_of_a_param_is_the_models():
    def model():
        def init(key):
            numpyro.factor("in_init", 1.0)
            return jnp.zeros(())

        numpyro.param("w", init)

    assert trace_of(nt.temper(model, alpha=0.1))["in_init"]["scale"] == 0.1


def test_a_factor_that_another_handler_emits_is_prior():
    class penalise(Messenger):
        def process_message(self, msg):
            if msg["type"] == "sample" and not msg["is_observed"]:
                numpyro.factor(f"{msg['name']}_penalty", -1.0)

    def in_scan():
        scan(
            lambda c, _: (numpyro.sample("x", dist.Normal(c)), None),
            0.0,
            None,
            length=3,
        )

    for wrap in (
        lambda model: nt.temper(penalise(model), alpha=0.1),
        lambda model: penalise(nt.temper(model, alpha=0.1)),
    ):
        assert trace_of(wrap(positive), 1.3)["s_penalty"]["scale"] is None
    inside = trace_of(
        nt.temper(
            lambda: scan(
                penalise(lambda c, _: (numpyro.sample("x", dist.Normal(c)), None)),
                0.0,
                None,
                length=3,
            ),
            alpha=0.1,
        )
    )
    assert inside["x_penalty"]["scale"] is None


def test_a_factor_that_the_model_does_not_have_is_refused():
    with pytest.raises(
        ValueError, match=r"^the model has.*no sites \['bonsu'\].*are factors"
    ):
        trace_of(nt.temper(with_factors, alpha=0.1, factors=["bonsu"]), 1.3)


def test_a_misspelt_name_is_refused_where_factors_are_the_only_data():
    def model():
        numpyro.factor("loss", -(numpyro.sample("theta", dist.Normal()) ** 2))

    with pytest.raises(
        ValueError, match=r"^the model has.*no sites \['los'\].*\['loss'\] are factors"
    ):
        trace_of(nt.temper(model, alpha=0.1, factors=["los"]))
    assert (
        trace_of(nt.temper(model, alpha=0.1, factors=["loss"]))["loss"]["scale"] == 0.1
    )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: nt.temper(model, alpha=0.3),
        lambda model: nt.temper(model, alpha=0.3, factors=["costly"]),
        lambda model: nt.temper(model, {"costly": 0.3, "y": 0.3}),
    ],
    ids=["all", "named", "mapping"],
)
def test_a_factor_left_out_of_predictions_is_not_missed(wrap, key):
    """NumPyro's own idiom for a factor that is not needed where densities are not."""

    def model():
        theta = numpyro.sample("theta", dist.Normal())
        if get_mask() is not False:
            numpyro.factor("costly", -theta)
        numpyro.sample("y", dist.Normal(theta, 1.0))

    assert Predictive(wrap(model), {"theta": jnp.zeros(2)})(key)["y"].shape == (2,)
    assert trace_of(wrap(model))["costly"]["scale"] == 0.3


@pytest.mark.full
def test_svi_counts_factors_by_the_policy(x64):
    def model():
        theta = numpyro.sample("theta", dist.Normal())
        numpyro.factor("bonus", 2.0 * theta)

    for factors, power in ((True, 0.3), (False, 1.0)):
        tempered = nt.temper(model, alpha=0.3, factors=factors)
        svi = SVI(tempered, AutoDelta(tempered), numpyro.optim.Adam(0.1), Trace_ELBO())

        @jax.jit
        def run(svi=svi):
            state = svi.init(jax.random.key(0))
            return svi.get_params(state)["theta_auto_loc"], svi.evaluate(state)

        theta, loss = map(float, run())
        assert loss == pytest.approx(
            -(stats.norm.logpdf(theta) + power * 2.0 * theta), rel=1e-12
        )


@pytest.fixture(params=["abstract", pytest.param("computed", marks=pytest.mark.full)])
def call(request):
    """By default what a function does is traced and not computed."""
    return (
        (lambda f: jax.eval_shape(lambda: (f(), None)[1]))
        if request.param == "abstract"
        else lambda f: f()
    )


def test_a_collapsed_factor_is_refused(call):
    pytest.importorskip("funsor")

    def collapsed(y):
        with handlers.collapse():
            p = numpyro.sample("p", dist.Beta(2.0, 2.0))
            numpyro.sample("y", dist.Binomial(10, p), obs=y)

    trace = {}
    call(lambda: trace.update(trace_of(nt.temper(collapsed, alpha=1.0), 7)))
    assert any(isinstance(site.get("fn"), dist.Unit) for site in trace.values())
    with pytest.raises(
        ValueError,
        match=r"^temper met the factor.*handlers\.collapse.*latents in the model",
    ):
        call(lambda: trace_of(nt.temper(collapsed, alpha=0.5), 7))
