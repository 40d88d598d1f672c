r"""The prior and the factor of a mixture's weights: a Dirichlet, or sticks.

Both are arrays with leading axis K, and their shape says which: ``(K,)`` are the concentrations of a Dirichlet,
``(K, 2)`` those of the sticks' Betas. The last stick is 1, a Beta(a, 0). Components that fill up have 0.
"""

import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_tempered.core import Array, ArrayLike, check_number, check_numbers, doubles
from numpyro_tempered.mixtures.components import special
from numpyro_tempered.mixtures.components.base import Rows, Sample, namespace

WEIGHTS, STICKS = "weights", "sticks"
# Nats of rounding that a prior of the weights may put into F.
LARGEST_ROUNDING = 0.1


class StickBreaking(NamedTuple):
    """A truncated Dirichlet process as the prior of the weights; made by :func:`stick_breaking`.

    Attributes:
        gamma: Concentration of the process.
    """

    gamma: float


# What users give: of a Dirichlet one number or ``(K,)``.
Concentration: TypeAlias = ArrayLike | StickBreaking


def stick_breaking(gamma: float = 1.0) -> StickBreaking:
    r"""Weights of a truncated Dirichlet process, for the ``concentration`` of :func:`fit` and its kin.

    .. math:: p_k = v_k \prod_{l<k} (1 - v_l), \qquad v_k \sim \mathrm{Beta}(1, \gamma) \text{ for } k < K,
              \quad v_K = 1 .

    Given responsibilities :math:`v_k \sim \mathrm{Beta}(1 + \alpha N_k, \gamma + \alpha \sum_{l>k} N_l)`. A
    component without data costs nothing behind another one: K is an upper limit, on which F hardly depends once
    it is more than the data need. A priori n data are of about :math:`\gamma \log(1 + n / \gamma)` components.

    F depends on the order of the components. Each step of the ascent puts them into the best one for their
    counts, which never lowers F: from the largest to the smallest, but for the last, which may be a larger one
    where :math:`\gamma > 1`, since a priori the last weight is :math:`\gamma` times the one before it. Labels of
    a start are put into that order too, and fits keep it: :func:`relabel` takes no other.

    Args:
        gamma: Concentration of the process, positive: the larger, the more components hold data.

    Returns:
        The prior, for ``concentration``.

    Raises:
        TypeError: If ``gamma`` is not a number.
        ValueError: If it is not positive and finite, or an array.

    References:
        Blei, Jordan, *Variational inference for Dirichlet process mixtures*, Bayesian Analysis 2006; Ishwaran,
        James, *Gibbs sampling methods for stick-breaking priors*, JASA 2001, for the truncated prior.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [9.0], [9.1], [9.2]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(
        ...     jax.random.key(0), x, component, num_components=5, concentration=nt.mixtures.stick_breaking(0.5)
        ... )
        >>> fit.counts.round(1).tolist()[:2], fit.num_occupied
        ([3.0, 1.0], 2)
    """
    return StickBreaking(float(check_number(gamma, "gamma", "(0, inf)")))


def prior_of(concentration: Concentration, num_components: int) -> np.ndarray:
    """The prior of K weights: ``(K,)`` of a Dirichlet, ``(K, 2)`` of sticks.

    Raises:
        TypeError: If it is not numbers.
        ValueError: If it is not positive, or has another shape than () or (K,).
    """
    if isinstance(concentration, StickBreaking):
        gamma = check_number(concentration.gamma, "gamma", "(0, inf)")
        return first(
            np.broadcast_to(np.array([1.0, gamma]), (num_components, 2)), num_components
        )
    if callable(concentration):
        raise TypeError(
            f"concentration is {concentration!r}; expected numbers, or a prior such as "
            "nt.mixtures.stick_breaking(1.0)."
        )
    values = doubles(concentration)
    if values.shape not in ((), (num_components,)):
        raise ValueError(
            f"concentration has shape {values.shape}; expected () or ({num_components},)."
        )
    return np.broadcast_to(
        check_numbers(values, "concentration", "(0, inf)"), (num_components,)
    )


