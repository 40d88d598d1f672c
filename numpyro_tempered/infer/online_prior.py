"""The prior of an online run: another posterior in the guide's terms, and what its Gaussian leaves out."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to
from numpyro.infer import MCMC
from numpyro.infer.util import potential_energy

from numpyro_tempered.core import RUNNING, Array, Model, compiled_map, doubles
from numpyro_tempered.gaussian.expectations import Expectation, monte_carlo
from numpyro_tempered.gaussian.families import FullRank, Gain
from numpyro_tempered.gaussian.families.base import (
    Gaussian,
    Q,
    able,
    convert,
    family_of,
    is_gaussian,
)
from numpyro_tempered.handlers.likelihood import Layout
from numpyro_tempered.handlers.numpyro_private import unpacker
from numpyro_tempered.handlers.target import check_density
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.guide_laws import gaussian_of, order_of
from numpyro_tempered.infer.guides.online import StartsAtPrior
from numpyro_tempered.infer.online_state import OnlineVIState
from numpyro_tempered.infer.tempered_fit import TemperedFit
from numpyro_tempered.online.base import OnlineState, Rule
from numpyro_tempered.report.draws import bind

# Draws for the moments of a posterior that is no Gaussian.
_NUM_DRAWS = 4000


def as_prior(prior: Any, guide: StartsAtPrior) -> Gaussian:
    """The Gaussian that a run of ``guide`` starts at.

    Args:
        prior: An ``OnlineVIState``, a posterior at its data, or a Gaussian on the flat unconstrained scale.
        guide: An online guide that has been set up.

    Returns:
        A Gaussian of the guide's family: the same where ``prior`` is of that family, matched in mean and
        covariance (mean-field: variances) otherwise, by draws where a latent has another support in the model.
        A covariance becomes low rank by its precision's diagonal and strongest directions.

    Raises:
        TypeError: If ``prior`` is none of these, or a fit that is not Gaussian.
        ValueError: If its sites or coordinates are not those of the guide, or its draws are outside of the
            supports of the model.
    """
    theirs: Any = guide
    if isinstance(prior, MCMC) or hasattr(prior, "samples"):
        return _of_draws(bind(prior), guide)
    if isinstance(prior, TemperedFit):
        if prior.source is not None:
            return _of_draws(prior, guide)
        (q, layout), theirs = of_fit(prior), prior.guide
    elif isinstance(state := getattr(prior, "state", prior), OnlineVIState):
        q, layout = state.posterior, state.layout
        theirs = guide if state is prior else prior.online.guide
    elif is_gaussian(prior):
        if jnp.shape(prior.loc) != guide.prior.loc.shape:
            raise ValueError(
                f"prior has {jnp.shape(prior.loc)} coordinates, the model {guide.prior.loc.shape}."
            )
        return convert(prior, guide.prior)
    else:
        raise TypeError(
            f"prior must be an OnlineVIState, a TemperedFit or a Gaussian family, got {type(prior).__name__}."
        )
    _check_layout(layout, guide)
    if not _have_one_scale(theirs, guide):
        return _of_draws(prior, guide)
    return convert(reorder(q, layout, guide.layout), guide.prior)


def _check_layout(layout: Layout, guide: StartsAtPrior) -> None:
    if dict(layout.sites) != dict(guide.layout.sites):
        raise ValueError(
            f"prior has latent sites {dict(layout.sites)}, the model has {dict(guide.layout.sites)}: names and "
            "shapes must agree."
        )


def _have_one_scale(guide: Any, other: StartsAtPrior) -> bool:
    """Whether two guides with the same latents have the same unconstrained scale of each."""
    for name, shape in other.layout.sites:
        one, two = (
            biject_to(each.prototype_trace[name]["fn"].support)
            for each in (guide, other)
        )
        for level in (-1.0, 0.0, 1.0):
            z = jnp.full(shape, level)
            if not np.allclose(one(z), two(z), rtol=1e-4, atol=1e-6):
                return False
    return True


def _of_draws(posterior: Any, guide: StartsAtPrior) -> Gaussian:
    """The Gaussian of the moments of draws on the unconstrained scale of a guide.

    Raises:
        ValueError: If they have no covariance, or are outside of the supports of the guide's model.
    """
    if (target := getattr(posterior, "target", None)) is not None:
        check_density(target, smooth=True)
        _check_layout(target.layout, guide)
    # Draws of a sampler are taken as they are.
    if (draws := getattr(posterior, "samples", None)) is not None:
        draws = {name: jnp.concatenate(values) for name, values in draws.items()}
    else:
        draws = posterior.sample_posterior(jax.random.key(0), (_NUM_DRAWS,))
    columns = []
    for name, shape in guide.layout.sites:
        support = guide.prototype_trace[name]["fn"].support
        if not np.all(support(draws[name])):
            raise ValueError(
                f"draws of the prior's latent {name!r} are outside of its support in the model, {support}: give "
                "the model a support that holds them, or leave prior out."
            )
        if not math.prod(shape):
            continue
        values = compiled_map(biject_to(support).inv, draws[name], 64)
        columns.append(doubles(values).reshape(-1, math.prod(shape)))
    flat = np.concatenate(columns, axis=1)
    cov = np.atleast_2d(np.cov(flat.T))
    try:
        root = np.linalg.cholesky(cov)
    except np.linalg.LinAlgError as error:
        raise ValueError(
            f"{len(flat)} draws of {flat.shape[1]} coordinates have no positive definite covariance, so they "
            "cannot be the prior of an online run: draw more, or fit a Gaussian guide."
        ) from error
    q = FullRank(*map(jnp.asarray, (flat.mean(axis=0), root)))
    return convert(q, guide.prior)


def of_fit(fit: TemperedFit) -> tuple[Gaussian, Layout]:
    """The Gaussian of a fit and the order of its coordinates: with its covariance where it has one.

    Raises:
        TypeError: If the guide is not a Gaussian on the unconstrained scale.
    """
    if (gaussian := gaussian_of(fit.guide, fit.params)) is None:
        raise TypeError(
            f"a posterior by {type(fit.guide).__name__} is not a Gaussian on the unconstrained scale, so it "
            "cannot be the prior of an online run. Fit with AutoNormal or AutoMultivariateNormal."
        )
    return gaussian


def reorder(q: Q, old: Layout, new: Layout) -> Q:
    """``q`` with its coordinates, in the order of ``old``, in that of ``new``."""
    order = order_of(old, dict(new.sites))
    if np.array_equal(order, np.arange(order.size)):
        return q
    return family_of(q).canonical(
        jax.tree.map(lambda leaf: leaf[order] if leaf.ndim else leaf, q)
    )


def residual(
    model: Model, guide: StartsAtPrior, num_particles: int, args: tuple, kwargs: dict
) -> Expectation:
    """The expectation of log q_1 - log π: what the guide's start leaves out of the model's prior, as a loss."""
    prior_only = temper(model, alpha=0.0)
    start = guide.get_posterior(guide.to_params(guide.prior))

    def loss(theta: Array) -> Array:
        latents = unpacker(guide)(theta)
        with RUNNING:
            log_prior = -potential_energy(prior_only, args, kwargs, latents)
        return jnp.sum(start.log_prob(theta)) - log_prior

    return monte_carlo(loss, num_particles=num_particles)


def add_residual(
    rng_key: Array,
    rule: Rule,
    expectation: Expectation,
    state: OnlineState,
    num_iter: int,
) -> OnlineState:
    """The state with the residual of the prior as one more site, at a fixed point of q.

    Raises:
        TypeError: If the rule holds no evidence, or the family is low rank.
        ValueError: If there is no such Gaussian.
    """
    family = family_of(state.posterior)
    if not rule.holds_evidence or family.curvature_form == "rows":
        raise TypeError(
            "the residual of the prior adds to the precision of an accumulating ngvi on "
            f"{able('from_root', 'or')}, got {rule.name} on {family.name}."
        )
    anchor = family.canonical(state.posterior)

    def closer(_: int, q: Gaussian) -> Gaussian:
        # Half way to the update at q, with the same draws each time, so that there is a fixed point.
        at = expectation.evaluate(q, rng_key=rng_key)
        return family.natural_step(
            family.init(q), q, anchor, at.grad_loc, at.grad_var, Gain(0.5, 0.5, 0.5)
        )[0]

    q = jax.jit(lambda start: jax.lax.fori_loop(0, num_iter, closer, start))(anchor)
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(q)):
        raise ValueError(
            "the residual of the prior leaves no Gaussian posterior here: give the sites priors closer to Normal "
            "on the unconstrained scale, or more data first."
        )
    return state._replace(posterior=q, memory=family.init(q))
