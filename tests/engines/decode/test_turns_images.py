"""Turns of episodes with images, in the prompt or from a tool: a batch with images is prefilled whole."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from PIL import Image

from tests.engines.decode.helpers import calling_tokenizer
from tests.engines.decode.test_decoding import greedy
from tests.engines.decode.test_turns import OURS, STOCK
from tests.prefix_sharing.helpers import MULTIMODAL, build
from tests.prefix_sharing.test_images import FAMILIES, IDEFICS, IMAGE, MORE, SIZES
from tests.tiny import config, digit_share, these_first
from trl_fsdp_qlora.engines.decode.completions import CompletionOptions, complete
from trl_fsdp_qlora.engines.decode.turns import KeptTurns
from trl_fsdp_qlora.tools.small_base import CHAT_TEMPLATE

# Of each row: its prompt's words, its images' sizes by place in `SIZES`, and whose pixels they have. Rows 0 to 2 have
# one prompt, rows 3 and 4 the same tokens and other pixels, row 5 no image, and row 6 two images.
PROMPTS = [("a", 0, "x")] * 3 + [("a", 0, "y")] * 2 + [("b", 2, "")] + [("c", 3, "z")]
WORDS = {"a": [[11, 12, 13], [14, 15, 16, 17]], "b": [[21, 22, 23, 24]], "c": [[31, 32], [33], [34, 35, 36]]}
# Of each turn after the first, the rows whose tool answers with an image.
TOOL_IMAGES = {1: (0, 3, 5), 2: (), 3: (1, 3)}


class Episodes:
    """The histories of all rows, with the model's arguments for each image in them."""

    def __init__(self, name: str, tool_images: dict[int, tuple]):
        self.name = name
        self.tool_images = tool_images
        self.make_image, sizes, self.token_types = FAMILIES[name]
        self.sizes = {number: of_group for number, of_group in sizes.items() if number in SIZES}
        self.model = build(MULTIMODAL.get(name) or MORE[name])
        if name == "gemma4":  # as its larger sizes do
            self.model.config.text_config.use_bidirectional_attention = "vision"
        for attribute in ("image_token_id", "image_token_index"):
            if hasattr(self.model.config, attribute):
                setattr(self.model.config, attribute, IMAGE)
        self.ids = []
        self.images = []
        known = {}
        for words, group, pixels in PROMPTS:
            first, *others = WORDS[words]
            if (group, pixels) not in known:
                known[group, pixels] = [self.image(size, f"{pixels}{i}") for i, size in enumerate(self.sizes[group])]
            ids = list(first)
            for (_, tokens), text in zip(known[group, pixels], others, strict=True):
                ids += [IMAGE] * tokens + text
            self.ids.append(ids)
            self.images.append([fields for fields, _ in known[group, pixels]])

    def image(self, size, pixels: str):
        """An image's arguments, and how many tokens it has."""
        fields = self.make_image(size, torch.Generator().manual_seed(hash_of(pixels)))
        if self.name in IDEFICS:
            fields = {"pixel_values": fields["pixel_values"].unsqueeze(0)}
        with torch.no_grad():
            features = self.model.base_model.get_image_features(**fields, return_dict=True).pooler_output
        return fields, sum(map(len, features))

    def vision(self, rows: list[int]) -> dict:
        every = [fields for row in rows for fields in self.images[row]]
        if not every:
            return {}
        counts = [len(self.images[row]) for row in rows]
        vision = {"num_images": counts} | {key: torch.cat([fields[key] for fields in every]) for key in every[0]}
        if self.name in IDEFICS:
            pixels = torch.zeros(len(rows), max(counts), *vision["pixel_values"].shape[2:])
            pixels[torch.arange(max(counts)) < torch.tensor(counts)[:, None]] = vision["pixel_values"][:, 0]
            vision["pixel_values"] = pixels
            vision["pixel_attention_mask"] = torch.ones(len(rows), max(counts), *pixels.shape[3:], dtype=torch.long)
        if self.token_types:
            vision[self.token_types] = [[int(token == IMAGE) for token in self.ids[row]] for row in rows]
        return vision

    def answer(self, row: int, turn: int) -> None:
        """A tool's answer, with an image if `tool_images` has the row."""
        rng = random.Random(100 * turn + row)
        words = [rng.randrange(3, 50) for _ in range(rng.randrange(2, 5))]
        if row in self.tool_images.get(turn, ()):
            fields, tokens = self.image(self.sizes[0][0], f"tool {row} {turn}")
            self.images[row].append(fields)
            words[1:1] = [IMAGE] * tokens
        self.ids[row] += words

    def play(self, kept: KeptTurns | None):
        """Each turn's completions."""
        rows = list(range(len(self.ids)))
        drawn = []
        for turn in range(4):
            completions, _ = complete(
                self.model,
                [list(self.ids[row]) for row in rows],
                greedy(suppress_tokens=[IMAGE], max_new_tokens=8),
                CompletionOptions(compact=kept is not None, synced_gpus=False, turns=kept, vision=self.vision(rows)),
            )
            drawn.append(completions)
            for row, completion in zip(rows, completions, strict=True):
                self.ids[row] = self.ids[row] + completion
            rows = [row for row in rows if (row + turn) % 5]
            for row in rows if turn < 3 else ():
                self.answer(row, turn + 1)
            if kept is not None:
                kept.number += 1
        return drawn


def hash_of(text: str) -> int:
    return sum(ord(letter) * 31**position for position, letter in enumerate(text)) % 2**31


