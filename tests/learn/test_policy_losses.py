"""Every loss and every addition to it against formulas written out on the unpacked model, one row at a time.

Each is checked at the second of two updates, where policy, old policy, sampler and reference all differ.
"""

import copy
import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from upswing.algo.correction import CORRECTIONS
from upswing.algo.distill import distill_advantages
from upswing.algo.loss import LOSSES, clip_cov_mask
from upswing.errors import ConfigError
from upswing.learn import Learner, RLOptions
from upswing.learn.lora import add_lora
from upswing.learn.rows import flatten

from .helpers import assert_same_gradients, gradients, plain_at_loss, random_rows, tiny

CLIPS = {"gspo": (0.7, 9.0), "gmpo": (0.4, 0.4), "cispo": (0.2, 0.1)}
"""Those of the others are 0.2 and 0.2."""
SEQUENCES = {"gspo", "gmpo"}
LOSS_OPTIONS = {
    "gspo": {"aggregation": "seq-mean-token-mean", "clip_low": 0.7, "clip_high": 9.0, "dual_clip": 12.0},
    "gmpo": {"aggregation": "seq-mean-token-mean"},
    "cispo": {"clip_low": 0.2, "clip_high": 0.1},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.3},
    "clip_cov": {"cov_fraction": 1.0},
    "kl_cov": {"cov_fraction": 0.3, "cov_coef": 0.7},
}
ADDITIONS = {
    **{kind: {"correction": kind} for kind in CORRECTIONS},
    "mis": {"correction": "mis", "correction_low": 0.9, "correction_high": 1.2},
    "icepop": {"correction": "icepop", "correction_low": 0.8, "correction_high": 1.1},
    "geo_rs": {"correction": "geo_rs", "correction_low": 0.9, "correction_high": 1.1},
    "k3_rs": {"correction": "k3_rs", "correction_high": 0.01},
    "seq_mis": {"correction": "seq_mis", "correction_low": 0.5, "correction_high": 2.0},
    "opsm": {"opsm_delta": 0.02},
    "llds action": {"llds_coef": 0.5, "llds_answer_weight": 0.25},
    "llds response": {"llds_coef": 0.5, "llds_gate": "response"},
    "llds token": {"llds_coef": 0.5, "llds_gate": "token"},
    **{f"kl {kind}": {"kl_coef": 0.3, "kl_estimator": kind} for kind in ("k2", "k3", "k3_ratio")},
    "entropy": {"entropy_coef": 0.1},
    "value": {"value_coef": 0.5},
    "clipped value": {"value_coef": 0.5, "value_clip": 0.2},
    "per turn": {"loss": "gspo", **LOSS_OPTIONS["gspo"], "ratio_level": "turn"},
    "no dual clip": {"dual_clip": None},
}
ALL = {
    "correction": "mis", "opsm_delta": 0.02, "llds_coef": 0.5, "kl_coef": 0.3, "kl_estimator": "k3_ratio",
    "entropy_coef": 0.1, "value_coef": 0.5, "value_clip": 0.2,
}  # fmt: skip


def options_of(name, **more):
    """Those of a loss with everything added; weights a token would take the loss of a sequence apart."""
    correction = {"correction": "seq_mis"} if name in SEQUENCES else {}
    return {"loss": name, **LOSS_OPTIONS.get(name, {}), **ALL, **correction, **more}


@functools.cache
def some_rows():
    """Two turns a row; a group without preference; a trajectory of two rows; samplers near and far, one unknown."""
    rng = np.random.default_rng(3)
    rows = []
    plain = random_rows(size=3)
    exact = Learner(tiny(), lr=0.0).logprobs(plain)
    for index, (one, known) in enumerate(zip(plain, exact, strict=True)):
        length, first = len(one.tokens), one.loss_positions
        second_turn = first[np.flatnonzero(np.diff(first) > 1)[0] + 1]
        engine = known + rng.normal(0.03 * index - 0.1, 0.05 * (index % 5), length).astype(np.float32)
        if index == 4:
            engine[first[0]] = np.nan
        advantage = np.full(length, 0.0 if one.group == 1 else rng.normal() + 0.5, np.float32)
        masked = ~one.loss_mask
        numbers = {"returns": rng.normal(size=length), "old_values": rng.normal(size=length) / 2}
        numbers = {k: np.where(masked, np.nan, v).astype(np.float32) for k, v in numbers.items()}
        turn = (np.arange(length) >= second_turn).astype(np.int16)
        more = {"trajectory": 0} if index == 1 else {}
        rows.append(replace(one, engine_logprobs=engine, advantage=advantage, turn=turn, **numbers, **more))
    return tuple(rows)


