"""OpenVINO: a model that ``openvino_export`` made, decoding by requests to its runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.decoding.decoder import Decoder, Setting

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def file_of(setting: Setting, kind: str) -> Path:
    return setting.folder / f"openvino-{kind}.xml"


class OpenVinoDecoder(Decoder):
    """``precision``: what products are computed in, OpenVINO's hint."""

    def __init__(self, setting: Setting, kind: str, precision: str = "f32") -> None:
        import openvino

        path = file_of(setting, kind)
        core = openvino.Core()
        model = core.read_model(path)
        self.weight_bytes = _weight_bytes(model)
        how = {
            "INFERENCE_PRECISION_HINT": precision,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": setting.threads,
        }
        if kind == "f32":
            how |= {"KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        self.request = core.compile_model(model, "CPU", how).create_infer_request()
        self.beam = np.zeros(1, np.int32)
        self.token = self.position = 0

    def fill(self, prompt: Sequence[int]) -> np.ndarray:
        self.request.reset_state()
        self.position = 0
        scores = self._infer(prompt)
        return scores.copy()

    def step(self) -> None:
        self._infer([self.token])

    def _infer(self, tokens: Sequence[int]) -> np.ndarray:
        count = len(tokens)
        at = np.arange(self.position, self.position + count, dtype=np.int64)[None]
        feeds = {
            "input_ids": np.array([tokens], np.int64),
            "position_ids": at,
            "beam_idx": self.beam,
        }
        found = self.request.infer(feeds, share_inputs=True, share_outputs=True)
        scores: np.ndarray = found[0][0, -1]
        self.token, self.position = int(scores.argmax()), self.position + count
        return scores


def _weight_bytes(model: Any) -> int:
    """Of the constants behind matrix products; embeddings are gathered, which reads one row."""
    found: dict[str, int] = {}
    for node in model.get_ops():
        if node.get_type_name() == "MatMul":
            found |= _constants(node.input_value(1).get_node())
    return sum(found.values())


def _constants(node: Any) -> dict[str, int]:
    """Bytes by name of the constants that a value is made from; none if it is made from others."""
    if node.get_type_name() == "Constant":
        return {node.get_friendly_name(): node.get_byte_size()}
    found: dict[str, int] = {}
    for k in range(node.get_input_size()):
        inner = _constants(node.input_value(k).get_node())
        if not inner:
            return {}
        found |= inner
    return found
