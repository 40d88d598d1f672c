"""The ranking of models by ELBO plus log prior."""

import numpy as np
import pytest

from numpyro_tempered.select.ranking import check_log_prior, rank_models


def test_the_criterion_is_elbo_plus_log_prior_and_its_softmax_the_weight():
    elbo, log_prior = np.array([-10.0, -9.5, -30.0]), np.log([0.5, 0.25, 0.125])
    ranking = rank_models(elbo, log_prior)
    np.testing.assert_array_equal(ranking.criterion, elbo + log_prior)
    assert ranking.rank.tolist() == [0, 1, 2]
    assert ranking.rank.dtype.kind == "i"
    assert ranking.best == 0
    weight = np.exp(elbo) * [0.5, 0.25, 0.125]
    np.testing.assert_allclose(ranking.weight, weight / weight.sum(), rtol=1e-12)


def test_of_equal_criteria_the_first_is_the_best():
    ranking = rank_models(np.array([-2.0, -1.0, -1.0]), np.zeros(3))
    assert ranking.rank.tolist() == [2, 0, 1]
    assert ranking.margin.tolist() == [1.0, 0.0, 0.0]
    # Without errors a tie is certain.
    assert not ranking.uncertain.any()


def test_a_model_is_uncertain_whose_error_exceeds_its_margin():
    ranking = rank_models(
        np.array([-1.0, -2.0, -9.0]), np.zeros(3), error=np.array([1.5, 0.5, 1.0])
    )
    assert ranking.margin.tolist() == [1.0, 1.0, 8.0]
    assert ranking.uncertain.tolist() == [True, False, False]


def test_a_single_model_has_no_runner_up():
    ranking = rank_models(np.array([-3.0]), np.zeros(1), error=np.array([100.0]))
    assert ranking.margin.tolist() == [np.inf]
    assert ranking.weight.tolist() == [1.0]
    assert not ranking.uncertain.any()


def test_minus_infinity_has_no_weight():
    ranking = rank_models(np.array([-np.inf, 0.0]), np.log([0.5, 0.5]))
    assert ranking.best == 1
    assert ranking.weight.tolist() == [0.0, 1.0]


def test_the_prior_is_uniform_by_default_and_may_be_a_function_of_the_names():
    np.testing.assert_allclose(check_log_prior(["a", "b"], None), np.log([0.5, 0.5]))
    values = check_log_prior(["a", "b"], lambda names: {names[1]: -1.0, names[0]: -2.0})
    assert values.tolist() == [-2.0, -1.0]


@pytest.mark.parametrize(
    ("log_prior", "message"),
    [
        ({"a": -1.0}, r"log_prior has models \['a'\], the fits are \['a', 'b'\]"),
        (
            {"a": -1.0, "b": -np.inf},
            "must be finite, the logarithms of positive weights",
        ),
        (
            {"a": 0.0, "b": 0.0},
            r"^the prior weights.*sum to 2, more than 1.*pass logarithms",
        ),
    ],
)
def test_a_wrong_prior_is_refused(log_prior, message):
    with pytest.raises(ValueError, match=message):
        check_log_prior(["a", "b"], log_prior)
