"""A tempered path by MCMC."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import HMC, MCMC
from numpyro.infer.mcmc import MCMCKernel

from numpyro_tempered.core.batching import map_batches
from numpyro_tempered.core.typing import Array
from numpyro_tempered.handlers.likelihood import latent_sites
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.select.path.evidence import largest_r_hat, log_evidence, mean_se, moments
from numpyro_tempered.select.path.problem import Path, Problem, check_finite, name_of


def sample_path(
    rng_key: Array,
    problem: Problem,
    method: Any,
    kernel: MCMCKernel,
    grid: np.ndarray,
    num_warmup: int,
    num_samples: int,
    num_chains: int,
    *,
    chain_method: str,
) -> Path:
    """Sample each alpha from the last draws of the one below; ``kernel`` is one that ``method`` made."""
    if kernel.is_ensemble_kernel:
        raise TypeError(
            f"NumPyro does not run {name_of(kernel)} under jit: take one of single chains, such as NUTS."
        )
    is_hmc = isinstance(kernel, HMC)
    discrete = [n for n, site in latent_sites(problem.trace).items() if site["fn"].support.is_discrete]
    if is_hmc and discrete:
        raise ValueError(
            f"{name_of(kernel)} does not draw the discrete sites {discrete}: sum out those of a plate by "
            "numpyro_tempered.marginalize, and take DiscreteHMCGibbs for others."
        )
    options = {"num_chains": num_chains, "chain_method": chain_method, "progress_bar": False}

    def run(key: Array, alpha: Any, start: Any) -> Any:
        # All made inside the compiled function: also a kernel that binds its potential has this alpha.
        kernel = method(temper(problem.model, alpha))
        mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, **options)
        fields = ("diverging",) if is_hmc else ()
        before = problem.runs
        mcmc.run(key, *problem.args, init_params=start, extra_fields=fields, **problem.kwargs)
        if problem.runs == before:
            raise ValueError("method builds its kernel on another model than the tempered one it is given.")
        samples = mcmc.get_samples(group_by_chain=True)
        missing = sorted(set(problem.latents) - set(samples))
        if missing:
            raise ValueError(
                f"{name_of(kernel)} does not draw the latent sites {missing}: sum them out of the model."
            )
        values = {name: samples[name] for name in problem.latents}
        log_lik = jax.lax.map(lambda chain: map_batches(problem.log_lik, chain, 64), values)
        stats = {name: mcmc.get_extra_fields(group_by_chain=True)[name] for name in fields}
        return (values, {"log_lik": log_lik, **stats}), getattr(mcmc.last_state, kernel.sample_field)

    compiled = jax.jit(run)
    keys = jax.random.split(rng_key, len(grid))
    if problem.prior_is_exact:
        prior_keys = jax.random.split(keys[0], (num_chains, num_samples))
        draw = jax.jit(lambda k: jax.lax.map(lambda chain: map_batches(problem.draw_prior, chain, 64), k))
        values, log_lik = draw(prior_keys)
        check_finite(grid[:1], np.asarray(log_lik)[..., None], at_zero=True)
        stats = {"diverging": jnp.zeros((num_chains, num_samples), bool)} if is_hmc else {}
        first: Any = (values, {"log_lik": log_lik, **stats})
        start = jax.jit(jax.vmap(problem.unconstrain))(_last_possible(values, log_lik))
        start = start if num_chains > 1 else jax.tree.map(lambda value: value[0], start)
    else:
        # A concrete 0 leaves the likelihood out, gradients and all.
        first, start = jax.jit(lambda key: run(key, 0.0, None))(keys[0])
    path = [first]
    for key, alpha in zip(keys[1:], grid[1:], strict=True):
        found, start = compiled(key, jnp.asarray(alpha), start)
        path.append(found)
    values, stats = jax.tree.map(lambda *parts: np.stack(parts, axis=2), *path)
    stats["log_lik"] = stats["log_lik"].astype(np.float64)
    check_finite(grid, stats["log_lik"], at_zero=problem.prior_is_exact)
    return Path(_columns(grid, values, stats, problem.prior_is_exact), values, stats, {})


def _last_possible(values: dict[str, Array], log_lik: Array) -> dict[str, Array]:
    """The last draw of each chain whose likelihood is not 0; the last of all where there is none."""
    possible = np.isfinite(log_lik)
    last = np.where(possible.any(axis=1), possible.shape[1] - 1 - np.argmax(possible[:, ::-1], axis=1), -1)
    return {name: value[np.arange(len(last)), last] for name, value in values.items()}


def _columns(
    grid: np.ndarray, values: dict[str, np.ndarray], stats: dict[str, np.ndarray], exact_prior: bool
) -> dict[str, np.ndarray]:
    log_lik = stats["log_lik"]
    at = range(len(grid))
    ess, se = np.transpose([mean_se(log_lik[..., k], exact_prior and k == 0) for k in at])
    mean, var = moments(log_lik)
    log_z = log_evidence(grid, log_lik, exact_prior)
    r_hat = largest_r_hat([log_lik, *values.values()])
    warn_if_not_mixed(grid, mean, se, r_hat)
    return {
        **log_z,
        "expected_log_lik": mean,
        "expected_log_lik_se": se,
        "var_log_lik": var,
        "kl": np.append(0.0, grid[1:] * mean[1:] - log_z["log_z"][1:]),
        "ess": ess,
        "r_hat": r_hat,
        **({"divergences": np.sum(stats["diverging"], axis=(0, 1))} if "diverging" in stats else {}),
    }


def warn_if_not_mixed(grid: np.ndarray, mean: np.ndarray, se: np.ndarray, r_hat: np.ndarray) -> None:
    """Warn where E[log L] falls by more than 5 standard errors, or R-hat is large."""
    fall = mean[:-1] - mean[1:] - 5.0 * np.hypot(se[:-1], se[1:])
    if np.any(fall > 0):
        k = int(np.argmax(fall))
        warnings.warn(
            f"E[log L] falls from {mean[k]:.6g} at alpha = {grid[k]:.3g} to {mean[k + 1]:.6g} at "
            f"{grid[k + 1]:.3g}, and it must increase: the chains have not mixed. Take more warm-up and draws.",
            stacklevel=5,
        )
    if np.any(r_hat > 1.1):
        k = int(np.argmax(r_hat))
        warnings.warn(
            f"R-hat is {r_hat[k]:.2f} at alpha = {grid[k]:.3g}: the chains have not mixed, and log_z cannot be "
            "trusted, nor its standard error. Take more warm-up and draws.",
            stacklevel=5,
        )
