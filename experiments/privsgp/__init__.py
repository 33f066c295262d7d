"""Parts of experiments.privsgp_vr: options, presets, how variants are built, what each of them spends."""
