"""``torch-pruner``: the parser, and how every command ends.

Exit status: 0, all kernels are tuned or checked; 1, some are not, or a check found something; 2,
wrong usage or unusable input, with the reason in one line; 130, interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from torch_pruner import __version__, exc, log
from torch_pruner.cli import (
    arguments,
    bench,
    bundle,
    cache,
    curve,
    doctor,
    explain,
    interrupts,
    tune,
)
from torch_pruner.config import Config

if TYPE_CHECKING:
    from collections.abc import Sequence

OK, INCOMPLETE, UNUSABLE, INTERRUPTED = 0, 1, 2, 130
# These say that kernels are missing; every other error of ours is about what was given.
_INCOMPLETE = (exc.CacheMiss, exc.CompileError, exc.MeasureError)
_logger = log.logger(__name__)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line and not below the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(UNUSABLE, f"{self.prog}: error: {message} (see `{self.prog} --help`)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    came = threading.Event()
    try:
        args = parser().parse_args(argv)
        with interrupts.prompt() as came:
            status = _run(args)
        sys.stdout.flush()
    except SystemExit as done:
        return int(done.code or OK)
    except BrokenPipeError:  # the reader (`| head`) has seen enough; Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INCOMPLETE
    except Exception as err:
        if (reason := _pruner_error(err)) is None:
            raise
        _logger.debug("the failure", exc_info=True)
        _say(next(iter(str(reason).splitlines()), type(reason).__name__))
        return INCOMPLETE if isinstance(reason, _INCOMPLETE) else UNUSABLE
    except KeyboardInterrupt as err:
        _say("; ".join(["interrupted", *(str(a) for a in err.args)]))
        if came.is_set():
            sys.stdout.flush()
            interrupts.leave()
        return INTERRUPTED
    return status


def _run(args: argparse.Namespace) -> int:
    """The command, with warnings of the package on standard error, or the log where asked for."""
    if args.command == "doctor":  # it has to work, and say what is wrong, where options do not fit
        return doctor.run(args)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("torch-pruner: %(message)s"))
    handler.setLevel(logging.WARNING)
    log.logger().addHandler(handler)
    try:
        if (level := Config.from_options().log) is not None:
            log.configure(level)
            handler.setLevel(logging.CRITICAL + 1)
        status: int = args.run(args)
        return status
    finally:
        log.logger().removeHandler(handler)


def _pruner_error(err: BaseException | None) -> exc.PrunerError | None:
    """The exception of ours that ``err`` is or wraps: torch wraps what a backend raises."""
    while err is not None and not isinstance(err, exc.PrunerError):
        err = err.__cause__ or err.__context__
    inner = getattr(err, "inner_exception", None)  # of one that is torch's, too
    return inner if isinstance(inner, exc.PrunerError) else err


def _say(reason: str) -> None:
    print(f"torch-pruner: {reason}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Every command with its arguments."""
    about = "Tune, inspect and look after kernels of torch.compile(model, backend='pruner')."
    root = _Parser(prog="torch-pruner", description=about, allow_abbrev=False)
    root.add_argument("--version", action="version", version=f"torch-pruner {__version__}")
    commands = root.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module, text in (
        ("tune", tune, "tune a model's kernels and keep them in the cache"),
        ("explain", explain, "what would be compiled, and why not; tunes and times nothing"),
        ("bench", bench, "latency beside eager and inductor, taking turns in one process"),
        ("cache", cache, "look into and look after the kernel cache"),
        ("bundle", bundle, "ship kernels of this device in one file"),
        ("curve", curve, "draw how latency fell with time and with trials"),
    ):
        module.add_arguments(
            commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        )
    text = "this machine: what is there, what is missing, and how to get it"
    checks = commands.add_parser("doctor", help=text, description=text, allow_abbrev=False)
    arguments.add_json(checks)
    checks.set_defaults(run=doctor.run)
    return root


if __name__ == "__main__":
    sys.exit(main())
