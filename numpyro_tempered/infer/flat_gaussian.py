"""A Gaussian guide as one Gaussian of all latents, in a flat vector."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.infer.autoguide import (
    AutoContinuous,
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

from numpyro_tempered.core.checks import is_traced
from numpyro_tempered.core.typing import Array, Params
from numpyro_tempered.gaussian.families import FullRank, MeanField
from numpyro_tempered.gaussian.families.base import Gaussian, supports
from numpyro_tempered.handlers.likelihood import Layout
from numpyro_tempered.handlers.numpyro_private import unpacker
from numpyro_tempered.infer.guides.online import StartsAtPrior
from numpyro_tempered.infer.guides.student_t import (
    AutoMultivariateStudentT,
    StudentTGuide,
)
from numpyro_tempered.infer.priors import Latents
from numpyro_tempered.infer.set_up import at_start, first_call


def read_guide(
    rng_key: Array, guide: AutoContinuous, args: tuple, kwargs: dict
) -> tuple[Gaussian, Latents, Callable[..., Params]]:
    """The Gaussian that a guide starts at, its latent sites, and the guide's parameters of a Gaussian.

    Raises:
        TypeError: If it is none of the Gaussian guides.
    """
    if isinstance(guide, StudentTGuide):
        raise TypeError(
            f"fit_gaussian fits Gaussians, and {type(guide).__name__} is a Student's t: fit it by fit_svi, or "
            "take AutoMultivariateNormal."
        )
    return read_start(rng_key, guide, args, kwargs)


def read_start(
    rng_key: Array, guide: AutoContinuous, args: tuple, kwargs: dict
) -> tuple[Gaussian, Latents, Callable[..., Params]]:
    """As :func:`read_guide`; of a Student's t the Gaussian of its location and scale.

    Raises:
        TypeError: If it is neither.
    """
    full = isinstance(guide, AutoMultivariateNormal | AutoMultivariateStudentT)
    online, diagonal = (
        isinstance(guide, StartsAtPrior),
        isinstance(guide, AutoDiagonalNormal | StudentTGuide),
    )
    other = TypeError(
        "fit_gaussian takes AutoMultivariateNormal, AutoDiagonalNormal or AutoNormal (the class, or a "
        f"callable from model to one), got {type(guide).__name__}. Use fit_svi for other guides."
    )
    if not (full or online or diagonal or type(guide) is AutoNormal):
        raise other
    params = params_at_start(rng_key, guide, args, kwargs)
    if type(guide) is AutoNormal:
        q, layout = read_normals(params, guide.prefix)

        def to_params(q: MeanField) -> Params:
            loc, scale = layout.split(q.loc), layout.split(q.scale)
            params = {
                f"{name}_{guide.prefix}_loc": value for name, value in loc.items()
            }
            return params | {
                f"{name}_{guide.prefix}_scale": value for name, value in scale.items()
            }

        return (
            q,
            Latents(tuple(name for name, _ in layout.sites), layout.split),
            to_params,
        )
    latents = flat_latents(guide)
    if online:
        if not supports(guide.prior, "from_root"):
            raise other
        return guide.from_params(params), latents, guide.to_params
    loc, second = (
        f"{guide.prefix}_loc",
        f"{guide.prefix}_scale_tril" if full else f"{guide.prefix}_scale",
    )
    start = (FullRank if full else MeanField)(params[loc], params[second])
    return (
        start,
        latents,
        lambda q: {loc: q.loc, second: q.scale_tril if full else q.scale},
    )


def params_at_start(
    rng_key: Array, guide: AutoContinuous, args: tuple, kwargs: dict
) -> Params:
    """The parameters that a guide starts with, which is set up.

    Raises:
        ValueError: If it cannot be, or the model has no latent site.
    """
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
    return params


def flat_latents(guide: AutoContinuous) -> Latents:
    """The latent sites of a guide over one flat vector, set up."""
    names = tuple(
        name for name, _ in Layout.of_parts(unpacker(guide), guide.latent_dim).sites
    )
    return Latents(names, unpacker(guide))


def read_normals(params: Params, prefix: str) -> tuple[MeanField, Layout]:
    """The Gaussian of AutoNormal, which has two parameters for each site, and the order of its coordinates."""
    ending = f"_{prefix}_loc"
    names = [name.removesuffix(ending) for name in params if name.endswith(ending)]
    # A param of the model may end so too.
    means = {
        name: params[name + ending]
        for name in names
        if f"{name}_{prefix}_scale" in params
    }
    scales = {name: params[f"{name}_{prefix}_scale"] for name in means}
    # On the host each operation would not be a program.
    xp = jnp if is_traced(means, scales) else np
    loc, scale = (
        xp.concatenate([xp.ravel(v) for v in values.values()])
        for values in (means, scales)
    )
    return MeanField(*jax.device_put((loc, scale))), Layout.of(means)
