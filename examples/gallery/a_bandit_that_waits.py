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
# # Right or wrong, told later: a bandit that reads digits
#
# [![Open in Colab][badge]][colab]
#
# [badge]: https://colab.research.google.com/assets/colab-badge.svg
# [colab]: https://colab.research.google.com/github/numpyro-tempered/numpyro_tempered/blob/main/examples/gallery/a_bandit_that_waits.ipynb
#
# Someone is shown handwritten digits and guesses each. Nobody says which digit it was: only whether the guess
# was right, some fifty digits later, and one answer in five is lost. **How many wrong guesses does it take to
# learn to read?** A guess that looks best now teaches little; one about which the posterior is unsure teaches
# more, and is wrong more often. Thompson sampling settles this by guessing from a draw of the posterior, LinUCB
# by an upper bound. Both need a posterior after each answer, which is what an online rule is for.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("numpyro_tempered") is None:
    package = "numpyro_tempered[examples] @ git+https://github.com/numpyro-tempered/numpyro_tempered"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", package], check=True)

# %%
import time
from importlib.metadata import version

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import numpyro_tempered as nt

plt.style.use("numpyro_tempered.plots.house")
BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
on_cpu = jax.default_backend() == "cpu"

# %% [markdown]
# ## A data set as a bandit
#
# The digits of scikit-learn, 1797 pictures of 8 × 8 pixels, each shown three times in random order. A round is
# a picture, an action is one of ten guesses, and its reward is 1 if it is right. As the labels are known, so is
# the regret: the number of wrong guesses. Every repetition has its own order, its own delays, which are
# geometric with mean 50, and its own lost answers.

# %%
digits = load_digits()
pixels = np.column_stack([np.ones(len(digits.data)), digits.data / 16.0]).astype(
    np.float32
)
num_actions, d = 10, pixels.shape[1]
num_rounds, num_repeats = 3 * len(pixels), 6 if on_cpu else 64
MEAN_DELAY, LOST, MOST = (
    50,
    0.2,
    6,
)  # at most six answers come in a round; the others come in the next ones


def schedule(seed):
    """Which picture is shown in each round, and which rounds' answers come in it: numbers, and -1 for none."""
    rng = np.random.default_rng(seed)
    shown = np.concatenate([rng.permutation(len(pixels)) for _ in range(3)])
    due = np.arange(num_rounds) + rng.geometric(1 / MEAN_DELAY, num_rounds)
    coming = np.full((num_rounds, MOST), -1)
    waiting = []
    order = iter(
        sorted(
            (when, n)
            for n, when in enumerate(due)
            if rng.random() > LOST and when < num_rounds
        )
    )
    following = next(order)
    for t in range(num_rounds):
        while following and following[0] <= t:
            waiting.append(following[1])
            following = next(order, None)
        now, waiting = waiting[:MOST], waiting[MOST:]
        coming[t, : len(now)] = now
    return shown, coming


shown, coming = map(np.stack, zip(*map(schedule, range(num_repeats)), strict=True))
share = np.mean(np.sum(coming >= 0, (1, 2)) / num_rounds)
print(
    f"{num_rounds:,} rounds, {num_repeats} repetitions; {share:.0%} of the answers come"
)

# %% [markdown]
# ## Ten posteriors
#
# Each action has a model of its reward given the picture, with a full covariance over 65 weights: a logistic
# regression by the rule `rvga` for Thompson sampling, and for LinUCB a linear one, which in this rule is exact.
# While an answer is out, `nt.online.pending` holds the picture and the guess; `recall` finds them when it comes.

# %%
logistic = nt.expectations.logistic(num_nodes=10)
linear = nt.expectations.squared(noise_scale=1.0)


def thompson(rng_key, states, x):
    """The reward of each action at a draw of its weights."""
    keys = jax.random.split(rng_key, num_actions)
    return jax.vmap(
        lambda key, state: nt.online.sample_predictor(key, logistic, state, x)
    )(keys, states)


def upper_bound(rng_key, states, x):
    """LinUCB: the mean reward and one standard deviation."""
    prediction = jax.vmap(lambda state: nt.online.predict(linear, state, x))(states)
    return prediction.mean + jnp.sqrt(prediction.variance)


