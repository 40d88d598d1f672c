"""A move of components and what they share, written out in NumPy with the random numbers of its key."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import digamma, softmax

import numpyro_tempered as nt
from numpyro_tempered.core.ascent import Ascent
from numpyro_tempered.mixtures import coordinate_ascent
from numpyro_tempered.mixtures.array import ArraySource
from numpyro_tempered.mixtures.ascent import Limits, PassState
from numpyro_tempered.mixtures.components.known_variance import NormalMean
from numpyro_tempered.mixtures.factors import (
    Factors,
    MixtureProblem,
    coefficients,
    common_coefficients,
    common_sizes,
)
from numpyro_tempered.mixtures.moves import affinities, propose
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.starts import draw_row
from numpyro_tempered.mixtures.sweep import make_blocks
from numpyro_tempered.mixtures.warm import with_weights_of

ALPHA, NOISE, PRIOR_SCALE, PRIOR_CONCENTRATION = 0.5, 0.7, 10.0, 0.75
# Three components that overlap, and a place that is kept free.
K = 3
LOC, SCALE = (
    np.array([[-1.0, 0.0], [0.5, 0.5], [3.0, -1.0]]),
    np.array([[0.3, 0.2], [0.2, 0.1], [0.4, 0.3]]),
)
CONCENTRATION = np.array([3.0, 6.0, 2.0])
NUM_ROWS = 12
ROWS = 2.0 * np.random.default_rng(2).normal(size=(NUM_ROWS, 2))
WEIGHT = np.linspace(0.5, 1.6, NUM_ROWS)
# The family takes a block as columns, of which the last fills up.
BLOCK = 8


def components(loc=LOC):
    component = nt.mixtures.components.known_variance(
        2, prior_scale=PRIOR_SCALE, scale=NOISE
    )
    prior = NormalMean(*(np.asarray(part, np.float64) for part in component.prior))
    free = np.zeros((1, 2)), np.full((1, 2), PRIOR_SCALE)
    posterior = NormalMean(
        *(np.concatenate(parts) for parts in zip((loc, SCALE), free, strict=True)),
        np.full((K + 1, 2), NOISE),
    )
    problem = MixtureProblem(
        prior,
        np.append(np.full(K, PRIOR_CONCENTRATION), 0.0),
        np.asarray(ALPHA),
        np.asarray(0.0),
    )
    return (
        component._replace(prior=None),
        problem,
        Factors(np.append(CONCENTRATION, 0.0), posterior),
    )


def joint(rows=ROWS, loc=LOC):
    """The logarithms of which responsibilities are the softmax, ``(n, K)``."""
    distance = np.square(rows[:, None, :] - loc) + np.square(SCALE)
    return digamma(CONCENTRATION) - 0.5 * distance.sum(axis=-1) / NOISE**2


@pytest.fixture(scope="module")
def move():
    component = components()[0]
    return jax.jit(
        lambda key, problem, factors, blocks: propose(
            key, component, problem, factors, blocks
        )
    )


@pytest.mark.parametrize("distance", [1.0, 100.0])
@pytest.mark.parametrize("seed", range(8))
def test_a_move_is_a_merge_or_a_death_and_a_split(move, seed, distance, x64):
    """Distant components share no rows, and any of them may merge."""
    loc = distance * LOC
    rows = ROWS + (loc - LOC)[np.arange(NUM_ROWS) % K]
    _, problem, factors = components(loc)
    moved = move(
        jax.random.key(seed),
        problem,
        factors,
        make_blocks(jnp.asarray(rows), jnp.asarray(WEIGHT), BLOCK),
    )
    merge, donor, heir, parent, one, two = jax.random.split(jax.random.key(seed), 6)
    donor = int(jax.random.randint(donor, (), 0, K))
    omega = softmax(joint(rows, loc), axis=1)
    shared = omega.T @ (WEIGHT[:, None] * omega)
    counts = shared.sum(axis=1)
    odds = shared[donor] + 1e-3 * counts.sum() / K
    with np.errstate(divide="ignore"):
        # A place that is kept free has no chance, but a random number.
        choices = [
            np.log(np.append(np.where(np.arange(K) == donor, 0.0, each), 0.0))
            for each in (odds, counts)
        ]
    heir, parent = (
        int(jax.random.categorical(*each))
        for each in zip((heir, parent), choices, strict=True)
    )
    if jax.random.bernoulli(merge):
        without = omega.copy()
        without[:, heir] += omega[:, donor]
        without[:, donor] = 0.0
    else:
        without = softmax(
            np.where(np.arange(K) == donor, -np.inf, joint(rows, loc)), axis=1
        )
    # Seeds of the split, of rows behind which the last block fills up.
    standardised = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    filled = 2 * BLOCK - NUM_ROWS
    points = np.pad(standardised, ((0, filled), (0, 0)))
    mass = np.pad(WEIGHT * without[:, parent], (0, filled))
    first = np.square(points - points[draw_row(one, jnp.asarray(mass))]).sum(axis=1)
    second = np.square(points - points[draw_row(two, jnp.asarray(mass * first))]).sum(
        axis=1
    )
    nearer = (second < first)[:NUM_ROWS]
    after = without.copy()
    after[:, donor] += np.where(nearer, without[:, parent], 0.0)
    after[:, parent] -= np.where(nearer, without[:, parent], 0.0)
    counts = ALPHA * after.T @ WEIGHT
    precision = PRIOR_SCALE**-2 + counts[:, None] / NOISE**2
    mean = ALPHA * (after * WEIGHT[:, None]).T @ rows / NOISE**2 / precision
    np.testing.assert_allclose(
        moved.concentration, np.append(PRIOR_CONCENTRATION + counts, 0.0), rtol=1e-9
    )
    np.testing.assert_allclose(moved.posterior.loc[:K], mean, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(
        moved.posterior.scale[:K] ** -2.0, np.tile(precision, (1, 2)), rtol=1e-9
    )


def test_components_share_the_products_of_their_responsibilities(x64):
    component, _, factors = components()
    blocks = make_blocks(jnp.asarray(ROWS), jnp.asarray(WEIGHT), BLOCK)
    shared = jax.jit(
        lambda factors: affinities(component, coefficients(component, factors), blocks)
    )(factors)
    omega = softmax(joint(), axis=1)
    np.testing.assert_allclose(
        shared[:K, :K], omega.T @ (WEIGHT[:, None] * omega), rtol=1e-9
    )
    np.testing.assert_array_equal(shared[K], 0.0)


@pytest.mark.parametrize(
    ("change", "is_common"),
    [
        ({}, True),
        ({"is_large": False}, False),
        ({"objective": np.array([-1.0, -np.inf])}, False),
        ({"fall": np.array([0.0, 1e-3])}, False),
        ({"size": 1e4}, False),
    ],
)
def test_sums_about_0_serve_large_data_that_keep_their_digits(
    change, is_common, monkeypatch
):
    given = {
        "is_large": True,
        "objective": np.array([-1.0, -2.0]),
        "fall": np.zeros(2),
        "size": 100.0,
    } | change
    state = SimpleNamespace(
        objective=given["objective"],
        fall=given["fall"],
        point=SimpleNamespace(update=None),
        active=None,
    )
    asked = []

    def ascend(algorithm, problem, factors, limits):
        asked.append(algorithm)
        return state

    component = nt.mixtures.components.known_variance(2)
    source = SimpleNamespace(
        data=SimpleNamespace(component=component),
        is_large=given["is_large"],
        ascend=ascend,
    )
    sizes = np.array([[1.0, given["size"]]], np.float32)
    monkeypatch.setattr(coordinate_ascent, "for_restarts", lambda *_: sizes)
    assert coordinate_ascent.ascend(source, None, None, None) is state
    assert asked[-1] is (
        coordinate_ascent.COMMON_CAVI if is_common else coordinate_ascent.TEMPERED_CAVI
    )
    assert len(asked) == 1 + (given["is_large"] and not is_common)


def test_coefficients_about_0_have_the_density_of_those_about_the_centres(x64):
    component, problem, factors = components()
    at_zero, at_centres = (
        common_coefficients(component, factors),
        coefficients(component, factors),
    )
    assert at_zero.centres is None
    from_zero = at_zero.constant + component.statistics(ROWS.T).T @ at_zero.weights.T
    for k in range(K):
        moved = (ROWS - np.asarray(at_centres.centres)[k]).T
        from_centre = (
            at_centres.constant[k]
            + component.statistics(moved).T @ at_centres.weights[k]
        )
        np.testing.assert_allclose(from_zero[:, k], from_centre, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(at_zero.log_weights, at_centres.log_weights)
    # Of the place that is kept free there is no size.
    sizes = common_sizes(component, problem, factors)
    terms = np.abs(
        at_zero.weights * component.statistics(np.asarray(factors.posterior.loc).T).T
    ).sum(axis=1)
    np.testing.assert_allclose(
        sizes, np.where(np.arange(K + 1) < K, np.abs(at_zero.constant) + terms, 0.0)
    )


@pytest.mark.parametrize("is_array", [True, False])
def test_moves_go_on_from_what_is_better_by_more_than_the_tolerance(
    is_array, monkeypatch
):
    """A rise of .3 nats is taken, one of .1 is none where the tolerance is .2; rows in chunks make no moves."""

    def state(objectives, name):
        objectives, size = np.array(objectives), len(objectives)
        factors = {"of": np.array([f"{name}{i}" for i in range(size)])}
        return Ascent(
            PassState(factors, factors),
            objectives,
            objectives[None],
            *(np.ones(size, int),) * 2,
            *[np.ones(size, bool), np.arange(size) / 10.0, np.array(1)],
        )

    states = [
        state([-9.0, -5.0], "start"),
        state([-4.7, -6.0], "first"),
        state([-8.0, -4.6], "second"),
    ]
    parents, given = [], iter(states)
    monkeypatch.setattr(coordinate_ascent, "ascend", lambda *_: next(given))
    monkeypatch.setattr(
        coordinate_ascent,
        "for_keys",
        lambda function, component, keys, problem, parent, blocks: parents.append(
            (len(keys), str(parent["of"]))
        ),
    )
    data = SimpleNamespace(
        component=SimpleNamespace(name="any"), total=20.0, rows=np.zeros((20, 1))
    )
    source = (
        ArraySource(data, None, fill=False) if is_array else SimpleNamespace(data=data)
    )
    limits = Limits(num_restarts=2, max_iter=9, tolerance=0.01, progress_bar=False)
    outcome = coordinate_ascent.coordinate_ascent(
        jax.random.key(0), source, None, None, limits, num_moves=2
    )
    assert outcome.tolerance == pytest.approx(0.2)
    np.testing.assert_array_equal(outcome.history.restart_objectives, [-9.0, -5.0])
    if is_array:
        assert parents == [(2, "start1"), (2, "first0")]
        assert (
            outcome.num_moves,
            str(outcome.factors["of"]),
            outcome.history.trace[-1],
        ) == (1, "first0", -4.7)
    else:
        assert parents == []
        assert (
            outcome.num_moves,
            str(outcome.factors["of"]),
            outcome.history.trace[-1],
        ) == (0, "start1", -5.0)
    assert outcome.fall == pytest.approx(0.1)
    assert outcome.fallen[0] == 1


def test_random_responsibilities_are_a_dirichlet_over_the_active(key):
    assign = nt.mixtures.starts.random_responsibilities(2.0).assign
    active = np.arange(4) < 3
    shares = np.asarray(assign(key, None, jnp.zeros((4000, 1)), None, active))
    np.testing.assert_allclose(shares.sum(axis=1), 1.0, rtol=1e-5)
    assert np.all(shares[:, 3] == 0.0)
    # Of concentrations 2, 2, 2: mean 1/3, variance (1/3)(2/3)/7.
    np.testing.assert_allclose(
        shares[:, :3].mean(axis=0), 1 / 3, atol=5 * np.sqrt(2 / 63 / 4000)
    )
    np.testing.assert_allclose(shares[:, :3].var(axis=0), 2 / 63, rtol=0.15)


def test_a_fit_takes_the_form_of_the_weights_of_a_problem_by_its_counts():
    """Of a Dirichlet and of sticks, whose second number counts what is left behind."""
    counts = np.array([5.0, 3.0, 2.0])
    dirichlet, sticks = np.full(3, 0.75), np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 0.0]])
    of_sticks = sticks + np.stack([counts, [5.0, 2.0, 0.0]], axis=1)

    def fit(concentration, prior):
        return MixtureFit(
            None,
            ALPHA,
            Factors(concentration, None),
            MixtureProblem(None, prior, ALPHA, 0.0),
            *[None] * 13,
        )

    given = fit(dirichlet + counts, dirichlet)
    found = with_weights_of(MixtureProblem(None, sticks, ALPHA, 0.0), given)
    np.testing.assert_allclose(found.factors.concentration, of_sticks)
    np.testing.assert_allclose(found.problem.concentration, sticks)
    back = with_weights_of(given.problem, fit(of_sticks, sticks))
    np.testing.assert_allclose(back.factors.concentration, dirichlet + counts)
    assert with_weights_of(given.problem, given) is given
