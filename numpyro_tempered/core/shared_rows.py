"""Rows that each process reads for itself, as arrays of all processes."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_tempered.core.chunks import common_rows, grow
from numpyro_tempered.core.processes import digest_of, gather
from numpyro_tempered.core.rows import held_arrays
from numpyro_tempered.core.typing import Array, PyTree


def share_rows(
    *data: PyTree, mesh: Mesh | None = None
) -> tuple[tuple[PyTree, ...], Array]:
    """The rows of all processes as arrays that every fit takes, and the mask of those that are data.

    All processes of ``jax.distributed`` call it together, each with the rows that it has read. Their numbers may
    differ: JAX shards evenly, and copies of the last row of a process fill it up, where the mask is False. In a
    NumPyro model ``with numpyro.handlers.mask(mask=mask):`` around the observed sites leaves them out; of
    mixtures the mask is the ``sample_weight``. With a single process rows go over its devices.

    Args:
        *data: Arrays, data frames or trees of arrays with one common leading axis of rows: those of this process.
        mesh: Over all axes of which rows are sharded; by default all devices of all processes.

    Returns:
        The arrays with the rows of process 0 first, and the mask ``(m,)``, m the rows with those that fill up.

    Raises:
        ValueError: In all processes, if in one of them the arrays have no common leading axis or no row, or rows
            have other shapes or dtypes than in another.

    Example:
        >>> import numpy as np
        >>> import numpyro_tempered as nt
        >>> (x, y), mask = nt.online.share_rows(np.ones((4, 2)), np.arange(4.0))
        >>> x.shape, nt.online.to_host(y)[nt.online.to_host(mask)].tolist()
        ((4, 2), [0.0, 1.0, 2.0, 3.0])
    """
    mesh = (
        Mesh(np.array(jax.devices()), ("rows",))
        if mesh is None
        else Mesh(mesh.devices, mesh.axis_names)
    )
    rows, num_rows, failure = _read(data)
    num_devices = sum(
        device.process_index == jax.process_index() for device in mesh.devices.flat
    )
    form = [(leaf.shape[1:], str(leaf.dtype)) for leaf in jax.tree.leaves(rows)]
    # What one process refuses all refuse: those that went on would wait for it without end.
    everywhere = gather(
        np.append(np.array([num_rows, num_devices], np.uint32), digest_of(form)),
        NamedSharding(mesh, PartitionSpec()),
    )
    if failure is not None:
        raise failure
    if empty := np.flatnonzero(everywhere[:, 0] == 0).tolist():
        raise ValueError(
            f"the processes of devices {empty} pass no rows, or arrays without one common axis of rows: each "
            "process needs a row at least."
        )
    if (everywhere[:, 2:] != everywhere[:1, 2:]).any():
        raise ValueError(
            f"rows differ in shape or dtype between the processes: here they are {form}."
        )
    size = int(np.max(-(-everywhere[:, 0].astype(int) // everywhere[:, 1].astype(int))))
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def share(leaf: np.ndarray) -> Array:
        filled = grow(leaf, size * num_devices).astype(
            jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False
        )
        shape = (size * mesh.size, *leaf.shape[1:])
        return jax.make_array_from_process_local_data(sharding, filled, shape)

    return jax.tree.map(share, rows), share(np.arange(size * num_devices) < num_rows)


def _read(data: tuple[PyTree, ...]) -> tuple[tuple[PyTree, ...], int, Exception | None]:
    """The rows as arrays of the host with their number; 0 rows and the error where they are none."""
    try:
        rows = jax.tree.map(np.asarray, held_arrays(data, "the data of share_rows"))
        return rows, common_rows(rows, "share_rows", 1), None
    except (TypeError, ValueError) as error:
        return (), 0, error
