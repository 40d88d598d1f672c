"""Components of mixed columns: a product of components of some columns each."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.components.base import Component, floating_rows


def product(parts: Mapping[str, Component], columns: Mapping[str, int | Sequence[int]]) -> Component:
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
        ValueError: If the names differ, or a column belongs to no part, or to two.

    Example:
        >>> import numpyro_tempered as nt
        >>> parts = {"size": nt.mixtures.gaussian(2), "kind": nt.mixtures.categorical([3])}
        >>> component = nt.mixtures.product(parts, {"size": [0, 2], "kind": [1]})
        >>> component.check([[0.1, 2, 0.3], [0.4, 0, 0.5]]).shape
        (2, 3)
    """
    for part, component in parts.items():
        if not isinstance(component, Component):
            raise TypeError(f"product: part {part!r} is a {type(component).__name__}; expected a component.")
    if not parts or set(parts) != set(columns):
        raise ValueError(f"product: the parts are {list(parts)}, columns are given for {list(columns)}.")
    indices = _indices({part: columns[part] for part in parts})
    structure = tuple((part, component._replace(prior=None), indices[part]) for part, component in parts.items())
    prior = {part: component.prior for part, component in parts.items()}
    return _product(structure, False)._replace(prior=prior)


def _indices(columns: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The columns of each part.

    Raises:
        ValueError: If a column belongs to no part, or to two.
    """
    whole = [isinstance(given, int | np.integer) for given in columns.values()]
    if all(whole):
        ends = np.cumsum(list(columns.values()))
        found = {
            p: tuple(range(int(end) - int(columns[p]), int(end))) for p, end in zip(columns, ends, strict=True)
        }
    elif any(whole):
        raise ValueError(f"product: columns are all numbers or all indices, got {columns}.")
    else:
        found = {part: tuple(int(i) for i in given) for part, given in columns.items()}
    every = sorted(i for given in found.values() for i in given)
    if every != list(range(len(every))) or not all(found.values()):
        raise ValueError(f"product: each of the columns 0 ... d-1 must belong to one part, got {columns}.")
    return found


@lru_cache(maxsize=64)
def _product(structure: tuple[tuple[str, Component, tuple[int, ...]], ...], missing: bool) -> Component:
    """The functions; with missing entries, the parts that allow them are in the form that does."""
    names = [part for part, _, _ in structure]
    places = {part: np.asarray(where, np.int32) for part, _, where in structure}
    dim = sum(len(where) for where in places.values())
    order = np.argsort(np.concatenate(list(places.values())))
    parts = {
        part: component.with_missing() if missing and component.with_missing is not None else component
        for part, component, _ in structure
    }
    sizes = [_num_statistics(parts[part], len(places[part])) for part in names]

    def split(sums: Array) -> dict[str, Array]:
        return dict(zip(names, jnp.split(sums, np.cumsum(sizes)[:-1], axis=-1), strict=True))

    def pack(each: dict[str, tuple[Array, Array]]) -> tuple[Array, Array]:
        constants = jnp.stack([each[part][0] for part in names])
        return jnp.sum(constants, axis=0), jnp.concatenate([each[part][1] for part in names], axis=-1)

    def summed(function: Callable[[str], Array]) -> Array:
        first, *rest = (function(part) for part in names)
        return sum(rest, start=first)

    def check(x: Any) -> Array:
        rows = floating_rows(x, "product", dim)
        checked = []
        for part, component in parts.items():
            try:
                checked.append(component.check(rows[:, places[part]]))
            except ValueError as error:
                where = tuple(int(i) for i in places[part])
                raise ValueError(
                    f"product: part {part!r}, whose columns are {where} of the data: {error}"
                ) from error
            if component.with_missing is None and not isinstance(rows, jax.core.Tracer):
                absent = np.isnan(np.asarray(checked[-1])).any(axis=0)
                if absent.any():
                    raise ValueError(
                        f"product: column {places[part][int(np.argmax(absent))]} has missing entries (NaN), "
                        f"which {component.name} of part {part!r} does not marginalise."
                    )
        library: Any = np if isinstance(rows, np.ndarray) else jnp
        return library.concatenate(checked, axis=1)[:, order]

    def part_of(parameters: dict[str, Array], part: str) -> dict[str, Array]:
        known = [other for other in names if len(other) > len(part) and other.startswith(f"{part}_")]
        start = f"{part}_"
        return {
            key.removeprefix(start): value
            for key, value in parameters.items()
            # Of two parts, one may have the other's name at its start.
            if key.startswith(start) and not any(key.startswith(f"{other}_") for other in known)
        }

    def draw(sample: Any, q: dict[str, Any]) -> dict[str, Array]:
        drawn = {}
        for part in names:

            def sample_within(name: str, fn: Any, part: str = part) -> Array:
                return sample(f"{part}_{name}", fn)

            inside = parts[part].draw(sample_within, q[part])
            drawn.update({f"{part}_{key}": value for key, value in inside.items()})
        return drawn

    def distribution(parameters: dict[str, Array]) -> ColumnsOf:
        inside = tuple(parts[part].distribution(part_of(parameters, part)) for part in names)
        return ColumnsOf(inside, tuple(where for _, _, where in structure))

    def maximum_likelihood(prior: dict[str, Any], counts: Array, sums: Array) -> dict[str, Array]:
        best, pieces = {}, split(sums)
        for part in names:
            inside = parts[part].maximum_likelihood(prior[part], counts, pieces[part])  # type: ignore[misc]
            best.update({f"{part}_{key}": value for key, value in inside.items()})
        return best

    def update(prior: dict[str, Any], counts: Array, sums: Array) -> dict[str, Any]:
        pieces = split(sums)
        return {part: parts[part].update(prior[part], counts, pieces[part]) for part in names}

    def log_evidence(prior: dict[str, Any], counts: Array, sums: Array) -> Array:
        pieces = split(sums)
        return summed(lambda part: parts[part].log_evidence(prior[part], counts, pieces[part]))

    def translate(q: dict[str, Any], shift: Array) -> dict[str, Any]:
        return {part: parts[part].translate(q[part], shift[places[part]]) for part in names}  # type: ignore[misc]

    everywhere = list(parts.values())
    return Component(
        name="product",
        prior=None,
        check=check,
        statistics=lambda x: jnp.concatenate([parts[part].statistics(x[places[part]]) for part in names]),
        log_base=lambda x: summed(lambda part: parts[part].log_base(x[places[part]])),
        update=update,
        coefficients=lambda q: pack({part: parts[part].coefficients(q[part]) for part in names}),
        kl=lambda q, p: summed(lambda part: parts[part].kl(q[part], p[part])),
        log_evidence=log_evidence,
        log_predictive=lambda q, x: summed(lambda part: parts[part].log_predictive(q[part], x[places[part]])),
        draw=draw,
        distribution=distribution,
        coefficients_at=lambda p: pack({part: parts[part].coefficients_at(part_of(p, part)) for part in names}),
        maximum_likelihood=maximum_likelihood
        if all(component.maximum_likelihood is not None for component in everywhere)
        else None,
        num_parameters=lambda k: sum(component.num_parameters(k) for component in everywhere),
        coordinates=lambda rows: jnp.concatenate(
            [parts[part].coordinates(rows[:, places[part]]) for part in names], axis=1
        ),
        translate=translate if all(component.translate is not None for component in everywhere) else None,
        with_missing=(lambda: _product(structure, True))
        if any(component.with_missing is not None for component in everywhere)
        else None,
    )


def _num_statistics(component: Component, dim: int) -> int:
    """F, from shapes alone."""
    columns = jax.ShapeDtypeStruct((dim, 1), jnp.zeros(()).dtype)
    return jax.eval_shape(component.statistics, columns).shape[0]


class ColumnsOf(dist.Distribution):
    """Rows whose columns are of several independent distributions.

    Args:
        parts: Distributions of vectors, of one batch shape.
        columns: The columns of each.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.real_vector
    pytree_data_fields = ("parts",)
    pytree_aux_fields = ("columns",)

    def __init__(
        self, parts: Sequence[Any], columns: tuple[tuple[int, ...], ...], *, validate_args: bool | None = None
    ) -> None:
        self.parts, self.columns = tuple(parts), columns
        super().__init__(parts[0].batch_shape, (sum(map(len, columns)),), validate_args=validate_args)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        """Rows, codes and counts as floating numbers."""
        keys = jax.random.split(key, len(self.parts))
        drawn = [fn.sample(k, sample_shape) for fn, k in zip(self.parts, keys, strict=True)]
        dtype = jnp.zeros(()).dtype
        order = np.argsort(np.concatenate([np.asarray(where) for where in self.columns]))
        return jnp.concatenate([each.astype(dtype) for each in drawn], axis=-1)[..., order]

    def log_prob(self, value: Array) -> Array:
        """The sum over the parts."""
        first, *rest = (
            fn.log_prob(value[..., np.asarray(where, np.int32)])
            for fn, where in zip(self.parts, self.columns, strict=True)
        )
        return sum(rest, start=first)
