"""Building and reading ArviZ data, in both of ArviZ's generations."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import xarray as xr

Coords = Mapping[str, Sequence[Any]]
Dims = Mapping[str, Sequence[str]]


def versions() -> dict[str, str]:
    """Versions of this library and of what it ran on, as attributes."""
    return {
        "inference_library": "numpyro_tempered",
        "inference_library_version": version("numpyro_tempered"),
        "numpyro_version": version("numpyro"),
        "jax_version": version("jax"),
        "arviz_version": version("arviz"),
    }


def variable_name(name: str) -> str:
    """A site's name as a variable's: a slash, as of a ``scope``, would be a path to ``xarray.DataTree``."""
    return name.replace("/", ".")


def dataset(
    values: Mapping[str, Any],
    sample_dims: Sequence[str] = (),
    coords: Coords | None = None,
    dims: Dims | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> "xr.Dataset":
    """A Dataset of arrays, with ArviZ's default names for unnamed dimensions.

    Raises:
        ValueError: If ``dims`` names another number of dimensions than a variable has.
    """
    import xarray as xr

    coords, dims = dict(coords or {}), dict(dims or {})
    variables: dict[str, Any] = {}
    used: dict[str, int] = {}
    for name, value in values.items():
        array = np.asarray(value)
        rest = array.ndim - len(sample_dims)
        named = list(dims.get(name, [f"{name}_dim_{i}" for i in range(rest)]))
        if len(named) != rest:
            raise ValueError(
                f"dims names {named} for {name!r}, which has {rest} dimension(s) beside {sample_dims}."
            )
        all_dims = [*sample_dims, *named]
        variables[name] = (all_dims, array)
        used.update(zip(all_dims, array.shape, strict=True))
    indexes = {dim: coords.get(dim, np.arange(size)) for dim, size in used.items()}
    return xr.Dataset(variables, coords=indexes, attrs=dict(attrs or {}))


def assemble(groups: Mapping[str, "xr.Dataset"], attrs: Mapping[str, Any]) -> Any:
    """The groups as ArviZ data of the installed generation.

    Empty groups are left out.
    """
    import xarray as xr

    tree = xr.DataTree.from_dict(
        {"/": xr.Dataset(attrs=dict(attrs)), **{k: v for k, v in groups.items() if v.data_vars}}
    )
    import arviz as az

    return az.from_datatree(tree) if hasattr(az, "from_datatree") else tree


def group(data: Any, name: str) -> "xr.Dataset":
    """A group of ArviZ data as a Dataset, in either generation."""
    found = data[name]
    return found.to_dataset() if hasattr(found, "to_dataset") else found


def group_names(data: Any) -> list[str]:
    """Names of the groups of ArviZ data, in either generation."""
    return list(data.children) if hasattr(data, "children") else list(data.groups())
