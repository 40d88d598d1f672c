"""The priors of a model on its unconstrained scale, as far as a Gaussian's expectation of them is known."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_tempered.core import Array, Model, Params, doubles
from numpyro_tempered.gaussian.descent.base import (
    Derivatives,
    GaussianTerm,
    derivatives_of,
)
from numpyro_tempered.gaussian.descent.laplace_prior import (
    LaplaceTerm,
    derivatives_of_laplace,
    derivatives_of_scalars,
)
from numpyro_tempered.gaussian.expectations.differentiate import which_depend
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import PRIOR_FACTOR, Trace
from numpyro_tempered.handlers.model_loss import FLAT
from numpyro_tempered.handlers.requirements import full_plates, require
from numpyro_tempered.handlers.robust import BetaLikelihood
from numpyro_tempered.handlers.target import check_supports, trace_unconstrained
from numpyro_tempered.infer.guides.prior import unindexed

# Their log-densities are concave near the data alone.
_SHOULDERED = (
    dist.StudentT
    | dist.Cauchy
    | dist.MixtureGeneral
    | dist.MixtureSameFamily
    | BetaLikelihood
)
_FLAT = {
    **FLAT,
    "support": "",
    "no imputation": "",
    "global": ": one flat Gaussian cannot hold that. Integrate it out of the model, or fit_svi with AutoNormal.",
}
_KINK = (
    ", and Hessians at draws miss the curvature there. In fit_gaussian and linear_response, %s; fit_svi takes it "
    "as it is."
)
_PRIOR_BY_DRAWS = {
    "smooth": _KINK
    % "give it a location and scale that are fixed, without a scale handler on it"
}
_DATA_BY_DRAWS = {
    "smooth": _KINK
    % 'name its predictor by numpyro.deterministic and take gauss_hermite(predictor="...")'
}
# Minus the log-density of each element of an unconstrained value, flat.
Potential = Callable[[Array], Array]


class Latents(NamedTuple):
    """The latent sites of a model as parts of a flat vector, in the order of their ``names``.

    Attributes:
        names: Their names.
        unpack: ``flat -> values by site``, unconstrained.
    """

    names: tuple[str, ...]
    unpack: Callable[[Array], Params]

    def _unpack_latent(self, flat: Array) -> Params:
        """``unpack``, under the name that ``model_loss`` calls."""
        return self.unpack(flat)

    def places(self, size: int) -> dict[str, np.ndarray]:
        """The coordinates of each site in a flat vector of that size."""
        return {
            name: np.ravel(np.asarray(at))
            for name, at in self.unpack(jnp.arange(size)).items()
        }


class Priors(NamedTuple):
    """What of a model has a closed form or a quadrature under a Gaussian.

    Attributes:
        term: Its Normal priors with fixed parameters.
        kinks: Its Laplace priors with fixed parameters; None if there are none.
        scalars: For other priors with fixed parameters whose elements are independent: coordinates and potential.
        names: The sites of these priors.
        has_factors: Whether the prior has factors besides.
        is_smooth: Whether no likelihood has a kink.
        is_concave: Whether no likelihood is of a kind with shoulders, which quadrature under a wide q may miss.
    """

    term: GaussianTerm
    kinks: LaplaceTerm | None
    scalars: tuple[tuple[np.ndarray, Potential], ...]
    names: frozenset[str]
    has_factors: bool
    is_smooth: bool
    is_concave: bool

    def derivatives(self, q: Gaussian) -> list[Derivatives]:
        """Minus the expected log-density of these priors, in parts."""
        parts = [derivatives_of(self.term, q)]
        parts += [] if self.kinks is None else [derivatives_of_laplace(self.kinks, q)]
        return parts + (
            [derivatives_of_scalars(self.scalars, q)] if self.scalars else []
        )


def closed_priors(
    model: Model,
    latents: Latents,
    q: Gaussian,
    args: tuple,
    kwargs: dict,
    *,
    by_draws: bool,
) -> Priors:
    """The priors whose expectation needs no draws.

    Raises:
        ValueError: If draws would have to take the expectation of a density with a kink, ``by_draws`` that of a
            likelihood too; or if the model is none that one flat Gaussian holds.
    """

    def trace_at(flat: Array) -> Trace:
        with handlers.block(), full_plates():
            return trace_unconstrained(model, latents.unpack(flat), args, kwargs)

    def parameters(flat: Array) -> dict[str, tuple[Array, ...]]:
        return {
            name: _parameters(site)
            for name, site in likelihood.latent_sites(trace_at(flat)).items()
        }

    one = trace_at(q.loc)
    check_trace(one, latents)
    check_supports(one, trace_at, q.loc)
    # By the traced program: values that agree at two points may still depend on other latents.
    depends = which_depend(parameters, q.loc)
    (d,), dtype = q.loc.shape, q.loc.dtype
    loc, diagonal, blocks, constant, exact = np.zeros(d), np.zeros(d), [], 0.0, set()
    rate, kink_constant, scalars = np.zeros(d), 0.0, []
    for name, at in latents.places(d).items():
        site = one[name]
        is_fixed = not any(jax.tree.leaves(depends[name]))
        moments = _moments(site) if is_fixed else None
        if moments is None:
            require({name: site}, _PRIOR_BY_DRAWS)
            potential = _elementwise(site) if is_fixed else None
            if potential is not None:
                exact.add(name)
                scalars.append((at, potential))
            continue
        mean, precision = moments
        exact.add(name)
        if type(unindexed(site["fn"])) is dist.Laplace:
            loc[at], rate[at] = mean, precision
            kink_constant += np.sum(np.log(2.0 / precision))
            continue
        loc[at] = mean
        if precision.ndim == 2:
            blocks.append((at, precision))
            constant -= 0.5 * np.linalg.slogdet(precision)[1]
        else:
            diagonal[at] = precision
            constant -= 0.5 * np.sum(np.log(precision))
        constant += 0.5 * at.size * np.log(2.0 * np.pi)
    matrix: np.ndarray = diagonal
    if blocks:
        matrix = np.diag(diagonal)
        for at, precision in blocks:
            matrix[np.ix_(at, at)] = precision
    has_factors = any(site.get(PRIOR_FACTOR) for site in one.values())
    data = likelihood.likelihood_sites(one)
    require(data if by_draws else {}, _DATA_BY_DRAWS)
    likelihoods = data.values()
    is_smooth = not any(likelihood.has_kink(site["fn"]) for site in likelihoods)
    is_concave = not any(
        likelihood.is_made_of(site["fn"], _SHOULDERED) for site in likelihoods
    )
    term = GaussianTerm(
        *(
            jnp.asarray(leaf, dtype)
            for leaf in (np.where(rate > 0, 0.0, loc), matrix, constant)
        )
    )
    laplace = LaplaceTerm(
        *(jnp.asarray(leaf, dtype) for leaf in (loc, rate, kink_constant))
    )
    kinks = laplace if rate.any() else None
    return Priors(
        term,
        kinks,
        tuple(scalars),
        frozenset(exact),
        has_factors,
        is_smooth,
        is_concave,
    )


def check_trace(trace: Trace, latents: Latents) -> None:
    """Refuse a model that one flat Gaussian of these latents does not hold.

    Raises:
        ValueError: With the site, and what to do.
    """
    require(trace, _FLAT)
    for site in likelihood.likelihood_sites(trace).values():
        likelihood.check_values(site)
    if unknown := sorted(set(likelihood.latent_sites(trace)) ^ set(latents.names)):
        raise ValueError(
            f"latent sites {unknown} are not in model and guide: build the guide on this model."
        )


def _elementwise(site: likelihood.Site) -> Potential | None:
    """Minus the log-density of each element on the unconstrained scale, flat, where they are independent."""
    fn = unindexed(site["fn"])
    if (
        site["scale"] is not None
        or fn.event_shape
        or isinstance(fn, dist.MaskedDistribution)
    ):
        return None
    transform, shape = biject_to(fn.support), jnp.shape(site["value"])
    if transform.domain.event_dim or transform.codomain.event_dim:
        return None

    def potential(flat: Array) -> Array:
        u = jnp.reshape(flat, shape)
        x = transform(u)
        return -jnp.ravel(fn.log_prob(x) + transform.log_abs_det_jacobian(u, x))

    return potential


def _parameters(site: likelihood.Site) -> tuple[Array, ...]:
    """What of a site shows whether its distribution depends on other latents."""
    fn = unindexed(site["fn"])
    if type(fn) in (dist.Normal, dist.Laplace):
        return jnp.asarray(fn.loc), jnp.asarray(fn.scale)
    if type(fn) is dist.MultivariateNormal:
        return fn.mean, fn.precision_matrix
    potential = _elementwise(site)
    return () if potential is None else (potential(jnp.zeros(jnp.size(site["value"]))),)


def _moments(site: likelihood.Site) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and precision of a site's own Gaussian prior: ``(size,)`` and ``(size,)`` or ``(size, size)``.

    Of a Laplace prior location and rate.
    """
    fn, shape = unindexed(site["fn"]), jnp.shape(site["value"])
    if site["scale"] is not None:
        return None
    if type(fn) in (dist.Normal, dist.Laplace):
        loc, scale = (
            np.ravel(np.broadcast_to(doubles(p), shape)) for p in (fn.loc, fn.scale)
        )
        return loc, 1.0 / (np.square(scale) if type(fn) is dist.Normal else scale)
    if type(fn) is dist.MultivariateNormal and fn.event_shape == shape:
        return doubles(fn.mean), doubles(fn.precision_matrix)
    return None
