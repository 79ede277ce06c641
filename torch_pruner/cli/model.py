"""From the text of ``MODEL`` to a module and its inputs.

In: a reference to a factory, or a configuration of ``transformers``. Out: ``Loaded``. Whatever the
user's code raises becomes ``UnsupportedModel`` with one line; ``TORCH_PRUNER_LOG=debug`` has the
rest. Nothing is downloaded. Imports torch only inside functions, for ``--help`` to be quick.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch_pruner import log
from torch_pruner.cli.arguments import positive
from torch_pruner.exc import PrunerError, UnsupportedModel

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from torch import nn

T = TypeVar("T")
Inputs = tuple[Any, ...] | dict[str, Any]

FORMS = "package.module:factory, file.py:factory, model.onnx or hf:DIR_OR_CONFIG_JSON"
DTYPES = ("float32", "bfloat16", "float16")
BATCH, SEQ = 1, 128
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_logger = log.logger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A module and what it is called with: a tuple or a dict of keywords for each shape."""

    name: str
    module: nn.Module
    inputs: list[Inputs]


def add_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """``MODEL``, and what makes inputs for it."""
    parser.add_argument("model", metavar="MODEL", help=FORMS, nargs="?" if optional else None)
    parser.add_argument(
        "--inputs",
        metavar="REF",
        help="package.module:callable or file.py:callable; returns a tuple of inputs, a dict of"
        " keyword inputs, or a list of them (one for each shape)",
    )
    parser.add_argument(
        "--train",
        action="store_true",
        help="the model in training mode, with its gradients (default: evaluation mode)",
    )
    group = parser.add_argument_group("inputs and weights of hf: models")
    group.add_argument("--batch", type=positive, metavar="N", help=f"batch size (default: {BATCH})")
    group.add_argument(
        "--seq", type=positive, metavar="N", help=f"sequence length (default: {SEQ})"
    )
    group.add_argument("--dtype", choices=DTYPES, help=f"of weights (default: {DTYPES[0]})")


def load(args: argparse.Namespace) -> Loaded:
    """Build the model and its inputs, and run it once on each of them.

    Raises UnsupportedModel, with the reason in its first line.
    """
    name: str = args.model
    is_hf, is_onnx = name.startswith("hf:"), name.lower().endswith(".onnx")
    if not (is_hf or is_onnx) and any(v is not None for v in (args.batch, args.seq, args.dtype)):
        raise UnsupportedModel(name, "--batch, --seq and --dtype are for hf: models")
    if is_onnx:
        return _from_onnx(args)
    module, inputs = _from_hf(args) if is_hf else _from_factory(name)
    if args.inputs is not None:
        made = _attribute(args.inputs)
        inputs = _theirs(args.inputs, "calling it", made) if callable(made) else made
    if inputs is None:
        fix = "give --inputs package.module:callable, or let the factory return (module, inputs)"
        raise UnsupportedModel(name, "it comes without inputs", fix)
    loaded = Loaded(name, module.train(args.train), _listed(args.inputs or name, inputs))
    _try_out(loaded)
    return loaded


def _from_factory(name: str) -> tuple[nn.Module, Any]:
    """What the factory returns; a module in place of a factory is taken as it is."""
    from torch import nn

    found = _attribute(name)
    if not isinstance(found, nn.Module):
        if not callable(found):
            raise UnsupportedModel(
                name, f"{type(found).__name__} is neither a factory nor a module"
            )
        found = _theirs(name, "calling the factory", found)
    module, inputs = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        fix = "let it return an nn.Module, or (module, inputs)"
        raise UnsupportedModel(name, f"the factory returns {kind}", fix)
    return module, inputs


def _attribute(reference: str) -> Any:
    """The object that ``package.module:name`` or ``file.py:name`` refers to."""
    place, colon, path = reference.rpartition(":")
    if not colon or not place or not path:
        raise UnsupportedModel(reference, "it is no reference", f"give {FORMS}")
    found: Any = _file(reference, place) if place.endswith(".py") else _module(reference, place)
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise UnsupportedModel(reference, f"{place} has no {path!r}") from None
    return found


def _module(reference: str, name: str) -> Any:
    _search_first(Path.cwd())  # as `python -m` does; a console script has its own folder instead
    return _theirs(reference, f"importing {name}", lambda: importlib.import_module(name))


def _file(reference: str, place: str) -> Any:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise UnsupportedModel(reference, f"there is no file {place}")
    name = f"_torch_pruner_model_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    _search_first(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    run = spec.loader.exec_module
    try:
        _theirs(reference, f"running {place}", lambda: run(module))
    except UnsupportedModel:
        del sys.modules[name]
        raise
    return module


