"""scikit-learn's BayesianGaussianMixture as a fit of this library, with its bound repaired."""

from collections.abc import Callable
from typing import Any

import numpy as np

from numpyro_tempered.core.typing import Array
from numpyro_tempered.mixtures.blocks import block_size, make_blocks
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.components.diagonal_gaussian import NormalGamma, diagonal_gaussian
from numpyro_tempered.mixtures.components.gaussian import NormalWishart, gaussian
from numpyro_tempered.mixtures.components.spherical_gaussian import SphericalGamma, spherical_gaussian
from numpyro_tempered.mixtures.components.tied_gaussian import tied_gaussian
from numpyro_tempered.mixtures.factors import Factors, Problem
from numpyro_tempered.mixtures.fit import evaluate
from numpyro_tempered.mixtures.prepare import as_dtype, check_count, prepare
from numpyro_tempered.mixtures.result import MixtureFit


def from_sklearn(rng_key: Array, model: Any, x: Any, *, num_samples: int = 100) -> MixtureFit:
    r"""A fitted ``sklearn.mixture.BayesianGaussianMixture`` as a :class:`MixtureFit`, without any fitting.

    scikit-learn's ``lower_bound_`` leaves out constants that depend on the number of components K,

    .. math:: \log\Gamma(K a) - K \log\Gamma(a) + K \Big[ \tfrac d2 \log \kappa_0 + \tfrac{\nu_0}2 \log |\Psi_0|
              - \tfrac{\nu_0 d}2 \log 2 - \sum_{i<d} \log\Gamma\big(\tfrac{\nu_0 - i}2\big) \Big]
              - \tfrac{nd}2 \log 2\pi

    for full covariances, so that it ranks wrong numbers of components first. ``objective`` and ``bound`` of the
    result have every constant.

    The factors are taken as they are, and F and E1 evaluated at them, which are bounds at any factors:

    - full covariances: those of ``nt.mixtures.gaussian``, a fixed point of its ascent too if ``reg_covar`` is 0.
      With another ``reg_covar`` the factors are a little wider than the best, and F so much lower.
    - diag, spherical: those of ``diagonal_gaussian`` and ``spherical_gaussian``, precisions Gamma with
      concentration df / 2 or d df / 2. Where d > 1 scikit-learn takes responsibilities with the expected log
      determinant of a full Wishart matrix, which these factors do not have: not a fixed point of the ascent on F.
    - tied: those of ``tied_gaussian``. scikit-learn counts n / K data in the shared covariance where the
      posterior has n: F is that of a factor that is too wide.

    ``nt.mixtures.fit`` with the result as ``warm_start`` goes on from there.

    Args:
        rng_key: Key of the draws for E1.
        model: A fitted ``BayesianGaussianMixture``, of ``weight_concentration_prior_type``
            "dirichlet_distribution".
        x: The data that it was fitted to, ``(n, d)``.
        num_samples: Draws for E1, each a pass over the data; 0 for none.

    Returns:
        A :class:`MixtureFit` with alpha 1, whose trace is F alone.

    Raises:
        TypeError: If ``model`` is another object.
        ValueError: If it is not fitted, its weights are a Dirichlet process, or the data are not of its shape.

    References:
        scikit-learn issues 19074, 15647 and 8714 on the constants.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> from sklearn.mixture import BayesianGaussianMixture
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> model = BayesianGaussianMixture(
        ...     n_components=2, weight_concentration_prior_type="dirichlet_distribution", random_state=0
        ... ).fit(x)
        >>> fit = nt.mixtures.from_sklearn(jax.random.key(0), model, x, num_samples=0)  # without E1
        >>> fit.counts.round().tolist()
        [2.0, 2.0]
    """
    num_samples = check_count(num_samples, "num_samples", 0)
    _check(model)
    family, posterior = _FORMS[model.covariance_type](model)
    data = prepare(x, family, None)
    if data.component != family._replace(prior=None):
        raise ValueError("the data have missing entries (NaN), which scikit-learn cannot have been fitted to.")
    dtype = data.rows.dtype
    blocks = make_blocks(data.rows, data.weight, block_size(data.rows.shape[0], model.n_components))
    # On the host, in double precision.
    shift: Any = -np.asarray(data.centre, np.float64)
    centred = family.translate(posterior, shift)  # type: ignore[misc]
    concentration: Any = np.asarray(model.weight_concentration_, np.float64)
    factors = as_dtype(Factors(concentration, centred), dtype)
    prior_weights: Any = np.full(model.n_components, model.weight_concentration_prior_)
    alpha: Any = 1.0
    problem = as_dtype(Problem(data.prior, prior_weights, alpha, _log_base(data.rows.shape)), dtype)
    value, counts, bound = evaluate(rng_key, data.component, problem, factors, blocks, num_samples)
    return MixtureFit(
        component=data.component,
        alpha=1.0,
        factors=factors,
        problem=problem,
        centre=data.centre,
        objective=value,
        bound=bound,
        counts=counts,
        trace=np.array([value]),
        objectives=np.array([value]),
        converged=bool(model.converged_),
        num_iter=int(model.n_iter_),
        num_moves=0,
        total=data.total,
    )


