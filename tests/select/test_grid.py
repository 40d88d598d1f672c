"""The engine over a grid of alphas: its checks, and how posteriors of all plans come back to each plan."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.infer.fixed_steps import full_size_steps
from numpyro_tempered.select.alpha.base import Plan, Query
from numpyro_tempered.select.alpha.driver import insert_row
from numpyro_tempered.select.alpha.model_data import ModelData, build_method, check_alphas
from numpyro_tempered.select.alpha.svi import GuideFitter, check_fits, set_up

KEY = jax.random.key(3)
ALPHAS = np.array([0.5, 1.0])


def model(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def test_the_default_step_size_is_full_for_three_fifths_of_the_steps():
    losses = np.arange(10, dtype=np.float32)
    np.testing.assert_array_equal(full_size_steps(losses, None), np.arange(6.0))
    np.testing.assert_array_equal(full_size_steps(losses, "an optimiser"), np.arange(10.0))


def test_a_fit_that_ends_in_nan_is_refused_with_its_alpha():
    losses = np.ones((2, 1, 40))
    losses[1, 0, 20:] = np.nan
    # Steps after the last one of a fit do not count.
    check_fits(ALPHAS, losses, np.array([20]), optim=None, stacklevel=1)
    with pytest.raises(ValueError, match=r"fits at alpha = \[1.\] ended in values that are not finite"):
        check_fits(ALPHAS, losses, np.array([40]), optim=None, stacklevel=1)
    with pytest.raises(ValueError, match=r"fits at alpha = \[0.5\]"):
        check_fits(ALPHAS, losses, np.array([20]), optim=None, stacklevel=1, finite=np.array([False, True]))


def test_a_loss_that_still_falls_warns_with_its_alpha():
    losses = np.stack([np.zeros((1, 100)), -np.arange(100.0)[None]])
    with pytest.warns(UserWarning, match=r"the loss of a fit still fell at alpha = \[1.\]"):
        check_fits(ALPHAS, losses, np.array([100]), optim=None, stacklevel=1)


@pytest.mark.parametrize(
    ("alphas", "message"),
    [
        ([], "a list of powers, 1 or more"),
        ([[1.0]], "a list of powers, 1 or more"),
        ([0.0, 1.0], r"alphas must be positive and finite, got 0.0 at index 0"),
        ([1.0, 0.5], "must increase"),
    ],
)
def test_grids_are_checked(alphas, message):
    with pytest.raises(ValueError, match=message):
        check_alphas(alphas, 1, "(0, inf)")


def test_an_online_rule_is_a_method_only_where_it_is_expected():
    def online(model):
        return nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, nt.online.ngvi())

    assert isinstance(build_method(online, model, online=True), nt.OnlineVI)
    with pytest.raises(TypeError, match="method returned OnlineVI, not a guide or kernel"):
        build_method(online, model)


def test_one_program_fits_several_alphas_on_models_of_its_own():
    """Two powers under one vmap: exact posteriors of a conjugate model."""
    y = np.array([1.0, 2.0, 3.0])
    data = ModelData(model, KEY, (y,), {})
    guide = AutoNormal(nt.temper(data.model, 1.0))
    set_up(tuple(jax.random.split(KEY)), data, guide)
    fitter = GuideFitter(data, guide, None, Trace_ELBO(num_particles=10))

    def fit(alpha):
        return fitter.fit(KEY, nt.temper(data.model, alpha), 600, length=700)

    params, losses = jax.jit(jax.vmap(fit))(jnp.asarray(ALPHAS))
    precision = 1.0 + 3.0 * ALPHAS
    np.testing.assert_allclose(params["theta_auto_loc"], ALPHAS * y.sum() / precision, atol=0.03)
    np.testing.assert_allclose(params["theta_auto_scale"], precision**-0.5, rtol=0.05)
    assert np.isfinite(losses[:, :600]).all()
    assert np.isnan(losses[:, 600:]).all()


def test_each_plan_gets_its_own_posteriors():
    first = Plan(np.array([[1.0, 0.0], [0.0, 1.0]]), None)
    second = Plan(np.array([[2.0, 0.0]]), None)
    query = Query(ALPHAS, (first, second), pointwise=False)
    np.testing.assert_array_equal(query.weights(2), [[1, 1], [1, 0], [0, 1], [2, 0]])
    # Two alphas and four posteriors at each: all data, two of the first plan, one of the second.
    summary = np.arange(8.0).reshape(2, 4)
    of_first, of_second = query.split([{"a": summary}, summary])
    np.testing.assert_array_equal(of_first["a"], [[1, 5], [2, 6]])
    np.testing.assert_array_equal(of_second, [[3, 7]])


def test_a_row_between_the_alphas_of_the_grid():
    columns = {"criterion": np.array([1.0, 2.0]), "mean": np.array([3.0, 4.0])}
    grid, columns = insert_row(ALPHAS, columns, 0.7, {"mean": np.array([9.0])})
    assert grid.tolist() == [0.5, 0.7, 1.0]
    np.testing.assert_array_equal(columns["criterion"], [1.0, np.nan, 2.0])
    assert columns["mean"].tolist() == [3.0, 9.0, 4.0]
