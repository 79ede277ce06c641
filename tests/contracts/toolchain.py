"""What every toolchain promises."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.families import kernels as K
from torch_pruner import exc
from torch_pruner.codegen.build.load import bound
from torch_pruner.compiler.drafting import draft
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.graph.reference import evaluate
from torch_pruner.task import Scheduled, Task

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch_pruner.compiler.toolchain import Entry, Library, Toolchain
    from torch_pruner.target import TargetSpec

SIZE = 48
SLOTS = 3


def pointwise(op: str) -> Graph:
    b = GraphBuilder()
    return b.finish([b.pointwise(op, b.input(0, (SIZE,), "float32"))])


EXP, NEG = pointwise("exp"), pointwise("neg")
# By entry: kernels on places of a table of an input, something between, an output.
CALLS = {
    "both": [
        KernelCall(EXP.digest(), (Place(0), Place(1))),
        KernelCall(NEG.digest(), (Place(1), Place(2))),
    ],
    "one": [KernelCall(EXP.digest(), (Place(0), Place(2)))],
    "behind": [KernelCall(NEG.digest(), (Place(0, 64), Place(2, 64)))],  # from the 16th element
}


def results(entry: Entry) -> np.ndarray[Any, Any]:
    """The output of an entry on numbers that are always the same; 7 where it writes nothing."""
    given, between, out = (K.inputs_for(pointwise("neg"), seed)[0] for seed in range(SLOTS))
    given[SIZE - 16 :] = given[:16]
    between[...], out[...] = 7, 7
    larger = [np.concatenate([a, np.full(16, 7, np.float32)]) for a in (given, between, out)]
    bound(entry, larger)()
    return larger[2][:SIZE].copy()


def expected() -> dict[str, np.ndarray[Any, Any]]:
    given = K.inputs_for(pointwise("neg"), 0)[0]
    given[SIZE - 16 :] = given[:16]
    exp = evaluate(EXP, [given])[0]
    behind = np.full(SIZE, 7, np.float32)
    behind[16:] = -given[16:]
    return {"both": -exp, "one": exp, "behind": behind}


def check(entries: dict[str, Entry]) -> None:
    for name, entry in entries.items():
        np.testing.assert_allclose(results(entry), expected()[name], rtol=1e-5)


class ToolchainContract:
    """Subclasses give fixtures ``toolchain``, ``target`` and ``without_compiler``.

    Entries take addresses of this process. ``without_compiler()`` makes whatever builds fail from
    now on.
    """

    @pytest.fixture
    def toolchain(self) -> Toolchain:
        raise NotImplementedError

    @pytest.fixture
    def target(self) -> TargetSpec:
        raise NotImplementedError

    @pytest.fixture
    def without_compiler(self) -> Callable[[], None]:
        raise NotImplementedError

    @pytest.fixture
    def library(self, toolchain: Toolchain, target: TargetSpec) -> Library:
        toolchain.prepare()
        kernels = {s.digest(): Scheduled(s, draft(Task("t", s, target, 1))) for s in (EXP, NEG)}
        return toolchain.build(kernels, CALLS, SLOTS, target)

    @pytest.fixture
    def file(self, library: Library, tmp_path: Path) -> Path:
        path = tmp_path / "graph.so"
        library.save(path)
        return path

    def test_entries_come_in_the_order_asked_for_then_its_own(self, toolchain, library) -> None:
        assert len(library.entries()) == len(CALLS) + len(toolchain.own)
        check(dict(zip(CALLS, library.entries(), strict=False)))

    def test_optional_entries_come_where_they_are_asked_for(self, toolchain, target) -> None:
        toolchain.prepare()
        for name in toolchain.optional:
            entries = toolchain.build({}, {name: ()}, 0, target).entries()
            assert len(entries) == 1 + len(toolchain.own)

    def test_what_is_loaded_does_the_same_without_a_compiler(
        self, toolchain, file, without_compiler
    ) -> None:
        without_compiler()
        toolchain.prepare()
        names = sorted(CALLS, reverse=True)
        loaded = toolchain.load(file, [*names, *toolchain.own])
        assert len(loaded) == len(names) + len(toolchain.own)
        check(dict(zip(names, loaded, strict=False)))

    def test_a_library_needs_no_one_else_to_live(self, toolchain, target, library, file) -> None:
        """Two loads are of their own; what was built still runs beside them."""
        first, second = toolchain.load(file, ["one"]), toolchain.load(file, ["both"])
        check({"one": first[0], "both": second[0]})
        del first
        check({"both": second[0], **dict(zip(CALLS, library.entries(), strict=False))})

    @pytest.mark.parametrize("damage", [b"", b"junk", b"\x7fELF" + bytes(64)], ids=len)
    def test_a_file_of_someone_else_is_corrupt(self, toolchain, tmp_path, damage) -> None:
        path = tmp_path / "graph.so"
        path.write_bytes(damage)
        with pytest.raises(exc.CorruptEntry):
            toolchain.load(path, ["one"])

    def test_a_file_without_the_entry_is_corrupt(self, toolchain, file) -> None:
        with pytest.raises(exc.CorruptEntry):
            toolchain.load(file, ["one", "none"])

    def test_entries_run_on_any_thread(self, library) -> None:
        failures: list[BaseException] = []

        def run() -> None:
            try:
                check(dict(zip(CALLS, library.entries(), strict=False)))
            except BaseException as err:  # for the test's own thread to raise
                failures.append(err)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]