def greedy(rng_key, states, x):
    """The mean reward; ties, as at the start, by chance."""
    mean = jax.vmap(lambda state: nt.online.predict(logistic, state, x).mean)(states)
    return mean + 1e-6 * jax.random.normal(rng_key, mean.shape)


def play(score, rule, expectation, low, scale, rng_key, shown, coming):
    """Rounds of a policy; whether each guess was right. Rewards are 1 and ``low``, the prior is N(0, scale²)."""
    prior = nt.gaussian.families.FullRank(jnp.zeros(d), scale * jnp.eye(d))
    x_of, label_of = jnp.asarray(pixels)[shown], jnp.asarray(digits.target)[shown]
    states = jax.vmap(lambda _: rule.init(prior))(jnp.arange(num_actions))
    store = nt.online.pending(2000, jnp.zeros(d), jnp.int32(0))

    def learn(states, answer):
        x, action, number, has_come = answer
        reward = jnp.where(action == label_of[number], 1.0, low)
        one = jax.tree.map(lambda leaf: leaf[action], states)
        one, _ = nt.online.update(rule, expectation, one, x, reward, mask=has_come)
        return jax.tree.map(
            lambda leaf, new: leaf.at[action].set(new), states, one
        ), None

    def round_(carry, inputs):
        states, store = carry
        number, key, numbers = inputs
        x = x_of[number]
        action = jnp.argmax(score(key, states, x)).astype(jnp.int32)
        store = nt.online.remember(store, number[None], x[None], action[None])
        (xs, actions), has_come, store = nt.online.recall(store, numbers)
        states, _ = jax.lax.scan(learn, states, (xs, actions, numbers, has_come))
        return (states, store), action == label_of[number]

    inputs = jnp.arange(num_rounds), jax.random.split(rng_key, num_rounds), coming
    (states, store), right = jax.lax.scan(round_, (states, store), inputs)
    return right, states


policies = {
    "Thompson sampling": (thompson, nt.online.rvga(), logistic, -1.0, 1.0),
    "LinUCB": (upper_bound, nt.online.ngvi(), linear, 0.0, 1.0),
    "greedy": (greedy, nt.online.rvga(), logistic, -1.0, 1.0),
}


def play_all(name, coming):
    """All repetitions of a policy side by side, ``(repeats, rounds)``; seconds to compile, and to run."""
    keys = jax.random.split(jax.random.key(0), num_repeats)
    run = jax.jit(jax.vmap(lambda *inputs: play(*policies[name], *inputs)))
    began = time.perf_counter()
    program = run.lower(keys, shown, coming).compile()
    compiled = time.perf_counter()
    right, states = jax.block_until_ready(program(keys, shown, coming))
    return np.asarray(right), states, (compiled - began, time.perf_counter() - compiled)


results = {name: play_all(name, coming) for name in policies}

# %% [markdown]
# LinUCB is often written with a matrix A = I + Σ x xᵀ and a vector b = Σ r x for each action. The first
# repetition in that form, in NumPy and double precision, must guess the same.


# %%
def lin_ucb(shown, coming, num_rounds):
    """Guesses by the textbook."""
    A, b = np.stack([np.eye(d)] * num_actions), np.zeros((num_actions, d))
    guesses = np.empty(num_rounds, int)
    for t in range(num_rounds):
        x = pixels[shown[t]].astype(float)
        inverse = np.linalg.inv(A)
        guesses[t] = np.argmax(
            np.einsum("ai,aij,j->a", b, inverse, x)
            + np.sqrt(np.einsum("i,aij,j->a", x, inverse, x))
        )
        for n in coming[t][coming[t] >= 0]:
            past, action = pixels[shown[n]].astype(float), guesses[n]
            A[action] += np.outer(past, past)
            b[action] += (action == digits.target[shown[n]]) * past
    return guesses


guesses = lin_ucb(shown[0], coming[0], 1500)
same = (guesses == digits.target[shown[0][:1500]]) == results["LinUCB"][0][0][:1500]
print(
    f"{same.mean():.1%} of the first 1,500 guesses of LinUCB are right or wrong as the textbook's are"
)

