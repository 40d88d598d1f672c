"""Softmax cross-entropy of K linear predictors, for multinomial logistic regression."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, ArrayLike, check_count
from numpyro_tempered.gaussian.expectations.base import (
    Expectation,
    Moments,
    Options,
    check_outcomes,
    linear,
    root,
)
from numpyro_tempered.gaussian.expectations.outputs import draws, product_rule


def softmax(
    num_classes: int, *, num_nodes: int = 20, num_draws: int | None = None
) -> Expectation:
    r"""Expected cross-entropy :math:`E_q[\log\sum_k e^{u_k} - u_y]` of K classes, u_k = x·θ_k.

    The loss depends only on the K - 1 differences u_k - u_K, so the quadrature runs over these: a product rule
    of ``num_nodes`` Gauss-Hermite nodes in each, no more than 10,000 in all (K = 3: 100 nodes; K = 4: 21;
    K = 5: 10). Beyond, ``num_draws`` takes draws of the predictor instead, far fewer dimensions than draws of
    θ have. Curvature is Jᵀ E[diag(p) - p pᵀ] J, positive semidefinite, or Jᵀ E[(p - e_y)(p - e_y)ᵀ] J where the
    rule asks for Fisher's.

    Args:
        num_classes: K, at least 2.
        num_nodes: Nodes in each of the K - 1 dimensions.
        num_draws: Draws of the predictor of each datum, in place of nodes; the expectation then needs an
            ``rng_key``.

    Returns:
        An :class:`Expectation` on data ``x`` of shape ``(d,)`` or ``(n, d)`` and labels ``y`` in
        {0, ..., K-1}, scalar or ``(n,)``, with θ of shape ``(K d,)``: the d coefficients of class 0, then those
        of class 1, and so on. It raises ValueError on other labels; where labels are traced and cannot be read,
        another label makes the loss NaN and the round rejected.

    Raises:
        ValueError: If ``num_classes`` < 2, or there are too many nodes or too few draws.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> q = nt.gaussian.families.MeanField(jnp.zeros(6), jnp.ones(6))  # 3 classes, 2 features
        >>> value = jax.jit(nt.expectations.softmax(3).evaluate)(q, jnp.array([0.6, 0.8]), 2)
        >>> print(f"{value.at_mean:.3f} {value.expected:.3f}")
        1.099 1.390
    """
    check_count(num_classes, "num_classes", 2)
    if num_draws is None:
        nodes = product_rule(num_nodes, num_classes - 1, "give num_draws")
    else:
        nodes = draws(num_draws, num_classes - 1, "softmax(num_draws=...)")

    def one_hot(y: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
        label = y[:, None] == jnp.arange(num_classes, dtype=dtype)[None, :]
        return label.astype(dtype), jnp.any(label, axis=-1)

    def loss(u: Array, y: Array) -> Array:
        label, is_class = one_hot(y, u.dtype)
        # A label that is not one of the classes has no loss.
        return jnp.where(
            is_class,
            jax.nn.logsumexp(u, axis=-1) - jnp.sum(label * u, axis=-1),
            jnp.nan,
        )

    def moments(mean: Array, covariance: Array, y: Array, options: Options) -> Moments:
        label, is_class = one_hot(y, mean.dtype)
        differences = np.eye(num_classes - 1, num_classes) - np.eye(
            1, num_classes, num_classes - 1
        )
        contrast = jnp.asarray(differences, mean.dtype)
        factor = root(
            jnp.matmul(contrast[None], jnp.matmul(covariance, contrast.T[None]))
        )
        z, weights = nodes.at(options.rng_key, mean.shape[0], mean.dtype)
        v = jnp.matmul(mean, contrast.T)[None] + jnp.sum(
            factor[None] * z[:, :, None, :], axis=-1
        )
        u = jnp.concatenate([v, jnp.zeros_like(v[:, :, :1])], axis=-1)
        total = jax.nn.logsumexp(u, axis=-1)
        p = jnp.exp(u - total[:, :, None])
        # The predictor of the label is linear: its mean needs no node.
        of_label = jnp.sum(label * (mean - mean[:, -1:]), axis=-1)
        expected = jnp.where(
            is_class, jnp.tensordot(weights, total, 1) - of_label, jnp.nan
        )
        average = jnp.tensordot(weights, p, 1)
        square = jnp.einsum("mni,mnj->nij", p * weights[:, None, None], p)
        if options.curvature == "fisher":
            cross = average[:, :, None] * label[:, None, :]
            second = (
                square
                - cross
                - jnp.swapaxes(cross, 1, 2)
                + label[:, :, None] * label[:, None, :]
            )
        else:
            second = (
                average[:, :, None] * jnp.eye(num_classes, dtype=mean.dtype)[None]
                - square
            )
        return Moments(loss(mean, y), expected, average - label, second)

    def check(x: ArrayLike, y: ArrayLike) -> None:
        expected = (
            f"softmax({num_classes}) needs labels y in {{0, ..., {num_classes - 1}}}"
        )
        check_outcomes(
            y, lambda labels: np.isin(labels, np.arange(num_classes)), expected
        )

    return linear(
        moments, loss, num_outputs=num_classes, check=check, needs_key=nodes.needs_key
    )
