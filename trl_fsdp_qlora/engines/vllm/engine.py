"""`AdapterEngine`: TRL's vLLM engine, colocated or in a server, to which only the adapter is sent.

TRL 1.16 merges the adapter into the base, pushes every weight and unmerges, for each step. Here the engine holds the
untouched base and loads each version of the adapter under a new name. Sleep frees the engine's cache and keeps its
weights.
"""

import copy
import logging
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from accelerate.utils import broadcast_object_list
from requests.adapters import HTTPAdapter, Retry

from ...compat.trl import VLLMClient, VLLMGeneration
from ...compat.vllm import init_with, skip_destroyed_groups
from ...utils.ranks import on_main
from ...utils.resources import cache_folder
from ...utils.substitute import Substitute
from .adapter_sync import (
    AdapterVersions,
    RolloutError,
    adapter_weights,
    cannot_share,
    check_trained,
    served_rank,
)
from .dequantized_base import DONE, dequantized_base, has_packed_base, write_config
from .drawn_dtype import engine_options, other_dtype, trainer_dtype

if TYPE_CHECKING:
    from trl import GRPOConfig

logger = logging.getLogger(__name__)


class _Serving:
    """vLLM's `LLM` as `VLLMGeneration.generate` uses it: requests name the adapter, and sleeping keeps the weights.

    TRL asks for sleep level 2, which drops the base, and no adapter could bring the base back. vLLM 0.31 and newer can
    free the cache alone. Older versions can only move the weights to host memory as well (level 1); the weights are
    moved back before they are used.
    """

    def __init__(self, llm):
        skip_destroyed_groups(llm)
        self._llm = llm
        self._frees_the_cache_alone = hasattr(llm, "release_kv_cache_memory")
        self._weights_in_host_memory = False
        self.adapter = None

    def __getattr__(self, name):
        return getattr(self._llm, name)

    def generate(self, prompts, **options):
        return self._llm.generate(prompts, lora_request=self.adapter, **options)

    def load(self, request) -> None:
        """Answer with the adapter of a `LoRARequest` from now on, and forget the one before."""
        self._wake_weights()  # the adapter is copied into the engine's memory
        engine = self._llm.llm_engine
        if not engine.add_lora(request):
            raise RolloutError(f"vLLM refused the adapter in {request.lora_path}")
        if self.adapter is not None:
            engine.remove_lora(self.adapter.lora_int_id)
        self.adapter = request

    def without_adapter(self) -> "_Serving":
        """The same engine, whose requests name no adapter."""
        return Substitute(self, generate=partial(self._llm.generate, lora_request=None))

    def sleep(self, level: int = 2) -> None:
        if self._frees_the_cache_alone:
            # The last requests are over, but vLLM 0.31 frees no cache before a step has passed that to its worker.
            self._llm.llm_engine.step()
            self._llm.sleep(level=0)
            self._llm.release_kv_cache_memory()
        else:
            self._llm.sleep(level=1)
            self._weights_in_host_memory = True

    def wake_up(self, tags=None) -> None:
        self._wake_weights()
        self._llm.wake_up(tags=["kv_cache"])

    def _wake_weights(self) -> None:
        if self._weights_in_host_memory:
            self._llm.wake_up(tags=["weights"])
            self._weights_in_host_memory = False


def server_info(args: "GRPOConfig") -> dict[str, dict | None]:
    """The options that a trainer's vLLM server was started with; waits for `vllm_server_timeout`, as TRL does."""
    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    return _options_of(VLLMClient(url, connection_timeout=args.vllm_server_timeout))


def _options_of(client: VLLMClient) -> dict[str, dict | None]:
    """The options that a server was started with, for which TRL 1.15's client has no method."""
    if hasattr(client, "get_server_info"):
        return client.get_server_info()
    response = client.session.get(f"{client.base_url}/server_info", params={"config_format": "json"})
    response.raise_for_status()
    return response.json()["vllm_config"]


