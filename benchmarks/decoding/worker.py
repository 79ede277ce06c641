"""One contestant in a process of its own, which decodes when it is told to.

A line of JSON on standard input is a command, a line on standard output the answer: ``ok`` with
what was asked for, or ``error`` with the reason. Whatever libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.decoding.contestants import CONTESTANTS
from benchmarks.decoding.decoder import Setting
from benchmarks.job import reason, timed

if TYPE_CHECKING:
    from benchmarks.decoding.decoder import Decoder


class Worker:
    """Its methods are the commands."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.setting = name, setting
        self.prompt = setting.prompt()
        self.left = 0  # tokens until the cache is full
        self.decoder: Decoder | None = None

    def checkpoint(self) -> dict[str, Any]:
        """Random weights, unless they are there, and eager's scores with them, rounded and not."""
        import numpy as np
        import torch

        from benchmarks.decoding import shapes

        of, path = self.setting, self.setting.checkpoint
        if path.exists():
            model = shapes.restored(of.model, of.layers, path, rounded=False)
        else:
            model = shapes.build(of.model, of.layers)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), path.with_suffix(".partial"))
            path.with_suffix(".partial").rename(path)
        for rounded in (False, True):
            if rounded:
                shapes.round_weights(model)
            with torch.no_grad():
                found = model(torch.tensor([self.prompt]), logits_to_keep=1).logits[0, -1]
            np.save(of.scores(rounded=rounded), found.numpy())
        return {}

    def convert(self) -> dict[str, Any]:
        convert = CONTESTANTS[self.name].convert
        if convert is not None:
            convert(self.setting)
        return {}

    def load(self) -> dict[str, Any]:
        """Ready to decode, one token included; how far its scores are from eager's."""
        import numpy as np

        contestant = CONTESTANTS[self.name]
        self.decoder, load_s = timed(lambda: contestant.load(self.setting))  # type: ignore[assignment]
        assert self.decoder is not None
        found = self.decoder.fill(self.prompt)
        exact = np.load(self.setting.scores(rounded=contestant.rounded))
        _, first_s = timed(self.decoder.step)
        self.left = self.setting.length - self.setting.start - 1
        return {
            "weight_bytes": self.decoder.weight_bytes,
            "difference": float(np.abs(found - exact).max() / np.abs(exact).max()),
            "load_s": load_s,
            "first_step_s": first_s,
        }

    def steps(self, wake: int, count: int) -> dict[str, Any]:
        """Seconds of ``count`` tokens after ``wake`` that are not timed."""
        assert self.decoder is not None
        if self.left < wake + count:
            self.decoder.rewind(self.prompt)
            self.left = self.setting.length - self.setting.start
        self.left -= wake + count
        return {"seconds": self.decoder.steps(wake + count)[wake:]}

    def prefill(self, tokens: int, wake: int, count: int) -> dict[str, Any]:
        """Seconds of ``count`` prompts of so many tokens, likewise."""
        assert self.decoder is not None
        prompt = self.setting.prompt(tokens)
        self.left = 0
        seconds = [self.decoder.prefill(prompt) for _ in range(wake + count)]
        return {"seconds": seconds[wake:]}

    def memory(self) -> dict[str, Any]:
        """Resident bytes now: all, and those that are not pages of files."""
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return {
            name: int(fields[field].split()[0]) * 1024
            for name, field in (("rss_bytes", "VmRSS"), ("anonymous_bytes", "RssAnon"))
        }


def serve(worker: Worker, commands: Any, answers: Any) -> None:
    """Until the input ends."""
    for line in commands:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(worker, command.pop("do"))(**command)}
        except Exception as error:  # a cell of the table
            traceback.print_exc()
            answer = {"error": reason(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    given = json.loads(sys.argv[1])
    setting = Setting(**given["setting"] | {"folder": Path(given["setting"]["folder"])})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Worker(given["name"], setting), sys.stdin, answers)


if __name__ == "__main__":
    main()
