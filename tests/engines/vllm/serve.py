"""A real `vllm serve` for the tests, and one that is made of recorded answers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryFile

from tests.distributed.launch import free_port

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a worker process of its own would spin while the engine waits
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "HF_HUB_OFFLINE": "1",
}


class Server:
    """`vllm serve` on a free port, as docs/vllm.md starts it."""

    def __init__(self, model: str):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = TemporaryFile()  # noqa: SIM115 (the process writes to it until the end)
        command = [str(Path(sys.executable).with_name("vllm")), "serve", model, "--port", str(self.port)]
        command += ["--enable-lora", "--max-lora-rank", "16", "--logprobs-mode", "processed_logprobs"]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--block-size", "32"]
        environment = {**os.environ, **SETTINGS}
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def __enter__(self) -> "Server":
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        self.__exit__()
        self.log.seek(0)
        raise RuntimeError(f"vllm serve did not start:\n{self.log.read().decode(errors='replace')[-4000:]}")

    def __exit__(self, *_):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with its engine processes
        self.process.wait()

    def models(self) -> list[str]:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
            return [model["id"] for model in json.load(answer)["data"]]


class RecordedServer:
    """Answers as a vLLM 0.31 server does that was started in some way, and at the paths of `other` with these
    statuses.

    Attributes:
        asked: paths, in the order of the requests.
    """

    def __init__(
        self, max_lora_rank: int | None = 16, weight_transfer: bool = False, other: dict[str, int] | None = None
    ):
        info = {"lora_config": None if max_lora_rank is None else {"max_lora_rank": max_lora_rank}}
        info["weight_transfer_config"] = {"backend": "nccl"} if weight_transfer else None
        choice = {"prompt_token_ids": [5, 6], "token_ids": [7], "logprobs": None}
        pages = {
            "/health": {},
            "/v1/models": {"data": [{"id": "base", "root": "/base", "parent": None}]},
            "/server_info": {"vllm_config": info},
            "/v1/completions": {"choices": [choice]},
        }
        self.asked = asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                asked.append(path)
                # Without VLLM_ALLOW_RUNTIME_LORA_UPDATING there is no /v1/load_lora_adapter.
                self.send_response((other or {}).get(path, 200 if path in pages else 404))
                body = json.dumps(pages.get(path, {"detail": "Not Found"})).encode()
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def log_message(self, *_):
                """Say nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> "RecordedServer":
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()
