"""Decoding beside peers: models, workers, turns and tables; absent runtimes are skipped."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from benchmarks import decode, decode_table
from benchmarks.decoding import contestants, shapes, turns, worker
from benchmarks.decoding.decoder import Decoder, Setting
from benchmarks.decoding.torch_models import TorchDecoder

if TYPE_CHECKING:
    from pathlib import Path

TINY = {
    "llama": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4},
    "gpt2": {"n_embd": 64, "n_head": 4},
}


@pytest.fixture(scope="module")
def llama() -> Any:
    return shapes.build("llama", 1)


def small(kind: str) -> Any:
    """A Llama with grouped heads, or a GPT-2, with a small vocabulary."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_layer=2, vocab_size=1024, **TINY[kind])).eval()
    sizes = TINY["llama"] | {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 1024}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """Of the small Llama, whose weights are in the folder."""
    small_llama = shapes.Shape("small", 2, lambda _: small("llama"))
    monkeypatch.setattr(shapes, "SHAPES", {"small": small_llama})
    torch.save(small("llama").state_dict(), tmp_path / "weights.pt")
    return Setting("small", tmp_path, threads=1, length=16, start=8)


@torch.no_grad()
def expected(model: Any, tokens: list[int]) -> np.ndarray:
    found: np.ndarray = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].numpy()
    return found


class TestShapes:
    def test_weights_come_back_from_a_file_and_may_be_rounded(self, setting: Setting) -> None:
        model = small("llama")
        for rounded in (False, True):
            found = shapes.restored("small", None, setting.checkpoint, rounded=rounded)
            for a, b in zip(model.parameters(), found.parameters(), strict=True):
                assert torch.equal(b, a.bfloat16().float() if rounded else a)
            tokens = setting.prompt()
            again = shapes.round_weights(model) if rounded else model
            assert np.array_equal(expected(found, tokens), expected(again, tokens))

    def test_of_embeddings_a_step_reads_only_what_the_output_shares(self, llama: Any) -> None:
        everything = sum(p.nbytes for p in llama.parameters())
        assert everything - shapes.weight_bytes(llama) == 32000 * 768 * 4
        gpt2 = small("gpt2")
        positions = gpt2.transformer.wpe.weight.nbytes
        everything = sum(p.nbytes for p in gpt2.parameters())
        assert everything - shapes.weight_bytes(gpt2) == positions

    def test_rounded_weights_have_scales(self) -> None:
        model = small("llama")
        norms = sum(p.nbytes for p in model.parameters() if p.dim() < 2)
        matrices = shapes.weight_bytes(model) - norms
        assert shapes.weight_bytes(model, 16) == matrices / 2 + norms
        rows = sum(p.shape[0] for p in shapes.read_by_a_step(model).values() if p.dim() == 2)
        assert shapes.weight_bytes(model, 8, 4) == matrices / 4 + 4 * rows + norms


class TestTorch:
    def test_steps_equal_those_without_a_cache(self, llama: Any) -> None:
        decoder = TorchDecoder(llama, "eager", {}, 8)
        prompt = [5, 6, 7]
        for rounded in (False, True):  # from an empty cache, and over what is in it
            decoder.rounded = rounded
            scores = decoder.fill(prompt)
            np.testing.assert_allclose(scores, expected(llama, prompt), rtol=1e-4, atol=1e-4)
            tokens = [*prompt, int(decoder.token)]
            decoder.step()
            assert int(decoder.token) == int(expected(llama, tokens).argmax())
        decoder.rewind(prompt)
        assert (decoder.position, int(decoder.token)) == (3, tokens[3])
        assert len(decoder.steps(9)) == 9, "a full cache begins again"


class TestRuntimes:
    """The same scores from the same weights, a token at a time and all at once."""

    def check(self, name: str, setting: Setting, bound: float) -> Decoder:
        contestant = contestants.CONTESTANTS[name]
        assert contestant.convert is not None
        contestant.convert(setting)
        decoder = contestant.load(setting)
        model, prompt = small("llama"), setting.prompt()
        exact = expected(model, prompt)
        assert np.abs(decoder.fill(prompt) - exact).max() <= bound * np.abs(exact).max()
        assert all(s > 0 for s in decoder.steps(3))
        decoder.rewind(prompt)
        assert len(decoder.steps(2)) == 2
        assert decoder.prefill(prompt) > 0
        return decoder

    def test_openvino(self, setting: Setting) -> None:
        pytest.importorskip("openvino")
        pytest.importorskip("nncf")
        self.check("openvino", setting, 1e-4)
        self.check("openvino-int8", setting, 0.1)

    def test_llama_cpp(self, setting: Setting) -> None:
        pytest.importorskip("gguf")
        pytest.importorskip("llama_cpp")
        self.check("llama.cpp", setting, 2e-3)
        self.check("llama.cpp-q8_0", setting, 0.1)

    def test_ctranslate2(self, setting: Setting) -> None:
        pytest.importorskip("ctranslate2")
        self.check("ctranslate2", setting, 1e-4)


