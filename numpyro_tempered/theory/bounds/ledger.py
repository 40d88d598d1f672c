"""The regret ledger: what online rules lost, against the best in hindsight and the bounds of theory."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_tempered.core import ArrayLike, check_choice, doubles
from numpyro_tempered.online.base import Losses
from numpyro_tempered.report.arviz import assemble, dataset, versions
from numpyro_tempered.theory.bounds.base import Bound, online_to_batch
from numpyro_tempered.theory.hindsight import Hindsight

if TYPE_CHECKING:
    import xarray as xr

MAX_ROUNDS = 2000


def regret_ledger(
    losses: Mapping[str, Losses],
    hindsight: Hindsight | Sequence[Hindsight] | None = None,
    bounds: Mapping[str, Bound] | None = None,
    averages: Mapping[str, ArrayLike] | None = None,
    *,
    reference: str | None = None,
    rounds: Sequence[int] | None = None,
) -> Any:
    r"""Cumulative losses, regret, bounds and standard errors of online rules on one stream, as ArviZ data.

    Group ``regret``, with dims ``(rule, round)``, each after the rounds 1 to t:

    - ``cumulative_at_mean``, the loss at the posterior means (the decisions), and ``cumulative_expected``;
    - ``average``, the first over the rounds taken;
    - ``regret`` and ``regret_expected``: those sums minus the loss, in the same rounds, of the θ that is best at
      the END of the stream;
    - ``bound``, the theorem's bound on the regret, and ``cumulative_bound``, that on the cumulative loss; NaN
      where there is none;
    - ``difference``, the cumulative loss at the means minus that of the reference rule, paired;
    - ``regret_se`` and ``difference_se``, standard errors. With replications (permutations of the data, seeds)
      they are over those, paired. With a single run they are over its rounds, which are taken for independent:
      a description of the noise of the stream, rough where the rule still learns. The attribute
      ``standard_errors`` says which.

    ``taken`` and ``rejected``, by rule, count rounds; a rejected one (a loss that is not finite) counts neither
    for the rule nor for θ, and a rule that has one has no bound here: leave such rounds out of the data.

    Group ``hindsight``: ``theta``, ``value``, ``lower`` (no θ is better than that) and ``cumulative``, by round.
    Group ``online_to_batch``: the ``average`` decision by rule, and its ``guarantee``, the bound on its expected
    excess risk; for SVA, whose comparator is of this stream, it is the mean of the guarantee over streams that
    bounds. The assumptions of every bound are in the attribute ``assumptions``, as JSON by rule.

    Args:
        losses: Losses per round by rule, as ``nt.online.run`` returns them: shape ``(T,)``, or ``(R, T)`` for R
            replications.
        hindsight: The best fixed parameter, from :mod:`.bounds.hindsight`, with its losses in the order
            of the stream; one for each replication where they differ.
        bounds: By rule, from :mod:`numpyro_tempered.bounds`, for round T or for ``np.arange(1, T + 1)``.
        averages: By rule, the average of the decisions, from :func:`numpyro_tempered.online.average`: shape
            ``(d,)`` or ``(R, d)``.
        reference: Rule to which the others are compared; by default the one with the least average loss.
        rounds: Rounds to keep, from 1; by default all up to 2000, or 2000 that are even on a logarithmic scale.

    Returns:
        ``arviz.InferenceData`` under ArviZ 0.x, ``xarray.DataTree`` under 1.x. :func:`table` makes a table
        of it, ``nt.plots.plot_regret`` a picture.

    Raises:
        ValueError: If shapes disagree, a name is not among the rules, or a round is out of range.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> import numpyro_tempered as nt
        >>> x, y = jnp.ones((40, 1)), jnp.asarray(np.tile([1.0, 1.0, -1.0, 1.0], 10))
        >>> box, prior = nt.online.Box(1.0, 1.0), nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1))
        >>> L, D = nt.bounds.lipschitz(x), nt.bounds.diameter(box, d=1)
        >>> rate = nt.online.svb_rate(nt.online.svb_constant(lipschitz=L, diameter=D))
        >>> rule = nt.online.svb(rate, box=box)
        >>> _, losses = nt.online.run(rule, nt.expectations.hinge(), rule.init(prior), x, y)
        >>> data = nt.bounds.regret_ledger(
        ...     {"svb": losses},
        ...     hindsight=nt.bounds.hindsight.hinge(x, y, box),
        ...     bounds={"svb": nt.bounds.svb(np.arange(1, 41), lipschitz=L, diameter=D)},
        ... )
        >>> table = nt.table(data)
        >>> bool(table.loc["svb", "regret"] < table.loc["svb", "bound"])
        True
    """
    at_mean, expected, replicated = _stack(losses)
    names = list(losses)
    _, num_replications, num_rounds = at_mean.shape
    several = [hindsight] if isinstance(hindsight, Hindsight) else hindsight
    best = (
        None if several is None else _best_losses(several, num_replications, num_rounds)
    )
    for label, by_rule in (("bounds", bounds), ("averages", averages)):
        unknown = sorted(set(by_rule or {}) - set(names))
        if unknown:
            raise ValueError(
                f"{label} has {unknown}, which are not among the rules {names}."
            )
    round_numbers = _choose_rounds(rounds, num_rounds)

    finite = np.isfinite(at_mean)
    at_mean = np.where(finite, at_mean, 0.0)
    cumulative = np.cumsum(at_mean, axis=-1)
    average = (cumulative / np.maximum(np.cumsum(finite, axis=-1), 1)).mean(axis=1)
    reference = (
        names[int(np.argmin(average[:, -1]))] if reference is None else reference
    )
    base = names.index(check_choice(reference, "reference", names))

    both = finite & finite[base]
    difference, difference_se = _paired(at_mean - at_mean[base], both)
    columns = {
        "cumulative_at_mean": cumulative.mean(axis=1),
        "cumulative_expected": _sum(expected, finite).mean(axis=1),
        "average": average,
        "difference": difference,
        "difference_se": difference_se,
        "taken": finite.sum(axis=-1).mean(axis=-1),
        "rejected": (~finite).sum(axis=-1).mean(axis=-1),
    }
    best_sum = np.full(num_rounds, np.nan)
    if best is not None:
        best_sum = np.cumsum(best, axis=-1).mean(axis=0)
        columns["regret"], regret_se = _paired(at_mean - best, finite)
        columns["regret_expected"] = _sum(expected - best, finite).mean(axis=1)
        columns["regret_se"] = regret_se
    columns["bound"], columns["cumulative_bound"] = np.full(
        (2, len(names), num_rounds), np.nan
    )
    for name, bound in (bounds or {}).items():
        i = names.index(name)
        if np.all(finite[i]):
            by_round = _bound_by_round(name, bound, best_sum, num_replications)
            columns["bound"][i], columns["cumulative_bound"][i] = by_round

    coords = {"rule": names, "round": round_numbers.tolist()}
    dims = {name: ["rule", "round"][: column.ndim] for name, column in columns.items()}
    rows = round_numbers - 1
    values = {
        name: column[:, rows] if column.ndim == 2 else column
        for name, column in columns.items()
    }
    groups = {"regret": dataset(values, coords=coords, dims=dims)}
    if hindsight is not None:
        groups["hindsight"] = _hindsight_group(hindsight, best_sum[rows], coords)
    if averages:
        groups["online_to_batch"] = _batch_group(
            averages, names, columns["bound"][:, -1], num_rounds
        )
    attrs = {
        "reference": reference,
        "standard_errors": "over replications" if replicated else "over rounds",
        "num_replications": num_replications,
        "num_rounds": num_rounds,
        "sources": json.dumps(
            {name: bound.source for name, bound in (bounds or {}).items()}
        ),
        "assumptions": json.dumps(
            {name: list(bound.assumptions) for name, bound in (bounds or {}).items()}
        ),
        **versions(),
    }
    return assemble(
        {name: each.assign_attrs(attrs) for name, each in groups.items()}, attrs
    )


def _stack(losses: Mapping[str, Losses]) -> tuple[np.ndarray, np.ndarray, bool]:
    """Both losses as arrays (rule, replication, round), and whether there are replications."""
    if not isinstance(losses, Mapping) or not losses:
        raise ValueError(
            "regret_ledger needs the losses of at least one rule, as a mapping from its name."
        )
    for name, value in losses.items():
        if not isinstance(value, Losses):
            raise ValueError(
                f"losses[{name!r}] must be Losses, as run returns them, got {type(value).__name__}."
            )
    pairs = [[doubles(part) for part in value] for value in losses.values()]
    shapes = {
        name: part.shape
        for name, pair in zip(losses, pairs, strict=True)
        for part in pair
    }
    first = pairs[0][0]
    if (
        first.ndim not in (1, 2)
        or first.size == 0
        or any(p.shape != first.shape for pair in pairs for p in pair)
    ):
        raise ValueError(
            f"losses must have one shape (T,) or (R, T) for all rules, got {shapes}."
        )
    stacked = np.array([[np.atleast_2d(part) for part in pair] for pair in pairs])
    return stacked[:, 0], stacked[:, 1], stacked.shape[2] > 1


def _best_losses(
    several: Sequence[Hindsight], num_replications: int, num_rounds: int
) -> np.ndarray:
    """Losses of the best fixed parameter, (replication, round)."""
    counts = [len(h.losses) for h in several]
    if len(counts) not in (1, num_replications) or set(counts) != {num_rounds}:
        raise ValueError(
            f"hindsight must be one or {num_replications}, with the losses of {num_rounds} rounds, got {counts}."
        )
    return np.broadcast_to(
        np.stack([h.losses for h in several]), (num_replications, num_rounds)
    )


def _choose_rounds(rounds: Sequence[int] | None, num_rounds: int) -> np.ndarray:
    if rounds is None:
        if num_rounds <= MAX_ROUNDS:
            return np.arange(1, num_rounds + 1)
        return np.unique(np.geomspace(1, num_rounds, MAX_ROUNDS).round().astype(int))
    positions = np.unique(np.asarray(rounds, int))
    if positions.size == 0 or positions[0] < 1 or positions[-1] > num_rounds:
        raise ValueError(f"rounds must lie from 1 to {num_rounds}, got {list(rounds)}.")
    return positions


def _sum(values: np.ndarray, included: np.ndarray) -> np.ndarray:
    return np.cumsum(np.where(included, values, 0.0), axis=-1)


def _paired(
    differences: np.ndarray, included: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sums of differences (rule, replication, round), averaged over replications, and their standard errors."""
    sums = _sum(differences, included)
    num_replications = sums.shape[1]
    if num_replications > 1:
        return sums.mean(axis=1), sums.std(axis=1, ddof=1) / np.sqrt(num_replications)
    # t times the variance of the differences so far; about a shift, against cancellation.
    n = np.cumsum(included, axis=-1)
    shift = sums[..., -1:] / np.maximum(n[..., -1:], 1)
    centred = np.where(included, differences - shift, 0.0)
    first, second = np.cumsum(centred, axis=-1), np.cumsum(np.square(centred), axis=-1)
    scatter = np.maximum(second - np.square(first) / np.maximum(n, 1), 0.0)
    se = np.where(n > 1, np.sqrt(n * scatter / np.maximum(n - 1, 1)), np.nan)
    return sums[:, 0], se[:, 0]


