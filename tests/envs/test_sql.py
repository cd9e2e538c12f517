"""The sql environment's database: no statement can stop a run, grow without bound or leave what can't be stored."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import islice

import pytest

from upswing.envs import AssistantMessage
from upswing.envs.sql import Sql
from upswing.trajectory.types import Task


def tried(*queries: str, task: Task | None = None) -> tuple[list[str], dict, dict]:
    """Runs queries -> (their results, the state, the tables before)."""
    env = Sql()
    task = task or next(env.tasks("train", 0))

    async def run() -> list[str]:
        await env.reset(task, 0)
        texts = []
        for query in queries:
            texts.append((await env.step(AssistantMessage(content=env.call("sql", query=query)))).messages[0].content)
        return texts

    results, state = asyncio.run(run()), dict(env.state())
    env.close()
    return results, state, task.data["start_state"]["tables"]


@pytest.mark.parametrize("value", ["x'00'", "CAST(x'ff' AS TEXT)", "9e999", "'a' || char(0)", "1.5", "zeroblob(9)"])
def test_whatever_is_written_the_state_can_be_stored(value: str):
    results, state, before = tried(f"UPDATE products SET price = {value}")
    assert results == ["10 rows changed"] and state["tables"] != before
    assert json.loads(json.dumps(state, allow_nan=False)) == state


NUMBERS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 9999999)"


@pytest.mark.parametrize(
    "query",
    [
        "SELECT zeroblob(100000000)",
        "SELECT hex(zeroblob(50000000))",
        "SELECT replace(hex(zeroblob(400)), '0', hex(zeroblob(400)))",
        f"INSERT INTO products(name, price, stock) {NUMBERS} SELECT hex(zeroblob(400)), 1, 1 FROM n",
        f"{NUMBERS} SELECT count(*) FROM n",
        f"{NUMBERS} SELECT sum(instr(hex(zeroblob(490)), hex(zeroblob(240)) || '1')) FROM n",
        f"{NUMBERS} SELECT sum(hex(zeroblob(490)) LIKE '%0%0%0%0%0%0%0%0%0%1%') FROM n",
    ],
)
def test_a_heavy_statement_is_refused_at_once_and_changes_nothing(query: str):
    started = time.perf_counter()
    results, state, before = tried(query)
    assert results[0].startswith("Error") and state["tables"] == before
    assert time.perf_counter() - started < 2


@pytest.mark.parametrize(
    "query",
    [
        "CREATE TEMP TABLE customers AS SELECT * FROM main.customers",
        "CREATE TABLE more(a)",
        "CREATE TEMP TRIGGER t AFTER UPDATE ON main.orders BEGIN DELETE FROM customers; END",
        "CREATE TEMP VIEW orders AS SELECT 1 AS id",
        "CREATE INDEX i ON orders(status)",
        "CREATE VIRTUAL TABLE v USING fts5(a)",
        "DROP TABLE orders",
        "ALTER TABLE orders RENAME TO other",
        "BEGIN",
        "SAVEPOINT s",
        "ANALYZE",
        "VACUUM",
        "VACUUM INTO 'copy.db'",
        "PRAGMA max_page_count = 100000",
        "ATTACH ':memory:' AS more",
        "SELECT load_extension('x')",
    ],
)
def test_only_reading_and_changing_rows_is_allowed(query: str, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results, state, before = tried(query)
    assert results[0].startswith("Error") and state["tables"] == before and not list(tmp_path.iterdir())


def test_rows_changed_are_counted_for_every_form_of_a_change():
    with_ = "WITH one AS (SELECT 1 AS id) UPDATE products SET stock = 7777 WHERE id IN (SELECT id FROM one)"
    results, *_ = tried(with_, "", "-- nothing", "DELETE FROM products WHERE stock = 7777")
    assert results == ["1 rows changed", "0 rows changed", "0 rows changed", "1 rows changed"]


def test_no_number_is_the_answer_to_bet_on():
    golds = [task.gold[0] for task in islice(Sql(change_frac=0).tasks("train", 0), 400)]
    assert max(golds.count(gold) for gold in set(golds)) <= 0.08 * len(golds)
