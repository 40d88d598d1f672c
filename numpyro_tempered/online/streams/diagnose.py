"""What to be warned of in a stream: collapse, a box that binds, features of different sizes, refused rounds."""

import warnings
from typing import Any, NamedTuple

import numpy as np

from numpyro_tempered.core.typing import ArrayLike
from numpyro_tempered.gaussian.families.base import family_of
from numpyro_tempered.online.base import Box, OnlineState, Rule
from numpyro_tempered.online.streams.standardise import Standardised

# A variance a million million times smaller than the prior's: that of 10^12 data of unit information.
COLLAPSE = 1e-6
# A rule with one step size for all coordinates moves them in proportion to the square of their features.
FEATURE_RATIO = 1e3
REJECTED_SHARE = 0.05


class StreamWarning(UserWarning):
    """A finding of :func:`diagnose`.

    Example:
        >>> import numpyro_tempered as nt
        >>> issubclass(nt.online.StreamWarning, UserWarning)  # for warnings.filterwarnings
        True
    """


class Finding(NamedTuple):
    """Something to look at in the state of a stream.

    Attributes:
        kind: ``"collapse"``, ``"box"``, ``"features"`` or ``"rejected"``.
        message: What was found, and what to do.
        coordinates: Indices of the coordinates or features that it is about; empty for rejected rounds.
    """

    kind: str
    message: str
    coordinates: np.ndarray


def diagnose(
    rule: Rule, state: OnlineState, x: ArrayLike | None = None, *, box: Box | None = None, warn: bool = True
) -> tuple[Finding, ...]:
    """Look at a state on the host, after a run, and warn of what is wrong, once a kind.

    - ``collapse``: a posterior scale is below 1e-6 of the prior's, which takes 10^12 data of unit information;
      not for rules that move a point.
    - ``box``: a coordinate sits on the bound of the box and did not start there.
    - ``features``: the sizes of two features, medians of the absolute values that are not 0, differ by a factor
      above 1000; not where the stream is :func:`standardised`.
    - ``rejected``: more than 5% of the rounds were refused. Missing outcomes are among them.

    Args:
        rule: The rule of the run.
        state: Its state: of one stream, not of many under ``vmap``.
        x: Optional features, shape ``(n, d)``; a sample will do.
        box: The bounds the rule was made with; by default those it says it has.
        warn: Whether to issue a :class:`StreamWarning` for each finding, besides returning it.

    Returns:
        The findings, none if all is well.

    Raises:
        ValueError: If the state is of many streams.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpyro_tempered as nt
        >>> rule = nt.online.sva(0.1)
        >>> state = rule.init(nt.families.MeanField(jnp.zeros(2), jnp.ones(2)))
        >>> nt.online.diagnose(rule, state, jnp.array([[1.0, 2000.0]]), warn=False)[0].kind
        'features'
    """
    if np.ndim(state.count):
        raise ValueError(
            f"diagnose looks at one stream, got {np.shape(state.count)} of them: take one by "
            "jax.tree.map(lambda leaf: leaf[i], state)."
        )
    box = rule.box if box is None else box
    found = [_collapse(rule, state), _box(state, box), _rejected(state)]
    if x is not None and not isinstance(state.memory, Standardised):
        found.append(_features(np.asarray(x, dtype=float)))
    findings = tuple(finding for finding in found if finding is not None)
    if warn:
        for finding in findings:
            warnings.warn(finding.message, StreamWarning, stacklevel=2)
    return findings


def _collapse(rule: Rule, state: OnlineState) -> Finding | None:
    scales, of_prior = _scales(state.posterior), _scales(state.prior)
    if rule.point or scales is None or of_prior is None:
        return None
    (small,) = np.nonzero(scales < COLLAPSE * of_prior)
    if not small.size:
        return None
    return Finding(
        "collapse",
        f"{small.size} of {scales.size} posterior scales are below {COLLAPSE:g} of the prior's: these "
        "coordinates hardly move any more. Take a smaller step size, standardise the features, or forget.",
        small,
    )


def _scales(q: Any) -> np.ndarray | None:
    try:
        return np.asarray(family_of(q).marginal_scale(q), dtype=float)
    except TypeError:
        # Neither a Gaussian nor a single one.
        return None


def _box(state: OnlineState, box: Box | None) -> Finding | None:
    if box is None or _scales(state.posterior) is None:
        return None
    dtype = np.asarray(state.posterior.loc).dtype
    bound, largest = (np.asarray(limit, dtype=dtype) for limit in box)
    loc, start = np.abs(state.posterior.loc), np.abs(state.prior.loc)
    held = (loc >= bound) & (start < bound)
    if hasattr(state.posterior, "scale"):
        held |= (state.posterior.scale >= largest) & (state.prior.scale < largest)
    (at,) = np.nonzero(held)
    if not at.size:
        return None
    return Finding(
        "box",
        f"the box binds in {at.size} of {loc.size} coordinates: the best parameters may lie outside. Widen it, "
        "or standardise the features.",
        at,
    )


def _features(x: np.ndarray) -> Finding | None:
    absolute = np.where(np.isfinite(x) & (x != 0), np.abs(x), np.nan)
    (used,) = np.nonzero(np.any(np.isfinite(absolute), axis=0))
    if not used.size:
        return None
    sizes = np.nanmedian(absolute[:, used], axis=0)
    if sizes.max() <= FEATURE_RATIO * sizes.min():
        return None
    small, large = used[sizes.argmin()], used[sizes.argmax()]
    return Finding(
        "features",
        f"feature {large} is {sizes.max() / sizes.min():.3g} times the size of feature {small}, more than "
        f"{FEATURE_RATIO:g}: one step size does not suit both. Standardise the features, or take "
        "nt.online.standardised(rule, ...).",
        np.array([small, large]),
    )


def _rejected(state: OnlineState) -> Finding | None:
    rejected, taken = int(state.rejected), int(state.count)
    if rejected <= REJECTED_SHARE * (rejected + taken):
        return None
    return Finding(
        "rejected",
        f"{rejected} of {rejected + taken} rounds were refused, because data, loss or update were not finite: "
        "look for missing values, or for a step size that is too large.",
        np.empty(0, int),
    )
