"""Building and reading ArviZ data, in both of ArviZ's generations."""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from numpyro_tempered.core import ArrayLike, Labels, to_host

if TYPE_CHECKING:
    import xarray as xr

# Under ArviZ 1.x; under 0.x an ``arviz.InferenceData``, which has the same groups and attributes.
ArviZData: TypeAlias = "xr.DataTree"
Coords: TypeAlias = Mapping[str, Sequence[object]]
Dims: TypeAlias = Mapping[str, Sequence[str]]
Key = TypeVar("Key", bound=Hashable)
Groups: TypeAlias = Mapping[str, Mapping[str, ArrayLike]]

# The group that ``az.loo`` and ``az.compare`` read, taking the draws for those of the untempered posterior; and
# that of other draws, which they do not read.
LOG_LIK, UNTEMPERED = "log_likelihood", "untempered_log_likelihood"
_SAMPLE_GROUPS = (
    "posterior",
    LOG_LIK,
    UNTEMPERED,
    "posterior_predictive",
    "predictions",
    "sample_stats",
)


def versions() -> dict[str, str]:
    """Versions of this library and of what it ran on, as attributes."""
    name = "numpyro_tempered"
    others = {
        f"{library}_version": version(library)
        for library in ("numpyro", "jax", "arviz")
    }
    return {
        "inference_library": name,
        "inference_library_version": version(name),
        **others,
    }


def variable_name(name: str) -> str:
    """A site's name as a variable's: ``xarray.DataTree`` reads a slash, as of a ``scope``, as a path."""
    return name.replace("/", ".")


def dataset(
    values: Mapping[str, ArrayLike],
    sample_dims: Sequence[str] = (),
    coords: Coords | None = None,
    dims: Dims | None = None,
    attrs: Mapping[Key, object] | None = None,
    *,
    labels: Labels | None = None,
) -> "xr.Dataset":
    """A Dataset of arrays, with ArviZ's default names for unnamed dimensions.

    The ``labels`` of a dimension are its coordinates where they have its length and there are no others.

    Raises:
        ValueError: If ``dims`` names another number of dimensions than a variable has.
    """
    import xarray as xr

    coords, dims = dict(coords or {}), dict(dims or {})
    variables: dict[str, tuple[list[str], np.ndarray]] = {}
    sizes: dict[str, int] = {}
    for name, value in values.items():
        array = to_host(value)
        rest = array.ndim - len(sample_dims)
        named = list(dims.get(name, [f"{name}_dim_{i}" for i in range(rest)]))
        if len(named) != rest:
            raise ValueError(
                f"dims names {named} for {name!r}, which has {rest} dimension(s) besides {sample_dims}."
            )
        all_dims = [*sample_dims, *map(variable_name, named)]
        variables[variable_name(name)] = (all_dims, array)
        sizes.update(zip(all_dims, array.shape, strict=True))
    fitting = {
        dim: values
        for dim, values in (labels or {}).items()
        if len(values) == sizes.get(dim)
    }
    indexes: dict[str, object] = {dim: np.arange(size) for dim, size in sizes.items()}
    indexes |= fitting
    indexes |= {dim: values for dim, values in coords.items() if dim in sizes}
    return xr.Dataset(variables, coords=indexes, attrs=dict(attrs or {}))


def to_arviz(
    groups: Groups,
    attrs: Mapping[str, object],
    coords: Coords | None,
    dims: Dims,
    *,
    labels: Labels | None = None,
    new_labels: Labels | None = None,
) -> ArviZData:
    """Groups of arrays by site as ArviZ data, with the versions.

    Raises:
        ValueError: If two sites have one name, or ``dims`` names no variable.
    """
    for values in groups.values():
        if len({variable_name(name) for name in values}) < len(values):
            raise ValueError(
                f"two of the sites {sorted(values)} share a name once slashes become dots: rename one."
            )
    groups = {
        name: {variable_name(k): v for k, v in values.items()}
        for name, values in groups.items()
    }
    dims = {variable_name(k): v for k, v in dims.items()}
    variables = {name for values in groups.values() for name in values}
    if unknown := sorted(set(dims) - variables):
        raise ValueError(
            f"dims names {unknown}, which are not among the variables {sorted(variables)}."
        )
    attrs = {key: as_attr(value) for key, value in {**attrs, **versions()}.items()}
    datasets = {}
    for name, values in groups.items():
        named = dims
        if name in (LOG_LIK, UNTEMPERED):
            # A log-probability has no event dimensions.
            named = {
                k: dims[k][: np.ndim(v) - 2] for k, v in values.items() if k in dims
            }
        elif name == "variational":
            rounds = {
                k: ["round"]
                for k, v in values.items()
                if k.startswith("loss_") and np.ndim(v) == 1
            }
            named = {"loss": ["step"], **dims, **rounds}
        sample_dims = ("chain", "draw") if name in _SAMPLE_GROUPS else ()
        where: Coords | None = coords
        names: Any = labels
        if name.startswith("predictions"):
            # Other rows than those that were fitted, whose labels are not theirs.
            observed = groups.get("observed_data", {})
            rows = {dim for site in observed for dim in dims.get(site, ())}
            names = {**(labels or {}), **(coords or {})}
            names = {dim: each for dim, each in names.items() if dim not in rows}
            where, names = None, {**names, **(new_labels or {})}
        datasets[name] = dataset(values, sample_dims, where, named, attrs, labels=names)
    return assemble(datasets, attrs)


