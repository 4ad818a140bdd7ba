"""Scoring of selected positions, compared with float64 logits and with TRL's kernel.

Covers `scoring/frozen_head.py`.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.tiny import serve_by_onednn
from trl_fsdp_qlora.compat.older_gpus import casting_wide_sums
from trl_fsdp_qlora.compat.triton_kernels import interpreted, launch
from trl_fsdp_qlora.compat.trl import ChunkedLogProbFunction, FusedHead
from trl_fsdp_qlora.scoring import cpu_linear as cpu_linear
from trl_fsdp_qlora.scoring import frozen_head
from trl_fsdp_qlora.scoring.logprobs import HeadSettings, choose_head_kernel, score_positions, score_with_head

N, H, V = 37, 24, 150


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


def assert_equal(actual, hidden, weight, bias, targets, upstream, temperature=1.0, softcap=None, logit_scale=1.0):
    """The bound is eight steps of float32 at the size of the largest logit: product, bias and scale, cap, temperature,
    the maximum's difference, sum and logarithm each round to half a step, the sums of products and the tanh to a few.
    Relative to the largest entry it bounds the gradient too, for that is made of probabilities, whose relative error
    is the absolute one of their logarithms.
    """
    settings = temperature, softcap, logit_scale
    log_probs, entropy, *_ = actual
    want, want_entropy = reference(hidden, weight, bias, targets, *settings)
    size = logits(hidden, weight, bias, logit_scale).abs().max().item() * max(1.0, 1 / temperature)
    bound = 8 * torch.finfo(torch.float32).eps * size
    torch.testing.assert_close(log_probs.double(), want, atol=bound, rtol=0)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=bound, rtol=0)
    got = gradient(log_probs, hidden, upstream)
    expected = gradient(want, hidden, upstream)
    assert (got - expected).abs().max() <= bound * expected.abs().max()


def launched(*args, **constants) -> bool:
    """A kernel that Triton refuses is no test of it."""
    assert launch(*args, **constants)
    return True


@pytest.fixture(autouse=True, params=["torch", "oneDNN", "Triton"])
def several_tiles(monkeypatch, request):
    """Sizes at which one call crosses tiles and chunks and ends in partial ones, by either library's products; or as
    on a GPU, with the kernel in Triton's interpreter."""
    monkeypatch.setattr(frozen_head, "TOKEN_TILE", 16)
    monkeypatch.setattr(frozen_head, "VOCABULARY_CHUNK", 64)
    if request.param == "Triton":
        if not interpreted(frozen_head._fold_kernel):
            pytest.skip("needs Triton and TRITON_INTERPRET=1: make test-kernels")
        monkeypatch.setattr(frozen_head, "runs", lambda kernel, x: x.dtype != torch.float64)
        monkeypatch.setattr(frozen_head, "launch", launched)
        monkeypatch.setattr(frozen_head, "_BLOCK", 32)
    if request.param == "oneDNN":
        serve_by_onednn(monkeypatch)
    else:
        monkeypatch.setattr(cpu_linear, "beats_mkl", lambda: False)


def problem(bias: bool, dtype=torch.float32, spread: float = 1.0):
    torch.manual_seed(0)
    hidden_NH = torch.randn(N, H, dtype=dtype)
    weight_VH = (torch.randn(V, H) * spread).to(dtype)
    bias_V = torch.randn(V).to(dtype) if bias else None
    return hidden_NH.requires_grad_(), weight_VH, bias_V, torch.randint(0, V, (N,)), torch.randn(N)


# exp() without a moving reference overflows on the ramp: the last chunk's logits are hundreds of nats above the
# first's.
@pytest.mark.parametrize("bias", ["none", "some", "a ramp"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("temperature", "logit_scale"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.25)])
def test_frozen_head_equals_float64_logits(bias, softcap, temperature, logit_scale):
    hidden, weight, bias_V, targets, upstream = problem(bias == "some")
    bias_V = torch.linspace(-300, 300, V) if bias == "a ramp" else bias_V
    settings = (temperature, softcap, logit_scale)
    log_probs = score_positions(hidden, weight, bias_V, targets, HeadSettings(*settings))
    assert_equal(log_probs, hidden, weight, bias_V, targets, upstream, *settings)


