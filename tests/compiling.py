"""Compiled functions for tests of the backend: untuned, strict, one kernel cache per session."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.compile.agreement import MakeArgs


class Backend:
    """``torch.compile`` with the tests' options: no tuning, and no falling back in silence."""

    def __init__(self, cache_dir: Path) -> None:
        self.cache_dir = cache_dir

    def options(self, **changes: Any) -> dict[str, Any]:
        return {"effort": "none", "strict": True, "cache_dir": str(self.cache_dir), **changes}

    def compile(
        self, fn: Any, *, dynamic: bool | None = None, fullgraph: bool = False, **options: Any
    ) -> Any:
        import torch

        # Dynamo keeps compiled code by code object, and parametrised tests share theirs.
        return torch.compile(
            fn,
            backend="pruner",
            dynamic=dynamic,
            fullgraph=fullgraph,
            options=self.options(**options),
        )

    def check(
        self,
        fn: Callable[..., Any],
        make_args: MakeArgs,
        *,
        dynamic: bool | None = None,
        **checks: Any,
    ) -> None:
        """Calls of a compiled function equal eager's."""
        from tests.compile.agreement import check

        check(self.compile(fn, dynamic=dynamic), fn, make_args, **checks)

    def check_module(self, module: Any, make_args: MakeArgs, **checks: Any) -> None:
        """As ``check``, for a module: also its parameters' gradients and its buffers."""
        from tests.compile.agreement import assert_equal, check

        twin = copy.deepcopy(module)
        check(self.compile(module), twin, make_args, **checks)
        mine, theirs = dict(module.named_buffers()), dict(twin.named_buffers())
        mine |= {f"{n}.grad": p.grad for n, p in module.named_parameters()}
        theirs |= {f"{n}.grad": p.grad for n, p in twin.named_parameters()}
        for name in theirs:
            assert_equal(mine[name], theirs[name], name, checks.get("tolerance"))


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests that do not look into it: a kernel is built once.

    The processes of pytest-xdist share it: their folders are in the run's.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    path = base / "shared-cache"
    path.mkdir(exist_ok=True)
    return path


@pytest.fixture
def backend(shared_cache: Path) -> Backend:
    """The backend on the session's cache."""
    return Backend(shared_cache)


@pytest.fixture
def cold(tmp_path: Path) -> Backend:
    """The backend on an empty cache."""
    return Backend(tmp_path / "cold-cache")
