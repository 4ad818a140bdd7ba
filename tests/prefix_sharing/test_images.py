"""Images in prompts, packed once per prompt, compared with TRL's padded pass, which has them once per completion.

Covers `prefix_sharing/image_keys.py`.
"""

import functools
import inspect
import itertools

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from tests.tiny import these_first
from trl_fsdp_qlora.compat.trl import rows_of_images
from trl_fsdp_qlora.prefix_sharing import image_keys, images, passes
from trl_fsdp_qlora.prefix_sharing import sharing as sharing_module
from trl_fsdp_qlora.prefix_sharing.batch import Batch, Instructions
from trl_fsdp_qlora.prefix_sharing.compared_rows import compared_rows
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing
from trl_fsdp_qlora.prefix_sharing.status import CannotPack, Scope

from .helpers import (
    LINEAR,
    MROPE,
    MULTIMODAL,
    QWEN_TOWER,
    assert_equal_gradients,
    build,
    closed,
    completion_labels,
    counting_padded_forwards,
    gradients,
    prepared,
    sees,
    with_stock_head,
)

IMAGE = 60
COMPLETION = 7
# Of each row: its group, the tokens of its prompt before, between and behind images, images' sizes, and its
# completion's length. Groups 0 and 1 have the same text and sizes, and other pixels; group 2 no image; group 3 two
# images; group 4 is one row.
TEXT = {0: (3, 4), 1: (3, 4), 2: (6,), 3: (2, 1, 3), 4: (1, 5)}
ROWS = [(0, 7), (0, 1), (0, 5), (1, 4), (1, 7), (2, 3), (2, 6), (3, 2), (3, 7), (3, 0), (4, 6)]


def patches(size, draw):
    """Of Qwen-VL and GLM-4V: rows of patches, and a grid."""
    height, width = size
    pixels = torch.randn(height * width, 3 * 2 * 4 * 4, generator=draw)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}


def located_patches(size, draw):
    """Of Gemma 4: patches, nine to a token and filled up to the largest image's, with their places."""
    places = torch.cartesian_prod(torch.arange(3 * size[0]), torch.arange(3 * size[1])).flip(1)
    places = torch.cat([places, places.new_full((36 - len(places), 2), -1)])[None]
    return {"pixel_values": torch.rand(1, 36, 3 * 16 * 16, generator=draw), "image_position_ids": places}


def squares(side, *crops, sizes=False):
    """Of LLaVA's kind: one picture of a fixed size per image, or several crops of it."""

    def image(_size, draw):
        options = {"image_sizes": torch.tensor([[side, side]])} if sizes else {}
        return {"pixel_values": torch.randn(1, *crops, 3, side, side, generator=draw), **options}

    return image


SIZES = {0: [(4, 4)], 1: [(4, 4)], 2: [], 3: [(2, 4), (4, 6)], 4: [(4, 2)]}
# Of a class that pads each row to as many pictures as the row with most of them has.
IDEFICS = {"smolvlm", "idefics3"}
MORE = {
    "qwen2_vl": sees("Qwen2VL", rope_parameters=MROPE, tower={"patch_size": 4}),
    "qwen3_vl_moe": sees("Qwen3VLMoe", rope_parameters=MROPE, tower=QWEN_TOWER),
    "qwen3_5_moe": sees("Qwen3_5Moe", layer_types=LINEAR, tower=QWEN_TOWER),
    "llava": sees("Llava", vision_feature_layer=-1),
    "llava_onevision": sees("LlavaOnevision", image_grid_pinpoints=[[16, 16]], vision_feature_layer=-1),
    "idefics3": sees("Idefics3", scale_factor=2),
}
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v")
# An image of a size as `{argument: tensor with one entry per image or patch}`, sizes by group, and what tokens' types
# are called.
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


# In `make test`: patches, squares, several crops, padded rows of pictures, and tokens that see each other.
first_families = pytest.mark.parametrize(
    "name", these_first(FAMILIES, "qwen3_vl", "llava", "llava_onevision", "smolvlm", "gemma3", "gemma4")
)


