"""Tools and environments that go wrong: what TRL makes of it, in both trainers alike; nothing hangs and nothing is
lost.
"""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.distributed.launch import launch
from tests.engines.decode.helpers import calling_tokenizer
from tests.engines.decode.test_turns import OURS, STOCK, make_trainer
from tests.tiny import config, digit_share, lora, prompts, tiny_model
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.engines.decode import tools as tools_module
from trl_fsdp_qlora.engines.decode.tools import limited
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing

SAME = ("reward", "completions/mean_length", "num_tokens", "tools/call_frequency", "tools/failure_frequency")
_ARGUMENTS = """

    Args:
        a: one.
        b: the other.
    """


def tool(answer, name="answer"):
    """A tool that takes two numbers and gives `answer()`."""

    def called(a: int, b: int) -> str:
        return answer()

    called.__name__ = name
    called.__doc__ = "Answer." + _ARGUMENTS
    return called


def raises():
    raise ValueError("the tool's own reason")


def picture():
    return [{"type": "image", "image": Image.new("RGB", (8, 8))}, {"type": "text", "text": "here"}]


def naming(name, arguments=None, **message):
    """A tokenizer that reads calls of `name`; with `arguments` in the place of two numbers."""
    tokenizer = calling_tokenizer()
    read = tokenizer.parse_response

    def renamed(ids, prefix, tools=None):
        parsed = read(ids, prefix)
        for call in parsed.get("tool_calls", ()):
            call["function"]["name"] = name
            call["function"]["arguments"] = call["function"]["arguments"] if arguments is None else arguments
        return parsed | (message if "tool_calls" in parsed else {})

    tokenizer.parse_response = renamed
    return tokenizer


def step_of(classes, folder, tokenizer, *tools, **changes):
    trainer = make_trainer(*classes, folder, tools=tools, tokenizer=tokenizer, max_steps=1, **changes)
    trainer.train()
    return next(entry for entry in trainer.state.log_history if "loss" in entry)


@pytest.mark.parametrize(
    ("answer", "name", "arguments", "failures"),
    [
        (raises, "answer", None, 1),
        (lambda: {"a": 1, 2: None}, "answer", None, 0),
        (lambda: None, "answer", None, 0),
        (lambda: b"\xff\x00", "answer", None, 0),
        (lambda: "1", "there_is_no_such_tool", None, 1),
        (lambda: "1", "answer", {"no_such_argument": 1}, 1),
        (lambda: "1", "answer", {}, 1),
        (lambda: "0123456789" * 20_000, "answer", None, 0),
    ],
    ids=["raises", "a dictionary", "None", "bytes", "unknown tool", "unknown argument", "no argument", "200 kB"],
)
def test_a_step_is_that_of_trl(tmp_path, answer, name, arguments, failures):
    steps = []
    for classes in (STOCK, OURS):
        steps.append(step_of(classes, tmp_path / classes[0].__name__, naming(name, arguments), tool(answer)))
    stock, ours = steps
    assert [ours[key] for key in SAME] == pytest.approx([stock[key] for key in SAME])
    assert ours["tools/call_frequency"] > 0 and ours["tools/failure_frequency"] == failures


def test_an_image_for_a_text_model_is_what_trl_makes_of_it(tmp_path):
    """The chat template decides: here an error, the same in both."""
    reasons = []
    for classes in (STOCK, OURS):
        with pytest.raises(Exception) as raised:
            step_of(classes, tmp_path / classes[0].__name__, naming("answer"), tool(picture))
        reasons.append((raised.type, str(raised.value)))
    assert reasons[0] == reasons[1]


