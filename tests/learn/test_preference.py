"""A preference update equals the loss written out on plain, unpacked log-probs, however rows are packed."""

import dataclasses

import numpy as np
import pytest
import torch

from upswing.algo.preference import kto_baseline, kto_loss, pair_terms
from upswing.errors import ConfigError
from upswing.learn import Learner
from upswing.learn.packing import pack
from upswing.learn.preference import (
    Candidate,
    PreferenceOptions,
    candidates,
    preference_metrics,
    preference_update,
    sequence_logprobs,
)

from .helpers import assert_same_gradients, gradients, plain_logprobs, random_rows, row, tiny

OPTIONS = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1, "nll_coef": 0.2},
    "ipo": {"beta": 0.5},
    "orpo": {"beta": 0.4, "nll_coef": 1.0},
    "simpo": {"beta": 1.5, "margin": 0.5},
    "kto": {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.8},
}


class Recording(Learner):
    """Keeps the gradient of the newest step instead of applying it."""

    def _apply_gradient(self, tally):
        self.gradient = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self._optimizer.zero_grad(set_to_none=True)
        tally.counts["steps"] += 1


def learner(kind=Learner, max_tokens=10_000, lr=3e-3):
    return kind(tiny(), lr=lr, max_tokens_per_pack=max_tokens)


def sides(one, loss, shift=0.7, rows=None):
    """Four pairs whose reference isn't the policy: half of KTO's rows are on the wrong side of the baseline."""
    rows = random_rows(groups=4, size=2) if rows is None else rows
    found = candidates(one, rows, loss=loss)
    moved = [
        dataclasses.replace(c, ref_logprob=c.ref_logprob + shift * (-1) ** i, ref_mismatched=c.ref_mismatched - 1.0 * i)
        for i, c in enumerate(found)
    ]
    return moved[0::2], moved[1::2]


def plain_sum(model, one):
    return plain_logprobs(model, one)[torch.from_numpy(one.loss_positions) - 1].double().sum()


def plain_loss(model, chosen, rejected, loss, **options):
    """The mean loss, one unpacked row at a time."""
    both = [*chosen, *rejected]
    policy = torch.stack([plain_sum(model, c.row) for c in both])
    ref = torch.tensor([c.ref_logprob for c in both], dtype=torch.float64)
    length = torch.tensor([float(len(c.row.loss_positions)) for c in both], dtype=torch.float64)
    n = len(chosen)
    if loss == "kto":
        other = torch.stack([plain_sum(model, c.mismatched) - c.ref_mismatched for c in both])
        return kto_loss(policy - ref, torch.arange(len(both)) < n, kto_baseline(other), **options).mean()
    parts = (policy[:n], policy[n:], ref[:n], ref[n:], length[:n], length[n:])
    return pair_terms(loss, *parts, **options).loss_P.mean()


@pytest.mark.parametrize("max_tokens", [20, 120, 10_000])
@pytest.mark.parametrize("loss", OPTIONS)
def test_value_and_gradient_are_those_of_plain_rows_however_they_are_packed(loss, max_tokens):
    one = learner(Recording, max_tokens)
    chosen, rejected = sides(one, loss)
    metrics = preference_update(one, chosen, rejected, PreferenceOptions(loss=loss, **OPTIONS[loss]))
    reference = tiny()
    want = plain_loss(reference, chosen, rejected, loss, **OPTIONS[loss])
    assert metrics["loss"] == pytest.approx(want.item(), abs=1e-4)
    assert_same_gradients(one.gradient, gradients(reference, want), atol=2e-5)


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_one_model_is_both_policy_and_reference(loss):
    """At the start the rewards are exactly 0; an update moves the sides apart, and the metrics say so."""
    one = learner(lr=1e-3)
    found = candidates(one, random_rows(groups=4, size=2), loss=loss)
    chosen, rejected = found[0::2], found[1::2]
    options = PreferenceOptions(loss=loss, beta=0.5)
    start = preference_metrics(one, chosen, rejected, options, unchanged=True)
    computed = preference_metrics(one, chosen, rejected, options)
    assert computed["loss"] == pytest.approx(start["loss"], abs=1e-5)
    assert start["chosen_reward"] == start["rejected_reward"] == start["chosen_shift"] == 0
    assert start["preference_accuracy"] == 0.5
    for _ in range(8):
        preference_update(one, chosen, rejected, options)
    end = preference_metrics(one, chosen, rejected, options)
    assert end["loss"] < start["loss"] and end["preference_accuracy"] > 0.8
    now = sequence_logprobs(one, [c.row for c in chosen])
    assert end["chosen_shift"] == pytest.approx(np.mean(now - [c.ref_logprob for c in chosen]), abs=1e-5)


