"""Accuracy that reinforcement can select from: 16 completions per problem, before training and during it.

    python benchmarks/selection_ceiling.py --name start --model runs/smollm2-svamp-sft --dataset SVAMP.json
    python benchmarks/selection_ceiling.py --name "step 150" --model runs/smollm2-svamp-sft \
        --adapter runs/smollm2-svamp-grpo/checkpoint-150 --dataset SVAMP.json

Measures 100 validation problems, which nothing trains on, and 100 of the training problems, spread over all of them;
the held-out problems are not looked at. Data, prompt and lengths are the recipe's. Adds its counts to `--output` under
`--name`, with the right completions of every problem, and prints all policies in the file, and each policy against
the first one, problem by problem.

pass@k is the unbiased estimate from 16 samples at temperature 1 (Chen et al., arXiv 2107.03374). "equal groups" is the
share of groups of 8 whose rewards are all equal, which GRPO learns nothing from: over all ways to take 8 of a
problem's 16. Intervals are 95%, over problems: Wilson's for counts, the normal one for means.
"""

import argparse
import json
import math
from dataclasses import fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_fsdp_qlora.checkpoints.disk import write_json
from trl_fsdp_qlora.data.answers import answers_match, extract_answer, parse_gold
from trl_fsdp_qlora.decode.completions import generate
from trl_fsdp_qlora.evaluation.accuracy import encode, generation_configs, majority
from trl_fsdp_qlora.evaluation.stats import pass_at_k, wilson_interval
from trl_fsdp_qlora.publishing.card import hardware, software
from trl_fsdp_qlora.recipe.arguments import ScriptArguments
from trl_fsdp_qlora.recipe.keys import read_yaml
from trl_fsdp_qlora.recipe.problems import load_problems, prompts_of

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "SmolLM2-135M-Instruct" / "grpo" / "config_svamp_from_sft.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "smollm2_svamp_ceiling.json"
SAMPLES, GROUP, PROBLEMS = 16, 8, 100
KS = (1, 2, 4, 8, 16)


def equal_share(samples: int, hits: int, group: int) -> float:
    """The share of all ways to take `group` of `samples` completions, `hits` of them right, that are all right or all
    wrong.
    """
    return (math.comb(hits, group) + math.comb(samples - hits, group)) / math.comb(samples, group)


