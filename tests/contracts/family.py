"""What every kernel family promises."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from torch_pruner import families
from torch_pruner.families.sources import source_of
from torch_pruner.graph.reference import numpy_dtype
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from torch_pruner.families.base import Family
    from torch_pruner.task import Task

POINTS = 6


class FamilyContract:
    """Subclasses give fixtures: a ``family``, and a ``task`` that it matches."""

    @pytest.fixture
    def family(self) -> Family:
        raise NotImplementedError

    @pytest.fixture
    def task(self, family) -> Task:
        raise NotImplementedError

    @pytest.fixture
    def candidates(self, family, task) -> list[Candidate]:
        """Valid points of the space, spread evenly, with the default."""
        sketch = family.space()(task)
        full = np.stack(np.meshgrid(*sketch.domains, indexing="ij"), axis=-1)
        points = full.reshape(-1, len(sketch.names))
        points = points[sketch.valid(points)]
        some = points[np.linspace(0, len(points) - 1, min(POINTS, len(points))).astype(int)]
        named = [sketch.named(p) for p in [sketch.default(), *some]]
        return [Candidate(sketch.name, tuple(sorted(n.items()))) for n in named]

    def test_it_matches_and_is_found(self, family, task) -> None:
        assert family.matches(task)
        assert family.target_kind == task.target.kind
        assert families.named(family.name) is family
        assert family.name in [s.name for s in families.sketches_for(task)]

    def test_the_space_has_the_name_of_the_family(self, family, task) -> None:
        assert family.space().name == family.name
        assert family.space()(task).task is task

    def test_kernels_have_the_buffers_that_the_signature_says(
        self, family, task, candidates
    ) -> None:
        for candidate in candidates:
            signature = family.signature(task.spec, dict(candidate.decisions))
            kernel = family.schedule(task.spec, candidate, task.target)
            buffers = (*signature.inputs, *signature.outputs, *signature.scratch)
            taken = list(kernel.func.params)
            assert [max(1, int(np.prod(b.shape))) for b in buffers] == [
                int(b.shape[0]) for b in taken
            ]
            assert kernel.packs == signature.packs

    def test_serial_kernels_have_no_parallel_loop(self, family, task, candidates) -> None:
        """They run on one thread, or on each of them, within the launch of others."""
        from torch_pruner.codegen.build.region import parts_of

        for candidate in candidates:
            if family.serial(dict(candidate.decisions)):
                parts = parts_of(family.schedule(task.spec, candidate, task.target))
                assert all(part.tasks is None and not part.alone for _, part in parts)

    def test_packed_inputs_have_the_size_of_their_layout(self, family, task, candidates) -> None:
        for candidate in candidates:
            signature = family.signature(task.spec, dict(candidate.decisions))
            for node, buffer, layout in zip(
                task.spec.inputs, signature.inputs, signature.packs, strict=True
            ):
                if layout is None:
                    assert buffer.shape == task.spec.nodes[node].shape
                else:
                    of = task.spec.nodes[node]
                    given = np.zeros(of.shape, numpy_dtype(of.dtype))
                    assert layout.pack(given).shape == buffer.shape

    def test_emitting_twice_is_the_same_code(self, family, task, candidates) -> None:
        once, again = (family.schedule(task.spec, candidates[0], task.target) for _ in range(2))
        assert once.func.script() == again.func.script()

    def test_wrong_decisions_are_refused(self, family, candidates) -> None:
        decisions = dict(candidates[0].decisions)
        defaults = getattr(family.decisions, "_field_defaults", {})
        needed = next(name for name in decisions if name not in defaults)
        less = {name: value for name, value in decisions.items() if name != needed}
        for wrong in ({**decisions, "misspelt": 1}, less):
            with pytest.raises(ValueError, match=family.name):
                family.typed(wrong)

    def test_parameters_need_neither_tvm_nor_torch(self, family, task, candidates) -> None:
        """A warm start asks for them; one process per family shows that nothing is imported."""
        source = source_of(family)
        code = (
            "import json, sys\n"
            "from torch_pruner.families import sources\n"
            "from torch_pruner.graph.ir import Graph\n"
            "source, spec, decisions = json.loads(sys.stdin.read())\n"
            "family = sources.family_at(source)\n"
            "family.signature(Graph.from_json(spec), decisions)\n"
            "print([m for m in ('torch', 'tvm', 'tvm_ffi') if m in sys.modules])\n"
        )
        import json

        given = json.dumps([source, task.spec.to_json(), dict(candidates[0].decisions)])
        done = subprocess.run(
            [sys.executable, "-c", code], input=given, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "[]"
