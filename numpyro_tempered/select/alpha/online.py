"""A grid of alphas on one stream, by an online rule."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_tempered.core import Array, at_index, doubles, map_batches
from numpyro_tempered.gaussian.families import family_of
from numpyro_tempered.handlers.likelihood import get_trace
from numpyro_tempered.handlers.numpyro_private import unpacker
from numpyro_tempered.handlers.rows import find_data
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.infer.online_posterior import StreamPosterior
from numpyro_tempered.online import drivers, stream
from numpyro_tempered.online.base import Losses, OnlineState
from numpyro_tempered.online.experts.grid import scale_gradients
from numpyro_tempered.select.alpha.base import Fits, Task
from numpyro_tempered.select.alpha.model_data import Method


class Streams(NamedTuple):
    """An online rule with each of A alphas on the rows of a task, under one ``vmap``.

    Attributes:
        rng_key: Key of the passes.
        task: The model with its data.
        factory: From tempered model to :class:`OnlineVI`.
        online: The rule of the untempered model.
        alphas: The grid, ``(A,)``.
    """

    rng_key: Array
    task: Task
    factory: Method
    online: OnlineVI
    alphas: np.ndarray

    def losses(self, order: np.ndarray) -> Losses:
        """Untempered losses of the rounds of one pass over the rows in this order, ``(A, T)``."""
        return jax.device_get(self._pass(order)[1])

    def fits(self, num_samples: int) -> Fits:
        """The posteriors at the end of the stream, with ``num_samples`` draws of the log-likelihood from each."""
        task = self.task
        ends = self._pass(np.arange(task.num_data))[0]
        unpack = unpacker(self.online.guide)

        @jax.jit
        def losses(flat: Array) -> Array:
            return map_batches(
                lambda theta: jnp.sum(task.losses(unpack(theta))), flat, 64
            )

        def log_lik(k: int) -> np.ndarray:
            q = at_index(ends.posterior, k)
            flat = family_of(q).sample(
                jax.random.fold_in(self.rng_key, k), q, (num_samples,)
            )
            return -doubles(losses(flat))[None]

        def fit_at(k: int) -> tuple[StreamPosterior, tuple, dict]:
            online = self.factory(temper(task.model.fn, alpha=float(self.alphas[k])))
            args, kwargs = _first_round(task.args, task.kwargs)
            state = online.init(self.rng_key, *args, **kwargs)
            state = state._replace(rule_state=at_index(ends, k))
            return online.posterior(state), task.args, task.kwargs

        return Fits(
            [], np.stack([log_lik(k) for k in range(len(self.alphas))]), None, fit_at
        )

    def _pass(self, order: np.ndarray) -> tuple[OnlineState, Losses]:
        """The states of the rule at the end of a pass, and its losses.

        Raises:
            ValueError: If rounds are rejected: alphas with other data cannot be compared. If a row of the
                arguments is not a datum of the model.
        """
        rows, online = self.task.data_rows, self.online
        num_rounds = len(order)
        places = order if rows.places is None else rows.places[order]

        def permute(leaf: Array) -> Array:
            return (
                leaf[places]
                if jnp.ndim(leaf) and jnp.shape(leaf)[0] == rows.size
                else leaf
            )

        args, kwargs = jax.tree.map(permute, (self.task.args, self.task.kwargs))
        arrays, _, expectation = online._split(args, kwargs)
        first = _first_round(args, kwargs)
        state = online.init(self.rng_key, *first[0], **first[1])
        each = find_data(
            get_trace(handlers.seed(self.task.model.fn, self.rng_key), *first),
            self.task.plate,
        ).size
        if each != 1 or drivers.check_rows([a for a in arrays if a.ndim]) != num_rounds:
            lengths = sorted({a.shape[0] for a in arrays if a.ndim})
            raise ValueError(
                f"a round is a row of all arrays, and must be one of the {num_rounds} data; here it is {each}, "
                f"and the leading axes are {lengths}. Pass other arguments by functools.partial."
            )
        by_round = tuple(
            a[:, None] if a.ndim else jnp.broadcast_to(a, (num_rounds,)) for a in arrays
        )

        def run(alpha: Array) -> tuple[OnlineState, Losses]:
            tempered = scale_gradients(expectation, alpha)

            def take_round(
                carry: OnlineState, row: tuple[Array, ...]
            ) -> tuple[OnlineState, Losses]:
                return stream.step(online.rule, tempered, carry, row, state.rng_key)

            return jax.lax.scan(take_round, state.rule_state, by_round)

        ends, losses = jax.jit(jax.vmap(run))(
            jnp.asarray(self.alphas, state.posterior.loc.dtype)
        )
        rejections = np.asarray(ends.rejected)
        if np.any(rejections):
            bad = {
                float(a): int(r)
                for a, r in zip(self.alphas, rejections, strict=True)
                if r
            }
            raise ValueError(
                f"rounds were rejected, as not finite, at {bad} (alpha: rounds), and losses of different data "
                "cannot be compared: look for NaN in the data, or take a smaller step size."
            )
        return ends, losses


def _first_round(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of the first round: the first row of each array, with its axis."""
    return jax.tree.map(
        lambda leaf: leaf[:1] if jnp.ndim(leaf) else leaf, (args, kwargs)
    )
