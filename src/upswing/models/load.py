"""Loads models and their tokenizers; `resolve` finds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from upswing.errors import ConfigError
from upswing.models.attention import NAME
from upswing.models.resolve import SMOLLM2 as SMOLLM2
from upswing.models.resolve import TINY, first_line, no_progress_bars, resolve_model
from upswing.models.tiny import tiny_model, tiny_tokenizer

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|end|>")


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, ready for the `upswing` attention, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: Path
    """Folder that it was read from; `Path('tiny')` for `tiny`, which has none."""
    name: str
    """The spec as given."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return stop_token_ids(self.model, self.tokenizer)


def load_tokenizer(spec: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """A model's tokenizer, with another chat template if one is given. Raises as `load_model` does."""
    path = resolve_model(spec)
    try:  # broken files raise many kinds: transformers', tokenizers' and safetensors' own, KeyError, RuntimeError
        tokenizer: Any = tiny_tokenizer() if spec == TINY else AutoTokenizer.from_pretrained(path)
    except Exception as error:
        raise ConfigError(f"model '{spec}': no usable tokenizer in {path}: {first_line(error)}") from error
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    held: PreTrainedTokenizerBase = tokenizer
    return held


def load_model(
    spec: str, *, dtype: torch.dtype | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> LoadedModel:
    """Load model and tokenizer, unless that is there already. `dtype` None is float32.

    Raises ModelNotFound (see `resolve_model`) and ConfigError for a model that can't be used.
    """
    dtype = dtype or torch.float32
    tokenizer = load_tokenizer(spec) if tokenizer is None else tokenizer
    if spec == TINY:
        return LoadedModel(tiny_model(dtype), tokenizer, Path(TINY), spec)
    path = resolve_model(spec)
    factory: Any = AutoModelForCausalLM
    try:
        with no_progress_bars():
            model, report = factory.from_pretrained(
                path, dtype=dtype, attn_implementation=NAME, output_loading_info=True
            )
    except Exception as error:
        raise ConfigError(f"model '{spec}': can't load {path}: {first_line(error)}") from error
    if report["missing_keys"]:  # transformers fills them with random numbers
        raise ConfigError(f"model '{spec}': {path} has no weights for '{sorted(report['missing_keys'])[0]}'")
    _check_supported(model, spec)
    # Rows are never padded here, and a padding id (often the end token's) would cut that embedding off from gradients.
    model.get_input_embeddings().padding_idx = None
    return LoadedModel(model.eval(), tokenizer, path, spec)


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All ids that end a completion, ascending: generation config's and config's lists, tokenizer's, end of turn."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        ids.update(eos if isinstance(eos, list | tuple) else [] if eos is None else [eos])
    vocab = tokenizer.get_vocab()
    template = str(getattr(tokenizer, "chat_template", None) or "")
    ids.update(vocab[token] for token in _END_OF_TURN if token in vocab and token in template)
    return tuple(sorted(ids))


def _check_supported(model: PreTrainedModel, spec: str) -> None:
    """Refuse what the attention would compute wrongly: sliding windows shorter than the context."""
    config = model.config
    layers = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if layers - {"full_attention"} or (not layers and window and window < config.max_position_embeddings):
        raise ConfigError(f"model '{spec}' uses sliding-window attention, which is not supported; use another model")
