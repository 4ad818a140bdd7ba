"""Supervised fine-tuning on worked answers, to give reinforcement something to select from.

    trl-fsdp-qlora sft --config SmolLM2-135M-Instruct/sft/svamp

TRL's `SFTTrainer` on SVAMP's equations or GSM8K's rationales, in the prompts of recipes/grpo.py, which takes the
folder that this leaves as `model_name_or_path`. Every field of `SFTScriptArguments`, `trl.SFTConfig` and
`trl.ModelConfig` can be in the YAML file and be overridden on the command line;
`trl-fsdp-qlora evaluate --model_name_or_path FOLDER` measures what came of it.
"""

from trl_fsdp_qlora.tools.run.one_line import importing

with importing():
    from dataclasses import dataclass

    from datasets import Dataset
    from trl import ModelConfig, SFTConfig, SFTTrainer

    from trl_fsdp_qlora.tools.data.worked import worked
    from trl_fsdp_qlora.tools.recipe.arguments import ConfigError, ScriptArguments, option, parse_recipe
    from trl_fsdp_qlora.tools.recipe.checks import check_recipe
    from trl_fsdp_qlora.tools.recipe.problems import load_problems, prompts_of, to_measure
    from trl_fsdp_qlora.tools.recipe.record import check_output_dir
    from trl_fsdp_qlora.tools.recipe.runner import model_arguments, run_recipe
    from trl_fsdp_qlora.tools.recipe.script import run_main, say


@dataclass
class SFTScriptArguments(ScriptArguments):
    """[`trl_fsdp_qlora.tools.recipe.arguments.ScriptArguments`], how much is taught, and how long answers are."""

    sft_problems: int | None = option(None, "Teach this many problems; all by default.")
    max_completion_length: int = option(256, "Length limit of a completion, for `evaluate`.")


def main() -> None:
    script, config, model = parse_recipe((SFTScriptArguments, SFTConfig, ModelConfig))
    recipe = check_recipe(script, config, model)
    check_output_dir(script, config, model)
    data = load_problems(script)
    test = to_measure(script, data)
    problems = data.train
    with_answers = [(problem, worked(problem["columns"])) for problem in problems]
    taught = [(problem, answer) for problem, answer in with_answers if answer is not None][: script.sft_problems]
    if not taught:
        raise ConfigError(f"{script.dataset!r} holds no worked answers; SVAMP's `Equation` and GSM8K's `answer` do")
    say(f"data: {len(taught)} of {len(problems)} training problems are taught")
    prompts = prompts_of(script, [problem for problem, _ in taught])["prompt"]
    answers = [[{"role": "assistant", "content": answer}] if script.chat else answer for _, answer in taught]
    rows = Dataset.from_dict({"prompt": prompts, "completion": answers})
    trainer = SFTTrainer(model.model_name_or_path, config, train_dataset=rows, **model_arguments(config, model))
    run_recipe(trainer, recipe, test)


if __name__ == "__main__":
    run_main(main)
