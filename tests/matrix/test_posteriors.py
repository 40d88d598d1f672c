"""Every verb on every kind of posterior, right or refused by the words of the table."""

import pytest
from conftest import tiered
from matrix.posteriors import POSTERIORS, REFUSED, VERBS

CELLS = [(verb, name) for verb in VERBS for name in POSTERIORS]
UNIT = [
    ("table", "mixtures.fit"),
    ("to_inference_data", "OnlineVI"),
    ("compare", "OnlineVI"),
    ("sandwich", "OnlineVI"),
    ("check_fit", "ppca.fit"),
    *REFUSED,
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("verb", "name"), tiered(CELLS, unit=UNIT))
def test_a_verb_is_right_or_refuses(verb, name):
    words = REFUSED.get((verb, name))
    if words is None:
        VERBS[verb](name)
        return
    with pytest.raises((TypeError, ValueError), match=words):
        VERBS[verb](name)
