"""One compiled program serves many problems: what fills arrays up changes nothing, and nothing compiles anew."""

import jax
import numpy as np
import pytest
from conftest import enable_x64
from mixture_families import FAMILIES, component_of, some_data

import numpyro_tempered as nt
from numpyro_tempered.mixtures import sweep
from numpyro_tempered.mixtures.components.base import as_dtype, broadcast_prior
from numpyro_tempered.mixtures.factors import Factors, coefficients

COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: (
        COMPILED.append(event) if "backend_compile" in event else None
    )
)
OPTIONS = {"num_components": 3, "num_restarts": 3, "alpha": 0.7, "tolerance": 1e-12}


def rows(number, n=400, d=5):
    rng = np.random.default_rng(number)
    return rng.normal(size=(n, d)) + 6.0 * rng.integers(3, size=(n, 1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "num_samples"),
    [(n, s) for n in FAMILIES for s in ([0, 20] if n == "tied_gaussian" else [20])],
)
def test_what_fills_up_changes_nothing(name, num_samples, monkeypatch):
    component, x = component_of(name), some_data(name)
    weight = np.linspace(0.5, 2.0, len(x))
    options = OPTIONS | {
        "concentration": [0.3, 1.0, 2.0],
        "sample_weight": weight,
        "num_draws": num_samples,
    }
    with enable_x64():
        filled = nt.mixtures.fit(jax.random.key(0), x, component, **options)
        monkeypatch.setattr(sweep, "FEW_ROWS", 0)
        exact = nt.mixtures.fit(jax.random.key(0), x, component, **options)
    assert filled.factors.concentration.shape == (3,)
    np.testing.assert_allclose(
        filled.restart_objectives, exact.restart_objectives, rtol=1e-12
    )
    np.testing.assert_allclose(filled.objective, exact.objective, rtol=1e-13)
    if num_samples:
        np.testing.assert_allclose(filled.bound.value, exact.bound.value, rtol=1e-11)
    np.testing.assert_allclose(filled.kl, exact.kl, rtol=1e-9)
    for ours, expected in zip(
        *map(jax.tree.leaves, (filled.factors, exact.factors)), strict=True
    ):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-9)


def test_what_fills_up_may_be_anywhere_and_not_finite():
    # At the prior, whose squares may overflow where real components are near the data.
    component = nt.mixtures.components.known_variance(2, prior_loc=1e30)
    concentration = np.array([2.0, 0.0])
    posterior = broadcast_prior(as_dtype(component.prior, np.float32), 2)
    posterior = posterior._replace(
        loc=np.stack([np.ones(2, np.float32), posterior.loc[1]])
    )
    component = component._replace(prior=None)
    mixture = coefficients(component, Factors(concentration, posterior))
    np.testing.assert_array_equal(mixture.centres, [[1.0, 1.0], [0.0, 0.0]])
    mixture = mixture._replace(
        constant=np.array([0.0, np.nan]), weights=np.array([[0.0] * 4, [np.inf] * 4])
    )
    joint = sweep.log_joint(component, mixture, np.ones((2, 3), np.float32))
    assert np.isfinite(joint[0]).all()
    assert np.isneginf(joint[1]).all()
    omega, log_sum = sweep.normalise(joint, np.ones(3))
    assert np.isfinite(log_sum)
    assert not np.asarray(omega[1]).any()


@pytest.mark.full
@pytest.mark.parametrize("name", ["gaussian", "tied_gaussian", "categorical"])
def test_what_fills_up_changes_nothing_in_em(name, monkeypatch):
    component, x = component_of(name), some_data(name)
    options = {
        "num_components": 3,
        "num_restarts": 2,
        "pseudo_data": 1.5,
        "tolerance": 1e-12,
    }
    with enable_x64():
        filled = nt.mixtures.em(jax.random.key(0), x, component, **options)
        monkeypatch.setattr(sweep, "FEW_ROWS", 0)
        exact = nt.mixtures.em(jax.random.key(0), x, component, **options)
    np.testing.assert_allclose(
        filled.restart_objectives, exact.restart_objectives, rtol=1e-11
    )
    np.testing.assert_allclose(filled.weights, exact.weights, rtol=1e-6)
    np.testing.assert_allclose(filled.log_likelihood, exact.log_likelihood, rtol=1e-11)
    np.testing.assert_allclose(filled.entropy, exact.entropy, rtol=1e-6, atol=1e-9)


@pytest.mark.full
def test_a_family_is_compiled_once():
    component, key = (
        nt.mixtures.components.known_variance(4, prior_scale=10.0),
        jax.random.key(0),
    )
    others = [jax.random.key(number) for number in range(4)]
    COMPILED.clear()
    nt.mixtures.fit(key, rows(0, d=4), component, num_components=3)
    # Starts, the ascent, F with E1, and what draws need.
    assert len(COMPILED) <= 4
    COMPILED.clear()
    nt.mixtures.fit(
        others[1],
        rows(1, 500, 4),
        component,
        num_components=8,
        num_restarts=5,
        alpha=0.3,
    )
    nt.mixtures.fit(
        others[2],
        rows(2, 300, 4),
        component,
        num_components=1,
        max_iter=900,
        tolerance=1e-4,
    )
    wider = nt.mixtures.components.known_variance(
        4, prior_scale=20.0, scale=np.arange(1.0, 5.0)
    )
    weight = np.linspace(0.0, 2.0, 512)
    nt.mixtures.fit(
        others[3],
        rows(3, 512, 4),
        wider,
        num_components=2,
        concentration=[0.1, 3.0],
        sample_weight=weight,
    )
    assert not COMPILED


