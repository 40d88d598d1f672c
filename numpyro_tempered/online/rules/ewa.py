"""Exponentially weighted averages in closed form and on a finite grid of parameters (CA19, Theorem 1)."""

import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, ArrayLike, check_numbers, one_for_equal
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import (
    Gain,
    Gaussian,
    family_of,
    is_gaussian,
    require,
)
from numpyro_tempered.online import base as rules
from numpyro_tempered.online.experts.aggregate import aggregate
from numpyro_tempered.online.experts.grid import grid


@one_for_equal
def ewa(step_size: rules.StepSize) -> rules.Rule:
    r"""Exponentially weighted averages, :math:`p_{t+1} \propto p_t \exp(-\eta\, l_t)`, without approximation.

    For losses that are quadratic in the parameters, on a full covariance, where it is the Kalman (ridge)
    recursion P' = P + η ∇²l, m' = m - η P'^-1 ∇l(m), a rank-one update for each datum. With
    ``nt.expectations.squared()`` and η = 1/2 it is Bayes' rule for unit Gaussian noise. For a finite grid of
    parameters see :func:`ewa_grid`.

    Args:
        step_size: η, a float, a callable of the count t = 1, 2, ... or of ``(t, q)``.

    Returns:
        An online :class:`Rule` for :class:`.FullRank` priors.

    Raises:
        TypeError: At ``init``, if the prior is of another family. At the first round, if the loss is not known to
            be quadratic.
        ValueError: If the step size is not positive.

    References:
        CA19, Theorem 1.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.ewa(step_size=0.5)
        >>> state = rule.init(nt.gaussian.families.FullRank(jnp.zeros(1), jnp.eye(1)))
        >>> x, y = jnp.ones((3, 1)), jnp.array([1.0, 2.0, 3.0])
        >>> state, losses = nt.online.run(rule, nt.expectations.squared(), state, x, y)
        >>> print(f"{state.posterior.loc[0]:.3f} {state.posterior.scale_tril[0, 0]:.3f}")
        1.500 0.500
    """
    rate = rules.as_schedule(step_size)

    def init(prior: Gaussian) -> rules.OnlineState:
        if not is_gaussian(prior) or family_of(prior).curvature_form != "matrix":
            raise TypeError(
                f"ewa is exact on FullRank, got {type(prior).__name__}: a mean-field posterior would leave "
                "out the correlations. Give it FullRank(loc, scale_tril), or take ngvi."
            )
        prior = rules.check_prior(prior)
        return rules.start(prior, prior, memory=family_of(prior).init(prior))

    def update(evaluation: Evaluation, state: rules.OnlineState) -> rules.OnlineState:
        q = state.posterior
        gain, grads = (
            Gain(rate(state.count + 1, q)),
            (evaluation.grad_loc, evaluation.grad_var),
        )
        # A natural-gradient step on a quadratic loss is Bayes' rule.
        posterior, memory = family_of(q).natural_step(
            state.memory, q, state.prior, *grads, gain
        )
        return rules.advance(state, posterior, memory)

    return rules.Rule(
        init,
        update,
        curvature="hessian",
        name="ewa",
        quadratic=True,
        holds_evidence=True,
    )


def ewa_grid(points: ArrayLike, step_size: rules.StepSize | None = None) -> rules.Rule:
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
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1)))
        >>> x, y = jnp.ones((3, 1)), jnp.ones(3)
        >>> state, losses = nt.online.run(rule, nt.expectations.hinge(), state, x, y)
        >>> [f"{w:.3f}" for w in nt.online.weights(state)]
        ['0.002', '0.047', '0.950']
    """
    thetas = np.asarray(check_numbers(points, "points"))
    if thetas.ndim != 2 or thetas.size == 0:
        raise ValueError(f"points must have shape (K, d), got shape {thetas.shape}.")

    def constant(index: int | Array) -> rules.Rule:
        def init(prior: Gaussian) -> rules.OnlineState:
            if thetas.shape[1:] != prior.loc.shape:
                raise ValueError(
                    f"points have {thetas.shape[1]} coordinates, the prior {prior.loc.shape[0]}."
                )
            require(prior, "from_root", "ewa_grid")
            theta = jnp.asarray(thetas, prior.loc.dtype)[index]
            return rules.start(prior, family_of(prior).point(prior._replace(loc=theta)))

        def update(
            evaluation: Evaluation, state: rules.OnlineState
        ) -> rules.OnlineState:
            return rules.advance(state, state.posterior)

        return rules.Rule(
            init, update, curvature="none", name="point", calibrated=False
        )

    rule = aggregate(grid(constant, index=range(len(thetas))), learning_rate=step_size)
    return rule._replace(name="ewa_grid")
