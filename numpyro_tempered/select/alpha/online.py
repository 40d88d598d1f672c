"""A grid of alphas on one stream, by an online rule."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.families import family_of
from numpyro_tempered.handlers.likelihood import get_trace
from numpyro_tempered.handlers.numpyro_private import unpacker
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.infer.online_state import OnlineVIState
from numpyro_tempered.online import stream
from numpyro_tempered.online.base import Losses, OnlineState
from numpyro_tempered.online.experts.grid import scale_gradients
from numpyro_tempered.select.alpha.base import Fits, Task
from numpyro_tempered.select.alpha.data_weights import find_data
from numpyro_tempered.select.grid.model_data import Method


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
        return jax.device_get(self._pass(order)[0])

    def fits(self, num_samples: int) -> Fits:
        """The posteriors at the end of the stream, with ``num_samples`` draws of the log-likelihood from each."""
        task = self.task
        _, ends, state, first = self._pass(np.arange(task.num_data))

        def fit_at(k: int) -> tuple[OnlineVI, OnlineVIState]:
            online = self.factory(temper(task.original, alpha=float(self.alphas[k])))
            online.init(self.rng_key, *first[0], **first[1])
            return online, state._replace(rule_state=jax.tree.map(lambda leaf: leaf[k], ends))

        unpack = unpacker(fit_at(0)[0].guide)

        @jax.jit
        def losses(flat: Array) -> Array:
            return map_batches(lambda theta: jnp.sum(task.losses(unpack(theta))), flat, 64)

        def log_lik(k: int) -> np.ndarray:
            q = fit_at(k)[1].posterior
            flat = family_of(q).sample(jax.random.fold_in(self.rng_key, k), q, (num_samples,))
            return -np.asarray(losses(flat), np.float64)[None]

        return Fits([], np.stack([log_lik(k) for k in range(len(self.alphas))]), None, fit_at)

    def _pass(self, order: np.ndarray) -> tuple[Losses, OnlineState, OnlineVIState, tuple[tuple, dict]]:
        """Losses, rule states at the end, state at the start, and the model's arguments of the first round.

        Raises:
            ValueError: If rounds are rejected: alphas with other data cannot be compared. If a row of the
                arguments is not a datum of the model.
        """
        num_rounds, online = len(order), self.online

        def permute(leaf: Array) -> Array:
            return leaf[order] if jnp.ndim(leaf) and jnp.shape(leaf)[0] == num_rounds else leaf

        args, kwargs = jax.tree.map(permute, (self.task.args, self.task.kwargs))
        arrays, expectation = online._split(args, kwargs)
        first = jax.tree.map(lambda leaf: leaf[:1] if jnp.ndim(leaf) else leaf, (args, kwargs))
        state = online.init(self.rng_key, *first[0], **first[1])
        each = find_data(get_trace(handlers.seed(self.task.original, self.rng_key), *first), self.task.plate)[0]
        if each != 1 or stream.check_rows([a for a in arrays if a.ndim]) != num_rounds:
            lengths = sorted({a.shape[0] for a in arrays if a.ndim})
            raise ValueError(
                f"a round is a row of every array argument, and must be one of the {num_rounds} data; here it is "
                f"{each}, and the arrays have leading axes {lengths}. Give "
                "the data one row each, and other arguments by functools.partial."
            )
        rows = [a[:, None] if a.ndim else jnp.broadcast_to(a, (num_rounds,)) for a in arrays]

        def run(alpha: Array) -> tuple[OnlineState, Losses]:
            at = scale_gradients(expectation, alpha)

            def round_of(carry: OnlineState, data: tuple[Array, ...]) -> tuple[OnlineState, Losses]:
                return stream.step(online.rule, at, carry, data, state.rng_key)

            return jax.lax.scan(round_of, state.rule_state, tuple(rows))

        ends, losses = jax.jit(jax.vmap(run))(jnp.asarray(self.alphas, state.posterior.loc.dtype))
        rejections = np.asarray(ends.rejected)
        if np.any(rejections):
            bad = {float(a): int(r) for a, r in zip(self.alphas, rejections, strict=True) if r}
            raise ValueError(
                f"rounds were rejected, as not finite, at {bad} (alpha: rounds): the losses of alphas that have "
                "seen other data cannot be compared. Look for NaN in the data, or take a smaller step size."
            )
        return losses, ends, state, first