class Fake(Decoder):
    """Counts its tokens."""

    weight_bytes = 100

    def __init__(self, words: int = 4) -> None:
        self.words, self.done, self.filled = words, 0, 0

    def fill(self, prompt: Any) -> np.ndarray:
        self.filled += 1
        return np.ones(self.words, np.float32)

    def step(self) -> None:
        self.done += 1


class TestWorker:
    def serve(self, of: worker.Worker, *commands: dict[str, Any]) -> list[dict[str, Any]]:
        answers = io.StringIO()
        worker.serve(of, [json.dumps(c) for c in commands], answers)
        return [json.loads(line) for line in answers.getvalue().splitlines()]

    @pytest.fixture
    def fake(self, monkeypatch: pytest.MonkeyPatch) -> Fake:
        fake = Fake()
        known = {"fake": contestants.Contestant(32, lambda _: fake)}
        monkeypatch.setattr(worker, "CONTESTANTS", known)
        return fake

    def test_it_does_what_it_is_told_and_begins_again_in_time(
        self, fake: Fake, tmp_path: Path
    ) -> None:
        setting = Setting("llama", tmp_path, 1, length=16, start=8)
        np.save(setting.scores(rounded=False), np.array([1, 1, 1, 2], np.float32))
        of = worker.Worker("fake", setting)
        steps = {"do": "steps", "wake": 1, "count": 3}
        loaded, first, second, memory = self.serve(
            of, {"do": "load"}, steps, steps, {"do": "memory"}
        )
        assert loaded["ok"]["difference"] == 0.5
        assert loaded["ok"]["weight_bytes"] == 100
        assert [len(x["ok"]["seconds"]) for x in (first, second)] == [3, 3]
        assert fake.done == 1 + 4 + 4
        assert fake.filled == 2, "after 1 + 4 tokens of 8 there is no room for 4 more"
        assert memory["ok"]["rss_bytes"] > memory["ok"]["anonymous_bytes"] > 1 << 20

    def test_scores_are_those_of_the_prompt(self, setting: Setting) -> None:
        weights = setting.checkpoint.read_bytes()
        for of in (setting, replace(setting, start=4)):
            assert not of.has_reference
            worker.Worker("eager", of).checkpoint()
            assert of.has_reference
            found = np.load(of.scores(rounded=False))
            exact = expected(small("llama"), of.prompt())
            np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6)
        assert replace(setting, length=12).has_reference, "longer caches change nothing"
        assert setting.checkpoint.read_bytes() == weights

    def test_what_goes_wrong_is_an_answer(self, fake: Fake, tmp_path: Path) -> None:
        of = worker.Worker("fake", Setting("llama", tmp_path, 1, length=16, start=8))
        (answer,) = self.serve(of, {"do": "load"})
        assert "FileNotFoundError" in answer["error"]


class TestTurns:
    def test_the_order_rotates_and_who_fails_falls_out(self) -> None:
        order: list[str] = []

        def turn(name: str, fails: bool = False) -> Any:
            def call() -> list[float]:
                order.append(name)
                if fails and order.count(name) == 2:
                    raise turns.Failed("it crashed")
                return [1.0, 2.0]

            return call

        samples, failed = turns.in_turns(
            {"a": turn("a"), "b": turn("b", fails=True)},
            rounds=3,
            pause_s=0.1,
            sleep=lambda _: None,
        )
        assert order == ["a", "b", "b", "a", "a"]
        assert samples == {"a": [1.0, 2.0] * 3}
        assert failed == {"b": "it crashed"}

    def test_a_process_that_fails_says_why(self, tmp_path: Path) -> None:
        setting = Setting("llama", tmp_path, threads=1, length=16, start=8)
        process = turns.Process("nobody", setting, 60.0)
        try:
            with pytest.raises(turns.Failed, match="KeyError: 'nobody'"):
                process.ask("load")
            process.process.kill()
            with pytest.raises(turns.Failed, match="crash: SIGKILL"):
                process.ask("load")
        finally:
            process.close()
            process.close()


