"""Single precision: narrow components far from each other, and data far from 0."""

import contextlib
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import enable_x64, tiered

import numpyro_tempered as nt
from numpyro_tempered.mixtures import evidence, sweep
from numpyro_tempered.mixtures.array import ArraySource
from numpyro_tempered.mixtures.factors import (
    COMMON_CAVI,
    TEMPERED_CAVI,
    MixtureProblem,
    Outcome,
    coefficients,
    first_factors,
)
from numpyro_tempered.mixtures.prepare import move, prepare
from numpyro_tempered.mixtures.rounding import (
    check_resolution,
    check_rounding,
    has_converged,
    losses_of,
    sizes_of,
)
from numpyro_tempered.mixtures.sweep import (
    Coefficients,
    Sums,
    base_sum,
    in_blocks,
    make_blocks,
)

# Three clusters of standard deviation 1 that are this far from each other.
GAP, N, D = 1e4, 90, 2
LABELS = np.repeat(np.arange(3), N // 3)
X = GAP * np.array([[-1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[
    LABELS
] + np.random.default_rng(0).normal(size=(N, D))
FAR = 1e8
GAUSSIANS = {
    "known_variance": lambda dim, loc: nt.mixtures.components.known_variance(
        dim, prior_loc=loc, prior_scale=GAP
    ),
    "diagonal_gaussian": lambda dim, loc: nt.mixtures.components.diagonal_gaussian(
        dim, loc=loc, mean_precision=1e-8
    ),
    "spherical_gaussian": lambda dim, loc: nt.mixtures.components.spherical_gaussian(
        dim, loc=loc, mean_precision=1e-8
    ),
    "gaussian": lambda dim, loc: nt.mixtures.components.gaussian(
        dim, loc=loc, mean_precision=1e-8
    ),
    "tied_gaussian": lambda dim, loc: nt.mixtures.components.tied_gaussian(
        dim, loc=loc, mean_precision=1e-8
    ),
}
OPTIONS = {"num_components": 3, "num_restarts": 2}


def fit(component, x=X, **options):
    return nt.mixtures.fit(
        jax.random.key(0), x, component, **(OPTIONS | {"num_draws": 0} | options)
    )


def in_double(function):
    with enable_x64():
        return function()


def sorted_loc(values, column=0):
    return np.sort(np.asarray(values, np.float64)[:, column])


@functools.partial(jax.jit, static_argnames="component")
def first(component, prior, rows, omega):
    blocks = make_blocks(rows, jnp.ones(len(rows), rows.dtype), 32)
    problem = MixtureProblem(
        prior,
        jnp.ones(3, rows.dtype),
        jnp.asarray(0.5, rows.dtype),
        base_sum(component, blocks),
    )
    factors = first_factors(component, problem, in_blocks(omega, 32), blocks)
    return factors, coefficients(component, factors)


@pytest.mark.parametrize(
    "name", tiered(GAUSSIANS, unit=["known_variance", "diagonal_gaussian", "gaussian"])
)
def test_factors_and_coefficients_of_narrow_clusters_keep_their_digits(name):
    omega = np.eye(3)[LABELS]

    data = prepare(X, GAUSSIANS[name](D, 0.0), None)

    def run(dtype):
        rows, prior = jax.tree.map(
            lambda leaf: np.asarray(leaf, dtype), (data.rows, data.prior)
        )
        return jax.tree.map(
            np.asarray, first(data.component, prior, rows, omega.astype(dtype))
        )

    single, double = run(np.float32), in_double(lambda: run(np.float64))
    for ours, exact in zip(
        jax.tree.leaves(single), jax.tree.leaves(double), strict=True
    ):
        assert ours.dtype == np.float32
        # Relative to the largest of each kind: cross moments are small by chance.
        np.testing.assert_allclose(
            ours, exact, rtol=2e-5, atol=2e-5 * np.abs(exact).max()
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "offset"), [(n, o) for n in GAUSSIANS for o in (0.0, FAR)]
)
def test_the_objective_is_that_of_double_precision(name, offset):
    component, x = GAUSSIANS[name](D, offset), X + offset
    single, double = fit(component, x), in_double(lambda: fit(component, x))
    assert single.converged
    assert single.factors.concentration.dtype == np.float32
    # Rows themselves are held to 1e-3 of a standard deviation: some 1e-5 a datum.
    np.testing.assert_allclose(
        single.objective, double.objective, rtol=0, atol=2e-4 * N
    )
    np.testing.assert_allclose(
        sorted_loc(single.posterior.loc) - offset, sorted_loc(X[[15, 45, 75]]), atol=4.0
    )
    np.testing.assert_allclose(
        sorted_loc(single.posterior.loc),
        sorted_loc(double.posterior.loc),
        rtol=0,
        atol=2e-3,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=pytest.mark.slow)
        if each in ("gaussian", "tied_gaussian")
        else each
        for each in GAUSSIANS
    ],
)
def test_sources_and_steps_agree_with_double_precision(name):
    component = GAUSSIANS[name](D, FAR)
    key, chunks = jax.random.key(0), [X[:40] + FAR, X[40:] + FAR]

    def run():
        in_chunks = nt.mixtures.fit(key, chunks, component, num_draws=2, **OPTIONS)
        stochastic = nt.mixtures.fit_stochastic(
            key, chunks, component, num_draws=2, batch_size=30, num_passes=3, **OPTIONS
        )
        likelihood = nt.mixtures.em(key, X + FAR, component, **OPTIONS)
        return in_chunks, stochastic, likelihood

    single, double = run(), in_double(run)
    for ours, exact in zip(single[:2], double[:2], strict=True):
        np.testing.assert_allclose(
            ours.objective, exact.objective, rtol=0, atol=1e-3 * N
        )
        np.testing.assert_allclose(
            sorted_loc(ours.posterior.loc),
            sorted_loc(exact.posterior.loc),
            rtol=0,
            atol=2e-3,
        )
    np.testing.assert_allclose(
        single[2].log_likelihood, double[2].log_likelihood, rtol=0, atol=1e-3 * N
    )
    np.testing.assert_allclose(
        sorted_loc(single[2].parameters["loc"]),
        sorted_loc(double[2].parameters["loc"]),
        rtol=0,
        atol=2e-3,
    )


@pytest.mark.full
def test_moves_keep_digits():
    stuck = nt.mixtures.starts.given_responsibilities(
        np.where(LABELS == 2, 1, LABELS) + 1
    )
    component = GAUSSIANS["diagonal_gaussian"](D, 0.0)
    before, after = (fit(component, init=stuck, num_moves=moves) for moves in (0, 8))
    double = in_double(lambda: fit(component))
    assert before.objective < double.objective - 100.0
    assert after.num_moves > 0
    np.testing.assert_allclose(after.objective, double.objective, rtol=0, atol=1e-3 * N)


@pytest.mark.full
def test_predictions_far_from_zero_keep_their_digits():
    near, far = (
        fit(GAUSSIANS["gaussian"](D, offset), X + offset) for offset in (0.0, FAR)
    )
    np.testing.assert_allclose(
        nt.mixtures.log_predictive(far, X + FAR),
        nt.mixtures.log_predictive(near, X),
        atol=1e-2,
    )
    np.testing.assert_array_equal(
        nt.mixtures.predict(far, X + FAR), nt.mixtures.predict(near, X)
    )
    rows, labels = nt.mixtures.sample(jax.random.key(1), far, 30)
    deviations = rows - far.posterior.loc[np.asarray(labels)]
    # Student's t of some 30 degrees of freedom, in steps of 1e-3: near 1e8 those of float32 are 8.
    assert np.abs(deviations).max() < 5.0
    assert len(np.unique(np.round(rows, 1))) > 40
    draws = nt.mixtures.sample_posterior(jax.random.key(1), far, 20)
    deviations = draws["loc"] - far.posterior.loc
    assert 0.05 < deviations.std() < 0.5
    np.testing.assert_allclose(deviations.mean(axis=0), 0.0, atol=0.3)


@pytest.mark.full
def test_columns_of_a_product_move_where_they_may():
    """Codes stay where they are, beside a Gaussian column far from 0."""
    parts = {
        "size": GAUSSIANS["diagonal_gaussian"](1, FAR),
        "kind": nt.mixtures.components.categorical([3]),
    }
    component = nt.mixtures.components.product(parts, {"size": [1], "kind": [0]})
    x = np.stack([LABELS.astype(float), X[:, 0] + FAR], axis=1)
    single, double = fit(component, x), in_double(lambda: fit(component, x))
    assert single.centre[0] == 0.0
    np.testing.assert_allclose(
        single.objective, double.objective, rtol=0, atol=1e-3 * N
    )
    np.testing.assert_allclose(
        sorted_loc(single.posterior["size"].loc),
        sorted_loc(double.posterior["size"].loc),
        rtol=0,
        atol=2e-3,
    )


@pytest.mark.full
@pytest.mark.parametrize("name", ["diagonal_gaussian", "gaussian", "tied_gaussian"])
def test_columns_of_different_units(name):
    x = (X / GAP + 0.1 * np.random.default_rng(1).normal(size=X.shape)) * [1e-6, 1e6]
    component = getattr(nt.mixtures.components, name)(
        D, **nt.mixtures.components.scaled_to(x)
    )
    single, double = fit(component, x), in_double(lambda: fit(component, x))
    assert single.converged
    np.testing.assert_allclose(
        single.objective, double.objective, rtol=0, atol=1e-5 * N
    )


@pytest.mark.full
@pytest.mark.parametrize("place", ["host", "device"])
def test_data_that_were_rounded_before_are_refused(place):
    """As float32 they are multiples of 8."""
    x = (X + FAR).astype(np.float32)
    component = GAUSSIANS["diagonal_gaussian"](D, FAR)
    with pytest.raises(
        FloatingPointError,
        match=r"numbers there are held to 1[0-9], which .* in float64 as a NumPy",
    ):
        fit(component, x if place == "host" else jnp.asarray(x))
    with pytest.raises(FloatingPointError, match="every restart of EM collapsed"):
        nt.mixtures.em(jax.random.key(0), x, component, **OPTIONS)


def test_a_component_is_refused_where_the_spacing_of_its_data_is_wider():
    data = prepare(X + FAR, GAUSSIANS["known_variance"](D, FAR), None)
    omega = np.eye(3, dtype=np.float32)[LABELS]
    factors, _ = first(data.component, data.prior, data.rows, omega)
    counts = np.full(3, 30.0)
    mixture = coefficients(data.component, factors)
    of_host = losses_of(data.component, mixture, data.centre, data.spacings)
    check_resolution(data.component, *of_host, counts)
    # Half of the squared spacing in standard deviations, for each of two columns.
    eps = np.finfo(np.float32).eps
    np.testing.assert_allclose(
        of_host[0], eps * np.abs(factors.posterior.loc), rtol=1e-5, atol=1e-8
    )
    rounded = losses_of(data.component, mixture, data.centre, (eps, eps))
    np.testing.assert_allclose(
        rounded[1],
        np.square(eps * (FAR + factors.posterior.loc)).sum(axis=1) / 2,
        rtol=1e-4,
    )
    with pytest.raises(
        FloatingPointError,
        match=r"component . of .known_variance. is too narrow.*let jax have",
    ):
        check_resolution(data.component, *rounded, counts)
    # What holds no data loses nothing.
    check_resolution(data.component, *rounded, np.zeros(3))


@pytest.mark.full
def test_counts_whose_log_densities_are_rounding_are_refused():
    """x log λ - λ of 10^8 has no digit behind the point in single precision: all data were in one component."""
    rate, rng = 1e8, np.random.default_rng(7)
    counts = np.concatenate(
        [rng.poisson(rate, 60), rng.poisson(rate + 8.0 * rate**0.5, 60)]
    )
    component = nt.mixtures.components.poisson(1, rate=1.0 / rate)
    options = {"x": counts, "num_components": 2}
    with pytest.raises(FloatingPointError, match="let jax have 64 bits"):
        fit(component, **options)
    assert in_double(lambda: sorted(fit(component, **options).counts.round())) == [
        60,
        60,
    ]


def test_log_densities_that_are_differences_of_large_numbers_are_refused():
    component = nt.mixtures.components.poisson(1)
    # A rate of 10^8, and a component without data.
    mixture = Coefficients(
        np.zeros(2), np.array([-1e8, 0.0]), np.array([[18.4], [99.0]])
    )
    sums = Sums(np.zeros(()), np.array([10.0, 0.0]), np.array([[1e9], [1e-9]]))
    sizes = np.asarray(sizes_of(mixture, sums))
    check_rounding(component, sizes, sums.counts, np.dtype(np.float64))
    with pytest.raises(
        FloatingPointError,
        match=r"^the log.*component 0 .* size 1\.9e\+09, which float32 holds to 1",
    ):
        check_rounding(component, sizes, sums.counts, np.dtype(np.float32))
    check_rounding(component, sizes, np.zeros(2), np.dtype(np.float32))


def test_a_fall_of_what_counts_as_converged_is_rounding():
    component = nt.mixtures.components.known_variance(1)
    data, history = (
        SimpleNamespace(component=component),
        SimpleNamespace(converged=True),
    )

    def outcome(fall):
        return Outcome(None, history, fall=fall, fallen=(1, np.zeros(2)))

    assert has_converged(data, outcome(0.9e-3), 0.0, 1e-3, lambda point: 0.0)
    with pytest.raises(
        RuntimeError, match=r"of restart 1 fell by 0\.5 nats.*do not belong together"
    ):
        has_converged(data, outcome(0.5), 0.0, 1e-3, lambda point: 0.0)


@pytest.mark.full
def test_a_fit_in_double_precision_serves_in_single():
    component = nt.mixtures.components.gaussian(
        D, **nt.mixtures.components.scaled_to(X)
    )
    double, single = in_double(lambda: fit(component)), fit(component)
    key = jax.random.key(1)
    for function in (nt.mixtures.responsibilities, nt.mixtures.log_predictive):
        assert function(double, X).dtype == jnp.float32
        np.testing.assert_allclose(
            function(double, X), in_double(lambda f=function: f(double, X)), atol=1e-4
        )
    rows, _ = nt.mixtures.sample(key, double, 5)
    assert np.isfinite(rows).all()
    assert nt.mixtures.sample_posterior(key, double, 5)["weights"].shape == (5, 3)
    assert double.objective == pytest.approx(single.objective, abs=1e-3 * N)


@pytest.mark.full
def test_a_fit_that_double_precision_would_continue_has_not_converged(monkeypatch):
    component = GAUSSIANS["known_variance"](D, 0.0)
    assert fit(component).converged

    def reduce(self, summary, *arguments):
        values = reduce_rows(self, summary, *arguments)
        return values._replace(rise=1e-3 * N) if summary is evidence.FINAL else values

    reduce_rows = ArraySource.reduce
    monkeypatch.setattr(ArraySource, "reduce", reduce)
    with pytest.warns(
        UserWarning,
        match=r"a step in double precision raises its objective by 0.09 nats, which float32",
    ):
        assert not fit(component).converged


EXACT = nt.mixtures.components.known_variance(1)


def rounded_update(prior, counts, sums):
    """In single precision the posterior mean is off by a part of the prior's deviation."""
    posterior = EXACT.update(prior, counts, sums)
    off = 3e-6 if posterior.loc.dtype == jnp.float32 else 0.0
    return posterior._replace(loc=posterior.loc + off * prior.scale)


@pytest.mark.parametrize(
    ("alpha", "off", "converged"),
    [(0.1, 0.031, True), (1.0, 0.031, False), (4.0, 0.012, True), (4.0, 0.031, False)],
)
def test_a_fit_has_converged_where_a_step_in_double_precision_gains_little_a_datum(
    alpha, off, converged
):
    """Little are 1e-4 nats, times a power above 1."""
    prior = nt.mixtures.components.known_variance(1, prior_scale=off / 3e-6).prior
    component, x = EXACT._replace(prior=prior, update=rounded_update), X[:30, :1] / GAP
    # KL of two Gaussians of precision alpha n, the prior's being next to none.
    rise = 0.5 * off**2 * alpha * 30
    assert (rise < 1e-4 * max(1.0, alpha) * 30) == converged
    said = pytest.warns(UserWarning, match=f"raises its objective by {rise:.2g} nats")
    with contextlib.nullcontext() if converged else said:
        found = fit(component, x, num_components=1, num_restarts=1, alpha=alpha)
    assert found.converged == converged


def test_the_centre_of_data_on_the_device_is_subtracted_in_two_parts():
    centre = np.array([1e8 + 3.3])
    for function in (move, jax.jit(lambda rows, _: move(rows, centre))):
        np.testing.assert_allclose(
            function(jnp.array([[1e8 + 16.0]]), centre), [[16.0 - 3.3]], rtol=1e-6
        )


@pytest.mark.full
@pytest.mark.parametrize("name", list(GAUSSIANS))
def test_many_rows_share_statistics_only_where_these_keep_their_digits(
    name, monkeypatch
):
    used = []
    ascend = ArraySource.ascend

    def note(self, algorithm, *arguments):
        used.append(algorithm)
        return ascend(self, algorithm, *arguments)

    component, options = GAUSSIANS[name](D, 0.0), {"num_restarts": 2}
    near = np.random.default_rng(0).normal(size=X.shape) + 4.0 * LABELS[:, None]
    few = {
        case: fit(component, x, **options)
        for case, x in {"near": near, "narrow": X}.items()
    }
    monkeypatch.setattr(sweep, "FEW_ROWS", 0)
    monkeypatch.setattr(ArraySource, "ascend", note)
    many = fit(component, near, **options)
    assert used == [COMMON_CAVI]
    assert abs(many.objective - few["near"].objective) < 1e-5 * len(X)
    # Narrow for their distance: the sums about 0 would have no digit of the variances.
    many = fit(component, X, **options)
    assert used == [COMMON_CAVI, COMMON_CAVI, TEMPERED_CAVI]
    assert abs(many.objective - few["narrow"].objective) < 1e-5 * len(X)


@pytest.mark.full
@pytest.mark.parametrize("make", [float, nt.mixtures.stick_breaking])
def test_a_prior_of_the_weights_that_is_rounding_is_refused(make):
    x, options = (
        np.random.default_rng(0).normal(size=(50, 2)),
        {"num_components": 3, "num_restarts": 2},
    )
    component = nt.mixtures.components.known_variance(2)
    with pytest.raises(
        FloatingPointError, match="concentrations of the weights add up to"
    ):
        nt.mixtures.fit(
            jax.random.key(0), x, component, concentration=make(1e5), **options
        )
    single = nt.mixtures.fit(
        jax.random.key(0), x, component, concentration=make(1e4), **options
    )
    with enable_x64():
        double = nt.mixtures.fit(
            jax.random.key(0), x, component, concentration=make(1e4), **options
        )
    assert single.objective == pytest.approx(double.objective, abs=0.1)
