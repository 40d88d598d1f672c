"""The Gaussian that a guide starts at, in a flat vector of all latents."""

from collections.abc import Callable
from functools import partial

import numpyro
from numpyro import handlers

from numpyro_tempered.core import Array, Guide, Params
from numpyro_tempered.gaussian.families.base import Gaussian, supports
from numpyro_tempered.infer.guide_laws import Reading, law_of
from numpyro_tempered.infer.priors import Latents
from numpyro_tempered.infer.set_up import at_start, first_call


def read_guide(
    rng_key: Array, guide: Guide, args: tuple, kwargs: dict
) -> tuple[Gaussian, Latents, Callable[..., Params]]:
    """The Gaussian that a guide starts at, its latent sites, and the guide's parameters of a Gaussian.

    Raises:
        TypeError: If it is none of the Gaussian guides.
    """
    law, name = law_of(guide), type(guide).__name__
    if law.is_heavy:
        raise TypeError(
            f"fit_gaussian fits Gaussians, and {name} is a Student's t: fit it by fit_svi, or "
            "take AutoMultivariateNormal."
        )
    reading = read_start(rng_key, guide, args, kwargs) if law.is_gaussian else None
    if reading is None or not supports(reading.q, "from_root"):
        raise TypeError(
            "fit_gaussian takes AutoMultivariateNormal, AutoDiagonalNormal or AutoNormal (the class, or a "
            f"callable from model to one), got {name}. Use fit_svi for other guides."
        )
    return reading.q, latents_of(reading), reading.to_params


def read_start(
    rng_key: Array, guide: Guide, args: tuple, kwargs: dict
) -> Reading | None:
    """Set a guide up and read the parameters that it starts with; None of a class that has no ``read``.

    Raises:
        ValueError: If it cannot be set up, or the model has no latent site.
    """
    if (read := law_of(guide).read) is None:
        return None
    try:
        # What the model gives its distributions has been looked at, value by value, where it was traced.
        with numpyro.validation_enabled(False), handlers.block():
            run = handlers.trace(handlers.seed(at_start(guide), rng_key)).get_trace
            trace = first_call(partial(run, *args, **kwargs), guide)
    except RuntimeError as error:
        raise ValueError(
            f"the guide cannot be set up ({error}): where there are latent sites, check the data for NaN, or "
            "give the guide an init_loc_fn."
        ) from error
    params = {
        name: site["value"] for name, site in trace.items() if site["type"] == "param"
    }
    if not params:
        raise ValueError("the model has no latent site to fit.")
    return read(guide, params)


def latents_of(reading: Reading) -> Latents:
    """Return the latent sites of a reading."""
    return Latents(tuple(dict(reading.layout.sites)), reading.unpack)
