"""A pack gives every row what it gets alone: values and gradients."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upswing.errors import ConfigError
from upswing.learn import forward
from upswing.learn.forward import check_trainable, packed_forward
from upswing.learn.packing import pack
from upswing.learn.rows import flatten

from .helpers import (
    VOCAB,
    assert_same_gradients,
    gradients,
    plain_at_loss,
    random_rows,
    row,
    switched,
    tiny,
)


def packed(model, rows, max_tokens=10_000, temperature=1.0):
    """[N] log-probs in row order through packs, and the entropies."""
    size = flatten(rows).num_tokens
    logprobs, entropy = torch.zeros(size), torch.zeros(size)
    for one in pack(rows, max_tokens):
        values, entropies = packed_forward(model, one, temperature)
        logprobs = logprobs.index_copy(0, one.slot_M, values)
        entropy = entropy.index_copy(0, one.slot_M, entropies)
    return logprobs, entropy


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("max_tokens", [60, 120, 10_000])
def test_packed_rows_equal_rows_alone(kind, max_tokens):
    """PAD-01, PAD-02: GPT-2's learnt absolute positions would show a wrong position id, which RoPE hides."""
    rows = random_rows()
    reference, model = tiny(kind), switched(tiny(kind))
    weights = torch.linspace(-1, 1, flatten(rows).num_tokens)
    want, got = plain_at_loss(reference, rows, 0.7), packed(model, rows, max_tokens, 0.7)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, (weights * got).sum()), gradients(reference, (weights * want).sum()))


def forked_rows():
    """Turns of agent and tool; branches that fork off each other; questions of 0 to 20 tokens, some shared too little
    to be a segment; a row twice, and one that is trained from its second token on."""
    rng = np.random.default_rng(3)

    def draw(low, high=None):
        return rng.integers(3, VOCAB, low if high is None else rng.integers(low, high)).tolist()

    system, rows = draw(9), []
    for group, length in enumerate((0, 3, 8, 20)):
        question = [*system, *draw(length)]
        for member in range(2):
            think, call, result, answer = draw(1, 7), draw(1, 5), draw(1, 9), draw(1, 4)
            first = len(question)
            said = first + len(think) + len(call)
            whole = [*question, *think, *call, *result, *answer]
            trained = [*range(first, said), *range(said + len(result), len(whole))]
            stripped = [*question, *call, *result, *answer]  # what was thought is taken out of the next prompt
            last = [*range(len(stripped) - len(answer), len(stripped))]
            told = [*question, *think, *call, *draw(3), *answer]  # the same call, another result
            late = [*range(len(told) - len(answer), len(told))]
            for tokens, positions in ((whole, trained), (stripped, last), (told, late)):
                rows.append(row(tokens, positions, group=group, trajectory=2 * group + member))
    return [*rows, rows[4], row(draw(12), range(1, 12), group=9)]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("max_tokens", [1, 40, 90, 10_000])
def test_gradients_are_those_of_rows_alone_to_1e_5(kind, max_tokens):
    """Relative to each tensor's gradient, against float64."""
    rows = forked_rows()
    weights = torch.linspace(-1, 2, flatten(rows).num_tokens)
    reference, model = tiny(kind).double(), switched(tiny(kind))
    want = gradients(reference, (weights * plain_at_loss(reference, rows, 0.7)).sum())
    got = gradients(model, (weights * packed(model, rows, max_tokens, 0.7)[0]).sum())
    whole = sum(right.square().sum() for right in want.values()).sqrt()
    for name, right in want.items():
        # A key's bias hardly has a gradient: a softmax doesn't see what is added to all of its scores.
        assert (got[name] - right).norm() <= 1e-5 * max(right.norm(), 1e-2 * whole), name


def test_prefixes_are_computed_once_at_both_levels():
    rows = random_rows(groups=3, size=4, prompt=14, system=10)
    (one,) = pack(rows, 10_000)
    roots = [s for s in one.segments if s.prefix is None]
    questions = [s for s in one.segments if s.prefix == 0]
    assert [(s.start, s.end) for s in roots] == [(0, 10)]
    assert [s.end - s.start for s in questions] == [14, 15, 16]
    own = sum(r.loss_positions[-1] - (24 + r.group) for r in rows)
    assert one.num_tokens == 10 + 14 + 15 + 16 + own


