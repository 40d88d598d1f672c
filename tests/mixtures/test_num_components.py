"""The number of components by the penalised ELBO, and its path over alpha."""

import math
from types import SimpleNamespace

import jax
import matplotlib
import numpy as np
import pytest

matplotlib.use("agg")

import matplotlib.pyplot as plt

import numpyro_tempered as nt
from numpyro_tempered.mixtures.comparison import criterion_columns
from numpyro_tempered.report.arviz import group, group_names

ORDERS = [1, 2, 3]
COMPONENT = nt.mixtures.components.known_variance(1, prior_scale=5.0)
OPTIONS = {"num_components": ORDERS, "num_restarts": 4, "num_draws": 40}


@pytest.fixture(scope="module")
def x():
    rng = np.random.default_rng(11)
    return (np.repeat([-4.0, 0.0, 4.0], 50) + rng.normal(size=150))[:, None]


@pytest.fixture(scope="module")
def choice(x):
    return nt.mixtures.select_num_components(
        jax.random.key(0), x, COMPONENT, alpha=0.5, **OPTIONS
    )


@pytest.fixture(scope="module")
def path(x):
    return nt.mixtures.num_components_path(
        jax.random.key(0), x, COMPONENT, alphas=[1.0, 0.02, 0.5], **OPTIONS
    )


@pytest.mark.full
def test_the_true_number_is_selected(choice):
    assert choice.selected == 3
    assert choice.fit is choice.fits[3]
    assert choice.fit.num_occupied == 3


@pytest.mark.full
def test_the_columns_add_up(choice):
    table = nt.table(choice)
    assert table.index.tolist() == ORDERS
    np.testing.assert_allclose(table["criterion"], table["elbo"] + table["log_prior"])
    np.testing.assert_allclose(table["log_prior"], [-k * math.log(2.0) for k in ORDERS])
    np.testing.assert_allclose(
        table["elbo"], 0.5 * table["expected_log_lik"] - table["kl"]
    )
    np.testing.assert_allclose(table["weight"].sum(), 1.0)
    assert (
        table["rank"].tolist() == np.argsort(np.argsort(-table["criterion"])).tolist()
    )
    # Equal for one component, but for rounding.
    assert np.all(table["objective"] <= table["elbo"] + 1e-9)
    assert np.all(table["converged"])
    np.testing.assert_array_equal(nt.table(choice.data), table)


@pytest.mark.full
def test_one_component_is_exact(choice, x):
    # Conjugate: F is the tempered evidence, and E1 has no gap to it.
    table = nt.table(choice)
    alpha, n, total, squares = 0.5, len(x), x.sum(), np.square(x).sum()
    precision = 1 / 25.0 + alpha * n
    evidence = (
        -0.5 * alpha * (n * math.log(2 * math.pi) + squares)
        - 0.5 * math.log(25.0 * precision)
        + 0.5 * (alpha * total) ** 2 / precision
    )
    np.testing.assert_allclose(table.loc[1, "objective"], evidence, rtol=1e-6)
    np.testing.assert_allclose(table.loc[1, "elbo"], evidence, rtol=1e-6)


@pytest.mark.full
def test_baselines_are_those_of_maximum_likelihood(choice, x):
    table = nt.table(choice)
    assert table["bic"].idxmin() == 3
    assert table["icl"].idxmin() == 3
    np.testing.assert_allclose(
        table.loc[1, "log_lik"],
        -0.5 * (150 * math.log(2 * math.pi) + 150 * x.var()),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        table["bic"], -2 * table["log_lik"] + (2 * np.array(ORDERS) - 1) * math.log(150)
    )


@pytest.mark.full
def test_the_result_is_arviz_data_of_the_selected_fit(choice):
    assert {
        "model_comparison",
        "posterior",
        "untempered_log_likelihood",
        "observed_data",
    } <= set(group_names(choice.data))
    assert choice.data.attrs["selected"] == 3
    posterior = group(choice.data, "posterior")
    assert posterior["weights"].shape == (1, 1000, 3)
    np.testing.assert_allclose(
        np.sort(posterior["loc"].mean(("chain", "draw")).values[:, 0]),
        [-4.0, 0.0, 4.0],
        atol=0.5,
    )


