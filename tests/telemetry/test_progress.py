"""Progress of what takes long: a bar on a terminal, lines in a file."""

import sys

from trl_fsdp_qlora.telemetry import progress as module
from trl_fsdp_qlora.telemetry.progress import LINE_SECONDS, ProgressLines, progress


def test_a_log_file_gets_a_line_now_and_then(capsys):
    now = 0.0
    lines = ProgressLines("V*", 1_200, "prompts", initial=200, clock=lambda: now)
    for _ in range(10):
        now += LINE_SECONDS / 2
        lines.update(100)
    # Every second update says something: 200 of the 1,000 that were missing after half a minute; the last is the end.
    assert capsys.readouterr().err.splitlines() == [
        "V*: 400/1,200 prompts, 2:00 left",
        "V*: 600/1,200 prompts, 1:30 left",
        "V*: 800/1,200 prompts, 1:00 left",
        "V*: 1,000/1,200 prompts, 0:30 left",
    ]
    assert lines.n == 1_200


def test_what_is_quick_or_stands_still_says_nothing(capsys):
    now = 0.0
    lines = ProgressLines("accuracy", 100, "problems", clock=lambda: now)
    for _ in range(100):
        now += 0.2
        lines.update()
    now += 10 * LINE_SECONDS
    ProgressLines("accuracy", 100, "problems", clock=lambda: now).update(0)
    assert capsys.readouterr().err == ""


def test_a_bar_is_for_terminals_and_hidden_ones_print_nothing(monkeypatch, capsys):
    assert isinstance(progress("V*", 3, "prompts"), ProgressLines)
    with progress("V*", 3, "prompts", hidden=True) as hidden:
        hidden.update(3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress("V*", 3, "prompts") as bar:
        bar.update(3)
    assert isinstance(bar, module.tqdm) and "V*" in capsys.readouterr().err


def test_accuracy_shows_it(monkeypatch, capsys):
    from trl_fsdp_qlora.rollout.completions import over_ranks

    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
    results = over_ranks(
        5, 2, lambda batch: list(batch), lambda batch, drawn: drawn, description="accuracy before training"
    )
    assert results == [0, 1, 2, 3, 4]
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in said] == [
        "accuracy before training: 2/5 problems",
        "accuracy before training: 4/5 problems",
    ]
    over_ranks(5, 2, lambda batch: list(batch), lambda batch, drawn: drawn)
    assert capsys.readouterr().err == ""
