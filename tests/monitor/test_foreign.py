"""Other frameworks' logs under their real keys: recognised by content, converted by the table, nothing guessed."""

from __future__ import annotations

import csv
import json
import struct
from pathlib import Path

import pytest

from upswing.errors import ConfigError
from upswing.monitor.foreign import ForeignLog, number, read_foreign

RAY = "\x1b[36m(TaskRunner pid=247607)\x1b[0m "


def trl_row(step: int, **more: float) -> dict[str, float]:
    """What TRL 1.16's GRPO trainer leaves in log_history at a step."""
    return {
        "clip_ratio/high_max": 0.0,
        "clip_ratio/high_mean": 0.01,
        "clip_ratio/low_mean": 0.02,
        "clip_ratio/region_mean": 0.03,
        "completions/clipped_ratio": 0.125,
        "completions/max_length": 256.0,
        "completions/mean_length": 120.5,
        "completions/mean_terminated_length": 0.0,
        "completions/min_length": 8.0,
        "entropy": 0.9,
        "epoch": 0.01 * step,
        "frac_reward_zero_std": 0.25,
        "grad_norm": 0.4,
        "kl": 0.003,
        "learning_rate": 1e-6,
        "loss": 0.001,
        "num_tokens": 3e4 * step,
        "reward": 0.5,
        "reward_std": 0.4,
        "rewards/format_reward/mean": 0.9,
        "rewards/format_reward/std": 0.3,
        "sampling/sampling_logp_difference/mean": 0.01,
        "sampling/sampling_logp_difference/max": 0.5,
        "step": step,
        "step_time": 12.5,
        "tools/call_frequency": 1.5,
        "tools/failure_frequency": 0.05,
        **more,
    }


def values(log: ForeignLog, signal: str) -> list[float | None]:
    return [row.get(signal) for row in log.rows]


def test_trl_by_its_trainer_state_or_the_folder_that_holds_one(tmp_path: Path):
    rows = [trl_row(1), trl_row(2, **{"completions/mean_terminated_length": 99.0, "reward": float("nan")})]
    rows += [{"eval_reward": 0.6, "eval_loss": 0.1, "step": 2}, {"train_loss": 7.0, "train_runtime": 60.0, "step": 2}]
    for step, kept in ((2, rows), (10, [*rows, trl_row(10)])):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": kept, "global_step": step}))
    log = read_foreign(tmp_path / "checkpoint-2" / "trainer_state.json")
    assert (log.framework, [row["step"] for row in log.rows]) == ("TRL", [1, 2])
    expected = {"clipped_high": 0.01, "clipped_low": 0.02, "truncated_frac": 0.125, "tokens_max": 256, "tokens_min": 8}
    expected |= {"sampled_tokens": 120.5, "entropy": 0.9, "zero_variance_frac": 0.25, "grad_norm": 0.4, "kl": 0.003}
    expected |= {"lr": 1e-6, "loss": 0.001, "reward": 0.5, "reward_std": 0.4, "score_format_reward": 0.9}
    expected |= {"mismatch_abs": 0.01, "mismatch_max": 0.5, "tool_calls": 1.5, "invalid_call_frac": 0.05}
    assert log.rows[0] == {"step": 1, **expected}
    assert values(log, "tokens_finished") == [None, 99.0], "0 means that no completion ended"
    assert values(log, "reward") == [0.5, None] and values(log, "eval_reward") == [None, 0.6]
    assert values(log, "loss") == [0.001, 0.001], "the mean over all steps is no step's loss"
    assert log.used["truncated_frac"] == ("completions/clipped_ratio",)
    assert {"step_time", "train_loss", "rewards/format_reward/std", "eval_loss", "epoch"} <= set(log.ignored)
    assert [row["step"] for row in read_foreign(tmp_path).rows] == [1, 2, 10], "the last checkpoint's, by number"


def verl_metrics(**more: float) -> dict[str, float]:
    return {
        "actor/entropy": 0.31,
        "actor/kl_loss": 0.001,
        "actor/pg_clipfrac": 0.002,
        "actor/ppo_kl": -0.0001,
        "actor/grad_norm": 0.21,
        "critic/score/mean": 0.25,
        "critic/rewards/mean": 0.2,
        "response_length/mean": 842.0,
        "response_length/clip_ratio": 0.01,
        "num_turns/mean": 5.0,
        "rollout_corr/kl": -0.002,
        "rollout_corr/k3_kl": 0.0015,
        "training/rollout_probs_diff_mean": 0.003,
        "training/global_step": 1,
        "timing_s/step": 49.1,
        **more,
    }


