"""The prior of spikes and slabs given how many weights are on: uniform over supports of that size."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_tempered.core import Model, Params
from numpyro_tempered.gaussian.families import SpikeSlab
from numpyro_tempered.handlers.effects import layers
from numpyro_tempered.handlers.likelihood import get_trace, latent_sites
from numpyro_tempered.infer.distributions import SpikeAndSlab
from numpyro_tempered.infer.svi import TemperedFit


def sparse_priors(
    model: Model, seed: int, values: Params, args: tuple, kwargs: dict
) -> dict[str, SpikeSlab]:
    """Priors of the SpikeAndSlab sites, in the shapes of the sites, at values of latents and params, or draws."""
    seeded = handlers.substitute(handlers.seed(model, jax.random.key(seed)), values)
    priors = {}
    for name, site in latent_sites(get_trace(seeded, args, kwargs)).items():
        base = layers(site["fn"], "base_dist")[-1]
        if isinstance(base, SpikeAndSlab):
            parts = (base.probs, base.loc, base.scale)
            priors[name] = SpikeSlab(
                *(jnp.broadcast_to(part, site["fn"].shape()) for part in parts)
            )
    return priors


def given_size(fit: TemperedFit) -> TemperedFit:
    r"""A fit with gates of 0 and 1 whose ELBO is under the prior given the size S of its support.

    Independent gates of one probability λ have supports of S in T places with probability
    :math:`\binom{T}{S} \lambda^S (1 - \lambda)^{T - S}`, and given S all are equally likely. The KL to that
    prior is the one to independent gates plus the logarithm of this probability, which is negative:
    :math:`\log \binom{T}{S}` and the KLs of the slabs.

    Raises:
        ValueError: If the probabilities differ, or depend on other latents.
    """
    prior = [
        sparse_priors(fit.model, seed, fit.params, fit.args, fit.kwargs)
        for seed in range(2)
    ]
    probs = np.concatenate(
        [np.ravel(part.probs) for priors in prior for part in priors.values()]
    )
    if np.min(probs) != np.max(probs):
        raise ValueError(
            "num_weights takes a prior with one fixed probability for all weights, got some from "
            f"{np.min(probs):.3g} to {np.max(probs):.3g}: supports of one size are then not equally likely."
        )
    gates = [fit.params[f"{name}_{fit.guide.prefix}_probs"] for name in prior[0]]  # type: ignore[attr-defined]
    size, total = (
        int(sum(np.sum(gate) for gate in gates)),
        sum(gate.size for gate in gates),
    )
    log_prob = log_prob_of_size(size, total, float(probs[0]))
    elbo = fit.elbo._replace(value=fit.elbo.value - log_prob, kl=fit.elbo.kl + log_prob)
    return fit._replace(elbo=elbo)


def log_prob_of_size(size: int, total: int, prob: float) -> float:
    """The log-probability that ``size`` of ``total`` independent gates are on."""
    log_prob = (
        math.lgamma(total + 1) - math.lgamma(size + 1) - math.lgamma(total - size + 1)
    )
    log_prob += size * math.log(prob) if size else 0.0
    return log_prob + ((total - size) * math.log1p(-prob) if size < total else 0.0)
