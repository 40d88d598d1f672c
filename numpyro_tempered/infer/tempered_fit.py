"""A guide fitted to a tempered model, as a tempered posterior."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import biject_to

from numpyro_tempered.core import (
    Array,
    DataSummary,
    Description,
    Evidence,
    Guide,
    Labels,
    Model,
    Numbers,
    Params,
    Shape,
    TemperedELBO,
    add_repr,
    axis_labels,
    check_columns,
    check_count,
    check_key,
    fit_attrs,
    map_batches,
    refuse_data,
    run_program,
)
from numpyro_tempered.gaussian.descent import Result
from numpyro_tempered.handlers import likelihood
from numpyro_tempered.handlers.arguments import argument_columns
from numpyro_tempered.handlers.effects import Trace
from numpyro_tempered.handlers.robust import Divergence
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.infer.elbo import evaluate_elbo, gaussian_of_laplace, trace_guide
from numpyro_tempered.infer.guide_laws import (
    flat_layout,
    is_auto,
    law_of,
    location_scale_of,
)
from numpyro_tempered.infer.moments import moments_of
from numpyro_tempered.infer.settle import Convergence
from numpyro_tempered.report.draws import name_of, plain_params
from numpyro_tempered.report.predict import predict


@add_repr
class LinearResponse(NamedTuple):
    """How far :func:`linear_response` may be trusted.

    Attributes:
        converged: Whether the mean-field fit had, ``fit.converged``; None where nothing shows it.
        gap: Estimate of the nats by which the mean-field fit misses the optimum of its family, ½ gᵀ K⁻¹ g with g
            the gradient and K the Hessian of its free energy.
        smallest_eigenvalue: Of the Hessian in units of the fit's standard deviations, in which it has 1 and 2 for
            independent Gaussian latents; the nearer to 0, the more latents depend on each other.
        ratios: The standard deviations of linear response over those of the fit on the unconstrained scale, the
            smallest and the largest.
    """

    converged: bool | None
    gap: float
    smallest_eigenvalue: float
    ratios: tuple[float, float]


def attrs_of(
    evidence: Convergence | Result | LinearResponse | None,
) -> dict[str, object]:
    """The attributes of draws from a fit: its algorithm, and numbers of its evidence."""
    if isinstance(evidence, Result):
        return {
            "algorithm": "gaussian_vi",
            "stationarity": float(evidence.stationarity),
            "num_evaluations": int(evidence.num_evaluations),
        }
    if isinstance(evidence, LinearResponse):
        numbers = {
            name: getattr(evidence, name) for name in ("gap", "smallest_eigenvalue")
        }
        return {"algorithm": "linear_response", **numbers}
    numbers = {}
    if isinstance(evidence, Convergence):
        numbers = {
            name: float(getattr(evidence, name))
            for name in ("gap", "num_steps", "rejected")
        }
    return {"algorithm": "svi", **numbers}


# Draws for moments that have no formula.
NUM_DRAWS = 4000


@add_repr
class TemperedFit(NamedTuple):
    """A tempered posterior that a guide holds, by :func:`fit_svi` and others.

    Attributes:
        model: The tempered model.
        guide: The fitted guide, built on ``model``.
        params: Its parameters.
        alpha: Power on the likelihood; by site where sites differ.
        losses: Negative ELBO at every step, NaN where its gradient was not finite; for ``AutoSpikeAndSlab``
            the negative relaxed objective, which is no bound.
        elbo: The ELBO at the end, with its standard error and its two parts; None of a stream.
        observed: Observed values by site.
        args: The model's positional arguments.
        kwargs: The model's keyword arguments.
        rng_key: Key for what is drawn from the fit afterwards; None of a result without one.
        convergence: How near the fit came to the optimum: a :class:`.Convergence` of :func:`fit_svi`, a
            :class:`.descent.Result` of :func:`fit_gaussian`, a :class:`.LinearResponse` of
            :func:`linear_response`; None of other fits.
        divergences: By site what :class:`robust` has put in the place of the log-likelihood; None if nothing.
        coords: Labels of the data's named axes, such as the columns of a frame; None if there are none.
        columns: Names of the columns of the data frames among the arguments; None if there are none.
        source: The result of another algorithm whose posterior this is, which says the rest: ``converged``,
            ``evidence``, ``summarise_data()``, ``describe()``, and may ``draw(rng_key, num_samples)``; else None.
    """

    model: Model
    guide: Guide
    params: Params
    alpha: float | dict[str, float]
    losses: Numbers
    elbo: TemperedELBO
    observed: Params
    args: tuple
    kwargs: dict[str, object]
    rng_key: Array | None
    convergence: Convergence | Result | LinearResponse | None = None
    divergences: Mapping[str, Divergence] | None = None
    coords: Labels | None = None
    columns: Mapping[str, tuple] | None = None
    source: Any = None

    @property
    def converged(self) -> bool | None:
        """Whether the fit reached its tolerance; None where nothing shows it, see :class:`.Convergence`."""
        evidence = self.convergence if self.source is None else self.source
        if evidence is None or evidence.converged is None:
            return None
        return bool(evidence.converged)

    @property
    def evidence(self) -> Evidence:
        """What is known of the optimum: the same numbers for every algorithm."""
        if self.source is not None:
            return self.source.evidence
        if isinstance(self.convergence, Result):
            gap, optima = float(self.convergence.stationarity), self.convergence.optima
            return Evidence(gap, int(self.convergence.num_evaluations), optima)
        if isinstance(self.convergence, Convergence):
            gap, optima = self.convergence.gap, self.convergence.optima
            return Evidence(gap, self.convergence.num_steps, optima)
        if isinstance(self.convergence, LinearResponse):
            return Evidence(self.convergence.gap)
        return Evidence(num_iter=len(self.losses))

    @property
    def key(self) -> Array:
        """``rng_key``, or a fixed one: a number of a fit is one number."""
        return jax.random.key(0) if self.rng_key is None else self.rng_key

    @property
    def fitted_model(self) -> Model:
        """The tempered model with its fitted params, such as the weights of a network, in its likelihood."""
        return handlers.substitute(self.model, data=self.params)

    @property
    def target(self) -> Target:
        """The tempered model at its data."""
        values = {k: v["value"] for k, v in _latent_sites(self, self.key).items()}
        model, key = self.fitted_model, self.rng_key
        return Target(model, self.args, self.kwargs, key, values)

    @property
    def mean(self) -> Params:
        """Posterior means of the latents, in the units of the model.

        Exact where the guide is Gaussian on the unconstrained scale and a number is a function of one coordinate;
        else over 4,000 draws, of the same key each time.
        """
        return _moments(self)[0]

    @property
    def sd(self) -> Params:
        """Posterior standard deviations of the latents, as ``mean``."""
        return _moments(self)[1]

    def sample_posterior(self, rng_key: Array, sample_shape: Shape = ()) -> Params:
        """Draws of the latents.

        Args:
            rng_key: Key of the draws.
            sample_shape: Shape of the draws.

        Returns:
            By latent site, ``(*sample_shape, ...)``.

        Example:
            >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
            >>> from numpyro.infer.autoguide import AutoNormal
            >>> import numpyro_tempered as nt
            >>> def model(y):
            ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
            ...     with numpyro.plate("n", len(y)):
            ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
            >>> fit = nt.fit_gaussian(jax.random.key(0), model, AutoNormal, jnp.ones(6), alpha=0.5)
            >>> fit.sample_posterior(jax.random.key(1), (5,))["theta"].shape
            (5,)
        """
        size = int(np.prod(sample_shape, dtype=int))
        draws = draw(self, rng_key, size)
        return {
            k: jnp.reshape(v, (*sample_shape, *v.shape[1:])) for k, v in draws.items()
        }

    def log_prob(self, values: Params) -> Array:
        """Log-density of the guide at values of the latents.

        Args:
            values: By latent site, in the units of the model.

        Returns:
            A number, in nats.
        """
        where = self.guide, self.model, self.params, self.key, self.args, self.kwargs
        guide: Any
        # Under a transformation the guide of a Laplace approximation is set up as outside of it.
        with jax.ensure_compile_time_eval():
            guide, params = gaussian_of_laplace(*where)
        one = data = self._one_draw(values)
        inside = jnp.ones((), bool)
        if law_of(guide).form == "flat":
            # Its sites are functions of one flat vector, and inverses of values outside are projections.
            flat = []
            for name, _ in flat_layout(guide).sites:
                support = guide.prototype_trace[name]["fn"].support
                flat.append(jnp.ravel(biject_to(support).inv(one[name])))
                inside &= jnp.all(support(one[name]))
            data = {f"_{guide.prefix}_latent": jnp.concatenate(flat)}

        def density(data: Params, params: Params) -> Array:
            at = handlers.substitute(handlers.seed(guide, self.key), data=data)
            sites = trace_guide(self.key, at, params, self.args, self.kwargs)
            latents = likelihood.latent_sites(sites)
            if auxiliary := sorted(set(latents) - set(data) - set(one)):
                raise ValueError(
                    f"the guide draws {auxiliary} besides the latents, which are functions of these, or whose "
                    "density is an integral over them: this posterior has draws, and no density."
                )
            terms = [
                jnp.sum(site["fn"].log_prob(site["value"])) for site in latents.values()
            ]
            total = sum(terms, jnp.zeros(()))
            # At the edge of a support an unconstrained value is infinite.
            return jnp.where(jnp.isnan(total), -jnp.inf, total)

        try:
            return jnp.where(inside, run_program(density, data, params), -jnp.inf)
        except NotImplementedError as error:
            raise ValueError(
                f"{name_of(guide)} has draws and no density at given values: {error}"
            ) from None

    def _one_draw(self, values: Params) -> Params:
        """The values of one draw, as arrays.

        Raises:
            ValueError: If latents are missing or unknown, or have other shapes.
        """
        sites = _latent_sites(self, self.key)
        expected = {name: jnp.shape(sites[name]["value"]) for name in sorted(sites)}
        one = {name: jnp.asarray(values[name]) for name in sorted(values)}
        if (got := {name: value.shape for name, value in one.items()}) != expected:
            raise ValueError(
                f"log_prob takes one value of each latent, of shapes {expected}, got {got}: of several draws "
                "take jax.vmap(posterior.log_prob)(draws)."
            )
        return one

    def predict(
        self,
        rng_key: Array,
        *args: object,
        num_samples: int = 1000,
        new_groups: Collection[str] = (),
        **kwargs: object,
    ) -> Params:
        """Draws of what the model observes, and of its deterministic sites, at other arguments.

        Each draw has its own draw of the latents; what is observed has its untempered distribution. Arguments are
        taken as the fit took its own: frames and lists become arrays. What is to be drawn is left out or None.

        Args:
            rng_key: Key of the draws.
            *args: Arguments of the model, such as rows ``x_new``.
            num_samples: Draws S.
            new_groups: Plates whose groups are others than those of the fit: their latents are drawn from their
                prior, given the posterior of its parents.
            **kwargs: Keyword arguments of the model.

        Returns:
            By site, ``(S, ...)``.

        Raises:
            TypeError: If the model does not take the arguments.
            ValueError: If columns are not those of the fit, a latent has another shape at these arguments, there
                is no such plate, or nothing to draw.

        Example:
            >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
            >>> from numpyro.infer.autoguide import AutoNormal
            >>> import numpyro_tempered as nt
            >>> def model(x, y=None):
            ...     slope = numpyro.sample("slope", dist.Normal(0.0, 10.0))
            ...     with numpyro.plate("n", len(x)):
            ...         numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)
            >>> x = jnp.arange(1.0, 4.0)
            >>> fit = nt.fit_gaussian(jax.random.key(0), model, AutoNormal, x, 2.0 * x)
            >>> draws = fit.predict(jax.random.key(1), jnp.array([10.0]))
            >>> draws["y"].shape, bool(jnp.abs(draws["y"].mean() - 20.0) < 0.1)
            ((1000, 1), True)
        """
        check_count(num_samples, "num_samples")
        check_key(rng_key, "posterior.predict(rng_key, *args)")
        if hasattr(self.source, "is_symmetric"):
            # Its rows have no other arguments than their number.
            if new_groups:
                raise ValueError(
                    "rows of a mixture or PCA have no groups: leave new_groups out."
                )
            return self.source.predict(
                rng_key, *args, num_samples=num_samples, **kwargs
            )
        draw_key, key = jax.random.split(rng_key)
        draws = draw(self, draw_key, num_samples)
        return self.predict_from(key, draws, args, kwargs, new_groups)[0]

    def predict_from(
        self,
        rng_key: Array,
        draws: Params,
        args: tuple,
        kwargs: dict,
        new_groups: Collection[str] = (),
    ) -> tuple[Params, Trace]:
        """Predictions at other arguments from draws of the latents, ``(S, ...)``, and a trace of the model there.

        Raises:
            ValueError: As :meth:`predict`, and of a mixture or PCA, whose rows depend on no arguments.
        """
        if hasattr(self.source, "is_symmetric"):
            raise ValueError(
                "new rows of a mixture or PCA depend on no arguments: fit.predict(rng_key, num_rows) draws them."
            )
        model = self.fitted_model
        columns = argument_columns(self.predict, model, args, kwargs)
        check_columns(self.columns, columns)
        if hasattr(self.source, "model_arguments"):
            args = self.source.model_arguments(*args, **kwargs)
            kwargs = {}
        return predict(rng_key, model, draws, args, kwargs, new_groups=new_groups)

    def evaluate(self, num_particles: int = 1000) -> "TemperedFit":
        """The fit with its ELBO evaluated by draws, as a stream does not have it."""
        key, args, kwargs = self.key, self.args, self.kwargs
        guide, params = gaussian_of_laplace(
            self.guide, self.model, self.params, key, args, kwargs
        )
        elbo = evaluate_elbo(
            key, self.model, guide, params, args, kwargs, num_particles=num_particles
        )
        return self._replace(elbo=elbo)

    def on(
        self, *data: object, rng_key: Array | None = None, **kwargs: object
    ) -> "TemperedFit":
        """Return itself, as it holds its data."""
        refuse_data(self, data, kwargs)
        return self

    def summarise_data(self) -> DataSummary:
        """The observed values, for :func:`compare`."""
        of_source = (
            DataSummary() if self.source is None else self.source.summarise_data()
        )
        if self.source is not None and not self.observed:
            return of_source
        summary = self.target.summarise_data(self.observed)
        return summary._replace(numbers={**summary.numbers, **of_source.numbers})

    def describe(self) -> Description:
        """What :func:`to_inference_data` shows beside the draws."""
        if self.source is not None:
            return self.source.describe()
        attrs = attrs_of(self.convergence)
        algorithm = {"algorithm": attrs.pop("algorithm"), "guide": name_of(self.guide)}
        return Description(
            {"variational": {"loss": self.losses, **plain_params(self.params)}},
            {**algorithm, **fit_attrs(self), **attrs},
            coords=self.coords or {},
        )


def draw(fit: TemperedFit, rng_key: Array, num_samples: int) -> Params:
    """Draws of the latent sites from a fit, ``(num_samples, ...)`` each."""
    # Algorithms with factors of their own draw from these.
    if (of_source := getattr(fit.source, "draw", None)) is not None:
        return of_source(rng_key, num_samples)
    guide, params, args, kwargs = fit.guide, fit.params, fit.args, fit.kwargs
    names = list(_latent_sites(fit, rng_key))
    if is_auto(guide):

        def of_guide(key: Array, params: Params) -> Params:
            return guide.sample_posterior(
                key, params, *args, sample_shape=(num_samples,), **kwargs
            )

        draws = run_program(of_guide, rng_key, params)
    else:

        def one(key: Array) -> Params:
            sites = trace_guide(key, guide, params, args, kwargs)
            return {name: sites[name]["value"] for name in names}

        draws = map_batches(one, jax.random.split(rng_key, num_samples), 64)
    return {name: draws[name] for name in names}


def with_names(
    fit: TemperedFit, function: Callable, model: Model, call: tuple[tuple, dict]
) -> TemperedFit:
    """A fit with the labels and the columns of the tables in the user's call of a function."""
    columns = argument_columns(function, model, *call)
    return fit._replace(coords=axis_labels(call) or None, columns=columns)


