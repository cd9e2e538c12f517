"""LoRA held against hand-made adapters, finite differences, the merged model, and peft's own loader."""

import copy
import math

import numpy as np
import pytest
import torch

from upswing.engine.weights import load_weights
from upswing.errors import ConfigError
from upswing.learn import Learner, frozen_copy
from upswing.learn.forward import packed_forward
from upswing.learn.lora import ADAPTER, PlainWeights, add_lora, is_adapted, load_adapter, trained
from upswing.learn.packing import pack
from upswing.models.heads import scalar_model

from .helpers import assert_same_gradients, plain_at_loss, random_rows, switched, tiny

peft = pytest.importorskip("peft")


def adapted(kind="llama", seed=0, moved=False, **options):
    """A tiny model with an adapter; `moved`: as if it had been trained."""
    model = add_lora(tiny(kind, seed), **{"r": 4, "alpha": 8.0, **options})
    if moved:
        move(model)
    return model


@torch.no_grad()
def move(model, seed=1, size=0.1):
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(model).values():
        parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def frozen(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for name, right in want.items():
        assert torch.equal(got[name], right), name


def logprobs(model, rows):
    """[N] through the packed forward, in evaluation mode."""
    return at_loss(Learner(model, lr=1.0), rows)


def at_loss(learner, rows):
    found = learner.logprobs(rows)
    return torch.cat([torch.from_numpy(v[r.loss_positions]) for v, r in zip(found, rows, strict=True)])


# -- the adapter -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # tied without biases, untied with biases
def test_merged_weights_by_hand(kind, rslora):
    base = tiny(kind)
    model = adapted(kind, r=4, alpha=8.0, rslora=rslora, target=("q_proj", "down_proj"), moved=True)
    scaling = 8 / math.sqrt(4) if rslora else 8 / 4
    layers = dict(model.named_modules())
    want = {name: p.detach() for name, p in base.named_parameters()}
    for name in [name for name in want if name.endswith(("q_proj.weight", "down_proj.weight"))]:
        layer = layers[name.removesuffix(".weight")]
        want[name] = want[name] + scaling * layer.lora_B["default"].weight.detach() @ layer.lora_A["default"].weight
    got = PlainWeights(model)
    assert got.keys() == want.keys() and len(list(got)) == len(want)
    for name, right in want.items():
        torch.testing.assert_close(got[name], right, rtol=1e-6, atol=1e-6)
    merged = tiny(kind, seed=3)
    load_weights(merged, got)
    rows = random_rows()
    torch.testing.assert_close(logprobs(model, rows), plain_at_loss(merged, rows).detach(), rtol=0, atol=2e-5)


def test_only_the_adapter_is_trained():
    model = adapted()
    learner = Learner(model, lr=1e-2, weight_decay=0.5, gradient_checkpointing=True)
    names = trained(model)
    assert len(names) == 2 * 7 * 2 and all(".lora_" in name for name in names)
    held = {id(p) for group in learner._optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in names.values()}
    before, loss = frozen(model), []
    for _ in range(12):
        loss.append(learner.sft_update(random_rows()).loss)
        learner.rl_update(random_rows(), kl_coef=0.1)
    assert loss[-1] < 0.8 * loss[0]
    assert_equal(frozen(model), before)
    assert learner._optimizer.state[next(iter(names.values()))]["exp_avg"].dtype == torch.float32


def loss_of(policy_N):
    return -(policy_N * torch.linspace(-1, 2, len(policy_N))).mean()


@pytest.mark.parametrize("rslora", [False, True])
def test_gradients_by_the_chain_rule(rslora):
    """dA = scaling B^T dW and dB = scaling dW A^T, with dW of the plain merged model, a row at a time."""
    model, merged, rows = adapted(rslora=rslora, moved=True), tiny(), random_rows()
    load_weights(merged, PlainWeights(model))
    loss_of(plain_at_loss(merged, rows)).backward()
    [one] = pack(rows, 10_000)
    loss_of(packed_forward(switched(model), one, 1.0)[0][one.slot_M.argsort()]).backward()
    scaling = 8.0 / (math.sqrt(4) if rslora else 4)
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            a, b, dW = (
                layer.lora_A["default"].weight,
                layer.lora_B["default"].weight,
                merged.get_submodule(name).weight.grad,
            )
            for got, want in ((a.grad, scaling * b.T @ dW), (b.grad, scaling * dW @ a.T)):
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5 * max(1.0, want.abs().max().item()))


