"""No silent ruin: a run names what went wrong in it, and only that."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, MeanField

NUM_ROUNDS, D = 60, 3
NGVI = nt.online.ngvi()
SQUARED = nt.expectations.squared(noise_scale=1.0)
# A loss that cannot know how its labels are coded.
BLIND = nt.expectations.hinge()._replace(check=None)
PRIOR = MeanField(np.zeros(D), np.ones(D))


def make_rows(n=NUM_ROUNDS, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, D))
    return x, x @ [1.0, -1.0, 0.5] + rng.normal(size=n)


def message(rule, loss, x, y, state=None, **options):
    """The one warning of a run, or nothing."""
    state = rule.init(PRIOR) if state is None else state
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        after, _ = nt.online.run(rule, loss, state, x, y, **options)
    assert all(
        w.category is nt.online.StreamWarning and w.filename == __file__ for w in caught
    )
    assert len(caught) <= 1
    return after, "".join(str(w.message) for w in caught)


def test_labels_of_another_coding_are_named():
    x, y = make_rows()
    labels = (y > 0).astype(float)
    lost = int(np.sum(labels == 0))
    state, text = message(NGVI, BLIND, x, labels)
    assert int(state.rejected) == lost
    assert (
        f"{lost} of {NUM_ROUNDS} rounds were rejected ({lost} with a loss that is not finite"
        in text
    )
    assert f"the first in row {np.argmin(labels)}, all those of outcome 0)" in text
    # The next run has troubles of its own.
    state, text = message(NGVI, BLIND, x, np.ones(NUM_ROUNDS), state)
    assert "rejected" not in text
    labels = 2 * labels - 1
    labels[[7, 9]] = np.nan
    _, text = message(NGVI, BLIND, x, labels)
    assert (
        "2 of 60 rounds were rejected (2 with data that are not finite, the first in row 7)"
        in text
    )
    _, text = message(NGVI, BLIND, x, labels, mask=~np.isnan(labels))
    assert text == ""


def test_jumps_are_named():
    x, y = make_rows()
    y[40] = 1e4
    state, text = message(NGVI, SQUARED, x, y)
    assert int(state.jumps) >= 1
    assert (
        f"{int(state.jumps)} of 60 rounds moved a mean by more than 10 of its standard deviations"
        in text
    )
    assert f"the longest of the stream by {float(state.max_move):.3g}" in text
    before, _ = nt.online.run(NGVI, SQUARED, NGVI.init(PRIOR), x[:40], y[:40])
    after, _ = nt.online.update(NGVI, SQUARED, before, x[40], y[40])
    move = np.max(
        np.abs(after.posterior.loc - before.posterior.loc)
        / np.asarray(before.posterior.scale)
    )
    np.testing.assert_allclose(after.max_move, move, rtol=1e-5)
    assert (int(before.jumps), int(after.jumps)) == (0, 1)


@pytest.mark.full
def test_the_moves_of_points_and_gradient_steps_are_in_scales_of_the_prior():
    x, y = make_rows()
    for rule in (
        nt.online.oga(0.1),
        nt.online.svb(nt.online.svb_rate(0.1)),
        nt.online.sva(0.1),
    ):
        state, text = message(rule, SQUARED, x, y)
        assert text == ""
        assert 0 < float(state.max_move) < 2
    full = NGVI.init(FullRank(np.zeros(D), np.diag([1.0, 0.1, 1e-3])))
    after, _ = nt.online.update(NGVI, SQUARED, full, x[0], y[0])
    move = np.max(np.abs(after.posterior.loc) / np.array([1.0, 0.1, 1e-3]))
    np.testing.assert_allclose(after.max_move, move, rtol=1e-5)


def test_losses_above_those_of_the_prior_are_named():
    x, y = make_rows()
    # Steps that are far too long, without a round that is not finite.
    _, text = message(nt.online.oga(0.8), SQUARED, x, y)
    losses = 0.5 * y**2 + 0.5 * np.log(2 * np.pi)
    prior = np.mean(losses[losses <= np.quantile(losses, 0.99)])
    assert f"is above {prior:.4g}, that of predictions at the prior mean" in text
    # Short streams prove nothing.
    _, text = message(nt.online.oga(0.8), SQUARED, x[:40], y[:40])
    assert "prior mean" not in text


def test_all_findings_are_in_one_warning():
    x, y = make_rows()
    y[3], y[30] = np.nan, 1e9
    _, text = message(nt.online.oga(0.8), SQUARED, x, y)
    assert all(part in text for part in ("were rejected", "moved a mean", "prior mean"))


@pytest.mark.parametrize("noise", [1.0, pytest.param(0.1, marks=pytest.mark.full)])
def test_streams_in_order_are_not_warned_of(noise):
    for seed in range(3):
        x, _ = make_rows(seed=seed)
        y = x @ [1.0, -1.0, 0.5] + noise * np.random.default_rng(seed).normal(
            size=NUM_ROUNDS
        )
        assert message(NGVI, SQUARED, x, y)[1] == ""
        # There is nothing to learn.
        assert (
            message(
                NGVI,
                SQUARED,
                x,
                np.random.default_rng(9 + seed).normal(size=NUM_ROUNDS),
            )[1]
            == ""
        )


@pytest.mark.full
def test_nothing_warns_inside_of_transformations():
    x, y = make_rows()
    y[3] = np.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = jax.jit(lambda y: nt.online.run(NGVI, SQUARED, NGVI.init(PRIOR), x, y))
        assert int(run(y)[0].rejected) == 1
        states, _ = jax.vmap(run)(np.stack([y, y]))
    assert states.rejected.tolist() == [1, 1]


def test_arrays_without_a_finite_value_are_refused():
    x, y = make_rows()
    with pytest.raises(
        ValueError,
        match=r"data array 1 of shape \(60,\) holds no finite value, got nan.*were read",
    ):
        nt.online.run(NGVI, SQUARED, NGVI.init(PRIOR), x, np.full(NUM_ROUNDS, np.nan))
    with pytest.raises(
        ValueError, match=r"data array 0 .* got inf.*the data were read"
    ):
        nt.online.run(NGVI, SQUARED, NGVI.init(PRIOR), np.full_like(x, np.inf), y)


@pytest.mark.full
def test_diagnose_reads_the_counters(key):
    state = NGVI.init(PRIOR)._replace(
        count=jnp.int32(9), rejected=jnp.int32(1), jumps=jnp.int32(2)
    )
    with pytest.warns(nt.online.StreamWarning) as caught:
        findings = nt.online.diagnose(NGVI, state)
    assert [finding.kind for finding in findings] == ["rejected", "jump"]
    assert [str(w.message) for w in caught] == [finding.message for finding in findings]
    assert "1 of 10 rounds" in findings[0].message


# Models


def make_model(likelihood):
    def model(x, y=None):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0).expand([D]).to_event(1))
        eta = numpyro.deterministic("eta", x @ theta)
        with numpyro.plate("n", x.shape[0]):
            numpyro.sample("y", likelihood(eta), obs=y)

    return model


def make_online(likelihood):
    model = make_model(likelihood)
    expectation = nt.expectations.gauss_hermite(predictor="eta", num_nodes=4)
    return nt.OnlineVI(
        model, nt.guides.AutoOnlineDiagonalNormal(model), NGVI, expectation
    )


SUPPORTS = {
    "signs": (
        lambda eta: dist.Bernoulli(logits=eta),
        [-1, 1],
        r"Boolean.*got -1 .*turn labels in \{-1, 1\} into",
    ),
    "classes": (
        lambda eta: dist.OrderedLogistic(eta, jnp.array([-1.0, 1.0])),
        [1, 3],
        "got 3 in 30 of 60 data: labels that begin at 1 become y - 1",
    ),
    "counts": (
        lambda eta: dist.Poisson(jnp.exp(eta)),
        [2, -1],
        "IntegerNonnegative.*got -1 in 30 of 60 data",
    ),
    "positive": (
        lambda eta: dist.LogNormal(eta, 1.0),
        [0.5, -1.0],
        r"Positive.*got -1\.0",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", tiered(SUPPORTS, unit=["signs"]))
def test_outcomes_outside_of_a_support_are_refused_before_the_first_round(key, name):
    likelihood, outcomes, text = SUPPORTS[name]
    online, (x, _), y = (
        make_online(likelihood),
        make_rows(),
        np.tile(outcomes, NUM_ROUNDS // 2),
    )
    with pytest.raises(ValueError, match=f"observed site 'y' takes values in .*{text}"):
        online.run(key, x, y)
    with pytest.raises(ValueError, match="observed site 'y'"):
        online.run_chunks(key, [(x, y)])
    state = online.init(key, x[:2], y[:2])
    with pytest.raises(ValueError, match="observed site 'y'"):
        online.update(state, x[:2], y[:2])


@pytest.mark.full
def test_a_run_of_a_model_warns_once(key):
    online, (x, y) = make_online(lambda eta: dist.Normal(eta, 1.0)), make_rows()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        online.run(key, x, y)
    y[[4, 8]] = np.nan
    with pytest.warns(
        nt.online.StreamWarning, match=r"2 of 60 rounds were rejected .*first in row 4"
    ) as caught:
        online.run(key, x, y)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.raises(ValueError, match="holds no finite value"):
        online.run(key, x, np.full(NUM_ROUNDS, np.nan))
    # A row that is off may hold anything.
    binary = make_online(lambda eta: dist.Bernoulli(logits=eta))
    labels = np.array([1, 0, -1])
    state, _ = binary.update_masked(
        binary.init(key, x[:3], labels), labels >= 0, x[:3], labels
    )
    assert int(state.count) == 1


def test_data_may_be_constants_of_a_program():
    x, y = (jnp.asarray(a) for a in make_rows(8))

    def end(size):
        rule = nt.online.ngvi(size)
        return nt.online.run(rule, SQUARED, rule.init(PRIOR), x, y)[0].posterior.loc

    together = jax.jit(jax.vmap(end))(jnp.array([0.5, 1.0]))
    np.testing.assert_allclose(together[1], end(1.0), rtol=1e-5, atol=1e-6)


def counts_in_large_units(n=200):
    """Counts whose expected loss is infinite in the first rounds."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 3)).astype(np.float32)
    y = rng.poisson(np.exp(1.0 + x @ [0.5, 0.3, -0.2])).astype(np.float32)
    return np.column_stack([np.ones(n, np.float32), 100.0 * x]), y


