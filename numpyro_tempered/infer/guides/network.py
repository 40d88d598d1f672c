"""A mean-field guide for the weights of networks."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoNormal
from numpyro.infer.initialization import init_to_sample
from numpyro.primitives import Messenger

from numpyro_tempered.core import Array, Guide, Model, Params, check_number
from numpyro_tempered.handlers.effects import Message
from numpyro_tempered.handlers.likelihood import Site, latent_sites


def init_by_fan_in(site: Site | None = None) -> Array | Callable[..., object]:
    """A start for the weights of networks, as NumPyro's strategies for ``init_loc_fn``.

    A draw around the prior's mean with its standard deviation, or 1/sqrt(fan-in) where the prior is wider: the
    fan-in of weights of shape ``(..., inputs, outputs)`` is the product of all axes but the last, that of a
    vector its length. Latents on a constrained space, and priors without a variance, start at a draw.

    Args:
        site: A site of the model; None returns the strategy.

    Example:
        >>> from numpyro.infer.autoguide import AutoDiagonalNormal
        >>> import numpyro_tempered as nt
        >>> guide = AutoDiagonalNormal(lambda x: None, init_loc_fn=nt.guides.init_by_fan_in)
    """
    if site is None:
        return functools.partial(init_by_fan_in)
    is_latent = (
        site["type"] == "sample" and not site["is_observed"] and site["value"] is None
    )
    scale = _start_scale(site) if is_latent else None
    if scale is None:
        return init_to_sample(site)
    shape = site["kwargs"].get("sample_shape", ()) + site["fn"].shape()
    mean = jnp.asarray(site["fn"].mean)
    start = mean + scale * jax.random.normal(
        site["kwargs"]["rng_key"], shape, jnp.result_type(mean, float)
    )
    # A Cauchy has no mean.
    return jnp.where(jnp.isfinite(start), start, init_to_sample(site))


class AutoNetworkNormal(AutoNormal):
    """``AutoNormal`` that starts where a network can learn.

    Weights must start apart from each other, in the size that their layer asks for however wide the prior is, and
    near enough to one point that their noise leaves a signal. Parameters are ``{site}_{prefix}_loc`` and
    ``{site}_{prefix}_scale``, as in ``AutoNormal``, and every method of that guide works.

    Args:
        model: NumPyro model, tempered or not.
        prefix: Prefix of the guide's parameters.
        init_loc_fn: Where the means start, :func:`init_by_fan_in` by default.
        init_scale: Of the standard deviations, in those of :func:`init_by_fan_in`; for latents on a constrained
            space, and where a prior has no variance, in units of the unconstrained scale.

    Raises:
        ValueError: If ``init_scale`` is not positive.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(x, y=None):
        ...     hidden = numpyro.sample("hidden", dist.Normal(0.0, 0.5).expand([4, 8]).to_event())
        ...     output = numpyro.sample("output", dist.Normal(0.0, 0.25).expand([8]).to_event())
        ...     numpyro.sample("y", dist.Normal(jnp.tanh(x @ hidden) @ output, 1.0), obs=y)
        >>> guide = nt.guides.AutoNetworkNormal(model)
        >>> draw = numpyro.handlers.trace(numpyro.handlers.seed(guide, 0))
        >>> trace = draw.get_trace(jnp.ones((3, 4)), jnp.ones(3))
        >>> print(trace["hidden_auto_scale"]["value"][0, 0], trace["output_auto_scale"]["value"][0])
        0.1 0.05
    """

    def __init__(
        self,
        model: Model,
        *,
        prefix: str = "auto",
        init_loc_fn: Callable = init_by_fan_in,
        init_scale: float = 0.2,
    ) -> None:
        check_number(init_scale, "init_scale", "(0, inf)")
        self._starts: Params = {}
        super().__init__(
            model, prefix=prefix, init_loc_fn=init_loc_fn, init_scale=init_scale
        )

    def _setup_prototype(self, *args: object, **kwargs: object) -> None:
        super()._setup_prototype(*args, **kwargs)
        for name, site in latent_sites(self.prototype_trace).items():
            shape = jnp.shape(self._init_locs[name])
            start = _start_scale(site)
            scale = jnp.broadcast_to(
                jnp.ones(()) if start is None else start, jnp.shape(site["value"])
            )
            # A subsampled plate holds the values of its first subsample.
            scale = scale if scale.shape == shape else jnp.full(shape, jnp.mean(scale))
            self._starts[f"{name}_{self.prefix}_scale"] = self._init_scale * scale

    def __call__(self, *args: object, **kwargs: object) -> Params:
        """Draw the latent sites."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)
        return _start_params(super().__call__, self._starts)(*args, **kwargs)


class _start_params(Messenger):
    """Other values for params to start at."""

    def __init__(self, fn: Guide, starts: Params) -> None:
        self.starts = starts
        super().__init__(fn)

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "param" and msg["name"] in self.starts:
            msg["args"] = (self.starts[msg["name"]], *msg["args"][1:])


def _start_scale(site: Site) -> Array | None:
    """Standard deviations of the prior, at most 1/sqrt(fan-in); None where the start is another."""
    fn = site["fn"]
    support = getattr(fn.support, "base_constraint", fn.support)
    if support is not dist.constraints.real:
        return None
    try:
        variance = jnp.asarray(fn.variance)
    except NotImplementedError:
        return None
    shape = fn.shape()
    fan_in = max(1, math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape))
    # Not finite: a Cauchy, a Student-t with few degrees of freedom.
    return jnp.where(
        variance < 1.0 / fan_in, jnp.sqrt(variance), 1.0 / math.sqrt(fan_in)
    )
