# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Two processes, one posterior
#
# [![Open in Colab][badge]][colab]
#
# [badge]: https://colab.research.google.com/assets/colab-badge.svg
# [colab]: https://colab.research.google.com/github/numpyro-tempered/numpyro_tempered/blob/main/examples/gallery/two_processes_one_posterior.ipynb
#
# The rows of a data set lie on several machines, and none of them can read all. **Do they still get the posterior
# of all rows?** Two answers, on 569 tumours. Two processes of one program add up their sums over rows in each
# step, and have the numbers of one process. Eight hospitals that cannot run one program send small changes to a
# server, and come to the same posterior in a few rounds.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("numpyro_tempered") is None:
    package = "numpyro_tempered[examples] @ git+https://github.com/numpyro-tempered/numpyro_tempered"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", package], check=True)

# %%
import inspect
import os
import socket
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoMultivariateNormal
from sklearn.datasets import load_breast_cancer

import numpyro_tempered as nt

plt.style.use("numpyro_tempered.plots.house")
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"
# Double precision, so that what remains between two fits is not rounding.
jax.config.update("jax_enable_x64", True)

# %% [markdown]
# ## The data frame
#
# Thirty measurements of the cells of a tumour, from scikit-learn, and whether it is malignant. The rows go to one
# file of NumPy, which a process can read in part.

# %%
frame = load_breast_cancer(as_frame=True).frame
measured = frame.drop(columns="target")
x = np.column_stack(
    [np.ones(len(frame)), (measured - measured.mean()) / measured.std()]
)
y = 1.0 - frame["target"].to_numpy()
folder = Path(tempfile.mkdtemp())
np.save(folder / "rows.npy", np.column_stack([x, y]))
print(
    f"{len(x)} tumours, {x.shape[1]} columns with the intercept; malignant: {y.mean():.0%}"
)

# %% [markdown]
# ## One model, one fit
#
# An ordinary logistic regression, with a power of 1/2 on its likelihood. The `mask` leaves out rows that are no
# data; in one process all are.


# %%
def model(x, y=None, mask=True):
    weights = numpyro.sample(
        "weights", dist.Normal(0.0, 1.0).expand([x.shape[-1]]).to_event(1)
    )
    eta = numpyro.deterministic("eta", x @ weights)
    with numpyro.plate("tumours", len(x)), numpyro.handlers.mask(mask=mask):
        numpyro.sample("malignant", dist.Bernoulli(logits=eta), obs=y)


def fit_rows(x, y, mask=True):
    at_eta = nt.expectations.gauss_hermite(predictor="eta")
    return nt.fit_gaussian(
        jax.random.key(0),
        model,
        AutoMultivariateNormal,
        x,
        y,
        mask,
        alpha=0.5,
        expectation=at_eta,
    )


began = time.perf_counter()
one = fit_rows(x, y)
seconds_of_one = time.perf_counter() - began
print(f"one process: ELBO {one.elbo.value:.6f}, converged: {one.converged}")

# %% [markdown]
# ## The same fit in two processes
#
# Both run the script below, with the model and the fit of the cell above. Each joins the other, reads its half of
# the file and no more, and calls the fit. `share_rows` makes one array of both halves; 285 rows and 284 are
# unequal, so a copy fills up the second half, and the mask is False there. Process 0 writes the result.

# %%
script = """import sys
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)
# Two processes cannot share the one GPU of a notebook. On two machines leave this line out.
jax.config.update("jax_platforms", "cpu")
port, process, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)

import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer.autoguide import AutoMultivariateNormal

import numpyro_tempered as nt

MODEL
FIT
all_rows = np.load(folder / "rows.npy", mmap_mode="r")
rows = np.array_split(all_rows, jax.process_count())[jax.process_index()]
(x, y), mask = nt.online.share_rows(rows[:, :-1], rows[:, -1])
fit = fit_rows(x, y, mask)
print(f"process {jax.process_index()} read {len(rows)} rows of {int(mask.sum())}: ELBO {fit.elbo.value:.6f}")
if jax.process_index() == 0:
    np.savez(folder / "fit.npz", elbo=fit.elbo.value, **fit.params)
"""
script = script.replace("MODEL", inspect.getsource(model)).replace(
    "FIT", inspect.getsource(fit_rows)
)
(folder / "fit.py").write_text(script)

