"""A GRPO trainer on the PyPI package `prefix-grouper`, the contestant of `benchmarks/prefix_sharing_speedup.py`.

`pip install prefix-grouper` (0.0.1.post1 was used). Its own registration hands two-dimensional masks to the attention
function, which only FlashAttention reads as meant; with sdpa they are neither causal nor of the right shape. So the
package does the grouping and the attention function is given the causal masks it needs ("mask corrected"). The LM head
is this package's scoring head, at completions only, which flatters the contestant on CPU.
"""

import torch
from prefix_grouper import PrefixGrouper
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl import GRPOTrainer

from trl_fsdp_qlora.prefix_sharing.attention import no_mask
from trl_fsdp_qlora.scoring.logprobs import add_scoring_head

NAME = "prefix_grouper_causal"


def _attention(module, query, key, value, attention_mask, *, prefix_grouper=None, **kwargs):
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    q_prefix, k_prefix, v_prefix, q_suffix, k_suffix, v_suffix = prefix_grouper.ungroup(query, key, value)
    prefix = sdpa(module, q_prefix, k_prefix, v_prefix, None, **kwargs)[0]
    queries, prompt = q_suffix.shape[2], k_prefix.shape[2]
    mask = torch.ones(queries, prompt + queries, dtype=torch.bool, device=query.device).tril(prompt)
    suffix = sdpa(
        module,
        q_suffix,
        prefix_grouper.batch_repeat_cat(k_prefix, k_suffix, cat_dim=2),
        prefix_grouper.batch_repeat_cat(v_prefix, v_suffix, cat_dim=2),
        mask[None, None],
        **kwargs,
    )[0]
    return prefix_grouper.group(prefix, suffix), None


class PrefixGrouperTrainer(GRPOTrainer):
    """Prompts without padding, equal within a batch, right-padded completions: what the benchmark's points have."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        AttentionInterface.register(NAME, _attention)
        self.model.set_attn_implementation(NAME)
        add_scoring_head(self.model, self.temperature)

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
        rows, width = input_ids.shape
        prompt = width - logits_to_keep
        shared = bool((input_ids[:, :prompt] == input_ids[0, :prompt]).all())
        groups, size = (1, rows) if shared else (rows, 1)
        prompt_ids = input_ids[::size, :prompt]
        suffix_mask = attention_mask[:, prompt:]
        grouper = PrefixGrouper.from_ungrouped_masks(
            torch.ones_like(prompt_ids), suffix_mask, group_sizes=size, device=input_ids.device
        )
        ids = grouper.concat_input(prompt_ids, torch.ones_like(prompt_ids), input_ids[:, prompt:], suffix_mask)
        # Positions, and the places that predict: the prompt's last token, then each completion token but the last.
        lengths = suffix_mask.sum(1).view(groups, size).tolist()
        positions, scored = [], []
        for group, group_lengths in enumerate(lengths):
            base, offset = group * ids.shape[1], prompt
            row = [torch.arange(prompt)]
            for length in group_lengths:
                row.append(prompt + torch.arange(length))
                scored.append(torch.cat([torch.tensor([prompt - 1]), offset + torch.arange(length - 1)]) + base)
                offset += length
            positions.append(torch.cat(row))
        positions = torch.nn.utils.rnn.pad_sequence(positions, batch_first=True).to(ids.device)
        outputs = model(
            input_ids=ids,
            attention_mask=no_mask(ids.device),
            position_ids=positions,
            prefix_grouper=grouper,
            score_index_N=torch.cat(scored).to(ids.device),
            score_targets_N=input_ids[:, prompt:][suffix_mask.bool()],
        )
        zeros = outputs.log_probs.new_zeros(suffix_mask.shape)
        mask = suffix_mask.bool()
        return zeros.masked_scatter(mask, outputs.log_probs), zeros.masked_scatter(mask, outputs.entropy), None
