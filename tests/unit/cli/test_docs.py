"""docs/cli.md and README.md name what the parser knows, and nothing else; links of pages work."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torch_pruner
from torch_pruner import exc
from torch_pruner.cli.main import parser
from torch_pruner.config import OPTIONS

ROOT = Path(__file__).parents[3]
CLI = (ROOT / "docs" / "cli.md").read_text()
README = (ROOT / "README.md").read_text()


def subparsers(parent: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parent._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def flags(parent: argparse.ArgumentParser) -> set[str]:
    own = {flag for action in parent._actions for flag in action.option_strings}
    return own.union(*(flags(sub) for sub in subparsers(parent).values()))


def test_every_command_is_described() -> None:
    commands = subparsers(parser())
    wanted = {f"`{name}" for name in commands if name != "cache"}
    wanted |= {f"`cache {name}" for name in subparsers(commands["cache"])}
    assert not [name for name in wanted if name not in CLI]


def test_every_flag_is_described_and_exists() -> None:
    known = flags(parser())
    mentioned = set(re.findall(r"(?<![\w-])(?:--[a-z][a-z-]+|-[a-z](?![\w-]))", CLI))
    assert mentioned <= known
    assert known - mentioned <= {"-h", "--help", "--version"}


@pytest.mark.parametrize("text", [README, CLI], ids=["README", "cli"])
def test_commands_in_the_text_parse(text: str) -> None:
    lines = re.findall(r"^torch-pruner ([^#\n]+)", text, re.MULTILINE)
    lines += re.findall(r"`torch-pruner ((?:tune|cache|bench|explain) [^`]+)`", text)
    for line in lines:
        parser().parse_args(line.split())


def test_options_in_the_readme_exist() -> None:
    table = README.split("## Options")[1].split("## Cache")[0]
    named = re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
    assert named
    assert {n for row in named for n in re.findall(r"`(\w+)`", row)} <= set(OPTIONS)


def test_the_figures_have_a_place() -> None:
    begin, end = "<!-- figures:begin -->", "<!-- figures:end -->"
    assert README.index(begin) < README.index(end)


def test_links_lead_somewhere() -> None:
    folders = (ROOT, ROOT / "docs", ROOT / "examples", ROOT / "benchmarks")
    for page in (page for folder in folders for page in folder.glob("*.md")):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_examples_are_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    assert not [p.name for p in (ROOT / "examples").glob("*.py") if f"`{p.name}`" not in listed]


def test_the_reference_is_what_the_docstrings_say() -> None:
    script = ROOT / "docs" / "reference.py"
    assert subprocess.run([sys.executable, script, "--check"], cwd=ROOT).returncode == 0


def examples() -> dict[str, str]:
    """The code that the reference shows for each public class and function, by its name."""
    found = {}
    for entry in (ROOT / "docs" / "reference.md").read_text().split("\n### ")[1:]:
        name = entry.split("`")[1]
        blocks = re.findall(r"```python\n(.*?)```", entry, re.DOTALL)
        found[name] = next((b for b in blocks if not re.match(r"[\w.]+\([^`]*\) -> ", b)), "")
    return found


@pytest.mark.parametrize(("name", "code"), examples().items(), ids=lambda v: v.split("\n")[0][:60])
def test_whatever_is_public_has_an_example(name: str, code: str) -> None:
    assert code, "its docstring wants an `Example:`"
    tree = ast.parse(code)
    for node in ast.walk(tree):  # what it names of ours is there
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"torch_pruner": torch_pruner, "exc": exc}.get(node.value.id)
            assert owner is None or hasattr(owner, node.attr)
