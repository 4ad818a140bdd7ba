"""Ranks whose episodes have different numbers of turns: none waits for another, sharded or not."""

import json
import os
from pathlib import Path

import pytest
from torch.distributed.tensor import DTensor

from tests.distributed.fsdp_on_gloo import force_fsdp, fsdp_environment
from tests.distributed.launch import launch
from tests.distributed.rank import forget_launch, run_rank
from tests.engines.decode import test_turns_images
from tests.engines.decode.helpers import calling_tokenizer
from tests.engines.decode.test_turns import OURS, STOCK, make_trainer

# Classes, model, FSDP2 or DDP, and other settings.
RUNS = {
    "stock": (STOCK, "full", False, {}),
    "ddp": (OURS, "full", False, {}),
    "gathered": (OURS, "full", True, {"fsdp_gather": "once"}),
    "per_layer": (OURS, "full", True, {"fsdp_gather": "per_layer"}),
    "stock_hybrid": (STOCK, "hybrid", False, {}),
    "hybrid": (OURS, "hybrid", True, {"fsdp_gather": "per_layer"}),
    "stock_loop": (OURS, "hybrid", True, {"fsdp_gather": "per_layer", "compact_generation": False}),
    # Rows of an episode: one on rank 0, and a row for each turn on rank 1, whose template strips what was thought.
    "template": (OURS, "full", False, {"history": "template"}),
    "template_per_layer": (OURS, "full", True, {"history": "template", "fsdp_gather": "per_layer"}),
    "template_gathered": (OURS, "full", True, {"history": "template", "fsdp_gather": "once"}),
    "template_stock_loop": (
        OURS,
        "full",
        True,
        {"history": "template", "fsdp_gather": "per_layer", "compact_generation": False},
    ),
}
SAME = ("completions/mean_length", "num_tokens", "reward", "tools/call_frequency", "tools/failure_frequency")


# Models with a vision tower: classes, whether its blocks are sharded, and other settings. The tool returns pictures to
# rank 1 alone. Every second prompt has a picture, so that of two ranks one has pictures in its first turn. TRL 1.16
# gathers logged pictures only on ranks that have some.
PER_LAYER = {"fsdp_gather": "per_layer"}
EVERY_SECOND = {"with_pictures": (0, 2, 4, 6), "shuffle_dataset": False}
WITH_PICTURES = {
    "stock_pictures": (STOCK, False, {}),
    "pictures": (OURS, True, PER_LAYER),
    "stock_prompts": (STOCK, False, EVERY_SECOND),
    "prompts": (OURS, True, {**EVERY_SECOND, **PER_LAYER}),
    "stock_no_tools": (STOCK, False, {**EVERY_SECOND, "tools": ()}),
    "no_tools": (OURS, True, {**EVERY_SECOND, **PER_LAYER, "tools": ()}),
}


def of_rank(rank: int, tokenizer=None):
    """Rank 0 reads no call out of its completions, rank 1 calls turn after turn, until TRL's limit."""
    tokenizer = tokenizer or calling_tokenizer()
    read = tokenizer.parse_response

    def read_here(ids, prefix, tools=None):
        message = read(ids, prefix, tools)
        if rank == 0:
            message.pop("tool_calls", None)
        return message

    tokenizer.parse_response = read_here
    return tokenizer


def thinking_tokenizer():
    """Reads the first half of every completion as a thought, which the chat template leaves out of the history."""
    tokenizer = calling_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content'] }}", "message['content'].split('</think>')[-1] }}"
    )
    read = tokenizer.parse_response

    def read_thoughts(ids, prefix, tools=None):
        message = read(ids, prefix, tools)
        text = message["content"]
        half = len(text) // 2
        return {**message, "content": f"<think>{text[:half]}</think>{text[half:]}"}

    tokenizer.parse_response = read_thoughts
    return tokenizer


