"""scikit-learn's BayesianGaussianMixture as a fit of this library, with its bound repaired."""

from typing import Any, TypeAlias

import numpy as np

from numpyro_tempered.core import Array, ArrayLike, check_count, doubles, key_first
from numpyro_tempered.mixtures.array import array_source
from numpyro_tempered.mixtures.ascent import History
from numpyro_tempered.mixtures.components.base import (
    Component,
    Hyperparameters,
    as_dtype,
    translate_on_host,
)
from numpyro_tempered.mixtures.components.diagonal_gaussian import (
    NormalGamma,
    diagonal_gaussian,
)
from numpyro_tempered.mixtures.components.gaussian import NormalWishart, gaussian
from numpyro_tempered.mixtures.components.spherical_gaussian import spherical_gaussian
from numpyro_tempered.mixtures.components.tied_gaussian import tied_gaussian
from numpyro_tempered.mixtures.evidence import evaluate
from numpyro_tempered.mixtures.factors import Factors, Outcome, problem_of
from numpyro_tempered.mixtures.prepare import check_settings, prepare
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.mixtures.weights import Concentration, stick_breaking

# sklearn.mixture.BayesianGaussianMixture, which has no type annotations.
VariationalMixture: TypeAlias = Any


@key_first
def from_sklearn(
    rng_key: Array, model: VariationalMixture, x: ArrayLike, *, num_draws: int = 100
) -> MixtureFit:
    r"""A fitted ``sklearn.mixture.BayesianGaussianMixture`` as a :class:`MixtureFit`, without any fitting.

    scikit-learn's ``lower_bound_`` leaves out constants that depend on the number of components K:

    .. math:: \log\Gamma(K a) - K \log\Gamma(a) + K \Big[ \tfrac d2 \log \kappa_0 + \tfrac{\nu_0}2 \log |\Psi_0|
              - \tfrac{\nu_0 d}2 \log 2 - \sum_{i<d} \log\Gamma\big(\tfrac{\nu_0 - i}2\big) \Big]
              - \tfrac{nd}2 \log 2\pi

    for full covariances and a Dirichlet, so that it ranks wrong numbers of components first. ``objective`` and
    ``bound`` of the result have every constant.

    Weights of the type "dirichlet_process", scikit-learn's default, are those of :func:`stick_breaking` with
    :math:`\gamma` the ``weight_concentration_prior_``; their first term is :math:`K \log \gamma`. There is one
    difference. scikit-learn has a K-th stick :math:`v_K \sim \mathrm{Beta}(1, \gamma)` too and leaves
    :math:`1 - v_K` to components without end that get no datum, so that its bound is one on the evidence of the
    process. Here :math:`v_K = 1`, and the bound is one on the evidence of the truncated model, whose weights sum
    to 1. It is larger, with scikit-learn's factors of all else and its responsibilities :math:`\omega`, by

    .. math:: \sum_i \log(1 + \omega_{iK} (e^{c} - 1)) + \mathrm{KL}(\rho_{v_K}, \pi_{v_K}), \qquad
              c = -E \log v_K ,

    which is 0 where the last component is empty. Predictions differ by the same c.

    The factors are those of the model. F and E1 are bounds at any factors, and are evaluated at these:

    - full covariances: those of ``nt.mixtures.components.gaussian``, and a fixed point of its ascent if
      ``reg_covar`` is 0. With another ``reg_covar`` the factors are a little wider than the best ones, and F is
      lower.
    - diag, spherical: those of ``diagonal_gaussian`` and ``spherical_gaussian``, precisions Gamma with
      concentration df / 2 or d df / 2. Where d > 1, scikit-learn's responsibilities use the expected log
      determinant of a full Wishart matrix, which these factors do not have: not a fixed point of the ascent on F.
    - tied: those of ``tied_gaussian``. scikit-learn counts n / K data in the shared covariance where the
      posterior counts n: F is that of a factor that is too wide.

    ``nt.mixtures.fit`` with the result as ``init`` continues from there.

    Args:
        rng_key: Key of the draws for E1.
        model: A fitted ``BayesianGaussianMixture``.
        x: The data that it was fitted to, ``(n, d)``.
        num_draws: Draws for E1, each a pass over the data; 0 for none.

    Returns:
        A :class:`MixtureFit` with alpha 1, whose trace is F alone.

    Raises:
        TypeError: If ``model`` is another object.
        ValueError: If it is not fitted, or the data are not of its shape.

    References:
        scikit-learn issues 19074, 15647 and 8714 on the constants.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> from sklearn.mixture import BayesianGaussianMixture
        >>> x = np.concatenate([np.linspace(0.0, 1.0, 30), np.linspace(9.0, 10.0, 20)])[:, None]
        >>> model = BayesianGaussianMixture(n_components=2, random_state=0).fit(x)
        >>> fit = nt.mixtures.from_sklearn(jax.random.key(0), model, x, num_draws=0)  # without E1
        >>> fit.counts.round().tolist()
        [30.0, 20.0]
    """
    num_draws = check_count(num_draws, "num_draws", 0)
    _check(model)
    component, posterior = _form(model)
    data = prepare(x, component, None)
    if data.component != component._replace(prior=None):
        raise ValueError(
            "the data have missing entries (NaN), which scikit-learn cannot have been fitted to."
        )
    dtype = data.rows.dtype
    source = array_source(data, model.n_components, 1, fill=False)
    concentration, prior = _weights(model)
    settings = check_settings(model.n_components, 1.0, prior)
    posterior = translate_on_host(component, posterior, -_host(data.centre))  # type: ignore[arg-type]
    factors = as_dtype(Factors(concentration, posterior), dtype)
    history = History(
        np.empty(0), np.empty(0), 1, 0.0, bool(model.converged_), int(model.n_iter_)
    )
    problem = problem_of(data, settings, settings.num_components)
    fit = evaluate(
        rng_key, source, problem, settings, Outcome(factors, history), num_draws
    )
    return fit._replace(
        trace=np.array([fit.objective]), restart_objectives=np.array([fit.objective])
    )


