"""Pictures of tables: drawn from what is there, and nothing where nothing is."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("matplotlib")

from benchmarks import charts, dynamic


def timed(seconds):
    return {"latency": {"median_s": seconds}}


def row(title, ours, precision="float32", **others):
    contestants = {"pruner": timed(ours), **{k: timed(v) for k, v in others.items()}}
    return {"title": title, "precision": precision, "contestants": contestants}


def rows(*of):
    return {"rows": {r["title"]: r for r in of}}


def test_networks_in_order_of_the_closest_peer():
    figure = charts.peers(rows(row("far", 1.0, eager=3.0), row("near", 1.0, eager=1.1)))
    labels = [t.get_text() for t in figure.axes[0].get_yticklabels()]
    assert labels == ["near", "far"]


def test_contestants_that_were_not_timed_are_left_out():
    given = row("net", 1.0, eager=2.0)
    given["contestants"]["openvino"] = {"reason": "it crashed"}
    figure = charts.peers(rows(given))
    assert [p.get_label() for p in figure.axes[0].collections] == ["eager"]


def test_other_precisions_are_other_pictures():
    assert charts.peers(rows(row("net", 1.0, precision="bfloat16", eager=2.0))) is None


def lengths():
    latency = {"eager": 4.0, "inductor": 3.0, "pruner": 2.0}
    bucket = {**latency, "pruner static": 1.0}
    return {
        "network": "bert_tiny",
        "lengths": [
            {"length": n, "latency": {k: {"median_s": v} for k, v in of.items()}}
            for n, of in ((37, latency), (64, bucket))
        ],
    }


def test_lengths_and_their_means():
    figure = charts.dynamic(lengths())
    assert {line.get_label() for line in figure.axes[0].lines} == {
        "eager", "inductor", "pruner", "pruner static",
    }  # fmt: skip
    assert dynamic.summary(lengths()) == pytest.approx(
        {"inductor": 1.5, "eager": 2.0, "pruner static": 0.5}
    )


def test_bars_of_every_contestant():
    latency = {"eager": timed(0.5), "pruner": timed(0.25)}
    rows = [{"network": "llama", "cache": "static", "tokens": 8, "backends": latency}]
    widths = [bar.get_width() for bar in charts.serving({"rows": rows}).axes[0].patches]
    assert widths == [16, 32]
    rows = [{"network": "net", "backends": latency}, {"network": "other", "backends": latency}]
    assert len(charts.training({"networks": rows}).axes[0].patches) == 4


def decoded(model, bits, size, **seconds):
    found = {n.replace("_", "-"): {**timed(s), "weight_bytes": size} for n, s in seconds.items()}
    found["llama.cpp"] = {"reason": "not built"}
    row = {
        "model": model,
        "title": model.upper(),
        "bits": bits,
        "prefill": 0,
        "read_bytes_per_s": 800.0,
    }
    return {**row, "contestants": found}


def test_tokens_against_bits():
    first = decoded("llama", 32, 8, pruner=0.02, inductor=0.05)
    second = decoded("llama", 8, 2, pruner_int8=0.01, pruner_torchao_int8=0.02, inductor_int8=0.04)
    other, prompts = decoded("gpt2", 32, 8, pruner=0.02), {**first, "prefill": 512}
    rows = {"a": second, "b": first, "c": other, "d": prompts}
    figure = charts.decode({"rows": rows})
    assert [a.get_title(loc="left") for a in figure.axes] == ["LLAMA", "GPT2"]
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines == {
        "inductor": pytest.approx([20, 25]),
        "pruner": pytest.approx([50, 100]),
        "streaming read": pytest.approx([100, 400]),
    }
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["32", "8"]
    assert charts.decode({"rows": {"d": prompts}}) is None


def test_buckets_are_among_the_lengths():
    chosen = dynamic.some_lengths(20)
    assert len(set(chosen)) == 20
    assert set(dynamic.BUCKETS) <= set(chosen)
    assert chosen == dynamic.some_lengths(20)


def test_pictures_are_written_where_there_is_data(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "peers.json").write_text(json.dumps(rows(row("net", 1.0, eager=2.0))))
    assert charts.main(["--docs", str(tmp_path)]) == 0
    assert (tmp_path / "peers.png").stat().st_size > 1000
    assert "there is no dynamic.json" in capsys.readouterr().out
