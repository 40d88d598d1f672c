"""Data that come in chunks: checks, what a first pass over them finds, and blocks of one size."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.prepare import Prepared, as_dtype, check_weight, missing_form, move
from numpyro_tempered.online.chunked import blocks

Chunks: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]


class Survey(NamedTuple):
    """What the first pass finds.

    Attributes:
        sample: Rows drawn at random without replacement, or all of them where they are few, in their order; with
            the component, prior and centre of all rows.
        num_rows: Of all chunks.
        total: The sum of all weights.
    """

    sample: Prepared
    num_rows: int
    total: float


def open_chunks(chunks: Chunks) -> Iterator[Any]:
    """The chunks from the first on.

    Raises:
        TypeError: If they cannot be gone over more than once.
    """
    if isinstance(chunks, Iterator) or hasattr(chunks, "shape"):
        given = "an iterator, which is used up by one pass" if isinstance(chunks, Iterator) else "one array"
        raise TypeError(
            f"chunks is {given}; expected a list of arrays, or a function that makes an iterable of arrays anew "
            "for each pass."
        )
    made: Any = chunks() if callable(chunks) else chunks
    if not isinstance(made, Iterable) or hasattr(made, "shape"):
        raise TypeError(f"chunks gave a {type(made).__name__}; expected an iterable of arrays.")
    return iter(made)


def checked(chunks: Chunks, component: Component) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows and weights of each chunk that has rows.

    Raises:
        TypeError: If the data of a chunk are not numbers.
        ValueError: If they are not of the family, or a chunk is neither an array nor ``(x, sample_weight)``.
    """
    for number, chunk in enumerate(open_chunks(chunks)):
        parts = chunk if isinstance(chunk, tuple) else (chunk,)
        if len(parts) not in (1, 2):
            raise ValueError(
                f"chunk {number} is a tuple of {len(parts)}; expected an array of rows, or (rows, sample_weight)."
            )
        if np.ndim(parts[0]) == 0:
            raise TypeError(
                f"chunk {number} is {parts[0]!r}; expected an array of rows, or (rows, sample_weight)."
            )
        if len(parts[0]) == 0:
            continue
        try:
            rows = np.asarray(component.check(parts[0]))
            weight = np.asarray(check_weight(parts[1] if len(parts) == 2 else None, rows))
        except (TypeError, ValueError) as error:
            raise type(error)(f"chunk {number}: {error}") from error
        yield rows, np.where(np.all(np.isnan(rows), axis=1), 0.0, weight)


def survey(rng_key: Array, chunks: Chunks, component: Component, num_start_rows: int) -> Survey:
    """Check all chunks, and find their mean, their missing entries and a sample.

    Args:
        rng_key: Key of the sample, which depends on the order of the rows but not on how they are cut.
        chunks: The chunks.
        component: The family with its prior.
        num_start_rows: Most rows of the sample.

    Raises:
        TypeError: If the chunks or their data are of the wrong kind.
        ValueError: If there is no row, or a row is not of the family.
    """
    generator = np.random.default_rng(np.asarray(jax.random.bits(rng_key, (4,), jnp.uint32)))
    structure, form = component.prior, component
    num_rows, total = 0, 0.0
    mass: Any = 0.0
    moment: Any = 0.0
    held: list[np.ndarray] = []
    for rows, weight in checked(chunks, component):
        if np.isnan(rows).any():
            form = missing_form(component, rows)
        observed = np.where(np.isnan(rows), 0.0, weight[:, None].astype(np.float64))
        mass = mass + observed.sum(axis=0)
        moment = moment + np.nansum(np.where(observed > 0, rows, 0.0) * observed, axis=0)
        new = [rows, weight, num_rows + np.arange(len(rows)), generator.random(len(rows))]
        held = [np.concatenate(pair) for pair in zip(held, new, strict=True)] if held else new
        if len(held[0]) > num_start_rows:
            # The rows whose random numbers are least: a sample without replacement.
            least = np.argpartition(held[3], num_start_rows)[:num_start_rows]
            held = [each[least] for each in held]
        num_rows, total = num_rows + len(rows), total + float(weight.sum(dtype=np.float64))
    if num_rows == 0:
        raise ValueError("the chunks hold no row.")
    if not total > 0:
        raise ValueError("no row has both a positive weight and an observed entry.")
    order = np.argsort(held[2])
    dtype = jax.dtypes.canonicalize_dtype(held[0].dtype)
    centre = None if component.translate is None else moment / np.where(mass > 0, mass, 1.0)
    prior = as_dtype(structure, dtype)
    if centre is not None:
        prior = component.translate(prior, jnp.asarray(-centre, dtype))  # type: ignore[misc]
    sample_weight = jnp.asarray(held[1][order], dtype)
    sample = Prepared(
        form._replace(prior=None),
        prior,
        move(held[0][order], centre).astype(dtype),
        sample_weight,
        centre,
        float(np.sum(held[1], dtype=np.float64)),
    )
    return Survey(sample, num_rows, total)


def read_blocks(
    chunks: Chunks, component: Component, found: Survey, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of exactly ``size`` rows with the centre taken off, and their weights, 0 where a row is padding.

    Raises:
        ValueError: If the pass has other rows than the first.
    """
    centre, dtype = found.sample.centre, found.sample.rows.dtype
    seen = 0

    def moved() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for rows, weight in checked(chunks, component):
            yield (rows if centre is None else rows - centre).astype(dtype), weight.astype(dtype)

    for (rows, weight), num_rows in blocks(moved(), size):
        seen += num_rows
        yield rows, np.where(np.arange(size) < num_rows, weight, 0)
    if seen != found.num_rows:
        raise ValueError(
            f"a pass over the chunks gave {seen} rows, the first pass {found.num_rows}: each pass must give the "
            "same rows. Give a function that makes the chunks anew."
        )