with socket.socket() as listener:
    listener.bind(("localhost", 0))
    port = listener.getsockname()[1]
# Where https_proxy is set the processes would look for each other behind it, and wait.
environment = os.environ | {"no_proxy": "localhost"}
began = time.perf_counter()
workers = [
    subprocess.Popen(
        [sys.executable, folder / "fit.py", str(port), str(process), folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    for process in (0, 1)
]
try:
    for worker in workers:
        output, errors = worker.communicate(timeout=120)
        if worker.returncode:
            raise RuntimeError(errors)
        print(
            output[output.index("process ") :], end=""
        )  # without the lines of gloo, which carries the sums
finally:
    for worker in workers:
        worker.kill()
seconds_of_two = time.perf_counter() - began

# %% [markdown]
# What moved between them are sums: the ELBO, its gradients and Hessians. No row did.

# %%
with np.load(folder / "fit.npz") as file:
    two = dict(file)
print(f"ELBO: {abs(two['elbo'] / one.elbo.value - 1):.0e} relative difference")
for name, value in one.params.items():
    largest = np.max(np.abs(two[name] - value)) / np.max(np.abs(value))
    print(f"{name}: {largest:.0e} of the largest entry, at most")
    np.testing.assert_allclose(
        two[name], value, rtol=1e-6, atol=1e-6 * np.max(np.abs(value))
    )

# %% [markdown]
# ## Eight hospitals that share no array
#
# Now 71 or 72 tumours lie in each of eight hospitals, with 31 coefficients to learn, and no program runs over all
# of them. `OnlineVI.bare_loss` makes two things of the model: its loss, with the power, and its prior, a
# Gaussian. That is what all hospitals must have alike.
#
# **Merge once.** Each hospital learns its rows as a stream from the prior, and sends its state. `merge` adds up
# what they have learnt.

# %%
online = nt.OnlineVI(
    nt.temper(model, alpha=0.5),
    nt.guides.AutoOnlineMultivariateNormal,
    nt.online.rvga(),
    expectation=nt.expectations.gauss_hermite(predictor="eta"),
)
hospitals = list(zip(np.array_split(x, 8), np.array_split(y, 8), strict=True))
loss, prior = online.bare_loss(jax.random.key(1), *hospitals[0])
batch_loc, batch_factor = one.params["auto_loc"], one.params["auto_scale_tril"]


def distance(posterior):
    """Root mean square of the means less those of all rows, in standard deviations of the posterior."""
    return float(
        np.sqrt(np.mean(np.linalg.solve(batch_factor, posterior.loc - batch_loc) ** 2))
    )


rule = nt.online.rvga()
# A round of the stream is a batch of one tumour.
states = [
    nt.online.run(rule, loss, rule.init(prior), x[:, None], y[:, None])[0]
    for x, y in hospitals
]
merged = states[0]
for state in states[1:]:
    merged = nt.online.merge(rule, merged, state)
print(
    f"merged once: {distance(merged.posterior):.2f} standard deviations from the posterior of all rows"
)

# %% [markdown]
# **Merge in rounds.** A hospital fits its rows *to what the others know*, and sends the change of its factor. The
# server adds the changes up. After each round the posterior is one of all rows; where it stands still, it is
# the posterior of all rows.

# %%
pvi = nt.online.partitioned(loss)
server = pvi.init(prior, num_parts=8)
factors = [pvi.factor(server, part) for part in range(8)]
distances = []
clock = [time.perf_counter()]
for _ in range(12):
    factors = [
        pvi.refit(factor, server, *rows)
        for factor, rows in zip(factors, hospitals, strict=True)
    ]
    server = pvi.combine(server, [factor.change for factor in factors])
    distances.append(distance(server.posterior))
    clock.append(time.perf_counter())
message = nt.online.to_bytes(factors[0].change)
print(f"a hospital sends {len(message):,} bytes a round")
print(
    "rounds 1, 4, 8, 12:", ", ".join(f"{distances[k - 1]:.1g}" for k in (1, 4, 8, 12))
)

# %% [markdown]
# To try this on rows that are all here, `run_partitioned` makes the same rounds in one call, and stops where they
# have converged.

# %%
run = nt.online.run_partitioned(pvi, prior, hospitals)
print(
    f"converged: {run.converged}, after {len(run.move)} rounds, {distance(run.posterior):.1g} from all rows"
)

# %% tags=["thumbnail"]
fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))
scales = [
    np.linalg.norm(factor, axis=1) for factor in (batch_factor, two["auto_scale_tril"])
]
left.plot(batch_loc, two["auto_loc"], "o", color=BLUE, label="mean")
left.plot(*scales, "o", color=ORANGE, label="standard deviation")
left.axline((0, 0), slope=1, color=GREY, linewidth=1, zorder=0)
left.set(
    xlabel="of one process",
    ylabel="of two processes",
    title="Two processes: the numbers of one",
    xticks=[-0.5, 0, 0.5, 1],
    yticks=[-0.5, 0, 0.5, 1],
)
left.legend()
right.semilogy(range(1, 13), distances, "o-", color=BLUE)
right.axhline(distance(merged.posterior), color=ORANGE)
right.text(
    12,
    0.93 * distance(merged.posterior),
    "merged once",
    color=ORANGE,
    ha="right",
    va="top",
)
right.text(5.3, 1.1 * distances[4], "in rounds", color=BLUE)
_ = right.set(
    xlabel="round",
    ylabel="distance in standard deviations",
    title="Eight hospitals: closer in each round",
    xticks=[1, 4, 8, 12],
)