def _search_first(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _from_onnx(args: argparse.Namespace) -> Loaded:
    """The model for one set of shapes: those of ``--inputs``, or ``--batch`` and ``--seq`` in the
    places of its dynamic axes."""
    from torch_pruner.onnx.function import OnnxFunction
    from torch_pruner.onnx.load import load as load_onnx

    name: str = args.model
    if args.train or args.dtype:
        raise UnsupportedModel(name, "ONNX models have their own types and no training mode")
    function = OnnxFunction(load_onnx(Path(name).expanduser()))
    if args.inputs is not None:
        made = _attribute(args.inputs)
        made = _theirs(args.inputs, "calling it", made) if callable(made) else made
        values, *more = _listed(args.inputs, made)
        if more:
            raise UnsupportedModel(name, "an ONNX model takes one set of inputs at a time")
    else:
        values = function.examples(args.batch or BATCH, args.seq or SEQ)
    missing = set(function.inputs) - set(values) if isinstance(values, dict) else ()
    if missing or len(values) != len(function.inputs):
        raise UnsupportedModel(name, f"its inputs are {', '.join(function.inputs)}")
    ordered = [values[n] for n in function.inputs] if isinstance(values, dict) else list(values)
    module = _theirs(name, "tracing it", lambda: function.traced(ordered))
    loaded = Loaded(name, module, [tuple(ordered)])
    _try_out(loaded)
    return loaded


def _from_hf(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    """A model of ``transformers`` with weights from its folder, or random ones, and inputs."""
    name, path = args.model, Path(args.model.removeprefix("hf:")).expanduser()
    if not path.exists():
        fix = "models are read from disk and never downloaded"
        raise UnsupportedModel(name, f"there is no file or folder {path}", fix)
    try:
        import transformers
    except ImportError:
        fix = 'pip install "torch-pruner[demo]"'
        raise UnsupportedModel(name, "transformers is not installed", fix) from None

    def build() -> tuple[nn.Module, Any]:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        # Caches of keys and values are for generation; one forward pass is compiled here.
        config.use_cache = False
        auto = transformers.AutoModel
        if path.is_dir() and any(f for pattern in _WEIGHTS for f in path.glob(pattern)):
            model = auto.from_pretrained(str(path), config=config, local_files_only=True)
        else:
            model = auto.from_config(config)
        return model, config

    model, config = _theirs(name, "building it", build)
    module = model.to(getattr(_torch(), args.dtype or DTYPES[0]))
    if args.inputs is not None:
        return module, None
    return module, _hf_inputs(name, module, config, args)


def _hf_inputs(name: str, module: Any, config: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Random inputs of the model's main kind: tokens or pixels."""
    torch = _torch()
    generator = torch.Generator().manual_seed(0)
    batch = BATCH if args.batch is None else args.batch
    seq = SEQ if args.seq is None else args.seq
    if module.main_input_name == "input_ids":
        text = config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None) or seq
        if seq > longest:
            raise UnsupportedModel(
                name, f"it takes at most {longest} tokens, not {seq}", "see --seq"
            )
        tokens = torch.randint(0, text.vocab_size, (batch, seq), generator=generator)
        more = {"decoder_input_ids": tokens} if config.is_encoder_decoder else {}
        return {"input_ids": tokens, **more}
    if module.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        shape = (batch, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": torch.randn(shape, generator=generator).to(module.dtype)}
    reason = f"inputs of kind {module.main_input_name!r} cannot be made up"
    raise UnsupportedModel(name, reason, "give --inputs package.module:callable")


def _listed(name: str, inputs: Any) -> list[Inputs]:
    """One tuple or dict for each shape; a tensor on its own is the one argument."""
    from torch import Tensor

    def one(value: Any) -> Inputs:
        if isinstance(value, Tensor):
            return (value,)
        if isinstance(value, tuple):
            return value
        if isinstance(value, Mapping):
            return dict(value)
        kind = type(value).__name__
        fix = "inputs are a tuple, a dict of keyword arguments, or a list of those"
        raise UnsupportedModel(name, f"its inputs are of type {kind}", fix)

    if isinstance(inputs, list) and not inputs:
        raise UnsupportedModel(name, "its list of inputs is empty")
    return [one(v) for v in inputs] if isinstance(inputs, list) else [one(inputs)]


def call(module: Callable[..., Any], inputs: Inputs) -> Any:
    """Call a module, or what was made of it, with a tuple of positional or a dict of named ones."""
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def _try_out(loaded: Loaded) -> None:
    """What a model cannot do in eager is no fault of the compiler, and need not be looked for."""
    for inputs in loaded.inputs:
        run = functools.partial(call, loaded.module, inputs)
        with _torch().no_grad():
            _theirs(loaded.name, "running it on its inputs", run)


def _theirs(name: str, doing: str, work: Callable[[], T]) -> T:
    """Run code that is not ours: whatever it raises makes it an unusable input."""
    try:
        return work()
    except PrunerError:
        raise
    except (Exception, SystemExit) as err:
        _logger.debug("%s: %s failed", name, doing, exc_info=True)
        reason = next(iter(str(err).splitlines()), "")
        text = f"{doing} raised {type(err).__name__}" + (f": {reason}" if reason else "")
        raise UnsupportedModel(name, text, "TORCH_PRUNER_LOG=debug shows where") from err


def _torch() -> Any:
    import torch

    return torch
