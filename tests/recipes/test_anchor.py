"""`benchmarks/anchor.py`: the table says what a run left, and what was not run."""

import json
import sys
from pathlib import Path

from tests.test_docs import ROOT, script

SIZES = ("0.5B", "1.5B", "3B", "7B")


def test_the_table_says_what_a_run_left_and_what_was_never_run(tmp_path, monkeypatch, capsys):
    anchor = script(ROOT / "benchmarks" / "anchor.py")
    folder = tmp_path / "anchor-qwen2.5-0.5b-instruct"
    folder.mkdir()
    seconds = [90.0, 10.0, 12.0, 20.0]  # the first is not counted
    steps = [
        {"step": i + 1, "step_time": each, "time/generate_s": each / 2, "time/accuracy_s": 99.0, "time/reward_s": 0.0}
        for i, each in enumerate(seconds)
    ]
    after = {"correct": 700, "n": 1319}
    (folder / "metrics.json").write_text(json.dumps({"history": steps, "after": after, "hardware": "1 × some GPU"}))
    monkeypatch.setattr(sys, "argv", ["anchor.py", "--runs", str(tmp_path), "--output", str(tmp_path / "out.json")])
    anchor.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(SIZES)
    assert "53.1% (50.4-55.8, n=1319) after 4 of 116 steps | 12.0 on 1 × some GPU | generate 6.0 |" in lines[2]
    assert all("| never run |" in line for line in lines[3:])
    assert json.loads(Path(tmp_path / "out.json").read_text())["ours"]["0.5B"]["seconds"] == 12.0
