"""bench/vllm.py reports what it hunts for, and what it was not asked to measure; vLLM itself is stood in for."""

import json
import runpy
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import vllm_engine  # noqa: E402
from vllm_engine import WrongVersions  # noqa: E402

FOUND = {"gap": [1e-5, 3e-5], "adapter_gap": [1e-5], "before": [1e-3]}
FOUND |= {"sync_s": [1.0], "swap_s": [0.1], "spanning": 2, "swapped_under": 1}


def outcome(monkeypatch, capsys, measure, *args):
    """(exit status, figures)."""
    monkeypatch.setattr(vllm_engine, "measure", measure)
    monkeypatch.setattr(vllm_engine, "describe_machine", lambda packages: "")
    monkeypatch.setattr(sys, "argv", ["vllm.py", "--vllm-python", sys.executable, *args])
    status = vllm_engine.main()
    said = capsys.readouterr().out.splitlines()
    return status, json.loads(said[-1])["figures"] if said[-1].startswith("{") else None


@pytest.mark.parametrize(
    ("args", "status", "gap"),
    [
        ((), 0, 2e-5),
        (("--parts", "http", "--dtype", "float32"), 0, 2e-5),
        (("--parts", "here"), 1, None),
        (("--dtype", "bfloat16"), 1, None),
    ],
)
def test_what_was_not_measured_falls_short(monkeypatch, capsys, args, status, gap):
    found, figures = outcome(monkeypatch, capsys, lambda *_: FOUND, *args)
    assert (found, figures["logprob_gap_fp32"]["value"]) == (status, pytest.approx(gap))
    assert figures["logprob_gap_fp32"]["target"] == 1e-3 and "weight_sync_seconds" in figures


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_the_wrong_version_fall_short(monkeypatch, capsys, dtype):
    def measure(part, python, its, quick):
        if part == "here" and its == dtype:
            raise WrongVersions("tokens of versions {1} after version 2")
        return FOUND

    status, figures = outcome(monkeypatch, capsys, measure)
    end = {"float32": "fp32", "bfloat16": "bf16"}
    assert status == 1 and {name: f["value"] for name, f in figures.items() if "wrong" in name} == {
        f"{part}wrong_versions_{end[its]}": float(part == "here_" and its == dtype)
        for its in end
        for part in ("", "here_")
    }


def test_what_can_not_run_is_no_verdict(monkeypatch, capsys):
    def measure(*args):
        raise RuntimeError("the server ended")

    assert outcome(monkeypatch, capsys, measure)[0] == 2


def test_the_child_tells_of_wrong_versions_in_its_result(monkeypatch, capsys):
    async def measured(engine, quick):
        raise WrongVersions("tokens of versions {1} after version 2")

    monkeypatch.setattr(vllm_engine, "measured", measured)
    monkeypatch.setattr(vllm_engine.VllmEngine, "here", lambda *args: None)
    monkeypatch.setattr(vllm_engine, "resolve_model", lambda name: name)
    vllm_engine.child("float32", True)
    said = capsys.readouterr().out
    done = type("Done", (), {"returncode": 0, "stdout": f"INFO\n{said}", "stderr": ""})
    monkeypatch.setattr(vllm_engine.subprocess, "run", lambda *args, **options: done)
    with pytest.raises(WrongVersions, match="after version 2"):
        vllm_engine.here("python", "float32", True)


def test_the_script_has_the_name_of_its_figures_and_not_of_a_package(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vllm.py"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCH / "vllm.py"), run_name="__main__")
    assert end.value.code == 2 and "--vllm-python" in capsys.readouterr().err
    assert PathFinder.find_spec("vllm", [str(BENCH)]) is None