def test_nothing_leaks_between_rows():
    """Changing one row moves no other; changing the shared prefix moves all."""
    rows = random_rows(groups=2)
    model = switched(tiny())
    before = packed(model, rows)[0]
    changed = list(rows)
    tokens = rows[2].tokens.copy()
    tokens[rows[2].loss_positions] = 5
    changed[2] = row(tokens, rows[2].loss_positions, group=rows[2].group)
    after = packed(model, changed)[0]
    of_row = flatten(rows).row_N == 2
    torch.testing.assert_close(after[~of_row], before[~of_row], rtol=0, atol=1e-6)
    assert (after[of_row] - before[of_row]).abs().max() > 1e-2


@pytest.mark.parametrize("first", [[5, 6, 7], [5, 6, 9], [11], [8, 9, 10, 8, 9, 10]])
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_a_pack_of_two_gives_the_second_what_it_has_alone(first, mode):
    """PAD-02's own numbers and neighbours: B's values, whatever is before it in the pack."""
    model = switched(tiny()).train(mode == "training")
    rows = [row([*first, 3], [len(first)], group=0), row([8, 9, 10], [1, 2], group=1)]
    got = packed(model, rows)[0][-2:]
    torch.testing.assert_close(got, plain_at_loss(tiny(), rows[1:]), rtol=0, atol=1e-5)


def test_an_attention_that_cannot_separate_rows_is_refused():
    """PAD-02: transformers' own would drop the context and let rows read each other."""
    with pytest.raises(ValueError, match="use_upswing_attention"):
        packed(tiny(), random_rows())


def test_a_shift_by_one_would_show():
    """LP-04: a model that puts 0.9 on a known next token; targets and log-probs are those of the response."""
    model = switched(tiny(tie_word_embeddings=False))
    with torch.no_grad():  # nothing but the embedding reaches the head, which answers a token with the next id
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCAB, 32))
        known = math.log(0.9 / (0.1 / (VOCAB - 1))) / math.sqrt(32)  # the norm scales a unit vector by sqrt(H)
        model.lm_head.weight.copy_(known * torch.eye(VOCAB, 32).roll(1, 0))
    rows = [row([10, 11, 12, 13, 14], [3, 4]), row([20, 21, 22, 24], [2, 3])]
    got = packed(model, rows)[0]
    [one] = pack(rows, 100)
    assert one.target_M[one.slot_M.argsort()].tolist() == [13, 14, 22, 24]
    want = torch.tensor([0.9, 0.9, 0.9, 0.1 / (VOCAB - 1)]).log()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_first_token_right_after_a_shared_prompt_and_immediate_end():
    """One trained token after the prompt: its prediction comes from the prefix alone."""
    prompt = list(range(10, 30))
    rows = [row([*prompt, 2], [20]), row([*prompt, 7, 2], [20, 21]), row([*prompt, 2], [20])]
    reference, model = tiny(), switched(tiny())
    (one,) = pack(rows, 1000)
    assert one.num_tokens == 21 and len(one.segments) == 2
    want, got = plain_at_loss(reference, rows), packed(model, rows)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, got.sum()), gradients(reference, want.sum()))


def test_what_one_row_trains_and_another_reads_is_computed_once():
    """The second row is trained from position 9 on what the first only reads."""
    same = list(range(10, 30))
    rows = [row([*same, 5], [20]), row([*same, 6], range(9, 21))]
    (one,) = pack(rows, 1000)
    assert [(s.start, s.end) for s in one.segments] == [(0, 20)]
    torch.testing.assert_close(packed(switched(tiny()), rows)[0], plain_at_loss(tiny(), rows), rtol=0, atol=1e-5)


