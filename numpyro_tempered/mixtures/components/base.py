"""What a mixture asks of its components."""

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Columns,
    Shape,
    as_array,
    check_count,
    check_number,
    check_numbers,
    check_real,
    double_precision,
    doubles,
    is_traced,
)

# A NamedTuple of arrays, the family's own; a dict of such for a product of families.
Hyperparameters: TypeAlias = Any
Parameters: TypeAlias = dict[str, Array]
# On the host, or on the devices.
Rows: TypeAlias = Array | np.ndarray
# ``numpyro.sample``, or what takes its place: the name of a site and its distribution to a value.
Sample: TypeAlias = Callable[[str, dist.Distribution], Array]
T = TypeVar("T")
# Nats that rounding of the data may take from the log density of a datum.
RESOLUTION = 1e-3


class Location(NamedTuple):
    r"""How a family whose data may be moved depends on where they are.

    Sums of squares about a distant point lose the digits of a narrow component. With a location, statistics are
    taken of deviations from centres :math:`c_j`, one of each component, that hyperparameters are relative to.

    Attributes:
        of: Hyperparameters to the location ``(..., d)``, entries of theirs that move as the data do.
        linear: Weights ``(K, F)`` and deviations ``(K, d, n)`` to :math:`\langle w_j, T(x_i - c_j) \rangle`,
            ``(K, n)``.
        sums: Responsibilities ``(K, n)`` and deviations to :math:`\sum_i \omega_{ji} T(x_i - c_j)`, ``(K, F)``.
        columns: Those that may be moved; None for all.
        completed: Weights ``(K, F)``, responsibilities and deviations with missing entries to the sums of
            :math:`E\, T(x_i - c_j)` under :math:`q(x_M \mid j) \propto \exp \langle w_j, T(x - c_j) \rangle`.
            Then ``linear`` is the log of the integral of that, and ``sums`` serve before there are weights. None
            where both are linear in T.
    """

    of: Callable[[Hyperparameters], Array]
    linear: Callable[[Array, Array], Array]
    sums: Callable[[Array, Array], Array]
    columns: Shape | None = None
    completed: Callable[[Array, Array, Array], Array] | None = None


