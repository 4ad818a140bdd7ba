"""What it saves T-SPMO to compute equal beginnings of completions once: `compute_loss` + backward on synthetic tries.

    python benchmarks/t_spmo_tries.py [--threads 1] [--runs 7] [--output t_spmo_cpu]

Qwen3-like, hidden 256 x 4 layers, vocabulary 32k, LoRA, one group of 32 completions of 128 tokens, prompts of 64. Each
completion copies an earlier one up to a random place and goes on with tokens of its own; `branching` is the range that
place is drawn from. "flat" shares the prompt only, "nested" every prefix, "auto" (the default) whichever costs less.
Seconds are CPU seconds of the process (so that other work on the machine does not decide), medians over alternating
runs on the same batches; saved bytes are the distinct storages that autograd keeps, parameters excluded.
"""

import argparse
import json
import statistics
import time

import peft
import torch
import trl
from synthetic import RESULTS, cpu_name, logged, make_batch, make_model, make_trainer, saved_bytes, step

from trl_fsdp_qlora import TSPMOConfig, TSPMOTrainer
from trl_fsdp_qlora.prefix_sharing import sharing
from trl_fsdp_qlora.t_spmo.credit import group_credit

PROMPT, COMPLETION, GROUP = 64, 128, 32
BRANCHING = {"0 to 8": (0, 8), "0 to 32": (0, 32), "0 to 128": (0, 128), "32 to 40": (32, 40), "none": (0, 0)}


class Nesting:
    """`sharing.pack` with another price for a token saved: `None` shares the prompt only, infinity nests always."""

    CHOSEN = object()

    def __init__(self):
        self.pairs_per_token, self.inner = self.CHOSEN, sharing.pack
        sharing.pack = self

    def __call__(self, *args, pairs_per_token, **kwargs):
        given = pairs_per_token if self.pairs_per_token is self.CHOSEN else self.pairs_per_token
        return self.inner(*args, pairs_per_token=given, **kwargs)


def branching_batch(vocabulary: int, where: tuple[int, int], seed: int) -> tuple[dict, float]:
    """One group as `_compute_loss` takes it, and the share of its positions that repeat another completion's prefix."""
    batch = make_batch(vocabulary, PROMPT, COMPLETION, GROUP, "equal", "cpu", seed)
    draw = torch.Generator().manual_seed(seed)
    ids = batch["completion_ids"]
    for row in range(1, GROUP):
        other = int(torch.randint(0, row, (), generator=draw))
        stem = int(torch.randint(where[0], where[1] + 1, (), generator=draw))
        ids[row, :stem] = ids[other, :stem]
    credit = group_credit(ids, batch["completion_mask"], torch.rand(GROUP, generator=draw), GROUP)
    batch["advantages"] = credit.credit_BC
    return batch, (credit.forward - credit.distinct) / max(credit.forward, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--output", help="file stem under benchmarks/results")
    args = parser.parse_args()
    args.device = "cpu"
    torch.set_num_threads(args.threads)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(make_model(args), lora)
    trainer = make_trainer(TSPMOTrainer, model, "auto", args, GROUP, TSPMOConfig)
    nesting = Nesting()
    variants = {"flat": None, "nested": float("inf"), "auto": nesting.CHOSEN}
    rows = []
    print("| branching | repeated positions | flat s | nested | auto | flat MB | nested | auto | nested chosen |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, where in BRANCHING.items():
        seconds, saved, repeated, nested = ({v: [] for v in variants} for _ in range(4))
        for run in range(-1, args.runs):
            batch, share = branching_batch(args.vocabulary, where, seed=run + 1)
            for variant, pairs in variants.items():
                nesting.pairs_per_token = pairs
                start = time.process_time()
                step(trainer, batch, args.device)
                spent = time.process_time() - start
                if run < 0:  # warm up: self-check, allocator
                    continue
                seconds[variant].append(spent)
                logged(trainer)
                saved[variant].append(saved_bytes(trainer, batch))
                nested[variant].append("prefix_sharing/policy/layers_tree" in logged(trainer))
                repeated[variant].append(share)
        found = {
            variant: {"seconds": statistics.median(seconds[variant]), "bytes": statistics.mean(saved[variant])}
            for variant in variants
        }
        row = {"branching": name, "repeated_share": statistics.mean(repeated["flat"]), **found}
        row["nested_chosen"] = statistics.mean(nested["auto"])
        rows.append(row)
        ratios = [[found[v][key] / found["flat"][key] for v in ("nested", "auto")] for key in ("seconds", "bytes")]
        print(
            f"| {name} | {row['repeated_share']:.0%} | {found['flat']['seconds']:.3f} | {ratios[0][0]:.2f} | "
            f"{ratios[0][1]:.2f} | {found['flat']['bytes'] / 1e6:.1f} | {ratios[1][0]:.2f} | {ratios[1][1]:.2f} | "
            f"{row['nested_chosen']:.0%} |",
            flush=True,
        )
    if args.output:
        setting = {"machine": cpu_name(), "torch": torch.__version__, "trl": trl.__version__, **vars(args)}
        (RESULTS / f"{args.output}.json").write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
