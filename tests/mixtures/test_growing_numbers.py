"""Numbers of components that grow until they no longer pay."""

import itertools
import math

import numpy as np
import pytest
from selection_cases import FAMILIES, KEY, same_fits, select, three_clusters

import numpyro_tempered as nt
from numpyro_tempered.mixtures.measure import largest_log_likelihood
from numpyro_tempered.mixtures.orders import PATIENCE, log_rest
from numpyro_tempered.select.ranking import check_countable_prior


@pytest.fixture(scope="module")
def x():
    return three_clusters()


@pytest.mark.full
def test_all_numbers_are_those_of_a_range_as_far_as_they_pay(x):
    growing = select(x, FAMILIES["unit"], num_components=None, alpha=0.5)
    assert growing.selected == 3
    assert list(growing.fits) == list(range(1, 3 + PATIENCE + 1))
    assert growing.stopped == f"none of the last {PATIENCE} K improved the criterion"
    assert growing.comparison.attrs["stopped"] == growing.stopped
    assert not growing.at_end
    ranged = select(x, FAMILIES["unit"], alpha=0.5)
    assert (ranged.selected, ranged.stopped) == (3, None)
    for k, fit in ranged.fits.items():
        same_fits(growing.fits[k], fit)


@pytest.mark.full
def test_each_family_grows_by_itself(x):
    growing = select(x, FAMILIES, num_components=None, alpha=0.5)
    assert growing.selected == ("unit", 3)
    assert set(growing.stopped) == set(FAMILIES)
    alone = select(x, FAMILIES["narrow"], num_components=None, alpha=0.5)
    assert [k for name, k in growing.fits if name == "narrow"] == list(alone.fits)
    lengths = {name: sum(key[0] == name for key in growing.fits) for name in FAMILIES}
    assert lengths["narrow"] > lengths["wide"]
    assert len(nt.table(growing)) == len(growing.fits)
    assert np.exp(nt.table(growing)["log_prior"]).sum() <= 1.0


@pytest.mark.full
def test_numbers_beyond_the_default_are_found_and_its_end_is_no_answer():
    rng = np.random.default_rng(2)
    x = (np.repeat(12.0 * np.arange(10) - 54.0, 15) + rng.normal(size=150))[:, None]
    component = nt.mixtures.components.known_variance(1, prior_scale=40.0)
    growing = select(x, component, num_components=None)
    assert growing.selected == 10
    with pytest.warns(
        UserWarning, match="K = 8, the largest that was compared, is selected"
    ):
        default = select(x, component)
    assert default.at_end
    assert default.attrs["at_end"] == 1
    # Who chose the end is not told.
    assert select(x, component, num_components=[2, 3]).at_end
    assert not select(x, component, num_components=[3]).at_end


@pytest.mark.full
def test_probabilities_end_for_certain():
    # One kind of row: log L is at most 0, and K = 1 has the evidence 1 / (n + 1).
    x, family = np.ones((8, 1)), nt.mixtures.components.bernoulli(1)
    choice = select(x, family, num_components=None, alpha=1.0)
    assert choice.selected == 1
    assert choice.stopped == "certain: no larger K can win"
    best = -math.log(9.0) - math.log(2.0)
    # What dyadic weights leave after K is 2^-K.
    assert list(choice.fits) == list(range(1, math.ceil(-best / math.log(2.0)) + 1))
    # Labels have no upper bound.
    assert (
        "certain"
        not in select(x, family, num_components=None, label_multiplicity=True).stopped
    )


@pytest.mark.full
def test_there_are_no_more_components_than_rows():
    choice = select(
        np.array([[0.0], [20.0], [40.0]]), FAMILIES["unit"], num_components=None
    )
    assert list(choice.fits) == [1, 2, 3]
    assert choice.stopped.startswith("K = 3 is the largest that is tried")


@pytest.mark.parametrize(
    ("family", "x"),
    [
        (
            nt.mixtures.components.bernoulli(2),
            [[0, 1], [0, 1], [1, 1], [np.nan, 1], [np.nan, 0], [np.nan, np.nan]],
        ),
        (
            nt.mixtures.components.categorical([3, 2]),
            [[0, 1], [2, 1], [0, 0], [0, 0], [np.nan, 1], [1, np.nan]],
        ),
        (nt.mixtures.components.poisson(1), [[0], [3], [3], [7]]),
    ],
)
def test_no_distribution_has_a_larger_likelihood(family, x):
    x = np.array(x, float)
    weight = np.arange(1.0, len(x) + 1.0)
    bound = largest_log_likelihood(family, x, weight)
    observed = ~np.isnan(x)
    rng, levels = np.random.default_rng(0), [np.unique(c[~np.isnan(c)]) for c in x.T]
    rows = np.array(list(itertools.product(*levels)))
    # Rows to the cells that agree with what is observed of them.
    agrees = np.array(
        [np.all(rows[:, o] == r[o], axis=1) for r, o in zip(x, observed, strict=True)]
    )
    for scale in (0.1, 1.0, 10.0):
        masses = rng.dirichlet(np.full(len(rows), scale), size=200)
        with np.errstate(divide="ignore"):
            assert np.all(np.log(masses @ agrees.T) @ weight <= bound + 1e-9)
    whole = observed.all(axis=1)
    shares = {
        tuple(r): weight[whole][(x[whole] == r).all(axis=1)].sum() for r in x[whole]
    }
    of_whole = sum(w * math.log(w / weight[whole].sum()) for w in shares.values())
    assert largest_log_likelihood(family, x[whole], weight[whole]) == pytest.approx(
        of_whole, rel=1e-6
    )


