"""What of a user's own code a recipe's arguments name: tools, the environment, and who decides what is right."""

from typing import Any

from ...compat import trl as compat
from ...compat import trl_rollouts
from ..data.import_path import load_function
from ..evaluation.accuracy import Judge
from ..evaluation.episodes import Agent
from .arguments import ConfigError, ScriptArguments

OWN_REWARD = "environment"  # the name in `rewards` of the environment's own `get_reward`


def agent_of(
    script: ScriptArguments, template_options: dict | None = None, tool_timeout: float | None = None
) -> Agent | None:
    """The tools and the environment that `script` names; `None` if it names none.

    Raises:
        UserError: an import path leads nowhere, the environment has no `reset`, or it has no `get_reward` although
            `rewards` names it.
    """
    if not script.tools and script.environment is None:
        if OWN_REWARD in script.rewards:
            raise ConfigError(f"rewards: {OWN_REWARD} is an environment's get_reward, and no environment is set")
        return None
    environment = None if script.environment is None else load_function(script.environment)
    owns_reward = OWN_REWARD in script.rewards
    if environment is not None and not hasattr(environment, "reset"):
        raise ConfigError(f"environment={script.environment!r} has no method reset(self, **row)")
    if owns_reward and not hasattr(environment, "get_reward"):
        raise ConfigError(
            f"rewards: {OWN_REWARD} needs a method get_reward(self) of environment={script.environment!r}"
        )
    if not script.chat:
        raise ConfigError("tools and environments are shown to the model by its chat template; leave chat: false out")
    tools = [load_function(path) for path in script.tools]
    return Agent(tools, environment, owns_reward, template_options or {}, tool_timeout)


def judge_of(script: ScriptArguments) -> Judge | None:
    """The function that `accuracy_function` names; `None` if it names none, and answers are compared."""
    return None if script.accuracy_function is None else Judge(load_function(script.accuracy_function))


def with_tool_format(tokenizer: Any, script: ScriptArguments) -> Any:
    """`tokenizer` after the function that `tool_format` names has changed it."""
    return tokenizer if script.tool_format is None else load_function(script.tool_format)(tokenizer)


def check_tool_template(tokenizer: Any, name: str) -> None:
    """Refuse a chat template that TRL would refuse, or whose calls TRL could not read, before a weight is loaded."""
    hint = "name a function in tool_format that gives it one, for one examples/agents/calculator.py:json_calls"
    if not compat.supports_tool_calling(tokenizer):
        raise ConfigError(f"the chat template of {name!r} knows no tools; {hint}")
    try:
        trl_rollouts.with_response_schema(tokenizer)
    except ValueError as error:
        raise ConfigError(f"TRL does not know how {name!r} writes its calls; {hint}") from error
