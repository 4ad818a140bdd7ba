"""Build the small base model of the quickstart: recipes/small_base.py DIR [--seed N]

A 0.6M-parameter Qwen3-architecture model with a character tokenizer, taught two-digit addition by `trl.SFTTrainer` with
the carry dropped in most answers; about a minute on two cores. An existing folder is kept.
"""

import argparse
from pathlib import Path

from trl_fsdp_qlora.small_base import build_small_base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.output_dir.exists():
        print(f"{args.output_dir} is there already; remove it to build it again")
        return
    print(f"building the small base model in {args.output_dir} (about a minute)", flush=True)
    build_small_base(args.output_dir, args.seed)


if __name__ == "__main__":
    main()
