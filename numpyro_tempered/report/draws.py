"""Results as posteriors at their data, and the draws of a sampler as one."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.diagnostics import split_gelman_rubin
from numpyro.infer import MCMC
from numpyro.primitives import CondIndepStackFrame, Messenger

from numpyro_tempered.core import (
    EMPTY,
    Array,
    ArrayLike,
    DataSummary,
    Description,
    Evidence,
    Model,
    Params,
    Shape,
    add_repr,
    automatic_mesh,
    compiled_map,
    doubles,
    refuse_data,
)
from numpyro_tempered.handlers.arguments import model_arguments
from numpyro_tempered.handlers.likelihood import (
    Site,
    Trace,
    common_alpha,
    observed_sites,
    untempered_log_prob,
)
from numpyro_tempered.handlers.numpyro_private import arguments
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.handlers.robust import as_densities
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.report.arviz import Dims, variable_name
from numpyro_tempered.report.predict import predict

# Chains with a larger split R-hat have not mixed.
LARGEST_R_HAT = 1.1


@add_repr
class SampledPosterior(NamedTuple):
    """Draws of a sampler as a tempered posterior.

    Attributes:
        samples: Draws ``(chain, draw, ...)`` of latent sites, and of others to be shown.
        target: The model at its data.
        description: What else is to be shown.
    """

    samples: Mapping[str, Array]
    target: Target
    description: Description = Description()

    @property
    def alpha(self) -> float | dict[str, Any]:
        """Power on the likelihood; by site where sites differ."""
        return common_alpha(self.target.trace)

    @property
    def rng_key(self) -> Array | None:
        """Of what is drawn for it; None of plain draws."""
        return self.target.rng_key

    @property
    def elbo(self) -> None:
        """None: draws have no density."""
        return None

    @property
    def converged(self) -> bool | None:
        """Whether the largest split R-hat of the latents is at most 1.1; None of fewer than 4 draws."""
        values = [doubles(v) for v in self._latents().values()]
        if not values or values[0].shape[1] < 4:
            return None
        with np.errstate(all="ignore"):
            r_hat = np.concatenate([np.ravel(split_gelman_rubin(v)) for v in values])
        return bool(np.max(r_hat[~np.isnan(r_hat)], initial=1.0) <= LARGEST_R_HAT)

    @property
    def evidence(self) -> Evidence:
        """The number of draws."""
        return Evidence(
            num_iter=int(np.prod(next(iter(self.samples.values())).shape[:2]))
        )

    @property
    def mean(self) -> Params:
        """Means of the latents over the draws."""
        return {k: jnp.mean(v, axis=(0, 1)) for k, v in self._latents().items()}

    @property
    def sd(self) -> Params:
        """Standard deviations of the latents over the draws."""
        return {k: jnp.std(v, axis=(0, 1)) for k, v in self._latents().items()}

    def _latents(self) -> Params:
        names = self.target.latents
        return {k: jnp.asarray(v) for k, v in self.samples.items() if k in names}

    def sample_posterior(self, rng_key: Array, sample_shape: Shape = ()) -> Params:
        """Some of the draws of the latents, with replacement."""
        draws = jax.tree.map(jnp.concatenate, self._latents())
        size = len(next(iter(draws.values())))
        at = jax.random.randint(rng_key, sample_shape, 0, size)
        return jax.tree.map(lambda values: values[at], draws)

    def log_prob(self, values: Params) -> NoReturn:
        """Refuse: draws have no density.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "draws of a sampler have no density: fit a guide, by fit_svi or fit_gaussian."
        )

    def predict(
        self,
        rng_key: Array,
        *args: object,
        new_groups: Collection[str] = (),
        **kwargs: object,
    ) -> Params:
        """Draws of the observed and deterministic sites at other arguments, one for each draw."""
        draws, model = jax.tree.map(jnp.concatenate, self._latents()), self.target.model
        return predict(rng_key, model, draws, args, kwargs, new_groups=new_groups)[0]

    def on(
        self, *data: object, rng_key: Array | None = None, **kwargs: object
    ) -> "SampledPosterior":
        """Return itself, as it holds its data."""
        refuse_data(self, data, kwargs)
        return self

    def summarise_data(self) -> DataSummary:
        """The observed values."""
        return self.target.summarise_data(self.target.observed)

    def describe(self) -> Description:
        """What else is to be shown."""
        return self.description


