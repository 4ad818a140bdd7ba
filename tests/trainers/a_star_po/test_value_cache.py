"""The cache under several processes, kill -9, damaged files, and what its keys depend on."""

import ast
import dataclasses
import functools
import hashlib
import multiprocessing
import os
import random
import re
import runpy
import signal
import sqlite3
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_model
from trl_fsdp_qlora import AStarPOConfig
from trl_fsdp_qlora.tools.data.rewards import get_reward
from trl_fsdp_qlora.trainers.a_star_po.values import Item, ReferenceValues, describe_model, describe_reward
from trl_fsdp_qlora.trainers.run.phases import PhaseTimer

CONTEXT = {"reference": 1, "sampling": 2, "rewards": [["r", "v"]]}


def true_rewards(prompt_ids: list[int]) -> np.ndarray:
    """The eight samples that the reference "draws" for a prompt, shape (8, 1)."""
    bits = np.frombuffer(hashlib.sha256(repr(prompt_ids).encode()).digest()[:8], np.uint8)
    return (bits % 3 == 0).astype(np.float64)[:, None]


def open_values(folder: str, draw=None, context: dict = CONTEXT, **config) -> ReferenceValues:
    """Stage 1 on `folder` without a model, with 8 samples of each prompt."""
    settings = {"disable_tqdm": True, **config}
    args = AStarPOConfig("unused", value_cache=folder, use_cpu=True, bf16=False, report_to="none", **settings)
    clock = PhaseTimer(torch.device("cpu"))
    values = ReferenceValues(args, Accelerator(cpu=True), clock, torch.ones(1), ["r"], None, draw, synced_gpus=False)
    values.open(lambda: context)
    return values


def items(values: ReferenceValues, n: int) -> dict[str, Item]:
    return dict(values.items([{"prompt": str(i)} for i in range(n)], [[i] for i in range(n)]))


def work(folder: str, seconds: float, n: int) -> None:
    """A process of stage 1 that is killed. It notes each drawing, before its samples are stored, as a line of
    `FOLDER.log`: the prompt, how many samples were stored, how many are drawn, and its own number."""

    def draw(asked, counts, seed):
        time.sleep(seconds)
        drawn = []
        for item, count in zip(asked, counts, strict=True):
            had = len(values.rewards.get(values.items([item.row], [item.prompt_ids])[0][0], []))
            with open(f"{folder}.log", "a") as log:  # one short write in append mode is atomic
                log.write(f"{item.prompt_ids[0]} {had} {count} {os.getpid()}\n")
            drawn.append(true_rewards(item.prompt_ids)[had : had + count])
        return drawn

    values = open_values(folder, draw)
    values.fill(items(values, n))


def rewards(*values):
    return np.array(values, np.float64).reshape(len(values), -1)


def test_samples_that_two_runs_drew_at_once_count_once_and_more_extend_them(tmp_path):
    folder = str(tmp_path / "deep" / "v")
    one = open_values(folder)
    two = open_values(folder)
    one.store({"a": (0, rewards(1, 0))})
    two.store({"a": (0, rewards(1, 0, 1, 1)), "b": (0, rewards(np.nan, -3.0))})
    one.store({"a": (2, rewards(1, 1, 0)), "c": (1, rewards(1, 1))})
    stored = open_values(folder).read()
    assert stored.keys() == {"a", "b"}  # what came before the samples of c was lost
    np.testing.assert_array_equal(stored["a"], rewards(1, 0, 1, 1, 0))
    np.testing.assert_array_equal(stored["b"], rewards(np.nan, -3.0))
    assert open_values(folder, context={**CONTEXT, "sampling": 3}).read() == {}


def test_a_damaged_file_costs_the_damaged_lines_only(tmp_path):
    def draw(asked, counts, seed):
        drawn.extend(item.prompt_ids[0] for item in asked)
        return [true_rewards(item.prompt_ids)[8 - count :] for item, count in zip(asked, counts, strict=True)]

    foreign = b'\nnot ours\n[1]\n\xff\xfe\n{"key": "x", "start": 0, "rewards": [[1, 2], [3]]}\n{"key": 1}\n'
    foreign += b'{"key": "x", "start": Infinity, "rewards": [[1]]}\n{"key": "x", "start": NaN, "rewards": [[1]]}\n'
    for expected in (20, 1):
        values = open_values(str(tmp_path / "v"), draw)
        drawn = []
        everything = items(values, 20)
        values.fill(everything)
        assert len(drawn) == expected
        assert values.rewards == {
            key: true_rewards(item.prompt_ids)[:, 0].tolist() for key, item in everything.items()
        }
        for path in (tmp_path / "v").iterdir():  # the last line is half a line now
            path.write_bytes(path.read_bytes()[:-9].replace(b"\n", foreign, 1))


