"""Why numbers of components grow no further, and what counts as converged: rules on numbers alone."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

import numpyro_tempered as nt
from numpyro_tempered.mixtures import select as selection
from numpyro_tempered.mixtures.orders import MOST, PATIENCE, reason_to_stop
from numpyro_tempered.mixtures.result import BoundEstimate
from numpyro_tempered.mixtures.rounding import has_converged
from numpyro_tempered.report.arviz import group


def fits_of(objectives):
    """Fits of K = 1, 2, ... whose bounds are a nat above their objectives."""
    return {
        k: SimpleNamespace(
            bound=BoundEstimate(value + 1.0, 0.1),
            objective=value,
            spread=0.0,
            kl=1.0,
            num_best=2,
            alpha=1.0,
            num_occupied=k,
            converged=True,
        )
        for k, value in enumerate(objectives, start=1)
    }


def reason(objectives, log_weights, ceiling=math.inf):
    weights = np.asarray(log_weights, float)
    return reason_to_stop(
        fits_of(objectives),
        log_weights=weights,
        ceiling=ceiling,
        label_multiplicity=False,
    )


def test_k_grows_until_no_larger_one_can_win():
    log_weights = -math.log(2.0) * np.arange(1, 11)
    # What remains of the weights behind the second is 1/4.
    enough = -5.0 - math.log(2.0) - math.log(0.25)
    assert (
        reason([-5.0, -6.0], log_weights, enough - 1e-6)
        == "certain: no larger K can win"
    )
    assert reason([-5.0, -6.0], log_weights, enough + 1e-6) is None


def test_k_grows_until_some_in_succession_have_not_improved():
    log_weights = -0.1 * np.arange(1, 30)
    falling = [-9.0, -5.0, *(-6.0 - np.arange(PATIENCE))]
    assert reason(falling[:-1], log_weights) is None
    assert (
        reason(falling, log_weights)
        == f"none of the last {PATIENCE} K improved the criterion"
    )
    rising = list(np.arange(29.0))
    assert reason(rising[:-1], log_weights) is None
    assert (
        reason(rising, log_weights)
        == f"K = 29 is the largest that is tried, a component for each row or {MOST}"
    )


def outcome(fall=0.0, fallen=None, converged=True):
    return SimpleNamespace(
        history=SimpleNamespace(converged=converged), fall=fall, fallen=fallen
    )


def test_an_objective_that_falls_by_more_than_rounding_is_an_error():
    data = SimpleNamespace(
        component=SimpleNamespace(name="own"), rows=np.zeros(1, np.float32)
    )
    assert has_converged(data, outcome(), 9.0, 1.0, None)
    fallen = (3, "visit")
    with pytest.raises(
        RuntimeError, match=r"restart 3 fell by 2 nats.*component 'own' do not belong"
    ):
        has_converged(
            data, outcome(2.0, fallen), 0.0, 1.0, lambda point: {"visit": 0.5}[point]
        )
    # Rounding of the step takes as much; or the fall is none that counts.
    assert has_converged(data, outcome(2.0, fallen), 0.5, 1.0, lambda point: 1.5)
    assert has_converged(data, outcome(0.5, fallen), 0.5, 1.0, lambda point: 0.0)
    assert not has_converged(
        data, outcome(0.5, fallen, False), 9.0, 1.0, lambda point: 0.0
    )


def test_what_a_step_in_double_precision_still_raises_has_not_converged():
    data = SimpleNamespace(
        component=SimpleNamespace(name="own"), rows=np.zeros(1, np.float32)
    )
    with pytest.warns(
        UserWarning,
        match=r"^the best.*raises its objective by 2 nats, which float32 does not resolve",
    ):
        assert not has_converged(
            data, outcome(0.5, (0, None)), 2.0, 1.0, lambda point: 0.0
        )


def test_a_path_goes_down_in_alpha_with_the_fits_of_each_power_as_starts_of_the_next(
    monkeypatch, key
):
    calls = []

    def fit_orders(
        rng_key, x, component, orders, *, others, alpha, num_restarts, num_draws
    ):
        calls.append((others, alpha, num_restarts, num_draws, orders))
        # The larger the power, the more components.
        value = {0.1: [-3.0, -9.0], 0.5: [-9.0, -3.0], 1.0: [-9.0, -2.0]}[alpha]
        return {
            k: fits_of([0.0, 0.0, each])[3]
            for k, each in zip(orders, value, strict=True)
        }, None

    monkeypatch.setattr(selection, "fit_orders", fit_orders)
    component = nt.mixtures.components.known_variance(1)
    data = nt.mixtures.num_components_path(
        key,
        [[0.0]],
        component,
        alphas=[0.5, 1.0, 0.1],
        num_components=[1, 3],
        num_restarts=5,
        num_draws=4,
    )
    assert [call[1:] for call in calls] == [
        (alpha, 5, 4, [1, 3]) for alpha in (1.0, 0.5, 0.1)
    ]
    assert [list(call[0]) for call in calls] == [[], [1, 3], [1, 3]]
    found = group(data, "num_components_path")
    assert found["alpha"].values.tolist() == [0.1, 0.5, 1.0]
    assert found["num_components"].values.tolist() == [1, 3]
    assert found["selected"].values.tolist() == [1, 3, 3]
    # Each bound is a nat above the objective, and K has the weight 2^-K.
    expected = (
        np.array([[-3.0, -9.0], [-9.0, -3.0], [-9.0, -2.0]])
        + 1.0
        - np.log(2.0) * np.array([1, 3])
    )
    np.testing.assert_allclose(found["criterion"].values, expected)
    np.testing.assert_allclose(data.attrs["prior_weights"], [0.5, 0.125])
    assert data.attrs["component"] == "known_variance"