def served_model(generation: VLLMGeneration, temperature: float) -> str | None:
    """The model that an engine or its server draws from. Collective.

    It is `None` for a server that returns log-probabilities before the temperature: those differ from the trainer's
    for the same model, too.
    """

    def ask_server() -> str | None:  # on the main rank, which alone has TRL's client
        options = _options_of(generation.vllm_client).get("model_config") or {}
        if temperature != 1.0 and options.get("logprobs_mode") != "processed_logprobs":
            return None
        return f"{base or options.get('model') or 'another model'} at {generation.vllm_client.base_url}"

    base = getattr(generation, "base", None)  # of our engine
    if generation.mode == "server":
        return on_main(ask_server)
    return base or generation.model.name_or_path


class AdapterServer(VLLMClient):
    """TRL's client of a vLLM server, for a server that loads adapters.

    Args:
        url, timeout: address of the server, and seconds to wait until it is up.
        max_lora_rank: the adapter's rank, as vLLM counts ranks.

    Attributes:
        base, folder: the name under which it serves the base, and what it loaded that from.

    Raises:
        RolloutError: the server cannot take such adapters; the message names the option to start it with.
    """

    def __init__(self, url: str, timeout: float, max_lora_rank: int):
        super().__init__(base_url=url, connection_timeout=timeout)
        models = self.session.get(f"{self.base_url}/v1/models").json()["data"]
        # Adapters of earlier runs are listed too, with the base as their parent.
        base = next(model for model in models if not model.get("parent"))
        self.model = self.base = base["id"]
        self.folder = base.get("root") or base["id"]
        lora = _options_of(self)["lora_config"]
        if lora is None or lora["max_lora_rank"] < max_lora_rank:
            started = "without --enable-lora" if lora is None else f"with --max-lora-rank {lora['max_lora_rank']}"
            raise RolloutError(
                f"the vLLM server at {self.base_url} was started {started}. Restart it with --enable-lora "
                f"--max-lora-rank {max_lora_rank}, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
            )
        # After status 500 TRL's session repeats the request and drops the response. Here the text of that response is
        # vLLM's reason to refuse an adapter, so 500 is not repeated.
        retry = Retry(total=5, backoff_factor=2, status_forcelist=[502, 503], allowed_methods=["POST"])
        for endpoint in ("load_lora_adapter", "unload_lora_adapter"):
            self.session.mount(f"{self.base_url}/v1/{endpoint}", HTTPAdapter(max_retries=retry))

    def without_adapter(self) -> "AdapterServer":
        """A client that asks the server for completions of the base, not of the adapter."""
        client = copy.copy(self)
        client.model = self.base
        return client

    def ask(self, endpoint: str, content: dict) -> None:
        """Load or unload an adapter; raises [`RolloutError`] with the server's reason."""
        response = self.session.post(f"{self.base_url}/v1/{endpoint}", json=content)
        if response.status_code != 200:
            raise RolloutError(
                f"{endpoint} failed on the vLLM server at {self.base_url} ({response.status_code}): "
                f"{response.text[:500]} (it has to be started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its "
                f"environment, to see {content.get('lora_path')} (vllm_adapter_dir), and to serve the model that "
                "is trained)"
            )


