"""What a mixture asks of its components."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.typing import Array


class Component(NamedTuple):
    r"""A conjugate component as functions.

    Data of a component are an exponential family: with K components, F statistics and n rows,

    .. math:: \log q_{\theta_j}(x) = \log h(x) + c(\theta_j) + \langle w(\theta_j), T(x) \rangle .

    Its prior is conjugate, so that the posterior given responsibilities follows from the weighted counts
    :math:`N_j` and the weighted sums of :math:`T(x)`; tempering multiplies both by alpha. Everything is
    written for all K components at once, with K as leading axis of what is called a posterior or parameters;
    the prior has no such axis. Data are columns, features first: shape ``(d, n)``.

    A component is compiled once for the functions that it holds: make it by a function that gives the same
    ones for the same arguments (as :func:`columnwise` does), with everything that is a number in ``prior``.

    Attributes:
        name: For messages and results.
        prior: Hyperparameters of one component, a NamedTuple of arrays.
        check: Rows ``(n, ...)`` as given by the user to floating rows ``(n, d)``; raises where they are not data
            of this family. NaN are missing entries.
        statistics: Columns ``(d, n)`` to T ``(F, n)``.
        log_base: Columns ``(d, n)`` to log h, ``(n,)``.
        update: ``(prior, counts (K,), sums (K, F))`` to the posterior. The prior itself where both are 0.
        coefficients: A posterior to E[c] ``(K,)`` and E[w] ``(K, F)``.
        kl: ``(posterior, prior)`` to the KL divergence, summed over components, shape ().
        log_evidence: ``(prior, counts, sums)`` to the log of ∫ exp(N_j c(θ) + ⟨sums_j, w(θ)⟩) dprior(θ), summed
            over components, shape (): log ratios of the normalisers of posterior and prior.
        log_predictive: ``(posterior, columns (d, n))`` to the log density ``(K, n)`` of a datum under each
            component, the parameters integrated out.
        draw: ``(sample, hyperparameters)`` to parameters, where ``sample(name, distribution)`` is
            ``numpyro.sample`` or draws; the one description of the prior and the posterior as distributions.
        distribution: Parameters ``(..., K)`` to the NumPyro distribution of a datum, of batch shape ``(..., K)``.
        coefficients_at: Parameters to c ``(K,)`` and w ``(K, F)``.
        maximum_likelihood: ``(prior, counts, sums)`` to parameters, of the prior only what is known (such as a
            variance); None where there is none.
        num_parameters: The number of components to the number of free parameters.
        coordinates: Rows ``(n, d)`` to points ``(n, p)`` without NaN, whose Euclidean distance tells components
            apart; for starts and splits.
        translate: ``(hyperparameters, shift (d,))`` to those of data that are moved by ``shift``; with it sums
            are taken about the mean of the data, which keeps digits. None where data may not be moved.
        with_missing: Makes the same component, without its prior, for data with missing entries, which are
            marginalised. None where the family does not allow this.
    """

    name: str
    prior: Any
    check: Callable[[Any], Array]
    statistics: Callable[[Array], Array]
    log_base: Callable[[Array], Array]
    update: Callable[[Any, Array, Array], Any]
    coefficients: Callable[[Any], tuple[Array, Array]]
    kl: Callable[[Any, Any], Array]
    log_evidence: Callable[[Any, Array, Array], Array]
    log_predictive: Callable[[Any, Array], Array]
    draw: Callable[[Callable[[str, Any], Array], Any], dict[str, Array]]
    distribution: Callable[[dict[str, Array]], Any]
    coefficients_at: Callable[[dict[str, Array]], tuple[Array, Array]]
    maximum_likelihood: Callable[[Any, Array, Array], dict[str, Array]] | None
    num_parameters: Callable[[int], int]
    coordinates: Callable[[Array], Array]
    translate: Callable[[Any, Array], Any] | None = None
    with_missing: Callable[[], "Component"] | None = None


def broadcast_prior(prior: Any, num_components: int) -> Any:
    """The prior with a leading axis of K equal components."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_components, *jnp.shape(leaf))), prior)