def read_log(folder):
    return [tuple(map(int, line.split())) for line in Path(f"{folder}.log").read_text().splitlines()]


def start(folder, n):
    """A worker process; forked, because a fresh interpreter would spend most of its life importing torch."""
    process = multiprocessing.get_context("fork").Process(target=work, args=(folder, 0.06, n))
    process.start()
    return process


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.exhaustive
def test_kill_nine_ten_times_at_random_moments_beside_another_run(tmp_path):
    folder = str(tmp_path / "v")
    chance = random.Random(0)
    n = 1200
    Path(f"{folder}.log").touch()
    other_run = start(folder, n)
    run = start(folder, n)
    snapshots = []
    for _ in range(10):
        deadline = time.monotonic() + 60
        while not any(line[3] == run.pid for line in read_log(folder)):
            assert time.monotonic() < deadline and run.is_alive()
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.3))
        run.kill()
        run.join()
        assert run.exitcode == -signal.SIGKILL, "it had finished: there was nothing left to interrupt"
        stored = open_values(folder)
        lines = len(read_log(folder))
        everything = items(stored, n)
        counts = {}
        for key, kept in stored.rewards.items():
            assert kept == true_rewards(everything[key].prompt_ids)[: len(kept), 0].tolist()
            counts[everything[key].prompt_ids[0]] = len(kept)
        run = start(folder, n)
        snapshots.append((lines, run.pid, counts))
    for process in (run, other_run):
        process.join(120)
        assert process.exitcode == 0
    # What was stored before a start is not drawn after it.
    for lines, pid, counts in snapshots:
        later = [line for line in read_log(folder)[lines:] if line[3] == pid]
        assert all(had >= counts.get(prompt, 0) for prompt, had, *_ in later)
    last = open_values(folder)
    assert len(last.rewards) == n
    assert last.fill(items(last, n)).samples == 0


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    values = open_values(str(tmp_path / "file" / "v"), lambda asked, counts, seed: [rewards(*[1] * 8)] * len(asked))
    values.fill(items(values, 20))
    assert set(values.known.values()) == {1.0}
    (message,) = caplog.messages
    assert str(tmp_path / "file") in message


def test_a_folder_in_the_place_of_a_file_of_values_is_one_warning(tmp_path, caplog):
    values = open_values(str(tmp_path))
    values.store({"a": (0, rewards(1, 0))})
    (tmp_path / f"{values.context[:16]}-folder.jsonl").mkdir()
    reopened = open_values(str(tmp_path))
    assert reopened.rewards.keys() == {"a"}
    (message,) = caplog.messages
    assert "-folder.jsonl" in message


def test_keys_depend_on_the_prompt_and_on_every_column(tmp_path):
    row = {"prompt": "1+1=", "answer": 2}

    def key(ids=(1, 2), context=CONTEXT, **changes):
        return open_values(str(tmp_path), context=context).items([{**row, **changes}], [list(ids)])[0][0]

    variants = [key(), key(context={**CONTEXT, "sampling": 3}), key([1, 3]), key(answer=3), key(answer={b"2", b"3"})]
    variants += [key(prompt=[{"role": "user", "content": "1+1="}])]
    assert len(set(variants)) == len(variants)
    assert key(answer=torch.tensor(2)) == variants[0] and key(answer={b"3", b"2"}) == variants[4]
    values = open_values(str(tmp_path))
    for same in (dict(reversed(row.items())), Dataset.from_list([row]).with_format("numpy")[0]):
        assert values.items([same], [[1, 2]])[0][0] == variants[0]


def test_the_reference_is_the_base_whatever_adapter_hangs_on_it_unless_that_is_part_of_the_reference(tmp_path):
    base = describe_model(tiny_model())
    small = LoraConfig(r=2, target_modules=["q_proj"])
    tiny_model().save_pretrained(tmp_path)
    assert describe_model(AutoModelForCausalLM.from_pretrained(tmp_path)) == base
    for config in (small, LoraConfig(r=8, target_modules="all-linear")):
        assert describe_model(get_peft_model(tiny_model(), config)) == base
    assert base not in (describe_model(tiny_model(seed=1)), describe_model(tiny_model().bfloat16()))
    model = get_peft_model(tiny_model(), small, adapter_name="ref")
    before = describe_model(model, "ref")
    assert before["weights"] != describe_model(model)["weights"]
    model.add_adapter("default", small)
    assert describe_model(model, "ref") == before
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if ".ref." in name).add_(1)
    assert describe_model(model, "ref") != before


class Scaler:
    def __init__(self, scale):
        self.scale = scale

    def method(self, completions, scale=None, **kwargs):
        return [scale or self.scale for _ in completions]


