"""Rounds on disk: bit for bit those of the OnlineVI, in a process without the model, and refused elsewhere."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from conftest import enable_x64, tiered

import numpyro_tempered as nt
from numpyro_tempered.online.streams.files import read_file, write_file
from numpyro_tempered.online.streams.structures import decode, encode

pytest.importorskip("flatbuffers")

KEY = jax.random.key(5)
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(6, 4, 3)), RNG.normal(size=(6, 4))
ETA = nt.expectations.gauss_hermite(predictor="eta")
ONLINE = nt.online


def linear(x, y, scale=1.0, link="identity", **more):
    b = numpyro.sample("b", dist.Normal(0.0, scale).expand([3]).to_event(1))
    shift = numpyro.sample("shift", dist.Normal(0.0, 1.0))
    eta = x @ b + shift + more.get("offset", {"by": 0.0})["by"]
    eta = numpyro.deterministic("eta", 2.0 * eta if link == "double" else eta)
    with numpyro.plate("n", len(y)):
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


def make(guide="AutoOnlineDiagonalNormal", rule=None, expectation=ETA, model=linear):
    return nt.OnlineVI(model, getattr(nt.guides, guide), rule, expectation)


def assert_same(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(
            *(map(jax.random.key_data, (a, b)) if is_key else (a, b)), strict=True
        )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An OnlineVI, its state, and the file of its rounds."""
    return export(make(), tmp_path_factory.mktemp("export"))


def export(online, folder):
    state, path = online.init(KEY, X[0], Y[0]), folder / "update.npz"
    nt.online.export_update(path, online, state, X[0], Y[0], num_samples=7)
    return online, state, path


CASES = {
    "quadrature": make,
    "draws": lambda: make("AutoOnlineMultivariateNormal", expectation=None),
    "low rank": lambda: make(
        "AutoOnlineLowRankNormal", ONLINE.ngvi(curvature="fisher")
    ),
    "tempered": lambda: make(rule=ONLINE.svb(0.1), model=nt.temper(linear, alpha=0.5)),
    "robust": lambda: make(rule=ONLINE.robust(ONLINE.ngvi(), 2.0)),
    "clipped": lambda: make(rule=ONLINE.clip(ONLINE.sva(0.1))),
    "aggregate": lambda: make(
        rule=ONLINE.aggregate(ONLINE.grid(ONLINE.sva, step_size=[0.1, 0.2]))
    ),
    "point": lambda: make(rule=ONLINE.oga(0.1)),
}


@pytest.mark.parametrize("name", tiered(CASES, unit=["quadrature"]))
def test_rounds_are_those_of_the_online_vi_to_the_last_bit(name, exported, tmp_path):
    online, start, path = (
        exported if name == "quadrature" else export(CASES[name](), tmp_path)
    )
    loaded = nt.online.load_update(path)
    assert_same(loaded.state, start)
    state = other = start
    for x, y in zip(X, Y, strict=True):
        state, losses = online.update(state, x, y)
        other, others = loaded.update(other, x, y)
        assert_same((state, losses), (other, others))
    assert int(other.count) > 0
    assert not np.array_equal(other.posterior.loc, start.posterior.loc)
    draws = loaded.sample_posterior(KEY, other)
    assert {site: value.shape for site, value in draws.items()} == {
        "b": (7, 3),
        "shift": (7,),
    }
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        draws,
        online.sample_posterior(KEY, state, 7),
    )


@pytest.mark.full
def test_batches_of_smaller_sizes_are_masked(tmp_path):
    online, path = make(), tmp_path / "update.npz"
    start = online.init(KEY, X[0], Y[0])
    nt.online.export_update(path, online, start, X[0], Y[0], mask=np.ones(4, bool))
    loaded = nt.online.load_update(path)
    (x, y), mask = nt.online.pad_batch(X[0, :3], Y[0, :3], size=4)
    assert_same(
        loaded.update_masked(start, mask, x, y), online.update_masked(start, mask, x, y)
    )
    with pytest.raises(
        ValueError, match="was exported with a mask: call update_masked"
    ):
        loaded.update(start, X[0], Y[0])
    with pytest.raises(
        ValueError, match=r"mask is bool\[3\], this update was exported for bool\[4\]"
    ):
        loaded.update_masked(start, mask[:3], X[0], Y[0])


