"""Learning on several ranks is learning on one; and what happens when a rank fails.

Every case runs in one process by the plain Learner, and on 1, 2 and 3 ranks (gloo). The ranks are forked from a server
that has imported what they need, so that a start costs little.
"""

import math
import multiprocessing
import os
import re
import signal
import socket
import time
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.stages.test_algorithms import recipe

from upswing.errors import ConfigError, UpswingError
from upswing.learn import Learner, frozen_copy
from upswing.learn.lora import add_lora, trained
from upswing.learn.reference import Reference
from upswing.learn.sharded import ShardedLearner, _full, _order
from upswing.learn.sharded_ranks import Ranks
from upswing.monitor.metrics import MetricsLog
from upswing.monitor.progress import Progress
from upswing.recipe import ClusterSection
from upswing.stages.runner import run_recipe

from .helpers import random_rows, row, tiny

MODELS = [f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "qwen2", "gpt2")]
PRELOAD = ["upswing.learn.sharded", "upswing.cli.main", "upswing.stages.runner", *MODELS]
LR = 1e-3


class Kept:
    """Keeps each step's gradients, before clipping."""

    def _apply_gradient(self, tally):
        grads = {name: _full(p.grad).clone() for name, p in trained(self.model).items() if p.grad is not None}
        self.gradients = [*getattr(self, "gradients", []), grads]
        super()._apply_gradient(tally)


class Plain(Kept, Learner):
    pass


class Sharded(Kept, ShardedLearner):
    """Also says which rows a rank computes, and fails when told to."""

    fault = ""
    shares = ()

    def _share(self, packs):
        found = super()._share(packs)
        self.shares = (*self.shares, [[list(one.row_indices) for one in part] for part in found])
        return found

    def _accumulate(self, packs, objective, tally):
        if self.fault and self.ranks.rank == 1:
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the disk is\nfull")
        return super()._accumulate(packs, objective, tally)

    @_order
    def fail(self, how):
        self.fault = how

    @_order
    def all_shares(self):
        return self.ranks.gathered(self.shares)


# -- cases: a way to make a learner -> what it did --------------------------------------------------------------------


def done(learner, rows, *metrics):
    return {
        "gradients": getattr(learner, "gradients", []),
        "metrics": [one.as_dict() for one in metrics],
        "logprobs": [one[~np.isnan(one)] for one in learner.logprobs(rows)],
        "weights": {name: tensor.clone() for name, tensor in learner.weights().items()},
        "versions": (learner.version, learner.updates, learner.lr),
    }


def rows_of_groups():
    return random_rows(groups=3, size=4)[:-1]  # 11: not so many for each of 2 or 3 ranks


def grpo_learner(make, **options):
    """With KL to a reference; tied embeddings, whose gradient is made in place."""
    model = tiny(pad_token_id=None)
    return make(model, ref_model=frozen_copy(tiny(seed=1, pad_token_id=None)), lr=LR, max_tokens_per_pack=90, **options)


GRPO = {"kl_coef": 0.1, "entropy_coef": 0.01, "correction": "tis", "aggregation": "seq-mean-token-mean"}


def grpo(make):
    learner, rows = grpo_learner(make), rows_of_groups()
    metrics = [learner.rl_update(rows, minibatches=2, updates_per_batch=2, **GRPO) for _ in range(2)]
    learner.reference.refresh()
    learner.peak_lr *= 0.5
    metrics.append(learner.rl_update(rows, **GRPO))
    learner.reference = Reference(learner.model, frozen_copy(tiny(seed=2)))
    metrics.append(learner.rl_update(rows, **GRPO))
    reference = [one[~np.isnan(one)] for one in learner.logprobs(rows, reference=True)]
    return {**done(learner, rows, *metrics), "reference": reference}


def sft(make):
    """Head and embeddings apart, biases."""
    learner, rows = make(tiny("qwen2"), lr=LR, max_tokens_per_pack=70), rows_of_groups()
    before = learner.sft_loss(rows)
    metrics = [learner.sft_update(rows, aggregation="seq-mean-token-mean", focal_gamma=gamma) for gamma in (0.0, 2.0)]
    return {**done(learner, rows, *metrics), "reference": [np.array([before, learner.sft_loss(rows)])]}


