import pytest

pytest.importorskip("matplotlib")

import matplotlib.pyplot as plt
from matplotlib.collections import PolyCollection

from trl_fsdp_qlora.recipe import plots


def test_phases_are_stacked_and_what_is_measured_beside_a_step_is_none(tmp_path):
    phases = {"time/generate_s": 0.2, "time/forward_backward_s": 0.1, "time/accuracy_s": 9.0, "time/evaluate_s": 9.0}
    history = [{"step": step, "reward": 0.5, "step_time": 0.3, **phases} for step in (10, 20)]
    history += [{"step": 15, "eval_reward": 0.5, "eval_runtime": 1.0}, {"step": 20, "train_runtime": 6.0}]
    figure, axes = plt.subplots()
    plots._stack_phases(axes, history)
    layers = [part for part in axes.get_children() if isinstance(part, PolyCollection)]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["forward backward", "generate"]
    tops = [part.get_paths()[0].vertices[:, 1].max() for part in layers]
    assert tops == pytest.approx([0.2, 0.3])  # the second on top of the first, and nothing above a step
    assert axes.get_ylim()[1] < 0.5
    plt.close(figure)
    picture = plots.draw_run({"history": history}, tmp_path / "training.png")
    assert picture.stat().st_size > 1000
