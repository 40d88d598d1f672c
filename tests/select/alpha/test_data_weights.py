"""Weights of single data, and where the data of a model lie."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from numpyro import handlers
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import log_density, potential_energy

import numpyro_tempered as nt
from numpyro_tempered.handlers.rows import DataRows
from numpyro_tempered.select.alpha.base import Task
from numpyro_tempered.select.alpha.data_weights import weigh_data

Y = np.array([0.3, -1.0, 2.0, 0.7])
WEIGHTS = np.array([0.0, 1.0, 2.0, 1.0])


def in_a_plate(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, scale), obs=y)
        numpyro.factor("penalty", -jnp.square(y - theta))


def without_a_plate(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(theta, scale), obs=y)


def of_rows(y):
    """The data are rows of an outer plate, with three entries each."""
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("n", len(y), dim=-2), numpyro.plate("k", 3, dim=-1):
        numpyro.sample("y", dist.Normal(theta, scale), obs=y[:, None] + jnp.arange(3.0))


CASES = {
    "plate": (in_a_plate, None),
    "vector": (without_a_plate, None),
    "rows": (of_rows, "n"),
}
VALUES = {"theta": np.array(0.4), "scale": np.array(1.3)}


@pytest.mark.parametrize("case", CASES)
def test_weights_multiply_the_likelihood_of_their_datum_and_nothing_else(
    key, x64, case
):
    fn, plate = CASES[case]
    task = Task(fn, key, (Y,), {}, plate)
    assert task.num_data == 4

    @jax.jit
    def run(values):
        models = (
            nt.temper(fn, 0.0),
            fn,
            weigh_data(nt.temper(fn, 0.5), WEIGHTS, task.data_rows),
        )
        return task.log_lik_of_each(values), [
            log_density(model, (Y,), {}, values)[0] for model in models
        ]

    each, (prior, whole, weighed) = jax.tree.map(np.asarray, run(VALUES))
    np.testing.assert_allclose(prior + each.sum(), whole, rtol=1e-12)
    np.testing.assert_allclose(
        weighed, prior + 0.5 * np.sum(WEIGHTS * each), rtol=1e-12
    )


def test_prior_factors_keep_their_weight(key, x64):
    def centred(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        beta = numpyro.sample("beta", dist.Normal(theta, 2.0))
        numpyro.factor("belief", -jnp.square(theta))
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Normal(beta, 1.0), obs=y)

    tempered = nt.temper(
        handlers.reparam(centred, {"beta": LocScaleReparam(0.0)}), 0.5, factors=False
    )
    values = {"theta": np.array(0.2), "beta_decentered": np.array(-0.3)}

    @jax.jit
    def run(values):
        models = (
            weigh_data(tempered, np.ones(4), DataRows(4, -1, 4)),
            tempered,
            weigh_data(tempered, np.zeros(4), DataRows(4, -1, 4)),
            nt.temper(tempered, 0.0),
        )
        return [log_density(model, (Y,), {}, values)[0] for model in models]

    everything, whole, nothing, prior = run(values)
    np.testing.assert_allclose(everything, whole, rtol=1e-12)
    np.testing.assert_allclose(nothing, prior, rtol=1e-12)


def test_what_is_left_out_may_be_impossible():
    def positive(y, theta):
        with numpyro.plate("n", len(y)):
            numpyro.sample("y", dist.Exponential(theta, validate_args=False), obs=y)

    y = np.array([1.0, -1.0], np.float32)

    def log_lik(theta, weights):
        return log_density(
            weigh_data(nt.temper(positive, 0.5), weights, DataRows(2, -1, 2)),
            (y, theta),
            {},
            {},
        )[0]

    value, slope = jax.jit(jax.value_and_grad(log_lik))(
        2.0, np.array([1.0, 0.0], np.float32)
    )
    np.testing.assert_allclose(value, 0.5 * (np.log(2.0) - 2.0), rtol=1e-6)
    np.testing.assert_allclose(slope, 0.5 * (0.5 - 1.0), rtol=1e-6)


def test_the_flat_scale(key, x64):
    task = Task(in_a_plate, key, (Y,), {})
    start, unravel = task.flat()
    assert start.shape == (2,)

    @jax.jit
    def run(flat, values):
        at, draws = unravel(flat), task.draws(values)
        joint = -potential_energy(in_a_plate, (Y,), {}, at)
        return (
            task.log_prior(at),
            task.losses(at),
            joint,
            draws.log_lik,
            task.losses(unravel(draws.flat[1])),
        )

    prior, losses, joint, log_lik, back = map(
        np.asarray,
        run(
            np.array([0.1, -0.2]),
            {name: np.stack([v, 2 * v]) for name, v in VALUES.items()},
        ),
    )
    np.testing.assert_allclose(prior - np.sum(losses), joint, rtol=1e-12)
    # A draw goes to the flat scale and back.
    np.testing.assert_allclose(-log_lik[1], back, rtol=1e-12)


def local(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        z = numpyro.sample("z", dist.Normal(theta, 1.0))
        numpyro.sample("y", dist.Normal(z, 1.0), obs=y)


def two_shapes(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
    numpyro.sample("total", dist.Normal(theta, 1.0), obs=jnp.sum(y))


def scaled(y):
    with handlers.scale(scale=2.0):
        without_a_plate(y)


def nothing(y):
    numpyro.sample("theta", dist.Normal(0.0, 1.0))


def subsampled(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y), subsample_size=2) as index:
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y[index])


def with_a_param(y):
    numpyro.sample(
        "y",
        dist.Normal(numpyro.param("loc", 0.0), numpyro.sample("s", dist.HalfNormal())),
        obs=y,
    )


def in_a_scan(y):
    from numpyro.contrib.control_flow import scan

    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))

    def step(carry, value):
        numpyro.sample("y", dist.Normal(theta + carry, 1.0), obs=value)
        return value, None

    scan(step, 0.0, y)


def broadcast(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y[:, None])


def at_two_dims(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
    with numpyro.plate("n", len(y), dim=-2), numpyro.plate("k", 4):
        numpyro.sample("z", dist.Normal(theta, 1.0), obs=np.tile(y[:, None], (1, 4)))


REFUSED = {
    "broadcasting": (
        broadcast,
        r"^observed site.*they broadcast against each other.*Give them one shape",
    ),
    "two dims": (at_two_dims, r"several sizes and dimensions.*give it one"),
    "local latents": (
        local,
        r"^latent sites.*'z'.*integrate them out.*or name another plate",
    ),
    "two shapes": (
        two_shapes,
        r"^the observed sites have.*put all in one plate.*belong to the prior",
    ),
    "several plates": (of_rows, r"^the data lie in.*name that of the data by plate="),
    "a scale": (
        scaled,
        r"has the power or scale 2.0 already.*without temper and handlers.scale",
    ),
    "a power": (
        nt.temper(without_a_plate, alpha=0.5),
        r"^observed site.*has the power or scale 0.5 already",
    ),
    "no data": (nothing, r"^the model has.*no observed site.*that it conditions on"),
    # To draw the rows is a program of its own.
    "a subsample": (
        handlers.substitute(subsampled, data={"n": jnp.asarray(np.arange(2))}),
        "subsamples",
    ),
    "a drawn subsample": (subsampled, "subsamples"),
    "a param": (with_a_param, "params"),
    "a scan": (
        in_a_scan,
        r"^observed site.*in a scan.*series in a plate.*theory_default",
    ),
}


NEED_VALUES = ("two shapes", "several plates", "a drawn subsample")


@pytest.mark.parametrize("computed", tiered([False, True], unit=[False]))
@pytest.mark.parametrize(
    "case", tiered(REFUSED, unit=REFUSED.keys() - {"a drawn subsample"})
)
def test_models_that_cannot_be_taken_apart(key, case, computed):
    fn, match = REFUSED[case]
    # A trace is enough for most: what is refused is not computed.
    run = (lambda f: f()) if computed or case in NEED_VALUES else jax.eval_shape
    with pytest.raises(ValueError, match=match):
        run(lambda: Task(fn, key, (Y,), {}) and None)


def test_an_unknown_plate(key):
    with pytest.raises(ValueError, match=r"plate 'm' does not hold.*plates that do"):
        Task(in_a_plate, key, (Y,), {}, "m")


def test_nan_data(key):
    with pytest.raises(
        ValueError,
        match=r"^observed site.*'y' has 1 values that are NaN.*leave them out",
    ):
        Task(without_a_plate, key, (np.where(Y > 1, np.nan, Y),), {})
