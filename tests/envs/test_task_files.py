"""Rows become tasks in order, and a wrong row is named with its line."""

import datetime
import decimal
import json
from itertools import islice

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from upswing.envs.dataset import check_disjoint, is_hub_id, tasks_from, tasks_from_jsonl
from upswing.errors import ConfigError
from upswing.recipe import load_recipe
from upswing.trajectory.types import Message, Task
from upswing.world import preflight


def write(tmp_path, *rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_rows_become_tasks_in_order_with_all_their_columns(tmp_path):
    path = write(
        tmp_path,
        {"prompt": "a", "answer": "1", "level": 3, "difficulty": {"x": [1]}},
        "",
        {"question": "b\u2028", "answers": ["2", 3], "id": 7, "tags": {"hops": 2}},
        '{"prompt": "\\ud83d\\ude00", "answer": "\\u00e9"}',
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}], "gold": 4.5},
    )
    tasks = tasks_from_jsonl(path, env="tool", split="dev")
    assert [t.id for t in tasks] == ["rows-0", "7", "rows-2", "rows-3"]
    assert [t.gold for t in tasks] == [("1",), ("2", "3"), ("é",), ("4.5",)]
    assert tasks[0].data == {"level": 3, "difficulty": {"x": [1]}} and tasks[1].data == {}
    assert tasks[1].tags == {"hops": "2"} and tasks[1].messages == (Message(role="user", content="b\u2028"),)
    assert [m.role for m in tasks[3].messages] == ["system", "user"] and tasks[2].messages[0].content == "😀"
    assert {(t.env, t.split) for t in tasks} == {("tool", "dev")}


def test_a_byte_order_mark_is_no_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a", "answer": "1"}\r\n{"prompt": "b", "answer": "2"}\r\n')
    assert [t.messages[0].content for t in tasks_from_jsonl(path)] == ["a", "b"]


GOOD = {"prompt": "a", "answer": "1"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "b"}, ["no answer", "keys: prompt", "answers"]),
        ({"prompt": "b", "anwser": "1"}, ["no answer", "'anwser'", "did you mean 'answer'"]),
        ({"prompt": "b", "answer": None}, ["no answer"]),
        ({"prompt": "b", "answer": " "}, ["empty answer"]),
        ({"prompt": "b", "answers": []}, ["no answer"]),
        ({"prompt": "b", "answer": {"a": 1}}, ["'answer'", "string"]),
        ({"prompt": "b", "answer": True}, ["'answer'"]),
        ({"promt": "b", "answer": "1"}, ["no prompt", "did you mean 'prompt'"]),
        ({"prompt": "b", "messages": [], "answer": "1"}, ["'prompt'", "'messages'"]),
        ({"prompt": "b", "answer": "1", "gold": "2"}, ["'answer'", "'gold'"]),
        ({"prompt": "b", "answer": "1", "prompts": 1}, ["'prompts'", "rename"]),
        ({"prompt": "b", "answer": "1", "completions": 1}, ["'completions'", "rename"]),
        ({"prompt": "b", "answer": "1", "loss_mask": 1}, ["'loss_mask'", "rename"]),
        ({"prompt": "b", "answer": "1", "state": 1}, ["'state'", "rename"]),
        ({"prompt": "b", "answer": "1", "split": "test"}, ["'test'", "'train'"]),
        ({"prompt": "", "answer": "1"}, ["'prompt'", "not empty"]),
        ({"messages": "b", "answer": "1"}, ["list of messages"]),
        ({"messages": [{"role": "usr", "content": "b"}], "answer": "1"}, ["'usr'", "did you mean 'user'"]),
        ({"messages": [{"role": "user"}], "answer": "1"}, ["content"]),
        ({"messages": [{"role": "assistant", "content": "b"}], "answer": "1"}, ["'assistant'"]),
        ({"prompt": "b", "answer": "1", "tags": ["x"]}, ["tags"]),
        ({"prompt": "b", "answer": "1", "id": 1.5}, ["'id'"]),
        ("{oops", ["not valid JSON"]),
        ('{"prompt": "b", "answer": NaN}', ["NaN"]),
        ('{"prompt": "b", "answer": "1", "answer": "2"}', ["'answer'", "twice"]),
        ('{"prompt": "b", "answer": 1e999}', ["1e999 is too large"]),
        ('{"prompt": "b", "answer": "x", "level": {"a": [-1e400]}}', ["-1e400 is too large"]),
        ('{"prompt": "b \\ud83d", "answer": "1"}', ["half of a surrogate pair"]),
        ('{"prompt": "b", "answer": "1", "page": {"a": ["\\uDC00"]}}', ["half of a surrogate pair"]),
        ({"messages": [{"role": "user", "content": "b", "name": 5}], "answer": "1"}, ["name", "got 5"]),
        ({"messages": [{"role": "user", "content": "b", "tool_calls": []}], "answer": "1"}, ["tool_calls", "name"]),
        ({"messages": [{"role": "user", "content": ["b"]}], "answer": "1"}, ["content"]),
        ("[1]", ["list"]),
    ],
)
def test_a_wrong_row_is_named(tmp_path, row, words):
    path = write(tmp_path, GOOD, row)
    with pytest.raises(ConfigError) as caught:
        tasks_from_jsonl(path, split="train")
    text = str(caught.value)
    assert text.startswith(f"{path}:2: ") and "\n" not in text
    assert all(word in text for word in words), text


