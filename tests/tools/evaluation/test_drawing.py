"""Completions to measure: token by token those of TRL's own trainer, and what tools and environments may do wrong.

Covers `tools/evaluation/measurement.py`.
"""

import asyncio
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import parse_response, supports_tool_calling

from tests.engines.decode.test_turns import Counted
from tests.tiny import save_tool_calling_model, tool_tokenizer
from trl_fsdp_qlora.engines.decode import tools as tools_module
from trl_fsdp_qlora.tools.evaluation import drawing
from trl_fsdp_qlora.tools.evaluation.accuracy import evaluate, generation_configs
from trl_fsdp_qlora.tools.evaluation.drawing import Draw, MeasuringTrainer
from trl_fsdp_qlora.tools.evaluation.measurement import Agent, Measurement
from trl_fsdp_qlora.tools.recipe.arguments import ConfigError, ScriptArguments
from trl_fsdp_qlora.tools.recipe.checks import check_tool_template, user_code

CALCULATOR = str(Path(__file__).parents[3] / "examples" / "agents" / "calculator.py")


class Guessing:
    """Right with a guess of the secret number."""

    def reset(self, answer, **row) -> str:
        self.secret = int(answer)
        self.found = False
        return f" Between 0 and {2 * self.secret}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: your guess.
        """
        self.found = self.found or number == self.secret
        return "right" if number == self.secret else "wrong"

    def get_reward(self) -> float:
        return float(self.found)


def rows(*secrets) -> Dataset:
    asked = [[{"role": "user", "content": "Guess." + "!" * i}] for i in range(len(secrets))]
    return Dataset.from_dict({"prompt": asked, "answer": list(map(str, secrets))})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_tool_calling_model(tmp_path_factory.mktemp("caller"), "guess", {"number": 50})


@pytest.fixture
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def test_the_measuring_trainer_has_what_grpo_trainers_setup_has(folder, loaded, tmp_path):
    """A TRL that reads the same by another name fails here, not in a run."""
    args = GRPOConfig(str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    stock = GRPOTrainer(folder, args=args, train_dataset=rows(50), environment_factory=Guessing)
    stock._generate_and_score_completions([row for row in rows(50) for _ in range(args.num_generations)])
    measuring = MeasuringTrainer(loaded[1], Measurement(agent=Agent(environment=Guessing)))
    ours = {"draw_settings", "_tool_timeout", "_history", "_turns", "_outcome"}
    assert vars(measuring).keys() - vars(stock).keys() == ours


# The last one ends in the middle of a call; 106 and 107 tokens are an answer of the tool that ends with the budget,
# and one short of it.
@pytest.mark.parametrize(("length", "turns"), [(400, 2), (400, 0), (150, None), (60, None), (106, None), (107, None)])
def test_an_episode_is_that_of_trls_loop(folder, loaded, tmp_path, length, turns):
    model, tokenizer = loaded
    data = rows(50, 7)
    args = GRPOConfig(
        str(tmp_path),
        max_completion_length=length,
        max_tool_calling_iterations=turns,
        per_device_train_batch_size=4,
        num_generations=2,
        temperature=1e-4,
        bf16=False,
        use_cpu=True,
        report_to="none",
    )
    stock = GRPOTrainer(folder, args=args, train_dataset=data, environment_factory=Guessing)
    batch = stock._generate_and_score_completions([row for row in data for _ in range(2)])
    measurement = Measurement(max_new_tokens=length, max_tool_turns=turns, agent=Agent(environment=Guessing))
    greedy, _ = generation_configs(model, tokenizer, measurement)
    measuring = MeasuringTrainer(tokenizer, measurement)
    prompts = measuring.prompt_ids(data.to_list())
    answers = measuring.draw(data.to_list(), Draw(model, greedy))
    for i, answer in enumerate(answers):
        prompt = batch["prompt_ids"][2 * i][batch["prompt_mask"][2 * i].bool()].tolist()
        completion = batch["completion_ids"][2 * i][batch["completion_mask"][2 * i].bool()].tolist()
        assert prompts[i] == prompt and answer.ids == completion
        assert answer.tokens == batch["tool_mask"][2 * i].sum()
        assert answer.completion == list(stock._logs["completion"])[2 * i]
    if length == 400:
        assert len(answers[0].completion) == (5 if turns else 1)


@pytest.mark.parametrize("turns", [pytest.param(1, marks=pytest.mark.exhaustive), None])
def test_a_measured_turn_continues_from_the_last_one(loaded, monkeypatch, turns):
    """The same result as with every turn prefilled whole, for greedy and for sampled episodes."""
    model, tokenizer = loaded
    data = rows(50, 7, 50, 8, 9)
    results = []
    prefilled = []
    agent = Agent(environment=Guessing, owns_reward=True)
    measurement = Measurement(agent=agent, max_new_tokens=200, samples=2, max_tool_turns=turns)
    for limit in (drawing.FREE_SHARE, 0.0):  # without memory nothing is kept
        monkeypatch.setattr(drawing, "FREE_SHARE", limit)
        counted = Counted(model)
        result = evaluate(model, tokenizer, data, measurement)
        counted.handle.remove()
        results.append(result.as_dict() | {"seconds": 0})
        prefilled.append(counted.tokens)
    assert results[0] == results[1]
    assert prefilled[0] < 0.8 * prefilled[1]


def test_accuracy_by_the_environments_reward_and_by_the_answer(loaded):
    model, tokenizer = loaded
    data = rows(50, 7, 50, 8, 9)
    options = {
        "max_new_tokens": 300,
        "batch_size": 2,
        "max_tool_turns": 1,
        "answer_format": "last_number",
    }
    agent = Agent(environment=Guessing, owns_reward=True)
    by_reward = evaluate(model, tokenizer, data, Measurement(agent=agent, samples=2, **options))
    assert (by_reward.n, by_reward.correct, by_reward.pass_at_k) == (5, 2, 0.4)
    by_answer = evaluate(model, tokenizer, data, Measurement(agent=Agent(environment=Guessing), **options))
    assert by_answer.correct == 0  # it never answers, and calls again and again
    # Of two calls, without what came back.
    assert by_answer.tokens_per_completion == by_reward.tokens_per_completion > 50


def drawn_as(tokenizer, monkeypatch, answers, agent, rows, **settings) -> tuple[list, list]:
    """Episodes in which the model's turn `i` is the text `answers[i]` for every row, and the prompts of each turn."""
    asked = []

    def generate(model, ids, config, seed, options):
        asked.append(ids)
        return [tokenizer(answers[min(len(asked), len(answers)) - 1])["input_ids"] for _ in ids]

    monkeypatch.setattr(drawing, "generate", generate)
    measuring = MeasuringTrainer(tokenizer, Measurement(agent=agent, max_new_tokens=999))
    stub = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=9999))
    return measuring.draw(rows.to_list(), Draw(stub, None, **settings)), asked


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>'