class Recorder(Learner):
    """Keeps each step's gradient before clipping, and the weights that it was taken at."""

    def __init__(self, model=None, **options):
        super().__init__(model or tiny(), **{"lr": 0.02, "value_head": True, **options})
        self.gradients, self.weights_before = [], []

    def _apply_gradient(self, tally):
        grads = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        grads |= {f"head.{n}": p.grad.clone() for n, p in self.value_head.named_parameters() if p.grad is not None}
        self.gradients.append(grads)
        self.weights_before.append((copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.value_head)))
        super()._apply_gradient(tally)


# -- the formulas ------------------------------------------------------------------------------------------------------


def weight(kind, rho, low, high):
    """A row's weights from its known ratios old / sampler; NaN: unknown."""
    known = rho[~rho.isnan()]
    if kind in ("tis", "mis", "icepop"):
        rho = torch.where(rho.isnan(), 1.0, rho)
        return rho.clamp(low, high) if kind == "tis" else rho * (rho >= low) * (rho <= high)
    product = math.exp(float(known.log().sum()))
    if kind == "seq_tis":
        return min(max(product, low), high)
    if kind == "seq_mis":
        return product if low <= product <= high else 0.0
    value = math.exp(float(known.log().mean())) if kind == "geo_rs" else float((known - 1 - known.log()).mean())
    return 1.0 if low <= value <= high else 0.0


def sequence_loss(name, policy, old, A, low, high, dual):
    """One number for a row (or turn) of one advantage: GSPO's eq. 5 and GMPO's, with the dual clip."""
    if name == "gspo":
        s = (policy - old).mean().exp()
        loss = -torch.minimum(s * A, s.clamp(1 - low, 1 + high) * A)
    else:
        sign = 1.0 if A > 0 else -1.0
        d = policy - old
        s = (sign * torch.minimum(sign * d, sign * d.clamp(-low, high))).mean().exp()
        loss = -s * A
    return torch.minimum(loss, -dual * A) if dual is not None and A < 0 else loss


def token_loss(name, policy, old, A, picked, o):
    """[M] of a row."""
    low, high = CLIPS.get(name, (0.2, 0.2))
    dual, r = o.get("dual_clip", 3.0), (policy - old).exp()
    if name == "policy_gradient":
        return -A * policy
    if name == "cispo":
        return -r.detach().clamp(1 - low, 1 + high) * A * policy
    if name == "sapo":
        tau = o["tau_pos"] if A[0] > 0 else o["tau_neg"]
        return -A * 4 / tau / (1 + torch.exp(-tau * (r - 1)))
    loss = -A * r if name == "kl_cov" else -torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A)
    if dual is not None:
        loss = torch.where(A < 0, torch.minimum(loss, -dual * A), loss)
    if name == "clip_cov":
        loss = loss * ~picked
    return loss + o["cov_coef"] * (policy - old).abs() * picked if name == "kl_cov" else loss


def picked_tokens(name, rows, old, o):
    """bool [N] in row order: by covariance over all of the batch's loss tokens."""
    A = torch.cat([torch.from_numpy(r.advantage[r.loss_positions]) for r in rows])
    cov = (A - A.mean()) * (old - old.mean())
    if name == "clip_cov":
        return (cov > 1) & (cov < 5)  # the share of 1 is more than there are
    order = sorted(range(len(cov)), key=lambda i: -cov[i])[: math.floor(o.get("cov_fraction", 0.3) * len(cov))]
    return torch.tensor([i in set(order) for i in range(len(cov))])


def one_row(model, head, one, temperature):
    tokens = torch.from_numpy(one.tokens.astype(np.int64))[None]
    at = torch.from_numpy(one.loss_positions)
    out = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    logprobs = torch.log_softmax(out.logits[0, at - 1] / temperature, -1)
    policy = logprobs.gather(1, tokens[0, at][:, None])[:, 0]
    return policy, -(logprobs.exp() * logprobs).sum(-1), head(out.hidden_states[-1][0, at - 1])[:, 0]


