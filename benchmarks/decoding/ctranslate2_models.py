"""CTranslate2: its own converter on the same module; a step is timed from inside of its loop."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.decoding.decoder import Decoder, Setting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

READ = "read_bytes"


def folder_of(setting: Setting, kind: str) -> Path:
    return setting.folder / f"ctranslate2-{kind}"


def convert(setting: Setting, kind: str) -> None:
    """``kind``: one of its schemes, ``float32`` or ``int8``. Words are the numbers of tokens."""
    from ctranslate2.converters import transformers as converters

    from benchmarks.decoding.shapes import restored

    rounded = kind != "float32"
    model = restored(setting.model, setting.layers, setting.checkpoint, rounded=rounded)
    words = {str(k): k for k in range(model.config.vocab_size)}
    tokenizer = SimpleNamespace(
        get_vocab=lambda: words, bos_token="0", eos_token="1", unk_token="0", pad_token="0"
    )
    spec = converters._MODEL_LOADERS[type(model.config).__name__](model, tokenizer)
    spec.validate()
    spec.optimize(quantization=kind)
    folder = folder_of(setting, kind)
    folder.mkdir(exist_ok=True)
    spec.save(str(folder))
    (folder / READ).write_text(str(_weight_bytes(spec)))


class CTranslate2Decoder(Decoder):
    """Its interface generates whole texts: ``steps`` takes the times between its callbacks."""

    def __init__(self, setting: Setting, kind: str) -> None:
        import ctranslate2

        folder = folder_of(setting, kind)
        compute = "int8_float32" if kind == "int8" else kind
        self.weight_bytes = int((folder / READ).read_text())
        self.generator = ctranslate2.Generator(
            str(folder), device="cpu", compute_type=compute, intra_threads=setting.threads
        )
        self.text: list[str] = []

    def fill(self, prompt: Sequence[int]) -> np.ndarray:
        self.rewind(prompt)
        found = self.generator.forward_batch([self.text])
        return np.array(found)[0, -1]

    def rewind(self, prompt: Sequence[int]) -> None:
        self.text = [str(k) for k in prompt]

    def step(self) -> None:
        self.steps(1)

    def steps(self, count: int) -> list[float]:
        times: list[float] = []
        words: list[str] = []

        def note(result: Any) -> bool:
            times.append(time.perf_counter())
            words.append(result.token)
            return False

        self._generate(count + 1, note)
        self.text += words[:count]
        return [b - a for a, b in itertools.pairwise(times)]

    def prefill(self, prompt: Sequence[int]) -> float:
        """For the scores of one token it generates it."""
        self.rewind(prompt)
        begin = time.perf_counter()
        self._generate(1, None)
        return time.perf_counter() - begin

    def _generate(self, count: int, note: Any) -> None:
        self.generator.generate_batch(
            [self.text],
            max_length=count,
            min_length=count,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=note,
        )


def _weight_bytes(spec: Any) -> int:
    """Of everything but the embeddings, unless the output layer has the same."""
    given = spec.variables()
    tied = isinstance(given["decoder/projection/weight"], str)  # then it is an alias
    skipped = () if tied else ("decoder/embeddings/",)
    skipped += ("decoder/position_encodings/",)
    kept = (x for name, x in given.items() if not name.startswith(skipped))
    return sum(x.numpy().nbytes for x in kept if not isinstance(x, str))
