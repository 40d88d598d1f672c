"""Checks of models for the online rules, and of batches for masks and quadratures."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.distributions.constraints import Constraint

from numpyro_tempered.core import (
    RUNNING,
    ArgumentStructure,
    Array,
    Model,
    Numbers,
    Params,
    Shape,
    check_columns,
    compile_once,
    is_traced,
    join,
    separate,
    spans_processes,
)
from numpyro_tempered.gaussian.expectations.base import Expectation, ModelLoss
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.arguments import (
    FramePolicy,
    argument_columns,
    model_arguments,
)
from numpyro_tempered.handlers.model_loss import ONLINE, model_loss
from numpyro_tempered.handlers.requirements import (
    describe_outside,
    fixed_support,
    full_plates,
    require,
)
from numpyro_tempered.handlers.target import refuse_moving_supports, trace_unconstrained
from numpyro_tempered.infer.guides.online import StartsAtPrior, check_start
from numpyro_tempered.infer.set_up import first_call
from numpyro_tempered.online.streams.processes import automatic_meshes

# Up to this many data the whole Jacobian of the losses in the predictors is checked, beyond it random halves.
_DENSE = 1000
_SPLITS = 8


def stream_arguments(
    function: Callable[..., object],
    model: Model,
    args: tuple,
    kwargs: dict,
    columns: dict[str, tuple],
    *,
    is_first: bool = False,
) -> tuple[tuple, dict]:
    """The arguments of a model as arrays, of a round or a stream, which may hold NaN.

    The ``columns`` are those of the tables of the stream so far, by argument, and remember new ones; of a
    stream that ``is_first`` they are replaced.

    Raises:
        ValueError: If a table has other columns than those before.
    """
    # A round must not wait for a run of the model.
    frames: FramePolicy = "refused" if is_first else "converted"
    arrays = model_arguments(function, model, args, kwargs, finite=False, frames=frames)
    # Arrays alone come back as they are, and wait for nothing.
    if arrays[0] is not args or kwargs:
        of_call = argument_columns(function, model, args, kwargs)
        if is_first and of_call:
            columns.clear()
        check_columns(columns, of_call)
        columns.update(of_call)
    return automatic_meshes(arrays)


def check_model(rng_key: Array, model: Model, args: tuple, kwargs: dict) -> None:
    """Raise for a model that no online rule can take.

    Raises:
        ValueError: If a plate subsamples, nothing is observed, a latent is local, the model has params, or
            some factor is a prior term.
    """
    with handlers.block(), full_plates():
        try:
            # Not under a transformation: a model may keep what it computes in its first run.
            trace = likelihood.get_trace(handlers.seed(model, rng_key), args, kwargs)
        except NotImplementedError as error:
            raise ValueError(
                "a prior cannot be sampled (is it improper?): the online rules start at the prior."
            ) from error
        require(trace, ONLINE)
        refuse_moving_supports(model, trace, args, kwargs)
        jax.eval_shape(lambda key: check_global(key, model, args, kwargs), rng_key)


def set_up_guide(
    rng_key: Array, model: Model, guide: StartsAtPrior, args: tuple, kwargs: dict
) -> Gaussian:
    """The prior of the model with these arguments; the guide is set up where it has not been.

    Raises:
        ValueError: For a model that no online rule can take, where its sites are not those of the first call, or
            under a transformation, or if the guide starts elsewhere than at the prior.
    """
    if is_traced(rng_key, args, kwargs):
        raise ValueError(
            "OnlineVI.init sets the guide up, which keeps Python state: call it once outside of jit, vmap "
            "and scan; update and run can be transformed."
        )
    check_start(guide, "OnlineVI")
    # The prior may depend on the arguments, and the guide keeps that of its first call.
    other = guide if guide.prototype_trace is None else guide.fresh()
    # Shapes alone matter here: NumPyro's validation of the values waits for the rounds.
    with RUNNING, handlers.block(), numpyro.validation_enabled(False):
        check_model(rng_key, model, args, kwargs)
        first_call(lambda: other.set_up(rng_key, args, kwargs), other)
    if other.layout != guide.layout:
        raise ValueError(
            f"the latent sites are {other.layout.sites}, at the first call they were {guide.layout.sites}: build "
            "a new guide and OnlineVI for another shape."
        )
    return other.prior


def check_rows_apart(model: ModelLoss, theta: Array, args: tuple, kwargs: dict) -> None:
    """Raise where the loss of a datum depends on the predictor of another.

    Raises:
        ValueError: If the Jacobian of the losses in the predictors is not diagonal.
    """
    predict, losses_at = model.predictor, model.losses_given_predictor
    if predict is None or losses_at is None:
        return
    arrays, structure = separate(args, kwargs)

    def coupled(theta: Array, arrays: tuple[Array, ...]) -> Array:
        args, kwargs = join(arrays, structure)
        return _depend_on_others(
            lambda u: losses_at(u, theta, args, kwargs)[0], predict(theta, args, kwargs)
        )

    if bool(compile_once(coupled, theta, arrays)(theta, arrays)):
        raise ValueError(
            "the likelihood of one datum depends on the predictor of another, and a quadrature takes them one "
            "by one. Use monte_carlo()."
        )


def _depend_on_others(losses: Callable[[Array], Array], u: Array) -> Array:
    """Whether the Jacobian of the losses ``(S, n)`` in the predictors of n data is not diagonal."""
    n = u.shape[0]
    if n <= _DENSE:
        jacobian = jax.jacrev(losses)(u)
        diagonal = jnp.reshape(jnp.eye(n, dtype=bool), (1, n, n) + (1,) * (u.ndim - 1))
        return jnp.any(jnp.where(diagonal, 0.0, jnp.nan_to_num(jacobian)) != 0.0)

    # Too many for a matrix: the losses of one half of the data must not depend on the predictors of the other.
    def coupled(key: Array) -> Array:
        half, size = jax.random.split(key)
        mask = jax.random.bernoulli(half, shape=(n,))
        direction = jax.random.normal(size, u.shape, u.dtype)
        direction = jnp.where(
            jnp.reshape(mask, (n,) + (1,) * (u.ndim - 1)), direction, 0.0
        )
        _, change = jax.jvp(losses, (u,), (direction,))
        return jnp.any(jnp.where(mask, 0.0, jnp.nan_to_num(change)) != 0.0)

    return jnp.any(jax.lax.map(coupled, jax.random.split(jax.random.key(0), _SPLITS)))


def check_one_loss_a_row(
    model: Model, guide: StartsAtPrior, num_rows: int, args: tuple, kwargs: dict
) -> None:
    """Raise where an observed site has not one log-probability for each row of a batch.

    Raises:
        ValueError: If there is such a site, whose rows cannot be masked.
    """

    def log_probs() -> Params:
        values = {site: jnp.zeros(shape) for site, shape in guide.layout.sites}
        sites = likelihood.likelihood_sites(
            trace_unconstrained(model, values, args, kwargs)
        )
        return {
            name: likelihood.untempered_log_prob(site) for name, site in sites.items()
        }

    for name, value in jax.eval_shape(log_probs).items():
        if value.shape != (num_rows,):
            raise ValueError(
                f"observed site {name!r} has log-probabilities of shape {value.shape}, the mask has {num_rows} "
                "rows: to leave rows out there must be one log-probability for each row."
            )


def check_global(rng_key: Array, model: Model, args: tuple, kwargs: dict) -> None:
    """Raise where the shape of a latent grows when the data are repeated.

    Raises:
        ValueError: If there is such a local latent.
    """

    def shapes(args: tuple, kwargs: dict) -> dict[str, Shape]:
        trace = handlers.trace(handlers.seed(model, rng_key)).get_trace(*args, **kwargs)
        return {
            name: jnp.shape(site["value"])
            for name, site in likelihood.latent_sites(trace).items()
        }

    def twice(leaf: object) -> object:
        if not isinstance(leaf, jax.Array | np.ndarray) or not leaf.ndim:
            return leaf
        if spans_processes(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return jnp.concatenate([leaf, leaf])
        return jnp.asarray(np.concatenate([leaf, leaf]))

    once = shapes(args, kwargs)
    try:
        doubled = shapes(*jax.tree.map(twice, (args, kwargs)))
    except Exception:  # a model of fixed size has no local latents to find
        return
    local = sorted(name for name in once if once[name] != doubled.get(name))
    if local:
        raise ValueError(
            f"latent sites {local} have one value for each datum: an online rule holds global parameters only. "
            "Integrate them out of the model. If the data are one row, give them a leading axis: x[None]."
        )


def check_axes(
    arrays: tuple[Array, ...], structure: ArgumentStructure, num_axes: Shape | None
) -> None:
    """Raise where a datum comes without the leading axis of a batch, over which a model may broadcast it.

    Args:
        arrays: The data among the arguments of a round.
        structure: What is around them.
        num_axes: Of the arrays at the start; None where they were others.

    Raises:
        ValueError: If features have one axis less, or all arrays that had axes.
    """
    lost = [n for n, then in enumerate(num_axes or ()) if arrays[n].ndim == then - 1]
    had = [n for n, then in enumerate(num_axes or ()) if then]
    if (
        num_axes is None
        or not lost
        or (lost != had and all(num_axes[n] < 2 for n in lost))
    ):
        return
    leaves, _ = jax.tree_util.tree_flatten_with_path(join(arrays, structure))
    paths = [
        path
        for (path, _), is_array in zip(leaves, structure.is_array, strict=True)
        if is_array
    ]
    kind, place, *_ = paths[lost[0]]
    name = f"number {place.idx + 1}" if kind.idx == 0 else repr(place.key)
    raise ValueError(
        f"argument {name} of the model has shape {arrays[lost[0]].shape}, an axis less than at the start: a "
        "batch has a leading axis, of 1 for one datum. Pass x[None], or x[:1]."
    )


def check_batch(
    model: Model,
    guide: StartsAtPrior,
    expectation: Expectation,
    mask: Numbers | None,
    args: tuple,
    kwargs: dict,
) -> None:
    """Raise where the rows of a batch cannot be separated, as a mask or a quadrature needs.

    Raises:
        ValueError: If a site depends on several rows at once.
    """
    with RUNNING, numpyro.validation_enabled(False):
        if mask is not None:
            check_one_loss_a_row(model, guide, len(mask), args, kwargs)
        loss = model_loss(model, guide, expectation.predictor, expectation.num_outputs)
        check_rows_apart(loss, guide.prior.loc, args, kwargs)


class Observed(NamedTuple):
    """An observed site whose values are an argument of the model as it is.

    Attributes:
        name: The site.
        argument: Which of the arrays among the arguments it observes.
        support: Where the values must lie, whatever the parameters.
    """

    name: str
    argument: int
    support: Constraint


def support_check(
    model: Model, arrays: tuple[Array, ...], structure: ArgumentStructure
) -> Callable[..., None]:
    """A function of the arrays among a model's arguments that raises on values outside of a site's support.

    It looks at sites that observe an argument itself, over supports that depend on nothing. What is not finite
    is a missing value. The model is traced once, at the first call.
    """
    shapes = tuple(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays)

    @functools.cache
    def sites() -> tuple[Observed, ...]:
        try:
            return observed_arguments(model, shapes, structure)
        except Exception:  # the rounds themselves raise what is wrong with the model
            return ()

    def check(*arrays: Array) -> None:
        for site in sites():
            values = np.asarray(arrays[site.argument])
            if problem := describe_outside(site.name, site.support, values):
                raise ValueError(problem)

    return check


def observed_arguments(
    model: Model, shapes: tuple[jax.ShapeDtypeStruct, ...], structure: ArgumentStructure
) -> tuple[Observed, ...]:
    """The sites that observe an argument as it is, with a support that depends on nothing."""
    sites: list[Observed] = []

    def trace(key: Array, arrays: tuple[Array, ...]) -> None:
        args, kwargs = join(arrays, structure)
        model_trace = likelihood.get_trace(handlers.seed(model, key), args, kwargs)
        for name, site in likelihood.observed_sites(model_trace).items():
            support = fixed_support(site)
            # Masks are known in the rounds alone, and what is masked may be anything.
            if support is None or likelihood.is_masked(site["fn"]):
                continue
            sites.extend(
                Observed(name, k, support)
                for k, leaf in enumerate(arrays)
                if site["value"] is leaf
            )

    with RUNNING, handlers.block(), numpyro.validation_enabled(False):
        jax.eval_shape(trace, jax.random.key(0), shapes)
    return tuple(sites)
