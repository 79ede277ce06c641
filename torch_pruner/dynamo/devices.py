"""The devices that graphs are compiled for: what each takes beside memory, which is torch's.

In: a captured graph, or a device. Out: a ``Platform``, which gives the compiler for that device and
knows how its kernels are called. Everything of torch's that depends on the kind of a device is
here; the rest of the package sees tensors.
"""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from torch_pruner import log
from torch_pruner.cards import CARDS, card_like
from torch_pruner.compiler.bundles import Place
from torch_pruner.compiler.context import Context
from torch_pruner.compiler.driver import Compiler
from torch_pruner.compiler.stores import store_for
from torch_pruner.compiler.toolchain import GpuToolchain
from torch_pruner.dynamo.lower.importer import DEFAULT_DTYPES
from torch_pruner.dynamo.run import forked_threads
from torch_pruner.dynamo.run.vendor import AtenVendor
from torch_pruner.exc import OptionError
from torch_pruner.fingerprint import DeviceFingerprint, Gpu
from torch_pruner.log import PhaseTimer
from torch_pruner.target import TargetSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import fx

    from torch_pruner.cards import Card
    from torch_pruner.config import Config


ANY_GPU = '{"kind":"cuda"}'  # the option ``target``: the GPU at hand, whichever it is
UNTRIED = (
    "graphs on %s run in eager: code for GPUs has not been tried on one; target={'kind': 'cuda'}"
    " compiles them all the same"
)

_log = log.logger(__name__)


