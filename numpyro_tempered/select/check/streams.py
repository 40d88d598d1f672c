"""Online posteriors of many simulated streams under one vmap, and the ranks of the truth among their draws."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, map_batches, run_program
from numpyro_tempered.gaussian.families import family_of
from numpyro_tempered.handlers.numpyro_private import unpack_and_constrain
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.online import drivers, stream
from numpyro_tempered.online.base import OnlineState
from numpyro_tempered.select.alpha.model_data import Method
from numpyro_tempered.select.check.posteriors import Counts, Design, Values, count
from numpyro_tempered.select.check.simulate import BATCH, Simulations, with_data


def run_streams(
    rng_key: Array, design: Design, factory: Method, simulations: Simulations
) -> tuple[Counts, np.ndarray]:
    """One pass of an online rule over each data set, row by row, and the ranks of the truths.

    Args:
        rng_key: Key of the passes and draws.
        design: What all share.
        factory: From tempered model to :class:`OnlineVI`.
        simulations: The data sets.

    Returns:
        The counts, and of which streams no round was rejected, ``(K,)``.

    Raises:
        ValueError: If the rule ends in a point, or a row of the arguments is not one of the data.
    """
    data = design.data

    def streamed(values: Values, *args: object, **kwargs: object) -> object:
        return with_data(data.model, values)(*args, **kwargs)

    online = factory(temper(streamed, design.alpha))
    if online.rule.point:
        raise ValueError(
            f"{online.rule.name} ends in a point, whose draws have no ranks: take another rule."
        )
    # The values of the sites are the first leaves of the arguments, in the order of their names.
    names = sorted(simulations.data)
    args = ({name: simulations.data[name][0] for name in names}, *data.args)
    arrays, _, expectation = online._split(args, data.kwargs)
    num_rounds = drivers.check_rows([array for array in arrays if array.ndim])
    first = jax.tree.map(
        lambda leaf: leaf[:1] if jnp.ndim(leaf) else leaf, (args, data.kwargs)
    )
    start = online.init(rng_key, *first[0], **first[1])

    def one(part: tuple[Array, Simulations]) -> tuple[Counts, Array]:
        key, (truth, values, _) = part
        run_key, draw_key = jax.random.split(key)
        leaves = (*(values[name] for name in names), *arrays[len(names) :])
        rows = tuple(
            a[:, None] if a.ndim else jnp.broadcast_to(a, (num_rounds,)) for a in leaves
        )

        def take_round(
            state: OnlineState, row: tuple[Array, ...]
        ) -> tuple[OnlineState, None]:
            return stream.step(online.rule, expectation, state, row, run_key)[0], None

        end, _ = jax.lax.scan(take_round, start.rule_state, rows)
        flat = family_of(end.posterior).sample(
            draw_key, end.posterior, (design.num_draws,)
        )
        samples = unpack_and_constrain(
            online.guide, flat, online.guide.to_params(end.posterior)
        )
        latents = {name: samples[name] for name in data.latents}
        draws = map_batches(
            lambda draw: design.quantities(draw, values), latents, BATCH
        )
        return count(draws, design.quantities(truth, values)), end.rejected

    parts = jax.random.split(rng_key, len(simulations.log_lik)), simulations
    counts, rejected = jax.device_get(
        run_program(lambda parts: map_batches(one, parts, BATCH), parts)
    )
    return counts, rejected == 0
