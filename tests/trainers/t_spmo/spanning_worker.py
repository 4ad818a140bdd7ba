"""Run by test_trainer.py in two processes: a group of eight completions, four of them on each rank."""

import json
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.tiny import digit_share
from tests.trainers.t_spmo.test_trainer import make_trainer, objective_by_hand

GROUP = 8


def main(folder: Path) -> None:
    ours = make_trainer(folder, max_steps=1, per_device_train_batch_size=4, num_generations=GROUP)
    ours.train()
    assert isinstance(ours.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    ours.model.train()
    ours.current_gradient_accumulation_steps = 1
    batch = ours._buffered_inputs[0]
    whole = {}
    for name in ("prompt", "completion"):  # of both ranks, as one padded batch
        pairs = zip(batch[f"{name}_ids"], batch[f"{name}_mask"], strict=True)
        rows = gather_object([ids[mask.bool()] for ids, mask in pairs])
        whole[f"{name}_ids"] = pad_sequence(rows, batch_first=True)
        whole[f"{name}_mask"] = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        assert len(rows) == GROUP and (name == "completion" or len({tuple(row.tolist()) for row in rows}) == 1)
    rewards = digit_share(ours.processing_class.batch_decode(rows, skip_special_tokens=True))
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
