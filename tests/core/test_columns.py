"""Names of columns: of a fit and of what follows it."""

import pytest

from numpyro_tempered.core.labels import check_columns

ABC, NUMBERS = ("a", "b", "c"), (0, 1, 2)


@pytest.mark.parametrize(
    ("of_fit", "columns"),
    [
        (ABC, ABC),
        (NUMBERS, NUMBERS),
        (ABC, NUMBERS),
        (NUMBERS, ABC),
        (None, ABC),
        ((), ABC),
    ],
)
def test_columns_that_agree_or_are_only_counted_pass(of_fit, columns):
    check_columns({"x": of_fit}, {"x": columns})


@pytest.mark.parametrize(
    ("of_fit", "columns"),
    [
        (ABC, ("b", "a", "c")),
        (ABC, ("a", "b")),
        (NUMBERS, (2, 1, 0)),
        (ABC, ("a", "b", "d")),
    ],
)
def test_other_columns_and_other_orders_are_refused(of_fit, columns):
    with pytest.raises(ValueError, match=r"argument x has columns .*, that of the fit"):
        check_columns({"x": of_fit}, {"x": columns})
