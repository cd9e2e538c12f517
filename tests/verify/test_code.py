"""`code`: right programs pass as with the public graders, wrong and hostile ones never; a fault of ours is no score."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import time
from functools import cache
from typing import Any

import pytest

from upswing.errors import ConfigError
from upswing.trajectory.types import Score
from upswing.verify.code import Code, read_code
from upswing.verify.code_driver import READY, encode
from upswing.verify.code_tests import compare, plan, same_output, split_asserts
from upswing.verify.functions import verifier_from
from upswing.verify.sandbox import SandboxResult, SandboxUnavailable


def judged(rows: list[tuple[str, dict[str, Any], float | None]], **options: Any) -> list[Score]:
    """Judges all rows of (program, data, wanted) at once."""

    async def all_() -> list[Score]:
        check = Code(**options)
        return await asyncio.gather(*(check(program, data) for program, data, _ in rows))

    return asyncio.run(all_())


def check(rows: list[tuple[str, dict[str, Any], float | None]], **options: Any) -> list[Score]:
    scores = judged(rows, **options)
    wrong = [(row[0], row[2], score) for row, score in zip(rows, scores, strict=True) if score.value != row[2]]
    assert not wrong
    return scores


def calls(*pairs: tuple[Any, Any], name: str = "f") -> dict[str, Any]:
    return {"tests": [{"call": name, "args": [given], "expected": wanted} for given, wanted in pairs]}


SQUARE = calls((3, 9), (-4, 16))
RIGHT = "def f(x):\n    return x * x"
ECHO = {"tests": [{"input": "3 4\n", "output": "7\n"}, {"input": "10 -2\n", "output": "8\n"}]}
ADD = "a, b = map(int, input().split())\nprint(a + b)"
MAIN = """
def main():
    a, b = map(int, input().split())
    print(a + b)
    exit(0)
if __name__ == "__main__":
    main()
"""
LEFT_OPEN = """
import sys
first = open(1, "w", closefd=False)
first.write(str(sum(map(int, input().split()))))
class Last:
    def __del__(self):
        print()
last = Last()
"""
AT_EXIT = """
import atexit, sys
out = []
atexit.register(lambda: print(*out))
out.append(sum(map(int, sys.stdin.read().split())))
"""
THREAD = """
import threading, time
def main():
    time.sleep(0.05)
    print(sum(map(int, input().split())))
