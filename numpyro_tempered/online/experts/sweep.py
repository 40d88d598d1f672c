"""One pass over a stream by every rule of a grid, each for itself."""

import jax
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Params,
    PyTree,
    check_record,
    is_traced,
    map_batches,
    run_program,
    stream_arrays,
    warn_caller,
)
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.online.base import Data, Losses, OnlineState, check_prior
from numpyro_tempered.online.drivers import (
    check_data,
    check_mask,
    check_rows,
    check_some_finite,
)
from numpyro_tempered.online.experts.grid import Grid, init_experts, scale_gradients
from numpyro_tempered.online.stream import Rounds, RoundStep, Step, loop
from numpyro_tempered.online.streams.findings import (
    Pass,
    StreamWarning,
    count_findings,
    loss_findings,
)
from numpyro_tempered.online.streams.processes import prepare

# Numbers of the posteriors that run side by side on a CPU: what the arithmetic of a round holds then stays in its
# nearest cache, and a matrix, whose products take turns anyway, runs alone.
MOST_NUMBERS = 4096


def run_grid(
    grid: Grid,
    expectation: Expectation,
    init: Gaussian | OnlineState,
    *data: object,
    mask: ArrayLike | None = None,
    rng_key: Array | None = None,
) -> tuple[OnlineState, Losses]:
    """One pass over a stream by every rule of a grid, in one program: a sweep over rates, priors or powers.

    The numbers are those of :func:`run` for each rule alone. As many rules run side by side as the caches of a
    CPU hold, or all of them on an accelerator; on a CPU one costs about three quarters of a run by itself, or
    less. :func:`aggregate` also weighs them, in every round.

    Outside of transformations one :class:`StreamWarning` tells what :func:`run` would tell of the rule of the
    least loss.

    Args:
        grid: From :func:`grid`, of K rules.
        expectation: E_q of a bare loss, such as ``nt.expectations.hinge()``.
        init: The prior, or the states of an earlier sweep, to go on from.
        *data: Arrays with one leading axis of T rounds, as for :func:`run`.
        mask: Optional, boolean, shape ``(T,)`` or ``(T, n)``, as for :func:`run`.
        rng_key: For expectations that draw: all rules draw the same numbers.

    Returns:
        The states, with a leading axis of K on each leaf, and :class:`Losses` of shape ``(K, T)``, untempered and
        before every update. ``jax.tree.map(lambda leaf: leaf[k], states)`` is the state of rule k, a state of
        ``grid.rule(grid.values(k))``.

    Raises:
        TypeError: If the grid is none, ``init`` neither prior nor states, or the mask not boolean.
        ValueError: As :func:`run`, or if the states are not of K rules.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> grid = nt.online.grid(nt.online.ngvi, step_size=[0.01, 0.1, 1.0])
        >>> x, y = np.tile(np.eye(2), (20, 1)), np.tile([1.0, -1.0], 20)
        >>> prior = nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2))
        >>> states, losses = nt.online.run_grid(grid, nt.expectations.hinge(), prior, x, y)
        >>> totals = np.asarray(losses.at_mean, float).sum(axis=1)
        >>> dict(zip(grid.labels, totals.round(1).tolist()))
        {'ngvi(step_size=0.01)': 36.9, 'ngvi(step_size=0.1)': 16.6, 'ngvi(step_size=1)': 2.6}
    """
    check_record(
        grid, "grid", Grid, "nt.online.grid(nt.online.ngvi, step_size=[0.5, 1.0])"
    )
    check_record(expectation, "expectation", Expectation, "nt.expectations.squared()")
    arrays = stream_arrays(data)
    num_rounds = check_rows(jax.tree.leaves(arrays))
    on = check_mask(mask, arrays, num_axes=2)
    if on is not None and on.ndim == 0:
        raise ValueError(
            f"mask must have shape ({num_rounds},), or ({num_rounds}, n) for batches, got ()."
        )
    before, arrays, on = prepare(_states(grid, init), arrays, on, rng_key)
    check_data(expectation, arrays, on)
    check_some_finite(arrays, on)
    values = grid.arrays(before.posterior.loc.dtype)
    rounds, batch_size = (
        Rounds(arrays, on, num_rounds),
        _batch_size(before.posterior, len(grid.labels)),
    )

    def sweep(
        values: Params,
        before: OnlineState,
        data: Data,
        on: Array | None,
        rng_key: Array | None,
    ) -> tuple[OnlineState, Losses]:
        def one(expert: tuple[Params, OnlineState]) -> tuple[OnlineState, Losses]:
            values, state = expert
            one_round: RoundStep = Step(
                grid.rule(values), scale_gradients(expectation, values["alpha"])
            )  # type: ignore[assignment]
            return loop(one_round, state, rounds._replace(data=data, mask=on), rng_key)

        return map_batches(one, (values, before), batch_size)

    after, losses = run_program(sweep, values, before, arrays, on, rng_key)
    if not is_traced(after, losses):
        _warn(grid, before, after, Pass(expectation, arrays, losses, on))
    return after, losses


def _states(grid: Grid, start: Gaussian | OnlineState) -> OnlineState:
    """The states of the rules before the first round."""
    size = len(grid.labels)
    if not isinstance(start, OnlineState):
        return init_experts(grid, check_prior(start))
    sizes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(start)}
    if sizes != {(size,)}:
        raise ValueError(
            f"the states must be those of an earlier run_grid with this grid of {size} rules, got leading axes "
            f"{sorted(sizes)}: give the prior to begin."
        )
    return start


def _batch_size(posteriors: PyTree, size: int) -> int:
    """How many rules run side by side."""
    if jax.default_backend() != "cpu":
        return size
    each = sum(leaf.size for leaf in jax.tree.leaves(posteriors)) // size
    return max(1, min(size, MOST_NUMBERS // each))


def _warn(grid: Grid, before: OnlineState, after: OnlineState, rounds: Pass) -> None:
    """Issue one warning with the findings of the rule of the least loss: others may be there to fail."""
    totals = np.sum(np.asarray(rounds.losses.at_mean, float), axis=1)
    best = int(np.argmin(np.where(np.isfinite(totals), totals, np.inf)))
    before, after, losses = jax.tree.map(
        lambda leaf: leaf[best], (before, after, rounds.losses)
    )
    its = rounds._replace(losses=losses)
    findings = [*count_findings(after, before, its), *loss_findings(after, its)]
    if findings:
        messages = " ".join(finding.message for finding in findings)
        warn_caller(
            f"Of the grid, {grid.labels[best]} has the least loss, and {messages}",
            StreamWarning,
        )
