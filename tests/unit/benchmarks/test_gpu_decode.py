"""Steps of decoding on a GPU: the table, with what runs on a CPU."""

from __future__ import annotations

import json

import pytest

transformers = pytest.importorskip("transformers")

from benchmarks.decoding import shapes  # noqa: E402  they import transformers
from benchmarks.gpu import decode  # noqa: E402


def tiny(layers: int) -> transformers.LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=layers, vocab_size=1024, **sizes)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(autouse=True)
def _one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "SHAPES", {"tiny": shapes.Shape("tiny", 1, tiny)})


def test_steps_beside_reading(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setitem(decode.CONTESTANTS, "broken", decode.Contestant("nowhere"))
    out = tmp_path / "decode.json"
    given = [
        "--models", "tiny", "--device", "cpu", "--contestants", "eager,broken", "--length", "16",
        "--prompt", "4", "--tokens", "2", "--rounds", "2", "--out", str(out),
    ]  # fmt: skip
    assert decode.main(given) == 1, "one could not"
    row = json.loads(out.read_text())["rows"]["tiny"]
    eager = row["contestants"]["eager"]
    assert eager["difference"] == 0
    assert len(eager["turns"]) == 2
    assert row["read_s"] > 0
    read, ran, failed = capsys.readouterr().out.splitlines()[2:5]
    assert read.startswith("| tiny | read |")
    assert ran.startswith("| tiny | eager |")
    assert failed.startswith("| tiny | broken | KeyError")


@pytest.mark.parametrize("given", [["--models", "huge"], ["--contestants", "eager,nobody"]])
def test_names_that_nobody_knows(given, capsys) -> None:
    with pytest.raises(SystemExit):
        decode.main(given if "--models" in given else ["--models", "tiny", *given])
    assert given[-1].split(",")[-1] in capsys.readouterr().err
