"""Kinds of options: what each accepts in code and from the environment."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Option:
    """What one option accepts: ``parse`` takes a value given in code, ``read`` the environment's.

    Both raise ``TypeError`` or ``ValueError`` with what they expect.
    """

    expects: str
    parse: Callable[[Any], Any]
    read: Callable[[str], Any]


def choice(*names: str) -> Option:
    """One of ``names``."""
    expects = f"one of {', '.join(map(repr, names))}"

    def parse(value: Any) -> Any:
        if not isinstance(value, str) or value not in names:
            raise ValueError(expects)
        return value

    return Option(expects, parse, parse)


def boolean() -> Option:
    """Yes or no."""
    expects = "True or False"
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}

    def parse(value: Any) -> bool:
        if not isinstance(value, bool):
            raise TypeError(expects)
        return value

    def read(text: str) -> bool:
        if text.lower() not in words:
            raise ValueError("1 or 0 (or true, false)")
        return words[text.lower()]

    return Option(expects, parse, read)


def integer(least: int) -> Option:
    """A whole number of at least ``least``."""
    expects = f"an integer of at least {least}"

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(expects)
        return value

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text):
            raise ValueError(expects)
        return parse(int(text))

    return Option(expects, parse, read)


def number_of(*numbers: int) -> Option:
    """One of ``numbers``."""
    expects = f"one of {', '.join(map(str, numbers))}"

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value not in numbers:
            raise ValueError(expects)
        return value

    def read(text: str) -> int:
        if text not in map(str, numbers):
            raise ValueError(expects)
        return int(text)

    return Option(expects, parse, read)


def seconds() -> Option:
    """A number of seconds, not negative."""
    expects = "a number of seconds above 0"

    def parse(value: Any) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ValueError(expects)
        return float(value)

    def read(text: str) -> float:
        try:
            return parse(float(text))
        except ValueError:
            raise ValueError(expects) from None

    return Option(expects, parse, read)


def path() -> Option:
    """A path, with the home folder written out."""
    expects = "a path"

    def parse(value: Any) -> str:
        if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
            raise ValueError(expects)
        return os.path.abspath(os.path.expanduser(os.fsdecode(value)))

    return Option(expects, parse, parse)


def pattern(pattern: str, expects: str) -> Option:
    """Text that matches ``pattern`` as a whole."""

    def parse(value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise ValueError(expects)
        return value

    return Option(expects, parse, parse)


def target() -> Option:
    """What to compile for, as JSON with sorted keys."""
    expects = "'auto' or a TVM target as a dict with a 'kind'"

    def parse(value: Any) -> str:
        if value == "auto":
            return "auto"
        try:
            data = json.loads(value) if isinstance(value, str) else dict(value)
            text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        except (TypeError, ValueError):
            raise ValueError(expects) from None
        if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
            raise TypeError(expects)
        return text

    def read(text: str) -> str:
        """A word is the model of a GPU, "h200", or the one at hand: "cuda"."""
        if not re.fullmatch(r"cuda|orin|[a-z]+\d+", text.lower()):
            return parse(text)
        return parse({"kind": "cuda"} | ({} if text == "cuda" else {"model": text.lower()}))

    return Option(expects, parse, read)


def optional(option: Option) -> Option:
    """What ``option`` takes, or None."""
    return Option(
        f"{option.expects}, or None",
        lambda value: None if value is None else option.parse(value),
        lambda text: None if text.lower() == "none" else option.read(text),
    )


def or_auto(option: Option) -> Option:
    """What ``option`` takes, or ``"auto"``."""
    return Option(
        f"'auto', or {option.expects}",
        lambda value: value if value == "auto" else option.parse(value),
        lambda text: text if text == "auto" else option.read(text),
    )