def test_densities_and_totals_have_their_bounds():
    assert (
        largest_log_likelihood(
            nt.mixtures.components.gaussian(1), np.array([[0.0], [1.0]]), None
        )
        == math.inf
    )
    assert (
        largest_log_likelihood(
            nt.mixtures.components.multinomial(2),
            np.array([[2.0, 1.0], [0.0, 3.0]]),
            None,
        )
        == 0.0
    )


def test_what_weights_leave():
    assert log_rest(np.log(0.5 ** np.arange(1, 6))) == pytest.approx(-5 * math.log(2.0))
    # No sum is known to less than its rounding.
    assert -37.0 < log_rest(np.log([0.5, 0.5])) < -34.0


@pytest.mark.parametrize(
    ("log_prior", "message"),
    [
        (None, r"^for all K from.*must be a callable"),
        ({1: -1.0, 2: -2.0}, r"^for all K from.*must be a callable"),
        (
            lambda ks: {k: -math.log(k + 1) for k in ks},
            r"^the prior weights.*sum to.*pass logarithms",
        ),
        (
            lambda ks: {k: -math.log(len(ks)) for k in ks},
            r"may not depend on how many.*are asked for",
        ),
    ],
)
def test_a_prior_of_all_numbers_is_one(log_prior, message):
    with pytest.raises(ValueError, match=message):
        nt.mixtures.select_num_components(
            KEY,
            np.zeros((40, 1)),
            FAMILIES["unit"],
            num_components=None,
            log_prior=log_prior,
        )


def test_dyadic_weights_are_a_prior_of_all_numbers():
    np.testing.assert_allclose(
        check_countable_prior(1024, nt.dyadic)[[0, 1023]],
        [math.log(0.5), -1024 * math.log(2)],
    )


def test_numbers_without_an_end_are_refused():
    with pytest.raises(ValueError, match="give None for all K from 1 up"):
        nt.mixtures.select_num_components(
            KEY, np.zeros((4, 1)), FAMILIES["unit"], num_components=itertools.count(1)
        )
    with pytest.raises(ValueError, match="for select_num_components alone"):
        nt.mixtures.num_components_path(
            KEY, np.zeros((4, 1)), FAMILIES["unit"], num_components=None
        )


def number_found(criterion, patience):
    """The K at which growing with this patience ends up."""
    best = 0
    for k, value in enumerate(criterion):
        best = k if value > criterion[best] else best
        if k - best >= patience:
            break
    return best + 1


@pytest.mark.slow
def test_six_in_succession_are_enough_on_a_grid():
    # The numbers of the page on theory: about the points of a grid clusters pay several at once, or not at all.
    found = dict.fromkeys((2, 4, PATIENCE), 0)
    centres = np.array(list(itertools.product(range(4), repeat=2)), float)
    for seed in range(100, 112):
        rng = np.random.default_rng(seed)
        x = centres[rng.integers(16, size=300)] + 0.12 * rng.normal(size=(300, 2))
        for family in (
            nt.mixtures.components.gaussian,
            nt.mixtures.components.diagonal_gaussian,
        ):
            component = family(2, **nt.mixtures.components.scaled_to(x))
            options = {
                "num_components": range(1, 33),
                "num_restarts": 16,
                "num_draws": 20,
            }
            choice = select(x, component, **options)
            for patience in found:
                found[patience] += (
                    number_found(choice.columns["criterion"], patience)
                    == choice.selected
                )
    assert found[PATIENCE] >= 23
    assert found[2] < found[4] <= found[PATIENCE]


@pytest.mark.full
def test_a_restart_of_maximum_likelihood_that_falls_in_single_precision_does_not_end_a_selection():
    x = np.random.default_rng(0).normal(size=(300, 2))
    x[:150] += 4.0
    selection = nt.mixtures.select_num_components(
        KEY, x, nt.mixtures.components.gaussian(2), num_components=None
    )
    assert selection.selected == 2
    assert np.isfinite(selection.columns["bic"]).all()
