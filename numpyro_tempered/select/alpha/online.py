"""A grid of alphas on one stream, by an online rule."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_tempered.core.typing import Array
from numpyro_tempered.handlers.likelihood import get_trace
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.infer.online_state import OnlineVIState
from numpyro_tempered.online import stream
from numpyro_tempered.online.base import Losses
from numpyro_tempered.online.experts.sweep import tempered
from numpyro_tempered.select.alpha.data_weights import find_data


class Streams(NamedTuple):
    """One pass of an online rule for each of A alphas.

    Attributes:
        at_mean: Untempered loss of each round at the posterior mean before it, ``(A, T)``.
        expected: Its posterior expectation, ``(A, T)``.
        fit_at: From the number of an alpha to the run's :class:`OnlineVI` and its state at the end.
    """

    at_mean: np.ndarray
    expected: np.ndarray
    fit_at: Callable[[int], tuple[OnlineVI, OnlineVIState]]


def run_all(
    rng_key: Array,
    model: Any,
    factory: Callable[[Any], OnlineVI],
    online: OnlineVI,
    alphas: np.ndarray,
    order: np.ndarray,
    args: tuple,
    kwargs: dict,
    plate: str | None,
) -> Streams:
    """Run the rule with every alpha under one ``vmap``, the rows in this order.

    Raises:
        ValueError: If rounds are rejected: alphas with other data are not to be compared. If a row of the
            arguments is not a datum of the model.
    """
    num_rounds = len(order)

    def permute(leaf: Any) -> Any:
        return leaf[order] if jnp.ndim(leaf) and jnp.shape(leaf)[0] == num_rounds else leaf

    args, kwargs = jax.tree.map(permute, (args, kwargs))
    arrays, expectation = online._split(args, kwargs)
    first = jax.tree.map(lambda leaf: leaf[:1] if jnp.ndim(leaf) else leaf, (args, kwargs))
    state = online.init(rng_key, *first[0], **first[1])
    each = find_data(get_trace(handlers.seed(model, rng_key), *first), plate)[0]
    if each != 1 or stream.check_rows([a for a in arrays if a.ndim]) != num_rounds:
        raise ValueError(
            f"a round is a row of every array argument, and has to be one of the {num_rounds} data; here it is "
            f"{each}, and the arrays have leading axes {sorted({a.shape[0] for a in arrays if a.ndim})}. Give "
            "the data one row each, and what is no data by functools.partial."
        )
    rows = [a[:, None] if a.ndim else jnp.broadcast_to(a, (num_rounds,)) for a in arrays]

    def one(alpha: Array) -> tuple[Any, Losses]:
        at = tempered(expectation, alpha)

        def round_of(carry: Any, data: Any) -> Any:
            return stream.step(online.rule, at, carry, data, state.rng_key)

        return jax.lax.scan(round_of, state.rule_state, tuple(rows))

    ends, losses = jax.jit(jax.vmap(one))(jnp.asarray(alphas, state.posterior.loc.dtype))
    rejected = np.asarray(ends.rejected)
    if np.any(rejected):
        bad = {float(a): int(r) for a, r in zip(alphas, rejected, strict=True) if r}
        raise ValueError(
            f"rounds were rejected, as not finite, at {bad} (alpha: rounds): the losses of alphas that have seen "
            "other data cannot be compared. Look for NaN in the data, or take a smaller step size."
        )

    def fit_at(k: int) -> tuple[OnlineVI, OnlineVIState]:
        own = factory(temper(model, alpha=float(alphas[k])))
        own.init(rng_key, *first[0], **first[1])
        return own, state._replace(rule_state=jax.tree.map(lambda leaf: leaf[k], ends))

    return Streams(np.asarray(losses.at_mean), np.asarray(losses.expected), fit_at)
