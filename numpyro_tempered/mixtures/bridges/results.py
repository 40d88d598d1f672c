"""Fitted mixtures as what other algorithms return: a fit of a guide, and draws with their model."""

import math
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import constraints

from numpyro_tempered.core.typing import Array, ArrayLike
from numpyro_tempered.handlers.likelihood import get_trace, observed_values
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.elbo import TemperedELBO
from numpyro_tempered.infer.svi import TemperedFit
from numpyro_tempered.mixtures.bridges.model import (
    COMPONENTS,
    DATA,
    WEIGHTS,
    check_fit,
    numpyro_guide,
    numpyro_model,
)
from numpyro_tempered.mixtures.factors import penalty
from numpyro_tempered.mixtures.predictions import relabel
from numpyro_tempered.mixtures.result import MixtureFit
from numpyro_tempered.report.run import Run


def as_tempered_fit(
    rng_key: Array, fit: MixtureFit, x: Any, *, sample_weight: ArrayLike | None = None
) -> TemperedFit:
    """A fitted mixture in the form of :func:`fit_svi`'s results, without any fitting.

    With it :func:`compare` puts mixtures beside other models of the same data.

    Args:
        rng_key: Key for what is drawn from the result afterwards.
        fit: A fitted mixture.
        x: The data that it was fitted to.
        sample_weight: Their weights, as in the fit.

    Returns:
        The tempered :func:`numpyro_model` with :func:`numpyro_guide`. Its ``elbo`` is E1 of the fit, its
        ``losses`` are minus F.

    Raises:
        TypeError: If ``fit`` is not a fit.
        ValueError: If the data are not of the family, or the fit has no E1.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2)
        >>> tempered = nt.mixtures.as_tempered_fit(jax.random.key(1), fit, x)
        >>> tempered.elbo.value == fit.bound.value
        True
    """
    check_fit(fit)
    if fit.bound is None:
        raise ValueError("this fit has no E1: fit with num_samples >= 2, draws for it.")
    kl = float(penalty(fit.component, fit.problem, fit.factors))
    elbo = TemperedELBO(fit.bound.value, fit.bound.se, (fit.bound.value + kl) / fit.alpha, kl)
    return _tempered_fit(rng_key, fit, x, sample_weight, elbo)


def _tempered_fit(
    rng_key: Array, fit: MixtureFit, x: Any, sample_weight: ArrayLike | None, elbo: TemperedELBO
) -> TemperedFit:
    _warn_if_unresolved(fit, x)
    model, guide = temper(numpyro_model(fit), fit.alpha), numpyro_guide(fit)
    args = (x,) if sample_weight is None else (x, sample_weight)
    return TemperedFit(
        model=model,
        guide=guide,
        params={},
        alpha=fit.alpha,
        losses=jnp.asarray(-fit.trace),
        elbo=elbo,
        observed=observed_values(get_trace(handlers.seed(model, rng_key), args, {})),
        args=args,
        kwargs={},
        rng_key=rng_key,
    )


def _warn_if_unresolved(fit: MixtureFit, x: Any) -> None:
    """Warn where the data's own coordinates, in which NumPyro's model works, lose digits that the fit kept."""
    if fit.centre is None:
        return
    dtype = fit.factors.concentration.dtype
    deviation = np.reshape(np.nanstd(np.asarray(x, np.float64), axis=0), -1)
    rounding = float(np.finfo(dtype).eps) * np.abs(fit.centre) / np.where(deviation > 0, deviation, np.inf)
    if rounding.max() > 1e-3:
        column = int(rounding.argmax())
        warnings.warn(
            f"column {column} of the data is so far from 0 that {dtype} keeps it to {rounding[column]:.1g} of "
            "its standard deviation: likelihoods and draws of the NumPyro model are off by as much. Subtract a "
            "constant from the column, or let jax have 64 bits.",
            stacklevel=4,
        )


def from_mixture(
    rng_key: Array,
    fit: MixtureFit,
    x: Any,
    *,
    sample_weight: ArrayLike | None = None,
    num_samples: int = 1000,
    order: ArrayLike | None = None,
) -> Run:
    """Draws of the factors with their model.

    Args:
        rng_key: Key of the draws.
        fit: A fitted mixture.
        x: The data that it was fitted to.
        sample_weight: Their weights, as in the fit.
        num_samples: S.
        order: The old number of each component; by default from the largest to the smallest count.
    """
    check_fit(fit)
    ordered = relabel(fit, order)
    not_needed = TemperedELBO(*[math.nan] * 4)
    tempered = _tempered_fit(rng_key, ordered, x, sample_weight, not_needed)
    run = tempered.as_run(num_samples=num_samples)
    variational = {
        "objective_trace": ordered.trace,
        "objective_by_restart": ordered.objectives,
        "concentration": np.asarray(ordered.factors.concentration),
        "count": ordered.counts,
    }
    attrs = {
        "algorithm": "cavi",
        "component": ordered.component.name,
        "num_components": ordered.num_components,
        "num_occupied": ordered.num_occupied,
        "objective": ordered.objective,
        **({} if ordered.bound is None else {"elbo": ordered.bound.value, "elbo_se": ordered.bound.se}),
        # Files of netCDF know no booleans.
        "converged": int(ordered.converged),
        "num_iter": ordered.num_iter,
    }
    names = {
        "objective_trace": ["iteration"],
        "objective_by_restart": ["restart"],
        "concentration": ["component"],
        "count": ["component"],
    }
    return run._replace(groups={"variational": variational}, attrs=attrs, dims=names | _dims(tempered))


def _dims(fit: TemperedFit) -> dict[str, list[str]]:
    """Names of the dimensions of the model's sites."""
    trace = get_trace(handlers.seed(fit.model, fit.rng_key), fit.args, fit.kwargs)
    sizes = {"component": trace[WEIGHTS]["value"].shape[0], "feature": trace[DATA]["value"].shape[1]}
    names = {WEIGHTS: ["component"], DATA: ["row", "feature"]}
    for name, site in trace.items():
        if site["type"] != "sample" or name in names:
            continue
        shape = jnp.shape(site["value"])
        own = ["component"] if any(frame.name == COMPONENTS for frame in site["cond_indep_stack"]) else []
        matrix = _base(site["fn"].support) is constraints.positive_definite
        own += ["feature", "other_feature" if matrix else "level"][: len(shape) - len(own)]
        # Two sites may have different columns, or different levels.
        names[name] = [
            dim if sizes.setdefault(dim, size) == size else f"{name}_{dim}"
            for dim, size in zip(own, shape, strict=True)
        ]
    return names


def _base(support: Any) -> Any:
    while isinstance(support, constraints._IndependentConstraint):
        support = support.base_constraint
    return support
