"""What the next TRL may change: edits of a copy of the installed TRL, generated from the tables of seams.

A change is consistent in TRL: the caller passes the new argument, takes the longer tuple, calls the new name. So TRL's
own trainer works with it, and the package has to train the same or as stock.
"""

import ast
import importlib.metadata
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trl_fsdp_qlora.compat import trl as seams
from trl_fsdp_qlora.compat import trl_seams

TRAINERS = {"GRPO": "grpo_trainer", "RLOO": "rloo_trainer", "DPO": "dpo_trainer"}
TUPLES = ("_get_per_token_logps_and_entropies", "_generate", "_tokenize_prompts")
# Functions that the three trainers' modules have from `trl.trainer.utils` and call between methods that are overridden.
REPLACED = ("shuffle_sequence_dict", "split_tensor_dict", "gather")


@dataclass(frozen=True)
class Change:
    """A changed TRL.

    Attributes:
        name: kind, trainer and seam.
        edit: makes it in the folder of a copied package.
        trainers: those whose steps it may change.
        renames: new names of TRL's by the old ones.
        settings: of both configs.
        greedy: whether completions are drawn; otherwise they are fixed.
        fault: what is wrong in the package, to show that a fault is found.
    """

    name: str
    edit: Callable[[Path], None]
    trainers: tuple[str, ...] = ("GRPO", "RLOO", "DPO")
    renames: dict[str, str] = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    greedy: bool = False
    fault: str = ""


def rewrite(path: Path, text: str) -> None:
    path.unlink()  # a hard link to the installed file
    path.write_text(text, encoding="utf-8")


def replace(file: str, *pairs: tuple[str, str]) -> Callable[[Path], None]:
    """Replace texts of a file, each of which has to be there."""

    def edit(folder: Path) -> None:
        text = (folder / file).read_text(encoding="utf-8")
        for old, new in pairs:
            assert old in text, (file, old)
            text = text.replace(old, new)
        rewrite(folder / file, text)

    return edit


def rename(old: str, new: str, kind: str) -> Callable[[Path], None]:
    """Give a name of TRL's another one, everywhere in TRL.

    Other objects may have an attribute of that name, or TRL may have a function of another library's.
    """
    before = {"method": r"\b", "attribute": r"(?<=self\.)", "function": r"(?<![.\w])"}[kind]
    imported = rf"(from (?!trl\b|\.)[\w.]+ import [^\n]*)\b{new}\b"

    def edit(folder: Path) -> None:
        for path in folder.rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            renamed = re.sub(imported, rf"\1{old} as {new}", re.sub(rf"{before}{old}\b", new, text))
            if renamed != text:
                rewrite(path, renamed)

    return edit


def insertions(file: str, places: Callable[[ast.Module, str], list[tuple[int, int, str]]]) -> Callable[[Path], None]:
    """Insert texts into a file: `places(tree, text)` are (line, column, what)."""

    def edit(folder: Path) -> None:
        text = (folder / file).read_text(encoding="utf-8")
        lines = text.encode().split(b"\n")
        found = places(ast.parse(text), text)
        assert found, file
        for line, column, what in sorted(found, reverse=True):
            row = lines[line - 1]
            lines[line - 1] = row[:column] + what.encode() + row[column:]
        rewrite(folder / file, b"\n".join(lines).decode())

    return edit


def method(tree: ast.Module, name: str) -> ast.FunctionDef:
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    return next(functions)


def calls(tree: ast.Module, name: str) -> Iterator[ast.Call]:
    """Calls of `self.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name:
            yield node


def argument_more(file: str, name: str, calls_pass_it: bool = True) -> Callable[[Path], None]:
    """A keyword more with a default; and TRL's callers pass it."""

    def places(tree, text):
        arguments = method(tree, name).args
        nodes = [*arguments.args, *arguments.defaults, *(arg.annotation for arg in arguments.args if arg.annotation)]
        last = max(nodes, key=lambda node: (node.end_lineno, node.end_col_offset))
        found = [(last.end_lineno, last.end_col_offset, ", new_option=None")]
        for call in calls(tree, name) if calls_pass_it else ():
            parts = [*call.args, *(keyword.value for keyword in call.keywords)]
            last = max(parts, key=lambda node: (node.end_lineno, node.end_col_offset))
            found.append((last.end_lineno, last.end_col_offset, ", new_option=1"))
        return found

    return insertions(file, places)


