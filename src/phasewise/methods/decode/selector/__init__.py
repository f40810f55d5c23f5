"""Selectors of diffusion decoding, one per file: which masked rows of a block become final in this step."""