@pytest.mark.full
def test_numbers_strings_and_nested_arguments_are_as_at_the_export(tmp_path):
    online, path = make(), tmp_path / "update.npz"
    more = {"link": "double", "offset": {"by": np.ones(4)}}
    start = online.init(KEY, X[0], Y[0], 3.0, **more)
    nt.online.export_update(path, online, start, X[0], Y[0], 3.0, **more)
    loaded = nt.online.load_update(path)
    other = {"link": "double", "offset": {"by": np.full(4, 0.1)}}
    assert_same(
        loaded.update(start, X[1], Y[1], 2.0, **other),
        online.update(start, X[1], Y[1], 2.0, **other),
    )
    with pytest.raises(
        ValueError,
        match="argument 3 is 'identity', this update was exported for 'double'",
    ):
        loaded.update(start, X[0], Y[0], 3.0, **more | {"link": "identity"})
    with pytest.raises(
        ValueError,
        match="argument 3 is an array, this update was exported for 'double'",
    ):
        loaded.update(start, X[0], Y[0], 3.0, **more | {"link": 1.0})
    with pytest.raises(ValueError, match="the arguments are nested as"):
        loaded.update(start, X[0], Y[0], scale=3.0, **more)


PROGRAM = """
import sys
import numpy as np
import numpyro_tempered as nt

loaded = nt.online.load_update(sys.argv[1])
state = nt.online.restore(sys.argv[2], like=loaded.state)
data = np.load(sys.argv[3])
for x, y in zip(data["x"], data["y"]):
    state, losses = loaded.update(state, x, y)
nt.online.save(sys.argv[4], {"state": state, "losses": losses})
assert not {"test_export", "conftest"} & set(sys.modules)
"""


@pytest.mark.full
def test_a_process_without_the_model_goes_on_to_the_last_bit(exported, tmp_path):
    online, state, path = exported
    state, _ = online.update(state, X[0], Y[0])
    nt.online.save(tmp_path / "state.npz", state)
    np.savez(tmp_path / "data.npz", x=X[1:], y=Y[1:])
    files = [
        path,
        *(tmp_path / name for name in ("state.npz", "data.npz", "after.npz")),
    ]
    # In an empty folder, from which nothing of these tests can be imported.
    subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, files)], check=True, cwd=tmp_path
    )
    for x, y in zip(X[1:], Y[1:], strict=True):
        state, losses = online.update(state, x, y)
    expected = {"state": state, "losses": losses}
    assert_same(nt.online.restore(files[-1], like=expected), expected)


def test_other_shapes_dtypes_and_states_are_refused(exported):
    _, state, path = exported
    loaded = nt.online.load_update(path)
    with pytest.raises(
        ValueError,
        match=r"array 0 of the arguments is float\d+\[2,3\], .* for float\d+\[4,3\]",
    ):
        loaded.update(state, X[0, :2], Y[0, :2])
    with pytest.raises(
        ValueError,
        match=r"array 1 of the arguments is int\d+\[4\], .* for float\d+\[4\]",
    ):
        loaded.update(state, X[0], np.arange(4))
    with pytest.raises(
        ValueError,
        match=r"the state is float16\[4\], this update was exported for float\d+\[4\]",
    ):
        loaded.update(
            jax.tree.map(lambda a: a.astype(jnp.float16) if a.ndim else a, state),
            X[0],
            Y[0],
        )
    with pytest.raises(
        ValueError,
        match="not of the run that was exported: the whole state is OnlineState",
    ):
        loaded.update(state.rule_state, X[0], Y[0])
    with pytest.raises(
        ValueError,
        match=r"^the state.*not of the run that was exported.*tuple None, expected Layout",
    ):
        loaded.sample_posterior(KEY, state._replace(layout=()))
    with pytest.raises(
        ValueError, match=r"^this update.*was exported without a mask: call update"
    ):
        loaded.update_masked(state, np.ones(4, bool), X[0], Y[0])


def test_lists_and_pandas_are_data(exported):
    import pandas as pd

    _, state, path = exported
    loaded = nt.online.load_update(path)
    expected = loaded.update(state, X[0], Y[0])
    assert_same(loaded.update(state, pd.DataFrame(X[0]), pd.Series(Y[0])), expected)
    assert_same(loaded.update(state, X[0].tolist(), Y[0].tolist()), expected)


