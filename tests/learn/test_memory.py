"""What saves memory changes no gradient: the vocabulary's gradient in place, and recomputed activations."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from upswing.learn import Learner, logits
from upswing.learn.activations import Fits
from upswing.learn.forward import packed_forward
from upswing.learn.in_place import gradients_in_place
from upswing.learn.packing import pack
from upswing.learn.rows import flatten

from .helpers import VOCAB, assert_same_gradients, random_rows, row, switched, tiny
from .test_learner import Recorder, rl_gradient


def assert_close(got, want, rtol):
    """Every tensor within `rtol` of the norm of the right one."""
    assert got.keys() == want.keys()
    for name, right in want.items():
        assert (got[name] - right).norm() <= rtol * right.norm(), name


# -- the vocabulary's gradient -----------------------------------------------------------------------------------------


def accumulated(model, rows, dtype=None):
    """Gradients of log-probs and entropies, summed over several packs by `backward`."""
    model.zero_grad()
    weights = torch.linspace(-1, 1, flatten(rows).num_tokens)
    packs = pack(rows, 90)
    assert len(packs) > 2
    for one in packs:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            policy, entropy = packed_forward(model, one, 0.8)
        (weights[one.slot_M] * (policy + 0.3 * entropy)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("frozen", [(), ("lm_head",), ("embed", "wte"), ("layers", "h.", "norm", "ln")])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])  # tied, untied, tied without a padding id
def test_in_place_equals_autograd(kind, frozen, monkeypatch):
    """Whatever is frozen: head, embedding (both, where they are tied), or everything else."""
    monkeypatch.setattr(logits, "CHUNK_ELEMENTS", 7 * VOCAB)
    model = switched(tiny(kind))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    rows = random_rows()
    want = accumulated(model, rows)
    with gradients_in_place():
        assert_close(accumulated(model, rows), want, 1e-6)


def test_autograd_grad_is_left_alone():
    """Outside a trainer's step the weight's gradient is returned, and `.grad` isn't touched."""
    model = switched(tiny())
    [one] = pack(random_rows(groups=1), 1000)
    weight = model.get_input_embeddings().weight
    [found] = torch.autograd.grad(packed_forward(model, one, 1.0)[0].sum(), [weight])
    assert found.abs().max() > 0 and weight.grad is None


class Large(TorchDispatchMode):
    """Keeps every new float32 tensor of at least `size` numbers."""

    def __init__(self, size):
        super().__init__()
        self.size, self.found = size, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.numel() >= self.size:
            self.found[out.untyped_storage().data_ptr()] = out
        return out


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_vocabulary_s_gradient_exists_once(kind, dtype, monkeypatch):
    """Over two packs nothing else of that size is ever made, which plain autograd does."""
    monkeypatch.setattr(logits, "CHUNK_ELEMENTS", 16 * 4096)
    monkeypatch.setattr(Learner, "_apply_gradient", lambda *args: None)
    learner = Learner(tiny(kind, vocab_size=4096), lr=1e-3, max_tokens_per_pack=90, compute_dtype=dtype)
    rows = random_rows()
    parameters = {p.untyped_storage().data_ptr() for p in learner.model.parameters()}
    with Large(4096 * 32) as seen:
        learner.sft_update(rows)
    with Large(4096 * 32) as plain:
        accumulated(learner.model, rows, dtype)
    ours, autograds = (len(mode.found.keys() - parameters) for mode in (seen, plain))
    assert ours == (1 if kind == "llama" else 2) < autograds  # one a trained matrix


# -- a budget for activations ------------------------------------------------------------------------------------------


def fits():
    """Tokens that fit 1 GB."""
    model = switched(tiny())
    return Fits.measure(model, lambda: torch.autocast("cpu", enabled=False), 1.0)


def test_activations_are_those_counted_by_hand():
    """Llama, numbers a token and layer. Attention: its norm's input and normalised value (2 H) and output (H); queries,
    output before and after it's joined (3 H), keys and values (2 Hkv D); MLP: as the first (3 H), gate, its SiLU, up
    and their product (4 I). The last norm: 2 H. Rotary angles, read by all layers: 2 D."""
    hidden, heads, inner, layers = 32, 16, 48, 2
    numbers = layers * (9 * hidden + 2 * heads + 4 * inner) + 2 * hidden + 2 * 8
    assert fits().kept == pytest.approx(1e9 / (4 * numbers), rel=0.08)
    assert fits().recomputed > fits().kept


@pytest.mark.parametrize(("tokens", "share"), [(0.5, 1), (30, 1), (100, None), (10_000, 0)])
def test_any_budget_gives_the_same_gradient(tokens, share):
    """`share`: of the tokens that is recomputed."""
    rows = random_rows()
    learner = Recorder(tiny(), gradient_checkpointing=tokens / fits().kept)
    metrics = learner.rl_update(rows)
    want, unlimited = rl_gradient(rows)
    assert_same_gradients(learner.steps[0], want, atol=1e-6)
    assert unlimited.num_tokens_recomputed == 0
    assert share is None or metrics.num_tokens_recomputed == share * metrics.num_tokens


def test_smaller_packs_come_before_recomputation_unless_they_cost_more():
    """Rows that share nothing are cut; a long beginning that all share isn't computed three times."""
    alone = [row(range(10 * i, 10 * i + 30), range(20, 30), advantage=1.0, group=i) for i in range(4)]
    start = list(range(2, 60)) * 2
    shared = [row([*start, *range(i, i + 20)], range(120, 136), advantage=1.0) for i in range(4)]
    learner = Learner(tiny(vocab_size=100), lr=0.0, gradient_checkpointing=1.0)
    for rows, kept, recomputed, want in [
        (alone, 60, math.inf, ([58, 58], 0)),
        (shared, 160, math.inf, ([len(start) + 4 * 19], 192)),
        (shared, 160, 160, ([154, 154], 0)),
        (shared, 20, 160, ([154, 154], 308)),
        (shared, 0.1, 0.2, ([135] * 4, 540)),
    ]:
        learner._fits = Fits(kept=kept, recomputed=recomputed)
        metrics = learner.rl_update(rows)
        assert ([one.num_tokens for one in learner.packs(rows)], metrics.num_tokens_recomputed) == want


def test_recomputing_keeps_less():
    """The most that is alive between forward and backward, in storages saved for it."""
    model = switched(tiny())
    [one] = pack(random_rows(), 1000)
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if hasattr(model, name):
            getattr(model, name)({"use_reentrant": False})
            break
    model.train()
    kept = []

    def count(tensor):
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        packed_forward(model, one, 1.0)
    recomputed, kept[:] = sum(kept), []
    model.eval()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        packed_forward(model, one, 1.0)
    assert recomputed < 0.5 * sum(kept)
