"""SQL: questions about, and changes to, a real SQLite database; judged by the answer and by the tables left behind."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from typing import Annotated, Any

from pydantic import Field

from upswing.envs.generated import GeneratedEnv, book
from upswing.envs.tools import tool
from upswing.trajectory.types import Message, Task
from upswing.verify.options import Share

MAX_ROWS, MAX_STEPS, MAX_CELL, MAX_PAGES = 50, 200_000, 1000, 64
"""Rows shown, SQLite's own steps a statement, characters a cell (one step works on a whole cell), pages of 4 KiB."""
_BOOK = book("sql")
_TABLES = ("customers", "products", "orders")
_ALLOWED = ("SELECT", "READ", "INSERT", "UPDATE", "DELETE", "FUNCTION", "RECURSIVE")
_CODES = {getattr(sqlite3, f"SQLITE_{name}") for name in _ALLOWED}


class Sql(GeneratedEnv):
    """One tool, `sql(query)`, over a database of customers, products and orders made for the task.

    Questions are judged by the answer and by the tables, which must be as before; changes by the tables alone. Options:
    `change_frac`, the share of changes; `num_orders`; `expert_noise`, the chance that the expert first misnames a
    column.
    """

    name = "sql"
    task_options = frozenset({"change_frac", "num_orders"})
    system = "The tables:\n" + _BOOK["schema"].strip()
    change_frac: Share = 0.5
    num_orders: Annotated[int, Field(ge=1, le=1000)] = 30
    _database: sqlite3.Connection | None = None

    @tool()
    async def sql(self, query: str) -> str:
        """Run one SQL statement of SQLite's dialect; -> its rows, or how many rows it changed."""
        assert self._database is not None
        return run(self._database, query)

    def draw(self, rng: random.Random) -> Task:
        seed, change = rng.randrange(10**9), rng.random() < self.change_frac
        form = rng.choice(_BOOK["changes" if change else "questions"])
        names = {name: rng.choice(_BOOK[name]) for name in ("name", "city", "product", "status")}
        names["number"] = str(rng.randint(1, 20))
        query = form["sql"].format(**names)
        with closing(make_database(seed, self.num_orders)) as database:
            before, found = tables(database), database.execute(query)
            wanted = {} if change else {"answer": str(found.fetchone()[0])}
            final: dict[str, Any] = {"tables": tables(database), **wanted}
        # Nothing to change: doing nothing would pass. And "0" must not be the answer to bet on.
        if (change and final["tables"] == before) or (wanted.get("answer") == "0" and rng.random() < 0.9):
            return self.draw(rng)
        ending = " Give only the number." if not change else " Then say done."
        return self.make_task(
            f"{seed}-{self.num_orders}-{query}",
            form["ask"].format(**names) + ending,
            gold=(wanted["answer"],) if wanted else (),
            kind=form["kind"],
            seed=seed,
            num_orders=self.num_orders,
            query=query,
            start_state={"tables": before, **({"answer": ""} if wanted else {})},
            final_state=final,
        )

    def start(self, task: Task) -> None:
        self._database = make_database(task.data["seed"], task.data["num_orders"])
        self._database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL)
        self._database.execute(f"PRAGMA max_page_count = {MAX_PAGES}")
        self._database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _CODES else sqlite3.SQLITE_DENY)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def final(self) -> Mapping[str, Any]:
        return {} if self._database is None else {"tables": tables(self._database)}

    def speak(self, task: Task, messages: tuple[Message, ...], heard: list[str], careless: bool) -> str:
        """Knows how each kind of question is put in SQL."""
        query = task.data["query"]
        if not heard and careless:
            return self.call("sql", query=query.replace("name", "title", 1).replace("status", "state", 1))
        if not heard or heard[-1].startswith("Error"):
            return self.call("sql", query=query)
        return self.say(heard[-1].splitlines()[-1] if task.gold else "done")


def make_database(seed: int, num_orders: int) -> sqlite3.Connection:
    """The same in-memory database for the same seed."""
    rng = random.Random(f"sql {seed}")
    database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
    database.text_factory = lambda text: text.decode("utf-8", "replace")
    database.executescript(_BOOK["schema"])
    people = [(name, rng.choice(_BOOK["city"])) for name in _BOOK["name"]]
    database.executemany("INSERT INTO customers(name, city) VALUES (?, ?)", people)
    goods = [(name, rng.randint(3, 400), rng.randint(0, 50)) for name in _BOOK["product"]]
    database.executemany("INSERT INTO products(name, price, stock) VALUES (?, ?, ?)", goods)
    orders = [
        (rng.randint(1, 10), rng.randint(1, 10), rng.randint(1, 9), rng.choice(_BOOK["status"]))
        for _ in range(num_orders)
    ]
    database.executemany("INSERT INTO orders(customer_id, product_id, quantity, status) VALUES (?, ?, ?, ?)", orders)
    return database


def tables(database: sqlite3.Connection) -> dict[str, list[list[Any]]]:
    """Every table's rows by id; only whole numbers, texts and None, so that any state can be stored."""
    rows = {name: database.execute(f"SELECT * FROM main.{name} ORDER BY id") for name in _TABLES}
    return {
        name: [[cell if isinstance(cell, int | str | None) else str(cell) for cell in row] for row in found]
        for name, found in rows.items()
    }


def run(database: sqlite3.Connection, query: str) -> str:
    """The rows of a statement as text, or how many it changed. Raises ValueError with SQLite's words."""
    left, changes = iter(range(MAX_STEPS // 10_000)), database.total_changes
    database.set_progress_handler(lambda: next(left, None) is None, 10_000)
    try:
        cursor = database.execute(query)
        if cursor.description is None:
            return f"{database.total_changes - changes} rows changed"
        rows = cursor.fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as problem:
        text = "it takes too long" if "interrupted" in str(problem) else str(problem)
        raise ValueError(text) from None
    finally:
        database.set_progress_handler(None, 0)
    lines = [" | ".join(column[0] for column in cursor.description)]
    lines += [" | ".join("NULL" if cell is None else str(cell)[:200] for cell in row) for row in rows[:MAX_ROWS]]
    return "\n".join([*lines, "(more rows left out)"] if len(rows) > MAX_ROWS else lines)
