"""Streams of models in chunks and ragged batches: the numbers of whole runs."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_tempered as nt

pytestmark = pytest.mark.full

KEY = jax.random.key(5)
ETA = nt.expectations.gauss_hermite(predictor="eta")


@nt.temper(alpha=0.5)
def logistic(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    eta = numpyro.deterministic("eta", x @ w)
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def total(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample(
        "y", dist.Normal((x @ w).sum(), 1.0), obs=None if y is None else y.sum()
    )


def data(n=23, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2)).astype(np.float32)
    return x, (x[:, 0] + rng.normal(size=n) > 0).astype(np.int32)


def assert_same(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "expectation", [ETA, nt.expectations.monte_carlo()], ids=["quadrature", "draws"]
)
def test_chunks_are_one_run(expectation):
    x, y = data()
    online = nt.OnlineVI(
        logistic, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi(), expectation
    )
    whole, losses = online.run(KEY, x, y)
    chunks = [(x[:3], y[:3]), (x[3:16], y[3:16]), (x[16:], y[16:])]
    state, kept = online.run_chunks(KEY, iter(chunks), size=8)
    assert_same(state.rule_state, whole.rule_state)
    assert_same(tuple(kept), tuple(losses))
    # On from a state, and past what it has seen.
    first, _ = online.run_chunks(KEY, chunks[:1], size=8)
    rest, _ = online.run_chunks(first, chunks, size=8, skip=3)
    assert_same(rest.rule_state, whole.rule_state)
    with pytest.raises(ValueError, match="no chunk"):
        online.run_chunks(KEY, iter([]))


@pytest.mark.parametrize(
    "expectation", [ETA, nt.expectations.monte_carlo()], ids=["quadrature", "draws"]
)
def test_rows_that_are_masked_do_not_count(expectation):
    x, y = data(6)
    online = nt.OnlineVI(
        logistic, nt.guides.AutoOnlineMultivariateNormal, nt.online.ngvi(), expectation
    )
    start = online.init(KEY, x, y)
    alone, expected = online.update(start, x[:5], y[:5])
    padded, mask = nt.online.pad_batch(x[:5], y[:5])
    padded[0][5:] = np.nan
    state, losses = online.update_masked(start, mask, *padded)
    np.testing.assert_allclose(losses.expected, expected.expected, rtol=1e-5)
    np.testing.assert_allclose(
        state.posterior.loc, alone.posterior.loc, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        state.posterior.scale_tril, alone.posterior.scale_tril, rtol=1e-4, atol=1e-6
    )
    assert (int(state.count), int(state.rejected)) == (1, 0)
    none, _ = online.update_masked(state, np.zeros(8, bool), *padded)
    assert_same(none.rule_state, state.rule_state)


def test_rows_that_share_a_loss_cannot_be_masked():
    x, y = data(4)
    online = nt.OnlineVI(total, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())
    state = online.init(KEY, x, y)
    with pytest.raises(
        ValueError,
        match=r"'y' has log-probabilities of shape \(\), the mask has 4 rows",
    ):
        online.update_masked(state, jnp.ones(4, bool), x, y)


def categorical(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))
    logits = numpyro.deterministic("logits", x @ w.T)
    with numpyro.plate("n", len(x)):
        numpyro.sample("y", dist.Categorical(logits=logits), obs=y)


@pytest.mark.parametrize(
    "guide", ["AutoOnlineDiagonalNormal", "AutoOnlineMultivariateNormal"]
)
def test_a_model_with_several_predictors_a_datum_is_the_bare_softmax(x64, guide):
    x, _ = data(12)
    x, y = (
        jnp.asarray(x / 3, jnp.float64),
        jnp.asarray(np.random.default_rng(1).integers(0, 3, 12)),
    )
    rule = nt.online.ngvi()
    by_nodes = nt.expectations.gauss_hermite(
        predictor="logits", num_outputs=3, num_nodes=20
    )
    online = nt.OnlineVI(categorical, getattr(nt.guides, guide), rule, by_nodes)
    state, losses = online.run(KEY, x, y)
    bare, bare_losses = nt.online.run(
        rule,
        nt.expectations.softmax(3, num_nodes=30),
        rule.init(online.guide.prior),
        x,
        y,
    )
    # Two quadratures of one integral: three outputs by 20 nodes each, two differences by 30.
    np.testing.assert_allclose(losses.expected, bare_losses.expected, rtol=1e-7)
    np.testing.assert_allclose(state.posterior.loc, bare.posterior.loc, atol=1e-6)
    assert int(state.rejected) == 0
    wrong = nt.expectations.gauss_hermite(
        predictor="logits", num_outputs=4, num_nodes=4
    )
    with pytest.raises(
        ValueError,
        match=r"has shape .*3\), and num_outputs = 4 needs that as its last axis",
    ):
        nt.OnlineVI(categorical, getattr(nt.guides, guide), rule, wrong).init(KEY, x, y)
