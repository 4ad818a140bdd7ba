"""Images in prompts, packed once per prompt, against TRL's padded pass over pixels that are there once per completion."""

import functools
import inspect
import itertools
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
import transformers as tf
from datasets import Dataset
from peft import LoraConfig
from PIL import Image, ImageDraw
from trl import GRPOTrainer

from tests.distributed.launch import launch
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.compat.trl import joined_images, split_pixel_values_by_grid
from trl_fsdp_qlora.grpo.groups import micro_batches
from trl_fsdp_qlora.prefix_sharing import images
from trl_fsdp_qlora.prefix_sharing import sharing as prefix_sharing
from trl_fsdp_qlora.scoring.request import Kind, PassRequest

from .helpers import (
    _LINEAR,
    _MROPE,
    _QWEN_TOWER,
    MULTIMODAL,
    assert_equal_gradients,
    build,
    gradients,
    llava_processor,
    make_trainer,
    prepared,
    sees,
    tokenizer,
    with_stock_head,
)

IMAGE, COMPLETION = 60, 7
# Of each row: its group, the tokens of its prompt before, between and behind images, images' sizes, and its completion's length.
# Groups 0 and 1 have the same text and sizes, and other pixels; group 2 no image; group 3 two images; group 4 is one row.
TEXT = {0: (3, 4), 1: (3, 4), 2: (6,), 3: (2, 1, 3), 4: (1, 5)}
ROWS = [(0, 7), (0, 1), (0, 5), (1, 4), (1, 7), (2, 3), (2, 6), (3, 2), (3, 7), (3, 0), (4, 6)]


def patches(size, draw):
    """Of Qwen-VL and GLM-4V: rows of patches, and a grid."""
    height, width = size
    pixels = torch.randn(height * width, 3 * 2 * 4 * 4, generator=draw)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}


def located_patches(size, draw):
    """Of Gemma 4: patches, nine to a token and filled up to the largest image's, beside their places."""
    places = torch.cartesian_prod(torch.arange(3 * size[0]), torch.arange(3 * size[1])).flip(1)
    places = torch.cat([places, places.new_full((36 - len(places), 2), -1)])[None]
    return {"pixel_values": torch.rand(1, 36, 3 * 16 * 16, generator=draw), "image_position_ids": places}


def squares(side, *crops, sizes=False):
    """Of LLaVA's kind: one picture of a fixed size per image, or several crops of it."""

    def image(_size, draw):
        more = {"image_sizes": torch.tensor([[side, side]])} if sizes else {}
        return {"pixel_values": torch.randn(1, *crops, 3, side, side, generator=draw), **more}

    return image


SIZES = {0: [(4, 4)], 1: [(4, 4)], 2: [], 3: [(2, 4), (4, 6)], 4: [(4, 2)]}
# Of a class that pads each row to as many pictures as the row with most of them has.
IDEFICS = {"smolvlm", "idefics3"}
MORE = {
    "qwen2_vl": sees("Qwen2VL", rope_parameters=_MROPE, tower={"patch_size": 4}),
    "qwen3_vl_moe": sees("Qwen3VLMoe", rope_parameters=_MROPE, tower=_QWEN_TOWER),
    "qwen3_5_moe": sees("Qwen3_5Moe", layer_types=_LINEAR, tower=_QWEN_TOWER),
    "llava": sees("Llava", vision_feature_layer=-1),
    "llava_onevision": sees("LlavaOnevision", image_grid_pinpoints=[[16, 16]], vision_feature_layer=-1),
    "idefics3": sees("Idefics3", scale_factor=2),
}
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v")
# An image of a size as `{argument: tensor with one entry per image or patch}`, sizes by group, and what tokens' types are called.
FAMILIES = {
    **dict.fromkeys(QWEN, (patches, SIZES, "mm_token_type_ids")),
    **dict.fromkeys(("internvl", "llava", "smolvlm", "idefics3"), (squares(16), SIZES, None)),
    "mistral3": (squares(32, sizes=True), SIZES, None),
    "llava_onevision": (squares(16, 2, sizes=True), SIZES, None),
    "gemma3": (squares(16), SIZES, "token_type_ids"),
    "gemma4": (
        located_patches,
        {0: [(1, 2)], 1: [(1, 2)], 2: [], 3: [(2, 1), (2, 2)], 4: [(1, 2)]},
        "mm_token_type_ids",
    ),
}


