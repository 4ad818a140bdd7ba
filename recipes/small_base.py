"""Build the small base model: trl-fsdp-qlora small-base DIR [--seed N]

A 0.6M-parameter Qwen3-architecture model with a character tokenizer, taught two-digit addition by `trl.SFTTrainer`
with most of the carries dropped. About a minute on two cores. An existing folder is kept.
"""

from trl_fsdp_qlora.tools.run.one_line import importing

with importing():
    import argparse
    import shlex
    from pathlib import Path

    from trl_fsdp_qlora.tools.recipe.script import run_main
    from trl_fsdp_qlora.tools.run.one_line import OneLineParser
    from trl_fsdp_qlora.tools.small_base import build_small_base


def main() -> None:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not 0 <= args.seed < 2**32:
        parser.error(f"--seed {args.seed} is outside 0 to 2**32 - 1")
    folder = args.output_dir
    model = shlex.quote(str(folder))
    train = f"train it: trl-fsdp-qlora grpo --config small-base/grpo/quickstart --model_name_or_path {model}"
    if folder.exists():
        print(f"{folder} is there already; remove it to build it again\n{train}")
        return
    print(f"building the small base model in {folder} (about a minute)", flush=True)
    try:
        build_small_base(folder, args.seed)
    except OSError as error:
        parser.error(f"{folder} cannot be made: {error.strerror}: {error.filename}")
    print(f"the small base model is in {folder}\n{train}")


if __name__ == "__main__":
    run_main(main)