def as_attr(value: object) -> object:
    """An attribute as netCDF takes it: values by site in JSON."""
    return (
        json.dumps({variable_name(k): v for k, v in value.items()})
        if isinstance(value, Mapping)
        else value
    )


def assemble(
    groups: Mapping[str, "xr.Dataset"], attrs: Mapping[Key, object]
) -> ArviZData:
    """The groups as ArviZ data of the installed generation.

    Empty groups are left out.
    """
    import xarray as xr

    tree = xr.DataTree.from_dict(
        {
            "/": xr.Dataset(attrs=dict(attrs)),
            **{k: v for k, v in groups.items() if v.data_vars},
        }
    )
    # ArviZ 1.x has no type of its own, and takes seconds to import.
    if int(version("arviz").split(".")[0]) >= 1:
        return tree
    import arviz as az

    return az.from_datatree(tree)


@dataclass(eq=False)
class OnDemand:
    """ArviZ data that are made when they are first asked for: their draws may take longer than the fit."""

    make: Callable[[], ArviZData]

    @cached_property
    def data(self) -> ArviZData:
        """The data."""
        return self.make()

    def __reduce__(self) -> tuple[object, tuple[ArviZData]]:
        # What makes them holds functions, which pickle does not take.
        return _hold, (self.data,)


def _hold(data: ArviZData) -> OnDemand:
    return OnDemand(lambda: data)


def ecdf_band(size: int, prob: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A simultaneous band of the distribution function of uniform numbers, by the installed generation.

    Args:
        size: How many numbers there are.
        prob: The probability that their empirical distribution function lies within it everywhere.

    Returns:
        Points in (0, 1), and the lower and upper ends there.

    References:
        T. Säilynoja, P.-C. Bürkner, A. Vehtari, *Graphical test for discrete uniformity and its applications in
        goodness-of-fit evaluation and multiple sample comparison*, Statistics and Computing 2022.
    """
    if int(version("arviz").split(".")[0]) >= 1:
        from arviz_stats.ecdf_utils import ecdf_pit

        points, _, lower, upper = ecdf_pit((np.arange(size) + 0.5) / size, prob, 1000)
        return points[1:-1], lower[1:-1], upper[1:-1]
    from arviz.stats.ecdf_utils import ecdf_confidence_band

    points = np.arange(1, size) / size
    return points, *ecdf_confidence_band(size, points, points, prob=prob)


def with_group(
    data: ArviZData, name: str, values: "xr.Dataset", attrs: Mapping[Key, object]
) -> ArviZData:
    """ArviZ data with another group in front and further attributes."""
    groups = {key: group(data, key) for key in group_names(data)}
    return assemble({name: values, **groups}, {**data.attrs, **attrs})


def group(data: Mapping[str, Any], name: str) -> "xr.Dataset":
    """A group of ArviZ data as a Dataset, in either generation."""
    import xarray as xr

    values = data[name]
    return values if isinstance(values, xr.Dataset) else values.to_dataset()


def group_names(data: Mapping[str, object]) -> list[str]:
    """Names of the groups of ArviZ data, in either generation.

    Raises:
        TypeError: If the data are not ArviZ data.
    """
    if not isinstance(data, Mapping):
        raise TypeError(
            f"expected ArviZ data, got {type(data).__name__}: pass a result through to_inference_data."
        )
    return list(getattr(data, "children", data))
