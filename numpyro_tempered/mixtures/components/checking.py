"""Whether the functions of a component belong together."""

from collections import OrderedDict
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.infer.util import log_density

from numpyro_tempered.core import Array, ArrayLike, double_precision, doubles, key_first
from numpyro_tempered.mixtures.components import base as components
from numpyro_tempered.mixtures.components import derived
from numpyro_tempered.mixtures.components.base import (
    Component,
    Hyperparameters,
    Parameters,
)

# Relative to the largest term of an identity; it holds to some 1e-13 in double precision.
TOLERANCE = 1e-8
# Upper limit of the rows that are checked.
MAX_ROWS = 100
# Pairs of trees that should be equal, by the names of what makes them.
Identities: TypeAlias = OrderedDict[str, tuple[object, object]]


@key_first
def check_component(
    rng_key: Array, component: Component, x: ArrayLike, *, alpha: float = 0.5
) -> None:
    r"""Check that the functions of a component agree with each other, on given data, in double precision.

    With K = 2 components, fixed responsibilities and parameters drawn from the posterior, it compares the
    following, without any Monte Carlo average:

    - the prior after no data with the prior, and its KL and log evidence with 0;
    - ``distribution`` with the exponential family :math:`\log h + c(\theta) + \langle w(\theta), T(x) \rangle`;
    - posterior / prior with likelihood / evidence, at every drawn parameter: ``draw``, ``update`` and
      ``coefficients_at`` with ``log_evidence``;
    - ``coefficients`` with the derivatives of ``log_evidence`` with respect to the counts and the sums;
    - ``kl`` with alpha E log q - log evidence: the two forms of the objective;
    - ``log_predictive`` with the gain of log evidence by one more datum;
    - the functions of ``location`` with ``statistics``, and what moves with it in ``log_predictive`` and ``kl``;
    - the results of ``with_missing`` with those of the component itself; where it completes rows, the sums of
      ``completed`` with the derivatives of ``linear``, and all others at complete rows alone.

    Args:
        rng_key: Key of the drawn parameters.
        component: The component.
        x: Some data of its family, of which the first 100 rows are used; missing entries too, if it takes them.
            Each column has at least two different values, in rows that are complete where the component completes
            others.
        alpha: Power on the likelihood.

    Raises:
        ValueError: If two of its functions disagree; the message names them and both values. Or if a column of
            the data has only one value.

    Example:
        >>> import jax
        >>> import numpyro_tempered as nt
        >>> component = nt.mixtures.components.known_variance(1)
        >>> nt.mixtures.components.check_component(jax.random.key(0), component, [[0.0], [9.0], [1.0]])
    """
    rows = component.check(x)[:MAX_ROWS]
    host = all_rows = doubles(rows)
    form = components.missing_form(component, rows)._replace(prior=None)
    completes = form.location is not None and form.location.completed is not None
    if completes:
        form, host = (
            component._replace(prior=None),
            all_rows[~np.isnan(all_rows).any(axis=1)],
        )
    # Sums of squares about a mean end at 0, where they have no derivative.
    is_constant = np.array(
        [len(np.unique(column[~np.isnan(column)])) < 2 for column in host.T]
    )
    if is_constant.any():
        which = f"column {int(np.argmax(is_constant))} of the {'complete rows' if completes else 'data'}"
        raise ValueError(
            f"{component.name}: {which} has no two different values; the check needs them."
        )
    with double_precision():
        prior = components.as_dtype(component.prior, jnp.float64)
        identities = _identities(
            rng_key, form, prior, jnp.asarray(host), jnp.float64(alpha)
        )
        if component.with_missing is not None:
            complete = host[~np.isnan(host).any(axis=1)]
            # A product may marginalise only in some columns; its check refuses the others.
            if len(complete) and _allows_empty_rows(component, rows.shape[1]):
                identities |= _missing_identities(
                    component._replace(prior=None), prior, jnp.asarray(complete.T)
                )
        if completes:
            form = component.with_missing()  # type: ignore[misc]
            identities |= _completion_identities(form, prior, jnp.asarray(all_rows.T))
    for names, (left, right) in identities.items():
        _compare(component.name, names, left, right)


def _allows_empty_rows(component: Component, dim: int) -> bool:
    """Whether all columns may be missing."""
    try:
        component.check(np.full((1, dim), np.nan))
    except ValueError:
        return False
    return True


