"""Components of mixed columns: a product of components of some columns each."""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_tempered.core import Array, ArrayLike, Params, Shape, is_traced, matmul
from numpyro_tempered.mixtures.components import base as components
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.base import (
    Component,
    Hyperparameters,
    Parameters,
    Sample,
)


class Part(NamedTuple):
    """A component of some of the columns."""

    name: str
    component: Component
    columns: Shape

    @property
    def column_index(self) -> np.ndarray:
        """The columns, as an index of one width whatever jax's default is."""
        return np.asarray(self.columns, np.int32)


def product(
    parts: Mapping[str, Component], columns: Mapping[str, int | Sequence[int]]
) -> Component:
    """Components whose columns fall into parts that are independent given the component.

    Args:
        parts: The component of each part, by a name. Posteriors and priors are dicts by these names; parameters
            have the name of their part before their own, as in ``size_loc``.
        columns: By the same names, either each part's number of columns, taken from the left in the order of
            ``parts``, or the indices of its columns. Each column belongs to one part.

    Returns:
        The component. Missing entries are allowed in the columns of parts that allow them.

    Raises:
        TypeError: If a part is not a component.
        ValueError: If the names differ, a column belongs to no part, or to two, or a part has no
            ``coefficients_at``.

    Example:
        >>> import numpyro_tempered as nt
        >>> parts = {"size": nt.mixtures.components.gaussian(2), "kind": nt.mixtures.components.categorical([3])}
        >>> component = nt.mixtures.components.product(parts, {"size": [0, 2], "kind": [1]})
        >>> component.check([[0.1, 2, 0.3], [0.4, 0, 0.5]]).shape
        (2, 3)
    """
    for name, part in parts.items():
        components.check_is_component(part, f"product: part {name!r}")
        if part.coefficients_at is None:
            raise ValueError(
                f"product: part {name!r} leaves out coefficients_at, which a product needs."
            )
    if not parts or set(parts) != set(columns):
        raise ValueError(
            f"product: the parts are {list(parts)}, columns are given for {list(columns)}."
        )
    indices = _indices({name: columns[name] for name in parts})
    structure = tuple(
        Part(name, part._replace(prior=None), indices[name])
        for name, part in parts.items()
    )
    prior = {name: part.prior for name, part in parts.items()}
    return _product(structure, False)._replace(prior=prior)


def _indices(columns: dict[str, int | Sequence[int]]) -> dict[str, Shape]:
    """The columns of each part.

    Raises:
        ValueError: If a column belongs to no part, or to two.
    """
    if len({isinstance(value, int | np.integer) for value in columns.values()}) > 1:
        raise ValueError(
            f"product: columns are all numbers or all indices, got {columns}."
        )
    indices: dict[str, Shape] = {}
    start = 0
    for part, value in columns.items():
        values = (
            range(start, start + value)
            if isinstance(value, int | np.integer)
            else value
        )
        indices[part] = tuple(int(i) for i in values)
        start += len(indices[part])
    positions = sorted(i for value in indices.values() for i in value)
    if positions != list(range(len(positions))) or not all(indices.values()):
        raise ValueError(
            f"product: each of the columns 0 ... d-1 must belong to one part, got {columns}."
        )
    return indices


