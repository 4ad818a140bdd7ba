"""What the teacher of self-distillation reads in addition to the prompt: a problem's answer, in a template."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from datasets import Dataset

from ..data.datasets import unknown_name
from ..data.worked import worked
from .arguments import ConfigError, ScriptArguments, option
from .problems import prompts_of
from .script import say

NAMES = ("question", "answer", "worked")  # what a template can ask for


@dataclass
class SDFTScriptArguments(ScriptArguments):
    """[`ScriptArguments`], and what the teacher alone reads."""

    privileged_template: str = option(
        "{question}\n{worked}",
        "What the teacher reads after the prompt: {question}, {answer}, and {worked}, the worked answer of SVAMP or "
        "GSM8K. SDFTConfig's teacher_prompt_template sets its place.",
    )


def privileged(problem: dict, template: str) -> str | None:
    """`template` with the values of a problem; `None` if the problem does not have one that it asks for."""
    values = {"question": problem["question"], "answer": problem.get("answer")}
    if "{worked}" in template:
        values["worked"] = worked(problem.get("columns", {}))
    asked_for = re.compile(f"{{({'|'.join(NAMES)})}}")
    if any(values[name] is None for name in asked_for.findall(template)):
        return None
    # At once: a question may have such a name in its own text.
    return asked_for.sub(lambda found: str(values[found[1]]), template)


def privileged_prompts(script: SDFTScriptArguments, problems: Sequence[dict]) -> Dataset:
    """Those of the training `problems` that the teacher can be told about: `prompt` and `privileged_context`.

    Raises:
        ConfigError: there are none, or the template asks for something else.
    """
    other = unknown_name(script.privileged_template, NAMES)
    if other:
        known = ", ".join(f"{{{name}}}" for name in NAMES)
        raise ConfigError(
            f"privileged_template={script.privileged_template!r}: nothing fills in {other}; {known} are known"
        )
    contexts: Sequence[str | None] = [privileged(problem, script.privileged_template) for problem in problems]
    solved = [index for index, context in enumerate(contexts) if context is not None]
    if not solved:
        raise ConfigError(
            f"privileged_template={script.privileged_template!r}: no problem of {script.dataset} has what it asks "
            "for; {question} and {answer} ask for less than {worked}"
        )
    say(
        f"data: the teacher is told about {len(solved):,} of {len(problems):,} training problems from {script.dataset}"
    )
    prompts = prompts_of(script, [problems[index] for index in solved]).select_columns("prompt")
    return prompts.add_column("privileged_context", [contexts[index] for index in solved])
