"""Customer service: a policy, a database and a customer who answers; judged by the final database and by what was said.

The shape is tau-bench's (Yao et al. 2024, arXiv:2406.12045); the customer is scripted, so a task is always the same.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from upswing.envs.base import AssistantMessage, Observation
from upswing.envs.generated import GeneratedEnv, book
from upswing.envs.tools import tool
from upswing.trajectory.types import Message, StopReason, Task

_BOOK = book("customer_service")
REFUND_DAYS, PATIENCE, MAX_NUMBERS = 30, 8, 6
"""The customer leaves after PATIENCE answers, and takes nothing from a message with more than MAX_NUMBERS numbers."""
_JUDGED = {"found": True, "asked": True, "read": True}
_ASKED = {"order": "order (number|id)", "email": "mail", "address": "(?<!mail )address"}
_SAME = {
    r"\b(?:can(?:no| no|)t|could(?:n't| not)|(?:un|not )able to)\b": "can't",
    r"\bcancell?ed\b": "cancelled",
    r"\b30[- ]days?\b": "30 days",
}
"""What is taken for the same, so that facts are words and not spellings."""


class CustomerService(GeneratedEnv):
    """The agent talks to a customer and works on a database of orders with tools, following a policy.

    The final state is compared with `final_state`: every order; `found`, the customer and nobody else was looked up,
    before the orders; `asked`, the customer had said yes to what was changed; `read`, the order was looked at before it
    was spoken of; and `said`, whether the last message tells each fact. Options: `orders`, how many the database has;
    `expert_noise`, the chance that the expert first mistypes the e-mail.
    """

    name = "customer_service"
    system = _BOOK["policy"].strip()
    max_turns = 16
    orders: Annotated[int, Field(ge=1, le=200)] = 12

    @tool()
    async def find_customer(self, email: str) -> str:
        """Find a customer by e-mail; -> name and order numbers."""
        found = next((name for name in _BOOK["names"] if _email(name) == email.strip().lower()), "")
        numbers = [number for number, order in self._orders.items() if order["customer"] == found]
        if not numbers:
            raise ValueError(f"no customer has the e-mail {email.strip().lower()[:60]!r}")
        self._customer = found
        if found != self._orders[self._script["order"]]["customer"]:
            self._breaches.add("found")
        return f"{found}: {', '.join(numbers)}"

    @tool()
    async def get_order(self, order: str) -> str:
        """Read an order of the customer that was found."""
        return json.dumps(self._order(order))

    @tool()
    async def cancel_order(self, order: str) -> str:
        """Cancel a pending order."""
        return self._change(order, "cancel", "pending", {"status": "cancelled"})

    @tool()
    async def refund_order(self, order: str) -> str:
        """Refund a delivered order in full."""
        return self._change(order, "refund", "delivered", {"status": "refunded"})

    @tool()
    async def change_address(self, order: str, address: str) -> str:
        """Send a pending order to another address."""
        return self._change(order, "redirect", "pending", {"address": address.strip()})

    def draw(self, rng: random.Random) -> Task:
        request = rng.choice(_BOOK["requests"])
        database, number = self._database(request, rng)
        order, address, does = database[number], _address(rng), request.get("does", "")
        facts = [fact.format(price=order["price"], address=address) for fact in request["facts"]]
        script = {
            "goal": request["says"],
            "order": number,
            "email": _email(order["customer"]),
            "address": address,
            "facts": facts,
        }
        after = copy.deepcopy(database)
        changes = {"cancel": {"status": "cancelled"}, "refund": {"status": "refunded"}, "address": {"address": address}}
        after[number] |= changes.get(does, {})
        unsaid = {"found": False, "read": False, "said": dict.fromkeys(facts, False)}
        return self.make_task(
            json.dumps([request["kind"], script, database]),
            request["says"],
            kind=request["kind"],
            does=does,
            script=script,
            database=database,
            start_state={"orders": database, **_JUDGED, **unsaid},
            final_state={"orders": after, **_JUDGED, "said": dict.fromkeys(facts, True)},
        )

    def _database(self, request: Mapping[str, Any], rng: random.Random) -> tuple[dict[str, dict[str, Any]], str]:
        """Orders by number, and the one that the request is about."""
        numbers = [f"O{number}" for number in rng.sample(range(1000, 9999), self.orders)]
        found = {}
        for place, number in enumerate(numbers):
            about = request if place == 0 else rng.choice(_BOOK["requests"])
            found[number] = {
                "customer": rng.choice(_BOOK["names"]),
                "item": rng.choice(_BOOK["items"]),
                "price": rng.randint(10, 400),
                "status": about["status"],
                "days_ago": rng.randint(*about["days"]),
                "address": _address(rng),
            }
        return dict(sorted(found.items())), numbers[0]

    def start(self, task: Task) -> None:
        self._script: Mapping[str, Any] = task.data["script"]
        self._orders: dict[str, dict[str, Any]] = copy.deepcopy(dict(task.data["database"]))
        self._wanted: Mapping[str, Any] = task.data["final_state"]["orders"]
        self._customer, self._answers, self._agreed, self._read = "", 0, False, False
        self._breaches = set[str]()
        self._said = dict.fromkeys(self._script["facts"], False)

    def final(self) -> Mapping[str, Any]:
        found = bool(self._customer) and "found" not in self._breaches
        asked = "asked" not in self._breaches
        return {"orders": self._orders, "found": found, "asked": asked, "read": self._read, "said": self._said}

    async def step(self, message: AssistantMessage) -> Observation:
        """What is no call goes to the customer, who answers or leaves."""
        seen = await super().step(message)
        if seen.stop_reason is not StopReason.ANSWERED:
            return seen
        reply = self._reply(seen.answer or "")
        if reply is None or self._turns >= self.max_turns:
            reason = StopReason.ENV_DONE if reply is None else StopReason.MAX_TURNS
            return Observation(done=True, stop_reason=reason)
        return Observation(messages=(Message(role="user", content=reply),))

    def _reply(self, text: str) -> str | None:
        """What the customer says to the agent's words; None: nothing more, they leave."""
        text, self._answers = text.lower().replace("’", "'"), self._answers + 1
        for pattern, word in _SAME.items():
            text = re.sub(pattern, word, text)
        heard = text if len(set(re.findall(r"\d+", text))) <= MAX_NUMBERS else ""
        for fact in self._said:
            self._said[fact] = re.search(rf"(?<!\w){re.escape(fact.lower())}(?!\w)", heard) is not None
        settled = self._orders == self._wanted and self._read and all(self._said.values())
        if settled or self._answers > PATIENCE:
            return None
        asked = [f"My {key} is {self._script[key]}." for key in _ASKED if self._asks(text, key)]
        if asked:
            return " ".join(asked)
        if "?" not in text and "confirm" not in text:
            return str(self._script["goal"])
        self._agreed = True
        return "Yes, please."

    def _asks(self, text: str, key: str) -> bool:
        if (key == "address" and "somewhere else" not in self._script["goal"]) or self._script[key].lower() in text:
            return False
        return re.search(_ASKED[key], text) is not None and any(word in text for word in ("?", "please", "your"))

    def _order(self, number: str, tells: bool = True) -> dict[str, Any]:
        """An order; it counts as read when the call `tells` enough: a change or its refusal, all but the price."""
        if not self._customer:
            self._breaches.add("found")
            raise ValueError("find the customer first")
        order = self._orders.get(number.strip())
        if order is None or order["customer"] != self._customer:
            raise ValueError(f"{self._customer} has no order {number[:20]!r}")
        self._read = self._read or (tells and number.strip() == self._script["order"])
        return order

    def _change(self, number: str, what: str, status: str, changed: Mapping[str, str]) -> str:
        order = self._order(number, tells=what != "refund")
        if order["status"] != status:
            raise ValueError(f"can't {what} it: the order is {order['status']}")
        if not self._agreed:
            self._breaches.add("asked")
        order.update(changed)
        return "Done."

    def speak(self, task: Task, messages: tuple[Message, ...], heard: list[str], careless: bool) -> str:
        """Follows the policy: asks, finds, reads, asks for a yes, acts and says so, or says why not."""
        does, told = task.data["does"], [m.content for m in messages if m.role == "user"][1:]
        if not told:
            away = "somewhere" in task.messages[-1].content
            return f"May I have your order number{', your e-mail and the new address' if away else ' and your e-mail'}?"
        order_number, email, address = (_told(told[0], key) for key in ("order", "email", "address"))
        worked = [text for text in heard if not text.startswith("Error")]
        if not worked:
            return self.call("find_customer", email=email.replace("@", "@@") if careless and not heard else email)
        if len(worked) == 1:
            return self.call("get_order", order=order_number)
        order = json.loads(worked[1])
        if not does or (does == "refund" and order["days_ago"] > REFUND_DAYS):
            late = " refund it after 30 days" if order["status"] == "delivered" else " change it: it is shipped"
            return "It has been shipped." if task.data["kind"] == "status" else f"I am sorry, I can't{late}."
        if len(worked) == 3:
            done = {"cancel": "It is cancelled.", "refund": f"I refunded ${order['price']}."}
            return done.get(does, f"It goes to {address} now.")
        if len(told) == 1:
            return "Shall I do that now?"
        if does == "address":
            return self.call("change_address", order=order_number, address=address)
        return self.call(f"{does}_order", order=order_number)


def _told(text: str, key: str) -> str:
    """What the customer said of something; '' when nothing."""
    found = text.partition(f"My {key} is ")[2].partition(". ")[0]
    return found.removesuffix(".")


def _email(name: str) -> str:
    return f"{name.lower()}@example.com"


def _address(rng: random.Random) -> str:
    return f"{rng.randint(1, 99)} {rng.choice(_BOOK['streets'])}"
