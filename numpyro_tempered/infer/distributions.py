"""A distribution with an atom at 0, for sparse models."""

from functools import partial

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import ndtr, ndtri
from numpyro.distributions import constraints
from numpyro.distributions.util import promote_shapes, validate_sample

from numpyro_tempered.core import Array, ArrayLike, Scalar, Shape
from numpyro_tempered.gaussian.families import SpikeSlab, spike_slab


class _RealWithAtom(constraints.Constraint):
    """The real line with a point mass at 0."""

    def __call__(self, x: ArrayLike) -> Array:
        return jnp.isfinite(x)

    def __repr__(self) -> str:
        return "real_with_atom()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RealWithAtom)

    def __hash__(self) -> int:
        return hash(_RealWithAtom)

    def feasible_like(self, prototype: ArrayLike) -> Array:
        """A point of the support."""
        return jnp.zeros_like(prototype)

    def tree_flatten(self) -> tuple[tuple[()], tuple[tuple[()], dict[str, object]]]:
        """No leaves."""
        return (), ((), {})


@dist.biject_to.register(_RealWithAtom)
def _no_density(constraint: constraints.Constraint) -> None:
    # NUTS and the Gaussian guides would sample the slab alone, as if the atom were not there.
    raise ValueError(
        "a latent site is SpikeAndSlab, which has an atom at 0 and so no density on the real line: samplers and "
        "guides that need one would lose the atom. Fit with nt.guides.AutoSpikeAndSlab, or, for MCMC, write the "
        "gates out: a Bernoulli site times a Normal site."
    )


