"""What a rank trains in test_rows.py, episodes of one row on the first of two: `rows_worker.py MODEL OUT SCENARIO`."""

import zlib
from pathlib import Path

import torch

from tests.distributed.fsdp_on_gloo import force_fsdp
from tests.distributed.rank import run_rank
from tests.fsdp2_qlora import tiny
from tests.fsdp2_qlora.worker import RANK, WORLD_SIZE, Record, common, is_sharded, reward
from tests.trainers.step.test_rows import episode
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.prefix_sharing import passes

SCENARIOS = {
    "packed": {"beta": 0.1},
    "row by row": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8 // WORLD_SIZE},
    "cut": {"tokens_per_pass": 30, "beta": 0.1},
    "padded": {"prefix_sharing": "off", "beta": 0.1},
}


def rollout(prompts, trainer):
    """Episodes of one row for every second prompt, and of three to six rows for the others."""
    seen = {}
    rows = []
    for text in map(str, prompts):
        number = seen[text] = seen.get(text, -1) + 1
        key = zlib.crc32(text.encode())
        is_even = trainer.numbers.setdefault(text, len(trainer.numbers)) % 2 == 0
        head = [3 + key % 30, 4, 5, 6, 7 + key % 20]
        rows.append(episode(key + number, 1 if is_even else 3 + number, head, vocabulary=40))
    return {"rows": rows}


def train(path, out, settings):
    record = Record()
    trainer = EfficientGRPOTrainer(
        tiny.load(path),
        reward,
        EfficientGRPOConfig(
            **common(
                out, num_generations=4, max_completion_length=64, shuffle_dataset=False, **{"max_steps": 2, **settings}
            )
        ),
        tiny.prompt_data(32),
        processing_class=tiny.make_tokenizer(),
        callbacks=[record],
        peft_config=tiny.lora(init_lora_weights=False),
        rollout_func=rollout,
    )
    # The same on every rank: the data is not shuffled.
    trainer.numbers = {str(row["prompt"]): i for i, row in enumerate(trainer.train_dataset)}
    tiny.as_reference(trainer.model)
    trainer.train()
    assert is_sharded(trainer.model) == (WORLD_SIZE > 1)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    counts = [sum(map(len, inputs["rows"])) for inputs in trainer._buffered_inputs]
    return {"gradients": record.gradients, "loss": losses, "rows": sum(counts)}


def main(path, out, scenario):
    force_fsdp()
    passes.MIN_SAVED_BY_TRUNK = 1
    result = train(path, Path(out) / "run", SCENARIOS[scenario])
    torch.save(result, Path(out) / f"rank{RANK}_of_{WORLD_SIZE}.pt")


if __name__ == "__main__":
    run_rank(main)
