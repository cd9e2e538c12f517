"""The recipe: YAML in, one frozen object out, every mistake named in one line before anything heavy is imported."""

from upswing.recipe.fields import Section
from upswing.recipe.load import load_recipe, recipe_from
from upswing.recipe.models import (
    DatasetSection,
    EngineSection,
    EnvSection,
    LearnerSection,
    LimitsSection,
    Recipe,
    VerifierSection,
)
from upswing.recipe.stages import EarlyWarning, EvalStage, Graduation, RlStage, SftStage, Stage

__all__ = [
    "DatasetSection",
    "EarlyWarning",
    "EngineSection",
    "EnvSection",
    "EvalStage",
    "Graduation",
    "LearnerSection",
    "LimitsSection",
    "Recipe",
    "RlStage",
    "Section",
    "SftStage",
    "Stage",
    "VerifierSection",
    "load_recipe",
    "recipe_from",
]
