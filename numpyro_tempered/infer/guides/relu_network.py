"""A start for ReLU networks from data: layer by layer, the units that explain most of what is left."""

import itertools

import jax
import numpy as np

from numpyro_tempered.core import (
    Array,
    ArrayLike,
    Shape,
    check_count,
    check_number,
    doubles,
    key_first,
)

# Candidates that repeat what is taken, by the share of their variance that is new.
_NEW = 1e-4
# Ridge of the last layer, in noise variances of a fit that explains all but a hundredth of the variance of y.
_RIDGE = 0.01
# Non-zero weights of a candidate on a hidden layer.
_NUM_PARENTS = 3
# Rounds of balancing: units of different layers depend on each other.
_NUM_ROUNDS = 20

Layers = list[tuple[np.ndarray, np.ndarray]]


@key_first
def start_relu_network(
    rng_key: Array,
    x: ArrayLike,
    y: ArrayLike,
    widths: Shape = (16,),
    *,
    num_candidates: int = 600,
    penalty: float = 0.0,
) -> Layers:
    r"""Weights and biases of a ReLU network that fits ``y`` well enough for a descent to go on from there.

    Kinks of a network hardly travel under gradients, so that one whose kinks start at random misses what is
    rough. Here each layer takes its units from random candidates, one after the other, by orthogonal matching
    pursuit: the unit that lowers the residual sum of squares most,

    .. math:: \frac{(r^\top h)^2}{\|h\|^2} - \mathrm{penalty} \cdot \|w\|_0 \quad \text{over}\quad
              h = \max(w^\top x + b, 0),

    with h orthogonal to the units before it. Candidates have kinks at data, and weights on one, some or all
    inputs; from the second layer on, some continue the fit of the layers before. The last layer is of least
    squares, and units are scaled such that the weights into and out of each have equal norms.

    Args:
        rng_key: Key of the candidates.
        x: Inputs, ``(n, d)``, of scales near 1.
        y: Outputs, ``(n,)``.
        widths: Units of each hidden layer.
        num_candidates: Candidates of a layer.
        penalty: Price of a weight in units of y². A unit that is not worth its weights is not taken, and the
            layer has zeros in its place. In a model with noise σ and power α, a weight that costs k nats of KL
            has the price 2 k σ²/α.

    Returns:
        For each layer, the last included, its weights ``(inputs, units)`` and biases ``(units,)``.

    Raises:
        ValueError: If x and y are not of these shapes or not finite, or an option is out of range.

    References:
        Pati, Rezaiifar, Krishnaprasad, *Orthogonal matching pursuit*, Asilomar 1993. Barron, Cohen, Dahmen and
        DeVore, *Approximation and learning by greedy algorithms*, Annals of Statistics 2008.

    Example:
        >>> import jax, numpy as np
        >>> import numpyro_tempered as nt
        >>> x = np.linspace(-1.0, 1.0, 200)[:, None]
        >>> layers = nt.guides.start_relu_network(jax.random.key(0), x, np.abs(x[:, 0] - 0.3), (8,))
        >>> (weights, biases), (last, shift) = layers
        >>> fit = np.maximum(x @ weights + biases, 0.0) @ last + shift
        >>> print(weights.shape, bool(np.std(fit[:, 0] - np.abs(x[:, 0] - 0.3)) < 0.01))
        (1, 8) True
    """
    x, y = doubles(x), doubles(y)
    if x.ndim != 2 or y.shape != x.shape[:1] or not len(y):
        raise ValueError(
            f"x must be of shape (n, d) and y (n,), got {x.shape} and {y.shape}."
        )
    if not (np.all(np.isfinite(x)) and np.all(np.isfinite(y))):
        raise ValueError("x and y must be finite: leave rows with NaN out.")
    if not widths:
        raise ValueError(
            "widths must name the units of at least one hidden layer, got none."
        )
    for width in widths:
        check_count(width, "widths", 1)
    check_count(num_candidates, "num_candidates", max(widths))
    check_number(penalty, "penalty", "[0, inf)")
    rng = np.random.default_rng(np.asarray(jax.random.key_data(rng_key)).ravel())
    layers: Layers = []
    hidden = x
    direction: np.ndarray | None = None
    for width in widths:
        weights, biases = _candidates(rng, hidden, direction, num_candidates)
        units = _pursue(
            np.maximum(hidden @ weights + biases, 0.0),
            y,
            width,
            penalty * np.count_nonzero(weights, 0),
        )
        layer = np.zeros((hidden.shape[1], width)), np.zeros(width)
        layer[0][:, : len(units)], layer[1][: len(units)] = (
            weights[:, units],
            biases[units],
        )
        hidden = np.maximum(hidden @ layer[0] + layer[1], 0.0)
        direction, intercept = _least_squares(hidden, y)
        layers.append(layer)
        last = direction[:, None], np.array([intercept])
    layers.append(last)
    return _balance(layers)


