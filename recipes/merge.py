"""Merge an adapter into its unquantized base, for servers that take no adapters.

    trl-fsdp-qlora merge --adapter runs/quickstart --output runs/quickstart-merged

The base is loaded in host memory, in the type of its weights or in `--dtype`. An adapter that was trained on a 4-bit
base was trained against that base's rounding: the merged model is close to the trained one, not equal to it. Measure
it with `trl-fsdp-qlora evaluate`.
"""

from trl_fsdp_qlora.tools.run.one_line import importing

with importing():
    import shlex
    from dataclasses import dataclass, field
    from pathlib import Path

    import torch

    from trl_fsdp_qlora.tools.publishing.merge import merge_adapter
    from trl_fsdp_qlora.tools.recipe.arguments import parse_recipe
    from trl_fsdp_qlora.tools.recipe.checks import check_adapter, load_tokenizer
    from trl_fsdp_qlora.tools.recipe.script import run_main, say


@dataclass
class MergeArguments:
    """See [`trl_fsdp_qlora.tools.publishing.merge.merge_adapter`]."""

    adapter: str = field(metadata={"help": "folder or Hub id of the adapter"})
    output: str = field(metadata={"help": "folder to make"})
    base: str | None = field(default=None, metadata={"help": "base model, if the adapter names another one"})
    revision: str | None = field(default=None, metadata={"help": "of the base model"})
    dtype: str = field(
        default="auto",
        metadata={"help": "of the weights; auto: the base's", "choices": ["auto", "bfloat16", "float16", "float32"]},
    )


def main() -> None:
    (args,) = parse_recipe((MergeArguments,))
    trained_on = check_adapter(args.adapter).base_model_name_or_path
    base = args.base or trained_on
    if trained_on and base != trained_on and Path(base).resolve() != Path(trained_on).resolve():
        say(f"warning: {args.adapter} was trained on {trained_on}, and is merged into {base}")
    load_tokenizer(base, args.revision, chat=False, field="base", adapter=args.adapter)
    dtype = "auto" if args.dtype == "auto" else getattr(torch, args.dtype)
    merged = merge_adapter(args.adapter, args.output, base, args.revision, dtype)
    say(f"merged model, tokenizer and card are in {merged}")
    evaluate = shlex.join(["trl-fsdp-qlora", "evaluate", "--model_name_or_path", str(merged), "--dataset"])
    say(f"  measure it: {evaluate} DATA, with the recipe's other settings of the data")


if __name__ == "__main__":
    run_main(main)
