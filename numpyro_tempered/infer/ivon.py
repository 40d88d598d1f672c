"""IVON as an optimiser of NumPyro's SVI."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from numpyro.distributions import biject_to
from numpyro.infer import RenyiELBO
from numpyro.infer.autoguide import AutoGuide

from numpyro_tempered.core import Array, Params, check_number, describe
from numpyro_tempered.gaussian import ivon
from numpyro_tempered.gaussian.ivon import Estimate, IvonState, Schedule
from numpyro_tempered.handlers.numpyro_private import NumPyroOptim
from numpyro_tempered.infer.elbo import loss_of, refuse_expected_nll
from numpyro_tempered.infer.guide_laws import law_of

# The window of the curvature is the longest of these: passes over the data, steps, and a share of all steps.
PASSES, FEWEST, SHARE = 10.0, 100.0, 0.25
# The most that a step changes a precision, as a share of it: far from the optimum the estimates are noise.
CHANGE = 0.1


class IVON(NumPyroOptim):
    r"""Improved variational online Newton (Shen24) for mean-field Normal guides: Adam's price, and error bars.

    For ``AutoNormal``, ``AutoDiagonalNormal`` and :class:`~numpyro_tempered.guides.AutoNetworkNormal`, with any
    ELBO of NumPyro's and any model: tempered, subsampled, a network with priors on its weights. With
    :math:`\mathcal L` the loss, negative ELBO, at q = N(m, σ²) on the unconstrained scale, a step is

    .. math::
        d &= (1 - \beta_2)\,\partial_\sigma\mathcal L / \sigma, \qquad
        \sigma'^{-2} = \sigma^{-2} + d + \tfrac12 d^2 \sigma^2 \\
        u' &= \beta_1 u + (1 - \beta_1)\,\partial_m\mathcal L, \qquad
        m' = m - \rho\,\sigma'^2\,u' / (1 - \beta_1^t)

    which is the published one, as the gradients that SVI takes anyway hold all that it needs: the derivative in
    a scale is the mean of noise times gradient, less that of the entropy. Several draws are the loss's own
    ``num_particles``. The prior is in the loss, so its gradient is averaged with the others.

    The state is three vectors: means, momentum and precisions. That of Adam on such a guide is six.

    Args:
        guide: The guide of the SVI.
        step_size: ρ, a share of the full natural-gradient step; a number or a callable of the count of steps.
        b1: :math:`\beta_1`.
        b2: :math:`\beta_2`, a number or a callable of the count of steps; None for a window
            :math:`1/(1 - \beta_2)` of ten passes over the data, by the guide's subsampling plates, and at least
            100 steps and a quarter of those so far. The paper's 0.99999 leaves scales as they are for 10⁵ steps.
        clip_deviations: The largest entry of :math:`\sigma' u'`: a mean moves at most ρ times as many standard
            deviations.

    Raises:
        TypeError: If the guide is another, or, at the first update, for the loss ``ExpectedNLL``.
        ValueError: If an option is out of range, at ``init`` if model or guide have other params, or, at the
            first update, for a ``RenyiELBO`` of an order above 1.

    References:
        Shen24.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import SVI, Trace_ELBO
        >>> import numpyro_tempered as nt
        >>> @nt.temper(alpha=0.5)
        ... def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> guide = nt.guides.AutoNetworkNormal(model)
        >>> svi = SVI(model, guide, nt.optim.IVON(guide), Trace_ELBO(num_particles=8))
        >>> params = svi.run(jax.random.key(0), 1000, jnp.ones(6), progress_bar=False).params
        >>> print(f"{params['theta_auto_loc']:.1f} {params['theta_auto_scale']:.1f}")  # .75 and .5
        0.7 0.5
    """

    def __init__(
        self,
        guide: AutoGuide,
        step_size: Schedule = 0.1,
        *,
        b1: float = 0.9,
        b2: Schedule | None = None,
        clip_deviations: float = 0.3,
    ) -> None:
        law = law_of(guide)
        if law.has_covariance is not False or law.is_heavy:
            raise TypeError(
                "IVON steps the means and standard deviations of an AutoNormal, AutoDiagonalNormal or "
                f"nt.guides.AutoNetworkNormal, got {describe(guide)}."
            )
        if not callable(step_size):
            check_number(step_size, "step_size", "(0, inf)")
        ivon.check_rates(b1, 0.0 if b2 is None else b2, clip_deviations=clip_deviations)
        transform = biject_to(guide.scale_constraint)

        def init(params: Params) -> tuple[Params, IvonState, Params]:
            mean, empty = _split(params)
            precision = {
                name: transform(params[_scale_of(name)]) ** -2.0 for name in mean
            }
            return mean, ivon.start(mean, precision), empty

        def update(
            count: Array, grads: Params, state: tuple[Params, IvonState, Params]
        ) -> tuple[Params, IvonState, Params]:
            mean, inner, empty = state
            # Each gradient holds the noise, which XLA would draw once more for each use of it.
            grads = jax.lax.optimization_barrier(grads)

            def product(name: str, precision: Array) -> Array:
                # SVI's parameters are unconstrained: its gradient over the slope is that in the scale.
                scale = jax.lax.rsqrt(precision)
                at = transform.inv(scale)
                _, slope = jax.jvp(transform, (at,), (jnp.ones_like(at),))
                return 1.0 + scale * grads[_scale_of(name)] / slope

            products = {
                name: product(name, precision)
                for name, precision in inner.precision.items()
            }
            rate = _growing_window(guide, count) if b2 is None else ivon.at(b2, count)
            direction, inner = ivon.step(
                Estimate({name: grads[name] for name in mean}, products),
                mean,
                inner,
                b1=b1,
                b2=rate,
                clip_deviations=clip_deviations,
                clip_change=CHANGE,
            )
            size = ivon.at(step_size, count)
            mean = jax.tree.map(
                lambda m, d: m - (size * d).astype(m.dtype), mean, direction
            )
            return mean, inner, empty

        def get_params(state: tuple[Params, IvonState, Params]) -> Params:
            mean, inner, empty = state
            scales = {
                _scale_of(k): transform.inv(jax.lax.rsqrt(p))
                for k, p in inner.precision.items()
            }
            return {**mean, **scales, **empty}

        super().__init__(lambda *fns: fns, init, update, get_params)

    def eval_and_update(
        self,
        fn: Callable[[Params], tuple],
        state: tuple,
        forward_mode_differentiation: bool = False,
    ) -> tuple[tuple, tuple]:
        """A step on an objective, which must hold the prior: for SVI.

        Raises:
            TypeError: When traced, if it is an ``ExpectedNLL``.
            ValueError: When traced, if it is a ``RenyiELBO`` of an order above 1.
        """
        _refuse_high_orders(fn)
        with refuse_expected_nll("IVON"):
            return super().eval_and_update(fn, state, forward_mode_differentiation)

    def eval_and_stable_update(
        self,
        fn: Callable[[Params], tuple],
        state: tuple,
        forward_mode_differentiation: bool = False,
    ) -> tuple[tuple, tuple]:
        """The same for ``SVI.stable_update``.

        Raises:
            TypeError: When traced, if it is an ``ExpectedNLL``.
            ValueError: When traced, if it is a ``RenyiELBO`` of an order above 1.
        """
        _refuse_high_orders(fn)
        with refuse_expected_nll("IVON"):
            return super().eval_and_stable_update(
                fn, state, forward_mode_differentiation
            )


def _refuse_high_orders(objective: Callable[..., object]) -> None:
    """Refuse Rényi's bounds which, far from their optimum, are highest at a standard deviation near 0.

    The steps of the means are in standard deviations, so that they would end there too.

    Raises:
        ValueError: If the objective is one.
    """
    loss = loss_of(objective)
    if isinstance(loss, RenyiELBO) and loss.alpha > 1.0:
        raise ValueError(
            f"nt.optim.IVON takes a RenyiELBO of an order alpha below 1, got {loss.alpha}: far from its optimum "
            "a bound of an order above 1 shrinks the standard deviations, by which IVON measures its steps, to "
            "nothing. Use an order below 1, or numpyro.optim.Adam from the params of a fit with Trace_ELBO()."
        )


def _scale_of(loc: str) -> str:
    return f"{loc.removesuffix('_loc')}_scale"


def _split(params: Params) -> tuple[Params, Params]:
    """The means of the guide, and params without a number, as of networks that have priors on all their weights.

    Raises:
        ValueError: If there are others.
    """
    mean = {
        name: params[name]
        for name in params
        if name.endswith("_loc") and _scale_of(name) in params
    }
    rest = {
        name: params[name]
        for name in params
        if name not in mean and name not in map(_scale_of, mean)
    }
    if others := sorted(name for name, value in rest.items() if jax.tree.leaves(value)):
        raise ValueError(
            "IVON steps means and standard deviations of the guide's Normals, model or guide have also params "
            f"{others}: give those a prior, or take an optimiser of numpyro.optim."
        )
    return mean, rest


def _growing_window(guide: AutoGuide, count: Array) -> Array:
    """1 - 1/w of the window w."""
    window = jnp.maximum(max(FEWEST, PASSES * _steps_of_a_pass(guide)), SHARE * count)
    return 1.0 - 1.0 / window


def _steps_of_a_pass(guide: AutoGuide) -> float:
    """How many subsamples the largest subsampling plate of the guide's model takes for all its data."""
    plates = (
        site["args"]
        for site in guide.prototype_trace.values()
        if site["type"] == "plate"
    )
    return max((size / (subsample or size) for size, subsample in plates), default=1.0)
