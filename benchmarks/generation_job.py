"""One process that generates twice: what was compiled, what had to wait, tokens per second.

In and out as of ``benchmarks.job``. Small models with random weights; the tokens are compared with
those that the model makes before anything is compiled.
"""

from __future__ import annotations

import inspect
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.job import ProcessJob, answer_with, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

VOCABULARY, POSITIONS = 1000, 512
WAIT_S = 300.0  # for what is compiled in the background, between two calls


@dataclass(frozen=True, slots=True)
class Way:
    """How ``generate`` is called: lengths of the prompts of a batch, and its arguments."""

    prompts: tuple[int, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)


_PADDED = (5, 12, 9, 17)
WAYS: Mapping[str, Way] = {
    "padded": Way(_PADDED),  # transformers' default: a cache that grows by a token
    "padded-static": Way(_PADDED, {"cache_implementation": "static"}),
    "single": Way((17,)),
    "single-static": Way((17,), {"cache_implementation": "static"}),
    "beams": Way(_PADDED[:2], {"num_beams": 3}),
    "sampled": Way(_PADDED, {"do_sample": True, "num_return_sequences": 2}),
}


@dataclass(frozen=True, slots=True)
class GenerationJob(ProcessJob):
    """``backend`` may be eager. ``calls`` after the first that are timed."""

    network: str
    way: str
    backend: str
    layers: int = 2
    width: int = 256
    tokens: int = 128
    calls: int = 3


def _llama(job: GenerationJob) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_width(job), intermediate_size=3 * job.width))


def _mistral(job: GenerationJob) -> Any:
    """Its window is full on the way."""
    from transformers import MistralConfig, MistralForCausalLM

    window = {"sliding_window": 64, "intermediate_size": 3 * job.width}
    return MistralForCausalLM(MistralConfig(**_width(job), **window))


def _gpt2(job: GenerationJob) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": job.width, "n_layer": job.layers, "n_head": 4, "n_positions": POSITIONS}
    return GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=VOCABULARY, bos_token_id=1))


def _t5(job: GenerationJob) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": job.width, "d_kv": job.width // 4, "d_ff": 3 * job.width, "num_heads": 4}
    config = T5Config(
        **sizes, num_layers=job.layers, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def _bart(job: GenerationJob) -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    half = {"layers": job.layers, "attention_heads": 4, "ffn_dim": 3 * job.width}
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in half.items()}
    config = BartConfig(
        **sizes, d_model=job.width, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS,
        decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    return BartForConditionalGeneration(config)


def _whisper(job: GenerationJob) -> Any:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    half = {"layers": job.layers, "attention_heads": 4, "ffn_dim": 3 * job.width}
    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in half.items()}
    config = WhisperConfig(
        **sizes, d_model=job.width, vocab_size=VOCABULARY, max_target_positions=POSITIONS,
        max_source_positions=100, num_mel_bins=16, decoder_start_token_id=2, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def _width(job: GenerationJob) -> dict[str, int]:
    return {
        "hidden_size": job.width, "num_hidden_layers": job.layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS,
    }  # fmt: skip


NETWORKS: Mapping[str, Callable[[GenerationJob], Any]] = {
    "llama": _llama, "mistral": _mistral, "gpt2": _gpt2, "t5": _t5, "bart": _bart,
    "whisper": _whisper,
}  # fmt: skip


def build(job: GenerationJob) -> Any:
    """The model in evaluation mode; the same on every call."""
    import torch

    torch.manual_seed(0)
    model = NETWORKS[job.network](job).eval()
    with torch.no_grad():  # or most would repeat one token, which proves little
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)
    return model


def prompts(job: GenerationJob) -> dict[str, Any]:
    """A batch for ``generate``, shorter prompts padded on the left (of encoders on the right)."""
    import torch

    lengths = WAYS[job.way].prompts
    generator = torch.Generator().manual_seed(1)
    if job.network == "whisper":
        shape = (len(lengths), 16, 200)
        return {"input_features": torch.randn(shape, generator=generator)}
    shape = (len(lengths), max(lengths))
    ids = torch.randint(3, VOCABULARY, shape, generator=generator)
    lacking = torch.tensor([shape[1] - n for n in lengths])[:, None]
    mask = torch.arange(shape[1]).expand(shape) >= lacking
    if job.network in ("t5", "bart"):
        mask = mask.flip(1)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def generate(model: Any, job: GenerationJob) -> Any:
    """Tokens, as many as asked for whatever they are."""
    import torch

    torch.manual_seed(2)
    length = {"max_new_tokens": job.tokens, "min_new_tokens": job.tokens}
    plain = {"do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    with torch.no_grad():
        return model.generate(**prompts(job), **length, **(plain | dict(WAYS[job.way].arguments)))


def run(job: GenerationJob) -> dict[str, Any]:
    """Generates in eager, then with the backend. A step is a call of ``model.forward``."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx

    import torch_pruner
    from torch_pruner.dynamo.run import reports

    job.use_threads()
    model = build(job)
    expected = generate(model, job)
    ours = job.backend == "pruner"
    if job.backend != "eager":
        options = {"options": job.options} if ours else {}
        model.forward = torch.compile(model.forward, backend=job.backend, **options)
    steps = _time_steps(model)
    result: dict[str, Any] = {"status": "ok", "threads": torch.get_num_threads()}
    same = []
    with reports.collect() as graphs:
        seconds = []
        for _ in range(1 + job.calls):
            tokens, took = timed(lambda: generate(model, job))
            same.append(bool(torch.equal(tokens, expected)))  # type: ignore[arg-type]
            seconds.append(took)
            result.setdefault("steps_s", []).append(list(steps))
            steps.clear()
            if ours and job.options.get("compile") == "background":
                result["waited"] = torch_pruner.wait(WAIT_S)
    calls = seconds[2:] or seconds[1:]
    usual = statistics.median(result["steps_s"][-1])
    made = job.tokens * expected.shape[0]
    return result | {
        "captures": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "programs": sum(g.regions for g in graphs if not g.pending),
        "graphs": [g.name for g in graphs],
        "left_to_eager": sorted({o.node.partition(" ")[0] for g in graphs for o in g.ops_fallback}),
        "same_tokens": same,
        "different_tokens": len(expected.unique()),
        "calls_s": seconds,
        "tokens_per_s": made / statistics.median(calls),
        "stalls": [sum(s > max(20 * usual, 0.25) for s in of) for of in result["steps_s"]],
        "slowest_s": [max(of) for of in result["steps_s"]],
    }


def _time_steps(model: Any) -> list[float]:
    """Seconds of every call of ``model.forward`` from now on."""
    forward, found = model.forward, list[float]()

    def step(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = forward(*args, **kwargs)
        found.append(time.perf_counter() - start)
        return out

    step.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]  # it is asked for
    model.forward = step
    return found


def main() -> None:
    job = GenerationJob.from_json(sys.argv[1])
    answer_with(lambda: run(job), Path(sys.argv[2]))


if __name__ == "__main__":
    main()