def one_row(make):
    """Nothing to do for all other ranks."""
    learner, rows = make(tiny(), lr=LR), random_rows(groups=1, size=1)
    return done(learner, rows, learner.rl_update(rows), learner.sft_update(rows))


def no_rows(make):
    learner, rows = make(tiny(), lr=LR), [row([5, 6, 7], [])]
    return done(learner, rows, learner.rl_update(rows))


def uneven(make):
    """RANK-01: ranks with 6 and 2 trained tokens; each token weighs an eighth."""
    learner = make(tiny(), lr=LR, max_tokens_per_pack=8)
    rows = [row(range(10, 18), range(2, 8)), row(range(30, 38), range(6, 8), group=1)]
    return done(learner, rows, learner.sft_update(rows, aggregation="token-mean"))


def five_rows(make):
    """RANK-02: more rows than ranks, none copied into the loss or the metrics."""
    learner = make(tiny(), lr=LR, max_tokens_per_pack=12)
    rows = [row(range(10 * i, 10 * i + 12), range(4, 12), advantage=i - 2.5, group=i) for i in range(5)]
    return done(learner, rows, learner.rl_update(rows, aggregation="seq-mean-token-sum"))


def paired(make):
    """RANK-04: a row's advantage, told by its number, stays with its tokens: those of a row are its number."""
    learner = make(tiny(), lr=LR, max_tokens_per_pack=12)
    rows = [row([i] * 6, range(1, 6), advantage=float(i), group=i) for i in range(8)]
    return done(learner, rows, learner.rl_update(rows))


def turns(make):
    learner, rows = make(tiny(), lr=LR, max_tokens_per_pack=90), rows_of_groups()
    first = learner.rl_update(rows, loss="gspo", ratio_level="turn", aggregation="seq-mean-token-mean")
    norm = {"aggregation": "seq-mean-token-sum-norm", "norm_length": 20}
    return done(learner, rows, first, learner.rl_update(rows, loss="kl_cov", cov_fraction=0.2, **norm))


def recomputed(make):
    learner = make(tiny(), lr=LR, max_tokens_per_pack=90, gradient_checkpointing=True)
    rows = rows_of_groups()
    return done(learner, rows, learner.rl_update(rows))


def overflow(make):
    """LOSS-07: a gradient that isn't finite, from one rank's row: all of them skip the step."""
    learner, rows = make(tiny(), lr=LR, max_tokens_per_pack=40), random_rows(groups=3, size=1)
    rows[1] = row(rows[1].tokens, rows[1].loss_positions, advantage=3e38, group=1)
    found = done(learner, rows, learner.rl_update(rows), learner.rl_update(rows[:1]))
    return {**found, "gradients": found["gradients"][1:]}


CASES = [grpo, sft, one_row, no_rows, uneven, five_rows, paired, turns, recomputed, overflow]


def resumed(make, path):
    """The update after the one that a checkpoint was saved at."""
    learner, rows = grpo_learner(make, seed=7), rows_of_groups()
    learner.load(path)
    return done(learner, rows, learner.rl_update(rows, minibatches=2, **GRPO))


def saved(make, path):
    learner, rows = grpo_learner(make), rows_of_groups()
    learner.rl_update(rows, minibatches=2, **GRPO)
    learner.reference.refresh()
    learner.extra["number"] = 3
    learner.save(path)
    return done(learner, rows, learner.rl_update(rows, minibatches=2, **GRPO))


# -- ranks ------------------------------------------------------------------------------------------------------------


