"""The likelihood of a NumPyro model as a loss of arrays, for what takes no model."""

from typing import TYPE_CHECKING

from numpyro_tempered.core import Array, check_key, on_arrays, separate
from numpyro_tempered.gaussian.expectations.base import Expectation
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.infer.elbo import bind
from numpyro_tempered.infer.online_checks import support_check

if TYPE_CHECKING:
    from numpyro_tempered.infer.online import OnlineVI


def bare_loss_of(
    rng_key: Array, online: "OnlineVI", args: tuple, kwargs: dict
) -> tuple[Expectation, Gaussian]:
    """Return loss and prior of a model: :meth:`OnlineVI.bare_loss`."""
    check_key(rng_key, "bare_loss(rng_key, *args)")
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
    return expectation, prior