def test_a_tool_that_hangs_is_an_error_that_the_model_reads(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(tools_module.logger, "warning_once", lines.append)
    before = signal.getsignal(signal.SIGALRM)
    step = step_of(OURS, tmp_path, naming("answer"), tool(lambda: time.sleep(600)), tool_timeout=0.05)
    assert step["tools/failure_frequency"] == 1 and "tool_timeout=0.05" in lines[0]
    assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.parametrize(("seconds", "rings"), [({}, True), ({"tool_timeout": None}, False)], ids=["default", "None"])
def test_the_default_limit_of_a_call_is_300_seconds(tmp_path, seconds, rings):
    seconds_left = []

    def look_at_the_timer():
        seconds_left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        return "1"

    of_pytest = signal.setitimer(signal.ITIMER_REAL, 10_000)
    try:
        step = step_of(OURS, tmp_path, naming("answer"), tool(look_at_the_timer), **seconds)
        seconds_after = signal.getitimer(signal.ITIMER_REAL)[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, *of_pytest)
    assert step["tools/failure_frequency"] == 0
    assert seconds_left and all((each <= 300) == rings for each in seconds_left)
    assert 300 < seconds_after < 10_000  # a timer of other code continues after a call


def test_a_limit_is_of_a_call_that_is_too_long_alone():
    async def sleeps(seconds):
        await asyncio.sleep(seconds)
        return "done"

    async def has_its_own():
        raise TimeoutError("its own")

    def spins():
        while True:
            pass

    assert asyncio.run(limited(sleeps, 30)(0)) == limited(lambda: "done", 30)() == "done"
    with pytest.raises(TimeoutError, match=r"sleeps .*tool_timeout=0\.05"):
        asyncio.run(limited(sleeps, 0.05)(600))
    with pytest.raises(TimeoutError, match=r"^its own$"):
        asyncio.run(limited(has_its_own, 30)())
    with pytest.raises(TimeoutError, match="spins"):
        limited(spins, 0.05)()
    assert limited(spins, None) is spins


class Counter:
    """Counts; `reset` fails if it is set to."""

    def reset(self, **_columns) -> str | None:
        if os.environ.get("FAILS") == os.environ.get("RANK", "0"):
            raise RuntimeError("no board to play on")
        self.count = 0

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: one.
            b: the other.
        """
        self.count += 1
        return str(a + b)


def with_environment(classes, folder, environment=Counter, tokenizer=None, **changes):
    cls, config_cls = classes
    model = tiny_model()
    model.generation_config.eos_token_id = list(range(3, 40))
    settings = {"max_tool_calling_iterations": 3, "max_completion_length": 120, "max_steps": 2} | changes
    settings = {"generation_kwargs": {"do_sample": False}, **settings}
    named = {
        "processing_class": tokenizer or calling_tokenizer(),
        "environment_factory": environment,
        "peft_config": lora(),
    }
    return cls(model, digit_share, config(config_cls, folder, **settings), prompts(), **named)


@pytest.mark.filterwarnings("ignore:.*environment_factory")
def test_environments_equal_trls(tmp_path):
    runs = []
    for classes in (STOCK, OURS):
        trainer = with_environment(classes, tmp_path / classes[0].__name__)
        trainer.train()
        runs.append([entry for entry in trainer.state.log_history if "loss" in entry])
        counts = [environment.count for environment in trainer.environments]
    for mine, theirs in zip(runs[1], runs[0], strict=True):
        assert [mine[key] for key in SAME] == pytest.approx([theirs[key] for key in SAME])
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert mine["generation/prefill_tokens"] < mine["generation/prefill_tokens_stock"]
    assert sum(counts) > 0


class Numbered(Counter):
    """Each reset appends another number to the prompt: the prompts of a group differ in their last tokens."""

    resets = 0

    def reset(self, **columns) -> str:
        super().reset(**columns)
        Numbered.resets += 1
        self.number = Numbered.resets
        return " of the same question" * 3 + f" {self.number:03}"

    def get_reward(self) -> float:
        return float(self.number**2)


def tokens_of_tree(rows: list[list[int]]) -> int:
    """Number of different beginnings of `rows`: the tokens that are left if each beginning is computed once."""
    return len({tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)})


@pytest.mark.filterwarnings("ignore:.*environment_factory")
def test_tools_and_common_beginnings_are_computed_once(tmp_path, monkeypatch):
    """The template shows the tools in front of every prompt; what `reset` appends differs within a group."""
    steps = []
    passes = []
    score = PromptSharing.score

    def seen(self, call):
        ids = call.arguments["input_ids"]
        masks = call.arguments["attention_mask"].bool()
        output = score(self, call)
        read = [row[mask].tolist() for row, mask in zip(ids, masks, strict=True)]
        passes.append((read, self.figures.tokens))
        return output

    monkeypatch.setattr(PromptSharing, "score", seen)
    for classes in (STOCK, OURS):
        Numbered.resets = 0
        tokenizer = calling_tokenizer()
        tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tokenizer.chat_template
        changes = {"environment": Numbered, "tokenizer": tokenizer, "max_steps": 1, "max_completion_length": 30}
        trainer = with_environment(classes, tmp_path / classes[0].__name__, **changes)
        trainer.train()
        steps.append(next(entry for entry in trainer.state.log_history if "loss" in entry))
    stock, ours = steps
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-4, abs=1e-6)
    assert ours["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-4)
    read, computed = passes[-1]
    assert len({tuple(row[:100]) for row in read}) == 1  # the tools alone are longer
    begins = tokenizer.convert_tokens_to_ids("<|assistant|>")
    prompts_read = [row[: row.index(begins) + 1] for row in read]
    assert len({tuple(prompt) for prompt in prompts_read}) == 8
    # The last token of a completion is only ever a target.
    of_completions = sum(len(row) - len(prompt) - 1 for row, prompt in zip(read, prompts_read, strict=True))
    assert computed == tokens_of_tree(prompts_read) + of_completions


@pytest.mark.filterwarnings("ignore:.*environment_factory")
def test_dynamic_sampling_names_agents(tmp_path):
    with pytest.raises(ValueError, match=r"dynamic_sampling .*environment_factory: set"):
        with_environment(OURS, tmp_path / "refused", dynamic_sampling=True)
    with pytest.raises(ValueError, match=r"dynamic_sampling .*tools: set"):
        make_trainer(*OURS, tmp_path / "refused", dynamic_sampling=True)


@pytest.mark.processes
def test_a_reset_that_fails_on_one_rank_ends_the_run(tmp_path):
    """As in TRL: the rank ends with its error, and the launcher ends the other."""
    results = launch(__file__, tmp_path, environment={"FAILS": "1"}, check=False, grace=5)
    codes = [code for code, _ in results]
    assert codes[1] == 1 and codes[0] != 0
    assert "RuntimeError: no board to play on" in results[1][1]
    assert not list(tmp_path.glob("*.json"))


if __name__ == "__main__":
    import sys
    import traceback

    folder = Path(sys.argv[1])
    try:
        trained = with_environment((EfficientGRPOTrainer, EfficientGRPOConfig), folder, per_device_train_batch_size=4)
        trained.train()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(trained.state.log_history))
