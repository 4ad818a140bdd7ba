"""`trl-fsdp-qlora plan`: bytes that a launch or a base changes are counted, or the command has a line why not."""

import json
import re
from pathlib import Path

import pytest

from tests.promises.commands import TINY, run
from tests.tiny import save_recipe_files
from trl_fsdp_qlora.__main__ import main

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
IN_LAYERS = 8 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192)  # weights of linear layers
IN_EMBEDDING_AND_HEAD = 2 * 32000 * 2048
ROUNDED = 0.006  # GiB are printed with two digits
IN_BF16 = 2 * (IN_LAYERS + IN_EMBEDDING_AND_HEAD) / 2**30


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Runs the command in a folder with a model's config; returns its exit status and what it printed.

    With `--json` that is standard output alone: libraries log to standard error.
    """
    monkeypatch.chdir(tmp_path)

    def run(*words, **config):
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL | config))
        recipe = [
            "--model_name_or_path",
            "model",
            "--use_peft",
            "true",
            "--dtype",
            "bfloat16",
            "--max_completion_length",
            "256",
        ]
        try:
            status = main(["plan", *recipe, *words])
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        return status, printed.out if "--json" in words else printed.out + printed.err

    return run


def gib(printed: str, part: str) -> float:
    """The GiB of a part of the phase that is printed last."""
    unit = re.search(r"(?m)^(GiB|MiB) per rank", printed)[1]
    line = next(line for line in printed.splitlines() if line.startswith(part))
    return float(re.findall(r"[\d.]+", line.removeprefix(part))[-1]) / {"GiB": 1, "MiB": 1024}[unit]


def launch(tmp_path, **keys) -> tuple[str, str]:
    """Writes an accelerate config of four ranks; returns the option that names it."""
    lines = ["distributed_type: FSDP", "num_processes: 4", "mixed_precision: bf16", "fsdp_config:"]
    sharding = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **keys}
    lines += [f"  {key}: {value}" for key, value in sharding.items()]
    (tmp_path / "launch.yaml").write_text("\n".join(lines) + "\n")
    return "--accelerate_config", "launch.yaml"


def test_weights_that_stay_gathered_are_counted(plan, tmp_path):
    status, printed = plan(*launch(tmp_path), "--hardware", "2GB x4")
    assert status == 0 and gib(printed, "gathered weights") < 0.6 * IN_BF16
    # On larger cards: three plans more are made for a run that does not fit, which look for lines with which it does.
    whole = launch(tmp_path, fsdp_reshard_after_forward="false")
    _, printed = plan(*whole, "--tokens_per_pass", "512", "--hardware", "80GB x4")
    assert gib(printed, "gathered weights") > 0.9 * IN_BF16
    assert float(re.search(r"needs most: ([\d.]+) GiB", printed)[1]) > 2  # so it does not fit where the other did
    as_fsdp1 = launch(tmp_path, fsdp_version=1, fsdp_sharding_strategy="SHARD_GRAD_OP")
    assert gib(plan(*as_fsdp1, "--hardware", "80GB x4")[1], "gathered weights") > 0.9 * IN_BF16


def test_fsdp_without_sharding_holds_the_whole_base(plan, tmp_path):
    words = launch(tmp_path, fsdp_version=1, fsdp_sharding_strategy="NO_SHARD")
    assert gib(plan(*words, "--hardware", "80GB x4")[1], "base, other weights") == pytest.approx(IN_BF16, abs=ROUNDED)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_base_that_is_stored_in_4_bits_is_counted_in_them(plan, method):
    stored = {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 128}}
    _, printed = plan("--hardware", "24GB", **stored)
    # Embedding and head stay in 16 bits.
    assert gib(printed, "base, 4-bit weights") == pytest.approx(IN_LAYERS / 2 / 2**30, abs=ROUNDED)
    assert gib(printed, "base, other weights") == pytest.approx(2 * IN_EMBEDDING_AND_HEAD / 2**30, abs=ROUNDED)


@pytest.mark.parametrize("tokens", ["-1", "0"])
def test_a_prompt_without_tokens_is_refused(plan, tokens):
    status, printed = plan("--prompt_tokens", tokens)
    assert status == 2 and f"--prompt_tokens {tokens} is not a number of tokens" in printed


def test_a_launch_with_deepspeed_is_planned(plan):
    sizes = {}
    for stage in ("zero2", "zero3"):
        _, printed = plan("--accelerate_config", stage, "--hardware", "80GB x8")
        sizes[stage] = gib(printed, "base, other weights")
    assert sizes["zero2"] == pytest.approx(IN_BF16, abs=ROUNDED)
    assert sizes["zero3"] == pytest.approx(IN_BF16 / 8, abs=ROUNDED)


def test_a_recipe_of_dpo_is_planned_as_json(plan):
    status, printed = plan("--pairs", "pairs.jsonl", "--max_length", "512", "--hardware", "24GB", "--json")
    planned = json.loads(printed)
    assert status == 0 and planned["fits"] and "generate" not in planned["phases"]
    assert planned["peak"] == sum(planned["phases"][planned["limiting"]].values())


def test_a_run_that_does_not_fit_gets_lines_with_which_it_does(plan):
    """64 completions at once, of a batch that can be generated in parts."""
    rows = ["--per_device_train_batch_size", "8", "--num_generations", "8", "--gradient_accumulation_steps", "16"]
    status, printed = plan(*rows, "--hardware", "2.7GB")
    assert status == 1
    line = next(line for line in printed.splitlines() if line.startswith("it fits with "))
    status, printed = plan(*rows, "--hardware", "2.7GB", *line.removeprefix("it fits with ").split())
    assert status == 0 and "it fits" in printed


def test_a_warning_of_too_few_positions_names_the_prompt_that_it_assumes(plan):
    """And with which option another prompt is planned; a prompt that the user names is no assumption."""

    def warning(*words: str) -> str:
        _, printed = plan("--hardware", "80GB", *words, max_position_embeddings=300)
        return next(line for line in printed.splitlines() if line.startswith("warning: "))

    assert "prompts of 256 tokens (assumed; --prompt_tokens changes it)" in warning()
    named = warning("--prompt_tokens", "100")
    assert "prompts of 100 tokens" in named and "assumed" not in named


def test_a_recipe_of_dpo_plans_before_it_trains(tmp_path, monkeypatch):
    """With the longest of its prompts; the planned peak is among its metrics."""
    monkeypatch.chdir(tmp_path)
    save_recipe_files(tmp_path)
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(8)]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    not_of_dpo = ("--dataset", "--held_out", "--num_generations")
    words = [word for i, word in enumerate(TINY) if not {word, TINY[i - 1]} & set(not_of_dpo)]
    status, text = run("dpo", *words, "--pairs", "pairs.jsonl", "--max_length", "16", "--logging_steps", "1")
    assert status == 0, text
    assert "memory was not planned" not in text
    history = json.loads(Path("run/metrics.json").read_text())["history"]
    assert any(entry.get("memory/planned_mib", 0) > 0 for entry in history)


def test_a_run_shows_its_planned_peak_next_to_the_measured_ones(tmp_path, monkeypatch):
    """In the metrics of its steps, and in its page."""
    monkeypatch.chdir(tmp_path)
    save_recipe_files(tmp_path)
    status, text = run("grpo", *TINY, "--logging_steps", "1")
    assert status == 0, text
    history = json.loads(Path("run/metrics.json").read_text())["history"]
    step = next(entry for entry in history if "memory/planned_mib" in entry)
    assert step["memory/planned_mib"] > 0 and step["memory/generate_peak_mib"] > 0
    data = re.search(r'id="data">(.*?)</script>', Path("run/report.html").read_text(), re.DOTALL)[1]
    memory = next(chart for chart in json.loads(data)["charts"] if chart["title"] == "Memory")
    values = {series["name"]: series["values"] for series in memory["series"]}
    assert values["planned"] == [pytest.approx(step["memory/planned_mib"], rel=1e-5)]
    assert values["generate"] == [pytest.approx(step["memory/generate_peak_mib"], rel=1e-5)]