class Component(NamedTuple):
    r"""A conjugate component as functions.

    The data of a component follow an exponential family: with K components, F statistics and n rows,

    .. math:: \log q_{\theta_j}(x) = \log h(x) + c(\theta_j) + \langle w(\theta_j), T(x) \rangle .

    Its prior is conjugate, so that the posterior given responsibilities follows from the weighted counts
    :math:`N_j` and the weighted sums of :math:`T(x)`; tempering multiplies both by alpha. Everything is
    written for all K components at once, with K as leading axis of what is called a posterior or parameters;
    the prior has no such axis. Data are columns, features first: shape ``(d, n)``.

    Seven functions make a component. What follows from them is derived, by automatic differentiation of
    ``log_evidence`` and ``draw`` at single components; a closed form in its place is faster, and in float32 more
    exact. Sites that are drawn have the names of the parameters then, and no two components share one.

    JAX compiles a component once for the functions that it holds. Make it by a function that returns the same
    functions for the same arguments, as :func:`columnwise` does, and put every number into ``prior``.

    Attributes:
        name: For messages and results.
        prior: Hyperparameters of one component, a NamedTuple of arrays.
        check: Rows ``(n, ...)`` as given by the user to floating rows ``(n, d)``; raises where they are not data
            of this family. NaN are missing entries.
        statistics: Columns ``(d, n)`` to T ``(F, n)``.
        log_base: Columns ``(d, n)`` to log h, ``(n,)``.
        update: ``(prior, counts (K,), sums (K, F))`` to the posterior. The prior itself where both are 0. With a
            ``location``, also that of another part of a product, priors of K components come with K first.
        log_evidence: ``(prior, counts, sums)`` to the log of ∫ exp(N_j c(θ) + ⟨sums_j, w(θ)⟩) dprior(θ), summed
            over components, shape (). It is the log ratio of the normalisers of posterior and prior. Derivatives
            at counts and sums of 0 are taken where ``coefficients`` is not given.
        draw: ``(sample, hyperparameters)`` to parameters, where ``sample(name, distribution)`` is
            ``numpyro.sample`` or draws; the one description of the prior and the posterior as distributions.
        distribution: Parameters ``(..., K)`` to the NumPyro distribution of a datum, of batch shape ``(..., K)``.
            Its support says whether the likelihood is a probability or a density, which are not comparable.
        coefficients: A posterior to E[c] ``(K,)`` and E[w] ``(K, F)``; by default the gradient of
            ``log_evidence``.
        kl: ``(posterior, prior)`` to the KL divergence, summed over components, shape (); by default from the
            data between the two, which Newton's method finds.
        log_predictive: ``(posterior, columns (d, n))`` to the log density ``(K, n)`` of a datum under each
            component, the parameters integrated out; by default its ``log_evidence``.
        coefficients_at: Parameters to c ``(K,)`` and w ``(K, F)``; by default from how ``draw`` and
            ``log_evidence`` change with a datum.
        maximum_likelihood: ``(prior, counts, sums)`` to parameters. It reads from the prior only known
            constants, such as a variance. None where there is no maximum: then there is no EM.
        num_parameters: The number of components to the number of free parameters; by default those that ``draw``
            draws, in unconstrained coordinates.
        coordinates: Rows ``(n, d)`` to points ``(n, p)`` without NaN, whose Euclidean distance separates the
            components; for starts and splits. Rows of NaN stand for none: means over the rows leave them out, and
            their points do not matter. By default standardised columns.
        location: How hyperparameters move with the data, so that sums are taken about the components and keep
            their digits. None where the data may not be moved.
        with_missing: Makes the same component, without its prior, for data with missing entries, which it
            marginalises. None where the family does not allow this.
    """

    name: str
    prior: Hyperparameters
    check: Callable[[ArrayLike], Array]
    statistics: Callable[[Array], Array]
    log_base: Callable[[Array], Array]
    update: Callable[[Hyperparameters, Array, Array], Hyperparameters]
    log_evidence: Callable[[Hyperparameters, Array, Array], Array]
    draw: Callable[[Sample, Hyperparameters], Parameters]
    distribution: Callable[[Parameters], dist.Distribution]
    coefficients: Callable[[Hyperparameters], tuple[Array, Array]] | None = None
    kl: Callable[[Hyperparameters, Hyperparameters], Array] | None = None
    log_predictive: Callable[[Hyperparameters, Array], Array] | None = None
    coefficients_at: Callable[[Parameters], tuple[Array, Array]] | None = None
    maximum_likelihood: Callable[[Hyperparameters, Array, Array], Parameters] | None = (
        None
    )
    num_parameters: Callable[[int], int] | None = None
    coordinates: Callable[[Array], Array] | None = None
    location: Location | None = None
    with_missing: Callable[[], "Component"] | None = None

    def __repr__(self) -> str:
        # The functions say nothing to a reader.
        return f"Component(name={self.name!r}, prior={self.prior!r})"


def check_is_component(component: object, name: str = "component") -> None:
    """Raise TypeError where this is not a component."""
    if not isinstance(component, Component):
        kind = type(component).__name__
        if isinstance(component, Mapping):
            raise TypeError(
                f"{name} is a {kind}: only select_num_components compares several components; give one of them."
            )
        raise TypeError(
            f"{name} is a {kind}; expected a component such as nt.mixtures.components.gaussian(dim)."
        )


def broadcast_prior(prior: T, num_components: int) -> T:
    """The prior with a leading axis of K equal components."""
    return jax.tree.map(
        lambda leaf: namespace(leaf).broadcast_to(
            leaf, (num_components, *np.shape(leaf))
        ),
        prior,
    )


def as_dtype(tree: Any, dtype: np.dtype | type) -> Any:
    """Arrays in one floating dtype; those that are not traced on the host, where a cast compiles nothing."""

    def cast(leaf: ArrayLike) -> ArrayLike:
        if isinstance(leaf, jax.Array):
            return (
                leaf.astype(dtype)
                if is_traced(leaf)
                else np.asarray(leaf).astype(dtype)
            )
        return np.asarray(leaf, dtype)

    return jax.tree.map(cast, tree)


def translate(component: Component, q: T, shift: ArrayLike | None) -> T:
    """Hyperparameters of the data plus ``shift``; the same ones where it is None."""
    return q if shift is None else _translate(q, shift, of=component.location.of)  # type: ignore[union-attr]


