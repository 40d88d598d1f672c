"""Rényi divergences against integrals and sums, and the inequalities between them."""

import math
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from certificate_oracles import (
    divergence_by_quadrature,
    divergence_of_discrete,
    divergence_of_gaussians_on_a_grid,
    squared_hellinger,
    total_variation,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import norm

import numpyro_tempered as nt
from numpyro_tempered import bounds

ORDERS = (0.1, 0.5, 0.9, 1.0, 1.3, 2.0)
NUMBER = st.floats(-3.0, 3.0)
SCALE = st.floats(0.2, 4.0)
ORDER = st.floats(0.05, 0.95)
PAIR = st.tuples(NUMBER, SCALE, NUMBER, SCALE)


def probabilities(draws):
    """Probability vectors from positive numbers."""
    array = np.asarray(draws)
    return array / array.sum()


DISCRETE = st.lists(st.floats(1e-3, 1.0), min_size=4, max_size=4).map(probabilities)


def random_gaussians(rng, d, *batch):
    """Means ``(*batch, d)`` and covariances."""
    root = rng.normal(size=(*batch, d, d))
    return rng.normal(size=(*batch, d)), root @ np.swapaxes(
        root, -1, -2
    ) + 0.5 * np.eye(d)


# Gaussians.


@pytest.mark.parametrize("order", ORDERS)
def test_normal_is_the_integral(order):
    m0, s0, m1, s1 = 0.4, 1.1, -0.5, 0.9
    breaks = [-25.0, -3.0, 0.0, 3.0, 25.0]
    exact = divergence_by_quadrature(order, norm(m0, s0).pdf, norm(m1, s1).pdf, breaks)
    np.testing.assert_allclose(
        bounds.renyi_normal(order, m0, s0, m1, s1), exact, rtol=1e-10
    )


@pytest.mark.parametrize("order", ORDERS)
def test_gaussian_is_the_integral(order):
    m0, m1 = np.array([0.3, -0.2]), np.array([-0.5, 0.4])
    s0, s1 = np.array([[1.1, 0.3], [0.3, 0.8]]), np.array([[1.3, -0.2], [-0.2, 1.0]])
    exact = divergence_of_gaussians_on_a_grid(order, m0, s0, m1, s1)
    np.testing.assert_allclose(
        bounds.renyi_gaussian(order, m0, s0, m1, s1), exact, rtol=1e-10
    )


@pytest.mark.parametrize("order", [0.2, 0.5, 1.7])
def test_gaussian_is_the_printed_formula(order):
    rng = np.random.default_rng(0)
    m0, s0 = random_gaussians(rng, 4)
    m1, s1 = random_gaussians(rng, 4)
    # For an order above 1 the mixed covariance must be positive definite.
    s1 = s1 + 8.0 * s0
    mixed = (1 - order) * s0 + order * s1
    logdets = [np.linalg.slogdet(s)[1] for s in (mixed, s0, s1)]
    exact = 0.5 * order * (m0 - m1) @ np.linalg.solve(mixed, m0 - m1) - (
        logdets[0] - (1 - order) * logdets[1] - order * logdets[2]
    ) / (2 * (order - 1))
    np.testing.assert_allclose(
        bounds.renyi_gaussian(order, m0, s0, m1, s1), exact, rtol=1e-11
    )


@pytest.mark.parametrize("order", [0.5, 1.0, 3.0])
def test_gaussian_of_diagonal_covariances_is_the_sum_of_normals(order):
    rng = np.random.default_rng(1)
    m0, m1 = rng.normal(size=(2, 5, 3))
    s0, s1 = rng.uniform(0.5, 1.2, size=(2, 5, 3))
    found = bounds.renyi_gaussian(
        order, m0, s0[..., None] ** 2 * np.eye(3), m1, s1[..., None] ** 2 * np.eye(3)
    )
    by_coordinate = bounds.renyi_normal(order, m0, s0, m1, s1)
    assert found.shape == (5,)
    np.testing.assert_allclose(found, by_coordinate.sum(-1), rtol=1e-11)
    assert np.isinf(by_coordinate).any() == (order == 3.0)


def test_batches_broadcast():
    rng = np.random.default_rng(2)
    m0, s0 = random_gaussians(rng, 3, 6, 1)
    m1, s1 = random_gaussians(rng, 3, 4)
    found = bounds.renyi_gaussian(0.5, m0, s0, m1, s1)
    assert found.shape == (6, 4)
    np.testing.assert_allclose(
        found[5, 2],
        bounds.renyi_gaussian(0.5, m0[5, 0], s0[5, 0], m1[2], s1[2]),
        rtol=1e-12,
    )


def test_the_limit_at_order_1_is_kl():
    rng = np.random.default_rng(3)
    m0, s0 = random_gaussians(rng, 3)
    m1, s1 = random_gaussians(rng, 3)
    d = m1 - m0
    kl = 0.5 * (
        np.trace(np.linalg.solve(s1, s0))
        + d @ np.linalg.solve(s1, d)
        - 3
        + np.linalg.slogdet(s1)[1]
        - np.linalg.slogdet(s0)[1]
    )
    np.testing.assert_allclose(
        bounds.renyi_gaussian(1.0, m0, s0, m1, s1), kl, rtol=1e-12
    )
    # The derivative in the order is bounded: no cancellation may show at 1e-12 from 1.
    for order in (1 - 1e-12, 1 + 1e-12):
        np.testing.assert_allclose(
            bounds.renyi_gaussian(order, m0, s0, m1, s1), kl, rtol=1e-10
        )


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0])
def test_close_gaussians_keep_their_digits(order):
    # D_a is a (shift² + 2 log(ratio)²) / 2 to second order.
    shift, widen = 1e-7, 1e-7
    found = bounds.renyi_normal(order, shift, 1.0 + widen, 0.0, 1.0)
    np.testing.assert_allclose(
        found, 0.5 * order * (shift**2 + 2 * widen**2), rtol=1e-5
    )
    cov = (1.0 + widen) ** 2 * np.eye(2)
    in_plane = bounds.renyi_gaussian(order, [shift, 0.0], cov, [0.0, 0.0], np.eye(2))
    np.testing.assert_allclose(
        in_plane, 0.5 * order * (shift**2 + 4 * widen**2), rtol=1e-5
    )
    assert bounds.renyi_normal(order, 0.3, 2.0, 0.3, 2.0) == 0.0


