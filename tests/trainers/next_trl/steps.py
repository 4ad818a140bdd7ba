"""Two steps by TRL's own trainers and by this package's, in a process that has imported a changed TRL.

`python -m tests.trainers.next_trl.steps NUMBERS` forks a process per change: torch and transformers are imported once,
TRL in each. A line of JSON per change is printed.
"""

import importlib.metadata
import json
import logging
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from tests.trainers.next_trl.changes import Change, every_change

VERSION = "1.17.0"
LEFT_OUT = ("scripts", "cli", "skills")  # bytecode of unchanged files stays, which saves seconds
# The relative difference of two steps' updates, and the difference of losses next to one.
CLOSE = 1e-3
CLOSE_LOSS = 1e-4
SMALL = 1e-5  # less is rounding: 1.6e-9 of RLOO with equal completions, whose advantages cancel


def copied(folder: Path) -> Path:
    """A copy of the installed TRL that calls itself [`VERSION`]."""
    installed = importlib.metadata.distribution("trl").locate_file("trl")
    shutil.copytree(installed, folder / "trl", ignore=shutil.ignore_patterns(*LEFT_OUT))
    first = folder / "trl" / "__init__.py"
    text = first.read_text(encoding="utf-8")
    assert '__version__ = version("trl")' in text
    first.write_text(text.replace('__version__ = version("trl")', f'__version__ = "{VERSION}"'), encoding="utf-8")
    return folder / "trl"


def rewards(completions, **_columns) -> list[float]:
    """Different ones in the first group of each pair, equal ones in the second, which has zero advantages."""
    return [(i % 4) * (1.0 if i // 4 % 2 == 0 else 0.0) for i in range(len(completions))]


def fixed_turn(with_logprobs: bool):
    """Completions for each row, of different lengths, some of which end."""
    from tests.tiny import character_tokenizer

    end = character_tokenizer().eos_token_id

    def turn(prompt_ids, *_args, **_kwargs):
        generator = torch.Generator().manual_seed(sum(map(len, prompt_ids)))
        ids = []
        for i in range(len(prompt_ids)):
            row = torch.randint(5, 15, (2 + i % 4,), generator=generator).tolist()
            ids.append([*row, end] if i % 3 else row)
        return (ids, None) if with_logprobs else ids

    return turn


def longer(row: dict) -> dict:
    """A prompt with a beginning that a step's micro-batches are worth sharing: otherwise nothing looks ahead."""
    return {"prompt": [{"role": "user", "content": "1+2=3 " * 10 + row["prompt"][-1]["content"]}]}


def make(name: str, ours: bool, folder: str, change: Change):
    import trl
    from datasets import Dataset

    import trl_fsdp_qlora
    from tests import tiny

    package, prefix = (trl_fsdp_qlora, "Efficient") if ours else (trl, "")
    cls, config = (getattr(package, f"{prefix}{name}{kind}") for kind in ("Trainer", "Config"))
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 2, **change.settings}
    if name != "DPO":
        if change.greedy:
            settings["top_k"] = 1
        if ours:
            settings["tokens_per_pass"] = 1000
        shared = {"peft_config": tiny.lora(), "reward": rewards, "dataset": tiny.prompts().map(longer)}
        trainer = tiny.trainer(cls, config, folder, **shared, **settings)
        if not change.greedy:
            turn = change.renames.get("_generate_single_turn", "_generate_single_turn")
            setattr(trainer, turn, fixed_turn(with_logprobs=name == "GRPO"))
        return trainer
    rows = [("1+1=", "2", "11"), ("20+2=", "22 ", "202"), ("1+1=", "two", "3"), ("7+1=", "8", "71 ")] * 4
    dataset = Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows])
    args = config(output_dir=folder, **{**DPO_SETTINGS, **settings})
    return cls(
        tiny.tiny_model(),
        args=args,
        train_dataset=dataset,
        processing_class=tiny.character_tokenizer(),
        peft_config=tiny.lora(),
    )


