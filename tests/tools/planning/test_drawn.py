"""Tokens counted on a run's own data: those that prompt sharing computes in the trainer's first pass."""

import json

import numpy as np
import pytest
import trl
from datasets import Dataset
from transformers import AutoTokenizer

from tests.tiny import save_tiny_model
from trl_fsdp_qlora import EfficientDPOConfig, EfficientGRPOConfig, share_prompts
from trl_fsdp_qlora.prefix_sharing.sharing import causal_language_model
from trl_fsdp_qlora.tools.cli.plan import plan as command
from trl_fsdp_qlora.tools.evaluation.accuracy import encode
from trl_fsdp_qlora.tools.planning.drawn import Data
from trl_fsdp_qlora.tools.planning.settings import Launch, from_words
from trl_fsdp_qlora.tools.recipe.pairs import DPOScriptArguments, read_pairs

# Of a recipe in which all prompts begin with solved problems.
TEMPLATE = "10+20=30 11+31=42 25+25=50 {question}"
ROWS = [f"{i}+{7 * i}=" for i in range(11, 17)]
CPU = Launch(use_cpu=True)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawn")
    save_tiny_model(folder / "base")
    lines = [json.dumps({"question": row, "answer": str(i)}) for i, row in enumerate(ROWS)]
    (folder / "sums.jsonl").write_text("\n".join(lines))
    lines = [
        json.dumps({"prompt": TEMPLATE.replace("{question}", row), "chosen": f" {i}5", "rejected": f" {i}5{i}"})
        for i, row in enumerate(ROWS)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    common = f"model_name_or_path: {folder}/base\nchat: false\nskip_accuracy: true\nuse_peft: true\nlora_r: 4\n"
    common += "lora_target_modules: [all-linear]\nbf16: false\nuse_cpu: true\noutput_dir: runs/mine\n"
    (folder / "grpo.yaml").write_text(
        f"{common}dataset: {folder}/sums.jsonl\nprompt_template: '{TEMPLATE}'\nper_device_train_batch_size: 24\n"
        "num_generations: 4\nmax_completion_length: 9\n"
    )
    (folder / "dpo.yaml").write_text(
        f"{common}dataset: none\npairs: {folder}/pairs.jsonl\nper_device_train_batch_size: 6\nmax_length: 64\n"
    )
    return folder


def tokens_computed(trainer, inputs) -> int:
    share_prompts(trainer.model, attention="cascade")  # no dense rows, which so small a model would prefer
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, inputs)
    return causal_language_model(trainer.model).prompt_sharing.figures.tokens


def trainer_settings(workspace):
    return {
        "output_dir": str(workspace / "out"),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
    }


class LongCompletions(trl.GRPOTrainer):
    """Each completion as long as it may be; of one prompt no two begin alike."""

    def _generate_single_turn(self, prompt_ids, *_):
        rows = range(len(prompt_ids))
        return [[3 + row % 4] + [7] * (self.max_completion_length - 1) for row in rows], None


def test_groups_as_grpo_draws_them(workspace):
    settings = from_words(["--config", str(workspace / "grpo.yaml")], EfficientGRPOConfig, CPU, counts_data=True)
    base = str(workspace / "base")
    prompts = [TEMPLATE.replace("{question}", row) for row in ROWS]
    ids = encode(prompts, AutoTokenizer.from_pretrained(base))
    assert settings.prompt_tokens == max(map(len, ids))
    config = trl.GRPOConfig(
        **trainer_settings(workspace), per_device_train_batch_size=24, num_generations=4, max_completion_length=9
    )
    dataset = Dataset.from_dict({"prompt": prompts})
    trainer = LongCompletions(base, reward_funcs=len_of, args=config, train_dataset=dataset)
    batch = trainer._generate_and_score_completions(next(iter(trainer.get_train_dataloader())))
    assert tokens_computed(trainer, batch) == settings.drawn.tokens < 0.4 * settings.drawn.padded_tokens
    assert settings.drawn.scored == 24 * 9 and len(settings.drawn.levels) > 2


def len_of(completions, **columns):
    return [float(len(completion)) for completion in completions]


def test_pairs_as_dpo_draws_them(workspace):
    words = ["--config", str(workspace / "dpo.yaml")]
    settings = from_words(words, EfficientDPOConfig, CPU, DPOScriptArguments, counts_data=True)
    config = trl.DPOConfig(**trainer_settings(workspace), per_device_train_batch_size=6, max_length=64)
    trainer = trl.DPOTrainer(str(workspace / "base"), args=config, train_dataset=read_pairs(workspace / "pairs.jsonl"))
    batch = next(iter(trainer.get_train_dataloader()))
    assert tokens_computed(trainer, batch) == settings.drawn.tokens
    assert settings.drawn.padded_tokens == batch["input_ids"].numel()
    assert settings.drawn.scored == batch["completion_mask"].sum() and settings.rows == 12


def test_the_largest_of_many_micro_batches_and_of_too_few_prompts():
    prompts = [[1] * 20 + [10 + i] * (5 if i else 9) for i in range(40)]
    data = Data("some", prompts)
    drawn = data.draw(rows=8, group=4, completion=3)
    # Two groups: the long prompt is in one of them, the beginning is computed once.
    assert drawn.tokens == 20 + 9 + 5 + 8 * 2 and drawn.levels == [20, 14, 16]
    assert drawn.padded_tokens == 8 * (29 + 3)
    alike = Data("alike", [[1] * 20 + [10 + i] * 9 for i in range(5)])  # half a group is one, too
    assert alike.draw(rows=6, group=4, completion=3).tokens == 20 + 2 * 9 + 6 * 2
    few = Data("few", prompts[:2])  # and three groups: one of them has a prompt of another epoch
    assert few.draw(rows=12, group=4, completion=3).tokens == 20 + 9 + 5 + 12 * 2
    cut = Data("pairs", [[1, 2, 3]], [([4, 5, 6], [4, 5, 7, 8])])
    assert cut.draw(rows=2, group=2, completion=4).tokens == 6  # the last of a row is only ever a target
    drawn = cut.draw(rows=2, group=2, completion=4, max_length=5)  # both are one then
    assert drawn.tokens == 4 and drawn.scored == 4 and drawn.padded_tokens == 10
    assert np.sum(drawn.levels) == drawn.tokens


def test_the_command_counts_what_is_named(workspace, capsys):
    line = ["--config", str(workspace / "grpo.yaml"), "--hardware", "24GB"]
    command(line)
    assumed = capsys.readouterr().out
    assert "assumed: prompts of 256 tokens (--prompt_tokens, or --dataset FILE counts them)" in assumed
    command([*line, "--dataset", str(workspace / "sums.jsonl")])
    counted = capsys.readouterr().out
    assert "counted: micro-batches drawn from" in counted and "padded tokens at most (" in counted
    assert "prompts of" not in counted and "every completion 9 tokens long" in counted
    command([*line, "--dataset", "nothing.jsonl"])
    missing = capsys.readouterr().out
    assert "nothing.jsonl is not counted: dataset 'nothing.jsonl'" in missing and "prompts of 256 tokens" in missing
    command(["--config", str(workspace / "dpo.yaml"), "--hardware", "24GB", "--pairs", str(workspace / "pairs.jsonl")])
    of_pairs = capsys.readouterr().out
    assert "generate" not in of_pairs and f"drawn from {workspace}/pairs.jsonl compute" in of_pairs
