"""The prior of an online run: another posterior in the guide's terms, and what its Gaussian leaves out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.linalg import solve_triangular
from numpyro.infer.autoguide import AutoContinuous
from numpyro.infer.util import potential_energy

from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.gaussian.expectations.monte_carlo import monte_carlo
from numpyro_tempered.gaussian.families import FullRank, Gain, LowRank, MeanField, family_of, low_rank
from numpyro_tempered.handlers.likelihood import Layout
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.guides import AutoOnlineLowRankNormal, AutoOnlineMultivariateNormal
from numpyro_tempered.infer.svi import TemperedFit, unconstrained_moments
from numpyro_tempered.online.base import OnlineState, Rule


def as_prior(prior: Any, guide: Any) -> Any:
    """The Gaussian that a run of ``guide`` starts at.

    Args:
        prior: An ``OnlineVIState``, a :class:`TemperedFit`, or a Gaussian on the flat unconstrained scale.
        guide: An online guide that has been set up.

    Returns:
        A Gaussian of the guide's family: the same where ``prior`` is of that family, matched in mean and
        covariance (mean-field: variances) otherwise. A covariance becomes low rank by its precision's diagonal
        and strongest directions.

    Raises:
        TypeError: If ``prior`` is none of these, or a fit that is not Gaussian.
        ValueError: If its sites or coordinates are not those of the guide.
    """
    if isinstance(prior, MeanField | FullRank | LowRank):
        if jnp.shape(prior.loc) != guide.prior.loc.shape:
            raise ValueError(f"prior has {jnp.shape(prior.loc)} coordinates, the model {guide.prior.loc.shape}.")
        return convert(prior, guide)
    if isinstance(prior, TemperedFit):
        q, layout = of_fit(prior)
    elif isinstance(getattr(prior, "layout", None), Layout):
        q, layout = prior.posterior, prior.layout
    else:
        raise TypeError(
            f"prior must be an OnlineVIState, a TemperedFit or a Gaussian family, got {type(prior).__name__}."
        )
    if dict(layout.sites) != dict(guide.layout.sites):
        raise ValueError(
            f"prior has latent sites {dict(layout.sites)}, the model has {dict(guide.layout.sites)}: names and "
            "shapes must agree."
        )
    return convert(reorder(q, layout, guide.layout), guide)


def of_fit(fit: TemperedFit) -> tuple[Any, Layout]:
    """The Gaussian of a fit and the order of its coordinates: with its covariance where it has one."""
    guide = fit.guide
    if isinstance(guide, AutoContinuous):
        q = guide.get_posterior(fit.params)
        if isinstance(q, dist.MultivariateNormal):
            sites = guide._unpack_latent(q.loc)
            return FullRank(q.loc, q.scale_tril), Layout(tuple((k, jnp.shape(v)) for k, v in sites.items()))
    moments = unconstrained_moments(fit)
    flat = MeanField(*(jnp.concatenate([jnp.ravel(v[i]) for v in moments.values()]) for i in (0, 1)))
    return flat, Layout(tuple((name, jnp.shape(v.loc)) for name, v in moments.items()))


def reorder(q: Any, old: Layout, new: Layout) -> Any:
    """``q`` with its coordinates, in the order of ``old``, in that of ``new``."""
    places = old.split(jnp.arange(q.loc.shape[0]))
    order = np.concatenate([np.ravel(places[name]) for name, _ in new.sites])
    if np.array_equal(order, np.arange(order.size)):
        return q
    moved = jax.tree.map(lambda leaf: leaf[order], q)
    return moved._replace(factor=moved.scale_tril) if isinstance(q, FullRank) else moved


def convert(q: Any, guide: Any) -> Any:
    """``q`` in the family of the guide."""
    if isinstance(guide, AutoOnlineMultivariateNormal):
        return FullRank(q.loc, square_root(q))
    if isinstance(guide, AutoOnlineLowRankNormal):
        rank = guide.prior.precision_factor.shape[1]
        return q if isinstance(q, LowRank) and q.precision_factor.shape[1] == rank else to_low_rank(q, rank)
    return q if isinstance(q, MeanField) else MeanField(q.loc, family_of(q).marginal_scale(q))


def square_root(q: Any) -> Array:
    """The Cholesky factor of the covariance, shape ``(d, d)``."""
    if isinstance(q, MeanField):
        return jnp.diag(q.scale)
    if isinstance(q, LowRank):
        root = low_rank.color(q, jnp.eye(q.loc.shape[0], dtype=q.loc.dtype))
        return FullRank(q.loc, root.T).scale_tril
    return q.scale_tril


def to_low_rank(q: Any, rank: int) -> LowRank:
    """The low-rank Gaussian whose precision has the diagonal of that of ``q`` and its strongest directions."""
    (d,) = q.loc.shape
    if isinstance(q, MeanField):
        return LowRank(q.loc, 1.0 / jnp.square(q.scale), jnp.zeros((d, rank), q.loc.dtype))
    if isinstance(q, LowRank):
        columns, diag = q.precision_factor, q.precision_diag
    else:
        root = solve_triangular(q.scale_tril, jnp.eye(d, dtype=q.loc.dtype), lower=True)
        values, vectors = jnp.linalg.eigh(jnp.matmul(root.T, root))
        # Half of the least precision stays on the diagonal, which must be positive whatever the rank.
        diag = jnp.full((d,), 0.5 * values[0])
        columns = vectors * jnp.sqrt(values - diag)[None, :]
    padded = jnp.concatenate([columns, jnp.zeros((d, max(0, rank - columns.shape[1])), q.loc.dtype)], axis=1)
    factor, rest = low_rank.truncate(padded, jnp.ones((padded.shape[1],), q.loc.dtype), rank)
    return LowRank(q.loc, diag + rest, factor)


def residual(model: Any, guide: Any, num_particles: int, args: tuple, kwargs: dict) -> Expectation:
    """The expectation of log q_1 - log π: what the guide's start leaves out of the model's prior, as a loss."""
    prior_only = temper(model, alpha=0.0)
    start = guide.get_posterior(guide.to_params(guide.prior))

    def loss(theta: Array) -> Array:
        log_prior = -potential_energy(prior_only, args, kwargs, guide._unpack_latent(theta))
        return jnp.sum(start.log_prob(theta)) - log_prior

    return monte_carlo(loss, num_particles=num_particles)


def add_residual(
    rng_key: Array, rule: Rule, expectation: Expectation, state: OnlineState, num_iterations: int
) -> OnlineState:
    """The state with the residual of the prior as one more site, at a fixed point of q.

    Raises:
        TypeError: If the rule holds no evidence, or the family is low rank.
        ValueError: If there is no such Gaussian.
    """
    if not rule.holds_evidence or isinstance(state.posterior, LowRank):
        raise TypeError(
            "the residual of the prior adds to the precision of an accumulating ngvi on MeanField or FullRank, "
            f"got {rule.name} on {type(state.posterior).__name__}."
        )
    family, anchor = family_of(state.posterior), state.posterior
    if isinstance(anchor, FullRank):
        anchor = anchor._replace(factor=anchor.scale_tril)

    def closer(_: Any, q: Any) -> Any:
        # Half way to the update at q, with the same draws each time, so that there is a fixed point.
        found = expectation.evaluate(q, rng_key=rng_key)
        half = Gain(0.5, 0.5, 0.5)
        moved, _ = family.natural_step(family.start(q), q, anchor, found.grad_loc, found.grad_var, half)
        return moved

    q = jax.jit(lambda start: jax.lax.fori_loop(0, num_iterations, closer, start))(anchor)
    if not all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(q)):
        raise ValueError(
            "the residual of the prior leaves no Gaussian posterior here: give the sites priors closer to Normal "
            "on the unconstrained scale, or more data first."
        )
    return state._replace(posterior=q, memory=family.start(q))
