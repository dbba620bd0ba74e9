"""From messages to token ids: templates, tokenising and the worker pool they run in."""
