"""Reading the likelihood of a model: its sites, their powers, and its loss as a function."""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.primitives import Messenger

from numpyro_tempered.core.batching import compiled_map
from numpyro_tempered.core.typing import Array, Model
from numpyro_tempered.gaussian.expectations.base import ModelLoss
from numpyro_tempered.gaussian.expectations.differentiate import depends_on
from numpyro_tempered.handlers.effects import ALPHA, PRIOR_FACTOR, Message, Trace, layers, read_powers
from numpyro_tempered.handlers.numpyro_private import Unpacks, unpacker
from numpyro_tempered.handlers.observed import check_shape

Site = Message
T = TypeVar("T")


@jax.tree_util.register_static
@dataclass(frozen=True)
class Layout:
    """Names and shapes of the latent sites in a flat vector, in order; a pytree without leaves."""

    sites: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, values: dict[str, Array]) -> "Layout":
        """The layout of values by site, in their order."""
        return cls(tuple((name, jnp.shape(value)) for name, value in values.items()))

    def split(self, flat: Array) -> dict[str, Array]:
        """The flat vector as values by site."""
        ends = np.cumsum([math.prod(shape) for _, shape in self.sites])
        parts = jnp.split(flat, ends[:-1])
        return {name: jnp.reshape(part, shape) for (name, shape), part in zip(self.sites, parts, strict=True)}


def get_trace(model: Model, args: tuple, kwargs: dict) -> Trace:
    """The untempered trace of ``model``, with powers and prior factors written on its sites."""
    return handlers.trace(read_powers(model)).get_trace(*args, **kwargs)


def likelihood_sites(trace: Trace) -> Trace:
    """The observed sites that are part of the likelihood, of a trace by :func:`get_trace`."""
    return {
        name: site
        for name, site in trace.items()
        if site["type"] == "sample" and site["is_observed"] and not site.get(PRIOR_FACTOR)
    }


def observed_sites(trace: Trace) -> Trace:
    """The sites of the likelihood with an observed value, which ``numpyro.factor`` sites have not."""
    return {name: site for name, site in likelihood_sites(trace).items() if not is_factor(site)}


def latent_sites(trace: Trace) -> Trace:
    """The latent sample sites of a trace."""
    return {name: site for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]}


def untempered_log_prob(site: Site) -> Array:
    """Log-probability of an observed site without tempering and without scales."""
    return site["fn"].log_prob(site["value"])


def weight(site: Site) -> float:
    """The factor of a site's log-probability: its power times its other scales."""
    return site.get(ALPHA, 1.0) * other_scale(site)


def other_scale(site: Site) -> float:
    """The site's scales without its power, such as N/B of a subsampling plate."""
    return 1.0 if site["scale"] is None else site["scale"]


def common_alpha(trace: Trace) -> float | dict[str, Any]:
    """The power of all likelihood sites; by name where they differ, in lists where data have their own."""
    sites = likelihood_sites(trace)
    alphas = {name: np.asarray(site.get(ALPHA, 1.0), float).tolist() for name, site in sites.items()}
    first = next(iter(alphas.values()), 1.0)
    return first if isinstance(first, float) and all(a == first for a in alphas.values()) else alphas


def scales_beside_alpha(trace: Trace) -> dict[str, float | None]:
    """Scales of likelihood sites beside alpha, where they are not 1; None where they differ within a site."""
    scales = {name: np.unique(np.asarray(other_scale(site))) for name, site in likelihood_sites(trace).items()}
    return {
        name: float(scale[0]) if len(scale) == 1 else None
        for name, scale in scales.items()
        if not np.array_equal(scale, [1.0])
    }


class refuse_subsampling(Messenger):
    """Raises for a plate that holds a part of its data."""

    def process_message(self, msg: Site) -> None:
        """Check a plate."""
        if _is_subsampled(msg):
            size, subsample_size = msg["args"]
            raise ValueError(
                f"plate {msg['name']!r} subsamples {subsample_size} of {size}: an online rule takes the "
                "data it is given as they are. Give the plate the size of the batch; for "
                "subsamples of data that stay take fit_svi."
            )


