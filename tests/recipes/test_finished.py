"""A recipe's run that is over, or that lost the measurement from before training."""

import json
import re
import shlex

import pytest

from tests.distributed.launch import run_script
from tests.recipes.test_recipe_runs import SETTINGS, folder  # noqa: F401

METHODS = {
    "grpo.py": "--num_generations 8 --loss_type grpo",
    "t_spmo.py": "--num_generations 8",
    "a_star_po.py": "--num_generations 1 --value_samples 2 --value_cache values",
}


def command(script: str, output: str, *more: str) -> list[str]:
    settings = re.sub(r"--(num_generations|loss_type|max_steps) \S+", "", " ".join(SETTINGS))
    settings = settings.replace("--bf16 false", f"--bf16 {str(script == 't_spmo.py').lower()}")
    settings += f" {METHODS[script]} --dtype float32 --accuracy_samples 2 --per_device_train_batch_size 16"
    texts = ["--prompt_template", "{question}=", "--system_prompt", "Add.", "--output_dir", output]
    return ["--model_name_or_path", "base", *settings.split(), *texts, "--resume_from_checkpoint", "auto", *more]


def contents(run) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("script", METHODS)
def test_a_finished_run_says_so_and_changes_nothing(folder, script):  # noqa: F811
    output = f"{script.removesuffix('.py')} run"  # a blank, as folders have them
    first = run_script(f"recipes/{script}", *command(script, output, "--max_steps", "2"), cwd=folder)
    assert first.returncode == 0, first.stdout + first.stderr
    left = contents(folder / output)
    again = run_script(f"recipes/{script}", *command(script, output, "--max_steps", "2"), cwd=folder)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"the run in {output} is finished (max_steps=2)" in again.stdout
    assert "larger --max_steps" in again.stdout
    assert contents(folder / output) == left
    # The line that measures it runs as it is printed, and gives the run's own number.
    line = re.search(r"measure it: +(.*)", again.stdout)[1]
    assert line == f"trl-fsdp-qlora evaluate --adapter '{output}'"
    words = [*shlex.split(line)[2:], "--output", "measured.json"]
    measured = run_script("recipes/evaluate.py", *words, cwd=folder)
    assert measured.returncode == 0, measured.stdout + measured.stderr
    after, found = (json.loads((folder / name).read_text()) for name in (f"{output}/metrics.json", "measured.json"))
    same = set(after["after"]) - {"seconds"}
    assert {name: found[name] for name in same} == {name: after["after"][name] for name in same}
    if script == "grpo.py":  # of another dataset all is measured, whatever the run held out of its own
        (folder / "other.jsonl").write_text("\n".join((folder / "data.jsonl").read_text().splitlines()[:9]))
        other = run_script("recipes/evaluate.py", *words, "--dataset", "other.jsonl", cwd=folder)
        assert other.returncode == 0 and json.loads((folder / "measured.json").read_text())["n"] == 9, other.stderr
    further = run_script(f"recipes/{script}", *command(script, output, "--max_steps", "3"), cwd=folder)
    assert further.returncode == 0, further.stdout + further.stderr
    record = json.loads((folder / output / "metrics.json").read_text())
    assert record["finished_step"] == 3


@pytest.mark.slow
def test_killed_after_the_last_step_is_not_finished_and_without_before_is_said(folder):  # noqa: F811
    run = run_script("recipes/grpo.py", *command("grpo.py", "lost", "--max_steps", "2"), cwd=folder)
    assert run.returncode == 0, run.stdout + run.stderr
    adapter = (folder / "lost" / "adapter_model.safetensors").read_bytes()
    (folder / "lost" / "adapter_model.safetensors").unlink()
    (folder / "lost" / "metrics.json").write_text("{ damaged")
    again = run_script("recipes/grpo.py", *command("grpo.py", "lost", "--max_steps", "2"), cwd=folder)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (
        "its metrics.json cannot be read" in again.stdout and "does not hold the accuracy from before" in again.stdout
    )
    assert (folder / "lost" / "adapter_model.safetensors").read_bytes() == adapter  # no further step
    record = json.loads((folder / "lost" / "metrics.json").read_text())
    assert "before" not in record and record["after"]["n"] == 6 and record["finished_step"] == 2
