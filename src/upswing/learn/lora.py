"""LoRA: a frozen model plus a small trained update, W + scaling * B @ A, in each adapted layer (Hu et al., 2106.09685).

scaling is alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski, 2312.03732). B starts at zero, so a fresh adapter
changes nothing. QLoRA (Dettmers et al., 2305.14314) keeps the frozen weights of the adapted layers in 4 bits.
Layers are peft's; the model keeps its class, so that whatever works on the plain one works on this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from upswing.engine.adapter import Adapter
from upswing.errors import ConfigError, did_you_mean
from upswing.models.heads import scalar_head

ALL_LINEAR = "all-linear"
ADAPTER = "adapter"
"""Folder beside a checkpoint's merged weights: the adapter as peft writes it."""
_NAME = "default"
_WEIGHTS = "adapter_model.safetensors"


def add_lora(
    model: Any,
    *,
    r: int = 16,
    alpha: float = 32.0,
    dropout: float = 0.0,
    target: Sequence[str] = (ALL_LINEAR,),
    rslora: bool = False,
    quantize: str = "none",
) -> Any:
    """Freeze `model`, in place, and add a float32 adapter drawn from torch's global generator -> the same model.

    `target`: names of linear layers such as q_proj. Embeddings and heads aren't adapted: they are used as plain (often
    tied) weights. A scalar head is trained in full. `quantize`: none or 4bit. Raises ConfigError for an unknown target,
    and where peft or 4-bit arithmetic is missing.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(f"lora needs peft ({error}); install with: pip install 'upswing[lora]'") from None
    names = _targets(model, target)
    if quantize == "4bit":
        _quantize(model, names)
    task = None if model.get_output_embeddings() is None else "CAUSAL_LM"
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,  # type: ignore[arg-type]  # any positive number is fine
        lora_dropout=dropout,
        target_modules=names,
        use_rslora=rslora,
        task_type=task,
    )
    inject_adapter_in_model(config, model, _NAME)
    model.is_loaded_in_4bit = False  # read by the injection only; transformers refuses much for such models
    config.base_model_name_or_path = getattr(model.config, "_name_or_path", None) or None
    head = scalar_head(model)
    if head is not None:
        head.requires_grad_(True)
        # Set late, for the saved file only: peft would wrap the head, and the packed forward reads its plain weight.
        config.modules_to_save = ["score"]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether some layer has an adapter."""
    return any(".lora_A." in name for name, _ in model.named_parameters())


class PlainWeights(Mapping[str, torch.Tensor]):
    """A model's weights by plain Hugging Face name, each once (a tied one under its first name), adapters merged.

    A value is made when it is read: the parameter itself, not a copy, or for an adapted layer a new float32 tensor from
    the frozen weight, which is never written to. Raises ConfigError for adapters whose merge isn't W + scaling * B @ A.
    """

    def __init__(self, model: torch.nn.Module, *, merged: bool = True) -> None:
        self._model, self._merged = model, merged
        self._found: dict[str, tuple[torch.Tensor, Any]] = {}
        layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_A")}
        for name, parameter in model.named_parameters():
            plain, layer = name.replace(".base_layer.", "."), layers.get(name.removesuffix(".base_layer.weight"))
            if ".modules_to_save." in name or (layer and (getattr(layer, "lora_variant", None) or layer.merged)):
                raise ConfigError(f"'{name}' is of an adapter that can't be merged; use plain LoRA, as add_lora makes")
            if ".lora_" not in name:
                self._found[plain] = (parameter.detach(), layer)

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        weight, layer = self._found[name]
        if layer is None:
            return weight
        weight = _dequantized(layer.get_base_layer().weight)
        for adapter in layer.active_adapters if self._merged else ():
            if adapter in layer.lora_A:
                weight = weight + layer.get_delta_weight(adapter).float()
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @property
    def adapter(self) -> Adapter | None:
        """For an engine that takes one in place of merged weights; None: nothing is adapted."""
        if not is_adapted(self._model):
            return None
        frozen = PlainWeights(self._model, merged=False)
        return Adapter(of=self._model, frozen=frozen, save=partial(save_adapter, self._model))


def save_adapter(model: Any, folder: Path) -> None:
    """Write what is trained as peft does: `PeftModel.from_pretrained(base, folder)` reads it."""
    folder.mkdir()
    model.peft_config[_NAME].save_pretrained(str(folder))
    tensors = {_saved_name(name): tensor.detach().contiguous() for name, tensor in trained(model).items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def load_adapter(model: Any, folder: Path) -> None:
    """Copy a saved adapter into the model's own. Raises ConfigError when it has other tensors."""
    saved = load_file(folder / _WEIGHTS) if (folder / _WEIGHTS).is_file() else {}
    own = {_saved_name(name): parameter for name, parameter in trained(model).items()}
    differing = [n for n in sorted(own.keys() | saved.keys()) if _shape(own.get(n)) != _shape(saved.get(n))]
    if differing:
        raise ConfigError(f"the adapter in '{folder}' has another shape ('{differing[0]}'); check lora.r and target")
    for name, parameter in own.items():
        parameter.copy_(saved[name])


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _saved_name(name: str) -> str:
    return "base_model.model." + name.replace(f".{_NAME}.", ".")


def _shape(tensor: torch.Tensor | None) -> torch.Size | None:
    return None if tensor is None else tensor.shape


def _targets(model: Any, target: Sequence[str]) -> list[str]:
    """The names of linear layers to adapt; those outside the decoder stack (heads) aren't among them."""
    modules = model.base_model.named_modules()
    found = sorted({name.rpartition(".")[2] for name, m in modules if isinstance(m, torch.nn.Linear)})
    if list(target) == [ALL_LINEAR]:
        return found
    for name in target:
        if name not in found:
            allowed = ", ".join([ALL_LINEAR, *found])
            raise ConfigError(f"lora.target: no linear layer '{name}'{did_you_mean(name, found)} (allowed: {allowed})")
    return list(target)


def _quantize(model: Any, names: Sequence[str]) -> None:
    """Replace the weights of the layers to adapt by 4-bit (NF4) ones, rounded once from the given ones."""
    try:
        import bitsandbytes as bnb

        probe = torch.ones(64, 64, device=model.device)
        bnb.functional.dequantize_4bit(*bnb.functional.quantize_4bit(probe, quant_type="nf4"))
    except Exception as error:  # whatever a backend that doesn't run here raises
        raise ConfigError(
            f"lora.quantize: 4bit doesn't run on this machine ({type(error).__name__}: {error}); use quantize: none, "
            "or install bitsandbytes with a backend for it: pip install 'upswing[qlora]'"
        ) from None
    chosen = [(n, m) for n, m in model.base_model.named_modules() if n.rpartition(".")[2] in names]
    for name, old in chosen:
        new = bnb.nn.Linear4bit(
            old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4", module=new)
        new.bias = old.bias
        # It would repack the weights in place for a faster forward without gradient, with other rounding.
        new.support_avx512bf16_for_cpu = False
        model.base_model.set_submodule(name, new.to(old.weight.device))
    model.is_loaded_in_4bit = True


def _dequantized(weight: torch.Tensor) -> torch.Tensor:
    """float32."""
    if hasattr(weight, "quant_state"):
        from peft.utils.integrations import dequantize_bnb_weight

        weight = dequantize_bnb_weight(weight)  # type: ignore[arg-type]
    return weight.float()
