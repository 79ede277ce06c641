"""Memory of large results is used again once nobody has it, and not before."""

from __future__ import annotations

import threading

import pytest
import torch

from torch_pruner.dynamo.run import recycled as module
from torch_pruner.dynamo.run.recycled import Recycled, recycled

FORM = (8, 16), (16, 1), torch.float32


def make(shape, strides, dtype):
    return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(module, "LEAST_BYTES", 512)


def test_free_memory_is_used_again():
    results = Recycled(make)
    first = results(*FORM)
    at = first.data_ptr()
    first.requires_grad_()
    del first
    second = results(*FORM)
    assert second.data_ptr() == at
    assert (tuple(second.shape), second.stride(), second.dtype) == FORM
    assert second.is_leaf
    assert not second.requires_grad


@pytest.mark.parametrize(
    "holder",
    [
        lambda t: t,
        lambda t: t[3],
        lambda t: t.view(-1)[5:].detach(),
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
        torch.utils.dlpack.to_dlpack,
        lambda t: (t.requires_grad_() * t).sum(),  # autograd keeps both operands
        lambda t: t.clone().copy_(t).set_(t),
    ],
    ids=["itself", "view", "detached", "array", "storage", "dlpack", "graph", "set"],
)
def test_memory_that_somebody_has_is_left_alone(holder):
    results = Recycled(make)
    first = results(*FORM).fill_(7)
    at, held = first.data_ptr(), holder(first)
    del first
    second = results(*FORM)
    assert second.data_ptr() != at
    del held, second
    third = results(*FORM)
    fourth = results(*FORM)
    assert third.data_ptr() != fourth.data_ptr()


def test_memory_that_was_shrunk_or_that_other_processes_read_is_left_alone():
    results = Recycled(make)
    first = results(*FORM)
    first.untyped_storage().resize_(0)
    del first
    assert results(*FORM).fill_(1).sum() == 128
    shared = results(*FORM).share_memory_()
    at = shared.data_ptr()
    del shared
    assert results(*FORM).data_ptr() != at


def test_threads_never_get_one_memory():
    results, seen, lock = Recycled(make), set(), threading.Lock()
    wrong = []

    def run():
        for _ in range(300):
            out = results(*FORM)
            at = out.data_ptr()
            with lock:
                if at in seen:
                    wrong.append(at)
                seen.add(at)
            with lock:
                seen.discard(at)
            del out

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_only_large_results_are_kept_and_only_where_owners_are_counted(monkeypatch):
    assert recycled(make, 511) is make
    assert isinstance(recycled(make, 512), Recycled)
    monkeypatch.setattr(module, "_owners", None)
    assert recycled(make, 512) is make


def test_a_large_result_of_inference_mode_serves_a_call_outside_of_it():
    results = Recycled(make)
    with torch.inference_mode():
        first = results(*FORM)
        assert first.is_inference()
        del first
        results(*FORM).fill_(1)
    out = results(*FORM)
    assert not out.is_inference()
    assert (out.fill_(2).requires_grad_() * 2).sum() == 512


def test_another_default_device_changes_nothing():
    results = Recycled(lambda *form: torch.empty_strided(*form[:2], dtype=form[2], device="cpu"))
    at = results(*FORM).data_ptr()
    with torch.device("meta"):
        second = results(*FORM)
    assert second.device.type == "cpu"
    assert second.data_ptr() == at
