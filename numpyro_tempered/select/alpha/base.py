"""What a criterion for alpha is, and what it may ask of the posteriors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numpyro_tempered.core.typing import Array


class Draws(NamedTuple):
    """Draws from one posterior, with what a criterion may need of them.

    Attributes:
        values: By latent site, ``(S, ...)`` each.
        log_lik: Log-likelihood of each datum, of the whole data, ``(S, n)``.
        log_lik_at_mean: The same at the posterior mean, taken on the unconstrained scale, ``(n,)``.
        flat: The draws on the flat unconstrained scale, ``(S, d)``; no columns where a latent is discrete.
    """

    values: dict[str, Array]
    log_lik: Array
    log_lik_at_mean: Array
    flat: Array


class Plan(NamedTuple):
    """The posteriors a criterion asks for at each alpha, and what it keeps of them.

    Attributes:
        weights: Of each datum in each posterior, ``(P, n)``: 0 leaves a datum out, 2 counts it twice.
        reduce: From :class:`Draws` to a pytree of arrays; compiled with the fits.
    """

    weights: np.ndarray
    reduce: Callable[[Draws], Any]


class Verdict(NamedTuple):
    """What a criterion says.

    Attributes:
        alpha: The chosen power.
        columns: Values along the grid of alphas, ``(A,)`` each: ``criterion``, which is least where the criterion
            is best, and ``criterion_se`` where it has one.
        attrs: Numbers and words beside it, for the attributes of the result.
        advice: A sentence for the user.
    """

    alpha: float
    columns: dict[str, np.ndarray]
    attrs: dict[str, Any]
    advice: str


class Criterion(NamedTuple):
    """A way to choose alpha, or to look at it.

    Attributes:
        name: Its name, for the report.
        aim: What it aims at: risk, coverage, ...
        plan: From a key and the task to the :class:`Plan`; None where it needs no posterior.
        decide: From a key, the task, the grid of alphas ``(A,)`` and what the plan kept, with axes ``(P, A)`` in
            front (None without a plan), to the :class:`Verdict`.
        refusal: Why it must not choose alpha, for those that may only be looked at; else None.
        pointwise: Whether ``decide`` gets, instead of what a plan kept, the log-likelihood of each datum at the
            draws of each posterior, ``(A, C, S, n)`` for C chains.
        stream: For online rules: from a key, the grid, the number of rounds, and a function from an order of them
            to the passes in that order, to the verdict. None where the criterion needs posteriors that a stream
            does not have.
    """

    name: str
    aim: str
    plan: Callable[[Array, Any], Plan] | None
    decide: Callable[[Array, Any, np.ndarray, Any], Verdict]
    refusal: str | None = None
    pointwise: bool = False
    stream: Callable[[Array, np.ndarray, int, Callable[[np.ndarray], Any]], Verdict] | None = None


class AlphaChoice(NamedTuple):
    """The result of :func:`numpyro_tempered.select_alpha`.

    Attributes:
        alpha: The chosen power.
        fit: The posterior at it: a :class:`~numpyro_tempered.TemperedFit`, a NumPyro ``MCMC`` that has run, or
            the :class:`~numpyro_tempered.OnlineVIState` at the end of the stream.
        data: ArviZ data of that posterior, with the group ``alpha_selection`` along the grid.
        advice: A sentence: what was chosen, for which aim, and whether there is a need to temper at all.
    """

    alpha: float
    fit: Any
    data: Any
    advice: str


class Fits(NamedTuple):
    """The posteriors of a grid of A alphas.

    Attributes:
        reduced: What each plan kept, with axes ``(P, A)`` in front.
        log_lik: Log-likelihood of all data at each draw of the posteriors given them, ``(A, C, S)`` for C chains.
        pointwise: The same for each datum, ``(A, C, S, n)``; None unless asked for.
        fit_at: From the number of an alpha in the grid to the fit that is handed to the user.
    """

    reduced: list[Any]
    log_lik: np.ndarray
    pointwise: np.ndarray | None
    fit_at: Callable[[int], Any]
