"""Run by test_trainer.py in two processes: a group of eight completions, four of them on each rank."""

import json
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.t_spmo.test_trainer import made, objective_by_hand
from tests.tiny import digit_share

GROUP = 8


def whole_group(ours, batch):
    """The rows of both ranks as one padded batch, and the rewards of their texts."""
    rows = gather_object(
        [
            (ids[mask.bool()].tolist(), done[kept.bool()].tolist())
            for ids, mask, done, kept in zip(
                *(batch[key] for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")),
                strict=True,
            )
        ]
    )
    assert len(rows) == GROUP and all(prompt == rows[0][0] for prompt, _ in rows)
    width = max(len(completion) for _, completion in rows)
    padded = [completion + [0] * (width - len(completion)) for _, completion in rows]
    masks = [[1] * len(completion) + [0] * (width - len(completion)) for _, completion in rows]
    prompts = torch.tensor([prompt for prompt, _ in rows])
    texts = ours.processing_class.batch_decode([completion for _, completion in rows], skip_special_tokens=True)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": torch.tensor(padded),
        "completion_mask": torch.tensor(masks),
    }, digit_share(texts)


def main(folder: Path) -> None:
    ours = made(folder, max_steps=1, per_device_train_batch_size=4, num_generations=GROUP)
    ours.train()
    assert isinstance(ours.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    ours.model.train()
    ours.current_gradient_accumulation_steps = 1
    batch = ours._buffered_inputs[0]
    whole, rewards = whole_group(ours, batch)
    parameters = [p for p in ours.model.parameters() if p.requires_grad]
    want = torch.autograd.grad(objective_by_hand(ours, whole, rewards, "probability", GROUP), parameters)
    ours.model_wrapped.zero_grad()
    ours.accelerator.backward(ours._compute_loss(ours.model_wrapped, batch))
    if ours.accelerator.is_main_process:
        largest = max(grad.abs().max() for grad in want).item()
        worst = max((p.grad - grad).abs().max() for p, grad in zip(parameters, want, strict=True)).item()
        (folder / "results.json").write_text(json.dumps({"largest": largest, "worst": worst}))
    ours.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