def test_a_rank_that_is_done_generates_until_all_ranks_are(loaded, monkeypatch):
    _, tokenizer = loaded
    ranks_left = [1, 1, 0]  # ranks that continue after each turn
    monkeypatch.setattr(drawing, "reduce", lambda flag, reduction: torch.tensor(ranks_left.pop(0)))
    agent = Agent(environment=Guessing)
    answers, asked = drawn_as(tokenizer, monkeypatch, ["7<|im_end|>"], agent, rows(50, 7), synced_gpus=True)
    assert [len(ids) for ids in asked] == [2, 1, 1] and not ranks_left  # then a prompt whose completion is not used
    assert [answer.completion[0]["content"] for answer in answers] == ["7", "7"]


def test_what_a_call_does_wrong_is_what_the_model_reads(loaded, monkeypatch):
    _, tokenizer = loaded

    async def later(number: int) -> int:
        """Later.

        Args:
            number: any.
        """
        await asyncio.sleep(0)
        return number + 1

    def fails(number: int) -> int:
        """Fail.

        Args:
            number: any.
        """
        raise OverflowError("too large")

    def run(name, arguments) -> str:
        texts = [called(name, arguments), "7<|im_end|>"]
        (answer,), _ = drawn_as(tokenizer, monkeypatch, texts, Agent([later, fails]), rows(7))
        _, result, last = answer.completion
        assert last["content"] == "7" and result["name"] == name
        return result["content"]

    assert run("later", '{"number": 1}') == "2"
    assert "too large" in run("fails", '{"number": 1}')
    assert "Tool neither not found." in run("neither", "{}")
    assert "unexpected keyword" in run("fails", '{"digits": 1}')


