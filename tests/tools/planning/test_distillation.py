"""Plans of TRL's trainers with a teacher, against a loss and its backward on real tensors, by TRL's own trainers."""

import json
from dataclasses import replace

import pytest
import torch
import transformers as tf
import trl
from datasets import Dataset
from trl.experimental import sdft
from trl.experimental.sdft.teacher_sync import PEFTAdapterEMACallback

from tests.core.prefix_sharing.helpers import tokenizer
from tests.tools.planning.models import config, folder, words
from tests.tools.planning.models import in_4_bits as of_4_bits
from tests.tools.planning.test_passes import NEAR
from tests.tools.planning.test_plan import CPU
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.compat.memory import FakeTensorMode, PeakTracker, divergence_tiles_of
from trl_fsdp_qlora.experimental.losses_in_tiles import TiledSDFTTrainer, sum_over_tiles
from trl_fsdp_qlora.prefix_sharing.share import models_of
from trl_fsdp_qlora.prefix_sharing.sharing import causal_language_model
from trl_fsdp_qlora.tools.planning import fake_ops, passes
from trl_fsdp_qlora.tools.planning import plan as module
from trl_fsdp_qlora.tools.planning.plan import make_plan
from trl_fsdp_qlora.tools.planning.settings import Launch, Settings, from_words
from trl_fsdp_qlora.tools.recipe.checks import lora_config

PROMPT, PRIVILEGED = 48, 30
# In proportions of another model than the student's.
TEACHER = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 6}
CONFIGS = {"distillation": trl.DistillationConfig, "sdft": sdft.SDFTConfig}


def run_of(kind: str, path, divergence: float = 1.0, prefix_sharing: str = "auto", **changes) -> Settings:
    """A run with four completions to each prompt; `DistillationTrainer` has them if the data repeats a prompt."""
    line = words(path, **changes)
    for name in ("--beta", "--num_generations"):
        at = line.index(name)
        del line[at : at + 2]
    run = from_words(line, CONFIGS[kind], Launch(use_cpu=True), prompt_tokens=PROMPT, privileged_tokens=PRIVILEGED)
    further = {"num_generations": 4, "prefix_sharing": prefix_sharing}
    if kind == "distillation":
        further["beta"] = divergence
    return replace(run, values=run.values | further)


def saved(path, **changes) -> str:
    torch.manual_seed(0)
    tf.AutoModelForCausalLM.from_config(config(**changes), dtype=torch.float32).save_pretrained(path)
    return str(path)


def trainer_of(kind: str, run: Settings, student, out, **further):
    names = [
        "bf16",
        "per_device_train_batch_size",
        "max_completion_length",
        "gradient_checkpointing",
        "steps_per_generation",
    ]
    names += ["distillation_mode", "distillation_alpha", "distillation_topk", "teacher_model_kind"]
    names += ["num_generations"] if kind == "sdft" else ["beta"]
    fields = {name: run.values[name] for name in names if name in run.values}
    args = CONFIGS[kind](str(out), gradient_accumulation_steps=1, use_cpu=True, report_to="none", **fields)
    columns = {"prompt": ["A"]} if kind == "distillation" else {"prompt": ["A"], "privileged_context": ["B"]}
    cls = {"distillation": trl.DistillationTrainer, "sdft": TiledSDFTTrainer}[kind]
    if kind == "sdft" and run.prefix_sharing == "off":
        cls = sdft.SDFTTrainer
    return cls(
        model=student, args=args, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer(),
        peft_config=lora_config(run.model), **further,
    )  # fmt: skip


def batch_of(run: Settings, rows: int) -> dict[str, torch.Tensor]:
    """A micro-batch of groups of equal prompts, and completions of full length."""
    groups = -(-rows // run.num_generations)
    privileged, prompts = (
        torch.randint(3, 512, (groups, length)).repeat_interleave(run.num_generations, 0)[:rows]
        for length in (PRIVILEGED, PROMPT)
    )
    completions = torch.randint(3, 512, (rows, run.max_completion_length))
    teachers = torch.cat([privileged, prompts, completions], 1)
    batch = {"prompt": prompts, "completion": completions, "teacher_input": teachers}
    masks = ("prompt_mask", "completion_mask", "teacher_attention_mask")
    ids = {f"{name}_ids": x for name, x in batch.items()}
    return ids | {name: torch.ones_like(x) for name, x in zip(masks, ids.values(), strict=True)}


def measured_step(run: Settings, trainer) -> int:
    """Peak bytes of a loss and its backward, above the models and gradients that earlier micro-batches left."""
    batch = batch_of(run, run.rows)
    if run.prefix_sharing == "off":  # without padding stock TRL's attention would need no mask
        batch["prompt_mask"][0, 0] = 0
        batch["teacher_attention_mask"][0, 0] = 0
    share_prompts(trainer, attention="off" if run.prefix_sharing == "off" else "auto")
    model = trainer.model.train()
    if run.gradient_checkpointing:  # as `Trainer.train` does it
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    trainer.model_wrapped = trainer.accelerator.prepare_model(model)

    def step():
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, batch)
        loss.backward()

    trainer.current_gradient_accumulation_steps = 1
    with divergence_tiles_of(model.config.vocab_size):
        step()  # compares with stock, and leaves gradients
        if run.prefix_sharing != "off":
            assert all(causal_language_model(each).prompt_sharing.is_active for each in models_of(trainer))
        existing = [x for each in models_of(trainer) for x in (*each.parameters(), *each.buffers())]
        tracker = PeakTracker(*existing, *(parameter.grad for parameter in trained), *batch.values())
        before = tracker.now
        with tracker:
            step()
    return tracker.peak - before


