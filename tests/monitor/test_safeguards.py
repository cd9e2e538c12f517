"""What safeguards decide: bounded, one at a time, with a rest between, taken back, and a stop when nothing is left."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from upswing.errors import ConfigError
from upswing.monitor.findings import Finding, Judgement
from upswing.monitor.ladder import LADDERS, LEFT_OUT, SAFEGUARDS, UNGROUPED, UNPAID, Situation
from upswing.monitor.safeguards import COOLDOWN, PATIENCE, RELEASE, Action, Past, decide, usable
from upswing.recipe import RlStage, recipe_from
from upswing.recipe.presets import EFFECTS
from upswing.recipe.rl import GROUPED


def stage(**keys: Any) -> RlStage:
    one: Any = recipe_from({"name": "a", "model": "tiny", "env": "lookup", "verifiers": ["strict_match"],
                            "stages": [{"stage": "rl", "steps": 100, **keys}]}).stages[0]  # fmt: skip
    return one


SEVERAL = {"minibatches": 4, "updates_per_batch": 2}


def bad(mode: str, severity: Any = "warning", since: int = 7) -> Judgement:
    kept: dict[str, Any] = {"stage": "rl", "step": 9, "since": since, "causes": (), "remedies": ()}
    found = Finding(mode=mode, title=f"The {mode}", severity=severity, evidence=("it fell to 0.1",), **kept)
    return Judgement(mode=mode, status="finding", finding=found)


class Played:
    """A stage whose judgements are given step by step."""

    def __init__(
        self, names: Any = "auto", normal: Any = None, decided: Any = tuple, about: Any = None, **keys: Any
    ) -> None:
        self.base = stage(**{**SEVERAL, **keys})
        self.names = usable(names, dict(self.base))
        self.normal = {"entropy": 1.0, "sampled_tokens": 40.0} if normal is None else normal
        self.past, self.step, self.decided, self.about = Past(), 0, decided, about or {}

    @property
    def now(self) -> RlStage:
        return self.base.changed({k: v for k, v in self.past.changes().items() if k not in (LEFT_OUT, UNPAID)})

    def fits(self, changes: dict[str, Any]) -> bool:
        try:
            self.base.changed({k: v for k, v in changes.items() if k not in (LEFT_OUT, UNPAID)})
        except ValueError:
            return False
        return True

    def go(self, *judgements: Judgement, steps: int = 1, best: int | None = None) -> list[Action]:
        found = []
        for _ in range(steps):
            self.step += 1
            self.past = Past.from_json(json.loads(json.dumps(self.past.to_json())))  # as a checkpoint keeps it
            self.past.see(judgements, self.step)
            now = {**dict(self.base), **self.past.changes(), **dict(self.now)}
            known = {"normal": self.normal, "decided": self.decided, **self.about}
            situation = Situation(base=dict(self.base), now=now, **known)
            action = decide(
                judgements, situation, self.past, step=self.step, names=self.names, fits=self.fits, best=best
            )
            if action is not None:
                self.past.actions.append(action)
                found.append(action)
        return found


def test_a_checkpoint_of_before_with_fields_that_are_no_more_resumes():
    played = Played(["lr"])
    played.go(bad("gradient_instability"))
    saved = played.past.to_json()
    assert Past.from_json({**saved, "actions": [{**one, "over": None} for one in saved["actions"]]}) == played.past
    assert saved["actions"]


def test_a_mild_finding_or_none_does_nothing():
    played = Played()
    assert not played.go(Judgement(mode="kl_explosion", status="ok"), bad("entropy_collapse", "info"), steps=40)
    assert not Played("off").go(bad("entropy_collapse", "critical"), steps=40)


def test_remedies_come_in_turn_with_a_rest_between_and_never_go_beyond_their_bounds():
    played = Played()
    actions = played.go(bad("entropy_collapse"), steps=100)
    assert [(a.step, a.safeguard) for a in actions[:4]] == [
        (1, "entropy"), (1 + COOLDOWN, "clip_higher"), (1 + 2 * COOLDOWN, "kl_cov"), (1 + 3 * COOLDOWN, "lr")
    ]  # fmt: skip
    assert actions[0].changes == {"entropy_coef": [0.0, 0.005], "entropy_target": [None, 0.5]}
    assert actions[1].changes == {"clip_high": [0.28, pytest.approx(0.392)]}
    now = played.now
    assert (now.loss, now.clip_high, now.cov_fraction) == ("kl_cov", None, 2e-3)
    assert now.lr == pytest.approx(played.base.lr / 8) and len(actions) == 6
    assert "stop" not in {a.safeguard for a in actions}, "a warning ends no run"


@pytest.mark.parametrize(
    ("mode", "names", "keys", "ends"),
    [
        ("likelihood_displacement", ["llds"], {}, {"llds_coef": 1.0}),
        ("kl_explosion", ["kl"], {"kl_coef": 0.02}, {"kl_coef": 1.0}),
        ("kl_explosion", ["lr"], {"lr": 1e-3}, {"lr": 1.25e-4}),
        ("kl_explosion", ["reuse"], {}, {"updates_per_batch": 1, "minibatches": 1, "clip_high": None}),
        ("stale_updates", ["reuse"], {"tasks_per_step": 9, "minibatches": 9}, {"minibatches": 1}),
        ("likelihood_displacement", ["reuse"], {"llds_coef": 0.2}, {"updates_per_batch": 1, "minibatches": 2}),
        ("gradient_instability", ["reuse"], {"algorithm": "kl_cov"}, {"updates_per_batch": 1, "minibatches": 2}),
        ("echo_trap", ["clip_higher"], {"dual_clip": 1.3}, {"clip_high": 0.28}),  # it must stay below dual_clip
        ("echo_trap", ["dynamic_sampling"], {}, {"dynamic_sampling": 4}),
        ("length_explosion", ["overlong"], {}, {"overlong_length": 120, "overlong_cache": 60, "overlong_factor": 1.0}),
        ("length_collapse", ["overlong"], {"overlong_length": 12, "overlong_cache": 8}, {"overlong_length": None}),
        ("train_inference_mismatch", ["correction"], {}, {"correction": "tis", "correction_high": 2.0}),
        ("entropy_explosion", ["entropy"], {"entropy_coef": 0.1, "entropy_target": 2.0}, {"entropy_coef": 0.0}),
        ("entropy_collapse", ["entropy"], {"entropy_coef": 0.1, "entropy_target": 2.0}, {"entropy_target": 2.0}),
        ("entropy_collapse", ["kl_cov"], {"algorithm": "rloo", "minibatches": 1, "updates_per_batch": 1}, None),
    ],
)  # fmt: skip
def test_where_each_ends_when_nothing_helps(mode: str, names: list[str], keys: dict[str, Any], ends: Any) -> None:
    if ends is None:
        with pytest.raises(ConfigError, match=r"safeguards: got 'kl_cov' without effect: it takes ppo_clip's place"):
            Played(names, safeguards=names, **keys)
        return
    played = Played(names, **keys)
    played.go(bad(mode), steps=200)
    assert {key: getattr(played.now, key) for key in ends} == {
        k: pytest.approx(v) if isinstance(v, float) else v for k, v in ends.items()
    }


def test_one_collapse_has_one_answer_at_a_time_the_severest_first_and_the_rest_is_told():
    played = Played()
    both = bad("gradient_instability"), bad("kl_explosion", "critical")
    first, second = played.go(*both, steps=1 + COOLDOWN)
    assert (first.mode, second.mode, second.step - first.step) == ("kl_explosion", "kl_explosion", COOLDOWN)
    assert first.held == ["gradient_instability"] == first.row("rl")["held"]
    later = bad("echo_trap"), bad("gradient_instability")
    assert not played.go(*later) and played.past.waiting(played.step) == ["echo_trap"]
    assert not played.past.waiting(played.step), "once"
    assert [a.mode for a in played.go(bad("echo_trap", "critical"))] == [], "no severer than what was answered"


def test_a_severer_finding_does_not_wait_and_of_equals_the_one_least_was_done_about_is_first():
    played = Played()
    mild = bad("gradient_instability"), bad("entropy_collapse")
    assert [a.mode for a in played.go(*mild, steps=1 + COOLDOWN)] == ["gradient_instability", "entropy_collapse"]
    assert [a.mode for a in played.go(*mild, bad("kl_explosion", "critical"))] == ["kl_explosion"]
    assert [a.mode for a in Played().go(*mild, bad("echo_trap", since=3))] == ["echo_trap"], (
        "what began first may be the cause of the rest"
    )


def ok(*modes: str) -> list[Judgement]:
    return [Judgement(mode=mode, status="ok") for mode in modes]


def test_brakes_are_let_go_by_notches_and_more_slowly_after_a_relapse():
    played = Played(["lr", "kl"])
    assert [a.safeguard for a in played.go(bad("overfitting"), steps=1 + 2 * COOLDOWN)] == ["kl", "lr", "kl"]
    assert (played.now.kl_coef, played.now.lr) == (pytest.approx(0.3), played.base.lr / 2)
    back = played.go(*ok("overfitting"), steps=3 * RELEASE + 1)
    assert [(a.safeguard, a.takes_back) for a in back] == [("lr", True), ("kl", True), ("kl", True)]
    assert [a.changes.get("kl_coef", [0])[-1] for a in back] == [0, pytest.approx(0.1), 0.0]
    assert all(b.step - a.step >= COOLDOWN for a, b in itertools.pairwise(back))
    assert played.now == played.base and "until" not in back[0].text
    (again,) = played.go(bad("overfitting"))
    (late,) = played.go(*ok("overfitting"), steps=2 * RELEASE + 1)
    assert again.safeguard == late.safeguard == "lr" and late.step - again.step > 2 * RELEASE
    assert not played.go(Judgement(mode="overfitting", status="skipped"), steps=10 * RELEASE)


def test_what_took_a_cause_away_stays_and_so_does_llds():
    played = Played(["entropy", "llds", "lr"], entropy_coef=0.2)
    played.go(bad("entropy_explosion"), steps=1 + 2 * COOLDOWN)
    assert (played.now.entropy_coef, played.now.llds_coef, played.now.lr) == (0.0, 0.2, played.base.lr / 2)
    played.go(*ok("entropy_explosion"), steps=20 * RELEASE)
    assert (played.now.entropy_coef, played.now.llds_coef, played.now.lr) == (0.0, 0.2, played.base.lr)


def test_about_a_critical_finding_all_is_done_at_once_and_the_rate_comes_back_gradually():
    played = Played(["entropy", "lr", "rollback"], entropy_coef=0.2)
    (first,) = played.go(bad("entropy_explosion", "critical"), best=3)
    lr = played.base.lr
    assert first.changes == {"entropy_coef": [0.2, 0.0], "entropy_target": [None, None], "lr": [lr, lr / 4]}
    assert first.rollback == 3 and first.row("rl")["until"].startswith("taken back step by step (lr) once")
    back = played.go(*ok("entropy_explosion"), steps=2 * RELEASE + 1)
    assert [a.changes for a in back] == [{"lr": [lr / 4, lr / 2]}, {"lr": [lr / 2, lr]}]
    assert played.now.entropy_coef == 0.0


def test_a_blamed_part_of_the_reward_counts_no_more_once_and_for_good():
    played = Played(["reweight", "kl"], about={"blamed": lambda mode: "call_penalty"})
    first, second = played.go(bad("tool_call_collapse"), steps=1 + COOLDOWN)
    assert first.changes == {UNPAID: [None, ["call_penalty"]]} and first.text == "unpaid none -> call_penalty"
    assert first.row("rl")["changes"] == first.changes and not first.row("rl")["until"]
    assert second.safeguard == "kl", "it is gone already"
    played.go(*ok("tool_call_collapse"), steps=4 * RELEASE)
    assert played.past.changes() == {UNPAID: ["call_penalty"], "kl_coef": 0.0}
    assert Played(["reweight", "kl"]).go(bad("tool_call_collapse"))[0].safeguard == "kl", "nothing is to blame"


def test_what_is_not_known_is_not_ok():
    played = Played(["lr"])
    played.go(bad("overfitting"))
    assert not played.go(Judgement(mode="overfitting", status="skipped"), steps=3 * RELEASE)
    assert not played.go(*ok("overfitting"), steps=RELEASE)
    assert played.go(*ok("overfitting"))[0].takes_back


def test_two_modes_may_have_changed_the_same_key():
    played = Played(["lr"])
    played.go(bad("overfitting"))
    played.go(bad("kl_explosion"), Judgement(mode="overfitting", status="ok"), steps=COOLDOWN)
    assert played.now.lr == played.base.lr / 4
    played.go(Judgement(mode="overfitting", status="ok"), bad("kl_explosion", "info"), steps=RELEASE)
    assert played.now.lr == played.base.lr / 4, "the other mode isn't over"
    back = played.go(*ok("kl_explosion", "overfitting"), steps=2 * RELEASE + 1)
    assert [a.changes["lr"] for a in back] == [
        [played.base.lr / 4, played.base.lr / 2], [played.base.lr / 2, played.base.lr]
    ]  # fmt: skip
    assert played.now == played.base


def test_a_critical_finding_rolls_back_a_few_times_and_then_stops_with_the_reason():
    played = Played(["lr", "rollback", "stop"], about={"dropped": True})
    actions = played.go(bad("kl_explosion", "critical"), steps=100, best=3)
    assert [a.safeguard for a in actions[:4]] == ["lr", "lr", "rollback", "stop"]
    assert [a.rollback for a in actions[:4]] == [3, 3, 3, None]
    assert actions[3].step == actions[2].step + PATIENCE
    assert actions[3].why.startswith("The kl_explosion: it fell to 0.1. Tried: step 1: lr 2e-05 -> 5e-06, back to the")
    (only,) = Played(["rollback"]).go(bad("reward_hacking", "critical"), steps=2, best=3)
    assert (only.safeguard, only.rollback, only.changes) == ("rollback", 3, {})
    assert not Played(["lr"]).go(bad("error_storm", "critical"), steps=100)
    assert not Played(["rollback"]).go(bad("error_storm", "critical"), best=3), "the policy isn't to blame"
    assert Played(["rollback"], about={"dropped": True}).go(bad("error_storm", "critical"), best=3)


@pytest.mark.parametrize(
    ("about", "waits"),
    [
        ({"dropped": True}, PATIENCE),
        ({"dropped": False, "paid": lambda since: False}, 3 * PATIENCE),
        ({"dropped": False, "paid": lambda since: since == 7}, None),
    ],
    ids=["success has dropped", "nothing is gained", "it learns all the same"],
)
def test_a_run_that_learns_is_not_stopped(about: dict[str, Any], waits: int | None):
    found = Played(about=about).go(bad("error_storm", "critical"), steps=6 * PATIENCE)
    assert [a.step for a in found[:1]] == ([] if waits is None else [waits + 1])
    assert all(a.safeguard == "stop" and "Tried: nothing that could be tried" in a.why for a in found[:1])


def test_repeated_tasks_are_left_out_first_and_an_endless_stream_is_sampled_more():
    known = ["b", "a"]
    played = Played(decided=lambda: known)
    first, second = played.go(bad("advantage_collapse"), steps=1 + COOLDOWN)
    assert first.changes == {LEFT_OUT: [None, ["a", "b"]]} and first.row("rl")["changes"] == {LEFT_OUT: [None, 2]}
    assert second.changes == {"dynamic_sampling": [None, 2]}
    assert Played().go(bad("advantage_collapse"))[0].safeguard == "dynamic_sampling"


def test_a_row_says_everything():
    (action,) = Played(["lr"]).go(bad("kl_explosion"))
    row = json.loads(json.dumps(action.row("rl")))
    assert row["kind"] == "action" and row["title"] == "lr 2e-05 -> 1e-05" and row["changes"] == {"lr": [2e-05, 1e-05]}
    assert (row["mode"], row["stage"], row["step"], row["why"]) == (
        "kl_explosion",
        "rl",
        1,
        "The kl_explosion: it fell to 0.1",
    )


def test_what_was_rolled_back_no_longer_counts():
    past = Past()
    past.actions.append(Action(step=8, mode="kl_explosion", safeguard="lr", why="", rollback=4))
    updates, evals = [{"step": s, "train_s": 1.0} for s in range(1, 12)], [{"step": s} for s in range(12)]
    assert [row["step"] for row in updates if not past.holds(row)] == [5, 6, 7, 8]
    assert [row["step"] for row in evals if not past.holds(row)] == [5, 6, 7]


# -- the recipe's key ------------------------------------------------------------


def test_auto_leaves_out_what_the_stage_cannot_use_and_a_list_is_refused():
    assert usable("auto", dict(stage(save_every=0))) == (
        "entropy", "dynamic_sampling", "curriculum", "kl", "lr", "overlong", "reweight", "correction", "stop"
    )  # fmt: skip
    assert set(usable("auto", dict(stage(kl_coef=0.01, **SEVERAL)))) == set(SAFEGUARDS)
    assert usable("off", dict(stage())) == ()
    assert {name for names in LADDERS.values() for name in names} | {"rollback", "stop"} == set(SAFEGUARDS)


@pytest.mark.parametrize(
    ("value", "keys", "message"),
    [
        (["lrr"], {}, "safeguards: got 'lrr'; did you mean 'lr'"),
        ("atuo", {}, "safeguards: got 'atuo'; did you mean 'auto'"),
        (True, {}, "safeguards: got 'True' .allowed: off, auto, or a list of entropy"),
        ([], {}, "safeguards: got ''"),
        (["llds"], {}, "safeguards: got 'llds' without effect: a batch has one update"),
        (["rollback"], {"save_every": 0}, "got 'rollback' without effect: save_every is 0"),
        (["kl"], {"kl_coef": 0.1, "kl_target": 1.0}, "got 'kl' without effect: kl_target adapts"),
        (["clip_higher"], {"algorithm": "gspo"}, "got 'clip_higher' without effect: it raises clip_high, and loss"),
        (["overlong"], {"algorithm": "gdpo"}, "without effect: a length penalty doesn't reach advantage 'gdpo'"),
        (["correction"], {"correction": "mis"}, "without effect: correction is 'mis' already"),
        (["ref_reset"], {}, "without effect: kl_coef is 0"),
        (["dynamic_sampling"], {"algorithm": "ppo", "group_size": 1}, "a group of 1 never has a spread"),
        (["curriculum"], {"algorithm": "ppo", "group_size": 4}, "advantage 'gae' learns from groups without a spread"),
    ],
)
def test_wrong_and_ineffective_names_are_refused(value: Any, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        stage(safeguards=value, **keys)


def test_every_advantage_is_known_to_need_a_spread_or_not():
    assert {*UNGROUPED, *GROUPED} == set(EFFECTS["advantage"]) and not {*UNGROUPED} & {*GROUPED}


def test_the_key_survives_a_dump_and_yaml_reads_off_as_false():
    assert stage(safeguards=False).safeguards == "off" == stage().safeguards
    one = stage(safeguards=["lr", "stop"])
    assert type(one).model_validate(one.model_dump(mode="json", by_alias=True)) == one
    assert one.safeguards == ("lr", "stop") and one.changed({}).safeguards == "off"
