"""A run on disk: its folder, small files, checkpoints and metrics, and the model that a checkpoint holds."""