def without_data(source: Any, model: Model, guide: Guide) -> TemperedFit:
    """The posterior that another result stands for, by its tempered model and its guide."""
    return TemperedFit(
        model=model,
        guide=guide,
        params={},
        alpha=float(np.asarray(source.alpha)),
        losses=-source.trace,
        elbo=source.elbo,
        observed={},
        args=(),
        kwargs={},
        rng_key=None,
        source=source,
    )


def _latent_sites(fit: TemperedFit, rng_key: Array) -> Trace:
    """The latent sites of the model, with their values in the guide at a draw."""
    where = fit.guide, fit.params, fit.args, fit.kwargs
    sites = likelihood.latent_sites(trace_guide(rng_key, *where))
    # A guide over one flat vector has the sites in another order than its model, and as points without support.
    prototype = getattr(fit.guide, "prototype_trace", None) or sites
    return {
        name: {**prototype[name], "value": sites[name]["value"]}
        for name in prototype
        if name in sites and not (sites[name].get("infer") or {}).get("is_auxiliary")
    }


def _moments(fit: TemperedFit) -> tuple[Params, Params]:
    """Means and standard deviations of the latents."""
    if (of_source := getattr(fit.source, "moments", None)) is not None:
        pairs = of_source()
        return {k: v[0] for k, v in pairs.items()}, {k: v[1] for k, v in pairs.items()}
    key = fit.key
    draws, sites = draw(fit, key, NUM_DRAWS), _latent_sites(fit, key)
    latents = {name: sites[name] for name in sorted(draws)}
    flat = [np.reshape(draws[name], (NUM_DRAWS, -1)) for name in latents]
    law = location_scale_of(fit.guide, fit.params)
    moments = moments_of(law, latents, np.concatenate(flat, axis=1, dtype=float))
    layout = likelihood.Layout.of({name: draws[name][0] for name in latents})
    mean, sd = (layout.split(jnp.asarray(part)) for part in (moments.mean, moments.sd))
    return mean, sd