WORDS = {"vocab_size": 8192}  # the loss is the peak of a step
WIDE = {"intermediate_size": 4096}  # the teacher's forward is
# Its hidden states are what the loss holds next to a few tiles.
BROAD = {"hidden_size": 1024, "intermediate_size": 128, "num_attention_heads": 4}
CHECKPOINTED = {"gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("changes", "of_both", "of_teacher"),
    [
        ({}, {}, {}),
        (CHECKPOINTED, {}, {}),
        ({"prefix_sharing": "off"}, {}, {}),
        ({"bf16": True}, {}, {}),  # which TRL's loss does not compute in
        ({"use_peft": False}, WORDS, {}),
        (CHECKPOINTED, WORDS, {}),
        (CHECKPOINTED | {"divergence": 0.5}, WORDS, {}),
        (CHECKPOINTED, {}, WIDE),
        (CHECKPOINTED, {"vocab_size": 1024}, BROAD),
    ],
)
def test_a_step_with_a_teacher_of_its_own_peaks_where_it_was_planned(tmp_path, changes, of_both, of_teacher):
    torch.manual_seed(0)
    students, teachers = config(**of_both), config(**of_both | TEACHER | of_teacher)
    student, teacher = (tf.AutoModelForCausalLM.from_config(x, dtype=torch.float32) for x in (students, teachers))
    teacher.save_pretrained(tmp_path / "teacher")
    path = folder(tmp_path / "student", **of_both)
    run = run_of("distillation", path, teacher_model_name_or_path=tmp_path / "teacher", **changes)
    trainer = trainer_of("distillation", run, student, tmp_path, teacher_model=teacher)
    planned = module._loss_bytes(run, students, None, False)
    assert planned == pytest.approx(measured_step(run, trainer), rel=NEAR)


@pytest.mark.parametrize(
    "changes",
    [
        {"distillation_mode": "full_logits"},
        {"distillation_mode": "full_logits", "gradient_checkpointing": True},
        {"distillation_mode": "full_logits", "prefix_sharing": "off"},
        {"distillation_mode": "full_logits", "gradient_checkpointing": True, "bf16": True},
        {"distillation_mode": "topk_logits", "gradient_checkpointing": True},
        {"distillation_mode": "sampled_token", "distillation_alpha": 1.0, "prefix_sharing": "off"},
        {"distillation_mode": "full_logits", "use_peft": False},
    ],
)
def test_a_step_of_a_model_that_teaches_itself_peaks_where_it_was_planned(tmp_path, changes, monkeypatch):
    """With the loss in tiles of 64 tokens, or stock TRL's on whole logits."""
    monkeypatch.setattr(sum_over_tiles, "TILE_ELEMENTS", 64 * 8192)
    run = run_of("sdft", saved(tmp_path, **WORDS), **changes)
    trainer = trainer_of("sdft", run, tf.AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path)
    planned = module._loss_bytes(run, config(**WORDS), None, False)
    assert planned == pytest.approx(measured_step(run, trainer), rel=NEAR)


def test_old_log_probabilities_are_scored_for_all_micro_batches_at_once(tmp_path):
    run = run_of("sdft", saved(tmp_path), per_device_train_batch_size=4, steps_per_generation=2)
    assert run.scores_again
    trainer = trainer_of("sdft", run, tf.AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path)
    batch = batch_of(run, rows=8)
    share_prompts(trainer)
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")

    def score():
        trainer._compute_rollout_logps(**{name: batch[name] for name in names})

    score()
    tracker = PeakTracker(*trainer.model.parameters(), *trainer.model.buffers(), *batch.values())
    before = tracker.now
    with tracker:
        score()
    shape = passes.scored_shape(run, False)
    assert shape.packed and shape.returned == (8, run.max_completion_length + 1)
    assert passes.measure(run, config(), shape, False) == pytest.approx(tracker.peak - before, rel=NEAR)


