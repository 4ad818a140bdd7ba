"""`AdapterEngine`: TRL's vLLM engine, colocated or in a server, to which only the adapter is sent.

TRL 1.16 merges the adapter into the base, pushes every weight and unmerges, for each step. Here the engine holds the
untouched base and is given each version of the adapter under a name of its own: no weight of the base moves, a quantized or
sharded base needs no merging, and putting the engine to sleep frees its cache and keeps its weights.
"""

import os
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from requests.exceptions import RequestException

from ..compat.trl import ensure_master_addr_port
from ..compat.vllm import VLLMGeneration, leave_groups_that_are_gone
from .adapter_sync import RESUME, AdapterVersions, RolloutError, adapter_weights
from .server import AdapterServer, not_watched
from .stall import EngineStall

logger = get_logger(__name__)


def count_steps(llm, stall: EngineStall) -> None:
    """Have the steps of vLLM's `LLM` counted by what watches it."""
    step = llm.llm_engine.step

    def counted():
        outputs = step()
        stall.steps += 1
        return outputs

    llm.llm_engine.step = counted


@contextmanager
def together(what: str, server_timeout: float = 0.0):
    """What fails inside on one rank fails on every rank, with that rank's reason; no rank waits for another. Collective.

    Args:
        what: vLLM is to do, for the error.
        server_timeout: of the server that may be asked inside, for the error.

    Raises:
        RolloutError: on every rank.
    """
    problem = None
    try:
        yield
    except RolloutError as error:
        problem = error
    except (RequestException, ConnectionError) as error:
        problem = RolloutError(
            f"the vLLM server did not {what}: {error}. Is it running, is vllm_server_base_url right, and is "
            f"vllm_server_timeout ({server_timeout:g} s) enough for it to start? {RESUME}"
        )
        problem.__cause__ = error
    except Exception as error:  # whatever the engine died of; re-raised below, on all ranks
        problem = RolloutError(f"vLLM could not {what}: {type(error).__name__}: {error}. {RESUME}")
        problem.__cause__ = error
    reasons = gather_object([None if problem is None else str(problem)])
    if problem is not None:
        raise problem
    other = next(((rank, reason) for rank, reason in enumerate(reasons) if reason is not None), None)
    if other is not None:
        raise RolloutError(f"rank {other[0]}: {other[1]}")


class _Serving:
    """vLLM's `LLM` as `VLLMGeneration.generate` uses it: requests name the adapter, and sleeping keeps the weights.

    TRL asks for sleep level 2, which throws the base away; an adapter could not bring it back.

    Args:
        llm: the engine.
        stall: watches whatever the engine is asked to do.
    """

    def __init__(self, llm, stall: EngineStall):
        self._llm, self._stall = llm, stall
        self.adapter = None
        count_steps(llm, stall)

    def __getattr__(self, name):
        return getattr(self._llm, name)

    def generate(self, prompts, **options):
        with self._stall.watching("generate"):
            return self._llm.generate(prompts, lora_request=self.adapter, **options)

    def load(self, request) -> bool:
        """Answer with the adapter of a `LoRARequest` from now on, and forget the one before; whether vLLM took it."""
        engine = self._llm.llm_engine
        with self._stall.watching("load the adapter"):
            if not engine.add_lora(request):
                return False
            if self.adapter is not None:
                engine.remove_lora(self.adapter.lora_int_id)
        self.adapter = request
        return True

    def sleep(self, level: int = 2) -> None:
        with self._stall.watching("free its cache"):
            self._llm.sleep(level=0)
            self._llm.release_kv_cache_memory()

    def wake_up(self, tags=None) -> None:
        with self._stall.watching("wake up"):
            self._llm.wake_up(tags=["kv_cache"])


