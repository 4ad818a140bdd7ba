"""Completions of tokenized prompts, by a model or by vLLM, and problems spread over the ranks.

Training's rollouts call [`complete`]. Accuracy and V* come from [`generate`], which is
reproducible.
"""

import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedConfig

from ...compat.trl import rows_of_images
from ...errors import UserError
from ...prefix_sharing.image_keys import fingerprints
from .decoding import Decoding, DecodingWork, distinct_rows, why_stock
from .turns import KeptTurns, why_not_kept

if TYPE_CHECKING:
    from ...compat.trl import Vision
    from ..vllm.engine import AdapterEngine

Drawn = TypeVar("Drawn")
CONCURRENCY = 64  # simultaneous requests to a vLLM server, each for one prompt; TRL's client keeps as many connections


def _compute_device(model: nn.Module) -> torch.device:
    parameter = next(model.parameters())
    # Under CPU offloading a shard is in host memory, but the mesh's device computes.
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def vision_tensors(vision: "Vision", width: int, device: torch.device | None = None) -> "Vision":
    """A processor's fields as tensors; those per token are left-padded to `width`, `num_images` stays a list."""
    tensors = {}
    for name, value in vision.items():
        if name == "num_images":
            tensors[name] = value
            continue
        if name.endswith("token_type_ids"):
            value = [[0] * (width - len(row)) + list(row) for row in value]
        if not isinstance(value, torch.Tensor):
            value = np.asarray(value)
        tensors[name] = torch.as_tensor(value, device=device)
    return tensors


class CompletionOptions(NamedTuple):
    """How completions are drawn, of which a caller names what it needs.

    Attributes:
        ends: a completion is cut after the first of these tokens; by default the config's end-of-sequence tokens.
        synced_gpus: a forward is collective, so a rank that has finished continues with the others. If `None`,
            transformers' rule decides.
        compact: use the decoding loop of [`decoding`] if it is exact.
        vision: a processor's outputs other than token ids, for prompts with images, and `num_images` of each prompt.
        turns: caches that rows keep from one turn of an episode to the next, if the model can continue from them. The
            caller counts the turns.
    """

    ends: list[int] | None = None
    synced_gpus: bool | None = None
    compact: bool = True
    vision: "Vision | None" = None
    turns: KeptTurns | None = None


_DEFAULTS = CompletionOptions()


@torch.no_grad()
def complete(
    model: nn.Module,
    prompt_ids: list[list[int]],
    config: GenerationConfig,
    options: CompletionOptions = _DEFAULTS,
) -> tuple[list[list[int]], DecodingWork | None]:
    """One completion for every prompt, drawn from the global random state, in the model's current mode.

    Args:
        model: causal language model, unwrapped.
        prompt_ids: token ids of R prompts; they are padded on the left here. Equal prompts are prefilled once.
        config: has `pad_token_id`, and a list `eos_token_id` if the options have no `ends`.

    Returns:
        R lists of completion token ids, each cut after its first end-of-sequence token, and the work that was done
        for them; `None` in its place if transformers' own loop generated.
    """
    width = max(len(ids) for ids in prompt_ids)
    device = _compute_device(model)
    pictures = vision_tensors(options.vision or {}, width, device)
    batch = {**_padded(prompt_ids, width, config.pad_token_id, device), **pictures}
    decoding = None
    if options.compact and why_stock(model, config, pictures) is None:
        can_continue = options.turns is not None and why_not_kept(model) is None
        decoding = Decoding(options.synced_gpus, options.turns if can_continue else None)
        batch = _of_distinct_prompts(batch, pictures, decoding, is_chunked=config.prefill_chunk_size is not None)
    batch.pop("num_images", None)
    tokens_RL = model.generate(**batch, generation_config=config, synced_gpus=options.synced_gpus)
    ends = config.eos_token_id if options.ends is None else options.ends
    completions = [_cut(row, ends) for row in tokens_RL[:, width:].tolist()]
    return completions, None if decoding is None else decoding.work


