"""The tests of a coding task: taken apart into what goes into the sandbox and what it is compared with outside, and
the comparison.

Cases are JSON: {stdin, accepted: [texts]}; {calls: [source], accepted: [values]}; {calls, test}, where `test` is what
is left of an assert with its calls replaced by `_0`, `_1`, …
"""

from __future__ import annotations

import ast
import builtins
import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

KEYS = ("tests", "test_list", "test", "input_output")
"""Where a task's data has its tests: ours, MBPP's, HumanEval's, and APPS's and LiveCodeBench's."""
_NAMES = (
    "abs all any bool bytes complex dict divmod enumerate float frozenset int isinstance len list max min "
    "range reversed round set sorted str sum tuple type zip"
)
OUTSIDE = {name: getattr(builtins, name) for name in _NAMES.split()}
"""What an assert may call on the returned values."""
_OF_ANY = frozenset(
    ["all", "any", "bool", "dict", "frozenset", "list", "max", "min", "set", "sorted", "str", "sum", "tuple"]
)
"""Those that also read what is no plain data, such as a generator: around nothing but a call, they go in with it."""
_LOADED = [
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools",
    "functools", "operator", "io", "sys", "json", "builtins", "typing",
]  # fmt: skip
IMPORTS = "".join([f"from {name} import *\n" for name in _LOADED] + [f"import {name}\n" for name in _LOADED])
IMPORTS += "sys.setrecursionlimit(50_000)\n"
"""What tests with a `fn_name` have before the program, as in LiveCodeBench: its starter code doesn't run without."""
_MAX_CASES = 10_000
_REFUSED = (ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def plan(data: Mapping[str, Any], program: str) -> list[dict[str, Any]]:
    """The cases of a task's data. Raises ValueError for tests that are missing or can't be taken apart."""
    given = next((data[key] for key in KEYS if data.get(key) is not None), None)
    if isinstance(given, str) and given.lstrip().startswith(("{", "[")):
        given = json.loads(given)
    if isinstance(given, Mapping):
        return list(_listed(given, program))
    cases, asserts = list[dict[str, Any]](), list[str]()
    for one in [given] if isinstance(given, str) else given or ():
        match one:
            case str():
                asserts.append(one)
            case {"call": str(name), "expected": expected}:
                call = _call(name, one.get("args") or (), one.get("kwargs") or {})
                cases.append({"calls": [call], "accepted": [expected]})
            case {"input": str(fed), "output": str(out), "testtype": "functional"}:
                if not data.get("fn_name"):
                    raise ValueError("functional tests need the task's data['fn_name']")
                cases += _listed({"inputs": [fed], "outputs": [out], "fn_name": data["fn_name"]}, program)
            case {"input": str(fed), "output": str(out)}:
                cases.append({"stdin": fed, "accepted": [out]})
            case _:
                forms = "an assert, {call, args, kwargs, expected} or {input, output}"
                raise ValueError(f"a test is {one!r:.80}; allowed: {forms}")
    if asserts:
        setup, entry = (str(data.get(key) or "") for key in ("setup", "entry_point"))
        cases += split_asserts("\n".join(asserts), setup or str(data.get("test_setup_code") or ""), entry)
    if not cases:
        raise ValueError(f"the task's data has no tests ({', '.join(KEYS)})")
    return cases


def _call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    return f"{name}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def _listed(given: Mapping[str, Any], program: str) -> Iterator[dict[str, Any]]:
    """{inputs, outputs, fn_name} as in APPS (values; an output may stand in a list) and LiveCodeBench (JSON lines)."""
    inputs, outputs, name = given.get("inputs") or (), given.get("outputs") or (), given.get("fn_name")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"input_output has {len(inputs)} inputs and {len(outputs)} outputs")
    for fed, out in zip(inputs, outputs, strict=True):
        if not name:
            texts = ["\n".join(map(str, each)) if isinstance(each, list) else str(each) for each in (fed, out)]
            yield {"stdin": texts[0], "accepted": texts[1:]}
            continue
        args = [json.loads(line) for line in fed.split("\n")] if isinstance(fed, str) else fed
        values = [json.loads(out)] if isinstance(out, str) else [out, *(out[:1] if isinstance(out, list) else ())]
        where = f"Solution().{name}" if "class Solution" in program else name
        yield {"calls": [_call(where, args, {})], "accepted": values, "tuples_are_lists": True}


def split_asserts(text: str, setup: str = "", entry: str = "") -> list[dict[str, Any]]:
    """The cases of assert statements: MBPP's, or HumanEval's `def check(candidate)` with its `entry` point.

    Only calls of the tested function go in; what they are compared with stays. Constants and loops over constants are
    written out. Raises ValueError for what can't be split so: such a test would put the answer beside the program.
    """
    try:
        tree, known = ast.parse(text), ast.parse(setup)
    except SyntaxError as error:
        raise ValueError(f"the tests are no Python: {error}") from None
    splitter = _Splitter(entry, {name for part in (tree, known) for name in _bound(part)})
    splitter.read(tree.body, {})
    return splitter.cases


