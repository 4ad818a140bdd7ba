"""Preference pairs of a model's own answers: `python examples/preference_pairs.py --dataset SVAMP.json`.

They are what the recipe SmolLM2-135M-Instruct/dpo/svamp_pairs trains on. A right answer is preferred to a wrong one;
if no answer is right, the dataset's worked answer is preferred. Needs the extra `[tools]`.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_fsdp_qlora.tools.data.answers import answers_match, extract_answer, parse_gold
from trl_fsdp_qlora.tools.data.datasets import hold_out, read_problems, to_prompts
from trl_fsdp_qlora.tools.data.worked import worked

# As in the recipe, which measures accuracy on the problems that are held out.
TEMPLATE = "{question}\nThink step by step, then give the answer as a number after ####."

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--dataset", default="ChilleD/SVAMP")
parser.add_argument("--held-out", type=int, default=300)
parser.add_argument("--problems", type=int, help="this many of the others; by default all")
parser.add_argument("--samples", type=int, default=4, help="answers to each problem")
parser.add_argument("--output", type=Path, default="runs/smollm2-svamp-pairs.jsonl")
options = parser.parse_args()


def preferred(problem, texts):
    """A right and a wrong answer to a problem; `None` in place of one that is missing."""
    gold = parse_gold(problem["answer"], problem["row"])
    right = [text for text in texts if answers_match(extract_answer(text, "auto", gold), gold)]
    wrong = [text for text in texts if text and text not in right]
    return random.choice(right or [worked(problem["columns"])]), random.choice(wrong or [None])


def said(text):
    return [{"role": "assistant", "content": text}]


train, _ = hold_out(read_problems(options.dataset, "train+test", whole_rows=True), options.held_out)
train = train[: options.problems]
prompts = to_prompts(train, template=TEMPLATE)["prompt"]
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(options.model).to(device)
sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 64}
sampling["num_return_sequences"] = options.samples
framing = {"add_generation_prompt": True, "padding": True, "return_dict": True, "return_tensors": "pt"}
torch.manual_seed(0)
random.seed(0)

texts = []
for first in range(0, len(train), 16):
    inputs = tokenizer.apply_chat_template(prompts[first : first + 16], **framing).to(device)
    answers = model.generate(**inputs, **sampling)[:, inputs["input_ids"].shape[1] :]
    texts += [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]

pairs = []
for i, problem in enumerate(train):
    chosen, rejected = preferred(problem, texts[i * options.samples : (i + 1) * options.samples])
    if chosen is not None and rejected is not None:
        pairs.append({"prompt": prompts[i], "chosen": said(chosen), "rejected": said(rejected)})

options.output.parent.mkdir(parents=True, exist_ok=True)
options.output.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
print(f"{len(pairs)} pairs of {len(train)} problems are in {options.output}")
