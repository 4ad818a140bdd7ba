"""A loop without a trainer: draw, reward, score, step. `python examples/loop.py --model Qwen/Qwen3-0.6B`.

`share_prompts(model, outputs=("log_probs",))` gives any causal language model of transformers TRL's head: a forward
with `labels` and `fused_lm_head=True` returns the log-probability of every labelled token, each shared token computed
once.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_fsdp_qlora import share_prompts

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device)
model = share_prompts(model, outputs=("log_probs",))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

for step in range(options.steps):
    a = 10 + step % 50
    b = 37
    prompt = tokenizer(f"17+25=42\n31+18=49\n{a}+{b}=", return_tensors="pt").to(device)
    length = prompt["input_ids"].shape[1]
    with torch.no_grad():
        rows = model.generate(**prompt, do_sample=True, num_return_sequences=8, max_new_tokens=6)
    texts = tokenizer.batch_decode(rows[:, length:], skip_special_tokens=True)
    rewards = torch.tensor([float(str(a + b) in text) - 0.01 * len(text) for text in texts], device=device)

    labels = rows.clone()
    labels[:, :length] = -100  # the prompt is not scored
    ended = (labels == tokenizer.eos_token_id).int()
    after_the_end = (ended.cumsum(1) - ended).bool()
    labels[after_the_end] = -100
    mask = (~after_the_end).long()
    log_probs = model(input_ids=rows, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs
    loss = -((rewards - rewards.mean()) * log_probs.sum(1)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: reward {rewards.mean().item():.3f}, loss {loss.item():.3f}")