threading.Thread(target=main).start()
"""


def test_programs_are_right_or_wrong():
    check(
        [
            (RIGHT, SQUARE, 1.0),
            (f"Here it is:\n```python\n{RIGHT}\n```\nDone.", SQUARE, 1.0),
            (f"```python\nfalse start\n```\n```py\n{RIGHT}\n```", SQUARE, 1.0),
            (f"```python\n{RIGHT}\n```\n```\nf(3) is 9\n```", SQUARE, 1.0),
            (f"<think>```python\n{RIGHT}\n```</think>I can't.", SQUARE, 0.0),
            (f"```python\n{RIGHT}", SQUARE, 0.0),
            ("def f(x):\n    return x + 6", SQUARE, 0.0),
            ("def g(x):\n    return x * x", SQUARE, 0.0),
            ("def f(x) return x * x", SQUARE, 0.0),
            ("", SQUARE, 0.0),
            ("print('hello')\nprint(9)\ndef f(x):\n    print(16)\n    return x * x", SQUARE, 1.0),
            ("def f(x):\n    return str(x * x)", SQUARE, 0.0),
            ("def f(a, b): return a - b", {"tests": [{"call": "f", "kwargs": {"b": 1, "a": 3}, "expected": 2}]}, 1.0),
            ("def f(x):\n    return area(x) + y", {**calls((3, 10)), "setup": "y = 1\ndef area(x): return x * x"}, 1.0),
            ("if __name__ == '__main__':\n    print(1 / 0)\n" + RIGHT, SQUARE, 1.0),
            ("n = 0\ndef f(x):\n    global n\n    n += 1\n    return n", calls((1, 1), (1, 1)), 1.0),
            ("import os\nif os.fork():\n    os.wait()\n" + RIGHT, SQUARE, 1.0),
            ("n = 0\ndef f(x):\n    global n\n    n += 1\n    return n", calls((1, 1), (1, 2)), 0.0),
        ]
    )  # fmt: skip


def test_values_are_compared_as_python_does():
    """What a program returned, coded and read again, against what an assert says."""
    same = ("(1, [2, (3,)])", "{1, 'a'}", "{1: [2], (3, 4): {'x': None}}", "b'\\xff'", "'\\ud800\\n'", "1e300", "-0.0")
    same += ("frozenset({1})", "1j", "[]", "''", "None", "10**5000 + 7", "-7", "float('inf')")
    rows = [(one, one, True) for one in same]
    rows += [("True", "1", True), ("1.0", "1", True)]  # Python's own ==, as with the public graders
    rows += [("collections.Counter('aab')", "{'a': 2, 'b': 1}", True)]
    rows += [("collections.namedtuple('P', 'x y')(1, 2)", "(1, 2)", True)]
    rows += [(a, b, False) for a, b in (("(1, 2)", "[1, 2]"), ("[1, 2]", "(1, 2)"), ("{1}", "[1]"), ("'1'", "1"))]
    rows += [(a, b, False) for a, b in (("b'a'", "'a'"), ("0.1 + 0.2", "0.3"), ("float('nan')", "float('nan')"))]
    for source, wanted, right in rows:
        out = json.dumps([encode(eval(source, {"collections": collections}))])
        assert (compare(split_asserts(f"assert f() == {wanted}"), [("", out)], 0.0) == [""]) is right, (source, wanted)
    for odd in ((x for x in [1]), object(), range(3), len):
        with pytest.raises(TypeError, match="no plain data"):
            encode(odd)
    value = "(10**5000, {b'a': {1.5}})"
    check([(f"def f():\n    return {value}", {"tests": [f"assert f() == {value}"]}, 1.0)])


def test_much_may_come_back():
    """A long value or output that is right is judged; what is wanted needn't be as long."""
    count = "def f(n):\n    return [i % 7 for i in range(n)]"
    rows = [
        (count, calls((200_000, [i % 7 for i in range(200_000)])), 1.0),
        (count, {"tests": ["assert len(f(200_000)) == 200_000"]}, 1.0),
        ("def f(n):\n    return [[i / 3, 'é'] for i in range(n)]", {"tests": ["assert f(9**5)[-1][1] == 'é'"]}, 1.0),
        ("print(*range(500_000))", {"tests": [{"input": "", "output": " ".join(map(str, range(500_000)))}]}, 1.0),
        ("print(*range(500_000))", {"tests": [{"input": "", "output": "0"}]}, 0.0),
    ]
    check(rows)


def test_a_reason_is_text():
    (score,) = check([("raise ValueError('\\ud800')", SQUARE, 0.0)])
    assert score.reason.encode().endswith(b"ValueError: ?")


def test_an_error_is_not_an_empty_result():
    """An exception inside the call must not look like None or an empty text (SBX-03)."""
    fails = "def f(x):\n    raise RuntimeError('no')"
    scores = check(
        [
            *((fails, calls((4, wanted)), 0.0) for wanted in (None, "", 0, False, [])),
            ("def f(x):\n    return None", calls((4, None)), 1.0),
            ("def f(x):\n    return ''", calls((4, "")), 1.0),
            ("raise RuntimeError('no')", {"tests": [{"input": "4", "output": ""}]}, 0.0),
            ("pass", {"tests": [{"input": "4", "output": ""}]}, 1.0),
            ("import sys\nsys.exit(0)", calls((4, None)), 0.0),
            ("def f(x):\n    import os\n    os._exit(0)", calls((4, None)), 0.0),
        ]
    )
    assert "RuntimeError: no" in scores[0].reason and "test 1 of 1" in scores[0].reason