def _bound(tree: ast.Module) -> Iterator[str]:
    """Names that belong to the task and not to the program: what its text imports, and its functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


class _Splitter(ast.NodeTransformer):
    def __init__(self, entry: str, known: set[str]) -> None:
        self.entry, self.known = entry, known
        self.cases: list[dict[str, Any]] = []
        self._calls: list[str] = []
        self._free: set[str] = set()

    def read(self, body: Sequence[ast.stmt], env: Mapping[str, ast.expr]) -> None:
        """Statements, with the names in `env` standing for expressions."""
        for statement in body:
            match statement:
                case ast.Assert(test=test):
                    self._add(_Substitute(env).visit(copy.deepcopy(test)))
                case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Expr(value=ast.Constant()):
                    pass
                case ast.Expr(value=ast.Call(func=ast.Name(id="check" | "print")) | ast.Name()):
                    pass
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    env = {**env, name: _Substitute(env).visit(copy.deepcopy(value))}
                case ast.For(target=ast.Name(id=name), iter=over, body=inner, orelse=[]):
                    for value in _constants(_Substitute(env).visit(copy.deepcopy(over))):
                        self.read(inner, {**env, name: value})
                case ast.FunctionDef(name="check", args=ast.arguments(args=[ast.arg(arg=name)])) if self.entry:
                    self.read(statement.body, {**env, name: ast.Name(self.entry, ast.Load())})
                case _:
                    raise _unsplit(statement)

    def _add(self, test: ast.expr) -> None:
        self._calls = []
        bound = {node.id for node in ast.walk(test) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        self._free = bound
        rest = self.visit(copy.deepcopy(test))
        names = {f"_{i}" for i in range(len(self._calls))} | bound | OUTSIDE.keys() | {"math"}
        for node in ast.walk(rest):
            foreign = isinstance(node, ast.Name) and node.id not in names
            if foreign or isinstance(node, _REFUSED) or (isinstance(node, ast.Attribute) and not _is_math(node.value)):
                raise _unsplit(test)
        for i, compared in _truths(rest):
            if self._judges(ast.parse(self._calls[i], mode="eval").body):
                raise _unsplit(test)
            if not compared:  # only whether it is true: of a match object, say, that is all that is known
                self._calls[i] = f"bool({self._calls[i]})"
        if self._calls:
            self.cases.append({"calls": self._calls, "test": ast.unparse(rest)})
        elif not isinstance(rest, ast.Constant):
            raise _unsplit(test)
        if len(self.cases) > _MAX_CASES:
            raise ValueError(f"the tests have more than {_MAX_CASES} cases")

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not self._goes_in(node):
            return self.generic_visit(node)
        if self._free & {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}:
            raise _unsplit(node)
        self._calls.append(ast.unparse(node))
        return ast.Name(f"_{len(self._calls) - 1}", ast.Load())

    def _goes_in(self, node: ast.AST) -> bool:
        """A call of the tested function, or what is made of nothing but one: `set(f(1))`."""
        if not isinstance(node, ast.Call):
            return False
        root = node.func
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        name = root.id if isinstance(root, ast.Name) else ""
        if name in OUTSIDE and name != self.entry:
            alone = len(node.args) == 1 and not node.keywords and root is node.func
            return name in _OF_ANY and alone and self._goes_in(node.args[0])
        return name == self.entry if self.entry else bool(name) and name not in self.known and name != "math"

    def _judges(self, call: ast.expr) -> bool:
        """Whether it says if another call was right, as `close(f(1), 2)` and `f(1).startswith("a")` do: it would be the
        program's to say."""
        assert isinstance(call, ast.Call)
        of = call.func.value if isinstance(call.func, ast.Attribute) else None
        given = [*call.args, *(one.value for one in call.keywords)]
        if isinstance(of, ast.Call) and not (isinstance(of.func, ast.Name) and of.func.id[0].isupper()):  # no class
            return bool(given)
        return len(given) > 1 and any(self._goes_in(node) for one in given for node in ast.walk(one))


def _is_math(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "math"


def _truths(test: ast.expr) -> Iterator[tuple[int, bool]]:
    """The calls, by number, of which a test only asks if they are true, and whether by a comparison."""
    match test:
        case ast.Name(id=name) if name[1:].isdigit():
            yield int(name[1:]), False
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            yield from _truths(inner)
        case ast.BoolOp(values=parts):
            for part in parts:
                yield from _truths(part)
        case ast.Compare(left=left, comparators=others):
            sides = [left, *others]
            if any(isinstance(one, ast.Constant) and isinstance(one.value, bool) for one in sides):
                yield from ((number, True) for one in sides for number, _ in _truths(one))


class _Substitute(ast.NodeTransformer):
    def __init__(self, env: Mapping[str, ast.expr]) -> None:
        self.env = env

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self.env[node.id]) if isinstance(node.ctx, ast.Load) and node.id in self.env else node


