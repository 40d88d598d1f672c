"""Chains of one kernel at many powers of the likelihood, by one compiled program."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import HMC, MCMC
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import initialize_model

from numpyro_tempered.core import (
    Array,
    Model,
    Params,
    doubles,
    progress_within,
    warn_caller,
)
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.report.draws import name_of
from numpyro_tempered.select.alpha.base import Fits, Request, Task
from numpyro_tempered.select.alpha.model_data import Method
from numpyro_tempered.select.evidence import check_finite, largest_r_hat

# Chains with a larger split R-hat have not mixed.
LARGEST_R_HAT = 1.1
_DRAWN = {
    "continuous": ", and HMC and NUTS do not draw them: sum out those of a plate by nt.marginalize, and take "
    "DiscreteHMCGibbs for others."
}


class MCMCOptions(NamedTuple):
    """The options of NumPyro's ``MCMC`` that are the same at all powers."""

    num_warmup: int
    num_samples: int
    num_chains: int
    chain_method: str


class Chains(NamedTuple):
    """Chains at one power.

    Attributes:
        values: Draws by latent site, ``(chain, draw, ...)``.
        fields: Extra fields of the kernel, ``(chain, draw)``.
        last: The last draws on the kernel's own scale, from which the next power starts.
    """

    values: Params
    fields: Params
    last: object


class ChainSampler(NamedTuple):
    """A kernel factory and how its chains run.

    Attributes:
        data: The model with its data.
        factory: From model to kernel.
        options: Of ``MCMC``.
    """

    data: Target
    factory: Method
    options: MCMCOptions

    def mcmc(self, model: Model) -> MCMC:
        """An MCMC that has not run; also a kernel that binds its potential has this model."""
        return MCMC(self.factory(model), **self.options._asdict(), progress_bar=False)

    def run(
        self, rng_key: Array, model: Model, start: object, fields: tuple[str, ...] = ()
    ) -> Chains:
        """Chains on a model whose power may be traced, from ``start``.

        Raises:
            ValueError: If the kernel is built on another model, or leaves latents out.
        """
        mcmc = self.mcmc(model)
        before = self.data.model.runs
        mcmc.run(
            rng_key,
            *self.data.args,
            init_params=start,
            extra_fields=fields,
            **self.data.kwargs,
        )
        if self.data.model.runs == before:
            raise ValueError(
                "method builds its kernel on another model than the tempered one that it gets."
            )
        samples = mcmc.get_samples(group_by_chain=True)
        missing = sorted(set(self.data.latents) - set(samples))
        if missing:
            raise ValueError(
                f"{name_of(mcmc.sampler)} does not draw the latent sites {missing}: sum them out."
            )
        return Chains(
            {name: samples[name] for name in self.data.latents},
            {name: mcmc.get_extra_fields(group_by_chain=True)[name] for name in fields},
            getattr(mcmc.last_state, mcmc.sampler.sample_field),
        )


def divergence_fields(kernel: MCMCKernel, data: Target) -> tuple[str, ...]:
    """The extra fields that a kernel has of the path: ``diverging`` under HMC and NUTS.

    Raises:
        TypeError: If it is an ensemble kernel.
        ValueError: If it cannot draw discrete latents that the model has.
    """
    if kernel.is_ensemble_kernel:
        raise TypeError(
            f"NumPyro does not run {name_of(kernel)} under jit: take a kernel such as NUTS."
        )
    if not isinstance(kernel, HMC):
        return ()
    require(data.trace, _DRAWN)
    return ("diverging",)


def warn_if_not_mixed(
    alphas: np.ndarray, mean: np.ndarray, se: np.ndarray, r_hat: np.ndarray
) -> None:
    """Warn where E[log L] falls by more than 5 standard errors, or R-hat is large."""
    fall = mean[:-1] - mean[1:] - 5.0 * np.hypot(se[:-1], se[1:])
    if np.any(fall > 0):
        k = int(np.argmax(fall))
        warn_caller(
            f"E[log L] falls from {mean[k]:.6g} at alpha = {alphas[k]:.3g} to {mean[k + 1]:.6g} at "
            f"{alphas[k + 1]:.3g}, and it must increase: the chains have not mixed. Take more warm-up and draws."
        )
    if np.any(r_hat > LARGEST_R_HAT):
        k = int(np.argmax(r_hat))
        warn_caller(
            f"R-hat is {r_hat[k]:.2f} at alpha = {alphas[k]:.3g}: the chains have not mixed, and results along "
            "alpha cannot be trusted. Take more warm-up and draws."
        )


