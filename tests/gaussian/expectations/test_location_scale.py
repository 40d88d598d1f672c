"""Location-scale families: values and gradients by integration of the densities, convexity, refusals."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiered
from scipy import integrate, stats
from scipy.special import expit

import numpyro_tempered as nt
from numpyro_tempered.gaussian.expectations import location_scale
from numpyro_tempered.gaussian.families import FullRank, MeanField

HINGE, SQUARED = nt.expectations.hinge(), nt.expectations.squared()
LOGISTIC = nt.expectations.logistic(num_nodes=80)
# Value and slope of a loss, and the kinks that integration must meet.
LOSSES = {
    "hinge": (
        HINGE,
        lambda u, y: np.maximum(1 - y * u, 0),
        lambda u, y: -y * (y * u < 1),
    ),
    "logistic": (
        LOGISTIC,
        lambda u, y: np.logaddexp(0, -y * u),
        lambda u, y: -y * expit(-y * u),
    ),
    "squared": (SQUARED, lambda u, y: (y - u) ** 2, lambda u, y: 2 * (u - y)),
}
BASES = {
    "t 3": ("student_t", 3.0, stats.t(3, scale=np.sqrt(1 / 3))),
    "t 10": ("student_t", 10.0, stats.t(10, scale=np.sqrt(0.8))),
    "laplace": ("laplace", None, stats.laplace(scale=np.sqrt(0.5))),
    "nearly Gaussian": ("student_t", 1e6, stats.norm()),
}


def integral(function, density, points):
    """The expectation under the density of z, piece by piece."""
    ends = [-np.inf, *sorted({-4.0, 0.0, 4.0, *points}), np.inf]
    pieces = itertools.pairwise(ends)
    limits = {"epsabs": 1e-12, "epsrel": 1e-11, "limit": 200}
    return sum(
        integrate.quad(lambda z: function(z) * density.pdf(z), a, b, **limits)[0]
        for a, b in pieces
    )


@pytest.mark.parametrize("loss", tiered(LOSSES, unit=["hinge"]))
@pytest.mark.parametrize("name", tiered(BASES, unit=["t 3", "laplace"]))
def test_values_and_gradients_are_those_of_the_density(x64, name, loss):
    (distribution, df, density), (expectation, value, slope) = BASES[name], LOSSES[loss]
    q, x, y = (
        MeanField(jnp.array([0.4, -0.3]), jnp.array([0.7, 1.2])),
        np.array([0.5, -0.8]),
        -1.0,
    )
    mean, s = float(x @ q.loc), float(np.sqrt(np.square(x) @ np.square(q.scale)))
    points = [(-1 - mean) / s]
    evaluation = location_scale(expectation, distribution, df).evaluate(q, x, y)
    assert float(evaluation.at_mean) == pytest.approx(value(mean, y), rel=1e-12)
    # The squared loss under t 3 ends where the rule was cut; a million degrees of freedom are not infinite;
    # 80 nodes of Gauss and Hermite are few for the logistic loss of a wide predictor.
    near = {"t 3": 1e-5, "nearly Gaussian": 1e-5}.get(name, 1e-8)
    near = max(near, 2e-4) if loss == "logistic" else near
    expected = integral(lambda z: value(mean + s * z, y), density, points)
    assert float(evaluation.expected) == pytest.approx(expected, rel=near)
    first = integral(lambda z: slope(mean + s * z, y), density, points)
    np.testing.assert_allclose(evaluation.grad_loc, first * x, rtol=near)
    in_variance = integral(lambda z: slope(mean + s * z, y) * z, density, points) / (
        2 * s
    )
    # Half the second moments are in the tails of t 3.
    np.testing.assert_allclose(evaluation.grad_var, in_variance * x**2, rtol=20 * near)


@pytest.mark.parametrize(
    ("distribution", "df"),
    tiered([("student_t", 4.0), ("laplace", None)], unit=[("laplace", None)]),
)
def test_expected_losses_are_convex_and_lipschitz_in_location_and_scale(
    x64, distribution, df
):
    rng = np.random.default_rng(0)
    x, y = np.array([0.6, -0.8]), 1.0
    heavy = location_scale(HINGE, distribution, df)

    @jax.jit
    @jax.vmap
    def evaluate(mu):
        q = MeanField(mu[:2], mu[2:])
        at = heavy.evaluate(q, x, y)
        return at.expected, jnp.concatenate([at.grad_loc, 2 * q.scale * at.grad_var])

    a, b = (
        np.c_[rng.normal(size=(200, 2)), rng.uniform(0.05, 2, size=(200, 2))]
        for _ in range(2)
    )
    (at_a, slope), (at_b, _), (middle, _) = (
        evaluate(mu) for mu in (a, b, 0.5 * (a + b))
    )
    assert np.all(middle <= 0.5 * (at_a + at_b) + 1e-12)
    # Tangents lie below, and the gradient is at most the length of x.
    assert np.all(at_b >= at_a + np.sum(slope * (b - a), axis=1) - 1e-12)
    assert np.all(np.linalg.norm(slope, axis=1) <= 1.0 + 1e-9)
    numeric = [
        (evaluate(a + h)[0] - evaluate(a - h)[0]) / 2e-5 for h in 1e-5 * np.eye(4)
    ]
    np.testing.assert_allclose(slope, np.transpose(numeric), atol=1e-7)


@pytest.mark.full
def test_squared_losses_are_strongly_convex_as_under_a_gaussian(x64):
    # With a base of covariance 1 the expectation is the Gaussian's: H = 2 x² in one dimension.
    q, x, y = (
        FullRank(jnp.array([0.2, 0.1]), jnp.array([[0.5, 0.0], [0.3, 0.4]])),
        np.array([1.5, -1.0]),
        0.3,
    )
    for arguments in (("student_t", 5.0), ("laplace", None)):
        ours, gaussian = (
            each.evaluate(q, x, y)
            for each in (location_scale(SQUARED, *arguments), SQUARED)
        )
        np.testing.assert_allclose(ours.expected, gaussian.expected, rtol=1e-12)
        np.testing.assert_allclose(ours.grad_loc, gaussian.grad_loc, rtol=1e-12)
        np.testing.assert_allclose(
            ours.grad_var.dense(), gaussian.grad_var.dense(), rtol=1e-12
        )


def test_the_divergence_of_student_t_is_at_most_that_of_gaussians_with_a_factor():
    df, (m, sigma), (m0, s) = 4.0, (0.8, 0.5), (-0.3, 1.1)
    unit = np.sqrt((df - 2) / df)
    q, p = stats.t(df, m, sigma * unit), stats.t(df, m0, s * unit)
    divergence = integral(lambda z: q.logpdf(z) - p.logpdf(z), q, [m])
    gaussian = (
        0.5 * (sigma**2 / s**2 - 1)
        - np.log(sigma / s)
        + 0.5 * df / (df - 2) * (m - m0) ** 2 / s**2
    )
    assert 0 < divergence <= gaussian


@pytest.mark.parametrize(
    ("distribution", "df"),
    tiered([("student_t", 5.0), ("laplace", None)], unit=[("laplace", None)]),
)
def test_independent_coordinates_have_the_moments_of_their_product_density(
    x64, distribution, df
):
    # One evaluation of 400,000 draws of sizes beside as many plain draws of z by NumPy, without their slopes'
    # help: the gradient in σ_j is E[l'(u) x_j z_j].
    q, x, y = (
        MeanField(jnp.array([0.4, -0.3]), jnp.array([0.7, 1.2])),
        np.array([1.5, -0.8]),
        1.0,
    )
    count, rng = 400_000, np.random.default_rng(1)
    z = (
        rng.laplace(scale=np.sqrt(0.5), size=(count, 2))
        if df is None
        else rng.standard_t(df, (count, 2))
    )
    z = z * (1.0 if df is None else np.sqrt((df - 2) / df))
    u = (np.asarray(q.loc) + np.asarray(q.scale) * z) @ x
    slope = -y * (y * u < 1)
    drawn = np.c_[np.maximum(1 - y * u, 0), slope[:, None] * x, slope[:, None] * x * z]
    product = location_scale(
        HINGE, distribution, df, independent=True, num_particles=count
    )
    at = product.evaluate(q, x, y, rng_key=jax.random.key(0))
    ours = np.r_[at.expected, at.grad_loc, 2 * q.scale * at.grad_var]
    # Two independent estimates, of which ours varies less.
    errors = np.sqrt(2 / count) * drawn.std(axis=0)
    assert np.all(np.abs(ours - drawn.mean(axis=0)) <= 4.5 * errors)
    spherical = location_scale(HINGE, distribution, df).evaluate(q, x, y)
    assert abs(float(spherical.expected - at.expected)) > 5 * errors[0]


@pytest.mark.full
def test_independent_sizes_of_one_coordinate_are_the_spherical_ones(x64):
    q, x, y = (
        MeanField(jnp.array([0.3]), jnp.array([0.8])),
        np.array([[1.2], [2.5]]),
        np.array([-1.0, 1.0]),
    )
    mask = jnp.array([False, True])
    product = location_scale(
        HINGE, "student_t", 6.0, independent=True, num_particles=200_000
    )
    ours = product.evaluate(q, x, y, rng_key=jax.random.key(0), mask=mask)
    exact = location_scale(HINGE, "student_t", 6.0).evaluate(q, x, y, mask=mask)
    for name in ("at_mean", "expected", "grad_loc", "grad_var"):
        np.testing.assert_allclose(
            getattr(ours, name), getattr(exact, name), rtol=0.01, err_msg=name
        )


def test_independent_coordinates_stream_with_a_key_and_refuse_other_families():
    product = location_scale(HINGE, "laplace", independent=True)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 2)), jnp.float32)
    rule, y = nt.online.sva(0.2), jnp.sign(x[:, 0])
    state = rule.init(MeanField(jnp.zeros(2), jnp.ones(2)))
    state, losses = nt.online.run(rule, product, state, x, y, rng_key=jax.random.key(0))
    assert float(losses.at_mean[-20:].mean()) < 0.5 * float(losses.at_mean[0])
    assert int(state.rejected) == 0
    with pytest.raises(
        TypeError,
        match=r"^independent coordinates need a MeanField .* got FullRank: leave independent",
    ):
        product.evaluate(
            FullRank(jnp.zeros(2), jnp.eye(2)), x[0], y[0], rng_key=jax.random.key(0)
        )
    with pytest.raises(
        TypeError, match=r"^independent coordinates are for.*one predictor, not of K"
    ):
        location_scale(nt.expectations.softmax(3), "laplace", independent=True)


@pytest.mark.full
def test_float32_is_finite_and_rows_can_be_masked():
    heavy = location_scale(HINGE, "student_t", 3.0)
    q = MeanField(jnp.zeros(2, jnp.float32), jnp.full(2, 1e-3, jnp.float32))
    x, y = (
        jnp.asarray([[3.0, 4.0], [1.0, 1e4], [jnp.nan, 0.0]], jnp.float32),
        jnp.ones(3, jnp.float32),
    )
    at = heavy.evaluate(q, x[:2], y[:2])
    assert at.expected.dtype == jnp.float32
    assert np.all(np.isfinite(at.grad_loc) & np.isfinite(at.grad_var))
    masked = heavy.evaluate(q, x[:2], y[:2], mask=jnp.array([True, False]))
    alone = heavy.evaluate(q, x[0], y[0])
    np.testing.assert_allclose(masked.expected, alone.expected, rtol=1e-6)
    np.testing.assert_allclose(masked.grad_var, alone.grad_var, rtol=1e-6)
    point = heavy.evaluate(q._replace(scale=jnp.zeros(2)), x[0], y[0])
    # The weights of the nodes add up to 1 to rounding.
    assert (float(point.at_mean), float(point.expected)) == (
        1.0,
        pytest.approx(1.0, rel=1e-6),
    )


def test_what_is_no_location_scale_family_is_refused():
    with pytest.raises(
        ValueError, match=r"^a Student-t.*needs df.*of freedom, at least"
    ):
        location_scale(HINGE)
    with pytest.raises(ValueError, match=r"df must be .*tails take too many nodes"):
        location_scale(HINGE, "student_t", 2.5)
    with pytest.raises(
        ValueError, match=r"^a Laplace distribution.*has no df.*leave it out"
    ):
        location_scale(HINGE, "laplace", 3.0)
    with pytest.raises(ValueError, match="distribution must be one of"):
        location_scale(HINGE, "cauchy")
    with pytest.raises(
        TypeError, match=r"linear predictor's loss.*form or by quadrature"
    ):
        location_scale(
            nt.expectations.monte_carlo(lambda theta, x, y: (y - x @ theta) ** 2),
            "laplace",
        )
    rule, prior = (
        nt.online.ngvi(curvature="fisher"),
        MeanField(jnp.zeros(1), jnp.ones(1)),
    )
    with pytest.raises(TypeError, match="not Fisher curvature"):
        nt.online.update(
            rule, location_scale(HINGE, "laplace"), rule.init(prior), jnp.ones(1), 1.0
        )
    rule = nt.online.ewa(1.0)
    state = rule.init(FullRank(jnp.zeros(1), jnp.eye(1)))
    with pytest.raises(
        TypeError, match=r"^ewa is exact on.*quadratic.*this one take ngvi"
    ):
        nt.online.update(
            rule, location_scale(SQUARED, "laplace"), state, jnp.ones(1), 1.0
        )