def model_loss(
    model: Model,
    guide: Unpacks,
    predictor: str | None = None,
    num_outputs: int | None = None,
    *,
    prior_factors: bool = False,
) -> ModelLoss:
    """The untempered losses and the weights of a model, as functions of its flat parameters.

    Args:
        model: NumPyro model, tempered or not.
        guide: An AutoContinuous guide that has been set up.
        predictor: Name of the deterministic site that the likelihood depends on.
        num_outputs: K if that site has shape ``(n, K)`` and a datum depends on K values; None if it has one value
            for each datum.
        prior_factors: Whether the model may hold factors that are prior terms, which the caller counts.

    Returns:
        A :class:`ModelLoss` on data ``(args, kwargs)``.
    """

    def run(theta: Array, args: tuple, kwargs: dict, sites: dict[str, Array]) -> Trace:
        values = unpacker(guide)(theta)

        def constrain(site: Site) -> Array | None:
            if site["type"] != "sample" or site["name"] not in values:
                return None
            # The site's own support, which may depend on other latents.
            return biject_to(site["fn"].support)(values[site["name"]])

        at_theta = handlers.substitute(model, substitute_fn=constrain)
        with refuse_subsampling():
            trace = get_trace(handlers.substitute(at_theta, data=sites), args, kwargs)
        check_likelihood(trace, prior_factors=prior_factors)
        if unknown := sorted(set(latent_sites(trace)) - set(values)):
            raise ValueError(f"latent sites {unknown} are not in the guide: build it on this model.")
        return trace

    def losses(theta: Array, args: tuple, kwargs: dict) -> tuple[Array, Array]:
        sites = likelihood_sites(run(theta, args, kwargs, {})).values()
        values = [-log_prob_of_each(site) for site in sites]
        weights = [jnp.broadcast_to(weight(site), value.shape) for site, value in zip(sites, values, strict=True)]

        def flat(parts: list[Array]) -> Array:
            return jnp.concatenate([jnp.ravel(p).astype(theta.dtype) for p in parts])[None, :]

        return flat(values), flat(weights)

    if predictor is None:
        return ModelLoss(losses, None, None)

    def predict(theta: Array, args: tuple, kwargs: dict) -> Array:
        trace = run(theta, args, kwargs, {})
        if predictor not in trace or trace[predictor]["type"] != "deterministic":
            names = [n for n, site in trace.items() if site["type"] == "deterministic"]
            raise ValueError(
                f"the model has no deterministic site {predictor!r} (it has {names}): name the linear "
                f'predictor by numpyro.deterministic("{predictor}", ...).'
            )
        value = trace[predictor]["value"]
        if num_outputs is not None and jnp.shape(value)[-1:] != (num_outputs,):
            raise ValueError(
                f"predictor {predictor!r} has shape {jnp.shape(value)}, and num_outputs = {num_outputs} needs "
                "that as its last axis."
            )
        return value

    def losses_at(u: Array, theta: Array, args: tuple, kwargs: dict) -> tuple[Array, Array]:
        # The arguments may hold strings and flags: only theta is abstract.
        whole = jax.eval_shape(lambda t: predict(t, args, kwargs), theta).shape
        shape = whole if num_outputs is None else whole[:-1]
        sites = likelihood_sites(run(theta, args, kwargs, {predictor: jnp.reshape(u, whole)}))
        values, weights = [], []
        for name, site in sites.items():
            value = -untempered_log_prob(site)
            if value.shape != shape:
                raise ValueError(
                    f"observed site {name!r} has log-probabilities of shape {value.shape}, predictor "
                    f"{predictor!r} has shape {whole}: one datum must depend on one predictor, or on K of them "
                    "with num_outputs=K. Use monte_carlo() for other models."
                )
            values.append(jnp.ravel(value).astype(theta.dtype))
            weights.append(jnp.ravel(jnp.broadcast_to(weight(site), shape)).astype(theta.dtype))
        return jnp.stack(values), jnp.stack(weights)

    def predict_rows(theta: Array, args: tuple, kwargs: dict) -> Array:
        u = jnp.reshape(predict(theta, args, kwargs), (-1,) if num_outputs is None else (-1, num_outputs))
        u = u.astype(theta.dtype)
        if depends_on(lambda t: losses_at(u, t, args, kwargs)[0], theta):
            raise ValueError(
                f"the likelihood depends on parameters other than through predictor {predictor!r}, and "
                "a quadrature over it would leave those at their prior. Use monte_carlo()."
            )
        return u

    return ModelLoss(losses, predict_rows, losses_at)


