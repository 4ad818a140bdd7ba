"""`AdapterEngine`: TRL's vLLM engine, colocated or in a server, to which only the adapter is sent.

TRL 1.16 merges the adapter into the base, pushes every weight and unmerges, for each step. Here the engine holds the
untouched base and is given each version of the adapter under a name of its own: no weight of the base moves, a quantized or
sharded base needs no merging, and putting the engine to sleep frees its cache and keeps its weights.
"""

import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from trl.generation.vllm_generation import VLLMGeneration

from ..compat.replaced import replaced
from ..compat.trl import ensure_master_addr_port
from ..compat.vllm import leave_groups_that_are_gone
from .adapter_sync import AdapterVersions, RolloutError, adapter_weights
from .server import AdapterServer


class _Serving:
    """vLLM's `LLM` as `VLLMGeneration.generate` uses it: requests name the adapter, and sleeping keeps the weights.

    TRL asks for sleep level 2, which throws the base away; an adapter could not bring it back.
    """

    def __init__(self, llm):
        self._llm = llm
        self.adapter = None

    def __getattr__(self, name):
        return getattr(self._llm, name)

    def generate(self, prompts, **options):
        return self._llm.generate(prompts, lora_request=self.adapter, **options)

    def load(self, request) -> bool:
        """Answer with the adapter of a `LoRARequest` from now on, and forget the one before; whether vLLM took it."""
        engine = self._llm.llm_engine
        if not engine.add_lora(request):
            return False
        if self.adapter is not None:
            engine.remove_lora(self.adapter.lora_int_id)
        self.adapter = request
        return True

    def sleep(self, level: int = 2) -> None:
        self._llm.sleep(level=0)
        self._llm.release_kv_cache_memory()

    def wake_up(self, tags=None) -> None:
        self._llm.wake_up(tags=["kv_cache"])


