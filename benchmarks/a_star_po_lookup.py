"""Seconds until a second run on the same 10,000 prompts starts training: every value from the cache.

    OMP_NUM_THREADS=1 python benchmarks/a_star_po_lookup.py --out benchmarks/results/a_star_po_lookup.json

A tiny untrained model fills the cache with two samples per prompt; then a fresh trainer looks all prompts up, tokenization
and keys included. Best and worst of three.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from datasets import Dataset

from trl_fsdp_qlora import AStarPOConfig, AStarPOTrainer
from trl_fsdp_qlora.publishing.card import hardware, software
from trl_fsdp_qlora.recipe.rewards import get_reward
from trl_fsdp_qlora.recipe.small_base import character_tokenizer, new_model

PROMPTS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="benchmarks/results/a_star_po_lookup.json")
    arguments = parser.parse_args()
    draw = random.Random(0)
    numbers = [(draw.randrange(10, 100), draw.randrange(10, 100)) for _ in range(PROMPTS)]
    rows = [
        {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "answer": str(a + b), "row": i}
        for i, (a, b) in enumerate(numbers)
    ]
    tokenizer = character_tokenizer()
    with tempfile.TemporaryDirectory() as scratch:
        new_model(tokenizer, seed=0, hidden=32, layers=2).save_pretrained(f"{scratch}/model")

        def seconds() -> tuple[float, int]:
            config = AStarPOConfig(
                output_dir=f"{scratch}/out",
                value_cache=f"{scratch}/values",
                value_batch_size=500,
                value_samples=2,
                max_completion_length=4,
                bf16=False,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
            )
            trainer = AStarPOTrainer(
                f"{scratch}/model",
                get_reward("exact_answer"),
                config,
                Dataset.from_list(rows),
                processing_class=tokenizer,
            )
            started = time.perf_counter()
            report = trainer.estimate_values()
            return time.perf_counter() - started, report.samples

        first, samples = seconds()
        again = [seconds() for _ in range(3)]
    assert samples == 2 * PROMPTS and not any(drawn for _, drawn in again)
    times = sorted(elapsed for elapsed, _ in again)
    print(
        f"{PROMPTS:,} prompts: {times[0]:.2f} to {times[-1]:.2f} s (limit of the issue: 2 s); filling took {first:.1f} s"
    )
    content = {"prompts": PROMPTS, "seconds": times, "hardware": hardware(), "software": software()}
    Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    Path(arguments.out).write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
