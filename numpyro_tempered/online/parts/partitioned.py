"""Partitioned variational inference: one posterior from data that stay on several machines (BNST18)."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Description,
    Params,
    PyTree,
    Scalar,
    Shape,
    add_repr,
    check_count,
    check_number,
    check_record,
    is_traced,
    stream_arrays,
    warn_caller,
)
from numpyro_tempered.gaussian.descent import (
    Derivatives,
    Method,
    natural_gradient,
    stationarity,
)
from numpyro_tempered.gaussian.expectations.base import Data, Expectation
from numpyro_tempered.gaussian.families.base import Gaussian, able, family_of, supports
from numpyro_tempered.gaussian.natural import Natural, apply, to_natural
from numpyro_tempered.online.parts import local
from numpyro_tempered.online.parts.local import check_rows
from numpyro_tempered.online.parts.server import combine, combine_over
from numpyro_tempered.online.parts.state import (
    Change,
    Changes,
    Factor,
    PartitionedState,
    check_prior,
    check_size,
    checksum,
)
from numpyro_tempered.online.streams.findings import StreamWarning


class Partitioned(NamedTuple):
    """Partitioned variational inference as pure functions; made by :func:`partitioned`.

    Attributes:
        init: ``(prior, num_parts) -> PartitionedState`` of the server.
        factor: ``(state, part) -> Factor`` of a machine before its first round.
        refit: ``(factor, state, *data, mask, rng_key) -> Factor``, whose ``change`` is to be sent.
        combine: ``(state, changes) -> state`` of the server; one :class:`Change`, a sequence of them, or one with
            a leading axis. Changes combined at once enter by the same share.
        combine_over: ``(state, change, axis_name) -> state``: :attr:`combine` of the changes of all devices of a
            named axis, by collectives.
        expectation: Of the loss.
        damping: ρ.
    """

    init: Callable[[Gaussian, int], PartitionedState]
    factor: Callable[[PartitionedState, int | Array], Factor]
    refit: Callable[..., Factor]
    combine: Callable[[PartitionedState, Changes], PartitionedState]
    combine_over: Callable[[PartitionedState, Change, str], PartitionedState]
    expectation: Expectation
    damping: Scalar


def partitioned(
    expectation: Expectation,
    *,
    alpha: float = 1.0,
    damping: float = 0.5,
    method: Method | None = None,
    tolerance: float = 1e-6,
    max_evaluations: int = 20,
) -> Partitioned:
    r"""Partitioned variational inference: K machines, each with rows of its own, fit one posterior.

    The posterior is the prior times a factor for each machine, :math:`q \propto \pi \prod_k t_k`, all Gaussian
    terms. In a round a machine takes its factor out of the posterior, which leaves the cavity, and fits its rows
    to it:

    .. math:: q_k = \arg\min_{q'} \Big\{\alpha\, E_{q'}[L_k] + \mathrm{KL}\big(q', q / t_k\big)\Big\}, \qquad
              \lambda_{t_k}' = (1 - \rho)\, \lambda_{t_k} + \rho\, (\lambda_{q_k} - \lambda_{q / t_k})

    in natural parameters λ, with ρ the ``damping``. The change :math:`\lambda_{t_k}' - \lambda_{t_k}` is all that
    it sends. The server adds changes up in whatever order they come, from however old a posterior. Where no
    factor changes any more, the posterior is a stationary point of the batch problem, that of all rows on one
    machine, whatever K, the order or the damping. Conjugate models are there after one undamped round.

    The local fit starts at the present posterior. At its minimiser the new factor is -α ∇E[L_k], in expectation
    parameters, and where it ends before, the factor that makes its Gaussian of the cavity. A coarse local fit may
    take more rounds and does not change where they lead. With a convex loss no factor has negative curvature.

    Args:
        expectation: Of a bare loss, such as ``squared()`` or ``gauss_hermite(loss)``; of a NumPyro model by
            :func:`numpyro_tempered.OnlineVI.bare_loss`.
        alpha: Power on the likelihood, at least 0.
        damping: ρ in (0, 1]. Undamped rounds of many machines may swing or diverge: each corrects what all the
            others correct too. 1 is for conjugate models and sequential rounds; with a mean-field family and
            correlated coordinates .2 may be needed.
        method: What fits locally, :func:`.descent.natural_gradient` by default.
        tolerance: On the stationarity of the local fit, in nats.
        max_evaluations: Of the local expected loss in each round.

    Returns:
        A :class:`Partitioned` of functions; :func:`run_partitioned` drives them for shards on one machine.

    Raises:
        TypeError: If the expectation is that of a model, or no expectation. From ``init`` if the prior is of
            another family than MeanField and FullRank; from ``combine`` if a change is none.
        ValueError: If an argument is out of range. From ``refit`` where the posterior lacks the machine's last
            change, the prior is another, or the loss is not finite; from ``combine`` where a change is of another
            prior, size or machine, or the one before it is missing. Inside a transformation, where values cannot
            be read, such changes are rejected and counted.

    References:
        BNST18; AshmanEtAl22.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> pvi = nt.online.partitioned(nt.expectations.squared(), alpha=0.5, damping=1.0)
        >>> server = pvi.init(nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1)), 2)
        >>> a = pvi.refit(pvi.factor(server, 0), server, jnp.ones((2, 1)), jnp.array([1.0, 2.0]))
        >>> b = pvi.refit(pvi.factor(server, 1), server, jnp.ones((1, 1)), jnp.array([3.0]))
        >>> server = pvi.combine(server, [a.change, b.change])
        >>> print(f"{server.posterior.loc[0]:.3f} {server.posterior.scale[0]:.3f}")
        1.500 0.500
    """
    check_record(expectation, "expectation", Expectation, "nt.expectations.squared()")
    if expectation.bind is not None:
        raise TypeError(
            "partitioned takes the expectation of a bare loss, and this one is of a model's likelihood: "
            "online.bare_loss(rng_key, *args) makes one of it."
        )
    check_number(alpha, "alpha", "[0, inf)")
    check_number(damping, "damping", "(0, 1]")
    check_number(tolerance, "tolerance", "(0, inf)")
    check_count(max_evaluations, "max_evaluations")
    spec = local.Spec(expectation, method or natural_gradient(), max_evaluations)

    def refit(
        factor: Factor,
        state: PartitionedState,
        *data: object,
        mask: ArrayLike | None = None,
        rng_key: Array | None = None,
    ) -> Factor:
        _check_refit(expectation, factor, state, rng_key)
        arrays, on = local.check_rows(expectation, stream_arrays(data), mask)
        settings = local.Settings(
            *(
                jnp.asarray(number, state.linear.dtype)
                for number in (alpha, damping, tolerance)
            )
        )
        after = _refit(spec, factor, state, (arrays, on), settings, rng_key)
        if not is_traced(after) and not np.isfinite(
            np.sum(after.change.precision) + np.sum(after.change.linear)
        ):
            raise ValueError(
                f"the local fit of machine {int(after.change.part)} is not finite: the expected loss of its rows "
                "is beyond the dtype at the posterior. Standardise the features, or take a narrower prior."
            )
        return after

    return Partitioned(
        _init, _factor, refit, combine, combine_over, expectation, damping
    )


def _init(prior: Gaussian, num_parts: int) -> PartitionedState:
    check_count(num_parts, "num_parts")
    if not supports(prior, "from_root"):
        raise TypeError(
            f"partitioned works on a {able('from_root', 'or')} prior, whose natural parameters add up, got "
            f"{type(prior).__name__}."
        )
    prior = family_of(prior).check(prior)
    return _first(prior, num_parts)


@functools.partial(jax.jit, static_argnums=1)
def _first(prior: Gaussian, num_parts: int) -> PartitionedState:
    natural = to_natural(prior, prior.loc)
    counters = (jnp.zeros((), jnp.int32) for _ in range(3))
    return PartitionedState(
        prior,
        prior,
        *natural,
        jax.tree.map(jnp.zeros_like, natural),
        jnp.zeros(num_parts, jnp.int32),
        jnp.zeros(num_parts, natural.linear.dtype),
        *counters,
    )


def _factor(state: PartitionedState, part: int | Array) -> Factor:
    if not is_traced(part, state.rounds):
        number = check_count(part, "part", 0, state.rounds.shape[0] - 1)  # type: ignore[arg-type]
        if num_sent := int(state.rounds[number]):
            raise ValueError(
                f"machine {number} has sent {num_sent} changes: go on from the factor that it keeps, "
                "which is part of the posterior."
            )
    return _no_factor(state, jnp.asarray(part, jnp.int32))


@jax.jit
def _no_factor(state: PartitionedState, part: Array) -> Factor:
    zeros = jax.tree.map(jnp.zeros_like, state.natural)
    none, zero = jnp.zeros((), jnp.int32), jnp.zeros((), state.linear.dtype)
    no_fit = zero, none, jnp.zeros((), bool)
    change = Change(
        zeros.linear, zeros.precision, part, none, checksum(state.prior), *no_fit
    )
    return Factor(zeros.linear, zeros.precision, change)


def _check_refit(
    expectation: Expectation,
    factor: Factor,
    state: PartitionedState,
    rng_key: Array | None,
) -> None:
    check_record(factor, "factor", Factor, "pvi.factor(state, part)")
    check_record(state, "state", PartitionedState, "pvi.init(prior, num_parts)")
    if expectation.needs_key and rng_key is None:
        raise ValueError(
            "this expectation draws random numbers: pass rng_key=, the same one in each round."
        )
    check_size(factor.change, state, "factor")
    if is_traced(factor, state):
        return
    part, number = int(factor.change.part), int(factor.change.round)
    check_prior(factor.change, state, "factor")
    if (arrived := int(state.rounds[part])) != number:
        raise ValueError(
            f"machine {part} has made {number} changes, and {arrived} have entered this posterior: wait for a "
            "posterior that has the last one, and send factor.change again where it may be lost."
        )


@functools.partial(jax.jit, static_argnums=0)
def _refit(
    spec: local.Spec,
    factor: Factor,
    state: PartitionedState,
    data: tuple[PyTree, Array],
    settings: local.Settings,
    rng_key: Array | None,
) -> Factor:
    last, origin = factor.change, state.prior.loc
    share = state.shares[last.part]
    # Of a change that was refused nothing enters, NaN least of all.
    entered = jax.tree.map(
        lambda leaf: jnp.where(share > 0, share * leaf, 0.0), last.natural
    )
    present = factor.natural.plus(entered)
    key = None if rng_key is None else jax.random.fold_in(rng_key, last.part)
    cavity = local.Cavity(
        state.posterior.loc,
        state.precision - present.precision,
        -present.slope(state.posterior.loc - origin),
    )
    fit = local.refit(spec, cavity, state.posterior, data, settings, key)
    center = apply(fit.natural.precision, state.posterior.loc - origin)
    target = Natural(fit.natural.linear + center, fit.natural.precision)
    change = last._replace(
        linear=settings.damping * (target.linear - present.linear),
        precision=settings.damping * (target.precision - present.precision),
        round=last.round + 1,
        expected_loss=fit.expected_loss,
        skipped=fit.skipped,
        # Of a weak type it would have the next round compiled again.
        converged=fit.converged.astype(bool),
    )
    return Factor(present.linear, present.precision, change)


@add_repr
class PartitionedRun(NamedTuple):
    """The end of :func:`run_partitioned`, and its rounds.

    Attributes:
        state: The :class:`PartitionedState` of the server.
        factors: The :class:`Factor` of all machines, with a leading axis ``(K,)``.
        elbo: The ELBO of the posterior before each round, in nats, where the loss is a negative log-likelihood
            with every constant; shape ``(R,)``.
        move: How far each round moved the posterior, the KL of both to second order over ρ², in nats: about the
            KL gap to where the rounds lead; shape ``(R,)``.
        skipped: Rows left out in the last round because they are not finite, ``(K,)``.
        converged: Whether the last round moved by no more than the tolerance.
    """

    state: PartitionedState
    factors: Factor
    elbo: np.ndarray
    move: np.ndarray
    skipped: np.ndarray
    converged: bool

    @property
    def posterior(self) -> Gaussian:
        """The posterior of all rows."""
        return self.state.posterior

    @property
    def target(self) -> None:
        """None: the loss is none that ArviZ knows."""
        return None

    def sample_posterior(self, rng_key: Array, sample_shape: Shape = ()) -> Params:
        """Draws of the posterior, ``theta``."""
        q = self.posterior
        return {"theta": family_of(q).sample(rng_key, q, sample_shape)}

    def describe(self) -> Description:
        """The rounds, for :func:`~numpyro_tempered.to_inference_data`."""
        return Description(
            {"variational": {"elbo_trace": self.elbo, "move_trace": self.move}},
            {
                "algorithm": "partitioned",
                "elbo": float(self.elbo[-1]),
                "converged": int(self.converged),
                "num_rounds": len(self.move),
            },
            {"theta": ["coordinate"], "elbo_trace": ["round"], "move_trace": ["round"]},
        )


def run_partitioned(
    pvi: Partitioned,
    prior: Gaussian,
    shards: Sequence[tuple],
    *,
    num_rounds: int = 20,
    tolerance: float = 1e-4,
    sequential: bool = False,
    rng_key: Array | None = None,
) -> PartitionedRun:
    """Rounds over shards that one machine holds: to plan rounds of many, or to try a damping.

    In a synchronous round all shards are refitted from the same posterior, and their changes enter at once. In a
    sequential one each is refitted from the posterior that has the changes of those before it, which takes no
    damping on most problems; of K machines only one is then at work.

    Args:
        pvi: From :func:`partitioned`.
        prior: A :class:`.MeanField` or :class:`.FullRank`.
        shards: The data of each machine, tuples such as ``(x, y)``; sizes may differ, and be 0.
        num_rounds: At most.
        tolerance: On the move of a round, in nats.
        sequential: Whether rounds are sequential.
        rng_key: For expectations that draw: the same draws in each round.

    Returns:
        A :class:`PartitionedRun`. Outside of transformations one :class:`StreamWarning` says where rounds did not
        converge, changes were refused or rows left out.

    Raises:
        ValueError: If there is no shard, data do not fit the loss, or the expected loss of a shard is beyond the
            dtype.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> logistic = nt.expectations.logistic()
        >>> x, y = jnp.array([[1.0, 0.5], [0.2, -1.0], [1.0, 1.0], [0.3, 0.1]]), jnp.array([1.0, -1.0, -1.0, 1.0])
        >>> prior = nt.gaussian.families.FullRank(jnp.zeros(2), jnp.eye(2))
        >>> pvi = nt.online.partitioned(logistic)
        >>> run = nt.online.run_partitioned(pvi, prior, [(x[:3], y[:3]), (x[3:], y[3:])])
        >>> run.converged, len(run.elbo) < 20
        (True, True)
    """
    check_record(
        pvi, "pvi", Partitioned, "nt.online.partitioned(nt.expectations.squared())"
    )
    check_count(num_rounds, "num_rounds")
    check_number(tolerance, "tolerance", "(0, inf]")
    if not len(shards):
        raise ValueError("shards must hold the data of at least one machine, got none.")
    data, mask = _stack(pvi, [stream_arrays(tuple(shard)) for shard in shards])
    state = pvi.init(prior, len(shards))
    factors = jax.tree.map(
        lambda *leaves: jnp.stack(leaves),
        *(pvi.factor(state, part) for part in range(len(shards))),
    )
    one_round = _sequential if sequential else _synchronous
    elbo, move = [], []
    for _ in range(num_rounds):
        state, factors, record = one_round(pvi, state, factors, (data, mask), rng_key)
        elbo.append(float(record.elbo))
        move.append(float(record.move) / float(pvi.damping) ** 2)
        if not np.all(np.isfinite(factors.change.linear)):
            part = int(np.argmin(np.all(np.isfinite(factors.change.linear), axis=1)))
            raise ValueError(
                f"round {len(move)}: the local fit of shard {part} is not finite: the expected loss of its rows "
                "is beyond the dtype at the posterior. Standardise the features, or take a narrower prior."
            )
        if move[-1] <= tolerance:
            break
    run = PartitionedRun(
        state,
        factors,
        np.asarray(elbo),
        np.asarray(move),
        np.asarray(factors.change.skipped),
        bool(move[-1] <= tolerance),
    )
    _warn(run, tolerance)
    return run


class _Record(NamedTuple):
    elbo: Array
    move: Array


def _stack(pvi: Partitioned, shards: list[Data]) -> tuple[Data, Array]:
    """The shards with a leading axis of machines, filled up to the largest, and which rows are there."""
    checked = [check_rows(pvi.expectation, shard, None) for shard in shards]
    structures = {jax.tree.structure(data) for data, _ in checked}
    if len(structures) > 1:
        raise ValueError(
            f"shards must hold the same arrays, got {sorted(map(str, structures))}."
        )
    size = max(on.shape[0] for _, on in checked)

    def fill_up(leaf: Array) -> Array:
        return jnp.concatenate(
            [leaf, jnp.broadcast_to(leaf[:1], (size - leaf.shape[0], *leaf.shape[1:]))]
        )

    full = [
        (jax.tree.map(fill_up, data), jnp.arange(size) < jnp.sum(on))
        for data, on in checked
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *full)


@functools.partial(jax.jit, static_argnums=0)
def _synchronous(
    pvi: Partitioned,
    state: PartitionedState,
    factors: Factor,
    rows: tuple[Data, Array],
    rng_key: Array | None,
) -> tuple[PartitionedState, Factor, _Record]:
    """All machines from one posterior."""

    def refit(inputs: tuple[Factor, tuple[Data, Array]]) -> Factor:
        factor, (data, on) = inputs
        return pvi.refit(factor, state, *data, mask=on, rng_key=rng_key)

    after = jax.lax.map(refit, (factors, rows))
    combined = pvi.combine(state, after.change)
    return combined, after, _record(state, combined, after.change)


@functools.partial(jax.jit, static_argnums=0)
def _sequential(
    pvi: Partitioned,
    state: PartitionedState,
    factors: Factor,
    rows: tuple[Data, Array],
    rng_key: Array | None,
) -> tuple[PartitionedState, Factor, _Record]:
    """One machine after the other, each from the posterior that it finds."""

    def advance(
        present: PartitionedState, inputs: tuple[Factor, tuple[Data, Array]]
    ) -> tuple[PartitionedState, Factor]:
        factor, (data, on) = inputs
        after = pvi.refit(factor, present, *data, mask=on, rng_key=rng_key)
        return pvi.combine(present, after.change), after

    combined, after = jax.lax.scan(advance, state, (factors, rows))
    return combined, after, _record(state, combined, after.change)


def _record(
    before: PartitionedState, after: PartitionedState, changes: Change
) -> _Record:
    family = family_of(before.posterior)
    elbo = -jnp.sum(changes.expected_loss) - family.kl(before.posterior, before.prior)
    # The KL to second order, which is no difference of large numbers.
    pull = -after.natural.slope(before.posterior.loc - before.prior.loc)
    move = stationarity(
        before.posterior, Derivatives(jnp.zeros_like(elbo), pull, after.precision)
    )
    return _Record(elbo, move)


def _warn(run: PartitionedRun, tolerance: float) -> None:
    """One warning of what a run did not do."""
    remarks = []
    if not run.converged:
        fall = len(run.elbo) > 2 and run.elbo[-1] < np.max(run.elbo) - 1e-6 * abs(
            np.max(run.elbo)
        )
        remedy = "a smaller damping" if fall or run.state.halved else "more num_rounds"
        if run.state.linear.dtype != jnp.float64:
            remedy += ", or double precision where features are nearly collinear under a wide prior"
        fell = ", and the ELBO fell" if fall else ""
        remarks.append(
            f"{len(run.move)} rounds did not converge{fell}: the last moved the posterior by {run.move[-1]:.2g} "
            f"nats, above the tolerance {tolerance:.2g}; take {remedy}"
        )
    if rejected := int(run.state.rejected):
        remarks.append(
            f"{rejected} changes were refused, since they leave no Gaussian; take a smaller damping, or double "
            "precision"
        )
    if skipped := int(np.sum(run.skipped)):
        remarks.append(f"{skipped} rows are not finite and were left out")
    if remarks:
        warn_caller("; ".join(remarks) + ".", StreamWarning)
