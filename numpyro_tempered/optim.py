"""The online rules as optimisers of NumPyro's SVI.

Use them with ``AutoOnlineDiagonalNormal`` or ``AutoOnlineMultivariateNormal`` and ``ExpectedNLL``::

    guide = nt.guides.AutoOnlineDiagonalNormal(model)
    svi = SVI(model, guide, nt.optim.SVB(guide, step_size=0.1), nt.ExpectedNLL())

The optimiser's state is that of the rule. SVI's parameters are unconstrained: gradients are pulled back
by the derivative of the guide's own bijection, so the rule sees loc and scale. A gradient that is not
finite rejects the step and is counted, as in ``OnlineVI``.
"""

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from numpyro.distributions import biject_to
from numpyro.optim import _NumPyroOptim

from numpyro_tempered._typing import Array
from numpyro_tempered.expectations.base import Evaluation
from numpyro_tempered.families import full_rank
from numpyro_tempered.guides import AutoOnlineDiagonalNormal, AutoOnlineMultivariateNormal
from numpyro_tempered.online.base import Box, OnlineState, Rule, StepSize
from numpyro_tempered.online.ngvi import ngvi
from numpyro_tempered.online.stream import accept_finite
from numpyro_tempered.online.sva import sva
from numpyro_tempered.online.svb import svb

OptimGuide: TypeAlias = AutoOnlineDiagonalNormal | AutoOnlineMultivariateNormal


class _RuleOptim(_NumPyroOptim):
    """An online rule with the interface of a NumPyro optimiser."""

    def __init__(self, guide: OptimGuide, rule: Rule) -> None:
        if not isinstance(guide, OptimGuide):
            raise TypeError(
                "the online optimisers take the guide they step, an AutoOnlineDiagonalNormal or an "
                f"AutoOnlineMultivariateNormal, got {type(guide).__name__}: use OnlineVI for the others."
            )
        full = isinstance(guide, AutoOnlineMultivariateNormal)
        transform = biject_to(guide.scale_tril_constraint if full else guide.scale_constraint)
        loc, scale = f"{guide.prefix}_loc", f"{guide.prefix}_scale" + ("_tril" if full else "")

        def constrained(params: dict[str, Array]) -> Any:
            return guide.from_params({loc: params[loc], scale: transform(params[scale])})

        def init(params: dict[str, Array]) -> OnlineState:
            others = sorted(set(params) - {loc, scale})
            if others:
                raise ValueError(
                    f"the online optimisers step {loc!r} and {scale!r} only, but the model or guide has "
                    f"also the params {others}. Give those a prior, or fit them by fit_svi."
                )
            return rule.init(constrained(params))

        def update(step: Array, grads: dict[str, Array], state: OnlineState, value: Array) -> OnlineState:
            q = state.posterior
            at = transform.inv(guide.to_params(q)[scale])
            # The bijection acts entry by entry: its slopes turn SVI's gradient into that in the scales.
            _, slopes = jax.jvp(transform, (at,), (jnp.ones_like(at),))
            _, placed = jax.jvp(transform, (at,), (grads[scale],))
            in_scale = jnp.where(slopes > 0, placed / jnp.square(jnp.where(slopes > 0, slopes, 1.0)), 0.0)
            grad_var = full_rank.curvature(q, in_scale) if full else in_scale / (2.0 * q.scale)
            evaluation = Evaluation(value, value, grads[loc], grad_var)
            proposal = rule.update(evaluation, state)
            return accept_finite(state, triangular(proposal) if full else proposal, evaluation)

        def get_params(state: OnlineState) -> dict[str, Array]:
            params = guide.to_params(state.posterior)
            return {loc: params[loc], scale: transform.inv(params[scale])}

        super().__init__(lambda *fns: fns, init, update, get_params, update_with_value=True)


def triangular(state: OnlineState) -> OnlineState:
    """The state with a triangular factor, which SVI's parameters are."""
    q = state.posterior._replace(factor=state.posterior.scale_tril)
    # Only a natural-gradient step leaves the triangle; its memory is mean and factor.
    memory = full_rank.start(q) if isinstance(state.memory, full_rank.Memory) else state.memory
    return state._replace(posterior=q, memory=memory)


class SVA(_RuleOptim):
    """:func:`numpyro_tempered.online.sva` as an optimiser.

    Args:
        guide: The guide of the SVI, an ``AutoOnlineDiagonalNormal`` or ``AutoOnlineMultivariateNormal``.
        step_size: η, a float, a callable of the count, or of ``(count, q)``.
        box: Optional bounds on means and scales.

    Example:
        >>> import numpyro, numpyro.distributions as dist, numpyro_tempered as nt
        >>> def model(y=None):
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("theta", dist.Normal()), 1.0), obs=y)
        >>> guide = nt.guides.AutoOnlineDiagonalNormal(model)
        >>> optim = nt.optim.SVA(guide, step_size=0.1)
    """

    def __init__(self, guide: OptimGuide, step_size: StepSize, box: Box | None = None) -> None:
        super().__init__(guide, sva(step_size, box))


class SVB(_RuleOptim):
    """:func:`numpyro_tempered.online.svb` as an optimiser.

    Args:
        guide: The guide of the SVI, an ``AutoOnlineDiagonalNormal`` or ``AutoOnlineMultivariateNormal``.
        step_size: η, a float, a callable of the count, or of ``(count, q)``.
        box: Optional bounds on means and scales.

    Example:
        >>> import numpyro, numpyro.distributions as dist, numpyro_tempered as nt
        >>> def model(y=None):
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("theta", dist.Normal()), 1.0), obs=y)
        >>> guide = nt.guides.AutoOnlineDiagonalNormal(model)
        >>> optim = nt.optim.SVB(guide, step_size=nt.online.svb_rate(0.5))
    """

    def __init__(self, guide: OptimGuide, step_size: StepSize, box: Box | None = None) -> None:
        super().__init__(guide, svb(step_size, box))


class NGVI(_RuleOptim):
    """:func:`numpyro_tempered.online.ngvi` as an optimiser.

    Curvature is an argument of ``ExpectedNLL`` here, which forms the gradients.

    Args:
        guide: The guide of the SVI, an ``AutoOnlineDiagonalNormal`` or ``AutoOnlineMultivariateNormal``.
        step_size: The step, a float, a callable of the count, or of ``(count, q)``.
        evidence: Total evidence the posterior may hold, in data; infinite accumulates.
        box: Optional bounds on means and scales.

    Example:
        >>> import numpyro, numpyro.distributions as dist, numpyro_tempered as nt
        >>> def model(y=None):
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("theta", dist.Normal()), 1.0), obs=y)
        >>> guide = nt.guides.AutoOnlineDiagonalNormal(model)
        >>> optim = nt.optim.NGVI(guide)
    """

    def __init__(
        self,
        guide: OptimGuide,
        step_size: StepSize = 1.0,
        evidence: float = math.inf,
        box: Box | None = None,
    ) -> None:
        super().__init__(guide, ngvi(step_size, evidence, box=box))