def total_loss(model, head, rows, old, o):
    """The whole objective of a minibatch; `old` [N] in row order."""
    name, temperature = o.get("loss", "ppo_clip"), o.get("temperature", 1.0)
    counts = [len(r.loss_positions) for r in rows]
    trajectories = [r.trajectory for r in rows]
    tokens_of = {t: sum(c for c, other in zip(counts, trajectories, strict=True) if other == t) for t in trajectories}
    picked = picked_tokens(name, rows, old, o)
    last_turn = {t: max(r.turn[r.loss_positions].max() for r in rows if r.trajectory == t) for t in trajectories}
    preserved = sum(int((r.advantage[r.loss_positions] >= 0).sum()) for r in rows)
    reference, total, start = tiny(seed=1), torch.zeros(()), 0
    for one, count in zip(rows, counts, strict=True):
        part = slice(start, start + count)
        start += count
        at, was = one.loss_positions, old[part]
        A, engine = torch.from_numpy(one.advantage[at]), torch.from_numpy(one.engine_logprobs[at])
        turn = torch.from_numpy(one.turn[at].astype(np.int64))
        policy, entropy, value = one_row(model, head, one, temperature)
        if name in SEQUENCES:
            low, high = CLIPS[name]
            units = turn if o.get("ratio_level") == "turn" else torch.zeros_like(turn)
            loss = torch.zeros(count)
            for unit in units.unique():
                mine = units == unit
                whole = sequence_loss(name, policy[mine], was[mine], A[0], low, high, o.get("dual_clip", 3.0))
                loss = torch.where(mine, whole, loss)
        else:
            loss = token_loss(name, policy, was, A, picked[part], o)
        if "correction" in o:
            kind = o["correction"]
            low = o.get("correction_low", CORRECTIONS[kind].low)
            high = o.get("correction_high", CORRECTIONS[kind].high)
            loss = loss * weight(kind, (was - engine).exp(), low, high)
        if "opsm_delta" in o and A[0] < 0 and (engine - policy.detach()).nanmean() > o["opsm_delta"]:
            loss = loss * 0
        if "kl_coef" in o:
            distance = policy - plain_at_loss(reference, [one], temperature).detach()
            k3 = (-distance).exp() - 1 + distance
            kinds = {"k2": distance**2 / 2, "k3": k3, "k3_ratio": (policy - was).exp() * k3}
            loss = loss + o["kl_coef"] * kinds[o["kl_estimator"]]
        loss = loss - o.get("entropy_coef", 0.0) * entropy
        if o.get("aggregation", "token-mean") == "token-mean":
            total = total + loss.sum() / sum(counts)
        else:
            total = total + loss.sum() / tokens_of[one.trajectory] / len(tokens_of)
        if "llds_coef" in o and A[0] >= 0:
            drop, gate = was - policy, o.get("llds_gate", "action")
            for segment in turn.unique() if gate == "action" else [None]:
                mine = turn == segment if segment is not None else torch.ones(count, dtype=torch.bool)
                if gate == "token" or drop[mine].sum() > 0:
                    size = torch.where(turn == last_turn[one.trajectory], o.get("llds_answer_weight", 1.0), 1.0)
                    total = total + o["llds_coef"] / preserved * (size * drop.clamp(min=0))[mine].sum()
        if "value_coef" in o:
            wanted, before = torch.from_numpy(one.returns[at]), torch.from_numpy(one.old_values[at])
            error = (value - wanted) ** 2
            if "value_clip" in o:
                near = before + (value - before).clamp(-o["value_clip"], o["value_clip"])
                error = torch.maximum(error, (near - wanted) ** 2)
            total = total + o["value_coef"] * 0.5 * error.sum() / sum(counts)
    return total


def check(rows, options, *, max_tokens=10_000):
    """Two updates on the batch; the second one's gradient must be the formula's at the weights that it was taken at."""
    learner = Recorder(max_tokens_per_pack=max_tokens, ref_model=tiny(seed=1) if "kl_coef" in options else None)
    metrics = learner.rl_update(rows, updates_per_batch=2, **options)
    model, (weights, head) = tiny(), learner.weights_before[1]
    old = plain_at_loss(model, rows, options.get("temperature", 1.0)).detach()
    model.load_state_dict(weights)
    loss = total_loss(model, head, rows, old, options)
    names = [*dict(model.named_parameters()), *(f"head.{n}" for n, _ in head.named_parameters())]
    found = torch.autograd.grad(loss, [*model.parameters(), *head.parameters()], allow_unused=True)
    want = {name: grad for name, grad in zip(names, found, strict=True) if grad is not None}
    assert max(float(g.abs().max()) for g in want.values()) > 1e-3
    got = learner.gradients[1]
    assert_same_gradients({n: g for n, g in got.items() if n in want}, want, atol=3e-5)
    assert all(not g.any() for n, g in got.items() if n not in want)
    return metrics


