"""Every change that a finding proposes is one that the recipe takes, and that changes something."""

from __future__ import annotations

from typing import Any

import pytest
from tests.monitor.series import FACTS, FAULTS, run

from upswing.monitor.detectors import judge
from upswing.monitor.detectors.readings import Readings
from upswing.monitor.detectors.remedies import Menu
from upswing.monitor.findings import Remedy
from upswing.monitor.history import History
from upswing.recipe.distill import DistillStage
from upswing.recipe.presets import PRESETS
from upswing.recipe.rl import RlStage

VARIANTS: list[dict[str, Any]] = [
    {},
    {"minibatches": 2},
    {"minibatches": 4, "updates_per_batch": 4},
    {"updates_per_batch": 2},
    {
        "minibatches": 2,
        "kl_coef": 0.02,
        "entropy_coef": 0.01,
        "entropy_target": 0.3,
        "temperature": 0.7,
        "group_size": 2,
    },
    {"max_staleness": 4, "group_size": 4, "overlong_length": 200, "overlong_cache": 50, "dynamic_sampling": 1},
    {"minibatches": 2, "old_logprobs": "engine", "llds_coef": 0.0, "truncated": "mask"},
    {"minibatches": 2, "llds_coef": 0.4, "dual_clip": 0.0, "clip_high": 0.2, "kl_stop": 0.1, "max_staleness": 1},
    {"correction": "tis", "kl_coef": 0.001, "ref_refresh_steps": 20, "grad_clip": 0.5, "lr": 1e-6},
    {"temperature": 1.3, "entropy_coef": 0.01, "kl_coef": 1.0},
]
METHODS = [name for name in vars(Menu) if not name.startswith("_") and name not in ("set", "advise", "overlong")]


def stages() -> list[RlStage]:
    """GRPO in every variant that its rules allow, the other algorithms in a third of them each."""
    made = []
    for index, algorithm in enumerate(PRESETS):
        for variant in VARIANTS if algorithm == "grpo" else VARIANTS[index % 3 :: 3]:
            try:
                made.append(RlStage.model_validate({"stage": "rl", "steps": 100, "algorithm": algorithm, **variant}))
            except ValueError:
                continue
    assert len(made) > 40
    return made


def facts_of(stage: RlStage | DistillStage) -> dict[str, Any]:
    return stage.model_dump(mode="json", by_alias=True)


def remedies_for(facts: dict[str, Any]) -> list[Remedy]:
    menu = Menu(Readings(History("rl", (), facts=facts)))
    found = [menu.entropy_bonus(0.25) if name == "entropy_bonus" else getattr(menu, name)() for name in METHODS]
    return [remedy for remedy in [*found, menu.overlong(120.0)] if remedy is not None]


def test_every_remedy_makes_a_valid_recipe_that_differs():
    offered = set()
    for stage in stages():
        facts = facts_of(stage)
        for remedy in remedies_for(facts):
            changed = RlStage.model_validate({**facts, **remedy.change})
            offered |= remedy.change.keys()
            assert all(facts[key] != value for key, value in remedy.change.items())
            assert not remedy.change or facts_of(changed) != facts
    wanted = {"lr", "entropy_coef", "clip_high", "loss", "llds_coef", "kl_coef", "kl_stop", "dual_clip", "correction"}
    wanted |= {"dynamic_sampling", "updates_per_batch", "minibatches", "overlong_length", "temperature", "truncated"}
    assert wanted <= offered


def test_a_distill_stage_is_offered_its_own_keys_only():
    facts = facts_of(DistillStage(steps=100, teacher="somewhere"))
    for remedy in remedies_for(facts):
        DistillStage.model_validate({**facts, **remedy.change})


def test_nothing_is_proposed_that_is_done():
    def changes(**facts: Any) -> list[str]:
        return [key for one in remedies_for({**FACTS, **facts}) for key, value in one.change.items() if value]

    assert "clip_high" in changes(clip_high=0.2)
    assert "clip_high" not in changes(clip_high=0.28)
    assert "dual_clip" not in changes(dual_clip=3.0)
    assert "dynamic_sampling" not in changes(dynamic_sampling=4)
    assert "truncated" not in changes(truncated="mask")
    assert "llds_coef" not in changes(llds_coef=1.0)
    assert "lr" in changes()


@pytest.mark.parametrize("mode", FAULTS)
def test_findings_without_facts_name_keys_that_exist(mode: str):
    """A foreign log: whatever is proposed is at least a key of the stage."""
    history = History("rl", run("saturates", 1, steps=45, batch=128, fault=mode)[0])
    findings = [judgement.finding for judgement in judge(history) if judgement.finding is not None]
    assert mode in [finding.mode for finding in findings]
    keys = {key for finding in findings for remedy in finding.remedies for key in remedy.change}
    assert keys <= set(RlStage.model_fields)