def with_images(name, seed=0):
    """A small model of a family with a batch."""
    make_image, sizes, token_types = FAMILIES[name]
    model = build(MULTIMODAL.get(name) or MORE[name])
    if name == "gemma4":  # as its larger sizes do
        model.config.text_config.use_bidirectional_attention = "vision"
    for attribute in ("image_token_id", "image_token_index"):
        if hasattr(model.config, attribute):
            setattr(model.config, attribute, IMAGE)
    draw = torch.Generator().manual_seed(seed)
    prompts = {}
    images = {}
    words = []
    for group, text in TEXT.items():
        images[group] = [make_image(size, draw) for size in sizes[group]]
        if name in IDEFICS:
            images[group] = [{"pixel_values": one["pixel_values"].unsqueeze(0)} for one in images[group]]
        if group != 1:  # groups 0 and 1 ask the same of other pictures
            words = [torch.randint(3, 50, (n,), generator=draw).tolist() for n in text]
        prompts[group] = list(words[0])
        for fields, options in zip(images[group], words[1:], strict=True):
            with torch.no_grad():  # as many tokens as the tower gives features
                features = model.base_model.get_image_features(**fields, return_dict=True).pooler_output
            prompts[group] += [IMAGE] * sum(map(len, features)) + options
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
    num_images = vision.pop("num_images")
    return model, Batch(ids, mask, completion_labels(ids, mask, COMPLETION), vision, num_images)


def stock(model, batch: Batch):
    """TRL's own padded pass over a batch, from a model with its head."""
    arguments = batch.arguments()
    if "pixel_values" in arguments and not len(arguments["pixel_values"]):
        arguments = {name: x for name, x in arguments.items() if name not in images.PER_IMAGE}
    return model(**arguments, fused_lm_head=True)


def packed(model, sharing: PromptSharing, batch: Batch, **options):
    """The same by prompt sharing, as a trainer does it: images counted by it."""
    instructions = Instructions(num_images=batch.num_images, **options)
    return model(**batch.arguments(), sharing=instructions, fused_lm_head=True)


def freeze_tower(model):
    decoder = {id(p) for p in [*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()]}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in decoder)


def pictured(name, frozen=False):
    """A small model, its prompt sharing, and a batch."""
    model, batch = with_images(name)
    if frozen:
        freeze_tower(model)
    return with_stock_head(model), prepared(model), batch


def scored(model, batch, run):
    """Log-probabilities and gradients of a pass, and whether any reached the tower."""
    logps_BC = run().log_probs[:, -COMPLETION:]
    weight = torch.linspace(0.3, 1.7, logps_BC.numel()).view_as(logps_BC)
    (logps_BC * weight).sum().backward()
    tower = sum(p.grad.abs().sum() for n, p in model.named_parameters() if "vis" in n and p.grad is not None)
    return logps_BC.detach(), gradients(model), bool(tower)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@first_families
def test_equals_stock(name, frozen):
    """Also from a trainer that does not pass the number of each row's images."""
    model, sharing, batch = pictured(name, frozen)
    with closed(sharing):
        expected, wanted, _ = scored(model, batch, lambda: stock(model, batch))
    for num_images in (batch.num_images, None):
        batch.num_images = num_images
        sharing.status.compared.clear()  # each is compared by its first pass
        actual, ours, reached_tower = scored(model, batch, lambda: packed(model, sharing, batch))
        assert 0 < sharing.figures.tokens < 0.6 * batch.input_ids.numel(), sharing.status.reason(Scope.IMAGES)
        assert (actual - expected).abs().max() <= 1e-4
        assert_equal_gradients(ours, wanted, tolerance=2e-5)
        assert reached_tower != frozen
    batch.labels = torch.full_like(batch.labels, -100)
    assert not packed(model, sharing, batch).log_probs.any() and sharing.figures.tokens


@pytest.mark.parametrize("name", these_first(["qwen3_vl", "gemma3", "qwen3_5"], "qwen3_vl"))
def test_offloaded_activations_equal_those_that_stay(name, monkeypatch):
    """The towers' checkpoints, too. There is no device, so activations are copied without pinned memory."""
    copies = []
    copied = torch.autograd.graph.save_on_cpu

    def unpinned(pin_memory, device_type):
        copies.append(device_type)
        return copied(pin_memory=False)

    monkeypatch.setattr("transformers.modeling_utils.save_on_cpu", unpinned)
    results = []
    for offload in (False, True):
        model, sharing, batch = pictured(name)
        model.train().activation_checkpointing_enable({"use_reentrant": False}, offload=offload)
        results.append(scored(model, batch, lambda: packed(model, sharing, batch)))  # noqa: B023
        assert sharing.status.packs and sharing.status.reason(Scope.IMAGES) is None and sharing.figures.tokens
        assert bool(copies) == offload
    (kept_BC, kept, reached), (moved_BC, moved, reached_too) = results
    assert reached and reached_too and torch.equal(kept_BC, moved_BC)
    assert_equal_gradients(moved, kept, tolerance=1e-7)


