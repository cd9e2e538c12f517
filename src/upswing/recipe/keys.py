"""Every key of a recipe as a Markdown page: `docs/recipe.md` is made by `python -m upswing.recipe.keys`."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from upswing.recipe import agent, cluster, distill, engine, lora, models, offline, reward_model, rl, rl_base, stages

SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("The recipe", models.Recipe),
    ("`env`", models.EnvSection),
    ("`agent`", agent.AgentSection),
    ("`dataset`", models.DatasetSection),
    ("`verifiers`, each", models.VerifierSection),
    ("`engine`", engine.EngineSection),
    ("`learner`", models.LearnerSection),
    ("`cluster`", cluster.ClusterSection),
    ("`limits`", models.LimitsSection),
    ("`stages`: `sft`", stages.SftStage),
    ("`graduation` of `sft`", stages.Graduation),
    ("`stages`: `rl`", rl.RlStage),
    ("`critic` of `rl`", rl_base.CriticSection),
    ("`curriculum` of `rl`", rl_base.CurriculumSection),
    ("`early_warning` of `rl` and `distill`", rl_base.EarlyWarning),
    ("`stages`: `preference`", offline.PreferenceStage),
    ("`stages`: `reward_model`", reward_model.RewardModelStage),
    ("`stages`: `distill`", distill.DistillStage),
    ("`lora` of a stage", lora.LoraSection),
    ("`stages`: `eval`", stages.EvalStage),
)

INTRO = """\
# Recipe keys

<!-- Made by `python -m upswing.recipe.keys > docs/recipe.md`; don't edit by hand. -->

A recipe is a YAML file: what all stages share, and the list of stages. Unknown, wrong and ineffective keys are refused
with one line before any model loads. Any key can be set on the command line, by its path or by the name of a stage:

    upswing run recipes/tiny.yaml seed=1 stages.1.lr=1e-4 rl.steps=20

`upswing run RECIPE --dry-run` checks a recipe and prints it with every default filled in.
"""


def keys_page() -> str:
    """The whole page."""
    parts = [INTRO]
    for title, section in SECTIONS:
        about = " ".join((section.__doc__ or "").split())
        rows = [
            f"| `{field.alias or name}` | {allowed(field)} | {default(field)} | {field.description} |"
            for name, field in section.model_fields.items()
        ]
        parts.append(
            f"## {title}\n\n{about}\n\n| key | allowed | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
        )
    return "\n".join(parts)


def default(field: FieldInfo) -> str:
    """The default as YAML writes it; `required` when there is none."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "its defaults"
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return f"`{words[value]}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


def allowed(field: FieldInfo) -> str:
    """The type in words, with its bounds."""
    bounds = _bounds(field.metadata)
    text = _words(field.annotation)
    return f"{text}, {bounds}" if bounds and text not in ("text", "list") else text


def _words(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{option}`" for option in inner)
    if origin in (Union, types.UnionType):
        options = [_words(option) for option in inner if option is not type(None)]
        return " or ".join(dict.fromkeys(options)) + (" or `null`" if type(None) in inner else "")
    if origin is Annotated:
        bounds = _bounds([fact for info in inner[1:] for fact in getattr(info, "metadata", [info])])
        words = _words(inner[0])
        return f"{words}, {bounds}" if bounds and words != "text" else words
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {bool: "true or false", int: "whole number", float: "number", str: "text", dict: "keys and values"}
    return "list" if origin is tuple else names.get(origin or annotation, str(annotation))


def _bounds(metadata: list[Any]) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = ((sign, getattr(fact, name, None)) for fact in metadata for name, sign in signs.items())
    return " and ".join(f"{sign} {value}" for sign, value in found if value is not None)


if __name__ == "__main__":
    print(keys_page(), end="")
