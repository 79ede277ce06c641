"""Attention alone: ours, torch's, ONNX Runtime's and OpenVINO's, and the machine's peak.

    python -m benchmarks.attention [--shapes 12x128x64,12x512x64,32(8)x2048x128c] [--effort quick]

A shape is heads x tokens x width; heads of keys in brackets where they are fewer, ``c`` for causal.
The peers run their own fused operator: torch's flash attention, ``MultiHeadAttention`` of ONNX
Runtime's contributed operators and ``Attention`` of ONNX (whichever is faster), OpenVINO's
``ScaledDotProductAttention``. All take turns in one process, in float32. The share is of a loop
that multiplies and adds in registers, timed in turns with them; causal attention is counted with
half of its scores.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks import machine_peak, tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

DEFAULT = "12x128x64,12x512x64,32(8)x2048x128c"
PEERS = ("torch", "onnxruntime-mha", "onnxruntime", "openvino")
TOLERANCE = 1e-4
SAMPLE_S = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """Queries, keys and values of as many tokens; ``kv`` heads of keys and values."""

    heads: int
    kv: int
    tokens: int
    width: int
    causal: bool

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Raises ``ValueError`` for what is no shape."""
        found = re.fullmatch(r"(\d+)(?:\((\d+)\))?x(\d+)x(\d+)(c?)", text)
        if found is None:
            raise ValueError(f"{text!r} is not heads x tokens x width, as in 32(8)x2048x128c")
        heads, kv, tokens, width, causal = found.groups()
        return cls(int(heads), int(kv or heads), int(tokens), int(width), bool(causal))

    @property
    def name(self) -> str:
        grouped = f"({self.kv})" if self.kv != self.heads else ""
        causal = ", causal" if self.causal else ""
        return f"{self.heads}{grouped} x {self.tokens} x {self.width}{causal}"

    @property
    def flops(self) -> float:
        """Of both products; of causal attention those with keys that count."""
        pairs = self.tokens * (self.tokens + 1) / 2 if self.causal else self.tokens**2
        return 4.0 * self.heads * pairs * self.width

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        heads = (self.heads, self.kv, self.kv)
        q, k, v = (torch.randn(1, h, self.tokens, self.width, generator=generator) for h in heads)
        return q, k, v


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.causal, self.grouped = shape.causal, shape.kv != shape.heads

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, enable_gqa=self.grouped
        )


def onnxruntime(shape: Shape, threads: int, *, contributed: bool) -> Callable[[], Any]:
    """Raises where the operator does not take the shape."""
    import onnx
    import onnxruntime as runtime
    from onnx import TensorProto, helper

    operands = [x.numpy() for x in shape.operands()]
    if contributed:
        if shape.kv != shape.heads:
            raise ValueError("MultiHeadAttention has as many heads of keys as of queries")
        # Tokens before heads, and heads side by side.
        operands = [_flat(x) for x in operands]
        node = helper.make_node(
            "MultiHeadAttention", ["q", "k", "v"], ["y"], domain="com.microsoft",
            num_heads=shape.heads, unidirectional=int(shape.causal),
        )  # fmt: skip
    else:
        node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=int(shape.causal))
    inputs = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, x.shape)
        for n, x in zip("qkv", operands, strict=True)
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, operands[0].shape)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = runtime.InferenceSession(
        onnx.ModelProto.SerializeToString(model), options, providers=["CPUExecutionProvider"]
    )
    feeds = dict(zip("qkv", operands, strict=True))

    def call() -> Any:
        (y,) = session.run(None, feeds)
        if not contributed:
            return y
        return y.reshape(1, shape.tokens, shape.heads, shape.width).transpose(0, 2, 1, 3)

    return call


