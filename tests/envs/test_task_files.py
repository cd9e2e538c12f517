"""Rows become tasks in order, and a wrong row is named with its line."""

import json

import pytest

from upswing.envs.dataset import check_disjoint, tasks_from_jsonl
from upswing.errors import ConfigError
from upswing.trajectory.types import Message, Task


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
        ('{"prompt": "b", "answer": 1e999}', ["'answer'", "inf"]),
        ('{"prompt": "b \\ud83d", "answer": "1"}', ["half of a surrogate pair"]),
        ('{"prompt": "b", "answer": "1", "page": {"a": ["\\uDC00"]}}', ["half of a surrogate pair"]),
        ({"messages": [{"role": "user", "content": "b", "name": 5}], "answer": "1"}, ["name", "got 5"]),
        ({"messages": [{"role": "user", "content": "b", "tool_calls": []}], "answer": "1"}, ["'tool_calls'", "name"]),
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
    with pytest.raises(ConfigError, match=r":2: id 'x' .* line 1"):
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
