"""Rounds of a model on disk, for processes that do not have the model."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    FilePath,
    Params,
    PyTree,
    check_known,
    describe,
    share_trace,
)
from numpyro_tempered.online.drivers import check_mask
from numpyro_tempered.online.stream import Rounds, RoundStep, Step, single
from numpyro_tempered.online.streams.files import kind_of, write_file
from numpyro_tempered.online.streams.load import (
    FORMAT,
    VERSION,
    check_flatbuffers,
    data_of,
    precision,
    with_leaves,
)
from numpyro_tempered.online.streams.structures import encode


def export_update(
    path: FilePath,
    online: Any,
    state: PyTree,
    *args: object,
    mask: ArrayLike | None = None,
    num_samples: int = 1000,
    platforms: Sequence[str] | None = None,
    **kwargs: object,
) -> None:
    """Write the rounds of an ``OnlineVI`` to a file that :func:`load_update` runs without model and guide.

    The file holds the traced program of :meth:`OnlineVI.update` (with the rule, the expectation, alpha, and what
    the model reads from elsewhere), a program that draws from the posterior, and the state. It is for batches of
    one shape; with a ``mask``, :func:`pad_batch` fills smaller batches up to it. It needs ``flatbuffers``, which
    ``pip install 'numpyro_tempered[export]'`` brings.

    Args:
        path: The file, written as :func:`save` does.
        online: The :class:`~numpyro_tempered.OnlineVI`.
        state: From its ``init``, or a later round.
        *args: Arguments of the model, as in a round: shapes and dtypes matter, values of arrays do not. Strings,
            None, booleans and integers are compiled in.
        mask: Booleans, shape ``(n,)``, to export :meth:`OnlineVI.update_masked`.
        num_samples: Draws of ``sample_posterior``.
        platforms: Where it will run, of ``"cpu"``, ``"cuda"``, ``"rocm"`` and ``"tpu"``; by default that of here.
        **kwargs: Keyword arguments of the model, likewise.

    Raises:
        ValueError: As :meth:`OnlineVI.update`, and if the model calls back into Python.
        TypeError: If ``online`` is no OnlineVI, the state is traced or made of types of your own, or an argument
            is neither data nor a string, boolean or integer.
        ImportError: Without ``flatbuffers``.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("theta", dist.Normal()), 1.0), obs=y)
        >>> online = nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal)
        >>> state = online.init(jax.random.key(0), jnp.ones(1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     nt.online.export_update(f"{folder}/update.npz", online, state, jnp.ones(1))
        ...     loaded = nt.online.load_update(f"{folder}/update.npz")
        >>> state, losses = loaded.update(loaded.state, jnp.ones(1))
        >>> int(state.count)
        1
    """
    check_flatbuffers()
    if not hasattr(online, "prepare_round"):
        raise TypeError(
            f"export_update(path, online, state, *args) takes an OnlineVI, got {describe(online)}."
        )
    check_known("export_update writes a file", state, args, kwargs)
    arrays, arguments, expectation = online.prepare_round(mask, args, kwargs)
    if odd := [
        value for value in arguments.static if not isinstance(value, str | int | None)
    ]:
        raise TypeError(
            f"an exported update takes arrays, strings, booleans and integers, got {odd[0]!r}."
        )
    mask = check_mask(mask, arrays, num_axes=1)
    impl = jax.random.key_impl(state.rng_key)
    step = Step(online.rule, expectation)
    # The trace that the OnlineVI runs, in which scalars have the dtypes that they had for the model.
    example = state.rule_state, arrays, state.rng_key, mask
    one_round: RoundStep = share_trace(step, *example)  # type: ignore[arg-type]

    def run(
        number: Array, leaves: list, arrays: list, mask: Array | None
    ) -> tuple[list, tuple]:
        before = with_leaves(state, leaves)
        rounds = Rounds(tuple(arrays), mask, number)
        after, losses = single(one_round, before.rule_state, rounds, before.rng_key)
        return data_of(before._replace(rule_state=after)), tuple(losses)

    def draw(key: Array, leaves: list) -> Params:
        rng_key = jax.random.wrap_key_data(key, impl=impl)
        return online.sample_posterior(rng_key, with_leaves(state, leaves), num_samples)

    values = data_of(state)
    leaves, rows, on = jax.tree.map(_form, (values, list(arrays), mask))
    export = functools.partial(jax.export.export, platforms=platforms)
    programs = (
        # The number of rounds is an argument here too, so that the compiler builds the same loop.
        export(jax.jit(run))(jax.ShapeDtypeStruct((), jnp.int32), leaves, rows, on),
        export(jax.jit(draw))(_form(jax.random.key_data(state.rng_key)), leaves),
    )
    header = {
        "format": FORMAT,
        "version": VERSION,
        "jax": jax.__version__,
        "platforms": programs[0].platforms,
        "precision": precision(),
        "state": encode(jax.tree.structure(state)),
        "kinds": [kind_of(leaf) for leaf in jax.tree.leaves(state)],
        "impl": str(impl),
        "arguments": encode(arguments.tree),
        "static": arguments.static,
        "is_array": arguments.is_array,
        "arrays": [kind_of(array) for array in arrays],
        "mask": None if mask is None else kind_of(mask),
    }
    write_file(
        path,
        header,
        [*(np.frombuffer(p.serialize(), np.uint8) for p in programs), *values],
    )


def _form(leaf: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
