"""Losses for NumPyro's SVI, and the evaluation of a tempered ELBO."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoGuide, AutoMultivariateNormal
from numpyro.infer.elbo import ELBO

from numpyro_tempered.core import (
    Array,
    Guide,
    Model,
    Params,
    TemperedELBO,
    check_choice,
    check_record,
    doubles,
    is_traced,
    map_batches,
    run_program,
    warn_caller,
)
from numpyro_tempered.gaussian.expectations import Expectation, monte_carlo
from numpyro_tempered.gaussian.families.base import require
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import (
    ALPHA,
    LOCAL,
    Trace,
    base_distribution,
    layers,
)
from numpyro_tempered.handlers.model_loss import model_loss
from numpyro_tempered.handlers.numpyro_private import Unpacks, mask_of
from numpyro_tempered.handlers.powers import as_factor
from numpyro_tempered.infer.guide_laws import is_auto, law_of
from numpyro_tempered.infer.guides.online import check_guide
from numpyro_tempered.infer.set_up import first_call

R = TypeVar("R")
_EVALUATIONS: ContextVar[list[str] | None] = ContextVar("_EVALUATIONS", default=None)


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """The names of the losses of :class:`.ExpectedNLL`'s kind that are evaluated within."""
    evaluations: list[str] = []
    token = _EVALUATIONS.set(evaluations)
    try:
        yield evaluations
    finally:
        _EVALUATIONS.reset(token)


@contextlib.contextmanager
def require_expected_nll(
    objective: Callable[..., object], optimiser: str
) -> Iterator[None]:
    """Refuse an objective, evaluated within, that is no :class:`.ExpectedNLL`.

    Args:
        objective: The objective, of which SVI makes a closure with its loss.
        optimiser: Name of the optimiser.

    Raises:
        TypeError: At the end, if no such loss was evaluated.
    """
    with _watched() as evaluations:
        yield
    if not evaluations:
        loss = loss_of(objective)
        name = "another loss" if loss is None else type(loss).__name__
        raise TypeError(
            f"nt.optim.{optimiser} holds the prior itself and takes the gradients of nt.optim.ExpectedNLL, got "
            f"{name}, with which the prior would count twice. Use "
            f"SVI(model, guide, nt.optim.{optimiser}(guide, ...), nt.optim.ExpectedNLL(...)), or an optimiser of "
            f"numpyro.optim with {name}."
        )


def loss_of(objective: Callable[..., object]) -> ELBO | None:
    """The loss of which SVI has made this objective, a closure; None for another objective."""
    cells = [
        cell.cell_contents for cell in getattr(objective, "__closure__", None) or ()
    ]
    return next((value for value in cells if isinstance(value, ELBO)), None)


@contextlib.contextmanager
def refuse_expected_nll(optimiser: str) -> Iterator[None]:
    """Refuse an objective, evaluated within, that is an :class:`.ExpectedNLL`, which has no prior.

    Raises:
        TypeError: At the end, if such a loss was evaluated.
    """
    with _watched() as evaluations:
        yield
    if evaluations:
        raise TypeError(
            f"nt.optim.{optimiser} takes the gradients of an ELBO, got {evaluations[0]}, in which the prior does "
            "not count: use Trace_ELBO() or TraceMeanField_ELBO()."
        )


def _counted(evaluate: Callable[..., R]) -> Callable[..., R]:
    """A loss that tells :func:`require_expected_nll` of its evaluation."""

    @functools.wraps(evaluate)
    def count_and_evaluate(self: ELBO, *args: object, **kwargs: object) -> R:
        if (evaluations := _EVALUATIONS.get()) is not None:
            evaluations.append(type(self).__name__)
        return evaluate(self, *args, **kwargs)

    return count_and_evaluate


