"""The covariance of a mean-field fit by linear response, where its own standard deviations are too small."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_value
from numpyro.infer.autoguide import AutoGuide, AutoMultivariateNormal

from numpyro_tempered.core import (
    Array,
    PyTree,
    TemperedELBO,
    check_count,
    check_record,
    doubles,
    forward_else_reverse,
    key_first,
    map_batches,
    run_program,
    runs_models,
    trace_once,
    warn_caller,
)
from numpyro_tempered.gaussian.descent import Objective
from numpyro_tempered.gaussian.descent.base import entropy
from numpyro_tempered.gaussian.expectations import Expectation
from numpyro_tempered.gaussian.families import FullRank, MeanField
from numpyro_tempered.gaussian.families.base import family_of
from numpyro_tempered.handlers.arguments import feasible_trace
from numpyro_tempered.handlers.likelihood import Layout
from numpyro_tempered.handlers.requirements import require
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.flat_gaussian import read_guide
from numpyro_tempered.infer.free_energy import FreeEnergy, model_objective
from numpyro_tempered.infer.gaussian import NUM_PARTICLES, quadrature_elbo
from numpyro_tempered.infer.guide_laws import law_of, order_of
from numpyro_tempered.infer.priors import Latents
from numpyro_tempered.infer.svi import TemperedFit, finish
from numpyro_tempered.infer.tempered_fit import LinearResponse
from numpyro_tempered.report.draws import bind

Product: TypeAlias = Callable[[Array], Array]
# Bytes for the products of the Hessian that are taken at a time.
_MEMORY_BUDGET = 2**28


class Response(NamedTuple):
    """The derivatives of the free energy at a mean-field Gaussian, in units of its standard deviations.

    Attributes:
        hessian: In means and relative scales, ``(2d, 2d)``.
        grad: The gradient in the same coordinates, ``(2d,)``.
        eigenvalues: Of the Hessian, ascending, ``(2d,)``.
        weakest: The eigenvector of the smallest, ``(2d,)``.
    """

    hessian: np.ndarray
    grad: np.ndarray
    eigenvalues: np.ndarray
    weakest: np.ndarray

    @property
    def gap(self) -> float:
        """½ gᵀ K⁻¹ g, the nats that a Newton step would gain."""
        return float(0.5 * self.grad @ np.linalg.solve(self.hessian, self.grad))

    def root(self) -> np.ndarray:
        """The triangular root of the covariance of the means, ``(d, d)``: of the inverse Schur complement."""
        d = len(self.grad) // 2
        cross = self.hessian[:d, d:]
        schur = self.hessian[:d, :d] - cross @ np.linalg.solve(
            self.hessian[d:, d:], cross.T
        )
        inverse = np.linalg.solve(np.linalg.cholesky(schur), np.eye(d))
        return np.linalg.cholesky(inverse.T @ inverse)


def respond(
    objective: Objective, q: MeanField, rng_key: Array, num_draws: int
) -> Response:
    r"""The derivatives of the free energy of N(m + σ a, diag σ²(1 + t)²) in (a, t), at 0.

    In these coordinates the expectation of a convex f is convex for every set of draws, and the entropy adds the
    identity to the block of t. With E[∇²f] in the block of a, the gradient in t is diag(σ²E[∇²f]) - 1 by Price's
    identity, which varies less over draws than its own derivative.

    Args:
        objective: E_q[f], of the model.
        q: The Gaussian, canonical.
        rng_key: For the draws, the same for all derivatives.
        num_draws: Their number, for the memory.
    """
    (d,) = q.loc.shape
    elements = sum(jnp.size(leaf) for leaf in jax.tree.leaves(objective.data)) + 2 * d
    chunk = max(1, _MEMORY_BUDGET // (q.loc.dtype.itemsize * num_draws * elements))

    def value(member: MeanField, data: PyTree, rng_key: Array) -> Array:
        return objective.evaluate(member, data, rng_key).value

    value = trace_once(value, q, objective.data, rng_key)

    def derivatives(q: MeanField, data: PyTree, rng_key: Array) -> tuple[Array, Array]:
        def expected(z: Array) -> Array:
            return value(
                MeanField(q.loc + q.scale * z[:d], q.scale * (1.0 + z[d:])),
                data,
                rng_key,
            )

        gradient, origin = jax.grad(expected), jnp.zeros(2 * d, q.loc.dtype)
        grad, product = forward_else_reverse(
            lambda: _products(gradient, origin),
            lambda: _transposed_products(gradient, origin),
        )
        return grad[:d], map_batches(product, jnp.eye(2 * d, dtype=grad.dtype), chunk)

    grad, columns = (
        doubles(leaf) for leaf in run_program(derivatives, q, objective.data, rng_key)
    )
    hessian = 0.5 * (columns + columns.T)
    hessian[d:, d:] += np.eye(d)
    if not (np.all(np.isfinite(hessian)) and np.all(np.isfinite(grad))):
        raise ValueError(
            "the Hessian of the free energy at the fit is not finite: check the data for NaN and the model for "
            "densities that overflow near the fit, or take more precision by jax_enable_x64."
        )
    values, vectors = np.linalg.eigh(hessian)
    grad = np.concatenate([grad, np.diagonal(hessian)[:d] - 1.0])
    return Response(hessian, grad, values, vectors[:, 0])


def _products(gradient: Product, point: Array) -> tuple[Array, Product]:
    """A gradient, and the products of its derivative with vectors."""
    value, product = jax.linearize(gradient, point)
    # What has no rule for forward mode fails only where the products are taken.
    jax.eval_shape(jax.vmap(product), point[None])
    return value, product


def _transposed_products(gradient: Product, point: Array) -> tuple[Array, Product]:
    """The same in reverse mode, as the derivative is symmetric."""
    value, pull = jax.vjp(gradient, point)
    return value, lambda vector: pull(vector)[0]


# The Hessian of means and scales has twice as many rows, and is decomposed in double precision.
MAX_LATENTS = 500
# In nats: the means are off by a standard deviation of the response.
MAX_GAP = 0.5
_NEEDS = {
    "plates": " at each call, and linear response is of all data: fit the model with plates of all data.",
    "global": ": the fit is that of no density of all latents. Linear response is for fits without local_plates.",
    "params": ", which have no posterior and would respond too: give them priors.",
}


@key_first
@runs_models
def linear_response(
    rng_key: Array,
    fit: Any,
    *data: object,
    expectation: Expectation | None = None,
    num_draws: int = 256,
    num_particles: int = NUM_PARTICLES,
    **kwargs: object,
) -> TemperedFit:
    r"""The covariance of a mean-field fit by linear response, as a fit with a full covariance.

    Where latents depend on each other, the standard deviations of a mean-field Gaussian are those of each latent
    with the others fixed, and so too small, while its means are mostly good. What a tilt of the target by
    :math:`e^{t^\top \theta}` does to the means of a posterior is its covariance. What it does to those of the
    fit's optimum is

    .. math:: \Sigma = \frac{d m(t)}{d t^\top}\Big|_{t = 0} = \big[(\nabla^2 K)^{-1}\big]_{mm}, \qquad
              K(m, \sigma) = E_{N(m, \mathrm{diag}\,\sigma^2)}[f] - \textstyle\sum_j \log \sigma_j,
              \qquad f = -\alpha \log L - \log \pi,

    by the implicit function theorem: it takes no other fit, but one Hessian of 2d parameters. It is the
    covariance of the posterior where that is Gaussian, and near it where the means are good. All of it is on the
    unconstrained scale, for the tempered model of the fit.

    The means stay those of the fit. Where the posterior is far from Gaussian, as in hierarchies of few groups,
    they may be off, and the response too: a warning says so where its ELBO is below that of the fit. It is the
    response of one optimum, and knows nothing of other modes. :func:`fit_gaussian` with
    ``AutoMultivariateNormal`` maximises the ELBO over means and covariance, which by that measure is never worse.

    Args:
        rng_key: For the draws, and those of the ELBO.
        fit: A fit of :func:`fit_svi` or :func:`fit_gaussian` with ``AutoNormal``, ``AutoDiagonalNormal``,
            ``AutoOnlineDiagonalNormal``, or another guide of mean-field Gaussians; the choice of
            :func:`select_alpha` that holds one; or the posterior of a stream.
        *data: What follows a posterior that does not hold its data: the arguments of the model.
        expectation: Of the likelihood, as in :func:`fit_gaussian`: ``gauss_hermite(predictor="eta")`` where the
            model names a predictor that is affine in the latents. By draws where it is left out.
        num_draws: Antithetic draws for what has no closed form, the same for all derivatives; even. Their number
            does not matter where the target is Gaussian, as they cancel.
        num_particles: Draws for the ELBO, where quadrature does not know it.
        **kwargs: Keyword arguments of the model, likewise.

    Returns:
        A :class:`.TemperedFit` of the same model and data, with an ``AutoMultivariateNormal`` that has the fit's
        means and the covariance of linear response. Its ELBO is that of this Gaussian, its ``losses`` are empty,
        and its ``convergence`` is a :class:`.LinearResponse`.

    Raises:
        TypeError: If ``fit`` is no posterior by a mean-field Gaussian.
        ValueError: If the Hessian is not positive definite, or the fit is more than half a nat from its optimum;
            if there are more than 500 latent coordinates; if the model has params, subsamples, local plates, or
            densities with kinks, as for :func:`fit_gaussian`; if the predictor of a quadrature is not affine.

    References:
        Giordano18; Giordano24 for draws that are fixed.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(x, y):
        ...     b = numpyro.sample("b", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
        ...     numpyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)
        >>> x = jnp.array([[1.0, 0.9], [0.9, 1.0], [1.0, 1.0], [-1.0, -0.8]])
        >>> fit = nt.fit_gaussian(jax.random.key(0), model, AutoNormal, x, x @ jnp.array([1.0, 2.0]))
        >>> response = nt.linear_response(jax.random.key(1), fit)
        >>> variance = response.guide.get_posterior(response.params).variance
        >>> exact = jnp.linalg.solve(x.T @ x + jnp.eye(2) / 100, jnp.eye(2))
        >>> print(f"{fit.params['b_auto_scale'][0]:.2f} {variance[0] ** 0.5:.2f} {exact[0, 0] ** 0.5:.2f}")
        0.51 3.67 3.67
    """
    if check_count(num_draws, "num_draws", 2) % 2:
        raise ValueError(f"num_draws must be even, got {num_draws}.")
    check_count(num_particles, "num_particles", 2)
    if expectation is not None:
        check_record(
            expectation, "expectation", Expectation, 'gauss_hermite(predictor="eta")'
        )
    fit = bind(fit, data, kwargs, rng_key=rng_key)
    mean_field, layout = read_fit(fit)
    _check_fit(fit, mean_field)
    guide_key, draw_key, elbo_key, later_key = jax.random.split(rng_key, 4)
    model = fit.model if isinstance(fit.model, temper) else temper(fit.model)
    mean_field_guide: AutoGuide = fit.guide
    fit = fit if fit.elbo is not None else fit.evaluate(num_particles)
    args, kwargs = fit.args, fit.kwargs
    medians = mean_field_guide.median(fit.params)
    # The guide keeps these, and may have computed deterministic sites of the size of the data.
    start = init_to_value(values={name: medians[name] for name, _ in layout.sites})
    guide = AutoMultivariateNormal(
        model, prefix=mean_field_guide.prefix, init_loc_fn=start
    )
    _, latents, to_params = read_guide(guide_key, guide, args, kwargs)
    order = order_of(layout, latents.names)
    q = MeanField(*(jax.device_put(np.asarray(leaf)[order]) for leaf in mean_field))
    energy = model_objective(
        model, latents, q, args, kwargs, expectation=expectation, num_draws=num_draws
    )
    if expectation is not None and energy.linearised:
        raise ValueError(
            f"predictor {expectation.predictor!r} is not affine in the latents, and the response of its "
            "linearisation is not that of the fit: leave expectation out, for draws."
        )
    response = respond(energy.objective, q, draw_key, num_draws)
    _check_response(response, latents, q.loc.dtype, by_draws=energy.objective.needs_key)
    root = response.root()
    normal = FullRank(
        q.loc, jnp.asarray(np.asarray(q.scale)[:, None] * root, q.loc.dtype)
    )
    result = finish(
        (elbo_key, later_key),
        model,
        guide,
        to_params(normal),
        np.zeros(0),
        args,
        kwargs=kwargs,
        num_particles=num_particles,
        known_elbo=partial(_known_elbo, energy, normal),
    )
    _warn_if_worse(fit.elbo, result.elbo)
    ratios = np.sqrt(np.sum(np.square(root), axis=1))
    evidence = LinearResponse(
        fit.converged,
        response.gap,
        float(response.eigenvalues[0]),
        (float(ratios.min()), float(ratios.max())),
    )
    return result._replace(convergence=evidence, coords=fit.coords, columns=fit.columns)


def read_fit(fit: object) -> tuple[MeanField, Layout]:
    """The mean-field Gaussian of a fit, and the order of its coordinates.

    Raises:
        TypeError: If it is another fit.
    """
    if not isinstance(fit, TemperedFit):
        raise TypeError(
            f"linear_response takes a TemperedFit of fit_svi or fit_gaussian, got {type(fit).__name__}."
        )
    law, kind = law_of(fit.guide), type(fit.guide).__name__
    if law.is_gaussian and law.read is not None and not law.has_covariance:
        q, layout, *_ = law.read(fit.guide, fit.params)
        if (family := family_of(q)).diagonal_only:
            q = family.canonical(q)
            return MeanField(q.loc, family.root(q)), layout
    if law.is_gaussian or (law.has_covariance and not law.is_heavy):
        raise TypeError(
            f"a fit by {kind} has a covariance already, to which linear response has nothing to add: it is for "
            "fits of mean-field Gaussians, by AutoNormal or AutoDiagonalNormal."
        )
    raise TypeError(
        f"linear_response takes a fit by AutoNormal or AutoDiagonalNormal, a mean-field Gaussian, got {kind}: "
        "fit the model with one of these."
    )


def _known_elbo(energy: FreeEnergy, q: FullRank, alpha: object) -> TemperedELBO | None:
    """The ELBO of a Gaussian where quadrature knows it."""
    if not energy.objective.exact:
        return None

    def elbo(q: FullRank, data: PyTree) -> Array:
        return entropy(q) - energy.objective.evaluate(q, data, None).value

    data = energy.objective.data
    return quadrature_elbo(
        run_program(trace_once(elbo, q, data), q, data), q, energy, alpha
    )


def _warn_if_worse(fit: TemperedELBO, response: TemperedELBO) -> None:
    """Warn where the covariance of linear response describes the posterior worse than that of the fit."""
    fall, noise = fit.value - response.value, 2.0 * np.hypot(fit.se, response.se)
    if not fall <= MAX_GAP + noise:
        warn_caller(
            f"the ELBO of linear response is {fall:.2g} nats below that of the fit: the posterior is far from "
            "Gaussian, and these standard deviations may be too large. Compare them with those of fit_gaussian "
            "with AutoMultivariateNormal, or of NUTS."
        )


def _check_fit(fit: TemperedFit, q: MeanField) -> None:
    """Refuse what has no single density of all latents, or too many of them.

    Raises:
        ValueError: With what to do.
    """
    require(feasible_trace(fit.model, fit.args, fit.kwargs), _NEEDS)
    (d,) = q.loc.shape
    if d > MAX_LATENTS:
        raise ValueError(
            f"the fit has {d} latent coordinates, and linear response is for at most {MAX_LATENTS}, as it takes "
            f"the whole Hessian of {2 * d} parameters: use fit_svi with AutoLowRankMultivariateNormal."
        )


def _check_response(
    response: Response, latents: Latents, dtype: jnp.dtype, *, by_draws: bool
) -> None:
    """Refuse a point that is no optimum.

    Raises:
        ValueError: With the smallest eigenvalue, or the distance to the optimum, and what to do.
    """
    values = response.eigenvalues
    rounding = len(values) * float(jnp.finfo(dtype).eps) * np.max(np.abs(values))
    more_draws = ", or take more num_draws" if by_draws else ""
    advice = f"Fit again, by fit_gaussian or by fit_svi with a smaller tolerance or num_restarts{more_draws}."
    if values[0] <= rounding:
        d = len(values) // 2
        place = int(np.argmax(np.abs(response.weakest)))
        name = next(name for name, at in latents.places(d).items() if place % d in at)
        reason = (
            f"That is within the rounding of {np.dtype(dtype).name}: enable jax_enable_x64, or write the model "
            "with latents that depend less on each other."
            if values[0] > -rounding
            else f"A fit at an optimum has none below 0. {advice} Where the posterior has several modes, or "
            "ridges between them, take NUTS."
        )
        raise ValueError(
            "the Hessian of the free energy at the fit is not positive definite: its smallest eigenvalue is "
            f"{values[0]:.3g} in units of the fit's standard deviations, mostly along a "
            f"{'mean' if place < d else 'scale'} of {name!r}. {reason}"
        )
    if not response.gap <= MAX_GAP:
        raise ValueError(
            f"the fit is about {response.gap:.3g} nats from the optimum of its family, and linear response, "
            f"which is that of an optimum, is refused beyond {MAX_GAP}. {advice}"
        )
