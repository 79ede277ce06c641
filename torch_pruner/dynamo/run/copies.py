"""What is known of parameters that are kept in another form, and the copies, for all graphs.

In: parameters. Out: ``Held`` of each, what its memory holds and what was made of it; packed copies.
A parameter that several graphs read is read once, and packed once for each layout.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torch_pruner.devices.dtypes import DTYPES
from torch_pruner.dynamo.run.arrays import to_numpy
from torch_pruner.dynamo.run.device_packing import pack_there, packs_there
from torch_pruner.dynamo.run.huge_pages import ask_for
from torch_pruner.dynamo.run.optimizer_steps import steps, storage_key
from torch_pruner.dynamo.run.weight_checks import Contents, read_contents, span_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence

    from torch_pruner.dynamo.run.weight_checks import Entry
    from torch_pruner.graph.packing import PackLayout

Item = TypeVar("Item")

Layout = tuple["PackLayout", tuple[int, ...] | None]
Narrow = tuple[str, tuple[int, ...]]  # dtype, memory order
# What is packed, how, from which order, and the parameter with which the copy is kept.
Wanted = tuple[torch.Tensor, "PackLayout", tuple[int, ...] | None, torch.Tensor]
Memory = tuple[torch.UntypedStorage, int, int | None, int]

WORTH_THREADS = 1 << 20  # bytes to pack: less is done before a thread has started
_shared_lock = threading.Lock()


@dataclass(slots=True)
class Held:
    """What is known of one parameter: its memory, what that held, and copies made from it.

    Programs keep the copies that they read: those that none reads any more are gone.
    """

    memory: Memory
    contents: Contents | None  # None on devices whose memory is not looked at
    copies: MutableMapping[Layout, torch.Tensor] = field(default_factory=WeakValueDictionary)
    narrow: MutableMapping[Narrow, torch.Tensor] = field(default_factory=WeakValueDictionary)


# What is known of each parameter that is kept in another form, for all graphs that read it.
_shared: MutableMapping[torch.Tensor, Held] = WeakIdKeyDictionary()


def version_of(tensor: torch.Tensor) -> int | None:
    """The version counter, or None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def moved(parameter: torch.Tensor) -> None:
    """The parameter lies elsewhere and holds what it held: copies made of it are still its own."""
    with _shared_lock:
        held = _shared.get(parameter)
        if held is not None:
            held.memory = (held.memory[0], parameter.data_ptr(), *held.memory[2:])


def held_of(
    tensors: Sequence[torch.Tensor], entries: Sequence[Entry] | None, distrust: bool
) -> dict[int, Held]:
    """What is known of each parameter, by its ``id``; what its memory holds is read where needed.

    It is read before anything is made of it: a write in between is then seen as a change later.
    """
    last = steps.by_storage()
    found: dict[int, Held] = {}
    unread: list[torch.Tensor] = []
    for tensor in tensors:
        step = last.get(storage_key(tensor), 0)
        memory = tensor.untyped_storage(), tensor.data_ptr(), version_of(tensor), step
        with _shared_lock:
            known = _shared.get(tensor)
        if known is not None and memory[2] is not None and known.memory == memory:
            found[id(tensor)] = known
            if entries is None or not (distrust or known.contents is None):
                continue
        else:
            found[id(tensor)] = Held(memory, None)
        if entries is not None:
            unread.append(tensor)
    read = read_contents([span_of(t) for t in unread], entries or ()) if unread else []
    for tensor, contents in zip(unread, read, strict=True):
        known = found[id(tensor)]
        if known.contents != contents:
            found[id(tensor)] = Held(known.memory, contents)
    with _shared_lock:
        for tensor in tensors:
            _shared[tensor] = found[id(tensor)]
    return found


def all_packed(
    wanted: Sequence[Wanted], held: Mapping[int, Held] = MappingProxyType({})
) -> Iterator[torch.Tensor]:
    """The packed copy of each, which ``held`` keeps for other graphs.

    New memory is what takes the time, and every core gets its share.
    """
    unique = {(id(w[0]), w[1], w[2]): w for w in wanted}
    order = sorted(unique.values(), key=lambda w: -w[1].nbytes)
    pack = functools.partial(_packed, held=held)
    if all(w[0].device.type == "cpu" for w in order):
        results = shared_out(pack, order, [w[1].nbytes for w in order])
    else:  # a device's queue is that of this thread
        results = [pack(w) for w in order]
    made = {(id(w[0]), w[1], w[2]): packed for w, packed in zip(order, results, strict=True)}
    return (made[id(w[0]), w[1], w[2]] for w in wanted)


def shared_out(
    function: Callable[[Item], torch.Tensor], items: Sequence[Item], nbytes: Sequence[int]
) -> list[torch.Tensor]:
    """``function`` of each item, on several threads where ``nbytes`` say that it is worth it."""
    threads = min(torch.get_num_threads(), len(items))
    if threads <= 1 or sum(nbytes) < WORTH_THREADS:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))


def _packed(wanted: Wanted, held: Mapping[int, Held]) -> torch.Tensor:
    """The packed copy, shared between all graphs that want this layout of the parameter."""
    tensor, layout, order, owner = wanted
    copies = held[id(owner)].copies if id(owner) in held else {}
    if (known := copies.get((layout, order))) is not None:
        return known
    dense = tensor if order is None else tensor.detach().permute(order)
    if dense.device.type != "cpu" and packs_there(layout):
        packed = copies[layout, order] = pack_there(layout, dense.detach())
        torch.accelerator.synchronize(packed.device)  # other streams read it, too
        return packed
    packed = ask_for(torch.empty(layout.shape, dtype=DTYPES[layout.dtype]))
    used = layout.used(layout.pack(to_numpy(dense), to_numpy(packed)))
    if used < packed.numel():
        some = packed.reshape(-1)[:used]
        packed = ask_for(torch.empty_like(some)).copy_(some)
    packed = packed.to(tensor.device)
    copies[layout, order] = packed
    return packed
