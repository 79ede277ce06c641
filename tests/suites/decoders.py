"""``generate`` of transformers with static caches: one program a step, and eager's greedy tokens.

    python -m tests.suites.decoders --out docs/decoders.md

Small models with random weights and caches of every kind that transformers has a fixed length for:
all positions ("full"), the last few ("sliding"), and both in one model ("hybrid"). Each generates
twice; sliding windows fill up on the way. With ``-256`` in its name it generates 256 tokens. With
``-lossless`` all weights are bfloat16 numbers in float32, as those of most checkpoints, and the
programs must read them as 16 bits. Nothing is downloaded.
"""

from __future__ import annotations

import collections
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tests.suites.isolated import Outcome, cell, command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_pruner.report import GraphReport

OPTIONS = {"effort": "none"}
PLAIN: Mapping[str, Any] = {}  # with transformers' mode, "reduce-overhead"
WITH_OPTIONS: Mapping[str, Any] = {"mode": None, "options": OPTIONS}
PROMPT, TOKENS, LONG = 5, 16, 256
VOCABULARY = 200


@dataclass(frozen=True, slots=True)
class Decoder:
    """``cache`` for the table; ``config`` names a class of transformers and its arguments.

    ``tokens`` to generate. ``by_config``: ``generate`` compiles by itself, as a ``CompileConfig``
    with these arguments says. ``lossless``: weights are rounded to bfloat16 numbers before.
    """

    cache: str
    config: str
    arguments: Mapping[str, Any]
    tokens: int = TOKENS
    by_config: Mapping[str, Any] | None = None
    lossless: bool = False


_WIDTH = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
}  # fmt: skip
_LLAMA = {**_WIDTH, "intermediate_size": 96, "num_key_value_heads": 2}
_HEADS = {**_LLAMA, "head_dim": 24}
_WINDOW = {"sliding_window": 12}
_PHI = {**_LLAMA, "pad_token_id": 0, "sliding_window": None}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 512}
_OPT = {**_WIDTH, "ffn_dim": 96, "word_embed_proj_dim": 64}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], **_WINDOW}

_ARCHITECTURES: Mapping[str, Decoder] = {
    "llama": Decoder("full", "LlamaConfig", _LLAMA),
    "qwen2": Decoder("full", "Qwen2Config", _LLAMA),
    "qwen3": Decoder("full", "Qwen3Config", _HEADS),
    "mistral": Decoder("sliding", "MistralConfig", {**_LLAMA, **_WINDOW}),
    "gemma2": Decoder("hybrid", "Gemma2Config", {**_HEADS, **_WINDOW}),
    "gemma3": Decoder("hybrid", "Gemma3TextConfig", {**_HEADS, **_MIXED}),
    "phi3": Decoder("full", "Phi3Config", _PHI),
    "gpt2": Decoder("full", "GPT2Config", _GPT2),
    "opt": Decoder("full", "OPTConfig", _OPT),
}
_BY_CONFIG: Mapping[str, Mapping[str, Any]] = {"llama": PLAIN, "gemma3": WITH_OPTIONS}
DECODERS: Mapping[str, Decoder] = {
    **_ARCHITECTURES,
    **{f"{n}-by-config": replace(_ARCHITECTURES[n], by_config=c) for n, c in _BY_CONFIG.items()},
    "qwen3-lossless": replace(_ARCHITECTURES["qwen3"], lossless=True),
    **{f"{n}-256": replace(of, tokens=LONG) for n, of in _ARCHITECTURES.items()},
    **{
        f"{n}-256-lossless": replace(of, tokens=LONG, lossless=True)
        for n, of in _ARCHITECTURES.items()
    },
}


def build(name: str) -> Any:
    """The model in evaluation mode; the same on every call."""
    import torch
    import transformers

    of = DECODERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, of.config)(**of.arguments)
    config.bos_token_id, config.eos_token_id = 1, 2
    if of.tokens == LONG:  # or most would repeat one token, which proves little
        config.tie_word_embeddings, config.initializer_range = False, 0.1
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model.bfloat16().float() if of.lossless else model


