"""Rows of counts against SciPy's multinomial, and what a check of a component refuses before it compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import digamma, gammaln

import numpyro_tempered as nt
from numpyro_tempered.mixtures.components import checking

COUNTS = np.array([[2.0, 0.0, 3.0], [1.0, 1.0, 1.0], [0.0, 4.0, 0.0]])
PROBS = np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])


def test_the_density_of_counts_is_given_their_totals(x64):
    component = nt.mixtures.components.multinomial(3, concentration=[0.5, 1.0, 2.0])

    @jax.jit
    def compute(rows, probs):
        c, w = component.coefficients_at({"probs": probs})
        linear = (
            c[:, None] + w @ component.statistics(rows.T) + component.log_base(rows.T)
        )
        q = component.update(
            component.prior, jnp.ones(2), jnp.array([[1.0, 2.0, 0.0], [5.0, 0.0, 1.0]])
        )
        evidence = component.log_evidence(component.prior, jnp.ones(1), rows[:1])
        return (
            component.distribution({"probs": probs}).log_prob(rows[:, None]),
            linear,
            component.coefficients(q),
            evidence,
        )

    direct, linear, (constant, weights), evidence = compute(COUNTS, PROBS)
    expected = np.array(
        [[stats.multinomial(row.sum(), p).logpmf(row) for p in PROBS] for row in COUNTS]
    )
    np.testing.assert_allclose(direct, expected, rtol=1e-9)
    np.testing.assert_allclose(linear, expected.T, rtol=1e-9)
    a = np.array([[1.5, 3.0, 2.0], [5.5, 1.0, 3.0]])
    np.testing.assert_allclose(
        weights, digamma(a) - digamma(a.sum(axis=1, keepdims=True)), rtol=1e-9
    )
    np.testing.assert_array_equal(constant, np.zeros(2))

    def log_normaliser(a):
        return gammaln(a).sum() - gammaln(a.sum())

    prior = np.array([0.5, 1.0, 2.0])
    np.testing.assert_allclose(
        evidence, log_normaliser(prior + COUNTS[0]) - log_normaliser(prior), rtol=1e-6
    )


def test_draws_of_counts_have_their_total(key):
    component = nt.mixtures.components.multinomial(3, total_count=7)
    fn = component.distribution({"probs": jnp.asarray(PROBS, jnp.float32)})
    draws = np.asarray(jax.jit(lambda key: fn.sample(key, (300,)))(key))
    np.testing.assert_array_equal(draws.sum(axis=-1), 7.0)
    # Standard errors of the mean are up to 1.3 / sqrt(300).
    np.testing.assert_allclose(draws.mean(axis=0), 7.0 * PROBS, atol=0.4)


@pytest.mark.parametrize(
    ("component", "x", "message"),
    [
        (
            nt.mixtures.components.known_variance(2),
            [[0.0, 1.0], [1.0, 1.0]],
            "known_variance: column 1 of the data has",
        ),
        (
            nt.mixtures.components.diagonal_gaussian(1),
            [[2.0], [np.nan], [2.0]],
            "column 0 of the data has no two",
        ),
        # Of a family that completes rows the complete ones are checked.
        (
            nt.mixtures.components.gaussian(2),
            [[0.0, 1.0], [0.0, 2.0], [5.0, np.nan]],
            "column 0 of the complete rows has",
        ),
    ],
)
def test_a_check_needs_two_values_of_each_column(component, x, message, key):
    with pytest.raises(ValueError, match=message):
        nt.mixtures.components.check_component(key, component, x)


def test_a_family_says_whether_all_of_a_row_may_be_missing():
    assert checking._allows_empty_rows(nt.mixtures.components.poisson(2), 2)
    parts = {
        "size": nt.mixtures.components.poisson(1),
        "kinds": nt.mixtures.components.multinomial(2),
    }
    assert not checking._allows_empty_rows(
        nt.mixtures.components.product(parts, {"size": 1, "kinds": 2}), 3
    )


def test_the_worst_of_two_values_is_named():
    compare = checking._compare
    compare(
        "own",
        "one and two",
        (np.ones(2), np.zeros(1)),
        (np.ones(2) + 1e-12, np.zeros(1)),
    )
    with pytest.raises(ValueError, match=r"own: one and two disagree: 3 and 2\.5\."):
        compare("own", "one and two", np.array([1.0, 3.0]), np.array([1.1, 2.5]))
    with pytest.raises(ValueError, match="own: one and two disagree: nan and 7"):
        compare("own", "one and two", np.array([1.0, np.nan]), np.array([9.0, 7.0]))
    with pytest.raises(
        ValueError, match=r"^own: one and two:.*shapes \(2,\) and \(1,\) differ"
    ):
        compare("own", "one and two", np.ones(2), np.ones(1))
