"""Exponentially weighted averages in closed form (CA19, Theorem 1)."""

from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import Gain, Gaussian, family_of, is_gaussian
from numpyro_tempered.online.base import OnlineState, Rule, StepSize, advance, as_schedule, check_prior, start


def ewa(step_size: StepSize) -> Rule:
    r"""Exponentially weighted averages, :math:`p_{t+1} \propto p_t \exp(-\eta\, l_t)`, without approximation.

    For losses that are quadratic in the parameters, on a full covariance, where it is the Kalman (ridge)
    recursion P' = P + η ∇²l, m' = m - η P'^-1 ∇l(m), a rank-one update for each datum. With
    ``nt.expectations.squared()`` and η = 1/2 it is Bayes' rule for unit Gaussian noise. For a finite grid of
    parameters see :func:`ewa_grid`.

    Args:
        step_size: η, a float, a callable of the count t = 1, 2, ... or of ``(t, q)``.

    Returns:
        An online :class:`Rule` for :class:`~numpyro_tempered.families.FullRank` priors.

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
        >>> state = rule.init(nt.families.FullRank(jnp.zeros(1), jnp.eye(1)))
        >>> x, y = jnp.ones((3, 1)), jnp.array([1.0, 2.0, 3.0])
        >>> state, losses = nt.online.run(rule, nt.expectations.squared(), state, x, y)
        >>> print(f"{state.posterior.loc[0]:.3f} {state.posterior.scale_tril[0, 0]:.3f}")
        1.500 0.500
    """
    rate = as_schedule(step_size)

    def init(prior: Gaussian) -> OnlineState:
        if not is_gaussian(prior) or family_of(prior).curvature_form != "matrix":
            raise TypeError(
                f"ewa is exact on FullRank, got {type(prior).__name__}: a mean-field posterior would leave "
                "out the correlations. Give it FullRank(loc, scale_tril), or take ngvi."
            )
        prior = check_prior(prior)
        return start(prior, prior, memory=family_of(prior).start(prior))

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        q = state.posterior
        gain = Gain(rate(state.count + 1, q))
        # A natural-gradient step on a quadratic loss is Bayes' rule.
        posterior, memory = family_of(q).natural_step(
            state.memory, q, state.prior, evaluation.grad_loc, evaluation.grad_var, gain
        )
        return advance(state, posterior, memory)

    return Rule(init, update, curvature="hessian", name="ewa", quadratic=True, holds_evidence=True)
