"""States on disk."""

import json
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import tiered
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_tempered as nt
from numpyro_tempered.gaussian.families import FullRank, LowRank, MeanField
from numpyro_tempered.handlers.likelihood import Layout
from numpyro_tempered.infer.online_state import OnlineVIState
from numpyro_tempered.online.streams import save as state_io

PRIORS = {
    "mean field": MeanField(np.zeros(3), np.ones(3)),
    "full rank": FullRank(np.zeros(3), np.eye(3)),
    "low rank": LowRank(np.zeros(3), np.ones(3), np.zeros((3, 2))),
}
RULES = {
    "oga": nt.online.oga(0.3),
    "oga_el": nt.online.oga_el(0.3),
    "sva": nt.online.sva(0.3),
    "svb": nt.online.svb(0.3),
    "ngvi": nt.online.ngvi(0.3),
    "ewa": nt.online.ewa(0.3),
    "averaged": nt.online.with_average(nt.online.ngvi(0.3)),
    "standardised": nt.online.standardise(nt.online.ngvi(0.3), intercept=0),
}
ABLE = {
    "mean field": set(RULES) - {"ewa"},
    "full rank": set(RULES),
    "low rank": {"ngvi", "averaged", "standardised"},
}
CASES = [(rule, prior) for prior, rules in ABLE.items() for rule in sorted(rules)]
# Each rule and each family once.
DIAGONAL = [
    *((rule, "mean field") for rule in ("oga", "oga_el", "sva", "standardised")),
    *((rule, "full rank") for rule in ("svb", "ewa", "averaged")),
    ("ngvi", "low rank"),
]


