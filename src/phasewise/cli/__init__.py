"""The `phasewise` command. Commands import torch only when they run, so that help and mistakes are quick."""

from phasewise.cli.app import main

__all__ = ["main"]
