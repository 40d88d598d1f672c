"""Fits of data that have little to tell: a right answer or a clear error, never NaN."""

import warnings

import jax
import numpy as np
import pytest
from mixture_families import FAMILIES, component_of, some_data

from numpyro_tempered.mixtures.components.diagonal_gaussian import diagonal_gaussian
from numpyro_tempered.mixtures.components.gaussian import gaussian
from numpyro_tempered.mixtures.components.known_variance import known_variance
from numpyro_tempered.mixtures.components.scaling import scaled_to
from numpyro_tempered.mixtures.coordinate_ascent import fit
from numpyro_tempered.mixtures.starts import (
    given_responsibilities,
    random_responsibilities,
)

# One shape for all, compiled once a component.
OPTIONS = {"num_components": 3, "num_restarts": 2, "num_draws": 2, "max_iter": 3000}
RAW = some_data("gaussian")
CASES = {
    "as it is": RAW,
    "duplicates": np.repeat(RAW[:1], len(RAW), axis=0),
    "two distinct rows": np.repeat(RAW[:2], len(RAW) // 2, axis=0),
    "a constant column": RAW * [1.0, 0.0],
    "far away": RAW + 1e8,
    "a tiny scale": 1e-20 * RAW,
    "a large scale": 1e12 * RAW,
}
COMPONENTS = {
    "diagonal_gaussian": lambda: diagonal_gaussian(2),
    "gaussian": lambda: gaussian(2),
}


def numbers(result):
    """All of a fit."""
    arrays = jax.tree.leaves(
        (
            result.factors,
            result.posterior,
            result.counts,
            result.trace,
            result.restart_objectives,
        )
    )
    return np.concatenate(
        [np.ravel(a) for a in [*arrays, result.objective, *result.bound]]
    )


# So far from its prior, or so much wider, that single precision hardly holds the matrix: a restart may fail, or
# end where double precision would go on, which is said; where all fail the fit is refused.
TOO_FAR = {("gaussian", "far away"), ("gaussian", "a large scale")}


@pytest.mark.full
@pytest.mark.parametrize("family", COMPONENTS)
def test_data_without_a_spread_and_of_any_scale_are_fitted_without_nan(family, key):
    for case, x in CASES.items():
        if (family, case) in TOO_FAR:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message=".* of 2 restarts did not keep a finite objective"
                )
                warnings.filterwarnings(
                    "ignore",
                    message=".* a step in double precision raises its objective",
                )
                try:
                    result = fit(key, x, COMPONENTS[family](), alpha=0.5, **OPTIONS)
                except FloatingPointError:
                    continue
            best = result._replace(restart_objectives=result.restart_objectives.max())
            assert np.isfinite(numbers(best)).all(), case
            continue
        result = fit(key, x, COMPONENTS[family](), alpha=0.5, **OPTIONS)
        assert np.isfinite(numbers(result)).all(), case
        assert result.converged, case
        np.testing.assert_allclose(result.counts.sum(), len(x), rtol=1e-5)


@pytest.mark.full
def test_the_place_of_the_data_does_not_matter_where_the_prior_goes_along(key):
    one, other = (
        fit(
            key, x, diagonal_gaussian(2, **scaled_to(x)), alpha=0.5, **OPTIONS
        ).objective
        for x in (RAW, RAW + 4096)
    )
    # The prior's mean is held in single precision: 4096 to 2e-4.
    np.testing.assert_allclose(one, other, rtol=1e-4)


@pytest.mark.full
def test_scales_beyond_single_precision_are_refused(key):
    with pytest.raises((FloatingPointError, ValueError)):
        fit(key, 1e30 * RAW, diagonal_gaussian(2), alpha=0.5, **OPTIONS)


@pytest.mark.full
def test_one_row_is_shared_by_more_components(key):
    result = fit(key, RAW[:1], diagonal_gaussian(2), alpha=0.5, **OPTIONS)
    assert np.isfinite(numbers(result)).all()
    np.testing.assert_allclose(result.counts.sum(), 1, rtol=1e-6)


@pytest.mark.full
def test_an_empty_component_stays_at_its_prior(key):
    """Its responsibilities vanish with the digamma of a small concentration."""
    start = given_responsibilities(np.zeros(len(RAW), int))
    component = diagonal_gaussian(2, rate=0.01)
    result = fit(key, 1e-3 * RAW, component, concentration=1e-3, init=start, **OPTIONS)
    assert result.num_occupied == 1
    np.testing.assert_allclose(result.posterior.rate[1:], 0.01, rtol=1e-5)


