"""Rows over several devices: the data of one fit in pieces, sums over pieces by the compiler."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_tempered.core.typing import Array, ArrayLike


def shard_rows(x: ArrayLike, mesh: Any, sample_weight: ArrayLike | None = None) -> tuple[Array, Array]:
    """Rows over the devices of a mesh, and their weights; what to give :func:`fit`, :func:`em` and their kin.

    JAX shards rows evenly. Where their number is not a multiple of the number of devices, copies of the last row
    with weight 0 fill up: weights of 0 change no sum. A start that is random draws other rows than without them.

    Args:
        x: All rows ``(n, d)``, on this host. With several processes each makes its own global array from its own
            rows by ``jax.make_array_from_process_local_data`` instead.
        mesh: A mesh, such as ``jax.make_mesh((jax.device_count(),), ("rows",))``; rows go over all its axes.
        sample_weight: How often each row counts, ``(n,)``.

    Returns:
        Rows ``(m, d)`` and weights ``(m,)``, m >= n, for ``fit(key, rows, ..., sample_weight=weights)``.

    Raises:
        ValueError: If there is no row, or the weights do not fit.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> mesh = jax.make_mesh((jax.device_count(),), ("rows",))
        >>> rows, weight = nt.mixtures.shard_rows(np.ones((5, 2)), mesh)
        >>> float(weight.sum())
        5.0
    """
    rows = np.asarray(x)
    if rows.ndim == 0 or rows.shape[0] == 0:
        raise ValueError(f"x has shape {rows.shape}; at least one row is needed.")
    floating = rows.dtype if np.issubdtype(rows.dtype, np.floating) else float
    weight = np.ones(len(rows), floating) if sample_weight is None else np.asarray(sample_weight, floating)
    if weight.shape != rows.shape[:1]:
        raise ValueError(f"sample_weight has shape {weight.shape}; expected {rows.shape[:1]}.")
    missing = -len(rows) % mesh.size
    rows = np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])
    weight = np.concatenate([weight, np.zeros(missing, floating)])
    sharding = NamedSharding(Mesh(mesh.devices, mesh.axis_names), PartitionSpec(mesh.axis_names))
    return jax.device_put(rows, sharding), jax.device_put(weight, sharding)


def automatic(x: Any) -> Any:
    """The same array under a mesh whose axes are the compiler's business; other values as they are.

    Under a mesh with explicit axes, which newer jax makes by default, each operation would have to name the
    sharding of its result.

    Raises:
        ValueError: If the columns are sharded.
    """
    if (
        isinstance(x, jax.core.Tracer)
        or not isinstance(x, jax.Array)
        or not isinstance(x.sharding, NamedSharding)
    ):
        return x
    if x.sharding.shard_shape(x.shape)[1:] != x.shape[1:]:
        raise ValueError(f"the columns of x are sharded by {x.sharding.spec}; shard rows alone.")
    mesh: Any = x.sharding.mesh
    return jax.device_put(x, NamedSharding(Mesh(mesh.devices, mesh.axis_names), x.sharding.spec))


def beside(values: Any, rows: Any) -> Array:
    """One value a row, on the devices of the rows."""
    if not isinstance(rows, jax.Array) or not isinstance(rows.sharding, NamedSharding):
        return jnp.asarray(values)
    spec = PartitionSpec(*rows.sharding.spec[:1])
    return jax.device_put(automatic(values), NamedSharding(rows.sharding.mesh, spec))
