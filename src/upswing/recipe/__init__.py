"""The recipe: YAML in, one frozen object out, every mistake named in one line before anything heavy is imported."""

from upswing.recipe.cluster import ClusterSection
from upswing.recipe.distill import DistillStage
from upswing.recipe.load import check_same, load_recipe, recipe_from
from upswing.recipe.models import DatasetSection, Recipe, VerifierSection
from upswing.recipe.offline import PairStage, PreferenceStage
from upswing.recipe.reward_model import RewardModelStage
from upswing.recipe.rl import RlStage
from upswing.recipe.rl_base import RlBase
from upswing.recipe.stages import EvalStage, Graduation, SftStage, Stage

__all__ = [
    "ClusterSection",
    "DatasetSection",
    "DistillStage",
    "EvalStage",
    "Graduation",
    "PairStage",
    "PreferenceStage",
    "Recipe",
    "RewardModelStage",
    "RlBase",
    "RlStage",
    "SftStage",
    "Stage",
    "VerifierSection",
    "check_same",
    "load_recipe",
    "recipe_from",
]