def test_printed_output_is_compared_as_livecodebench_does():
    def prints(text: str, wanted: str) -> tuple[str, dict[str, Any]]:
        return f"print({text!r}, end='')", {"tests": [{"input": "", "output": wanted}]}

    rows = [
        (ADD, ECHO, 1.0),
        ("print(7)", ECHO, 0.0),
        (ADD.replace("+", "-"), ECHO, 0.0),
        (MAIN, ECHO, 1.0),
        (ADD + "\nimport sys; sys.exit(3)", ECHO, 1.0),
        (ADD + "\nraise ValueError", ECHO, 0.0),
        (ADD + "\nimport os; os._exit(3)", ECHO, 0.0),
        (AT_EXIT, ECHO, 1.0),
        (THREAD, ECHO, 1.0),
        (LEFT_OPEN, ECHO, 1.0),
        ("import os, sys\nif os.fork():\n    os.wait()\nelse:\n    " + ADD.replace("\n", "\n    "), ECHO, 1.0),
        (ADD + "\nimport sys\nsys.stdout.close()", ECHO, 1.0),
        (ADD + "\nimport sys\nsys.stdout = None", ECHO, 1.0),
        ("print(10**5000)", {"tests": [{"input": "", "output": "1" + "0" * 5000}]}, 1.0),
        ("import sys, os\nos.write(1, b'%d' % sum(map(int, sys.stdin.buffer.readline().split())))", ECHO, 1.0),
        (*prints("a  b\n\n", "  a  b"), 1.0),
        (*prints("a b", "a  b"), 0.0),
        (*prints("1  2.50", "1 2.5"), 1.0),
        (*prints("1e3", "1000"), 1.0),
        (*prints("50000000000000000", "50000000000000001"), 0.0),
        (*prints("1 2", "1 2 3"), 0.0),
        (*prints("1\n2", "1 2"), 0.0),
        (*prints("a\n\nb", "a\nb"), 0.0),
        (*prints("", "0"), 0.0),
        (*prints("nan", "1"), 0.0),
        (*prints("Yes", "yes"), 0.0),
    ]  # fmt: skip
    check(rows)
    assert same_output("0.3333", "0.33331", 1e-4) and not same_output("0.3333", "0.3343", 1e-4)
    assert not same_output("sNaN", "1") and not same_output("1_0", "x")


