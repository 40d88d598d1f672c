"""Families of components and their numbers in one comparison."""

import itertools
import math
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from selection_cases import FAMILIES, KEY, same_fits, select, three_clusters
from sklearn.mixture import GaussianMixture

matplotlib.use("agg")

import matplotlib.pyplot as plt

import numpyro_tempered as nt
from numpyro_tempered.mixtures import orders
from numpyro_tempered.mixtures import select as selection
from numpyro_tempered.mixtures.comparison import comparison_dataset
from numpyro_tempered.mixtures.measure import measures_of
from numpyro_tempered.report.arviz import assemble, group
from numpyro_tempered.select.ranking import check_pair_prior

KINDS = {"spherical": "spherical", "diagonal": "diag", "tied": "tied", "full": "full"}


@pytest.fixture(scope="module")
def x():
    return three_clusters()


@pytest.fixture(scope="module")
def choice(x):
    return select(x, FAMILIES, num_components=[1, 2, 3, 4], alpha=0.5)


@pytest.mark.full
def test_each_family_has_the_fits_of_a_call_of_its_own(choice, x):
    assert list(choice.fits) == list(itertools.product(FAMILIES, [1, 2, 3, 4]))
    for name, family in FAMILIES.items():
        alone = select(x, family, num_components=[1, 2, 3, 4], alpha=0.5)
        assert alone.stopped is None
        for k, fit in alone.fits.items():
            same_fits(choice.fits[name, k], fit)


@pytest.mark.full
def test_the_table_ranks_all_pairs(choice):
    assert choice.selected == ("unit", 3)
    assert choice.fit is choice.fits["unit", 3]
    assert choice.data.attrs["selected"] == 3
    assert choice.data.attrs["selected_family"] == "unit"
    found = group(choice.comparison, "model_comparison")
    assert dict(found.sizes) == {"family": 3, "num_components": 4}
    assert found["rank"].dtype.kind == "i"
    weights = np.exp(found["log_prior"].values)
    np.testing.assert_allclose(weights, np.tile(0.5 ** np.arange(1, 5) / 3, (3, 1)))
    assert weights.sum() <= 1.0
    table = nt.table(choice)
    assert table.index[0] == ("unit", 3)
    assert table["rank"].tolist() == list(range(12))
    assert table["criterion"].is_monotonic_decreasing
    np.testing.assert_allclose(table["criterion"], table["elbo"] + table["log_prior"])
    np.testing.assert_allclose(table["weight"].sum(), 1.0)
    by_family = table["criterion"].unstack("family")
    assert by_family.shape == (4, 3)
    assert by_family.loc[3, "unit"] == table["criterion"].iloc[0]
    np.testing.assert_array_equal(nt.table(choice.data)["rank"], table["rank"])


@pytest.mark.full
def test_numbers_of_components_of_the_other_groups_are_no_families(choice):
    one = choice.data.sel(component=0)
    assert group(one, "posterior")["loc"].ndim == 3


@pytest.mark.full
def test_pairs_are_drawn_best_first(choice):
    ax = nt.plots.plot_comparison(choice)
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == [str(pair) for pair in nt.table(choice).index]
    plt.close("all")


@pytest.mark.full
def test_the_order_of_a_mapping_does_not_matter(choice, x):
    turned = select(
        x, dict(reversed(FAMILIES.items())), num_components=[1, 2, 3, 4], alpha=0.5
    )
    assert turned.selected == choice.selected
    first, second = nt.table(choice), nt.table(turned)
    assert first.index.tolist() == second.index.tolist()
    np.testing.assert_allclose(first["criterion"], second["criterion"])


@pytest.mark.full
def test_the_prior_of_pairs_can_turn_the_choice(choice, x):
    log_prior = dict.fromkeys(choice.fits, -3.0) | {
        ("unit", 3): -300.0,
        ("narrow", 3): -300.0,
    }
    turned = select(
        x, FAMILIES, num_components=[1, 2, 3, 4], alpha=0.5, log_prior=log_prior
    )
    assert turned.selected != ("unit", 3)
    assert nt.table(turned)["log_prior"].loc[[("unit", 3)]].tolist() == [-300.0]


@pytest.mark.full
def test_weights_and_labels_are_those_of_all_families(choice, x):
    options = {
        "label_multiplicity": True,
        "sample_weight": np.repeat([1.0, 1.0, 0.0], 50),
        "baselines": True,
    }
    labelled = select(x, FAMILIES, num_components=[1, 2, 3], **options)
    assert labelled.selected == ("unit", 2)
    table = nt.table(labelled)
    assert table["log_labels"].loc[("unit", 2)] == pytest.approx(math.log(2.0))
    assert table["bic"].idxmin() == ("unit", 2)


