"""Criteria by curvature and coverage: the minimiser, the standard errors, and what is refused."""

import contextlib
import itertools
import math

import alpha_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import enable_x64, tiered
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_tempered.select.alpha.base import Draws, Task
from numpyro_tempered.select.alpha.bootstrap_fisher import (
    bootstrap_fisher,
    check_converged,
)
from numpyro_tempered.select.alpha.data_weights import over_resamples, resamples
from numpyro_tempered.select.alpha.dependence import Dependence
from numpyro_tempered.select.alpha.gpc import gpc, interpolated, solve
from numpyro_tempered.select.alpha.gpc_posteriors import credible_set, ellipsoid_ratios
from numpyro_tempered.select.alpha.lyddon import lyddon, matched_power
from numpyro_tempered.select.alpha.minimise import Minimum, minimise
from numpyro_tempered.select.alpha.prescribed import coarsening, theory_default
from numpyro_tempered.select.alpha.sandwich import (
    Estimate,
    Sandwich,
    advise,
    check_sandwich,
    sampling_se,
    sandwich,
)

KEY = jax.random.key(7)


def location(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def softplus_losses(x, y):
    """Of a logistic regression with outcomes of -1 and 1."""
    return lambda theta: jax.nn.softplus(-y * (x @ theta))


def poisson_losses(x, y):
    return lambda theta: jnp.exp(x @ theta) - y * (x @ theta)


# The minimiser.


@pytest.mark.parametrize("precise", tiered([False, True], unit=[True]))
def test_the_minimiser_of_a_poisson_regression(precise):
    rng = np.random.default_rng(0)
    x = np.column_stack([np.ones(300), rng.normal(size=300)])
    y = rng.poisson(np.exp(1.0 + x[:, 1]))
    with enable_x64() if precise else contextlib.nullcontext():
        # Units that differ by ten thousand, from far away.
        units = np.array([1.0, 1e4])
        start = jnp.array([-3.0, 0.0])
        losses = poisson_losses(jnp.asarray(x * units), jnp.asarray(y))
        found = jax.device_get(jax.jit(lambda start: minimise(losses, start))(start))
    assert bool(found.converged)
    sd = 1.0 / np.sqrt(np.diagonal(found.hessian))
    off = (np.asarray(found.point) - oracle.poisson_fit(x, y) / units) / sd
    assert np.max(np.abs(off)) < (1e-7 if precise else 2e-3)
    assert 1.0 <= found.condition < 100.0


def test_many_data_far_from_the_origin_in_single_precision():
    y = np.random.default_rng(1).normal(1000.0, 1.0, 200_000).astype(np.float32)
    found = jax.jit(
        lambda y: minimise(lambda theta: 0.5 * jnp.square(y - theta), jnp.zeros(1))
    )(y)
    assert bool(found.converged)
    # The resolution of the data is 6e-5, and the standard error 2e-3.
    assert abs(float(found.point[0]) - y.astype(np.float64).mean()) < 2e-4


@pytest.mark.full
def test_rounding_does_not_hide_the_minimisers_of_resamples():
    """The logarithm of the scale is rounded alike in all terms, which adds up."""
    rng = np.random.default_rng(6)
    x = np.column_stack([np.ones(400), rng.normal(size=(400, 2))]).astype(np.float32)
    y = (x @ np.array([1.9, 0.3, -0.4]) + 0.7 * rng.normal(size=400)).astype(np.float32)

    def losses(theta):
        return theta[3] + 0.5 * jnp.square((y - x @ theta[:3]) * jnp.exp(-theta[3]))

    @jax.jit
    @jax.vmap
    def fit(counts):
        return minimise(
            lambda theta: counts * losses(theta), jnp.array([1.9, 0.3, -0.4, -0.36])
        )

    counts = resamples(KEY, 300, 400)
    found = jax.device_get(fit(counts))
    assert np.all(found.converged)
    exact = np.array(
        [
            oracle.weighted_fit(x.astype(float), y.astype(float), c)
            for c in np.asarray(counts)
        ]
    )
    assert np.max(np.abs(found.point[:, :3] - exact) / 0.035) < 0.01


@pytest.mark.parametrize("precise", tiered([False, True], unit=[False]))
def test_separable_classes_have_no_minimiser(precise):
    x = np.column_stack([np.ones(40), np.linspace(-1.0, 1.0, 40)])
    y = np.where(x[:, 1] > 0, 1.0, -1.0)
    with enable_x64() if precise else contextlib.nullcontext():
        compiled = jax.jit(
            lambda y: minimise(softplus_losses(jnp.asarray(x), y), jnp.zeros(2))
        )
        assert not bool(compiled(jnp.asarray(y)).converged)
        y[17:23] *= -1.0
        assert bool(compiled(jnp.asarray(y)).converged)


def test_what_has_no_minimum_is_not_found_and_what_has_one_is():
    cases = [
        lambda t: jnp.exp(-t),  # falls for ever
        lambda t: jnp.array([jnp.square(t[0]), 0.0 * t[1]]),  # flat
        lambda t: jnp.array([jnp.square(t[0]), -jnp.square(t[1])]),  # a saddle
        lambda t: jnp.sqrt(t - 1.0),  # not defined at the start
        lambda t: jnp.square(t),
        lambda t: (
            -jnp.log1p(-jnp.square(t - 0.3))
        ),  # not defined two standard deviations from its minimum
    ]

    @jax.jit
    @jax.vmap
    def found(case):
        return minimise(
            lambda t: jax.lax.switch(case, cases, t), jnp.zeros(2)
        ).converged

    assert found(jnp.arange(6)).tolist() == [False, False, False, False, True, True]


@pytest.mark.full
def test_a_valley_that_bends():
    def rosenbrock(t):
        return jnp.stack(
            [jnp.square(1.0 - t[0]), 100.0 * jnp.square(t[1] - jnp.square(t[0]))]
        )

    found = jax.jit(lambda start: minimise(rosenbrock, start))(jnp.array([-1.2, 1.0]))
    assert bool(found.converged)
    np.testing.assert_allclose(found.point, [1.0, 1.0], atol=1e-3)


# Standard errors.


@pytest.mark.full
def test_the_reported_standard_error_is_the_spread_over_samples():
    num_data, num_samples = 300, 300
    rng = np.random.default_rng(2)
    x = rng.normal(size=(num_samples, num_data, 2))
    x[..., 0] = 1.0
    # Counts whose variance is larger than their mean.
    mean = np.exp(1.0 + 0.4 * x[..., 1]) * rng.gamma(
        5.0, 0.2, size=(num_samples, num_data)
    )
    y = rng.poisson(mean).astype(np.float32)
    x = x.astype(np.float32)

    @jax.jit
    @jax.vmap
    def compute(x, y):
        losses = poisson_losses(x, y)
        found = sandwich(losses, jnp.zeros(2))
        se = sampling_se(losses, found, lambda _, j, i: matched_power(j, i))
        return (
            matched_power(found.curvature, found.variance),
            se,
            found.minimum.converged,
        )

    alpha, se, found = jax.device_get(compute(x, y))
    assert np.all(found)
    np.testing.assert_allclose(
        alpha[:20], [oracle.poisson_lyddon(x[k], y[k]) for k in range(20)], rtol=1e-3
    )
    assert np.mean(alpha) < 0.8
    # The spread is known to 1 / sqrt(2 * 300), 4 per cent; the jackknife of a heavy tail is a little small.
    assert np.mean(se) == pytest.approx(np.std(alpha), rel=0.2)


# Refusals.


def singular(condition=10.0, found=True, powers=(0.5, 1.0), dtype=np.float32):
    minimum = Minimum(
        np.zeros(2, dtype),
        np.eye(2, dtype=dtype),
        dtype(1e-9),
        dtype(condition),
        np.array(found),
    )
    return Sandwich(
        minimum,
        np.eye(2, dtype=dtype),
        np.eye(2, dtype=dtype),
        np.array(powers, dtype),
        np.array(0),
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"condition": 1e6},
            r"Hessian of the total loss has condition number 1e\+06 where float32 allows 2\.9e\+03",
        ),
        (
            {"condition": np.inf, "found": False},
            r"does not identify the latents.*scale features, or take",
        ),
        (
            {"found": False},
            r"^the total loss.*no minimiser that Newton's method finds.*scaled data, or take",
        ),
        (
            {"powers": (1.0, 1e6)},
            r"variance of the scores has condition number 1e\+06 .* float32 allows 2\.9e\+03.*out, or take",
        ),
        (
            {"powers": (1.0, np.inf)},
            r"the scores of the data vanish.*latents out, or take",
        ),
        (
            {"powers": (-1.0, 1.0)},
            r"the scores of the data vanish.*latents out, or take",
        ),
    ],
)
def test_ill_conditioned_curvature_is_refused(changes, words):
    check_sandwich(singular())
    with pytest.raises(ValueError, match=words):
        check_sandwich(singular(**changes))
    if (
        "found" not in changes
        and np.all(np.isfinite(changes.get("powers", 1.0)))
        and changes.get("powers", (1,))[0] > 0
    ):
        check_sandwich(singular(**changes, dtype=np.float64))


