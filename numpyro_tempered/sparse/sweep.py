r"""One sweep over all coefficients, in closed form.

With a design X, a target y and a precision p (α/v for the squared loss), coordinate j of the family

.. math:: \frac1{\sigma_j^2} = p|x_j|^2 + \frac1{s_j^2},\quad m_j = \sigma_j^2 p\,x_j'r_{-j},\quad
          \mathrm{logit}\,\varphi_j = \mathrm{logit}\,\lambda_j + \log\frac{\sigma_j}{s_j}
          + \frac{m_j^2}{2\sigma_j^2}

is the best one given the others, whose residual is :math:`r_{-j} = y - \sum_{l\ne j}x_l\varphi_lm_l`.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array
from numpyro_tempered.gaussian.families import SpikeSlab

T = TypeVar("T")

# Coefficients of a block: their chain of scalar steps is compiled as straight code, whose length is its square.
BLOCK = 8


class Design(NamedTuple):
    """Columns in the order of the sweep, in blocks; the last block is filled with columns of 0.

    Attributes:
        columns: Shape ``(K, B, n)``.
        norms: |x_j|², ``(K, B)``, of the columns times ``root``.
        gram: Products of the columns of a block, ``(K, B, B)``; None if each sweep makes them.
        root: What the rows are multiplied by, ``(n,)``; None for 1, and then ``gram`` is there.
    """

    columns: Array
    norms: Array
    gram: Array | None = None
    root: Array | None = None


def blocks(values: Array, fill: float = 0.0) -> Array:
    """Values ``(d, ...)`` of the coefficients as ``(K, B, ...)``."""
    padding = [(0, -values.shape[0] % BLOCK)] + [(0, 0)] * (values.ndim - 1)
    return jnp.reshape(
        jnp.pad(values, padding, constant_values=fill), (-1, BLOCK, *values.shape[1:])
    )


def block_design(columns: Array) -> Design:
    """The design of columns ``(K, B, n)``."""
    gram = jnp.einsum("kbn,kcn->kbc", columns, columns)
    return Design(columns, jnp.diagonal(gram, axis1=1, axis2=2), gram)


def block_prior(prior: SpikeSlab) -> SpikeSlab:
    """The prior in blocks; columns of 0 that fill the last one have a prior of their own."""
    return SpikeSlab(
        blocks(prior.probs, 0.5), blocks(prior.loc), blocks(prior.scale, 1.0)
    )


def combine(columns: Array, mean: Array) -> Array:
    """X times coefficients ``(K, B)``, shape ``(n,)``."""
    return jnp.einsum("kbn,kb->n", columns, mean)


def products(columns: Array, rows: Array) -> Array:
    """X' times a vector ``(n,)``, shape ``(K, B)``."""
    return jnp.einsum("kbn,n->kb", columns, rows)


def gauss_seidel(
    design: Design,
    residual: Array,
    mean: Array,
    update: Callable[[T, Array], Array],
    parameters: T,
) -> tuple[Array, Array]:
    """All coordinates once, one after another, each at its best given the others.

    A block takes one product of its columns with the residual, follows what its own steps do to it by the Gram
    matrix, and moves the residual by one more product: the same numbers as coordinate by coordinate.

    Args:
        design: X.
        residual: y - X mean, shape ``(n,)``; of the rows times their root.
        mean: Coefficients before the sweep, ``(K, B)``.
        update: Parameters of a coordinate and :math:`x_j'r_{-j}` to its coefficient.
        parameters: Tree of ``(K, B)``.

    Returns:
        The coefficients, and the :math:`x_j'r_{-j}` from which they follow.
    """

    def block(
        residual: Array, inputs: tuple[Array, Array | None, Array, T]
    ) -> tuple[Array, tuple[Array, Array]]:
        columns, gram, old, parameters = inputs
        if gram is None:
            # While the columns are in the cache; the weights change from sweep to sweep.
            columns = columns * design.root[None, :]  # type: ignore[index]
            gram = columns @ columns.T
        before = columns @ residual
        partial: list[Array] = []
        new: list[Array] = []
        for j in range(BLOCK):
            product = before[j] + gram[j, j] * old[j]
            for k in range(j):
                product = product - gram[j, k] * (new[k] - old[k])
            partial.append(product)
            new.append(
                update(jax.tree.map(lambda leaf, j=j: leaf[j], parameters), product)
            )
        after = jnp.stack(new)
        return residual - (after - old) @ columns, (after, jnp.stack(partial))

    return jax.lax.scan(
        block, residual, (design.columns, design.gram, mean, parameters)
    )[1]


def sweep(
    design: Design, prior: SpikeSlab, precision: Array, residual: Array, mean: Array
) -> SpikeSlab:
    """The factors after one sweep.

    Args:
        design: X.
        prior: λ and s, shape ``(K, B)``.
        precision: p.
        residual: y - X φm before the sweep, shape ``(n,)``.
        mean: φm before the sweep, ``(K, B)``.
    """
    scale = jnp.sqrt(1.0 / (precision * design.norms + 1.0 / jnp.square(prior.scale)))
    gain = precision * jnp.square(scale)
    log_odds = (
        jnp.log(prior.probs) - jnp.log1p(-prior.probs) + jnp.log(scale / prior.scale)
    )
    curvature = 0.5 / jnp.square(scale)

    def inclusion(log_odds: Array, curvature: Array, loc: Array) -> Array:
        return jax.nn.sigmoid(log_odds + curvature * jnp.square(loc))

    def update(parameters: tuple[Array, Array, Array], product: Array) -> Array:
        gain, log_odds, curvature = parameters
        loc = gain * product
        return inclusion(log_odds, curvature, loc) * loc

    _, partial = gauss_seidel(
        design, residual, mean, update, (gain, log_odds, curvature)
    )
    loc = gain * partial
    return SpikeSlab(inclusion(log_odds, curvature, loc), loc, scale)
