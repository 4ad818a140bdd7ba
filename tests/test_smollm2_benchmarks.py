"""What benchmarks/smollm2_methods.py and selection_ceiling.py make of runs and of completions."""

import itertools
import json
import math
import sys

import pytest
import torch
from datasets import Dataset

from tests.benchmark_modules import benchmark
from trl_fsdp_qlora.recipe.small_base import character_tokenizer


def history(count: int, seconds: float, accuracy: dict[int, float]) -> list[dict]:
    same = {"step_time": seconds, "tokens/scored_fraction": 0.25, "learning_rate": 1.0}
    steps = [{"step": i + 1, "reward": i / 100, **same} for i in range(count)]
    for step, share in accuracy.items():
        steps[step - 1] |= {"accuracy": share, "accuracy/n": 300.0}
    return [*steps, {"step": count, "train_runtime": 9.9}]


def write_run(folder, entries, **record):
    folder.mkdir(parents=True)
    before = {"correct": 60, "n": 300}
    (folder / "metrics.json").write_text(json.dumps({"before": before, "history": entries, "seed": 1, **record}))


def test_every_method_is_measured_at_the_seconds_of_the_one_that_a_limit_ended(tmp_path, monkeypatch, capsys):
    """GRPO of 100 steps of 30 s, S-GRPO ended by its limit after 1,510 s, T-SPMO not ended, A*-PO never begun."""
    write_run(tmp_path / "smollm2-svamp-grpo", history(100, 30.0, {25: 0.21, 50: 0.22, 75: 0.23, 100: 0.24}))
    limit = {"after": {"correct": 75, "n": 300}, "stopped_by_seconds": 1500.0, "limited_seconds": 1510.0}
    write_run(tmp_path / "smollm2-svamp-s_grpo", history(10, 151.0, {}), **limit)
    folder = tmp_path / "smollm2-svamp-t_spmo"
    write_run(folder, [])
    (folder / "metrics.json").write_text(json.dumps({"before": {"correct": 60, "n": 300}}))
    for last, accuracy in ((25, {25: 0.5}), (100, {25: 0.5, 100: 0.1})):
        (folder / f"checkpoint-{last}").mkdir()
        state = {"log_history": history(last, 20.0, accuracy)[:-1]}
        (folder / f"checkpoint-{last}" / "trainer_state.json").write_text(json.dumps(state))
    monkeypatch.setattr(sys, "argv", ["smollm2_methods.py", "--runs", str(tmp_path)])
    benchmark("smollm2_methods").main()
    _, _, grpo, s_grpo, t_spmo, a_star_po, whole = capsys.readouterr().out.splitlines()
    assert grpo.startswith("| GRPO | 1,500 | 50 | 25.0% | 20.0% (15.9–24.9) → 22.0% (17.7–27.0) | 0.12 → 0.37 |")
    assert s_grpo.startswith("| S-GRPO | 1,510 | 10 | 25.0% | 20.0% (15.9–24.9) → 25.0% (20.4–30.2) |")
    assert t_spmo.startswith("| T-SPMO | 500 | 25 |") and "50.0%" in t_spmo  # step 100 came too late
    assert a_star_po == "| A*-PO | never run to an end | | | | |"
    assert whole.startswith("| GRPO, as far as it ran | 3,000 | 100 |") and "24.0%" in whole


class Counting(torch.nn.Module):
    """Greedily answers 4, and with every third sample 5, whatever it is asked."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.tokenizer = character_tokenizer()
        self.generation_config = type("Config", (), {"eos_token_id": self.tokenizer.eos_token_id})()

    def generate(self, input_ids, attention_mask, generation_config, synced_gpus):
        assert generation_config.max_new_tokens == 2
        assert not generation_config.do_sample or (generation_config.temperature, generation_config.top_k) == (1.0, 0)
        answers = [5 if generation_config.do_sample and i % 3 == 0 else 4 for i in range(len(input_ids))]
        rows = [[*self.tokenizer(str(answer))["input_ids"], self.tokenizer.eos_token_id] for answer in answers]
        return torch.cat([input_ids, torch.tensor(rows)], 1)


def test_samples_are_counted_for_their_own_problem():
    ceiling = benchmark("selection_ceiling")
    for hits in (0, 1, 3, 5, 6):  # groups of equal rewards, over all ways to draw one
        ways = [len(set(group)) == 1 for group in itertools.combinations([1] * hits + [0] * (6 - hits), 3)]
        assert ceiling.equal_share(6, hits, 3) == pytest.approx(sum(ways) / len(ways))
    prompts = Dataset.from_dict({"prompt": ["2+2=", "2+3=", "9+9="], "answer": ["4", "5", "18"]})
    found = ceiling.measure(Counting(), character_tokenizer(), prompts, "auto", 2, batch=16)
    # One problem at a time, so 6 of its 16 samples are a 5.
    assert found == {"greedy": [1, 0, 0], "hits": [10, 6, 0], "majority": [1, 0, 0], "answers": [2, 2, 2]}
    figures = ceiling.summary(found)
    assert (figures["greedy"][0], figures["pass@1"][0], figures["pass@16"][0]) == pytest.approx((1 / 3, 1 / 3, 2 / 3))
    assert figures["pass@8"][0] == pytest.approx((1 + 1 - math.comb(10, 8) / math.comb(16, 8)) / 3)
    better = {**found, "hits": [12, 8, 1]}
    both = {name: {"validation": one, "training": one} for name, one in (("start", found), ("later", better))}
    lines = ceiling.table(both)
    assert len(lines) == 2 + 4 and lines[2].startswith("| validation | start | 33.3 (6.1–79.2) | 33.3 (")
    first, second = ceiling.paired(both)
    assert first.startswith("later against start, validation: pass@1 +10.4 points (") and "training" in second
