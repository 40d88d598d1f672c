"""The arguments that a fit passes on to its model: what is made an array, what stays, and what is missing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from conftest import enable_x64
from numpyro import handlers
from numpyro.infer.autoguide import AutoNormal

import numpyro_tempered as nt
from numpyro_tempered.core.model_arguments import separate
from numpyro_tempered.core.rows import as_array, is_list, stream_arrays
from numpyro_tempered.handlers.arguments import model_arguments
from numpyro_tempered.handlers.likelihood import plain_arrays
from numpyro_tempered.online.streams.load import _to_device

Y = np.array([1.0, 0.0, 3.0])
HOLES = np.array([1.0, np.nan, 3.0])


def normal(y, scale=1.0, y_error=None):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(theta, scale), obs=y)


def converted(model, *args, finite=True, **kwargs):
    return model_arguments(nt.fit_svi, model, args, kwargs, finite=finite)


@pytest.mark.parametrize(
    ("value", "array"),
    [
        ([1.0, 0.0, 3.0], Y),
        ([1, 0, 3], np.array([1, 0, 3])),
        ([True, False], np.array([True, False])),
        ([[1, 2.0], [3, 4]], np.array([[1.0, 2.0], [3.0, 4.0]])),
        (pd.Series([1, 0, 3]), np.array([1, 0, 3])),
        (pd.Series([1, None, 3], dtype="Int64"), HOLES),
        (pd.Series([True, None, True], dtype="boolean"), np.array([1.0, np.nan, 1.0])),
        (pd.Index([1.0, 0.0, 3.0]), Y),
        (
            pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5]}),
            np.array([[1.0, 0.5], [2.0, 1.5]]),
        ),
        (
            pd.DataFrame({"a": [1, 2], "b": [True, False]}),
            np.array([[1.0, 1.0], [2.0, 0.0]]),
        ),
        (
            pd.DataFrame({"a": pd.array([1, None], dtype="Int8"), "b": [1.0, 2.0]}),
            np.array([[1, 1.0], [np.nan, 2.0]]),
        ),
        (3, np.array(3)),
        (np.ma.masked_equal([1.0, -9.0, 3.0], -9.0), HOLES),
        (np.ma.masked_equal([1, -9, 3], -9), HOLES),
        (
            np.ma.array([True, True, True], mask=[False, True, False]),
            np.array([1.0, np.nan, 1.0]),
        ),
        (np.ma.array([1, 0, 3]), np.array([1, 0, 3])),
    ],
)
def test_numbers_of_any_kind_become_arrays(value, array):
    result = as_array(value, "x")
    assert type(result) is np.ndarray
    assert result.dtype.kind == array.dtype.kind
    np.testing.assert_array_equal(result, array)


def test_arrays_are_left_alone():
    for array in (Y, jnp.ones(2), jnp.ones(2, jnp.bfloat16), jax.random.key(0)):
        assert as_array(array, "x") is array


def test_masked_entries_of_single_precision_stay_in_it():
    masked = np.ma.masked_equal(np.array([1.0, -9.0], np.float32), np.float32(-9.0))
    assert as_array(masked, "x").dtype == np.float32


def test_masked_data_of_streams_and_models_are_missing():
    masked = np.ma.masked_equal([1.0, -9.0, 3.0], -9.0)
    np.testing.assert_array_equal(stream_arrays((masked,))[0], HOLES)
    np.testing.assert_array_equal(separate((masked,), {})[0][0], HOLES)
    args, _ = converted(normal, masked, finite=False)
    # What is masked compares as equal to anything.
    assert type(args[0]) is np.ndarray
    np.testing.assert_array_equal(args[0], HOLES)


def test_arrays_that_a_stream_fills_anew_are_copied():
    # JAX reads the memory of an array that begins at a multiple of 64 bytes in place.
    room = np.zeros(4 * 100 + 64, np.uint8)
    begin = -room.ctypes.data % 64
    buffer = room[begin : begin + 4 * 100].view(np.float32)
    (array,), _ = separate((buffer,), {})
    exported = _to_device(buffer)
    buffer[:] = 1.0
    assert not array.any()
    assert not exported.any()


def test_lists_of_arrays_are_trees():
    assert is_list([1, 2.0, None, "a"])
    assert is_list([[1], [2]])
    for tree in ([Y, Y], [jnp.ones(())], [], (1.0, 2.0), [{"a": 1.0}], [(1.0, 2.0)]):
        assert not is_list(tree)
    first, second = stream_arrays(([Y, Y], [1.0, 2.0]))
    assert isinstance(first, list)
    assert second.shape == (2,)


def test_lists_and_frames_are_data():
    args, kwargs = converted(normal, [1.0, 0.0, 3.0], scale=pd.Series([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(args[0], Y)
    np.testing.assert_array_equal(kwargs["scale"], [1.0, 2.0, 3.0])
    assert isinstance(kwargs["scale"], np.ndarray)


def test_what_a_model_reads_on_the_host_stays():
    def sized(widths, groups, y):
        codes = np.unique(groups, return_inverse=True)[1]
        theta = numpyro.sample(
            "theta", dist.Normal(jnp.zeros(sum(widths)), 1.0).to_event(1)
        )
        numpyro.sample("y", dist.Normal(theta[codes], 1.0), obs=y)

    widths, groups = [2, 1], np.array(["a", "b", "a"])
    args, _ = converted(sized, widths, groups, Y)
    assert args[0] is widths
    assert args[1] is groups


def test_scalars_and_trees_stay():
    tree = {"a": [Y, Y], "b": ("name", None, 2)}

    def of_trees(tree, y):
        normal(y + tree["a"][0])

    args, _ = converted(of_trees, tree, Y)
    assert args[0]["b"] == ("name", None, 2)
    assert args[0]["a"][1] is Y


def of_mask(y):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    with handlers.mask(mask=~np.isnan(y)):
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def of_bounds(low, high):
    theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
    numpyro.factor(
        "interval",
        jnp.log(dist.Normal(theta, 1.0).cdf(high) - dist.Normal(theta, 1.0).cdf(low)),
    )


def of_latents(y):
    missing = numpyro.sample(
        "missing", dist.Normal(0.0, 1.0).expand([int(np.isnan(y).sum())]).mask(False)
    )
    complete = jnp.asarray(y).at[np.isnan(y)].set(missing)
    numpyro.sample("y", dist.Normal(0.0, 1.0), obs=complete)


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (of_mask, (HOLES,)),
        (of_latents, (HOLES,)),
        (of_bounds, (np.array([-np.inf, 0.0]), np.array([0.0, np.inf]))),
        (functools.partial(normal, y_error=HOLES), (Y,)),
    ],
)
def test_holes_that_a_model_treats_are_its_own_matter(model, args):
    assert converted(model, *args)[0] == args


def test_holes_are_counted_by_site():
    with pytest.raises(
        ValueError,
        match=r"^observed site 'y' has 1 of 3 values that are NaN or infinite, the first",
    ):
        converted(normal, HOLES)
    with pytest.raises(
        ValueError,
        match=r"^argument 'scale' of the model has 1 of 3 .*, the first at index 1, which",
    ):
        converted(normal, Y, scale=HOLES)
    # Online rules reject such rounds and count them.
    assert converted(normal, HOLES, finite=False)[0][0] is HOLES


def test_logits_of_nan_are_refused():
    def logistic(x, y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Bernoulli(logits=theta * x), obs=y)

    with pytest.raises(
        ValueError, match="'x' of the model has 1 of 3 values that are NaN or infinite"
    ):
        converted(logistic, HOLES, np.array([0, 1, 1]))


def test_a_factor_of_nan_is_refused():
    def penalty(y):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.factor("penalty", -jnp.sum((y - theta) ** 2))

    with pytest.raises(
        ValueError, match=r"'y' of the model has 1 of 3 .* makes site 'penalty' NaN"
    ):
        converted(penalty, HOLES)


@pytest.mark.parametrize(
    "wrapped",
    [
        normal,
        nt.temper(normal, alpha=0.5),
        handlers.condition(normal, {"theta": 1.0}),
        functools.partial(normal, scale=2.0),
        handlers.mask(nt.temper(normal, alpha=0.5), mask=True),
    ],
)
def test_misspelt_options_are_found_under_handlers(wrapped):
    converted(wrapped, Y, scale=2.0)
    with pytest.raises(
        TypeError, match="no argument 'num_step': did you mean 'num_steps'"
    ):
        converted(wrapped, Y, num_step=5)
    with pytest.raises(TypeError, match="no argument 'y_eror': did you mean 'y_error'"):
        converted(wrapped, Y, y_eror=5)
    with pytest.raises(TypeError, match=r"'factors', which is one of nt.temper: pass"):
        converted(wrapped, Y, factors=False)


def test_a_wrapper_takes_what_it_likes():
    @functools.wraps(normal)
    def doubled(y, *args, times, **kwargs):
        return normal(times * y)

    assert converted(doubled, Y, times=2, other=3)[1] == {"times": 2, "other": 3}


@pytest.mark.full
def test_a_fit_of_lists_is_that_of_arrays():
    fits = [
        nt.fit_svi(
            jax.random.key(0),
            normal,
            AutoNormal,
            y,
            num_steps=20,
            num_particles=2,
            optim=numpyro.optim.Adam(0.05),
        )
        for y in (Y.tolist(), pd.Series(Y), Y)
    ]
    for fit in fits:
        assert fit.elbo == fits[0].elbo
        np.testing.assert_array_equal(fit.observed["y"], Y)


LARGE = np.array([3_000_000_000, 3_100_000_000, 3_190_000_000])


@pytest.mark.parametrize(
    "y",
    [
        LARGE,
        LARGE.tolist(),
        pd.Series(LARGE),
        pd.Series(LARGE, dtype="Int64"),
        LARGE.astype(object),
    ],
)
def test_integers_beyond_those_of_jax_are_floating(y):
    (array,), _ = converted(normal, y)
    assert array.dtype == float
    np.testing.assert_array_equal(array, LARGE)
    np.testing.assert_allclose(
        separate((np.asarray(y, np.int64),), {})[0][0], LARGE, rtol=1e-6
    )
    np.testing.assert_allclose(plain_arrays((np.asarray(y, np.int64),))[0], LARGE)


def test_numbers_that_jax_would_change_are_refused():
    with pytest.raises(
        ValueError,
        match=r"argument 'y' .* from 3000000000 to 3000000002, .* steps of 256",
    ):
        converted(normal, LARGE[0] + np.arange(3))
    # A column that spans enough steps stands beside one that does not.
    with pytest.raises(
        ValueError,
        match=r"^the data.*from 5000000000 to 5000000001.*or enable double precision",
    ):
        stream_arrays((np.array([[1, 5_000_000_000], [2**40, 5_000_000_001]]),))
    for values in (LARGE * 1j, jnp.ones(3) * 1j):
        with pytest.raises(
            TypeError,
            match=r"argument 'y' .* complex.*real and imaginary.*of their own",
        ):
            converted(normal, values)
    with enable_x64():
        (array,), _ = converted(normal, LARGE)
        assert array is LARGE
