"""Scores of predicted probabilities of classes, with NumPy alone."""

import numpy as np

NUM_BINS = 15


def log_scores(log_p, labels):
    """Logarithm of the probability of each label, nats, from the logarithms of all."""
    return np.take_along_axis(log_p.astype(np.float64), labels[:, None], 1)[:, 0]


def brier(p, labels):
    """Mean squared distance of the probabilities from the label's corner of the simplex, from 0 to 2."""
    return np.mean(np.sum((p - np.eye(p.shape[1])[labels]) ** 2, axis=1))


def top(p, labels):
    """The largest probability of each row, its confidence, and whether it is that of the label."""
    return p.max(1), p.argmax(1) == labels


def reliability(confidence, right, num_bins=NUM_BINS):
    """Rows, mean confidence and share of right answers by bins of equal width of the confidence.

    Bin b has confidences in (b / num_bins, (b + 1) / num_bins]; empty ones have NaN.
    """
    bins = np.clip(np.ceil(confidence * num_bins).astype(int) - 1, 0, num_bins - 1)
    rows, sums, hits = (
        np.bincount(bins, w, num_bins) for w in (np.ones(len(bins)), confidence, right)
    )
    with np.errstate(invalid="ignore"):
        return rows, sums / rows, hits / rows


def calibration_error(confidence, right, num_bins=NUM_BINS):
    """Expected calibration error: the distance between confidence and share of right answers, mean over rows."""
    rows, mean, share = reliability(confidence, right, num_bins)
    return np.nansum(rows * np.abs(mean - share)) / rows.sum()


def calibrated_error(rng, confidence, num_repeats=200, num_bins=NUM_BINS):
    """The mean calibration error if the confidences were true, which is not 0 for few rows."""
    right = rng.random((num_repeats, len(confidence))) < confidence
    return np.mean([calibration_error(confidence, row, num_bins) for row in right])
