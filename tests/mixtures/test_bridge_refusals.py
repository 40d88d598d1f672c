"""What the bridges from mixtures to models refuse before they compute."""

import jax
import pytest

import numpyro_tempered as nt
from numpyro_tempered.mixtures import numpyro_guide, numpyro_model, polish

CALLS = {
    "no mixture": (
        lambda: numpyro_model(3, 2),
        TypeError,
        r"^numpyro_model takes a fit or a component such as nt\.mixtures\.components\.gaussian\(dim\), got a int",
    ),
    "no number": (
        lambda: numpyro_model(nt.mixtures.components.gaussian(2)),
        ValueError,
        "^a component has no number of components: pass num_components",
    ),
    "no guide": (
        lambda: numpyro_guide(nt.mixtures.components.gaussian(2)),
        TypeError,
        r"fit is a .*Component; expected the result of nt\.mixtures\.fit",
    ),
    "nothing to polish": (
        lambda: polish(jax.random.key(0), None, [[1.0]]),
        TypeError,
        r"is a NoneType; expected the result of nt\.mixtures\.fit",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_fit_is_refused(name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call()
