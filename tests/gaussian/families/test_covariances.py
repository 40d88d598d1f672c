"""The families with a covariance: full rank, and low rank plus diagonal."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

from numpyro_tempered.gaussian.families import (
    FullRank,
    Gain,
    LowRank,
    MeanField,
    Rows,
    family_of,
    full_rank,
    low_rank,
    rank_updates,
)
from numpyro_tempered.gaussian.families.base import Whitened
from numpyro_tempered.infer.guides import LowRankPrecisionNormal

D = 5


def full(seed, dtype=jnp.float64):
    rng = np.random.default_rng(seed)
    mix = rng.normal(size=(D, 2 * D))
    return FullRank(
        jnp.asarray(rng.normal(size=D), dtype),
        jnp.asarray(np.linalg.cholesky(mix @ mix.T / D), dtype),
    )


def low(seed, rank=2, dtype=jnp.float64):
    rng = np.random.default_rng(seed)
    return LowRank(
        jnp.asarray(rng.normal(size=D), dtype),
        jnp.asarray(rng.uniform(0.5, 2.0, D), dtype),
        jnp.asarray(rng.normal(size=(D, rank)), dtype),
    )


def covariance(q):
    if isinstance(q, FullRank):
        return np.asarray(q.factor) @ np.asarray(q.factor).T
    columns = np.asarray(q.precision_factor)
    return np.linalg.inv(np.diag(q.precision_diag) + columns @ columns.T)


def as_numpyro(q):
    return dist.MultivariateNormal(q.loc, covariance(q))


MAKERS = {"full": full, "low": low}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def test_kl_is_that_of_the_formula(x64, make):
    q, p = make(0), make(1)
    precision, shift = (
        np.linalg.inv(covariance(p)),
        np.asarray(p.loc) - np.asarray(q.loc),
    )
    log_det = np.linalg.slogdet(precision @ covariance(q))[1]
    expected = 0.5 * (
        np.trace(precision @ covariance(q)) + shift @ precision @ shift - D - log_det
    )
    kl = jax.jit(family_of(q).kl)
    np.testing.assert_allclose(kl(q, p), expected, rtol=1e-10)
    np.testing.assert_allclose(kl(q, q), 0.0, atol=1e-12)


@pytest.mark.full
def test_kl_agrees_with_numpyro(x64, make):
    q, p = make(0), make(1)
    expected = jax.jit(lambda: dist.kl_divergence(as_numpyro(q), as_numpyro(p)))()
    kl = jax.jit(family_of(q).kl)
    np.testing.assert_allclose(kl(q, p), expected, rtol=1e-10)
    np.testing.assert_allclose(kl(q, q), 0.0, atol=1e-12)


def test_moments_of_predictors_and_coordinates(x64, make):
    q = make(2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(7, D)))
    expected = np.sum((np.asarray(x) @ covariance(q)) * np.asarray(x), axis=1)
    variance, scale = jax.jit(
        lambda q, x: (
            family_of(q).predictor_variance(q, x),
            family_of(q).marginal_scale(q),
        )
    )(q, x)
    np.testing.assert_allclose(variance, expected, rtol=1e-10)
    np.testing.assert_allclose(scale, np.sqrt(np.diag(covariance(q))), rtol=1e-10)


def test_sample_moments(x64, make, key):
    q, n = make(3), 200_000
    draws = np.asarray(jax.jit(lambda key: family_of(q).sample(key, q, (n,)))(key))
    assert draws.shape == (n, D)
    assert jax.eval_shape(family_of(q).sample, key, q).shape == (D,)
    scale = np.sqrt(np.diag(covariance(q)))
    np.testing.assert_array_less(np.abs(draws.mean(0) - q.loc), 5 * scale / np.sqrt(n))
    # Standard error of a covariance of normals: at most scale_i scale_j √(2/n).
    error = np.abs(np.cov(draws.T) - covariance(q))
    np.testing.assert_array_less(error, 5 * np.outer(scale, scale) * np.sqrt(2 / n))


def test_merging_adds_natural_parameters(x64, make):
    prior, *others = (make(seed) for seed in (4, 5, 6))
    if make is low:
        # All directions of both and the prior fit.
        pad = lambda q: q._replace(  # noqa: E731
            precision_factor=np.pad(q.precision_factor, ((0, 0), (0, D - 2)))
        )
        prior, *others = (pad(q) for q in (prior, *others))
    # Posteriors: more precise than the prior, whose natural parameters are taken off once.
    x = np.random.default_rng(1).normal(size=(2, 9, D))

    def posterior(rows, shift):
        if make is low:
            columns = np.concatenate(
                [np.asarray(prior.precision_factor), rows.T], axis=1
            )
            values, vectors = np.linalg.eigh(columns @ columns.T)
            return prior._replace(
                loc=prior.loc + shift, precision_factor=vectors * np.sqrt(values)
            )
        precise = np.linalg.inv(np.linalg.inv(covariance(prior)) + rows.T @ rows)
        return FullRank(prior.loc + shift, np.linalg.cholesky(precise))

    posteriors = [
        posterior(rows, shift) for rows, shift in zip(x, (0.3, -0.2), strict=True)
    ]
    merged = jax.jit(family_of(prior).merge)(*posteriors, prior)
    precisions = [np.linalg.inv(covariance(q)) for q in (*posteriors, prior)]
    precision = precisions[0] + precisions[1] - precisions[2]
    linear = [
        p @ np.asarray(q.loc)
        for p, q in zip(precisions, (*posteriors, prior), strict=True)
    ]
    np.testing.assert_allclose(
        np.linalg.inv(covariance(merged)), precision, rtol=1e-8, atol=1e-9
    )
    np.testing.assert_allclose(
        merged.loc,
        np.linalg.solve(precision, linear[0] + linear[1] - linear[2]),
        rtol=1e-8,
    )


def test_scale_tril_is_the_cholesky_factor(x64):
    q = full(7)
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(D, D)))[0]
    rotated = FullRank(q.loc, q.factor @ rotation)
    np.testing.assert_allclose(rotated.scale_tril, q.factor, rtol=1e-10, atol=1e-12)


def test_one_row_is_an_update_of_rank_one(x64):
    q, x = full(8), np.random.default_rng(2).normal(size=D)
    add_row = jax.jit(
        lambda weight: full_rank.add_row(
            full_rank.init(q).factor, jnp.asarray(x), weight
        )
    )
    for weight in (3.0, -0.5 / float(x @ covariance(q) @ x)):
        memory = add_row(weight)
        expected = np.linalg.inv(np.linalg.inv(covariance(q)) + weight * np.outer(x, x))
        value = np.asarray(memory.value)
        np.testing.assert_allclose(value @ value.T, expected, rtol=1e-9, atol=1e-12)
    # A precision that would not be positive definite is NaN, which the drivers refuse.
    assert np.all(np.isnan(add_row(-1e6).value))


@pytest.mark.parametrize("num_rows", [D, D + 3, 40])
def test_a_block_of_rows_is_one_update(num_rows, x64):
    q, rng = full(8), np.random.default_rng(2)
    x, weights = rng.normal(size=(num_rows, D)), rng.uniform(0.1, 2.0, size=num_rows)
    weights[1] = -0.01
    add = jax.jit(
        lambda x, weights: full_rank.add_rows(
            full_rank.init(q).factor, Rows(x, weights)
        )
    )
    value = np.asarray(add(jnp.asarray(x), jnp.asarray(weights)).value)
    expected = np.linalg.inv(np.linalg.inv(covariance(q)) + (x.T * weights) @ x)
    np.testing.assert_allclose(value @ value.T, expected, rtol=1e-9, atol=1e-12)
    # As one row would, a block leads to NaN where the precision would not be positive definite.
    assert np.any(np.isnan(add(jnp.asarray(x), jnp.asarray(-1e6 * weights)).value))


def test_blocks_add_what_is_below_the_rounding_of_the_factor():
    # A block changes the factor by 1e-9 of itself: a sum without compensation would not move.
    rng = np.random.default_rng(4)
    x = rng.normal(size=(2 * D, D)).astype(np.float32)
    block = Rows(jnp.asarray(x), jnp.full(2 * D, 1e-9, jnp.float32))
    start = full_rank.init(
        FullRank(jnp.zeros(D, jnp.float32), jnp.eye(D, dtype=jnp.float32))
    ).factor

    @jax.jit
    def repeat(total):
        return jax.lax.fori_loop(
            0, 100_000, lambda _, factor: full_rank.add_rows(factor, block), total
        )

    memory = repeat(start)
    value = np.asarray(memory.value, float)
    expected = np.linalg.inv(np.eye(D) + 1e-4 * x.astype(float).T @ x)
    np.testing.assert_allclose(value @ value.T, expected, rtol=1e-6, atol=1e-7)


def test_a_truncated_sum_keeps_its_diagonal_and_the_strongest_directions(x64):
    rng = np.random.default_rng(3)
    columns = rng.normal(size=(D, 4))
    signs = np.array([1.0, 1.0, 1.0, -1.0])
    whole = (columns * signs) @ columns.T
    truncate = jax.jit(rank_updates.truncate, static_argnums=2)
    factor, rest = (np.asarray(leaf) for leaf in truncate(columns, signs, 2))
    values, vectors = np.linalg.eigh(whole)
    np.testing.assert_allclose(
        factor @ factor.T,
        (vectors[:, -2:] * values[-2:]) @ vectors[:, -2:].T,
        atol=1e-9,
    )
    np.testing.assert_allclose(
        np.sum(np.square(factor), axis=1) + rest, np.diag(whole), rtol=1e-10
    )
    # Columns that repeat each other, and none at all.
    twice = np.concatenate([columns[:, :1]] * 3, axis=1)
    factor = np.asarray(truncate(twice, np.ones(3), 2)[0])
    np.testing.assert_allclose(
        factor @ factor.T, 3 * np.outer(columns[:, 0], columns[:, 0]), rtol=1e-10
    )
    assert np.all(np.isfinite(truncate(np.zeros((D, 3)), np.ones(3), 2)[0]))


def test_inflate_adds_to_every_variance(x64):
    q, added = full(9), np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    inflated = family_of(q).inflate(q, jnp.asarray(added))
    np.testing.assert_allclose(
        covariance(inflated), covariance(q) + np.diag(added), rtol=1e-10
    )


def test_the_distribution_of_a_low_rank_precision(x64, key):
    q, other = low(10), low(11)

    @jax.jit
    def results(q, other, key):
        ours = LowRankPrecisionNormal(*q)
        draws = ours.sample(key, (4,))
        kl = (
            dist.kl_divergence(ours, LowRankPrecisionNormal(*other)),
            low_rank.kl(q, other),
        )
        restored = jax.tree.unflatten(*jax.tree.flatten(ours)[::-1])
        matrices = ours.covariance_matrix, ours.precision_matrix
        return (
            draws,
            ours.log_prob(draws),
            restored.log_prob(draws),
            kl,
            matrices,
            ours.variance,
            ours.entropy(),
        )

    draws, log_prob, restored, kl, matrices, variance, entropy = results(q, other, key)
    # SciPy's, sharing nothing with NumPyro.
    theirs = stats.multivariate_normal(np.asarray(q.loc), covariance(q))
    np.testing.assert_allclose(log_prob, theirs.logpdf(draws), rtol=1e-10)
    np.testing.assert_allclose(matrices[0], covariance(q), rtol=1e-10)
    np.testing.assert_allclose(matrices[1], np.linalg.inv(covariance(q)), rtol=1e-10)
    np.testing.assert_allclose(variance, np.diag(covariance(q)), rtol=1e-10)
    np.testing.assert_allclose(entropy, theirs.entropy(), rtol=1e-10)
    np.testing.assert_allclose(*kl, rtol=1e-12)
    np.testing.assert_array_equal(restored, log_prob)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (FullRank(jnp.zeros(2), jnp.eye(3)), "shape"),
        (
            FullRank(jnp.zeros(2), jnp.ones((2, 2))),
            r"lower triangular.*positive diagonal: give its",
        ),
        (FullRank(jnp.zeros(2), -jnp.eye(2)), r"^the factor of a.*positive diagonal"),
        (FullRank(jnp.zeros(2), jnp.eye(2) * jnp.nan), "must be finite"),
        (FullRank(jnp.zeros(()), jnp.eye(1)), "shape"),
        (LowRank(jnp.zeros(2), jnp.ones(3), jnp.zeros((2, 1))), "shape"),
        (
            LowRank(jnp.zeros(2), jnp.ones(2), jnp.zeros((2, 3))),
            r"^prior needs loc of.*k <= d",
        ),
        (
            LowRank(jnp.zeros(2), jnp.zeros(2), jnp.zeros((2, 1))),
            r"must be positive.*and finite, got",
        ),
        (
            LowRank(jnp.zeros(2), jnp.ones(2), jnp.full((2, 1), jnp.inf)),
            "must be finite",
        ),
    ],
)
def test_priors_are_checked(prior, message):
    with pytest.raises(ValueError, match=message):
        family_of(prior).check(prior)


def test_other_posteriors_are_named():
    with pytest.raises(
        TypeError,
        match=r"^a posterior.*must be a MeanField or FullRank or LowRank, got tuple",
    ):
        family_of((1, 2))


def test_functions_keep_float32(make):
    q = make(0, dtype=jnp.float32)
    family = family_of(q)

    def results(q):
        x = jnp.ones((2, D), jnp.float32)
        rows = Rows(x, jnp.ones(2, jnp.float32))
        step, memory = family.natural_step(family.init(q), q, q, x[0], rows, Gain(0.5))
        scale = MeanField(q.loc, family.marginal_scale(q)).scale
        return step, memory, family.kl(q, step), family.predictor_variance(q, x), scale

    leaves = jax.tree.leaves(jax.eval_shape(results, q))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}


def test_every_form_of_a_curvature_gives_the_derivative_in_the_factor(x64):
    """Of E f for f = θ'Hθ/2 + g'θ at a mean of 0, whose derivative in the covariance is H/2."""
    q, rng = full(11)._replace(loc=jnp.zeros(D)), np.random.default_rng(12)
    rows = Rows(
        jnp.asarray(rng.normal(size=(4, D))), jnp.asarray([1.0, -0.3, 0.5, 2.0])
    )
    half, slope = rows.dense(), jnp.asarray(rng.normal(size=D))

    def expected(loc, factor):
        lower = jnp.tril(factor)
        return slope @ loc + loc @ half @ loc + jnp.trace(half @ lower @ lower.T)

    of_loc, of_factor = jax.jit(jax.grad(expected, argnums=(0, 1)))(q.loc, q.factor)
    whitened = Whitened(q.factor, q.factor.T @ half @ q.factor)
    np.testing.assert_allclose(whitened.dense(), half, rtol=1e-10)
    for curvature in (half, rows, whitened, whitened.scaled(1.0)):
        found = family_of(q).gradient(q, slope, curvature)
        np.testing.assert_allclose(found.loc, of_loc, rtol=1e-12)
        np.testing.assert_allclose(found.factor, of_factor, rtol=1e-9, atol=1e-12)
