"""The call of a function that fits a model: its key, its model, and the arguments that it passes on."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.distributions import Distribution
from numpyro.infer.initialization import init_to_feasible

from numpyro_tempered.core import (
    RUNNING,
    Model,
    all_finite,
    automatic_mesh,
    call_of,
    check_key,
    check_options,
    check_order,
    check_same,
    describe,
    frame_columns,
    held_array,
    is_frame,
    is_list,
    is_traced,
    spans_processes,
    to_host,
)
from numpyro_tempered.handlers.effects import Trace, handler_chain
from numpyro_tempered.handlers.likelihood import (
    get_trace,
    is_masked,
    likelihood_sites,
    untempered_log_prob,
)

FramePolicy: TypeAlias = Literal["kept", "refused", "converted"]
_OF_TEMPER = {"factors", "strict", "discrete_parameters"}


def check_call(
    function: Callable[..., object],
    rng_key: object,
    model: Model,
    method: object,
    args: tuple,
    kwargs: dict,
    **options: object,
) -> tuple[tuple, dict]:
    """The arguments of a model as arrays, of a function that takes key, model and guide or method before them.

    The ``options`` must be the same in all processes that share the data, as the key must.

    Raises:
        TypeError: If one of these was left out, they are in another order, or as :func:`model_arguments`.
        ValueError: If data are NaN or infinite.
    """
    call = call_of(function)
    check_key_and_model(function, rng_key, model)
    if (
        method is None
        or isinstance(method, int | float | list | tuple | dict)
        or hasattr(method, "shape")
    ):
        name = list(inspect.signature(function).parameters)[2]
        raise TypeError(
            f"{name} must be a class such as AutoNormal, or a callable that takes the model, got "
            f"{describe(method)}: the call is {call}."
        )
    numbered = {f"number {place}": value for place, value in enumerate(args, 1)}
    check_same({"rng_key": rng_key, **options, **numbered, **kwargs})
    result = model_arguments(function, model, args, kwargs)
    check_order({**options, "data": args, **kwargs})
    return result


def check_key_and_model(
    function: Callable[..., object], rng_key: object, model: Model
) -> None:
    """Refuse a call of a function that takes key and model first, where one of these was left out.

    Raises:
        TypeError: If they are none.
    """
    call = call_of(function)
    check_key(rng_key, call)
    if isinstance(model, type) or not callable(model):
        raise TypeError(
            f"model must be a NumPyro model, a function, got {describe(model)}: the call is {call}."
        )


def model_arguments(
    function: Callable[..., object],
    model: Model,
    args: tuple,
    kwargs: dict,
    *,
    finite: bool = True,
    frames: FramePolicy = "kept",
) -> tuple[tuple, dict]:
    """The arguments of a model as arrays: pandas objects, and lists of numbers if the model cannot take them.

    Args:
        function: What was called, for its name and options in errors.
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        finite: Whether to refuse data that are NaN or infinite and that the model does not mask.
        frames: Whether a model that reads columns of a frame by their names gets it, or is ``"refused"``, as
            where one program serves other values; ``"converted"`` does not look, as in the rounds of a stream.

    Raises:
        TypeError: If the model does not take these arguments, or one holds text, or a frame, that it cannot have.
        ValueError: If data are not ``finite``.
    """
    if not (finite or kwargs) and all(map(_is_array, args)):
        # A round of a stream must not wait.
        return args, kwargs
    labels = argument_names(function, model, args, kwargs)
    values = (*args, *kwargs.values())
    check_order(dict(zip(labels, values, strict=True)))

    def read(convert: Callable[[object, str], object]) -> tuple[tuple, dict]:
        parts = [
            jax.tree.map(
                lambda leaf, label=label: convert(leaf, label), value, is_leaf=is_list
            )
            for label, value in zip(labels, values, strict=True)
        ]
        return tuple(parts[: len(args)]), dict(
            zip(kwargs, parts[len(args) :], strict=True)
        )

    result = read(_plain)
    has_frames = frames != "converted" and any(map(is_frame, jax.tree.leaves(values)))
    odd = any(map(_is_odd, jax.tree.leaves(result, is_leaf=is_list)))
    if (has_frames or odd) and not _runs(model, *result):
        # The model reads columns of a frame by their names, on the host; or else it uses what is there as data.
        frames_kept = read(_frame_copy)
        is_read = has_frames and _runs(model, *frames_kept)
        if is_read and frames == "refused":
            raise TypeError(
                "the model reads columns of a data frame by their names, and the program of all rounds takes "
                "arrays: make the columns its arguments, as frame['x'].to_numpy()."
            )
        result = frames_kept if is_read else read(_numbers)
    if finite:
        _check_finite(model, result[0], result[1], labels)
    return result


def argument_columns(
    function: Callable[..., object], model: Model, args: tuple, kwargs: dict
) -> dict[str, tuple]:
    """The columns of the tables in a model's arguments, by its names for these."""
    names = argument_names(function, model, args, kwargs)
    return frame_columns(dict(zip(names, (*args, *kwargs.values()), strict=True)))


