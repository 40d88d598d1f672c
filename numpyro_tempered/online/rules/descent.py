"""The implicit step of any loss, by natural-gradient steps in the posterior."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_tempered.core import Array
from numpyro_tempered.gaussian.expectations.base import Evaluation
from numpyro_tempered.gaussian.families.base import Gain, Gaussian, family_of
from numpyro_tempered.online.base import Datum, choose

MAX_STEPS = 64
NUM_HALF_STEPS = 7
# Of the fall of the objective, what the step that is taken must keep.
SHARE = 0.5
# The objective of one datum by draws may rise by their noise, in nats, at a step that is right.
NOISE = 1.0


class Solution(NamedTuple):
    """Where a search ended, the evaluation there, and whether a step by it is worth taking."""

    q: Gaussian
    evaluation: Evaluation
    converged: Array


class _Stage(NamedTuple):
    """How many trials there were, and whether the last one is due, or done."""

    num_trials: Array
    closing: Array
    done: Array


class _Descent(NamedTuple):
    q: Gaussian
    evaluation: Evaluation
    value: Array
    size: Array
    growth: Array
    fall: Array


def search(
    anchor: Gaussian, start: Gaussian, datum: Datum, rate: Array, before: Array
) -> Solution:
    """The minimiser of the expected loss plus the KL divergence to the anchor.

    Steps are halved where the objective would rise. With draws the gradients are no derivatives of an average
    over them: there are seven half-steps, to the fixed point. The update that follows is a whole step from where
    the search ends, and must keep most of what the search has gained; by draws it must not lose a nat.

    Args:
        anchor: What the datum is weighed against.
        start: Where the search starts.
        datum: The data of the round.
        rate: β, their weight.
        before: The objective at the anchor; where it is not finite, that at the start stands for it.
    """
    family, dtype = family_of(anchor), anchor.loc.dtype
    eps, one = jnp.finfo(dtype).eps, jnp.ones((), dtype)

    def objective(p: Gaussian, evaluation: Evaluation) -> Array:
        return family.kl(p, anchor) + rate * evaluation.objective

    def step(p: Gaussian, at_p: Evaluation, size: Array) -> Gaussian:
        gain = Gain(size * rate, 1.0 - size, size)
        trial, _ = family.natural_step(
            family.init(p), p, anchor, at_p.grad_loc, at_p.grad_var, gain
        )
        return family.canonical(trial)

    def accept(
        old: _Descent, trial: Gaussian, at_trial: Evaluation, value: Array
    ) -> tuple[_Descent, Array]:
        """The search after a trial, and whether it is at its end but for the number of trials."""
        if datum.is_drawn:
            onward = old._replace(q=trial, evaluation=at_trial, value=value)
            return choose(
                jnp.isfinite(jnp.sum(family.witness(trial))), onward, old
            ), jnp.asarray(False)
        better = value <= old.value + 8.0 * eps * (1.0 + jnp.abs(old.value))
        size = jnp.minimum(old.growth * old.size, 1.0)
        onward = _Descent(trial, at_trial, value, size, 2.0 * one, old.value - value)
        # A size that failed is not tried again at the next step.
        after = choose(better, onward, old._replace(size=0.5 * old.size, growth=one))
        return after, (after.size <= 1e-4) | (after.fall <= eps)

    def body(
        carry: tuple[_Stage, _Descent, Array, Array],
    ) -> tuple[_Stage, _Descent, Array, Array]:
        # One trace of the expectation serves the start, the trials, and the whole step at the end.
        stage, old, begin, reached = carry
        size = jnp.where(stage.closing, one, old.size)
        trial = choose(stage.num_trials == 0, start, step(old.q, old.evaluation, size))
        at_trial = datum.evaluate(trial)
        value = objective(trial, at_trial)
        after, is_end = accept(old, trial, at_trial, value)
        after = choose(stage.closing, old, after)
        begin = jnp.where(stage.num_trials == 0, value, begin)
        num_trials = stage.num_trials + 1
        most = 1 + (NUM_HALF_STEPS if datum.is_drawn else MAX_STEPS)
        closing = is_end | (num_trials >= most)
        return (
            _Stage(num_trials, closing, stage.closing),
            after,
            begin,
            jnp.where(stage.closing, value, reached),
        )

    shapes = jax.eval_shape(datum.evaluate, start)
    nowhere: Evaluation = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes
    )
    size = 0.5 * one if datum.is_drawn else one
    first = _Descent(start, nowhere, jnp.inf * one, size, one, jnp.inf * one)
    no = jnp.asarray(False)
    carry = (
        _Stage(jnp.zeros((), jnp.int32), no, no),
        first,
        jnp.inf * one,
        jnp.inf * one,
    )
    _, last, begin, reached = jax.lax.while_loop(
        lambda carry: ~carry[0].done, body, carry
    )
    before = jnp.where(jnp.isfinite(before), before, begin)
    least = jnp.where(
        last.value < before, SHARE * last.value + (1.0 - SHARE) * before, before
    )
    if datum.is_drawn:
        least = jnp.maximum(least, before + NOISE)
    return Solution(
        last.q, last.evaluation, reached <= least + 8.0 * eps * (1.0 + jnp.abs(least))
    )
