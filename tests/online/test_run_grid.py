"""A sweep gives the numbers of each rule by itself, whatever the number that runs side by side."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import enable_x64

import numpyro_tempered as nt
from numpyro_tempered.online.experts import sweep

HINGE = nt.expectations.hinge()
GRID = nt.online.grid(
    nt.online.ngvi, step_size=[0.1, 0.5, 1.0], prior_scale=[0.5, 2.0], alpha=0.5
)


def rows(num_rounds, d=2):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(num_rounds, d))
    return x, np.sign(x @ np.linspace(1.0, -1.0, d) + 0.5 * rng.normal(size=num_rounds))


def alone(grid, k, expectation, prior, x, y, mask=None):
    """The run of one rule, its prior and the power of its likelihood written out."""
    values = grid.values(k)
    wide = prior._replace(
        **{
            name: values["prior_scale"] * getattr(prior, name)
            for name in prior._fields[1:]
        }
    )
    rule = grid.rule(values)
    return nt.online.run(
        rule, tempered(expectation, values["alpha"]), rule.init(wide), x, y, mask=mask
    )


@functools.cache
def tempered(expectation, alpha):
    """Gradients times alpha, losses as they are."""

    def evaluate(q, x, y, **options):
        at = expectation.evaluate(q, x, y, **options)
        scaled = jax.tree.map(lambda leaf: alpha * leaf, at.grad_loc)
        return at._replace(
            grad_loc=scaled,
            grad_var=jax.tree.map(lambda leaf: alpha * leaf, at.grad_var),
        )

    return expectation._replace(evaluate=evaluate, predictors=None)


@pytest.mark.parametrize(
    "most",
    [8, *(pytest.param(most, marks=pytest.mark.full) for most in (1, 10**6))],
    ids=["some", "one", "all"],
)
def test_each_rule_runs_as_by_itself(most, monkeypatch):
    # One, two or all of them side by side; five rules divide by neither.
    monkeypatch.setattr(sweep, "MOST_NUMBERS", most)
    grid = nt.online.grid(nt.online.sva, step_size=[0.1, 0.2, 0.5, 1.0, 2.0], alpha=0.5)
    x, y = rows(30)
    mask = np.arange(30) % 7 != 3
    with enable_x64():
        prior = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
        states, losses = nt.online.run_grid(grid, HINGE, prior, x, y, mask=mask)
        for k in range(5):
            state, own = alone(grid, k, HINGE, prior, x, y, mask)
            np.testing.assert_allclose(
                losses.at_mean[k], own.at_mean, rtol=1e-12, atol=1e-14
            )
            np.testing.assert_allclose(
                states.posterior.loc[k], state.posterior.loc, rtol=1e-12, atol=1e-14
            )
            np.testing.assert_allclose(
                states.posterior.scale[k], state.posterior.scale, rtol=1e-12
            )
        assert states.count.tolist() == 5 * [int(mask.sum())]


def test_priors_and_full_covariances_in_a_sweep():
    prior = nt.gaussian.families.FullRank(jnp.zeros(2), jnp.eye(2))
    x, y = rows(12)
    grid = nt.online.grid(nt.online.ngvi, step_size=1.0, prior_scale=[0.5, 4.0])
    states, losses = nt.online.run_grid(grid, nt.expectations.squared(), prior, x, y)
    for k, scale in enumerate([0.5, 4.0]):
        # The loss is (y - u)².
        precision = np.eye(2) / scale**2 + 2.0 * x.T @ x
        factor = np.asarray(states.posterior.factor[k], float)
        np.testing.assert_allclose(
            factor @ factor.T, np.linalg.inv(precision), rtol=2e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            states.posterior.loc[k],
            np.linalg.solve(precision, 2.0 * x.T @ y),
            rtol=2e-5,
        )
    assert losses.at_mean.shape == (2, 12)


def test_a_sweep_goes_on_from_its_states():
    prior = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
    x, y = rows(40)
    whole, _ = nt.online.run_grid(GRID, HINGE, prior, x, y)
    half, _ = nt.online.run_grid(GRID, HINGE, prior, x[:20], y[:20])
    both, _ = nt.online.run_grid(GRID, HINGE, half, x[20:], y[20:])
    for a, b in zip(
        jax.tree.leaves(whole.posterior), jax.tree.leaves(both.posterior), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_the_best_rule_of_a_sweep_is_watched():
    prior = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
    grid = nt.online.grid(nt.online.ngvi, step_size=[0.5, 1.0])
    x, y = rows(40)
    x[3, 0] = np.nan
    with pytest.warns(
        nt.online.StreamWarning,
        match=r"Of the grid, ngvi.*1 of 40 rounds were rejected.*too large",
    ):
        states, _ = nt.online.run_grid(grid, HINGE, prior, x, y)
    assert states.rejected.tolist() == [1, 1]


def test_wrong_calls_of_a_sweep():
    prior = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
    x, y = rows(10)
    with pytest.raises(TypeError, match=r"grid must be.*a Rule of length"):
        nt.online.run_grid(nt.online.ngvi(), HINGE, prior, x, y)
    with pytest.raises(
        ValueError,
        match=r"^the states.*of 6 rules, got leading axes.*the prior to begin",
    ):
        nt.online.run_grid(GRID, HINGE, nt.online.ngvi().init(prior), x, y)
    with pytest.raises(ValueError, match=r"mask must have shape.*for batches, got"):
        nt.online.run_grid(GRID, HINGE, prior, x, y, mask=np.array(True))


def low_rank():
    return nt.gaussian.families.LowRank(jnp.zeros(2), jnp.ones(2), jnp.zeros((2, 1)))


@pytest.mark.full
def test_low_rank_covariances_in_a_sweep():
    prior = low_rank()
    x, y = rows(6)
    grid = nt.online.grid(nt.online.ngvi, step_size=[0.5])
    states, _ = nt.online.run_grid(grid, HINGE, prior, x, y)
    state, _ = nt.online.run(
        nt.online.ngvi(0.5), HINGE, nt.online.ngvi(0.5).init(prior), x, y
    )
    np.testing.assert_allclose(
        states.posterior.loc[0], state.posterior.loc, rtol=1e-5, atol=1e-6
    )


def test_low_rank_covariances_have_no_other_prior_scale():
    with pytest.raises(
        TypeError,
        match=r"LowRank does not hold every covariance.*MeanField or FullRank",
    ):
        nt.online.run_grid(
            nt.online.grid(nt.online.ngvi, prior_scale=[0.5]),
            HINGE,
            low_rank(),
            *rows(6),
        )
