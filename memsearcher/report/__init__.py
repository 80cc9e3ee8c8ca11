"""The report: what the parameters name, as tables, plots and trajectories that one can read."""
