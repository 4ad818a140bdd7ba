"""Completions beside training's own rollouts (accuracy, evaluation, V*) from the engine that draws those."""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from transformers import GenerationConfig

if TYPE_CHECKING:
    from .engine import AdapterEngine

CONCURRENCY = 64  # requests to a server at a time, each for one prompt: as many connections as TRL's client keeps


class EngineModel:
    """Stands where a model stands in [`trl_fsdp_qlora.rollout.completions.generate`]; this rank draws alone.

    Args:
        engine: on a server, or colocated with one device for each engine.
        generation_config: of the model, for its end-of-sequence tokens.
    """

    def __init__(self, engine: "AdapterEngine", generation_config: GenerationConfig):
        self.engine = engine
        self.generation_config = generation_config

    def complete(self, prompt_ids: list[list[int]], config: GenerationConfig, seed: int | None) -> list[list[int]]:
        """One completion for every prompt; row i is drawn with a seed of its own, made of `seed` and i."""
        seeds = [None if seed is None else seed * 1_000_003 + row for row in range(len(prompt_ids))]
        settings = [sampling(config, own) for own in seeds]
        if self.engine.mode == "server":
            client = self.engine.vllm_client

            def ask(ids: list[int], own: dict) -> list[int]:
                drawn = client.generate(prompts=[ids], max_tokens=own["max_tokens"], generation_kwargs=own)
                return drawn["completion_ids"][0]

            with ThreadPoolExecutor(min(CONCURRENCY, len(prompt_ids))) as pool:
                return list(pool.map(ask, prompt_ids, settings))
        from vllm import SamplingParams

        llm, sleeps = self.engine.llm, self.engine.enable_sleep_mode
        if sleeps:
            llm.wake_up(tags=["kv_cache"])
        prompts, params = (
            [{"prompt_token_ids": ids} for ids in prompt_ids],
            [SamplingParams(**own) for own in settings],
        )
        outputs = llm.generate(prompts, sampling_params=params, use_tqdm=False)
        if sleeps:
            llm.sleep()
        return [list(output.outputs[0].token_ids) for output in outputs]


def sampling(config: GenerationConfig, seed: int | None) -> dict:
    """vLLM's sampling parameters for a generation config of transformers.

    Args:
        config: greedy, or sampling with temperature, top_p, top_k, min_p.
        seed: of this row; `None` for none.
    """
    ends = config.eos_token_id
    settings = {
        "max_tokens": config.max_new_tokens,
        "repetition_penalty": 1.0 if config.repetition_penalty is None else config.repetition_penalty,
        "stop_token_ids": list(ends) if isinstance(ends, list | tuple | set) else [ends],
        "temperature": 0.0,
    }
    if config.do_sample:
        chosen = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        settings |= {name: value for name, value in chosen.items() if value is not None}
        settings["seed"] = None if seed is None else seed % 2**63
    return settings
