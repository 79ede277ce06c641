"""What the backend raises is ours and torch's at once: ``except CacheMiss`` did not catch it."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from torch_pruner import exc
from torch_pruner.cli import main
from torch_pruner.dynamo.run.failures import raised_as_both

ERRORS = [
    exc.CacheMiss("matmul", {"threads": ("2", "4")}, others=["softmax"]),
    exc.OptionError("trails", "unknown option", known=("trials",)),
    exc.CompileError("graph0", "no luck", log="ld: cannot find -lc"),
]


def raised(error: exc.PrunerError) -> BaseException:
    @raised_as_both
    def backend(gm, example_inputs):
        raise error

    torch._dynamo.reset()
    with pytest.raises(type(error)) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return caught.value


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_it_is_caught_as_either(error: exc.PrunerError) -> None:
    found = raised(error)
    assert isinstance(found, BackendCompilerFailed)
    assert found.inner_exception is error
    assert vars(error).items() <= vars(found).items()
    assert str(error) in str(found)
    assert type(error).__name__ in str(found)
    assert type(found) is type(raised(error))
    assert main._pruner_error(found) is error  # the command line says its first line


def test_it_pickles_as_ours() -> None:
    again = pickle.loads(pickle.dumps(raised(ERRORS[0])))
    assert type(again) is exc.CacheMiss
    assert again.missing == ("matmul", "softmax")


def test_a_miss_lists_all_that_is_missing() -> None:
    misses = [ERRORS[0], exc.CacheMiss("softmax"), exc.CacheMiss("gelu")]
    found = exc.CacheMiss.of(misses)  # type: ignore[arg-type]
    assert found.missing == ("matmul", "softmax", "gelu")
    first, *lines = str(found).splitlines()
    assert first.startswith("no tuned kernel for matmul and 2 more; ")
    assert "threads (2 vs 4)" in first
    assert [line.split()[-1] for line in lines] == ["matmul", "softmax", "gelu"]
    assert str(exc.CacheMiss("matmul")).count("\n") == 0
