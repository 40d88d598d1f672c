"""The loss of a model as a function of its flat parameters."""

from collections.abc import Callable

import jax.numpy as jnp
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_tempered.core import RUNNING, Array, Model, Shape
from numpyro_tempered.gaussian.expectations.base import ModelLoss
from numpyro_tempered.gaussian.expectations.differentiate import depends_on
from numpyro_tempered.handlers.effects import Trace, base_distribution
from numpyro_tempered.handlers.likelihood import (
    KINKED,
    Site,
    get_trace,
    has_kink,
    latent_sites,
    likelihood_sites,
    log_prob_of_each,
    untempered_log_prob,
    weight,
)
from numpyro_tempered.handlers.numpyro_private import Unpacks, unpacker
from numpyro_tempered.handlers.requirements import full_plates, require
from numpyro_tempered.handlers.robust import BetaLikelihood

# What one flat Gaussian of all latents asks of a model, and an online rule besides.
FLAT = {
    "params": ", which do not change: give them a prior, or fit them by fit_svi.",
    "data": "",
}
ONLINE = {
    "no prior terms": ", of a reparameterisation or by temper's `factors`: an online rule holds the prior in its "
    "Gaussian and would count them in every round. Give it the model without.",
    **FLAT,
}


def model_loss(
    model: Model,
    guide: Unpacks,
    predictor: str | None = None,
    num_outputs: int | None = None,
    *,
    prior_factors: bool = False,
    alone: bool = True,
) -> ModelLoss:
    """The untempered losses and the weights of a model, as functions of its flat parameters.

    Args:
        model: NumPyro model, tempered or not.
        guide: An AutoContinuous guide that has been set up.
        predictor: Name of the deterministic site that the likelihood depends on.
        num_outputs: K if that site has shape ``(n, K)`` and a datum depends on K values; None if it has one value
            for each datum.
        prior_factors: Whether the model may hold factors that are prior terms, which the caller counts.
        alone: Whether the losses must depend on the parameters through the predictor alone.

    Returns:
        A :class:`ModelLoss` on data ``(args, kwargs)``.
    """

    def as_is(site: Site) -> None:
        """The site's own value."""

    def run(
        theta: Array, args: tuple, kwargs: dict, fill: Callable[[Site], Array | None]
    ) -> Trace:
        values = unpacker(guide)(theta)

        def constrain(site: Site) -> Array | None:
            if site["type"] != "sample" or site["name"] not in values:
                return None
            # The site's own support, which may depend on other latents.
            return biject_to(site["fn"].support)(values[site["name"]])

        at_theta = handlers.substitute(model, substitute_fn=constrain)
        with RUNNING, full_plates():
            trace = get_trace(
                handlers.substitute(at_theta, substitute_fn=fill), args, kwargs
            )
        require(trace, FLAT if prior_factors else ONLINE)
        if unknown := sorted(set(latent_sites(trace)) - set(values)):
            raise ValueError(
                f"latent sites {unknown} are not in the guide: build it on this model."
            )
        return trace

    def losses(theta: Array, args: tuple, kwargs: dict) -> tuple[Array, Array]:
        sites = likelihood_sites(run(theta, args, kwargs, as_is)).values()
        values = [-log_prob_of_each(site) for site in sites]
        weights = [
            jnp.broadcast_to(weight(site), value.shape)
            for site, value in zip(sites, values, strict=True)
        ]

        def flat(parts: list[Array]) -> Array:
            return jnp.concatenate([jnp.ravel(p).astype(theta.dtype) for p in parts])[
                None, :
            ]

        return flat(values), flat(weights)

    if predictor is None:
        return ModelLoss(losses, None, None)

    def predict(theta: Array, args: tuple, kwargs: dict) -> Array:
        return _predictor_of(run(theta, args, kwargs, as_is), predictor, num_outputs)

    def sites_given(
        u: Array, theta: Array, args: tuple, kwargs: dict
    ) -> tuple[Trace, Shape, Shape]:
        form: Shape = ()

        def fill(site: Site) -> Array | None:
            nonlocal form
            if site["name"] != predictor or site["type"] != "deterministic":
                return None
            # The model's own value has the shape that u is to take.
            form = jnp.shape(site["value"])
            return jnp.reshape(u, form)

        sites = likelihood_sites(run(theta, args, kwargs, fill))
        return sites, form if num_outputs is None else form[:-1], form

    def losses_at(
        u: Array, theta: Array, args: tuple, kwargs: dict
    ) -> tuple[Array, Array]:
        sites, shape, form = sites_given(u, theta, args, kwargs)
        values, weights = [], []
        for name, site in sites.items():
            value = -untempered_log_prob(site)
            if value.shape != shape:
                raise ValueError(
                    f"observed site {name!r} has log-probabilities of shape {value.shape}, predictor "
                    f"{predictor!r} has shape {form}: one datum must depend on one predictor, or on K of them "
                    "with num_outputs=K. Use monte_carlo() for other models."
                )
            values.append(jnp.ravel(value).astype(theta.dtype))
            weights.append(
                jnp.ravel(jnp.broadcast_to(weight(site), shape)).astype(theta.dtype)
            )
        return jnp.stack(values), jnp.stack(weights)

    def kinks(u: Array, theta: Array, args: tuple, kwargs: dict) -> tuple[Array, Array]:
        sites, shape, _ = sites_given(u, theta, args, kwargs)
        rows = [_kinks_of(site, shape) for site in sites.values()]
        locs, outcomes = (
            jnp.stack(column).astype(theta.dtype) for column in zip(*rows, strict=True)
        )
        return locs, outcomes

    def predict_rows(theta: Array, args: tuple, kwargs: dict) -> Array:
        u = jnp.reshape(
            predict(theta, args, kwargs),
            (-1,) if num_outputs is None else (-1, num_outputs),
        )
        u = u.astype(theta.dtype)
        if alone and depends_on(lambda t: losses_at(u, t, args, kwargs)[0], theta):
            raise ValueError(
                f"the likelihood depends on parameters other than through predictor {predictor!r}, and "
                "a quadrature over it would leave those at their prior. Use monte_carlo()."
            )
        return u

    return ModelLoss(
        losses, predict_rows, losses_at, kinks=kinks if num_outputs is None else None
    )