def assert_same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def scrambled(state, seed=0):
    """A state with bits as a long run would leave them."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * 50, leaf.dtype), state
    )


@pytest.mark.parametrize(("rule", "prior"), tiered(CASES, unit=DIAGONAL))
def test_states_of_every_rule_and_family_come_back_bit_for_bit(rule, prior, tmp_path):
    start = RULES[rule].init(PRIORS[prior])
    state = scrambled(start)
    nt.online.save(tmp_path / "state", state)
    assert_same(nt.online.restore(tmp_path / "state", like=start), state)
    assert os.listdir(tmp_path) == ["state"]
    many = jax.tree.map(
        lambda leaf: np.stack([leaf, np.asarray(leaf) + np.ones((), leaf.dtype)]), state
    )
    nt.online.save(tmp_path / "state", many)
    shapes = jax.eval_shape(lambda: many)
    assert_same(nt.online.restore(tmp_path / "state", like=shapes), many)
    with pytest.raises(
        ValueError, match=r"holds \w+\[2,?.*at .*, expected.*it was saved with"
    ):
        nt.online.restore(tmp_path / "state", like=start)


def test_a_run_goes_on_with_the_same_numbers(tmp_path):
    rule, loss = RULES["ngvi"], nt.expectations.squared()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(9, 3)), rng.normal(size=9)
    start = rule.init(PRIORS["mean field"])
    whole, _ = nt.online.run(rule, loss, start, x, y)
    half, _ = nt.online.run(rule, loss, start, x[:4], y[:4])
    nt.online.save(tmp_path / "state", half)
    again, _ = nt.online.run(
        rule, loss, nt.online.restore(tmp_path / "state", like=start), x[4:], y[4:]
    )
    assert_same(again, whole)


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16, bool])
def test_values_that_are_hard_to_print_keep_their_bits(x64, dtype, tmp_path):
    hard = np.array([np.nan, -0.0, np.inf, 1e-310, 0.1, 3.0]).astype(dtype)
    state = tuple(jnp.asarray(values) for values in (hard, hard[:0], hard[0]))
    like = tuple(jnp.asarray(np.ones_like(values)) for values in state)
    nt.online.save(tmp_path / "state", state)
    assert_same(nt.online.restore(tmp_path / "state", like=like), state)


@pytest.mark.parametrize(
    "implementation", tiered(["threefry2x32", "rbg"], unit=["rbg"])
)
def test_typed_keys_are_arrays_too(implementation, tmp_path):
    words = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}

    def make_keys(first, implementation):
        data = np.arange(
            first, first + 2 * words[implementation], dtype=np.uint32
        ).reshape(2, -1)
        return jax.random.wrap_key_data(data, impl=implementation)

    keys, like = make_keys(3, implementation), make_keys(0, implementation)
    nt.online.save(tmp_path / "state", keys)
    restored = nt.online.restore(tmp_path / "state", like=like)
    assert_same(restored, keys)
    assert_same(
        nt.online.restore(tmp_path / "state", like=jax.eval_shape(lambda: like)), keys
    )
    assert jax.random.key_impl(restored) == implementation
    other = make_keys(0, "unsafe_rbg")
    with pytest.raises(
        ValueError, match=r"holds key<.*, expected key<urbg>.*it was saved with"
    ):
        nt.online.restore(tmp_path / "state", like=other)


def make_online(site):
    def model(y):
        numpyro.sample(
            "y", dist.Normal(numpyro.sample(site, dist.Normal(0.0, 1.0)), 1.0), obs=y
        )

    return nt.OnlineVI(model, nt.guides.AutoOnlineDiagonalNormal, nt.online.oga(0.3))


def check_sites(theta, phi, folder):
    nt.online.save(folder / "state", theta)
    assert_same(nt.online.restore(folder / "state", like=theta), theta)
    assert nt.online.restore(folder / "state", like=theta).layout == theta.layout
    with pytest.raises(
        ValueError,
        match=r"another structure than like: .*'theta'.*, expected .*'phi'.*and model",
    ):
        nt.online.restore(folder / "state", like=phi)


def test_the_state_of_a_model_knows_its_sites(key, tmp_path):
    state = RULES["sva"].init(PRIORS["mean field"])
    theta, phi = (
        OnlineVIState(state, key, Layout(((site, (3,)),))) for site in ("theta", "phi")
    )
    check_sites(theta, phi, tmp_path)


@pytest.mark.full
def test_the_state_of_a_run_of_a_model_knows_its_sites(key, tmp_path):
    check_sites(
        *(make_online(site).init(key, np.ones(1)) for site in ("theta", "phi")),
        tmp_path,
    )


# Files that are not what they should be


def saved(folder, state=None):
    state = RULES["sva"].init(PRIORS["mean field"]) if state is None else state
    nt.online.save(folder / "state", state)
    return state, (folder / "state").read_bytes()


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (
            RULES["ngvi"].init(PRIORS["mean field"]),
            r"part 2 of OnlineState is MeanField .*, expected Memory",
        ),
        (
            RULES["sva"].init(PRIORS["full rank"]),
            r"part 0 of OnlineState is MeanField .*, expected FullRank",
        ),
        (
            RULES["averaged"].init(PRIORS["mean field"]),
            r"part 2 of OnlineState is MeanField .*, expected RunningAverage.*rule, family and model",
        ),
        (
            RULES["sva"].init(MeanField(jnp.zeros(4), jnp.ones(4))),
            r"float\d+\[3\] at .posterior.loc, expected .*\[4\].*it was saved with",
        ),
        (
            {"state": RULES["sva"].init(PRIORS["mean field"])},
            "the whole state is OnlineState .*, expected dict",
        ),
    ],
    ids=["rule", "family", "wrapped", "dimension", "dictionary"],
)
def test_a_state_of_another_structure_is_refused(like, message, tmp_path):
    saved(tmp_path)
    with pytest.raises(ValueError, match=message):
        nt.online.restore(tmp_path / "state", like=like)


def test_a_state_of_another_precision_is_refused(x64, tmp_path):
    double = RULES["sva"].init(MeanField(jnp.zeros(3), jnp.ones(3)))
    single = RULES["sva"].init(
        MeanField(jnp.zeros(3, jnp.float32), jnp.ones(3, jnp.float32))
    )
    saved(tmp_path, double)
    with pytest.raises(
        ValueError,
        match=r"float64\[3\] at .posterior.loc, expected float32\[3\].*was saved with",
    ):
        nt.online.restore(tmp_path / "state", like=single)


def test_other_versions_and_formats_are_refused(tmp_path, monkeypatch):
    state, _ = saved(tmp_path)
    for name, value in (("VERSION", 3), ("FORMAT", "something else")):
        with monkeypatch.context() as patch:
            patch.setattr(state_io, name, value)
            saved(tmp_path)
        with pytest.raises(ValueError, match=r"expected 'numpyro_tempered state' of 2"):
            nt.online.restore(tmp_path / "state", like=state)


# What version 1 of the format says of a state.
SUM = ["CompensatedSum", "('value', 'error')", "*", "*"]
GAUSSIAN = ["MeanField", "('loc', 'scale')", "*", "*"]
LOSSES = ["CumulativeLosses", "('at_mean', 'expected')", SUM, SUM]
STATE = [
    "OnlineState",
    "('posterior', 'prior', 'memory', 'count', 'rejected', 'cumulative', 'floored')",
]
NGVI_STATE = [
    *STATE,
    GAUSSIAN,
    GAUSSIAN,
    ["Memory", "('loc', 'precision')", SUM, SUM],
    "*",
    "*",
    LOSSES,
    "*",
]
OGA_STATE = [*STATE, GAUSSIAN, GAUSSIAN, ["tuple", "None"], "*", "*", LOSSES, "*"]
FORMER = {
    "an aggregate": (
        nt.online.aggregate(nt.online.grid(nt.online.oga, step_size=[0.1])),
        [
            "Mixture",
            "('members', 'weights', 'losses', 'potential', 'gap', 'rate', 'share', 'alive')",
            ["tuple", "None", OGA_STATE],
            *("*", SUM, SUM, SUM, "*", "*", "*"),
        ],
        "Experts",
    ),
    "standardised": (
        nt.online.standardise(nt.online.oga(0.1)),
        [
            "Standardised",
            "('memory', 'moments', 'intercept')",
            ["tuple", "None"],
            ["Moments", "('count', 'mean', 'squares')", "*", SUM, SUM],
            ["NoneType", "None"],
        ],
        "Standardisation",
    ),
    "averaged": (
        nt.online.with_average(nt.online.oga(0.1)),
        ["Averaged", "('memory', 'total', 'count')", ["tuple", "None"], SUM, "*"],
        "RunningAverage",
    ),
}


def write_version_1(path, structure, leaves):
    kinds = [[str(leaf.dtype), list(leaf.shape)] for leaf in leaves]
    header = {
        "format": "numpyro_tempered state",
        "version": 1,
        "structure": structure,
        "leaves": kinds,
    }
    arrays = {f"leaf{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    with open(path, "wb") as file:
        np.savez(
            file, **arrays, header=np.frombuffer(json.dumps(header).encode(), np.uint8)
        )


def without_moves(state):
    return state._replace(
        jumps=jnp.zeros((), jnp.int32), max_move=jnp.zeros((), state.max_move.dtype)
    )


def test_a_file_of_version_1_comes_back(tmp_path):
    state = scrambled(RULES["ngvi"].init(PRIORS["mean field"]))
    write_version_1(tmp_path / "state", NGVI_STATE, jax.tree.leaves(state)[:-2])
    expected = without_moves(state)
    for like in (state, jax.eval_shape(lambda: state)):
        assert_same(nt.online.restore(tmp_path / "state", like=like), expected)
    # The leaves are written as they were.
    nt.online.save(tmp_path / "saved", state)
    with np.load(tmp_path / "state") as former, np.load(tmp_path / "saved") as saved:
        assert set(saved) - set(former) == {
            f"leaf{len(former) - 1 + k}" for k in range(2)
        }
        for name in set(former) - {"header"}:
            assert former[name].tobytes() == saved[name].tobytes()
    other = RULES["oga"].init(PRIORS["mean field"])
    with pytest.raises(
        ValueError, match=r"another structure than like.*rule, family and model"
    ):
        nt.online.restore(tmp_path / "state", like=other)


def test_experts_of_version_1_come_back(tmp_path):
    state = scrambled(
        nt.online.aggregate(nt.online.grid(nt.online.oga, step_size=[0.1, 0.2])).init(
            PRIORS["mean field"]
        )
    )
    paths = [
        jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]
    ]
    new = [path.endswith((".jumps", ".max_move")) for path in paths]
    assert sum(new) == 4
    leaves = [
        leaf
        for leaf, is_new in zip(jax.tree.leaves(state), new, strict=True)
        if not is_new
    ]
    write_version_1(
        tmp_path / "state",
        state_io.describe(jax.tree.structure(state_io.former(state))),
        leaves,
    )
    expected = jax.tree.unflatten(
        jax.tree.structure(state),
        [
            jnp.zeros_like(leaf) if is_new else leaf
            for leaf, is_new in zip(jax.tree.leaves(state), new, strict=True)
        ],
    )
    assert_same(nt.online.restore(tmp_path / "state", like=state), expected)


@pytest.mark.parametrize("name", FORMER)
def test_a_memory_of_a_former_name_is_refused(name, tmp_path):
    rule, memory, present = FORMER[name]
    state = rule.init(PRIORS["mean field"])
    structure = [*STATE, GAUSSIAN, GAUSSIAN, memory, "*", "*", LOSSES, "*"]
    write_version_1(
        tmp_path / "state", structure, jax.tree.leaves(state_io.former(state))
    )
    with pytest.raises(
        ValueError,
        match=rf"part 2 of OnlineState is {memory[0]} .*, expected {present} ",
    ):
        nt.online.restore(tmp_path / "state", like=state)


def test_foreign_files_are_refused(tmp_path):
    state, _ = saved(tmp_path)
    np.savez(tmp_path / "arrays.npz", a=np.ones(3))
    np.save(tmp_path / "array.npy", np.ones(3))
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "text").write_text("not a state")
    (tmp_path / "empty").write_bytes(b"")
    for name in ("arrays.npz", "array.npy", "object.npy", "text", "empty"):
        with pytest.raises(
            ValueError, match="is truncated, or not a state that save wrote"
        ):
            nt.online.restore(tmp_path / name, like=state)
    with pytest.raises(FileNotFoundError):
        nt.online.restore(tmp_path / "nothing", like=state)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damage_is_an_error_or_leaves_the_state_as_it_was(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damage")
    state, whole = saved(folder, scrambled(RULES["sva"].init(PRIORS["mean field"])))
    kept = data.draw(st.integers(0, len(whole) - 1))
    (folder / "state").write_bytes(whole[:kept])
    with pytest.raises(ValueError, match="is truncated"):
        nt.online.restore(folder / "state", like=state)
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(whole)
    damaged[at] ^= 1 << bit
    (folder / "state").write_bytes(damaged)
    try:
        restored = nt.online.restore(folder / "state", like=state)
    except ValueError:
        return
    # The archive holds times and the like, besides the numbers.
    assert_same(restored, state)


@pytest.mark.parametrize(
    "where",
    ["numpyro_tempered.online.streams.files.os.fsync", "os.replace", "numpy.savez"],
)
def test_the_old_file_survives_a_save_that_fails(where, tmp_path, monkeypatch):
    state, whole = saved(tmp_path)

    def fail(*args, **kwargs):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(where, fail)
        with pytest.raises(OSError, match="no space left"):
            nt.online.save(tmp_path / "state", scrambled(state))
    assert (tmp_path / "state").read_bytes() == whole
    assert os.listdir(tmp_path) == ["state"]


def test_what_cannot_be_saved_is_said(tmp_path):
    with pytest.raises(TypeError, match="a state is made of arrays, got str"):
        nt.online.save(tmp_path / "state", {"name": "sva"})
    with pytest.raises(
        TypeError,
        match=r"^save writes values,.*this state is traced.*jit, vmap and grad",
    ):
        jax.jit(lambda x: nt.online.save(tmp_path / "state", x))(jnp.ones(2))
    assert os.listdir(tmp_path) == []


# A process that dies

STREAM = """
import os, sys
import jax.numpy as jnp, numpy as np
import numpyro_tempered as nt
from numpyro_tempered.online.drivers import iterate_chunks
from numpyro_tempered.online.streams.save import restore, save

