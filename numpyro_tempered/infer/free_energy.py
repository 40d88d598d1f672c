"""The free energy of a NumPyro model on its unconstrained scale."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer.util import potential_energy
from numpyro.primitives import Messenger

from numpyro_tempered.core.model_arguments import join, separate
from numpyro_tempered.core.programs import compile_once
from numpyro_tempered.core.typing import Array, Model, Params, PyTree
from numpyro_tempered.gaussian.descent import Derivatives, Objective
from numpyro_tempered.gaussian.descent.base import entropy
from numpyro_tempered.gaussian.descent.laplace_prior import LaplaceTerm, derivatives_of_laplace
from numpyro_tempered.gaussian.descent.objective import GaussianTerm, add, derivatives_of, of_evaluation
from numpyro_tempered.gaussian.expectations import Expectation, monte_carlo
from numpyro_tempered.gaussian.expectations.base import ModelLoss
from numpyro_tempered.gaussian.expectations.differentiate import depends_on, which_depend
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.effects import LOCAL, PRIOR_FACTOR, Trace, base_distribution
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.guides.prior import unindexed
from numpyro_tempered.infer.online_checks import check_rows_apart, trace_unconstrained


class Latents(NamedTuple):
    """The latent sites of a model as parts of a flat vector, in the order of their ``names``.

    Attributes:
        names: Their names.
        unpack: ``flat -> values by site``, unconstrained.
    """

    names: tuple[str, ...]
    unpack: Callable[[Array], Params]

    def _unpack_latent(self, flat: Array) -> Params:
        """``unpack``, under the name that ``model_loss`` calls."""
        return self.unpack(flat)


class Priors(NamedTuple):
    """What of a model has a closed form under a Gaussian.

    Attributes:
        term: Its Normal priors with fixed parameters.
        kinks: Its Laplace priors with fixed parameters; None if there are none.
        names: The sites of these priors.
        has_factors: Whether the prior has factors besides.
        is_smooth: Whether no likelihood has a kink, at which a quadrature is not exact.
    """

    term: GaussianTerm
    kinks: LaplaceTerm | None
    names: frozenset[str]
    has_factors: bool
    is_smooth: bool


class without(Messenger):
    """Leave the prior of some latent sites out of the log-density."""

    def __init__(self, fn: Model, names: frozenset[str]) -> None:
        self.names = names
        super().__init__(fn)

    def process_message(self, msg: likelihood.Site) -> None:
        """Mask a site."""
        if msg["type"] == "sample" and msg["name"] in self.names and not msg["is_observed"]:
            msg["fn"] = msg["fn"].mask(False)


def model_objective(
    model: temper,
    latents: Latents,
    q: Gaussian,
    args: tuple,
    kwargs: dict,
    *,
    expectation: Expectation | None,
    num_draws: int,
) -> tuple[Objective, bool]:
    """The function f = -α log L - log π of a tempered model, on its flat unconstrained scale.

    Priors that are Normal, multivariate Normal or Laplace with fixed parameters are integrated in closed form,
    the likelihood by ``expectation``. All other terms are averaged over draws, as is the likelihood without one.

    Args:
        model: The tempered model.
        latents: Its latent sites.
        q: A Gaussian, for shapes and for a point to trace the model at.
        args: Positional arguments of the model.
        kwargs: Its keyword arguments.
        expectation: Of a model's likelihood, or None.
        num_draws: Draws, antithetic, for what has neither closed form nor expectation.

    Returns:
        The objective, and whether a quadrature linearises a predictor that is not affine in the latents.

    Raises:
        TypeError: If the expectation is of a bare loss.
        ValueError: If the model has params, subsamples, observes nothing or scales local latents, or a datum
            depends on the predictor of another.
    """
    arrays, structure = separate(args, kwargs)
    with numpyro.validation_enabled(False):
        priors = closed_priors(model, latents, q, args, kwargs, by_draws=expectation is None)
    term, kinks = priors.term, priors.kinks
    needs_draws = expectation is None or priors.has_factors or len(priors.names) < len(latents.names)
    parts, loss = [], None
    if expectation is not None:
        if expectation.bind is None:
            raise TypeError(
                "this expectation is of a bare loss: take gauss_hermite(predictor=...) or monte_carlo() for a "
                "model's likelihood, or nt.descent.objective and minimise for a loss."
            )
        predictor, num_outputs = expectation.predictor, expectation.num_outputs
        loss = likelihood.model_loss(model, latents, predictor, num_outputs, prior_factors=True)
        with numpyro.validation_enabled(False):
            check_rows_apart(loss, q.loc, args, kwargs)
        bound = expectation.bind(weigh(loss))

        def expected_loss(q: Gaussian, data: PyTree, rng_key: Array | None) -> Derivatives:
            return of_evaluation(q, bound.evaluate(q, *join(data, structure), rng_key=rng_key))

        parts.append(expected_loss)
    if needs_draws:
        rest = without(model if expectation is None else temper(model, alpha=0.0), priors.names)

        def draws_of_the_rest(q: Gaussian, data: PyTree, rng_key: Array | None) -> Derivatives:
            args, kwargs = join(data, structure)

            def potential(theta: Array) -> Array:
                return potential_energy(rest, args, kwargs, latents.unpack(theta)).astype(theta.dtype)

            expectation = monte_carlo(potential, num_particles=num_draws, antithetic=True)
            return of_evaluation(q, expectation.evaluate(q, rng_key=rng_key))

        parts.append(draws_of_the_rest)

    def evaluate(q: Gaussian, data: PyTree, rng_key: Array | None) -> Derivatives:
        arrays, term, kinks = data
        keys = [None] * len(parts) if rng_key is None else list(jax.random.split(rng_key, len(parts)))
        terms = [part(q, arrays, key) for part, key in zip(parts, keys, strict=True)]
        return add([*terms, *_in_closed_form(term, kinks, q)])

    draws = expectation is not None and expectation.needs_key
    affine = loss is not None and loss.predictor is not None and _is_affine(loss, q, args, kwargs)
    linearised = loss is not None and loss.predictor is not None and not affine and not draws
    # Then all priors are Gaussian or Laplace too.
    exact_derivatives = affine and priors.is_smooth and not (needs_draws or draws)
    certified = loss is not None and exact_derivatives and _is_convex(loss, q, args, kwargs)
    precision = term.precision if certified and kinks is None else None
    return Objective(
        evaluate, (arrays, term, kinks), needs_draws or draws, precision, exact_derivatives
    ), linearised


def kl_of_priors(objective: Objective, q: Gaussian) -> float:
    """KL(q, prior) of an objective of :func:`model_objective` whose priors all have a closed form."""
    _, term, kinks = objective.data
    return float(sum(part.value for part in _in_closed_form(term, kinks, q)) - entropy(q))


def _in_closed_form(term: GaussianTerm, kinks: LaplaceTerm | None, q: Gaussian) -> list[Derivatives]:
    return [derivatives_of(term, q)] + ([] if kinks is None else [derivatives_of_laplace(kinks, q)])


def _is_affine(loss: ModelLoss, q: Gaussian, args: tuple, kwargs: dict) -> bool:
    """Whether the derivative of the predictor along a line does not depend on the latents."""
    predict, _ = loss.by_predictor()
    line = jnp.asarray(np.random.default_rng(0).normal(size=q.loc.shape), q.loc.dtype)

    def slope(theta: Array) -> Array:
        return jax.jvp(lambda t: predict(t, args, kwargs), (theta,), (line,))[1]

    return not depends_on(slope, q.loc)


def _is_convex(loss: ModelLoss, q: Gaussian, args: tuple, kwargs: dict) -> bool:
    """Whether each datum's loss has no negative curvature on a grid of predictors from -50 to 50."""
    predict, weighted = weigh(loss).by_predictor()
    u = predict(q.loc, args, kwargs)
    if u.ndim != 1:
        return False
    slopes = jax.grad(lambda v: jnp.sum(weighted(v, q.loc, args, kwargs)[0]))

    def curvature(at: Array) -> Array:
        v = jnp.full_like(u, 0.0) + at
        return jax.jvp(slopes, (v,), (jnp.ones_like(v),))[1]

    # Off the kinks that a loss may have at whole numbers.
    grid = jnp.asarray(np.concatenate([np.linspace(-50.0, 50.0, 101), np.linspace(-5.0, 5.0, 101)]) + 0.013)
    grid = grid.astype(u.dtype)
    curvatures = compile_once(lambda points: jax.lax.map(curvature, points), grid)(grid)
    curvatures = jnp.where(jnp.isfinite(curvatures), curvatures, 0.0)
    return bool(
        jnp.all(curvatures >= -1e-5 * jnp.maximum(jnp.max(jnp.abs(curvatures), axis=0, keepdims=True), 1.0))
    )