@pytest.mark.parametrize(("order", "sd"), [(1e-9, 1e-8), (1e9, math.sqrt(1.0 - 1e-12))])
def test_orders_far_from_1_keep_their_digits(order, sd):
    a, shift = Decimal(order), Decimal(1)
    variance = Decimal(sd) ** 2
    mixed = a + (1 - a) * variance
    exact = (a * shift**2 / mixed + mixed.ln() / (1 - a) - variance.ln()) / 2
    np.testing.assert_allclose(
        bounds.renyi_normal(order, 1.0, sd, 0.0, 1.0), float(exact), rtol=1e-11
    )


def test_orders_above_1_are_infinite_where_the_tails_are():
    # 2 S1 - S0 <= 0.
    assert bounds.renyi_normal(2.0, 0.0, 1.5, 0.0, 1.0) == math.inf
    assert bounds.renyi_normal(2.0, 0.0, math.sqrt(2.0), 0.0, 1.0) > 15.0
    found = bounds.renyi_gaussian(
        2.0, np.zeros((2, 2)), [np.diag([1.0, 2.1]), np.eye(2)], [1.0, 0.0], np.eye(2)
    )
    np.testing.assert_allclose(found, [math.inf, 1.0])


def test_ill_conditioned_covariances():
    # Narrow in turned directions: the eigenvalues of the one relative to the other span 1e16.
    turn = np.array([[math.cos(0.3), -math.sin(0.3)], [math.sin(0.3), math.cos(0.3)]])
    s0, s1 = (turn @ np.diag(scales) @ turn.T for scales in ([1e-8, 1.0], [1.0, 1e-8]))
    found = bounds.renyi_gaussian(0.5, np.zeros(2), s0, np.zeros(2), s1)
    one = -np.log(2 * 1e-4 / (1 + 1e-8)) / 1.0
    np.testing.assert_allclose(found, one * 2, rtol=1e-6)


