"""Two steps of a stream of a mixture, written out in NumPy: factors, densities and counts."""

import jax
import numpy as np
import pytest
from scipy.special import digamma, gammaln, logsumexp, softmax

import numpyro_tempered as nt
from numpyro_tempered.mixtures.starts import given_responsibilities

ALPHA, PRIOR_LOC, PRIOR_SCALE, CONCENTRATION = 0.5, 1.0, 10.0, 0.75
BATCHES = (
    np.random.default_rng(5).normal(size=(2, 8, 2))
    + 2.0 * (np.arange(8) % 3 > 0)[:, None]
)
WEIGHT = np.linspace(0.5, 2.0, 8)
LABELS = np.arange(8) % 2


def joint(x, factors):
    """log of the responsibilities, before they are normalised."""
    concentration, loc, precision = factors
    distance = np.square(x[:, None, :] - loc).sum(axis=-1) + x.shape[1] / precision
    return (
        digamma(concentration)
        - digamma(concentration.sum())
        - 0.5 * distance
        - np.log(2 * np.pi)
    )


def averages(x, weight, omega):
    """Counts and sums per unit of weight."""
    weighted = omega * weight[:, None] / weight.sum()
    return weighted.sum(axis=0), weighted.T @ x


def factors_of(averages, total):
    counts, sums = (ALPHA * total * each for each in averages)
    precision = PRIOR_SCALE**-2 + counts
    return (
        CONCENTRATION + counts,
        (PRIOR_LOC / PRIOR_SCALE**2 + sums) / precision[:, None],
        precision,
    )


def step(state, x, weight, rate, total, num_inner):
    """The averages after a batch, and its log density before; ``total`` is that before the batch and after it."""
    omega = softmax(joint(x, factors_of(state, total[0])), axis=1)
    log_density = np.average(
        logsumexp(joint(x, factors_of(state, total[0])), axis=1), weights=weight
    )
    for repetition in range(num_inner):
        if repetition:
            omega = softmax(joint(x, factors_of(after, total[1])), axis=1)  # noqa: F821
        new = averages(x, weight, omega)
        after = tuple(
            (1 - rate) * old + rate * each for old, each in zip(state, new, strict=True)
        )
    return after, log_density


def assert_factors(factors, expected):
    concentration, loc, precision = expected
    np.testing.assert_allclose(factors.concentration, concentration, rtol=1e-9)
    np.testing.assert_allclose(factors.posterior.loc, loc, rtol=1e-8)
    np.testing.assert_allclose(
        factors.posterior.scale, np.tile(precision[:, None] ** -0.5, (1, 2)), rtol=1e-9
    )