class SpikeAndSlab(dist.Distribution):
    r"""0 with probability 1 - probs, and Normal(loc, scale) otherwise.

    .. math:: \varphi\, N(m, \sigma^2) + (1 - \varphi)\, \delta_0

    As a prior it says that most coefficients are exactly 0. As a factor of a guide it has an analytic KL to such
    a prior (``kl_divergence``), so that ``TraceMeanField_ELBO`` works.

    Draws with exact gates have no derivative in ``probs``: it is NaN, so that no fit silently leaves the gates
    unchanged. (``TraceGraph_ELBO`` takes that gradient by scores.) With a ``temperature`` draws are
    relaxed, a binary concrete gate times a Normal, and have derivatives. What is computed from such draws, with
    the KL of the exact gates, is a relaxed objective, **not** a bound on the evidence: see
    :class:`numpyro_tempered.guides.AutoSpikeAndSlab`. A relaxed draw is 0 with probability 0, so ``log_prob``
    raises, and with it every loss that would need it.

    Args:
        probs: Probabilities φ of the slab, in [0, 1].
        loc: Means m of the slab.
        scale: Standard deviations σ of the slab, positive.
        temperature: None for exact gates; positive for relaxed ones, sharper the smaller.
        validate_args: As in NumPyro.

    Raises:
        ValueError: If a parameter is out of range, while ``validate_args`` is on; from ``log_prob``, ``cdf``,
            ``icdf``, ``mean`` and ``variance`` of a relaxed distribution.

    References:
        CA-DNN; Bai20.

    Example:
        >>> import jax, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> prior = nt.sparse.SpikeAndSlab(0.25, 0.0, 1.0)
        >>> print(prior.sample(jax.random.key(0), (5,)))
        [ 0.         -2.0356805   0.20554423 -0.3535502  -0.76197404]
        >>> q = nt.sparse.SpikeAndSlab(0.5, 1.0, 1.0)
        >>> print(f"{dist.kl_divergence(q, prior):.4f}")  # of the gates .1438, and half of the slabs' .5
        0.3938
    """

    arg_constraints = {  # noqa: RUF012 (NumPyro reads a plain dictionary)
        "probs": constraints.unit_interval,
        "loc": constraints.real,
        "scale": constraints.positive,
    }
    support = _RealWithAtom()
    has_atom = True
    reparametrized_params = ("probs", "loc", "scale")
    pytree_data_fields = ("probs", "loc", "scale", "temperature")

    def __init__(
        self,
        probs: Array | float,
        loc: Array | float = 0.0,
        scale: Array | float = 1.0,
        *,
        temperature: Array | float | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if isinstance(temperature, int | float) and not temperature > 0:
            raise ValueError(
                f"temperature must be positive, or None for exact gates, got {temperature}."
            )
        self.probs, self.loc, self.scale = promote_shapes(probs, loc, scale)
        self.temperature = temperature
        shape = jnp.broadcast_shapes(jnp.shape(probs), jnp.shape(loc), jnp.shape(scale))
        super().__init__(batch_shape=shape, validate_args=validate_args)

    @property
    def has_rsample(self) -> bool:
        """Whether draws have derivatives in the parameters."""
        return self.temperature is not None

    @property
    def slab(self) -> dist.Normal:
        """The Normal distribution of what is not 0."""
        return dist.Normal(self.loc, self.scale).expand(self.batch_shape)

    @property
    def _q(self) -> SpikeSlab:
        return SpikeSlab(
            *(jnp.asarray(part) for part in (self.probs, self.loc, self.scale))
        )

    def sample(self, key: Array, sample_shape: Shape = ()) -> Array:
        """Draws, shape ``sample_shape + batch_shape``."""
        dtype = jnp.result_type(self.probs, self.loc, self.scale, float)
        q = SpikeSlab(
            *(jnp.asarray(part, dtype) for part in (self.probs, self.loc, self.scale))
        )
        return _draw(key, q, self.temperature, self.shape(sample_shape))

    @validate_sample
    def log_prob(self, value: Array) -> Array:
        """Log-density with respect to the point mass at 0 plus Lebesgue measure."""
        self._refuse_relaxed("density")
        return spike_slab.log_density(self._q, value)

    @property
    def mean(self) -> Array:
        """φ m."""
        self._refuse_relaxed("mean")
        return jnp.broadcast_to(self._q.mean, self.batch_shape)

    @property
    def variance(self) -> Array:
        """φ σ² + φ (1 - φ) m²."""
        self._refuse_relaxed("variance")
        return jnp.broadcast_to(self._q.variance, self.batch_shape)

    def cdf(self, value: Array) -> Array:
        """Probability of at most ``value``; jumps at 0 by 1 - φ."""
        self._refuse_relaxed("distribution function")
        return _cdf(self._q, value)

    def icdf(self, q: Array) -> Array:
        """The least value whose ``cdf`` is at least ``q``."""
        self._refuse_relaxed("quantile")
        return _icdf(self._q, q)

    def _refuse_relaxed(self, what: str) -> None:
        if self.temperature is not None:
            raise ValueError(
                f"a SpikeAndSlab with a temperature is a relaxation without a {what}: use its draws only. "
                "In SVI take loss=TraceMeanField_ELBO(), whose KL is analytic, with a SpikeAndSlab prior at the "
                "same site; evaluate with exact gates, by AutoSpikeAndSlab.hard() or temperature=None."
            )


# Compiled whole, as methods are called outside of jit too.
@partial(jax.jit, static_argnums=3)
def _draw(key: Array, q: SpikeSlab, temperature: Scalar | None, shape: Shape) -> Array:
    gate_key, slab_key = jax.random.split(key)
    if temperature is None:
        gate = _exact_gate(q.probs, jax.random.uniform(gate_key, shape, q.probs.dtype))
    else:
        gate = _concrete_gate(
            q.probs, jax.random.logistic(gate_key, shape, q.probs.dtype), temperature
        )
    value = gate * (q.loc + q.scale * jax.random.normal(slab_key, shape, q.probs.dtype))
    # No negative zeros.
    return jnp.where(gate == 0.0, 0.0, value)


@jax.jit
def _cdf(q: SpikeSlab, value: Array) -> Array:
    below = q.probs * ndtr((value - q.loc) / q.scale)
    return below + jnp.where(jnp.greater_equal(value, 0.0), 1.0 - q.probs, 0.0)


@jax.jit
def _icdf(q: SpikeSlab, level: Array) -> Array:
    negative = q.probs * ndtr(-q.loc / q.scale)
    below, above = (
        jnp.less_equal(level, negative),
        jnp.greater(level, negative + (1.0 - q.probs)),
    )
    on_slab = jnp.where(above, level - (1.0 - q.probs), level) / jnp.where(
        jnp.equal(q.probs, 0.0), 1.0, q.probs
    )
    value = q.loc + q.scale * ndtri(jnp.clip(on_slab, 0.0, 1.0))
    # Where a level rounds to 1, the slab ends at the atom.
    return jnp.where(
        below, jnp.minimum(value, 0.0), jnp.where(above, jnp.maximum(value, 0.0), 0.0)
    )


@jax.custom_jvp
def _exact_gate(probs: Array, uniform: Array) -> Array:
    """1 with probability ``probs``, else 0."""
    return jnp.less(uniform, probs).astype(uniform.dtype)


@_exact_gate.defjvp
def _exact_gate_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    gate = _exact_gate(*primals)
    return gate, jnp.nan * jnp.broadcast_to(tangents[0], gate.shape)


def _concrete_gate(probs: Array, logistic: Array, temperature: Array | float) -> Array:
    """The sigmoid of (logit φ + logistic noise) / temperature; exactly 0 and 1 where φ is."""
    info = jnp.finfo(logistic.dtype)
    # Above the smallest number, where the slope of the logit over the temperature would overflow.
    inside = jnp.clip(probs, float(info.tiny) ** 0.75, 1.0 - info.eps)
    logit = jnp.log(inside) - jnp.log1p(-inside)
    gate = jax.nn.sigmoid((logit + logistic) / temperature)
    return jnp.where(probs <= 0.0, 0.0, jnp.where(probs >= 1.0, 1.0, gate))


_compiled_kl = jax.jit(spike_slab.kl)


@dist.kl_divergence.register(SpikeAndSlab, SpikeAndSlab)
def _kl(p: SpikeAndSlab, q: SpikeAndSlab) -> jax.Array:
    # The KL of a relaxed factor is that of its exact gates.
    q._refuse_relaxed("density, so it cannot be a prior, nor have a")
    return _compiled_kl(p._q, q._q)


@dist.kl_divergence.register(dist.Normal, SpikeAndSlab)
def _kl_of_normal(p: dist.Normal, q: SpikeAndSlab) -> jax.Array:
    # A Normal has no mass at 0: its gate is on.
    return _kl(SpikeAndSlab(1.0, p.loc, p.scale), q)


@dist.kl_divergence.register(SpikeAndSlab, dist.Normal)
def _kl_to_normal(p: SpikeAndSlab, q: dist.Normal) -> jax.Array:
    # Infinite where p has an atom: without this rule NumPyro would compare densities of different measures.
    return _kl(p, SpikeAndSlab(1.0, q.loc, q.scale))