class AdapterEngine(VLLMGeneration):
    """[`trl.generation.vllm_generation.VLLMGeneration`] that serves an adapter over an untouched base.

    Args:
        base: folder or Hub id of the weights that the engine loads (colocated): the checkpoint that is trained, or the
            dequantized copy of a 4-bit one.
        peft_config: of the adapter.
        max_lora_rank: from [`trl_fsdp_qlora.rollout.adapter_sync.served_rank`].
        versions: where versions of the adapter are written; used by rank 0.
        stall_timeout: seconds without progress after which the engine is given up; 0 for none.
        **options: of `VLLMGeneration`.

    Raises:
        RolloutError: on every rank, when the server cannot be reached or cannot take adapters.
    """

    def __init__(
        self,
        *,
        base: str,
        peft_config,
        max_lora_rank: int,
        versions: AdapterVersions,
        stall_timeout: float,
        **options,
    ):
        self.base = base
        self.peft_config = peft_config
        self.max_lora_rank = max_lora_rank
        self.versions = versions
        self.stall_timeout = stall_timeout
        self.version = 0
        self.last_sync = {"seconds": 0.0, "bytes": 0}
        super().__init__(**options)

    # --- starting ----------------------------------------------------------------------------------------------------

    def _init_vllm(self) -> None:
        with self._together("start"):
            if self.mode == "server":
                # Every rank: accuracy and V* are drawn by each for itself.
                url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
                self.vllm_client = AdapterServer(
                    url, self.group_port, self.server_timeout, self.max_lora_rank, self.stall_timeout
                )
                self.base = self.vllm_client.folder
                if self.stall_timeout and not self.vllm_client.is_watched:
                    logger.warning(not_watched(url))
            else:
                self._start_colocated()
        self._llm_weights_sleeping = False
        self.accelerator.wait_for_everyone()

    def _start_colocated(self) -> None:
        ranks = self.accelerator
        if ranks.num_processes % self.tensor_parallel_size:
            raise RolloutError(
                f"vllm_tensor_parallel_size={self.tensor_parallel_size} does not divide the {ranks.num_processes} "
                "processes"
            )
        if self.tensor_parallel_size > 1:
            size = self.tensor_parallel_size
            groups = [list(range(i * size, (i + 1) * size)) for i in range(ranks.num_processes // size)]
            self.tp_group, _ = torch.distributed.new_subgroups_by_enumeration(groups)
        os.environ["RANK"] = str(ranks.process_index)
        os.environ["LOCAL_RANK"] = str(ranks.local_process_index)
        os.environ["WORLD_SIZE"] = str(ranks.num_processes)
        ensure_master_addr_port()
        if ranks.device.type == "cpu":
            from .one_adapter import one_adapter

            with one_adapter():
                llm = self._make_engine(on_cpu=True)
        else:
            llm = self._make_engine(on_cpu=False)
        if self.enable_sleep_mode and not hasattr(llm, "release_kv_cache_memory"):
            raise RolloutError(
                "vllm_enable_sleep_mode=True needs vLLM 0.31 or newer, which can free the cache alone: older versions throw "
                "the base away, too. Upgrade vLLM, or set vllm_enable_sleep_mode: false"
            )
        leave_groups_that_are_gone(llm)
        self.llm = _Serving(llm, EngineStall(self.stall_timeout, on_cpu=ranks.device.type == "cpu"))
        if self.enable_sleep_mode:
            self.llm.sleep()

    def _make_engine(self, on_cpu: bool):
        from vllm import LLM

        # Completions of a prompt share its full blocks. On CPUs a block is 128 tokens, longer than many prompts; 32 is the
        # smallest that vLLM's CPU kernels are made for.
        blocks = {"block_size": 32} if on_cpu else {}
        return LLM(
            **blocks,
            model=self.base,
            # The policy's own dtype where there is no GPU: bfloat16 without AMX is hundreds of times slower.
            dtype=str(self.model.dtype).removeprefix("torch.") if on_cpu else "auto",
            enforce_eager=on_cpu,
            tensor_parallel_size=self.tensor_parallel_size,
            gpu_memory_utilization=self.gpu_memory_utilization,
            max_model_len=self.max_model_length,
            max_num_seqs=self.max_num_seqs,
            enable_sleep_mode=self.enable_sleep_mode,
            model_impl=self.model_impl,
            distributed_executor_backend="external_launcher",
            # Equal for the ranks of a tensor-parallel group, so that they sample the same.
            seed=self.accelerator.process_index // self.tensor_parallel_size,
            max_num_batched_tokens=4096,
            logprobs_mode="processed_logprobs",
            trust_remote_code=self.trust_remote_code,
            enable_lora=True,
            max_lora_rank=self.max_lora_rank,
            max_loras=1,
        )

    # --- syncing -----------------------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Publish the adapter as it is now, and make the engine answer with it. Every rank has to call it."""
        started = time.perf_counter()
        with self._dist.gather_params([p for p in self.model.parameters() if p.requires_grad]):
            weights = adapter_weights(self.model)
        version = self.version + 1
        folder = None
        with self._together("be sent the adapter"):
            if self.accelerator.is_main_process:
                folder = str(self.versions.publish(version, weights, self.peft_config))
        folder = broadcast_object_list([folder], from_process=0)[0]
        with self._together("load the adapter"):
            self._load(version, folder)
        self.version = version
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
        else:
            before, self.vllm_client.model = self.vllm_client.model, name
            if self.accelerator.is_main_process:
                self.vllm_client.load_adapter(name, folder)
                if self.version:
                    self.vllm_client.unload_adapter(before)

    # --- generating --------------------------------------------------------------------------------------------------

    @property
    def draws_alone(self) -> bool:
        """A rank can ask for completions by itself: no other has to take part."""
        return self.mode == "server" or self.tensor_parallel_size == 1

    @contextmanager
    def without_adapter(self):
        """Inside, the engine answers with the base model: the reference policy of a LoRA run."""
        if self.mode == "colocate":
            holder, name, base = self.llm, "adapter", None
        else:
            holder, name, base = self.vllm_client, "model", self.vllm_client.base
        adapter = getattr(holder, name)
        setattr(holder, name, base)
        try:
            yield
        finally:
            setattr(holder, name, adapter)

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """As `VLLMGeneration.generate`; an engine that fails on one rank is a [`RolloutError`] on every rank."""
        if self.mode == "server":
            return self._ask_server(prompts, images, num_generations, profiler)
        with self._together("generate"):
            answer = super().generate(prompts, images, num_generations, profiler)
            # TRL notes that the weights are asleep; here they never are.
            self._llm_weights_sleeping = False
        return answer

    def _ask_server(self, prompts, images, num_generations, profiler) -> tuple:
        if images is not None:
            raise RolloutError("rollout_sync='adapter' sends no images to a vLLM server; set rollout_sync: merge")
        everyone = gather_object(prompts)
        answer = None
        with self._together("generate"):
            if self.accelerator.is_main_process:
                with profiler or nullcontext():
                    answer = self.vllm_client.generate(
                        prompts=everyone[::num_generations],
                        n=num_generations,
                        repetition_penalty=self.repetition_penalty,
                        temperature=self.temperature,
                        top_p=self.top_p,
                        top_k=self.top_k,
                        min_p=0.0 if self.min_p is None else self.min_p,
                        max_tokens=self.max_completion_length,
                        logprobs=self.logprobs,
                        structured_outputs_regex=self.structured_outputs_regex,
                        generation_kwargs=self.generation_kwargs,
                    )
        answer = broadcast_object_list([answer], from_process=0)[0]
        first = self.accelerator.process_index * len(prompts)
        mine = slice(first, first + len(prompts))
        return (
            everyone[mine],
            answer["completion_ids"][mine],
            answer["logprobs"][mine],
            answer["logprob_token_ids"][mine],
        )

    def _together(self, what: str):
        return together(what, self.server_timeout)