class ExpectedNLL(ELBO):
    r"""The expected negative log-likelihood :math:`E_q[-\log L]`, without a KL term, as a loss for SVI.

    For the optimisers of :mod:`numpyro_tempered.optim`, whose proximal steps hold the prior. The
    loss value is untempered and unscaled, as the losses of ``OnlineVI``; the tempering of the
    model is in its gradients, which are those of Price and Bonnet, never the reparameterised
    gradient in the scale.

    Args:
        expectation: How to take the expectation; ``monte_carlo()`` by default,
            ``gauss_hermite(predictor=...)`` where the model names its predictor.
        curvature: ``"hessian"`` or ``"fisher"``, as in :func:`numpyro_tempered.online.ngvi`.

    Raises:
        TypeError: If the expectation is of a bare loss, or the guide is not an
            ``AutoOnlineDiagonalNormal`` or ``AutoOnlineMultivariateNormal``.

    Example:
        >>> import numpyro_tempered as nt
        >>> loss = nt.optim.ExpectedNLL(nt.expectations.gauss_hermite(predictor="eta"))
    """

    def __init__(
        self, expectation: Expectation | None = None, *, curvature: str = "hessian"
    ) -> None:
        super().__init__(num_particles=1)
        self.expectation = monte_carlo() if expectation is None else expectation
        self.curvature = check_choice(curvature, "curvature", ("hessian", "fisher"))

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name in {"loss", "loss_with_mutable_state"} & set(vars(cls)):
            setattr(cls, name, _counted(vars(cls)[name]))

    @_counted
    def loss_with_mutable_state(
        self,
        rng_key: Array,
        param_map: dict,
        model: Model,
        guide: Guide,
        *args: object,
        **kwargs: object,
    ) -> dict[str, Array | None]:
        """The loss at ``param_map``, as SVI asks for it."""
        online_guide = check_guide(guide, "ExpectedNLL")
        evaluate = bind(self.expectation, model, online_guide).evaluate
        q = online_guide.from_params(param_map)
        fixed = jax.lax.stop_gradient(q)
        evaluation = evaluate(
            fixed, args, kwargs, rng_key=rng_key, curvature=self.curvature
        )
        evaluation = jax.lax.stop_gradient(evaluation)
        gradient = require(fixed, "gradient", "ExpectedNLL")(
            fixed, evaluation.grad_loc, evaluation.grad_var
        )
        # Zero in value, the chosen gradients under differentiation.
        zeros = jax.tree.map(
            lambda g, new, old: jnp.sum(g * (new - old)), gradient, q, fixed
        )
        return {
            "loss": evaluation.expected + sum(jax.tree.leaves(zeros)),
            "mutable_state": None,
        }


def bind(expectation: Expectation, model: Model, guide: Unpacks) -> Expectation:
    """The expectation of a model's negative log-likelihood, on data ``(args, kwargs)``.

    Raises:
        TypeError: If the expectation is of a bare loss.
    """
    check_record(
        expectation, "expectation", Expectation, "nt.expectations.monte_carlo()"
    )
    if expectation.bind is None:
        raise TypeError(
            "this expectation is of a bare loss: run it by nt.online.run, or take "
            "gauss_hermite(predictor=...) or monte_carlo() for a model's likelihood."
        )
    return expectation.bind(
        model_loss(model, guide, expectation.predictor, expectation.num_outputs)
    )


def evaluate_elbo(
    rng_key: Array,
    model: Model,
    guide: Guide,
    params: Params,
    args: tuple,
    kwargs: dict,
    *,
    num_particles: int,
    trace: Trace | None = None,
) -> TemperedELBO:
    """The ELBO of a fitted guide on a tempered model.

    Args:
        rng_key: For the draws.
        model: The tempered model.
        guide: The fitted guide.
        params: Its parameters.
        args: Positional arguments of model and guide.
        kwargs: Their keyword arguments.
        num_particles: Number of draws, at least 2.
        trace: Of the model at any draw, where it is known.
    """
    guide_trace = trace_guide(rng_key, guide, params, args, kwargs)
    model_trace = trace or trace_model(
        rng_key, model, guide_trace, params, args, kwargs
    )
    observed = set(likelihood.likelihood_sites(model_trace))
    loss = _analytic_where_valid(model_trace, guide_trace)

    powers = {
        name: site.get(ALPHA, 1.0)
        for name, site in likelihood.likelihood_sites(model_trace).items()
    }
    # One power above 0 for all data of a site leaves its untempered log-likelihood in the loss.
    is_plain = all(
        isinstance(power, float) and power > 0.0 for power in powers.values()
    )

    def particle(key: Array, params: Params) -> tuple[Array, Array, Array]:
        # In an order that is the same in every process.
        parts = {
            k: -v
            for k, v in sorted(
                loss.loss(key, params, model, guide, *args, **kwargs).items()
            )
        }
        weighted = sum((v for k, v in parts.items() if k in observed), jnp.zeros(()))
        kl = -sum((v for k, v in parts.items() if k not in observed), jnp.zeros(()))
        if is_plain:
            return (
                weighted - kl,
                sum(
                    (parts[name] / as_factor(power) for name, power in powers.items()),
                    jnp.zeros(()),
                ),
                kl,
            )
        # The same split of the key as in NumPyro's losses, so the same draws.
        model_key, guide_key = jax.random.split(key)
        draw = trace_guide(guide_key, guide, params, args, kwargs)
        sites = likelihood.likelihood_sites(
            trace_model(model_key, model, draw, params, args, kwargs)
        ).values()
        log_liks = (
            likelihood.other_scale(site) * likelihood.untempered_log_prob(site)
            for site in sites
        )
        return (
            weighted - kl,
            sum((jnp.sum(log_lik) for log_lik in log_liks), jnp.zeros(())),
            kl,
        )

    def particles(key: Array, params: Params) -> tuple[Array, Array, Array]:
        return map_batches(
            lambda k: particle(k, params), jax.random.split(key, num_particles), 32
        )

    elbos, log_liks, kls = map(doubles, run_program(particles, rng_key, params))
    with np.errstate(invalid="ignore"):  # a draw without a density makes the error NaN
        se, log_lik = (
            float(np.std(elbos, ddof=1)) / math.sqrt(num_particles),
            float(np.mean(log_liks)),
        )
    if has_point_mass(rng_key, guide, params, args, kwargs):
        return TemperedELBO(-math.inf, 0.0, log_lik, math.inf)
    return TemperedELBO(
        float(np.mean(elbos)),
        se,
        log_lik,
        float(np.mean(kls)),
        improper_sites(model_trace),
    )


