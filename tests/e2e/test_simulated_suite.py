"""The tests of stages, offload, precision, checkpointing, pipelines and tensor parallelism, whole, on the simulated device.

By day tests/ranks/test_simulated_device.py has rows of its own there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    *("access", "activation_checkpointing", "adapters", "advice", "bad_input", "batch_norm", "checkpoint"),
    *("checkpoint_contents", "checkpoint_parallel", "compile", "containers", "equivalence", "foreign_values", "gradients"),
    *("higher_order", "hostile_checkpoint", "huggingface", "loop_arguments", "low_bit_states", "messages_ahead"),
    *("non_finite", "nvme", "offload", "offload_loops", "outside_step", "parallel_access", "parallel_bad_input"),
    *("parallel_checkpoints", "parallel_dropout", "parallel_init", "parallel_matrix", "param_gather", "pipeline"),
    *("precision", "random_pipelines", "reentrant", "script_orders", "settings", "skipped_steps", "tensor_parallel"),
)
# What is another thing there: (test, why).
OTHERWISE = (
    ("access.py::test_scripts_may_write_while_others_are_late", "ranks do not read each other's memory"),
    ("bad_input.py::test_error_is_clear_and_the_same_on_all_ranks[nan_loss_on_one_rank]", "the error comes a step later"),
    ("checkpoint_contents.py::test_a_rank_that_waits_alone_says_what_for", "other things are waited for, too"),
    ("containers.py::test_a_later_nan_is_looked_into", "nobody looks at what is on a device"),
    ("non_finite.py", "errors come a step later: test_deferred_decision.py"),
    ("offload_loops.py::test_an_interrupt_does_not_break_an_update", "a thread of its own updates"),
    (
        "settings.py::test_reduction_is_in_fp32_unless_asked_otherwise",
        "NCCL adds in the dtype of the wire",
    ),
    ("settings.py::test_weights_that_are_all_zero_are_an_error", "the error comes a step later"),
)


@pytest.mark.nightly
def test_all_of_it() -> None:
    files = [f"tests/ranks/test_{name}.py" for name in FILES]
    left_out = [f"--deselect=tests/ranks/test_{name}" for name, _ in OTHERWISE]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *files, *left_out],
        cwd=ROOT,
        env={**os.environ, "ZERORUN_TEST_DEVICE": "simulated"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