def _candidates(
    rng: np.random.Generator, x: np.ndarray, direction: np.ndarray | None, num: int
) -> tuple[np.ndarray, np.ndarray]:
    """Weights ``(d, num)`` of norm 1 and biases: kinks at data."""
    d = x.shape[1]
    most = d if direction is None else min(d, _NUM_PARENTS)
    size = rng.integers(1, most + 1, num)
    rank = rng.random((d, num)).argsort(0).argsort(0)
    weights = np.where(rank < size, rng.normal(size=(d, num)), 0.0)
    if direction is not None:
        # The fit so far, and its negative, with other kinks.
        weights[:, ::2] = direction[:, None] * rng.choice(
            [-1.0, 1.0], weights[:, ::2].shape[1]
        )
    weights = weights / np.maximum(np.linalg.norm(weights, axis=0), 1e-30)
    return weights, -np.sum(weights * x[rng.integers(len(x), size=num)].T, axis=0)


def _pursue(
    units: np.ndarray, y: np.ndarray, width: int, prices: np.ndarray
) -> list[int]:
    """Orthogonal matching pursuit, on the Gram matrix: which units, at most ``width``."""
    units = units - units.mean(0)
    gram, response = units.T @ units, units.T @ (y - y.mean())
    variance, new = np.diagonal(gram).copy(), np.diagonal(gram).copy()
    factor = np.zeros((0, len(gram)))
    indices: list[int] = []
    for _ in range(width):
        open_ = new > np.maximum(_NEW * variance, 1e-12 * variance.max())
        gains = (
            np.where(open_, response**2 / np.where(open_, new, 1.0), -np.inf) - prices
        )
        best = int(np.argmax(gains))
        if not gains[best] > 0.0:
            break
        row = (gram[best] - factor[:, best] @ factor) / np.sqrt(new[best])
        response = response - row * response[best] / np.sqrt(new[best])
        new = new - row**2
        factor = np.vstack([factor, row])
        indices.append(best)
    return indices


def _least_squares(units: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
    """Coefficients, with a slight ridge, and intercept."""
    mean, shift = units.mean(0), y.mean()
    centred = units - mean
    ridge = _RIDGE * max(np.var(y), 1e-30)
    coef = np.linalg.solve(
        centred.T @ centred + ridge * np.eye(len(mean)), centred.T @ (y - shift)
    )
    return coef, float(shift - mean @ coef)


def _balance(layers: Layers) -> Layers:
    """The same network, each unit scaled such that the weights into and out of it have equal norms."""
    layers = [(weights.copy(), biases.copy()) for weights, biases in layers]
    for _ in range(_NUM_ROUNDS):
        for (weights, biases), (after, _) in itertools.pairwise(layers):
            before = np.sqrt(np.sum(weights**2, axis=0) + biases**2)
            behind = np.linalg.norm(after, axis=1)
            both = (before > 0.0) & (behind > 0.0)
            scale = np.sqrt(np.where(both, behind, 1.0) / np.where(both, before, 1.0))
            weights *= scale
            biases *= scale
            after /= scale[:, None]
    return layers
