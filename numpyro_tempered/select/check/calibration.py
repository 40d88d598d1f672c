"""Simulation-based calibration of any fit: are the posteriors of simulated data right on average?"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.elbo import ELBO
from numpyro.infer.mcmc import MCMCKernel

from numpyro_tempered.core import (
    CLOCK,
    Array,
    Columns,
    Model,
    Params,
    ProgressBar,
    add_repr,
    advise_cache,
    check_count,
    check_number,
    map_batches,
    number_names,
    progress_bars,
    run_program,
    runs_models,
)
from numpyro_tempered.gaussian.families import family_of
from numpyro_tempered.handlers.arguments import check_call
from numpyro_tempered.handlers.numpyro_private import unpack_and_constrain
from numpyro_tempered.handlers.target import Target
from numpyro_tempered.handlers.temper import temper
from numpyro_tempered.infer.online import OnlineVI
from numpyro_tempered.infer.svi import NUM_STEPS
from numpyro_tempered.online import drivers, stream
from numpyro_tempered.online.base import OnlineState
from numpyro_tempered.report.arviz import ArviZData, assemble, dataset, versions
from numpyro_tempered.report.draws import name_of
from numpyro_tempered.select.alpha.guides import GuideOptions, check_guide_options
from numpyro_tempered.select.alpha.mcmc import divergence_fields
from numpyro_tempered.select.alpha.model_data import CountsRuns, Method, build_method
from numpyro_tempered.select.check.posteriors import (
    Counts,
    Design,
    Values,
    chain_sampler,
    count,
    fit_guides,
    sample_chains,
)
from numpyro_tempered.select.check.simulate import (
    BATCH,
    Simulations,
    check_model,
    simulate,
    with_data,
)
from numpyro_tempered.select.check.uniformity import LEVEL, Judgement, judge, random_pit

LOG_LIK = "log_lik"
# Names that a sentence lists.
MOST_LISTED = 6


@add_repr
class Calibration(NamedTuple):
    """The result of :func:`numpyro_tempered.check_calibration`, of N simulations.

    Attributes:
        advice: What the ranks say, in words.
        alpha: Power of the likelihood.
        num_draws: L: draws from each posterior.
        ranks: Number of draws below the truth, 0 to L, ``(N, ...)`` by latent site and quantity.
        truths: What the data were simulated from, likewise.
        converged: Which of the fits converged, of the chains mixed, or of the streams had no round rejected,
            ``(N,)``. The ranks are of all of them.
        data: ArviZ data: the table of :func:`numpyro_tempered.table` in the group ``calibration``, and the ranks
            as numbers in (0, 1) in ``prior_sbc``, which ArviZ's ``plot_ecdf_pit`` draws.
    """

    advice: str
    alpha: float
    num_draws: int
    ranks: Columns
    truths: Columns
    converged: np.ndarray
    data: ArviZData


@runs_models
def check_calibration(
    rng_key: Array,
    model: Model,
    method: Method,
    *args: object,
    alpha: float = 1.0,
    num_simulations: int = 200,
    num_draws: int = 199,
    quantities: Mapping[str, Callable[[Params], Array]] | None = None,
    num_steps: int = NUM_STEPS,
    tolerance: float = 0.05,
    loss: ELBO | None = None,
    num_warmup: int = 500,
    thinning: int = 5,
    progress_bar: ProgressBar = None,
    **kwargs: object,
) -> Calibration:
    r"""Simulate data from a model, fit them, and see whether the fits cover the truth: is a method calibrated?

    Parameters θ come from the prior and data y from the model at them. If a fit to y is the exact posterior, θ is
    one more draw from it: its rank among L draws is uniform on 0, ..., L, for each scalar and each function of
    parameters and data. Ranks that pile up

    - at both ends: the posteriors are too narrow (``spread`` above 1),
    - in the middle: they are too wide (``spread`` below 1),
    - at one end: they are too low or too high (``bias`` above or below 0).

    Ranks of parameters alone do not see a fit that ignores its data, as the prior is calibrated too. Those of the
    log-likelihood, ``log_lik``, do, and are always among the quantities.

    The data that are passed give the shapes: each observed site takes simulated values instead, and everything
    else that the arguments hold, such as covariates, stays. Where an observed site depends on past data through
    the arguments, as in ``Normal(rho * y[:-1], 1)``, these are covariates and stay too.

    **Tempered posteriors.** At ``alpha`` other than 1 even the exact tempered posterior is not calibrated: data
    that count alpha times leave it too wide by design, to be right where the model is wrong, which simulation
    from the model cannot show. Of a normal mean with prior :math:`N(0, \tau^2)` and n data of variance
    :math:`\sigma^2`, the error in posterior standard deviations is normal with the variance

    .. math:: v = \frac{1/\tau^2 + \alpha^2 n / \sigma^2}{1/\tau^2 + \alpha n / \sigma^2},

    which is 1 at alpha = 1 and alpha for many data, where it holds for any regular model. So ``spread`` between 1
    and √alpha is no sign of error, and the ranks' uniformity is not judged; above 1 at alpha below 1 the fit is
    too narrow even for the untempered posterior.

    All fits run side by side as one program: those of a guide as :func:`fit_svi` makes them, of a full covariance
    by draws as :func:`fit_gaussian` does, each with random numbers of its own. Those that do not converge are
    fitted again up to three times, and then left in.

    Args:
        rng_key: Key of the simulations, fits and draws.
        model: NumPyro model with proper priors, as :func:`fit_svi` takes it.
        method: From tempered model to guide, kernel or :class:`OnlineVI`, as for :func:`select_alpha`:
            ``AutoNormal``, ``NUTS``, ``lambda model: nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal)``; it
            takes the rows of the arguments one by one.
        *args: Arguments of the model.
        alpha: Power on the likelihood.
        num_simulations: N: data sets. With 200, a standard deviation of a few parameters that is wrong by a
            fifth, or a bias of a fourth of it, is noticed in four of five checks.
        num_draws: L: draws from each posterior.
        quantities: Further functions of the latents to rank, by name: they take a dict by site, return an array.
        num_steps: Guides: the most steps of each fit.
        tolerance: Guides: in nats, on the estimated distance of each ELBO from its optimum.
        loss: Guides: ELBO of NumPyro to optimise; by default that of :func:`fit_svi`.
        num_warmup: MCMC: steps of adaptation for each data set.
        thinning: MCMC: one draw of this many is ranked, as ranks take draws for independent.
        progress_bar: Whether to show steps, by tqdm; None: where they take some seconds.
        **kwargs: Keyword arguments of the model.

    Returns:
        A :class:`.Calibration`. Its table, of :func:`numpyro_tempered.table`, has a row for each scalar with

        - ``mean_pit``, the mean share of draws below the truth, 1/2 if unbiased,
        - ``bias`` and ``spread``, mean and standard deviation of the errors in posterior standard deviations,
          from the normal scores of the ranks: 0 and 1 if calibrated,
        - ``vsbc``, the Kolmogorov-Smirnov distance of the ranks from their mirror images, which Yao et al. use to
          find bias, as NumPyro's ``vsbc_diagnostic``,
        - ``p_bias``, ``p_spread``, ``p_uniform``, ``p_symmetric``: P values of these, and of uniform ranks,
        - ``p_value``, adjusted for the number of tests and scalars, and ``verdict`` in words at the level .05.

    Raises:
        TypeError: If ``method`` is a guide or kernel already, or makes none.
        ValueError: If the model cannot simulate itself: an improper prior, one without a sampler, params,
            discrete latents, masked data, factors, powers or a divergence in its likelihood, plates that
            subsample; the message names the site. If simulations or fits are not finite.

    References:
        Talts et al. 2018, *Validating Bayesian inference algorithms with simulation-based calibration*; Modrák et
        al. 2023, *Simulation-based calibration checking for Bayesian computation: the choice of test quantities
        shapes sensitivity*; Yao et al. 2018, *Yes, but did it work?*; Säilynoja, Bürkner and Vehtari 2022 for the
        bands of the plot.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer.autoguide import AutoNormal
        >>> import numpyro_tempered as nt
        >>> def model(y):
        ...     theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("n", len(y)):
        ...         numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)
        >>> check = nt.check_calibration(jax.random.key(0), model, AutoNormal, jnp.zeros(6), num_simulations=100)
        >>> nt.table(check)["verdict"].to_list()
        ['no sign of error', 'no sign of error']
    """
    began = CLOCK.read()
    options = check_guide_options(GuideOptions(num_steps, tolerance, loss, None))
    check_number(alpha, "alpha", "(0, inf)")
    numbers = {"num_simulations": (num_simulations, 20), "num_draws": (num_draws, 20)}
    for name, (number, least) in {
        **numbers,
        "num_warmup": (num_warmup, 0),
        "thinning": (thinning, 1),
    }.items():
        check_count(number, name, least)
    args, kwargs = check_call(check_calibration, rng_key, model, method, args, kwargs)
    model_key, data_key, fit_key, tie_key = jax.random.split(rng_key, 4)
    data = Target(CountsRuns(model), args, kwargs, model_key)
    check_model(data)
    algorithm = build_method(method, temper(data.model, float(alpha)), online=True)
    simulations = simulate(data_key, data, num_simulations)
    design = Design(
        data, float(alpha), ranked_quantities(data, quantities or {}), num_draws
    )
    with progress_bars(progress_bar):
        if isinstance(algorithm, MCMCKernel):
            sampler = chain_sampler(design, method, num_warmup, thinning)
            fields = divergence_fields(algorithm, data)
            counts, converged = sample_chains(
                fit_key, design, sampler, fields, simulations, thinning
            )
        elif isinstance(algorithm, OnlineVI):
            counts, converged = run_streams(fit_key, design, method, simulations)
        else:
            counts, converged = fit_guides(
                fit_key, design, algorithm, simulations, options
            )
    if not np.all(counts.is_finite):
        raise ValueError(
            f"{np.sum(~counts.is_finite)} of {num_simulations} fits have draws that are not finite, and so no "
            "ranks: take a larger num_steps, or another parameterisation of the model."
        )
    truths = jax.device_get(
        run_program(jax.vmap(design.quantities), simulations.truths, simulations.data)
    )
    advise_cache("check_calibration", began)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(tie_key)))
    return _report(rng, design, name_of(algorithm), counts, truths, converged)


def ranked_quantities(
    data: Target, functions: Mapping[str, Callable[[Params], Array]]
) -> Callable[[Values, Values], Values]:
    """From latents and data to all that is ranked.

    Raises:
        ValueError: If a quantity has the name of a latent, or of the log-likelihood.
    """
    names = [*data.latents, *functions, LOG_LIK]
    if doubles := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"{doubles} are names of two quantities each: rename the sites or the quantities."
        )

    def quantities(latents: Values, values: Values) -> Values:
        of_user = {
            name: jnp.asarray(function(latents)) for name, function in functions.items()
        }
        return {**latents, **of_user, LOG_LIK: data.log_lik({**latents, **values})}

    return quantities


def _report(
    rng: np.random.Generator,
    design: Design,
    method: str,
    counts: Counts,
    truths: Values,
    converged: np.ndarray,
) -> Calibration:
    """The ranks with what they say."""
    ranks, names, columns, pits, judged = {}, [], [], {}, []
    latents = design.data.latents
    # Programs sort what they return by name.
    names_in_order = [*latents, *sorted(set(truths) - {*latents, LOG_LIK}), LOG_LIK]
    for name in names_in_order:
        truth = np.asarray(truths[name])
        less, equal = (
            np.asarray(part[name], int) for part in (counts.less, counts.equal)
        )
        ranks[name], pit = random_pit(rng, less, equal, design.num_draws)
        pits[name] = pit
        flat = np.reshape(truth, (len(truth), -1))
        for k, each in enumerate(number_names(name, map(range, truth.shape[1:]))):
            # Entries that are constant, such as the zeros of a triangular matrix, have no rank.
            if np.ptp(flat[:, k]) > 0:
                names.append(each)
                # Of what else is known at other powers there is no closed form.
                judged.append(design.alpha == 1.0 or name in design.data.latents)
                columns.append(np.reshape(pit, (len(pit), -1))[:, k])
    judgement = judge(
        np.stack(columns, axis=1), design.num_draws, design.alpha, np.array(judged)
    )
    advice = _advise(names, judgement, design.alpha, converged)
    attrs = {
        "method": method,
        "alpha": design.alpha,
        "num_draws": design.num_draws,
        "num_simulations": len(converged),
        "num_unconverged": int(np.sum(~converged)),
        "advice": advice,
        **versions(),
    }
    by_parameter = {name: ["parameter"] for name in judgement._fields}
    groups = {
        "calibration": dataset(
            judgement._asdict(),
            coords={"parameter": names},
            dims=by_parameter,
            attrs=attrs,
        ),
        "prior_sbc": dataset(
            {name: pit[None] for name, pit in pits.items()}, ("chain", "draw")
        ),
        "calibration_pit": dataset(
            {"pit": np.stack(columns, axis=0), "converged": converged},
            coords={"parameter": names},
            dims={"pit": ["parameter", "simulation"], "converged": ["simulation"]},
            attrs=attrs,
        ),
    }
    in_order = {name: np.asarray(truths[name]) for name in ranks}
    return Calibration(
        advice,
        design.alpha,
        design.num_draws,
        ranks,
        in_order,
        converged,
        assemble(groups, attrs),
    )


def _advise(
    names: list[str], judgement: Judgement, alpha: float, converged: np.ndarray
) -> str:
    """What the ranks say, in a few sentences."""
    groups: dict[str, list[str]] = {}
    for name, verdict, p_value in zip(
        names, judgement.verdict, judgement.p_value, strict=True
    ):
        if p_value <= LEVEL:
            groups.setdefault(str(verdict), []).append(name)
    num, total = len(converged), int(np.sum(~np.isnan(judgement.p_value)))
    sentences = [f"{_list(group)} {verdict}" for verdict, group in groups.items()]
    head = "; ".join(sentences) if sentences else "no sign of error"
    advice = f"{head}; of {total} scalars in {num} simulations, at the level {LEVEL:g} adjusted for their number."
    if alpha != 1.0:
        advice += (
            f" At alpha = {alpha:g} even an exact tempered posterior is not calibrated: its spread is between 1 "
            f"and {math.sqrt(alpha):.3g}, and only a spread outside of that is called too narrow or too wide."
        )
    if bad := int(np.sum(~converged)):
        advice += f" {bad} of the {num} fits did not converge, and are among the ranks."
    return advice


def _list(names: list[str]) -> str:
    """Some names in words."""
    first = ", ".join(names[:MOST_LISTED])
    return (
        first
        if len(names) <= MOST_LISTED
        else f"{first} and {len(names) - MOST_LISTED} others"
    )


def run_streams(
    rng_key: Array, design: Design, factory: Method, simulations: Simulations
) -> tuple[Counts, np.ndarray]:
    """One pass of an online rule over each data set, row by row, and the ranks of the truths.

    Args:
        rng_key: Key of the passes and draws.
        design: What all share.
        factory: From tempered model to :class:`OnlineVI`.
        simulations: The data sets.

    Returns:
        The counts, and of which streams no round was rejected, ``(K,)``.

    Raises:
        ValueError: If the rule ends in a point, or a row of the arguments is not one of the data.
    """
    data = design.data

    def streamed(values: Values, *args: object, **kwargs: object) -> object:
        return with_data(data.model, values)(*args, **kwargs)

    online = factory(temper(streamed, design.alpha))
    if online.rule.point:
        raise ValueError(
            f"{online.rule.name} ends in a point, whose draws have no ranks: take another rule."
        )
    # The values of the sites are the first leaves of the arguments, in the order of their names.
    names = sorted(simulations.data)
    args = ({name: simulations.data[name][0] for name in names}, *data.args)
    arrays, _, expectation = online._split(args, data.kwargs)
    num_rounds = drivers.check_rows([array for array in arrays if array.ndim])
    first = jax.tree.map(
        lambda leaf: leaf[:1] if jnp.ndim(leaf) else leaf, (args, data.kwargs)
    )
    start = online.init(rng_key, *first[0], **first[1])

    def one(part: tuple[Array, Simulations]) -> tuple[Counts, Array]:
        key, (truth, values, _) = part
        run_key, draw_key = jax.random.split(key)
        leaves = (*(values[name] for name in names), *arrays[len(names) :])
        rows = tuple(
            a[:, None] if a.ndim else jnp.broadcast_to(a, (num_rounds,)) for a in leaves
        )

        def take_round(
            state: OnlineState, row: tuple[Array, ...]
        ) -> tuple[OnlineState, None]:
            return stream.step(online.rule, expectation, state, row, run_key)[0], None

        end, _ = jax.lax.scan(take_round, start.rule_state, rows)
        flat = family_of(end.posterior).sample(
            draw_key, end.posterior, (design.num_draws,)
        )
        samples = unpack_and_constrain(
            online.guide, flat, online.guide.to_params(end.posterior)
        )
        latents = {name: samples[name] for name in data.latents}
        draws = map_batches(
            lambda draw: design.quantities(draw, values), latents, BATCH
        )
        return count(draws, design.quantities(truth, values)), end.rejected

    parts = jax.random.split(rng_key, len(simulations.log_lik)), simulations
    counts, rejected = jax.device_get(
        run_program(lambda parts: map_batches(one, parts, BATCH), parts)
    )
    return counts, rejected == 0