def _form(model: VariationalMixture) -> tuple[Component, Hyperparameters]:
    """The component of a model, and its posterior."""
    size, dim = model.means_.shape
    of_means = {"loc": model.mean_prior_, "mean_precision": model.mean_precision_prior_}
    df0, scale0 = model.degrees_of_freedom_prior_, np.asarray(model.covariance_prior_)
    loc, mean_precision, df = map(
        _host, (model.means_, model.mean_precision_, model.degrees_of_freedom_)
    )
    # scikit-learn keeps scales divided by the degrees of freedom.
    covariances = _host(model.covariances_)
    scale = covariances * np.reshape(
        df, (*df.shape, *(1,) * (covariances.ndim - df.ndim))
    )
    if model.covariance_type in ("full", "tied"):
        with_wishart = tied_gaussian if model.covariance_type == "tied" else gaussian
        # The factor of a tied precision is repeated K times.
        df, scale = (
            _host(np.broadcast_to(df, (size,))),
            _host(np.broadcast_to(scale, (size, dim, dim))),
        )
        posterior = NormalWishart(loc, mean_precision, df, scale)
        return with_wishart(dim, **of_means, df=df0, scale=scale0), posterior
    # A spherical covariance has the degrees of freedom of all d columns.
    spherical = model.covariance_type == "spherical"
    with_gamma = spherical_gaussian if spherical else diagonal_gaussian
    half = 0.5 * dim if spherical else 0.5
    concentration = half * df if spherical else _columns(half * df, dim)
    gammas = NormalGamma(
        loc, _columns(mean_precision, dim), concentration, half * scale
    )
    return with_gamma(
        dim, **of_means, concentration=half * df0, rate=half * scale0
    ), gammas


def _weights(model: VariationalMixture) -> tuple[Array, Concentration]:
    """The factor of a model's weights, and their prior."""
    if model.weight_concentration_prior_type == "dirichlet_distribution":
        return _host(model.weight_concentration_), model.weight_concentration_prior_
    ones, zeros = model.weight_concentration_
    # The last stick is 1.
    zeros = np.append(zeros[:-1], 0.0)
    return _host(np.stack([ones, zeros], axis=1)), stick_breaking(
        model.weight_concentration_prior_
    )


def _host(values: ArrayLike) -> Array:
    """Values on the host, in double precision."""
    return doubles(values)  # type: ignore[return-value]


def _columns(values: Array, dim: int) -> Array:
    """Values ``(K,)`` repeated for each of d columns."""
    return _host(np.repeat(values[:, None], dim, axis=1))


def _check(model: object) -> None:
    """Raise where a model cannot be taken over."""
    if not hasattr(model, "weight_concentration_prior_type"):
        raise TypeError(
            f"from_sklearn takes a fitted BayesianGaussianMixture, got a {type(model).__name__}: an EM fit has "
            "no factors."
        )
    if not hasattr(model, "degrees_of_freedom_"):
        raise ValueError(
            "this BayesianGaussianMixture is not fitted: call its fit first."
        )
