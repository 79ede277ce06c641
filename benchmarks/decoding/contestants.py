"""Who takes part: a name, how many bits a weight has, how it is converted and loaded.

Names are ``RUNTIME`` or ``RUNTIME-FORMAT``; the same weights for all of the same number of bits:
random float32 for 32, and random bfloat16 numbers, loaded as float32, for fewer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.decoding.decoder import Decoder, Setting


@dataclass(frozen=True, slots=True)
class Contestant:
    """``convert`` is run before, in a process of its own; ``load`` in the process that decodes."""

    bits: int
    load: Callable[[Setting], Decoder]
    convert: Callable[[Setting], None] | None = None
    note: str = ""

    @property
    def rounded(self) -> bool:
        return self.bits < 32


def _torch(backend: str, bits: int = 32, change: str | None = None, **how: Any) -> Contestant:
    def load(setting: Setting) -> Decoder:
        from benchmarks.decoding import torch_models

        changed = getattr(torch_models, change) if change else None
        return torch_models.load(setting, backend, change=changed, rounded=bits < 32, **how)

    return Contestant(bits, load)


def _llama_cpp(kind: str, bits: int, note: str = "", *, repack: bool = True) -> Contestant:
    def load(setting: Setting) -> Decoder:
        from benchmarks.decoding.llama_cpp_models import LlamaCppDecoder

        return LlamaCppDecoder(setting, kind, repack=repack)

    def convert(setting: Setting) -> None:
        from benchmarks.decoding import llama_cpp_models

        llama_cpp_models.convert(setting, kind)

    return Contestant(bits, load, convert, note)


def _openvino(kind: str, bits: int) -> Contestant:
    def load(setting: Setting) -> Decoder:
        from benchmarks.decoding.openvino_models import OpenVinoDecoder

        return OpenVinoDecoder(setting, kind)

    def convert(setting: Setting) -> None:
        from benchmarks.decoding import openvino_export

        openvino_export.convert(setting, kind)

    return Contestant(bits, load, convert)


def _ctranslate2(kind: str, bits: int) -> Contestant:
    def load(setting: Setting) -> Decoder:
        from benchmarks.decoding.ctranslate2_models import CTranslate2Decoder

        return CTranslate2Decoder(setting, kind)

    def convert(setting: Setting) -> None:
        from benchmarks.decoding import ctranslate2_models

        ctranslate2_models.convert(setting, kind)

    return Contestant(bits, load, convert)


CONTESTANTS: Mapping[str, Contestant] = {
    "eager": _torch("eager"),
    "inductor": _torch("inductor"),
    "openvino": _openvino("f32", 32),
    "llama.cpp": _llama_cpp("F32", 32),
    "ctranslate2": _ctranslate2("float32", 32),
    "pruner": _torch("pruner"),
    "pruner-frozen": _torch("pruner", weights="frozen"),
    "pruner-unguarded": _torch("pruner", weights="frozen", unguarded=True),
    "inductor-bf16": _torch("inductor", 16, "to_bfloat16"),
    "openvino-f16": _openvino("f16", 16),
    "llama.cpp-f16": _llama_cpp("F16", 16),
    "llama.cpp-bf16": _llama_cpp("BF16", 16),
    "pruner-bf16": _torch("pruner", 16, "to_bfloat16"),
    "pruner-lossless": _torch("pruner", 16, stored=(12.125, 0)),
    "pruner-lossless-frozen": _torch("pruner", 16, stored=(12.125, 0), weights="frozen"),
    "pruner-lossless-unguarded": _torch(
        "pruner", 16, stored=(12.125, 0), weights="frozen", unguarded=True
    ),
    "inductor-torchao-int8": _torch("inductor", 8, "torchao_int8"),
    "inductor-bf16-torchao-int8": _torch("inductor-freezing", 8, "bfloat16_torchao_int8"),
    "openvino-int8": _openvino("int8", 8),
    "llama.cpp-q8_0": _llama_cpp("Q8_0", 8),
    "ctranslate2-int8": _ctranslate2("int8", 8),
    "pruner-torchao-int8": _torch("pruner", 8, "torchao_int8"),
    "pruner-int8": _torch("pruner", 8, stored=(8, 4), int8_weights=True),
    "pruner-int8-frozen": _torch("pruner", 8, stored=(8, 4), int8_weights=True, weights="frozen"),
    "pruner-int8-unguarded": _torch(
        "pruner", 8, stored=(8, 4), int8_weights=True, weights="frozen", unguarded=True
    ),
    "inductor-torchao-int4": _torch("inductor", 4, "torchao_int4"),
    "inductor-bf16-torchao-int4": _torch("inductor-freezing", 4, "bfloat16_torchao_int4"),
    "openvino-int4": _openvino("int4", 4),
    "llama.cpp-q4_0": _llama_cpp("Q4_0", 4),
    "llama.cpp-q4_0-plain": _llama_cpp("Q4_0", 4, "not repacked", repack=False),
    "llama.cpp-iq4_nl": _llama_cpp("IQ4_NL", 4),
    "pruner-torchao-int4": _torch("pruner", 4, "torchao_int4"),
    "pruner-int4": _torch("pruner", 4, stored=(4.25, 0), weight_bits=4),
    "pruner-int4-frozen": _torch("pruner", 4, stored=(4.25, 0), weight_bits=4, weights="frozen"),
    "pruner-int4-unguarded": _torch(
        "pruner", 4, stored=(4.25, 0), weight_bits=4, weights="frozen", unguarded=True
    ),
}


def is_ours(name: str) -> bool:
    return name.startswith("pruner")
