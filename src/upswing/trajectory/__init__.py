"""Tasks, trajectories and their exact tokens: types, chat rendering, validator, masks and the on-disk store."""
