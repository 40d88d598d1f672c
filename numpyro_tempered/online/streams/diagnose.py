"""Warnings about a stream: collapse, a box that binds, features of different sizes, rejected rounds."""

import math
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from numpyro_tempered.core import ArrayLike, Shape, to_host, warn_caller
from numpyro_tempered.gaussian.families.base import family_of, is_gaussian
from numpyro_tempered.online.base import Box, OnlineState, Rule, layers
from numpyro_tempered.online.streams.findings import (
    Finding,
    StreamWarning,
    count_findings,
)
from numpyro_tempered.online.streams.standardise import Standardisation

# A variance a million million times smaller than the prior's: that of 10^12 data of unit information.
COLLAPSE = 1e-6
# Names and shapes of a model's sites, in the order of the coordinates.
Sites: TypeAlias = tuple[tuple[str, Shape], ...]
# Coordinates that a finding names.
MOST_NAMES = 5
# A rule with one step size for all coordinates moves them in proportion to the square of their features.
FEATURE_RATIO = 1e3


def diagnose(
    rule: Rule,
    state: OnlineState,
    x: ArrayLike | None = None,
    *,
    box: Box | None = None,
    warn: bool = True,
) -> tuple[Finding, ...]:
    """Check a state on the host after a run, and warn once of each kind of trouble.

    - ``collapse``: a posterior scale is below 1e-6 of the prior's, which takes 10^12 data of unit information;
      not for rules that move a point.
    - ``box``: a coordinate sits on the bound of the box and did not start there.
    - ``features``: the sizes of two features, medians of the absolute values that are not 0, differ by a factor
      above 1000; not where the rule standardises them (:func:`standardise`).
    - ``rejected``: rounds were rejected. Missing outcomes are among them.
    - ``jump``: rounds moved a mean by more than 10 of its standard deviations before the round, or of the prior's
      for rules whose scales do not measure uncertainty (oga, oga_el, sva, svb).
    - ``weights``: :func:`robust` gave the rounds a mean weight below 1/2.

    The end of :func:`run` and of ``OnlineVI.run`` issues one warning with the last three, of its own rounds, and
    with

    - ``loss``: the mean loss at the posterior means is above that at the prior mean for the same rows, by more
      than learning costs; in 50 rounds or more.

    Args:
        rule: The rule of the run, or its ``OnlineVI``.
        state: Its state: of one stream, not of many under ``vmap``. Of an ``OnlineVI`` messages name sites.
        x: Optional features, shape ``(n, d)``; a sample will do.
        box: The bounds of the rule; by default ``rule.box``.
        warn: Whether to issue a :class:`StreamWarning` for each finding, besides returning it.

    Returns:
        The findings, none if all is well.

    Raises:
        ValueError: If the state is of many streams.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.sva(0.1)
        >>> state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> nt.online.diagnose(rule, state, jnp.array([[1.0, 2000.0]]), warn=False)[0].kind
        'features'
    """
    sites: Sites = getattr(getattr(state, "layout", None), "sites", ())
    rule, state = getattr(rule, "rule", rule), getattr(state, "rule_state", state)
    if np.ndim(state.count):
        raise ValueError(
            f"diagnose looks at one stream, got {np.shape(state.count)} of them: take one by "
            "jax.tree.map(lambda leaf: leaf[i], state)."
        )
    findings = [
        *_posterior_findings(rule, state, rule.box if box is None else box, sites)
    ]
    findings += count_findings(state)
    if x is not None and not any(
        isinstance(memory, Standardisation) for memory in layers(state)
    ):
        findings += _feature_findings(to_host(x).astype(float))
    if warn:
        for finding in findings:
            warn_caller(finding.message, StreamWarning)
    return tuple(findings)


def _posterior_findings(
    rule: Rule, state: OnlineState, box: Box | None, sites: Sites
) -> Iterator[Finding]:
    q, prior = state.posterior, state.prior
    if not is_gaussian(q):
        return
    scales, prior_scales = (
        np.asarray(family_of(p).marginal_scale(p), dtype=float) for p in (q, prior)
    )
    (small,) = np.nonzero(scales < COLLAPSE * prior_scales)
    if small.size and not rule.point:
        yield Finding(
            "collapse",
            f"{small.size} of {scales.size} posterior scales are below {COLLAPSE:g} of the prior's "
            f"({_names(small, sites)}): these coordinates hardly move any more. Take a smaller step size, "
            "standardise the features, or forget.",
            small,
        )
    if box is None:
        return
    max_loc, max_scale = (
        np.asarray(bound, dtype=np.asarray(q.loc).dtype) for bound in box
    )
    binds = (np.abs(q.loc) >= max_loc) & (np.abs(prior.loc) < max_loc)
    if family_of(q).diagonal_only:
        binds |= (scales >= max_scale) & (prior_scales < max_scale)
    (at,) = np.nonzero(binds)
    if at.size:
        yield Finding(
            "box",
            f"the box binds in {at.size} of {scales.size} coordinates ({_names(at, sites)}): the best parameters "
            "may lie outside. Widen it, or standardise the features.",
            at,
        )


def _names(coordinates: np.ndarray, sites: Sites) -> str:
    """Name the first of some coordinates, by the sites of a model where there is one."""
    names = [str(number) for number in coordinates[:MOST_NAMES]]
    ends = np.cumsum([math.prod(shape) for _, shape in sites])
    for place, number in enumerate(coordinates[:MOST_NAMES] if sites else ()):
        which = int(np.searchsorted(ends, number, side="right"))
        site, shape = sites[which]
        index = (
            np.unravel_index(number - ends[which] + math.prod(shape), shape)
            if shape
            else ()
        )
        names[place] = site + (str([int(i) for i in index]) if shape else "")
    return ", ".join(names) + (", ..." if len(coordinates) > MOST_NAMES else "")


def _feature_findings(x: np.ndarray) -> Iterator[Finding]:
    absolute = np.where(np.isfinite(x) & (x != 0), np.abs(x), np.nan)
    (columns,) = np.nonzero(np.any(np.isfinite(absolute), axis=0))
    if not columns.size:
        return
    sizes = np.nanmedian(absolute[:, columns], axis=0)
    small, large = sizes.argmin(), sizes.argmax()
    if sizes[large] > FEATURE_RATIO * sizes[small]:
        yield Finding(
            "features",
            f"feature {columns[large]} is {sizes[large] / sizes[small]:.3g} times the size of feature "
            f"{columns[small]}, more than {FEATURE_RATIO:g}: one step size does not suit both. Standardise the "
            "features, or take nt.online.standardise(rule, ...).",
            columns[[small, large]],
        )
