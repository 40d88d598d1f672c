"""Predictions: draws of a model's observed and deterministic sites at other arguments."""

from collections.abc import Collection

import numpy as np
from numpyro import handlers
from numpyro.infer import Predictive

from numpyro_tempered.core import Array, Model, Params, run_program, runs_models
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.arguments import model_arguments
from numpyro_tempered.handlers.effects import plates_of
from numpyro_tempered.handlers.likelihood import Trace
from numpyro_tempered.handlers.robust import as_densities


@runs_models
def predict(
    rng_key: Array,
    model: Model,
    draws: Params,
    args: tuple,
    kwargs: dict,
    *,
    new_groups: Collection[str] = (),
) -> tuple[Params, Trace]:
    """Draws of all sites of a model that draws of its latents leave open, by NumPyro's ``Predictive``.

    Args:
        rng_key: Of what is drawn.
        model: The model, tempered or not: what is observed has its untempered distribution.
        draws: Of the latents, ``(S, ...)`` by site.
        args: Positional arguments of the model, with None for what is to be drawn.
        kwargs: Its keyword arguments.
        new_groups: Plates whose latents are drawn from their prior, given the draws of its parents.

    Returns:
        Draws of the observed and deterministic sites, ``(S, ...)`` each, of the latents of ``new_groups`` too;
        and a trace of the model at these arguments.

    Raises:
        TypeError: If the model does not take the arguments.
        ValueError: If a latent has another shape at these arguments, there is no such plate, or nothing to draw.
    """
    new_groups = {new_groups} if isinstance(new_groups, str) else new_groups
    args, kwargs = model_arguments(predict, model, args, kwargs, finite=False)
    try:
        trace = _trace(rng_key, model, {}, args, kwargs)
    except NotImplementedError:
        # Of an improper prior there are draws of the posterior alone.
        firsts = {name: values[0] for name, values in draws.items()}
        trace = _trace(rng_key, model, firsts, args, kwargs)
    plates = {name for site in trace.values() for name in plates_of(site)}
    if unknown := sorted(set(new_groups) - plates):
        raise ValueError(
            f"new_groups names {unknown}, which are not among the plates {sorted(plates)} of the model."
        )
    latents = {
        name: values
        for name, values in draws.items()
        if name not in trace or plates_of(trace[name]).isdisjoint(new_groups)
    }
    for name, values in latents.items():
        shape = np.shape(values)[1:]
        if name in trace and trace[name]["fn"].shape() != shape:
            where = sorted(plates_of(trace[name]))
            raise ValueError(
                f"latent {name!r} has shape {shape} in the posterior, and {trace[name]['fn'].shape()} at these "
                f"arguments: pass rows of the groups that were fitted, or new_groups={where} to draw new groups "
                "from their prior."
            )
    names = [
        name
        for name, site in trace.items()
        if name not in latents
        and (
            site["type"] == "deterministic"
            or (site["type"] == "sample" and not site["is_observed"])
        )
    ]
    if not names:
        raise ValueError(
            "every site of the model has a value at these arguments: leave out the outcome, or pass None for it, "
            "so that the model draws it."
        )

    def draw(key: Array, latents: Params) -> Params:
        with as_densities():
            predictive = Predictive(model, latents, return_sites=names, batch_ndims=1)
            return predictive(key, *args, **kwargs)

    try:
        return run_program(draw, rng_key, latents), trace
    except NotImplementedError as error:
        raise ValueError(
            f"a prior of new_groups={sorted(new_groups)} cannot be sampled (is it improper?), or what the model "
            f"observes cannot: {error}"
        ) from error


def _trace(
    rng_key: Array, model: Model, values: Params, args: tuple, kwargs: dict
) -> Trace:
    seeded = handlers.substitute(handlers.seed(model, rng_key), data=values)
    with as_densities(), handlers.block():
        return likelihood.get_trace(seeded, args, kwargs)
