"""The regret ledger as ArviZ data, its table and its picture."""

import json

import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

import numpyro_tempered as nt
from numpyro_tempered import bounds
from numpyro_tempered.gaussian.families import MeanField
from numpyro_tempered.online import Box, Losses
from numpyro_tempered.online import rates as schedules
from numpyro_tempered.online.streams.average import average, with_average
from numpyro_tempered.report.arviz import assemble, dataset, group, group_names
from numpyro_tempered.theory import hindsight
from numpyro_tempered.theory.bounds.ledger import MAX_ROUNDS, _paired, regret_ledger

matplotlib.use("agg")
HINGE = nt.expectations.hinge()
plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def some_losses(shape, seed=0):
    rng = np.random.default_rng(seed)
    at_mean = rng.uniform(size=shape)
    return Losses(at_mean, at_mean + rng.uniform(size=shape))


def no_ledger():
    return assemble({"posterior": dataset({"a": np.ones(3)})}, {})


def some_hindsight(num_rounds, seed=9):
    losses = 0.5 * np.random.default_rng(seed).uniform(size=num_rounds)
    return hindsight.Hindsight(
        np.array([1.0, -2.0]), losses.sum(), losses.sum() - 0.1, losses, np.full(2, 5.0)
    )


def test_sums_regrets_and_bounds_by_round():
    losses = {
        "sva": some_losses(6, 1),
        "svb": some_losses(6, 2),
        "ngvi": some_losses(6, 3),
    }
    best = some_hindsight(6)
    rounds = np.arange(1, 7)
    comparator = np.cumsum(np.full(6, 0.3))
    given = {
        "svb": bounds.svb(rounds, lipschitz=1.0, diameter=2.0),
        "sva": bounds.sva(
            rounds,
            step_size=0.5,
            lipschitz=1.0,
            strong_convexity=1.0,
            kl=2.0,
            comparator=comparator,
        ),
    }
    data = regret_ledger(losses, best, given)
    found = group(data, "regret")
    assert list(found["rule"].values) == ["sva", "svb", "ngvi"]
    np.testing.assert_array_equal(found["round"], rounds)
    fixed = np.cumsum(best.losses)
    for name, own in losses.items():
        row = found.sel(rule=name)
        np.testing.assert_allclose(row["cumulative_at_mean"], np.cumsum(own.at_mean))
        np.testing.assert_allclose(row["cumulative_expected"], np.cumsum(own.expected))
        np.testing.assert_allclose(row["average"], np.cumsum(own.at_mean) / rounds)
        np.testing.assert_allclose(row["regret"], np.cumsum(own.at_mean) - fixed)
        np.testing.assert_allclose(
            row["regret_expected"], np.cumsum(own.expected) - fixed
        )
        assert (int(row["taken"]), int(row["rejected"])) == (6, 0)
    np.testing.assert_allclose(found.sel(rule="svb")["bound"], 2 * np.sqrt(2 * rounds))
    np.testing.assert_allclose(
        found.sel(rule="svb")["cumulative_bound"], 2 * np.sqrt(2 * rounds) + fixed
    )
    np.testing.assert_allclose(
        found.sel(rule="sva")["cumulative_bound"], given["sva"].value
    )
    np.testing.assert_allclose(
        found.sel(rule="sva")["bound"], given["sva"].value - fixed
    )
    assert np.all(np.isnan(found.sel(rule="ngvi")["bound"]))
    kept = group(data, "hindsight")
    np.testing.assert_array_equal(kept["theta"], best.theta)
    np.testing.assert_allclose(kept["cumulative"], fixed)
    assert float(kept["lower"]) < float(kept["value"])
    assert json.loads(data.attrs["sources"]) == {
        "svb": "CA19, Theorem 3 (step corrected)",
        "sva": "CA19, Theorem 2",
    }
    assert set(json.loads(data.attrs["assumptions"])) == {"sva", "svb"}


def test_a_bound_for_the_last_round_stands_there_alone():
    data = regret_ledger(
        {"svb": some_losses(5)},
        some_hindsight(5),
        {"svb": bounds.svb(5, lipschitz=1.0, diameter=2.0)},
    )
    bound = group(data, "regret")["bound"].sel(rule="svb")
    assert np.all(np.isnan(bound[:-1]))
    np.testing.assert_allclose(bound[-1], 2 * np.sqrt(10))