def enter(job, rank, size, port, folder):
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    log = os.open(folder / f"{job.__name__}-{size}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    job(rank, size, folder)


def start(job, size, folder, timeout_s=300.0):
    """Exit codes of all ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context.Process(target=enter, args=(job, rank, size, port, folder)) for rank in range(size)]
    for one in processes:
        one.start()
    until = time.monotonic() + timeout_s
    for one in processes:
        one.join(max(0.0, until - time.monotonic()))
    for one in processes:
        one.kill()
        one.join()
    return [one.exitcode for one in processes]


def cases(rank, size, folder):
    """All cases on this many ranks, then a fault."""
    ranks = Ranks(timeout_s=120)
    if rank:
        ranks.obey(Sharded.built)
        return
    make = partial(Sharded, ranks)
    found = {case.__name__: case(make) for case in CASES}
    learner = make(tiny(), lr=LR, max_tokens_per_pack=12)
    rows = [row(range(10 * i, 10 * i + 12), range(4, 12), advantage=i - 2.5, group=i) for i in range(5)]
    found["tokens"] = learner.rl_update(rows).num_tokens
    found["shares"] = learner.all_shares()
    found["saved"] = saved(make, folder / f"from-{size}")
    for path in folder.glob("from-?"):
        found[f"resumed {path.name}"] = resumed(make, path)
    if size > 1:
        learner = make(tiny(), lr=LR)
        learner.fail({2: "raise", 3: "kill"}[size])
        started = time.monotonic()
        with pytest.raises(UpswingError) as fault:
            learner.rl_update(rows)
        with pytest.raises(UpswingError, match=re.escape(str(fault.value))):
            learner.logprobs(rows)
        found["fault"] = (str(fault.value), time.monotonic() - started)
    torch.save(found, folder / f"{size}.pt")
    ranks.end()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def plain(folder):
    torch.set_num_threads(1)
    found = {case.__name__: case(Plain) for case in CASES}
    return {**found, "saved": saved(Plain, folder / "from-0")}


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request, folder, plain):
    size = request.param
    codes = start(cases, size, folder)
    logs = "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in folder.glob(f"cases-{size}-?.log"))
    assert (folder / f"{size}.pt").exists(), f"exit codes {codes}\n{logs}"
    assert codes == {1: [0], 2: [0, 1], 3: [0, -signal.SIGKILL, 1]}[size], logs
    return size, torch.load(folder / f"{size}.pt", weights_only=False)


def assert_same(got, want, what):
    assert len(got.get("gradients", ())) == len(want.get("gradients", ())), what
    for step, (mine, right) in enumerate(zip(got.get("gradients", ()), want.get("gradients", ()), strict=True)):
        assert mine.keys() == right.keys()
        for name, tensor in right.items():
            near = 1e-5 * max(1.0, tensor.abs().max().item())
            assert torch.allclose(mine[name], tensor, rtol=0, atol=near), f"{what}: gradient of {name}, step {step}"
    for mine, right in zip(got["metrics"], want["metrics"], strict=True):
        # How rows are cut into packs is the ranks' own affair.
        names = right.keys() - {"seconds", "num_tokens", "num_tokens_recomputed"}
        assert {n: mine[n] for n in names} == pytest.approx({n: right[n] for n in names}, 1e-4, 1e-6, nan_ok=True), what
    for key in ("logprobs", "reference"):
        for mine, right in zip(got.get(key, ()), want.get(key, ()), strict=True):
            np.testing.assert_allclose(mine, right, rtol=0, atol=2e-5, err_msg=f"{what}: {key}")
    assert list(got["weights"]) == list(want["weights"])
    for name, tensor in want["weights"].items():
        assert torch.allclose(got["weights"][name], tensor, rtol=0, atol=2e-5), f"{what}: weight {name}"
    assert got.get("versions") == want.get("versions"), what


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_same_as_one_process(ranks, plain, case):
    assert_same(ranks[1][case], plain[case], f"{case} on {ranks[0]}")


def test_each_row_is_computed_once(ranks):
    size, found = ranks
    assert found["tokens"] == 5 * 11  # MET-04: what is run in step only isn't counted
    mine = [index for share in found["shares"] for packs in share[0][:1] for pack in packs for index in pack]
    assert sorted(mine) == list(range(5))
    assert {len(share[0][0]) + len(share[0][1]) for share in found["shares"]} == {math.ceil(5 / size)}


def test_checkpoints_go_on_at_any_number_of_ranks(ranks, plain):
    size, found = ranks
    assert_same(found["saved"], plain["saved"], "saved")
    for other in range(size + 1):
        got = found[f"resumed from-{other}"]
        last = {**plain["saved"], "gradients": plain["saved"]["gradients"][2:]}
        assert_same(got, last, f"{other} -> {size}")


def test_one_process_goes_on_from_ranks(folder, plain, ranks):
    got = resumed(Plain, folder / f"from-{ranks[0]}")
    assert_same(got, {**plain["saved"], "gradients": plain["saved"]["gradients"][2:]}, "to one process")


def test_a_fault_names_the_rank(ranks):
    size, found = ranks
    if size > 1:
        text, seconds = found["fault"]
        want = {
            2: "rank 1 failed at rl_update: ValueError: the disk is full; start the run again with --resume",
            3: "rank 1 of 3 ended without a word (killed, or out of memory?); start the run again with --resume",
        }
        assert text == want[size]
        assert seconds < 60


def whole_run(rank, size, folder, resume=False):
    """`upswing run`, of which rank 1 is killed in the second step."""
    from upswing.cli.main import app

    inner, calls = ShardedLearner._accumulate, []

    def fatal(self, *args):
        calls.append(rank)
        if not resume and rank == 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, *args)

    ShardedLearner._accumulate = fatal
    app(["run", str(folder / "recipe.yaml"), "--out", str(folder / "run"), *(["--resume"] if resume else [])])


def resumed_run(rank, size, folder):
    whole_run(rank, size, folder, resume=True)


def test_a_run_goes_on_after_a_rank_was_killed(folder, plain):
    one = recipe({"save_every": 1, "kl_coef": 0.01})
    (folder / "recipe.yaml").write_text(one.dump())
    assert start(whole_run, 2, folder) == [1, -signal.SIGKILL]
    assert "error: UpswingError: rank 1 of 2 ended without a word" in (folder / "whole_run-2-0.log").read_text()
    assert start(resumed_run, 2, folder) == [0, 0], (folder / "resumed_run-2-0.log").read_text()
    run_recipe(one, folder / "plain", log=Progress(quiet=True))
    want, got = (load_file(folder / name / "checkpoints/rl/final/model.safetensors") for name in ("plain", "run"))
    assert want.keys() == got.keys()
    for name, tensor in want.items():
        assert torch.allclose(got[name], tensor, rtol=0, atol=2e-5), name
    rows = [MetricsLog(folder / name).read("rl") for name in ("plain", "run")]
    losses = [[row["loss"] for row in found if "loss" in row] for found in rows]
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"algorithm": "ppo"}, "stages.rl.critic"), ({"gradient_checkpointing": 2.0}, "stages.rl.gradient_checkpointing"),
     ({"lora": {"r": 4}}, "stages.rl.lora")],
)  # fmt: skip
def test_what_a_recipe_may_ask_of_several_ranks(changes, key, tmp_path, monkeypatch):
    """Of torchrun's and of the cluster's, from Python as from the command line, and before anything is written."""

    class Passed(Exception): ...

    def passed(*args, **options):
        raise Passed

    monkeypatch.setattr("upswing.stages.runner.resolve_model", passed)  # what is looked at next
    out, one = tmp_path / "run", recipe(changes)
    with pytest.raises(Passed):
        run_recipe(one, out)
    with pytest.raises(ConfigError, match=key):
        run_recipe(one.model_copy(update={"cluster": ClusterSection(kind="ray", learners=2)}), out)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=key):
        run_recipe(one, out)
    with pytest.raises(Passed):
        run_recipe(recipe({}), out)
    assert not out.exists()


def test_what_works_on_one_rank_only():
    pytest.importorskip("peft")
    refused = [{"value_head": True}, {"gradient_checkpointing": 2.0}]
    for model, options in [(add_lora(tiny()), {}), *((tiny(), options) for options in refused)]:
        with pytest.raises(ConfigError, match="rank"):
            ShardedLearner(None, model, lr=LR, **options)
