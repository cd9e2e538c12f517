"""What the sandbox does for programs that mean no harm, and for callers that go away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from upswing.errors import ConfigError
from upswing.verify.deadline import call_with_deadline
from upswing.verify.sandbox import Sandbox, SandboxLimits, SandboxUnavailable, default_sandbox

from .harness import next_check, survivors


@pytest.fixture(scope="module", params=["isolated", "unsafe_local"])
def either(request: pytest.FixtureRequest) -> Sandbox:
    return Sandbox(unsafe_local=request.param == "unsafe_local")


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return default_sandbox()


SHORT = SandboxLimits(wall_s=0.5)


@pytest.mark.parametrize(
    ("code", "returncode", "stdout", "stderr"),
    [
        ("print('é'); import sys; print(1, file=sys.stderr)", 0, "é\n", "1\n"),
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('sorry')", 1, "", "sorry\n"),
        ("raise SystemExit", 0, "", ""),
        ("print(input()[::-1]); input()", 1, "olleh\n", "EOFError"),
        ("def f():\n    return 1 / 0\nf()", 1, "", 'File "main.py", line 2, in f\n    return 1 / 0'),
        ("print(", 1, "", "SyntaxError"),
        ("print(1)\0", 1, "", "null bytes"),
        (
            "import os; print(__name__, os.getcwd() == os.environ['HOME'], sorted(globals())[:2])",
            0,
            "__main__ True",
            "",
        ),
        ("import atexit; atexit.register(print, 'bye'); print('hi', end='')", 0, "hibye\n", ""),
        (
            "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('t'))).start()",
            0,
            "t\n",
            "",
        ),
        ("class A:\n    def __del__(self): print('gone')\na = A()", 0, "gone\n", ""),
        ("import os; os.kill(os.getpid(), 15)", -15, "", ""),
        ("import helper, pathlib; print(helper.x, pathlib.Path('d/t').read_text())", 0, "7 text\n", ""),
        ("from multiprocessing import Pool\nwith Pool(2) as p: print(p.map(abs, [-1, -2]))", 0, "[1, 2]\n", ""),
        (
            "import asyncio, tempfile, sqlite3\nasyncio.run(asyncio.sleep(0)); tempfile.TemporaryFile(); print(1)",
            0,
            "1\n",
            "",
        ),
        ("import subprocess; print(subprocess.check_output(['sort'], input=b'b\\na\\n'))", 0, r"b'a\nb\n'" + "\n", ""),
        ("def f(n): return f(n + 1)\nf(0)", 1, "", "RecursionError"),
    ],
)
async def test_python(either: Sandbox, code: str, returncode: int, stdout: str, stderr: str):
    files = {"helper.py": b"x = 7", "d/t": b"text"}
    result = await either.run_python(code, files=files, stdin=b"hello\n")
    assert (result.returncode, result.killed) == (returncode, None), result.stderr
    assert result.stdout.decode() == stdout if stdout.endswith("\n") else stdout in result.stdout.decode()
    assert stderr in result.stderr.decode() and (stderr or not result.stderr)


@pytest.mark.parametrize(
    ("argv", "returncode", "stdout"),
    [
        (["cat", "-", "d/t"], 0, b"in" * 100_000 + b"text"),
        (["bash", "-c", "echo $0 $HOME | wc -w; exit 4"], 4, b"2\n"),
        (["python3", "-c", "print(6 * 7)"], 0, b"42\n"),
        (["no-such-program"], 127, b""),
        (["d/t"], 127, b""),
        (["true", "\udcff"], 0, b""),
    ],
)
async def test_commands(either: Sandbox, argv: list[str], returncode: int, stdout: bytes):
    result = await either.run(argv, files={"d/t": b"text"}, stdin=b"in" * 100_000)
    assert (result.returncode, result.killed, result.stdout) == (returncode, None, stdout), result.stderr


@pytest.mark.parametrize(
    ("code", "limits", "killed"),
    [
        ("import time; print('before', flush=True); time.sleep(60)", {"wall_s": 1.0}, "wall"),
        ("print('before', flush=True)\nwhile True: pass", {"cpu_s": 0.2}, "cpu"),
        ("print('before', flush=True)\nwhile True: print('x' * 100)", {"output_bytes": 10_000}, "output"),
        (
            "import os, time; print('before', flush=True)\n"
            "for _ in range(9): os.fork() or (a := b'x' * (30 << 20), time.sleep(60))\ntime.sleep(60)",
            {"memory_mb": 128, "wall_s": 60.0},
            "memory",
        ),
    ],
)
async def test_a_limit_keeps_what_came_before(either: Sandbox, code: str, limits: dict[str, Any], killed: str):
    result = await either.run_python(code, limits=SandboxLimits(**limits))
    assert (result.returncode, result.killed) == (None, killed)
    assert result.stdout.startswith(b"before\n") and result.duration_s < 9
    assert len(result.stdout) <= SandboxLimits(**limits).output_bytes and survivors(either) == []


async def test_a_workspace_keeps_files_and_nothing_else(either: Sandbox, tmp_path: Path):
    (tmp_path / "host").write_text("host")
    async with either.workspace({"a.txt": b"1", "d/b.txt": b"2"}) as place:
        script = f"""echo new > c; rm a.txt; ln -s {tmp_path}/host link; ln -s / root; mkfifo pipe; ln -s c inner
                     (trap '' HUP TERM; while :; do echo late >> c; sleep 0.05; done) & sleep 0.1"""
        assert (await place.run(["bash", "-c", script])).returncode == 0
        assert (await place.run(["sleep", "9"], limits=SHORT)).killed == "wall"
        size = place.files()["c"]
        await asyncio.sleep(0.2)
        assert place.files() == {"c": size, "d/b.txt": b"2"}
        assert place.read("c") == size and place.read("d/../c") is None
        for name in ("link", "root/etc/passwd", "inner", "pipe", "d", "none", "/etc/passwd", "../../etc/passwd", "\0"):
            assert place.read(name) is None
        assert (await place.run_python("print(open('c').read()[:3])")).stdout == b"new\n"
    with pytest.raises(SandboxUnavailable, match="closed"):
        place.files()
    assert survivors(either) == []


async def test_a_workspace_whose_processes_were_killed_says_so(sandbox: Sandbox):
    async with sandbox.workspace({}) as place:
        place.kill()
        with pytest.raises(SandboxUnavailable, match="gone"):
            place.files()
        with pytest.raises(SandboxUnavailable, match="gone"):
            await place.run(["true"])


async def test_files_of_any_shape_come_back_within_bounds(sandbox: Sandbox):
    code = """
