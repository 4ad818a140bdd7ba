"""The file of values: what is read again, and what its keys depend on."""

import json

import torch
from accelerate import Accelerator
from datasets import Dataset

from trl_fsdp_qlora import AStarPOConfig
from trl_fsdp_qlora.trainers.a_star_po.values import ReferenceValues, keyed
from trl_fsdp_qlora.trainers.reporting.phases import PhaseTimer

CONTEXT = {"reference": "1", "sampling": 2}


def rewards_of(row: dict) -> list[float]:
    """The samples that the reference "draws" for a row."""
    return [float((int(row["prompt"]) + i) % 3 == 0) for i in range(8)]


def open_values(folder, context: dict = CONTEXT, **config) -> ReferenceValues:
    """Stage 1 on `folder` without a model, with 8 samples of each prompt; `drawn` has the prompts that it drew."""
    settings = {"disable_tqdm": True, "use_cpu": True, "bf16": False, "report_to": "none", **config}
    args = AStarPOConfig("unused", value_cache=str(folder), **settings)
    drawn = []

    def draw(rows, seed):
        drawn.extend(int(row["prompt"]) for row in rows)
        return list(map(rewards_of, rows))

    clock = PhaseTimer(torch.device("cpu"))
    values = ReferenceValues(args, Accelerator(cpu=True), clock, draw, synced_gpus=False)
    values.open(lambda: context)
    values.drawn = drawn
    return values


def rows(n: int) -> dict[str, dict]:
    return dict(keyed([{"prompt": str(i)} for i in range(n)]))


def test_a_second_run_reads_the_file_and_draws_what_it_lacks(tmp_path):
    """The last line is cut off by a kill; what two runs at once have drawn of a row counts once."""
    first = open_values(tmp_path / "deep" / "v")
    first.fill(rows(20))
    assert sorted(first.drawn) == list(range(20))
    text = first.file.read_text()
    first.file.write_text(f"not ours{text}{text[:-9]}")
    second = open_values(tmp_path / "deep" / "v")
    everything = rows(21)
    second.fill(everything)
    assert second.drawn == [20]
    assert second.read() == {key: rewards_of(row) for key, row in everything.items()}
    assert open_values(tmp_path / "deep" / "v", {**CONTEXT, "sampling": 3}).read() == {}


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    values = open_values(tmp_path / "file" / "v")
    values.fill(rows(20))
    assert len(values.known) == 20
    (message,) = caplog.messages
    assert str(tmp_path / "file") in message


def test_keys_depend_on_the_prompt_and_on_every_column():
    """Two rows with one prompt and different answers have two values."""
    row = {"prompt": "1+1=", "answer": 2}

    def key(**changes):
        return keyed([{**row, **changes}])[0][0]

    variants = [key(), key(answer=3), key(prompt=[{"role": "user", "content": "1+1="}])]
    assert len(set(variants)) == len(variants)
    assert key(answer=torch.tensor(2)) == key(completion="2") == variants[0]
    for same in (dict(reversed(row.items())), Dataset.from_list([row]).with_format("numpy")[0]):
        assert keyed([same])[0][0] == variants[0]


def test_a_sample_without_a_reward_is_not_stored(tmp_path):
    values = open_values(tmp_path)
    values.rewards = {"a": [1.0, float("nan"), 0.5], "b": [float("nan")]}
    values.store(["a", "b"])
    assert json.loads(values.file.read_text()) == ["a", [1.0, 0.5]]
    assert values.read() == {"a": [1.0, 0.5]}