# A line of each kind; the other columns of the plane are drawn about it.
COVARIANCES = {
    "spherical": [np.eye(2), 0.1 * np.eye(2)],
    "diagonal": [np.diag([4.0, 0.1]), np.diag([0.1, 4.0])],
    "tied": [np.array([[1.0, 0.9], [0.9, 1.0]])] * 2,
    "full": [np.array([[1.0, 0.9], [0.9, 1.0]]), np.array([[1.0, -0.9], [-0.9, 1.0]])],
}


def shapes_of(x):
    scale, dim = nt.mixtures.components.scaled_to(x), x.shape[1]
    return {
        "spherical": nt.mixtures.components.spherical_gaussian(dim, **scale),
        "diagonal": nt.mixtures.components.diagonal_gaussian(dim, **scale),
        "tied": nt.mixtures.components.tied_gaussian(dim, **scale),
        "full": nt.mixtures.components.gaussian(dim, **scale),
    }


def clusters(kind):
    rng, centres = np.random.default_rng(5), ([-3.0, 0.0], [3.0, 0.0])
    return np.concatenate(
        [
            rng.multivariate_normal(m, c, size=150)
            for m, c in zip(centres, COVARIANCES[kind], strict=True)
        ]
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        each if each == "tied" else pytest.param(each, marks=pytest.mark.slow)
        for each in COVARIANCES
    ],
)
def test_the_shape_of_the_clusters_is_selected(kind):
    x = clusters(kind)
    choice = select(x, shapes_of(x), num_components=range(1, 4))
    assert choice.selected == (kind, 2)


@pytest.mark.full
def test_baselines_are_those_of_scikit_learn():
    x = clusters("full")
    table = nt.table(select(x, shapes_of(x), num_components=[1, 2], baselines=True))
    for name, kind in KINDS.items():
        for k in (1, 2):
            model = GaussianMixture(
                k,
                covariance_type=kind,
                tol=1e-9,
                reg_covar=1e-12,
                max_iter=5000,
                n_init=5,
                random_state=0,
            )
            assert table["bic"].loc[(name, k)] == pytest.approx(
                model.fit(x).bic(x), abs=0.05
            )


