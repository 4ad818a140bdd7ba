"""Two real gloo processes against one: plain data parallelism, and FSDP2 with sharded parameters.

As a script it is one rank of such a run: stage 1, evaluation and two steps; rank 0 writes the results.
"""

import functools
import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from tests.distributed.fsdp_on_gloo import force_fsdp, fsdp_environment
from tests.distributed.launch import launch
from tests.tiny import character_tokenizer, config, these_first, tiny_model
from tests.trainers.a_star_po.tiny import has_digit, problems
from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What rank 0 of a run with an empty cache measured, by number of processes and kind; each run once."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model().save_pretrained(folder / "model")

    @functools.cache
    def run(processes, kind="lora", sharded=False):
        name = folder / f"{processes} {kind} {sharded}"
        environment = fsdp_environment(fsdp_transformer_layer_cls_to_wrap="Qwen3DecoderLayer") if sharded else {}
        words = folder / "model", name, f"{name}.json", 16 // processes, kind
        launch(__file__, *words, processes=processes, environment=environment)
        return json.loads(Path(f"{name}.json").read_text())

    return run


@pytest.mark.slow
def test_two_ranks_give_the_values_of_one(run):
    one = run(1)
    two = run(2)
    assert one["table"] == two["table"] and len(one["table"]) == 48
    assert one["samples"] == [48 * 8]
    assert sum(two["samples"]) == 48 * 8 and min(two["samples"]) >= 48 * 8 // 4  # shared, no prompt twice
    for step in two["steps"]:
        assert step["advantage"] == pytest.approx(step["reward"] - step["v_star"], abs=1e-6)
    # Each global batch of 16 holds the same prompts, so the same mean V*.
    assert [step["v_star"] for step in one["steps"]] == pytest.approx([step["v_star"] for step in two["steps"]])


@pytest.mark.slow
@pytest.mark.parametrize("full", these_first([False, True], False), ids=["lora", "full"])
def test_sharded_parameters_give_the_same_values_in_lockstep(run, full):
    if full and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("refused: transformers before 5.23 would leave a reference model of zeros on the second rank")
    one = run(1)
    sharded = run(2, "full" if full else "lora", sharded=True)
    assert sharded["sharded"], "accelerate fell back to data parallelism: nothing was tested"
    assert "train()" in sharded["refused"]
    assert sharded["table"] == one["table"]
    assert 0 <= sharded["evaluation"]["eval_reward"] <= 1
    assert [step["v_star"] for step in sharded["steps"]] == pytest.approx([step["v_star"] for step in one["steps"]])


def rank(model, cache, out, batch, kind):
    force_fsdp()
    args = config(
        AStarPOConfig, tempfile.mkdtemp(), num_generations=1, per_device_train_batch_size=int(batch),
        max_completion_length=8,
        value_cache=cache, value_batch_size=3, max_steps=2, per_device_eval_batch_size=4, seed=3, optim="adamw_torch",
    )  # fmt: skip
    adapter = None if kind == "full" else LoraConfig(r=4, target_modules="all-linear")
    data = {"train_dataset": problems(48), "processing_class": character_tokenizer()}
    trainer = AStarPOTrainer(model, has_digit, args, **data, peft_config=adapter)
    result = {}
    counts = []
    draw = trainer.values.draw

    def counted(rows, seed):
        counts.extend([args.value_samples] * len(rows))
        return draw(rows, seed)

    trainer.values.draw = counted
    try:
        assert trainer.estimate_values().samples == 48 * 8
        result["samples"] = trainer.accelerator.gather(torch.tensor([sum(counts)])).tolist()
    except RuntimeError as error:
        result["refused"] = str(error)
    trainer.train()
    result["sharded"] = all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    result["evaluation"] = trainer.evaluate(problems(13))
    result["table"] = trainer.values.read()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    result["steps"] = [{name: log[name] for name in ("loss", "v_star", "reward", "advantage")} for log in logs]
    if trainer.accelerator.is_main_process:
        Path(out).write_text(json.dumps(result))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    rank(*sys.argv[1:])