def test_gradients_are_finite_differences():
    """Along random directions of all adapter weights; norms are float32 in the model, hence the tolerance."""
    model = switched(adapted(moved=True).double())
    [one] = pack(random_rows(groups=1), 10_000)
    parameters = list(trained(model).values())
    gradient = torch.autograd.grad(loss_of(packed_forward(model, one, 1.0)[0]), parameters)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        drawn = [torch.randn(p.shape, generator=generator).double() for p in parameters]
        size = math.sqrt(sum(float(d.square().sum()) for d in drawn))
        direction = [d / size for d in drawn]
        values = []
        for step in (5e-3, -5e-3):
            moved = copy.deepcopy(model)
            with torch.no_grad():
                for p, d in zip(trained(moved).values(), direction, strict=True):
                    p.add_(step * d)
                values.append(loss_of(packed_forward(moved, one, 1.0)[0]).item())
        got = sum((g * d).sum().item() for g, d in zip(gradient, direction, strict=True))
        assert got == pytest.approx((values[0] - values[1]) / 1e-2, rel=2e-3, abs=1e-4)


def test_gradient_checkpointing_changes_nothing():
    found = []
    for checkpointing in (False, True):
        model = adapted(moved=True)
        learner = Learner(model, lr=0.0, gradient_checkpointing=checkpointing)
        model.train()
        loss_of(packed_forward(model, pack(random_rows(), 10_000)[0], 1.0)[0]).backward()
        found.append({name: p.grad for name, p in trained(learner.model).items()})
    assert_same_gradients(found[0], found[1], atol=1e-6)
    assert all(gradient.abs().max() > 0 for gradient in found[0].values())


def test_a_scalar_head_is_trained_in_full_and_saved_with_the_adapter(tmp_path):
    from upswing.learn.critic import Critic

    critic = Critic(add_lora(scalar_model(tiny()), r=2), lr=1e-2)
    assert "score.weight" in trained(critic.model) and len(trained(critic.model)) == 2 * 7 * 2 + 1
    rows = random_rows()
    ones = [np.ones(len(row.tokens), np.float32) for row in rows]
    for _ in range(3):
        critic.value_update(rows, ones, critic.values(rows))
    critic.save(tmp_path / "critic")
    base = scalar_model(tiny())
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "critic" / ADAPTER)
    weight = loaded.base_model.model.score.modules_to_save["default"].weight
    assert weight.abs().max() > 0 and torch.equal(weight, critic.model.score.weight)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": ("q_prj",)}, "lora.target: no linear layer 'q_prj'; did you mean 'q_proj'"),
        ({"target": ("q_proj", "lm_head")}, "no linear layer 'lm_head'"),
        ({"target": ("embed_tokens",)}, "no linear layer 'embed_tokens'"),
    ],
)
def test_what_cannot_be_adapted(options, message):
    with pytest.raises(ConfigError, match=message):
        add_lora(tiny(), **options)


# -- weights for the engine (SYNC-02, SYNC-03, SYNC-06) ----------------------------------------------------------------


def test_syncs_after_a_resume_count_the_adapter_once(tmp_path):
    """SYNC-02: W = 1 with a delta of 0.5 is 1.5 in the engine after each sync, not 2 after the second."""
    model, engine = adapted(target=("q_proj",), r=1, alpha=1.0), tiny()
    name = "model.layers.0.self_attn.q_proj"
    layer = model.get_submodule(name)
    with torch.no_grad():
        layer.base_layer.weight.fill_(1.0)
        layer.lora_A["default"].weight.fill_(0.5)
        layer.lora_B["default"].weight.fill_(1.0)
    Learner(model, lr=0.1).save(tmp_path / "c")
    resumed = Learner(adapted(target=("q_proj",), r=1, alpha=1.0), lr=0.1)
    with torch.no_grad():
        resumed.model.get_submodule(name).base_layer.weight.fill_(1.0)
    resumed.load(tmp_path / "c")
    for _ in range(3):
        load_weights(engine, resumed.weights())
        weight = engine.get_submodule(name).weight
        assert torch.equal(weight, torch.full_like(weight, 1.5))


def test_syncs_leave_the_base_bit_equal_and_small_deltas_whole():
    """SYNC-03: deltas that bf16 would swallow at 1.0 (0.001, 0.003, 0.0039) arrive; 20 syncs don't move the base."""
    model, engine = adapted(target=("q_proj",), r=1, alpha=1.0), tiny()
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    with torch.no_grad():
        layer.base_layer.weight.fill_(1.0)
        layer.lora_B["default"].weight.fill_(1.0)
    before, learner = frozen(model), Learner(model, lr=0.1)
    for step in range(20):
        delta = (0.001, 0.003, 0.0039, 0.004)[step % 4]
        layer.lora_A["default"].weight.data.fill_(delta)
        load_weights(engine, learner.weights())
        weight = engine.model.layers[0].self_attn.q_proj.weight
        assert torch.equal(weight, torch.full_like(weight, 1.0) + torch.full_like(weight, delta))
    assert_equal(frozen(model), before)


