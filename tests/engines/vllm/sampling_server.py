"""A server with vLLM's API, in a thread, that draws from a tiny model and the adapters that it is sent.

What it draws for a prompt depends on the prompt, the number of the completion and the weights alone, so two runs that
ask the same get the same.

    python -m tests.engines.vllm.sampling_server MODEL PORT       # for as long as it is not interrupted
"""

import base64
import io
import json
import math
import select
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from zlib import crc32

import torch
from peft import PeftModel
from PIL import Image

from tests import tiny
from trl_fsdp_qlora.scoring.cpu_linear import fast_linears

BASE = "base"


@dataclass
class Draw:
    """A request for completions."""

    adapter: str
    prompts: list[list[int]]
    n: int
    began: float
    ended: float | None = None
    status: str = "running"  # then "answered", "disconnected" or "failed"
    weights: dict = field(default_factory=dict, repr=False)  # lora_B's


class SamplingServer:
    """The server, which runs inside the block.

    Args:
        model: its base; by default that of the tests' trainers.
        seconds: how long a request takes, at least.
        eos: the token that ends a completion; by default that of the tests' trainers.
        keeps_keys: compute a prompt once for its completions, and each token once. Not for recurrent layers.
        processor: of a model that sees images.

    Attributes:
        draws: every request for completions, in order.
        events: names of what was asked, in order.
        fails: requests for completions are answered with status 400.
        holds_from: the number, from 0, of the first request for completions that is held until `fails`, or for ever.
    """

    def __init__(
        self,
        model=None,
        seconds: float = 0.0,
        port: int = 0,
        eos: int | None = None,
        keeps_keys: bool = False,
        processor=None,
    ):
        self.seconds = seconds
        self.processor = processor
        self.keeps_keys = keeps_keys
        self.fails = False
        self.holds_from: float = math.inf
        self.draws: list[Draw] = []
        self.events: list[str] = []
        self._model = tiny.tiny_model() if model is None else model
        self._model.eval()
        self._adapters: dict[str, PeftModel] = {}
        self._eos = tiny.character_tokenizer().eos_token_id if eos is None else eos
        self._lock = threading.Lock()  # PEFT changes the model in place
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                models = [{"id": BASE, "root": "/base", "parent": None}]
                models += [{"id": name, "parent": BASE} for name in server._adapters]
                info = {"lora_config": {"max_lora_rank": 16}, "weight_transfer_config": None}
                info["model_config"] = {"logprobs_mode": "processed_logprobs"}
                pages = {"/health": {}, "/v1/models": {"data": models}, "/server_info": {"vllm_config": info}}
                self.answer(200, pages[self.path.partition("?")[0]])

            def do_POST(self):
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = self.path.rpartition("/")[2]
                server.events.append(name)
                try:
                    if name == "completions":
                        self.complete(content)
                    elif name == "render":
                        urls = [part["image_url"]["url"] for part in content["messages"][0]["content"]]
                        placeholders = {"image": [{"offset": 0, "length": 1}] * len(urls)}
                        self.answer(200, {"features": {"mm_placeholders": placeholders, "urls": urls}})
                    elif name == "generate":  # a prompt with its images
                        asked = {"model": content["model"], "prompt": [content["token_ids"]]}
                        self.complete({**asked, **content["sampling_params"], "features": content["features"]})
                    else:
                        getattr(server, name)(**content)
                        self.answer(200, {})
                except KeyError as error:
                    self.answer(404, {"detail": f"no such adapter: {error}"})

            def complete(self, content):
                draw = Draw(content["model"], content["prompt"], content["n"], time.perf_counter())
                held = len(server.draws) >= server.holds_from
                server.draws.append(draw)
                while (held and not server.fails) or time.perf_counter() < draw.began + server.seconds:
                    if self.has_left():
                        draw.status = "disconnected"
                        self.close_connection = True
                        return
                    time.sleep(0.005)
                if server.fails:
                    draw.status = "failed"
                    self.answer(400, {"detail": "the engine is dead"})
                    return
                choices = server.complete(draw, content)
                draw.ended = time.perf_counter()
                draw.status = "answered"
                self.answer(200, {"choices": choices})

            def has_left(self):
                readable, _, _ = select.select([self.connection], [], [], 0)
                return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

            def answer(self, status, content):
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                """Say nothing."""

        ThreadingHTTPServer.daemon_threads = True
        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> "SamplingServer":
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def settings(self) -> dict:
        """Of a trainer that draws from this server."""
        return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": self.url, "vllm_server_timeout": 5.0}

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> None:
        with self._lock:
            if self._adapters:
                model = next(iter(self._adapters.values()))
                model.load_adapter(lora_path, lora_name)
            else:
                model = PeftModel.from_pretrained(self._model, lora_path, lora_name)
            self._adapters[lora_name] = model.eval()

    def unload_lora_adapter(self, lora_name: str) -> None:
        with self._lock:
            model = self._adapters.pop(lora_name)
            model.set_adapter(next(iter(self._adapters)))
            model.delete_adapter(lora_name)

    @torch.no_grad()
    def complete(self, draw: Draw, content: dict) -> list[dict]:
        with self._lock:
            model = self._adapters[draw.adapter]
            model.set_adapter(draw.adapter)
            draw.weights = {
                name: value.clone() for name, value in model.named_parameters() if f"lora_B.{draw.adapter}" in name
            }
            rows = [row for prompt in content["prompt"] for row in self._rows(model, prompt, content)]
        return rows

    def _images(self, features: dict | None, count: int) -> dict:
        """What the model gets of a prompt's images, for each of its completions."""
        if not features:
            return {}
        data = [base64.b64decode(url.partition("base64,")[2]) for url in features["urls"]]
        images = [Image.open(io.BytesIO(content)).convert("RGB") for content in data]
        pixels = self.processor.image_processor(images=images * count, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels}

    def _rows(self, model, prompt: list[int], content: dict) -> list[dict]:
        """The `n` completions of a prompt."""
        count = content["n"]
        seeds = [crc32(repr((prompt, number)).encode()) for number in range(count)]
        seen = self._images(content.get("features"), count)
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        rows = torch.tensor([prompt] * count)
        drawn: list[list[int]] = [[] for _ in range(count)]
        scores: list[list[float]] = [[] for _ in range(count)]
        cache = None
        for _ in range(content["max_tokens"]):
            if not self.keeps_keys:
                logits = model(input_ids=rows, **seen).logits[:, -1]
            elif cache is None:
                output = model(input_ids=rows[:1], use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                cache.batch_repeat_interleave(count)
                logits = output.logits[:, -1].expand(count, -1)
            else:
                logits = model(input_ids=rows[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]
            logps = (logits.float() / content["temperature"]).log_softmax(-1)
            token = torch.stack(
                [torch.multinomial(row.exp(), 1, generator=generators[i]) for i, row in enumerate(logps)]
            )
            rows = torch.cat([rows, token], 1)
            for i in range(count):
                if not drawn[i] or drawn[i][-1] != self._eos:
                    drawn[i].append(int(token[i]))
                    scores[i].append(float(logps[i, token[i]]))
        return [
            {
                "prompt_token_ids": prompt,
                "token_ids": ids,
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in ids],
                    "token_logprobs": of_ids,
                    "top_logprobs": [None] * len(ids),
                },
            }
            for ids, of_ids in zip(drawn, scores, strict=True)
        ]


def main(name: str, port: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    eos = AutoTokenizer.from_pretrained(name).eos_token_id
    with fast_linears(model), SamplingServer(model, port=int(port), eos=eos, keeps_keys=True) as server:
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