def check_rounding(prior: np.ndarray, dtype: np.dtype) -> None:
    """Refuse a prior whose data are so many that F is rounding.

    Raises:
        FloatingPointError: If rounding takes more than ``LARGEST_ROUNDING`` from its log-gammas.
    """
    total = float(np.sum(prior))
    rounding = 0.5 * float(np.finfo(dtype).eps) * total * (1.0 + math.log1p(total))
    if rounding > LARGEST_ROUNDING:
        raise FloatingPointError(
            f"the concentrations of the weights add up to {total:.2g}, whose log-gammas {dtype} holds to "
            f"{rounding:.2g} nats: take smaller ones, or let jax have 64 bits."
        )


def are_sticks(concentration: Rows) -> bool:
    """Whether the weights depend on the order of the components."""
    return concentration.ndim == 2


def first(prior: np.ndarray, num_components: int) -> np.ndarray:
    """The prior of the first components, where there are no others."""
    if not are_sticks(prior):
        return prior[:num_components]
    rest = np.where(
        np.arange(num_components) < num_components - 1, prior[:num_components, 1], 0.0
    )
    return np.stack([prior[:num_components, 0], rest], axis=1)


def active(concentration: Rows) -> Array:
    """Which components there are, ``(K,)``."""
    exists: Array = (
        concentration[:, 0] if are_sticks(concentration) else concentration
    ) > 0  # type: ignore[assignment]
    return exists


def update(prior: Array, counts: Array) -> Array:
    """The factor given alpha times the counts ``(K,)``."""
    if not are_sticks(prior):
        return prior + counts
    library = namespace(counts)
    return prior + library.stack([counts, _behind(counts)], axis=1)


def counts_of(concentration: Array, prior: Array) -> Array:
    """Alpha times the counts ``(K,)`` that a factor was updated by."""
    change = concentration - prior
    return change[:, 0] if are_sticks(change) else change


def expected_log(concentration: Array) -> Array:
    """E log p ``(K,)``; -inf for components that fill up."""
    if not are_sticks(concentration):
        return special.dirichlet_expected_log(concentration)
    exists = active(concentration)
    of_sticks = special.dirichlet_expected_log(
        jnp.where(exists[:, None], concentration, 1.0)
    )
    # The last stick leaves nothing to those behind it, which are none.
    rest = jnp.where(concentration[:, 1] > 0, of_sticks[:, 1], 0.0)
    return jnp.where(exists, of_sticks[:, 0] + _before(rest), -jnp.inf)


def kl(concentration: Array, other: Array) -> Array:
    """The divergence of one factor from another, or from the prior; a Beta is a Dirichlet of two."""
    divergences = special.dirichlet_kl(concentration, other)
    return jnp.sum(divergences) if are_sticks(concentration) else divergences


def mean(concentration: Rows) -> np.ndarray:
    """E p ``(K,)``, on the host, without what fills up."""
    values = np.asarray(concentration)
    if not are_sticks(values):
        return values / np.sum(values)
    share, rest = (values / np.sum(values, axis=1, keepdims=True)).T
    return share * np.concatenate([np.ones(1, rest.dtype), np.cumprod(rest)[:-1]])


def log_mean(concentration: Array) -> Array:
    """Log E p ``(K,)``, without what fills up."""
    if not are_sticks(concentration):
        return jnp.log(concentration) - jnp.log(jnp.sum(concentration))
    # Sticks are independent.
    of_sticks = jnp.log(concentration) - jnp.log(
        jnp.sum(concentration, axis=1, keepdims=True)
    )
    return of_sticks[:, 0] + _before(of_sticks[:, 1])


def log_weights(log_gamma: Rows, concentration: Rows) -> Array:
    """Log p ``(..., K)`` of draws, from logarithms of standard gammas of the shapes in ``concentration``."""
    library = namespace(log_gamma)
    log_gamma = library.where(concentration > 0, log_gamma, -np.inf)
    if not are_sticks(concentration):
        return _log_softmax(log_gamma)
    exists = active(concentration)
    of_sticks = _log_softmax(library.where(exists[:, None], log_gamma, 0.0))
    return library.where(
        exists, of_sticks[..., 0] + _before(of_sticks[..., 1]), -np.inf
    )