def weigh(model: ModelLoss) -> ModelLoss:
    """The losses times their weights, so that an expectation's value is the tempered one."""

    def weighted(losses_and_weights: tuple[Array, Array]) -> tuple[Array, Array]:
        losses, weights = losses_and_weights
        # A power of 0 takes a loss out, an infinite one too.
        return jnp.where(weights == 0, 0.0, losses * weights).astype(losses.dtype), jnp.ones_like(losses)

    losses_given = model.losses_given_predictor
    return ModelLoss(
        lambda theta, *data: weighted(model.losses(theta, *data)),
        model.predictor,
        None if losses_given is None else lambda u, theta, *data: weighted(losses_given(u, theta, *data)),
    )


def closed_priors(
    model: Model, latents: Latents, q: Gaussian, args: tuple, kwargs: dict, *, by_draws: bool
) -> Priors:
    """The priors that are Normal or Laplace with fixed parameters, their sites, and whether there are factors.

    Raises:
        ValueError: If draws would have to take the expectation of another density with a kink.
    """

    def trace_at(flat: Array) -> Trace:
        with handlers.block(), likelihood.refuse_subsampling():
            return trace_unconstrained(model, latents.unpack(flat), args, kwargs)

    def parameters(flat: Array) -> dict[str, tuple[Array, ...]]:
        return {name: _parameters(site) for name, site in likelihood.latent_sites(trace_at(flat)).items()}

    one = trace_at(q.loc)
    likelihood.check_likelihood(one, prior_factors=True)
    for site in likelihood.likelihood_sites(one).values():
        likelihood.log_prob_of_each(site)
    if unknown := sorted(set(likelihood.latent_sites(one)) ^ set(latents.names)):
        raise ValueError(f"latent sites {unknown} are not in model and guide: build the guide on this model.")
    # By the traced program: values that agree at two points may still depend on other latents.
    depends = which_depend(parameters, q.loc)
    d, dtype = q.loc.shape[0], q.loc.dtype
    places = latents.unpack(jnp.arange(d))
    loc, diagonal, blocks, constant, exact = np.zeros(d), np.zeros(d), [], 0.0, set()
    rate, kink_constant = np.zeros(d), 0.0
    for name in latents.names:
        site = one[name]
        if name.endswith("_unobserved") and f"{name.removesuffix('unobserved')}observed" in one:
            raise ValueError(
                f"latent {name!r} stands for data that obs_mask leaves out, and is improper where it does not: "
                "leave those data out of the likelihood by handlers.mask."
            )
        if site.get(LOCAL) is not None:
            raise ValueError(
                f"latent {name!r} is in a local plate, whose part in model and guide is tempered: one flat "
                "Gaussian cannot hold that. Integrate it out of the model, or use fit_svi with AutoNormal."
            )
        moments = None if any(jax.tree.leaves(depends[name])) else _moments(site)
        if moments is None:
            _refuse_kink(site)
            continue
        at = np.ravel(np.asarray(places[name]))
        mean, precision = moments
        exact.add(name)
        if type(unindexed(site["fn"])) is dist.Laplace:
            loc[at], rate[at] = mean, precision
            kink_constant += np.sum(np.log(2.0 / precision))
            continue
        loc[at] = mean
        if precision.ndim == 2:
            blocks.append((at, precision))
            constant -= 0.5 * np.linalg.slogdet(precision)[1]
        else:
            diagonal[at] = precision
            constant -= 0.5 * np.sum(np.log(precision))
        constant += 0.5 * at.size * np.log(2.0 * np.pi)
    matrix: np.ndarray = diagonal
    if blocks:
        matrix = np.diag(diagonal)
        for at, precision in blocks:
            matrix[np.ix_(at, at)] = precision
    has_factors = any(site.get(PRIOR_FACTOR) for site in one.values())
    likelihoods = likelihood.likelihood_sites(one).values()
    for site in likelihoods if by_draws else ():
        _refuse_kink(site)
    term = GaussianTerm(*(jnp.asarray(leaf, dtype) for leaf in (np.where(rate > 0, 0.0, loc), matrix, constant)))
    kinks = LaplaceTerm(*(jnp.asarray(leaf, dtype) for leaf in (loc, rate, kink_constant)))
    is_smooth = not any(_has_kink(site) for site in likelihoods)
    return Priors(term, kinks if rate.any() else None, frozenset(exact), has_factors, is_smooth)


