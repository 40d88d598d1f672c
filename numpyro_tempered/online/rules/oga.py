"""Online gradient descent on a point and on a Gaussian (CA19, section 5)."""

from numpyro_tempered.core import one_for_equal
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import Gaussian, family_of, require
from numpyro_tempered.online import base as rules


@one_for_equal
def oga(
    step_size: rules.StepSize, box: rules.Box | rules.Ball | None = None
) -> rules.Rule:
    r"""Online gradient algorithm on a point: :math:`\theta \leftarrow \Pi(\theta - \eta\nabla l_t)`.

    Starts at the prior mean. The posterior is the point itself: its scale is 0, and the two
    losses agree.

    Args:
        step_size: η, a float, a callable of the count t = 1, 2, ... or of ``(t, q)``.
        box: Optional bounds, a :class:`Box` or a :class:`Ball`; only ``box.loc`` matters.

    Returns:
        An online :class:`Rule`.

    Raises:
        ValueError: If a step size or bound is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.oga(step_size=0.1)
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> x, y = jnp.array([[1.0, 2.0]]), jnp.array([1.0])
        >>> state, losses = nt.online.run(rule, nt.expectations.hinge(), state, x, y)
        >>> state.posterior.loc
        Array([0.1, 0.2], dtype=float32)
    """
    rate = rules.as_schedule(step_size)

    def init(prior: Gaussian) -> rules.OnlineState:
        require(prior, "from_root", "oga")
        return rules.start(prior, family_of(prior).point(prior))

    def update(evaluation: Evaluation, state: rules.OnlineState) -> rules.OnlineState:
        q = state.posterior
        return rules.advance(
            state,
            q._replace(loc=q.loc - rate(state.count + 1, q) * evaluation.grad_loc),
        )

    return rules.in_box(
        rules.Rule(
            init, update, curvature="none", name="oga", point=True, calibrated=False
        ),
        box,
    )


@one_for_equal
def oga_el(
    step_size: rules.StepSize, box: rules.Box | rules.Ball | None = None
) -> rules.Rule:
    r"""Online gradient on the expected loss, :math:`\mu \leftarrow \Pi(\mu - \eta\nabla\bar L_t)`.

    The parameters are μ = (m, σ) with σ >= 0; the gradient in σ is 2σ times that in σ², so σ = 0 is
    absorbing. On a full covariance they are the mean and the Cholesky factor, its diagonal held at 0 or above.
    Starts at the prior.

    Args:
        step_size: η, a float, a callable of the count t = 1, 2, ... or of ``(t, q)``.
        box: Optional bounds on means and scales: a :class:`Box` for a mean-field family, a :class:`Ball` for
            every one.

    Returns:
        An online :class:`Rule`.

    Raises:
        ValueError: If a step size or bound is not positive.

    Example:
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.oga_el(step_size=0.1, box=nt.online.Box(loc=20.0, scale=1.0))
    """
    rate = rules.as_schedule(step_size)

    def init(prior: Gaussian) -> rules.OnlineState:
        require(prior, "descend", "oga_el")
        return rules.start(prior, prior)

    def update(evaluation: Evaluation, state: rules.OnlineState) -> rules.OnlineState:
        q = state.posterior
        grads = require(q, "gradient", "oga_el")(
            q, evaluation.grad_loc, evaluation.grad_var
        )
        return rules.advance(
            state, require(q, "descend", "oga_el")(q, grads, rate(state.count + 1, q))
        )

    return rules.in_box(
        rules.Rule(init, update, curvature="hessian", name="oga_el", calibrated=False),
        box,
    )
