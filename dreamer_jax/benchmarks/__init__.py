"""Everything that times: training, generation, data, checkpoints, export and kernels, on the machine at hand."""
