"""Results of every algorithm as ArviZ data."""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Columns,
    Description,
    Params,
    axis_labels,
    column_labels,
    runs_models,
    to_host,
    warn_caller,
)
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.arguments import argument_names
from numpyro_tempered.handlers.effects import LOCAL
from numpyro_tempered.handlers.robust import divergences
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.report.arviz import (
    LOG_LIK,
    UNTEMPERED,
    ArviZData,
    Coords,
    Dims,
    to_arviz,
)
from numpyro_tempered.report.draws import (
    bind,
    evaluate_draws,
    is_shown,
    one_chain,
    plate_dims,
)
from numpyro_tempered.report.predict import predict

# Attributes of draws that are not of the posterior of this likelihood, whatever alpha is.
_NOT_PLAIN = "likelihood_scale", "divergence", "local_latents"


@runs_models
def to_inference_data(
    posterior: object,
    *data: object,
    num_samples: int = 1000,
    rng_key: Array | None = None,
    coords: Coords | None = None,
    dims: Dims | None = None,
    log_lik: bool | Literal["log_likelihood"] = True,
    posterior_predictive: bool = False,
    predictions: tuple | Mapping[str, object] | None = None,
    new_groups: Collection[str] = (),
    group_by_chain: bool = False,
    **kwargs: object,
) -> ArviZData:
    """ArviZ data of a tempered posterior.

    Groups: ``posterior``, of latent and deterministic sites, and the log-likelihood, untempered and unscaled,
    with dims ``(chain, draw)`` and those of the plates, NaN where data are masked: ``log_likelihood``, or
    ``untempered_log_likelihood`` where alpha or a scale is not 1, the loss is another, or latents are local,
    since ``az.loo`` and ``az.compare`` would take the draws for those of the untempered posterior;
    ``observed_data``;
    ``posterior_predictive`` and ``predictions`` on request; for variational results ``variational`` (the trace of
    the loss and the parameters); for MCMC ``sample_stats``. Attributes: ``alpha`` (in JSON where it differs by
    site), ``masked`` (how many data of a site are), the rule or algorithm, versions. A slash in a site's name
    becomes a dot.

    ================================================= ====================================================
    posterior                                         what follows it
    ================================================= ====================================================
    ``TemperedFit``                                   nothing: it holds its data
    ``MCMC`` of NumPyro that has run, of any kernel   nothing
    ``online.posterior(state)``                       the data that it has seen
    ``MixtureFit``                                    ``x, rng_key=key``
    ``PPCAFit``                                       ``x, rng_key=key``
    ``RegressionFit``                                 ``x, y, rng_key=key``
    ``gaussian.descent.Result``                       ``rng_key=key``
    ``online.PartitionedRun``                         ``rng_key=key``
    dictionary of draws ``(S, ...)`` by site          the tempered model, then its arguments
    ================================================= ====================================================

    A selection gives the fit that it selects. An object of your own is a posterior if it has the method
    ``sample_posterior(rng_key, sample_shape)`` and the attribute ``target``, a ``nt.results.Target``.

    Of a mixture: draws of ``weights`` and of the components' parameters with dims ``component``, ``feature``, and
    ``level`` (of a category) or ``other_feature`` (of a matrix); the log-likelihood of the observed entries of
    each row, summed over the components; in ``variational`` F at each pass and of each restart, concentrations
    and counts; attributes ``objective`` (F), ``elbo`` and ``elbo_se`` (E1), ``num_components``, ``num_occupied``,
    ``converged``. The factors tell components apart, so that no draw has labels switched: components stand from
    the largest to the smallest count, or as ``order`` says; those of ``sticks``, which the ``weights`` follow
    from, as in the fit. Of probabilistic PCA: ``loadings`` with dims ``feature``, ``factor``; the z are
    integrated out of the log-likelihood of a row.

    Args:
        posterior: A posterior.
        *data: What follows it.
        num_samples: Draws from a variational posterior.
        rng_key: For what is drawn here; by default the key kept in the fit or state, or that of the MCMC's
            last state. Plain draws have none, and may not need one.
        coords: Coordinate values by dimension. By default the labels of the data: of a mixture, PCA or sparse
            regression the columns of a data frame x; of a model the columns or the index of a frame, by a
            dimension of the same name, as of ``x.rename_axis(columns="covariate")``.
        dims: Names of the event dimensions by variable, without chain and draw. By default a dimension that
            belongs to a plate has the plate's name, so that ``coords={"school": names}`` is enough.
        log_lik: Whether to evaluate the log-likelihood group, which takes S × n numbers; ``"log_likelihood"``
            gives it this name whatever the power.
        posterior_predictive: Whether to draw the observed sites anew, once for each posterior draw, from their
            untempered distributions. Where an observed site depends on another it sees the data: in a time
            series each replicate is one step ahead.
        predictions: Further arguments of the model, ``(x_new,)`` or by name, at which to predict: groups
            ``predictions``, one draw of what is observed and of the deterministic sites for each posterior draw,
            and ``predictions_constant_data``, these arguments.
        new_groups: For ``predictions``, plates whose groups are others than those of the fit.
        group_by_chain: Whether the draws given are ``(C, S, ...)``, by chain.
        **kwargs: For an online run or draws, keyword arguments of the model; for a mixture ``sample_weight``,
            as in its fit, and ``order``, the old number of each component.

    Returns:
        ``arviz.InferenceData`` under ArviZ 0.x, ``xarray.DataTree`` under 1.x.

    Raises:
        TypeError: If ``posterior`` is none.
        ValueError: If data or key are missing, ``log_lik`` is another name, an MCMC has not run a model, the
            draws do not fit their model, ``dims`` names no variable, or replicates are asked for and there is no
            key or no sampler.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> fit = nt.fit_svi(jax.random.key(0), model, AutoNormal, jnp.ones(6), alpha=0.5)
        >>> data = nt.to_inference_data(fit, posterior_predictive=True)
        >>> data["posterior"]["theta"].shape, data["posterior_predictive"]["y"].shape
        ((1, 1000), (1, 1000, 6))

        The draws of any sampler:

        >>> draws = {"theta": jax.random.normal(jax.random.key(1), (50,))}
        >>> nt.to_inference_data(draws, nt.temper(model, alpha=0.5), jnp.ones(6)).attrs["alpha"]
        0.5
    """
    if isinstance(log_lik, str) and log_lik != LOG_LIK:
        raise ValueError(
            f"log_lik must be True, False or {LOG_LIK!r}, got {log_lik!r}."
        )
    bound = bind(posterior, data, kwargs, rng_key=rng_key, by_chain=group_by_chain)
    key = getattr(bound, "rng_key", None) if rng_key is None else rng_key
    samples = getattr(bound, "samples", None)
    if samples is None:
        if key is None:
            raise ValueError(
                f"a {type(bound).__name__} has no key for its draws: pass rng_key."
            )
        samples = one_chain(bound.sample_posterior(key, (num_samples,)))
    description = bound.describe() if hasattr(bound, "describe") else Description()
    description = description._replace(dims={**description.dims, **(dims or {})})
    run = _Run(bound.target, samples, key, description)
    complete = _evaluate(run, log_lik, posterior_predictive)
    if predictions is not None:
        complete = _predict(run, complete, predictions, bound, new_groups)
    labels = {**axis_labels((data, kwargs)), **description.coords}
    if (columns := column_labels(data)) is not None:
        # The columns of x, by the names that results of this package have for them.
        features = {name for names in description.dims.values() for name in names} & {
            "feature",
            "other_feature",
        }
        labels |= dict.fromkeys(features, columns)
    return to_arviz(
        complete.groups,
        complete.attrs,
        coords,
        complete.dims,
        labels=labels,
        new_labels=axis_labels(predictions),
    )


