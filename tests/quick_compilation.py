"""How tests and golden trajectories compile: quickly, and each program once."""

import os
import threading
from importlib.metadata import version

import jax

OLD = version("jaxlib").startswith("0.10.")


def set_flags():
    """Flags of XLA for programs that run once; before the first of them is compiled.

    Most of the time of a test goes into compilation, which has no need to optimise what runs once. Flags that the
    caller has set stand: with any, the tests compile as the caller does.
    """
    # Where each operation stands in the source, for profilers: a twentieth of the work.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    if "XLA_FLAGS" in os.environ:
        return
    flags = [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
    # Parts to compile side by side are a tenth of the work, where there are as many workers as cores.
    flags.append("--xla_cpu_parallel_codegen_split_count=1")
    if OLD:
        # The emitters that replaced these take three times as long. Versions without the flag exit at it.
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)


def keep_programs(folder):
    """Keep compiled programs, however small, in a folder, or in that of ``JAX_COMPILATION_CACHE_DIR``."""
    if not jax.config.jax_compilation_cache_dir and folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def share_contexts():
    """Lower ten programs of a thread in one context of MLIR, as newer versions do: a sixth of a small program."""
    if not OLD:
        return
    from jax._src.interpreters import mlir

    make, last = mlir.make_ir_context, threading.local()

    def make_ir_context():
        if mlir.ir.Context.current is not None:
            # While another program is lowered, whose module would hold this one.
            return make()
        last.count = getattr(last, "count", 0) + 1
        if last.count % 10 == 1:
            last.context = make()
        return last.context

    mlir.make_ir_context = make_ir_context