def test_standard_errors_over_replications_are_paired():
    losses = {"a": some_losses((7, 5), 1), "b": some_losses((7, 5), 2)}
    several = [some_hindsight(5, seed) for seed in range(7)]
    data = regret_ledger(losses, several, reference="a")
    assert (data.attrs["standard_errors"], data.attrs["num_replications"]) == (
        "over replications",
        7,
    )
    found = group(data, "regret")
    sums = {name: np.cumsum(own.at_mean, axis=1) for name, own in losses.items()}
    fixed = np.cumsum([h.losses for h in several], axis=1)
    difference = sums["b"] - sums["a"]
    row = found.sel(rule="b")
    np.testing.assert_allclose(row["difference"], difference.mean(0))
    np.testing.assert_allclose(
        row["difference_se"], difference.std(0, ddof=1) / np.sqrt(7)
    )
    np.testing.assert_allclose(row["regret"], (sums["b"] - fixed).mean(0))
    np.testing.assert_allclose(
        row["regret_se"], (sums["b"] - fixed).std(0, ddof=1) / np.sqrt(7)
    )
    np.testing.assert_allclose(row["cumulative_at_mean"], sums["b"].mean(0))
    np.testing.assert_allclose(found.sel(rule="a")["difference_se"], 0.0, atol=1e-12)
    assert group(data, "hindsight")["theta"].dims == ("replication", "coefficient")


def test_standard_errors_over_rounds():
    losses = {"a": some_losses(50, 1), "b": some_losses(50, 2)}
    data = regret_ledger(losses, reference="a")
    assert data.attrs["standard_errors"] == "over rounds"
    row = group(data, "regret").sel(rule="b")
    d = losses["b"].at_mean - losses["a"].at_mean
    assert np.isnan(row["difference_se"][0])
    for t in (2, 10, 50):
        np.testing.assert_allclose(
            row["difference_se"].sel(round=t), np.sqrt(t) * d[:t].std(ddof=1), rtol=1e-9
        )
    assert "regret" not in group(data, "regret")
    assert "hindsight" not in group_names(data)


def test_the_standard_error_over_rounds_covers():
    # Rounds that are independent: the sum of 200 differences of mean .1 lies within two standard errors.
    differences = np.random.default_rng(0).exponential(0.1, (2000, 1, 200))
    total, se = _paired(differences, np.ones(differences.shape, bool))
    inside = np.abs(total[:, -1] - 20) < 2 * se[:, -1]
    # The share of a t distribution, less what the skewness of the exponential costs.
    assert abs(np.mean(inside) - 0.9545) < 5 * np.sqrt(0.9545 * 0.0455 / 2000)


def test_the_standard_error_of_large_differences_keeps_its_digits():
    differences = 1e8 + np.random.default_rng(0).normal(size=(1, 1, 200))
    _, se = _paired(differences, np.ones(differences.shape, bool))
    np.testing.assert_allclose(
        se[0, -1], np.sqrt(200) * differences.std(ddof=1), rtol=1e-6
    )


def test_rejected_rounds_count_for_nobody_and_void_the_bound():
    at_mean = np.array([1.0, np.nan, 2.0, np.inf])
    losses = {
        "a": Losses(at_mean, np.array([2.0, 7.0, 3.0, 7.0])),
        "b": Losses(np.ones(4), np.ones(4)),
    }
    best = some_hindsight(4)
    given = {
        name: bounds.svb(np.arange(1, 5), lipschitz=1.0, diameter=1.0)
        for name in losses
    }
    found = group(regret_ledger(losses, best, given), "regret")
    row = found.sel(rule="a")
    np.testing.assert_allclose(row["cumulative_at_mean"], [1, 1, 3, 3])
    np.testing.assert_allclose(row["cumulative_expected"], [2, 2, 5, 5])
    np.testing.assert_allclose(row["average"], [1, 1, 1.5, 1.5])
    np.testing.assert_allclose(
        row["regret"], np.cumsum([1 - best.losses[0], 0, 2 - best.losses[2], 0])
    )
    # In the rounds that both took.
    np.testing.assert_allclose(row["difference"], [0, 0, 1, 1])
    np.testing.assert_allclose(found.sel(rule="b")["difference"], 0.0)
    assert (int(row["taken"]), int(row["rejected"])) == (2, 2)
    assert np.all(np.isnan(row["bound"]))
    assert np.all(np.isfinite(found.sel(rule="b")["bound"]))