def with_images(name, seed=0):
    """A small model of a family with a batch: `(model, input_ids, attention_mask, vision)`."""
    make_image, sizes, token_types = FAMILIES[name]
    model = build(MULTIMODAL.get(name) or MORE[name])
    if name == "gemma4":  # as its larger sizes do
        model.config.text_config.use_bidirectional_attention = "vision"
    for attribute in ("image_token_id", "image_token_index"):
        if hasattr(model.config, attribute):
            setattr(model.config, attribute, IMAGE)
    draw = torch.Generator().manual_seed(seed)
    prompts, images, words = {}, {}, []
    for group, text in TEXT.items():
        images[group] = [make_image(size, draw) for size in sizes[group]]
        if name in IDEFICS:
            images[group] = [{"pixel_values": one["pixel_values"].unsqueeze(0)} for one in images[group]]
        if group != 1:  # groups 0 and 1 ask the same of other pictures
            words = [torch.randint(3, 50, (n,), generator=draw).tolist() for n in text]
        prompts[group] = list(words[0])
        for fields, more in zip(images[group], words[1:], strict=True):
            with torch.no_grad():  # as many tokens as the tower gives features
                features = model.base_model.get_image_features(**fields, return_dict=True).pooler_output
            prompts[group] += [IMAGE] * sum(map(len, features)) + more
    width = max(map(len, prompts.values()))
    ids = torch.randint(3, 50, (len(ROWS), width + COMPLETION), generator=draw)
    mask = torch.zeros_like(ids)
    for row, (group, length) in enumerate(ROWS):
        ids[row, width - len(prompts[group]) : width] = torch.tensor(prompts[group])
        mask[row, width - len(prompts[group]) : width + length] = 1
    counts = [len(images[group]) for group, _ in ROWS]
    every = [fields for group, _ in ROWS for fields in images[group]]
    vision = {"num_images": counts, **{key: torch.cat([fields[key] for fields in every]) for key in every[0]}}
    if name in IDEFICS:
        pixels = torch.zeros(len(ROWS), max(counts), *vision["pixel_values"].shape[2:])
        pixels[torch.arange(max(counts)) < torch.tensor(counts)[:, None]] = vision["pixel_values"][:, 0]
        vision["pixel_values"] = pixels
        vision["pixel_attention_mask"] = torch.ones(len(ROWS), max(counts), *pixels.shape[3:], dtype=torch.long)
    if token_types:
        vision[token_types] = ((ids == IMAGE) & (mask == 1)).int()
    return model, ids, mask, vision


class Stock:
    """TRL's own padded pass, as a method of what it needs of its trainer."""

    def __init__(self, model):
        self.accelerator = self
        self.model = with_stock_head(model)

    def autocast(self):
        return torch.autocast("cpu", enabled=False)

    def __call__(self, request):
        run = inspect.unwrap(GRPOTrainer._get_per_token_logps_and_entropies)
        return request.padded(lambda model, *args, **kwargs: run(self, model, *args, **kwargs))


def freeze_tower(model):
    decoder = {id(p) for p in [*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()]}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in decoder)


def pictured(name, frozen=False):
    """A small model under prefix sharing, a request for its batch, and stock's pass."""
    model, ids, mask, vision = with_images(name)
    if frozen:
        freeze_tower(model)
    request = PassRequest(Kind.POLICY, model).on(ids, mask, COMPLETION, **vision)
    return request, prepared(model, expects_images=True), Stock(model)