def test_nll_counters_displacement():
    """With it the chosen side ends likelier than without."""
    shifts = []
    for nll in (0.0, 1.0):
        one = learner(lr=1e-3)
        found = candidates(one, random_rows(groups=4, size=2), loss="dpo")
        options = PreferenceOptions(loss="dpo", beta=0.5, nll_coef=nll)
        for _ in range(5):
            preference_update(one, found[0::2], found[1::2], options)
        shifts.append(preference_metrics(one, found[0::2], found[1::2], options)["chosen_shift"])
    assert shifts[1] > shifts[0] + 0.5


def test_tool_tokens_and_what_follows_the_last_loss_token_never_count():
    """A row's sum runs over its loss tokens; ids after the last one change nothing at all."""
    one = learner()
    (first, *_), other = random_rows(groups=1, size=2), [5, 6, 7]
    longer = row([*first.tokens, *other], first.loss_positions)
    found = sequence_logprobs(one, [first, longer])
    assert found[0] == pytest.approx(plain_sum(tiny(), first).item(), abs=1e-4)
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_kto_takes_any_number_of_either_side_and_pairs_dont():
    one = learner(Recording)
    chosen, rejected = sides(one, "kto")
    metrics = preference_update(one, chosen[:1], rejected, PreferenceOptions(loss="kto"))
    want = plain_loss(tiny(), chosen[:1], rejected, "kto", beta=0.1)
    assert metrics["loss"] == pytest.approx(want.item(), abs=1e-5)
    assert "reward_margin" not in metrics
    alone = preference_update(one, [], rejected, PreferenceOptions(loss="kto"))
    assert np.isnan(alone["chosen_reward"]) and np.isfinite(alone["loss"])
    with pytest.raises(ValueError, match="1 chosen and 4 rejected"):
        preference_update(one, chosen[:1], rejected, PreferenceOptions(loss="dpo"))


def test_mismatched_rows_are_the_prompt_and_what_another_prompt_got():
    rows = [row([1, 2, 3, 4], [2, 3]), row([1, 2, 5, 6], [2, 3]), row([7, 8, 9, 10, 11], [2, 4])]
    found = candidates(learner(), rows, loss="kto")
    assert [c.mismatched.tokens.tolist() for c in found] == [[1, 2, 9, 10, 11], [1, 2, 9, 10, 11], [7, 8, 3, 4]]
    assert [c.mismatched.loss_positions.tolist() for c in found] == [[2, 4], [2, 4], [2, 3]]
    lonely = candidates(learner(), rows[:2], loss="kto")
    assert [c.mismatched for c in lonely] == [None, None]
    metrics = preference_update(learner(), lonely[:1], lonely[1:], PreferenceOptions(loss="kto"))
    assert metrics["kto_baseline"] == 0


def test_rows_without_loss_tokens_and_unknown_losses_are_refused():
    with pytest.raises(ValueError, match="row 1 has no loss tokens"):
        candidates(learner(), [row([1, 2], [1]), row([1, 2], [])], loss="dpo")
    with pytest.raises(ConfigError, match="did you mean 'dpo'"):
        PreferenceOptions(loss="dpoo")


@pytest.mark.parametrize("max_tokens", [1, 40, 70, 1000])
def test_a_kept_group_is_never_cut(max_tokens):
    rows = random_rows(groups=5, size=2)
    packs = pack(rows, max_tokens, keep_groups=True)
    held = [{rows[i].group for i in one.row_indices} for one in packs]
    assert sorted(group for groups in held for group in groups) == list(range(5)), "each group in one pack only"
    assert sorted(i for one in packs for i in one.row_indices) == list(range(10))
    assert all(one.num_tokens <= max_tokens or len(groups) == 1 for one, groups in zip(packs, held, strict=True))


def test_a_candidate_may_come_from_another_reference():
    """References are numbers: any model's sums can stand there."""
    one, rows = learner(), random_rows(groups=1, size=2)
    pair = [Candidate(row=r, ref_logprob=plain_sum(tiny(seed=1), r).item()) for r in rows]
    metrics = preference_update(one, pair[:1], pair[1:], PreferenceOptions(beta=0.3))
    want = plain_loss(tiny(), pair[:1], pair[1:], "dpo", beta=0.3)
    assert metrics["loss"] == pytest.approx(want.item(), abs=1e-4)