@partial(jax.jit, static_argnames="of")
def _translate(q: T, shift: Array, *, of: Callable[[T], Array]) -> T:
    # A location reads entries of the hyperparameters: the transpose of that adds to them.
    loc, transpose = jax.vjp(of, q)
    (change,) = transpose(jnp.broadcast_to(shift, loc.shape).astype(loc.dtype))
    return jax.tree.map(jnp.add, q, change)


def translate_on_host(component: Component, q: T, shift: np.ndarray | None) -> T:
    """The same in double precision and as NumPy arrays: float32 would round a location far from 0."""
    if shift is None:
        return q
    leaves, tree = jax.tree.flatten(q)
    values = [doubles(leaf) for leaf in leaves]
    ends = np.cumsum([1, *(leaf.size for leaf in values)])
    spans = list(zip(ends[:-1], ends[1:], values, strict=True))
    # Which entries move: the location of the numbers of all entries, with 0 for a column without one.
    numbers = [np.arange(a, b).reshape(leaf.shape) for a, b, leaf in spans]
    places = np.asarray(component.location.of(jax.tree.unflatten(tree, numbers)))  # type: ignore[union-attr]
    flat = np.concatenate([np.zeros(1), *(leaf.ravel() for leaf in values)])
    flat[places] += np.broadcast_to(doubles(shift), places.shape)
    pieces = [flat[a:b].reshape(leaf.shape) for a, b, leaf in spans]
    return jax.tree.unflatten(tree, pieces)


def means_of(component: Component, prior: Hyperparameters, shift: Array) -> Parameters:
    """Means of parameters under the prior of data plus ``shift`` ``(K, d)``: they move as parameters do."""
    priors = translate(component, broadcast_prior(prior, shift.shape[0]), shift)
    # NumPyro's checks would compile their parts that do not depend on the arguments, one by one.
    with numpyro.validation_enabled(False):
        return component.draw(lambda _, fn: fn.mean, priors)


@partial(jax.jit, static_argnames="component")
def change_of(component: Component, prior: Hyperparameters, shift: Array) -> Parameters:
    """How parameters change where the data move by ``shift`` ``(K, d)``; without rounding."""
    return jax.jvp(
        partial(means_of, component, prior), (jnp.zeros_like(shift),), (shift,)
    )[1]


def loc_of(
    component: Component, prior: Hyperparameters, parameters: Parameters, shape: Shape
) -> Array:
    """The location ``(K, d)`` of parameters: the transpose of :func:`change_of`."""
    _, transpose = jax.vjp(
        partial(means_of, component, prior),
        jnp.zeros(shape, jax.tree.leaves(prior)[0].dtype),
    )
    return transpose(parameters)[0]


def move_parameters(
    component: Component,
    prior: Hyperparameters,
    parameters: Parameters,
    shift: np.ndarray | None,
) -> Columns:
    """Parameters ``(..., K, ...)`` of data plus ``shift`` ``(K, d)``, on the host in double precision."""
    if shift is None:
        return {name: np.asarray(value) for name, value in parameters.items()}
    with double_precision():
        change = change_of(component, as_dtype(prior, jnp.float64), jnp.asarray(shift))
        return {
            name: doubles(value) + np.asarray(change[name])
            for name, value in parameters.items()
        }


def get_loc(q: Hyperparameters) -> Array:
    """The location of hyperparameters that name it ``loc``."""
    return q.loc


def missing_form(component: Component, rows: Rows) -> Component:
    """The component for these rows: the form for missing entries where there are some.

    Raises:
        ValueError: If entries are missing and the family cannot marginalise them.
    """
    is_missing = namespace(rows).isnan(rows)
    if not bool(is_missing.any()):
        return component
    if component.with_missing is None:
        column = int(is_missing.any(axis=0).argmax())
        raise ValueError(
            f"{component.name}: column {column} has missing entries (NaN), which this family does not "
            "marginalise. Take a Gaussian, or one with independent columns, or leave the rows out."
        )
    return component.with_missing()


def namespace(array: Rows) -> ModuleType:
    """NumPy for an array or number of the host, ``jax.numpy`` for any other."""
    return np if isinstance(array, np.ndarray | np.generic) else jnp