def _constants(over: ast.expr) -> Iterator[ast.expr]:
    """What a loop goes over: a list or tuple that is written out, or a range."""
    if isinstance(over, ast.List | ast.Tuple):
        yield from over.elts
    elif isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "range":
        try:
            steps = range(*map(ast.literal_eval, over.args))
        except (ValueError, TypeError):
            raise _unsplit(over) from None
        yield from map(ast.Constant, steps[:_MAX_CASES])
    else:
        raise _unsplit(over)


def _unsplit(node: ast.AST) -> ValueError:
    source = " ".join(ast.unparse(node).split())
    why = "can't be split into calls and what they must give: an answer would stand beside the program"
    return ValueError(f"`{source:.120}` in the tests {why}; write it as {{call, args, expected}}")


# -- the comparison: runs in a worker, for nothing that came back is trusted -------------------------------------------


def compare(cases: Sequence[Mapping[str, Any]], results: Sequence[Sequence[str]], tolerance: float) -> list[str]:
    """Of every case, what is wrong with it; empty when it passed. `results`: (fault, what came out) of the tests that
    were played; what came out is not trusted."""
    left = [("it was not reached", "")] * (len(cases) - len(results))
    return [fault or _fault(case, out, tolerance) for case, (fault, out) in zip(cases, [*results, *left], strict=True)]


def _fault(case: Mapping[str, Any], out: str, tolerance: float) -> str:
    try:
        if "stdin" in case:
            right = any(same_output(out, wanted, tolerance) for wanted in case["accepted"])
            return "" if right else f"it printed {out!r:.200}"
        if not out:
            return "it ended without a result"
        values = [decode(value) for value in json.loads(out)]
        right = len(values) == len(case["calls"]) and _right(case, values, tolerance)
        return "" if right else f"it gave {values!r:.200}"
    except Exception as error:
        return f"its result can't be compared ({type(error).__name__}: {error})"[:300]


def _right(case: Mapping[str, Any], values: list[Any], tolerance: float) -> bool:
    if "test" in case:
        names = {f"_{i}": value for i, value in enumerate(values)}
        return bool(eval(case["test"], {"__builtins__": {}, "math": math, **OUTSIDE, **names}))
    value = list(values[0]) if case.get("tuples_are_lists") and isinstance(values[0], tuple) else values[0]
    return any(_same(value, wanted, tolerance) for wanted in case["accepted"])


def _same(a: Any, b: Any, tolerance: float) -> bool:
    """Python's own `==`; with a tolerance, floats within it, at any depth of lists, tuples and dicts."""
    if not tolerance:
        return bool(a == b)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(_same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key], tolerance) for key, value in a.items())
    if isinstance(a, int | float) and isinstance(b, int | float) and float in (type(a), type(b)):
        return math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    return bool(a == b)


def same_output(out: str, wanted: str, tolerance: float = 0.0) -> bool:
    """As LiveCodeBench: the same lines but for spaces around them; a line of numbers by their values, exactly."""
    said, told = ([line.strip() for line in text.strip().split("\n")] for text in (out, wanted))
    alike = (a == b or _same_numbers(a, b, tolerance) for a, b in zip(said, told, strict=False))
    return len(said) == len(told) and all(alike)


def _same_numbers(a: str, b: str, tolerance: float) -> bool:
    try:
        said, told = ([Decimal(part) for part in line.split()] for line in (a, b))
        if said == told or not tolerance or len(said) != len(told):
            return said == told
        return all(math.isclose(x, y, rel_tol=tolerance, abs_tol=tolerance) for x, y in zip(said, told, strict=True))
    except InvalidOperation:
        return False


def decode(coded: Any) -> Any:
    """What `code_driver.encode` wrote. Raises ValueError or TypeError for anything else."""
    match coded:
        case None | bool() | str() | int() | float():
            return coded
        case ["i", str(text)]:
            return int(text, 16)
        case ["c", str(real), str(imag)]:
            return complex(float(real), float(imag))
        case ["b", str(text)]:
            return bytes.fromhex(text)
        case ["d", list(pairs)]:
            return {decode(key): decode(value) for key, value in pairs}
        case ["l" | "t" | "s" | "z" as tag, list(items)]:
            return {"l": list, "t": tuple, "s": set, "z": frozenset}[tag](map(decode, items))
    raise ValueError(f"{coded!r:.60} is no value")
