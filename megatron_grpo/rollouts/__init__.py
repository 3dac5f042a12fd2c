"""From prompts to groups: collecting, staleness, sources, and the store on disk."""