import os
with open('big', 'wb') as file: file.truncate(60 << 20)
with open('big2', 'wb') as file: file.truncate(60 << 20)
open(b'\\xff\\n', 'w').close()
os.mkdir('shut'); open('shut/x', 'w').write('x'); os.chmod('shut/x', 0); os.chmod('shut', 0)
for _ in range(1200): os.mkdir('n' * 9); os.chdir('n' * 9)
open('deep', 'w')
"""
    async with sandbox.workspace({}) as place:
        assert (await place.run_python(code)).returncode == 0
        found = place.files()
        assert sum(map(len, found.values())) <= 64 << 20 and found["shut/x"] == b"x" and found["\udcff\n"] == b""
        assert {"big", "big2"} & set(found) in ({"big"}, {"big2"})


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", "", ".", "a\0b"])
async def test_files_lie_inside(sandbox: Sandbox, name: str):
    with pytest.raises(ConfigError, match="inside the workspace"):
        await sandbox.run(["true"], files={name: b""})


@pytest.mark.parametrize("limits", [{"wall_s": 0}, {"cpu_s": float("inf")}])
def test_limits_are_numbers_above_0(limits: dict[str, Any]):
    with pytest.raises(ConfigError, match="allowed: a number above 0"):
        SandboxLimits(**limits)


@pytest.mark.parametrize("name", ["memory_mb", "processes", "output_bytes", "disk_mb"])
def test_counts_are_whole(name: str):
    for value in (-1, True, 64.5, 1e6):
        with pytest.raises(ConfigError, match="allowed: a whole number above 0"):
            SandboxLimits(**{name: value})


async def test_files_that_do_not_fit_are_no_result(sandbox: Sandbox):
    with pytest.raises(SandboxUnavailable, match="No space left"):
        await sandbox.run(["true"], files={"x": bytes(3 << 20)}, limits=SandboxLimits(disk_mb=2))
    assert await next_check(sandbox) == []


async def test_children_that_hold_the_pipes_keep_nobody_waiting(either: Sandbox):
    """SBX-06: the partial output is kept, no process is left, no descriptor leaks."""
    code = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('done', flush=True); time.sleep({})"
    open_before = 0
    for n in range(13):
        sleeps = n % 12 == 0
        limits = SandboxLimits(wall_s=1.0 if sleeps else 30.0)
        result = await either.run_python(code.format(60 * sleeps), limits=limits)
        assert result.stdout == b"done\n" and result.killed == ("wall" if sleeps else None)
        assert result.duration_s < 10
        open_before = open_before or len(os.listdir("/proc/self/fd"))
    assert survivors(either) == []
    assert len(os.listdir("/proc/self/fd")) <= open_before


async def test_programs_at_the_same_time_do_not_meet(sandbox: Sandbox):
    code = """