@pytest.mark.full
def test_the_orders_of_labels_count_in_the_criterion():
    bound = SimpleNamespace(value=-10.0, se=0.1)
    same = {
        "bound": bound,
        "spread": 0.0,
        "kl": 1.0,
        "num_best": 2,
        "objective": -11.0,
        "alpha": 0.5,
    }
    fits = {
        k: SimpleNamespace(num_components=k, num_occupied=n, converged=True, **same)
        for k, n in ((1, 1), (4, 2))
    }
    log_weights = np.log([0.5, 0.25])
    plain, counted = (
        criterion_columns(fits, log_weights, labels) for labels in (False, True)
    )
    np.testing.assert_allclose(plain["criterion"], -10.0 + log_weights)
    # Two of four components hold data: 4! / 2! orders.
    np.testing.assert_allclose(counted["log_labels"], [0.0, np.log(12.0)])
    np.testing.assert_allclose(
        counted["criterion"], plain["criterion"] + [0.0, np.log(12.0)]
    )
    assert (plain["rank"].tolist(), counted["rank"].tolist()) == ([0, 1], [1, 0])
    np.testing.assert_allclose(plain["expected_log_lik"], -18.0)


@pytest.mark.full
def test_uncertain_says_that_the_error_exceeds_the_margin(choice):
    table = nt.table(choice)
    assert table["num_best"].tolist() == [fit.num_best for fit in choice.fits.values()]
    first, second = np.sort(table["criterion"])[::-1][:2]
    margin = np.where(table["rank"] == 0, first - second, first - table["criterion"])
    error = np.where(table["num_best"] < 2, table["spread"], 0.0) + 2 * table["se"]
    np.testing.assert_array_equal(table["uncertain"], error > margin)
    assert choice.uncertain == bool(table["uncertain"][table["rank"] < 2].any())


@pytest.mark.full
def test_labels_add_their_permutations(choice, x):
    labelled = nt.mixtures.select_num_components(
        jax.random.key(0),
        x,
        COMPONENT,
        alpha=0.5,
        label_multiplicity=True,
        baselines=False,
        **OPTIONS,
    )
    table = nt.table(labelled)
    occupied = table["num_occupied"].to_numpy()
    expected = [
        math.log(math.perm(k, int(o))) for k, o in zip(ORDERS, occupied, strict=True)
    ]
    np.testing.assert_allclose(table["log_labels"], expected, atol=1e-12)
    np.testing.assert_allclose(
        table["criterion"], table["elbo"] + table["log_labels"] + table["log_prior"]
    )
    assert "bic" not in table
    assert "log_labels" not in nt.table(choice)


@pytest.mark.full
def test_prior_weights_can_turn_the_choice(x):
    # Not less than 1 in e^200 for the true number, and next to nothing for it.
    log_prior = {1: -1.0, 2: -1.0, 3: -400.0}
    turned = nt.mixtures.select_num_components(
        jax.random.key(0),
        x,
        COMPONENT,
        alpha=0.5,
        log_prior=log_prior,
        baselines=False,
        **OPTIONS,
    )
    assert turned.selected == 2


@pytest.mark.full
def test_weights_count_rows(x):
    weight = np.repeat([1.0, 1.0, 0.0], 50)
    choice = nt.mixtures.select_num_components(
        jax.random.key(0), x, COMPONENT, alpha=1.0, sample_weight=weight, **OPTIONS
    )
    assert choice.selected == 2
    assert nt.table(choice)["bic"].idxmin() == 2


@pytest.mark.full
def test_the_path_falls_with_alpha(path):
    found = group(path, "num_components_path")
    assert found["alpha"].values.tolist() == [0.02, 0.5, 1.0]
    assert found["selected"].values.tolist()[1:] == [3, 3]
    # Three data's worth of likelihood do not pay for three components.
    assert found["selected"].values[0] < 3
    assert found["criterion"].dims == ("alpha", "num_components")