def _flat(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    _, heads, tokens, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(1, tokens, heads * width)


def openvino(shape: Shape, threads: int) -> Callable[[], Any]:
    import numpy as np
    import openvino as runtime
    from openvino import opset13 as op

    operands = [x.numpy() for x in shape.operands()]
    given = [op.parameter(x.shape, np.float32) for x in operands]
    taken: list[Any] = list(given)
    if shape.kv != shape.heads:  # as its own conversions of grouped heads write it
        times = shape.heads // shape.kv
        for k in (1, 2):
            each = op.unsqueeze(given[k], op.constant(2))
            wide = [1, shape.kv, times, shape.tokens, shape.width]
            each = op.broadcast(each, op.constant(wide), broadcast_spec="BIDIRECTIONAL")
            whole = [1, shape.heads, shape.tokens, shape.width]
            taken[k] = op.reshape(each, op.constant(whole), special_zero=False)
    y = op.scaled_dot_product_attention(*taken, causal=shape.causal)
    settings = {
        "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
    }  # fmt: skip
    compiled = runtime.Core().compile_model(runtime.Model([y], given), "CPU", settings)
    request = compiled.create_infer_request()
    feeds = dict(enumerate(operands))
    return lambda: request.infer(feeds, share_inputs=True, share_outputs=True)[0]


def prepare(name: str, shape: Shape, options: argparse.Namespace) -> Callable[[], Any]:
    """A contestant's call. Raises what it raises."""
    if name.startswith("onnxruntime"):
        return onnxruntime(shape, options.threads, contributed=name.endswith("mha"))
    if name == "openvino":
        return openvino(shape, options.threads)
    module, operands = Attention(shape).eval(), shape.operands()
    function: Callable[..., Any] = module
    if name == "ours":
        function = torch.compile(module, backend="pruner", options=backend_options(options))
    return lambda: function(*operands)


def _repeats(call: Callable[[], Any]) -> int:
    """How many calls last ``SAMPLE_S``: a core that was asleep takes milliseconds to be as fast as
    it can be, and the untimed calls of a turn must outlast them."""
    call()
    start = time.perf_counter()
    call()
    return max(1, math.ceil(SAMPLE_S / (time.perf_counter() - start)))


def _group(call: Callable[[], Any], times: int) -> Callable[[], None]:
    def group() -> None:
        for _ in range(times):
            call()

    return group


@torch.no_grad()
def measure(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of everybody and of the loop. Raises ``ValueError`` where an answer is wrong."""
    q, k, v = (x.double() for x in shape.operands())
    expected = Attention(shape)(q, k, v)
    calls: dict[str, Callable[[], Any]] = {}
    reasons: dict[str, str] = {}
    for name in ("ours", *PEERS):
        try:
            call = prepare(name, shape, options)
            got = torch.as_tensor(call())
        except Exception as error:  # a peer that cannot is a cell of the table
            if name == "ours":
                raise
            reasons[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        if not float((got.double() - expected).abs().max()) < TOLERANCE:
            if name == "ours":
                raise ValueError(f"{shape.name}: a wrong answer")
            reasons[name] = "a wrong answer"
            continue
        calls[name] = call
    loop, flops = machine_peak.fma_loop(options.threads)
    calls["peak"] = loop
    times = {name: _repeats(call) for name, call in calls.items()}
    groups = {name: _group(call, times[name]) for name, call in calls.items()}
    found = timing.in_turns(groups, rounds=options.rounds, min_seconds=options.min_seconds)
    seconds = {name: t.median_s / times[name] for name, t in found.items()}
    best = min((s for name, s in seconds.items() if name in PEERS), default=None)
    return {
        "shape": shape.name, "seconds": seconds, "reasons": reasons,
        "timings": {name: {"calls": times[name], **t.to_json()} for name, t in found.items()},
        "share": shape.flops / seconds["ours"] / (flops / seconds["peak"]),
        "ratio": best / seconds["ours"] if best else None,
    }  # fmt: skip


def render(rows: list[dict[str, Any]]) -> str:
    header = ["heads x tokens x width", "ours", *PEERS, "best peer / ours", "share of peak"]
    lines = []
    for r in rows:
        times = [r["seconds"].get(name) for name in ("ours", *PEERS)]
        ratio = f"{r['ratio']:.2f}" if r["ratio"] else ""
        lines.append(
            [
                r["shape"], *(timing.duration(s) if s else "" for s in times), ratio,
                f"{100 * r['share']:.0f} %",
            ]
        )  # fmt: skip
    return tables.markdown(header, lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.add_argument("--shapes", default=DEFAULT, help="comma-separated")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--min-seconds", type=float, default=1.0)
    parser.add_argument("--out", help="write JSON there")
    add_tuning(parser)
    options = parser.parse_args(arguments)
    options.threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(options.threads)
    rows = []
    for text in options.shapes.split(","):
        torch._dynamo.reset()
        rows.append(measure(Shape.parse(text), options))
        print(render(rows[-1:]).splitlines()[-1], flush=True)
        for name, why in rows[-1]["reasons"].items():
            print(f"  {name}: {why}", file=sys.stderr)
        write_json(options.out, {"machine": timing.machine(), "rows": rows})
    print("\n" + render(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