@settings(deadline=None, max_examples=60)
@given(ORDER, PAIR)
def test_skew_symmetry(order, pair):
    m0, s0, m1, s1 = pair
    forward = bounds.renyi_normal(order, m0, s0, m1, s1)
    back = bounds.renyi_normal(1 - order, m1, s1, m0, s0)
    np.testing.assert_allclose(
        (1 - order) * forward, order * back, rtol=1e-8, atol=1e-15
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.0, 1.0, 0.0, 1.0), "order .* positive and finite"),
        ((math.inf, 0.0, 1.0, 0.0, 1.0), "order"),
        ((math.nan, 0.0, 1.0, 0.0, 1.0), "order"),
        ((0.5, math.nan, 1.0, 0.0, 1.0), "loc0 must be finite"),
        ((0.5, 0.0, 0.0, 0.0, 1.0), r"scale0 must be positive.*and finite, got"),
        ((0.5, 0.0, 1.0, 0.0, -1.0), r"scale1 must be positive.*and finite, got"),
        ((0.5, [], 1.0, 0.0, 1.0), "loc0 must be finite and not empty"),
        (
            (0.5, 0.0, 1e200, 0.0, 1e-200),
            r"^the two.*too far apart.*precision: rescale the variable",
        ),
    ],
)
def test_normal_refuses(arguments, message):
    with pytest.raises(ValueError, match=message), np.errstate(over="ignore"):
        bounds.renyi_normal(*arguments)


@pytest.mark.parametrize(
    ("cov", "message"),
    [
        (np.array([[1.0, 0.5], [0.0, 1.0]]), "not symmetric"),
        (
            np.array([[1.0, 2.0], [2.0, 1.0]]),
            r"not positive definite.*far from every other",
        ),
        (np.zeros((2, 2)), r"not positive definite.*far from every other"),
        (np.eye(3), r"^the Gaussians have means.*shapes \(2,\) and \(2,\).*with one d"),
        (np.ones(2), r"\(\.\.\., d, d\), got \(2,\); renyi_normal.*takes scales"),
        (np.full((2, 2), np.nan), "cov0 must be finite"),
    ],
)
def test_gaussian_refuses(cov, message):
    with pytest.raises(ValueError, match=message):
        bounds.renyi_gaussian(0.5, np.zeros(2), cov, np.zeros(2), np.eye(2))


# Exponential families.


def normal_partition(eta):
    return -jnp.square(eta[0]) / (4 * eta[1]) - 0.5 * jnp.log(-2 * eta[1])


def natural(m, s):
    return np.stack([m / s**2, -0.5 / s**2], axis=-1)


def gamma_partition(eta):
    """Of Gamma(a, b) with eta = (a - 1, -b)."""
    inside = (eta[0] > -1) & (eta[1] < 0)
    value = jax.scipy.special.gammaln(eta[0] + 1) - (eta[0] + 1) * jnp.log(-eta[1])
    return jnp.where(inside, value, jnp.inf)