def attempts(seed=0, groups=2, size=6):
    """Groups of attempts that part at a call, at its result or at the answer; some are the same."""
    rng, rows = np.random.default_rng(seed), []
    for group in range(groups):
        prompt = rng.integers(3, VOCAB, 12).tolist()
        calls, results, answers = (rng.integers(3, VOCAB, (2, 10)).tolist() for _ in range(3))
        for _ in range(size):
            call, result, answer = (part[rng.integers(2)] for part in (calls, results, answers))
            tokens = [*prompt, *call, *result, *answer]
            rows.append(row(tokens, [*range(12, 22), *range(32, 42)], group=group, trajectory=len(rows)))
    return rows


def tree_size(rows):
    """Distinct beginnings, by definition."""
    return len({(r.group, *r.tokens[:n].tolist()) for r in rows for n in range(1, int(r.loss_positions[-1]) + 1)})


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rows_share_as_far_as_they_are_alike_trained_tokens_too(kind):
    rows = attempts()
    (one,) = pack(rows, 10_000)
    assert one.num_tokens == tree_size(rows) < 0.6 * sum(r.loss_positions[-1] for r in rows)
    weights = torch.linspace(-1, 2, flatten(rows).num_tokens)
    reference, model = tiny(kind), switched(tiny(kind))
    want, got = plain_at_loss(reference, rows, 0.7), packed(model, rows, 10_000, 0.7)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, (weights * got).sum()), gradients(reference, (weights * want).sum()))


def test_the_head_runs_once_for_what_rows_have_in_common(monkeypatch):
    rows, heads = attempts(), []
    (one,) = pack(rows, 10_000)
    run = forward.token_logprobs

    def counted(hidden, *given):
        heads.append(len(hidden))
        return run(hidden, *given)

    monkeypatch.setattr(forward, "token_logprobs", counted)
    got, entropy = packed(switched(tiny("llama")), rows)
    distinct = {(r.group, *r.tokens[: n + 1].tolist()) for r in rows for n in r.loss_positions}
    assert heads == [len(distinct)] and len(distinct) < 0.6 * len(got) == 0.6 * len(one.slot_M)
    first, which = one.distinct
    assert all(torch.equal(given[first][which], given) for given in (one.predict_M, one.target_M))
    assert len(torch.unique(entropy)) <= len(distinct)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(20, 200), st.booleans())
def test_packs_hold_what_they_may_and_every_loss_token_once(seed, max_tokens, keep_groups):
    rows = attempts(seed, groups=3, size=5)
    packs = pack(rows, max_tokens, keep_groups=keep_groups)
    for one in packs:
        alone = len({rows[index].group for index in one.row_indices}) == 1 if keep_groups else len(one.row_indices) == 1
        assert one.num_tokens <= max_tokens or alone
    flat = flatten(rows)
    assert sorted(slot for one in packs for slot in one.slot_M.tolist()) == list(range(flat.num_tokens))
    for one in packs:
        for place, slot in zip(one.predict_M.tolist(), one.slot_M.tolist(), strict=True):
            [read] = [s for s in one.segments if s.start <= place < s.end]
            seen = one.tokens_N[read.start : place + 1].tolist()
            while read.prefix is not None:
                read = one.segments[read.prefix]
                seen = [*one.tokens_N[read.start : read.end].tolist(), *seen]
            whole = rows[int(flat.row_N[slot])].tokens.tolist()
            assert seen == whole[: len(seen)] and len(seen) == int(flat.position_N[slot])


def test_a_group_is_cut_where_its_branches_part():
    """Attempts of two branches, in turn, that fit two packs: each branch is computed in one of them."""
    rng = np.random.default_rng(0)
    branches = rng.integers(3, VOCAB, (2, 60)).tolist()
    rows = [row([*branches[i % 2], *rng.integers(3, VOCAB, 10).tolist()], [*range(60, 70)]) for i in range(6)]
    first, second = pack(rows, 100)
    assert sorted(map(sorted, (first.row_indices, second.row_indices))) == [[0, 2, 4], [1, 3, 5]]
    assert first.num_tokens == second.num_tokens == 60 + 3 * 9


