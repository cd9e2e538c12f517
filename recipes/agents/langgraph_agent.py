"""A LangGraph agent with one tool: a model node and a tool node that take turns. It knows nothing of training."""

from __future__ import annotations

from typing import Any

import httpx
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

MAX_STEPS = 16
HTTP, ASYNC_HTTP = httpx.Client(timeout=600), httpx.AsyncClient()
"""Shared by all runs: making a client costs more than a small model's turn."""


def run(task: Any, base_url: str, api_key: str) -> str | None:
    facts = task.data["facts"]

    @tool
    def get(key: str) -> str:
        """Say what a key stands for."""
        return str(facts.get(key, "unknown"))

    clients: Any = {"http_client": HTTP, "http_async_client": ASYNC_HTTP}
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, **clients).bind_tools([get])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([get]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    question = {"messages": [("user", task.messages[0].content)]}
    try:
        state = graph.compile().invoke(question, {"recursion_limit": MAX_STEPS})
    except GraphRecursionError:
        return None  # giving up is an answer; an exception would be taken for a fault of the program
    return str(state["messages"][-1].content)
