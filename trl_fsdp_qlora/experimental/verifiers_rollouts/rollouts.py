"""Episodes of an environment of `verifiers` as a `rollout_func`, its tasks as a dataset, its rewards as a reward.

The library plays the episodes: its harnesses call the model, and each call is answered by the trainer that trains
(`engine.py`). The trace of an episode is a graph of messages with the tokens that the model saw and sampled. Each of
its branches is a row of the episode (`trainers/step/rows.py`).
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from ...compat.trl_rollouts import ROWS
from ...errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import GRPOTrainer
    from verifiers.v1 import Env, Episode, Trace

# The field of a prompt's first message that has the position of its task in the taskset.
TASK = "task"
REWARD = "environment_reward"
METRICS = "environment_metrics"


class VerifiersRollouts:
    """What a trainer needs of an environment: `dataset()`, the `rollout_func` (this object), and `environment_reward`.

    Args:
        environment: of `verifiers.v1.load_environment`. All its episodes share one interception server.
        tasks: how many of its tasks are in the dataset; all of them if `None`.

    Raises:
        UserError: the library is not installed, or the taskset has no end and `tasks` is `None`.

    Example:
        ```python
        rollouts = VerifiersRollouts(vf.load_environment(config))
        trainer = EfficientGRPOTrainer(
            model, rollouts.environment_reward, args, rollouts.dataset(), rollout_func=rollouts
        )
        ```
    """

    def __init__(self, environment: "Env", tasks: int | None = None):
        if importlib.util.find_spec("verifiers") is None:
            raise UserError("verifiers_rollouts needs the library verifiers: pip install 'trl-fsdp-qlora[verifiers]'")
        taskset = environment.taskset if tasks is None else environment.taskset.take(tasks)
        if not taskset.bounded:
            raise UserError("verifiers_rollouts: the taskset has no end: set tasks, the number of them in the dataset")
        self.environment = environment
        self.tasks = list(taskset)

    def dataset(self) -> "Dataset":
        """One row for each task: its prompt, as messages, which `rollout_func` gets back."""
        from datasets import Dataset

        return Dataset.from_list([{"prompt": _messages(number, task.data)} for number, task in enumerate(self.tasks)])

    def __call__(self, prompts: list[list[dict]], trainer: "GRPOTrainer") -> dict[str, Any]:
        """Play an episode for each prompt.

        Raises:
            UserError: an episode failed before anything was sampled, or its trace has no token ids.
        """
        from .engine import played

        numbers = [messages[0][TASK] for messages in prompts]
        episodes = played(self.environment, [self.tasks[number] for number in numbers], trainer)
        traces = [trained_trace(episode, number) for number, episode in zip(numbers, episodes, strict=True)]
        return {
            ROWS: [rows_of(trace, number) for number, trace in zip(numbers, traces, strict=True)],
            # TRL gives a completion without a reward no advantage.
            REWARD: [trace.reward if episode.ok else None for trace, episode in zip(traces, episodes, strict=True)],
            METRICS: [_metrics(*pair) for pair in zip(traces, episodes, strict=True)],
        }

    def environment_reward(
        self, environment_reward: list[float | None], environment_metrics: list[dict], log_metric: Any, **columns: Any
    ) -> list[float | None]:
        """A reward function: what the environment computed. Logs the environment's metrics and single rewards."""
        for name in sorted({name for metrics in environment_metrics for name in metrics}):
            values = [metrics[name] for metrics in environment_metrics if name in metrics]
            log_metric(f"environment/{name}", sum(values) / len(values))
        return environment_reward


def _messages(number: int, data: Any) -> list[dict]:
    """The messages that a task begins with; a task without a prompt waits for its user."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str | None):
        messages = [{"role": "user", "content": data.prompt or ""}]
    else:
        messages = [message.model_dump(include={"role", "content"}) for message in data.prompt]
    messages = system + messages
    if not all(isinstance(message["content"], str) for message in messages):
        raise UserError(f"verifiers_rollouts: the prompt of task {number} has images, which its rows cannot have yet")
    return [{**message, TASK: number} for message in messages]


def trained_trace(episode: "Episode", number: int) -> "Trace":
    """The trace of the one agent of an episode that is trained.

    Raises:
        UserError: none or several are, or the episode failed before anything was sampled.
    """
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
    if errors and not any(trace.num_turns for trace in traces):
        message = " ".join(errors[0].message.split())
        raise UserError(
            f"verifiers_rollouts: the episode of task {number} failed before anything was sampled: "
            f"{errors[0].type}: {message}; retries of the environment's config play it again"
        )
    if len(traces) != 1:
        names = ", ".join(trace.agent.name for trace in traces) or "none"
        raise UserError(
            f"verifiers_rollouts: the episode of task {number} has {len(traces)} trained agents ({names}), and GRPO's "
            "groups have one reward for each episode: leave one trainable in the environment's setup"
        )
    return traces[0]


def rows_of(trace: "Trace", number: int) -> list[dict[str, Any]]:
    """The rows of an episode, one for each branch of its trace; a turn that branches share is sampled in the first.

    Raises:
        UserError: the trace has no token ids.
    """
    branches = [branch for branch in trace.branches if branch.trainable]
    if not any(branch.token_ids for branch in branches):
        raise UserError(
            f"verifiers_rollouts: the trace of task {number} has no token ids: agent {trace.agent.name!r} has a "
            "client of its own in its config, so the trainer did not draw its turns"
        )
    rows = []
    earlier: set[int] = set()  # nodes of the branches before
    has_logprobs = any(node.logprobs for branch in branches for node in branch.nodes)
    for branch in branches:
        sampled_mask: list[int] = []
        logprobs: list[float] = []
        for node in branch.nodes:
            if id(node) in earlier:
                sampled_mask += [0] * len(node.mask)
            else:
                sampled_mask += [int(is_sampled) for is_sampled in node.mask]
                logprobs += node.logprobs
        earlier.update(id(node) for node in branch.nodes)
        row = {"input_ids": branch.token_ids, "sampled_mask": sampled_mask}
        rows.append({**row, "logprobs": logprobs if has_logprobs else None})
    return rows


def _metrics(trace: "Trace", episode: "Episode") -> dict[str, float]:
    rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {"turns": float(trace.num_turns), "failed": float(not episode.ok), **rewards, **metrics}