def _compare(name: str, names: str, left: object, right: object) -> None:
    """Raise ValueError where two trees differ."""
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if np.shape(a) != np.shape(b):
            raise ValueError(
                f"{name}: {names}: shapes {np.shape(a)} and {np.shape(b)} differ."
            )
        a, b = np.asarray(a), np.asarray(b)
        gap = np.abs(a - b)
        tolerance = TOLERANCE * (1.0 + np.max(np.abs(b), initial=0.0))
        if not np.all(gap <= tolerance):
            # NaN compares with nothing, but is the worst.
            worst = np.unravel_index(
                int(np.argmax(np.where(np.isnan(gap), np.inf, gap))), gap.shape
            )
            raise ValueError(
                f"{name}: {names} disagree: {float(a[worst]):.9g} and {float(b[worst]):.9g}."
            )


def _weighted_sums(statistics: Array) -> tuple[Array, Array]:
    """Counts and sums of statistics ``(F, n)`` for two components that differ and are not empty."""
    first = 0.5 + 0.4 * jnp.cos(jnp.arange(statistics.shape[1], dtype=jnp.float64))
    omega = jnp.stack([first, 1.0 - first])
    return jnp.sum(omega, axis=1), jnp.sum(omega[:, None, :] * statistics, axis=-1)


@partial(jax.jit, static_argnames="component")
def _identities(
    rng_key: Array,
    component: Component,
    prior: Hyperparameters,
    rows: Array,
    alpha: Array,
) -> Identities:
    """Pairs that should be equal, by the names of what makes them."""
    columns = rows.T
    statistics, base = component.statistics(columns), component.log_base(columns)
    counts, sums = (alpha * total for total in _weighted_sums(statistics))
    posterior, priors = (
        component.update(prior, counts, sums),
        components.broadcast_prior(prior, 2),
    )
    nothing = component.update(prior, 0.0 * counts, 0.0 * sums)
    # In the order in which they are reported: what others rest on comes first.
    pairs: Identities = OrderedDict()
    pairs["update without data and the prior"] = nothing, priors
    empty_evidence = component.log_evidence(prior, 0.0 * counts, 0.0 * sums)
    pairs["log_evidence without data and 0"] = empty_evidence, jnp.zeros(())
    pairs["kl of the prior and 0"] = derived.kl(component, priors, prior), jnp.zeros(())

    def evidence(more: Array, more_sums: Array) -> Array:
        return component.log_evidence(prior, counts + more, sums + more_sums)

    value, slopes = jax.value_and_grad(evidence, (0, 1))(
        jnp.zeros_like(counts), jnp.zeros_like(sums)
    )
    constant, weights = derived.coefficients(component, posterior)

    # A draw, its density under posterior and prior, and its likelihood.
    def at_a_draw(key: Array) -> tuple[Array, Array, Array, Array]:
        parameters, log_ratio = _draw_with_ratio(key, component, posterior, priors)
        c, w = derived.coefficients_at(component, posterior, parameters)
        log_density = c[:, None] + jnp.einsum("kf,fn->kn", w, statistics) + base
        likelihood = jnp.sum(counts * c) + jnp.sum(sums * w)
        fn = component.distribution(parameters)
        complete = jnp.where(jnp.isnan(rows), 0.0, rows)
        direct = jax.vmap(fn.log_prob, out_axes=1)(complete)
        is_complete = ~jnp.any(jnp.isnan(rows), axis=1)
        return (
            jnp.where(is_complete, direct, log_density),
            log_density,
            log_ratio,
            likelihood,
        )

    direct, log_density, log_ratio, likelihood = jax.vmap(at_a_draw)(
        jax.random.split(rng_key, 5)
    )
    pairs["distribution and coefficients_at with statistics and log_base"] = (
        direct,
        log_density,
    )
    evidences = likelihood - log_ratio, jnp.broadcast_to(value, log_ratio.shape)
    pairs[
        "draw or update, whose posterior / prior is not likelihood / evidence, and log_evidence"
    ] = evidences
    pairs["coefficients and the derivatives of log_evidence"] = (
        (constant, weights),
        slopes,
    )
    expected = jnp.sum(counts * constant) + jnp.sum(sums * weights)
    divergence = derived.kl(component, posterior, prior)
    pairs["kl and log_evidence, the two forms of the objective,"] = (
        divergence,
        expected - value,
    )

    def gain(one: Array, datum: Array) -> Array:
        return evidence(one, one[:, None] * datum) - value

    gains = jax.vmap(jax.vmap(gain, (None, 0)), (0, None))(
        jnp.eye(2, dtype=counts.dtype), statistics.T
    )
    predictive = derived.log_predictive(component, posterior, columns)
    # A row without an observed entry is not a datum.
    some = ~jnp.all(jnp.isnan(rows), axis=1)
    each_gain = jnp.where(some, gains + base, 0.0)
    pairs["log_predictive and the gain of log_evidence"] = (
        jnp.where(some, predictive, 0.0),
        each_gain,
    )
    if component.location is not None:
        pairs |= _location_identities(component, prior, posterior, columns, weights)
    return pairs


