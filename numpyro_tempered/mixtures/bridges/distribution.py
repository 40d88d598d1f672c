"""The distribution of a datum of a mixture."""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.components.product import ColumnsOf


class Mixture(dist.MixtureSameFamily):
    """A mixture of any components of one family, whose data may have missing entries.

    NumPyro's own refuses components whose support has arguments, such as the categorical, and has no density
    for NaN.

    Args:
        weights: Of the components, ``(K,)``.
        components: Batch shape ``(K,)``, or ``(n, K)`` where entries are missing; see :func:`masked`.
    """

    def __init__(self, weights: Array, components: dist.Distribution) -> None:
        self._mixing_distribution = dist.Categorical(probs=weights)
        self._component_distribution = components
        self._mixture_size = jnp.shape(weights)[-1]
        # Past the checks of MixtureSameFamily; and missing entries are outside of every support.
        super(dist.MixtureSameFamily, self).__init__(
            components.batch_shape[:-1], components.event_shape, validate_args=False
        )


def masked(components: dist.Distribution, observed: Array) -> dist.Distribution:
    """Components for rows ``(n, d)`` of which entries are missing, those marginalised.

    Args:
        components: Batch shape ``(K,)``, with columns that are independent where entries are missing.
        observed: Which entries there are, ``(n, d)``.

    Returns:
        Batch shape ``(n, K)``. Its draws are complete.
    """
    if isinstance(components, ColumnsOf):
        pairs = zip(components.parts, components.columns, strict=True)
        return ColumnsOf(
            [masked(part, observed[:, np.asarray(where)]) for part, where in pairs], components.columns
        )
    if isinstance(components, dist.Independent) and len(components.event_shape) == 1:
        return components.base_dist.mask(observed[:, None, :]).to_event(1)
    # A part without missing entries, since its component refuses them.
    return components.expand((observed.shape[0], *components.batch_shape))