def test_answers_are_optional_only_when_nobody_compares(tmp_path):
    path = write(tmp_path, {"prompt": "a"})
    assert tasks_from_jsonl(path, require_gold=False)[0].gold == ()


def test_ids_are_unique(tmp_path):
    path = write(tmp_path, {**GOOD, "id": "x"}, {**GOOD, "id": "x"})
    with pytest.raises(ConfigError, match=r":2: id 'x' .*:1; ids must be unique"):
        tasks_from_jsonl(path)


def test_empty_and_missing_files(tmp_path):
    with pytest.raises(ConfigError, match="no rows"):
        tasks_from_jsonl(write(tmp_path, "", " "))
    with pytest.raises(ConfigError, match=r"does not exist; did you mean 'rows\.jsonl'"):
        tasks_from_jsonl(tmp_path / "row.jsonl")


def task(id, text, **data):
    return Task(id=id, messages=(Message(role="user", content=text),), data=data)


def test_splits_share_neither_ids_nor_problems():
    check_disjoint({"train": [task("1", "a"), task("1b", "a")], "test": [task("2", "b"), task("3", "a", x=1)]})
    with pytest.raises(ConfigError, match="id '1'"):
        check_disjoint({"train": [task("1", "a")], "test": [task("1", "b")]})
    with pytest.raises(ConfigError, match="same problem"):
        check_disjoint({"train": [task("1", "a")], "test": [task("2", "a")]})


ROWS = [
    {"question": "a", "solution": "so #### 1,000", "level": 3, "when": datetime.date(2024, 5, 1), "x": None},
    {"question": "b", "solution": "first #### 3, no: #### 7", "level": None, "when": None, "x": None},
]
GSM = {"columns": {"prompt": "question", "answer": "solution"}, "answer_pattern": r"#### ?(.+?)(?:,|$)"}


