"""Which of a machine's cards draw and which train, with `rollouts_ahead`: an estimate of a step's seconds.

Both sides are closed forms of tokens, weights and the data sheet's rates of a card; nothing is run. With W bytes of
weights, p weights that a token meets, B bytes and F operations a second (shares of the data sheet's), a server that
draws n completions of C tokens at a time takes

    C · max((W + n · cache of a row) / B, 2 p n / F)

and the prompts before; a pass over a token takes 2 p / F forward and as much backward, once more for a trained base,
and once more if activations are checkpointed. Attention counts 4 x heads x width x length for each layer and token.
"""

import math
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from peft import PeftModel
from transformers import PretrainedConfig

from ...prefix_sharing.facts import keeps_keys, layer_types, setting
from ...utils.plain import counted
from . import model, passes
from .cache import cache_bytes, query_heads
from .hardware import Hardware
from .settings import Settings
from .steps import plan_step

BANDWIDTH_SHARE = 0.6  # of the data sheet's bytes a second while a server decodes; assumed
FLOPS_SHARE = 0.4  # of its dense operations a second in passes over many tokens; assumed
SERVED_SHARE = 0.9  # of a card's memory that vLLM takes by default


@dataclass(frozen=True)
class Split:
    """Cards of a machine, and estimated seconds of an optimizer step.

    Attributes:
        drawing, training: cards of each side; all of them twice if the engine is colocated.
        shards: cards that hold one copy of the server's base together.
        draw: seconds in which the completions of a step are drawn; `None` without rates of the card.
        rest: seconds of everything else that is counted; `None` like it.
        values: fields with which this many ranks train on as many completions a step.
    """

    drawing: int
    training: int
    shards: int
    draw: float | None
    rest: float | None
    values: dict[str, Any]

    @property
    def in_turns(self) -> float:
        return self.draw + self.rest

    @property
    def ahead(self) -> float:
        return max(self.draw, self.rest)


@dataclass(frozen=True)
class Splits:
    """The splits of a machine's cards for one run.

    Attributes:
        cards: number of cards.
        completions: of an optimizer step, the same in every split.
        colocated: an engine on each card beside the trainer; `None` if a card does not hold it.
        possible: by the number of training cards; without rates of the card one.
        chosen: that of the plan; `None` if no split is possible.
    """

    cards: int
    completions: int
    colocated: Split | None
    possible: list[Split]
    chosen: Split | None


def server_is_here(url: str | None, host: str | None) -> bool:
    """Whether a vLLM server at this address runs on the trainer's own machine."""
    named = urlsplit(url).hostname if url else host
    return named in ("0.0.0.0", "127.0.0.1", "localhost", "::1")


def draws_ahead_here(settings: Settings) -> bool:
    """Whether a run shares this machine's cards with a server that draws ahead."""
    values = settings.values
    is_ahead = values.get("rollouts_ahead") and values.get("use_vllm") and values.get("vllm_mode") == "server"
    return bool(is_ahead) and server_is_here(values.get("vllm_server_base_url"), values.get("vllm_server_host"))


