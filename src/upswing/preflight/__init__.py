"""Before a run: checks of a recipe, and advice from what was measured. Pure functions; `stages.preflight` measures."""