@pytest.mark.parametrize(
    ("component", "error", "message"),
    [
        ({}, ValueError, r"^component is an.*empty mapping.*component, by its name"),
        ({1: FAMILIES["unit"]}, TypeError, "names of components are strings, got 1"),
        (
            {"a": nt.mixtures.components.gaussian},
            TypeError,
            "component 'a' is a function; expected a component",
        ),
        (
            {"a": FAMILIES["unit"], "b": nt.mixtures.components.known_variance(2)},
            ValueError,
            r"component 'b': known_variance: the data have shape \(4, 1\)",
        ),
        (
            {"a": FAMILIES["unit"], "b": nt.mixtures.components.poisson(1)},
            ValueError,
            r"of column 0 the one is a density on the line, the other a probability.*call of their own",
        ),
        (
            {
                "a": nt.mixtures.components.multinomial(1),
                "b": nt.mixtures.components.poisson(1),
            },
            ValueError,
            r"a probability given the row's total, the other a probability.*call of their own",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(component, error, message):
    with pytest.raises(error, match=message):
        nt.mixtures.select_num_components(
            KEY, np.array([[0.0], [1.0], [2.0], [5.0]]), component
        )


def test_missing_entries_name_the_family_that_does_not_take_them():
    x = np.array([[0.0, 1.0], [np.nan, 2.0], [3.0, 1.0]])
    families = {
        "each": nt.mixtures.components.poisson(2),
        "given totals": nt.mixtures.components.multinomial(2),
    }
    with pytest.raises(
        ValueError,
        match="component 'given totals': multinomial: column 0 has missing entries",
    ):
        nt.mixtures.select_num_components(KEY, x, families)


def test_a_path_and_a_fit_take_one_family():
    with pytest.raises(
        TypeError,
        match=r"^component is.*only select_num_components compares several.*give one of them",
    ):
        nt.mixtures.num_components_path(KEY, np.zeros((3, 1)), FAMILIES)
    with pytest.raises(
        TypeError,
        match=r"^component is.*only select_num_components compares several.*give one of them",
    ):
        nt.mixtures.fit(KEY, np.zeros((3, 1)), FAMILIES, num_components=1)


def test_measures_follow_the_columns():
    parts = {
        "size": nt.mixtures.components.gaussian(1),
        "votes": nt.mixtures.components.multinomial(2),
        "kind": nt.mixtures.components.categorical([2]),
    }
    product = nt.mixtures.components.product(
        parts, {"size": [2], "votes": [0, 3], "kind": [1]}
    )
    line, mass, given = (
        "a density on the line",
        "a probability",
        "a probability given the row's total",
    )
    assert measures_of(product) == (given, mass, line, given)
    for family in (
        nt.mixtures.components.exponential(2),
        *shapes_of(np.array([[0.0, 1.0], [1.0, 0.0]])).values(),
    ):
        assert measures_of(family) == (line, line)
    for family in (
        nt.mixtures.components.bernoulli(2),
        nt.mixtures.components.poisson(2),
    ):
        assert measures_of(family) == (mass, mass)


def test_prior_weights_of_pairs_are_a_probability():
    names, numbers = ["a", "b", "c"], [1, 2]
    shared = check_pair_prior(names, numbers, nt.dyadic)
    np.testing.assert_allclose(np.exp(shared), np.tile([1 / 6, 1 / 12], (3, 1)))
    np.testing.assert_allclose(
        np.exp(check_pair_prior(names, numbers, None)), np.full((3, 2), 1 / 6)
    )
    by_pair = {
        pair: -2.0 - i for i, pair in enumerate(itertools.product(names, numbers))
    }
    np.testing.assert_array_equal(
        check_pair_prior(names, numbers, by_pair), [[-2, -3], [-4, -5], [-6, -7]]
    )
    with pytest.raises(ValueError, match=r"log_prior has models.*the fits are"):
        check_pair_prior(names, numbers, {("a", 1): -1.0})
    with pytest.raises(
        ValueError, match=r"^the prior weights.*sum to 6.*pass logarithms"
    ):
        check_pair_prior(names, numbers, dict.fromkeys(by_pair, 0.0))


@pytest.mark.parametrize(
    ("families", "log_prior", "weights"),
    [
        (
            ["a", "b"],
            {("a", 1): -2.0, ("a", 2): -3.0, ("b", 1): -4.0, ("b", 2): -5.0},
            [-2.0, -3.0, -4.0, -5.0],
        ),
        (["a", "b"], nt.dyadic, np.log([1 / 4, 1 / 8, 1 / 4, 1 / 8])),
        ([None], {1: -2.0, 2: -3.0}, [-2.0, -3.0]),
    ],
    ids=["pairs", "shared", "one family"],
)
def test_the_prior_is_one_of_pairs_where_families_are_several(
    families, log_prior, weights, monkeypatch
):
    monkeypatch.setattr(
        orders,
        "fit_orders",
        lambda key, x, component, numbers, **_: (dict.fromkeys(numbers), None),
    )
    components = {name: nt.mixtures.components.gaussian(1) for name in families}
    found = orders.fit_models(
        KEY, None, components, {}, [1, 2], log_prior, label_multiplicity=False
    )
    assert found[0] == {name: {1: None, 2: None} for name in families}
    np.testing.assert_allclose(found[1], weights)


def test_maximum_likelihood_beside_the_fits_is_by_family_and_number(monkeypatch):
    calls = []

    def em(key, x, component, *, num_components, **settings):
        calls.append((component.name, num_components, settings))
        if num_components == 2:
            raise FloatingPointError
        return SimpleNamespace(
            log_likelihood=-num_components,
            bic=10.0 * num_components,
            icl=20.0 * num_components,
        )

    monkeypatch.setattr(selection, "em", em)
    families = {
        "a": nt.mixtures.components.gaussian(1),
        "b": nt.mixtures.components.gaussian(1)._replace(maximum_likelihood=None),
    }
    fits = {"a": dict.fromkeys((1, 2, 3)), "b": {1: None}}
    options = {"num_restarts": 4, "sample_weight": "w", "alpha": 0.5}
    columns = selection.baseline_columns(KEY, None, families, fits, options)
    np.testing.assert_array_equal(columns["log_lik"], [-1.0, np.nan, -3.0, np.nan])
    np.testing.assert_array_equal(columns["bic"], [10.0, np.nan, 30.0, np.nan])
    np.testing.assert_array_equal(columns["icl"], [20.0, np.nan, 60.0, np.nan])
    assert [number for _, number, _ in calls] == [1, 2, 3]
    assert all(
        settings == {"num_restarts": 4, "sample_weight": "w"} for *_, settings in calls
    )


def test_a_table_has_the_pairs_that_there_are():
    columns = {"rank": np.array([2, 1, 0]), "converged": np.array([True, False, True])}
    data = comparison_dataset(columns, [("a", 1), ("b", 1), ("b", 2)], {})
    assert math.isnan(data["rank"].sel(family="a", num_components=2).item())
    table = nt.table(assemble({"model_comparison": data}, {}))
    assert table.index.tolist() == [("b", 2), ("b", 1), ("a", 1)]
    assert table["rank"].tolist() == [0, 1, 2]
    assert [kind.kind for kind in table.dtypes] == ["i", "b"]
    assert table[table["converged"]].index.tolist() == [("b", 2), ("a", 1)]


CHOICES = {
    # Ranks and errors by K or family and K: what is selected, whether an error matters, whether it is the last.
    "in the middle": (
        {None: [1, 2, 3]},
        [1, 0, 2],
        [False, False, True],
        (2, None, False, False),
    ),
    "at the end": ({None: [1, 2]}, [1, 0], [False, False], (2, None, False, True)),
    "a runner-up with an error": (
        {None: [1, 2, 3]},
        [0, 1, 2],
        [False, True, False],
        (1, None, True, False),
    ),
    "of families": (
        {"a": [1, 2], "b": [1, 2, 3]},
        [4, 3, 1, 0, 2],
        [True] * 2 + [False] * 3,
        (2, "b", False, False),
    ),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_best_rank_is_selected_with_what_is_known_of_it(case, monkeypatch):
    orders_of, ranks, errors, expected = CHOICES[case]
    fits = {
        name: {k: SimpleNamespace(alpha=0.5, name=(name, k)) for k in ks}
        for name, ks in orders_of.items()
    }
    stopped = {name: f"{name} ends" for name in fits if name == "b"}
    log_weights = np.log(np.full(len(ranks), 1.0 / len(ranks)))
    asked = []
    monkeypatch.setattr(selection, "check_families", lambda components, x, named: {})
    monkeypatch.setattr(
        selection,
        "fit_models",
        lambda *args, **options: (
            asked.append((args, options)) or (fits, log_weights, stopped)
        ),
    )
    columns = {"rank": np.array(ranks), "uncertain": np.array(errors)}
    monkeypatch.setattr(selection, "criterion_columns", lambda *_: dict(columns))
    monkeypatch.setattr(
        selection, "baseline_columns", lambda *_: {"bic": np.arange(float(len(ranks)))}
    )
    family = nt.mixtures.components.gaussian(1)
    component = family if None in fits else dict.fromkeys(fits, family)
    choice = nt.mixtures.select_num_components(
        KEY,
        None,
        component,
        num_components=[1, 2, 3],
        alpha=0.5,
        num_restarts=3,
        max_iter=7,
    )
    number, name, uncertain, at_end = expected
    selected = number if name is None else (name, number)
    assert (choice.selected, choice.uncertain, choice.at_end) == (
        selected,
        uncertain,
        at_end,
    )
    assert choice.fit.name == (name, number)
    assert list(choice.fits) == [
        (n, k) if None not in fits else k for n, each in fits.items() for k in each
    ]
    assert (choice.stopped or {}) == stopped
    (args, options), prior = asked[0], choice.attrs["prior_weights"]
    assert (args[0] is KEY, list(args[4])) == (True, [1, 2, 3])
    options = {key: options[key] for key in ("alpha", "num_restarts", "max_iter")}
    assert options == {"alpha": 0.5, "num_restarts": 3, "max_iter": 7}
    np.testing.assert_allclose(prior, np.full(len(ranks), 1.0 / len(ranks)))
    attrs = {
        key: choice.attrs.get(key)
        for key in ("selected", "selected_family", "uncertain", "at_end")
    }
    assert attrs == {
        "selected": number,
        "selected_family": name,
        "uncertain": int(uncertain),
        "at_end": int(at_end),
    }
    table = nt.table(choice.comparison)
    assert table["rank"].idxmin() == ((name, number) if name else number)
    assert table["bic"].notna().all()


def test_the_end_of_the_default_numbers_is_told(monkeypatch):
    fits = {None: {k: SimpleNamespace(alpha=1.0) for k in selection.ORDERS}}
    monkeypatch.setattr(
        selection, "fit_models", lambda *_, **__: (fits, np.log(np.full(8, 1 / 8)), {})
    )
    columns = {"rank": np.arange(8)[::-1], "uncertain": np.zeros(8, bool)}
    monkeypatch.setattr(selection, "criterion_columns", lambda *_: columns)
    with pytest.warns(
        UserWarning,
        match=r"^K = 8, the largest that was compared, is selected.*num_components=None",
    ):
        choice = nt.mixtures.select_num_components(
            KEY, None, nt.mixtures.components.gaussian(1), baselines=False
        )
    assert choice.at_end
