"""Tiny random models and rows, and the plain one-row-at-a-time reference that packed results are held against."""

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from upswing.learn import TrainRow
from upswing.models.attention import use_upswing_attention

VOCAB = 61


def tiny(kind="llama", seed=0, **changes):
    """A two-layer model with grouped key heads and random weights, large enough to tell contexts apart."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
        "pad_token_id": 2,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        return GPT2LMHeadModel(config).eval()
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
    return Qwen2ForCausalLM(Qwen2Config(**{**sizes, "tie_word_embeddings": False, **changes})).eval()


def switched(model):
    use_upswing_attention(model)
    return model


def row(tokens, trained, **fields):
    """A row that trains the given positions."""
    mask = np.zeros(len(tokens), bool)
    mask[list(trained)] = True
    return TrainRow(tokens=np.array(tokens, np.int32), loss_mask=mask, **fields)


def random_rows(seed=0, groups=3, size=4, prompt=14, system=10):
    """Multi-turn rows: a common system prompt, a prompt a group, then agent, tool and agent tokens."""
    rng = np.random.default_rng(seed)
    start = rng.integers(3, VOCAB, system).tolist()
    rows = []
    for group in range(groups):
        question = rng.integers(3, VOCAB, prompt + group).tolist()
        for member in range(size):
            parts = [rng.integers(3, VOCAB, int(n)).tolist() for n in rng.integers(1, 9, 3)]
            tokens = [*start, *question, *parts[0], *parts[1], *parts[2]]
            first = len(start) + len(question)
            middle = first + len(parts[0])
            last = middle + len(parts[1])
            trained = [*range(first, middle), *range(last, len(tokens))]
            engine = np.full(len(tokens), np.nan, np.float32)
            engine[trained] = rng.normal(-2, 0.5, len(trained))
            rows.append(
                row(
                    tokens,
                    trained,
                    advantage=float(rng.normal()),
                    engine_logprobs=engine,
                    group=group,
                    trajectory=group * size + member,
                )
            )
    return rows


def plain_logprobs(model, one, temperature=1.0):
    """Log-probs [T-1] of tokens 1.. of a row, by the unpacked model with its own attention."""
    tokens = torch.from_numpy(one.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float() / temperature, -1).gather(1, tokens[1:, None])[:, 0]


def plain_at_loss(model, rows, temperature=1.0):
    """The same at the loss tokens of all rows, [N] in row order."""
    values = [plain_logprobs(model, one, temperature)[torch.from_numpy(one.loss_positions) - 1] for one in rows]
    return torch.cat(values)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got, want, atol=1e-5):
    """Equal up to `atol` times the size of the tensor's largest entry (or 1)."""
    assert got.keys() == want.keys()
    for name, right in want.items():
        difference = (got[name] - right).abs().max().item()
        assert difference <= atol * max(1.0, right.abs().max().item()), f"{name} differs by {difference}"
