"""Chains of one kernel on a model at many powers of the likelihood, by one compiled program."""

import warnings
from typing import NamedTuple

import numpy as np
from numpyro.infer import HMC, MCMC
from numpyro.infer.mcmc import MCMCKernel

from numpyro_tempered.core.typing import Array, Model
from numpyro_tempered.report.draws import name_of
from numpyro_tempered.select.grid.model_data import Method, ModelData


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

    values: dict[str, Array]
    fields: dict[str, Array]
    last: object


class ChainSampler(NamedTuple):
    """A kernel factory and how its chains run.

    Attributes:
        data: The model with its data.
        factory: From model to kernel.
        options: Of ``MCMC``.
    """

    data: ModelData
    factory: Method
    options: MCMCOptions

    def mcmc(self, model: Model) -> MCMC:
        """An MCMC that has not run; also a kernel that binds its potential has this model."""
        return MCMC(self.factory(model), **self.options._asdict(), progress_bar=False)

    def run(self, rng_key: Array, model: Model, start: object, fields: tuple[str, ...] = ()) -> Chains:
        """Chains on a model whose power may be traced, from ``start``.

        Raises:
            ValueError: If the kernel is built on another model, or leaves latents out.
        """
        mcmc = self.mcmc(model)
        before = self.data.runs
        mcmc.run(rng_key, *self.data.args, init_params=start, extra_fields=fields, **self.data.kwargs)
        if self.data.runs == before:
            raise ValueError("method builds its kernel on another model than the tempered one that it gets.")
        samples = mcmc.get_samples(group_by_chain=True)
        missing = sorted(set(self.data.latents) - set(samples))
        if missing:
            raise ValueError(
                f"{name_of(mcmc.sampler)} does not draw the latent sites {missing}: sum them out of the model."
            )
        return Chains(
            {name: samples[name] for name in self.data.latents},
            {name: mcmc.get_extra_fields(group_by_chain=True)[name] for name in fields},
            getattr(mcmc.last_state, mcmc.sampler.sample_field),
        )


def divergence_fields(kernel: MCMCKernel, data: ModelData) -> tuple[str, ...]:
    """The extra fields that a kernel has of the path: ``diverging`` under HMC and NUTS.

    Raises:
        TypeError: If it is an ensemble kernel.
        ValueError: If it cannot draw discrete latents that the model has.
    """
    if kernel.is_ensemble_kernel:
        raise TypeError(
            f"NumPyro does not run {name_of(kernel)} under jit: take one of single chains, such as NUTS."
        )
    if not isinstance(kernel, HMC):
        return ()
    if data.discrete:
        raise ValueError(
            f"{name_of(kernel)} does not draw the discrete sites {data.discrete}: sum out those of a plate by "
            "numpyro_tempered.marginalize, and take DiscreteHMCGibbs for others."
        )
    return ("diverging",)


def warn_if_not_mixed(
    alphas: np.ndarray, mean: np.ndarray, se: np.ndarray, r_hat: np.ndarray, stacklevel: int = 1
) -> None:
    """Warn where E[log L] falls by more than 5 standard errors, or R-hat is large."""
    fall = mean[:-1] - mean[1:] - 5.0 * np.hypot(se[:-1], se[1:])
    if np.any(fall > 0):
        k = int(np.argmax(fall))
        warnings.warn(
            f"E[log L] falls from {mean[k]:.6g} at alpha = {alphas[k]:.3g} to {mean[k + 1]:.6g} at "
            f"{alphas[k + 1]:.3g}, and it must increase: the chains have not mixed. Take more warm-up and draws.",
            stacklevel=stacklevel + 1,
        )
    if np.any(r_hat > 1.1):
        k = int(np.argmax(r_hat))
        warnings.warn(
            f"R-hat is {r_hat[k]:.2f} at alpha = {alphas[k]:.3g}: the chains have not mixed, and neither log_z "
            "nor its standard error can be trusted. Take more warm-up and draws.",
            stacklevel=stacklevel + 1,
        )
