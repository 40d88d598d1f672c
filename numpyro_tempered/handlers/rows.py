"""The rows of a model's data: how many there are, where they lie, and the log-likelihood of each."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, Params, PyTree, Shape, to_host
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import ALPHA, Trace, plates_of
from numpyro_tempered.handlers.requirements import require

_NEEDS = {
    "no scan": ", whose data are not independent rows: none can be left out, and scores have no sum over units. "
    "Observe several series in a plate of their own; an alpha without rows is theory_default().",
    "no imputation": "",
}


class DataRows(NamedTuple):
    """Where the data of a model lie.

    Attributes:
        num_data: n; a row that is masked in all sites is no datum.
        dim: Batch dimension of the rows.
        size: Number of rows, masked ones too.
        places: The rows that are data, ``(n,)``; None if all are.
    """

    num_data: int
    dim: int
    size: int
    places: np.ndarray | None = None

    def take(self, values: Any) -> Any:
        """The data ``(n, ...)`` among the rows ``(size, ...)``."""
        return values if self.places is None else values[self.places]

    def spread(self, values: Array) -> Array:
        """Values of the data ``(n,)`` along the rows, with 0 where there is no datum."""
        if self.places is None:
            return values
        return jnp.zeros(self.size, values.dtype).at[self.places].set(values)


def all_rows(trace: Trace, data: PyTree) -> Params:
    """The values that sites observe a part of, in a plate that subsamples, where an array of the data has all.

    Args:
        trace: Of the model, with the rows that its plate has drawn.
        data: Its arguments.
    """
    values = {}
    for name, site in likelihood.observed_sites(trace).items():
        part = to_host(site["value"])
        plates = [
            (trace[frame.name], frame.dim - site["fn"].event_dim)
            for frame in site["cond_indep_stack"]
            if likelihood.is_subsampled(trace[frame.name])
        ]
        for plate, axis in (
            plates if len(plates) == 1 and -plates[0][1] <= part.ndim else ()
        ):
            shape = list(part.shape)
            shape[axis] = plate["args"][0]
            for leaf in jax.tree.leaves(data):
                if np.shape(leaf) == tuple(shape) and np.array_equal(
                    np.take(to_host(leaf), to_host(plate["value"]), axis), part
                ):
                    values[name] = leaf
    return values


def find_data(trace: Trace, plate: str | None) -> DataRows:
    """The rows of a model's data.

    Raises:
        ValueError: If the observed sites have no plate in common and are not vectors of one length, have several
            and none is named, lie in a scan, or latents lie in the plate.
    """
    require(trace, _NEEDS)
    sites = likelihood.likelihood_sites(trace)
    shapes = {
        name: jax.eval_shape(partial(likelihood.log_prob_of_each, site)).shape
        for name, site in sites.items()
    }
    common = set.intersection(*(plates_of(site) for site in sites.values()))
    if plate is not None and plate not in common:
        raise ValueError(
            f"plate {plate!r} does not hold all observed sites {list(sites)}; plates that do: {sorted(common)}."
        )
    if plate is None and len(common) > 1:
        raise ValueError(
            f"the data lie in several plates, {sorted(common)}: name that of the data by plate=."
        )
    if not common:
        shape, *others = set(shapes.values())
        if others or len(shape) != 1:
            raise ValueError(
                f"the observed sites have log-probabilities of shapes {shapes} and no plate in common: put all "
                "in one plate of rows, where a factor of data, such as censored ones, has a term for each row, 0 "
                "where it says nothing. Factors that belong to the prior are left out of the names in "
                "nt.temper(model, 1.0, factors=)."
            )
        return _present(sites, shapes, shape[0], -1)
    name = plate or common.pop()
    frames = {
        (f.size, f.dim)
        for site in sites.values()
        for f in site["cond_indep_stack"]
        if f.name == name
    }
    if len(frames) > 1:
        raise ValueError(
            f"plate {name!r} has several sizes and dimensions, {sorted(frames)}: give it one dim=."
        )
    ((size, dim),) = frames
    local = [
        latent
        for latent, site in likelihood.latent_sites(trace).items()
        if name in plates_of(site)
    ]
    if local:
        raise ValueError(
            f"latent sites {local} have a value for each row of plate {name!r}, which a row left out cannot "
            "tell: integrate them out (discrete ones by nt.marginalize), or name another plate."
        )
    return _present(sites, shapes, size, dim)


def _present(sites: Trace, shapes: dict[str, Shape], size: int, dim: int) -> DataRows:
    """The rows with an entry that some site does not mask."""
    present = np.zeros(size, bool)
    for name, site in sites.items():
        mask = likelihood.mask_of_data(site["fn"])
        if np.ndim(power := likelihood.power_of(site)):
            # A datum without weight is none.
            mask = mask & (np.asarray(power) != 0.0)
        shape = np.broadcast_shapes(shapes[name], (size, *(1,) * (-1 - dim)))
        by_row = np.moveaxis(np.broadcast_to(mask, shape), dim, 0)
        present |= by_row.reshape(size, -1).any(axis=1)
    places = np.flatnonzero(present)
    return DataRows(len(places), dim, size, None if len(places) == size else places)


def log_lik_of_each(trace: Trace, rows: DataRows, powers: bool = False) -> Array:
    """The log-likelihood of each datum, ``(n,)``, summed over the other dimensions and the sites.

    It is untempered, or that of the model with its ``powers``.
    """
    size, dim, terms = rows.size, rows.dim, []
    for site in likelihood.likelihood_sites(trace).values():
        value = likelihood.untempered_log_prob(site)
        shape = jnp.broadcast_shapes(value.shape, (size, *(1,) * (-1 - dim)))
        if likelihood.is_factor(site) or value.ndim >= -dim:
            value = jnp.broadcast_to(value, shape)
        if powers:
            power = jnp.asarray(site.get(ALPHA, 1.0))
            value = jnp.where(power > 0, power * value, 0.0)
        value = jnp.moveaxis(value, dim, 0)
        terms.append(jnp.sum(jnp.reshape(value, (size, -1)), axis=1))
    return rows.take(sum(terms[1:], start=terms[0]))