def floating_rows(
    x: ArrayLike,
    name: str,
    dim: int | None,
    valid: Callable[[Array], Array] | None = None,
    expected: str = "",
) -> Array:
    """Data as floating rows ``(n, d)``; a vector is one column.

    Args:
        x: The data; missing entries are NaN.
        name: The family, for messages.
        dim: Number of columns; None for any.
        valid: Entries to whether each is a datum of the family; by default any finite number is.
        expected: What a datum is, for the message.

    Raises:
        ValueError: If there is no row or column, the shape is wrong, or an entry is infinite or not valid.
        TypeError: If the data are not real numbers.
    """
    array: Array = as_array(x, f"{name}: the data", "Encode them as real numbers.")  # type: ignore[assignment]
    check_real(array.dtype, f"{name}: the data", hint="Encode them as real numbers.")
    if array.ndim == 1:
        array = array[:, None]
    if (
        array.ndim != 2
        or 0 in array.shape
        or (dim is not None and array.shape[1] != dim)
    ):
        shape = (
            "(n, d)"
            if dim is None
            else f"(n, {dim})" + (" or (n,)" if dim == 1 else "")
        )
        raise ValueError(
            f"{name}: the data have shape {np.shape(x)}; {shape} with n >= 1 is needed."
        )
    if not jnp.issubdtype(array.dtype, jnp.floating):
        # Whole numbers far from 0 keep their digits on the host, until the centre is taken off.
        array = array.astype(
            np.float64 if isinstance(array, np.ndarray) else jnp.zeros(()).dtype
        )
    if not is_traced(array):
        library = namespace(array)
        is_valid = (
            library.isfinite(array)
            if valid is None
            else library.isfinite(array) & valid(array)
        )
        is_invalid = ~(library.isnan(array) | is_valid)
        if bool(is_invalid.any()):
            row, column = np.unravel_index(int(is_invalid.argmax()), is_invalid.shape)
            value = f"row {row}, column {column} of the data is {float(array[row, column]):g}"
            text = f"{value}; expected {expected}." if expected else f"{value}."
            raise ValueError(
                f"{name}: {text} Of {is_invalid.size} entries {int(is_invalid.sum())} are not valid."
            )
    return array


def one_number(
    value: ArrayLike, name: str, argument: str, interval: str = "(0, inf)"
) -> Array:
    """A hyperparameter that all columns share.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is an array, or outside of the interval.
    """
    check_number(value, f"{name}: {argument}", interval)
    return hyperparameter(value, name, argument, interval)


def per_column(
    value: ArrayLike, dim: int, name: str, argument: str, interval: str = "(0, inf)"
) -> Array:
    """A hyperparameter of each column, ``(d,)``; one number stands for all.

    Raises:
        TypeError: If it is not numbers.
        ValueError: If it has another shape, or an entry is outside of the interval.
    """
    dim = check_count(dim, f"{name}: the number of columns")
    array = hyperparameter(value, name, argument, interval)
    if array.shape not in ((), (dim,)):
        raise ValueError(
            f"{name}: {argument} has shape {array.shape}; expected () or ({dim},)."
        )
    return namespace(array).broadcast_to(array, (dim,))


def hyperparameter(
    value: ArrayLike, name: str, argument: str, interval: str = "(0, inf)"
) -> Array:
    """A hyperparameter as a floating array.

    Raises:
        TypeError: If it is not numbers.
        ValueError: If an entry is outside of the interval.
    """
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    if not (
        jnp.issubdtype(array.dtype, jnp.floating)
        or jnp.issubdtype(array.dtype, jnp.integer)
    ):
        raise TypeError(f"{name}: {argument} must be real numbers, got {value!r}.")
    # Numbers of the host keep their digits until the data, and the prior with them, are moved to their mean.
    is_on_device = isinstance(array, jax.Array)
    array = (
        array.astype(jnp.result_type(array, float))
        if is_on_device
        else array.astype(np.float64)
    )
    return check_numbers(array, f"{name}: {argument}", interval)  # type: ignore[return-value]


def standardised(rows: Array) -> Array:
    """Rows with columns of mean 0 and standard deviation 1; missing entries and constant columns are 0."""
    deviations, count = centre_rows(rows)
    scale = jnp.sqrt(jnp.sum(jnp.square(deviations), axis=0) / count)
    return deviations / jnp.where(scale > 0, scale, 1.0)


def centre_rows(rows: Array) -> tuple[Array, Array]:
    """Rows less the means of their columns, 0 where an entry is missing; and the observed entries per column."""
    observed = ~jnp.isnan(rows)
    count = jnp.maximum(jnp.sum(observed, axis=0), 1)
    mean = jnp.sum(jnp.where(observed, rows, 0.0), axis=0) / count
    return jnp.where(observed, rows - mean, 0.0), count