@pytest.fixture(params=["jsonl", "parquet", "saved", "saved_splits", "folder"])
def stored(request, tmp_path, monkeypatch):
    """The same two rows in every way to keep them: the source's name."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    if request.param == "jsonl":
        kept = [{k: str(v) if k == "when" else v for k, v in row.items() if v is not None} for row in ROWS]
        return str(write(tmp_path, *kept, name="gsm.jsonl"))
    rows = pa.Table.from_pylist([{k: v for k, v in row.items() if k != "x"} for row in ROWS])
    if request.param in ("parquet", "folder"):
        name = "gsm.parquet" if request.param == "parquet" else "gsm/train-0.parquet"
        (tmp_path / "gsm").mkdir()
        pq.write_table(rows, tmp_path / name)
        return str(tmp_path / name) if request.param == "parquet" else str(tmp_path / "gsm")
    found = datasets.Dataset(rows)
    if request.param == "saved":
        found.save_to_disk(tmp_path / "gsm")
        return str(tmp_path / "gsm")
    datasets.DatasetDict({"mine": found, "test": found.select([1])}).save_to_disk(tmp_path / "gsm")
    return f"{tmp_path / 'gsm'}#mine"


def test_every_kind_of_source_gives_the_same_tasks(stored):
    tasks = tasks_from(stored, env="tool", **GSM)
    assert [t.messages for t in tasks] == [(Message(role="user", content=text),) for text in "ab"]
    assert [t.gold for t in tasks] == [("1",), ("7",)]  # of several matches the last counts
    assert [t.data for t in tasks] == [{"level": 3, "when": "2024-05-01"}, {}]
    assert len({t.id for t in tasks}) == 2 and all(t.id.startswith("gsm-") for t in tasks)
    json.dumps([dict(t.data) for t in tasks])


@pytest.mark.parametrize("saved", [False, True])
def test_short_floats_are_what_they_print(tmp_path, saved):
    """The double nearest to a float32 0.1 is 0.10000000149011612, an answer that nobody gives."""
    short = {"answer": pa.array([0.1, 2.5], pa.float32()), "each": pa.array([[0.3], []], pa.list_(pa.float32()))}
    rows = pa.table({"prompt": ["a", "b"], **short, "level": [2.0**-20, 123456792.0]})
    path = str(tmp_path / ("t" if saved else "t.parquet"))
    datasets.Dataset(rows).save_to_disk(path) if saved else pq.write_table(rows, path)
    first, second = tasks_from(path)
    assert (first.gold, second.gold) == (("0.1",), ("2.5",))
    assert (first.data, second.data) == ({"each": [0.3], "level": 2.0**-20}, {"each": [], "level": 123456792.0})


def test_tables_hold_messages_lists_and_numbers(tmp_path):
    messages = [{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "u", "name": None}]
    path = tmp_path / "m.parquet"
    rows = [
        {
            "messages": messages,
            "answers": ["1", "2"],
            "cost": decimal.Decimal("1.50"),
            "tags": {"kind": "x", "no": None},
        },
        {"messages": messages[1:], "answers": ["3"], "cost": None, "tags": {"kind": None, "no": None}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    first, second = tasks_from(str(path), split="dev")
    assert [m.role for m in first.messages] == ["system", "user"] and first.gold == ("1", "2")
    assert first.data == {"cost": "1.50"} and first.tags == {"kind": "x"} and second.tags == {}
    assert first.split == "dev" and first.id == "m-dev-0"


@pytest.mark.parametrize(
    ("rows", "args", "words"),
    [
        ([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}], {}, ["row 2", "no answer"]),
        ([{"prompt": "a", "answer": "1", "picture": b"x"}], {}, ["row 1", "'picture'", "JSON"]),
        ([{"prompt": "a", "answer": float("nan")}], {}, ["row 1", "'answer'", "nan"]),
        ([{"prompt": "a", "answer": "1", "task": "t"}], {}, ["row 1", "'task'", "clashes"]),
        (
            [{"question": "a", "solution": "1"}],
            {"columns": {"answer": "solutoin"}},
            ["row 1", "columns.answer", "did you mean 'solution'"],
        ),
        ([{"prompt": "a", "question": "b", "answer": "1"}], {"columns": {"prompt": "question"}}, ["'prompt' already"]),
        ([{"prompt": "a", "answer": "so 1"}], {"answer_pattern": "#### (.+)"}, ["row 1", "answer_pattern", "so 1"]),
        ([{"prompt": "a", "answer": "1", "id": "x"}, {"prompt": "b", "answer": "1", "id": "x"}], {}, ["'x'", "row 1"]),
        ([], {}, ["no rows"]),
    ],
)
def test_a_wrong_row_of_a_table_is_named(tmp_path, rows, args, words):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(ConfigError) as caught:
        tasks_from(str(path), **args)
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text and all(word in text for word in words), text


def test_columns_that_clash_may_be_renamed_and_all_the_others_stay(tmp_path):
    path = write(tmp_path, {"problem": "a", "answer": "1", "task": "algebra", "messages": ["old"], "level": 2})
    columns = {"prompt": "problem", "kind": "task", "old": "messages"}
    (found,) = tasks_from(str(path), columns=columns)
    assert found.data == {"kind": "algebra", "old": ["old"], "level": 2} and found.gold == ("1",)


def test_a_source_that_is_not_there_is_named(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"no table")
    with pytest.raises(ConfigError, match=r"can't be read as Parquet"):
        tasks_from(str(tmp_path / "rows.parquet"))
    with pytest.raises(ConfigError, match=r"did you mean 'rows\.parquet'"):
        tasks_from(str(tmp_path / "row.parquet"))
    with pytest.raises(ConfigError, match="does not exist"):
        tasks_from(str(tmp_path / "rows.jsonl"))
    datasets.DatasetDict({"train": datasets.Dataset.from_list([GOOD])}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match="no split 'trian'; did you mean 'train'"):
        tasks_from(f"{tmp_path / 'saved'}#trian")

    def offline(*_, **__):
        raise ConnectionError("couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ConfigError, match=r"no file or folder here either.*couldn't reach the Hub"):
        tasks_from("openai/gsm8k")


def test_the_hub_is_asked_for_the_part_and_the_configuration(monkeypatch):
    asked = []

    def load(path, name, split):
        asked.append((path, name, split))
        return datasets.Dataset.from_list([{"prompt": f"{split}", "answer": "1"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = {split: tasks_from("openai/gsm8k", split=split, name="main") for split in ("train", "dev", "test")}
    found["test"] = tasks_from("openai/gsm8k#train[90%:]", split="test")
    names = [("main", "train"), ("main", "validation"), ("main", "test"), (None, "train[90%:]")]
    assert asked == [("openai/gsm8k", name, split) for name, split in names]
    check_disjoint(found)  # the ids of two splits of one dataset differ
    assert found["dev"][0].id == "gsm8k-dev-0"


def test_what_looks_like_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").mkdir()
    assert is_hub_id("openai/gsm8k") and is_hub_id("a/b.c#train[:5]")
    assert not any(map(is_hub_id, ("rows.jsonl", "data/rows.jsonl", "data/mine", "./data/x", "a/b/c", "gsm8k", "/a/b")))


def test_a_recipe_reads_tables_and_folders_beside_it(echo, monkeypatch):
    folder = echo.parent
    monkeypatch.chdir(folder.parent)
    train = [{"question": f"q{i}", "solution": f"x #### {i}"} for i in range(3)]
    pq.write_table(pa.Table.from_pylist(train), folder / "t.parquet")
    held_out = datasets.Dataset.from_list([{"question": "d", "solution": "#### 9"}])
    datasets.DatasetDict({"held_out": held_out}).save_to_disk(folder / "kept")
    section = "dataset={{train: t.parquet, dev: 'kept#held_out', {}}}"
    rows = "columns: {prompt: question, answer: solution}, answer_pattern: '#### (.+)', shuffle: false"
    made = preflight(load_recipe(echo, [section.format(rows)]))
    assert [t.gold for t in islice(made.tasks("train", 0), 4)] == [("0",), ("1",), ("2",), ("0",)]
    assert [(t.messages[0].content, t.gold) for t in made.tasks("dev", 0)] == [("d", ("9",))]
    with pytest.raises(ConfigError, match=r"dataset.answer_pattern: got '#### .', no regular expression"):
        load_recipe(echo, [section.format("answer_pattern: '#### ('")])
    with pytest.raises(ConfigError, match=r"t\.parquet: row 1: no 'answr' \(columns\.answer\)"):
        preflight(load_recipe(echo, [section.format("columns: {answer: answr}")]))
    overlap = [{"question": "q1", "solution": "#### 1"}]
    datasets.DatasetDict({"held_out": datasets.Dataset.from_list(overlap)}).save_to_disk(folder / "leaked")
    with pytest.raises(ConfigError, match="same problem"):
        preflight(load_recipe(echo, [section.format(rows).replace("kept", "leaked")]))
