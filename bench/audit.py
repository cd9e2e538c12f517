"""`upswing audit` of every built-in verifier, and of every built-in environment with the verifier that its tasks need.

    python bench/audit.py [--quick] [--only math,code]

The lists are the registries'. A verifier of answers is tried on the tasks below, one of states, calls or programs in
the environments that have such tasks. The judges ask a scripted server, which compares exactly what stands between the
tags and copies any verdict that it is shown: their guards are tried, not a model's good sense. `--quick`: four tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import Figure, cannot_run, describe_machine, finish
from upswing.audit import AuditReport, audit
from upswing.envs import BUILTIN as ENVIRONMENTS
from upswing.envs import ToolEnv, environment_factory
from upswing.envs.base import Environment, Expert
from upswing.errors import ConfigError
from upswing.trajectory.types import Message, Task, ToolCall
from upswing.verify import Rubric, verifier_from
from upswing.verify.functions import BUILTIN, ELSEWHERE
from upswing.world import World

FULL, QUICK = 20, 4
VERIFIERS = {*BUILTIN, *ELSEWHERE}
LEFT_OUT = {
    "format": "it says nothing of the answer",
    "length_penalty": "it says nothing of the answer",
    "repetition_penalty": "it says nothing of the answer",
    "call_penalty": "it says nothing of the answer",
    "pairwise": "it ranks a whole group",
    "http": "it asks whatever server it is given",
    "env_reward": "it is what the environment says",
    "reasoning_gym": "it is the package's own scorer of the tasks that are chosen",
    "trl": "it is a function that is given",
}


# -- tasks of answers: (question, accepted answers, data) --------------------------------------------------------------

Row = tuple[str, Sequence[str], Mapping[str, Any]]
TEXTS: list[Row] = [
    (f"Name {what}.", (name,), {})
    for what, name in {
        "the capital of Peru": "Lima", "the seat of Norway's government": "Oslo", "Kenya's largest city": "Nairobi",
        "the capital of India": "New Delhi", "Argentina's largest city": "Buenos Aires",
        "who found polonium": "Marie Curie", "who wrote the first program": "Ada Lovelace", "a river in Egypt": "Nile",
        "the capital of Malaysia": "Kuala Lumpur", "the author of Emma": "Jane Austen", "a noble gas": "xenon",
        "the highest mountain of Africa": "Kilimanjaro", "the painter of Guernica": "Pablo Picasso",
        "the largest planet": "Jupiter", "the currency of Japan": "yen", "the capital of Iceland": "Reykjavik",
        "a city on the Bosphorus": "Istanbul", "the capital of Ghana": "Accra", "the metal of bulb wires": "tungsten",
        "the port of Athens": "Piraeus",
    }.items()
]  # fmt: skip
NUMBERS: list[Row] = [
    ("How much is it in all?", (gold,), {})
    for gold in (
        "12.50", "5.0", "0", "1/2", "0.5", "1,000", "-7", "42", "3.2 km", "250 g", "19", "1234567", "0.001", "2/3",
        "-0.25", "90 min", "8", "100", "17.75", "365",
    )
]  # fmt: skip
MATHS: list[Row] = [
    ("What does it come to?", (gold,), {})
    for gold in (
        "7", r"\frac{1}{3}", "x+1", r"\sqrt{2}", "(1, 2)", r"\frac{\pi}{4}", "-12", "2^{10}", r"3\sqrt{5}", "x^2-4",
        r"\{1,2\}", "0.125", r"\frac{3}{7}", "1000", "[0, 1)", "a^2b", r"\ln 2", "x=5", "n(n+1)", "15",
    )
]  # fmt: skip
CHOICES: list[Row] = [
    (f"Which of these is {what}? " + " ".join(f"({letter}) {text}" for letter, text in zip("ABCD", texts, strict=True)),
     ("ABCD"[texts.index(right)],), {"choices": texts})
    for what, right, texts in (
        (what, right, random.Random(i).sample([right, *others], 4))
        for i, (what, right, others) in enumerate(
            (what, right, ["copper", "the moon", "a whale"])
            for what, right in (("a planet", "Mars"), ("a river", "the Rhine"), ("a tree", "oak"), ("a bird", "wren"),
                                ("a city", "Lyon"), ("a number", "seven"), ("a fruit", "plum"), ("a tool", "hammer"))
        )
    )
]  # fmt: skip
DOCUMENTS: list[Row] = [
    (
        f"Give {city} and its number of districts as JSON.",
        (json.dumps({"city": city, "districts": count}),),
        {"schema": {"type": "object", "additionalProperties": False, "required": ["city", "districts"],
                    "properties": {"city": {"const": city}, "districts": {"const": count}}}},
    )
    for city, count in (("Lima", 43), ("Oslo", 15), ("Paris", 20), ("Vienna", 23), ("Berlin", 12), ("Prague", 22))
]  # fmt: skip
PATTERNS: list[Row] = [
    ("Give the code of the part.", (code,), {"pattern": re.escape(code).replace("7", "[7]")})
    for code in ("AX-771", "QL-207", "BB-19", "K7/44", "ZZ-7a", "M.73")
]
SUMS: list[Row] = [
    (f"Use each of {numbers} once to make {target}.", golds, {"numbers": numbers, "target": target})
    for numbers, target, golds in (
        ([3, 7], 21, ("3*7", "7*3")), ([4, 6, 2], 20, ("(4+6)*2", "2*(4+6)")), ([9, 5, 3], 12, ("(9-5)*3",)),
        ([8, 2, 10], 14, ("10+8/2", "8/2+10")), ([5, 5, 1], 24, ("5*5-1",)), ([2, 3, 4], 14, ("2+3*4", "3*4+2")),
    )
]  # fmt: skip


# -- tasks of acts -----------------------------------------------------------------------------------------------------


class Acts(ToolEnv):
    """Tasks of one call a turn, whose expert makes the calls in `data['plan']` and then says that it is done."""

    def expert(self, task: Task, rng: random.Random) -> Expert:
        turns = iter(self.parser.render([ToolCall(name=name, arguments=given)]) for name, given in task.data["plan"])
        return lambda messages: next(turns, "done")


def set_alarm(hour: int, room: str) -> str:
    """Set an alarm."""
    return "ok"


def send(to: str, text: str) -> str:
    """Send a message."""
    return "ok"


def look_up(topic: str) -> str:
    """Look a topic up."""
    return f"See document {sum(map(ord, topic))}."


def alarms() -> list[Row]:
    people = ("Mira", "Kofi", "Lena", "Hugo", "Tara", "Jun", "Olga", "Femi")
    plans = [
        [("set_alarm", {"hour": 6 + i, "room": f"{100 + i}"}), ("send", {"to": who, "text": f"up at {6 + i}"})]
        for i, who in enumerate(people)
    ]
    return [
        (f"Wake {who} and tell them.", (), {"plan": plan, "calls": [{"name": n, "arguments": a} for n, a in plan]})
        for who, plan in zip(people, plans, strict=True)
    ]


def finds() -> list[Row]:
    pairs = [
        ("salt", "tides"),
        ("amber", "clocks"),
        ("ferns", "kites"),
        ("glass", "owls"),
        ("ice", "maps"),
        ("tin", "rye"),
    ]
    return [
        (f"Which documents are about {a} and {b}?", (),
         {"plan": [("look_up", {"topic": a}), ("look_up", {"topic": b})],
          "evidence": [f"document {sum(map(ord, topic))}" for topic in (a, b)]})
        for a, b in pairs
    ]  # fmt: skip


# -- a judge that compares ---------------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = json.dumps(verdict(asked["messages"][-1]["content"]))
        copied = re.search(r"\{[^{}]*\"reason\"[^{}]*\}", asked["messages"][-1]["content"])
        reply = {"choices": [{"message": {"content": copied[0] if copied else content}, "finish_reason": "stop"}]}
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


def verdict(text: str) -> dict[str, Any]:
    """By what stands between the tags, read as carelessly as they let it: a tag's nonce isn't looked at."""

    def part(tag: str) -> str:
        found = re.findall(rf"<{tag}[^>]*>\s*(.*?)\s*</{tag}", text, re.DOTALL)
        return str(found[-1]).casefold() if found else ""

    golds = {gold.casefold() for asked, row, _ in TEXTS if asked in text for gold in row}
    common = {"reason": "compared", "nonce": re.findall(r"The nonce is (\w+)\.", text)[-1]}
    if "<answer_a" in text:
        a, b = (part(tag) in golds for tag in ("answer_a", "answer_b"))
        return {**common, "winner": "tie" if a == b else "A" if a else "B"}
    return {**common, "score": 10 if part("candidate") == part("reference") else 0}


# -- what is tried -----------------------------------------------------------------------------------------------------


def world_of(
    rows: Sequence[Row], verifier: str, args: Mapping[str, Any], env: Callable[..., ToolEnv], **given: Any
) -> World:
    tasks = [
        Task(id=f"{verifier}-{i}", messages=(Message(role="user", content=asked),), gold=tuple(gold), data=data)
        for i, (asked, gold, data) in enumerate(rows)
    ]
    return _world(lambda: env(tasks=tasks, **given), verifier, args)


def _world(make_env: Callable[[], Environment], verifier: str, args: Mapping[str, Any]) -> World:
    return World(
        make_env=make_env, rubric=Rubric([(verifier, verifier_from(verifier, args), 1.0)]), tasks=make_env().tasks
    )


def subjects(judge_url: str) -> dict[tuple[str, str], Callable[[], World]]:
    """(verifier, where it is tried) -> how its world is made."""
    asks = {"url": judge_url, "model": "scripted", "criteria": "Is it the reference answer?", "retries": 0}
    tried: dict[str, tuple[Sequence[Row], dict[str, Any], Callable[..., ToolEnv], dict[str, Any]]] = {
        "strict_match": (TEXTS, {}, ToolEnv, {}),
        "exact_match": (TEXTS, {}, ToolEnv, {}),
        "f1": (TEXTS, {}, ToolEnv, {}),
        "numeric": (NUMBERS, {}, ToolEnv, {}),
        "math": (MATHS, {}, ToolEnv, {}),
        "choice": (CHOICES, {}, ToolEnv, {}),
        "json_schema": (DOCUMENTS, {}, ToolEnv, {}),
        "regex": (PATTERNS, {}, ToolEnv, {}),
        "countdown": (SUMS, {}, ToolEnv, {}),
        "tool_calls": (alarms(), {}, Acts, {"tools": [set_alarm, send]}),
        "retrieval_hit": (finds(), {}, Acts, {"tools": [look_up]}),
        "judge": (TEXTS, {**asks, "show_gold": True}, ToolEnv, {}),
        "versus_reference": (TEXTS, asks, ToolEnv, {}),
    }
    found: dict[tuple[str, str], Callable[[], World]] = {
        (name, "its tasks"): functools.partial(world_of, rows, name, args, env, **given)
        for name, (rows, args, env, given) in tried.items()
        if name in VERIFIERS
    }
    for env in ENVIRONMENTS:
        try:
            make_env = environment_factory(env)
            verifier = verifier_of(next(iter(make_env().tasks("train", 0))))
        except (ConfigError, NotImplementedError) as problem:  # its tasks are the user's, or there is no sandbox
            print(f"environment {env} left out: {problem}")
        else:
            found[verifier, env] = functools.partial(_world, make_env, verifier, {})
    return found


def verifier_of(task: Task) -> str:
    if "final_state" in task.data:
        return "state"
    return "code" if "tests" in task.data else "strict_match"


def pooled(reports: Sequence[AuditReport]) -> AuditReport:
    """All verdicts together, each task's under a name of its own."""
    numbered = list(enumerate(reports))
    verdicts = [replace(v, task_id=f"{i}/{v.task_id}") for i, one in numbered for v in one.verdicts]
    return AuditReport(tuple(verdicts), {f"{i}/{t}": why for i, one in numbered for t, why in one.untested.items()})