def _has_kink(site: likelihood.Site) -> bool:
    return isinstance(base_distribution(site["fn"]), dist.Laplace | dist.AsymmetricLaplace)


def _refuse_kink(site: likelihood.Site) -> None:
    """Refuse a density with a kink, whose curvature no derivative at a draw has.

    Raises:
        ValueError: If its distribution is one of Laplace's.
    """
    if _has_kink(site):
        advice = (
            'name its predictor by numpyro.deterministic and take gauss_hermite(predictor="...")'
            if site["is_observed"]
            else "give it a location and scale that are fixed"
        )
        kind = type(base_distribution(site["fn"])).__name__
        raise ValueError(
            f"site {site['name']!r} is {kind}, whose log-density has a kink, and Hessians at draws miss the "
            f"curvature there. In fit_gaussian, {advice}; or use fit_svi."
        )


def _parameters(site: likelihood.Site) -> tuple[Array, ...]:
    """Location and spread of a site that is Gaussian or Laplace."""
    fn = unindexed(site["fn"])
    if type(fn) in (dist.Normal, dist.Laplace):
        return jnp.asarray(fn.loc), jnp.asarray(fn.scale)
    return (fn.mean, fn.precision_matrix) if type(fn) is dist.MultivariateNormal else ()


def _moments(site: likelihood.Site) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and precision of a site's own Gaussian prior: ``(size,)`` and ``(size,)`` or ``(size, size)``.

    Of a Laplace prior location and rate.
    """
    fn, shape = unindexed(site["fn"]), jnp.shape(site["value"])
    if site["scale"] is not None:
        return None
    if type(fn) in (dist.Normal, dist.Laplace):
        loc, scale = (np.ravel(np.broadcast_to(np.asarray(p, np.float64), shape)) for p in (fn.loc, fn.scale))
        return loc, 1.0 / (np.square(scale) if type(fn) is dist.Normal else scale)
    if type(fn) is dist.MultivariateNormal and fn.event_shape == shape:
        return np.asarray(fn.mean, np.float64), np.asarray(fn.precision_matrix, np.float64)
    return None