def tuple_longer(file: str, name: str) -> Callable[[Path], None]:
    """A return value more, which TRL's callers know."""

    def places(tree, text):
        function = method(tree, name)
        found = []
        for node in ast.walk(function):
            if isinstance(node, ast.Return):
                found += [(node.value.lineno, node.value.col_offset, "(*(")]
                found += [(node.value.end_lineno, node.value.end_col_offset, "), None)")]
        own = {id(node) for node in ast.walk(function)}
        found += [(call.end_lineno, call.end_col_offset, "[:-1]") for call in calls(tree, name) if id(call) not in own]
        return found

    return insertions(file, places)


def split_in_two(file: str, name: str) -> Callable[[Path], None]:
    """A method between: the old name only calls a new one, which has the old one's code."""

    def edit(folder: Path) -> None:
        text = (folder / file).read_text(encoding="utf-8")
        pattern = rf"( +)def {name}\("
        match = re.search(pattern, text)
        indent = match.group(1)
        between = (
            f"{indent}def {name}(self, *args, **kwargs):\n{indent}    return self._inner{name}(*args, **kwargs)\n\n"
        )
        text = (
            text[: match.start()] + between + re.sub(pattern, rf"\1def _inner{name}(", text[match.start() :], count=1)
        )
        # A decorator above belongs to the new caller; that is as good.
        rewrite(folder / file, text)

    return edit


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions inside of it."""
    nodes: list[ast.AST] = list(function.body)
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            nodes += ast.iter_child_nodes(node)


def result_changed(file: str, name: str, formula: str) -> Callable[[Path], None]:
    """What a method returns, `x`, becomes `formula`."""

    def places(tree, text):
        found = []
        for node in own_nodes(method(tree, name)):
            if isinstance(node, ast.Return) and node.value is not None:
                before, after = f"(lambda x: {formula})((", "))"  # a tuple may have no parentheses
                found += [(node.value.lineno, node.value.col_offset, before)]
                found += [(node.value.end_lineno, node.value.end_col_offset, after)]
        return found

    return insertions(file, places)


def of_trainer(trainer: str) -> str:
    return f"trainer/{TRAINERS[trainer]}.py"


def installed(trainer: str) -> str:
    """The text of the installed TRL's trainer, which is not imported."""
    folder = Path(importlib.metadata.distribution("trl").locate_file("trl"))
    return (folder / of_trainer(trainer)).read_text(encoding="utf-8")


def every_change() -> Iterator[Change]:
    yield from names_gone()
    yield from arguments_and_results()
    yield from methods_between()
    yield from defaults()
    yield from inputs()
    yield from shuffles()
    yield from losses()
    yield from forwards()


def names_gone() -> Iterator[Change]:
    methods_and_attributes = trl_seams.METHODS | trl_seams.ATTRIBUTES
    private = [name for name, (module, _) in seams.BORROWED.items() if module != "trl"]
    for name in (*private, *methods_and_attributes, *REPLACED):
        new = f"{name}_of_next"
        seam = methods_and_attributes.get(name)
        trainers = tuple(seam.of.split()) if seam else tuple(TRAINERS) if name in OF_EVERY_TRAINER else ("GRPO",)
        is_method = seam and any(f"def {name}(" in installed(trainer) for trainer in trainers)
        kind = "method" if is_method else "attribute" if seam else "function"
        yield Change(f"gone: {name}", rename(name, new, kind), trainers, renames={name: new})


OF_EVERY_TRAINER = ("FusedCausalLMOutput", "add_fused_lm_head", "ChunkedLogProbFunction", "use_adapter")


def arguments_and_results() -> Iterator[Change]:
    for name, seam in trl_seams.METHODS.items():
        for trainer in seam.of.split():
            file = of_trainer(trainer)
            if (trainer, name) != ("DPO", "compute_ref_log_probs"):
                yield Change(f"argument: {trainer} {name}", argument_more(file, name), (trainer,), **of_draws(name))
            if name in TUPLES:
                yield Change(f"tuple: {trainer} {name}", tuple_longer(file, name), (trainer,))
    for name, file in FUNCTIONS.items():
        yield Change(f"option: {name}", argument_more(file, name, calls_pass_it=False))


def of_draws(name: str) -> dict:
    """What a change of this method needs: completions that are drawn, greedily.

    They are equal in a group, so that their advantages cancel; a KL term has a gradient.
    """
    return {"greedy": True, "settings": {"beta": 0.1}} if name == "_generate_single_turn" else {}


