"""A rank that plays fuzzed episodes: python episodes_rank.py URL OUT CHANGES, CHANGES are a config's, as JSON.

`"fuzz"` is a seed, and with `"environments"` true the tool is an environment's. Each generation batch is a line in
`OUT/trained_RANK.jsonl`: the step, and the rows of this rank as the reward saw them.
"""

import json
import sys
from pathlib import Path
from zlib import crc32

from tests.distributed.fsdp_on_gloo import force_fsdp

force_fsdp()

from trl.generation import vllm_client, vllm_generation  # noqa: E402

from tests.engines.vllm.runs import figures  # noqa: E402
from tests.experimental.one_generation_ahead.test_episodes import Counter, make_episodes, named_add  # noqa: E402
from tests.tiny import digit_share  # noqa: E402
from trl_fsdp_qlora import EfficientGRPOTrainer  # noqa: E402


class Server:
    def __init__(self, url: str):
        self.url = url

    def settings(self) -> dict:
        return {
            "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": self.url, "vllm_server_timeout": 10.0,
        }  # fmt: skip


def odd(fuzz: int, a: int, b: int):
    """What a tool makes of two numbers: an answer, an error, or something that no model expects."""
    kind = crc32(repr((fuzz, a, b)).encode()) % 8
    if kind == 0:
        raise ValueError(f"no {a} today")
    if kind == 1:
        raise StopIteration
    answers = {2: None, 3: b"\xff", 4: {"a": a, 2: None}, 5: float("nan"), 6: "0123456789" * 20}
    return answers.get(kind, str(a + b))


class OddCounter(Counter):
    fuzz = 0

    def reset(self, prompt, **_columns) -> str | None:
        self.count = 0
        return None if len(prompt[-1]["content"]) % 2 else str(self.fuzz)

    def add(self, a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: one.
            b: the other.
        """
        self.count += 1
        return odd(self.fuzz, a, b)


def main(url: str, out: str, changes: str) -> None:
    vllm_client.is_vllm_available = vllm_generation.is_vllm_available = lambda: True
    settings = json.loads(changes)
    fuzz = settings.pop("fuzz")
    folder = Path(out)

    def add(a, b):
        with (folder / "tools").open("a") as file:
            file.write("begun\n")
        return odd(fuzz, a, b)

    named = {"tools": [named_add(add)]}
    if settings.pop("environments", False):
        OddCounter.fuzz = fuzz
        named = {"environment_factory": OddCounter}

    def reward(prompts, completions, environments=None, **_):
        counts = [environment.count for environment in environments or ()]
        row = [trainer.state.global_step, [prompts, completions, counts]]
        with (folder / f"trained_{trainer.accelerator.process_index}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        return digit_share(completions)

    trainer: EfficientGRPOTrainer = make_episodes(Server(url), out, named=named, reward=reward, **settings)
    trainer.train(resume_from_checkpoint="auto")
    rank = trainer.accelerator.process_index
    losses = {name: figures(trainer, name) for name in ("loss", "grad_norm", "tools/call_frequency")}
    (folder / f"done_{rank}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