def test_what_a_reward_was_built_with_counts():
    def described(reward, version=None):
        return describe_reward(reward, "r", version)

    for make in (
        lambda scale: functools.partial(Scaler(1.0).method, scale=scale),
        lambda scale: Scaler(scale).method,
        lambda scale: lambda completions, **kwargs: [scale for _ in completions],
    ):
        assert described(make(1.0)) == described(make(1.0)) != described(make(2.0))
        assert described(make(1.0), "v1") == described(make(2.0), "v1") != described(make(1.0), "v2")
    model = nn.Module()
    model.config = tiny_model().config
    model.head = nn.Linear(2, 2)
    before = described(model)
    with torch.no_grad():
        model.head.weight[0, 0] += 1e-6
    assert described(model) != before  # a reward model counts by its weights


@dataclasses.dataclass
class Grader:
    strict: bool
    names: set


class Slotted:
    __slots__ = ("limit",)

    def __init__(self, limit):
        self.limit = limit


# Of each kind two of the same value, made one by one, and one of another.
BUILT_WITH = {
    "dataclass": lambda i: Grader(bool(i), {"a", "b"}),
    "set in a dataclass": lambda i: Grader(True, {"a", "b", str(i)}),
    "pattern": lambda i: re.compile(r"\d+" * (i + 1)),
    "bound builtin": lambda i: re.compile(r"\d+" * (i + 1)).search,
    "set": lambda i: {"x", "y", ("z", i)},
    "array": lambda i: np.arange(2000) + (np.arange(2000) == 1000) * i,
    "tensor": lambda i: torch.arange(2000) + i,
    "fraction": lambda i: Fraction(i + 1, 3),
    "object": lambda i: Scaler(i),
    "slots": lambda i: Slotted(i),
    "nested": lambda i: {"k": [({"m": Scaler(np.float64(i))},)]},
    "function": lambda i: Scaler(i).method,
    "cached": lambda i: functools.lru_cache(functools.partial(max, i)),
    "model": lambda i: nn.Embedding.from_pretrained(torch.full((2, 2), float(i))),
}


def closure_over(value):
    return lambda completions, **kwargs: [value for _ in completions]


def takes_default(value):
    def reward(completions, value=value, **kwargs):
        return [value for _ in completions]

    return reward


@pytest.mark.parametrize("kind", BUILT_WITH)
def test_a_reward_is_known_by_the_value_of_whatever_it_was_built_with(kind, caplog):
    for make in (closure_over, takes_default, lambda value: functools.partial(Scaler(1.0).method, scale=value)):
        first, same, other = (describe_reward(make(BUILT_WITH[kind](i)), "r", None) for i in (0, 0, 1))
        assert first == same != other
    assert not caplog.text


def test_what_cannot_be_read_is_named(caplog):
    describe_reward(closure_over(sqlite3.connect(":memory:")), "judge", None)
    (message,) = caplog.messages
    for text in ("judge", "Connection", "value_reward_version"):
        assert text in message


@pytest.mark.processes
def test_a_reward_has_the_same_key_in_another_process(tmp_path):
    """Whatever order sets, and addresses objects, have there."""
    code = """
from tests.trainers.a_star_po.test_value_cache import BUILT_WITH, closure_over, describe_reward
print({kind: describe_reward(closure_over(make(1)), "r", None)["built_with"] for kind, make in BUILT_WITH.items()})
"""
    here = {kind: describe_reward(closure_over(make(1)), "r", None)["built_with"] for kind, make in BUILT_WITH.items()}
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    there = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert there.returncode == 0, there.stderr
    assert ast.literal_eval(there.stdout) == here


def test_a_reward_of_this_package_counts_by_its_options_and_the_version(monkeypatch):
    before = describe_reward(get_reward("exact_answer"), "r", None)
    assert before == describe_reward(get_reward("exact_answer"), "r", None)
    assert before != describe_reward(get_reward("exact_answer", "hash"), "r", None)
    monkeypatch.setattr("trl_fsdp_qlora.trainers.a_star_po.values.__version__", "0.0.0")
    assert describe_reward(get_reward("exact_answer"), "r", None) != before


def test_the_text_of_the_file_that_defines_a_reward_counts_and_one_without_is_named(tmp_path, caplog):
    def described(helper):
        text = (
            f"def helper(text):\n    return {helper}\n\ndef reward(completions, **_):\n    return [*map(helper, "
            "completions)]\n"
        )
        (tmp_path / "user_rewards.py").write_text(text)
        return describe_reward(runpy.run_path(str(tmp_path / "user_rewards.py"))["reward"], "reward", None)

    assert described("len(text)") == described("len(text)") != described("2 * len(text)")
    space = {}
    exec("def reward(completions, **_): return [1.0] * len(completions)", space)
    describe_reward(space["reward"], "reward", "1")
    assert not caplog.text
    describe_reward(space["reward"], "reward", None)
    (message,) = caplog.messages
    assert "value_reward_version" in message
