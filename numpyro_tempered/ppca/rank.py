"""The factors: their number by the penalised ELBO, and their principal axes."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_tempered.core import (
    Array,
    add_repr,
    check_options,
    describe,
    doubles,
    key_first,
)
from numpyro_tempered.ppca.driver import Options, fit_each
from numpyro_tempered.ppca.model import PPCAFit, check_fit
from numpyro_tempered.report.arviz import assemble, dataset, versions
from numpyro_tempered.select.ranking import LogPrior, check_log_prior, rank_models

# Of the comparison, fields of :class:`FactorSelection`.
COLUMNS = ("elbo", "log_prior", "criterion", "weight", "restart_spread", "converged")


@add_repr
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
        fits: The fits by K.
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
    fits: dict[int, PPCAFit]

    @property
    def fit(self) -> PPCAFit:
        """The selected fit."""
        return self.fits[self.selected]

    @property
    def data(self) -> Any:
        """The comparison as ArviZ data, group ``model_comparison`` with dim ``num_factors``."""
        columns = {name: getattr(self, name) for name in COLUMNS}
        # The ELBO has no Monte Carlo error.
        columns["se"] = np.zeros_like(self.elbo)
        attrs: dict[str, Any] = {"selected": self.selected}
        comparison = dataset(
            columns,
            coords={"num_factors": list(self.num_factors)},
            dims={name: ["num_factors"] for name in columns},
            attrs=attrs,
        )
        return assemble({"model_comparison": comparison}, attrs | versions())


class Axes(NamedTuple):
    """Principal axes of the posterior mean of W.

    Attributes:
        directions: Orthonormal columns, the largest entry of each positive, shape ``(d, K)``.
        variances: Variance of x along them, noise included, in decreasing order, shape ``(K,)``.
        noise_variance: Variance along any other direction.
    """

    directions: np.ndarray
    variances: np.ndarray
    noise_variance: float


@key_first
def select_num_factors(
    rng_key: Array,
    x: Any,
    *,
    num_factors: Sequence[int],
    log_prior: LogPrior = None,
    **options: Any,
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
        TypeError: If ``num_factors`` is a single number.

    References:
        C19, Theorem 1 (the guarantee for alpha < 1).

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-2.0, 2.0, 20)[:, None] * np.ones(3) + 0.1 * np.sin(np.arange(60.0)).reshape(20, 3)
        >>> nt.ppca.select_num_factors(jax.random.key(0), x, num_factors=[1, 2], alpha=0.5).selected
        1
    """
    check_options(options, Options._fields, "select_num_factors")
    if not isinstance(num_factors, Iterable) or isinstance(num_factors, str):
        raise TypeError(
            f"num_factors must be several numbers, such as range(5), got {describe(num_factors)}."
        )
    orders = list(num_factors)
    if not orders or len(set(orders)) != len(orders):
        raise ValueError(
            f"num_factors must be different numbers, at least one, got {orders}."
        )
    log_weights = check_log_prior(orders, log_prior)
    keys = jax.random.split(rng_key, len(orders))
    fits = dict(
        zip(
            map(int, orders), fit_each(keys, x, orders, Options(**options)), strict=True
        )
    )
    elbos = np.array([each.objective for each in fits.values()])
    ranking = rank_models(elbos, log_weights)
    return FactorSelection(
        num_factors=np.array(orders),
        elbo=elbos,
        log_prior=log_weights,
        criterion=ranking.criterion,
        weight=ranking.weight,
        restart_spread=np.array([np.ptp(each.restart_elbos) for each in fits.values()]),
        converged=np.array([each.converged for each in fits.values()]),
        selected=int(orders[ranking.best]),
        margin=float(ranking.margin[ranking.best]),
        fits=fits,
    )


def principal_axes(fit: PPCAFit) -> Axes:
    """Orthonormal directions of the factors and the variance along them.

    Args:
        fit: A fitted model.

    Returns:
        :class:`Axes`. Columns that ARD has emptied come last; their directions are arbitrary.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-2.0, 2.0, 20)[:, None] * np.ones(3) + 0.1 * np.sin(np.arange(60.0)).reshape(20, 3)
        >>> fit = nt.ppca.fit(jax.random.key(0), x, num_factors=1)
        >>> print(nt.ppca.principal_axes(fit).directions[:, 0].round(1))
        [0.6 0.6 0.6]
    """
    check_fit(fit)
    directions, sizes, _ = np.linalg.svd(doubles(fit.loadings), full_matrices=False)
    if fit.num_factors:
        largest = np.take_along_axis(
            directions, np.argmax(np.abs(directions), axis=0)[None, :], axis=0
        )
        directions = directions * np.where(largest < 0.0, -1.0, 1.0)
    return Axes(directions, sizes**2 + fit.noise_variance, fit.noise_variance)