def test_the_shapes_of_public_data_sets():
    humaneval = {
        "entry_point": "has_close",
        "setup": "from typing import List\n\ndef has_close(x: List[float], t: float) -> bool:\n    ''' Doc. '''\n",
        "test": "\n\nMETADATA = {\n    'author': 'jt'\n}\n\n\ndef check(candidate):\n"
        "    assert candidate([1.0, 2.0, 3.9], 0.3) == False\n    assert candidate([2.0, 2.2], 0.3) == True, 'why'\n"
        "    assert True, 'for debugging'\n    for x in range(2, 5):\n        assert candidate([0.0, x], x) == False\n"
        "    assert not candidate([], 1.0)\n    assert abs(candidate([1.0], 0.5) - 0.0) < 1e-6\n",
    }
    program = (
        "def has_close(x: List[float], t):\n    return any(abs(a - b) < t for i, a in enumerate(x) for b in x[i+1:])"
    )
    mbpp = {
        "test_list": [
            "assert set(shared((3, 4, 5, 6),(5, 7, 4, 10))) == set((4, 5))",
            "import math\nassert math.isclose(sum(shared((1, 2), (2, 3))), 2.0, rel_tol=0.001)",
        ],
        "test_setup_code": "",
    }
    shared = "def shared(a, b):\n    return tuple(set(a) & set(b))"
    apps = {"input_output": json.dumps({"fn_name": "f", "inputs": [[3], [[1, 2]]], "outputs": [[9], [[2, 1]]]})}
    apps_program = "def f(x):\n    return 9 if x == 3 else x[::-1]"
    lcb = {"input_output": {"fn_name": "f", "inputs": ["[1, 2]\n3", "[]\n0"], "outputs": ["[3, 1, 2]", "[0]"]}}
    solution = "class Solution:\n    def f(self, nums, k):\n        return (k, *nums)"
    functional = {
        "tests": json.dumps([{"input": "[1]\n2", "output": "[2, 1]", "testtype": "functional"}]),
        "fn_name": "f",
    }
    deep = "def f(n):\n    return n and 1 + f(n - 1)"
    lines = {"input_output": {"inputs": [["1", "2"], "5\n6\n"], "outputs": [["3"], "11"]}}
    check(
        [
            (program, humaneval, 1.0),
            (program.replace("<", ">"), humaneval, 0.0),
            (program.replace("abs", "complex"), humaneval, 0.0),
            (shared, mbpp, 1.0),
            (shared.replace("&", "|"), mbpp, 0.0),
            (apps_program, apps, 1.0),
            (apps_program.replace("9", "8"), apps, 0.0),
            (solution, lcb, 1.0),
            (solution.replace("class Solution:\n    def f(self, ", "if 1:\n    def f("), lcb, 1.0),
            (solution.replace("(k, *nums)", "nums"), lcb, 0.0),
            (solution, functional, 1.0),
            (solution.replace("nums, k", "nums: List[int], k: int") + " + tuple(deque())", lcb, 1.0),
            (deep, {"input_output": {"fn_name": "f", "inputs": ["9000"], "outputs": ["9000"]}}, 1.0),
            (solution, {**functional, "fn_name": None}, None),
            ("print(int(input()) + int(input()))", lines, 1.0),
            ("print(int(input()) - int(input()))", lines, 0.0),
        ]
    )