DPO_SETTINGS = {
    "learning_rate": 1e-2, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0, "bf16": False,
    "gradient_checkpointing": False, "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "report_to": "none",
    "disable_tqdm": True,
}  # fmt: skip


def run(name: str, ours: bool, change: Change) -> tuple[list[float], torch.Tensor]:
    """The losses of two steps, and how the adapter has changed."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(name, ours, folder, change)
        if ours and change.fault:
            plant(trainer, change.fault)
        trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        torch.manual_seed(1)
        for parameter in trained:
            torch.nn.init.normal_(parameter, std=0.05)
        before = [parameter.detach().clone() for parameter in trained]
        trainer.train()
        update = torch.cat([(now.detach() - then).flatten() for now, then in zip(trained, before, strict=True)])
        return [row["loss"] for row in trainer.state.log_history if "loss" in row], update


class Lines(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def outcome(name: str, change: Change) -> dict:
    """How this package's trainer compares with TRL's own, both on the changed TRL."""
    lines = Lines()
    logging.getLogger().addHandler(lines)
    result = {"trainer": name}
    try:
        losses, update = run(name, False, change)
    except Exception as error:
        return result | {"class": "not a TRL", "text": f"{type(error).__name__}: {error}"}
    lines.lines.clear()
    try:
        own_losses, own_update = run(name, True, change)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        seam = change.name.rpartition(" ")[2]
        return result | {"class": "error" if seam in text else "unnamed error", "text": text[-700:]}
    apart = ((own_update - update).norm() / update.norm().clamp(min=SMALL)).item()
    loss_apart = max(abs(a - b) / (1 + abs(b)) for a, b in zip(own_losses, losses, strict=True))
    said = [line for line in lines.lines if "stock" in line and "was never run with TRL" not in line]
    is_equal = apart <= CLOSE and loss_apart <= CLOSE_LOSS
    kind = ("as stock" if said else "equal") if is_equal else "different"
    return result | {"class": kind, "apart": apart, "loss": loss_apart, "text": " | ".join(said)[:600]}


def in_child(change: Change) -> None:
    """Print the outcomes of a change, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        change.edit(copied(Path(folder)))
        sys.path.insert(0, folder)
        try:
            import trl_fsdp_qlora

            for name in trl_fsdp_qlora.__all__:
                getattr(trl_fsdp_qlora, name)
            results = [outcome(name, change) for name in change.trainers]
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            results = [{"trainer": "import", "class": "no import", "text": text[-700:]}]
    os.write(OUT, (json.dumps({"change": change.name, "results": results}) + "\n").encode())


def main(numbers: list[int]) -> None:
    """Fork a process per change, one at a time."""
    for module in ("transformers", "peft", "accelerate", "datasets", "transformers.trainer", "torch.distributed.fsdp"):
        importlib.import_module(module)
    changes = every_change_and_faults()
    for number in numbers:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                in_child(changes[number])
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status:
            text = {"trainer": "process", "class": "unnamed error", "text": f"status {status}"}
            os.write(OUT, (json.dumps({"change": changes[number].name, "results": [text]}) + "\n").encode())


def plant(trainer, fault: str) -> None:
    """Let the package compute wrong log-probabilities, and compare the first step or not."""
    from trl_fsdp_qlora.trainers.step.trl_pass import TrlPass

    stock = TrlPass._finished
    TrlPass._finished = lambda *args: (1.5 * stock(*args)[0], *stock(*args)[1:])
    trainer._awaits_comparison = fault == "compared"


def every_change_and_faults() -> list[Change]:
    faults = [Change(f"fault: {kind}", lambda folder: None, ("GRPO",), fault=kind) for kind in ("compared", "hidden")]
    return [*every_change(), *faults]


if __name__ == "__main__":
    OUT = os.dup(1)
    os.dup2(2, 1)  # what trainers print
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    numbers = [int(word) for word in sys.argv[1:]]
    main(numbers)