BAD = [
    ({"alpha": 0.0}, "alpha must be positive and finite, got 0.0"),
    ({"alpha": -1.0}, "alpha must be positive and finite, got -1.0"),
    ({"alpha": np.nan}, "alpha must be positive and finite, got nan"),
    ({"sample_weight": -np.ones(12)}, "sample_weight must be finite and not negative"),
    (
        {"sample_weight": np.ones(3)},
        r"sample_weight has shape \(3,\); expected \(12,\).*weight for each row",
    ),
    (
        {"sample_weight": np.zeros(12)},
        r"no row has both a positive weight.*and an observed entry",
    ),
    ({"num_components": 0}, "num_components must be an integer of at least 1, got 0"),
    ({"concentration": 0.0}, r"concentration must be positive.*and finite, got"),
    ({"tolerance": -1.0}, "tolerance must be at least 0 and finite, got -1.0"),
    ({"max_iter": 0}, "max_iter must be an integer of at least 1, got 0"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_options_out_of_range_are_refused(options, message, key):
    with pytest.raises(ValueError, match=message):
        fit(key, RAW, diagonal_gaussian(2), **(OPTIONS | options))


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if not FAMILIES[name].missing]
)
def test_missing_entries_are_refused_where_they_are_not_marginalised(name, key):
    x = some_data(name)
    x[3, 1] = np.nan
    with pytest.raises(ValueError, match=f"{name}: column 1 has missing entries"):
        fit(key, x, component_of(name), **OPTIONS)


@pytest.mark.full
def test_a_wrong_divergence_makes_the_objective_fall_and_is_refused(key):
    """The components part, away from their common prior, and what is charged for this is too much."""
    right = known_variance(2, prior_scale=0.5)
    wrong = right._replace(kl=lambda q, p: 20.0 * right.kl(q, p))
    with pytest.raises(
        RuntimeError,
        match="update, coefficients and kl of the component 'known_variance'",
    ):
        fit(key, RAW, wrong, init=random_responsibilities(), **OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_float32_finds_what_float64_finds(name, key, x64):
    """The objective is evaluated in double precision at both optima, from one start."""
    x = some_data(name)
    start = given_responsibilities(
        np.random.default_rng(0).dirichlet(np.ones(3), size=len(x))
    )
    values = [
        fit(
            key, x.astype(dtype), component_of(name), init=start, alpha=0.5, **OPTIONS
        ).objective
        for dtype in (np.float32, np.float64)
    ]
    np.testing.assert_allclose(values[0], values[1], rtol=1e-4)


@pytest.mark.full
def test_whole_numbers_far_from_zero_keep_their_digits():
    rng = np.random.default_rng(0)
    x = (
        np.concatenate([rng.integers(0, 10, 40), rng.integers(60, 70, 40)])
        + 1_700_000_000
    )
    component = known_variance(
        1, prior_loc=float(x.mean()), prior_scale=1000.0, scale=3.0
    )
    options = {"num_components": 2, "num_restarts": 2, "num_draws": 0}
    of_integers = fit(jax.random.key(0), x, component, **options)
    of_floats = fit(jax.random.key(0), x.astype(float), component, **options)
    np.testing.assert_array_equal(of_integers.counts, of_floats.counts)
    np.testing.assert_allclose(np.sort(of_integers.counts), [40.0, 40.0], atol=1e-3)
    assert of_integers.objective == of_floats.objective


@pytest.mark.full
def test_a_large_alpha_is_not_taken_for_an_error_of_the_component():
    x = np.random.default_rng(0).normal(size=(50, 1))
    component = known_variance(1)
    fitted = fit(
        jax.random.key(0),
        x,
        component,
        num_components=2,
        alpha=1e8,
        num_restarts=2,
        num_draws=0,
        tolerance=1.0,
    )
    assert np.isfinite(fitted.objective)


def test_a_start_is_a_value():
    with pytest.raises(TypeError, match=r"init is a ndarray.*a value such as"):
        fit(
            jax.random.key(0),
            np.zeros((4, 1)),
            known_variance(1),
            num_components=2,
            init=np.zeros(4, int),
        )


@pytest.mark.parametrize("alpha", ["0.5", True, None])
def test_alpha_is_a_number(alpha):
    with pytest.raises(TypeError, match="alpha must be a number"):
        fit(
            jax.random.key(0),
            np.zeros((4, 1)),
            known_variance(1),
            num_components=1,
            alpha=alpha,
        )


@pytest.mark.full
def test_a_bridge_warns_where_it_loses_digits_of_the_fit():
    x = np.random.default_rng(0).normal(size=(20, 1)) + 1e6
    component = known_variance(1, prior_loc=1e6)
    fitted = fit(
        jax.random.key(0), x, component, num_components=1, num_restarts=1, num_draws=2
    )
    with pytest.warns(UserWarning, match="column 0 of the data is so far from 0"):
        fitted.on(x)
