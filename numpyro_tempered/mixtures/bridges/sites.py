"""A mixture as NumPyro's sites: the model and the guide, from the component and its hyperparameters."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_tempered.core.checks import is_traced
from numpyro_tempered.core.typing import Array, ArrayLike, Guide, Model
from numpyro_tempered.mixtures.components.base import (
    Component,
    Hyperparameters,
    Rows,
    Sample,
    as_dtype,
    missing_form,
)
from numpyro_tempered.mixtures.components.product import ColumnsOf
from numpyro_tempered.mixtures.prepare import check_weight

WEIGHTS, COMPONENTS, ROWS, DATA = "weights", "components", "rows", "x"


class Change(Protocol):
    """What makes another distribution of that of a site."""

    def __call__(self, name: str, fn: dist.Distribution, /) -> dist.Distribution:
        """The new distribution, before it stands in a plate."""


def mixture_model(component: Component, prior: Hyperparameters, concentration: np.ndarray | Array) -> Model:
    """The model of a mixture with K = ``len(concentration)``; see :func:`numpyro_model`."""
    size = concentration.shape[0]

    def model(x: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        rows = component.check(_on_host(x))
        # Of traced rows it is not known whether entries are missing.
        form = component.with_missing if is_traced(rows) else missing_form(component, rows)
        has_missing = form is not None and form is not component
        rows = jnp.asarray(rows)
        weight = None
        if sample_weight is not None:
            check_weight(_on_host(sample_weight), rows)
            weight = jnp.asarray(sample_weight, rows.dtype)
        hyperparameters, dirichlet = as_dtype((prior, concentration), rows.dtype)
        width = jax.eval_shape(component.statistics, rows[:1].T).shape[0]
        weights = numpyro.sample(WEIGHTS, dist.Dirichlet(dirichlet))
        sample = _sampler(sites_by_component(component, hyperparameters, size, width), size)
        parameters = component.draw(sample, prior_of_all(component, hyperparameters, size, width))
        components = component.distribution(parameters)
        observed = ~jnp.isnan(rows) if has_missing else None
        if observed is not None:
            components = mask_missing(components, observed)
        with numpyro.plate(ROWS, rows.shape[0]), _counted(weight, observed):
            numpyro.sample(DATA, Mixture(weights, components), obs=rows)

    return model


def mixture_guide(
    component: Component, prior: Hyperparameters, concentration: Array, posterior: Hyperparameters, change: Change
) -> Guide:
    """A Dirichlet and posteriors of the components as a guide, each site's distribution changed."""
    size = concentration.shape[0]
    width = jax.eval_shape(component.coefficients, posterior)[1].shape[1]
    by_component = sites_by_component(component, prior, size, width)

    def guide(x: ArrayLike | None = None, sample_weight: ArrayLike | None = None) -> None:
        numpyro.sample(WEIGHTS, change(WEIGHTS, dist.Dirichlet(concentration)))
        sample = _sampler(by_component, size)
        component.draw(lambda name, fn: sample(name, change(name, fn)), posterior)

    return guide


class Mixture(dist.MixtureSameFamily):
    """A mixture of any components of one family, whose data may have missing entries.

    NumPyro's own refuses components whose support has arguments, such as the categorical, and has no density
    for NaN.

    Args:
        weights: Of the components, ``(K,)``.
        components: Batch shape ``(K,)``, or ``(n, K)`` where entries are missing; see :func:`masked`.
    """

    def __init__(self, weights: Array, components: dist.Distribution) -> None:
        self._mixing_distribution = dist.Categorical(probs=weights)
        self._component_distribution = components
        self._mixture_size = jnp.shape(weights)[-1]
        # Past the checks of MixtureSameFamily; and missing entries are outside of every support.
        super(dist.MixtureSameFamily, self).__init__(
            components.batch_shape[:-1], components.event_shape, validate_args=False
        )


def mask_missing(components: dist.Distribution, observed: Array) -> dist.Distribution:
    """Components for rows ``(n, d)`` with missing entries, which are marginalised.

    Args:
        components: Batch shape ``(K,)``, with columns that are independent where entries are missing.
        observed: Which entries there are, ``(n, d)``.

    Returns:
        Batch shape ``(n, K)``. Its draws are complete.
    """
    if isinstance(components, ColumnsOf):
        pairs = zip(components.parts, components.columns, strict=True)
        return ColumnsOf(
            [mask_missing(part, observed[:, np.asarray(where)]) for part, where in pairs], components.columns
        )
    if isinstance(components, dist.Independent) and len(components.event_shape) == 1:
        return components.base_dist.mask(observed[:, None, :]).to_event(1)
    # A part without missing entries, since its component refuses them.
    return components.expand((observed.shape[0], *components.batch_shape))


def prior_of_all(
    component: Component, prior: Hyperparameters, num_components: int, num_statistics: int
) -> Hyperparameters:
    """The prior in the form of a posterior: an axis K where each component has its own, none where they share."""
    dtype = jax.tree.leaves(prior)[0].dtype
    return component.update(
        prior, jnp.zeros(num_components, dtype), jnp.zeros((num_components, num_statistics), dtype)
    )


def sites_by_component(
    component: Component, prior: Hyperparameters, num_components: int, num_statistics: int
) -> dict[str, bool]:
    """Names of the parameters, and whether each component has its own."""

    def batch_shapes(size: int) -> dict[str, tuple[int, ...]]:
        shapes = {}

        def build(prior: Hyperparameters) -> None:
            def record(name: str, fn: dist.Distribution) -> Array:
                shapes[name] = fn.batch_shape
                return jnp.zeros(fn.shape())

            component.draw(record, prior_of_all(component, prior, size, num_statistics))

        jax.eval_shape(build, prior)
        return shapes

    # The shape of a shared parameter does not depend on K.
    shapes, one_more = batch_shapes(num_components), batch_shapes(num_components + 1)
    return {name: shapes[name] != one_more[name] for name in shapes}


def _on_host(values: ArrayLike) -> Rows:
    """Values that can be checked, also where NumPyro compiles the model; traced ones as they are."""
    return values if is_traced(values) else np.asarray(values)  # type: ignore[return-value]


def _sampler(by_component: dict[str, bool], num_components: int) -> Sample:
    """``numpyro.sample`` of parameters, in the plate of the components where each has its own."""

    def sample(name: str, fn: dist.Distribution) -> Array:
        if not by_component[name]:
            return numpyro.sample(name, fn.to_event(len(fn.batch_shape)))
        with numpyro.plate(COMPONENTS, num_components):
            return numpyro.sample(name, fn.to_event(len(fn.batch_shape) - 1))

    return sample


@contextmanager
def _counted(weight: Array | None, observed: Array | None) -> Iterator[None]:
    """Count each row as often as its weight says, and rows without an observed entry not at all.

    The density of the latter is 1 up to rounding.
    """
    with ExitStack() as stack:
        if weight is not None:
            # NumPyro has no scale of 0.
            stack.enter_context(handlers.scale(scale=jnp.where(weight > 0, weight, 1.0)))
            stack.enter_context(handlers.mask(mask=weight > 0))
        if observed is not None:
            stack.enter_context(handlers.mask(mask=jnp.any(observed, axis=1)))
        yield
