"""Moments of numbers that follow from a known law of the coordinates: closed forms of SciPy."""

import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import stats

from numpyro_tempered.infer.moments import LocationScale, forget_untamed, moments_of
from numpyro_tempered.select.check.moments import corrected, covariance

# Of a real vector, a positive number, a simplex and a real number: numbers 0-1, 2, 3-5 and 6, coordinates 0-1, 2,
# 3-4 and 5.
SITES = {
    "a": {"fn": dist.Normal(0.0, 1.0).expand([2]).to_event(1), "value": np.zeros(2)},
    "b": {"fn": dist.HalfNormal(1.0), "value": np.zeros(())},
    "c": {"fn": dist.Dirichlet(np.ones(3, np.float32)), "value": np.zeros(3)},
    "d": {"fn": dist.Normal(0.0, 1.0), "value": np.zeros(())},
}
LOC, VARIANCE = (
    np.array([1.0, -2.0, 0.3, 0.0, 0.5, 7.0]),
    np.array([0.5, 4.0, 0.04, 1.0, 1.0, 0.3]),
)
VALUES = np.random.default_rng(0).dirichlet(np.ones(7), 50)


def check_draws(moments, numbers):
    """Of draws of the numbers where nothing else is known."""
    centred = np.square(VALUES - VALUES.mean(axis=0))[:, numbers]
    np.testing.assert_allclose(moments.mean[numbers], VALUES.mean(axis=0)[numbers])
    np.testing.assert_allclose(moments.variance[numbers], centred.mean(axis=0))
    np.testing.assert_allclose(moments.spread[numbers], centred.var(axis=0))
    assert not moments.exact[numbers].any()


def test_moments_of_a_gaussian_are_exact_but_for_those_of_several_coordinates(x64):
    moments = moments_of(LocationScale(LOC, np.diag(VARIANCE)), SITES, VALUES)
    log_normal = stats.lognorm(np.sqrt(0.04), scale=np.exp(0.3))
    mean, variance, _, kurtosis = log_normal.stats("mvsk")
    np.testing.assert_allclose(moments.mean[:3], [1.0, -2.0, mean], rtol=1e-9)
    np.testing.assert_allclose(moments.variance[:3], [0.5, 4.0, variance], rtol=1e-9)
    # Of a Gaussian the square has twice the square of the variance.
    spread = [2 * 0.5**2, 2 * 4.0**2, (kurtosis + 2.0) * variance**2]
    np.testing.assert_allclose(moments.spread[:3], spread, rtol=1e-8)
    assert moments.exact[:3].all()
    check_draws(moments, slice(3, 6))
    assert moments.coordinate.tolist() == [0, 1, -1, -1, -1, -1, 5]
    assert moments.tame.tolist() == [True, True, False, True, True, True, True]
    np.testing.assert_allclose(
        [part[6] for part in moments[:3]], [7.0, 0.3, 2 * 0.3**2]
    )
    np.testing.assert_allclose(moments.sd[:2], [np.sqrt(0.5), 2.0])


def test_covariances_of_draws_have_their_standard_errors_and_those_of_a_law_none():
    of_draws = moments_of(None, SITES, VALUES)
    found, se = covariance(VALUES, of_draws, None)
    centred = VALUES - VALUES.mean(axis=0)
    products = centred[:, :, None] * centred[:, None, :]
    np.testing.assert_allclose(found, products.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(
        se, products.std(axis=0) / np.sqrt(len(VALUES)), rtol=1e-6
    )
    law = LocationScale(LOC, np.diag(VARIANCE) + 0.01)
    found, se = covariance(VALUES, moments_of(law, SITES, VALUES), law)
    coordinates = np.ix_([0, 1, 6], [0, 1, 6])
    np.testing.assert_allclose(
        found[coordinates], law.cov[np.ix_([0, 1, 5], [0, 1, 5])], rtol=1e-6
    )
    assert not se[coordinates].any()
    np.testing.assert_allclose(found[2, 3], products[:, 2, 3].mean())


def test_exponentials_of_heavy_tails_have_no_moments():
    law = LocationScale(LOC, np.diag(VARIANCE), np.full(6, 6.0), False)
    moments = moments_of(law, SITES, VALUES)
    assert np.isnan([part[2] for part in moments[:3]]).all()
    np.testing.assert_allclose(moments.mean[:2], [1.0, -2.0])
    # Kurtosis 6 of six degrees of freedom.
    np.testing.assert_allclose(moments.spread[:2], (6.0 - 1.0) * VARIANCE[:2] ** 2)
    check_draws(moments, slice(3, 6))


def test_what_grows_too_fast_is_not_known(x64):
    moments = moments_of(
        LocationScale(LOC, np.diag([0.5, 4.0, 2500.0, 1.0, 1.0, 0.3])), SITES, VALUES
    )
    assert np.isnan([part[2] for part in moments[:3]]).all()
    assert not moments.exact[2]


def test_what_is_constant_has_no_spread_and_no_error(x64):
    values = np.column_stack([VALUES[:, 0], np.full(len(VALUES), 2.0)])
    sites = {
        "a": {"fn": dist.Normal(0.0, 1.0).expand([2]).to_event(1), "value": np.zeros(2)}
    }
    found = corrected(
        values, np.full(len(values), 1.0 / len(values)), moments_of(None, sites, values)
    )
    np.testing.assert_allclose(found.mean, [VALUES[:, 0].mean(), 2.0])
    np.testing.assert_allclose(found.sd, [VALUES[:, 0].std(), 0.0])
    assert (found.mean_se[1], found.sd_se[1]) == (0.0, 0.0)


def test_without_a_law_all_are_of_draws():
    moments = moments_of(None, SITES, VALUES)
    check_draws(moments, slice(0, 7))
    assert moments.tame.tolist() == [True, True, False, True, True, True, True]
    forget_untamed(moments)
    assert np.isnan(moments.mean).tolist() == [
        False,
        False,
        True,
        False,
        False,
        False,
        False,
    ]
    assert moments.variance[3] == pytest.approx(VALUES[:, 3].var())