def scored(request, run):
    """Log-probabilities and gradients of a pass, and whether any reached the tower."""
    logps_BC = run(request)[0]
    weight = torch.linspace(0.3, 1.7, logps_BC.numel()).view_as(logps_BC)
    kept = torch.where(request.attention_mask[:, -COMPLETION:].bool(), logps_BC, 0.0)
    (kept * weight).sum().backward()
    named = request.model.named_parameters()
    tower = sum(p.grad.abs().sum() for n, p in named if "vis" in n and p.grad is not None)
    return kept.detach(), gradients(request.model), bool(tower)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_stock(name, frozen):
    request, sharing, stock = pictured(name, frozen)
    expected, wanted, _ = scored(request, stock)
    figures = {}

    def packed(request):
        values, found = sharing.log_probs(request, stock)
        figures.update(found)
        return values

    found, ours, reached_tower = scored(request, packed)
    assert figures.get("tokens_fraction", 1) < 0.6, sharing._models["policy"].images.reason
    assert (found - expected).abs().max() <= 1e-4
    assert_equal_gradients(ours, wanted, tolerance=2e-5)
    assert reached_tower != frozen
    values, figures = sharing.log_probs(replace(request, scored_BC=torch.zeros_like(found).bool()), stock)
    assert figures and not values[0].any()


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_a_frozen_tower_sees_each_image_once_in_all_passes_of_a_generation_batch(name, monkeypatch):
    request, sharing, stock = pictured(name, frozen=True)
    if "mm_encoder_outputs" not in inspect.signature(type(request.model).forward).parameters:
        pytest.skip("this transformers takes no features of images")
    sharing.log_probs(request, stock)  # with the comparison of the first pass
    sharing.forget_images()
    seen, inner = [], request.model.base_model
    run = inner.get_image_features

    @functools.wraps(run)  # whose parameters are looked at
    def counted(*args, **kwargs):
        seen.append(kwargs["pixel_values"])
        return run(*args, **kwargs)

    monkeypatch.setattr(inner, "get_image_features", counted)
    with torch.no_grad():
        whole, _ = sharing.log_probs(replace(request, kind=Kind.OLD), stock)
        cut, _ = sharing.log_probs(replace(request, kind=Kind.OLD, batch_size=4), stock)
    for rows in ([0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]):
        values, figures = sharing.log_probs(request.rows(rows), stock)
        assert figures and (values[0] - whole[0][rows]).abs().max() <= 1e-5
        values[0].sum().backward()
    assert (cut[0] - whole[0]).abs().max() <= 1e-5
    kept = sharing._models["policy"].images.features
    assert len(seen) == len(kept) == 4  # prompts with images; of five groups one has none
    monkeypatch.setattr(images, "FEATURE_BYTES", 1)
    values, _ = sharing.log_probs(request, stock)
    assert torch.equal(values[0], whole[0]) and len(kept) == 1
    sharing.forget_images()
    assert not kept


@pytest.mark.processes
def test_two_ranks_equal_one_process():
    launch(Path(__file__).with_name("ranks_worker.py"), "images", timeout=360)


def test_the_same_words_about_another_picture_are_another_prompt():
    *_, vision = with_images("qwen3_vl")
    numbers = images.fingerprints(vision)
    same = [(a == b).all().item() for a, b in itertools.pairwise(numbers)]
    assert same == [a[0] == b[0] for a, b in itertools.pairwise(ROWS)]
    changed = {**vision, "pixel_values": vision["pixel_values"].clone()}
    changed["pixel_values"][5, 7] += 1e-6  # the last bits of one number
    assert not torch.equal(images.fingerprints(changed)[0], numbers[0])
    assert torch.equal(images.fingerprints(changed)[1:], numbers[1:])