def check(name: str) -> Outcome:
    """One decoder. Raises nothing."""
    import torch

    from torch_pruner.dynamo.run import reports

    of = DECODERS[name]
    torch._dynamo.reset()  # a cache of another length, in a model before, is not this one's matter
    os.environ["TORCH_PRUNER_EFFORT"] = "none"  # where a config leaves no room for options
    try:
        model = build(name)
        prompt = torch.randint(3, VOCABULARY, (1, PROMPT))
        asked = {
            "max_new_tokens": of.tokens, "min_new_tokens": of.tokens, "do_sample": False,
            "pad_token_id": 0, "cache_implementation": "static",
        }  # fmt: skip
        with torch.no_grad():
            expected = model.generate(prompt, **asked)
            if of.by_config is not None:
                asked["compile_config"] = compile_config(of.by_config)
            else:
                model.forward = torch.compile(model.forward, backend="pruner", options=OPTIONS)
            with reports.collect() as graphs:
                for _ in range(2):
                    assert torch.equal(model.generate(prompt, **asked), expected), "other tokens"
    except Exception as err:  # any failure is a line of the table
        return Outcome(name, "failed", f"{type(err).__name__}: {str(err).strip()}"[:240])
    left = sorted({f.node.partition(" ")[0] for g in graphs for f in g.ops_fallback})
    several = [g for g in graphs if g.regions != 1]
    said = f"{len(graphs)} graphs of {_programs(graphs)}"
    if not graphs or left or several:
        return Outcome(name, "failed", f"{said}; in eager: {', '.join(left)}")
    variety = f"{len(expected[0, PROMPT:].unique())} different tokens"
    if of.lossless:
        if (narrow := _narrow_programs()) < len(graphs):
            return Outcome(name, "failed", f"{narrow} of {said} read 16 bits")
        said += ", weights of 16 bits"
    return Outcome(name, "compiled", f"{said}; {variety}")


def _narrow_programs() -> int:
    """How many of the programs that are alive read weights of 16 bits for those of 32."""
    import gc

    from torch_pruner.dynamo.run.narrow_call import NarrowRegionCall

    return sum(type(x) is NarrowRegionCall for x in gc.get_objects())


def compile_config(arguments: Mapping[str, Any]) -> Any:
    """What users write for a CPU, where ``generate`` compiles only when it is told to."""
    from transformers import CompileConfig

    config = CompileConfig(backend="pruner", **arguments)
    config._compile_all_devices = True
    return config


def _programs(graphs: Sequence[GraphReport]) -> str:
    most = max((g.regions for g in graphs), default=0)
    return f"one program, {sum(g.ops_compiled for g in graphs)} operators" if most == 1 else (
        f"up to {most} programs"
    )  # fmt: skip


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The Markdown page."""
    count = collections.Counter(o.status for o in outcomes)
    yield "# Decoders of transformers"
    yield ""
    yield (
        "Written by `python -m tests.suites.decoders`: small random models generate with a static"
        ' cache, twice. "Compiled": the tokens are eager\'s, every graph is one program, and no'
        " operator is left to eager."
    )
    yield ""
    yield f"{count['compiled']} compiled, {count['failed']} failed."
    yield ""
    yield "| decoder | cache | tokens | status | |"
    yield "| --- | --- | --- | --- | --- |"
    for o in outcomes:
        of = DECODERS[o.name]
        yield f"| {o.name} | {of.cache} | {of.tokens} | {o.status} | {cell(o.reason)} |"


def main(arguments: list[str] | None = None) -> int:
    return command(
        "tests.suites.decoders", __doc__, lambda: list(DECODERS), check, table, arguments
    )


if __name__ == "__main__":
    sys.exit(main())
