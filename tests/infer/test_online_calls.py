"""Calls of online functions with an OnlineVI, its state or one of its rows: what works, and what is said."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_tempered as nt

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 3))
Y = X @ [1.0, -2.0, 0.5]
SQUARED = nt.expectations.squared()


def model(x, y=None, *, offset=0.0):
    tau = numpyro.sample("tau", dist.Normal(0.0, 1.0))
    table = numpyro.sample("table", dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    eta = numpyro.deterministic("eta", x @ weights + tau + jnp.sum(table) + offset)
    # Of one row without its axis there would be three data.
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


@pytest.fixture(scope="module")
def online():
    return nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())


@pytest.fixture(scope="module")
def state(online):
    return online.init(KEY, X[:1], Y[:1])


@pytest.fixture(scope="module")
def narrow(state):
    """A state whose coordinates 1, 4 and 7 have collapsed."""
    q = state.posterior
    posterior = q._replace(scale=q.scale.at[jnp.array([1, 4, 7])].set(1e-8))
    return state._replace(rule_state=state.rule_state._replace(posterior=posterior))


def test_findings_and_the_state_name_the_sites(online, narrow):
    assert dict(narrow.layout.sites) == {"tau": (), "table": (2, 2), "weights": (3,)}
    flat = [
        (name, index)
        for name, shape in narrow.layout.sites
        for index in np.ndindex(shape)
    ]
    expected = [
        name + (str(list(index)) if index else "")
        for name, index in (flat[k] for k in (1, 4, 7))
    ]
    for rule, state in ((online, narrow), (online.rule, narrow)):
        (finding,) = nt.online.diagnose(rule, state, warn=False)
        assert finding.coordinates.tolist() == [1, 4, 7]
        assert (
            "(" + ", ".join(expected) + "): these coordinates hardly move"
            in finding.message
        )
    assert {"table[0, 0]", "weights[1]"} & set(expected)
    (finding,) = nt.online.diagnose(online.rule, narrow.rule_state, warn=False)
    assert "(1, 4, 7): these coordinates hardly move" in finding.message
    for shown in (repr(narrow), narrow._repr_html_()):
        assert "table (2, 2)" in shown
        assert "weights (3,)" in shown
        assert "tau ()" in shown


def test_findings_name_a_few_coordinates():
    rule = nt.online.ngvi()
    state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(300), jnp.ones(300)))
    state = state._replace(
        posterior=nt.gaussian.families.MeanField(jnp.zeros(300), jnp.full(300, 1e-8))
    )
    (finding,) = nt.online.diagnose(rule, state, warn=False)
    assert "(0, 1, 2, 3, 4, ...): these coordinates hardly move" in finding.message
    assert len(finding.message) < 300


CALLS = {
    "run": lambda o, s: nt.online.run(o, s, X, Y),
    "update": lambda o, s: nt.online.update(o, s, X, Y),
    "run_chunks": lambda o, s: nt.online.run_chunks(o, s, [(X, Y)]),
    "iterate_chunks": lambda o, s: list(nt.online.iterate_chunks(o, s, [(X, Y)])),
    "Service": lambda o, s: nt.online.Service(o, s, X[0], Y[0]),
    "predict": lambda o, s: nt.online.predict(o, s, X),
    "class_probabilities": lambda o, s: nt.online.class_probabilities(o, s, X),
    "sample_predictor": lambda o, s: nt.online.sample_predictor(KEY, o, s, X),
}
OF_RULE = {
    "run": lambda o, s: nt.online.run(o.rule, o.expectation, s, X, Y),
    "update": lambda o, s: nt.online.update(o.rule, o.expectation, s, X, Y),
    "run_chunks": lambda o, s: nt.online.run_chunks(o.rule, o.expectation, s, [(X, Y)]),
    "iterate_chunks": lambda o, s: list(
        nt.online.iterate_chunks(o.rule, o.expectation, s, [(X, Y)])
    ),
    "Service": lambda o, s: nt.online.Service(o.rule, SQUARED, s, X[0], Y[0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_of_rules_say_what_an_online_vi_has(online, state, name):
    with pytest.raises(
        TypeError,
        match=r"OnlineVI has calls of its own: online.run\(rng_key, \*args\).*service",
    ):
        CALLS[name](online, state)


@pytest.mark.parametrize("name", OF_RULE)
def test_functions_of_rules_say_where_the_state_belongs(online, state, name):
    with pytest.raises(
        TypeError,
        match=r"takes its state itself: online.run.*or pass state.rule_state.*bare loss",
    ):
        OF_RULE[name](online, state)


def test_predictions_by_a_bare_loss_take_the_state_of_a_model(state):
    q = nt.gaussian.families.MeanField(jnp.arange(3.0), jnp.ones(3))
    for rule in (nt.online.ngvi(), nt.online.standardise(nt.online.ngvi())):
        rule_state, _ = nt.online.run(rule, SQUARED, rule.init(q), X, Y)
        found = nt.online.predict(SQUARED, state._replace(rule_state=rule_state), X)
        expected = nt.online.predict(SQUARED, rule_state, X)
        np.testing.assert_array_equal(found.mean, expected.mean)
        np.testing.assert_array_equal(found.variance, expected.variance)
    with pytest.raises(
        TypeError,
        match=r"of a model's likelihood: OnlineVI\.service.*loss of the model",
    ):
        nt.online.predict(nt.expectations.gauss_hermite(predictor="eta"), state, X)


ROWS = {
    "x and y": ((X[0], Y[0]), {}, r"number 1 of the model has shape \(3,\)"),
    "x alone": ((X[0], Y[:1]), {}, r"number 1 of the model has shape \(3,\)"),
    "by keyword": ((X[0],), {"y": Y[0]}, r"number 1 of the model has shape \(3,\)"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_needs_a_leading_axis(online, state, name):
    args, kwargs, message = ROWS[name]
    online.init(KEY, *(X[:1], Y[:1])[: len(args)], **dict.fromkeys(kwargs, Y[:1]))
    for call in (online.update, jax.jit(online.update)):
        with pytest.raises(
            ValueError,
            match=message
            + r", an axis less than at the start.*Pass x\[None\], or x\[:1\]",
        ):
            call(state, *args, **kwargs)


@pytest.mark.full
def test_arguments_that_broadcast_may_lose_an_axis(online, state):
    wide = online.init(KEY, X[:1], Y[:1], offset=np.ones(1))
    after, _ = online.update(wide, X[:2], Y[:2], offset=np.float32(1.0))
    assert int(after.count) == 1


def test_a_start_with_a_row_is_told_from_local_latents():
    def of_columns(x, y):
        weights = numpyro.sample(
            "weights", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1)
        )
        numpyro.sample("y", dist.Normal(x @ weights, 1.0), obs=y)

    with pytest.raises(
        ValueError,
        match=r"^latent sites.*If the data are one row, give them a leading axis",
    ):
        nt.OnlineVI(of_columns, nt.guides.AutoOnlineDiagonalNormal).init(
            KEY, X[0], Y[0]
        )