@pytest.mark.parametrize("kind", ["of all data so far", "of a known number of data"])
def test_each_batch_is_a_step_from_the_factors_before_it(kind, key, x64):
    component = nt.mixtures.components.known_variance(
        2, prior_loc=PRIOR_LOC, prior_scale=PRIOR_SCALE
    )
    options = {"num_components": 2, "alpha": ALPHA, "concentration": CONCENTRATION}
    options["init"] = given_responsibilities(LABELS)
    if kind == "of all data so far":
        # Behind the first batch, which has weights, a second without.
        rule = nt.mixtures.stochastic(component, centre=[2.0, -7.0], **options)
        num_inner, rates = 1, (1.0, 8.0 / (8.0 + WEIGHT.sum()))
        totals = ((WEIGHT.sum(), WEIGHT.sum()), (WEIGHT.sum(), WEIGHT.sum() + 8.0))
    else:
        rule = nt.mixtures.stochastic(
            component,
            step_size=nt.mixtures.robbins_monro(0.7, 2.0),
            total=1000.0,
            num_inner=3,
            **options,
        )
        num_inner, rates, totals = (
            3,
            (3.0**-0.7, 4.0**-0.7),
            ((1000.0, 1000.0), (1000.0, 1000.0)),
        )

    @jax.jit
    def run(key, one, two, weight):
        start = rule.init(key, one, weight)
        first, density = rule.update(start, one, weight)
        second, last = rule.update(first, two)
        held_out = rule.log_density(second, one, weight)
        others = [
            rule.update(second, batch, weight)[0]
            for batch, weight in ((one, 0.0 * weight), (two / 0.0, weight))
        ]
        return (
            rule.factors(first),
            rule.factors(second),
            second,
            others,
            (density, last, held_out),
        )

    *factors, state, others, densities = run(key, *BATCHES, WEIGHT)
    after = averages(BATCHES[0], WEIGHT, np.eye(2)[LABELS])
    expected = []
    for k, weight in enumerate((WEIGHT, np.ones(8))):
        after, density = step(after, BATCHES[k], weight, rates[k], totals[k], num_inner)
        expected.append(density)
        assert_factors(factors[k], factors_of(after, totals[k][1]))
    last = joint(BATCHES[0], factors_of(after, totals[1][1]))
    expected.append(np.average(logsumexp(last, axis=1), weights=WEIGHT))
    np.testing.assert_allclose(densities, expected, rtol=1e-9)
    assert (int(state.num_steps), int(state.rejected)) == (2, 0)
    # A batch without a row, and one that is not finite, leave what there is; the second is counted.
    for other, rejected in zip(others, (0, 1), strict=True):
        assert int(other.rejected) == rejected
        jax.tree.map(
            np.testing.assert_array_equal,
            other._replace(rejected=state.rejected),
            state,
        )
    np.testing.assert_allclose(state.total_weight.value, WEIGHT.sum() + 8.0, rtol=1e-12)


def test_a_step_of_size_one_on_all_rows_of_all_chunks_is_an_iteration(key, x64):
    component = nt.mixtures.components.known_variance(
        2, prior_loc=PRIOR_LOC, prior_scale=PRIOR_SCALE
    )
    x = np.concatenate(BATCHES)
    labels = np.arange(16) % 2
    options = {
        "num_components": 2,
        "alpha": ALPHA,
        "concentration": CONCENTRATION,
        "num_draws": 2,
    }
    fit = nt.mixtures.fit_stochastic(
        key,
        list(BATCHES),
        component,
        step_size=1.0,
        batch_size=16,
        num_passes=2,
        num_restarts=1,
        init=given_responsibilities(labels),
        **options,
    )
    after = averages(x, np.ones(16), np.eye(2)[labels])
    for _ in range(2):
        after, _ = step(after, x, np.ones(16), 1.0, (16.0, 16.0), 1)
    concentration, loc, precision = factors_of(after, 16.0)
    np.testing.assert_allclose(fit.factors.concentration, concentration, rtol=1e-9)
    np.testing.assert_allclose(fit.posterior.loc, loc, rtol=1e-8)
    np.testing.assert_allclose(fit.posterior.scale[:, 0], precision**-0.5, rtol=1e-9)
    # F is the sum of the logarithms less the divergences of Dirichlet and normal factors.
    prior = np.full(2, CONCENTRATION)
    kl = (
        gammaln(concentration.sum())
        - gammaln(concentration).sum()
        - gammaln(prior.sum())
        + gammaln(prior).sum()
    )
    kl += (concentration - prior) @ (
        digamma(concentration) - digamma(concentration.sum())
    )
    squares = (1 / precision + np.square(loc - PRIOR_LOC).T) / PRIOR_SCALE**2
    kl += 0.5 * np.sum(squares - 1 + np.log(precision * PRIOR_SCALE**2))
    expected = (
        ALPHA * logsumexp(joint(x, (concentration, loc, precision)), axis=1).sum() - kl
    )
    np.testing.assert_allclose(
        [fit.objective, *fit.trace, *fit.restart_objectives],
        np.full(3, expected),
        rtol=1e-9,
    )
    assert (fit.converged, fit.num_iter, fit.total, len(fit.restart_objectives)) == (
        False,
        2,
        16.0,
        1,
    )
