"""The online rules and the batch methods as optimisers of NumPyro's SVI.

Use them with ``AutoOnlineDiagonalNormal`` or ``AutoOnlineMultivariateNormal`` and ``ExpectedNLL``::

    guide = nt.guides.AutoOnlineDiagonalNormal(model)
    svi = SVI(model, guide, nt.optim.SVB(guide, step_size=0.1), nt.optim.ExpectedNLL())

Another loss, such as ``Trace_ELBO``, raises at the first update. The optimiser's state is that of the rule. SVI's
parameters are unconstrained: gradients are pulled back by the derivative of the guide's own bijection, so the
rule sees loc and scale. A gradient that is not finite rejects the step and is counted, as in ``OnlineVI``.

``NaturalGradient`` and ``ForwardBackward`` are for SVI on the whole data at every step: they converge to the best
Gaussian, which the online rules, for which each step's data are more data, do not. ``nt.fit_gaussian`` adds
backtracking and a stopping rule, for which SVI has no place.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from numpyro.distributions import biject_to

from numpyro_tempered.core import Array, Params
from numpyro_tempered.gaussian.descent import Method, forward_backward, natural_gradient
from numpyro_tempered.gaussian.descent.base import (
    add,
    derivatives_of,
    of_evaluation,
    of_gaussian,
)
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import (
    Gaussian,
    curvature_from_root,
    family_of,
)
from numpyro_tempered.gaussian.ivon import quick_noise
from numpyro_tempered.handlers.numpyro_private import NumPyroOptim
from numpyro_tempered.infer.elbo import ExpectedNLL, require_expected_nll
from numpyro_tempered.infer.guides.online import StartsAtPrior, check_guide
from numpyro_tempered.infer.ivon import IVON, sample_ivon, scale_by_ivon
from numpyro_tempered.online import ngvi, sva, svb
from numpyro_tempered.online.base import (
    Box,
    OnlineState,
    Rule,
    StepSize,
    advance,
    check_prior,
    start,
)
from numpyro_tempered.online.stream import accept_finite

__all__ = [
    "IVON",
    "NGVI",
    "SVA",
    "SVB",
    "ExpectedNLL",
    "ForwardBackward",
    "NaturalGradient",
    "quick_noise",
    "sample_ivon",
    "scale_by_ivon",
]
__dir__ = __all__.copy


class _RuleOptim(NumPyroOptim):
    """An online rule with the interface of a NumPyro optimiser."""

    def __init__(self, guide: StartsAtPrior, rule: Rule) -> None:
        root = check_guide(guide, "an online optimiser").root_param
        transform = biject_to(getattr(guide, f"{root}_constraint"))
        loc, scale = f"{guide.prefix}_loc", f"{guide.prefix}_{root}"

        def init(params: Params) -> OnlineState:
            if others := sorted(set(params) - {loc, scale}):
                raise ValueError(
                    f"an online optimiser steps {loc!r} and {scale!r} only, the model or guide has also the "
                    f"params {others}: give those a prior, or fit them by fit_svi."
                )
            return rule.init(
                guide.from_params({loc: params[loc], scale: transform(params[scale])})
            )

        def update(
            step: Array, grads: Params, state: OnlineState, value: Array
        ) -> OnlineState:
            q = state.posterior
            at = transform.inv(guide.to_params(q)[scale])
            # The bijection acts entry by entry: its slopes turn SVI's gradient into that in the scales.
            _, slopes = jax.jvp(transform, (at,), (jnp.ones_like(at),))
            _, products = jax.jvp(transform, (at,), (grads[scale],))
            in_scale = jnp.where(
                slopes > 0,
                products / jnp.square(jnp.where(slopes > 0, slopes, 1.0)),
                0.0,
            )
            grad_var = curvature_from_root(family_of(q).root(q), in_scale)
            evaluation = Evaluation(value, value, grads[loc], grad_var)
            return accept_finite(
                state, canonical(rule.update(evaluation, state)), evaluation
            )

        def get_params(state: OnlineState) -> Params:
            params = guide.to_params(state.posterior)
            return {loc: params[loc], scale: transform.inv(params[scale])}

        super().__init__(
            lambda *fns: fns, init, update, get_params, update_with_value=True
        )

    def eval_and_update(
        self,
        fn: Callable[[Params], tuple],
        state: tuple,
        forward_mode_differentiation: bool = False,
    ) -> tuple[tuple, tuple]:
        """A step on an objective, which must be an ``ExpectedNLL``: for SVI.

        Raises:
            TypeError: When traced, if it is none.
        """
        with require_expected_nll(fn, type(self).__name__):
            return super().eval_and_update(fn, state, forward_mode_differentiation)

    def eval_and_stable_update(
        self,
        fn: Callable[[Params], tuple],
        state: tuple,
        forward_mode_differentiation: bool = False,
    ) -> tuple[tuple, tuple]:
        """The same for ``SVI.stable_update``.

        Raises:
            TypeError: When traced, if it is none.
        """
        with require_expected_nll(fn, type(self).__name__):
            return super().eval_and_stable_update(
                fn, state, forward_mode_differentiation
            )


def canonical(state: OnlineState) -> OnlineState:
    """The state with a triangular root where it is a matrix, which SVI's parameters are."""
    family = family_of(state.posterior)
    q = family.canonical(state.posterior)
    if q is state.posterior:
        return state
    # Only a natural-gradient step leaves the triangle; its memory is that of the family.
    memory = family.init(q)
    return state._replace(
        posterior=q,
        memory=memory if type(memory) is type(state.memory) else state.memory,
    )


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

    def __init__(
        self, guide: StartsAtPrior, step_size: StepSize, box: Box | None = None
    ) -> None:
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

    def __init__(
        self, guide: StartsAtPrior, step_size: StepSize, box: Box | None = None
    ) -> None:
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
        guide: StartsAtPrior,
        step_size: StepSize = 1.0,
        evidence: float = math.inf,
        box: Box | None = None,
    ) -> None:
        super().__init__(guide, ngvi(step_size, evidence, box=box))


