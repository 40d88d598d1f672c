"""Draws of a predictor with many outputs, rather than of the parameters."""

from collections.abc import Callable
from typing import Any

import jax

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.expectations.base import Evaluation, Expectation, PredictorLoss
from numpyro_tempered.gaussian.expectations.outputs import bound_outputs, draws, linear_outputs, moments_of


def predictor_monte_carlo(
    loss: Callable[[Array, Array], Array] | None = None,
    *,
    num_outputs: int,
    predictor: str | None = None,
    num_draws: int = 64,
) -> Expectation:
    r"""Expected loss of K predictors by draws of them, where a product rule has too many nodes.

    The predictors of a datum are u ~ N(ū, C) with K outputs; their draws cost no pass over the parameters
    and vary far less than draws of θ. By the identities of Bonnet and Price the gradient in ū is the average
    of ∇l(u), that in C of ∇²l(u)/2, both unbiased at any number of draws; they come back to θ by J.

    Args:
        loss: ``(u, y) -> loss`` of one datum with u of shape ``(K,)``, twice differentiable by JAX.
        num_outputs: K.
        predictor: Name of a model's deterministic site of shape ``(n, K)``, in place of a loss; as in
            :func:`gauss_hermite`.
        num_draws: Draws of the predictors a datum.

    Returns:
        An :class:`Expectation` that needs an ``rng_key``, on the data of ``gauss_hermite(num_outputs=K)``.

    Raises:
        ValueError: If not exactly one of ``loss`` and ``predictor`` is given, or a number is less than 1. When
            traced: if the loss is piecewise linear and Hessian curvature asked for.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> loss = nt.expectations.predictor_monte_carlo(
        ...     lambda u, y: jax.nn.logsumexp(u) - y * u[0], num_outputs=6
        ... )
        >>> q = nt.families.MeanField(jnp.zeros(12), jnp.zeros(12))
        >>> value = jax.jit(loss.evaluate)(q, jnp.ones(2), 1.0, rng_key=jax.random.key(0))
        >>> print(f"{value.expected:.3f}")
        1.792
    """
    if (loss is None) == (predictor is None):
        raise ValueError("give predictor_monte_carlo either a loss (u, y) -> value or a predictor's name.")
    if num_outputs < 1:
        raise ValueError(f"num_outputs must be at least 1, got {num_outputs}.")
    nodes = draws(num_draws, num_outputs, "predictor_monte_carlo")
    if loss is None:

        def unbound(*args: Any, **kwargs: Any) -> Evaluation:
            raise TypeError(
                f"predictor_monte_carlo(predictor={predictor!r}) needs a model: use it in OnlineVI or "
                "ExpectedNLL, or give a loss function for a bare stream."
            )

        return Expectation(
            unbound,
            bind=lambda model: bound_outputs(model, nodes),
            predictor=predictor,
            needs_key=True,
            num_outputs=num_outputs,
        )
    batch = jax.vmap(loss)
    return linear_outputs(PredictorLoss(moments_of(nodes, batch), batch, num_outputs), needs_key=True)
