"""The ELBO by pairs of draws that mirror each other, which leaves its gradients less noise."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions.transforms import Transform
from numpyro.infer import Trace_ELBO
from numpyro.infer.elbo import ELBO
from numpyro.primitives import Messenger

from numpyro_tempered.core import Array, Guide, Model
from numpyro_tempered.handlers.effects import layers
from numpyro_tempered.handlers.likelihood import Site

T = TypeVar("T", bound=ELBO | None)


class OrderedELBO(Trace_ELBO):
    """``Trace_ELBO`` with its sites added in one order; NumPyro's is that of a set, which processes differ in."""

    def __init__(self, num_particles: int = 1, **options: bool) -> None:
        super().__init__(num_particles=num_particles, sum_sites=False, **options)

    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: dict,
        model: Model,
        guide: Guide,
        *args: object,
        **kwargs: object,
    ) -> dict[str, Array | None]:
        """The loss at ``param_map``, as SVI asks for it."""
        result = super().loss_with_mutable_state(
            rng_key, param_map, model, guide, *args, **kwargs
        )
        return {
            **result,
            "loss": sum(
                (result["loss"][name] for name in sorted(result["loss"])), jnp.zeros(())
            ),
        }


def with_order(loss: T) -> T | OrderedELBO:
    """A loss of NumPyro's as one that adds its sites in one order everywhere; others as they are."""
    if loss is None or type(loss) is not Trace_ELBO or not loss.sum_sites:
        return loss
    return OrderedELBO(
        loss.num_particles,
        vectorize_particles=loss.vectorize_particles,
        multi_sample_guide=loss.multi_sample_guide,
    )


class Antithetic(OrderedELBO):
    """``Trace_ELBO`` by antithetic pairs of draws of a guide.

    A draw m + Sε comes with m - Sε where ε is as likely as -ε, as of a Gaussian or a Student's t: the gradient
    in m is then exact where the log-density is quadratic. Other draws, transformed or not, are independent.
    """

    def __init__(self, num_pairs: int = 1) -> None:
        super().__init__()
        self.num_pairs = num_pairs

    def loss(
        self,
        rng_key: Array,
        param_map: dict,
        model: Model,
        guide: Guide,
        *args: object,
        **kwargs: object,
    ) -> Array:
        """The loss at ``param_map``, as SVI asks for it."""

        def one(key: Array, sign: Array) -> Array:
            model_key, guide_key = jax.random.split(key)
            # The loss seeds the guide once more, which changes no site that has a key.
            half = mirror(handlers.seed(guide, guide_key), sign)
            return super(Antithetic, self).loss(
                model_key, param_map, model, half, *args, **kwargs
            )

        # One trace of the model for both halves of all pairs.
        keys = jnp.repeat(jax.random.split(rng_key, self.num_pairs), 2, axis=0)
        signs = jnp.tile(jnp.array([1, -1]), self.num_pairs)
        return jnp.mean(jax.vmap(one)(keys, signs))


class mirror(Messenger):
    """Draws of symmetric sites, times a sign about their centres; others differ by the sign without pattern."""

    def __init__(self, fn: Guide, sign: Array) -> None:
        self.sign = sign
        super().__init__(fn)

    def process_message(self, msg: Site) -> None:
        """Draw a site."""
        key = msg["kwargs"].get("rng_key") if msg["type"] == "sample" else None
        if key is None or msg["is_observed"] or msg["value"] is not None:
            return
        parts = layers(msg["fn"], "base_dist")
        # What only transforms or names the dimensions of the part below it.
        outer = [
            part
            for part in parts
            if isinstance(part, dist.TransformedDistribution | dist.Independent)
        ]
        base = (
            parts[len(outer)]
            if parts[: len(outer)] == outer and len(outer) < len(parts)
            else None
        )
        transforms = [
            transform for part in outer for transform in getattr(part, "transforms", ())
        ]
        is_complete = all(
            isinstance(part, _SHAPES) for part in parts[len(outer) : -1]
        )  # such as not truncated
        is_symmetric = (
            is_complete
            and isinstance(parts[-1], _SYMMETRIC)
            and not any(map(_is_flow, transforms))
        )
        if msg["kwargs"].get("sample_shape") or base is None or not is_symmetric:
            msg["kwargs"]["rng_key"] = jax.random.fold_in(key, self.sign + 1)
            return
        # A Student's t of one degree of freedom has no mean.
        centre = jnp.broadcast_to(parts[-1].loc, base.shape())
        value = centre + self.sign * (base.sample(key) - centre)
        for part in reversed(outer):
            for transform in getattr(part, "transforms", ()):
                value = transform(value)
        msg["value"] = value


def _is_flow(transform: Transform) -> bool:
    """Whether the density of a draw follows from what its computation leaves behind, without an inverse."""
    parts = getattr(transform, "parts", (transform,))
    return any(
        type(part).call_with_intermediates is not Transform.call_with_intermediates
        for part in parts
    )


# What leaves the law of each draw unchanged.
_SHAPES = (dist.ExpandedDistribution, dist.MaskedDistribution, dist.Independent)
_HEAVY = (dist.StudentT, dist.MultivariateStudentT)
_SYMMETRIC = (
    dist.Normal,
    dist.MultivariateNormal,
    dist.LowRankMultivariateNormal,
    *_HEAVY,
)