def _location_identities(
    component: Component,
    prior: Hyperparameters,
    posterior: Hyperparameters,
    columns: Array,
    weights: Array,
) -> Identities:
    """What should be equal before and after data, prior and posterior move, column by column."""
    pairs: Identities = OrderedDict()
    of, linear, weighted_sums, movable, _ = component.location  # type: ignore[misc]
    dim = columns.shape[0]
    may_move = np.isin(np.arange(dim), range(dim) if movable is None else movable)
    shift = jnp.where(may_move, 1.0 + jnp.arange(dim, dtype=columns.dtype), 0.0)
    loc = of(posterior)
    after, prior_after = (
        components.translate(component, q, shift) for q in (posterior, prior)
    )
    pairs["location.of and its own change"] = of(after), loc + shift
    density = derived.log_predictive(component, after, columns + shift[:, None])
    pairs["location.of and log_predictive"] = (
        density,
        derived.log_predictive(component, posterior, columns),
    )
    pairs["location.of and kl"] = (
        derived.kl(component, after, prior_after),
        derived.kl(component, posterior, prior),
    )
    deviations = columns - jnp.where(may_move, loc, 0.0)[..., None]
    statistics = jax.vmap(component.statistics)(deviations)
    pairs["location.linear and statistics"] = (
        linear(weights, deviations),
        jnp.einsum("kf,kfn->kn", weights, statistics),
    )
    omega = jnp.stack(
        [jnp.arange(columns.shape[1], dtype=columns.dtype), jnp.ones(columns.shape[1])]
    )
    expected = jnp.einsum("kn,kfn->kf", omega, statistics)
    pairs["location.sums and statistics"] = weighted_sums(omega, deviations), expected
    return pairs


def _draw_with_ratio(
    rng_key: Array,
    component: Component,
    posterior: Hyperparameters,
    priors: Hyperparameters,
) -> tuple[Parameters, Array]:
    """Parameters drawn from the posterior, and the log of posterior / prior there."""
    with handlers.trace() as trace, handlers.seed(rng_seed=rng_key):
        parameters = component.draw(numpyro.sample, posterior)
    values = {name: site["value"] for name, site in trace.items()}
    log_q, _ = log_density(component.draw, (numpyro.sample, posterior), {}, values)
    log_p, _ = log_density(component.draw, (numpyro.sample, priors), {}, values)
    return parameters, log_q - log_p


@partial(jax.jit, static_argnames="component")
def _missing_identities(
    component: Component, prior: Hyperparameters, complete: Array
) -> Identities:
    """The form for missing entries on complete rows, and on a row without any."""
    form = component.with_missing()  # type: ignore[misc]
    pairs: Identities = OrderedDict()
    values = []
    for each in (component, form):
        statistics = each.statistics(complete)
        posterior = each.update(prior, *_weighted_sums(statistics))
        constant, weights = derived.coefficients(each, posterior)
        expected = constant[:, None] + jnp.einsum("kf,fn->kn", weights, statistics)
        values.append(
            (
                expected,
                derived.log_predictive(each, posterior, complete),
                derived.kl(each, posterior, prior),
            )
        )
    empty = jnp.full((complete.shape[0], 1), jnp.nan)
    pairs["with_missing on complete rows and the component"] = values[1], values[0]
    nothing = (
        constant[:, None] + jnp.einsum("kf,fn->kn", weights, form.statistics(empty)),
        form.log_base(empty)[None],
        derived.log_predictive(form, posterior, empty),
    )
    pairs["with_missing on a row of NaN and 0"] = (
        nothing,
        jax.tree.map(jnp.zeros_like, nothing),
    )
    return pairs


@partial(jax.jit, static_argnames="component")
def _completion_identities(
    component: Component, prior: Hyperparameters, columns: Array
) -> Identities:
    """Rows that are completed: the log of an integral, and its derivatives with respect to the coefficients."""
    _, linear, weighted_sums, _, completed = component.location  # type: ignore[misc]
    first = 0.5 + 0.4 * jnp.cos(jnp.arange(columns.shape[1], dtype=columns.dtype))
    omega = jnp.stack([first, 1.0 - first])
    rows = jnp.broadcast_to(columns, (2, *columns.shape))
    posterior = component.update(
        prior, jnp.sum(omega, axis=1), weighted_sums(omega, rows)
    )
    _, weights = derived.coefficients(component, posterior)
    # Towards each other's coefficients: a family may have some that are 0 by definition.
    change = weights[::-1] - weights
    _, slopes = jax.jvp(
        lambda each: jnp.sum(omega * linear(each, rows), axis=1), (weights,), (change,)
    )
    expected = jnp.sum(change * completed(weights, omega, rows), axis=1)  # type: ignore[misc]
    return OrderedDict(
        {
            "location.completed and the derivatives of location.linear": (
                expected,
                slopes,
            )
        }
    )
