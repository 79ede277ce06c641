"""Options: what is accepted, what is refused and how, presets, and the environment."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from torch_pruner import config
from torch_pruner.config import EFFORT, ENV_ONLY, MODES, OPTIONS, Budget, Config
from torch_pruner.exc import OptionError

ENV_MD = Path(__file__).resolve().parents[2] / "docs" / "env.md"


def parse(**options: object) -> Config:
    return Config.from_options(options=options, env={})


def test_defaults_are_the_documented_ones() -> None:
    assert parse() == Config()
    assert Config().budget == Budget(trials=None, trials_per_task=32, time_s=14.0)
    assert (Config().effort, Config().on_miss, Config().cost_model) == ("quick", "tune", "moa")
    assert Config().library
    assert not Config().fast_math
    assert Config().cache_max_bytes == 10 * 2**30


def test_every_field_is_an_option() -> None:
    assert {f.name for f in fields(Config)} == {*OPTIONS, *ENV_ONLY}


@pytest.mark.parametrize(
    "options",
    [
        {"effort": "none"},
        {"time_budget_s": 600},
        {"time_budget_s": None, "trials": 0},
        {"executor": "rpc", "tracker": "localhost:9190/xeon"},
        {"target": {"kind": "llvm", "mcpu": "znver4", "mattr": ["+avx2"]}},
        {"threads": 1, "seed": 7, "progress": False},
        {"progress": "auto", "check": "off", "strict": True},
        {"cuda_graphs": True, "fallback": "inductor"},
    ],
    ids=str,
)
def test_accepts(options: dict[str, object]) -> None:
    settings = parse(**options)
    assert settings == parse(**options)
    assert hash(settings) == hash(parse(**options))


def test_an_int_is_a_float_but_a_bool_is_no_int() -> None:
    assert isinstance(parse(time_budget_s=600).time_budget_s, float)
    for name in ("trials", "threads", "seed", "time_budget_s"):
        with pytest.raises(OptionError, match="expected"):
            parse(**{name: True})
    with pytest.raises(OptionError):
        parse(library=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("effort", "some"),
        ("effort", None),
        ("effort", ["quick"]),
        ("time_budget_s", 0),
        ("time_budget_s", float("nan")),
        ("time_budget_s", float("inf")),
        ("time_budget_s", "600"),
        ("trials", -1),
        ("trials", 1.5),
        ("trials", "8"),
        ("threads", 0),
        ("seed", -1),
        ("seed", None),
        ("tracker", "localhost"),
        ("tracker", "localhost:port/key"),
        ("target", "llvm"),
        ("target", "llvm -mcpu=znver4"),
        ("target", {"mcpu": "znver4"}),
        ("target", {"kind": {1, 2}}),
        ("target", None),
        ("target", 3),
        ("cache_dir", ""),
        ("cache_dir", 3),
        ("progress", "yes"),
        ("progress", 1),
        ("library", None),
        ("strict", "true"),
    ],
    ids=str,
)
def test_refuses(name: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        parse(**{name: value})
    assert caught.value.option == name
    assert "expected" in str(caught.value)
    assert set(OPTIONS) == set(caught.value.known)


def test_unknown_options_name_the_nearest_and_list_the_known() -> None:
    with pytest.raises(OptionError) as caught:
        parse(trails=3)
    assert caught.value.nearest == "trials"
    for name in OPTIONS:
        assert name in str(caught.value)


def test_an_option_that_is_no_text_is_unknown() -> None:
    with pytest.raises(OptionError, match="unknown option"):
        Config.from_options(options={3: True}, env={})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["cache_max_bytes", "log", "debug"])
def test_settings_of_the_process_are_no_options(name: str) -> None:
    with pytest.raises(OptionError, match="unknown option"):
        parse(**{name: 1})


def test_rpc_needs_a_tracker() -> None:
    with pytest.raises(OptionError, match="tracker"):
        parse(executor="rpc")


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_reachable_through_options(mode: str) -> None:
    assert Config.from_options(mode, env={}) == parse(**MODES[mode])


def test_unknown_modes_list_the_known() -> None:
    with pytest.raises(OptionError, match="did you mean 'max-autotune'"):
        Config.from_options("max-autotun", env={})


def test_modes() -> None:
    assert Config.from_options("default", env={}) == Config()
    assert Config.from_options("reduce-overhead", env={}).cuda_graphs
    best = Config.from_options("max-autotune", env={})
    assert (best.effort, best.cuda_graphs) == ("full", True)
    best = Config.from_options("max-autotune-no-cudagraphs", env={})
    assert (best.effort, best.cuda_graphs) == ("full", False)


def test_budgets() -> None:
    assert parse(effort="none", trials=9, time_budget_s=9.0).budget == EFFORT["none"]
    assert parse(effort="full").budget == Budget(None, 800, 3600.0)
    assert parse(trials=100).budget == Budget(100, 100, 14.0)
    assert parse(trials=0).budget.trials == 0
    assert parse(time_budget_s=5).budget == Budget(None, 32, 5.0)


def test_code_wins_over_mode_over_environment() -> None:
    env = {"TORCH_PRUNER_EFFORT": "none", "TORCH_PRUNER_SEED": "3"}
    assert Config.from_options(env=env).effort == "none"
    assert Config.from_options("max-autotune", env=env).effort == "full"
    settings = Config.from_options(options={"effort": "quick"}, env=env)
    assert (settings.effort, settings.seed) == ("quick", 3)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("EFFORT", "full", "full"),
        ("TIME_BUDGET_S", "2.5", 2.5),
        ("TIME_BUDGET_S", "none", None),
        ("TRIALS", " 64 ", 64),
        ("LIBRARY", "0", False),
        ("STRICT", "True", True),
        ("PROGRESS", "auto", "auto"),
        ("PROGRESS", "off", False),
        ("TARGET", '{"mcpu": "znver4", "kind": "llvm"}', '{"kind":"llvm","mcpu":"znver4"}'),
        ("TRACKER", "host:1/key", "host:1/key"),
        ("CACHE_MAX_BYTES", "1000", 1000),
        ("LOG", "debug", "debug"),
        ("THREADS", "", None),
    ],
)
def test_environment(variable: str, text: str, value: object) -> None:
    settings = Config.from_options(env={f"TORCH_PRUNER_{variable}": text})
    assert getattr(settings, variable.lower()) == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("TRIALS", "many"),
        ("TRIALS", "-1"),
        ("TRIALS", "1_0"),
        ("LIBRARY", "maybe"),
        ("TIME_BUDGET_S", "0"),
        ("TIME_BUDGET_S", "soon"),
        ("TARGET", "llvm"),
        ("TARGET", "3"),
        ("LOG", "loud"),
        ("SEED", "none"),
    ],
)
def test_environment_refuses_and_names_the_variable(variable: str, text: str) -> None:
    with pytest.raises(OptionError, match=f"TORCH_PRUNER_{variable}") as caught:
        Config.from_options(env={f"TORCH_PRUNER_{variable}": text})
    assert text in str(caught.value)


def test_an_unknown_variable_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        Config.from_options(env={"TORCH_PRUNER_EFORT": "full", "OTHER": "1"})
    assert len(caplog.records) == 1
    assert "TORCH_PRUNER_EFORT" in caplog.text


def test_debug_is_short_for_debug_dir(tmp_path: Path) -> None:
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert Config.from_options(env={"TORCH_PRUNER_DEBUG": a}).debug_dir == a
    both = {"TORCH_PRUNER_DEBUG": a, "TORCH_PRUNER_DEBUG_DIR": b}
    assert Config.from_options(env=both).debug_dir == b


def test_reads_the_process_s_environment_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_PRUNER_SEED", "5")
    assert Config.from_options().seed == 5
    assert config.environment()["TORCH_PRUNER_SEED"] == "5"


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert parse(cache_dir=tmp_path).cache_root == tmp_path
    assert parse(cache_dir="~/x").cache_root == Path.home() / "x"
    assert parse(cache_dir="x").cache_root == Path.cwd() / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert parse().cache_root.is_absolute()
    assert parse().cache_root.name == "torch_pruner"


def test_cache_root_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown uid has no home: the root was the relative path `~/.cache`."""
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert parse().cache_root.is_absolute()