@functools.lru_cache(maxsize=64)
def _product(structure: tuple[Part, ...], missing: bool) -> Component:
    """The functions; with missing entries, the parts that allow them take that form."""
    parts = tuple(_missing_part(part) if missing else part for part in structure)
    families = [part.component for part in parts]
    ends = np.cumsum([_num_statistics(part) for part in parts])[:-1]

    def split(sums: Array) -> Params:
        pieces = jnp.split(sums, ends, axis=-1)
        return {part.name: piece for part, piece in zip(parts, pieces, strict=True)}

    def join(pairs: Iterable[tuple[Array, Array]]) -> tuple[Array, Array]:
        constants, weights = zip(*pairs, strict=True)
        return jnp.sum(jnp.stack(constants), axis=0), jnp.concatenate(weights, axis=-1)

    def total(function: Callable[[Part], Array]) -> Array:
        return functools.reduce(operator.add, map(function, parts))

    def update(prior: Hyperparameters, counts: Array, sums: Array) -> Hyperparameters:
        pieces = split(sums)
        return {
            part.name: part.component.update(
                prior[part.name], counts, pieces[part.name]
            )
            for part in parts
        }

    def log_evidence(prior: Hyperparameters, counts: Array, sums: Array) -> Array:
        pieces = split(sums)
        return total(
            lambda part: part.component.log_evidence(
                prior[part.name], counts, pieces[part.name]
            )
        )

    def draw(sample: Sample, q: Hyperparameters) -> Parameters:
        parameters = {
            part.name: part.component.draw(_within(part, sample), q[part.name])
            for part in parts
        }
        return _with_names(parameters)

    def distribution(parameters: Parameters) -> ColumnsOf:
        fns = [
            part.component.distribution(_parameters_of(parameters, part, parts))
            for part in parts
        ]
        return ColumnsOf(fns, tuple(part.columns for part in parts))

    def maximum_likelihood(
        prior: Hyperparameters, counts: Array, sums: Array
    ) -> Parameters:
        parameters = {}
        for part, piece in zip(parts, split(sums).values(), strict=True):
            parameters[part.name] = part.component.maximum_likelihood(
                prior[part.name], counts, piece
            )  # type: ignore[misc]
        return _with_names(parameters)

    def coefficients_at(parameters: Parameters) -> tuple[Array, Array]:
        of_parts = (
            (part.component, _parameters_of(parameters, part, parts)) for part in parts
        )
        return join(family.coefficients_at(values) for family, values in of_parts)  # type: ignore[misc]

    def num_parameters(num_components: int) -> int:
        return sum(family.num_parameters(num_components) for family in families)  # type: ignore[misc]

    located = tuple(part for part in parts if part.component.location is not None)

    located_columns = (
        np.concatenate([part.column_index for part in located])
        if located
        else np.zeros(0, int)
    )

    def location_of(q: Hyperparameters) -> Array:
        pieces = [part.component.location.of(q[part.name]) for part in located]  # type: ignore[union-attr]
        library = components.namespace(pieces[0])
        missing = len(places) - len(located_columns)
        zeros = library.zeros((*pieces[0].shape[:-1], missing), pieces[0].dtype)
        return library.concatenate([*pieces, zeros], axis=-1)[..., places]

    def linear(weights: Array, deviations: Array) -> Array:
        pieces = split(weights)
        return total(
            lambda part: _linear(
                part, pieces[part.name], deviations[:, part.column_index]
            )
        )

    def sums(omega: Array, deviations: Array) -> Array:
        return jnp.concatenate(
            [_sums(part, omega, deviations[:, part.column_index]) for part in parts],
            axis=-1,
        )

    def completed(weights: Array, omega: Array, deviations: Array) -> Array:
        pieces = split(weights)
        sums = (
            _completed(part, pieces[part.name], omega, deviations[:, part.column_index])
            for part in parts
        )
        return jnp.concatenate(list(sums), axis=-1)

    # Of each column in the pieces; columns without a location come last, where 0 is.
    others = np.setdiff1d(
        np.arange(sum(len(part.columns) for part in parts)), located_columns
    )
    places = np.argsort(np.concatenate([located_columns, others])).astype(np.int32)
    movable = tuple(sorted(column for part in located for column in _movable(part)))
    completing = completed if any(map(_completes, parts)) else None
    columns = (
        None if len(movable) == sum(len(part.columns) for part in parts) else movable
    )
    return Component(
        name="product",
        prior=None,
        check=lambda x: _check(parts, x),
        statistics=lambda x: jnp.concatenate(
            [part.component.statistics(x[part.column_index]) for part in parts]
        ),
        log_base=lambda x: total(
            lambda part: part.component.log_base(x[part.column_index])
        ),
        update=update,
        coefficients=lambda q: join(
            derived.coefficients(part.component, q[part.name]) for part in parts
        ),
        kl=lambda q, p: total(
            lambda part: derived.kl(part.component, q[part.name], p[part.name])
        ),
        log_evidence=log_evidence,
        log_predictive=lambda q, x: total(
            lambda part: derived.log_predictive(
                part.component, q[part.name], x[part.column_index]
            )
        ),
        draw=draw,
        distribution=distribution,
        coefficients_at=coefficients_at,
        maximum_likelihood=maximum_likelihood
        if all(family.maximum_likelihood for family in families)
        else None,
        num_parameters=num_parameters
        if all(family.num_parameters for family in families)
        else None,
        coordinates=lambda rows: jnp.concatenate(
            [
                derived.coordinates(part.component, rows[:, part.column_index])
                for part in parts
            ],
            axis=1,
        ),
        location=components.Location(location_of, linear, sums, columns, completing)
        if located
        else None,
        with_missing=(lambda: _product(structure, True))
        if any(f.with_missing for f in families)
        else None,
    )


