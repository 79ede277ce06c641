"""The lines of random programs (``tests.suites.programs``), each run in eager as it is chosen."""

from __future__ import annotations

import linecache
import random
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.suites.program_templates import TEMPLATES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 20, 31, 32, 33, 48)
LINES, TRIES, RESULTS = (6, 18), 20, 5
LATER = 2  # more sizes than those of the first call, where they change
LARGEST, MOST = 1e3, 1 << 16  # of a value's numbers, and how many it has
HALVES = ("bfloat16", "float16")
REGION = 'torch.autocast("cpu", torch.bfloat16)'
OUTSIDE = 'torch.autocast("cpu", enabled=False)'
CAST = re.compile(r"\.(float|half)\(\)|\.to\(torch\.b?float\d\d\)")


@dataclass
class Program:
    """Lines, and what they begin with: shapes and dtypes of arguments, shapes of parameters.

    ``later``: shapes of the arguments in calls after the first, where they are others then.
    ``autocast``: whether the lines stand in a region of ``torch.autocast``.
    """

    number: int
    given: list[tuple[tuple[int, ...], str]]
    gradients: bool
    later: list[list[tuple[int, ...]]] = field(default_factory=list)
    autocast: bool = False
    parameters: list[tuple[int, ...]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        names = ", ".join(f"x{k}" for k in range(len(self.given)))
        body = [*self.lines, f"return {', '.join(self.results)},"]
        if self.autocast:
            body = [f"with {REGION}:", *(f"    {line}" for line in body)]
        return "\n    ".join([f"def forward(self, {names}):", *body]) + "\n"

    @property
    def narrow(self) -> bool:
        """Whether something has half of a float's bits."""
        words = [*self.lines, *(dtype for _, dtype in self.given)]
        halves = any(half in word for word in words for half in (*HALVES, ".half()"))
        return halves or self.autocast

    def numbers(self, k: int) -> torch.Tensor:
        """Of a parameter."""
        shape, generator = self.parameters[k], torch.Generator().manual_seed(self.number + k)
        deep = shape[-1] if len(shape) > 1 else 1
        return torch.randn(shape, generator=generator) / deep**0.5

    def module(self, *, double: bool = False) -> Any:
        """``double``: all in double precision, whatever lines say."""
        name, text = f"<program {self.number}>", self.text
        if double:
            text = CAST.sub(".double()", text).replace(REGION, OUTSIDE)
            name = f"{name[:-1]}, double>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
        exec(compile(text, name, "exec"), space)
        module = type("Program", (torch.nn.Module,), {"forward": space["forward"]})()
        for k in range(len(self.parameters)):
            parameter = torch.nn.Parameter(self.numbers(k), self.gradients)
            module.register_parameter(f"p{k}", parameter)
        return module.double().eval() if double else module.eval()

    def arguments(self, call: int, *, double: bool = False) -> tuple[Any, ...]:
        """Of one of the calls; ``double``: the same numbers in double precision."""
        generator = torch.Generator().manual_seed(1000 * self.number + call)
        found: list[torch.Tensor] = []
        shapes = [[shape for shape, _ in self.given], *self.later]
        now = shapes[call % len(shapes)]
        for shape, (_, dtype) in zip(now, self.given, strict=True):
            if dtype == "int64":
                found.append(torch.randint(0, 4, shape, generator=generator))
            elif dtype == "bool":
                found.append(torch.rand(shape, generator=generator) < 0.5)
            else:
                numbers = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
                numbers = numbers.double() if double else numbers
                found.append(numbers.requires_grad_(self.gradients and not found))
        return tuple(found)


class Writer:
    """Writes the program of a number; one of sizes that change if ``changing``, some of which the
    first argument has in later calls. Every line runs with all of them.
    """

    def __init__(self, number: int, *, changing: bool = False, autocast: bool = False) -> None:
        self.draw, self.made = random.Random(number), 0
        batch, many = self.size(4), [self.size() for _ in range(3)]
        shape = self.draw.choice([(batch, *many[:2]), (batch, *many), (*many[:2],), (many[0],)])
        dtype = self.draw.choices(["float32", *HALVES, "float64"], [14, 3, 1, 1])[0]
        parts, given = [slice(None)], [(shape, dtype)]
        for _ in range(self.draw.choice([0, 1, 1, 2])):
            part = self.draw.choice([slice(None), slice(-1, None), slice(-2, None), None])
            parts.append(part)
            given.append(
                (_part(shape, part), self.draw.choices([dtype, "int64", "bool"], [6, 1, 1])[0])
            )
        self.program = Program(number, given, self.draw.random() < 0.5, autocast=autocast)
        if changing:
            others = self._others(shape)
            self.program.later = [[_part(other, part) for part in parts] for other in others]
        self.values: dict[str, torch.Tensor] = {}
        self.others: list[dict[str, torch.Tensor]] = []  # the same with sizes of later calls

    def _others(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Two more shapes, with one or two of the sizes changed in both. A size of one stays."""
        places = [k for k, size in enumerate(shape) if size > 1]
        chosen = self.draw.sample(places, min(len(places), self.draw.choice([1, 1, 2])))
        sizes = [s for s in SIZES if s > 1]
        return [
            tuple(self.draw.choice(sizes) if k in chosen else size for k, size in enumerate(shape))
            for _ in range(LATER)
        ]

    def write(self) -> Program:
        program = self.program
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=program.autocast):
            self.values, *self.others = (
                {f"x{k}": x.detach() for k, x in enumerate(program.arguments(call))}
                for call in range(1 + len(program.later))
            )
            for _ in range(self.draw.randint(*LINES)):
                self._line()
        made = [name for name in self.values if name.startswith("v")] or ["x0"]
        text = "\n".join(program.lines)
        last = [name for name in made if len(re.findall(rf"\b{name}\b", text)) <= 1]
        program.results = (last or made)[-RESULTS:]
        return program

    def _line(self) -> None:
        """One more line, if there is one that can be run."""
        parameters, name = self.program.parameters, f"v{self.made}"
        for _ in range(TRIES):
            before = len(parameters)
            try:
                found = self.draw.choice(TEMPLATES)(self)
                line = found.text if found.writes else f"{name} = {found.text}"
                fine = self._runs(line, "" if found.writes else name)
            except (RuntimeError, LookupError, ValueError, TypeError):
                fine = False
            if fine:
                self.made += not found.writes
                self.program.lines.append(line)
                return
            del parameters[before:]

    def _runs(self, line: str, name: str) -> bool:
        """Run a line, which makes the value ``name`` or writes into some; whether what comes of it
        has numbers of an ordinary size. Raises what the line raises."""
        own = {f"p{k}": self.program.numbers(k) for k in range(len(self.program.parameters))}
        known = {"torch": torch, "F": torch.nn.functional, "self": SimpleNamespace(**own)}
        every, made = [self.values, *self.others], []
        for values in every:
            tried = known | (values if name else {k: v.clone() for k, v in values.items()})
            exec(line, tried)
            if not all(_ordinary(tried[k]) for k in ([name] if name else values)):
                return False
            made.append(tried)
        for values, tried in zip(every, made, strict=True):
            if name:
                values[name] = tried[name]
            else:  # again, into memory that values share
                exec(line, known | values)
        return True

    def size(self, most: int = SIZES[-1]) -> int:
        return self.draw.choice([s for s in SIZES if s <= most])

    def pick(
        self, wanted: Callable[[torch.Tensor], bool] = lambda _: True, *, floats: bool = True
    ) -> str:
        """A value, rather a late one. Raises ``LookupError`` where there is none."""
        names = [
            name
            for name, value in self.values.items()
            if value.is_floating_point() == floats and wanted(value)
        ]
        if not names:
            raise LookupError
        return names[-1 - min(int(self.draw.expovariate(0.7)), len(names) - 1)]

    def parameter(self, shape: Sequence[int], like: str) -> str:
        """A new parameter, as what is of the dtype of a value."""
        self.program.parameters.append(tuple(shape))
        cast = "" if self.values[like].dtype == torch.float32 else f".to({like}.dtype)"
        return f"self.p{len(self.program.parameters) - 1}{cast}"

    def dim(self, name: str) -> int:
        rank = self.values[name].dim()
        return self.draw.randrange(-rank, rank) if rank else 0

    def filled(self, patterns: Sequence[str], *names: str) -> str:
        """One of some patterns, with values for a, b and c, and numbers for what else it names."""
        b, c = (names[k % len(names)] for k in (1, 2))
        return self.draw.choice(patterns).format(
            a=names[0], b=b, c=c, d=self.dim(names[0]), e=self.dim(names[0]),
            n=self.draw.choice([1, 2, 3]),
        )  # fmt: skip


def _part(shape: tuple[int, ...], part: slice | None) -> tuple[int, ...]:
    """Some of the sizes; None: all, but one in front."""
    return (1, *shape[1:]) if part is None else shape[part]


def _ordinary(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_complex() or value.dim() > 5:
        return False
    if not 0 < value.numel() <= MOST:
        return False
    return not value.is_floating_point() or bool((value.abs() < LARGEST).all())