def test_replace_checks_like_the_constructor() -> None:
    settings = parse(seed=1).replace(threads=4)
    assert (settings.seed, settings.threads) == (1, 4)
    with pytest.raises(OptionError):
        settings.replace(threads=0)
    with pytest.raises(OptionError, match="did you mean 'threads'"):
        settings.replace(thread=1)


def test_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().seed = 3  # type: ignore[misc]


def test_key_fields_are_what_changes_code() -> None:
    base = Config().key_fields()
    assert base == {"fast_math": False, "library": True}
    assert parse(fast_math=True).key_fields() != base
    assert parse(effort="full", seed=3, cache_dir="x").key_fields() == base


def test_c_compiler_prefers_cc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = tmp_path / "mycc"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CC", str(mine))
    assert config.c_compiler() == str(mine)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert config.c_compiler() is None
    mine.rename(tmp_path / "clang")
    assert config.c_compiler() == str(tmp_path / "clang")


def test_docs_list_every_variable_and_no_other() -> None:
    rows = re.findall(r"^\| `(TORCH_PRUNER_\w+)` \|", ENV_MD.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(config.ENV_VARS)


def test_rounded_weights_are_kept_and_so_cannot_be_live():
    with pytest.raises(OptionError, match="int8_weights"):
        Config(weights="live", int8_weights=True)


def test_objectives() -> None:
    assert Config().objective == "latency"
    assert Config.from_options(None, {}, {"TORCH_PRUNER_OBJECTIVE": "memory"}).objective == "memory"
    with pytest.raises(OptionError, match="one of 'latency', 'memory', 'energy', not 'speed'"):
        parse(objective="speed")


def test_an_objective_does_not_change_what_is_known_of_a_kernel() -> None:
    assert parse(objective="memory").key_fields() == Config().key_fields()


def test_bits_of_weights() -> None:
    assert Config().rounded_bits is None
    assert parse(weight_bits=4).rounded_bits == 4
    assert parse(int8_weights=True).rounded_bits == parse(weight_bits=8).rounded_bits == 8
    assert parse(int8_weights=True, weight_bits=8).rounded_bits == 8
    with pytest.raises(OptionError, match="contradicts int8_weights"):
        parse(int8_weights=True, weight_bits=4)
    for wrong in (3, 16, True, "4", 4.0):
        with pytest.raises(OptionError, match="one of 8, 4"):
            parse(weight_bits=wrong)
    with pytest.raises(OptionError, match="weight_bits=4"):
        Config(weights="live", weight_bits=4)


def test_bits_of_weights_in_code_win_over_either_variable() -> None:
    env = {"TORCH_PRUNER_INT8_WEIGHTS": "1"}
    assert Config.from_options(None, {}, env).rounded_bits == 8
    assert Config.from_options(None, {"weight_bits": 4}, env).rounded_bits == 4
    env = {"TORCH_PRUNER_WEIGHT_BITS": "4"}
    assert Config.from_options(None, {}, env).rounded_bits == 4
    assert Config.from_options(None, {"int8_weights": True}, env).rounded_bits == 8
    assert Config.from_options(None, {}, {"TORCH_PRUNER_WEIGHT_BITS": "none"}).rounded_bits is None
    with pytest.raises(OptionError, match="WEIGHT_BITS"):
        Config.from_options(None, {}, {"TORCH_PRUNER_WEIGHT_BITS": "5"})


def test_threads_that_wait_do_not_hold_a_core_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TVM_THREAD_POOL_SPIN_COUNT"
    for other in ("TVM_NUM_THREADS", "TVM_BIND_THREADS"):
        monkeypatch.setenv(other, "2")  # restored at the end
    monkeypatch.delenv(name, raising=False)
    config.set_thread_defaults(2)
    assert config.environment()[name] == str(config.SPINS)
    monkeypatch.setenv(name, "5")  # the user's wins
    config.set_thread_defaults(2)
    assert config.environment()[name] == "5"