def _movable(part: Part) -> Shape:
    """The columns of the whole that a part lets move."""
    inside = part.component.location.columns  # type: ignore[union-attr]
    return part.columns if inside is None else tuple(part.columns[i] for i in inside)


def _linear(part: Part, weights: Array, deviations: Array) -> Array:
    """The part's share of the log density; without a location its deviations are the data, for all components."""
    if part.component.location is None:
        return matmul(weights, part.component.statistics(deviations[0]))
    return part.component.location.linear(weights, deviations)


def _sums(part: Part, omega: Array, deviations: Array) -> Array:
    if part.component.location is None:
        return matmul(omega, part.component.statistics(deviations[0]).T)
    return part.component.location.sums(omega, deviations)


def _completes(part: Part) -> bool:
    return (
        part.component.location is not None
        and part.component.location.completed is not None
    )


def _completed(part: Part, weights: Array, omega: Array, deviations: Array) -> Array:
    if not _completes(part):
        return _sums(part, omega, deviations)
    return part.component.location.completed(weights, omega, deviations)  # type: ignore[union-attr, misc]


def _missing_part(part: Part) -> Part:
    """The part in the form for missing entries, where it has one."""
    form = part.component.with_missing
    return part if form is None else part._replace(component=form())


def _check(parts: tuple[Part, ...], x: ArrayLike) -> Array:
    """Rows, each part's columns in the form that its component returns.

    Raises:
        ValueError: If columns are not data of their part; the part is named.
    """
    rows = components.floating_rows(
        x, "product", sum(len(part.columns) for part in parts)
    )
    pieces = []
    for part in parts:
        try:
            pieces.append(part.component.check(rows[:, part.column_index]))
            if not is_traced(rows):
                components.missing_form(part.component, pieces[-1])
        except ValueError as error:
            of_part = f"product: part {part.name!r}, whose columns are {part.columns} of the data"
            raise ValueError(f"{of_part}: {error}") from error
    order = np.argsort(np.concatenate([part.column_index for part in parts]))
    return components.namespace(rows).concatenate(pieces, axis=1)[:, order]


def _within(part: Part, sample: Sample) -> Sample:
    """A sampler of the sites of a part."""
    return lambda name, fn: sample(f"{part.name}_{name}", fn)


def _with_names(parameters: dict[str, Parameters]) -> Parameters:
    """Parameters of all parts, by the name of the part and their own."""
    return {
        f"{part}_{name}": value
        for part, values in parameters.items()
        for name, value in values.items()
    }


def _parameters_of(
    parameters: Parameters, part: Part, parts: tuple[Part, ...]
) -> Parameters:
    """The parameters of a part, by the names that its component gives them."""
    prefix = f"{part.name}_"
    # The name of one part may begin with that of another.
    others = tuple(f"{other.name}_" for other in parts if other.name.startswith(prefix))
    return {
        name.removeprefix(prefix): value
        for name, value in parameters.items()
        if name.startswith(prefix) and not name.startswith(others)
    }


def _num_statistics(part: Part) -> int:
    """F, from shapes alone."""
    columns = jax.ShapeDtypeStruct((len(part.columns), 1), jnp.zeros(()).dtype)
    return jax.eval_shape(part.component.statistics, columns).shape[0]


class ColumnsOf(dist.Distribution):
    """Rows whose columns follow several independent distributions.

    Args:
        parts: Distributions of vectors, of one batch shape.
        columns: The columns of each.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012
    support = constraints.real_vector
    pytree_data_fields = ("parts",)
    pytree_aux_fields = ("columns",)

    def __init__(
        self, parts: Sequence[dist.Distribution], columns: tuple[Shape, ...]
    ) -> None:
        self.parts, self.columns = tuple(parts), columns
        super().__init__(parts[0].batch_shape, (sum(map(len, columns)),))

    def sample(self, key: Array, sample_shape: Shape = ()) -> Array:
        """Rows, codes and counts as floating numbers."""
        keys = jax.random.split(key, len(self.parts))
        values = [
            fn.sample(k, sample_shape) for fn, k in zip(self.parts, keys, strict=True)
        ]
        dtype = jnp.zeros(()).dtype
        order = np.argsort(
            np.concatenate([np.asarray(where) for where in self.columns])
        )
        return jnp.concatenate([each.astype(dtype) for each in values], axis=-1)[
            ..., order
        ]

    def log_prob(self, value: Array) -> Array:
        """The sum over the parts."""
        first, *rest = (
            fn.log_prob(value[..., np.asarray(where, np.int32)])
            for fn, where in zip(self.parts, self.columns, strict=True)
        )
        return sum(rest, start=first)