@pytest.mark.parametrize("name", these_first(FAMILIES, *[*FAMILIES][::6]))
def test_greedy_episodes_with_images_are_token_identical(name):
    """Against transformers' own loop over whole histories, with the pixels of all images of each."""
    theirs = Episodes(name, TOOL_IMAGES)
    mine = Episodes(name, TOOL_IMAGES)
    kept = KeptTurns(1e12, 3)
    expected = theirs.play(None)
    assert mine.play(kept) == expected and len({tuple(row) for row in expected[0]}) > 2
    assert kept.most_bytes == 0


@pytest.mark.parametrize("name", sorted(IDEFICS))
def test_as_many_images_as_rows_among_padded_ones(name):
    """Rows with two images next to as many with none: four rows of pixels, which are not one per image."""
    episodes = Episodes(name, {})
    rows = [6, 6, 5, 5]
    ids = [episodes.ids[row] for row in rows]
    vision = episodes.vision(rows)
    settings = greedy(suppress_tokens=[IMAGE], max_new_tokens=8)
    expected, _ = complete(episodes.model, ids, settings, CompletionOptions(compact=False, vision=vision))
    actual, work = complete(episodes.model, ids, settings, CompletionOptions(vision=vision))
    assert actual == expected and work is not None


# --- through the trainer, next to TRL's own loop ---------------------------------------------------------------------

_CONTENT = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image_pad|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
)


LOOKED = []  # for each call whether a picture was returned


def picture(seed: int) -> Image.Image:
    """A picture of 16 or 32 pixels a side: four or sixteen tokens."""
    sides = np.random.default_rng(seed)
    height, width = (16 * int(n) for n in sides.integers(1, 3, 2))
    return Image.fromarray(sides.integers(0, 255, (height, width, 3), dtype=np.uint8))


def look(a: int, b: int) -> list:
    """Look at a picture.

    Args:
        a: which one.
        b: no picture if it is even.
    """
    LOOKED.append(b % 2)
    text = {"type": "text", "text": str(len(LOOKED))}  # so that the greedy rows of a group differ
    return [text] if b % 2 == 0 else [{"type": "image", "image": picture(a + len(LOOKED))}, text]


class QwenImages(transformers.Qwen2VLProcessor):
    """Without videos, whose processor needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def qwen_processor():
    """Qwen2-VL's, with small pictures, around a tokenizer that reads calls out of most completions."""
    tokenizer = calling_tokenizer()
    read = tokenizer.parse_response

    def renamed(ids, prefix, tools=None):
        message = read(ids, prefix)
        for call in message.get("tool_calls", ()):
            call["function"]["name"] = "look"
        return message

    tokenizer.parse_response = renamed
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>", "<|video_pad|>"]})
    template = CHAT_TEMPLATE.replace("+ message['content'] }}", "}}" + _CONTENT, 1)
    tokenizer.chat_template = template
    patches = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 16 * 16, "longest_edge": 32 * 32}
    return QwenImages(transformers.Qwen2VLImageProcessorPil(size=size, **patches), tokenizer, chat_template=template)


def make_trainer(
    cls, config_cls, folder, with_pictures: bool | Sequence[int], processor=None, tools=(look,), **changes
):
    """A trainer of eight prompts; all have a picture, none has one, or those of the rows `with_pictures`."""
    LOOKED.clear()
    processor = processor or qwen_processor()
    tokenizer = processor.tokenizer
    model = build(MORE["qwen2_vl"])
    model.config.image_token_id = processor.image_token_id
    model.config.video_token_id = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    placeholders = [model.config.image_token_id, model.config.video_token_id]
    model.resize_token_embeddings(len(tokenizer))
    model.config.text_config.max_position_embeddings = 1024
    model.generation_config.eos_token_id = list(range(3, 40))
    rows = {"prompt": [[{"role": "user", "content": f"{i}+{i + 1}="}] for i in range(8)]}
    if with_pictures:
        has_picture = range(8) if with_pictures is True else with_pictures
        rows["images"] = [[picture(100 + i)] if i in has_picture else [] for i in range(8)]
    settings = config(
        config_cls,
        folder,
        max_tool_calling_iterations=3,
        max_completion_length=160,
        generation_kwargs={
            "do_sample": False,
            "suppress_tokens": placeholders,
        },
        **changes,
    )
    arguments = {
        "processing_class": processor,
        "tools": list(tools) or None,
        "peft_config": LoraConfig(target_modules=["q_proj"]),
    }
    return cls(model, digit_share, settings, Dataset.from_dict(rows), **arguments)


def run(cls, config_cls, folder, with_pictures: bool):
    trainer = make_trainer(cls, config_cls, folder, with_pictures)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "with_pictures",
    [pytest.param(False, marks=pytest.mark.exhaustive), True],
    ids=["text prompts", "prompts with images"],
)
def test_tools_that_return_images_equal_trls_loop(tmp_path, with_pictures):
    stock, ours = (run(*each, tmp_path / each[0].__name__, with_pictures) for each in (STOCK, OURS))
    same = ("reward", "completions/mean_length", "num_tokens", "tools/call_frequency", "tools/failure_frequency")
    for mine, theirs in zip(ours, stock, strict=True):
        assert [mine[key] for key in same] == pytest.approx([theirs[key] for key in same])
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3) and mine["grad_norm"] > 0
        assert mine["tools/call_frequency"] >= 0.5 and mine["tools/failure_frequency"] == 0
        assert mine["generation/prefill_tokens"] < mine["generation/prefill_tokens_stock"]
    assert {0, 1} == set(LOOKED)
