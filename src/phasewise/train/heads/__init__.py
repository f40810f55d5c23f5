"""Training of drafting heads: `phasewise train heads KIND`. The kinds are those of `kinds.py`, one file each."""
