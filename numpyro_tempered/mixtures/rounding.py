"""What rounding takes from log densities, and what is refused for it."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, warn_caller
from numpyro_tempered.mixtures.ascent import PassState
from numpyro_tempered.mixtures.components.base import RESOLUTION, Component
from numpyro_tempered.mixtures.factors import Factors, Outcome
from numpyro_tempered.mixtures.prepare import MixtureData
from numpyro_tempered.mixtures.result import OCCUPIED
from numpyro_tempered.mixtures.sweep import Coefficients, Sums, rounding_losses

# Nats of rounding of a log density from which on responsibilities are rounding, and F is off by itself.
LARGEST_ROUNDING = 1.0


def losses_of(
    component: Component,
    mixture: Coefficients,
    centre: np.ndarray | None,
    spacings: Array,
) -> tuple[Array, Array]:
    """The spacing of the data at each component, and what it takes from a log density.

    Args:
        component: The family.
        mixture: Its coefficients.
        centre: What is subtracted from the data, or None.
        spacings: Of the numbers near 1 that the data came as, and are held as.

    Returns:
        The spacing ``(K, d)``, and nats ``(K,)``.
    """
    if mixture.centres is None or centre is None:
        nothing = jnp.zeros_like(mixture.log_weights)
        return nothing[:, None], nothing
    as_given, as_rows = spacings
    spacing = jnp.maximum(
        as_given * jnp.abs(mixture.centres + centre), as_rows * jnp.abs(mixture.centres)
    )
    return spacing, rounding_losses(component, mixture, spacing)


def sizes_of(mixture: Coefficients, sums: Sums) -> Array:
    """How large the terms of the log density of a mean datum are, ``(K,)``."""
    terms = jnp.sum(jnp.abs(mixture.weights * sums.statistics), axis=1)
    return jnp.abs(mixture.constant) + terms / jnp.maximum(sums.counts, OCCUPIED)


def check_resolution(
    component: Component, spacing: Array, losses: Array, counts: np.ndarray
) -> None:
    """Refuse a mixture whose log densities are rounding, in one of the components that hold data.

    Raises:
        FloatingPointError: If the spacing of the data takes more than ``RESOLUTION`` from a log density.
    """
    of_data = np.where(counts >= OCCUPIED, np.asarray(losses), 0.0)
    if of_data.max() > RESOLUTION:
        j = int(np.argmax(of_data))
        raise FloatingPointError(
            f"component {j} of {component.name!r} is too narrow for its place: numbers there are held to "
            f"{np.max(spacing[j]):.2g}, which takes {of_data[j]:.2g} nats from the log density of a datum. Give "
            "the data in float64 as a NumPy array, whose mean is subtracted before they are rounded, widen the "
            "prior, or let jax have 64 bits."
        )


def check_rounding(
    component: Component, sizes: np.ndarray, counts: np.ndarray, dtype: np.dtype
) -> None:
    """Refuse a mixture whose log densities are differences of numbers that are too large for the precision.

    Such are those of counts: x log λ - λ of a million.

    Args:
        component: The family.
        sizes: Of the terms of the log density of a mean datum, ``(K,)``.
        counts: N_j, ``(K,)``.
        dtype: Of the passes over the data.

    Raises:
        FloatingPointError: If rounding takes more than ``LARGEST_ROUNDING`` from the log density of a mean datum.
    """
    of_data = np.where(counts >= OCCUPIED, sizes, 0.0)
    j = int(np.argmax(of_data))
    rounding = 0.5 * float(jnp.finfo(dtype).eps) * of_data[j]
    if rounding > LARGEST_ROUNDING:
        raise FloatingPointError(
            f"the log densities of component {j} of {component.name!r} are differences of numbers of size "
            f"{of_data[j]:.2g}, which {dtype} holds to {rounding:.2g} nats: let jax have 64 bits."
        )


def has_converged(
    data: MixtureData,
    outcome: Outcome,
    rise: float,
    limit: float,
    step_error: Callable[[PassState[Factors]], float],
) -> bool:
    """Whether an ascent that says so has converged in double precision too, with a warning where it has not.

    Args:
        data: The data.
        outcome: The outcome of the search.
        rise: What a step in double precision raises the objective by.
        limit: How much counts, in nats.
        step_error: A state to what the objective loses there by a step that is not in double precision.

    Raises:
        RuntimeError: If F fell by more than rounding, unless its steps are not those of double precision.
    """
    if outcome.fallen is None:
        return outcome.history.converged
    number, point = outcome.fallen
    # Falls of less than what counts as converged are those of ill-conditioned priors.
    if outcome.fall > limit and step_error(point) <= limit:
        raise RuntimeError(
            f"the objective of restart {number} fell by {outcome.fall:.3g} nats, which coordinate ascent cannot "
            f"do: update, coefficients and kl of the component {data.component.name!r} do not belong "
            "together."
        )
    if outcome.history.converged and rise > limit:
        warn_caller(
            f"the best restart has not converged: a step in double precision raises its objective by {rise:.2g} "
            f"nats, which {data.rows.dtype} does not resolve. The prior may be too far from the data, or "
            "columns too close to one another: standardise them, or let jax have 64 bits."
        )
        return False
    return outcome.history.converged
