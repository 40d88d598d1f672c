"""IVON as a gradient transformation of optax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from numpyro_tempered.core import (
    Array,
    PyTree,
    check_count,
    check_number,
    check_numbers,
    describe,
    key_first,
)
from numpyro_tempered.gaussian import ivon
from numpyro_tempered.gaussian.ivon import IvonState, Noise, Schedule

if TYPE_CHECKING:
    from optax import GradientTransformationExtraArgs


def scale_by_ivon(
    num_data: float,
    *,
    alpha: float = 1.0,
    prior_precision: PyTree | Callable[[str], float] = 1.0,
    prior_mean: PyTree | Callable[[str], float] = 0.0,
    init_precision: PyTree | None = None,
    b1: float = 0.9,
    b2: Schedule = 0.99999,
    clip_radius: float = math.inf,
    clip_deviations: float = math.inf,
    clip_change: float = math.inf,
) -> GradientTransformationExtraArgs:
    r"""IVON (Shen24) as a gradient transformation of optax, for a loss that is a mean over data.

    The gradients are taken at draws of the weights by :func:`sample_ivon`, and ``update`` is told of the draws by
    ``weights=``; both have a leading axis where there are several. The direction that it returns is to be scaled
    by minus the step size ρ, a share of the full natural-gradient step, or a schedule of it. The published
    learning rate is ρ over (h₀ + δ), which is ``init_precision`` over alpha times ``num_data``.

    Args:
        num_data: n, the number of data that the loss is a mean over or estimates the mean of.
        alpha: Power on the likelihood, at least 0: the mean loss times alpha n is what the posterior is of.
        prior_precision: One over the prior's variances: a number, a prefix of the weights, such as a number for
            each layer, or a callable from a leaf's path, ``"['dense']['kernel']"``. At least 0; 0 is flat.
        prior_mean: The prior's means, likewise.
        init_precision: One over the variances at the start, likewise; by default alpha n plus that of the prior,
            which is the published start with h₀ = 1.
        b1: :math:`\beta_1`, of the average of gradients.
        b2: :math:`\beta_2`, of the average of curvatures; a number or a callable of the count of steps. The
            variances are those of the start for the first 1/(1 - b2) steps.
        clip_radius: The largest entry of the direction.
        clip_deviations: The same in standard deviations of the posterior: 0.3 is the default of :class:`IVON`.
        clip_change: The largest change of a precision in a step, as a share of it: 0.1 is that of :class:`IVON`.
            For short windows, whose noisy steps would else push precisions up.

    Returns:
        An ``optax.GradientTransformationExtraArgs``, whose state is an :class:`IvonState`. It holds momentum and
        precisions; the means are the parameters.

    Raises:
        ValueError: If an option is out of range; at ``update``, without params or weights.

    References:
        Shen24.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import numpyro_tempered as nt
        >>> x, y = jnp.array([1.0, -1.0, 2.0]), jnp.array([0.9, -1.1, 2.2])
        >>> loss = lambda w: jnp.mean(0.5 * (y - w * x) ** 2)
        >>> ivon = nt.optim.scale_by_ivon(num_data=3, b2=lambda count: 1 - 1 / (100 + count / 4))
        >>> optimiser = optax.chain(ivon, optax.scale_by_learning_rate(0.1))
        >>> def step(carry, key):
        ...     mean, state = carry
        ...     weights = nt.optim.sample_ivon(key, mean, state)
        ...     updates, state = optimiser.update(jax.grad(loss)(weights), state, mean, weights=weights)
        ...     return (optax.apply_updates(mean, updates), state), None
        >>> start = jnp.zeros(())
        >>> keys = jax.random.split(jax.random.key(0), 2000)
        >>> (mean, state), _ = jax.lax.scan(step, (start, optimiser.init(start)), keys)
        >>> print(f"{state[0].precision:.0f}")  # of the prior 1, of the data 6
        7
    """
    # Not a dependency of the package: who chains transformations has it.
    from optax import GradientTransformationExtraArgs

    weight = alpha * check_number(num_data, "num_data", "(0, inf)")
    check_number(weight, "alpha", "[0, inf)")
    ivon.check_rates(
        b1,
        b2,
        clip_radius=clip_radius,
        clip_deviations=clip_deviations,
        clip_change=clip_change,
    )
    for name, prior in (
        ("prior_precision", prior_precision),
        ("init_precision", init_precision),
    ):
        if not callable(prior):
            jax.tree.map(
                lambda value, name=name: check_numbers(value, name, "[0, inf)"), prior
            )

    def init(params: PyTree) -> IvonState:
        if init_precision is not None:
            return ivon.start(params, _by_path(init_precision, params))
        prior = ivon.spread(_by_path(prior_precision, params), params)
        return ivon.start(params, jax.tree.map(lambda s: s + weight, prior))

    def update(
        updates: PyTree,
        state: IvonState,
        params: PyTree | None = None,
        *,
        weights: PyTree | None = None,
        **others: object,
    ) -> tuple[PyTree, IvonState]:
        if params is None or weights is None:
            raise ValueError(
                "the update of IVON needs the means and the draw at which the gradients were taken: "
                "update(grads, state, params, weights=nt.optim.sample_ivon(rng_key, params, state))."
            )
        gradients = jax.tree.map(lambda g: weight * g, updates)
        return ivon.step(
            ivon.estimate(weights, gradients, params),
            params,
            state,
            prior_mean=_by_path(prior_mean, params),
            prior_precision=_by_path(prior_precision, params),
            b1=b1,
            b2=ivon.at(b2, state.num_steps),
            clip_radius=clip_radius,
            clip_deviations=clip_deviations,
            clip_change=clip_change,
        )

    return GradientTransformationExtraArgs(init, update)


@key_first
def sample_ivon(
    rng_key: Array,
    params: PyTree,
    state: PyTree,
    num_samples: int | None = None,
    *,
    noise: Noise = jax.random.normal,
) -> PyTree:
    """Draws of the weights from the posterior of IVON, N(params, 1/precision).

    Args:
        rng_key: Key of the draws.
        params: The means, which are what the optimiser updates.
        state: The state of :func:`scale_by_ivon`, or one of ``optax.chain`` that holds it.
        num_samples: Number of draws, as a leading axis of each leaf; None for one draw without.
        noise: From key, shape and type to standard normal noise. In training, :func:`quick_noise` takes a
            twentieth of the time, and the whole step hardly more than that of Adam.

    Returns:
        The weights, as ``params``.

    Raises:
        ValueError: If the state holds none, or several, of IVON.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> params = {"kernel": jnp.zeros((3, 2))}
        >>> state = nt.optim.scale_by_ivon(num_data=100).init(params)
        >>> nt.optim.sample_ivon(jax.random.key(0), params, state, 5)["kernel"].shape
        (5, 3, 2)
    """
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, IvonState))
    states = [leaf for leaf in leaves if isinstance(leaf, IvonState)]
    if len(states) != 1:
        raise ValueError(
            f"state must hold the state of one scale_by_ivon, got {len(states)} of them in {describe(state)}."
        )
    precision = states[0].precision
    if num_samples is None:
        return ivon.draw(rng_key, params, precision, noise)
    keys = jax.random.split(rng_key, check_count(num_samples, "num_samples", 1))
    return jax.vmap(lambda key: ivon.draw(key, params, precision, noise))(keys)


def _by_path(prior: PyTree | Callable[[str], float], params: PyTree) -> PyTree:
    """What a callable says of each leaf's path; anything else is a prefix already."""
    if not callable(prior):
        return prior
    return jax.tree_util.tree_map_with_path(
        lambda path, _: prior(jax.tree_util.keystr(path)), params
    )