# %% [markdown]
# ## How many wrong guesses?

# %%
for name, (right, _, _) in results.items():
    regret = np.sum(~right, axis=1)
    se = np.std(regret, ddof=1) / np.sqrt(num_repeats)
    late = right[:, -1000:].mean()
    print(
        f"{name:18s} {regret.mean():6.0f} ± {se:3.0f} wrong; of the last thousand {1 - late:.1%}"
    )

# %% [markdown]
# And what does waiting cost? The same policy with answers that come at once, none of them lost:

# %%
at_once = np.full_like(coming, -1)
at_once[:, :, 0] = np.arange(num_rounds)
prompt, _, _ = play_all("Thompson sampling", at_once)
print(f"Thompson sampling, answers at once: {np.sum(~prompt, axis=1).mean():.0f} wrong")

# %% tags=["thumbnail"]
fig, (left, right_axes) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
rounds = np.arange(1, num_rounds + 1)
curves = {name: result[0] for name, result in results.items()} | {
    "Thompson, told at once": prompt
}
for (name, right), colour in zip(
    curves.items(), (BLUE, ORANGE, GREY, BLUE), strict=True
):
    wrong = np.cumsum(~right, axis=1)
    style = "--" if name.endswith("at once") else "-"
    left.plot(rounds, wrong.mean(0), style, color=colour, label=name)
    left.fill_between(
        rounds, wrong.min(0), wrong.max(0), color=colour, alpha=0.15, linewidth=0
    )
    window = np.ones(300) / 300
    rate = np.mean([np.convolve(~one, window, mode="valid") for one in right], axis=0)
    right_axes.semilogy(rounds[299:], rate, style, color=colour)
left.set(
    xlabel="digits shown", ylabel="wrong guesses so far", title="Regret, mean and range"
)
right_axes.set(
    xlabel="digits shown",
    ylabel="share wrong, last 300",
    title="The rate of wrong guesses",
)
_ = left.legend(fontsize=9)

# %% [markdown]
# *The greedy policy, grey, stays with guesses that once worked: what it does not try it does not learn.* The two
# others explore, pay for it in the first thousand digits, and end at one wrong guess in twenty. LinUCB, with a
# prior and a bound that happen to suit these data, is ahead of Thompson sampling, whose draws of 65 weights are
# wild as long as the posterior is wide. *Waiting, the difference between the blue lines, costs some two hundred
# guesses, nearly all of them at the start.*
#
# ## One decision at a time
#
# In a service decisions come one by one. `nt.online.Service` holds one posterior on the device, and draws the
# predictor in microseconds:

# %%
first = jax.tree.map(lambda leaf: leaf[0, 3], results["Thompson sampling"][1])
service = nt.online.Service(
    nt.online.rvga(), logistic, first, pixels[0], 1.0, rng_key=jax.random.key(1)
)
three, eight = (pixels[np.argmax(digits.target == digit)] for digit in (3, 8))
for name, x in (("a three", three), ("an eight", eight)):
    mean, variance = service.predict(x)
    probability = service.class_probabilities(x)[1]
    print(
        f"is {name} a 3? probability {probability:.3f}, log odds {mean:.1f} ± {variance**0.5:.1f}"
    )
service.learn(three, 1.0)
began = time.perf_counter()
for _ in range(1000):
    service.draw(three)
seconds_of_draws = time.perf_counter() - began

# %% [markdown]
# ## Device, time and throughput

# %%
print(f"device      {jax.devices()[0].device_kind} ({jax.default_backend()})")
packages = ["jax", "numpyro", "arviz", "numpyro_tempered"]
print("versions   ", ", ".join(f"{name} {version(name)}" for name in packages))
for name, (_, _, (compile_seconds, seconds)) in results.items():
    total = num_repeats * num_rounds
    print(
        f"{name:18s} compiled in {compile_seconds:.1f} s, {total:,} decisions in {seconds:.1f} s:",
        f"{total / seconds:,.0f} decisions/s",
    )
print(
    f"service            a thousand draws in {seconds_of_draws:.3f} s: {1000 / seconds_of_draws:,.0f} draws/s"
)
