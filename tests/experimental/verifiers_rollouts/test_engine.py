"""Episodes that the library `verifiers` plays and the trainer draws; skipped without the library."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.distributed.launch import launch
from tests.engines.decode.test_history import KEEPS, STRIPS
from tests.tiny import config, lora, tool_tokenizer
from tests.trainers.step.test_rows import assert_equals_the_loop, draw
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer
from trl_fsdp_qlora.errors import UserError
from trl_fsdp_qlora.experimental.verifiers_rollouts import VerifiersRollouts
from trl_fsdp_qlora.tools.small_base import new_model

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed: `make test-verifiers`")


def environment():
    """That of `rewriting_agent.py`, if its folder is on the path."""
    taskset = {"id": "rewriting_agent"}
    return vf.load_environment(
        vf.resolve_env_config({"taskset": taskset, "agent": {"runtime": {"type": "subprocess"}}})
    )


@pytest.fixture
def rollouts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield VerifiersRollouts(environment())
    sys.modules.pop("rewriting_agent")


class Scripted:
    """In place of a trainer: writes what it is told, with a log-probability for each token, and notes each turn."""

    eos_token_ids = (2,)
    chat_template_kwargs: dict = {}  # noqa: RUF012 (read alone, as in TRL)
    accelerator = SimpleNamespace(device="cpu")

    def __init__(self, write, template=None):
        self._tokenizer = tool_tokenizer()
        if template is not None:
            self._tokenizer.chat_template = template
        self.eos_token_ids = [self._tokenizer.eos_token_id]
        self.write = write
        self.turns = []

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations):
        texts = [self.write(len(self.turns) + i) for i in range(len(prompt_ids))]
        completions = [self._tokenizer(text)["input_ids"] + self.eos_token_ids for text in texts]
        logprobs = [[-len(self.turns) - i / 100 for i in range(len(ids))] for ids in completions]
        self.turns += zip(prompt_ids, completions, logprobs, strict=True)
        return completions, logprobs


def prompts_of(rollouts, *numbers):
    dataset = rollouts.dataset()
    return [dataset[number]["prompt"] for number in numbers]


def check_that_each_turn_is_sampled_once(rows, turns):
    found = []
    for row in rows:
        sampled = [place for place, is_sampled in enumerate(row["sampled_mask"]) if is_sampled]
        found.append(dict(zip(sampled, row["logprobs"], strict=True)))
    for prompt, completion, logprobs in turns:
        whole = prompt + completion
        places = range(len(prompt), len(whole))
        holding = [
            taken
            for row, taken in zip(rows, found, strict=True)
            if row["input_ids"][: len(whole)] == whole and [taken.get(place) for place in places] == logprobs
        ]
        assert len(holding) == 1
    assert sum(map(len, found)) == sum(len(completion) for _, completion, _ in turns)


@pytest.mark.parametrize("template, count", [(KEEPS, 4), (STRIPS, 5)])
def test_rows_have_what_each_turn_saw_and_sampled(rollouts, template, count):
    interception = rollouts.environment.config.interception
    trainer = Scripted(lambda number: f"<think>t{number}</think>said {number}", template)
    output = rollouts(prompts_of(rollouts, 0), trainer)
    assert rollouts.environment.config.interception is interception  # of the user, who may serve elsewhere
    (rows,) = output["rows"]
    assert len(rows) == count
    *turns, (prompt, completion, logprobs) = trainer.turns
    # The agent asked for two tokens at its last turn.
    check_that_each_turn_is_sampled_once(rows, [*turns, (prompt, completion[:2], logprobs[:2])])
    assert output["environment_metrics"][0]["turns"] == output["environment_metrics"][0]["replies"] == 5


def test_calls_of_tools_are_read_and_their_turn_continues(rollouts):
    call = '<think>\nadd\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    trainer = Scripted([call, "<think>\nso\n</think>\n\nthree"].__getitem__)
    (rows,) = rollouts(prompts_of(rollouts, 2), trainer)["rows"]
    assert len(trainer.turns) == 2
    check_that_each_turn_is_sampled_once(rows, trainer.turns)
    assert len(rows) == 1


def test_an_episode_that_fails_at_once_ends_the_run_in_one_line(rollouts):
    with pytest.raises(UserError, match=r"task 1 failed before anything was sampled: .*no sandbox") as raised:
        rollouts(prompts_of(rollouts, 1), Scripted(str))
    assert "\n" not in str(raised.value)


def test_a_call_that_the_library_gave_up_is_not_answered():
    from trl_fsdp_qlora.experimental.verifiers_rollouts.engine import AgentCall, _draw

    turn = SimpleNamespace(prompt=[vf.UserMessage(content="one")], tools=[])
    late, waiting = AgentCall(0, 1, turn, None), AgentCall(1, 1, turn, None)
    late.response.cancel()
    _draw([late, waiting], 2, Scripted(str))
    assert waiting.response.result().message.content == "1" and late.response.cancelled()


def test_an_error_of_the_trainer_ends_the_episodes(rollouts):
    def fail(number):
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        rollouts(prompts_of(rollouts, 0, 0), Scripted(fail))


def test_a_step_equals_a_plain_loop_over_the_turns(rollouts, tmp_path):
    """Each turn is a row of its own in the reference, as the model drew it."""
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = STRIPS
    dataset = rollouts.dataset().select([0, 0, 0, 0])
    changes = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 6, "max_steps": 1}
    trainer = EfficientGRPOTrainer(
        new_model(tokenizer, 0, hidden=32, layers=2),
        rollouts.environment_reward,
        config(EfficientGRPOConfig, tmp_path, **changes),
        dataset,
        processing_class=tokenizer,
        peft_config=lora(),
        rollout_func=rollouts,
    )
    episodes = [[], [], [], []]
    generate = trainer._generate_single_turn

    def noted(prompt_ids, *args):
        completions, logprobs = generate(prompt_ids, *args)
        for rows, prompt, ids in zip(episodes, prompt_ids, completions, strict=True):
            ids = ids[:2] if len(rows) == 4 else ids
            rows.append({"input_ids": prompt + ids, "sampled_mask": [0] * len(prompt) + [1] * len(ids)})
        return completions, logprobs

    trainer._generate_single_turn = noted
    inputs = draw(trainer)
    assert inputs["advantages"].any()
    assert_equals_the_loop(trainer, episodes, inputs)


@pytest.mark.processes
@pytest.mark.exhaustive
def test_two_ranks_with_episodes_of_uneven_lengths(tmp_path):
    launch("tests/experimental/verifiers_rollouts/rank.py", tmp_path)