@pytest.mark.full
def test_several_platforms(exported, tmp_path):
    online, state, _ = exported
    both, other = tmp_path / "both.npz", tmp_path / "other.npz"
    here = jax.export.default_export_platform()
    there = "tpu" if here == "cuda" else "cuda"
    nt.online.export_update(both, online, state, X[0], Y[0], platforms=[here, there])
    assert_same(
        nt.online.load_update(both).update(state, X[0], Y[0]),
        online.update(state, X[0], Y[0]),
    )
    nt.online.export_update(other, online, state, X[0], Y[0], platforms=[there])
    with pytest.raises(
        ValueError,
        match=f"was exported for {there}, and JAX runs on {here} here: .*platforms=",
    ):
        nt.online.load_update(other)


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="exports in single precision")
def test_another_precision_is_refused(exported):
    with (
        enable_x64(),
        pytest.raises(
            ValueError,
            match="where JAX computes in float32, and here it computes in float64",
        ),
    ):
        nt.online.load_update(exported[2])


def test_changed_and_truncated_files_are_refused(exported, tmp_path):
    content, path = exported[2].read_bytes(), tmp_path / "changed.npz"
    for position in (200, len(content) // 3, len(content) // 2):
        changed = bytearray(content)
        changed[position] ^= 255
        for data in (changed, content[:position]):
            path.write_bytes(data)
            with pytest.raises(
                ValueError, match="truncated, or not an update that export_update wrote"
            ):
                nt.online.load_update(path)


def test_other_files_and_versions_are_refused(exported, tmp_path):
    _, state, path = exported
    nt.online.save(tmp_path / "state.npz", state)
    with pytest.raises(
        ValueError,
        match=r"holds 'numpyro_tempered state' of version 2, .* update' of 1",
    ):
        nt.online.load_update(tmp_path / "state.npz")
    header, arrays = read_file(path, "")
    del header["leaves"]
    for change, message in (
        ({"version": 9}, "of version 9"),
        (
            {"state": ["os:system", ["x"], []]},
            "names 'os:system', which is no record of numpyro_tempered",
        ),
        (
            {"state": ["numpyro_tempered.online:save", ["x"], []]},
            "online:save', which is no record",
        ),
        (
            {"state": ["numpyro_tempered.online.base:Losses", ["at"], ["*"]]},
            r"fields \['at'\], in this version",
        ),
    ):
        write_file(tmp_path / "other.npz", header | change, arrays)
        with pytest.raises(ValueError, match=message):
            nt.online.load_update(tmp_path / "other.npz")
    write_file(tmp_path / "other.npz", header, [arrays[0][:99], *arrays[1:]])
    with pytest.raises(
        ValueError,
        match=f"exported by jax {jax.__version__}, .* cannot read its programs",
    ):
        nt.online.load_update(tmp_path / "other.npz")


def test_what_cannot_be_exported_is_refused(exported, tmp_path, monkeypatch):
    online, state, _ = exported
    path = tmp_path / "update.npz"
    with pytest.raises(TypeError, match=r"takes an OnlineVI, got the function linear"):
        nt.online.export_update(path, linear, state, X[0], Y[0])
    with pytest.raises(TypeError, match=r"call it outside of jit.*vmap and grad"):
        jax.jit(lambda y: nt.online.export_update(path, online, state, X[0], y))(Y[0])
    with pytest.raises(
        TypeError,
        match=r"^an exported.*arrays, strings, booleans and integers, got \(?.*1j",
    ):
        nt.online.export_update(path, online, state, X[0], Y[0], link=1j)
    with pytest.raises(TypeError, match=r"mask must be boolean.*a datum, got dtype"):
        nt.online.export_update(path, online, state, X[0], Y[0], mask=np.ones(4))
    with pytest.raises(
        TypeError,
        match=r"types of numpyro_tempered can be written to a file, got .*\.Partial\.$",
    ):
        encode(jax.tree.structure(jax.tree_util.Partial(max, 1.0)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for call in (
        lambda: nt.online.export_update(path, online, state),
        lambda: nt.online.load_update(path),
    ):
        with pytest.raises(
            ImportError, match=r"needs flatbuffers.*exported programs: pip install"
        ):
            call()
    assert not path.exists()


def test_structures_survive_json():
    state = make().init(KEY, X[0], Y[0])
    tree = {"state": state, "more": [(1, None), {"a": 2}]}
    leaves, structure = jax.tree.flatten(tree)
    again = decode(json.loads(json.dumps(encode(structure))), iter(leaves))
    assert jax.tree.structure(again) == structure