class AdapterEngine(VLLMGeneration):
    """[`trl.generation.vllm_generation.VLLMGeneration`] that serves an adapter over an untouched base.

    Args:
        base: folder or Hub id of what a colocated engine loads: the checkpoint, or the dequantized copy of a 4-bit
            one.
        max_lora_rank: of the adapter, see [`trl_fsdp_qlora.engines.vllm.adapter_sync.served_rank`].
        versions: writes the versions of the adapter; used by rank 0.
        engine_kwargs: further arguments of `vllm.LLM`, which take precedence (colocated).
        own_base: why a colocated engine loads a base of its own; `None` if it is the trainer's.
        one_base: imports the module that lets both hold one base.
        **options: of `VLLMGeneration`.
    """

    # TRL sets this to `True` after it has generated, and would then sync all weights before it generates again. Here
    # the engine keeps its weights, see `_Serving`.
    _llm_weights_sleeping = property(lambda self: False, lambda self, value: None)

    def __init__(
        self,
        *,
        base: str,
        max_lora_rank: int,
        versions: AdapterVersions,
        engine_kwargs: dict[str, object] | None = None,
        own_base: str | None = "",
        one_base: Callable[[], ModuleType] | None = None,
        **options,
    ):
        self.base = base
        self.max_lora_rank = max_lora_rank
        self.versions = versions
        self.version = 0
        self.engine_kwargs = engine_kwargs or {}
        self.own_base = own_base
        self.one_base = one_base
        self.shared_base = None
        super().__init__(**options)

    def _init_vllm(self) -> None:
        if self.mode == "server":
            # Every rank connects, because each draws its own completions for accuracy and V*.
            url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self.vllm_client = AdapterServer(url, self.server_timeout, self.max_lora_rank)
            self.base = self.vllm_client.folder
            self.accelerator.wait_for_everyone()
        else:
            self._start_colocated()

    def _start_colocated(self) -> None:
        from vllm.platforms import current_platform

        if self.enable_sleep_mode and not current_platform.is_sleep_mode_available():
            logger.warning("vllm_enable_sleep_mode has no effect: vLLM sleeps on GPUs alone")
            self.enable_sleep_mode = False
        on_cpu = self.accelerator.device.type == "cpu"
        options = {
            "model": self.base,
            "quantization": None,  # of a 4-bit base the engine loads a dense copy
            "enforce_eager": on_cpu,
            "enable_lora": True,
            "max_lora_rank": self.max_lora_rank,
            "max_loras": 1,
        }
        if on_cpu:
            # Completions of a prompt share its full blocks. On CPUs a block is 128 tokens, longer than many prompts;
            # 32 is the smallest that vLLM's CPU kernels are made for.
            options["block_size"] = 32
        sharing = nullcontext((None, {}))
        if self.own_base is None:
            sharing = self.one_base().sharing(self.model)
        with sharing as (self.shared_base, share):
            init_with(super()._init_vllm, {**options, **self.engine_kwargs, **share}, _Serving)

    def sync_weights(self) -> None:
        """Publish the adapter as it is now, and make the engine answer with it. Every rank has to call it."""
        if self.shared_base is not None:
            self.shared_base.check()
        with self._dist.gather_params([p for p in self.model.parameters() if p.requires_grad]):
            weights = adapter_weights(self.model)
        version = self.version + 1
        folder = None
        if self.accelerator.is_main_process:
            peft_config = self.model.peft_config[self.model.active_adapters[0]]
            folder = str(self.versions.publish(version, weights, peft_config))
        folder = broadcast_object_list([folder], from_process=0)[0]
        self._load(version, folder)
        self.version = version
        self.accelerator.wait_for_everyone()  # a rank may ask for completions of its own next
        if self.accelerator.is_main_process:
            # The engine may read a folder again as long as its name can be asked for, so the newest stays.
            self.versions.forget_before(version)

    def _load(self, version: int, folder: str) -> None:
        name = Path(folder).name
        if self.mode == "colocate":
            from vllm.lora.request import LoRARequest

            self.llm.load(LoRARequest(name, version, folder))
            return
        if self.accelerator.is_main_process:
            self.vllm_client.ask("load_lora_adapter", {"lora_name": name, "lora_path": folder})
            if self.version:
                self.vllm_client.ask("unload_lora_adapter", {"lora_name": self.vllm_client.model})
        self.vllm_client.model = name

    @property
    def draws_alone(self) -> bool:
        """Whether a rank can ask for completions by itself, without the other ranks."""
        return self.mode == "server" or self.tensor_parallel_size == 1

    def without_adapter(self) -> "AdapterEngine":
        """The same engine, which answers with the base model: the reference policy of a LoRA run."""
        engine = copy.copy(self)
        if self.mode == "colocate":
            engine.llm = self.llm.without_adapter()
        else:
            engine.vllm_client = self.vllm_client.without_adapter()
        return engine


