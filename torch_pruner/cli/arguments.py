"""What the commands share: arguments that set options, and a standard output that stays clean.

Imports neither torch nor TVM. Flags and ``--set`` are read by the same table as the environment,
so that a value means the same wherever it is written.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from typing import TYPE_CHECKING, Any

from torch_pruner.config import OPTIONS, Config
from torch_pruner.exc import OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Options with a flag of their own: flag, how its value is called, and help.
FLAGS = {
    "effort": ("--effort", "EFFORT", "how much tuning may cost: none, quick or full"),
    "time_budget_s": ("--time-budget", "SECONDS", "bound on tuning one graph"),
    "trials": ("--trials", "N", "bound on the candidates measured for one graph"),
    "threads": ("--threads", "N", "CPU threads of kernels and of torch"),
    "target": ("--target", "TARGET", "a GPU by its name (h200), or a TVM target as JSON"),
    "cache_dir": ("--cache-dir", "DIR", "the kernel cache to use"),
    "seed": ("--seed", "N", "seed of every random choice"),
    "executor": ("--executor", "WHERE", "where candidates are timed: local or rpc"),
    "tracker": ("--tracker", "HOST:PORT/KEY", "the tracker that --executor rpc asks for devices"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The flags of ``FLAGS``, and ``--set`` for every other option."""
    group = parser.add_argument_group("options of the backend")
    for name, (flag, value, text) in FLAGS.items():
        read = functools.partial(_read, name)
        group.add_argument(flag, dest=name, metavar=value, type=read, help=text)
    group.add_argument(
        "--set",
        dest="settings",
        metavar="OPTION=VALUE",
        type=_setting,
        action="append",
        default=[],
        help="any option of the backend, for example --set library=0; may be repeated",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """The switch that makes standard output a JSON document and nothing else."""
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options given on the command line; a flag wins over ``--set``.

    Raises OptionError as ``torch.compile`` would: for the environment, and for contradictions.
    """
    flags = {name: getattr(args, name) for name in FLAGS}
    given = {name: value for name, value in flags.items() if value is not None}
    options = dict(args.settings) | given
    Config.from_options(options=options)
    return options


def positive(text: str) -> int:
    """A count of at least 1, for ``type`` of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, not {text!r}")
    return int(text)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected OPTION=VALUE, not {text!r}")
    if name not in OPTIONS:
        problem = OptionError(name, "unknown option", known=tuple(OPTIONS))
        raise argparse.ArgumentTypeError(str(problem))
    return name, _read(name, value)


def _read(name: str, text: str) -> Any:
    try:
        return OPTIONS[name].read(text)
    except (TypeError, ValueError) as err:
        raise argparse.ArgumentTypeError(f"expected {err}, not {text!r}") from None


@contextlib.contextmanager
def clean_stdout(active: bool) -> Iterator[None]:
    """While active, what anyone prints to standard output goes to standard error.

    That is true of Python code, of C code and of child processes that start meanwhile.
    """
    if not active:
        yield
        return
    sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as stack:
        # A host program may have put objects in place of the files: then there is no more to do.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            out, err = sys.__stdout__.fileno(), sys.__stderr__.fileno()  # type: ignore[union-attr]
            kept = os.dup(out)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, out)
            os.dup2(err, out)
        yield
