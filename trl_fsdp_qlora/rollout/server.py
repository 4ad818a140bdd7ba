"""A `vllm serve` that holds a base and is given adapters by name."""

from typing import Any

from requests.adapters import HTTPAdapter, Retry
from trl.generation.vllm_client import VLLMClient

from .adapter_sync import RolloutError


def server_info(args: Any) -> dict[str, Any]:
    """What the server that a trainer's arguments name was started with, as `/server_info` tells it.

    Waits for `vllm_server_timeout`, as TRL does.
    """
    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    return VLLMClient(url, connection_timeout=args.vllm_server_timeout).get_server_info()


class AdapterServer(VLLMClient):
    """TRL's client of a vLLM server, for a server that is given adapters.

    Args:
        url: of the server.
        patience: seconds to wait until the server is up.
        max_lora_rank: the adapter's, as vLLM counts ranks.

    Attributes:
        base: the name under which it serves the base.
        folder: what it loaded the base from.

    Raises:
        RolloutError: it cannot take such adapters; names what to start it with.
    """

    def __init__(self, url: str, patience: float, max_lora_rank: int):
        super().__init__(base_url=url, connection_timeout=patience)
        models = self.session.get(f"{self.base_url}/v1/models").json()["data"]
        # Adapters of earlier runs are listed too, with the base as their parent.
        base = next(model for model in models if not model.get("parent"))
        self.model = self.base = base["id"]
        self.folder = base.get("root") or base["id"]
        lora = self.get_server_info()["lora_config"]
        if lora is None or lora["max_lora_rank"] < max_lora_rank:
            started = "without --enable-lora" if lora is None else f"with --max-lora-rank {lora['max_lora_rank']}"
            raise RolloutError(
                f"the vLLM server at {self.base_url} was started {started}. Restart it with --enable-lora --max-lora-rank "
                f"{max_lora_rank}, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
            )
        # TRL asks again after a 500, and forgets what it said: here that is why vLLM did not take an adapter.
        tries = Retry(total=5, backoff_factor=2, status_forcelist=[502, 503], allowed_methods=["POST"])
        for endpoint in ("load_lora_adapter", "unload_lora_adapter"):
            self.session.mount(f"{self.base_url}/v1/{endpoint}", HTTPAdapter(max_retries=tries))

    def load_adapter(self, name: str, folder: str) -> None:
        """Load `folder` and answer with it from now on.

        Raises:
            RolloutError: with the server's reason.
        """
        self._ask("load_lora_adapter", {"lora_name": name, "lora_path": folder})
        self.model = name

    def unload_adapter(self, name: str) -> None:
        self._ask("unload_lora_adapter", {"lora_name": name})

    def _ask(self, endpoint: str, content: dict) -> None:
        response = self.session.post(f"{self.base_url}/v1/{endpoint}", json=content)
        if response.status_code == 200:
            return
        if response.status_code == 404 and response.json().get("detail") == "Not Found":  # no such endpoint
            raise RolloutError(
                f"the vLLM server at {self.base_url} takes no adapters at run time. Restart it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
            )
        raise RolloutError(
            f"{endpoint} failed on the vLLM server at {self.base_url} ({response.status_code}): {response.text[:500]} (the server "
            f"has to see {content.get('lora_path', 'the folder')} (vllm_adapter_dir), and to serve the model that is trained)"
        )
