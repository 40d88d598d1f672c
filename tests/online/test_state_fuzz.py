"""Ten thousand changed files: each is refused or holds the state, and none runs code."""

import io
import json
import os
import random
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_tempered as nt

NUM_FILES = 10_000


class Runs:
    """Whose pickle makes a folder when it is read."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def state_of():
    rule = nt.online.rvga()
    state = rule.init(nt.gaussian.families.FullRank(jnp.zeros(3), jnp.eye(3)))
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.ones(20)
    return {
        "state": nt.online.run(rule, nt.expectations.squared(), state, x, y)[0],
        "key": jax.random.key(1),
    }


def members(whole):
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_of(parts):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts:
            archive.writestr(name, content)
    return file.getvalue()


def array_file(array):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, allow_pickle=True)
    return file.getvalue()


def bytes_changed(rng, whole):
    """The file with bytes that are flipped, cut, doubled, moved or drawn anew."""
    data, at = bytearray(whole), rng.randrange(len(whole))
    size = rng.choice([1, 2, 8, 64, 512])
    kind = rng.randrange(6)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        del data[at : at + size]
    elif kind == 3:
        data[at:at] = data[at : at + size]
    elif kind == 4:
        data[at : at + size] = rng.randbytes(size)
    else:
        other = rng.randrange(len(whole))
        data[at : at + size], data[other : other + size] = (
            data[other : other + size],
            data[at : at + size],
        )
    return bytes(data)


def header_changed(rng, header):
    """The header with a value replaced, added or left out, anywhere within it."""
    places = [(header, name) for name in header]
    for holder, name in places:
        inner = holder[name]
        if isinstance(inner, dict | list):
            places += [
                (inner, each)
                for each in (inner if isinstance(inner, dict) else range(len(inner)))
            ]
    holder, name = rng.choice(places)
    if rng.random() < 0.3:
        del holder[name]
    else:
        holder[name] = rng.choice(
            [None, -1, 10**9, 0.5, "", "*", [], {}, [[]], ["float32", [3]], "__class__"]
        )
    return rng.choice([header, [header], "header"]) if rng.random() < 0.1 else header


def archive_changed(rng, whole, folder):
    """An archive whose checksums are right, with another header, other arrays, or arrays of Python objects."""
    parts = members(whole)
    leaf = rng.choice([name for name in parts if name != "header.npy"])
    kind = rng.randrange(5)
    if kind == 0:
        header = json.loads(np.load(io.BytesIO(parts["header.npy"])).tobytes())
        changed = json.dumps(header_changed(rng, header)).encode()
        parts["header.npy"] = array_file(np.frombuffer(changed, np.uint8))
    elif kind == 1:
        parts[rng.choice(["header.npy", leaf])] = array_file(
            np.array([Runs(folder)], object)
        )
    elif kind == 2:
        del parts[leaf]
    elif kind == 3:
        array = np.load(io.BytesIO(parts[leaf]))
        others = [
            array.astype(np.float16),
            array[None],
            array.ravel()[:0],
            np.zeros(7),
            np.array("text"),
        ]
        parts[leaf] = array_file(rng.choice(others))
    else:
        return archive_of(
            [*parts.items(), ("../outside.npy", parts[leaf]), ("extra.npy", b"")]
        )
    return archive_of(parts.items())


def is_same(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    as_bytes = ((np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a),
                 np.asarray(jax.random.key_data(b) if jnp.issubdtype(b.dtype, jax.dtypes.prng_key) else b))
                for a, b in pairs)  # fmt: skip
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in as_bytes
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_changed_files_are_refused_or_equal_and_run_nothing(tmp_path):
    state = state_of()
    path, trap = tmp_path / "state", tmp_path / "trap"
    nt.online.save(path, state)
    whole = path.read_bytes()
    rng = random.Random(2019)
    num_refused = 0
    for number in range(NUM_FILES):
        changed = (
            bytes_changed(rng, whole)
            if number % 2
            else archive_changed(rng, whole, str(trap))
        )
        path.write_bytes(changed)
        try:
            restored = nt.online.restore(path, like=state)
        except ValueError:
            num_refused += 1
            continue
        assert is_same(restored, state), number
    assert not trap.exists()
    assert sorted(os.listdir(tmp_path)) == ["state"]
    assert NUM_FILES / 2 < num_refused < NUM_FILES


def test_the_trap_works(tmp_path):
    file = io.BytesIO(array_file(np.array([Runs(str(tmp_path / "trap"))], object)))
    np.load(file, allow_pickle=True)
    assert (tmp_path / "trap").exists()
