"""Reads the file of a model and the files beside it that hold its weights.

A model may come from anybody, and with it the archive that its folder was unpacked from. So what a
model calls its data is opened one component after another from a descriptor of the folder, no link
is followed, and only a regular file that has no other name is read: a link of either kind could
lead to a file of the user's, whose content would end up in the weights.
"""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from torch_pruner.exc import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FILE_BYTES = 2 << 30  # what a protobuf can be
_INSIDE = "external data lies in the model's folder"
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe without a writer must not block
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY


def content(path: Path) -> bytes:
    """The bytes of a model file. The path is the user's own, so links in it are followed.

    Raises:
        UnsupportedModel: There is no such file, it is not a regular one, or it is too large.
    """
    try:
        with os.fdopen(os.open(path, _OPEN), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UnsupportedModel(str(path), "this is not a regular file", "check the path")
            if found.st_size > MAX_FILE_BYTES:
                reason = f"the file has {found.st_size} bytes"
                raise UnsupportedModel(str(path), reason, "use external data")
            return file.read(found.st_size)
    except (OSError, ValueError) as err:  # the latter for what cannot be a path at all
        raise UnsupportedModel(str(path), _reason(err), "check the path") from err


class Folder:
    """The folder of one model, and what has been read from it.

    Every region of a file is read once. All that is read of a file together is at most twice what
    it holds, so that a small file cannot stand for large weights.
    """

    def __init__(self, model: str, path: Path) -> None:
        self._model, self._given = model, path.parent
        try:
            self._real: Path | None = path.resolve().parent
        except (OSError, RuntimeError, ValueError):
            self._real = None
        self._regions: dict[tuple[str, int, int], bytes] = {}
        self._read: dict[str, int] = {}

    def read(self, location: str, offset: int, size: int, what: str) -> bytes:
        """``size`` bytes at ``offset`` of a file, for ``what`` (a tensor, in messages).

        Raises:
            UnsupportedModel: The file lies elsewhere, is no plain file, or ends before that.
        """
        region = (location, offset, size)
        if region in self._regions:
            return self._regions[region]
        with self._opened(location, what) as descriptor:
            length = os.fstat(descriptor).st_size
            if offset + size > length:
                raise UnsupportedModel(self._model, f"{location!r} ends before {what}")
            self._read[location] = self._read.get(location, 0) + size
            if self._read[location] > 2 * length:
                raise UnsupportedModel(self._model, f"weights overlap in {location!r}")
            with os.fdopen(os.dup(descriptor), "rb") as file:
                file.seek(offset)
                data = file.read(size)
        if len(data) != size:
            raise UnsupportedModel(self._model, f"{location!r} ends before {what}")
        self._regions[region] = data
        return data

    @contextmanager
    def _opened(self, location: str, what: str) -> Iterator[int]:
        """A descriptor of the file that a model calls ``location``."""
        path = PurePosixPath(location)
        if not path.parts or path.is_absolute() or ".." in path.parts:
            raise self._elsewhere(location, what)
        try:
            with ExitStack() as stack:
                folder, parts = self._given, path.parts
                if (target := self._linked(path)) is not None and self._real is not None:
                    folder, parts = self._real, target
                descriptor = _descend(stack, folder, parts)
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise self._elsewhere(location, what)
                if found.st_nlink > 1:
                    reason = f"{what} is in {location!r}, a file with more than one name"
                    fix = "a hard link may lead out of the model's folder: copy the file"
                    raise UnsupportedModel(self._model, reason, fix)
                yield descriptor
        except (OSError, ValueError) as err:
            raise self._elsewhere(location, what, _reason(err)) from err

    def _linked(self, path: PurePosixPath) -> tuple[str, ...] | None:
        """Where a link leads, as parts below the folder that the model file itself lies in.

        Stores of models (Hugging Face's) show a folder of links into one folder with the model and
        its data. None for what is no link, or leads elsewhere; it is then opened as it is, and no
        link is followed.
        """
        if self._real is None:
            return None
        link = self._given / path
        if not link.is_symlink():
            return None
        parent = Path(os.path.realpath(link.parent))
        target = Path(os.path.normpath(parent / os.readlink(link)))
        if not target.is_relative_to(self._real):
            return None
        return target.relative_to(self._real).parts or None

    def _elsewhere(self, location: str, what: str, reason: str = "") -> UnsupportedModel:
        text = f"{what} is said to be in {location[:200]!r}" + (f" ({reason})" if reason else "")
        return UnsupportedModel(self._model, text, _INSIDE)


def _descend(stack: ExitStack, folder: Path, parts: tuple[str, ...]) -> int:
    """Opens ``parts`` below ``folder``, following no link; closed with the stack."""

    def kept(descriptor: int) -> int:
        stack.callback(os.close, descriptor)
        return descriptor

    at = kept(os.open(folder, _FOLDER))
    for part in parts[:-1]:
        at = kept(os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=at))
    return kept(os.open(parts[-1], _OPEN | os.O_NOFOLLOW, dir_fd=at))


def _reason(err: Exception) -> str:
    return (err.strerror if isinstance(err, OSError) else None) or str(err)