def boards():
    """All boards of tic-tac-toe after two moves of each player, as pictures: equal shapes, in other places."""
    for crosses in itertools.combinations(range(9), 2):
        for circles in itertools.combinations(sorted({*range(9)} - {*crosses}), 2):
            picture = Image.new("RGB", (84, 84), "white")
            draw = ImageDraw.Draw(picture)
            for field in (*crosses, *circles):
                x, y = 28 * (field % 3), 28 * (field // 3)
                if field in crosses:
                    draw.line((x + 5, y + 5, x + 22, y + 22), "black", 3)
                    draw.line((x + 5, y + 22, x + 22, y + 5), "black", 3)
                else:
                    draw.ellipse((x + 5, y + 5, x + 22, y + 22), outline="black", width=3)
            yield picture


READERS = {
    "qwen2_vl": lambda: tf.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=84 * 84),
    "llava": lambda: tf.CLIPImageProcessorPil(size={"shortest_edge": 84}, crop_size={"height": 84, "width": 84}),
}


@pytest.mark.parametrize("name", READERS)
def test_no_two_boards_of_tic_tac_toe_count_as_one(name):
    """By sums of their bits 756 of them had 357 fingerprints, and training put one board's pixels in another's place."""
    pictures = list(boards())
    vision = READERS[name]()(images=pictures, return_tensors="pt") | {"num_images": [1] * len(pictures)}
    assert len(torch.unique(images.fingerprints(dict(vision)), dim=0)) == len(pictures) == 756
    # Two of them in a prompt, in both orders: whose pixels a micro-batch has.
    pairs = [(2 * i, 2 * i + 1) for i in range(378)]
    both_ways = [pictures[i] for a, b in pairs[:20] for i in (a, b, b, a)]
    flipped = {"prompt_ids": torch.arange(40), "num_images": [2] * 40}
    flipped |= READERS[name]()(images=both_ways, return_tensors="pt")
    assert len(torch.unique(images.fingerprints(flipped), dim=0)) == 40
    (batch,) = micro_batches(flipped, 1, rank=0, count=1)
    assert torch.equal(images.fingerprints(joined_images(batch)), batch["image_keys"])
    pixels = split_pixel_values_by_grid(flipped)["pixel_values"]
    assert all(torch.equal(x, pixels[i]) for x, i in zip(batch["pixel_values"], batch["prompt_ids"], strict=True))


def test_the_cut_of_an_image_is_part_of_its_fingerprint():
    """Of a frozen tower's features, kept by it, a wide white picture gets those of a high one no more."""
    keys = [
        images.fingerprints({"pixel_values": torch.ones(1, 3, *size), "num_images": [1]}) for size in ((2, 8), (4, 4))
    ]
    grids = [torch.tensor([[1, 2, 4]]), torch.tensor([[1, 4, 2]])]
    keys += [
        images.fingerprints({"pixel_values": torch.ones(8, 6), "image_grid_thw": x, "num_images": [1]}) for x in grids
    ]
    assert len(torch.unique(torch.cat(keys))) == 4


def test_an_image_in_a_completion_runs_padded(caplog):
    request, sharing, stock = pictured("qwen3_vl")
    sharing.log_probs(request, stock)
    changed, asked = request.input_ids.clone(), []
    changed[0, -COMPLETION] = IMAGE
    result = sharing.log_probs(replace(request, input_ids=changed), lambda few: asked.append(few) or stock(request))
    assert asked and not result.figures
    assert "an image's token stands at a prompt's end or in a completion" in caplog.text


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_the_tokens_of_an_image_see_each_other(name, monkeypatch):
    """Of Gemma: with a causal mask log-probabilities are others, and the comparison of the first pass says so."""
    monkeypatch.setattr(images, "own_masks", lambda *_: {})
    request, sharing, stock = pictured(name)
    values, figures = sharing.log_probs(request, stock)
    assert not figures and torch.equal(values[0], stock(request)[0])
    assert "difference in log-probability" in sharing._models["policy"].images.reason