def argument_names(
    function: Callable[..., object], model: Model, args: tuple, kwargs: dict
) -> list[str]:
    """What to call each argument of a model, in order.

    Raises:
        TypeError: If the model does not take them.
    """
    # Handlers of NumPyro and of this package pass all arguments on; a wrapper of the user's may not.
    layers = handler_chain(model)
    inner = next(
        (
            f
            for f in layers
            if not type(f).__module__.startswith(("numpyro.", "numpyro_tempered."))
        ),
        model,
    )
    positional = [f"number {i + 1}" for i in range(len(args))]
    try:
        signature = inspect.signature(inner, follow_wrapped=False)
    except (TypeError, ValueError):
        return [*positional, *kwargs]
    parameters = signature.parameters.values()
    names = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        by_keyword = [
            p.name
            for p in parameters
            if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        taker = f"{call_of(function)} passes the rest on to the model, which"
        options = [
            p.name
            for p in inspect.signature(function).parameters.values()
            if p.kind is p.KEYWORD_ONLY
        ]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            if of_temper := sorted(_OF_TEMPER & set(kwargs) - {*by_keyword, *options}):
                raise TypeError(
                    f"{taker} has no argument {of_temper[0]!r}, which is one of nt.temper: pass "
                    f"nt.temper(model, alpha, {of_temper[0]}=...) as the model."
                ) from error
            check_options(kwargs, {*by_keyword, *options}, taker)
        raise TypeError(
            f"{taker} cannot be called so: {error}. It takes {signature}."
        ) from error
    return [*names[: len(args)], *positional[len(names) :], *kwargs]


def _is_array(value: object) -> bool:
    return isinstance(value, jax.Array) or (
        isinstance(value, np.ndarray)
        and not isinstance(value, np.ma.MaskedArray)
        and not _is_odd(value)
    )


def _is_odd(leaf: object) -> bool:
    return is_list(leaf) or (
        isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUTmM"
    )


def _plain(leaf: Any, label: str) -> Any:
    """Data as an array, be it of objects that the model may look at; everything else as it is."""
    leaf = automatic_mesh(leaf)
    is_arrow = type(leaf).__module__.startswith("pyarrow")
    if not (is_arrow or hasattr(leaf, "ndim") or hasattr(leaf, "to_numpy")):
        return leaf
    try:
        return held_array(leaf, f"argument {label!r} of the model")
    except TypeError:
        if getattr(getattr(leaf, "dtype", None), "kind", "O") == "c":
            raise
        return leaf.to_numpy() if hasattr(leaf, "to_numpy") else leaf


def _frame_copy(leaf: Any, label: str) -> Any:
    """A copy of a data frame, which its owner may change; everything else as :func:`_plain`."""
    if not is_frame(leaf):
        return _plain(leaf, label)
    return leaf.copy() if hasattr(leaf, "copy") else leaf.clone()


def _numbers(leaf: object, label: str) -> object:
    plain = _plain(leaf, label)
    return (
        held_array(leaf, f"argument {label!r} of the model")
        if _is_odd(plain)
        else plain
    )


def feasible_trace(model: Model, args: tuple, kwargs: dict) -> Trace:
    """A trace of a model at feasible values of its latents, of which not all priors can be drawn."""
    seeded = handlers.seed(model, jax.random.key(0))
    return get_trace(
        handlers.substitute(seeded, substitute_fn=init_to_feasible), args, kwargs
    )


def _runs(model: Model, args: tuple, kwargs: dict) -> bool:
    """Whether a model has a likelihood at these arguments."""
    try:
        with (
            RUNNING,
            handlers.block(),
            numpyro.validation_enabled(False),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            # jax warns of lists in the place of arrays.
            warnings.simplefilter("error", DeprecationWarning)
            # Not under a transformation: a model may keep what it computes in its first run.
            for site in likelihood_sites(feasible_trace(model, args, kwargs)).values():
                untempered_log_prob(site)
    except Exception:
        return False
    return True


def _check_finite(model: Model, args: tuple, kwargs: dict, labels: list[str]) -> None:
    """Refuse data that are not finite, where the log-likelihood is not either; a model may mask them.

    Raises:
        ValueError: If there are some.
    """
    values = zip(labels, (*args, *kwargs.values()), strict=True)
    holes = [
        (label, text)
        for label, value in values
        for leaf in jax.tree.leaves(value)
        if (text := _holes(leaf))
    ]
    if not holes:
        return
    label, text = holes[0]
    advice = (
        "Leave such data out, fill them in, or mask them, by numpyro.handlers.mask."
    )
    with handlers.block(), numpyro.validation_enabled(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            sites = likelihood_sites(feasible_trace(model, args, kwargs))
            log_probs = {
                name: to_host(untempered_log_prob(site)) for name, site in sites.items()
            }
        except Exception:  # the fit itself raises what is wrong with the model
            return
    for name, log_prob in log_probs.items():
        if not np.all(np.isfinite(log_prob)) and (bad := _holes(sites[name]["value"])):
            raise ValueError(f"observed site {name!r} has {bad}. {advice}")
        # Of logits that are NaN, BernoulliLogits has the log-probability 0.
        if np.any(np.isnan(log_prob)) or _has_nan_parameters(sites[name]["fn"]):
            raise ValueError(
                f"argument {label!r} of the model has {text}, which makes site {name!r} NaN. {advice}"
            )


def _has_nan_parameters(fn: Distribution) -> bool:
    leaves = () if is_masked(fn) else jax.tree.leaves(fn)
    numbers = (
        leaf for leaf in leaves if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    )
    return any(np.any(np.isnan(to_host(leaf))) for leaf in numbers)


def _holes(leaf: object) -> str:
    """How many entries are NaN or infinite, and where the first one is; nothing where all are finite."""
    if is_frame(leaf):
        return "a column with NaN or infinite values"
    if is_traced(leaf) or not jnp.issubdtype(
        getattr(leaf, "dtype", type(leaf)), jnp.inexact
    ):
        return ""
    if spans_processes(leaf) and all_finite(leaf):
        return ""
    values = to_host(leaf)
    bad = np.argwhere(~np.isfinite(values))
    if not len(bad):
        return ""
    index = tuple(bad[0].tolist())
    place = (
        f", the first at index {index if len(index) > 1 else index[0]}" if index else ""
    )
    return f"{len(bad)} of {values.size} values that are NaN or infinite{place}"
