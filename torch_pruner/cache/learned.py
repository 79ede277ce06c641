"""Files of cost models' weights, one for each kind of target, beside the kernels.

In: bytes. Out: the same bytes, or None. A file appears complete or not at all; whoever writes last
wins. What the bytes mean, and whether they are sound, is the reader's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torch_pruner.cache.files import read_bounded, written_whole
from torch_pruner.cache.location import Layout, make_private

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES: Final = 4 << 20
SUFFIX: Final = ".safetensors"


def path_of(root: Path, name: str) -> Path:
    return Layout(root).home / "models" / f"{name}{SUFFIX}"


def read(path: Path) -> bytes | None:
    """The content, or None where there is no file. Raises OSError for one that is too large, or no
    regular file."""
    try:
        return read_bounded(path, MAX_BYTES, follow=False)
    except FileNotFoundError:
        return None


def write(path: Path, content: bytes) -> None:
    """Put ``content`` in place. Raises OSError; the cache's directory must exist."""
    if len(content) > MAX_BYTES:
        raise OSError(f"{len(content)} bytes are more than {MAX_BYTES}")
    make_private(path.parent)
    with written_whole(path) as file:
        file.write(content)
