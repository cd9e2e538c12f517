"""GGUF files to Hugging Face folders: weights dequantised to float32, the tokenizer with its real pre-tokenizer.

transformers reads a GGUF's tokenizer but gives every byte-level BPE the GPT-2 splitting rule, which tokenises digits
and blanks differently from how most models were trained; `tokenizer.ggml.pre` says which rule is right.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from upswing.errors import ConfigError

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_MODERN_RULE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def convert_gguf(path: Path, target: Path) -> None:
    """Write the model at `path` to folder `target` (safetensors, config, generation config, tokenizer).

    Raises ConfigError for a file that can't be read, an architecture outside the Llama and Qwen families, and tensors
    that aren't there or have no place in the model.
    """
    from gguf import GGUFReader  # builds large tables on import; only conversions need it

    try:
        reader = GGUFReader(str(path))
    except Exception as error:  # numpy's complaints about garbage and about files that end too early
        raise ConfigError(f"{path} is not a readable GGUF file: {error}; is it complete?") from error
    architecture = _field(reader, "general.architecture")
    if architecture not in _ARCHITECTURES:
        allowed = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"{path}: GGUF architecture '{architecture}' is not supported; allowed: {allowed}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    config.tie_word_embeddings = "output.weight" not in tensors
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(config, dtype=torch.float32)
    _fill(path, model, architecture, tensors)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, getattr(config, name))
    model.save_pretrained(target)
    _tokenizer(path, reader, config).save_pretrained(target)


def _field(reader: Any, name: str) -> str:
    """A text field of the file's header; empty when it isn't there."""
    field = reader.fields.get(name)
    return str(field.contents()) if field is not None else ""


@torch.no_grad()
def _fill(path: Path, model: PreTrainedModel, architecture: str, tensors: Mapping[str, Any]) -> None:
    """Copy every tensor of the file into the parameter it belongs to."""
    from gguf import MODEL_ARCH, get_tensor_name_map
    from gguf.quants import dequantize

    config = model.config
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    unused = set(tensors)
    for name, parameter in model.named_parameters():  # a tied output matrix is listed once, as the embedding
        stored = names.get_name(name, (".weight", ".bias")) or ""
        unused.discard(stored)
        found = tensors.get(stored)
        if found is None:
            raise ConfigError(f"{path}: the tensor for '{name}' is missing; is the file complete?")
        value = torch.from_numpy(dequantize(found.data, found.tensor_type).copy())
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            value = _unpermute(value, heads)
        parameter.copy_(value.reshape(parameter.shape))
    if unused:  # such as the rope_freqs of Llama 3.1 and later, without which long contexts are silently wrong
        raise ConfigError(f"{path}: tensor '{min(unused)}' is not supported; use the model's Hugging Face folder")


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's interleaving of rotary pairs: [heads * D, hidden] from pairs (2i, 2i+1) to halves (i, i + D/2)."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).transpose(1, 2).reshape(weight.shape)


def _tokenizer(path: Path, reader: Any, config: PretrainedConfig) -> PreTrainedTokenizerBase:
    """The file's tokenizer, split as the model was trained with."""
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.clean_up_tokenization_spaces = False
    if _field(reader, "tokenizer.ggml.model") == "gpt2":
        _set_splitting(tokenizer.backend_tokenizer, _field(reader, "tokenizer.ggml.pre"), path)
    return tokenizer


def _set_splitting(backend: Any, rule: str, path: Path) -> None:
    """Give a byte-level BPE the splitting rule that GGUF calls `rule`."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if rule == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif rule in ("qwen2", "llama-bpe"):
        digits = r"\p{N}" if rule == "qwen2" else r"\p{N}{1,3}"
        split = pre_tokenizers.Split(Regex(_MODERN_RULE.replace("DIGITS", digits)), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        if rule == "qwen2":
            backend.normalizer = normalizers.NFC()
        else:
            backend.model.ignore_merges = True  # Llama 3: a piece that is a token is that token, merges or not
    elif rule not in ("gpt-2", "gpt2", "default", ""):
        warnings.warn(f"{path}: unknown pre-tokenizer '{rule}'; text may be split differently", stacklevel=2)
