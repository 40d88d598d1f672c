"""Guides with the tails of Student's t."""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import (
    AffineTransform,
    IndependentTransform,
    LowerCholeskyAffine,
)
from numpyro.infer.autoguide import AutoContinuous
from numpyro.infer.initialization import init_to_uniform

from numpyro_tempered.core import Array, ArrayLike, Model, Params, Scalar, check_number
from numpyro_tempered.infer.guides.heavy_tails import (
    MultivariateStudentT,
    StudentT,
    icdf,
)

DF = 7.0
# Of what is learned: with a variance, and below where Student's t is a Gaussian for every purpose.
MIN_DF, MAX_DF = 2.1, 1000.0


class StudentTGuide(AutoContinuous):
    """What the guides share: degrees of freedom that are fixed or learned, and the median."""

    df_constraint = constraints.interval(MIN_DF, MAX_DF)
    # Name of the parameter of the scale.
    scale_name: ClassVar[str]
    scale_constraint: ClassVar[constraints.Constraint]

    def __init__(
        self,
        model: Model,
        *,
        df: float | None = DF,
        prefix: str = "auto",
        init_loc_fn: Callable[..., object] = init_to_uniform,
        init_scale: float = 0.1,
    ) -> None:
        hint = "At 2 and below Student's t has no variance; df=None learns it."
        self.df = None if df is None else check_number(df, "df", "(2, inf)", hint=hint)
        self.init_scale = check_number(init_scale, "init_scale", "(0, inf)")
        super().__init__(model, prefix=prefix, init_loc_fn=init_loc_fn)

    @abstractmethod
    def start_df(self) -> Array:
        """Degrees of freedom that are learned, at the start."""

    @abstractmethod
    def start_scale(self) -> Array:
        """The parameter of the scale at the start."""

    @abstractmethod
    def distribution(self, df: Scalar, loc: Array, scale: Array) -> dist.Distribution:
        """The distribution on the flat unconstrained scale."""

    @abstractmethod
    def marginal_scale(self, params: Params) -> Array:
        """Scales of the coordinates, each of which is a Student's t, ``(d,)``."""

    def get_df(self, params: Params) -> Scalar:
        """Degrees of freedom of a fit: the number that was given, or what was learned."""
        return params[f"{self.prefix}_df"] if self.df is None else self.df

    def _get_posterior(self) -> dist.Distribution:
        loc = numpyro.param(f"{self.prefix}_loc", self._init_latent)
        name = f"{self.prefix}_{self.scale_name}"
        scale = numpyro.param(
            name, self.start_scale(), constraint=self.scale_constraint
        )
        df = self.df
        if df is None:
            df = numpyro.param(
                f"{self.prefix}_df", self.start_df(), constraint=self.df_constraint
            )
        return self.distribution(df, loc, scale)

    def get_posterior(self, params: Params) -> dist.Distribution:
        """The posterior on the flat unconstrained scale."""
        scale = params[f"{self.prefix}_{self.scale_name}"]
        return self.distribution(
            self.get_df(params), params[f"{self.prefix}_loc"], scale
        )

    def _base_df(self, params: Params | None) -> Scalar:
        """Degrees of freedom of the base distribution.

        Raises:
            ValueError: If they are learned, and the parameters are missing.
        """
        if self.df is not None:
            return self.df
        if params is None:
            raise ValueError(
                f"the degrees of freedom of this {type(self).__name__} are learned: get_base_dist(params) needs "
                "the parameters, or the guide a fixed df, as NeuTraReparam asks for."
            )
        return self.get_df(params)

    def median(self, params: Params) -> Params:
        """The median of each site."""
        return self._unpack_and_constrain(params[f"{self.prefix}_loc"], params)

    def quantiles(self, params: Params, quantiles: ArrayLike) -> Params:
        """Marginal quantiles of each site, along leading axes."""
        levels = jnp.asarray(quantiles)[..., None]
        loc = params[f"{self.prefix}_loc"]
        latent = loc + self.marginal_scale(params) * icdf(self.get_df(params), levels)
        return self._unpack_and_constrain(latent, params)