def best_order(prior: Array, counts: Array) -> Array | None:
    r"""The order of the components with the largest evidence of sticks, ``(K,)``; None of a Dirichlet.

    With :math:`n_k` alpha times the counts in the order and :math:`T_k = \sum_{l>k} n_l`,

    .. math:: \sum_{k<K} \log B(1 + n_k, \gamma + T_k) = \log \frac{\Gamma(\gamma + n_K)}{\Gamma(1 + n_K)}
              - \sum_{k=1}^{K-2} \log(\gamma + T_k) + \text{what no order changes} :

    given which is last, the others are best from the largest to the smallest.

    Args:
        prior: Of the weights.
        counts: Alpha times the counts.
    """
    if not are_sticks(prior):
        return None
    numbers, gamma = jnp.arange(counts.shape[0]), prior[0, 1]
    num_active = jnp.sum(active(prior))
    # What fills up has no counts and comes behind.
    falling = jnp.argsort(-counts, stable=True)
    n = counts[falling]
    tails = n + _behind(n)
    after_one_more = jnp.concatenate([tails[1:], jnp.zeros_like(tails[:1])])
    # Of the row that is last, and the number of those that came before.
    row, column = numbers[:, None], numbers[None]
    rest = jnp.where(column <= row, tails[None], after_one_more[None] + n[:, None])
    is_term = (column >= 1) & (column <= num_active - 2)
    # K = 1 has no gamma.
    terms = jnp.where(is_term, jnp.log(jnp.where(is_term, gamma + rest, 1.0)), 0.0)
    gain = special.log_choose(jnp.where(gamma > 0, gamma, 1.0), n) - jnp.sum(
        terms, axis=1
    )
    gain = jnp.where(numbers < num_active, gain - gain[num_active - 1], -jnp.inf)
    # Of equals, as the last two are for gamma = 1, the smallest.
    rounding = (
        64.0
        * jnp.finfo(gain.dtype).eps
        * (1.0 + jnp.max(jnp.sum(jnp.abs(terms), axis=1)))
    )
    last = jnp.where(jnp.max(gain) > rounding, jnp.argmax(gain), num_active - 1)
    places = jnp.where(
        (numbers >= last) & (numbers < num_active - 1), numbers + 1, numbers
    )
    return falling[jnp.where(numbers == num_active - 1, last, places)]


def draw(sample: Sample, concentration: Array) -> Array:
    """The weights as NumPyro's sites: ``weights``, or ``sticks`` from which the ``weights`` follow."""
    if not are_sticks(concentration):
        return sample(WEIGHTS, dist.Dirichlet(concentration))
    one = jnp.ones(1, concentration.dtype)
    if concentration.shape[0] == 1:
        return numpyro.deterministic(WEIGHTS, one)
    sticks = sample(STICKS, dist.Beta(concentration[:-1, 0], concentration[:-1, 1]))
    rest = jnp.concatenate([one, jnp.cumprod(1.0 - sticks)])
    return numpyro.deterministic(WEIGHTS, rest * jnp.concatenate([sticks, one]))


def _behind(counts: Array) -> Array:
    """The sums of the entries behind each."""
    library = namespace(counts)
    return library.concatenate(
        [library.cumsum(counts[:0:-1])[::-1], library.zeros_like(counts[:1])]
    )


def _before(values: Array) -> Array:
    """The sums of the entries before each, over the last axis."""
    library = namespace(values)
    return library.concatenate(
        [
            library.zeros_like(values[..., :1]),
            library.cumsum(values[..., :-1], axis=-1),
        ],
        axis=-1,
    )


def _log_softmax(values: Rows) -> Array:
    if isinstance(values, jax.Array):
        return jax.nn.log_softmax(values)
    return values - np.logaddexp.reduce(values, axis=-1, keepdims=True)  # type: ignore[return-value]
