"""A torch module with a static cache: eager, inductor, torchao's rounding, and ours."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import StaticCache

from benchmarks.decoding.decoder import Decoder, Setting
from benchmarks.decoding.shapes import read_by_a_step, restored, weight_bytes
from benchmarks.job import compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from transformers import PreTrainedModel

    Change = Callable[[PreTrainedModel], None]
    Prepare = Callable[[Callable[..., torch.Tensor], dict[str, Any]], Any]

GROUP = 64  # of int4 weights, as ours
BFLOAT16_BITS = 16  # all that the weights have, but for those of 32 bits


def cache_for(model: PreTrainedModel, length: int) -> StaticCache:
    """Empty, with all its memory; heads as the model groups them."""
    config = model.config
    cache = StaticCache(config=config, max_cache_len=length)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = config.hidden_size // config.num_attention_heads
    cache.early_initialization(1, heads, size, model.dtype, model.device)
    return cache


class TorchDecoder(Decoder):
    """A step is one call of the compiled function.

    Eager fills the cache with the prompt but for its last token, which is a step: the scores that
    ``fill`` gives are the compiled function's. Where that has ``rounded`` weights of its own, every
    token of the prompt is a step.
    """

    rounded = False

    def __init__(
        self,
        model: PreTrainedModel,
        backend: str | Prepare,
        options: dict[str, Any],
        length: int,
    ) -> None:
        """``backend``: of ``benchmarks.job.compiled``, or what prepares the function by itself."""
        self.device = model.device
        self.model, self.cache, self.length = model, cache_for(model, length), length
        self.weight_bytes = sum(_bytes(p) for p in read_by_a_step(model).values())
        self.first = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        self.token, self.position = self.first, 0

        def forward(tokens: torch.Tensor, at: torch.Tensor, cache: StaticCache) -> torch.Tensor:
            return model(
                input_ids=tokens,
                position_ids=at,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits

        self.forward = forward
        self.whole, self.compiled = (_compiled(_own(forward), backend, options) for _ in range(2))

    @torch.no_grad()
    def fill(self, prompt: Sequence[int]) -> np.ndarray:
        if self.rounded:
            self.goto(0)
        else:
            self._begin(self.forward, prompt[:-1])
        for word in prompt if self.rounded else prompt[-1:]:
            self.token = self._on_device([[word]])
            scores = self.scores()
        self.first = self.token
        return scores[0, -1].float().cpu().numpy()

    def rewind(self, prompt: Sequence[int]) -> None:
        self.goto(len(prompt))
        self.token = self.first

    @torch.no_grad()
    def step(self) -> None:
        self.scores()

    def scores(self) -> torch.Tensor:
        """Decodes one token and gives the scores it was chosen by; a full cache begins again."""
        if self.position == self.length:  # a step costs the same anywhere
            self.goto(0)
        position = self._on_device([[self.position]])
        scores: torch.Tensor = self.compiled(self.token, position, self.cache)
        self.token = _greedy(scores)
        self.position += 1
        return scores

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int]) -> float:
        begin = time.perf_counter()
        self._begin(self.whole, prompt)
        return time.perf_counter() - begin

    def _begin(self, forward: Any, prompt: Sequence[int]) -> None:
        self.goto(0)
        tokens, positions = self._on_device([prompt]), self._on_device([range(len(prompt))])
        scores = forward(tokens, positions, self.cache)
        self.token, self.position = _greedy(scores), len(prompt)

    def _on_device(self, numbers: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor([list(line) for line in numbers], device=self.device)

    def goto(self, position: int) -> None:
        """Decodes from there; what the cache has from there on is masked, then written over."""
        self.position = position
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(position)


def _greedy(scores: torch.Tensor) -> torch.Tensor:
    """The likeliest next token, of float32 scores as transformers makes them."""
    return scores[:, -1:].float().argmax(-1)


def _compiled(
    forward: Callable[..., torch.Tensor], backend: str | Prepare, options: dict[str, Any]
) -> Any:
    if callable(backend):
        return backend(forward, options)
    if backend == "inductor-freezing":
        return torch.compile(forward, backend="inductor", options={"freezing": True})
    return compiled(forward, backend, options)


def _own(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same under another code object: prompts and steps are compiled apart."""
    return type(forward)(
        forward.__code__.replace(),
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )


def load(
    setting: Setting,
    backend: str,
    *,
    change: Change | None = None,
    rounded: bool = False,
    stored: tuple[float, int] | None = None,
    unguarded: bool = False,
    **options: object,
) -> TorchDecoder:
    """``change`` may round or narrow the model in place.

    ``unguarded``: torch is told that nobody changes the modules, and looks at none of them.

    ``stored``: bits of a weight, and bytes of a row beside, where our kernels keep other weights
    than the module.
    """
    model = restored(setting.model, setting.layers, setting.checkpoint, rounded=rounded)
    if change is not None:
        change(model)
    given = {"threads": setting.threads, **setting.options, **options}
    if unguarded:
        given["guard_filter_fn"] = torch.compiler.skip_guard_on_all_nn_modules_unsafe
    decoder = TorchDecoder(model, backend, given, setting.length)
    if stored is not None:
        decoder.weight_bytes = weight_bytes(model, *stored)
        decoder.rounded = stored[0] < BFLOAT16_BITS
    return decoder


def to_bfloat16(model: PreTrainedModel) -> None:
    model.bfloat16()


def bfloat16_torchao_int8(model: PreTrainedModel) -> None:
    """torch's own kernels for torchao's weights are for bfloat16."""
    to_bfloat16(model)
    torchao_int8(model)


def bfloat16_torchao_int4(model: PreTrainedModel) -> None:
    to_bfloat16(model)
    torchao_int4(model)


def torchao_int8(model: PreTrainedModel) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def torchao_int4(model: PreTrainedModel) -> None:
    """The layout for CPUs, which torchao 0.18 has among its prototypes."""
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=GROUP))


def _bytes(p: torch.Tensor) -> int:
    """Of a tensor, or of what one of torchao's consists of."""
    if hasattr(p, "__tensor_flatten__"):
        inner = p.__tensor_flatten__()[0]
        return sum(_bytes(getattr(p, name)) for name in inner)
    return p.nbytes