@pytest.mark.parametrize("order", ORDERS)
def test_exponential_family_of_normals(order):
    rng = np.random.default_rng(4)
    m0, m1 = rng.normal(size=(2, 3))
    s0, s1 = rng.uniform(0.8, 1.2, size=(2, 3))
    found = bounds.renyi_exponential_family(
        order, normal_partition, natural(m0, s0), natural(m1, s1)
    )
    exact = bounds.renyi_normal(order, m0, s0, m1, s1)
    assert np.all(np.isfinite(exact))
    # In double precision whatever jax's default is.
    np.testing.assert_allclose(found, exact, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("order", [0.5, 1.0])
def test_exponential_family_of_poissons_is_the_sum(order):
    from scipy.stats import poisson

    rates, points = np.array([2.0, 3.5]), np.arange(200)
    p, r = (poisson(rate).pmf(points) for rate in rates)
    terms = p * (np.log(rates[0] / rates[1]) * points + rates[1] - rates[0])
    exact = terms.sum() if order == 1.0 else -2 * np.log(np.sum(np.sqrt(p * r)))
    found = bounds.renyi_exponential_family(
        order, lambda eta: jnp.exp(eta[0]), np.log(rates[:1]), np.log(rates[1:])
    )
    np.testing.assert_allclose(found, exact, rtol=1e-10)


def test_exponential_family_is_infinite_outside_of_the_domain():
    # Of Gamma(1, 1) from Gamma(1, 3): at order 2 the rate 2 - 3 is negative.
    found = bounds.renyi_exponential_family(
        2.0, gamma_partition, [[0.0, -1.0], [0.0, -2.0]], [0.0, -3.0]
    )
    assert found[0] == math.inf
    np.testing.assert_allclose(found[1], np.log(4 / 3), rtol=1e-12)


@pytest.mark.parametrize(
    ("eta0", "message"),
    [
        (
            [0.0, 1.0],
            r"log_partition is not finite at eta0 or eta1.*inside of its domain",
        ),
        ([0.0], r"^natural parameters must have.*one d, got"),
        (0.0, r"^natural parameters must have.*one d, got"),
        ([math.nan, -1.0], "must be finite"),
    ],
)
def test_exponential_family_refuses(eta0, message):
    with pytest.raises(ValueError, match=message):
        bounds.renyi_exponential_family(0.5, gamma_partition, eta0, [0.0, -1.0])


# Sums and quadrature.


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(ORDERS), DISCRETE, DISCRETE)
def test_discrete_is_the_sum(order, p, r):
    found = bounds.renyi_discrete(order, p, r)
    np.testing.assert_allclose(
        found, divergence_of_discrete(order, p, r), rtol=1e-9, atol=1e-13
    )
    assert bounds.renyi_discrete(order, p, p) == 0.0


@pytest.mark.parametrize("order", [0.5, 1 - 1e-9, 1.0, 1 + 1e-9, 2.0])
def test_close_distributions_keep_their_digits(order):
    p = np.array([0.5, 0.3, 0.2])
    step = 1e-7 * np.array([1.0, 1.0, -2.0])
    np.testing.assert_allclose(
        bounds.renyi_discrete(order, p, p + step),
        0.5 * order * np.sum(step**2 / p),
        rtol=1e-4,
    )


def test_points_without_mass():
    p, r = [0.5, 0.5, 0.0], [0.5, 0.0, 0.5]
    np.testing.assert_allclose(bounds.renyi_discrete(0.5, p, r), 2 * np.log(2.0))
    assert bounds.renyi_discrete(1.0, p, r) == math.inf
    assert bounds.renyi_discrete(2.0, p, r) == math.inf
    np.testing.assert_allclose(
        bounds.renyi_discrete(2.0, [1.0, 0.0, 0.0], r), np.log(2.0)
    )
    np.testing.assert_allclose(
        bounds.renyi_discrete(1.0, [1.0, 0.0, 0.0], r), np.log(2.0)
    )
    for order in (0.3, 1.0, 3.0):
        assert bounds.renyi_discrete(order, [1.0, 0.0], [0.0, 1.0]) == math.inf
    # A point that almost no mass of the one is on.
    assert np.isfinite(bounds.renyi_discrete(0.5, [1.0, 0.0], [1e-300, 1.0]))


def two_normals(centres):
    """Log density of an even mixture, for each row of ``centres``."""
    centres = np.asarray(centres)

    def log_density(x):
        return logsumexp(
            norm.logpdf(x[:, None], centres[..., None, :]), axis=-1
        ) - np.log(centres.shape[-1])

    return log_density


@pytest.mark.parametrize("order", [0.5, 1.0, 1.5])
def test_quadrature_of_mixtures_is_the_integral(order):
    # One distribution for each draw of the centres, as in an average over a posterior.
    centres = np.random.default_rng(5).normal([-2.0, 2.0], 0.3, size=(5, 2))
    found = bounds.renyi_quadrature(
        order, two_normals(centres), two_normals([-2.0, 2.0]), -14.0, 14.0
    )
    assert found.shape == (5,)
    for i in (0, 4):
        exact = divergence_by_quadrature(
            order,
            lambda x, i=i: norm.pdf(x, centres[i]).mean(),
            lambda x: norm.pdf(x, [-2.0, 2.0]).mean(),
            [-14.0, -4.0, -2.0, 0.0, 2.0, 4.0, 14.0],
        )
        np.testing.assert_allclose(found[i], exact, rtol=1e-9)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from((0.2, 0.7, 1.0)), PAIR)