def test_every_trained_tensor_reaches_the_engine_once():
    """SYNC-06: names are plain, none is given twice or forgotten; what can't be merged is refused."""
    learner = Learner(adapted(moved=True), lr=1e-2)
    names = list(learner.weights())
    assert len(names) == len(set(names)) and set(names) == {name for name, _ in tiny().named_parameters()}
    engine = tiny()
    load_weights(engine, learner.weights())
    rows = random_rows()
    torch.testing.assert_close(logprobs(learner.model, rows), logprobs(engine, rows), rtol=0, atol=2e-5)

    wrapped = peft.get_peft_model(tiny("qwen2"), peft.LoraConfig(r=4, modules_to_save=["lm_head"])).base_model.model
    with pytest.raises(ConfigError, match="can't be merged"):
        PlainWeights(wrapped)
    dora = peft.inject_adapter_in_model(peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj"]), tiny())
    with pytest.raises(ConfigError, match="can't be merged"):
        PlainWeights(dora)


def test_a_base_shifted_by_its_initialisation_is_merged_right():
    """SYNC-06: PiSSA takes the adapter's first value out of the base; the merged weights are the original ones."""
    config = peft.LoraConfig(r=4, init_lora_weights="pissa", target_modules=["q_proj"])
    model = peft.inject_adapter_in_model(config, tiny())
    for name, right in tiny().named_parameters():
        torch.testing.assert_close(PlainWeights(model)[name], right.detach(), rtol=0, atol=1e-5)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def train(learner, first, last):
    for step in range(first, last):
        learner.sft_update(random_rows(step))
        learner.rl_update(random_rows(step), minibatches=2, kl_coef=0.05)


def test_resume_is_bit_identical(tmp_path):
    """Dropout, optimizer and a refreshed reference included; the base model stays as it was."""
    options = {"lr": 3e-3, "weight_decay": 0.1, "seed": 5}
    straight = Learner(adapted("qwen2", dropout=0.1), **options)
    torch.manual_seed(0)
    train(straight, 0, 2)
    straight.reference.refresh()
    train(straight, 2, 3)
    straight.save(tmp_path / "c")
    resumed = Learner(adapted("qwen2", dropout=0.1, moved=True), **options)
    before = frozen(resumed.model)
    resumed.load(tmp_path / "c")
    after = torch.get_rng_state()
    train(resumed, 3, 5)
    torch.set_rng_state(after)
    train(straight, 3, 5)
    assert_equal(trained(resumed.model), trained(straight.model))
    assert_equal(frozen(resumed.model), before)
    assert_equal(before, frozen(straight.model))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_checkpoint_is_a_plain_model_and_a_peft_adapter(tmp_path, kind):
    model = adapted(kind, rslora=True, target=("q_proj", "up_proj"), moved=True)
    learner = Learner(model, lr=1e-2)
    learner.save(tmp_path / "c")
    plain = type(model).from_pretrained(tmp_path / "c")
    assert_equal(dict(plain.named_parameters()), dict(learner.weights()))
    on_base = peft.PeftModel.from_pretrained(tiny(kind), tmp_path / "c" / ADAPTER)
    rows = random_rows()
    want = logprobs(model, rows)
    torch.testing.assert_close(plain_at_loss(plain, rows).detach(), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(plain_at_loss(on_base.base_model.model, rows).detach(), want, rtol=0, atol=2e-5)


def test_what_cannot_be_resumed(tmp_path):
    Learner(adapted(), lr=0.1).save(tmp_path / "lora")
    Learner(tiny(), lr=0.1).save(tmp_path / "full")
    for model, path, message in [
        (adapted(r=2), "lora", "check lora.r and target"),
        (adapted(seed=4), "lora", "of another model"),
        (tiny(), "lora", "of training lora, but now all weights"),
        (adapted(), "full", "of training all weights, but now lora"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Learner(model, lr=0.1).load(tmp_path / path)


# -- the reference (KL-05) ---------------------------------------------------------------------------------------------


def distance(learner):
    """(largest difference of the policy's log-probs from the reference's, the reference's [N])."""
    rows = random_rows()
    before = at_loss(learner, rows)
    with learner.autocast(), learner.reference.model() as model, torch.no_grad():
        out = torch.full_like(before, torch.nan)
        for one in pack(rows, learner.max_tokens_per_pack):
            out[one.slot_M] = packed_forward(model, one, 1.0)[0]
    return float((before - out).abs().max()), out


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_fresh_adapter_s_reference_is_the_model_without_it(dtype):
    """KL is exactly 0 at step 0, and stays measured against the bare base model."""
    learner = Learner(adapted(), lr=1e-2, compute_dtype=dtype)
    assert distance(learner)[0] == 0.0
    assert learner.rl_update(random_rows(), kl_coef=0.04).as_dict()["kl"] == 0.0
    for _ in range(3):
        learner.sft_update(random_rows())
    moved, reference = distance(learner)
    assert moved > 0.01
    for layer in learner.model.modules():
        if hasattr(layer, "lora_A"):
            layer.enable_adapters(False)
    assert torch.equal(at_loss(learner, random_rows()), reference)
    if dtype is None:
        torch.testing.assert_close(reference, plain_at_loss(tiny(), random_rows()).detach(), rtol=0, atol=2e-5)


def test_the_reference_of_a_trained_adapter_is_the_start_policy(tmp_path):
    """KL-05: not the bare base model, unless that is asked for."""
    rows, base = random_rows(), tiny()
    Learner(adapted(moved=True), lr=0.1).save(tmp_path / "c")
    model = adapted()
    load_adapter(model, tmp_path / "c" / ADAPTER)
    learner = Learner(model, lr=0.0)
    start = logprobs(model, rows)
    assert (start - plain_at_loss(base, rows)).abs().max() > 0.05
    different, reference = distance(learner)
    assert different == 0.0 and torch.equal(reference, start)
    assert learner.rl_update(rows, kl_coef=0.04).as_dict()["kl"] == 0.0
    asked = Learner(model, ref_model=frozen_copy(base), lr=0.0)
    assert distance(asked)[0] > 0.05


def test_the_reference_forward_leaves_the_policy_alone():
    """Also when a forward with gradient is under way: its backward is that of the policy."""
    [one] = pack(random_rows(groups=1), 10_000)
    gradients = []
    for interrupted in (False, True):
        learner = Learner(adapted(moved=True), lr=0.1, gradient_checkpointing=True)
        move(learner.model, seed=7)
        learner.model.train()
        policy_M, _ = packed_forward(learner.model, one, 1.0)
        if interrupted:
            ref_M = learner._ref_logprobs(one, 1.0)
            assert not ref_M.requires_grad and (ref_M - policy_M).abs().max() > 0.05 and learner.model.training
        policy_M.sum().backward()
        gradients.append({name: p.grad for name, p in trained(learner.model).items()})
    assert_equal(gradients[1], gradients[0])


@pytest.mark.parametrize("make", [lambda: (adapted(), None), lambda: (tiny(), tiny()), lambda: (adapted(), tiny())])
def test_refresh_makes_the_current_policy_the_reference(tmp_path, make):
    model, ref_model = make()
    learner = Learner(model, ref_model=ref_model, lr=1e-2)
    learner.sft_update(random_rows())
    assert distance(learner)[0] > 1e-3
    learner.reference.refresh()
    exact = 2e-5 if ref_model is not None and is_adapted(model) else 0.0  # a merged copy rounds otherwise
    assert distance(learner)[0] <= exact
    reference = distance(learner)[1]
    learner.sft_update(random_rows(1))
    assert torch.equal(distance(learner)[1], reference)
    learner.save(tmp_path / "c")
    model, ref_model = make()
    resumed = Learner(model, ref_model=ref_model, lr=1e-2)
    resumed.load(tmp_path / "c")
    assert torch.equal(distance(resumed)[1], reference)


# -- 4 bits ------------------------------------------------------------------------------------------------------------


def test_four_bits_are_refused_with_the_reason_where_they_do_not_run(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"lora.quantize: 4bit doesn't run .*upswing\[qlora\]"):
        add_lora(tiny(), quantize="4bit")


def test_lora_over_four_bits(tmp_path):
    """The policy is W rounded to 4 bits plus the adapter: the engine gets that, and the 4-bit codes never change."""
    bnb = pytest.importorskip("bitsandbytes")
    base = tiny("qwen2", hidden_size=64)
    model = add_lora(copy.deepcopy(base), r=4, quantize="4bit")
    learner = Learner(model, lr=1e-2, gradient_checkpointing=True)
    codes = frozen(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert codes[name.replace(".weight", ".base_layer.weight")].dtype == torch.uint8
    weight = base.get_parameter(name).detach()
    rounded = bnb.functional.dequantize_4bit(
        *bnb.functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    )
    assert torch.equal(learner.weights()[name], rounded)
    assert learner.rl_update(random_rows(), kl_coef=0.04).as_dict()["kl"] == 0.0
    losses = [learner.sft_update(random_rows()).loss for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]
    assert_equal(frozen(model), codes)
    engine, rows = tiny("qwen2", hidden_size=64), random_rows()
    load_weights(engine, learner.weights())
    torch.testing.assert_close(logprobs(model, rows), logprobs(engine, rows), rtol=0, atol=1e-4)
    learner.save(tmp_path / "c")
    assert_equal(dict(type(base).from_pretrained(tmp_path / "c").named_parameters()), dict(learner.weights()))
    resumed = Learner(add_lora(copy.deepcopy(base), r=4, quantize="4bit"), lr=1e-2)
    resumed.load(tmp_path / "c")
    assert_equal(dict(resumed.weights()), dict(learner.weights()))
