"""Pictures of coloured shapes with questions whose answers are exact: a task for models that see, without a download."""

import random

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (40, 80, 220), "yellow": (240, 200, 30)}
SHAPES = ("circle", "square")
SIDE, CELLS = 112, 3  # pixels of a picture, and cells of a row of its grid
ROWS = {"train": 2000, "test": 500}


def _draw(scene: dict[int, tuple[str, str]]) -> Image.Image:
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen, cell = ImageDraw.Draw(picture), SIDE // CELLS
    for place, (colour, shape) in scene.items():
        x, y = place % CELLS * cell, place // CELLS * cell
        paint = pen.ellipse if shape == "circle" else pen.rectangle
        paint((x + 6, y + 6, x + cell - 6, y + cell - 6), fill=COLOURS[colour])
    return picture


def _ask(scene: dict[int, tuple[str, str]], draw: random.Random) -> tuple[str, int]:
    """A question about a scene, and its answer as a number."""
    kind = draw.choice(("how many", "which colour", "left of"))
    colours = list(COLOURS)
    if kind == "how many":
        colour, shape = draw.choice(colours), draw.choice(SHAPES)
        return f"How many {colour} {shape}s are there?", list(scene.values()).count((colour, shape))
    if kind == "which colour":
        counts = {colour: sum(c == colour for c, _ in scene.values()) for colour in colours}
        most = max(counts, key=counts.get)
        if list(counts.values()).count(counts[most]) == 1:
            choices = ", ".join(f"{i} for {colour}" for i, colour in enumerate(colours, 1))
            return f"Which colour do most shapes have? Answer {choices}.", colours.index(most) + 1
    (a, of_a), (b, of_b) = draw.sample(sorted(scene.items()), 2)
    if list(scene.values()).count(of_a) == list(scene.values()).count(of_b) == 1:
        question = (
            f"Is the {' '.join(of_a)} in a column to the left of the {' '.join(of_b)}'s? Answer 1 for yes, 0 for no."
        )
        return question, int(a % CELLS < b % CELLS)
    return "How many shapes are there?", len(scene)


def shapes_row(draw: random.Random) -> dict:
    """`problem`, `answer` and `image` of a scene of two to six shapes."""
    places = draw.sample(range(CELLS**2), draw.randint(2, 6))
    scene = {place: (draw.choice(list(COLOURS)), draw.choice(SHAPES)) for place in places}
    question, answer = _ask(scene, draw)
    return {"problem": question, "answer": answer, "image": _draw(scene)}


def coloured_shapes(split: str) -> list[dict]:
    """Rows of the split `train` or `test`, always the same."""
    draw = random.Random(f"coloured shapes, {split}")
    return [shapes_row(draw) for _ in range(ROWS["test" if split == "test" else "train"])]
