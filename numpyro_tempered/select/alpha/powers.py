"""The power that each parameter asks for, and what intervals cover at another."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import cho_solve

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Model,
    doubles,
    jacobian,
    number_names,
    run_program,
    runs_models,
)
from numpyro_tempered.handlers.arguments import check_key_and_model, model_arguments
from numpyro_tempered.report.arviz import dataset
from numpyro_tempered.select.alpha.base import Task
from numpyro_tempered.select.alpha.dependence import Block
from numpyro_tempered.select.alpha.independence import warn_of_dependence
from numpyro_tempered.select.alpha.magnitude import magnitude_adjustment
from numpyro_tempered.select.alpha.sandwich import (
    NEGLIGIBLE,
    Estimate,
    Functional,
    estimate_of,
)

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

LEVEL = 0.95
# The most numbers in the scores of all data for which a report judges coverage: half a gigabyte in float32.
MOST_SCORES = 2**27


class Powers(NamedTuple):
    """Of K parameters, ``(K,)`` each.

    Attributes:
        parameters: Names of the elements of the latent sites.
        estimate: The minimiser of the total loss.
        sd: The standard deviation of the untempered posterior of many data.
        power: The power at which it is that of the estimate over samples.
        power_se: Its standard error.
        joint: The power of :func:`magnitude` for all together, with its standard error.
    """

    parameters: Sequence[str]
    estimate: np.ndarray
    sd: np.ndarray
    power: np.ndarray
    power_se: np.ndarray
    joint: tuple[float, float]

    def coverage(self, alpha: float = 1.0) -> np.ndarray:
        """What nominal 95% intervals of the posterior at a power cover."""
        from scipy.stats import norm

        return (
            2.0 * norm.cdf(norm.ppf(0.5 + LEVEL / 2.0) * np.sqrt(self.power / alpha))
            - 1.0
        )


@runs_models
def calibrated_powers(
    rng_key: Array,
    model: Model,
    *data: object,
    groups: ArrayLike | None = None,
    block: Block = None,
    plate: str | None = None,
    **kwargs: object,
) -> "pd.DataFrame":
    r"""The power that each parameter asks for, if its intervals are to cover what they say: one call, one table.

    With J the mean Hessian and I the covariance of the sum of the scores over n, at the minimiser of the total
    untempered loss, and g the gradient of a parameter there, the posterior at the power α has, for many data,
    the variance :math:`g^\top J^{-1} g / (\alpha n)`, and the estimate varies over samples by
    :math:`g^\top J^{-1} I J^{-1} g / n`. They are equal at

    .. math:: \alpha = \frac{g^\top J^{-1} g}{g^\top J^{-1} I J^{-1} g}.

    Where these powers agree, one power calibrates all intervals: that of :func:`magnitude` is between them. Where
    they are far from each other, none does; take the row of the parameter that you report, or a better model of
    the noise.

    Args:
        rng_key: Key of the start of the minimisation.
        model: NumPyro model, as for :func:`numpyro_tempered.select_alpha`.
        *data: Arguments of the model.
        groups: Of data that depend on each other, as for ``select_alpha``.
        block: Of a series, likewise.
        plate: Name of the plate whose rows are the data, where there are several.
        **kwargs: Keyword arguments of the model.

    Returns:
        A table with a row for each element of each latent site, such as ``beta[0]``, that the data move, and the
        columns ``estimate``, the minimiser; ``sd``, the standard deviation of the untempered posterior;
        ``sd_sandwich``, that of the estimate over samples; ``power``, the square of their ratio, with
        ``power_se``; and ``coverage``, what untempered 95% intervals cover.

    Raises:
        ValueError: Where :func:`lyddon` refuses.

    References:
        P. Huber, *The behavior of maximum likelihood estimates under nonstandard conditions*, 1967; LHW; NW.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = 2.0 * jnp.array([-1.0, 1.0] * 10)  # variance 4, where the model has 1
        >>> nt.alpha.calibrated_powers(jax.random.key(0), model, y)[["power", "coverage"]].round(2)
                   power  coverage
        parameter
        theta       0.25      0.67
    """
    check_key_and_model(calibrated_powers, rng_key, model)
    args, kwargs = model_arguments(calibrated_powers, model, data, kwargs)
    task = Task(model, rng_key, args, kwargs, plate, groups=groups, block=block)
    estimate = estimate_of(task)
    warn_of_dependence(task.rows, estimate.influence)
    powers = powers_of(task, estimate)
    columns = {
        "estimate": powers.estimate,
        "sd": powers.sd,
        "sd_sandwich": powers.sd / np.sqrt(powers.power),
        "power": powers.power,
        "power_se": powers.power_se,
        "coverage": powers.coverage(),
    }
    return by_parameter(columns, powers, {}).to_dataframe()


def find_coverage(task: Task) -> tuple[Estimate | None, Powers | str]:
    """The sandwich of a task, and its powers or why it has none."""
    if task.dim_latent * task.num_data > MOST_SCORES:
        return (
            None,
            f"{task.dim_latent} latents and {task.num_data} data have too many scores.",
        )
    estimate = None
    try:
        estimate = estimate_of(task)
        return estimate, powers_of(task, estimate)
    except ValueError as error:
        # The reason, without what to do instead of a criterion that was not asked for.
        return estimate, str(error).split(". ")[0] + "."


def advise_on_coverage(alpha: float, powers: Powers) -> str:
    """A sentence on what intervals at a power cover, for a criterion with another aim."""
    covers = powers.coverage(alpha)
    worst = int(np.argmin(covers))
    head = f"{LEVEL:.0%} intervals of the exact posterior there cover about {np.mean(covers):.2f}"
    if len(covers) > 1:
        head += f", those of {powers.parameters[worst]} {covers[worst]:.2f}"
    power, se = powers.joint
    if abs(power - alpha) <= max(2.0 * se, NEGLIGIBLE * alpha):
        return f"{head}: there is no better power for coverage."
    return f"{head}: for coverage take alpha = {power:.3g} (standard error {se:.2g}), that of magnitude()."


def powers_dataset(
    powers: Powers, alpha: float, attrs: Mapping[str, object]
) -> "xr.Dataset":
    """The powers, and what intervals cover at the chosen one, by parameter."""
    columns = {
        "power": powers.power,
        "power_se": powers.power_se,
        "coverage": powers.coverage(alpha),
        "coverage_untempered": powers.coverage(),
    }
    return by_parameter(columns, powers, attrs)


def by_parameter(
    columns: Mapping[str, np.ndarray], powers: Powers, attrs: Mapping[str, object]
) -> "xr.Dataset":
    """Columns ``(K,)`` with the names of the parameters."""
    dims = {name: ["parameter"] for name in columns}
    return dataset(
        columns, coords={"parameter": list(powers.parameters)}, dims=dims, attrs=attrs
    )


def powers_of(task: Task, estimate: Estimate) -> Powers:
    """The powers of all elements of the latents that the minimiser can move."""
    unravel = task.flat()[1]

    def values(theta: Array) -> Array:
        constrained = task.constrain_sites(unravel(theta))
        return ravel_pytree(
            [jnp.asarray(constrained[name], theta.dtype) for name in task.latents]
        )[0]

    def shapes(theta: Array) -> list[Array]:
        constrained = task.constrain_sites(unravel(theta))
        return [constrained[name] for name in task.latents]

    point, curvature = estimate.sandwich.minimum.point, estimate.sandwich.curvature
    names = [
        each
        for name, leaf in zip(task.latents, jax.eval_shape(shapes, point), strict=True)
        for each in number_names(name, map(range, leaf.shape))
    ]
    of_values = power_of(values)

    def all_powers(theta: Array, curvature: Array, variance: Array) -> Array:
        return jnp.append(
            of_values(theta, curvature, variance),
            magnitude_adjustment(curvature, variance),
        )

    power, se = estimate.evaluate(all_powers)
    joint = float(power[-1]), float(se[-1])
    power, se = power[:-1], se[:-1]

    def moments(point: Array, curvature: Array) -> tuple[Array, Array]:
        slopes = jacobian(values, point).T
        shifts = cho_solve((jnp.linalg.cholesky(curvature), True), slopes)
        return values(point), jnp.sqrt(jnp.sum(slopes * shifts, axis=0) / task.num_data)

    estimates, sd = map(doubles, run_program(moments, point, curvature))
    # Entries that are constant, such as the zeros of a triangular matrix, have no power.
    moves = np.isfinite(power) & (sd > 0)
    parameters = [name for name, can_move in zip(names, moves, strict=True) if can_move]
    return Powers(
        parameters, estimates[moves], sd[moves], power[moves], se[moves], joint
    )


def power_of(values: Callable[[Array], Array]) -> Functional:
    """The powers of K functions of the flat latents, as a functional."""

    def power(theta: Array, curvature: Array, variance: Array) -> Array:
        slopes = jacobian(values, theta).T
        shifts = cho_solve((jnp.linalg.cholesky(curvature), True), slopes)
        model = jnp.sum(slopes * shifts, axis=0)
        samples = jnp.sum(shifts * (variance @ shifts), axis=0)
        moves = samples > 0
        return jnp.where(moves, model / jnp.where(moves, samples, 1.0), jnp.nan)

    return power
