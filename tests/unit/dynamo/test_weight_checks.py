"""What is kept of parameters is renewed when their memory or an optimizer says so, and not else."""

from __future__ import annotations

import gc
import threading

import torch

from torch_pruner.dynamo.run import copies, weight_checks
from torch_pruner.dynamo.run.optimizer_steps import Steps, steps, storage_key
from torch_pruner.dynamo.run.snapshot import Snapshot
from torch_pruner.dynamo.run.weight_checks import State
from torch_pruner.graph.weight_checksum import PHASES


def watch(*tensors: torch.Tensor) -> weight_checks.Watch:
    return weight_checks.Watch(
        weight_checks.read_contents([weight_checks.span_of(t) for t in tensors], ()), ()
    )


def test_memory_that_nobody_wrote_is_unchanged_for_rounds() -> None:
    tensors = torch.randn(300, 70), torch.randn(3), torch.randn(0), torch.tensor(1.0)
    seen = watch(*tensors)
    assert all(seen.unchanged() for _ in range(3 * PHASES))
    assert seen.all_unchanged()


def test_a_change_is_seen_in_any_of_many_tensors_at_the_next_call() -> None:
    tensors = [torch.randn(n) for n in (1, 5, 15, 17, 400, 3000, 200_000)]
    for tensor in tensors:
        seen = watch(*tensors)
        tensor.data.mul_(2)
        assert not seen.unchanged(), tensor.shape


def test_one_element_is_seen_within_a_round_and_by_a_look_at_everything_at_once() -> None:
    tensor = torch.randn(50_000)
    seen, whole = watch(tensor), watch(tensor)
    tensor.data[31_234] = 7
    assert not all(seen.unchanged() for _ in range(PHASES))
    assert not whole.all_unchanged()


def test_views_with_holes_and_odd_addresses_are_watched_from_first_to_last_element() -> None:
    base = torch.zeros(4000, dtype=torch.bfloat16)
    view = base[1:3001:3]
    seen = watch(view)
    base[3:2998].fill_(1)
    assert not seen.unchanged()


def test_threads_look_at_the_same_time() -> None:
    tensor = torch.randn(100_000)
    seen, wrong = watch(tensor), []

    def look() -> None:
        wrong.extend(k for k in range(200) if not seen.unchanged())

    threads = [threading.Thread(target=look) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_weights_of_inference_mode_that_nobody_looks_at_count_as_written() -> None:
    """They have no version: on a GPU, packed copies of the past were used for ever."""
    with torch.inference_mode():
        weight = torch.ones(8)
    usual = torch.ones(8)
    for tensor, state in ((weight, State.WRITTEN), (usual, State.SAME)):
        address, version = (tensor.data_ptr(),), (copies.version_of(tensor),)
        given = ((tensor,), (tensor.untyped_storage(),), address, (tensor,), (), version)
        snapshot = Snapshot(*given, None, [steps.count], (), (), ())
        assert snapshot.state((tensor,)) is state


def test_known_contents_are_read_again_only_where_something_changed(monkeypatch) -> None:
    read: list[int] = []
    original = weight_checks.read_contents

    def counting(spans, entries):
        read.append(len(spans))
        return original(spans, entries)

    monkeypatch.setattr(copies, "read_contents", counting)
    first, second = torch.randn(5000), torch.randn(5000)
    held = copies.held_of([first, second], (), distrust=False)
    assert read == [2]
    again = copies.held_of([first, second], (), distrust=False)
    assert read == [2]
    assert again[id(first)] is held[id(first)]
    first.add_(1)
    copies.held_of([first, second], (), distrust=False)
    assert read == [2, 1]
    second.data.add_(1)  # nobody says so: a sample of the memory did
    third = copies.held_of([first, second], (), distrust=True)
    assert read == [2, 1, 2]
    assert third[id(second)] is not held[id(second)]
    assert not third[id(second)].copies


def test_every_optimizer_is_noted_with_what_it_writes() -> None:
    weight = torch.nn.Parameter(torch.randn(4))
    view = weight.detach()[1:]  # memory counts, not the tensor
    before = steps.count
    weight.grad = torch.ones(4)
    torch.optim.AdamW([weight], fused=True).step()
    assert steps.count == before + 1
    assert steps.by_storage().get(storage_key(view), 0) in (0, steps.count)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.step()
    assert steps.by_storage()[storage_key(view)] == steps.count == before + 2


def test_an_optimizer_that_is_gone_is_forgotten() -> None:
    own = Steps()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    own.note(optimizer)
    assert len(own.by_storage()) == 1
    del optimizer
    gc.collect()
    assert own.by_storage() == {}


def test_a_compiled_step_moves_the_counter_and_our_hook_breaks_no_graph() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(4)
    version, count = weight._version, steps.count
    torch.compile(optimizer.step, backend="aot_eager")()
    assert torch.allclose(weight, torch.full((4,), 0.9))
    assert weight._version > version or steps.count > count

    def hooked(x: torch.Tensor) -> torch.Tensor:
        steps.note(optimizer)
        return x + 1

    torch.compile(hooked, backend="eager", fullgraph=True)(torch.ones(1))
