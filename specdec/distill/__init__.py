"""Training drafts on a target's own output: prompts, continuations with features, networks, losses, the loop."""