@pytest.mark.full
def test_the_path_agrees_with_a_selection(path, choice):
    found = group(path, "num_components_path").sel(alpha=0.5)
    table = nt.table(choice)
    # The same optima from other starts; what is empty converges slowly.
    np.testing.assert_allclose(found["objective"], table["objective"], atol=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_components": []}, "at least one"),
        ({"num_components": [0, 1]}, r"positive integers.*at least one, got"),
        ({"num_components": [1, 2.0]}, r"positive integers.*at least one, got"),
        ({"num_components": [2, 2]}, "twice"),
        ({"log_prior": {1: 0.0}}, r"log_prior has models.*the fits are"),
        (
            {"log_prior": dict.fromkeys(ORDERS, 0.0)},
            r"^the prior weights.*sum to 3.*pass logarithms",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(x, change, message):
    with pytest.raises(ValueError, match=message):
        nt.mixtures.select_num_components(
            jax.random.key(0), x, COMPONENT, **{**OPTIONS, **change}
        )


@pytest.mark.full
def test_a_selection_needs_the_bound(x):
    with pytest.raises(ValueError, match="leaves out E1"):
        nt.mixtures.select_num_components(
            jax.random.key(0),
            x,
            COMPONENT,
            baselines=False,
            num_components=[1],
            num_draws=0,
        )


@pytest.mark.parametrize("alphas", [[], [0.5, 0.5]])
def test_the_alphas_of_a_path_differ(x, alphas):
    with pytest.raises(
        ValueError, match=r"^alphas must be.*different numbers, at least one"
    ):
        nt.mixtures.num_components_path(
            jax.random.key(0), x, COMPONENT, alphas=alphas, **OPTIONS
        )


@pytest.mark.full
def test_mixtures_compare_with_other_models(choice, x):
    fits = {k: choice.fits[k].on(x, rng_key=jax.random.key(k)) for k in (2, 3)}
    data = nt.compare(fits, log_prior=nt.dyadic, num_samples=20)
    assert data.attrs["selected"] == 3
    table, own = nt.table(data), nt.table(choice)
    np.testing.assert_allclose(table.loc[[2, 3], "elbo"], own.loc[[2, 3], "elbo"])
    # A fit that does not hold its data enters as it is.
    bare = nt.table(
        nt.compare({k: choice.fits[k] for k in (2, 3)}, log_prior=nt.dyadic)
    )
    np.testing.assert_array_equal(bare["elbo"], table["elbo"])


@pytest.mark.full
def test_the_path_is_drawn(path):
    left, right = nt.plots.plot_num_components_path(path)
    assert [line.get_label() for line in left.get_lines()[1:]] == [
        "selected",
        "of these occupied",
    ]
    np.testing.assert_array_equal(
        left.get_lines()[1].get_ydata(),
        group(path, "num_components_path")["selected"].values,
    )
    assert len(right.get_lines()) == 3
    for line in right.get_lines():
        assert line.get_ydata().max() == 0.0
    plt.close("all")
    with pytest.raises(ValueError, match="two axes"):
        nt.plots.plot_num_components_path(path, axes=plt.figure().subplots())
    plt.close("all")


@pytest.mark.full
def test_another_result_is_not_a_path(choice):
    with pytest.raises(ValueError, match="needs the result of num_components_path"):
        nt.plots.plot_num_components_path(choice.data)


@pytest.mark.full
def test_a_mixture_of_one_column_is_drawn(choice, x):
    ax = nt.plots.plot_mixture(choice.fit, x)
    labels = ax.get_legend_handles_labels()[1]
    assert {"data", "predictive", "components"} <= set(labels)
    curve = next(line for line in ax.get_lines() if line.get_label() == "predictive")
    np.testing.assert_allclose(
        np.trapezoid(curve.get_ydata(), curve.get_xdata()), 1.0, atol=0.05
    )
    plt.close("all")


@pytest.mark.full
def test_counts_are_drawn_as_masses():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.poisson(2.0, 60), rng.poisson(15.0, 60)])[:, None].astype(
        float
    )
    fit = nt.mixtures.fit(
        jax.random.key(0),
        x,
        nt.mixtures.components.poisson(1),
        num_components=2,
        num_draws=0,
    )
    ax = nt.plots.plot_mixture(fit, x)
    assert ax.get_ylabel() == "predictive mass"
    curve = next(line for line in ax.get_lines() if line.get_label() == "predictive")
    np.testing.assert_array_equal(curve.get_xdata(), np.arange(x.min(), x.max() + 1))
    assert 0.9 < curve.get_ydata().sum() <= 1.0
    plt.close("all")


@pytest.mark.full
def test_two_columns_are_drawn_with_contours():
    rng = np.random.default_rng(0)
    x = np.repeat([[-4.0, 0.0], [4.0, 0.0]], 40, axis=0) + rng.normal(size=(80, 2))
    component = nt.mixtures.components.known_variance(2, prior_scale=5.0)
    fit = nt.mixtures.fit(
        jax.random.key(0), x, component, num_components=2, num_draws=0
    )
    ax = nt.plots.plot_mixture(fit, x)
    # Two clusters of points and one set of contours.
    assert (
        sum(len(c.get_offsets()) for c in ax.collections if len(c.get_offsets()) > 2)
        == 80
    )
    assert ax.get_xlabel() == "column 0"
    for columns in ((0, 0), (0, 2)):
        with pytest.raises(ValueError, match="two different ones"):
            nt.plots.plot_mixture(fit, x, columns=columns)
    plt.close("all")
