"""What the teacher of self-distillation reads besides the prompt: a problem's answer, in a template."""

from collections.abc import Sequence
from dataclasses import dataclass

from datasets import Dataset

from ..data.worked import worked
from .arguments import ConfigError, ScriptArguments, option
from .problems import load_problems, prompts_of
from .script import say


@dataclass
class SDFTScriptArguments(ScriptArguments):
    """[`ScriptArguments`], and what the teacher alone reads."""

    privileged_template: str = option(
        "{question}\n{worked}",
        "What the teacher reads besides the prompt: {question}, {answer}, and {worked}, the worked answer of SVAMP or "
        "GSM8K. SDFTConfig's teacher_prompt_template says where.",
    )


def privileged(problem: dict, template: str) -> str | None:
    """`template` with the values of a problem; `None` if the problem does not have one that it asks for."""
    values = {"question": problem["question"], "answer": problem.get("answer")}
    if "{worked}" in template:
        values["worked"] = worked(problem.get("columns", {}))
    asked_for = {name: value for name, value in values.items() if f"{{{name}}}" in template}
    if any(value is None for value in asked_for.values()):
        return None
    for name, value in asked_for.items():
        template = template.replace(f"{{{name}}}", str(value))
    return template


def privileged_prompts(script: SDFTScriptArguments) -> Dataset:
    """The training problems that the teacher can be told about: `prompt` and `privileged_context`.

    Raises:
        ConfigError: there are none.
    """
    problems = load_problems(script).train
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
