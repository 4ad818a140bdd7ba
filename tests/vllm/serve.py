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
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryFile

import psutil

from tests.distributed.launch import free_port

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "HF_HUB_OFFLINE": "1",
}


class Server:
    """`vllm serve` on a free port, as docs/rollouts.md starts it."""

    def __init__(self, model: str, patience: float = 300):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = TemporaryFile()  # noqa: SIM115 (the process writes to it until the end)
        command = [str(Path(sys.executable).with_name("vllm")), "serve", model, "--port", str(self.port)]
        command += ["--enable-lora", "--max-lora-rank", "16", "--logprobs-mode", "processed_logprobs"]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
        environment = {**os.environ, **SETTINGS}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        self.process = subprocess.Popen(
            command, env=environment, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.patience = patience

    def __enter__(self) -> "Server":
        deadline = time.monotonic() + self.patience
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        self.kill()
        self.log.seek(0)
        raise RuntimeError(f"vllm serve did not start:\n{self.log.read().decode(errors='replace')[-4000:]}")

    def __exit__(self, *_):
        self.kill()

    def kill(self) -> None:
        """Kill -9, with its engine processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()

    def suspend(self) -> None:
        """Stop its engine; what takes requests and answers `/metrics` runs on."""
        for engine in psutil.Process(self.process.pid).children(recursive=True):
            engine.suspend()

    def resume(self) -> None:
        for engine in psutil.Process(self.process.pid).children(recursive=True):
            engine.resume()

    def models(self) -> list[str]:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
            return [model["id"] for model in json.load(answer)["data"]]


# How a [`RecordedServer`] may have been started wrong, and what the error names.
WRONG_STARTS = [
    ({"max_lora_rank": None}, "--enable-lora"),
    ({"max_lora_rank": 4}, "--max-lora-rank 8"),
    ({"dev_mode": False}, "VLLM_SERVER_DEV_MODE=1"),
    ({"replicas": 2}, "--data-parallel-size"),
]


class RecordedServer:
    """Answers as a vLLM 0.31 server does that was started in some wrong way, or whose engine hangs.

    Args:
        max_lora_rank, replicas, dev_mode: what it was started with.
        steps: looks at `/metrics` between which its engine goes on; completions are answered after them.
        other: paths at which it answers otherwise: with this status, or with 0 not at all while a test lasts.

    Attributes:
        asked: paths, in the order of the requests.
    """

    def __init__(
        self,
        max_lora_rank: int | None = 16,
        replicas: int = 1,
        dev_mode: bool = True,
        steps: int = 0,
        other: Mapping[str, int] | None = None,
    ):
        lora = None if max_lora_rank is None else {"max_lora_rank": max_lora_rank}
        info = {"vllm_config": {"lora_config": lora, "parallel_config": {"data_parallel_size": replicas}}}
        pages = {"/health": {}, "/v1/models": {"data": [{"id": "base", "root": "/base", "parent": None}]}}
        if dev_mode:
            pages["/server_info"] = info
        # Without VLLM_ALLOW_RUNTIME_LORA_UPDATING there is no /v1/load_lora_adapter.
        missing = {"detail": "Not Found"}
        choice = {"prompt_token_ids": [5, 6], "token_ids": [7], "logprobs": None}
        pages |= {"/v1/completions": {"choices": [choice]}, "/metrics": None}
        asked, over, drawn = [], threading.Event(), threading.Event()
        self.asked, self._over = asked, over

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                asked.append(path)
                looks = asked.count("/metrics")
                if looks >= steps:
                    drawn.set()
                if path == "/metrics":
                    pages[path] = f'vllm:generation_tokens_total{{model_name="base"}} {min(looks, steps)}'
                elif path == "/v1/completions":
                    drawn.wait()
                status = (other or {}).get(path, 200 if path in pages else 404)
                if status:
                    self.reply(status, pages.get(path, missing))
                else:
                    over.wait()

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def reply(self, code, content):
                body = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                """Say nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> "RecordedServer":
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self.http.shutdown()
        self.http.server_close()
