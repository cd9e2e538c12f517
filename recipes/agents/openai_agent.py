"""An agent as people write them, with the `openai` client and one tool. It knows nothing of training.

`run` is what a recipe's `agent.function` names. As a command (`agent.command: [python, path/openai_agent.py]`) it reads
the task from stdin and prints the answer; the client then finds the model in OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import DefaultHttpxClient, OpenAI

MAX_CALLS = 8
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "description": "Say what a key stands for.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]
HTTP = DefaultHttpxClient()
"""Shared by all runs: making a client costs more than a small model's turn."""


def solve(client: OpenAI, question: str, facts: dict[str, str]) -> str | None:
    """The answer to `question`; None when it isn't found within MAX_CALLS calls."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        if not reply.tool_calls:
            return reply.content
        messages.append(reply)
        for call in reply.tool_calls:
            key = json.loads(call.function.arguments).get("key", "")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": facts.get(key, "unknown")})
    return None


def run(task: Any, base_url: str, api_key: str) -> str | None:
    client = OpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    return solve(client, task.messages[0].content, task.data["facts"])


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(solve(OpenAI(), given["messages"][0]["content"], given["data"]["facts"]) or "")