def test_a_thousand_nested_rows_are_one_chain():
    tokens = np.arange(12_000) % 50 + 3
    rows = [row(tokens[: 10 * n + 1].tolist(), [10 * n], group=0) for n in range(1, 1200)]
    (one,) = pack(rows, 20_000)
    assert one.num_tokens == 11_990


def test_end_token_that_equals_padding_is_a_token_like_any_other():
    """TOK-03: roles come from positions; an end token inside a tool result is read, and a final one is trained."""
    rows = [row([10, 11, 2], [0, 1, 2]), row([10, 11, 12, 13, 14], range(5)), row([5, 2, 2, 9, 2, 6], [3, 5])]
    assert flatten(rows).position_N.tolist() == [1, 2, 1, 2, 3, 4, 3, 5]
    torch.testing.assert_close(packed(switched(tiny()), rows)[0], plain_at_loss(tiny(), rows), rtol=0, atol=1e-5)


def test_no_pair_is_trained_across_a_boundary():
    """PAD-03: four targets (2, 9, 3, 9), even though B begins with a trained token."""
    rows = [row([1, 2, 9], [1, 2]), row([1, 3, 9], [0, 1, 2])]
    (one,) = pack(rows, 100)
    assert one.target_M.tolist() == [2, 9, 3, 9]


def test_every_agent_turn_is_trained_and_nothing_else():
    """TOK-06, TOK-10: a sparse mask; the result equals the model without the logits shortcut."""
    tokens = list(range(10, 30))
    trained = [4, 5, 6, 11, 12, 17, 18, 19]  # three agent turns between user and tool tokens
    rows = [row(tokens, trained)]
    (one,) = pack(rows, 100)
    assert one.target_M.tolist() == [tokens[i] for i in trained]
    reference, model = tiny("qwen2"), switched(tiny("qwen2"))
    want, got = plain_at_loss(reference, rows), packed(model, rows)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, got.sum()), gradients(reference, want.sum()))


def test_rows_without_loss_tokens_take_no_place():
    rows = [row([1, 2, 3], []), row([4], [0]), row([5, 6], [1])]
    (one,) = pack(rows, 100)
    assert one.row_indices == (2,) and one.slot_M.tolist() == [0]
    assert pack(rows[:2], 100) == []


row_specs = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 12), st.integers(0, 2**16)), min_size=1, max_size=9
)


@settings(max_examples=60, deadline=None)
@given(row_specs, st.integers(20, 120))
def test_layout_holds_for_any_rows(specs, max_tokens):
    """Each loss token once, predicted at its own position with exactly its own row as context; budget kept."""
    base = np.random.default_rng(0).integers(3, VOCAB, 60)
    rows = []
    for group, common, extra, seed in specs:
        rng = np.random.default_rng(seed)
        tokens = np.concatenate([base[:common], rng.integers(3, VOCAB, extra + 1)])
        rows.append(row(tokens, np.flatnonzero(rng.random(len(tokens)) < 0.3), group=group))
    flat, seen = flatten(rows), []
    for one in pack(rows, max_tokens):
        assert one.num_tokens <= max_tokens or len(one.row_indices) == 1
        owner = np.repeat(np.arange(len(one.segments)), [s.end - s.start for s in one.segments])
        for slot, place, target in zip(one.slot_M.tolist(), one.predict_M.tolist(), one.target_M.tolist(), strict=True):
            tokens, position = rows[flat.row_N[slot]].tokens, int(flat.position_N[slot])
            segment, end, context = int(owner[place]), place + 1, []
            while True:
                context = one.tokens_N[one.segments[segment].start : end].tolist() + context
                if (parent := one.segments[segment].prefix) is None:
                    break
                segment, end = parent, one.segments[parent].end
            assert context == tokens[:position].tolist() and target == tokens[position]
            assert int(one.position_ids_N[place]) == position - 1
            seen.append(slot)
    assert sorted(seen) == list(range(flat.num_tokens))


def test_models_that_would_come_out_wrong_are_refused():
    model = tiny("qwen2")
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ConfigError, match="sliding_attention"):
        check_trainable(model)
