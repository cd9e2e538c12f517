"""The training proxy over HTTP, with the `openai` client as people use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from rollout.test_sessions import CALL, TOOLS, USER, a_session, finished
from trajectory.conftest import renderers, tokenizer  # noqa: F401
from upswing.rollout.proxy import Proxy
from upswing.rollout.sessions import Session

pytestmark = pytest.mark.asyncio


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


class Served:
    """A session, its URL and a client that never tries again."""

    def __init__(self, session: Session, proxy: Proxy) -> None:
        self.session, self.proxy = session, proxy
        self.base_url, self.api_key = proxy.open(session)
        self.client = openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, max_retries=0)

    async def ask(self, messages: list[Any], **more: Any) -> Any:
        return await self.client.chat.completions.create(model="any", messages=messages, tools=TOOLS, **more)


@pytest.fixture
async def serve(renderers) -> AsyncIterator[Any]:  # noqa: F811
    proxy = Proxy()
    made: list[Served] = []

    def make(script: Any, **options: Any) -> Served:
        made.append(Served(a_session(renderers["chatml"], script, **options), proxy))
        return made[-1]

    yield make
    for served in made:
        await served.client.close()
        await served.session.close()
    await proxy.close()


async def test_a_tool_loop_and_what_the_client_is_told(serve) -> None:
    served = serve([CALL, "<think>easy</think>It is Paris."])
    assert [model.id for model in (await served.client.models.list()).data] == ["policy"]
    first = await served.ask([USER], temperature=0, seed=3)
    choice = first.choices[0]
    assert (choice.finish_reason, choice.message.content, first.model) == ("tool_calls", None, "any")
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"query": "né"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "Paris"}
    second = await served.ask([USER, choice.message, result], logprobs=True)
    assert second.choices[0].message.content == "It is Paris."
    assert second.choices[0].message.reasoning_content == "easy"
    scored = second.choices[0].logprobs.content
    assert {one.logprob for one in scored} == {-0.5} and len(scored) == second.usage.completion_tokens
    assert "".join(one.token for one in scored) == "<think>easy</think>It is Paris.<|im_end|>"
    assert second.usage.prompt_tokens == len(served.session.engine.calls[1].prompt)
    assert served.session.engine.calls[0].sampling.temperature == 1.0, "the stage decides"
    assert all(bytes(one.bytes).decode() == one.token for one in scored)
    trajectory = finished(served.session)
    assert (len(trajectory.branches), trajectory.answer) == (1, "It is Paris.")
    assert trajectory.state["ignored_parameters"] == ["seed", "temperature"]


async def test_a_stream_tells_the_same_as_an_answer_in_one_piece(serve) -> None:
    served = serve([f"{CALL}{CALL}", "It is Paris."])
    stream = await served.ask([USER], stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "look"), (1, "look")]
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    echoed = {
        "role": "assistant",
        "tool_calls": [{"id": c.id, "type": "function", "function": c.function.to_dict()} for c in calls],
    }
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Paris"} for call in calls]
    chunks = [chunk async for chunk in await served.ask([USER, echoed, *results], stream=True)]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "It is Paris."
    assert len(finished(served.session).branches) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"n": 2}, "n 2 isn't supported"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"tool_choice": "required"}, "call can't be forced"),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "call can't be forced"),
        ({"max_tokens": 0}, "at least 1"),
        ({"stop": [""]}, "none empty"),
        ({"messages": []}, "at least one message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "parts of type",
        ),
        ({"messages": [{"role": "function", "content": "x"}]}, "allowed: system"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "tool call",
        ),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "not as OpenAI's API has it"),
        ({"messages": [{"role": "assistant", "tool_calls": 7}]}, "not as OpenAI's API has it"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}]}
                ]
            },
            "RecursionError",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools must be"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}, 3]}, "tools must be"),
    ],
)
async def test_what_cannot_be_done_is_refused_in_words(serve, more, words) -> None:
    served = serve(["never"])
    async with httpx.AsyncClient() as http:
        answer = await http.post(
            f"{served.base_url}/chat/completions", json={"messages": [USER], "tools": TOOLS, **more}
        )
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert not served.session.turns


async def test_harmless_extras_are_let_through(serve) -> None:
    served = serve(["yes"])
    more = {"n": 1, "presence_penalty": 0, "user": "me", "parallel_tool_calls": False, "tool_choice": "auto"}
    assert (await served.ask([USER], **more)).choices[0].message.content == "yes"
    assert finished(served.session).state["ignored_parameters"] == ["parallel_tool_calls", "user"]


@pytest.mark.parametrize("more", [{"logprobs": True}, {"stream": True, "stream_options": [1]}])
async def test_half_characters_and_lone_surrogates_break_nothing(serve, more) -> None:
    lines: list[Any] = []
    served = serve(lines)
    lines.append(served.session.renderer.encode("🎉")[:1])
    body = {"model": "\ud800", "messages": [{"role": "user", "content": "\ud800"}], "user": "\ud800", **more}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{served.base_url}/chat/completions", content=json.dumps(body).encode())
    assert answer.status_code == 200
    if "stream" in more:
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        [half] = answer.json()["choices"][0]["logprobs"]["content"]
        assert (half["token"], half["bytes"]) == ("\ufffd", None)
    assert finished(served.session).messages[0].content == "?"


async def test_limits_and_faults_have_the_status_that_clients_know(serve) -> None:
    served = serve(["one"], context_tokens="little")
    first = await served.ask([USER])
    with pytest.raises(openai.BadRequestError) as refused:
        await served.ask([USER, first.choices[0].message, USER])
    assert refused.value.code == "context_length_exceeded"
    broken = serve([OSError("gpu is gone")])
    with pytest.raises(openai.InternalServerError, match="gpu is gone"):
        await broken.client.with_options(max_retries=3).chat.completions.create(model="m", messages=[USER])
    assert len(broken.session.engine.calls) == 1, "it isn't tried again: the trajectory is lost already"


async def test_sessions_end_and_unknown_ones_are_not_found(serve) -> None:
    served = serve(["late"])
    served.session.engine.delay_s = 60.0
    running = asyncio.ensure_future(served.ask([USER]))
    await until(lambda: served.session.engine.calls)
    served.proxy.drop(served.api_key)
    await served.session.close()
    with pytest.raises(openai.APIStatusError) as over:
        await running
    assert over.value.status_code == 410
    with pytest.raises(openai.NotFoundError):
        await served.ask([USER])
    with pytest.raises(openai.NotFoundError):
        await served.client.embeddings.create(model="m", input="x")


async def test_a_client_that_hangs_up_stops_the_sampling_and_its_retry_is_one_turn(serve) -> None:
    served = serve(lambda *_: "quick" if len(served.session.engine.calls) > 1 else "slow")
    engine = served.session.engine
    engine.delay_s = 60.0
    hasty = served.client.with_options(timeout=0.4, max_retries=5)
    running = asyncio.ensure_future(hasty.chat.completions.create(model="m", messages=[USER], tools=TOOLS))
    await until(lambda: served.session.counts["abandoned_requests"])
    engine.delay_s = 0.0
    assert (await running).choices[0].message.content == "quick"
    assert finished(served.session).num_turns == 1
    async with httpx.AsyncClient() as http:
        body = {"messages": [USER], "tools": TOOLS}
        url, header = f"{served.base_url}/chat/completions", {"x-stainless-retry-count": "1"}
        answers = [(await http.post(url, json=body, headers=header)).json() for _ in range(2)]
    assert [one["id"] for one in answers] == ["chatcmpl-1", "chatcmpl-1"], "a retried body is answered once"


async def test_many_sessions_at_once_stay_apart(serve) -> None:
    many = [serve([f"{CALL}", f"answer {number}"]) for number in range(20)]

    async def play(served: Served) -> str:
        first = (await served.ask([USER])).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "x"}
        return str((await served.ask([USER, first, result])).choices[0].message.content)

    assert await asyncio.gather(*map(play, many)) == [f"answer {number}" for number in range(20)]
    assert all(len(finished(served.session).branches) == 1 for served in many)
