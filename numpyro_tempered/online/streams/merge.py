"""The posterior of two disjoint streams, from the posteriors of each."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_tempered.core import is_traced
from numpyro_tempered.gaussian.families.base import family_of
from numpyro_tempered.online.base import CumulativeLosses, OnlineState, Rule


def merge(rule: Rule, a: OnlineState, b: OnlineState) -> OnlineState:
    r"""The state of one run over the data of two, :math:`\lambda = \lambda_a + \lambda_b - \lambda_0`.

    In natural parameters an accumulating posterior is its prior plus one term for each datum; the prior, which
    both hold, is taken out once. Exact on conjugate streams, where the terms do not depend on the order.
    Otherwise each datum counts as it did in its own stream: the merged posterior holds the evidence of both,
    and differs from that of one run by what the later half would have been linearised at. LowRank keeps the k
    strongest directions, as it does in a round.

    Args:
        rule: The rule of both runs: :func:`ewa`, or :func:`ngvi` without ``forget``, ``box`` and with infinite
            ``evidence``.
        a: State of one run.
        b: State of another, from the same prior, on other data.

    Returns:
        A state to go on from. Counts, rejected rounds and cumulative losses are sums; the losses are those that
        the two runs suffered, each without the data of the other.

    Raises:
        TypeError: If the rule holds no evidence, or the states are of another rule. The precision of oga, sva
            and svb is no count of data; forgetting takes part of it away, a box cuts it, and a standardised
            stream has a scale of its own.
        ValueError: If the priors differ, or the merged precision is not positive definite. Inside a
            transformation, where values cannot be read, the first is not noticed and the second gives NaN.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule, loss = nt.online.ewa(0.5), nt.expectations.squared()
        >>> start = rule.init(nt.gaussian.families.FullRank(jnp.zeros(1), jnp.eye(1)))
        >>> a, _ = nt.online.run(rule, loss, start, jnp.ones((2, 1)), jnp.array([1.0, 2.0]))
        >>> b, _ = nt.online.run(rule, loss, start, jnp.ones((1, 1)), jnp.array([3.0]))
        >>> merged = nt.online.merge(rule, a, b)
        >>> print(f"{merged.posterior.loc[0]:.3f} {merged.posterior.scale_tril[0, 0]:.3f}", int(merged.count))
        1.500 0.500 3
    """
    if not rule.holds_evidence:
        raise TypeError(
            f"{rule.name} with these options holds no evidence that adds up, so two posteriors do not merge. "
            "Without forget, box, finite evidence and standardise, ewa, ngvi() and rvga() merge."
        )
    if not _same_structure(a.memory, family_of(a.prior).init(a.prior)):
        raise TypeError(
            f"the memory of {rule.name} holds more than the posterior, and does not merge."
        )
    if not _same_structure(a, b) or not _equal(a.prior, b.prior):
        raise ValueError(
            f"the two runs must start from the same prior, got {a.prior} and {b.prior}."
        )
    posterior = family_of(a.prior).merge(a.posterior, b.posterior, a.prior)
    if not is_traced(posterior) and not all(
        np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(posterior)
    ):
        raise ValueError(
            "the precision λ_a + λ_b - λ_0 is not positive definite: a state was not reached from this prior by "
            "accumulating, or its losses have negative curvature."
        )
    pairs = zip(a.cumulative, b.cumulative, strict=True)
    cumulative = CumulativeLosses(
        *(of_a.add(of_b.value).add(of_b.error) for of_a, of_b in pairs)
    )
    counters = {
        name: getattr(a, name) + getattr(b, name)
        for name in ("count", "rejected", "floored", "jumps")
    }
    memory, max_move = (
        family_of(posterior).init(posterior),
        jnp.maximum(a.max_move, b.max_move),
    )
    return a._replace(
        posterior=posterior,
        memory=memory,
        cumulative=cumulative,
        max_move=max_move,
        **counters,
    )


def _same_structure(a: object, b: object) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b)  # type: ignore[operator]


def _equal(a: object, b: object) -> bool:
    """Whether all leaves agree: in shape, and where values can be read in values."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(
        one.shape == other.shape
        if is_traced(one, other)
        else np.array_equal(one, other)
        for one, other in pairs
    )
