"""Ways to change a weight between two calls: is the next call eager's, whoever changed it?

    python -m tests.suites.weights --out docs/weights.md

Fused optimizers, writes through ``.data``, numpy, DLPack, views of flat buffers and other processes
do not move torch's version counter. Each way is tried on each network after three calls of the
compiled function; then it is called again. Each network comes twice: as it is, and with weights
that are bfloat16 numbers, which are kept as 16 bits until a way makes other numbers of them. What
counts is the first call after the change, for a single element the call by which it is seen at the
latest. ``python -m benchmarks.weights`` measures what the checks cost, in turns with
``weights="frozen"``.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.suites.isolated import Outcome, cell, command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

OPTIONS = {"effort": "none", "strict": True}
PLAIN = ("bert_tiny", "resnet18", "llama_decode")
ROUNDED = "_bfloat16"
"""Of a network's name: its weights are bfloat16 numbers in float32, which are kept as 16 bits. Most
ways make other numbers of them."""
NETWORKS = (*PLAIN, *(name + ROUNDED for name in PLAIN))
LAYERS = 2  # of the language models: layers repeat
ROUND = 64
"""Calls within which any write at all is seen."""
TOLERANCE = 1e-4  # of the largest element of a result
LIMIT_S = 300.0  # for one way: the first of a network compiles it


@dataclass(slots=True)
class Subject:
    """A network, a call of it in eager and one compiled; both leave nothing behind."""

    module: Any
    eager: Callable[[], Any]
    compiled: Callable[[], Any]

    def weights(self) -> list[Any]:
        """Matrices and kernels, the largest last."""
        found = [p for p in self.module.parameters() if p.dim() > 1 and p.requires_grad]
        named = {id(e.weight) for e in self.module.modules() if type(e).__name__ == "Embedding"}
        return sorted((p for p in found if id(p) not in named), key=lambda p: p.numel())


@functools.cache
def subject(name: str) -> Subject:
    """Built and compiled once in a process."""
    given = _plain(name.removesuffix(ROUNDED))
    if name.endswith(ROUNDED):
        from benchmarks.decoding.shapes import round_weights

        round_weights(given.module)
    return given


def _plain(name: str) -> Subject:
    import torch

    from benchmarks import models
    from benchmarks.decoding import shapes
    from benchmarks.decoding.torch_models import TorchDecoder

    if name == "llama_decode":
        module = shapes.build("llama", LAYERS)
        runs = [TorchDecoder(module, b, OPTIONS, 64) for b in ("eager", "pruner")]

        def token(run: Any) -> Any:
            run.goto(0)
            run.token = torch.full((1, 1), 7)
            return run.scores()

        eager, compiled = (functools.partial(token, run) for run in runs)
    else:
        module, inputs = models.load(name, layers=LAYERS if name.startswith("bert") else None)
        run = torch.compile(module, backend="pruner", dynamic=False, options=OPTIONS)
        eager, compiled = (lambda f=f: _first(models.call(f, inputs)) for f in (module, run))
    return Subject(module, torch.no_grad()(eager), torch.no_grad()(compiled))


def _first(output: Any) -> Any:
    return output.to_tuple()[0] if hasattr(output, "to_tuple") else output


def _stepped(optimizer: str, **settings: Any) -> Callable[[Subject], None]:
    def way(given: Subject) -> None:
        import torch

        parameters = given.weights()
        made = getattr(torch.optim, optimizer)(parameters, lr=1e-2, **settings)
        for p in parameters:
            p.grad = torch.randn_like(p) * p.detach().std()
        made.step()
        made.zero_grad()

    return way


def _data(change: Callable[[Any], Any]) -> Callable[[Subject], None]:
    """``change`` of the largest weight's ``.data``."""
    return lambda given: change(given.weights()[-1].data)


def _row(data: Any) -> None:
    data[3] = 0.5


def _noise(data: Any) -> Any:
    import torch

    return data + torch.randn_like(data) * data.std()


def _initialised(given: Subject) -> None:
    from torch import nn

    for p in given.weights():
        nn.init.xavier_uniform_(p.data)


def _averaged(given: Subject) -> None:
    import torch

    weights = [p.data for p in given.weights()]
    torch._foreach_lerp_(weights, [_noise(w) for w in weights], 0.5)


