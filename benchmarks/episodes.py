"""Episodes whose turns are rows: tokens, seconds and memory of a step next to a loop over the same rows, padded.

    OMP_NUM_THREADS=1 python benchmarks/episodes.py --output episodes     # ten minutes of a quiet thread
    OMP_NUM_THREADS=1 python benchmarks/episodes.py --steps --levels 0 20 --output episodes_levels
    python benchmarks/episodes.py --tokens                                # tokens of six shapes alone, in seconds

An agent's thinking is gone from the history that the chat template renders at the next turn, so each turn is a row: a
head, the answers and observations of earlier turns, the thinking and the answer of its own turn. The step is
`compute_loss` + backward of `EfficientGRPOTrainer` on the rows. The loop runs the same rows through TRL's fused head,
four at a time, with a backward for each four, so it holds no more than four rows. Seconds are CPU seconds, and runs of
both alternate.

`--levels` measures where depth costs: an attention call more for each level and layer. The same episode of 33 turns,
with observations of so many tokens, is computed as a tree of more and of fewer levels.
"""

import argparse
import json
import os
import random
import statistics
import time
from datetime import date

import numpy as np
import torch
from synthetic import RESULTS, cpu_name, make_model, make_trainer, peak_bytes
from synthetic import SHAPES as SHAPES_OF_MODELS

from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.prefix_sharing import forest
from trl_fsdp_qlora.prefix_sharing.forest import build_forest, sort_by_prefix

# Episodes, turns, tokens of the head, of thinking, answer and observation; episodes that call alike; observations that
# stay in the history (`None`: all).
SHAPES = {
    "tool agent": (8, 8, 1700, 300, 80, 250, 1, None),
    "coding agent": (4, 20, 2500, 300, 100, 400, 1, None),
    "coding agent, long": (4, 40, 2500, 300, 100, 400, 1, None),
    "numerics": (1, 33, 600, 300, 60, 2200, 1, None),
    "numerics, two siblings": (1, 33, 600, 300, 60, 2200, 2, None),
    "last three observations": (4, 20, 2500, 300, 100, 800, 1, 3),
}
# Those that are trained on.
STEPS = {
    "1 × 20": (1, 20, 100, 60, 12, 150, 1, None),
    "1 × 33": (1, 33, 120, 60, 12, 220, 1, None),
    "4 × 8": (4, 8, 340, 60, 16, 50, 1, None),
}


def make_episodes(episodes, turns, head, thinking, answer, observation, siblings, kept, vocabulary=512, seed=3):
    """The rows of each episode, `(token ids, number of sampled tokens at the end)`."""
    draw = random.Random(seed)

    def ids(count):
        return [draw.randrange(3, vocabulary) for _ in range(count)]

    common = ids(head)
    made = []
    for _ in range(episodes):
        rows: list[list] = [[] for _ in range(siblings)]
        history: list[tuple[list[int], list[int]]] = []
        for _ in range(turns):
            said, seen = ids(answer), ids(observation)
            shown = list(common)
            for number, (call, result) in enumerate(history):
                shown += call
                if kept is None or number >= len(history) - kept:
                    shown += result
            for of_sibling in rows:
                of_sibling.append((shown + ids(thinking) + said, thinking + answer))
            history.append((said, seen))
        made += rows
    return made


def tokens(rows) -> dict[str, int]:
    """Tokens of the rows, of the tree that is computed, and of the tree in which no token is there twice."""
    lengths_B = np.array([len(ids) for ids, _ in rows])
    tokens_BL = np.full((len(rows), lengths_B.max()), -1)
    for row, (ids, _) in zip(tokens_BL, rows, strict=True):
        row[: len(ids)] = ids
    _, common = sort_by_prefix(tokens_BL, lengths_B)
    tree = build_forest(tokens_BL, lengths_B)
    return {
        "rows": int(lengths_B.sum()),
        "computed": int(tree.tokens),
        "least": int(lengths_B.sum() - common.sum()),
        "levels": int(tree.levels.max()) + 1,
    }


def batch_of(episodes) -> dict:
    """A micro-batch of GRPO's: an episode's sampled tokens are its completion."""
    completions = [[token for ids, sampled in rows for token in ids[-sampled:]] for rows in episodes]
    prompts = [rows[0][0][: -rows[0][1]] for rows in episodes]
    ids = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, completions)), True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.long) for row in completions], True)
    prompt_ids = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, prompts)), True, 0, "left")
    advantages = torch.linspace(-1, 1, len(episodes)) if len(episodes) > 1 else torch.ones(1)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": (prompt_ids != 0).long(),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
        "rows": [[as_row(*row) for row in rows] for rows in episodes],
    }


def as_row(ids: list[int], sampled: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor(ids), "sampled_mask": torch.arange(len(ids)) >= len(ids) - sampled}


def loop(model, episodes, advantages, items, size=4) -> None:
    """The same gradient by TRL's fused head over the rows, `size` padded rows at a time."""
    rows = [
        (ids, sampled, float(a))
        for of_episode, a in zip(episodes, advantages, strict=True)
        for ids, sampled in of_episode
    ]
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row, _, _ in part], True)
        lengths = torch.tensor([len(row) for row, _, _ in part])[:, None]
        columns = torch.arange(ids.shape[1])
        sampled = torch.tensor([count for _, count, _ in part])[:, None]
        is_sampled = (columns < lengths) & (columns >= lengths - sampled)
        labels = torch.where(is_sampled, ids, -100)
        mask = (columns < lengths).long()
        scores = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
        weights = torch.tensor([a for _, _, a in part])[:, None]
        (-(scores * is_sampled[:, 1:] * weights).sum() / items).backward()


