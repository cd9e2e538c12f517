"""The real 135M model: its tokenizer as published, and the engine against Hugging Face on real text."""

import asyncio

import pytest
import torch

from upswing.engine.base import Sampling
from upswing.engine.torch import TorchEngine
from upswing.models.load import LoadedModel, load_model

pytestmark = pytest.mark.real

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about rivers.",
    "How many days has a week? Answer in one word.",
    "Name three colours, separated by commas.",
]


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2-135m")


def chat(loaded: LoadedModel, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(loaded.tokenizer(text).input_ids)


def test_tokenizer_is_the_published_one(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert smollm2.stop_tokens == (2,)
    assert len(tokenizer) == smollm2.model.config.vocab_size == 49152
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>").input_ids == [0, 1, 2]
    # Digits one by one, and blanks before them kept together: not so under GPT-2's rule.
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  1234").input_ids) == ["a", "ĠĠ", "1", "2", "3", "4"]
    for text in ("Zürich, 東京 and Москва: 1,234.5 km²\n\n\tend ", "<search>capital of France</search>\n", "🙂🙃"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    rendered = tokenizer.decode(chat(smollm2, "Hi"))
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_greedy_equals_hugging_face(smollm2: LoadedModel) -> None:
    prompts = [chat(smollm2, question) for question in QUESTIONS]
    sampling = Sampling(max_tokens=24, temperature=0, stop_tokens=smollm2.stop_tokens)
    engine = TorchEngine.from_model(smollm2.model, dtype=torch.float32, device="cpu")
    done = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
    await engine.close()
    assert "Paris" in smollm2.tokenizer.decode(done[0].tokens)
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([prompt])
        out = smollm2.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert completion.tokens == tuple(out[0, len(prompt) :].tolist())
        with torch.inference_mode():
            logits = smollm2.model(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.engine_logprobs), expected, atol=1e-4, rtol=0)
