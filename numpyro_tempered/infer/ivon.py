"""IVON as an optimiser of NumPyro's SVI, and as a transformation of optax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from numpyro.distributions import biject_to
from numpyro.infer import RenyiELBO
from numpyro.infer.autoguide import AutoGuide

from numpyro_tempered.core import (
    Array,
    Params,
    PyTree,
    check_count,
    check_number,
    check_numbers,
    describe,
    key_first,
)
from numpyro_tempered.gaussian import ivon
from numpyro_tempered.gaussian.ivon import Estimate, IvonState, Noise, Schedule
from numpyro_tempered.handlers.numpyro_private import NumPyroOptim
from numpyro_tempered.infer.elbo import loss_of, refuse_expected_nll
from numpyro_tempered.infer.guide_laws import law_of

if TYPE_CHECKING:
    from optax import GradientTransformationExtraArgs


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


def scale_by_ivon(
    num_data: float,
    *,
    alpha: float = 1.0,
    prior_precision: PyTree | Callable[[str], float] = 1.0,
    prior_mean: PyTree | Callable[[str], float] = 0.0,
    init_precision: PyTree | None = None,
    b1: float = 0.9,
    b2: Schedule = 0.99999,
    clip_radius: float = math.inf,
    clip_deviations: float = math.inf,
    clip_change: float = math.inf,
) -> GradientTransformationExtraArgs:
    r"""IVON (Shen24) as a gradient transformation of optax, for a loss that is a mean over data.

    The gradients are taken at draws of the weights by :func:`sample_ivon`, and ``update`` is told of the draws by
    ``weights=``; both have a leading axis where there are several. The direction that it returns is to be scaled
    by minus the step size ρ, a share of the full natural-gradient step, or a schedule of it. The published
    learning rate is ρ over (h₀ + δ), which is ``init_precision`` over alpha times ``num_data``.

    Args:
        num_data: n, the number of data that the loss is a mean over or estimates the mean of.
        alpha: Power on the likelihood, at least 0: the mean loss times alpha n is what the posterior is of.
        prior_precision: One over the prior's variances: a number, a prefix of the weights, such as a number for
            each layer, or a callable from a leaf's path, ``"['dense']['kernel']"``. At least 0; 0 is flat.
        prior_mean: The prior's means, likewise.
        init_precision: One over the variances at the start, likewise; by default alpha n plus that of the prior,
            which is the published start with h₀ = 1.
        b1: :math:`\beta_1`, of the average of gradients.
        b2: :math:`\beta_2`, of the average of curvatures; a number or a callable of the count of steps. The
            variances are those of the start for the first 1/(1 - b2) steps.
        clip_radius: The largest entry of the direction.
        clip_deviations: The same in standard deviations of the posterior: 0.3 is the default of :class:`IVON`.
        clip_change: The largest change of a precision in a step, as a share of it: 0.1 is that of :class:`IVON`.
            For short windows, whose noisy steps would else push precisions up.

    Returns:
        An ``optax.GradientTransformationExtraArgs``, whose state is an :class:`IvonState`. It holds momentum and
        precisions; the means are the parameters.

    Raises:
        ValueError: If an option is out of range; at ``update``, without params or weights.

    References:
        Shen24.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import numpyro_tempered as nt
        >>> x, y = jnp.array([1.0, -1.0, 2.0]), jnp.array([0.9, -1.1, 2.2])
        >>> loss = lambda w: jnp.mean(0.5 * (y - w * x) ** 2)
        >>> ivon = nt.optim.scale_by_ivon(num_data=3, b2=lambda count: 1 - 1 / (100 + count / 4))
        >>> optimiser = optax.chain(ivon, optax.scale_by_learning_rate(0.1))
        >>> def step(carry, key):
        ...     mean, state = carry
        ...     weights = nt.optim.sample_ivon(key, mean, state)
        ...     updates, state = optimiser.update(jax.grad(loss)(weights), state, mean, weights=weights)
        ...     return (optax.apply_updates(mean, updates), state), None
        >>> start = jnp.zeros(())
        >>> keys = jax.random.split(jax.random.key(0), 2000)
        >>> (mean, state), _ = jax.lax.scan(step, (start, optimiser.init(start)), keys)
        >>> print(f"{state[0].precision:.0f}")  # of the prior 1, of the data 6
        7
    """
    # Not a dependency of the package: who chains transformations has it.
    from optax import GradientTransformationExtraArgs

    weight = alpha * check_number(num_data, "num_data", "(0, inf)")
    check_number(weight, "alpha", "[0, inf)")
    ivon.check_rates(
        b1,
        b2,
        clip_radius=clip_radius,
        clip_deviations=clip_deviations,
        clip_change=clip_change,
    )
    for name, prior in (
        ("prior_precision", prior_precision),
        ("init_precision", init_precision),
    ):
        if not callable(prior):
            jax.tree.map(
                lambda value, name=name: check_numbers(value, name, "[0, inf)"), prior
            )

    def init(params: PyTree) -> IvonState:
        if init_precision is not None:
            return ivon.start(params, _by_path(init_precision, params))
        prior = ivon.spread(_by_path(prior_precision, params), params)
        return ivon.start(params, jax.tree.map(lambda s: s + weight, prior))

    def update(
        updates: PyTree,
        state: IvonState,
        params: PyTree | None = None,
        *,
        weights: PyTree | None = None,
        **others: object,
    ) -> tuple[PyTree, IvonState]:
        if params is None or weights is None:
            raise ValueError(
                "the update of IVON needs the means and the draw at which the gradients were taken: "
                "update(grads, state, params, weights=nt.optim.sample_ivon(rng_key, params, state))."
            )
        gradients = jax.tree.map(lambda g: weight * g, updates)
        return ivon.step(
            ivon.estimate(weights, gradients, params),
            params,
            state,
            prior_mean=_by_path(prior_mean, params),
            prior_precision=_by_path(prior_precision, params),
            b1=b1,
            b2=ivon.at(b2, state.num_steps),
            clip_radius=clip_radius,
            clip_deviations=clip_deviations,
            clip_change=clip_change,
        )

    return GradientTransformationExtraArgs(init, update)


@key_first
def sample_ivon(
    rng_key: Array,
    params: PyTree,
    state: PyTree,
    num_samples: int | None = None,
    *,
    noise: Noise = jax.random.normal,
) -> PyTree:
    """Draws of the weights from the posterior of IVON, N(params, 1/precision).

    Args:
        rng_key: Key of the draws.
        params: The means, which are what the optimiser updates.
        state: The state of :func:`scale_by_ivon`, or one of ``optax.chain`` that holds it.
        num_samples: Number of draws, as a leading axis of each leaf; None for one draw without.
        noise: From key, shape and type to standard normal noise. In training, :func:`quick_noise` takes a
            twentieth of the time, and the whole step hardly more than that of Adam.

    Returns:
        The weights, as ``params``.

    Raises:
        ValueError: If the state holds none, or several, of IVON.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> params = {"kernel": jnp.zeros((3, 2))}
        >>> state = nt.optim.scale_by_ivon(num_data=100).init(params)
        >>> nt.optim.sample_ivon(jax.random.key(0), params, state, 5)["kernel"].shape
        (5, 3, 2)
    """
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, IvonState))
    states = [leaf for leaf in leaves if isinstance(leaf, IvonState)]
    if len(states) != 1:
        raise ValueError(
            f"state must hold the state of one scale_by_ivon, got {len(states)} of them in {describe(state)}."
        )
    precision = states[0].precision
    if num_samples is None:
        return ivon.draw(rng_key, params, precision, noise)
    keys = jax.random.split(rng_key, check_count(num_samples, "num_samples", 1))
    return jax.vmap(lambda key: ivon.draw(key, params, precision, noise))(keys)


def _by_path(prior: PyTree | Callable[[str], float], params: PyTree) -> PyTree:
    """What a callable says of each leaf's path; anything else is a prefix already."""
    if not callable(prior):
        return prior
    return jax.tree_util.tree_map_with_path(
        lambda path, _: prior(jax.tree_util.keystr(path)), params
    )
