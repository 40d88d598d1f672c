"""Exponentially weighted averages on a finite grid of parameters (CA19, Theorem 1)."""

import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core.checks import check_numbers
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import Gaussian, family_of, require
from numpyro_tempered.online.base import OnlineState, Rule, StepSize, advance, start
from numpyro_tempered.online.experts.aggregate import aggregate
from numpyro_tempered.online.experts.grid import grid


def ewa_grid(points: ArrayLike, step_size: StepSize | None = None) -> Rule:
    r"""Exponentially weighted averages, :math:`p_{t+1} \propto p_t \exp(-\eta\, l_t)`, on a finite grid.

    p_1 is uniform on K points θ_k, which stay where they are: exact for every loss. The decision of a round is
    Σ_k p_t(θ_k) θ_k. For convex losses in an interval of length B its regret after T rounds, against the best
    point, is at most :math:`\eta B^2 T/8 + \log(K)/\eta`, least at η = √(8 log K/T)/B.

    Args:
        points: The grid, shape ``(K, d)``.
        step_size: η, a float or a callable of the count t = 1, 2, ... that does not increase; None for
            AdaHedge's, :func:`aggregate`.

    Returns:
        An online :class:`Rule`, an :func:`aggregate` of constant experts: :func:`weights` are p_t. Of the prior
        it takes the family alone, for the Gaussian with the moments of p_t.

    Raises:
        ValueError: If the grid is not finite or not of two axes; at ``init``, if the prior has another dimension.

    References:
        CA19, Theorem 1.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.ewa_grid([[-1.0], [0.0], [1.0]], step_size=1.0)
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> x, y = jnp.ones((3, 1)), jnp.ones(3)
        >>> state, losses = nt.online.run(rule, nt.expectations.hinge(), state, x, y)
        >>> [f"{w:.3f}" for w in nt.online.weights(state)]
        ['0.002', '0.047', '0.950']
    """
    thetas = np.asarray(check_numbers(points, "points"))
    if thetas.ndim != 2 or thetas.size == 0:
        raise ValueError(f"points must have shape (K, d), got shape {thetas.shape}.")

    def constant(index: int | Array) -> Rule:
        def init(prior: Gaussian) -> OnlineState:
            if thetas.shape[1:] != prior.loc.shape:
                raise ValueError(f"points have {thetas.shape[1]} coordinates, the prior {prior.loc.shape[0]}.")
            require(prior, "from_root", "ewa_grid")
            theta = jnp.asarray(thetas, prior.loc.dtype)[index]
            return start(prior, family_of(prior).point(prior._replace(loc=theta)), memory=())

        def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
            return advance(state, state.posterior)

        return Rule(init, update, curvature="none", name="point", point=True)

    rule = aggregate(grid(constant, index=range(len(thetas))), learning_rate=step_size)
    return rule._replace(name="ewa_grid")
