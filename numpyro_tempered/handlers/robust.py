"""Effect handlers: ``robust`` puts the beta-divergence in the place of the log-likelihood of a NumPyro model."""

import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Never, overload

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.primitives import Messenger, get_mask

from numpyro_tempered.core import Array, Shape, check_number, is_traced
from numpyro_tempered.handlers import effects, observed, powers
from numpyro_tempered.handlers.effects import P, Q, R, S
from numpyro_tempered.handlers.numpyro_private import STACK
from numpyro_tempered.handlers.power_integral import (
    NoIntegral,
    log_power_integral,
    log_prob_of_counts,
    num_measured,
)

# The power of a density below exp of this is 0 beside 1 in any precision.
FAR = -80.0
# Log-densities of more coordinates add to powers of 0 or infinity.
MOST_COORDINATES = 20
# On the message of a site that was observed inside, under whatever name.
SEEN = "numpyro_tempered_robust"


class Divergence(NamedTuple):
    """What :class:`robust` has put in the place of a log-likelihood.

    Attributes:
        beta: The power of the density.
        unit: The unit of the data; 1 of counts and classes.
    """

    beta: float
    unit: float


class BetaLikelihood(dist.Distribution):
    r"""A distribution whose ``log_prob`` is minus the loss of the beta-divergence.

    .. math:: \frac{(u^d f(y))^\beta - 1}{\beta} - \frac{u^{d\beta} \int f^{1+\beta} - 1}{1 + \beta}

    with the density f of ``base_dist``, the unit u and the dimension d of a datum. It draws from ``base_dist``.
    """

    pytree_data_fields = ("base_dist", "beta", "log_unit")

    def __init__(
        self, base_dist: dist.Distribution, beta: float, log_unit: Array
    ) -> None:
        self.base_dist, self.beta, self.log_unit = base_dist, beta, log_unit
        super().__init__(
            base_dist.batch_shape, base_dist.event_shape, validate_args=False
        )

    @property
    def support(self) -> Any:
        """That of the distribution."""
        return self.base_dist.support

    @property
    def is_discrete(self) -> bool:
        """Whether its values are."""
        return self.base_dist.is_discrete

    def log_prob(self, value: Array) -> Array:
        """Minus the loss of a datum, which is the log-density at beta = 0."""
        shift = num_measured(self.base_dist) * self.log_unit
        size = log_power_integral(self.base_dist, self.beta) + self.beta * shift
        of_datum = self._powered(value, shift)
        return of_datum / self.beta - jnp.expm1(size) / (1.0 + self.beta)

    def _powered(self, value: Array, shift: Array) -> Array:
        """(u^d f(y))^beta - 1; of a datum so far out that the power is 0 a constant, as its slope is infinite."""

        def of(value: Array) -> Array:
            return self.beta * (log_prob_of_counts(self.base_dist, value) + shift)

        if self.is_discrete:
            return jnp.expm1(of(value))
        is_far = ~(jax.lax.stop_gradient(of(value)) > FAR)
        columns = jnp.reshape(is_far, is_far.shape + (1,) * len(self.event_shape))
        return jnp.where(
            is_far, -1.0, jnp.expm1(of(jnp.where(columns, self._inside(), value)))
        )

    def _inside(self) -> Array:
        """A value that is possible, for each datum."""
        feasible = self.support.feasible_like(
            jnp.zeros(self.batch_shape + self.event_shape)
        )
        try:
            mean = jax.lax.stop_gradient(self.mean)
        except NotImplementedError:
            return feasible
        return jnp.where(jnp.isfinite(mean), mean, feasible)

    def sample(self, key: Array, sample_shape: Shape = ()) -> Array:
        """Draws of the distribution."""
        return self.base_dist.sample(key, sample_shape)

    @property
    def mean(self) -> Array:
        """That of the distribution."""
        return self.base_dist.mean

    @property
    def variance(self) -> Array:
        """That of the distribution."""
        return self.base_dist.variance


class as_densities(Messenger):
    """Run a robust model with the densities of its observed sites, as its predictions have them."""


