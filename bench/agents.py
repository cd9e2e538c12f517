"""Two agent programs trained as they are, through the training proxy: an `openai` client's, and a LangGraph one.

    python bench/agents.py [--quick]

Each runs `recipes/agent_openai.yaml` (the tiny model, SFT on an expert that wastes a call 6 times out of 10, then RL)
with its own program. `NAME_sft` and `NAME_rl`: strict match in percent on the same test questions, sampled at
temperature 1, by the program, before and after RL. `NAME_gain_points`: the difference. `--quick` takes fewer RL steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import ROOT, Figure, cannot_run, describe_machine, finish

AGENTS = {"openai": "openai_agent", "langgraph": "langgraph_agent"}
QUICK = ["rl.steps=8", "test.tasks=64"]


def success(agent: str, changes: list[str], out: Path) -> dict[str, float]:
    """Strict match of each stage's weights, in percent."""
    from upswing.monitor.progress import Progress
    from upswing.recipe import load_recipe
    from upswing.stages.runner import run_recipe

    recipe = load_recipe(
        ROOT / "recipes" / "agent_openai.yaml", [f"agent.function=agents/{AGENTS[agent]}.py:run", *changes]
    )
    results = run_recipe(recipe, out, log=Progress(quiet=True)).results
    return {one["label"]: 100 * one["summary"]["components"]["strict_match"]["mean"] for one in results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer RL steps")
    args = parser.parse_args()
    try:
        import langchain_openai  # noqa: F401
        import langgraph  # noqa: F401
        import openai  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        return cannot_run(f"{error}; install with: pip install 'upswing[serve]' openai langgraph langchain-openai")
    print(describe_machine(("upswing", "torch", "openai", "langgraph", "langchain-openai")))
    figures: dict[str, Figure] = {}
    for agent in AGENTS:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found = success(agent, QUICK if args.quick else [], Path(folder) / "run")
        print(f"{agent}: {time.perf_counter() - started:.0f} s")
        figures |= {f"{agent}_{stage}": Figure(value) for stage, value in found.items()}
        figures[f"{agent}_gain_points"] = Figure(found["rl"] - found["sft"], target=10.0)
    return finish("agents", args.quick, figures)


if __name__ == "__main__":
    sys.exit(main())