def test_the_comparison_of_the_first_pass_takes_rows_with_images():
    """Not only the first and last rows, which may be the text beside them."""
    model, ids, mask, vision = with_images("qwen3_vl")
    request = PassRequest(Kind.POLICY, model).on(ids, mask, COMPLETION, **vision)
    # Rows 5 and 6 are of a prompt without images.
    for rows, taken in (
        ([5, 6, 5, 6, 0, 1, 5, 6, 5, 6], [0, 1, 5, 6]),
        ([0, 1, 5, 6, 5, 6], [0, 1, 5, 6]),
        ([5, 6, 5, 6, 0], [6, 5, 6, 0]),
    ):
        assert torch.equal(request.rows(rows).subsample(4).input_ids, ids[taken])


def test_ranks_ask_each_other_for_images_once_per_generation_batch(monkeypatch):
    """With tools a vision class asked in every pass until an image came, and the host waited each time."""
    request, sharing, stock = pictured("qwen3_vl")
    text, asked, reduced = request.rows([5, 6]), [], prefix_sharing.reduced_over_ranks
    monkeypatch.setattr(prefix_sharing, "reduced_over_ranks", lambda *args: asked.append(1) or reduced(*args))

    def exchanges(request):
        asked.clear()
        assert sharing.log_probs(request, stock)[1]
        return len(asked)

    assert exchanges(text) > 1  # a few rows are compared
    assert exchanges(text) == 1
    sharing.look_for_images(False, text.input_ids.device)
    assert [exchanges(text) for _ in range(2)] == [0, 0]
    sharing.forget_images()
    assert exchanges(text) == 1  # of the passes while completions are drawn
    sharing.look_for_images(True, text.input_ids.device)
    assert exchanges(text) == 1 and exchanges(request) > 1
    assert exchanges(text) == exchanges(request) == 0


# Of the language model: nothing of the tower is trained.
ADAPTER = LoraConfig(r=4, target_modules=r".*language_model.*\.(q|v|down)_proj", init_lora_weights=False)


def llava_trainer(cls, folder, **config):
    """GRPO of a small LLaVA on pictures, its prompts of TRL's conversational kind, without a file anywhere."""
    tokens = tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": ["<image>"]})
    model = build(MORE["llava"])
    model.config.image_token_id = tokens.convert_tokens_to_ids("<image>")
    model.resize_token_embeddings(len(tokens))
    rng = numpy.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=numpy.uint8)) for _ in range(8)]
    rows = {
        "prompt": [[{"role": "user", "content": "A+B=" if i % 2 else "CD"}] for i in range(8)],
        "image": pictures,
    }
    return make_trainer(cls, model, folder, ADAPTER, llava_processor(tokens), Dataset.from_dict(rows), **config)


def test_training_on_pictures_equals_stock(tmp_path):
    runs = []
    for cls in (GRPOTrainer, EfficientGRPOTrainer):
        torch.manual_seed(0)
        trainer = llava_trainer(cls, tmp_path, max_steps=4, beta=0.1, num_iterations=2, shuffle_dataset=False)
        trainer.train()
        wanted = ("loss", "grad_norm", "kl")
        runs.append([{key: row[key] for key in wanted if key in row} for row in trainer.state.log_history])
    figures = [row.get("prefix_sharing/policy/tokens_fraction", 0.0) for row in trainer.state.log_history]
    assert all(0 < figure < 0.8 for figure in figures[:4])
    for mine, theirs in zip(*runs, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    # A generation batch holds each of its two pictures once.
    parts = [x.untyped_storage() for part in trainer._buffered_inputs for x in part["pixel_values"]]
    held = {storage.data_ptr(): storage.nbytes() for storage in parts}
    assert len(held) == 2 and sum(held.values()) == 2 * 3 * 16 * 16 * 4