def test_a_copy_a_mean_of_adapters_and_a_teacher_of_its_own_hold_what_trl_makes(tmp_path):
    Params4bit = pytest.importorskip("bitsandbytes").nn.Params4bit
    path = saved(tmp_path)
    for changes in ({"use_peft": False}, {"teacher_model_kind": "ema"}, {"teacher_model_kind": "base"}):
        run = run_of("sdft", path, **changes)
        trainer = trainer_of("sdft", run, tf.AutoModelForCausalLM.from_pretrained(path), tmp_path)
        further = []
        if trainer.teacher_model is not trainer.model:
            further = [*trainer.teacher_model.parameters(), *trainer.teacher_model.buffers()]
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, PEFTAdapterEMACallback):
                callback.on_train_begin(trainer.args, trainer.state, trainer.control)
                further = [x for name, x in trainer.model.named_parameters() if ".teacher." in name]
                further += callback.shadow_weights.values()
        assert bool(further) == (changes != {"teacher_model_kind": "base"})
        assert make_plan(run, CPU).teacher.held == sum(x.nbytes for x in further)
    run = run_of("distillation", path, teacher_model_name_or_path=path)
    teacher = tf.AutoModelForCausalLM.from_pretrained(path)
    whole = sum(x.nbytes for x in (*teacher.parameters(), *teacher.buffers()))
    assert make_plan(run, CPU).teacher.held == whole
    in_4_bits = '{"dtype": "float32", "quantization_config": {"load_in_4bit": true}}'
    loaded = replace(run, values=run.values | {"teacher_model_init_kwargs": in_4_bits})
    teacher = of_4_bits(path, nested=False)
    state = sum(x.quant_state.absmax.nbytes for x in teacher.parameters() if isinstance(x, Params4bit))
    packed = sum(x.nbytes for x in (*teacher.parameters(), *teacher.buffers())) + state
    assert make_plan(loaded, CPU).teacher.held == packed < 0.5 * whole
    # TRL shards a copy of the model under FSDP2, in one unit, and leaves a teacher of its own whole.
    two = Launch("fsdp2", 2)
    assert make_plan(replace(run, launch=two), CPU).teacher.held == whole
    copy = make_plan(replace(run_of("sdft", path, use_peft=False), launch=two), CPU).teacher
    assert copy.held == -(-whole // 2) and copy.gathered > 0.99 * whole


def test_on_a_gpu_the_divergence_takes_two_tiles_of_logits_in_place():
    with FakeTensorMode():
        student, teacher = (torch.empty(5000, width, requires_grad=width == 64) for width in (64, 96))
        heads = [torch.empty(70000, width) for width in (64, 96)]
        with PeakTracker(student, teacher, *heads) as tracker:
            before = tracker.now
            divergence = fake_ops.Divergence.apply(student, heads[0], teacher, heads[1])
            assert tracker.peak - before == pytest.approx(2 * 4096 * 32768 * 4, rel=0.001)
            tracker.peak = tracker.now
            divergence.sum().backward()
        # The gradient of the hidden states is float32.
        assert tracker.peak - before == pytest.approx(2 * 4096 * 32768 * 4 + 5000 * 64 * 4, rel=0.001)


def test_the_recipes_with_a_teacher_are_planned(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder("runs/small-base")
    folder("runs/quickstart-merged", **TEACHER)

    def planned(recipe: str, *words: str) -> str:
        assert main(["plan", "--config", recipe, *words]) == 0
        return capsys.readouterr().out

    distillation = "small-base/distillation/quickstart"
    plan = json.loads(planned(distillation, "--prompt_tokens", "24", "--hardware", "24GB", "--json"))
    assert all("teacher" in parts for parts in plan["phases"].values())
    # Prompts of 24 tokens and 6 of a completion, in which nothing is known to be common.
    assert plan["teacher"]["name"] == "runs/quickstart-merged" and plan["teacher"]["call"]["padded"] == 128 * 30

    sizes = ("--prompt_tokens", "100", "--privileged_tokens", "20", "--solve")
    text = planned("SmolLM2-135M-Instruct/sdft/basic_arithmetic", "--model_name_or_path", "runs/small-base", *sizes)
    # Four prompts, each of which is computed once, and four completions of five tokens to each.
    tokens = 4 * 100 + 16 * 5
    assert f"16 completions in 1 pass, 1 forward without gradients: {tokens} tokens, {16 * 105:,} in stock" in text
    assert (
        f"without its adapter; it reads {tokens + 4 * 20} tokens of a micro-batch, {16 * 125:,} in stock TRL" in text
    )
    assert "largest that fits: per_device_train_batch_size" in text

    with open("sdpo.yaml", "w", encoding="utf-8") as recipe:
        recipe.write(
            "model_name_or_path: runs/small-base\nreprompt_template: '{prompt}'\nuse_cpu: true\nbf16: false\n"
        )
    assert main(["plan", "--config", "sdpo.yaml", "--trainer", "sdpo", "--max_completion_length", "8"]) == 0
    assert "teacher: a copy of the model, " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--config", "sdpo.yaml", "--trainer", "kto"])
    assert "--trainer kto: plan knows grpo, " in capsys.readouterr().err

    with pytest.raises(SystemExit):
        planned(distillation, "--teacher_model_name_or_path", "none-here")
    assert "teacher_model_name_or_path='none-here'" in capsys.readouterr().err
