"""Sequential variational inference without linearisation (CA19, (5))."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    add_repr,
    at_index,
    check_number,
    check_numbers,
)
from numpyro_tempered.gaussian.descent.base import (
    Derivatives,
    GaussianTerm,
    Objective,
    add,
    derivatives_of,
    of_evaluation,
    of_gaussian,
)
from numpyro_tempered.gaussian.descent.minimise import minimise
from numpyro_tempered.gaussian.expectations.base import Data, Expectation
from numpyro_tempered.gaussian.families.base import Gaussian, able, supports
from numpyro_tempered.online.base import Losses, check_prior

# For one more row, from the last fit, ten are many.
MAX_EVALUATIONS = 100


@add_repr
class SequentialFit(NamedTuple):
    """A variational fit to the past before every round.

    Attributes:
        posteriors: q_1, ..., q_{T+1}, of the prior's family with a leading axis of T + 1: the prior, and the fits
            to the first t rounds.
        losses: The losses of q_t in round t, shape ``(T,)`` each, for :func:`.regret_ledger`.
        converged: Whether each of the T fits is within the tolerance, shape ``(T,)``.
    """

    posteriors: Gaussian
    losses: Losses
    converged: np.ndarray


def sequential(
    expectation: Expectation,
    prior: Gaussian,
    step_size: float,
    *data: ArrayLike,
    tolerance: float = 1e-6,
) -> SequentialFit:
    r"""The best q for the past, before every round: what SVA, SVB, NGVI and R-VGA approximate in one step.

    .. math:: q_{t+1} = \arg\min_q \Big\{E_q\Big[\sum_{i\le t}\ell_i\Big] + \mathrm{KL}(q, \pi)/\eta\Big\}

    It is the q of the family that is nearest to exponentially weighted aggregation, in KL(q, p_{t+1}). It is no
    online algorithm: every round passes over all rows, T² of them in the end, and fits anew from the last q
    (:func:`.descent.minimise`). For convex losses the bound of SVA holds for it too
    (:func:`numpyro_tempered.bounds.sva`): it follows the regularised leader of the losses themselves, SVA that of
    their tangents (S. Shalev-Shwartz, *Online learning and online convex optimization*, 2012, Theorem 2.11).

    Args:
        expectation: E_q of a bare loss, in closed form or by quadrature.
        prior: π, a ``MeanField`` or ``FullRank``.
        step_size: η.
        *data: Arrays with one leading axis of T rounds.
        tolerance: On the stationarity of each fit, in nats. Long streams in float32 may not reach a small one.

    Returns:
        A :class:`SequentialFit`.

    Raises:
        TypeError: If the family is another, or the expectation one of a model.
        ValueError: If the expectation draws random numbers, an argument is out of range, or the data are not
            finite or not of one length.

    References:
        CA19, (5).

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> prior = nt.gaussian.families.MeanField(jnp.zeros(1), jnp.ones(1))
        >>> x, y = jnp.ones((4, 1)), jnp.full(4, 2.0)
        >>> fit = nt.bounds.hindsight.sequential(nt.expectations.squared(), prior, 0.5, x, y)
        >>> [f"{m:.3f}" for m in fit.posteriors.loc[:, 0]]
        ['0.000', '1.000', '1.333', '1.500', '1.600']
    """
    if not isinstance(expectation, Expectation) or expectation.bind is not None:
        raise TypeError(
            "sequential takes the expectation of a bare loss, such as squared()."
        )
    if expectation.needs_key:
        raise ValueError(
            "sequential needs a closed form or quadrature, not an expectation that draws."
        )
    if not supports(prior, "from_root"):
        raise TypeError(
            f"sequential takes a {able('from_root', 'or')} prior, got {type(prior).__name__}."
        )
    prior = check_prior(prior)
    check_number(step_size, "step_size", "(0, inf)")
    check_number(tolerance, "tolerance", "(0, inf)")
    arrays = jax.tree.map(jnp.asarray, data)
    lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(arrays)}
    if len(lengths) != 1 or not all(axis and axis[0] for axis in lengths):
        raise ValueError(
            f"the data need one leading axis of T rounds, got axes {sorted(lengths)}."
        )
    for leaf in jax.tree.leaves(arrays):
        check_numbers(leaf, "data", hint="Leave out the rounds that were rejected.")
    if expectation.check is not None:
        expectation.check(*arrays)
    rate = jnp.asarray(step_size, prior.loc.dtype)
    posteriors, losses, converged = _fits(expectation, tolerance, prior, rate, arrays)
    return SequentialFit(posteriors, losses, np.asarray(converged))


@partial(jax.jit, static_argnums=(0, 1))
def _fits(
    expectation: Expectation, tolerance: float, prior: Gaussian, rate: Array, data: Data
) -> tuple[Gaussian, Losses, Array]:
    num_rounds = jax.tree.leaves(data)[0].shape[0]

    def evaluate(
        q: Gaussian, term_and_mask: tuple[GaussianTerm, Array], rng_key: Array | None
    ) -> Derivatives:
        term, mask = term_and_mask
        past = expectation.evaluate(q, *data, curvature="hessian", mask=mask)
        return add([of_evaluation(q, past, rate), derivatives_of(term, q)])

    def one(q: Gaussian, t: Array) -> tuple[Gaussian, tuple[Gaussian, Losses, Array]]:
        row = at_index(data, t)
        at_q = expectation.evaluate(q, *row, curvature="none")
        objective = Objective(
            evaluate, (of_gaussian(prior), jnp.arange(num_rounds) <= t)
        )
        fit = minimise(
            objective, q, tolerance=tolerance, max_evaluations=MAX_EVALUATIONS
        )
        return fit.posterior, (
            fit.posterior,
            Losses(at_q.at_mean, at_q.expected),
            fit.converged,
        )

    _, (fits, losses, converged) = jax.lax.scan(one, prior, jnp.arange(num_rounds))
    posteriors = jax.tree.map(
        lambda first, rest: jnp.concatenate([first[None], rest]), prior, fits
    )
    return posteriors, losses, converged
