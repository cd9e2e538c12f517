"""What saves memory changes no gradient: the vocabulary's gradient in place, and recomputed activations."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from upswing.learn import Learner, logits, trainer
from upswing.learn.activations import Fits, _saved_bytes
from upswing.learn.forward import PackedAttention, packed_forward
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
@pytest.mark.parametrize(("kind", "padding"), [("llama", None), ("llama", 5), ("qwen2", None), ("gpt2", None)])
def test_in_place_equals_autograd(kind, padding, frozen, monkeypatch):
    """Whatever is frozen: head, embedding (both, where they are tied), or everything else. Qwen's aren't tied; torch
    never trains the row of a padding id by look-ups."""
    monkeypatch.setattr(logits, "CHUNK_ELEMENTS", 7 * VOCAB)
    model = switched(tiny(kind))
    model.get_input_embeddings().padding_idx = padding
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


def test_hooks_on_the_weight_are_called(monkeypatch):
    """By autograd, which therefore gets the gradient."""
    monkeypatch.setattr(Learner, "_apply_gradient", lambda *args: None)
    for kind in ("hook", "post_accumulate_grad_hook"):
        learner, seen = Learner(tiny(), lr=0.0), []
        learner.model.get_input_embeddings().padding_idx = None
        weight = learner.model.get_input_embeddings().weight
        getattr(weight, f"register_{kind}")(lambda tensor, seen=seen: seen.append(tensor))
        learner.sft_update(random_rows())
        assert len(seen) == 1 and seen[0].shape == weight.shape, kind


def test_a_product_in_low_precision_is_added_in_pieces(monkeypatch):
    monkeypatch.setattr(logits, "CHUNK_ELEMENTS", 40)  # 5 of 31 rows at a time
    generator = torch.Generator().manual_seed(0)
    g, h = (torch.randn(7, size, generator=generator).bfloat16() for size in (31, 8))
    total = torch.zeros(31, 8)
    logits._accumulate(total, g, h)
    torch.testing.assert_close(total, (g.t() @ h).float())


class Large(TorchDispatchMode):
    """Keeps every new float32 tensor, and counts matrix products in bfloat16, of at least `size` numbers."""

    def __init__(self, size):
        super().__init__()
        self.size, self.found, self.low = size, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.numel() >= self.size:
            if out.dtype == torch.float32:
                self.found[out.untyped_storage().data_ptr()] = out
            self.low += out.dtype == torch.bfloat16 and func.overloadpacket is torch.ops.aten.mm
        return out


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_vocabulary_s_gradient_exists_once(kind, dtype, monkeypatch):
    """Over two packs nothing else of that size is ever made, which plain autograd does."""
    monkeypatch.setattr(logits, "CHUNK_ELEMENTS", 16 * 4096)
    monkeypatch.setattr(Learner, "_apply_gradient", lambda *args: None)
    learner = Learner(tiny(kind, vocab_size=4096), lr=1e-3, max_tokens_per_pack=90, compute_dtype=dtype)
    rows = random_rows()
    learner.model.get_input_embeddings().padding_idx = None  # as in load_model
    parameters = {p.untyped_storage().data_ptr() for p in learner.model.parameters()}
    with Large(4096 * 32) as seen:
        learner.sft_update(rows)
    with Large(4096 * 32) as plain:
        accumulated(learner.model, rows, dtype)
    ours, autograds = (len(mode.found.keys() - parameters) for mode in (seen, plain))
    assert ours == (1 if kind == "llama" else 2) < autograds  # one a trained matrix
    assert seen.low == 0


# -- a budget for activations ------------------------------------------------------------------------------------------


def fits(model=None):
    """Tokens that fit 1 GB."""
    return Fits.measure(switched(model or tiny()), lambda: torch.autocast("cpu", enabled=False), 1.0)


def test_activations_are_those_counted_by_hand():
    """Llama, numbers a token and layer. Attention: its norm's input and normalised value (2 H) and output (H); queries,
    output before and after it's joined (3 H), keys and values (2 Hkv D); MLP: as the first (3 H), gate, its SiLU, up
    and their product (4 I). The last norm: 2 H. Rotary angles, read by all layers: 2 D."""
    hidden, heads, inner, layers = 32, 16, 48, 2
    numbers = layers * (9 * hidden + 2 * heads + 4 * inner) + 2 * hidden + 2 * 8
    assert fits().kept == pytest.approx(1e9 / (4 * numbers), rel=0.08)
    assert fits().recomputed > fits().kept


def test_dropout_s_masks_count_and_measuring_draws_nothing():
    model = tiny("gpt2")
    plain, before = fits(model), torch.get_rng_state()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    assert fits(model).kept < 0.95 * plain.kept and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("prompt", [20, 170])
@pytest.mark.parametrize("count", [1, 2, 12])
def test_copies_of_a_shared_prompt_count(prompt, count):
    """A pack takes what was foretold, and one that takes more than the budget is recomputed, though its tokens fit."""
    start = list(range(2, 60)) * 3
    rows = [row([*start[:prompt], *range(i, i + 10)], range(prompt, prompt + 10), advantage=1.0) for i in range(count)]
    [one], found = pack(rows, 1000), fits()
    assert one.num_copied == (count > 1) * count * (prompt + 9)
    taken = _saved_bytes(switched(tiny(vocab_size=100)), one)
    assert 1e9 / found.kept * (one.num_tokens + found.copied * one.num_copied) == pytest.approx(taken, rel=0.1)
    for share in (1.15, 0.9):
        learner = Learner(tiny(vocab_size=100), lr=0.0, gradient_checkpointing=share * taken / 1e9)
        metrics = learner.rl_update(rows)
        assert share < 1 or metrics.num_tokens_recomputed == 0
        for part in learner.packs(rows):
            kept = not learner._fits.recomputes(part)
            assert not kept or _saved_bytes(switched(tiny(vocab_size=100)), part) <= 1.1 * share * taken


@pytest.mark.parametrize("off", [0, 0.0, None, False])
def test_no_budget_is_no_recomputation(off):
    learner = Learner(tiny(), lr=0.0, gradient_checkpointing=off)
    assert learner.rl_update(random_rows()).num_tokens_recomputed == 0
    assert not any(getattr(module, "gradient_checkpointing", False) for module in learner.model.modules())


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, "1"])
def test_a_budget_that_is_none(bad):
    with pytest.raises(ValueError, match="allowed: True, False or a number of GB above 0"):
        Learner(tiny(), lr=0.0, gradient_checkpointing=bad)


@pytest.mark.parametrize(("tokens", "share"), [(0.5, 1), (30, 1), (100, None), (10_000, 0)])
def test_any_budget_gives_the_same_gradient(tokens, share, monkeypatch):
    """`share`: of the tokens that is recomputed, which runs attention once more."""
    rows, calls, attend = random_rows(), [], PackedAttention.attend
    learner = Recorder(tiny(), gradient_checkpointing=tokens / fits().kept)
    monkeypatch.setattr(PackedAttention, "attend", lambda *args: calls.append(1) or attend(*args))
    metrics = learner.rl_update(rows)
    packs = learner.packs(rows)
    assert len(calls) == 2 * (len(packs) + sum(map(learner._fits.recomputes, packs)))
    want, unlimited = rl_gradient(rows)
    assert_same_gradients(learner.steps[0], want, atol=1e-6)
    assert unlimited.num_tokens_recomputed == 0
    assert share is None or metrics.num_tokens_recomputed == share * metrics.num_tokens


def test_smaller_packs_come_before_recomputation_unless_they_cost_more(monkeypatch):
    """Rows that share nothing are cut; a long beginning that all share isn't computed three times. Tiny packs are no
    faster than small ones."""
    alone = [row(range(10 * i, 10 * i + 30), range(20, 30), advantage=1.0, group=i) for i in range(4)]
    start = list(range(2, 60)) * 2
    shared = [row([*start, *range(i, i + 20)], range(120, 136), advantage=1.0) for i in range(4)]
    learner = Learner(tiny(vocab_size=100), lr=0.0, gradient_checkpointing=1.0)
    for rows, kept, recomputed, floor, want in [
        (alone, 60, math.inf, 1, ([58, 58], 0)),
        (alone, 60, math.inf, 256, ([116], 116)),
        (shared, 160, math.inf, 1, ([len(start) + 4 * 19], 192)),
        (shared, 160, 160, 256, ([154, 154], 0)),
        (shared, 20, 160, 1, ([154, 154], 308)),
        (shared, 0.1, 0.2, 1, ([135] * 4, 540)),
    ]:
        monkeypatch.setattr(trainer, "FLOOR", floor)
        learner._fits = Fits(kept=kept, recomputed=recomputed)
        metrics = learner.rl_update(rows)
        assert ([one.num_tokens for one in learner.packs(rows)], metrics.num_tokens_recomputed) == want


def test_recomputing_keeps_less():
    """The most that is alive between forward and backward, in storages saved for it."""
    model = Learner(tiny(), lr=0.0, gradient_checkpointing=True).model
    [one] = pack(random_rows(), 1000)
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