class _Run(NamedTuple):
    """Draws ``(chain, draw, ...)`` with their target, a key for what else is drawn, and what else is shown."""

    target: Target | None
    samples: Mapping[str, Array]
    rng_key: Array | None
    description: Description

    @property
    def latents(self) -> Params:
        """The draws of the latents, in one axis."""
        names = {} if self.target is None else self.target.latents
        return {k: jnp.concatenate(v) for k, v in self.samples.items() if k in names}

    def by_chain(self, values: Mapping[str, Array]) -> Columns:
        """Values of each draw, in two axes."""
        sizes = next(iter(self.samples.values())).shape[:2]
        return {
            k: np.reshape(to_host(v), (*sizes, *v.shape[1:])) for k, v in values.items()
        }


def _evaluate(run: _Run, log_lik: bool | str, predictive: bool) -> Description:
    """All groups and attributes but predictions."""
    target, samples, key, description = run
    if target is None:
        if predictive:
            raise ValueError(
                "this result has no model of data: there can be no posterior_predictive group."
            )
        return description._replace(groups={"posterior": samples, **description.groups})
    trace = target.trace
    posterior: dict[str, ArrayLike] = {
        name: value
        for name, value in samples.items()
        if name in trace and is_shown(trace[name])
    }
    # The draws of deterministic sites follow from those of the latents.
    latents = run.latents
    missing = sorted(set(target.latents) - set(latents))
    parts = likelihood.subsamples(trace)
    groups: dict[str, Mapping[str, ArrayLike]] = {}
    others = {"observed_data": target.observed, **description.groups}
    attrs = {"alpha": likelihood.common_alpha(trace), **description.attrs}
    if not parts and (scales := likelihood.scales_beside_alpha(trace)):
        attrs["likelihood_scale"] = scales
    if local := [
        k for k, site in target.latents.items() if site.get(LOCAL) is not None
    ]:
        attrs["local_latents"] = local
    if factors := [
        k
        for k, site in likelihood.likelihood_sites(trace).items()
        if likelihood.is_factor(site)
    ]:
        attrs["factors"] = factors
    if losses := divergences(trace):
        attrs["divergence"] = {name: loss._asdict() for name, loss in losses.items()}
    if parts or missing:
        if parts:
            reason, why = "a plate of the model subsamples", "which needs all data"
        else:
            reason = (
                f"the draws hold no values of the latent sites {missing}, "
                "as of a sampler that enumerates them"
            )
            why = "which depends on them"
        if predictive:
            raise ValueError(
                f"{reason}: there can be no posterior_predictive group, {why}."
            )
        if log_lik:
            warn_caller(f"{reason}: the log_likelihood group, {why}, is left out.")
            attrs["log_likelihood_left_out"] = reason
        log_lik = False
    # Samplers keep deterministic sites, guides do not. In a plate of a part of the data they are of that part.
    derived = [
        name
        for name, site in trace.items()
        if site["type"] == "deterministic"
        and not (name in posterior or (parts and site["cond_indep_stack"]))
        and _has_entries(site["value"])
    ]
    if log_lik or (derived and not missing):
        log_probs, values = evaluate_draws(target, latents, bool(log_lik), derived)
        posterior.update(run.by_chain(values))
    groups["posterior"] = posterior
    if log_lik:
        scores = run.by_chain(log_probs)
        # What is masked is no datum, which zeros would be to those who count them.
        present = {
            k: np.broadcast_to(likelihood.mask_of_data(trace[k]["fn"]), v.shape[2:])
            for k, v in scores.items()
        }
        is_plain = attrs.keys().isdisjoint(_NOT_PLAIN) and attrs["alpha"] == 1.0
        by_default = LOG_LIK if is_plain else UNTEMPERED
        groups[LOG_LIK if log_lik == LOG_LIK else by_default] = {
            k: v if present[k].all() else np.where(present[k], v, np.nan)
            for k, v in scores.items()
        }
        if masked := {k: int((~v).sum()) for k, v in present.items() if not v.all()}:
            attrs["masked"] = masked
    if predictive:
        if key is None:
            raise ValueError("posterior_predictive draws data: pass an rng_key.")
        # No split of this key that made the posterior draws reaches as far.
        replicates = likelihood.replicate(
            jax.random.fold_in(key, 2**31 - 1),
            target.seeded,
            latents,
            target.args,
            target.kwargs,
        )
        groups["posterior_predictive"] = run.by_chain(replicates)
    dims = description.dims
    of_latents = plate_dims(
        trace, {k: np.shape(v)[2:] for k, v in posterior.items()}, dims
    )
    of_data = plate_dims(
        trace, {k: np.shape(v) for k, v in others["observed_data"].items()}, dims
    )
    return Description({**groups, **others}, attrs, {**of_latents, **of_data, **dims})


