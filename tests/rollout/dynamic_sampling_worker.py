"""Run in two processes by test_dynamic_sampling.py: a batch with a group on both ranks, a few steps of training under DDP,
and completions of each rank's own prompts.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.rollout.test_decoding import greedy
from tests.rollout.test_dynamic_sampling import filled_of, make
from trl_fsdp_qlora.rollout.completions import complete


def completions_of(made) -> dict:
    """Greedy completions of as many prompts as this rank has, by our loop and by transformers', and what is left behind."""
    rank = made.accelerator.process_index
    prompts = [[5, 6, 7, 8]] * 4 + [[9, 10, 11 + i] for i in range(3 * rank)]
    before = [p.detach().clone() for p in made.model.parameters()]
    # No token of the vocabulary ends a row: this model may end every row with its first one.
    settings = greedy(max_new_tokens=16 + 8 * rank, eos_token_id=[63])
    with made.rollout.generating(made.model_wrapped) as (model, lockstep):
        ours, work = complete(model, prompts, settings, synced=lockstep)
        stock, _ = complete(model, prompts, settings, synced=lockstep, compact=False)
    same = all(torch.equal(p, value) for p, value in zip(made.model.parameters(), before, strict=True))
    return {"ours": ours, "stock": stock, "same_weights": same, "steps": [work.row_steps, work.row_steps_stock]}


def main(folder: Path) -> None:
    # Three groups of four over two ranks: six rows each.
    made = make(folder, per_device_train_batch_size=6, max_steps=3)
    made.train()
    result = filled_of(made.accelerator)
    result["trained_state"] = made.dynamic_sampling.taken
    result["wrapped"] = type(made.model_wrapped).__name__
    result["completions"] = completions_of(made)
    (folder / f"rank{made.accelerator.process_index}.json").write_text(json.dumps(result))
    made.accelerator.wait_for_everyone()
    made.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