def log_prob_of_each(site: Site) -> Array:
    """The untempered log-probabilities of a site, one for each of its data.

    Raises:
        ValueError: If values and distribution broadcast against each other to more.
    """
    check_shape(site)
    return untempered_log_prob(site)


def check_likelihood(trace: Trace, *, prior_factors: bool = False) -> None:
    """Raise ValueError where a trace has prior terms among its data (unless they may be), params, or no data."""
    factors = [name for name, site in trace.items() if site.get(PRIOR_FACTOR)]
    if factors and not prior_factors:
        raise ValueError(
            f"sites {factors} are prior terms, of a reparameterisation or by temper's `factors`: an online rule "
            "holds the prior in its Gaussian and would count them in every round. Give it the model without."
        )
    if params := [name for name, site in trace.items() if site["type"] == "param"]:
        raise ValueError(
            f"the model has params {params}, which do not change: give them a prior, or fit them by fit_svi."
        )
    if not likelihood_sites(trace):
        raise ValueError("the model has no observed site: pass the data that it conditions on.")


def replicate(
    rng_key: Array, model: Model, samples: dict[str, Array], args: tuple, kwargs: dict
) -> dict[str, Array]:
    """Draw replicates of each observed site from its untempered distribution, one for each posterior draw.

    Sites that depend on observed ones see the data, not their replicates.

    Args:
        rng_key: For the replicates.
        model: NumPyro model with its data, tempered or not.
        samples: Latent values with one leading axis of S draws.
        args: The model's positional arguments.
        kwargs: The model's keyword arguments.

    Returns:
        Arrays of shape ``(S, *shape of the data)`` by site; ``numpyro.factor`` sites are left out.

    Raises:
        ValueError: If the distribution of a site has no sampler.
    """

    def one(inputs: tuple[Array, dict[str, Array]]) -> dict[str, Array]:
        key, values = inputs
        trace = get_trace(handlers.substitute(model, data=values), args, kwargs)
        sites = observed_sites(trace)
        keys = jax.random.split(key, max(1, len(sites)))
        return {name: _draw(key, name, site) for key, (name, site) in zip(keys, sites.items(), strict=False)}

    keys = jax.random.split(rng_key, len(next(iter(samples.values()))))
    return compiled_map(one, (keys, samples), 64)


def _draw(rng_key: Array, name: str, site: Site) -> Array:
    fn, shape = site["fn"], jnp.shape(site["value"])
    # Data outside of a plate may have more rows than the distribution that they broadcast against.
    batch = jnp.broadcast_shapes(fn.batch_shape, shape[: len(shape) - fn.event_dim])
    try:
        return (fn if batch == fn.batch_shape else fn.expand(batch)).sample(rng_key)
    except NotImplementedError as error:
        raise ValueError(
            f"posterior_predictive needs to sample from the distribution of site {name!r}, {type(fn).__name__}, "
            f"which cannot be done{f': {error}' if str(error) else '.'}"
        ) from error


def is_factor(site: Site) -> bool:
    """Whether a site is a ``numpyro.factor``, which has no observed value."""
    return site["value"] is not None and jnp.size(site["value"]) == 0


def is_masked(fn: dist.Distribution) -> bool:
    """Whether a distribution is masked, perhaps under others."""
    return any(isinstance(layer, dist.MaskedDistribution) for layer in layers(fn, "base_dist"))


def observed_values(trace: Trace) -> dict[str, Array]:
    """The observed values of a trace by site, factors left out."""
    return {name: site["value"] for name, site in observed_sites(trace).items()}


def subsamples(trace: Trace) -> bool:
    """Whether a plate of the trace holds a part of its data."""
    return any(map(_is_subsampled, trace.values()))


def _is_subsampled(site: Site) -> bool:
    """Whether a site is a plate that holds a part of its data."""
    return site["type"] == "plate" and site["args"][1] not in (None, site["args"][0])


def plain_arrays(tree: T) -> T:
    """The arguments of a model with pandas objects as numpy arrays."""
    return jax.tree.map(lambda leaf: leaf.to_numpy() if hasattr(leaf, "to_numpy") else leaf, tree)
