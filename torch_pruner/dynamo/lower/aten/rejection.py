"""Why an operator is left to eager: a closed set of kinds and a sentence for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RejectionKind(StrEnum):
    """What about a node could not be expressed in the graph IR."""

    UNSUPPORTED_OP = "unsupported_op"
    DYNAMIC_SHAPE = "dynamic_shape"
    DTYPE = "dtype"
    RANDOM = "random"
    MUTATION = "mutation"
    LAYOUT = "layout"
    EMPTY = "empty"
    DEVICE = "device"
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Rejection:
    """One operator that eager runs. ``detail`` is a sentence that a user can act on."""

    node: str
    kind: RejectionKind
    detail: str

    def __str__(self) -> str:
        return f"{self.node}: {self.detail} [{self.kind}]"


class Unsupported(Exception):
    """Raised by an operator rule that cannot express this use of the operator."""

    def __init__(self, kind: RejectionKind, detail: str) -> None:
        super().__init__(detail)
        self.kind, self.detail = kind, detail

    def __reduce__(self) -> tuple[type, tuple[RejectionKind, str]]:
        return type(self), (self.kind, self.detail)


def arguments(detail: str) -> Unsupported:
    """The refusal for an argument value that no rule covers."""
    return Unsupported(RejectionKind.ARGUMENTS, detail)
