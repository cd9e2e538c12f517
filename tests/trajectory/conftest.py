"""A small byte-level BPE tokenizer that knows the special tokens of every template under tests/templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from upswing.trajectory.render import ChatRenderer

TEMPLATES = Path(__file__).parents[1] / "templates"
TEMPLATE_NAMES = ("chatml", "qwen2_5", "qwen3", "llama3")
PARTIAL_NAMES = ("zephyr", "llama2", "gemma")
"""Templates that drop or refuse some roles."""
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CORPUS = (
    "You are a helpful assistant. What is the capital of France? The capital is Paris.\n\n<search>q</search>\n",
    "<information>Paris is the capital and largest city of France.</information>\n<answer>Paris</answer>\n\n\n",
    '{"name": "search", "arguments": {"query": "the largest city"}}\n  {"type": "string", "default": null}\n',
)
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen 2 split text before the merges: line breaks stay together, whatever follows."""


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS * 3, trainer)
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|begin_of_text|>", eos_token="<|endoftext|>")


@pytest.fixture(scope="session")
def renderers(tokenizer: PreTrainedTokenizerFast) -> dict[str, ChatRenderer]:
    return {
        name: ChatRenderer(tokenizer, (TEMPLATES / f"{name}.jinja").read_text())
        for name in (*TEMPLATE_NAMES, *PARTIAL_NAMES)
    }
