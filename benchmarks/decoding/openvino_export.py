"""To OpenVINO: the model with its cache as a state, its weights compressed by NNCF.

optimum-intel exports language models in this form, and OpenVINO GenAI runs them so: the keys and
values are variables of the model, ``beam_idx`` chooses among them. (optimum-intel itself
wants an older transformers than the one that all contestants share.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.decoding.openvino_models import file_of
from benchmarks.decoding.shapes import restored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from benchmarks.decoding.decoder import Setting

GROUP = 64  # of int4 weights, as ours


class _Past:
    """A cache as models call it: what came in, with what is new behind it."""

    is_compileable = False

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.pairs = list(pairs)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.pairs[layer]
        self.pairs[layer] = (torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2))
        return self.pairs[layer]


class _Step(torch.nn.Module):
    """Plain tensors in and out; the scores of the last token only."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        beam_idx: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        chosen = [x.index_select(0, beam_idx) for x in past]
        cache = _Past(list(zip(chosen[::2], chosen[1::2], strict=True)))
        # Not by comparing positions with a range: the length is in the shape of the cache.
        total = past[0].shape[2] + input_ids.shape[1]
        later = torch.arange(total)[None, None, None] > position_ids[:, None, :, None]
        mask = torch.zeros(later.shape).masked_fill(later, torch.finfo(torch.float32).min)
        scores = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return (scores, *(x for pair in cache.pairs for x in pair))


def convert(setting: Setting, kind: str) -> None:
    """``kind``: ``f32``, ``f16``, ``int8`` or ``int4``."""
    import nncf
    import openvino

    rounded = kind != "f32"
    model = restored(setting.model, setting.layers, setting.checkpoint, rounded=rounded)
    made = stateful(model)
    if kind == "int8":
        made = nncf.compress_weights(made, mode=nncf.CompressWeightsMode.INT8_SYM)
    elif kind == "int4":
        made = nncf.compress_weights(
            made,
            mode=nncf.CompressWeightsMode.INT4_SYM,
            group_size=GROUP,
            all_layers=True,
        )
    openvino.save_model(made, file_of(setting, kind), compress_to_fp16=kind == "f16")


@torch.no_grad()
def stateful(model: PreTrainedModel) -> Any:
    import openvino
    from openvino import opset13 as opset
    from openvino._offline_transformations import apply_make_stateful_transformation

    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = config.hidden_size // config.num_attention_heads
    past = [torch.zeros(1, heads, 3, size) for _ in range(2 * config.num_hidden_layers)]
    tokens, at = torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[3, 4]])
    example = (tokens, at, torch.zeros(1, dtype=torch.int32), *past)
    traced = torch.jit.trace(_Step(model), example, check_trace=False)
    made = openvino.convert_model(traced, example_input=example)
    pairs = {}
    for k, (given, found) in enumerate(zip(made.inputs[3:], made.outputs[1:], strict=True)):
        given.get_node().set_partial_shape(openvino.PartialShape([1, heads, -1, size]))
        given.get_tensor().set_names({f"past.{k}"})
        found.get_tensor().set_names({f"present.{k}"})
        pairs[f"past.{k}"] = f"present.{k}"
    for port, name in zip(made.inputs, ("input_ids", "position_ids", "beam_idx"), strict=False):
        port.get_tensor().set_names({name})
    for port in made.inputs[:2]:
        port.get_node().set_partial_shape(openvino.PartialShape([1, -1]))
    made.inputs[2].get_node().set_partial_shape(openvino.PartialShape([1]))
    made.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(made, pairs)
    empty = opset.broadcast(
        opset.constant(0.0, np.float32), opset.constant(np.array([1, heads, 0, size]))
    )
    for node in made.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([empty])
    made.validate_nodes_and_infer_types()
    return made