def floating_rows(x: Any, name: str, dim: int | None = None) -> Array:
    """Data as floating rows ``(n, d)``; a vector is one column.

    Raises:
        ValueError: If there is no row or column, the shape is wrong, or an entry is infinite.
        TypeError: If the data are not numbers.
    """
    array: Any = x if isinstance(x, jax.Array | np.ndarray) else np.asarray(x)
    if array.dtype == object or not (
        jnp.issubdtype(array.dtype, jnp.number) or jnp.issubdtype(array.dtype, jnp.bool_)
    ):
        raise TypeError(f"{name}: the data are of dtype {array.dtype}; numbers are needed. Encode them first.")
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: the data are complex; real numbers are needed.")
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or 0 in array.shape or (dim is not None and array.shape[1] != dim):
        expected = "(n, d)" if dim is None else f"(n, {dim})" + (" or (n,)" if dim == 1 else "")
        raise ValueError(f"{name}: the data have shape {np.shape(x)}; {expected} with n >= 1 is needed.")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        # Whole numbers far from 0 keep their digits on the host, until the centre is taken off.
        array = array.astype(np.float64 if isinstance(array, np.ndarray) else jnp.zeros(()).dtype)
    if not isinstance(array, jax.core.Tracer):
        library: Any = np if isinstance(array, np.ndarray) else jnp
        infinite = library.isinf(array)
        if bool(library.any(infinite)):
            row, column = first_true(infinite)
            raise ValueError(f"{name}: row {row}, column {column} of the data is {float(array[row, column])}.")
    return array


def check_values(x: Array, name: str, valid: Callable[[Any], Any], expected: str) -> None:
    """Raise ValueError where an entry that is not missing is not valid; the first such row is named."""
    if isinstance(x, jax.core.Tracer):
        return
    library: Any = np if isinstance(x, np.ndarray) else jnp
    wrong = ~(library.isnan(x) | valid(x))
    if not bool(library.any(wrong)):
        return
    row, column = first_true(wrong)
    raise ValueError(
        f"{name}: row {row}, column {column} of the data is {float(x[row, column]):g}; expected {expected}."
    )


def first_true(flags: Any) -> tuple[int, int]:
    """Row and column of the first True, row by row."""
    library: Any = np if isinstance(flags, np.ndarray) else jnp
    row, column = np.unravel_index(int(library.argmax(flags)), flags.shape)
    return int(row), int(column)


def check_dim(dim: Any, name: str) -> int:
    """The number of columns.

    Raises:
        ValueError: If it is not a whole number of at least 1.
    """
    if isinstance(dim, bool) or not isinstance(dim, int | np.integer) or dim < 1:
        raise ValueError(f"{name}: the number of columns must be an integer of at least 1, got {dim!r}.")
    return int(dim)


def spread(value: Array, dim: int, name: str, argument: str) -> Array:
    """A hyperparameter as one a column, ``(d,)``.

    Raises:
        ValueError: If it is neither one number nor one a column.
    """
    if value.shape not in ((), (dim,)):
        raise ValueError(f"{name}: {argument} has shape {value.shape}; expected () or ({dim},), one a column.")
    return jnp.broadcast_to(value, (dim,))


def one_number(value: Array, name: str, argument: str) -> Array:
    """A hyperparameter that all columns share.

    Raises:
        ValueError: If it is an array.
    """
    if value.shape != ():
        raise ValueError(f"{name}: {argument} has shape {value.shape}; expected one number, for all columns.")
    return value


def positive(value: Any, name: str, argument: str) -> Array:
    """A hyperparameter as a floating array.

    Raises:
        TypeError: If it is not numbers.
        ValueError: If an entry is not positive and finite.
    """
    array = finite(value, name, argument)
    if not isinstance(array, jax.core.Tracer) and not np.all(np.asarray(array) > 0):
        raise ValueError(f"{name}: {argument} must be positive, got {value}.")
    return array


def finite(value: Any, name: str, argument: str) -> Array:
    """A hyperparameter as a floating array.

    Raises:
        TypeError: If it is not numbers.
        ValueError: If an entry is not finite.
    """
    given: Any = value if isinstance(value, jax.Array) else np.asarray(value)
    if given.dtype == object or not jnp.issubdtype(given.dtype, jnp.number):
        raise TypeError(f"{name}: {argument} must be numbers, got {value!r}.")
    if jnp.issubdtype(given.dtype, jnp.complexfloating):
        raise TypeError(f"{name}: {argument} must be real numbers, got {value!r}.")
    # Numbers of the host get jax's default width.
    dtype = jnp.result_type(given, float) if isinstance(given, jax.Array) else jnp.zeros(()).dtype
    array = jnp.asarray(given, dtype=dtype)
    if not isinstance(array, jax.core.Tracer) and not np.all(np.isfinite(np.asarray(array))):
        raise ValueError(f"{name}: {argument} must be finite, got {value}.")
    return array


def standardised(rows: Array) -> Array:
    """Rows with columns of mean 0 and standard deviation 1; missing entries at 0, constant columns too."""
    observed = ~jnp.isnan(rows)
    count = jnp.maximum(jnp.sum(observed, axis=0), 1)
    mean = jnp.sum(jnp.where(observed, rows, 0.0), axis=0) / count
    centred = jnp.where(observed, rows - mean, 0.0)
    scale = jnp.sqrt(jnp.sum(jnp.square(centred), axis=0) / count)
    return centred / jnp.where(scale > 0, scale, 1.0)
