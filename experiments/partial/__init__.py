"""Parts of experiments.embracing_fl: options, presets, models, costs, the paper's numbers, tables, pictures."""