def test_pass_without_gradient_gives_the_same_bits():
    """Old and new log-probabilities of one policy must agree exactly, or rounding shows up as a ratio; one vector a
    token is kept.
    """
    hidden, weight, bias, targets, _ = problem(True)
    with torch.no_grad():
        old = score_positions(hidden, weight, bias, targets)
    kept = []

    def record(tensor):
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        new = score_positions(hidden, weight, bias, targets)
    assert torch.equal(old[0], new[0]) and torch.equal(old[1], new[1])
    assert kept == [(N, H)]


def assert_no_further_from_float64_than_trls(hidden, weight, targets, upstream, softcap=None, **kernel):
    """The frozen kernel's gradient in bfloat16, and its log-probabilities."""
    exact_hidden = hidden.detach().double().requires_grad_()
    want = reference(exact_hidden, weight, None, targets, softcap=softcap)[0]
    exact = gradient(want, exact_hidden, upstream)
    log_probs = score_positions(hidden, weight, None, targets, HeadSettings(softcap=softcap, **kernel))[0]
    ours = gradient(log_probs, hidden, upstream)
    stock = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 8192, softcap, 1.0, ("log_probs",))[0]
    with casting_wide_sums():  # as the trainer does
        stocks = gradient(stock, hidden, upstream)
    error, stock_error = ((grad.double() - exact).pow(2).mean().sqrt() for grad in (ours, stocks))
    assert error <= stock_error
    # Products of bfloat16 operands are exact in float32; what is left is the order of the sums.
    torch.testing.assert_close(log_probs.double(), want.detach(), atol=1e-3, rtol=1e-4)


def test_bfloat16_gradient():
    hidden, weight, _, targets, upstream = problem(False, torch.bfloat16)
    assert_no_further_from_float64_than_trls(hidden, weight, targets, upstream)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: half-precision products summed in float32")
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_cuda_bfloat16_gradient(softcap, monkeypatch):
    monkeypatch.undo()  # tiles of their real size
    torch.manual_seed(0)
    hidden = torch.randn(128, 896, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(49152, 896, device="cuda") * 0.05).bfloat16()
    targets = torch.randint(0, 49152, (128,), device="cuda")
    upstream = torch.randn(128, device="cuda")
    assert_no_further_from_float64_than_trls(hidden, weight, targets, upstream, softcap, kernel="frozen")


def test_autocast_projects_bfloat16_operands_and_sums_in_float32():
    hidden, weight, _, targets, upstream = problem(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs, entropy, *_ = score_positions(hidden, weight, None, targets)
        stock, _, *_ = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, 64, None, 1.0, ("log_probs",))
    assert log_probs.dtype == entropy.dtype == torch.float32
    rounded = [tensor.detach().bfloat16() for tensor in (hidden, weight)]
    want, want_entropy = reference(*rounded, None, targets)
    # bf16 operands, float32 sums: no rounding beyond that of the operands.
    torch.testing.assert_close(log_probs.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=1e-5, rtol=0)
    ours = gradient(log_probs, hidden, upstream)
    stocks = gradient(stock, hidden, upstream)
    assert ours.dtype == torch.float32
    # TRL rounds logits of size up to 20 to 8 bits.
    assert (ours - stocks).abs().max() < 0.05 * stocks.abs().max()


def test_a_frozen_head_without_an_entropy_is_projected_twice():
    """As CPO and ORPO want it; the mean of the logits needs no projection."""
    hidden, weight, _, targets, _ = problem(False)
    for wanted, kernel in ((("log_probs", "mean_logits"), "FrozenHead"), (("log_probs", "entropy"), "ChunkedLogProb")):
        log_probs, *_ = score_positions(
            hidden, weight, None, targets, HeadSettings(entropy_gradient=True, wanted=wanted)
        )
        assert kernel in type(log_probs.grad_fn).__name__


