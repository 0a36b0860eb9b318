"""Where examples come from: one module per source, all handing over prompts and completions."""