import os, socket, time
s = socket.socket(socket.AF_UNIX); s.bind('\\0meeting'); s.listen(); s.settimeout(0.5)
open('/tmp/here', 'x').close(); open('/dev/shm/here', 'x').close()
try: socket.socket(socket.AF_UNIX).connect('\\0other')
except OSError: pass
print(os.listdir('/tmp'), [p for p in os.listdir('/proc') if p.isdigit()] == [str(os.getpid())])
time.sleep(0.2)"""
    results = await asyncio.gather(*[sandbox.run_python(code) for _ in range(6)])
    assert {(one.returncode, one.stdout) for one in results} == {(0, b"['here'] True\n")}


async def test_a_cancelled_run_is_ended_at_once(either: Sandbox):
    for wait_s in (0.0, 0.02, 0.2):
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(wait_s):
                await either.run_python("import time\nwhile True: time.sleep(1)", limits=SandboxLimits(wall_s=30))
        assert time.monotonic() - started < 10
    end = time.monotonic() + 10
    while any(thread.name.startswith("sandbox") and _busy(either) for thread in threading.enumerate()):
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    assert survivors(either) == []


def _busy(sandbox: Sandbox) -> bool:
    return sandbox._threads._work_queue.qsize() > 0


async def _fill(sandbox: Sandbox, sleep_s: float) -> list[asyncio.Task[Any]]:
    """Something to do for every thread."""
    code = f"import time; time.sleep({sleep_s})"
    busy = [asyncio.create_task(sandbox.run_python(code)) for _ in range(sandbox._threads._max_workers)]
    await asyncio.sleep(0)  # they are in line now
    return busy


async def test_waiting_for_a_thread_takes_nothing_off_a_deadline(sandbox: Sandbox):
    async def check() -> bytes:
        async with sandbox.workspace({"x": b"1"}) as place:
            return (await place.run(["cat", "x"])).stdout

    busy = await _fill(sandbox, 3.0)
    assert await call_with_deadline(check, {}, timeout_s=2.5) == b"1"
    await asyncio.gather(*busy)


async def test_a_workspace_is_closed_however_often_its_user_is_cancelled(sandbox: Sandbox):
    opened, before = asyncio.Event(), set(os.listdir("/proc/self/fd"))

    async def use() -> None:
        async with sandbox.workspace({}):
            opened.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(use())
    await opened.wait()
    busy = await _fill(sandbox, 0.5)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.05)
    assert task.cancelled()
    await asyncio.gather(*busy)
    end = time.monotonic() + 10
    while set(os.listdir("/proc/self/fd")) - before or survivors(sandbox):
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("start", "least"),
    [
        ("[os.fork() or spin() for _ in range(9)]", 7),
        ("[threading.Thread(target=hashing, daemon=True).start() for _ in range(9)]", 7),
        ("threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); os.fork() or time.sleep(9)", 0),
    ],
)
async def test_a_program_of_many_weighs_as_one(either: Sandbox, start: str, least: int):
    """Each of n that want to run at once has about an n-th of the weight; a step of `nice` is a factor of 1.25."""
    code = f"""
import hashlib, os, threading, time
block = bytes(1 << 22)
def spin():
    while True: pass
