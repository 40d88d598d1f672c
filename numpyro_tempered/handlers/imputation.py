"""Observed values that hold latents, as where a model imputes missing data."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array
from numpyro_tempered.core.jax_private import dce_jaxpr
from numpyro_tempered.handlers import effects
from numpyro_tempered.handlers.dependence import get_abstract_trace
from numpyro_tempered.handlers.likelihood import observed_sites
from numpyro_tempered.handlers.powers import Powers, is_power


def sites_with_latents(model: Callable[[], object]) -> list[str]:
    """The observed sites whose values depend on latents, in order, from abstract values alone.

    Args:
        model: NumPyro model with its arguments.
    """

    def run(token: Array) -> dict[str, object]:
        def fill(msg: effects.Message, number: int) -> None:
            if not msg["is_observed"] and msg["value"] is None:
                dtype = int if msg["fn"].support.is_discrete else float
                msg["value"] = jnp.zeros(effects.draw_shape(msg), dtype) + token.astype(
                    dtype
                )

        # A branch that a latent chooses has data of its own.
        return {
            name: site["value"]
            for name, site in observed_sites(
                get_abstract_trace(model, fill, any_branch=True)
            ).items()
        }

    program, values = jax.make_jaxpr(run, return_shape=True)(jnp.zeros(()))
    return [
        name
        for name in values
        if dce_jaxpr(program.jaxpr, [name == other for other in values])[1][0]
    ]


def check_values(model: Callable[[], object], alpha: Powers) -> None:
    """Refuse an observed value that depends on a latent: a power on its site would be on the latent's prior.

    Args:
        model: NumPyro model with its arguments.
        alpha: Its power, or powers by site; a site to the power 1 is right.

    Raises:
        ValueError: With the name of the site, and the ways to write it.
    """
    try:
        names = sites_with_latents(model)
    except Exception:
        # Without the handlers around it, which the trace hides, a model need not run: then nothing is known.
        return
    if isinstance(alpha, dict):
        names = [name for name in names if not is_power(alpha.get(name, 1.0), 1.0)]
    if names:
        raise ValueError(
            f"the values of the observed sites {names} depend on latents, as where missing data are imputed: "
            "temper would raise the prior of the latents to the power too. Sample the missing entries from their "
            "prior, without mask(False), and observe the entries that are there, obs=x[there]; under MCMC "
            "numpyro.sample(..., obs=x, obs_mask=there) does the same, in more steps. For residuals, observe the "
            "data themselves, or write a numpyro.factor."
        )


def argument_key(args: tuple, kwargs: dict) -> str:
    """What a model's arguments are, but for the values of arrays: calls with one key trace alike."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    kinds = (
        f"{leaf.dtype}{jnp.shape(leaf)}"
        if isinstance(leaf, jax.Array) or hasattr(leaf, "dtype")
        else repr(leaf)[:100]
        for leaf in leaves
    )
    return f"{structure} {' '.join(kinds)}"
