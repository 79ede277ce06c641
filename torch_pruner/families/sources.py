"""Where families of users are defined, so that the processes that build candidates find them, too.

A source is text: the module or, for a script, the file, and the name of the class in it. Sources go
from a process to its own children alone; nothing that comes from a file or a network is one.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from torch_pruner.families.base import Family

SCRIPT = "torch_pruner_script"  # the name of a parent's script in a child: not "__main__"


def source_of(family: Family) -> dict[str, str]:
    """The source of a family. Raises ``ValueError`` where another process could not find it."""
    kind = type(family)
    if "." in kind.__qualname__:
        raise ValueError(f"{kind.__qualname__}: other processes find classes of a module alone")
    module, file = kind.__module__, ""
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None:  # python -m
            module = spec.name
        elif path is not None and Path(path).is_file():
            module, file = SCRIPT, str(Path(path).resolve())
        else:
            raise ValueError(f"put {kind.__qualname__} into a file: other processes need it")
    elif module == SCRIPT:
        file = str(sys.modules[SCRIPT].__file__)
    return {"module": module, "file": file, "name": kind.__qualname__}


def family_at(source: Mapping[str, str]) -> Family:
    """A family of that source, made anew. Raises whatever importing it raises."""
    family: Family = getattr(_module(source), source["name"])()
    return family


def _module(source: Mapping[str, str]) -> ModuleType:
    name, file = source["module"], source["file"]
    if not file:
        return importlib.import_module(name)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        with contextlib.ExitStack() as unless_run:
            unless_run.callback(sys.modules.pop, name)
            spec.loader.exec_module(module)
            unless_run.pop_all()
    return sys.modules[name]
