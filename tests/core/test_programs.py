"""Programs that serve again: never stale, and never of another program."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_tempered as nt
from numpyro_tempered.core import operations, programs
from numpyro_tempered.core.batching import compiled_map
from numpyro_tempered.core.programs import (
    compile_once,
    run_program,
    share_trace,
    trace_once,
)

SCALE = np.float32(0.1)
TABLE = jnp.arange(3.0)
COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: (
        COMPILED.append(event) if "backend_compile" in event else None
    )
)


@pytest.fixture
def count(monkeypatch):
    """How many programs were built; the cache is empty at the start."""
    built = []
    original = programs._program
    monkeypatch.setattr(
        programs, "_program", lambda *args: built.append(args) or original(*args)
    )
    monkeypatch.setattr(programs, "_PROGRAMS", type(programs._PROGRAMS)())
    return lambda: len(built)


def make(number, array, *, branch=True):
    def function(x):
        def body(carry):
            step = jax.nn.relu(carry[0] * number) + total.astype(x.dtype)
            return (jnp.where(step > 0, step, -step) if branch else step), carry[1] + 1

        total = jnp.sum(array)
        return jax.lax.while_loop(lambda carry: carry[1] < 3, body, (x, 0))[0]

    return function


def test_a_fresh_function_of_the_same_program_serves_other_arrays(count):
    for scale in (1.0, 2.0):
        array = jnp.arange(3.0) * scale
        found = run_program(make(0.1, array), jnp.ones(()))
        np.testing.assert_allclose(
            found, jax.jit(make(0.1, array))(jnp.ones(())), rtol=1e-6
        )
    assert count() == 1


def test_arrays_in_a_program_within_are_compared():
    for scale in (1.0, 2.0):
        array = jnp.arange(3.0) * scale
        inner = jax.jit(lambda x, array=array: jnp.sum(x * array))
        assert (
            float(run_program(lambda x, inner=inner: inner(x), jnp.ones(())))
            == 3.0 * scale
        )


@pytest.mark.parametrize(
    "other",
    [
        make(
            np.float32(np.nextafter(np.float32(0.1), np.float32(1.0))), jnp.arange(3.0)
        ),
        make(np.float32(-0.1), jnp.arange(3.0)),
        make(np.float32(0.1), jnp.arange(4.0)),
        make(np.float32(0.1), jnp.arange(3)),
        make(np.float32(0.1), jnp.arange(3.0), branch=False),
    ],
    ids=["one ulp", "sign", "shape", "dtype", "branch"],
)
def test_another_program_is_another(count, other):
    x = jnp.float32(0.7)
    run_program(make(np.float32(0.1), jnp.arange(3.0)), x)
    found = run_program(other, x)
    assert count() == 2
    np.testing.assert_array_equal(found, jax.jit(other)(x))


def test_zeros_of_either_sign_and_numbers_of_either_type_differ():
    assert len({programs._key(value) for value in (0, 0.0, -0.0, False)}) == 4


def test_what_has_no_key_is_compiled_and_not_held(count):
    def callback(x):
        return jax.pure_callback(
            lambda x: np.asarray(x) + 1, jax.ShapeDtypeStruct((), x.dtype), x
        )

    for _ in range(2):
        assert float(run_program(callback, jnp.ones(()))) == 2.0
    assert count() == 2
    assert not programs._PROGRAMS


def test_the_oldest_program_leaves(count, monkeypatch):
    monkeypatch.setattr(programs, "_SIZE", 2)
    for number in (1.0, 2.0, 3.0, 1.0):
        assert (
            float(run_program(lambda x, number=number: x * number, jnp.ones(())))
            == number
        )
    assert count() == 4
    assert len(programs._PROGRAMS) == 2


def test_under_a_transformation_it_is_the_function(count):
    def value(a):
        return run_program(lambda x: a * x**2, 3.0)

    assert float(jax.grad(value)(2.0)) == 9.0
    assert not programs._PROGRAMS


def test_what_changes_outside_is_read_again(monkeypatch):
    def read(x):
        return SCALE * x + jnp.sum(TABLE)

    assert float(compile_once(read, jnp.zeros(()))(jnp.ones(()))) == pytest.approx(3.1)
    monkeypatch.setitem(globals(), "SCALE", np.float32(0.5))
    assert float(compile_once(read, jnp.zeros(()))(jnp.ones(()))) == pytest.approx(3.5)
    monkeypatch.setitem(globals(), "TABLE", jnp.ones(3) * 2.0)
    assert float(compile_once(read, jnp.zeros(()))(jnp.ones(()))) == pytest.approx(6.5)


def test_one_program_serves_rows_of_other_data(count):
    for seed in (0, 1):
        data = jnp.asarray(
            np.random.default_rng(seed).normal(size=50).astype(np.float32)
        )
        rows = np.arange(5, dtype=np.float32)
        found = compiled_map(
            lambda row, data=data: {"sum": jnp.sum(row * data)}, rows, 2
        )
        np.testing.assert_allclose(
            found["sum"], rows * np.sum(data), rtol=1e-5, atol=1e-5
        )
    assert count() == 1


def test_a_program_does_not_hold_the_data_of_its_first_run(count):
    array = jnp.arange(1000.0)
    held = weakref.ref(array)
    run_program(lambda x, array=array: jnp.sum(x * array), jnp.ones(1000))
    del array
    gc.collect()
    assert held() is None


def test_flags_that_are_set_stand(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    assert operations.compiler_options(1) is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    on_cpu = jax.default_backend() == "cpu"
    many = 2 * operations.FEW_OPERATIONS
    assert operations.compiler_options(many) == (
        {"xla_backend_optimization_level": 1} if on_cpu else None
    )
    assert operations.compiler_options(1) == (
        {"xla_backend_optimization_level": 0} if on_cpu else None
    )


def test_a_program_is_compiled_for_how_often_it_runs(monkeypatch):
    seen = []

    def options(num_operations):
        seen.append(num_operations)

    monkeypatch.setattr(programs, "compiler_options", options)
    few = programs.compile_once(jnp.sin, jnp.ones(3), num_runs=10)
    many = programs.compile_once(jnp.sin, jnp.ones(3), num_runs=1000)
    assert seen[1] == 100 * seen[0] > 0
    np.testing.assert_array_equal(few(jnp.ones(3)), many(jnp.ones(3)))
    programs.fast_jit(jnp.cos)(jnp.ones(3))
    assert seen[2] == np.inf


def test_equal_programs_of_other_options_are_others(monkeypatch):
    monkeypatch.setattr(
        programs,
        "compiler_options",
        lambda n: {"xla_backend_optimization_level": int(n > 100)},
    )
    jaxpr = jax.make_jaxpr(jnp.sin)(jnp.ones(3)).jaxpr
    assert programs._equal_program(jaxpr, 1) is programs._equal_program(jaxpr, 2)
    assert programs._equal_program(jaxpr, 1) is not programs._equal_program(jaxpr, 1000)


def test_operations_are_counted_in_loops():
    def loop(x):
        mapped = jax.lax.map(lambda row: jnp.sin(row) + 1.0, jnp.stack([x] * 7))
        return jax.lax.while_loop(lambda y: y[0] < 3.0, jnp.exp, mapped[0])

    x = jnp.ones(100)
    found = operations.count_operations(jax.make_jaxpr(loop)(x).jaxpr)
    least = 7 * 2 * 100 + operations.ROUNDS * 100
    assert least <= found <= 1.5 * least + 2000


@pytest.mark.parametrize(
    ("function", "least"),
    [
        (
            lambda x: jnp.ones((100, 500)) @ jnp.broadcast_to(x[0], (500, 20)),
            100 * 500 * 20,
        ),
        (jnp.sort, 100 * 100),
        (jnp.cumsum, 25 * 100),
        (lambda x: jax.random.gamma(jax.random.key(0), x), 1000 * 100),
        (lambda x: jax.lax.igamma(x, x), 500 * 100),
    ],
    ids=["product", "sort", "cumsum", "gamma", "igamma"],
)
def test_operations_that_take_long_count_as_many(function, least):
    assert (
        operations.count_operations(jax.make_jaxpr(function)(jnp.ones(100)).jaxpr)
        >= least
    )


def test_what_is_traced_once_serves_in_derivatives_and_holds_no_arrays(count):
    """A program with it differs from one of other data by its operands alone."""
    traces = []

    def sum_of_squares(array):
        def function(x):
            traces.append(None)
            return jnp.sum(jnp.square(x - array))

        once = trace_once(function, jnp.ones(()))
        return run_program(
            lambda x: (once(x), jax.grad(once)(x), jax.hessian(once)(x)), jnp.ones(())
        )

    for scale in (1.0, 2.0):
        value, slope, curvature = sum_of_squares(scale * jnp.arange(3.0))
        shifts = 1.0 - scale * np.arange(3.0)
        np.testing.assert_allclose(
            [value, slope, curvature], [np.sum(shifts**2), 2.0 * np.sum(shifts), 6.0]
        )
    assert len(traces) == 2
    assert count() == 1


def test_what_the_values_do_not_need_is_not_differentiated():
    """As the derivatives that an expectation returns with its value, in loops that are dear to differentiate."""

    def function(x):
        rest = jax.lax.map(lambda t: jnp.sin(x * t), jnp.arange(3.0))
        return (x**2, rest)[0]

    once = trace_once(function, jnp.ones(()))
    program = str(jax.make_jaxpr(jax.grad(once))(jnp.ones(())))
    assert "sin" not in program
    assert "cos" not in program
    np.testing.assert_allclose(jax.grad(once)(jnp.float32(3.0)), 6.0)


def test_equal_traces_are_one_object(x64):
    """Whatever functions they are of: this is what jit finds its programs by."""
    x, row = jnp.ones(()), programs.first_row(jnp.ones(3))
    first = share_trace(make(0.1, jnp.arange(3.0)), x)
    assert share_trace(make(0.1, jnp.arange(3.0)), row) is first
    np.testing.assert_array_equal(
        jax.jit(first)(x), jax.jit(make(0.1, jnp.arange(3.0)))(x)
    )
    others = [
        (make(0.2, jnp.arange(3.0)), x),
        (make(0.1, jnp.arange(4.0)), x),
        (make(0.1, jnp.arange(3.0)), x[None]),
    ]
    assert all(share_trace(*other) is not first for other in others)
    with jax.default_matmul_precision("highest"):
        assert share_trace(make(0.1, jnp.arange(3.0)), x) is not first


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_a_trace_is_not_shared_under_a_transformation(transform):
    shared = []

    def run(x):
        for function, example in (
            (make(0.1, jnp.arange(3.0)), x[0]),
            (make(0.1, x), jnp.ones(())),
        ):
            shared.append(share_trace(function, example) is not function)
        return x

    transform(run)(jnp.ones((2, 3)))
    assert shared == [False, False]


def test_what_has_no_key_or_is_no_array_is_not_shared():
    printing = jax.tree_util.Partial(lambda x: jax.debug.callback(print, x) or x)
    for example in (jnp.ones(()), np.ones(()), 1.0):
        assert share_trace(printing, example) is printing
    with jax.disable_jit():
        function = make(0.1, TABLE)
        assert share_trace(function, jnp.ones(())) is function


def doubled(x, *, times):
    return sum((x for _ in range(times)), jnp.sin(x))


def test_what_is_compiled_ahead_is_found_by_the_call():
    function = jax.jit(doubled, static_argnames="times")
    assert programs.compile_ahead(function, np.ones(7, np.float32), times=3)
    assert not programs.compile_ahead(function, np.zeros(7, np.float32), times=3)
    programs.wait_for(function)
    COMPILED.clear()
    np.testing.assert_allclose(
        function(np.ones(7, np.float32), times=3), 3.0 + np.sin(1.0), rtol=1e-6
    )
    assert not COMPILED
    # Other static arguments and other shapes are other programs.
    assert programs.compile_ahead(function, np.ones(7, np.float32), times=2)
    assert programs.compile_ahead(function, np.ones(8, np.float32), times=3)
    programs.wait_for(function)


def test_a_traced_function_compiles_ahead_in_its_own_time():
    run = programs.compile_once(
        lambda x: jnp.cos(x) * 4.25, np.ones(5, np.float32), ahead=True
    )
    first = run(np.ones(5, np.float32))
    np.testing.assert_allclose(first, 4.25 * np.cos(1.0), rtol=1e-6)
    again = programs.compile_once(
        lambda x: jnp.cos(x) * 4.25, np.ones(5, np.float32), ahead=True
    )
    COMPILED.clear()
    np.testing.assert_array_equal(again(np.ones(5, np.float32)), first)
    assert not COMPILED


@pytest.mark.parametrize(
    "make",
    [
        lambda: nt.online.oga(0.1),
        lambda: nt.online.oga_el(0.1, box=nt.online.Box(20.0, 1.0)),
        lambda: nt.online.sva(0.1),
        lambda: nt.online.svb(0.1),
        lambda: nt.online.ngvi(),
        lambda: nt.online.rvga(),
        lambda: nt.expectations.logistic(30),
        lambda: nt.expectations.gauss_hermite(predictor="eta", num_nodes=9),
        lambda: nt.online.ewa(0.1),
    ],
)
def test_what_is_made_anew_from_equal_arguments_is_the_same(make):
    assert make() is make()


def test_equal_arguments_without_functions_make_one_value():
    @programs.one_for_equal
    def make(number=1.0, function=None):
        return [number, function]

    assert make(0.5) is make(0.5)
    assert make() is make()
    # 1 and 1.0 are other types.
    assert make(1) is not make(1.0)
    assert make((1.0, (2.0, "a"))) is make((1.0, (2.0, "a")))

    def function(count):
        return count

    assert make(function=function) is not make(function=function)
    assert make(np.float32(1.0)) is not make(np.float32(1.0))
    gone = weakref.ref(make(function=lambda: 0)[1])
    gc.collect()
    assert gone() is None