# %% [markdown]
# *On the left the 31 coefficients lie on the diagonal. On the right every round brings the eight hospitals closer
# to the posterior of all rows; merging once ends where it is.* It is exact for a loss that is quadratic in the
# parameters. A logistic one is not, and with two rows for a coefficient a hospital alone takes another path than
# all of them together.
#
# ## Which of the two
#
# | your machines | take | what moves |
# |---|---|---|
# | run one program, and reach each other all the time | `share_rows` and a batch fit | sums, in each step |
# | come and go, belong to others, or share only files | `partitioned` | a change, in each round |
#
# The first has the numbers of one machine to rounding, with any guide; a process that is lost takes the fit with
# it. The second waits for nobody, and takes changes that are late or come twice; its posteriors are Gaussian. In
# both fits of this page no row left its machine, but sums and changes say something about rows: privacy needs
# more.
#
# How to go on: [fit rows of many processes][batch], on clusters too; [keep a stream over several
# processes][streams] where rows arrive one after another; and [streams on many machines][machines] for rounds by
# files, Ray, Dask or SLURM.
#
# [batch]: https://github.com/numpyro-tempered/numpyro_tempered/blob/main/docs/howto/many_processes.md
# [streams]: https://github.com/numpyro-tempered/numpyro_tempered/blob/main/docs/howto/keep_streams_over_processes.md
# [machines]: https://github.com/numpyro-tempered/numpyro_tempered/blob/main/docs/howto/streams_on_many_machines.md
#
# ## Device, time and throughput

# %%
print(f"device      {jax.devices()[0].device_kind} ({jax.default_backend()})")
packages = ["jax", "numpyro", "arviz", "numpyro_tempered"]
print("versions   ", ", ".join(f"{name} {version(name)}" for name in packages))
print(
    f"one         a fit of {len(x)} rows in {seconds_of_one:.1f} s, compilation included"
)
print(
    f"two         the same in {seconds_of_two:.1f} s, with the start of two Python processes"
)
refits, seconds_of_rounds = 8 * (len(distances) - 1), clock[-1] - clock[1]
print(
    f"rounds      the first in {clock[1] - clock[0]:.1f} s, compilation included;",
    f"then {refits} refits in {seconds_of_rounds:.2f} s: {refits / seconds_of_rounds:,.0f} refits/s",
)