FUNCTIONS = {
    "add_fused_lm_head": "trainer/utils.py",
    "split_pixel_values_by_grid": "trainer/utils.py",
    "unsplit_pixel_values_by_grid": "trainer/utils.py",
    "shuffle_sequence_dict": "trainer/utils.py",
    "split_tensor_dict": "trainer/utils.py",
    "use_adapter": "trainer/utils.py",
    "unwrap_model_for_generation": "models/utils.py",
    "prepare_multimodal_messages": "data_utils.py",
    "parse_response": "chat_template_utils.py",
}


def methods_between() -> Iterator[Change]:
    for trainer in TRAINERS:
        names = [name for name, seam in trl_seams.METHODS.items() if trainer in seam.of.split()]
        names += ["compute_loss"] + (["_prepare_inputs", "training_step", "log"] if trainer != "DPO" else [])
        for name in names:
            yield Change(
                f"between: {trainer} {name}", split_in_two(of_trainer(trainer), name), (trainer,), **of_draws(name)
            )


def default(trainer: str, option: str, old: str, new: str, **settings) -> Change:
    file = f"trainer/{trainer.lower()}_config.py"

    def edit(folder: Path) -> None:
        text = (folder / file).read_text(encoding="utf-8")
        pattern = rf"(\n    {option}: [^\n]*= field\(\s*default=){re.escape(old)},"
        assert re.search(pattern, text), (file, option)
        rewrite(folder / file, re.sub(pattern, rf"\g<1>{new},", text))

    return Change(f"default: {trainer} {option}={new}", edit, (trainer,), settings=settings)


WHOLE = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


def defaults() -> Iterator[Change]:
    yield default("GRPO", "beta", "0.0", "0.04")
    yield default("GRPO", "epsilon", "0.2", "0.01")
    yield default("GRPO", "num_iterations", "1", "2")
    yield default("GRPO", "scale_rewards", '"group"', '"none"')
    yield default("GRPO", "scale_rewards", '"group"', '"batch"')
    for loss in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"):
        yield default("GRPO", "loss_type", '"dapo"', f'"{loss}"', **WHOLE)
    yield default("GRPO", "importance_sampling_level", '"token"', '"sequence"')
    yield default("GRPO", "top_entropy_quantile", "1.0", "0.5", **WHOLE)
    yield default("GRPO", "entropy_coef", "0.0", "0.01", **WHOLE)
    yield default("GRPO", "mask_truncated_completions", "False", "True")
    yield default("RLOO", "beta", "0.05", "0.5")
    yield default("RLOO", "normalize_advantages", "False", "True")
    yield default("RLOO", "num_iterations", "1", "2")
    yield default("DPO", "beta", "0.1", "0.5")
    yield default("DPO", "label_smoothing", "0.0", "0.1")


MADE = '"advantages": advantages,\n'
READ = 'advantages = inputs["advantages"]\n'
TENSORS = {
    "a tensor per row": "torch.linspace(0.5, 1.5, len(advantages), device=advantages.device)",
    "a scalar tensor": "torch.tensor(1.5, device=advantages.device)",
    "a list": "[0.5 + i / 8 for i in range(len(advantages))]",
}


def inputs() -> Iterator[Change]:
    for trainer in ("GRPO", "RLOO"):
        for kind, value in TENSORS.items():
            read = 'torch.as_tensor(inputs["new_weights"], device=inputs["advantages"].device)'
            edit = replace(
                of_trainer(trainer),
                (MADE, f'{MADE}            "new_weights": {value},\n'),
                (READ, f'advantages = inputs["advantages"] * {read}\n'),
            )
            yield Change(f"inputs: {trainer} {kind}", edit, (trainer,))
        # The gathered rewards are of all ranks; this one is of the rows of a rank.
        noise = "torch.linspace(-1, 1, completion_ids.numel(), device=completion_ids.device).view_as(completion_ids)"
        per_token = replace(
            of_trainer(trainer),
            (MADE, f'{MADE}            "new_per_token": {noise},\n'),
            (READ, READ),
        )
        both = [per_token, result_of_tokens(trainer, 'inputs["new_per_token"] * per_token_logps')]
        yield Change(f"inputs: {trainer} per token", in_turn(*both), (trainer,))
        for key in ("advantages", "completion_mask"):
            renamed = rename_text(of_trainer(trainer), f'"{key}"', f'"row_{key}"')
            yield Change(f"inputs: {trainer} {key}", renamed, (trainer,))


SHUFFLED = "generation_batch = shuffle_sequence_dict(generation_batch"


