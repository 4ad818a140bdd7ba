"""Episodes outside of training, so that accuracy measures what is trained.

Training's own episodes are TRL's (`GRPOTrainer._tool_call_loop`). Accuracy needs greedy episodes on every rank,
without a trainer and without a trace in the trainer's metrics. The loop is therefore written here a second time: a
turn of the model, its calls, their results, the next turn.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import PreTrainedTokenizerBase

from ...compat import trl as compat
from ...compat import trl_rollouts

# Public methods of an environment that are no tools.
_NO_TOOLS = ("reset", "get_reward")


@dataclass
class Agent:
    """The functions that a model can call: `tools`, and the methods of its environment.

    Each episode has an instance of `environment` of its own.
    """

    tools: list[Callable] = field(default_factory=list)
    environment: Callable | None = None
    owns_reward: bool = False  # an episode is right if its environment's reward is at least 1
    template_options: dict[str, Any] = field(default_factory=dict)  # `chat_template_kwargs`

    def arguments(self) -> dict[str, Any]:
        """Arguments for TRL's trainer."""
        return {"tools": self.tools or None, "environment_factory": self.environment}

    def is_right(self, environment: Any) -> bool | None:
        """Whether a finished episode was right by its environment's reward; `None` if the answer decides."""
        if not self.owns_reward:
            return None
        reward = environment.get_reward()
        return (asyncio.run(reward) if inspect.iscoroutine(reward) else reward) >= 1

    def tools_of(self, environment: Any) -> list[Callable]:
        """The tools of an episode in TRL's order: functions, then the public methods of its environment."""
        members = inspect.getmembers(type(environment), inspect.isfunction) if environment is not None else ()
        names = [name for name, _ in members if name not in _NO_TOOLS and not name.startswith("_")]
        return [*self.tools, *(getattr(environment, name) for name in names)]


@dataclass
class Episode:
    """A row's state on the way through its turns; `ids` are its prompt's tokens and everything after them."""

    ids: list[int]
    prompt_length: int
    tools: dict[str, Callable]
    environment: Any = None
    messages: list[dict] = field(default_factory=list)
    drawn: int = 0  # tokens that the model wrote

    @property
    def length(self) -> int:
        return len(self.ids) - self.prompt_length


def begin(agent: Agent, rows: Sequence[dict], tokenizer: PreTrainedTokenizerBase) -> list[Episode]:
    """Start an episode for each row: reset its environment, and render its prompt with its tools."""
    episodes = []
    template = trl_rollouts.training_chat_template(tokenizer)
    for row in rows:
        environment = None
        observation = None
        if agent.environment is not None:
            environment = agent.environment()
            observation = environment.reset(**row)
        prompt = row["prompt"]
        if observation is not None:
            prompt = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]
        tools = agent.tools_of(environment)
        ids = tokenizer.apply_chat_template(
            prompt,
            tools=tools or None,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **agent.template_options,
        )
        by_name = {tool.__name__: tool for tool in tools}
        episodes.append(Episode(ids, len(ids), by_name, environment))
    return episodes


def run_tool(tools: dict[str, Callable], call: dict) -> tuple[str, Any]:
    """Run a call; returns its name and its result. As in TRL's loop an error is a result, which the model reads."""
    function = call.get("function") or {}
    name = function.get("name") or call.get("name", "unknown")
    try:
        if call["type"] != "function":
            return name, {"error": f"Unsupported tool call type: {call['type']}"}
        if name not in tools:
            raise ValueError(f"Tool {name} not found.")
        result = tools[name](**function["arguments"])
        return name, asyncio.run(result) if inspect.iscoroutine(result) else result
    except Exception as error:
        return name, {"error": str(error)}


def run_episodes(
    agent: Agent,
    rows: Sequence[dict],
    tokenizer: PreTrainedTokenizerBase,
    generate: Callable[[list[list[int]], int], list[list[int]]],
    *,
    max_length: int,
    max_tool_turns: int | None = None,
    synced_gpus: bool = False,
) -> list[Episode]:
    """Run one episode for each of `rows`, all of them turn by turn.

    Args:
        tokenizer: a tokenizer whose chat template knows tools.
        generate: maps token ids and the number of the turn to completions.
        max_length: largest number of tokens after the prompt, results of tools included. A result that goes beyond it
            ends the episode unread.
        max_tool_turns: largest number of turns that follow calls; any number if `None`.
        synced_gpus: `generate` is collective. A rank whose episodes are over calls it without rows until all ranks'
            episodes are over.
    """
    tokenizer = trl_rollouts.with_response_schema(tokenizer)
    template = trl_rollouts.training_chat_template(tokenizer)
    episodes = begin(agent, rows, tokenizer)
    live = list(episodes)
    turn = 0
    while _any_rank(bool(live), synced_gpus):
        # A rank whose episodes are over takes part with a prompt whose completion is not read.
        ids = [episode.ids for episode in live] or [episodes[0].ids[: episodes[0].prompt_length]]
        completions = generate(ids, turn)
        going_on = []
        for episode, completion in zip(live, completions, strict=False):
            completion = completion[: max_length - episode.length]
            if not completion:  # the results before this turn took the last tokens
                continue
            tools = list(episode.tools.values())
            message = compat.parse_response(tokenizer, completion, prefix=episode.ids, tools=tools)
            episode.ids = episode.ids + completion
            episode.drawn += len(completion)
            episode.messages.append(message)
            calls = message.get("tool_calls")
            if not calls or (max_tool_turns is not None and turn >= max_tool_turns):
                continue
            results = [run_tool(episode.tools, call) for call in calls]
            answers = [{"role": "tool", "name": name, "content": str(result)} for name, result in results]
            suffix = trl_rollouts.tool_suffix_ids(tokenizer, template, agent.template_options, answers)
            if episode.length + len(suffix) > max_length:
                continue
            episode.ids = episode.ids + suffix
            episode.messages += answers
            going_on.append(episode)
        live = going_on
        turn += 1
    return episodes


def _any_rank(live: bool, synced_gpus: bool) -> bool:
    if not synced_gpus:
        return live
    return bool(reduce(torch.tensor(int(live), device=PartialState().device), reduction="sum"))
