"""llama.cpp: GGUF files written from the same weights, and decoding through its own C interface.

The package ``llama-cpp-python`` is built from its source distribution, with the flags of this
machine (benchmarks/README.md). Its Python layer takes no part in a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.decoding.decoder import Decoder, Setting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

BATCH = 512


def file_of(setting: Setting, kind: str) -> Path:
    return setting.folder / f"{kind}.gguf"


def convert(setting: Setting, kind: str) -> None:
    """``kind`` is one of gguf's names of formats, or one that only llama.cpp itself can write."""
    import gguf

    from benchmarks.decoding.shapes import restored

    path = file_of(setting, kind)
    if path.exists():
        return
    partial = path.with_suffix(".partial")
    if kind in ("Q4_K", "IQ4_NL"):
        convert(setting, "F32")
        _quantize(file_of(setting, "F32"), partial, kind, setting.threads)
    else:
        rounded = kind != "F32"
        model = restored(setting.model, setting.layers, setting.checkpoint, rounded=rounded)
        write(model, partial, gguf.GGMLQuantizationType[kind])
    partial.rename(path)


def write(model: PreTrainedModel, path: Path, kind: Any) -> None:
    """All matrices in one format, vectors in float32; without a vocabulary."""
    import gguf

    config = model.config
    architecture = {"llama": "LLAMA", "qwen2": "QWEN2", "gpt2": "GPT2"}[config.model_type]
    arch = gguf.MODEL_ARCH[architecture]
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    out = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[arch])
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(layers)
    out.add_head_count(heads)
    out.add_vocab_size(config.vocab_size)
    out.add_tokenizer_model("no_vocab")
    if architecture == "GPT2":
        out.add_feed_forward_length(config.n_inner or 4 * config.hidden_size)
        out.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        out.add_feed_forward_length(config.intermediate_size)
        out.add_head_count_kv(config.num_key_value_heads)
        out.add_layer_norm_rms_eps(config.rms_norm_eps)
        out.add_rope_freq_base(config.rope_parameters["rope_theta"])
        out.add_rope_dimension_count(config.hidden_size // heads)
    names = gguf.get_tensor_name_map(arch, layers)
    for name, array in _arrays(model):
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        narrow = kind if array.ndim == 2 and "position_embd" not in target else None
        if narrow in (None, gguf.GGMLQuantizationType.F32):
            out.add_tensor(target, array)
        else:
            out.add_tensor(target, gguf.quants.quantize(array, narrow), raw_dtype=narrow)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _arrays(model: PreTrainedModel) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters as llama.cpp wants them: outputs first, rotated pairs side by side in Llamas."""
    config = model.config
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if config.model_type == "gpt2" and name.endswith(
            ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        ):
            array = np.ascontiguousarray(array.T)
        if config.model_type == "llama" and ".q_proj." in name:
            array = _pairs(array, config.num_attention_heads)
        if config.model_type == "llama" and ".k_proj." in name:
            array = _pairs(array, config.num_key_value_heads)
        yield name, array


def _pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """transformers rotates number i with i + size / 2 of a head; Llamas there 2 i with 2 i + 1."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def _quantize(source: Path, target: Path, kind: str, threads: int) -> None:
    import llama_cpp

    types = {
        "Q4_K": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S,
        "IQ4_NL": llama_cpp.LLAMA_FTYPE_MOSTLY_IQ4_NL,
    }
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.nthread, how.pure = types[kind], threads, True
    if status := llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), how):
        raise RuntimeError(f"llama_model_quantize: {status}")


class LlamaCppDecoder(Decoder):
    """``repack``: weights may be copied into the layouts that its kernels prefer, its default."""

    def __init__(self, setting: Setting, kind: str, *, repack: bool = True) -> None:
        import llama_cpp

        self.api = api = llama_cpp
        api.llama_backend_init()
        path = file_of(setting, kind)
        self.weight_bytes = _weight_bytes(path)
        how = api.llama_model_default_params()
        how.use_extra_bufts = repack
        self.model = api.llama_model_load_from_file(str(path).encode(), how)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path.name}")
        context = api.llama_context_default_params()
        context.n_ctx = max(setting.length, BATCH)
        context.n_batch = context.n_ubatch = BATCH
        context.n_threads = context.n_threads_batch = setting.threads
        context.no_perf = True
        self.context = api.llama_init_from_model(self.model, context)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no context for {path.name}")
        self.words = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.memory = api.llama_get_memory(self.context)
        self.token = self.first = 0

    def fill(self, prompt: Sequence[int]) -> np.ndarray:
        self._forget(0)
        for at in range(0, len(prompt), BATCH):
            self._decode(prompt[at : at + BATCH])
        scores = self._scores().copy()
        self.token = self.first = int(scores.argmax())
        return scores

    def rewind(self, prompt: Sequence[int]) -> None:
        self._forget(len(prompt))
        self.token = self.first

    def step(self) -> None:
        self._decode([self.token])
        self.token = int(self._scores().argmax())

    def _decode(self, tokens: Sequence[int]) -> None:
        ids = (self.api.llama_token * len(tokens))(*tokens)
        batch = self.api.llama_batch_get_one(ids, len(tokens))
        if status := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode: {status}")

    def _scores(self) -> np.ndarray:
        pointer = self.api.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(pointer, shape=(self.words,))

    def _forget(self, position: int) -> None:
        self.api.llama_memory_seq_rm(self.memory, 0, position, -1)


def _weight_bytes(path: Path) -> int:
    """All tensors but the table of embeddings, unless that is the output layer's as well."""
    import gguf

    sizes = {t.name: int(t.n_bytes) for t in gguf.GGUFReader(str(path)).tensors}
    if "output.weight" in sizes:
        sizes.pop("token_embd.weight")
    sizes.pop("position_embd.weight", None)
    return sum(sizes.values())