@pytest.mark.parametrize(
    ("text", "case"),
    [
        ("assert f(1) == 2", (["f(1)"], "_0 == 2")),
        ("assert f(f(1)) == 2", (["f(f(1))"], "_0 == 2")),
        ("assert (3, 4) == f(x=[1])", (["f(x=[1])"], "(3, 4) == _0")),
        ("assert f(1) == f(2) + 1", (["f(1)", "f(2)"], "_0 == _1 + 1")),
        ("assert sorted(f(1)) == sorted([2])", (["sorted(f(1))"], "_0 == sorted([2])")),
        ("assert f(1)[0].lower() == 'a'", None),
        ("assert f('A').lower() == 'a'", (["f('A').lower()"], "_0 == 'a'")),
        ("assert f(1)[0] == 'a'", (["f(1)"], "_0[0] == 'a'")),
        ("assert type(f(1)) == int", (["f(1)"], "type(_0) == int")),
        ("assert len(set(f(2))) == 2", (["set(f(2))"], "len(_0) == 2")),
        ("assert f(1)", (["bool(f(1))"], "_0")),
        ("assert not f(1)", (["bool(f(1))"], "not _0")),
        ("assert f(1) is None", (["f(1)"], "_0 is None")),
        ("assert 1 < f(1) <= 3 and f(2) in (1, 2)", (["f(1)", "f(2)"], "1 < _0 <= 3 and _1 in (1, 2)")),
        ("assert f(1).count('a') == 2", (["f(1).count('a')"], "_0 == 2")),
        ("assert F(1).has('a') is True and g(f(1))", (["F(1).has('a')", "bool(g(f(1)))"], "_0 is True and _1")),
        ("assert f(1) == True or not f(2)", (["f(1)", "bool(f(2))"], "_0 == True or not _1")),
        # What the program would say of itself:
        ("assert f(1).startswith('ab')", None),
        ("assert f(1).__eq__(2) is True", None),
        ("assert F(1).f(2).same(3)", None),
        ("assert not differs(f(1), 2)", None),
        ("assert f(1) == 2 and np.allclose(f(2), b=[3])", None),
        ("assert True == close([f(1)], 2)", None),
        ("assert all(a < b for a, b in zip(f(1), [1]))", (["f(1)"], "all((a < b for a, b in zip(_0, [1])))")),
        ("x = [1, 2]\nassert f(x) == x", (["f([1, 2])"], "_0 == [1, 2]")),
        ("for i in [5]:\n    assert f(i) == str(i)", (["f(5)"], "_0 == str(5)")),
        # Beside the program these would be its to change:
        ("import math\nassert f(4) == math.sqrt(4)", (["f(4)"], "_0 == math.sqrt(4)")),
        ("import numpy as np\nassert np.allclose(f(4), 2)", None),
        ("def ref(x):\n    return x\nassert f(4) == ref(4)", None),
        ("import random\nassert f(random.random()) == 4 or random.random()", None),
        ("assert all(f(i) == i for i in range(3))", None),
        ("assert (lambda x: True)(f(1))", None),
        ("assert f(1).__class__ == int", None),
        ("assert [].__class__ == f(1)", None),
        ("while True:\n    assert f(1) == 2", None),
        ("f(1)", None),
        ("assert f(1 == 2", None),
    ],
)  # fmt: skip
def test_asserts_are_taken_apart(text: str, case: tuple[list[str], str] | None):
    if case is None:
        with pytest.raises(ValueError, match=r"can't be split|no Python"):
            split_asserts(text)
    else:
        assert [(one["calls"], one["test"]) for one in split_asserts(text)] == [case]


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"tests": []},
        {"tests": [{"call": "f"}]},
        {"tests": ["assert f(1) == ref(1)"], "setup": "def ref(x): return x"},
        {"tests": ["assert True"]},
        {"tests": 3},
        {"input_output": {"inputs": ["1"], "outputs": []}},
        {"input_output": "{nonsense"},
        {"test": "def check(candidate):\n    assert candidate(1) == 1"},  # no entry_point
    ],
)
def test_tests_that_can_not_be_used_are_no_score(data):
    (score,) = judged([(RIGHT, data, None)])
    assert score.value is None and score.reason