rule, loss = nt.online.ngvi(0.5), nt.expectations.squared()

def final(path, num_rows):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(num_rows, 3)), rng.normal(size=num_rows)
    y[::7] = np.nan
    state = rule.init(nt.gaussian.families.MeanField(jnp.zeros(3), jnp.ones(3)))
    if os.path.exists(path):
        state = restore(path, like=state)
    skip = int(state.count + state.rejected)
    for state, _ in iterate_chunks(rule, loss, state, [(x, y)], size=8, skip=skip):
        save(path, state)
        print(int(state.count), flush=True)
    return state
"""


def killed_and_resumed(num_kills, num_rows, folder, seed):
    path, rng = folder / "state", np.random.default_rng(seed)
    command = [
        sys.executable,
        "-c",
        f"{STREAM}\nfinal(sys.argv[1], {num_rows})",
        str(path),
    ]
    for _ in range(num_kills):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            for _ in range(rng.integers(1, 40)):
                assert process.stdout.readline()
            # Anywhere in the next saves.
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0.0, 0.01))
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
    namespace: dict = {}
    exec(STREAM, namespace)
    resumed = namespace["final"](path, num_rows)
    missing = len(range(0, num_rows, 7))
    assert (int(resumed.count), int(resumed.rejected)) == (num_rows - missing, missing)
    assert_same(resumed, namespace["final"](folder / "uninterrupted", num_rows))


def test_an_interrupted_stream_resumes_with_identical_numbers(tmp_path):
    def stop(count, **options):
        if count > 20:
            raise KeyboardInterrupt

    namespace = {"print": stop}
    exec(STREAM, namespace)
    with pytest.raises(KeyboardInterrupt):
        namespace["final"](tmp_path / "state", 90)
    namespace["print"] = lambda *args, **options: None
    resumed = namespace["final"](tmp_path / "state", 90)
    assert (int(resumed.count), int(resumed.rejected)) == (77, 13)
    assert_same(resumed, namespace["final"](tmp_path / "uninterrupted", 90))


@pytest.mark.full
def test_a_killed_process_resumes_with_identical_numbers(tmp_path):
    killed_and_resumed(1, 900, tmp_path, seed=0)


@pytest.mark.slow
def test_a_process_killed_many_times_resumes_with_identical_numbers(tmp_path):
    killed_and_resumed(10, 4500, tmp_path, seed=1)
