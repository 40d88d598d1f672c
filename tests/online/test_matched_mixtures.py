"""The Gaussian that stands for weighted experts, and what switching between them adds to a bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_tempered as nt
from numpyro_tempered.online.experts.state import match

LOC = np.array([[1.0, 2.0], [-1.0, 0.5], [np.inf, 1e30]])
ROOTS = np.array(
    [[[1.0, 0.0], [0.5, 2.0]], [[0.3, 0.0], [-0.4, 0.6]], [[np.inf, 0.0], [0.0, 1.0]]]
)


@pytest.mark.parametrize(
    "family", [nt.gaussian.families.FullRank, nt.gaussian.families.MeanField]
)
def test_it_has_the_moments_of_the_mixture(family, x64):
    """An expert without weight may have overflown."""
    is_full = family is nt.gaussian.families.FullRank
    roots = ROOTS if is_full else np.diagonal(ROOTS, axis1=1, axis2=2)
    weights = np.array([0.3, 0.7, 0.0])
    q = jax.jit(match)(weights, family(jnp.asarray(LOC), jnp.asarray(roots)))
    mean = weights[:2] @ LOC[:2]
    dense = [root if is_full else np.diag(root) for root in roots[:2]]
    cov = sum(
        w * (r @ r.T + np.outer(m - mean, m - mean))
        for w, r, m in zip(weights, dense, LOC, strict=False)
    )
    np.testing.assert_allclose(q.loc, mean)
    expected = np.linalg.cholesky(cov) if is_full else np.sqrt(np.diag(cov))
    np.testing.assert_allclose(q[1], expected, rtol=1e-9)


def test_points_have_no_spread(x64):
    q = jax.jit(match)(
        np.array([0.3, 0.7, 0.0]),
        nt.gaussian.families.FullRank(np.ones((3, 2)), np.zeros((3, 2, 2))),
    )
    np.testing.assert_array_equal(q[1], np.zeros((2, 2)))


@pytest.mark.full
def test_each_switch_costs_the_logarithms_of_the_experts_and_the_share():
    rule = nt.online.aggregate(
        nt.online.grid(nt.online.svb, step_size=[0.1, 0.5, 1.0]), share=0.01
    )
    state = jax.jit(rule.init)(
        nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
    )
    memory = state.memory._replace(rate=jnp.float32(2.0))
    state = state._replace(memory=memory, count=jnp.int32(11))
    for switches in (0, 1, 3):
        cost = (
            np.log(3)
            - (10 - switches) * np.log1p(-0.01)
            + switches * (np.log(3) - np.log(0.01))
        )
        found = nt.online.regret_bound(state, num_switches=switches)
        assert float(found) == pytest.approx(cost / 2.0, rel=1e-5)