def mean_interval(values: list[float]) -> tuple[float, float, float]:
    """`(mean, low, high)` over problems, 95%, normal."""
    mean = fmean(values)
    half = 1.959964 * stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def measure(model: Any, tokenizer: Any, prompts: Any, answer_format: str, max_new_tokens: int, batch: int) -> dict:
    """Draw the greedy answer of `model` to every problem of `prompts`, and `SAMPLES` answers at temperature 1.

    Returns:
        Lists over the problems: `greedy` (0 or 1), `hits` (right samples), `majority` (0 or 1), `answers` (different
            ones).
    """
    greedy, sampled = generation_configs(model, tokenizer, max_new_tokens, 1.0, 1.0)
    golds = [parse_gold(answer, row) for row, answer in enumerate(prompts["answer"])]
    scores: dict[str, list[int]] = {"greedy": [], "hits": [], "majority": [], "answers": []}

    def answers(rows: list[list[int]]) -> list[str | None]:
        return [extract_answer(text, answer_format) for text in tokenizer.batch_decode(rows, skip_special_tokens=True)]

    size = max(1, batch // SAMPLES)
    for start in range(0, len(golds), size):
        ids = encode(prompts["prompt"][start : start + size], tokenizer)
        best = answers(generate(model, ids, greedy))
        drawn = answers(generate(model, [row for row in ids for _ in range(SAMPLES)], sampled, seed=start))
        for i, gold in enumerate(golds[start : start + size]):
            of_problem = drawn[i * SAMPLES : (i + 1) * SAMPLES]
            scores["greedy"].append(int(answers_match(best[i], gold)))
            scores["hits"].append(sum(answers_match(answer, gold) for answer in of_problem))
            scores["majority"].append(int(answers_match(majority(of_problem), gold)))
            scores["answers"].append(len(set(of_problem)))
    return scores


def summary(scores: dict[str, list[int]]) -> dict[str, tuple[float, float, float]]:
    """`(value, low, high)` of every figure of the table, as shares."""
    n = len(scores["hits"])
    means = {f"pass@{k}": [pass_at_k(SAMPLES, hits, k) for hits in scores["hits"]] for k in KS}
    means["equal groups"] = [equal_share(SAMPLES, hits, GROUP) for hits in scores["hits"]]
    counts = {"greedy": sum(scores["greedy"]), f"majority@{SAMPLES}": sum(scores["majority"])}
    shares = {name: (count / n, *wilson_interval(count, n)) for name, count in counts.items()}
    return shares | {name: mean_interval(values) for name, values in means.items()}


def table(policies: dict[str, dict]) -> list[str]:
    """Returns a Markdown table: a row for each policy and set of problems, shares in percent."""
    columns = ("greedy", "pass@1", "pass@2", "pass@4", "pass@8", "pass@16", f"majority@{SAMPLES}", "equal groups")
    with_interval = ("greedy", "pass@1", "pass@16")
    lines = [f"| problems | policy | {' | '.join(columns)} |", "|" + "---|" * (2 + len(columns))]
    for split in ("validation", "training"):
        for name, policy in policies.items():
            figures = summary(policy[split])
            cells = []
            for column in columns:
                value, low, high = figures[column]
                interval = f" ({100 * low:.1f}–{100 * high:.1f})" if column in with_interval else ""
                cells.append(f"{100 * value:.1f}{interval}")
            lines.append(f"| {split} | {name} | {' | '.join(cells)} |")
    return lines


def paired(policies: dict[str, dict]) -> list[str]:
    """Every later policy against the first one on the same problems, in points."""
    (first, start), *later = policies.items()
    lines = []
    for name, policy in later:
        for split in ("validation", "training"):
            differences = []
            for k in (1, SAMPLES):
                before = [pass_at_k(SAMPLES, hits, k) for hits in start[split]["hits"]]
                after = [pass_at_k(SAMPLES, hits, k) for hits in policy[split]["hits"]]
                mean, low, high = mean_interval([b - a for a, b in zip(before, after, strict=True)])
                differences.append(f"pass@{k} {100 * mean:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})")
            lines.append(f"{name} against {first}, {split}: {', '.join(differences)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of the policy, in the table")
    parser.add_argument("--model", required=True, help="the base's folder or Hub id")
    parser.add_argument("--adapter")
    parser.add_argument("--dataset", help="in place of the recipe's, e.g. SVAMP.json")
    parser.add_argument("--config", type=Path, default=RECIPE)
    parser.add_argument("--batch", type=int, default=160, help="completions drawn at once")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    recipe = read_yaml(args.config)
    names = {field.name for field in fields(ScriptArguments)}
    script = ScriptArguments(**{name: value for name, value in recipe.items() if name in names})
    script.dataset = args.dataset or script.dataset
    problems = load_problems(script)
    spread = problems.train[:: len(problems.train) // PROBLEMS][:PROBLEMS]
    sets = {"validation": problems.validation[:PROBLEMS], "training": spread}
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.adapter:
        model = PeftModel.from_pretrained(model, args.adapter)
    length = recipe["max_completion_length"]
    scores = {
        split: measure(model, tokenizer, prompts_of(script, chosen), script.answer_format, length, args.batch)
        for split, chosen in sets.items()
    }
    content = json.loads(args.output.read_text(encoding="utf-8")) if args.output.is_file() else {"policies": {}}
    policies = content["policies"]
    figures = {split: summary(lists) for split, lists in scores.items()}
    policies[args.name] = {**scores, "summary": figures, "hardware": hardware(), "software": software()}
    write_json(args.output, content)
    print("\n".join([*table(policies), *paired(policies)]))


if __name__ == "__main__":
    main()
