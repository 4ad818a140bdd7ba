"""A `vllm serve` as this package uses it: checked before it is asked, adapters by name, faults within a minute."""

import time
from pathlib import Path

import requests
from requests.adapters import HTTPAdapter, ReadTimeoutError, Retry

from ..compat.vllm import VLLMClient
from .adapter_sync import RolloutError
from .server_stall import ServerStall, WatchedAdapter

# A server that is gone is told within a minute: three tries of this long to connect, four seconds before the last, and one of
# this long to load an adapter.
_CONNECT_SECONDS, _LOAD_SECONDS = 10, 40
CONCURRENCY = 64  # requests at a time that are made each for one prompt


class _Tries(Retry):
    """Two more where a connection fails or breaks; none where an answer does not come in time: the server may still be at it,
    and would load an adapter twice."""

    def increment(self, method=None, url=None, response=None, error=None, **more):
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(method, url, response, error, **more)


def _tries() -> _Tries:
    return _Tries(
        total=2,
        backoff_factor=2,
        status_forcelist=[502, 503],
        allowed_methods=["POST", "GET"],
        respect_retry_after_header=False,
    )


def watch_completions(client: VLLMClient, stall_timeout: float) -> bool:
    """Have a client give up completions where its server's engine stands still; whether the server tells how far it is.

    Args:
        client: of a server that is up.
        stall_timeout: seconds without progress that are too many.
    """
    stall = ServerStall(client.base_url, stall_timeout)
    if not stall.is_told():
        return False
    adapter = WatchedAdapter(stall, _CONNECT_SECONDS, max_retries=_tries(), pool_maxsize=CONCURRENCY)
    for endpoint in ("v1/completions", "inference/v1/generate"):
        client.session.mount(f"{client.base_url}/{endpoint}", adapter)
    return True


def not_watched(url: str) -> str:
    """The warning where [`watch_completions`] cannot."""
    return (
        f"the vLLM server at {url} does not tell how far its engine is, so a rollout in which it hangs is waited for without "
        "end. Start it without --disable-log-stats, or set vllm_stall_timeout: 0"
    )


class AdapterServer(VLLMClient):
    """TRL's client of a vLLM server, for a server that holds a base and is given adapters.

    Args:
        url: of the server.
        group_port: of `VLLMClient`; nothing is sent there.
        patience: seconds to wait until the server is up.
        max_lora_rank: the adapter's, as vLLM counts ranks.
        stall_timeout: seconds without progress after which completions are no longer waited for; 0 for no limit.

    Attributes:
        base: the name under which it serves the base.
        folder: what it loaded the base from.
        is_watched: completions are given up where its engine stands still.

    Raises:
        ConnectionError: it is not up.
        RolloutError: it cannot take such adapters; names what to start it with.
    """

    def __init__(self, url: str, group_port: int, patience: float, max_lora_rank: int, stall_timeout: float):
        super().__init__(base_url=url, group_port=group_port, connection_timeout=patience)
        models = self._get(f"{self.base_url}/v1/models")["data"]
        # Adapters of earlier runs are listed too, with the base as their parent.
        base = next(model for model in models if not model.get("parent"))
        self.model = self.base = base["id"]
        self.folder = base.get("root") or base["id"]
        self._check(max_lora_rank)
        self.is_watched = stall_timeout > 0 and watch_completions(self, stall_timeout)

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server is up. TRL's waits without end where something else answers at the URL, or nothing does.

        Raises:
            ConnectionError: not in `total_timeout` seconds; with what was answered last.
        """
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(max_retries=_tries()))
        deadline = time.monotonic() + total_timeout
        while True:
            patience = min(max(deadline - time.monotonic(), 1.0), _CONNECT_SECONDS)
            try:
                answer = requests.get(f"{self.base_url}/health", timeout=patience)
                if answer.status_code == 200:
                    return
                last = f"/health answers {answer.status_code}"
            except requests.RequestException as error:
                last = str(error)
            if time.monotonic() >= deadline:
                raise ConnectionError(f"nothing is up at {self.base_url} after {total_timeout:g} s: {last}")
            time.sleep(retry_interval)

    def _get(self, url: str, **kwargs) -> dict:
        return super()._get(url, timeout=_CONNECT_SECONDS, **kwargs)

    def _check(self, max_lora_rank: int) -> None:
        response = self.session.get(
            f"{self.base_url}/server_info", params={"config_format": "json"}, timeout=_LOAD_SECONDS
        )
        if response.status_code == 404:
            raise RolloutError(
                f"the vLLM server at {self.base_url} does not say how it was started. Restart it with "
                "VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        if response.status_code != 200:
            raise RolloutError(f"{self.base_url}/server_info: {response.status_code} {response.text[:300]}")
        info = response.json()["vllm_config"]
        lora = info["lora_config"]
        if lora is None:
            raise RolloutError(
                f"the vLLM server at {self.base_url} was started without --enable-lora. Restart it with --enable-lora "
                f"--max-lora-rank {max_lora_rank}, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
            )
        if lora["max_lora_rank"] < max_lora_rank:
            raise RolloutError(
                f"the vLLM server at {self.base_url} takes adapters up to rank {lora['max_lora_rank']}, this one needs "
                f"{max_lora_rank}. Restart it with --max-lora-rank {max_lora_rank}"
            )
        replicas = info["parallel_config"]["data_parallel_size"]
        if replicas > 1:
            raise RolloutError(
                f"the vLLM server at {self.base_url} has {replicas} data-parallel replicas, and an adapter reaches only "
                "one of them. Restart it without --data-parallel-size, or raise --tensor-parallel-size instead"
            )

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
        response = self.session.post(
            f"{self.base_url}/v1/{endpoint}", json=content, timeout=(_CONNECT_SECONDS, _LOAD_SECONDS)
        )
        if response.status_code == 200:
            return
        if response.status_code == 404 and response.json().get("detail") == "Not Found":  # no such endpoint
            raise RolloutError(
                f"the vLLM server at {self.base_url} takes no adapters at run time. Restart it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
            )
        folder = Path(content.get("lora_path", "."))
        hint = "the server has to see the same folder, and to serve the model that is trained"
        if not folder.is_dir():
            hint = f"{folder} is gone: something removed it while the server read it; resume from the last checkpoint"
        raise RolloutError(
            f"{endpoint} failed on the vLLM server at {self.base_url} ({response.status_code}): "
            f"{response.text[:500]} ({hint})"
        )
