"""The coordinates in which a guide is fitted: those in which its posterior is round, where they are known."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from numpyro import handlers
from numpyro.infer.autoguide import (
    AutoDiagonalNormal,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)
from numpyro.infer.util import potential_energy

from numpyro_tempered.core.precision import matmul
from numpyro_tempered.core.programs import compile_once
from numpyro_tempered.core.typing import Array, Params, PyTree
from numpyro_tempered.gaussian.families.base import family_of
from numpyro_tempered.handlers.arguments import feasible_trace
from numpyro_tempered.handlers.effects import LOCAL, Trace
from numpyro_tempered.handlers.likelihood import latent_sites
from numpyro_tempered.handlers.numpyro_private import initial_latent, unpacker
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.flat_gaussian import read_guide
from numpyro_tempered.infer.mode import find_mode

# A dense Hessian beyond this many latents costs more than the steps that it saves.
MAX_LATENTS = 500


class Coordinates(NamedTuple):
    """A change of coordinates of a guide's parameters.

    Attributes:
        start: The start, a pytree.
        to_params: From such a pytree to the guide's parameters, on their own scale.
    """

    start: PyTree
    to_params: Callable[[PyTree], Params]


def at_the_mode(rng_key: Array, model: temper, guide: Any, args: tuple, kwargs: dict) -> Coordinates | None:
    r"""The coordinates of a Gaussian guide in which the posterior is round at its mode, and its start there.

    The means are m + R u, with m the mode and R Rᵀ the inverse Hessian; the scales of a mean field s exp(v), with
    1/s² the diagonal of the Hessian; the root of a full covariance L B, L the triangular form of R and B
    triangular with diagonal exp(v). The start is u = 0, v = 0, B = I: the Laplace approximation. Of
    ``AutoLaplaceApproximation`` it is the optimum.

    Returns:
        None where the guide is another, the model has params, discrete or local latents or subsamples, or no mode
        is found from the guide's own start, as in hierarchies whose density is not bounded.
    """
    is_point = isinstance(guide, AutoLaplaceApproximation)
    if not (
        is_point or type(guide) is AutoNormal or isinstance(guide, AutoDiagonalNormal | AutoMultivariateNormal)
    ):
        return None
    if is_point:
        with handlers.block():
            handlers.seed(guide, rng_key)(*args, **kwargs)
        loc, unpack = initial_latent(guide), unpacker(guide)
    else:
        q, (_, unpack), to_params = read_guide(rng_key, guide, args, kwargs)
        loc = q.loc
    if loc.shape[0] > MAX_LATENTS or not _has_density(feasible_trace(model, args, kwargs), set(unpack(loc))):
        return None

    def potential(theta: Array) -> Array:
        return potential_energy(model, args, kwargs, unpack(theta)).astype(theta.dtype)

    mode = compile_once(lambda theta: find_mode(potential, theta), loc)(loc)
    if not bool(mode.is_mode):
        return None
    zeros = jnp.zeros_like(loc)

    def mean(z: dict[str, Array]) -> Array:
        return mode.loc + matmul(mode.root, z["loc"])

    if is_point:
        return Coordinates({"loc": zeros}, lambda z: {f"{guide.prefix}_loc": mean(z)})
    start, family = {"loc": zeros, "log_scale": zeros}, family_of(q)
    if family.diagonal_only:
        return Coordinates(
            start, lambda z: to_params(family.with_root(mean(z), mode.scale * jnp.exp(z["log_scale"])))
        )
    triangular = jnp.linalg.qr(mode.root.T, mode="r").T
    triangular = triangular * jnp.sign(jnp.diagonal(triangular))

    def full(z: dict[str, Array]) -> Params:
        inner = jnp.tril(z["lower"], -1) + jnp.diag(jnp.exp(z["log_scale"]))
        return to_params(family.with_root(mean(z), matmul(triangular, inner)))

    return Coordinates(start | {"lower": jnp.zeros((loc.size, loc.size), loc.dtype)}, full)


def _has_density(trace: Trace, names: set[str]) -> bool:
    """Whether a model is one density of these latents: without other or local ones, params or subsamples."""
    for site in trace.values():
        # A local latent is tempered in model and guide, and has no part in a potential energy.
        if site["type"] in ("param", "mutable") or site.get(LOCAL) is not None:
            return False
        if site["type"] == "plate":
            size, subsample_size = site["args"]
            if subsample_size not in (None, size):
                return False
    return set(latent_sites(trace)) == names