@first_families
def test_images_are_seen_once_per_optimizer_step(name, monkeypatch):
    """In batches of one row each: a prompt with its images is computed by the first that needs it, and kept."""
    monkeypatch.setattr(passes, "MIN_SAVED_BY_TRUNK", 1)
    model, sharing, batch = pictured(name)
    batch = batch.rows(np.array([0, 8, 1, 3, 5, 2, 6, 4, 7, 9]))
    weight = torch.linspace(0.3, 1.7, batch.labels.numel()).view_as(batch.labels)[:, 1:]
    with closed(sharing):
        expected = stock(model, batch).log_probs
        (expected * weight).sum().backward()
        wanted = gradients(model)
    model.zero_grad()
    rows = [batch.rows(np.array([row])) for row in range(len(batch.input_ids))]
    plan = sharing.plan_step(rows, tokens_per_pass=batch.input_ids.shape[1])
    run = passes.PlannedForwards(plan)
    assert plan.trunks.any() and plan.batches_per_pass == 1
    tokens = 0
    for number, row in enumerate(rows):
        for forward in run.of_pass(number):
            tokens += forward.forest.tokens
            to_sharing = Instructions(num_images=row.num_images, forward=forward)
            output = model(**row.arguments(), sharing=to_sharing, fused_lm_head=True)
        assert (output.log_probs - expected[number]).abs().max() <= 1e-4
        (output.log_probs * weight[number]).sum().backward()
    assert_equal_gradients(gradients(model), wanted, tolerance=2e-5)
    assert tokens < 0.7 * batch.attention_mask.sum()


@pytest.mark.parametrize("name", ["qwen3_vl", "llava"])
def test_a_frozen_tower_runs_once_in_a_pass_and_without_a_graph(name, monkeypatch):
    model, sharing, batch = pictured(name, frozen=True)
    if "mm_encoder_outputs" not in inspect.signature(type(model).forward).parameters:
        pytest.skip("this transformers takes no features of images")
    packed(model, sharing, batch)  # with the comparison of the first pass
    runs = []
    inner = model.base_model
    run = inner.get_image_features

    @functools.wraps(run)  # whose parameters are looked at
    def counted(*args, **kwargs):
        pixels = kwargs["pixel_values"]
        runs.append((len(pixels), torch.is_grad_enabled()))
        return run(*args, **kwargs)

    monkeypatch.setattr(inner, "get_image_features", counted)
    packed(model, sharing, batch).log_probs.sum().backward()
    chosen = rows_of_images({**batch.vision, "num_images": batch.num_images}, [0, 3, 7, 10])
    assert runs == [(len(chosen["pixel_values"]), False)]  # one row of each group that has images


def noisy(model, batch):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "vis" in name:
                parameter += 0.1 * torch.randn_like(parameter)


def noisy_without_a_trace(model, batch):
    for name, parameter in model.named_parameters():
        if "vis" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)


def loaded(model, batch):
    state = {name: x + 0.1 * torch.randn_like(x) if "vis" in name else x for name, x in model.state_dict().items()}
    model.load_state_dict(state)


def adapted(model, batch):
    towers = r".*vis.*(fc1|qkv|q_proj|linear_fc1)"
    inject_adapter_in_model(LoraConfig(r=4, target_modules=towers, init_lora_weights=False), model)
    freeze_tower(model)


def other_pixels(model, batch):
    batch.vision["pixel_values"].normal_()


def other_pixels_without_a_trace(model, batch):
    batch.vision["pixel_values"].data.normal_()


def other_pixels_by_numpy(model, batch):
    batch.vision["pixel_values"].numpy()[:] += 1


CHANGES = (
    noisy, noisy_without_a_trace, loaded, adapted, other_pixels, other_pixels_without_a_trace, other_pixels_by_numpy,
)  # fmt: skip


KEPT = [(name, change) for name in ("qwen3_vl", "llava") for change in CHANGES]


@pytest.mark.parametrize(("name", "change"), these_first(KEPT, *KEPT[: len(CHANGES)], ("llava", other_pixels)))
def test_no_features_and_no_pixels_are_kept_after_a_pass(name, change):
    """The features that an image had, and which rows have equal images, are known of one pass alone."""
    model, sharing, batch = pictured(name, frozen=True)
    before = packed(model, sharing, batch).log_probs
    torch.manual_seed(1)
    change(model, batch)
    for counted in (True, False):
        if not counted:
            batch.num_images = None
        with closed(sharing):
            expected = stock(model, batch).log_probs
        actual = packed(model, sharing, batch).log_probs
        assert (expected - before).abs().max() > 1e-2 and (actual - expected).abs().max() <= 1e-4
        assert 0 < sharing.figures.tokens < 0.6 * batch.input_ids.numel()


