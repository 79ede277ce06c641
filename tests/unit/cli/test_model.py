"""From ``MODEL`` to a module and inputs; whatever cannot be used is status 2 with the reason."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., tuple[int, str, str]]


def used(run: Run, fake_api: Any, *argv: str) -> dict[str, Any]:
    """What the api was called with."""
    status, _, err = run("tune", *argv)
    assert status == 0, err
    return fake_api.calls[-1]


@pytest.mark.parametrize("reference", ["net.py:make", "net:make", "./net.py:make"])
def test_a_factory_with_inputs(run: Run, fake_api: Any, reference: str) -> None:
    call = used(run, fake_api, reference)
    assert isinstance(call["model"], torch.nn.Linear)
    assert [i[0].shape for i in call["inputs"]] == [(3, 4)]
    assert call["backward"] is False


def test_a_package_in_the_working_directory(run: Run, fake_api: Any, here: Path) -> None:
    (here / "zoo").mkdir()
    (here / "zoo" / "__init__.py").touch()
    (here / "zoo" / "small.py").write_text((here / "net.py").read_text())
    assert isinstance(used(run, fake_api, "zoo.small:make")["model"], torch.nn.Linear)
    for name in ("zoo", "zoo.small"):
        del sys.modules[name]


def test_a_file_imports_its_neighbours(
    run: Run, fake_api: Any, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "neighbour.py").write_text((here / "net.py").read_text())
    (here / "elsewhere" / "entry.py").write_text("from neighbour import make\n")
    assert isinstance(used(run, fake_api, "elsewhere/entry.py:make")["model"], torch.nn.Linear)
    monkeypatch.delitem(sys.modules, "neighbour")


def test_inputs_of_their_own_come_from_the_same_module_object(run: Run, fake_api: Any) -> None:
    (call,) = [used(run, fake_api, "net.py:bare", "--inputs", "net.py:two_shapes")]
    first, second = call["inputs"]
    assert first[0].shape == (1, 4)
    assert second["input"].shape == (2, 4)


def test_a_module_is_as_good_as_a_factory_and_a_tensor_as_a_tuple(run: Run, fake_api: Any) -> None:
    call = used(run, fake_api, "net.py:module", "--inputs", "net.py:tensor")
    assert isinstance(call["model"], torch.nn.Linear)
    assert call["inputs"][0][0].shape == (5, 4)


def test_the_model_is_in_evaluation_mode_unless_it_is_to_be_trained(
    run: Run, fake_api: Any
) -> None:
    assert not used(run, fake_api, "net.py:probabilistic")["model"].training
    call = used(run, fake_api, "net.py:probabilistic", "--train")
    assert call["model"].training
    assert call["backward"] is True


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["net.onnx"], "No such file"),
        (["dir/NET.ONNX"], "No such file"),
        (
            ["net"],
            "give package.module:factory, file.py:factory, model.onnx or hf:DIR_OR_CONFIG_JSON",
        ),
        (["net.py"], "give package.module:factory"),
        (["absent.py:make"], "there is no file absent.py"),
        (["absent_package.net:make"], "No module named 'absent_package'"),
        (["net.py:absent"], "net.py has no 'absent'"),
        (["net.py:bare"], "it comes without inputs; give --inputs"),
        (["net.py:number"], "the factory returns int"),
        (["net.py:MODEL"], "has no 'MODEL'"),
        (["net.py:fails"], "calling the factory raised ValueError: first line"),
        (["net.py:leaves"], "calling the factory raised SystemExit: 3"),
        (["broken.py:make"], "running broken.py raised SyntaxError"),
        (["net.py:bare", "--inputs", "net.py:fails"], "calling it raised ValueError: first line"),
        (["net.py:bare", "--inputs", "net.py:text"], "its inputs are of type str"),
        (["net.py:bare", "--inputs", "net.py:nothing"], "its list of inputs is empty"),
        (["net.py:bare", "--inputs", "net.py:misfit"], "running it on its inputs raised Runtime"),
        (["net.py:make", "--batch", "2"], "--batch, --seq and --dtype are for hf: models"),
        (["hf:absent"], "never downloaded"),
    ],
)
def test_what_cannot_be_used(
    run: Run, fake_api: Any, here: Path, argv: list[str], says: str
) -> None:
    (here / "broken.py").write_text("def make(:\n")
    status, out, err = run("tune", "--json", *argv)
    assert (status, out) == (2, "")
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not fake_api.calls


def bert(here: Path, **changes: Any) -> Path:
    """A configuration file of a very small BERT."""
    small = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 11}
    config = {"model_type": "bert", "intermediate_size": 8, **small, **changes}
    (here / "bert").mkdir(exist_ok=True)
    path = here / "bert" / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def transformers() -> Any:
    return pytest.importorskip("transformers")


def test_hf_configurations(run: Run, fake_api: Any, here: Path, transformers: Any) -> None:
    call = used(
        run, fake_api, f"hf:{bert(here)}", "--batch", "2", "--seq", "5", "--dtype", "bfloat16"
    )
    assert isinstance(call["model"], transformers.BertModel)
    assert not call["model"].training
    assert call["model"].dtype == torch.bfloat16
    (inputs,) = call["inputs"]
    assert inputs["input_ids"].shape == (2, 5)
    assert used(run, fake_api, "hf:bert")["inputs"][0]["input_ids"].shape == (1, 128)
    status, _, err = run("tune", "hf:bert", "--seq", "9999")
    assert status == 2
    assert "it takes at most 512 tokens, not 9999" in err


def test_hf_weights_come_from_the_folder(
    run: Run, fake_api: Any, here: Path, transformers: Any
) -> None:
    saved = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(bert(here)))
    saved.save_pretrained(here / "weights")
    call = used(run, fake_api, "hf:weights")
    name, value = next(iter(saved.named_parameters()))
    assert torch.equal(dict(call["model"].named_parameters())[name], value)


def test_hf_images_and_what_has_no_obvious_inputs(
    run: Run, fake_api: Any, here: Path, transformers: Any
) -> None:
    vit = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "image_size": 32}
    (here / "vit.json").write_text(json.dumps({"model_type": "vit", "intermediate_size": 8, **vit}))
    call = used(run, fake_api, "hf:vit.json", "--batch", "2")
    assert call["inputs"][0]["pixel_values"].shape == (2, 3, 32, 32)
    small = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8}
    more = {"decoder_ffn_dim": 8, "encoder_attention_heads": 1, "decoder_attention_heads": 1}
    whisper = {"model_type": "whisper", "vocab_size": 11, "pad_token_id": 0, **small, **more}
    (here / "whisper.json").write_text(json.dumps(whisper))
    status, _, err = run("tune", "hf:whisper.json")
    assert status == 2
    assert "give --inputs package.module:callable" in err


def test_hf_files_that_are_no_configuration(
    run: Run, fake_api: Any, here: Path, transformers: Any
) -> None:
    status, out, err = run("tune", "hf:net.py", "--json")
    assert (status, out) == (2, "")
    assert "building it raised" in err.splitlines()[-1]
