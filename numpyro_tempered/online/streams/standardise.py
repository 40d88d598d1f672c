r"""Running standardisation of features inside the stream."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array, CompensatedSum
from numpyro_tempered.gaussian.expectations.base import Evaluation, Expectation
from numpyro_tempered.gaussian.families.base import (
    Gaussian,
    able,
    family_of,
    square_root,
    supports,
)
from numpyro_tempered.gaussian.families.full_rank import FullRank, canonical
from numpyro_tempered.online.base import (
    Data,
    Losses,
    OnlineState,
    Rule,
    choose,
    layers,
    memory_of,
)
from numpyro_tempered.online.stream import step as one_round


class Moments(NamedTuple):
    """Means and squared deviations of the features so far (Welford), compensated.

    Attributes:
        count: Number of rows, a scalar integer.
        mean: Shape ``(d,)``.
        squares: Sums of squared deviations from the mean, shape ``(d,)``.
    """

    count: Array  # type: ignore[assignment]
    mean: CompensatedSum
    squares: CompensatedSum


class Standardisation(NamedTuple):
    """Memory of :func:`standardise`.

    Attributes:
        memory: What the rule inside accumulates.
        moments: Of the features so far.
        intercept: Which column is the intercept, one-hot, shape ``(d,)``; None for none.
    """

    memory: object
    moments: Moments
    intercept: Array | None


def standardise(rule: Rule, *, intercept: int | None = None, argument: int = 0) -> Rule:
    r"""A rule that sees its features standardised by their running means and scales.

    Round t uses the statistics of rows 1, ..., t, its own included: features are known when the prediction is
    made, outcomes are not, so that the cumulative loss stays that of honest predictions. It also bounds a centred
    feature by √t, whatever the row.

    With an ``intercept`` column, z_j = (x_j - mean_j)/sd_j for the others, and the intercept is left as it is.
    Without one centring would change the model: z_j = x_j / √(mean of x_j²). A feature that has been constant (or
    zero) so far is divided by 1.

    The parameters are those of z. They refer to a scale that moves, most of all in the first rounds: evidence
    of earlier rounds was gathered on other scales, so the posterior is not that of any one fixed model and
    cannot be merged. :func:`original_scale` reports it in the units of x, by the statistics at the end.

    Args:
        rule: An online rule, for losses of a linear predictor.
        intercept: Index of the column of ones, or None; negative counts from the end.
        argument: Which of the data arrays holds the features, ``(d,)`` or ``(n, d)``.

    Returns:
        An online :class:`Rule`, whose memory is a :class:`Standardisation`. Rejected rounds leave the statistics
        as they were.

    Raises:
        ValueError: At ``init``, if there is no such column.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.standardise(nt.online.ngvi())
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> x, y = jnp.array([[2e6], [2e6]]), jnp.array([1.0, 1.0])
        >>> state, losses = nt.online.run(rule, nt.expectations.squared(), state, x, y)
        >>> print(f"{state.posterior.loc[0]:.3f}, in units of x {nt.online.original_scale(state).loc[0]:.1e}")
        0.800, in units of x 4.0e-07
    """

    def init(prior: Gaussian) -> OnlineState:
        state = rule.init(prior)
        loc = state.prior.loc
        (d,) = loc.shape
        if intercept is not None and not -d <= intercept < d:
            raise ValueError(
                f"intercept = {intercept} is not a column of {d} features."
            )
        column = (
            None if intercept is None else jnp.zeros_like(loc).at[intercept].set(1.0)
        )
        mean, squares = (CompensatedSum.start(jnp.zeros_like(loc)) for _ in range(2))
        moments = Moments(jnp.zeros_like(state.count), mean, squares)
        return state._replace(memory=Standardisation(state.memory, moments, column))

    def step(
        expectation: Expectation,
        state: OnlineState,
        data: Data,
        rng_key: Array | None,
        mask: Array | None,
    ) -> tuple[OnlineState, Losses]:
        before = state.memory
        x = jnp.asarray(data[argument]).astype(state.prior.loc.dtype)
        moments = observe(before.moments, x, mask)
        z = transform(before._replace(moments=moments), x)
        data = (*data[:argument], z, *data[argument + 1 :])
        after, losses = one_round(
            rule, expectation, state._replace(memory=before.memory), data, rng_key, mask
        )
        moments = choose(after.count > state.count, moments, before.moments)
        return after._replace(
            memory=before._replace(memory=after.memory, moments=moments)
        ), losses

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        raise TypeError(
            "a standardised rule changes the features of a round: use run or update, not its parts."
        )

    return rule._replace(
        init=init,
        update=update,
        step=step,
        name=f"{rule.name}, standardised",
        holds_evidence=False,
        features=argument,
    )


def observe(moments: Moments, x: Array, mask: Array | None = None) -> Moments:
    """The moments with the rows of ``x`` ``(d,)`` or ``(n, d)`` that are on (Chan, Golub and LeVeque)."""
    x = jnp.reshape(x, (-1, x.shape[-1]))
    on = jnp.ones(x.shape[:1], x.dtype) if mask is None else mask.astype(x.dtype)
    size = jnp.sum(on)
    weights = (on / jnp.maximum(size, 1.0))[:, None]
    # Around the present mean, so that large means do not cancel.
    shift = jnp.sum(weights * (x - moments.mean.value[None, :]), axis=0)
    spread = jnp.sum(
        on[:, None] * jnp.square(x - (moments.mean.value + shift)[None, :]), axis=0
    )
    count = moments.count.astype(x.dtype)
    share = size / jnp.maximum(count + size, 1.0)
    return Moments(
        moments.count + size.astype(moments.count.dtype),
        moments.mean.add(shift * share),
        moments.squares.add(spread + jnp.square(shift) * (count * share)),
    )


def transform(memory: Standardisation, x: Array) -> Array:
    """The features on the present scale, shape as ``x``, as :func:`standardise` hands them to the rule."""
    loc, scale = location_and_scale(memory)
    rows = (jnp.reshape(x, (-1, x.shape[-1])) - loc[None, :]) / scale[None, :]
    return jnp.reshape(rows, x.shape)


def features_of(state: object, x: Array) -> Array:
    """New features ``(d,)`` or ``(n, d)`` on the scale of a state's posterior, which may be their own.

    Each row counts in its own statistics, as in its round.

    Raises:
        TypeError: If experts of the state standardise, each on a scale of its own.
    """
    parts: list[object] = list(layers(state))  # type: ignore[arg-type]
    memories = [part for part in parts if isinstance(part, Standardisation)]
    if not memories:
        leaves = jax.tree.leaves(
            state, is_leaf=lambda node: isinstance(node, Standardisation)
        )
        if any(isinstance(leaf, Standardisation) for leaf in leaves):
            raise TypeError(
                "experts that standardise have a scale each, on which one posterior does not predict: "
                "standardise the aggregate instead, standardise(aggregate(...))."
            )
        return x
    (memory,) = memories

    def one(row: Array) -> Array:
        return transform(memory._replace(moments=observe(memory.moments, row)), row)

    rows = jnp.reshape(x, (-1, x.shape[-1])).astype(memory.moments.mean.value.dtype)
    return jnp.reshape(jax.vmap(one)(rows), x.shape)


def location_and_scale(memory: Standardisation) -> tuple[Array, Array]:
    """Location and scale of each feature, shape ``(d,)`` each: z = (x - location) / scale."""
    moments = memory.moments
    count = jnp.maximum(moments.count, 1).astype(moments.mean.value.dtype)
    mean, variance = moments.mean.value, moments.squares.value / count
    if memory.intercept is None:
        scale = jnp.sqrt(variance + jnp.square(mean))
        return jnp.zeros_like(mean), jnp.where(scale > 0, scale, 1.0)
    # Rounding leaves a constant feature a spread of some units in the last place.
    scale = jnp.sqrt(variance)
    unchanged = (memory.intercept > 0) | (
        scale <= 16.0 * jnp.finfo(scale.dtype).eps * jnp.abs(mean)
    )
    return jnp.where(memory.intercept > 0, 0.0, mean), jnp.where(unchanged, 1.0, scale)


def original_scale(state: OnlineState) -> Gaussian:
    r"""The posterior of a run of a rule by :func:`standardise`, for features in their own units.

    A linear map: θ_j / scale_j, and for the intercept θ_0 - Σ_j θ_j mean_j / scale_j, by the statistics so far.
    The predictor x·θ has the same mean and variance as z·θ on the scale of the run.

    Args:
        state: Of a run of a rule by :func:`standardise`.

    Returns:
        The posterior: a :class:`.MeanField` stays one without an intercept; with one,
        which the map correlates with the others, a :class:`.FullRank`.

    Raises:
        TypeError: If the rule does not standardise, or the posterior is of another family.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.standardise(nt.online.ngvi(), intercept=0)
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> x, y = jnp.array([[1.0, 10.0], [1.0, 30.0]]), jnp.array([0.0, 2.0])
        >>> state, losses = nt.online.run(rule, nt.expectations.squared(), state, x, y)
        >>> nt.online.original_scale(state).scale_tril.shape
        (2, 2)
    """
    memory, q = memory_of(state, Standardisation, "standardise(rule)"), state.posterior
    if not supports(q, "from_root"):
        raise TypeError(
            f"original_scale maps {able('from_root')}, got {type(q).__name__}."
        )
    family, (loc, scale) = family_of(q), location_and_scale(memory)
    if memory.intercept is None and family.diagonal_only:
        return family.with_root(q.loc / scale, family.root(q) / scale)
    matrix = jnp.diag(1.0 / scale)
    if memory.intercept is not None:
        matrix = matrix - memory.intercept[:, None] * (loc / scale)[None, :]
    # Triangular, as a prior has to be.
    return canonical(
        FullRank(jnp.matmul(matrix, q.loc), jnp.matmul(matrix, square_root(q)))
    )