def mixture(y):
    component = numpyro.sample("component", dist.Bernoulli(0.5))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(1.0 * component, 1.0), obs=y)


def test_discrete_latents_are_refused():
    y = np.random.default_rng(0).normal(size=80).astype(np.float32)
    for criterion in (lyddon(), bootstrap_fisher(), gpc()):
        with pytest.raises(
            ValueError,
            match=r"^latent sites \['component'\] are discrete: sum them out by nt.marginalize",
        ):
            criterion.decide(KEY, Task(mixture, KEY, (y,), {}), np.ones(1), None)


def test_resamples_without_minimiser_are_refused():
    check_converged(np.array([True, True]))
    with pytest.raises(
        ValueError,
        match=r"in 1 of 2 resamples.*separable.*lyddon.*float64 if the data are badly scaled",
    ):
        check_converged(np.array([True, False]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gpc(0.0), r"level must be in \(0, 1\), got 0.0. Take 0.95"),
        (lambda: gpc(95), r"^level must be in.*got 95"),
        (lambda: gpc(math.nan), "got nan"),
        (lambda: gpc(0.95, num_bootstrap=99), "at least 100, got 99"),
        (lambda: gpc(0.95, num_bootstrap=500.0), r"must be an integer.*of at least"),
        (
            lambda: gpc(0.95, posterior="vi"),
            r"^posterior must be one.*'laplace', 'method'",
        ),
        (lambda: bootstrap_fisher(num_bootstrap=19), "at least 20, got 19"),
        (
            lambda: bootstrap_fisher(num_bootstrap=True),
            r"must be an integer.*of at least",
        ),
        (
            lambda: coarsening(0.0, 90),
            r"^a must be.*positive and finite, got 0.0.*which the departure shows",
        ),
        (
            lambda: coarsening(math.inf, 90),
            r"^a must be positive.*got inf.*which the departure shows",
        ),
        (lambda: coarsening(math.nan, 90), "got nan"),
        (lambda: coarsening(30.0, 90.5), r"num_data must be an integer.*of at least"),
        (
            lambda: coarsening(30.0, 90, num_independent=91),
            "num_independent must be an integer from 1 to 90",
        ),
    ],
)
def test_arguments_are_checked(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_quantity_is_a_function():
    with pytest.raises(
        TypeError, match=r"of must be a function of the latent values.*by site, got str"
    ):
        gpc(of="theta")


# Resamples.


def test_resamples_count_all_data():
    counts = np.asarray(resamples(KEY, 2000, 10))
    assert np.all(counts.sum(axis=1) == 10)
    # Multinomial: mean 1, variance .9, covariance -.1; the standard errors are .02, .03 and .02.
    np.testing.assert_allclose(counts.mean(axis=0), 1.0, atol=0.1)
    np.testing.assert_allclose(np.cov(counts.T), np.eye(10) - 0.1, atol=0.15)


def test_resamples_in_batches_are_the_same():
    counts = (
        np.random.default_rng(0).multinomial(5, np.full(5, 0.2), 7).astype(np.float32)
    )
    whole = over_resamples(lambda c: c @ jnp.arange(5.0), counts, 1)
    # So many dimensions that memory holds two data sets at once.
    np.testing.assert_array_equal(
        over_resamples(lambda c: c @ jnp.arange(5.0), counts, 2**26 // 10 - 1), whole
    )


# The root.


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 10_000),
    st.floats(0.5, 3.0),
    st.floats(-2.0, 2.0),
    st.sampled_from([0.5, 0.9, 0.95]),
)
def test_the_root_has_the_coverage(seed, power, log_scale, level):
    draws = np.random.default_rng(seed).chisquare(1, 200) * math.exp(log_scale)
    alpha, se, curve = solve(lambda a: a**power * draws, level, 1.0, (0.0, math.inf))
    assert alpha == pytest.approx(np.quantile(draws, level) ** (-1.0 / power), rel=1e-4)
    assert abs(np.mean(alpha**power * draws <= 1.0) - level) <= 1.0 / 200 + 1e-9
    assert 0.0 < se < 2.0 * alpha / power
    assert all(a < b for (a, _), (b, _) in itertools.pairwise(curve))