def _padded(prompt_ids: list[list[int]], width: int, pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`generate`'s arguments for prompts, padded on the left to `width` columns."""
    ids_RP = []
    mask_RP = []
    for ids in prompt_ids:
        missing = width - len(ids)
        ids_RP.append([pad] * missing + ids)
        mask_RP.append([0] * missing + [1] * len(ids))
    return {
        "input_ids": torch.tensor(ids_RP, device=device),
        "attention_mask": torch.tensor(mask_RP, device=device),
    }


def _of_distinct_prompts(
    batch: "Vision", pictures: "Vision", decoding: Decoding, is_chunked: bool
) -> dict[str, object]:
    """`generate`'s arguments for one row of each distinct prompt; `decoding` learns which rows belong to it."""
    keys = [batch["input_ids"], batch["attention_mask"]]
    if pictures:
        keys.append(fingerprints(pictures))
    first_U, decoding.prompt_R = distinct_rows(torch.cat(keys, 1))
    distinct = rows_of_images(batch, first_U)
    if pictures:
        distinct = decoding.with_images(distinct, is_chunked)
    return {**distinct, "custom_generate": decoding}


def _cut(tokens: list[int], ends: list[int]) -> list[int]:
    """`tokens` up to the first of `ends`, which is part of them."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


class EngineModel:
    """vLLM in the place of a model in [`generate`]: a server, or an engine of this rank's own.

    `generation_config` and `config` are the model's; only episodes with tools need the second.
    """

    def __init__(
        self, engine: "AdapterEngine", generation_config: GenerationConfig, config: PreTrainedConfig | None = None
    ):
        self.engine = engine
        self.generation_config = generation_config
        self.config = config

    def complete(self, prompt_ids: list[list[int]], config: GenerationConfig, seed: int | None) -> list[list[int]]:
        """One completion for every prompt; row i has a seed of its own, computed from `seed` and i."""
        settings = []
        for row in range(len(prompt_ids)):
            row_seed = None if seed is None else seed * 1_000_003 + row
            settings.append(sampling(config, row_seed))
        if self.engine.mode == "server":
            client = self.engine.vllm_client

            def ask(ids: list[int], row_settings: dict) -> list[int]:
                answer = client.generate(
                    prompts=[ids], max_tokens=row_settings["max_tokens"], generation_kwargs=row_settings
                )
                return answer["completion_ids"][0]

            with ThreadPoolExecutor(min(CONCURRENCY, len(prompt_ids))) as pool:
                return list(pool.map(ask, prompt_ids, settings))
        from vllm import SamplingParams

        llm = self.engine.llm
        sleeps = self.engine.enable_sleep_mode
        if sleeps:
            llm.wake_up()
        prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
        parameters = [SamplingParams(**row_settings) for row_settings in settings]
        outputs = llm.generate(prompts, sampling_params=parameters, use_tqdm=False)
        if sleeps:
            llm.sleep()
        return [list(output.outputs[0].token_ids) for output in outputs]


def sampling(config: GenerationConfig, seed: int | None) -> dict:
    """vLLM's sampling parameters for one row, from a generation config of transformers."""
    ends = config.eos_token_id
    settings = {
        "max_tokens": config.max_new_tokens,
        "stop_token_ids": list(ends) if isinstance(ends, list | tuple | set) else [ends],
        "temperature": 0.0,  # greedy
    }
    names = ["repetition_penalty"]
    if config.do_sample:
        settings["temperature"] = 1.0
        settings["seed"] = None if seed is None else seed % 2**63
        names += ["temperature", "top_p", "top_k", "min_p"]
    for name in names:
        value = vars(config)[name]
        if value is not None:
            settings[name] = value
    return settings


def generate(
    model: nn.Module | EngineModel,
    prompt_ids: list[list[int]],
    config: GenerationConfig,
    seed: int | None = None,
    options: CompletionOptions = _DEFAULTS,
) -> list[list[int]]:
    """One completion for every prompt, as from [`complete`], without dropout and reproducible.

    The result depends on the prompts, the weights and `seed` only; the global random state is not moved.

    Args:
        model: causal language model, unwrapped, or an engine that draws in its place. A model's training mode is
            restored.
        prompt_ids, config: see [`complete`].
        seed: the seed of the sampling; `None` for greedy decoding.
        options: an engine has a cache of its own, and takes none.
    """
    if isinstance(model, EngineModel):
        if options.vision:
            raise UserError("accuracy on prompts with images is not measured through vLLM; set skip_accuracy: true")
        return model.complete(prompt_ids, config, seed)
    device = _compute_device(model)
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if seed is not None:
                torch.manual_seed(seed)
            completions, _ = complete(model, prompt_ids, config, options)
            return completions
    finally:
        model.train(was_training)


def pace() -> dict[str, float]:
    """How often `tqdm` prints: in a log file every half minute, and nothing of work that is over before."""
    return {} if sys.stderr.isatty() else {"mininterval": 30.0, "delay": 30.0}


def over_ranks(
    count: int,
    batch_size: int,
    generate: Callable[[range], Drawn],
    score: Callable[[range, Drawn], Sequence],
    *,
    synced_gpus: bool = False,
    description: str | None = None,
) -> list:
    """Results of problems 0 to `count` - 1, in this order on every rank; each problem is worked on exactly once.

    `count` and `batch_size` fix the batches, and the ranks take them in turn. Each result keeps its index. So nothing
    is padded or counted twice with any number of ranks.

    Args:
        count: problems; the same on every rank.
        batch_size: problems per batch, per rank.
        generate: completions of a batch of problems; may be collective.
        score: one result for every problem of a batch from its completions; runs on one rank alone.
        synced_gpus: `generate` is collective: a rank that has no batch left repeats the first problem, and the result
            is dropped.
        description: label of the progress bar over the main rank's own problems; no bar if `None`.

    Raises:
        RuntimeError: the ranks disagree about the problems.
    """
    state = PartialState()
    batches = []
    for first in range(0, count, batch_size):
        batches.append(range(first, min(first + batch_size, count)))
    mine = batches[state.process_index :: state.num_processes]
    results = []
    hidden = description is None or not state.is_main_process
    count_of_rank = sum(map(len, mine))
    with tqdm(total=count_of_rank, desc=description, unit=" problems", disable=hidden, leave=False, **pace()) as bar:
        for batch in mine:
            results += zip(batch, score(batch, generate(batch)), strict=True)
            bar.update(len(batch))
    if synced_gpus:
        most_batches = math.ceil(len(batches) / state.num_processes)
        for _ in range(most_batches - len(mine)):
            generate(range(1))
    if state.num_processes > 1:
        results = gather_object(results)
    results.sort(key=lambda pair: pair[0])
    if [index for index, _ in results] != list(range(count)):
        raise RuntimeError(f"{len(results)} results for {count} problems: the ranks disagree about the dataset")
    return [result for _, result in results]
