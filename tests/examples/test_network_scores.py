"""The scores of the study of calibrated networks."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

metrics = pytest.importorskip("sklearn.metrics")

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "network_scores.py"
spec = importlib.util.spec_from_file_location("network_scores", SCRIPT)
scores = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scores)


def predictions():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(4, 0.5), 300)
    return p, np.array([rng.choice(4, p=row) for row in p])


def test_log_score_and_brier_are_those_of_scikit_learn():
    p, labels = predictions()
    assert scores.log_scores(np.log(p), labels).mean() == pytest.approx(
        -metrics.log_loss(labels, p), rel=1e-12
    )
    by_class = [metrics.brier_score_loss(labels == k, p[:, k]) for k in range(4)]
    assert scores.brier(p, labels) == pytest.approx(sum(by_class), rel=1e-12)


def test_calibration_error_by_hand():
    # Two bins of (0, .5] and (.5, 1]: .5 is in the first. Half of .4 and .5 is right, of .8, .9, 1 two thirds.
    confidence = np.array([0.4, 0.5, 0.8, 0.9, 1.0])
    right = np.array([True, False, True, False, True])
    rows, mean, share = scores.reliability(confidence, right, 2)
    np.testing.assert_array_equal(rows, [2, 3])
    np.testing.assert_allclose(mean, [0.45, 0.9])
    np.testing.assert_allclose(share, [1 / 2, 2 / 3])
    assert scores.calibration_error(confidence, right, 2) == pytest.approx(
        2 / 5 * 0.05 + 3 / 5 * (0.9 - 2 / 3)
    )


def test_empty_bins_count_for_nothing():
    rows, mean, _ = scores.reliability(np.full(8, 0.97), np.ones(8, bool))
    assert rows.sum() == rows[-1] == 8
    assert np.isnan(mean[:-1]).all()
    assert scores.calibration_error(
        np.full(8, 0.97), np.ones(8, bool)
    ) == pytest.approx(0.03)


def test_the_error_of_true_confidences_falls_as_the_root_of_rows():
    # One bin: the mean absolute error of a share, sqrt(2 p (1 - p) / (pi n)), to five standard errors.
    for n in (400, 6400):
        error = scores.calibrated_error(np.random.default_rng(1), np.full(n, 0.9), 1000)
        assert error == pytest.approx(np.sqrt(2 * 0.09 / (np.pi * n)), rel=0.12)


def test_the_largest_probability_and_whether_it_is_right():
    confidence, right = scores.top(np.array([[0.2, 0.8], [0.6, 0.4]]), np.array([1, 1]))
    np.testing.assert_array_equal(confidence, [0.8, 0.6])
    np.testing.assert_array_equal(right, [True, False])