# -- the gradient ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_its_formula_with_rows_that_are_left_out_counted(name):
    rows = some_rows()
    metrics = check(rows, {"loss": name, **LOSS_OPTIONS.get(name, {})})
    assert metrics.num_rows_skipped == (0 if name == "kl_cov" else 3) and metrics.ratio_max > 1.3
    if name in ("ppo_clip", "gspo", "gmpo", "cispo", "clip_cov"):
        assert metrics.clipped_low.total + metrics.clipped_high.total > 0
    if name == "kl_cov":
        old = plain_at_loss(tiny(), rows).detach()
        advantages = torch.cat([torch.from_numpy(r.advantage[r.loss_positions]) for r in rows])
        assert (advantages[picked_tokens(name, rows, old, LOSS_OPTIONS[name])] == 0).any()


@pytest.mark.parametrize("name", ADDITIONS)
def test_every_addition_is_its_formula(name):
    metrics = check(some_rows(), ADDITIONS[name])
    if name == "opsm" or (name in CORRECTIONS and CORRECTIONS[name].action != "truncate"):
        assert 0 < metrics.kept.value < 1


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_with_everything_added(name):
    check(some_rows(), options_of(name, temperature=0.8))


def layouts():
    rows = some_rows()
    order = np.random.default_rng(0).permutation(len(rows))
    return {
        "a row a pack": (rows, 1),
        "packs below a group": (rows, 70),
        "shuffled": ([rows[i] for i in order], 10_000),
        "one group": ([replace(r, group=5) for r in rows], 150),
        "no groups": ([replace(r, group=i) for i, r in enumerate(rows)], 10_000),
    }


@pytest.mark.parametrize("name", ["gspo", "kl_cov"])
@pytest.mark.parametrize("layout", ["a row a pack", "packs below a group", "shuffled", "one group", "no groups"])
def test_packs_order_and_groups_change_nothing(name, layout):
    rows, max_tokens = layouts()[layout]
    check(rows, options_of(name), max_tokens=max_tokens)


def both_steps(rows, **options):
    learner = Recorder(ref_model=tiny(seed=1))
    learner.rl_update(rows, updates_per_batch=2, **options)
    return learner.gradients


@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_at_masked_positions_is_never_read(name):
    rows, options = some_rows(), options_of(name)

    def spoilt(one, garbage):
        names = ("advantage", "engine_logprobs", "returns", "old_values")
        arrays = {n: np.where(one.loss_mask, getattr(one, n), garbage).astype(np.float32) for n in names}
        turn = np.where(one.loss_mask, one.turn, 77).astype(np.int16)
        return replace(one, turn=turn, policy_version=np.where(one.loss_mask, 3, -9).astype(np.int32), **arrays)

    got = both_steps([spoilt(one, [math.nan, 1e9, -math.inf][i % 3]) for i, one in enumerate(rows)], **options)
    for step, want in zip(got, both_steps(rows, **options), strict=True):
        assert_same_gradients(step, want, atol=0)


def test_several_policy_versions_in_a_row_reach_the_batch_and_change_nothing():
    rows = some_rows()
    mixed = [replace(r, policy_version=np.where(np.arange(len(r.tokens)) % 2, 3, 4).astype(np.int32)) for r in rows]
    want = np.concatenate([r.policy_version[r.loss_positions] for r in mixed])
    assert flatten(mixed).policy_version_N.tolist() == want.tolist() and len(set(want)) == 2
    assert set(flatten(rows).policy_version_N.tolist()) == {-1}
    for step, plain in zip(both_steps(mixed, **ALL), both_steps(rows, **ALL), strict=True):
        assert_same_gradients(step, plain, atol=0)


def test_known_old_logprobs_save_the_forward_and_nothing_else():
    rows, options = some_rows(), {"updates_per_batch": 2, "minibatches": 3}
    plain, given = Recorder(), Recorder()
    plain.rl_update(rows, **options)
    given.rl_update(rows, old=Learner(tiny(), lr=0.0).logprobs(rows), **options)
    for one, other in zip(given.gradients, plain.gradients, strict=True):
        assert_same_gradients(one, other, atol=0)


# -- minibatches -------------------------------------------------------------------------------------------------------