# A run and its reference.
REFERENCES = {
    "template_per_layer": "template",
    "template_gathered": "template",
    "template_stock_loop": "template",
    "ddp": "stock",
    "gathered": "stock",
    "per_layer": "stock",
    "hybrid": "stock_hybrid",
    "stock_loop": "stock_hybrid",
    "pictures": "stock_pictures",
    "prompts": "stock_prompts",
    "no_tools": "stock_no_tools",
}
# In `make test`, and with the exhaustive tests.
PARTS = [
    ("ddp", "per_layer", "prompts", "template_per_layer"),
    ("gathered", "hybrid", "stock_loop", "pictures", "no_tools", "template_gathered", "template_stock_loop"),
]


@pytest.mark.processes
@pytest.mark.parametrize("names", [PARTS[0], pytest.param(PARTS[1], marks=pytest.mark.exhaustive)], ids=",".join)
def test_ranks_take_part_in_the_turns_of_others(tmp_path, names):
    launch(__file__, tmp_path, *names, environment=fsdp_environment(), timeout=240)
    runs = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for results_of_rank in runs:
        for name in names:
            reference = REFERENCES[name]
            for mine, theirs in zip(results_of_rank[name]["steps"], results_of_rank[reference]["steps"], strict=True):
                same = [key for key in SAME if key in theirs]
                assert len(same) >= 3, name  # without tools
                assert [mine[key] for key in same] == pytest.approx([theirs[key] for key in same]), name
                assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3, abs=1e-6), name
    rank_0, rank_1 = runs
    for name in {"gathered", "per_layer", "hybrid", "template_per_layer"} & {*names}:
        assert rank_0[name]["turns"] == rank_1[name]["turns"] > 4, name
    assert {*rank_0["template"]["rows"]} == {1} and min(rank_1["template"]["rows"]) > 1
    for name in [name for name in names if name.startswith("template")]:
        for results_of_rank in runs:
            assert results_of_rank[name]["rows"] == results_of_rank["template"]["rows"], name
    if "pictures" in names:
        assert rank_0["pictures"]["looked"] == 0 < rank_1["pictures"]["looked"]
    if "ddp" in names:  # each rank generates alone, so rank 0 has one turn a step
        assert rank_0["ddp"]["turns"] == 2 < rank_1["ddp"]["turns"]


def rank(folder: Path, *names: str) -> None:
    force_fsdp()
    wanted = {*names, *(REFERENCES[name] for name in names)}
    mine = int(os.environ["RANK"])
    results = {}
    for name, (classes, kind, sharded, settings) in RUNS.items():
        if name not in wanted:
            continue
        os.environ["ACCELERATE_USE_FSDP"] = str(sharded).lower()
        trainer = make_trainer(
            *classes,
            folder / name,
            kind,
            tokenizer=of_rank(mine, thinking_tokenizer() if "history" in settings else None),
            per_device_train_batch_size=4,
            max_completion_length=120,
            max_steps=2,
            **settings,
        )
        turns = []
        if classes is OURS:
            turn = trainer.rollout._turn

            def watched(*args, turn=turn, turns=turns):
                turns.append(1)
                return turn(*args)

            trainer.rollout._turn = watched
        trainer.train()
        assert any(isinstance(p, DTensor) for p in trainer.model.parameters()) == sharded, name
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        results[name] = {"steps": steps, "turns": len(turns)}
        if "history" in settings:
            results[name]["rows"] = [len(rows) for inputs in trainer._buffered_inputs for rows in inputs["rows"]]
        forget_launch()
    for name, (classes, sharded, settings) in WITH_PICTURES.items():
        if name not in wanted:
            continue
        os.environ["ACCELERATE_USE_FSDP"] = str(sharded).lower()
        processor = test_turns_images.qwen_processor()
        of_rank(mine, processor.tokenizer)
        settings = {"with_pictures": False, "log_multimodal": False, "max_steps": 2, **settings}
        trainer = test_turns_images.make_trainer(
            *classes, folder / name, processor=processor, per_device_train_batch_size=4, **settings
        )
        trainer.train()
        tower = [p for n, p in trainer.model.named_parameters() if "visual.blocks" in n]
        assert tower and all(isinstance(p, DTensor) == sharded for p in tower), name
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        results[name] = {"steps": steps, "looked": sum(test_turns_images.LOOKED)}
        forget_launch()
    (folder / f"rank{mine}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    run_rank(lambda folder, *names: rank(Path(folder), *names))