def hashing():
    while True: hashlib.sha256(block)
{start}
def nicest():
    found = []
    for p in filter(str.isdigit, os.listdir('/proc')):
        try:
            if os.getpgid(int(p)) == os.getpgid(0):
                found += [os.getpriority(os.PRIO_PROCESS, int(one)) for one in os.listdir(f'/proc/{{p}}/task')]
        except (ProcessLookupError, FileNotFoundError): pass  # it ended meanwhile
    return max(found)
end = time.monotonic() + ({least} and 30 or 0.5)
while nicest() < ({least} or 19) and time.monotonic() < end: time.sleep(0.05 * bool({least}))
print(nicest(), flush=True)
os._exit(0)"""
    result = await either.run_python(code, limits=SandboxLimits(cpu_s=60, wall_s=60))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert int(result.stdout) >= least if least else int(result.stdout) == own


def test_one_sandbox_serves_several_loops_and_threads(sandbox: Sandbox):
    got: list[bytes] = []

    def work(n: int) -> None:
        async def run() -> None:
            for result in await asyncio.gather(*[sandbox.run_python(f"print({n})") for _ in range(5)]):
                got.append(result.stdout)

        asyncio.run(run())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(f"{n}\n".encode() for n in range(4) for _ in range(5))


async def test_a_launcher_that_died_is_replaced():
    sandbox = Sandbox(workers=1)
    for _ in range(2):
        os.kill(sandbox._launcher._process.pid, signal.SIGKILL)
        assert (await sandbox.run_python("print(1)")).stdout == b"1\n"
    await sandbox.close()
    assert sandbox._launcher._process.returncode is not None


CLIENT = """
import asyncio, os, sys, time
from upswing.verify.sandbox import Sandbox
async def main():
    sandbox = Sandbox(unsafe_local={local})
    task = asyncio.create_task(sandbox.run(["bash", "-c", "(trap '' TERM HUP; sleep 61.5) & sleep 61.5"]))
    await asyncio.sleep(0.5)
    print(sandbox._launcher._process.pid, flush=True)
    await task
asyncio.run(main())
"""


@pytest.mark.parametrize("local", [False, True])
def test_nothing_outlives_the_client(local: bool):
    """Killed without a chance to tidy up, it leaves no launcher, no supervisor and no program."""
    with subprocess.Popen([sys.executable, "-c", CLIENT.format(local=local)], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        launcher = int(client.stdout.readline())
        client.kill()
    end = time.monotonic() + 20
    while os.path.exists(f"/proc/{launcher}") or _running("sleep\x0061.5"):
        assert time.monotonic() < end, (launcher, _running("sleep\x0061.5"))
        time.sleep(0.02)


def _running(command: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if (
                path.read_text().startswith(command)
                and "Z" not in (path.parent / "stat").read_text().rpartition(")")[2]
            ):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def run_script(script: str, *command: str) -> Any:
    code = [*(command or (sys.executable,)), "-c", textwrap.dedent(script)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_without_isolation_it_refuses_and_says_what_to_do():
    told = run_script("""
        import asyncio, json
        from upswing.verify.sandbox import Sandbox, SandboxUnavailable
        from upswing.verify.sandbox.jail import linux, seccomp
        linux.drop_privileges(seccomp.program())
        try: Sandbox()
        except SandboxUnavailable as error: told = str(error)
        local = Sandbox(unsafe_local=True)
        print(json.dumps([told, asyncio.run(local.run_python("print(1)")).stdout.decode()]))""")
    assert "there is no isolation for programs here" in told[0] and "Operation not permitted" in told[0]
    assert "docs/sandbox.md" in told[0] and "--unsafe-local" in told[0] and told[1] == "1\n"


async def test_unsafe_local_scrubs_the_environment_and_tidies_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    sandbox = Sandbox(unsafe_local=True, workers=1)
    result = await sandbox.run_python("import os; print(os.environ.get('SECRET_TOKEN'), os.getcwd())")
    assert result.stdout.startswith(b"None ")
    await sandbox.close()
    end = time.monotonic() + 20
    while (folder := Path(result.stdout.decode().split()[1]).parent).exists():
        assert time.monotonic() < end and "upswing-" in str(folder)
        await asyncio.sleep(0.02)


async def test_the_shared_one_is_shared():
    assert default_sandbox() is default_sandbox() is not default_sandbox(unsafe_local=True)
