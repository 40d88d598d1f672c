"""Posteriors of two streams, merged."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField
from numpyro_tempered.online import Box

SQUARED, NGVI = nt.expectations.squared(), nt.online.ngvi(0.5)
D = 3


def make_rows(n, seed, one_hot=False):
    rng = np.random.default_rng(seed)
    x = (
        np.eye(D)[rng.integers(D, size=n)] * rng.normal(size=(n, 1))
        if one_hot
        else rng.normal(size=(n, D))
    )
    return x, rng.normal(size=n) * 3


def priors(dtype=None):
    loc = jnp.asarray([0.2, -0.5, 1.0], dtype)
    scale = jnp.asarray([0.7, 1.5, 1.0], dtype)
    return {
        "mean field": MeanField(loc, scale),
        "full rank": FullRank(loc, jnp.diag(scale)),
        "low rank": LowRank(loc, scale**-2, jnp.zeros((D, D), dtype)),
    }


CASES = {
    "ngvi, mean field": (NGVI, "mean field"),
    "ngvi, full rank": (NGVI, "full rank"),
    "ngvi, low rank": pytest.param(NGVI, "low rank", marks=pytest.mark.slow),
    "ewa": (nt.online.ewa(0.5), "full rank"),
}


@pytest.mark.parametrize(("rule", "family"), CASES.values(), ids=CASES)
def test_two_conjugate_streams_merge_to_the_exact_posterior(x64, rule, family):
    # Rows along the axes keep the exact posterior within the mean-field family.
    parts = [make_rows(6, seed, one_hot=family == "mean field") for seed in range(3)]

    def run(state, *numbers):
        for number in numbers:
            state, _ = nt.online.run(rule, SQUARED, state, *parts[number])
        return state

    start = rule.init(priors()[family])
    merged = nt.online.merge(rule, run(start, 0), run(start, 1))
    x, y = (np.concatenate(pair) for pair in zip(*parts[:2], strict=True))
    mean, covariance = oracles.linear_posterior(
        x, y, 1.0, [0.2, -0.5, 1.0], [0.7, 1.5, 1.0]
    )
    q = merged.posterior
    np.testing.assert_allclose(q.loc, mean, rtol=1e-10)
    new = np.array([[1.0, -2.0, 0.5], [0.0, 1.0, 1.0]])
    variance = nt.gaussian.families.family_of(q).predictor_variance(q, jnp.asarray(new))
    np.testing.assert_allclose(
        variance, np.sum(new @ covariance * new, axis=1), rtol=1e-10
    )
    # The merged state goes on as the run over both would.
    np.testing.assert_allclose(
        run(merged, 2).posterior.loc, run(start, 0, 1, 2).posterior.loc, rtol=1e-9
    )
    assert int(merged.count) == 12


@pytest.mark.filterwarnings("ignore::numpyro_tempered.online.StreamWarning")
def test_counts_and_losses_add_up(x64):
    start = NGVI.init(priors()["mean field"])
    (x, y), (z, w) = make_rows(6, 0), make_rows(6, 1)
    y[2] = w[1] = w[3] = np.nan
    (a, losses), (b, others) = (
        nt.online.run(NGVI, SQUARED, start, *rows) for rows in ((x, y), (z, w))
    )
    merged = nt.online.merge(NGVI, a, b)
    assert (int(merged.count), int(merged.rejected), int(merged.floored)) == (9, 3, 0)
    for total, mine, theirs in zip(merged.cumulative, losses, others, strict=True):
        np.testing.assert_allclose(
            total.value, np.nansum(mine) + np.nansum(theirs), rtol=1e-13
        )
    assert jax.tree.structure(merged) == jax.tree.structure(a)
    both = nt.online.merge(NGVI, b, a)
    np.testing.assert_allclose(both.posterior.loc, merged.posterior.loc, rtol=1e-12)
    np.testing.assert_allclose(both.posterior.scale, merged.posterior.scale, rtol=1e-12)


@pytest.mark.full
def test_many_pairs_merge_under_vmap():
    states = [
        nt.online.run(
            NGVI, SQUARED, NGVI.init(priors()["mean field"]), *make_rows(4, seed)
        )[0]
        for seed in range(4)
    ]
    stack = partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    together = jax.vmap(partial(nt.online.merge, NGVI))(
        stack(*states[:2]), stack(*states[2:])
    )
    for i in range(2):
        alone = nt.online.merge(NGVI, states[i], states[i + 2])
        np.testing.assert_allclose(
            together.posterior.loc[i], alone.posterior.loc, rtol=1e-5
        )


REFUSED = {
    "oga": nt.online.oga(0.1),
    "oga_el": nt.online.oga_el(0.1),
    "sva": nt.online.sva(0.1),
    "svb": nt.online.svb(0.1),
    "evidence": nt.online.ngvi(evidence=10.0),
    "power": nt.online.ngvi(forget=nt.online.power(0.9)),
    "random walk": nt.online.ngvi(forget=nt.online.random_walk(0.1)),
    "box": nt.online.ngvi(box=Box(loc=1.0)),
    "standardised": nt.online.standardise(nt.online.ngvi()),
    "clipped": nt.online.clip(nt.online.ngvi(), 2.0),
    "robust": nt.online.robust(nt.online.ngvi(), 2.0),
}


@pytest.mark.parametrize("rule", REFUSED.values(), ids=REFUSED)
def test_rules_without_evidence_do_not_merge(rule):
    state = rule.init(priors()["mean field"])
    with pytest.raises(
        TypeError,
        match=r"holds no evidence that adds up.*ewa, ngvi\(\) and rvga\(\) merge",
    ):
        nt.online.merge(rule, state, state)


def test_merges_are_checked():
    rule = nt.online.ngvi()
    a = rule.init(priors()["mean field"])
    wider = rule.init(MeanField(a.prior.loc, 2 * a.prior.scale))
    longer = rule.init(MeanField(jnp.zeros(4), jnp.ones(4)))
    for b in (wider, longer, rule.init(priors()["full rank"])):
        with pytest.raises(
            ValueError, match=r"^the two runs.*must start from the same prior"
        ):
            nt.online.merge(rule, a, b)
    averaged = nt.online.with_average(rule)
    with pytest.raises(
        TypeError,
        match=r"^the memory of.*holds more than the posterior.*and does not merge",
    ):
        nt.online.merge(averaged, averaged.init(a.prior), averaged.init(a.prior))
    # Two posteriors wider than their prior by more than it holds.
    wide = a._replace(posterior=a.posterior._replace(scale=2 * a.posterior.scale))
    with pytest.raises(
        ValueError,
        match=r"^the precision.*is not positive definite.*losses have negative curvature",
    ):
        nt.online.merge(rule, wide, wide)
