"""Rounds of a model from a file, without the model."""

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    ArgumentStructure,
    Array,
    ArrayLike,
    FilePath,
    Params,
    PyTree,
    held_array,
    is_list,
    separate,
)
from numpyro_tempered.online.base import Losses
from numpyro_tempered.online.streams.files import (
    describe,
    difference,
    from_bytes,
    is_key,
    kind_of,
    read_file,
    readable,
)
from numpyro_tempered.online.streams.structures import decode

FORMAT, VERSION = "numpyro_tempered update", 1


class LoadedUpdate(NamedTuple):
    """The rounds of an ``OnlineVI`` without its model; made by :func:`load_update`.

    They run under ``jax.jit``; JAX does not map exported programs.

    Attributes:
        state: The state that was exported, and ``like`` for :func:`restore`.
        round: ``(state, arrays, mask) -> (state, losses)``, compiled at its first call.
        sample: ``(rng_key, state) -> draws``, likewise.
        arguments: The arguments of the model, without their arrays.
        kinds: Dtype and shape of each array among them.
        mask: Dtype and shape of the mask, or None for rounds without one.
    """

    state: PyTree
    round: Callable[..., tuple]
    sample: Callable[..., Params]
    arguments: ArgumentStructure
    kinds: tuple
    mask: list | None

    def update(
        self, state: PyTree, *args: object, **kwargs: object
    ) -> tuple[PyTree, Losses]:
        """As :meth:`OnlineVI.update`, bit for bit.

        Labels outside of a support raise no error here, as the model is not looked at; what is not finite rejects
        the round.

        Args:
            state: Of the structure, shapes and dtypes of ``state``.
            *args: Arguments of the model, of the shapes and dtypes that were exported.
            **kwargs: Keyword arguments of the model.

        Returns:
            The state, and the scalar :class:`Losses` before the update.

        Raises:
            ValueError: If a structure, shape or dtype is another, or the rounds have a mask.
        """
        return self._update(state, None, args, kwargs)

    def update_masked(
        self, state: PyTree, mask: ArrayLike, *args: object, **kwargs: object
    ) -> tuple[PyTree, Losses]:
        """As :meth:`OnlineVI.update_masked`, of an update that was exported with a mask.

        Args:
            state: Of the structure, shapes and dtypes of ``state``.
            mask: Booleans, shape ``(n,)``: the rows that are on.
            *args: Arguments of the model, of the shapes and dtypes that were exported.
            **kwargs: Keyword arguments of the model.

        Returns:
            The state, and the scalar :class:`Losses` before the update, of the rows that are on.

        Raises:
            ValueError: If a structure, shape or dtype is another, or the rounds have no mask.
        """
        return self._update(state, jax.device_put(np.array(mask)), args, kwargs)

    def sample_posterior(self, rng_key: Array, state: PyTree) -> Params:
        """Draws of the latent sites, on the scale of the model.

        Args:
            rng_key: Key.
            state: Of the structure, shapes and dtypes of ``state``.

        Returns:
            By site, with a leading axis of the ``num_samples`` that were exported.

        Raises:
            ValueError: If the state is of another structure, shape or dtype.
        """
        self._check_state(state)
        return self.sample(rng_key, state)

    def _update(
        self, state: PyTree, mask: Array | None, args: tuple, kwargs: dict
    ) -> tuple[PyTree, Losses]:
        if (mask is None) != (self.mask is None):
            with_or_without, name = (
                ("without", "update")
                if self.mask is None
                else ("with", "update_masked")
            )
            raise ValueError(
                f"this update was exported {with_or_without} a mask: call {name}."
            )
        self._check_state(state)
        arrays, structure = separate(
            *jax.tree.map(_to_device, (args, kwargs), is_leaf=is_list)
        )
        if structure != self.arguments:
            raise ValueError(_other_arguments(structure, self.arguments))
        for number, (array, kind) in enumerate(zip(arrays, self.kinds, strict=True)):
            _check_kind(array, kind, f"array {number} of the arguments")
        if mask is not None:
            _check_kind(mask, self.mask, "mask")
        return self.round(state, arrays, mask)

    def _check_state(self, state: PyTree) -> None:
        structure, expected = (
            jax.tree.flatten(tree)[1] for tree in (state, self.state)
        )
        if structure != expected:  # type: ignore[operator]
            where = difference(describe(structure), describe(expected))
            raise ValueError(f"the state is not of the run that was exported: {where}.")
        for leaf, like in zip(
            jax.tree.leaves(state), jax.tree.leaves(self.state), strict=True
        ):
            if leaf.shape != like.shape or leaf.dtype != like.dtype:
                _check_kind(leaf, kind_of(like), "the state")