def timed(seconds: float, **more: Any) -> dict[str, Any]:
    times = dict.fromkeys(("median_s", "q1_s", "q3_s", "min_s"), seconds)
    found = {"latency": {"name": "x", "n": 3} | times, "difference": 0.0}
    return found | {"weight_bytes": 500_000_000, "rss_bytes": 1, "anonymous_bytes": 1} | more


def row(**more: Any) -> dict[str, Any]:
    of = {
        "eager": timed(0.1),
        "openvino": timed(0.06),
        "llama.cpp": {"reason": "ModuleNotFoundError: No module named 'llama_cpp'"},
        "pruner": timed(0.05),
    }
    machine = {"gpu": None, "cpu": "a CPU", "cores": 2, "threads": 2, "versions": {}}
    machine |= {"commit": "c", "date": "d"}
    found = {"model": "llama", "title": "Llama 12x768", "length": 256, "prefill": 0, "bits": 32}
    return found | {"read_bytes_per_s": 12.5e9, "machine": machine, "contestants": of} | more


class TestTables:
    def test_every_contestant_and_the_ratio_to_the_best_peer(self) -> None:
        content = {"rows": {"llama/32": row()}, "machine": row()["machine"]}
        text = decode_table.render(content)
        assert text.index("pruner") < text.index("openvino") < text.index("eager")
        assert "80 %" in text, "500 MB in 50 ms of 12.5 GB/s"
        assert "(not installed)" in text
        assert text.splitlines()[-1].endswith("No module named 'llama_cpp'")
        page = decode_table.page(content, "decode.json")
        summary = "| Llama 12x768 | decode | 32 | pruner | 20.0 | 80 % | openvino | 16.7 | 1.20 |"
        assert summary in page
        assert "streaming read 12.5 GB/s" in page

    def test_a_prompt_counts_its_tokens(self) -> None:
        line = decode_table.lines(row(prefill=512))[0]
        assert line[3] == "10240.0"
        assert line[5] == ""

    def test_a_row_without_peers_or_without_ours(self) -> None:
        alone = row(contestants={"pruner": timed(0.05)})
        assert decode_table.summary([alone])[0][-3:] == ["", "", ""]
        assert decode_table.summary([row(contestants={"eager": timed(0.05)})]) == []


class TestCommand:
    def test_ours_are_always_among_the_contestants(self) -> None:
        for bits in decode.BITS:
            options: Any = type("Options", (), {"against": [], "without": []})
            names = decode.chosen(options, bits)
            assert names
            assert all(contestants.is_ours(n) for n in names)
        options.against = ["eager"]
        ours = [n for n in contestants.CONTESTANTS if n.startswith("pruner")]
        ours = [n for n in ours if contestants.CONTESTANTS[n].bits == 32]
        assert decode.chosen(options, 32) == ["eager", *ours]
        options.without = ours
        assert decode.chosen(options, 32) == ["eager"]

    def test_usage(self, capsys: pytest.CaptureFixture[str]) -> None:
        for arguments in (["--models", "bloom"], ["--bits", "3"], ["--per-turn", "99"]):
            with pytest.raises(SystemExit):
                decode.main(arguments)
        errors = capsys.readouterr().err
        assert "no 'bloom'; known: llama" in errors
        assert "at most 46 tokens" in errors

    def test_rows_are_kept_beside_new_ones(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out, page = tmp_path / "decode.json", tmp_path / "decode.md"
        measured: list[list[str]] = []

        def measure(names: list[str], _setting: Any, _options: Any) -> dict[str, Any]:
            measured.append(names)
            return row()

        monkeypatch.setattr(decode, "measure", measure)
        command = ["--out", str(out), "--page", str(page)]
        assert decode.main([*command, "--bits", "32"]) == 0
        assert decode.main([*command, "--bits", "8", "--prefill", "512"]) == 0
        assert list(json.loads(out.read_text())["rows"]) == ["llama/32", "llama/prefill 512/8"]
        assert measured[0][0] == "eager"
        assert page.read_text().startswith("# Decoding beside the peers")
