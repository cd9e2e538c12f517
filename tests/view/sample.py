"""A run folder made by hand: what the stages leave behind, with a hostile string wherever text can be."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path

import numpy as np

from upswing.evals.summary import EvalSummary, result_entry, summarize
from upswing.monitor.metrics import MetricsLog
from upswing.trajectory.types import (
    Branch,
    Message,
    Outcome,
    Score,
    StopReason,
    Task,
    ToolCall,
    ToolRecord,
    Trajectory,
)
from upswing.view.examples import example_entry, example_from, write_examples
from upswing.view.report import write_results

KINDS = {"1-hop": "1", "2-hop": "2", "3-hop": "3", "comparison": "2"}


def decode(tokens: list[int]) -> str:
    """A byte tokenizer: token = byte, so that é and 🙂 span several tokens; 256 and up are special."""
    special = {256: "<|im_start|>", 257: "<|im_end|>"}
    out, run = [], bytearray()
    for token in tokens:
        if token in special:
            out.append(run.decode(errors="replace") + special[token])
            run = bytearray()
        else:
            run.append(token)
    return "".join(out) + run.decode(errors="replace")


def branch_of(turns: list[tuple[bool, str]], version: int = 3) -> Branch:
    """A branch from (sampled, text) pieces."""
    tokens, sampled, turn, now = [], [], [], 0
    for is_sampled, text in turns:
        ids = [*text.encode(), 257] if is_sampled else [256, *text.encode()]
        tokens += ids
        sampled += [is_sampled] * len(ids)
        turn += [now] * len(ids)
        now += is_sampled
    mask = np.array(sampled)
    logprobs = -np.random.default_rng(0).exponential(0.5, len(tokens))
    return Branch(
        tokens=np.array(tokens, np.int32),
        sampled=mask,
        engine_logprobs=np.where(mask, logprobs, np.nan).astype(np.float32),
        policy_version=np.where(mask, version, -1).astype(np.int32),
        turn=np.array(turn, np.int16),
    )


def trajectory_of(
    pieces: list[tuple[bool, str]], answer: str | None, strict: float, searches: list[tuple[str, bool]], task: Task
) -> Trajectory:
    records = tuple(
        ToolRecord(call=ToolCall(name="search", arguments={"query": query, "k": 1}), result="…", ok=ok, turn=index)
        for index, (query, ok) in enumerate(searches)
    )
    messages = tuple(Message(role="assistant" if sampled else "tool", content=text) for sampled, text in pieces)
    return Trajectory(
        id=f"{task.id}/{strict}",
        task=task,
        branches=(branch_of(pieces),),
        messages=messages,
        outcome=Outcome.COMPLETED,
        stop_reason=StopReason.ANSWERED if answer is not None else StopReason.MAX_TURNS,
        answer=answer,
        tool_records=records,
        num_turns=len(searches) + 1,
        score=Score(
            value=strict, components={"strict_match": strict, "exact_match": strict, "f1": strict, "format": 1.0}
        ),
    )


def searches_of(queries: list[str]) -> tuple[ToolRecord, ...]:
    return tuple(
        ToolRecord(call=ToolCall(name="search", arguments={"query": query}), result="…", ok=query != "q0", turn=index)
        for index, query in enumerate(queries)
    )


@cache
def evaluation(strict: float, lenient: float, seed: int, num: int = 200) -> EvalSummary:
    """200 questions of four kinds with about the shares asked for."""
    rng = random.Random(seed)
    trajectories = []
    for index in range(num):
        kind = list(KINDS)[index % len(KINDS)]
        hit = float(rng.random() < strict)
        near = max(hit, float(rng.random() < (lenient - strict) / max(1e-9, 1 - strict)))
        task = Task(id=f"t{index}", messages=(), tags={"kind": kind, "hops": KINDS[kind]})
        score = Score(value=hit, components={"strict_match": hit, "exact_match": near, "f1": near, "format": 1.0})
        trajectories.append(
            Trajectory(
                id=f"{index}",
                task=task,
                branches=(branch_of([(False, "q"), (True, "a" * rng.randint(20, 60))]),),
                messages=(),
                outcome=Outcome.COMPLETED,
                stop_reason=StopReason.ANSWERED,
                tool_records=searches_of([f"q{rng.randint(0, 3)}" for _ in range(rng.randint(1, 3))]),
                num_turns=rng.randint(1, 4),
                score=score,
            )
        )
    return summarize(trajectories, recovered=recovered, resamples=500)


def recovered(trajectory: Trajectory) -> bool | None:
    return bool(trajectory.reward) if trajectory.task.id.endswith("3") else None


def write_metrics(log: MetricsLog) -> None:
    rng = random.Random(1)
    for step in range(1, 31):
        log.append(
            "sft", step, {"loss": 2.5 * math.exp(-step / 8) + 0.2 + 0.05 * rng.random(), "grad_norm": 1.0, "lr": 1e-4}
        )
    for step in (10, 20, 30):
        log.append("sft", step, {"validation_loss": 2.4 * math.exp(-step / 8) + 0.25})
    words = "graduated: validation loss 0.3 fell by 0.8 % since the last check (flat at 1 %); right format 0.96"
    log.append("sft", 30, {"graduated": True, "words": words, "format_valid_frac": 0.96, "passk_gain": 0.21})
    for step in range(1, 21):
        rise = 1 - math.exp(-step / 7)
        log.append(
            "rl",
            step,
            {
                "reward": 0.35 + 0.5 * rise + 0.05 * rng.random(),
                "entropy": 0.9 - 0.5 * rise,
                "sampled_tokens": 60 + 20 * rng.random(),
                "tool_calls": 1.8 + 0.8 * rise,
                "turns": 2.8 + 0.8 * rise,
                "zero_variance_frac": None if step == 5 else 0.2 + 0.3 * rise,
                "kl": 0.02 * step,
                "mismatch_k3": 1e-5 * (1 + rng.random()),
                "grad_norm": 0.8 + rng.random(),
                "score_strict_match": 0.35 + 0.5 * rise,
                "score_exact_match": 0.4 + 0.5 * rise,
                "my_own_signal": rng.random(),
            },
        )
    for step in (0, 5, 10, 15, 20):
        log.append("rl", step, {"eval_reward": 0.4 + 0.02 * step, "eval_strict_match": 0.4 + 0.02 * step})


def examples(hostile: str) -> list[dict]:
    question = Message(role="user", content=f"What is the currency of the country whose capital is Brussels? {hostile}")
    task = Task(id="t7", messages=(question,), gold=("EUR",))
    prompt = (False, "system\nYou may search. " + "Answer between tags. " * 12 + f"\nuser\n{question.content}\n")
    before = trajectory_of(
        [prompt, (True, "<search>currency</search>"), (False, "tool\nThe dollar is a currency of many countries.\n"),
         (True, "<answer>dollar</answer>")],
        "dollar", 0.0, [("currency", True)], task,
    )  # fmt: skip
    after = trajectory_of(
        [prompt, (True, "<search>Brussels capital</search>"), (False, f"tool\nNo passage found. {hostile}\n"),
         (True, "Nothing there; I ask for the country. <search>Belgium currency code</search>"),
         (False, "tool\nBelgium: its currency is EUR. Île-de-Bruxelles 🙂\n"), (True, "<answer>EUR</answer>")],
        "EUR", 1.0, [("Brussels capital", False), ("Belgium currency code", True)], task,
    )  # fmt: skip
    columns = [example_from(before, decode, "base"), example_from(after, decode, "RL")]
    return [
        example_entry(columns[1:], task_id=task.id, title="First search fails", kind="recovery"),
        example_entry(columns, task_id=task.id, title=f"Wrong before, right after {hostile}"),
    ]


def build_run(run_dir: Path, hostile: str = "") -> Path:
    log = MetricsLog(run_dir)
    write_metrics(log)
    log.finding(
        "reward and strict match part", evidence=f"gap 0.31 {hostile}", remedy="Reward strictly.", stage="rl", step=12
    )
    log.event(f"groups were short {hostile}", level="warning")
    base, sft, rl = evaluation(0.0, 0.01, 0), evaluation(0.55, 0.62, 1), evaluation(0.86, 0.9, 2)
    control = evaluation(0.6, 0.66, 3)
    write_results(
        run_dir,
        [
            result_entry(f"base{hostile}", "eval", base),
            result_entry("SFT", "eval", sft, previous=base, previous_label="base"),
            result_entry("SFT control", "eval", control, previous=sft, previous_label="SFT"),
            result_entry("RL", "eval", rl, previous=sft, previous_label="SFT"),
            result_entry("RL", "dev-eval", rl, split="dev", mode="sampled"),
        ],
    )
    write_examples(run_dir, examples(hostile))
    (run_dir / "environment.json").write_text(
        json.dumps({"python": "3.11", "packages": {"torch": "2.13.0"}, "cores": 2, "note": hostile})
    )
    (run_dir / "recipe.yaml").write_text(f"name: search  # {hostile}\nmodel: smollm2-135m\n")
    (run_dir / "trajectories").mkdir(exist_ok=True)
    (run_dir / "trajectories" / "rl-1.jsonl.gz").write_bytes(b"x" * 1000)
    return run_dir
