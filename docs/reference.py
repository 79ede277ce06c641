"""Writes docs/reference.md from the docstrings of the public interface.

    python docs/reference.py            # write the page
    python docs/reference.py --check    # exit status 1 if it is not what the code says

What is public: ``torch_pruner.__all__``, ``torch_pruner.onnx.__all__``, the exceptions, the seams
that users subclass, and the options.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("reference.md")
HEAD = """# Reference

Written by `python docs/reference.py` from the docstrings. The options of
`torch.compile(model, backend="pruner", options={...})` are in [env.md](env.md), the commands in
[cli.md](cli.md).
"""
SECTIONS = (
    ("The package", "torch_pruner", None),
    ("What a report holds", "torch_pruner.report", ("GraphReport", "TaskReport", "OpFallback")),
    (
        "What an explanation holds",
        "torch_pruner.dynamo.explanation",
        ("Explanation", "GraphExplanation", "TaskExplanation"),
    ),
    ("ONNX", "torch_pruner.onnx", None),
    ("Exceptions", "torch_pruner.exc", None),
    (
        "Search spaces and kernels of one's own",
        "torch_pruner.families",
        ("use_space", "drop_space", "use_family", "drop_family"),
    ),
    ("What a search space is", "torch_pruner.families.space", ("Sketch", "Symbols")),
    ("What a kernel family is", "torch_pruner.families.base", ("Family", "Parameters")),
    ("Searches", "torch_pruner.tuner.search.base", ("SearchStrategy",)),
    ("Cost models", "torch_pruner.tuner.cost_model.base", ("CostModel",)),
    ("Measuring", "torch_pruner.tuner.measure.base", ("MeasureExecutor", "EvaluatorSpec")),
    ("Meters of energy", "torch_pruner.tuner.measure.meter", ("Meter",)),
)


def page() -> str:
    parts = [HEAD]
    for title, module, names in SECTIONS:
        parts.append(f"## {title}\n")
        owner = importlib.import_module(module)
        parts.extend(f"{entry}\n" for entry in _entries(owner, names))
    return "\n".join(parts).rstrip() + "\n"


def _entries(owner: Any, names: tuple[str, ...] | None) -> list[str]:
    if names is None:
        names = getattr(owner, "__all__", None) or tuple(
            name for name, value in vars(owner).items() if _own_class(owner, name, value)
        )
    found = []
    for name in names:
        value = getattr(owner, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            found.append(_entry(owner.__name__, name, value))
    return found


def _own_class(owner: Any, name: str, value: Any) -> bool:
    return inspect.isclass(value) and value.__module__ == owner.__name__ and name[0] != "_"


def _entry(module: str, name: str, value: Any) -> str:
    head = f"### `{module}.{name}`\n"
    if inspect.isfunction(value):
        return f"{head}\n{_code(name, value)}\n{_text(value)}"
    bases = [b.__name__ for b in value.__bases__ if b not in (object, Exception)]
    lines = [head, _text(value)]
    if bases and "ABC" not in bases:
        lines.insert(1, f"A `{'`, `'.join(bases)}`.\n")
    if dataclasses.is_dataclass(value):
        rows = [f"* `{f.name}: {_type(f.type)}`" for f in dataclasses.fields(value)]
        lines.append("\n".join(rows) + "\n")
    lines += [_member(name, n, m) for n, m in vars(value).items() if _is_shown(n, m)]
    return "\n".join(line for line in lines if line)


def _is_shown(name: str, member: Any) -> bool:
    called = isinstance(member, (staticmethod, classmethod, property)) or inspect.isfunction(member)
    told = bool(_doc(member)) or getattr(member, "__isabstractmethod__", False)
    return called and not name.startswith("_") and told


def _member(owner: str, name: str, member: Any) -> str:
    if isinstance(member, property):
        return f"`{owner}.{name}` (property)\n\n{_text(member)}"
    return f"{_code(f'{owner}.{name}', getattr(member, '__func__', member))}\n{_text(member)}"


def _code(name: str, function: Any) -> str:
    return f"```python\n{name}{_signature(function)}\n```\n"


class _Bare(str):
    """An annotation as it is written, without quotation marks."""

    __slots__ = ()
    __repr__ = str.__str__


def _signature(function: Any) -> str:
    given = inspect.signature(function)
    bare = [p.replace(annotation=_bare(p.annotation)) for p in given.parameters.values()]
    text = str(given.replace(parameters=bare, return_annotation=_bare(given.return_annotation)))
    if len(text) < 88:
        return text
    inside, _, result = text[1:].rpartition(") ->")
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(inside):
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            parts.append(inside[start:at].strip())
            start = at + 1
    parts.append(inside[start:].strip())
    return "(\n" + "".join(f"    {p},\n" for p in parts) + f") ->{result}"


def _bare(annotation: Any) -> Any:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")


def _doc(value: Any) -> str:
    return inspect.cleandoc(getattr(value, "__doc__", None) or "")


def _text(value: Any) -> str:
    """A docstring as Markdown: double backquotes become single, sections become lists."""
    text, _, example = _doc(value).partition("\nExample:\n")
    text = text.rstrip().replace("``", "`")
    text = re.sub(r"^(Args|Raises|Returns|Attributes):$", r"**\1:**\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ {4}(\*{0,2}\w+): ", r"* `\1`: ", text, flags=re.MULTILINE)
    text = re.sub(r"^ {8}", "  ", text, flags=re.MULTILINE)
    shown = f"\n\n```python\n{textwrap.dedent(example).strip()}\n```" if example else ""
    return f"{text}{shown}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    text = page()
    if options.check:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
