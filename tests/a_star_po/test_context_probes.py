"""Changes of what samples and decodes, each of which has to change the context of the keys."""

import copy

import pytest
from tokenizers import decoders
from transformers import GenerationConfig, PreTrainedTokenizerFast

from trl_fsdp_qlora.a_star_po.fingerprint import sampling_fingerprint, tokenizer_fingerprint

from .tiny import problems, tiny_model, tiny_tokenizer

OWN = {
    "top_k": 7, "top_p": 0.3, "min_p": 0.2, "typical_p": 0.5, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1,
    "repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2, "bad_words_ids": [[3]],
    "suppress_tokens": [4], "begin_suppress_tokens": [5], "forced_bos_token_id": 6, "forced_eos_token_id": 7,
    "min_length": 4, "min_new_tokens": 3, "sequence_bias": [[[3], -5.0]], "exponential_decay_length_penalty": [2, 1.5],
    "stop_strings": ["3"], "guidance_scale": 1.5, "remove_invalid_values": True, "renormalize_logits": True,
    "num_beams": 2, "max_time": 3.0,
}  # fmt: skip


def clean_up(tokenizer):
    tokenizer.clean_up_tokenization_spaces = not tokenizer.clean_up_tokenization_spaces


def decoder(tokenizer):
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()


TOKENIZER = {
    "clean_up_tokenization_spaces": clean_up,
    "the backend's decoder": decoder,
    "an added token": lambda tokenizer: tokenizer.add_tokens(["<new>"]),
    "a further special token": lambda tokenizer: tokenizer.add_special_tokens({"additional_special_tokens": ["="]}),
    "a token that became special": lambda tokenizer: tokenizer.add_special_tokens({"bos_token": "0"}),
    "chat_template": lambda tokenizer: setattr(tokenizer, "chat_template", "{{ messages }}"),
    "response_schema": lambda tokenizer: setattr(tokenizer, "response_schema", {"type": "object"}),
}


def ours(**settings):
    return GenerationConfig(max_new_tokens=8, pad_token_id=0, eos_token_id=[1], do_sample=True, **settings)


@pytest.mark.parametrize("name", OWN)
def test_the_models_own_generation_config_counts(name):
    model = tiny_model()
    before = sampling_fingerprint(model, ours())
    setattr(model.generation_config, name, OWN[name])
    assert sampling_fingerprint(model, ours()) != before


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "repetition_penalty", "typical_p", "suppress_tokens"])
def test_what_the_run_sets_itself_counts_in_its_place(name):
    model = tiny_model()
    before = sampling_fingerprint(model, ours(**{name: OWN[name]}))
    assert before != sampling_fingerprint(model, ours())
    setattr(model.generation_config, name, [8] if name == "suppress_tokens" else 0.9)
    assert sampling_fingerprint(model, ours(**{name: OWN[name]})) == before


@pytest.mark.parametrize("change", TOKENIZER.values(), ids=list(TOKENIZER))
def test_the_tokenizer_counts(change):
    tokenizer = tiny_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    change(tokenizer)
    assert tokenizer_fingerprint(tokenizer) != before


def test_a_class_of_the_users_own_counts_by_its_code():
    def make(shift):
        class Shifted(PreTrainedTokenizerFast):
            def batch_decode(self, *args, **kwargs):
                return [text[shift:] for text in super().batch_decode(*args, **kwargs)]

        made = copy.deepcopy(tiny_tokenizer())
        made.__class__ = Shifted
        return tokenizer_fingerprint(made)

    assert make(1) == make(1) != make(2)


def test_a_folder_a_call_and_a_side_of_padding_change_nothing(tmp_path):
    for folder in ("one", "two"):
        tiny_tokenizer().save_pretrained(tmp_path / folder)
    loaded = [PreTrainedTokenizerFast.from_pretrained(tmp_path / folder) for folder in ("one", "two")]
    before = tokenizer_fingerprint(loaded[0])
    assert tokenizer_fingerprint(loaded[1]) == before
    loaded[0](["1+1=", "2"], padding=True, truncation=True, max_length=3)
    loaded[0].padding_side = "right"
    assert tokenizer_fingerprint(loaded[0]) == before


@pytest.mark.parametrize("change", ["generation config", "decoding", "chat template arguments"])
def test_a_run_samples_again_after_a_change(make_trainer, change):
    first = make_trainer(rows=8, value_samples=1)
    assert first.estimate_values().samples == 8
    assert make_trainer(rows=8, value_samples=1).estimate_values().samples == 0
    settings = {"chat_template_kwargs": {"x": 1}} if change == "chat template arguments" else {}
    trainer = make_trainer(rows=8, value_samples=1, **settings)
    if change == "generation config":
        trainer.model.get_base_model().generation_config.suppress_tokens = [4]
    elif change == "decoding":
        clean_up(trainer.processing_class)
    assert trainer.estimate_values(problems(8)).samples == 8