def test_gradients_that_the_frozen_kernel_lacks_are_trls():
    hidden, weight, _, targets, upstream = problem(False)
    _, entropy, *_ = score_positions(hidden, weight, None, targets)
    with pytest.raises(RuntimeError, match="lm_head_kernel='trl'"):
        entropy.sum().backward()
    _, entropy, *_ = score_positions(hidden, weight, None, targets, HeadSettings(kernel="trl"))
    assert torch.isfinite(gradient(entropy, hidden, torch.ones(N))).all()
    _, entropy, *_ = score_positions(hidden, weight, None, targets, HeadSettings(entropy_gradient=True))
    of_entropy = gradient(entropy, hidden, torch.ones(N))
    want = gradient(reference(hidden, weight, None, targets)[1], hidden, torch.ones(N))
    torch.testing.assert_close(of_entropy, want, atol=1e-5, rtol=1e-4)
    weight.requires_grad_()
    of_head = gradient(score_positions(hidden, weight, None, targets)[0], weight, upstream)
    want = gradient(reference(hidden, weight, None, targets)[0], weight, upstream)
    torch.testing.assert_close(of_head, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("trained_head", [False, True])
def test_scoring_head_equals_the_models_own_logits(trained_head):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes))
    model.lm_head.weight.requires_grad_(trained_head)
    ids_BT = torch.randint(0, 97, (2, 11))
    stock_BTV = (model(input_ids=ids_BT).logits / 0.8).log_softmax(-1)
    index = torch.tensor([0, 5, 9, 12, 20])
    targets = ids_BT.flatten()[index + 1]
    want = stock_BTV.flatten(0, 1)[index, targets]
    head = FusedHead(0.8, False, ("log_probs", "entropy"), None, 1.0)
    hidden = model.model(input_ids=ids_BT).last_hidden_state.flatten(0, 1)
    log_probs = score_with_head(model, hidden[index], targets, head)
    torch.testing.assert_close(log_probs["log_probs"], want, atol=1e-5, rtol=1e-5)
    parameter = model.model.layers[0].mlp.up_proj.weight
    got = torch.autograd.grad(log_probs["log_probs"].sum(), parameter, retain_graph=True)[0]
    torch.testing.assert_close(got, torch.autograd.grad(want.sum(), parameter)[0], atol=1e-5, rtol=1e-4)
    # An empty micro-batch must run its backward: DDP and FSDP wait for every rank.
    empty = torch.zeros(0, dtype=torch.long)
    hidden = model.model(input_ids=ids_BT).last_hidden_state.flatten(0, 1)
    score_with_head(model, hidden[empty], empty, head)["log_probs"].sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and not parameter.grad.any(), name


@pytest.mark.parametrize("softcap", [3.0, None])
@pytest.mark.parametrize(
    "outputs", [("log_probs",), ("entropy",), ("mean_logits",), ("log_sum_sq_probs", "mean_logits", "is_top1")]
)
def test_scoring_head_returns_the_fields_that_trls_head_returns(outputs, softcap):
    torch.manual_seed(0)
    hidden = torch.randn(9, 32)
    targets = torch.randint(0, 97, (9,))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes)).requires_grad_(False)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(97), requires_grad=False)
    log_probs = score_with_head(model, hidden, targets, FusedHead(0.8, False, outputs, softcap, 0.5))
    assert {name for name, x in log_probs.items() if x is not None} == {"log_probs", *outputs}
    logits = 0.5 * model.lm_head(hidden)
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.8
    log_p = logits.log_softmax(-1)
    wanted = {
        "log_probs": log_p.gather(1, targets[:, None])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(1),
        "log_sum_sq_probs": log_p.exp().square().sum(1).log(),
        "mean_logits": logits.mean(1),
        "is_top1": logits.argmax(1) == targets,
    }
    for name, x in log_probs.items():
        if x is not None:
            torch.testing.assert_close(x.to(wanted[name].dtype), wanted[name], atol=1e-4, rtol=1e-5, msg=name)


def test_which_kernel_scores():
    for choice, device, options, kernel in (
        ("auto", "cpu", {}, "frozen"),
        ("auto", "cuda", {}, "trl"),
        ("auto", "cuda", {"gathered": True}, "frozen"),
        ("auto", "cuda", {"triton": False}, "frozen"),
        ("auto", "cuda", {"dtype": torch.float64}, "frozen"),
        ("trl", "cpu", {}, "trl"),
        ("frozen", "cuda", {}, "frozen"),
        ("frozen", "cuda", {"trained": True}, "trl"),
        ("frozen", "cpu", {"entropy_gradient": True}, "trl"),
    ):
        arguments = {"dtype": torch.bfloat16, "triton": True, **options}
        assert choose_head_kernel(choice, device, **arguments) == kernel, (choice, device, options)
