"""A fitted probabilistic PCA."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import result
from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.ppca.base import Posterior, Prior, as_matrix
from numpyro_tempered.ppca.model import divergence, draw, numpyro_model


class PPCAFit(NamedTuple):
    """A fitted model, by :func:`fit`.

    Attributes:
        posterior: The variational posterior; its loadings are in the order of E|W_k|², and their second moments
            E[W'W] are diagonal.
        origin: What ``posterior.loc[:, -1]`` is relative to: the means of the columns, float64, shape ``(d,)``.
        noise_shape: Shape of the Gamma posterior of τ.
        ard_shape: Shape of those of λ_k; None without ARD.
        prior: The prior.
        alpha: Power on the likelihood.
        elbo: The bound on the log of the tempered evidence, with every constant, in float64.
        trace: ELBO after each sweep, float64, shape ``(num_iter,)``.
        num_iter: Sweeps of the best start.
        converged: Whether the best start met the tolerance.
        restart_elbos: ELBO of every start in the precision of the fit, shape ``(num_restarts,)``.
        num_observed: Number of observed entries.
    """

    posterior: Posterior
    origin: np.ndarray
    noise_shape: float
    ard_shape: float | None
    prior: Prior
    alpha: float
    elbo: float
    trace: np.ndarray
    num_iter: int
    converged: bool
    restart_elbos: np.ndarray
    num_observed: int

    @property
    def num_factors(self) -> int:
        """K."""
        return self.posterior.loc.shape[1] - 1

    @property
    def loadings(self) -> np.ndarray:
        """Posterior mean of W, shape ``(d, K)``."""
        return np.asarray(self.posterior.loc)[:, :-1]

    @property
    def mean(self) -> np.ndarray:
        """Posterior mean of m in units of the data, float64, shape ``(d,)``."""
        return self.origin + np.asarray(self.posterior.loc, np.float64)[:, -1]

    @property
    def noise_variance(self) -> float:
        """1 / E[τ], in squared units of the data."""
        return 1.0 / float(self.posterior.noise_precision)

    def as_elbo(self) -> result.TemperedELBO:
        """The ELBO with KL(q(W, m, τ, λ), prior) and, as far as q(z) reaches, the likelihood without z."""
        kl = divergence(self.posterior, self.origin, self.prior, self.noise_shape, self.ard_shape)
        return result.TemperedELBO(self.elbo, 0.0, (self.elbo + kl) / self.alpha, kl)

    def summarise_data(self) -> result.DataSummary:
        """The number of observed entries and the means of the columns, for :func:`compare`."""
        return result.DataSummary(numbers={result.VALUES: self.num_observed, result.COLUMNS: self.origin})

    def as_run(self, *data: ArrayLike, num_samples: int = 1000, rng_key: Array | None = None) -> result.Run:
        """Draws with probabilistic PCA as a NumPyro model, for :func:`to_inference_data`.

        The z are integrated out of the likelihood of a row, and missing entries too.

        Raises:
            ValueError: If x or the key are missing.
        """
        key = result.check_run_arguments(self, data, rng_key, "x")
        x, q = as_matrix(data[0], len(self.origin)), self.posterior
        model = numpyro_model(self.prior, self.num_factors, self.ard_shape is not None, bool(np.isnan(x).any()))
        draws = draw(key, q, self.noise_shape, num_samples)
        samples = draws._asdict() | {"mean": draws.mean + jnp.asarray(self.origin, q.loc.dtype)}
        dims = {"loadings": ["feature", "factor"], "mean": ["feature"], "x": ["row", "feature"]}
        if self.ard_shape is not None:
            gammas = jax.random.gamma(
                jax.random.fold_in(key, 1), self.ard_shape, (num_samples, self.num_factors), q.loc.dtype
            )
            samples["loading_precision"] = gammas * q.loading_precision / self.ard_shape
            dims["loading_precision"] = ["factor"]
        return result.Run(
            model=temper(model, alpha=self.alpha),
            samples={name: value[None] for name, value in samples.items()},
            args=(jnp.asarray(x, q.loc.dtype),),
            rng_key=key,
            groups={"variational": {"elbo_trace": self.trace, "elbo_by_restart": self.restart_elbos}},
            attrs={
                "algorithm": "cavi",
                "num_factors": self.num_factors,
                **result.fit_attrs(self),
                "num_iter": self.num_iter,
            },
            dims=dims | {"elbo_trace": ["iteration"], "elbo_by_restart": ["restart"]},
        )
