"""Shell: work on files with `bash` in a sandbox that lasts the episode; judged by the files left behind."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import tarfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from upswing.envs.base import AssistantMessage, Observation
from upswing.envs.code import Sandboxed, shown
from upswing.envs.tools import tool
from upswing.errors import EnvironmentBroken
from upswing.trajectory.types import Message, Task
from upswing.verify.sandbox import SandboxLimits, SandboxResult, Workspace

_LIMITS = SandboxLimits(wall_s=10.0, cpu_s=5.0, memory_mb=256, output_bytes=20_000)
_LOOK = ["find", ".", "-mindepth", "1", "(", "!", "-type", "d", ")", "-printf", r"%y %m %P\0%l\0"]
_MOST_FILES, _MOST_CHARS = 200, 4000
"""What of a change is kept in the state: at most so many paths, and of longer files only a fingerprint."""
_WORDS = ("amber", "birch", "coral", "delta", "ember", "flint", "grove", "heron", "inlet", "jetty", "knoll", "lotus")
_NAMES = ("ada", "ben", "chloe", "dev")
_FOLDERS = ("inbox", "notes", "photos", "reports", "drafts", "import")


@dataclass(kw_only=True)
class _Job:
    """A task before it is one. `changed`: what becomes of a path: {text, executable}, {link}, or None for gone."""

    ask: str
    files: dict[str, Any]
    """Texts by path; of an archive, {name: text}."""
    command: str
    """What the expert runs."""
    changed: dict[str, Any] = field(default_factory=dict)
    answer: str = ""
    setup: str = ""
    """Run before the episode, for what isn't a plain file."""


class Shell(Sandboxed):
    """One tool, `bash(command)`. Tasks: rename, move, count in logs, edit a configuration, add up a column, set a
    link, fix permissions, take a file out of an archive, sort and clean lists.

    The final state's `changed` says what became of the files since the start, for the verifier `state`: nothing else
    may change. Options: `expert_noise`, the chance that the expert first reads a file that isn't there;
    `unsafe_local`, run commands without isolation.
    """

    name = "shell"
    max_turns = 8
    _place: Workspace | None = None
    _found: Mapping[str, Any] = {}

    @tool()
    async def bash(self, command: str) -> str:
        """Run a bash command in the working directory, for at most 10 seconds; -> what it prints. Files stay for
        the next command, variables and `cd` don't."""
        return shown(await self._execute(["bash", "-c", command]))

    def draw(self, rng: random.Random) -> Task:
        seed = rng.randrange(10**9)
        form = rng.choice(_JOBS)
        job, kind = form(random.Random(f"shell {seed}")), form.__name__[1:]
        ending = " Give only the number." if job.answer else " Change nothing else, then say done."
        return self.make_task(
            f"{seed}-{kind}",
            job.ask + ending,
            gold=(job.answer,) if job.answer else (),
            kind=kind,
            files=job.files,
            setup=job.setup,
            command=job.command,
            start_state={"changed": {}, **({"answer": ""} if job.answer else {})},
            final_state={"changed": job.changed, **({"answer": job.answer} if job.answer else {})},
        )

    async def reset(self, task: Task, seed: int) -> Observation:
        files = task.data["files"].items()
        given = {path: _packed(text) if isinstance(text, Mapping) else text.encode() for path, text in files}
        self._held = AsyncExitStack()
        self._place = await self._held.enter_async_context(self._sandbox.workspace(given))
        if task.data["setup"]:
            shown(await self._execute(["bash", "-c", task.data["setup"]]))
        self._start, self._found = await self._look(), {}
        if "/" in self._start:
            raise EnvironmentBroken(f"the files can't be read at the start: {self._start}")
        return await super().reset(task, seed)

    async def step(self, message: AssistantMessage) -> Observation:
        seen = await super().step(message)
        if seen.done:
            now = await self._look()
            paths = sorted(path for path in {*now, *self._start} if now.get(path) != self._start.get(path))
            self._found = {"changed": {path: now.get(path) for path in paths[:_MOST_FILES]}}
        return seen

    def final(self) -> Mapping[str, Any]:
        return self._found

    async def close(self) -> None:
        if self._place is not None:
            await self._held.aclose()

    async def _execute(self, argv: list[str]) -> SandboxResult:
        assert self._place is not None
        return await self._place.run(argv, limits=_LIMITS)

    async def _look(self) -> dict[str, Any]:
        """What is at every path: {text, executable}, {link} or {other}; a tree that can't be read is one odd path."""
        assert self._place is not None
        result = await self._execute(_LOOK)
        if result.killed or result.returncode:
            return {"/": {"other": f"unreadable: {result.killed or result.stderr[-200:]!r}"}}
        files, found = await asyncio.to_thread(self._place.files), dict[str, Any]()
        texts = result.stdout.decode("utf-8", "replace").split("\0")
        for what, target in zip(texts[:-1:2], texts[1::2], strict=True):
            kind, mode, path = what.split(" ", 2)
            if kind == "l":
                found[path] = {"link": target}
            elif kind == "f" and path in files:
                found[path] = {"text": _text(files[path]), "executable": bool(int(mode, 8) & 0o100)}
            else:
                found[path] = {"other": kind}
        return found

    def speak(self, task: Task, messages: tuple[Message, ...], heard: list[str], careless: bool) -> str:
        """Looks around, runs one command and answers."""
        plan = [*(["cat README"] if careless else []), "find . -type f | head -50", task.data["command"]]
        if len(heard) < len(plan):
            return self.call("bash", command=plan[len(heard)])
        return self.say(heard[-1] if task.gold else "done")


