"""A process that fills a store, for tests that run many of them or kill one.

Every value it stores can be recomputed from its key, so a reader can tell if anything is wrong.
"""

from __future__ import annotations

import sys

from tests.contracts.store import (
    get_library,
    graph_key,
    kernel_entry,
    kernel_key,
    put_library,
    record,
)
from torch_pruner.cache import KernelStore


def library(n: int) -> bytes:
    return f"library {n} ".encode() * 2000


def latency(n: int) -> float:
    return 1e-3 / (1 + n)


def write(store: KernelStore, n: int) -> None:
    """One round: a better kernel, its record, its library."""
    store.add_records(kernel_key(), [record(f"candidate {n}", time=float(n))])
    store.put_kernel(kernel_entry(latency_s=latency(n), candidate={"n": n}))
    put_library(store, graph_key(f"net {n}"), library(n), {"n": n})


def check(store: KernelStore, n: int) -> bool:
    """Whether round ``n`` is there; what is there has to be right."""
    best = store.get_kernel(kernel_key())
    assert best is None or best.latency_s == latency(int(best.candidate["n"]))
    found = get_library(store, graph_key(f"net {n}"))
    if found is None:
        return False
    assert found[0].meta == {"n": n}
    assert found[1].read_bytes() == library(n)
    return True


def main() -> None:
    """``writer ROOT FIRST COUNT``: print the number of each finished round."""
    root, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = KernelStore.open(root)
    assert store.degraded is None, store.degraded
    for n in range(first, first + count):
        write(store, n)
        sys.stdout.write(f"{n}\n")
        sys.stdout.flush()
    assert store.degraded is None, store.degraded


if __name__ == "__main__":
    main()