def _numpy(given: Subject) -> None:
    array = given.weights()[-1].detach().numpy()
    array *= 1.5


def _dlpack(given: Subject) -> None:
    import torch

    torch.from_dlpack(given.weights()[-1].detach()).mul_(-1)


def _storage(given: Subject) -> None:
    given.weights()[-1].untyped_storage().fill_(0)


def _memory(given: Subject) -> None:
    weight = given.weights()[-1]
    ctypes.memset(weight.data_ptr(), 0, weight.nbytes // 2)


def _flat(given: Subject) -> None:
    """Parameters become views of one buffer, calls go on, then the buffer is updated."""
    import torch

    weights = given.weights()
    flat = torch.cat([p.detach().flatten() for p in weights])
    for p, piece in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
        p.data = piece.view(p.shape)
    _settle(given)
    flat.add_(_noise(flat), alpha=0.5)


def _tied(given: Subject) -> None:
    """Two parameters get one memory, calls go on, then one is written through ``.data``."""
    shapes = collections.defaultdict(list)
    for p in given.weights():
        shapes[p.shape].append(p)
    one, other, *_ = [ps for ps in shapes.values() if len(ps) > 1][-1]
    other.data = one.data
    _settle(given)
    one.data.copy_(_noise(one.data))


def _other_process(given: Subject) -> None:
    """A weight lies in a mapped file, calls go on, then another process writes to the file."""
    import torch

    weight = given.weights()[-1]
    with tempfile.NamedTemporaryFile() as file:
        file.write(weight.detach().numpy().tobytes())
        file.flush()
        shared = torch.from_file(file.name, shared=True, size=weight.numel(), dtype=weight.dtype)
        weight.data = shared.view(weight.shape)
        _settle(given)
        code = "import sys; f = open(sys.argv[1], 'r+b'); f.write(bytes(int(sys.argv[2])))"
        half = str(weight.nbytes // 2)
        subprocess.run([sys.executable, "-c", code, file.name, half], check=True)
        weight.data  # noqa: B018  (nothing is read again: the memory is what the file has)


def _loaded(given: Subject, *, assign: bool) -> None:
    changed = {k: _noise(v) if v.dim() > 1 else v for k, v in given.module.state_dict().items()}
    given.module.load_state_dict(changed, assign=assign)


def _in_place(given: Subject) -> None:
    import torch

    with torch.no_grad():
        given.weights()[-1].mul_(1.5)


def _inference_mode(given: Subject) -> None:
    import torch

    with torch.inference_mode():
        given.weights()[-1].data.mul_(1.5)


def _replaced(given: Subject) -> None:
    weight = given.weights()[-1]
    weight.data = _noise(weight.data)


def _pruned(given: Subject) -> None:
    weight = given.weights()[-1].data
    weight.masked_fill_(weight.abs() < weight.std() / 2, 0)


def _clipped(given: Subject) -> None:
    """What is thrown away by a clamp of every weight, as GANs did it."""
    for p in given.weights():
        p.data.clamp_(-float(p.data.std()), float(p.data.std()))


def _swapped(given: Subject) -> None:
    """Two rows change places: the same bytes in another order."""
    weight = given.weights()[-1].data
    half = weight.shape[0] // 2
    weight[: 2 * half] = weight[: 2 * half].roll(half, 0)


def _column(data: Any) -> None:
    """Of every second row: a normalisation takes out what all have in common."""
    data.flatten(1)[::2, :8] += data.std() * 8


def _element(data: Any) -> None:
    data.view(-1)[data.numel() // 3] += 100 * data.std()


WAYS: dict[str, Callable[[Subject], None]] = {
    "AdamW(fused=True)": _stepped("AdamW", fused=True),
    "Adam(fused=True)": _stepped("Adam", fused=True),
    "SGD(fused=True)": _stepped("SGD", fused=True),
    "Adagrad(fused=True)": _stepped("Adagrad", fused=True),
    "AdamW(foreach=True)": _stepped("AdamW", foreach=True),
    "SGD(foreach=False)": _stepped("SGD", foreach=False),
    "p.data.add_": _data(lambda d: d.add_(_noise(d))),
    "p.data.mul_": _data(lambda d: d.mul_(1.5)),
    "p.data.copy_": _data(lambda d: d.copy_(_noise(d))),
    "p.data.neg_": _data(lambda d: d.neg_()),
    "p.data[3]=…": _data(_row),
    "columns-of-p.data": _data(_column),
    "nn.init-of-p.data": _initialised,
    "_foreach_lerp_-of-p.data": _averaged,
    "numpy-view": _numpy,
    "from_dlpack(p.detach())": _dlpack,
    "untyped_storage().fill_": _storage,
    "memset": _memory,
    "views-of-a-flat-buffer": _flat,
    "tied-through-p.data": _tied,
    "another-process": _other_process,
    "load_state_dict": functools.partial(_loaded, assign=False),
    "load_state_dict(assign=True)": functools.partial(_loaded, assign=True),
    "p.mul_-under-no_grad": _in_place,
    "p.data.mul_-in-inference-mode": _inference_mode,
    "p.data=…": _replaced,
    "magnitude-pruning-of-p.data": _pruned,
    "clamp_-of-p.data": _clipped,
    "rows-change-places": _swapped,
    "one-element-of-p.data": _data(_element),
}
LATER = ("one-element-of-p.data",)
"""What is less than a page need not be seen at the next call."""


def _settle(given: Subject) -> None:
    for _ in range(3):
        given.compiled()


def check(name: str) -> Outcome:
    """One way on one network, ``NETWORK:WAY``. Raises nothing."""
    network, _, way = name.partition(":")
    try:
        given = subject(network)
        kept = {k: v.clone() for k, v in given.module.state_dict().items()}
        pointers = {k: p.data for k, p in given.module.named_parameters()}
        try:
            return _outcome(name, given, WAYS[way])
        finally:
            for k, p in given.module.named_parameters():
                p.data, p.grad = pointers.get(k, p.data), None
            given.module.load_state_dict(kept)
    except Exception as err:  # any failure is a line of the table
        return Outcome(name, "failed", f"{type(err).__name__}: {str(err).strip()}"[:240])


def _outcome(name: str, given: Subject, way: Callable[[Subject], None]) -> Outcome:
    _settle(given)
    before = given.eager()
    if off := _off(given.compiled(), before):
        return Outcome(name, "failed", f"off by {off:.1e} before anything changed")
    way(given)
    expected = given.eager()
    if not _off(expected, before):
        return Outcome(name, "failed", "eager's result did not change")
    calls = ROUND if name.partition(":")[2] in LATER else 1
    seen = next((k + 1 for k in range(calls) if not _off(given.compiled(), expected)), None)
    if seen is None:
        off = _off(given.compiled(), expected)
        return Outcome(name, "failed", f"not seen within {calls} calls: off by {off:.1e}")
    return Outcome(name, "compiled", "" if seen == 1 else f"seen at call {seen}")


def _off(got: Any, expected: Any) -> float:
    """How far a result is off, relative to the largest element; 0 within the tolerance."""
    error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    return 0.0 if error <= TOLERANCE else error


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The Markdown page."""
    count = collections.Counter(o.status for o in outcomes)
    yield "# Weights that change"
    yield ""
    yield (
        "Written by `python -m tests.suites.weights`: a weight is changed after three calls of a"
        " compiled network, and the next call is compared with eager's. A write of less than a page"
        f" is seen within {ROUND} calls; of one element the table says at which."
    )
    yield ""
    yield f"{count['compiled']} seen, {count['failed']} not."
    yield ""
    yield f"| changed by | {' | '.join(NETWORKS)} |"
    yield f"| --- |{' --- |' * len(NETWORKS)}"
    by = {o.name: o for o in outcomes}
    for way in WAYS:
        found = [by.get(f"{network}:{way}") for network in NETWORKS]
        if any(found):
            said = [cell(o.reason or "next call") if o else "" for o in found]
            yield f"| `{way.replace('-', ' ')}` | {' | '.join(said)} |"


def main(arguments: list[str] | None = None) -> int:
    names = [f"{network}:{way}" for network in NETWORKS for way in WAYS]
    return command(
        "tests.suites.weights", __doc__, lambda: names, check, table, arguments, limit_s=LIMIT_S
    )


if __name__ == "__main__":
    sys.exit(main())