class Platform(ABC):
    """One device that graphs are compiled for.

    Contract: regions are called with tensors of ``device`` alone, on the stream that is current
    there, and queue their work on it; nothing in a call waits for the device.
    """

    device: torch.device
    dtypes: frozenset[str]
    """Names of the dtypes that are compiled."""
    checks_indices: bool
    """Whether indices are looked at before a call, which has to wait for them."""
    builds_only: bool = False
    """Whether what is compiled cannot run here: eager runs in its place."""

    @abstractmethod
    def compiler(self, config: Config, timer: PhaseTimer | None = None) -> Compiler: ...

    def guard(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """``run`` with this device as the current one. Default: there is nothing to choose."""
        return run

    def generator_state(self) -> torch.Tensor | None:
        """Of the device's random numbers. Default: the device draws the CPU's."""
        return None

    def restore_generator(self, state: torch.Tensor) -> None:
        """Inverse of ``generator_state``."""


class CpuPlatform(Platform):
    """The CPU, with as many threads as the options say."""

    device = torch.device("cpu")
    dtypes = DEFAULT_DTYPES
    checks_indices = True

    def compiler(self, config: Config, timer: PhaseTimer | None = None) -> Compiler:
        if config.target == ANY_GPU:  # of a model on a GPU, the graph that stayed behind
            config = config.replace(target="auto")
        context = Context.make(config, config.threads or forked_threads.threads())
        return Compiler(config, store_for(config), context, AtenVendor(), timer or PhaseTimer())


class FleetPlatform(CpuPlatform):
    """The CPUs of a fleet (``executor="rpc"``), which time candidates. What is compiled runs here
    if this machine is like them; else eager does.
    """

    def compiler(self, config: Config, timer: PhaseTimer | None = None) -> Compiler:
        context = Context.of_fleet(config)
        self.builds_only = context.device != DeviceFingerprint.detect()
        return Compiler(config, store_for(config), context, None, timer or PhaseTimer())


class NoPlatform(CpuPlatform):
    """A device without a code generator: eager runs everything."""

    dtypes = frozenset()

    def __init__(self, device: torch.device) -> None:
        self.device = device


class CudaPlatform(Platform):
    """One NVIDIA GPU. Eager's device-side assertions are not repeated: indices are clamped."""

    dtypes = DEFAULT_DTYPES | {"float16"}
    checks_indices = False

    def __init__(self, device: torch.device, card: Card, gpu: Gpu) -> None:
        """Raises ``OSError`` where the driver's library cannot be loaded."""
        self.device, self.card, self.gpu = device, card, gpu
        self._index = device.index
        if not card.has_bfloat16:
            self.dtypes = self.dtypes - {"bfloat16"}
        self._toolchain = GpuToolchain.at_hand(self._stream, self._entered)

    def compiler(self, config: Config, timer: PhaseTimer | None = None) -> Compiler:
        context = Context.of_card(config, self.card, self.gpu.fingerprint, self.gpu)
        vendor = AtenVendor(device=self.device)
        return Compiler(
            config,
            store_for(config),
            context,
            vendor,
            timer or PhaseTimer(),
            toolchain=self._toolchain,
            tf32=tf32_allowed(),
        )

    def guard(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        index = self._index

        def call(inputs: list[Any]) -> Any:
            with torch.cuda._DeviceGuard(index):
                return run(inputs)

        return call

    def _stream(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with torch.cuda.device(self._index):
            torch.cuda.current_stream().query()  # makes torch's context this thread's
            yield

    def generator_state(self) -> torch.Tensor | None:
        return torch.cuda.get_rng_state(self.device)

    def restore_generator(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state, self.device)


class AbsentCard(CpuPlatform):
    """A card that is not at hand, named by the option ``target``: kernels are drafted and built.

    Graphs are captured on the CPU, and eager runs them there.
    """

    dtypes = DEFAULT_DTYPES | {"float16"}
    builds_only = True

    def __init__(self, card: Card) -> None:
        self.card = card
        self.fingerprint = DeviceFingerprint.of_card(card)

    def compiler(self, config: Config, timer: PhaseTimer | None = None) -> Compiler:
        config = config.replace(effort="none")  # there is nothing to time on
        context = Context.of_card(config, self.card, self.fingerprint)
        toolchain = GpuToolchain(None)
        store, timer = store_for(config), timer or PhaseTimer()
        return Compiler(
            config, store, context, None, timer, toolchain=toolchain, tf32=tf32_allowed()
        )


def tf32_allowed() -> frozenset[str]:
    """Contractions whose float32 operands torch lets a GPU round, as it is set now.

    By default torch allows it for convolutions and not for products.
    """
    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    try:  # the names of 2.9 and later; the older ones raise once these were used
        products = cuda.fp32_precision == "tf32"
        convolutions = cudnn.conv.fp32_precision == "tf32"
    except AttributeError:
        products, convolutions = cuda.allow_tf32, cudnn.allow_tf32
    found = {"matmul"} if products else set()
    return frozenset(found | ({"conv", "conv_transpose"} if convolutions else set()))


def platform_of(device: torch.device, config: Config) -> Platform:
    """What graphs of ``device`` are compiled for: it, or a card that ``config.target`` names.

    As long as nothing of it has run on a GPU, that is for who asks: with "auto" eager runs there.
    Raises ``OptionError`` for a card of another kind than the device at hand is.
    """
    found = _platform(device.type, device.index or 0)
    if config.executor == "rpc" and device.type == "cpu":
        return FleetPlatform()
    at_hand = isinstance(found, CudaPlatform)
    if config.target == "auto":
        if at_hand:
            log.warn_once(_log, "gpu", UNTRIED, device)
        return NoPlatform(device) if at_hand else found
    if config.target == ANY_GPU and (at_hand or torch.cuda.is_available()):
        return found
    card = TargetSpec.resolve(config.target).card
    if card is None or (isinstance(found, CudaPlatform) and found.card == card):
        return found
    if isinstance(found, CudaPlatform):
        problem = f"the tensors are on a {found.card.name}, not on a {card.name}"
        raise OptionError("target", problem)
    return AbsentCard(card)


@functools.cache
def _platform(kind: str, index: int) -> Platform:
    if kind == "cpu":
        return CpuPlatform()
    return (_cuda(index) if kind == "cuda" else None) or NoPlatform(torch.device(kind, index))


def _cuda(index: int) -> CudaPlatform | None:
    """None for a card of an unknown kind, or without NVIDIA's driver."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(index)
    card = card_like(properties.name, (properties.major, properties.minor))
    if card is None:
        return None
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    fingerprint = DeviceFingerprint.of_gpu(
        properties.name,
        card.arch,
        properties.multi_processor_count,
        properties.total_memory,
        shared_bytes=card.shared_bytes,
        l2_bytes=int(getattr(properties, "L2_cache_size", card.l2_bytes)),
        driver=str(driver // 1000),
    )
    selector = f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else str(index)
    try:
        return CudaPlatform(torch.device("cuda", index), card, Gpu(fingerprint, selector))
    except OSError:
        return None


def place_of(name: str) -> Place:
    """The device of a bundle: "cpu", "cuda", "cuda:1", or the name of a card that is not at hand.

    Raises ``OptionError`` for anything else, and for a GPU that nothing is compiled for.
    """
    if (card := CARDS.get(name.lower())) is not None:
        return Place.absent(card)
    try:
        device = torch.device(name)
    except RuntimeError as err:
        known = f"cpu, cuda, cuda:0, {', '.join(CARDS)}"
        raise OptionError("device", f"expected one of {known}, not {name!r}") from err
    found = _platform(device.type, device.index or 0)
    if isinstance(found, CudaPlatform):
        return Place(found.gpu.fingerprint, found.card)
    if device.type == "cpu":
        return Place.cpu()
    raise OptionError("device", f"nothing is compiled for {name!r} on this machine")


def device_of(gm: fx.GraphModule) -> torch.device:
    """The device that a graph is compiled for: where most of its values are, else the CPU.

    One GPU's, if a GPU has as many as the CPU.
    """
    found: Counter[torch.device] = Counter()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.Tensor):
            found[value.device] += 1
    order = sorted(found, key=lambda d: (-found[d], d.type == "cpu", str(d)))
    return order[0] if order else torch.device("cpu")