def test_a_level_without_power_is_refused():
    far = np.full(100, 2.0)
    with pytest.raises(
        ValueError,
        match=r"no power has coverage 0\.9: it is 0\.000 .*the prior forbids",
    ):
        solve(lambda a: far + a, 0.9, 1.0, (0.0, math.inf))
    with pytest.raises(
        ValueError,
        match=r"1\.000 at alpha = 0\.1 and 1\.000 at 0\.5.*extend the alphas upwards",
    ):
        solve(lambda a: 0.1 * far * a, 0.9, 1.0, (0.1, 0.5))


def test_ratios_between_the_alphas_of_a_grid():
    alphas = np.array([0.1, 0.4, 1.0])
    draws = np.array([[0.5], [2.0], [3.0]])
    at = interpolated(alphas, draws * alphas**1.3)
    for alpha in (0.1, 0.2, 0.7, 1.0):
        np.testing.assert_allclose(at(alpha), draws[:, 0] * alpha**1.3, rtol=1e-12)
    np.testing.assert_array_equal(
        interpolated(np.array([0.5]), draws)(0.5), draws[:, 0]
    )


# Posteriors given by draws.


def test_the_sets_hold_their_share_of_the_draws():
    flat = np.random.default_rng(0).normal(size=(500, 3)) @ np.array(
        [[1.0, 0.5, 0.0], [0.0, 2.0, 1.0], [0.0, 0.0, 0.1]]
    )
    kept = jax.device_get(
        credible_set(lambda draws: draws.flat, 0.8)(
            Draws({}, None, None, jnp.asarray(flat))
        )
    )
    inside = [ellipsoid_ratios(kept, row) <= 1.0 for row in flat]
    assert np.mean(inside) == pytest.approx(0.8, abs=1 / 500)
    # An affine map of draws and point changes nothing.
    moved = jax.device_get(
        credible_set(
            lambda draws: draws.flat @ jnp.diag(jnp.array([10.0, 1.0, 0.1])) + 3.0, 0.8
        )(Draws({}, None, None, jnp.asarray(flat)))
    )
    np.testing.assert_allclose(
        ellipsoid_ratios(moved, flat[0] * np.array([10.0, 1.0, 0.1]) + 3.0),
        ellipsoid_ratios(kept, flat[0]),
        rtol=1e-3,
    )


