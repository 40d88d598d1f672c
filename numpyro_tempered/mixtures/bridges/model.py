"""A mixture as a NumPyro model, and its fitted factors as a guide."""

from numpyro_tempered.core import Guide, Model, check_count
from numpyro_tempered.mixtures.bridges.sites import mixture_guide, mixture_model
from numpyro_tempered.mixtures.components.base import Component
from numpyro_tempered.mixtures.result import MixtureFit, check_fit
from numpyro_tempered.mixtures.weights import Concentration, prior_of


def numpyro_model(
    mixture: MixtureFit | Component,
    num_components: int | None = None,
    *,
    concentration: Concentration = 1.0,
) -> Model:
    r"""A mixture as a NumPyro model.

    Sites: ``weights`` ~ Dirichlet, or of :func:`stick_breaking` the ``sticks``, K - 1 Betas from which the
    ``weights`` follow; the parameters of the components in the plate ``components``, or outside of it where all
    components share them; the data ``x`` in the plate ``rows``, with their labels summed out. The model is not
    tempered: put :class:`temper` around it. Its bound at :func:`numpyro_guide`, by ``Trace_ELBO``, is E1 of the
    fit.

    Args:
        mixture: A fit, whose priors the model takes; or a component.
        num_components: K, for a component.
        concentration: Prior of the weights, as for :func:`fit`, for a component.

    Returns:
        ``model(x, sample_weight=None)``, with data as in ``nt.mixtures.fit``. A row of weight 0 does not count.

    Raises:
        TypeError: If ``mixture`` is neither a fit nor a component.
        ValueError: If K is missing for a component or given with a fit; or, while the model runs, if the data are
            not of the family.

    Example:
        >>> import jax, numpy as np
        >>> from numpyro.infer.util import log_density
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> model = nt.temper(nt.mixtures.numpyro_model(component, 2), alpha=0.5)
        >>> theta = {"weights": np.array([0.5, 0.5]), "loc": np.array([[0.0], [9.0]])}
        >>> density = jax.jit(lambda theta: log_density(model, (x,), {}, theta)[0])(theta)
        >>> print(f"{density:.2f}")  # the prior's, -6.85, and half the log-likelihood, -6.46
        -10.08
    """
    if isinstance(mixture, MixtureFit):
        if num_components is not None:
            raise ValueError(
                "a fit has its own number of components: pass num_components with a component alone."
            )
        return mixture_model(
            mixture.component, mixture.prior, mixture.problem.concentration
        )
    if not isinstance(mixture, Component):
        raise TypeError(
            f"numpyro_model takes a fit or a component such as nt.mixtures.components.gaussian(dim), got a "
            f"{type(mixture).__name__}."
        )
    if num_components is None:
        raise ValueError(
            "a component has no number of components: pass num_components."
        )
    size = check_count(num_components, "num_components")
    return mixture_model(mixture, mixture.prior, prior_of(concentration, size))


def numpyro_guide(fit: MixtureFit) -> Guide:
    """The factors of a fit as a guide for :func:`numpyro_model`, with the same sites.

    Args:
        fit: A fitted mixture.

    Returns:
        ``guide(x=None, sample_weight=None)``, which has no parameters and reads no data.

    Example:
        >>> import jax, numpy as np
        >>> from numpyro.infer import Trace_ELBO
        >>> import numpyro_tempered as nt
        >>> x = np.array([[0.0], [0.1], [9.0], [9.1]])
        >>> component = nt.mixtures.components.known_variance(1, prior_scale=10.0)
        >>> fit = nt.mixtures.fit(jax.random.key(0), x, component, num_components=2, alpha=0.5)
        >>> model, guide = nt.temper(nt.mixtures.numpyro_model(fit), fit.alpha), nt.mixtures.numpyro_guide(fit)
        >>> loss = jax.jit(lambda key: Trace_ELBO(num_particles=2000).loss(key, {}, model, guide, x))
        >>> bool(abs(-loss(jax.random.key(1)) - fit.bound.value) < 0.3)
        True
    """
    check_fit(fit)
    return mixture_guide(
        fit.component, fit.problem.prior, fit.factors.concentration, fit.posterior
    )