def _predict(
    run: _Run,
    complete: Description,
    predictions: tuple | Mapping[str, object],
    bound: Any,
    new_groups: Collection[str],
) -> Description:
    """The groups with draws at other arguments of the model."""
    target = run.target
    if target is None:
        raise ValueError(
            "this result has no model of data: there can be no predictions."
        )
    if run.rng_key is None:
        raise ValueError("predictions draws data: pass an rng_key.")
    if not isinstance(predictions, tuple | Mapping):
        raise TypeError(
            "predictions are arguments of the model, as a tuple (x_new,) or a mapping by name, got "
            f"{type(predictions).__name__}."
        )
    args = predictions if isinstance(predictions, tuple) else ()
    kwargs = {} if isinstance(predictions, tuple) else dict(predictions)
    key = jax.random.fold_in(run.rng_key, 2**31 - 2)
    if hasattr(bound, "predict_from"):
        draws, trace = bound.predict_from(key, run.latents, args, kwargs, new_groups)
    else:
        where = target.model, run.latents, args, kwargs
        draws, trace = predict(key, *where, new_groups=new_groups)
    names = argument_names(predict, target.model, args, kwargs)
    constant = {
        name: np.asarray(value)
        for name, value in zip(names, (*args, *kwargs.values()), strict=True)
        if np.ndim(value)
    }
    groups = {"predictions": run.by_chain(draws), "predictions_constant_data": constant}
    shapes = {k: np.shape(v)[1:] for k, v in draws.items()}
    dims = plate_dims(trace, shapes, {})
    return complete._replace(
        groups={**complete.groups, **groups}, dims={**dims, **complete.dims}
    )


def _has_entries(value: object) -> bool:
    """Whether a deterministic value is numbers: ArviZ has no place for tuples, or arrays without entries."""
    return (
        isinstance(value, jax.Array | np.ndarray | np.generic | float | int)
        and np.size(value) > 0
    )
