"""Ray: engines, environments, verifiers and further ranks of the learner as actors."""