def test_quadrature_of_normals_is_the_closed_form(order, pair):
    m0, s0, m1, s1 = pair
    found = bounds.renyi_quadrature(
        order, norm(m0, s0).logpdf, norm(m1, s1).logpdf, -60.0, 60.0
    )
    np.testing.assert_allclose(
        found, bounds.renyi_normal(order, m0, s0, m1, s1), rtol=1e-8, atol=1e-14
    )


def test_quadrature_takes_densities_of_0_and_far_ones():
    def uniform(lower, upper):
        return lambda x: np.where(
            (x > lower) & (x < upper), -np.log(upper - lower), -np.inf
        )

    found = [
        bounds.renyi_quadrature(order, uniform(0.0, 1.0), uniform(0.0, 2.0), -1.0, 3.0)
        for order in (0.5, 1.0, 2.0)
    ]
    np.testing.assert_allclose(found, np.log(2.0), rtol=1e-12)
    # The tail of the normal underflows where the uniform has no mass.
    assert (
        bounds.renyi_quadrature(
            1.0, norm(0.5, 0.01).logpdf, uniform(0.0, 1.0), -1.0, 3.0
        )
        == math.inf
    )
    far = bounds.renyi_quadrature(
        0.5, norm(-30.0, 1.0).logpdf, norm(30.0, 1.0).logpdf, -45.0, 45.0
    )
    np.testing.assert_allclose(far, 0.25 * 60.0**2, rtol=1e-10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"upper": 2.0},
            r"exp\(log_p\) has mass 0.97\d+ on \[-20, 2\].*the interval, or raise",
        ),
        (
            {"upper": math.inf},
            r"upper must be in \(-20.0, inf\), got inf.*part of both masses",
        ),
        (
            {"lower": 30.0},
            r"upper must be in \(30.0, inf\), got 20.0.*part of both masses",
        ),
        ({"num_panels": 0}, "num_panels must be an integer of at least 1"),
        ({"num_panels": 1}, "mass .* raise num_panels"),
        (
            {"log_p": lambda x: -0.5 * x**2},
            r"has mass 2.50663 .* every constant.*the interval, or raise",
        ),
        (
            {"log_p": lambda x: np.full_like(x, np.nan)},
            r"log_p is NaN.*of a density of",
        ),
        ({"log_r": lambda x: x[:-1]}, r"log_r returned shape.*must be the nodes"),
        ({"log_r": lambda x: 0.0}, r"log_r returned shape.*must be the nodes"),
    ],
)
def test_quadrature_refuses(options, message):
    arguments = {
        "log_p": norm(0.0, 1.0).logpdf,
        "log_r": norm(0.0, 1.0).logpdf,
        "lower": -20.0,
        "upper": 20.0,
    }
    with pytest.raises(ValueError, match=message):
        bounds.renyi_quadrature(0.5, **(arguments | options))


@pytest.mark.parametrize("p", [[0.5, 0.4], [1.5, -0.5], 1.0, [math.nan, 1.0]])
def test_discrete_refuses(p):
    with pytest.raises(
        ValueError, match=r"p must be probabilities that sum to 1.*the last axis, got"
    ):
        bounds.renyi_discrete(0.5, p, [0.5, 0.5])


# Inequalities.


@settings(deadline=None, max_examples=100)
@given(st.floats(0.05, 3.0), st.floats(0.05, 3.0), DISCRETE, DISCRETE)
def test_change_order_holds_on_discrete_distributions(order, to, p, r):
    known, other = bounds.renyi_discrete(order, p, r), bounds.renyi_discrete(to, p, r)
    assert other <= bounds.change_order(known, order, to) * (1 + 1e-9) + 1e-12


