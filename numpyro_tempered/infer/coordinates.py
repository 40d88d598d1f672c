"""The coordinates in which a guide is fitted: those in which its posterior is round, where they are known."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.util import potential_energy

from numpyro_tempered.core import (
    Array,
    Model,
    Params,
    PyTree,
    matmul,
    run_program,
    trace_once,
)
from numpyro_tempered.gaussian.families.base import family_of
from numpyro_tempered.handlers.arguments import feasible_trace
from numpyro_tempered.handlers.effects import LOCAL, Trace
from numpyro_tempered.handlers.likelihood import latent_sites
from numpyro_tempered.handlers.numpyro_private import initial_latent, unpacker
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.flat_gaussian import read_start
from numpyro_tempered.infer.guide_laws import law_of
from numpyro_tempered.infer.mode import Mode, find_mode
from numpyro_tempered.infer.set_up import first_call

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


class Frame(NamedTuple):
    """The coordinates of a guide of location and scale as a function of the mode of its posterior.

    Attributes:
        loc: The guide's own start on the flat unconstrained scale, ``(d,)``.
        scale: Its standard deviations there, ``(d,)``; None of a point.
        unpack: From there to values by site.
        start: The start in the coordinates.
        axes: From the mode to what ``to_params`` needs of it.
        to_params: From the axes and a pytree like ``start`` to the guide's parameters.
    """

    loc: Array
    scale: Array | None
    unpack: Callable[[Array], Params]
    start: PyTree
    axes: Callable[[Mode], PyTree]
    to_params: Callable[[PyTree, PyTree], Params]

    def without_mode(self) -> tuple[PyTree, PyTree]:
        """Axes of unit length at the guide's own start, and that start in them: for posteriors without a mode."""
        ones = jnp.ones_like(self.loc)
        axes = self.axes(
            Mode(
                self.loc,
                jnp.diag(ones),
                ones,
                jnp.array(False),
                jnp.array(0, jnp.int32),
            )
        )
        return axes, self.start | (
            {} if self.scale is None else {"log_scale": jnp.log(self.scale)}
        )

    def find_mode(self, model: Model, args: tuple, kwargs: dict) -> Mode:
        """The mode of the posterior of a model, from the guide's own start; pure."""

        def potential(theta: Array) -> Array:
            return potential_energy(model, args, kwargs, self.unpack(theta)).astype(
                theta.dtype
            )

        # Newton's method takes its value, gradient and Hessian, of one trace.
        return find_mode(trace_once(potential, self.loc), self.loc)


def at_the_mode(
    rng_key: Array, model: temper, guide: Any, args: tuple, kwargs: dict
) -> Coordinates | None:
    """The coordinates of :func:`frame_of` at the mode.

    Returns:
        None where there is no frame, or no mode is found, as in hierarchies whose density is not bounded.
    """

    def look() -> Coordinates | None:
        frame = frame_of(rng_key, model, guide, args, kwargs)
        if frame is None:
            return None

        def find(loc: Array) -> tuple[PyTree, Array]:
            mode = frame._replace(loc=loc).find_mode(model, args, kwargs)
            return frame.axes(mode), mode.is_mode

        axes, is_mode = run_program(find, frame.loc)
        return (
            Coordinates(frame.start, partial(frame.to_params, axes))
            if bool(is_mode)
            else None
        )

    # Newton's method goes nowhere from where the density or its gradient is not finite.
    return first_call(look, guide, lambda coordinates: coordinates is not None)


def frame_of(
    rng_key: Array, model: Model, guide: Any, args: tuple, kwargs: dict
) -> Frame | None:
    r"""The coordinates of a guide of location and scale in which the posterior is round at its mode.

    The means are m + R u, with m the mode and R Rᵀ the inverse Hessian; the scales of a mean field s exp(v), with
    1/s² the diagonal of the Hessian; the root of a full covariance L B, L the triangular form of R and B
    triangular with diagonal exp(v). The start is u = 0, v = 0, B = I: the Laplace approximation. Of
    ``AutoLaplaceApproximation`` it is the optimum.

    Returns:
        None where the guide is another, or the model has params, discrete or local latents or subsamples.
    """
    law = law_of(guide)
    if law.is_laplace:
        with handlers.block():
            handlers.seed(guide, rng_key)(*args, **kwargs)
        loc, unpack = initial_latent(guide), unpacker(guide)
    elif (
        law.has_covariance is None
        or (reading := read_start(rng_key, guide, args, kwargs)) is None
    ):
        return None
    else:
        q, _, unpack, to_params = reading
        loc = q.loc
    names = set(jax.eval_shape(unpack, loc))
    if loc.shape[0] > MAX_LATENTS or not _has_density(
        feasible_trace(model, args, kwargs), names
    ):
        return None
    zeros = jnp.zeros_like(loc)

    def mean(axes: Mode, z: Params) -> Array:
        return axes.loc + matmul(axes.root, z["loc"])

    def same(mode: Mode) -> Mode:
        return mode

    if law.is_laplace:
        name = f"{guide.prefix}_loc"
        return Frame(
            loc,
            None,
            unpack,
            {"loc": zeros},
            same,
            lambda axes, z: {name: mean(axes, z)},
        )
    start, family = {"loc": zeros, "log_scale": zeros}, family_of(q)
    root = family.root(q)
    scale = root if root.ndim == 1 else jnp.diagonal(root)
    tails, df_of = _tails(guide)
    start |= tails
    if family.diagonal_only:

        def diagonal(mode: Mode, z: Params) -> Params:
            q = family.with_root(mean(mode, z), mode.scale * jnp.exp(z["log_scale"]))
            return to_params(q) | df_of(z)

        return Frame(loc, scale, unpack, start, same, diagonal)

    def triangular(mode: Mode) -> tuple[Mode, Array]:
        factor = jnp.linalg.qr(mode.root.T, mode="r").T
        return mode, factor * jnp.sign(jnp.diagonal(factor))

    def full(axes: tuple[Mode, Array], z: Params) -> Params:
        mode, factor = axes
        inner = jnp.tril(z["lower"], -1) + jnp.diag(jnp.exp(z["log_scale"]))
        return to_params(
            family.with_root(mean(mode, z), matmul(factor, inner))
        ) | df_of(z)

    start |= {"lower": jnp.zeros((loc.size, loc.size), loc.dtype)}
    return Frame(loc, scale, unpack, start, triangular, full)


def _tails(guide: AutoGuide) -> tuple[Params, Callable[[Params], Params]]:
    """The start of what else a guide learns, its degrees of freedom, and its parameters of such coordinates."""
    if not law_of(guide).is_heavy or guide.df is not None:
        return {}, lambda z: {}
    transform = biject_to(guide.df_constraint)
    return {"df": transform.inv(guide.start_df())}, lambda z: {
        f"{guide.prefix}_df": transform(z["df"])
    }


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
