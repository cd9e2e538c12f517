"""`upswing doctor` with the real detectors: verdicts on healthy and sick logs of several kinds, exit codes, output."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from upswing.cli.main import app
from upswing.trajectory.store import TrajectoryStore
from upswing.trajectory.types import Message, Outcome, Score, StopReason, Task, Trajectory

STEPS = 60


def upswing(*args: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, args)))


def found_in(result: Result) -> tuple[dict, dict[str, str]]:
    """The JSON report and mode -> severity."""
    report = json.loads(result.stdout)
    return report, {row["mode"]: row["severity"] for stage in report["stages"] for row in stage["findings"]}


def course(step: int, sick: bool) -> dict[str, float]:
    """Signals at a step: learning, or entropy used up with nothing gained for it."""
    wave = math.sin(7.0 * step)
    healthy = {"entropy": 0.9 - 0.004 * step + 0.01 * wave, "reward": min(0.85, 0.3 + 0.009 * step) + 0.02 * wave}
    collapsing = {"entropy": 0.9 * math.exp(-0.12 * step) + 0.004, "reward": 0.3 - 0.002 * step + 0.02 * wave}
    return {**(collapsing if sick else healthy), "sampled_tokens": 80 + 2 * wave, "grad_norm": 0.4 + 0.02 * wave}


def trainer_state(folder: Path, sick: bool) -> Path:
    names = {"sampled_tokens": "completions/mean_length"}
    rows = [
        {
            "step": step,
            **{names.get(key, key): value for key, value in course(step, sick).items()},
            "reward_std": 0.4,
            "frac_reward_zero_std": 0.3,
            "completions/clipped_ratio": 0.02,
            "kl": 1e-4 * step,
            "step_time": 12.0,
        }
        for step in range(1, STEPS + 1)
    ]
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"log_history": rows}))
    return path


def metrics_lines(first: int, last: int, sick: bool) -> str:
    rows = [
        {"stage": "rl", "step": s, "time": float(s), **course(s, sick), "reward_std": 0.4, "zero_variance_frac": 0.3}
        for s in range(first, last + 1)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def played(name: str) -> Trajectory:
    task = Task(id="t", messages=(Message(role="user", content="Where is Lima?"),))
    return Trajectory(
        id=name,
        task=task,
        branches=(),
        messages=(*task.messages, Message(role="assistant", content="In Peru, in Peru.")),
        outcome=Outcome.COMPLETED,
        stop_reason=StopReason.ANSWERED,
        score=Score(value=0.0),
    )


def make_run(folder: Path, sick: bool, steps: int = STEPS) -> Path:
    folder.mkdir()
    stage = {"stage": "rl", "name": "rl", "lr": 1e-5, "group_size": 8, "tasks_per_step": 8, "loss": "ppo_clip"}
    recipe = {"stages": [{"stage": "sft", "name": "sft"}, stage], "limits": {"turn_tokens": 256}}
    recipe["verifiers"] = [{"name": "gone.py:match", "weight": 1.0}, {"name": "f1", "weight": 0.0}]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "metrics.jsonl").write_text('{"stage": "sft", "step": 1, "loss": 2.0}\n' + metrics_lines(1, steps, sick))
    return folder


def test_trl_that_loses_its_entropy_and_trl_that_learns(tmp_path: Path):
    (tmp_path / "sick").mkdir()
    report, modes = found_in(upswing("doctor", trainer_state(tmp_path / "sick", True), "--json"))
    assert modes["entropy_collapse"] in ("warning", "critical")
    (stage,) = report["stages"]
    row = next(row for row in stage["findings"] if row["mode"] == "entropy_collapse")
    assert row["since"] <= row["step"] < STEPS and row["evidence"] and row["causes"] and row["remedies"]
    assert (stage["format"], stage["framework"]) == ("trainer_state.json of transformers", "TRL")
    assert "step_time" in stage["ignored"] and stage["used"]["truncated_frac"] == ["completions/clipped_ratio"]
    assert {"template_collapse", "likelihood_displacement", "repeated_calls"} <= set(stage["skipped"])
    assert stage["skipped"]["repeated_calls"] == ["duplicate_call_frac"], "what is missing is named, not called ok"
    assert "gradient_instability" in stage["ok"]

    report, modes = found_in(upswing("doctor", trainer_state(tmp_path, False), "--json"))
    assert not {"warning", "critical"} & set(modes.values())
    assert {"entropy_collapse", "length_explosion", "kl_explosion"} <= set(report["stages"][0]["ok"])


def test_verl_console_in_colour(tmp_path: Path):
    lines = [
        f"\x1b[36m(TaskRunner pid=7)\x1b[0m step:{step} - actor/entropy:np.float64({values['entropy']!r}) - "
        f"critic/score/mean:{values['reward']!r} - response_length/mean:{values['sampled_tokens']!r}"
        for step in range(1, STEPS + 1)
        for values in (course(step, True),)
    ]
    (tmp_path / "train.log").write_text("\n".join(lines))
    report, modes = found_in(upswing("doctor", tmp_path / "train.log", "--json"))
    assert "entropy_collapse" in modes and "gradient_instability" in report["stages"][0]["skipped"]


def test_a_run_folder_in_text_and_html(tmp_path: Path):
    run = make_run(tmp_path / "run", True)
    TrajectoryStore(run / "trajectories").append("rl", STEPS, [played("t/0-0"), played("t/0-1")])
    page = tmp_path / "page.html"
    result = upswing("doctor", run, "--html", page)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert text.startswith(f"{run}: ") and " finding" in text.splitlines()[0]
    assert f"stage rl: {STEPS} steps (1 to {STEPS})" in text and "[entropy_collapse]" in text
    assert "upswing run RECIPE: rl." in text and "trajectories: t/0-0, t/0-1" in text
    assert "    | assistant: In Peru, in Peru." in text and "skipped, for want of these signals:" in text
    assert max(map(len, text.splitlines()[1:])) <= 170
    html = page.read_text()
    assert "entropy_collapse" in html and html.count("<svg") >= 2 and 'src="' not in html


def test_signals_that_old_metrics_lack_come_from_the_stored_trajectories(tmp_path: Path):
    run, store = make_run(tmp_path / "run", False), TrajectoryStore(tmp_path / "run" / "trajectories")
    before, _ = found_in(upswing("doctor", run, "--json"))
    for step in range(STEPS - 7, STEPS + 1):
        store.append("rl", step, [played("t/0-0"), played("t/0-1")])
    after, _ = found_in(upswing("doctor", run, "--json"))
    assert "error_storm" in before["stages"][0]["skipped"] and "error_storm" in after["stages"][0]["ok"]
    assert after["stages"][0]["notes"] == [
        "signals that its metrics lack were computed from the stored trajectories of 4 steps"
    ]


def test_text_of_a_foreign_log_says_what_was_read_and_escapes_it(tmp_path: Path):
    rows = [{"step": s, **course(s, True), "<script>x": 1.0, "score_a": 0.1} for s in range(1, STEPS + 1)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = upswing("doctor", tmp_path / "log.jsonl", "--html", tmp_path / "page.html")
    assert "keys as in Upswing" in result.stdout and "ignored: <script>x" in result.stdout
    page = (tmp_path / "page.html").read_text()
    assert "<script>x" not in page and "&lt;script&gt;x" in page


def test_exit_codes(tmp_path: Path):
    sick, well = make_run(tmp_path / "sick", True), make_run(tmp_path / "well", False)
    assert upswing("doctor", sick).exit_code == 0
    assert upswing("doctor", sick, "--fail-on", "warning").exit_code == 1
    assert upswing("doctor", well, "--fail-on", "warning").exit_code == 0


def assert_refused(result: Result, *words: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_what_doctor_refuses(tmp_path: Path):
    run = make_run(tmp_path / "run", False)
    assert_refused(upswing("doctor", run, "--fail-on", "warnning"), "did you mean 'warning'?")
    assert_refused(upswing("doctor", run, "--stage", "rll"), "did you mean 'rl'?", "it has sft, rl")
    assert_refused(upswing("doctor", run, "--html", tmp_path / "no" / "x.html"), "no folder")
    assert_refused(upswing("doctor", run, "--follow", "--json"), "leave --json out")
    assert_refused(upswing("doctor", tmp_path / "none"), "isn't there; accepted: an Upswing run folder")
    assert_refused(upswing("doctor", run / "trainer_stat.json"), "isn't there"), "not the run that it would be in"
    assert_refused(upswing("doctor", trainer_state(tmp_path, True), "--follow"), "for run folders")
    (run / "metrics.jsonl").write_text("")
    assert_refused(upswing("doctor", run), "no metrics of an RL stage yet")


def test_a_run_being_written_and_a_metrics_file_alone(tmp_path: Path):
    run = make_run(tmp_path / "run", False, steps=10)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "step": 11, "entro')
    report, _ = found_in(upswing("doctor", run / "metrics.jsonl", "--json"))
    assert report["stages"][0]["last_step"] == 10
    (run / "recipe.yaml").unlink()
    assert found_in(upswing("doctor", run, "--json", "--stage", "rl"))[0]["stages"][0]["steps"] == 10


def test_follow_tells_what_is_new_until_the_stage_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(tmp_path / "run", True, steps=3)
    naps = []

    def grow(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 1:
            with (run / "metrics.jsonl").open("a") as file:
                file.write(metrics_lines(4, STEPS, True))
        else:
            (run / "state.json").write_text(json.dumps({"stages": {"rl": {"done": True}}}))

    monkeypatch.setattr("upswing.cli.doctor.time.sleep", grow)
    lines = upswing("doctor", run, "--follow").stdout.splitlines()
    told = [line for line in lines if "[entropy_collapse]" in line]
    assert told[0].startswith("rl step ") and ": began: " in told[0] and len(naps) == 2
    assert any(line.startswith(f"{run}: ") for line in lines), "the report comes at the end"


def test_follow_ends_with_the_report_when_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("upswing.cli.doctor.time.sleep", interrupt)
    result = upswing("doctor", make_run(tmp_path / "run", True), "--follow", "--fail-on", "warning")
    assert result.exit_code == 1 and "skipped" in result.stdout


def test_it_starts_without_torch():
    code = (
        "import sys, upswing.cli.doctor, upswing.monitor.doctor, upswing.view.doctor; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
