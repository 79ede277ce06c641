"""The number of threads that kernels run on, which TVM's pools fix when they are made."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.tvm

SCRIPT = """
from torch_pruner.codegen.build.load import _runtime, set_threads
count = _runtime().get_global_func("runtime.NumThreads")
for wanted in (1, 2, 1):
    set_threads(wanted)
    print(count())
"""


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU")
def test_a_process_that_began_with_one_thread_can_use_two() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TVM_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, timeout=120
    )
    assert done.stdout.split() == ["1", "2", "1"], done.stderr