def check_verl(log: ForeignLog) -> None:
    last = log.rows[-1]
    assert log.framework == "verl" and [row["step"] for row in log.rows] == [0, 1]
    expected = {"entropy": 0.31, "kl": 0.001, "kl_old": -0.0001, "reward": 0.25, "sampled_tokens": 842.0}
    expected |= {"truncated_frac": 0.01, "turns": 2.5, "mismatch_k3": 0.0015, "grad_norm": 0.21}
    assert last == {"step": 1, **expected}
    assert values(log, "eval_reward") == [pytest.approx(0.3), None], "the mean over two data sets"
    assert log.used["reward"] == ("critic/score/mean",), "the score, for the reward may be less a KL penalty"
    assert {"critic/rewards/mean", "actor/pg_clipfrac", "training/rollout_probs_diff_mean"} <= set(log.ignored)
    assert any("not of log-probs" in note for note in log.notes) and any("halved" in note for note in log.notes)


EVALUATED = {
    "val-core/openai/gsm8k/reward/mean@1": 0.2,
    "val-core/math/reward/mean@1": 0.4,
    "val-aux/math/x/std@4": 1.0,
}


def test_verl_console_with_colours_numpy_numbers_and_progress_bars(tmp_path: Path):
    first = " - ".join(f"{key}:np.float64({value})" for key, value in EVALUATED.items())
    second = " - ".join(f"{key}:{value!r}" for key, value in verl_metrics().items())
    second = second.replace("actor/grad_norm:0.21", "actor/grad_norm:np.float64(0.21)")
    path = tmp_path / "train.log"
    path.write_text(
        f"{RAY}\"Initial validation metrics: {{'val-core/x/reward/mean@1': 0.9}}\"\n{RAY}step:0 - {first}\n"
        f"Training Progress:   1%|  | 1/140 [00:49<1:53:43, 49.09s/it]\r{RAY}step:1 - {second}"
        f"\x1b[32m [repeated 2x across cluster]\x1b[0m\n"
        f"{RAY}Solution string: step:by step - no\n{RAY}step:2 - "
    )
    check_verl(read_foreign(path))


def test_verl_file_log_with_a_cut_last_line(tmp_path: Path):
    rows = [{"step": 0, "data": EVALUATED}, {"step": 1, "elapsed_seconds": 5.5, "data": verl_metrics()}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 2, "data": {"actor/ent')
    check_verl(read_foreign(path))


def test_wandb_chart_export_with_bounds_and_empty_cells(tmp_path: Path):
    path = tmp_path / "wandb_export_2026-01-01.csv"
    header = ["Step"]
    header += [f"my - run - train/{key}{end}" for key in ("entropy", "kl") for end in ("", "__MIN", "__MAX")]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [header, ["10", "0.5", "0.4", "0.6", "", "", ""], ["20", "", "", "", "0.01", "0", "1"]]
        )
    log = read_foreign(path)
    assert log.framework == "TRL" and log.rows == ({"step": 10, "entropy": 0.5}, {"step": 20, "kl": 0.01})
    header[-1] = "other - train/kl"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, ["1"] * len(header)])
    with pytest.raises(ConfigError, match=r"2 runs \(my - run, other\); export one run alone"):
        read_foreign(path)


def test_wandb_history_goes_by_the_trainers_step(tmp_path: Path):
    rows = [
        {
            "_step": 7,
            "_runtime": 1.0,
            "train/global_step": 3,
            "train/entropy": 0.5,
            "train/reward": "NaN",
            "hist": {"a": 1},
        },
        {"_step": 8, "_runtime": 2.0, "train/global_step": 3, "eval/reward": 0.25, "eval/rewards/f1/mean": 0.5},
    ]
    (tmp_path / "wandb-history.jsonl").write_text("\n".join(map(json.dumps, rows)))
    log = read_foreign(tmp_path)
    assert log.rows == ({"step": 3, "entropy": 0.5, "eval_reward": 0.25, "eval_f1": 0.5},)
    (tmp_path / "wandb-summary.json").write_text(json.dumps(rows[0]))
    with pytest.raises(ConfigError, match="holds last values only; export the run's history"):
        read_foreign(tmp_path / "wandb-summary.json")


