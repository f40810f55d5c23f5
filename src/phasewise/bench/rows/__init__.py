"""Rows of `phasewise eval` that suit any model, whoever trained it: long texts, English pass keys, agreement."""