def load_update(path: FilePath) -> LoadedUpdate:
    """Read what :func:`export_update` wrote.

    Neither the model nor its guide is needed. XLA compiles the programs at their first calls, or finds them in
    JAX's compilation cache on disk. Results are those of the ``OnlineVI`` bit for bit on the same kind of machine
    and with the same version of jax; others may round differently. A file holds programs: load those of people
    that you trust.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: If there is no file.
        ValueError: If it is truncated or of another format, platform or precision, or if this version of jax
            cannot read it.
        ImportError: Without ``flatbuffers``.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal())
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> online = nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal)
        >>> y, mask = jnp.ones(4), jnp.ones(4, bool)
        >>> state = online.init(jax.random.key(0), y)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nt.online.export_update(f"{folder}/update.npz", online, state, y, mask=mask)
        ...     loaded = nt.online.load_update(f"{folder}/update.npz")
        >>> (y,), mask = nt.online.pad_batch(jnp.ones(3), size=4)
        >>> state, losses = loaded.update_masked(loaded.state, mask, y)
        >>> int(state.count)
        1
    """
    check_flatbuffers()
    header, arrays = read_file(path, "an update that export_update wrote")
    name, version = header.get("format"), header.get("version")
    if (name, version) != (FORMAT, VERSION):
        raise ValueError(
            f"{path} holds {name!r} of version {version}, expected {FORMAT!r} of {VERSION}."
        )
    platform = jax.export.default_export_platform()
    if platform not in header["platforms"]:
        raise ValueError(
            f"{path} was exported for {' and '.join(header['platforms'])}, and JAX runs on {platform} here: "
            f"export it with platforms=[{platform!r}, ...]."
        )
    if header["precision"] != precision():
        raise ValueError(
            f"{path} was exported where JAX computes in {header['precision']}, and here it computes in "
            f"{precision()}: set jax_enable_x64 as it was at the export."
        )
    try:
        programs = [
            jax.export.deserialize(bytearray(array.tobytes())) for array in arrays[:2]
        ]
    except Exception as error:
        raise ValueError(
            f"{path} was exported by jax {header['jax']}, and jax {jax.__version__} cannot read its programs "
            f"({type(error).__name__}: {error}): export it anew."
        ) from error
    leaves = []
    for (dtype, shape), array in zip(header["kinds"], arrays[2:], strict=True):
        if dtype.startswith("key<"):
            leaves.append(
                jax.random.wrap_key_data(jax.device_put(array), impl=header["impl"])
            )
        else:
            leaves.append(
                from_bytes(array, jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype)))
            )
    static = tuple(header["static"])
    example = decode(header["arguments"], iter(range(len(static))))
    kinds = tuple(type(value) for value in static)
    return LoadedUpdate(
        state=decode(header["state"], iter(leaves)),
        round=functools.partial(_compiled_round(programs[0].call), np.int32(1)),
        sample=_compiled_draw(programs[1].call),
        arguments=ArgumentStructure(
            jax.tree.structure(example), tuple(header["is_array"]), static, kinds
        ),
        kinds=tuple(header["arrays"]),
        mask=header["mask"],
    )


def check_flatbuffers() -> None:
    """Raise ImportError where JAX cannot write and read programs."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError(
            "JAX needs flatbuffers for exported programs: pip install 'numpyro_tempered[export]'."
        )


def precision() -> str:
    """The dtype in which JAX computes with Python's floats."""
    return str(jax.dtypes.canonicalize_dtype(float))


def _compiled_round(call: Callable[..., tuple]) -> Callable[..., tuple]:
    @jax.jit
    def run(
        number: Array, state: PyTree, arrays: tuple, mask: Array | None
    ) -> tuple[PyTree, Losses]:
        leaves, losses = call(number, data_of(state), list(arrays), mask)
        return with_leaves(state, leaves), Losses(*losses)

    return run


def _compiled_draw(call: Callable[..., dict]) -> Callable[..., dict]:
    return jax.jit(
        lambda rng_key, state: call(jax.random.key_data(rng_key), data_of(state))
    )


def data_of(state: PyTree) -> list[Array]:
    """The leaves of a state, keys as their words."""
    return [
        jax.random.key_data(leaf) if is_key(leaf) else leaf
        for leaf in jax.tree.leaves(state)
    ]


def with_leaves(state: PyTree, data: list[Array]) -> PyTree:
    """A state with other leaves, as :func:`data_of` has them."""
    like, structure = jax.tree.flatten(state)
    leaves = [
        jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
        if is_key(leaf)
        else array
        for leaf, array in zip(like, data, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


def _to_device(leaf: object) -> object:
    """An argument that is data as an array of JAX; ``jnp.asarray`` would compile a program for each shape."""
    is_data = hasattr(leaf, "ndim") or isinstance(leaf, float) or is_list(leaf)
    if isinstance(leaf, jax.Array) or not is_data:
        return leaf
    # A copy, as a stream may fill its arrays with the next round while this one runs.
    return jax.device_put(np.array(held_array(leaf, "an argument of an update")))


def _check_kind(leaf: Array, kind: list | None, name: str) -> None:
    """Raise ValueError where an array has not the dtype and shape that were exported."""
    if kind is not None and kind_of(leaf) != kind:
        raise ValueError(
            f"{name} is {readable(kind_of(leaf))}, this update was exported for {readable(kind)}: it is for one "
            "shape and precision. Export one with a mask for batches of several sizes."
        )


def _other_arguments(structure: ArgumentStructure, expected: ArgumentStructure) -> str:
    """What differs between the arguments of a call and those of the export."""
    if structure.tree != expected.tree:
        return (
            f"the arguments are nested as {structure.tree}, this update was exported for {expected.tree}: pass "
            "positional and keyword arguments as at the export."
        )
    pairs = zip(
        *(
            zip(a.is_array, a.kinds, a.static, strict=True)
            for a in (structure, expected)
        ),
        strict=True,
    )
    number, got, expect = next(
        (i, *pair) for i, pair in enumerate(pairs) if pair[0] != pair[1]
    )
    words = [
        "an array" if is_array else repr(value) for is_array, _, value in (got, expect)
    ]
    return f"argument {number} is {words[0]}, this update was exported for {words[1]}."