FRAMES = """
def f(x):
    import sys, gc
    frame = sys._getframe()
    while frame:
        for scope in (frame.f_locals, frame.f_globals):
            for key in ("expected", "accepted", "wanted", "result", "answer", "test", "output"):
                if key in scope:
                    return scope[key]
        frame = frame.f_back
    for one in gc.get_objects():
        if isinstance(one, dict) and ("expected" in one or "accepted" in one):
            return one.get("expected") or one["accepted"][0]
"""
FORGED = """
import glob, json, os, sys
line = "[%s]" + chr(10)
for path in glob.glob(f"/proc/{os.getppid()}/fd/*") + glob.glob("/proc/self/fd/*"):
    try:
        with open(path, "w") as file:
            file.write(line * 9)
    except OSError:
        pass
"""
HOSTILE = {
    "exits with 0": "import os\nos._exit(0)",
    "exits in the call": "def f(x):\n    raise SystemExit(0)",
    "equal to all": "class E:\n    __eq__ = __ne__ = __lt__ = lambda self, other: True\ndef f(x): return E()",
    "an int equal to all": "class E(int):\n    __eq__ = lambda self, other: True\ndef f(x): return E(5)",
    "a list equal to all": "class E(list):\n    def __eq__(self, o): return True\ndef f(x): return E([1])",
    "patches builtins": "import builtins, json\nfor n in ('all', 'any', 'bool', 'isinstance', 'format', 'type'):\n"
    "    setattr(builtins, n, lambda *a: True)\n"
    "json.dumps = lambda *a: '[[\"i\", \"9\"]]'\ndef f(x): return 1",
    "patches the driver": "import sys\nfor m in list(sys.modules.values()):\n    for n in ('encode', 'flush'):\n"
    "        if hasattr(m, n): setattr(m, n, lambda *a: ['b', ''])\ndef f(x): return 1",
    "patches the driver's frames": "import sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
    "        frame.f_globals['encode'] = lambda *a: 9\n        frame = frame.f_back\n    return 1",
    "reads frames and objects": FRAMES,
    "reads files": "import glob\ndef f(x): return [open(p).read() for p in glob.glob('**/*.*', recursive=True)]",
    "reads its parent": "import os\ndef f(x):\n    return open(f'/proc/{os.getppid()}/mem', 'rb').read(9)",
    "reads the environment": "import os\ndef f(x):\n    return dict(os.environ)",
    "prints what is wanted": "print(9)\nprint(16)\nprint('[9]')\ndef f(x):\n    print(x * x)",
    "forges results": FORGED % 9 + "def f(x): return 1",
    "ends its parent": "import os\nos.kill(os.getppid(), 9)\ndef f(x): return 1",
    "stops its parent": "import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(9)",
    "sleeps": "import time\ntime.sleep(10**6)",
    "loops": "while True: pass",
    "ignores signals": "import signal\nfor s in (1, 2, 3, 14, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "leaves a child": "import os, time\nif os.fork() == 0:\n    time.sleep(60)\ntime.sleep(60)",
    "plants modules": "import json\nfor n in ('json.py', 'sitecustomize.py', 'conftest.py', 'program.py'):\n"
    "    open(n, 'w').write('import os; os._exit(0)')\ndef f(x): return 9",
    "takes all memory": "x = [0] * 10**10\n" + RIGHT,
    "writes for ever": "while True:\n    print('x' * 10**6)",
    "recurses": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return f(x)",
    "a value without end": "def f(x):\n    y = []\n    y.append(y)\n    return y",
    "a deep value": "def f(x):\n    y = []\n    for _ in range(900): y = [y]\n    return y",
    "a long value": "def f(x): return 'x' * 10**8",
    "values of one hash": "def f(x): return {i * (2**61 - 1) for i in range(1, 4000)}",
    "a long number": "def f(x): return 1 << 400000",
}  # fmt: skip


@cache
def hostile_scores() -> dict[str, Score]:
    rows = [(program, SQUARE, 0.0) for program in HOSTILE.values()]
    return dict(zip(HOSTILE, judged(rows, timeout_s=0.5, total_timeout_s=2.0, memory_mb=256), strict=True))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_score_0_and_never_nothing(name: str):
    score = hostile_scores()[name]
    assert score.value == 0.0 and score.reason, score


def test_hostile_scripts_score_0():
    names = ("exits with 0", "forges results", "sleeps", "writes for ever", "stops its parent", "reads files")
    programs = {**HOSTILE, "reads files": HOSTILE["reads files"] + "\nprint(f(1))"}
    check([(programs[name], ECHO, 0.0) for name in names], timeout_s=0.5, total_timeout_s=2.0)


def test_a_hostile_program_holds_nobody_up():
    hostile_scores()
    started = time.perf_counter()
    check([(RIGHT, SQUARE, 1.0)] * 3)
    assert time.perf_counter() - started < 30


class Spy:
    """Keeps what went in, and answers as told."""

    def __init__(self, answer: SandboxResult | Exception) -> None:
        self.seen, self.answer = "", answer

    async def run_python(self, code: str, *, stdin: bytes = b"", files=None, limits=None) -> SandboxResult:
        self.seen += code + stdin.decode() + repr(files)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def spied(answer: SandboxResult | Exception, data: dict[str, Any]) -> tuple[Score, str]:
    check_, spy = Code(partial=True), Spy(answer)
    object.__setattr__(check_, "_sandbox", spy)
    return asyncio.run(check_("def f(x): return 1", data)), spy.seen


