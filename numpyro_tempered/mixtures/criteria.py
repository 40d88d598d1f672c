"""Information criteria of maximum likelihood."""

import math


def aic(log_likelihood: float, num_parameters: int) -> float:
    """Akaike's criterion, -2 log L + 2 p.

    Args:
        log_likelihood: log L at its maximum, in nats.
        num_parameters: p, the number of free parameters.

    References:
        Akaike, *A new look at the statistical model identification*, IEEE TAC 1974.

    Example:
        >>> from numpyro_tempered.mixtures.criteria import aic
        >>> aic(-10.0, 3)
        26.0
    """
    return -2.0 * log_likelihood + 2.0 * num_parameters


def bic(log_likelihood: float, num_parameters: int, num_data: float) -> float:
    """Schwarz's criterion, -2 log L + p log n.

    Args:
        log_likelihood: log L at its maximum, in nats.
        num_parameters: p, the number of free parameters.
        num_data: n, the sum of the weights.

    References:
        Schwarz, *Estimating the dimension of a model*, AoS 1978.

    Example:
        >>> from numpyro_tempered.mixtures.criteria import bic
        >>> bic(-10.0, 3, 1.0)
        20.0
    """
    return -2.0 * log_likelihood + num_parameters * math.log(num_data)


def icl(
    log_likelihood: float, num_parameters: int, num_data: float, entropy: float
) -> float:
    r"""The integrated complete-data likelihood, BIC + 2 H.

    :math:`H = -\sum_{ij} \omega_{ij} \log \omega_{ij}` is the entropy of the responsibilities. Clusters that
    overlap raise it, so that it counts clusters where BIC counts components.

    Args:
        log_likelihood: log L at its maximum, in nats.
        num_parameters: p, the number of free parameters.
        num_data: n, the sum of the weights.
        entropy: H, the weighted sum of the entropies of the responsibilities, in nats.

    References:
        Biernacki, Celeux, Govaert, *Assessing a mixture model for clustering with the integrated completed
        likelihood*, IEEE PAMI 2000, with responsibilities in place of labels.

    Example:
        >>> from numpyro_tempered.mixtures.criteria import icl
        >>> icl(-10.0, 3, 1.0, 0.5)
        21.0
    """
    return bic(log_likelihood, num_parameters, num_data) + 2.0 * entropy