@pytest.mark.full
def test_a_table_is_a_few_programs():
    component, key = (
        nt.mixtures.components.known_variance(4, prior_scale=10.0),
        jax.random.key(0),
    )
    COMPILED.clear()
    choice = nt.mixtures.select_num_components(
        key, rows(0, d=4), component, num_components=range(2, 5), baselines=False
    )
    assert choice.selected == 3
    assert len(COMPILED) <= 8
    COMPILED.clear()
    nt.mixtures.select_num_components(
        key, rows(1, 450, 4), component, num_components=[2, 8], baselines=False
    )
    assert not COMPILED


def test_a_choice_is_uncertain_where_the_error_of_the_winner_or_of_the_runner_up_is_large():
    """Here for the programs of the table above."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4)) + 1.5 * rng.integers(2, size=(400, 1))
    component = nt.mixtures.components.known_variance(4, prior_scale=10.0)

    def select(lead, numbers=(1, 2)):
        """What is selected where one component is ahead of two by ``lead`` in log prior."""
        log_prior = {k: -1.0 - (k > 1) * lead for k in numbers}
        return nt.mixtures.select_num_components(
            jax.random.key(0),
            x,
            component,
            num_components=list(numbers),
            log_prior=log_prior,
            baselines=False,
        )

    known = select(0.0).columns
    gain, (exact, error) = known["elbo"][1] - known["elbo"][0], 2.0 * known["se"]
    # The bound of one component is the evidence.
    assert exact < 1e-6 * error
    assert np.all(known["num_best"] > 1)
    for margin in np.array([0.5, 2.0, -0.5, -2.0]) * error:
        choice = select(gain + margin)
        is_uncertain = abs(margin) < error
        assert choice.selected == (1 if margin > 0.0 else 2)
        assert choice.columns["uncertain"].tolist() == [False, is_uncertain]
        assert choice.uncertain == bool(choice.attrs["uncertain"]) == is_uncertain
        assert choice.at_end == bool(choice.attrs["at_end"]) == (margin < 0.0)
    # A single number is no end of a range.
    assert not select(0.0, numbers=[2]).at_end


def test_coordinates_that_count_rows_of_nan_are_refused():
    component = nt.mixtures.components.known_variance(2)
    naive = component._replace(coordinates=lambda x: x - x.mean(axis=0))
    with pytest.raises(ValueError, match=r"coordinates gives NaN.*means over the rows"):
        nt.mixtures.fit(jax.random.key(0), rows(0, d=2), naive, num_components=2)


@pytest.mark.full
def test_coordinates_of_each_row_need_not_know_of_rows_that_fill_up():
    component, key = (
        nt.mixtures.components.known_variance(2, prior_scale=10.0),
        jax.random.key(0),
    )
    options = {"num_components": 3, "num_restarts": 2, "num_moves": 1, "num_draws": 0}
    plain = component._replace(coordinates=lambda x: x)
    fit = nt.mixtures.fit(key, rows(0, d=2), plain, **options)
    expected = nt.mixtures.fit(key, rows(0, d=2), component, **options)
    assert fit.objective == pytest.approx(expected.objective, abs=1e-2)


@pytest.mark.parametrize(("many", "number"), [(2**22, 16), (100, 9)])
def test_rows_fill_blocks(many, number, monkeypatch):
    monkeypatch.setattr(sweep, "MANY_NUMBERS", many)
    x, weight = rows(0, 1100, 2), np.linspace(1.0, 2.0, 1100)
    blocks = sweep.blocks_on_host(x, weight, 128)
    assert blocks.columns.shape == (1, number, 2, 128)
    np.testing.assert_allclose(
        np.asarray(sweep.out_of_blocks(blocks.columns))[:1100], x, rtol=1e-6
    )
    assert float(blocks.weight.sum()) == pytest.approx(weight.sum(), rel=1e-5)
    points = np.asarray(
        sweep.points_of(nt.mixtures.components.known_variance(2), blocks)
    )
    np.testing.assert_allclose(
        points[:1100], (x - x.mean(axis=0)) / x.std(axis=0), rtol=1e-4, atol=1e-5
    )
    assert not points[1100:].any()
    # What fills up is counted by no sum.
    total = sweep.over_blocks(
        lambda columns, weight: (columns * weight).sum(axis=1), blocks
    )
    np.testing.assert_allclose(total, weight @ x, rtol=1e-4, atol=1e-2)


def test_blocks_of_little_weight_count_beside_one_of_much():
    # The sum of a block is half of one, where numbers are two apart.
    weight = np.where(np.arange(2048) == 0, 2.0**24, 2.0**-8)
    blocks = sweep.blocks_on_host(np.zeros((2048, 1)), weight, 128)
    total = sweep.over_blocks(lambda _, weight: weight.sum(), blocks)
    assert total.dtype == np.float32
    assert float(total) == float(np.float32(weight.sum())) == 2.0**24 + 8.0
