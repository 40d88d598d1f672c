"""What machines and server of partitioned variational inference hold and send."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import Array, add_repr
from numpyro_tempered.gaussian.families.base import Gaussian
from numpyro_tempered.gaussian.natural import Natural


@add_repr
class Change(NamedTuple):
    """What a machine sends: how its factor changes, in natural parameters around the prior's mean.

    Attributes:
        linear: Of the linear parameter, shape ``(d,)``.
        precision: Of the precision, ``(d, d)``, or ``(d,)`` for a mean-field family.
        part: Number of the machine, from 0.
        round: Its rounds so far: 1 for its first change.
        prior: A checksum of the prior.
        expected_loss: α times the expected loss of the machine's rows at the posterior that it refitted from.
        skipped: Rows left out because they are not finite.
        converged: Whether the local fit reached its tolerance.
    """

    linear: Array
    precision: Array
    part: Array
    round: Array
    prior: Array
    expected_loss: Array
    skipped: Array
    converged: Array

    @property
    def natural(self) -> Natural:
        """The natural parameters alone."""
        return Natural(self.linear, self.precision)


@add_repr
class Factor(NamedTuple):
    """What a machine keeps: its factor of the posterior, and the change that it sent last.

    Attributes:
        linear: Linear parameter of the factor without the last change, shape ``(d,)``.
        precision: Its precision, ``(d, d)`` or ``(d,)``.
        change: The last :class:`Change`, to send, and to send again where it may be lost.
    """

    linear: Array
    precision: Array
    change: Change

    @property
    def natural(self) -> Natural:
        """The natural parameters alone."""
        return Natural(self.linear, self.precision)


@add_repr
class PartitionedState(NamedTuple):
    """What the server holds, and every machine reads.

    Attributes:
        posterior: The prior times all factors, a :class:`.MeanField` or
            :class:`.FullRank`.
        prior: The prior.
        linear: Linear parameter of the posterior around the prior's mean, shape ``(d,)``.
        precision: Its precision, ``(d, d)`` or ``(d,)``.
        rounding: What rounding took from both sums.
        rounds: Rounds of each machine that have arrived, ``(K,)``.
        shares: The share of each machine's last change that entered the posterior, ``(K,)``: 1 as a rule, less
            where all of it would leave no Gaussian, 0 where it was refused.
        duplicates: Changes that came again and were ignored.
        halved: Combinations of changes that entered in part.
        rejected: Changes that did not enter, since they are not finite or no part of them leaves a Gaussian.
    """

    posterior: Gaussian
    prior: Gaussian
    linear: Array
    precision: Array
    rounding: Natural
    rounds: Array
    shares: Array
    duplicates: Array
    halved: Array
    rejected: Array

    @property
    def natural(self) -> Natural:
        """The natural parameters of the posterior."""
        return Natural(self.linear, self.precision)


Changes: TypeAlias = Change | Sequence[Change]


@jax.jit
def checksum(prior: Gaussian) -> Array:
    """A number that differs between priors, by the bits of their parameters."""
    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(prior):
        bits = jnp.ravel(jax.lax.bitcast_convert_type(leaf, jnp.uint32))
        places = jnp.arange(bits.size, dtype=jnp.uint32)
        # Odd numbers, with a product that spreads the high bits.
        odd = places * jnp.uint32(2 * 0x9E3779B1 % 2**32) + jnp.uint32(1)
        mixed = (bits ^ (bits >> 15)) * odd
        total = total * jnp.uint32(0x85EBCA6B) + jnp.sum(
            mixed ^ (mixed >> 13), dtype=jnp.uint32
        )
    return total


def check_size(change: Change, state: PartitionedState, name: str) -> None:
    """Raise ValueError where a change has other coordinates than a state."""
    shapes = [leaf.shape for leaf in state.natural]
    if [leaf.shape[change.part.ndim :] for leaf in change.natural] != shapes:
        raise ValueError(
            f"the {name} has parameters of shapes {[leaf.shape for leaf in change.natural]}, and the posterior "
            f"{shapes}: both must be of the same prior, MeanField or FullRank, in the same coordinates."
        )


def check_prior(change: Change, state: PartitionedState, name: str) -> None:
    """Raise ValueError where a change is of another prior than a state."""
    if np.any(np.asarray(change.prior) != np.asarray(checksum(state.prior))):
        raise ValueError(
            f"the {name} of machine {np.asarray(change.part).tolist()} is of another prior than the posterior "
            f"({type(state.prior).__name__}, {state.linear.dtype}): values and dtype must be the same everywhere."
        )
