"""One of two ranks whose engine is a server: every fault, one after the other, and what this rank was told of it."""

import errno
import json
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator
from peft import get_peft_model
from trl.generation import vllm_client

from tests import tiny
from tests.distributed.launch import free_port
from trl_fsdp_qlora.compat.trl import SAMPLED_LOGPS
from trl_fsdp_qlora.compat.vllm import VLLMGeneration
from trl_fsdp_qlora.rollout.adapter_sync import AdapterVersions, RolloutError
from trl_fsdp_qlora.rollout.engine import AdapterEngine, _Serving
from trl_fsdp_qlora.rollout.stall import EngineStall
from trl_fsdp_qlora.rollout.watch import EngineWatch


def closed_port() -> str:
    return f"http://127.0.0.1:{free_port()}"


class Faults:
    """Each method is a fault; those that only one rank can notice happen on that rank alone."""

    def __init__(self, accelerator: Accelerator, out: str, right: str, refusing: str, without_lora: str, small: str):
        self.accelerator, self.out = accelerator, Path(out)
        self.right, self.refusing, self.without_lora, self.small = right, refusing, without_lora, small
        torch.manual_seed(0)
        self.policy = get_peft_model(tiny.tiny_model(), tiny.lora())

    def engine(self, url: str) -> AdapterEngine:
        return AdapterEngine(
            base="base",
            peft_config=self.policy.peft_config["default"],
            max_lora_rank=8,
            versions=AdapterVersions("faults", self.out),
            stall_timeout=0.4,
            model=self.policy,
            accelerator=self.accelerator,
            processing_class=None,
            mode="server",
            server_base_url=url,
            server_timeout=0.0,  # one try
        )

    def unreachable_for_one_rank(self):
        self.engine(self.right if self.accelerator.is_main_process else closed_port())

    def no_lora(self):
        self.engine(self.without_lora)

    def rank_too_small(self):
        self.engine(self.small)

    def no_room(self):
        engine = self.engine(self.right)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        engine.versions._write = full  # rank 0 writes
        engine.sync_weights()

    def folder_deleted(self):
        engine = self.engine(self.refusing)
        publish = engine.versions.publish

        def deleted(*given):
            folder = publish(*given)
            shutil.rmtree(folder)
            return folder

        engine.versions.publish = deleted
        engine.sync_weights()

    def killed_in_a_rollout(self):
        engine = self.engine(self.right)
        engine.sync_weights()
        engine.vllm_client.base_url = closed_port()
        engine.generate([[5, 6], [5, 6]], None, 2)

    def hangs_in_a_rollout(self):
        engine = self.engine(self.right)
        engine.sync_weights()
        engine.generate([[5, 6], [5, 6]], None, 2)

    def hangs_on_one_rank(self):
        """A colocated engine, of rank 1 alone; the other rank's has answered."""
        engine = self.engine(self.right)
        wait = threading.Event().wait if self.accelerator.process_index else bool
        llm = SimpleNamespace(llm_engine=SimpleNamespace(step=None), generate=lambda *_, **__: wait())
        engine.mode, engine.llm = "colocate", _Serving(llm, EngineStall(0.4, on_cpu=True))
        # TRL's own `generate` needs vLLM.
        stock, VLLMGeneration.generate = VLLMGeneration.generate, lambda self, *_: self.llm.generate([])
        try:
            engine.generate([[5, 6], [5, 6]], None, 2)
        finally:
            VLLMGeneration.generate = stock

    def another_base(self):
        """Rank 1 alone was given completions of another policy."""
        watch = EngineWatch(self.accelerator, keeps_versions=False)
        policy_BC = -torch.ones(2, 3)
        wrong = 0.0 if self.accelerator.is_main_process else 1.0
        inputs = {SAMPLED_LOGPS: policy_BC + wrong, "completion_mask": torch.ones(2, 3)}
        watch.judge(inputs, policy_BC, None, None)


def main(out: str, *urls: str) -> None:
    vllm_client.is_vllm_available = lambda: True  # for what is not used here
    slept = []
    time.sleep = slept.append
    faults = Faults(Accelerator(cpu=True), out, *urls)
    told = {}
    for name in (name for name, value in vars(Faults).items() if callable(value)):
        if name in ("__init__", "engine"):
            continue
        slept.clear()
        started = time.monotonic()
        try:
            getattr(faults, name)()
        except RolloutError as error:
            seconds = time.monotonic() - started + sum(slept)
            told[name] = {"kind": type(error).__name__, "error": str(error), "seconds": seconds}
    rank = faults.accelerator.process_index
    (Path(out) / f"rank{rank}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
