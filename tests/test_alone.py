"""The rooms of the core could be offered to TRL as they are: they need nothing else of the package."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import trl_fsdp_qlora

# The core and compat/; of errors.py the class.
PARTS = ("prefix_sharing", "scoring", "long_rows", "compat", "errors.py")
SCRIPT = """
import sys

sys.modules["trl_fsdp_qlora"] = None  # any import of it fails

import copy

import torch
from shared.prefix_sharing import install_sharing
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl.trainer.utils import add_fused_lm_head

torch.manual_seed(0)
sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, hidden_size=32)
stock = Qwen3ForCausalLM(Qwen3Config(vocab_size=67, intermediate_size=48, **sizes))
add_fused_lm_head(stock)
ours = copy.deepcopy(stock)
install_sharing(ours)

# Two prompts with three completions each. Prompts are padded on the left, completions on the right, as by TRL.
prompts = [torch.randint(1, 67, (length,)).tolist() for length in (14, 9)]
rows, masks, labels = [], [], []
for prompt in prompts:
    for length in (9, 4, 6):
        completion = torch.randint(1, 67, (length,)).tolist()
        before, after = 14 - len(prompt), 9 - length
        rows.append([0] * before + prompt + completion + [0] * after)
        masks.append([0] * before + [1] * (len(prompt) + length) + [0] * after)
        labels.append([-100] * 14 + completion + [-100] * after)
batch = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks), "labels": torch.tensor(labels)}
scored = batch["labels"][:, 1:] != -100

results = []
tokens = []
for model in (stock, ours):
    seen = []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0].numel()))
    for attempt in range(2):  # the first is compared with stock's, the second is not
        seen.clear()
        model.zero_grad()
        log_probs = model(**batch, fused_lm_head=True).log_probs[:, -scored.shape[1]:]
        (log_probs.exp() * scored).sum().backward()
        results.append((log_probs * scored, {name: value.grad for name, value in model.named_parameters()}))
    tokens.append(sum(seen))
(_, (expected, expected_grads), *others) = results
for log_probs, grads in others:
    # Float32 sums of a few tens of terms about one, in another order.
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-5)
# Each prompt once, and each completion without its last token, which predicts nothing.
assert tokens == [6 * 23, sum(map(len, prompts)) + 2 * (8 + 3 + 5)], tokens
"""


def test_sharing_equals_stock_with_the_core_alone(tmp_path):
    package = Path(trl_fsdp_qlora.__file__).parent
    alone = tmp_path / "shared"
    for part in PARTS:
        target = alone / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if (package / part).is_dir():
            shutil.copytree(package / part, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(package / part, target)
    (alone / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