NOTHING = SandboxResult(stdout=b"", stderr=b"no python", returncode=127, killed=None, duration_s=0.1)


def test_what_is_expected_never_goes_in():
    data = {
        "tests": ["assert f(1) == 'zebra-1'", {"call": "f", "expected": "zebra-2"}, {"input": "5", "output": "zebra-3"}]
    }
    data["tests"].append("x = 'zebra-4'\nassert {x} == f(2)")
    _, seen = spied(dataclasses.replace(NOTHING, stdout=READY), data)
    assert "f(1)" in seen and "f(2)" in seen and "zebra" not in seen


@pytest.mark.parametrize("answer", [SandboxUnavailable("no namespaces"), NOTHING])
def test_a_sandbox_that_does_not_work_is_no_score(answer):
    score, _ = spied(answer, SQUARE)
    assert score.value is None and ("no namespaces" in score.reason or "no python" in score.reason)


def test_a_program_that_ends_the_sandbox_scores_0():
    """Where nothing comes back, an idle program tells whose fault it is."""

    class Ended(Spy):
        async def run_python(self, code, *, stdin=b"", files=None, limits=None):
            idle = "'program': ''" in code
            return dataclasses.replace(NOTHING, stdout=READY * idle, killed=None if idle else "lost")

    check_ = Code()
    object.__setattr__(check_, "_sandbox", Ended(NOTHING))
    score = asyncio.run(check_(RIGHT, SQUARE))
    assert score.value == 0.0


def test_what_comes_back_is_not_trusted():
    cases = plan(SQUARE, "")
    good = '[["i", "9"]]'
    for out in ("", "[]", "{}", "9", "{", "null", "[9, 9]", "[[9]]", '[["x", 1]]', "[" * 10**5, good * 2):
        assert all(compare(cases, [("", out)] * 2, 0.0)), out
    assert compare(cases, [("it took too long", good)] * 2, 0.0) == ["it took too long"] * 2
    assert compare(cases, [("", good)], 0.0) == ["", "it was not reached"]


def test_partial_tolerance_and_options():
    three = calls((1, 1), (2, 4), (3, 9))
    scores = check([("def f(x): return 1 // (3 - x) * x * x", three, 1 / 3), (RIGHT, three, 1.0)], partial=True)
    assert scores[0].components == {"passed": pytest.approx(1 / 3)}
    near = ("def f(x): return [x / 3, (x / 7,)]", {"tests": [{"call": "f", "args": [1], "expected": [0.33333, 0.5]}]})
    rounded = {"tests": [{"call": "f", "args": [1], "expected": [0.33333, {"a": 0.142857}]}]}
    check([(*near, 0.0), ("def f(x): return [x / 3, {'a': x / 7}]", rounded, 1.0)], tolerance=1e-4)
    check([("def f(x): return [x / 3, {'a': x / 7}]", rounded, 0.0)])
    for bad in (
        {"tolerance": -1},
        {"timeout_s": 0},
        {"partial": 1},
        {"memory_mb": 1},
        {"unsafe_local": "no"},
        {"max": 1},
    ):
        with pytest.raises(ConfigError):
            verifier_from("code", bad)
    assert verifier_from("code", {"partial": True}).fields == ("answer", "data")


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        (None, ""),
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```Python\nx = 1\n```", "x = 1"),
        ("a\n```python\nx = 1\n```\nb\n```python\ny = 2\n```", "y = 2"),
        ("```python\nx = 1\n```\n```python\ny = 2", ""),
        ("```js\nx = 1\n```", ""),
        ("```python\nx = 1\n```\n```text\n7\n```", "x = 1"),
        ("<think>x</think>```python\nx = 1\n```", "x = 1"),
        ("<think>```python\nx = 1\n```", ""),
        ("```python\n```", ""),
    ],
)
def test_where_the_program_is_read(answer, program):
    assert read_code(answer) == program