def test_tensorboard_exports_are_put_together_by_their_file_names(tmp_path: Path):
    for tag, value in (("actor_entropy", 0.4), ("val-core_gsm8k_reward_mean@1", 0.7)):
        (tmp_path / f"run-exp1-tag-{tag}.csv").write_text(
            f"Wall time,Step,Value\n1.7e9,1,{value}\n1.7e9,2,{value / 2}\n"
        )
    (tmp_path / "run-exp1-tag-actor_grad_norm.json").write_text(json.dumps([[1.7e9, 1, 0.5], [1.7e9, 2, 0.6]]))
    log = read_foreign(tmp_path)
    assert log.rows == (
        {"step": 1, "entropy": 0.4, "eval_reward": 0.7, "grad_norm": 0.5},
        {"step": 2, "entropy": 0.2, "eval_reward": 0.35, "grad_norm": 0.6},
    )
    (tmp_path / "export.csv").write_text("Wall time,Step,Value\n1.7e9,1,0.4\n")
    with pytest.raises(ConfigError, match=r"without its tag; call it run-NAME-tag-TAG\.csv"):
        read_foreign(tmp_path / "export.csv")


def test_tensorboard_event_files(tmp_path: Path):
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    summary_pb2 = pytest.importorskip("tensorboard.compat.proto.summary_pb2")
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "runs" / "host"))
    for step in (1, 2):
        for tag, value in (("train/entropy", 0.5 / step), ("train/reward", 0.25 * step)):
            summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(event_pb2.Event(step=step, wall_time=1.7e9, summary=summary))
    writer.close()
    log = read_foreign(tmp_path)
    assert log.rows == ({"step": 1, "entropy": 0.5, "reward": 0.25}, {"step": 2, "entropy": 0.25, "reward": 0.5})


def test_event_files_without_the_package_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.backend.event_processing.event_accumulator", None)
    (tmp_path / "events.out.tfevents.1700000000.host.1.0").write_bytes(struct.pack("<Q", 24))
    with pytest.raises(ConfigError, match=r"pip install 'upswing\[tensorboard\]'"):
        read_foreign(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "events.out.tfevents.1.host").write_bytes(b"")
    with pytest.raises(ConfigError, match="several runs; name one"):
        read_foreign(tmp_path)


@pytest.mark.parametrize(
    ("row", "framework", "expected"),
    [
        (
            {"policy/policy_entropy": "0.4", "reward/avg_raw_reward": "0.5", "generate/avg_tokens_zero_rewards": 0.0},
            "SkyRL",
            {"entropy": 0.4, "reward": 0.5},
        ),
        (
            {"train/policy_loss": 0.1, "train/kl": 0.0, "train/vllm_kl": 1e-3, "train/response_length": 90.0},
            "OpenRLHF",
            {"loss": 0.1, "mismatch_k3": 1e-3, "sampled_tokens": 90.0},
        ),
        (
            {"reward": 1.0, "sampled_tokens": 8, "score_f1": 0.5, "repetition": 0.1},
            "Upswing",
            {"reward": 1.0, "sampled_tokens": 8, "score_f1": 0.5, "repetition": 0.1},
        ),
    ],
)
def test_flat_rows_are_told_by_their_keys(tmp_path: Path, row: dict, framework: str, expected: dict):
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"trainer/global_step": step, **row}) + "\n" for step in (1, 2)))
    log = read_foreign(path)
    assert log.framework == framework and log.rows == ({"step": 1, **expected}, {"step": 2, **expected})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("np.float64(0.25)", 0.25), ("-1e-06", -1e-6), ("tensor(3., device='cuda')", 3.0), (" .5 ", 0.5), (7, 7.0)]
    + [(text, None) for text in ("nan", "inf", "", "high", "12abc", True, None, float("nan"), [1])],
)
def test_numbers_as_they_are_printed(text, expected):
    assert number(text) == expected


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.bin", b"\0\1\2", "isn't text; accepted: an Upswing run folder"),
        ("a.txt", b"hello world", "isn't a log that doctor knows; accepted: an Upswing run folder"),
        ("a.jsonl", b"", "is empty; accepted: an Upswing"),
        ("trainer_state.json", b'{\n "log_history": [\n  {\n   "step": 1,', "starts as JSON, but is cut"),
        ("a.jsonl", b'{"step": 1, "name": "x"}', "no row has a step and numbers"),
        ("a.jsonl", b'{"step": 1, "foo": 2, "bar": 3}', r"none of its keys is known \(foo, bar\)"),
        ("a.csv", b"x,y\n1,2\n", "isn't a log that doctor knows"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, content: bytes, said: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_foreign(path)


def test_folders_and_paths_that_say_too_little(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no log"):
        read_foreign(tmp_path)
    with pytest.raises(ConfigError, match="isn't there"):
        read_foreign(tmp_path / "none.json")
    for name in ("a.jsonl", "b.log"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=r"holds 2 logs \(a.jsonl, b.log\); name one"):
        read_foreign(tmp_path)
