"""The likelihood of a NumPyro model as a loss of arrays, for what takes no model."""

from typing import NamedTuple

from numpyro_tempered.core.checks import check_key
from numpyro_tempered.core.display import add_repr
from numpyro_tempered.core.model_arguments import on_arrays, separate
from numpyro_tempered.core.typing import Array
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.infer.elbo import bind
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.infer.online_checks import support_check


@add_repr
class BareLoss(NamedTuple):
    """What :func:`bare_loss` makes of a model.

    Attributes:
        expectation: Of its negative log-likelihood, as a function of the arrays among its arguments; tempered as
            the model is.
        prior: Its prior on the flat unconstrained scale, a Gaussian of the guide's family.
    """

    expectation: Expectation
    prior: Gaussian


def bare_loss(
    rng_key: Array, online: OnlineVI, *args: object, **kwargs: object
) -> BareLoss:
    """The likelihood of a NumPyro model as a bare loss, for :func:`~numpyro_tempered.online.partitioned`.

    A posterior of the loss goes back into the model by ``online.init(rng_key, *args, prior=posterior)``, whose
    state predicts, serves and draws the sites.

    Args:
        rng_key: Key of the set-up.
        online: An :class:`OnlineVI`: model, guide and expectation. Its rule is not used.
        *args: Arguments of the model, some rows of data: of arrays shapes matter, all else is part of the loss.
        **kwargs: Keyword arguments of the model, likewise.

    Returns:
        A :class:`BareLoss`.

    Raises:
        ValueError: As :meth:`OnlineVI.init`, of a model that cannot be run online.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_tempered as nt
        >>> def model(x, y=None):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     eta = numpyro.deterministic("eta", x * theta)
        ...     numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)
        >>> at_eta = nt.expectations.gauss_hermite(predictor="eta")
        >>> online = nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, expectation=at_eta)
        >>> x, y = jnp.ones(3), jnp.array([1.0, 2.0, 3.0])
        >>> loss, prior = nt.bare_loss(jax.random.key(0), online, x, y)
        >>> pvi = nt.online.partitioned(loss, damping=1.0)
        >>> run = nt.online.run_partitioned(pvi, prior, [(x[:2], y[:2]), (x[2:], y[2:])])
        >>> print(f"{run.posterior.loc[0]:.3f} {run.posterior.scale[0]:.3f}")
        1.500 0.500
    """
    check_key(rng_key, "bare_loss(rng_key, online, *args)")
    prior = online.init(rng_key, *args, **kwargs).posterior
    bound = bind(online.expectation, online.model, online.guide)
    arrays, structure = separate(args, kwargs)
    expectation = bound._replace(
        evaluate=on_arrays(bound.evaluate, structure),
        predictors=None
        if bound.predictors is None
        else on_arrays(bound.predictors, structure),
        loss=None if bound.loss is None else on_arrays(bound.loss, structure),
        check=support_check(online.model, arrays, structure),
    )
    return BareLoss(expectation, prior)
