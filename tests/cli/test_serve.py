"""`upswing serve`, as a process, talked to with the `openai` client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest
import torch
from typer.testing import CliRunner

from upswing.cli.main import app
from upswing.models.load import load_model
from upswing.trajectory.render import ChatRenderer
from upswing.trajectory.types import Message

SAID = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    command = [sys.executable, "-m", "upswing.cli.main", "serve", "tiny", "--port", "0", "--max-tokens", "12"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    yield openai.OpenAI(base_url=process.stdout.readline().strip(), api_key="none", max_retries=0, timeout=60)
    process.send_signal(signal.SIGINT)
    process.wait(20)


def test_greedy_answers_are_the_models_own(client: openai.OpenAI) -> None:
    loaded = load_model("tiny")
    renderer = ChatRenderer(loaded.tokenizer)
    prompt = renderer.encode(renderer.render_guarded([Message(role="user", content="abc")], ()))
    ids = list(prompt)
    while len(ids) < len(prompt) + 12 and (len(ids) == len(prompt) or ids[-1] not in loaded.stop_tokens):
        with torch.no_grad():
            ids.append(int(loaded.model(torch.tensor([ids])).logits[0, -1].argmax()))
    found = client.chat.completions.create(model="m", messages=SAID, temperature=0, logprobs=True)
    choice = found.choices[0]
    tokens = [one.token for one in choice.logprobs.content]
    assert tokens == [renderer.decode([token]) for token in ids[len(prompt) :]]
    assert found.usage.prompt_tokens == len(prompt) and found.usage.completion_tokens == len(ids) - len(prompt)


def test_samples_with_a_seed_repeat_and_several_differ(client: openai.OpenAI) -> None:
    def texts(**more):
        return [c.message.content for c in client.chat.completions.create(model="m", messages=SAID, **more).choices]

    assert texts(seed=5, n=3) == texts(seed=5, n=3)
    assert len(set(texts(seed=5, n=8))) > 1
    assert texts() != texts() or texts() != texts()


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=SAID, seed=3).choices[0].message.content
    parts = client.chat.completions.create(model="m", messages=SAID, seed=3, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == whole


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"temperature": -1}, "temperature must be a number from 0"),
        ({"n": 0}, "n must be a number from 1"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"n": 2, "stream": True}, "can't be streamed"),
        ({"presence_penalty": 1}, "presence_penalty 1 isn't supported"),
    ],
)
def test_what_it_cannot_do_is_refused(client: openai.OpenAI, more, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model="m", messages=SAID, **more)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["tiny"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["tiny", "--stage", "rl"], "--stage needs a run folder"),
        (["tiny", "--protocol", "xml"], "--protocol is 'xml'"),
        (["tiny", "--tools-in", "template", "--port", "0"], "--tools-in: got 'template', but the chat template"),
        (["tiny", "--quantize", "int4"], "--quantize is 'int4'"),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_model_loads(args: list[str], words: str) -> None:
    found = CliRunner().invoke(app, ["serve", *args])
    assert found.exit_code == 2 and words in found.output
