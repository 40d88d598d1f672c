"""Spikes and slabs with gates of 0 and 1, by backward elimination."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer import SVI, TraceMeanField_ELBO

from numpyro_tempered.core import (
    Array,
    Guide,
    Model,
    Params,
    check_count,
    check_number,
    compile_once,
    hessian_product,
    key_first,
    map_batches,
    run_program,
    runs_models,
)
from numpyro_tempered.gaussian.families import SpikeSlab, spike_slab
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.arguments import check_call
from numpyro_tempered.handlers.powers import Powers, as_operands
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.elbo import trace_model
from numpyro_tempered.infer.fixed_steps import adam_in_units
from numpyro_tempered.infer.guide_laws import has_gates
from numpyro_tempered.infer.guides.spike_slab import AutoSpikeAndSlab
from numpyro_tempered.infer.set_up import build_guide
from numpyro_tempered.infer.support_prior import given_size, sparse_priors
from numpyro_tempered.infer.svi import TemperedFit, finish
from numpyro_tempered.infer.tempered_fit import with_names

# Descents before the first weight goes: all but the last at the full step size.
_NUM_DENSE = 4
# Share of the weights that goes at once at first: what they lose together is not the sum.
_SHARE = 0.2
# Groups that are tried one by one before the end.
_PATIENCE = 3
# Standard deviations of a slab.
_FAR = 20.0


class _Problem(NamedTuple):
    """What is fitted."""

    tempered: temper
    guide: AutoSpikeAndSlab
    args: tuple
    kwargs: dict

    def name(self, site: str, field: str) -> str:
        """The name of a parameter."""
        return f"{site}_{self.guide.prefix}_{field}"

    def values(self, params: Params, field: str) -> Params:
        """A parameter of the sparse sites."""
        return {
            site: params[self.name(site, field)] for site in self.guide.sparse_sites
        }


class _Support(NamedTuple):
    """Slabs fitted to gates, flat and by site."""

    elbo: float
    params: Params
    on: np.ndarray
    gates: Params


class _Programs(NamedTuple):
    """Compiled parts of a fit; gates and params by site."""

    descend: Callable[..., tuple[Params, Array]]
    scores: Callable[..., tuple[Array, ...]]


@key_first
@runs_models
def fit_support(
    rng_key: Array,
    model: Model,
    guide: Callable[[Model], Guide],
    *args: object,
    alpha: Powers = 1.0,
    num_weights: int | None = None,
    num_steps: int = 1000,
    step_size: float = 0.01,
    num_particles: int = 1000,
    **kwargs: object,
) -> TemperedFit:
    r"""Fit factors with gates of 0 and 1 by backward elimination, for models where relaxed gates lose the fit.

    .. math:: q = \prod_{j \in A} N(m_j, \sigma_j^2) \prod_{j \notin A} \delta_0

    Where weights need each other, as in networks, a draw with a few of them off is of another function, and
    relaxed gates end in a fit that can bear such draws. Here no gate is ever undecided. All are on at first, but
    those of weights without effect at the start, and the slabs are fitted from the guide's ``init_loc_fn``, with
    the scales that the curvature there asks for. Then those weights are switched off that the ELBO at the means
    needs least, with all that has no effect without them, a fifth of the weights at once. The slabs are fitted
    again, and where the ELBO is smaller than before, fewer are tried. Every loss is a negative ELBO.

    Where the posterior is undecided about many weights, as with few data, gates between 0 and 1 have the greater
    ELBO: compare with :func:`fit_svi`.

    Args:
        rng_key: Key of the fit.
        model: NumPyro model with :class:`~numpyro_tempered.sparse.SpikeAndSlab` priors.
        guide: :class:`~numpyro_tempered.guides.AutoSpikeAndSlab`, or a callable from model to one. Its
            ``init_loc_fn`` decides, for a network, which optimum is reached:
            see :func:`~numpyro_tempered.guides.start_relu_network`.
        *args: Arguments of the model.
        alpha: Power on the likelihood, as in :func:`fit_svi`.
        num_weights: S, if exactly S weights are to be on. The ELBO is then that under the prior given that S are
            on, uniform over the supports of size S, as in :func:`.round_and_refit`.
        num_steps: Steps of Adam after each change of the support; four times as many before the first.
        step_size: Its step size, which falls to a hundredth, in standard deviations of the slabs' priors.
        num_particles: Draws for the ELBO.
        **kwargs: Keyword arguments of the model.

    Returns:
        A :class:`.TemperedFit` as of :func:`.round_and_refit`, whose ``probs`` are 0 and 1.

    Raises:
        TypeError: If the guide is not an ``AutoSpikeAndSlab``.
        ValueError: If an option is out of range, the model subsamples its data, the start is more than 20
            standard deviations of a slab away, or ``num_weights`` is given and the prior has not one fixed
            probability for all weights.

    References:
        CA-DNN, whose family this is. Optimal brain damage (LeCun, Denker, Solla 1990) for the elimination.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(x, y):
        ...     prior = nt.sparse.SpikeAndSlab(0.25, 0.0, 2.0)
        ...     w = numpyro.sample("w", prior.expand([x.shape[1]]).to_event(1))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
        >>> x = jax.random.normal(jax.random.key(0), (50, 4))
        >>> fit = nt.sparse.fit_support(
        ...     jax.random.key(1), model, nt.guides.AutoSpikeAndSlab, x, 2.0 * x[:, 0], num_steps=200
        ... )
        >>> print(fit.params["w_auto_probs"], fit.params["w_auto_loc"][0].round(1))
        [1. 0. 0. 0.] 2.0
    """
    alpha, call = as_operands(alpha), (args, kwargs)
    args, kwargs = check_call(fit_support, rng_key, model, guide, args, kwargs)
    check_count(num_steps, "num_steps", 1)
    check_number(step_size, "step_size", "(0, inf)")
    tempered = temper(model, alpha=alpha)
    instance = build_guide(guide, model, tempered, alpha)
    if not has_gates(instance):
        raise TypeError(
            f"fit_support takes an AutoSpikeAndSlab guide, got {type(instance).__name__}."
        )
    start_key, fit_key, elbo_key, later_key = jax.random.split(rng_key, 4)
    trace = handlers.trace(handlers.seed(instance, start_key)).get_trace(
        *args, **kwargs
    )
    require(
        instance.prototype_trace,
        {"plates": ", and fit_support needs all data: leave that out."},
    )
    sites = {**trace, **trace_model(start_key, tempered, trace, {}, args, kwargs)}
    params = {
        name: site["value"] for name, site in sites.items() if site["type"] == "param"
    }
    problem = _Problem(tempered, instance, args, kwargs)
    probs = problem.values(params, "probs")
    if num_weights is not None:
        check_count(
            num_weights, "num_weights", 1, sum(value.size for value in probs.values())
        )
    for site in probs:
        del params[problem.name(site, "probs")]
    _check_start(problem, params)
    params |= _scales(problem, params)
    programs = _compile(fit_key, problem, params, num_steps)
    params, gates, losses = _eliminate(
        fit_key, programs, problem, params, num_weights, step_size=step_size
    )
    params |= {problem.name(site, "probs"): gate for site, gate in gates.items()}
    keys = (elbo_key, later_key)
    fit = finish(
        keys,
        tempered,
        instance,
        params,
        losses,
        args,
        kwargs=kwargs,
        num_particles=num_particles,
    )
    fit = with_names(fit, fit_support, model, call)
    return fit if num_weights is None else given_size(fit)


def _eliminate(
    rng_key: Array,
    programs: _Programs,
    problem: _Problem,
    params: Params,
    num_weights: int | None,
    *,
    step_size: float,
) -> tuple[Params, Params, np.ndarray]:
    """The support that elimination ends at: its slabs, its gates, and the losses of all descents."""
    gates = jax.tree.map(jnp.ones_like, problem.values(params, "loc"))
    flat, unravel = ravel_pytree(gates)
    losses: list[np.ndarray] = []

    def descend(params: Params, on: np.ndarray, decay: float = 0.01) -> _Support:
        gates, key = (
            unravel(jnp.asarray(on, flat.dtype)),
            jax.random.fold_in(rng_key, len(losses)),
        )
        params, each = programs.descend(
            params, gates, key, jnp.array([step_size, decay])
        )
        losses.append(np.asarray(each))
        tail = losses[-1][-max(1, len(each) // 10) :]
        return _Support(-float(np.mean(tail)), params, on, gates)

    on = np.ones(flat.size, bool)
    excess = None if num_weights is None else flat.size - num_weights
    scores = programs.scores(params, gates)
    idle = np.asarray(scores[-1])
    # Slabs without effect are as wide as their prior: noise, once others move.
    if idle.any() and excess != 0:
        on = ~_switch_off(on, scores, 1, excess, ~idle)
    best = _Support(-math.inf, params, on, gates)
    for part in range(_NUM_DENSE):
        best = descend(best.params, best.on, 0.01 if part == _NUM_DENSE - 1 else 1.0)
    share, scores, tried = (
        _SHARE,
        programs.scores(best.params, best.gates),
        np.zeros((0, flat.size), bool),
    )
    while (num_on := int(best.on.sum())) > (num_weights or 0) and len(
        tried
    ) < _PATIENCE:
        most = max(1, int(share * num_on))
        excess = None if num_weights is None else num_on - num_weights
        off = _switch_off(best.on, scores, most, excess, np.sum(tried, axis=0) > 0)
        trial = descend(best.params, best.on & ~off)
        if num_weights is not None or trial.elbo > best.elbo:
            best, share, tried = trial, min(2.0 * share, _SHARE), tried[:0]
            scores = programs.scores(best.params, best.gates)
        elif most == 1:
            tried = np.vstack([tried, off])
        else:
            share = 0.5 * most / num_on
    return best.params, best.gates, np.concatenate(losses)


def _switch_off(
    on: np.ndarray,
    scores: tuple[Array, ...],
    most: int,
    excess: int | None,
    tried: np.ndarray,
) -> np.ndarray:
    """Which weights are to go: about ``most``, at least one.

    Args:
        on: Which are on, ``(T,)``.
        scores: What the program ``scores`` returns.
        most: How many may go; a first group may be larger.
        excess: How many must go before the end, and no more; None for no such number.
        tried: Which do not go first.
    """
    loss, saved, idle, is_idle = map(np.asarray, scores)
    # Without effect already: together they go at no loss, but one alone may bring the others back.
    alone = np.eye(len(on), dtype=bool)
    groups = np.where(is_idle[:, None], is_idle, (idle & ~is_idle) | alone) & on
    if excess is not None:
        most = min(most, excess)
        groups = np.where(groups.sum(1, keepdims=True) > excess, alone, groups)
    rank = (groups @ saved - np.where(is_idle, 0.0, loss)) / np.maximum(
        groups.sum(1), 1
    )
    rank = np.where(tried, np.min(rank) - 1.0, rank)
    off = np.zeros(len(on), bool)
    for j in sorted(np.flatnonzero(on), key=lambda j: -rank[j]):
        if off.any() and (off | groups[j]).sum() > most:
            break
        off |= groups[j]
    return off


def _likelihood(problem: _Problem, params: Params) -> Callable[[Params], Array]:
    """The tempered log-likelihood at values of the sparse sites, with the others at their centres."""
    others = {
        name: biject_to(site["fn"].support)(params[problem.name(name, "loc")])
        for name, site in likelihood.latent_sites(problem.guide.prototype_trace).items()
        if name not in problem.guide.sparse_sites
    }

    def log_lik(values: Params) -> Array:
        seeded = handlers.seed(problem.tempered, jax.random.key(0))
        trace = likelihood.get_trace(
            handlers.substitute(seeded, {**params, **others, **values}),
            problem.args,
            problem.kwargs,
        )
        sites = likelihood.likelihood_sites(trace).values()
        parts = [
            jnp.sum(likelihood.weight(site) * likelihood.untempered_log_prob(site))
            for site in sites
        ]
        return sum(parts, jnp.zeros(()))

    return log_lik


def _priors(problem: _Problem, params: Params) -> dict[str, SpikeSlab]:
    """The priors, with the sparse sites at their means."""
    values = params | problem.values(params, "loc")
    return sparse_priors(problem.tempered, 0, values, problem.args, problem.kwargs)


def _check_start(problem: _Problem, params: Params) -> None:
    """Refuse means that a descent, whose steps are in units of the priors, will not bring near them."""
    locs = problem.values(params, "loc")
    for site, prior in _priors(problem, params).items():
        distance = float(jnp.max(jnp.abs(locs[site] - prior.loc) / prior.scale))
        if distance > _FAR:
            raise ValueError(
                f"site {site!r} starts {distance:.3g} deviations of its slab away, which is too far: give "
                "AutoSpikeAndSlab an init_loc_fn in the units of the prior, such as NumPyro's init_to_median."
            )


def _scales(problem: _Problem, params: Params) -> Params:
    """Scales of the slabs to start at: of the conditional posteriors at the start, by the curvature."""

    def scales(params: Params) -> Params:
        flat, unravel = ravel_pytree(problem.values(params, "loc"))
        log_lik, priors = _likelihood(problem, params), _priors(problem, params)
        grad = jax.grad(lambda flat: -log_lik(unravel(flat)))
        basis = jnp.eye(flat.size, dtype=flat.dtype)
        curvature = map_batches(lambda v: v @ hessian_product(grad, flat, v), basis, 16)
        precision, _ = ravel_pytree(
            {site: prior.scale**-2.0 for site, prior in priors.items()}
        )
        return unravel(
            jax.lax.rsqrt(jnp.maximum(jnp.nan_to_num(curvature), 0.0) + precision)
        )

    return {
        problem.name(site, "scale"): scale
        for site, scale in run_program(scales, params).items()
    }


def _compile(
    rng_key: Array, problem: _Problem, params: Params, num_steps: int
) -> _Programs:
    """The programs of a fit."""
    tempered, guide, args, kwargs = problem
    # Of means the scales of their priors, and of scales, by whose softplus they are held, what these start at.
    units = {
        problem.name(site, "loc"): prior.scale
        for site, prior in _priors(problem, params).items()
    }
    units |= {
        problem.name(site, "scale"): jnp.maximum(scale, 1.0)
        for site, scale in problem.values(params, "scale").items()
    }

    def descend(
        params: Params, gates: Params, key: Array, sizes: Array
    ) -> tuple[Params, Array]:
        optim = adam_in_units(
            lambda step: sizes[0] * sizes[1] ** (step / num_steps), units
        )
        svi = SVI(
            tempered,
            tempered.guide(guide.with_gates(gates)),
            optim,
            TraceMeanField_ELBO(),
        )
        state = svi.init(key, *args, init_params=params, **kwargs)
        state, losses = jax.lax.scan(
            lambda s, _: svi.update(s, *args, **kwargs), state, length=num_steps
        )
        return svi.get_params(state), losses

    def scores(params: Params, gates: Params) -> tuple[Array, ...]:
        """Falls of the tempered log-likelihood, KLs, in row j what has no effect without j, and what has none."""
        on, unravel = ravel_pytree(gates)
        locs, priors = problem.values(params, "loc"), _priors(problem, params)
        flat, log_lik = ravel_pytree(locs)[0] * on, _likelihood(problem, params)
        value_and_grad = jax.value_and_grad(lambda flat: log_lik(unravel(flat)))
        value, grad = value_and_grad(flat)

        def without(j: Array) -> tuple[Array, Array]:
            value, grad = value_and_grad(flat.at[j].set(0.0))
            return value, jnp.equal(grad, 0.0)

        def nothing(j: Array) -> tuple[Array, Array]:
            return jnp.zeros((), flat.dtype), jnp.zeros(flat.size, bool)

        # One by one, as those that are off already cost nothing then.
        values, idle = jax.lax.map(
            lambda j: jax.lax.cond(on[j] > 0, without, nothing, j),
            jnp.arange(flat.size),
        )
        on_slab = {
            site: spike_slab.kl(
                SpikeSlab(jnp.ones_like(locs[site]), locs[site], scale), priors[site]
            )
            for site, scale in problem.values(params, "scale").items()
        }
        # Less what a gate costs that is off, infinite where the prior has it on.
        off = {
            site: jnp.maximum(jnp.log1p(-prior.probs), -1e8)
            for site, prior in priors.items()
        }
        saved = {site: kl + off[site] for site, kl in on_slab.items()}
        return value - values, ravel_pytree(saved)[0], idle, jnp.equal(grad, 0.0)

    gates = jax.tree.map(jnp.ones_like, problem.values(params, "loc"))
    return _Programs(
        compile_once(descend, params, gates, rng_key, jnp.ones(2), num_runs=20),
        compile_once(scores, params, gates),
    )