def _bound_by_round(
    name: str, bound: Bound, best: np.ndarray, num_replications: int
) -> np.ndarray:
    """Bounds on the regret and on the cumulative loss, (2, round), for the cumulative loss of the best θ."""
    value, num_rounds = doubles(bound.value), len(best)
    if value.shape not in ((), (num_rounds,), (num_replications, num_rounds)):
        raise ValueError(
            f"bounds[{name!r}] must be for the last of the {num_rounds} rounds or for every one, got shape "
            f"{value.shape}."
        )
    if value.ndim == 0:
        by_round = np.append(np.full(num_rounds - 1, np.nan), value)
    else:
        by_round = np.atleast_2d(value).mean(axis=0)
    return np.stack(
        [by_round, by_round + best]
        if bound.comparator is None
        else [by_round - best, by_round]
    )


def _hindsight_group(
    hindsight: Hindsight | Sequence[Hindsight],
    cumulative: np.ndarray,
    coords: Mapping[str, Sequence],
) -> "xr.Dataset":
    names = ("theta", "value", "lower")
    if isinstance(hindsight, Hindsight):
        values, lead = {name: getattr(hindsight, name) for name in names}, []
    else:
        values, lead = (
            {name: np.stack([getattr(h, name) for h in hindsight]) for name in names},
            ["replication"],
        )
    dims = {
        "theta": [*lead, "coefficient"],
        "value": lead,
        "lower": lead,
        "cumulative": ["round"],
    }
    return dataset({**values, "cumulative": cumulative}, coords=coords, dims=dims)


def _batch_group(
    averages: Mapping[str, ArrayLike],
    names: list[str],
    regret: np.ndarray,
    num_rounds: int,
) -> "xr.Dataset":
    points = {name: doubles(value) for name, value in averages.items()}
    shapes = {name: point.shape for name, point in points.items()}
    if len(set(shapes.values())) > 1 or any(
        point.ndim not in (1, 2) for point in points.values()
    ):
        raise ValueError(
            f"averages must have one shape (d,) or (R, d) for all rules, got {shapes}."
        )
    rules = [name for name in names if name in points]
    stacked = np.stack([points[name] for name in rules])
    guarantee = online_to_batch(
        num_rounds, regret[[names.index(name) for name in rules]]
    ).value
    dims = (
        ["rule", "replication", "coefficient"]
        if stacked.ndim == 3
        else ["rule", "coefficient"]
    )
    values = {"average": stacked, "guarantee": guarantee}
    return dataset(
        values, coords={"rule": rules}, dims={"average": dims, "guarantee": ["rule"]}
    )
