"""A tempered posterior on its flat unconstrained scale, and draws with their importance ratios."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.autoguide import AutoContinuous, AutoGuide, AutoNormal
from numpyro.infer.util import (
    constrain_fn,
    log_density,
    potential_energy,
    unconstrain_fn,
)

from numpyro_tempered.core.batching import compiled_map, map_batches
from numpyro_tempered.core.programs import run_program
from numpyro_tempered.core.typing import Array, Model, Params
from numpyro_tempered.gaussian.families.gaussian_mixture import (
    GaussianMixture,
    triangular,
)
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import Trace
from numpyro_tempered.handlers.likelihood import Site
from numpyro_tempered.handlers.numpyro_private import unpacker
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.infer.antithetic import OrderedELBO
from numpyro_tempered.infer.elbo import (
    gaussian_of_laplace,
    has_point_mass,
    trace_guide,
    trace_model,
)
from numpyro_tempered.infer.flat_gaussian import read_normals
from numpyro_tempered.infer.guides.gaussian_mixture import AutoGaussianMixture
from numpyro_tempered.infer.svi import TemperedFit
from numpyro_tempered.select.check.location_scale import LocationScale
from numpyro_tempered.select.check.moments import Moments, of_draws
from numpyro_tempered.select.check.quadrature import moments_of

BATCH = 64
_NEEDS = {
    "plates": ", and weights need all data: leave subsample_size out in the call, or make the model without it.",
    "support": "",
    "continuous": "",
    "global": ": there is no joint density that the weights could compare with.",
}


class Target(NamedTuple):
    """A tempered posterior in flat unconstrained coordinates z, shape ``(d,)``.

    Attributes:
        names: The latent sites, in the order of the coordinates.
        latents: These sites, with a value of each.
        trace: A trace of the model at a draw.
        model: The tempered model, with its fitted params.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        log_joint: The log of the joint density of values by site, every constant included.
        potential: Minus that of z, whose density has the volume of the change of coordinates.
        constrain: From z to values by site.
        flatten: The way back.
        flatten_unconstrained: From unconstrained values by site to z.
    """

    names: tuple[str, ...]
    latents: dict[str, Site]
    trace: Trace
    model: Model
    args: tuple
    kwargs: dict
    log_joint: Callable[[Params], Array]
    potential: Callable[[Array], Array]
    constrain: Callable[[Array], Params]
    flatten: Callable[[Params], Array]
    flatten_unconstrained: Callable[[Params], Array]


class Draws(NamedTuple):
    """S draws of a distribution q with what the posterior thinks of them.

    Attributes:
        log_ratios: log joint - log q, shape ``(S,)``.
        flat: The draws in unconstrained coordinates, ``(S, d)``.
        values: The numbers of all latents side by side, ``(S, k)``.
        moments: Of those numbers under q, exact where that is known.
        law: q where it is a Gaussian or a Student's t in unconstrained coordinates.
        mixture: q where it is a mixture of Gaussians there.
    """

    log_ratios: np.ndarray
    flat: np.ndarray
    values: np.ndarray
    moments: Moments
    law: LocationScale | None
    mixture: GaussianMixture | None = None


def target_of_fit(fit: TemperedFit) -> Target:
    """The tempered posterior of a fit, as :func:`target_of`."""
    # The fitted params of the model, such as the weights of a network, belong to its likelihood.
    model = handlers.substitute(fit.model, data=fit.params)
    sites = trace_guide(fit.rng_key, fit.guide, fit.params, fit.args, fit.kwargs)
    latents = likelihood.latent_sites(
        trace_model(fit.rng_key, model, sites, {}, fit.args, fit.kwargs)
    )
    values = {name: site["value"] for name, site in latents.items()}
    return target_of(fit.rng_key, model, fit.args, fit.kwargs, values)


def target_of(
    rng_key: Array, model: Model, args: tuple, kwargs: dict, values: Params
) -> Target:
    """The posterior of a tempered model.

    Args:
        rng_key: For what the model draws besides its latents.
        model: The tempered model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        values: Values of its latents, for their shapes and supports.

    Raises:
        ValueError: If a latent is missing, discrete or scaled as local, or a plate holds a part of its data.
    """
    unseeded, model = model, handlers.seed(model, rng_key)
    trace = likelihood.get_trace(handlers.substitute(model, data=values), args, kwargs)
    latents = likelihood.latent_sites(trace)
    if set(values) != set(latents):
        raise ValueError(
            f"the latent sites of the model are {sorted(latents)}, got draws of {sorted(values)}."
        )
    require(trace, _NEEDS)
    for name, site in latents.items():
        if site["fn"].shape() != np.shape(values[name]):
            shape = np.shape(values[name])
            raise ValueError(
                f"a draw of {name!r} has shape {site['fn'].shape()} in the model, got draws of {shape}."
            )
    shapes = jax.eval_shape(lambda v: unconstrain_fn(model, args, kwargs, v), values)
    _, unravel = ravel_pytree(
        {name: jnp.zeros(v.shape, v.dtype) for name, v in shapes.items()}
    )
    return Target(
        names=tuple(sorted(values)),
        latents={name: latents[name] for name in sorted(values)},
        trace=trace,
        model=unseeded,
        args=args,
        kwargs=kwargs,
        log_joint=lambda v: log_density(model, args, kwargs, v)[0],
        potential=lambda z: potential_energy(model, args, kwargs, unravel(z)),
        constrain=lambda z: constrain_fn(model, args, kwargs, unravel(z)),
        flatten=lambda v: ravel_pytree(unconstrain_fn(model, args, kwargs, v))[0],
        flatten_unconstrained=lambda v: ravel_pytree(
            {name: v[name] for name in values}
        )[0],
    )


def draws_of_fit(
    rng_key: Array, fit: TemperedFit, target: Target, num_draws: int
) -> Draws:
    """Draws of a fitted guide, weighed by the posterior ``target``, which may be that of another fit.

    Raises:
        ValueError: If the guide is a point, or a ratio is NaN.
    """
    args, kwargs = target.args, target.kwargs
    guide, params = gaussian_of_laplace(
        fit.guide, fit.model, fit.params, rng_key, fit.args, fit.kwargs
    )
    if has_point_mass(rng_key, guide, params, args, kwargs):
        raise ValueError(
            f"the guide {type(fit.guide).__name__} has a latent that is a point, which has no density: there is "
            "nothing to weigh. Fit a guide with a scale."
        )
    loss = OrderedELBO()

    def one(key: Array, params: Params) -> tuple[Array, Array, Array]:
        # The same split of the key as in NumPyro's losses, so the same draw.
        _, guide_key = jax.random.split(key)
        sites = trace_guide(guide_key, guide, params, args, kwargs)
        values = {name: sites[name]["value"] for name in target.names}
        log_ratio = -loss.loss(key, params, target.model, guide, *args, **kwargs)
        return log_ratio, target.flatten(values), ravel_pytree(values)[0]

    def all_of_them(key: Array, params: Params) -> tuple[Array, Array, Array]:
        return map_batches(
            lambda k: one(k, params), jax.random.split(key, num_draws), BATCH
        )

    log_ratios, flat, values = _as_double(run_program(all_of_them, rng_key, params))
    law = law_of_guide(guide, params)
    if law is not None:
        _check_resolution(law, flat)
    moments = moments_of(law, target.latents, values)
    return Draws(
        _checked(log_ratios),
        flat,
        values,
        moments,
        law,
        mixture_of_guide(guide, params),
    )


def require_latents(fit: TemperedFit, target: Target) -> None:
    """Refuse a reference whose model has other latents.

    Raises:
        ValueError: If it has.
    """
    other = target_of_fit(fit).latents
    shapes, expected = (
        {name: np.shape(site["value"]) for name, site in sorted(sites.items())}
        for sites in (other, target.latents)
    )
    if shapes != expected:
        raise ValueError(
            f"the reference has latents of {shapes}, the fit of {expected}: fit the same model."
        )


def _check_resolution(law: LocationScale, flat: np.ndarray) -> None:
    """Refuse a distribution whose draws the precision rounds away.

    Raises:
        ValueError: If some coordinate is so far from 0.
    """
    dtype = jnp.result_type(float)
    rounding = float(np.finfo(dtype).eps) * np.abs(law.loc) / np.sqrt(np.diag(law.cov))
    if rounding.max() > 0.02:
        raise ValueError(
            f"the mean of a latent is {np.abs(law.loc)[rounding.argmax()]:.3g}, which {dtype} keeps to "
            f"{rounding.max():.1g} of its standard deviation: draws would be rounded. Subtract a constant in the "
            "model, or let jax have 64 bits."
        )


def draws_of_values(values: Params, log_densities: np.ndarray, target: Target) -> Draws:
    """Draws of any distribution, ``(S, ...)`` by site, with the log of its density at each, ``(S,)``."""

    def one(draw: Params) -> tuple[Array, Array, Array]:
        return target.log_joint(draw), target.flatten(draw), ravel_pytree(draw)[0]

    log_joint, flat, numbers = _as_double(compiled_map(one, values, BATCH))
    return Draws(
        _checked(log_joint - log_densities), flat, numbers, of_draws(numbers), None
    )


def draws_of_distribution(
    rng_key: Array,
    q: dist.Distribution,
    law: LocationScale | None,
    target: Target,
    num_draws: int,
) -> Draws:
    """Draws of a distribution of the flat unconstrained coordinates."""

    def one(z: Array, log_density: Array) -> tuple[Array, Array]:
        return -target.potential(z) - log_density, ravel_pytree(target.constrain(z))[0]

    def all_of_them(key: Array) -> tuple[Array, Array, Array]:
        z = q.sample(key, (num_draws,))
        log_ratios, values = map_batches(
            lambda pair: one(*pair), (z, q.log_prob(z)), BATCH
        )
        return log_ratios, z, values

    log_ratios, flat, values = _as_double(run_program(all_of_them, rng_key))
    return Draws(
        _checked(log_ratios), flat, values, moments_of(law, target.latents, values), law
    )


def law_of_guide(guide: object, params: Params) -> LocationScale | None:
    """The Gaussian or Student's t of an AutoGuide in flat unconstrained coordinates; None of others.

    Raises:
        ValueError: If a Student's t has no variance.
    """
    if not isinstance(guide, AutoGuide):
        return None
    unpack: Callable[[Array], Params]
    df: np.ndarray | None = None
    is_joint = False
    if type(guide) is AutoNormal:
        normals, layout = read_normals(params, guide.prefix)
        scale = np.asarray(normals.scale, np.float64)
        mean, cov, unpack = normals.loc, np.diag(np.square(scale)), layout.split
    elif isinstance(guide, AutoContinuous):
        try:
            q, unpack = guide.get_posterior(params), unpacker(guide)
        except (
            NotImplementedError
        ):  # of guides with a posterior that is no distribution
            return None
        if isinstance(q, dist.Normal) or (
            isinstance(q, dist.Independent) and isinstance(q.base_dist, dist.Normal)
        ):
            mean, cov = q.mean, np.diag(np.asarray(q.variance))
        elif isinstance(q, dist.MultivariateNormal):
            # In double precision, in which small eigenvalues survive the product.
            root = np.asarray(q.scale_tril, np.float64)
            mean, cov = q.mean, root @ root.T
        elif isinstance(q, dist.LowRankMultivariateNormal):
            factor = np.asarray(q.cov_factor, np.float64)
            mean, cov = (
                q.mean,
                factor @ factor.T + np.diag(np.asarray(q.cov_diag, np.float64)),
            )
        elif isinstance(q, dist.StudentT | dist.MultivariateStudentT):
            mean, cov, df = _of_student_t(q)
            is_joint = isinstance(q, dist.MultivariateStudentT)
        else:
            return None
    else:
        return None
    order = _order(unpack, mean.size)
    return LocationScale(
        np.asarray(mean, np.float64)[order],
        np.asarray(cov, np.float64)[np.ix_(order, order)],
        None if df is None else df[order],
        is_joint,
    )


def _of_student_t(
    q: dist.StudentT | dist.MultivariateStudentT,
) -> tuple[Array, np.ndarray, np.ndarray]:
    """Mean, covariance and degrees of freedom of the coordinates.

    Raises:
        ValueError: If a coordinate has no variance.
    """
    loc = jnp.broadcast_to(q.loc, q.shape())
    df = np.array(np.broadcast_to(np.asarray(q.df, np.float64), loc.shape))
    if df.min() <= 2.0:
        raise ValueError(
            f"the guide is a Student's t of {df.min():.3g} degrees of freedom, which has no variance, and errors "
            "are in standard deviations: take more than 2."
        )
    if isinstance(q, dist.MultivariateStudentT):
        tril = np.asarray(q.scale_tril, np.float64)
        return loc, tril @ tril.T * (df[0] / (df[0] - 2.0)), df
    return (
        loc,
        np.diag(np.square(np.asarray(q.scale, np.float64)) * df / (df - 2.0)),
        df,
    )


def mixture_of_guide(guide: object, params: Params) -> GaussianMixture | None:
    """The mixture of an AutoGaussianMixture in flat unconstrained coordinates; None of other guides."""
    if not isinstance(guide, AutoGaussianMixture):
        return None
    q, order = guide.from_params(params), _order(unpacker(guide), guide.latent_dim)
    return triangular(q._replace(loc=q.loc[:, order], root=q.root[:, order]))


def _order(unpack: Callable[[Array], Params], size: int) -> np.ndarray:
    """Where a guide has the coordinates, which are in the order of the names of their sites here."""
    places = {name: np.ravel(at) for name, at in unpack(jnp.arange(size)).items()}
    return np.concatenate([places[name] for name in sorted(places)])


def _as_double(arrays: tuple[Array, ...]) -> list[np.ndarray]:
    return [np.asarray(array, np.float64) for array in arrays]


def _checked(log_ratios: np.ndarray) -> np.ndarray:
    """The ratios, of which none may be NaN or infinite, and some must not be 0.

    Raises:
        ValueError: If they are.
    """
    if (
        bad := int(np.sum(np.isnan(log_ratios) | (log_ratios == np.inf)))
    ) or not np.isfinite(log_ratios).any():
        raise ValueError(
            f"at {bad or log_ratios.size} of {log_ratios.size} draws the joint density of the model is NaN, "
            "infinite or 0: check the data for NaN, and the fit for parameters at the edge of their support."
        )
    return log_ratios
