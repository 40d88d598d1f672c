"""The number of factors by the penalised ELBO, and by what ARD leaves."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.ppca.base import PPCAFit, in_double
from numpyro_tempered.ppca.bound import squared_loadings
from numpyro_tempered.ppca.driver import fit_each

LogPrior: TypeAlias = Mapping[Any, float] | Callable[[Sequence[Any]], Mapping[Any, float]] | None


class FactorSelection(NamedTuple):
    """Numbers of factors compared, as given.

    Attributes:
        num_factors: The K compared, shape ``(m,)``.
        elbo: Their ELBO.
        log_prior: log b_K.
        criterion: Their sum.
        weight: The softmax of ``criterion``.
        restart_spread: Largest minus least ELBO among the starts of each K.
        converged: Whether each fit has converged.
        selected: The K with the largest criterion.
        margin: Its lead over the runner-up, in nats; infinite if there is none.
        fits: The fits.
    """

    num_factors: np.ndarray
    elbo: np.ndarray
    log_prior: np.ndarray
    criterion: np.ndarray
    weight: np.ndarray
    restart_spread: np.ndarray
    converged: np.ndarray
    selected: int
    margin: float
    fits: tuple[PPCAFit, ...]


def select_num_factors(
    rng_key: Array, x: Any, num_factors: Sequence[int], log_prior: LogPrior = None, **options: Any
) -> FactorSelection:
    r"""The number of factors with the largest :math:`\mathrm{ELBO}_\alpha(K) - \log(1/b_K)`.

    Args:
        rng_key: Key of the fits.
        x: Data, shape ``(n, d)``, NaN where missing.
        num_factors: The K to compare; 0 is a model too.
        log_prior: log b_K by K, or a callable from the K to that, such as ``nt.dyadic``; uniform over the given
            K by default. The weights must be positive and sum to at most 1.
        **options: Those of :func:`fit`; all K are fitted by one compiled program.

    Returns:
        A :class:`FactorSelection`.

    Raises:
        ValueError: If there is nothing to compare, a K occurs twice, or the weights are not as above.

    References:
        C19, Theorem 1 (the guarantee for alpha < 1).

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-2.0, 2.0, 20)[:, None] * np.ones(3) + 0.1 * np.sin(np.arange(60.0)).reshape(20, 3)
        >>> nt.ppca.select_num_factors(jax.random.key(0), x, [1, 2], nt.dyadic, alpha=0.5).selected
        1
    """
    orders = list(num_factors)
    if not orders or len(set(orders)) != len(orders):
        raise ValueError(f"num_factors must be different numbers, at least one, got {orders}.")
    log_weights = _log_weights(orders, log_prior)
    keys = jax.random.split(rng_key, len(orders))
    fits = tuple(fit_each(keys, x, orders, **options))
    elbos = np.array([each.elbo for each in fits])
    criterion = elbos + log_weights
    unnormalised = np.exp(criterion - criterion.max())
    ranked = np.sort(criterion)[::-1]
    return FactorSelection(
        num_factors=np.array(orders),
        elbo=elbos,
        log_prior=log_weights,
        criterion=criterion,
        weight=unnormalised / unnormalised.sum(),
        restart_spread=np.array([np.ptp(each.restart_elbos) for each in fits]),
        converged=np.array([each.converged for each in fits]),
        selected=int(orders[int(np.argmax(criterion))]),
        margin=float(ranked[0] - ranked[1]) if len(orders) > 1 else math.inf,
        fits=fits,
    )


def num_occupied(fit: PPCAFit) -> int:
    r"""How many columns of W the data hold: those with :math:`|E W_k|^2` above half of :math:`E|W_k|^2`.

    A column that ARD has emptied has a posterior about 0: its square is all variance.

    Args:
        fit: A fitted model.

    Returns:
        A number from 0 to K.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-2.0, 2.0, 20)[:, None] * np.ones(3) + 0.1 * np.sin(np.arange(60.0)).reshape(20, 3)
        >>> nt.ppca.num_occupied(nt.ppca.fit(jax.random.key(0), x, num_factors=2))
        1
    """
    q = in_double(fit.posterior)
    return int(np.sum(np.sum(q.loc[:, :-1] ** 2, axis=0) > 0.5 * squared_loadings(q, np)))


def _log_weights(orders: list[int], log_prior: LogPrior) -> np.ndarray:
    if log_prior is None:
        return np.full(len(orders), -math.log(len(orders)))
    given = log_prior(orders) if callable(log_prior) else log_prior
    if set(given) != set(orders):
        raise ValueError(f"log_prior has the numbers {sorted(given)}, the comparison {sorted(orders)}.")
    values = np.array([float(given[k]) for k in orders])
    if not np.all(np.isfinite(values)) or np.exp(values).sum() > 1.0 + 1e-6:
        raise ValueError(
            f"log_prior must be logarithms of positive weights that sum to at most 1, got {values.tolist()}."
        )
    return values
