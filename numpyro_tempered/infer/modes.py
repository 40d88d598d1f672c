"""The modes of a tempered posterior, and a mixture of Gaussians that starts at them."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_tempered.core import Array, Model, Params, PyTree, run_program
from numpyro_tempered.gaussian.families.gaussian_mixture import GaussianMixture
from numpyro_tempered.handlers.likelihood import latent_sites
from numpyro_tempered.infer.mode import find_mode

# Modes nearer than this, in standard deviations at the better one, are one.
_SAME = 0.5
# Components that share a mode start this much narrower, about draws of it.
_SHARED = 0.7


class Modes(NamedTuple):
    """Distinct modes of a density, the heaviest first.

    Attributes:
        loc: Shape ``(M, d)``.
        root: Roots of the inverse Hessians, ``(M, d, d)``.
        mass: Their masses by Laplace's approximation, which sum to 1, ``(M,)``.
        log_mass: The logarithm of their sum, an estimate of the log evidence.
    """

    loc: np.ndarray
    root: np.ndarray
    mass: np.ndarray
    log_mass: float


def starting_points(
    rng_key: Array, draw: Callable[[Array], Array], start: Array, num: int
) -> np.ndarray:
    """Points ``(num, d)`` from which modes are looked for.

    ``start``, then as many draws of the prior as of the box of half-width 2 on the unconstrained scale; of the
    box alone where the prior is improper.

    Args:
        rng_key: Of the points.
        draw: From a key to a draw of the prior, flat, unconstrained.
        start: Shape ``(d,)``.
        num: How many.
    """
    half = num // 2

    def in_box(key: Array) -> Array:
        return jax.random.uniform(key, (num, start.shape[0]), start.dtype, -2.0, 2.0)

    def both(key: Array) -> tuple[Array, Array]:
        prior_key, box_key = jax.random.split(key)
        return in_box(box_key), jax.vmap(draw)(
            jax.random.split(prior_key, half)
        ).astype(start.dtype)

    with handlers.block(), numpyro.validation_enabled(False):
        try:
            box, prior = run_program(both, rng_key)
        except (
            Exception
        ):  # of a prior that cannot be sampled: distributions raise what they like
            box = prior = run_program(in_box, rng_key)
    points = np.array(box)
    finite = np.all(np.isfinite(prior[:half]), axis=1, keepdims=True)
    points[:half] = np.where(finite, prior[:half], points[:half])
    points[0] = np.asarray(start)
    return points


def prior_draw(
    model: Model, args: tuple, kwargs: dict, flatten: Callable[[Params], Array]
) -> Callable[[Array], Array]:
    """From a key to a draw of a model's prior, flat, unconstrained.

    Args:
        model: The model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        flatten: From unconstrained values of all latents to a flat vector.
    """

    def draw(key: Array) -> Array:
        sites = latent_sites(
            handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs)
        )
        return flatten(
            {
                name: biject_to(site["fn"].support).inv(site["value"])
                for name, site in sites.items()
            }
        )

    return draw


def find_modes(
    potential: Callable[[Array, PyTree], Array], points: np.ndarray, data: PyTree
) -> Modes:
    """The distinct modes that Newton's method reaches from many points; there may be none."""

    def ascend(points: Array, data: PyTree) -> tuple[Array, ...]:
        f = partial(lambda data, theta: potential(theta, data), data)
        # One by one: side by side all would take the steps of the slowest.
        modes = jax.lax.map(partial(find_mode, f), points)
        return modes.loc, modes.root, modes.is_mode, jax.vmap(f)(modes.loc)

    loc, root, is_mode, f = (
        np.asarray(part) for part in run_program(ascend, points, data)
    )
    return distinct_modes(loc, root, f, is_mode)


def distinct_modes(
    loc: np.ndarray, root: np.ndarray, f: np.ndarray, is_mode: np.ndarray
) -> Modes:
    """Those of points ``(S, d)`` that are modes of exp(-f), each once.

    Args:
        loc: The points.
        root: Roots of the inverse Hessians there, ``(S, d, d)``.
        f: The values there, ``(S,)``.
        is_mode: Which are modes, ``(S,)``.
    """
    which: list[int] = []
    is_mode = is_mode & np.isfinite(f) & np.all(np.isfinite(root), axis=(1, 2))
    for i in np.argsort(np.where(is_mode, f, np.inf), kind="stable")[
        : int(is_mode.sum())
    ]:
        if all(
            np.linalg.norm(np.linalg.solve(root[j], loc[i] - loc[j])) > _SAME
            for j in which
        ):
            which.append(int(i))
    log_mass = (
        -f[which].astype(np.float64)
        + np.linalg.slogdet(root[which].astype(np.float64))[1]
    )
    log_mass += 0.5 * loc.shape[1] * math.log(2.0 * math.pi)
    total = float(np.logaddexp.reduce(log_mass)) if which else -math.inf
    mass = np.exp(log_mass - total)
    order = np.argsort(-mass, kind="stable")
    return Modes(loc[which][order], root[which][order], mass[order], total)


def mixture_at(
    modes: Modes, num_components: int, seed: int, *, diagonal: bool
) -> GaussianMixture:
    """A mixture that starts at modes: one component at each of the heaviest, the others where most mass is."""
    count = np.zeros(len(modes.mass), int)
    count[:num_components] = 1
    for _ in range(num_components - int(count.sum())):
        count[np.argmax(modes.mass / (count + 1.0))] += 1
    rng = np.random.default_rng(seed)
    loc, root, weights = [], [], []
    for mean, factor, mass, times in zip(
        modes.loc, modes.root, modes.mass, count, strict=True
    ):
        is_shared = times > 1
        for _ in range(times):
            loc.append(mean + is_shared * factor @ rng.normal(size=len(mean)))
            scaled = (_SHARED if is_shared else 1.0) * factor
            # The conditional deviations, as a mean field has.
            root.append(
                1.0 / np.linalg.norm(np.linalg.solve(scaled, np.eye(len(mean))), axis=0)
                if diagonal
                else scaled
            )
            weights.append(mass / times)
    logits = np.log(weights) - np.log(np.sum(weights))
    dtype = modes.loc.dtype
    return GaussianMixture(
        *(jnp.asarray(np.asarray(part), dtype) for part in (logits, loc, root))
    )
