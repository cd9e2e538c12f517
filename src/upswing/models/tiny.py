"""`tiny`: a small randomly initialised Llama with its own tokenizer, made in code. For tests and runs of seconds."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from upswing.models.attention import use_upswing_attention

VOCAB_SIZE = 928
MAX_CONTEXT = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1, 2, as in SmolLM2."""
PROTOCOL_TOKENS = tuple(
    f"<{slash}{tag}>"
    for tag in ("search", "answer", "think", "information", "result", "tool_call", "tool_response")
    for slash in ("", "/")
)
"""Ordinary text that agents write often: one token each, kept by `decode(skip_special_tokens=True)`."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_WORD_LIST = """
system user assistant tool search answer think result information question query found nothing error name arguments
content the of and to in is a an for with on by at from as that this it are was what which who where how many much
you your must only use then when no not yes or more most less than between each both first second third last
capital city cities country countries population currency code language languages neighbour neighbours border
borders region subdivision continent area latitude longitude north south east west largest smallest number count
total people live lies river sea island state province world Europe Asia Africa America Oceania France Germany Spain
Italy Poland Japan China India Brazil Canada Mexico Egypt Kenya Paris Berlin Madrid Rome Warsaw Tokyo London
add plus minus times sum value key list item get set put move left right up down open close go take look room door
start end step reward task try again retry wrong correct true false none passage document title text about write read
one two three four five six seven eight nine ten zero official spoken has have does do can will its their there
"""


@lru_cache(maxsize=1)
def _merges(num_merges: int) -> tuple[tuple[str, str], ...]:
    """Byte-pair merges learned on the word list; ties go to the alphabetically first pair, so always the same."""
    words = [list(form) for word in dict.fromkeys(_WORD_LIST.split()) for form in (word, "Ġ" + word)]
    merges: list[tuple[str, str]] = []
    while len(merges) < num_merges:
        pairs = Counter(pair for word in words for pair in pairwise(word))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = ["".join(best)]
                i += 1
    return tuple(merges)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML, digits one by one, and the protocol's tags as single ordinary tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = VOCAB_SIZE - len(SPECIAL_TOKENS) - len(PROTOCOL_TOKENS) - len(alphabet)
    merges = _merges(num_merges)
    pieces = [*SPECIAL_TOKENS, *PROTOCOL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in PROTOCOL_TOKENS])
    factory: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = factory(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        model_max_length=MAX_CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights from seed 0, in eval mode; the global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_CONTEXT,
        # About 1 / sqrt(hidden_size): with the usual 0.02 so narrow a model takes ten times as long to learn to copy.
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    use_upswing_attention(model)
    model.generation_config.pad_token_id = 0
    held: PreTrainedModel = model.to(dtype).eval()
    return held