def improper_sites(trace: Trace) -> tuple[str, ...]:
    """The latent sites whose prior is flat, or masked in any of its entries."""
    return tuple(
        name
        for name, site in likelihood.latent_sites(trace).items()
        if _is_improper(site["fn"])
    )


def _is_improper(fn: dist.Distribution) -> bool:
    parts = layers(fn, "base_dist")
    masks = [
        mask_of(part) for part in parts if isinstance(part, dist.MaskedDistribution)
    ]
    # A mask that is traced is not known.
    is_off = any(not is_traced(mask) and not np.all(np.asarray(mask)) for mask in masks)
    return is_off or isinstance(parts[-1], dist.ImproperUniform)


def gaussian_of_laplace(
    guide: AutoGuide,
    model: Model,
    params: dict,
    rng_key: Array,
    args: tuple,
    kwargs: dict,
) -> tuple[Guide, dict]:
    """Guide and parameters to evaluate: of a Laplace approximation the Gaussian, not the mode."""
    if not law_of(guide).is_laplace:
        return guide, params
    q = guide.get_posterior(params)
    gaussian = AutoMultivariateNormal(model, prefix=guide.prefix)
    first_call(lambda: handlers.seed(gaussian, rng_key)(*args, **kwargs), gaussian)
    return gaussian, {
        **params,
        f"{guide.prefix}_loc": q.loc,
        f"{guide.prefix}_scale_tril": q.scale_tril,
    }


def trace_guide(
    rng_key: Array, guide: Guide, params: dict, args: tuple, kwargs: dict
) -> Trace:
    """A trace of the guide at one draw."""
    run = handlers.trace(
        handlers.substitute(handlers.seed(guide, rng_key), params)
    ).get_trace
    # Parameters of NumPyro's guides are what their constraints make of them, and each check is some programs.
    is_known = is_auto(guide)
    with numpyro.validation_enabled(False) if is_known else contextlib.nullcontext():
        return run(*args, **kwargs)


def trace_model(
    rng_key: Array, model: Model, draw: Trace, params: dict, args: tuple, kwargs: dict
) -> Trace:
    """A trace of the model at a draw of the guide."""
    replayed = handlers.replay(handlers.seed(model, rng_key), draw)
    return likelihood.get_trace(handlers.substitute(replayed, params), args, kwargs)


def find_points(one: Trace, two: Trace) -> Params:
    """Return for each latent with a mass at a point whether two draws of a guide agree in it."""
    return {
        name: jnp.array_equal(site["value"], two[name]["value"])
        for name, site in likelihood.latent_sites(one).items()
        if isinstance(base_distribution(site["fn"]), dist.Delta)
    }


def has_point_mass(
    rng_key: Array, guide: Guide, params: dict, args: tuple, kwargs: dict
) -> bool:
    """Whether a latent of the guide is a point, the same in every draw: its KL is infinite."""

    def repeats(key: Array, params: Params) -> Params:
        one, two = (
            trace_guide(k, guide, params, args, kwargs) for k in jax.random.split(key)
        )
        return find_points(one, two)

    return bool(jax.eval_shape(repeats, rng_key, params)) and any(
        map(bool, run_program(repeats, rng_key, params).values())
    )


def _analytic_where_valid(model_trace: Trace, guide_trace: Trace) -> ELBO:
    """The loss with analytic KLs where model and guide order their sites alike, as its mean-field form needs."""

    def names(trace: Trace, other: Trace) -> list[str]:
        return [
            k for k, site in trace.items() if site["type"] == "sample" and k in other
        ]

    def same_scale(prior: likelihood.Site, factor: likelihood.Site) -> bool:
        scale = np.asarray(likelihood.other_scale(prior)) * np.asarray(
            prior.get(LOCAL, 1.0)
        )
        return bool(np.all(scale == np.asarray(likelihood.other_scale(factor))))

    shared = names(model_trace, guide_trace)
    # An analytic KL knows the guide's scale alone.
    if not all(same_scale(model_trace[k], guide_trace[k]) for k in shared):
        return Trace_ELBO(sum_sites=False)
    if shared == names(guide_trace, model_trace):
        return TraceMeanField_ELBO(sum_sites=False)
    warn_caller(
        "guide and model order their sites differently: the KL of the ELBO is estimated by draws."
    )
    return Trace_ELBO(sum_sites=False)