def bind(
    result: Any,
    data: tuple = (),
    kwargs: Mapping[str, Any] = EMPTY,
    *,
    rng_key: Array | None = None,
    by_chain: bool = False,
) -> Any:
    """A result as a posterior at its data.

    Args:
        result: A posterior, a selection that holds one, an MCMC, or draws ``(S, ...)`` by site.
        data: What it was fitted to, where it does not hold it; of draws their model, then its arguments.
        kwargs: Keyword arguments likewise.
        rng_key: Of what is drawn for it.
        by_chain: Whether draws are ``(chain, draw, ...)``.

    Raises:
        TypeError: If it is no posterior.
        ValueError: If data are missing, or do not belong to it.
    """
    if isinstance(result, MCMC):
        refuse_data(result, data, kwargs)
        return from_mcmc(result, rng_key)
    if isinstance(result, Mapping):
        if not data or not callable(data[0]):
            raise TypeError(
                "draws are followed by their tempered model and its arguments, as in "
                "to_inference_data(samples, model, *args): the model is missing."
            )
        return from_draws(result, data[0], data[1:], dict(kwargs), by_chain, rng_key)
    if hasattr(result, "on"):
        return result.on(*data, rng_key=rng_key, **kwargs)
    if hasattr(result, "fit") and not callable(result.fit):
        return bind(result.fit, data, kwargs, rng_key=rng_key, by_chain=by_chain)
    if hasattr(result, "sample_posterior") and hasattr(result, "target"):
        refuse_data(result, data, kwargs)
        return result
    raise TypeError(
        f"got {type(result).__name__}, which is no tempered posterior: pass a fit; of a stream "
        "online.posterior(state), followed by its data; an MCMC; or a dictionary of draws, followed "
        "by its model and arguments."
    )


def from_mcmc(mcmc: MCMC, rng_key: Array | None) -> SampledPosterior:
    """The draws of an MCMC.

    Raises:
        ValueError: If it has not run, or its kernel has no model.
    """
    if mcmc.last_state is None:
        raise ValueError("the MCMC has not run a model yet: call mcmc.run first.")
    if getattr(mcmc.sampler, "model", None) is None:
        raise ValueError(
            f"the kernel {name_of(mcmc.sampler)} has no model, only a potential: pass its draws and the model, "
            "to_inference_data(mcmc.get_samples(group_by_chain=True), model, *args, group_by_chain=True)."
        )
    stats = {
        # ArviZ's plots look for "diverging", without the name of a state that holds it.
        name.rpartition(".")[2]: value
        for name, value in mcmc.get_extra_fields(group_by_chain=True).items()
        if getattr(value, "ndim", 0) == 2
    }
    key = _first_key(mcmc.last_state) if rng_key is None else rng_key
    samples, (args, kwargs) = mcmc.get_samples(group_by_chain=True), arguments(mcmc)
    attrs = {"algorithm": name_of(mcmc.sampler).lower()}
    return SampledPosterior(
        samples,
        Target(mcmc.sampler.model, args, kwargs, key, _first(samples)),
        Description({"sample_stats": stats}, attrs),
    )


def from_draws(
    draws: Mapping[str, ArrayLike],
    model: Model,
    args: tuple,
    kwargs: dict,
    by_chain: bool,
    rng_key: Array | None,
) -> SampledPosterior:
    """Plain draws, with their model and data.

    Raises:
        ValueError: If their numbers differ, the model lacks one of their sites, or they lack a site of the model.
    """
    samples = (
        {name: jnp.asarray(value) for name, value in draws.items()}
        if by_chain
        else one_chain(draws)
    )
    leading = {name: value.shape[:2] for name, value in samples.items()}
    if (
        not samples
        or len(set(leading.values())) > 1
        or any(len(v) < 2 for v in leading.values())
    ):
        shapes = {name: np.shape(value) for name, value in draws.items()}
        expected = "(chains, draws, ...)" if by_chain else "(draws, ...)"
        raise ValueError(
            f"the draws must be arrays {expected} with one number of draws, got shapes {shapes}."
        )
    args, kwargs = jax.tree.map(
        automatic_mesh, model_arguments(bind, model, args, kwargs, finite=False)
    )
    with _find_free_sites():
        target = Target(model, args, kwargs, rng_key, _first(samples))
    trace = target.trace
    fixed = {k for k, s in trace.items() if s["type"] == "param" and "is_free" not in s}
    require({k: s for k, s in trace.items() if k not in fixed}, _FITTED)
    strange = sorted(set(samples) - {k for k, site in trace.items() if is_shown(site)})
    if strange:
        raise ValueError(
            f"the draws hold {strange}, which are not latent or deterministic sites of the model: leave them out."
        )
    return SampledPosterior(samples, target, Description(attrs={"algorithm": "draws"}))


def _first(samples: Mapping[str, Array]) -> Params:
    return {name: value[0, 0] for name, value in samples.items()}


_FITTED = {
    "params": ", without fitted values: fix them by numpyro.handlers.substitute(model, data=params)."
}


class _find_free_sites(Messenger):
    """Mark params, and refuse latents, that neither the draws nor a handler of the model give a value."""

    def process_message(self, msg: Site) -> None:
        if msg["value"] is not None:
            return
        msg["is_free"] = True
        if msg["type"] == "sample":
            raise ValueError(
                f"the draws hold no values of the latent site {msg['name']!r} of the model."
            )