class AdapterEngine(VLLMGeneration):
    """[`trl.generation.vllm_generation.VLLMGeneration`] that serves an adapter over an untouched base.

    Args:
        base: folder or Hub id of the weights that the engine loads (colocated): the checkpoint that is trained, or the
            dequantized copy of a 4-bit one.
        peft_config: of the adapter.
        max_lora_rank: from [`trl_fsdp_qlora.rollout.adapter_sync.served_rank`].
        versions: where versions of the adapter are written; used by rank 0.
        engine_kwargs: further arguments of `vllm.LLM`, which take precedence (colocated).
        **options: of `VLLMGeneration`.

    Raises:
        RolloutError: the server cannot take adapters.
    """

    def __init__(
        self,
        *,
        base: str,
        peft_config,
        max_lora_rank: int,
        versions: AdapterVersions,
        engine_kwargs: dict[str, Any] | None = None,
        **options,
    ):
        self.base = base
        self.peft_config = peft_config
        self.max_lora_rank = max_lora_rank
        self.versions = versions
        self.engine_kwargs = engine_kwargs or {}
        self.version = 0
        self.last_sync = {"seconds": 0.0, "bytes": 0}
        super().__init__(**options)

    def _init_vllm(self) -> None:
        if self.mode == "server":
            # Every rank: accuracy and V* are drawn by each for itself.
            url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self.vllm_client = AdapterServer(url, self.server_timeout, self.max_lora_rank)
            self.base = self.vllm_client.folder
        else:
            self._start_colocated()
        self._llm_weights_sleeping = False
        self.accelerator.wait_for_everyone()

    def _start_colocated(self) -> None:
        from vllm import LLM

        ranks, size = self.accelerator, self.tensor_parallel_size
        if size > 1:
            groups = [list(range(i * size, (i + 1) * size)) for i in range(ranks.num_processes // size)]
            self.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(groups)
        os.environ["RANK"] = str(ranks.process_index)
        os.environ["LOCAL_RANK"] = str(ranks.local_process_index)
        os.environ["WORLD_SIZE"] = str(ranks.num_processes)
        ensure_master_addr_port()
        on_cpu = ranks.device.type == "cpu"
        options = {
            "model": self.base,
            # The policy's own dtype where there is no GPU: bfloat16 without AMX is hundreds of times slower.
            "dtype": str(self.model.dtype).removeprefix("torch.") if on_cpu else "auto",
            "enforce_eager": on_cpu,
            "tensor_parallel_size": size,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_length,
            "max_num_seqs": self.max_num_seqs,
            "enable_sleep_mode": self.enable_sleep_mode,
            "model_impl": self.model_impl,
            "distributed_executor_backend": "external_launcher",
            "seed": ranks.process_index // size,  # equal in a tensor-parallel group, so that its ranks sample the same
            "max_num_batched_tokens": 4096,
            "logprobs_mode": "processed_logprobs",
            "trust_remote_code": self.trust_remote_code,
            "enable_lora": True,
            "max_lora_rank": self.max_lora_rank,
            "max_loras": 1,
        }
        one_adapter = nullcontext
        if on_cpu:
            from ..compat.vllm_cpu import one_adapter

            # Completions of a prompt share its full blocks. On CPUs a block is 128 tokens, longer than many prompts; 32 is the
            # smallest that vLLM's CPU kernels are made for.
            options["block_size"] = 32
        with one_adapter():
            llm = LLM(**{**options, **self.engine_kwargs})
        if self.enable_sleep_mode and not hasattr(llm, "release_kv_cache_memory"):
            raise RolloutError(
                "vllm_enable_sleep_mode=True needs vLLM 0.31 or newer, which can free the cache alone: older versions throw "
                "the base away, too. Upgrade vLLM, or set vllm_enable_sleep_mode: false"
            )
        leave_groups_that_are_gone(llm)
        self.llm = _Serving(llm)
        if self.enable_sleep_mode:
            self.llm.sleep()

    def sync_weights(self) -> None:
        """Publish the adapter as it is now, and make the engine answer with it. Every rank has to call it."""
        started = time.perf_counter()
        with self._dist.gather_params([p for p in self.model.parameters() if p.requires_grad]):
            weights = adapter_weights(self.model)
        version = self.version + 1
        folder = None
        if self.accelerator.is_main_process:
            folder = str(self.versions.publish(version, weights, self.peft_config))
        folder = broadcast_object_list([folder], from_process=0)[0]
        self._load(version, folder)
        self.version = version
        self.accelerator.wait_for_everyone()  # a rank may ask for completions of its own next
        if self.accelerator.is_main_process:
            # The engine may read a folder again as long as its name can be asked for, so the newest stays.
            self.versions.forget_before(version)
        self.last_sync = {"seconds": time.perf_counter() - started, "bytes": self.versions.bytes}

    def _load(self, version: int, folder: str) -> None:
        name = Path(folder).name
        if self.mode == "colocate":
            from vllm.lora.request import LoRARequest

            if not self.llm.load(LoRARequest(name, version, folder)):
                raise RolloutError(f"vLLM refused the adapter in {folder}")
            return
        before, self.vllm_client.model = self.vllm_client.model, name
        if self.accelerator.is_main_process:
            self.vllm_client.load_adapter(name, folder)
            if self.version:
                self.vllm_client.unload_adapter(before)

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        answer = super().generate(prompts, images, num_generations, profiler)
        self._llm_weights_sleeping = False  # TRL notes that the weights are asleep; here they never are
        return answer

    @property
    def draws_alone(self) -> bool:
        """A rank can ask for completions by itself: no other has to take part."""
        return self.mode == "server" or self.tensor_parallel_size == 1

    def without_adapter(self) -> AbstractContextManager:
        """Inside, the engine answers with the base model: the reference policy of a LoRA run."""
        if self.mode == "colocate":
            return replaced(self.llm, adapter=None)
        return replaced(self.vllm_client, model=self.vllm_client.base)