def test_long_streams_are_thinned_and_end_at_the_last_round():
    data = regret_ledger({"a": some_losses(10_000)})
    rounds = group(data, "regret")["round"].values
    assert len(rounds) <= MAX_ROUNDS
    assert (rounds[0], rounds[-1]) == (1, 10_000)
    assert np.all(np.diff(rounds) > 0)
    kept = group(regret_ledger({"a": some_losses(10)}, rounds=[10, 3]), "regret")
    np.testing.assert_array_equal(kept["round"], [3, 10])
    np.testing.assert_allclose(
        kept["cumulative_at_mean"][0, 0], some_losses(10).at_mean[:3].sum()
    )


def test_the_ledger_of_a_run():
    rng = np.random.default_rng(0)
    y = np.where(rng.uniform(size=(4, 60)) < 0.7, 1.0, -1.0)
    x, box, num_rounds = np.ones((60, 1)), Box(loc=1.0, scale=0.5), 60
    diameter = nt.bounds.diameter(box, 1)
    rate = nt.online.svb_rate(schedules.svb_constant(lipschitz=1.0, diameter=diameter))
    rules = {
        "svb": with_average(nt.online.svb(rate, box=box)),
        "ngvi": with_average(nt.online.ngvi()),
    }
    losses, averages, best = {}, {}, [hindsight.hinge(x, labels, box) for labels in y]
    for name, rule in rules.items():
        parts = []
        for labels in y:
            state = rule.init(MeanField(jnp.zeros(1), jnp.full(1, 0.5)))
            state, own = nt.online.run(rule, HINGE, state, x, labels)
            parts.append((own, average(state)))
        losses[name] = Losses(
            *(np.stack(rows) for rows in zip(*(own for own, _ in parts), strict=True))
        )
        averages[name] = np.stack([theta for _, theta in parts])
    given = {
        "svb": bounds.svb(
            np.arange(1, num_rounds + 1), lipschitz=1.0, diameter=diameter
        )
    }
    data = regret_ledger(losses, best, given, averages)
    table = nt.table(data)
    assert table.loc["svb", "regret"] < table.loc["svb", "bound"]
    np.testing.assert_allclose(
        table.loc["svb", "guarantee"], diameter * np.sqrt(2 / 60)
    )
    assert np.isnan(table.loc["ngvi", "guarantee"])
    assert list(table["average"]) == sorted(table["average"])
    assert data.attrs["reference"] == table.index[0]
    kept = group(data, "online_to_batch")["average"]
    assert kept.dims == ("rule", "replication", "coefficient")
    np.testing.assert_allclose(kept.sel(rule="svb"), averages["svb"])