# The two that have no eye for the data.


def test_coarsening_and_the_default():
    for a in (1.0, 30.0, 1e9):
        alpha = coarsening(a, 90)
        assert alpha == pytest.approx(1.0 / (1.0 + 90 / a), rel=1e-12)
        # The data never count for more than a.
        assert 90 * alpha < min(a, 90.0)
        assert a == pytest.approx(90 * alpha / (1.0 - alpha), rel=1e-4)
        # Each datum three times over counts for a third.
        assert coarsening(a, 270, num_independent=90) == pytest.approx(alpha / 3.0)
    assert theory_default() == 0.5
    # The bound on D_1/2 at alpha: (1 + alpha) / (1 - alpha) times the factor between the divergences.
    alphas = np.linspace(0.01, 0.99, 99)
    bound = (
        (1 + alphas) / (1 - alphas) * np.where(alphas < 0.5, (1 - alphas) / alphas, 1.0)
    )
    assert alphas[np.argmin(bound)] == pytest.approx(0.5)
    assert np.min(bound) == pytest.approx(3.0)


def test_the_aims_are_stated():
    assert {c.aim for c in (lyddon(), bootstrap_fisher(), gpc())} == {"coverage"}
    one = Estimate(None, Dependence(100), singular(powers=(0.5,)), None)
    assert advise("it", 1.15, 0.1, "sets", one).endswith(
        "so there is no need to temper."
    )
    assert "too narrow" in advise("it", 0.5, 0.1, "sets", one)
    two = one._replace(sandwich=singular())
    asked = "narrows it; single directions of the latents ask for 0.5 to 1."
    assert advise("it", 1.5, 0.1, "sets", two).endswith(asked)
    few = two._replace(dependence=Dependence(100, np.arange(100) // 10))
    assert "of sets of data in 10 groups" in advise("it", 0.5, 0.1, "sets", few)
    assert advise("it", 0.5, 0.1, "sets", few).endswith(
        "only 10 units are independent, so the power is a rough one."
    )


def test_terms_that_round_by_more_than_their_size_hide_no_minimum():
    """Counts under a Poisson regression: terms of some nats are differences of numbers in the hundreds."""
    counts_of_breaks = """26 30 54 25 70 52 51 26 67 18 21 29 17 12 18 35 30 36 36 21 24 18 10 43 28 15 26
        27 14 29 19 29 31 41 20 44 42 26 19 16 39 28 21 39 29 20 21 24 17 13 15 15 16 28"""
    y = np.array(counts_of_breaks.split(), np.float32)
    tension = np.tile(np.repeat([0, 1, 2], 9), 2)
    x = np.column_stack(
        [np.ones(54), np.repeat([0, 1], 27), tension == 1, tension == 2]
    ).astype(np.float32)

    def losses(theta):
        return jnp.exp(x @ theta) - y * (x @ theta) + jax.scipy.special.gammaln(y + 1)

    start = oracle.poisson_fit(x.astype(float), y.astype(float)).astype(np.float32)
    counts = resamples(jax.random.key(0), 500, 54)
    found = jax.jit(
        jax.vmap(lambda c: minimise(lambda theta: c * losses(theta), start))
    )(counts)
    assert bool(jnp.all(found.converged))
