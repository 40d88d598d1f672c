"""Posteriors of a grid of alphas on reweighted data, by MCMC."""

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import initialize_model

from numpyro_tempered.core.typing import Array
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.select.alpha.base import STACKLEVEL, Fits, Query, Task
from numpyro_tempered.select.evidence import largest_r_hat
from numpyro_tempered.select.grid.mcmc import ChainSampler, MCMCOptions, divergence_fields, warn_if_not_mixed
from numpyro_tempered.select.grid.model_data import Method


def sample_all(
    rng_key: Array, task: Task, factory: Method, kernel: MCMCKernel, query: Query, options: MCMCOptions
) -> Fits:
    """Sample every alpha given the data, then given the reweighted data of the plans in turn.

    One compiled program serves all. Each posterior starts at the last draws of the one before, the first of an
    alpha at those of the alpha below.
    """
    alphas, plans, pointwise = query
    fields = divergence_fields(kernel, task)
    sampler = ChainSampler(task, factory, options)
    start_key, key, fit_key = jax.random.split(rng_key, 3)

    def run(key: Array, alpha: Array, weights: Array, start: object) -> tuple:
        chains = sampler.run(key, task.reweighted(alpha, weights), start)
        draws = task.draws({name: jnp.reshape(v, (-1, *v.shape[2:])) for name, v in chains.values.items()})
        by_chain = jnp.reshape(draws.log_lik, (options.num_chains, options.num_samples, -1))
        total = jnp.sum(by_chain, axis=2)
        summaries = [plan.reduce(draws) for plan in plans]
        return summaries, chains.values, total, by_chain if pointwise else None, chains.last

    program = jax.jit(run)
    start_keys = jax.random.split(start_key, options.num_chains) if options.num_chains > 1 else start_key
    first_model = temper(task.model, float(alphas[0]))
    start = initialize_model(start_keys, first_model, model_args=task.args, model_kwargs=task.kwargs).param_info.z
    weights = jnp.asarray(query.weights(task.num_data), jnp.result_type(float))
    keys = jax.random.split(key, (len(alphas), len(weights)))
    totals, pointwise_log_lik, summaries, r_hat = [], [], [], []
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
                totals.append(np.asarray(log_lik, np.float64))
                pointwise_log_lik.append(each)
                r_hat.append(largest_r_hat([v[:, :, None] for v in (*values.values(), log_lik)])[0])
        start = at_next_alpha
    log_lik = np.stack(totals)
    finite = np.all(np.isfinite(log_lik), axis=(1, 2))
    if not np.all(finite):
        raise ValueError(
            f"the log-likelihood is not finite at some draws at alpha = {alphas[~finite]}: look for NaN in the "
            "data, and for an overflow or a likelihood of 0 where the posterior has mass."
        )
    # R-hat judges the chains of an alpha. Falls of E[log L] would be measured by the standard error of
    # independent draws, which is too small.
    infinite = np.full(len(alphas), np.inf)
    warn_if_not_mixed(alphas, log_lik.mean(axis=(1, 2)), infinite, np.asarray(r_hat), STACKLEVEL)
    stacked = jax.tree.map(
        lambda *leaves: np.reshape(np.stack(leaves), (*keys.shape[:2], *leaves[0].shape)), *summaries
    )

    def fit_at(k: int) -> MCMC:
        # An object as the user would make it, which to_inference_data and ArviZ read.
        mcmc = sampler.mcmc(temper(task.original, alpha=float(alphas[k])))
        mcmc.run(jax.random.fold_in(fit_key, k), *task.args, extra_fields=fields, **task.kwargs)
        return mcmc

    return Fits(query.split(stacked), log_lik, np.stack(pointwise_log_lik) if pointwise else None, fit_at)