@pytest.mark.parametrize(
    ("tokens", "sizes", "counts"),
    [
        ([4, 4, 0, 8], [4] * 4, [1, 1, 0, 2]),
        ([4, 0, 6], [4, 6], [1, 0, 1]),
        ([4, 12], [4, 4, 4, 4], [1, 3]),
        ([4, 13], [4, 4, 4, 5], None),
    ],
)
def test_images_are_counted_by_tokens_or_the_batch_is_padded(tokens, sizes, counts):
    """Four images that two rows have are not two for each."""
    model, _ = with_images("llava")
    ids = torch.full((len(tokens), 20), 5)
    for row, count in enumerate(tokens):
        ids[row, 1 : 1 + count] = IMAGE
    batch = Batch(ids, None, ids, {"pixel_values": torch.zeros(len(sizes), 3, 16, 16)})
    if counts is None:
        with pytest.raises(CannotPack):
            images.Images(model).count(batch, np.array(tokens), None)
    else:
        assert images.Images(model).count(batch, np.array(tokens), None) == counts


def test_the_same_words_about_another_picture_are_another_prompt():
    _, batch = with_images("qwen3_vl")
    vision = {**batch.vision, "num_images": batch.num_images}
    numbers = image_keys.fingerprints(vision)
    same = [(a == b).all().item() for a, b in itertools.pairwise(numbers)]
    assert same == [a[0] == b[0] for a, b in itertools.pairwise(ROWS)]
    changed = {**vision, "pixel_values": vision["pixel_values"].clone()}
    changed["pixel_values"][5, 7] += 1e-6  # the last bits of one number
    assert not torch.equal(image_keys.fingerprints(changed)[0], numbers[0])
    assert torch.equal(image_keys.fingerprints(changed)[1:], numbers[1:])


def test_an_image_that_is_not_computed_runs_padded(caplog):
    """Behind the last label, so nothing is predicted from it."""
    model, sharing, batch = pictured("qwen3_vl")
    packed(model, sharing, batch)
    first = int(batch.attention_mask[0].argmax())
    batch.labels[0] = -100
    batch.labels[0, first + 1] = batch.input_ids[0, first + 1]
    with counting_padded_forwards(model) as calls:
        values = packed(model, sharing, batch).log_probs
    assert calls and not sharing.figures.tokens
    with closed(sharing):
        assert torch.equal(values, stock(model, batch).log_probs)
    assert len([record for record in caplog.records if record.name == sharing_module.__name__]) == 1


@first_families
def test_an_image_in_a_completion(name):
    """A tool's answer, or a later turn: it is a part of its row like any other, behind the common prompt."""
    model, sharing, batch = pictured(name)
    batch = batch.rows(np.arange(5))  # the same words with one picture and with another
    is_token = batch.attention_mask == 1
    first = is_token.int().argmax(1)
    text = is_token & (batch.input_ids != IMAGE)
    behind_two = torch.arange(text.shape[1]) >= first[:, None] + 2
    batch.labels = batch.input_ids.masked_fill(~(text & behind_two), -100)
    # The third token, before the picture, is another one in two rows. So rows with one picture part in front of
    # it.
    for row in (1, 4):
        batch.input_ids[row, first[row] + 2] = batch.labels[row, first[row] + 2] = 51
    with closed(sharing):
        expected = stock(model, batch)
        expected.log_probs.sum().backward()
    wanted = gradients(model)
    batch.num_images = None
    for compares in (True, False):
        if compares:
            actual = packed(model, sharing, batch).log_probs
            model.zero_grad()
        else:  # for any rows that the comparison samples
            actual = model(**batch.arguments(), fused_lm_head=True).log_probs
        assert 0 < sharing.figures.tokens < is_token.sum(), sharing.status.reason(Scope.IMAGES)
        assert (actual - expected.log_probs).abs().max() <= 1e-4
    actual.sum().backward()
    assert_equal_gradients(gradients(model), wanted, tolerance=2e-5)


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_the_tokens_of_an_image_see_each_other(name, monkeypatch):
    """Of Gemma: with a causal mask log-probabilities are others, and the comparison of the first pass finds it."""
    monkeypatch.setattr(images, "own_masks", lambda *_: {})
    model, sharing, batch = pictured(name)
    values = packed(model, sharing, batch).log_probs
    with closed(sharing):
        assert not sharing.figures.tokens and torch.equal(values, stock(model, batch).log_probs)
    assert sharing.status.reason(Scope.IMAGES) is not None


def test_the_comparison_of_the_first_pass_takes_rows_with_images():
    """Not only the first and last rows, which may be text alone."""
    _, sharing, batch = pictured("qwen3_vl")
    # Rows 5 and 6 are of a prompt without images.
    for rows in ([5, 6, 5, 6, 0, 1, 5, 6, 5, 6], [0, 1, 5, 6, 5, 6], [5, 6, 5, 6, 0]):
        few = batch.rows(np.array(rows))
        taken = compared_rows(sharing.packed_model, few, sharing.packed_model.read(few), 4)
        assert len(taken) == 4 and any(few.num_images[row] for row in taken)
