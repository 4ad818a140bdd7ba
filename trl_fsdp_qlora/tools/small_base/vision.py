"""Pictures of coloured shapes with questions whose answers are exact, and the small base that sees them.

The base is a LLaVA of half a million parameters. A CLIP tower of one layer reads a picture of 48 x 48 pixels as nine
patches, one for each cell of the grid. A Llama of three layers reads the question, word by word. The base learns
within minutes to count shapes and to compare colours. In a thousand steps it does not learn to distinguish circles
from squares while it counts, or which of two shapes is on the left. Most of its taught answers are one too small, so
that reinforcement has something to select.
"""

import random
import re

from PIL import Image, ImageDraw

from .tokenizer import word_tokenizer

COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (40, 80, 220), "yellow": (240, 200, 30)}
SHAPES = ("circle", "square")
PICTURE = 112  # pixels of a picture's side
CELLS = 3  # cells of a row of its grid
ROWS = {"train": 2000, "test": 500}
ONE_TOO_SMALL = 0.6  # fraction of the taught answers
SIDE = 48  # pixels of a picture's side, as the model reads it
PATCH = 16  # pixels of a patch's side
HIDDEN = 96
PIECE = r" ?[A-Za-z]+|."  # a word with the blank before it, or a single character
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% if message['role'] == 'assistant' "
    "%}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _draw(scene: dict[int, tuple[str, str]]) -> Image.Image:
    picture = Image.new("RGB", (PICTURE, PICTURE), "white")
    pen = ImageDraw.Draw(picture)
    cell = PICTURE // CELLS
    for cell_index, (colour, shape) in scene.items():
        x = cell_index % CELLS * cell
        y = cell_index // CELLS * cell
        paint = pen.ellipse if shape == "circle" else pen.rectangle
        paint((x + 6, y + 6, x + cell - 6, y + cell - 6), fill=COLOURS[colour])
    return picture


def _ask(scene: dict[int, tuple[str, str]], draw: random.Random) -> tuple[str, int]:
    """A question about a scene, and its answer as a number."""
    kind = draw.choice(("how many", "which colour", "left of"))
    colours = list(COLOURS)
    if kind == "how many":
        colour = draw.choice(colours)
        shape = draw.choice(SHAPES)
        return f"How many {colour} {shape}s are there?", list(scene.values()).count((colour, shape))
    if kind == "which colour":
        counts = {colour: sum(c == colour for c, _ in scene.values()) for colour in colours}
        most = max(counts, key=counts.get)
        if list(counts.values()).count(counts[most]) == 1:
            choices = ", ".join(f"{i} for {colour}" for i, colour in enumerate(colours, 1))
            return f"Which colour do most shapes have? Answer {choices}.", colours.index(most) + 1
    (a, of_a), (b, of_b) = draw.sample(sorted(scene.items()), 2)
    if list(scene.values()).count(of_a) == list(scene.values()).count(of_b) == 1:
        question = f"Is the {' '.join(of_a)} in a column to the left of the {' '.join(of_b)}'s?"
        return f"{question} Answer 1 for yes, 0 for no.", int(a % CELLS < b % CELLS)
    return "How many shapes are there?", len(scene)


def shapes_row(draw: random.Random) -> dict:
    """`problem`, `answer` and `image` of a scene of two to six shapes."""
    cells = draw.sample(range(CELLS**2), draw.randint(2, 6))
    scene = {cell: (draw.choice(list(COLOURS)), draw.choice(SHAPES)) for cell in cells}
    question, answer = _ask(scene, draw)
    return {"problem": question, "answer": answer, "image": _draw(scene)}


def coloured_shapes(split: str) -> list[dict]:
    """Rows of the split `train` or `test`, always the same."""
    draw = random.Random(f"coloured shapes, {split}")
    return [shapes_row(draw) for _ in range(ROWS["test" if split == "test" else "train"])]


def shapes_processor():
    """A `LlavaProcessor` whose tokenizer knows the words of the questions, and digits."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    words = {piece for row in coloured_shapes("train") for piece in re.findall(PIECE, row["problem"])}
    tokenizer = word_tokenizer(sorted({*words, *"0123456789"}), PIECE, CHAT_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        chat_template=CHAT_TEMPLATE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def new_vision_model(processor, seed: int):
    """An untrained `LlavaForConditionalGeneration` (float32) for `processor`, with weights drawn from `seed`."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    # Larger than transformers' 0.02, which suits wide layers (dev/LOG.md).
    shape = {"hidden_size": HIDDEN, "num_attention_heads": 4, "initializer_range": HIDDEN**-0.5}
    tokenizer = processor.tokenizer
    text = {
        "model_type": "llama", "vocab_size": len(tokenizer), "intermediate_size": 3 * HIDDEN, "num_hidden_layers": 3,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "model_type": "clip_vision_model", "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 1, "image_size": SIDE,
        "patch_size": PATCH, "projection_dim": HIDDEN,
    }  # fmt: skip
    config = LlavaConfig(
        text_config=shape | text,
        vision_config=shape | vision,
        vision_feature_layer=-1,
        initializer_range=HIDDEN**-0.5,
        tie_word_embeddings=True,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    torch.manual_seed(seed)
    return LlavaForConditionalGeneration(config)


def shapes_dataset(seed: int, rows: int):
    """Pictures, questions and answers for SFT, drawn on access, most of the answers one too small."""
    from datasets import Dataset

    def drawn(batch):
        columns = {"prompt": [], "completion": [], "images": []}
        for i in batch["row"]:
            draw = random.Random(f"{seed}, {i}")
            row = shapes_row(draw)
            answer = row["answer"] - (row["answer"] > 0 and draw.random() < ONE_TOO_SMALL)
            columns["prompt"].append([{"role": "user", "content": row["problem"]}])
            columns["completion"].append([{"role": "assistant", "content": str(answer)}])
            columns["images"].append([row["image"]])
        return columns

    return Dataset.from_dict({"row": range(rows)}).with_transform(drawn)
