"""Posteriors of a grid of alphas on reweighted data, by MCMC."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import HMC, MCMC
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import initialize_model

from numpyro_tempered.core.typing import Array
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.select.alpha.base import Fits, Plan
from numpyro_tempered.select.alpha.data_weights import weigh_data
from numpyro_tempered.select.alpha.task import Task
from numpyro_tempered.select.path.evidence import largest_r_hat
from numpyro_tempered.select.path.mcmc import warn_if_not_mixed
from numpyro_tempered.select.path.problem import name_of


def sample_all(
    rng_key: Array,
    task: Task,
    factory: Callable[[Any], MCMCKernel],
    kernel: MCMCKernel,
    alphas: np.ndarray,
    plans: Sequence[Plan],
    *,
    pointwise: bool,
    num_warmup: int,
    num_samples: int,
    num_chains: int,
    chain_method: str,
) -> Fits:
    """Sample every alpha given the data, then given the reweighted data of the plans in turn.

    One compiled program serves all; each posterior is started at the last draws of the one before, the first of
    an alpha at those of the alpha below.
    """
    if kernel.is_ensemble_kernel:
        raise TypeError(
            f"NumPyro does not run {name_of(kernel)} under jit: take one of single chains, such as NUTS."
        )
    is_hmc = isinstance(kernel, HMC)
    if is_hmc and task.discrete:
        raise ValueError(
            f"{name_of(kernel)} does not draw the discrete sites {task.discrete}: sum them out by "
            "numpyro_tempered.marginalize."
        )
    options = {
        "num_warmup": num_warmup,
        "num_samples": num_samples,
        "num_chains": num_chains,
        "chain_method": chain_method,
        "progress_bar": False,
    }
    start_key, key, fit_key = jax.random.split(rng_key, 3)

    def run(key: Array, alpha: Array, weights: Array, start: Any) -> Any:
        own = factory(weigh_data(temper(task.model, alpha), weights, task.dim))
        mcmc = MCMC(own, **options)
        before = task.runs
        mcmc.run(key, *task.args, init_params=start, **task.kwargs)
        if task.runs == before:
            raise ValueError("method builds its kernel on another model than the tempered one it is given.")
        found = mcmc.get_samples(group_by_chain=True)
        missing = sorted(set(task.latents) - set(found))
        if missing:
            raise ValueError(
                f"{name_of(own)} does not draw the latent sites {missing}: sum them out of the model."
            )
        values = {name: found[name] for name in task.latents}
        draws = task.draws({name: jnp.reshape(v, (-1, *v.shape[2:])) for name, v in values.items()})
        by_chain = jnp.reshape(draws.log_lik, (num_chains, num_samples, -1))
        total = jnp.sum(by_chain, axis=2)
        reduced = [plan.reduce(draws) for plan in plans]
        return reduced, values, total, by_chain if pointwise else None, getattr(mcmc.last_state, own.sample_field)

    program = jax.jit(run)
    keys = jax.random.split(start_key, num_chains) if num_chains > 1 else start_key
    info = initialize_model(
        keys, temper(task.model, float(alphas[0])), model_args=task.args, model_kwargs=task.kwargs
    )
    start = info.param_info.z
    weights = jnp.asarray(
        np.concatenate([np.ones((1, task.num_data)), *(plan.weights for plan in plans)]), jnp.result_type(float)
    )
    keys = jax.random.split(key, (len(alphas), len(weights)))
    total, kept, reduced, r_hat = [], [], [], []
    for k, alpha in enumerate(alphas):
        power = jnp.asarray(alpha, jnp.result_type(float))
        rows = []
        for s in range(len(weights)):
            part, values, log_lik, each, last = jax.device_get(program(keys[k, s], power, weights[s], start))
            if s == 0:
                start, first = last, last
                total.append(np.asarray(log_lik, np.float64))
                kept.append(each)
                r_hat.append(largest_r_hat([v[:, :, None] for v in (*values.values(), log_lik)])[0])
            else:
                start = last
            rows.append(part)
        # The alpha above starts where this one has all data.
        start = first
        reduced.append(rows)
    log_lik = np.stack(total)
    _check(alphas, log_lik, np.asarray(r_hat))
    ends = np.cumsum([1, *(len(plan.weights) for plan in plans)])
    own = [
        jax.tree.map(
            lambda *leaves, m=b - a: np.swapaxes(
                np.reshape(np.stack(leaves), (len(alphas), m, *leaves[0].shape)), 0, 1
            ),
            *(rows[s][p] for rows in reduced for s in range(a, b)),
        )
        for p, (a, b) in enumerate(itertools.pairwise(ends))
    ]

    def fit_at(k: int) -> MCMC:
        # An object as the user would make it, which to_inference_data and ArviZ read.
        mcmc = MCMC(factory(temper(task.original, alpha=float(alphas[k]))), **options)
        fields = ("diverging",) if is_hmc else ()
        mcmc.run(jax.random.fold_in(fit_key, k), *task.args, extra_fields=fields, **task.kwargs)
        return mcmc

    return Fits(own, log_lik, np.stack(kept) if pointwise else None, fit_at)


def _check(alphas: np.ndarray, log_lik: np.ndarray, r_hat: np.ndarray) -> None:
    if not np.all(np.isfinite(log_lik)):
        bad = alphas[~np.all(np.isfinite(log_lik), axis=(1, 2))]
        raise ValueError(
            f"the log-likelihood is not finite at some draws at alpha = {bad}: look for NaN in the data, and for "
            "an overflow or a likelihood of 0 where the posterior has mass."
        )
    mean = log_lik.mean(axis=(1, 2))
    # The chains of an alpha are judged by R-hat; falls of E[log L] by the standard error of independent draws
    # would cry wolf.
    warn_if_not_mixed(alphas, mean, np.full(len(alphas), np.inf), r_hat)