def why_not_shared(args: "GRPOConfig", model, accelerator, one_base: Callable[[], ModuleType]) -> str | None:
    """Why a loaded base cannot be shared with an engine in this process; `None` if it can.

    `one_base` imports the module that shares it.
    """
    engine_dtype = str(engine_options(args, model, accelerator)["dtype"]).removeprefix("torch.")
    held = str(model.dtype).removeprefix("torch.")
    in_4_bits = has_packed_base(model)
    if getattr(model, "is_quantized", False) and not in_4_bits:
        return "the base is quantized in another way than bitsandbytes' 4 bits"
    if held != engine_dtype and not in_4_bits:
        return other_dtype(held, engine_dtype)
    if model.device.type != accelerator.device.type:
        return f"the base is on {model.device.type}"
    try:
        from vllm import LLM

        one_base()
    except ImportError as error:
        return f"this vLLM differs from 0.31 ({error})"
    if args.vllm_enable_sleep_mode and not hasattr(LLM, "release_kv_cache_memory"):
        return "this vLLM moves its weights away when it sleeps; set vllm_enable_sleep_mode: false"
    return None


def start_engine(
    args: "GRPOConfig",
    own_base: str | None,
    *,
    one_base: Callable[[], ModuleType] | None = None,
    model,
    accelerator,
    processing_class,
    mode: str,
    **options: object,
) -> AdapterEngine:
    """An [`AdapterEngine`] that holds the base of `model`; the arguments are those of TRL's own engine. Collective.

    The model's weights may be on rank 0 alone (FSDP2), but are not sharded yet. `own_base`: why the engine loads a
    base of its own; `None` if it shares that of `model`. `one_base`: imports the module that shares it.
    """
    # Of the targets that PEFT resolved; both raise before anything is written.
    check_trained(model)
    rank = served_rank(model.peft_config[model.active_adapters[0]])
    base = model.name_or_path
    packed = has_packed_base(model)
    if own_base is None:
        reason = why_not_shared(args, model, accelerator, one_base)
        if reason is not None:
            raise cannot_share(reason)
    if packed and mode == "colocate":
        dtype = trainer_dtype(model, accelerator)
        if own_base is None:
            rollout = Path(args.output_dir) / ".rollout" / "base"
            base = str(on_main(lambda: write_config(rollout, model, processing_class, dtype)))
        else:
            cache = cache_folder() / "dequantized"
            base = str(on_main(lambda: dequantized_base(model, processing_class, cache, dtype)))
    # The run's own folder: writing to /dev/shm took as long, and a killed run would leave an adapter in memory.
    folder = args.vllm_adapter_dir or Path(args.output_dir) / ".rollout"
    versions = AdapterVersions(f"policy-{uuid.uuid4().hex[:8]}", folder, owns_folder=args.vllm_adapter_dir is None)
    engine = AdapterEngine(
        base=base,
        versions=versions,
        max_lora_rank=rank,
        engine_kwargs=engine_options(args, model, accelerator),
        own_base=own_base,
        one_base=one_base,
        model=model,
        accelerator=accelerator,
        processing_class=processing_class,
        mode=mode,
        **options,
    )
    if packed and mode == "server" and not (Path(engine.base) / DONE).is_file() and accelerator.is_main_process:
        logger.warning(
            f"the base is trained in 4 bits and the vLLM server holds {engine.base}: serve the dequantized copy "
            "instead, which `trl-fsdp-qlora dequantize --model_name_or_path ...` writes, or rollouts come from "
            "another rounding"
        )
    return engine
