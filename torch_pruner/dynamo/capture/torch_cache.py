"""torch's own caches: AOTAutograd's, ``torch.compiler.save_cache_artifacts``, ``.aot_compile()``.

Knows their private names. Where a version of torch lacks them, ``riding`` does
nothing and AOTAutograd works as it does for any backend.

What AOTAutograd keeps is a ``SavedCall``, of which only bytes are written; it does not know which
backend wrote an entry, so its key gets a tag. A backward that torch compiles when it is first
called comes too late to be kept with its forward: such graphs are kept only if the user sets
``torch._functorch.config.force_non_lazy_backward_lowering``.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from torch_pruner.dynamo.lower.calls import forwarded
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue

    Compile = Callable[[fx.GraphModule, Sequence[RuntimeValue]], "SavedCall"]
    Restore = Callable[["SavedCall"], BoxedCall]

try:
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.autograd_cache import (
        BypassAOTAutogradCache,
        FXGraphCacheMiss,
    )
    from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
    from torch._inductor.output_code import OutputCode

    AVAILABLE = hasattr(functorch_config, "bundled_autograd_cache") and hasattr(
        torch.compiler.config, "cache_key_tag"
    )
except ImportError:  # another version of torch
    AVAILABLE = False
    OutputCode = object  # type: ignore[misc, assignment]
    BypassAOTAutogradCache = FXGraphCacheMiss = RuntimeError  # type: ignore[misc, assignment]

_log = logger(__name__)
# How a saved program is built; set while a graph is compiled.
_restore: contextvars.ContextVar[Restore | None] = contextvars.ContextVar("restore", default=None)
_default: list[Restore] = []


def _spare_inductor() -> None:
    """Keep keys from importing all of inductor's code generators: a second, and some megabytes.

    torch's key asks them for passes of the user's. They have none before somebody registers them,
    which imports them.
    """
    module = getattr(torch._inductor, "codecache", None)
    register = getattr(module, "init_backend_registration", None)
    if register is None or hasattr(register, "spared_by_pruner"):
        return

    @functools.wraps(register)
    def unless_ours() -> None:
        if _restore.get() is None:
            register()

    unless_ours.spared_by_pruner = True  # type: ignore[attr-defined]
    module.init_backend_registration = unless_ours  # type: ignore[union-attr]


class NotUsableError(FXGraphCacheMiss):
    """A saved program must not be used as it is: to AOTAutograd, an entry it does not have."""


@dataclass
class SavedCall(OutputCode):
    """A compiled graph as AOTAutograd's cache keeps it: a boxed callable, and what to write of it.

    ``blob=None`` is a graph that cannot be written down; ``why`` says what is in it. ``kind`` is
    "forward", "backward" or "inference", ``settings`` the options that it was compiled with;
    ``written`` are the inputs that the program of ``blob`` has new values of (``written_back``).
    """

    blob: bytes | None = None
    why: str = ""
    kind: str = "inference"
    settings: str = "{}"
    written: tuple[int, ...] = ()
    call: BoxedCall | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        # On the instance: torch wraps a backward and copies its __dict__ only.
        self._boxed_call = True

    if TYPE_CHECKING:

        def __call__(self, inputs: Sequence[RuntimeValue]) -> list[RuntimeValue]: ...

    else:
        __call__ = forwarded("call")

    def prepare_for_serialization(self) -> None:
        """On a copy, before it is written."""
        if self.blob is None:
            raise BypassAOTAutogradCache(f"torch_pruner cannot keep {self.why}")
        self.call = None

    def post_compile(
        self, _example_inputs: object, _constants: object, _graph_kwargs: object
    ) -> None:
        """After it was read: look its kernels up. Raises what keeps it from being used."""
        if self.call is None:
            self.call = (_restore.get() or _default[-1])(self)

    def set_triton_bundle(self, _bundle: object) -> None:
        """Nothing of Triton here."""


def set_default(restore: Restore) -> None:
    """How graphs are restored that torch loads outside of a compilation (``aot_compile``)."""
    _default[:] = [restore]


@contextlib.contextmanager
def riding(tag: str, restore: Restore) -> Iterator[Callable[[Compile], Callable[..., OutputCode]]]:
    """Inside, AOTAutograd keeps what compilers return that were passed through what is given.

    Args:
        tag: All that the result of a compilation depends on beside the graph.
        restore: From what was read to its call; raises ``NotUsableError`` to have the graph
            compiled instead.
    """
    if not AVAILABLE:
        yield lambda compile_fn: compile_fn
        return
    _spare_inductor()
    old = torch.compiler.config.cache_key_tag
    token = _restore.set(restore)
    try:
        with (
            torch.compiler.config.patch(cache_key_tag=f"{old}|pruner:{tag}"),  # type: ignore[attr-defined]
            functorch_config.patch(bundled_autograd_cache=True),
        ):
            yield lambda compile_fn: SerializableAOTDispatchCompiler(OutputCode, compile_fn)
    finally:
        _restore.reset(token)