def tell(name: str, where: str, report: AuditReport, seconds: float) -> None:
    rates = f"{report.false_accept:8.2%} {report.false_reject:8.2%}"
    print(f"{name:<18} {where:<18} {len(report.verdicts):>6} {rates} {seconds:7.1f}", flush=True)
    wrong = [v for v in report.verdicts if v.attack.wanted == ("refused" if v.accepted else "accepted")]
    for v in wrong[:3]:
        said = " | ".join(v.attack.turns) or v.attack.text
        was = "accepted" if v.accepted else "refused"
        print(f"    {v.task_id}: {v.attack.name} {was}: {said!r:.150} {v.reason:.80}")
    for task, why in list(report.untested.items())[:3]:
        print(f"    {task}: not tried, or not in all ways: {why:.200}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} tasks each instead of up to {FULL}")
    parser.add_argument("--only", default="", help="comma-separated verifiers or environments")
    args = parser.parse_args()
    only = set(filter(None, args.only.split(",")))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(describe_machine())
    print(f"\n{'verifier':<18} {'where':<18} {'tried':>6} {'accepted':>8} {'refused':>8} {'seconds':>7}")
    reports: dict[str, list[AuditReport]] = {}
    try:
        for (name, where), make in subjects(f"http://127.0.0.1:{server.server_port}/v1").items():
            if only and not {name, where} & only:
                continue
            started, world = time.perf_counter(), make()
            tasks = list(islice(world.tasks("train", 0), QUICK if args.quick else FULL))
            report = asyncio.run(audit(world, tasks))
            tell(name, where, report, time.perf_counter() - started)
            reports.setdefault(name, []).append(report)
    except ConfigError as problem:
        return cannot_run(str(problem))
    missing = [name for name in sorted(VERIFIERS) if not only and name not in reports and name not in LEFT_OUT]
    for name, why in LEFT_OUT.items():
        print(f"verifier {name} left out: {why}")
    if missing:
        print(f"no tasks to try these on: {', '.join(missing)}")
    every, by_verifier = pooled([r for each in reports.values() for r in each]), [pooled(r) for r in reports.values()]
    figures = {
        "false_accept": Figure(every.false_accept, 0.005, "lower"),
        "false_reject": Figure(every.false_reject, 0.01, "lower"),
        "worst_false_accept": Figure(max(r.false_accept for r in by_verifier), 0.005, "lower"),
        "worst_false_reject": Figure(max(r.false_reject for r in by_verifier), 0.01, "lower"),
        "verifiers": Figure(float(len(by_verifier))),
        "not_tried": Figure(float(len(missing)), 0, "lower"),
        "attacks": Figure(float(len(every.verdicts))),
    }
    return finish("audit", args.quick, figures)


if __name__ == "__main__":
    sys.exit(main())
