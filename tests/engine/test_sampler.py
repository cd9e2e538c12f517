"""The sampler against definitions and against frequencies."""

import copy
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from upswing.engine.base import Sampling
from upswing.engine.sampler import sample
from upswing.models.load import LoadedModel

from .conftest import MakeEngine


def definition(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Probabilities [V] in float64, entry by entry as the documentation says."""
    scores = logits.double() / sampling.temperature
    order = scores.argsort(descending=True).tolist()
    kept = order[: sampling.top_k] if sampling.top_k else order
    probs = torch.zeros_like(scores)
    probs[kept] = scores[kept].softmax(0)
    mass, nucleus = 0.0, []
    for token in kept:
        if mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += float(probs[token])
    final = [token for token in nucleus if probs[token] >= sampling.min_p * probs[order[0]]]
    out = torch.zeros_like(scores)
    out[final] = probs[final] / probs[final].sum()
    return out


CASES = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0, top_k=7),
    Sampling(top_p=0.6),
    Sampling(min_p=0.2),
    Sampling(temperature=1.4, top_k=12, top_p=0.8, min_p=0.1),
]


@pytest.mark.parametrize("sampling", CASES)
@pytest.mark.parametrize("vocab", [30, 128, 200])
def test_frequencies_match_probabilities(sampling: Sampling, vocab: int) -> None:
    """Chi-square over 20,000 draws; with these seeds the statistic is fixed, and 5 standard deviations are allowed."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 1.5
    count = 20_000
    rng = random.Random(5)
    drawn = sample(logits.expand(count, -1), [sampling] * count, [rng.random() for _ in range(count)])
    probs = definition(logits, sampling)
    seen = torch.bincount(torch.tensor(drawn.tokens), minlength=vocab).double()
    possible = probs > 0
    assert seen[~possible].sum() == 0
    expected = probs[possible] * count
    statistic = float(((seen[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1))
    got = torch.tensor(drawn.logprobs).double()
    torch.testing.assert_close(got, probs[drawn.tokens].log(), atol=2e-6, rtol=0)
    entropy = -(probs[possible] * probs[possible].log()).sum()
    assert drawn.entropies[0] == pytest.approx(float(entropy), abs=1e-5)


@pytest.mark.parametrize("one", [*CASES, Sampling(temperature=0)])
def test_draws_from_a_shared_row_are_those_from_copies_of_it(one: Sampling) -> None:
    """Beside others with other settings too."""
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(2)) * 2
    rng, rows = random.Random(3), [0, 0, 1, 2, 2, 2, 0]
    uniforms = [rng.random() for _ in rows]
    for samplings in ([one] * 7, [one, Sampling(temperature=0.7), one, one, Sampling(top_k=5), one, one]):
        drawn = sample(logits, samplings, uniforms, rows)
        copied = sample(logits[rows], samplings, uniforms)
        assert drawn.tokens == copied.tokens
        assert drawn.logprobs == pytest.approx(copied.logprobs, abs=1e-6)
        assert drawn.entropies == pytest.approx(copied.entropies, abs=1e-6)


def test_inverse_cdf_picks_the_interval() -> None:
    """The u-th quantile in vocabulary order, across blocks of the two-level search."""
    probs = torch.rand(500, generator=torch.Generator().manual_seed(1)).double()
    probs[100:300] = 0
    probs /= probs.sum()
    cdf = probs.cumsum(0)
    uniforms = [i / 997 for i in range(997)]
    expected = [int((cdf > u).nonzero()[0]) for u in uniforms]
    drawn = sample(probs.log().float().expand(997, -1), [Sampling()] * 997, uniforms)
    wrong = [(a, b) for a, b in zip(drawn.tokens, expected, strict=True) if a != b]
    assert len(wrong) <= 2 and all(abs(a - b) <= 1 for a, b in wrong)  # float32 rounding at interval borders


@settings(max_examples=60, deadline=None)
@given(u=st.sampled_from([0.0, 1e-12, 0.5, 1 - 2**-24, 1 - 2**-53]), vocab=st.integers(1, 300), seed=st.integers(0, 99))
def test_extreme_uniforms_never_pick_an_impossible_token(u: float, vocab: int, seed: int) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * 20
    logits[0, vocab // 2 + 1 :] = float("-inf")
    for sampling in (Sampling(), Sampling(top_p=0.9), Sampling(min_p=0.3), Sampling(top_k=5)):
        drawn = sample(logits, [sampling], [u])
        assert drawn.tokens[0] <= vocab // 2
        assert math.isfinite(drawn.logprobs[0]) and math.isfinite(drawn.entropies[0])


def test_greedy_gives_untempered_logprob() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    drawn = sample(logits, [Sampling(temperature=0, top_k=1)], [0.99])
    assert drawn.tokens == [1]
    assert drawn.logprobs[0] == pytest.approx(float(logits.log_softmax(-1)[0, 1]), abs=1e-6)


def test_nucleus_larger_than_the_candidates() -> None:
    """A flat distribution over 3,000 tokens: the nucleus is 2,700 of them, more than the partial sort holds."""
    drawn = sample(torch.zeros(50, 3000), [Sampling(top_p=0.9)] * 50, [i / 50 for i in range(50)])
    assert max(drawn.logprobs) == pytest.approx(-math.log(2700), abs=1e-3)
    assert len(set(drawn.tokens)) == 50


@pytest.mark.parametrize(
    ("probs", "top_p", "kept"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.8, 2),
        ([0.4, 0.3, 0.2, 0.1], 0.7, 2),
        ([0.4, 0.3, 0.2, 0.1], 0.9, 3),
        ([0.6, 0.2, 0.1, 0.1], 0.8, 2),
        ([0.4, 0.2, 0.2, 0.2], 0.6, 2),
        ([0.3, 0.3, 0.25, 0.15], 0.85, 3),
        ([0.6, 0.2, 0.1, 0.1], 1e-7, 1),
    ],
)
def test_a_nucleus_that_holds_exactly_top_p_needs_no_more(probs: list[float], top_p: float, kept: int) -> None:
    drawn = sample(
        torch.tensor(probs).log().expand(100, -1), [Sampling(top_p=top_p)] * 100, [i / 100 for i in range(100)]
    )
    assert len(set(drawn.tokens)) == kept and 0 in drawn.tokens  # which of equals is arbitrary


async def test_a_model_s_own_sampling_defaults_are_ignored(tiny: LoadedModel, make_engine: MakeEngine) -> None:
    """RL's log-probs are of the distribution that was asked for."""
    other = copy.deepcopy(tiny.model)
    for name, value in {"do_sample": True, "top_p": 0.1, "top_k": 2, "temperature": 0.2}.items():
        setattr(other.generation_config, name, value)
    asked = Sampling(max_tokens=12, seed=3)
    done = [await make_engine(model).generate([30, 40, 50], asked) for model in (tiny.model, other)]
    assert done[0].tokens == done[1].tokens and done[0].engine_logprobs == done[1].engine_logprobs


def test_rows_do_not_influence_each_other() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(2)) * 3
    uniforms = [0.05, 0.3, 0.5, 0.7, 0.9, 0.99]
    together = sample(logits, CASES, uniforms)
    for row, sampling in enumerate(CASES):
        alone = sample(logits[row : row + 1], [sampling], [uniforms[row]])
        assert together.tokens[row] == alone.tokens[0]
        assert together.logprobs[row] == pytest.approx(alone.logprobs[0], abs=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [*CASES, Sampling(temperature=0)])
def test_logits_that_are_not_finite(bad: float, sampling: Sampling) -> None:
    logits = torch.zeros(2, 40)
    logits[1, 3] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(logits, [sampling] * 2, [0.5, 0.5])
