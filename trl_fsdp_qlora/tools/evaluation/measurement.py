"""How accuracy is measured: the tools of an episode, what decides that an answer is right, and all settings."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...utils.nonfatal import nonfatal
from ...utils.plain import name_of

# Public methods of an environment that are no tools.
_NO_TOOLS = ("reset", "get_reward")


@dataclass
class Agent:
    """The functions that a model can call: `tools`, and the methods of its environment."""

    tools: list[Callable] = field(default_factory=list)
    environment: Callable | None = None
    owns_reward: bool = False  # an episode is right if its environment's reward is at least 1
    tool_timeout: float | None = None  # seconds after which a call is an error that the model reads
    history: str = "append"  # what the model sees of its earlier turns, see `engines/decode/history.py`

    def arguments(self) -> dict[str, object]:
        """Arguments for TRL's trainer."""
        return {"tools": self.tools or None, "environment_factory": self.environment}

    def is_right(self, environment: object) -> bool | None:
        """Whether a finished episode was right by its environment's reward; `None` if the answer decides."""
        if not self.owns_reward:
            return None
        reward = environment.get_reward()
        if inspect.iscoroutine(reward):
            reward = asyncio.run(reward)
        return reward >= 1

    def tools_of(self, environment: object) -> list[Callable]:
        """The tools of an episode in TRL's order: functions, then the public methods of its environment."""
        tools = list(self.tools)
        if environment is not None:
            members = inspect.getmembers(type(environment), inspect.isfunction)
            names = [name for name, _ in members if name not in _NO_TOOLS and not name.startswith("_")]
            tools += [getattr(environment, name) for name in names]
        return tools


@dataclass
class Judge:
    """A user's own function that decides what is right.

    It gets what a reward gets in TRL: `prompts`, `completions` and the dataset's columns, each as a list. An answer is
    right if its value is at least 1. If the function fails, a warning has the reason, and its completions are wrong.
    """

    function: Callable[..., Sequence[float | None]]

    def verdicts(self, rows: Sequence[dict], completions: Sequence) -> list[bool]:
        """Whether each of `completions` is right, in the order of their `rows`."""
        with nonfatal(f"accuracy_function {name_of(self.function)}"):
            prompts = [row["prompt"] for row in rows]
            columns = {}
            for name in rows[0]:
                if name not in ("prompt", "images"):
                    columns[name] = [row[name] for row in rows]
            values = self.function(prompts=prompts, completions=completions, **columns)
            if inspect.iscoroutine(values):
                values = asyncio.run(values)
            values = list(values)
            if len(values) != len(rows):
                raise ValueError(f"{len(values)} values for {len(rows)} completions; it must return one each")
            return [value is not None and bool(value >= 1) for value in values]
        return [False] * len(rows)


@dataclass(frozen=True)
class Measurement:
    """The settings of [`~trl_fsdp_qlora.tools.evaluation.accuracy.evaluate`].

    Attributes:
        max_new_tokens: length limit of a completion, in tokens. Of an episode it is the length after its prompt,
            results of tools included.
        batch_size: completions per batch, per rank; sampled completions of a problem are batched together.
        samples: k of pass@k; 0 measures greedy decoding only.
        temperature, top_p, seed: for the samples. Penalties of the model's own generation config are left out.
        answer_format: see [`trl_fsdp_qlora.tools.data.answers.extract_answer`].
        template_options: `chat_template_kwargs` of a recipe, with which its prompts are rendered.
        agent: the tools and the environment of an episode, whose last answer is compared with the right one. If an
            environment owns its reward, the reward decides instead.
        max_tool_turns: largest number of an episode's tool turns; any number if `None`.
        judge: decides in place of the answer, and of the environment.
    """

    max_new_tokens: int = 256
    batch_size: int = 32
    samples: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    answer_format: str = "auto"
    template_options: dict[str, object] = field(default_factory=dict)
    agent: Agent | None = None
    max_tool_turns: int | None = None
    judge: Judge | None = None

    @property
    def compares_answers(self) -> bool:
        """Whether the right answers decide, and no function or environment."""
        owns_reward = self.agent is not None and self.agent.owns_reward
        return self.judge is None and not owns_reward
