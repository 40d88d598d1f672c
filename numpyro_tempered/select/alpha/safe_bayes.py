"""SafeBayes: alpha by the prequential losses of its posteriors (Grünwald and van Ommen 2017)."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    Columns,
    Params,
    check_choice,
    check_count,
    doubles,
    map_batches,
)
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.online.base import Losses
from numpyro_tempered.select.alpha.base import (
    Criterion,
    Decision,
    Draws,
    Plan,
    Summary,
    Task,
)
from numpyro_tempered.select.alpha.dependence import Dependence, se_of_sum

NUM_BLOCKS = 8
_WITH_MEAN = {"continuous": ', without a mean: take "gibbs".'}


def safe_bayes(
    loss: str | Callable[[Params], Array] = "gibbs",
    *,
    blocks: int | Sequence[int] | None = None,
    rule: str = "one_se",
    permutations: int | None = None,
) -> Criterion:
    r"""SafeBayes: the alpha whose posteriors predict the next data best, as draws or as points.

    **Its aim is the risk** of the posterior on new data, not the coverage of intervals: :func:`lyddon`,
    :func:`bootstrap_fisher` and :func:`gpc` aim at that, and choose other alphas by design.

    With :math:`\pi_\alpha^{i}` the tempered posterior on the first i data, the cumulative losses are

    .. math:: \text{R-log: } \sum_i E_{\theta\sim\pi_\alpha^{i-1}}[-\log p_\theta(z_i)],\qquad
              \text{I-log: } \sum_i -\log p_{\bar\theta_{i-1}}(z_i),

    with :math:`\bar\theta` the posterior mean on the unconstrained scale. The loss of the Bayesian predictive
    mixture, :math:`-\log E_\theta p_\theta`, is not among them: where the model is wrong, a mixture of bad
    parameters may predict well because it is outside of the model (hypercompression), which hides the problem.

    The posterior is refitted at the starts of blocks, not at each datum. The data of the first block have the
    prior's loss, which is the same for all alphas, and are left out. An online rule has the posterior before each
    datum: its own losses are summed, and ``blocks`` is not used.

    Data in ``groups`` come group by group, so that no posterior has seen a part of the group that it predicts; of
    a stream the first datum of each group counts. A series with a ``block`` keeps its order.

    The one-SE rule takes the largest alpha whose cumulative loss is within one standard error of the least: that
    of the sum of the paired differences, over groups or along a series where data depend on each other. On
    well-specified data the choice is still often below 1, at a small price in the risk: averaged over regressions
    with up to 51 coefficients it was 1.11 times that of alpha = 1 with 50 data, and .98 times with 100.

    The loss ``"gibbs"`` grows with the spread of the draws, so many parameters for few data give a smaller alpha
    even where the model is right; ``"plugin"`` ignores the spread.

    Args:
        loss: ``"gibbs"`` (R-log, the default), ``"plugin"`` (I-log), or a function from one draw of the
            latents by site to the losses of all data ``(n,)``, such as squared errors; the criterion takes its
            posterior expectation.
        blocks: Number of blocks of equal size, 8 by default or as many as there are data; or the sizes
            n_1 < n_2 < ... < n of the data on which the posterior is refitted, the last block ending at n. Of
            data in groups they count groups.
        rule: ``"one_se"``, or ``"min"`` for the alpha of the least cumulative loss.
        permutations: Number of random orders of the data, or of their groups, to average over, at least 1; 0 for
            the order of the data themselves. The default is 1, because a file is often sorted by class or time,
            and 0 for a series.

    Returns:
        A :class:`Criterion` for :func:`numpyro_tempered.select_alpha`. Its columns are ``criterion``, the
        cumulative loss in nats, ``criterion_se``, the standard error of its difference to the least, and
        ``gibbs`` and ``plugin``.

    Raises:
        ValueError: If an argument is out of range; and when it runs, if there are fewer data than blocks, the
            latents of a plug-in loss are discrete, or a series is to be permuted.

    References:
        GvO, sections 4 and 5; P. Grünwald, *The Safe Bayesian*, ALT 2012.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> y = jnp.array([-1.0, 1.0] * 10)
        >>> choice = nt.select_alpha(
        ...     jax.random.key(0), model, AutoNormal, y, alphas=[0.25, 1.0],
        ...     criterion=nt.alpha.safe_bayes(blocks=4),
        ... )
        >>> choice.alpha
        1.0
    """
    if not callable(loss) and loss not in ("gibbs", "plugin"):
        raise ValueError(
            f'loss must be "gibbs", "plugin" or a function of the latents, got {loss!r}.'
        )
    check_choice(rule, "rule", ("one_se", "min"))
    if permutations is not None:
        check_count(permutations, "permutations", 0)

    def plan(rng_key: Array, task: Task) -> Plan:
        require(task.trace, _WITH_MEAN if loss == "plugin" else {})
        rows = task.data_rows
        edges = block_edges(blocks, task.dependence.num_groups)
        masks = [
            place[None, :] < edge
            for place in places(rng_key, task.dependence, permutations)
            # From many data to few: a posterior on few data is a poor start for one on many.
            for edge in edges[::-1]
        ]

        def reduce(draws: Draws) -> Params:
            losses = {
                "gibbs": -jnp.mean(draws.log_lik, axis=0),
                "plugin": -draws.log_lik_at_mean,
            }
            if callable(loss):
                each = rows.take(map_batches(loss, draws.values, 64).T).T
                if each.shape != draws.log_lik.shape:
                    raise ValueError(
                        f"the loss must give one number for each datum, ({task.num_data},), got {each.shape[1:]}."
                    )
                losses["loss"] = jnp.mean(each, axis=0)
            return losses

        return Plan(np.concatenate(masks).astype(float), reduce)

    def decide(
        rng_key: Array, task: Task, grid: np.ndarray, summary: Summary
    ) -> Decision:
        edges = block_edges(blocks, task.dependence.num_groups)
        orders = places(rng_key, task.dependence, permutations)
        by_datum = {}
        for name, values in summary.items():
            losses = doubles(values).reshape(len(orders), len(edges), len(grid), -1)[
                :, ::-1
            ]
            of_datum = np.zeros(losses.shape[2:])
            for of_order, place in zip(losses, orders, strict=True):
                # The loss of each datum is that of the last posterior before it, and 0 in the first block.
                block = np.searchsorted(edges, place, side="right") - 1
                of_datum += np.where(
                    block >= 0, of_order[block, :, np.arange(task.num_data)].T, 0.0
                )
            by_datum[name] = of_datum / len(orders)
        return judge(
            by_datum, "loss" if callable(loss) else loss, rule, grid, task.dependence
        )

    def stream(
        rng_key: Array,
        grid: np.ndarray,
        dependence: Dependence,
        run: Callable[[np.ndarray], Losses],
    ) -> Decision:
        if callable(loss):
            raise ValueError(
                'an online rule has no loss but "gibbs" and "plugin": take one of them, or a guide.'
            )
        gibbs, plugin = [], []
        for place in places(rng_key, dependence, permutations):
            order = np.argsort(place, kind="stable")
            losses, rank = run(order), np.argsort(order)
            # The posterior before a later datum of a group has seen a part of it.
            counts = np.zeros(len(place))
            counts[order[np.unique(place[order], return_index=True)[1]]] = 1.0
            gibbs.append(np.where(counts, losses.expected[:, rank], 0.0))
            plugin.append(np.where(counts, losses.at_mean[:, rank], 0.0))
        by_datum = {"gibbs": np.mean(gibbs, axis=0), "plugin": np.mean(plugin, axis=0)}
        return judge(by_datum, loss, rule, grid, dependence)

    return Criterion("safe_bayes", "risk", plan, decide, stream=stream)


def judge(
    by_datum: Columns,
    loss: str,
    rule: str,
    grid: np.ndarray,
    dependence: Dependence | None = None,
) -> Decision:
    """The decision from the losses of each datum, ``(A, n)`` by name; of independent data by default."""
    by_datum = {name: doubles(values) for name, values in by_datum.items()}
    losses = by_datum[loss]
    total = losses.sum(axis=1)
    if not np.all(np.isfinite(total)):
        raise ValueError(
            f"the cumulative loss is not finite at alpha = {grid[~np.isfinite(total)]}: a datum is impossible, "
            "or overflows, under the posterior of others. Look at the prior and at extreme data."
        )
    best = int(np.argmin(total))
    # Data that are left out have the loss 0 under all alphas.
    se = se_of_sum(losses - losses[best], dependence or Dependence(losses.shape[1]))
    near = total <= total[best] + se
    choice = best if rule == "min" else int(np.max(np.flatnonzero(near)))
    columns = {
        "criterion": total,
        "criterion_se": se,
        **{
            name: values.sum(axis=1)
            for name, values in by_datum.items()
            if name != "loss"
        },
    }
    alpha = float(grid[choice])
    if rule == "one_se" and choice == len(grid) - 1 and alpha == 1.0:
        below = total[choice] - total[best]
        advice = "no need to temper for the sake of the risk: " + (
            "no smaller alpha of the grid has a smaller cumulative loss."
            if best == choice
            else f"the least cumulative loss is {below:.3g} nats below that of alpha = 1, less than its standard "
            f"error, {se[choice]:.3g}."
        )
    else:
        gain = total[-1] - total[choice]
        advice = f"alpha = {alpha:.4g} for a low risk: " + (
            "it is the largest tried: try larger ones, up to 1 at least."
            if choice == len(grid) - 1
            else f"on data to come its posteriors lost {gain:.4g} nats less than those of "
            f"alpha = {grid[-1]:.4g}, the largest tried."
        )
    if choice == 0 and len(grid) > 1:
        advice += " It is the least alpha of the grid: try smaller ones."
    return Decision(
        alpha, columns, {"safe_bayes_rule": rule, "safe_bayes_loss": loss}, advice
    )


def block_edges(blocks: int | Sequence[int] | None, num_data: int) -> np.ndarray:
    """Numbers of data at which the posterior is refitted, ``(B,)``.

    Raises:
        ValueError: If they do not increase from at least 1 to below ``num_data``.
    """
    if blocks is None:
        blocks = min(NUM_BLOCKS, num_data)
    if isinstance(blocks, int | np.integer):
        check_count(
            blocks, "blocks", 2, num_data, hint="There is a datum in each block."
        )
        return np.asarray([num_data * k // blocks for k in range(1, blocks)])
    edges = np.asarray(blocks)
    if edges.ndim != 1 or edges.size == 0 or edges.dtype.kind not in "iu":
        raise ValueError(
            f"blocks must be a number of blocks or sizes of the data before each, got {blocks!r}."
        )
    if edges[0] < 1 or np.any(np.diff(edges) <= 0) or edges[-1] >= num_data:
        raise ValueError(
            f"blocks must increase from at least 1 to below n = {num_data}, got {edges}."
        )
    return edges


def places(
    rng_key: Array, dependence: Dependence, permutations: int | None
) -> list[np.ndarray]:
    """The place of each datum in each order; data of one group have one place.

    Raises:
        ValueError: If a series is to be permuted.
    """
    is_series = dependence.block is not None
    if is_series and permutations:
        raise ValueError(
            f"permutations must be 0, or left out, for a series with a block, got {permutations}: its order "
            "is that of time."
        )
    groups = (
        np.arange(dependence.num_data)
        if dependence.labels is None
        else dependence.labels
    )
    if permutations == 0 or is_series:
        # Groups in the order of their first data.
        first = np.unique(groups, return_index=True)[1]
        return [np.argsort(np.argsort(first))[groups]]
    keys = jax.random.split(rng_key, 1 if permutations is None else permutations)
    return [
        np.asarray(jax.random.permutation(key, dependence.num_groups))[groups]
        for key in keys
    ]
