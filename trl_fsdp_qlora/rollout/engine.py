"""`AdapterEngine`: TRL's vLLM engine, colocated or in a server, to which only the adapter is sent.

TRL 1.16 merges the adapter into the base, pushes every weight and unmerges, for each step. Here the engine holds the
untouched base and is given each version of the adapter under a name of its own: no weight of the base moves, a quantized or
sharded base needs no merging, and putting the engine to sleep frees its cache and keeps its weights.
"""

import os
import time
from contextlib import contextmanager

import torch
from accelerate.utils import broadcast_object_list, gather_object
from requests.adapters import HTTPAdapter, Retry
from requests.exceptions import RequestException

from ..upstream.trl import ensure_master_addr_port
from ..upstream.vllm import VLLMClient, VLLMGeneration
from .adapter_sync import AdapterVersions, RolloutError, adapter_weights

# A server that is gone is told within a minute: three tries, two and four seconds apart, and this long to connect.
_CONNECT_SECONDS = 10


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
        **options: of `VLLMGeneration`.

    Raises:
        RolloutError: on every rank, when the server cannot be reached or cannot take adapters.
    """

    def __init__(self, *, base: str, peft_config, max_lora_rank: int, versions: AdapterVersions, **options):
        self.base = base
        self.peft_config = peft_config
        self.max_lora_rank = max_lora_rank
        self.versions = versions
        self.version = 0
        self.last_sync = {"seconds": 0.0, "bytes": 0}
        super().__init__(**options)

    # --- starting ----------------------------------------------------------------------------------------------------

    def _init_vllm(self) -> None:
        if self.mode == "server":
            with self._together("start"):
                if self.accelerator.is_main_process:
                    self._connect()
        else:
            with self._together("start"):
                self._start_colocated()
        self._llm_weights_sleeping = False
        self.accelerator.wait_for_everyone()

    def _connect(self) -> None:
        url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        client = VLLMClient(base_url=url, group_port=self.group_port, connection_timeout=self.server_timeout)
        retry = Retry(total=2, backoff_factor=2, status_forcelist=[502, 503], allowed_methods=["POST", "GET"])
        for scheme in ("http://", "https://"):
            client.session.mount(scheme, HTTPAdapter(max_retries=retry))
        info = client.get_server_info()
        lora = info["lora_config"]
        if lora is None:
            raise RolloutError(
                f"the vLLM server at {url} was started without --enable-lora. Restart it with --enable-lora "
                f"--max-lora-rank {self.max_lora_rank}, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
            )
        if lora["max_lora_rank"] < self.max_lora_rank:
            raise RolloutError(
                f"the vLLM server at {url} takes adapters up to rank {lora['max_lora_rank']}, this one needs "
                f"{self.max_lora_rank}. Restart it with --max-lora-rank {self.max_lora_rank}"
            )
        replicas = info["parallel_config"]["data_parallel_size"]
        if replicas > 1:
            raise RolloutError(
                f"the vLLM server at {url} has {replicas} data-parallel replicas, and an adapter reaches only one of "
                "them. Restart it without --data-parallel-size, or start one server and raise --tensor-parallel-size"
            )
        self.vllm_client = client
        self.served_base = client.model

    def _start_colocated(self) -> None:
        from vllm import LLM

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
        # The policy's own dtype where there is no GPU: bfloat16 without AMX is hundreds of times slower.
        on_cpu = ranks.device.type == "cpu"
        self.llm = _Serving(
            LLM(
                model=self.base,
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
                seed=ranks.process_index // self.tensor_parallel_size,
                max_num_batched_tokens=4096,
                logprobs_mode="processed_logprobs",
                trust_remote_code=self.trust_remote_code,
                enable_lora=True,
                max_lora_rank=self.max_lora_rank,
                max_loras=1,
            )
        )
        self.served_base = self.base
        if self.enable_sleep_mode:
            self.llm.sleep()

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
        name = self.versions.name(version)
        if self.mode == "colocate":
            from vllm.lora.request import LoRARequest

            request = LoRARequest(name, version, folder)
            engine = self.llm.llm_engine
            if not engine.add_lora(request):
                raise RolloutError(f"vLLM refused the adapter in {folder}")
            if self.version:
                engine.remove_lora(self.version)
            self.llm.adapter = request
        elif self.accelerator.is_main_process:
            self._post("load_lora_adapter", {"lora_name": name, "lora_path": folder})
            self.vllm_client.model = name
            if self.version:
                self._post("unload_lora_adapter", {"lora_name": self.versions.name(self.version)})

    def _post(self, endpoint: str, content: dict) -> None:
        url = f"{self.vllm_client.base_url}/v1/{endpoint}"
        response = self.vllm_client.session.post(url, json=content, timeout=(_CONNECT_SECONDS, 60))
        if response.status_code == 404 and "lora_name" not in response.text and endpoint == "load_lora_adapter":
            raise RolloutError(
                f"the vLLM server at {self.vllm_client.base_url} takes no adapters at run time. Restart it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
            )
        if response.status_code != 200:
            raise RolloutError(f"{endpoint} failed on the vLLM server ({response.status_code}): {response.text[:500]}")

    # --- generating --------------------------------------------------------------------------------------------------

    @contextmanager
    def without_adapter(self):
        """Inside, the engine answers with the base model: the reference policy of a LoRA run."""
        if self.mode == "colocate":
            adapter, self.llm.adapter = self.llm.adapter, None
        elif self.accelerator.is_main_process:
            adapter, self.vllm_client.model = self.vllm_client.model, self.served_base
        try:
            yield
        finally:
            if self.mode == "colocate":
                self.llm.adapter = adapter
            elif self.accelerator.is_main_process:
                self.vllm_client.model = adapter

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
                with profiler:
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

    @contextmanager
    def _together(self, what: str):
        """What fails inside on one rank fails on every rank, with that rank's reason; no rank waits for another."""
        problem = None
        try:
            yield
        except RolloutError as error:
            problem = error
        except (RequestException, ConnectionError) as error:
            problem = RolloutError(
                f"the vLLM server did not {what}: {error}. Is it running, and is vllm_server_base_url right? Training "
                "goes on from the last checkpoint with resume_from_checkpoint"
            )
            problem.__cause__ = error
        except Exception as error:  # whatever the engine died of; re-raised below, on all ranks
            problem = RolloutError(f"vLLM could not {what}: {type(error).__name__}: {error}")
            problem.__cause__ = error
        reasons = gather_object([None if problem is None else str(problem)])
        if problem is not None:
            raise problem
        other = next(((rank, reason) for rank, reason in enumerate(reasons) if reason is not None), None)
        if other is not None:
            raise RolloutError(f"rank {other[0]}: {other[1]}")