@settings(deadline=None, max_examples=100)
@given(ORDER, ORDER, PAIR)
def test_change_order_holds_on_gaussians(order, to, pair):
    known, other = bounds.renyi_normal(order, *pair), bounds.renyi_normal(to, *pair)
    assert other <= bounds.change_order(known, order, to) * (1 + 1e-9) + 1e-12


def test_change_order_is_attained():
    # At equal variances D_a = a shift² / 2; between distributions with disjoint parts D_a is constant up to 1.
    np.testing.assert_allclose(bounds.change_order(0.3, 0.6, to=0.6), 0.3)
    p, r = [1.0, 0.0], [0.4, 0.6]
    known, other = (bounds.renyi_discrete(a, p, r) for a in (0.7, 0.2))
    np.testing.assert_allclose(
        bounds.change_order(known, 0.7, to=0.2), other, rtol=1e-12
    )
    # The other way round (1-a)/a D_a is constant.
    known, other = (bounds.renyi_discrete(a, r, p) for a in (0.2, 0.7))
    np.testing.assert_allclose(
        bounds.change_order(known, 0.2, to=0.7), other, rtol=1e-12
    )


def test_nothing_follows_for_order_1_from_below():
    np.testing.assert_array_equal(
        bounds.change_order([0.0, 0.1], 0.9, to=1.0), [0.0, math.inf]
    )
    np.testing.assert_array_equal(
        bounds.change_order([0.0, 0.1], 1.0, to=2.0), [0.0, math.inf]
    )


@settings(deadline=None, max_examples=100)
@given(st.floats(0.05, 3.0), DISCRETE, DISCRETE)
def test_hellinger_and_total_variation_bounds_hold(order, p, r):
    known = bounds.renyi_discrete(order, p, r)
    hellinger = bounds.hellinger_bound(known, order)
    assert squared_hellinger(p, r) <= hellinger + 1e-12
    assert 0.0 <= hellinger <= 2.0
    if order >= 0.5:
        assert hellinger <= known
    varied = bounds.total_variation_bound(known, order)
    assert total_variation(p, r) <= varied + 1e-12
    assert varied <= 1.0


def test_hellinger_bound_is_an_equality_at_order_one_half():
    p, r = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    found = bounds.hellinger_bound(bounds.renyi_discrete(0.5, p, r), 0.5)
    np.testing.assert_allclose(found, squared_hellinger(p, r), rtol=1e-12)


def test_the_plain_hellinger_inequality_fails_below_one_half():
    # H² <= D_a needs a >= 1/2: below it the factor (1 - a)/a is due.
    p, r = np.array([0.6, 0.4]), np.array([0.5, 0.5])
    known = bounds.renyi_discrete(0.2, p, r)
    assert squared_hellinger(p, r) > known
    assert squared_hellinger(p, r) <= bounds.hellinger_bound(known, 0.2)


def test_bounds_hold_for_averages():
    rng = np.random.default_rng(6)
    p, r = rng.dirichlet(np.ones(4), size=200), np.full(4, 0.25)
    for order in (0.3, 0.5, 1.0):
        average = bounds.renyi_discrete(order, p, r).mean()
        assert squared_hellinger(p, r).mean() <= bounds.hellinger_bound(average, order)
        assert total_variation(p, r).mean() <= bounds.total_variation_bound(
            average, order
        )


@pytest.mark.parametrize(
    "function", [bounds.hellinger_bound, bounds.total_variation_bound]
)
def test_inequalities_refuse(function):
    for divergence in (-0.1, math.nan):
        with pytest.raises(ValueError, match=r"^divergence must be.*at least 0"):
            function(divergence, 0.5)
    with pytest.raises(ValueError, match=r"order.*positive and finite, got"):
        function(0.1, 0.0)


def test_float32_arguments_are_taken():
    half = jnp.float32(0.5)
    np.testing.assert_allclose(
        bounds.renyi_normal(0.5, half, jnp.float32(1.0), jnp.zeros(2), 1.0), 0.0625
    )
    assert nt.bounds.renyi_normal(0.5, half, 1.0, 0.0, 1.0).dtype == np.float64
