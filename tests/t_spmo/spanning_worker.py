"""Run by test_trainer.py in two processes: a group of eight completions, four of them on each rank."""

import json
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.t_spmo.test_trainer import made, objective_by_hand
from tests.tiny import digit_share

GROUP = 8


def whole_group(ours, batch):
    """The rows of both ranks as one padded batch, and the rewards of their texts."""
    pairs = [(f"{part}_ids", f"{part}_mask") for part in ("prompt", "completion")]
    mine = [[ids[m.bool()] for ids, m in zip(batch[i], batch[mask], strict=True)] for i, mask in pairs]
    rows = gather_object(list(zip(*mine, strict=True)))
    assert len(rows) == GROUP and all(torch.equal(prompt, rows[0][0]) for prompt, _ in rows)
    whole = {}
    for (ids, mask), values in zip(pairs, zip(*rows, strict=True), strict=True):
        whole[ids] = pad_sequence(values, batch_first=True)
        whole[mask] = pad_sequence([torch.ones_like(row) for row in values], batch_first=True)
    texts = ours.processing_class.batch_decode([completion for _, completion in rows], skip_special_tokens=True)
    return whole, digit_share(texts)


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