def _kinks_of(site: Site, shape: Shape) -> tuple[Array, Array]:
    """Location and outcome of each datum of a site with a kink; NaN of another."""
    fn = base_distribution(site["fn"])
    if isinstance(fn, BetaLikelihood):
        # Its slope jumps where that of the density does.
        fn = base_distribution(fn.base_dist)
    # What is made of a Laplace distribution has its kinks elsewhere, which is at no predictor.
    locs = fn.loc if isinstance(fn, KINKED) else jnp.inf if has_kink(fn) else jnp.nan
    outcomes = site["value"] if isinstance(fn, KINKED) else jnp.nan
    return jnp.ravel(jnp.broadcast_to(locs, shape)), jnp.ravel(
        jnp.broadcast_to(outcomes, shape)
    )


def _predictor_of(trace: Trace, predictor: str, num_outputs: int | None) -> Array:
    """The value of the predictor's site.

    Raises:
        ValueError: If there is none, or it has another shape.
    """
    if predictor not in trace or trace[predictor]["type"] != "deterministic":
        names = [n for n, site in trace.items() if site["type"] == "deterministic"]
        raise ValueError(
            f"the model has no deterministic site {predictor!r} (it has {names}): name the linear "
            f'predictor by numpyro.deterministic("{predictor}", ...).'
        )
    value: Array = trace[predictor]["value"]
    if num_outputs is not None and jnp.shape(value)[-1:] != (num_outputs,):
        raise ValueError(
            f"predictor {predictor!r} has shape {jnp.shape(value)}, and num_outputs = {num_outputs} needs "
            "that as its last axis."
        )
    return value
