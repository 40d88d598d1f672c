"""The engine over a grid of alphas: its checks, and how posteriors of all plans come back to each plan."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.infer import settle as settling
from numpyro_tempered.infer.fixed_steps import (
    adam_in_units,
    default_optim,
    full_size_steps,
    judge_losses,
    late_fall,
)
from numpyro_tempered.select.alpha.base import Plan, Request, Task
from numpyro_tempered.select.alpha.driver import insert_row
from numpyro_tempered.select.alpha.guides import (
    GuideOptions,
    build_fitter,
    check_converged,
)
from numpyro_tempered.select.alpha.model_data import build_method, check_alphas

KEY = jax.random.key(3)
ALPHAS = np.array([0.5, 1.0])
Y = np.array([1.0, 2.0, 3.0])


def conjugate(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    eta = numpyro.deterministic("eta", theta * jnp.ones(len(y)))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


def test_the_default_step_size_is_full_for_three_fifths_of_the_steps():
    losses = np.arange(10, dtype=np.float32)
    np.testing.assert_array_equal(full_size_steps(losses, None), np.arange(6.0))
    np.testing.assert_array_equal(
        full_size_steps(losses, "an optimiser"), np.arange(10.0)
    )


@pytest.mark.parametrize(
    ("alphas", "message"),
    [
        ([], r"^alphas must be.*a list of powers, 1 or more"),
        ([[1.0]], r"^alphas must be.*a list of powers, 1 or more"),
        ([0.0, 1.0], r"alphas must be positive and finite, got 0.0 at index 0"),
        ([1.0, 0.5], r"must increase.*to the next, got"),
    ],
)
def test_grids_are_checked(alphas, message):
    with pytest.raises(ValueError, match=message):
        check_alphas(alphas, 1, "(0, inf)")


def test_an_online_rule_is_a_method_only_where_it_is_expected():
    def online(model):
        return nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())

    assert isinstance(build_method(online, conjugate, online=True), nt.OnlineVI)
    with pytest.raises(
        TypeError,
        match=r"method returned OnlineVI, not a guide or kernel.*as `lambda model",
    ):
        build_method(online, conjugate)


OPTIONS = GuideOptions(20_000, 0.01, None, None)


def settled(method, options=OPTIONS, y=Y):
    """Fits at two powers, and to the first two data alone."""
    data = Task(conjugate, KEY, (y,), {})
    guide = build_method(method, nt.temper(data.model, 1.0))
    weights = [jnp.ones((2, 3)), jnp.tile(jnp.array([1.0, 1.0, 0.0]), (2, 1))]
    inputs = [(jnp.asarray(ALPHAS), each) for each in weights]
    fitter = build_fitter(KEY, data, guide, data.reweighted, inputs[0], options)
    whole = fitter.fit(KEY, inputs[0])
    return whole, fitter.fit(KEY, inputs[1], whole.ends)


def by_hand(model):
    def guide(y):
        loc = numpyro.param("theta_auto_loc", 0.0)
        scale = numpyro.param(
            "theta_auto_scale", 1.0, constraint=dist.constraints.positive
        )
        numpyro.sample("theta", dist.Normal(loc, scale))

    return guide


BY_NODES = OPTIONS._replace(expectation=nt.expectations.gauss_hermite(predictor="eta"))


@pytest.mark.parametrize(
    ("method", "options"),
    [(AutoNormal, OPTIONS), (by_hand, OPTIONS), (AutoNormal, BY_NODES)],
    ids=["at the mode", "by hand", "by quadrature"],
)
@pytest.mark.full
def test_all_powers_end_at_their_optimum(method, options):
    """The exact posteriors of a conjugate model, of all data and of a part."""
    for fitted, y in zip(settled(method, options), (Y, Y[:2]), strict=True):
        precision = 1.0 + len(y) * ALPHAS
        gap = 0.01 if options.expectation is None else 1e-4
        # The gap of a Gaussian in nats: half of the squared shift in standard deviations, and of the log-scale.
        shift = (
            fitted.params["theta_auto_loc"] - ALPHAS * y.sum() / precision
        ) * np.sqrt(precision)
        ratio = fitted.params["theta_auto_scale"] * np.sqrt(precision)
        assert np.all(
            0.5 * shift**2 + 0.5 * (ratio**2 - 1.0 - 2.0 * np.log(ratio)) < 3.0 * gap
        )
        assert all(bool(evidence.converged) for evidence in fitted.evidence)
        check_converged(ALPHAS, fitted, "all data", options)


@pytest.mark.full
def test_without_a_mode_fits_start_where_the_guide_does(monkeypatch):
    """Both where none of the first fits has one, and where later ones have none."""
    monkeypatch.setattr(
        settling,
        "is_worth_its_steps",
        lambda descent, starts, inputs, key: np.zeros(2, bool),
    )
    for fitted, y in zip(settled(AutoNormal), (Y, Y[:2]), strict=True):
        precision = 1.0 + len(y) * ALPHAS
        shift = (
            fitted.params["theta_auto_loc"] - ALPHAS * y.sum() / precision
        ) * np.sqrt(precision)
        assert np.all(np.abs(shift) < 0.2)
        np.testing.assert_allclose(
            fitted.params["theta_auto_scale"], precision**-0.5, rtol=0.2
        )
        assert not any(evidence.starts_at_mode for evidence in fitted.evidence)


def test_fits_that_have_not_converged_are_refused_with_their_alphas():
    short = OPTIONS._replace(num_steps=10)
    fitted, _ = settled(AutoNormal, short)
    with pytest.raises(
        ValueError,
        match=r"fits to all data at alpha = 0.5, 1 have not converged within 0.01.* of their optimum \(.*\), and "
        r"alphas would be compared.*larger num_steps",
    ):
        check_converged(ALPHAS, fitted, "all data", short)


def test_a_power_without_a_mode_takes_the_axes_of_the_nearest_that_has_one():
    np.testing.assert_array_equal(
        settling._nearest(np.array([False, True, False, False, True])), [1, 1, 1, 4, 4]
    )


def test_each_plan_gets_its_own_posteriors():
    first = Plan(np.array([[1.0, 0.0], [0.0, 1.0]]), None)
    second = Plan(np.array([[2.0, 0.0]]), None)
    request = Request(ALPHAS, (first, second), pointwise=False)
    np.testing.assert_array_equal(request.weights(2), [[1, 1], [1, 0], [0, 1], [2, 0]])
    # Two alphas and four posteriors at each: all data, two of the first plan, one of the second.
    summary = np.arange(8.0).reshape(2, 4)
    of_first, of_second = request.split([{"a": summary}, summary])
    np.testing.assert_array_equal(of_first["a"], [[1, 5], [2, 6]])
    np.testing.assert_array_equal(of_second, [[3, 7]])


def test_a_row_between_the_alphas_of_the_grid():
    columns = {"criterion": np.array([1.0, 2.0]), "mean": np.array([3.0, 4.0])}
    grid, columns = insert_row(ALPHAS, columns, 0.7, {"mean": np.array([9.0])})
    assert grid.tolist() == [0.5, 0.7, 1.0]
    np.testing.assert_array_equal(columns["criterion"], [1.0, np.nan, 2.0])
    assert columns["mean"].tolist() == [3.0, 9.0, 4.0]


def moves_of(optim, gradients, start, num_steps):
    """How far each step of an optimiser moves, by name."""

    def step(state, _):
        before, after = optim.get_params(state), optim.update(gradients, state)
        return after, jax.tree.map(lambda a, b: a - b, before, optim.get_params(after))

    return jax.lax.scan(step, optim.init(start), length=num_steps)[1]


def test_the_default_step_size_falls_by_a_hundred_from_three_fifths_of_the_steps_on():
    """Adam moves by its step size where the gradient is constant."""
    moves = moves_of(default_optim(50), {"a": jnp.ones(())}, {"a": jnp.zeros(())}, 50)[
        "a"
    ]
    shares = np.maximum(np.arange(50) / 50 - 0.6, 0.0) / 0.4
    np.testing.assert_allclose(moves, 0.05 * 0.01**shares, rtol=1e-3)


def test_steps_in_units_are_those_of_parameters_in_units():
    optim = adam_in_units(lambda _: 0.1, {"a": jnp.array([10.0, 0.01])})
    gradients = {"a": jnp.array([0.3, -200.0]), "b": jnp.array(-2.0)}
    start = {"a": jnp.array([5.0, 1.0]), "b": jnp.array(3.0)}
    np.testing.assert_array_equal(optim.get_params(optim.init(start))["a"], start["a"])
    moves = moves_of(optim, gradients, start, 3)
    np.testing.assert_allclose(moves["a"], np.tile([1.0, -0.001], (3, 1)), rtol=1e-3)
    np.testing.assert_allclose(moves["b"], np.full(3, -0.1), rtol=1e-3)


def test_what_losses_tell_of_a_run():
    noise = 0.1 * np.random.default_rng(0).normal(size=1000)
    flat, falls = 5.0 + noise, 5.0 + noise - 0.02 * np.arange(1000)
    assert late_fall(flat) == 0.0
    assert late_fall(falls) == pytest.approx(2.0, abs=0.05)
    # A tenth of 19 losses is one, which has no variance.
    assert late_fall(falls[:19]) == 0.0
    # Of the default optimiser the first three fifths are looked at.
    late = np.where(np.arange(1000) < 600, flat, falls)
    assert judge_losses(late, None).converged is None
    assert judge_losses(late, "given").converged is False
    falls[7] = np.nan
    assert [judge_losses(falls, optim).rejected for optim in (None, "given")] == [1, 1]
