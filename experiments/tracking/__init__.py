"""Parts of experiments.dp_gradient_tracking: options, presets, how variants are built, budgets, pictures."""