def test_skip_still_skips_after_rounds_of_infinite_expected_loss():
    x, y = counts_in_large_units()
    y[150] = 1e4
    rule = nt.online.skip(nt.online.rvga(), max_deviations=8.0)
    start = rule.init(FullRank(jnp.zeros(4), jnp.eye(4)))
    with pytest.warns(
        nt.online.StreamWarning,
        match=r"^In this.*1 of 200 rounds were rejected.*that is too large",
    ):
        state, losses = nt.online.run(rule, nt.expectations.poisson(), start, x, y)
    assert np.isinf(losses.expected[0])
    assert np.isfinite(state.memory.mean.value)
    assert int(state.memory.skipped) == 1


@pytest.mark.full
def test_a_round_that_was_taken_is_not_called_lost():
    x, y = counts_in_large_units()
    x[100, 1] = np.nan
    rule = nt.online.rvga()
    start = rule.init(FullRank(jnp.zeros(4), jnp.eye(4)))
    with pytest.warns(
        nt.online.StreamWarning, match=r"1 with data that are not finite.*is too large"
    ) as caught:
        _, losses = nt.online.run(rule, nt.expectations.poisson(), start, x, y)
    assert np.isinf(losses.expected[0])
    assert "loss that is not finite" not in str(caught[0].message)
