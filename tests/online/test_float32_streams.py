"""Long streams: what a float32 sum must still hold after millions of rounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import enable_x64

import numpyro_tempered as nt

pytestmark = pytest.mark.usefixtures("strict")

BOUND = 1e-4
HINGE, SQUARED = nt.expectations.hinge(), nt.expectations.squared()
NGVI = nt.online.ngvi(0.1)


def prior(dtype):
    return nt.gaussian.families.MeanField(jnp.zeros(2, dtype), jnp.ones(2, dtype))


def chunk(num_rounds, varied, dtype):
    """Rows that float32 holds exactly: one row again and again, or random ones.

    The roundings of equal terms have one sign, so a plain sum of them fails early; those of random
    terms cancel until the sum is a million times a term.
    """
    rng = np.random.default_rng(0)
    second = rng.uniform(0.5, 1.5, num_rounds) if varied else np.full(num_rounds, 0.7)
    x = np.stack([np.ones(num_rounds), second], axis=1).astype(np.float32)
    y = np.where(varied & (rng.uniform(size=num_rounds) < 0.1), -1.0, 1.0)
    return jnp.asarray(x, dtype), jnp.asarray(y, dtype)


def stream(rule, expectation, num_rounds, num_chunks, varied, dtype):
    """The state after ``num_chunks`` times the same rows."""
    state = rule.init(prior(dtype))
    x, y = chunk(num_rounds, varied, dtype)
    for _ in range(num_chunks):
        state, losses = nt.online.run(rule, expectation, state, x, y)
    assert (int(state.count), int(state.rejected)) == (num_rounds * num_chunks, 0)
    return jax.tree.map(np.asarray, state), np.asarray(losses.expected)


def plain_sum(terms, num_chunks, start=0.0):
    """What one float32 variable holds after adding the terms one by one."""
    total = np.float32(start)
    for _ in range(num_chunks):
        total = np.add.accumulate(
            np.concatenate([[total], terms.astype(np.float32)]), dtype=np.float32
        )[-1]
    return float(total)


def relative(ours, reference):
    return np.max(np.abs(np.asarray(ours, float) / np.asarray(reference, float) - 1))


def check_precision(num_rounds, num_chunks, varied):
    state, _ = stream(NGVI, SQUARED, num_rounds, num_chunks, varied, jnp.float32)
    # The squared loss adds 2 step_size x² a round, whatever q is.
    added = 0.2 * np.asarray(chunk(num_rounds, varied, jnp.float32)[0], float) ** 2
    exact = 1 + num_chunks * added.sum(0)
    assert relative(state.memory.precision.value, exact) < BOUND
    assert relative(state.posterior.scale, exact**-0.5) < BOUND
    assert relative(plain_sum(added[:, 0], num_chunks, start=1.0), exact[0]) > BOUND
    # The mean: ridge regression in closed form, which a plain float32 recursion leaves by 2%.
    with enable_x64():
        double, _ = stream(NGVI, SQUARED, num_rounds, num_chunks, varied, jnp.float64)
    assert relative(state.posterior.loc, double.posterior.loc) < BOUND


def check_sums(num_rounds, num_chunks, varied):
    # A step so small that q hardly moves: nothing corrects what rounding accumulates.
    rule = nt.online.sva(1e-9)
    ours, losses = stream(rule, HINGE, num_rounds, num_chunks, varied, jnp.float32)
    with enable_x64():
        exact, _ = stream(rule, HINGE, num_rounds, num_chunks, varied, jnp.float64)
    for sums, reference in zip(ours.memory, exact.memory, strict=True):
        assert relative(sums.value, reference.value) < BOUND
    for sums, reference in zip(ours.cumulative, exact.cumulative, strict=True):
        assert relative(sums.value, reference.value) < BOUND
    for field in ("loc", "scale"):
        assert (
            relative(getattr(ours.posterior, field), getattr(exact.posterior, field))
            < BOUND
        )
    assert (
        relative(plain_sum(losses, num_chunks), exact.cumulative.expected.value) > BOUND
    )
    gradients = jax.vmap(
        lambda x, y: HINGE.evaluate(prior(jnp.float32), x, y).grad_loc[0]
    )
    first = np.asarray(jax.jit(gradients)(*chunk(num_rounds, varied, jnp.float32)))
    assert (
        relative(plain_sum(first, num_chunks), num_chunks * first.sum(dtype=float))
        > BOUND
    )


LENGTHS = pytest.mark.parametrize(
    ("num_rounds", "num_chunks"),
    [(50_000, 1), pytest.param(100_000, 4, marks=pytest.mark.full)],
)


@LENGTHS
def test_precision_after_many_rounds(num_rounds, num_chunks):
    check_precision(num_rounds, num_chunks, varied=False)


@pytest.mark.full
@LENGTHS
def test_summed_gradients_after_many_rounds(num_rounds, num_chunks):
    check_sums(num_rounds, num_chunks, varied=False)


@pytest.mark.slow
def test_precision_after_ten_million_rounds():
    check_precision(100_000, 100, varied=True)


@pytest.mark.slow
def test_summed_gradients_after_ten_million_rounds():
    check_sums(100_000, 100, varied=True)


def check_low_rank(num_rounds, num_chunks, held):
    """Rows in a plane after ``held`` of them: variances and means by the formula, in the plane and beside it."""
    d, rank = 20, 3
    rng = np.random.default_rng(2)
    plane = np.linalg.qr(rng.normal(size=(d, 2)))[0]
    x = (rng.normal(size=(num_rounds, 2)) @ plane.T).astype(np.float32)
    y = (x @ rng.normal(size=d) + rng.normal(size=num_rounds)).astype(np.float32)
    factor = np.concatenate(
        [np.sqrt(held) * plane, np.zeros((d, rank - 2))], axis=1
    ).astype(np.float32)
    prior = nt.gaussian.families.LowRank(
        np.zeros(d, np.float32), np.ones(d, np.float32), factor
    )
    rule = nt.online.ngvi(0.5)
    state = rule.init(prior)
    for _ in range(num_chunks):
        state, _ = nt.online.run(rule, SQUARED, state, jnp.asarray(x), jnp.asarray(y))
    assert (int(state.count), int(state.rejected)) == (num_rounds * num_chunks, 0)
    rows, exact = x.astype(float), np.eye(d) + factor.astype(float) @ factor.T
    exact = exact + num_chunks * rows.T @ rows
    mean = np.linalg.solve(exact, num_chunks * rows.T @ y)
    loc, diag, ours = (np.asarray(leaf, float) for leaf in state.posterior)
    scales, directions = np.linalg.eigh(exact)
    precision = (
        np.sum(np.square(directions.T @ ours), axis=1) + np.square(directions.T) @ diag
    )
    assert relative(precision, scales) < 1e-3
    np.testing.assert_allclose(
        np.sqrt(scales) * ((loc - mean) @ directions), 0.0, atol=0.01
    )
    # What rules and predictions take from it: a rounding of the prior's variance is a tenth of these variances.
    variance = nt.gaussian.families.family_of(prior).predictor_variance(
        state.posterior, jnp.asarray(x[:50])
    )
    assert (
        relative(
            variance, np.sum(rows[:50] * np.linalg.solve(exact, rows[:50].T).T, axis=1)
        )
        < 1e-2
    )


@pytest.mark.full
def test_low_rank_precision_after_a_million_rounds():
    check_low_rank(2_000, 1, held=1e6)


@pytest.mark.slow
def test_low_rank_precision_from_the_first_round_on():
    check_low_rank(100_000, 10, held=0.0)
