"""What a run folder says about a run that was stopped and went on."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from upswing.errors import ConfigError
from upswing.models.load import load_tokenizer
from upswing.models.tiny import tiny_model, tiny_tokenizer
from upswing.monitor.progress import Progress
from upswing.recipe import Recipe, check_same, load_recipe
from upswing.stages import runner
from upswing.stages.context import RunState
from upswing.stages.runner import run_recipe
from upswing.trajectory.store import TrajectoryStore
from upswing.view.run_folder import RECIPE

from .test_algorithms import recipe


def test_a_stages_wall_time_counts_every_process_that_worked_on_it(tmp_path: Path) -> None:
    first = RunState.open(tmp_path)
    first.begin("rl", 0.0)
    first.stages["rl"]["began"] = time.time() - 1000  # ... of which it was alive for 40 s
    first.take_version()
    again = RunState.open(tmp_path)
    assert not again.is_done("rl")
    again.begin("rl", again.stages["rl"]["began"] + 40)
    again.finish("rl", steps=3)
    assert again.stages["rl"]["wall_s"] == pytest.approx(40, abs=2) and again.is_done("rl")


def test_a_run_is_resumed_with_its_own_recipe_only(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / RECIPE).write_text(recipe({}).dump())
    with pytest.raises(ConfigError, match=r"differs from that of .* in stages.0.lr \(0.001 there, 0.01 now\)"):
        run_recipe(recipe({"lr": 0.01}), out, resume=True, log=Progress(quiet=True))


def test_stages_may_be_added_at_the_end_of_a_resumed_run_but_not_taken_away_or_put_between(tmp_path: Path) -> None:
    one = recipe({})
    (stage,) = one.stages
    later = stage.model_copy(update={"name": "later"})
    two = one.model_copy(update={"stages": (stage, later)})
    check_same(one, two, tmp_path)
    for other in (one.model_copy(update={"stages": ()}), one.model_copy(update={"stages": (later, stage)})):
        with pytest.raises(ConfigError, match="differs from that of"):
            check_same(one, other, tmp_path)
    with pytest.raises(ConfigError, match=r"stages\.1\.name"):
        check_same(two, one, tmp_path)


def test_an_engine_that_was_started_is_closed_when_the_model_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    class Started:
        async def close(self) -> None:
            closed.append(self)

    def no_memory(name: str, **options: object) -> None:
        raise MemoryError(name)

    monkeypatch.setattr(runner, "server_of", lambda *args: Started())
    monkeypatch.setattr(runner, "load_model", no_memory)
    with pytest.raises(MemoryError):
        run_recipe(recipe({}), tmp_path / "run", log=Progress(quiet=True))
    assert len(closed) == 1


def test_a_cache_too_small_for_one_trajectory_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    small = recipe({})
    small = small.model_copy(
        update={"engine": small.engine.model_copy(update={"kv_memory_gb": 1e-5, "dtype": "float32"})}
    )
    with pytest.raises(
        ConfigError, match=r"limits.context_tokens: got \d+, above the 19 that kv_memory_gb 1e-05 holds"
    ):
        run_recipe(small, tmp_path / "run", log=Progress(quiet=True))


HOLDER = "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(flush=True); input()"


def past_the_lock(*args: object) -> None:
    raise ConfigError("it is past the lock")


def test_a_run_that_another_process_writes_is_left_alone_until_that_one_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_context", past_the_lock)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ConfigError) as refused:
            run_recipe(recipe({}), tmp_path, resume=True, log=Progress(quiet=True))
        who = f"pid {holder.pid}" if Path("/proc/locks").exists() else "another process"
        assert str(refused.value) == f"run '{tmp_path}' is still being written by {who}; wait for it or stop it"
        holder.send_signal(signal.SIGKILL)
    for _ in range(2):  # it is given back, too
        with pytest.raises(ConfigError, match="past the lock"):
            run_recipe(recipe({}), tmp_path, resume=True, log=Progress(quiet=True))
    assert not any(tmp_path.iterdir())


def test_where_a_file_system_has_no_locks_it_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*args: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(runner, "_context", past_the_lock)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ConfigError, match="past the lock"):
        run_recipe(recipe({}), tmp_path, resume=True, log=Progress(quiet=True, json_lines=True))
    assert "can't be locked (No locks available)" in capsys.readouterr().out


ENDS_OTHERWISE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@pytest.fixture
def base(tmp_path: Path) -> Recipe:
    """Of a base model: it has no chat template."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "base")
    tiny_model().save_pretrained(tmp_path / "base")
    return recipe({}).model_copy(update={"model": str(tmp_path / "base")})


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "chat_template: the tokenizer has no chat template"),
        ("{% if %}", "chat_template: the chat template can't render"),
    ],
)
def test_a_missing_or_broken_chat_template_is_refused_before_weights_are_read(
    base: Recipe, template: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "load_model", None)
    with pytest.raises(ConfigError, match=words):
        run_recipe(base.model_copy(update={"chat_template": template}), tmp_path / "run", log=Progress(quiet=True))
    assert not (tmp_path / "run").exists()


def test_a_recipes_chat_template_is_used_ends_turns_and_stays_with_the_checkpoints(
    base: Recipe, tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text(ENDS_OTHERWISE)
    (tmp_path / "recipe.yaml").write_text(base.model_copy(update={"chat_template": "chat.jinja"}).dump())
    given = load_recipe(tmp_path / "recipe.yaml")
    out = tmp_path / "run"
    run_recipe(given, out, log=Progress(quiet=True))
    assert load_recipe(out).chat_template == ENDS_OTHERWISE  # its text: the file may change
    played = next(iter(TrajectoryStore(out / "trajectories").read("rl"))).trajectory
    tokens = played.branches[0].tokens.tolist()
    said = tiny_tokenizer().decode(tokens)
    assert said.startswith("[user]say ") and "<|endoftext|>[assistant]" in said
    context = runner._context(given, tmp_path / "other", runner.check(given), Progress(quiet=True))
    assert context.rollouts.end_tokens == (0, 2)  # the template's own first: generation config and EOS lack it
    trained = load_tokenizer(str(out / "checkpoints" / "rl" / "final"))
    assert trained.chat_template == ENDS_OTHERWISE


@pytest.mark.parametrize(
    ("file", "words"), [("caht.jinja", "did you mean '.*chat.jinja'"), ("plain.txt", "is no Jinja template")]
)
def test_what_is_no_chat_template_is_refused_with_its_key(base: Recipe, tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / "chat.jinja").write_text(ENDS_OTHERWISE)
    (tmp_path / "plain.txt").write_text("You are an agent.")
    (tmp_path / "recipe.yaml").write_text(base.dump())
    with pytest.raises(ConfigError, match=f"chat_template: .*{words}"):
        load_recipe(tmp_path / "recipe.yaml", [f"chat_template={file}"])
