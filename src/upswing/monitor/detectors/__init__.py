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

# fmt: off
DETECTORS: tuple[Detector, ...] = (
    Detector("entropy_collapse", "Entropy is used up without reward for it",
             ("entropy", "reward"), 6, exploration.entropy_collapse),
    Detector("entropy_explosion", "Entropy rises while reward is flat",
             ("entropy", "reward"), 6, exploration.entropy_explosion),
    Detector("advantage_collapse", "Most groups have no spread of rewards, so they teach nothing",
             ("zero_variance_frac", "reward"), 4, exploration.advantage_collapse),
    Detector("echo_trap", "Attempts repeat one another and rewards lose their spread",
             (("group_reward_std", "reward_std"),
              ("unique_frac", "distinct_4", "repetition", "same_first_turn_frac", "entropy"), "reward"),
             6, exploration.echo_trap),
    Detector("template_collapse", "First turns no longer depend on the task",
             (("mi_first_turn", "mi_retrieval", "same_first_turn_frac"), "reward"), 3, exploration.template_collapse),
    Detector("kl_explosion", "The policy runs away from where it started",
             (("kl", "kl_old"), "reward"), 3, updates.kl_explosion, partly=("kl",)),
    Detector("length_explosion", "Attempts get longer without getting better",
             ("sampled_tokens", "reward"), 6, conduct.length_explosion),
    Detector("length_collapse", "Attempts shrink to almost nothing",
             ("sampled_tokens", "reward"), 3, conduct.length_collapse),
    Detector("likelihood_displacement", "Updates make good actions less likely (LLD)",
             (("delta_good", "logprob_good"), "reward"), 2, updates.likelihood_displacement),
    Detector("train_inference_mismatch", "Sampler and learner disagree about probabilities",
             (("mismatch_abs", "mismatch_k3"),), 2, updates.train_inference_mismatch),
    Detector("tool_call_collapse", "The agent stops using its tools",
             ("tool_calls", "reward"), 6, conduct.tool_call_collapse),
    Detector("repeated_calls", "The agent makes the same calls again and again",
             ("duplicate_call_frac", "reward"), 5, conduct.repeated_calls),
    Detector("control_token_collapse", "The markup of tool calls breaks",
             ("invalid_call_frac", "reward"), 6, conduct.control_token_collapse),
    Detector("retokenisation_drift", "Later prompts aren't what the model had seen",
             ("num_forks", "num_trajectories"), 2, conduct.retokenisation_drift),
    Detector("stale_updates", "Too much is learned from old samples",
             (("kl_old", "clipped_high", "staleness"), "reward"), 4, updates.stale_updates),
    Detector("reward_hacking", "Reward rises without what it stands for",
             ("reward", ("score_*", "reward_length_corr")), 8, reward.reward_hacking),
    Detector("overfitting", "Only the training tasks are learned",
             ("eval_reward", "reward"), 5, reward.overfitting),
    Detector("gradient_instability", "Gradients explode or are not finite",
             ("grad_norm",), 1, updates.gradient_instability),
    Detector("error_storm", "Many trajectories break or can't be scored",
             (("errored_frac", "num_errored", "unscored_frac", "num_unscored"), ("num_trajectories", "errored_frac")),
             1, conduct.error_storm),
)
# fmt: on

MODES: tuple[str, ...] = tuple(detector.mode for detector in DETECTORS)


def judge(history: History, detectors: Sequence[Detector] = DETECTORS) -> list[Judgement]:
    """Every mode's status now, in the table's order."""
    readings = Readings(history)
    return [detector.judged(readings) for detector in detectors]


__all__ = ["DETECTORS", "MODES", "Detector", "Missing", "Readings", "Verdict", "judge"]