def test_minibatches_are_whole_groups_whatever_their_sizes():
    """A group that lost members to errors, or got more by retries, is still one group."""
    rows = [replace(r, advantage=r.advantage + np.float32(0.5)) for r in some_rows()]
    rows = [*rows[:4], *rows[6:], replace(rows[6], trajectory=99), replace(rows[7], trajectory=98)]
    assert [[r.group for r in rows].count(g) for g in range(3)] == [3, 1, 5]
    learner = Recorder(lr=0.0)
    learner.rl_update(rows, minibatches=3)
    distances = np.zeros((3, 3))
    for group in range(3):
        alone = Recorder(lr=0.0)
        alone.rl_update([r for r in rows if r.group == group])
        for number, step in enumerate(learner.gradients):
            distances[number, group] = max(float((step[n] - g).abs().max()) for n, g in alone.gradients[0].items())
    assert (distances.min(1) < 1e-5).all() and sorted(distances.argmin(1)) == [0, 1, 2]
    assert np.sort(distances, 1)[:, 1].min() > 1e-3


@pytest.mark.parametrize("fraction", [0.05, 1.0])
def test_tokens_are_selected_over_the_batch_not_the_minibatch(fraction):
    """At one set of weights the minibatches' gradients, weighted by their tokens, are the whole batch's."""
    rows = [replace(r, advantage=np.full(len(r.tokens), r.group - 0.9, np.float32)) for r in some_rows()]
    whole, parts = Recorder(lr=0.0), Recorder(lr=0.0)
    for learner, minibatches in ((whole, 1), (parts, 3)):
        learner.rl_update(rows, loss="clip_cov", cov_fraction=fraction, minibatches=minibatches)
    flat = flatten(rows)
    sizes = [int((flat.row_N // 3 == group).sum()) for group in range(3)]
    distances = []
    for order in itertools.permutations(range(3)):  # of the groups, as the minibatches may have had them
        added = [
            sum(sizes[g] / sum(sizes) * step[n] for g, step in zip(order, parts.gradients, strict=True)) - whole_grad
            for n, whole_grad in whole.gradients[0].items()
        ]
        distances.append(max(float(a.abs().max()) for a in added))
    assert min(distances) < 1e-5
    old = plain_at_loss(tiny(), rows).detach()
    picked = picked_tokens("clip_cov", rows, old, {})
    # With one advantage a group its own covariances are all 0, and no token would be taken at all.
    assert picked.any() and not any(
        clip_cov_mask(old[flat.row_N // 3 == g], flat.advantages_N[flat.row_N // 3 == g], fraction=1.0).any()
        for g in range(3)
    )


def test_kl_stop_leaves_out_the_rest_and_counts_it():
    rows = some_rows()
    free, tight = (Learner(tiny(), lr=0.02).rl_update(rows, updates_per_batch=5, kl_stop=k) for k in (1e9, 1e-6))
    assert (free.num_steps, free.num_steps_stopped) == (5, 0)
    # The first step is taken where nothing has moved yet; the second one sees the move, is taken, and is the last.
    assert (tight.num_steps, tight.num_steps_stopped) == (2, 3) and tight.kl_old.value > 1e-6
    same = Learner(tiny(), lr=0.0).rl_update(rows, updates_per_batch=5, kl_stop=1e-6)
    assert (same.num_steps, same.num_steps_stopped) == (5, 0)


# -- nothing to learn, or nothing that can be learned ------------------------------------------------------------------


def everything(learner):
    """All that a step could change."""
    state = copy.deepcopy(learner._state())
    return {
        "weights": [p.detach().clone() for module in (learner.model, learner.value_head) for p in module.parameters()],
        "moments": [v for s in state["optimizer"]["state"].values() for v in s.values()],
        "torch": [state["torch_rng"]],
        "numpy": str(state["numpy_rng"]),
    }


def assert_untouched(learner, before):
    after = everything(learner)
    assert after["numpy"] == before["numpy"] and len(before["moments"]) > 0
    for key in ("weights", "moments", "torch"):
        assert all(torch.equal(a, b) for a, b in zip(after[key], before[key], strict=True)), key


@pytest.mark.parametrize("name", LOSSES)
def test_an_empty_or_wholly_masked_batch_changes_nothing(name):
    rows = some_rows()
    learner = Recorder(ref_model=tiny(seed=1), weight_decay=0.1)
    options = options_of(name)
    learner.rl_update(rows, **options)
    masked = [replace(r, loss_mask=np.zeros_like(r.loss_mask)) for r in rows]
    before = everything(learner)
    for batch in ([], masked):
        metrics = learner.rl_update(batch, updates_per_batch=2, **options)
        assert (metrics.num_steps, metrics.num_steps_skipped, metrics.num_nonfinite) == (0, 2, 0)
        assert metrics.num_loss_tokens == 0 and math.isnan(metrics.entropy.value)
    if name == "clip_cov":  # it draws which tokens to take
        before["numpy"] = everything(learner)["numpy"]
    assert_untouched(learner, before)
    assert learner.version == 1 and learner.updates == 3


@pytest.mark.parametrize(
    ("spoil", "options"),
    [
        ({"engine_logprobs": 3.0}, {"correction": "seq_mis", "correction_low": 0.5}),
        ({"advantage": -0.0}, {"entropy_coef": 0.0}),
    ],
    ids=["rejected", "no preference"],
)
def test_a_gradient_of_exactly_zero_moves_nothing_by_momentum_or_decay(spoil, options):
    rows = some_rows()
    learner = Recorder(weight_decay=0.1)
    learner.rl_update(rows)
    before = everything(learner)
    flat = {name: [np.full(len(r.tokens), value, np.float32) for r in rows] for name, value in spoil.items()}
    rows = [replace(r, **{name: arrays[i] for name, arrays in flat.items()}) for i, r in enumerate(rows)]
    metrics = learner.rl_update(rows, **options)
    assert (metrics.num_steps, metrics.num_steps_skipped, metrics.num_nonfinite) == (0, 1, 0)
    assert_untouched(learner, before)


@pytest.mark.parametrize("name", ["advantage", "returns"])
@pytest.mark.parametrize("lora", [False, True])
def test_a_gradient_that_is_not_finite_leaves_weights_and_moments_alone(name, lora):
    """LOSS-07, with an adapter and a value head too."""
    if lora:
        pytest.importorskip("peft")
    rows = some_rows()
    learner = Recorder(add_lora(tiny(), r=2) if lora else None, weight_decay=0.1)
    options = {"value_coef": 0.5, "updates_per_batch": 2}
    learner.rl_update(rows, **options)
    before = everything(learner)
    huge = [replace(rows[0], **{name: np.full(len(rows[0].tokens), -3e38, np.float32)}), *rows[1:]]
    metrics = learner.rl_update(huge, **options)
    assert (metrics.num_steps, metrics.num_steps_skipped, metrics.num_nonfinite) == (0, 2, 2)
    assert math.isnan(metrics.grad_norm)
    assert_untouched(learner, before)
    assert learner.rl_update(rows, **options).num_steps == 2 and learner.version == 2


def test_rows_that_lack_what_the_options_read_are_refused():
    rows = [replace(r, engine_logprobs=None, returns=None) for r in some_rows()]
    for options, words in [
        ({"correction": "tis"}, "need the rows' engine_logprobs"),
        ({"opsm_delta": 0.1}, "need the rows' engine_logprobs"),
        ({"value_coef": 0.1}, "row 0 has loss tokens without returns"),
    ]:
        with pytest.raises(ValueError, match=words):
            Recorder().rl_update(rows, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_low": 0.0}, {"loss": "gmpo", "aggregation": "seq-mean-token-mean", "clip_high": 0.0},
        {"loss": "cispo", "clip_low": 1.5}, {"llds_coef": -0.1}, {"value_coef": math.nan}, {"value_clip": 0.0},
        {"opsm_delta": -1.0}, {"kl_stop": 0.0}, {"dual_clip": 1.1},
    ],
)  # fmt: skip
def test_options_without_a_meaning_are_refused(options):
    with pytest.raises(ConfigError, match=[*options][-1]):
        RLOptions(**options)


def test_distillation_of_sampled_tokens_is_the_k2_term_alone():
    """teacher - own log-prob as advantage, without the forward that it takes to know it."""
    rows, teacher = [replace(r, advantage=0.0) for r in some_rows()], tiny(seed=1)
    one = Recorder(ref_model=teacher)
    one.rl_update(rows, loss="policy_gradient", kl_coef=1.0, kl_estimator="k2", temperature=0.8)
    model = tiny()
    own_N = plain_at_loss(model, rows, 0.8)
    advantages_N = distill_advantages(own_N, plain_at_loss(tiny(seed=1), rows, 0.8))
    want = gradients(model, -(advantages_N * own_N).mean())
    assert_same_gradients({n: g for n, g in one.gradients[0].items() if n in want}, want)
