"""A plan as text, and as JSON."""

from .hardware import GIB
from .plan import MemoryPlan
from .rollout import Engine
from .stored import counted_dense


def format_bytes(size: float) -> str:
    """`3.04 GiB`, or MiB if the size is less than a tenth of one GiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def format_plan(plan: MemoryPlan) -> str:
    """The table of phases and components, whether it fits, and what was assumed."""
    lines = [_head(plan), "", *_table(plan), ""]
    lines += _verdict(plan)
    lines += _assumptions(plan)
    return "\n".join(lines)


def _head(plan: MemoryPlan) -> str:
    launch = plan.settings.launch
    devices = plan.hardware.name
    if launch.processes > 1:
        devices = f"{launch.processes} × {devices}"
    if launch.machines > 1:
        devices += f" on {launch.machines} machines"
    base, trained = plan.parameters
    weights = f"{base / 1e9:.2f}e9 weights, {trained / 1e6:.1f}e6 trained"
    room = f"{format_bytes(plan.capacity)} per rank"
    return f"{plan.settings.model.model_name_or_path}: {weights}; {launch.kind} on {devices}, {room}"


def _table(plan: MemoryPlan) -> list[str]:
    """A line for each component, with a column for each phase."""
    unit, unit_name = (2**20, "MiB")
    if plan.peak >= GIB:
        unit, unit_name = (GIB, "GiB")

    def cell(size: int | None) -> str:
        return "" if size is None else f"{size / unit:.2f}"

    phases = plan.phases.values()
    heads = [f"{name} *" if name == plan.limiting else name for name in plan.phases]
    rows = {f"{unit_name} per rank": heads}
    for phase in phases:
        for component in phase:
            rows[component] = [cell(other.get(component)) for other in phases]
    rows["together"] = [cell(plan.total(name)) for name in plan.phases]
    label_width = max(map(len, rows))
    widths = [max(10, len(head)) for head in heads]
    lines = []
    for label, cells in rows.items():
        aligned = map(str.rjust, cells, widths)
        lines.append(f"{label:<{label_width}}  " + "  ".join(aligned))
    return lines


def _verdict(plan: MemoryPlan) -> list[str]:
    fits = "it fits" if plan.fits else "it does not fit"
    if not plan.enough_cards:
        fits += f": a machine has {plan.hardware.cards} cards for {plan.settings.launch.ranks_per_machine} ranks"
    lines = [f"* {plan.limiting} needs most: {format_bytes(plan.peak)} of {format_bytes(plan.capacity)}, {fits}"]
    if plan.engine:
        lines.append(_engine(plan.engine))
    if plan.warning:
        lines.append(f"warning: {plan.warning}")
    return lines


def _engine(engine: Engine) -> str:
    """A line on the share of a vLLM engine."""
    base = f"{format_bytes(engine.base)} of a base of its own" if engine.base else "the base is the trainer's"
    line = f"vLLM: {format_bytes(engine.rest)} of {format_bytes(engine.share)} for its cache and passes, {base}"
    if engine.starts:
        return line
    row = format_bytes(engine.row)
    return f"{line}; it cannot start, because a row's cache is {row}: raise vllm_gpu_memory_utilization"


def _assumptions(plan: MemoryPlan) -> list[str]:
    settings = plan.settings
    answers = "answers" if settings.is_paired else "completions"
    lines = [
        f"assumed: prompts of {settings.prompt_tokens} tokens (--prompt_tokens), {answers} of "
        f"{settings.completion_tokens}"
    ]
    unknown_format = counted_dense(settings.model, plan.config)
    if unknown_format:
        lines.append(f"assumed: a base in {unknown_format} counts dense, so the plan is too high")
    if settings.launch.is_deepspeed:
        lines.append("computed from DeepSpeed's source, and compared with no run: its buffers and gathered weights")
    if plan.hardware.gpu:
        lines.append("assumed, not measured: the CUDA context and the allocator's slack")
    else:
        lines.append("not counted: memory that the C library's heap keeps in addition to tensors")
    return lines


def as_json(plan: MemoryPlan) -> dict[str, object]:
    """The plan as plain values, with bytes as numbers."""
    settings = plan.settings
    base, trained = plan.parameters
    return {
        "model": settings.model.model_name_or_path,
        "parameters": {"base": base, "trained": trained},
        "launch": settings.launch.kind,
        "processes": settings.launch.processes,
        "hardware": plan.hardware.name,
        "prompt_tokens": settings.prompt_tokens,
        "completion_tokens": settings.completion_tokens,
        "phases": plan.phases,
        "limiting": plan.limiting,
        "peak": plan.peak,
        "capacity": plan.capacity,
        "fits": plan.fits,
        "warning": plan.warning,
    }