def _text(content: bytes) -> str:
    """A file as the state tells it: without line breaks at its end; a fingerprint of what is long or no text."""
    text = content.decode("utf-8", "replace")
    if len(text) > _MOST_CHARS or "\0" in text or "\ufffd" in text:
        return f"{len(content)} bytes, {hashlib.blake2s(content).hexdigest()}"
    return text.rstrip("\n")


def _packed(members: Mapping[str, str]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return packed.getvalue()


# -- the kinds of tasks -----------------------------------------------------------------------------------------------


def _plain(text: str) -> dict[str, Any]:
    return {"text": text.rstrip("\n"), "executable": False}


def _notes(rng: random.Random, names: list[str]) -> dict[str, str]:
    return {name: f"{rng.choice(_WORDS)} {rng.randint(100, 999)}\n" for name in names}


def _rename(rng: random.Random) -> _Job:
    folder, (old, new, other) = rng.choice(_FOLDERS), rng.sample(("txt", "md", "log", "bak", "csv", "dat"), 3)
    names = [f"{folder}/{word}" for word in rng.sample(_WORDS, 6)]
    some = rng.randint(2, 4)
    files = _notes(rng, [f"{name}.{old if i < some else other}" for i, name in enumerate(names)])
    gone = {f"{name}.{old}": None for name in names[:some]}
    return _Job(
        ask=f"Rename every .{old} file in {folder} so that it ends in .{new} instead.",
        files=files,
        command=f'for f in {folder}/*.{old}; do mv "$f" "${{f%.{old}}}.{new}"; done',
        changed={**gone, **{f"{name}.{new}": _plain(files[f"{name}.{old}"]) for name in names[:some]}},
    )


def _move(rng: random.Random) -> _Job:
    (source, target), word = rng.sample(_FOLDERS, 2), rng.choice(_WORDS)
    numbers = [str(n) for n in rng.sample(range(10, 99), 3)]
    mine = [f"{word}-{number}.txt" for number in numbers]
    others = [f"{other}-{numbers[0]}.txt" for other in _WORDS if other != word]
    files = _notes(rng, [f"{source}/{name}" for name in [*mine, *others][:7]])
    moved = {f"{target}/{name}": _plain(files[f"{source}/{name}"]) for name in mine}
    return _Job(
        ask=f"Move every file in {source} whose name starts with {word} into a new folder {target}.",
        files=files,
        command=f"mkdir -p {target} && mv {source}/{word}* {target}/",
        changed={**{f"{source}/{name}": None for name in mine}, **moved},
    )


def _count(rng: random.Random) -> _Job:
    name, status = rng.choice(_NAMES), rng.choice(("404", "500"))
    lines = [
        f"9:{rng.randint(10, 59)} user={rng.choice(_NAMES)} status={rng.choice((404, 500, 200))} ms={rng.randint(1, 9)}"
        for _ in range(rng.randint(40, 120))
    ]
    files = {f"logs/{day}.log": "\n".join(lines[i::3]) + "\n" for i, day in enumerate(("mon", "tue", "wed"))}
    found = sum(f"user={name} status={status} " in line for line in lines)
    if found < 2:
        return _count(rng)
    return _Job(
        ask=f"In all the files in logs, how many requests of the user {name} got the status {status}?",
        files=files,
        command=f"cat logs/*.log | grep -c 'user={name} status={status} '",
        answer=str(found),
    )


def _config(rng: random.Random) -> _Job:
    parts, keys = rng.sample(("server", "client", "cache", "queue"), 3), ("host", "port", "limit")
    values = {(part, key): str(rng.randint(1000, 9999)) for part in parts for key in keys}
    part, key, value = rng.choice(parts), rng.choice(keys), str(rng.randint(10, 999))

    def written() -> str:
        return "\n".join(f"[{p}]\n" + "".join(f"{k} = {values[p, k]}\n" for k in keys) for p in parts)

    before = written()
    values[part, key] = value
    return _Job(
        ask=f"In app/settings.ini, set {key} of the section [{part}] to {value}.",
        files={"app/settings.ini": before},
        command=rf"sed -i '/^\[{part}\]/,/^$/ s/^{key} = .*/{key} = {value}/' app/settings.ini",
        changed={"app/settings.ini": _plain(written())},
    )


def _total(rng: random.Random) -> _Job:
    regions = ("north", "south", "east", "west")
    region = rng.choice(regions)
    rows = [(i, rng.choice(regions), rng.randint(5, 500)) for i in range(1, rng.randint(20, 60))]
    total = sum(amount for _, where, amount in rows if where == region)
    return _Job(
        ask=f"Add up the amounts of the rows of sales.csv whose region is {region}. Write only the sum to total.txt.",
        files={"sales.csv": "id,region,amount\n" + "".join(f"{i},{where},{amount}\n" for i, where, amount in rows)},
        command=f"t=0; for n in $(grep ',{region},' sales.csv | cut -d, -f3); do t=$((t+n)); done; echo $t > total.txt",
        changed={"total.txt": _plain(str(total))},
    )


def _link(rng: random.Random) -> _Job:
    versions = sorted({f"{rng.randint(1, 4)}.{rng.randint(0, 9)}" for _ in range(5)})
    old, new = rng.sample(versions, 2) if len(versions) > 1 else (versions[0], "9.9")
    files = {f"releases/{version}/app.txt": f"version {version}\n" for version in {*versions, new}}
    return _Job(
        ask=f"current is a symbolic link to releases/{old}. Point it to releases/{new} instead.",
        files=files,
        command=f"ln -sfn releases/{new} current",
        changed={"current": {"link": f"releases/{new}"}},
        setup=f"ln -s releases/{old} current",
    )


def _permissions(rng: random.Random) -> _Job:
    names = rng.sample(_WORDS, 6)
    files = _notes(rng, [f"bin/{name}.{'sh' if i < 3 else 'txt'}" for i, name in enumerate(names)])
    files = {path: f"echo {text}" if path.endswith(".sh") else text for path, text in files.items()}
    ready = f"bin/{names[0]}.sh"
    scripts = [f"bin/{name}.sh" for name in names[1:3]]
    return _Job(
        ask="Make every .sh file in bin executable for its owner.",
        files=files,
        command="chmod u+x bin/*.sh",
        changed={path: {**_plain(files[path]), "executable": True} for path in scripts},
        setup=f"chmod u+x {ready}",
    )


def _extract(rng: random.Random) -> _Job:
    members = _notes(rng, [f"{word}.txt" for word in rng.sample(_WORDS, 5)])
    wanted, target = rng.choice(list(members)), rng.choice(_FOLDERS)
    return _Job(
        ask=f"Take only {wanted} out of the archive backup.tar and put it into a new folder {target}.",
        files={"backup.tar": members, **_notes(rng, ["readme.txt"])},
        command=f"mkdir -p {target} && tar -xf backup.tar -C {target} {wanted}",
        changed={f"{target}/{wanted}": _plain(members[wanted])},
    )


def _sort(rng: random.Random) -> _Job:
    folder, words = rng.choice(_FOLDERS), rng.choices(_WORDS, k=rng.randint(12, 25))
    return _Job(
        ask=f"Write the different words in {folder}/words.txt to sorted.txt, one a line, in alphabetical order.",
        files={f"{folder}/words.txt": "\n".join(words) + "\n"},
        command=f"sort -u {folder}/words.txt > sorted.txt",
        changed={"sorted.txt": _plain("\n".join(sorted(set(words))))},
    )


def _clean(rng: random.Random) -> _Job:
    folder, names = rng.choice(_FOLDERS), rng.sample(_WORDS, 7)
    files = _notes(rng, [f"{folder}/{name}.txt" for name in names])
    empty = [f"{folder}/{name}.txt" for name in names[: rng.randint(2, 4)]]
    return _Job(
        ask=f"Delete the empty files in {folder}.",
        files={**files, **dict.fromkeys(empty, "")},
        command=f"find {folder} -type f -empty -delete",
        changed=dict.fromkeys(empty),
    )


_JOBS: tuple[Callable[[random.Random], _Job], ...] = (
    _rename, _move, _count, _config, _total, _link, _permissions, _extract, _sort, _clean,
)  # fmt: skip
