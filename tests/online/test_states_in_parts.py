"""States of several processes on disk: two threads play the processes, each of which holds its own part."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_tempered as nt
from numpyro_tempered.online.streams import parts, processes
from numpyro_tempered.online.streams import save as state_io

# Of a run that hangs an error in place of a wait without end.
PATIENCE = 60


@pytest.fixture
def together(monkeypatch):
    """Run a function of the number of the process on all of them; it returns what they return or raise."""

    def run(function, count=2, axes=1):
        barrier, rows, here = (
            threading.Barrier(count, timeout=PATIENCE),
            [None] * count,
            threading.local(),
        )

        def gather(row):
            rows[here.number] = np.array(row)
            barrier.wait()
            everywhere = (
                np.stack(rows) if len({each.shape for each in rows}) == 1 else None
            )
            barrier.wait()
            assert everywhere is not None, (
                "the processes exchange rows of different sizes"
            )
            return everywhere

        def one(number):
            here.number = number
            try:
                return function(number)
            except Exception as error:
                return error

        with monkeypatch.context() as patch, ThreadPoolExecutor(count) as pool:
            patch.setattr(processes, "gather", gather)
            patch.setattr(jax, "process_index", lambda: here.number)
            patch.setattr(jax, "process_count", lambda: count)
            patch.setattr(state_io, "spans_processes", lambda leaves: True)
            # Arrays of so many axes are cut, each process has its part; others are everywhere.
            for module in (parts, state_io):
                patch.setattr(
                    module, "is_shared_out", lambda leaf: np.ndim(leaf) >= axes
                )
            return list(pool.map(one, range(count)))

    return run


def state(number, save=0):
    return {
        "key": jax.random.key(save),
        "rounds": jnp.int32(save),
        "streams": jnp.array([[1.0, 2.0, 3.0]]) + 10.0 * number + 100.0 * save,
        "small": jnp.array([0.1 * number], jnp.bfloat16),
    }


def assert_states(found, save):
    for number, each in enumerate(found):
        assert not isinstance(each, Exception), each
        for name, value in state(number, save).items():
            assert each[name].dtype == value.dtype
            as_numbers = jax.random.key_data if name == "key" else np.asarray
            np.testing.assert_array_equal(as_numbers(each[name]), as_numbers(value))


def test_each_process_gets_its_part_of_the_last_save_that_all_have(together, tmp_path):
    path = tmp_path / "state.npz"

    def save(number):
        return together(lambda process: nt.online.save(path, state(process, number)))

    def restored():
        return together(lambda process: nt.online.restore(path, like=state(process, 7)))

    for number in (1, 2):
        assert save(number) == [None, None]
        assert_states(restored(), number)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == [
        f"state.{process}of2.{turn}.npz" for process in (0, 1) for turn in "ab"
    ]
    # Of a save that one process has only half of nothing is read.
    second = tmp_path / "state.1of2.a.npz"
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    assert_states(restored(), 1)
    # The next save takes the place of that one, and the save before it stays.
    save(3)
    assert_states(restored(), 3)
    (tmp_path / "state.0of2.a.npz").unlink()
    assert_states(restored(), 1)


def test_saves_of_one_number_that_are_of_two_runs_are_none(together, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        together(
            lambda process, folder=folder: nt.online.save(
                tmp_path / folder / "state.npz", state(process)
            )
        )
    (tmp_path / "two" / "state.1of2.b.npz").replace(
        tmp_path / "one" / "state.1of2.b.npz"
    )
    path = tmp_path / "one" / "state.npz"
    for error in together(lambda process: nt.online.restore(path, like=state(process))):
        assert isinstance(error, FileNotFoundError)
        assert "has a part of each of the 2 processes. (on process 0 of 2)" in str(
            error
        )


def test_parts_of_another_number_of_processes_are_refused(together, tmp_path):
    path = tmp_path / "state.npz"
    together(lambda process: nt.online.save(path, state(process)), count=2)
    for error in together(
        lambda process: nt.online.restore(path, like=state(process)), count=3
    ):
        assert isinstance(error, ValueError)
        assert f"{path} was saved in parts by 2 processes, and there are 3" in str(
            error
        )


def test_parts_of_another_form_are_refused(together, tmp_path):
    path, cut, one = (
        tmp_path / "state.npz",
        jnp.zeros((4, 3), jnp.float32),
        jnp.float32(0.0),
    )
    together(lambda process: nt.online.save(path, {"a": cut, "b": one}))
    for like, message in (
        (
            [cut, one],
            "holds a state of another structure than like: the whole state is dict",
        ),
        (
            {"a": cut[:2], "b": jnp.zeros(())},
            "holds float32[4,3] at ['a'], expected float32[2,3].",
        ),
        ({"a": cut, "b": jnp.int32(0)}, "holds float32[] at ['b'], expected int32[]."),
    ):
        for error in together(lambda process, like=like: nt.online.restore(path, like)):
            assert isinstance(error, ValueError)
            assert message in str(error)


def test_arrays_are_shared_out_as_they_were(together, tmp_path):
    path, like = tmp_path / "state.npz", {"a": jnp.zeros((4, 3)), "b": jnp.zeros(3)}
    together(lambda process: nt.online.save(path, like), axes=2)
    for error in together(lambda process: nt.online.restore(path, like), axes=1):
        assert isinstance(error, ValueError)
        assert (
            "holds ['b'] at ['whole'] on this process, expected ['0:3']: like must be"
            in str(error)
        )


def test_a_part_is_named_by_where_it_lies():
    assert parts._place((slice(2, 4), slice(None)), (6, 3)) == "2:4,0:3"


def test_what_all_hold_is_one_file_of_the_first_process(together, tmp_path):
    path, folder = tmp_path / "state.npz", tmp_path / "absent"
    # A process that wrote its own would write its own number.
    together(lambda process: nt.online.save(path, {"rounds": jnp.int32(process)}))
    assert [file.name for file in tmp_path.iterdir()] == ["state.npz"]
    assert int(nt.online.restore(path, {"rounds": jnp.int32(5)})["rounds"]) == 0
    for error in together(
        lambda process: nt.online.save(
            folder / "state.npz", {"rounds": jnp.int32(process)}
        )
    ):
        assert isinstance(error, FileNotFoundError)
        assert "(on process 0 of 2)" in str(error)
