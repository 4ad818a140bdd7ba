"""CPU seconds and peak memory of a loss with its backward: TRL's trainers that call no fused head themselves, as they
are and after `share_prompts`.

    python benchmarks/every_forward.py   # the second table of docs/share_prompts.md; one thread, some minutes
    # the first: a point in a process
    python benchmarks/every_forward.py --shape smollm2 --vocabulary 49152 --runs 2 --points Reward --output FILE

Both contestants are the same trainer class of TRL on the same batch in one process. Runs alternate, and medians of the
process's CPU time are compared, so that other work on the machine counts little. The peak is the highest sum of live
allocations during a loss and its backward, above the level at its start.

Trainers that hold logits make them as in stock TRL, so the larger the vocabulary next to the layers, the less they
gain. The default shape has four small layers and a small vocabulary; "smollm2" has the sizes of SmolLM2-135M.
"""

import argparse
import copy
import statistics
import tempfile
import time
import warnings
from types import SimpleNamespace
from unittest.mock import patch

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from synthetic import SHAPES, gradient_difference, make_model, peak_bytes, run_points, small_tokenizer
from transformers import Qwen3ForSequenceClassification

from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing

warnings.filterwarnings("ignore", category=FutureWarning)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from trl.experimental import gkd, tpo


class Tokens:
    """Batches from a seed."""

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self.draw = torch.Generator().manual_seed(1)

    def rows(self, count: int, length: int) -> torch.Tensor:
        return torch.randint(2, self.vocabulary, (count, length), generator=self.draw)

    def pairs(self, branches: int = 2, prompts: int = 2) -> dict[str, torch.Tensor]:
        """Rows of 512 + 256 tokens, branch by branch: all chosen, then all rejected."""
        prompt = self.rows(prompts, 512).repeat(branches, 1)
        ids = torch.cat([prompt, self.rows(branches * prompts, 256)], dim=1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def group(self) -> dict[str, torch.Tensor]:
        """Eight completions of 128 tokens behind one prompt of 512."""
        prompt = self.rows(1, 512).repeat(8, 1)
        completion = self.rows(8, 128)
        return {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": completion,
            "completion_mask": torch.ones_like(completion),
        }


def of_triples(tokens: Tokens) -> dict:
    batch = tokens.pairs(branches=3)
    mask = batch["attention_mask"].clone()
    mask[:, :512] = 0
    return batch | {"completion_mask": mask}


def of_dialogues(tokens: Tokens) -> dict:
    """Eight dialogues with a system prompt of 256 tokens in common, 256 of a question's own, and 128 of an answer."""
    system = tokens.rows(1, 256).repeat(8, 1)
    ids = torch.cat([system, tokens.rows(8, 256 + 128)], dim=1)
    labels = ids.clone()
    labels[:, :512] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


PREFERENCES = Dataset.from_dict({"prompt": ["a"], "chosen": ["a"], "rejected": ["a"], "reference": ["a"]})
PROMPTS = Dataset.from_dict({"prompt": ["a"] * 8})
DIALOGUES = Dataset.from_dict(
    {"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]]}
)
# name: trainer, its config, the config's fields, its dataset, its batch
POINTS = {
    "Distillation 512/128, 8 rows": (
        trl.DistillationTrainer,
        trl.DistillationConfig,
        {"per_device_train_batch_size": 8},
        PROMPTS,
        Tokens.group,
    ),
    "GKD 256+256/128, 8 rows": (
        gkd.GKDTrainer,
        gkd.GKDConfig,
        {"lmbda": 0.0, "per_device_train_batch_size": 8},
        DIALOGUES,
        of_dialogues,
    ),
    "Reward 512/256, 2 pairs": (trl.RewardTrainer, trl.RewardConfig, {}, PREFERENCES, Tokens.pairs),
    "TPO 512/256, 2 triples": (tpo.TPOTrainer, tpo.TPOConfig, {}, PREFERENCES, of_triples),
}


def make_trainer(name: str, args):
    """A trainer with a LoRA adapter, ready for `compute_loss`; a teacher is a copy with other weights."""
    trainer_class, config_class, fields, rows, _ = POINTS[name]
    model = make_model(SimpleNamespace(device="cpu", vocabulary=args.vocabulary, shape=args.shape))
    options = {"model": model}
    if trainer_class is trl.RewardTrainer:
        model.config.num_labels = 1
        classifier = Qwen3ForSequenceClassification(model.config)
        classifier.model.load_state_dict(model.model.state_dict())
        torch.nn.init.normal_(classifier.score.weight, generator=torch.Generator().manual_seed(0))
        options = {"model": classifier}
    if trainer_class in (trl.DistillationTrainer, gkd.GKDTrainer):
        options["teacher_model"] = copy.deepcopy(model)
        for parameter in options["teacher_model"].parameters():
            parameter.data.mul_(1.1)
    tokenizer = small_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    common = {"output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False, "report_to": []}
    torch.manual_seed(0)
    trainer = trainer_class(
        args=config_class(**common, gradient_checkpointing=False, **fields),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False),
        **options,
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def loss_and_backward(trainer, batch: dict) -> None:
    trainer.model.zero_grad(set_to_none=True)
    trainer.compute_loss(trainer.model, dict(batch)).backward()


def cpu_seconds(trainer, batch: dict) -> float:
    start = time.process_time()
    loss_and_backward(trainer, batch)
    return time.process_time() - start


def counted_tokens(trainer, batch: dict) -> tuple[int, int]:
    """Tokens of all forwards of a loss that run packed, padded and computed."""
    counts = [0, 0]

    def counting(answer):
        def count(sharing, *call):
            output = answer(sharing, *call)
            counts[0] += sharing.figures.padded_tokens
            counts[1] += sharing.figures.tokens
            return output

        return count

    answers = {name: counting(getattr(PromptSharing, name)) for name in ("score", "last_hidden_states")}
    with patch.multiple(PromptSharing, **answers):
        loss_and_backward(trainer, batch)
    return counts[0], counts[1]


def measure(name: str, args) -> dict:
    batch = POINTS[name][-1](Tokens(args.vocabulary))
    contestants = {"stock": make_trainer(name, args), "shared": share_prompts(make_trainer(name, args))}
    loss_and_backward(contestants["stock"], batch)
    padded, computed = counted_tokens(contestants["shared"], batch)  # compares with stock, too
    gradients = gradient_difference(contestants["shared"], contestants["stock"])
    seconds: dict[str, list[float]] = {key: [] for key in contestants}
    for _ in range(args.runs):
        for key, trainer in contestants.items():
            seconds[key].append(cpu_seconds(trainer, batch))
    peaks = {}
    for key, trainer in contestants.items():
        trainer.model.zero_grad(set_to_none=True)
        peaks[key] = peak_bytes(lambda trainer=trainer: loss_and_backward(trainer, batch), "cpu")
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    return {
        "point": name,
        "padded_tokens": padded,
        "tokens": computed,
        "seconds": medians,
        "spread": {key: [min(values), max(values)] for key, values in seconds.items()},
        "speedup": medians["stock"] / medians["shared"],
        "peak_bytes": peaks,
        "gradient_difference": gradients,
    }


def table(rows: list[dict]) -> str:
    lines = [
        "| batch | tokens, padded | computed | fewer | stock, s | shared, s | speed-up | stock, MiB | shared, MiB |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        seconds = row["seconds"]
        stock, ours = (row["peak_bytes"][key] / 2**20 for key in ("stock", "shared"))
        fewer = row["padded_tokens"] / row["tokens"]
        lines.append(
            f"| {row['point']} | {row['padded_tokens']:,} | {row['tokens']:,} | {fewer:.2f}× | {seconds['stock']:.2f} "
            f"| {seconds['shared']:.2f} | {row['speedup']:.2f}× | {stock:.0f} | {ours:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each contestant")
    parser.add_argument("--shape", choices=SHAPES, default="cpu", help="of Qwen3; see synthetic.py")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--points", nargs="*", help="only points whose name contains one of these")
    parser.add_argument("--output", default="every_forward", help="file stem under benchmarks/results")
    args = parser.parse_args()
    names = [name for name in POINTS if args.points is None or any(part in name for part in args.points)]
    hidden, _, layers, *_ = SHAPES[args.shape]
    run_points(args, names, measure, table, f"Qwen3, hidden {hidden}, {layers} layers, LoRA r=16")


if __name__ == "__main__":
    main()