def test_bounds_against_a_fixed_parameter_enter_the_ledger():
    rng = np.random.default_rng(0)
    x, num_rounds = np.ones((60, 1)), 60
    y = np.where(rng.uniform(size=60) < 0.7, 1.0, -1.0)
    prior, rounds = MeanField(jnp.zeros(1), jnp.full(1, 0.5)), np.arange(1, 61)
    kl = schedules.point_kl(num_rounds, 1)
    rate = schedules.sva_rate(num_rounds, kl=kl, lipschitz=1.0, strong_convexity=4.0)
    rule, best = nt.online.sva(rate), hindsight.hinge(x, y)
    _, losses = nt.online.run(rule, HINGE, rule.init(prior), x, y)
    given = {
        "sva": bounds.sva_point(
            rounds, step_size=rate, lipschitz=1.0, prior=prior, theta=best.theta
        )
    }
    data = group(regret_ledger({"sva": losses}, best, given), "regret").sel(rule="sva")
    np.testing.assert_allclose(data["bound"], given["sva"].value)
    assert np.all(data["regret"] <= data["bound"])
    np.testing.assert_allclose(
        data["cumulative_bound"], given["sva"].value + np.cumsum(best.losses)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: regret_ledger({}), r"at least one rule.*mapping from its name"),
        (
            lambda: regret_ledger({"a": np.ones(3)}),
            r"must be Losses.*returns them, got ndarray",
        ),
        (
            lambda: regret_ledger({"a": some_losses(3), "b": some_losses(4)}),
            r"one shape.*for all rules, got",
        ),
        (
            lambda: regret_ledger({"a": some_losses(3)}, some_hindsight(4)),
            "losses of 3 rounds",
        ),
        (
            lambda: regret_ledger({"a": some_losses((2, 3))}, [some_hindsight(3)] * 3),
            "one or 2",
        ),
        (
            lambda: regret_ledger({"a": some_losses(3)}, reference="b"),
            "reference must be one of",
        ),
        (
            lambda: regret_ledger({"a": some_losses(3)}, rounds=[4]),
            r"^rounds must lie from 1 to 3, got \[4\]",
        ),
        (
            lambda: regret_ledger({"a": some_losses(3)}, rounds=[0, 2]),
            r"^rounds must lie from 1 to 3, got \[0, 2\]",
        ),
        (
            lambda: regret_ledger({"a": some_losses(3)}, rounds=[]),
            r"^rounds must lie from 1 to 3, got \[\]",
        ),
        (
            lambda: regret_ledger(
                {"a": some_losses(3)}, averages={"a": np.ones((1, 1, 2))}
            ),
            r"^averages must have one shape \(d,\) or \(R, d\) for all rules, got",
        ),
        (
            lambda: regret_ledger({"a": some_losses(3)}, averages={"b": np.ones(2)}),
            "averages has",
        ),
        (
            lambda: regret_ledger(
                {"a": some_losses(3)},
                bounds={"a": bounds.svb([1, 2], lipschitz=1, diameter=1)},
            ),
            "the last of the 3 rounds or for every one",
        ),
        (
            lambda: nt.table(no_ledger()),
            r"^the data.*pass the result of .*regret_ledger.*sandwich, sandwich",
        ),
    ],
)
def test_arguments_are_checked(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# The picture


def test_a_ledger_is_drawn_as_regret_with_bands_and_bounds():
    best = some_hindsight(6)
    given = {"b": bounds.svb(np.arange(1, 7), lipschitz=1.0, diameter=2.0)}
    data = regret_ledger(
        {"a": some_losses((3, 6), 1), "b": some_losses((3, 6), 2)}, best, given
    )
    ax = nt.plots.plot_regret(data)
    drawn = {line.get_label(): line for line in ax.get_lines()}
    assert list(drawn) == ["a", "b", "b, bound"]
    regret = group(data, "regret")["regret"].sel(rule="b").values
    np.testing.assert_allclose(
        drawn["b"].get_ydata(), np.where(regret > 0, regret, np.nan)
    )
    np.testing.assert_allclose(drawn["b, bound"].get_ydata(), given["b"].value)
    assert drawn["b, bound"].get_linestyle() == "--"
    assert len(ax.collections) == 2
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_ylabel()) == (
        "log",
        "log",
        "regret",
    )
    ax.figure.canvas.draw()
    with pytest.raises(ValueError, match=r"^the ledger has its.*leave hindsight out"):
        nt.plots.plot_regret(data, hindsight=0.3)


def test_a_ledger_without_hindsight_is_drawn_as_losses():
    losses = some_losses(6)
    ax = nt.plots.plot_regret(regret_ledger({"a": losses}), hindsight=0.1)
    drawn = {line.get_label(): line for line in ax.get_lines()}
    np.testing.assert_allclose(
        drawn["a"].get_ydata(), np.cumsum(losses.at_mean) / np.arange(1, 7)
    )
    np.testing.assert_array_equal(drawn["best in hindsight"].get_ydata(), [0.1, 0.1])
    ax.figure.canvas.draw()


def test_other_arviz_data_have_no_regret():
    with pytest.raises(
        ValueError, match=r"needs the result of nt\.bounds\.regret_ledger.*got groups"
    ):
        nt.plots.plot_regret(no_ledger())