def evaluate_draws(
    target: Target,
    latents: Mapping[str, Array],
    log_lik: bool,
    derived: Collection[str],
) -> tuple[Params, Params]:
    """Log-likelihoods and deterministic sites at draws of the latents, both by site, with one row for each draw.

    Args:
        target: The model and its data.
        latents: Values with one leading axis of S draws.
        log_lik: Whether to evaluate the untempered pointwise log-likelihood of each observed site, ``(S,
            *batch_shape)``; ``numpyro.factor`` sites are left out.
        derived: Names of the deterministic sites to evaluate.
    """

    def one(values: Params) -> tuple[Params, Params]:
        with as_densities():
            trace = target.trace_at(values)
        sites = observed_sites(trace) if log_lik else {}
        log_probs = {name: untempered_log_prob(site) for name, site in sites.items()}
        return log_probs, {name: jnp.asarray(trace[name]["value"]) for name in derived}

    return compiled_map(one, dict(latents), 64)


def plate_dims(
    trace: Trace, shapes: Mapping[str, Shape], dims: Dims
) -> dict[str, list[str]]:
    """Names of the dimensions of sites: those of their plates, and those in ``infer={"event_dims": ...}``.

    A plate names a dimension of its size alone: a site may be broadcast along it, and ``dims``, which others have
    named, may use its name for another one.
    """
    # The first three are dimensions of results, and no plate's size is 0.
    sizes = {"chain": 0, "draw": 0, "alpha": 0}
    for name, shape in shapes.items():
        sizes |= zip(dims.get(name, ()), shape, strict=False)
    named = {}
    for name, shape in shapes.items():
        site, labels = trace[name], {}
        plates = _plates_in(site, len(shape))
        # What belongs to the event of a deterministic site is not said: the plates come first, as in ArviZ.
        depth = max(
            (-plate.dim for plate in site.get("cond_indep_stack", ())), default=0
        )
        batch = len(shape) - site["fn"].event_dim if site["type"] == "sample" else depth
        places = [(plate.name, plate.size, batch + plate.dim) for plate in plates]
        events = (site.get("infer") or {}).get("event_dims", ())
        starts = range(len(shape) - len(events), len(shape))
        places += [
            (dim, shape[axis], axis)
            for dim, axis in zip(events, starts, strict=True)
            if axis >= 0
        ]
        for dim, size, axis in places:
            if (
                0 <= axis < len(shape)
                and shape[axis] == size
                and sizes.setdefault(dim, size) == size
            ):
                labels[axis] = variable_name(dim)
        if labels:
            named[name] = [
                labels.get(i, f"{variable_name(name)}_dim_{i}")
                for i in range(len(shape))
            ]
    return named


def _plates_in(site: Site, num_dims: int) -> list[CondIndepStackFrame]:
    """The plates of a site that may name one of its dimensions.

    Of a deterministic site none where control flow may have stacked it; and where it has fewer dimensions than
    plates, as a sum over one, those that no other plate has the size of.
    """
    plates = list(site.get("cond_indep_stack", ()))
    if site["type"] == "sample":
        return plates
    if site.get("_control_flow_done"):
        return []
    if num_dims >= max((-plate.dim for plate in plates), default=0):
        return plates
    sizes = [plate.size for plate in plates]
    return [plate for plate in plates if sizes.count(plate.size) == 1]


def variables_of(posterior: Any) -> set[str]:
    """Names of the variables of a posterior, whose dimensions may be named."""
    sites = () if posterior.target is None else posterior.target.trace
    groups = posterior.describe().groups.values()
    return {*sites, *(name for values in groups for name in values)}


def is_shown(site: Site) -> bool:
    """Whether a site belongs to the posterior group."""
    return site["type"] == "deterministic" or (
        site["type"] == "sample" and not site["is_observed"]
    )


def _first_key(state: object) -> Array | None:
    """The key of an MCMC's state, of its first chain where there are several."""
    key = getattr(state, "rng_key", None)
    if key is None or jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return None if key is None else jnp.ravel(key)[0]
    return jnp.reshape(key, (-1, key.shape[-1]))[0]


def one_chain(samples: Mapping[str, ArrayLike]) -> Params:
    """Draws ``(draw, ...)`` as ``(chain, draw, ...)``."""
    return {name: jnp.asarray(value)[None] for name, value in samples.items()}


def plain_params(params: Mapping[str, object]) -> Params:
    """Array-valued parameters; a neural module's tree is flattened by its path."""
    flat = {}
    for name, value in params.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            flat[name + jax.tree_util.keystr(path)] = leaf
    return flat


def name_of(value: object) -> str:
    """Name of a function or class, or of an object's class."""
    return getattr(value, "__name__", type(value).__name__)