def _log_base(shape: tuple[int, ...]) -> Any:
    """The sum of log h of Gaussian data."""
    return -0.5 * shape[0] * shape[1] * float(np.log(2.0 * np.pi))


def _full(model: Any) -> tuple[Component, Any]:
    return gaussian(*_dim(model), **_wishart_prior(model)), NormalWishart(*_means(model), *_wisharts(model))


def _tied(model: Any) -> tuple[Component, NormalWishart]:
    df, scale = _wisharts(model)
    size = model.n_components
    # The one factor of the precision, K times.
    shared: Any = np.broadcast_to(df, (size,)), np.broadcast_to(scale, (size, *scale.shape))
    return tied_gaussian(*_dim(model), **_wishart_prior(model)), NormalWishart(*_means(model), *shared)


def _diagonal(model: Any) -> tuple[Component, NormalGamma]:
    (dim,) = _dim(model)
    loc, mean_precision = _means(model)
    df, scale = _wisharts(model)
    component = diagonal_gaussian(
        dim,
        loc=model.mean_prior_,
        mean_precision=model.mean_precision_prior_,
        concentration=0.5 * model.degrees_of_freedom_prior_,
        rate=0.5 * np.asarray(model.covariance_prior_),
    )
    return component, NormalGamma(loc, _columns(mean_precision, dim), _columns(0.5 * df, dim), 0.5 * scale)


def _spherical(model: Any) -> tuple[Component, SphericalGamma]:
    (dim,) = _dim(model)
    loc, mean_precision = _means(model)
    df, scale = _wisharts(model)
    component = spherical_gaussian(
        dim,
        loc=model.mean_prior_,
        mean_precision=model.mean_precision_prior_,
        concentration=0.5 * dim * model.degrees_of_freedom_prior_,
        rate=0.5 * dim * model.covariance_prior_,
    )
    return component, SphericalGamma(loc, _columns(mean_precision, dim), 0.5 * dim * df, 0.5 * dim * scale)


_FORMS: dict[str, Callable[[Any], tuple[Component, Any]]] = {
    "full": _full,
    "tied": _tied,
    "diag": _diagonal,
    "spherical": _spherical,
}


def _dim(model: Any) -> tuple[int]:
    return (model.means_.shape[1],)


def _columns(values: np.ndarray, dim: int) -> Any:
    """Values ``(K,)`` the same in each of d columns."""
    return np.repeat(values[:, None], dim, axis=1)


def _means(model: Any) -> tuple[Any, Any]:
    return np.asarray(model.means_, np.float64), np.asarray(model.mean_precision_, np.float64)


def _wisharts(model: Any) -> tuple[Any, Any]:
    """Degrees of freedom, and scales: scikit-learn keeps them divided by the degrees of freedom."""
    df, covariances = np.asarray(model.degrees_of_freedom_), np.asarray(model.covariances_)
    return df, covariances * np.reshape(df, (*df.shape, *(1,) * (covariances.ndim - df.ndim)))


def _wishart_prior(model: Any) -> dict[str, Any]:
    return {
        "loc": model.mean_prior_,
        "mean_precision": model.mean_precision_prior_,
        "df": model.degrees_of_freedom_prior_,
        "scale": model.covariance_prior_,
    }


def _check(model: Any) -> None:
    """Raise where a model cannot be taken over."""
    if not hasattr(model, "weight_concentration_prior_type"):
        raise TypeError(
            f"from_sklearn takes a fitted BayesianGaussianMixture, got a {type(model).__name__}: an EM fit has "
            "no factors."
        )
    if not hasattr(model, "degrees_of_freedom_"):
        raise ValueError("this BayesianGaussianMixture is not fitted: call its fit first.")
    if model.weight_concentration_prior_type != "dirichlet_distribution":
        raise ValueError(
            f"the weights of this model are a {model.weight_concentration_prior_type}, which is no Dirichlet: "
            'fit it with weight_concentration_prior_type="dirichlet_distribution".'
        )