class NaturalGradient(_RuleOptim):
    """:func:`.descent.natural_gradient` as an optimiser, without backtracking.

    For a target that is log-concave. A step to a precision that is not positive definite is rejected and counted.

    Args:
        guide: The guide of the SVI, an ``AutoOnlineDiagonalNormal`` or ``AutoOnlineMultivariateNormal``, whose
            start is the prior, exactly for Normal ones.
        damping: ρ in (0, 1].

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_tempered as nt
        >>> from numpyro.infer import SVI
        >>> def model(y=None):
        ...     theta = numpyro.deterministic("eta", numpyro.sample("theta", dist.Normal()))
        ...     numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> guide = nt.guides.AutoOnlineDiagonalNormal(model)
        >>> loss = nt.optim.ExpectedNLL(nt.expectations.gauss_hermite(predictor="eta"))
        >>> svi = SVI(model, guide, nt.optim.NaturalGradient(guide, damping=1.0), loss)
        >>> state, _ = svi.update(svi.init(jax.random.key(0), y=2.0), y=2.0)
        >>> print(f"{svi.get_params(state)['auto_loc'][0]:.3f}")  # conjugate: exact in a step
        1.000
    """

    def __init__(self, guide: StartsAtPrior, damping: float = 0.5) -> None:
        super().__init__(guide, _batch_rule(natural_gradient(damping)))


class ForwardBackward(_RuleOptim):
    """:func:`.descent.forward_backward` as an optimiser, without backtracking.

    Args:
        guide: The guide of the SVI, an ``AutoOnlineDiagonalNormal`` or ``AutoOnlineMultivariateNormal``, whose
            start is the prior, exactly for Normal ones.
        step_size: h; by default the longest that is admissible. A step above 1/L is rejected and counted, in
            ``state.optim_state[1].rejected`` of SVI's state: look there if nothing moves.
        whiten: Whether to step in the coordinates of the present Gaussian.

    Example:
        >>> import numpyro, numpyro.distributions as dist, numpyro_tempered as nt
        >>> def model(y=None):
        ...     numpyro.sample("y", dist.Normal(numpyro.sample("theta", dist.Normal()), 1.0), obs=y)
        >>> guide = nt.guides.AutoOnlineDiagonalNormal(model)
        >>> optim = nt.optim.ForwardBackward(guide)
    """

    def __init__(
        self, guide: StartsAtPrior, step_size: float | None = None, whiten: bool = True
    ) -> None:
        super().__init__(guide, _batch_rule(forward_backward(step_size, whiten=whiten)))


def _batch_rule(method: Method) -> Rule:
    """A batch method as a rule: the whole data are in each round's evaluation, the prior in the state."""

    def init(prior: Gaussian) -> OnlineState:
        prior = check_prior(prior)
        return start(prior, prior, memory=())

    def update(evaluation: Evaluation, state: OnlineState) -> OnlineState:
        q = state.posterior
        at = add(
            [of_evaluation(q, evaluation), derivatives_of(of_gaussian(state.prior), q)]
        )
        proposal = method.step(q, at, method.max_size(q, at))
        is_too_long = method.is_too_long(q, at)
        return advance(
            state,
            jax.tree.map(lambda leaf: jnp.where(is_too_long, jnp.nan, leaf), proposal),
        )

    return Rule(init, update, curvature="hessian", name=method.name)