def find_splits(
    settings: Settings, config: PretrainedConfig, hardware: Hardware, cards: int, training: int | None = None
) -> Splits:
    """The splits of `cards` cards for a run, with as many completions a step as `settings` has on all its ranks.

    The chosen one is the fastest, or that with `training` cards.
    """
    ranks = settings.launch.processes
    completions = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * ranks
    estimate = _Estimate(settings, config, hardware)
    colocated = None
    possible = []
    if hardware.bandwidth is None:
        count = training or max(1, cards // 2)
        while count and _with_ranks(settings, count) is None:
            count -= 1
        if 0 < count < cards:
            possible.append(Split(cards - count, count, 1, None, None, _with_ranks(settings, count)))
    else:
        colocated = estimate.split(cards, cards)
        found = (estimate.split(cards - count, count) for count in range(1, cards))
        possible = [split for split in found if split is not None]
    allowed = [split for split in possible if training in (None, split.training)]
    if hardware.bandwidth is None:
        chosen = allowed[0] if allowed else None
    else:  # of two equally fast ones that whose other side is faster, because rewards and the host are not counted
        chosen = min(allowed, key=lambda split: (split.ahead, split.in_turns), default=None)
    return Splits(cards, completions, colocated, possible, chosen)


def with_split(settings: Settings, split: Split) -> Settings:
    """The settings of the training side of a split."""
    kind = settings.launch.kind
    kind = "single" if kind == "ddp" and split.training == 1 else kind
    launch = replace(settings.launch, processes=split.training, kind=kind)
    return replace(settings, launch=launch, values=settings.values | split.values)


def _with_ranks(settings: Settings, ranks: int) -> dict[str, Any] | None:
    """Fields with which `ranks` ranks have the completions of a step; `None` if they do not go into whole parts."""
    values = {}
    for name in ("gradient_accumulation_steps", "steps_per_generation"):
        count = settings.values.get(name)
        if count is None:
            continue
        whole, over = divmod(count * settings.launch.processes, ranks)
        if over:
            return None
        if whole != count:
            values[name] = whole
    return values


class _Estimate:
    """Seconds of one run on any number of cards."""

    def __init__(self, settings: Settings, config: PretrainedConfig, hardware: Hardware):
        self.settings = settings
        self.config = config
        self.memory = hardware.memory * SERVED_SHARE
        self.bandwidth = (hardware.bandwidth or math.nan) * BANDWIDTH_SHARE
        self.flops = (hardware.flops or math.nan) * FLOPS_SHARE
        skeleton = passes.whole(settings, config)
        self.is_adapter = isinstance(skeleton, PeftModel)
        text = config.get_text_config()
        self.served = model.compute_dtype(settings, config).itemsize
        self.experts, self.others, embeddings = _weights(skeleton, text.tie_word_embeddings)
        self.held = self.served * (self.experts + self.others + embeddings)  # bytes of the server's base
        each = setting(text, "num_experts_per_tok") or 1
        of = setting(text, "num_experts") or setting(text, "num_local_experts") or 1
        self.used = min(1.0, each / of)  # share of the experts that a token meets
        heads, width = query_heads(text)
        self.attention = 4 * heads * width * sum(map(keeps_keys, layer_types(text)))  # per token, and token before

    def token_flops(self, length: float) -> float:
        """Operations of a forward of one token that attends to `length` tokens."""
        return 2 * (self.others + self.used * self.experts) + self.attention * length

    def split(self, drawing: int, training: int) -> Split | None:
        """`None` if the server does not fit, or the step's micro-batches do not go into as many ranks."""
        values = _with_ranks(self.settings, training)
        shards = self._shards(drawing)
        if values is None or shards is None:
            return None
        split = Split(drawing, training, shards, 0.0, 0.0, values)
        settings = with_split(self.settings, split)
        return replace(split, draw=self._draw(settings, drawing, shards), rest=self._rest(settings))

    def _row_bytes(self, completion: int) -> int:
        """Bytes of a row's cache with so many tokens of its completion."""
        values = self.settings.values | {"max_completion_length": completion}
        settings = replace(self.settings, values=values)
        return cache_bytes(settings, self.config)[0] // settings.rollout_rows

    def _shards(self, drawing: int) -> int | None:
        """The fewest cards that hold the server's base and a row; `None` if all of them do not."""
        needed = self.held + self._row_bytes(self.settings.max_completion_length)
        shards = 1
        while shards <= drawing:
            if drawing % shards == 0 and shards * self.memory >= needed:
                return shards
            shards *= 2
        return None

    def _draw(self, settings: Settings, cards: int, shards: int) -> float:
        length = settings.max_completion_length
        rows = math.ceil(settings.rollout_rows * settings.launch.processes * shards / cards)  # of a copy of the base
        at_once = min(rows, int((shards * self.memory - self.held) // self._row_bytes(length)))
        waves = math.ceil(rows / at_once)
        read = self.served * (self.others + self.experts * min(1.0, at_once * self.used))
        read += at_once * self._row_bytes(length // 2)
        middle = settings.prompt_tokens + length / 2
        computed = at_once * self.token_flops(middle)
        seconds = waves * length * max(read / self.bandwidth, computed / self.flops)
        prompts = math.ceil(rows / settings.num_generations) * settings.prompt_tokens
        seconds += prompts * self.token_flops(settings.prompt_tokens / 2) / self.flops
        # A batch serves several steps, or a step takes several batches.
        batches = settings.gradient_accumulation_steps / (settings.rollout_batches * settings.num_iterations)
        return seconds / shards * batches

    def _rest(self, settings: Settings) -> float:
        step = plan_step(settings, passes.why_not_keep(settings, self.config))
        forwards = 2 if self.is_adapter else 3  # forward, gradients of activations and of weights
        forwards += bool(settings.gradient_checkpointing)
        forwards += bool(step.values)  # a micro-batch that is cut is scored first
        reads_old = settings.num_iterations > 1 or settings.rollout_batches > settings.gradient_accumulation_steps
        forwards += (bool(settings.beta) + reads_old) / settings.num_iterations
        middle = settings.prompt_tokens + settings.max_completion_length / 2
        return step.computed * forwards * self.token_flops(middle) / self.flops


def _weights(skeleton: Any, tied: bool) -> tuple[int, int, int]:
    """Weights of the base that are in experts, the others, and those of input embeddings that are no head too."""
    embedding = None if tied else model.causal_model(skeleton).get_input_embeddings().weight
    experts = others = embeddings = 0
    for name, parameter in skeleton.named_parameters():
        if "lora_" in name:
            continue
        count = parameter.numel() * (1 if parameter.is_floating_point() else 2)  # two 4-bit weights in a byte
        if parameter is embedding:
            embeddings += count
        elif ".experts." in name:
            experts += count
        else:
            others += count
    return experts, others, embeddings


def format_splits(splits: Splits, name: str) -> list[str]:
    """Lines of a plan: a table of seconds, what to type, and what was assumed. `name` is the cards'."""
    if splits.cards < 2:
        return [
            "rollouts_ahead: a server needs cards of its own; with one card nothing is gained, see vllm_mode: colocate"
        ]
    if splits.chosen is None:
        return [
            f"rollouts_ahead: no split of {splits.cards} cards: the server's base has to fit the cards that draw, and "
            "the ranks have to divide gradient_accumulation_steps x ranks"
        ]
    chosen = splits.chosen
    lines = []
    if chosen.draw is None:
        lines.append(
            f"rollouts_ahead: {counted(chosen.drawing, 'card')} of {splits.cards} to draw and {chosen.training} to "
            "train are where to start; no seconds, because memory alone does not say how fast a card is: name it "
            "(--hardware 'h100 x2')"
        )
    else:
        lines.append(
            f"rollouts_ahead on {splits.cards} x {name}, {splits.completions} completions a step: seconds of a step, "
            "an estimate"
        )
        lines.append(f"{'cards that draw + train':<25}  {'draw':>7}  {'rest':>7}  {'in turns':>8}  {'ahead':>7}")
        rows = [(f"{s.drawing} + {s.training}{' *' if s == chosen else ''}", s) for s in reversed(splits.possible)]
        if splits.colocated is not None:
            rows.append((f"colocated on all {splits.cards}", splits.colocated))
        for label, split in rows:
            ahead = "-" if split is splits.colocated else f"{split.ahead:.2f}"
            lines.append(f"{label:<25}  {split.draw:>7.2f}  {split.rest:>7.2f}  {split.in_turns:>8.2f}  {ahead:>7}")
    words = [f"--num_processes {chosen.training}", *(f"--{key} {value}" for key, value in chosen.values.items())]
    copies = chosen.drawing // chosen.shards
    served = [f"--tensor-parallel-size {chosen.shards}"] * (chosen.shards > 1)
    served += [f"--data-parallel-size {copies} --api-server-count 1"] * (copies > 1)
    line = f"* the trainer gets {' '.join(words)}"
    line += f", and vllm serve {' '.join(served)}" if served else ""
    lines.append(line)
    if chosen.draw is not None:
        lines.append(
            f"assumed: {BANDWIDTH_SHARE:.0%} of the data sheet's bandwidth and {FLOPS_SHARE:.0%} of its operations a "
            "second; not counted: rewards (they come to the rest), sending the adapter, traffic between ranks, and "
            "the host, which takes some milliseconds of each token step and decides for a small model"
        )
    return lines