class robust(effects.DecoratedModel[P, R], effects.Handler):
    r"""Replace the log-likelihood by minus the beta-divergence, under which an outlier counts for little.

    Each datum's log-density log f is replaced by

    .. math:: \frac{f(y)^\beta - 1}{\beta} - \frac{\int f^{1 + \beta} - 1}{1 + \beta},

    which is log f at :math:`\beta \to 0`, and whose gradient weighs the score of a datum by :math:`f(y)^\beta`:
    by almost nothing where the model expects no datum. The posterior is a generalised one, under every NumPyro
    algorithm, :func:`fit_svi`, :func:`fit_gaussian` and :class:`OnlineVI`; :class:`temper` scales the loss. Where
    a wrong model makes intervals too narrow take :class:`temper`; where some of the data are not of the model at
    all, no power helps, and this does.

    The density of continuous data has a unit, and its power weighs all data against the prior. ``unit`` is the
    scale at which data are measured in the loss: about the size of their residuals, within a factor of a few, as
    a factor of ten is one of :math:`10^\beta` in the loss. It is a number, and no part of what is fitted.

    Closed forms: Normal, MultivariateNormal, LogNormal, HalfNormal, StudentT, Cauchy, Laplace and its asymmetric
    kin, Logistic, Exponential, Gamma, Chi2, InverseGamma, Weibull, Beta and Uniform. Sums: Bernoulli,
    Categorical, Poisson and Binomial. Quadrature: other smooth densities of one real number with an ``icdf``.

    The result is no likelihood. ELBOs compare where ``beta`` and ``unit`` are the same, and their part
    ``expected_log_lik`` is minus the expected loss. The group ``log_likelihood`` of :func:`to_inference_data` is
    of the density f, and predictions are its draws. A loss that is bounded is not convex: in a stream take
    ``nt.online.rvga()``, as explicit rules overshoot from a prior that is much wider than the data.

    Args:
        fn: Model; None for a decorator or a context manager.
        beta: The power, a positive number, .1 to .5: more for more outliers, at the price of precision where
            there are none (of a Normal mean 4 % of variance at .2, 9 % at .3, 19 % at .5); about 1 for wrong
            labels. Or a mapping from each observed site to it, with 0 for those that are left alone.
        unit: Scale of the residuals of continuous sites, a positive number or a mapping from these to it. Counts
            and classes have none.

    Raises:
        TypeError: If ``fn`` is not callable, or ``beta`` or ``unit`` is no number.
        ValueError: If ``beta`` or ``unit`` is out of range, the model is robust already, or, while it runs, if

            - a continuous site has no unit, or a mapping does not name an observed site,
            - the distribution of a site has neither closed form nor quadrature, or the site is a factor,
            - one datum of a site, which is robust as a whole, has more than 20 coordinates: rows of data are
              batch dimensions, of a plate or a vector, without ``to_event``,
            - a handler outside observes the site, or SVI's guide keeps a model that is not robust,
            - discrete latents of plates are summed out, whose sum has another divergence than its terms.

    References:
        A. Basu, I. Harris, N. Hjort, M. Jones, *Robust and efficient estimation by minimising a density power
        divergence*, Biometrika 1998; A. Ghosh, A. Basu, *Robust Bayes estimation using the density power
        divergence*, AISM 2016; J. Jewson, J. Q. Smith, C. Holmes, *Principles of Bayesian inference using general
        divergence criteria*, Entropy 2018.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     loc = numpyro.sample("loc", dist.Normal(0.0, 10.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(loc, 1.0), obs=y)
        >>> y = jnp.array([-1.2, 0.4, 0.9, -0.3, 0.1, 0.6, -0.5, 30.0])
        >>> models = [model, nt.robust(model, beta=0.3, unit=1.0)]
        >>> fits = [nt.fit_svi(jax.random.key(0), each, AutoNormal, y) for each in models]
        >>> print(*(f"{float(fit.params['loc_auto_loc']):.1f}" for fit in fits))  # without the last it is 0
        3.7 0.0
    """

    def __init__(
        self,
        fn: Callable[P, R] | None = None,
        beta: float | Mapping[str, float] = 0.3,
        *,
        unit: float | Mapping[str, float] | None = None,
    ) -> None:
        if fn is not None and not callable(fn):
            raise TypeError(
                f"robust takes a model, got {fn!r}: pass beta by name, robust(beta=...)."
            )
        self.beta = _check(
            beta, "beta", "[0, inf)" if isinstance(beta, Mapping) else "(0, inf)"
        )
        self.unit = None if unit is None else _check(unit, "unit", "(0, inf)")
        self._sites: set[str] = set()
        if any(isinstance(part, robust) for part in effects.handler_chain(fn)):
            raise ValueError(
                "the model is robust already: name its sites with their own beta in one mapping."
            )
        super().__init__(fn)

    @overload
    def __call__(
        self: "robust[..., Never]", fn: Callable[Q, S], /
    ) -> "robust[Q, S]": ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Run the robust model, or decorate one."""
        if self.fn is not None:
            return super().__call__(*args, **kwargs)
        return self._decorate(args, kwargs)

    def _copy(self, fn: Callable) -> "robust":
        return robust(fn, self.beta, unit=self.unit)

    def __enter__(self) -> None:
        """Start to replace."""
        self._sites = set()
        super().__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop, and refuse names that the model does not have."""
        super().__exit__(exc_type, exc_value, traceback)
        named = {
            name
            for part in (self.beta, self.unit)
            if isinstance(part, dict)
            for name in part
        }
        if (
            exc_type is None
            and get_mask() is not False
            and self._sites
            and (unknown := sorted(named - self._sites))
        ):
            raise ValueError(
                f"the model has no sites {unknown}, which beta or unit names: {sorted(self._sites)}."
            )

    def process_message(self, msg: effects.Message) -> None:
        """Replace the distribution of an observed site."""
        if msg["type"] == "control_flow":
            effects.wrap_bodies(msg, effects.mark_prior_factors)
        if msg["type"] != "sample":
            return
        if effects.SUM_PARTS in msg:
            raise ValueError(
                f"robust met data {msg['name']!r} whose local discrete latents are summed out, and the "
                "divergence of a sum is not known from its terms: observe distributions without such latents."
            )
        self._sites.add(msg["name"])
        if not msg["is_observed"] or (
            msg.get("_control_flow_done") and observed.is_fixed_by_gibbs(msg)
        ):
            return
        msg[SEEN] = True
        if effects.is_unit(msg):
            self._check_factor(msg)
            return
        # `do` sends a copy through the stack a second time.
        if not isinstance(msg["fn"], BetaLikelihood) and not _as_densities():
            self._replace(msg)

    def postprocess_message(self, msg: effects.Message) -> None:
        """Refuse what only the outer handlers decide."""
        if msg["type"] != "sample":
            return
        name = msg["name"]
        if msg["is_observed"]:
            is_seen = (
                msg.get(SEEN) or effects.is_unit(msg) or msg.get(effects.PRIOR_FACTOR)
            )
            if not (
                is_seen
                or self._of(self.beta, name) == 0.0
                or observed.is_fixed_latent(msg)
            ):
                raise ValueError(
                    f"site {name!r} is observed by a handler outside of robust, which leaves it as it is: write "
                    "robust(condition(model, data), ...), or pass the data to the model."
                )
        elif msg["infer"].get("enumerate") == "parallel" and (
            msg["cond_indep_stack"] or msg.get("_control_flow_done")
        ):
            raise ValueError(
                f"robust met the enumerated local latent {name!r}, and the divergence of a sum is not known from "
                "its terms: observe distributions without such latents."
            )

    def _replace(self, msg: effects.Message) -> None:
        """Put the loss of a site in the place of its log-density."""
        name, fn = msg["name"], msg["fn"]
        beta, unit = self._of(self.beta, name), self._of(self.unit, name)
        if beta is None:
            raise ValueError(
                f"observed site {name!r} has no beta: name it, with 0 to leave it alone."
            )
        if not is_traced(beta) and beta == 0.0:
            return
        if unit is None and not effects.base_distribution(fn).is_discrete:
            raise ValueError(
                f"site {name!r} has continuous data, whose density has a unit: pass unit= about the size of "
                "their residuals, or unit=1.0 for the loss in the unit of the data."
            )
        if (size := math.prod(fn.event_shape)) > MOST_COORDINATES:
            raise ValueError(
                f"a datum of site {name!r} has {size} coordinates, and is robust as a whole: its density to the "
                f"power beta is 0, or infinite, with more than {MOST_COORDINATES}. Rows of data are batch "
                "dimensions: put them in a plate, without to_event."
            )
        powers.check_kept_model(self, f"beta = {beta}")
        try:
            log_power_integral(fn, beta)
        except NoIntegral as error:
            raise ValueError(
                f"observed site {name!r} is {error}, whose power has neither a closed form nor a quadrature "
                f"here: leave it alone by beta={{{name!r}: 0.0, ...}}, or observe one of those that robust lists."
            ) from None
        msg["fn"] = BetaLikelihood(fn, beta, jnp.log(1.0 if unit is None else unit))

    def _of(self, values: Any, name: str) -> Any:
        """The value of a site; None if there is none."""
        return values.get(name) if isinstance(values, dict) else values

    def _check_factor(self, msg: effects.Message) -> None:
        """Refuse a factor of the model, unless a mapping says what is made robust."""
        if not effects.is_prior_factor(msg) and not isinstance(self.beta, dict):
            raise ValueError(
                f"factor {msg['name']!r} is no density, and has no divergence: name the sites to be robust by "
                "beta={...}, which leaves factors as they are."
            )


def divergences(trace: effects.Trace) -> dict[str, Divergence]:
    """The sites of a trace whose loss is a divergence."""
    parts = {
        name: effects.base_distribution(site["fn"])
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"]
    }
    return {
        name: Divergence(float(fn.beta), float(jnp.exp(fn.log_unit)))
        for name, fn in parts.items()
        if isinstance(fn, BetaLikelihood)
    }


def _as_densities() -> bool:
    return any(isinstance(handler, as_densities) for handler in STACK)


def _check(value: Any, name: str, interval: str) -> Any:
    """A number, or a dict of them."""
    if not isinstance(value, Mapping):
        check_number(value, name, interval)
        return value if is_traced(value) else float(value)
    if not value or not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"{name} as a mapping must go from site names to numbers, got {value!r}."
        )
    return {
        key: _check(part, f"{name}[{key!r}]", interval) for key, part in value.items()
    }
