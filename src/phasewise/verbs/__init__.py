"""The ten verbs: what each asks of a method, and what its family shares. One file per verb."""
