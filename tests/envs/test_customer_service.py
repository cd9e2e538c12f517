"""The customer understands what means the same, gives what is asked for, and the policy's every rule is judged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from upswing.envs import AssistantMessage
from upswing.envs.customer_service import CustomerService
from upswing.trajectory.types import Task
from upswing.verify.actions import State


def task_of(kind: str) -> Task:
    return next(task for task in CustomerService().tasks("train", 0) if task.tags["kind"] == kind)


def played(task: Task, *turns: str) -> tuple[float | None, list[str], dict[str, Any]]:
    """Says the turns, with {order}, {email}, {address} and {price} filled in -> (score, what was heard, state)."""
    env, script = CustomerService(), task.data["script"]
    price = task.data["database"][script["order"]]["price"]
    heard = []

    async def run() -> None:
        await env.reset(task, 0)
        for turn in turns:
            name, _, argument = turn.partition(": ")
            found = name.isidentifier()
            text = argument.format(**script, price=price) if found else turn.format(**script, price=price)
            if found:
                keys = {"find_customer": ["email"], "change_address": ["order", "address"]}.get(name, ["order"])
                text = env.call(name, **dict(zip(keys, text.split(" / "), strict=True)))
            seen = await env.step(AssistantMessage(content=text))
            heard.extend(message.content for message in seen.messages)
            if seen.done:
                break

    asyncio.run(run())
    return State()(env.state(), task.data).value, heard, dict(env.state())


FIND, READ = "find_customer: {email}", "get_order: {order}"
CANCEL, REFUND = "cancel_order: {order}", "refund_order: {order}"
MOVE = "change_address: {order} / {address}"


@pytest.mark.parametrize(
    ("kind", "turns"),
    [
        (
            "cancel",
            ["What is your e-mail?", FIND, READ, "Shall I cancel order number {order}?", CANCEL, "It is canceled."],
        ),
        (
            "cancel",
            ["I can't do that without your order number.", FIND, READ, "Please confirm.", CANCEL, "I’ve cancelled it."],
        ),
        ("cancel_late", ["Please give me your e-mail.", FIND, READ, "I am unable to cancel it: it has shipped."]),
        ("cancel_late", ["If it is shipped I can't. Your e-mail?", FIND, CANCEL, "I could not, it's shipped."]),
        ("refund", [FIND, READ, "Shall I refund ${price}?", REFUND, "You get ${price}.00 back, within 30 days."]),
        ("refund_late", [FIND, READ, "We have a 30-day limit, so I cannot."]),
        ("address", ["Your new address, please", FIND, READ, "May I send it to {address}?", MOVE, "To {address}."]),
        ("status", [FIND, READ, "It was shipped."]),
    ],
)
def test_a_right_play_wins_however_it_is_worded(kind: str, turns: list[str]):
    assert played(task_of(kind), *turns)[0] == 1


@pytest.mark.parametrize(
    ("kind", "turns", "broken"),
    [
        ("cancel", [FIND, READ, "cancel_order: {order}", "It is cancelled."], "asked"),
        ("cancel", [READ, FIND, READ, "Shall I?", "cancel_order: {order}", "It is cancelled."], "found"),
        ("status", ["It is shipped."], "read"),
        ("refund", [FIND, "Shall I?", "refund_order: {order}", "I refunded ${price}."], "read"),
    ],
)
def test_each_rule_of_the_policy_counts(kind: str, turns: list[str], broken: str):
    score, _, state = played(task_of(kind), *turns)
    assert score == 0 and state[broken] is False


def test_looking_up_somebody_else_breaks_the_policy():
    task = task_of("status")
    customers = {order["customer"].lower() for order in task.data["database"].values()}
    other = next(name for name in customers if not task.data["script"]["email"].startswith(name))
    score, _, state = played(task, f"find_customer: {other}@example.com", FIND, READ, "It is shipped.")
    assert score == 0 and state["found"] is False


def test_only_the_last_message_tells_and_only_in_whole_words_and_few_numbers():
    done = [FIND, READ, "Shall I?", "refund_order: {order}"]
    recited = " ".join(map(str, range(10, 401)))
    task = task_of("refund")
    for last in ("You get 1{price}5 back.", recited, "I refunded it all."):
        assert played(task, *done, last)[0] == 0
    late = task_of("cancel_late")
    assert played(late, FIND, READ, "It is shipped.", "So I can't.")[0] == 0
    assert played(late, FIND, READ, "I can't.", "I can't: shipped.")[0] == 1


def test_the_customer_gives_what_is_asked_for_and_says_yes_only_to_a_question():
    task = task_of("address")
    script = task.data["script"]
    _, heard, _ = played(
        task,
        "I need your order number.",
        "And please your mail address.",
        "Where to? Which new address?",
        "Hm.",
        "Now?",
    )
    assert heard == [
        f"My order is {script['order']}.", f"My email is {script['email']}.", f"My address is {script['address']}.",
        script["goal"], "Yes, please.",
    ]  # fmt: skip
