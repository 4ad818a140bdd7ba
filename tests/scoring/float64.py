"""What both kernels of the frozen head are compared with: the definition, in float64, with the logits."""

import torch


def logits(hidden_NH, weight_VH, bias_V, logit_scale=1.0):
    z = hidden_NH.double() @ weight_VH.double().T
    return (z if bias_V is None else z + bias_V.double()) * logit_scale


def reference(hidden_NH, weight_VH, bias_V, targets_N, temperature=1.0, softcap=None, logit_scale=1.0):
    """Log-probabilities and entropies."""
    z = logits(hidden_NH, weight_VH, bias_V, logit_scale)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_p = (z / temperature).log_softmax(-1)
    return log_p.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def gradient(log_probs_N, hidden_NH, upstream_N):
    return torch.autograd.grad((log_probs_N * upstream_N.to(log_probs_N.dtype)).sum(), hidden_NH)[0]


def assert_equal(found, hidden, weight, bias, targets, upstream, temperature=1.0, softcap=None, logit_scale=1.0):
    """Values and gradient of a kernel that computes in float32, `found = (log_probs, entropy)`.

    The bound is eight steps of float32 at the size of the largest logit: product, bias and scale, cap, temperature, the
    maximum's difference, sum and logarithm each round to half a step, the sums of products and the tanh to a few. Relative to
    the largest entry it bounds the gradient too, for that is made of probabilities, whose relative error is the absolute one
    of their logarithms.
    """
    settings = temperature, softcap, logit_scale
    log_probs, entropy = found
    want, want_entropy = reference(hidden, weight, bias, targets, *settings)
    size = logits(hidden, weight, bias, logit_scale).abs().max().item() * max(1.0, 1 / temperature)
    bound = 8 * torch.finfo(torch.float32).eps * size
    torch.testing.assert_close(log_probs.double(), want, atol=bound, rtol=0)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=bound, rtol=0)
    got, expected = gradient(log_probs, hidden, upstream), gradient(want, hidden, upstream)
    assert (got - expected).abs().max() <= bound * expected.abs().max()
