"""Episodes ahead: with tools, environments or a `rollout_func` a run is that in turns if the policy does not move."""

import threading
import time
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from datasets import IterableDataset
from transformers import TrainerCallback

from tests import tiny
from tests.engines.decode.helpers import calling_tokenizer
from tests.engines.vllm.runs import figures
from tests.engines.vllm.sampling_server import SamplingServer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.engines.decode import tools as tools_module
from trl_fsdp_qlora.experimental.one_generation_ahead import ahead as ahead_module

from .helpers import Stop, trained_prompts

pytestmark = pytest.mark.filterwarnings("ignore:.*environment_factory", "ignore:.*rollout_func")
SAME = (
    "loss", "grad_norm", "reward", "num_tokens", "completions/mean_length", "completions/clipped_ratio",
    "tools/call_frequency", "tools/failure_frequency", "dynamic_sampling/further_prompts",
)  # fmt: skip


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return str(a + b)


class Counter:
    """Counts the calls of an episode, and pays for them."""

    def reset(self, prompt, **_columns) -> str:
        self.count = 0
        return f"{len(prompt[-1]['content'])}"

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: one.
            b: the other.
        """
        self.count += 1
        return str(a + b)

    def get_reward(self) -> float:
        return float(self.count)


def by_hand(prompts, trainer):
    """A `rollout_func`: two turns, the second behind a token that no policy drew."""
    ids = [trainer.processing_class.apply_chat_template(prompt, return_dict=False) for prompt in prompts]
    generate = trainer.vllm_generation.generate
    _, first, first_logps, _ = generate(ids, None, trainer.num_generations)
    asked = [[*prompt, *turn, 5] for prompt, turn in zip(ids, first, strict=True)]
    _, second, second_logps, _ = generate(asked, None, 1)
    turns = list(zip(first, first_logps, second, second_logps, strict=True))
    return {
        "prompt_ids": ids,
        "completion_ids": [[*a, 5, *b] for a, _, b, _ in turns],
        "logprobs": [[*(p[0] for p in of_a), 0.0, *(p[0] for p in of_b)] for _, of_a, _, of_b in turns],
        "env_mask": [[*[1] * len(a), 0, *[1] * len(b)] for a, _, b, _ in turns],
        "turns": [2] * len(turns),
    }


def in_rows(prompts, trainer):
    """A `rollout_func` whose second turn is behind the prompt and a token, and does not see the first turn."""
    ids = [trainer.processing_class.apply_chat_template(prompt, return_dict=False) for prompt in prompts]
    generate = trainer.vllm_generation.generate
    turns = []
    for seen, repetitions in ((ids, trainer.num_generations), ([[*prompt, 5] for prompt in ids], 1)):
        _, drawn, logprobs, _ = generate(seen, None, repetitions)
        rows = []
        for before, wrote, of_tokens in zip(seen, drawn, logprobs, strict=True):
            mask = [0] * len(before) + [1] * len(wrote)
            logps = [of_token[0] for of_token in of_tokens]
            rows.append({"input_ids": before + wrote, "sampled_mask": mask, "logprobs": logps})
        turns.append(rows)
    return {"rows": [list(episode) for episode in zip(*turns, strict=True)]}


def make_episodes(server, folder, tokenizer=None, reward=tiny.digit_share, dataset=None, named=None, **changes):
    """A trainer of conversational prompts; `named` has the tools, the environment or the `rollout_func`."""
    torch.manual_seed(0)
    settings = {"max_completion_length": 16, "max_tool_calling_iterations": 3, "learning_rate": 0.0, "max_steps": 3}
    args = tiny.config(EfficientGRPOConfig, folder, **{**settings, **server.settings(), **changes})
    model = tiny.tiny_model()
    model.config.max_position_embeddings = 512
    return EfficientGRPOTrainer(
        model, reward, args, dataset or tiny.prompts(), peft_config=tiny.lora(),
        processing_class=tokenizer or calling_tokenizer(), **(named or {}),
    )  # fmt: skip


WAYS = {
    "tools": {"tools": [add]},
    "environments": {"environment_factory": Counter},
    "rollout_func": {"rollout_func": by_hand},
}


def runs_of(folder, named=None, **changes) -> dict[int, dict]:
    """Without the option and with it: what was trained on, the figures of each step, and what the server drew."""
    runs = {}
    for ahead in (0, 1):
        with SamplingServer(keeps_keys=True) as server:
            settings = {"rollouts_ahead": ahead, **changes}
            trainer = make_episodes(server, folder / str(ahead), named=named, **settings)
            trained = trained_prompts(trainer)
            trainer.train()
            runs[ahead] = {**what_happened(trainer, trained), "asked": [draw.prompts for draw in server.draws]}
    return runs


def what_happened(trainer, trained: list) -> dict:
    return {
        "trained": trained,
        "figures": {name: figures(trainer, name) for name in SAME},
        "staleness": figures(trainer, "sampling/staleness"),
        "rows": figures(trainer, "episodes/rows_mean"),
        "apart": figures(trainer, "sampling/sampling_logp_difference/max"),
    }


def assert_same(runs: dict[int, dict]) -> None:
    assert runs[1]["trained"] == runs[0]["trained"]
    for name, values in runs[0]["figures"].items():
        torch.testing.assert_close(torch.tensor(runs[1]["figures"][name]), torch.tensor(values), rtol=0, atol=1e-5)
    assert any(runs[0]["figures"]["grad_norm"])


@pytest.mark.parametrize("way", tiny.these_first(WAYS, "tools"))
def test_a_run_is_that_in_turns(tmp_path, way):
    runs = runs_of(tmp_path, WAYS[way], max_completion_length=10 if way == "rollout_func" else 24)
    assert_same(runs)
    assert runs[1]["asked"] == runs[0]["asked"] and len(runs[0]["asked"]) > 3  # turns
    assert runs[1]["staleness"] == [0, 1, 1]
    if way != "rollout_func":
        assert min(runs[0]["figures"]["tools/call_frequency"]) > 0


SEVERAL_ROWS = {
    "rows": ({"rollout_func": in_rows}, {"max_completion_length": 10}),
    "template": ({"tools": [add]}, {"history": "template", "max_completion_length": 60}),
}


@pytest.mark.parametrize("way", tiny.these_first(SEVERAL_ROWS, "rows"))
def test_episodes_of_several_rows(tmp_path, way):
    """In turns and ahead; the server's log-probability of each sampled token is the trainer's, in its row."""
    named, changes = SEVERAL_ROWS[way]
    runs = runs_of(tmp_path, named, **changes)
    assert_same(runs)
    assert runs[1]["asked"] == runs[0]["asked"]
    for run in runs.values():
        assert min(run["rows"]) > 1
        assert max(run["apart"]) < 1e-4


def test_streaming_data_are_drawn_ahead(tmp_path):
    """The first batch of an epoch is not known before the epoch begins."""
    rows = tiny.prompts(5).to_list()
    stream = IterableDataset.from_generator(lambda: iter(rows))
    runs = runs_of(tmp_path, dataset=stream, max_steps=5, max_completion_length=6)
    assert_same(runs)
    assert runs[1]["asked"] == runs[0]["asked"] and runs[1]["staleness"] == [0, 1, 0, 1, 0]


def test_dynamic_sampling_ahead_draws_the_same_further_prompts(tmp_path):
    runs = runs_of(tmp_path, dynamic_sampling=True, reward=tiny.even_start, max_completion_length=6)
    assert_same(runs)
    assert sorted(runs[1]["asked"]) == sorted(runs[0]["asked"])
    assert sum(runs[0]["figures"]["dynamic_sampling/further_prompts"]) > 0 and runs[1]["staleness"] == [0, 1, 1]


def named_add(call):
    """A tool that takes two numbers."""

    def adds(a: int, b: int) -> str:
        return call(a, b)

    adds.__name__ = add.__name__
    adds.__doc__ = add.__doc__
    return adds


def test_a_tool_that_hangs_ends_by_its_limit(tmp_path, monkeypatch):
    """In a thread no signal stops it."""
    lines = []
    monkeypatch.setattr(tools_module.logger, "warning_once", lines.append)
    released = threading.Event()
    hangs = named_add(lambda a, b: released.wait(60))
    with SamplingServer(keeps_keys=True) as server:
        changes = {"rollouts_ahead": 1, "max_steps": 2, "tool_timeout": 0.02}
        trainer = make_episodes(server, tmp_path, named={"tools": [hangs]}, **changes)
        trainer.train()
    released.set()
    assert figures(trainer, "tools/failure_frequency") == [1, 1]
    assert "add" in lines[0] and "tool_timeout=0.02" in lines[0]


NOT_IN_CHECKPOINT = {
    "tools": "it was not drawn within rollouts_ahead_save_timeout=0.1 seconds",
    "environments": "the state of an environment cannot be written",
}


@pytest.mark.parametrize("way", tiny.these_first(NOT_IN_CHECKPOINT, "tools"))
def test_a_checkpoint_that_lacks_the_batch_in_flight(tmp_path, monkeypatch, way):
    """A tool answers once the checkpoint is written. The next step takes the batch, and a run that resumes plays it
    again: both train on the episodes of a run in turns.
    """
    lines, outlasted = [], []
    is_saved = threading.Event()
    monkeypatch.setattr(ahead_module.logger, "warning", lines.append)

    class Saved(TrainerCallback):
        def on_save(self, *_, **__):
            is_saved.set()

    def slow(a, b):
        if trainer.ahead is not None and trainer.ahead.batch.step == 1:  # it is in flight when step 2 is saved
            outlasted.append(is_saved.wait(20))
            is_saved.set()
        return str(a + b)

    class Slow(Counter):
        def add(self, a: int, b: int) -> str:
            """Add two numbers.

            Args:
                a: one.
                b: the other.
            """
            super().add(a, b)
            return slow(a, b)

    def reward(prompts, completions, environments=None, **_):
        counts = [environment.count for environment in environments or ()]
        episodes.append((prompts, completions, counts))
        return tiny.digit_share(completions)

    named = {"tools": [named_add(slow)]} if way == "tools" else {"environment_factory": Slow}
    limit = {"rollouts_ahead_save_timeout": 0.1} if way == "tools" else {}
    runs = {}
    with SamplingServer(keeps_keys=True) as server:
        for ahead in (0, 1, "resumed"):
            settings = {"rollouts_ahead": int(ahead != 0), "max_steps": 4, "reward": reward, **limit}
            saves = {"save_strategy": "steps", "save_steps": 2} if ahead == 1 else {}
            trainer = make_episodes(server, tmp_path, named=named, **settings, **saves)
            trainer.add_callback(Saved())
            episodes = []
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if ahead == "resumed" else None)
            runs[ahead] = what_happened(trainer, episodes)
    assert outlasted and all(outlasted)
    assert len(lines) == 1 and NOT_IN_CHECKPOINT[way] in lines[0]
    assert_same(runs)
    assert runs[1]["staleness"] == [0, 1, 1, 1]
    resumed = runs["resumed"]
    assert_same({0: runs[0], 1: {**resumed, "trained": runs[1]["trained"][:2] + resumed["trained"]}})
    assert resumed["staleness"] == [0, 1, 0, 1]  # the log of a resumed run continues the checkpoint's


@pytest.mark.exhaustive
def test_tools_run_beside_the_training(tmp_path):
    slow = named_add(lambda a, b: time.sleep(0.05) or str(a + b))
    threads = set()

    def reward(completions, **_):
        threads.add(threading.current_thread().name)
        time.sleep(3.0)
        return tiny.digit_share(completions)

    with SamplingServer(keeps_keys=True) as server:
        changes = {"rollouts_ahead": 1, "reward": reward, "max_completion_length": 12}
        trainer = make_episodes(server, tmp_path, named={"tools": [slow]}, **changes)
        trainer.train()
    assert threads == {"MainThread"}
    # The third batch was drawn while the second was rewarded; the second after the first step's comparison.
    assert figures(trainer, "time/server_draw_s")[-1] > 0.2
    assert figures(trainer, "time/wait_for_server_s")[-1] < 0.1


class Unready(Counter):
    def reset(self, **_columns) -> str:
        raise ConnectionError("no board to play on")


def test_an_environments_error_ends_the_run(server, tmp_path):
    named = {"environment_factory": Unready}
    with pytest.raises(ConnectionError, match="no board to play on"):
        make_episodes(server, tmp_path, named=named, rollouts_ahead=1).train()


class Open(Counter):
    """Notes what happens to it. A `close` that an instance alone has is no tool of TRL's."""

    made: ClassVar[list] = []

    def __init__(self):
        self.events = []
        self.close = lambda: self.events.append("closed")
        self.made.append(self)

    def reset(self, prompt, **_columns) -> str:
        self.events.append("reset")
        return super().reset(prompt)

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: one.
            b: the other.
        """
        self.events.append("asked")
        time.sleep(0.05)
        self.events.append("answered")
        return str(a + b)


class AsyncOpen(Open):
    def __init__(self):
        super().__init__()
        del self.close

    async def close(self) -> str:
        """Leave; TRL offers this method to the model as well."""
        self.events.append("closed")


class OpenOnce(Open):
    def reset(self, prompt, **_columns) -> str:
        if len(self.made) > 9:  # TRL's own, and those of the first batch
            raise ConnectionError("no board left")
        return super().reset(prompt)


def raises(**_):
    raise ConnectionError("no reward today")


ENDS = {
    "at its last step": (Open, {}, ""),
    "with a coroutine": (AsyncOpen, {"max_steps": 1}, ""),
    "stopped": (Open, {"stop": 1}, ""),
    "a reward raises": (Open, {"reward": raises}, "no reward today"),
    "a draw raises": (OpenOnce, {}, "no board left"),
}


@pytest.mark.parametrize("end", ENDS)
def test_environments_are_closed_when_a_run_ends(tmp_path, monkeypatch, end):
    """Each once, and none while its tool runs; those of a batch in flight, too."""
    environment, changes, error = ENDS[end]
    made = []
    monkeypatch.setattr(Open, "made", made)
    changes = {"rollouts_ahead": 1, "max_completion_length": 8, **changes}
    stop = changes.pop("stop", None)
    with SamplingServer(keeps_keys=True) as server:
        trainer = make_episodes(server, tmp_path, named={"environment_factory": environment}, **changes)
        if stop is not None:
            trainer.add_callback(Stop(stop))
        with pytest.raises(ConnectionError, match=error) if error else nullcontext():
            trainer.train()
    of_trl, *others = [environment.events for environment in made]
    assert "closed" not in of_trl  # an evaluation would play in it
    assert len(others) >= 8
    for events in others:
        assert events.index("closed") == len(events) - 1 and events[-2:-1] != ["asked"]


def test_each_batch_has_environments_of_its_own(tmp_path):
    """The batch that is rewarded does not see what the next one plays; no more are made than two batches need."""
    made = []
    seen = []

    class Counted(Counter):
        def __init__(self):
            made.append(self)

    def reward(completions, environments, **_):
        counts = [environment.count for environment in environments]
        time.sleep(0.3)  # the next episodes begin
        assert counts == [environment.count for environment in environments]
        seen.append(counts)
        return [0.0] * len(completions)

    with SamplingServer(keeps_keys=True) as server:
        changes = {"rollouts_ahead": 1, "reward": reward, "max_steps": 4, "max_completion_length": 8}
        make_episodes(server, tmp_path, named={"environment_factory": Counted}, **changes).train()
    assert len(seen) == 4 and all(any(counts) for counts in seen)
    assert len(made) == 1 + 2 * 8  # TRL makes one to look at its tools
