"""Powers that do not depend on the values of the data: by coarsening, MD19, and by the theory's bounds."""

from numpyro_tempered.core import check_count, check_number


def coarsening(a: float, num_data: int, *, num_independent: int | None = None) -> float:
    r"""The power of a posterior given that the data are only near a sample of the model (Miller and Dunson).

    **Aim: robustness** to a departure of known size, neither risk nor coverage. The posterior is conditioned on
    the event that the observed data lie within a relative entropy R of data from the model, with R exponential of
    mean 1/a. For relative entropy this is, nearly, the posterior with the power

    .. math:: \alpha = \frac{1}{1 + n / a}.

    So the data never count for more than a: the power times n rises to a. ``a`` is the number of
    data at which the model's departure from the truth begins to show, and 1/a the departure in relative entropy
    (nats per datum) that you accept. Where it is known, for instance from an instrument's error or from
    earlier data sets, take 1/a of that size. Where it is not, read the **calibration curve**: call
    :func:`numpyro_tempered.temper_path`, and plot its expected log-likelihood against the divergence from the
    prior, ``kl``. As alpha rises from 0 the fit rises steeply while useful parameters enter, then bends: beyond
    the bend a further parameter adds little. Take the alpha of the bend, and a = n α / (1 - α).

    Where data depend on each other, m independent ones among n rows, such as groups of copies, the data count for
    :math:`m / (1 + m / a)` and each row for 1/n of that: :math:`\alpha = \frac{m}{n} / (1 + m / a)`.

    Args:
        a: A positive number, in data.
        num_data: n, the number of rows, without those that the model masks.
        num_independent: m, the number of groups of rows of which each counts as one datum; n by default.

    Returns:
        The power, to pass as ``alpha`` to :func:`numpyro_tempered.temper` or a fit.

    Raises:
        ValueError: If ``a`` is not positive and finite, or a number of data not an integer, or m above n.

    References:
        MD19.

    Example:
        >>> coarsening(30.0, 90)
        0.25
        >>> coarsening(30.0, 90, num_independent=30)
        0.16666666666666666
    """
    check_number(
        a,
        "a",
        "(0, inf)",
        hint="It is the number of data at which the departure shows.",
    )
    n = check_count(num_data, "num_data", 1)
    m = (
        n
        if num_independent is None
        else check_count(num_independent, "num_independent", 1, n)
    )
    return float(m / n / (1.0 + m / a))


def theory_default() -> float:
    r"""The power 1/2, whatever the data.

    **Aim: a guarantee on risk** in the worst case, for an unknown departure of the model from the truth. The
    tempered posterior concentrates for every α < 1 under a condition on the prior mass alone; with the rate
    :math:`r_n`,

    .. math:: E \int D_\alpha(P_\theta, P_0)\, d\tilde\pi_{n,\alpha} \le \frac{1 + \alpha}{1 - \alpha}\, r_n.

    As :math:`D_{1/2} \le D_\alpha` for α >= 1/2 and :math:`D_{1/2} \le \frac{1 - \alpha}{\alpha} D_\alpha` below,
    the bound on :math:`D_{1/2}` that follows, :math:`3 r_n`, is least at α = 1/2, for every rate. With H the
    Hellinger distance, :math:`D_{1/2} = -2\log(1 - H^2/2) \ge H^2`.

    Use it as a default before the data arrive, for a model that the criteria refuse (discrete latents, few
    data, no rows), and for statements that need the theorem. Do not use it for intervals: on a well-specified
    model those at 1/2 are too wide by a factor of :math:`\sqrt 2`.

    Returns:
        1/2, to pass as ``alpha`` to :func:`numpyro_tempered.temper` or a fit.

    References:
        AR; vEH, Theorem 16.

    Example:
        >>> theory_default()
        0.5
    """
    return 0.5
