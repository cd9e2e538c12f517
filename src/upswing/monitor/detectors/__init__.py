"""The failure modes and their detectors. `judge` gives a verdict on each, a pure function of the history.

Thresholds are the published ones where there are any (named in each detector); they must be passed by more than noise,
and what also happens in healthy runs counts only where success gains nothing. docs/failures has a page a mode.
"""

from __future__ import annotations

from collections.abc import Sequence

from upswing.monitor.detectors import conduct, exploration, reward, updates
from upswing.monitor.detectors.base import Detector, Verdict
from upswing.monitor.detectors.readings import Missing, Readings
from upswing.monitor.findings import Judgement
from upswing.monitor.history import History

DETECTORS: tuple[Detector, ...] = (
    Detector(
        mode="entropy_collapse",
        title="Entropy is used up without reward for it",
        needs=("entropy", "reward"),
        warm_up=6,
        find=exploration.entropy_collapse,
    ),
    Detector(
        mode="entropy_explosion",
        title="Entropy rises while reward is flat",
        needs=("entropy", "reward"),
        warm_up=6,
        find=exploration.entropy_explosion,
    ),
    Detector(
        mode="advantage_collapse",
        title="Most groups have no spread of rewards, so they teach nothing",
        needs=("zero_variance_frac", "reward"),
        warm_up=4,
        find=exploration.advantage_collapse,
    ),
    Detector(
        mode="echo_trap",
        title="Attempts repeat one another and rewards lose their spread",
        needs=(
            ("group_reward_std", "reward_std"),
            ("unique_frac", "distinct_4", "repetition", "same_first_turn_frac", "entropy"),
            "reward",
        ),
        warm_up=6,
        find=exploration.echo_trap,
    ),
    Detector(
        mode="template_collapse",
        title="First turns no longer depend on the task",
        needs=(("mi_first_turn", "mi_retrieval", "same_first_turn_frac"), "reward"),
        warm_up=3,
        find=exploration.template_collapse,
    ),
    Detector(
        mode="kl_explosion",
        title="The policy runs away from where it started",
        needs=(("kl", "kl_old"), "reward"),
        warm_up=3,
        find=updates.kl_explosion,
    ),
    Detector(
        mode="length_explosion",
        title="Attempts get longer without getting better",
        needs=("sampled_tokens", "reward"),
        warm_up=6,
        find=conduct.length_explosion,
    ),
    Detector(
        mode="length_collapse",
        title="Attempts shrink to almost nothing",
        needs=("sampled_tokens", "reward"),
        warm_up=6,
        find=conduct.length_collapse,
    ),
    Detector(
        mode="likelihood_displacement",
        title="Updates make good actions less likely (LLD)",
        needs=(("delta_good", "logprob_good"), "reward"),
        warm_up=4,
        find=updates.likelihood_displacement,
    ),
    Detector(
        mode="train_inference_mismatch",
        title="Sampler and learner disagree about probabilities",
        needs=(("mismatch_abs", "mismatch_k3"),),
        warm_up=2,
        find=updates.train_inference_mismatch,
    ),
    Detector(
        mode="tool_call_collapse",
        title="The agent stops using its tools",
        needs=("tool_calls", "reward"),
        warm_up=6,
        find=conduct.tool_call_collapse,
    ),
    Detector(
        mode="repeated_calls",
        title="The agent makes the same calls again and again",
        needs=("duplicate_call_frac", "reward"),
        warm_up=5,
        find=conduct.repeated_calls,
    ),
    Detector(
        mode="control_token_collapse",
        title="The markup of tool calls breaks",
        needs=("invalid_call_frac", "reward"),
        warm_up=6,
        find=conduct.control_token_collapse,
    ),
    Detector(
        mode="retokenisation_drift",
        title="Later prompts aren't what the model had seen",
        needs=("num_forks", "num_trajectories"),
        warm_up=2,
        find=conduct.retokenisation_drift,
    ),
    Detector(
        mode="stale_updates",
        title="Too much is learned from old samples",
        needs=(("kl_old", "clipped_high", "staleness"), "reward"),
        warm_up=4,
        find=updates.stale_updates,
    ),
    Detector(
        mode="reward_hacking",
        title="Reward rises without what it stands for",
        needs=("reward", ("score_*", "reward_length_corr")),
        warm_up=8,
        find=reward.reward_hacking,
    ),
    Detector(
        mode="overfitting",
        title="Only the training tasks are learned",
        needs=("eval_reward", "reward"),
        warm_up=5,
        find=reward.overfitting,
    ),
    Detector(
        mode="gradient_instability",
        title="Gradients explode or are not finite",
        needs=("grad_norm",),
        warm_up=1,
        find=updates.gradient_instability,
    ),
    Detector(
        mode="error_storm",
        title="Many trajectories break or can't be scored",
        needs=(("errored_frac", "num_errored", "unscored_frac", "num_unscored"), ("num_trajectories", "errored_frac")),
        warm_up=1,
        find=conduct.error_storm,
    ),
)

MODES: tuple[str, ...] = tuple(detector.mode for detector in DETECTORS)


def judge(history: History, detectors: Sequence[Detector] = DETECTORS) -> list[Judgement]:
    """Every mode's status now, in the table's order."""
    readings = Readings(history)
    return [detector.judged(readings) for detector in detectors]


__all__ = ["DETECTORS", "MODES", "Detector", "Missing", "Readings", "Verdict", "judge"]
