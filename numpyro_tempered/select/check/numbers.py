"""Names of the numbers of latent sites, as ArviZ's summaries have them."""

from collections.abc import Mapping, Sequence

import numpy as np

from numpyro_tempered.core import Labels, number_names
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import Trace
from numpyro_tempered.report.arviz import variable_name
from numpyro_tempered.report.draws import plate_dims


def number_labels(
    trace: Trace, coords: Labels, dims: Mapping[str, Sequence[str]]
) -> list[str]:
    """Names of all numbers, as ``weights[age]``, in the order of the sites.

    Args:
        trace: Of the model.
        coords: Labels by dimension.
        dims: Names of the dimensions by site; those of plates by default.

    Raises:
        ValueError: If ``dims`` names another number of dimensions than a site has, or no site.
    """
    latents = likelihood.latent_sites(trace)
    shapes = {name: np.shape(latents[name]["value"]) for name in sorted(latents)}
    if strange := sorted(set(dims) - set(shapes)):
        raise ValueError(
            f"dims names {strange}, which are not among the latent sites {sorted(shapes)}."
        )
    if wrong := {
        name: len(names)
        for name, names in dims.items()
        if len(names) != len(shapes[name])
    }:
        raise ValueError(f"dims names {wrong} dimensions, of sites of shapes {shapes}.")
    named = {**plate_dims(trace, shapes, dims), **dims}
    labels = []
    for name, shape in shapes.items():
        axes = [
            coords[dim] if len(coords.get(dim, ())) == size else range(size)
            for dim, size in zip(named.get(name, [""] * len(shape)), shape, strict=True)
        ]
        labels += number_names(variable_name(name), axes)
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"numbers share a name once slashes become dots: rename one of the sites {sorted(shapes)}."
        )
    return labels