def timed(ways: dict, runs: int) -> dict[str, dict[str, float]]:
    """CPU seconds of each way: the median, the least and the most; runs of the ways alternate."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs):
        for name, run in ways.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return {
        name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
        for name, values in seconds.items()
    }


def measure(name: str, args, model) -> dict:
    """Tokens, seconds, gradients and memory of the step and of the loop."""
    episodes = make_episodes(*STEPS[name], vocabulary=args.vocabulary)
    batch = batch_of(episodes)
    group = len(episodes) if len(episodes) > 1 else 2
    ours, padded = (make_trainer(EfficientGRPOTrainer, model, way, args, group) for way in ("auto", "off"))

    def step():
        ours.model.zero_grad()
        ours.compute_loss(ours.model, batch).backward()

    def run_loop():
        padded.model.zero_grad()
        loop(padded.model, episodes, batch["advantages"], batch["num_items_in_batch"])

    step()  # compares with stock
    run_loop()
    pairs = [(p.grad, q.grad) for p, q in zip(ours.model.parameters(), padded.model.parameters(), strict=True)]
    largest = max(reference.abs().max() for _, reference in pairs)
    apart = max((mine - reference).abs().max() / largest for mine, reference in pairs).item()
    result = {"name": name, **tokens([row for rows in episodes for row in rows]), "gradients_apart": apart}
    result["seconds"] = timed({"loop": run_loop, "ours": step}, args.runs)
    result["times"] = result["seconds"]["loop"]["median"] / result["seconds"]["ours"]["median"]
    result["peak_mib"] = {"loop": peak_bytes(run_loop, "cpu") / 2**20, "ours": peak_bytes(step, "cpu") / 2**20}
    return result


def measure_levels(observation: int, args, model) -> dict:
    """Seconds of a step by the tokens that a level has to save, so by the number of levels."""
    episodes = make_episodes(1, 33, 120, 60, 12, observation, 1, None, vocabulary=args.vocabulary)
    rows = [row for rows in episodes for row in rows]
    batch = batch_of(episodes)
    trainer = make_trainer(EfficientGRPOTrainer, model, "auto", args, 2)

    def step_saving(saved: int):
        def step():
            forest.MIN_SAVED_BY_LEVEL = saved
            trainer.model.zero_grad()
            trainer.compute_loss(trainer.model, batch).backward()

        return step

    of_the_rule = forest.MIN_SAVED_BY_LEVEL
    trees = {}
    ways = {}
    for saved in sorted({of_the_rule, *args.level_saves}):
        forest.MIN_SAVED_BY_LEVEL = saved
        tree = {"level_saves": saved, "is_rule": saved == of_the_rule, **tokens(rows)}
        if tree["levels"] not in [other["levels"] for other in trees.values()]:
            trees[saved] = tree
            ways[saved] = step_saving(saved)
    for step in ways.values():
        step()
    seconds = timed(ways, args.runs)
    forest.MIN_SAVED_BY_LEVEL = of_the_rule
    return {
        "observation": observation,
        "trees": [{**tree, "seconds": seconds[saved]} for saved, tree in trees.items()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", action="store_true", help="count the tokens of six shapes, and train on none")
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--levels", type=int, nargs="*", default=[], help="tokens of an observation")
    parser.add_argument("--level_saves", type=int, nargs="*", default=[100, 200, 400, 800, 1600])
    parser.add_argument("--shape", default="cpu", choices=SHAPES_OF_MODELS)
    parser.add_argument("--output", help="name of a file in benchmarks/results")
    args = parser.parse_args()
    args.device = "cpu"
    hidden, _, layers, *_ = SHAPES_OF_MODELS[args.shape]
    results = {
        "date": str(date.today()),
        "processor": cpu_name(),
        "threads": torch.get_num_threads(),
        "model": f"Qwen3, hidden size {hidden}, {layers} layers, float32",
        "runs": args.runs,
        "load": [os.getloadavg()[0]],
        "tokens": {},
        "steps": [],
        "levels": [],
    }
    for name, shape in SHAPES.items():
        counts = tokens([row for rows in make_episodes(*shape) for row in rows])
        results["tokens"][name] = counts
        print(f"{name:24} {counts}  {counts['computed'] / counts['least'] - 1:.2%} above the least", flush=True)
    if not args.tokens:
        model = make_model(args)
        model.config.max_position_embeddings = 16384
        for name in args.steps:
            results["steps"].append(measure(name, args, model))
            print(json.dumps(results["steps"][-1]), flush=True)
            results["load"].append(os.getloadavg()[0])
        for observation in args.levels:
            results["levels"].append(measure_levels(observation, args, model))
            print(json.dumps(results["levels"][-1]), flush=True)
            results["load"].append(os.getloadavg()[0])
    if args.output:
        (RESULTS / f"{args.output}.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
