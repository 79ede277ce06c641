"""The lines of random programs (``tests.suites.programs``), each run in eager as it is chosen."""

from __future__ import annotations

import linecache
import random
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 20, 31, 32, 33, 48)
LINES, TRIES, RESULTS, PARTS = (6, 18), 20, 5, 64
LARGEST, MOST, DEEPEST = 1e3, 1 << 16, 512  # of a value's numbers, how many it has, of a product
HALVES = ("bfloat16", "float16")
CAST = re.compile(r"\.(float|half)\(\)|\.to\(torch\.b?float\d\d\)")


class Line(NamedTuple):
    """What is computed, or done: ``writes`` into values that are there."""

    text: str
    writes: bool = False


@dataclass
class Program:
    """Lines, and what they begin with: shapes and dtypes of arguments, shapes of parameters."""

    number: int
    given: list[tuple[tuple[int, ...], str]]
    gradients: bool
    parameters: list[tuple[int, ...]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        names = ", ".join(f"x{k}" for k in range(len(self.given)))
        body = "\n    ".join([*self.lines, f"return {', '.join(self.results)},"])
        return f"def forward(self, {names}):\n    {body}\n"

    @property
    def narrow(self) -> bool:
        """Whether something has half of a float's bits."""
        words = [*self.lines, *(dtype for _, dtype in self.given)]
        return any(half in word for word in words for half in (*HALVES, ".half()"))

    def numbers(self, k: int) -> torch.Tensor:
        """Of a parameter."""
        shape, generator = self.parameters[k], torch.Generator().manual_seed(self.number + k)
        deep = shape[-1] if len(shape) > 1 else 1
        return torch.randn(shape, generator=generator) / deep**0.5

    def module(self, *, double: bool = False) -> Any:
        """``double``: all in double precision, whatever lines say."""
        name, text = f"<program {self.number}>", self.text
        if double:
            name, text = f"{name[:-1]}, double>", CAST.sub(".double()", text)
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
        for shape, dtype in self.given:
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
    """Writes the program of a number."""

    def __init__(self, number: int) -> None:
        self.draw, self.made = random.Random(number), 0
        batch, many = self.size(4), [self.size() for _ in range(3)]
        shape = self.draw.choice([(batch, *many[:2]), (batch, *many), (*many[:2],), (many[0],)])
        dtype = self.draw.choices(["float32", *HALVES, "float64"], [14, 3, 1, 1])[0]
        given = [(shape, dtype)]
        for _ in range(self.draw.choice([0, 1, 1, 2])):
            other = self.draw.choice([shape, shape[-1:], shape[-2:], (1, *shape[1:])])
            given.append((other, self.draw.choices([dtype, "int64", "bool"], [6, 1, 1])[0]))
        self.program = Program(number, given, self.draw.random() < 0.5)
        self.values: dict[str, torch.Tensor] = {}

    def write(self) -> Program:
        program = self.program
        with torch.no_grad():
            self.values = {f"x{k}": x.detach() for k, x in enumerate(program.arguments(0))}
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
        tried = known | (self.values if name else {k: v.clone() for k, v in self.values.items()})
        exec(line, tried)
        if not all(_ordinary(tried[k]) for k in ([name] if name else self.values)):
            return False
        if name:
            self.values[name] = tried[name]
        else:  # again, into memory that values share
            exec(line, known | self.values)
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


def _ordinary(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_complex() or value.dim() > 5:
        return False
    if not 0 < value.numel() <= MOST:
        return False
    return not value.is_floating_point() or bool((value.abs() < LARGEST).all())


UNARY = (
    "torch.relu({a})", "torch.tanh({a})", "torch.sigmoid({a})", "F.gelu({a})", "F.silu({a})",
    "F.gelu({a}, approximate='tanh')", "{a}.abs()", "-{a}", "torch.exp({a} * 0.3)", "F.mish({a})",
    "torch.erf({a})", "torch.log1p({a}.abs())", "torch.sqrt({a}.abs() + 0.1)", "{a} * 0.5 + 1",
    "1 / ({a}.abs() + 0.5)", "{a}.clamp(-0.7, 1.2)", "F.softplus({a})", "F.hardswish({a})",
    "F.leaky_relu({a}, 0.1)", "{a} ** 2", "torch.rsqrt({a} * {a} + 1)", "F.elu({a})",
    "{a}.contiguous()", "{a}.clone()", "torch.where({a} > 0, {a}, 0.1)", "torch.cos({a}) + 1",
    "torch.sin({a})",
)  # fmt: skip
BINARY = (
    "{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / ({b}.abs() + 1)", "torch.maximum({a}, {b})",
    "torch.minimum({a}, {b})", "torch.lerp({a}, {b}, 0.3)", "torch.hypot({a}, {b} + 0.1)",
    "torch.addcmul({a}, {b}, {c})", "torch.where({a} > {b}, {b}, {c})", "{a} * torch.sigmoid({b})",
    "torch.atan2({a}, {b}.abs() + 1)", "torch.logaddexp({a}, {b})",
)  # fmt: skip
REDUCED = (
    "{a}.sum({d})", "{a}.mean({d}, keepdim=True)", "{a}.amax({d})", "{a}.amin({d}, keepdim=True)",
    "{a}.var({d}, unbiased=False)", "{a}.std({d}, keepdim=True, unbiased=False) + {a}",
    "torch.logsumexp({a}, {d})", "{a}.softmax({d})", "{a}.log_softmax({d})", "{a}.cumsum({d})",
    "{a}.norm(dim={d})", "F.normalize({a}, dim={d})", "{a}.sum()", "{a}.mean(({d}, {e}))",
    "{a} - {a}.mean({d}, keepdim=True)", "{a} / ({a}.norm(dim={d}, keepdim=True) + 1)",
    "{a}.argmax({d}).to({a}.dtype)", "({a} > 0).sum({d})", "({a} > 0).any({d})", "{a}.prod({d})",
    "{a}.flip({d}).cumsum({d})", "{a}.softmax({d}) * {a}", "{a}.mean(({d}, {e}), keepdim=True)",
)  # fmt: skip
VIEWS = (
    "{a}.transpose({d}, {e})", "{a}.unsqueeze({d})", "{a}.flip({d})", "{a}.flatten()",
    "{a}.roll({n}, {d})", "{a}.narrow({d}, 0, 1)", "{a}.select({d}, -1)", "{a}.movedim({d}, {e})",
    "{a}[..., 1:]", "{a}[..., ::2]", "{a}[:1]", "{a}[-1]", "{a}[..., None]", "{a}.mT",
    "torch.cat([{a}, {a}], {d})", "torch.stack([{a}, {a}], {d})", "{a}.repeat_interleave(2, {d})",
    "{a}.chunk(2, {d})[0]",
    "F.pad({a}, (1, 2))", "F.pad({a}, (-1, 1), value=0.5)", "{a}.tril()", "{a}.triu(1)",
    "{a}.expand(2, *{a}.shape)", "{a}.tile(2)", "{a}.squeeze()", "{a}.reshape(-1)", "{a}.view(-1)",
    "{a}.diagonal(0, -2, -1)", "{a}.unfold({d}, 2, 1)", "{a}[:, [0, -1]]",
    "{a}.index_select({d}, torch.tensor([0, 0]))", "{a}.swapaxes(0, -1).contiguous()",
    "torch.cat([{a}[..., 1:], {a}[..., :1]], -1)", "{a}.masked_fill({a} > 0.5, -1.0)",
    "{a}.triu() + {a}.tril(-1)", "{a}.unflatten(-1, (2, -1))", "{a}.flatten(-2)",
)  # fmt: skip
CASTS = (
    "{a}.to(torch.bfloat16)", "{a}.to(torch.float32)", "{a}.double()", "{a}.float()", "({a} > 0)",
    "({a} > 0).float()", "{a}.half()",
)  # fmt: skip
WRITES = (
    "{a}.add_({b})", "{a}.mul_(0.5)", "{a}.copy_({b})", "{a}[..., 0] = 0.25", "{a}[:1] = {a}[-1:]",
    "{a}[..., 1:].mul_({b}[..., 1:].sigmoid())", "{a}.clamp_(-1, 1)", "{a}.relu_()",
    "{a}[0] += {b}[-1]", "{a}.mT.mul_(2)", "{a}.view(-1)[:2] = 1.0", "{a}.neg_()", "{a}.fill_(0.3)",
    "{a}.sub_({b}.mean())", "{a}.masked_fill_({a} > 0, 0.1)", "{a}.transpose(0, -1).add_(1)",
    "{a}.zero_()", "{a}[..., ::2] = {b}[..., ::2]", "{a}.index_fill_({d}, torch.tensor([0]), 0.7)",
)  # fmt: skip


def _of_one(patterns: Sequence[str]) -> Callable[[Writer], Line]:
    return lambda w: Line(w.filled(patterns, w.pick()))


def _of_several(w: Writer) -> Line:
    return Line(w.filled(BINARY, w.pick(), w.pick(), w.pick()))


def _joined(w: Writer) -> Line:
    patterns = ["torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}], {d})", "{a} + {b}.mT"]
    return Line(w.filled(patterns, w.pick(), w.pick()))


def _parted(w: Writer) -> Line:
    patterns = ["{a}.unbind({d})[-1]", "{a}.split({n}, {d})[0] * 2"]
    return Line(w.filled(patterns, w.pick(lambda v: max(v.shape, default=0) <= PARTS)))


def _write(w: Writer) -> Line:
    """Leaves that want gradients are not written: eager refuses that."""
    leaves = {"x0"} if w.program.gradients else set()
    first = w.pick(lambda v: v.dim() > 0)
    if first in leaves:
        raise LookupError
    return Line(w.filled(WRITES, first, w.pick()), writes=True)


def _linear(w: Writer) -> Line:
    x = w.pick(lambda v: v.dim() >= 1 and v.shape[-1] <= DEEPEST)
    width = w.size()
    weight = w.parameter((width, w.values[x].shape[-1]), x)
    if w.draw.random() < 0.5:
        return Line(f"F.linear({x}, {weight}, {w.parameter((width,), x)})")
    return Line(w.draw.choice([f"{x} @ {weight}.T", f"F.linear({x}, {weight})"]))


def _product(w: Writer) -> Line:
    patterns = ["{a} @ {b}.mT * 0.2", "{a} @ {b} * 0.2", "torch.matmul({a}.mT, {b}) * 0.2"]
    x, y = (w.pick(lambda v: v.dim() >= 2) for _ in range(2))
    return Line(w.filled(patterns, x, y))


def _norm(w: Writer) -> Line:
    x = w.pick(lambda v: v.dim() >= 2)
    width = w.values[x].shape[-1]
    scale, bias = (w.parameter((width,), x) for _ in range(2))
    choices = [
        f"F.layer_norm({x}, ({width},), {scale}, {bias})",
        f"F.layer_norm({x}, ({width},))",
        f"F.rms_norm({x}, ({width},), {scale})",
        f"{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-5) * {scale}",
    ]
    if w.values[x].dim() >= 3:
        mean, var = (w.parameter((w.values[x].shape[1],), x) for _ in range(2))
        choices += [
            f"F.group_norm({x}, 1)",
            f"F.instance_norm({x})",
            f"F.batch_norm({x}, {mean}, {var}.abs() + 0.5)",
            f"F.batch_norm({x}, None, None, {var}, {mean}, True)",
        ]
    return Line(w.draw.choice(choices))


def _conv(w: Writer) -> Line:
    x = w.pick(lambda v: 3 <= v.dim() <= 5)
    rank, channels = w.values[x].dim() - 2, w.values[x].shape[1]
    groups, kernel = w.draw.choice([1, 1, 1, channels]), w.draw.choice([1, 1, 2, 3, 3, 5])
    out = channels * w.draw.choice([1, 2]) if groups > 1 else w.size()
    name = f"conv{rank}d" if w.draw.random() < 0.8 else f"conv_transpose{rank}d"
    ends = (channels, out // groups) if "transpose" in name else (out, channels // groups)
    weight = w.parameter((*ends, *[kernel] * rank), x)
    bias = w.parameter((out,), x) if w.draw.random() < 0.5 else None
    how = (
        f"stride={w.draw.choice([1, 1, 2])}, padding={w.draw.choice([0, 1, 2])}, groups={groups}, "
        f"dilation={w.draw.choice([1, 1, 1, 2])}"
    )
    return Line(f"F.{name}({x}, {weight}, {bias}, {how}) * 0.3")


def _pool(w: Writer) -> Line:
    x = w.pick(lambda v: 3 <= v.dim() <= 4)
    rank = w.values[x].dim() - 2
    choices = [
        f"F.max_pool{rank}d({x}, 2)", f"F.avg_pool{rank}d({x}, 3, 1, 1)",
        f"F.max_pool{rank}d({x}, 3, 2, 1)", f"F.adaptive_avg_pool{rank}d({x}, 1)",
        f"F.avg_pool{rank}d({x}, 2, ceil_mode=True)", f"F.adaptive_avg_pool{rank}d({x}, 3)",
        f"F.interpolate({x}, scale_factor=2)",
    ]  # fmt: skip
    if rank == 2:
        choices += [
            f"F.interpolate({x}, scale_factor=1.5, mode='bilinear')",
            f"{x}.contiguous(memory_format=torch.channels_last)",
            f"F.pad({x}, (1, 1, 0, 2), mode='reflect')",
            f"F.pixel_unshuffle({x}, 2)",
        ]
    return Line(w.draw.choice(choices))


def _attention(w: Writer) -> Line:
    x = w.pick(lambda v: v.dim() in (3, 4) and v.shape[-1] <= 128)
    given = w.values[x]
    y = w.pick(lambda v: v.shape == given.shape and v.dtype == given.dtype)
    square = f"torch.ones({x}.shape[-2], {x}.shape[-2], dtype=torch.bool).triu(1)"
    return Line(
        w.draw.choice(
            [
                f"F.scaled_dot_product_attention({x}, {y}, {x})",
                f"F.scaled_dot_product_attention({x}, {x}, {y}, is_causal=True)",
                f"({x} @ {y}.mT / {given.shape[-1]} ** 0.5).softmax(-1) @ {x}",
                f"({x} @ {y}.mT).masked_fill({square}, -1e4).softmax(-1) @ {y}",
            ]
        )
    )


def _indexed(w: Writer) -> Line:
    places = w.pick(lambda v: v.dim() <= 3, floats=False)
    if w.values[places].dtype == torch.bool:
        return Line(w.filled(["torch.where({b}, {a}, {a} * 0.1)"], w.pick(), places))
    table = w.parameter((w.size() + 4, w.size()), places)
    table = table.partition(".to(")[0]
    return Line(w.draw.choice([f"F.embedding({places}, {table})", f"{places} * 0.5 + 1"]))


TEMPLATES: tuple[Callable[[Writer], Line], ...] = (
    *[_of_one(UNARY)] * 5, *[_of_several] * 5, *[_of_one(REDUCED)] * 5, *[_of_one(VIEWS)] * 6,
    _of_one(CASTS), *[_write] * 2, *[_linear] * 3, *[_product] * 2, *[_norm] * 3, *[_conv] * 3,
    _pool, _attention, _indexed, _joined, _parted,
)  # fmt: skip
