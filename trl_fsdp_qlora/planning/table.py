"""A plan as text."""

from .hardware import GIB
from .plan import Plan, too_long


def amount(bytes_: float) -> str:
    """`3.04 GiB`, or MiB where that is less than a tenth of one."""
    return f"{bytes_ / GIB:.2f} GiB" if bytes_ >= GIB / 10 else f"{bytes_ / 2**20:.1f} MiB"


def show(plan: Plan) -> str:
    """The table of phases and components, what limits, host memory and disk, and what was assumed.

    Args:
        plan: made by [`trl_fsdp_qlora.planning.plan.make_plan`].
    """
    unit, name = (GIB, "GiB") if plan.peak >= GIB else (2**20, "MiB")
    names = list(plan.phases)
    parts = list(dict.fromkeys(part for phase in names for part in plan.phases[phase]))
    width = max(len(part) for part in (*parts, "per rank"))
    heads = [f"{phase}{' *' if phase == plan.limiting else ''}" for phase in names]
    lines = [_head(plan), "", f"{name + ' per rank':<{width}}  " + "  ".join(f"{head:>10}" for head in heads)]
    for part in parts:
        cells = [plan.phases[phase].get(part) for phase in names]
        text = ["" if cell is None else f"{cell / unit:.2f}" for cell in cells]
        lines.append(
            f"{part:<{width}}  " + "  ".join(f"{t:>{max(10, len(h))}}" for t, h in zip(text, heads, strict=True))
        )
    totals = [f"{plan.total(phase) / unit:.2f}" for phase in names]
    lines.append(
        f"{'together':<{width}}  " + "  ".join(f"{t:>{max(10, len(h))}}" for t, h in zip(totals, heads, strict=True))
    )
    return "\n".join([*lines, "", *_below(plan)])


def _head(plan: Plan) -> str:
    settings, launch = plan.settings, plan.settings.launch
    base, trained = plan.parameters
    where = f"{launch.processes} × {plan.hardware.name}" if launch.processes > 1 else plan.hardware.name
    return (
        f"{settings.model.model_name_or_path}: {base / 1e9:.2f}e9 weights, {trained / 1e6:.1f}e6 trained; {launch.kind} on "
        f"{where}, {amount(plan.capacity)} per rank"
    )


def _below(plan: Plan) -> list[str]:
    cards = f": there are {plan.hardware.cards} cards for {plan.settings.launch.processes} ranks"
    verdict = "it fits" if plan.fits else "it does not fit" + ("" if plan.enough_cards else cards)
    lines = [f"* {plan.limiting} needs most: {amount(plan.peak)} of {amount(plan.capacity)}, {verdict}"]
    if (line := too_long(plan.settings, plan.config)) is not None:
        lines.append(f"warning: {line}")
    host = "; ".join(f"{name} {amount(size)}" for name, size in plan.host.items())
    known = plan.hardware.host_memory
    lines.append(
        f"host memory: {amount(sum(plan.host.values()))} ({host})" + (f" of {amount(known)}" if known else "")
    )
    lines.append(f"disk: {amount(plan.disk)} per checkpoint" + (f"; /dev/shm: {amount(plan.shm)}" if plan.shm else ""))
    lines += [f"assumed: {note}" for note in plan.notes]
    return lines