@pytest.mark.parametrize(
    "written",
    [
        '{"name": "guess", "arguments": {"number": 7',
        '{"name": "guess", "arguments": ',
        "guess(7)",
        '["guess", 7]',
        "",
        "7",
    ],
    ids=["no bracket", "no arguments", "Python", "a list", "nothing", "a number"],
)
def test_a_call_that_cannot_be_read_is_the_models_last_answer(loaded, monkeypatch, written):
    """As in TRL, whose parser finds no call in it: the episode ends, and no tool runs."""
    _, tokenizer = loaded
    agent = Agent(environment=Guessing)
    text = f"<tool_call>\n{written}\n</tool_call><|im_end|>"
    (answer,), (prompts,) = drawn_as(tokenizer, monkeypatch, [text], agent, rows(7))
    message = parse_response(tokenizer, answer.ids, prefix=prompts[0], tools=[answer.environment.guess])
    assert answer.completion == [message] and not message.get("tool_calls")
    assert not answer.environment.found and answer.tokens == len(answer.ids)


def test_a_tool_that_hangs_in_a_measurement_is_an_error(loaded, monkeypatch):
    lines = []
    monkeypatch.setattr(tools_module.logger, "warning_once", lines.append)

    def spins(number: int) -> int:
        """Spin.

        Args:
            number: any.
        """
        while True:
            pass

    _, tokenizer = loaded
    texts = [called("spins", '{"number": 1}'), "7<|im_end|>"]
    (answer,), _ = drawn_as(tokenizer, monkeypatch, texts, Agent([spins], tool_timeout=0.05), rows(7))
    error = "spins took longer than tool_timeout=0.05 seconds"
    assert error in answer.completion[1]["content"] and error in lines[0]


def test_a_recipe_that_names_no_agent_or_half_of_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("half.py").write_text(
        "class Half:\n    def act(self): ...\n\nclass Whole(Half):\n    def reset(self, **row): ...\n"
    )
    assert user_code(ScriptArguments("d")).agent is None
    for wrong, reason in [
        ({"rewards": ["environment"]}, "environment"),
        ({"environment": "half.py:Half"}, "no method reset"),
        ({"environment": "half.py:Whole", "rewards": ["environment"]}, "get_reward"),
        ({"environment": "half.py:Whole", "chat": False}, "chat: false"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            user_code(ScriptArguments("d", **wrong))
    agent = user_code(ScriptArguments("d", environment="half.py:Whole")).agent
    assert [tool.__name__ for tool in agent.tools_of(agent.environment())] == ["act"]


def test_the_calculators_calls_are_rendered_and_read():
    sys.modules.pop("calculator", None)
    script = ScriptArguments("d", environment=f"{CALCULATOR}:Calculator", tool_format=f"{CALCULATOR}:json_calls")
    plain = tool_tokenizer()
    plain.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="tool_format"):
        check_tool_template(plain, "it")
    tokenizer = user_code(script).tool_format(plain)
    check_tool_template(tokenizer, "it")
    assert supports_tool_calling(tokenizer)
    tool = user_code(script).agent.environment().calculate
    asked = [{"role": "user", "content": "Multiply 3 by 4."}]
    prompt = tokenizer.apply_chat_template(asked, tools=[tool], add_generation_prompt=True, return_dict=False)
    written = tokenizer('{"name": "calculate", "arguments": {"expression": "3 * (4 - 1)"}}<|im_end|>')["input_ids"]
    message = parse_response(tokenizer, written, prefix=prompt, tools=[tool])
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "calculate"
    assert tool(**call["function"]["arguments"]) == "9"
    again = tokenizer.apply_chat_template([*asked, message], tools=[tool], return_dict=False)
    assert again[: len(prompt) + len(written)] == prompt + written
    for harmful in ("2 ** 9999", "__import__('os').getcwd()", "1 / 0", "(" * 99, "9" * 101):
        with pytest.raises((ValueError, ZeroDivisionError, SyntaxError, RecursionError, MemoryError)):
            tool(expression=harmful)