def sample_all(
    rng_key: Array,
    task: Task,
    factory: Method,
    kernel: MCMCKernel,
    request: Request,
    options: MCMCOptions,
) -> Fits:
    """Sample every alpha given the data, then given the reweighted data of the plans in turn.

    One compiled program serves all. Each posterior starts at the last draws of the one before, the first of an
    alpha at those of the alpha below.
    """
    alphas, plans, pointwise = request
    fields = divergence_fields(kernel, task)
    sampler = ChainSampler(task, factory, options)
    start_key, key, fit_key = jax.random.split(rng_key, 3)

    def run(key: Array, alpha: Array, weights: Array, start: object) -> tuple:
        chains = sampler.run(key, task.reweighted(alpha, weights), start)
        draws = task.draws(
            {
                name: jnp.reshape(v, (-1, *v.shape[2:]))
                for name, v in chains.values.items()
            }
        )
        by_chain = jnp.reshape(
            draws.log_lik, (options.num_chains, options.num_samples, -1)
        )
        total = jnp.sum(by_chain, axis=2)
        summaries = [plan.reduce(draws) for plan in plans]
        return (
            summaries,
            chains.values,
            total,
            by_chain if pointwise else None,
            chains.last,
        )

    program = jax.jit(run)
    start_keys = (
        jax.random.split(start_key, options.num_chains)
        if options.num_chains > 1
        else start_key
    )
    first_model = temper(task.model, float(alphas[0]))
    start = initialize_model(
        start_keys, first_model, model_args=task.args, model_kwargs=task.kwargs
    ).param_info.z
    weights = jnp.asarray(request.weights(task.num_data), jnp.result_type(float))
    keys = jax.random.split(key, (len(alphas), len(weights)))
    totals, pointwise_log_lik, summaries, r_hat = [], [], [], []
    with progress_within(len(alphas), "alphas") as bar:
        for alpha, alpha_keys in zip(alphas, keys, strict=True):
            power = jnp.asarray(alpha, jnp.result_type(float))
            at_next_alpha = None
            for stage_key, stage_weights in zip(alpha_keys, weights, strict=True):
                summary, values, log_lik, each, start = jax.device_get(
                    program(stage_key, power, stage_weights, start)
                )
                summaries.append(summary)
                if at_next_alpha is None:
                    # The alpha above starts where this one has all data.
                    at_next_alpha = start
                    totals.append(doubles(log_lik))
                    pointwise_log_lik.append(each)
                    r_hat.append(
                        largest_r_hat(
                            [v[:, :, None] for v in (*values.values(), log_lik)]
                        )[0]
                    )
            start = at_next_alpha
            bar.update()
    log_lik = np.stack(totals)
    check_finite(alphas, np.moveaxis(log_lik, 0, -1), at_zero=False)
    if np.max(r_hat) > LARGEST_R_HAT:
        k = int(np.argmax(r_hat))
        raise ValueError(
            f"R-hat is {r_hat[k]:.2f} at alpha = {alphas[k]:.3g}: the chains have not mixed, and alphas would be "
            "compared by how far they came. Take a larger num_warmup and num_samples, or another "
            "parameterisation."
        )
    stacked = jax.tree.map(
        lambda *leaves: np.reshape(
            np.stack(leaves), (*keys.shape[:2], *leaves[0].shape)
        ),
        *summaries,
    )

    def fit_at(k: int) -> tuple[MCMC, tuple, dict]:
        # An object as the user would make it, which to_inference_data and ArviZ read.
        mcmc = sampler.mcmc(temper(task.model.fn, alpha=float(alphas[k])))
        mcmc.run(
            jax.random.fold_in(fit_key, k),
            *task.args,
            extra_fields=fields,
            **task.kwargs,
        )
        return mcmc, (), {}

    return Fits(
        request.split(stacked),
        log_lik,
        np.stack(pointwise_log_lik) if pointwise else None,
        fit_at,
    )
