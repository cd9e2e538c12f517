"""Web shop: pages with links and buttons; find the thing that was asked for, choose its options and buy it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from upswing.envs.base import Expert
from upswing.envs.generated import GeneratedEnv, book
from upswing.envs.tools import tool
from upswing.trajectory.types import Message, Task

_BOOK = book("web_shop")
PER_PAGE, CATALOGUE_SEED = 5, 0


class WebShop(GeneratedEnv):
    """`search(words)` and `click(button)`; every page names its buttons in square brackets. The final state says what
    was bought, for how much, and whether it is all that was asked for (`right`). Splits share no sort of product
    (`steel lamp`).

    Options: `products`, how many the shop has; `expert_noise`, the chance that the expert first opens another product.
    """

    name = "web_shop"
    products: Annotated[int, Field(ge=20, le=5000)] = 300

    def enough_turns(self) -> int:
        """To look at every product of the commonest sort."""
        most = max(Counter((item["material"], item["kind"]) for item in catalogue(self.products).values()).values())
        return 2 * most + most // PER_PAGE + 8

    def draw(self, rng: random.Random) -> Task:
        shop = catalogue(self.products)
        code = rng.choice(list(shop))
        item = shop[code]
        options = {kind: rng.choice(values) for kind, values in item["options"].items()}
        limit = item["price"] + rng.randint(1, 10)
        asked = ", ".join(f"{kind} {value}" for kind, value in options.items())
        text = f"Buy a {item['material']} {item['kind']} ({asked}) for at most ${limit}."
        wanted = {"kind": item["kind"], "material": item["material"], "options": options, "limit": limit}
        return self.make_task(
            f"{self.products} {text}",
            text,
            split_by=f"{item['material']} {item['kind']}",
            products=self.products,
            wanted=wanted,
            start_state={"right": False},
            final_state={"right": True},
        )

    def start(self, task: Task) -> None:
        self._wanted: Mapping[str, Any] = task.data["wanted"]
        self._shop = catalogue(task.data["products"])
        self._found: list[str] = []
        self._page, self._item, self._chosen = 0, "", dict[str, str]()
        self._bought: dict[str, Any] | None = None

    def final(self) -> Mapping[str, Any]:
        return {"bought": self._bought, "right": self._bought is not None and self._is_right(self._bought)}

    def is_done(self) -> bool:
        return self._bought is not None

    def _is_right(self, bought: Mapping[str, Any]) -> bool:
        same = all(bought[key] == self._wanted[key] for key in ("kind", "material", "options"))
        return same and bought["price"] <= self._wanted["limit"]

    @tool()
    async def search(self, words: str) -> str:
        """Search the shop."""
        asked = set(words.lower().replace(",", " ").split())
        scored = [(-len(asked & set(item["title"].lower().split())), code) for code, item in self._shop.items()]
        self._found = [code for score, code in sorted(scored) if score]
        self._page, self._item = 0, ""
        return self._results()

    def _results(self) -> str:
        if not self._found:
            return "Nothing was found. Search for other words."
        first = self._page * PER_PAGE
        shown = self._found[first : first + PER_PAGE]
        lines = [f"[{code}] {self._shop[code]['title']}, ${self._shop[code]['price']}" for code in shown]
        more = ["[next]"] if first + PER_PAGE < len(self._found) else []
        links = " ".join(["[previous]"] * (self._page > 0) + more)
        return "\n".join([f"{len(self._found)} results, page {self._page + 1}", *lines, links]).rstrip()

    def _item_page(self) -> str:
        item = self._shop[self._item]
        lines = [f"{item['title']}, ${item['price']}"]
        for kind, values in item["options"].items():
            shown = (f"[{value}]" + (" (chosen)" if self._chosen.get(kind) == value else "") for value in values)
            lines.append(f"{kind}: " + " ".join(shown))
        return "\n".join([*lines, "[buy] [back]"])

    @tool()
    async def click(self, button: str) -> str:
        """Press a button of the page, by the text in its brackets."""
        button = button.strip().strip("[]")
        if self._item:
            return self._click_item(button)
        if button in self._found[self._page * PER_PAGE : (self._page + 1) * PER_PAGE]:
            self._item, self._chosen = button, {}
            return self._item_page()
        last = (len(self._found) - 1) // PER_PAGE
        if button == "next" and self._page < last:
            self._page += 1
        elif button == "previous" and self._page:
            self._page -= 1
        else:
            raise ValueError(f"there is no button [{button[:40]}] on this page")
        return self._results()

    def _click_item(self, button: str) -> str:
        item = self._shop[self._item]
        if button == "back":
            self._item = ""
            return self._results()
        if button == "buy":
            open_ = [kind for kind in item["options"] if kind not in self._chosen]
            if open_:
                raise ValueError(f"choose a {open_[0]} first")
            bought = {key: item[key] for key in ("kind", "material", "price")}
            self._bought = {"code": self._item, **bought, "options": dict(self._chosen)}
            return "Thank you for your order."
        for kind, values in item["options"].items():
            if button in values:
                self._chosen[kind] = button
                return self._item_page()
        raise ValueError(f"there is no button [{button[:40]}] on this page")

    def expert(self, task: Task, rng: random.Random) -> Expert:
        """Searches for the words of the task, reads the results page by page, and buys the first that fits."""
        wanted, careless = task.data["wanted"], rng.random() < self.expert_noise
        title, done = f"{wanted['material']} {wanted['kind']}", list[str]()

        def act(messages: tuple[Message, ...]) -> str:
            page = messages[-1].content
            if messages[-1].role != "tool":
                return self.call("search", words=title)
            if "results, page" in page:
                lines = [line for line in page.splitlines() if line.startswith("[") and "$" in line]
                wrong = [line for line in lines if title not in line]
                fits = [line for line in lines if title in line and int(line.rsplit("$")[1]) <= wanted["limit"]]
                fits = [line for line in fits if line[1:].split("]")[0] not in done]
                pick = wrong if careless and wrong and not done else fits
                if not pick:
                    return self.call("click", button="next")
                done.append(pick[0][1:].split("]")[0])
                return self.call("click", button=done[-1])
            if title not in page.splitlines()[0]:
                return self.call("click", button="back")
            for kind, value in wanted["options"].items():
                if f"{kind}: " not in page or f"[{value}]" not in page:
                    return self.call("click", button="back")
                if f"[{value}] (chosen)" not in page:
                    return self.call("click", button=value)
            return self.call("click", button="buy")

        return act


@lru_cache(maxsize=4)
def catalogue(count: int) -> dict[str, dict[str, Any]]:
    """The shop's products by code: always the same for the same number of them."""
    rng = random.Random(CATALOGUE_SEED)
    shop: dict[str, dict[str, Any]] = {}
    for number in range(count):
        kind, material = rng.choice(list(_BOOK["kinds"])), rng.choice(_BOOK["materials"])
        options = {option: sorted(rng.sample(_BOOK[option], 3)) for option in _BOOK["kinds"][kind]}
        style = rng.choice(_BOOK["styles"])
        title = f"{style} {material} {kind}"
        shop[f"B{number:04d}"] = {
            "title": title, "kind": kind, "material": material, "price": rng.randint(5, 90), "options": options
        }  # fmt: skip
    return shop
