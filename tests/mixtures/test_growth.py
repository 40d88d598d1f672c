"""Mixtures that start from a fit with fewer components: F falls by no more than empty ones cost."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import enable_x64
from mixture_families import component_of, some_data
from scipy.special import betaln, gammaln

import numpyro_tempered as nt
from numpyro_tempered.mixtures.array import array_source
from numpyro_tempered.mixtures.ascent import History, count_best
from numpyro_tempered.mixtures.factors import POSE, coefficients, objective, problem_of
from numpyro_tempered.mixtures.prepare import Settings, prepare
from numpyro_tempered.mixtures.select import criterion_columns
from numpyro_tempered.mixtures.source import NUM_SPLITS, Starts
from numpyro_tempered.mixtures.starts import split_components
from numpyro_tempered.mixtures.sweep import sweep
from numpyro_tempered.mixtures.warm import pad, with_fits

ALPHA = 0.5
KEY = jax.random.key(0)
RNG = np.random.default_rng(3)
X = np.concatenate(
    [RNG.normal(size=(30, 1)) + centre for centre in (-6.0, 0.0, 1.5, 7.0)]
)
COMPONENT = nt.mixtures.components.known_variance(1, prior_scale=5.0)


def log_beta(a):
    return gammaln(a).sum() - gammaln(a.sum())


def least_change(counts, concentration, larger):
    """What F changes by where components are added that stay empty, for any Dirichlet priors of the weights."""
    n = ALPHA * counts
    more = np.concatenate([n, np.zeros(len(larger) - len(n))])
    of_larger = log_beta(larger + more) - log_beta(larger)
    return of_larger - (log_beta(concentration + n) - log_beta(concentration))


def least(objective, total, orders, concentration=1.0):
    """The least F by K, from that of the next smaller K."""
    a, b = concentration * orders[:-1], concentration * np.diff(orders)
    return objective[:-1] + betaln(a + ALPHA * total, b) - betaln(a, b)


def test_the_change_does_not_depend_on_the_counts_where_the_prior_of_the_others_stays():
    counts, rest = np.array([3.0, 0.5, 8.0]), np.array([0.4, 2.0])
    a = np.array([0.3, 1.0, 2.5])
    change = least_change(counts, a, np.concatenate([a, rest]))
    total = ALPHA * counts.sum()
    # Of gammas of sums alone; of two beta functions where one component is added, or several that are equal.
    of_sums = [gammaln(s) - gammaln(s + total) for s in (a.sum(), a.sum() + rest.sum())]
    np.testing.assert_allclose(change, of_sums[1] - of_sums[0], rtol=1e-12)
    expected = betaln(a.sum() + total, rest.sum()) - betaln(a.sum(), rest.sum())
    np.testing.assert_allclose(change, expected, rtol=1e-12)
    # A concentration of 1: the published form.
    ones = least_change(counts, np.ones(3), np.ones(4))
    np.testing.assert_allclose(ones, np.log(3 / (3 + total)), rtol=1e-12)
    # A concentration of 1/K is another prior for the others too, and the change depends on the counts.
    assert (
        abs(
            least_change(counts, np.full(3, 1 / 3), np.full(4, 1 / 4))
            - least_change(
                counts[[0, 0, 0]] * counts.sum() / counts[0] / 3,
                np.full(3, 1 / 3),
                np.full(4, 1 / 4),
            )
        )
        > 0.1
    )


@functools.partial(jax.jit, static_argnames="component")
def value_at(component, problem, factors, blocks):
    return objective(
        component,
        problem,
        factors,
        sweep(component, coefficients(component, factors), blocks),
    )


LARGER = {
    "equal": np.ones(3),
    "sparse": np.full(3, 0.1),
    "of 1/K": np.full(3, 1 / 3),
    "unequal": np.array([0.5, 2.0, 3.0]),
}
SMALLER = {
    "equal": np.ones(2),
    "sparse": np.full(2, 0.1),
    "of 1/K": np.full(2, 1 / 2),
    "unequal": np.array([0.5, 2.0]),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["known_variance", "poisson", "gaussian", "tied_gaussian", "small_product"]
)
def test_an_empty_component_costs_no_more_than_its_weight(name, x64):
    component, x = component_of(name), some_data(name)
    options = {
        "alpha": ALPHA,
        "num_draws": 0,
        "num_restarts": 2,
        "tolerance": 1e-13,
        "max_iter": 5000,
    }
    for case, larger in LARGER.items():
        fit = nt.mixtures.fit(
            KEY, x, component, num_components=2, concentration=SMALLER[case], **options
        )
        source = array_source(prepare(x, component, None), len(larger), 1, fill=False)
        problem = source.reduce(
            POSE, problem_of(source.data, Settings(ALPHA, larger), len(larger))
        )
        padded = pad(problem, fit.factors, fit.problem.concentration)
        value = float(value_at(source.data.component, problem, padded, source.blocks))
        assert (
            value
            >= fit.objective + least_change(fit.counts, SMALLER[case], larger) - 1e-9
        )


def test_a_padded_fit_starts_where_the_other_ended(x64):
    component, x = component_of("known_variance"), some_data("known_variance")
    fit = nt.mixtures.fit(
        KEY, x, component, num_components=2, alpha=ALPHA, num_draws=0, num_restarts=2
    )
    source = array_source(prepare(x, component, None), 4, 1, fill=False)
    problem = problem_of(
        source.data, Settings(ALPHA, np.array([1.0, 2.0, 3.0, 4.0])), 4
    )
    warm = with_fits(
        Starts(4, nt.mixtures.starts.kmeans_plus_plus(), 1), source.data, problem, [fit]
    )
    (padded,) = warm.padded
    np.testing.assert_array_equal(
        warm.splits.parent.posterior.loc[:2], fit.factors.posterior.loc
    )
    np.testing.assert_array_equal(padded.posterior.loc[:2], fit.factors.posterior.loc)
    np.testing.assert_allclose(
        padded.posterior.loc[2:], np.asarray(problem.prior.loc)[None].repeat(2, axis=0)
    )
    np.testing.assert_allclose(
        padded.concentration,
        [*(np.asarray(fit.factors.concentration) + np.array([0.0, 1.0])), 3.0, 4.0],
    )


def test_a_split_takes_a_part_of_one_component():
    rng = np.random.default_rng(0)
    points = np.concatenate(
        [rng.normal(size=(40, 2)) + c for c in ([-5, 0], [5, 0], [5, 6])]
    ).astype(np.float32)
    weight = rng.uniform(0.5, 2.0, 120).astype(np.float32)
    # The first component holds a cluster, the second two; the third and the fourth are empty.
    omega = np.zeros((4, 120), np.float32)
    omega[0, :40], omega[1, 40:], omega[0, 40:], omega[1, :40] = 0.9, 0.8, 0.2, 0.1
    split = jax.jit(split_components)
    for seed in range(5):
        after = np.asarray(split(jax.random.key(seed), omega[:3], points, weight, 2, 3))
        np.testing.assert_allclose(after.sum(axis=0), 1.0, rtol=1e-6)
        (parent,) = np.flatnonzero(np.any(after[:2] != omega[:2], axis=1))
        moved = after[2] > 0
        np.testing.assert_array_equal(after[2][moved], omega[parent][moved])
        np.testing.assert_array_equal(
            after[parent], np.where(moved, 0.0, omega[parent])
        )
        mass = omega[parent] * weight
        mean = mass @ points / mass.sum()
        # A half plane: what is nearer to the seed than to the mean.
        seeds = points[moved]
        nearer = (
            np.linalg.norm(points[:, None] - seeds, axis=-1)
            < np.linalg.norm(points - mean, axis=-1)[:, None]
        )
        assert np.any(np.all(nearer == moved[:, None], axis=0))
    twice = np.asarray(split(jax.random.key(0), omega, points, weight, 2, 4))
    np.testing.assert_allclose(twice.sum(axis=0), 1.0, rtol=1e-6)
    assert np.all(twice.sum(axis=1) > 0)


def small(**options):
    return {
        "alpha": ALPHA,
        "num_restarts": 1,
        "num_draws": 2,
        "baselines": False,
        "num_samples": 1,
    } | options


@pytest.mark.full
def test_no_number_of_components_is_worse_than_a_smaller_one(x64):
    # From one start that leaves all data in one component, whatever K.
    start = nt.mixtures.starts.given_responsibilities(np.zeros(len(X), int))
    orders = [6, 1, 4, 2]
    choice = nt.mixtures.select_num_components(
        KEY, X, COMPONENT, num_components=orders, init=start, **small()
    )
    assert list(choice.fits) == orders
    table = nt.table(choice).sort_index()
    values, numbers = table["objective"].to_numpy(), table.index.to_numpy()
    assert np.all(values[1:] >= least(values, len(X), numbers) - 1e-8)
    # Splits leave the start that no random restart leaves here.
    alone = nt.mixtures.fit(
        KEY, X, COMPONENT, num_components=4, init=start, alpha=ALPHA, num_draws=0
    )
    assert table.loc[4, "objective"] > alone.objective + 10.0
    assert [len(choice.fits[k].restart_objectives) for k in (1, 2, 4, 6)] == [
        1,
        *[1 + NUM_SPLITS + 1] * 3,
    ]


@pytest.mark.full
def test_the_path_starts_from_both_neighbours(x64):
    start = nt.mixtures.starts.given_responsibilities(np.zeros(len(X), int))
    options = small(init=start, num_components=[1, 2, 3])
    del options["alpha"], options["baselines"], options["num_samples"]
    path = nt.mixtures.num_components_path(
        KEY, X, COMPONENT, alphas=[ALPHA, 1.0], **options
    )
    values = path["num_components_path"]["objective"].sel(alpha=ALPHA).values
    assert np.all(values[1:] >= least(values, len(X), np.array([1, 2, 3])) - 1e-8)
    with pytest.raises(ValueError, match="leave fits out of init"):
        nt.mixtures.num_components_path(KEY, X, COMPONENT, init=[])


@pytest.mark.full
def test_chunks_start_from_a_smaller_fit(x64):
    options = {"alpha": ALPHA, "num_draws": 2, "num_restarts": 1}
    parent = nt.mixtures.fit(KEY, X, COMPONENT, num_components=2, **options)
    grown = nt.mixtures.fit(
        KEY,
        [X[::2], X[1::2]],
        COMPONENT,
        num_components=4,
        init=parent,
        num_start_rows=40,
        **options,
    )
    assert len(grown.restart_objectives) == 1 + NUM_SPLITS + 1
    (bound,) = least(np.array([parent.objective, 0.0]), len(X), np.array([2, 4]))
    # The empty components are exact though splits see a sample alone.
    assert grown.restart_objectives[-1] >= bound - 1e-9
    assert grown.objective >= bound - 1e-9
    # A fit of as many components takes the place of the first restart.
    again = nt.mixtures.fit(
        KEY, X, COMPONENT, num_components=4, init=[parent, grown], **options
    )
    assert len(again.restart_objectives) == len(grown.restart_objectives)
    np.testing.assert_allclose(again.restart_objectives[0], grown.objective, atol=1e-4)
    with pytest.raises(
        ValueError, match="init has 4 components of known_variance; expected at most 3"
    ):
        nt.mixtures.fit(KEY, X, COMPONENT, num_components=3, init=grown)
    with pytest.raises(TypeError, match="init is a int"):
        nt.mixtures.fit(KEY, X, COMPONENT, num_components=3, init=[3])


@pytest.fixture(scope="module")
def two_fits():
    with enable_x64():
        return {
            k: nt.mixtures.fit(
                KEY,
                X,
                COMPONENT,
                num_components=k,
                alpha=ALPHA,
                num_draws=4,
                num_restarts=4,
            )
            for k in (1, 2)
        }


def test_starts_that_reach_the_best_are_counted():
    # Three restarts, and two starts from a fit with fewer components, which count as one.
    assert count_best(np.array([-5.0, -5.09, -5.11, -9.0, -9.0]), 3) == 2
    assert count_best(np.array([-9.0, -5.0, -9.0, -5.0, -5.0]), 3) == 2
    assert count_best(np.array([-9.0, -9.0, -9.0, -5.0, -5.0]), 3) == 1
    assert count_best(np.array([-np.inf, -5.0]), 2) == 1
    # A move has left them all behind.
    assert count_best(np.array([-5.0, -5.0]), 2, -4.8) == 0


def test_the_spread_is_that_of_the_restarts():
    """Starts from a fit with fewer components agree among each other, which shows nothing."""
    objectives = np.array([-9.0, -7.0, -5.0, -5.0, -5.0, -5.0])
    state = SimpleNamespace(
        num_iter=np.full(6, 2),
        trace=np.tile(objectives, (2, 1)),
        converged=np.full(6, True),
    )
    assert History.of(state, 2, objectives, 2).spread == 3.0
    # After a move.
    state.trace += 1.0
    assert History.of(state, 2, objectives, 2).spread == 4.0


@pytest.mark.full
def test_an_optimum_that_one_start_reaches_is_uncertain(two_fits):
    one, two = two_fits[1], two_fits[2]
    assert one.num_best == 4
    # A large margin, so that the standard errors decide nothing.
    confirmed, alone = (two._replace(spread=1000.0, num_best=n) for n in (2, 1))
    log_weights = np.log([0.5, 0.25])
    for fit, expected in ((confirmed, False), (alone, True)):
        columns = criterion_columns({1: one, 2: fit}, log_weights, False)
        margin = abs(columns["criterion"][0] - columns["criterion"][1])
        assert 2 * columns["se"].max() < margin < 1000.0
        assert columns["uncertain"].tolist() == [False, expected]
        assert columns["num_best"].tolist() == [4, fit.num_best]
