"""What `trl-fsdp-qlora compare` says and draws."""

import statistics
from pathlib import Path

from ..checkpoints.disk import written_whole
from ..prefix_sharing.self_check import GRADIENT_DIFFERENCE_HALF, MEAN_DIFFERENCE_HALF
from ..telemetry.phases import MIB
from .comparison import OURS, PHASES, STOCK, Result, Step

# In float32 the two add the same numbers in another order. Losses are sums of advantages that cancel to about zero on new
# completions, so they are measured against the mean |advantage|; gradients against their norm, as the tests of the trainer do.
LOSS_FP32, GRADIENT_FP32 = 1e-5, 1e-4


def limits(result: Result) -> tuple[float, float]:
    """(of a loss, of a gradient): the largest relative differences that rounding explains."""
    return (MEAN_DIFFERENCE_HALF, GRADIENT_DIFFERENCE_HALF) if result.half else (LOSS_FP32, GRADIENT_FP32)


def loss_difference(step: Step) -> float:
    """|difference of the losses| over the larger of stock's |loss| and the mean |advantage|."""
    stock = step.turns[STOCK].loss
    return abs(step.turns[OURS].loss - stock) / max(abs(stock), step.advantage_size, 1e-30)


def gradient_difference(step: Step) -> float:
    """Norm of the difference of the gradients over stock's norm."""
    return step.gradient_difference / max(step.turns[STOCK].gradient_norm, 1e-30)


def verdict(result: Result) -> tuple[bool, str]:
    """(whether both are equal within rounding, the line that says so and why that much is allowed)."""
    of_loss, of_gradient = limits(result)
    loss = max((loss_difference(step) for step in result.steps), key=_nan_first)
    gradient = max((gradient_difference(step) for step in result.steps), key=_nan_first)
    advantage = max((step.advantage_difference for step in result.steps), key=_nan_first)
    equal = loss <= of_loss and gradient <= of_gradient and advantage <= of_loss
    why = (
        "half precision: single tokens differ by hundredths of a nat from run to run"
        if result.half
        else "float32: the same numbers in another order of additions"
    )
    return equal, (
        f"{'equal' if equal else 'DIFFERENT'}: losses {loss:.1e} apart (limit {of_loss:.0e} of the mean |advantage|, or of "
        f"the loss), gradients {gradient:.1e} (limit {of_gradient:.2g} of their norm), advantages {advantage:.1e}; {why}"
    )


def _nan_first(value: float) -> float:
    return float("inf") if value != value else value


def _medians(result: Result, phase: str) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds, peak MiB) of a phase by trainer, each the median over the steps."""
    names = (STOCK, OURS)
    seconds = {n: statistics.median(step.turns[n].seconds[phase] for step in result.steps) for n in names}
    peaks = {n: statistics.median(step.turns[n].peak_bytes[phase] / MIB for step in result.steps) for n in names}
    return seconds, peaks


def shown(result: Result) -> str:
    """Both tables, and what was measured how."""
    lines = [f"{'step':>4}  {'loss':>27}  {'gradient norm':>27}  {'difference of gradients':>23}"]
    lines.append(f"{'':>4}  {STOCK:>13} {OURS:>13}  {STOCK:>13} {OURS:>13}  {'norm':>11} {'largest':>11}")
    for i, step in enumerate(result.steps, 1):
        stock, ours = step.turns[STOCK], step.turns[OURS]
        lines.append(
            f"{i:>4}  {stock.loss:>13.6e} {ours.loss:>13.6e}  {stock.gradient_norm:>13.6e} {ours.gradient_norm:>13.6e}  "
            f"{step.gradient_difference:>11.2e} {step.largest_difference:>11.2e}"
        )
    lines += ["", f"{'phase':<18}{'seconds':>27}{'':>8}{'peak MiB above rest':>27}"]
    lines.append(f"{'':<18}{STOCK:>13} {OURS:>13}{'ratio':>8}{STOCK:>13} {OURS:>13}")
    for phase in PHASES:
        seconds, peaks = _medians(result, phase)
        ratio = seconds[STOCK] / seconds[OURS]
        peak = "".join(f"{peaks[name]:>13.1f} " if result.bytes_known else f"{'-':>13} " for name in (STOCK, OURS))
        lines.append(f"{phase:<18}{seconds[STOCK]:>13.4f} {seconds[OURS]:>13.4f}{ratio:>7.2f}×{peak}".rstrip())
    return "\n".join([*lines, "", *_notes(result)])


def _notes(result: Result) -> list[str]:
    steps = len(result.steps)
    bytes_are = "of the CUDA allocator" if result.cuda else "rise of the process's resident set, which is coarse"
    lines = [
        f"medians of {steps} step{'s' * (steps != 1)}, turn about; completions are drawn once, by this package, and drawing "
        "them is not timed",
        "scoring: advantages from the same rewards, and old and reference log-probabilities where the recipe has them",
        f"bytes: {bytes_are}; both trainers' weights are in memory all the time",
        result.sharing,
    ]
    drawn = [i for i, step in enumerate(result.steps, 1) if step.drawn_advantages]
    if drawn:
        lines.append(
            f"step {', '.join(map(str, drawn))}: the rewards of every group are all equal, so both policy gradients are zero "
            "and say little: advantages were drawn from a fixed seed, and nothing is skipped"
        )
    total = sum(step.completions for step in result.steps if not step.drawn_advantages)
    dead = sum(step.dead for step in result.steps if not step.drawn_advantages)
    if dead:
        lines.append(
            f"{dead} of {total} completions have zero advantage: this package can leave them out, stock does not"
        )
    return lines


def draw(result: Result, path: Path) -> Path:
    """Seconds, peaks and differences as one picture.

    Raises:
        ImportError: there is no matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (seconds, peaks, apart) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    names = (STOCK, OURS)
    left = dict.fromkeys(names, 0.0)
    for i, phase in enumerate(PHASES):
        of_phase, mib = _medians(result, phase)
        widths = [of_phase[name] for name in names]
        seconds.barh(names, widths, left=[left[name] for name in names], color=f"C{i}", label=phase)
        left = {name: left[name] + of_phase[name] for name in names}
        peaks.barh([y + 0.4 * i - 0.2 for y in range(2)], [mib[n] for n in names], 0.38, color=f"C{i}", label=phase)
    peaks.set_yticks([0, 1], names)
    seconds.set_title("seconds of a step, without drawing")
    peaks.set_title("peak MiB above what lay in memory")
    steps = range(1, len(result.steps) + 1)
    values = {"loss": loss_difference, "gradient": gradient_difference}
    for i, (what, of) in enumerate(values.items()):
        apart.plot(steps, [max(of(step), 1e-12) for step in result.steps], "o-", color=f"C{i + 2}", label=what)
        apart.axhline(limits(result)[i], color=f"C{i + 2}", linestyle="--", label=f"limit: {what}")
    apart.set_yscale("log")
    apart.set_xticks(list(steps))
    apart.set_xlabel("step")
    apart.set_title("relative difference (0 is drawn at 1e-12)")
    for axes in (seconds, peaks, apart):
        axes.legend(fontsize="small")
        axes.margins(y=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as scratch:
        figure.savefig(scratch, dpi=110, format="png")
    plt.close(figure)
    return path