def shuffles() -> Iterator[Change]:
    """The shuffle gets a further argument from TRL's trainers."""
    for trainer in ("GRPO", "RLOO"):
        edit = in_turn(
            argument_more("trainer/utils.py", "shuffle_sequence_dict", calls_pass_it=False),
            replace(of_trainer(trainer), (SHUFFLED, f"{SHUFFLED}, new_option=1")),
        )
        yield Change(f"shuffle: {trainer} shuffle_sequence_dict", edit, (trainer,))


def in_turn(*edits: Callable[[Path], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        for each in edits:
            each(folder)

    return edit


def rename_text(file: str, old: str, new: str) -> Callable[[Path], None]:
    return replace(file, (old, new))


def result_of_tokens(trainer: str, term: str) -> Callable[[Path], None]:
    """A term per token, summed over the completion's tokens and added to the loss."""
    anchor = {
        "GRPO": '        mode = "train" if self.model.training else "eval"\n        if self.loss_type in ["grpo", "sapo"]:',
        "RLOO": "        loss = per_sequence_loss.mean()\n",
    }[trainer]
    if trainer == "GRPO":
        added = f"        per_token_loss = per_token_loss + 0.1 * ({term})\n{anchor}"
    else:
        added = f"{anchor}        loss = loss + 0.1 * (({term}) * completion_mask).sum(1).mean()\n"
    return replace(of_trainer(trainer), (anchor, added))


def losses() -> Iterator[Change]:
    for trainer in TRAINERS:
        file = of_trainer(trainer)
        for formula in ("2 * x", "-x", "x + 0.5 * x.detach()"):
            whole = formula if trainer != "DPO" else f"({formula}) if torch.is_tensor(x) else x"
            yield Change(f"loss: {trainer} {formula}", result_changed(file, "_compute_loss", whole), (trainer,))
        yield Change(f"loss: {trainer} 3 * x outside", result_changed(file, "compute_loss", "3 * x"), (trainer,))
    began = "(self.state.global_step > 0) * per_token_logps"
    terms = {
        "a term from the second step on": began,
        "a term of log-probabilities": "per_token_logps",
        "their square": "per_token_logps**2",
        "probabilities": "-torch.exp(per_token_logps)",
        "entropies": "entropies.detach() * per_token_logps",
    }
    for trainer in ("GRPO", "RLOO"):
        for kind, term in terms.items():
            yield Change(f"loss: {trainer} {kind}", result_of_tokens(trainer, term), (trainer,))
        one_row = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
        term = result_of_tokens(trainer, "per_token_logps")
        yield Change(f"loss: {trainer} a term, rows one by one", term, (trainer,), settings=one_row)
        yield Change(
            f"loss: {trainer} advantages clipped",
            replace(of_trainer(trainer), (READ, 'advantages = inputs["advantages"].clamp(-0.5, 1.0)\n')),
            (trainer,),
        )
        yield Change(
            f"loss: {trainer} advantages shifted",
            replace(of_trainer(trainer), (READ, 'advantages = inputs["advantages"] + 0.3\n')),
            (trainer,),
        )
        scaled = result_changed(of_trainer(trainer), "_get_per_token_logps_and_entropies", "(1.1 * x[0], *x[1:])")
        yield Change(f"loss: {trainer} log-probabilities scaled", scaled, (trainer,))
        yield Change(
            f"prepare: {trainer} advantages halved",
            replace(
                of_trainer(trainer),
                (
                    "            inputs = self._buffered_inputs[",
                    "            inputs = self._halved(self._buffered_inputs[",
                ),
                ("% self.args.steps_per_generation]\n", "% self.args.steps_per_generation])\n"),
                (
                    "    def _log_completion_extra(" if trainer == "GRPO" else "    def _calculate_rewards(",
                    '    def _halved(self, batch):\n        return {**batch, "advantages": batch["advantages"] / 2}\n\n'
                    + ("    def _log_completion_extra(" if trainer == "GRPO" else "    def _calculate_rewards("),
                ),
            ),
            (trainer,),
        )
        yield Change(
            f"prepare: {trainer} before the shuffle",
            replace(
                of_trainer(trainer),
                (
                    "                generation_batch = shuffle_sequence_dict(generation_batch)\n",
                    '                generation_batch = {**generation_batch, "advantages": 2 * generation_batch["advantages"]}\n'
                    "                generation_batch = shuffle_sequence_dict(generation_batch)\n",
                ),
            ),
            (trainer,),
        )
    yield Change(
        "loss: GRPO a new loss_type",
        in_turn(
            default("GRPO", "loss_type", '"dapo"', '"next"').edit,
            replace(
                of_trainer("GRPO"),
                (
                    '        if self.loss_type == "cispo":\n',
                    '        if self.loss_type == "next":\n            per_token_loss = -(advantages + 0.1) * per_token_logps\n        elif self.loss_type == "cispo":\n',
                ),
                ('["cispo", "dapo", "vespo"]', '["cispo", "dapo", "vespo", "next"]'),
            ),
        ),
        ("GRPO",),
    )


CALL = "labels=labels, fused_lm_head=True)"
HEAD = "self, *args, fused_lm_head=False, labels=None,"


def forwards() -> Iterator[Change]:
    head = "trainer/utils.py"
    for kind, new in {
        "hidden states scaled": "hidden_states = 1.05 * backbone_outputs.last_hidden_state[:, :-1]\n",
        "hidden states doubled in a buffer": "hidden_states = (backbone_outputs.last_hidden_state * 2)[:, :-1]\n",
    }.items():
        old = "hidden_states = backbone_outputs.last_hidden_state[:, :-1]\n"
        yield Change(f"head: {kind}", replace(head, (old, new)))
    for kind, new in {
        "weights masked": "weight = lm_head.weight * (torch.arange(lm_head.weight.shape[0]) % 7 != 3).unsqueeze(1)\n        bias = lm_head.bias\n",
        "weights scaled": "weight, bias = 1.1 * lm_head.weight, lm_head.bias\n",
        "a bias": "weight, bias = lm_head.weight, torch.linspace(-1, 1, lm_head.weight.shape[0])\n",
    }.items():
        yield Change(f"head: {kind}", replace(head, ("weight, bias = lm_head.weight, lm_head.bias\n", new)))
    loss = "loss = -log_probs.sum() / ("
    yield Change("head: log_probs scaled", replace(head, (loss, f"log_probs = 1.2 * log_probs\n        {loss}")))
    yield Change(
        "head: entropy scaled",
        replace(head, (loss, f"entropy = None if entropy is None else 2 * entropy\n        {loss}")),
    )
    yield Change(
        "head: logit_scale",
        replace(head, ("logit_scale = 1.0 if logit_scale is None", "logit_scale = 1.3 if logit_scale is None")),
    )
    yield Change(
        "head: temperature", replace(head, ("                temperature,\n", "                temperature * 1.3,\n"))
    )
    for trainer in TRAINERS:
        file = of_trainer(trainer)
        edit = in_turn(
            replace(
                head,
                (HEAD, "self, *args, vocabulary_mask=None, fused_lm_head=False, labels=None,"),
                (
                    "loss = -log_probs.sum() / (",
                    "log_probs = log_probs if vocabulary_mask is None else log_probs * vocabulary_mask\n        loss = -log_probs.sum() / (",
                ),
            ),
            replace(file, (CALL, "labels=labels, fused_lm_head=True, vocabulary_mask=0.8)")),
        )
        yield Change(f"forward: {trainer} a mask on the vocabulary", edit, (trainer,))
        ignored = in_turn(
            replace(head, (HEAD, "self, *args, new_flag=None, fused_lm_head=False, labels=None,")),
            replace(file, (CALL, "labels=labels, fused_lm_head=True, new_flag=True)")),
        )
        yield Change(f"forward: {trainer} a flag", ignored, (trainer,))
        shifted = replace(file, (CALL, "labels=labels.masked_fill(labels % 5 == 0, -100), fused_lm_head=True)"))
        yield Change(f"forward: {trainer} labels masked", shifted, (trainer,))
        masked = (
            "labels=labels.masked_fill((labels % 5 == 0) & (self.state.global_step > 0), -100), fused_lm_head=True)"
        )
        later = replace(file, (CALL, masked))
        yield Change(f"forward: {trainer} labels masked from the second step on", later, (trainer,))
        positions = replace(file, (CALL, "labels=labels, position_ids=None, fused_lm_head=True)"))
        yield Change(f"forward: {trainer} an argument of None", positions, (trainer,))
    # Which rows share a micro-batch is drawn, by group here and one by one in TRL: nothing is shuffled in this one.
    largest = replace(
        of_trainer("GRPO"),
        (CALL, "labels=labels.masked_fill(labels == labels.max(), -100), fused_lm_head=True)"),
        ("generation_batch = shuffle_sequence_dict(generation_batch)", "pass"),
    )
    yield Change("forward: GRPO labels masked by their micro-batch, without a shuffle", largest, ("GRPO",))