class AutoDiagonalStudentT(StudentTGuide):
    r"""Mean-field guide of independent Student's t in the unconstrained space.

    .. math:: q(z) = \prod_j t_\nu(z_j;\, \mathrm{loc}_j, \mathrm{scale}_j)

    For posteriors with heavier tails than a Gaussian, as :func:`~numpyro_tempered.check_fit` tells: the ratios of
    posterior and fit then have moments. Parameters are ``{prefix}_loc`` and ``{prefix}_scale``, and where the
    degrees of freedom are learned ``{prefix}_df``, one for each coordinate. A standard deviation in the
    unconstrained space is :math:`\mathrm{scale} \sqrt{\nu / (\nu - 2)}`.

    **Exponentials.** The exponential of a Student's t has no mean. Of a positive latent, such as a standard
    deviation, report the median and quantiles of the fit, or the corrected values of ``check_fit``. Nor has a
    log-density a mean that grows as an exponential does, of a log scale or a log link: what is maximised, and
    what ``elbo`` reports, is the ELBO as far as draws reach. With scales of the unconstrained latent well below
    1 nothing shows of it; with scales near 1 the ELBO has a large standard error, and steps jump. Then learn
    ``df``, which grows, or take a Gaussian.

    Args:
        model: NumPyro model, tempered or not.
        df: Degrees of freedom ν, above 2: the fewer, the heavier the tails. None learns them by the ELBO, between
            2.1 and 1,000.
        prefix: Prefix of the guide's parameters.
        init_loc_fn: Where the locations start, as in NumPyro's guides.
        init_scale: Where the scales start.

    Raises:
        ValueError: If ``df`` or ``init_scale`` is no number in its range.

    References:
        Domke18, for Student's t as a guide; Bailey94, for its draws.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.StudentT(7.0, 0.0, 2.0))
        ...     numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)
        >>> fit = nt.fit_svi(jax.random.key(0), model, nt.guides.AutoDiagonalStudentT, 0.5)
        >>> print(f"{fit.params['auto_scale'].item():.0f}")
        2
    """

    scale_name = "scale"
    scale_constraint = constraints.softplus_positive

    def start_df(self) -> Array:
        """Degrees of freedom that are learned, at the start, ``(d,)``."""
        return jnp.full(self.latent_dim, DF)

    def start_scale(self) -> Array:
        """The scales at the start, ``(d,)``."""
        return jnp.full(self.latent_dim, self.init_scale)

    def distribution(self, df: Scalar, loc: Array, scale: Array) -> StudentT:
        """The distribution, of batch shape ``(d,)``."""
        return StudentT(df, loc, scale)

    def get_base_dist(self, params: Params | None = None) -> dist.Distribution:
        """Standard Student's t; learned degrees of freedom are among ``params``."""
        zeros = jnp.zeros(self.latent_dim)
        return StudentT(self._base_df(params), zeros, jnp.ones_like(zeros)).to_event(1)

    def get_transform(self, params: Params) -> IndependentTransform:
        """From the base distribution to the posterior."""
        loc, scale = params[f"{self.prefix}_loc"], params[f"{self.prefix}_scale"]
        return IndependentTransform(AffineTransform(loc, scale), 1)

    def marginal_scale(self, params: Params) -> Array:
        """Scales of the coordinates, ``(d,)``."""
        return params[f"{self.prefix}_scale"]


class AutoMultivariateStudentT(StudentTGuide):
    r"""Guide of one multivariate Student's t, with all correlations, in the unconstrained space.

    .. math:: z = \mathrm{loc} + S \varepsilon \big/ \sqrt{g / \nu}, \quad \varepsilon \sim N(0, I),
              \quad g \sim \chi^2_\nu

    As :class:`AutoDiagonalStudentT`; all coordinates share their degrees of freedom. Parameters are
    ``{prefix}_loc`` and ``{prefix}_scale_tril`` (S, lower triangular), and where the degrees of freedom are
    learned ``{prefix}_df``, one number. The covariance in the unconstrained space is
    :math:`S S^\top \nu / (\nu - 2)`.

    Args:
        model: NumPyro model, tempered or not.
        df: Degrees of freedom ν, above 2: the fewer, the heavier the tails. None learns them by the ELBO, between
            2.1 and 1,000.
        prefix: Prefix of the guide's parameters.
        init_loc_fn: Where the locations start, as in NumPyro's guides.
        init_scale: Where the scales start.

    Raises:
        ValueError: If ``df`` or ``init_scale`` is no number in its range.

    Example:
        >>> import jax, numpyro
        >>> import numpyro_tempered as nt
        >>> def model(y=None):
        ...     theta = numpyro.sample("theta", numpyro.distributions.Normal(0.0, 2.0).expand([2]))
        ...     numpyro.sample("y", numpyro.distributions.Normal(theta.sum(), 1.0), obs=y)
        >>> guide = nt.guides.AutoMultivariateStudentT(model, df=4.5)
        >>> trace = numpyro.handlers.trace(numpyro.handlers.seed(guide, 0)).get_trace(0.5)
        >>> trace["auto_scale_tril"]["value"].shape
        (2, 2)
    """

    scale_name = "scale_tril"
    scale_constraint = constraints.scaled_unit_lower_cholesky

    def start_df(self) -> Array:
        """Degrees of freedom that are learned, at the start, one number."""
        return jnp.asarray(DF)

    def start_scale(self) -> Array:
        """The root at the start, ``(d, d)``."""
        return jnp.identity(self.latent_dim) * self.init_scale

    def distribution(
        self, df: Scalar, loc: Array, scale: Array
    ) -> MultivariateStudentT:
        """The distribution, of event shape ``(d,)``."""
        return MultivariateStudentT(df, loc, scale)

    def get_base_dist(self, params: Params | None = None) -> dist.Distribution:
        """Standard multivariate Student's t; learned degrees of freedom are among ``params``."""
        eye = jnp.identity(self.latent_dim)
        return MultivariateStudentT(
            self._base_df(params), jnp.zeros(self.latent_dim), eye
        )

    def get_transform(self, params: Params) -> LowerCholeskyAffine:
        """From the base distribution to the posterior."""
        return LowerCholeskyAffine(
            params[f"{self.prefix}_loc"], params[f"{self.prefix}_scale_tril"]
        )

    def marginal_scale(self, params: Params) -> Array:
        """Scales of the coordinates, ``(d,)``."""
        return jnp.linalg.norm(params[f"{self.prefix}_scale_tril"], axis=-1)
